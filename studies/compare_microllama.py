"""The paper's comparison: AdLoCo and DiLoCo, MicroLlama on C4, from the published checkpoint.

Command:   adloco compare studies/compare_microllama.py
           The model and the text come from the Hugging Face hub, or from local files:
           the environment variable MICROLLAMA names the folder of a checkpoint, and C4 the files of
           the text.
Hardware:  four 80 GB GPUs
Source:    AdLoCo (arXiv 2508.18182), table A.2 and section 6.1; departures as in
           configs/microllama.py
"""

import os

from adloco_jax.configs import microllama
from adloco_jax.study.cluster import Cluster
from adloco_jax.study.compare import Comparison


def get_comparison() -> Comparison:
    """Return the comparison of AdLoCo and DiLoCo.

    The environment variables MICROLLAMA and C4 may name a local checkpoint and local text files.
    """
    config = microllama.get_config()
    if model := os.environ.get("MICROLLAMA"):
        config.model.init_from = config.data.tokenizer = model
    if shards := os.environ.get("C4"):
        config.data.path, config.data.name, config.data.heldout_split = shards, "", ""
    diloco = {
        "ensemble.num_trainers": 1,
        "batching.test": "constant",
        "merge.policy": "none",
    }
    nesterov = {"outer.tx": "nesterov", "outer.learning_rate": 0.7}
    return Comparison(
        base=config,
        variants={
            "DiLoCo, as in the paper": diloco,
            "DiLoCo": diloco | nesterov,
            "AdLoCo": {},
            "AdLoCo, one trainer": {"ensemble.num_trainers": 1, "merge.policy": "none"},
            "AdLoCo, rounds grow": {
                "batching.growth": ("rounds", "batch"),
                "inner.max_steps_per_round": 8 * config.inner.steps_per_round,
            },
        },
        baseline="DiLoCo, as in the paper",
        target_losses=(2.9,),  # nats per token; the loss of the published model is not known to us
        simulated=Cluster(num_params=304_600_000, sequence_length=512),
    )
