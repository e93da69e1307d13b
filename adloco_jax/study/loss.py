"""Charts of the loss of runs, over each cost such as tokens or bytes."""

import math
from collections.abc import Sequence

from adloco_jax.study import chart, curves
from adloco_jax.study.chart import Curve, Panel
from adloco_jax.study.curves import RunRecord, Variant

_DECADE = 10  # the ratio of values from which an axis is logarithmic

# By key of a point: the cost's short name, the label of its axis, and the unit of its ticks.
_COSTS = {
    "tokens": ("Tokens", "tokens, all trainers", ""),
    "updates": ("Sequential steps", "sequential steps", ""),
    "syncs": ("Synchronisations", "synchronisations (blocking, all trainers)", ""),
    "bytes": ("Bytes", "bytes moved, all trainers", "B"),
}


def trainer_looks(run: RunRecord) -> dict[int, tuple[str, str]]:
    """The colour class and the label of each trainer's curve; empty for trainers that had left."""
    trainers = curves.by_trainer(curves.lines(run.events, "round"))
    last = max(rounds[-1]["round"] for rounds in trainers.values())
    looks = {}
    for index, (trainer, rounds) in enumerate(trainers.items()):
        color = f"c{index % (chart.NUM_COLORS - 1)}"  # the last colour is the consensus's
        label = f"trainer {trainer}" if rounds[-1]["round"] == last else ""
        looks[trainer] = (color, label)
    return looks


def charts(variants: Sequence[Variant]) -> dict[str, Panel]:
    """Draw held-out (else training) losses over each cost that a run has.

    A single run has a curve for each trainer and the consensus model. Several runs have one for
    each variant, with a band over its seeds.
    """
    runs = [run for variant in variants for run in variant.runs]
    heldout = any(map(curves.is_evaluated, runs))

    def points(run: RunRecord, trainer: int | None = None) -> list[dict]:
        if heldout:
            who = "consensus" if trainer is None else trainer
            return curves.heldout_points(run.events, trainer=who)
        return curves.training_points(run.events, trainer=trainer)

    # Of each curve: label, key, CSS classes, and the points of each of its seeds.
    drawn: list[tuple[str, str, str, list[list[dict]]]] = []
    consensus: list[list[dict]] = []  # points of each run
    for number, variant in enumerate(variants, start=1):
        seeds = [points(run) for run in variant.runs]
        consensus += seeds
        label = chart.shortened(variant.label)
        drawn.append((label, str(number), chart.look(number - 1), seeds))
    if len(runs) == 1:  # a thin curve for each trainer, with a label where it is alive
        drawn = []
        for trainer, (color, label) in trainer_looks(runs[0]).items():
            seeds = [points(runs[0], trainer)]
            drawn.append((label, f"trainer {trainer}", f"{color} thin", seeds))
        if heldout:
            drawn.append(("consensus", "", "c6 bold", consensus))
    unit = " or ".join(dict.fromkeys(run.start["loss_unit"] for run in runs))
    quantity = "held-out loss" if heldout else "training loss"
    if unit:
        quantity += f" ({unit})"
    made = {}
    for cost, (name, cost_label, tick_unit) in _COSTS.items():
        shown = [_curve(cost, label, key, classes, seeds) for label, key, classes, seeds in drawn]
        spent = [value for curve in shown for value in curve.x]
        if not any(spent) and cost != "tokens":
            continue
        ends = [found[-1][cost] for found in consensus if found and found[-1][cost]]
        if ends and max(ends) >= _DECADE * min(ends):
            x = chart.axis(cost_label, spent, base=10, unit=tick_unit)
        else:
            x = chart.axis(cost_label, [0.0, *spent], unit=tick_unit)
        values = [v for c in shown for part in (c.y, *(c.band or ())) for v in part]
        positive = [value for value in values if 0 < value < math.inf]
        base = 10 if positive and max(positive) > _DECADE * min(positive) else 0
        y = chart.axis(quantity, values, base=base, margin=0.03, max_ticks=7)
        made[name] = chart.chart(x, y, shown, title=f"Loss over {cost_label}", height=430)
    return made


def _curve(
    cost: str, label: str, key: str, classes: str, all_points: Sequence[list[dict]]
) -> Curve:
    """The curve of a variant over a cost: its only run, or the median of its runs with a band."""
    seeds = [
        ([p[cost] for p in found], [p["value"] for p in found]) for found in all_points if found
    ]
    if len(seeds) < 2:
        x, y = seeds[0] if seeds else ([], [])
        return Curve(x, y, classes, label, key)
    x, low, median, high = (part.tolist() for part in curves.band(seeds))
    return Curve(x, median, classes, label, key, (low, high))


def caption(variants: Sequence[Variant]) -> str:
    """The caption below the charts: what the curves show, and which variants are not drawn."""
    runs = [run for variant in variants for run in variant.runs]
    heldout = any(map(curves.is_evaluated, runs))
    shown = "Held-out loss" if heldout else "Training loss (no evaluation is on record)"
    if len(runs) == 1:
        return shown + (" by trainer, and of the consensus in bold." if heldout else " by trainer.")
    shown += " of the consensus" if heldout else " averaged over the trainers of a round"
    if len(runs) > len(variants):
        shown += (
            "; with several seeds: the median, and a band from minimum to maximum (with five seeds"
            " or more, between quartiles)"
        )
    left_out = [v.label for v in variants if not any(map(curves.is_evaluated, v.runs))]
    if heldout and left_out:
        shown += f". Never evaluated, so not drawn: {', '.join(left_out)}"
    return f"{shown}."


def reading() -> str:
    """A text for the reader of the charts: how costs are counted, and what axes and gaps mean."""
    return (
        "Costs are summed over trainers. Synchronisations are blocking; where the consensus is an"
        " average of trainers, gathering them is counted too. An axis is logarithmic where runs end"
        " more than a decade apart. A gap is a value that was not finite."
    )
