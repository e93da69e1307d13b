"""Radial-directional aggregation: the workers' mean direction at their mean length."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PyTree

from adloco_jax.core.outer import AGGREGATORS, mean
from adloco_jax.core.types import norms

CANCELLED = 1e-6  # a mean of unit vectors that is shorter than this is only rounding error


def radial_directional(
    difference_W: PyTree,
    share_W: Float[Array, " W"],
    *,
    label_params: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """Compute the mean direction of the workers' differences at their mean length, for each tensor.

    Differences are nearly orthogonal, so their plain mean shrinks with the square root of their
    number. If directions cancel, the result is the plain mean.

    Args:
      difference_W: Leaves [W, ...] float32, the trainer's parameters minus each worker's.
      share_W: Weights that sum to 1.
      label_params: See `Architecture.label_params`; bind another with `functools.partial`. Leaves
        labelled "embedding" are averaged, as in the source; layers of leaves labelled "stacked_..."
        are tensors of their own. None: each leaf is one tensor.

    Returns:
      The pseudo-gradient, leaves [...]. The norm of each tensor is sum(share * |difference|).

    Source: Decoupled DiLoCo (arXiv 2604.21428), as its re-implementations describe it.
    """

    def one_leaf(leaf_W, label):
        average = mean(leaf_W, share_W)
        if label.endswith("embedding"):
            return average
        num_lead = 2 if label.startswith("stacked_") else 1
        norm_W = _norm(leaf_W, num_lead)
        direction = mean(leaf_W / jnp.where(norm_W > 0, norm_W, 1.0), share_W)
        length = _norm(direction, num_lead - 1)
        radius = mean(norm_W, share_W) / jnp.where(length > 0, length, 1.0)
        return jnp.where(length > CANCELLED, radius * direction, average)

    if label_params is None:
        return jax.tree.map(lambda leaf_W: one_leaf(leaf_W, ""), difference_W)
    labels = label_params(jax.tree.map(lambda leaf_W: leaf_W[0], difference_W))
    return jax.tree.map(one_leaf, difference_W, labels)


def _norm(leaf: Array, num_lead: int) -> Array:
    """Compute L2 norms over all axes after the first `num_lead`."""
    lead = leaf.shape[:num_lead]
    norm_X = norms(leaf.reshape(math.prod(lead), -1))
    return norm_X.reshape(*lead, *(1,) * (leaf.ndim - num_lead))


AGGREGATORS["rda"] = radial_directional
