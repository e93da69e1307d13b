"""Llama against a slow NumPy forward pass, the laws its loss must obey, and text from it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nets import (
    BATCH,
    LENGTH,
    LLAMA,
    assert_close,
    flat,
    loss_of,
    make_params,
    make_rows,
    stack,
    step_of,
)

from adloco_jax.models import Llama, next_token_loss, sequence_losses
from adloco_jax.models.llama import generate

MODEL = Llama(**LLAMA)


@functools.cache
def losses_of(model, **options):
    return jax.jit(sequence_losses(model, **options))


def oracle_logits(model, params, tokens):
    """Llama for one sequence in float64, one head and one position at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads

    def norm(x, gain):
        return x / np.sqrt(np.mean(x**2) + model.norm_eps) * gain

    def rotate(x, position):
        half = len(x) // 2
        y = np.empty_like(x)
        for i in range(half):
            angle = position / model.rope_theta ** (2 * i / len(x))
            y[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            y[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return y

    xs = [params["embed"]["embedding"][token] for token in tokens]
    size = len(xs[0]) // num_heads
    for n in range(len(params["layers"]["mlp_norm"]["scale"])):
        layer = jax.tree.map(lambda w, n=n: w[n], params["layers"])
        attention = {name: w["kernel"] for name, w in layer["attention"].items()}
        mlp = {name: w["kernel"] for name, w in layer["mlp"].items()}
        normed = [norm(x, layer["attention_norm"]["scale"]) for x in xs]
        heads = [[] for _ in xs]
        for h in range(num_heads):
            g = h // (num_heads // num_kv_heads)
            of_query, of_key = slice(h * size, (h + 1) * size), slice(g * size, (g + 1) * size)
            keys = [rotate(x @ attention["key"][:, of_key], t) for t, x in enumerate(normed)]
            values = [x @ attention["value"][:, of_key] for x in normed]
            for t, x in enumerate(normed):
                query = rotate(x @ attention["query"][:, of_query], t)
                weights = np.exp([query @ keys[s] / np.sqrt(size) for s in range(t + 1)])
                weights /= weights.sum()
                heads[t].append(sum(weights[s] * values[s] for s in range(t + 1)))
        for t in range(len(xs)):
            x = xs[t] + np.concatenate(heads[t]) @ attention["out"]
            normed_x = norm(x, layer["mlp_norm"]["scale"])
            gate = normed_x @ mlp["gate"]
            silu = gate / (1 + np.exp(-gate))
            xs[t] = x + (silu * (normed_x @ mlp["up"])) @ mlp["down"]
    return np.stack([norm(x, params["norm"]["scale"]) @ params["head"]["kernel"] for x in xs])


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({"num_kv_heads": 1}, 7),
        ({"norm_eps": 0.1, "rope_theta": 50.0}, 31),  # one block of queries
        ({"num_kv_heads": 4}, 33),  # two, the last of one query
        ({}, 64),  # two alike
        ({}, 129),  # four, the last the shortest
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


def test_a_token_changes_no_logit_before_its_own_position():
    tokens_L = make_rows(MODEL, batch=1)[0, :-1]
    changes = np.eye(LENGTH + 1, LENGTH, dtype=np.int32)  # Row t: position t; the last row: none.
    tokens_BL = (tokens_L[None, :] + changes) % MODEL.vocab_size
    logits_BLV = np.asarray(jax.jit(MODEL.apply)({"params": make_params(MODEL)}, tokens_BL))
    difference_BL = np.abs(logits_BLV[:-1] - logits_BLV[-1]).max(axis=-1)
    before = np.tril(np.ones((LENGTH, LENGTH), bool), -1)
    assert difference_BL[before].max() < 1e-6
    assert difference_BL[~before].min() > 1e-3


def test_defect_01_labels_are_shifted_once_not_twice():
    """Defect 1 of the reference: a model that knows "next = token + 1" must have no loss."""
    vocab_size = 8
    model = Llama(**LLAMA | {"vocab_size": vocab_size, "width": vocab_size, "num_heads": 2})
    params = jax.tree.map(np.zeros_like, make_params(model))  # Layers that add nothing,
    params["norm"]["scale"] += 1.0
    params["embed"]["embedding"] = np.eye(vocab_size)  # so that the head sees the token alone.
    params["head"]["kernel"] = 10.0 * np.roll(np.eye(vocab_size), 1, axis=1)
    count_by_one = jnp.arange(LENGTH + 1)[None, :] % vocab_size
    count_by_two = 2 * count_by_one % vocab_size
    loss_fn = jax.jit(next_token_loss(model))
    assert loss_fn(params, count_by_one) < 1e-4
    assert loss_fn(params, count_by_two) > 10.0


def test_loss_is_the_mean_negative_log_softmax_of_the_next_token_and_nan_past_the_vocabulary():
    params, rows = make_params(MODEL), make_rows(MODEL)
    logits_BLV = np.asarray(jax.jit(MODEL.apply)({"params": params}, rows[:, :-1]), np.float64)
    probs_BLV = np.exp(logits_BLV) / np.exp(logits_BLV).sum(-1, keepdims=True)
    expected_B = [
        np.mean([-np.log(probs_BLV[b, t, rows[b, t + 1]]) for t in range(LENGTH)])
        for b in range(BATCH)
    ]
    np.testing.assert_allclose(losses_of(MODEL)(params, rows), expected_B, rtol=1e-5)
    np.testing.assert_allclose(step_of(MODEL)(params, rows)[0], np.mean(expected_B), rtol=1e-5)
    rows[0, 0] = rows[1, -1] = MODEL.vocab_size  # as an input, and as a target
    losses_B = losses_of(MODEL)(params, rows)
    assert np.isnan(losses_B[:2]).all()
    np.testing.assert_allclose(losses_B[2:], expected_B[2:], rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2])  # The second leaves a remainder.
def test_chunked_losses_and_gradients_equal_the_whole(chunk):
    params, rows = make_params(MODEL), make_rows(MODEL)
    chunked = step_of(MODEL, sequences_per_chunk=chunk)(params, rows)
    assert_close(chunked, step_of(MODEL)(params, rows), rtol=1e-4, atol=1e-6)


def test_a_chunk_of_the_batch_or_more_is_the_whole():
    args = make_params(MODEL), make_rows(MODEL)
    whole, *large = (
        str(jax.make_jaxpr(sequence_losses(MODEL, sequences_per_chunk=chunk))(*args))
        for chunk in (0, BATCH, BATCH + 1)
    )
    assert large == [whole, whole]
    with pytest.raises(ValueError, match="sequences_per_chunk=-1"):
        next_token_loss(MODEL, sequences_per_chunk=-1)


def test_chunked_loss_never_holds_all_logits():
    model = Llama(**LLAMA | {"vocab_size": 101})
    params, rows = make_params(model), make_rows(model, batch=6)

    def logit_elements(chunk):
        program = jax.make_jaxpr(jax.grad(next_token_loss(model, sequences_per_chunk=chunk)))
        shapes = re.findall(r"f32\[([\d,]+),101\]", str(program(params, rows)))
        not_weights = [s for s in shapes if s != str(model.width)]
        return max(np.prod([int(n) for n in s.split(",")]) for s in not_weights)

    assert logit_elements(0) == 6 * LENGTH
    assert logit_elements(2) == 2 * LENGTH


def test_gradient_of_the_batch_mean_is_the_mean_of_sequence_gradients():
    """The algebra every batch-size test rests on; also of stacked models."""
    params, rows = [make_params(MODEL, seed) for seed in range(2)], make_rows(MODEL)
    one_by_one = [stack(*(step_of(MODEL)(p, row[None]) for row in rows)) for p in params]
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), one_by_one[0])
    assert_close(step_of(MODEL)(params[0], rows), mean, rtol=1e-4, atol=1e-6)
    per_row = jax.vmap(jax.value_and_grad(loss_of(MODEL)), in_axes=(None, 0))
    by_model = jax.jit(jax.vmap(per_row, in_axes=(0, None)))(stack(*params), rows[:, None])
    assert_close(by_model, stack(*one_by_one), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("length", [7, 33])
def test_slopes_are_those_of_a_slow_float64_loss(length):
    """Along a direction of all parameters, and, if short, along each array's part of it."""
    model = Llama(**LLAMA | {"max_length": 33})
    params, direction = make_params(model), make_params(model, 1)
    tokens_L = np.random.default_rng(0).integers(0, model.vocab_size, length + 1)

    def oracle_loss(step, part):
        moved = jax.tree.map(
            lambda p, d: np.asarray(p, np.float64) + step * np.asarray(d, np.float64), params, part
        )
        logits_LV = oracle_logits(model, moved, tokens_L[:-1])
        picked_L = logits_LV[np.arange(length), tokens_L[1:]]
        return np.mean(np.log(np.sum(np.exp(logits_LV), axis=1)) - picked_L)

    def slope(part):
        return (oracle_loss(1e-5, part) - oracle_loss(-1e-5, part)) / 2e-5

    def reverse(part):
        return sum(jax.tree.leaves(jax.tree.map(np.vdot, grads, part)))

    tokens_BL, loss_fn = jnp.asarray(tokens_L, jnp.int32)[None], next_token_loss(model)
    _, grads = step_of(model)(params, tokens_BL)
    _, forward = jax.jit(lambda p, d: jax.jvp(lambda q: loss_fn(q, tokens_BL), (p,), (d,)))(
        params, direction
    )
    expected = slope(direction)
    np.testing.assert_allclose(forward, expected, rtol=2e-4)
    np.testing.assert_allclose(reverse(direction), expected, rtol=2e-4, atol=1e-5)
    leaves, treedef = jax.tree.flatten(direction)
    parts = [
        treedef.unflatten([leaf if i == n else 0 * leaf for i, leaf in enumerate(leaves)])
        for n in range(len(leaves))
    ]
    for part in parts if length < 20 else []:  # the oracle is slow
        np.testing.assert_allclose(reverse(part), slope(part), rtol=2e-4, atol=1e-5)


def test_forward_mode_through_chunks_agrees_with_reverse_mode():
    params, direction, rows = make_params(MODEL), make_params(MODEL, 1), make_rows(MODEL)
    chunked = sequence_losses(MODEL, sequences_per_chunk=2)
    forward = jax.jit(lambda p, d, t: jax.jvp(lambda q: chunked(q, t), (p,), (d,)))
    losses_B, slopes_B = forward(params, direction, rows)
    np.testing.assert_allclose(losses_B, losses_of(MODEL)(params, rows), rtol=1e-5)
    for b in range(BATCH):
        _, grads = step_of(MODEL)(params, rows[b : b + 1])
        slope = flat(grads) @ flat(direction)
        np.testing.assert_allclose(slopes_B[b], slope, rtol=1e-3)


def test_generation_takes_the_likeliest_or_draws():
    model = Llama(**LLAMA)
    params = jax.tree.map(lambda x: 2 * x, make_params(model))  # far from uniform
    prompt_BL = jnp.array([[1, 2, 3], [4, 5, 6]])

    def made(temperature, seed):
        options = {"num_tokens": 5, "temperature": temperature, "key": jax.random.key(seed)}
        return np.asarray(generate(model, params, prompt_BL, **options))

    text_BL, logits_fn = made(0.0, 0), jax.jit(model.apply)
    logits_BLV = logits_fn({"params": params}, text_BL[:, :-1])
    np.testing.assert_array_equal(text_BL[:, :3], prompt_BL)
    np.testing.assert_array_equal(text_BL[:, 3:], np.argmax(logits_BLV[:, 2:], axis=-1))
    drawn = [made(5.0, seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.any(drawn[0] != drawn[2]) and np.any(drawn[0][0, 3:] != drawn[0][1, 3:])
