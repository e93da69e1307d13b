"""The recommended method for your own text: one worker starts, more join as gradient noise grows.

Command:   python -m adloco_jax.main --config configs/recommended.py
           --config.data.path='texts/*.jsonl.gz' --config.data.tokenizer=TOKENIZER
Hardware:  one GPU or more; before you train, `adloco plan` shows the memory and communication.
           configs/recommended_quick.py shows the method on a CPU
Model:     a Llama with a vocabulary of 32,000 tokens, of 35.2 M parameters or, with --size 10M or
           --size 100M, of 8.6 M or 89.9 M. Replace it by your own model, with a learning rate for
           that model.
Sizes:     all follow from the number of layers: width 64 a layer, one head for 128 of it, rate 1e-3
           at width 384 and in inverse proportion to it, 20 tokens a parameter. Batch and rounds
           stay: the noise decides how many workers share an update. 35M alone has been trained
Expected:  docs/GPU.md has a run of 91 M tokens in rounds of 110 updates, 2.42 nats per token;
           docs/RESULTS.md has results of these settings at 0.08 M parameters
See also:  docs/choosing.md: with Muon, DiLoCo ends first where a synchronisation takes less time
           than 22 to 66 updates, one machine alone where it takes more than 120
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config

LAYERS = {"10M": 2, "35M": 6, "100M": 10}  # by the name of a size
MILLION_TOKENS = {"10M": 172, "35M": 704, "100M": 1_798}  # 20 for each parameter


def get_config(size: str = "35M") -> ConfigDict:
    """Return a config with one trainer, which starts with one of its eight workers.

    The command line must set `data.path` and `data.tokenizer`.
    """
    config, layers = default_config(), LAYERS[size]
    config.num_tokens = MILLION_TOKENS[size] * 1_000_000

    config.model.vocab_size = 32_000
    config.model.width = 64 * layers
    config.model.num_layers = layers
    # 128 numbers per head, as fast attention kernels want
    config.model.num_heads = config.model.num_kv_heads = layers // 2
    config.model.mlp_width = 8 * config.model.width // 3 // 16 * 16
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
    # inner.tx="muon" with rate 0.006, outer.average=0.5 and rounds of 110 to 220 takes half of the
    # steps at 0.08 and 0.61 M parameters (docs/RESULTS.md). It has not been tried at this size.
    config.inner.learning_rate = round(0.384 / config.model.width, 6)
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
