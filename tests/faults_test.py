"""The short scale of every row of scripts/faults.py; `make faults` runs the long one."""

import itertools
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


@pytest.mark.parametrize(
    "row, kept, run, new",
    [("K4", 0, 3, 3), ("K4", 2, 1, 1), ("K4", 3, 0, 0), ("K4", 4, 0, 0)]
    + [("K7", 0, 3, 3), ("K7", 2, 3, 1), ("K7", 3, 0, 0)],  # it runs anew from its first
)
def test_no_trial_more_than_asked_for_is_run(monkeypatch, bench, row, kept, run, new):
    started = []

    def endless(bench):
        for number in itertools.count():
            started.append(number)
            yield True, f"number {number}"

    monkeypatch.setitem(faults.ROWS, row, (endless, 0, 0))
    results = [dict(row=row, what=f"kept {number}") for number in range(kept)]
    assert len(list(faults.trials(bench, row, 3, results))) == new
    assert len(started) == run


def test_every_crash_point_is_found_in_the_source():
    assert {"save.manifest", "retention.renamed", "ledger.cut_written"} <= set(faults.points())
    assert len(faults.points()) >= 20
