"""The demonstration, as a newcomer runs it: every mechanism shows in its ledger."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from adloco_jax.run.ledger import read

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_quickstart_shows_growth_accumulation_a_merge_and_a_falling_loss(tmp_path):
    recipe = subprocess.check_output(["make", "-s", "--dry-run", "demo"], cwd=ROOT, text=True)
    command = [sys.executable, *shlex.split(recipe.splitlines()[-1])[1:]]
    command += ["--workdir", str(tmp_path / "run")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    events = read(tmp_path / "run" / "ledger.jsonl")
    rounds = [e for e in events if e["event"] == "round"]
    assert sum(e["next_batch_size"] > e["requested_batch_size"] for e in rounds) >= 2
    accumulated = [e["num_accum_steps"] > 1 for e in rounds]
    assert not accumulated[0] and accumulated[-1]
    assert len([e for e in events if e["event"] == "merge"]) == 1
    compiled = [e["key"] for e in events if e["event"] == "compile"]
    assert len([key for key in compiled if key.startswith("steps ")]) <= 4  # the slow ones
    assert len(compiled) == len(set(compiled)) <= 12

    losses = [e["loss"] for e in events if e["event"] == "eval" and e["trainer"] == "consensus"]
    per_byte = losses[-1] * events[0]["tokens_per_byte"]
    assert per_byte < 2.3  # nats; uniform over 257 is 5.55

    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert summary["num_merges"] == 1
    assert (tmp_path / "run" / "report" / "index.html").stat().st_size > 40_000
    assert "nats per byte" in done.stdout and "merge into" in done.stdout


@pytest.mark.slow
def test_the_recommended_settings_show_a_growing_pool(tmp_path):
    command = [sys.executable, "-m", "adloco_jax.main", "--config", "recommended_quick"]
    done = subprocess.run(
        [*command, "--workdir", str(tmp_path / "run")],
        cwd=tmp_path,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    events = read(tmp_path / "run" / "ledger.jsonl")
    joined = [(e["workers_before"], e["workers_after"]) for e in events if e["event"] == "spawn"]
    assert joined == [(1, 2), (2, 4)]
    losses = [e["loss"] for e in events if e["event"] == "eval" and e["trainer"] == "consensus"]
    assert losses[-1] < 1.8  # nats per byte; the quickstart ends at about 2.05
