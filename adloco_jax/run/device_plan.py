"""Plan the memory of a run on devices that are not here: `adloco plan CONFIG --device h100x8`.

Every program of the run is compiled for the devices that the name describes. No program is run. So
the plan gives no times, but only how fast the compiled inner steps can be at most.
"""

import contextlib
import time
from collections.abc import Iterator

from ml_collections import ConfigDict
from tqdm import tqdm

from adloco_jax.config import validate
from adloco_jax.engine.programs import Programs, num_turns, placement
from adloco_jax.engine.spec import Compiled, Compiling, Machine, OnCompile
from adloco_jax.engine.work import count
from adloco_jax.errors import UserError, counted
from adloco_jax.loop.adloco import Control, after_merge, choose_members, start, with_workers
from adloco_jax.run.assemble import spec_of
from adloco_jax.run.choose import Choice, Mode, NothingFits, Tried, first_keys
from adloco_jax.run.folder import with_checkpoint
from adloco_jax.run.machines import described, more_chips, rates
from adloco_jax.run.plan import configured_choice, reachable_keys, round_bytes, run_header
from adloco_jax.settings import Settings


def device_plan(config: ConfigDict, device: str) -> tuple[list[str], dict]:
    """Compile a run's programs for devices that a name describes; report the memory they need.

    Args:
      config: A config that `train` accepts. The data and weights that it names are not read.
      device: The kind and number of devices, such as `h100x8`; see `machines.described`.

    Returns:
      The report as lines of Markdown, and the same figures as a dict for JSON. If the field `fits`
      of the dict is False, the run does not fit in the memory of the devices.

    Raises:
      ConfigError: If the config is invalid, if no devices have this name, or if the compiler for
        them is not installed.
    """
    settings, machine, start_s = validate(config), described(device), time.perf_counter()
    with contextlib.suppress(UserError):  # without the hub, the sizes describe the model
        settings = with_checkpoint(settings)
    budget = machine.budget(settings.batching.memory_frac)
    record: dict = {"device": device, "device_bytes": machine.device_bytes, "budget_bytes": budget}
    lines = [f"Compiled for {device}, not run.", ""]
    with _progress(device) as on_compile:
        try:
            choice = configured_choice(settings, machine, on_compile)
        except NothingFits as error:
            tried, bounds = error.tried, {}
            change = _smallest_change(settings, device, machine, on_compile)
            record |= {"fits": False, "change": change}
            lines += [f"- Nothing fits: {error}.", f"- {change}."]
        else:
            tried, spec = choice.tried, choice.programs.spec
            bounds = _bounds(settings, choice, device)
            found, facts = _chosen(settings, choice)
            record |= facts
            header = run_header(settings, spec, settings.batching.max_batch_size)
            lines += [*(f"- {line}" for line in header), *found]
    record |= {
        "compile_s": time.perf_counter() - start_s,
        "tried": [_record(t) | bounds.get(t.mode, {}) for t in tried],
    }
    lines += [f"- Compiled in {record['compile_s']:.0f} s.", "", *_table(record, tried, budget)]
    return lines, record


def _chosen(settings: Settings, choice: Choice) -> tuple[list[str], dict]:
    """Describe the chosen micro-batch, and how devices run their workers.

    Returns the description as lines of Markdown, and the same facts as a dict for JSON.
    """
    spec, size = choice.programs.spec, choice.max_batch_size
    mode = Mode(spec.in_turn, spec.remat)
    reached = {key for c in _pools(settings, size) for key in reachable_keys(settings, spec, c)}
    moved = round_bytes(settings, spec)
    facts = {"fits": True, "mode": str(mode), "max_batch_size": size}
    facts |= {"model_shards": spec.model_shards, "programs": len(reached), "round_bytes": moved}
    return [
        f"- Fits: {mode}; micro-batch {size}; {counted(spec.model_shards, 'device')} per model.",
        f"- {counted(len(reached), 'program')} can be reached; a round sends {moved / 1e9:.2f} GB"
        " between devices.",
    ], facts


def _pools(settings: Settings, max_batch: int) -> list[Control]:
    """Predict the stages of a run: which trainers it has, and how many workers belong to each.

    First the trainers grow: at each stage the trainer with the fewest workers doubles the number of
    its workers, until all workers of the run have started. Then, if trainers may merge, some of
    them merge at each stage, until one trainer is left.
    """
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


def _smallest_change(
    settings: Settings, device: str, machine: Machine, on_compile: OnCompile
) -> str:
    """Find the first of several changes with which the run fits in memory; describe it in words.

    A smaller number of workers is tried last, because it changes what the run computes.
    """
    for name, changed, devices in _changes(settings, device, machine):
        with contextlib.suppress(NothingFits):
            largest = configured_choice(changed, devices, on_compile).max_batch_size
            return f"{name.format(largest)} would fit"
    return "With one worker for each trainer it does not fit either; take more or larger devices"


def _changes(
    settings: Settings, device: str, machine: Machine
) -> Iterator[tuple[str, Settings, Machine]]:
    """Yield the changes to try: each as a name to print, the settings, and the devices.

    If a name contains `{}`, the caller puts the micro-batch there that fits after the change.
    """
    ensemble, count = settings.ensemble, len(machine.devices)

    def changed(group: str, **values: object) -> Settings:
        part = getattr(settings, group).model_copy(update=values)
        return settings.model_copy(update={group: part})

    if settings.model.remat is False:
        yield "model.remat=auto", changed("model", remat=None), machine
    if settings.batching.max_batch_size is not None:
        smaller = changed("batching", max_batch_size=None)
        yield "batching.max_batch_size={}", smaller, machine
    fewest = spec_of(settings, machine).model_shards
    for shards in (n for n in range(fewest + 1, count + 1) if count % n == 0):
        sharded = changed("ensemble", model_shards=shards)
        yield f"ensemble.model_shards={shards}", sharded, machine
    for more in more_chips(device):
        yield f"--device {more}", settings, described(more)
    for each in range((ensemble.num_workers - 1) // ensemble.num_trainers, 0, -1):
        pool = each * ensemble.num_trainers
        initial = ensemble.initial_workers and min(ensemble.initial_workers, pool)
        fewer = changed("ensemble", num_workers=pool, initial_workers=initial)
        yield f"ensemble.num_workers={pool}", fewer, machine


def _bounds(settings: Settings, choice: Choice, device: str) -> dict[Mode, dict]:
    """Bound the speed of the inner steps in each mode in which the run fits, by what is compiled.

    The result has for each mode the work of a device for one update of each of its workers that run
    at the same time, and the tokens per second of all devices.
    """
    bounds, chosen = {}, choice.programs
    for mode, size in ((t.mode, t.max_batch_size) for t in choice.tried if t.max_batch_size):
        programs = chosen
        if mode != Mode(chosen.spec.in_turn, chosen.spec.remat):
            programs = Programs(spec_of(settings, chosen.spec.machine, mode))
        spec, control = programs.spec, start(settings, size, whole_pool=True)
        keys = first_keys(control, settings, spec, size, accumulates=False)
        key = next(key for key in keys if key.kind in ("steps", "fragment"))
        at_once = len(key.owners) // num_turns(spec, key, placement(spec, key))
        work = count(programs[key].as_text()).times(1 / spec.num_micro_batches)
        tokens = at_once * size * spec.sequence_length
        tokens_per_s = tokens / rates(device).least_seconds(work)
        bounds[mode] = work._asdict() | {"most_tokens_per_s": tokens_per_s}
    return bounds


def _record(tried: Tried) -> dict:
    peaks = {name: peak._asdict() for name, peak in tried.peaks.items()}
    size = tried.max_batch_size
    return {"mode": str(tried.mode), "max_batch_size": size, "programs": peaks}


def _table(record: dict, tried: list[Tried], budget: int) -> list[str]:
    """Make a table of the memory that each program needs, in the chosen mode (way to run workers).

    If no mode fits, the table shows the mode that was tried last. The lines after the table say
    what was found for each mode. The bytes of the largest program are also stored in `record`.
    """
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
            f"Tried: {t.mode}: " + (_speed(found) if t.max_batch_size else f"{t.fault}.")
            for t, found in zip(tried, record["tried"], strict=True)
        ),
    ]


def _speed(found: dict) -> str:
    return (
        f"micro-batch {found['max_batch_size']}; an update takes {found['operations'] / 1e12:.3g}"
        f" TFLOP, {found['num_bytes'] / 1e9:.3g} GB and {found['kernels']:,.0f} kernels on each"
        f" device: at most {found['most_tokens_per_s']:,.0f} tokens/s, by the compiler's figures;"
        " not run."
    )


@contextlib.contextmanager
def _progress(device: str) -> Iterator[OnCompile]:
    """Show how many programs have been compiled, if the output is a terminal.

    The context manager yields the function to call before and after each compilation.
    """
    with tqdm(desc=f"compiling for {device}", unit=" programs", leave=False, disable=None) as bar:

        def on_compile(event: Compiling | Compiled) -> None:
            if isinstance(event, Compiled):
                bar.set_postfix_str(str(event.key))
                bar.update()

        yield on_compile
