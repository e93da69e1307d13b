"""Llama against a slow NumPy forward pass, laws of its loss, and generated text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nets import (
    BATCH,
    FAMILY,
    LENGTH,
    LLAMA,
    flat,
    loss_of,
    make_params,
    make_rows,
    step_of,
)
from trees import assert_close

from adloco_jax.models import Llama, llama, next_token_loss, sequence_losses
from adloco_jax.models.llama import LayerKind, RopeScaling, generate
from adloco_jax.row_batch import RowBatch

MODEL = Llama(**LLAMA)


def oracle_logits(model, params, tokens):
    """Llama for one sequence in float64, one head and one position at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads

    def norm(x, gain):
        return x / np.sqrt(np.mean(x**2) + model.norm_eps) * gain

    def frequency(i, size, kind):
        if kind.rope_theta is None:
            return 0
        frequency = 1 / kind.rope_theta ** (2 * i / size)
        if kind.rope_scaling is None:
            return frequency
        factor, low, high, original_length = kind.rope_scaling
        turns = original_length * frequency / (2 * np.pi)
        if turns < low:
            return frequency / factor
        share = min((turns - low) / (high - low), 1)
        return (1 - share) * frequency / factor + share * frequency

    def product(x, module):
        return x @ module["kernel"] + module.get("bias", 0)

    def rotate(x, position, kind):
        half = len(x) // 2
        y = np.empty_like(x)
        for i in range(half):
            angle = position * frequency(i, len(x), kind)
            y[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            y[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return y

    xs = [params["embed"]["embedding"][token] for token in tokens]
    size = model.head_size or len(xs[0]) // num_heads
    for n in range(len(params["layers"]["mlp_norm"]["scale"])):
        layer, kind = jax.tree.map(lambda w, n=n: w[n], params["layers"]), model.kinds[n]
        attention, mlp = layer["attention"], layer["mlp"]
        normed = [norm(x, layer["attention_norm"]["scale"]) for x in xs]
        heads = [[] for _ in xs]
        for h in range(num_heads):
            g = h // (num_heads // num_kv_heads)
            of_query, of_key = slice(h * size, (h + 1) * size), slice(g * size, (g + 1) * size)

            def head(name, x, part):
                y = product(x, attention[name])[part]  # noqa: B023
                return norm(y, attention[f"{name}_norm"]["scale"]) if model.qk_norm else y  # noqa: B023

            keys = [rotate(head("key", x, of_key), t, kind) for t, x in enumerate(normed)]
            values = [product(x, attention["value"])[of_key] for x in normed]
            for t, x in enumerate(normed):
                query = rotate(head("query", x, of_query), t, kind)
                seen = range(t + 1)[-(kind.window or 0) :]
                weights = np.exp([query @ keys[s] / np.sqrt(size) for s in seen])
                weights /= weights.sum()
                heads[t].append(weights @ [values[s] for s in seen])
        for t in range(len(xs)):
            x = xs[t] + product(np.concatenate(heads[t]), attention["out"])
            normed_x = norm(x, layer["mlp_norm"]["scale"])
            gate = product(normed_x, mlp["gate"])
            silu = gate / (1 + np.exp(-gate))
            xs[t] = x + product(silu * product(normed_x, mlp["up"]), mlp["down"])
    head = params["embed"]["embedding"].T if model.tied else params["head"]["kernel"]
    return np.stack([norm(x, params["norm"]["scale"]) @ head for x in xs])


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({"num_kv_heads": 1}, 7),  # one block of queries
        # two blocks, the last with one query
        ({"num_kv_heads": 4, "norm_eps": 0.1, "rope_theta": 50.0}, 33),
        ({}, 129),  # four blocks, the last is the shortest
        ({"rope_scaling": RopeScaling(4.0, 1.0, 2.0, 24), "head_size": 6, "rope_theta": 50.0}, 33),
        (
            {"rope_scaling": RopeScaling(3.0)}
            | dict.fromkeys(["mlp_bias", "qk_norm", "qkv_bias", "out_bias", "tied"], True),
            9,
        ),
        ({"window": 5}, 33),
        ({"layer_kinds": (LayerKind(50.0, RopeScaling(3.0), 4), LayerKind(None))}, 9),
    ],
)
def test_logits_agree_with_a_slow_float64_forward_pass(change, length):
    model = Llama(**LLAMA | {"max_length": length} | change)
    params, rows = make_params(model), make_rows(model, batch=2, length=length)
    logits_BLV = jax.jit(model.apply)({"params": params}, rows[:, :-1])
    assert logits_BLV.dtype == jnp.float32
    for logits_LV, row in zip(logits_BLV, rows[: 2 if length < 20 else 1], strict=False):
        expected_LV = oracle_logits(model, params, row[:-1])
        np.testing.assert_allclose(logits_LV, expected_LV, rtol=1e-4, atol=2e-5)


def test_defect_01_loss_is_that_of_the_next_token_shifted_once_and_nan_past_the_vocabulary():
    params, rows = make_params(MODEL), make_rows(MODEL)
    logits_BLV = np.asarray(jax.jit(MODEL.apply)({"params": params}, rows[:, :-1]), np.float64)
    probs_BLV = np.exp(logits_BLV) / np.exp(logits_BLV).sum(-1, keepdims=True)
    expected_B = [
        np.mean([-np.log(probs_BLV[b, t, rows[b, t + 1]]) for t in range(LENGTH)])
        for b in range(BATCH)
    ]
    losses_of = jax.jit(sequence_losses(MODEL))
    np.testing.assert_allclose(losses_of(params, rows), expected_B, rtol=1e-5)
    np.testing.assert_allclose(step_of(MODEL)(params, rows)[0], np.mean(expected_B), rtol=1e-5)
    rows[0, 0] = rows[1, -1] = MODEL.vocab_size  # bad ids as an input and as a target
    losses_B = losses_of(params, rows)
    assert np.isnan(losses_B[:2]).all()
    np.testing.assert_allclose(losses_B[2:], expected_B[2:], rtol=1e-5)


def test_loss_and_gradients_are_the_same_on_an_accelerator(as_on_a_gpu):
    params, rows = make_params(MODEL), make_rows(MODEL)
    rows[1, -1] = MODEL.vocab_size
    on_a_cpu = jax.jit(jax.jacrev(sequence_losses(MODEL)))(params, rows)
    as_on_a_gpu()
    on_a_gpu = jax.jit(jax.jacrev(sequence_losses(MODEL)))(params, rows)
    assert_close(on_a_gpu, on_a_cpu, rtol=1e-4, atol=1e-6)


def test_chunked_losses_gradients_and_slopes_equal_the_whole():
    chunk = 2  # leaves a remainder
    params, direction = make_params(MODEL), make_params(MODEL, 1)
    rows = jnp.asarray(make_rows(MODEL))
    loss, grads = step_of(MODEL)(params, rows)
    chunked = step_of(MODEL, sequences_per_chunk=chunk)(params, rows)
    assert_close(chunked, (loss, grads), rtol=1e-4, atol=1e-6)
    loss_fn = loss_of(MODEL, sequences_per_chunk=chunk)
    slope = jax.jit(lambda p, d: jax.jvp(lambda q: loss_fn(q, rows), (p,), (d,))[1])
    np.testing.assert_allclose(slope(params, direction), flat(grads) @ flat(direction), rtol=1e-3)


def test_chunked_loss_never_holds_all_logits(monkeypatch):
    model = Llama(**LLAMA | {"vocab_size": 101})
    params, rows = make_params(model), make_rows(model, batch=6)

    def logit_elements(chunk):
        program = jax.make_jaxpr(jax.grad(next_token_loss(model, sequences_per_chunk=chunk)))
        shapes = re.findall(r"f32\[([\d,]+),101\]", str(program(params, rows)))
        not_weights = [s for s in shapes if s != str(model.width)]
        return max(np.prod([int(n) for n in s.split(",")]) for s in not_weights)

    assert logit_elements(0) == 6 * LENGTH
    assert logit_elements(2) == 2 * LENGTH
    monkeypatch.setattr(llama, "_MAX_LOGITS", 5 * 101)
    assert logit_elements(1) == 5


def losses_and_gradient(losses_fn, params, rows):
    """The losses of rows, and the gradient of a sum in which each row has a weight of its own."""

    @jax.jit
    def both(params, rows):
        losses_B, pull_back = jax.vjp(lambda params: losses_fn(params, rows), params)
        return losses_B, pull_back(jnp.arange(1.0, 1 + len(losses_B)))[0]

    return both(params, rows)


@pytest.mark.parametrize("beside", [(), ("starts", "weights")])
def test_loss_and_gradients_of_long_sequences_are_those_of_the_whole(beside, monkeypatch):
    """Parts of four tokens: one of a sequence is not full, and one chunk is smaller."""
    params, tokens = make_params(MODEL), make_rows(MODEL, batch=3, length=13)
    weights = np.random.default_rng(0).random(tokens.shape, np.float32)
    given = {"starts": np.zeros_like(tokens), "weights": weights}
    rows = RowBatch(tokens, **{name: given[name] for name in beside})
    whole = losses_and_gradient(sequence_losses(MODEL), params, rows)
    monkeypatch.setattr(llama, "_MAX_LOGITS", 5 * MODEL.vocab_size)
    divided = losses_and_gradient(sequence_losses(MODEL, sequences_per_chunk=5), params, rows)
    assert_close(divided, whole, rtol=1e-4, atol=1e-6)


def test_norms_of_gradients_need_whole_sequences(monkeypatch):
    monkeypatch.setattr(llama, "_MAX_LOGITS", 5 * MODEL.vocab_size)
    params, rows = make_params(MODEL), jnp.asarray(make_rows(MODEL))
    losses_fn = sequence_losses(MODEL, sequences_per_chunk=1)
    of_taps = jax.jit(jax.grad(lambda taps: jnp.mean(losses_fn(params, rows, taps))))
    norms_B = len(rows) ** 2 * of_taps(jnp.zeros(len(rows)))
    grads_B = jax.jit(jax.jacrev(losses_fn))(params, rows)
    np.testing.assert_allclose(norms_B, np.square(flat(grads_B, axes=1)).sum(axis=1), rtol=1e-3)


def test_slopes_are_those_of_a_slow_float64_loss():
    length = 33  # two blocks of queries
    model = Llama(**LLAMA | {"max_length": length})
    params, direction = make_params(model), make_params(model, 1)
    rows = make_rows(model, batch=1, length=length)

    def oracle_loss(step):
        moved = jax.tree.map(lambda p, d: np.float64(p) + step * np.float64(d), *numbers)
        logits_LV = oracle_logits(model, moved, rows[0, :-1])
        picked_L = logits_LV[np.arange(length), rows[0, 1:]]
        return np.mean(np.log(np.sum(np.exp(logits_LV), axis=1)) - picked_L)

    numbers = jax.device_get((params, direction))
    expected = (oracle_loss(1e-5) - oracle_loss(-1e-5)) / 2e-5
    loss_fn, tokens_BL = next_token_loss(model), jnp.asarray(rows)
    forward = jax.jit(lambda p, d: jax.jvp(lambda q: loss_fn(q, tokens_BL), (p,), (d,))[1])
    np.testing.assert_allclose(forward(params, direction), expected, rtol=2e-4)
    _, grads = step_of(model)(params, tokens_BL)
    np.testing.assert_allclose(flat(grads) @ flat(direction), expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("model", "form"), [(MODEL, "scan"), (FAMILY, "call")])
def test_generation_takes_the_likeliest_or_draws(model, form):
    """As the logits of the whole text say, in which windows and two sizes of programs matter."""
    model = model.clone(max_length=48, layer_form=form)
    params = jax.tree.map(lambda x: 2 * x, make_params(model))  # far from uniform
    prompt_BL = make_rows(model, batch=2, length=28)

    def made(temperature, seed):
        options = {"num_tokens": 9, "temperature": temperature, "key": jax.random.key(seed)}
        return np.asarray(generate(model, params, prompt_BL, **options))

    text_BL, logits_fn = made(0.0, 0), jax.jit(model.apply)
    logits_BLV = logits_fn({"params": params}, text_BL[:, :-1])
    np.testing.assert_array_equal(text_BL[:, :29], prompt_BL)
    np.testing.assert_array_equal(text_BL[:, 29:], np.argmax(logits_BLV[:, 28:], axis=-1))
    drawn = [made(5.0, seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(drawn[0] != drawn[2]) and np.any(drawn[0][0, 29:] != drawn[0][1, 29:])


def test_generation_stops_when_all_have_ended_and_compiles_once_for_prompts_of_many_lengths(
    caplog,
):
    params = jax.tree.map(lambda x: 2 * x, make_params(MODEL))
    how = {"num_tokens": 8, "temperature": 5.0, "key": jax.random.key(0)}
    text_BL = np.asarray(generate(MODEL, params, np.array([[1, 2, 3]] * 3), **how))
    new_BL, ends = text_BL[:, 3:], [int(text_BL[0, 4]), int(text_BL[1, 5])]
    ended_BL = np.logical_or.accumulate(np.isin(new_BL, ends), axis=1)
    expected_BL = np.where(np.arange(8) <= ended_BL.all(axis=0).argmax(), new_BL, 0)
    assert ended_BL.all(axis=0).any() and np.any(expected_BL != new_BL)
    cut_BL = generate(MODEL, params, text_BL[:, :3], **how, ends=ends)
    np.testing.assert_array_equal(cut_BL[:, 3:], expected_BL)
    with jax.log_compiles():
        for length in (1, 3, 7):
            generate(MODEL, params, text_BL[:, :length], **how | {"num_tokens": 9})
        assert "jit(_continue)" not in caplog.text
        generate(MODEL, params, text_BL[:1, :3], **how)
        assert "jit(_continue)" in caplog.text  # another number of texts
