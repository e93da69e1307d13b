"""DiLoCo with the quickstart's model and text: one trainer, a fixed batch, no merges.

Command:   python -m adloco_jax.main --config configs/diloco.py
Hardware:  two CPU cores
Source:    Douillard et al. 2023 (inner optimizer AdamW, outer optimizer Nesterov)
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart


def get_config() -> ConfigDict:
    """Return the quickstart's config without what AdLoCo adds to DiLoCo."""
    config = quickstart.get_config()
    config.ensemble.num_trainers = 1  # this trainer owns all workers
    config.batching.test = "constant"
    config.merge.policy = "none"
    return config
