"""The figures of one run, over its rounds: batches, merges, the batch-size test, time, memory."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from adloco_jax.study import curves, figures, summary
from adloco_jax.study.curves import Run
from adloco_jax.study.figures import WIDTH, Drawing, finish, legend, look_every, small_letters

_BLUE, _ORANGE = "#0072B2", "#E69F00"
_ROOM = 0.1  # of the axis, between merges whose weights and barriers are written beside them
_MAX_PROGRAMS = 16  # bars of compiled programs
_PROGRAM_COLORS = {
    **{("miss", "foreground"): "#D55E00", ("hit", "foreground"): "#F4C9A5"},
    **{("miss", "background"): "#0072B2", ("hit", "background"): "#A6D3EE"},
}


def draw(run: Run) -> list[Drawing]:
    """All figures of one run for which its ledger has something to show.

    Args:
      run: With at least one finished round.
    """
    drawings = [batches(run), merges(run), noise(run), times(run), memory(run)]
    return [drawing for drawing in drawings if drawing is not None]


@small_letters
def batches(run: Run) -> Drawing:
    """Requested and effective batch, accumulation, and trainers alive, round by round."""
    rounds = curves.lines(run.events, "round")
    figure = Figure(figsize=(WIDTH, 6.4), layout="constrained")
    sizes_ax, accum_ax, alive_ax = figure.subplots(3, 1, sharex=True, height_ratios=(5, 3, 2))
    looks = figures.trainer_looks(run)
    for trainer, own in curves.by_trainer(rounds).items():
        style, label = looks[trainer]
        effective = [e["micro_batch_size"] * e["num_accum_steps"] for e in own]
        _steps(sizes_ax, own, effective, **style | {"marker": "", "linestyle": "--"})
        requested = [e["requested_batch_size"] for e in own]
        _steps(sizes_ax, own, requested, label=label, **style)
        _steps(accum_ax, own, [e["num_accum_steps"] for e in own], **style)
    sizes_ax.plot([], [], color="0.4", ls="--", label="effective batch")
    most = run.start["max_batch_size"]
    sizes_ax.axhline(most, label="max_batch_size", color="black", ls=":", zorder=1)
    for ax in (sizes_ax, accum_ax):
        _powers_of_two(ax)
    alive = Counter(e["round"] for e in rounds)
    edges = [min(alive) - 1, *alive]
    alive_ax.stairs([*alive.values()], edges, color="black", lw=1.8, baseline=None)
    alive_ax.set_ylim(0, max(alive.values()) + 0.5)
    alive_ax.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    labels = ("batch per worker\n(sequences)", "accumulation\n(micro-batches)", "trainers\nalive")
    _finish(figure, max(alive), labels, marked=curves.lines(run.events, "merge"))
    caption = (
        "Top: batch per worker that the test requested (solid) and that updates used (dashed)."
        " Middle: micro-batches accumulated into one update. Bottom: trainers that took part in"
        " the round. Both upper axes are logarithmic."
    )
    return Drawing("batches", "Batches and accumulation", figure, caption)


@small_letters
def merges(run: Run) -> Drawing | None:
    """The tree of merges, with weights and barriers; None with a single trainer."""
    rounds, merged = (curves.lines(run.events, name) for name in ("round", "merge"))
    joined = merged + curves.lines(run.events, "refusal")
    by_trainer, last = curves.by_trainer(rounds), max(e["round"] for e in rounds)
    if len(by_trainer) < 2:
        return None
    named = (t for event in joined for t in [event["into"], *event["members"]])
    order = _lanes(list(dict.fromkeys([*by_trainer, *named])), merged)
    lanes = {trainer: lane for lane, trainer in enumerate(order)}
    height = 1.3 + (0.32 if len(lanes) <= 16 else 0.18) * len(lanes)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    ax = figure.subplots()
    for trainer, (style, _) in figures.trainer_looks(run).items():
        for workers, group in itertools.groupby(by_trainer[trainer], lambda e: e["workers"]):
            x = [e["round"] for e in group]
            line = {"color": style["color"], "lw": min(8, 0.8 + 0.9 * workers)}
            ax.plot([x[0] - 1, x[-1]], [lanes[trainer]] * 2, solid_capstyle="butt", **line)
    is_noted = (
        min(np.diff(sorted({0, *(e["round"] for e in joined)})), default=last) >= _ROOM * last
    )
    for event in joined:
        _draw_merge(ax, event, lanes, is_noted=is_noted)
    left = [e for e in curves.lines(run.events, "fault") if e.get("kind") == "quarantine"]
    if left := [e for e in left if e["trainer"] in lanes]:
        x, y = [e["round"] for e in left], [lanes[e["trainer"]] for e in left]
        ax.plot(x, y, "X", color="black", ms=9, label="quarantined")
    ax.set_yticks([*lanes.values()], [f"trainer {trainer}" for trainer in lanes])
    ax.set_ylim(len(lanes) - 0.4, -0.9)
    _finish(figure, last)
    ax.grid(visible=False, axis="y")
    caption = (
        "A line per trainer, thicker with more workers (at most"
        f" {max(e['workers'] for e in rounds)})."
        " A vertical line is a merge: its dot is the trainer that goes on, its crosses those that"
        " end; dashed, a refused one. Beside each member its weight in the average; below the dot"
        " the barrier, the loss after less the weighted mean of the losses before (nats)."
        " Quarantined trainers left the run, because their updates were not finite."
    )
    return Drawing("merges", "The tree of merges", figure, caption)


@small_letters
def noise(run: Run) -> Drawing | None:
    """Noise, signal and value of the batch-size test; None where no test was made."""
    rounds = curves.lines(run.events, "round")
    labels = {"noise": "noise tr Σ", "signal": "signal |G|²"}
    labels |= {"test_value": "test value and\nnext batch (sequences)"}
    if all(e[name] is None for e in rounds for name in labels):
        return None
    figure = Figure(figsize=(WIDTH, 6.4), layout="constrained")
    looks = figures.trainer_looks(run)
    for ax, name in zip(figure.subplots(3, 1, sharex=True), labels, strict=True):
        ax.set_yscale("log")
        positive = [e[name] for e in rounds if e[name] is not None and e[name] > 0]
        bottom = min(positive, default=1.0) / 2
        for trainer, own in curves.by_trainer(rounds).items():
            style, label = looks[trainer]
            x, y = (np.array([e[key] for e in own], float) for key in ("round", name))
            shown = np.where(y > 0, y, math.nan)
            ax.plot(x, shown, markevery=look_every(len(x)), label=label, **style)
            mark = {"marker": "v", "mfc": "none", "ms": 7, "color": style["color"]}
            if (below := x[y <= 0]).size:
                ax.plot(below, below * 0 + bottom, ls="", label="not positive", **mark)
            if name == "test_value":
                following = [e["next_batch_size"] for e in own]
                ax.plot(x, following, **style | {"marker": "", "linestyle": "--"})
        if positive:
            figures.plain_decades(ax, min(positive), max(positive))
    ax.plot([], [], color="0.4", ls="--", label="next batch per worker")
    marked = curves.lines(run.events, "merge")
    _finish(figure, max(e["round"] for e in rounds), [*labels.values()], marked=marked)
    caption = (
        f"Measured at the start of each round by the {run.start['config']['batching']['test']}"
        " test: the gradient's noise (variance of single sequences' gradients), its signal (squared"
        " norm of the mean gradient; the estimate may be negative: triangles at the lower edge),"
        " and the requested batch per worker before rounding and caps (solid; the next round's"
        " batch dashed). All axes are logarithmic. A gap is a test that was skipped or not finite."
    )
    return Drawing("noise", "Noise, signal and test value", figure, caption)


@small_letters
def times(run: Run) -> Drawing:
    """Seconds of each round, its waits for compilation, and compile time by program."""
    rounds, programs = curves.stalls(run.events), curves.lines(run.events, "compile")
    longest = sorted(programs, key=lambda e: -e["seconds"])[:_MAX_PROGRAMS]
    shown = [e for e in programs if e in longest][:_MAX_PROGRAMS]
    heights = [2.0, 0.4 + 0.22 * len(shown)][: 2 if shown else 1]
    figure = Figure(figsize=(WIDTH, 0.5 + sum(heights) + 0.1 * len(heights)), layout="constrained")
    [round_ax, *rest] = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    numbers = sorted(rounds)
    edges = np.array([numbers[0] - 1, *numbers]) + 0.5
    step, stall = np.array([rounds[number] for number in numbers]).T
    stall = np.minimum(step, stall)
    round_ax.stairs(step, edges, fill=True, color="#9CC9E3", label="round")
    hatched = {"facecolor": _ORANGE, "edgecolor": "black", "hatch": "////", "lw": 0}
    round_ax.stairs(stall, edges, fill=True, label="of it, waiting for compilation", **hatched)
    round_ax.set_xlabel("round")
    round_ax.set_ylabel("wall-clock time (s)")
    round_ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    round_ax.set_xlim(edges[0], edges[-1])
    round_ax.set_ylim(0, None)
    finish(round_ax)
    for ax in rest:
        _draw_programs(ax, shown)
    legend(figure)
    caption = (
        f"{'Top: measured' if shown else 'Measured'} seconds of each round, {step.sum():.4g} s in"
        f" all, of which {stall.sum():.4g} s went by waiting for compilation. Evaluations and"
        " checkpoints are not in it."
    )
    if shown:
        caption += (
            f" Bottom: seconds to compile or load the {len(shown)} slowest of {len(programs)}"
            " programs, in the order in which they were ready."
        )
    return Drawing("time", "Time and compilation", figure, caption)


def _draw_programs(ax: Axes, programs: Sequence[dict]) -> None:
    for place, e in enumerate(programs):
        how = "from the cache" if e["cache"] == "hit" else "compiled"
        color = _PROGRAM_COLORS[e["cache"], e["where"]]
        ax.barh(place, e["seconds"], 0.7, color=color, label=f"{how}, {e['where']}")
    ax.set_yticks(
        range(len(programs)), [figures.printable(e["key"]) for e in programs], parse_math=False
    )
    ax.set_ylim(len(programs) - 0.4, -0.6)
    ax.set_xlabel("time to compile or load (s)")
    finish(ax)
    ax.grid(visible=False, axis="y")


@small_letters
def memory(run: Run) -> Drawing | None:
    """The most memory held so far, by round; None where it was not measured."""
    measured = [*{e["round"]: e for e in curves.lines(run.events, "memory")}.values()]
    if not measured:
        return None
    x = [e["round"] for e in measured]
    host = np.array([e["host_peak_bytes"] for e in measured], float)
    device = [max((d for d in e["device_peak_bytes"] if d), default=math.nan) for e in measured]
    program = summary.totals(run.events)["program_bytes"]
    highest = np.nanmax([*host, *device, program or 0])
    unit, name = (2**30, "GiB") if highest >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    ax = figure.subplots()
    # A resumed run's process starts to count again, so these are points, not a sum.
    every = {"markevery": look_every(len(x)), "ms": 5}
    ax.plot(x, host / unit, color=_BLUE, marker="o", label="host process", **every)
    if not np.isnan(device).all():
        device = np.array(device) / unit
        ax.plot(x, device, color="#D55E00", marker="s", label="fullest device", **every)
    if program:
        ax.axhline(program / unit, color="black", ls="--", label="largest program's need")
    ax.set_ylim(0, 1.08 * highest / unit)
    _finish(figure, max(x) or 1, [f"memory ({name})"])
    caption = (
        "Peak memory of the process up to each evaluation, on the host and on the fullest device."
        " Dashed: what the largest program needs on a device, by the compiler's analysis."
    )
    return Drawing("memory", "Memory", figure, caption)


def _finish(
    figure: Figure, num_rounds: int, labels: Sequence[str] = (), marked: Sequence[dict] = ()
) -> None:
    """Round axes, y labels, marks of merges, and the legend."""
    for ax in figure.axes:
        for number, event in enumerate(marked):
            style = {"color": "0.4", "lw": 1, "ls": "-.", "zorder": 1}
            ax.axvline(event["round"], label=None if number else "merge", **style)
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        ax.set_xlim(-0.02 * num_rounds, 1.02 * num_rounds)
        finish(ax)
    for ax, label in zip(figure.axes, labels, strict=False):
        ax.set_ylabel(label)
    figure.axes[-1].set_xlabel("round")
    figure.align_ylabels()
    legend(figure)


def _steps(ax: Axes, own: Sequence[dict], values: Sequence[float], **style) -> None:
    """A value that is constant within each round."""
    x = [own[0]["round"] - 1, *(e["round"] for e in own)]
    every = look_every(len(x))
    ax.plot(x, [*values, values[-1]], drawstyle="steps-post", markevery=every, **style)


def _powers_of_two(ax: Axes) -> None:
    """A logarithmic y axis around what is drawn."""
    values = np.concatenate([line.get_ydata() for line in ax.lines])
    ax.set_yscale("log", base=2)
    lowest, highest = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    ax.set_ylim(0.8 * 2**lowest, 1.25 * 2 ** max(highest, lowest + 1))
    ax.yaxis.set_major_locator(LogLocator(base=2))
    ax.yaxis.set_major_formatter("{x:.0f}")
    ax.yaxis.set_minor_locator(NullLocator())


def _lanes(trainers: Sequence[int], merged: Sequence[dict]) -> list[int]:
    """An order in which no vertical line of a merge crosses a trainer that is still alive."""
    order = list(trainers)
    for event in reversed(merged):  # earlier merges are moved later, and stand closer
        for member in reversed(event["members"]):
            if member != event["into"]:
                order.remove(member)
                order.insert(order.index(event["into"]) + 1, member)
    return order


def _draw_merge(ax: Axes, event: dict, lanes: dict[int, int], *, is_noted: bool) -> None:
    at, into, is_refused = event["round"], event["into"], event["event"] == "refusal"
    rows = [lanes[member] for member in event["members"]]
    ax.plot([at, at], [min(rows), max(rows)], color="black", lw=1.2, ls="--" if is_refused else "-")
    if not is_refused:
        gone = [lanes[member] for member in event["members"] if member != into]
        ax.plot([at] * len(gone), gone, "x", color="black", ms=7, mew=1.8)
        ax.plot([at], [lanes[into]], "o", color="black", ms=6)
    if not is_noted:
        return
    whole = sum(event["weights"])
    near = {"textcoords": "offset points", "fontsize": 8.5}
    for weight, row in zip(event["weights"], rows, strict=True):
        text = f"{weight / whole:.2f}" if whole else "-"
        ax.annotate(text, (at, row), (-4, 3), ha="right", va="bottom", **near)
    text = "not finite" if event["barrier"] is None else f"{event['barrier']:+.4f}"
    ax.annotate(text, (at, lanes[into]), (4, -4), ha="left", va="top", **near)
