"""Learners with different versions of Python and jax in one run, through a folder.

OTHER_PYTHON is the interpreter of an environment with adloco_jax's dependencies and another jax;
`make slow OTHER=python3.12` makes it.
"""

import json
import os
import subprocess
import sys
import time

import pytest

from probes import runs

OTHER = os.environ.get("OTHER_PYTHON")
SHORT = """
    data.source=text ensemble.num_trainers=1 ensemble.num_workers=2 merge.policy=none num_rounds=3
    batching.test=constant inner.steps_per_round=20 eval.every_rounds=1 log.every_rounds=1
""".split()


@pytest.mark.slow
@pytest.mark.skipif(OTHER is None, reason="OTHER_PYTHON is not set")
def test_learners_of_two_versions_train_the_model_of_a_local_run(tmp_path):
    address = f"file://{tmp_path}/bucket"
    docs = runs.ROOT / "docs" / "*.md"
    short = [f"--config.{option}" for option in (*SHORT, f"data.path={docs}")]
    options = ("kind=bucket", "steps=equal", f"address={address}")
    engine = [f"--config.engine.{option}" for option in options]
    environ = os.environ | {"PYTHONPATH": str(runs.ROOT), "JAX_PLATFORMS": "cpu"}
    environ["ADLOCO_KEY"] = "k" * 32
    commands = {
        "elastic": [sys.executable, "train", "quickstart", *short, *engine],
        "own": [sys.executable, "join", address, "--workdir", tmp_path / "elastic" / "learners"],
        "other": [OTHER, "join", address, "--workdir", tmp_path / "elastic" / "learners"],
        "local": [sys.executable, "train", "quickstart", *short],
    }
    for name in ("elastic", "local"):
        commands[name] += ["--workdir", tmp_path / name]
    processes = {}
    for name, (python, *words) in commands.items():
        command = [*map(str, (python, "-m", "adloco_jax", *words))]
        with open(tmp_path / f"{name}.log", "w") as log:
            processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
    try:
        until_s = time.monotonic() + 600
        while None in (codes := {n: p.poll() for n, p in processes.items()}).values():
            assert time.monotonic() < until_s and not any(codes.values()), codes
            time.sleep(0.2)
        assert not any(codes.values()), codes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    learners = runs.events(tmp_path / "elastic", "learner")
    assert [event["what"] for event in learners] == ["joined"] * 2, learners
    assert len({event["why"] for event in learners}) == 2, "the interpreters have equal versions"
    rounds = runs.events(tmp_path / "elastic", "round")
    assert [line["workers_counted"] for line in rounds] == [2] * 3
    assert runs.audit(tmp_path / "elastic") == []
    losses = {
        name: [e["loss"] for e in runs.events(tmp_path / name, "eval")]
        for name in ("elastic", "local")
    }
    assert losses["elastic"] == pytest.approx(losses["local"], rel=1e-4), json.dumps(losses)
