"""Streaming DiLoCo: half of the parameters is sent at a time, while the workers continue to train.

Command:   python -m adloco_jax.main --config configs/streaming_diloco.py
Hardware:  two CPU cores
Source:    Douillard et al. 2025, arXiv 2501.18512, sections 2.2 and 2.3
"""

from ml_collections import ConfigDict

from adloco_jax.configs import diloco


def get_config() -> ConfigDict:
    """Return the config of DiLoCo as published, changed to synchronise in two fragments."""
    config = diloco.as_published()
    # A fragment has one of the two layers, and every second row of the other parameters. In the
    # paper a fragment has three layers.
    config.outer.fragments = 2
    config.outer.delay_updates = 1
    config.outer.mixing = 0.5
    return config
