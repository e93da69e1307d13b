"""AdLoCo on the source text of Python's standard library: every mechanism in one short run.

Command:   python -m adloco_jax.main --config configs/quickstart.py
Hardware:  two CPU cores; no download, no accelerator
Model:     a Llama of 125,000 parameters that reads bytes
Shows:     three trainers whose batches grow from 4 sequences; one merge, after which a single
           trainer has all three workers; and further growth by gradient accumulation
Expected:  90 seconds, most of it compilation, and 25 when programs are in the cache. The loss on
           held-out text is 2.02 nats per byte with the library of Python 3.11, and 2.21 with that
           of Python 3.13. If all bytes were guessed with equal probability, the loss would be 5.55.
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """Return the config of the demonstration; the configs of other methods start from it."""
    config = default_config()
    config.num_rounds = 10

    config.model.width = 64
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 176
    config.model.max_length = 64  # tokens

    config.data.sequence_length = 64  # bytes
    config.data.num_sequences = 40_000  # 2.6 MB of text, enough for a short run

    config.ensemble.num_trainers = 3
    config.ensemble.num_workers = 3

    config.inner.steps_per_round = 30  # the paper has 200
    config.inner.learning_rate = 1e-3  # for a small model that is trained from scratch
    config.inner.weight_decay = 0.0  # the run has too few updates for a decay to matter

    config.batching.eta = 0.3  # smaller than the paper's 0.8, so that batches grow in ten rounds
    config.batching.initial_batch_size = 4
    config.batching.max_batch_size = 8  # small, so that accumulation is soon needed
    config.batching.buckets = (4, 8)  # programs are compiled for these two sizes only
    config.batching.max_growth = 2
    config.batching.batch_cap = 32  # four micro-batches of 8 sequences

    config.merge.width = 3  # all trainers merge at once; the paper merges two at a time
    return config
