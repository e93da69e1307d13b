"""The rule for rounds whose length grows linearly over the run."""

from adloco_jax.core.batching import ROUND_LENGTHS


def linear(
    *, steps_per_round: int, max_steps_per_round: int, share_done: float, **_: object
) -> float:
    """Return the inner steps of a round, which grow linearly over the run, before limits."""
    return steps_per_round + share_done * (max_steps_per_round - steps_per_round)


ROUND_LENGTHS["linear"] = linear
