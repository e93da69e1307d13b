"""Device memory: the needs of programs, and the micro-batch and sharding that fit."""

import dataclasses
import math
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from jaxtyping import PyTree

from adloco_jax.engine.programs import (
    Programs,
    ensemble_spec,
    needed_bytes,
    placement,
    workers_spec,
)
from adloco_jax.engine.spec import Kind, ProgramKey, Spec
from adloco_jax.errors import ResourceError

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


def peak_bytes(programs: Programs, key: ProgramKey, owners: tuple[int, ...]) -> int:
    """Bytes a device holds while a program runs: the program's, and the rest of the ensemble's."""
    state = ensemble_spec(
        programs.spec, owners, placement(programs.spec, ProgramKey("stats", owners))
    )
    taken = dict.fromkeys(_TAKES[key.kind])
    return needed_bytes(programs[key]) + _bytes_here(state.replace(**taken))


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
        tried = dataclasses.replace(spec, model_shards=shards)
        at = placement(tried, key)
        workers = workers_spec(tried, key, at).replace(inner_state_R=None)
        if tried.outer.own_params:
            workers = workers.replace(params_R=None)
        if _bytes_here((ensemble_spec(tried, owners, at), workers)) <= budget:
            return shards
    return count


def least_bytes(spec: Spec, owners: tuple[int, ...]) -> int:
    """Bytes that a device needs at least: the ensemble, its workers and one gradient.

    This is a closed form without compilation; activations are not counted.
    """
    key = ProgramKey("steps", owners)
    at = placement(spec, key)
    workers = workers_spec(spec, key, at).replace(inner_state_R=None)
    if spec.outer.own_params:
        workers = workers.replace(params_R=None)
    ensemble = ensemble_spec(spec, owners, at)
    return _bytes_here((ensemble, workers)) + spec.param_bytes // spec.model_shards


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
    programs: Programs,
    owners: tuple[int, ...],
    *,
    keys_of: Callable[[int], Iterable[ProgramKey]],
    sizes: Sequence[int],
    memory_frac: float | None,
) -> int:
    """The largest micro-batch whose programs fit a device, found by compilation.

    At most three micro-batches are compiled. Memory grows with the micro-batch by at most the need
    of the smallest one without the state, so a second micro-batch is known to fit. Memory grows
    linearly, so these two predict the largest.

    Args:
      programs: Keeps the programs that are compiled here for the run.
      owners: Trainer position of each worker at the start; merges only need less.
      keys_of: Gives the keys of the programs that a run with a given micro-batch needs.
      sizes: Candidates, ascending; the first is the initial batch.
      memory_frac: Share of a device's memory to plan with, see `Machine.budget`.

    Returns:
      One of the sizes.

    Raises:
      ResourceError: If the smallest size does not fit; the message says how much it needs.
    """
    spec = programs.spec
    budget, first = spec.machine.budget(memory_frac), sizes[0]
    peaks: dict[int, int] = {}

    def peak(size):
        if size not in peaks:
            peaks[size] = max(peak_bytes(programs, key, owners) for key in keys_of(size))
        return peaks[size]

    def largest(per_sequence):
        fits = [n for n in sizes if peak(first) + per_sequence * (n - first) <= budget]
        return max(fits, default=first)

    if peak(first) > budget:
        raise ResourceError(
            f"batching.initial_batch_size={first}: {len(owners)} workers of {max(owners) + 1}"
            f" trainers need {peak(first)} bytes on a device, have {budget} of"
            f" {spec.machine.device_bytes}; use fewer workers, a smaller batch or model, or"
            " model.remat"
        )
    at = placement(spec, ProgramKey("steps", owners))
    params_R = workers_spec(spec, ProgramKey("steps", owners), at).params_R
    resting = _bytes_here((ensemble_spec(spec, owners, at).replace(params_R=None), params_R))
    second = max(largest((peak(first) - resting) / first), *sizes[:2])
    if second > first:
        peak(largest((peak(second) - peak(first)) / (second - first)))
    return max(size for size, need in peaks.items() if need <= budget)
