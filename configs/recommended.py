"""The recommended method for your own text: one worker starts, others join with gradient noise.

Command:   python -m adloco_jax.main --config configs/recommended.py
           --config.data.path='texts/*.jsonl.gz' --config.data.tokenizer=TOKENIZER
Hardware:  one GPU or more; `adloco plan` shows memory and communication first.
           configs/recommended_quick.py shows the same on a CPU
Model:     a Llama of 35.2 M parameters with 32,000 tokens; replace it by your own model with
           its own learning rate
Expected:  not run at this size; docs/RESULTS.md has results of these settings at 0.08 M parameters
See also:  docs/choosing.md says when another method is the better choice
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """One trainer whose pool of eight workers grows; data.path is left to the command line."""
    config = default_config()
    config.num_rounds = 1_000_000  # tokens end the run
    config.num_tokens = 704_000_000  # 20 for each parameter

    config.model.vocab_size = 32_000
    config.model.width = 384
    config.model.num_layers = 6
    config.model.num_heads = 6
    config.model.num_kv_heads = 6
    config.model.mlp_width = 1024
    config.model.max_length = 512  # tokens
    config.model.dtype = "bfloat16"

    config.data.source = "jsonl"
    config.data.path = ""  # set it: JSON lines with a "text", or see docs/guides/data.md
    config.data.tokenizer = ""  # set it: a tokenizer.json, a *.model, or a hub name
    config.data.sequence_length = 512  # tokens

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 8  # size of the whole pool
    config.ensemble.initial_workers = 1  # the noise of the gradient decides when others join

    config.inner.steps_per_round = 220  # as measured; use fewer if links are fast
    config.inner.learning_rate = 1e-3
    config.inner.warmup_updates = 200
    config.inner.schedule = "constant"  # a falling rate needs outer.tx="nesterov_by_interval"
    config.inner.clip_norm = 1.0
    config.outer.tx = "nesterov"  # at 0.7 with momentum 0.9, DiLoCo's
    config.outer.skip_single = True  # Nesterov begins with the second worker

    config.batching.test = "norm"
    config.batching.eta = 1.6  # larger: workers join later, fewer tokens and more serial updates
    config.batching.smoothing = 0.5  # a run of a few dozen rounds has few tests to average
    config.batching.max_blind_growth = 4  # times the last total batch with a measured signal
    config.batching.initial_batch_size = 16  # sequences per worker; this stays constant
    config.batching.max_batch_size = 16
    config.batching.buckets = (16,)
    config.batching.batch_cap = 16
    config.merge.policy = "none"  # there is one trainer
    return config
