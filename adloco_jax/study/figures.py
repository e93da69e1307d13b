"""The style of the figures that are drawn with Matplotlib, to be kept as files."""

import math

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

# Okabe and Ito's colours, black last and without yellow, too pale for a line. Markers and dashes
# tell curves apart in grey print; their numbers have no common factor, so no look comes back
# before the 105th curve.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))

# Decorates what draws: letters that stay readable in print.
small_letters = rc_context(
    dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 9)
    | dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5)
    | {"lines.linewidth": 1.3, "lines.markersize": 4}
)


def look(index: int) -> dict:
    """Colour, marker and dashes of the curve with this number, the same in every figure."""
    return {
        "color": _COLORS[index % len(_COLORS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
    }


def finish(ax: Axes) -> None:
    """A quiet grid behind the data, and no box around it."""
    ax.grid(color="0.92", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure) -> None:
    """One legend for all panels, above them; they have the same labels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    longest = max(map(len, labels))
    ncols = max(1, min(len(handles), int(figure.get_figwidth() * 72 / (4.7 * longest + 42))))
    more_rows = math.ceil(len(handles) / ncols) - 1
    figure.set_figheight(figure.get_figheight() + 0.19 * more_rows)
    shown = figure.legend(handles, labels, loc="outside upper center", ncols=ncols)
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
