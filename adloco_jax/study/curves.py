"""What reports draw, as numbers: runs read and grouped into variants, curves, bands."""

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adloco_jax.adloco import StateBytes, merge_cost
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.run import ledger

# What a curve is drawn over: the key of a point, and the axis' label.
COSTS = {
    "tokens": "tokens, all trainers",
    "syncs": "communications (blocking, all trainers)",
    "bytes": "bytes moved, all trainers",
}

SPENDING = ("round", "sync", "merge", "refusal")  # lines with `syncs` and `bytes` of their own

_NUMBER = (int, float, type(None))
_MERGE: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("round", "into", "syncs", "bytes"), int),
    **dict.fromkeys(("members", "weights", "loss_before"), list),
    **dict.fromkeys(("loss_after", "barrier"), _NUMBER),
}
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "round": {
        **dict.fromkeys(("round", "trainer", "workers", "requested_batch_size"), int),
        **dict.fromkeys(("micro_batch_size", "num_accum_steps", "next_batch_size"), int),
        **dict.fromkeys(("updates", "tokens", "syncs", "bytes"), int),
        **dict.fromkeys(("train_loss", "noise", "signal", "test_value"), _NUMBER),
        **dict.fromkeys(("step_s", "stall_s"), _NUMBER),
    },
    "eval": {
        **dict.fromkeys(("round", "tokens_total", "syncs_total", "bytes_total"), int),
        "trainer": (int, str),
        "loss": _NUMBER,
    },
    "sync": {**dict.fromkeys(("round", "syncs", "bytes"), int), "trainers": list},
    "merge": _MERGE,
    "refusal": _MERGE,
    "compile": {"key": str, "seconds": (int, float), "cache": str, "where": str},
    "memory": {"round": int, "host_peak_bytes": int, "device_peak_bytes": list},
}


@dataclass(frozen=True)
class Run:
    """One run's folder and its ledger."""

    folder: Path
    events: list[dict]

    @property
    def start(self) -> dict:
        """The last start line, which a resumed run goes by; empty where there is none."""
        return next(reversed(lines(self.events, "start")), {})

    @property
    def seed(self) -> int | None:
        """The config's seed, where the ledger tells it."""
        return self.start.get("config", {}).get("seed")


@dataclass(frozen=True)
class Variant:
    """Runs whose configs differ in the seed alone."""

    label: str
    runs: list[Run]


@dataclass(frozen=True)
class Band:
    """Several curves on one grid: their median and spread, NaN where one of them is not finite."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads a run's ledger, and checks that what reports show of it is there.

    Args:
      folder: The run's folder, of a finished run or of one that still goes on.

    Raises:
      DataError: If the folder holds no ledger, or a damaged one.
    """
    path = Path(folder) / "ledger.jsonl"
    events = ledger.read(path)
    for event in events:
        for name, kinds in _FIELDS.get(event["event"], {}).items():
            if not isinstance(event.get(name, "absent"), kinds):
                raise DataError(
                    f"{path}: a {event['event']} line has {name} = {event.get(name, 'absent')!r};"
                    " restore the file from a copy, or run it again if it is an older version's"
                )
    return Run(Path(folder), events)


def variants(runs: Sequence[Run], *, labels: Sequence[str] | None = None) -> list[Variant]:
    """Groups runs whose configs differ in `seed` alone, in the order of their first runs.

    (And in the run that is replayed, of those that replay one.)

    Args:
      runs: As `read_run` gives them. A run without a start line is a variant of its own.
      labels: One per run; a variant takes its first run's. By default the name of its first
        run's folder, or of the folder that holds all its runs and no others, with as much of the
        path before it as tells variants apart.

    Raises:
      ConfigError: If there are no runs, one is named twice, the number of labels is not that of
        the runs, or runs of one label have different configs.
    """
    folders = [run.folder.resolve() for run in runs]
    if not runs or len(set(folders)) < len(folders):
        raise ConfigError("runs: name at least one run's folder, and each only once")
    if labels is not None and len(labels) != len(runs):
        raise ConfigError(f"labels: {len(labels)} for {len(runs)} runs; give one for each run")
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        config = {k: v for k, v in run.start.get("config", {}).items() if k != "seed"}
        if config.get("batching", {}).get("replay"):  # which run that is follows from the seed
            config["batching"] = config["batching"] | {"replay": "a run"}
        key = json.dumps(config, sort_keys=True) if config else str(folders[index])
        groups.setdefault(key, []).append(index)
    if labels is not None:
        names = [labels[members[0]] for members in groups.values()]
    else:
        names = _short([[folders[i] for i in members] for members in groups.values()])
    if len(set(names)) < len(names):
        raise ConfigError(f"labels: {names}: runs of one label must differ in their seed alone")
    return [
        Variant(name, [runs[i] for i in members])
        for name, members in zip(names, groups.values(), strict=True)
    ]


def _short(folders_by_variant: list[list[Path]]) -> list[str]:
    """A path for each variant, cut to as many of its last parts as make it differ.

    It is the folder that holds a variant's runs and no others, or else its first run's own.
    """
    paths = []
    for own in folders_by_variant:
        common = Path(os.path.commonpath(own))
        others = [f for folders in folders_by_variant if folders is not own for f in folders]
        is_theirs_alone = others and not any(f.is_relative_to(common) for f in others)
        paths.append(common if is_theirs_alone else own[0])
    names = [path.name for path in paths]
    depth = 1
    while len(set(names)) < len(names):
        depth += 1
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def lines(events: Sequence[dict], name: str) -> list[dict]:
    """The events of one kind, in order."""
    return [event for event in events if event["event"] == name]


def by_trainer(own: Sequence[dict]) -> dict[int, list[dict]]:
    """Lines by the trainer's id, ids ascending; lines on the consensus are left out."""
    trainers = sorted({e["trainer"] for e in own if e["trainer"] != "consensus"})
    return {trainer: [e for e in own if e["trainer"] == trainer] for trainer in trainers}


def is_evaluated(run: Run) -> bool:
    """Whether the held-out loss of the consensus is on record."""
    return any(e["trainer"] == "consensus" for e in lines(run.events, "eval"))


def is_classifier(run: Run) -> bool:
    """Whether losses are per example, not per token, and accuracies are on record."""
    return any("accuracy" in e for e in lines(run.events, "eval"))


def heldout_points(
    events: Sequence[dict], *, trainer: int | str = "consensus", field: str = "loss"
) -> list[dict]:
    """The evaluations of one trainer: round, value (NaN if not finite), and the costs by then.

    Where the consensus is an average of trainers, what brings them together (`gathering`) is in its
    costs.

    Args:
      events: A ledger's lines.
      trainer: A trainer's id, or "consensus".
      field: What was measured: "loss" (nats) or "accuracy" (a fraction).
    """
    gathered = gathering(events) if trainer == "consensus" else {}
    return [
        {
            "round": e["round"],
            "value": _nan(e.get(field)),
            **{
                cost: e[f"{cost}_total"] + gathered.get(e["round"], {}).get(cost, 0)
                for cost in COSTS
            },
        }
        for e in lines(events, "eval")
        if e["trainer"] == trainer
    ]


def gathering(events: Sequence[dict]) -> dict[int, dict[str, int]]:
    """What it takes to bring trainers together for a consensus that is their average.

    A run could use that average only afterwards; its own totals, which go on without, leave it out.

    Args:
      events: A ledger's lines.

    Returns:
      `syncs` and `bytes` by the evaluation's round; rounds without such an average are left out.

    Raises:
      DataError: As `state_bytes`.
    """
    alive: Counter[int] = Counter()  # trainers by round, at its end
    for event in events:
        if event["event"] == "round":
            alive[event["round"]] += 1
        elif event["event"] == "merge" or event.get("action") == "retire":
            alive[event["round"]] -= len(event["members"]) - 1
        elif event.get("kind") == "quarantine":
            alive[event["round"]] -= 1
    return {
        e["round"]: merge_cost(
            state_bytes(events), num_absorbed=max(alive[e["round"]] - 1, 0), refused=True
        )
        for e in lines(events, "eval")
        if e["trainer"] == "consensus" and e.get("source") == "average"
    }


def state_bytes(events: Sequence[dict]) -> StateBytes:
    """What trainers and workers of a run send one another, as its first start line says.

    Raises:
      DataError: If no start line says it, as in the ledger of an older version.
    """
    found = next(iter(lines(events, "start")), {}).get("state_bytes")
    fields = StateBytes._fields
    if not isinstance(found, dict) or not all(type(found.get(name)) is int for name in fields):
        raise DataError(
            f"the start line has state_bytes = {found!r}, where {', '.join(fields)} were expected;"
            " restore the ledger from a copy, or run it again, if it is an older version's"
        )
    return StateBytes(**{name: found[name] for name in fields})


def training_points(events: Sequence[dict], *, trainer: int | None = None) -> list[dict]:
    """Training loss by round, of a trainer or averaged over all, and the costs by then."""
    rounds = lines(events, "round")
    totals = {cost: cumulative(spending(events), cost) for cost in COSTS}
    losses: dict[int, list[float]] = {}
    for e in rounds:
        if trainer in (None, e["trainer"]):
            losses.setdefault(e["round"], []).append(_nan(e["train_loss"]))
    return [
        {
            "round": number,
            "value": sum(own) / len(own),
            **{cost: total[number] for cost, total in totals.items()},
        }
        for number, own in sorted(losses.items())
    ]


def spending(events: Sequence[dict]) -> list[dict]:
    """The lines whose costs add up to a run's totals; a refused merge has moved bytes too."""
    return [e for e in events if e["event"] in SPENDING]


def cumulative(own: Sequence[dict], field: str) -> dict[int, int]:
    """The field summed over trainers and over rounds up to each round on record."""
    spent: Counter[int] = Counter()
    for e in own:
        spent[e["round"]] += e.get(field, 0)
    numbers = sorted(spent)
    return dict(zip(numbers, itertools.accumulate(spent[n] for n in numbers), strict=True))


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Band:
    """Puts curves on one grid, and takes the median and the spread over them.

    The grid has every point of every curve, within the stretch that all of them cover. Between
    its points a curve is a straight line; where it moves straight up or down, its last value
    counts. The spread is from minimum to maximum, from five curves on from the first to the
    third quartile.

    Args:
      curves: x and y of each, points in the order of x if that goes back (`gathering`); y may be
        NaN, and then so is the band around it.
    """
    settled = []
    for x, y in curves:
        last = dict(sorted(dict(zip(x, y, strict=True)).items()))
        settled.append((np.array([*last], float), np.array([*last.values()], float)))
    first, end = max(x[0] for x, _ in settled), min(x[-1] for x, _ in settled)
    grid = np.unique(np.concatenate([x for x, _ in settled]))
    grid = grid[(grid >= first) & (grid <= end)]
    values = np.array([_interpolate(grid, x, y) for x, y in settled])
    spread = (25, 75) if len(settled) >= 5 else (0, 100)
    low, median, high = np.percentile(values, (spread[0], 50, spread[1]), axis=0)
    return Band(grid, low, median, high)


def _interpolate(grid: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Linear, and NaN from one finite neighbour to the next across a point that is not finite."""
    is_bad = np.isnan(y)
    values = np.interp(grid, x, np.where(is_bad, 0.0, y))
    return np.where(np.interp(grid, x, is_bad.astype(float)) > 0, np.nan, values)


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def stalls(events: Sequence[dict]) -> Mapping[int, tuple[float, float]]:
    """Seconds of each round on record: the whole round, and of it waiting for compilation."""
    return {e["round"]: (e["step_s"] or 0.0, e["stall_s"] or 0.0) for e in lines(events, "round")}
