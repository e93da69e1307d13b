"""The study's main runs at 0.08 M parameters on the standard library: five seeds.

The settings are those that configs/compare_study.py's trials on seed 0 chose for 1.6 nats per byte:
python scripts/study_tables.py choose docs/study/small_tuning.jsonl --target 1.6. DiLoCo runs with
two more of its settings: the one that got furthest, and the one that reached 1.6 with the fewest
communications. No run with QSR or a linear ramp and none as published reached 1.6: of these the
trial with the lowest loss runs.

Command:   python scripts/compare.py --config configs/compare_study_small.py
             --results docs/study/small.jsonl
Hardware:  two CPU cores, about a minute for each of 70 runs; stopped, the same command goes on
Answers:   docs/RESULTS.md
"""

from adloco_jax.configs.compare_study import over_seeds
from adloco_jax.study.compare import Comparison

CHOSEN = {
    "one worker": "rate 0.002, 13200 updates",
    "data parallel": "rate 0.004, 2640 updates",
    "DiLoCo": "average, 110 steps, decay",
    "DiLoCo, got furthest": "average, 110 steps, constant",
    "DiLoCo, fewest communications": "Nesterov, 440 steps, constant",
    "trunk": "0.1 of the tokens, average, constant",
    "ours": "eta 3.2, tokens of 3960 updates, decay",
    "QSR": "from 110, 10 times the rate",
    "linear ramp": "from 110, constant",
    "AdLoCo as published": "eta 0.4",
}


def get_comparison() -> Comparison:
    """What runs."""
    return over_seeds("small", "stdlib", CHOSEN, seeds=(1, 2, 3, 4, 5))
