"""Read and write files: check the content of JSON files, hash files, replace files atomically.

A folder may be damaged or foreign, so `checked` compares what JSON files hold with their format.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from adloco_jax.errors import ConfigError, ResourceError, remedy

# Largest JSON file that is read. It has room for the records of a million source files, and limits
# the memory that reading needs.
MAX_JSON_BYTES = 2**28
PIECE_BYTES = 8 * 2**20  # bytes of a request to a bucket; larger objects are sent in pieces
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Seconds = Annotated[float, Field(gt=-1e12, lt=1e12)]
Pair: TypeAlias = Annotated[tuple[A, B], Strict(False)]  # a list of two in JSON


class Format(BaseModel):
    """Base of what a JSON object must have; other fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


def checked(value: Any, kind: type[T], name: str, error: type[Exception]) -> T:
    """Return a JSON value as a format says; raise `error` with the first fault in one line."""
    try:
        return _adapter(kind).validate_python(value, extra="ignore")
    except ValidationError as faults:
        first = faults.errors()[0]
        where = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        need = first["msg"].replace("Input should be", "expected")
        have = "" if first["type"] == "missing" else f"have {repr(first['input'])[:60]}, "
        raise error(f"{name}{''.join(where)}: {have}{need}") from faults


_adapter = functools.cache(TypeAdapter)


def read_json(
    path: Path, error: type[Exception], *, max_bytes: int | None = None, links: bool = False
) -> dict:
    """Read a JSON object of at most `max_bytes` (None: `MAX_JSON_BYTES`) from a file.

    Raises `error`, called with one line of text, if the file is missing, too large, no JSON object,
    or a symbolic link without `links`.
    """
    fault, limit = "missing or not a regular file", max_bytes or MAX_JSON_BYTES
    try:
        if path.is_file() and (links or not path.is_symlink()):
            fault = f"larger than {limit} bytes"
            if path.stat().st_size <= limit:
                content = json.loads(path.read_bytes())
                if isinstance(content, dict):
                    return content
                fault = f"have a JSON {type(content).__name__}, need an object"
    except (OSError, ValueError, RecursionError) as cause:
        fault = f"no readable JSON ({cause})"
    raise error(f"{path}: {fault}")


def with_tuples(value: Any) -> Any:
    """Replace the lists of a JSON value by tuples, which settings have.

    Pydantic would do so for JSON text, but refuses the surrogates in file names that are no UTF-8.
    """
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def file_sha256(path: Path) -> str:
    """Compute the SHA-256 hash of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write a file's content, or a folder's list of entries, from the system's buffers to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path`, once on disk, when the block ends without an error."""
    partial = local_path(path).with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that replaces `folder`, once on disk, when the block ends without an error."""
    partial = local_path(folder).with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    mode = partial.stat().st_mode & 0o666  # what the umask leaves; some libraries write 0600
    for path in [*partial.rglob("*"), partial]:
        if path.is_file():
            path.chmod(mode)
        sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def local_path(path: str | Path, where: str = "") -> Path:
    """Return the path of something to write.

    Raises ConfigError if it is an address, of which `Path` would make folders, or if no file can
    have this name.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ConfigError(f"{where}{path}: an address; name a path here, and copy what is written")
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
    except (OSError, ValueError) as error:  # the name is too long or has a NUL
        raise ConfigError(f"{where}{str(path)[:200]!r}: {error}; name another") from error
    return Path(path)


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError that the block raises into a `ResourceError` about writing `path`."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written ({error.strerror}); {remedy(error)}"
        ) from error
