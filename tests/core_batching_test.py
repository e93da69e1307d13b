"""Batch-size tests against the oracle, limits as properties, switch mode as a table."""

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
    """The oracle's sums of t random gradients; `shift` sets the size of the signal."""
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


# A strong signal, a weak signal, and none (a negative estimate).
SIGNALS = [(2.0, 0), (0.4, 0), (0.0, 3)]


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("mode", ["unbiased", "paper"])
def test_requests_agree_with_the_oracle_on_numpy_and_on_jax(test, mode):
    num_workers = 3
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
    # Without a batch size, the tested examples count as the whole batch.
    value = by_hand(every[0], **thresholds, workers=1, mode=mode, total_batch=12)
    np.testing.assert_allclose(package(stats_from(every[0]), mode=mode), value, rtol=1e-12)


# --- Rounding, growth limit, cap

SIZES = st.integers(1, 4096)


@given(
    requested=st.floats(),
    batch_size=SIZES,
    max_growth=st.integers(1, 8) | st.floats(1.0, 8.0),
    batch_cap=SIZES,
)
def test_next_batch_is_a_whole_number_within_growth_and_cap(
    requested, batch_size, max_growth, batch_cap
):
    limits = {"max_growth": max_growth, "batch_cap": batch_cap}
    new = next_batch_size(requested, batch_size=batch_size, **limits)
    assert type(new) is int and batch_size <= new <= max(batch_size, batch_cap)
    assert new <= max_growth * batch_size
    if isinstance(max_growth, int):
        given = {"max_growth": max_growth, "cap": batch_cap}
        assert new == oracle.limited(requested, batch=batch_size, **given)
    # A request within the limits is met exactly.
    if batch_size <= requested <= min(int(max_growth * batch_size), batch_cap):
        assert new == math.ceil(requested)


# --- Switch mode


@pytest.mark.parametrize(
    ("mode", "plans"),
    [
        ("threshold", [(1, 1), (8, 1), (8, 1), (8, 1), (8, 3), (8, 4)]),
        ("accumulate", [(1, 1), (8, 1), (8, 2), (8, 2), (8, 3), (8, 4)]),
        ("clip", [(1, 1), (8, 1), (8, 1), (8, 1), (8, 1), (8, 1)]),
    ],
)
def test_switch_mode_at_its_borders(mode, plans, unchecked):
    requested = [1, 8, 9, 16, 17, np.int64(25)]  # 1, max, max + 1, 2 max, 2 max + 1, 3 max + 1
    got = [switch_mode(b, max_batch_size=8, multiplier=2, mode=mode) for b in requested]
    assert got == plans and all(isinstance(plan, BatchPlan) for plan in got)


# --- Declared batches


def test_ramp_takes_the_last_entry_whose_round_has_come():
    schedule = [(0, 4), (3, 8), (5, 32)]
    sizes = [ramp(schedule=schedule, round_index=r) for r in range(7)]
    assert sizes == [4, 4, 4, 8, 8, 32, 32]


# --- What is refused

STATS = stats_from(sums_of())
WITHOUT_IP = STATS.replace(ip_sum=np.float64(0), ip_weight=np.float64(0))
WITHOUT = WITHOUT_IP.replace(plugin_ip_sum=np.float64(0), plugin_orth_sum=np.float64(0))
THRESHOLDS = [
    (norm_test, "eta"),
    (inner_product_test, "vartheta"),
    (functools.partial(augmented_inner_product_test, vartheta=1.0), "nu"),
]
REFUSED = [
    *(
        (lambda test=test: test(STATS, mode="papre"), "mode='papre': expected unbiased or paper")
        for test, *_ in TESTS.values()
    ),
    # Without inner products the tests would give NaN, or in paper mode a request of zero.
    *(
        (lambda test=test, mode=mode: TESTS[test][0](WITHOUT, mode=mode), "stats: taken without")
        for test, mode in (("inner_product", "paper"), ("augmented", "unbiased"))
    ),
    *(
        (lambda test=test, how={name: value}: test(STATS, **how), f"{name}={value} must be posit")
        for test, name in THRESHOLDS
        for value in (0.0, float("nan"))
    ),
    *(
        (
            lambda given=given: ramp(schedule=[(r, 4) for r in given], round_index=1),
            "schedule: rounds .*expected increasing whole numbers from 0",
        )
        for given in ((), (1, 2), (0, 5, 3))
    ),
    (lambda: switch_mode(9, max_batch_size=0, multiplier=2), "max_batch_size=0: expected a posi"),
    (lambda: switch_mode(9, max_batch_size=4, multiplier=2.5), "multiplier=2.5: expected a posi"),
    (
        lambda: next_batch_size(7.2, batch_size=4, max_growth=2.0, batch_cap=4.5),
        "batch_cap=4.5: expected a positive whole number",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_used_is_refused(call, words, unchecked):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("mode", ["unbiased", "paper"])
def test_too_few_examples_for_inner_products_give_no_request(mode):
    with np.errstate(invalid="ignore"):
        few = TESTS["inner_product"][0](WITHOUT_IP, mode=mode)
    assert np.isnan(few) == (mode == "unbiased")
