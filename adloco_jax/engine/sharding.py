"""The device mesh of a compiled program, each array's shape and sharding on it, and resharding.

The mesh axes: `trainer` divides trainers, `worker` workers, `data` a worker's batch, `model` its
parameters and state (and the batch, if divisible); along `idle`, devices repeat the same work. The
first two together are POOL. A reduce-scatter sums arrays over devices and leaves each a part of the
sum; an all-gather gives each device all parts; an all-reduce is both. A `Packed` is an array that
is quantised to be sent: it has a code for each number (`codes`), and one of its `scales` for each
block of numbers.

`spec`, a `ProgramSpec`, holds what all programs of the run share: its devices, the shapes of one
model's parameters, and the optimizers. A layout (`Layout`) says whose workers arrays belong to: the
number of each trainer's workers, the rows of a micro-batch, and the devices; its `devices` are None
if all are meant.

Axes of arrays: M trainers, R workers, X either of them, T micro-batches, B rows, L tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from adloco_jax.core.compress import Packed
from adloco_jax.core.outer import start_round
from adloco_jax.core.types import Ensemble, Workers, init
from adloco_jax.engine.spec import Layout, ProgramSpec

_AXES = ("trainer", "worker", "data", "model", "idle")
POOL = ("trainer", "worker")  # the axes that divide the workers
_SHARING = ("model", "data", "idle")  # the axes along which devices share one worker


@dataclass(frozen=True)
class Placement:
    """A mesh of devices, and the sharding of each kind of array on the mesh."""

    mesh: Mesh

    def named(self, *axes: str | Sequence[str] | None) -> NamedSharding:
        """Return the sharding that divides each dimension of an array over the given mesh axes.

        An axis is named for each dimension, from the first on: one name, several, or None.
        """
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
        """Sharding of tokens [T, R, B, L + 1]: a worker's batch is on the devices that run it.

        `batch_size` is B; it decides over how many of these devices the batch can be divided.
        """
        return self.named(None, POOL, self._batch_axes(batch_size))

    def tokens_BL(self, batch_size: int) -> NamedSharding:
        """Sharding of one worker's tokens [B, L + 1]: its devices share the batch.

        `batch_size` is B; it decides over how many of these devices the batch can be divided.
        """
        return self.named(self._batch_axes(batch_size))

    def params(self, shapes: PyTree) -> PyTree:
        """Shardings of one model's parameters: each leaf is divided over the mesh axis `model`."""
        return jax.tree.map(lambda leaf: self._spread(leaf.shape, (), ("model",)), shapes)

    def by_worker(self, shapes_R: PyTree) -> PyTree:
        """Shardings of leaves [R, ...]: an entry is on its worker's devices, split over `model`."""
        return self._stacked(shapes_R, POOL, ("model",))

    def by_trainer(self, shapes_M: PyTree) -> PyTree:
        """Shardings of leaves [M, ...], replicated over a trainer's workers, split over `model`."""
        return self._stacked(shapes_M, "trainer", ("model",))

    def sharded(self, shapes_X: PyTree) -> PyTree:
        """Shardings of leaves [M, ...] or [R, ...] over all axes but `trainer`, if possible."""
        return self._stacked(shapes_X, "trainer", (*_SHARING, "worker"))

    def reduce_scatter(self, tree_R: PyTree) -> PyTree:
        """While tracing, reshard leaves [R, ...] so that workers can be summed by a reduce-scatter.

        Before, a device has entries of its own worker only. Afterwards it has a smaller part of the
        entries, but of all workers of a trainer, so that it can sum them. There are two steps: each
        leaf is divided over the devices of its worker, then over the workers. In one step, XLA's
        partitioner would copy the whole leaf to every device.

        A float leaf that cannot be divided over the workers stays as it is after the first step;
        its sum is then an all-reduce, which moves as many bytes as both collectives. Copies to
        every device would be R / 2 times as many.
        """
        first_shardings = self._stacked(tree_R, POOL, _SHARING)
        parts_R = jax.lax.with_sharding_constraint(tree_R, first_shardings)

        def second_sharding(leaf: Any, sharded: Any, first: Any) -> Any:
            """Return `sharded`, or `first` for a float leaf that is not divided over workers."""
            # Codes, bits and booleans are not summed as they are: a device needs all workers'.
            if _is_packed(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                return sharded
            # An entry of a spec is None, the name of an axis, or a tuple of names.
            is_divided = any("worker" in (axes or ()) for axes in sharded.spec)
            return sharded if is_divided else first

        second_shardings = jax.tree.map(
            second_sharding, tree_R, self.sharded(tree_R), first_shardings, is_leaf=_is_packed
        )
        return jax.lax.with_sharding_constraint(parts_R, second_shardings)

    def all_gather(self, tree_M: PyTree) -> PyTree:
        """While tracing, copy each trainer's entry of leaves [M, ...] to its workers' devices.

        Leaves are divided over all these devices first. Otherwise XLA would all-gather the updates
        before it quantises them, and so move more bytes.
        """
        parts_M = jax.lax.with_sharding_constraint(tree_M, self.sharded(tree_M))
        return jax.lax.with_sharding_constraint(parts_M, self.by_trainer(parts_M))

    def ensemble(self, shapes: Ensemble) -> Ensemble:
        """Shardings of all arrays of an ensemble (trainers and workers) between two rounds.

        `shapes` is an ensemble with shapes in place of arrays; a field that is None stays so. What
        belongs to a worker is on the worker's devices (`by_worker`). A trainer's parameters, and
        their averages (`average_M`), are on the devices of each of its workers (`by_trainer`).
        Outer states, which only the outer update reads, are divided over all these devices
        (`sharded`).
        """
        # What is not named here, the number of the round, is on every device.
        return jax.tree.map(lambda _: self.replicated, shapes).replace(
            params_M=self.by_trainer(shapes.params_M),
            # Only the outer update reads it, so no device needs a whole copy.
            outer_state_M=self.sharded(shapes.outer_state_M),
            inner_state_R=self.by_worker(shapes.inner_state_R),
            params_R=self.by_worker(shapes.params_R),
            average_M=self.by_trainer(shapes.average_M),
        )

    def describe(self) -> str:
        """Say in a few words how workers, batches and parameters are divided, and what is idle."""
        if self.mesh.size == 1:
            return "all workers on one device"
        size = self.mesh.shape
        num_groups = size["trainer"] * size["worker"]
        parts = [f"workers in {num_groups} groups on {self.mesh.size} devices"]
        for axis, what in (("data", "batch"), ("model", "parameters")):
            if size[axis] > 1:
                parts.append(f"{size[axis]} share a worker's {what}")
        if size["idle"] > 1:
            # The axis `idle` is the last; all devices but the first along it repeat its work.
            idle_devices = self.mesh.devices[..., 1:].reshape(-1)
            idle = " ".join(str(device.id) for device in idle_devices)
            parts.append(f"idle, repeating others' work: device {idle}")
        return "; ".join(parts)

    def _batch_axes(self, batch_size: int) -> tuple[str, ...]:
        """Return the mesh axes over which a worker's batch is divided.

        They are `data` and, if it then divides evenly, `model`.
        """
        num_shares = self.mesh.shape["data"] * self.mesh.shape["model"]
        if batch_size % num_shares == 0:
            return ("data", "model")
        return ("data",)

    def _stacked(self, shapes: PyTree, lead: str | tuple[str, ...], over: Sequence[str]) -> PyTree:
        """Return a sharding for each leaf of a pytree whose leaves have a leading axis M or R.

        Args:
          shapes: Arrays or their shapes, [M, ...] or [R, ...]; a `Packed` counts as one leaf.
          lead: The mesh axis, or axes, that divide each leaf's first axis.
          over: Mesh axes that divide one other axis of the leaf: as many of them, from the first
            on, as its length allows.

        Returns:
          A pytree of the structure of `shapes`; codes and scales of a `Packed` have one sharding.
        """

        def leaf_sharding(leaf: Any) -> Any:
            """Return the sharding of an array, or of both arrays of a `Packed`.

            `_spread` lets `lead` divide the first axis, and the axes `over` the longest of the
            other axes that they divide evenly.
            """
            if _is_packed(leaf):
                # Codes and scales begin with the axes [X, rows], and a row has whole blocks. Only
                # these axes are divided, because a block must stay on one device. So one sharding,
                # found from the shape [X, rows], serves both.
                by_rows = self._spread(leaf.scales.shape[:2], (lead,), over)
                return jax.tree.map(lambda _: by_rows, leaf)
            return self._spread(leaf.shape, (lead,), over)

        return jax.tree.map(leaf_sharding, shapes, is_leaf=_is_packed)

    def _spread(self, shape: tuple[int, ...], lead: tuple, over: Sequence[str]) -> NamedSharding:
        """Return a sharding of an array: `lead` divides its first dimensions, `over` one other.

        Args:
          shape: The shape of the array. A scalar is replicated.
          lead: For each of the first dimensions, the mesh axis or axes that divide it.
          over: Mesh axes for one of the other dimensions: the longest that is divisible. It is
            divided over as many of these axes as possible, taken from the first on: over all of
            them, else all but the last, and so on. If no dimension is divisible even by the first,
            only `lead` divides the array.
        """
        if not shape:
            return self.replicated
        for count in range(len(over), 0, -1):  # over as many axes as possible
            devices = math.prod(self.mesh.shape[axis] for axis in over[:count])
            divisible = [d for d in range(len(lead), len(shape)) if shape[d] % devices == 0]
            if devices > 1 and divisible:  # on one device there is nothing to divide
                # The longest dimension; of equally long ones, the last.
                dimension = max(divisible, key=lambda d: (shape[d], d))
                between = (None,) * (dimension - len(lead))
                return self.named(*lead, *between, tuple(over[:count]))
        return self.named(*lead)


def _is_packed(leaf: Any) -> TypeGuard[Packed]:
    """Return whether a node of a tree is an array quantised to four bits (`Packed`)."""
    return isinstance(leaf, Packed)


def arrange(
    sizes: tuple[int, ...],
    batch_size: int = 1,
    *,
    devices: Sequence[jax.Device],
    model_shards: int = 1,
) -> Placement:
    """Arrange devices as a mesh for the workers of a program.

    Workers are divided over as many devices as possible; devices that are left share the workers'
    batches as far as `batch_size` is divisible, and beyond that are idle.

    Args:
      sizes: The number of each trainer's workers.
      batch_size: Sequences of a worker's micro-batch.
      devices: The devices of the program, in the order that all programs of the run share.
      model_shards: Number of devices that share one worker's parameters; it divides theirs.
    """
    num_trainers = len(sizes)
    num_workers = sum(sizes)
    # The lengths of the mesh axes, one after another. Each is the greatest number that divides both
    # the devices that are left and what the axis divides, so that all devices have equal parts. A
    # unit is `model_shards` devices, which share a worker's parameters.
    num_units = len(devices) // model_shards
    trainer = math.gcd(num_units, num_trainers)
    # The axis `trainer` is used if each device then has all workers of some trainers, or only
    # workers of one. Otherwise the axis `worker` divides all workers, across trainers.
    if len(set(sizes)) > 1 or trainer < num_trainers < num_workers:
        trainer = 1
    # The units that have the same trainers, and all workers of these trainers.
    worker = math.gcd(num_units // trainer, num_workers // trainer)
    data = math.gcd(num_units // (trainer * worker), batch_size)  # units share a worker's batch
    # The mesh keeps the order of the devices, because all programs that exchange arrays must have
    # the same order. The last axis, `idle`, takes what is left.
    grid = np.array(devices).reshape(trainer, worker, data, model_shards, -1)
    return Placement(Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * len(_AXES)))


def placement(spec: ProgramSpec, layout: Layout) -> Placement:
    """Make the mesh of a layout's devices, with the shardings of arrays on this mesh.

    `spec` names the run's devices, and how many of them share one worker's parameters.
    """
    devices = spec.machine.devices
    if layout.devices is not None:
        first, count = layout.devices
        devices = devices[first : first + count]
    return arrange(layout.sizes, layout.batch_size, devices=devices, model_shards=spec.model_shards)


def first_ensemble(spec: ProgramSpec, sizes: tuple[int, ...], params: PyTree) -> Ensemble:
    """Make the parameters and optimizer states of trainers that all start from `params`.

    `sizes` has the number of each trainer's workers. `spec` has the optimizers.
    """
    return init(
        params,
        num_trainers=len(sizes),
        num_workers=sum(sizes),
        inner_tx=spec.inner_tx,
        outer_tx=spec.outer_tx,
        sizes=sizes,
        own_params=spec.outer.own_params,
        average=spec.outer.average > 0,
    )


def ensemble_spec(spec: ProgramSpec, layout: Layout) -> Ensemble:
    """Make the shapes, dtypes and shardings of an ensemble; nothing is allocated.

    `layout` has the number of each trainer's workers, and the devices.
    """
    shapes = jax.eval_shape(functools.partial(first_ensemble, spec, layout.sizes), spec.params)
    return _with_shardings(shapes, placement(spec, layout).ensemble(shapes))


def params_spec(spec: ProgramSpec, layout: Layout) -> PyTree:
    """Make the shapes, dtypes and shardings of one model's parameters."""
    return _with_shardings(spec.params, placement(spec, layout).params(spec.params))


def base_spec(spec: ProgramSpec, layout: Layout) -> PyTree:
    """Make the shapes, dtypes and shardings of the frozen weights; None if there are none."""
    return _with_shardings(spec.base, placement(spec, layout).params(spec.base))


def workers_spec(spec: ProgramSpec, layout: Layout, *, accumulates: bool = False) -> Workers:
    """Make the shapes, dtypes and shardings of workers in the middle of a round.

    With `accumulates` they have sums of gradients.
    """
    begin = functools.partial(begin_workers, spec, layout, accumulates=accumulates)
    shapes = jax.eval_shape(begin, ensemble_spec(spec, layout))
    return _with_shardings(shapes, placement(spec, layout).by_worker(shapes))


def num_sequential(spec: ProgramSpec, layout: Layout) -> int:
    """Number of turns in which a device's workers run one after another; 1 if all run at once.

    Each turn is a call of its own, which runs one worker of each device.
    """
    # With Streaming DiLoCo (`own_params`) a program also synchronises, which needs all workers.
    if not spec.sequential or spec.outer.own_params:
        return 1
    mesh = placement(spec, layout).mesh.shape
    return sum(layout.sizes) // (mesh["trainer"] * mesh["worker"])


def begin_workers(
    spec: ProgramSpec, layout: Layout, ensemble: Ensemble, *, accumulates: bool = False
) -> Workers:
    """Make the arrays with which the workers of an ensemble begin a round.

    `spec` says whether inner states are reset, and whether a device's workers run in turn; `layout`
    has the number of each trainer's workers, and the devices.

    They are the parameters, the inner states and, with `accumulates`, sums of gradients: one for
    each worker that runs at the same time. Workers of a device that run one after another use the
    same sum.
    """
    reset_tx = spec.inner_tx if spec.reset_inner_state else None
    workers = start_round(ensemble, accumulate=accumulates, reset_tx=reset_tx)
    num_turns = num_sequential(spec, layout)
    sums_R = (workers.grad_sum_R, workers.finite_R)
    # A device's workers are adjacent, `num_turns` of them: keep the sum of the first.
    grad_sum, finite = jax.tree.map(lambda leaf_R: leaf_R[::num_turns], sums_R)
    return workers.replace(grad_sum_R=grad_sum, finite_R=finite)


def bytes_here(shapes: PyTree) -> int:
    """Bytes that one device holds of arrays; leaves of `shapes` have shape, dtype and sharding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def _with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Add shardings to shapes (leaves `ShapeDtypeStruct`), leaf by leaf."""
    # A weak type, which no array of a run has, would make another program.
    return jax.tree.map(
        lambda leaf, at: leaf.update(sharding=at, weak_type=False), shapes, shardings
    )


def reshard(tree: PyTree, shardings: PyTree) -> PyTree:
    """Move the arrays of a tree to other shardings, in any number of processes.

    `shardings` is a tree like `tree`, with None for an array that stays where it is. Of a host
    array, every process must hold the parts that its devices receive. An array that has its
    sharding already is not copied.
    """
    leaves, structure = jax.tree.flatten(tree)
    targets = structure.flatten_up_to(shardings)
    placed = [_placed(leaf, to) for leaf, to in zip(leaves, targets, strict=True)]

    # One compiled program moves all arrays that no process can place by itself.
    moving = [i for i, leaf in enumerate(placed) if leaf is None]
    if moving:
        move = _mover(tuple(targets[i] for i in moving))
        moved = move([leaves[i] for i in moving])
        for i, leaf in zip(moving, moved, strict=True):
            placed[i] = leaf
    return structure.unflatten(placed)


def _placed(leaf: Any, to: NamedSharding | None) -> Any:
    """Give an array its new sharding `to`; None leaves the array as it is.

    Returns None if only a program of all processes can move the array.
    """
    if to is None:
        return leaf
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(to, leaf.ndim):
        return leaf
    if to.is_fully_addressable:  # all devices belong to this process
        return jax.device_put(leaf, to)
    if isinstance(leaf, jax.Array):  # its parts may be in other processes
        return None
    on_host = np.asarray(leaf)  # of which each process sends the parts of its own devices
    return jax.make_array_from_callback(on_host.shape, to, lambda slices: on_host[slices])


@functools.cache
def _mover(to: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Make a function that moves a list of arrays to these shardings, in order.

    It is made once for the same shardings, so that JAX compiles it once.
    """
    return jax.jit(lambda leaves: leaves, out_shardings=list(to))


def fetch(tree: PyTree) -> PyTree:
    """Copy all values of all arrays to the host in every process, one array at a time.

    All processes must call this, because an array whose parts are in several processes is copied to
    every device first.
    """

    def get(leaf: jax.Array) -> np.ndarray:
        """Copy one array to the host, after a copy to every device if its parts are elsewhere."""
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        assert isinstance(leaf.sharding, NamedSharding)
        replicated = NamedSharding(leaf.sharding.mesh, P())
        return np.asarray(reshard(leaf, replicated))

    return jax.tree.map(get, tree)
