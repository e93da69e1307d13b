"""The loss of DiLoCo for several numbers of workers, at 0.39 M parameters, on untuned seeds.

An untuned seed is one that no choice of a setting has used. Each method has the inner and outer
learning rates that gave it the lowest loss on seed 0 (studies/compare_order.py).

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
"""The chosen trials, from the lowest to the highest loss in the paper."""


def get_comparison() -> Comparison:
    """Return the comparison: variants, seeds, and the losses for which costs are compared."""
    trials = compare_order.get_comparison()
    variants = {name.split(":")[0]: trials.variants[name] for name in CHOSEN}
    return dataclasses.replace(trials, variants=variants, baseline="data parallel", seeds=(1, 2, 3))
