"""The study's confirmation: DiLoCo, the trunk and ours as chosen on three seeds, on five others.

python scripts/study_tables.py choose docs/study/again.jsonl --target 1.6 made the choice; seeds 11
to 15 had no part in it.

Command:   python scripts/compare.py --config configs/compare_study_confirm.py
             --results docs/study/confirm.jsonl
Hardware:  two CPU cores, about a quarter of an hour; stopped, the same command goes on
Answers:   docs/RESULTS.md
"""

from adloco_jax.configs.compare_study import get_base, trials
from adloco_jax.configs.compare_study_again import TRIALS
from adloco_jax.study.compare import Comparison

CHOSEN = (
    "ours: eta 3.2, rounds to 440, decay",
    "DiLoCo: average, 110 steps, decay",
    "trunk: 0.1, 220 steps, constant",
)
ALSO = ("data parallel: rate 0.004, 2640 updates", "one worker: rate 0.002, 13200 updates")


def get_comparison() -> Comparison:
    """What runs."""
    return Comparison(
        base=get_base("small", "stdlib"),
        variants={name: TRIALS[name] for name in CHOSEN}
        | {name: trials("small")[name] for name in ALSO},
        baseline=CHOSEN[1],
        target_losses=(1.7, 1.65, 1.6),
        seeds=(11, 12, 13, 14, 15),
    )
