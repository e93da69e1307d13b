"""Code in the README and the documentation runs, and every public name is documented."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import adloco_jax

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs").glob("[!_n]*/*.md"))
PAGES += sorted((ROOT / "studies").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
FOLDERS = "adloco_jax configs docs examples notebooks probes scripts studies tests".split()


def blocks(language):
    """The code blocks of a language in all pages that a test here runs, each with an id."""
    found = []
    for page in PAGES:
        pattern = rf"(?:<!-- not run: .+ -->\n)?^```{language}\n(.*?)^```$"
        for match in re.finditer(pattern, page.read_text(encoding="utf-8"), re.M | re.S):
            if match[0].startswith("```"):
                line = match[1].lstrip().splitlines()[0][:40]
                found.append(pytest.param(match[1], id=f"{page.stem}: {line}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("snippet", blocks("python"))
def test_a_python_block_runs(snippet, tmp_path):
    run = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", snippet]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("commands", blocks("bash"))
def test_a_shell_block_runs_unless_its_page_says_why_not(commands, tmp_path):
    for name in ("scripts", "configs", "studies"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = 'set -e; python() { "$PYTHON" "$@"; }; adloco() { python -m adloco_jax "$@"; }\n'
    script += commands
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.pages
def test_files_that_pages_and_code_name_exist():
    """Pages, docstrings, comments and messages send a reader to files that are there."""
    names = rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w./]+\.(?:md|ipynb|py|toml|jsonl)\b"
    files = [ROOT / "Makefile", ROOT / "pyproject.toml"]
    files += [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "scripts").glob("*.[!p]*")
    named = {(n, file.name) for file in files for n in re.findall(names, file.read_text("utf-8"))}
    # A page also names files of runs and of others; what it names as code is here.
    quoted = rf"`((?:{'|'.join(FOLDERS)})/[\w./]+\.\w+)`"
    named |= {(n, page.name) for page in PAGES for n in re.findall(quoted, page.read_text("utf-8"))}
    assert len(named) > 100
    missing = [each for each in sorted(named) if not (ROOT / each[0]).exists()]
    assert [each for each in missing if "NAME" not in each[0]] == []


def test_every_extra_is_explained_and_all_is_what_needs_no_accelerator():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert [name for name in extras if f"`{name}`" not in page] == []
    for_users = text.partition("[project.optional-dependencies]")[2].partition("\n#")[0]
    names = set(re.findall(r"^(\w+) = ", for_users, re.MULTILINE))
    needs_more = {"all", "bucket", "cuda12", "cuda13", "tpu", "plan"}
    assert extras["all"] == [f"adloco_jax[{','.join(sorted(names - needs_more))}]"]


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (\S+)", pages, flags=re.M))
    assert {f"adloco_jax.{name}" for name in adloco_jax.__all__} <= shown
    for package in ("models", "data", "study.report"):
        module = importlib.import_module(f"adloco_jax.{package}")
        for name in module.__all__:
            home = getattr(getattr(module, name), "__module__", None)
            assert f"adloco_jax.{name}" in shown or home in shown, f"{package}: {name}"
    package = ROOT / "adloco_jax"
    files = [*package.glob("[!_]*.py"), *package.glob("core/[!_]*.py")]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    # `train`, `fit` and `join` are shown as the package's
    private = {"main", "training"}
    assert modules - shown == {f"adloco_jax.{name}" for name in private}


def test_the_reference_says_of_each_public_name_what_its_docstring_says():
    """A Git host does not run Sphinx's directives, so the page has a table beside them."""
    page = (ROOT / "docs" / "api" / "adloco_jax.md").read_text("utf-8")
    first_lines = {}
    for name in adloco_jax.__all__:
        first_lines[name] = (getattr(adloco_jax, name).__doc__ or "").partition("\n")[0]
    first_lines |= re.findall(r"^\.\. py:data:: adloco_jax\.(\w+)\n\n   (.+)$", page, re.M)
    rows = [f"| `{name}` | {first_lines[name]} |\n" for name in adloco_jax.__all__]
    assert [row for row in rows if row not in page] == []


@pytest.mark.pages
def test_the_drawings_are_what_their_script_draws():
    script = runpy.run_path(str(ROOT / "scripts" / "drawings.py"))
    drawn = script["files"]()
    recorded = {"two_sites.svg"}  # by examples/two_sites.py
    assert {path.name for path in script["OUT"].glob("*.svg")} == set(drawn) | recorded
    for name, text in drawn.items():
        found = (script["OUT"] / name).read_text(encoding="utf-8")
        assert found == text, "run: python scripts/drawings.py"


def test_the_page_of_keys_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "options.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), (
        "run: python scripts/options.py"
    )


@pytest.mark.pages
def test_pages_read_the_same_on_a_git_host():
    """Only the index and the reference have Sphinx's directives; every link has its file."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.parent.name != "api" and page.name != "index.md":
            assert not re.search(r"^(```|:::)\{|\{[a-z:]+\}`|^\([\w-]+\)=$", text, re.M), page
        links = re.findall(r"\]\(([^()\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
        local = [(a or b) for a, b in links if not re.match(r"https?:", a or b)]
        assert [link for link in local if not leads_somewhere(page, link)] == [], page
        if page != PAGES[0]:  # Sphinx warns of a page that is not in the site
            pages = [page.parent / link.partition("#")[0] for link in local if ".md" in link]
            assert all(other.resolve() in {each.resolve() for each in PAGES} for other in pages)


def leads_somewhere(page, link):
    """Whether the file of a link exists, and has the heading after #."""
    name, _, anchor = link.partition("#")
    file = page.parent / name if name else page
    if not anchor or not file.exists():
        return file.exists()
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
    return anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.pages
def test_links_lead_from_the_index_to_every_page():
    docs = ROOT / "docs"
    shown = {page.resolve() for page in [*PAGES[1:], *docs.glob("notebooks/*.ipynb")]}
    found = [docs / "index.md"]
    for page in found:
        links = re.findall(r"\]\(([^()#\s]+)[)#]", page.read_text(encoding="utf-8"))
        links = [(page.parent / link).resolve() for link in links]
        found += [link for link in dict.fromkeys(links) if link in shown and link not in found]
    assert shown <= {page.resolve() for page in found}


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
        "run: jupytext --to ipynb --update docs/notebooks/*.py"
    )
    ran = [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    assert ran == []
    first_code = next(source for code, _, source in cells if code)
    assert first_code.startswith("repository = ") and '"google.colab" in sys.modules' in first_code


def test_every_notebook_has_a_script_and_is_listed():
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    listed = re.findall(r"\(notebooks/(\w+)\.ipynb\)", page)
    assert sorted(listed) == [path.stem for path in NOTEBOOKS]
    assert [
        path.with_suffix(".py") for path in sorted(ROOT.glob("docs/notebooks/*.ipynb"))
    ] == NOTEBOOKS
