"""Find what a name on the command line stands for: the file of a config, or the folder of a run."""

import difflib
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

from ml_collections import ConfigDict

from adloco_jax.config import executed
from adloco_jax.errors import ConfigError

# The folder of the configs that come with the package. In the repository it is a link to the folder
# `configs` at the top level.
SHIPPED = (Path(__file__).parents[1] / "configs").resolve()


def is_run(folder: str | Path) -> bool:
    """Return whether a folder contains a run, which has a ledger."""
    return os.path.isfile(Path(folder) / "ledger.jsonl")  # False also for invalid names


def runs_in(folder: str | Path) -> list[Path]:
    """Return the folders of the runs in a folder, the last changed first."""
    found = [path for path in Path(folder).glob("*") if is_run(path)]
    return sorted(found, key=lambda run: run.stat().st_mtime, reverse=True)


def find_config(name: str) -> Path:
    """Find a config file by its path, or by the name of a config that comes with this package.

    Raises:
      ConfigError: If there is no such file. The message lists the package's configs.
    """
    # A path from here or from the package's folder, such as configs/quickstart.py, or a name.
    for path in (Path(name), SHIPPED.parent / name, SHIPPED / f"{name}.py"):
        if os.path.isfile(path):
            return path
    known = sorted(file.stem for file in SHIPPED.glob("[!_]*.py"))
    nearest = difflib.get_close_matches(Path(name).stem, known, n=1)  # one name, or none
    meant = ""
    if nearest:
        meant = f"did you mean {nearest[0]}? "
    raise ConfigError(
        f"--config {name}: no such file; {meant}those that come with adloco_jax: {', '.join(known)}"
    )


def load_config(path: Path, **arguments: str) -> ConfigDict:
    """Run the Python file of a config, and return what its `get_config` makes of arguments.

    Arguments, such as `size`, are forwarded, because each file has its own.

    Raises:
      ConfigError: If the file raises an error or lacks the function, or the result is no config.
    """
    config = _run_file(path, **arguments)
    if type(config) is not ConfigDict:
        raise ConfigError(
            f"{path}: needs a get_config() that returns a ConfigDict; start it from"
            " adloco_jax.config.default_config()"
        )
    return config


def add_entries(name: str | None) -> None:
    """Run a config file, if named, only for the entries that it adds to public tables.

    Raises ConfigError if there is no such file, or it raises an error.
    """
    if name is not None:
        _run_file(find_config(name))


def _run_file(path: Path, **arguments: str) -> object:
    """Run a config file; return what its `get_config` makes of the arguments, None without one.

    The file is recorded as executed, so that learners run it, too. Raises ConfigError for an error
    in the file, with its line.
    """
    # The parent of the config's folder is added to the import path, so that a config can import
    # other configs in this folder.
    root = str(path.resolve().parent.parent)
    sys.path.insert(0, root)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        config = None
        if callable(get_config):
            config = get_config(**arguments)
        executed.append(path.resolve())  # only a file without a fault
        return config
    # Deliberately broad, because a config file is arbitrary Python.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = str(path)
        if lines:
            where = f"{path}, line {lines[-1]}"
        # The error of a locked ConfigDict lists all fields before it names the nearest one. This
        # list is removed. A KeyError quotes its text, with `\\n` for the ends of lines.
        text = re.sub(r"Other fields present: .*}\"", "", str(error)).replace("\\n", " ")
        raise ConfigError(f"{where}: {type(error).__name__}: {' '.join(text.split())}") from error
    finally:
        sys.path.remove(root)
