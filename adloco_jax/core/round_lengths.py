"""Rules for the number of inner steps between two synchronisations."""

from collections.abc import Callable


def fixed(*, steps_per_round: int) -> int:
    """Every round has the base length."""
    return steps_per_round


def quadratic(
    *,
    steps_per_round: int,
    qsr_alpha: float,
    next_rate: float,
    updates: int,
    warmup_updates: int,
) -> float:
    """The quadratic synchronisation rule: the lower the learning rate, the longer the round.

    Args:
      steps_per_round: H_base, the least; also the length during the warm-up.
      qsr_alpha: alpha, in units of the learning rate; a round has (alpha / rate)^2 steps.
      next_rate: Learning rate of the round's first update.
      updates: The trainer's inner updates so far.
      warmup_updates: Of them so many are the warm-up.

    Returns:
      Steps, not yet limited by what is left of the run.

    Source: QSR (arXiv 2310.14423).
    """
    if updates < warmup_updates:
        return steps_per_round
    rate = max(next_rate, 1e-9)  # at a schedule's very end it may be rounded to zero
    return max(steps_per_round, (qsr_alpha / rate) ** 2)


def linear(*, steps_per_round: int, max_steps_per_round: int, share_done: float) -> float:
    """From the base length to the largest in proportion to the share of the run that is done."""
    return steps_per_round + share_done * (max_steps_per_round - steps_per_round)


ROUND_LENGTHS: dict[str, Callable[..., float]] = {
    "fixed": fixed,
    "qsr": quadratic,
    "linear": linear,
}
"""By the name that `inner.round_length` gives: `rule(*, ...) -> steps` of a trainer's next round.

A rule names the keywords that it wants: `next_rate`, the learning rate of the round's first update;
`updates`, the trainer's inner updates so far; `round_index`, rounds completed; `share_done`, the
fraction of the run; and any knob of the config's group `inner`, such as `steps_per_round`.
"""
