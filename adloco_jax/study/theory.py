"""Bounds of the paper's theory (docs/algorithm.md, 5), with constants fitted to a run.

The bounds are those of SGD on an L-smooth F with the exact norm test and step size
1 / (L (1 + eta^2)). With the test exact, b_k = sigma^2 / (eta^2 |G_k|^2), all of them follow from
Lemma 2: Theorem 1 by Jensen's inequality for 1/x, and the direct bound on communications since
1 / b_k is |G_k|^2 times a constant. L and Delta0 enter as their product only.

L is fitted such that Lemma 2 holds on the measured signal. A measured curve can therefore cross its
bound only where the run departs from the theory's assumptions, which docs/algorithm.md, 5 lists.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.special import digamma

from adloco_jax.errors import DataError
from adloco_jax.study import curves


class Constants(NamedTuple):
    """Constants of the bounds, all above 0; L and Delta0 enter as their product only."""

    smoothness: float  # L, nats/token per squared distance of parameters
    gap: float  # Delta0 = F(x0) - F*, nats/token
    noise: float  # sigma^2, the trace of the covariance of single sequences' gradients
    eta: float  # of the norm test


class Point(NamedTuple):
    """A run after one of its rounds, with the bounds there.

    Means are over the steps so far, and within a round over its trainers. None: not measured, or no
    constants.
    """

    round: int
    num_steps: float  # updates of a worker so far: the theory's N
    mean_signal: float | None  # of |G|^2
    mean_batch_size: float  # requested, sequences per worker
    mean_total_batch_size: float  # requested, sequences of all workers of a trainer
    communications: float  # the paper's C(N), of a trainer
    signal_bound: float | None = None  # Lemma 2, upper
    local_batch_bound: float | None = None  # Lemma 1 with this round's workers and steps, lower
    batch_bound: float | None = None  # Theorem 1, lower; of the total batch, which is tested
    communications_bound: float | None = None  # direct, upper
    paper_communications: float | None = None  # the paper's, logarithmic in N, no bound


def signal_bound(
    num_steps: float, constants: Constants, *, steps_per_round: float = 1, num_workers: float = 1
) -> float:
    """Upper bound on the mean of E|G|^2 over the first N steps of a worker.

    Args:
      num_steps: N >= 1.
      constants: L, Delta0, sigma^2 and eta.
      steps_per_round: S, local steps between synchronisations.
      num_workers: Mi, workers of the trainer.

    Returns:
      2 L (S Mi + eta^2) Delta0 / (Mi N). With several workers or steps the rate is known up to a
      constant; this 2 makes it Lemma 2's for S = Mi = 1.

    Source: AdLoCo, Lemma 2; Lemma 1 with several workers or steps.
    """
    spread = steps_per_round * num_workers + constants.eta**2
    return 2 * constants.smoothness * spread * constants.gap / (num_workers * num_steps)


def batch_bound(
    num_steps: float, constants: Constants, *, steps_per_round: float = 1, num_workers: float = 1
) -> float:
    """Lower bound on the expected batch per worker, mean over the first N steps.

    Args:
      num_steps: N >= 1.
      constants: L, Delta0, sigma^2 and eta.
      steps_per_round: S, local steps between synchronisations.
      num_workers: Mi, workers of the trainer.

    Returns:
      sigma^2 / (Mi eta^2 `signal_bound`), in sequences: linear in N.

    Source: AdLoCo, Theorem 1; Lemma 1 with several workers or steps.
    """
    signal = signal_bound(
        num_steps, constants, steps_per_round=steps_per_round, num_workers=num_workers
    )
    return constants.noise / (num_workers * constants.eta**2 * signal)


def communications_bound(constants: Constants, *, max_batch_size: int) -> float:
    """Upper bound on the paper's C(N), the sum of max_batch / b_k, for every N.

    Args:
      constants: L, Delta0, sigma^2 and eta.
      max_batch_size: Sequences that a device holds.

    Returns:
      2 max_batch eta^2 L (1 + eta^2) Delta0 / sigma^2.

    Source: docs/algorithm.md, 5, Theorem 2's direct bound: 1 / b_k = eta^2 |G_k|^2 / sigma^2,
    summed by Lemma 2.
    """
    return max_batch_size / batch_bound(1, constants)


def paper_communications(num_steps: int, constants: Constants, *, max_batch_size: int) -> float:
    """C(N) as the paper estimates it: Theorem 1's batch inserted into max_batch / b_k.

    Args:
      num_steps: N >= 1.
      constants: L, Delta0, sigma^2 and eta.
      max_batch_size: Sequences that a device holds.

    Returns:
      The direct bound times the N-th harmonic number. No bound: E[1/b] >= 1/E[b].

    Source: AdLoCo, Theorem 2.
    """
    harmonic = float(digamma(num_steps + 1) + np.euler_gamma)
    return communications_bound(constants, max_batch_size=max_batch_size) * harmonic


def fit(events: Sequence[dict]) -> Constants:
    """Fit the bounds' constants to a run.

    - eta: the config's; of an augmented inner-product test nu, to which that test reduces in high
      dimension.
    - sigma^2: the mean of the measured noise, over all tests.
    - Delta0: from the first finite training loss, averaged over the trainers of its round, to the
      lowest loss of all evaluations and of all training losses, averaged in the same way.
    - L: the smallest for which Lemma 2 holds after every round: the largest sum of measured |G|^2
      over the first N steps, divided by 2 (1 + eta^2) Delta0. A round's measured value stands for
      all its steps. Negative measured values are included, or noise would add up to signal; rounds
      without a measurement are left out of the mean.

    Args:
      events: A ledger's lines.

    Returns:
      The constants, all finite and above 0.

    Raises:
      DataError: If the ledger does not determine one of them; the message says which and why.
    """
    batching = curves.last(events, "start")["config"]["batching"]
    test, rounds = batching["test"], curves.by_round(events).values()
    noise = _mean([line["noise"] for lines in rounds for line in lines])
    means = [_mean([line["train_loss"] for line in lines]) for lines in rounds]
    losses = [loss for loss in means if loss is not None]
    evaluated = [e["loss"] for e in curves.lines(events, "eval") if e["loss"] is not None]
    sums = [p.mean_signal * p.num_steps for p in measured(events) if p.mean_signal is not None]
    if test not in ("norm", "augmented"):
        raise DataError(
            f"batching.test={test!r}: the theory is of the norm test; expected norm or augmented"
        )
    if noise is None or noise <= 0:
        raise DataError(f"the mean gradient noise is {noise}: expected a positive one")
    if not losses or (gap := losses[0] - min(losses + evaluated)) <= 0:
        raise DataError("no loss is below the first finite training loss: Delta0 is not known")
    if max(sums, default=0.0) <= 0:
        raise DataError(
            "the measured |G|^2 is nowhere positive in the mean: the test's few sequences show no"
            " gradient above their noise, so L cannot be fitted; raise batching.test_batch_size"
        )
    eta = batching["eta" if test == "norm" else "nu"]
    return Constants(max(sums) / (2 * (1 + eta**2) * gap), gap, noise, eta)


def measured(events: Sequence[dict], constants: Constants | None = None) -> list[Point]:
    """A run's growth and communications beside the bounds, after every round.

    Args:
      events: A ledger's lines.
      constants: From `fit`, of this run or another; None leaves the bounds out.

    Returns:
      A point per round, in order. No value is NaN or infinite.
    """
    points, sums, signals = [], [0.0] * 4, [0.0, 0.0]
    size = {"max_batch_size": curves.last(events, "start")["max_batch_size"]}
    for index, lines in curves.by_round(events).items():
        batches = [line["requested_batch_size"] for line in lines]
        totals = [line["requested_batch_size"] * line["workers"] for line in lines]
        updates, workers = [line["updates"] for line in lines], [line["workers"] for line in lines]
        communications = [size["max_batch_size"] / total for total in totals]
        steps, signal = fmean(updates), _mean([line["signal"] for line in lines])
        means = [1.0, *map(fmean, (batches, totals, communications))]
        sums = [total + steps * mean for total, mean in zip(sums, means, strict=True)]
        if signal is not None:
            signals = [signals[0] + steps * signal, signals[1] + steps]
        num_steps, shape = sums[0], {"steps_per_round": steps, "num_workers": fmean(workers)}
        bounds = {}
        if constants is not None:
            bounds = {
                "signal_bound": signal_bound(num_steps, constants),
                "local_batch_bound": batch_bound(num_steps, constants, **shape),
                "batch_bound": batch_bound(num_steps, constants),
                "communications_bound": communications_bound(constants, **size),
                "paper_communications": paper_communications(round(num_steps), constants, **size),
            }
        points.append(
            Point(
                round=index,
                num_steps=num_steps,
                mean_signal=signals[0] / signals[1] if signals[1] else None,
                mean_batch_size=sums[1] / num_steps,
                mean_total_batch_size=sums[2] / num_steps,
                communications=sums[3],
                **bounds,
            )
        )
    return points


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
