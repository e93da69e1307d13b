"""What the paper's theory says of a run (ALGORITHM 5): bounds, fitted constants, assumptions."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Constants:
    """What the bounds are made of; every one of them uses L and Delta0 as their product only."""

    smoothness: float  # L, nats/token per squared distance of parameters
    gap: float  # Delta0 = F(x0) - F*, nats/token
    noise: float  # sigma^2, the trace of the per-sequence gradients' covariance
    eta: float  # of the norm test


class Reach(NamedTuple):
    """What it takes until E|G|^2 <= epsilon (the corollary of Theorem 2)."""

    num_steps: float
    num_communications: float
    batch_size: float  # sequences, at the end


class Point(NamedTuple):
    """A run after one of its rounds, with the bounds there; means are over the steps so far.

    Measured values are means over the trainers alive. None: not measured, or no constants.
    """

    round: int
    num_steps: int  # updates of a worker so far: the theory's N
    mean_signal: float | None  # of |G|^2
    signal_bound: float | None  # Lemma 2, upper
    mean_batch_size: float  # requested, sequences per worker
    local_batch_bound: float | None  # Lemma 1, lower
    mean_total_batch_size: float  # requested, sequences of all workers of a trainer
    batch_bound: float | None  # Theorem 1, lower
    communications: float  # the paper's C(N), of a trainer
    communications_bound: float | None  # the direct bound, upper
    paper_communications: float | None  # Theorem 2 as the paper derives it, logarithmic in N
    syncs: int  # blocking synchronisations, summed over trainers


def signal_bound(num_steps: float, constants: Constants) -> float:
    """Lemma 2."""
    raise NotImplementedError


def local_signal_bound(
    num_steps: float, constants: Constants, *, steps_per_round: int, num_workers: int
) -> float:
    """The rate that Lemma 1 uses."""
    raise NotImplementedError


def local_batch_bound(
    num_steps: float, constants: Constants, *, steps_per_round: int, num_workers: int
) -> float:
    """Lemma 1."""
    raise NotImplementedError


def batch_bound(num_steps: float, constants: Constants) -> float:
    """Theorem 1."""
    raise NotImplementedError


def communications_bound(constants: Constants, *, max_batch_size: int) -> float:
    """The direct bound on C(N)."""
    raise NotImplementedError


def paper_communications(num_steps: int, constants: Constants, *, max_batch_size: int) -> float:
    """Theorem 2 as the paper derives it."""
    raise NotImplementedError


def reach(epsilon: float, constants: Constants, *, steps_per_round: int) -> Reach:
    """The corollary."""
    raise NotImplementedError


def fit(events: Iterable[dict]) -> Constants:
    """Constants from a run's ledger.

    Raises:
      DataError: If the ledger does not determine them; the message says why.
    """
    raise NotImplementedError


def measured(events: Iterable[dict], constants: Constants | None = None) -> list[Point]:
    """A run's growth and communications beside the bounds."""
    raise NotImplementedError


ASSUMPTIONS: tuple[str, ...] = ()
