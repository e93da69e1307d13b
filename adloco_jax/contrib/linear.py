"""Rounds that grow linearly over the run."""

from adloco_jax.core.round_lengths import ROUND_LENGTHS


def linear(*, steps_per_round: int, max_steps_per_round: int, share_done: float) -> float:
    """From the base length to the largest in proportion to the share of the run that is done.

    Args:
      steps_per_round: The length of the first round.
      max_steps_per_round: The length at the end.
      share_done: From 0 to 1.

    Returns:
      Steps, not yet limited by what is left of the run.
    """
    return steps_per_round + share_done * (max_steps_per_round - steps_per_round)


ROUND_LENGTHS["linear"] = linear
