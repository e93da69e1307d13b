"""The package, its citation and its changelog have one version."""

import re
from pathlib import Path

from adloco_jax import __version__

ROOT = Path(__file__).resolve().parents[1]


def test_citation_and_changelog_have_the_packages_version_and_one_date():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (newest, date), *_ = re.findall(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changelog, re.M)
    assert newest == __version__
    assert f"\nversion: {newest}\ndate-released: {date}\n" in citation
