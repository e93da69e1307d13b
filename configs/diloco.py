"""DiLoCo with Muon inside and averaged rounds: one trainer, a fixed batch, no merges.

Command:   python -m adloco_jax.main --config configs/diloco.py
Hardware:  two CPU cores
Model:     the quickstart's, with its text
Source:    Douillard et al. 2023, Muon inside as in MuLoCo (arXiv 2505.23725); optimizers as in
           docs/RESULTS.md. --config.inner.tx=adamw --config.inner.learning_rate=0.001
           --config.outer.learning_rate=0.7 --config.outer.momentum=0.9 --config.outer.average=0 is
           DiLoCo as published
See also:  docs/choosing.md says over which links it ends first
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart


def as_published() -> ConfigDict:
    """Return the quickstart's config without what AdLoCo adds to DiLoCo."""
    config = quickstart.get_config()
    config.ensemble.num_trainers = 1  # this trainer owns all workers
    config.batching.test = "constant"
    config.merge.policy = "none"
    return config


def get_config() -> ConfigDict:
    """Return the config of DiLoCo with the optimizers that need the fewest steps in the study."""
    config = as_published()
    config.inner.tx = "muon"
    config.inner.learning_rate = 0.006
    config.outer.learning_rate = 0.8
    config.outer.momentum = 0.6
    config.outer.average = 0.5  # the reported model is a running average over rounds
    return config
