"""The figure and the lines of a gradient analysis, from its numbers alone (`study.gradients`)."""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

# Okabe and Ito's blue, vermilion, green, purple, sky and orange; dashes tell them apart in print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)))


def describe(result: dict) -> list[str]:
    """The numbers as lines of text, in columns, at most 80 wide.

    Args:
      result: As `analyse_run` returns it.

    Returns:
      The measured noise, the scatter by batch size, and the run's own tests beside it.
    """
    unit = result["unit"]
    n, sampled, total = (result[k] for k in ("num_sequences", "num_coordinates", "num_params"))
    drawn = "all" if sampled == total else f"{sampled:,} at random"
    lines = [
        f"run {result['run']}, round {result['round']}, {_model(result)}",
        f"{n:,} of {result['num_training_sequences']:,} training sequences, seed {result['seed']}",
        f"{total:,} parameters; histograms of {drawn}",
        "",
        f"norm of the mean gradient   {_number(result['mean_gradient_norm'])} {unit}",
        f"noise tr(Sigma)             {_number(result['noise'])} ({unit})^2",
        f"signal |G|^2, unbiased      {_number(result['signal'])} ({unit})^2",
        f"noise scale tr(Sigma)/|G|^2 {_number(result['noise_scale'])} sequences",
        "",
        *_columns(
            ("b", "|g_b - G|", "rms/law", "std", "mean", "median", "kurt.", "own kurt."),
            [_batch_cells(batch) for batch in result["batches"]],
        ),
        "",
    ]
    if not result["ledger"]:
        return [*lines, "the run tested no batch around this round"]
    is_marked = any(line["at_checkpoint"] for line in result["ledger"])
    marks = ["* at the checkpoint's own parameters"] if is_marked else []
    return [
        *lines,
        "the run's own tests, and (ratio to the above)",
        *_columns(
            ("round", "trainer", "noise", "signal", "noise scale", "smoothed"),
            [_test_cells(line) for line in result["ledger"]],
        ),
        *marks,
    ]


def figure(result: dict) -> Figure:
    """Histograms (two ways), the norm against batch size, and the numbers.

    Args:
      result: As `analyse_run` returns it.

    Returns:
      The figure, for print at 150 dots per inch.
    """
    shown = Figure(figsize=(12.5, 9.5), layout="constrained")
    (pooled, own), (norms, text) = shown.subplots(2, 2)
    edges = np.array(result["bin_edges"])
    batches = result["batches"]
    _draw_histogram(
        pooled, edges, [(b["batch_size"], b["counts"], b["num_deviations"]) for b in batches]
    )
    pooled.set_xlabel("deviation of a coordinate / standard deviation of all (dimensionless)")
    pooled.set_title("All coordinates on one scale", fontsize=10)
    _draw_histogram(
        own, edges, [(b["batch_size"], b["own_counts"], b["num_own_deviations"]) for b in batches]
    )
    own.set_xlabel("deviation of a coordinate / its own root mean square (dimensionless)")
    own.set_title("Each coordinate on its own scale", fontsize=10)
    _draw_norms(norms, result)
    text.axis("off")
    text.text(
        0.0,
        1.0,
        "\n".join(describe(result)),
        family="monospace",
        fontsize=8,
        va="top",
        transform=text.transAxes,
        parse_math=False,
    )
    shown.supxlabel(_caption(result), fontsize=8, x=0.01, ha="left", parse_math=False)
    return shown


def _draw_histogram(ax: Axes, edges: np.ndarray, counted: list[tuple[int, list[int], int]]) -> None:
    """Densities by batch size, and the normal density of the same variance: 1, in these units."""
    lowest = 1.0
    for place, (batch_size, counts, total) in enumerate(counted):
        density = np.array(counts) / (max(1, total) * np.diff(edges))
        lowest = min([lowest, *density[density > 0]])
        style = {"color": _COLORS[place % 6], "ls": _DASHES[place % 6], "lw": 1.4}
        label = f"b = {batch_size:,}"
        ax.stairs(
            np.where(density > 0, density, np.nan), edges, baseline=None, label=label, **style
        )
    x = np.linspace(edges[0], edges[-1], 801)
    normal = np.exp(-np.square(x) / 2) / np.sqrt(2 * np.pi)
    ax.plot(x, normal, color="black", lw=1, label="normal, same variance", zorder=1)
    ax.set_yscale("log")
    ax.set_ylim(lowest / 2, None)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylabel("density (per unit of the axis below)")
    _finish(ax)


def _draw_norms(ax: Axes, result: dict) -> None:
    batches, n = result["batches"], result["num_sequences"]
    sizes = np.array([batch["batch_size"] for batch in batches])
    b = np.geomspace(max(1, sizes[0] / 1.6), min((sizes[-1] + n) / 2, sizes[-1] * 1.6), 200)
    ax.plot(
        b,
        np.sqrt(result["noise"] / b),
        color="0.45",
        ls="--",
        lw=1.2,
        label=r"law for independent draws, $\sqrt{\mathrm{tr}\,\Sigma/b}$",
    )
    ax.plot(
        b,
        np.sqrt(result["noise"] / b * (1 - b / n)),
        color="black",
        lw=1.2,
        label=rf"law for draws without replacement from n = {n:,}",
    )
    mean, low, high = (
        np.array([batch[f"norm_{name}"] for batch in batches]) for name in ("mean", "p10", "p90")
    )
    spread = np.maximum(0.0, [mean - low, high - mean])
    label = f"mean, 10th to 90th percentile, {result['draws']:,} draws"
    ax.errorbar(
        sizes, mean, spread, fmt="o", color=_COLORS[0], ms=5, capsize=4, lw=1.2, label=label
    )
    label = "root mean square, which the law is of"
    rms = [batch["norm_rms"] for batch in batches]
    ax.plot(sizes, rms, "D", color=_COLORS[1], mfc="none", ms=8, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("batch size b (sequences)")
    ax.set_ylabel(rf"norm of the deviation, $|g_b - G|$ ({result['unit']})")
    ax.set_title("Norm of a batch gradient's deviation", fontsize=10)
    _finish(ax)


def _finish(ax: Axes) -> None:
    ax.grid(color="0.92")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)


def _caption(result: dict) -> str:
    shown = (
        f"Gradients of run {result['run']} after round {result['round']}, {_model(result)}. Top:"
        f" how far coordinates of g_b, the gradient of a random batch of b sequences, lie from"
        f" those of G, the mean gradient over all n = {result['num_sequences']:,};"
        f" {result['draws']} batches of each size, {result['num_coordinates']:,} of"
        f" {result['num_params']:,} coordinates. Deviations beyond the axis count in the variance."
        " Bottom: the norm over all coordinates, and the numbers. Parameters are dimensionless, so"
        f" a gradient is in {result['unit']}; kurt. is the excess kurtosis, 0 for a normal"
        " distribution, own kurt. that of the panel on the right; smoothed is the noise scale the"
        " run's test acted on."
    )
    command = f"Command: {result['command']}" if result["command"] else ""
    return "\n".join(textwrap.wrap(shown, 205) + textwrap.wrap(command, 205, max_lines=3))


def _model(result: dict) -> str:
    source = result["source"]
    if source == "only":
        return "the only trainer left"
    return source if source.startswith("trainer") else f"consensus ({source})"


def _batch_cells(batch: dict) -> tuple[str, ...]:
    whole, own = batch["coordinates"], batch["coordinates_over_own_rms"]
    return (
        f"{batch['batch_size']}",
        f"{batch['norm_mean']:.3g} +- {batch['norm_std']:.2g}",
        f"{batch['rms_over_law']:.3f}",
        *(f"{whole[name]:.2g}" for name in ("std", "mean", "median")),
        f"{whole['excess_kurtosis']:.3g}",
        f"{own['excess_kurtosis']:.3g}",
    )


def _test_cells(line: dict) -> tuple[str, ...]:
    def cell(name: str) -> str:
        ratio = line[f"{name}_ratio"]
        return _number(line[name]) + ("" if ratio is None else f" ({ratio:.2f})")

    return (
        f"{line['round']}{'*' if line['at_checkpoint'] else ''}",
        f"{line['trainer']}",
        *map(cell, ("noise", "signal", "noise_scale", "smoothed_noise_scale")),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _columns(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
