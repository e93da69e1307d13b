"""A folder of rows: `train.npy` and `heldout.npy`, described by `prepared.json`.

The description is written last and holds the SHA-256 of both arrays. Training compares the sizes
and trusts these hashes, so that it starts quickly.
"""

import dataclasses
import json
import typing
from pathlib import Path

import numpy as np

from adloco_jax.errors import DataError

MANIFEST = "prepared.json"
FORMAT = 2
_MAX_BYTES = 2**28  # a million source files


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `prepared.json` says.

    Attributes:
      format: Version of this layout.
      request: All that decides the rows, as plain JSON; see `corpus.make_job`.
      tokenizer: The name it was given.
      fingerprint: The tokenizer's fingerprint, see `Tokenizer`.
      vocab_size: Largest id plus one.
      eot_id: The id that closes a document.
      shapes: Shapes of the training rows and of the held-out rows. A row has L+1 integers, or for
        a labelled text two more than its tokens.
      hashes: SHA-256 (hex) of the two files.
      documents: Numbers of training and of held-out documents; the last may end beyond the rows.
      tokens_per_byte: Held-out tokens over held-out UTF-8 bytes.
      files: A record per file: `name`, `rows` (its documents) and, if it is on this machine,
        `bytes` and `sha256`.
      copies: Documents that are not trained on because a copy is held out.
      truncated: Labelled texts that were longer than a row.
    """

    format: int
    request: dict
    tokenizer: str
    fingerprint: str
    vocab_size: int
    eot_id: int
    shapes: list[list]
    hashes: list[str]
    documents: list[int]
    tokens_per_byte: float
    files: list[dict]
    copies: int
    truncated: int


def row_dtype(vocab_size: int, *, labelled: bool) -> np.dtype:
    """The dtype of stored rows: the smallest that holds the ids, or int32 for labelled texts."""
    return np.dtype(np.int32) if labelled else np.min_scalar_type(max(vocab_size - 1, 0))


def is_prepared(path: str | Path) -> bool:
    """Whether a folder has a description of rows."""
    try:
        return (Path(path).expanduser() / MANIFEST).is_file()
    except (OSError, RuntimeError):  # no path at all: opening it raises the clear error
        return False


def read_prepared(folder: Path) -> Manifest:
    """Read a folder's `prepared.json`.

    Raises:
      DataError: If it is missing, damaged or of another format.
    """
    path, values = folder / MANIFEST, {}
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: larger than {_MAX_BYTES} bytes, no description of rows")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: unreadable ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged, no JSON ({error})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int or version != FORMAT:
        raise DataError(f"{path}: format {version!r:.40}, need {FORMAT}; prepare the data again")
    for field in dataclasses.fields(Manifest):
        value = values[field.name] = content.get(field.name)
        kind, items = typing.get_origin(field.type) or field.type, typing.get_args(field.type)
        is_good = type(value) is kind
        is_good = is_good and (not items or all(type(item) is items[0] for item in value))
        if not is_good or (kind in (int, float) and not value >= 0):
            raise DataError(f"{path}: damaged, {field.name} is {value!r:.40}")
    manifest = Manifest(**values)
    is_named = all(isinstance(record.get("name"), str) for record in manifest.files)
    if not is_named or {len(manifest.shapes), len(manifest.hashes), len(manifest.documents)} != {2}:
        raise DataError(f"{path}: damaged, a file has no name, or there are not two sides")
    return manifest


def open_rows(folder: Path, manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map the training and the held-out rows; of their content, nothing is checked.

    Raises:
      DataError: If an array is missing, a link out of the folder, or not as described.
    """
    dtype = row_dtype(manifest.vocab_size, labelled=bool(manifest.request.get("num_classes")))
    arrays = []
    for name, shape in zip(("train.npy", "heldout.npy"), manifest.shapes, strict=True):
        file = folder / name
        if not file.is_file() or file.resolve().parent != folder.resolve():
            raise DataError(f"{file}: missing, or a link out of the folder; prepare the data again")
        try:
            with np.errstate(over="raise"):  # a forged shape's size wraps around to a small one
                rows = np.lib.format.open_memmap(file, mode="r")
            is_whole = file.stat().st_size == rows.offset + rows.nbytes
        except (OSError, ValueError, FloatingPointError) as error:
            raise DataError(f"{file}: no whole .npy array ({error}); prepare it again") from error
        if not is_whole or (list(rows.shape), rows.dtype) != (shape, dtype):
            raise DataError(
                f"{file}: {rows.dtype} of shape {rows.shape}, {MANIFEST} says {dtype} of {shape}"
                " and no more; damaged, prepare the data again"
            )
        arrays.append(rows)
    return arrays[0], arrays[1]
