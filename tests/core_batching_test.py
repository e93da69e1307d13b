"""The batch-size tests against the oracle, the caps as properties, switch mode as a table."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adloco_jax import (
    BatchPlan,
    GradientStats,
    augmented_inner_product_test,
    inner_product_test,
    next_batch_size,
    norm_test,
    ramp,
    replay,
    switch_mode,
)

TESTS = {
    "norm": (functools.partial(norm_test, eta=0.8), oracle.norm_request, {"eta": 0.8}),
    "inner_product": (
        functools.partial(inner_product_test, vartheta=0.9),
        oracle.inner_product_request,
        {"vartheta": 0.9},
    ),
    "augmented": (
        functools.partial(augmented_inner_product_test, vartheta=0.9, nu=1.1),
        oracle.augmented_request,
        {"vartheta": 0.9, "nu": 1.1},
    ),
}


def sums_of(t=12, shift=0.4, seed=0, width=6):
    """The oracle's sums of t random gradients; `shift` sets how much of them is signal."""
    grads = np.random.default_rng(seed).normal(size=(t, width)) + shift
    return oracle.gradient_sums(list(grads))


def stats_from(sums, scale=1.0, dtype=np.float64):
    return GradientStats(
        scale=dtype(scale),
        num_examples=dtype(sums["examples"]),
        noise_sum=dtype(sums["noise"] / scale),
        noise_weight=dtype(sums["noise_weight"]),
        signal_sum=dtype(sums["signal"] / scale),
        signal_weight=dtype(sums["signal_weight"]),
        ip_sum=dtype(sums["ip"] / scale**2),
        ip_weight=dtype(sums["ip_weight"]),
        plugin_ip_sum=dtype(sums["plugin_ip"] / scale**2),
        plugin_orth_sum=dtype(sums["plugin_orth"] / scale),
    )


# Strong, weak and (negative estimate) no signal.
SIGNALS = [(2.0, 0), (0.4, 0), (0.0, 3)]


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("mode", ["unbiased", "paper"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_requests_agree_with_the_oracle_on_numpy_and_on_jax(test, mode, num_workers):
    package, by_hand, thresholds = TESTS[test]
    every = [sums_of(shift=shift, seed=seed) for shift, seed in SIGNALS]
    assert every[2]["signal"] < 0 < every[1]["signal"]
    expected = [
        by_hand(sums, **thresholds, workers=num_workers, mode=mode, total_batch=5 * num_workers)
        for sums in every
    ]
    call = functools.partial(package, num_workers=num_workers, mode=mode, batch_size=5)
    for sums, value in zip(every, expected, strict=True):
        # float64 on the host; the units of the sums do not matter
        np.testing.assert_allclose(call(stats_from(sums)), value, rtol=1e-12)
        np.testing.assert_allclose(call(stats_from(sums, scale=1e-3)), value, rtol=1e-12)
    single = [stats_from(sums, dtype=jnp.float32) for sums in every]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *single)
    np.testing.assert_allclose(jax.jit(jax.vmap(call))(stacked), expected, rtol=2e-5)
    np.testing.assert_allclose(call(single[0]), expected[0], rtol=2e-5)


@pytest.mark.parametrize("test", TESTS)
def test_paper_mode_on_the_whole_batch_divides_by_the_plug_in_mean(test):
    package, _, thresholds = TESTS[test]
    grads = np.random.default_rng(1).normal(size=(10, 4)) + 1.0
    sums = oracle.gradient_sums(list(grads))
    mean = grads.mean(axis=0)
    signal = mean @ mean
    products = grads @ mean
    noise = ((grads - mean) ** 2).sum() / 9
    inner_product = products.var(ddof=1) / signal**2 / 0.9**2
    orthogonal = ((grads**2).sum() - (products**2).sum() / signal) / 9 / signal / 1.1**2
    expected = {
        "norm": noise / signal / 0.8**2,
        "inner_product": inner_product,
        "augmented": max(inner_product, orthogonal),
    }[test]
    np.testing.assert_allclose(package(stats_from(sums), mode="paper"), expected, rtol=1e-12)
    np.testing.assert_allclose(
        package(stats_from(sums), mode="paper", batch_size=10), expected, rtol=1e-12
    )


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize(("shift", "seed"), SIGNALS)
def test_paper_mode_never_asks_beyond_batch_over_eta_squared(num_workers, shift, seed):
    stats = stats_from(sums_of(shift=shift, seed=seed))
    request = norm_test(stats, eta=0.8, mode="paper", num_workers=num_workers, batch_size=7)
    assert request <= 7 / 0.8**2 * (1 + 1e-12)


def test_signal_is_floored_at_a_thousandth_of_the_noise():
    stats = stats_from(sums_of(shift=0.0, seed=3))
    np.testing.assert_allclose(norm_test(stats, eta=0.5), 1000 / 0.25, rtol=1e-12)


@pytest.mark.parametrize("test", TESTS)
def test_unknown_mode_is_refused(test, unchecked):
    with pytest.raises(ValueError, match="mode='papre': expected unbiased or paper"):
        TESTS[test][0](stats_from(sums_of()), mode="papre")


# --- Rounding, growth limit, cap

SIZES = st.integers(1, 4096)


@given(
    requested=st.floats(allow_nan=False, allow_infinity=False),
    batch_size=SIZES,
    max_growth=st.integers(1, 8) | st.floats(1.0, 8.0),
    batch_cap=SIZES,
    monotone=st.booleans(),
)
def test_next_batch_is_a_whole_number_within_growth_and_cap(
    requested, batch_size, max_growth, batch_cap, monotone
):
    new = next_batch_size(
        requested,
        batch_size=batch_size,
        max_growth=max_growth,
        batch_cap=batch_cap,
        monotone=monotone,
    )
    assert type(new) is int and 1 <= new <= max(batch_size, batch_cap)
    assert new <= max(max_growth * batch_size, 1)
    if monotone:
        assert new >= batch_size
    if isinstance(max_growth, int):
        limits = {"max_growth": max_growth, "cap": batch_cap, "monotone": monotone}
        assert new == oracle.limited(requested, batch=batch_size, **limits)
    # An answer that the limits allow is met exactly.
    if batch_size <= requested <= min(int(max_growth * batch_size), batch_cap):
        assert new == math.ceil(requested)


@pytest.mark.parametrize("requested", [math.nan, np.float64("inf"), -math.inf])
def test_answer_that_is_not_finite_keeps_the_batch(requested):
    limits = {"max_growth": 4, "batch_cap": 64, "monotone": False}
    assert next_batch_size(requested, batch_size=7, **limits) == 7


@pytest.mark.parametrize(
    ("requested", "batch_size", "expected"),
    [(7.2, 5, 8), (8.0, 5, 8), (1e9, 5, 20), (1e9, 30, 64), (3.0, 5, 5), (100.0, 80, 80)],
)
def test_next_batch_by_example(requested, batch_size, expected):
    """Rounded up, within the growth limit and the cap, never falling."""
    limits = {"max_growth": 4, "batch_cap": 64}
    assert next_batch_size(requested, batch_size=batch_size, **limits) == expected


def test_defect_07_growth_stops_at_the_cap():
    batch = 1
    for _ in range(20):
        batch = next_batch_size(1e12, batch_size=batch, max_growth=4, batch_cap=1024)
    assert batch == 1024


# --- Switch mode


@pytest.mark.parametrize(
    ("mode", "plans"),
    [
        ("threshold", [(1, 1), (8, 1), (8, 1), (8, 1), (8, 3), (8, 4)]),
        ("accumulate", [(1, 1), (8, 1), (8, 2), (8, 2), (8, 3), (8, 4)]),
        ("clip", [(1, 1), (8, 1), (8, 1), (8, 1), (8, 1), (8, 1)]),
        ("lengthen", [(1, 1), (8, 1), (8, 2), (8, 2), (8, 3), (8, 4)]),
    ],
)
def test_switch_mode_at_its_borders(mode, plans):
    requested = [1, 8, 9, 16, 17, 25]  # 1, max, max + 1, 2 max, 2 max + 1, 3 max + 1
    got = [switch_mode(b, max_batch_size=8, multiplier=2, mode=mode) for b in requested]
    assert got == plans and all(isinstance(plan, BatchPlan) for plan in got)


@given(
    SIZES,
    st.integers(1, 64),
    st.integers(1, 5),
    st.sampled_from(["threshold", "accumulate", "clip"]),
)
def test_switch_mode_fits_the_device_and_covers_the_request_or_clips(
    requested, max_batch, multiplier, mode
):
    micro, accum = switch_mode(
        requested, max_batch_size=max_batch, multiplier=multiplier, mode=mode
    )
    assert (micro, accum) == oracle.planned(
        requested,
        max_batch=max_batch,
        multiplier=multiplier,
        mode=mode,
        buckets=range(1, max_batch + 1),
    )
    assert 1 <= micro <= max_batch
    if micro * accum < requested:
        assert (micro, accum) == (max_batch, 1) and mode != "accumulate"
    else:
        assert micro * (accum - 1) < requested


def test_switch_mode_refuses_an_unknown_mode(unchecked):
    with pytest.raises(ValueError, match="mode='never': expected threshold, accumulate, clip or"):
        switch_mode(4, max_batch_size=8, mode="never")


# --- Declared batches


def test_ramp_takes_the_last_entry_whose_round_has_come():
    schedule = [(0, 4), (3, 8), (5, 32)]
    sizes = [ramp(schedule=schedule, round_index=r) for r in range(7)]
    assert sizes == [4, 4, 4, 8, 8, 32, 32]


@pytest.mark.parametrize("rounds", [(), (1, 2), (0, 5, 3), (0, 0)])
def test_ramp_refuses_rounds_that_do_not_increase_from_zero(rounds):
    with pytest.raises(
        ValueError, match="schedule: rounds .*expected increasing whole numbers from 0"
    ):
        ramp(schedule=[(r, 4) for r in rounds], round_index=1)


def test_replay_takes_the_recorded_batch_and_then_stays_at_the_last():
    assert [replay(history=[4, 4, 9], round_index=r) for r in range(5)] == [4, 4, 9, 9, 9]
    with pytest.raises(ValueError, match="empty"):
        replay(history=[], round_index=0)


@pytest.mark.parametrize("mode", ["unbiased", "paper"])
@pytest.mark.parametrize("test", ["inner_product", "augmented"])
def test_statistics_without_inner_products_are_refused(test, mode):
    """They would give NaN, or with the paper's plug-in values a request of zero."""
    package, _, _ = TESTS[test]
    stats = stats_from(sums_of())
    zero = np.float64(0)
    without = stats.replace(ip_sum=zero, ip_weight=zero, plugin_ip_sum=zero, plugin_orth_sum=zero)
    with pytest.raises(ValueError, match="stats: taken without inner products"):
        package(without, mode=mode)
    with np.errstate(invalid="ignore"):  # of too few examples for them
        few = package(stats.replace(ip_sum=zero, ip_weight=zero), mode=mode)
    assert np.isnan(few) == (mode == "unbiased")


@pytest.mark.parametrize("name", ["requested_batch_size", "max_batch_size", "multiplier"])
def test_switch_mode_refuses_what_is_no_positive_whole_number(name, unchecked):
    sizes = {"requested_batch_size": 9, "max_batch_size": 4, "multiplier": 2}
    with pytest.raises(ValueError, match=f"{name}=0.*expected positive"):
        switch_mode(**sizes | {name: 0})
    with pytest.raises(ValueError, match=f"{name}=2.5: expected a whole number"):
        switch_mode(**sizes | {name: 2.5})
    assert switch_mode(**sizes | {name: np.int64(sizes[name])}) == BatchPlan(4, 3)


@pytest.mark.parametrize("name", ["batch_size", "batch_cap"])
def test_a_next_batch_size_from_what_is_no_whole_number_is_refused(name, unchecked):
    sizes = {"batch_size": 4, "batch_cap": 64}
    for requested in (7.2, math.nan):
        with pytest.raises(ValueError, match=f"{name}=4.5: expected a whole number"):
            next_batch_size(requested, max_growth=2.0, **sizes | {name: 4.5})
