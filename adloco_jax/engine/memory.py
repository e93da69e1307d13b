"""Device memory: what programs need, and what fits on a device."""

import dataclasses
import math
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.engine.programs import (
    Programs,
    ensemble_spec,
    merged,
    needed_bytes,
    parts_of,
    placement,
    spawned,
    workers_spec,
)
from adloco_jax.engine.spec import Kind, ProgramKey, Spec, num_bytes

# The fields of the ensemble that are arguments of each kind of program. The arrays of all other
# fields stay on the device, unused, while the program runs.
_TAKES: Mapping[Kind, tuple[str, ...]] = {
    "start": ("params_M",),
    "steps": ("inner_state_R", "params_R"),
    "outer": ("params_M", "outer_state_M"),
    "fragment": ("params_M", "outer_state_M", "inner_state_R", "params_R"),
    "flush": ("params_M", "outer_state_M", "params_R"),
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


def peak(programs: Programs, key: ProgramKey, owners: tuple[int, ...]) -> Peak:
    """Compute the bytes of a device's memory that are in use while a program runs.

    Args:
      programs: The programs of the run.
      key: Identifies the program. If the program is not compiled yet, it is compiled.
      owners: Position of each worker's trainer. The arrays of all these trainers and workers are on
        the devices, even if only some of them are arguments of the program.
    """
    state = ensemble_spec(
        programs.spec, owners, placement(programs.spec, ProgramKey("stats", owners))
    )
    taken = dict.fromkeys(_TAKES[key.kind])
    try:
        needed = needed_bytes(programs[key])
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses a program too large
        stated = re.search(r"Used ([\d.]+)([MG]) of", str(error))
        if stated is None:
            raise
        needed = int(float(stated[1]) * 2 ** {"M": 20, "G": 30}[stated[2]])
    return Peak(needed, _bytes_here(state.replace(**taken)))


def fewest_model_shards(spec: Spec, owners: tuple[int, ...], *, memory_frac: float | None) -> int:
    """Find the fewest devices over which a worker's parameters must be sharded to fit in memory.

    Args:
      spec: What all programs share; its field `model_shards` is ignored.
      owners: Position of each worker's trainer at the start; after merges less memory is needed.
      memory_frac: Share of a device's memory that may be used, see `Machine.budget`.

    Returns:
      A divisor of the number of devices: the smallest with which the ensemble, the workers'
      parameters and the sums of their gradients fit in each device's memory. Activations are not
      counted. If no divisor is large enough, the number of all devices.
    """
    budget, count = spec.machine.budget(memory_frac), len(spec.machine.devices)
    for shards in (n for n in range(1, count + 1) if count % n == 0):
        tried = dataclasses.replace(spec, model_shards=shards, in_turn=True)  # needs the least
        if _round_bytes(tried, owners, accumulates=True) <= budget:
            return shards
    return count


def least_bytes(spec: Spec, owners: tuple[int, ...], *, accumulates: bool = False) -> int:
    """Compute a lower bound of the bytes that a run needs on a device, without compiling programs.

    The bound counts the trainers' parameters, all optimizer states, the workers' parameters and one
    gradient. With `accumulates` it also counts the workers' sums of gradients. It does not count
    activations.
    """
    held = _round_bytes(spec, owners, accumulates=accumulates)
    return held + spec.param_bytes // spec.model_shards


def _round_bytes(spec: Spec, owners: tuple[int, ...], *, accumulates: bool) -> int:
    """Bytes of the ensemble and of the workers' parameters on one device, in the middle of a round.

    With `accumulates`, the bytes of the workers' sums of gradients are added.
    """
    key = ProgramKey("steps", owners, accumulates=accumulates)
    at = placement(spec, key)
    workers = workers_spec(spec, key, at).replace(inner_state_R=None)
    if spec.outer.own_params:
        workers = workers.replace(params_R=None)
    return _bytes_here((ensemble_spec(spec, owners, at), workers))


def resting_bytes(spec: Spec, owners: tuple[int, ...], *, own_params: bool = True) -> int:
    """Bytes that the ensemble (all trainers and workers) takes on one device between two programs.

    `own_params` says whether the workers' own parameters are counted too.
    """
    key = ProgramKey("steps", owners)
    at = placement(spec, key)
    ensemble = ensemble_spec(spec, owners, at)
    params_R = workers_spec(spec, key, at).params_R
    return _bytes_here(ensemble.replace(params_R=params_R) if own_params else ensemble)


def merge_bytes(
    spec: Spec, owners: tuple[int, ...], members: tuple[int, ...], after: tuple[int, ...]
) -> Peak:
    """Compute a device's peak memory while trainers merge and workers move to other trainers.

    Args:
      spec: What all programs of the run share.
      owners: Position of each worker's trainer before the merge.
      members: Positions of the trainers that merge. The first is the representative, the trainer
        that absorbs the others.
      after: Position of each worker's trainer after the merge.
    """
    weights_n = np.ones(len(members), np.float32)
    return _replaced_bytes(spec, owners, merged, weights_n, members, after)


def spawn_bytes(spec: Spec, owners: tuple[int, ...]) -> Peak:
    """Compute a device's peak memory while a new worker joins a trainer.

    `owners` has the position of each worker's trainer. The last entry is that of the new worker.
    """
    count = owners.count(owners[-1])
    return _replaced_bytes(spec, owners[:-1], spawned, owners[-1], count)


def _replaced_bytes(spec: Spec, owners: tuple[int, ...], change: Any, *arguments: Any) -> Peak:
    """Compute a device's peak memory while `replace` applies `change` to an ensemble."""
    at = placement(spec, ProgramKey("stats", owners))
    ensemble = ensemble_spec(spec, owners, at)
    leaves = jax.tree.leaves(ensemble.inner_state_R)
    parts = list(parts_of(leaves))
    if len(parts) <= 1:
        return Peak(needed_bytes(change.lower(ensemble, *arguments).compile()), 0)
    all_here, largest = _bytes_here(leaves), max(parts, key=num_bytes)
    alone = ensemble.replace(params_R=None, inner_state_R=largest)
    rest = ensemble.replace(inner_state_R=None)
    needs = [needed_bytes(change.lower(part, *arguments).compile()) for part in (alone, rest)]
    others = all_here - _bytes_here(largest) + _bytes_here(ensemble.params_R)
    return max(Peak(needs[0], others), Peak(needs[1], all_here), key=lambda peak: peak.total)


def _bytes_here(shapes: PyTree) -> int:
    """Bytes that arrays with these shapes and shardings take on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def measured_peaks(devices: Sequence[jax.Device]) -> dict[str, int | list[int | None]]:
    """Read the peak memory use of this process so far, in bytes.

    Returns:
      A dict with two entries. `host_peak_bytes` is the peak of the host's memory.
      `device_peak_bytes` is a list with the peak of each device in `devices`; a peak is None if the
      backend of the device does not count memory, as on a CPU.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device_peak_bytes": [
            (device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices
        ],
    }


def find_max_batch(
    peak: Callable[[int], int], *, sizes: Sequence[int], budget: int, resting: int, busy: int
) -> int | None:
    """Find a large micro-batch whose programs fit a device, by compiling at most three sizes.

    The first compiled size is the smallest of `sizes`. The second is the smallest size that keeps
    the device busy. The third is the largest size whose memory should fit. This is predicted from
    the memory of the first two sizes.

    For the prediction, a straight line is drawn through the memory of the two compiled sizes.
    Memory is convex in the size, because the peak of a program is the largest of the peaks of its
    phases. If the second size does not fit, the third lies between the first and the second, where
    the line is an upper bound of the memory. If the second size fits, the third is larger, and
    memory may grow faster than the line. The steepest possible growth is that all memory except the
    state grows in proportion to the size. If the line is less than half as steep as this growth,
    this growth is assumed instead of the line.

    Args:
      peak: Returns the bytes that a device needs for a size; it compiles the programs.
      sizes: The micro-batches to choose from, in sequences, ascending; the first is the initial
        batch.
      budget: Bytes of a device that may be used.
      resting: Bytes of the state (parameters and optimizer states), which every size needs.
      busy: Number of sequences that keep the device busy.

    Returns:
      The largest compiled size that fits; None if the smallest does not fit.
    """
    first = sizes[0]
    peaks = {first: peak(first)}
    if peaks[first] > budget:
        return None
    second = next((n for n in sizes if n >= busy), sizes[-1])
    if second > first:
        peaks[second] = peak(second)
        slope = (peaks[second] - peaks[first]) / (second - first)
        most = (peaks[second] - resting) / second
        room = budget
        if peaks[second] > budget:
            room = 1.01 * budget  # a margin for padding of small arrays; the size is compiled next
        elif slope < most / 2:
            slope = most
        fits = [n for n in sizes if peaks[second] + slope * (n - second) <= room]
        third = max(fits, default=first)
        if third not in peaks:
            peaks[third] = peak(third)
    return max(size for size, need in peaks.items() if need <= budget)
