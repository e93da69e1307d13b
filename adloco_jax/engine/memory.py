"""What fits in the memory of a device: how it runs its workers, and the largest micro-batch.

A mode says whether workers run at once or in turn, and whether the backward pass recomputes layers
(docs/guides/devices.md). What it needs is known by compiling its programs.

The state of a run is its ensemble (trainers' and workers' parameters and optimizer states); the
gradient sums are those of workers that accumulate gradients over several micro-batches.

`spec`, a `ProgramSpec`, holds what all programs of the run share: its devices, loss, optimizers and
shapes. A key (`ProgramKey`) names a program by its kind and by the sizes for which it is compiled;
its layout says whose workers and which devices these are. `Control` is what the host knows of a
run: trainers, their workers and sizes. A budget is how many bytes of a device a run may use.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from adloco_jax.core.types import LossFn
from adloco_jax.engine.evaluate import loss_key
from adloco_jax.engine.inputs import group_by_size, round_keys
from adloco_jax.engine.programs import (
    Programs,
    needed_bytes,
)
from adloco_jax.engine.sharding import base_spec, bytes_here, ensemble_spec, placement, workers_spec
from adloco_jax.engine.spec import (
    Kernel,
    Kind,
    Layout,
    OnCompile,
    ProgramKey,
    ProgramSpec,
)
from adloco_jax.errors import ConfigError, ResourceError, counted, in_bytes
from adloco_jax.loop.adloco import Control, start
from adloco_jax.loop.control import RoundPlan
from adloco_jax.settings import BatchingSettings, EnsembleSettings, SwitchSettings

STEP_TOKENS = 16_384  # number of tokens that keeps a device busy


class Mode(NamedTuple):
    """How the workers of a device run, and whether layers are recomputed in the backward pass."""

    sequential: bool  # one worker after another, not all at once
    remat: bool  # layers are recomputed in the backward pass

    def __str__(self) -> str:
        """Say in words how workers run."""
        order = "one after another" if self.sequential else "at once"
        return f"workers {order}" + (", rematerialised" if self.remat else "")


# The preferred first: `choose` takes the first that fits.
MODES = (
    Mode(sequential=False, remat=False),
    Mode(sequential=True, remat=False),
    Mode(sequential=False, remat=True),
    Mode(sequential=True, remat=True),
)


# The ensemble's fields that each kind of program takes; the others stay on the devices, unused.
_TAKES: Mapping[Kind, tuple[str, ...]] = {
    "start": ("params_M",),
    "steps": ("inner_state_R", "params_R"),
    "outer": ("params_M", "outer_state_M", "average_M"),
    "fragment": ("params_M", "outer_state_M", "inner_state_R", "params_R", "average_M"),
    "flush": ("params_M", "outer_state_M", "params_R", "average_M"),
    "stats": ("params_M",),
    "loss": (),
}


class Peak(NamedTuple):
    """The bytes of a device's memory that are in use while a program runs, in two parts."""

    program: int  # bytes of the program, with its arguments and results
    beside: int  # bytes of the arrays of the run's state that are not arguments of the program

    @property
    def total(self) -> int:
        """All bytes in use: those of the program, and those of all other arrays of the state."""
        return self.program + self.beside


class NothingFits(ResourceError):
    """Error: the run does not fit in a device's memory in any mode; `peaks` are of the last one."""

    def __init__(self, fault: str, peaks: dict[str, Peak]):
        super().__init__(fault)
        self.peaks = peaks


class Choice(NamedTuple):
    """The result of `choose`: a run's programs in the chosen mode, and its largest micro-batch."""

    programs: Programs
    max_batch_size: int  # sequences of a micro-batch
    # Memory of each program that was compiled to choose, by name. On a GPU or TPU these are the
    # programs for `max_batch_size`. On a CPU they may be those of the first round only, which has a
    # smaller micro-batch, or none; `program_peaks` measures the others.
    peaks: dict[str, Peak]


def modes(remat: bool | None, platform: str) -> list[Mode]:
    """List the modes that a run may use, the preferred first.

    `remat` is the setting `model.remat`; None allows both. `platform` is that of JAX; on "cpu"
    workers always run in turn.
    """
    allowed = []
    for mode in MODES:
        if platform == "cpu" and not mode.sequential:
            continue
        if remat is None or remat == mode.remat:
            allowed.append(mode)
    return allowed


def choose(
    spec: ProgramSpec,
    loss_of: Callable[[Mode, Kernel], LossFn],
    ensemble: EnsembleSettings,
    batching: BatchingSettings,
    switch: SwitchSettings,
    *,
    allowed: Sequence[Mode],
    size: int | None = None,
    on_compile: OnCompile = lambda event: None,
) -> Choice:
    """Choose the mode of a run and the largest micro-batch, by compiling its programs.

    The mode is the first of the allowed ones that fits the largest candidate, or `STEP_TOKENS`
    tokens at a time, which keep a device busy. If there is none, it is the mode with the most
    tokens at a time. On a CPU it is the first that fits.

    Args:
      spec: What the run's programs share, in any mode.
      loss_of: Returns the loss for a mode and the kernel of attention.
      ensemble: The number of workers, of which all that may ever join are counted.
      batching: The candidates (`buckets`), the batch-size test, and the share of memory to use.
      switch: Says whether gradients may be accumulated.
      allowed: The modes to try, the preferred first.
      size: A micro-batch that is already known. On a CPU nothing is then compiled, and whether it
        fits is not checked. None: the candidates from `initial_batch_size` on are tried.
      on_compile: Called around each compilation.

    Returns:
      The choice. The caller closes its programs.

    Raises:
      NothingFits: If the least candidate fits in no mode.
    """
    is_cpu = spec.machine.platform == "cpu"
    if size is None:
        sizes = [n for n in batching.buckets if n >= batching.initial_batch_size]
    else:
        sizes = [size]
    if spec.examples_per_pass is not None:  # a CPU gains nothing by more rows than a pass takes
        sizes = [n for n in sizes if n <= max(spec.examples_per_pass, sizes[0])]

    fits: list[tuple[float, Choice]] = []  # with the tokens at a time; infinite if these suffice
    for mode in allowed:
        loss_fn = loss_of(mode, spec.attention)
        mode_spec = dataclasses.replace(
            spec, loss_fn=loss_fn, sequential=mode.sequential, remat=mode.remat
        )
        programs = Programs(mode_spec, on_compile)
        if is_cpu and size is not None:
            return Choice(programs, size, peaks={})
        try:
            choice = _largest_fitting(programs, sizes, ensemble, batching, switch)
        except NothingFits:
            programs.close()
            if mode == allowed[-1] and not fits:
                raise
            continue
        largest = choice.max_batch_size
        tokens = largest * tokens_of_a_row(mode_spec, ensemble.sizes(whole_pool=True))
        # Another mode would gain nothing.
        is_enough = tokens >= STEP_TOKENS or largest == sizes[-1] or is_cpu
        fits.append((math.inf if is_enough else tokens, choice))
        if is_enough:
            break

    _, best = max(fits, key=lambda pair: pair[0])  # of equal ones the first, the preferred
    for _, choice in fits:
        if choice is not best:
            choice.programs.close()
    return best


def tokens_of_a_row(spec: ProgramSpec, sizes: tuple[int, ...]) -> int:
    """Count the tokens on a device at a time if each worker has a micro-batch of one sequence.

    `sizes` has the number of each trainer's workers.
    """
    if spec.sequential:
        return spec.sequence_length
    # The mesh axes `trainer` and `worker` together divide the workers evenly over devices.
    mesh = placement(spec, Layout(sizes)).mesh.shape
    workers_of_a_device = sum(sizes) // (mesh["trainer"] * mesh["worker"])
    return spec.sequence_length * workers_of_a_device


def _largest_fitting(
    programs: Programs,
    sizes: Sequence[int],
    ensemble: EnsembleSettings,
    batching: BatchingSettings,
    switch: SwitchSettings,
) -> Choice:
    """Find the largest micro-batch whose programs fit on a device, by compiling programs.

    Args:
      programs: The programs of the run in one mode; those that are measured are compiled.
      sizes: Candidates, in sequences per worker, ascending; at least one.
      ensemble: The number of workers, of which all that may ever join are counted.
      batching: The first batch, the batch-size test, and the share of memory to use.
      switch: Says whether gradients may be accumulated.

    Returns:
      The programs, the largest candidate that fits, and the memory of each program for it. On a
      CPU with room to spare that memory is of the first round's programs, with the least candidate.

    Raises:
      NothingFits: If the least candidate does not fit; its `peaks` are those of that candidate.
    """
    spec = programs.spec
    first = sizes[0]
    first_pool = start(ensemble, batching, first)  # trainers with the workers of the first round
    whole_pool = start(ensemble, batching, first, whole_pool=True)  # and with all that may join
    workers = whole_pool.sizes  # the number of each trainer's workers
    budget = spec.machine.budget(batching.memory_frac)  # bytes of a device that a run may use
    least = least_bytes(spec, workers, accumulates=may_accumulate(batching, switch, first))
    peaks_of: dict[int, dict[str, Peak]] = {first: {}}  # by candidate, as far as measured

    def compiled_bytes(size: int) -> int:
        """Compile the programs for a candidate; return the most bytes in use while one runs."""
        pool = dataclasses.replace(whole_pool, max_batch_size=size)
        peaks_of[size] = program_peaks(pool, programs, batching, switch)
        return largest_peak(peaks_of[size])

    if least <= budget:  # else nothing needs to be compiled
        if spec.machine.platform == "cpu" and len(sizes) > 1:
            # Only the programs of the first round are compiled; others wait until they are needed.
            keys = first_keys(first_pool, batching, spec, first, accumulates=False)
            programs.prefetch(keys)
            peaks_of[first] = {str(key): peak(programs, key, workers) for key in keys}

            # What a program needs beyond the run's state grows in proportion to the micro-batch. If
            # the largest candidate fits by this estimate, no other is compiled.
            resting = held_bytes(spec, workers)
            growing = largest_peak(peaks_of[first]) - resting
            if resting + growing * sizes[-1] / first <= budget:
                return Choice(programs, sizes[-1], peaks_of[first])

        # The number of candidates that fit. As larger ones need more memory, bisection finds it by
        # compiling few of them.
        num_fit = bisect.bisect_right(sizes, budget, key=compiled_bytes)
        if num_fit > 0:
            largest = sizes[num_fit - 1]
            return Choice(programs, largest, peaks_of[largest])

    needed = max(least, largest_peak(peaks_of[first]))
    raise NothingFits(
        f"batching.initial_batch_size={first}: {counted(sum(workers), 'worker')} of"
        f" {counted(len(workers), 'trainer')} need {needed} bytes on a device, have"
        f" {budget} of {spec.machine.device_bytes}; use fewer workers, a smaller batch or model,"
        " shorter rows (data.sequence_length), or model.remat=auto",
        peaks_of[first],
    )


def largest_peak(peaks: Mapping[str, Peak]) -> int:
    """Return the most bytes of a device that are in use while one of the programs runs; 0 if none.

    `peaks` has the memory of each program.
    """
    return max((peak.total for peak in peaks.values()), default=0)


def program_peaks(
    pool: Control, programs: Programs, batching: BatchingSettings, switch: SwitchSettings
) -> dict[str, Peak]:
    """Compile the programs that a run with the trainers of `pool` calls; return each one's memory.

    They are those of a round with micro-batches of `pool.max_batch_size` sequences, of held-out
    losses and, with Streaming DiLoCo, of a flush, which synchronises what rounds have left
    unsynchronised. The result is by the name of the program's key.
    """
    spec = programs.spec
    size = pool.max_batch_size
    keys = first_keys(
        pool, batching, spec, size, accumulates=may_accumulate(batching, switch, size)
    )
    if spec.outer.leaves_unsynchronised:
        keys += [group.key("flush") for group in group_by_size(pool, pool.trainers, spec)]
    # Each key once; the held-out losses are computed with batches of the same size.
    keys = dict.fromkeys([*keys, loss_key(size)])
    return {str(key): peak(programs, key, pool.sizes) for key in keys}


def first_keys(
    control: Control, batching: BatchingSettings, spec: ProgramSpec, size: int, *, accumulates: bool
) -> list[ProgramKey]:
    """List the keys of the programs of a round in which all trainers have the micro-batch `size`.

    `control` has the trainers and their workers; `batching` says whether gradients are measured.
    With `accumulates`, the programs of a round that accumulates gradients come after those of a
    round that does not.
    """
    counts = [1]  # micro-batches of an update
    if accumulates:
        counts.append(2)  # the program is the same for any number above 1
    keys = []
    for count in counts:
        plan = RoundPlan(
            micro_batch_size=size, num_accum_steps=count, num_updates=spec.steps_per_round
        )
        plans = dict.fromkeys(control.trainers, plan)
        keys += round_keys(control, plans, batching, spec)
    return keys


def may_accumulate(batching: BatchingSettings, switch: SwitchSettings, size: int) -> bool:
    """Return whether a trainer may ever accumulate gradients over micro-batches of this size.

    `switch.mode` says what is done with a batch above `size`. A trainer accumulates once it
    requests a batch above `size`, unless such batches are clipped.
    """
    grows = batching.test != "constant" and size < batching.batch_cap
    return grows and switch.mode != "clip"


def peak(programs: Programs, key: ProgramKey, sizes: tuple[int, ...]) -> Peak:
    """Compile a program; return the bytes of a device's memory in use while the program runs.

    `sizes` has the number of each trainer's workers. The arrays of all of them are on the devices,
    whether the program takes them or not. Raises JaxRuntimeError if the compilation fails for
    another reason than memory.
    """
    try:
        needed = needed_bytes(programs[key])
    except jax.errors.JaxRuntimeError as error:
        # A TPU's compiler refuses a program that is too large, and states its size in MiB or GiB.
        stated = re.search(r"Used ([\d.]+)([MG]) of", str(error))
        if stated is None:
            raise
        number, unit = stated.groups()
        needed = int(float(number) * {"M": 2**20, "G": 2**30}[unit])

    # The state beside the program: the ensemble's fields that it does not take, and the frozen
    # weights, unless it computes losses.
    ensemble = ensemble_spec(programs.spec, Layout(sizes))  # shapes and shardings alone
    taken = dict.fromkeys(_TAKES[key.kind])  # the fields that it takes; these are set to None
    beside = [ensemble.replace(**taken)]
    if key.kind in ("start", "outer", "flush"):
        beside.append(base_spec(programs.spec, key.layout))
    return Peak(needed, bytes_here(beside))


def choose_model_shards(
    spec: ProgramSpec,
    sizes: tuple[int, ...],
    *,
    given: int | None,
    memory_frac: float | None,
) -> int:
    """Return the number of devices over which each worker's parameters are divided.

    That is `given`, the setting `ensemble.model_shards`, if it is not None. Otherwise it is the
    least divisor of the number of devices with which the run's state fits in the fraction
    `memory_frac` of each device's memory: ensemble, workers' parameters and gradient sums, without
    activations. `sizes` has the number of each trainer's workers.

    If the state fits with no divisor, the number of all devices is returned; the run is then
    refused by `require_room` or `choose`, or by a learner that has compiled a round's programs.

    Raises ConfigError if `given` does not divide the number of devices.
    """
    machine = spec.machine
    count = len(machine.devices)
    if given is not None:
        if count % given:
            raise ConfigError(
                f"ensemble.model_shards = {given}: does not divide the {count} devices"
            )
        return given
    for shards in range(1, count + 1):
        if count % shards == 0:
            tried = dataclasses.replace(spec, model_shards=shards)
            if least_state_bytes(tried, sizes) <= machine.budget(memory_frac):
                return shards
    return count


def require_room(spec: ProgramSpec, sizes: tuple[int, ...], memory_frac: float | None) -> None:
    """Raise ResourceError if a run's state and gradients need more memory than a run may use.

    `sizes` has the number of each trainer's workers; `memory_frac` is the setting of a run's share
    of a device's memory. Nothing is compiled, so a run may still turn out not to fit.
    """
    machine = spec.machine
    needed = least_state_bytes(spec, sizes)
    budget = machine.budget(memory_frac)
    if needed > budget:
        raise ResourceError(
            f"memory: {counted(len(sizes), 'trainer')} with {counted(sum(sizes), 'worker')} of"
            f" {spec.num_params:,} parameters need at least {in_bytes(needed)} on each device for"
            f" state and gradients, have {in_bytes(budget)} of"
            f" {in_bytes(machine.device_bytes)} (batching.memory_frac); adloco train quickstart"
            " fits here, and adloco plan CONFIG --device shows what a GPU would hold"
        )


def least_state_bytes(spec: ProgramSpec, sizes: tuple[int, ...]) -> int:
    """Bytes of a run's state and gradient sums on a device whose workers run one after another.

    They need the least memory then, as they share a sum. `sizes` has the number of each trainer's
    workers.
    """
    in_turn = dataclasses.replace(spec, sequential=True)
    return held_bytes(in_turn, sizes, accumulates=True)


def least_bytes(spec: ProgramSpec, sizes: tuple[int, ...], *, accumulates: bool = False) -> int:
    """Return a lower bound of the bytes that a run needs on a device; nothing is compiled.

    It counts what the device always holds, and the gradient of one worker, but no activations.
    `sizes` has the number of each trainer's workers; `accumulates` says whether there are sums of
    gradients too.
    """
    held = held_bytes(spec, sizes, accumulates=accumulates)
    gradient_bytes = spec.param_bytes // spec.model_shards
    return held + gradient_bytes


def held_bytes(spec: ProgramSpec, sizes: tuple[int, ...], *, accumulates: bool = False) -> int:
    """Bytes of the ensemble, workers' parameters, and sums of gradients if any, on one device.

    `sizes` has the number of each trainer's workers. With `accumulates` there are sums.
    """
    # The arrays of the ensemble and of its workers in a round; what both have is counted once.
    ensemble = ensemble_spec(spec, Layout(sizes)).replace(params_R=None)
    workers = workers_spec(spec, Layout(sizes), accumulates=accumulates)
    without_states = workers.replace(inner_state_R=None)
    held = (ensemble, without_states, base_spec(spec, Layout(sizes)))
    return bytes_here(held)
