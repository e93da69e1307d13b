"""Tokens of a preparation that is under way, file by file, so that it can go on after a kill."""

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from adloco_jax.data.files import sync
from adloco_jax.errors import ConfigError, DataError

DOCUMENT = np.dtype(
    [("length", "<i8"), ("num_bytes", "<i8"), ("digest", "<u8"), ("label", "<i8"), ("side", "<i8")]
)
"""Of a document: its tokens with the end of text, its UTF-8 bytes, a hash of its ids without the
end of text, its class, and whether its source is of held-out text alone."""


class Kept:
    """Tokens and documents of files that were read to their end, on disk."""

    def __init__(self, partial: Path, request: dict):
        """Takes up what is there."""
        self._folder, self._pending = partial, [np.empty(0, np.uint8)]
        self._about, self._counts = [np.empty(0, DOCUMENT)], []
        self.state: dict[str, Any] = {"parts": 0, "num_chars": 0, "enough": False}
        self.files: list[dict] = []  # records of those that were read
        path = partial / "request.json"
        if path.exists():
            require_same(partial, json.loads(path.read_bytes()), request)
        self._write(path, lambda file: file.write(json.dumps(request).encode()))
        while (path := self._path(len(self._counts))).exists():
            with self._opened(path) as content:
                self._about.append(content["about"])
                closed = json.loads(str(content["closed"]))
            self._counts.append(len(self._about[-1]))
            self.files, self.state = self.files + closed["files"], closed["state"]
        self.num_tokens = int(self.about["length"].sum())

    @property
    def about(self) -> np.ndarray:
        """`DOCUMENT` [N]: all documents so far."""
        self._about = [np.concatenate(self._about)]
        return self._about[0]

    def add(self, tokens: np.ndarray, about: np.ndarray) -> None:
        """Adds documents of a file that is being read."""
        self._pending.append(tokens)
        self._about.append(about)
        self.num_tokens += len(tokens)

    def close_files(self, files: list[dict], **state: Any) -> None:
        """Keeps the documents so far: their files were read to their end."""
        self.files, self.state = self.files + files, state
        about = self.about[sum(self._counts) :]
        closed = np.array(json.dumps({"files": files, "state": state}))
        tokens = np.concatenate(self._pending[1:] or self._pending)
        self._write(
            self._path(len(self._counts)),
            lambda file: np.savez(file, tokens=tokens, about=about, closed=closed),
        )
        self._counts.append(len(about))
        self._pending = self._pending[:1]

    def pieces(self) -> Iterator[tuple[np.ndarray, slice]]:
        """Tokens in order, and which of all documents they are of."""
        first = 0
        for number, count in enumerate(self._counts):
            with self._opened(self._path(number)) as content:
                yield content["tokens"], slice(first, first + count)
            first += count

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.npz"

    def _write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        new = self._folder / ".new"
        with open(new, "wb") as file:
            write(file)
        sync(new)
        os.replace(new, path)

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        try:
            with open(path, "rb") as file, np.load(file) as content:  # compares checksums
                yield content
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged ({error}); delete {self._folder}") from error


def require_same(folder: Path, there: dict, wanted: dict) -> None:
    """ConfigError if a folder was made or begun by another request."""
    keys = [key for key in there | wanted if there.get(key) != wanted.get(key)]
    if keys:
        raise ConfigError(
            f"{folder}: holds what another request made or began, of which {', '.join(keys)}"
            f" differ{'s' * (len(keys) == 1)}; it is never overwritten: name another folder"
        )
