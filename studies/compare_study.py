"""The declaration of the study that docs/RESULTS.md reports: models, texts, trials, seeds.

These are the methods:

- one worker;
- data parallel: AdamW on the batch of all workers. It runs as one worker with this batch
  (docs/conformance.md), and each update is counted as one communication;
- DiLoCo;
- linear ramp: DiLoCo whose rounds grow linearly over the run;
- QSR: DiLoCo whose rounds have (alpha / learning rate)^2 updates (the quadratic rule);
- trunk: one worker trains for a share of the tokens (the trunk), then all workers continue;
- ours: one worker begins; more workers join, and rounds grow, as the gradient noise grows;
- AdLoCo as published.

This file was written and committed before its runs. Every method is tuned on seed 0 with the trials
below. The best trial of a method is the one that reaches the target loss with the fewest serial
updates (updates that must follow one another). Among trials within 5 % of it, the one with the
fewest communications wins, then the one with the fewest tokens. The chosen settings then run on
seeds 1 to 5 (three seeds at 0.5 M parameters).

The target losses of a text and size are rounded to 0.02 nats. They meet two conditions. First, data
parallelism with the same workers reaches the loss in at most 0.4 of the serial updates of one
worker. Second, tuned DiLoCo needs at least eight communications to reach it. The targets are the
highest loss that meets both conditions, and the lowest loss that both methods reach.

Trials were changed twice, both times before the changed trials had run. The first change came after
26 trials. Behind every trunk, Nesterov at a constant rate had lost to averages. So the trials of
trunk and ours with decay use only averages. They have two budgets of tokens, because a decay ends
with the tokens, and both methods need fewer tokens per serial update. The second change came after
35 trials. With decay, eta 0.8 had lost, so a trial whose rounds begin at 880 steps replaced the
second trial of eta 0.8.

Command:   adloco compare studies/compare_study.py
             --results studies/small_tuning.jsonl
Hardware:  two CPU cores, about an hour; the same command continues a stopped comparison
Then:      studies/track.py
"""

import functools
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from adloco_jax import ROUND_LENGTHS
from adloco_jax.configs import compare_quick
from adloco_jax.configs.compare_quick import AVERAGE, batch
from adloco_jax.contrib.qsr import quadratic
from adloco_jax.study.compare import Comparison

Changes = Mapping[str, Any]

NESTEROV = {"outer.tx": "nesterov", "outer.learning_rate": 0.7, "outer.momentum": 0.9}
BY_INTERVAL = NESTEROV | {"outer.tx": "nesterov_by_interval"}
OUTER = {"average": AVERAGE, "Nesterov": NESTEROV}
LINEAR = {"inner.schedule": "linear"}
ONE = {"ensemble.num_workers": 1, **AVERAGE}

WORKERS, BATCH = 4, 4
WIDTH = {"small": 48, "half": 128}  # 75,600 and 0.61 M parameters
LENGTH = {"small": 64, "half": 128}  # bytes of a row
STEPS = 110  # updates of the shortest round; the lengths of other rounds are multiples of it
PUBLISHED = {
    **{"ensemble.num_trainers": WORKERS, "batching.test": "norm", "batching.batch_cap": 32},
    **{"batching.max_batch_size": 16, "batching.buckets": (4, 6, 8, 12, 16)},
    **{"outer.tx": "sgd", "outer.learning_rate": 0.5, "inner.steps_per_round": 220},
    **{"merge.policy": "worst_with_worst", "merge.every_rounds": 3},
}


def get_base(size: str, text: str) -> ConfigDict:
    """Return the config of DiLoCo with four workers; the other methods change some settings.

    Args:
      size: "small" or "half".
      text: "stdlib", or the folder of prepared rows.
    """
    config = compare_quick.get_base()
    config.num_tokens = None  # each method has its own num_tokens
    config.model.width = WIDTH[size]
    config.model.num_layers = 2 if size == "small" else 3
    config.model.mlp_width = 128 if size == "small" else 344
    config.model.max_length = LENGTH[size]
    config.data.sequence_length = LENGTH[size]
    if text != "stdlib":
        config.data.source, config.data.path = "tokens", text
    config.ensemble.num_workers = WORKERS
    config.inner.steps_per_round = 200  # each method sets its own
    config.inner.learning_rate = 2e-3 if size == "small" else 1e-3
    config.update_from_flattened_dict(batch(BATCH))
    config.batching.smoothing = 0.5  # a run of a few long rounds has few tests to average
    config.checkpoint.every_s = 1e6
    config.log.every_rounds = 10
    return config


def budget(size: str, updates: int, *, workers: int = WORKERS) -> dict[str, int]:
    """Return the setting that ends a run after the tokens of `updates` serial updates."""
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


def trunk(share: float) -> dict[str, Any]:
    """Return the settings of a trunk: one worker for a share of the tokens, then all workers."""
    return {"ensemble.initial_workers": 1, "ensemble.spawn_frac": share}


def growing(*, eta: float, first: int, longest: int, **more: Any) -> dict[str, Any]:
    """Return the settings of "ours": one worker begins, and more join as the gradient noise grows.

    When all workers have joined, rounds grow from `first` to at most `longest` updates.
    """
    return {
        "ensemble.initial_workers": 1,
        "batching.test": "norm",
        "batching.eta": eta,
        "batching.max_blind_growth": 4,
        "inner.steps_per_round": first,
        "inner.max_steps_per_round": longest,
        **more,
    }


def trials(size: str) -> dict[str, dict[str, Any]]:
    """Return the changes of at most twelve trials per method, by the name "method: setting".

    All of them run at 0.08 M parameters on the standard library. With other texts and sizes only
    some of them run.
    """
    full, found = budget(size, 5280), {}
    rates = (2e-3, 4e-3) if size == "small" else (1e-3, 2e-3)
    for rate in rates:
        for updates in (6600, 13200):
            found[f"one worker: rate {rate:g}, {updates} updates"] = {
                **ONE,
                **LINEAR,
                **steps(4 * STEPS),
                **budget(size, updates, workers=1),
                "inner.learning_rate": rate,
            }
        for updates in (2640, 5280):
            found[f"data parallel: rate {2 * rate:g}, {updates} updates"] = {
                **ONE,
                **LINEAR,
                **steps(2 * STEPS),
                **batch(WORKERS * BATCH),
                **budget(size, updates),
                "inner.learning_rate": 2 * rate,
            }
    for schedule, decay in (("constant", {}), ("decay", LINEAR)):
        for outer, tx in OUTER.items():
            for count in (STEPS, 4 * STEPS, 12 * STEPS):
                name = f"DiLoCo: {outer}, {count} steps, {schedule}"
                found[name] = {**tx, **decay, **steps(count), **full}
        for count in (STEPS, 4 * STEPS):
            name = f"linear ramp: from {count}, {schedule}"
            ramp = {"inner.round_length": "linear", "inner.max_steps_per_round": 12 * STEPS}
            found[name] = {**AVERAGE, **decay, **steps(count), **full, **ramp}
    for share in (0.1, 0.25):
        for outer, count in (("average", 8 * STEPS), ("Nesterov", 4 * STEPS)):
            name = f"trunk: {share:g} of the tokens, {outer}, constant"
            found[name] = {**OUTER[outer], **steps(count), **full, **trunk(share)}
        # A decay ends with the tokens, and a trunk needs fewer tokens per serial update. So
        # there are two budgets.
        for updates in (2640, 3960):
            name = f"trunk: {share:g} of {updates} updates' tokens, decay"
            falling = {**AVERAGE, **LINEAR, **budget(size, updates)}
            found[name] = {**falling, **steps(8 * STEPS), **trunk(share)}
    for eta in (0.8, 1.6):
        grown = growing(eta=eta, first=4 * STEPS, longest=12 * STEPS)
        for outer, tx in (OUTER | {"by interval": BY_INTERVAL}).items():
            found[f"ours: eta {eta:g}, {outer}, constant"] = {**tx, **grown, **full}
    for updates, eta, first, longest in (
        *((2640, eta, 4, 12) for eta in (0.8, 1.6, 3.2)),
        (2640, 3.2, 8, 16),
        *((3960, eta, 4, 12) for eta in (1.6, 3.2)),
    ):
        start = "" if first == 4 else f" from {first * STEPS}"
        found[f"ours: eta {eta:g}{start}, tokens of {updates} updates, decay"] = {
            **AVERAGE,
            **LINEAR,
            **budget(size, updates),
            **growing(eta=eta, first=first * STEPS, longest=longest * STEPS),
        }
    for count in (STEPS, 4 * STEPS):
        # At the peak learning rate a round has alpha^2 updates.
        for alpha in (10, 20):
            found[f"QSR: from {count}, {alpha} times the rate"] = {
                **AVERAGE,
                **LINEAR,
                **steps(count),
                **full,
                **qsr(alpha * rates[0]),
                "inner.max_steps_per_round": 24 * STEPS,
            }
    for eta in (0.15, 0.4):
        name = f"AdLoCo as published: eta {eta:g}"
        found[name] = {**PUBLISHED, **full, "batching.eta": eta}
    return found


def tuning(
    size: str,
    text: str,
    tried: Mapping[str, Changes],
    *,
    seeds: tuple[int, ...] = (0,),
    to: tuple[float, ...] = (1.7, 1.65, 1.6),
) -> Comparison:
    """Return a comparison of trials, with DiLoCo's first trial as the baseline.

    Args:
      size: "small" or "half".
      text: "stdlib", or the folder of prepared rows.
      tried: The changes of each trial, by its name "method: setting".
      seeds: The seeds to run.
      to: The losses to which costs are compared.
    """
    return Comparison(
        base=get_base(size, text),
        variants=tried,
        baseline=next(name for name in tried if name.startswith("DiLoCo")),
        target_losses=to,
        seeds=seeds,
    )


PARTS_OFF = {
    "all workers from the start": {"ensemble.initial_workers": None},
    "rounds that grow, too": {"inner.max_steps_per_round": 4 * STEPS},
    "averages in place of momentum": AVERAGE,
    "momentum for a single worker, too": {"outer.skip_single": False},
    "growth without a bound where no signal was measured": {"batching.max_blind_growth": None},
}


def over_seeds(
    size: str, text: str, methods: Mapping[str, Changes], *, seeds: tuple[int, ...]
) -> Comparison:
    """Return the comparison of the main runs.

    It has the chosen setting of each method, and for each part of ours a variant in which only this
    part is off.

    Args:
      size: "small" or "half".
      text: "stdlib", or the folder of prepared rows.
      methods: The changes of each method, by "method: setting"; DiLoCo and ours are among them.
      seeds: The seeds to run; they must differ from the seeds of the tuning.
    """
    ours = next(changes for name, changes in methods.items() if name.startswith("ours: "))
    parts = {
        f"ours with {part}: the rest the same": {**ours, **off} for part, off in PARTS_OFF.items()
    }
    return tuning(size, text, {**methods, **parts}, seeds=seeds)


def get_comparison() -> Comparison:
    """Return the comparison of the trials at 0.08 M parameters on the standard library."""
    return tuning("small", "stdlib", trials("small"))
