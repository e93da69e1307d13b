"""Gradient taps and their statistics, against per-example gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from nets import (
    BATCH,
    NETWORKS,
    TAPPED,
    assert_same,
    example_grads,
    flat,
    in_true_units,
    loss_of,
    make_params,
    make_rows,
    tapped_grad,
)

from adloco_jax import gradient_stats
from adloco_jax.core.gradstats import resolve_estimator
from adloco_jax.models import Llama
from adloco_jax.models.layers import add_bias, apply_gain, look_up, param_shapes, project


def relative(actual, expected):
    return np.max(np.abs(np.asarray(actual, np.float64) / expected - 1))


# --- Whole models


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("bert", "float32", 1e-5),
        ("family", "float32", 1e-5),
        pytest.param("llama", "bfloat16", 2e-2, marks=pytest.mark.slow),
        pytest.param("family", "bfloat16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_taps_are_the_squared_norms_of_per_example_gradients(name, dtype, tolerance):
    exact = TAPPED[name]
    model = exact.clone(dtype=dtype, remat=dtype == "bfloat16")
    grads = flat(example_grads(exact.clone(dtype=dtype)), axes=1)
    mean, norms_B = tapped_grad(model)(make_params(exact), make_rows(exact), jnp.zeros(BATCH))
    assert relative(BATCH**2 * norms_B, np.square(grads).sum(axis=1)) < tolerance
    assert np.linalg.norm(flat(mean) - grads.mean(axis=0)) < tolerance * np.linalg.norm(flat(mean))


def test_products_by_taps_and_forward_mode_are_those_of_per_example_gradients():
    exact = TAPPED["family"]
    model = exact.clone(remat=True)
    grads = flat(example_grads(exact), axes=1)
    loss_fn = loss_of(model, sequences_per_chunk=2)
    measure = functools.partial(gradient_stats, loss_fn, estimator="taps", chunk_size=5)
    stats = jax.jit(measure)(make_params(exact), make_rows(model))
    assert_same(in_true_units(stats), oracle.gradient_sums(grads))


@pytest.mark.parametrize("name", NETWORKS)
def test_each_parameter_has_one_tap_which_changes_no_loss_and_is_chosen_by_auto(name):
    model = NETWORKS[name]
    loss_fn, params, rows = loss_of(model), make_params(model), make_rows(model)
    args = params, rows, jnp.zeros(BATCH)
    assert jax.jit(loss_fn)(*args) == jax.jit(loss_fn)(params, rows)
    program = str(jax.make_jaxpr(loss_fn)(*args))
    assert program.count("custom_vjp_call[") == len(jax.tree.leaves(params))
    assert "custom_vjp" not in str(jax.make_jaxpr(loss_fn)(params, rows))
    assert resolve_estimator("auto", loss_fn) == "taps"


@pytest.mark.parametrize(
    ("name", "column"),
    [("bert", 2), ("family", 0)],
)
def test_negative_tap_leaves_out_an_example_of_nan(name, column):
    model = TAPPED[name]
    params, rows = make_params(model), make_rows(model)
    rows[2, column] = model.vocab_size  # the embedding gives NaN
    others = np.arange(BATCH) != 2
    expected = flat(example_grads(model), axes=1)[others]
    backward = tapped_grad(model)
    grads, norms_B = backward(params, rows, jnp.zeros(BATCH).at[2].set(-1.0))
    assert norms_B[2] == 0.0
    assert relative(BATCH**2 * norms_B[others], (expected**2).sum(axis=1)) < 1e-5
    np.testing.assert_allclose(flat(grads), expected.sum(axis=0) / BATCH, rtol=1e-4, atol=1e-6)
    # Without the mask the NaN reaches every example.
    grads, norms_B = backward(params, rows, jnp.zeros(BATCH))
    assert np.isnan(norms_B[2]) and np.isfinite(norms_B[others]).all()
    assert np.isnan(flat(grads)).any()


# --- The layers


TOKENS_BL = [[0, 1, 2, 3, 4], [2, 2, 2, 5, 5], [1, 1, 1, 1, 1]]
LAYERS = {
    "project": (functools.partial(project, dtype="float32"), (4, 3)),
    "apply_gain": (apply_gain, (4,)),
    "add_bias": (add_bias, (4,)),
    "add_bias of each position": (add_bias, (5, 4)),
    "look_up": (lambda tokens_BL, table_VD, tap_B: look_up(table_VD, tokens_BL, tap_B), (6, 4)),
}


def layer_case(name):
    """The layer, its input, its weight and a cotangent of its output."""
    layer, weight_shape = LAYERS[name]
    rng = np.random.default_rng(0)
    x_B = jnp.array(TOKENS_BL) if name == "look_up" else jnp.float32(rng.normal(size=(3, 5, 4)))
    weight = jnp.float32(rng.normal(size=weight_shape))
    return layer, x_B, weight, jnp.float32(rng.normal(size=layer(x_B, weight, None).shape))


@pytest.mark.parametrize(("name", "device"), [*((n, "cpu") for n in LAYERS), ("project", "gpu")])
def test_a_layers_tap_is_the_squared_norm_of_each_examples_weight_gradient(
    name, device, as_on_a_gpu
):
    layer, x_B, weight, dy_B = layer_case(name)
    if device == "gpu":
        as_on_a_gpu()

    def backward(x_B, dy_B, tap_B):
        return jax.vjp(lambda w, tap_B: layer(x_B, w, tap_B), weight, tap_B)[1](dy_B)

    grad, norms_B = jax.jit(backward)(x_B, dy_B, jnp.zeros(3))
    alone = [
        jax.vjp(lambda w, b=b: layer(x_B[b : b + 1], w, None), weight)[1](dy_B[b : b + 1])[0]
        for b in range(3)
    ]
    np.testing.assert_allclose(norms_B, [np.sum(np.square(g)) for g in alone], rtol=1e-5)
    np.testing.assert_allclose(grad, sum(alone), rtol=1e-4, atol=1e-6)
    # The mask selects and does not multiply, so NaN on either side of the product stays out.
    if name != "look_up":
        x_B = x_B.at[1].set(jnp.nan)
    dy_B = dy_B.at[1].set(jnp.nan)
    grad, norms_B = jax.jit(backward)(x_B, dy_B, jnp.array([0.0, -1.0, 0.0]))
    assert norms_B[1] == 0.0
    np.testing.assert_allclose(grad, alone[0] + alone[2], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_taps_cost_one_weight_gradient_of_memory_at_the_shapes_of_microllama():
    sizes = dict(vocab_size=32000, width=1024, num_layers=12, num_heads=16, num_kv_heads=4)
    model = Llama(**sizes, mlp_width=5632, max_length=2048, dtype="bfloat16", remat=True)
    params = param_shapes(model)
    largest = 4 * 1024 * 32000  # bytes of the head, and of the embedding

    def temporary_bytes(function, *args):
        return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes

    tokens, tap_B = jax.ShapeDtypeStruct((4, 513), jnp.int32), jax.ShapeDtypeStruct((4,), "float32")
    plain = temporary_bytes(jax.grad(loss_of(model, sequences_per_chunk=4)), params, tokens)
    backward = tapped_grad(model, sequences_per_chunk=4)
    assert temporary_bytes(backward, params, tokens, tap_B) - plain < 1.5 * largest
