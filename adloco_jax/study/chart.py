"""Draw charts as SVG: in a web page, or as files of their own.

Positions in a box are percentages, so the box stretches while texts and lines keep their size.
`chart.css` defines the colours and dashes of curves, for light pages and for dark ones.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adloco_jax.study.summary import short

STYLE = Path(__file__).with_name("chart.css").read_text(encoding="utf-8")
_NO_TEXT = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_UNITS = 4000  # range of a curve's coordinates, in both directions
_MAX_BINS = 4000  # bins of all curves of a chart; a bin holds up to four points
_HUGE = 1e290  # limit of drawn values, so that sums do not overflow
_MAX_TICKS = 5  # number of ticks that fit a phone's width
_MAX_LABEL = 22  # characters of a curve's label
_LABEL_PX = 14  # distance between two lines of text

NUM_COLORS, NUM_DASHES = 7, 6  # no common factor, so 42 curves look different


def look(index: int) -> str:
    """The CSS classes of colour and dashes of curve `index`, from 0, the same in every chart."""
    return f"c{index % NUM_COLORS} d{index % NUM_DASHES}"


def escaped(text: str) -> str:
    """Escape text for HTML and SVG, and replace forbidden characters with question marks."""
    return escape(_NO_TEXT.sub("?", text))


class Axis(NamedTuple):
    """An axis of a chart, horizontal or vertical: its label, its range of values, and its ticks."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False
    unit: str = ""

    def at(self, value: float) -> float:
        """Position of a value on the axis: 0 for `low` and less, 1 for `high` and more."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.is_log:
            low, value, high = map(math.log, (low, value, high))
        return (value - low) / (high - low)


def axis(
    label: str,
    values: Iterable[float],
    *,
    base: int = 0,
    whole: bool = False,
    unit: str = "",
    margin: float = 0.0,
    max_ticks: int = _MAX_TICKS,
) -> Axis:
    """Make an axis whose range covers the finite ones of `values`.

    Args:
      label: Name of the quantity. It includes the unit, unless `unit` has the unit.
      values: The values that will be drawn.
      base: Base of a logarithmic axis, which ignores values that are not positive; 0: linear.
      whole: Whether a linear axis has ticks only at whole numbers.
      unit: Unit that is printed after the number of each tick.
      margin: Empty room at both ends, as a fraction of the length that the values cover.
      max_ticks: Upper limit of ticks.
    """
    shown = [v for v in values if abs(v) < _HUGE and (v > 0 or not base)] or [1.0]
    low, high = min(shown), max(shown)
    if base:
        room = (high / low) ** margin if high > 1.01 * low else base
        low, high = low / room, high * room
        return Axis(label, low, high, _log_ticks(low, high, base, max_ticks), True, unit)
    if high == low:
        low, high = min(0.0, low), max(1.0, high)
    room = margin * (high - low)
    low, high = low - room, high + room
    return Axis(label, low, high, _ticks(low, high, max_ticks, whole=whole), False, unit)


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Ticks of a linear axis: multiples of a step that is 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    sizes = [power * factor for factor in (1, 2, 2.5, 5, 10, 20, 50)]
    if whole:
        sizes = [size for size in sizes if size % 1 == 0] or [1.0]
    for step in sizes:
        first = math.ceil(low / step - 1e-9)  # a tick at an end, in spite of rounding
        last = math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [float(f"{step * number:.12g}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, base: int, most: int) -> list[float]:
    """Ticks of a logarithmic axis: powers of the base, of which some are left out if they crowd."""
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    sets = [[float(base) ** p for p in powers if p % every == 0] for every in (1, 2, 3, 5, 10)]
    if base == 10:
        sets.insert(0, [m * 10.0**p for p in powers for m in (1, 2, 5)])
    for ticks in sets:
        ticks = [tick for tick in ticks if low / 1.001 <= tick <= 1.001 * high]
        if len(ticks) <= most:
            break
    return ticks if len(ticks) > 1 else _ticks(low, high, most)


class Curve(NamedTuple):
    """A line through points in the given order. The line has a gap where y is not finite."""

    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    classes: str  # CSS classes of `chart.css`
    label: str = ""  # text beside the curve's end
    key: str = ""  # text that replaces the label if there is little room
    band: tuple[Sequence[float] | np.ndarray, ...] | None = None  # an area around it


def points(
    x: Iterable[Sequence[float]], y: Iterable[Sequence[float]], color: str, label: str = ""
) -> list[Curve]:
    """Make three curves for each dot: the dot, and bars over the ranges of its values.

    `x` and `y` have the lowest, middle and highest value of each dot; the last dot has the label.
    """
    curves = []
    for across, up in zip(x, y, strict=True):
        curves += [
            Curve([across[0], across[2]], [up[1]] * 2, f"{color} thin"),
            Curve([across[1]] * 2, [up[0], up[2]], f"{color} thin"),
            Curve([across[1]], [up[1]], f"{color} mark"),
        ]
    return [*curves[:-1], curves[-1]._replace(label=label)]


def steps(rounds: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points (x and y) of a curve that is constant from n - 1 to n for round n.

    It has a gap where rounds are missing.
    """
    x: list[float] = []
    y: list[float] = []
    for number, value in zip(rounds, values, strict=True):
        if x and x[-1] < number - 1:
            x.append(number - 1)
            y.append(math.nan)
        x += [number - 1, number]
        y += [value, value]
    return x, y


def shortened(label: str) -> str:
    """Shorten a label that is too long to fit beside a curve: a "…" replaces its middle."""
    if len(label) <= _MAX_LABEL:
        return label
    half = _MAX_LABEL // 2
    return f"{label[:half]}…{label[1 - half :]}"


class Figure(str):
    """The text of an SVG file. A notebook shows an object of this class as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


class Panel(NamedTuple):
    """One drawn chart, which can be shown on a web page or written to a file."""

    title: str  # for screen readers; a file shows it
    body: str  # SVG elements, whose positions are percentages of the box
    height: int  # height of the box, in pixels
    x_label: str
    y_label: str
    classes: str = ""  # CSS classes of the whole chart

    def html(self) -> str:
        """The HTML of the chart for a web page, with the labels of both axes."""
        return (
            f'<div class="chart{self.classes}"><p class="axis">{escaped(self.y_label)}</p>\n'
            f'<svg role="img" aria-label="{escaped(self.title)}" height="{self.height}">'
            f'{self.body}</svg>\n<p class="axis x">{escaped(self.x_label)}</p></div>'
        )


def chart(
    x: Axis,
    y: Axis,
    curves: Sequence[Curve],
    *,
    title: str,
    height: int = 190,
    label_px: int = _LABEL_PX,
) -> Panel:
    """Draw curves, later ones over earlier ones, with their labels beside their ends.

    Labels are at least `label_px` apart, if the box of `height` pixels has room.
    """
    # Many curves share the bins of a chart, so that the page stays small; 50 still show a curve.
    num_bins = max(50, min(_UNITS // 4, _MAX_BINS // max(1, len(curves))))
    drawn = [_path(curve, x, y, num_bins) for curve in curves]
    ends = {}  # of the curves with a label, by their index
    for index, curve in enumerate(curves):
        end = _end(curve, x, y)
        if curve.label and end is not None:
            ends[index] = end
    gap = min(label_px, height / max(1, len(ends) - 1))
    rows = apart([up * height for _, up in ends.values()], gap, height)
    for (index, end), row in zip(ends.items(), rows, strict=True):
        drawn[index] += _label(curves[index], end, row / height)
    body = "".join(
        f'<g class="curve {curve.classes}" data-k="{escaped(curve.key)}">{path}</g>'
        for curve, path in zip(curves, drawn, strict=True)
    )
    left = [(1 - y.at(tick), short(tick, y.unit)) for tick in y.ticks]
    crowded = " crowded" if gap < label_px - 1 else ""
    return frame(x, body, title=title, height=height, left=left, y_label=y.label, classes=crowded)


def frame(
    x: Axis,
    body: str,
    *,
    title: str,
    height: int,
    left: Sequence[tuple[float, str]],
    y_label: str,
    classes: str = "",
) -> Panel:
    """Put SVG elements, positioned in percent, into a box with a grid, ticks and axis labels.

    `left` has texts on the left, each with a grid line, and their distance from the top (0 to 1).
    """
    across = [(f"{100 * x.at(tick):.2f}%", short(tick, x.unit)) for tick in x.ticks]
    up = [(f"{100 * row:.2f}%", text) for row, text in left]
    grid = [f'<line class="grid" x1="{p}" x2="{p}" y1="0" y2="100%"/>' for p, _ in across]
    grid += [f'<line class="grid" x1="0" x2="100%" y1="{p}" y2="{p}"/>' for p, _ in up]
    ticks = [f'<text class="tick" x="{p}" y="100%" dy="1.4em">{t}</text>' for p, t in across]
    ticks += [
        f'<text class="tick left" x="0" dx="-.6em" y="{p}">{escaped(t)}</text>' for p, t in up
    ]
    inside = "".join([*grid, body, *ticks])
    return Panel(title, inside, height, x.label, y_label, classes)


def apart(wanted: Sequence[float], gap: float, high: float) -> list[float]:
    """Move positions so that neighbours are at least `gap` apart, and keep their order.

    The moved positions lie between 0 and `high`, as far as there is room for all.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    rows = [0.0] * len(wanted)
    least = 0.0
    for index in order:
        rows[index] = max(wanted[index], least)
        least = rows[index] + gap
    most = high
    for index in reversed(order):
        rows[index] = min(rows[index], most)
        most = rows[index] - gap
    return rows


def document(
    panels: Sequence[Panel],
    *,
    title: str,
    caption: str = "",
    columns: int = 1,
    width: int = 1000,
    right_px: int = 40,
    font_px: int = 13,
    key: Sequence[tuple[str, str]] = (),
) -> Figure:
    """Make an SVG file with panels in a grid, row by row, and a caption below.

    Args:
      panels: The panels.
      title: Text for screen readers.
      caption: Text below the panels.
      columns: Number of panels in a row.
      width: Width of the figure, in pixels.
      right_px: Room for labels to the right of each box, in pixels.
      font_px: Size of the text, in pixels.
      key: Names and CSS classes of curves that have no labels, shown above the panels.
    """
    em = font_px
    x = em  # where the next name of the key begins
    top = 0.0
    parts = []
    for label, classes in key:
        room = (3.2 + 0.55 * len(label)) * em
        if x + room > width:
            x, top = em, top + 1.6 * em
        line = f'<path class="line" d="M{x:g} {top + 1.4 * em:g}h{1.4 * em:g}"/>'
        name = text(x + 2 * em, top + 1.4 * em, label, "end")
        parts.append(f'<g class="{classes}">{line}{name}</g>')
        x += room
    top += 2 * em if key else 0
    for row in (panels[first : first + columns] for first in range(0, len(panels), columns)):
        top += 3.6 * em
        for column, panel in enumerate(row):
            left = column * width / columns + 5 * em
            box_px = width / columns - 5 * em - right_px
            parts.append(text(left - 4 * em, top - 2 * em, panel.title, "heading"))
            parts.append(text(left - 4 * em, top - 0.7 * em, panel.y_label, "tick start"))
            below = top + panel.height + 2.9 * em
            parts.append(text(left + box_px / 2, below, panel.x_label, "tick"))
            parts.append(
                f'<svg class="chart{panel.classes}" x="{left:g}" y="{top:g}" width="{box_px:g}"'
                f' height="{panel.height}" overflow="visible">{panel.body}</svg>'
            )
        top += max(panel.height for panel in row) + 3.6 * em
    for line in textwrap.wrap(caption, int(width / em / 0.55)):
        top += 1.5 * em
        parts.append(text(em, top, line, "tick start"))
    return svg(width, math.ceil(top + em), title, parts, font_px=font_px)


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """The SVG element of one line of text in a figure; `x` and `y` are in pixels."""
    return f'<text x="{x:g}" y="{y:g}" class="{classes}">{escaped(words)}</text>'


def svg(width: int, height: int, title: str, parts: Sequence[str], *, font_px: int = 13) -> Figure:
    """Make the text of an SVG file of `width` by `height` pixels from SVG elements.

    Its colours are those that the reader's system prefers, light or dark.
    """
    return Figure(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img">\n<title>{escaped(title)}</title>\n'
        f"<style>{STYLE}\nsvg {{ font: {font_px}px system-ui, sans-serif; }}</style>\n"
        f'<rect width="100%" height="100%" class="paper"/>{"".join(parts)}\n</svg>\n'
    )


def _end(curve: Curve, x: Axis, y: Axis) -> tuple[float, float] | None:
    """The last finite point of a curve, from the left and from the top; None if there is none."""
    finite = [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if math.isfinite(b)]
    if not finite:
        return None
    last_x, last_y = finite[-1]
    return x.at(last_x), 1 - y.at(last_y)


def _label(curve: Curve, end: tuple[float, float], row: float) -> str:
    """Draw a curve's label to the right of the box, and a thin line to it from the curve's end."""
    end_x, end_y = (f"{100 * value:.1f}%" for value in end)
    label_y = f"{100 * row:.1f}%"
    key = f'<tspan class="key">{escaped(curve.key)}</tspan> ' if curve.key else ""
    return (
        f'<line class="leader" x1="{end_x}" y1="{end_y}" x2="100%" y2="{label_y}"/>'
        f'<text class="end" x="100%" dx=".4em" y="{label_y}">{key}'
        f'<tspan class="name">{escaped(curve.label)}</tspan></text>'
    )


def _path(curve: Curve, x: Axis, y: Axis, num_bins: int) -> str:
    """The SVG of a curve and of its band, in coordinates that stretch with the box."""
    points = [_thinned(run, num_bins) for run in _placed(curve.x, curve.y, x, y)]
    area = ""
    if curve.band:
        pairs = [
            pair if all(map(math.isfinite, pair)) else (math.nan,) * 2
            for pair in zip(*curve.band, strict=True)
        ]
        low, high = (_placed(curve.x, edge, x, y) for edge in zip(*pairs, strict=True))
        area = "".join(
            _drawn([*_thinned(a, num_bins), *reversed(_thinned(b, num_bins))]) + "Z"
            for a, b in zip(low, high, strict=True)
        )
        area = f'<path class="band" d="{area}"/>'
    # A single point is drawn as a line of length zero; its round ends make a dot.
    line = "".join(_drawn(run) + ("h0" if len(run) == 1 else "") for run in points)
    return (
        f'<svg class="box" viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none">'
        f'{area}<path class="line" d="{line}"/></svg>'
    )


def _placed(
    xs: Iterable[float], ys: Iterable[float], x: Axis, y: Axis
) -> list[list[tuple[int, int]]]:
    """Place points in the box of a curve; a stretch ends where y is not finite."""
    stretches: list[list[tuple[int, int]]] = [[]]
    for a, b in zip(xs, ys, strict=True):
        if not math.isfinite(b):
            stretches.append([])
        else:
            stretches[-1].append((round(_UNITS * x.at(a)), round(_UNITS * (1 - y.at(b)))))
    return [stretch for stretch in stretches if stretch]


def _thinned(points: Sequence[tuple[int, int]], num_bins: int) -> list[tuple[int, int]]:
    """Keep the first, last, highest and lowest point of each bin of the horizontal axis."""
    if len(points) <= 2 * num_bins:
        return [*points]
    bins: dict[int, list[int]] = {}
    for index, (across, _) in enumerate(points):
        bins.setdefault(across * num_bins // (_UNITS + 1), []).append(index)
    kept = []
    for members in bins.values():
        by_height = sorted(members, key=lambda index: points[index][1])
        kept += sorted({members[0], members[-1], by_height[0], by_height[-1]})
    return [points[index] for index in kept]


def _drawn(points: Sequence[tuple[int, int]]) -> str:
    return "M" + "L".join(f"{a},{b}" for a, b in points)
