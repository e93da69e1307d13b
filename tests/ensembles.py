"""A small regression for tests of the core, and ensembles of its parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adloco_jax import init, outer_update, start_round

ADAMW = optax.adamw(0.05, weight_decay=0.1)
SGD = optax.sgd(0.1)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
PLAIN = optax.sgd(1.0)  # as outer optimizer it takes the mean of the workers
TXS = {"inner_tx": ADAMW, "outer_tx": NESTEROV}


def draw(shapes, *lead, seed=0):
    """Random float32 arrays, from a tree of their shapes without the leading axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=(*lead, *shape)).astype(np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def params_of(seed=0):
    return draw({"w": (3, 2), "b": (2,)}, seed=seed) | {"scale": np.float32(0.7 + 0.1 * seed)}


def batch_of(*shape, seed=1):
    return draw({"x": (3,), "y": (2,)}, *shape, seed=seed)


def loss_fn(params, batch):
    output = jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) * params["scale"]
    return jnp.mean(jnp.square(output - batch["y"]))


def ensemble_of(sizes, params=None, *, inner_tx=ADAMW, outer_tx=NESTEROV, **how):
    """An ensemble of equal trainers, each with the given number of workers."""
    return init(
        params_of() if params is None else params,
        num_trainers=len(sizes),
        num_workers=sum(sizes),
        inner_tx=inner_tx,
        outer_tx=outer_tx,
        sizes=sizes,
        **how,
    )


def pseudo_gradients(difference_R, weights_R, sizes, **how):
    """Pseudo-gradients [M] and their norms for workers with these differences."""
    zeros = jax.tree.map(lambda leaf_R: jnp.zeros(leaf_R.shape[1:]), difference_R)
    ensemble = ensemble_of(sizes, zeros, inner_tx=PLAIN, outer_tx=PLAIN)
    workers = start_round(ensemble)
    workers = workers.replace(params_R=jax.tree.map(jnp.negative, difference_R))
    after, norm_M = outer_update(ensemble, workers, outer_tx=PLAIN, weights_R=weights_R, **how)
    return jax.tree.map(jnp.negative, after.params_M), norm_M


def filled(ensemble, seed=0):
    """A tree with random entries; integers are ten times their positions."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if leaf.dtype == jnp.int32:
            return 10 * jnp.arange(len(leaf), dtype=jnp.int32)
        return jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)

    names = ("params_M", "outer_state_M", "inner_state_R", "params_R", "average_M")
    return ensemble.replace(**{name: jax.tree.map(fill, getattr(ensemble, name)) for name in names})
