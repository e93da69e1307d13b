"""Radial-directional aggregation: the workers' mean direction at their mean length.

Run it:  adloco train examples/radial.py --config.num_rounds=2

Source: Decoupled DiLoCo (arXiv 2604.21428), as its re-implementations describe it.
"""

import jax
import jax.numpy as jnp

from adloco_jax import AGGREGATORS
from adloco_jax.config import default_config

CANCELLED = 1e-6  # a mean of unit vectors that is shorter than this is only rounding error


def radial_directional(difference_W, share_W, *, label_params=None):
    """Combine the differences, leaves [W, ...], into one pseudo-gradient, leaves [...].

    Differences are nearly orthogonal, so their plain mean shrinks with the square root of their
    number. Each tensor gets the norm sum(share * |difference|). If directions cancel, the result
    is the plain mean.

    Leaves labelled "embedding" are averaged, as in the source. Layers of leaves labelled
    "stacked_..." are tensors of their own. Without labels each leaf is one tensor.
    """
    mean = AGGREGATORS["mean"]

    def of_leaf(leaf_W, label):
        average = mean(leaf_W, share_W)
        if label.endswith("embedding"):
            return average
        first_axis = 1 if label.startswith("stacked_") else 0  # of a tensor in `average`
        norm_W = norm(leaf_W, first_axis + 1)
        direction = mean(leaf_W / jnp.where(norm_W > 0, norm_W, 1.0), share_W)
        length = norm(direction, first_axis)
        radius = mean(norm_W, share_W) / jnp.where(length > 0, length, 1.0)
        return jnp.where(length > CANCELLED, radius * direction, average)

    if label_params is None:
        return jax.tree.map(lambda leaf_W: of_leaf(leaf_W, ""), difference_W)
    labels = label_params(jax.tree.map(lambda leaf_W: leaf_W[0], difference_W))
    return jax.tree.map(of_leaf, difference_W, labels)


def norm(leaf, first_axis):
    """Compute the L2 norm over the axes from `first_axis`, which stay with size one."""
    axes = tuple(range(first_axis, leaf.ndim))
    return jnp.sqrt(jnp.sum(jnp.square(leaf), axis=axes, keepdims=True))


AGGREGATORS["rda"] = radial_directional


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.outer.aggregator = "rda"
    return config
