"""Isotropic aggregation: all singular values of a matrix's mean difference become equal."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PyTree

from adloco_jax.core.outer import AGGREGATORS, labels_of, mean


def isotropic(
    difference_W: PyTree,
    share_W: Float[Array, " W"],
    *,
    label_params: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """Compute the weighted mean, with all singular values of each matrix replaced by their mean.

    The nuclear norm of a matrix does not change. On several devices each matrix is all-gathered for
    its singular value decomposition; the ledger does not count these bytes.

    Args:
      difference_W: Leaves [W, ...] float32, the trainer's parameters minus each worker's.
      share_W: Weights that sum to 1.
      label_params: Function that labels the parameters, see `Architecture.label_params`. A run
        passes the function of its model. For another model use
        `functools.partial(isotropic, label_params=...)`. If a label has the prefix "stacked_", the
        first axis of its leaf counts layers, and each layer is a tensor of its own. None: each leaf
        is one tensor. A tensor with more than two axes is a stack of matrices, which lie in its
        last two axes. Vectors are only averaged.

    Returns:
      The pseudo-gradient, leaves [...].

    Source: IsoLoCo (arXiv 2607.03011), the variant Iso-C. It is applied to embedding and head too,
      and the result is not rescaled.
    """

    def one_leaf(leaf, label):
        if leaf.ndim - label.startswith("stacked_") < 2:
            return leaf
        peak = jnp.max(jnp.abs(leaf), axis=(-2, -1), keepdims=True, initial=0.0)
        peak = jnp.where(peak > 0, peak, 1.0)
        left, singular, right = jnp.linalg.svd(leaf / peak, full_matrices=False)
        size = peak * jnp.mean(singular, axis=-1)[..., None, None]
        return size * jnp.matmul(left, right, precision="highest")

    labels = labels_of(label_params, difference_W)
    return jax.tree.map(one_leaf, mean(difference_W, share_W), labels)


AGGREGATORS["isotropic"] = isotropic
