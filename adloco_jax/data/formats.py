"""Read JSON, and compare what it holds with a declared format: files may be damaged or foreign."""

import functools
import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError

# Largest JSON file that is read. It has room for the records of a million source files, and limits
# the memory that reading needs.
MAX_JSON_BYTES = 2**28
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
    """Return a JSON value as an instance of `kind`: a `Format`, or another type of pydantic's.

    `name` says in messages what the value is, such as its file. If the value does not fit, raises
    `error` with one line of text about the first fault: `name`, the field, and what is wrong.
    """
    try:  # files of later versions may have more fields, which are ignored
        return _adapter(kind).validate_python(value, extra="ignore")
    except ValidationError as faults:
        first = faults.errors()[0]
        for key in first["loc"]:  # names of fields, and positions in lists
            name += f"[{key}]" if isinstance(key, int) else f".{key}"
        message = first["msg"].replace("Input should be", "expected")
        if first["type"] != "missing":
            message = f"have {repr(first['input'])[:60]}, {message}"
        raise error(f"{name}: {message}") from faults


# Pydantic's validator of a type. It is made once for each type, because this is slow.
_adapter = functools.cache(TypeAdapter)


def read_json(
    path: Path, error: type[Exception], *, max_bytes: int | None = None, links: bool = False
) -> dict:
    """Read a JSON object of at most `max_bytes` (None: `MAX_JSON_BYTES`) from a file.

    Raises `error`, called with one line of text, if the file is missing, too large, not a JSON
    object, or a symbolic link without `links`.
    """
    limit = max_bytes or MAX_JSON_BYTES
    try:
        if not path.is_file() or (path.is_symlink() and not links):
            raise error(f"{path}: missing or not a regular file")
        if path.stat().st_size > limit:
            raise error(f"{path}: larger than {limit} bytes")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as cause:  # the last: nested too deeply
        raise error(f"{path}: no readable JSON ({cause})") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: have a JSON {type(content).__name__}, need an object")
    return content


def with_tuples(value: Any) -> Any:
    """Replace the lists of a JSON value by tuples, at any depth, because settings have tuples.

    Pydantic does this when it reads JSON text itself. But it refuses the surrogates with which
    Python writes file names that are not UTF-8.
    """
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(with_tuples(item) for item in value)
    return value
