"""Rows for `fit`, from an array of token ids.

`ArrayRows` divides the array into training rows and held-out rows. Rows are [N, L + 1]: of L + 1
tokens the first is only an input, and the last only a target.
"""

import copy
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from adloco_jax.data.rows import MIN_HELDOUT_ROWS, NUM_FIELDS
from adloco_jax.data.sampling import RowOrder, order_of, stream_rows
from adloco_jax.errors import ConfigError
from adloco_jax.settings import Settings

_CHUNK_TOKENS = 2**22  # number of tokens that are hashed at a time
# The end of messages about an array that cannot be used.
_EXPECTED = "give an array of int32 values: rows [N, L + 1], or tokens [T] and a sequence_length"


class ArrayRows:
    """Rows to train on and rows to hold out, for `fit`, from an array of token ids.

    Rows are sampled like those of text (`data.sampling`). Ids are not compared with a vocabulary,
    because only the caller's model has one.

    Attributes:
      rows: Training rows, integers [N, L + 1].
      heldout_rows: Evaluation rows, integers [E, L + 1].
      fingerprint: SHA-256 (hex) of the values of both arrays, whatever their integer type.
      shards: Empty, because the rows come from no file.
      tokens_per_byte: None, because the text is not known; losses are then not per byte.
    """

    shards: Sequence[dict] = ()
    tokens_per_byte: float | None = None
    _order: RowOrder  # only a copy that `ordered` returned has it

    def __init__(
        self,
        tokens: ArrayLike,
        *,
        sequence_length: int | None = None,
        heldout: float | ArrayLike = 0.05,
    ) -> None:
        """Split the array into training rows and held-out rows without a copy.

        Warns if held-out rows are among the training rows.

        Args:
          tokens: Ids in the range of int32, in memory or memory-mapped: rows [N, L + 1], whose last
            token is only a target, or one sequence [T], cut into such rows without its remainder. A
            classifier needs rows [N, 2 + L]: class, number of tokens, and L tokens.
          sequence_length: L; needed by a sequence [T] only.
          heldout: Held-out rows with the same L, in either shape of `tokens`; or the fraction of
            rows to hold out, in (0, 1): the last rows, at least two. So shuffle sorted rows first.

        Raises:
          ConfigError: If an array is not of integers in the range of int32, is neither rows nor a
            sequence, or has another L than wanted; if a sequence comes without `sequence_length`.
        """
        rows = _checked_rows("tokens", tokens, sequence_length)
        if isinstance(heldout, float):
            num_heldout = max(MIN_HELDOUT_ROWS, round(heldout * len(rows)))
            self.rows = rows[:-num_heldout]
            self.heldout_rows = rows[-num_heldout:]
        else:
            self.rows = rows
            length = rows.shape[1] - 1  # the L of the training rows, which these must have, too
            self.heldout_rows = _checked_rows("heldout", heldout, length)
        num_copies = _num_copies(self.heldout_rows, self.rows)
        if num_copies:
            warnings.warn(
                f"heldout: {num_copies} of {len(self.heldout_rows)} rows are also training rows, so"
                " the held-out loss is too low; hold out other rows",
                stacklevel=2,  # the warning names the caller's line
            )
        self.fingerprint = _fingerprint(self.rows, self.heldout_rows)

    def ordered(self, settings: Settings, *, num_classes: int | None = None) -> Self:
        """Return a copy that knows the order in which a run's workers read the rows.

        `num_classes` is None unless rows are a classifier's, `[class, number of tokens, tokens]`.

        Raises:
          ConfigError: If `data.sequence_length` is not the L of the rows.
          DataError: If there are too few rows for the first batches of all workers of a trainer.
        """
        if num_classes is None:
            length = self.rows.shape[1] - 1  # the last token is only a target
        else:
            length = self.rows.shape[1] - NUM_FIELDS  # without the class and the number
        if settings.data.sequence_length != length:
            raise ConfigError(
                f"data.sequence_length = {settings.data.sequence_length}: the rows of the corpus"
                f" have {length}; set it to {length}"
            )
        order = order_of(settings, len(self.rows), where="corpus")
        ordered = copy.copy(self)  # a shallow copy: both share the arrays
        ordered._order = order
        return ordered

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Return rows `start` to `start + count - 1` of a worker's stream, as int32 [count, L + 1].

        Only the result of `ordered` has an order. `trainer` is the permanent id of a trainer (a
        model in training), and `stream` the number of one of its workers' streams: the endless
        sequence of rows that this worker reads.
        """
        index = stream_rows(self._order, trainer=trainer, stream=stream, start=start, count=count)
        return self.rows[index].astype(np.int32)


def _checked_rows(name: str, given: ArrayLike, sequence_length: int | None) -> np.ndarray:
    """Return rows [N, L + 1] from an argument: rows, or one sequence [T] that is cut into rows.

    Args:
      name: Name of the argument, with which messages begin.
      given: The argument.
      sequence_length: L; for rows it may be None.

    Raises:
      ConfigError: If the array is not of integers in the range of int32, has neither one nor two
        axes, L is below 1 or not the length of the rows, or a sequence comes without L.
    """
    array = np.asarray(given)
    have = f"{name}: {array.dtype} of shape {array.shape}, sequence_length={sequence_length}"
    if array.ndim == 1 and sequence_length is None:
        raise ConfigError(
            f"{have}; give ArrayRows the length of its rows: ArrayRows(..., sequence_length=L)"
            " (data.sequence_length does not reach it)"
        )

    if array.ndim == 2:
        length = array.shape[1] - 1
    else:
        length = sequence_length or 0  # 0 is refused below
    is_length_right = length >= 1 and sequence_length in (None, length)
    is_integer = np.issubdtype(array.dtype, np.integer)
    if array.ndim not in (1, 2) or not is_length_right or not is_integer:
        raise ConfigError(f"{have}; {_EXPECTED}")
    least = int(array.min(initial=0))  # at most 0, which is in range; of an empty array 0
    largest = int(array.max(initial=0))
    if least < -(2**31) or largest >= 2**31:
        raise ConfigError(f"{have}, ids from {least} to {largest}; {_EXPECTED}")

    if array.ndim == 1:
        num_rows = len(array) // (length + 1)  # without the remainder
        array = array[: num_rows * (length + 1)].reshape(num_rows, length + 1)
    return array


def _fingerprint(*arrays: np.ndarray) -> str:
    """Return the SHA-256 (hex) of the shapes and values of rows; their integer type is ignored.

    A caller that resumes a run may give the same rows in another type, such as int64.
    """
    digest = hashlib.sha256()
    for rows in arrays:
        digest.update(f"{rows.shape}".encode())
        for chunk in _chunks(rows):  # as int32, whatever the type of the rows
            digest.update(chunk.data)
    return digest.hexdigest()


def _num_copies(heldout: np.ndarray, rows: np.ndarray) -> int:
    """Count the held-out rows that are also among the training rows.

    Rows are compared by Python's hash of their bytes, so that sets hold integers and no rows.
    """

    def hashes(of_rows: np.ndarray) -> Iterator[int]:
        """Yield the hash of each row."""
        for chunk in _chunks(of_rows):
            for row in chunk:
                yield hash(row.tobytes())

    copied = set(hashes(heldout)).intersection(hashes(rows))
    # Not the length of `copied`: several held-out rows may be equal.
    return sum(1 for row_hash in hashes(heldout) if row_hash in copied)


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield all rows in chunks of about `_CHUNK_TOKENS` ids, as contiguous little-endian int32.

    So equal rows have equal bytes, and equal hashes, whatever their type and machine.
    """
    step = max(1, _CHUNK_TOKENS // rows.shape[1])  # rows in a chunk: one if rows are very long
    for start in range(0, len(rows), step):
        yield np.ascontiguousarray(rows[start : start + step], "<i4")
