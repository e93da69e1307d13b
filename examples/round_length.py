"""A rule of your own for the length of rounds: longer ones in the second half.

Run it:  adloco train examples/round_length.py --config.num_rounds=2
"""

from adloco_jax import ROUND_LENGTHS
from adloco_jax.config import default_config


def post_local(*, steps_per_round, share_done, **_):
    """Rounds four times as long in the second half of the run (after arXiv 1808.07217)."""
    return steps_per_round * (4 if share_done >= 0.5 else 1)


ROUND_LENGTHS["post_local"] = post_local


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.inner.round_length = "post_local"
    return config
