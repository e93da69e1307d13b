"""Results of benchmarks on a run's model: the file `benchmarks.json` in the run's folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adloco_jax.errors import DataError
from adloco_jax.files import Maybe, fault, read_json, replaced_file

FILE = "benchmarks.json"
# Fields of a task's record. `metrics` has the harness's numbers, such as `acc,none`.
_TASK = {"metrics": dict[str, Any], "shots": int, "samples": int, "limit": float | None}
_TASK |= {"versions": dict[str, str], "command": Maybe(str)}


def read(workdir: Path) -> dict[str, dict]:
    """Read the benchmarks of a run's model by the name of the task; none if there is no file.

    Raises:
      DataError: If the file is damaged.
    """
    path = Path(workdir) / FILE
    if not path.exists():
        return {}
    content = read_json(path, DataError)
    kind: Any = {"tasks": dict[str, Any]}
    found = fault(content, kind, FILE)
    for name, task in {} if found else content["tasks"].items():
        found = found or fault(task, _TASK, f"tasks.{name}")
    if found:
        raise DataError(f"{path}: {found}; delete the file, and run adloco eval again")
    return content["tasks"]


def add(workdir: Path, results: Mapping[str, Any], *, limit: float | None, command: str) -> None:
    """Add results of `lm_eval.simple_evaluate` to a run's file, in place of a task's older ones.

    `limit` is the number of examples of each task; None: all.
    """
    tasks = read(workdir)
    harness = {name: str(results[f"{name}_version"]) for name in ("lm_eval", "transformers")}
    for name, metrics in results["results"].items():
        tasks[name] = {
            "metrics": {key: value for key, value in metrics.items() if "," in key},
            "shots": int(results["n-shot"].get(name, 0)),
            "samples": int(results["n-samples"].get(name, {}).get("effective", 0)),
            "limit": limit,
            "versions": harness | {"task": str(results["versions"].get(name, ""))},
            "command": command,
        }
    with replaced_file(Path(workdir) / FILE) as file:
        file.write(json.dumps({"tasks": tasks}, indent=1, default=str).encode())


def rows(tasks: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Make a row for each metric of each task, for the report."""
    found = []
    for name, task in tasks.items():
        for key, value in task["metrics"].items():
            metric, _, kept = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = task["metrics"].get(f"{metric}_stderr,{kept}")
            found.append(
                {
                    "task": name,
                    "metric": metric if kept == "none" else f"{metric} ({kept})",
                    "value": f"{value:.4f}",
                    "standard error": f"{error:.4f}" if isinstance(error, int | float) else "-",
                    "examples": f"{task['samples']:,}{' (limited)' * (task['limit'] is not None)}",
                    "shots": str(task["shots"]),
                }
            )
    return found
