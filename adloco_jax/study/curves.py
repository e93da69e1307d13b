"""Read and group the ledgers of runs; compute curves over costs, and bands over seeds."""

import json
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.loop.adloco import StateBytes, merge_cost
from adloco_jax.run import ledger

# Costs over which a curve is drawn: the key of a point, and the label of the axis.
COSTS = {
    "tokens": "tokens, all trainers",
    "syncs": "communications (blocking, all trainers)",
    "bytes": "bytes moved, all trainers",
}

# Events whose lines have `syncs` and `bytes` of their own.
SPENDING = ("round", "sync", "merge", "refusal", "spawn")


@dataclass(frozen=True)
class RunRecord:
    """The folder of a run, and the lines of its ledger."""

    folder: Path
    events: list[dict]

    @property
    def start(self) -> dict:
        """The last `start` line of the ledger; in a resumed run it has the newest config."""
        return last(self.events, "start")

    @property
    def seed(self) -> int:
        """The seed in the config of the run."""
        return self.start["config"]["seed"]


@dataclass(frozen=True)
class Variant:
    """Runs whose configs differ only in the seed."""

    label: str
    runs: list[RunRecord]


class Band(NamedTuple):
    """Several curves on one grid: median and spread; NaN where a curve is not finite."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Read the ledger in the folder of a run.

    Args:
      folder: The folder of a finished or running run.

    Raises:
      DataError: If the folder has no ledger, a damaged one, or one without a start line.
    """
    path = Path(folder) / "ledger.jsonl"
    run = RunRecord(Path(folder), ledger.read(path))
    if not run.start:
        raise DataError(f"{path}: no start line; let the run begin")
    return run


def variants(runs: Sequence[RunRecord], *, labels: Sequence[str] | None = None) -> list[Variant]:
    """Group runs whose configs differ only in `seed`, in the order of their first runs.

    Args:
      runs: The results of `read_run`.
      labels: A label for each run; a variant has the label of its first run. None: the path of the
        run's folder below the deepest common folder.

    Raises:
      ConfigError: If there are no runs, a run is named twice, the numbers of labels and runs
        differ, or runs with the same label have different configs.
    """
    folders = [run.folder.resolve() for run in runs]
    if not runs or len(set(folders)) < len(folders):
        raise ConfigError("runs: name at least one run's folder, and each only once")
    if labels is not None and len(labels) != len(runs):
        raise ConfigError(f"labels: {len(labels)} for {len(runs)} runs; give one for each run")
    common = os.path.commonpath([folder.parent for folder in folders])
    labels = labels or [os.path.relpath(folder, common) for folder in folders]
    groups: dict[str, Variant] = {}
    for run, label in zip(runs, labels, strict=True):
        config = {k: v for k, v in run.start["config"].items() if k != "seed"}
        group = groups.setdefault(json.dumps(config, sort_keys=True), Variant(label, []))
        group.runs.append(run)
    names = [variant.label for variant in groups.values()]
    if len(set(names)) < len(names):
        raise ConfigError(f"labels: {names}: runs of one label must differ in their seed alone")
    return [*groups.values()]


def lines(events: Sequence[dict], *names: str) -> list[dict]:
    """The lines of a ledger whose event is one of these kinds, in order."""
    return [event for event in events if event["event"] in names]


def last(events: Sequence[dict], name: str) -> dict:
    """The last line of a ledger whose event is of this kind; empty if there is none."""
    return next(reversed(lines(events, name)), {})


def by_trainer(events: Sequence[dict]) -> dict[int, list[dict]]:
    """Group lines of a ledger by trainer id, in ascending order, without the consensus model."""
    trainers = sorted({e["trainer"] for e in events if e["trainer"] != "consensus"})
    return {trainer: [e for e in events if e["trainer"] == trainer] for trainer in trainers}


def by_round(events: Sequence[dict]) -> dict[int, list[dict]]:
    """Group the `round` lines of a ledger by the number of the round, in order."""
    rounds = defaultdict(list)
    for event in lines(events, "round"):
        rounds[event["round"]].append(event)
    return dict(sorted(rounds.items()))


def is_ended(run: RunRecord) -> bool:
    """Whether the last `end` line of a ledger stands: the run was not started again after it."""
    return lines(run.events, "start", "end")[-1]["event"] == "end"


def is_evaluated(run: RunRecord) -> bool:
    """Whether the ledger has a held-out loss of the consensus model."""
    return any(e["trainer"] == "consensus" for e in lines(run.events, "eval"))


def loss_unit(run: RunRecord) -> str:
    """The unit of a run's losses, such as "nats/token"; empty for a plain number."""
    return run.start.get("loss_unit", "nats/example" if is_classifier(run) else "nats/token")


def is_classifier(run: RunRecord) -> bool:
    """Whether the run trains a classifier: losses are per example, and there are accuracies."""
    return any("accuracy" in e for e in lines(run.events, "eval"))


def heldout_points(
    events: Sequence[dict], *, trainer: int | str = "consensus", field: str = "loss"
) -> list[dict]:
    """The evaluations of a trainer: round, value (NaN if not finite), and the costs until then.

    If the consensus model is an average of trainers, the costs include `gathering`, the cost of
    averaging them.

    Args:
      events: The lines of a run's ledger.
      trainer: A trainer's id, or "consensus".
      field: The value: "loss" (nats) or "accuracy" (a fraction).
    """
    gathered = gathering(events) if trainer == "consensus" else {}
    points = []
    for e in lines(events, "eval"):
        if e["trainer"] == trainer:
            extra = gathered.get(e["round"], {})
            costs = {cost: e[f"{cost}_total"] + extra.get(cost, 0) for cost in COSTS}
            points.append({"round": e["round"], "value": _nan(e.get(field)), **costs})
    return points


def gathering(events: Sequence[dict]) -> dict[int, dict[str, int]]:
    """The cost of gathering all trainers for a consensus model that is their average.

    This cost occurs once, when the average is used. The run's totals do not include it.

    Args:
      events: The lines of a run's ledger.

    Returns:
      `syncs` and `bytes`, by the round of the evaluation. Rounds are left out if their consensus
      model is not an average.
    """
    evaluations = lines(events, "eval")
    living = Counter(e["round"] for e in evaluations if e["trainer"] != "consensus")
    state_bytes = StateBytes(**last(events, "start")["state_bytes"])
    return {
        e["round"]: merge_cost(state_bytes, num_absorbed=living[e["round"]] - 1, refused=True)
        for e in evaluations
        if e["trainer"] == "consensus" and e.get("source") == "average"
    }


def training_points(events: Sequence[dict], *, trainer: int | None = None) -> list[dict]:
    """The training losses of a trainer, or their mean over all: by round, with the costs so far."""
    spending = lines(events, *SPENDING)
    rounds = [e["round"] for e in spending]
    costs = [[e.get(cost, 0) for e in spending] for cost in COSTS]
    totals = [np.cumsum(np.bincount(rounds, values)).astype(int).tolist() for values in costs]
    chosen = by_round([e for e in events if trainer is None or e.get("trainer") == trainer])
    return [
        {"round": number, "value": statistics.fmean(_nan(e["train_loss"]) for e in found)}
        | {cost: total[number] for cost, total in zip(COSTS, totals, strict=True)}
        for number, found in chosen.items()
    ]


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Band:
    """Interpolate curves on a common grid, and compute their median and spread.

    The grid has all points of all curves, within the interval that all curves cover. A curve is
    interpolated linearly between its points. If a curve has several values at one x, the last value
    counts. The spread is from minimum to maximum; with five curves or more it is from the first to
    the third quartile.

    Args:
      curves: x and y of each curve. If x decreases (because of `gathering`), points are sorted by
        x. If y is NaN for one curve, the band is NaN there.
    """
    settled = [dict(sorted(dict(zip(x, y, strict=True)).items())) for x, y in curves]
    first, end = max(map(min, settled)), min(map(max, settled))
    grid = np.array(sorted({x for curve in settled for x in curve if first <= x <= end}), float)
    values = [np.interp(grid, [*curve], [*curve.values()]) for curve in settled]
    lowest = 25 if len(settled) >= 5 else 0
    return Band(grid, *np.percentile(values, (lowest, 50, 100 - lowest), axis=0))


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def stalls(events: Sequence[dict]) -> Mapping[int, tuple[float, float]]:
    """For each round: its seconds, and the seconds of them spent waiting for compilation.

    Trainers that end a round together have the same seconds, which count once. Where trainers do
    not wait for one another, a round has the seconds up to the end of each trainer's round.
    """
    seconds = {}
    for number, group in by_round(events).items():
        ends = {(e["step_s"] or 0.0, e["stall_s"] or 0.0) for e in group}
        seconds[number] = (sum(step_s for step_s, _ in ends), sum(stall_s for _, stall_s in ends))
    return seconds
