"""A file with one JSON line for each finished run of a comparison.

A line has all data of a run that tables and figures need, so the folder of the run can be deleted.
The file can be committed, and a comparison continues it.
"""

import contextlib
import hashlib
import json
import math
import operator
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from ml_collections import ConfigDict

from adloco_jax.errors import DataError
from adloco_jax.files import Maybe, fault
from adloco_jax.settings import KNOBS
from adloco_jax.study.curves import lines, training_points

_PATHS = ("data.path", "data.heldout_path")
_NOTED = ("merge", "refusal", "spawn")


class _Point(TypedDict):
    """The costs and the loss of a run at one evaluation, see `compare.curve`."""

    loss: float
    tokens: float
    syncs: float
    bytes: float
    updates: float
    time_s: float
    rounds: float


# The fields of a line and their types, for `files.fault`.
_LINE = {
    **{"variant": str, "seed": int, "config": str, "curve": list[_Point]},
    **{"start": dict.fromkeys(("time", "devices", "jax"), Maybe(str | None))},
}


class Trial(NamedTuple):
    """One run of a comparison: a variant with a seed, its config and its folder."""

    variant: str
    seed: int
    config: ConfigDict
    workdir: Path


def digest(config: ConfigDict) -> str:
    """Hash of a config's differences from the defaults; it identifies a line of a results file.

    Paths are not hashed. The hash does not change when the package gets new knobs.
    """
    values = {key: operator.attrgetter(key)(config) for key in KNOBS.keys() - {*_PATHS}}
    changed = {key: v for key, v in values.items() if v != KNOBS[key].default}
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def key(run: Trial) -> tuple[str, int, str]:
    """What identifies the line of a run in a results file: variant, seed, digest of the config."""
    return run.variant, run.seed, digest(run.config)


def read(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Read the lines of a results file, by `key`; empty if there is no file.

    Raises:
      DataError: If a line cannot be read.
    """
    if not path.exists():
        return {}
    found = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
        if reason := fault(line, _LINE, "line") or ("" if line["curve"] else "line.curve"):
            raise DataError(
                f"{path}:{number}: {reason}; remove the line, and the run is made again"
            )
        found[line["variant"], line["seed"], line["config"]] = line
    return found


def append(
    path: Path,
    run: Trial,
    *,
    changes: Mapping[str, object],
    curve: list[dict[str, float]],
    events: list[dict],
) -> None:
    """Add the line of a finished run to the results file.

    The line also has `train_loss`, the mean of the last round's trainers and updates (nats/token;
    null where it is not finite).

    Args:
      path: The results file; the file and its folder are created if missing.
      run: The run.
      changes: The keys in which the variant differs from the comparison's base.
      curve: Costs and held-out loss at each evaluation, see `compare.curve`.
      events: The lines of the run's ledger.
    """
    start, end = lines(events, "start")[-1], lines(events, "end")[-1]
    train_loss = training_points(events)[-1]["value"]
    line = dict(zip(("variant", "seed", "config"), key(run), strict=True)) | {
        "changes": dict(changes),
        "wall_s": end["wall_s"],
        "start": {name: start.get(name) for name in ("time", "devices", "jax", "num_params")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "train_loss": round(train_loss, 5) if math.isfinite(train_loss) else None,
        "curve": [{name: round(value, 5) for name, value in point.items()} for point in curve],
        "events": [
            {name: value for name, value in event.items() if not name.endswith("_s")}
            for event in events
            if event["event"] in _NOTED
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
