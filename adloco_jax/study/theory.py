"""Bounds of the paper's theory (docs/algorithm.md, 5), with constants fitted to a run.

They hold for SGD with step size 1 / (L (1 + eta^2)), if the loss F is L-smooth and every batch is
b_k = sigma^2 / (eta^2 |G_k|^2). Lemma 2 bounds the mean of |G_k|^2 from above; Theorem 1 follows by
Jensen's inequality for 1/x, and the bound on communications because 1 / b_k is proportional to
|G_k|^2. L is fitted so that Lemma 2 holds: a curve crosses a bound only if assumptions fail.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adloco_jax.errors import DataError
from adloco_jax.study import curves


class Constants(NamedTuple):
    """L, Delta0 = F(x0) - F*, sigma^2 and eta, all above 0; the bounds use only L times Delta0."""

    smoothness: float  # L, nats/token per squared distance of parameters
    gap: float  # Delta0 = F(x0) - F*, nats/token
    noise: float  # sigma^2, the trace of the covariance of single sequences' gradients
    eta: float  # threshold of the norm test


def signal_bound(constants: Constants, num_steps: np.ndarray, *shape: np.ndarray) -> np.ndarray:
    """Upper bound on the signal E|G|^2, averaged over the first N >= 1 steps of a worker.

    It is 2 L (S Mi + eta^2) Delta0 / (Mi N), with `shape` S steps between synchronisations and Mi
    workers, by default 1. The paper has this rate only up to a factor; 2 makes it Lemma 2 at 1.

    Source: AdLoCo, Lemma 2; Lemma 1 with several workers or steps.
    """
    steps_per_round, num_workers = shape or (1, 1)
    spread = steps_per_round * num_workers + constants.eta**2
    return 2 * constants.smoothness * spread * constants.gap / (num_workers * num_steps)


def batch_bound(constants: Constants, num_steps: np.ndarray, *shape: np.ndarray) -> np.ndarray:
    """Lower bound on the expected batch of a worker (sequences), averaged over its first N steps.

    It is sigma^2 / (Mi eta^2 `signal_bound`), which is linear in N.

    Source: AdLoCo, Theorem 1; Lemma 1 with several workers or steps.
    """
    _, num_workers = shape or (1, 1)
    signal = signal_bound(constants, num_steps, *shape)
    return constants.noise / (num_workers * constants.eta**2 * signal)


@np.errstate(all="ignore")  # constants of any size
def bounds(
    found: Mapping[str, np.ndarray], constants: Constants, max_batch_size: int
) -> dict[str, np.ndarray]:
    """The paper's bounds on the signal, the batch and the communications of a run, by round.

    Args:
      found: The result of `measured`.
      constants: L, Delta0, sigma^2 and eta.
      max_batch_size: Upper limit of sequences in a micro-batch.

    Returns:
      One value for each round:

      - `signal_bound`: upper bound on the mean signal (Lemma 2);
      - `batch_bound`: lower bound on a worker's batch, with the workers and steps of the round
        (Lemma 1);
      - `total_batch_bound`: lower bound on the batch of all workers of a trainer (Theorem 1);
      - `communications_bound`: upper bound, 2 max_batch eta^2 L (1 + eta^2) Delta0 / sigma^2.

    Source: docs/algorithm.md, 5. In place of Theorem 2 communications have the direct bound, which
    sums 1 / b_k = eta^2 |G_k|^2 / sigma^2 by Lemma 2.
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

    - eta is the config's, or nu for the augmented test, a norm test with nu in high dimension.
    - sigma^2 is the mean noise that the run's tests measured.
    - Delta0 is the first finite training loss (mean over trainers) minus the lowest of all losses.
    - L is the smallest for which Lemma 2 holds after every round: the largest sum of |G|^2 over
      the first N steps, divided by 2 (1 + eta^2) Delta0. Negative values count, or noise would look
      like signal; rounds without a measurement do not.

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
    """The signal, the growth of the batch and the communications of a run, after every round.

    Returns:
      Means over the trainers of each round, NaN where nothing was measured:

      - `num_steps`: updates of a worker until the end of the round, which is the theory's N;
      - `steps`: updates of a worker in the round, and `workers`: workers of a trainer in the round;
      - `signal` |G|^2, `batch` of a worker, `total_batch` of a trainer (sequences): means over all
        steps so far;
      - `communications`: the paper's count C(N) for a trainer.
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
    """For each round, the mean of a value over the trainers of the round."""
    return np.array([_mean(list(map(of, lines))) for lines in curves.by_round(events).values()])


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")
