"""The table of scripts/mutants.py fits the code; `make mutants` judges it."""

import subprocess
import sys
from pathlib import Path


def test_every_mutant_applies_and_its_tests_are_there():
    command = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "mutants.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
