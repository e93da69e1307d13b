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
    """Return the inner steps of a round: (alpha / next_rate)^2, at least `steps_per_round`.

    During warm-up they are `steps_per_round`, the paper's H_base. For another `alpha`, in units of
    the learning rate, add an entry such as `partial(quadratic, alpha=0.03)` to `ROUND_LENGTHS`.

    Source: QSR (arXiv 2310.14423).
    """
    if updates < warmup_updates:
        return steps_per_round
    rate = max(next_rate, 1e-9)  # at the end of a schedule the rate may be rounded to zero
    return max(steps_per_round, (alpha / rate) ** 2)


ROUND_LENGTHS["qsr"] = quadratic
