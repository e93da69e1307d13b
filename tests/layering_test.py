"""Imports point one way only: the pure modules know no host library and nothing above the line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import adloco_jax
from adloco_jax.settings import ENTRIES

PACKAGE = Path(__file__).parents[1] / "adloco_jax"

# The packages of the project, each above its users, and which of our packages each may import. The
# pure half is core, models, settings (config keys, which name tables by strings) and the loop.
BELOW = {
    "core": set(),
    "contrib": {"core"},
    "row_batch": set(),
    "models": {"core", "settings", "errors", "row_batch"},
    "settings": set(),
    "errors": set(),
    "__version__": set(),
}
# `models/hf.py` is a room of its own: it reads and writes files, which the models do not.
BELOW["loop"] = {"core", "contrib", "settings"}
BELOW["host"] = {"errors", "__version__"}
BELOW["data"] = {"settings", "errors", "row_batch"}
BELOW["models.hf"] = BELOW["data"] | BELOW["models"] | {"data", "models"}
BELOW["config"] = BELOW["models.hf"] | {"models.hf", "contrib"}
BELOW["engine"] = BELOW["models.hf"] | BELOW["loop"] | {"models.hf", "loop"}
BELOW["elastic"] = BELOW["engine"] | {"config", "engine", "host", "__version__"}
BELOW["run"] = BELOW["elastic"] | {"elastic"}
BELOW["study"] = BELOW["run"] | {"run"}
BELOW["training"] = BELOW["study"] | {"study"}
BELOW["cli"] = BELOW["training"] | {"training"}
BELOW["main"] = BELOW["cli"] | {"cli"}
BELOW["__main__"] = {"main"}
PURE_LIBRARIES = {"jax", "flax", "optax", "numpy", "jaxtyping", "qwix", "collections", "copy"}
PURE_LIBRARIES |= {"pydantic", "pydantic_core"}  # of the settings
PURE_LIBRARIES |= {"dataclasses", "functools", "importlib", "inspect", "itertools", "json", "math"}
PURE_LIBRARIES |= {"operator", "re", "types", "typing"}
HOST_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent / "__init__.py" != path]
# The pure packages.
PURE = ("core", "contrib", "models", "row_batch", "settings", "loop")


def room(parts):
    """The room of a module, given as its path or a name in it, from the package on."""
    return "models.hf" if [*parts[:2]] == ["models", "hf"] else parts[0]


def room_of(path):
    return room(path.relative_to(PACKAGE).with_suffix("").parts)


def name_of(path):
    return str(path.relative_to(PACKAGE))


def imported(path):
    """Dotted names that a module imports anywhere, with `from a import b` as `a.b`."""
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
    """The modules of this package that a module imports, as [package, module, ...]."""
    names = [name.split(".") for name in imported(path)]
    return [parts[1:] for parts in names if parts[0] == "adloco_jax"]


def test_every_module_has_a_room_and_the_walk_sees_what_it_imports():
    assert {room_of(path) for path in MODULES} == set(BELOW) - {"__version__"}
    assert ["core", "types", "Ensemble"] in ours(PACKAGE / "core" / "outer.py")
    assert ["training"] in ours(PACKAGE / "cli" / "train.py")


@pytest.mark.parametrize("name", sorted(BELOW))
def test_imports_point_down(name):
    for path in MODULES:
        if room_of(path) == name:
            if name == "models":
                assert {parts[1] for parts in ours(path) if parts[0] == "core"} <= {"types"}
            strange = {room(parts) for parts in ours(path)} - BELOW[name] - {name}
            assert not strange, f"{name_of(path)} imports {strange}"


def test_pure_modules_import_pure_libraries_only_and_touch_no_file_and_no_terminal():
    for path in MODULES:
        if room_of(path) in PURE:
            libraries = {name.split(".")[0] for name in imported(path)} - {"adloco_jax"}
            if path.stem == "weight_maps":  # reads a checkpoint's config.json as transformers does
                libraries -= {"transformers"}
            assert libraries <= PURE_LIBRARIES, f"{name_of(path)}: {libraries - PURE_LIBRARIES}"
            tree = ast.walk(ast.parse(path.read_text("utf-8")))
            names = {n.id for n in tree if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            assert not names & HOST_BUILTINS, f"{name_of(path)}: {names & HOST_BUILTINS}"


def test_tables_are_read_with_the_entries_of_all_papers():
    """Importing `contrib` registers all of its files; above the core, tables come from there."""
    tables = {"AGGREGATORS", "INNER_OPTIMIZERS", "OUTER_OPTIMIZERS", "ROUND_LENGTHS"}
    for path in MODULES:
        read = {parts[-1] for parts in ours(path) if parts[0] == "core"} & tables
        assert not read or room_of(path) == "contrib", f"{name_of(path)} reads {read} of core"
    rules = {path.stem for path in MODULES if room_of(path) == "contrib"}
    assert rules <= {parts[1] for parts in ours(PACKAGE / "contrib" / "__init__.py")}


def test_the_pure_functions_cost_jax_flax_and_optax_only_and_the_package_alone_nothing():
    code = "import sys, adloco_jax; assert not {'jax', 'numpy'} & set(sys.modules)"
    code += "; adloco_jax.outer_step, adloco_jax.norm_test"
    code += "; print(*{name.split('.')[0] for name in sys.modules})"
    code += "; print(*[name for name in sys.modules if name.startswith('adloco_jax.')])"
    code += "; a = adloco_jax; print(*a.AGGREGATORS, *a.INNER_OPTIMIZERS, *a.ROUND_LENGTHS)"
    code += "; from adloco_jax.config import tables"
    code += "; print({name: sorted(table) for name, table in tables().items()})"
    command, how = [sys.executable, "-c", code], {"capture_output": True, "text": True}
    run = subprocess.run(command, cwd=PACKAGE.parent, timeout=120, **how)
    assert run.returncode == 0, run.stderr
    *lines, shipped = run.stdout.splitlines()
    libraries, modules, entries = (set(line.split()) for line in lines)
    assert {"mean", "muon", "fixed"} <= entries
    heavy = {"datasets", "ml_collections", "orbax", "tqdm", "transformers"}
    assert not libraries & heavy
    above = {name for name in modules if name.split(".")[1] not in ("core", "models")}
    assert "adloco_jax.core" in modules and not above
    named = {entry.table: sorted(entry.names.split()) for entry in ENTRIES.values()}
    assert ast.literal_eval(shipped) == named  # in the help


def test_type_checkers_see_the_public_names_where_they_are():
    source = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))
    (block,) = [node for node in source.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    homes = adloco_jax._HOME_OF.items()
    assert {name: f"adloco_jax.{home}" for name, home in homes} == seen
    assert adloco_jax.__all__ == sorted(seen)
