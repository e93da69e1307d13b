"""Points of a run at which a test kills its process, or makes a write fail.

`python -m probes.crashes save.begin:2 WORDS` is `adloco WORDS`, killed by SIGKILL, with nothing
flushed, at the second arrival at a point; with `save.begin:1:ENOSPC` an OSError is raised there.
"""

import errno
import io
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from adloco_jax import main
from adloco_jax.engine import local
from adloco_jax.run.kept import checkpoint, ledger


class LedgerFile(io.FileIO):
    """The file that a ledger opens, of a class of its own."""

    def __init__(self, path: str, mode: str, buffering: int):
        super().__init__(path, mode)

    def write(self, data: Any) -> int:
        """Write bytes; return how many were written."""
        return super().write(data)


def _is_round(path: Any) -> bool:
    return Path(path).name.isdecimal()


# A point is before or after those calls of a function that a third function of their arguments
# selects.
POINTS: dict[str, tuple[Any, str, str, Callable[..., bool]]] = {
    "ledger.write": (LedgerFile, "write", "before", lambda *_: True),
    "retention.renamed": (os, "rename", "after", lambda old, new: _is_round(old)),
    "round.decided": (local, "end_round", "before", lambda *_, **__: True),
    "save.begin": (ocp.AsyncCheckpointer, "save", "before", lambda *_, **__: True),
    "save.arrays": (checkpoint, "sync", "before", lambda path: path.name == "host.json"),
    "save.manifest": (os, "rename", "before", lambda old, new: _is_round(new)),
    "save.renamed": (os, "rename", "after", lambda old, new: _is_round(new)),
    "save.committed": (checkpoint, "sync", "after", lambda path: checkpoint.list_rounds(path)),
}


def install(
    point: str, act: Callable[[], None], number: int = 1, patch: Callable[..., None] = setattr
) -> None:
    """Let a process call `act` at its n-th arrival at a point; `patch` replaces the function."""
    owner, name, when, is_there = POINTS[point]
    function, arrivals = getattr(owner, name), itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        arrives = is_there(*args, **kwargs) and next(arrivals) == number
        if arrives and when == "before":
            act()
        value = function(*args, **kwargs)
        if arrives and when == "after":
            act()
        return value

    patch(owner, name, call)


def fail(name: str) -> None:
    """Raise the OSError of this name, such as ENOSPC."""
    number = getattr(errno, name)
    raise OSError(number, os.strerror(number))


def kill() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _, fault, *words = sys.argv
    at, count, *error = fault.split(":")
    ledger.open = LedgerFile  # type: ignore[attr-defined]
    install(at, (lambda: fail(*error)) if error else kill, int(count))
    sys.argv[1:] = words
    main.command()
