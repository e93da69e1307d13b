"""A record of a comparison: a line of JSON for each finished run, with all that tables need.

The run's folder can then be deleted, and the file committed. Runs with a line are not made again.
"""

import hashlib
import json
import operator
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from adloco_jax.settings import OPTIONS, default_of
from adloco_jax.study.curves import last
from studies.compare import Trial

_PATHS = ("data.path", "data.heldout_path")
_RECORDED_DEFAULTS = {"ensemble.num_workers": 4}  # of the records, where the package has others now


def digest(config: ConfigDict) -> str:
    """Hash of the keys in which a config differs from the defaults, without paths of data.

    So new options of the package do not change it; nor do new defaults (`_RECORDED_DEFAULTS`).
    """
    values = {key: operator.attrgetter(key)(config) for key in OPTIONS.keys() - {*_PATHS}}
    if config.data.path:
        values["data.source"] = "tokens"  # the source of prepared rows, by which records are named
    changed = {}
    for key, value in values.items():
        if value not in (default_of(key), _RECORDED_DEFAULTS.get(key, default_of(key))):
            changed[key] = value
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def key(run: Trial) -> tuple[str, int, str]:
    """The key of a run in a record: its variant, its seed, and the digest of its config."""
    return run.variant, run.seed, digest(run.config)


def read(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Read a record, if there is one: its lines by `key`."""
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(line["variant"], line["seed"], line["config"]): line for line in lines}


def append(
    path: Path,
    run: Trial,
    *,
    changes: Mapping[str, object],
    curve: list[dict[str, float]],
    events: list[dict],
) -> None:
    """Add the line of a finished run to the record, which is created if missing.

    `changes` are the variant's keys, and `curve` the result of `compare.curve`.
    """
    start = last(events, "start")
    line = dict(zip(("variant", "seed", "config"), key(run), strict=True)) | {
        "changes": dict(changes),
        "wall_s": last(events, "end")["wall_s"],
        "start": {name: start.get(name) for name in ("time", "devices", "jax", "num_params")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "curve": [{name: round(value, 5) for name, value in point.items()} for point in curve],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
