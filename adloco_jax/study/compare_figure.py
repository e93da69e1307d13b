"""The front of a comparison: what each variant spent to reach one and the same loss."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from adloco_jax.study import chart
from adloco_jax.study.compare import MEASURES
from adloco_jax.study.figures import finish, legend, look, small_letters
from adloco_jax.study.summary import short

_DECADES = 30  # the ratio from which an axis is logarithmic

# A panel for each question: what is across and up.
_QUESTIONS = {
    "What do fewer communications cost in tokens?": ("syncs", "tokens"),
    "What do fewer bytes cost in tokens?": ("bytes", "tokens"),
    "What do fewer communications cost in time?": ("syncs", "time_s"),
}


@small_letters
def figure(table: dict, *, command: str) -> Figure:
    """Draw what each variant spent to reach a target loss, a panel for each question.

    The loss is the one that most variants reached, of several the lowest.

    Args:
      table: From `compare.tabulate`. If no variant reached a loss, there are no panels.
      command: What made the comparison, for the caption.
    """
    rows, losses = table["rows"], table["target_losses"]
    spent = [{name: row["to_target"][i] for name, row in rows.items()} for i in range(len(losses))]
    reached = [
        {name: cost for name, cost in own.items() if cost["tokens"]["median"] is not None}
        for own in spent
    ]
    page = Figure(figsize=(11, 5 if any(reached) else 1.6), layout="constrained")
    best = max(range(len(losses)), key=lambda index: (len(reached[index]), -losses[index]))
    looks = {name: look(place) | {"linestyle": ""} for place, name in enumerate(rows)}
    if costs := reached[best]:
        axes = page.subplots(1, len(_QUESTIONS))
        for ax, (question, (x, y)) in zip(axes, _QUESTIONS.items(), strict=True):
            for name, cost in costs.items():
                _mark(ax, cost[x], cost[y], label=name, **looks[name])
            edge = front([(cost[x]["median"], cost[y]["median"]) for cost in costs.values()])
            ax.plot(*zip(*edge, strict=True), color="0.6", lw=1.5, zorder=0)
            for name, key in (("x", x), ("y", y)):
                _span(ax, name, [cost[key] for cost in costs.values()], is_whole=key != "time_s")
            ax.set(title=question, xlabel=MEASURES[x], ylabel=MEASURES[y])
            finish(ax)
        legend(page)
    text = _caption(table, losses[best], costs)
    text = "\n".join(textwrap.wrap(f"{text} Made by: {command}", 150))
    page.supxlabel(text, fontsize=8, x=0.01, ha="left", parse_math=False)
    return page


def _caption(table: dict, loss: float, costs: dict[str, dict]) -> str:
    if not costs:
        losses = ", ".join(f"{loss:g}" for loss in table["target_losses"])
        return f"No variant reached {losses} nats/token in half of its seeds."
    num_seeds = len(table["seeds"])
    spread, by = f"median of {num_seeds} seeds, bars from the lowest to the highest", "half of the"
    if num_seeds == 2:
        spread, by = "range of 2 seeds, with a mark at the higher", "both"
    text = (
        f"What each variant had spent when its consensus first reached {loss:g} nats/token on"
        f" held-out text: {spread}; down and left is better. Grey: the front, the variants that no"
        f" other beats in both. {table['charged']} Seconds are simulated {table['simulated']}."
    )
    missing = [name for name in table["rows"] if name not in costs]
    return text + (f" Not reached by {by} seeds: {'; '.join(missing)}." if missing else "")


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


def _span(ax: Axes, name: str, spreads: Sequence[dict], *, is_whole: bool) -> None:
    """An axis from zero, as ratios are what counts; logarithmic where the values span decades."""
    positive = [v for spread in spreads for v in (spread["low"], _high(spread)) if v > 0]
    low, high = min(positive, default=1), max(positive, default=1 / 1.1)
    is_log = high > _DECADES * low
    limit = (2 if is_log else 1.1) * high
    ticks = chart.axis("", [low if is_log else 0, limit], base=10 * is_log, whole=is_whole).ticks
    if is_log:  # symlog, as a variant may also communicate nothing
        getattr(ax, f"set_{name}scale")("symlog", linthresh=low)
        ticks = [0, *ticks]
    axis = getattr(ax, f"{name}axis")
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: short(value))
    ax.set(**{f"{name}lim": (0, limit)})


def _high(spread: dict) -> float:
    return spread["median"] if spread["high"] is None else spread["high"]
