"""Draws the documentation's pictures as SVG files, each for a light and for a dark page.

python scripts/drawings.py [--out FOLDER]

`method` is the algorithm over time, `architecture` the library's parts, `front` the study of
docs/RESULTS.md: communications against serial updates at equal loss, `barrier` what merging costs.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from adloco_jax.study import results

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from studies.tables import by_method  # noqa: E402

OUT = ROOT / "docs" / "images"
STUDY = ROOT / "studies"
BARRIER = STUDY / "barrier.jsonl"
# Colours by Okabe and Ito, brighter on dark.
NAMES = ("ink", "soft", "rule", "box", "A", "B", "C")
LIGHT = ("#1f2328", "#59636e", "#c8d1da", "#f3f6f9", "#0072b2", "#c05000", "#007f5c")
DARK = ("#e6edf3", "#a5b0bb", "#4a535d", "#20262d", "#56b4e9", "#f0883e", "#3fc79a")
THEMES = {
    theme: dict(zip(NAMES, colours, strict=True))
    for theme, colours in (("light", LIGHT), ("dark", DARK))
}
# Panels of the study: what is trained on what, its runs, and the loss to reach.
PANELS = (
    ("0.08 M, code", "small", 1.6),
    ("0.08 M, prose", "prose", 1.76),
    ("0.55 M, code", "half", 1.32),
)
# What the picture calls each method, its colour, and where its label stands: (x, y, anchor).
SHOWN = {
    "one worker": ("one worker", "B", -14, -14, "middle"),
    "data parallel": ("data parallel", "B", 24, 5, "start"),
    "DiLoCo": ("DiLoCo, tuned", "soft", 12, -10, "start"),
    "trunk": ("hand-tuned start", "soft", 12, 22, "start"),
    "ours": ("recommended", "A", 14, 2, "start"),
}


def text(x: float, y: float, words: str, style: str = "ink", anchor: str = "start") -> str:
    """One line of text; `style` is a colour's name, and `big` or `bold` beside it."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def line(points: Sequence[tuple[float, float]], style: str, arrow: bool = False) -> str:
    """A line through points, with an arrow's head at its end if wanted."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    head = ' marker-end="url(#head)"' if arrow else ""
    return f'<polyline points="{path}" class="line {style}"{head}/>'


def box(x: float, y: float, width: float, height: float, style: str, round_by: float = 6) -> str:
    """A rectangle with rounded corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_by:g}"'
        f' class="{style}"/>'
    )


def dot(x: float, y: float, radius: float, style: str) -> str:
    """A filled circle."""
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="fill {style}"/>'


def page(width: int, height: int, title: str, parts: list[str], theme: str) -> str:
    """A whole SVG file in one theme's colours."""
    colours = THEMES[theme]
    rules = "".join(
        f"text.{name}{{fill:{value}}}.fill.{name}{{fill:{value}}}.line.{name}{{stroke:{value}}}"
        for name, value in colours.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{title}</title>\n"
        "<style>text{font:15px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".bold{font-weight:600}.big{font-size:17px;font-weight:600}"
        f".line{{fill:none;stroke-width:1.6}}.thick{{stroke-width:2.6}}"
        ".line.rule{stroke-width:1}.dashed{stroke-dasharray:5 5}"
        f".card{{fill:{colours['box']};stroke:{colours['rule']}}}{rules}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{colours["soft"]}"/>'
        "</marker></defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def trainer_round(x: float, y: float, workers: int, batch: int, micro: int, style: str) -> str:
    """A trainer's round: a bar for each worker, as high as its batch, then the outer update."""
    width, gap, step = 112, 6, batch + 6
    top, end = y - (workers * step - gap) / 2, x + 112 + 22
    parts = []
    for worker in range(workers):
        middle = top + worker * step + batch / 2
        parts.append(box(x, middle - batch / 2, width, batch, f"fill {style}", 3))
        for cut in range(micro, batch, micro):
            y_cut = middle - batch / 2 + cut
            parts.append(line([(x, y_cut), (x + width, y_cut)], "box"))
        parts.append(line([(x + width, middle), (end, y)], style))
    return "".join([*parts, dot(end, y, 6, style)])


def method() -> tuple[int, int, str, list[str]]:
    """Trainers, workers, growing batches and merges; time to the right."""
    left, pitch, base = 96, 160, 404
    parts = [text(left - 80, 30, "trainers", "soft")]
    # Of each round: (trainer's height, workers, batch, micro-batch, colour) for every trainer.
    rounds = [
        [(92, 2, 8, 99, "A"), (202, 2, 8, 99, "B"), (312, 2, 8, 99, "C")],
        [(92, 2, 14, 99, "A"), (202, 2, 10, 99, "B"), (312, 2, 16, 99, "C")],
        [(92, 2, 16, 99, "A"), (257, 4, 16, 99, "C")],
        [(92, 2, 18, 99, "A"), (257, 4, 18, 99, "C")],
        [(202, 6, 36, 18, "C")],
    ]
    for number, trainers in enumerate(rounds):
        x = left + number * pitch
        parts.append(line([(x - 8, 48), (x - 8, base - 18)], "rule dashed"))
        parts.append(text(x + 56, base, f"round {number + 1}", "soft", "middle"))
        parts += [trainer_round(x, *trainer) for trainer in trainers]
    for y, name, style in ((92, "1", "A"), (202, "2", "B"), (312, "3", "C")):
        parts.append(text(left - 24, y + 6, name, f"{style} big", "end"))
    joined = ((1, 202, 257, "B"), (1, 312, 257, "C"), (3, 92, 202, "A"), (3, 257, 202, "C"))
    for number, start, end, style in joined:
        x = left + number * pitch + 134
        parts.append(line([(x, start), (x + 26, end)], f"{style} thick"))
    end = left + 5 * pitch
    parts.append(line([(left - 8, base + 16), (end, base + 16)], "soft", arrow=True))
    parts.append(text(end + 8, base + 21, "time", "soft"))
    notes = (
        (left, 52, "bar: one worker&#8217;s inner updates; its height: the batch"),
        (left + 460, 52, "dot: outer update, the workers synchronise"),
        (left, 78, "lines across a bar: accumulation over micro-batches"),
        (left + 460, 78, "merge: batch-weighted mean of trainers"),
    )
    parts += [text(x, base + below, words, "ink") for x, below, words in notes]
    parts.append(text(left + pitch + 128, 262, "merge", "ink bold", "end"))
    parts.append(text(left + 3 * pitch + 128, 182, "merge", "ink bold", "end"))
    return 980, 496, "AdLoCo over time", parts


LOOP = ("adloco(state, settings, engine,", "observers) &#8594; state")
CORE = ("inner and outer updates, gradient", "statistics, batch tests, merges")
# Of the architecture: left edge, top edge, colour of the title, title, lines.
CARDS = (
    (20, 20, "ink", "Command line, notebook", "main.py, cli/, train, fit"),
    (350, 20, "ink", "One run", "training.py, run/attempt.py", "puts its parts together"),
    (680, 20, "ink", "Finished runs", "study/: compare, report,", "simulated clusters, theory"),
    (20, 170, "C", "Data", "data/: sources, tokenizers, rows", "hf.py: weights in and out"),
    (350, 170, "B", "Observers", "run/observers.py: ledger,", "evaluation, checkpoints"),
    (680, 170, "A", "Engine", "engine/local.py, programs.py,", "sharding.py: core under jit"),
    (20, 340, "ink", "settings.py", "every knob, checked, frozen"),
    (350, 340, "A", "adloco.py: the loop", *LOOP),
    (680, 340, "A", "core/", *CORE),
    (20, 450, "C", "models/", "Llama, BERT, gradient taps"),
)
ARROWS = (
    ((300, 55), (346, 55)),
    ((676, 55), (634, 55)),
    ((370, 109), (370, 142), (325, 142), (325, 400), (346, 400)),
    ((300, 366), (346, 366)),
    ((450, 340), (450, 263)),
    ((600, 340), (676, 240)),
    ((820, 259), (820, 336)),
    ((300, 486), (720, 486), (720, 433)),
)


def architecture() -> tuple[int, int, str, list[str]]:
    """What runs the loop, what the loop asks for, and the line between host and pure functions."""
    parts = [line([(20, 290), (960, 290)], "rule dashed")]
    parts.append(text(20, 280, "above: files, clocks, devices", "soft"))
    parts.append(text(20, 312, "below: pure functions on arrays", "soft"))
    for x, y, style, title, *rows in CARDS:
        parts.append(box(x, y, 280, 47 + 21 * len(rows), "card"))
        parts.append(text(x + 14, y + 29, title, f"{style} big"))
        parts += [text(x + 14, y + 50 + 21 * n, row, "soft") for n, row in enumerate(rows)]
    parts += [line(points, "soft", arrow=True) for points in ARROWS]
    parts.append(text(462, 328, "after each round", "soft"))
    parts.append(text(624, 328, "asks", "soft"))
    parts.append(text(832, 328, "compiles", "soft"))
    parts.append(text(510, 478, "loss functions", "soft", "middle"))
    return 980, 530, "The parts of adloco_jax", parts


def plot(
    area: tuple[float, float, float, float],
    columns: Sequence[tuple[float, str]],
    rows: Sequence[tuple[float, str]],
    y_name: str,
    x_name: str,
) -> list[str]:
    """Rules, labels and names of the axes of a plot in an area: left, top, width, height."""
    left, top, width, height = area
    parts = []
    for x, label in columns:
        parts.append(line([(x, top), (x, top + height)], "rule"))
        parts.append(text(x, top + height + 22, label, "soft", "middle"))
    for y, label in rows:
        parts.append(line([(left, y), (left + width, y)], "rule"))
        parts.append(text(left - 10, y + 5, label, "soft", "end"))
    parts.append(text(left, 24, y_name, "ink bold"))
    parts.append(text(left + width, top + height + 48, x_name, "ink bold", "end"))
    return parts


def front() -> tuple[int, int, str, list[str]]:
    """Communications, logarithmic, against serial updates to the same loss, a panel per study."""
    top, height, gap, most_updates, most = 62, 300, 30, 10_000, 4_000
    width = (900 - gap * (len(PANELS) - 1)) / len(PANELS)

    def down(value: float) -> float:  # none is below one
        return top + height * (1 - math.log(max(value, 0.5) / 0.4) / math.log(most / 0.4))

    rows = [(down(value), f"{value:,}") for value in (0, 1, 3, 10, 30, 100, 300, 1000, 3000)]
    parts = [text(80, 22, "communications", "ink bold")]
    for place, (title, name, target) in enumerate(PANELS):
        left = 80 + place * (width + gap)

        def across(value: float, left: float = left) -> float:
            return left + width * value / most_updates

        costs = by_method(results.read(STUDY / f"{name}.jsonl").values(), target)
        parts += plot(
            (left, top, width, height),
            [(across(value), f"{value:,}") for value in range(0, most_updates, 4_000)],
            rows if place == 0 else [(y, "") for y, _ in rows],
            "",
            "serial updates" if place == len(PANELS) - 1 else "",
        )
        parts.append(text(left, top - 14, f"{title}, to {target:g} nats", "soft"))
        for method, (label, style, dx, dy, anchor) in SHOWN.items():
            reached = [cost for cost in costs[method].values() if cost is not None]
            updates, syncs, _ = zip(*reached, strict=True)
            x, y = across(statistics.median_low(updates)), down(statistics.median_low(syncs))
            span = [(across(min(updates)), y), (across(max(updates)), y)]
            parts.append(line(span, f"{style} thick"))
            parts.append(line([(x, down(min(syncs))), (x, down(max(syncs)))], f"{style} thick"))
            parts.append(dot(x, y, 8 if style == "A" else 6, style))
            dx += span[1][0] - x if anchor == "start" and style == "A" else 0
            colour = style if style != "soft" else "ink"
            parts.append(text(x + dx, y + dy, label, f"{colour} bold", anchor))
    return 1000, 420, "Communications against serial updates at equal loss", parts


def barrier() -> tuple[int, int, str, list[str]]:
    """What averaging four trainers costs, by how long they were apart and where they began."""
    apart_of = re.compile(r"(.+), (\d+) updates apart")
    found: dict[str, dict[int, list[float]]] = {"random weights": {}, "a trunk": {}}
    for run in results.read(BARRIER).values():
        start, apart = apart_of.fullmatch(run["variant"]).groups()
        (tried,) = (e for e in run["events"] if e["event"] in ("merge", "refusal"))
        found[start].setdefault(int(apart), []).append(tried["barrier"])
    left, top, width, height = 90, 40, 680, 300
    least, most = 100, 4_000
    values = [v for by_apart in found.values() for seeds in by_apart.values() for v in seeds]
    low, high = min(*values, 0.0), max(values)

    def across(value: float) -> float:
        return left + width * math.log(value / least) / math.log(most / least)

    def down(value: float) -> float:
        return top + height * (high - value) / (high - low)

    step = 10 ** math.floor(math.log10(high - low)) / 2
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    parts = plot(
        (left, top, width, height),
        [(across(apart), f"{apart:,}") for apart in found["a trunk"]],
        [(down(number * step), f"{number * step:g}") for number in numbers],
        "loss of the average over its members' mean, nats per byte",
        "updates apart",
    )
    for (start, by_apart), style in zip(found.items(), ("B", "A"), strict=True):
        middle = [(across(n), down(statistics.median(seeds))) for n, seeds in by_apart.items()]
        parts.append(line(middle, f"{style} thick"))
        parts += [dot(across(n), down(v), 4, style) for n, seeds in by_apart.items() for v in seeds]
        x, y = middle[-1]
        parts.append(text(x + 12, y + 5, f"from {start}", f"{style} bold"))
    return 960, 400, "What averaging four trainers costs, by how long they were apart", parts


DRAWINGS = {"method": method, "architecture": architecture, "front": front, "barrier": barrier}


def main() -> None:
    """Writes every drawing in both themes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="a folder that is there")
    out = parser.parse_args().out
    for name, drawing in DRAWINGS.items():
        for theme in THEMES:
            (out / f"{name}-{theme}.svg").write_text(page(*drawing(), theme), encoding="utf-8")


if __name__ == "__main__":
    main()
