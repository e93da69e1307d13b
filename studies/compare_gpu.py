"""The study of docs/RESULTS.md at 35 M and 150 M parameters, for GPUs.

Command:   SIZE=35m adloco compare studies/compare_gpu.py --results studies/gpu_35m.jsonl
           Environment variables: SIZE=150m selects the larger model. If
           C4=/path/to/c4-train.*.json.gz is set, the text is read from these local files instead of
           the hub. TOKENIZER names a tokenizer of at most 32,000 ids.
Before:    adloco plan studies/compare_gpu.py shows the memory and the tokens of one run
Hardware:  one GPU or more; not run yet
Model:     a Llama of 35.2 M or 148 M parameters, 20 tokens per parameter, 8 workers of batch 16
"""

import os
from collections.abc import Mapping

from ml_collections import ConfigDict

from adloco_jax.config import default_config
from adloco_jax.study.cluster import Cluster
from adloco_jax.study.compare import Comparison
from studies.compare_study import AVERAGE, LINEAR, NESTEROV, batch, growing, qsr, steps, trunk
from studies.compare_study_again import MILD, SKIP

WORKERS, BATCH, LENGTH = 8, 16, 512
STEPS = 50  # updates of the shortest round; the lengths of other rounds are multiples of it
WIDTH = {"35m": 384, "150m": 768}
LAYERS = {"35m": 6, "150m": 14}
PARAMS = {"35m": 35_200_000, "150m": 148_000_000}
SIZE = os.environ.get("SIZE", "35m")


def get_base() -> ConfigDict:
    """Return the config of DiLoCo, of which the other methods change some settings."""
    config = default_config()
    config.num_tokens = 20 * PARAMS[SIZE]
    config.model.vocab_size = 32_000
    config.model.width = WIDTH[SIZE]
    config.model.num_layers = LAYERS[SIZE]
    config.model.num_heads = config.model.num_kv_heads = WIDTH[SIZE] // 64
    config.model.mlp_width = WIDTH[SIZE] * 8 // 3
    config.model.max_length = config.data.sequence_length = LENGTH
    config.model.dtype = "bfloat16"
    config.data.tokenizer = os.environ.get("TOKENIZER", "keeeeenw/MicroLlama")
    if shards := os.environ.get("C4"):
        config.data.source, config.data.path = "jsonl", shards
    else:
        config.data.source, config.data.path, config.data.name = "hf", "allenai/c4", "en"
    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = WORKERS
    config.inner.learning_rate = 1e-3
    config.inner.warmup_updates = 200
    config.inner.beta2 = 0.95
    config.inner.clip_norm = 1.0
    config.inner.steps_per_round = STEPS
    config.batching.test = "constant"
    config.update_from_flattened_dict({**batch(BATCH), **LINEAR})
    config.batching.smoothing = 0.5
    config.merge.policy = "none"
    config.eval.num_sequences = 512
    config.checkpoint.keep = 1
    return config


def _variants() -> Mapping[str, Mapping[str, object]]:
    one = {**AVERAGE, "ensemble.num_workers": 1}
    ours = growing(eta=1.6, first=2 * STEPS, longest=2 * STEPS)
    return {
        "one worker": one,
        "data parallel": {**one, **batch(WORKERS * BATCH)},
        "DiLoCo, momentum 0.6, 50 steps": MILD,
        "DiLoCo, Nesterov, 200 steps": {**NESTEROV, **steps(4 * STEPS)},
        "trunk of 0.1": {**NESTEROV, **SKIP, **steps(2 * STEPS), **trunk(0.1)},
        "QSR": {**AVERAGE, **qsr(0.01)},
        "ours": {**NESTEROV, **SKIP, **ours, "inner.schedule": "constant"},
    }


def get_config() -> ConfigDict:
    """Return the config of "ours", the method of configs/recommended.py; `adloco plan` reads it."""
    config = get_base()
    config.update_from_flattened_dict(_variants()["ours"])
    return config


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    return Comparison(
        base=get_base(),
        variants=_variants(),
        baseline="DiLoCo, momentum 0.6, 50 steps",
        target_losses=(4.0, 3.8, 3.6),
        seeds=(1, 2, 3),
        simulated=Cluster(num_params=PARAMS[SIZE], sequence_length=LENGTH),
    )
