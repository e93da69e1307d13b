"""Notes that a process leaves when it runs out of memory, for the next start of its group.

With several processes one alone may run out, and the others hang in the round it has left; all
restart, from a checkpoint that knows nothing of it. A note is a file of the run's folder, named by
the round that failed and by the process, and holds the largest micro-batch to try next.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"\.max_batch_size-round-(\d+)-process-\d+")


def leave(workdir: Path, *, round_index: int, process: int, max_batch_size: int) -> None:
    """Leaves a note of this process, replacing an earlier one of the same round."""
    note = workdir / f".max_batch_size-round-{round_index}-process-{process}"
    new = note.with_suffix(".new")
    new.write_text(f"{max_batch_size}\n")
    os.replace(new, note)


def least(workdir: Path, *, after_round: int = -1) -> int | None:
    """The smallest micro-batch in the notes on rounds after that one; None if there is none."""
    return min(
        (int(path.read_text()) for number, path in _notes(workdir) if number > after_round),
        default=None,
    )


def forget(workdir: Path, *, up_to_round: int) -> None:
    """Removes the notes on rounds that a checkpoint holds; those on later rounds stay."""
    for number, path in _notes(workdir):
        if number <= up_to_round:
            path.unlink()


def _notes(workdir: Path) -> Iterator[tuple[int, Path]]:
    for path in workdir.glob(".max_batch_size-*"):
        if named := _NAME.fullmatch(path.name):
            yield int(named[1]), path
