"""Predictions for recorded runs: their time on simulated clusters, and the paper's bounds."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.study import curves, figures, theory
from adloco_jax.study.cluster import Cluster, Simulated
from adloco_jax.study.curves import Run
from adloco_jax.study.figures import Clock, Drawing, small_letters
from adloco_jax.study.replay import Replay, replay

DEVICE = "a100_80gb"
PRESET = "two_sites"  # the cluster of loss against time: communication matters between sites
PRESET_IN_WORDS = "two sites with a leased line of 10 Gbit/s and 30 ms between them"
# The table of clusters: preset and devices.
SIZES = (
    *(("one_host", 4), ("one_host", 8), ("one_datacenter", 32), ("one_datacenter", 256)),
    *(("two_sites", 32), ("two_sites", 256), ("eight_sites", 256), ("eight_sites", 4096)),
)

_PANELS = ("signal |G|²,\nmean so far", "batch (sequences),\nmean so far", "communications\nC(N)")
# By curve: panel, field of a `theory.Point`, label, colour, marker, dashes.
_CURVES = (
    (0, "mean_signal", "measured", "#0072B2", "o", "-"),
    (0, "signal_bound", "upper bound (Lemma 2)", "#D55E00", "", "--"),
    (1, "mean_total_batch_size", "measured", "#0072B2", "o", "-"),
    (1, "batch_bound", "lower bound (Theorem 1)", "#009E73", "", "-."),
    (1, "mean_batch_size", "measured, per worker", "#E69F00", "s", "-"),
    (1, "local_batch_bound", "lower bound, per worker (Lemma 1)", "#CC79A7", "v", "--"),
    (2, "communications", "measured", "#0072B2", "o", "-"),
    (2, "communications_bound", "upper bound (direct)", "black", "", ":"),
    (2, "paper_communications", "the paper's estimate (Theorem 2)", "#56B4E9", "^", "--"),
)


def cluster(run: Run, preset: str, num_devices: int) -> Cluster:
    """A preset cluster whose devices train this run's model at the speed of their data sheet.

    Raises:
      ConfigError: If there are fewer devices than sites.
    """
    return Simulated(
        preset,
        num_devices,
        DEVICE,
        run.start["num_params"],
        run.start["config"]["data"]["sequence_length"],
    ).cluster()


def simulate(runs: Sequence[Run]) -> tuple[Clock | None, list[str]]:
    """The runs' times on one preset cluster, with a device for each worker of the largest run.

    Returns:
      The clock, None where no run can be simulated; and for each run that cannot be, the reason.
    """
    num_devices = max(
        sum(e["workers"] for e in rounds if e["round"] == rounds[0]["round"])
        for rounds in (curves.lines(run.events, "round") for run in runs)
    )
    end_s, reasons = {}, []
    for run in runs:
        try:
            end_s[run.folder] = replay(run.events, cluster(run, PRESET, num_devices)).end_s
        except (ConfigError, DataError) as error:
            reasons.append(f"{run.folder.name}: {error}")
    name = f"{PRESET}, {num_devices} × {DEVICE}"
    return (Clock(name, end_s) if end_s else None), reasons


def on_clusters(run: Run) -> dict[tuple[str, int], Replay]:
    """The run's times on the clusters of `SIZES`, from one host to thousands of devices.

    Raises:
      DataError: If the ledger cannot be replayed.
    """
    return {(name, n): replay(run.events, cluster(run, name, n)) for name, n in SIZES}


@small_letters
def theory_beside(run: Run, constants: theory.Constants | None) -> Drawing:
    """Measured signal, batch growth and communications beside the paper's bounds.

    Args:
      run: Its rounds are drawn.
      constants: From `theory.fit`; None leaves the bounds out.

    Raises:
      DataError: If the ledger lacks a start or a round.
    """
    points = theory.measured(run.events, constants)
    figure = Figure(figsize=(figures.WIDTH, 6.8), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(4, 5, 4))
    for panel, field, label, color, marker, dashes in _CURVES:
        drawn = [(p.num_steps, getattr(p, field)) for p in points if (getattr(p, field) or 0) > 0]
        if drawn:
            style = {"color": color, "marker": marker, "ls": dashes, "lw": 1.3, "ms": 4}
            every = figures.look_every(len(drawn))
            panels[panel].plot(*zip(*drawn, strict=True), markevery=every, label=label, **style)
    panels[-1].set_xlabel("updates of a worker, N")
    for ax, label in zip(panels, _PANELS, strict=True):
        ax.set_ylabel(label)
        ax.set_yscale("log")
        values = [value for line in ax.lines for value in line.get_ydata()]
        if values:
            figures.plain_decades(ax, min(values), max(values))
        else:
            ax.text(0.5, 0.5, "nothing measured", ha="center", transform=ax.transAxes)
            ax.set_yticks([])
        figures.finish(ax)
    figure.align_ylabels()
    figures.legend(figure)
    caption = (
        "The run beside what the AdLoCo paper (arXiv 2508.18182) proves of plain SGD. Top: the"
        " squared norm of the gradient, bounded from above by Lemma 2. Middle: the requested batch"
        " of all workers of a trainer, bounded from below by Theorem 1, and of each worker, by"
        " Lemma 1. Bottom: the paper's count of communications, C(N) = Σ max_batch/b. Measured"
        " values are means over the trainers; all vertical axes are logarithmic."
    )
    if constants is None:
        caption += " There are no bounds, because the run does not determine their constants."
    return Drawing("theory", "Theory beside the run", figure, caption)
