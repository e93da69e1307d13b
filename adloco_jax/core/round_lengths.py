"""Rules for the number of inner steps between two synchronisations."""

from collections.abc import Callable


def fixed(*, steps_per_round: int) -> int:
    """Every round has the base length."""
    return steps_per_round


ROUND_LENGTHS: dict[str, Callable[..., float]] = {"fixed": fixed}
"""By the name that `inner.round_length` gives: `rule(*, ...) -> steps` of a trainer's next round.

A rule receives the keywords that its signature names: `next_rate`, the learning rate of the round's
first update; `updates`, the trainer's inner updates so far; `round_index`, rounds completed;
`share_done`, the fraction of the run that is done; and any key of the config's group `inner`, such
as `steps_per_round`.
"""
