"""The table of scripts/mutants.py fits the code; `make mutants` judges it."""

from scripts import mutants


def test_every_mutant_applies_and_its_tests_are_there():
    assert mutants.stale(mutants.read_table()) == []
