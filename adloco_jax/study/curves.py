"""Read and group the ledgers of runs, and compute curves of losses over costs, such as tokens."""

import itertools
import json
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.loop.adloco import StateBytes, merge_cost
from adloco_jax.run.kept import ledger

# Costs at a point of a curve that are summed over all trainers.
COSTS = ("tokens", "syncs", "bytes")

# Events whose lines have `syncs` and `bytes` of their own.
SPENDING = ("round", "sync", "merge", "refusal", "spawn")


@dataclass(frozen=True)
class RunRecord:
    """A run: its folder, and the lines of its ledger."""

    folder: Path
    events: list[dict]

    @property
    def start(self) -> dict:
        """The last `start` line, which has the newest config; a resumed run has several."""
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


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Read the ledger in the folder of a finished or running run.

    Raises:
      DataError: If the ledger is missing, damaged, or has no `start` line.
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
      labels: A label for each run, of which the first of a variant counts. None: paths, from the
        deepest folder that contains all runs.

    Raises:
      ConfigError: If there are no runs, a run is named twice, labels are too few or too many, or
        runs with the same label have different configs.
    """
    folders = [run.folder.resolve() for run in runs]
    are_twice = len(set(folders)) < len(folders)
    if not runs or are_twice or (labels and len(labels) != len(runs)):
        given = f"{len(labels)} labels" if labels else "no labels"
        raise ConfigError(f"{len(runs)} runs, {given}: give each run once, and one label for each")
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
    """Group lines of a ledger by trainer, ascending, without those on the consensus model."""
    trainers = sorted({e["trainer"] for e in events if e["trainer"] != "consensus"})
    return {trainer: [e for e in events if e["trainer"] == trainer] for trainer in trainers}


def by_round(events: Sequence[dict]) -> dict[int, list[dict]]:
    """Group the `round` lines of a ledger by the number of the round, ascending."""
    rounds = defaultdict(list)
    for event in lines(events, "round"):
        rounds[event["round"]].append(event)
    return dict(sorted(rounds.items()))


def is_evaluated(run: RunRecord) -> bool:
    """Whether the ledger has a held-out loss of the consensus model."""
    return any(e["trainer"] == "consensus" for e in lines(run.events, "eval"))


def heldout_points(events: Sequence[dict], *, trainer: int | str = "consensus") -> list[dict]:
    """The evaluations of a trainer or of the consensus model, in order, with the costs until then.

    A point has `round`, `value` (the loss, NaN if not finite), sequential steps (`updates`), and
    what all trainers had spent: `tokens`, `syncs` and `bytes`, with `gathering`.
    """
    gathered = gathering(events) if trainer == "consensus" else {}
    updates = serial_updates(events)
    points = []
    for e in lines(events, "eval"):
        if e["trainer"] == trainer:
            extra = gathered.get(e["round"], {})
            costs = {cost: e[f"{cost}_total"] + extra.get(cost, 0) for cost in COSTS}
            point = {"round": e["round"], "value": _nan(e["loss"])}
            points.append(point | {"updates": updates.get(e["round"], 0)} | costs)
    return points


def gathering(events: Sequence[dict]) -> dict[int, dict[str, int]]:
    """The cost, by evaluated round, of gathering the trainers for a consensus that is their mean.

    It would occur only once, for the mean that is used in the end. So the run's totals lack it, and
    that of one evaluation (`syncs`, `bytes`) is not added to the next.
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
    """The training loss after each round, in order, with the costs of the run until then.

    `trainer` None: the mean over the trainers of a round. Points are like `heldout_points`.
    """
    spending = lines(events, *SPENDING)
    rounds = [e["round"] for e in spending]
    totals = {}  # of each cost, by number of the round
    for cost in COSTS:
        spent = [e.get(cost, 0) for e in spending]
        totals[cost] = np.cumsum(np.bincount(rounds, spent)).astype(int).tolist()
    chosen = by_round([e for e in events if trainer is None or e.get("trainer") == trainer])
    updates = serial_updates(events)
    points = []
    for number, ended in chosen.items():
        loss = statistics.fmean(_nan(e["train_loss"]) for e in ended)
        point = {"round": number, "value": loss, "updates": updates[number]}
        for cost in COSTS:
            point[cost] = totals[cost][number]
        points.append(point)
    return points


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[np.ndarray]:
    """Compute median and spread of several curves at all of their x that every curve covers.

    Returns:
      x, the lower edge, the median and the upper edge, NaN where a curve is not finite.

    Curves are interpolated linearly. The spread is from minimum to maximum, or between quartiles
    from five curves on. Of points with the same x the last counts: with `gathering`, costs may
    decrease, so points are sorted by x.
    """
    settled = []  # y by x, ascending
    for x, y in curves:
        y_by_x = dict(zip(x, y, strict=True))
        settled.append(dict(sorted(y_by_x.items())))
    first, end = max(map(min, settled)), min(map(max, settled))
    grid = np.array(sorted({x for curve in settled for x in curve if first <= x <= end}), float)
    values = [np.interp(grid, [*curve], [*curve.values()]) for curve in settled]
    lowest = 25 if len(settled) >= 5 else 0  # percentile
    return [grid, *np.percentile(values, (lowest, 50, 100 - lowest), axis=0)]


def serial_updates(events: Sequence[dict]) -> dict[int, int]:
    """Updates that were made one after another until each round's end; trainers work at once."""
    rounds = by_round(events)
    longest = (max(e["updates"] for e in found) for found in rounds.values())
    return dict(zip(rounds, itertools.accumulate(longest), strict=True))


def _nan(value: float | None) -> float:
    """Return a number of the ledger, where null stands for one that was not finite."""
    return math.nan if value is None else value


def seconds_by_use(events: Sequence[dict]) -> dict[str, float]:
    """Seconds of a run by what they were used for, all processes together.

    The names: start (without compilation), compile (before the first round of each process),
    rounds (with their compilation, stall) and eval.
    """
    starts = lines(events, "start")
    waited_s = sum(e.get("stall_s", 0.0) for e in starts)
    # Trainers that end a round together state the same seconds, which count once. Otherwise each
    # states the seconds since the previous trainer ended, and these are summed.
    ends = {(e["round"], e["step_s"] or 0.0, e["stall_s"] or 0.0) for e in lines(events, "round")}
    return {
        "start": sum(e.get("start_s", 0.0) for e in starts) - waited_s,
        "compile": waited_s,
        "rounds": sum(step_s for _, step_s, _ in ends),
        "stall": sum(stall_s for *_, stall_s in ends),
        "eval": sum(e.get("eval_s") or 0.0 for e in lines(events, "eval")),
    }
