"""A batch-size test of your own: the simple noise scale.

Run it:  adloco train examples/batch_test.py --config.num_rounds=2
"""

from adloco_jax import BATCH_TESTS, BatchTest
from adloco_jax.config import default_config


def simple_noise_scale(stats, *, num_workers, **_):
    """B_simple of McCandlish et al. 2018, divided over the trainer's workers."""
    return stats.noise / abs(stats.signal) / num_workers


BATCH_TESTS["noise_scale"] = BatchTest(simple_noise_scale)


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.batching.test = "noise_scale"
    return config
