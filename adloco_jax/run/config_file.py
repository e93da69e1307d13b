"""Config files: Python that is run for what one of its functions returns.

A config file may add entries to the public tables. Only a file that the user names is ever run: a
command that reads a run with such an entry takes `--config` again.
"""

import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import TypeVar

from adloco_jax.errors import ConfigError

# In the repository the package's folder is a link to the top-level one.
SHIPPED = (Path(__file__).parents[1] / "configs").resolve()
_MAX_BYTES = 2**20

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


def add_entries(name: str | None) -> None:
    """Runs the config file of that name for the entries that it adds to the tables.

    Args:
      name: As `--config` gives it; None does nothing.

    Raises:
      ConfigError: If there is no such file, or it does not run.
    """
    if name is not None:
        _run(find(name), "get_config", "get_comparison")


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
