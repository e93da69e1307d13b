"""The study's trials with Muon inside and a running average of rounds, on seeds 0, 6 and 7.

studies/compare_study.py says what the methods are. A pilot outside this file (docs/LOG.md) had
found that DiLoCo at a constant rate, read out as an average of its last rounds, needs fewer updates
than with a falling rate, and that Muon helps every method. Here each method has Muon at 0.004 and
the running average 0.7 in place of the falling rate; what else it has won on these seeds before, in
studies/compare_study_again.py. The trials are in the order of their worth, because the time may not
suffice for all. They end soon after the pilot's runs had reached 1.55 nats per byte.

This file was written and committed before its runs.

Command:   adloco compare studies/compare_average.py --results studies/average.jsonl
Hardware:  two CPU cores, a minute or two for each run; the same command continues
Results:   docs/LOG.md; `python studies/tables.py claims studies/average.jsonl --target 1.6 1.55`
"""

import dataclasses

from adloco_jax.study.compare import Comparison
from studies.compare_study import BATCH, ONE, STEPS, WORKERS, batch, budget, steps, tuning
from studies.compare_study_again import LATE, MILD, _diloco, _ours, _rate

AVERAGED = {"outer.average": 0.7}
MUON = {"inner.tx": "muon", **_rate(4e-3), **AVERAGED}
ONE_BATCH = {**ONE, **steps(STEPS), **batch(WORKERS * BATCH)}  # data parallel

TRIALS = {
    "DiLoCo: 110 steps, momentum 0.6, Muon": _diloco(STEPS, budget("small", 2750), MILD, MUON),
    "ours: rounds of 220, Muon": _ours(1.6, 220, 220, budget("small", 2350), LATE, MUON),
    "ours, 110: rounds of 110, Muon": _ours(1.6, 110, 110, budget("small", 2150), LATE, MUON),
    "one worker: Muon": {**ONE, **steps(STEPS), **budget("small", 6600, workers=1), **MUON},
    "data parallel: Muon": {**ONE_BATCH, **budget("small", 2200), **MUON},
    "DiLoCo, AdamW: 110 steps": _diloco(STEPS, budget("small", 4400), MILD, AVERAGED),
    "ours, AdamW: rounds of 220": _ours(1.6, 220, 220, budget("small", 3500), LATE, AVERAGED),
    "data parallel, 0.01: Muon": {**ONE_BATCH, **budget("small", 2200), **MUON, **_rate(1e-2)},
}


def get_comparison() -> Comparison:
    """Return the comparison of the trials."""
    trials = tuning("small", "stdlib", TRIALS, seeds=(0, 6, 7))
    return dataclasses.replace(trials, target_losses=(1.65, 1.6, 1.55))
