"""The branch test: the critical batch measured by branches, beside the noise scale.

Command:   python -m adloco_jax.main --config configs/branches.py --workdir runs/branches
           python scripts/branch_figure.py runs/branches
Hardware:  two CPU cores; no download, no accelerator
Model:     a Llama of 75,600 parameters that reads bytes
Shows:     every second round trains branches of batch B, 2B and 4B from one point
Expected:  about five minutes; batches 4, 8, 32, 128 (docs/branches.png)
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """One worker that begins with four sequences."""
    config = default_config()
    config.num_rounds = 1000  # tokens end the run
    config.num_tokens = 4_000_000

    config.model.width = 48
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 128
    config.model.max_length = 64  # tokens

    config.data.source = "stdlib"
    config.data.sequence_length = 64  # bytes

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 1
    config.inner.steps_per_round = 440  # of 120, a round gained too little to tell batches apart
    config.inner.learning_rate = 2e-3
    config.inner.weight_decay = 0.0
    config.inner.lr_on_growth = "sqrt"  # Adam's rule (arXiv 2505.23971)
    config.outer.tx = "sgd"
    config.outer.learning_rate = 1.0  # a single worker: no outer step

    config.batching.test = "branch"
    config.batching.branch_every_rounds = 2
    config.batching.smoothing = 0.5  # of the noise scale
    config.batching.initial_batch_size = 4
    config.batching.max_batch_size = 16
    config.batching.buckets = (4, 8, 16)
    config.batching.batch_cap = 256
    config.switch.mode = "accumulate"
    config.merge.policy = "none"
    return config
