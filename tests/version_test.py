"""Versions: of the package, and the lowest of its dependencies."""

import re
import tomllib
from pathlib import Path

from adloco_jax import __version__

ROOT = Path(__file__).resolve().parents[1]


def test_citation_and_changelog_have_the_packages_version_and_one_date():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (newest, date), *_ = re.findall(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changelog, re.M)
    assert newest == __version__
    assert f"\nversion: {newest}\ndate-released: {date}\n" in citation


def test_every_dependency_has_a_lower_bound_and_make_lowest_installs_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = (ROOT / "constraints" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    assert [line.replace("==", ">=", 1) for line in lowest] == project["dependencies"]
    bounds = {line.partition("==")[0]: line.partition("==")[2] for line in lowest}
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    assert {line.split(">=")[1].split(";")[0] for line in extras if line.startswith("jax[")} == {
        bounds["jax"]
    }
