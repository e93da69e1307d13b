"""The figure and the printed lines of a gradient analysis (`study.gradients`)."""

import numpy as np

from adloco_jax.study import chart
from adloco_jax.study.chart import Curve, Figure, Panel
from adloco_jax.study.summary import SOURCES, columns

_BATCH = ("b", "|g_b - G|", "rms/law", "excess kurtosis")
_TEST = ("round", "trainer", "noise", "signal", "noise scale")


def describe(result: dict) -> list[str]:
    """Format the result of `analyse_run` as lines of text, at most 80 characters wide."""
    unit, total = result["unit"], result["num_params"]
    source = SOURCES.get(result["source"], result["source"])
    lines = [
        f"run {result['run']}, round {result['round']}, parameters: {source}",
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
        "the run's own tests at the beginning of a round, and (ratio to the above)",
        *columns([_TEST, *map(_test_cells, result["ledger"])]),
    ]


def figure(result: dict) -> Figure:
    """Draw how the gradients of random batches deviate from the full gradient.

    Left: histograms of single coordinates. Right: norms against the batch size.
    """
    return chart.document(
        [_histograms(result), _norms(result)],
        title=f"Gradients of run {result['run']}, round {result['round']}",
        caption=_caption(result),
        columns=2,
        width=1200,
        right_px=190,
    )


def _histograms(result: dict) -> Panel:
    edges, lowest, curves = np.array(result["bin_edges"]), 1.0, []
    for index, batch in enumerate(result["batches"]):
        density = np.array(batch["counts"]) / (max(1, batch["num_deviations"]) * np.diff(edges))
        lowest = min([lowest, *density[density > 0]])
        heights = np.where(density > 0, density, np.nan).repeat(2)
        label = f"b = {batch['batch_size']:,}"
        curves.append(Curve(edges.repeat(2)[1:-1], heights, chart.look(index), label))
    x = np.linspace(edges[0], edges[-1], 401)
    normal = np.exp(-np.square(x) / 2) / np.sqrt(2 * np.pi)
    shown = np.where(normal > lowest / 2, normal, np.nan)
    curves.append(Curve(x, shown, "c6 thin", "normal"))
    across = chart.axis("deviation of a coordinate / its root mean square", edges)
    up = chart.axis("density (per unit of the axis below)", [lowest / 2, 1.0], base=10)
    return chart.chart(across, up, curves, title="Single coordinates", height=300)


def _norms(result: dict) -> Panel:
    batches, n = result["batches"], result["num_sequences"]
    sizes, mean, rms = (
        np.array([batch[name] for batch in batches])
        for name in ("batch_size", "norm_mean", "norm_rms")
    )
    low, high = np.quantile([batch["norms"] for batch in batches], (0.1, 0.9), axis=1)
    b = np.geomspace(max(1, sizes[0] / 1.6), min((sizes[-1] + n) / 2, sizes[-1] * 1.6), 200)
    law = np.sqrt(result["noise"] / b)
    curves = [
        Curve(b, law, "other d4", "√(tr Σ / b): independent"),
        Curve(b, law * np.sqrt(1 - b / n), "c6", f"without replacement of {n:,}"),
    ]
    across = [(size, size, size) for size in sizes]
    curves += chart.points(across, zip(low, mean, high, strict=True), "c0", "mean, 10 % to 90 %")
    curves += chart.points(across, [(value,) * 3 for value in rms], "c1", "root mean square")
    x = chart.axis("batch size b (sequences)", b, base=2)
    y = chart.axis(
        f"norm of the deviation, |g_b - G| ({result['unit']})",
        [value for curve in curves for value in curve.y],
        base=10,
        margin=0.05,
    )
    title = "Norm of a batch gradient's deviation"
    return chart.chart(x, y, curves, title=title, height=300)


def _caption(result: dict) -> str:
    return (
        "Left: deviations of single coordinates of g_b, the gradient of a random batch of b"
        " sequences, from those of G, the mean over all n, beside the normal density of the same"
        " variance. Right: the norm over all coordinates. Gradients are in"
        f" {result['unit']}, as parameters are dimensionless."
        + (f" Made by: {result['command']}" if result["command"] else "")
    )


def _batch_cells(batch: dict) -> tuple[str, ...]:
    return (
        f"{batch['batch_size']}",
        f"{batch['norm_mean']:.3g} +- {batch['norm_std']:.2g}",
        f"{batch['rms_over_law']:.3f}",
        f"{batch['excess_kurtosis']:.2g}",
    )


def _test_cells(line: dict) -> tuple[str, ...]:
    cells = [f"{line['round']}", f"{line['trainer']}"]
    for name in ("noise", "signal", "noise_scale"):
        ratio = line[f"{name}_ratio"]
        cells.append(_number(line[name]) + ("" if ratio is None else f" ({ratio:.2f})"))
    return tuple(cells)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
