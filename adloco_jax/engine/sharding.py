"""The device mesh of a compiled program, each array's sharding on the mesh, and resharding.

A compiled program has a mesh over its devices, by default all devices of all processes. Its axes:

  trainer  trainers, whose workers communicate only with one another
  worker   a trainer's workers, or all workers if the trainers do not divide over the devices
  data     devices that share a worker's batch
  model    devices over which a worker's parameters and optimizer state are sharded; they share the
           worker's batch too if the batch divides
  idle     devices that repeat the work of others, because no array can be divided further

A trainer's parameters are replicated over its workers, because the batch-size test and the round
start from them. Its outer state is sharded over all its devices, because only the synchronisation
reads it.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from adloco_jax.core.compress import Packed
from adloco_jax.core.types import Ensemble, block_size

_AXES = ("trainer", "worker", "data", "model", "idle")
POOL = ("trainer", "worker")
_SHARING = ("model", "data", "idle")


@dataclass(frozen=True)
class Placement:
    """A mesh of devices, and the sharding of each kind of array on the mesh."""

    mesh: Mesh

    def named(self, *axes: str | Sequence[str] | None) -> NamedSharding:
        """The sharding with each dimension divided over the given mesh axes; None: replicated."""
        return NamedSharding(self.mesh, P(*axes))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is copied to every device."""
        return self.named()

    @property
    def workers(self) -> NamedSharding:
        """Sharding of arrays [R, ...]: a worker's entry is on the devices that run the worker."""
        return self.named(POOL)

    @property
    def rates_TR(self) -> NamedSharding:
        """Sharding of arrays [T, R]: the column of a worker is on the devices that run it."""
        return self.named(None, POOL)

    def tokens_TRBL(self, batch_size: int) -> NamedSharding:
        """Sharding of tokens [T, R, B, L + 1]: a worker's batch is on the devices that run it."""
        return self.named(None, POOL, self._batch_axes(batch_size))

    def tokens_BL(self, batch_size: int) -> NamedSharding:
        """Sharding of one worker's tokens [B, L + 1]: the batch over the devices of the worker."""
        return self.named(self._batch_axes(batch_size))

    def params(self, shapes: PyTree) -> PyTree:
        """Shardings of one model's parameters: divided over the mesh axis `model`."""
        return jax.tree.map(lambda leaf: self._spread(leaf.shape, (), ("model",)), shapes)

    def by_worker(self, shapes_R: PyTree) -> PyTree:
        """Shardings of leaves [R, ...]: a worker's entry is on the devices that run the worker.

        On these devices it is divided over the mesh axis `model`.
        """
        return self._stacked(shapes_R, POOL, ("model",))

    def by_trainer(self, shapes_M: PyTree) -> PyTree:
        """Shardings of leaves [M, ...] that each worker reads whole.

        They are divided over the mesh axis `model`, and replicated over the workers of the trainer.
        """
        return self._stacked(shapes_M, "trainer", ("model",))

    def sharded(self, shapes_X: PyTree) -> PyTree:
        """Shardings of leaves [M, ...] or [R, ...], divided over all devices of the trainer."""
        return self._stacked(shapes_X, "trainer", (*_SHARING, "worker"))

    def reduce_scatter(self, tree_R: PyTree) -> PyTree:
        """While tracing, reshard leaves [R, ...] for a reduce-scatter over the workers.

        There are two steps, because in one step the partitioner would replicate the leaves. First
        a leaf is divided over the devices that share a worker. Then it is resharded as by
        `sharded`. A floating-point leaf without a dimension that divides over the workers skips the
        second step: its mean is an all-reduce, which moves as many bytes as reduce-scatter and
        all-gather together. A copy on every device would move R / 2 times as many.
        """
        in_parts = self._stacked(tree_R, POOL, _SHARING)
        parts_R = jax.lax.with_sharding_constraint(tree_R, in_parts)

        def target(leaf, at, part_at):
            if _is_packed(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return at
            divides = any("worker" in (axes or ()) for axes in at.spec)
            return at if divides else part_at

        to = jax.tree.map(target, tree_R, self.sharded(tree_R), in_parts, is_leaf=_is_packed)
        return jax.lax.with_sharding_constraint(parts_R, to)

    def all_gather(self, tree_M: PyTree) -> PyTree:
        """While tracing, all-gather leaves [M, ...]: reshard them from `sharded` to `by_trainer`.

        There are two steps, because in one step the partitioner would all-gather before the updates
        are quantised.
        """
        parts_M = jax.lax.with_sharding_constraint(tree_M, self.sharded(tree_M))
        return jax.lax.with_sharding_constraint(parts_M, self.by_trainer(parts_M))

    def ensemble(self, shapes: Ensemble) -> Ensemble:
        """Shardings of an ensemble between two rounds."""
        return jax.tree.map(lambda _: self.replicated, shapes).replace(
            params_M=self.by_trainer(shapes.params_M),
            outer_state_M=self.sharded(shapes.outer_state_M),
            inner_state_R=self.by_worker(shapes.inner_state_R),
            params_R=self.by_worker(shapes.params_R),
        )

    def moved_bytes(self, sync_bytes: int, num_trainers: int, num_workers: int) -> int:
        """Bytes that a synchronisation moves between devices of different workers, in total.

        With one device for each worker, this is the number of bytes that the ledger records
        (docs/algorithm.md, accounting). Workers that share a device move less. If a device has
        workers of several trainers, every device receives all trainers. With a precision below
        float32, a leaf without a dimension that divides over the workers is replicated to each
        worker, which moves more.
        """
        worker = self.mesh.shape["worker"]
        return (worker - 1) * (num_workers // worker + num_trainers) * sync_bytes

    def describe(self) -> str:
        """Describe how workers, batches and parameters are divided over devices; name idle ones."""
        size = self.mesh.shape
        pool = size["trainer"] * size["worker"]
        if self.mesh.size == 1:
            return "all workers on one device"
        parts = [f"workers in {pool} groups on {self.mesh.size} devices"]
        for axis, what in (("data", "batch"), ("model", "parameters")):
            if size[axis] > 1:
                parts.append(f"{size[axis]} share a worker's {what}")
        if size["idle"] > 1:
            idle = self.mesh.devices[..., 1:].reshape(-1)
            parts.append(f"idle, repeating others' work: {_names(idle)}")
        return "; ".join(parts)

    def draw(self, workers: Sequence[str]) -> list[str]:
        """List the groups of devices, with the workers that each group of devices runs."""
        size = self.mesh.shape
        groups = self.mesh.devices.reshape(size["trainer"] * size["worker"], -1)
        each = len(workers) // len(groups)
        return [
            f"  {_names(devices)}: worker {', '.join(workers[i * each : (i + 1) * each])}"
            for i, devices in enumerate(groups)
        ]

    def _batch_axes(self, batch_size: int) -> tuple[str, ...]:
        shared = self.mesh.shape["data"] * self.mesh.shape["model"]
        return ("data",) if batch_size % shared else ("data", "model")

    def _stacked(self, shapes: PyTree, lead: str | tuple[str, ...], over: Sequence[str]) -> PyTree:
        def spread(leaf):
            if _is_packed(leaf):  # whole blocks
                rows = self._spread(leaf.scales.shape[:2], (lead,), over)
                return jax.tree.map(lambda _: rows, leaf)
            return self._spread(leaf.shape, (lead,), over)

        return jax.tree.map(spread, shapes, is_leaf=_is_packed)

    def _spread(self, shape: tuple[int, ...], lead: tuple, over: Sequence[str]) -> NamedSharding:
        """The sharding that divides the largest possible dimension over the mesh axes `over`.

        If no dimension divides over all these axes, the last axes are left out.
        """
        if not shape:
            return self.replicated
        for count in range(len(over), 0, -1):
            devices = math.prod(self.mesh.shape[axis] for axis in over[:count])
            sizes = {shape[d]: d for d in range(len(lead), len(shape)) if shape[d] % devices == 0}
            if devices > 1 and sizes:
                dimension = sizes[max(sizes)]
                between = (None,) * (dimension - len(lead))
                return self.named(*lead, *between, tuple(over[:count]))
        return self.named(*lead)


def _is_packed(leaf: Any) -> TypeGuard[Packed]:
    return isinstance(leaf, Packed)


def _names(devices: np.ndarray) -> str:
    return "device " + " ".join(str(device.id) for device in devices.reshape(-1))


def arrange(
    owners: tuple[int, ...],
    batch_size: int = 1,
    *,
    devices: Sequence[jax.Device],
    model_shards: int = 1,
) -> Placement:
    """Arrange devices as a mesh for the trainers and workers of a program.

    Args:
      owners: Position of each worker's trainer.
      batch_size: Number of a worker's sequences, which devices may share.
      devices: The devices to use.
      model_shards: Devices that share one worker's parameters; divides the number of devices.

    Returns:
      A mesh with the workers divided over as many devices as possible. The remaining factor of the
      number of devices shares each worker's batch, as far as the batch divides.
    """
    chosen = np.array(devices)
    free = len(chosen) // model_shards
    num_trainers, num_workers = max(owners) + 1, len(owners)
    trainer = math.gcd(free, num_trainers)
    # A device's share of the pool must be whole trainers, or lie within one.
    if block_size(owners) is None or trainer < num_trainers < num_workers:
        trainer = 1
    worker = math.gcd(free // trainer, num_workers // trainer)
    data = math.gcd(free // (trainer * worker), batch_size)
    # In the order of the devices: a program and the source of its arguments must have the same.
    grid = chosen.reshape(trainer, worker, data, model_shards, -1)
    return Placement(Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * len(_AXES)))


def reshard(tree: PyTree, shardings: PyTree) -> PyTree:
    """Move arrays to other shardings, in any number of processes.

    Args:
      tree: JAX arrays, which move between devices, and host arrays. Every process must hold the
        parts of a host array that its devices receive.
      shardings: A tree of the same structure; an array with None is not moved.

    Returns:
      JAX arrays with these shardings; an array that already has its sharding is not copied.
    """
    leaves, structure = jax.tree.flatten(tree)
    at = structure.flatten_up_to(shardings)
    placed = [_put(leaf, to) for leaf, to in zip(leaves, at, strict=True)]
    moving = [i for i, leaf in enumerate(placed) if leaf is None]
    if moving:  # one program moves all these arrays
        moved = _move(tuple(at[i] for i in moving))([leaves[i] for i in moving])
        for i, leaf in zip(moving, moved, strict=True):
            placed[i] = leaf
    return structure.unflatten(placed)


def _put(leaf: Any, to: NamedSharding | None) -> Any:
    """The array with its new sharding; None if only a program of all processes can move it."""
    if to is None or isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(to, leaf.ndim):
        return leaf
    if to.is_fully_addressable:
        return jax.device_put(leaf, to)
    if isinstance(leaf, jax.Array):
        return None
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, to, lambda index: leaf[index])


@functools.cache
def _move(to: tuple[NamedSharding, ...]):
    return jax.jit(lambda leaves: leaves, out_shardings=list(to))


def fetch(tree: PyTree) -> PyTree:
    """Copy whole arrays to the host, in every process, one leaf at a time."""

    def get(leaf: jax.Array) -> np.ndarray:
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        assert isinstance(leaf.sharding, NamedSharding)
        return np.asarray(reshard(leaf, NamedSharding(leaf.sharding.mesh, P())))

    return jax.tree.map(get, tree)
