"""The study's trials at 0.61 M parameters on the standard library: two of each baseline on seed 0.

studies/compare_study.py says what the methods are. The trials of the baselines are their best
trials at 0.08 M parameters, with half the learning rate. Ours has the setting that was chosen at
0.08 M parameters, because one setting should fit both sizes.

Command:   adloco compare studies/compare_study_half.py
             --results studies/half_tuning.jsonl
Hardware:  two CPU cores, about 20 minutes for each run; the same command continues
Results:   docs/RESULTS.md
"""

from adloco_jax.study.compare import Comparison
from studies.compare_study import tuning
from studies.compare_study_again import named
from studies.compare_study_small import OURS

TRIED = (
    "one worker: rate 0.001, 13200 updates",
    "one worker: rate 0.002, 13200 updates",
    "data parallel: rate 0.002, 2640 updates",
    "data parallel: rate 0.004, 2640 updates",
    "DiLoCo: average, 110 steps, decay",
    "DiLoCo: 110 steps, momentum 0.6, decay",
    "trunk: 0.1, 220 steps, Nesterov, decay",
    "trunk: 0.25, 440 steps, decay",
    "QSR: from 110, 10 times the rate",
    "QSR: from 110, 20 times the rate",
    OURS,
)


def get_comparison() -> Comparison:
    """Return the comparison of the trials, on seed 0."""
    return tuning("half", "stdlib", named("half", TRIED))
