"""The style of all figures, and the figure that compares runs: loss against its costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from adloco_jax.study import curves
from adloco_jax.study.curves import Run, Variant

WIDTH = 7.0  # inches: what a page of A4 or letter holds, so print does not shrink the letters

# Okabe and Ito's colours, black last and without yellow, too pale for a line. Markers and dashes
# tell curves apart in grey print; their numbers have no common factor, so no look comes back
# before the 105th curve.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))

_MAX_LABEL = 36  # characters of a legend's entry
_MAX_NAMED = 12  # trainers that a legend names one by one

# Decorates what draws: letters that stay readable in print.
small_letters = rc_context(
    dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 9)
    | dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5)
    | {"lines.linewidth": 1.3, "lines.markersize": 4}
)


class Look(TypedDict, total=False):
    """How a curve is drawn."""

    color: str
    marker: str
    linestyle: str | tuple
    linewidth: float
    zorder: float


@dataclass(frozen=True)
class Drawing:
    """A figure, the name of its file, its heading, and what it shows in words."""

    name: str
    title: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Clock:
    """Simulated time: the cluster's name, and for each run's folder the end of each round (s)."""

    cluster: str
    end_s: Mapping[Path, Mapping[int, float]]


def look(index: int) -> Look:
    """How the curve with this number looks, the same in every figure."""
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
    }


def trainer_looks(run: Run) -> dict[int, tuple[Look, str]]:
    """Style and label of each trainer's curves.

    Up to twelve trainers each have a look of their own. Of more, those that took part in the
    last round (at most six of them) have, and the others are thin and grey.
    """
    rounds = curves.lines(run.events, "round")
    named = trainers = list(curves.by_trainer(rounds))
    if len(trainers) > _MAX_NAMED:
        last = max(e["round"] for e in rounds)
        named = sorted(e["trainer"] for e in rounds if e["round"] == last)[:6]
    grey: Look = {"color": "0.65", "marker": "", "linewidth": 0.8, "zorder": 1.2}
    # Dashes mean something else where trainers are drawn.
    own = {t: (look(i) | {"linestyle": "-"}, f"trainer {t}") for i, t in enumerate(named)}
    return {trainer: own.get(trainer, (grey, "other trainers")) for trainer in trainers}


def finish(ax: Axes) -> None:
    """A quiet grid behind the data, and no box around it."""
    ax.grid(color="0.92", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure) -> None:
    """One legend for all panels, above them, each label once."""
    handles = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    longest = max(map(len, handles))
    ncols = max(1, min(len(handles), int(figure.get_figwidth() * 72 / (4.7 * longest + 42))))
    more_rows = math.ceil(len(handles) / ncols) - 1
    figure.set_figheight(figure.get_figheight() + 0.19 * more_rows)
    shown = figure.legend(handles.values(), handles, loc="outside upper center", ncols=ncols)
    shown.set_frame_on(False)
    for text in shown.get_texts():
        text.set_parse_math(False)


def plain_decades(ax: Axes, lowest: float, highest: float) -> None:
    """Labels of a logarithmic y axis: between decades too, where there are few of them."""
    if highest < 30 * lowest:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
    if highest < 1e5 and lowest > 1e-4:
        ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def printable(label: str) -> str:
    """A label for a figure: one line of at most 36 characters that the font has."""
    glyphs = _glyphs()
    text = "".join(c if ord(c) in glyphs else "\N{REPLACEMENT CHARACTER}" for c in label.strip())
    if len(text) > _MAX_LABEL:
        text = f"{text[: _MAX_LABEL // 2]}…{text[1 - _MAX_LABEL // 2 :]}"
    return f" {text}" if text.startswith("_") else text  # Matplotlib hides what begins with one


@lru_cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties())).get_charmap())


def look_every(count: int) -> int:
    """Points from one marker to the next, so that a long curve carries about ten."""
    return max(1, count // 10)


@small_letters
def loss(variants: Sequence[Variant], clock: Clock | None, *, field: str = "loss") -> Drawing:
    """Loss (or accuracy) against tokens, communications, bytes and simulated time.

    Args:
      variants: What to compare. A single run shows its trainers beside the consensus.
      clock: The simulated time, if there is one to draw over.
      field: "loss", or "accuracy" of runs that classify.

    Returns:
      The drawing; a cost that stays zero in all runs has no panel. Where no run was evaluated
      it is the training loss.
    """
    runs = [run for variant in variants for run in variant.runs]
    heldout = any(map(curves.is_evaluated, runs))
    whole = {run.folder: _points(run, clock, field, heldout) for run in runs}
    drawn = _of_variants(variants, whole)
    if len(runs) == 1:
        drawn = [
            (label, style, [_points(runs[0], clock, field, heldout, trainer)])
            for trainer, (style, label) in trainer_looks(runs[0]).items()
        ]
        bold: Look = {"color": "black", "linewidth": 3, "zorder": 1.5}
        drawn += [("consensus", bold, [*whole.values()])] if heldout else []
    spent = {name: any(p[name] for own in whole.values() for p in own) for name in curves.COSTS}
    costs = {k: v for k, v in curves.COSTS.items() if k == "tokens" or spent[k]}
    if clock:
        costs["simulated_s"] = f"simulated time on {clock.cluster} (s)"
    figure = Figure(figsize=(WIDTH, 3.4 if len(costs) < 3 else 5.6), layout="constrained")
    mosaic = {1: "0", 2: "01", 3: "00;12", 4: "01;23"}[len(costs)]
    panels = figure.subplot_mosaic(mosaic, sharey=True)
    for (cost, label), (place, ax) in zip(costs.items(), panels.items(), strict=True):
        for name, style, seeds in drawn:
            _draw(ax, [_xy(points, cost) for points in seeds], name, style)
        ax.set_xlabel(label)
        _cost_axis(ax, cost, [_xy(points, cost)[0] for points in whole.values()])
        if place in ("13" if len(costs) % 2 == 0 else "2"):  # a panel stands to its left
            ax.tick_params(labelleft=False)
        else:
            ax.set_ylabel(_quantity(runs, field, heldout))
        if not any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in ax.lines):
            ax.text(0.5, 0.5, f"no finite {field}", ha="center", transform=ax.transAxes)
        finish(ax)
    legend(figure)
    caption = _loss_caption(variants, clock, field, heldout)
    return Drawing(field, f"{field.capitalize()} against what it cost", figure, caption)


def _points(
    run: Run, clock: Clock | None, field: str, heldout: bool, trainer: int | None = None
) -> list[dict]:
    """A run's or a trainer's curve; also over simulated time, None where it is not known."""
    if heldout:
        who = "consensus" if trainer is None else trainer
        points = curves.heldout_points(run.events, trainer=who, field=field)
    else:
        points = curves.training_points(run.events, trainer=trainer)
    end_s = clock.end_s.get(run.folder, {}) if clock else {}
    return [point | {"simulated_s": end_s.get(point["round"])} for point in points]


def _of_variants(
    variants: Sequence[Variant], whole: Mapping[Path, list[dict]]
) -> list[tuple[str, Look, list[list[dict]]]]:
    """A label, a look, and the curves of the seeds, for each variant."""
    names = [printable(variant.label) for variant in variants]
    if len(set(names)) < len(names):  # equal once shortened
        names = [f"{place}. {name}" for place, name in enumerate(names, start=1)]
    drawn = []
    for place, (name, variant) in enumerate(zip(names, variants, strict=True)):
        seeds = [whole[run.folder] for run in variant.runs if whole[run.folder]]
        drawn.append(
            (f"{name} ({len(seeds)} seeds)" if len(seeds) > 1 else name, look(place), seeds)
        )
    return drawn


def _xy(points: Sequence[dict], cost: str) -> tuple[list[float], list[float]]:
    known = [p for p in points if p[cost] is not None]
    return [p[cost] for p in known], [p["value"] for p in known]


def _draw(
    ax: Axes, seeds: Sequence[tuple[list[float], list[float]]], name: str, style: Look
) -> None:
    """A line for a single curve; for several their median, with a band."""
    if not seeds:
        return
    x, y = seeds[0]
    if len(seeds) > 1:
        x, low, y, high = curves.band(seeds)
        ax.fill_between(x, low, high, color=style["color"], alpha=0.25, lw=0)
    ax.plot(x, y, markevery=look_every(len(x)), label=name, **style)


def _cost_axis(ax: Axes, cost: str, spent: Sequence[Sequence[float]]) -> None:
    """Scale and ticks; logarithmic where the curves' ends are decades apart."""
    drawn = [own for x in spent if (own := [value for value in x if value > 0])]
    if not drawn:
        ax.set_xlim(-0.5, 1)
        return
    ends = [*map(max, drawn)]
    if max(ends) >= 10 * min(ends):
        _decades(ax, min(map(min, drawn)), max(ends))
    else:
        ax.set_xlim(-0.03 * max(ends), 1.03 * max(ends))
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=cost in ("tokens", "syncs")))
    ax.xaxis.set_major_formatter(Thousands(unit="B" if cost == "bytes" else ""))


class Thousands(EngFormatter):
    """A tick's label with a prefix from 1 k on; below, and below 1, the plain number."""

    ENG_PREFIXES = {power: name for power, name in EngFormatter.ENG_PREFIXES.items() if power >= 0}


def short(value: float) -> str:
    """A number in three digits and with a thousand's prefix."""
    return Thousands()(float(f"{value:.3g}"))


def _decades(ax: Axes, lowest: float, highest: float) -> None:
    """A logarithmic x axis, linear next to 0 where a curve begins at 0."""
    first = 10.0 ** math.floor(math.log10(lowest))
    begins_at_0 = any(np.min(line.get_xdata(), initial=lowest) <= 0 for line in ax.lines)
    ax.set_xscale("symlog", linthresh=first)
    ax.locator_params("x", numticks=7)
    ax.set_xlim(-0.2 * first if begins_at_0 else lowest / 1.3, 1.3 * highest)


def _quantity(runs: Sequence[Run], field: str, heldout: bool) -> str:
    if field == "accuracy":
        return "held-out accuracy (fraction)"
    unit = "example" if any(map(curves.is_classifier, runs)) else "token"
    return f"{'held-out' if heldout else 'training'} loss (nats/{unit})"


def _loss_caption(
    variants: Sequence[Variant], clock: Clock | None, field: str, heldout: bool
) -> str:
    runs = [run for variant in variants for run in variant.runs]
    shown = f"Held-out {field}" if heldout else "Training loss (no evaluation is on record)"
    if len(runs) == 1:
        shown += " by trainer (thin) and of the consensus (bold)" if heldout else " by trainer"
        shown += "."
    else:
        shown += " of the consensus" if heldout else " averaged over the trainers of a round"
        shown += (
            ", a curve per variant: of several seeds the median, with a band from minimum to"
            " maximum (from five on, between quartiles), on the interval that all seeds cover."
        )
        left_out = [v.label for v in variants if not any(map(curves.is_evaluated, v.runs))]
        if heldout and left_out:
            shown += f" Never evaluated, so not drawn: {', '.join(left_out)}."
    shown += (
        " Costs are summed over trainers. Communications are blocking; where the consensus is an"
        " average of trainers, gathering them is counted too. A horizontal axis over decades is"
        " logarithmic, except next to zero. A gap is a value that was not finite."
    )
    return shown + (f" Time is simulated on the cluster “{clock.cluster}”." if clock else "")
