"""Gradient statistics against gradients by hand, their identity, their expected values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ensembles import draw
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nets import assert_same, in_true_units
from trees import at

from adloco_jax import (
    GradientStats,
    augmented_inner_product_test,
    gradient_stats,
    gradient_stats_of_means,
    next_batch_size,
    norm_test,
    pool,
)
from adloco_jax.core.gradstats import resolve_estimator
from adloco_jax.models.layers import apply_gain, project

PARAMS = jax.tree.map(jnp.asarray, draw({"w": (3, 2), "gain": (2,)}))


def batch_of(size, seed=1):
    batch = draw({"x": (3,), "y": (2,)}, size, seed=seed)
    return batch | {"x": batch["x"] + 1}


def tapped_loss(params, batch, tap_B=None):
    y = project(batch["x"][:, None], params["w"], tap_B, dtype="float32")
    residual = apply_gain(y, params["gain"], tap_B)[:, 0] - batch["y"]
    return jnp.mean(jnp.sum(jnp.square(residual), axis=-1)) / 2


def loss_fn(params, batch):
    """The same loss without taps."""
    return tapped_loss(params, batch)


def linear_loss(weights, batch):
    """A loss whose gradient for an example is the example."""
    return jnp.mean(batch @ weights)


@pytest.mark.parametrize(
    ("how", "check_vma"),
    [({"chunk_size": 2}, True), ({"estimator": "taps"}, False)],
    ids=str,
)
def test_in_shard_map_each_device_measures_its_own_examples(how, check_vma):
    mesh, batch = jax.make_mesh((4,), ("data",)), batch_of(24)

    def measure(params, batch):
        stats = gradient_stats(tapped_loss, params, batch, **how)
        return jax.tree.map(lambda leaf: leaf[None], stats)

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    mapped = jax.shard_map(measure, mesh=mesh, **specs, check_vma=check_vma)
    actual = jax.jit(mapped)(PARAMS, jax.device_put(batch, NamedSharding(mesh, P("data"))))
    parts_4 = jax.tree.map(lambda leaf: leaf.reshape(4, 6, *leaf.shape[1:]), batch)
    alone = jax.jit(functools.partial(gradient_stats, tapped_loss, **how))
    each = [alone(PARAMS, at(parts_4, n)) for n in range(4)]
    expected = pool(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), pool(actual), expected)


def grads_by_hand(batch):
    """Per-example gradients of `loss_fn`, flat, float64 [B, ...]."""
    x, y, w, gain = map(np.float64, (batch["x"], batch["y"], PARAMS["w"], PARAMS["gain"]))
    residual = (x @ w) * gain - y
    of_w = x[:, :, None] * (residual * gain)[:, None]
    return np.concatenate([of_w.reshape(len(x), -1), residual * (x @ w)], axis=1)


@functools.cache
def stats_by(estimator="vmap", chunk_size=None, inner_products=True):
    """Statistics of `tapped_loss` at PARAMS, with the number of examples as data."""
    how = {"estimator": estimator, "chunk_size": chunk_size, "inner_products": inner_products}
    stats = functools.partial(gradient_stats, tapped_loss, PARAMS, **how)
    return jax.jit(lambda batch, num_examples=None: stats(batch, num_examples=num_examples))


# --- Values


def test_whole_batch_agrees_with_gradients_by_hand():
    expected = oracle.gradient_sums(grads_by_hand(batch_of(9)))
    assert_same(in_true_units(stats_by()(batch_of(9))), expected)


@pytest.mark.parametrize(
    ("estimator", "chunk_size", "inner_products"),
    [("vmap", 4, True), ("taps", None, False), ("taps", 3, True)],
)
def test_number_of_examples_as_data_is_slicing(estimator, chunk_size, inner_products):
    stats = stats_by(estimator, chunk_size, inner_products)
    for t in (2, 4, 7, 12):
        batch = batch_of(12)
        expected = oracle.gradient_sums(grads_by_hand(batch)[:t])
        if not inner_products:
            expected |= dict.fromkeys(("ip", "ip_weight", "plugin_ip", "plugin_orth"), 0.0)
        batch["x"][t:] = np.nan  # padding may have any value
        assert_same(in_true_units(stats(batch, t)), expected)
    assert stats._cache_size() == 1


@functools.cache
def scaled_stats(estimator):
    """A function of a factor -> the statistics of nine examples, with the loss multiplied by it."""

    def stats(factor):
        def scaled_loss(params, batch, tap_B=None):
            # A factor on the mean loss multiplies the taps' squared norms by its square.
            return tapped_loss(params, batch, tap_B) * factor

        return gradient_stats(scaled_loss, PARAMS, batch_of(9), estimator=estimator)

    return jax.jit(stats)


@pytest.mark.parametrize(
    ("estimator", "factor"),
    [("vmap", 1e-30), ("vmap", 1e30), ("taps", 1e-14), ("taps", 1e14)],
)
def test_tiny_and_huge_gradients_neither_vanish_nor_overflow(estimator, factor):
    expected, actual = stats_by()(batch_of(9)), scaled_stats(estimator)(factor)
    requests = [
        augmented_inner_product_test(stats, vartheta=0.9, nu=1.0) for stats in (actual, expected)
    ]
    assert requests[0] > 0
    np.testing.assert_allclose(*requests, rtol=1e-4)
    np.testing.assert_allclose(norm_test(actual, eta=0.8), norm_test(expected, eta=0.8), rtol=1e-4)
    if 1e-16 < factor < 1e16:
        np.testing.assert_allclose(actual.noise, expected.noise * factor**2, rtol=1e-4)


def test_degenerate_batches():
    """Equal examples have no noise. Zero gradients or a broken example make statistics unusable."""
    batch = jax.tree.map(lambda leaf: np.repeat(leaf, 9, axis=0), batch_of(1))
    equal = stats_by()(batch)
    assert abs(float(equal.noise)) < 1e-5 * float(equal.signal)
    batch["x"][3] = np.inf
    broken = stats_by()(batch)
    zero = scaled_stats("vmap")(0.0)
    assert not np.isfinite(broken.noise) and np.isnan(norm_test(zero, eta=0.8))


# --- Estimators


def test_estimators_keep_workers_apart_under_vmap():
    batches, counts = [batch_of(12, seed) for seed in range(2)], [12, 4]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    stats = stats_by("taps", 3)
    pooled = jax.vmap(stats)(stacked, jnp.array(counts))
    for r, t in enumerate(counts):
        got = in_true_units(jax.tree.map(lambda leaf, r=r: leaf[r], pooled))
        assert_same(got, in_true_units(stats(batches[r], t)), rtol=1e-4)


def test_auto_is_taps_for_a_loss_that_takes_them_and_vmap_for_another():
    # a wrapper might drop the keyword, and the noise would be 0
    def wrapped(params, batch, **kwargs):
        return tapped_loss(params, batch, **kwargs)

    assert resolve_estimator("auto", tapped_loss) == resolve_estimator("taps", wrapped) == "taps"
    assert resolve_estimator("auto", wrapped) == resolve_estimator("auto", loss_fn) == "vmap"


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
        # reading the value alone does not count as use
        taken = 0.0 if tap_B is None else jnp.sum(tap_B < 0)
        return loss_fn(params, batch) + 0.0 * taken

    stats = functools.partial(
        gradient_stats, wrap(loss), estimator=estimator, chunk_size=chunk_size
    )
    with pytest.raises(ValueError, match="takes the keyword tap_B without using it"):
        jax.eval_shape(stats, PARAMS, batch_of(8))


def test_float64_parameters_give_the_statistics_of_float32_ones():
    def stats(params, batch):
        how = {"estimator": "taps", "chunk_size": 3, "num_examples": 7}
        return gradient_stats(tapped_loss, params, batch, **how)

    expected = stats_by("taps", 3)(batch_of(12), 7)
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (PARAMS, batch_of(12)))
        actual = jax.jit(stats)(*wide)
        assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype(np.float32)}
        assert_same(in_true_units(actual), in_true_units(expected), rtol=2e-4)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 5), (4, None)], ids=str)
def test_a_batch_of_one_example_or_of_several_sizes_is_refused(sizes):
    batch = [np.zeros(() if size is None else (size, 3), np.float32) for size in sizes]
    with pytest.raises(ValueError, match="batch: leading axes .*, expected one size, at least 2"):
        gradient_stats(loss_fn, PARAMS, batch)


# --- Expectation


MEAN = np.array([0.6, -0.3, 0.2])
MIXING = np.array([[1.0, 0.0, 0.0], [0.5, 0.8, 0.0], [-0.4, 0.3, 0.6]])
DRAWS = 10_000


def standard_errors_off(values, truth):
    values = np.asarray(values, np.float64)
    return (values.mean() - truth) / (values.std() / np.sqrt(len(values)))


def test_noise_signal_and_inner_product_variance_are_unbiased():
    """Averages over DRAWS samples of nine gradients of a skewed law with known moments."""

    def one(key):
        skewed = jax.random.exponential(key, (9, 3)) - 1.0  # mean 0, variance 1
        gradients = jnp.asarray(MEAN, jnp.float32)[None] + skewed @ jnp.asarray(
            MIXING.T, jnp.float32
        )
        return gradient_stats(linear_loss, jnp.zeros(3), gradients)

    sums = in_true_units(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), DRAWS)))
    covariance = MIXING @ MIXING.T
    truths = {"noise": np.trace(covariance), "signal": MEAN @ MEAN, "ip": MEAN @ covariance @ MEAN}
    for name, truth in truths.items():
        assert abs(standard_errors_off(sums[name] / sums[f"{name}_weight"], truth)) < 4
    # The biased plug-in estimates are off by far more.
    mean_squared = (sums["signal"] + sums["noise"]) / sums["signal_weight"]
    plugin_ip = sums["plugin_ip"] / sums["noise_weight"]
    assert standard_errors_off(mean_squared, truths["signal"]) > 20
    assert abs(standard_errors_off(plugin_ip, truths["ip"])) > 20


# --- From mean gradients that a training loop already has


@functools.partial(jax.jit, static_argnames="batch_size")
def of_means(grads_N, batch_size):
    norms_N = jnp.linalg.norm(grads_N, axis=1)
    return gradient_stats_of_means(grads_N.mean(axis=0), norms_N, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_statistics_of_means_are_the_same_formulas_on_means(batch_size):
    """With one example per mean they equal the exact statistics."""
    grads = grads_by_hand(batch_of(12))
    sums = oracle.gradient_sums(grads.reshape(-1, batch_size, grads.shape[1]).mean(axis=1))
    means = jnp.float32(grads.reshape(-1, batch_size, grads.shape[1]).mean(axis=1))
    actual = in_true_units(of_means(means, batch_size))
    for name, factor in (("noise", batch_size), ("examples", batch_size), ("signal", 1)):
        np.testing.assert_allclose(actual[name], factor * sums[name], rtol=1e-4)
    assert actual["noise_weight"] == sums["noise_weight"]
    assert actual["signal_weight"] == sums["signal_weight"]


def test_statistics_of_means_are_unbiased_and_spread_as_stated():
    num_means, batch_size = 6, 3
    covariance = MIXING @ MIXING.T

    def one(key):
        normal = jax.random.normal(key, (num_means, batch_size, 3))
        gradients = jnp.float32(MEAN)[None, None] + normal @ jnp.asarray(MIXING.T, jnp.float32)
        return of_means(gradients.mean(axis=1), batch_size)

    stats = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), DRAWS))
    noise, signal = np.float64(stats.noise), np.float64(stats.signal)
    assert abs(standard_errors_off(noise, np.trace(covariance))) < 4
    assert abs(standard_errors_off(signal, MEAN @ MEAN)) < 4
    dimensions = np.trace(covariance) ** 2 / np.trace(covariance @ covariance)
    spread = np.sqrt(2 / ((num_means - 1) * dimensions))
    np.testing.assert_allclose(noise.std() / noise.mean(), spread, rtol=0.05)


def test_one_mean_gradient_weighs_nothing_and_keeps_the_batch():
    one, two = of_means(jnp.ones((1, 4)), 1), of_means(jnp.eye(2, 4), 1)
    request = norm_test(one, eta=0.8)
    assert np.isnan(request)
    assert next_batch_size(float(request), batch_size=1, max_growth=4, batch_cap=64) == 1
    both = pool(jax.tree.map(lambda *n: jnp.stack(n), one, two))
    assert both.noise == two.noise and both.signal == two.signal
    with pytest.raises(ValueError, match="expected one norm for each mean gradient"):
        gradient_stats_of_means(jnp.ones(3), jnp.ones((2,)), batch_size=0)


# --- Pooling


def several_stats(factors, sizes):
    """Several workers' gradients, and their statistics as NumPy float32."""
    linear = jax.jit(lambda x, t: gradient_stats(linear_loss, jnp.zeros(4), x, num_examples=t))
    rng = np.random.default_rng(0)
    each = [
        (np.float32(factor) * (rng.normal(size=(8, 4)) + 0.5)).astype(np.float32)
        for factor in factors
    ]
    return [
        (list(x[:t]), jax.tree.map(np.asarray, linear(x, t)))
        for x, t in zip(each, sizes, strict=True)
    ]


@pytest.mark.parametrize("library", [np, jnp])
def test_pooling_adds_sums_and_weights(library):
    each = several_stats((1e-4, 1.0, 30.0), (4, 8, 5))
    dtype = np.float64 if library is np else np.float32
    stats = pool(
        jax.tree.map(lambda *n: library.asarray(np.stack(n), dtype), *[stats for _, stats in each])
    )
    assert isinstance(stats, GradientStats)
    assert_same(in_true_units(stats), oracle.pooled([oracle.gradient_sums(x) for x, _ in each]))


def test_pooling_a_silent_worker_only_weighs():
    (_, stats), (_, zeros) = several_stats((1.0, 0.0), (8, 4))
    both = pool(jax.tree.map(lambda *n: np.stack(n), stats, zeros))
    np.testing.assert_allclose(both.noise, stats.noise * 7 / 10, rtol=1e-5)
    np.testing.assert_allclose(both.signal, stats.signal * 56 / 68, rtol=1e-5)
    silent = pool(jax.tree.map(lambda leaf: leaf[None], zeros))
    assert silent.noise == silent.signal == 0.0
