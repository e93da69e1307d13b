"""What the paper's theory says of a run (docs/algorithm.md, 5): bounds, and constants fitted on it.

The bounds are those of SGD on an L-smooth F with the exact norm test and step size
1 / (L (1 + eta^2)). With the test exact, b_k = sigma^2 / (eta^2 |G_k|^2), all of them follow from
Lemma 2: Theorem 1 by Jensen's inequality for 1/x, and the direct bound on communications since
1 / b_k is |G_k|^2 times a constant. L and Delta0 enter as their product only.

So with L fitted such that Lemma 2 holds on the measured signal, a measured curve can cross its
bound only where the run left the theory: `ASSUMPTIONS` says how it may.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.study.curves import SPENDING

ASSUMPTIONS: tuple[str, ...] = (
    "The inner optimizer is plain SGD at the constant step size 1/(L(1 + eta^2)); AdamW, its weight"
    " decay, warm-up, schedules and gradient clipping are not covered.",
    "The outer optimizer is an average (SGD at rate 1); Nesterov momentum is not covered.",
    "Every update passes the exact norm test at the true gradient. A run tests once a round, on"
    " estimates from a few sequences, and smooths them; its batch then lags behind the signal.",
    "Batches are real numbers without a limit. A run rounds up, caps them (batch_cap, max_growth),"
    " never lets them shrink where they are monotone, and clips them in switch mode.",
    "The gradient noise sigma^2 is the same everywhere. Here it is the mean over a run in which it"
    " usually falls.",
    "F is L-smooth with one L along the whole path; the fitted L is the smallest that explains this"
    " run's measured signal, not a property of the network.",
    "Delta0 is measured from the first round's training loss to the lowest loss that was seen; the"
    " infimum of F is lower, and F(x0) higher. Every bound has L and Delta0 as their product, in"
    " which the fit makes up for it.",
    "The theory is of one trainer. With several, what is drawn is their mean; what merging does to"
    " parameters, momentum and batches is not covered.",
    "The local-SGD rate of Lemma 1 is known up to a constant, which is set so that one worker and"
    " one step per round give Lemma 2.",
    "Sequences are drawn independently; a run goes through a permutation of its data, and again.",
    "The paper's C(N) counts max_batch/b_k per update. It is not the number of synchronisations,"
    " of which a run has one per round and trainer with several workers.",
    "The paper's logarithmic bound on C(N) puts the lower bound on E b_k into 1/b_k; Jensen's"
    " inequality runs the other way there, so it is drawn for comparison and is no bound.",
)


@dataclass(frozen=True)
class Constants:
    """What the bounds are made of; every one of them uses L and Delta0 as their product only."""

    smoothness: float  # L, nats/token per squared distance of parameters
    gap: float  # Delta0 = F(x0) - F*, nats/token
    noise: float  # sigma^2, the trace of the covariance of single sequences' gradients
    eta: float  # of the norm test

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{field.name}={value}: expected a number above 0")


class Reach(NamedTuple):
    """What it takes until E|G|^2 <= epsilon."""

    num_steps: float
    num_communications: float
    batch_size: float  # sequences, at the end


class Point(NamedTuple):
    """A run after one of its rounds, with the bounds there.

    Means are over the steps so far, and before that over the trainers of a round. None: not
    measured, or no constants.
    """

    round: int
    num_steps: float  # updates of a worker so far: the theory's N
    mean_signal: float | None  # of |G|^2
    signal_bound: float | None  # Lemma 2, upper
    mean_batch_size: float  # requested, sequences per worker
    local_batch_bound: float | None  # Lemma 1 with this round's workers and steps, lower
    mean_total_batch_size: float  # requested, sequences of all workers of a trainer
    batch_bound: float | None  # Theorem 1, lower; of the total, which is what the test is on
    communications: float  # the paper's C(N), of a trainer
    communications_bound: float | None  # the direct bound, upper
    paper_communications: float | None  # the paper's, logarithmic in N, no bound
    syncs: int  # blocking communications so far, summed over trainers


_BOUNDS = (
    "signal_bound",
    "local_batch_bound",
    "batch_bound",
    "communications_bound",
    "paper_communications",
)


def signal_bound(num_steps: float, constants: Constants) -> float:
    """Upper bound on the mean of E|G|^2 over the first N steps.

    Args:
      num_steps: N >= 1.
      constants: Of the run.

    Returns:
      2 L (1 + eta^2) Delta0 / N.

    Source: AdLoCo, Lemma 2.
    """
    return local_signal_bound(num_steps, constants, steps_per_round=1, num_workers=1)


def local_signal_bound(
    num_steps: float, constants: Constants, *, steps_per_round: float, num_workers: float
) -> float:
    """The rate of local SGD that Lemma 1 takes over.

    Args:
      num_steps: N >= 1, local steps of a worker.
      constants: Of the run.
      steps_per_round: S, local steps between synchronisations.
      num_workers: Mi, workers of the trainer.

    Returns:
      2 L (S Mi + eta^2) Delta0 / (Mi N). The rate is known up to a constant; this 2 makes it
      Lemma 2's for S = Mi = 1.

    Source: AdLoCo, Lemma 1.
    """
    spread = steps_per_round * num_workers + constants.eta**2
    return 2 * constants.smoothness * spread * constants.gap / (num_workers * num_steps)


def local_batch_bound(
    num_steps: float, constants: Constants, *, steps_per_round: float, num_workers: float
) -> float:
    """Lower bound on the mean batch per worker over the first N local steps.

    Args:
      num_steps: As in `local_signal_bound`, like the others.
      constants: Of the run.
      steps_per_round: S.
      num_workers: Mi.

    Returns:
      sigma^2 / (Mi eta^2 E|G|^2) at that rate, in sequences.

    Source: AdLoCo, Lemma 1.
    """
    signal = local_signal_bound(
        num_steps, constants, steps_per_round=steps_per_round, num_workers=num_workers
    )
    return constants.noise / (num_workers * constants.eta**2 * signal)


def batch_bound(num_steps: float, constants: Constants) -> float:
    """Lower bound on the expected batch at a uniformly drawn one of the first N steps.

    Args:
      num_steps: N >= 1.
      constants: Of the run.

    Returns:
      sigma^2 N / (2 eta^2 L (1 + eta^2) Delta0), in sequences: linear in N.

    Source: AdLoCo, Theorem 1.
    """
    return constants.noise / (constants.eta**2 * signal_bound(num_steps, constants))


def communications_bound(constants: Constants, *, max_batch_size: int) -> float:
    """Upper bound on the paper's C(N), the sum of max_batch / b_k, whatever N.

    Args:
      constants: Of the run.
      max_batch_size: Sequences that a device holds.

    Returns:
      2 max_batch eta^2 L (1 + eta^2) Delta0 / sigma^2.

    Source: docs/algorithm.md, 5, Theorem 2's direct bound: 1 / b_k = eta^2 |G_k|^2 / sigma^2,
    summed by Lemma 2.
    """
    return max_batch_size / batch_bound(1, constants)


def paper_communications(num_steps: int, constants: Constants, *, max_batch_size: int) -> float:
    """C(N) as the paper estimates it: Theorem 1's batch put into max_batch / b_k.

    Args:
      num_steps: N >= 1.
      constants: Of the run.
      max_batch_size: Sequences that a device holds.

    Returns:
      The direct bound times the N-th harmonic number. No bound: E[1/b] >= 1/E[b].

    Source: AdLoCo, Theorem 2.
    """
    return communications_bound(constants, max_batch_size=max_batch_size) * _harmonic(num_steps)


def reach(epsilon: float, constants: Constants, *, steps_per_round: int) -> Reach:
    """Steps, communications and final batch until E|G|^2 <= epsilon.

    Args:
      epsilon: The squared gradient norm aimed at.
      constants: Of the run.
      steps_per_round: S, steps between synchronisations.

    Returns:
      K = 2 L (1 + eta^2) Delta0 / epsilon steps, K / S communications, and the batch
      sigma^2 / (eta^2 epsilon), not rounded.

    Raises:
      ConfigError: If epsilon is not above 0.

    Source: docs/algorithm.md, 5, the corollary of Theorem 2.
    """
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon={epsilon}: expected a number above 0")
    num_steps = signal_bound(1, constants) / epsilon
    return Reach(
        num_steps, num_steps / steps_per_round, constants.noise / (constants.eta**2 * epsilon)
    )


def fit(events: Iterable[dict]) -> Constants:
    """The constants of a run.

    - eta: the config's; of an augmented inner-product test nu, which is what it comes to in high
      dimension.
    - sigma^2: the mean of the measured noise, over all tests.
    - Delta0: from the first finite training loss, averaged over the trainers of its round, to the
      lowest loss of all evaluations and (averaged in the same way) training losses.
    - L: the smallest for which Lemma 2 holds after every round: the largest sum of measured |G|^2
      over the first N steps, by 2 (1 + eta^2) Delta0. A round's measured value stands for all its
      steps. Measured values below zero count as such, or noise would add up to signal; rounds that
      measured none are left out of the mean.

    Args:
      events: A ledger's lines.

    Returns:
      The constants, all finite and above 0.

    Raises:
      DataError: If the ledger does not determine one of them; the message says which and why.
    """
    run = _read(events)
    test, eta = run.batching["test"], _eta(run)
    noises = [line["noise"] for lines in run.rounds.values() for line in lines]
    noises = [noise for noise in noises if noise is not None]
    if not noises:
        raise DataError(
            f"batching.test={test!r} measured no gradient noise in this run; the theory's constants"
            " need one with a norm test"
        )
    if eta is None:
        raise DataError(
            f"batching.test={test!r}: the theory is of the norm test; expected norm or augmented"
        )
    noise = sum(noises) / len(noises)
    if noise <= 0:
        raise DataError(f"the mean gradient noise is {noise:.3g}: expected some to average out")
    gap = _gap(run)
    sums = [
        point.mean_signal * point.num_steps
        for point in _points(run, None)
        if point.mean_signal is not None
    ]
    if max(sums, default=0.0) <= 0:
        raise DataError(
            "the measured |G|^2 is nowhere positive in the mean: the test's few sequences show no"
            " gradient above their noise, so L cannot be fitted; raise batching.test_batch_size"
        )
    return Constants(max(sums) / (2 * (1 + eta**2) * gap), gap, noise, eta)


def measured(events: Iterable[dict], constants: Constants | None = None) -> list[Point]:
    """A run's growth and communications beside the bounds, on one grid.

    Args:
      events: A ledger's lines.
      constants: From `fit`, of this run or another; None leaves the bounds out.

    Returns:
      A point per round, in order. No value is NaN or infinite.

    Raises:
      DataError: If the ledger lacks a start or a round.
    """
    return _points(_read(events), constants)


class _Run(NamedTuple):
    """What of a ledger the theory needs."""

    batching: dict
    max_batch_sizes: dict[int, int]  # by round
    rounds: dict[int, list[dict]]  # lines by round, in order
    syncs: Counter[int]  # by round, of all trainers
    losses: list[float]  # of evaluations


def _read(events: Iterable[dict]) -> _Run:
    start, max_batch_sizes, rounds, losses = None, {}, defaultdict(list), []
    syncs: Counter[int] = Counter()
    for event in events:
        if event["event"] in SPENDING:
            syncs[event["round"]] += event["syncs"]
        if event["event"] == "start":
            start = event
        elif event["event"] == "round" and start is not None:
            rounds[event["round"]].append(event)
            max_batch_sizes[event["round"]] = start["max_batch_size"]
        elif event["event"] == "eval" and event["loss"] is not None:
            losses.append(event["loss"])
    if start is None or not rounds:
        raise DataError(
            "the ledger has no start, or no round after it, so there is nothing to hold against"
            " the theory; let the run reach the end of round 1"
        )
    batching = start["config"]["batching"]
    return _Run(batching, max_batch_sizes, dict(sorted(rounds.items())), syncs, losses)


def _eta(run: _Run) -> float | None:
    return {"norm": run.batching["eta"], "augmented": run.batching["nu"]}.get(run.batching["test"])


def _gap(run: _Run) -> float:
    """Delta0, see `fit`."""
    by_round = (_mean([line["train_loss"] for line in lines]) for lines in run.rounds.values())
    losses = [loss for loss in by_round if loss is not None]
    if not losses:
        raise DataError("no round has a finite training loss, so Delta0 is not known")
    gap = losses[0] - min(losses + run.losses)
    if gap <= 0:
        raise DataError(
            f"no loss is below the first round's {losses[0]:.4g} nats/token, so Delta0 is not known"
        )
    return gap


def _points(run: _Run, constants: Constants | None) -> list[Point]:
    points = []
    num_steps = measured_steps = signal_sum = batch_sum = total_sum = communications = 0.0
    syncs = 0
    for index, lines in run.rounds.items():
        steps = sum(line["updates"] for line in lines) / len(lines)
        workers = sum(line["workers"] for line in lines) / len(lines)
        totals = [line["requested_batch_size"] * line["workers"] for line in lines]
        max_batch_size = run.max_batch_sizes[index]
        signal = _mean([line["signal"] for line in lines])
        if signal is not None:
            measured_steps += steps
            signal_sum += steps * signal
        num_steps += steps
        batch_sum += steps * sum(line["requested_batch_size"] for line in lines) / len(lines)
        total_sum += steps * sum(totals) / len(lines)
        communications += steps * sum(max_batch_size / total for total in totals) / len(lines)
        syncs += run.syncs[index]
        bounds = dict.fromkeys(_BOUNDS)
        if constants is not None:
            shape = {"steps_per_round": steps, "num_workers": workers}
            size = {"max_batch_size": max_batch_size}
            bounds = {
                "signal_bound": signal_bound(num_steps, constants),
                "local_batch_bound": local_batch_bound(num_steps, constants, **shape),
                "batch_bound": batch_bound(num_steps, constants),
                "communications_bound": communications_bound(constants, **size),
                "paper_communications": paper_communications(round(num_steps), constants, **size),
            }
        points.append(
            Point(
                round=index,
                num_steps=num_steps,
                mean_signal=signal_sum / measured_steps if measured_steps else None,
                mean_batch_size=batch_sum / num_steps,
                mean_total_batch_size=total_sum / num_steps,
                communications=communications,
                syncs=syncs,
                **bounds,
            )
        )
    return points


def _harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n; from 100 on by Euler and Maclaurin, to 1e-10."""
    if n < 100:
        return math.fsum(1 / k for k in range(1, n + 1))
    return math.log(n) + float(np.euler_gamma) + 1 / (2 * n) - 1 / (12 * n**2)


def _mean(values: Sequence[float | None]) -> float | None:
    """Over those that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
