"""The short scale of every row of scripts/faults.py; `make faults` runs the long one."""

import os
import random

import faults
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    # kills differ in each run of the test; the folder records the seed
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    return faults.Bench(tmp_path_factory.mktemp("faults"), random.Random(seed))


@pytest.mark.parametrize("row", [name for name, row in faults.ROWS.items() if row.short])
def test_no_trial_of_a_row_fails(bench, row):
    number = faults.ROWS[row].short
    results = list(faults.trials(bench, row, number, []))
    assert len(results) == number
    assert [result["what"] for result in results if not result["passed"]] == []


@pytest.mark.parametrize("kept, new", [(0, 3), (2, 1), (3, 0), (4, 0)])
def test_no_trial_more_than_asked_for_is_run(monkeypatch, bench, kept, new):
    started = []

    def trial(bench, case):
        started.append(case)
        yield True, f"number {case}"

    monkeypatch.setitem(faults.ROWS, "K4", faults.ROWS["K4"]._replace(trial=trial))
    results = [{"row": "K4", "case": str(number)} for number in range(kept)]
    assert len(list(faults.trials(bench, "K4", 3, results))) == new
    assert started == list(range(kept, kept + new))


def test_every_crash_point_is_found_in_the_source():
    assert {"round.decided", "save.manifest", "retention.renamed"} <= set(faults.points())
    assert len(faults.points()) == 8
