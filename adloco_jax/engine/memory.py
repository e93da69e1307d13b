"""Device memory: the needs of programs, the micro-batch and sharding that fit, and new stacks.

Merges, and workers that join or leave, replace a stack. The old and the new one may not fit a
device together, because the workers' inner states fill most of its memory. So some leaves of the
inner states are replaced at a time, and the old leaves are deleted before the next ones are made.
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

# Parts of the ensemble that are arguments of a program; the rest stays on the device.
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
    """Bytes of a device while a program runs."""

    program: int  # with its arguments
    beside: int  # the rest of the state

    @property
    def total(self) -> int:
        """All of them."""
        return self.program + self.beside


def peak_bytes(programs: Programs, key: ProgramKey, owners: tuple[int, ...]) -> int:
    """Bytes that a device holds while a program runs: the program's, and the ensemble's rest."""
    return peak(programs, key, owners).total


def peak(programs: Programs, key: ProgramKey, owners: tuple[int, ...]) -> Peak:
    """Bytes a device holds while a program runs: the program's, and the rest of the ensemble's."""
    state = ensemble_spec(
        programs.spec, owners, placement(programs.spec, ProgramKey("stats", owners))
    )
    taken = dict.fromkeys(_TAKES[key.kind])
    try:
        needed = needed_bytes(programs[key])
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler refuses what does not fit
        stated = re.search(r"Used ([\d.]+)([MG]) of", str(error))
        if stated is None:
            raise
        needed = int(float(stated[1]) * 2 ** {"M": 20, "G": 30}[stated[2]])
    return Peak(needed, _bytes_here(state.replace(**taken)))


def fewest_model_shards(spec: Spec, owners: tuple[int, ...], *, memory_frac: float | None) -> int:
    """Number of devices that must share a worker's parameters so that the arrays of a round fit.

    Args:
      spec: The data that all programs share; `model_shards` is ignored.
      owners: Trainer position of each worker at the start; merges only need less.
      memory_frac: Share of a device's memory to plan with, see `Machine.budget`.

    Returns:
      The smallest divisor of the number of devices with which the ensemble, the workers' parameters
      and their gradients fit, without activations; all devices if no divisor is enough.
    """
    budget, count = spec.machine.budget(memory_frac), len(spec.machine.devices)
    key = ProgramKey("steps", owners, accumulates=True)
    for shards in (n for n in range(1, count + 1) if count % n == 0):
        tried = dataclasses.replace(spec, model_shards=shards, in_turn=True)  # needs least
        at = placement(tried, key)
        workers = workers_spec(tried, key, at).replace(inner_state_R=None)
        if tried.outer.own_params:
            workers = workers.replace(params_R=None)
        if _bytes_here((ensemble_spec(tried, owners, at), workers)) <= budget:
            return shards
    return count


def least_bytes(spec: Spec, owners: tuple[int, ...], *, accumulates: bool = False) -> int:
    """Bytes that a device needs at least: the ensemble, its workers and one gradient.

    This is a closed form without compilation; activations are not counted. Workers that accumulate
    have sums of gradients besides.
    """
    key = ProgramKey("steps", owners, accumulates=accumulates)
    at = placement(spec, key)
    workers = workers_spec(spec, key, at).replace(inner_state_R=None)
    if spec.outer.own_params:
        workers = workers.replace(params_R=None)
    ensemble = ensemble_spec(spec, owners, at)
    return _bytes_here((ensemble, workers)) + spec.param_bytes // spec.model_shards


def resting_bytes(spec: Spec, owners: tuple[int, ...], *, own_params: bool = True) -> int:
    """Bytes on a device of the ensemble, and unless said otherwise of its workers' parameters."""
    key = ProgramKey("steps", owners)
    at = placement(spec, key)
    ensemble = ensemble_spec(spec, owners, at)
    params_R = workers_spec(spec, key, at).params_R
    return _bytes_here(ensemble.replace(params_R=params_R) if own_params else ensemble)


def merge_bytes(
    spec: Spec, owners: tuple[int, ...], members: tuple[int, ...], after: tuple[int, ...]
) -> Peak:
    """Bytes of a device, at most, while trainers merge and workers are reassigned."""
    weights_n = np.ones(len(members), np.float32)
    return _replaced_bytes(spec, owners, merged, weights_n, members, after)


def spawn_bytes(spec: Spec, owners: tuple[int, ...]) -> Peak:
    """Bytes of a device, at most, while the pool's last worker joins its trainer."""
    count = owners.count(owners[-1])
    return _replaced_bytes(spec, owners[:-1], spawned, owners[-1], count)


def _replaced_bytes(spec: Spec, owners: tuple[int, ...], change: Any, *arguments: Any) -> Peak:
    """Bytes of a device, at most, while `replace` changes a stack."""
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
    """Bytes of one device's share of arrays of these shapes and shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def measured_peaks() -> dict[str, int | list[int | None]]:
    """Peak memory of this process so far, in bytes: of the host and of each device.

    A device's peak is null if its backend does not count memory, as on a CPU.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device_peak_bytes": [
            (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
        ],
    }


def find_max_batch(
    peak: Callable[[int], int], *, sizes: Sequence[int], budget: int, resting: int, busy: int
) -> int | None:
    """The largest micro-batch whose programs fit a device, found by compiling, not by crashing.

    At most three are compiled: the smallest, one that keeps the device busy, and the one that these
    two predict. Memory is convex in the micro-batch, as a program's peak is the largest of its
    phases': a line between two sizes lies above it. Beyond them memory may grow faster than from
    one to the other, by as much as the larger one needs besides the state.

    Args:
      peak: Bytes that a device needs for a size, by compiling.
      sizes: To choose from, ascending; the first is the initial batch.
      budget: Bytes that a device has.
      resting: Bytes of the state, which every size needs.
      busy: Sequences that keep the device busy.

    Returns:
      One of the sizes; None if not even the smallest fits.
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
            room = 1.01 * budget  # padding of small arrays bends the line, and it is tried
        elif slope < most / 2:
            slope = most
        fits = [n for n in sizes if peaks[second] + slope * (n - second) <= room]
        third = max(fits, default=first)
        if third not in peaks:
            peaks[third] = peak(third)
    return max(size for size, need in peaks.items() if need <= budget)


PART_BYTES = 2**30  # of inner states that are replaced at a time; at least one leaf


@functools.partial(jax.jit, static_argnums=(2, 3))
def merged(
    ensemble: Ensemble, weights_n: Array, members: tuple[int, ...], owners: tuple[int, ...]
) -> Ensemble:
    """`core.merge` of the members, then `core.reassign` to the owners."""
    return reassign(merge(ensemble, members, weights=weights_n), owners)


@functools.partial(jax.jit, static_argnums=(1, 2))
def spawned(ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
    """`core.spawn`."""
    return spawn(ensemble, trainer, num_workers)


@functools.partial(jax.jit, static_argnums=1)
def taken(ensemble: Ensemble, trainers: tuple[int, ...]) -> Ensemble:
    """`core.take`."""
    return take(ensemble, trainers)


def parts_of(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Leaves in order, in parts of at most `PART_BYTES`, or of one leaf."""
    part: list[Any] = []
    for leaf in leaves:
        if part and num_bytes([*part, leaf]) > PART_BYTES:
            yield part
            part = []
        part.append(leaf)
    if part:
        yield part


def replace(change: Any, ensemble: Ensemble, *arguments: Any) -> Ensemble:
    """`change(ensemble, *arguments)`, one of the functions above; deletes large inner states."""
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
