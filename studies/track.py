"""The study's runs by the name of their record, studies/NAME.jsonl: texts, sizes, targets, seeds.

    python -m studies.track small    make the runs that its record lacks; print what each spent
    python studies/tables.py claims studies/small.jsonl --target 1.6    only print, in seconds

To add a method, add its changes of DiLoCo's config (studies/compare_study.py), as "method:
setting", to a list below, commit, and run. A record only grows: what is in it does not run again.

studies/compare_study.py says what the methods are. Seeds of a choice are 0, or 0, 6 and 7; those of
a claim (21 to 25, at 0.61 M parameters 21 to 23, with Muon 31 to 35) no choice has used. A target
loss is one that DiLoCo and data parallelism both reach, in steps of 0.02 nats per byte.

- small: DiLoCo, the trunk and ours have the settings with the fewest serial updates to 1.6 in
  studies/compare_study_again.py; the others were chosen in the same way on seed 0, in
  studies/compare_study.py. QSR, the linear ramp and the published method did not reach 1.6 in any
  trial, and have the one with the lowest loss. DiLoCo has a second setting too, the one with the
  fewest communications. 70 runs of a minute on two CPU cores.
- half_tuning, half: 0.61 M parameters. The baselines' trials are their best at 0.08 M, with half
  the learning rate; those with the fewest updates to 1.32 on seed 0 then run. Ours has the setting
  of 0.08 M, because one setting should fit both. 20 minutes for each run.
- prose_tuning, prose: C4 shards and film reviews, 9.8 MB of JSON lines in a folder PROSE; before,
  adloco prepare PROSE --out runs/prose --sequence-length 64. The baselines' trials are their best
  on the library; those with the fewest updates to 1.74 on seed 0 then run. Ours, the linear ramp
  and the published method have their settings of the library.
- order: DiLoCo's loss by its number of workers, 0.39 M parameters. Each number has the inner and
  outer rates with the lowest loss on seed 0 (studies/compare_order.py); three minutes a run.
- average: the trials with Muon and a running average (studies/compare_study_again.py).
- muon, muon_prose: their winners.
- half_muon_tuning: the same at 0.61 M parameters, at the rate of 0.08 M and at half of it, on seed
  0; the rate with the fewest updates to 1.32 then runs on fresh seeds.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from adloco_jax.cli.compare import execute
from adloco_jax.study import results
from adloco_jax.study.compare import Comparison
from studies import compare_order, line3, tables
from studies.compare_study import budget, over_seeds, trials, tuning
from studies.compare_study_again import averaged, named, settings

FRESH, FRESHER, TEXT = (21, 22, 23, 24, 25), (31, 32, 33, 34, 35), "runs/prose"
OURS = "ours: eta 1.6, rounds of 220, Nesterov"
DILOCO = "DiLoCo: average, 110 steps, decay"
TRUNK = "trunk: 0.1, 220 steps, Nesterov, decay"
QSR = "QSR: from 110, 10 times the rate"
SHARED = ("linear ramp: from 110, constant", "AdLoCo as published: eta 0.4")

SMALL = (
    OURS,
    "DiLoCo: 110 steps, momentum 0.6, decay",
    TRUNK,
    "DiLoCo, fewest communications: Nesterov, 440 steps, constant",
    "one worker: rate 0.002, 13200 updates",
    "data parallel: rate 0.004, 2640 updates",
    QSR,
    *SHARED,
)
HALF_TUNING = (
    *(f"one worker: rate {rate}, 13200 updates" for rate in (0.001, 0.002)),
    *(f"data parallel: rate {rate}, 2640 updates" for rate in (0.002, 0.004)),
    DILOCO,
    "DiLoCo: 110 steps, momentum 0.6, decay",
    TRUNK,
    "trunk: 0.25, 440 steps, decay",
    *(f"QSR: from 110, {alpha} times the rate" for alpha in (10, 20)),
    OURS,
)
ONE, PARALLEL = "one worker: rate 0.001, 13200 updates", "data parallel: rate 0.002, 2640 updates"
HALF = (OURS, DILOCO, TRUNK, ONE, PARALLEL, QSR)
PROSE_TUNING = (
    *(f"one worker: rate {r}, {n} updates" for r in (0.002, 0.004) for n in (6600, 13200)),
    *(f"data parallel: rate {r}, {n} updates" for r in (0.004, 0.008) for n in (2640, 5280)),
    DILOCO,
    "DiLoCo: 110 steps, momentum 0.6, decay",
    "DiLoCo: 220 steps, momentum 0.6",
    "DiLoCo: Nesterov, 440 steps, constant",
    *(f"trunk: 0.1, {count} steps, Nesterov" for count in (220, 440)),
    TRUNK,
    "trunk: 0.25, 440 steps, decay",
    *(f"QSR: from {count}, {a} times the rate" for count in (110, 440) for a in (10, 20)),
    OURS,
)
ONE, PARALLEL = "one worker: rate 0.002, 6600 updates", "data parallel: rate 0.004, 2640 updates"
PROSE = (OURS, DILOCO, TRUNK, ONE, PARALLEL, QSR, *SHARED)
# With Muon inside and an average of rounds: the choice of studies/tables.py on seeds 0, 6 and 7;
# for ours also the setting of fewer tokens. Declared before they ran. Targets, of medians over
# DiLoCo's: 0.9 of the sequential steps, 0.5 of the synchronisations, 0.7 of the tokens.
MUON = {
    "DiLoCo: Muon": "DiLoCo, 0.006, average 0.5: Muon",
    "ours: eta 1.6, Muon": "ours, 0.006: rounds 110 to 220, average 0.5",
    "ours, fewer tokens: eta 2.3, Muon": "ours, eta 2.3, 0.006: rounds 110 to 220, average 0.5",
    "data parallel: Muon": "data parallel, 0.01: Muon",
    "one worker: Muon": "one worker: Muon",
}
# At 0.61 M parameters: the setting at 0.08 M, the rates tried, the updates whose tokens are enough.
HALF_MUON = {
    "DiLoCo": (MUON["DiLoCo: Muon"], (3e-3, 6e-3), 2530),
    "ours": (MUON["ours: eta 1.6, Muon"], (3e-3, 6e-3), 2000),
    "data parallel": (MUON["data parallel: Muon"], (5e-3, 1e-2), 1760),
    "one worker": (MUON["one worker: Muon"], (2e-3, 4e-3), 1320),
}
# The chosen trials, from the lowest to the highest loss in the paper.
ORDER = (
    "M = 1: rate 0.001, outer 0.4",
    "data parallel: rate 0.002",
    *("M = 2: rate 0.001", "M = 4: rate 0.001"),
    "M = 8: rate 0.001, outer 0.6",
)


def half_muon() -> dict[str, dict[str, Any]]:
    """Return the trials with Muon at 0.61 M parameters, by "method: Muon, rate"."""
    return {
        f"{method}: Muon, {rate:g}": {
            **averaged()[trial],
            **budget("half", updates),
            "inner.learning_rate": rate,
        }
        for method, (trial, rates, updates) in HALF_MUON.items()
        for rate in rates
    }


def methods(size: str) -> dict[str, dict[str, Any]]:
    """Return the changes of each trial at a size, by "method: setting"."""
    found = trials(size) | settings(size)
    return found | half_muon() if size == "half" else found


def tracks() -> dict[str, Comparison]:
    """Return the comparison of each record, by the record's name."""
    orders = compare_order.get_comparison()
    average = averaged()
    muon = {name: average[trial] for name, trial in MUON.items()}
    chosen = {name.split(":")[0]: orders.variants[name] for name in ORDER}
    return {
        "order": dataclasses.replace(
            orders, variants=chosen, baseline="data parallel", seeds=(1, 2, 3)
        ),
        "small": over_seeds("small", "stdlib", named("small", SMALL), seeds=FRESH),
        "half_tuning": tuning("half", "stdlib", named("half", HALF_TUNING)),
        "half": tuning("half", "stdlib", named("half", HALF), seeds=FRESH[:3], to=(1.5, 1.4, 1.32)),
        "prose_tuning": tuning("small", TEXT, named("small", PROSE_TUNING)),
        "prose": tuning("small", TEXT, named("small", PROSE), seeds=FRESH, to=(1.8, 1.76, 1.74)),
        "muon": tuning("small", "stdlib", muon, seeds=FRESHER, to=(1.65, 1.6)),
        "muon_prose": tuning("small", TEXT, muon, seeds=FRESHER, to=(1.8, 1.76)),
        "half_muon_tuning": tuning("half", "stdlib", half_muon(), to=(1.5, 1.4, 1.32)),
        "average": tuning(
            "small",
            "stdlib",
            average | line3.trials(average),
            seeds=(0, 6, 7),
            to=(1.65, 1.6, 1.55),
        ),
    }


def main() -> None:
    """Make the missing runs of a record; print what each method spent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=tracks())
    name = parser.parse_args().name
    track, record = tracks()[name], Path(__file__).with_name(f"{name}.jsonl")
    execute(
        track,
        Path("runs") / name,
        on_end=lambda run, made: print(f"{run.variant}, seed {run.seed}", flush=True),
        command=f"python -m studies.track {name}",
        results_file=record,
    )
    for target in track.target_losses:
        costs = tables.by_method(results.read(record).values(), target)
        tables.show(f"to {target:g} nats/token", tables.SPENT, tables.spent(costs))


if __name__ == "__main__":
    main()
