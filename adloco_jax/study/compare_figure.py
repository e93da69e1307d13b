"""The front of a comparison: what each variant spent to reach one and the same loss."""

from collections.abc import Sequence

from adloco_jax.study import chart
from adloco_jax.study.chart import Axis, Curve, Figure
from adloco_jax.study.compare import MEASURES

_DECADES = 30  # the ratio from which an axis is logarithmic

# A panel for each question: what is across and up.
_QUESTIONS = {
    "What do fewer communications cost in tokens?": ("syncs", "tokens"),
    "What do fewer bytes cost in tokens?": ("bytes", "tokens"),
    "What do fewer communications cost in time?": ("syncs", "time_s"),
}


def figure(table: dict, *, command: str) -> Figure:
    """Draw what each variant spent to reach a target loss, a panel for each question.

    The loss is the one that most variants reached, of several the lowest.

    Args:
      table: From `compare.tabulate`. If no variant reached a loss, there are no panels.
      command: What made the comparison, for the caption.

    Returns:
      An SVG file.
    """
    rows, losses = table["rows"], table["target_losses"]
    spent = [{name: row["to_target"][i] for name, row in rows.items()} for i in range(len(losses))]
    reached = [
        {name: cost for name, cost in costs.items() if cost["tokens"]["median"] is not None}
        for costs in spent
    ]
    best = max(range(len(losses)), key=lambda index: (len(reached[index]), -losses[index]))
    colors = {name: chart.look(number).split()[0] for number, name in enumerate(rows)}
    panels = []
    for question, (x, y) in _QUESTIONS.items() if reached[best] else ():
        costs = reached[best]
        edge = front([(cost[x]["median"], cost[y]["median"]) for cost in costs.values()])
        curves = [Curve([a for a, _ in edge], [b for _, b in edge], "other thin")]
        for name, cost in costs.items():
            spans = {"x": [_range(cost[x])], "y": [_range(cost[y])]}
            curves += chart.points(**spans, color=colors[name], label=chart.shortened(name))
        across, up = (_axis(key, [cost[key] for cost in costs.values()]) for key in (x, y))
        panels.append(chart.chart(across, up, curves, title=question, height=300))
    return chart.document(
        panels,
        title=f"What each variant of {table['name']} spent to reach {losses[best]:g} nats/token",
        caption=f"{_caption(table, losses[best], reached[best])} Made by: {command}",
        width=700,
        right_px=180,
    )


def _caption(table: dict, loss: float, costs: dict[str, dict]) -> str:
    if not costs:
        losses = ", ".join(f"{loss:g}" for loss in table["target_losses"])
        return f"No variant reached {losses} nats/token in half of its seeds."
    shown = (
        f"What each variant had spent when its consensus first reached {loss:g} nats/token on"
        f" held-out text: median of {len(table['seeds'])} seeds, bars from the lowest to the"
        " highest; down and left is better. Grey: the front, the variants that no other beats in"
        f" both. {table['charged']} Seconds are simulated {table['simulated']}."
    )
    missing = [name for name in table["rows"] if name not in costs]
    return shown + (f" Not reached by half of the seeds: {'; '.join(missing)}." if missing else "")


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front: points that no other one beats in both coordinates, sorted by the first."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _axis(measure: str, spreads: Sequence[dict]) -> Axis:
    """From zero, as ratios are what counts; logarithmic where the values span decades."""
    values = [value for spread in spreads for value in _range(spread)]
    positive = [value for value in values if value > 0]
    is_log = bool(positive) and max(positive) > _DECADES * min(positive)
    axis = chart.axis(
        MEASURES[measure],
        values if is_log else [0.0, *values],
        base=10 if is_log else 0,
        whole=measure != "time_s",
        margin=0.05,
        max_ticks=4,
    )
    if is_log and len(positive) < len(values):  # a variant may also communicate nothing
        axis = axis._replace(low=axis.low / 3, ticks=[0.0, *axis.ticks])
    return axis


def _range(spread: dict) -> tuple[float, float, float]:
    """Lowest, middle and highest; the middle for the highest where a seed never got there."""
    high = spread["median"] if spread["high"] is None else spread["high"]
    return spread["low"], spread["median"], high
