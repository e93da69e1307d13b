"""Machines that lack a resource: a run works without it, or exits with 5 and one line."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOWHERE = "/dev/null/nowhere"  # nobody can write there, not even root
COMMAND = [
    *(sys.executable, "-m", "adloco_jax.main", f"--config={ROOT}/probes/faults.py"),
    *("--workdir=run", "--config.num_rounds=1", "--config.ensemble.num_trainers=1"),
]

# A process limits itself and then becomes the command, because JAX warns if its process forks.
LIMITED = """
import json, os, resource, sys
for what, value in json.loads(sys.argv[1]):
    resource.setrlimit(what, (value, value))
os.execv(sys.argv[2], sys.argv[2:])
"""


def train(folder, *, limits=(), environment=None, stdout=subprocess.PIPE):
    """One round of the toy run in a separate process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", LIMITED, json.dumps(limits), *COMMAND],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path} | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )


CONTINUES = {
    "no home": {"HOME": NOWHERE, "XDG_CACHE_HOME": NOWHERE},
    "plain locale": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"},
}


def assert_finished(done, folder):
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (folder / "run" / "report" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("environment", CONTINUES.values(), ids=CONTINUES)
def test_a_run_works_without_what_it_does_not_need(tmp_path, environment):
    assert_finished(train(tmp_path, environment=environment), tmp_path)


@pytest.mark.slow
def test_a_run_out_of_open_files_exits_with_one_line(tmp_path):
    done = train(tmp_path, limits=[(resource.RLIMIT_NOFILE, 12)])
    assert done.returncode == 5 and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("output, code", [("/dev/full", 5), ("closed", 141)])
def test_a_run_whose_output_has_gone_ends_and_goes_on(tmp_path, output, code):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") if output == "closed" else open(output, "w") as stdout:
        done = train(tmp_path, stdout=stdout)
    assert done.returncode == code and len(done.stderr.splitlines()) == (code == 5), done.stderr
    assert_finished(train(tmp_path), tmp_path)
