"""A folder of rows: `train.npy` and `heldout.npy`, described by `prepared.json`.

The description is written last and holds the SHA-256 of both arrays. Training compares the sizes
and trusts these hashes, so that it starts quickly. `Kept` holds the
tokens that an unfinished preparation has saved, so that it can continue after a kill.
"""

import contextlib
import dataclasses
import json
import typing
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.files import FileRecord, fault, read_json, replaced_file

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


DOCUMENT = np.dtype(
    [("length", "<i8"), ("num_bytes", "<i8"), ("digest", "<u8"), ("label", "<i8"), ("side", "<i8")]
)
"""A document: its number of tokens with the end of text, its UTF-8 bytes, a hash of its ids without
the end of text, its class, and 1 if it is of separate held-out text (else 0)."""


class Kept:
    """The tokens and documents read so far, in pieces on disk.

    Attributes:
      part: Index of the file to read next.
      documents: How many documents of that file are kept already.
      files: Records of the files that were read to their end.
      num_tokens: Tokens of all kept documents.
    """

    def __init__(self, partial: Path, request: dict):
        """Reads the pieces that are there."""
        self._folder, self._about = partial, [np.empty(0, DOCUMENT)]
        self._counts: list[int] = []
        self.files: list[dict] = []
        self.part = self.documents = self.num_tokens = 0
        path = partial / "request.json"
        if path.exists():
            require_same(partial, json.loads(path.read_bytes()), request)
        with replaced_file(path) as file:
            file.write(json.dumps(request).encode())
        while (path := self._path(len(self._counts))).exists():
            with self._opened(path) as content:
                self._note(content["about"], **json.loads(str(content["progress"])))

    @property
    def about(self) -> np.ndarray:
        """`DOCUMENT` [N]: all documents so far."""
        self._about = [np.concatenate(self._about)]
        return self._about[0]

    def add(
        self, tokens: np.ndarray, about: np.ndarray, files: list[dict], **position: int
    ) -> None:
        """Saves a piece: documents, records of files that ended in it, and the next position."""
        progress = np.array(json.dumps({"files": files} | position))
        arrays = {"tokens": tokens, "about": about, "progress": progress}
        with replaced_file(self._path(len(self._counts))) as file:
            np.savez(file, **arrays)
        self._note(about, files, **position)

    def pieces(self) -> Iterator[tuple[np.ndarray, slice]]:
        """Tokens in order, each piece with the slice of all documents that it holds."""
        first = 0
        for number, count in enumerate(self._counts):
            with self._opened(self._path(number)) as content:
                yield content["tokens"], slice(first, first + count)
            first += count

    def _note(self, about: np.ndarray, files: list[dict], part: int, documents: int) -> None:
        self._about.append(about)
        self._counts.append(len(about))
        self.num_tokens += int(about["length"].sum())
        self.files += files
        self.part, self.documents = part, documents

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.npz"

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with open(path, "rb") as file, np.load(file) as content:  # compares checksums
                yield content
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged ({error}); delete {self._folder}") from error


def require_same(folder: Path, there: dict, wanted: dict) -> None:
    """Raise ConfigError if another request made or began the folder."""
    keys = [key for key in there | wanted if there.get(key) != wanted.get(key)]
    if keys:
        raise ConfigError(
            f"{folder}: holds what another request made or began, of which {', '.join(keys)}"
            f" differ{'s' * (len(keys) == 1)}; it is never overwritten: name another folder"
        )
