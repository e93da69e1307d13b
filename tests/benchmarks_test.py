"""Benchmarks of a run: added by task, read defensively, shown in the report."""

import json

import pytest

from adloco_jax.errors import DataError
from adloco_jax.study import benchmarks


def results(value, task="arc"):
    """What lm-evaluation-harness returns, as far as it is kept."""
    return {
        "results": {task: {"name": task, "acc,none": value, "acc_stderr,none": "N/A"}},
        "versions": {task: 1.0},
        "n-shot": {task: 0},
        "n-samples": {task: {"original": 10, "effective": 8}},
        "lm_eval_version": "0.4.13",
        "transformers_version": "5.0",
    }


def test_results_are_added_by_task_and_the_newest_counts(tmp_path):
    assert benchmarks.read(tmp_path) == {}
    for value, task in ((0.25, "arc"), (0.5, "own"), (0.75, "arc")):
        benchmarks.add(tmp_path, results(value, task), limit=8, command="adloco eval r")
    rows = benchmarks.rows(benchmarks.read(tmp_path))
    assert [(row["task"], row["metric"], row["value"]) for row in rows] == [
        ("arc", "acc", "0.7500"),
        ("own", "acc", "0.5000"),
    ]
    assert rows[0]["examples"] == "8 (limited)" and rows[0]["standard error"] == "-"


@pytest.mark.parametrize("content", ["[]", "{}", '{"tasks": {"a": {"metrics": 1}}}', "{"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, content):
    (tmp_path / benchmarks.FILE).write_text(content)
    with pytest.raises(DataError, match="benchmarks.json"):
        benchmarks.read(tmp_path)


def test_a_forged_metric_is_not_shown(tmp_path):
    benchmarks.add(tmp_path, results(0.5), limit=None, command="")
    path = tmp_path / benchmarks.FILE
    content = json.loads(path.read_text())
    content["tasks"]["arc"]["metrics"]["acc,none"] = "<script>"
    path.write_text(json.dumps(content))
    assert benchmarks.rows(benchmarks.read(tmp_path)) == []
