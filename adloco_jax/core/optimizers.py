"""The optimizers that a run chooses from by name, as optax transformations at learning rate 1.

The config's rate, warm-up and schedule multiply their updates: inner ones by the rate of each
update, outer ones by `outer.learning_rate`.
"""

from collections.abc import Callable
from typing import Any

import optax

INNER_OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adamw": lambda inner: optax.adamw(
        1.0, b1=inner.beta1, b2=inner.beta2, weight_decay=inner.weight_decay
    ),
    "sgd": lambda inner: optax.sgd(1.0),
}
"""By the name that `inner.tx` gives: `factory(settings.inner) -> transformation`."""

OUTER_OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "nesterov": lambda outer: optax.sgd(1.0, momentum=outer.momentum, nesterov=True),
    "sgd": lambda outer: optax.sgd(1.0),
    "adamw": lambda outer: optax.adamw(1.0, weight_decay=outer.weight_decay),
}
"""By the name that `outer.tx` gives: `factory(settings.outer) -> transformation`."""
