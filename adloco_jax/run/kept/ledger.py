"""The ledger: the log of a run in the file `ledger.jsonl`, one JSON object a line for each event.

All tables, figures and comparisons of runs are made from it. A killed process can leave an
incomplete last line, which `read` ignores and `remove_rounds_after` removes. A trainer is a model
in training; of several, some may leave the run. A learner is a process of its own that trains.
"""

import contextlib
import io
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from adloco_jax.data.disk import replaced_file, write_errors
from adloco_jax.data.formats import Format, checked
from adloco_jax.errors import CheckpointError, DataError
from adloco_jax.loop.adloco import Control
from adloco_jax.run.kept.events import EVENTS

# Events that are written again when rounds are run again.
_REPEATED_EVENTS = {"round", "sync", "eval", "merge", "refusal", "spawn", "fault", "memory"}

_MOST_QUOTED = 40  # bytes of a damaged line that a message quotes
# What a message about a damaged ledger ends with.
_ADVICE = "restore the file from a copy; `adloco export` makes a model of a checkpoint without it"


class Ledger(contextlib.AbstractContextManager):
    """Appends lines to a run's ledger file, unbuffered, so that a killed process loses none."""

    def __init__(self, path: str | os.PathLike[str]):
        """Open or create the file at `path`, in an existing folder, for appending.

        `listeners` is empty; a caller that wants to see the lines appends functions to it. Raises
        ResourceError if the file cannot be opened.
        """
        self._path = Path(path)
        # Each is called with each line once it is written: a dict, on the thread of `write`.
        self.listeners: list[Callable[[dict], object]] = []
        with write_errors(self._path):  # turns an OSError into ResourceError
            self._file = open(path, "ab", buffering=0)
        self._lock = threading.Lock()  # another thread compiles programs, and writes lines on them

    def write(self, event: str, **fields: object) -> None:
        """Append one line: `event`, then the fields in order.

        NumPy and JAX values become plain numbers and lists; those that are still being computed are
        waited for. Numbers that are not finite become null.

        Raises:
          AttributeError, TypeError: If a value cannot be converted; nothing is written.
          ResourceError: If the disk is full or cannot be written.
        """
        line = _plain({"event": event, **fields})
        text = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._lock, write_errors(self._path):
            rest = memoryview(text)
            while rest:  # if the disk is full, it first accepts a part of the line, then raises
                num_written = self._file.write(rest)
                rest = rest[num_written:]
        for listener in self.listeners:
            listener(line)

    def sync(self) -> None:
        """Write the lines from the system's buffers to disk, because a checkpoint follows them.

        Raises ResourceError if the disk is full or fails.
        """
        with write_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the ledger file; later calls of `write` raise ValueError."""
        self._file.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read(path: str | os.PathLike[str]) -> list[dict]:
    """Read a ledger, one dict per line, even while it is being written.

    An incomplete last line is left out. `EVENTS` says which fields the line of an event has.

    Raises:
      DataError: If the file cannot be read, or a line or a field is not as `EVENTS` says.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the ledger ({error.strerror}); "
            f"name the folder of a run, one that holds ledger.jsonl"
        ) from error
    events = []
    for number, line in enumerate(io.BytesIO(content), start=1):
        event = _parse(line)
        if event is None and not line.endswith(b"\n"):
            break  # the last line, which is not complete
        try:
            if event is None:
                found = line[:_MOST_QUOTED]
                raise ValueError(f"expected a JSON object with the key 'event', found {found!r}")
            kind = event["event"]
            # An event that this version does not know may have any fields.
            checked(event, EVENTS.get(kind, Format), kind, ValueError)
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}; {_ADVICE}") from error
        events.append(event)
    return events


def finished_line(events: Iterable[dict]) -> dict | None:
    """Return the `end` line of a finished run, from all lines of its ledger.

    None if the run is unfinished, was stopped or diverged, or was started again after its end.
    """
    marks = [event for event in events if event["event"] in ("start", "end")]
    if marks and marks[-1].get("reason") == "finished":  # a `start` line has no reason
        return marks[-1]
    return None


def remove_rounds_after(path: str | os.PathLike[str], control: Control | None) -> None:
    """Remove the lines on rounds after a checkpoint, before the run resumes from it.

    An incomplete last line is removed, too. The file is replaced atomically. Lines on starts,
    learners, compilations, checkpoints and ends stay: they are not written again.

    Args:
      path: The ledger, which need not exist.
      control: What the checkpoint says of the run: its trainers, and the rounds that each has
        completed. None: there is no checkpoint, and the lines on all rounds are removed.

    Raises:
      CheckpointError: If lines on rounds before the checkpoint are missing.
      ResourceError: If the file cannot be written.
    """
    rounds = {}  # completed by each trainer of the checkpoint
    if control is not None:
        rounds = {trainer: control.rounds_of(trainer) for trainer in control.trainers}

    def is_later(event: dict) -> bool:
        """Whether a line is on a round after the checkpoint, and will be written again."""
        if event["event"] not in _REPEATED_EVENTS:
            return False
        if control is None:
            return True
        trainer = event.get("trainer")
        if event.get("kind") == "quarantine":
            # The trainer left the run, because its numbers were not finite. If the checkpoint
            # still has it, it left later.
            return trainer in rounds
        if event["event"] in ("round", "fault") and trainer is not None:
            # With learners, trainers end their rounds apart, so that one may be ahead. One that the
            # checkpoint lacks had left before, and runs no round again.
            return trainer in rounds and event["round"] > rounds[trainer]
        return event["round"] > control.round

    content = b""
    if Path(path).exists():
        content = Path(path).read_bytes()
    lines = []  # the bytes of each line, and its event
    recorded = dict.fromkeys(rounds, 0)  # the last round of each trainer
    for text in content.splitlines():
        event = _parse(text)
        if event is None:
            continue
        lines.append((text, event))
        if event["event"] == "round":
            recorded[event["trainer"]] = event["round"]
    for trainer, last in rounds.items():
        if recorded[trainer] < last:
            raise CheckpointError(
                f"{path}: has {recorded[trainer]} rounds of trainer {trainer}, the checkpoint has"
                f" {last}; {_ADVICE}"
            )
    kept = b"".join(text + b"\n" for text, event in lines if not is_later(event))
    if kept != content:
        # An OSError becomes a ResourceError; the old file is replaced once the new one is whole.
        with write_errors(Path(path)), replaced_file(Path(path)) as file:
            file.write(kept)


def _parse(line: bytes) -> dict | None:
    """Read a line of the file as an event, a dict; return None if the line is not an event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return event
    return None


def _plain(value: object) -> Any:
    """Convert a value, which may contain arrays, to plain JSON data; not finite becomes None.

    Raises AttributeError or TypeError if it contains something that is neither.
    """
    text = json.dumps(value, default=lambda array: array.tolist())
    return json.loads(text, parse_constant=lambda _: None)  # NaN and infinities are constants
