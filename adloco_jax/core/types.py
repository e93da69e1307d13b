"""The dimension key, the types that the modules of the core share, and the stack of trainers.

Dimension key, used in names, einsum strings and shape annotations alike:

  M  trainers (model instances)          L  tokens of a sequence
  R  workers, all trainers together      D  width
  S  inner updates of a round            F  MLP width
  A  accumulation steps of an update     H  query heads
  T  micro-batches of a round (S * A)    G  key/value heads
  B  sequences in a micro-batch          K  head size
  N  layers                              V  vocabulary

An array carries its axes as a suffix (`tokens_SRBL`); a pytree whose leaves have a leading
worker axis is `params_R`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array, lax
from jaxtyping import PyTree

from adloco_jax.core.meshes import like_ensemble, on_any_mesh

LossFn: TypeAlias = Callable[..., Any]
"""`loss_fn(params, batch) -> scalar`: the mean loss over the leading axis of `batch`.

It may have a parameter `key`, for dropout and the like, and return `(scalar, aux)` where the caller
says `has_aux=True`.
"""


class Ensemble(struct.PyTreeNode):
    """All trainers and all workers between two rounds; a pytree.

    Trainers are known by their position in the stack, which changes at a merge. Which worker works
    for which trainer is static: it changes only when shapes change, too.
    """

    params_M: PyTree  # [M, ...] each trainer's parameters
    outer_state_M: PyTree  # [M, ...] each trainer's outer optimizer state
    inner_state_R: PyTree  # [R, ...] each worker's inner optimizer state
    owners: tuple[int, ...] = struct.field(pytree_node=False)  # [R] positions of their trainers
    round: Array  # int32 []: rounds completed
    params_R: PyTree = None  # [R, ...] each worker's own parameters; None: its trainer's

    @property
    def owner_R(self) -> np.ndarray:
        """Int32 [R]: position in the stack of each worker's trainer."""
        return np.array(self.owners, np.int32)

    @property
    def num_trainers(self) -> int:
        """Trainers in the stack (static)."""
        return max(self.owners) + 1

    @property
    def num_workers(self) -> int:
        """Workers in the pool (static)."""
        return len(self.owners)


class Workers(struct.PyTreeNode):
    """The workers in the middle of a round, each with its own drifting parameters; a pytree."""

    params_R: PyTree  # [R, ...]
    inner_state_R: PyTree  # [R, ...]
    grad_sum_R: PyTree = None  # [R, ...] float32: gradients of the update under way
    num_grads: Array | None = None  # int32 []: how many of them
    finite_R: Array | None = None  # bool [R]: whether their losses were all finite


class RoundMetrics(struct.PyTreeNode):
    """What one round reports."""

    loss_SR: Array  # float32 [S, R]: mean training loss of each inner update
    skipped_SR: Array  # bool [S, R]: updates left out, their loss or gradient not being finite
    pseudo_grad_norm_M: Array  # float32 [M]: L2 norm of each trainer's outer gradient
    aux: PyTree = None  # [S, R, ...] means over an update's micro-batches, float32 at least


class GradientStats(struct.PyTreeNode):
    """Per-example gradient statistics at one point, as sums with their weights.

    A quantity is `sum / weight`; statistics of several workers, or of several rounds, are combined
    by adding (or averaging) sums and weights separately, see `core.gradstats.pool`. The sums are in
    units of `scale`, those of inner products in units of `scale**2`, so that none of them under- or
    overflows in float32 however small the gradient is; the tests only use ratios. Where squared
    norms are not in float32's range, `scale` is 0 or infinite: then the statistics of one worker
    have their meaning still, while `noise`, `signal` and a pool of several do not. On the host the
    fields are NumPy float64.
    """

    scale: Array | np.ndarray  # mean squared norm of a per-example gradient
    num_examples: Array | np.ndarray  # t
    noise_sum: Array | np.ndarray  # sum_j n_j - t |mean|^2
    noise_weight: Array | np.ndarray  # t - 1
    signal_sum: Array | np.ndarray  # t^2 |mean|^2 - sum_j n_j
    signal_weight: Array | np.ndarray  # t (t - 1)
    ip_sum: Array | np.ndarray  # over the last third, <g_j, mean_1> against <g_j, mean_2>
    ip_weight: Array | np.ndarray  # size of the last third - 1; 0 without inner products
    plugin_ip_sum: Array | np.ndarray  # sum_j (p_j - |mean|^2)^2, weight t - 1
    plugin_orth_sum: Array | np.ndarray  # sum_j n_j - sum_j p_j^2 / |mean|^2, weight t - 1

    def in_units_of(self, scale: Array | np.ndarray | float) -> "GradientStats":
        """The same statistics with the sums in units of another scale."""
        ratio = self.scale / (scale + (scale == 0))
        linear = {
            name: getattr(self, name) * ratio
            for name in ("noise_sum", "signal_sum", "plugin_orth_sum")
        }
        squared = {name: getattr(self, name) * ratio**2 for name in ("ip_sum", "plugin_ip_sum")}
        return self.replace(scale=scale, **linear, **squared)

    @property
    def noise(self) -> Array | np.ndarray:
        """Unbiased estimate of tr(Sigma), the gradient noise (S_hat of docs/algorithm.md, 2)."""
        return self.scale * (self.noise_sum / self.noise_weight)

    @property
    def signal(self) -> Array | np.ndarray:
        """Unbiased estimate of |G|^2; may be negative."""
        return self.scale * (self.signal_sum / self.signal_weight)


class BatchPlan(NamedTuple):
    """What one worker runs for each inner update."""

    micro_batch_size: int
    num_accum_steps: int


def trainable(params: PyTree) -> PyTree:
    """The floating-point leaves, None in place of others: PRNG keys and counts are no parameters.

    Raises:
      ValueError: If a leaf is complex, as norms and means here are those of real numbers, or none
        is a floating-point array.
    """

    def select(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(
                f"params: a leaf of shape {leaf.shape} is {leaf.dtype}, expected real numbers;"
                " hold its real and imaginary parts as two leaves"
            )
        return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None

    values = jax.tree.map(select, params)
    if not jax.tree.leaves(values):
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
        raise ValueError(
            "params: expected a pytree with at least one floating-point array, got"
            f" {', '.join(dtypes) or 'no array'}; convert what is to be trained to float32"
        )
    return values


def with_trainable(params: PyTree, values: PyTree) -> PyTree:
    """`params` with the leaves that `trainable` selects replaced."""
    return jax.tree.map(lambda leaf, new: leaf if new is None else new, params, values)


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype to do arithmetic in: of float64 its own, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def is_key(leaf: Array) -> bool:
    """Whether an array holds typed PRNG keys, which have neither a mean nor another dtype."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def with_dtypes(tree: PyTree, like: PyTree) -> PyTree:
    """`tree` in the dtypes of `like`: a transformation may widen the state it was started with."""
    return jax.tree.map(
        lambda leaf, old: leaf if is_key(old) else leaf.astype(old.dtype), tree, like
    )


def init(
    params: PyTree,
    *,
    num_trainers: int,
    num_workers: int,
    inner_tx: optax.GradientTransformation,
    outer_tx: optax.GradientTransformation,
    owner_R: Sequence[int] | np.ndarray | None = None,
    own_params: bool = False,
) -> Ensemble:
    """Stack `num_trainers` trainers that all start from `params`, and a pool of workers.

    For trainers with parameters of their own, replace `params_M` of the result (and `params_R`, if
    it has any). Random keys in an optimizer's state (`optax.add_noise`) are alike too: for noise of
    its own in each worker, replace them in `inner_state_R`.

    Args:
      params: Parameters of one model, any pytree of arrays. Optimizers see the floating-point ones;
        others, such as typed PRNG keys and counts, stay as they are.
      num_trainers: M >= 1.
      num_workers: R >= M, all trainers together.
      inner_tx: Transformation of the workers' gradients; its state belongs to the worker.
      outer_tx: Transformation of the trainers' pseudo-gradients.
      owner_R: Trainer position of each worker; by default as even as possible, in order.
      own_params: Whether workers keep parameters of their own from round to round, as they must
        where only a fragment is synchronised at a time.

    Returns:
      The ensemble before its first round.

    Raises:
      ValueError: If there are fewer workers than trainers, or `owner_R` names a trainer that is
        not there or leaves one without a worker, or if `params` has a leaf that is no array or is
        complex, or no floating-point leaf.

    Source: AdLoCo algorithm 1, lines 1-3.
    """
    if owner_R is None:
        owner_R = np.arange(num_workers) * num_trainers // num_workers
    owners = np.asarray(owner_R)
    if owners.shape != (num_workers,):
        raise ValueError(f"owner_R has shape {owners.shape}, expected [num_workers={num_workers}]")
    check_owners(owners, num_trainers)

    def stack(tree, size):
        def copies(leaf):
            leaf = jnp.asarray(leaf)
            if not is_key(leaf):  # not weakly typed, or the second round compiles again
                leaf = leaf.astype(leaf.dtype)
            return jnp.broadcast_to(leaf, (size, *leaf.shape))

        return jax.tree.map(copies, tree)

    params = jax.tree_util.tree_map_with_path(_parameter, params)
    values = trainable(params)
    return Ensemble(
        params_M=stack(params, num_trainers),
        outer_state_M=stack(outer_tx.init(values), num_trainers),
        inner_state_R=stack(inner_tx.init(values), num_workers),
        owners=tuple(owners.tolist()),
        round=jnp.zeros((), jnp.int32),
        params_R=stack(params, num_workers) if own_params else None,
    )


@on_any_mesh(like_ensemble)
def take(ensemble: Ensemble, trainers: Sequence[int]) -> Ensemble:
    """The sub-ensemble of some trainers and their workers, which can run a round of its own.

    The result has the `round` of the whole stack, which counts the rounds of all trainers together.
    In a loop that runs a round in groups, take every group from the stack as it was when the round
    began, or set `round` when it ends, see `put`.

    Args:
      ensemble: The whole stack.
      trainers: Positions in the stack, distinct; their order becomes the order of the result.

    Returns:
      An ensemble of `len(trainers)` trainers, each with its workers next to one another.

    Raises:
      ValueError: If a position is out of range or repeated.
    """
    chosen = positions("trainers", trainers, ensemble.num_trainers)
    workers = _workers_of(ensemble, chosen)
    return Ensemble(
        params_M=_pick(ensemble.params_M, chosen),
        outer_state_M=_pick(ensemble.outer_state_M, chosen),
        inner_state_R=_pick(ensemble.inner_state_R, workers),
        owners=tuple(chosen.tolist().index(ensemble.owners[w]) for w in workers),
        round=ensemble.round,
        params_R=_pick(ensemble.params_R, workers),
    )


@on_any_mesh(like_ensemble)
def put(ensemble: Ensemble, trainers: Sequence[int], sub: Ensemble) -> Ensemble:
    """Write back a sub-ensemble after a round: the inverse of `take`.

    The `round` of the result is the larger of the two, so that groups which were all taken before
    any of them was put back count as one round:

      start = ensemble
      for trainers in groups:
          sub, _ = step(take(start, trainers), ...)
          ensemble = put(ensemble, trainers, sub)

    A loop that takes the next group from what `put` returned, for instance because `start` was
    donated, counts a round for each group; it ends with
    `ensemble.replace(round=<round at the start> + 1)`.

    Args:
      ensemble: The whole stack.
      trainers: The positions given to `take`, in the same order.
      sub: The sub-ensemble, with the trainers and workers that `take` gave it.

    Returns:
      The whole stack with those trainers and workers replaced; the owners stay, and the round is
      that of `sub` if it is further.

    Raises:
      ValueError: If `sub` has another number of trainers or workers than was taken, and as `take`.
    """
    chosen = positions("trainers", trainers, ensemble.num_trainers)
    workers = _workers_of(ensemble, chosen)
    if (sub.num_trainers, sub.num_workers) != (len(chosen), len(workers)):
        raise ValueError(
            f"sub has {sub.num_trainers} trainers and {sub.num_workers} workers, expected"
            f" {len(chosen)} and {len(workers)}, as taken"
        )

    def write(tree, index, part):
        return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), tree, part)

    return ensemble.replace(
        params_M=write(ensemble.params_M, chosen, sub.params_M),
        outer_state_M=write(ensemble.outer_state_M, chosen, sub.outer_state_M),
        inner_state_R=write(ensemble.inner_state_R, workers, sub.inner_state_R),
        round=jnp.maximum(ensemble.round, sub.round),
        params_R=write(ensemble.params_R, workers, sub.params_R),
    )


def block_size(owners: Sequence[int]) -> int | None:
    """Workers per trainer where each owns as many, next to one another and in order; else None."""
    size = list(owners).count(0)
    equal = tuple(m for m in range(max(owners) + 1) for _ in range(size))
    return size if tuple(owners) == equal else None


def of_owners(tree_M: PyTree, owners: Sequence[int]) -> PyTree:
    """Each worker's trainer's entries: leaves [M, ...] -> [R, ...]."""
    size = block_size(owners)
    if size is None:
        return jax.tree.map(lambda leaf_M: leaf_M[np.array(owners)], tree_M)
    return jax.tree.map(lambda leaf_M: jnp.repeat(leaf_M, size, axis=0), tree_M)


def map_trainers(function: Callable[[PyTree], PyTree], tree_R: PyTree, owners: Sequence[int]):
    """Results [M, ...] of `function(tree_W)`, called with each trainer's own entries of `tree_R`.

    Trainers with the same number of workers share one `vmap`, so that nothing is padded: time and
    memory grow with R alone. Equal blocks are a reshape, in which a partitioner sees that workers
    of different trainers have nothing in common.
    """
    counts_M = np.bincount(owners)
    mapped = jax.vmap(function)
    if (size := block_size(owners)) is not None:
        shape = (len(counts_M), size)
        return mapped(jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), tree_R))
    workers_M = np.split(np.argsort(owners, kind="stable"), np.cumsum(counts_M)[:-1])
    groups = [np.flatnonzero(counts_M == size) for size in np.unique(counts_M)]

    def of_group(trainers_G):
        index_GW = np.stack([workers_M[m] for m in trainers_G])
        return mapped(jax.tree.map(lambda leaf: leaf[index_GW], tree_R))

    order_M = np.argsort(np.concatenate(groups))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order_M], *map(of_group, groups))


def where_leading(condition_X: Array | np.ndarray, tree_X: PyTree, other_X: PyTree) -> PyTree:
    """Select whole entries of the leading axis: from `tree_X` where true, else from `other_X`."""

    def select(leaf, other):
        return jnp.where(condition_X.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, other)

    return jax.tree.map(select, tree_X, other_X)


def shares(weights_X: Array, usable_X: Array) -> tuple[Array, Array]:
    """Shares that sum to 1, and which entries have one: usable ones of positive finite weight.

    If no usable entry has such a weight, all of them count alike; if none is usable, the shares are
    zero.
    """
    weighted_X = usable_X & (weights_X > 0) & jnp.isfinite(weights_X)
    any_weight = jnp.any(weighted_X)
    chosen_X = jnp.where(any_weight, weighted_X, usable_X)
    # The sum of large weights is finite only in smaller units. Over the largest weight they would
    # have to be divided twice, which XLA turns into a division by an infinite product.
    unit = jnp.where(jnp.any(weighted_X & (weights_X > 1)), 2.0**-64, 1.0)
    relative_X = jnp.where(any_weight, weights_X * unit, 1.0)
    share_X = jnp.where(chosen_X, relative_X, 0.0)
    total = jnp.sum(share_X)
    return share_X / jnp.where(total > 0, total, 1.0), chosen_X


def squared_norms(tree_X: PyTree) -> Array:
    """Squared L2 norm of each entry of the leading axis, float32 [X]; infinite if it overflows."""
    squares = (_sum_entries(jnp.square(leaf_X)) for leaf_X in _as_float32(tree_X))
    return sum(squares, jnp.zeros((), jnp.float32))


def norms(tree_X: PyTree) -> Array:
    """L2 norm of each entry of the leading axis, float32 [X], however small or large.

    Entries are divided by the largest before they are squared. An entry that is not finite makes
    its norm so. The gradient is zero where the norm is.
    """
    leaves_X = _as_float32(tree_X)
    peaks = [
        jnp.max(jnp.abs(leaf_X), axis=tuple(range(1, leaf_X.ndim)), initial=0.0)
        for leaf_X in leaves_X
    ]
    peak_X = lax.stop_gradient(functools.reduce(jnp.maximum, peaks))
    peak_X = jnp.where((peak_X > 0) & jnp.isfinite(peak_X), peak_X, 1.0)
    square_X = sum(
        _sum_entries(jnp.square(leaf_X / peak_X.reshape((-1,) + (1,) * (leaf_X.ndim - 1))))
        for leaf_X in leaves_X
    )
    root_X = jnp.sqrt(jnp.where(square_X > 0, square_X, 1.0))
    return peak_X * jnp.where(square_X > 0, root_X, square_X)


def _as_float32(tree: PyTree) -> list[Array]:
    return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]


def _sum_entries(leaf_X: Array) -> Array:
    return jnp.sum(leaf_X, axis=tuple(range(1, leaf_X.ndim)))


def move_workers(
    ensemble: Ensemble,
    source: np.ndarray,
    stays_R: Array | np.ndarray,
    owner_R: Array | np.ndarray,
) -> PyTree:
    """Inner states of a new pool: a worker's own where it stays, else its new trainer's mean.

    The mean is over the workers that were already there. Whole numbers, such as Adam's count of
    updates, are rounded; an entry that is equal in all of them stays what it is; a PRNG key is the
    first worker's. `source` and `owner_R` are positions in `ensemble`.
    """

    def join(leaf_W):
        if is_key(leaf_W):
            return leaf_W[0]
        mean = jnp.mean(leaf_W.astype(at_least_float32(leaf_W.dtype)), axis=0)
        if not jnp.issubdtype(leaf_W.dtype, jnp.inexact):
            mean = jnp.round(mean)
        is_equal = jnp.all(leaf_W == leaf_W[:1], axis=0)
        return jnp.where(is_equal, leaf_W[0], mean.astype(leaf_W.dtype))

    def move(leaf_R):
        joined_M = map_trainers(join, leaf_R, ensemble.owners)
        return where_leading(stays_R, leaf_R[source], joined_M[owner_R])

    return jax.tree.map(move, ensemble.inner_state_R)


def place_workers(
    ensemble: Ensemble, source: np.ndarray, stays_R: np.ndarray, owners: Sequence[int]
) -> PyTree:
    """Parameters of a new pool: a worker's own where it stays, else its trainer's.

    `source` are positions in `ensemble`, and `owners` the new trainers' in its stack. None where
    workers have no parameters of their own.
    """
    if ensemble.params_R is None:
        return None
    own_R = jax.tree.map(lambda leaf_R: leaf_R[source], ensemble.params_R)
    return where_leading(stays_R, own_R, of_owners(ensemble.params_M, owners))


def positions(name: str, indices: Sequence[int], size: int) -> np.ndarray:
    """Checked, distinct positions on an axis, as Python ints decided by the host.

    Raises:
      ValueError: If an index repeats or lies outside the axis.
    """
    chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
    if len(chosen) == 0 or len(set(chosen.tolist())) != len(chosen):
        raise ValueError(
            f"{name}: expected distinct positions, at least one; got {chosen.tolist()}"
        )
    if chosen.min() < 0 or chosen.max() >= size:
        raise ValueError(f"{name}: {chosen.tolist()} out of range; the stack holds {size}")
    return chosen


def check_owners(owners: np.ndarray, num_trainers: int) -> None:
    """Raise ValueError unless every trainer has a worker, and every worker a trainer."""
    missing = sorted(set(range(num_trainers)) - set(owners.tolist()))
    strange = sorted(set(owners.tolist()) - set(range(num_trainers)))
    if missing or strange:
        raise ValueError(
            f"owner_R={owners.tolist()}: expected every one of num_trainers={num_trainers} at least"
            f" once; without a worker: {missing}; unknown: {strange}"
        )


def _workers_of(ensemble: Ensemble, trainers: np.ndarray) -> np.ndarray:
    """Positions of some trainers' workers, trainer by trainer."""
    return np.concatenate([np.flatnonzero(ensemble.owner_R == m) for m in trainers])


def _parameter(path: tuple, leaf) -> Array:
    if not isinstance(leaf, (Array, np.ndarray, np.generic, float, int, complex)):
        raise ValueError(
            f"params{jax.tree_util.keystr(path)}: got {leaf!r}, expected an array; pass the model's"
            " parameters, without functions and settings"
        )
    return jnp.asarray(leaf)


def _pick(tree: PyTree, index: np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], tree)
