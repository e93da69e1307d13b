"""The demonstration: the ledger shows every mechanism."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from adloco_jax.run.kept.ledger import read

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_quickstart_shows_growth_accumulation_a_merge_and_a_falling_loss(tmp_path):
    recipe = subprocess.check_output(["make", "-s", "--dry-run", "demo"], cwd=ROOT, text=True)
    words = shlex.split(recipe.splitlines()[-1])[1:]
    command = [sys.executable, *words, "--workdir", str(tmp_path / "run")]
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    how = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, **how)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    events = read(tmp_path / "run" / "ledger.jsonl")
    losses = [e["loss"] for e in events if e["event"] == "eval" and e["trainer"] == "consensus"]
    rounds = [e for e in events if e["event"] == "round"]
    assert sum(e["next_batch_size"] > e["requested_batch_size"] for e in rounds) >= 2
    accumulated = [e["num_accum_steps"] > 1 for e in rounds]
    assert not accumulated[0] and accumulated[-1]
    assert len([e for e in events if e["event"] == "merge"]) == 1
    compiled = [e["key"] for e in events if e["event"] == "compile"]
    # the programs that compile slowly
    assert len([key for key in compiled if key.startswith("steps ")]) <= 4
    assert len(compiled) == len(set(compiled)) <= 12

    per_byte = losses[-1] * events[0]["tokens_per_byte"]
    assert per_byte < 2.3  # nats; a uniform guess over 257 ids gives 5.55

    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert summary["num_merges"] == 1
    assert (tmp_path / "run" / "report" / "index.html").stat().st_size > 40_000
    assert "nats per byte" in done.stdout and "merge into" in done.stdout
