"""The study's trials at 0.08 M parameters on prose: four of each baseline on seed 0.

studies/compare_study.py says what the methods are. The trials of the baselines are their best
trials on the text of the standard library. Ours has the setting that was chosen on the standard
library, because one setting should fit both texts.

Before:    adloco prepare PROSE --out runs/prose --sequence-length 64; PROSE is a folder of C4
           shards and film reviews as JSON lines, 9.8 MB
Command:   adloco compare studies/compare_study_prose.py
             --results studies/prose_tuning.jsonl
Hardware:  two CPU cores, about a minute for each run; the same command continues
Results:   docs/RESULTS.md
"""

from adloco_jax.study.compare import Comparison
from studies.compare_study import tuning
from studies.compare_study_again import named
from studies.compare_study_small import OURS

TEXT = "runs/prose"
TRIED = (
    "one worker: rate 0.002, 6600 updates",
    "one worker: rate 0.002, 13200 updates",
    "one worker: rate 0.004, 6600 updates",
    "one worker: rate 0.004, 13200 updates",
    "data parallel: rate 0.004, 2640 updates",
    "data parallel: rate 0.004, 5280 updates",
    "data parallel: rate 0.008, 2640 updates",
    "data parallel: rate 0.008, 5280 updates",
    "DiLoCo: average, 110 steps, decay",
    "DiLoCo: 110 steps, momentum 0.6, decay",
    "DiLoCo: 220 steps, momentum 0.6",
    "DiLoCo: Nesterov, 440 steps, constant",
    "trunk: 0.1, 220 steps, Nesterov",
    "trunk: 0.1, 440 steps, Nesterov",
    "trunk: 0.1, 220 steps, Nesterov, decay",
    "trunk: 0.25, 440 steps, decay",
    "QSR: from 110, 10 times the rate",
    "QSR: from 110, 20 times the rate",
    "QSR: from 440, 10 times the rate",
    "QSR: from 440, 20 times the rate",
    OURS,
)


def get_comparison() -> Comparison:
    """Return the comparison of the trials, on seed 0."""
    return tuning("small", TEXT, named("small", TRIED))
