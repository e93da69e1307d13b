"""Llama against a slow NumPy forward pass, and the laws its loss must obey."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.models import Llama, next_token_loss, num_params, sequence_losses

SIZES = {
    "vocab_size": 13,
    "width": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_width": 20,
    "max_length": 16,
}
BATCH, LENGTH = 5, 7


@functools.cache
def make_params(model, seed=0):
    """Random parameters large enough that every part of the network matters."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(1.0 if s.ndim == 1 else 0.0, 0.4, s.shape), s.dtype),
        shapes,
    )


@functools.cache
def losses_of(model, **options):
    return jax.jit(sequence_losses(model, **options))


@functools.cache
def step_of(model, **options):
    return jax.jit(jax.value_and_grad(next_token_loss(model, **options)))


def make_tokens(seed=0, batch=BATCH):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, SIZES["vocab_size"], (batch, LENGTH + 1)), jnp.int32)


def assert_trees_close(actual, expected, *, rtol, atol):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected
    )


def oracle_logits(params, tokens, *, num_heads, num_kv_heads, eps, theta):
    """Llama for one sequence in float64, one head and one position at a time."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, gain):
        return x / np.sqrt(np.mean(x**2) + eps) * gain

    def rotate(x, position):
        half = len(x) // 2
        y = np.empty_like(x)
        for i in range(half):
            angle = position / theta ** (2 * i / len(x))
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
    ("num_kv_heads", "eps", "theta"), [(1, 1e-5, 10000.0), (2, 0.1, 50.0), (4, 1e-5, 10000.0)]
)
def test_logits_agree_with_a_slow_float64_forward_pass(num_kv_heads, eps, theta):
    sizes = SIZES | {"num_kv_heads": num_kv_heads}
    model = Llama(**sizes, norm_eps=eps, rope_theta=theta)
    params, tokens_BL = make_params(model), make_tokens()[:, :-1]
    logits_BLV = jax.jit(model.apply)({"params": params}, tokens_BL)
    assert logits_BLV.dtype == jnp.float32
    expected_BLV = [
        oracle_logits(
            params,
            np.asarray(tokens_L),
            num_heads=sizes["num_heads"],
            num_kv_heads=num_kv_heads,
            eps=eps,
            theta=theta,
        )
        for tokens_L in tokens_BL
    ]
    np.testing.assert_allclose(logits_BLV, expected_BLV, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("length", [31, 33, 64, 129])
def test_long_sequences_whose_attention_goes_by_stretches_agree_too(length):
    """One stretch; two, the last of one query; two alike; and four, the last the shortest."""
    model = Llama(**SIZES | {"max_length": 129})
    params = make_params(model)
    tokens_L = np.random.default_rng(0).integers(0, SIZES["vocab_size"], length)
    logits_BLV = jax.jit(model.apply)({"params": params}, jnp.asarray(tokens_L)[None])
    heads = {name: SIZES[name] for name in ("num_heads", "num_kv_heads")}
    expected_LV = oracle_logits(params, tokens_L, **heads, eps=1e-5, theta=10000.0)
    np.testing.assert_allclose(logits_BLV[0], expected_LV, rtol=1e-4, atol=2e-5)


def test_a_token_changes_no_logit_before_its_own_position():
    model = Llama(**SIZES)
    tokens_L = make_tokens(batch=1)[0, :-1]
    changes = jnp.eye(LENGTH + 1, LENGTH, dtype=jnp.int32)  # Row t: position t; the last row: none.
    tokens_BL = (tokens_L[None, :] + changes) % SIZES["vocab_size"]
    logits_BLV = np.asarray(jax.jit(model.apply)({"params": make_params(model)}, tokens_BL))
    difference_BL = np.abs(logits_BLV[:-1] - logits_BLV[-1]).max(axis=-1)
    before = np.tril(np.ones((LENGTH, LENGTH), bool), -1)
    assert difference_BL[before].max() < 1e-6
    assert difference_BL[~before].min() > 1e-3


def test_defect_01_labels_are_shifted_once_not_twice():
    """Defect 1 of the reference: a model that knows "next = token + 1" must have no loss."""
    vocab_size = 8
    model = Llama(**SIZES | {"vocab_size": vocab_size, "width": vocab_size, "num_heads": 2})
    params = jax.tree.map(np.zeros_like, make_params(model))  # Layers that add nothing,
    params["norm"]["scale"] += 1.0
    params["embed"]["embedding"] = np.eye(vocab_size)  # so that the head sees the token alone.
    params["head"]["kernel"] = 10.0 * np.roll(np.eye(vocab_size), 1, axis=1)
    count_by_one = jnp.arange(LENGTH + 1)[None, :] % vocab_size
    count_by_two = 2 * count_by_one % vocab_size
    loss_fn = jax.jit(next_token_loss(model))
    assert loss_fn(params, count_by_one) < 1e-4
    assert loss_fn(params, count_by_two) > 10.0


def test_loss_is_the_mean_negative_log_softmax_of_the_next_token():
    model = Llama(**SIZES)
    params, tokens = make_params(model), make_tokens()
    logits_BLV = np.asarray(jax.jit(model.apply)({"params": params}, tokens[:, :-1]), np.float64)
    probs_BLV = np.exp(logits_BLV) / np.exp(logits_BLV).sum(-1, keepdims=True)
    expected_B = [
        np.mean([-np.log(probs_BLV[b, t, tokens[b, t + 1]]) for t in range(LENGTH)])
        for b in range(BATCH)
    ]
    losses_B = losses_of(model)(params, tokens)
    loss, _ = step_of(model)(params, tokens)
    np.testing.assert_allclose(losses_B, expected_B, rtol=1e-5)
    np.testing.assert_allclose(loss, np.mean(expected_B), rtol=1e-5)


@pytest.mark.parametrize("where", ["input", "target"])
def test_token_id_past_the_vocabulary_makes_the_loss_nan(where):
    model = Llama(**SIZES)
    tokens = make_tokens().at[0, 0 if where == "input" else -1].set(SIZES["vocab_size"])
    losses_B = losses_of(model)(make_params(model), tokens)
    assert np.isnan(losses_B[0])
    assert np.isfinite(losses_B[1:]).all()


def test_parameter_names_and_shapes_are_stable():
    """These names are in checkpoints and in the weight converter."""
    params = make_params(Llama(**SIZES))
    found = {
        "/".join(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert found == {
        "embed/embedding": (13, 16),
        "head/kernel": (16, 13),
        "layers/attention/key/kernel": (2, 16, 8),
        "layers/attention/out/kernel": (2, 16, 16),
        "layers/attention/query/kernel": (2, 16, 16),
        "layers/attention/value/kernel": (2, 16, 8),
        "layers/attention_norm/scale": (2, 16),
        "layers/mlp/down/kernel": (2, 20, 16),
        "layers/mlp/gate/kernel": (2, 16, 20),
        "layers/mlp/up/kernel": (2, 16, 20),
        "layers/mlp_norm/scale": (2, 16),
        "norm/scale": (16,),
    }


def test_weights_start_normal_with_deviation_two_hundredths_and_gains_at_one():
    model = Llama(**SIZES | {"vocab_size": 512, "width": 64, "mlp_width": 96})
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key == "scale":
            np.testing.assert_array_equal(leaf, 1.0)
        else:
            assert abs(leaf.mean()) < 1e-3
            np.testing.assert_allclose(leaf.std(), 0.02, rtol=0.03)
    up_NDF = params["layers"]["mlp"]["up"]["kernel"]
    assert abs(np.corrcoef(up_NDF[0].ravel(), up_NDF[1].ravel())[0, 1]) < 0.1


def test_microllama_has_304_6_million_parameters():
    model = Llama(
        vocab_size=32000,
        width=1024,
        num_layers=12,
        num_heads=16,
        num_kv_heads=4,
        mlp_width=5632,
        max_length=2048,
    )
    assert num_params(model) == 304_636_928


def test_remat_changes_neither_the_tree_nor_loss_nor_gradients():
    plain, remat = Llama(**SIZES), Llama(**SIZES, remat=True)
    tokens = make_tokens()
    trees = [jax.eval_shape(m.init, jax.random.key(0), tokens[:, :-1]) for m in (plain, remat)]
    assert trees[0] == trees[1]
    results = [step_of(m)(make_params(plain), tokens) for m in (plain, remat)]
    assert_trees_close(*results, rtol=1e-4, atol=1e-7)


def test_layers_one_after_another_are_the_scanned_ones():
    scanned, *apart = (
        Llama(**SIZES, scan_layers=scan, remat=remat)
        for scan, remat in ((True, False), (False, False), (False, True))
    )
    tokens = make_tokens()
    shapes = [jax.eval_shape(m.init, jax.random.key(0), tokens[:, :-1]) for m in (scanned, *apart)]
    assert shapes[0] == shapes[1] == shapes[2]
    trees = [jax.jit(m.init)(jax.random.key(0), tokens[:1, :1]) for m in (scanned, apart[0])]
    assert_trees_close(*trees, rtol=0, atol=0)

    def results(model):
        """Loss, gradients and squared norms of two trainers at once; the first one's slope."""
        loss_fn = next_token_loss(model, sequences_per_chunk=2)
        step = jax.vmap(jax.value_and_grad(loss_fn, argnums=(0, 2)), in_axes=(0, None, None))
        two = [make_params(scanned, seed) for seed in range(2)]
        params_M = jax.tree.map(lambda *leaves: jnp.stack(leaves), *two)
        slope = functools.partial(jax.jvp, lambda params: loss_fn(params, tokens))
        return jax.jit(step)(params_M, tokens, jnp.zeros(BATCH)), jax.jit(slope)(two[:1], two[1:])

    expected = results(scanned)
    for model in apart:
        assert_trees_close(results(model), expected, rtol=1e-4, atol=1e-6)


def test_layers_one_after_another_are_functions_of_the_program_and_keep_no_stacks():
    def calls_and_stacks(model):
        tokens = make_tokens()
        text = step_of(model).lower(make_params(model), tokens).compile().as_text()
        stack = re.escape(f"f32[{SIZES['num_layers']},{BATCH},{LENGTH},")
        return len(re.findall(r" call\(.*frontend_attributes", text)), len(re.findall(stack, text))

    assert calls_and_stacks(Llama(**SIZES, scan_layers=False)) == (2 * SIZES["num_layers"], 0)
    scanned = calls_and_stacks(Llama(**SIZES))
    assert scanned[0] == 0 < scanned[1]


def test_remat_keeps_no_product_of_the_layer():
    def kept_mlp_arrays(model):
        def backward(params, tokens):
            return jax.vjp(lambda p: next_token_loss(model)(p, tokens), params)[1]

        products = (SIZES["num_layers"], BATCH, LENGTH, SIZES["mlp_width"])
        kept = jax.eval_shape(backward, make_params(model), make_tokens())
        return sum(leaf.shape == products for leaf in jax.tree.leaves(kept))

    assert kept_mlp_arrays(Llama(**SIZES)) == 2  # gate and up
    assert kept_mlp_arrays(Llama(**SIZES, remat=True)) == 0


def test_bfloat16_compute_keeps_parameters_logits_and_gradients_float32():
    exact, rounded = Llama(**SIZES), Llama(**SIZES, dtype="bfloat16")
    params, tokens = make_params(exact), make_tokens()
    initial = jax.eval_shape(rounded.init, jax.random.key(0), tokens[:, :-1])["params"]
    hidden = functools.partial(rounded.apply, {"params": params}, method=Llama.hidden)
    assert jax.eval_shape(hidden, tokens[:, :-1]).dtype == jnp.bfloat16
    logits_BLV = jax.jit(rounded.apply)({"params": params}, tokens[:, :-1])
    loss, grads = step_of(rounded)(params, tokens)
    dtypes = {x.dtype for x in jax.tree.leaves((initial, logits_BLV, loss, grads))}
    assert dtypes == {jnp.dtype("float32")}
    assert not (logits_BLV == logits_BLV.astype(jnp.bfloat16)).all()
    np.testing.assert_allclose(loss, step_of(exact)(params, tokens)[0], rtol=0.02)


def test_norms_softmax_and_loss_stay_float32_under_bfloat16():
    model = Llama(**SIZES, dtype="bfloat16")
    program = str(jax.make_jaxpr(next_token_loss(model))(make_params(model), make_tokens()))
    for operation in ("rsqrt", "square", "exp", "log", "reduce_max", "reduce_sum", "div"):
        dtypes = set(re.findall(rf":(\w+)\[[\d,]*\] = {operation}\b", program))
        assert dtypes == {"f32"}, operation


@pytest.mark.parametrize("chunk", [1, 2])  # The second leaves a remainder.
def test_chunked_losses_and_gradients_equal_the_whole(chunk):
    model = Llama(**SIZES)
    params, tokens = make_params(model), make_tokens()
    chunked = step_of(model, sequences_per_chunk=chunk)(params, tokens)
    assert_trees_close(chunked, step_of(model)(params, tokens), rtol=1e-4, atol=1e-6)


def test_a_chunk_of_the_batch_or_more_is_the_whole():
    model = Llama(**SIZES)
    args = make_params(model), make_tokens()
    whole, *large = (
        str(jax.make_jaxpr(sequence_losses(model, sequences_per_chunk=chunk))(*args))
        for chunk in (0, BATCH, BATCH + 1)
    )
    assert large == [whole, whole]


def test_chunked_loss_never_holds_all_logits():
    model = Llama(**SIZES | {"vocab_size": 101})
    params, tokens = make_params(model), make_tokens(batch=6)

    def logit_elements(chunk):
        program = jax.make_jaxpr(jax.grad(next_token_loss(model, sequences_per_chunk=chunk)))
        shapes = re.findall(r"f32\[([\d,]+),101\]", str(program(params, tokens)))
        not_weights = [s for s in shapes if s != str(SIZES["width"])]
        return max(np.prod([int(n) for n in s.split(",")]) for s in not_weights)

    assert logit_elements(0) == 6 * LENGTH
    assert logit_elements(2) == 2 * LENGTH


def test_gradient_of_the_batch_mean_is_the_mean_of_sequence_gradients():
    """The algebra every batch-size test rests on."""
    model = Llama(**SIZES)
    params, tokens, step = make_params(model), make_tokens(), step_of(model)
    one_by_one = [step(params, row[None]) for row in tokens]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *one_by_one)
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), stacked)
    assert_trees_close(step(params, tokens), mean, rtol=1e-4, atol=1e-6)
    per_example = jax.jit(jax.vmap(step, in_axes=(None, 0)))(params, tokens[:, None])
    assert_trees_close(per_example, stacked, rtol=1e-4, atol=1e-6)


def test_stacked_parameters_under_vmap_equal_a_loop():
    model = Llama(**SIZES)
    params = [make_params(model, seed) for seed in range(3)]
    tokens = [make_tokens(seed) for seed in range(3)]
    looped = [step_of(model)(p, t) for p, t in zip(params, tokens, strict=True)]
    looped = jax.tree.map(lambda *leaves: np.stack(leaves), *looped)
    params_M = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
    step = step_of(Llama(**SIZES, remat=True), sequences_per_chunk=2)
    stacked = jax.jit(jax.vmap(step))(params_M, np.stack(tokens))
    assert_trees_close(stacked, looped, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("length", [7, 40])
def test_slopes_are_those_of_a_slow_float64_loss(length):
    """Along a direction of all parameters, and, if short, along each array's part of it."""
    model = Llama(**SIZES | {"max_length": max(length, SIZES["max_length"])})
    params, direction = make_params(model), make_params(model, 1)
    tokens_L = np.random.default_rng(0).integers(0, SIZES["vocab_size"], length + 1)
    heads = {name: SIZES[name] for name in ("num_heads", "num_kv_heads")}

    def oracle_loss(step, part):
        moved = jax.tree.map(
            lambda p, d: np.asarray(p, np.float64) + step * np.asarray(d, np.float64), params, part
        )
        logits_LV = oracle_logits(moved, tokens_L[:-1], **heads, eps=1e-5, theta=10000.0)
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
    model = Llama(**SIZES)
    params, direction, tokens = make_params(model), make_params(model, 1), make_tokens()
    chunked = sequence_losses(model, sequences_per_chunk=2)
    forward = jax.jit(lambda p, d, t: jax.jvp(lambda q: chunked(q, t), (p,), (d,)))
    losses_B, slopes_B = forward(params, direction, tokens)
    np.testing.assert_allclose(losses_B, losses_of(model)(params, tokens), rtol=1e-5)
    for b in range(BATCH):
        _, grads = step_of(model)(params, tokens[b : b + 1])
        slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads, direction)))
        np.testing.assert_allclose(slopes_B[b], slope, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3, width=16: the heads must divide the width"),
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"num_kv_heads": 3}, "num_kv_heads=3, num_heads=4: the key/value heads must divide"),
        ({"width": 12}, "num_heads=4, width=12: rotary embeddings need an even head size"),
        ({"dtype": "float16"}, "dtype='float16' must be one of float32, bfloat16"),
        ({"max_length": LENGTH - 1}, "7 tokens per sequence, max_length is 6"),
    ],
)
def test_faulty_sizes_raise_while_tracing(change, message):
    model = Llama(**SIZES | change)
    tokens_BL = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, jax.random.key(0), tokens_BL)


@pytest.mark.parametrize("shape", [(LENGTH + 1,), (BATCH, 1)])
def test_tokens_without_a_target_or_a_batch_axis_raise(shape):
    model = Llama(**SIZES)
    with pytest.raises(ValueError, match=re.escape(f"tokens has shape {shape}")):
        next_token_loss(model)(make_params(model), jnp.zeros(shape, jnp.int32))


def test_negative_chunk_raises():
    with pytest.raises(ValueError, match="sequences_per_chunk=-1"):
        next_token_loss(Llama(**SIZES), sequences_per_chunk=-1)
