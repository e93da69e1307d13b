"""The optimizers that a run chooses from by name, as optax transformations at learning rate 1.

The config's rate, warm-up and schedule multiply their updates: inner ones by the rate of each
update, outer ones by `outer.learning_rate`.
"""

from collections.abc import Callable
from typing import Any

import optax


def adamw(inner: Any) -> optax.GradientTransformation:
    """AdamW with the config's decay rates and decoupled weight decay."""
    return optax.adamw(1.0, b1=inner.beta1, b2=inner.beta2, weight_decay=inner.weight_decay)


INNER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "sgd": lambda inner: optax.sgd(1.0),
}
"""By the name that `inner.tx` gives: `factory(settings.inner) -> transformation`.

A factory with a parameter `label_params` is given the model's, see `contrib.muon`.
"""

OUTER_OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "nesterov": lambda outer: optax.sgd(1.0, momentum=outer.momentum, nesterov=True),
    "sgd": lambda outer: optax.sgd(1.0),
    "adamw": lambda outer: optax.adamw(1.0, weight_decay=0.0),
}
"""By the name that `outer.tx` gives: `factory(settings.outer) -> transformation`.

A transformation whose `update` has the keyword `interval` is given each trainer's round in rounds
of the base length, see `contrib.nesterov_by_interval`.
"""
