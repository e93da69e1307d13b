"""Config files: Python that is run for what one of its functions returns."""

import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import TypeVar

from adloco_jax.errors import ConfigError

_MAX_BYTES = 2**20

# What a broken config file raises: it is anybody's Python, so most of the builtin errors.
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)

T = TypeVar("T")


def find(name: str | None) -> Path:
    """Looks for a config file from here, and beside the package as a path or a bare name.

    Raises:
      ConfigError: If there is none; names those beside the package.
    """
    if name is None:
        raise ConfigError("--config: missing; name a file, such as configs/quickstart.py")
    home = Path(__file__).resolve().parents[2]
    for path in (Path(name), home / name, home / "configs" / f"{name}.py"):
        if os.path.isfile(path):
            return path
    known = ", ".join(sorted(file.stem for file in home.glob("configs/*.py"))) or "none"
    raise ConfigError(f"--config {name}: no such file; configs beside the package: {known}")


def load(path: Path, function: str, kind: type[T]) -> T:
    """What a function of a config file returns, without arguments.

    Raises:
      ConfigError: If the file is no Python that runs, lacks the function, or returns something of
        another kind.
    """
    if (size := path.stat().st_size) > _MAX_BYTES:
        raise ConfigError(f"{path}: {size} bytes, no config is larger than {_MAX_BYTES}")
    root = str(path.resolve().parent.parent)  # for a config that imports its neighbours by folder
    sys.path.insert(0, root)
    try:
        make = runpy.run_path(str(path)).get(function)
        made = make() if callable(make) else None
    except _ERRORS as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        # A locked ConfigDict lists all its fields before it names the nearest one.
        text = re.sub(r"Other fields present: .*}\"", "", str(error)).replace("\\n", " ")
        raise ConfigError(f"{where}: {type(error).__name__}: {' '.join(text.split())}") from error
    finally:
        sys.path.remove(root)
    if type(made) is not kind:
        start = "; start it from adloco_jax.run.config.default_config()"
        raise ConfigError(
            f"{path}: needs a {function}() that returns a {kind.__name__}"
            + (start if function == "get_config" else "")
        )
    return made
