"""Quantised outer gradients: DiLoCo in three precisions and two settings, with three seeds.

Command:   adloco compare studies/compare_precision.py --processes 2
Hardware:  two CPU cores, about 25 minutes
Model:     as in configs/compare_quick.py, with the same text, workers and budgets of tokens
Results:   docs/LOG.md
"""

from adloco_jax.configs import compare_quick
from adloco_jax.study.compare import Comparison

BELOW_FLOAT32 = ("bfloat16", "int4")


def get_comparison() -> Comparison:
    """Return the comparison of three precisions, for two settings of DiLoCo.

    One setting has an outer Nesterov step and short rounds. The other averages the workers, after
    long rounds.
    """
    variants = {}
    for name, overrides in {"DiLoCo": {}, "DiLoCo, tuned": compare_quick.TUNED}.items():
        variants[name] = overrides
        for precision in BELOW_FLOAT32:
            variants[f"{name}, {precision}"] = overrides | {"outer.precision": precision}
    return Comparison(
        base=compare_quick.get_base(),
        variants=variants,
        baseline="DiLoCo",
        target_losses=(1.7, 1.66, 1.62),  # nats per byte
        seeds=(1, 2, 3),
    )
