"""Read and write files: check the content of JSON files, hash files, replace files atomically.

A folder may be damaged or foreign, so `fault` checks what JSON files hold before it is used.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from adloco_jax.errors import ConfigError, ResourceError, remedy

# Largest JSON file that is read. It has room for the records of a million source files, and limits
# the memory that reading needs.
MAX_JSON_BYTES = 2**28
PIECE_BYTES = 8 * 2**20  # bytes of a request to a bucket; larger objects are sent in pieces
Size = typing.NewType("Size", int)  # an integer of at least 1
_MOST_SECONDS = 1e12  # upper limit of durations and times in JSON files
_WORDS = {
    Size: "a count from 1 on",
    int: "a count",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "an object",
}


T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Format(BaseModel):
    """Base of what a JSON object must have; its lists are tuples, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


def checked(value: Any, kind: type[T] | TypeAdapter[T], name: str, error: type[Exception]) -> T:
    """Return a JSON value as a format says; raise `error` with the first fault in one line."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_python(with_tuples(value))
    except ValidationError as faults:
        first = faults.errors()[0]
        where = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        need = first["msg"].replace("Input should be", "expected")
        have = "" if first["type"] == "missing" else f"have {repr(first['input'])[:60]}, "
        raise error(f"{name}{''.join(where)}: {have}{need}") from faults


def requests_to_get(num_bytes: int) -> int:
    """Return how many requests read an object of a bucket."""
    return max(1, -(-num_bytes // PIECE_BYTES))


def requests_to_put(num_bytes: int) -> int:
    """Return how many requests write an object: one, or a start, its pieces and an end."""
    pieces = -(-num_bytes // PIECE_BYTES)
    return 1 if pieces == 1 else pieces + 2


class Maybe(NamedTuple):
    """Marks a field that may be missing, in a mapping from fields to types that `fault` checks."""

    kind: Any  # type of the field if it is there


class FileRecord(typing.TypedDict):
    """The record of a text file that a run has read. Of its fields only `name` is required."""

    name: str


def read_json(
    path: Path, error: type[Exception], *, max_bytes: int | None = None, links: bool = False
) -> dict:
    """Read a JSON object of at most `max_bytes` (None: `MAX_JSON_BYTES`) from a file.

    Raises `error`, called with one line of text, if the file is missing, too large, no JSON object,
    or a symbolic link without `links`.
    """
    try:
        if not path.is_file() or (path.is_symlink() and not links):
            raise error(f"{path}: missing or not a regular file")
        if path.stat().st_size > (max_bytes or MAX_JSON_BYTES):
            raise error(f"{path}: larger than {max_bytes or MAX_JSON_BYTES} bytes")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path}: no readable JSON ({cause})") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: have a JSON {type(content).__name__}, need an object")
    return content


def fault(value: Any, kind: Any, name: str) -> str:
    """Describe the first part of a JSON value whose type or range is wrong; empty if none.

    `kind` is an annotation, a dataclass, a pydantic model, or a mapping from fields to types;
    fields that a model or a mapping lacks are not checked.
    """
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        try:
            kind.model_validate(with_tuples(value), extra="ignore")
        except ValidationError as error:
            first = error.errors()[0]
            where = (f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
            need = first["msg"].replace("Input should be", "expected")
            if first["type"] == "model_type":
                need = f"expected {_WORDS[dict]}"
            return f"{name}{''.join(where)}: have {repr(first['input'])[:60]}, {need}"
        return ""
    if origin in (typing.Union, UnionType):
        faults = [fault(value, m, name) for m in members if m is not NoneType]
        return "" if "" in faults or (value is None and NoneType in members) else faults[0]
    parts: dict[str, tuple[Any, Any]] = {}  # value and kind of each part, by name
    if kind in (Any, *_WORDS):  # a tuple, because `kind` may be a mapping, which has no hash
        is_well, expected = _is(value, kind, name), _WORDS.get(kind, "")
    elif origin is Literal:
        is_well, expected = type(value) is str and value in members, " or ".join(map(repr, members))
    elif origin in (list, tuple):
        kinds = members if origin is tuple and ... not in members else None
        is_well, expected = type(value) is list and len(kinds or value) == len(value), "a list"
        if is_well:
            pairs = zip(value, kinds or members[:1] * len(value), strict=True)
            parts = {f"[{index}]": pair for index, pair in enumerate(pairs)}
    else:
        is_well, expected = type(value) is dict, _WORDS[dict]
        if is_well and origin is dict:
            parts = {f".{key}": (item, members[1]) for key, item in value.items()}
        elif is_well:
            fields = kind if isinstance(kind, dict) else typing.get_type_hints(kind)
            for key, part in fields.items():
                is_optional = isinstance(part, Maybe)
                if key in value:
                    parts[f".{key}"] = value[key], part.kind if is_optional else part
                elif not is_optional:
                    return f"{name}.{key}: missing"
    if not is_well:
        return f"{name}: have {repr(value)[:60]}, expected {expected}"
    faults = (fault(item, part, f"{name}{key}") for key, (item, part) in parts.items())
    return next(filter(None, faults), "")


def with_tuples(value: Any) -> Any:
    """Replace the lists of a JSON value by tuples, which settings have.

    Pydantic would do so for JSON text, but refuses the surrogates in file names that are no UTF-8.
    """
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def _is(value: Any, kind: Any, name: str) -> bool:
    if kind in (int, Size):
        return type(value) is int and int(kind is Size) <= value < 2**63
    if kind is float:  # JSON may have an integer here, and it may be too large for a float
        limit = _MOST_SECONDS if name.endswith(("_s", ".seconds")) else 2**1023
        return type(value) in (int, float) and abs(value) < limit
    return kind is Any or type(value) is kind


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

    Raises ConfigError if it is an address, of which `Path` would make folders, or a link in it
    leads nowhere.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ConfigError(f"{where}{path}: an address; name a path here, and copy what is written")
    for part in (Path(path), *Path(path).parents):
        if part.is_symlink() and not part.exists():
            raise ConfigError(f"{where}{path}: {part} is a link that leads nowhere; remove it")
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
