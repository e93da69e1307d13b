"""The study's third choice, among learning rates, shorter first rounds and a pool of two to begin.

The second (configs/compare_study_again.py) left ours at 4,180 serial updates to 1.6 against
DiLoCo's 3,740, and neither had been tried with another inner rate. The rule is the same: the fewest
serial updates to 1.6 by the median of seeds 0, 6 and 7, ties within 5 % by communications. The
winners, if they are better than those before, run with seeds 21 to 25, which no choice has seen.

Command:   python scripts/compare.py --config configs/compare_study_rates.py
             --results docs/study/rates.jsonl
Hardware:  two CPU cores, about half an hour; stopped, the same command goes on
Answers:   docs/RESULTS.md
"""

from collections.abc import Mapping
from typing import Any

from adloco_jax.configs.compare_quick import AVERAGE, batch
from adloco_jax.configs.compare_study import (
    BATCH,
    LINEAR,
    ONE,
    STEPS,
    WORKERS,
    budget,
    get_base,
    growing,
    steps,
    trunk,
)
from adloco_jax.study.compare import Comparison

FALLING = {**AVERAGE, **LINEAR, **budget("small", 3960)}


def _rate(rate: float) -> dict[str, float]:
    return {"inner.learning_rate": rate}


def _ours(eta: float, first: int, longest: int, **more: Any) -> dict[str, Any]:
    grown = growing(eta=eta, first=first * STEPS, longest=longest * STEPS)
    return {**FALLING, **grown, **more}


DILOCO = {**AVERAGE, **LINEAR, **steps(STEPS), **budget("small", 5280)}
TRUNK = {**FALLING, **steps(4 * STEPS), **trunk(0.25)}
TRIALS: Mapping[str, Mapping[str, Any]] = {
    "DiLoCo: 110 steps, decay, rate 0.001": DILOCO | _rate(1e-3),
    "DiLoCo: 110 steps, decay, rate 0.003": DILOCO | _rate(3e-3),
    "ours: eta 1.6, rounds 110 to 440, decay": _ours(1.6, 1, 4),
    "ours: eta 3.2, rounds 110 to 440, decay": _ours(3.2, 1, 4),
    "ours: eta 3.2, rounds 220 to 440, decay, rate 0.001": _ours(3.2, 2, 4) | _rate(1e-3),
    "ours: eta 3.2, rounds 220 to 440, decay, rate 0.003": _ours(3.2, 2, 4) | _rate(3e-3),
    "ours: eta 1.6, rounds 110 to 440, decay, from two workers": _ours(1.6, 1, 4)
    | {"ensemble.initial_workers": 2},
    "trunk: 0.25, 440 steps, decay, rate 0.001": TRUNK | _rate(1e-3),
    "trunk: 0.25, 440 steps, decay, rate 0.003": TRUNK | _rate(3e-3),
    "one worker: 13200 updates, rate 0.001": {
        **ONE,
        **LINEAR,
        **steps(4 * STEPS),
        **budget("small", 13200, workers=1),
        **_rate(1e-3),
    },
    "data parallel: 2640 updates, rate 0.002": {
        **ONE,
        **LINEAR,
        **steps(2 * STEPS),
        **batch(WORKERS * BATCH),
        **budget("small", 2640),
        **_rate(2e-3),
    },
}


def get_comparison() -> Comparison:
    """The trials."""
    return Comparison(
        base=get_base("small", "stdlib"),
        variants=TRIALS,
        baseline=next(iter(TRIALS)),
        target_losses=(1.7, 1.65, 1.6),
        seeds=(0, 6, 7),
    )
