"""Documents from files: the Python library itself, text, JSON lines, and arrays of tokens."""

import glob
import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adloco_jax.errors import ConfigError, DataError

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def find_files(path: str, *, key: str) -> list[Path]:
    """Files that a config value means, in the order of their paths.

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
    start = Path(path).expanduser()
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


def text_documents(files: Sequence[Path]) -> Iterator[str]:
    """One document per file that is not empty.

    Raises:
      DataError: While reading, if a file is unreadable or not UTF-8.
    """
    for file in files:
        if text := _read_text(file):
            yield text


def jsonl_documents(files: Sequence[Path], *, text_column: str) -> Iterator[str]:
    """One document per JSON line (C4's layout); blank lines and empty texts are none.

    Args:
      files: `.jsonl` or `.json`, each also with `.gz`.
      text_column: Name of the field that holds the text.

    Raises:
      DataError: While reading, naming file and line, if a file has another suffix, is empty,
        truncated or no valid gzip, or a line is not a JSON object with a string of text.
    """
    for file in files:
        if file.name.removesuffix(".gz").rpartition(".")[2] not in ("json", "jsonl"):
            raise DataError(
                f"{file}: data.source=jsonl reads .jsonl and .json, each also with .gz; "
                "a glob leaves other files out"
            )
        number = 0
        open_file = gzip.open if file.suffix == ".gz" else open
        try:
            with open_file(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip() and (text := _json_text(line, f"{file}:{number}", text_column)):
                        yield text
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file}: damaged after line {number} ({error})") from error
        if number == 0:
            raise DataError(f"{file}: empty, need one JSON object per line")


def open_tokens(file: Path, *, row_length: int) -> np.ndarray:
    """Memory-maps an `.npy` array of token ids.

    Args:
      file: A stream of tokens [T], or packed rows [N, row_length].
      row_length: `data.sequence_length` plus one.

    Returns:
      The array as stored, read-only.

    Raises:
      DataError: If the file is no whole `.npy` array, or its type or shape is another.
    """
    try:
        tokens = np.lib.format.open_memmap(file, mode="r")
    except (OSError, ValueError) as error:
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
    """Splits a lone document at the blank line nearest to 1 - heldout_frac of its length.

    A blank line that would move the cut by more than half of the held-out part gives way to the
    nearest newline.

    Raises:
      DataError: If there is no newline to cut at.
    """
    target = (1 - heldout_frac) * len(text)
    for separator, slack in (
        ("\n\n", heldout_frac * len(text) / 2),
        ("\r\n\r\n", heldout_frac * len(text) / 2),
        ("\n", len(text)),
    ):
        ends = (
            text.rfind(separator, 0, int(target)) + len(separator),
            text.find(separator, max(0, int(target) - len(separator))) + len(separator),
        )
        cuts = [e for e in ends if len(separator) < e < len(text) and abs(e - target) <= slack]
        if cuts:
            cut = min(cuts, key=lambda end: abs(end - target))
            return text[:cut], text[cut:]
    raise DataError(
        f"{where}: the only document has no line break to cut a held-out part off at; need two "
        "documents, or data.heldout_path"
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 at byte {error.start} ({error.reason})") from error
    except OSError as error:
        raise DataError(f"{file}: unreadable ({error.strerror})") from error


def _json_text(line: bytes, where: str, text_column: str) -> str:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line") from error
    except ValueError as error:
        raise DataError(f"{where}: not one JSON object per line ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: have a JSON {type(record).__name__}, need an object")
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
