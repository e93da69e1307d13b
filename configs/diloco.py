"""DiLoCo with Muon inside and averaged rounds: one trainer, a fixed batch, no merges.

Command:   adloco train diloco
           adloco train diloco --size 35M --config.data.path='texts/*.jsonl.gz'
           --config.data.tokenizer=TOKENIZER
Hardware:  two CPU cores; with --size one GPU or more (`adloco plan` says what fits)
Model:     the quickstart's, with its text; with --size a Llama with a vocabulary of 32,000 tokens,
           of 8.6, 35.2 or 89.9 M parameters
Sizes:     all follow from the number of layers: width 64 a layer, one head for 128 of it, 20 tokens
           a parameter
Source:    Douillard et al. 2023, Muon inside as in MuLoCo (arXiv 2505.23725); optimizers as in
           docs/RESULTS.md. --config.inner.tx=adamw --config.inner.learning_rate=0.001
           --config.outer.learning_rate=0.7 --config.outer.momentum=0.9 --config.outer.average=0 is
           DiLoCo as published
Measured:  rate 0.006 at widths 48 and 128 (0.08 and 0.61 M parameters), with rounds of 110 updates.
           At the widths of --size no rate was measured: try half and twice
See also:  docs/choosing.md says over which links it ends first
"""

from ml_collections import ConfigDict

from adloco_jax.configs import quickstart

LAYERS = {"10M": 2, "35M": 6, "100M": 10}  # by the name of a size
MILLION_TOKENS = {"10M": 172, "35M": 704, "100M": 1_798}  # 20 for each parameter


def as_published() -> ConfigDict:
    """Return the quickstart's config without what AdLoCo adds to DiLoCo."""
    config = quickstart.get_config()
    config.ensemble.num_trainers = 1  # this trainer owns all workers
    config.ensemble.num_workers = None  # one for each learner; four without learners
    config.batching.test = "constant"
    config.batching.max_batch_size = "auto"
    config.batching.batch_cap = None  # no growth: the cap is the first batch
    config.batching.buckets = ()  # the default: 1, 2, 3, 4, 6, 8, ...
    config.merge.policy = "none"
    return config


def get_config(size: str | None = None) -> ConfigDict:
    """Return the config of DiLoCo with the optimizers that need the fewest steps in the study.

    Args:
      size: "10M", "35M" or "100M" parameters, for a text and a tokenizer of your own; None: the
        quickstart's model and text.
    """
    config = as_published()
    if size is not None:
        _resize(config, size)
    config.inner.tx = "muon"
    config.inner.learning_rate = 0.006
    config.outer.learning_rate = 1.0
    config.outer.momentum = 0.6
    config.outer.average = 0.5  # the reported model is a running average over rounds
    return config


def _resize(config: ConfigDict, size: str) -> None:
    """Set a larger model, and text, batches and tokens for it."""
    layers = LAYERS[size]
    config.num_rounds = None  # tokens end the run
    config.num_tokens = MILLION_TOKENS[size] * 1_000_000

    config.model.vocab_size = 32_000
    config.model.width = 64 * layers
    config.model.num_layers = layers
    config.model.num_heads = layers // 2  # 128 numbers per head, as fast attention kernels want
    config.model.num_kv_heads = layers // 2
    # 8/3 of the width, as in Llama, rounded down to a multiple of 16.
    config.model.mlp_width = 8 * config.model.width // 3 // 16 * 16
    config.model.max_length = 512  # tokens
    config.model.dtype = "bfloat16"

    config.data.path = ""  # to be set: a file, folder or glob; docs/guides/data.md has the kinds
    config.data.tokenizer = ""  # to be set: a tokenizer.json, a *.model, or a name on the hub
    config.data.sequence_length = 512  # tokens
    config.data.num_sequences = None

    config.ensemble.num_workers = 8
    config.inner.steps_per_round = 110
    config.inner.warmup_updates = 200
    config.inner.clip_norm = 1.0
    config.batching.initial_batch_size = 16  # sequences per worker; this number stays constant
