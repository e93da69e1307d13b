"""The bounds' algebra, a quadratic on which they are tight, and ledgers without constants."""

import math

import numpy as np
import pytest
from ledgers import round_line, start_line

from adloco_jax.errors import DataError
from adloco_jax.study.theory import (
    Constants,
    batch_bound,
    communications_bound,
    fit,
    measured,
    paper_communications,
    signal_bound,
)

C = Constants(smoothness=3.0, gap=2.0, noise=50.0, eta=0.5)


def start(**batching):
    batching = {"test": "norm", "eta": 0.5, "nu": 1.0} | batching
    return start_line(max_batch_size=16, config={"batching": batching})


def line(round, **changes):
    measured = {"updates": 10, "noise": 8.0, "signal": 1.0, "train_loss": 3.0 - 0.5 * round}
    return round_line(round, **measured | changes)


def evaluation(loss):
    return {"event": "eval", "round": 1, "trainer": "consensus", "loss": loss}


def test_the_bounds_by_hand():
    # 2 x 3 x 1.25 x 2 = 15.
    assert signal_bound(10, C) == pytest.approx(1.5)
    assert batch_bound(10, C) == pytest.approx(50 * 10 / (0.25 * 15))
    assert communications_bound(C, max_batch_size=8) == pytest.approx(8 * 0.25 * 15 / 50)
    # 2 x 3 x (5 x 4 + 0.25) x 2 / (4 x 10)
    local = {"steps_per_round": 5, "num_workers": 4}
    assert signal_bound(10, C, **local) == pytest.approx(6.075)
    assert batch_bound(10, C, **local) == pytest.approx(50 / (4 * 0.25 * 6.075))
    # L and Delta0 enter as their product.
    other = C._replace(smoothness=7 * C.smoothness, gap=C.gap / 7)
    assert signal_bound(10, other) == pytest.approx(1.5)


@pytest.mark.parametrize("num_steps", [1, 500])
def test_the_papers_communications_are_a_sum_over_theorem_1(num_steps):
    expected = sum(8 / batch_bound(k, C) for k in range(1, num_steps + 1))
    assert paper_communications(num_steps, C, max_batch_size=8) == pytest.approx(expected, rel=1e-9)


QUADRATIC = Constants(smoothness=2.0, gap=4.0, noise=3000.0, eta=2.0)


def quadratic_run(num_steps, *, num_trainers=200):
    """SGD with the exact norm test on L/2 |x|^2, on which Lemma 2 is an equality for large N.

    E|G|^2 shrinks by eta^2 / (1 + eta^2) a step, so its sum is |G_0|^2 (1 + eta^2).
    """
    c, rng, width = QUADRATIC, np.random.default_rng(5), 8
    x_MW = np.zeros((num_trainers, width))
    x_MW[:, 0] = math.sqrt(2 * c.gap / c.smoothness)
    events = [start(eta=c.eta)]
    for step in range(1, num_steps + 1):
        gradient_MW = c.smoothness * x_MW
        signal_M = np.sum(gradient_MW**2, axis=1)
        batch_M = np.ceil(c.noise / (c.eta**2 * signal_M))
        loss_M = c.smoothness / 2 * np.sum(x_MW**2, axis=1)
        for trainer in range(num_trainers):
            events.append(
                line(
                    step,
                    trainer=trainer,
                    workers=1,
                    updates=1,
                    requested_batch_size=int(batch_M[trainer]),
                    noise=c.noise,
                    signal=float(signal_M[trainer]),
                    train_loss=float(loss_M[trainer]),
                )
            )
        deviation_MW = rng.standard_normal(x_MW.shape) * np.sqrt(c.noise / width / batch_M)[:, None]
        x_MW = x_MW - (gradient_MW + deviation_MW) / (c.smoothness * (1 + c.eta**2))
    return events


def test_a_quadratic_has_its_constants_found_and_obeys_the_bounds():
    events = quadratic_run(25)
    found = fit([*events, evaluation(0.0)])
    assert found.noise == pytest.approx(QUADRATIC.noise)
    assert found.eta == QUADRATIC.eta
    assert found.gap == pytest.approx(QUADRATIC.gap)
    assert found.smoothness == pytest.approx(QUADRATIC.smoothness, rel=0.05)
    for constants in (found, QUADRATIC._replace(gap=4.3)):
        points = measured(events, constants)
        assert [point.num_steps for point in points] == list(range(1, 26))
        for point in points:
            assert point.mean_signal <= point.signal_bound * (1 + 1e-9)
            assert point.mean_total_batch_size >= point.batch_bound
            assert point.mean_batch_size >= point.local_batch_bound
            assert point.communications <= point.communications_bound
    # Both bounds are nearly met: the first at the end, the second from rounding alone.
    assert points[-1].mean_signal > 0.85 * points[-1].signal_bound
    assert points[-1].communications > 0.8 * points[-1].communications_bound
    assert points[-1].paper_communications > 3 * points[-1].communications_bound


def test_measured_means_by_hand():
    events = [
        start(),
        line(1, signal=None),
        line(2, trainer=0, signal=-1.0, requested_batch_size=8),
        line(2, trainer=1, signal=4.0, workers=1, requested_batch_size=2),
        line(3, trainer=1, workers=3, updates=20, signal=6.0, requested_batch_size=8),
    ]
    first, second, third = measured(events)
    assert (first.mean_signal, first.num_steps) == (None, 10)
    assert second.mean_signal == pytest.approx(1.5)
    assert third.mean_signal == pytest.approx((10 * 1.5 + 20 * 6) / 30)
    assert third.num_steps == 40
    assert third.mean_batch_size == pytest.approx((10 * 4 + 10 * 5 + 20 * 8) / 40)
    assert third.mean_total_batch_size == pytest.approx((10 * 8 + 10 * 9 + 20 * 24) / 40)
    # 16 over the totals 8; 16 and 2; 24.
    assert third.communications == pytest.approx(10 * 2 + 10 * (1 + 8) / 2 + 20 * 16 / 24)
    assert third.signal_bound is third.batch_bound is third.paper_communications is None


def test_constants_by_hand():
    events = [start(), line(1), line(2, signal=-3.0, noise=16.0), line(3, signal=0.5)]
    found = fit([*events, evaluation(0.5), evaluation(None)])
    # Sums of |G|^2: 10, -20, -15; the largest is the first's.
    assert (found.noise, found.gap, found.eta) == pytest.approx((32 / 3, 2.0, 0.5))
    assert found.smoothness == pytest.approx(10 / (2 * 1.25 * 2.0))
    assert fit([start(test="augmented"), *events[1:]]).eta == 1.0


@pytest.mark.parametrize(
    "events, message",
    [
        ([start(test="inner_product"), line(1)], "the theory is of the norm test"),
        ([start(), line(1, noise=0.0)], "mean gradient noise is 0"),
        ([start(), line(1, noise=None)], "mean gradient noise is None"),
        ([start(), line(1, signal=-1.0), line(2, signal=0.0)], "nowhere positive"),
        ([start(), line(1, signal=None), line(2, signal=None)], "nowhere positive"),
        ([start(), line(1, train_loss=None)], "no loss is below"),
        ([start(), line(1), evaluation(2.75)], "no loss is below"),
    ],
)
def test_a_ledger_that_does_not_determine_the_constants_is_refused(events, message):
    with pytest.raises(DataError, match=message):
        fit(events)


def test_no_value_is_nan_even_where_nothing_was_measured():
    events = [start(), line(1, signal=None, noise=None, train_loss=None), line(2, signal=-1e-300)]
    for point in measured(events, C):
        assert all(value is None or math.isfinite(value) for value in point)
