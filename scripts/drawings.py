"""Draw the documentation's pictures as SVG files, in the light or dark colours of the reader.

python scripts/drawings.py

`seconds` is the picture of the README: time to the same loss, by the rate of the links. `method`
shows the algorithm over time, and `architecture` the parts of the library. `front` shows the study
of studies/RESULTS.md: steps against synchronisations and bytes. `gpu` shows training on a GPU.
Pictures of several panels are drawn twice: side by side, and for narrow screens below one another.
Letters have at least 11 pixels on a phone.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from adloco_jax.study import chart
from adloco_jax.study.chart import Curve, text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from studies import results, track  # noqa: E402
from studies.tables import by_method  # noqa: E402

OUT = ROOT / "docs" / "images"
STUDIES = ROOT / "studies"
WIDTH, FONT = 540, 17  # pixels; a phone shows two thirds of them
WIDE = 1100  # pixels of panels side by side; a page shows two thirds of them
FRONT_TARGET = 1.6  # nats per byte, of the library's text at 0.08 M parameters
# What the picture calls each method, and its colour.
SHOWN = {
    "one worker": ("one worker", "c1"),
    "data parallel": ("data parallel", "c5"),
    "DiLoCo": ("DiLoCo", "c4"),
    "pool by hand": ("growing pool, join by hand", "c2"),
    "pool by test": ("growing pool, join by the test", "c0"),
}
# The methods over links that the README compares; studies/RESULTS.md has the growing pool too.
LINKED = {
    "one worker": ("one site alone", "c1"),
    "data parallel": ("data parallelism", "c5"),
    "DiLoCo": ("DiLoCo", "c4"),
}


def seconds() -> str:
    """Bars: seconds to the same loss on the first seed, one site alone and a group per rate."""
    lines = (STUDIES / "links.jsonl").read_text("utf-8").splitlines()
    runs = [run for run in map(json.loads, lines) if run["seed"] == 31 and run["method"] in LINKED]
    left, limit, row = 206, 1_000, 27  # pixels, seconds at the right edge, pixels
    title = "Seconds until the model has the same loss"
    parts, y = [text(14, 28, title, "end heading")], 36.0
    for rate in (None, 10, 50):
        y += 30
        group = f"four sites, each with a link of {rate} Mbit/s" if rate else "one site, no link"
        parts.append(text(14, y, group, "heading"))
        for run in (run for run in runs if run["rate"] == rate):
            label, color = LINKED[run["method"]]
            time, end = run["seconds"], min(run["seconds"], limit) / limit * 235
            bar = f'<rect x="{left}" y="{y + 8:g}" width="{end:.1f}" height="19" rx="3"'
            parts.append(f'<g class="{color}">{bar} fill="currentColor"/></g>')
            if time > limit:  # the bar is cut
                gap = f'<path d="M{left + end - 34:.1f} {y + 30:g}l10 -25" stroke="var(--paper)"'
                parts.append(f'{gap} stroke-width="5"/>')
            parts.append(text(30, y + 23, label))
            parts.append(text(left + end + 8, y + 23, f"{time:,.0f} s", "heading"))
            y += row
    return chart.svg(WIDTH, round(y + 18), "Seconds to the same loss", parts, font_px=FONT)


def front(columns: int) -> str:
    """Sequential steps against synchronisations and bytes to a loss, a line for each method."""
    lines = [*results.read(STUDIES / "front.jsonl").values(), *track.ends("front")]
    costs = by_method(lines, FRONT_TARGET)
    y = chart.axis("sequential steps", [0, 3_600], max_ticks=4)
    panels = []
    for name, label, low in (("communications", "synchronisations", 4), ("bytes", "MB", 6)):
        unit = 1e6 if name == "bytes" else 1
        points: dict[str, list[list[list[float]]]] = {method: [] for method in SHOWN}
        for method, seeds in costs.items():
            reached = [cost for cost in seeds.values() if cost is not None]
            if reached and (group := method.partition(", ")[0]) in points:
                pairs = [(getattr(cost, name) / unit, cost.updates) for cost in reached]
                spread = [
                    [min(v), statistics.median_low(v), max(v)] for v in zip(*pairs, strict=True)
                ]
                points[group].append(spread)
        x = chart.axis(label, [low, 2_500], base=10)
        x = x._replace(low=low / 4, ticks=[0, *x.ticks])
        curves = []
        for method, found in points.items():
            if not found:
                continue
            color = SHOWN[method][1]
            across, up = zip(*sorted(found), strict=True)
            curves.append(Curve([v[1] for v in across], [v[1] for v in up], color))
            curves += chart.points(across, up, color)
        panels.append(chart.chart(x, y, curves, title=f"steps against {label}", height=300))
    key = [(label, f"{color} mark") for label, color in SHOWN.values()]
    return document(panels, "Sequential steps to the same loss against communication", columns, key)


def gpu(columns: int) -> str:
    """Held-out loss of the 35 M model on one GPU over tokens and over sequential steps."""
    arms = json.loads((STUDIES / "gpu" / "training.json").read_text("utf-8"))
    colors = {"growing_pool": "c0", "DiLoCo": "c4", "data parallel": "c5"}
    y = chart.axis("nats per token", [loss for name in colors for loss in arms[name]["loss"]])
    panels = []
    for name, label, unit in (
        ("tokens_total", "million tokens", 1e6),
        ("updates_total", "sequential steps", 1),
    ):
        curves = [
            Curve([count / unit for count in arms[each][name]], arms[each]["loss"], color)
            for each, color in colors.items()
        ]
        x = chart.axis(label, [value for curve in curves for value in curve.x])
        title = f"35 M parameters, over {label}"
        panels.append(chart.chart(x, y, curves, title=title, height=230))
    title = "Held-out loss on one GPU over tokens and over sequential steps"
    labels = [(each.replace("_", " "), color) for each, color in colors.items()]
    return document(panels, title, columns, labels)


def document(
    panels: Sequence[chart.Panel], title: str, columns: int, key: Sequence[tuple[str, str]]
) -> str:
    """The panels side by side, or below one another for one column."""
    how = {"columns": columns, "width": WIDE if columns > 1 else WIDTH, "font_px": FONT}
    return chart.document(panels, title=title, right_px=30, key=key, **how)


def line(points: Sequence[tuple[float, float]], classes: str, *, arrow: bool = False) -> str:
    """A line through points, with an optional arrow head at its end."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    head = ' marker-end="url(#head)"' if arrow else ""
    return f'<g class="{classes}"><polyline points="{path}" class="line"{head}/></g>'


def trainer_round(x: float, y: float, workers: int, batch: int, micro: int, color: str) -> str:
    """Draw a round: a bar for each worker, as high as its batch, then the outer update."""
    width, gap, step = 56, 6, batch + 6
    top, end = y - (workers * step - gap) / 2, x + width + 16
    parts = []
    for worker in range(workers):
        first = top + worker * step
        parts.append(
            f'<rect x="{x:g}" y="{first:g}" width="{width}" height="{batch:g}" rx="3"'
            ' fill="currentColor"/>'
        )
        parts += [
            f'<path d="M{x:g} {first + cut:g}h{width}" stroke="var(--paper)"/>'
            for cut in range(micro, batch, micro)
        ]
        parts.append(line([(x + width, first + batch / 2), (end, y)], ""))
    dot = f'<circle cx="{end:g}" cy="{y:g}" r="5" fill="currentColor"/>'
    return f'<g class="{color}">{"".join([*parts, dot])}</g>'


def method() -> str:
    """Trainers, workers, growing batches and merges; time to the right."""
    left, pitch, base = 62, 94, 404
    parts = [text(14, 26, "trainers")]
    # Of each round: (trainer's height, workers, batch, micro-batch, colour) for every trainer.
    rounds = [
        [(92, 2, 6, 99, "c0"), (202, 2, 6, 99, "c1"), (312, 2, 6, 99, "c2")],
        [(92, 2, 12, 99, "c0"), (202, 2, 7, 99, "c1"), (312, 2, 9, 99, "c2")],
        [(92, 3, 12, 99, "c0"), (257, 3, 10, 99, "c2")],
        [(92, 3, 12, 99, "c0"), (257, 3, 13, 99, "c2")],
        [(202, 6, 39, 13, "c2")],
    ]
    for number, trainers in enumerate(rounds):
        x = left + number * pitch
        parts.append(f'<path class="grid" d="M{x - 6} 46V{base - 20}"/>')
        parts.append(text(x + 30, base, str(number + 1), "tick"))
        parts += [trainer_round(x, *trainer) for trainer in trainers]
    for y, name, color in ((92, "1", "c0"), (202, "2", "c1"), (312, "3", "c2")):
        parts.append(f'<g class="{color}">{text(26, y + 6, name, "end heading")}</g>')
    joined = ((1, 202, 257, "c1"), (1, 312, 257, "c2"), (3, 92, 202, "c0"), (3, 257, 202, "c2"))
    for number, start, end, color in joined:
        x = left + number * pitch + 72
        parts.append(line([(x, start), (x + 20, end)], color))
    parts.append(line([(left - 6, base + 14), (WIDTH - 12, base + 14)], "c6", arrow=True))
    parts.append(text(14, base, "round"))
    notes = (
        "bar: inner updates of a worker; height: its batch",
        "lines across a bar: accumulated micro-batches",
        "dot: outer update, the workers synchronise",
        "two dots that join: merge, batch-weighted mean",
    )
    parts += [text(14, base + 48 + 26 * row, words) for row, words in enumerate(notes)]
    return svg(560, "AdLoCo over time", parts)


# Of the architecture: column, row, colour of the title, title, lines.
CARDS = (
    (0, 0, "c6", "Command line", ("cli/: the commands", "config.py: every option")),
    (1, 0, "c6", "Finished runs", ("study/: report, card,", "summary")),
    (0, 1, "c6", "One run", ("run/: train, fit, resume,", "checkpoints, export")),
    (1, 1, "c2", "Data", ("data/: from text to rows", "models/hf.py: weights")),
    (0, 2, "c1", "Observers", ("ledger, evaluation,", "checkpoints, trackers")),
    (1, 2, "c0", "Engine", ("engine/: programs,", "memory, sharding")),
    (0, 3, "c0", "The loop", ("loop/: adloco(), plans,", "growth, merges")),
    (1, 3, "c0", "core/, contrib/", ("inner and outer updates,", "statistics, tests, merges")),
    (1, 4, "c2", "models/", ("Llama, BERT,", "gradient taps")),
)
CARD, PITCH = (246, 92), (274, 132)
# Ends of each arrow, in cards from the left and from the top; what it does, and where that stands.
ARROWS = (
    (((0.5, 0.7), (0.5, 1.0)), "starts", (0.53, 0.91)),
    (((0.9, 0.35), (1.0, 0.35)), "", (0, 0)),
    (((0.9, 1.35), (1.0, 1.35)), "", (0, 0)),
    (((0.5, 1.7), (0.5, 2.0)), "attaches", (0.53, 1.91)),
    (((0.3, 3.0), (0.3, 2.7)), "", (0, 0)),
    (((0.8, 3.0), (1.0, 2.6)), "asks", (0.97, 2.86)),
    (((1.5, 2.7), (1.5, 3.0)), "compiles", (1.53, 2.91)),
    (((1.2, 4.0), (1.2, 3.7)), "loss functions", (1.23, 3.91)),
)


def architecture() -> str:
    """Callers of the loop, its engine, and the line between the host and pure functions."""
    parts = []

    def at(column: float, row: float) -> tuple[float, float]:
        below = 34 if row >= 3 else 0  # room for the line
        return 10 + column * PITCH[0], 10 + row * PITCH[1] + below

    for column, row, color, title, lines in CARDS:
        x, y = at(column, row)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CARD[0]}" height="{CARD[1]}" rx="6"'
            ' fill="var(--card)" stroke="var(--line)"/>'
        )
        parts.append(f'<g class="{color}">{text(x + 12, y + 26, title, "end heading")}</g>')
        parts += [text(x + 12, y + 54 + 24 * n, words) for n, words in enumerate(lines)]
    for ends, words, where in ARROWS:
        parts.append(line([at(*end) for end in ends], "c6", arrow=True))
        parts.append(text(*at(*where), words, "tick start"))
    y = at(0, 2.7)[1] + 50
    parts.append(f'<path d="M10 {y}h520" stroke="var(--dim)" stroke-dasharray="5 5"/>')
    x, y = at(0, 4.2)
    words = ("above the dashed line:", "files, clocks, devices", "below: pure functions")
    parts += [text(x, y + 24 * n, row, "tick start") for n, row in enumerate(words)]
    return svg(676, "The parts of adloco_jax", parts)


def svg(height: int, title: str, parts: list[str]) -> str:
    """A drawing's file, with an arrow's head for its lines."""
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="var(--ink)"/>'
        "</marker></defs>"
    )
    return chart.svg(WIDTH, height, title, [head, *parts], font_px=FONT)


def files() -> dict[str, str]:
    """The text of each picture's file."""
    drawn = {drawing.__name__: drawing() for drawing in (seconds, method, architecture)}
    for drawing in (front, gpu):
        drawn |= {drawing.__name__: drawing(2), f"{drawing.__name__}-narrow": drawing(1)}
    return {f"{name}.svg": text for name, text in drawn.items()}


def main() -> None:
    """Write every picture."""
    for name, drawn in files().items():
        (OUT / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
