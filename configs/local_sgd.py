"""LocalSGD on the quickstart's model and text: SGD steps, then the mean of the workers.

Command:   python -m adloco_jax.main --config configs/local_sgd.py
Hardware:  two CPU cores
Source:    Stich 2019
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart


def get_config() -> ConfigDict:
    """The quickstart as one trainer with a fixed batch, and SGD for both optimizers."""
    config = quickstart.get_config()
    config.ensemble.num_trainers = 1  # this trainer owns all workers
    config.batching.test = "constant"
    config.merge.policy = "none"
    config.inner.tx = "sgd"
    config.inner.learning_rate = 0.5  # SGD takes larger steps than AdamW
    config.outer.tx = "sgd"
    config.outer.learning_rate = 1.0  # the new parameters are the workers' mean
    return config
