"""The study's main runs at 0.08 M parameters on the standard library, on untuned seeds.

studies/compare_study.py says what the methods are. DiLoCo, the trunk and ours have the settings
with the fewest serial updates to 1.6 nats per byte in studies/compare_study_again.py, on seeds 0, 6
and 7. The other methods have settings that were chosen in the same way on seed 0, from the trials
of studies/compare_study.py. QSR, the linear ramp and the published method did not reach 1.6 in any
trial. For each of them, the trial with the lowest loss runs here. DiLoCo runs with a second setting
too: the one with the fewest communications.

Command:   adloco compare studies/compare_study_small.py
             --results studies/small.jsonl
Hardware:  two CPU cores, about a minute for each of 70 runs; the same command continues
Results:   docs/RESULTS.md
"""

from adloco_jax.study.compare import Comparison
from studies.compare_study import over_seeds
from studies.compare_study_again import named

OURS = "ours: eta 1.6, rounds of 220, Nesterov"
CHOSEN = (
    OURS,
    "DiLoCo: 110 steps, momentum 0.6, decay",
    "trunk: 0.1, 220 steps, Nesterov, decay",
    "DiLoCo, fewest communications: Nesterov, 440 steps, constant",
    "one worker: rate 0.002, 13200 updates",
    "data parallel: rate 0.004, 2640 updates",
    "QSR: from 110, 10 times the rate",
    "linear ramp: from 110, constant",
    "AdLoCo as published: eta 0.4",
)


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    return over_seeds("small", "stdlib", named("small", CHOSEN), seeds=(21, 22, 23, 24, 25))
