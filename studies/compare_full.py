"""AdLoCo, AdLoCo without one of its parts at a time, and the methods it is compared with.

Command:   adloco compare studies/compare_full.py --processes 2
Hardware:  two CPU cores, under two hours; the same command continues a stopped comparison
Model:     as in configs/compare_quick.py, whose variants are included
"""

from adloco_jax.configs.compare_quick import ADLOCO, AVERAGE, RAMP, TUNED, batch, get_base
from adloco_jax.study.compare import Comparison


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    # If the batch-size test requests more sequences, ADLOCO lengthens rounds. With these settings
    # batches grow instead.
    grown = {"batching.max_batch_size": 24, "batching.buckets": (4, 8, 16, 24)}
    capped = {"batching.batch_cap": 24}
    return Comparison(
        base=get_base(),
        variants={
            "data parallel": {
                "inner.tx": "sgd",
                "inner.learning_rate": 1.0,
                "outer.tx": "adamw",
                "outer.learning_rate": 2e-3,
                "inner.steps_per_round": 1,
                "eval.every_rounds": 200,
                "log.every_rounds": 200,
            },
            "LocalSGD": {"inner.tx": "sgd", "inner.learning_rate": 0.5, **AVERAGE},
            "DiLoCo": {},
            "DiLoCo, batch 8": batch(8),
            "DiLoCo, batch 16": batch(16),
            "DiLoCo, 50 steps": {"inner.steps_per_round": 50},
            "DiLoCo, tuned": TUNED,
            "DiLoCo, averages, 800 steps": TUNED | {"inner.steps_per_round": 800},
            "DiLoCo, averages, 2,000 steps": TUNED | {"inner.steps_per_round": 2000},
            "DiLoCo, one worker": {"ensemble.num_workers": 1},
            "DiLoCo, ramp": RAMP,
            "AdLoCo, one trainer": ADLOCO | {"ensemble.num_trainers": 1},
            "AdLoCo": ADLOCO,
            "AdLoCo, batches grow": ADLOCO | grown | {"inner.max_steps_per_round": None} | capped,
            "AdLoCo, fixed batch": ADLOCO | {"batching.test": "constant"},
            "AdLoCo, no merging": ADLOCO | {"merge.policy": "none"},
            "AdLoCo, no growth": ADLOCO | {"inner.max_steps_per_round": None},
            # The method of the paper's table A.2. The steps of a round and the learning rate are
            # those of the base, because the model is trained from random weights.
            "AdLoCo, as in the paper": {
                "ensemble.num_trainers": 4,
                "outer.tx": "sgd",
                "outer.learning_rate": 0.5,
                "batching.test": "norm",
                "merge.policy": "worst_with_worst",
                "merge.every_rounds": 3,
            },
        },
        baseline="DiLoCo",
        target_losses=(1.7, 1.66, 1.62),
        seeds=(1, 2, 3),
    )
