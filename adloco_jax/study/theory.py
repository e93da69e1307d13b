"""Bounds of the paper's theory (docs/algorithm.md, 5), with constants fitted to a run.

F is the loss, x0 the initial parameters, F* the lowest loss, and Delta0 = F(x0) - F*. The bounds
hold for SGD with step size 1 / (L (1 + eta^2)), if F is L-smooth and every batch is exactly what
the norm test asks for: b_k = sigma^2 / (eta^2 |G_k|^2). Here G_k is the gradient of F at step k,
and sigma^2 is the noise, the trace of the covariance of single sequences' gradients.

Lemma 2 bounds the mean of |G_k|^2 from above. The other bounds follow from it: Theorem 1 by
Jensen's inequality for 1/x, and the direct bound on communications because 1 / b_k is a constant
times |G_k|^2. L and Delta0 occur in the bounds only as their product.

L is chosen so that Lemma 2 holds for the measured signal |G|^2. So a measured curve crosses its
bound only if the run departs from the theory's assumptions, see docs/algorithm.md, 5.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adloco_jax.errors import DataError
from adloco_jax.study import curves


class Constants(NamedTuple):
    """The constants of the bounds, all above 0. Only the product of L and Delta0 matters."""

    smoothness: float  # L, nats/token per squared distance of parameters
    gap: float  # Delta0 = F(x0) - F*, nats/token
    noise: float  # sigma^2, the trace of the covariance of single sequences' gradients
    eta: float  # threshold of the norm test


def signal_bound(constants: Constants, num_steps: np.ndarray, *shape: np.ndarray) -> np.ndarray:
    """Upper bound on the signal E|G|^2, averaged over the first N steps of a worker.

    Args:
      constants: L, Delta0, sigma^2 and eta.
      num_steps: N >= 1.
      *shape: Nothing, or two values: S, the number of local steps between synchronisations, and Mi,
        the number of the trainer's workers. Without them both are 1.

    Returns:
      2 L (S Mi + eta^2) Delta0 / (Mi N). For several workers or steps the paper states this rate
      only up to a constant factor. The factor 2 makes the bound equal to Lemma 2 if S = Mi = 1.

    Source: AdLoCo, Lemma 2; Lemma 1 with several workers or steps.
    """
    steps_per_round, num_workers = shape or (1, 1)
    spread = steps_per_round * num_workers + constants.eta**2
    return 2 * constants.smoothness * spread * constants.gap / (num_workers * num_steps)


def batch_bound(constants: Constants, num_steps: np.ndarray, *shape: np.ndarray) -> np.ndarray:
    """Lower bound on the expected batch of a worker, averaged over its first N steps.

    Args:
      constants: L, Delta0, sigma^2 and eta.
      num_steps: N >= 1.
      *shape: Nothing, or two values: S, the number of local steps between synchronisations, and Mi,
        the number of the trainer's workers. Without them both are 1.

    Returns:
      sigma^2 / (Mi eta^2 `signal_bound`), in sequences. It is linear in N.

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
      max_batch_size: Largest number of sequences in a micro-batch.

    Returns:
      One value for each round:

      - `signal_bound`: upper bound on the mean signal (Lemma 2);
      - `batch_bound`: lower bound on the batch of a worker, with the number of workers and steps of
        the round (Lemma 1);
      - `total_batch_bound`: lower bound on the batch of all workers of a trainer (Theorem 1);
      - `communications_bound`: upper bound on the number of communications,
        2 max_batch eta^2 L (1 + eta^2) Delta0 / sigma^2, which is the same for all rounds.

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

    - eta: from the config. For the augmented inner-product test it is nu, because in high dimension
      this test reduces to a norm test with nu.
    - sigma^2: the mean of the noise that the run's tests measured.
    - Delta0: the first finite training loss minus the lowest loss. Training losses are averaged
      over the trainers of a round. The lowest loss is the least of these means and of the losses of
      all evaluations.
    - L: the smallest value for which Lemma 2 holds after every round. It is the largest sum of the
      measured |G|^2 over the first N steps, divided by 2 (1 + eta^2) Delta0. The value that was
      measured in a round is used for all steps of the round. Negative values are included, because
      without them the noise of the measurements would look like signal. Rounds without a
      measurement are left out of the mean.

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
    """The signal, the growth of the batch and the communications of a run, after every round.

    Args:
      events: The lines of the run's ledger.

    Returns:
      Arrays with one value for each round, in order:

      - `num_steps`: updates of a worker until the end of the round, which is the theory's N;
      - `steps`: updates of a worker in the round, and `workers`: workers of a trainer in the round;
      - `signal`: the measured |G|^2, `batch`: the requested batch of a worker, and `total_batch`:
        that of all workers of a trainer. These are means over all steps so far; batches are in
        sequences;
      - `communications`: the paper's count C(N) for a trainer.

      The values of a round are means over its trainers. They are NaN where nothing was measured.
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
    """Mean of the values that are not None; NaN if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")
