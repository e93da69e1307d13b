"""The loss of DiLoCo for several numbers of workers, at 0.39 M parameters, on untuned seeds.

Each method has the inner and outer rates with the lowest loss in studies/compare_order.py.

Command:   adloco compare studies/compare_order_seeds.py
             --results studies/order.jsonl
Hardware:  two CPU cores, about three minutes for each of 15 runs; the same command continues
Results:   docs/conformance.md
"""

import dataclasses

from adloco_jax.study.compare import Comparison
from studies import compare_order

CHOSEN = (
    "M = 1: rate 0.001, outer 0.4",
    "data parallel: rate 0.002",
    "M = 2: rate 0.001",
    "M = 4: rate 0.001",
    "M = 8: rate 0.001, outer 0.6",
)
"""The chosen trials, in the paper's order of losses."""


def get_comparison() -> Comparison:
    """The variants, their seeds and the target losses."""
    trials = compare_order.get_comparison()
    variants = {name.split(":")[0]: trials.variants[name] for name in CHOSEN}
    return dataclasses.replace(trials, variants=variants, baseline="data parallel", seeds=(1, 2, 3))
