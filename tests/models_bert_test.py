"""BERT against a slow NumPy forward pass, its gradient taps, and the laws of padding."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.core.gradstats import gradient_stats, resolve_estimator
from adloco_jax.models import Bert, class_logits, classification_loss, classification_losses

SIZES = {
    "vocab_size": 13,
    "width": 16,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_width": 20,
    "max_length": 11,
    "num_classes": 3,
}
LARGER = SIZES | {"vocab_size": 512, "width": 64, "mlp_width": 96, "max_length": 64}
LARGER |= {"num_classes": 50, "type_vocab_size": 50}
BATCH, LENGTH = 7, 9


def shapes_of(model):
    tokens_BL, lengths_B = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,)))
    return jax.eval_shape(model.init, jax.random.key(0), tokens_BL, lengths_B)["params"]


@functools.cache
def make_params(model, seed=0):
    """Random parameters large enough that every part of the network matters."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(mean, 0.25, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes_of(model))


def make_rows(seed=0, batch=BATCH, length=LENGTH):
    """Rows whose lengths go from 1 to all; few ids, so that tokens repeat."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, SIZES["num_classes"], batch)
    lengths = np.concatenate([[1, length], rng.integers(1, length + 1, batch)])[:batch]
    tokens = rng.integers(0, SIZES["vocab_size"], (batch, length))
    return np.int32(np.column_stack([labels, lengths, tokens]))


@functools.cache
def losses_of(model):
    return jax.jit(classification_losses(model))


@functools.cache
def loss_of(model):
    return jax.jit(classification_loss(model))


@functools.cache
def initial_params(model):
    tokens_BL, lengths_B = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    return jax.jit(model.init)(jax.random.key(0), tokens_BL, lengths_B)["params"]


@functools.cache
def tapped_grad(model):
    """(params, rows, tap_B) -> gradients of the mean loss and the taps' cotangent."""
    loss_fn = classification_loss(model)
    return jax.jit(jax.grad(lambda params, rows, tap_B: loss_fn(params, rows, tap_B=tap_B), (0, 2)))


def flat(tree, axes=0):
    """All leaves as one float64 array, their first `axes` axes kept."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*leaf.shape[:axes], -1) for leaf in leaves], axis=-1)


@functools.cache
def plain_example_grads(dtype="float32"):
    """Gradient of each example alone, leaves [B, ...], on the path without taps."""
    model = Bert(**SIZES, dtype=dtype)
    grads = jax.jit(jax.vmap(jax.grad(classification_loss(model)), in_axes=(None, 0)))
    return grads(make_params(Bert(**SIZES)), make_rows()[:, None])


def relative(actual, expected):
    return np.max(np.abs(np.asarray(actual, np.float64) / expected - 1))


def oracle_logits(params, tokens, *, num_heads, eps):
    """BERT for one sequence without padding in float64, one head and one position at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def linear(x, w):
        return x @ w["kernel"] + w["bias"]

    def norm(x, w):
        return (x - x.mean()) / np.sqrt(x.var() + eps) * w["scale"] + w["bias"]

    def gelu(x):
        return np.array([xi * 0.5 * (1 + math.erf(xi / math.sqrt(2))) for xi in x])

    tables = {name: params[name]["embedding"] for name in ("embed", "position", "token_type")}
    xs = [
        norm(
            tables["embed"][token] + tables["token_type"][0] + tables["position"][t],
            params["embed_norm"],
        )
        for t, token in enumerate(tokens)
    ]
    size = len(xs[0]) // num_heads
    for n in range(len(params["layers"]["mlp_norm"]["scale"])):
        layer = jax.tree.map(lambda w, n=n: w[n], params["layers"])
        queries, keys, values = (
            [linear(x, layer["attention"][name]) for x in xs] for name in ("query", "key", "value")
        )
        heads = [[] for _ in xs]
        for h in range(num_heads):
            mine = slice(h * size, (h + 1) * size)
            for t, query in enumerate(queries):
                weights = np.exp([query[mine] @ key[mine] / np.sqrt(size) for key in keys])
                weights /= weights.sum()
                heads[t].append(sum(w * v[mine] for w, v in zip(weights, values, strict=True)))
        for t, x in enumerate(xs):
            mixed = linear(np.concatenate(heads[t]), layer["attention"]["out"])
            x = norm(x + mixed, layer["attention_norm"])
            hidden = gelu(linear(x, layer["mlp"]["up"]))
            xs[t] = norm(x + linear(hidden, layer["mlp"]["down"]), layer["mlp_norm"])
    return linear(np.tanh(linear(xs[0], params["pooler"])), params["classifier"])


# --- The network


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({}, LENGTH),
        ({"num_heads": 1, "norm_eps": 0.1}, SIZES["max_length"]),
        ({"num_layers": 3, "num_heads": 8, "num_classes": 5, "type_vocab_size": 1}, 4),
        ({"num_layers": 1}, 1),
    ],
)
def test_logits_agree_with_a_slow_float64_forward_pass_of_the_real_tokens(change, length):
    model = Bert(**SIZES | change)
    params, rows = make_params(model), make_rows(length=length)
    logits_BC = jax.jit(class_logits(model))(params, rows)
    assert logits_BC.dtype == jnp.float32
    expected_BC = [
        oracle_logits(params, row[2 : 2 + row[1]], num_heads=model.num_heads, eps=model.norm_eps)
        for row in rows
    ]
    np.testing.assert_allclose(logits_BC, expected_BC, rtol=1e-5, atol=1e-5)


def test_loss_is_the_mean_over_examples_of_the_negative_log_softmax_of_the_label():
    model = Bert(**SIZES)
    params, rows = make_params(model), make_rows()
    logits_BC = np.asarray(jax.jit(class_logits(model))(params, rows), np.float64)
    probs_BC = np.exp(logits_BC) / np.exp(logits_BC).sum(-1, keepdims=True)
    expected_B = -np.log(probs_BC[np.arange(BATCH), rows[:, 0]])
    losses_B = losses_of(model)(params, rows)
    assert losses_B.dtype == jnp.float32
    np.testing.assert_allclose(losses_B, expected_B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss_of(model)(params, rows), expected_B.mean(), rtol=1e-5)


def test_an_untrained_model_knows_nothing():
    model = Bert(**LARGER)
    losses_B = losses_of(model)(initial_params(model), make_rows(batch=32))
    assert abs(np.mean(losses_B) - np.log(LARGER["num_classes"])) < 0.05
    assert np.std(losses_B) > 1e-3  # not a constant


def test_parameter_names_and_shapes_are_stable():
    """These names are in checkpoints and in the weight converter."""
    params = shapes_of(Bert(**SIZES))
    found = {
        "/".join(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert found == {
        "classifier/bias": (3,),
        "classifier/kernel": (16, 3),
        "embed/embedding": (13, 16),
        "embed_norm/bias": (16,),
        "embed_norm/scale": (16,),
        "layers/attention/key/bias": (2, 16),
        "layers/attention/key/kernel": (2, 16, 16),
        "layers/attention/out/bias": (2, 16),
        "layers/attention/out/kernel": (2, 16, 16),
        "layers/attention/query/bias": (2, 16),
        "layers/attention/query/kernel": (2, 16, 16),
        "layers/attention/value/bias": (2, 16),
        "layers/attention/value/kernel": (2, 16, 16),
        "layers/attention_norm/bias": (2, 16),
        "layers/attention_norm/scale": (2, 16),
        "layers/mlp/down/bias": (2, 16),
        "layers/mlp/down/kernel": (2, 20, 16),
        "layers/mlp/up/bias": (2, 20),
        "layers/mlp/up/kernel": (2, 16, 20),
        "layers/mlp_norm/bias": (2, 16),
        "layers/mlp_norm/scale": (2, 16),
        "pooler/bias": (16,),
        "pooler/kernel": (16, 16),
        "position/embedding": (11, 16),
        "token_type/embedding": (2, 16),
    }


def test_weights_start_normal_with_deviation_two_hundredths_gains_at_one_biases_at_zero():
    params = initial_params(Bert(**LARGER))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in ("scale", "bias"):
            np.testing.assert_array_equal(leaf, 1.0 if path[-1].key == "scale" else 0.0)
        else:
            assert abs(leaf.mean()) < 2e-3
            np.testing.assert_allclose(leaf.std(), 0.02, rtol=0.05)


def test_bert_base_has_109_5_million_parameters():
    model = Bert(
        vocab_size=30522,
        width=768,
        num_layers=12,
        num_heads=12,
        mlp_width=3072,
        max_length=512,
        num_classes=2,
    )
    # As BertForSequenceClassification(BertConfig()).num_parameters() of transformers 5.
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes_of(model))) == 109_483_778


@pytest.mark.parametrize("change", [{"remat": True}, {"scan_layers": False}])
def test_neither_the_tree_nor_losses_nor_gradients_change(change):
    plain, other = Bert(**SIZES), Bert(**SIZES, **change)
    assert shapes_of(plain) == shapes_of(other)
    params, rows = make_params(plain), make_rows()
    losses_B, other_B = (losses_of(model)(params, rows) for model in (plain, other))
    np.testing.assert_allclose(losses_B, other_B, rtol=1e-5, atol=1e-6)
    results = [tapped_grad(model)(params, rows, jnp.zeros(BATCH)) for model in (plain, other)]
    np.testing.assert_allclose(*map(flat, results), rtol=1e-3, atol=1e-6)


def test_remat_keeps_no_product_of_the_layer():
    def kept_mlp_arrays(model):
        def backward(params, rows):
            return jax.vjp(lambda p: classification_loss(model)(p, rows), params)[1]

        products = (SIZES["num_layers"], BATCH * LENGTH, SIZES["mlp_width"])
        kept = jax.eval_shape(backward, make_params(model), make_rows())
        return sum(leaf.shape == products for leaf in jax.tree.leaves(kept))

    assert kept_mlp_arrays(Bert(**SIZES)) == 1  # before bias and gelu
    assert kept_mlp_arrays(Bert(**SIZES, remat=True)) == 0


def test_bfloat16_compute_keeps_parameters_sums_and_gradients_float32():
    exact, rounded = Bert(**SIZES), Bert(**SIZES, dtype="bfloat16")
    params, rows, tap_B = make_params(exact), make_rows(), jnp.zeros(BATCH)
    results = jax.eval_shape(tapped_grad(rounded), params, rows, tap_B)
    logits_BC = jax.jit(class_logits(rounded))(params, rows)
    dtypes = {x.dtype for x in jax.tree.leaves((shapes_of(rounded), logits_BC, results))}
    assert dtypes == {jnp.dtype("float32")}
    assert not (logits_BC == logits_BC.astype(jnp.bfloat16)).all()
    np.testing.assert_allclose(
        logits_BC, jax.jit(class_logits(exact))(params, rows), rtol=0.05, atol=0.05
    )
    program = str(jax.make_jaxpr(tapped_grad(rounded))(params, rows, tap_B))
    assert re.search(r":bf16\[[\d,]*\] = dot_general", program)
    for operation in ("rsqrt", "exp", "log", "erfc", "reduce_max", "reduce_sum"):
        found = set(re.findall(rf":(\w+)\[[\d,]*\] = {operation}\b", program))
        assert found == {"f32"}, operation


# --- Padding


def test_what_stands_at_padded_positions_changes_no_bit():
    model = Bert(**SIZES, remat=True)
    params, rows, tap_B = make_params(model), make_rows(), jnp.zeros(BATCH)
    padded = np.arange(LENGTH) >= rows[:, 1:2]
    losses, backward = losses_of(model), tapped_grad(model)
    expected = losses(params, rows), backward(params, rows, tap_B)
    for filler in (0, 5, SIZES["vocab_size"], -1, np.iinfo(np.int32).max):
        others = rows.copy()
        others[:, 2:][padded] = filler
        actual = losses(params, others), backward(params, others, tap_B)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_padded_example_has_the_gradient_of_its_real_tokens_alone():
    model = Bert(**SIZES)
    params, rows, grads = make_params(model), make_rows(), plain_example_grads()
    b = int(np.flatnonzero((rows[:, 1] > 1) & (rows[:, 1] < LENGTH))[0])
    loss_and_grad = jax.jit(jax.value_and_grad(classification_loss(model)))
    loss, grad = loss_and_grad(params, rows[b : b + 1, : 2 + rows[b, 1]])
    np.testing.assert_allclose(losses_of(model)(params, rows)[b], loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(grads, 1)[b], flat(grad), rtol=1e-3, atol=1e-6)


def test_rows_of_the_tables_that_no_real_token_reads_have_no_gradient():
    grads, zeros_L = plain_example_grads(), np.zeros(LENGTH, int)
    for b, row in enumerate(make_rows()):
        read = {"embed": row[2:], "position": np.arange(LENGTH), "token_type": zeros_L}
        for name, ids in read.items():
            used = np.abs(grads[name]["embedding"][b]).sum(axis=1) > 0
            assert set(np.flatnonzero(used)) == set(ids[: row[1]]), (name, b)


@pytest.mark.parametrize(
    ("column", "value"),
    [(0, -1), (0, 3), (1, 0), (1, -2), (1, LENGTH + 1), (2, SIZES["vocab_size"])],
)
def test_a_label_length_or_id_out_of_range_makes_the_examples_loss_nan(column, value):
    model = Bert(**SIZES)
    rows = make_rows()
    rows[3, column] = value
    losses_B = losses_of(model)(make_params(model), rows)
    assert np.isnan(losses_B[3])
    assert np.isfinite(np.delete(losses_B, 3)).all()


# --- Taps, on rows with padding


@pytest.mark.parametrize(
    ("remat", "dtype", "tolerance"),
    [(False, "float32", 1e-5), (True, "float32", 1e-5), (True, "bfloat16", 2e-2)],
)
def test_taps_are_the_squared_norms_of_per_example_gradients(remat, dtype, tolerance):
    model = Bert(**SIZES, remat=remat, dtype=dtype)
    grads = flat(plain_example_grads(dtype), axes=1)
    mean, norms_B = tapped_grad(model)(make_params(Bert(**SIZES)), make_rows(), jnp.zeros(BATCH))
    assert relative(BATCH**2 * norms_B, np.square(grads).sum(axis=1)) < tolerance
    assert np.linalg.norm(flat(mean) - grads.mean(axis=0)) < tolerance * np.linalg.norm(flat(mean))


def test_forward_mode_agrees_with_per_example_gradients():
    model = Bert(**SIZES)
    params, direction, losses_fn = make_params(model), make_params(model, 1), losses_of(model)
    forward = jax.jit(lambda p, d, rows: jax.jvp(lambda q: losses_fn(q, rows), (p,), (d,)))
    _, slopes_B = forward(params, direction, make_rows())
    expected_B = flat(plain_example_grads(), axes=1) @ flat(direction)
    np.testing.assert_allclose(slopes_B, expected_B, rtol=1e-4, atol=1e-4)


def test_every_parameter_has_one_tap_and_a_share_in_the_norms():
    model = Bert(**SIZES)
    params, grads = make_params(model), plain_example_grads()
    whole_B = np.square(flat(grads, axes=1)).sum(axis=1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        share_B = np.square(leaf.reshape(BATCH, -1)).sum(axis=1) / whole_B
        # A bias of the keys shifts all scores of a query alike: the softmax does not see it.
        of_key_bias = [key.key for key in path][-2:] == ["key", "bias"]
        assert np.max(share_B) > 1e-4 or of_key_bias, path
    program = str(jax.make_jaxpr(classification_loss(model))(params, make_rows(), jnp.zeros(BATCH)))
    assert program.count("custom_vjp_call[") == len(jax.tree.leaves(params))


def test_taps_by_trainer_equal_a_loop():
    model = Bert(**SIZES, remat=True)
    backward = tapped_grad(model)
    params = [make_params(model, seed) for seed in range(3)]
    rows = np.stack([make_rows(seed) for seed in range(3)])
    taps = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.3, (3, BATCH)), -1.0, 0.0)
    params_M = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
    grads_M, norms_MB = jax.jit(jax.vmap(backward))(params_M, rows, taps)
    for m in range(3):
        alone, alone_B = backward(params[m], rows[m], taps[m])
        np.testing.assert_allclose(norms_MB[m], alone_B, rtol=1e-4)
        mine = jax.tree.map(lambda leaf, m=m: leaf[m], grads_M)
        np.testing.assert_allclose(flat(mine), flat(alone), rtol=1e-3, atol=1e-6)


def test_negative_tap_leaves_out_an_example_of_nan():
    model = Bert(**SIZES)
    params, rows = make_params(model), make_rows()
    rows[2, 2] = SIZES["vocab_size"]  # NaN from the embedding on
    others = np.arange(BATCH) != 2
    expected = flat(plain_example_grads(), axes=1)[others]
    backward = tapped_grad(model)
    grads, norms_B = backward(params, rows, jnp.zeros(BATCH).at[2].set(-1.0))
    assert norms_B[2] == 0.0
    assert relative(BATCH**2 * norms_B[others], (expected**2).sum(axis=1)) < 1e-5
    np.testing.assert_allclose(flat(grads), expected.sum(axis=0) / BATCH, rtol=1e-4, atol=1e-6)
    # Without the mask it reaches everything.
    grads, norms_B = backward(params, rows, jnp.zeros(BATCH))
    assert np.isnan(norms_B[2]) and np.isfinite(norms_B[others]).all()
    assert np.isnan(flat(grads)).any()


def test_the_loss_is_the_same_with_taps_and_plain_without():
    model = Bert(**SIZES)
    params, rows, tap_B = make_params(model), make_rows(), jnp.zeros(BATCH)
    assert loss_of(model)(params, rows) == loss_of(model)(params, rows, tap_B)
    assert "custom_vjp" not in str(jax.make_jaxpr(classification_loss(model))(params, rows))


def test_gradient_statistics_by_taps_are_those_by_vmap_and_auto_takes_taps():
    loss_fn = classification_loss(Bert(**SIZES))
    for inner_products in (False, True):
        assert resolve_estimator("auto", loss_fn, inner_products=inner_products) == "taps"
    taps, vmap = (
        jax.jit(
            functools.partial(
                gradient_stats, loss_fn, estimator=estimator, num_examples=5, inner_products=False
            )
        )(make_params(Bert(**SIZES)), make_rows())
        for estimator in ("taps", "vmap")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), taps, vmap)


# --- Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3, width=16: the heads must divide the width"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"type_vocab_size": 0}, "type_vocab_size=0 must be at least 1"),
        ({"num_classes": 1}, "num_classes=1: must be at least 2"),
        ({"dtype": "float16"}, "dtype='float16' must be one of float32, bfloat16"),
        ({"max_length": LENGTH - 1}, "9 tokens per sequence, max_length is 8"),
    ],
)
def test_faulty_sizes_raise_while_tracing(change, message):
    params, rows = shapes_of(Bert(**SIZES)), jax.ShapeDtypeStruct((BATCH, 2 + LENGTH), jnp.int32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(classification_loss(Bert(**SIZES | change)), params, rows)


@pytest.mark.parametrize("shape", [(2 + LENGTH,), (BATCH, 2), (1, BATCH, 2 + LENGTH)])
@pytest.mark.parametrize("make", [class_logits, classification_losses, classification_loss])
def test_rows_without_a_token_or_a_batch_axis_raise(make, shape):
    rows = jax.ShapeDtypeStruct(shape, jnp.int32)
    with pytest.raises(ValueError, match=re.escape(f"rows has shape {shape}")):
        jax.eval_shape(make(Bert(**SIZES)), shapes_of(Bert(**SIZES)), rows)


def test_lengths_of_another_batch_raise(unchecked):
    tokens_BL, lengths_B = jnp.zeros((BATCH, LENGTH), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=r"lengths_B has shape \(1,\)"):
        jax.eval_shape(Bert(**SIZES).init, jax.random.key(0), tokens_BL, lengths_B)
