"""Device memory: what programs need, what fits on a device, and how to replace large states.

A merge, or a worker that joins or leaves, replaces the whole stack of inner states. The old and the
new stack may not fit on a device together, because these states fill most of its memory. So some
leaves of the states are replaced at a time, and the old leaves are deleted before the next ones are
made.
"""

import dataclasses
import functools
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.merge import merge, reassign, spawn
from adloco_jax.core.types import Ensemble, take
from adloco_jax.engine.programs import (
    Programs,
    ensemble_spec,
    needed_bytes,
    placement,
    workers_spec,
)
from adloco_jax.engine.spec import Kind, ProgramKey, Spec, num_bytes

# Parts of the ensemble that are arguments of each kind of program. The other parts stay on the
# device while the program runs.
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

    program: int  # the program with its arguments
    beside: int  # the rest of the state

    @property
    def total(self) -> int:
        """Bytes of the program and of the rest of the state together."""
        return self.program + self.beside


def peak(programs: Programs, key: ProgramKey, owners: tuple[int, ...]) -> Peak:
    """Bytes of a device that are in use while the program that `key` identifies runs."""
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
    """The smallest number of devices that must share one worker's parameters to fit them in memory.

    Args:
      spec: The data that all programs share; `model_shards` is ignored.
      owners: Position of each worker's trainer at the start; after merges less memory is needed.
      memory_frac: Share of a device's memory that may be used, see `Machine.budget`.

    Returns:
      The smallest divisor of the number of devices with which the ensemble, the workers' parameters
      and their gradients fit, without activations; all devices if no divisor is enough.
    """
    budget, count = spec.machine.budget(memory_frac), len(spec.machine.devices)
    for shards in (n for n in range(1, count + 1) if count % n == 0):
        tried = dataclasses.replace(spec, model_shards=shards, in_turn=True)  # needs least
        if _round_bytes(tried, owners, accumulates=True) <= budget:
            return shards
    return count


def least_bytes(spec: Spec, owners: tuple[int, ...], *, accumulates: bool = False) -> int:
    """Lower bound of the bytes that a run needs on a device: all states and one gradient.

    The bound is computed without compilation; activations are not counted. Sums of gradients are
    counted if workers accumulate gradients.
    """
    held = _round_bytes(spec, owners, accumulates=accumulates)
    return held + spec.param_bytes // spec.model_shards


def _round_bytes(spec: Spec, owners: tuple[int, ...], *, accumulates: bool) -> int:
    """Bytes on a device of the ensemble, and of the workers' parameters and gradient sums."""
    key = ProgramKey("steps", owners, accumulates=accumulates)
    at = placement(spec, key)
    workers = workers_spec(spec, key, at).replace(inner_state_R=None)
    if spec.outer.own_params:
        workers = workers.replace(params_R=None)
    return _bytes_here((ensemble_spec(spec, owners, at), workers))


def resting_bytes(spec: Spec, owners: tuple[int, ...], *, own_params: bool = True) -> int:
    """Bytes on a device of the ensemble between two programs of a round.

    With `own_params` the workers' parameters are included.
    """
    key = ProgramKey("steps", owners)
    at = placement(spec, key)
    ensemble = ensemble_spec(spec, owners, at)
    params_R = workers_spec(spec, key, at).params_R
    return _bytes_here(ensemble.replace(params_R=params_R) if own_params else ensemble)


def merge_bytes(
    spec: Spec, owners: tuple[int, ...], members: tuple[int, ...], after: tuple[int, ...]
) -> Peak:
    """Largest number of bytes on a device while trainers merge and workers change trainers."""
    weights_n = np.ones(len(members), np.float32)
    return _replaced_bytes(spec, owners, merged, weights_n, members, after)


def spawn_bytes(spec: Spec, owners: tuple[int, ...]) -> Peak:
    """Largest number of bytes on a device while the last worker of the pool joins its trainer."""
    count = owners.count(owners[-1])
    return _replaced_bytes(spec, owners[:-1], spawned, owners[-1], count)


def _replaced_bytes(spec: Spec, owners: tuple[int, ...], change: Any, *arguments: Any) -> Peak:
    """Largest number of bytes on a device while the function `replace` changes an ensemble."""
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
    """Peak memory of this process so far, in bytes: of the host, and of each of these devices.

    A device's peak is None if its backend does not count memory, as on a CPU.
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
    """Find the largest micro-batch whose programs fit a device, by compiling a few sizes.

    At most three sizes are compiled: the smallest, one that keeps the device busy, and the one that
    these two predict. Memory is convex in the micro-batch, because the peak of a program is the
    largest peak of its phases. So between two compiled sizes a straight line is an upper bound.
    Beyond them memory may grow faster: at most in proportion to the bytes that the larger compiled
    size needs besides the state.

    Args:
      peak: Returns the bytes that a device needs for a size; it compiles the programs.
      sizes: The sizes to choose from, ascending; the first is the initial batch.
      budget: Bytes of a device that may be used.
      resting: Bytes of the state (parameters and optimizer states), which every size needs.
      busy: Number of sequences that keep the device busy.

    Returns:
      One of the sizes; None if the smallest does not fit.
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


PART_BYTES = 2**30  # limit of the inner states that are replaced at a time; at least one leaf


@functools.partial(jax.jit, static_argnums=(2, 3))
def merged(
    ensemble: Ensemble, weights_n: Array, members: tuple[int, ...], owners: tuple[int, ...]
) -> Ensemble:
    """Merge trainers (`core.merge`), then move workers (`core.reassign`); compiled."""
    return reassign(merge(ensemble, members, weights=weights_n), owners)


@functools.partial(jax.jit, static_argnums=(1, 2))
def spawned(ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
    """The function `core.spawn` (add workers to a trainer), compiled."""
    return spawn(ensemble, trainer, num_workers)


@functools.partial(jax.jit, static_argnums=1)
def taken(ensemble: Ensemble, trainers: tuple[int, ...]) -> Ensemble:
    """The function `core.take` (some trainers with their workers), compiled."""
    return take(ensemble, trainers)


def parts_of(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Divide a list of arrays, in order, into parts of at most `PART_BYTES`, or of one array."""
    part: list[Any] = []
    for leaf in leaves:
        if part and num_bytes([*part, leaf]) > PART_BYTES:
            yield part
            part = []
        part.append(leaf)
    if part:
        yield part


def replace(change: Any, ensemble: Ensemble, *arguments: Any) -> Ensemble:
    """Compute `change(ensemble, *arguments)` for a part of the inner states at a time.

    The old arrays of a part are deleted before the next part is computed, which saves memory.
    """
    leaves, structure = jax.tree.flatten(ensemble.inner_state_R)
    parts = list(parts_of(leaves))
    if len(parts) <= 1:
        return change(ensemble, *arguments)
    new_leaves = []
    for part in parts:
        alone = ensemble.replace(params_R=None, inner_state_R=part)
        new_leaves += change(alone, *arguments).inner_state_R
        for leaf in part:
            leaf.delete()
    rest = change(ensemble.replace(inner_state_R=None), *arguments)
    return rest.replace(inner_state_R=structure.unflatten(new_leaves))
