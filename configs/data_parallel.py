"""Plain data-parallel AdamW with the quickstart's model and text: one synchronisation per update.

Command:   python -m adloco_jax.main --config configs/data_parallel.py
Hardware:  two CPU cores
Source:    docs/algorithm.md, section 1. A round is one inner SGD step with learning rate 1. So the
           pseudo-gradient is the mean gradient of all workers, and the outer AdamW applies it.
"""

from ml_collections import ConfigDict

from adloco_jax.configs import diloco


def get_config() -> ConfigDict:
    """Return the quickstart's config, changed to one trainer whose rounds have one update each.

    The number of rounds is larger, so that the run makes as many updates as the quickstart.
    """
    config = diloco.as_published()
    config.outer.tx = "adamw"
    config.outer.learning_rate = config.inner.learning_rate
    config.inner.tx = "sgd"
    config.inner.learning_rate = 1.0  # so a worker's difference is its gradient
    num_steps = config.inner.steps_per_round
    config.inner.steps_per_round = 1
    config.num_rounds *= num_steps
    config.eval.every_rounds *= num_steps
    config.log.every_rounds *= num_steps
    return config
