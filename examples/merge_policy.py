"""A merge policy of your own: trainers with the highest losses merge.

Run it:  adloco train examples/merge_policy.py --config.num_rounds=2
"""

from adloco_jax import MERGE_POLICIES
from adloco_jax.config import default_config


def highest_losses(trainers, *, width):
    """Merge the trainers with the highest guard loss; the best of them is the representative."""
    worst = sorted(range(len(trainers)), key=lambda m: -trainers[m].guard_loss)[:width]
    return tuple(sorted(worst, key=lambda m: trainers[m].guard_loss))


MERGE_POLICIES["highest_losses"] = highest_losses


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.merge.policy = "highest_losses"
    return config
