"""Muon against NumPy and AdamW; Nesterov momentum scaled by the length of rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ensembles import draw

from adloco_jax.contrib import INNER_OPTIMIZERS

INNER = {"beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3}
LABELS = {
    "embed": {"embedding": "embedding"},
    "layers": {
        "mlp": {"up": {"kernel": "stacked_matrix"}, "down": {"kernel": "stacked_matrix"}},
        "norm": {"scale": "stacked_other"},
    },
    "pooler": {"kernel": "matrix", "bias": "other"},
    "head": {"kernel": "head"},
}
MUON = INNER_OPTIMIZERS["muon"](**INNER, label_params=lambda params: LABELS)
SHAPES = {
    "embed": {"embedding": (7, 4)},
    "layers": {
        "mlp": {"up": {"kernel": (3, 4, 10)}, "down": {"kernel": (3, 10, 4)}},
        "norm": {"scale": (3, 4)},
    },
    "pooler": {"kernel": (4, 4), "bias": (4,)},
    "head": {"kernel": (4, 7)},
}


def normal(seed):
    return jax.tree.map(np.float64, draw(SHAPES, seed=seed))


def moved(tx, params, grads):
    """The updates at rate 1, one after another, each added to the parameters."""

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state, updates

    # Newton-Schulz steps enlarge small values, rounding errors included, up to 500 times.
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, params)
        state, made = tx.init(params), []
        for grad in grads:
            params, state, updates = step(params, state, grad)
            made.append(jax.device_get(updates))
    return made


@pytest.fixture(scope="module")
def updates():
    return moved(MUON, normal(0), [normal(1), normal(2), normal(3)])


def newton_schulz(matrix, num_steps=5):
    """The quintic iteration, with the coefficients of Keller Jordan's Muon."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(num_steps):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def by_numpy(params, grads):
    """Muon's updates of one matrix [in, out]."""
    momentum, made = 0.0, []
    for grad in grads:
        momentum = INNER["beta1"] * momentum + grad
        scale = np.sqrt(params.shape[1] / params.shape[0])
        made.append(-scale * newton_schulz(momentum) - INNER["weight_decay"] * params)
        params = params + made[-1]
    return made


@pytest.mark.parametrize("path", [("layers", "mlp", "up"), ("layers", "mlp", "down"), ("pooler",)])
def test_each_layers_matrix_is_updated_as_by_numpy(updates, path):
    def kernels(tree):
        for name in path:
            tree = tree[name]
        return tree["kernel"].reshape(-1, *tree["kernel"].shape[-2:])

    grads = [kernels(normal(seed)) for seed in (1, 2, 3)]
    for layer, params in enumerate(kernels(normal(0))):
        expected = by_numpy(params, [grad[layer] for grad in grads])
        for update, by_hand in zip(updates, expected, strict=True):
            np.testing.assert_allclose(kernels(update)[layer], by_hand, rtol=1e-5)


def test_embeddings_head_and_vectors_move_exactly_as_with_adamw(updates):
    grads = [normal(1), normal(2), normal(3)]
    others = {"embed", "norm", "head", "bias"}
    for muon, adamw in zip(
        updates, moved(INNER_OPTIMIZERS["adamw"](**INNER), normal(0), grads), strict=True
    ):
        for path, leaf in jax.tree.leaves_with_path(muon):
            expected = dict(jax.tree.leaves_with_path(adamw))[path]
            is_other = bool(others & {key.key for key in path})
            assert np.array_equal(leaf, expected) == is_other


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_of_matrices_leaves_out_what_is_labelled_other(name):
    """Without gradients an update is the decay alone."""
    factory = INNER_OPTIMIZERS[name]
    for decay in ("all", "matrices"):
        tx = factory(**INNER, decay=decay, label_params=lambda params: LABELS)
        (updates,) = moved(tx, normal(0), [jax.tree.map(np.zeros_like, normal(0))])
        for update, leaf, label in zip(
            *map(jax.tree.leaves, (updates, normal(0), LABELS)), strict=True
        ):
            left_out = decay == "matrices" and label in ("other", "stacked_other")
            factor = 0.0 if left_out else -INNER["weight_decay"]
            np.testing.assert_allclose(update, factor * leaf, rtol=1e-12)


def test_a_model_without_hidden_matrices_is_refused():
    with pytest.raises(ValueError, match="no parameter is labelled as a hidden layer's matrix"):
        INNER_OPTIMIZERS["muon"](**INNER).init({"embed": jnp.zeros((2, 3, 3))})
