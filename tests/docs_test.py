"""The README's Python runs as printed, every file it names is there; notebooks match scripts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PREPARE = re.search(r"^### Prepare data once\n.*?^```bash\n(.*?)^```$", README, re.M | re.S)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


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
    assert named and len(SNIPPETS) == 2
    assert [name for name in named if not (ROOT / name).exists()] == []


def cells_of_script(text):
    """Cells of jupytext's percent format: (is it code, tags, source)."""
    # What precedes the first cell is jupytext's header.
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    cells = []
    for marker, source in zip(parts[::2], parts[1::2], strict=True):
        source = source.strip("\n")
        code = "[markdown]" not in marker
        if not code:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        tags = re.search(r"tags=(\[.*\])", marker)
        cells.append((code, json.loads(tags[1]) if tags else [], source))
    return cells


@pytest.mark.parametrize("script", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script_without_outputs(script):
    notebook = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
    cells = [
        (cell["cell_type"] == "code", cell["metadata"].get("tags", []), "".join(cell["source"]))
        for cell in notebook["cells"]
    ]
    assert cells == cells_of_script(script.read_text(encoding="utf-8")), (
        "run: jupytext --to ipynb --update notebooks/*.py"
    )
    ran = [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    assert ran == []
    first_code = next(source for code, _, source in cells if code)
    assert 'if "google.colab" in sys.modules' in first_code


def test_every_notebook_has_a_script():
    assert [path.with_suffix(".py") for path in sorted(ROOT.glob("notebooks/*.ipynb"))] == NOTEBOOKS
