"""The demonstration that kills a site: its drawing, and the whole of it."""

import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "two_sites.py"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_drawing_shows_every_line_in_light_and_dark_without_the_folder_of_this_machine():
    svg = runpy.run_path(str(EXAMPLE))["svg"]
    drawn = svg([(0.0, "bucket: /home/me/runs/two"), (12.0, "a < b & c")], "/home/me/runs")
    root = ET.fromstring(drawn)
    assert [line.text for line in root.iter(f"{SVG}text")] == ["bucket: runs/two", "a < b & c"]
    at_first, later = root.iter(f"{SVG}text")
    assert "class" not in at_first.attrib and "style" not in at_first.attrib  # in the first frame
    assert later.attrib["style"] == "animation-delay:2.00s" and later.attrib["class"] == "later"
    assert "prefers-color-scheme:dark" in drawn


def test_the_recording_is_one_of_this_example():
    recorded = ET.parse(ROOT / "docs/images/two_sites.svg").getroot()
    lines = [line.text or "" for line in recorded.iter(f"{SVG}text")]
    assert_shown(lines)


def assert_shown(lines):
    rounds = [line for line in lines if line.startswith("round ")]
    assert [int(line.split()[1]) for line in rounds] == [*range(1, 13)]
    assert "A ●  B ●  counted 2 of 2" in rounds[2] and "counted 1 of 2" in rounds[4]
    at = [i for i, line in enumerate(lines) if re.search(r"kill -9|site B lost|again\)", line)]
    assert len(at) == 3 and any("site B joined" in line for line in lines[at[-1] :])
    assert re.match(r"the kill cost \d+ of 24 rounds of a site", lines[-3])


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--bucket"]])
def test_a_site_is_killed_and_joins_again_and_the_run_ends_with_its_report(tmp_path, options):
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLE), *options, "--svg", str(tmp_path / "drawn.svg")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert_shown(lines)
    assert Path(lines[-1].removeprefix("report: ")).is_file()
    assert str(tmp_path) not in (tmp_path / "drawn.svg").read_text("utf-8")
