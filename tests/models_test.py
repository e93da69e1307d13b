"""Properties of every model: names, initial weights, dtypes, backward-pass memory, errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from nets import (
    BATCH,
    LENGTH,
    NETWORKS,
    TAPPED,
    flat,
    loss_of,
    make_params,
    make_rows,
    stack,
    step_of,
    tapped_grad,
)
from trees import assert_close

from adloco_jax.models import Bert, Llama, class_logits
from adloco_jax.models.layers import param_shapes

each_network = pytest.mark.parametrize("name", NETWORKS)


@each_network
def test_weights_start_normal_with_deviation_two_hundredths_gains_at_one_biases_at_zero(name):
    larger = dict(vocab_size=512, width=64, mlp_width=96, max_length=64)
    larger |= {"num_classes": 50, "type_vocab_size": 50} if name == "bert" else {}
    model = NETWORKS[name].clone(**larger)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in ("scale", "bias"):
            np.testing.assert_array_equal(leaf, 1.0 if path[-1].key == "scale" else 0.0)
        else:
            assert abs(leaf.mean()) < 2e-3
            np.testing.assert_allclose(leaf.std(), 0.02, rtol=0.05)
    up_NDF = params["layers"]["mlp"]["up"]["kernel"]
    assert abs(np.corrcoef(up_NDF[0].ravel(), up_NDF[1].ravel())[0, 1]) < 0.1


def test_published_models_have_their_numbers_of_parameters():
    micro = dict(vocab_size=32000, width=1024, num_layers=12, num_heads=16, num_kv_heads=4)
    qwen = dict(vocab_size=151_936, width=1024, num_layers=28, num_heads=16, num_kv_heads=8)
    qwen |= dict(mlp_width=3072, max_length=40_960, head_size=128, qk_norm=True, tied=True)
    base = dict(vocab_size=30522, width=768, num_layers=12, num_heads=12, num_classes=2)
    for model, num_params in [
        (Llama(**micro, mlp_width=5632, max_length=2048), 304_636_928),
        (Llama(**qwen), 596_049_920),  # Qwen3-0.6B
        # Equals BertForSequenceClassification(BertConfig()).num_parameters() of transformers 5.
        (Bert(**base, mlp_width=3072, max_length=512), 109_483_778),
    ]:
        assert sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model))) == num_params


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"layer_form": "inline", "remat": True}),
        ("family", {"layer_form": "call"}),
        ("bert", {"remat": True}),
    ],
)
def test_neither_parameters_nor_loss_nor_gradients_change(name, change):
    plain = TAPPED[name]
    other = plain.clone(**change)
    assert param_shapes(plain) == param_shapes(other)
    params, rows = make_params(plain), make_rows(plain)
    results = [step_of(model)(params, rows) for model in (other, plain)]
    assert_close(*results, rtol=1e-3, atol=1e-6)


def test_layers_as_functions_are_the_scanned_ones_under_every_transform():
    scanned = NETWORKS["llama"]
    params = [make_params(scanned, seed) for seed in range(2)]
    rows, tap_B = jnp.asarray(make_rows(scanned)), jnp.zeros(BATCH)
    loss_fn = loss_of(scanned.clone(layer_form="call"))
    step = jax.vmap(jax.value_and_grad(loss_fn, argnums=(0, 2)), in_axes=(0, None, None))
    slope = functools.partial(jax.jvp, lambda params: loss_fn(params, rows))
    both = jax.jit(lambda p_M, p, d: (step(p_M, rows, tap_B), slope((p,), (d,))))
    found_M, (_, found_slope) = both(stack(*params), *params)
    one_step = jax.jit(jax.value_and_grad(loss_of(scanned), argnums=(0, 2)))
    expected = [one_step(p, rows, tap_B) for p in params]
    assert_close(found_M, stack(*expected), rtol=1e-4, atol=1e-6)
    _, (grads, _) = expected[0]
    np.testing.assert_allclose(found_slope, flat(grads) @ flat(params[1]), rtol=1e-4)


def test_layers_as_functions_are_functions_of_the_program_and_keep_no_stacks():
    def calls_and_stacks(model):
        text = step_of(model).lower(make_params(model), make_rows(model)).compile().as_text()
        stacks = re.findall(re.escape(f"f32[{model.num_layers},{BATCH},{LENGTH},"), text)
        return len(re.findall(r" call\(.*frontend_attributes", text)), len(stacks)

    scanned = NETWORKS["llama"]
    assert calls_and_stacks(scanned.clone(layer_form="call")) == (2 * scanned.num_layers, 0)
    assert calls_and_stacks(scanned.clone(layer_form="inline")) == (0, 0)
    calls, stacks = calls_and_stacks(scanned)
    assert calls == 0 < stacks


def test_inlined_layers_are_recomputed_only_if_rematerialised():
    def num_products(**how):
        model = NETWORKS["llama"].clone(layer_form="inline", **how)
        text = step_of(model).lower(make_params(model), make_rows(model)).compile().as_text()
        return len(re.findall(r" = .* dot\(", text))

    # The backward pass needs the results of all products of a layer but the last.
    more = num_products(remat=True) - num_products(remat=False)
    assert more == 8 * NETWORKS["llama"].num_layers


@pytest.mark.parametrize(
    ("name", "num_kept", "shape"),
    [("llama", 2, (2, BATCH, LENGTH, 20)), ("bert", 1, (2, BATCH * LENGTH, 20))],
)
def test_remat_keeps_no_product_of_the_layer(name, num_kept, shape):
    def kept_mlp_arrays(model):
        rows, params = jnp.asarray(make_rows(model)), make_params(model)
        kept = jax.eval_shape(lambda p: jax.vjp(lambda q: loss_of(model)(q, rows), p)[1], params)
        return sum(leaf.shape == shape for leaf in jax.tree.leaves(kept))

    assert kept_mlp_arrays(NETWORKS[name]) == num_kept
    assert kept_mlp_arrays(NETWORKS[name].clone(remat=True)) == 0


def next_token_logits(model):
    return lambda params, rows: model.apply({"params": params}, rows[:, :-1])


@each_network
def test_bfloat16_compute_keeps_parameters_sums_and_gradients_float32(name):
    exact = NETWORKS[name]
    rounded = exact.clone(dtype="bfloat16")
    params, rows, tap_B = make_params(exact), make_rows(exact), jnp.zeros(BATCH)
    logits, expected = (
        jax.jit(class_logits(model) if name == "bert" else next_token_logits(model))(params, rows)
        for model in (rounded, exact)
    )
    results = jax.eval_shape(step_of(rounded), params, rows)
    dtypes = {x.dtype for x in jax.tree.leaves((param_shapes(rounded), logits, results))}
    assert dtypes == {jnp.dtype("float32")}
    assert not (logits == logits.astype(jnp.bfloat16)).all()
    np.testing.assert_allclose(logits, expected, rtol=0.05, atol=0.1)
    program = str(jax.make_jaxpr(tapped_grad(rounded))(params, rows, tap_B))
    for operation in ("rsqrt", "exp", "log", "reduce_max"):  # norms, softmax, loss
        dtypes = set(re.findall(rf":(\w+)\[[\d,]*\] = {operation}\b", program))
        assert dtypes == {"f32"}, operation


def products(jaxpr):
    """The matrix products of a jaxpr and of everything it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from products(inner)


@each_network
def test_in_bfloat16_no_product_multiplies_float32_matrices(name):
    model = NETWORKS[name].clone(dtype="bfloat16")
    params, rows, loss_fn = make_params(model), jnp.asarray(make_rows(model)), loss_of(model)
    tap_B = jnp.zeros(BATCH)

    def slope(params, direction):
        return jax.jvp(lambda p: loss_fn(p, rows), (params,), (direction,))

    for function, inputs in (
        (step_of(model), (params, rows)),
        (tapped_grad(model), (params, rows, tap_B)),
        (slope, (params, params)),
    ):
        for eqn in products(jax.make_jaxpr(function)(*inputs).jaxpr):
            types = {str(var.aval.dtype) for var in eqn.invars}
            # Per-example norms of the embedding table are deliberately sums of float32 products.
            assert types == {"bfloat16"} or "HIGHEST" in str(eqn.params["precision"]), eqn


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"num_heads": 3}, "num_heads=3, width=16: the heads must divide the width"),
        ("llama", {"num_kv_heads": 3}, "num_kv_heads=3, num_heads=4: the key/value heads must"),
        ("llama", {"width": 12}, "num_heads=4, width=12: rotary embeddings need an even head"),
        ("llama", {"dtype": "float16"}, "dtype='float16': must be one of float32, bfloat16"),
        ("llama", {"attention": "flash"}, "attention='flash' must be one of xla, cudnn"),
        ("llama", {"max_length": 8}, "9 tokens per sequence, max_length is 8"),
        ("bert", {"num_classes": 1}, "num_classes=1: must be at least 2"),
    ],
)
def test_faulty_sizes_raise_while_tracing(name, change, message):
    model, rows = NETWORKS[name].clone(**change), make_rows(NETWORKS[name])
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(loss_of(model), param_shapes(NETWORKS[name]), rows)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("llama", (BATCH, 1)), ("llama", (LENGTH + 1,)), ("bert", (BATCH, 2)), ("bert", (1, 2, 3))],
)
def test_rows_without_a_target_a_token_or_a_batch_axis_raise(name, shape):
    model, rows = NETWORKS[name], jax.ShapeDtypeStruct(shape, jnp.int32)
    with pytest.raises(ValueError, match=re.escape(f" has shape {shape}")):
        jax.eval_shape(loss_of(model), param_shapes(model), rows)
