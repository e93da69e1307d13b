"""HeLoCo's outer step: updates that point against the outer momentum are corrected by it.

Run it:  adloco train examples/heloco.py --config.num_rounds=2

Source: HeLoCo (arXiv 2606.00271), as others describe its formula; its constants we did not find.
The paper's momentum is an average; here it is DiLoCo's sum, which is compared with updates as an
average.
"""

import jax
import jax.numpy as jnp
import optax

from adloco_jax import OUTER_OPTIMIZERS
from adloco_jax.config import default_config

KEPT = 0.5  # from this cosine to the momentum on, an update is left as it is
SHRINK, MOST_SHRUNK = 1.0, 1.0  # how strongly what points against the momentum is taken away
TURN = 0.5  # how strongly other updates are turned towards the momentum
KAPPA = 1.0  # weight of the momentum's norm in the confidence
TINY = 1e-12


def corrected(update, momentum, first_axis=0):
    """Correct an update by the momentum; the axes from `first_axis` on are one tensor.

    An update against the momentum loses a part of its component along it. One that is less than
    well aligned is turned towards the momentum, at its own length. The longer the momentum, beside
    the update, the smaller both corrections.
    """
    axes = tuple(range(first_axis, update.ndim))

    def total(leaf):
        return jnp.sum(leaf, axis=axes, keepdims=True)

    length, other = (jnp.sqrt(total(jnp.square(leaf))) for leaf in (update, momentum))
    direction, ahead = update / (length + TINY), momentum / (other + TINY)
    cosine = total(direction * ahead)
    confidence = length / (length + KAPPA * other + TINY)

    shrunk = jnp.minimum(SHRINK * -cosine * confidence, MOST_SHRUNK)
    without = update - shrunk * cosine * length * ahead
    turned = jnp.minimum(TURN * (1 - cosine) * confidence, 1.0)
    mixed = (1 - turned) * direction + turned * ahead
    towards = length * mixed / (jnp.sqrt(total(jnp.square(mixed))) + TINY)

    changed = jnp.where(cosine < 0, without, towards)
    return jnp.where((cosine >= KEPT) | (other == 0), update, changed)


def heloco(momentum):
    """Nesterov momentum, as DiLoCo's, of corrected updates. Stacked layers are tensors apart."""

    def of_leaf(path, update, past):
        is_stacked = any(getattr(key, "key", None) == "layers" for key in path)
        average = (1 - momentum) * past
        return corrected(update, average, first_axis=1 if is_stacked else 0)

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def step(updates, past, params=None):
        updates = jax.tree_util.tree_map_with_path(of_leaf, updates, past)
        past = jax.tree.map(lambda update, old: update + momentum * old, updates, past)
        return jax.tree.map(lambda update, new: -(update + momentum * new), updates, past), past

    return optax.GradientTransformation(init, step)


OUTER_OPTIMIZERS["heloco"] = heloco


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.outer.tx = "heloco"
    return config
