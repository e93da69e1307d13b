"""BERT against a slow NumPy forward pass, and the laws of padding."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nets import BATCH, BERT, LENGTH, make_params, make_rows, step_of, tapped_grad

from adloco_jax.models import Bert, class_logits, classification_losses

MODEL = Bert(**BERT)


losses_of = functools.cache(lambda model: jax.jit(classification_losses(model)))


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
            part = slice(h * size, (h + 1) * size)
            for t, query in enumerate(queries):
                weights = np.exp([query[part] @ key[part] / np.sqrt(size) for key in keys])
                weights /= weights.sum()
                heads[t].append(sum(w * v[part] for w, v in zip(weights, values, strict=True)))
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
    ],
)
def test_logits_agree_with_a_slow_float64_forward_pass_of_the_real_tokens(change, length):
    model = Bert(**BERT | change)
    params, rows = make_params(model), make_rows(model, length=length)
    logits_BC = jax.jit(class_logits(model))(params, rows)
    assert logits_BC.dtype == jnp.float32
    expected_BC = [oracle_logits(model, params, row[2 : 2 + row[1]]) for row in rows]
    np.testing.assert_allclose(logits_BC, expected_BC, rtol=1e-5, atol=1e-5)
    whole = rows[:, 1] == length
    logits_BC = jax.jit(model.apply)({"params": params}, rows[whole, 2:])  # no padding
    np.testing.assert_allclose(logits_BC, np.array(expected_BC)[whole], rtol=1e-5, atol=1e-5)


def test_loss_is_the_mean_over_examples_of_the_negative_log_softmax_of_the_label():
    params, rows = make_params(MODEL), make_rows(MODEL)
    logits_BC = np.asarray(jax.jit(class_logits(MODEL))(params, rows), np.float64)
    probs_BC = np.exp(logits_BC) / np.exp(logits_BC).sum(-1, keepdims=True)
    expected_B = -np.log(probs_BC[np.arange(BATCH), rows[:, 0]])
    np.testing.assert_allclose(losses_of(MODEL)(params, rows), expected_B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(step_of(MODEL)(params, rows)[0], expected_B.mean(), rtol=1e-5)
    faults = [(0, -1), (0, 3), (1, 0), (1, -2), (1, LENGTH + 1), (2, BERT["vocab_size"])]
    for example, (column, value) in enumerate(faults):  # a bad label, a bad length, a bad id
        rows[example, column] = value
    losses_B = losses_of(MODEL)(params, rows)
    assert np.isnan(losses_B[: len(faults)]).all()
    np.testing.assert_allclose(losses_B[len(faults) :], expected_B[len(faults) :], rtol=1e-5)


def test_what_stands_at_padded_positions_changes_no_bit():
    params, rows, tap_B = make_params(MODEL), make_rows(MODEL), jnp.zeros(BATCH)
    padded = np.arange(LENGTH) >= rows[:, 1:2]
    losses, backward = losses_of(MODEL), tapped_grad(MODEL)
    expected = losses(params, rows), backward(params, rows, tap_B)
    for filler in (5, MODEL.vocab_size, -1):
        others = rows.copy()
        others[:, 2:][padded] = filler
        actual = losses(params, others), backward(params, others, tap_B)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
