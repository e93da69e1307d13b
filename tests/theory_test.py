"""The algebra of the bounds, a quadratic on which they are tight, and incomplete ledgers."""

import math

import numpy as np
import pytest
from ledgers import round_line, start_line

from adloco_jax.errors import DataError
from adloco_jax.study.theory import (
    Constants,
    batch_bound,
    bounds,
    fit_constants,
    measured,
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
    assert signal_bound(C, 10) == pytest.approx(1.5)
    assert batch_bound(C, 10) == pytest.approx(50 * 10 / (0.25 * 15))
    # 2 x 3 x (5 x 4 + 0.25) x 2 / (4 x 10)
    assert signal_bound(C, 10, 5, 4) == pytest.approx(6.075)
    assert batch_bound(C, 10, 5, 4) == pytest.approx(50 / (4 * 0.25 * 6.075))
    # L and Delta0 enter as their product.
    other = C._replace(smoothness=7 * C.smoothness, gap=C.gap / 7)
    assert signal_bound(other, 10) == pytest.approx(1.5)
    found = {"num_steps": np.array([10]), "steps": np.array([5]), "workers": np.array([4])}
    of_run = bounds(found, C, 8)
    assert of_run["communications_bound"] == pytest.approx(8 * 0.25 * 15 / 50)
    assert of_run["total_batch_bound"] == pytest.approx(batch_bound(C, 10))
    assert of_run["batch_bound"] == pytest.approx(batch_bound(C, 10, 5, 4))


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
    found = fit_constants([*events, evaluation(0.0)])
    assert found.noise == pytest.approx(QUADRATIC.noise)
    assert found.eta == QUADRATIC.eta
    assert found.gap == pytest.approx(QUADRATIC.gap)
    assert found.smoothness == pytest.approx(QUADRATIC.smoothness, rel=0.05)
    run = measured(events)
    assert run["num_steps"].tolist() == list(range(1, 26))
    for constants in (found, QUADRATIC._replace(gap=4.3)):
        limit = bounds(run, constants, 16)
        assert np.all(run["signal"] <= limit["signal_bound"] * (1 + 1e-9))
        assert np.all(run["total_batch"] >= limit["total_batch_bound"])
        assert np.all(run["batch"] >= limit["batch_bound"])
        assert np.all(run["communications"] <= limit["communications_bound"])
    # Both bounds are nearly met: the first at the end, the second up to rounding.
    assert run["signal"][-1] > 0.85 * limit["signal_bound"][-1]
    assert run["communications"][-1] > 0.8 * limit["communications_bound"][-1]


def test_measured_means_by_hand():
    events = [
        start(),
        line(1, signal=None),
        line(2, trainer=0, signal=-1.0, requested_batch_size=8),
        line(2, trainer=1, signal=4.0, workers=1, requested_batch_size=2),
        line(3, trainer=1, workers=3, updates=20, signal=6.0, requested_batch_size=8),
    ]
    run = measured(events)
    assert run["signal"] == near([math.nan, 1.5, (10 * 1.5 + 20 * 6) / 30])
    assert run["num_steps"].tolist() == [10, 20, 40]
    assert run["batch"][2] == pytest.approx((10 * 4 + 10 * 5 + 20 * 8) / 40)
    assert run["total_batch"][2] == pytest.approx((10 * 8 + 10 * 9 + 20 * 24) / 40)
    # 16 over the totals 8; 16 and 2; 24.
    assert run["communications"][2] == pytest.approx(10 * 2 + 10 * (1 + 8) / 2 + 20 * 16 / 24)


def near(values):
    return pytest.approx(np.array(values), nan_ok=True)


def test_constants_by_hand():
    events = [start(), line(1), line(2, signal=-3.0, noise=16.0), line(3, signal=0.5)]
    found = fit_constants([*events, evaluation(0.5), evaluation(None)])
    # Sums of |G|^2: 10, -20, -15; the largest is the first's.
    assert (found.noise, found.gap, found.eta) == pytest.approx((32 / 3, 2.0, 0.5))
    assert found.smoothness == pytest.approx(10 / (2 * 1.25 * 2.0))
    assert fit_constants([start(test="augmented"), *events[1:]]).eta == 1.0


@pytest.mark.parametrize(
    "events, message",
    [
        ([start(test="inner_product"), line(1)], "the theory is of the norm test"),
        ([start(), line(1, noise=0.0)], "mean gradient noise is 0"),
        ([start(), line(1, noise=None)], "mean gradient noise is nan"),
        ([start(), line(1, signal=-1.0), line(2, signal=0.0)], "nowhere positive"),
        ([start(), line(1, signal=None), line(2, signal=None)], "nowhere positive"),
        ([start(), line(1, train_loss=None)], "no loss is below"),
        ([start(), line(1), evaluation(2.75)], "no loss is below"),
    ],
)
def test_a_ledger_that_does_not_determine_the_constants_is_refused(events, message):
    with pytest.raises(DataError, match=message):
        fit_constants(events)
