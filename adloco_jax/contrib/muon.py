"""Muon as inner optimizer: orthogonalised momentum for the matrices of hidden layers.

A label names the kind of a parameter, such as "matrix" or "embedding" (`core.types.label_by_name`).
"""

import math
from collections.abc import Callable

import jax
import optax
import optax.contrib
from jaxtyping import PyTree

from adloco_jax.core.inner import INNER_OPTIMIZERS, adamw
from adloco_jax.core.types import label_by_name


def muon(
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decay: str = "all",
    label_params: Callable[[PyTree], PyTree] = label_by_name,
) -> optax.GradientTransformation:
    """Make the inner optimizer Muon for matrices of hidden layers, with AdamW for the rest.

    A matrix's momentum (decay `beta1`, not Nesterov) is orthogonalised by five Newton-Schulz steps
    and multiplied by sqrt(fan_out / fan_in). The learning rate is 1.

    Args:
      beta1: Decay of the momentum, in Muon and in AdamW.
      beta2: Decay of AdamW's second moments.
      weight_decay: Decoupled weight decay, of Muon and of AdamW.
      decay: "all", or "matrices": AdamW then spares leaves whose label ends with "other".
      label_params: Returns a tree of labels for parameters: "matrix" for a leaf [in, out],
        "stacked_matrix" for [layers, in, out]; AdamW updates leaves of all other labels.

    Returns:
      The transformation; its `init` and `update` raise ValueError if no leaf is a matrix.

    Source: MuLoCo (arXiv 2505.23725), with the Newton-Schulz steps of optax. The factor of
      `optax.contrib.muon` is at least 1, while MuLoCo's may be smaller.
    """

    def matrix_or_other(label: str) -> str:
        """Return the label of a matrix as it is, and "other" for all other labels."""
        return label if label in ("matrix", "stacked_matrix") else "other"

    def partition_labels(params: PyTree) -> PyTree:
        """Label each leaf by the transformation that updates it, as `optax.partition` wants.

        Raises ValueError if no leaf is a matrix.
        """
        labels = jax.tree.map(matrix_or_other, label_params(params))
        if set(jax.tree.leaves(labels)) == {"other"}:
            raise ValueError(
                "inner_tx: no parameter is labelled as a hidden layer's matrix, so muon has none to"
                " update; give the Architecture its own label_params, or set inner.tx='adamw'"
            )
        return labels

    def by_shape(updates: PyTree, _params: PyTree) -> PyTree:
        """Multiply each matrix [..., fan_in, fan_out] by sqrt(fan_out / fan_in)."""
        return jax.tree.map(lambda u: u * math.sqrt(u.shape[-1] / u.shape[-2]), updates)

    def last_two_axes(updates: PyTree) -> PyTree:
        """Say of each leaf which axes are the matrix's: the last two, input and output."""
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    of_matrices = optax.chain(
        optax.contrib.scale_by_muon(
            beta=beta1, nesterov=False, weight_dimension_numbers=last_two_axes
        ),
        optax.stateless(by_shape),
        optax.add_decayed_weights(weight_decay),
        optax.scale(-1.0),  # an update is added to the parameters, so it goes down the slope
    )
    rest = adamw(
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        decay=decay,
        label_params=label_params,
    )
    return optax.partition(
        {"matrix": of_matrices, "stacked_matrix": of_matrices, "other": rest}, partition_labels
    )


INNER_OPTIMIZERS["muon"] = muon
