"""Gradient statistics: against gradients by hand, their identity, their expectation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from adloco_jax import (
    GradientStats,
    augmented_inner_product_test,
    gradient_stats,
    norm_test,
    pool,
)
from adloco_jax.core.gradstats import per_example_products
from adloco_jax.models.layers import apply_gain, project


def params_of():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(3, 2)).astype(np.float32),
        "b": rng.normal(size=2).astype(np.float32),
    }


def batch_of(size, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, 3)).astype(np.float32) + 1,
        "y": rng.normal(size=(size, 2)).astype(np.float32),
    }


def loss_fn(params, batch):
    residual = batch["x"] @ params["w"] + params["b"][None] - batch["y"]
    return jnp.mean(jnp.sum(jnp.square(residual), axis=-1)) / 2


def linear_loss(weights, batch):
    """The gradient of an example is the example."""
    return jnp.mean(batch @ weights)


def tapped_loss(params, batch, tap_B=None):
    """`loss_fn` with a gain in place of the bias."""
    y = project(batch["x"][:, None], params["w"], tap_B, dtype="float32")
    residual = apply_gain(y, params["b"], tap_B)[:, 0] - batch["y"]
    return jnp.mean(jnp.sum(jnp.square(residual), axis=-1)) / 2


def grads_by_hand(params, batch):
    """Per-example gradients of `loss_fn`, flat, float64."""
    x, y = np.float64(batch["x"]), np.float64(batch["y"])
    residual = x @ np.float64(params["w"]) + np.float64(params["b"]) - y
    return [np.append(np.outer(x[j], residual[j]), residual[j]) for j in range(len(x))]


def in_true_units(stats):
    """The oracle's names and units: the scale multiplied in."""
    s = {name: np.float64(value) for name, value in vars(stats).items()}
    return {
        "examples": s["num_examples"],
        "noise": s["noise_sum"] * s["scale"],
        "noise_weight": s["noise_weight"],
        "signal": s["signal_sum"] * s["scale"],
        "signal_weight": s["signal_weight"],
        "ip": s["ip_sum"] * s["scale"] ** 2,
        "ip_weight": s["ip_weight"],
        "plugin_ip": s["plugin_ip_sum"] * s["scale"] ** 2,
        "plugin_orth": s["plugin_orth_sum"] * s["scale"],
    }


def assert_same(actual, expected, rtol=2e-5):
    assert actual.keys() == expected.keys()
    # Noise and signal are differences of sums of this size, in float32.
    size = abs(expected["noise"]) + abs(expected["signal"])
    for name in expected:
        atol = 1e-6 * size if name in ("noise", "signal") else 0.0
        np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, atol=atol, err_msg=name)


@functools.cache
def stats_of(chunk_size=None, inner_products=True):
    return jax.jit(
        lambda params, batch, num_examples=None: gradient_stats(
            loss_fn,
            params,
            batch,
            chunk_size=chunk_size,
            num_examples=num_examples,
            inner_products=inner_products,
        )
    )


# --- Values


@pytest.mark.parametrize("size", [2, 3, 9])
def test_whole_batch_agrees_with_gradients_by_hand(size):
    stats = stats_of()(params_of(), batch_of(size))
    assert_same(
        in_true_units(stats), oracle.gradient_sums(grads_by_hand(params_of(), batch_of(size)))
    )


def test_number_of_examples_as_data_is_slicing():
    stats = stats_of(4)
    for t in (2, 4, 7, 12):
        batch = batch_of(12)
        expected = oracle.gradient_sums(grads_by_hand(params_of(), batch)[:t])
        batch["x"][t:] = np.nan  # padding may hold anything
        assert_same(in_true_units(stats(params_of(), batch, t)), expected)
    assert stats._cache_size() == 1


def test_without_inner_products_the_norm_test_has_all_it_needs():
    with_products = stats_of()(params_of(), batch_of(9))
    without = stats_of(4, inner_products=False)(params_of(), batch_of(9))
    np.testing.assert_allclose(without.noise, with_products.noise, rtol=1e-6)
    np.testing.assert_allclose(without.signal, with_products.signal, rtol=1e-6)
    assert float(without.ip_sum) == float(without.ip_weight) == 0.0


@pytest.mark.parametrize("size", [2, 9])
def test_plugin_noise_is_inner_product_variance_plus_orthogonal_variance(size):
    # S_hat = V_ip / |mean|^2 + V_o, for the plug-in values and exactly (docs/algorithm.md, 2).
    sums = in_true_units(stats_of()(params_of(), batch_of(size)))
    mean_squared = (sums["signal"] + sums["noise"]) / sums["signal_weight"]
    np.testing.assert_allclose(
        sums["noise"], sums["plugin_ip"] / mean_squared + sums["plugin_orth"], rtol=1e-5
    )
    exact = oracle.gradient_sums(grads_by_hand(params_of(), batch_of(size)))
    mean_squared = (exact["signal"] + exact["noise"]) / exact["signal_weight"]
    np.testing.assert_allclose(
        exact["noise"], exact["plugin_ip"] / mean_squared + exact["plugin_orth"], rtol=1e-12
    )


@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_tiny_and_huge_gradients_neither_vanish_nor_overflow(factor):
    def scaled_loss(params, batch):
        return loss_fn(params, batch) * factor

    expected = stats_of()(params_of(), batch_of(16))
    actual = jax.jit(functools.partial(gradient_stats, scaled_loss))(params_of(), batch_of(16))
    for mode in ("unbiased", "paper"):
        requests = [
            augmented_inner_product_test(stats, vartheta=0.9, nu=1.0, mode=mode)
            for stats in (actual, expected)
        ]
        assert requests[0] > 0
        np.testing.assert_allclose(*requests, rtol=1e-4)
    np.testing.assert_allclose(norm_test(actual, eta=0.8), norm_test(expected, eta=0.8), rtol=1e-4)
    np.testing.assert_allclose(actual.noise, expected.noise * factor**2, rtol=1e-4)


def test_equal_examples_have_no_noise_and_zero_gradients_no_statistics():
    batch = jax.tree.map(lambda leaf: np.repeat(leaf, 8, axis=0), batch_of(1))
    stats = stats_of()(params_of(), batch)
    assert abs(float(stats.noise)) < 1e-5 * float(stats.signal)
    flat = jax.jit(
        functools.partial(gradient_stats, lambda params, batch: 0.0 * loss_fn(params, batch))
    )
    assert np.isnan(norm_test(flat(params_of(), batch_of(8)), eta=0.8))


def test_broken_example_makes_the_statistics_not_finite():
    batch = batch_of(8)
    batch["x"][3] = np.inf
    stats = stats_of()(params_of(), batch)
    assert not np.isfinite(stats.noise) and not np.isfinite(norm_test(stats, eta=0.8))


# --- The other estimators


@functools.cache
def stats_by(estimator, chunk_size=None, inner_products=True):
    """Statistics of `tapped_loss`, with the number of examples as data."""

    def stats(params, batch, num_examples):
        return gradient_stats(
            tapped_loss,
            params,
            batch,
            estimator=estimator,
            chunk_size=chunk_size,
            num_examples=num_examples,
            inner_products=inner_products,
        )

    return jax.jit(stats)


def tapped_grads(batch):
    """Per-example gradients of `tapped_loss` by automatic differentiation, flat, float64."""
    grads = jax.vmap(jax.grad(tapped_loss), in_axes=(None, 0))(
        params_of(), jax.tree.map(lambda leaf: leaf[:, None], batch)
    )
    leaves = [np.float64(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(grads)]
    return np.concatenate(leaves, axis=1)


def chunked_sums(grads, size):
    """The oracle's sums over chunk means, in the units of single examples."""
    sums = oracle.gradient_sums(grads.reshape(-1, size, grads.shape[1]).mean(axis=1))
    scaled = {name: size * sums[name] for name in ("noise", "plugin_ip", "plugin_orth", "ip")}
    return sums | scaled | {"examples": size * sums["examples"]}


@pytest.mark.parametrize(("chunk_size", "inner_products"), [(None, False), (3, True)])
def test_taps_with_any_number_of_examples_agree_with_per_example_gradients(
    chunk_size, inner_products
):
    stats = stats_by("taps", chunk_size, inner_products)
    for t in (2, 4, 7, 8, 12):
        batch = batch_of(12)
        expected = oracle.gradient_sums(tapped_grads(batch)[:t])
        if not inner_products:
            expected |= dict.fromkeys(("ip", "ip_weight", "plugin_ip", "plugin_orth"), 0.0)
        batch["x"][t:] = np.nan
        assert_same(in_true_units(stats(params_of(), batch, t)), expected)
    assert stats._cache_size() == 1


@pytest.mark.parametrize(("size", "t"), [(1, 12), (2, 11), (6, 12)])
def test_chunks_are_the_same_formulas_on_chunk_means(size, t):
    # McCandlish et al. 2018, appendix A; a chunk that is not whole does not count.
    grads = tapped_grads(batch_of(12))[: t - t % size]
    batch = batch_of(12)
    batch["x"][len(grads) :] = np.nan
    stats = stats_by("chunks", size)(params_of(), batch, t)
    assert_same(in_true_units(stats), chunked_sums(grads, size))
    num_chunks, means = len(grads) // size, grads.reshape(-1, size, grads.shape[1]).mean(axis=1)
    squares, square = (means**2).sum(), (means.mean(axis=0) ** 2).sum()
    noise = size * (squares - num_chunks * square) / (num_chunks - 1)
    np.testing.assert_allclose(stats.noise, noise, rtol=1e-4)


@pytest.mark.parametrize("t", [3, 11])
def test_forward_mode_takes_products_of_examples_and_noise_between_thirds(t):
    grads, batch = tapped_grads(batch_of(12))[:t], batch_of(12)
    batch["x"][t:] = np.nan
    sums = in_true_units(stats_by("jvp", 3)(params_of(), batch, t))
    expected = oracle.gradient_sums(grads)
    thirds = np.split(grads, [t // 3, 2 * (t // 3)])
    mean = grads.mean(axis=0)
    noise = sum(len(part) * ((part.mean(axis=0) - mean) ** 2).sum() for part in thirds) / 2
    expected |= {"noise": 2 * noise, "noise_weight": 2, "signal_weight": 6}
    expected["signal"] = 6 * (mean @ mean - noise / t)
    expected["plugin_ip"] *= 2 / (t - 1)
    expected["plugin_orth"] = 2 * noise - expected["plugin_ip"] / (mean @ mean)
    assert_same(sums, expected, rtol=1e-4)


def test_every_estimator_keeps_workers_apart_under_vmap():
    batches, counts = [batch_of(12, seed) for seed in range(3)], [12, 8, 4]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    for estimator in ("taps", "chunks", "jvp"):
        stats = stats_by(estimator, 2)
        pooled = jax.vmap(stats, in_axes=(None, 0, 0))(params_of(), stacked, jnp.array(counts))
        for r, t in enumerate(counts):
            got = in_true_units(jax.tree.map(lambda leaf, r=r: leaf[r], pooled))
            assert_same(got, in_true_units(stats(params_of(), batches[r], t)), rtol=1e-4)


@pytest.mark.parametrize("estimator", ["vmap", "taps"])
def test_norms_and_products_of_single_examples(estimator):
    grads = tapped_grads(batch_of(9))
    measure = functools.partial(
        per_example_products, tapped_loss, estimator=estimator, chunk_size=2
    )
    norms_B, products_B = jax.jit(measure)(params_of(), batch_of(9))
    np.testing.assert_allclose(norms_B, (grads**2).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(products_B, grads @ grads.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_auto_is_taps_for_a_loss_that_takes_them_and_vmap_for_another():
    def program(loss, estimator):
        stats = functools.partial(gradient_stats, loss, estimator=estimator)
        return str(jax.make_jaxpr(stats)(params_of(), batch_of(4)))

    def wrapped(params, batch, **kwargs):
        return tapped_loss(params, batch, **kwargs)

    taps, vmap = program(tapped_loss, "taps"), program(tapped_loss, "vmap")
    assert taps != vmap
    assert program(tapped_loss, "auto") == program(wrapped, "taps") == taps
    assert program(wrapped, "auto") == vmap  # one that drops the keyword would have no noise
    assert program(loss_fn, "auto") == program(loss_fn, "vmap")


@pytest.mark.parametrize(
    ("estimator", "wrap", "chunk_size"),
    [
        ("auto", lambda loss: loss, 2),
        ("taps", jax.jit, None),
        ("taps", jax.checkpoint, None),
    ],
)
def test_a_tap_that_the_loss_does_not_use_is_refused_while_tracing(estimator, wrap, chunk_size):
    def loss(params, batch, tap_B=None):
        taken = 0.0 if tap_B is None else jnp.sum(tap_B < 0)  # its value alone is no use of it
        return loss_fn(params, batch) + 0.0 * taken

    stats = functools.partial(
        gradient_stats, wrap(loss), estimator=estimator, chunk_size=chunk_size
    )
    with pytest.raises(ValueError, match="takes the keyword tap_B without using it"):
        jax.eval_shape(stats, params_of(), batch_of(8))


@pytest.mark.parametrize(("estimator", "chunk_size"), [("chunks", 2), ("jvp", None)])
def test_float64_parameters_give_the_statistics_of_float32_ones(estimator, chunk_size):
    def stats(params, batch):
        return gradient_stats(
            tapped_loss, params, batch, estimator=estimator, chunk_size=chunk_size, num_examples=7
        )

    expected = jax.jit(stats)(params_of(), batch_of(8))
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (params_of(), batch_of(8)))
        actual = jax.jit(stats)(*wide)
        assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype(np.float32)}
        assert_same(in_true_units(actual), in_true_units(expected), rtol=2e-4)


def test_complex_parameters_have_no_statistics():
    params = dict(params_of(), w=params_of()["w"] + 1j)
    with pytest.raises(ValueError, match="complex64, expected real numbers"):
        gradient_stats(loss_fn, params, batch_of(8))


def test_parameters_that_hold_a_key_have_the_statistics_of_the_others():
    params = dict(params_of(), key=jax.random.key(0))

    def loss(params, batch):
        return loss_fn(params, batch) + 0.0 * jax.random.normal(params["key"])

    actual = gradient_stats(loss, params, batch_of(9))
    assert_same(in_true_units(actual), in_true_units(stats_of()(params_of(), batch_of(9))))


@pytest.mark.parametrize(
    ("loss", "kwargs", "words"),
    [
        (
            loss_fn,
            {"estimator": "taps"},
            "loss_fn loss_fn does not take the keyword tap_B; use vmap, chunks or",
        ),
        (tapped_loss, {"estimator": "jvp", "inner_products": False}, "use taps, vmap, chunks"),
        (loss_fn, {"estimator": "tap"}, "estimator='tap': expected"),
        (loss_fn, {"estimator": "chunks"}, "chunk_size=None: estimator='chunks' needs one that"),
        (loss_fn, {"estimator": "chunks", "chunk_size": 3}, "divides the batch's 8 examples"),
        (loss_fn, {"estimator": "chunks", "chunk_size": 8}, "into at least 2 chunks"),
    ],
)
def test_an_estimator_that_does_not_serve_is_refused(loss, kwargs, words, unchecked):
    with pytest.raises(ValueError, match=words):
        gradient_stats(loss, params_of(), batch_of(8), **kwargs)


# --- Expectation


MEAN = np.array([0.6, -0.3, 0.2])
MIXING = np.array([[1.0, 0.0, 0.0], [0.5, 0.8, 0.0], [-0.4, 0.3, 0.6]])
DRAWS = 10_000


@functools.cache
def drawn_stats(t, **options):
    """Statistics of DRAWS samples of t gradients from a skewed law of known mean and covariance."""

    def one(key):
        skewed = jax.random.exponential(key, (t, 3)) - 1.0  # mean 0, variance 1
        gradients = jnp.asarray(MEAN, jnp.float32)[None] + skewed @ jnp.asarray(
            MIXING.T, jnp.float32
        )
        return gradient_stats(linear_loss, jnp.zeros(3), gradients, **options)

    return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), DRAWS))


def standard_errors_off(values, truth):
    values = np.asarray(values, np.float64)
    return (values.mean() - truth) / (values.std() / np.sqrt(len(values)))


COVARIANCE = MIXING @ MIXING.T
NOISE, SIGNAL, IP_VARIANCE = np.trace(COVARIANCE), MEAN @ MEAN, MEAN @ COVARIANCE @ MEAN


@pytest.mark.parametrize("t", [9])
def test_noise_signal_and_inner_product_variance_are_unbiased(t):
    sums = in_true_units(drawn_stats(t))
    assert abs(standard_errors_off(sums["noise"] / sums["noise_weight"], NOISE)) < 4
    assert abs(standard_errors_off(sums["signal"] / sums["signal_weight"], SIGNAL)) < 4
    assert abs(standard_errors_off(sums["ip"] / sums["ip_weight"], IP_VARIANCE)) < 4
    # The plug-in forms that these replace are off by far more.
    mean_squared = (sums["signal"] + sums["noise"]) / sums["signal_weight"]
    assert standard_errors_off(mean_squared, SIGNAL) > 20
    assert abs(standard_errors_off(sums["plugin_ip"] / sums["noise_weight"], IP_VARIANCE)) > 20


@pytest.mark.parametrize(
    ("t", "options"), [(8, {"estimator": "chunks", "chunk_size": 2}), (11, {"estimator": "jvp"})]
)
def test_means_of_several_examples_estimate_the_same_quantities_unbiased(t, options):
    sums = in_true_units(drawn_stats(t, **options))
    assert abs(standard_errors_off(sums["noise"] / sums["noise_weight"], NOISE)) < 4
    assert abs(standard_errors_off(sums["signal"] / sums["signal_weight"], SIGNAL)) < 4
    assert abs(standard_errors_off(sums["ip"] / sums["ip_weight"], IP_VARIANCE)) < 4


def test_pooled_statistics_of_unequal_workers_are_unbiased():
    few, many = jax.tree.map(np.asarray, (drawn_stats(4), drawn_stats(9)))
    many = jax.tree.map(lambda leaf: np.roll(leaf, 1000), many)  # the two shared their keys
    workers = jax.tree.map(lambda *leaves: np.stack(leaves), few, many)
    sums = in_true_units(pool(workers))
    assert sums["noise_weight"][0] == 3 + 8 and sums["signal_weight"][0] == 12 + 72
    assert abs(standard_errors_off(sums["noise"] / sums["noise_weight"], NOISE)) < 4
    assert abs(standard_errors_off(sums["signal"] / sums["signal_weight"], SIGNAL)) < 4
    assert abs(standard_errors_off(sums["ip"] / sums["ip_weight"], IP_VARIANCE)) < 4


# --- Pooling


@functools.cache
def linear_stats():
    return jax.jit(lambda x, t: gradient_stats(linear_loss, jnp.zeros(4), x, num_examples=t))


def several_stats(factors, sizes):
    """Per worker: its gradients, and their statistics as NumPy float32."""
    rng = np.random.default_rng(0)
    each = [
        (np.float32(factor) * (rng.normal(size=(8, 4)) + 0.5)).astype(np.float32)
        for factor in factors
    ]
    return [
        (list(x[:t]), jax.tree.map(np.asarray, linear_stats()(x, t)))
        for x, t in zip(each, sizes, strict=True)
    ]


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (1e-4, 1.0, 30.0)])
def test_pooling_adds_sums_and_weights(library, factors):
    each = several_stats(factors, (4, 8, 5))
    dtype = np.float64 if library is np else np.float32
    stats = pool(
        jax.tree.map(lambda *n: library.asarray(np.stack(n), dtype), *[stats for _, stats in each])
    )
    assert isinstance(stats, GradientStats)
    assert_same(in_true_units(stats), oracle.pooled([oracle.gradient_sums(x) for x, _ in each]))


def test_pooling_one_worker_changes_nothing_and_a_silent_worker_only_weighs():
    (x, stats), (_, zeros) = several_stats((1.0, 0.0), (8, 4))
    alone = pool(jax.tree.map(lambda leaf: leaf[None], stats))
    assert_same(in_true_units(alone), oracle.gradient_sums(x))
    both = pool(jax.tree.map(lambda *n: np.stack(n), stats, zeros))
    np.testing.assert_allclose(both.noise, stats.noise * 7 / 10, rtol=1e-5)
    np.testing.assert_allclose(both.signal, stats.signal * 56 / 68, rtol=1e-5)
    silent = pool(jax.tree.map(lambda leaf: leaf[None], zeros))
    assert silent.noise == silent.signal == 0.0


# --- Errors, and defects of the reference


@pytest.mark.parametrize(
    ("batch", "kwargs", "words"),
    [
        ({"x": (1, 3)}, {}, "batch: leading axes .1., expected one size, at least 2"),
        ({"x": (4, 3), "y": (5, 2)}, {}, "batch: leading axes .4, 5., expected one size"),
        ({"x": (4, 3), "y": ()}, {}, "batch: leading axes .0, 4., expected one size"),
        ({"x": (4, 3)}, {"chunk_size": 0}, "chunk_size=0: expected at least 1"),
    ],
)
def test_wrong_shapes_are_named_while_tracing(batch, kwargs, words):
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in batch.items()}
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda b: gradient_stats(loss_fn, params_of(), b, **kwargs), shapes)


def test_defect_05_a_trainer_of_one_worker_still_has_a_test():
    sums = stats_of()(params_of(), batch_of(16))
    request = norm_test(pool(jax.tree.map(lambda leaf: leaf[None], sums)), eta=0.1, num_workers=1)
    assert request > 1


def test_defect_06_variances_are_per_example_and_scaled_by_nothing_else():
    # Sample variances of inner products and of orthogonal parts from their definition: no factor
    # of the batch size, no division by the number of parameters.
    grads = np.array(grads_by_hand(params_of(), batch_of(10)))
    mean = grads.mean(axis=0)
    products = grads @ mean
    orthogonal = grads - np.outer(products / (mean @ mean), mean)
    sums = in_true_units(stats_of()(params_of(), batch_of(10)))
    np.testing.assert_allclose(sums["plugin_ip"] / 9, products.var(ddof=1), rtol=1e-4)
    np.testing.assert_allclose(sums["plugin_orth"] / 9, (orthogonal**2).sum() / 9, rtol=1e-4)
