"""The run's record: `ledger.jsonl`, one JSON object per line, appended as things happen.

Tables, figures and comparisons of runs read this file and nothing else. A killed process can
leave at most its last line half written; readers drop that one, and a `Ledger` opened on such a
file mends it, so that the next event starts on a line of its own.
"""

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

import jax
import numpy as np

from adloco_jax.errors import CheckpointError, DataError, ResourceError
from adloco_jax.run.crashpoints import hit

_DETERMINISTIC_EVENTS = frozenset({"round", "sync", "eval", "merge", "refusal"})
# Written again when rounds are run again.
_REPEATED_EVENTS = _DETERMINISTIC_EVENTS | {"fault", "memory"}

_ADVICE = (
    "restore the file from a copy, or give --rebuild-ledger to go on from the newest whole"
    " checkpoint with the lines that can be read; scripts/export.py makes a model of a checkpoint"
)

START = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}  # of an empty ledger, see `cut`


class Ledger:
    """Appends events to a JSONL file; each is on disk (in the kernel) when `write` returns."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        on_write: Callable[[dict], None] = lambda line: None,
    ):
        """Opens `path` for appending, creating it if need be.

        Args:
          path: The ledger's file, by convention `<workdir>/ledger.jsonl`; its folder exists.
          on_write: Called with each line once it is on disk, in the file's order; must not wait,
            nor write a line of its own.
        """
        self._path = Path(path)
        self._on_write = on_write
        _mend(self._path)
        with _write_errors(self._path):
            self._file = open(path, "ab", buffering=0)
        self._lock = threading.Lock()  # programs are compiled, and recorded, on another thread
        self._hash = hashlib.sha256(self._path.read_bytes())
        self._num_bytes = self._path.stat().st_size

    def write(self, event: str, **fields: object) -> None:
        """Appends one line: `event` first, then the fields in the order given.

        Scalars and arrays of NumPy and JAX become plain numbers and lists, and a number that is
        not finite becomes null, wherever it stands. A JAX array that is still being computed
        makes the call wait for it.

        Args:
          event: What happened, e.g. "round" or "merge".
          **fields: Strings, numbers, booleans, None, and lists, tuples and dicts of them.

        Raises:
          TypeError: If a value has no plain JSON form; nothing is written.
          ResourceError: If the disk takes no more.
        """
        line: dict[str, object] = {"event": event}
        for name, value in fields.items():
            line[name] = _plain(value, where=f"{event}.{name}")
        text = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._lock:
            with _write_errors(self._path):
                hit("ledger.write")
                rest = memoryview(text)
                while rest:  # a full disk takes a part first, and then raises
                    rest = rest[self._file.write(rest) :]
                hit("ledger.written")
                self._hash.update(text)
                self._num_bytes += len(text)
            self._on_write(line)

    def position(self) -> dict:
        """Where the ledger stands, forced to the disk: what `cut` needs to come back to here."""
        with self._lock, _write_errors(self._path):
            os.fsync(self._file.fileno())
            return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        """Closes the file; further writes raise ValueError."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read(path: str | os.PathLike[str]) -> list[dict]:
    """Reads a ledger, also one that is being written.

    Args:
      path: The ledger's file.

    Returns:
      One dict per line, in order. A last line that was cut short is left out.

    Raises:
      DataError: If the file cannot be read, or a line other than a cut last one is no event.
    """
    try:
        *lines, rest = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the ledger ({error.strerror}); "
            f"name the folder of a run, one that holds ledger.jsonl"
        ) from error
    events = []
    for number, line in enumerate(lines, start=1):
        event = _parse(line)
        if event is None:
            raise DataError(
                f"{path}:{number}: expected a JSON object with the key 'event', found "
                f"{line[:40]!r}; {_ADVICE}"
            )
        events.append(event)
    last = _parse(rest)
    return events if last is None else [*events, last]


def finish(events: Iterable[dict]) -> dict | None:
    """The last line of a run that has come to its end and has not begun again since."""
    marks = [event for event in events if event["event"] in ("start", "end")]
    return marks[-1] if marks and marks[-1].get("reason") == "finished" else None


def batch_history(events: Iterable[dict], *, num_trainers: int) -> dict[str, list[int]]:
    """The requested batches of a run, for another run to use again.

    Args:
      events: The ledger's lines.
      num_trainers: Of the run that will use them. If the recorded one had as many, each trainer has
        its own batches; else all have the mean over the round's workers, rounded up.

    Returns:
      Sequences per worker by trainer id and round; empty if the ledger has no round.
    """
    rounds: dict[int, list[dict]] = {}
    for event in events:
        if event["event"] == "round":
            rounds.setdefault(event["round"], []).append(event)
    if not rounds:
        return {}
    own = len(rounds[min(rounds)]) == num_trainers
    history: dict[str, list[int]] = {}
    for index in sorted(rounds):
        lines = rounds[index]
        workers = sum(line["workers"] for line in lines)
        asked = sum(line["requested_batch_size"] * line["workers"] for line in lines)
        by_id = {line["trainer"]: line["requested_batch_size"] for line in lines}
        for trainer in range(num_trainers):
            past = history.setdefault(str(trainer), [])
            past.append(
                by_id.get(trainer, past[-1] if past else 0) if own else -(-asked // workers)
            )
    return history


def cut(path: str | os.PathLike[str], position: dict) -> None:
    """Takes a ledger back to where it stood when a checkpoint was written.

    What came after will be run, and recorded, again; of the lines that will not (starts, compile
    events, checkpoints, ends) none is lost. The file is replaced as a whole.

    Args:
      path: The ledger's file.
      position: From `Ledger.position`; zero bytes for a run without a checkpoint.

    Raises:
      CheckpointError: If the ledger does not begin with what it held then.
    """
    path = Path(path)
    content = path.read_bytes() if path.exists() else b""
    end = _end_of(content, position)
    if end is None:
        raise CheckpointError(
            f"{path}: its first {position['bytes']} bytes are not those that the checkpoint was"
            f" written with; {_ADVICE}"
        )
    head, tail = content[:end], content[end:]
    events = [(line, _parse(line)) for line in tail.splitlines(keepends=True)]
    kept = [
        line
        for line, event in events
        if event is not None and event["event"] not in _REPEATED_EVENTS and line.endswith(b"\n")
    ]
    if len(kept) < len(events):
        _replace(path, head + b"".join(kept))


def rebuild(
    path: str | os.PathLike[str],
    *,
    position: dict,
    round_index: int,
    earlier: Iterable[dict] = (),
) -> dict | None:
    """Replaces a damaged ledger by those of its lines that can be read, and says what is lost.

    As in `cut`, lines of rounds after the checkpoint's go. A last line, "gap", takes the place of
    what the checkpoint was written with, so that the run can go on from there.

    Args:
      path: The ledger's file.
      position: From `Ledger.position`, when the checkpoint was written.
      round_index: Rounds completed then.
      earlier: Positions of older checkpoints, which may tell how far the ledger is intact.

    Returns:
      The "gap" line: `round`; `unreadable_lines`, which were dropped; `lost_rounds`, of which no
      line is left; `intact_bytes`, the beginning that is known to be as it was written, while of
      the lines after it this is not known; the `position` replaced and what was `kept`. None if
      nothing is damaged: then nothing is written.

    Raises:
      ResourceError: If the disk takes no more.
    """
    path = Path(path)
    content = path.read_bytes() if path.exists() else b""
    *lines, rest = content.split(b"\n")
    if _parse(rest) is not None:  # else it is the line that a killed process left
        lines.append(rest)
    end, offset, unreadable, kept, rounds = _end_of(content, position), 0, 0, b"", set()
    for line in lines:
        event, offset = _parse(line), offset + len(line) + 1
        if event is None:
            unreadable += 1
            continue
        in_head = end is not None and offset <= end
        number = event.get("round")
        is_before = end is None and type(number) is int and number <= round_index
        if in_head or is_before or event["event"] not in _REPEATED_EVENTS:
            kept += line + b"\n"
            rounds |= {number} if event["event"] == "round" else set()
    if end is not None and not unreadable:
        return None
    known = [each["bytes"] for each in (position, *earlier) if _holds(content, each)]
    gap = {
        "event": "gap",
        "round": round_index,
        "unreadable_lines": unreadable,
        "lost_rounds": [number for number in range(1, round_index + 1) if number not in rounds],
        "intact_bytes": max(known, default=0),
        "position": position,
        "kept": {"bytes": len(kept), "sha256": hashlib.sha256(kept).hexdigest()},
    }
    _replace(path, kept + json.dumps(gap).encode() + b"\n")
    return gap


def _holds(content: bytes, position: dict) -> bool:
    """Whether a ledger begins as it did at a position."""
    return hashlib.sha256(content[: position["bytes"]]).hexdigest() == position["sha256"]


def _end_of(content: bytes, position: dict) -> int | None:
    """Where the lines up to a position end, or those that `rebuild` left of them."""
    if _holds(content, position):
        return position["bytes"]
    found, end = None, 0
    for line in content.splitlines(keepends=True):
        start, end = end, end + len(line)
        event = _parse(line) or {"event": ""}
        if (event["event"], event.get("position")) == ("gap", position):
            kept = {"bytes": start, "sha256": hashlib.sha256(content[:start]).hexdigest()}
            found = end if event.get("kept") == kept else found
    return found


def _replace(path: Path, content: bytes) -> None:
    """Replaces the file as a whole."""
    replacement = path.with_name(".ledger.jsonl")
    with _write_errors(path):
        hit("ledger.cut")
        with open(replacement, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        hit("ledger.cut_written")
        os.replace(replacement, path)
        hit("ledger.cut_renamed")


def deterministic_lines(events: Iterable[dict]) -> list[dict]:
    """What two runs with one seed must have in common, for comparing them with `==`.

    Args:
      events: Ledger lines, as `read` gives them.

    Returns:
      The round, sync, eval, merge and refusal lines in order, without the fields ending in `_s`
      (seconds).
    """
    return [
        {name: value for name, value in event.items() if not name.endswith("_s")}
        for event in events
        if event["event"] in _DETERMINISTIC_EVENTS
    ]


def _mend(path: Path) -> None:
    """Ends the last line of an existing ledger: completes it if it is whole, else cuts it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        rest = content[content.rfind(b"\n") + 1 :]
        if _parse(rest) is not None:
            file.write(b"\n")
        elif rest:
            file.truncate(len(content) - len(rest))


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written ({error.strerror}); make room or grant access, and run the"
            " same command again"
        ) from error


def _parse(line: bytes) -> dict | None:
    """The event on a line, or None if there is none."""
    try:
        event = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _plain(value: object, *, where: str) -> object:
    """`value` as plain JSON; `where` names the field for the error."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, where=where) for item in value]
    if isinstance(value, dict):
        return {_plain_key(k, where=where): _plain(v, where=where) for k, v in value.items()}
    raise TypeError(
        f"ledger field {where}: no plain JSON form for {type(value).__name__}; "
        f"pass a string, a number, a boolean, None, or lists and dicts of them"
    )


def _plain_key(key: object, *, where: str) -> str:
    """A dict's key: JSON has strings only, so a trainer's id becomes its decimal form."""
    if isinstance(key, str):
        return key
    if isinstance(key, int | np.integer):
        return str(int(key))
    raise TypeError(f"ledger field {where}: a key is a {type(key).__name__}, not a string or int")
