"""Gradient taps of the Llama, and the statistics they give, against per-example gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.core.gradstats import per_example_products
from adloco_jax.models import Llama, next_token_loss
from adloco_jax.models.layers import add_bias, add_positions, apply_gain, look_up, project

SIZES = {
    "vocab_size": 13,
    "width": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_width": 20,
    "max_length": 16,
}
BATCH, LENGTH = 7, 9


def make_params(seed=0, num_kv_heads=2):
    """Random parameters large enough that every part of the network matters."""
    model = Llama(**SIZES | {"num_kv_heads": num_kv_heads})
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: np.float32(rng.normal(1.0 if s.ndim == 1 else 0.0, 0.4, s.shape)), shapes
    )


def make_tokens(seed=0, batch=BATCH):
    """Few ids and many positions: most tokens of a sequence repeat."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, SIZES["vocab_size"], (batch, LENGTH + 1), dtype=np.int32)


def tapped_grad(loss_fn):
    """(params, tokens, tap_B) -> gradients of the mean loss and the taps' cotangent."""
    return jax.jit(
        jax.grad(lambda params, tokens, tap_B: loss_fn(params, tokens, tap_B=tap_B), (0, 2))
    )


def flat(tree, axes=0):
    """All leaves as one float64 array, their first `axes` axes kept."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*leaf.shape[:axes], -1) for leaf in leaves], axis=-1)


@functools.cache
def plain_example_grads(num_kv_heads=2, dtype="float32"):
    """Per-example gradients [B, P] on the path without taps."""
    loss_fn = next_token_loss(Llama(**SIZES | {"num_kv_heads": num_kv_heads}, dtype=dtype))
    grads = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))
    return flat(grads(make_params(num_kv_heads=num_kv_heads), make_tokens()[:, None]), axes=1)


def relative(actual, expected):
    return np.max(np.abs(np.asarray(actual, np.float64) / expected - 1))


# --- The estimators, on the whole model


@pytest.mark.parametrize(
    ("num_kv_heads", "remat", "chunk", "chunk_size", "dtype", "tolerance"),
    [
        (2, False, 2, None, "float32", 1e-5),
        (4, True, 0, 2, "float32", 1e-5),
        (2, True, 1, None, "bfloat16", 2e-2),
        pytest.param(1, False, 0, 1, "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param(2, True, 1, 5, "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param(2, False, 0, 3, "bfloat16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_taps_and_forward_mode_agree_with_per_example_gradients(
    num_kv_heads, remat, chunk, chunk_size, dtype, tolerance
):
    model = Llama(**SIZES | {"num_kv_heads": num_kv_heads}, remat=remat, dtype=dtype)
    loss_fn = next_token_loss(model, sequences_per_chunk=chunk)
    grads = plain_example_grads(num_kv_heads, dtype)
    mean = grads.mean(axis=0)
    norms, length = (grads**2).sum(axis=1), np.sqrt(mean @ mean)
    measure = functools.partial(
        per_example_products, loss_fn, estimator="taps", chunk_size=chunk_size
    )
    norms_B, products_B = jax.jit(measure)(make_params(num_kv_heads=num_kv_heads), make_tokens())
    assert relative(norms_B, norms) < tolerance
    assert np.max(np.abs(products_B - grads @ mean) / np.sqrt(norms) / length) < tolerance
    assert relative(np.sqrt(np.mean(products_B)), length) < tolerance


def test_taps_by_trainer_and_worker_equal_a_loop():
    grads = tapped_grad(next_token_loss(Llama(**SIZES, remat=True), sequences_per_chunk=2))
    params = [make_params(seed) for seed in range(2)]
    tokens = np.stack([[make_tokens(3 * m + r) for r in range(3)] for m in range(2)])
    taps = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.3, (2, 3, BATCH)), -1.0, 0.0)
    params_M = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
    stacked = jax.jit(jax.vmap(jax.vmap(grads, in_axes=(None, 0, 0))))(params_M, tokens, taps)
    for m, r in np.ndindex(2, 3):
        mine, norms_B = jax.tree.map(lambda leaf, m=m, r=r: leaf[m, r], stacked)
        alone, alone_B = grads(params[m], tokens[m, r], taps[m, r])
        np.testing.assert_allclose(norms_B, alone_B, rtol=1e-4)
        np.testing.assert_allclose(flat(mine), flat(alone), rtol=1e-3, atol=1e-6)


# --- The layers


def test_the_loss_is_the_same_with_taps_and_plain_without():
    loss_fn = next_token_loss(Llama(**SIZES), sequences_per_chunk=2)
    params, tokens, tap_B = make_params(), make_tokens(), jnp.zeros(BATCH)
    assert jax.jit(loss_fn)(params, tokens) == jax.jit(loss_fn)(params, tokens, tap_B)
    assert "custom_vjp" in str(jax.make_jaxpr(loss_fn)(params, tokens, tap_B))
    assert "custom_vjp" not in str(jax.make_jaxpr(loss_fn)(params, tokens))


def test_negative_tap_leaves_out_an_example_of_nan():
    loss_fn = next_token_loss(Llama(**SIZES, remat=True), sequences_per_chunk=3)
    params, tokens = make_params(), make_tokens()
    broken = tokens.copy()
    broken[2, 0] = SIZES["vocab_size"]  # NaN from the embedding on
    tap_B = jnp.zeros(BATCH).at[2].set(-1.0)
    backward = tapped_grad(loss_fn)
    grads, norms_B = backward(params, broken, tap_B)
    others = np.arange(BATCH) != 2
    expected = plain_example_grads()[others]
    assert norms_B[2] == 0.0
    assert relative(BATCH**2 * norms_B[others], (expected**2).sum(axis=1)) < 1e-5
    np.testing.assert_allclose(flat(grads), expected.sum(axis=0) / BATCH, rtol=1e-4, atol=1e-6)
    # Without the mask it reaches everything.
    grads, norms_B = backward(params, broken, jnp.zeros(BATCH))
    assert np.isnan(norms_B[2]) and np.isfinite(norms_B[others]).all()
    assert np.isnan(flat(grads)).any()


def take(tokens_BL, table_VD, tap_B):
    return look_up(table_VD, tokens_BL, tap_B)


TOKENS_BL = [[0, 1, 2, 3, 4], [2, 2, 2, 5, 5], [1, 1, 1, 1, 1]]
LAYERS = {
    "project": (functools.partial(project, dtype="float32"), (4, 3)),
    "apply_gain": (apply_gain, (4,)),
    "add_bias": (add_bias, (4,)),
    "add_positions": (add_positions, (5, 4)),
    "look_up": (take, (6, 4)),
}


def layer_case(name):
    """The layer, its input, its weight and a cotangent of its output."""
    layer, weight_shape = LAYERS[name]
    rng = np.random.default_rng(0)
    x_B = jnp.array(TOKENS_BL) if name == "look_up" else jnp.float32(rng.normal(size=(3, 5, 4)))
    weight = jnp.float32(rng.normal(size=weight_shape))
    return layer, x_B, weight, jnp.float32(rng.normal(size=layer(x_B, weight, None).shape))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_tap_is_the_squared_norm_of_each_examples_weight_gradient(name):
    layer, x_B, weight, dy_B = layer_case(name)

    def backward(x_B, dy_B, tap_B):
        return jax.vjp(lambda w, tap_B: layer(x_B, w, tap_B), weight, tap_B)[1](dy_B)

    grad, norms_B = jax.jit(backward)(x_B, dy_B, jnp.zeros(3))
    alone = [
        jax.vjp(lambda w, b=b: layer(x_B[b : b + 1], w, None), weight)[1](dy_B[b : b + 1])[0]
        for b in range(3)
    ]
    np.testing.assert_allclose(norms_B, [np.sum(np.square(g)) for g in alone], rtol=1e-5)
    np.testing.assert_allclose(grad, sum(alone), rtol=1e-4, atol=1e-6)
    # Selection, not multiplication: NaN on either side of the product stays out.
    if name != "look_up":
        x_B = x_B.at[1].set(jnp.nan)
    dy_B = dy_B.at[1].set(jnp.nan)
    grad, norms_B = jax.jit(backward)(x_B, dy_B, jnp.array([0.0, -1.0, 0.0]))
    assert norms_B[1] == 0.0
    np.testing.assert_allclose(grad, alone[0] + alone[2], rtol=1e-4, atol=1e-6)


def test_equal_tokens_of_a_sequence_add_up_before_they_are_squared():
    _, tokens_BL, table_VD, dy_BLD = layer_case("look_up")
    backward = jax.vjp(lambda tap_B: look_up(table_VD, tokens_BL, tap_B), jnp.zeros(3))[1]
    (tap,) = backward(dy_BLD)
    squares_B = np.square(dy_BLD).sum(axis=(1, 2))  # what it would be without cross terms
    np.testing.assert_allclose(tap[0], squares_B[0], rtol=1e-5)  # no token repeats
    assert np.all(np.abs(tap[1:] / squares_B[1:] - 1) > 0.05)
    np.testing.assert_allclose(tap[2], np.square(dy_BLD[2].sum(axis=0)).sum(), rtol=1e-5)


def test_taps_cost_one_weight_gradient_of_memory_at_the_shapes_of_microllama():
    model = Llama(
        vocab_size=32000,
        width=1024,
        num_layers=12,
        num_heads=16,
        num_kv_heads=4,
        mlp_width=5632,
        max_length=2048,
        dtype="bfloat16",
        remat=True,
    )
    loss_fn = next_token_loss(model, sequences_per_chunk=4)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    largest = 4 * 1024 * 32000  # bytes of the head, and of the embedding

    def temporary_bytes(function, *args):
        return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes

    tokens, tap_B = jax.ShapeDtypeStruct((4, 513), jnp.int32), jax.ShapeDtypeStruct((4,), "float32")
    plain = temporary_bytes(jax.grad(loss_fn), params, tokens)
    assert temporary_bytes(tapped_grad(loss_fn), params, tokens, tap_B) - plain < 1.5 * largest
