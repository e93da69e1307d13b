"""An aggregator of your own: the median of the workers.

Run it:  adloco train examples/aggregator.py --config.num_rounds=2
"""

import jax
import jax.numpy as jnp

from adloco_jax import AGGREGATORS
from adloco_jax.config import default_config


def median(difference_W, share_W):
    """Each entry's median over the workers, which one outlier cannot change much."""

    def of_leaf(leaf_W):
        used_W = share_W.reshape(-1, *[1] * (leaf_W.ndim - 1)) > 0
        return jnp.nanmedian(jnp.where(used_W, leaf_W, jnp.nan), axis=0)

    return jax.tree.map(of_leaf, difference_W)


AGGREGATORS["median"] = median


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.outer.aggregator = "median"
    return config
