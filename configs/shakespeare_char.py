"""nanoGPT's Shakespeare recipe for CPUs with one worker: 2,000 updates of 12 x 64 characters.

Command:   python -m adloco_jax.main --config configs/shakespeare_char.py
             --config.data.path=FILE
             The default is text/tinyshakespeare.txt in the folder ADLOCO_DATA_DIR, or in the
             current folder. The file is input.txt of github.com/karpathy/char-rnn,
             data/tinyshakespeare: 1,115,394 characters.
Hardware:  two CPU cores, some minutes
Expected:  about 1.70 nats per character on held-out text, 1.52 in training over the last round
Source:    README and train.py of github.com/karpathy/nanoGPT; its loss is 1.88 nats per character
Differs:   the model is a Llama with a byte vocabulary; docs/conformance.md has all differences
"""

import os
from pathlib import Path

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """Plain AdamW on one worker: the outer step only copies the worker's parameters."""
    config = default_config()
    config.num_rounds = 8  # 1,536,000 characters, about one and a half times the training text

    config.model.width = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_width = 344  # three matrices, as large as the recipe's two of 4 x 128
    config.model.max_length = 64  # characters

    config.data.source = "text"
    folder = os.environ.get("ADLOCO_DATA_DIR", "")
    config.data.path = str(Path(folder, "text", "tinyshakespeare.txt"))
    config.data.sequence_length = 64  # characters, a byte each
    config.data.heldout_frac = 0.1  # from the end of the file

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 1
    config.outer.tx = "sgd"
    config.outer.learning_rate = 1.0

    config.inner.steps_per_round = 250  # the recipe evaluates as often
    config.inner.learning_rate = 1e-3
    config.inner.warmup_updates = 100
    config.inner.schedule = "cosine"
    config.inner.final_lr_frac = 0.1
    config.inner.weight_decay = 0.1
    config.inner.beta2 = 0.99
    config.inner.clip_norm = 1.0

    config.batching.test = "constant"
    config.batching.initial_batch_size = 12
    config.batching.max_batch_size = 12
    config.batching.buckets = (12,)
    config.batching.batch_cap = 12
    config.merge.policy = "none"
    config.eval.num_sequences = 2000  # all held-out rows except the merge guard's 32
    config.checkpoint.keep = 1
    return config
