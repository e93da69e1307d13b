"""Read and group the ledgers (logs) of runs, and compute curves of losses over costs.

A cost is what a run has spent so far, such as tokens or bytes. A band shows the curves of several
seeds as their median and their range.
"""

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
    """A run: its folder, and the lines of its ledger."""

    folder: Path
    events: list[dict]

    @property
    def start(self) -> dict:
        """The last `start` line of the ledger, which has the newest config.

        A ledger has several `start` lines if the run was resumed.
        """
        return last(self.events, "start")

    @property
    def seed(self) -> int:
        """The seed in the run's config."""
        return self.start["config"]["seed"]


@dataclass(frozen=True)
class Variant:
    """A variant: runs whose configs differ only in the seed, with a common label."""

    label: str
    runs: list[RunRecord]


class Band(NamedTuple):
    """A band around several curves: their median and the edges of their spread, at common x.

    The values are NaN where a curve is not finite.
    """

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Read the ledger in the folder of a run.

    Args:
      folder: The folder of a finished or running run.

    Returns:
      The folder, and the lines of the ledger.

    Raises:
      DataError: If the folder has no ledger, or if its ledger is damaged or has no `start` line.
    """
    path = Path(folder) / "ledger.jsonl"
    run = RunRecord(Path(folder), ledger.read(path))
    if not run.start:
        raise DataError(f"{path}: no start line; let the run begin")
    return run


def variants(runs: Sequence[RunRecord], *, labels: Sequence[str] | None = None) -> list[Variant]:
    """Group runs into variants. The runs of a variant have configs that differ only in `seed`.

    Args:
      runs: The results of `read_run`.
      labels: A label for each run. A variant has the label of its first run. If None, a run's label
        is the path of its folder, from the deepest folder that contains the folders of all runs.

    Returns:
      The variants, in the order of their first runs.

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
    """The lines of a ledger whose event is one of `names`, in order."""
    return [event for event in events if event["event"] in names]


def last(events: Sequence[dict], name: str) -> dict:
    """The last line of a ledger whose event is `name`; an empty dictionary if there is none."""
    return next(reversed(lines(events, name)), {})


def by_trainer(events: Sequence[dict]) -> dict[int, list[dict]]:
    """Group lines of a ledger by the trainer's id, with ids in ascending order.

    Lines on the consensus model, which stands for all trainers, are left out.
    """
    trainers = sorted({e["trainer"] for e in events if e["trainer"] != "consensus"})
    return {trainer: [e for e in events if e["trainer"] == trainer] for trainer in trainers}


def by_round(events: Sequence[dict]) -> dict[int, list[dict]]:
    """Group the `round` lines of a ledger by the number of the round, in ascending order."""
    rounds = defaultdict(list)
    for event in lines(events, "round"):
        rounds[event["round"]].append(event)
    return dict(sorted(rounds.items()))


def is_ended(run: RunRecord) -> bool:
    """Whether the run has ended, and has not been started again since."""
    return lines(run.events, "start", "end")[-1]["event"] == "end"


def is_evaluated(run: RunRecord) -> bool:
    """Whether the ledger has a held-out loss of the consensus model."""
    return any(e["trainer"] == "consensus" for e in lines(run.events, "eval"))


def loss_unit(run: RunRecord) -> str:
    """The unit of a run's losses, such as "nats/token"; an empty text if they have no unit."""
    return run.start.get("loss_unit", "nats/example" if is_classifier(run) else "nats/token")


def is_classifier(run: RunRecord) -> bool:
    """Whether the run trains a classifier: its evaluations then have accuracies."""
    return any("accuracy" in e for e in lines(run.events, "eval"))


def heldout_points(
    events: Sequence[dict], *, trainer: int | str = "consensus", field: str = "loss"
) -> list[dict]:
    """The evaluations of a trainer or of the consensus model, with the costs of the run until then.

    If the consensus model is an average of the trainers, its costs include the cost of averaging
    them (see `gathering`).

    Args:
      events: The lines of a run's ledger.
      trainer: A trainer's id, or "consensus".
      field: The value that is wanted: "loss" (nats) or "accuracy" (a fraction).

    Returns:
      A dictionary for each evaluation, in order: `round`, `value` (NaN if not finite), and what all
      trainers had spent: `tokens`, `syncs` (communications) and `bytes`.
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

    This cost would occur only once, for the average that is used in the end. So the run's totals do
    not include it, and the cost at one evaluation is not added to the next.

    Args:
      events: The lines of a run's ledger.

    Returns:
      By the number of the evaluated round: `syncs` (communications) and `bytes`. A round is left
      out if its consensus model is not an average.
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
    """The training loss after each round, with the costs of the run until then.

    Args:
      events: The lines of a run's ledger.
      trainer: A trainer's id. None: the mean loss over the trainers of a round.

    Returns:
      A dictionary for each round, in order: `round`, `value` (NaN if not finite), and what all
      trainers had spent: `tokens`, `syncs` (communications) and `bytes`.
    """
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
    """Compute the median and the spread of several curves over common values of x.

    The common values are the x of all points of all curves, within the interval that every curve
    covers. Each curve is interpolated linearly between its points. The spread reaches from the
    minimum to the maximum; with five curves or more it reaches from the first to the third
    quartile.

    Args:
      curves: x and y of each curve. Points are sorted by x, because costs that include `gathering`
        may decrease from one point to the next. If a curve has several points with the same x, the
        last of them counts. If y is NaN for one curve, the band is NaN there.
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
    """For each round, its seconds, and how many of them were spent waiting for compilation.

    If trainers end a round together, their ledger lines state the same seconds, which count once.
    If trainers do not wait for one another, each line states the seconds since the previous trainer
    ended, and the seconds of a round are the sum over its lines.
    """
    seconds = {}
    for number, group in by_round(events).items():
        ends = {(e["step_s"] or 0.0, e["stall_s"] or 0.0) for e in group}
        seconds[number] = (sum(step_s for step_s, _ in ends), sum(stall_s for _, stall_s in ends))
    return seconds
