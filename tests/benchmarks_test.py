"""Scores of lm-evaluation-harness: the newest of each task, shown as they are or refused."""

import json

import pytest

from adloco_jax.errors import DataError
from adloco_jax.study import benchmarks


def write(folder, day, value, task="arc", **more):
    """What lm-evaluation-harness writes, as far as it is read."""
    metrics = {"name": task, "alias": task, "acc,none": value, "acc_stderr,none": "N/A"} | more
    content = {"results": {task: metrics}, "versions": {task: 1.0}, "n-shot": {task: 3}}
    content["n-samples"] = {task: {"original": 1000, "effective": 8}}
    (folder / f"benchmarks_2026-01-0{day}T00.json").write_text(json.dumps(content))


def test_the_newest_scores_of_each_task_are_read(tmp_path):
    assert benchmarks.read(tmp_path) == []
    write(tmp_path, 3, 0.75, **{"em,strict": 1, "em_stderr,strict": 0.5})
    write(tmp_path, 1, 0.25)
    write(tmp_path, 2, 0.5, "own")
    assert benchmarks.read(tmp_path) == [
        ("arc", "acc", 0.75, None),
        ("arc", "em (strict)", 1, 0.5),
        ("own", "acc", 0.5, None),
    ]


def test_a_forged_metric_is_not_shown(tmp_path):
    write(tmp_path, 1, "<script>")
    assert benchmarks.read(tmp_path) == []


def test_another_file_is_named_with_what_to_do(tmp_path):
    (tmp_path / "benchmarks_1.json").write_text('{"results": 1}')
    fault = r"benchmarks_1\.json: no results of lm_eval, delete it: file\.results: "
    with pytest.raises(DataError, match=fault):
        benchmarks.read(tmp_path)
