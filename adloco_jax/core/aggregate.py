"""Aggregation of workers' differences into a pseudo-gradient: the mean and its alternatives.

`AGGREGATORS` is the table that a run chooses from by name.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PyTree

from adloco_jax.core.types import map_trainers, norms, shares, where_leading

Aggregator: TypeAlias = Callable[..., PyTree]
"""`aggregate(difference_W, share_W, **knobs) -> pseudo_grad`, for one trainer.

`difference_W` has float32 leaves [W, ...]: the trainer's parameters minus each worker's. `share_W`,
float32 [W], are the workers' weights, which sum to 1. A worker that is left out has a share and
differences of zero. The result has leaves [...]. Knobs are keywords with the names of the config's
group `outer`.
"""

CANCELLED = 1e-6  # of a mean of unit vectors: shorter, it is rounding error and has no direction


def mean(difference_W: PyTree, share_W: Float[Array, " W"]) -> PyTree:
    """The weighted mean of the workers' differences.

    Args:
      difference_W: Leaves [W, ...] float32, the trainer's parameters minus each worker's.
      share_W: Weights that sum to 1.

    Returns:
      Leaves [...].

    Source: DiLoCo (arXiv 2311.08105), algorithm 1, line 12.
    """
    return jax.tree.map(lambda leaf_W: _weighted_sum(leaf_W, share_W), difference_W)


def radial_directional(
    difference_W: PyTree,
    share_W: Float[Array, " W"],
    *,
    plain: Sequence[str] = ("embed",),
    stacked: Sequence[str] = ("layers",),
) -> PyTree:
    """The workers' mean direction at their mean length, tensor by tensor.

    Differences of several workers are nearly orthogonal, and their mean is shorter than each of
    them by the root of their number; this keeps the length. Where directions cancel, the mean.

    Args:
      difference_W: Leaves [W, ...] float32, the trainer's parameters minus each worker's.
      share_W: Weights that sum to 1.
      plain: A leaf with one of these in its path is averaged: embeddings, as in the source.
      stacked: A leaf with one of these in its path has an axis of layers first, which are tensors
        of their own.

    Returns:
      Leaves [...], of norm sum(share * |difference|).

    Source: Decoupled DiLoCo (arXiv 2604.21428), as its re-implementations describe it: the radial
      term is the mean of norms. The plain mean where directions cancel is theirs, too.
    """

    def one_leaf(path, leaf_W):
        average = _weighted_sum(leaf_W, share_W)
        if _names(path, plain):
            return average
        num_lead = 1 + _names(path, stacked)
        norm_W = _norm(leaf_W, num_lead)
        direction_W = leaf_W / jnp.where(norm_W > 0, norm_W, 1.0)
        direction = _weighted_sum(direction_W, share_W)
        length = _norm(direction, num_lead - 1)
        radius = _weighted_sum(norm_W, share_W) / jnp.where(length > 0, length, 1.0)
        return jnp.where(length > CANCELLED, radius * direction, average)

    return jax.tree_util.tree_map_with_path(one_leaf, difference_W)


def isotropic(
    difference_W: PyTree, share_W: Float[Array, " W"], *, stacked: Sequence[str] = ("layers",)
) -> PyTree:
    """The weighted mean, all singular values of each matrix made equal to their mean.

    The nuclear norm of a matrix stays. On several devices each matrix is gathered for its singular
    value decomposition, which moves more than the ledger accounts.

    Args:
      difference_W: Leaves [W, ...] float32, the trainer's parameters minus each worker's.
      share_W: Weights that sum to 1.
      stacked: A leaf with one of these in its path has an axis of layers first. The last two of a
        leaf's other axes are a matrix, for each place on those before; vectors are averaged.

    Returns:
      Leaves [...].

    Source: IsoLoCo (arXiv 2607.03011): Iso-C, embedding and head included, not rescaled.
    """

    def one_leaf(path, leaf):
        if leaf.ndim - _names(path, stacked) < 2:
            return leaf
        peak = jnp.max(jnp.abs(leaf), axis=(-2, -1), keepdims=True, initial=0.0)
        peak = jnp.where(peak > 0, peak, 1.0)
        left, singular, right = jnp.linalg.svd(leaf / peak, full_matrices=False)
        size = peak * jnp.mean(singular, axis=-1)[..., None, None]
        return size * jnp.matmul(left, right, precision="highest")

    return jax.tree_util.tree_map_with_path(one_leaf, mean(difference_W, share_W))


AGGREGATORS: dict[str, Aggregator] = {
    "mean": mean,
    "rda": radial_directional,
    "isotropic": isotropic,
}
"""By the name that `outer.aggregator` gives; add an entry to have one of your own."""


def by_trainers(
    difference_R: PyTree,
    owners: Sequence[int],
    *,
    weights_R: Array | None,
    usable_R: Array,
    aggregate: Aggregator,
) -> tuple[PyTree, Array]:
    """Each trainer's aggregate, leaves [R, ...] -> [M, ...], and whether it has a usable worker.

    Only a positive finite weight counts; a trainer without one weighs its usable workers alike.
    """
    weights_R = jnp.ones(len(owners), jnp.float32) if weights_R is None else weights_R

    def one_trainer(entries_W):
        usable_W, weights_W, difference_W = entries_W
        share_W, chosen_W = shares(weights_W, usable_W)
        # Left out by selection: zero times NaN is NaN.
        zeros_W = jax.tree.map(jnp.zeros_like, difference_W)
        pseudo_grad = aggregate(where_leading(chosen_W, difference_W, zeros_W), share_W)
        return pseudo_grad, jnp.any(usable_W)

    return map_trainers(one_trainer, (usable_R, weights_R, difference_R), owners)


def _weighted_sum(leaf_W: Array, share_W: Array) -> Array:
    return jnp.sum(leaf_W * share_W.reshape((-1,) + (1,) * (leaf_W.ndim - 1)), axis=0)


def _norm(leaf: Array, num_lead: int) -> Array:
    """L2 norm over the axes after the leading ones, which stay, with length 1."""
    lead = leaf.shape[:num_lead]
    norm_X = norms(leaf.reshape(math.prod(lead), -1))
    return norm_X.reshape(*lead, *(1,) * (leaf.ndim - num_lead))


def _names(path: tuple, names: Sequence[str]) -> bool:
    return any(name in jax.tree_util.keystr(path) for name in names)
