"""Trials of the study (configs/study.py): 0.08 M parameters, the standard library, seed 0.

Command:   python scripts/compare.py --config configs/study_small_tuning.py
             --results docs/study/small_tuning.jsonl
Hardware:  two CPU cores, about three hours; stopped, the same command goes on
"""

from adloco_jax.study.compare import Comparison
from configs.study import tuning


def get_comparison() -> Comparison:
    """What runs."""
    return tuning("small", "stdlib")
