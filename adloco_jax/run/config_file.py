"""Config files: Python that is run for what one of its functions returns.

A config file may add entries to the public tables. A run that uses such an entry depends on the
file: `config.json` in the run's folder records its path, hash and text, and commands that read the
folder run it first.
"""

import hashlib
import json
import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, TypeVar

from adloco_jax.errors import ConfigError
from adloco_jax.run.config import custom_entries
from adloco_jax.settings import Settings

# In the repository the package's folder is a link to the top-level one.
SHIPPED = (Path(__file__).parents[1] / "configs").resolve()
_MAX_BYTES = 2**20
_MAX_RECORD_BYTES = 2**26

# What a broken config file raises: it is arbitrary Python, so most of the builtin errors.
_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(OSError, RuntimeError, SyntaxError, SystemExit, TypeError, ValueError),
)

T = TypeVar("T")


def find(name: str | None) -> Path:
    """Looks for a config file from here, then among those that ship as a path or a bare name.

    Raises:
      ConfigError: If there is none; lists those that ship.
    """
    if name is None:
        raise ConfigError("--config: missing; name one that `adloco configs` lists, or a file")
    for path in (Path(name), SHIPPED.parent / name, SHIPPED / f"{name}.py"):
        if os.path.isfile(path):
            return path
    known = ", ".join(sorted(file.stem for file in SHIPPED.glob("[!_]*.py")))
    raise ConfigError(f"--config {name}: no such file; those that come with adloco_jax: {known}")


def load(path: Path, function: str, kind: type[T]) -> T:
    """Returns what a function of a config file returns, called without arguments.

    Raises:
      ConfigError: If the file does not run, lacks the function, or returns another kind.
    """
    made = _run(path, function)
    if type(made) is not kind:
        start = "; start it from adloco_jax.run.config.default_config()"
        raise ConfigError(
            f"{path}: needs a {function}() that returns a {kind.__name__}"
            + (start if function == "get_config" else "")
        )
    return made


def _run(path: Path, *functions: str) -> object:
    """Runs a file, and the first of these functions that it has; returns what that returns."""
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise ConfigError(f"{path}: {size} bytes, no config is larger than {_MAX_BYTES}")
    root = str(path.resolve().parent.parent)  # for a config that imports its neighbours by folder
    sys.path.insert(0, root)
    try:
        names = runpy.run_path(str(path))
        found = [names[name] for name in functions if callable(names.get(name))]
        return found[0]() if found else None
    except _ERRORS as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        # A locked ConfigDict lists all its fields before it names the nearest one.
        text = re.sub(r"Other fields present: .*}\"", "", str(error)).replace("\\n", " ")
        raise ConfigError(f"{where}: {type(error).__name__}: {' '.join(text.split())}") from error
    finally:
        sys.path.remove(root)


def record(path: str | Path | None, settings: Settings) -> dict[str, Any]:
    """Describes a run's config file, as `config.json` holds it.

    Args:
      path: The config file; None where the config comes from other Python.
      settings: The run's, which tell what the file must have added to the tables.

    Returns:
      Its absolute `path`, `sha256` and `text` (None without a file), and under `entries` the keys
      that name an entry which the library does not define.
    """
    content = b"" if path is None else Path(path).read_bytes()
    return {
        "path": None if path is None else str(Path(path).resolve()),
        "sha256": None if path is None else hashlib.sha256(content).hexdigest(),
        "text": None if path is None else content.decode(errors="replace"),
        "entries": custom_entries(settings),
    }


def changes(workdir: Path, path: str | Path | None, settings: Settings) -> list[str]:
    """A line if a run that uses entries of a config file would resume with another file.

    Args:
      workdir: The run's folder.
      path: The config file now, as for `record`.
      settings: The run's now.
    """
    before, now = _recorded(workdir), record(path, settings)
    entries = before.get("entries") or now["entries"]
    if not (before and entries) or before.get("sha256") == now["sha256"]:
        return []
    was, given = (f"{each.get('path')} ({str(each.get('sha256'))[:12]})" for each in (before, now))
    return [
        f"{workdir}: the config file, which defines the entry of {', '.join(entries)}, was {was},"
        f" is {given}; restore it (its text is in config.json), or --accept-config-change to resume"
        " with this one"
    ]


def load_recorded(workdir: Path) -> None:
    """Runs the config file that a run's folder records, if the run uses an entry that it defines.

    Args:
      workdir: The run's folder; nothing happens if it is none.

    Raises:
      ConfigError: If the file is gone, has changed since, or does not run.
    """
    found = _recorded(workdir)
    if not found.get("entries") or found.get("path") is None:
        return
    path = Path(str(found["path"]))
    is_there = path.is_file()
    if not is_there or hashlib.sha256(path.read_bytes()).hexdigest() != found.get("sha256"):
        raise ConfigError(
            f"{path}: {'has changed' if is_there else 'is gone'}, and the run in {workdir} needs it"
            f" for {', '.join(map(str, found['entries']))}; restore it: its text is in"
            f" {workdir / 'config.json'} under config_file.text"
        )
    _run(path, "get_config", "get_comparison")


def _recorded(workdir: Path) -> dict[str, Any]:
    """The record of the config file in a run's folder; empty where there is none."""
    path = workdir / "config.json"
    if not path.is_file() or path.stat().st_size > _MAX_RECORD_BYTES:
        return {}
    try:
        found = json.loads(path.read_bytes())["config_file"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}  # whoever needs the config itself says that it is damaged
    return found if isinstance(found, dict) and isinstance(found.get("entries"), list) else {}
