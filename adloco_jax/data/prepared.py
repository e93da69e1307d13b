"""Read folders of prepared rows: arrays (`TRAIN`, `HELDOUT`), and `prepared.json`, written last.

`data.rows` writes these folders. Rows are [N, L + 1] integers. *Packed* rows have documents one
after another, or chats; a *labelled* row has a class, a number of tokens, and one text. A token
*counts* if the model is trained to predict it; of a chat only some do, such as the answers. A run
checks shapes and types, not the hashes.
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
from adloco_jax.row_batch import RowBatch

MANIFEST = "prepared.json"  # describes the rows of a folder
FORMAT = 6  # version of the layout of a folder

_MAX_ARRAYS = 6  # of chats: tokens, starts and answers, to train on and held out


@dataclasses.dataclass(frozen=True)
class ArrayFiles:
    """Names of the files of the rows to train on, or of the held-out rows.

    `tokens` has the rows. Packed rows also have `starts`, the positions at which documents begin,
    and chats `answers`, which tokens count in the loss. Labelled rows have neither.
    """

    tokens: str
    starts: str
    answers: str


TRAIN = ArrayFiles("train.npy", "train.starts.npy", "train.answers.npy")
HELDOUT = ArrayFiles("heldout.npy", "heldout.starts.npy", "heldout.answers.npy")


def array_names(*, is_packed: bool, is_chat: bool) -> list[str]:
    """List the files of a folder's arrays, in the order of `Manifest.shapes` and `hashes`."""
    names = [TRAIN.tokens, HELDOUT.tokens]
    if is_packed:
        names += [TRAIN.starts, HELDOUT.starts]
    if is_chat:
        names += [TRAIN.answers, HELDOUT.answers]
    return names


@dataclasses.dataclass(frozen=True, eq=False)
class RowArrays:
    """The memory-mapped arrays of the files that `ArrayFiles` names; None: there is no such file.

    Attributes:
      tokens: The rows: packed [N, L + 1], or labelled [N, 2 + L], class, number of tokens, tokens.
      starts: Ascending positions in the flattened rows at which documents begin, int64.
      answers: Which tokens count, bool [N, L + 1].
    """

    tokens: np.ndarray
    starts: np.ndarray | None = None
    answers: np.ndarray | None = None

    @property
    def num_documents(self) -> int:
        """Number of documents that begin in the rows; the last may be cut."""
        if self.starts is None:  # a labelled text has a row of its own
            return len(self.tokens)
        # A start after the rows can only be in a damaged file.
        starts = self.starts[self.starts < self.tokens.size]
        if self.answers is None:
            return len(starts)
        # Of chats, the padding after each is a document too, which is left out here: in it no
        # token counts. `reduceat` tells of each document whether any of its tokens counts.
        has_answer = np.logical_or.reduceat(self.answers.reshape(-1), starts)
        return int(np.count_nonzero(has_answer))


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
      request: All settings that determine the rows, as plain JSON.
      tokenizer: The tokenizer's name in the config.
      fingerprint: The tokenizer's fingerprint.
      vocab_size: Largest id plus one.
      eot_id: The id that closes a document.
      shapes: Shapes of the arrays, in the order of `array_names`; see `RowArrays`.
      hashes: SHA-256 (hex) of the arrays' files, in the same order.
      documents: Number of documents in the rows to train on, and in held-out rows. The last
        document of an array may be cut.
      tokens_per_byte: Number of held-out tokens divided by the number of their UTF-8 bytes.
      files: A record for each file of text.
      copies: Number of documents that are not trained on because a copy of them is held out.
      truncated: Number of labelled texts, or chats, that were cut because they were longer than a
        row.
      dropped: Number of chats that are in no row because no token of them counts.
      only_last: Number of chats of whose answers only the last counts, because the template writes
        earlier ones differently once other turns follow.
      rejected: Number of chats that are in no row because their label is false.
      bad: Number of rows of the text that were bad and skipped (`data.skip_bad`).
      unread: Names of columns, and of fields of chats' turns, that nothing reads.
    """

    format: Count
    request: dict[str, Any]
    tokenizer: str
    fingerprint: str
    vocab_size: Count
    eot_id: Count
    shapes: Annotated[list[list[Count]], Field(min_length=2, max_length=_MAX_ARRAYS)]
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
    """Return a line for each file of text that has changed between two reads; empty: none has.

    `before` and `after` are `Manifest.files` as dicts with "name" and maybe "sha256".
    """
    old = {record["name"]: record.get("sha256") for record in before}
    new = {record["name"]: record.get("sha256") for record in after}
    lines = [f"{name}: no longer there" for name in old if name not in new]
    lines += [f"{name}: was not there before" for name in new if name not in old]
    lines += [f"{name}: edited" for name in old if name in new and old[name] != new[name]]
    if not lines and list(old) != list(new):
        lines.append("the same files in another order")
    return lines


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedRows:
    """A folder's description, its arrays of rows to train on, and those of held-out rows."""

    manifest: Manifest
    train: RowArrays
    heldout: RowArrays


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentRows:
    """Packed rows that say where the document of each token begins, and for chats what counts.

    `rows[index]` is a `RowBatch`, whose weights are None without `answers`. All tokens that count
    have the same weight.

    In the names of arrays, n is for rows, L for the positions in a row, and k for the documents
    that begin in these rows.

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
        """Number of tokens that count in all rows of chats; 0 without `answers`."""
        return 0 if self.answers is None else int(np.count_nonzero(self.answers))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tokens)

    def __getitem__(self, index: np.ndarray) -> RowBatch:
        """Return the rows at `index`, integers [n], as a batch of n rows.

        Its `starts` [n, L + 1] are positions in the row: a document that began in an earlier row
        starts at 0. k counts the documents that begin in these rows.
        """
        length = self.tokens.shape[1]
        first_n = np.asarray(index) * length  # position of each row in all N (L + 1) tokens
        num_rows = len(first_n)

        # The documents that begin in a row are `self.starts[begin:end]`, for its `begin` and `end`.
        begin_n = np.searchsorted(self.starts, first_n)
        end_n = np.searchsorted(self.starts, first_n + length)
        ranges = [np.arange(begin, end) for begin, end in zip(begin_n, end_n, strict=True)]
        document_k = np.concatenate([np.arange(0), *ranges])  # integers also without a range
        row_k = np.repeat(np.arange(num_rows), end_n - begin_n)  # the row in which each begins
        position_k = self.starts[document_k] - first_n[row_k]  # where it begins in this row

        # Write each start at its position, and carry it on to the positions after.
        starts_nL = np.zeros((num_rows, length), np.int32)
        starts_nL[row_k, position_k] = position_k
        np.maximum.accumulate(starts_nL, axis=1, out=starts_nL)

        weights_nL = None
        if self.answers is not None:
            # The weights of all N rows sum to N, so that those of the average row sum to one.
            weight = np.float32(len(self.answers) / self.num_answer_tokens)
            weights_nL = self.answers[index] * weight
        tokens_nL = self.tokens[index].astype(np.int32, copy=False)
        return RowBatch(tokens_nL, starts_nL, weights_nL)


def rows_at(rows: np.ndarray | DocumentRows, index: np.ndarray) -> np.ndarray | RowBatch:
    """Return the rows at `index`, integers [n], as a model reads them.

    They are int32 [n, L + 1], or a `RowBatch` of `DocumentRows`.
    """
    if isinstance(rows, DocumentRows):
        return rows[index]
    return rows[index].astype(np.int32, copy=False)


def row_dtype(vocab_size: int, *, labelled: bool) -> np.dtype:
    """Return the smallest dtype that holds all token ids; int32 for rows of labelled texts."""
    if labelled:
        return np.dtype(np.int32)
    return np.min_scalar_type(max(vocab_size - 1, 0))  # a damaged manifest may say 0 ids


def is_prepared(path: str | Path) -> bool:
    """Return whether a folder has a `prepared.json`; False also if `path` cannot be looked at."""
    try:
        return (Path(path).expanduser() / MANIFEST).is_file()
    except (OSError, RuntimeError):  # RuntimeError: no home folder for `~`
        return False  # what reads the path next, raises a clear error


def read_prepared(folder: Path) -> Manifest:
    """Read the description in a folder of prepared rows.

    Raises DataError if it is missing, damaged, or of another version of the layout.
    """
    path = folder / MANIFEST
    content = read_json(path, DataError)
    version = content.get("format")
    if version != FORMAT:
        raise DataError(f"{path}: format {version!r:.40}, need {FORMAT}; delete the folder")
    return checked(content, Manifest, f"{path}: damaged, prepared", DataError)


def open_rows(folder: Path, manifest: Manifest) -> PreparedRows:
    """Memory-map the arrays of a folder; check their shapes and types, not their content.

    `manifest` is the folder's, from `read_prepared`.

    Raises:
      DataError: If an array is missing, or not as described.
    """
    labelled = bool(manifest.request.get("num_classes"))  # 0: texts have no classes
    is_chat = bool(manifest.loss)
    id_dtype = row_dtype(manifest.vocab_size, labelled=labelled)
    names = array_names(is_packed=not labelled, is_chat=is_chat)
    if len(names) != len(manifest.shapes):
        raise DataError(
            f"{folder / MANIFEST}: damaged, {len(manifest.shapes)} shapes for {len(names)} arrays;"
            " delete the folder"
        )
    shapes = dict(zip(names, manifest.shapes, strict=True))

    def opened(name: str, dtype: Any) -> np.ndarray:
        """Open the array in a file of the folder, in the shape of the manifest."""
        return _open_array(folder / name, shapes[name], np.dtype(dtype))

    def arrays_of(files: ArrayFiles) -> RowArrays:
        """Open the arrays to train on, or the held-out ones; None for a file that is not made."""
        tokens = opened(files.tokens, id_dtype)
        starts = None if labelled else opened(files.starts, np.int64)
        answers = opened(files.answers, np.bool_) if is_chat else None
        return RowArrays(tokens, starts, answers)

    return PreparedRows(manifest, arrays_of(TRAIN), arrays_of(HELDOUT))


def _open_array(file: Path, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory-map an array; DataError if it is not a complete array of this shape and dtype."""
    try:
        # The size of a forged shape may overflow: then it is a FloatingPointError.
        with np.errstate(over="raise"):
            array = np.lib.format.open_memmap(file, mode="r")
        # `offset` is the length of the header before the numbers.
        is_whole = file.stat().st_size == array.offset + array.nbytes
        if is_whole and array.shape == tuple(shape) and array.dtype == dtype:
            return array
        fault = f"{array.dtype} of shape {array.shape}"
    except (OSError, ValueError, FloatingPointError) as error:
        fault = str(error)
    raise DataError(
        f"{file}: not a complete .npy array ({fault}), need {dtype} of {shape}, as {MANIFEST} says;"
        " delete the folder"
    )
