"""Read folders of prepared rows: arrays (`ARRAYS`), and `prepared.json`, written last.

A run checks shapes and types, not the hashes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeFloat

from adloco_jax.data.formats import Count, Format, checked, read_json
from adloco_jax.errors import DataError

MANIFEST = "prepared.json"
FORMAT = 6
ARRAYS = ("train.npy", "heldout.npy", "train.starts.npy", "heldout.starts.npy")
ARRAYS += ("train.answers.npy", "heldout.answers.npy")
"""Rows to train on and held-out rows; for packed rows `DocumentRows.starts`, and for chats
`DocumentRows.answers`, of both."""


class FileRecord(Format):
    """A file of text that was read, and for a file of a path or an address, its content's hash."""

    name: str
    rows: Count  # number of documents
    bytes: Count | None = None
    sha256: str | None = None


class Manifest(Format):
    """The content of `prepared.json`, which describes a folder of prepared rows.

    Attributes:
      format: Version of the layout of the folder.
      request: All settings that determine the rows, as plain JSON; see `corpus.make_job`.
      tokenizer: The tokenizer's name in the config.
      fingerprint: The tokenizer's fingerprint.
      vocab_size: Largest id plus one.
      eot_id: The id that closes a document.
      shapes: Shapes of the arrays, in the order of `ARRAYS`; see `Corpus.rows`.
      hashes: SHA-256 (hex) of the arrays' files.
      documents: Number of documents in the rows to train on, and in held-out rows. The last
        document of an array may be cut.
      tokens_per_byte: Number of held-out tokens divided by the number of their UTF-8 bytes.
      files: A record for each file of text.
      copies: Number of documents that are not trained on because a copy of them is held out.
      truncated: Number of labelled texts, or chats, that were cut because they were longer than a
        row.
      dropped: Number of chats that are in no row because no token of them counts.
      only_last: Number of chats of whose answers only the last counts, see `chats.Answers`.
      rejected: Number of chats that are in no row because their label is false.
      bad: Number of rows of the text that `data.skip_bad` has let pass.
      unread: Names of columns and fields of chats that nothing reads, see `chats.Answers`.
    """

    format: Count
    request: dict[str, Any]
    tokenizer: str
    fingerprint: str
    vocab_size: Count
    eot_id: Count
    shapes: Annotated[list[list[Count]], Field(min_length=2, max_length=len(ARRAYS))]
    hashes: list[str]
    documents: Annotated[list[Count], Field(min_length=2, max_length=2)]
    tokens_per_byte: NonNegativeFloat
    files: list[FileRecord]
    copies: Count
    truncated: Count
    dropped: Count
    only_last: Count
    rejected: Count
    bad: Count
    unread: list[str]

    @property
    def loss(self) -> str:
        """The `data.loss` of chats; empty for other text."""
        return self.request.get("loss", "")


def shard_changes(before: Sequence[dict], after: Sequence[dict]) -> list[str]:
    """Describe, file by file, how `Manifest.files` has changed between two reads."""
    old = {record["name"]: record.get("sha256") for record in before}
    new = {record["name"]: record.get("sha256") for record in after}
    lines = [f"{name}: no longer there" for name in old if name not in new]
    lines += [f"{name}: was not there before" for name in new if name not in old]
    lines += [f"{name}: edited" for name in old if name in new and old[name] != new[name]]
    if not lines and list(old) != list(new):
        lines.append("the same files in another order")
    return lines


Opened = tuple[Manifest, list[np.ndarray]]
"""The description of rows, and their memory-mapped arrays, in the order of `ARRAYS`."""


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentRows:
    """Packed rows that say where the document of each token begins, and for chats what counts.

    `rows[index]` is int32 [n, 2 (L + 1)]: the tokens, then for each of them the first position of
    the row to which it attends. With `answers` it is [n, 3 (L + 1)]: then come the weights of the
    tokens' losses, as the bits of float32: zero for tokens that do not count, the same for all that
    do, and with a sum of one in the average row.

    Attributes:
      tokens: The packed tokens, [N, L + 1].
      starts: Positions in all N (L + 1) tokens, int64, ascending: each begins a document.
      answers: Which tokens count, bool [N, L + 1]; None if all do.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray | None = None

    @functools.cached_property
    def num_answer_tokens(self) -> int:
        """Number of tokens that count in all rows of chats."""
        return 0 if self.answers is None else int(np.count_nonzero(self.answers))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of integers in each."""
        parts = 2 if self.answers is None else 3
        return len(self.tokens), parts * self.tokens.shape[1]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tokens)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        """Read the rows at `index`, integers [n]."""
        length = self.tokens.shape[1]
        first_n = np.asarray(index) * length
        rows = np.zeros((len(first_n), self.shape[1]), np.int32)
        rows[:, :length] = self.tokens[index]
        starts_nL, weights_nL = rows[:, length : 2 * length], rows[:, 2 * length :]
        bounds_n2 = np.searchsorted(self.starts, np.stack([first_n, first_n + length], axis=1))
        row_k = np.repeat(np.arange(len(first_n)), np.diff(bounds_n2)[:, 0])
        which_k = np.concatenate([np.arange(0), *(np.arange(*bounds) for bounds in bounds_n2)])
        position_k = self.starts[which_k] - first_n[row_k]
        starts_nL[row_k, position_k] = position_k
        np.maximum.accumulate(starts_nL, axis=1, out=starts_nL)
        if self.answers is not None:
            weight = np.float32(len(self.answers) / self.num_answer_tokens)
            weights_nL.view(np.float32)[:] = self.answers[index] * weight
        return rows


def num_documents(tokens: np.ndarray, starts: np.ndarray | None = None, *answers: Any) -> int:
    """Count the documents of rows from their arrays, as in `DocumentRows`; labelled ones have none.

    Chats are counted without padding.
    """
    if starts is None:
        return len(tokens)
    starts = starts[starts < tokens.size]
    counts = np.logical_or.reduceat(answers[0].reshape(-1), starts) if answers else starts >= 0
    return int(np.count_nonzero(counts))


def row_weights(rows_EL: np.ndarray, sequence_length: int) -> np.ndarray:
    """Return the sum of the weights of each row's tokens, float [E]; one if they have none."""
    width = sequence_length + 1
    if rows_EL.shape[1] != 3 * width:
        return np.ones(len(rows_EL))
    weights_EL = np.ascontiguousarray(rows_EL[:, 2 * width :]).view(np.float32)
    return weights_EL.sum(axis=1, dtype=np.float64)


def row_dtype(vocab_size: int, *, labelled: bool) -> np.dtype:
    """Return the smallest dtype that holds all token ids; int32 for rows of labelled texts."""
    return np.dtype(np.int32) if labelled else np.min_scalar_type(max(vocab_size - 1, 0))


def is_prepared(path: str | Path) -> bool:
    """Whether a folder has a `prepared.json`."""
    try:
        return (Path(path).expanduser() / MANIFEST).is_file()
    except (OSError, RuntimeError):  # not a valid path: opening it raises a clear error
        return False


def read_prepared(folder: Path) -> Manifest:
    """Read the description in a folder of prepared rows; DataError if it is missing or damaged."""
    path = folder / MANIFEST
    content = read_json(path, DataError)
    if (version := content.get("format")) != FORMAT:
        raise DataError(f"{path}: format {version!r:.40}, need {FORMAT}; delete the folder")
    return checked(content, Manifest, f"{path}: damaged, prepared", DataError)


def open_rows(folder: Path, manifest: Manifest) -> list[np.ndarray]:
    """Memory-map the arrays of a folder, those of `ARRAYS`; check shapes, not their content.

    Raises:
      DataError: If an array is missing, or not as described.
    """
    of_rows = row_dtype(manifest.vocab_size, labelled=bool(manifest.request.get("num_classes")))
    arrays = []
    for name, shape in zip(ARRAYS, manifest.shapes, strict=False):
        dtypes = (of_rows, np.dtype(np.int64), np.dtype(bool))
        file, dtype = folder / name, dtypes[len(arrays) // 2]
        fault = ""
        try:
            with np.errstate(over="raise"):  # the size of a forged shape may overflow
                rows = np.lib.format.open_memmap(file, mode="r")
            is_whole = file.stat().st_size == rows.offset + rows.nbytes
            if not is_whole or (list(rows.shape), rows.dtype) != (shape, dtype):
                fault = f"{rows.dtype} of shape {rows.shape}"
            arrays.append(rows)
        except (OSError, ValueError, FloatingPointError) as error:
            fault = str(error)
        if fault:
            need = f"need {dtype} of {shape}, as {MANIFEST} says; delete the folder"
            raise DataError(f"{file}: not a complete .npy array ({fault}), {need}")
    return arrays
