"""The rule for rounds whose length grows linearly over the run."""

from adloco_jax.core.batching import ROUND_LENGTHS


def linear(
    *, steps_per_round: int, max_steps_per_round: int, share_done: float, **_: object
) -> float:
    """Return the length of a round, which grows linearly over the run.

    Args:
      steps_per_round: The length of the first round, in inner steps.
      max_steps_per_round: The length at the end of the run.
      share_done: The fraction of the run that is done before the round, from 0 to 1.

    Returns:
      Number of inner steps of the round, not yet limited by what is left of the run.
    """
    return steps_per_round + share_done * (max_steps_per_round - steps_per_round)


ROUND_LENGTHS["linear"] = linear
