"""BERT against a slow NumPy forward pass, and the laws of padding."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nets import (
    BATCH,
    BERT,
    LENGTH,
    assert_close,
    example_grads,
    flat,
    make_params,
    make_rows,
    step_of,
    tapped_grad,
)

from adloco_jax.models import Bert, class_logits, classification_losses

MODEL = Bert(**BERT)


@functools.cache
def losses_of(model):
    return jax.jit(classification_losses(model))


def oracle_logits(model, params, tokens):
    """BERT for one sequence without padding in float64, one head and one position at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def linear(x, w):
        return x @ w["kernel"] + w["bias"]

    def norm(x, w):
        return (x - x.mean()) / np.sqrt(x.var() + model.norm_eps) * w["scale"] + w["bias"]

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
    size = len(xs[0]) // model.num_heads
    for n in range(len(params["layers"]["mlp_norm"]["scale"])):
        layer = jax.tree.map(lambda w, n=n: w[n], params["layers"])
        queries, keys, values = (
            [linear(x, layer["attention"][name]) for x in xs] for name in ("query", "key", "value")
        )
        heads = [[] for _ in xs]
        for h in range(model.num_heads):
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


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({}, LENGTH),
        ({"num_heads": 1, "norm_eps": 0.1, "num_classes": 5, "type_vocab_size": 1}, 4),
        ({"num_layers": 1}, 1),
    ],
)
def test_logits_agree_with_a_slow_float64_forward_pass_of_the_real_tokens(change, length):
    model = Bert(**BERT | change)
    params, rows = make_params(model), make_rows(model, length=length)
    logits_BC = jax.jit(class_logits(model))(params, rows)
    assert logits_BC.dtype == jnp.float32
    expected_BC = [oracle_logits(model, params, row[2 : 2 + row[1]]) for row in rows]
    np.testing.assert_allclose(logits_BC, expected_BC, rtol=1e-5, atol=1e-5)
    if length == 1:  # without lengths all tokens are real
        logits_BC = jax.jit(model.apply)({"params": params}, rows[:, 2:])
        np.testing.assert_allclose(logits_BC, expected_BC, rtol=1e-5, atol=1e-5)


def test_loss_is_the_mean_over_examples_of_the_negative_log_softmax_of_the_label():
    params, rows = make_params(MODEL), make_rows(MODEL)
    logits_BC = np.asarray(jax.jit(class_logits(MODEL))(params, rows), np.float64)
    probs_BC = np.exp(logits_BC) / np.exp(logits_BC).sum(-1, keepdims=True)
    expected_B = -np.log(probs_BC[np.arange(BATCH), rows[:, 0]])
    losses_B = losses_of(MODEL)(params, rows)
    assert losses_B.dtype == jnp.float32
    np.testing.assert_allclose(losses_B, expected_B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(step_of(MODEL)(params, rows)[0], expected_B.mean(), rtol=1e-5)


def test_what_stands_at_padded_positions_changes_no_bit():
    params, rows, tap_B = make_params(MODEL), make_rows(MODEL), jnp.zeros(BATCH)
    padded = np.arange(LENGTH) >= rows[:, 1:2]
    losses, backward = losses_of(MODEL), tapped_grad(MODEL)
    expected = losses(params, rows), backward(params, rows, tap_B)
    for filler in (0, 5, MODEL.vocab_size, -1, np.iinfo(np.int32).max):
        others = rows.copy()
        others[:, 2:][padded] = filler
        actual = losses(params, others), backward(params, others, tap_B)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_padded_example_has_the_gradient_of_its_real_tokens_alone():
    params, rows, grads = make_params(MODEL), make_rows(MODEL), example_grads(MODEL)
    b = int(np.flatnonzero((rows[:, 1] > 1) & (rows[:, 1] < LENGTH))[0])
    loss, grad = step_of(MODEL)(params, rows[b : b + 1, : 2 + rows[b, 1]])
    np.testing.assert_allclose(losses_of(MODEL)(params, rows)[b], loss, rtol=1e-5, atol=1e-6)
    assert_close(jax.tree.map(lambda leaf: leaf[b], grads), grad, rtol=1e-3, atol=1e-6)


def test_rows_of_the_tables_that_no_real_token_reads_have_no_gradient():
    grads, zeros_L = example_grads(MODEL), np.zeros(LENGTH, int)
    for b, row in enumerate(make_rows(MODEL)):
        read = {"embed": row[2:], "position": np.arange(LENGTH), "token_type": zeros_L}
        for name, ids in read.items():
            used = np.abs(grads[name]["embedding"][b]).sum(axis=1) > 0
            assert set(np.flatnonzero(used)) == set(ids[: row[1]]), (name, b)


@pytest.mark.parametrize(
    ("column", "value"),
    [(0, -1), (0, 3), (1, 0), (1, -2), (1, LENGTH + 1), (2, BERT["vocab_size"])],
)
def test_a_label_length_or_id_out_of_range_makes_the_examples_loss_nan(column, value):
    rows = make_rows(MODEL)
    rows[3, column] = value
    losses_B = losses_of(MODEL)(make_params(MODEL), rows)
    assert np.isnan(losses_B[3])
    assert np.isfinite(np.delete(losses_B, 3)).all()


def test_forward_mode_agrees_with_per_example_gradients():
    params, direction, losses_fn = make_params(MODEL), make_params(MODEL, 1), losses_of(MODEL)
    forward = jax.jit(lambda p, d, rows: jax.jvp(lambda q: losses_fn(q, rows), (p,), (d,)))
    _, slopes_B = forward(params, direction, make_rows(MODEL))
    expected_B = flat(example_grads(MODEL), axes=1) @ flat(direction)
    np.testing.assert_allclose(slopes_B, expected_B, rtol=1e-4, atol=1e-4)


def test_lengths_of_another_batch_raise(unchecked):
    tokens_BL, lengths_B = jnp.zeros((BATCH, LENGTH), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=r"lengths_B has shape \(1,\)"):
        jax.eval_shape(MODEL.init, jax.random.key(0), tokens_BL, lengths_B)
