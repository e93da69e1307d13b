"""Read and group the ledgers of runs, and compute curves of losses over costs, such as tokens.

A ledger is the log of a run; its lines, called events here, are dicts with their kind under
`event`. A trainer is a model in training. The consensus is the model that stands for all trainers:
the only one, the best, or their mean; its `eval` line says which, as `source`.

A field of a line is null, read as None, if its number was not finite or not measured. Lines of
other kinds lack it, as may lines of an older version; what is read by `get` may be missing.
"""

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
        # One message for the three: with the numbers, the reader sees which it is.
        given = f"{len(labels)} labels" if labels else "no labels"
        raise ConfigError(f"{len(runs)} runs, {given}: give each run once, and one label for each")
    if not labels:
        common = os.path.commonpath([folder.parent for folder in folders])
        labels = [os.path.relpath(folder, common) for folder in folders]

    groups: dict[str, Variant] = {}  # by their config without the seed, as text
    for run, label in zip(runs, labels, strict=True):
        config = dict(run.start["config"])  # a copy, whose seed can be deleted
        del config["seed"]
        key = json.dumps(config, sort_keys=True)
        if key not in groups:
            groups[key] = Variant(label, [])
        groups[key].runs.append(run)
    names = [variant.label for variant in groups.values()]
    if len(set(names)) < len(names):
        raise ConfigError(f"labels: {names}: runs of one label must differ in their seed alone")
    return [*groups.values()]


def lines(events: Sequence[dict], *names: str) -> list[dict]:
    """Return the lines of a ledger whose event is one of `names`, in order."""
    return [event for event in events if event["event"] in names]


def last(events: Sequence[dict], name: str) -> dict:
    """Return the last line of a ledger whose event is `name`; an empty dict if there is none."""
    found = lines(events, name)
    if not found:
        return {}
    return found[-1]


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
    """Return the held-out losses of a trainer or of the consensus, with the costs until then.

    `trainer` is an id, or "consensus". A point has `round`, `value` (the loss, NaN if not finite),
    sequential steps (`updates`), and what all trainers had spent: `tokens`, `syncs` and `bytes`. To
    this the consensus adds what it costs to gather the trainers for a mean (`gathering`).
    """
    gathered = {}
    if trainer == "consensus":
        gathered = gathering(events)
    updates = serial_updates(events)
    points = []
    for e in lines(events, "eval"):
        if e["trainer"] != trainer:
            continue
        number = e["round"]
        extra = gathered.get(number, {})  # empty: nothing was gathered
        point = {
            "round": number,
            "value": _nan_if_null(e["loss"]),
            "updates": updates.get(number, 0),  # the run may be evaluated before its first round
        }
        for cost in COSTS:
            point[cost] = e[f"{cost}_total"] + extra.get(cost, 0)
        points.append(point)
    return points


def gathering(events: Sequence[dict]) -> dict[int, dict[str, int]]:
    """Return what it costs to gather the trainers for a consensus that is their mean, by round.

    Only evaluated rounds whose consensus is a mean have an entry, with `syncs` and `bytes`: all
    trainers but one send it their parameters. A run that is not evaluated would do so once, at its
    end. So this is no part of the run's totals, and evaluations do not add up.
    """
    evaluations = lines(events, "eval")
    # The number of trainers at each evaluation: each has a line of its own.
    living = Counter(e["round"] for e in evaluations if e["trainer"] != "consensus")
    state_bytes = StateBytes(**last(events, "start")["state_bytes"])  # its fields, by name
    costs = {}
    for e in evaluations:
        if e["trainer"] == "consensus" and e.get("source") == "average":
            senders = living[e["round"]] - 1
            # As for a refused merge, only parameters are sent, without optimizer states.
            costs[e["round"]] = merge_cost(state_bytes, num_absorbed=senders, refused=True)
    return costs


def training_points(events: Sequence[dict], *, trainer: int | None = None) -> list[dict]:
    """Return the training loss after each round, in order, with the costs of the run until then.

    `trainer` is an id; None: the loss is the mean over the trainers of a round. A point has
    `round`, `value` (the loss, NaN if not finite), sequential steps (`updates`), and what all
    trainers had spent: `tokens`, `syncs` and `bytes`.
    """
    spending = lines(events, *SPENDING)
    rounds = [e["round"] for e in spending]
    totals = {}  # of each cost, a list: what was spent until the end of the round with this number
    for cost in COSTS:
        spent = [e.get(cost, 0) for e in spending]  # only `round` lines have tokens
        # What was spent in each round (`bincount` sums by it), and with all rounds before it.
        totals[cost] = np.cumsum(np.bincount(rounds, spent)).astype(int).tolist()
    chosen = by_round([e for e in events if trainer is None or e.get("trainer") == trainer])
    updates = serial_updates(events)
    points = []
    for number, ended in chosen.items():
        loss = statistics.fmean(_nan_if_null(e["train_loss"]) for e in ended)
        point = {"round": number, "value": loss, "updates": updates[number]}
        for cost in COSTS:
            point[cost] = totals[cost][number]
        points.append(point)
    return points


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[np.ndarray]:
    """Compute median and spread of several curves at all of their x that every curve covers.

    Curves are interpolated linearly. The spread is from minimum to maximum, or between quartiles
    from five curves on. The x of a curve need not ascend: a cost that counts gathering the trainers
    may be smaller at a later point. Of points with the same x the last counts.

    Args:
      curves: The x and the y of each curve, of which none is empty.

    Returns:
      x, the lower edge, the median and the upper edge, NaN where a curve is not finite.
    """
    sorted_curves = []  # a dict for each curve: y by x, with x ascending
    for x, y in curves:
        y_by_x = dict(zip(x, y, strict=True))
        sorted_curves.append(dict(sorted(y_by_x.items())))
    # The range of x that every curve covers, and all x in it.
    first = max(min(curve) for curve in sorted_curves)
    end = min(max(curve) for curve in sorted_curves)
    covered = set()
    for curve in sorted_curves:
        covered.update(x for x in curve if first <= x <= end)
    grid = np.array(sorted(covered), float)
    # The y of each curve at all x of the grid.
    values = [np.interp(grid, [*curve.keys()], [*curve.values()]) for curve in sorted_curves]
    lowest = 25 if len(sorted_curves) >= 5 else 0  # percentile
    low, median, high = np.percentile(values, (lowest, 50, 100 - lowest), axis=0)
    return [grid, low, median, high]


def serial_updates(events: Sequence[dict]) -> dict[int, int]:
    """Return the updates made one after another until each round's end, by the round's number.

    Trainers work at once, so that of each round the trainer with the most updates counts.
    """
    updates = {}
    total = 0
    for number, ended in by_round(events).items():
        total += max(e["updates"] for e in ended)
        updates[number] = total
    return updates


def _nan_if_null(value: float | None) -> float:
    """Return a number of the ledger, where null (None) stands for one that was not finite."""
    return math.nan if value is None else value


def seconds_by_use(events: Sequence[dict]) -> dict[str, float]:
    """Return the seconds of a run by what they were used for, all processes together.

    The uses: `start` (of each process until its first round, without compilation), `compile`
    (waiting for compilation before the first round), `rounds`, `stall` (the part of `rounds` in
    which they waited for compilation) and `eval`. Seconds that a line lacks, or that are null
    because they were not measured, count as zero.
    """
    starts = lines(events, "start")
    waited_s = sum(e.get("stall_s", 0.0) for e in starts)
    # Trainers that end a round together state the same seconds, which count once. Otherwise each
    # states the seconds since the previous trainer ended, and these are summed. The set has each
    # round and its seconds once.
    ends = {(e["round"], e["step_s"] or 0.0, e["stall_s"] or 0.0) for e in lines(events, "round")}
    return {
        "start": sum(e.get("start_s", 0.0) for e in starts) - waited_s,
        "compile": waited_s,
        "rounds": sum(step_s for _, step_s, _ in ends),
        "stall": sum(stall_s for *_, stall_s in ends),
        "eval": sum(e.get("eval_s") or 0.0 for e in lines(events, "eval")),
    }
