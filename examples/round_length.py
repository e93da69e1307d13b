"""Rules of your own for the length of rounds: by the learning rate, or by the share of the run.

Run it:  adloco train examples/round_length.py --config.num_rounds=2
"""

from adloco_jax import ROUND_LENGTHS
from adloco_jax.config import default_config

ALPHA = 0.0175  # in units of the learning rate; the paper's value for ViT-B with AdamW


def quadratic(*, steps_per_round, next_rate, updates, warmup_updates, alpha=ALPHA, **_):
    """The quadratic synchronisation rule: (alpha / rate)^2, at least `steps_per_round`.

    During warm-up rounds have `steps_per_round`, the paper's H_base.

    Source: QSR (arXiv 2310.14423).
    """
    if updates < warmup_updates:
        return steps_per_round
    rate = max(next_rate, 1e-9)  # at the end of a schedule the rate may be rounded to zero
    return max(steps_per_round, (alpha / rate) ** 2)


def linear(*, steps_per_round, max_steps_per_round, share_done, **_):
    """From `steps_per_round` to `max_steps_per_round`, which must be set, over the run."""
    return steps_per_round + share_done * (max_steps_per_round - steps_per_round)


ROUND_LENGTHS["qsr"] = quadratic
ROUND_LENGTHS["linear"] = linear


def get_config():
    """Return a config that uses the second."""
    config = default_config()
    config.inner.round_length = "linear"
    config.inner.max_steps_per_round = 4 * config.inner.steps_per_round
    return config
