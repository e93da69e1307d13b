"""LocalSGD with the quickstart's model and text: workers make SGD steps, and are then averaged.

Command:   python -m adloco_jax.main --config configs/local_sgd.py
Hardware:  two CPU cores
Source:    Stich 2019
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart


def get_config() -> ConfigDict:
    """Return the quickstart's config, changed to one trainer, a fixed batch and SGD.

    The inner and the outer optimizer are both SGD.
    """
    config = quickstart.get_config()
    config.ensemble.num_trainers = 1  # this trainer owns all workers
    config.batching.test = "constant"
    config.merge.policy = "none"
    config.inner.tx = "sgd"
    config.inner.learning_rate = 0.5  # SGD needs a larger learning rate than AdamW
    config.outer.tx = "sgd"
    config.outer.learning_rate = 1.0  # so the new parameters are the mean of the workers
    return config
