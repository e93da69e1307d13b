"""The recommended method for your own text: one worker starts, more join as gradient noise grows.

Command:   python -m adloco_jax.main --config configs/recommended.py
           --config.data.path='texts/*.jsonl.gz' --config.data.tokenizer=TOKENIZER
Hardware:  one GPU or more; before you train, `adloco plan` shows the memory and communication.
           configs/recommended_quick.py shows the method on a CPU
Model:     a Llama of 35.2 M parameters with a vocabulary of 32,000 tokens. Replace it by your own
           model, with a learning rate for that model.
Expected:  docs/GPU.md has a run of 91 M tokens in rounds of 110 updates, 2.42 nats per token;
           docs/RESULTS.md has results of these settings at 0.08 M parameters
See also:  docs/choosing.md says when another method is a better choice
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """Return a config with one trainer, which starts with one of its eight workers.

    The command line must set `data.path` and `data.tokenizer`.
    """
    config = default_config()
    config.num_tokens = 704_000_000  # 20 tokens for each parameter

    config.model.vocab_size = 32_000
    config.model.width = 384
    config.model.num_layers = 6
    config.model.num_heads = 3  # 128 numbers per head, as fast attention kernels want
    config.model.num_kv_heads = 3
    config.model.mlp_width = 1024
    config.model.max_length = 512  # tokens
    config.model.dtype = "bfloat16"

    config.data.source = "jsonl"
    # To be set: files of JSON lines with a field "text". docs/guides/data.md has other kinds.
    config.data.path = ""
    config.data.tokenizer = ""  # to be set: a tokenizer.json, a *.model, or a name on the hub
    config.data.sequence_length = 512  # tokens

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 8  # the number of workers when all have joined
    config.ensemble.initial_workers = 1  # gradient noise decides when the others join

    config.inner.steps_per_round = 220  # as in docs/RESULTS.md; use fewer steps if links are fast
    config.inner.learning_rate = 1e-3
    config.inner.warmup_updates = 200
    config.inner.schedule = "constant"  # a falling rate needs outer.tx="nesterov_by_interval"
    config.inner.clip_norm = 1.0
    config.outer.tx = "nesterov"  # with DiLoCo's learning rate of 0.7 and momentum of 0.9
    config.outer.skip_single = True  # no outer optimizer before the second worker has joined

    config.batching.test = "norm"
    # With a larger eta, workers join later. To reach a loss, the run then needs fewer tokens, but
    # more updates one after another.
    config.batching.eta = 1.6
    # Less than 0.9, because a run of a few dozen rounds has few tests to average.
    config.batching.smoothing = 0.5
    # While no signal is measured, the total batch grows to at most 4 times the last one with a
    # measured signal.
    config.batching.max_blind_growth = 4
    config.batching.initial_batch_size = 16  # sequences per worker; this number stays constant
    config.batching.max_batch_size = 16
    config.batching.buckets = (16,)
    config.batching.batch_cap = 16
    config.merge.policy = "none"  # there is only one trainer
    return config
