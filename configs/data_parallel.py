"""Plain data-parallel AdamW on the quickstart's model and text: one synchronisation per update.

Command:   python -m adloco_jax.main --config configs/data_parallel.py
Hardware:  two CPU cores
Source:    docs/algorithm.md, 1: after one inner SGD step at learning rate 1 the pseudo-gradient is
           the mean gradient of all workers; the outer AdamW applies it
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart


def get_config() -> ConfigDict:
    """The quickstart as one trainer whose rounds are single updates, with as many updates."""
    config = quickstart.get_config()
    config.ensemble.num_trainers = 1  # this trainer owns all workers
    config.batching.test = "constant"
    config.merge.policy = "none"
    config.outer.tx = "adamw"
    config.outer.learning_rate = config.inner.learning_rate
    config.inner.tx = "sgd"
    config.inner.learning_rate = 1.0
    num_steps, config.inner.steps_per_round = config.inner.steps_per_round, 1
    config.num_rounds *= num_steps
    config.eval.every_rounds *= num_steps
    config.log.every_rounds *= num_steps
    return config
