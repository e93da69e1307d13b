"""The table of scripts/mutants.py fits the code; `make mutants` judges it."""

from pathlib import Path

from mutants import read_table

ROOT = Path(__file__).resolve().parents[1]


def test_every_mutant_applies_and_its_tests_are_there():
    table, faults = read_table(), []
    for mutant in table:
        try:
            path, mutated = mutant.apply(ROOT)
            compile(mutated, path, "exec")
            assert mutated != path.read_text()
        except (LookupError, SyntaxError, AssertionError) as error:
            faults.append(f"{mutant.name}: {error!r}")
    assert faults == []
    assert [m for m in table if not all((ROOT / f).is_file() for f in m.test_files)] == []
    assert all(m.test_files for m in table)
    assert len({m.name for m in table}) == len(table)
