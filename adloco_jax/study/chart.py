"""Draw charts as SVG: in a web page, or as files of their own.

A panel is one chart. A box is the rectangle in which its curves lie. Positions in it are
percentages, so it stretches while texts and lines keep their size. As in SVG, they are counted from
the left and from the top. `chart.css` defines the colours and dashes of curves, for light pages and
for dark ones.
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
# Characters that XML, and so an SVG file, may not contain.
_NO_TEXT = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_UNITS = 4000  # range of a curve's coordinates, in both directions
_MAX_BINS = 4000  # bins of all curves of a chart; a bin holds up to four points
_LEAST_BINS = 50  # bins of each curve nevertheless, with which it still shows
_HUGE = 1e290  # limit of drawn values, so that sums do not overflow
_MAX_TICKS = 5  # number of ticks that fit a phone's width
_MAX_LABEL = 22  # characters of a curve's label
_LABEL_PX = 14  # distance between two lines of text
_CHARACTER_EM = 0.55  # mean width of a character, relative to the size of the text

# Numbers of colours and of kinds of dashes: without a common factor, so 42 curves look different.
NUM_COLORS = 7
NUM_DASHES = 6


def look(index: int) -> str:
    """Return the CSS classes, colour and dashes, of curve `index`, from 0, in every chart."""
    return f"c{index % NUM_COLORS} d{index % NUM_DASHES}"


def escaped(text: str) -> str:
    """Escape text for HTML and SVG, and replace characters that XML forbids by question marks."""
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
        """Return the position of a value on the axis, from 0 at `low` to 1 at `high`.

        Values beyond an end are placed at this end.
        """
        value = min(max(value, self.low), self.high)
        scale = math.log if self.is_log else float
        low = scale(self.low)
        high = scale(self.high)
        return (scale(value) - low) / (high - low)


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

    Without any it covers 1. A range without length is widened, so that it can be drawn.

    Args:
      label: Name of the quantity. It includes the unit, unless `unit` has the unit.
      values: The values that will be drawn.
      base: Base of a logarithmic axis, which ignores values that are not positive; 0: linear.
      whole: Whether a linear axis has ticks only at whole numbers.
      unit: Unit that is printed after the number of each tick.
      margin: Empty room at both ends, as a fraction of the length that the values cover.
      max_ticks: Upper limit of ticks.
    """
    shown = [value for value in values if abs(value) < _HUGE]  # NaN is not less than anything
    if base:
        shown = [value for value in shown if value > 0]
    if not shown:
        shown = [1.0]
    low = min(shown)
    high = max(shown)

    if base:
        factor = base  # one power on both sides, if the values are almost alike
        if high > 1.01 * low:
            factor = (high / low) ** margin
        low /= factor
        high *= factor
        ticks = _log_ticks(low, high, base, max_ticks)
        return Axis(label, low, high, ticks, is_log=True, unit=unit)

    if high == low:
        low = min(0.0, low)
        high = max(1.0, high)
    room = margin * (high - low)
    low -= room
    high += room
    ticks = _ticks(low, high, max_ticks, whole=whole)
    return Axis(label, low, high, ticks, is_log=False, unit=unit)


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most `most` ticks of a linear axis, with `whole` only whole numbers.

    They are the multiples, between `low` and the larger `high`, of the smallest step that gives few
    enough. A step is 1, 2, 2.5 or 5 times a power of ten.
    """
    # The power of ten below the step that `most` ticks would have. Ten times it is always enough,
    # unless the logarithm was rounded down: then 20 or 50 times.
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    sizes = [power * factor for factor in (1, 2, 2.5, 5, 10, 20, 50)]
    if whole:
        sizes = [size for size in sizes if size % 1 == 0] or [1.0]  # 1 if all are below it
    for step in sizes:  # the first with few enough ticks
        # The first and the last multiple; a tick at an end counts in spite of rounding.
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        if last - first < most:
            break
    # With 12 digits, so that 3 times 0.1 is 0.3.
    return [float(f"{step * number:.12g}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, base: int, most: int) -> list[float]:
    """Return about `most` ticks of a logarithmic axis: powers of the base, not all if they crowd.

    With base 10, also 2 and 5 times the powers, if these do not crowd. A range with less than two
    such ticks has those of a linear axis.
    """
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    choices = []  # of ticks, from many to few
    if base == 10:
        choices.append([factor * 10.0**power for power in powers for factor in (1, 2, 5)])
    for every in (1, 2, 3, 5, 10):  # each power, each second one, and so on
        choices.append([float(base) ** power for power in powers if power % every == 0])
    for choice in choices:
        # A tick at an end counts in spite of rounding.
        ticks = [tick for tick in choice if low / 1.001 <= tick <= 1.001 * high]
        if len(ticks) <= most:
            break
    if len(ticks) < 2:
        return _ticks(low, high, most)
    return ticks


class Curve(NamedTuple):
    """A line through points in the given order. The line has a gap where y is not finite."""

    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    classes: str  # CSS classes of `chart.css`
    label: str = ""  # text beside the curve's end
    key: str = ""  # text that replaces the label if there is little room
    # Lower and upper y of an area around the line, at the same x.
    band: tuple[Sequence[float] | np.ndarray, ...] | None = None


def points(
    x: Iterable[Sequence[float]], y: Iterable[Sequence[float]], color: str, label: str = ""
) -> list[Curve]:
    """Make three curves for each dot: the dot, and bars over the ranges of its values.

    `x` and `y` have the lowest, middle and highest value of each dot; the last dot has the label.
    `color` is the dots' CSS class.
    """
    curves = []
    for (left, middle_x, right), (low, middle_y, high) in zip(x, y, strict=True):
        curves.append(Curve([left, right], [middle_y, middle_y], f"{color} thin"))
        curves.append(Curve([middle_x, middle_x], [low, high], f"{color} thin"))
        curves.append(Curve([middle_x], [middle_y], f"{color} mark"))
    curves[-1] = curves[-1]._replace(label=label)
    return curves


def step_curve(rounds: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return x and y of a curve that is constant from n - 1 to n for round n.

    It has a gap where rounds are missing. `rounds` ascend, with a value for each.
    """
    x: list[float] = []
    y: list[float] = []
    for number, value in zip(rounds, values, strict=True):
        if x and x[-1] < number - 1:  # a round is missing; NaN makes the gap
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
    return f"{label[:half]}…{label[1 - half :]}"  # one character of the second half is the "…"


class Figure(str):
    """The text of an SVG file. A notebook shows an object of this class as a picture."""

    def _repr_svg_(self) -> str:
        """Return the SVG; a notebook looks for a method of this name."""
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

    `x` and `y` are the axes, and `title` is a text for screen readers. Labels are at least
    `label_px` apart, if the box of `height` pixels has room.
    """
    # A bin is a part of the horizontal axis, in which a curve has at most four points. Many curves
    # share the bins of a chart, so that the page stays small. A bin is four coordinates wide at
    # least, one for each of its points.
    num_bins = min(_UNITS // 4, _MAX_BINS // max(1, len(curves)))
    num_bins = max(_LEAST_BINS, num_bins)
    drawn = [_curve_svg(curve, x, y, num_bins) for curve in curves]

    ends = {}  # the last point of each curve with a label, by the curve's index
    for index, curve in enumerate(curves):
        end = _last_point(curve, x, y)
        if curve.label and end is not None:
            ends[index] = end
    gap = min(label_px, height / max(1, len(ends) - 1))  # less if all would not fit the height
    rows_px = spread_apart([from_top * height for _, from_top in ends.values()], gap, height)
    for (index, end), row_px in zip(ends.items(), rows_px, strict=True):
        drawn[index] += _label_svg(curves[index], end, row_px / height)

    body = "".join(
        f'<g class="curve {curve.classes}" data-k="{escaped(curve.key)}">{path}</g>'
        for curve, path in zip(curves, drawn, strict=True)
    )
    left = [(1 - y.at(tick), short(tick, y.unit)) for tick in y.ticks]
    classes = ""
    if gap < label_px - 1:  # a pixel less apart can still be read
        classes = " crowded"  # smaller texts, without thin lines to them
    return frame(x, body, title=title, height=height, left=left, y_label=y.label, classes=classes)


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

    Args:
      x: The horizontal axis.
      body: The elements.
      title: Text for screen readers.
      height: Height of the box, in pixels.
      left: Pairs: the distance from the top (0 to 1) of a grid line, and the text on its left.
      y_label: Label of the vertical axis.
      classes: CSS classes of the whole chart, with a space before each.
    """
    grid = []
    ticks = []
    for tick in x.ticks:
        across = f"{100 * x.at(tick):.2f}%"
        words = short(tick, x.unit)
        grid.append(f'<line class="grid" x1="{across}" x2="{across}" y1="0" y2="100%"/>')
        ticks.append(f'<text class="tick" x="{across}" y="100%" dy="1.4em">{words}</text>')
    for from_top, words in left:
        row = f"{100 * from_top:.2f}%"
        grid.append(f'<line class="grid" x1="0" x2="100%" y1="{row}" y2="{row}"/>')
        ticks.append(f'<text class="tick left" x="0" dx="-.6em" y="{row}">{escaped(words)}</text>')
    inside = "".join([*grid, body, *ticks])
    return Panel(title, inside, height, x.label, y_label, classes)


def spread_apart(wanted: Sequence[float], gap: float, high: float) -> list[float]:
    """Move positions so that neighbours are at least `gap` apart, and keep their order.

    The moved positions lie between 0 and `high`, as far as there is room for all. They are returned
    in the order of `wanted`, which need not be sorted.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    rows = [0.0] * len(wanted)
    # From the lowest on, each is moved up until it is far enough from the one before.
    least = 0.0
    for index in order:
        rows[index] = max(wanted[index], least)
        least = rows[index] + gap
    # Those that are then too high are moved down, with all that stand in their way.
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
    # Lengths are multiples of the size of the text, chosen by eye so that nothing overlaps.
    em = font_px
    top = 0.0  # the height of what is drawn so far
    parts = []

    # The key: a short line and a name for each kind of curve.
    x = em  # where the next name begins
    for label, classes in key:
        room = (3.2 + _CHARACTER_EM * len(label)) * em  # of the line, the name and the gaps
        if x + room > width:  # on to the next row
            x = em
            top += 1.6 * em
        # In an SVG path, M moves to a point, and h draws so far to the right.
        line = f'<path class="line" d="M{x:g} {top + 1.4 * em:g}h{1.4 * em:g}"/>'
        name = text(x + 2 * em, top + 1.4 * em, label, "end")
        parts.append(f'<g class="{classes}">{line}{name}</g>')
        x += room
    if key:
        top += 2 * em

    # The panels: above each box its title and the label of y, below it the label of x.
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        top += 3.6 * em  # room for the title and the label of y
        for column, panel in enumerate(row):
            left = column * width / columns + 5 * em  # of the box, after room for its ticks
            box_px = width / columns - 5 * em - right_px  # the width of the box
            parts.append(text(left - 4 * em, top - 2 * em, panel.title, "heading"))
            parts.append(text(left - 4 * em, top - 0.7 * em, panel.y_label, "tick start"))
            below = top + panel.height + 2.9 * em
            parts.append(text(left + box_px / 2, below, panel.x_label, "tick"))
            parts.append(
                f'<svg class="chart{panel.classes}" x="{left:g}" y="{top:g}" width="{box_px:g}"'
                f' height="{panel.height}" overflow="visible">{panel.body}</svg>'
            )
        # Below the highest box there is room for ticks and the label of x.
        top += max(panel.height for panel in row) + 3.6 * em

    # Broken at the number of characters that fit the width.
    for line in textwrap.wrap(caption, int(width / em / _CHARACTER_EM)):
        top += 1.5 * em
        parts.append(text(em, top, line, "tick start"))
    height = math.ceil(top + em)  # with a margin below
    return svg(width, height, title, parts, font_px=font_px)


def text(x: float, y: float, words: str, classes: str = "") -> str:
    """Return the SVG element of one line of text in a figure; `x` and `y` are in pixels."""
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


def _last_point(curve: Curve, x: Axis, y: Axis) -> tuple[float, float] | None:
    """Return where a curve's last finite point is, from the left and from the top (0 to 1).

    `x` and `y` are the axes. None if the curve has no finite point.
    """
    for x_value, y_value in zip(reversed(curve.x), reversed(curve.y), strict=True):
        if math.isfinite(y_value):
            return x.at(x_value), 1 - y.at(y_value)
    return None


def _label_svg(curve: Curve, end: tuple[float, float], row: float) -> str:
    """Draw a curve's label to the right of the box, and a thin line to it from the curve's end.

    `end` is a result of `_last_point`; `row` is the label's distance from the top (0 to 1).
    """
    end_x, end_y = (f"{100 * value:.1f}%" for value in end)
    label_y = f"{100 * row:.1f}%"
    key = ""
    if curve.key:
        key = f'<tspan class="key">{escaped(curve.key)}</tspan> '
    return (
        f'<line class="leader" x1="{end_x}" y1="{end_y}" x2="100%" y2="{label_y}"/>'
        f'<text class="end" x="100%" dx=".4em" y="{label_y}">{key}'
        f'<tspan class="name">{escaped(curve.label)}</tspan></text>'
    )


def _curve_svg(curve: Curve, x: Axis, y: Axis, num_bins: int) -> str:
    """Return the SVG of a curve and of its band, in coordinates that stretch with the box.

    `x` and `y` are the axes. At most four points are drawn for each of `num_bins` parts of the
    horizontal axis. The line and the outline of the band are SVG paths, in which M moves to a
    point, L draws a line to the next one, and Z closes the outline.
    """
    line = ""  # M and L commands: a part for each stretch of the curve without a gap
    for stretch in _stretches(curve.x, curve.y, x, y):
        line += _path_commands(_thinned(stretch, num_bins))
        if len(stretch) == 1:
            line += "h0"  # a line of length zero, whose round ends make a dot
    area = ""
    if curve.band:
        # Both edges have their gaps at the same x, so that their stretches belong together.
        lower = []
        upper = []
        for low, high in zip(*curve.band, strict=True):
            is_gap = not (math.isfinite(low) and math.isfinite(high))
            lower.append(math.nan if is_gap else low)
            upper.append(math.nan if is_gap else high)
        outlines = ""  # along the lower edge, and back along the upper one
        below_line = _stretches(curve.x, lower, x, y)
        above_line = _stretches(curve.x, upper, x, y)
        for below, above in zip(below_line, above_line, strict=True):
            back = reversed(_thinned(above, num_bins))
            outlines += _path_commands([*_thinned(below, num_bins), *back]) + "Z"
        area = f'<path class="band" d="{outlines}"/>'
    return (
        f'<svg class="box" viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none">'
        f'{area}<path class="line" d="{line}"/></svg>'
    )


def _stretches(
    xs: Iterable[float], ys: Iterable[float], x: Axis, y: Axis
) -> list[list[tuple[int, int]]]:
    """Return the coordinates of points in the box of a curve, in stretches without a gap.

    A stretch ends where y is not finite. `xs` and `ys` are values on the axes `x` and `y`.
    """
    stretches: list[list[tuple[int, int]]] = [[]]
    for x_value, y_value in zip(xs, ys, strict=True):
        if not math.isfinite(y_value):
            stretches.append([])
            continue
        across = round(_UNITS * x.at(x_value))
        down = round(_UNITS * (1 - y.at(y_value)))
        stretches[-1].append((across, down))
    return [stretch for stretch in stretches if stretch]


def _thinned(points: Sequence[tuple[int, int]], num_bins: int) -> list[tuple[int, int]]:
    """Keep the first, last, highest and lowest point of each bin of the horizontal axis.

    A curve looks the same with these. Points that are at most two for each bin are all kept.
    """
    if len(points) <= 2 * num_bins:
        return [*points]
    bins: dict[int, list[int]] = {}  # positions in `points`, by bin
    for index, (across, _) in enumerate(points):
        number = across * num_bins // (_UNITS + 1)  # `across` is from 0 to _UNITS
        bins.setdefault(number, []).append(index)
    kept = []
    for members in bins.values():
        by_height = sorted(members, key=lambda index: points[index][1])
        kept += sorted({members[0], members[-1], by_height[0], by_height[-1]})
    return [points[index] for index in kept]


def _path_commands(points: Sequence[tuple[int, int]]) -> str:
    """Return the commands of an SVG path: move to the first point, draw lines to the others."""
    return "M" + "L".join(f"{a},{b}" for a, b in points)
