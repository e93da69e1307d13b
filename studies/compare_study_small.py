"""The study's main runs at 0.08 M parameters on the standard library: seeds that chose nothing.

DiLoCo, the trunk and ours run as studies/compare_study_again.py chose on seeds 0, 6 and 7 for 1.6
nats per byte, the others as studies/compare_study.py did on seed 0; no run with QSR or a linear
ramp and none as published reached 1.6, so of these the trial with the lowest loss runs. Of DiLoCo
the setting with the fewest communications runs, too.

Command:   adloco compare studies/compare_study_small.py
             --results studies/small.jsonl
Hardware:  two CPU cores, about a minute for each of 70 runs; stopped, the same command goes on
Answers:   docs/RESULTS.md
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
    """What runs."""
    return over_seeds("small", "stdlib", named("small", CHOSEN), seeds=(21, 22, 23, 24, 25))
