"""Documents from files: the Python library itself, text, JSON lines, and arrays of tokens."""

import codecs
import dataclasses
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from adloco_jax.errors import ConfigError, DataError

T = TypeVar("T")

MAX_LINE_BYTES = 2**24  # of one JSON line: no document is longer, and memory has a bound
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclasses.dataclass
class Intake:
    """A record of what has been read.

    Attributes:
      shards: One JSON record per file, in reading order: `name`, `bytes`, `sha256` and `rows`, the
        documents taken from it.
    """

    shards: list[dict] = dataclasses.field(default_factory=list)

    def read(
        self,
        files: Iterable[Path],
        rows_of: Callable[[Path], Iterable[T]],
        check: Callable[[Path], object] | None = None,
    ) -> Iterator[T]:
        """Rows of files in order, with a record of each file.

        Args:
          files: To be read.
          rows_of: Rows of a file; empty ones are skipped.
          check: Raises DataError for a damaged file, before any of its rows is used.

        Raises:
          DataError: While reading, if a file is damaged.
        """
        for file in files:
            if check is not None:
                check(file)
            record = self._new_record(file.name, file.stat().st_size, file_sha256(file))
            yield from self._take(rows_of(file), record)

    def read_unfiled(self, name: str, rows: Iterable[str]) -> Iterator[str]:
        """Texts that no file holds; their record has the bytes and SHA-256 of those taken.

        Args:
          name: For the record.
          rows: Texts; empty ones are skipped.
        """
        record, digest = self._new_record(name, 0, ""), hashlib.sha256()
        for text in self._take(rows, record):
            content = text.encode()
            digest.update(content + b"\0")
            record["bytes"] += len(content)
            yield text
        record["sha256"] = digest.hexdigest()

    def _new_record(self, name: str, size: int, sha256: str) -> dict:
        record = {"name": name, "bytes": size, "sha256": sha256, "rows": 0}
        self.shards.append(record)
        return record

    def _take(self, rows: Iterable[T], record: dict) -> Iterator[T]:
        """The rows that are not empty, counted in `record`."""
        for row in rows:
            if row:
                record["rows"] += 1
                yield row


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def shard_changes(before: Sequence[dict], after: Sequence[dict]) -> list[str]:
    """The files that differ between two reads, a line each.

    Args:
      before: Records of the earlier read, see `Intake.shards`.
      after: Records of the later one.
    """
    old = {record["name"]: record.get("sha256") for record in before}
    new = {record["name"]: record.get("sha256") for record in after}
    lines = [f"{name}: no longer there" for name in old if name not in new]
    lines += [f"{name}: was not there before" for name in new if name not in old]
    lines += [f"{name}: edited" for name in old if name in new and old[name] != new[name]]
    if not lines and list(old) != list(new):
        lines.append("the same files in another order")
    return lines


def local_path(name: str, *, key: str) -> Path:
    """The path that a config value names, with `~` expanded; it need not exist.

    Args:
      name: The value.
      key: The config key, for messages.

    Raises:
      DataError: If it cannot be accessed: too long, of an unknown user, in a closed folder.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{key}={name[:200]}: no path that can be read ({reason})") from error
    return path


def find_files(path: str, *, key: str) -> list[Path]:
    """Files that a config value names, in the order of their paths.

    Args:
      path: A file, a folder (every regular file in it, at any depth), or a glob.
      key: The config key, for messages.

    Returns:
      At least one file; an existing path is never read as a glob.

    Raises:
      ConfigError: If `path` is empty.
      DataError: If it leads to no file.
    """
    if not path:
        raise ConfigError(f"{key} is empty: give a file, a folder or a glob")
    start = local_path(path, key=key)
    if start.is_file():
        return [start]
    if start.is_dir():
        files = [file for file in start.rglob("*") if file.is_file()]
        missing = "an empty folder"
    else:
        found = glob.glob(str(start), recursive=True)
        files = [file for file in map(Path, found) if file.is_file()]
        missing = "no file matches" if glob.has_magic(path) else "no such file or folder"
    if not files:
        raise DataError(f"{key}={path}: {missing}")
    return sorted(files, key=Path.as_posix)


def stdlib_documents() -> Iterator[str]:
    """Sources and documentation topics of the running Python, by path, a file or topic each.

    Left out: tests, installed packages, and files that the build wrote for this machine.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py"), key=Path.as_posix):
        folders = file.relative_to(root).parts[:-1]
        if all(f.isidentifier() and f not in _TEST_FOLDERS for f in folders):  # site-packages: no
            if file.name == "topics.py":  # pydoc_data: one dict of texts
                from pydoc_data.topics import topics

                yield from (topics[name] for name in sorted(topics))
            elif not file.name.startswith("_sysconfigdata"):
                yield _read_text(file)


def text_documents(files: Sequence[Path], intake: Intake) -> Iterator[str]:
    """One document per file that is not empty.

    Args:
      files: To be read.
      intake: Records what is read.

    Raises:
      DataError: While reading, if a file is unreadable or not UTF-8.
    """
    return intake.read(files, lambda file: [_read_text(file)], check=_read_text)


def jsonl_documents(files: Sequence[Path], intake: Intake, *, text_column: str) -> Iterator[str]:
    """One document per JSON line (C4's layout), except blank lines and empty texts.

    A file is decompressed to its end before any of its lines is used: most truncated gzip files
    give rows first and an error later. A byte-order mark and CRLF are accepted.

    Args:
      files: `.jsonl` or `.json`, each also with `.gz`.
      intake: Records what is read.
      text_column: Name of the field that holds the text.

    Raises:
      DataError: While reading, naming file and line, if a file has another suffix, is empty,
        truncated or no valid gzip, or a line is longer than
        `MAX_LINE_BYTES` or not a JSON object with one string of text.
    """
    return _json_lines(files, intake, lambda record, where: _text(record, where, text_column))


def labelled_documents(
    files: Sequence[Path], intake: Intake, *, text_column: str, label_column: str, num_classes: int
) -> Iterator[tuple[str, int]]:
    """Text and class of every JSON line that is not blank, read as by `jsonl_documents`.

    Args:
      files: `.jsonl` or `.json`, each also with `.gz`.
      intake: Records what is read.
      text_column: Name of the field that holds the text.
      label_column: Name of the field that holds the class.
      num_classes: C; a class is a whole number in [0, C).

    Raises:
      DataError: As `jsonl_documents`, and for an empty text or a label that is no class.
    """

    def read(record: dict, where: str) -> tuple[str, int]:
        text, label = _text(record, where, text_column), record.get(label_column)
        if not text:
            raise DataError(f"{where}: {text_column!r} is empty")
        if type(label) is not int or not 0 <= label < num_classes:
            raise DataError(
                f"{where}: {label_column!r}: have {str(label)[:40]}, need a class from 0 to "
                f"{num_classes - 1} (model.num_classes={num_classes})"
            )
        return text, label

    return _json_lines(files, intake, read)


def _json_lines(
    files: Sequence[Path], intake: Intake, read: Callable[[dict, str], T]
) -> Iterator[T]:
    """What `read` makes of the object on each line that is not blank."""
    for file in files:
        if file.name.removesuffix(".gz").rpartition(".")[2] not in ("json", "jsonl"):
            raise DataError(
                f"{file}: data.source=jsonl reads .jsonl and .json, each also with .gz; "
                "a glob leaves other files out"
            )

    def rows_of(file: Path) -> Iterator[T]:
        for number, line in _lines(file):
            where = f"{file}:{number}"
            yield read(_json_object(line, where), where)

    yield from intake.read(files, rows_of, check=_check_decompresses)


def open_tokens(file: Path, *, row_length: int) -> np.ndarray:
    """Memory-map an `.npy` array of token ids.

    Args:
      file: A stream of tokens [T], or packed rows [N, row_length].
      row_length: `data.sequence_length` plus one.

    Returns:
      The array as stored, read-only.

    Raises:
      DataError: If the file is no whole `.npy` array, or its type or shape is another.
    """
    try:
        with np.errstate(over="raise"):  # a forged shape's size wraps around to a small one
            tokens = np.lib.format.open_memmap(file, mode="r")
    except (OSError, ValueError, FloatingPointError) as error:
        raise DataError(f"{file}: no readable, whole .npy array of integers ({error})") from error
    if not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"{file}: token ids are integers, have {tokens.dtype}")
    if tokens.ndim == 2 and tokens.shape[1] != row_length:
        raise DataError(
            f"{file}: rows of {tokens.shape[1]} tokens, need {row_length} (data.sequence_length "
            f"{row_length - 1} and the token to predict last)"
        )
    if tokens.ndim not in (1, 2):
        raise DataError(f"{file}: have {tokens.ndim} dimensions, need a stream (1) or rows (2)")
    return tokens


def cut_in_two(text: str, *, where: str, heldout_frac: float) -> tuple[str, str]:
    """Split a single document at the blank line nearest to 1 - heldout_frac of its length.

    Where that would move the cut by more than half of the held-out part, the nearest newline is
    used instead.

    Args:
      text: The document.
      where: The key and value it comes from, for messages.
      heldout_frac: Share of its characters to hold out, in (0, 1).

    Raises:
      DataError: If there is no newline to cut at.
    """
    target = (1 - heldout_frac) * len(text)
    blank_line, newline = r"(?<=\n\n)|(?<=\r\n\r\n)", r"(?<=\n)"
    for pattern, slack in ((blank_line, heldout_frac * len(text) / 2), (newline, len(text))):
        ends = (match.end() for match in re.finditer(pattern, text) if match.end() < len(text))
        cut = min(ends, key=lambda end: abs(end - target), default=0)
        if cut and abs(cut - target) <= slack:
            return text[:cut], text[cut:]
    raise DataError(
        f"{where}: the only document has no line break to cut a held-out part off at; need two "
        "documents, or data.heldout_path"
    )


def _check_decompresses(file: Path) -> None:
    """DataError for a file that is empty, or cannot be read to its end."""
    try:
        size = 0
        with _opened(file) as content:  # to the end, where gzip has its checksum
            while part := content.read(2**20):
                size += len(part)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: damaged or unreadable ({error})") from error
    if not size:
        raise DataError(f"{file}: empty, need one JSON object per line")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, stripped, with their numbers from 1; too long ones are cut."""
    with _opened(file) as lines:
        for number in itertools.count(1):
            line = rest = lines.readline(MAX_LINE_BYTES + 1)
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = lines.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if line := (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                yield number, line


def _opened(file: Path) -> io.BufferedIOBase:
    return gzip.open(file) if file.suffix == ".gz" else open(file, "rb")


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: not UTF-8 at byte {error.start} ({error.reason}); convert it, or leave it"
            " out by a glob"
        ) from error
    except OSError as error:
        raise DataError(f"{file}: unreadable ({error.strerror})") from error


def _json_object(line: bytes, where: str) -> dict:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where}: a line of more than {MAX_LINE_BYTES} bytes")
    try:
        record = json.loads(line.decode(), object_pairs_hook=_no_repeated_key)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not one JSON object per line ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: have a JSON {type(record).__name__}, need an object")
    return record


def _text(record: dict, where: str, text_column: str) -> str:
    if text_column not in record:
        raise DataError(
            f"{where}: no field {text_column!r} (data.text_column), have {', '.join(record)}"
        )
    text = record[text_column]
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_column!r} must be a string, have {json.dumps(text)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise DataError(f"{where}: {text_column!r} is not Unicode text ({error.reason})") from error
    return text


def _no_repeated_key(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key stands there twice")
    return record
