"""Tokens that an unfinished preparation has saved, so that it can continue after a kill."""

import contextlib
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.files import replaced_file

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
