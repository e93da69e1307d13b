"""Imports point one way only: the pure modules know no host library and nothing above the line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "adloco_jax"

# What each room may import of ours, itself included. Below the line: core and models.
ROOMS = {
    "core": {"core"},
    "models": {"core", "models"},
    "errors": set(),
    "data": {"core", "models", "errors", "data"},
    "hf": {"core", "models", "errors", "data", "hf"},
    "run": {"core", "models", "errors", "data", "hf", "run", "__version__"},
    "study": {"core", "models", "errors", "data", "hf", "run", "study"},
    "main": {"core", "models", "errors", "data", "hf", "run", "study", "main"},
}
PURE_LIBRARIES = {
    "jax",
    "flax",
    "optax",
    "numpy",
    "jaxtyping",
    "collections",
    "dataclasses",
    "functools",
    "inspect",
    "math",
    "typing",
}
HOST_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent / "__init__.py" != path]
PURE = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] in ("core", "models")]


def name_of(path):
    return str(path.relative_to(PACKAGE))


def imported(path):
    """Dotted names a module imports, wherever in it, with `from a import b` as `a.b`."""
    package = ["adloco_jax", *path.relative_to(PACKAGE).parent.parts]
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{stem}.{alias.name}" for alias in node.names]
    return names


def ours(path):
    """What a module imports of ours, as parts below the package: [room, module, ...]."""
    names = [name.split(".") for name in imported(path)]
    return [parts[1:] for parts in names if parts[0] == "adloco_jax"]


def test_the_walk_sees_the_package():
    assert {"core/outer.py", "models/llama.py"} <= {name_of(path) for path in PURE}
    assert ["core", "base", "Ensemble"] in ours(PACKAGE / "core" / "outer.py")


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_pure_modules_import_pure_libraries_only(path):
    libraries = {name.split(".")[0] for name in imported(path)} - {"adloco_jax"}
    assert libraries <= PURE_LIBRARIES, f"{name_of(path)}: {libraries - PURE_LIBRARIES}"


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_pure_modules_touch_no_file_and_no_terminal(path):
    names = {n.id for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Name)}
    assert not names & HOST_BUILTINS


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path):
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    rooms = {parts[0] for parts in ours(path)}
    assert rooms <= ROOMS[room], f"{name_of(path)} imports {rooms - ROOMS[room]}"


@pytest.mark.parametrize("path", [p for p in PURE if p.parent.name == "core"], ids=name_of)
def test_siblings_in_core_meet_only_in_base_and_outer(path):
    siblings = {parts[1] for parts in ours(path)}
    if path.stem != "outer":
        assert siblings <= {"base"}, f"{name_of(path)} imports {siblings}"


@pytest.mark.parametrize("path", [p for p in PURE if p.parent.name == "models"], ids=name_of)
def test_models_know_only_the_types_of_the_core(path):
    assert {parts[1] for parts in ours(path) if parts[0] == "core"} <= {"base"}


def test_importing_the_package_costs_jax_flax_and_optax_only():
    code = "import sys, adloco_jax; print(*{name.split('.')[0] for name in sys.modules})"
    code += "; print(*[name for name in sys.modules if name.startswith('adloco_jax.')])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    libraries, modules = (set(line.split()) for line in run.stdout.splitlines())
    heavy = {"datasets", "matplotlib", "ml_collections", "orbax", "tqdm", "transformers"}
    assert not libraries & heavy
    above = {name for name in modules if name.split(".")[1] not in ("core", "models")}
    assert "adloco_jax.core" in modules and not above
