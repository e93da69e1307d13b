"""Tuning of DiLoCo for several numbers of workers M, at 0.39 M parameters.

How does the loss depend on M? Scaling Laws (arXiv 2503.09799) reports these losses at 35 M
parameters, for a fixed batch, equal tokens and 30 inner updates per round: M = 1 worker 3.482, data
parallel 3.485, M = 2 3.508, M = 4 3.554, M = 8 3.621.

These settings are the paper's: AdamW with beta2 0.99 and decay 1 / updates, gradients clipped to 1,
a learning rate that falls by a cosine to a twentieth, outer Nesterov momentum 0.9 at the paper's
best rate for each M, and a batch that is divided among the workers. These settings differ: the
model's size, bytes instead of tokens, a batch of 32 rows of 64 bytes, a warm-up of 5 % of the
updates, and the text. It is so long that a run (20 tokens per parameter) does not read all of it.

Learning rates are tuned on seed 0. First the inner rate is tuned at the paper's outer rate for each
M; the best inner rate is 1e-3, except for M = 8. Then the outer rate is tuned at the inner rate
1e-3. For M = 8 the paper's outer rate of 1 is too high for this model at any inner rate, so the
inner rate is tuned again at the best outer rate. For each M, the best pair of rates runs with seeds
1, 2 and 3 in studies/track.py.

Command:   adloco compare studies/compare_order.py
             --results studies/order_tuning.jsonl
Hardware:  two CPU cores, about three minutes for each of 39 runs; the same command continues
Results:   docs/conformance.md
"""

from typing import Any

from ml_collections import ConfigDict

from adloco_jax.config import default_config
from adloco_jax.configs.compare_quick import AVERAGE, batch
from adloco_jax.study.compare import Comparison

ROUNDS, STEPS = 129, 30
BATCH, LENGTH = 32, 64  # rows, and bytes of a row
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
OUTER_RATES = {1: 0.6, 2: 0.6, 4: 0.6, 8: 1.0}  # the paper's best at 35 M, by M
OTHER_OUTER_RATES = (0.2, 0.4, 0.6, 0.8, 1.0)
# More trials for M = 8, as pairs of inner and outer rate (None: the paper's outer rate). At the
# paper's outer rate the lowest inner rate of RATES was the best, so the first trial has a lower
# one. The other two trials have the best outer rate, and the inner rates below and above the best.
MORE_OF_8 = ((2.5e-4, None), (5e-4, 0.6), (2e-3, 0.6))


def get_base() -> ConfigDict:
    """Return the config with the settings of all methods.

    A run trains on 7.9 M tokens, which are 20 for each of 394,112 parameters.
    """
    config = default_config()
    config.num_rounds = ROUNDS
    config.model.width = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.mlp_width = 256
    config.model.max_length = LENGTH
    config.data.sequence_length = LENGTH
    config.ensemble.num_trainers = 1
    config.inner.steps_per_round = STEPS
    config.inner.beta2 = 0.99
    config.inner.weight_decay = 1 / (ROUNDS * STEPS)
    config.inner.clip_norm = 1.0
    config.inner.warmup_updates = ROUNDS * STEPS // 20
    config.inner.schedule = "cosine"
    config.inner.final_lr_frac = 0.05
    config.batching.test = "constant"
    config.batching.max_batch_size = BATCH  # each method sets its own
    config.merge.policy = "none"
    config.eval.every_rounds = 43
    config.eval.num_sequences = 2000
    config.checkpoint.keep = 1
    config.checkpoint.every_s = 1e6
    config.log.every_rounds = 10
    return config


def methods() -> dict[str, dict[str, Any]]:
    """Return the changes of each method, by its name, at the paper's outer rate.

    Data parallelism is one worker with the whole batch. The other methods are DiLoCo with M
    workers.
    """
    found = {"data parallel": {"ensemble.num_workers": 1, **AVERAGE, **batch(BATCH)}}
    for workers, rate in OUTER_RATES.items():
        found[f"M = {workers}"] = {
            "ensemble.num_workers": workers,
            "outer.tx": "nesterov",
            "outer.learning_rate": rate,
            "outer.momentum": 0.9,
            **batch(BATCH // workers),
        }
    return found


def with_rates(name: str, rate: float, outer: float | None = None) -> dict[str, dict[str, Any]]:
    """Return a dictionary with one trial: its name, and its changes.

    The trial is the method `name` with the inner rate `rate` and, if it is given, the outer rate
    `outer`.
    """
    changes = {**methods()[name], "inner.learning_rate": rate}
    if outer is None:
        return {f"{name}: rate {rate:g}": changes}
    changes["outer.learning_rate"] = outer
    return {f"{name}: rate {rate:g}, outer {outer:g}": changes}


def get_comparison() -> Comparison:
    """Return the comparison of the trials, on seed 0."""
    variants = {}
    for name in methods():
        for rate in RATES:
            variants |= with_rates(name, rate)
    for workers, paper in OUTER_RATES.items():
        for outer in OTHER_OUTER_RATES:
            if outer != paper:
                variants |= with_rates(f"M = {workers}", 1e-3, outer)
    for rate, outer in MORE_OF_8:
        variants |= with_rates("M = 8", rate, outer)
    return Comparison(
        base=get_base(),
        variants=variants,
        baseline="data parallel: rate 0.002",
        target_losses=(1.7, 1.6, 1.5),
        seeds=(0,),
    )
