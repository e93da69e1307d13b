"""The methods of the study's track (studies/track.py): settings by "method: setting".

An entry has the keys in which the method differs from DiLoCo's config (studies/track.py), whose
rounds, batches and tokens each entry sets. What is not a setting, as a rule for rounds, is a
function that the entry adds to a table of the package (`qsr`). The methods are:

- one worker;
- data parallel: one worker with the batch of all workers, the same (studies/conformance.md); each
  update is counted as one synchronisation;
- DiLoCo;
- linear ramp: DiLoCo whose rounds grow linearly over the run;
- QSR: DiLoCo whose rounds have (alpha / learning rate)^2 updates (the quadratic rule);
- trunk: one worker trains for a share of the tokens (the trunk), then all workers continue;
- growing pool: one worker begins; more workers join, and rounds grow, as gradient noise grows;
- AdLoCo as published.
"""

import functools
from collections.abc import Mapping
from typing import Any

from adloco_jax import ROUND_LENGTHS
from adloco_jax.contrib.qsr import quadratic
from studies.compare_quick import AVERAGE, batch

Changes = Mapping[str, Any]

WORKERS, BATCH = 4, 4
LENGTH = {"small": 64, "half": 128}  # bytes of a row, by the model's size
STEPS = 110  # updates of the shortest round; the lengths of other rounds are multiples of it

LINEAR = {"inner.schedule": "linear"}
NESTEROV = {"outer.tx": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.9}
MILD = {"outer.tx": "nesterov", "outer.learning_rate": 0.8, "outer.momentum": 0.6}
LATE = {**NESTEROV, "outer.skip_single": True}  # momentum that begins with the second worker


def rate(value: float) -> dict[str, float]:
    """Return the setting of the inner learning rate."""
    return {"inner.learning_rate": value}


def budget(size: str, updates: int, *, workers: int = WORKERS) -> dict[str, int]:
    """Return the setting that ends a run after the tokens of `updates` sequential updates."""
    return {"num_tokens": updates * workers * BATCH * LENGTH[size]}


def steps(count: int) -> dict[str, int]:
    """Return the setting for rounds of `count` updates."""
    return {"inner.steps_per_round": count}


def qsr(alpha: float) -> dict[str, str]:
    """Return the setting for rounds of (alpha / learning rate)^2 updates.

    The rule with this alpha is added to the table `ROUND_LENGTHS`.
    """
    name = f"qsr_{alpha:g}"
    ROUND_LENGTHS[name] = functools.partial(quadratic, alpha=alpha)
    return {"inner.round_length": name}


def trunk(share: float, count: int) -> dict[str, Any]:
    """Return the settings of one worker for a share of the tokens, then rounds of all workers."""
    return {"ensemble.initial_workers": 1, "ensemble.spawn_frac": share, **steps(count)}


def growing(eta: float, first: int, longest: int) -> dict[str, Any]:
    """Return the settings of a growing pool: one worker begins, and more join as noise grows.

    When all workers have joined, rounds grow from `first` to at most `longest` updates.
    """
    return {
        "ensemble.initial_workers": 1,
        "batching.test": "norm",
        "batching.eta": eta,
        "batching.max_blind_growth": 4,
        "inner.steps_per_round": first,
        "inner.max_steps_per_round": longest,
    }


ONE = {"ensemble.num_workers": 1, **AVERAGE}
PARALLEL = {**ONE, **batch(WORKERS * BATCH)}
PUBLISHED = {
    **{"ensemble.num_trainers": WORKERS, "batching.test": "norm", "batching.batch_cap": 32},
    **{"batching.max_batch_size": 16, "batching.buckets": (4, 6, 8, 12, 16)},
    **{"outer.tx": "sgd", "outer.learning_rate": 0.5, "inner.steps_per_round": 220},
    **{"merge.policy": "worst_with_worst", "merge.every_rounds": 3},
}


# -- With AdamW ------------------------------------------------------------------------------

GROWING_POOL = "growing pool: eta 1.6, rounds of 220, Nesterov"
DILOCO = "DiLoCo: average, 110 steps, decay"
DILOCO_MOMENTUM = "DiLoCo: 110 steps, momentum 0.6, decay"
DILOCO_RARE = "DiLoCo, fewest communications: Nesterov, 440 steps, constant"
TRUNK = "trunk: 0.1, 220 steps, Nesterov, decay"
QSR = "QSR: from 110, 10 times the rate"
RAMP = "linear ramp: from 110, constant"
ADLOCO = "AdLoCo as published: eta 0.4"


def adamw(size: str) -> dict[str, Changes]:
    """Return the methods with AdamW; its rate is that of the size where they name no other."""
    full, falling = budget(size, 5280), {**LINEAR, **budget(size, 3960)}
    value = 2e-3 if size == "small" else 1e-3
    ramp = {"inner.round_length": "linear", "inner.max_steps_per_round": 12 * STEPS}
    found = {
        GROWING_POOL: {**growing(1.6, 220, 220), **LATE, **full},
        DILOCO: {**AVERAGE, **steps(STEPS), **LINEAR, **full},
        DILOCO_MOMENTUM: {**MILD, **steps(STEPS), **LINEAR, **full},
        DILOCO_RARE: {**NESTEROV, **steps(4 * STEPS), **full},
        TRUNK: {**trunk(0.1, 2 * STEPS), **LATE, **falling},
        # At the highest rate a round has 10^2 updates.
        QSR: {**AVERAGE, **steps(STEPS), **LINEAR, **full, **qsr(10 * value)}
        | {"inner.max_steps_per_round": 24 * STEPS},
        RAMP: {**AVERAGE, **steps(STEPS), **full, **ramp},
        ADLOCO: {**PUBLISHED, **full, "batching.eta": 0.4},
        f"data parallel: rate {2 * value:g}, 2640 updates": {
            **{**PARALLEL, **LINEAR, **steps(2 * STEPS)},
            **{**budget(size, 2640), **rate(2 * value)},
        },
    }
    for updates in (6600, 13200):
        found[f"one worker: rate {value:g}, {updates} updates"] = {
            **{**ONE, **LINEAR, **steps(4 * STEPS)},
            **{**budget(size, updates, workers=1), **rate(value)},
        }
    return found


PARTS_OFF = {
    "all workers from the start": {"ensemble.initial_workers": None},
    "rounds that grow, too": {"inner.max_steps_per_round": 4 * STEPS},
    "averages in place of momentum": AVERAGE,
    "momentum for a single worker, too": {"outer.skip_single": False},
    "growth without a bound where no signal was measured": {"batching.max_blind_growth": None},
}


def parts() -> dict[str, Changes]:
    """Return the growing pool at 0.08 M parameters, with one of its parts off at a time."""
    pool = adamw("small")[GROWING_POOL]
    return {
        f"growing pool with {part}: the rest the same": {**pool, **off}
        for part, off in PARTS_OFF.items()
    }


# -- With Muon and a running average of rounds, at a constant rate ---------------------------

AVERAGED, HALF = {"outer.average": 0.7}, {"outer.average": 0.5}
MUON = {"inner.tx": "muon", **rate(4e-3), **AVERAGED}


def averaged() -> dict[str, Changes]:
    """Return the trials at 0.08 M parameters, on seeds 0, 6 and 7.

    Three lists, each declared before it ran, in the order of their worth: what had won with AdamW;
    other rates and averages, and what may give the growing pool the steps of short rounds for the
    synchronisations of long ones; larger eta, after 3.2 had needed two thirds of the tokens of 1.6.
    A run ends soon after a pilot's runs had reached 1.55 (studies/LOG.md).
    """

    def pool(eta: float, longest: int, *rest: Changes) -> dict[str, Any]:
        return _together(growing(eta, 110, longest), budget("small", 2200), LATE, MUON, *rest)

    def diloco(*rest: Changes) -> dict[str, Any]:
        return _together(steps(STEPS), budget("small", 2750), MILD, MUON, *rest)

    one = {**ONE, **steps(STEPS), **budget("small", 6600, workers=1)}
    parallel = {**PARALLEL, **steps(STEPS), **budget("small", 2200)}
    return {
        "DiLoCo: 110 steps, momentum 0.6, Muon": diloco(),
        "growing pool: rounds of 220, Muon": pool(1.6, 220, steps(220), budget("small", 2350)),
        "growing pool, 110: rounds of 110, Muon": pool(1.6, 110, budget("small", 2150)),
        "one worker: Muon": {**one, **MUON},
        "data parallel: Muon": {**parallel, **MUON},
        "DiLoCo, AdamW: 110 steps": _together(steps(STEPS), budget("small", 4400), MILD, AVERAGED),
        "growing pool, AdamW: rounds of 220": _together(
            growing(1.6, 220, 220), budget("small", 3500), LATE, AVERAGED
        ),
        "data parallel, 0.01: Muon": {**parallel, **MUON, **rate(1e-2)},
        # The second list.
        "DiLoCo, 0.006: Muon": diloco(rate(6e-3)),
        "DiLoCo, average 0.5: Muon": diloco(HALF),
        "DiLoCo, Nesterov: Muon": diloco(NESTEROV),
        "growing pool, by test: rounds 110 to 220": pool(1.6, 220),
        "growing pool, by test, average 0.5: rounds 110 to 220": pool(1.6, 220, HALF),
        "growing pool, 165: rounds of 165": pool(1.6, 165, steps(165)),
        "growing pool, eta 0.8: rounds 110 to 220, average 0.5": pool(0.8, 220, HALF),
        "growing pool, eta 3.2: rounds 110 to 220, average 0.5": pool(3.2, 220, HALF),
        "growing pool, batch 2: rounds 110 to 220, average 0.5": pool(
            1.6, 220, HALF, {"batching.initial_batch_size": 2}
        ),
        "growing pool, momentum 0.6: rounds 110 to 220, average 0.5": pool(1.6, 220, HALF, MILD),
        "growing pool, 0.006: rounds 110 to 220, average 0.5": pool(1.6, 220, HALF, rate(6e-3)),
        # The third list, after eta 3.2 had needed two thirds of the tokens of eta 1.6.
        "DiLoCo, 0.006, average 0.5: Muon": diloco(rate(6e-3), HALF),
        "growing pool, eta 3.2, 0.006: rounds 110 to 220, average 0.5": pool(
            3.2, 220, HALF, rate(6e-3)
        ),
        "growing pool, eta 2.3, 0.006: rounds 110 to 220, average 0.5": pool(
            2.3, 220, HALF, rate(6e-3)
        ),
        "data parallel, 0.02: Muon": {**parallel, **MUON, **rate(2e-2)},
        "one worker, 0.006: Muon": {**one, **MUON, **rate(6e-3)},
        "trunk: 0.1, 220 steps, Muon": {**trunk(0.1, 220), **budget("small", 2350), **LATE, **MUON},
        "QSR: Muon": diloco(qsr(10 * 4e-3), LINEAR),
        "one worker, AdamW: average": {**one, **budget("small", 9900, workers=1), **AVERAGED},
        "data parallel, AdamW: average": _together(
            parallel, budget("small", 3300), AVERAGED, rate(4e-3)
        ),
    }


def _together(*changes: Changes) -> dict[str, Any]:
    return {key: value for some in changes for key, value in some.items()}


def muon() -> dict[str, Changes]:
    """Return the best trial of each method; of the pool also the one with the fewest tokens."""
    tried = averaged()
    return {
        "DiLoCo: Muon": tried["DiLoCo, 0.006, average 0.5: Muon"],
        "growing pool: eta 1.6, Muon": tried["growing pool, 0.006: rounds 110 to 220, average 0.5"],
        "growing pool, fewer tokens: eta 2.3, Muon": tried[
            "growing pool, eta 2.3, 0.006: rounds 110 to 220, average 0.5"
        ],
        "data parallel: Muon": tried["data parallel, 0.01: Muon"],
        "one worker: Muon": tried["one worker: Muon"],
    }


# At 0.61 M parameters: the setting at 0.08 M, the rates tried, the updates whose tokens are enough.
# 0.01 was declared after DiLoCo had needed 1,430 updates at 0.006 and 1,650 at 0.003.
HALF_MUON = {
    "DiLoCo": ("DiLoCo: Muon", (3e-3, 6e-3, 1e-2), 2530),
    "growing pool": ("growing pool: eta 1.6, Muon", (3e-3, 6e-3, 1e-2), 2000),
    "data parallel": ("data parallel: Muon", (5e-3, 1e-2), 1760),
    "one worker": ("one worker: Muon", (2e-3, 4e-3), 1320),
}
# The chosen rates (0.006 and 0.01 tie for DiLoCo), with tokens that end soon after 1.32.
HALF_MUON_CHOSEN = {
    "DiLoCo: Muon, 0.006": 1870,
    "growing pool: Muon, 0.006": 1540,
    "data parallel: Muon, 0.01": 1210,
    "one worker: Muon, 0.004": 880,
}


def half_muon() -> dict[str, Changes]:
    """Return the trials with Muon at 0.61 M parameters, by "method: Muon, rate"."""
    chosen = muon()
    return {
        f"{method}: Muon, {value:g}": {**chosen[name], **budget("half", updates), **rate(value)}
        for method, (name, rates, updates) in HALF_MUON.items()
        for value in rates
    }


# -- The front: rounds of several lengths, with the outer step that is best with Muon --------

STRONG = {
    **{"outer.tx": "nesterov", "outer.learning_rate": 1.0, "outer.momentum": 0.6},
    **{"inner.tx": "muon", **rate(6e-3), **HALF, "outer.skip_single": True},
}
ENOUGH = {55: 1760, 110: 1760, 165: 1980, 220: 2200, 440: 3080}  # updates, by the round's length


def shared(length: int, *rest: Changes) -> dict[str, Any]:
    """Return the settings of DiLoCo with rounds of `length` updates."""
    return _together(steps(length), budget("small", ENOUGH[length]), STRONG, *rest)


def by_hand(join: int, length: int, *rest: Changes) -> dict[str, Any]:
    """Return the settings of DiLoCo after `join` updates of one worker."""
    tokens = (join + WORKERS * (ENOUGH[length] + 110 - join)) * BATCH * LENGTH["small"]
    share = join * BATCH * LENGTH["small"] / tokens
    return _together(trunk(share, length), {"num_tokens": tokens}, STRONG, *rest)


def by_test(eta: float, longest: int, *rest: Changes) -> dict[str, Any]:
    """Return the settings of a pool that grows by the norm test, with DiLoCo's outer step."""
    tokens = budget("small", ENOUGH[longest] - 220)
    return _together(growing(eta, STEPS, longest), tokens, STRONG, *rest)


def front() -> dict[str, Changes]:
    """Return the rows of the front, in the order of their worth, for seeds that no trial has used.

    All have the settings that pilots on seeds 0, 6 and 7 found for DiLoCo with rounds of 110.
    """
    return {
        "DiLoCo, 110: outer 1.0": shared(110),
        "DiLoCo, 220: outer 1.0": shared(220),
        "pool by hand, 220: joins at 220": by_hand(220, 220),
        "pool by test, 220: eta 1.6": by_test(1.6, 220),
        "pool by hand, 110: joins at 220": by_hand(220, 110),
        "pool by test, 110: eta 1.6": by_test(1.6, 110),
        "DiLoCo, 440: outer 1.0": shared(440),
        "DiLoCo, 55: outer 1.0": shared(55),
        "pool by hand, 440: joins at 440": by_hand(440, 440),
        "DiLoCo, 165: outer 1.0": shared(165),
    }


def front_trials() -> dict[str, Changes]:
    """Return the trials for the front, declared before they ran, in the order of their worth.

    Each runs on seed 0. The best of a method and length, and those within 3 % of its steps, run on
    seeds 6 and 7 as well; the median decides.
    """
    average, momentum, outer = "outer.average", "outer.momentum", "outer.learning_rate"
    found = {
        f"pool by hand, {length}: joins at {join}": by_hand(join, length)
        for length, join in ((220, 220), (220, 440), (110, 110), (110, 220), (110, 330), (110, 440))
    }
    found |= {
        f"pool by test, {longest}: eta {eta}": by_test(eta, longest)
        for longest, eta in ((220, 1.6), (220, 0.8), (220, 2.3), (110, 1.6), (110, 0.8), (110, 2.3))
    }
    found |= {f"DiLoCo, {length}: outer 1.0": shared(length) for length in ENOUGH}
    return found | {
        "DiLoCo, 220: rate 0.01": shared(220, rate(1e-2)),
        "DiLoCo, 440: rate 0.01": shared(440, rate(1e-2)),
        "pool by hand, 165: joins at 330": by_hand(330, 165),
        "pool by hand, 440: joins at 440": by_hand(440, 440),
        "pool by hand, 55: joins at 220": by_hand(220, 55),
        "DiLoCo, 110: outer 1.2": shared(110, {outer: 1.2}),
        "DiLoCo, 110: momentum 0.8": shared(110, {momentum: 0.8}),
        "DiLoCo, 55: average 0.7": shared(55, {average: 0.7}),
        "DiLoCo, 220: average 0.3": shared(220, {average: 0.3}),
        "DiLoCo, 440: average 0": shared(440, {average: 0.0}),
        "DiLoCo, 110: rate 0.01": shared(110, rate(1e-2)),
        "DiLoCo, 110: momentum 0.5": shared(110, {momentum: 0.5}),
    }


def settings(size: str) -> dict[str, Changes]:
    """Return all settings that rows have at a size."""
    return adamw(size) | (muon() if size == "small" else half_muon())
