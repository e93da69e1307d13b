"""Bounds of the paper's theory (docs/algorithm.md, 5), with constants fitted to a run.

The bounds hold for SGD on an L-smooth F with the exact norm test and step size 1 / (L (1 + eta^2)).
The exact test gives b_k = sigma^2 / (eta^2 |G_k|^2). All bounds then follow from Lemma 2: Theorem 1
by Jensen's inequality for 1/x, and the direct bound on communications because 1 / b_k is |G_k|^2
times a constant. The bounds depend on L and Delta0 only by their product.

L is fitted such that Lemma 2 holds on the measured signal. So a measured curve crosses its bound
only if the run departs from the theory's assumptions, see docs/algorithm.md, 5.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adloco_jax.errors import DataError
from adloco_jax.study import curves


class Constants(NamedTuple):
    """Constants of the bounds, all above 0; only the product of L and Delta0 matters."""

    smoothness: float  # L, nats/token per squared distance of parameters
    gap: float  # Delta0 = F(x0) - F*, nats/token
    noise: float  # sigma^2, the trace of the covariance of single sequences' gradients
    eta: float  # threshold of the norm test


def signal_bound(constants: Constants, num_steps: np.ndarray, *shape: np.ndarray) -> np.ndarray:
    """Upper bound on the mean of E|G|^2 over the first N steps of a worker.

    Args:
      constants: L, Delta0, sigma^2 and eta.
      num_steps: N >= 1.
      *shape: Two numbers: S, local steps between synchronisations, and Mi, workers of the trainer.
        Both are 1 by default.

    Returns:
      2 L (S Mi + eta^2) Delta0 / (Mi N). With several workers or steps the rate is known only up to
      a constant; the factor 2 makes the bound equal to Lemma 2 for S = Mi = 1.

    Source: AdLoCo, Lemma 2; Lemma 1 with several workers or steps.
    """
    steps_per_round, num_workers = shape or (1, 1)
    spread = steps_per_round * num_workers + constants.eta**2
    return 2 * constants.smoothness * spread * constants.gap / (num_workers * num_steps)


def batch_bound(constants: Constants, num_steps: np.ndarray, *shape: np.ndarray) -> np.ndarray:
    """Lower bound on the expected batch per worker, mean over the first N steps.

    Args:
      constants: L, Delta0, sigma^2 and eta.
      num_steps: N >= 1.
      *shape: As in `signal_bound`.

    Returns:
      sigma^2 / (Mi eta^2 `signal_bound`), in sequences: linear in N.

    Source: AdLoCo, Theorem 1; Lemma 1 with several workers or steps.
    """
    _, num_workers = shape or (1, 1)
    signal = signal_bound(constants, num_steps, *shape)
    return constants.noise / (num_workers * constants.eta**2 * signal)


@np.errstate(all="ignore")  # constants of any size
def bounds(
    found: Mapping[str, np.ndarray], constants: Constants, max_batch_size: int
) -> dict[str, np.ndarray]:
    """What the paper's theory bounds for a run, after each round.

    Args:
      found: The result of `measured`.
      constants: L, Delta0, sigma^2 and eta.
      max_batch_size: Largest number of sequences in a micro-batch.

    Returns:
      `signal_bound` is an upper bound (Lemma 2). `batch_bound`, with the workers and steps of each
      round, and `total_batch_bound` are lower bounds (Lemma 1, Theorem 1). `communications_bound`
      is an upper bound and the same for every N: 2 max_batch eta^2 L (1 + eta^2) Delta0 / sigma^2.

    Source: docs/algorithm.md, 5. Instead of Theorem 2 the direct bound is used: the sum of
    1 / b_k = eta^2 |G_k|^2 / sigma^2 by Lemma 2.
    """
    num_steps = found["num_steps"]
    return {
        "signal_bound": signal_bound(constants, num_steps),
        "batch_bound": batch_bound(constants, num_steps, found["steps"], found["workers"]),
        "total_batch_bound": batch_bound(constants, num_steps),
        "communications_bound": max_batch_size / batch_bound(constants, np.ones(len(num_steps))),
    }


@np.errstate(all="ignore")  # values of any size
def fit_constants(events: Sequence[dict]) -> Constants:
    """Fit the bounds' constants to a run.

    - eta: from the config. For the augmented inner-product test it is nu, because this test reduces
      to a norm test with nu in high dimension.
    - sigma^2: the mean of the measured noise, over all tests.
    - Delta0: from the first finite training loss, averaged over the trainers of its round, to the
      lowest loss of all evaluations and of all training losses, averaged in the same way.
    - L: the smallest for which Lemma 2 holds after every round: the largest sum of measured |G|^2
      over the first N steps, divided by 2 (1 + eta^2) Delta0. A round's measured value is
      used for all its steps. Negative values are included, because without them the noise of the
      measurements would look like signal. Rounds without a measurement are left out of the mean.

    Args:
      events: The lines of the run's ledger.

    Returns:
      The constants, all finite and above 0.

    Raises:
      DataError: If the ledger does not determine a constant. The message says which one and why.
    """
    batching = curves.last(events, "start")["config"]["batching"]
    test, found = batching["test"], measured(events)
    noise = _mean([line["noise"] for line in curves.lines(events, "round")])
    losses = _by_round(events, lambda line: line["train_loss"])
    losses = losses[np.isfinite(losses)]
    evaluated = [e["loss"] for e in curves.lines(events, "eval") if e["loss"] is not None]
    sums = found["signal"] * found["num_steps"]
    if test not in ("norm", "augmented"):
        raise DataError(
            f"batching.test={test!r}: the theory is of the norm test; expected norm or augmented"
        )
    if not noise > 0:
        raise DataError(f"the mean gradient noise is {noise}: expected a positive one")
    if not losses.size or (gap := losses[0] - min([*losses, *evaluated])) <= 0:
        raise DataError("no loss is below the first finite training loss: Delta0 is not known")
    if not (largest := np.nanmax([0.0, *sums])) > 0:
        raise DataError(
            "the measured |G|^2 is nowhere positive in the mean: the test's few sequences show no"
            " gradient above their noise, so L cannot be fitted; raise batching.test_batch_size"
        )
    eta = batching["eta" if test == "norm" else "nu"]
    return Constants(float(largest / (2 * (1 + eta**2) * gap)), float(gap), noise, eta)


@np.errstate(all="ignore")  # values of any size; the first means have no values
def measured(events: Sequence[dict]) -> dict[str, np.ndarray]:
    """The signal, growth and communications of a run, after every round.

    Means are over the steps so far, and within a round over its trainers. NaN: not measured.

    Args:
      events: The lines of the run's ledger.

    Returns:
      A value per round, in order, of `num_steps` (updates of a worker so far, the theory's N),
      `steps` and `workers` of the round, `signal` (|G|^2), `batch` and `total_batch` (requested, in
      sequences of a worker and of all workers of a trainer), and `communications` (the paper's
      C(N), of a trainer).
    """
    size = curves.last(events, "start")["max_batch_size"]

    def total(line: dict) -> int:
        return line["requested_batch_size"] * line["workers"]

    steps = _by_round(events, lambda line: line["updates"])

    def sum_so_far(of: Callable[[dict], float | None]) -> np.ndarray:
        return np.nancumsum(steps * _by_round(events, of))

    def mean_so_far(of: Callable[[dict], float | None]) -> np.ndarray:
        return sum_so_far(of) / np.cumsum(steps * np.isfinite(_by_round(events, of)))

    return {
        "num_steps": np.cumsum(steps),
        "steps": steps,
        "workers": _by_round(events, lambda line: line["workers"]),
        "signal": mean_so_far(lambda line: line["signal"]),
        "batch": mean_so_far(lambda line: line["requested_batch_size"]),
        "total_batch": mean_so_far(total),
        "communications": sum_so_far(lambda line: size / total(line)),
    }


def _by_round(events: Sequence[dict], of: Callable[[dict], float | None]) -> np.ndarray:
    """The mean of a value over the trainers of a round, for each round."""
    return np.array([_mean(list(map(of, lines))) for lines in curves.by_round(events).values()])


def _mean(values: Sequence[float | None]) -> float:
    """Mean of the values that are not None; NaN if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")
