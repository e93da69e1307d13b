"""The optimizers that a run chooses from by name, as optax transformations at learning rate 1.

The config's rate, warm-up and schedule multiply their updates: inner ones by the rate of each
update, outer ones by `outer.learning_rate`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib
from jaxtyping import PyTree


def adamw(inner: Any) -> optax.GradientTransformation:
    """AdamW with the config's decay rates and decoupled weight decay."""
    return optax.adamw(1.0, b1=inner.beta1, b2=inner.beta2, weight_decay=inner.weight_decay)


def muon(inner: Any, *, label_params: Callable[[PyTree], PyTree]) -> optax.GradientTransformation:
    """Muon for the matrices of hidden layers, each layer's on its own, and AdamW for the rest.

    A matrix's momentum (decay `beta1`, not Nesterov) is orthogonalised by five Newton-Schulz steps
    and multiplied by sqrt(fan_out / fan_in). Weight decay is decoupled, and the same for all
    parameters, as is the learning rate.

    Args:
      inner: The settings' group `inner`.
      label_params: Gives a tree of the parameters' structure: "matrix" for [in, out],
        "stacked_matrix" for [layers, in, out], "other" for what AdamW updates.

    Returns:
      A transformation whose `init` and `update` raise ValueError if no leaf is a matrix.

    Source: MuLoCo (arXiv 2505.23725); Newton-Schulz is optax's. Its `optax.contrib.muon` scales by
      at least 1, where MuLoCo also scales down.
    """

    def label(params):
        labels = label_params(params)
        if not {"matrix", "stacked_matrix"} & {*jax.tree.leaves(labels)}:
            raise ValueError(
                "inner_tx: no parameter is labelled as a hidden layer's matrix, so muon has none to"
                " update; give the Architecture its own label_params, or take inner.tx='adamw'"
            )
        return labels

    def by_shape(updates, _):
        return jax.tree.map(lambda u: u * math.sqrt(u.shape[-1] / u.shape[-2]), updates)

    def last_two_axes(updates):
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    of_matrices = optax.chain(
        optax.contrib.scale_by_muon(
            beta=inner.beta1, nesterov=False, weight_dimension_numbers=last_two_axes
        ),
        optax.stateless(by_shape),
        optax.add_decayed_weights(inner.weight_decay),
        optax.scale(-1.0),
    )
    return optax.partition(
        {"matrix": of_matrices, "stacked_matrix": of_matrices, "other": adamw(inner)}, label
    )


INNER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "muon": muon,
    "sgd": lambda inner: optax.sgd(1.0),
}
"""By the name that `inner.tx` gives: `factory(settings.inner) -> transformation`.

A factory with a parameter `label_params` is given the model's, see `muon`.
"""

OUTER_OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "nesterov": lambda outer: optax.sgd(1.0, momentum=outer.momentum, nesterov=True),
    "sgd": lambda outer: optax.sgd(1.0),
    "adamw": lambda outer: optax.adamw(1.0, weight_decay=outer.weight_decay),
}
"""By the name that `outer.tx` gives: `factory(settings.outer) -> transformation`."""
