"""The front of a comparison: communications against tokens and time, at equal loss."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adloco_jax.study.figures import look, thousands

_DECADES = 30  # the ratio from which an axis is logarithmic

# Panels: across, up, labels.
_PANELS = (
    ("syncs", "tokens", "blocking communications", "tokens"),
    ("bytes", "tokens", "bytes moved", "tokens"),
    ("bytes", "time_s", "bytes moved", "simulated seconds"),
)


def draw(table: dict, folder: str | Path, *, command: str) -> Path:
    """Writes `front.png`: for each variant, what reaching the target losses took.

    Args:
      table: As `compare.tabulate` gives it.
      folder: The comparison's.
      command: What made the comparison, for the caption.

    Returns:
      The figure's path.
    """
    path = Path(folder) / "front.png"
    figure(table, command=command).savefig(path, dpi=150)
    return path


def figure(table: dict, *, command: str) -> Figure:
    """The front as a figure, a row of panels for each loss; see `draw`."""
    losses, rows = table["target_losses"], table["rows"]
    reached_by = [
        {
            name: row["to_target"][index]
            for name, row in rows.items()
            if row["to_target"][index]["tokens"]["median"] is not None
        }
        for index in range(len(losses))
    ]
    drawn = [(loss, reached) for loss, reached in zip(losses, reached_by, strict=True) if reached]
    nobody = [f"{loss:g}" for loss, reached in zip(losses, reached_by, strict=True) if not reached]
    missing = [
        f"{name} ({loss:g})" for loss, reached in drawn for name in rows if name not in reached
    ]
    page = Figure(figsize=(11, 1.6 + 3.4 * len(drawn)), layout="constrained")
    # A loss that nobody has reached has no row of panels.
    grid = page.subplots(max(len(drawn), 1), len(_PANELS), squeeze=False, sharex="col")
    if not drawn:
        for ax in grid.flat:
            ax.remove()
    legend = {}
    for index, ((loss, reached), axes) in enumerate(zip(drawn, grid, strict=False)):
        for ax, (x, y, x_label, y_label) in zip(axes, _PANELS, strict=True):
            _panel(ax, reached, list(rows), x, y)
            _span([ax], "y", list(reached.values()), y)
            ax.set_ylabel(f"{y_label}, to {loss:g}")
            if index == len(drawn) - 1:
                ax.set_xlabel(x_label)
        legend |= dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    every = [cost for _, reached in drawn for cost in reached.values()]
    for axes, (x, *_) in zip(grid.T, _PANELS, strict=True):
        _span(axes, "x", every, x)
    if legend:
        page.legend(
            legend.values(), legend, loc="outside upper center", ncols=4, frameon=False, fontsize=9
        )
    shown, num_seeds = ", ".join(f"{loss:g}" for loss in losses), len(table["seeds"])
    spread, by = f"median of {num_seeds} seeds, bars from the lowest to the highest", "half of the"
    if num_seeds == 2:
        spread, by = "range of 2 seeds, with a mark at the higher", "both"
    text = (
        f"What each variant had spent when its consensus first reached {shown} nats/token on"
        f" held-out text: {spread}; down and left is better. Grey: the front, variants that no"
        f" other beats in both. {table['charged']} Simulated seconds are {table['simulated']}."
    )
    if nobody:
        text += f" Not reached by {by} seeds of any variant, so not drawn: {', '.join(nobody)}."
    if missing:
        text += f" Not reached by {by} seeds: {'; '.join(missing)}."
    caption = "\n".join(textwrap.wrap(f"{text} Made by: {command}", 165))
    page.supxlabel(caption, fontsize=8, x=0.01, ha="left", parse_math=False)
    return page


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one is at most equal to in both coordinates, by the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _panel(ax: Axes, reached: dict, names: Sequence[str], x: str, y: str) -> None:
    points = [(row[x]["median"], row[y]["median"]) for row in reached.values()]
    for name, row in reached.items():
        style = look(names.index(name))  # as in the report
        spans = [[[s["median"] - s["low"]], [_high(s) - s["median"]]] for s in (row[x], row[y])]
        ax.errorbar(
            row[x]["median"],
            row[y]["median"],
            xerr=spans[0],
            yerr=spans[1],
            color=style["color"],
            marker=style["marker"],
            ms=8,
            lw=1,
            capsize=2,
            ls="",
            label=name,
        )
    edge = front(points)
    ax.plot(*zip(*edge, strict=True), color="0.6", lw=1.5, zorder=0) if edge else None
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(thousands())
    ax.tick_params(which="both", labelsize=8)
    ax.grid(color="0.92", which="both")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _span(axes: Sequence[Axes], name: str, rows: Sequence[dict], measure: str) -> None:
    """Axes from zero, as ratios are what counts; logarithmic where the values span decades."""
    values = [_high(row[measure]) for row in rows] + [row[measure]["low"] for row in rows]
    positive = [value for value in values if value > 0]
    if not positive:  # nothing was spent: zero, and a whole number to see it by
        for ax in axes:
            getattr(ax, f"set_{name}lim")(0, 1)
            getattr(ax, f"{name}axis").set_major_locator(MaxNLocator(1, integer=True))
        return
    low, high = min(positive), max(positive)
    for ax in axes:
        if high > _DECADES * low:  # symlog, as a variant may also communicate nothing
            getattr(ax, f"set_{name}scale")("symlog", linthresh=low)
            getattr(ax, f"set_{name}lim")(0, 2 * high)
        else:
            getattr(ax, f"set_{name}lim")(0, 1.1 * high)
            whole = measure != "time_s"
            getattr(ax, f"{name}axis").set_major_locator(MaxNLocator(6, integer=whole))


def _high(spread: dict) -> float:
    return spread["median"] if spread["high"] is None else spread["high"]
