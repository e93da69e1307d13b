"""LocalSGD with the quickstart's model and text: workers make SGD steps, and are then averaged.

Command:   python -m adloco_jax.main --config configs/local_sgd.py
Hardware:  two CPU cores
Source:    Stich 2019
"""

from ml_collections import ConfigDict

from adloco_jax.configs import diloco


def get_config() -> ConfigDict:
    """Return the quickstart's config, changed to one trainer, a fixed batch and SGD.

    The inner and the outer optimizer are both SGD.
    """
    config = diloco.as_published()
    config.inner.tx = "sgd"
    config.inner.learning_rate = 0.5  # SGD needs a larger learning rate than AdamW
    config.outer.tx = "sgd"
    config.outer.learning_rate = 1.0  # so the new parameters are the mean of the workers
    return config
