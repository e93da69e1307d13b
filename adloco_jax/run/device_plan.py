"""Plan the memory of a run on devices that are not here: `adloco plan CONFIG --device h100x8`.

Every program is compiled for the described device and not run, so the plan does not give times.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from ml_collections import ConfigDict
from tqdm import tqdm

from adloco_jax.config import validate
from adloco_jax.engine.inputs import classes
from adloco_jax.engine.programs import placement
from adloco_jax.engine.spec import Compiled, Spec
from adloco_jax.errors import ResourceError
from adloco_jax.loop.adloco import Control, after_merge, choose_members, start, with_workers
from adloco_jax.run.build import build_model, spec_of
from adloco_jax.run.choose import Choice, Mode, NothingFits, Tried, choose
from adloco_jax.run.machines import described
from adloco_jax.run.plan import reachable_keys, run_header
from adloco_jax.settings import Settings


def device_plan(config: ConfigDict, device: str) -> tuple[list[str], dict]:
    """Compile a run's programs for a described device, and describe their memory.

    Args:
      config: A config that `train` accepts; its data and weights are not read.
      device: A name as in `machines.described`, such as `h100x8`.

    Returns:
      Lines of Markdown, and the same data for JSON. If the field `fits` is False, no mode fits the
      device.

    Raises:
      ConfigError: See `validate` and `described`.
    """
    settings, machine, start_s = validate(config), described(device), time.perf_counter()

    def loss_of(mode: Mode):
        return build_model(settings, machine, mode)[1]

    spec = spec_of(settings, machine)
    budget = machine.budget(settings.batching.memory_frac)
    record: dict = {"device": device, "device_bytes": machine.device_bytes, "budget_bytes": budget}
    size = settings.batching.max_batch_size
    lines = [f"Compiled for {device}, not run.", ""]
    with _progress(device) as on_compile:
        try:
            choice = choose(settings, spec, loss_of, size=size, on_compile=on_compile)
        except NothingFits as error:
            tried = error.tried
            change = _smallest_change(settings, spec, loss_of)
            record |= {"fits": False, "change": change}
            lines += [f"- Nothing fits: {error}.", f"- {change}."]
        else:
            tried = choice.tried
            found, facts = _chosen(settings, choice)
            record |= facts
            lines += [*(f"- {line}" for line in run_header(settings, spec, size)), *found]
    record |= {"compile_s": time.perf_counter() - start_s, "tried": list(map(_record, tried))}
    lines += [f"- Compiled in {record['compile_s']:.0f} s.", "", *_table(record, tried, budget)]
    return lines, record


def _chosen(settings: Settings, choice: Choice) -> tuple[list[str], dict]:
    """Describe the chosen mode and micro-batch, as lines and as data."""
    spec, size = choice.programs.spec, choice.max_batch_size
    mode = Mode(spec.in_turn, spec.remat)
    reached = {key for c in _pools(settings, size) for key in reachable_keys(settings, spec, c)}
    moved = round_bytes(settings, spec)
    facts = {"fits": True, "mode": str(mode), "max_batch_size": size}
    facts |= {"model_shards": spec.model_shards, "programs": len(reached), "round_bytes": moved}
    return [
        f"- Fits: {mode}; micro-batch {size}; {spec.model_shards} devices share a model.",
        f"- {len(reached)} programs can be reached; a round sends {moved / 1e9:.2f} GB between"
        " devices.",
    ], facts


def _pools(settings: Settings, max_batch: int) -> list[Control]:
    """The pools of a run if trainers grow equally: first growth, then merges."""
    whole = start(settings, max_batch, whole_pool=True)
    pools = [start(settings, max_batch)]
    while len(pools[-1].owners) < len(whole.owners):
        trainers = range(len(whole.trainers))
        fewest = min(trainers, key=lambda m: (pools[-1].owners.count(m), m))
        count = pools[-1].owners.count(fewest)
        free = len(whole.owners) - len(pools[-1].owners)
        pools.append(with_workers(pools[-1], fewest, count + min(count, free)))
    while settings.merge.policy != "none" and len(pools[-1].trainers) > 1:
        members = choose_members(pools[-1], [0.0] * len(pools[-1].trainers), settings)
        pools.append(after_merge(pools[-1], members))
    return pools


def round_bytes(settings: Settings, spec: Spec) -> int:
    """Bytes that a round of the whole pool sends between devices of different workers."""
    control = start(settings, settings.batching.initial_batch_size, whole_pool=True)
    moved, sent = 0, spec.sync_bytes * spec.outer.fragments
    for group in classes(control, range(len(control.trainers)), spec):
        size = settings.batching.initial_batch_size
        at = placement(spec, group.key("steps", micro_batch_size=size))
        moved += at.moved_bytes(sent, len(group.trainers), len(group.workers))
    return moved


def _smallest_change(settings: Settings, spec: Spec, loss_of) -> str:
    """Find the largest pool that would fit, with equally many workers for each trainer."""
    ensemble, batching = settings.ensemble, settings.batching
    for each in range((ensemble.num_workers - 1) // ensemble.num_trainers, 0, -1):
        pool = each * ensemble.num_trainers
        fewer = dataclasses.replace(
            settings,
            ensemble=dataclasses.replace(
                ensemble,
                num_workers=pool,
                initial_workers=ensemble.initial_workers and min(ensemble.initial_workers, pool),
            ),
        )
        with contextlib.suppress(ResourceError):
            choose(fewer, spec, loss_of, size=batching.max_batch_size)
            return f"ensemble.num_workers={pool} would fit"
    return "With one worker for each trainer it does not fit either; take more or larger devices"


def _record(tried: Tried) -> dict:
    peaks = {name: peak._asdict() for name, peak in tried.peaks.items()}
    size = tried.max_batch_size
    return {"mode": str(tried.mode), "max_batch_size": size, "programs": peaks}


def _table(record: dict, tried: list[Tried], budget: int) -> list[str]:
    """Make a table of the programs of the chosen mode, or of the last mode that was tried."""
    named = [t for t in tried if str(t.mode) == record.get("mode")] or tried[-1:]
    rows = [
        f"| {name} | {peak.program / 1e9:.2f} | {peak.beside / 1e9:.2f} | {peak.total / 1e9:.2f} |"
        for name, peak in named[0].peaks.items()
    ]
    largest = max((peak.total for peak in named[0].peaks.values()), default=0)
    record["largest_bytes"] = largest
    share = largest / record["device_bytes"]
    return [
        "| program | its bytes, GB | state beside it, GB | sum, GB |",
        "|---|---|---|---|",
        *rows,
        f"| **largest**, {share:.0%} of {record['device_bytes'] / 1e9:.2f} GB; a run may use"
        f" {budget / 1e9:.2f} | | | **{largest / 1e9:.2f}** |",
        "",
        *(
            f"Tried: {t.mode}: "
            + (f"micro-batch {t.max_batch_size}." if t.max_batch_size else f"{t.fault}.")
            for t in tried
        ),
    ]


@contextlib.contextmanager
def _progress(device: str) -> Iterator:
    """Show the number of compilations on the terminal, if there is one."""
    with tqdm(desc=f"compiling for {device}", unit=" programs", leave=False, disable=None) as bar:

        def on_compile(compiled: Compiled) -> None:
            bar.set_postfix_str(str(compiled.key))
            bar.update()

        yield on_compile
