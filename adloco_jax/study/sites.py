"""The seconds of a round at sites that share a bucket, and which method reaches a loss first.

A site is a machine with a link of its own; the driver, the process that holds the run, is at one of
them. Each trains one or more workers, copies of the model. All that is exchanged goes through the
bucket, a store of objects on the network.
"""

import functools
import math
import time

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from adloco_jax.engine.spec import ProgramSpec
from adloco_jax.errors import ConfigError
from adloco_jax.settings import BatchingSettings, Settings, bytes_per_s

# By method: the updates and the synchronisations until 1.60 nats per byte, measured with four
# workers and a model of MEASURED_PARAMS parameters. Source: studies/RESULTS.md, "The front", which
# are the methods that no other one beats in both numbers.
MEASURED_PARAMS = 75_600
_FURTHEST = 10  # times MEASURED_PARAMS: of larger models the advice names no method
_MEASURED_UPDATES = 4  # updates to measure a machine's speed
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
    """Describe a round at sites with equal links, and say which method reaches a loss first.

    The methods are those of `FRONT`, and the loss the one until which they were measured, 1.60 nats
    per byte. For a model far larger than the measured one no method is named.

    Args:
      settings: The run's settings.
      spec: What the run's programs share on these devices, with the bytes of a synchronisation.
      link: Rate of each direction, such as "10Mbit/s".
      sites: Number of machines.
      tokens_per_s: Speed of each machine; None: as measured here.

    Returns:
      Two lines of text: the round's seconds, and the advice.

    Raises:
      ConfigError: If there are fewer than two sites, or `tokens_per_s` is not above 0.
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
    # Seconds to send all parameters once: `sync_bytes` are those of one fragment of them.
    sent_s = spec.sync_bytes * spec.outer.fragments / rate
    turns = math.ceil(workers / sites)  # workers of a site, one after another
    parts = {
        f"computing {num_updates} updates": turns * num_updates * update_s,
        "upload": turns * sent_s,
        "driver": (workers + 1) * sent_s,  # it gets each worker's parameters, and sends the result
        "download": sent_s,
    }
    terms = " + ".join(f"{name} {part_s:.3g} s" for name, part_s in parts.items())
    whole_round = (
        f"a round at {sites} sites with {link} each, {settings.outer.precision}:"
        f" {sum(parts.values()):.3g} s = {terms} ({tokens_per_s:,.0f} tokens/s, {source})"
    )
    advice = (
        f"which method ends first is not known for {spec.num_params:,} parameters: it was measured"
        f" at {MEASURED_PARAMS:,} (studies/RESULTS.md, The front)"
    )
    if spec.num_params <= _FURTHEST * MEASURED_PARAMS:
        advice = _advice(spec, update_s=update_s, sent_s=sent_s, sites=sites, rate=rate)
    return [whole_round, advice]


def _advice(spec: ProgramSpec, *, update_s: float, sent_s: float, sites: int, rate: float) -> str:
    """Say which method of `FRONT` reaches the loss first, and how much later the others do.

    A method's seconds are those of its updates and of its synchronisations, one after another. Data
    parallelism averages over a ring of all sites, the other methods through the bucket.

    Args:
      spec: What the run's programs share, with the bytes of its parameters.
      update_s: Seconds of one worker's update.
      sent_s: Seconds to send all parameters once over a link, in the run's precision.
      sites: Number of machines.
      rate: Rate of a link in each direction, in bytes/s.
    """
    seconds = {}  # by method
    for name, (num_updates, num_syncs) in FRONT.items():
        if name == "data_parallel":
            sync_s = ring_s(sites, spec.param_bytes, bandwidth=rate)
        else:
            # A worker uploads, the driver downloads from all sites and uploads, a worker downloads.
            sync_s = (1 + sites + 1 + 1) * sent_s
        seconds[name] = num_updates * update_s + num_syncs * sync_s
    in_order = sorted(seconds, key=lambda name: seconds[name])
    first = in_order[0]
    after = [f"{name} {seconds[name] / seconds[first]:.3g}" for name in in_order[1:]]
    return (
        f"to one loss, {first} ends first; times its seconds: {', '.join(after)} (measured with"
        f" four workers and {MEASURED_PARAMS:,} parameters: studies/RESULTS.md, The front)"
    )


def measured_tokens_per_s(batching: BatchingSettings, spec: ProgramSpec) -> float:
    """Measure the tokens per second of one worker's updates on these devices.

    A batch is the initial one, or a micro-batch if this is smaller. Parameters are zeros and all
    tokens are alike, because values do not change the speed.
    """
    size = batching.initial_batch_size
    if batching.max_batch_size is not None:
        size = min(size, batching.max_batch_size)
    # `spec` has the shapes of parameters and frozen weights, and of a row.
    params, base = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (spec.params, spec.base))
    loss_fn = spec.loss_fn
    if base is not None:  # frozen weights of a model with an adapter, which the loss takes too
        loss_fn = functools.partial(loss_fn, base=base)

    @jax.jit
    def update(params: PyTree, state: PyTree, rows_B: PyTree) -> tuple[PyTree, PyTree]:
        """Make one update of the inner optimizer; return the parameters and its state."""
        grads = jax.grad(loss_fn)(params, rows_B)
        changes, state = spec.inner_tx.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    state = spec.inner_tx.init(params)
    rows_B = jax.tree.map(lambda leaf: np.ones((size, *leaf.shape), leaf.dtype), spec.row)
    seconds = []
    for _ in range(_MEASURED_UPDATES):  # the first one compiles, so the fastest counts
        start_s = time.perf_counter()
        params, state = jax.block_until_ready(update(params, state, rows_B))
        seconds.append(time.perf_counter() - start_s)
    return size * spec.sequence_length / min(seconds)


def ring_s(num_members: int, num_bytes: float, *, bandwidth: float, latency_s: float = 0) -> float:
    """Return the seconds of a ring all-reduce of `num_bytes` over links of `bandwidth` bytes/s.

    Of n members, each sends an n-th of the bytes to the next one 2 (n - 1) times, and each time
    waits for the link's `latency_s`. Source: docs/algorithm.md, 6.
    """
    return 2 * (num_members - 1) * (num_bytes / num_members / bandwidth + latency_s)
