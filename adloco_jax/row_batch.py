"""Rows as a model reads them, with names for what packed documents have beside their tokens."""

from typing import Any

from flax import struct


@struct.dataclass
class RowBatch:
    """Rows of tokens, with the document of each token and its weight; a pytree.

    The data give it where models separate documents (`DataSettings.separates_documents`). Other
    rows are an array of tokens alone. All batches of a run have the same fields. Each is an array
    of JAX or NumPy, or its shape and dtype.
    """

    tokens: Any  # int32 [..., L + 1]
    # int32 [..., L + 1]: first position of the row to which a token attends; None: the row's first
    starts: Any = None
    # float32 [..., L + 1]: weight of a token's loss, zero for one that does not count; the average
    # row has a sum of one. None: each token has weight 1 / L.
    weights: Any = None


def as_row_batch(rows: Any) -> RowBatch:
    """Return rows under their names; an array of tokens has no starts and no weights."""
    return rows if isinstance(rows, RowBatch) else RowBatch(rows)
