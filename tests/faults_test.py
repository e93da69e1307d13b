"""The short scale of every row of scripts/faults.py; `make faults` runs the long one."""

import os
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import faults  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    seed = int.from_bytes(os.urandom(4))  # other kills every time; the folder names them
    print("seed", seed)
    return faults.Bench(tmp_path_factory.mktemp("faults"), random.Random(seed))


@pytest.mark.parametrize("row", [row for row, (_, short, _) in faults.ROWS.items() if short])
def test_no_trial_of_a_row_fails(bench, row):
    number = faults.ROWS[row][1]
    results = list(faults.trials(bench, row, number, []))
    assert len(results) == number
    assert [what for passed, what in results if not passed] == []


def test_every_crash_point_is_found_in_the_source():
    assert {"save.manifest", "retention.renamed", "ledger.cut_written"} <= set(faults.points())
    assert len(faults.points()) >= 20
