"""The table of scripts/mutants.py fits the code; `make mutants` judges it."""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from mutants import read_table  # noqa: E402


def test_every_mutant_applies_and_its_tests_are_there():
    table = read_table()
    assert [m for m in table if (ROOT / m.file).read_text().count(m.old) != 1] == []
    assert [m for m in table if not all((ROOT / f).is_file() for f in m.test_files)] == []
    assert all(m.test_files and m.old != m.new for m in table)
    assert len({m.name for m in table}) == len(table)
    assert min(Counter(m.area for m in table).values()) >= 5
