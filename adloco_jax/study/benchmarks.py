"""Scores of lm-evaluation-harness on a run's model, in files that it wrote to the run's folder."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from adloco_jax.data.formats import Format, checked, read_json
from adloco_jax.errors import DataError

FILES = "benchmarks_*.json"  # of `lm_eval --output_path RUN/benchmarks.json`, with their dates


class _Results(Format):
    """What is read of a file, by task; the metrics have names such as `acc,none`."""

    metrics: dict[str, dict[str, Any]] = Field(alias="results")


class Score(NamedTuple):
    """A metric of a task, such as 0.25 for `acc`."""

    task: str
    metric: str
    value: float
    error: float | None  # standard error


def read(workdir: Path) -> list[Score]:
    """Read the newest scores of each task; none if the folder has no such file.

    Raises:
      DataError: If a file is damaged.
    """
    tasks: dict[str, list[Score]] = {}
    for path in sorted(Path(workdir).glob(FILES)):
        where = f"{path}: no results of lm_eval, delete it: file"
        found = checked(read_json(path, DataError), _Results, where, DataError)
        for task, metrics in found.metrics.items():
            tasks[task] = _scores(task, metrics)
    return [score for scores in tasks.values() for score in scores]


def _scores(task: str, metrics: dict[str, Any]) -> list[Score]:
    numbers = {k: v for k, v in metrics.items() if "," in k and type(v) in (int, float)}
    scores = []
    for key, value in numbers.items():
        metric, _, kept = key.partition(",")
        if not metric.endswith("_stderr"):
            error = numbers.get(f"{metric}_stderr,{kept}")
            name = metric if kept == "none" else f"{metric} ({kept})"
            scores.append(Score(task, name, value, error))
    return scores
