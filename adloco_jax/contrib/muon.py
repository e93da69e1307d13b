"""Muon as inner optimizer: orthogonalised momentum for the matrices of hidden layers."""

import math
from collections.abc import Callable

import jax
import optax
import optax.contrib
from jaxtyping import PyTree

from adloco_jax.core.inner import INNER_OPTIMIZERS, adamw, label_by_shape


def muon(
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decay: str = "all",
    label_params: Callable[[PyTree], PyTree] = label_by_shape,
) -> optax.GradientTransformation:
    """Make the inner optimizer Muon for matrices of hidden layers, with AdamW for the rest.

    A matrix's momentum (decay `beta1`, not Nesterov) is orthogonalised by five Newton-Schulz steps
    and multiplied by sqrt(fan_out / fan_in). Weight decay is decoupled. The learning
    rate is the same for all parameters, and so is weight decay, unless `decay` leaves some out.

    Args:
      beta1: Decay of the momentum of matrices, and of AdamW's first moment.
      beta2: Decay of AdamW's second moment.
      weight_decay: Weight decay, which a round multiplies by the learning rate.
      decay: "matrices" if AdamW shall not decay leaves with the label "other", else "all".
      label_params: Function from the parameters to a tree of labels with the same structure. The
        label "matrix" means a leaf [in, out], and "stacked_matrix" a leaf [layers, in, out]. Leaves
        with any other label are updated by AdamW.

    Returns:
      A transformation whose `init` and `update` raise ValueError if no leaf is a matrix.

    Source: MuLoCo (arXiv 2505.23725). The Newton-Schulz steps are those of optax.
      `optax.contrib.muon` multiplies by a factor of at least 1, while in MuLoCo the factor may be
      smaller than 1.
    """

    def label(params):
        labels = jax.tree.map(
            lambda label: label if label in ("matrix", "stacked_matrix") else "other",
            label_params(params),
        )
        if {*jax.tree.leaves(labels)} == {"other"}:
            raise ValueError(
                "inner_tx: no parameter is labelled as a hidden layer's matrix, so muon has none to"
                " update; give the Architecture its own label_params, or set inner.tx='adamw'"
            )
        return labels

    def by_shape(updates, _):
        return jax.tree.map(lambda u: u * math.sqrt(u.shape[-1] / u.shape[-2]), updates)

    def last_two_axes(updates):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    of_matrices = optax.chain(
        optax.contrib.scale_by_muon(
            beta=beta1, nesterov=False, weight_dimension_numbers=last_two_axes
        ),
        optax.stateless(by_shape),
        optax.add_decayed_weights(weight_decay),
        optax.scale(-1.0),
    )
    rest = adamw(
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        decay=decay,
        label_params=label_params,
    )
    return optax.partition(
        {"matrix": of_matrices, "stacked_matrix": of_matrices, "other": rest}, label
    )


INNER_OPTIMIZERS["muon"] = muon
