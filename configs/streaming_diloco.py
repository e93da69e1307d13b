"""Streaming DiLoCo: half of the parameters are sent at a time, while workers continue training.

Command:   python -m adloco_jax.main --config configs/streaming_diloco.py
Hardware:  two CPU cores
Source:    Douillard et al. 2025, arXiv 2501.18512, sections 2.2 and 2.3
"""

from ml_collections import ConfigDict

from adloco_jax.configs import diloco


def get_config() -> ConfigDict:
    """DiLoCo whose parameters are synchronised in two fragments."""
    config = diloco.get_config()
    config.outer.fragments = 2  # each one layer and every second row; the paper's: 3 layers
    config.outer.delay_updates = 1
    config.outer.mixing = 0.5
    return config
