"""The seconds of a round at sites that share a bucket, and which method reaches a loss first."""

import math
import time

import jax
import numpy as np
import optax

from adloco_jax.engine.spec import ProgramSpec
from adloco_jax.errors import ConfigError
from adloco_jax.settings import BatchingSettings, Settings, bytes_per_s

# Updates and synchronisations until 1.60 nats per byte, of four workers and so many parameters.
# Source: studies/RESULTS.md, "The front".
MEASURED_PARAMS = 75_600
_FURTHEST = 10  # times MEASURED_PARAMS: of larger models the advice names no method
FRONT = {
    "diloco, rounds of 55": (1382, 25.1),
    "diloco, rounds of 110": (1569, 14.3),
    "diloco, rounds of 220": (1949, 8.9),
    "diloco, rounds of 440": (2391, 5.4),
    "growing_pool": (1993, 11.2),
    "data_parallel": (1064, 1064.0),
    "one machine": (3227, 0.0),
}


def site_lines(
    settings: Settings,
    spec: ProgramSpec,
    *,
    link: str,
    sites: int,
    tokens_per_s: float | None = None,
) -> list[str]:
    """Describe a round at sites with equal links, and each method's seconds to the front's loss.

    Of a model far larger than those of the front no method is named, as none was measured. The
    driver is at one of the sites. Raises ConfigError for fewer than two sites, or no speed.

    Args:
      settings: Of the run.
      spec: Of the run, on these devices.
      link: Rate of each direction, such as "10Mbit/s".
      sites: Number of machines.
      tokens_per_s: Of each machine; None: as measured here.
    """
    if sites < 2:
        raise ConfigError(f"--sites {sites}: expected at least 2")
    if tokens_per_s is not None and not 0 < tokens_per_s < math.inf:
        raise ConfigError(f"--tokens-per-s {tokens_per_s}: expected a number above 0")
    source = "given"
    if tokens_per_s is None:
        source = "measured here"
        tokens_per_s = measured_tokens_per_s(settings.batching, spec)
    rate = bytes_per_s(link)
    workers = settings.ensemble.num_workers
    num_updates = settings.inner.steps_per_round
    update_s = settings.batching.initial_batch_size * spec.sequence_length / tokens_per_s
    sent_s = spec.sync_bytes * spec.outer.fragments / rate
    turns = math.ceil(workers / sites)  # workers of a site, one after another
    parts = {
        f"computing {num_updates} updates": turns * num_updates * update_s,
        "upload": turns * sent_s,
        "driver": (workers + 1) * sent_s,
        "download": sent_s,
    }
    advice = (
        f"which method ends first is not known for {spec.num_params:,} parameters: it was measured"
        f" at {MEASURED_PARAMS:,} (studies/RESULTS.md, The front)"
    )
    if spec.num_params <= _FURTHEST * MEASURED_PARAMS:
        advice = _advice(spec, update_s=update_s, sent_s=sent_s, sites=sites, rate=rate)
    return [
        f"a round at {sites} sites with {link} each, {settings.outer.precision}:"
        f" {sum(parts.values()):.3g} s = "
        + " + ".join(f"{name} {part_s:.3g} s" for name, part_s in parts.items())
        + f" ({tokens_per_s:,.0f} tokens/s, {source})",
        advice,
    ]


def _advice(spec: ProgramSpec, *, update_s: float, sent_s: float, sites: int, rate: float) -> str:
    """Say which method of the front reaches its loss first, and how much later the others do.

    `update_s` are the seconds of an update, `sent_s` those of sending an update's parameters once,
    `rate` is that of a link in bytes/s.
    """
    # A worker's upload, the driver's download of all, its upload, and a worker's download.
    sync_s = dict.fromkeys(FRONT, (sites + 3) * sent_s)
    sync_s["data_parallel"] = ring_s(sites, spec.param_bytes, bandwidth=rate)
    seconds = {name: n * update_s + syncs * sync_s[name] for name, (n, syncs) in FRONT.items()}
    first, *others = sorted(seconds, key=lambda name: seconds[name])
    after = [f"{name} {seconds[name] / seconds[first]:.3g}" for name in others]
    return (
        f"to one loss, {first} ends first; times its seconds: {', '.join(after)} (measured with"
        f" four workers and {MEASURED_PARAMS:,} parameters: studies/RESULTS.md, The front)"
    )


def measured_tokens_per_s(batching: BatchingSettings, spec: ProgramSpec) -> float:
    """Measure the tokens per second of one worker's updates on these devices."""
    size = batching.initial_batch_size
    if batching.max_batch_size is not None:
        size = min(size, batching.max_batch_size)
    params, base = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (spec.params, spec.base))
    frozen = {} if base is None else {"base": base}

    @jax.jit
    def update(params, state, rows_B):
        grads = jax.grad(spec.loss_fn)(params, rows_B, **frozen)
        changes, state = spec.inner_tx.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    state = spec.inner_tx.init(params)
    rows_B = jax.tree.map(lambda leaf: np.ones((size, *leaf.shape), leaf.dtype), spec.row)
    seconds = []
    for _ in range(4):  # the first compiles
        start_s = time.perf_counter()
        params, state = jax.block_until_ready(update(params, state, rows_B))
        seconds.append(time.perf_counter() - start_s)
    return size * spec.sequence_length / min(seconds)


def ring_s(num_members: int, num_bytes: float, *, bandwidth: float, latency_s: float = 0) -> float:
    """Seconds of a ring all-reduce of `num_bytes` over links of `bandwidth` bytes/s.

    Source: docs/algorithm.md, 6.
    """
    return 2 * (num_members - 1) * (num_bytes / num_members / bandwidth + latency_s)
