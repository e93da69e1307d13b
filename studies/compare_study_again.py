"""The study's choice among settings of DiLoCo, the trunk and ours, on three seeds.

The first choice was made on seed 0 alone (studies/compare_study.py, which says what the methods
are). Seeds 1 to 5 then showed that seed 0 differs from other seeds. On seed 0 one worker reached a
loss of 1.6 after 8,360 updates, and DiLoCo after 4,730. The medians are 7,920 on seeds 1 to 5 for
one worker, and 4,180 (the lower of the two middle seeds) on seeds 1 to 4 for DiLoCo, which did not
reach the loss on seed 5. So the trials here run on seeds 0, 6 and 7. The setting
whose median seed needs the fewest serial updates to a loss of 1.6 wins. Among settings within 5 %
of it, the one with the fewest communications wins. The trials were declared in five steps, each
before its runs:

1. shorter rounds, as in DiLoCo's best settings;
2. other inner rates and shorter first rounds;
3. outer momentum that begins with a trainer's second worker (outer.skip_single), and an outer
   momentum of 0.6 instead of 0.9;
4. the momentum of step 3 with short rounds and a falling learning rate;
5. for all three methods, higher inner rates, and averages of the workers' differences that have the
   mean length of these differences (outer.aggregator=rda). This step was added after runs on five
   more seeds had missed the targets by a little.

docs/LOG.md has the result of each step. The winners run with seeds that no choice has used
(studies/track.py).

Command:   adloco compare studies/compare_study_again.py
             --results studies/again.jsonl
Hardware:  two CPU cores, an hour and a half; the same command continues a stopped comparison
Results:   docs/RESULTS.md
"""

import re
from collections.abc import Iterable
from typing import Any

from adloco_jax.configs.compare_quick import AVERAGE
from adloco_jax.study.compare import Comparison
from studies.compare_study import (
    BATCH,
    LINEAR,
    NESTEROV,
    ONE,
    STEPS,
    WORKERS,
    Changes,
    batch,
    budget,
    growing,
    qsr,
    steps,
    trials,
    trunk,
    tuning,
)

MILD = {"outer.tx": "nesterov", "outer.learning_rate": 0.8, "outer.momentum": 0.6}
SKIP = {"outer.skip_single": True}
# Momentum that begins with the second worker of a trainer.
LATE, LATE_MILD = {**NESTEROV, **SKIP}, {**MILD, **SKIP}
RADIAL = {"outer.aggregator": "rda"}


def _diloco(count: int, *rest: Changes) -> dict[str, Any]:
    return _together(AVERAGE, steps(count), *rest)


def _trunk(share: float, count: int, *rest: Changes) -> dict[str, Any]:
    return _together(AVERAGE, steps(count), trunk(share), *rest)


def _ours(eta: float, first: int, longest: int, *rest: Changes) -> dict[str, Any]:
    return _together(AVERAGE, growing(eta=eta, first=first, longest=longest), *rest)


def _together(*changes: Changes) -> dict[str, Any]:
    return {key: value for some in changes for key, value in some.items()}


def _rate(rate: float) -> dict[str, float]:
    return {"inner.learning_rate": rate}


FROM_THE_START = (
    "DiLoCo: average, 110 steps, constant",
    "DiLoCo: average, 110 steps, decay",
    "DiLoCo: Nesterov, 110 steps, constant",
    "DiLoCo: Nesterov, 440 steps, constant",
)


def settings(size: str) -> dict[str, dict[str, Any]]:
    """Return the changes of each trial, by its name "method: setting".

    `size` determines the token budgets. It is "small" or "half".
    """
    full, falling = budget(size, 5280), {**LINEAR, **budget(size, 3960)}
    return {
        **{name: trials(size)[name] for name in FROM_THE_START},
        "DiLoCo: average, 220 steps, constant": _diloco(2 * STEPS, full),
        "trunk: 0.05, 220 steps, constant": _trunk(0.05, 2 * STEPS, full),
        "trunk: 0.1, 220 steps, constant": _trunk(0.1, 2 * STEPS, full),
        "trunk: 0.1, 440 steps, constant": _trunk(0.1, 4 * STEPS, full),
        "trunk: 0.1, 440 steps, decay": _trunk(0.1, 4 * STEPS, falling),
        "trunk: 0.25, 440 steps, decay": _trunk(0.25, 4 * STEPS, falling),
        "ours: eta 0.8, rounds to 440, constant": _ours(0.8, 220, 440, full),
        "ours: eta 1.6, rounds to 440, constant": _ours(1.6, 220, 440, full),
        "ours: eta 1.6, rounds of 220, constant": _ours(1.6, 220, 220, full),
        "ours: eta 1.6, rounds to 440, decay": _ours(1.6, 220, 440, falling),
        "ours: eta 3.2, rounds to 440, decay": _ours(3.2, 220, 440, falling),
        # Step 2.
        "DiLoCo: 110 steps, decay, rate 0.001": _diloco(STEPS, full, LINEAR, _rate(1e-3)),
        "DiLoCo: 110 steps, decay, rate 0.003": _diloco(STEPS, full, LINEAR, _rate(3e-3)),
        "ours: eta 1.6, rounds 110 to 440, decay": _ours(1.6, 110, 440, falling),
        "ours: eta 3.2, rounds 110 to 440, decay": _ours(3.2, 110, 440, falling),
        "ours: eta 3.2, rounds 220 to 440, decay, rate 0.003": _ours(
            3.2, 220, 440, falling, _rate(3e-3)
        ),
        "ours: eta 1.6, rounds 110 to 440, decay, from two workers": _ours(
            1.6, 110, 440, falling, {"ensemble.initial_workers": 2}
        ),
        # Step 3.
        "ours: eta 1.6, rounds 220 to 440, Nesterov": _ours(1.6, 220, 440, full, LATE),
        "ours: eta 3.2, rounds 220 to 440, Nesterov": _ours(3.2, 220, 440, full, LATE),
        "ours: eta 1.6, rounds 220 to 440, momentum 0.6": _ours(1.6, 220, 440, full, LATE_MILD),
        "ours: eta 1.6, rounds of 220, Nesterov": _ours(1.6, 220, 220, full, LATE),
        "ours: eta 3.2, rounds 220 to 440, Nesterov, decay": _ours(3.2, 220, 440, falling, LATE),
        "DiLoCo: 110 steps, momentum 0.6, decay": _diloco(STEPS, full, LINEAR, MILD),
        "DiLoCo: 110 steps, momentum 0.6": _diloco(STEPS, full, MILD),
        "DiLoCo: 220 steps, momentum 0.6": _diloco(2 * STEPS, full, MILD),
        "trunk: 0.1, 220 steps, Nesterov": _trunk(0.1, 2 * STEPS, full, LATE),
        "trunk: 0.1, 440 steps, Nesterov": _trunk(0.1, 4 * STEPS, full, LATE),
        # Step 4.
        "ours: eta 1.6, rounds of 220, Nesterov, decay": _ours(1.6, 220, 220, falling, LATE),
        "ours: eta 2.3, rounds of 220, Nesterov, decay": _ours(2.3, 220, 220, falling, LATE),
        "ours: eta 1.6, rounds of 220, Nesterov, decay over 3300 updates' tokens": _ours(
            1.6, 220, 220, LINEAR, budget(size, 3300), LATE
        ),
        "ours: eta 2.3, rounds of 220, Nesterov, decay over 2640 updates' tokens": _ours(
            2.3, 220, 220, LINEAR, budget(size, 2640), LATE
        ),
        "DiLoCo: 110 steps, momentum 0.6, decay over 3960 updates": _diloco(STEPS, falling, MILD),
        "DiLoCo: 110 steps, momentum 0.8, decay": _diloco(
            STEPS, full, LINEAR, MILD, {"outer.momentum": 0.8}
        ),
        "trunk: 0.1, 220 steps, Nesterov, decay": _trunk(0.1, 2 * STEPS, falling, LATE),
        # Step 5.
        "ours: eta 2.3, rounds of 220, Nesterov": _ours(2.3, 220, 220, full, LATE),
        "ours: eta 1.6, rounds of 220, Nesterov, rate 0.003": _ours(
            1.6, 220, 220, full, LATE, _rate(3e-3)
        ),
        "ours: eta 1.6, rounds of 220, momentum 0.6, radial": _ours(
            1.6, 220, 220, full, LATE_MILD, RADIAL
        ),
        "DiLoCo: 110 steps, momentum 0.6, decay, rate 0.003": _diloco(
            STEPS, full, LINEAR, MILD, _rate(3e-3)
        ),
        "DiLoCo: 110 steps, momentum 0.6, decay, radial": _diloco(
            STEPS, full, LINEAR, MILD, RADIAL
        ),
        "trunk: 0.1, 220 steps, Nesterov, decay, rate 0.003": _trunk(
            0.1, 2 * STEPS, falling, LATE, _rate(3e-3)
        ),
        "trunk: 0.1, 220 steps, momentum 0.6, decay, radial": _trunk(
            0.1, 2 * STEPS, falling, LATE_MILD, RADIAL
        ),
    }


AVERAGED, HALF = {"outer.average": 0.7}, {"outer.average": 0.5}
MUON = {"inner.tx": "muon", **_rate(4e-3), **AVERAGED}
ONE_BATCH = {**ONE, **steps(STEPS), **batch(WORKERS * BATCH)}  # data parallel


def averaged() -> dict[str, dict[str, Any]]:
    """Return the changes of each trial with a constant rate and a running average of rounds.

    These trials came later, with Muon inside at rate 0.004. What else a method has won on these
    seeds before. A pilot (docs/LOG.md) suggested them. They were declared before they ran, in the
    order of their worth, and end soon after the pilot's runs had reached 1.55. The second list was
    declared after the first had run: other rates and averages for the baselines, then what may give
    ours the steps of short rounds for the synchronisations of long ones. So was the third.
    """

    def ours(eta: float, longest: int, *rest: Changes) -> dict[str, Any]:
        return _ours(eta, 110, longest, budget("small", 2200), LATE, MUON, *rest)

    def diloco(*rest: Changes) -> dict[str, Any]:
        return _diloco(STEPS, budget("small", 2750), MILD, MUON, *rest)

    one, parallel = budget("small", 6600, workers=1), budget("small", 2200)
    return {
        "DiLoCo: 110 steps, momentum 0.6, Muon": diloco(),
        "ours: rounds of 220, Muon": _ours(1.6, 220, 220, budget("small", 2350), LATE, MUON),
        "ours, 110: rounds of 110, Muon": _ours(1.6, 110, 110, budget("small", 2150), LATE, MUON),
        "one worker: Muon": {**ONE, **steps(STEPS), **one, **MUON},
        "data parallel: Muon": {**ONE_BATCH, **parallel, **MUON},
        "DiLoCo, AdamW: 110 steps": _diloco(STEPS, budget("small", 4400), MILD, AVERAGED),
        "ours, AdamW: rounds of 220": _ours(1.6, 220, 220, budget("small", 3500), LATE, AVERAGED),
        "data parallel, 0.01: Muon": {**ONE_BATCH, **parallel, **MUON, **_rate(1e-2)},
        # The second list.
        "DiLoCo, 0.006: Muon": diloco(_rate(6e-3)),
        "DiLoCo, average 0.5: Muon": diloco(HALF),
        "DiLoCo, Nesterov: Muon": diloco(NESTEROV),
        "ours, by test: rounds 110 to 220": ours(1.6, 220),
        "ours, by test, average 0.5: rounds 110 to 220": ours(1.6, 220, HALF),
        "ours, 165: rounds of 165": ours(1.6, 165, steps(165)),
        "ours, eta 0.8: rounds 110 to 220, average 0.5": ours(0.8, 220, HALF),
        "ours, eta 3.2: rounds 110 to 220, average 0.5": ours(3.2, 220, HALF),
        "ours, batch 2: rounds 110 to 220, average 0.5": ours(
            1.6, 220, HALF, {"batching.initial_batch_size": 2}
        ),
        "ours, momentum 0.6: rounds 110 to 220, average 0.5": ours(1.6, 220, HALF, MILD),
        "ours, 0.006: rounds 110 to 220, average 0.5": ours(1.6, 220, HALF, _rate(6e-3)),
        # The third list, after eta 3.2 had needed two thirds of the tokens of eta 1.6.
        "DiLoCo, 0.006, average 0.5: Muon": diloco(_rate(6e-3), HALF),
        "ours, eta 3.2, 0.006: rounds 110 to 220, average 0.5": ours(3.2, 220, HALF, _rate(6e-3)),
        "ours, eta 2.3, 0.006: rounds 110 to 220, average 0.5": ours(2.3, 220, HALF, _rate(6e-3)),
        "data parallel, 0.02: Muon": {**ONE_BATCH, **parallel, **MUON, **_rate(2e-2)},
        "one worker, 0.006: Muon": {**ONE, **steps(STEPS), **one, **MUON, **_rate(6e-3)},
        "trunk: 0.1, 220 steps, Muon": _trunk(0.1, 220, budget("small", 2350), LATE, MUON),
        "QSR: Muon": diloco(qsr(10 * 4e-3), LINEAR),
        "one worker, AdamW: average": {**ONE, **steps(STEPS), **budget("small", 9900, workers=1)}
        | AVERAGED,
        "data parallel, AdamW: average": {**ONE_BATCH, **budget("small", 3300)}
        | {**AVERAGED, **_rate(4e-3)},
    }


def named(size: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return trials of this file and of studies/compare_study.py: the changes of each, by its name.

    A name "method, more: setting" stands for the trial "method: setting". Its changes are returned
    under the longer name.
    """
    tried = {**trials(size), **settings(size)}
    return {name: tried[re.sub(", [^:]*:", ":", name, count=1)] for name in names}


def get_comparison() -> Comparison:
    """Return the comparison of the trials, on seeds 0, 6 and 7."""
    return tuning("small", "stdlib", settings("small"), seeds=(0, 6, 7))
