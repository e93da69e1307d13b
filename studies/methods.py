"""The methods of the study's track (studies/track.py): settings by "method: setting".

An entry has the keys in which the method differs from DiLoCo's config (studies/track.py), whose
rounds, batches and tokens each entry sets. The methods are:

- one worker;
- data parallel: one worker with the batch of all workers, the same (studies/conformance.md); each
  update is counted as one synchronisation;
- DiLoCo;
- growing pool: one worker begins; more workers join, and rounds grow, as gradient noise grows;
- pool by hand: one worker begins, and all join at a fixed update.
"""

from collections.abc import Mapping
from typing import Any

Changes = Mapping[str, Any]

WORKERS, BATCH = 4, 4
LENGTH = {"small": 64, "half": 128}  # bytes of a row, by the model's size
STEPS = 110  # updates of the shortest round; the lengths of other rounds are multiples of it


def batch(size: int) -> dict[str, Any]:
    """Return the settings that fix the batch of each worker at `size` rows."""
    return {
        "batching.initial_batch_size": size,
        "batching.max_batch_size": size,
        "batching.buckets": (size,),
        "batching.batch_cap": size,
    }


def rate(value: float) -> dict[str, float]:
    """Return the setting of the inner learning rate."""
    return {"inner.learning_rate": value}


def budget(size: str, updates: int, *, workers: int = WORKERS) -> dict[str, int]:
    """Return the setting that ends a run after the tokens of `updates` sequential updates."""
    return {"num_tokens": updates * workers * BATCH * LENGTH[size]}


def steps(count: int) -> dict[str, int]:
    """Return the setting for rounds of `count` updates."""
    return {"inner.steps_per_round": count}


def growing(eta: float, longest: int) -> dict[str, Any]:
    """Return the settings of a growing pool: one worker begins, and more join as noise grows.

    When all workers have joined, rounds grow to at most `longest` updates.
    """
    return {
        "ensemble.initial_workers": 1,
        "batching.test": "norm",
        "batching.eta": eta,
        "batching.max_blind_growth": 4,
        "inner.max_steps_per_round": longest,
        **steps(STEPS),
    }


# -- Muon and a running average of rounds, at a constant rate --------------------------------

AVERAGE = {"outer.tx": "sgd", "outer.learning_rate": 1.0}  # the outer step takes the mean
MILD = {"outer.tx": "nesterov", "outer.learning_rate": 0.8, "outer.momentum": 0.6}
# Momentum begins with the second worker.
LATE = {"outer.tx": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.9}
LATE |= {"outer.skip_single": True}
MUON = {"inner.tx": "muon", **rate(6e-3), "outer.average": 0.5}
ALONE = {**AVERAGE, "ensemble.num_workers": 1, **steps(STEPS), "inner.tx": "muon"}
ALONE |= {"outer.average": 0.7}


def muon() -> dict[str, Changes]:
    """Return the best trial of each method; of the pool also the one with the fewest tokens.

    The trials, on seeds 0, 6 and 7, are those of studies/average.jsonl.
    """
    rest = {**budget("small", 2200), **LATE, **MUON}
    return {
        "DiLoCo: Muon": {**steps(STEPS), **budget("small", 2750), **MILD, **MUON},
        "growing pool: eta 1.6, Muon": {**growing(1.6, 220), **rest},
        "growing pool, fewer tokens: eta 2.3, Muon": {**growing(2.3, 220), **rest},
        "data parallel: Muon": {
            **ALONE,
            **batch(WORKERS * BATCH),
            **budget("small", 2200),
            **rate(1e-2),
        },
        "one worker: Muon": {**ALONE, **budget("small", 6600, workers=1), **rate(4e-3)},
    }


def half_muon() -> dict[str, Changes]:
    """Return the methods at 0.61 M parameters, with tokens that end soon after 1.32.

    The rates are the best of studies/half_muon_tuning.jsonl (0.006 and 0.01 tie for DiLoCo).
    """
    found = muon()
    chosen = {
        "DiLoCo: Muon": (6e-3, 1870),
        "growing pool: eta 1.6, Muon": (6e-3, 1540),
        "data parallel: Muon": (1e-2, 1210),
        "one worker: Muon": (4e-3, 880),
    }
    return {
        f"{name.partition(':')[0]}: Muon, {value:g}": {
            **found[name],
            **budget("half", updates),
            **rate(value),
        }
        for name, (value, updates) in chosen.items()
    }


# -- The front: rounds of several lengths, with the outer step that is best with Muon --------

STRONG = {
    "outer.tx": "nesterov",
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.6,
    **MUON,
    "outer.skip_single": True,
}
# Updates that end soon after the lowest loss, by the model's size and the round's length.
ENOUGH = {
    "small": {55: 1760, 110: 1760, 165: 1980, 220: 2200, 440: 3080},
    "half": {55: 1320, 110: 1540, 220: 1760, 440: 2200},
}


def shared(length: int, size: str = "small") -> dict[str, Any]:
    """Return the settings of DiLoCo with rounds of `length` updates."""
    return {**steps(length), **budget(size, ENOUGH[size][length]), **STRONG}


def by_hand(join: int, length: int, size: str = "small") -> dict[str, Any]:
    """Return the settings of DiLoCo after `join` updates of one worker."""
    row = BATCH * LENGTH[size]
    tokens = (join + WORKERS * (ENOUGH[size][length] + 110 - join)) * row
    share = join * row / tokens
    alone = {"ensemble.initial_workers": 1, "ensemble.spawn_frac": share}
    return {**alone, **steps(length), "num_tokens": tokens, **STRONG}


def by_test(eta: float, longest: int) -> dict[str, Any]:
    """Return the settings of a pool that grows by the norm test, with DiLoCo's outer step."""
    return {**growing(eta, longest), **budget("small", ENOUGH["small"][longest] - 220), **STRONG}


def front() -> dict[str, Changes]:
    """Return the rows of the front, in the order of their worth, for seeds that no trial has used.

    All have the settings that pilots on seeds 0, 6 and 7 found for DiLoCo with rounds of 110.
    studies/front_tuning.jsonl has the trials.
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


def half_front() -> dict[str, Changes]:
    """Return rows of the front at 0.61 M parameters, with its settings, not tuned again.

    Declared before they ran. Two sentences of the front at 0.08 M are put to the test: rounds twice
    as long need a fifth more steps for 0.6 times the synchronisations, and a join by hand needs the
    steps of DiLoCo with rounds of the same length for 0.84 to 0.97 times its tokens.
    """
    return {
        "DiLoCo, 220: outer 1.0": shared(220, "half"),
        "DiLoCo, 110: outer 1.0": shared(110, "half"),
        "pool by hand, 220: joins at 220": by_hand(220, 220, "half"),
        "DiLoCo, 440: outer 1.0": shared(440, "half"),
        "DiLoCo, 55: outer 1.0": shared(55, "half"),
    }


# -- The rate and the width ------------------------------------------------------------------

MLP_WIDTH = {48: 128, 128: 344, 256: 688}  # by the model's width


def widths() -> dict[str, Changes]:
    """Return short runs of DiLoCo at three widths and three rates, declared before they ran.

    The width alone differs: two layers, rows of 64 bytes, six rounds of 110 updates.
    """
    short = {**steps(STEPS), **budget("small", 6 * STEPS), **STRONG}
    return {
        f"DiLoCo, width {width}, {value:g}: short": {
            **short,
            **rate(value),
            "model.width": width,
            "model.mlp_width": mlp_width,
        }
        for width, mlp_width in MLP_WIDTH.items()
        for value in (3e-3, 6e-3, 12e-3)
    }
