"""Predictions for recorded runs: their time on simulated clusters, and the paper's bounds."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.study import curves, figures, theory
from adloco_jax.study.cluster import PRESETS, Cluster, roofline
from adloco_jax.study.curves import Run
from adloco_jax.study.figures import Clock, Drawing, small_letters
from adloco_jax.study.replay import replay

DEVICE = "a100_80gb"
PRESET = "two_sites"  # the cluster of loss against time: communication matters between sites
PRESET_IN_WORDS = "two sites with a leased line of 10 Gbit/s and 30 ms between them"
# The table of clusters: preset and devices.
SIZES = (
    *(("one_host", 4), ("one_host", 8), ("one_datacenter", 32), ("one_datacenter", 256)),
    *(("two_sites", 32), ("two_sites", 256), ("eight_sites", 256), ("eight_sites", 4096)),
)

# Fields of a start line that the models read; a ledger may be older than one of them.
_NEEDED = (
    *("num_params", "max_batch_size", "config.data.sequence_length"),
    *("config.inner.unit", "config.inner.steps_per_round"),
    *("config.batching.test", "config.batching.eta", "config.batching.nu"),
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
      DataError: If the start line lacks what the simulator and the theory need.
    """
    _check_start(run)
    sequence_length = run.start["config"]["data"]["sequence_length"]
    step_time = roofline(
        DEVICE, num_params=run.start["num_params"], sequence_length=sequence_length
    )
    return PRESETS[preset](num_devices=num_devices, step_time=step_time)


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


def cluster_table(run: Run) -> list[dict] | str:
    """The run's times on clusters from one host to thousands of devices.

    Returns:
      A dict per cluster: preset, devices, sites, wall_s (seconds), and as fractions of all
      device-time utilisation, communication_frac, waiting_frac, idle_frac and lost_frac; or the
      reason why there is none.
    """
    rows = []
    for preset, num_devices in SIZES:
        try:
            place = cluster(run, preset, num_devices)
            times = replay(run.events, place)
        except (ConfigError, DataError) as error:
            return str(error)
        row = {"preset": preset, "devices": num_devices, "sites": place.num_sites}
        row |= {"wall_s": times.wall_s, "utilisation": times.frac("compute_s")}
        parts = ("communication", "waiting", "idle", "lost")
        rows.append(row | {f"{part}_frac": times.frac(f"{part}_s") for part in parts})
    return rows


@dataclass(frozen=True)
class Theory:
    """The theory's figure, with the fitted constants of its bounds or why there are none."""

    drawing: Drawing
    constants: theory.Constants | None
    reason: str


@small_letters
def theory_of(run: Run) -> Theory | str:
    """Measured signal, batch growth and communications beside the paper's bounds.

    Returns:
      The figure and the fitted constants; or the reason why there is nothing to draw.
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
        " squared norm of the gradient, which Lemma 2 bounds from above. Middle: the requested"
        " batch of all workers of a trainer, bounded from below by Theorem 1, and of each worker,"
        " bounded by Lemma 1. Bottom: the paper's count of communications, C(N) = Σ max_batch/b;"
        " its own estimate in Theorem 2 is no bound. Measured values are means over the trainers"
        " alive; all vertical axes are logarithmic, and a mean signal that is not positive is left"
        " out."
    )
    if constants is None:
        caption += " There are no bounds, because the run does not determine their constants."
    return Theory(Drawing("theory", "Theory beside the run", figure, caption), constants, reason)
