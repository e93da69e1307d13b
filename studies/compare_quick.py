"""AdLoCo compared with DiLoCo at small size: five variants, three seeds, real text, no download.

Command:   adloco compare studies/compare_quick.py --processes 2
Hardware:  two CPU cores, under 20 minutes
Model:     a Llama of 75,600 parameters that reads bytes; four workers
Text:      the standard library of the Python that runs the command
Results:   studies/published.md
"""

from ml_collections import ConfigDict

from adloco_jax.config import default_config
from adloco_jax.study.compare import Comparison

# The outer step takes the average of the workers. DiLoCo's Nesterov momentum was worse here,
# because rounds are long and few.
AVERAGE = {"outer.tx": "sgd", "outer.learning_rate": 1.0}

ADLOCO = {
    **AVERAGE,
    "ensemble.num_trainers": 4,  # each has one worker, so the first round communicates nothing
    "batching.test": "norm",
    "batching.eta": 0.15,  # with the paper's 0.8, batches hardly grow in a run as short as this
    "batching.smoothing": 0.5,  # less than 0.9, because few long rounds have few tests to average
    "batching.max_growth": 6,
    "batching.growth": ("rounds", "batch"),
    "batching.batch_cap": 4,
    "inner.max_steps_per_round": 6 * 440,
    "merge.policy": "worst_with_worst",
    "merge.every_rounds": 1,
    "merge.width": 4,
    # Trainers that start from random weights are soon too far apart to be averaged, and their merge
    # is refused. Then only the trainer with the largest requested batch stays in the run.
    "merge.max_barrier": 0.0,
    "merge.on_refusal": "retire",
    "num_tokens": 8_000_000,
}

# DiLoCo was tuned on seed 0 (studies/LOG.md) over batches of 4, 8 and 16 sequences, rounds of 100
# to 2,640 steps, learning rates 2e-3 and 4e-3, and Nesterov or averages. To reach a loss, rounds of
# 1,200 steps need fewer communications than rounds of 800 steps, and fewer tokens than rounds of
# 1,600 steps.
TUNED = {**AVERAGE, "inner.steps_per_round": 1200, "num_tokens": 6_100_000}

RAMP = {
    "batching.test": "ramp",
    "batching.ramp": ((0, 4), (4, 8), (8, 16)),
    "batching.max_batch_size": 16,
    "batching.buckets": (4, 8, 16),
}


def batch(size: int) -> dict[str, object]:
    """Return settings that fix the batch of each worker at `size` sequences."""
    return {
        "batching.initial_batch_size": size,
        "batching.max_batch_size": size,
        "batching.buckets": (size,),
        "batching.batch_cap": size,
    }


def get_base() -> ConfigDict:
    """Return the config that all variants change: DiLoCo with AdLoCo's initial sizes.

    The sizes are the batch, the number of workers and the steps of a round.
    """
    config = default_config()
    config.num_tokens = 4_900_000

    config.model.width = 48
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 128
    config.model.max_length = 64  # tokens

    config.data.sequence_length = 64  # bytes

    config.ensemble.num_trainers = 1
    config.ensemble.num_workers = 4
    config.inner.steps_per_round = 440
    config.inner.learning_rate = 2e-3  # with small batches and long rounds better than 4e-3
    config.inner.weight_decay = 0.0
    config.batching.test = "constant"
    config.batching.initial_batch_size = 4
    config.batching.max_batch_size = 4
    config.batching.buckets = (4,)
    config.merge.policy = "none"
    config.eval.num_sequences = 256
    config.checkpoint.keep = 1
    return config


def get_comparison() -> Comparison:
    """Return the comparison: its variants, its seeds, and the losses for which costs are compared.

    The cost of a variant is what its runs spend until they reach such a loss.
    """
    return Comparison(
        base=get_base(),
        variants={
            "DiLoCo": {},
            "DiLoCo, tuned": TUNED,
            "DiLoCo, ramp": RAMP,
            "AdLoCo, one trainer": ADLOCO | {"ensemble.num_trainers": 1},
            "AdLoCo": ADLOCO,
        },
        baseline="DiLoCo",
        target_losses=(1.7, 1.66, 1.62),  # nats per byte
        seeds=(1, 2, 3),  # every choice above was made on seed 0
    )
