"""The figure and the printed lines of a gradient analysis, from its numbers (`study.gradients`)."""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from adloco_jax.study.figures import finish, look, plain_decades
from adloco_jax.study.summary import columns

_BATCH = ("b", "|g_b - G|", "rms/law", "std", "mean", "median", "kurt.", "own kurt.")
_TEST = ("round", "trainer", "noise", "signal", "noise scale", "smoothed")


def describe(result: dict) -> list[str]:
    """The numbers as lines of text, in columns, at most 80 characters wide.

    Args:
      result: What `analyse_run` returns.

    Returns:
      The measured noise, the scatter by batch size, and the run's own tests beside it.
    """
    unit, total = result["unit"], result["num_params"]
    lines = [
        f"run {result['run']}, round {result['round']}, parameters: {result['source']}",
        f"{result['num_sequences']:,} of {result['num_training_sequences']:,} training sequences,"
        f" seed {result['seed']}",
        f"{total:,} parameters; histograms of {result['num_coordinates']:,}",
        "",
        f"norm of the mean gradient   {_number(result['mean_gradient_norm'])} {unit}",
        f"noise tr(Sigma)             {_number(result['noise'])} ({unit})^2",
        f"signal |G|^2, unbiased      {_number(result['signal'])} ({unit})^2",
        f"noise scale tr(Sigma)/|G|^2 {_number(result['noise_scale'])} sequences",
        "",
        *columns([_BATCH, *map(_batch_cells, result["batches"])]),
        "",
    ]
    if not result["ledger"]:
        return [*lines, "the run tested no batch around this round"]
    return [
        *lines,
        "the run's own tests, and (ratio to the above)",
        *columns([_TEST, *map(_test_cells, result["ledger"])]),
        "* at the checkpoint's own parameters",
    ]


def figure(result: dict) -> Figure:
    """Draw histograms on two scales, and the norm against batch size.

    Args:
      result: What `analyse_run` returns.

    Returns:
      The figure, for print at 150 dots per inch.
    """
    shown = Figure(figsize=(12.5, 9.5), layout="constrained")
    pooled, own, norms = shown.subplot_mosaic("AB;CC").values()
    _draw_histograms(pooled, result, "")
    pooled.set(xlabel="deviation of a coordinate / standard deviation of all (dimensionless)")
    pooled.set_title("All coordinates on one scale", fontsize=10)
    _draw_histograms(own, result, "own_")
    own.set(xlabel="deviation of a coordinate / its own root mean square (dimensionless)")
    own.set_title("Each coordinate on its own scale", fontsize=10)
    _draw_norms(norms, result)
    for ax in (pooled, own, norms):
        finish(ax)
        ax.legend(fontsize=8, frameon=False)
    shown.supxlabel(_caption(result), fontsize=8, x=0.01, ha="left", parse_math=False)
    return shown


def _draw_histograms(ax: Axes, result: dict, scale: str) -> None:
    """Densities by batch size, and the normal density of the same variance: 1, in these units."""
    edges, lowest = np.array(result["bin_edges"]), 1.0
    for place, batch in enumerate(result["batches"]):
        total = max(1, batch[f"num_{scale}deviations"])
        density = np.array(batch[f"{scale}counts"]) / (total * np.diff(edges))
        lowest = min([lowest, *density[density > 0]])
        shown, style = np.where(density > 0, density, np.nan), look(place)
        del style["marker"]
        label = f"b = {batch['batch_size']:,}"
        ax.stairs(shown, edges, baseline=None, label=label, lw=1.4, **style)
    x = np.linspace(edges[0], edges[-1], 801)
    normal = np.exp(-np.square(x) / 2) / np.sqrt(2 * np.pi)
    ax.plot(x, normal, color="black", lw=1, label="normal, same variance", zorder=1)
    ax.set(yscale="log", ylim=(lowest / 2, None), xlim=(edges[0], edges[-1]))
    ax.set_ylabel("density (per unit of the axis below)")


def _draw_norms(ax: Axes, result: dict) -> None:
    """Norms of the deviations by batch size, beside their laws."""
    batches, n = result["batches"], result["num_sequences"]
    sizes, mean, rms = (
        np.array([batch[name] for batch in batches])
        for name in ("batch_size", "norm_mean", "norm_rms")
    )
    low, high = np.quantile([batch["norms"] for batch in batches], (0.1, 0.9), axis=1)
    b = np.geomspace(max(1, sizes[0] / 1.6), min((sizes[-1] + n) / 2, sizes[-1] * 1.6), 200)
    law = np.sqrt(result["noise"] / b)
    label = r"law for independent draws, $\sqrt{\mathrm{tr}\,\Sigma/b}$"
    ax.plot(b, law, color="0.45", ls="--", lw=1.2, label=label)
    label = f"law for draws without replacement from n = {n:,}"
    ax.plot(b, law * np.sqrt(1 - b / n), color="black", lw=1.2, label=label)
    spread = np.maximum(0.0, [mean - low, high - mean])
    label = f"mean, 10th to 90th percentile, {result['draws']:,} draws"
    ax.errorbar(sizes, mean, spread, fmt="o", color=look(0)["color"], capsize=4, label=label)
    label = "root mean square, to which the law applies"
    ax.plot(sizes, rms, "D", color=look(1)["color"], mfc="none", ms=8, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    plain_decades(ax, *ax.get_ylim())
    ax.set_xlabel("batch size b (sequences)")
    ax.set_ylabel(rf"norm of the deviation, $|g_b - G|$ ({result['unit']})")
    ax.set_title("Norm of a batch gradient's deviation", fontsize=10)


def _caption(result: dict) -> str:
    shown = (
        "Top: deviations of single coordinates of g_b, the gradient of a random batch of b"
        " sequences, from those of G, the mean over all n; deviations beyond the axis count"
        " in the variance. Bottom: the norm over all coordinates. Gradients are in"
        f" {result['unit']}, as parameters are dimensionless."
    )
    command = f"Command: {result['command']}" if result["command"] else ""
    return "\n".join(textwrap.wrap(shown, 205) + textwrap.wrap(command, 205, max_lines=3))


def _batch_cells(batch: dict) -> tuple[str, ...]:
    whole, own = batch["coordinates"], batch["coordinates_over_own_rms"]
    return (
        f"{batch['batch_size']}",
        f"{batch['norm_mean']:.3g} +- {batch['norm_std']:.2g}",
        f"{batch['rms_over_law']:.3f}",
        *(f"{whole[name]:.2g}" for name in ("std", "mean", "median")),
        *(_number(values["excess_kurtosis"], 3) for values in (whole, own)),
    )


def _test_cells(line: dict) -> tuple[str, ...]:
    cells = [f"{line['round']}{'*' if line['at_checkpoint'] else ''}", f"{line['trainer']}"]
    for name in ("noise", "signal", "noise_scale", "smoothed_noise_scale"):
        ratio = line[f"{name}_ratio"]
        cells.append(_number(line[name]) + ("" if ratio is None else f" ({ratio:.2f})"))
    return tuple(cells)


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
