"""Rows for `fit`, from an array of token ids in the memory of the caller."""

import copy
import hashlib
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from adloco_jax.data.rows import MIN_HELDOUT_ROWS, NUM_FIELDS
from adloco_jax.data.sampling import RowOrder, order_of, stream_rows
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.settings import Settings

_CHUNK_TOKENS = 2**22  # number of tokens that are hashed at a time
_EXPECTED = "give an array of integers: rows [N, L + 1], or tokens [T] and a sequence_length"


class ArrayRows:
    """Rows to train on and rows to hold out, for `fit`, from token ids in memory.

    The rows are sampled like those of text (`data.sampling`): each trainer draws a random subset, a
    share of `data.subset_frac` of all rows. The streams of the trainer's workers divide the subset.
    The setting `seed` determines the order. Ids are not checked against a vocabulary, because only
    the caller's model has one.

    Attributes:
      rows: Training rows, integers [N, L + 1].
      heldout_rows: Evaluation rows, integers [E, L + 1].
      fingerprint: SHA-256 (hex) of the values of both arrays, equal for all integer types.
      shards: Empty, because the rows come from no file.
      tokens_per_byte: None, because the text is not known; losses are not given per byte.
    """

    shards: Sequence[dict] = ()
    tokens_per_byte: float | None = None

    def __init__(
        self,
        tokens: ArrayLike,
        *,
        sequence_length: int | None = None,
        heldout: float | ArrayLike = 0.05,
    ) -> None:
        """Split and hash the array, which is read once and not copied.

        Args:
          tokens: Integers in the range of int32, which may be memory-mapped. Either rows [N, L +
            1], whose last token is only a target, or one sequence [T]. A sequence is cut into rows
            of L + 1 tokens; a shorter tail is dropped. A classifier has rows [N, 2 + L]
            (`data.rows`).
          sequence_length: L, tokens that are predicted per row; only needed for [T].
          heldout: Either the share of rows to hold out, in (0, 1), or separate held-out rows in one
            of the two shapes of `tokens`. A share holds out the last rows, at least two; so shuffle
            sorted rows first.

        Raises:
          ConfigError: If an argument has another shape or type, or an id is beyond int32.
          DataError: If no row is left to train on.
        """
        rows = _rows("tokens", tokens, sequence_length)
        if isinstance(heldout, float):
            if not 0 < heldout < 1:
                raise ConfigError(f"heldout: have {heldout}, need a share in (0, 1), or rows")
            num_heldout = max(MIN_HELDOUT_ROWS, round(heldout * len(rows)))
            rows, self.heldout_rows = rows[:-num_heldout], rows[-num_heldout:]
        else:
            self.heldout_rows = _rows("heldout", heldout, sequence_length)
            if self.heldout_rows.shape[1] != rows.shape[1]:
                raise ConfigError(
                    f"heldout: rows of {self.heldout_rows.shape[1]} integers, but tokens has rows"
                    f" of {rows.shape[1]}; give rows of one length"
                )
        if not len(rows):
            raise DataError(
                f"tokens: no row to train on beside {len(self.heldout_rows)} held out; give more"
                " tokens, or a smaller sequence_length"
            )
        self.rows, self.fingerprint = rows, _fingerprint(rows, self.heldout_rows)
        self._order: RowOrder | None = None

    def ordered(self, settings: Settings, *, num_classes: int | None = None) -> Self:
        """Return a copy whose rows have the order of a run; `fit` calls this method.

        Args:
          settings: The run's settings; `seed`, `ensemble.num_workers`, `data.subset_frac` and
            `data.sequence_length` are read.
          num_classes: Number of classes, if rows begin with a class and a length; else None.

        Raises:
          ConfigError: If `data.sequence_length` is not the length of the rows. Estimates of time
            and memory depend on this setting.
          DataError: If a worker stream would have no row.
        """
        length = self.rows.shape[1] - (1 if num_classes is None else NUM_FIELDS)
        if settings.data.sequence_length != length:
            raise ConfigError(
                f"data.sequence_length = {settings.data.sequence_length}: the rows of the corpus"
                f" have {length}; set it to {length}"
            )
        order = order_of(settings, len(self.rows), where="corpus")
        ordered = copy.copy(self)
        ordered._order = order
        return ordered

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count - 1` of one worker's stream, as int32 [count, L + 1].

        Args:
          trainer: Permanent id of the trainer.
          stream: Stream number in [0, ensemble.num_workers).
          start: Number of rows that the stream has already given out (the cursor).
          count: Number of rows to return.

        Raises:
          ValueError: If the rows have no order yet, see `ordered`.
        """
        if self._order is None:
            raise ValueError("ArrayRows: without an order; give it to fit, or call ordered")
        index = stream_rows(self._order, trainer=trainer, stream=stream, start=start, count=count)
        return self.rows[index].astype(np.int32)


def _rows(name: str, given: ArrayLike, sequence_length: int | None) -> np.ndarray:
    """Convert the argument called `name` (rows, or one sequence) to rows [N, L + 1]."""
    try:
        array = np.asarray(given)
    except ValueError as error:  # lists of unequal length
        raise ConfigError(f"{name}: {error}; {_EXPECTED}") from error
    found = f"{name}: {array.dtype} of shape {array.shape}"
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise ConfigError(f"{found}; {_EXPECTED}")
    if array.ndim == 1:
        if not isinstance(sequence_length, int) or sequence_length < 1:
            raise ConfigError(
                f"sequence_length: have {sequence_length}, need the number of predicted tokens per"
                f" row, at least 1, because {name} is one sequence"
            )
        num_rows = len(array) // (sequence_length + 1)
        array = array[: num_rows * (sequence_length + 1)].reshape(num_rows, sequence_length + 1)
    elif array.shape[1] < 2 or sequence_length not in (None, array.shape[1] - 1):
        raise ConfigError(f"{found}, sequence_length={sequence_length}; {_EXPECTED}")
    limits = np.iinfo(np.int32)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ConfigError(f"{name}: ids from {array.min()} to {array.max()}, need what int32 holds")
    return array


def _fingerprint(*parts: np.ndarray) -> str:
    digest = hashlib.sha256()
    for rows in parts:
        digest.update(f"{rows.shape}".encode())
        step = max(1, _CHUNK_TOKENS // rows.shape[1])
        for start in range(0, len(rows), step):
            digest.update(np.ascontiguousarray(rows[start : start + step], "<i4").data)
    return digest.hexdigest()
