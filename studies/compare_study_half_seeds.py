"""The study's main runs at 0.61 M parameters on the standard library, on untuned seeds.

The baselines have the settings of studies/compare_study_half.py that reached 1.32 nats per byte
with the fewest serial updates on seed 0. 1.32 is the lowest loss, in steps of 0.02, that both
DiLoCo and data parallelism reached on seed 0. Ours has the setting that was chosen at 0.08 M
parameters.

Command:   adloco compare studies/compare_study_half_seeds.py
             --results studies/half.jsonl
Hardware:  two CPU cores, about five minutes for each of 18 runs; the same command continues
Results:   docs/RESULTS.md
"""

import dataclasses

from adloco_jax.study.compare import Comparison
from studies.compare_study import tuning
from studies.compare_study_again import named
from studies.compare_study_small import OURS

CHOSEN = (
    OURS,
    "DiLoCo: average, 110 steps, decay",
    "trunk: 0.1, 220 steps, Nesterov, decay",
    "one worker: rate 0.001, 13200 updates",
    "data parallel: rate 0.002, 2640 updates",
    "QSR: from 110, 10 times the rate",
)


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    runs = tuning("half", "stdlib", named("half", CHOSEN), seeds=(21, 22, 23))
    return dataclasses.replace(runs, target_losses=(1.5, 1.4, 1.32))
