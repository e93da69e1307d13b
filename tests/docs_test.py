"""The README's Python runs as printed, and every file it names is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PREPARE = re.search(r"^### Prepare data once\n.*?^```bash\n(.*?)^```$", README, re.M | re.S)
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_readme_has_its_snippets():
    assert len(SNIPPETS) == 2


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=["notebook", "pure"])
def test_readme_snippet_runs(snippet, tmp_path):
    run = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", snippet]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_the_commands_that_prepare_data_run(tmp_path):
    assert PREPARE is not None
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    script = 'set -e; python() { "$PYTHON" "$@"; }\n' + PREPARE[1]
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    run = ["bash", "-c", script]
    done = subprocess.run(
        run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "as they were written" in done.stdout
    assert (tmp_path / "prepared" / "stdlib" / "prepared.json").exists()


def test_files_the_readme_names_exist():
    named = re.findall(r"`((?:configs|scripts|docs|notebooks)/[\w./]+\.\w+)`", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
