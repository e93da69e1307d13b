"""What models say of recorded runs: their time on a cluster, and the paper's theory beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.study import curves, network, theory
from adloco_jax.study.cluster import PRESETS, Cluster, roofline
from adloco_jax.study.curves import Run
from adloco_jax.study.figures import (
    WIDTH,
    Clock,
    Drawing,
    finish,
    legend,
    look_every,
    plain_decades,
    small_letters,
)

DEVICE = "a100_80gb"
PRESET = "two_sites"  # what loss is drawn over: far enough apart for communication to matter
PRESET_IN_WORDS = "two sites with a leased line of 10 Gbit/s and 30 ms between them"
# The table of clusters: preset and devices.
SIZES = (
    ("one_host", 4),
    ("one_host", 8),
    ("one_datacenter", 32),
    ("one_datacenter", 256),
    ("two_sites", 32),
    ("two_sites", 256),
    ("eight_sites", 256),
    ("eight_sites", 4096),
)

# What the models read of a start line; a ledger may be older than one of them.
_NEEDED = (
    *("num_params", "devices", "max_batch_size", "config.data.sequence_length"),
    *("config.inner.unit", "config.inner.steps_per_round"),
    *("config.batching.test", "config.batching.eta", "config.batching.nu"),
)


def cluster(run: Run, preset: str, num_devices: int) -> Cluster:
    """A preset cluster whose devices compute this run's model at the pace of their data sheet.

    Raises:
      DataError: If the start line lacks what the network model and the theory need.
    """
    _check_start(run)
    step_time = roofline(
        DEVICE,
        num_params=run.start["num_params"],
        sequence_length=run.start["config"]["data"]["sequence_length"],
    )
    settings: Mapping[str, Any] = PRESETS[preset]
    return Cluster(num_devices=num_devices, step_time=step_time, **settings)


def _check_start(run: Run) -> None:
    for start in curves.lines(run.events, "start") or [{}]:
        for path in _NEEDED:
            value: object = start
            for name in path.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if value is None:
                raise DataError(f"{run.folder / 'ledger.jsonl'}: the start line lacks {path}")


def simulate(runs: Sequence[Run]) -> tuple[Clock | None, list[str]]:
    """The runs' times on one preset cluster, with a device for each worker of the largest run.

    Returns:
      The clock, None where no run can be simulated; and for each run that cannot, a line why.
    """
    num_devices = max(_num_workers(run) for run in runs)
    end_s, reasons = {}, []
    for run in runs:
        try:
            times = network.replay(run.events, cluster(run, PRESET, num_devices))
        except (ConfigError, DataError) as error:
            reasons.append(f"{run.folder.name}: {error}")
        else:
            end_s[run.folder] = times.end_s
    name = f"{PRESET}, {num_devices} × {DEVICE}"
    return (Clock(name, end_s) if end_s else None), reasons


def cluster_table(run: Run) -> list[dict] | str:
    """How the run would have gone on clusters from one host to thousands of devices.

    Returns:
      A dict per cluster: preset, and the columns of `network.scaling`; or why there is none.
    """
    try:
        clusters = [cluster(run, preset, devices) for preset, devices in SIZES]
        rows = network.scaling(run.events, clusters)
    except (ConfigError, DataError) as error:
        return str(error)
    return [{"preset": preset, **row} for (preset, _), row in zip(SIZES, rows, strict=True)]


def _num_workers(run: Run) -> int:
    """Workers of all trainers in the first round."""
    rounds = curves.lines(run.events, "round")
    first = min(e["round"] for e in rounds)
    return sum(e["workers"] for e in rounds if e["round"] == first)


@dataclass(frozen=True)
class Theory:
    """The theory's figure, and the constants its bounds are made of or why there are none."""

    drawing: Drawing
    constants: theory.Constants | None
    reason: str


@small_letters
def theory_of(run: Run) -> Theory | str:
    """Measured signal, batch growth and communications beside the paper's bounds.

    Returns:
      The figure and the fitted constants; or why there is nothing to draw.
    """
    constants, reason = None, ""
    try:
        _check_start(run)
        try:
            constants = theory.fit(run.events)
        except DataError as error:
            reason = str(error)
        points = theory.measured(run.events, constants)
    except DataError as error:
        return str(error)
    figure = Figure(figsize=(WIDTH, 6.8), layout="constrained")
    signal, batch, communications = figure.subplots(3, 1, sharex=True, height_ratios=(4, 5, 4))
    _draw(signal, points, "mean_signal", "measured", "#0072B2", "o", "-")
    _draw(signal, points, "signal_bound", "upper bound (Lemma 2)", "#D55E00", "", "--")
    _draw(batch, points, "mean_total_batch_size", "measured", "#0072B2", "o", "-")
    _draw(batch, points, "batch_bound", "lower bound (Theorem 1)", "#009E73", "", "-.")
    _draw(batch, points, "mean_batch_size", "measured, per worker", "#E69F00", "s", "-")
    _draw(
        batch,
        points,
        "local_batch_bound",
        "lower bound, per worker (Lemma 1)",
        "#CC79A7",
        "v",
        "--",
    )
    _draw(communications, points, "communications", "measured", "#0072B2", "o", "-")
    _draw(communications, points, "communications_bound", "upper bound (direct)", "black", "", ":")
    paper = "the paper's estimate (Theorem 2)"
    _draw(communications, points, "paper_communications", paper, "#56B4E9", "^", "--")
    signal.set_ylabel("signal |G|²,\nmean so far")
    batch.set_ylabel("batch (sequences),\nmean so far")
    communications.set_ylabel("communications\nC(N)")
    communications.set_xlabel("updates of a worker, N")
    for ax in (signal, batch, communications):
        ax.set_yscale("log")
        values = np.concatenate([np.asarray(line.get_ydata(), float) for line in ax.lines] or [[]])
        values = values[values > 0]
        if values.size:
            plain_decades(ax, values.min(), values.max())
        else:
            ax.text(0.5, 0.5, "nothing measured", ha="center", transform=ax.transAxes)
            ax.set_yticks([])
        finish(ax)
    figure.align_ylabels()
    legend(figure)
    caption = (
        "The run beside what the AdLoCo paper (arXiv 2508.18182) proves of plain SGD. Top: the"
        " squared norm of the gradient, which Lemma 2 bounds from above. Middle: the requested"
        " batch of all workers of a trainer, which Theorem 1 bounds from below, and of each of"
        " them, for which Lemma 1 does. Bottom: the paper's count of communications,"
        " C(N) = Σ max_batch/b; its own estimate in Theorem 2 is no bound. Measured values are"
        " means over the trainers alive; all vertical axes are logarithmic, and a mean signal that"
        " is not positive is left out."
    )
    if constants is None:
        caption += " There are no bounds, because the run does not tell their constants."
    return Theory(Drawing("theory", "Theory beside the run", figure, caption), constants, reason)


def _draw(
    ax: Axes,
    points: Sequence[theory.Point],
    field: str,
    label: str,
    color: str,
    marker: str,
    linestyle: str,
) -> None:
    known = [(p.num_steps, getattr(p, field)) for p in points if (getattr(p, field) or 0) > 0]
    if known:
        x, y = zip(*known, strict=True)
        every = look_every(len(x))
        style = {"color": color, "marker": marker, "ls": linestyle, "lw": 1.3, "ms": 4}
        ax.plot(x, y, markevery=every, label=label, **style)
