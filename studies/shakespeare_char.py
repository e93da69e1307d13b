"""nanoGPT's Shakespeare recipe for CPUs, on one worker: 2,000 updates of 12 x 64 characters.

Command:   python -m adloco_jax.main --config studies/shakespeare_char.py
             --config.data.path=FILE
             By default, FILE is text/tinyshakespeare.txt in the folder that the environment
             variable ADLOCO_DATA_DIR names, or in the current folder. The file has 1,115,394
             characters; it is input.txt in github.com/karpathy/char-rnn, data/tinyshakespeare.
Hardware:  two CPU cores, some minutes
Expected:  a loss of about 1.70 nats per character on held-out text, and of 1.52 in training (mean
           of the last round)
Source:    README and train.py of github.com/karpathy/nanoGPT, which reaches 1.88 nats per character
Differs:   the model is a Llama that reads bytes; studies/conformance.md has all differences
"""

import os
from pathlib import Path

from ml_collections import ConfigDict

from adloco_jax.config import default_config


def get_config() -> ConfigDict:
    """Return a config with plain AdamW on one worker.

    The outer step only copies the parameters of the worker.
    """
    config = default_config()
    # The run reads 1,536,000 characters, which is about one and a half times the training text.
    config.num_rounds = 8

    config.model.width = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    # Three matrices of this width are as large as the recipe's two matrices of width 4 x 128.
    config.model.mlp_width = 344
    config.model.max_length = 64  # characters

    config.data.source = "text"
    folder = os.environ.get("ADLOCO_DATA_DIR", "")
    config.data.path = str(Path(folder, "text", "tinyshakespeare.txt"))
    config.data.sequence_length = 64  # characters of one byte each
    config.data.heldout_frac = 0.1  # this fraction of the file, at its end, is held out

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 1
    config.outer.tx = "sgd"
    config.outer.learning_rate = 1.0

    config.inner.steps_per_round = 250  # as many as between two evaluations in the recipe
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
    # This is more than there are held-out rows. So all of them are evaluated, except the 32 rows on
    # which decisions about merges would depend (guard rows).
    config.eval.num_sequences = 2000
    config.checkpoint.keep = 1
    return config
