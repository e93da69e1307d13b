"""The quadratic synchronisation rule: the lower the learning rate, the longer the round."""

from adloco_jax.core.batching import ROUND_LENGTHS

ALPHA = 0.0175  # the paper's value for ViT-B with AdamW


def quadratic(
    *,
    steps_per_round: int,
    next_rate: float,
    updates: int,
    warmup_updates: int,
    alpha: float = ALPHA,
    **_: object,
) -> float:
    """Return the length of a round: (alpha / learning rate)^2, at least `steps_per_round`.

    The length is in inner steps. During warm-up it is `steps_per_round`.

    Args:
      steps_per_round: Inner steps of the shortest round; the paper's H_base.
      next_rate: Learning rate of the round's first update.
      updates: Number of the trainer's inner updates so far.
      warmup_updates: Number of updates in the warm-up.
      alpha: The rule's constant, in units of the learning rate. For another value, add an entry:
        `ROUND_LENGTHS["qsr_0.03"] = functools.partial(quadratic, alpha=0.03)`.

    Returns:
      Number of inner steps of the round, not yet limited by what is left of the run.

    Source: QSR (arXiv 2310.14423).
    """
    if updates < warmup_updates:
        return steps_per_round
    rate = max(next_rate, 1e-9)  # at the end of a schedule the rate may be rounded to zero
    return max(steps_per_round, (alpha / rate) ** 2)


ROUND_LENGTHS["qsr"] = quadratic
