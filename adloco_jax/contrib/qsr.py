"""The quadratic synchronisation rule: the lower the learning rate, the longer the round."""

from adloco_jax.core.batching import ROUND_LENGTHS

ALPHA = 0.0175  # of the source, for ViT-B with AdamW


def quadratic(
    *,
    steps_per_round: int,
    next_rate: float,
    updates: int,
    warmup_updates: int,
    alpha: float = ALPHA,
) -> float:
    """(alpha / learning rate)^2 steps; the base length during warm-up.

    Args:
      steps_per_round: H_base, the shortest round.
      next_rate: Learning rate of the round's first update.
      updates: The trainer's inner updates so far.
      warmup_updates: Updates of the warm-up.
      alpha: In units of the learning rate. For another value, add another entry to the table:
        `ROUND_LENGTHS["qsr_0.03"] = functools.partial(quadratic, alpha=0.03)`.

    Returns:
      Steps, before the limit by the rest of the run.

    Source: QSR (arXiv 2310.14423).
    """
    if updates < warmup_updates:
        return steps_per_round
    rate = max(next_rate, 1e-9)  # at a schedule's very end it may be rounded to zero
    return max(steps_per_round, (alpha / rate) ** 2)


ROUND_LENGTHS["qsr"] = quadratic
