"""Optimizers of your own: Lion inside, heavy ball outside.

Run it:  adloco train examples/optimizers.py --config.num_rounds=2
"""

import optax

from adloco_jax import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.config import default_config

INNER_OPTIMIZERS["lion"] = lambda *, weight_decay, **_: optax.lion(1.0, weight_decay=weight_decay)
OUTER_OPTIMIZERS["heavy_ball"] = lambda *, momentum: optax.sgd(1.0, momentum=momentum)


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.inner.tx, config.inner.learning_rate = "lion", 1e-3
    config.outer.tx = "heavy_ball"
    return config
