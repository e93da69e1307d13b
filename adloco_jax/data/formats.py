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
