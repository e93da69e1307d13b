"""The optimizers that a run chooses from by name, as optax transformations at learning rate 1.

The config's rate, warm-up and schedule multiply their updates: inner ones by the rate of each
update, outer ones by `outer.learning_rate`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import PyTree


def adamw(inner: Any) -> optax.GradientTransformation:
    """AdamW with the config's decay rates and decoupled weight decay."""
    return optax.adamw(1.0, b1=inner.beta1, b2=inner.beta2, weight_decay=inner.weight_decay)


def label_by_shape(params: PyTree) -> PyTree:
    """Labels each leaf by its own shape: "matrix" where it has two axes, else "other"."""
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "other", params)


def muon(
    inner: Any, *, label_params: Callable[[PyTree], PyTree] = label_by_shape
) -> optax.GradientTransformation:
    """Muon for the matrices of hidden layers, each layer's on its own, and AdamW for the rest.

    A matrix's momentum (decay `beta1`, not Nesterov) is orthogonalised by five Newton-Schulz steps
    and multiplied by sqrt(fan_out / fan_in). Weight decay is decoupled, and the same for all
    parameters, as is the learning rate.

    Args:
      inner: The settings' group `inner`.
      label_params: Gives a tree of the parameters' structure: "matrix" for [in, out],
        "stacked_matrix" for [layers, in, out], anything else for what AdamW updates.

    Returns:
      A transformation whose `init` and `update` raise ValueError if no leaf is a matrix.

    Source: MuLoCo (arXiv 2505.23725); Newton-Schulz is optax's. Its `optax.contrib.muon` scales by
      at least 1, where MuLoCo also scales down.
    """

    def label(params):
        labels = jax.tree.map(
            lambda label: label if label in ("matrix", "stacked_matrix") else "other",
            label_params(params),
        )
        if {*jax.tree.leaves(labels)} == {"other"}:
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


def nesterov_by_interval(outer: Any) -> optax.GradientTransformationExtraArgs:
    """Nesterov momentum for rounds of unequal length.

    A round of p base rounds, p any number above 0, moves parameters and momentum as p rounds of the
    base length would have, each with the pseudo-gradient divided by p. With momentum decay mu,
    momentum m and pseudo-gradient D, that is in closed form

        n = (1 - mu^p) / (1 - mu)
        m <- mu^p m + n D / p
        update = D + mu (mu n m + (p - mu n) / (1 - mu) D / p),  with m before the round

    which p = 1 makes plain Nesterov.

    Args:
      outer: The settings' group `outer`.

    Returns:
      A transformation whose `update` takes p as the extra argument `interval`, float32 (); 1
      without it.

    Source: AutoLoCo (arXiv 2609.36662), known to us second-hand, takes D / p and mu^p; that the
      step be that of p base rounds, and its closed form, are ours.
    """
    mu = outer.momentum
    log_mu = math.log(mu) if mu > 0 else -math.inf  # in float64: differences of it are divided

    def init(params):
        return optax.TraceState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None, *, interval=1.0, **_):
        p = jnp.maximum(interval, 1e-6)  # the learning rate may have been zero throughout
        kept = mu**p
        n = -jnp.expm1(p * log_mu) / (1 - mu)  # sum of mu^k, k from 0 to p - 1
        moved = 1 + mu * (p - mu * n) / (1 - mu) / p

        def step(grad, momentum):
            return -(moved * grad + mu * mu * n * momentum)

        trace = jax.tree.map(lambda m, grad: kept * m + n / p * grad, state.trace, updates)
        return jax.tree.map(step, updates, state.trace), optax.TraceState(trace)

    return optax.GradientTransformationExtraArgs(init, update)


OUTER_OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "nesterov": lambda outer: optax.sgd(1.0, momentum=outer.momentum, nesterov=True),
    "nesterov_by_interval": nesterov_by_interval,
    "sgd": lambda outer: optax.sgd(1.0),
    "adamw": lambda outer: optax.adamw(1.0, weight_decay=outer.weight_decay),
}
"""By the name that `outer.tx` gives: `factory(settings.outer) -> transformation`.

One that takes extra arguments is given `interval`, see `nesterov_by_interval`.
"""
