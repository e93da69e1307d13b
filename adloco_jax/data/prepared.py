"""A folder of rows: `train.npy` and `heldout.npy`, described by `prepared.json`.

The description is written last and holds the SHA-256 of both arrays. Training compares the sizes
and trusts these hashes, so that it starts quickly.
"""

import dataclasses
import typing
from pathlib import Path

import numpy as np

from adloco_jax.errors import DataError
from adloco_jax.files import FileRecord, fault, read_json

MANIFEST = "prepared.json"
FORMAT = 2


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
    shapes: list[list[int]]
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
    path = folder / MANIFEST
    content = read_json(path, DataError)
    if (version := content.get("format")) != FORMAT:
        raise DataError(f"{path}: format {version!r:.40}, need {FORMAT}; prepare the data again")
    kinds = typing.get_type_hints(Manifest) | {"files": list[FileRecord]}
    if found := fault(content, kinds, "prepared"):
        raise DataError(f"{path}: damaged, {found}")
    manifest = Manifest(**{key: content[key] for key in kinds})
    sides = (manifest.shapes, manifest.hashes, manifest.documents)
    if {*map(len, sides)} != {2} or manifest.tokens_per_byte < 0:
        raise DataError(f"{path}: damaged, not two sides, or fewer than no tokens")
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
