"""Choose how a device runs its workers, and the largest micro-batch, by compiling programs.

A device runs its workers at once or one after another. In both cases the backward pass can
recompute the layers, which saves memory and takes time. These four ways to run are called modes;
docs/guides/devices.md has a table of them. A micro-batch is the part of a worker's batch that a
device holds in memory at once; its size is counted in sequences.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from adloco_jax.core.types import LossFn
from adloco_jax.engine.evaluate import loss_key
from adloco_jax.engine.inputs import classes, group_trainers, round_keys
from adloco_jax.engine.memory import (
    Peak,
    find_max_batch,
    least_bytes,
    merge_bytes,
    peak,
    resting_bytes,
    spawn_bytes,
)
from adloco_jax.engine.programs import Programs, placement
from adloco_jax.engine.spec import OnCompile, ProgramKey, Spec
from adloco_jax.errors import ResourceError, counted
from adloco_jax.loop.adloco import Control, after_merge, choose_members, start
from adloco_jax.loop.control import RoundPlan
from adloco_jax.settings import Settings

STEP_TOKENS = 16_384  # number of tokens that keeps a device busy


class Mode(NamedTuple):
    """How the workers of a device run, and whether layers are recomputed in the backward pass."""

    in_turn: bool  # one worker after another, not all at once
    remat: bool  # layers are recomputed in the backward pass

    def __str__(self):
        order = "one after another" if self.in_turn else "at once"
        return f"workers {order}" + (", rematerialised" if self.remat else "")


MODES = (Mode(False, False), Mode(True, False), Mode(False, True), Mode(True, True))


class Tried(NamedTuple):
    """The result of trying one mode (a way to run workers): the largest micro-batch that fits.

    If not even the smallest micro-batch fits in memory, `max_batch_size` is None, and `fault` is an
    error message with the bytes that the smallest micro-batch needs. `peaks` has the memory that
    each program needs with the largest micro-batch that fits, or with the smallest if none fits. It
    is empty if nothing was compiled.
    """

    mode: Mode
    max_batch_size: int | None  # sequences of a micro-batch
    peaks: dict[str, Peak]  # the key is the name of the program
    fault: str = ""


class NothingFits(ResourceError):
    """Error: the run does not fit in a device's memory in any mode (way to run the workers)."""

    def __init__(self, tried: list[Tried]):
        super().__init__(tried[-1].fault)
        self.tried = tried


class Choice(NamedTuple):
    """The result of `choose`: a run's programs in the chosen mode, and its largest micro-batch."""

    programs: Programs
    max_batch_size: int  # sequences of a micro-batch
    tried: list[Tried]  # the results for all modes that were tried, with the chosen one


def modes(settings: Settings, platform: str) -> list[Mode]:
    """List the modes (ways to run workers) that a run's settings allow, in order of preference.

    On a CPU a device always runs its workers one after another.
    """
    remat = settings.model.remat
    return [
        mode
        for mode in MODES
        if (mode.in_turn or platform != "cpu") and remat in (None, mode.remat)
    ]


def choose(
    settings: Settings,
    spec: Spec,
    loss_of: Callable[[Mode], LossFn],
    *,
    size: int | None = None,
    allowed: Sequence[Mode] | None = None,
    on_compile: OnCompile = lambda event: None,
) -> Choice:
    """Choose the mode of a run (how devices run their workers), and the largest micro-batch.

    A `Mode` says whether a device's workers run at once or one after another, and whether layers
    are recomputed in the backward pass. The modes are tried in their order. For each mode the
    programs of the run are compiled, to find the largest micro-batch with which they all fit in
    memory. The candidates are the sizes in `batching.buckets` from the initial batch on, or only
    the given `size`.

    The first mode is chosen in which the largest candidate fits, or in which a device processes at
    least `STEP_TOKENS` tokens at a time. So many tokens keep a device busy. If there is no such
    mode, the mode with the most tokens at a time is chosen. On a CPU the first mode that fits is
    chosen; if `size` is given, this is the first mode, and nothing is compiled.

    Args:
      settings: The run's settings.
      spec: The data that all programs of the run share; the mode in it is replaced.
      loss_of: Returns the model's loss function for a mode.
      size: The micro-batch that is configured, or that an earlier process of the run has chosen.
        None: the largest that fits is chosen.
      allowed: The modes to choose from, in order of preference. None: all that `modes` returns.
      on_compile: Called before and after each compilation.

    Raises:
      NothingFits: If the run does not fit in memory in any of the modes.
    """
    batching, platform = settings.batching, spec.machine.platform
    allowed = modes(settings, platform) if allowed is None else allowed
    sizes = [n for n in batching.buckets if n >= batching.initial_batch_size]
    sizes = sizes if size is None else [size]
    control = start(settings, sizes[0], whole_pool=True)
    tried: list[Tried] = []
    found: dict[Mode, Programs] = {}
    tokens: dict[Mode, int] = {}
    won = None
    for mode in allowed:
        loss_fn = loss_of(mode)
        chosen = dataclasses.replace(spec, loss_fn=loss_fn, in_turn=mode.in_turn, remat=mode.remat)
        programs = found[mode] = Programs(chosen, on_compile)
        if platform == "cpu" and size is not None:
            return Choice(programs, size, [Tried(mode, size, {})])
        tried.append(_try(settings, programs, sizes, mode))
        largest = tried[-1].max_batch_size
        if largest is None:
            continue
        tokens[mode] = largest * tokens_of_a_row(chosen, tuple(control.owners))
        if tokens[mode] >= STEP_TOKENS or largest == sizes[-1] or platform == "cpu":
            won = mode
            break
    if not tokens:
        raise NothingFits(tried)
    best = won or max(tokens, key=lambda mode: tokens[mode])
    for mode, programs in found.items():
        if mode != best:
            programs.close()
    largest = next(t.max_batch_size for t in tried if t.mode == best)
    assert largest is not None
    return Choice(found[best], largest, tried)


def tokens_of_a_row(spec: Spec, owners: tuple[int, ...]) -> int:
    """Return how many tokens a device processes at a time with micro-batches of one sequence.

    If workers run one after another, these are the tokens of one sequence. If they run at once,
    they are the tokens of one sequence for each worker of the device.
    """
    mesh = placement(spec, ProgramKey("steps", owners)).mesh.shape
    at_once = len(owners) // (mesh["trainer"] * mesh["worker"])
    return spec.sequence_length * (1 if spec.in_turn else at_once)


def _try(settings: Settings, programs: Programs, sizes: Sequence[int], mode: Mode) -> Tried:
    """Find the largest micro-batch whose programs fit in memory if workers run in the given mode.

    `find_max_batch` compiles at most three of `sizes`, and returns the largest of these that fits.
    """
    spec, batching = programs.spec, settings.batching
    machine, first = spec.machine, sizes[0]
    budget = machine.budget(batching.memory_frac)
    owners = tuple(start(settings, first, whole_pool=True).owners)
    least = least_bytes(spec, owners, accumulates=accumulates(settings, first))
    needs: dict[int, dict[str, Peak]] = {}
    moves = _moves(settings, spec) if least <= budget else {}

    def largest_peak(size: int) -> int:
        needs[size] = program_peaks(settings, programs, size, moves)
        return max(peak.total for peak in needs[size].values())

    largest = None
    if least <= budget:
        resting, busy = resting_bytes(spec, owners), STEP_TOKENS // tokens_of_a_row(spec, owners)
        largest = find_max_batch(
            largest_peak, sizes=sizes, budget=budget, resting=resting, busy=max(busy, 1)
        )
    if largest is not None:
        return Tried(mode, largest, needs[largest])
    needed = max([least, *(peak.total for peak in needs.get(first, {}).values())])
    return Tried(
        mode,
        None,
        needs.get(first, {}),
        f"batching.initial_batch_size={first}: {counted(len(owners), 'worker')} of"
        f" {counted(max(owners) + 1, 'trainer')} need {needed} bytes on a device, have"
        f" {budget} of {machine.device_bytes}; use fewer workers, a smaller batch or model"
        + ("" if mode.remat or settings.model.remat is None else ", or model.remat"),
    )


def program_peaks(
    settings: Settings, programs: Programs, size: int, moves: dict[str, Peak]
) -> dict[str, Peak]:
    """Compile the programs of a run for a micro-batch; return the memory that each one needs.

    This is the memory of one device. In the result the key is the name of the program. The result
    also has the entries of `moves`: the memory that merges and joins need, which does not depend on
    the micro-batch.
    """
    spec, control = programs.spec, start(settings, size, whole_pool=True)
    owners, trainers = tuple(control.owners), range(len(control.trainers))
    keys = first_keys(control, settings, spec, size, accumulates=accumulates(settings, size))
    keys.append(loss_key(size))
    if settings.outer.leaves_unsynchronised:
        keys += [group.key("flush") for group in classes(control, trainers, spec)]
    peaks = {str(key): peak(programs, key, owners) for key in dict.fromkeys(keys)}
    if len(trainers) > 1 and accumulates(settings, size) and not spec.by_position:
        peaks |= _unequal_peaks(settings, programs, control)
    return peaks | moves


def _moves(settings: Settings, spec: Spec) -> dict[str, Peak]:
    """Return the memory that the first merge of trainers, and the last join of a worker, need.

    This memory of a device does not depend on the micro-batch. The result has no entry for a merge
    if trainers never merge, and none for a join if all workers start at once.
    """
    control, peaks = start(settings, 1, whole_pool=True), {}
    owners, num_trainers = tuple(control.owners), len(control.trainers)
    shape = f"M={num_trainers} R={len(owners)}"
    if settings.merge.policy != "none" and num_trainers > 1:
        members = choose_members(control, [0.0] * num_trainers, settings)
        after = tuple(after_merge(control, members).owners)
        peaks[f"merge {shape}"] = merge_bytes(spec, owners, members, after)
    if settings.ensemble.initial_workers is not None and len(owners) > num_trainers:
        peaks[f"growth {shape}"] = spawn_bytes(spec, owners)
    return peaks


def _unequal_peaks(settings: Settings, programs: Programs, control: Control) -> dict[str, Peak]:
    """Return the memory of the programs of a round in which only the last trainer accumulates.

    Trainers with different sizes run in separate groups. While the largest group runs, the states
    of all trainers stay on the device, and their bytes are counted too.
    """
    spec, size = programs.spec, control.max_batch_size
    plans = dict.fromkeys(
        range(len(control.trainers)), RoundPlan(size, 1, settings.inner.steps_per_round)
    )
    plans[len(plans) - 1] = plans[0]._replace(num_accum_steps=2)
    group = max(group_trainers(control, plans, spec), key=lambda group: len(group.workers))
    kept = resting_bytes(spec, tuple(control.owners), own_params=False)
    keys = [group.key("start"), group.steps_key(), group.key("outer")]
    if spec.outer.own_params:
        keys = [group.steps_key()._replace(kind="fragment", owners=group.owners)]
    peaks = {}
    for key in keys:
        found = peak(programs, key, group.owners)
        peaks[f"{key} of unequal trainers"] = found._replace(beside=found.beside + kept)
    return peaks


def first_keys(
    control: Control, settings: Settings, spec: Spec, size: int, *, accumulates: bool
) -> list[ProgramKey]:
    """List the keys of the programs of a round in which all trainers have the same micro-batch.

    A key (`ProgramKey`) has the kind of a program, and the sizes for which it is compiled. `size`
    is the micro-batch in sequences. With `accumulates`, the list has also the keys of a round in
    which all trainers accumulate the gradients of two micro-batches for each update.
    """
    keys = []
    for count in (1, 2) if accumulates else (1,):
        plan = RoundPlan(size, count, settings.inner.steps_per_round)
        plans = dict.fromkeys(range(len(control.trainers)), plan)
        keys += round_keys(control, plans, settings, spec)
    return keys


def accumulates(settings: Settings, size: int) -> bool:
    """Whether a trainer may later accumulate gradients over several micro-batches of this size."""
    batching = settings.batching
    grows = batching.test != "constant" and size < batching.batch_cap
    return grows and settings.switch.mode != "clip"
