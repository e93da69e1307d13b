"""Charts of the loss of runs, over each cost such as tokens or bytes.

A variant is a group of runs whose configs differ only in the seed. A trainer is a model in
training, and the consensus the model that stands for all trainers of a run. A point of a curve is a
dict: the loss as `value`, and each cost.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

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
    """Return the CSS class of the colour, and the label, of each trainer's curve.

    The label is empty if the trainer had no part in the last round.
    """
    trainers = curves.by_trainer(curves.lines(run.events, "round"))  # each with its lines
    last = max(rounds[-1]["round"] for rounds in trainers.values())
    looks = {}
    for index, (trainer, rounds) in enumerate(trainers.items()):
        color = f"c{index % (chart.NUM_COLORS - 1)}"  # the last colour is the consensus's
        label = ""
        if rounds[-1]["round"] == last:
            label = f"trainer {trainer}"
        looks[trainer] = (color, label)
    return looks


class _Drawn(NamedTuple):
    """What is drawn as one curve: see `chart.Curve`, and the points of each of its runs."""

    label: str
    key: str
    classes: str
    seeds: list[list[dict]]  # of each run, the points that `curves` makes


def charts(variants: Sequence[Variant]) -> dict[str, Panel]:
    """Draw the held-out losses of runs, or without any the training losses, over each cost.

    A single run has a curve for each trainer and the consensus model. Several runs have one for
    each variant, with a band over its seeds. Returns the charts by the cost's short name.
    """
    runs = [run for variant in variants for run in variant.runs]
    heldout = any(map(curves.is_evaluated, runs))

    def points(run: RunRecord, trainer: int | None = None) -> list[dict]:
        """Return the points of a trainer (an id) of a run.

        None: those of the consensus model, or of training losses the trainers' mean.
        """
        if heldout:
            who = "consensus" if trainer is None else trainer
            return curves.heldout_points(run.events, trainer=who)
        return curves.training_points(run.events, trainer=trainer)

    drawn = []
    consensus: list[list[dict]] = []  # of each run: points of its consensus, or of the mean
    for number, variant in enumerate(variants, start=1):
        seeds = [points(run) for run in variant.runs]
        consensus += seeds
        label = chart.shortened(variant.label)
        drawn.append(_Drawn(label, str(number), chart.look(number - 1), seeds))
    if len(runs) == 1:  # a thin curve for each trainer, with a label where it is alive
        drawn = []
        for trainer, (color, label) in trainer_looks(runs[0]).items():
            seeds = [points(runs[0], trainer)]
            drawn.append(_Drawn(label, f"trainer {trainer}", f"{color} thin", seeds))
        if heldout:
            last_color = f"c{chart.NUM_COLORS - 1}"  # which no trainer has
            drawn.append(_Drawn("consensus", key="", classes=f"{last_color} bold", seeds=consensus))

    units = dict.fromkeys(run.start["loss_unit"] for run in runs)  # each once, in order
    unit = " or ".join(units)
    quantity = "held-out loss" if heldout else "training loss"
    if unit:
        quantity += f" ({unit})"

    panels = {}
    for cost, (name, cost_label, tick_unit) in _COSTS.items():
        shown = [_curve(cost, each) for each in drawn]
        spent = []
        values = []  # all y that are drawn
        for curve in shown:
            spent += curve.x
            values += curve.y
            for edge in curve.band or ():
                values += edge
        # A cost that no run has, such as bytes of one worker, has no chart. The chart over tokens
        # is always drawn, so that there is one.
        if not any(spent) and cost != "tokens":
            continue
        # What each run had spent at its end; runs without points or cost are left out. Ends far
        # apart need a logarithmic axis.
        ends = [found[-1][cost] for found in consensus if found and found[-1][cost]]
        if ends and max(ends) >= _DECADE * min(ends):
            x = chart.axis(cost_label, spent, base=10, unit=tick_unit)
        else:
            x = chart.axis(cost_label, [0.0, *spent], unit=tick_unit)
        positive = [value for value in values if 0 < value < math.inf]
        base = 0  # linear
        if positive and max(positive) > _DECADE * min(positive):
            base = 10
        # The chart of the loss is the page's largest, and has more ticks than others.
        y = chart.axis(quantity, values, base=base, margin=0.03, max_ticks=7)
        panels[name] = chart.chart(x, y, shown, title=f"Loss over {cost_label}", height=430)
    return panels


def _curve(cost: str, drawn: _Drawn) -> Curve:
    """Make a curve over a cost: of its only run, or of the median of its runs with a band.

    `cost` is the key of a point to use as x. Runs without points, which were never evaluated, do
    not count. Without any other the curve is empty.
    """
    x_and_y = []  # of each run
    for points in drawn.seeds:
        if points:
            x_and_y.append(([p[cost] for p in points], [p["value"] for p in points]))
    if len(x_and_y) >= 2:
        x, low, median, high = (part.tolist() for part in curves.band(x_and_y))
        return Curve(x, median, drawn.classes, drawn.label, drawn.key, (low, high))
    x = []
    y = []
    if x_and_y:
        x, y = x_and_y[0]
    return Curve(x, y, drawn.classes, drawn.label, drawn.key)


def caption(variants: Sequence[Variant]) -> str:
    """Return the caption below the charts: what the curves show, and which are not drawn."""
    runs = [run for variant in variants for run in variant.runs]
    heldout = any(map(curves.is_evaluated, runs))
    if len(runs) == 1:
        if heldout:
            return "Held-out loss by trainer, and of the consensus in bold."
        return "Training loss (no evaluation is on record) by trainer."
    shown = "Training loss (no evaluation is on record) averaged over the trainers of a round"
    if heldout:
        shown = "Held-out loss of the consensus"
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
    """Return a text for readers of the charts: how costs are counted, what axes and gaps mean."""
    return (
        "Costs are summed over trainers. Synchronisations are blocking; where the consensus is an"
        " average of trainers, gathering them is counted too. An axis is logarithmic where runs end"
        " more than a decade apart. A gap is a value that was not finite."
    )
