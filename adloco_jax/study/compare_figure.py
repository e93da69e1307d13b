"""The front of a comparison: communications against tokens and time, at equal loss."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adloco_jax.study.figures import Thousands, finish, legend, look, small_letters

_DECADES = 30  # the ratio from which an axis is logarithmic

# Panels: measures across and up, with their labels.
_PANELS = (
    {"syncs": "blocking communications", "tokens": "tokens"},
    {"bytes": "bytes moved", "tokens": "tokens"},
    {"bytes": "bytes moved", "time_s": "simulated seconds"},
)


@small_letters
def figure(table: dict, *, command: str) -> Figure:
    """Draw each variant's costs of reaching the target losses: a row of panels for each loss.

    Args:
      table: From `compare.tabulate`. A loss that no variant reached has no row of panels.
      command: What made the comparison, for the caption.
    """
    losses, rows = table["target_losses"], table["rows"]
    reached = {
        f"{loss:g}": {
            name: row["to_target"][index]
            for name, row in rows.items()
            if row["to_target"][index]["tokens"]["median"] is not None
        }
        for index, loss in enumerate(losses)
    }
    drawn = {loss: costs for loss, costs in reached.items() if costs}
    page = Figure(figsize=(11, 1.6 + 3.4 * len(drawn)), layout="constrained")
    looks = {name: look(place) for place, name in enumerate(rows)}  # as in the report
    if drawn:
        grid = page.subplots(len(drawn), len(_PANELS), squeeze=False, sharex="col")
        for axes, (loss, costs) in zip(grid, drawn.items(), strict=True):
            for ax, ((x, _), (y, y_label)) in zip(axes, map(dict.items, _PANELS), strict=True):
                for name, cost in costs.items():
                    _mark(ax, cost[x], cost[y], label=name, **looks[name] | {"linestyle": ""})
                edge = front([(cost[x]["median"], cost[y]["median"]) for cost in costs.values()])
                ax.plot(*zip(*edge, strict=True), color="0.6", lw=1.5, zorder=0)
                _span([ax], "y", [cost[y] for cost in costs.values()], is_whole=y != "time_s")
                ax.set_ylabel(f"{y_label}, to {loss}")
                finish(ax)
        for axes, ((x, x_label), _) in zip(grid.T, map(dict.items, _PANELS), strict=True):
            axes[-1].set_xlabel(x_label)
            _span(axes, "x", [cost[x] for costs in drawn.values() for cost in costs.values()])
    legend(page)
    text = "\n".join(textwrap.wrap(f"{_caption(table, reached)} Made by: {command}", 165))
    page.supxlabel(text, fontsize=8, x=0.01, ha="left", parse_math=False)
    return page


def _caption(table: dict, reached: dict[str, dict]) -> str:
    num_seeds = len(table["seeds"])
    spread, by = f"median of {num_seeds} seeds, bars from the lowest to the highest", "half of the"
    if num_seeds == 2:
        spread, by = "range of 2 seeds, with a mark at the higher", "both"
    text = (
        f"What each variant had spent when its consensus first reached {', '.join(reached)}"
        f" nats/token on held-out text: {spread}; down and left is better. Grey: the front, the"
        f" variants that no other beats in both. {table['charged']} Simulated seconds are"
        f" {table['simulated']}."
    )
    missing = [
        f"{name} ({loss})"
        for loss, costs in reached.items()
        for name in table["rows"]
        if costs and name not in costs
    ]
    if nobody := [loss for loss, costs in reached.items() if not costs]:
        text += f" Not reached by {by} seeds of any variant, so not drawn: {', '.join(nobody)}."
    if missing:
        text += f" Not reached by {by} seeds: {'; '.join(missing)}."
    return text


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front: points that no other one beats in both coordinates, sorted by the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _mark(ax: Axes, x: dict, y: dict, **style) -> None:
    """A point at the medians, with bars over the ranges."""
    across, up = ([[s["median"] - s["low"]], [_high(s) - s["median"]]] for s in (x, y))
    style |= {"xerr": across, "yerr": up, "ms": 8, "lw": 1, "capsize": 2}
    ax.errorbar(x["median"], y["median"], **style)


def _span(axes: Sequence[Axes], name: str, spreads: Sequence[dict], is_whole: bool = True) -> None:
    """Axes from zero, as ratios are what counts; logarithmic where the values span decades."""
    positive = [v for spread in spreads for v in (spread["low"], _high(spread)) if v > 0]
    low, high = min(positive, default=1), max(positive, default=1 / 1.1)
    for ax in axes:
        axis = getattr(ax, f"{name}axis")
        if high > _DECADES * low:  # symlog, as a variant may also communicate nothing
            getattr(ax, f"set_{name}scale")("symlog", linthresh=low)
        else:  # a whole number to see it by, where nothing was spent
            axis.set_major_locator(MaxNLocator(6 if positive else 1, integer=is_whole))
        axis.set_major_formatter(Thousands())
        ax.set(**{f"{name}lim": (0, (2 if high > _DECADES * low else 1.1) * high)})


def _high(spread: dict) -> float:
    return spread["median"] if spread["high"] is None else spread["high"]
