"""Rows as a model reads them, with names for the arrays that packed documents have with tokens.

A row has L + 1 tokens: the first is only an input, the last only a target.
"""

from typing import Any

from flax import struct


@struct.dataclass
class RowBatch:
    """Rows of tokens, with the document of each token and its weight; a pytree.

    If the model separates documents (`DataSettings.separates_documents`), rows are a `RowBatch`,
    else an array of tokens. All batches of a run have the same fields. Each field is an array of
    JAX or NumPy, or its shape and dtype, with any leading axes.

    Attributes:
      tokens: Token ids, int32 [..., L + 1].
      starts: The first position of the row to which each token attends, int32 [..., L + 1]. None:
        the row's first.
      weights: The weight of each token's loss, float32 [..., L + 1], zero for a token that does not
        count. The average row has a sum of one. None: each target has the weight 1 / L.
    """

    tokens: Any
    starts: Any = None
    weights: Any = None


def as_row_batch(rows: Any) -> RowBatch:
    """Return a `RowBatch` as it is, and an array of tokens as one without starts and weights."""
    if isinstance(rows, RowBatch):
        return rows
    return RowBatch(tokens=rows)
