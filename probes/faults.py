"""The run with which scripts/faults.py tests crashes and damage: all mechanisms in a few seconds.

Command:   python -m adloco_jax.main --config probes/faults.py
Hardware:  two CPU cores
Shows:     workers that join, growth, accumulation, a merge, evaluation after every second round,
           a checkpoint after every round
Expected:  six seconds, four of them training, if all programs are in the compilation cache
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """Return the config of a Llama of 9,000 parameters, which is trained for six rounds."""
    config = default_config()
    config.num_rounds = 6

    config.model.width = 16
    config.model.num_layers = 1
    config.model.num_heads = 2
    config.model.num_kv_heads = 1
    config.model.mlp_width = 32
    config.model.max_length = 16  # tokens

    config.data.source = "stdlib"
    config.data.sequence_length = 16  # bytes
    config.data.num_sequences = 500

    config.ensemble.num_trainers = 2
    config.ensemble.num_workers = 4
    config.ensemble.initial_workers = 2  # other workers join after the first round

    config.inner.steps_per_round = 2
    config.inner.learning_rate = 1e-3

    config.batching.eta = 0.1  # so small that batches grow from the first round on
    config.batching.initial_batch_size = 4
    config.batching.max_batch_size = 4
    config.batching.buckets = (4,)  # one size, because each program takes half a second to trace
    config.batching.batch_cap = 12

    config.merge.every_rounds = 3
    config.eval.every_rounds = 2
    config.eval.num_sequences = 4
    config.checkpoint.every_rounds = 1
    return config
