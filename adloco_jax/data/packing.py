"""Documents to rows: tokenised, held out whole, laid end to end, cut every L+1 tokens.

A document of which a copy is held out is not trained on. Copies are found by their ids; texts that
differ in one character are no copies.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from adloco_jax.data.tokenizers import Tokenizer, check_round_trip
from adloco_jax.errors import DataError
from adloco_jax.settings import Data

MIN_HELDOUT_ROWS = 2  # one to report on, one for the merge guard
MAX_GUARD_ROWS = 32  # held-out rows for the merge guard, where there are as many to report on

_CHUNK_CHARS = 2**20  # read and tokenised at a time, and the grain at which reading stops


DOCUMENT = np.dtype([("length", np.int64), ("num_bytes", np.int64), ("digest", np.uint64)])


class Documents(NamedTuple):
    """Token ids of documents end to end, each closed by the end-of-text token.

    Attributes:
      tokens: [T], integers.
      about: `DOCUMENT` [documents]: the tokens of each, which sum to T; its UTF-8 bytes;
        a hash of its ids without the end of text.
    """

    tokens: np.ndarray
    about: np.ndarray


def encode_documents(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    where: str,
    wanted: Data | None = None,
    heldout: Documents | None = None,
) -> Documents:
    """Tokenise texts, a chunk of documents at a time.

    Args:
      texts: One document each.
      tokenizer: What makes the ids.
      where: The key and value the texts come from, for messages.
      wanted: Reading stops soon after the training side has its `num_sequences` and the held-out
        side, if any, the fewest that it needs; None reads all.
      heldout: Held-out documents of another source; their copies are not trained on.

    Raises:
      DataError: If there is no text, or the tokenizer leaves next to nothing of it.
    """
    parts: list[Documents] = []
    num_tokens = needed = 0
    for chunk in chunks(texts):
        if not parts:
            check_round_trip(chunk, tokenizer)
        parts.append(encode_chunk(chunk, tokenizer))
        num_tokens += len(parts[-1].tokens)
        if wanted and wanted.num_sequences and num_tokens >= needed:
            about = np.concatenate([part.about for part in parts])
            missing = _missing_tokens(about, wanted, wanted.num_sequences, heldout)
            if missing <= 0:
                break
            needed = num_tokens + missing
    if not parts:
        raise DataError(f"{where}: no text in it, need at least one document that is not empty")
    return Documents(*map(np.concatenate, zip(*parts, strict=True)))


def _missing_tokens(
    about: np.ndarray, wanted: Data, num_rows: int, heldout: Documents | None
) -> int:
    """Tokens to read at least before both sides have enough; none are missing at 0 or below."""
    lengths, digests, row_length = about["length"], about["digest"], wanted.sequence_length + 1
    if heldout is None:
        mask = is_heldout(0, len(about), wanted.heldout_frac)
        missing, known = MIN_HELDOUT_ROWS * row_length - lengths[mask].sum(), digests[mask]
    else:
        missing, known = 0, heldout.about["digest"]
    is_heldout_too = np.isin(digests, known)
    return int(max(missing, num_rows * row_length - lengths[~is_heldout_too].sum()))


def encode_chunk(texts: Sequence[str], tokenizer: Tokenizer) -> Documents:
    """Tokenise a few texts, one document each, in the smallest type that holds the ids.

    Raises:
      DataError: If the tokenizer gives an id that is not in [0, vocab_size).
    """
    ids = tokenizer.encode_batch(texts) if texts else []
    none, end_of_text = np.zeros(0, np.int32), np.array([tokenizer.eot_id], np.int32)
    pieces = [piece for document in ids for piece in (document, end_of_text)]
    closed = np.concatenate([none, *pieces])
    if closed.min(initial=0) < 0 or closed.max(initial=0) >= tokenizer.vocab_size:
        raise DataError(
            f"data.tokenizer={tokenizer.name}: gives ids from {closed.min()} to {closed.max()}, "
            f"need 0 to {tokenizer.vocab_size - 1}"
        )
    lengths = [len(document) + 1 for document in ids]
    num_bytes = [len(text.encode()) for text in texts]
    return Documents(closed.astype(id_dtype(tokenizer)), _describe(ids, lengths, num_bytes))


def _describe(
    ids: Iterable[np.ndarray], lengths: Sequence[int] | np.ndarray, num_bytes: Sequence[int] | int
) -> np.ndarray:
    """`DOCUMENT` [N]; the hashes are the same whatever integers hold the ids."""
    hashes = (hashlib.blake2b(i.astype("<i4").tobytes(), digest_size=8) for i in ids)
    about = np.empty(len(lengths), DOCUMENT)
    about["length"], about["num_bytes"] = lengths, num_bytes
    about["digest"] = np.fromiter((int.from_bytes(h.digest(), "little") for h in hashes), np.uint64)
    return about


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest unsigned integer type that holds every id."""
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def split_documents(documents: Documents, data: Data, *, where: str) -> tuple[Documents, Documents]:
    """Training and held-out documents; no document is in both.

    Holds out the share of the documents, rounded, evenly along the reading order. If they fill
    fewer than two rows, more are held out: the shortest that fills the gap, else the longest.

    Args:
      documents: All documents in reading order.
      data: Gives the share, and the length of rows.
      where: The key and value they come from, for messages.

    Raises:
      DataError: If that would leave no document to train on.
    """
    lengths, row_length = documents.about["length"], data.sequence_length + 1
    if len(lengths) < 2:
        raise DataError(f"{where}: have 1 document, need 2 to hold one out, or data.heldout_path")
    heldout = is_heldout(0, len(lengths), data.heldout_frac)
    while (gap := MIN_HELDOUT_ROWS * row_length - int(lengths[heldout].sum())) > 0:
        rest = np.flatnonzero(~heldout)
        enough = rest[lengths[rest] >= gap]
        pick = enough[lengths[enough].argmin()] if enough.size else rest[lengths[rest].argmax()]
        heldout[pick] = True
        if heldout.all():
            raise DataError(
                f"{where}: too little text: have {lengths.sum()} tokens in {len(lengths)} "
                f"documents, need {MIN_HELDOUT_ROWS} rows of {row_length} tokens in documents held "
                "out and more to train on; give more text or a smaller data.sequence_length"
            )
    return choose(documents, ~heldout), choose(documents, heldout)


def pack_rows(tokens: np.ndarray, row_length: int) -> np.ndarray:
    """Consecutive windows [N, row_length] of a token stream [T]; a tail too short is left out."""
    num_rows = len(tokens) // row_length
    return tokens[: num_rows * row_length].reshape(num_rows, row_length)


def require_heldout_rows(rows: np.ndarray, where: str) -> None:
    """DataError for fewer held-out rows than a run needs."""
    if len(rows) < MIN_HELDOUT_ROWS:
        raise DataError(
            f"{where}: too little held-out text: have {len(rows)} rows, need {MIN_HELDOUT_ROWS} of"
            f" {rows.shape[1]} (data.sequence_length + 1); give more text, a larger"
            " data.heldout_frac or a smaller data.sequence_length"
        )


def cut_at_end_of_text(tokens: np.ndarray, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Split `tokens` at the end-of-text tokens, which are in no piece."""
    pieces = np.split(tokens, np.flatnonzero(tokens == tokenizer.eot_id))
    return [piece[piece != tokenizer.eot_id] for piece in pieces]


def readable(row: np.ndarray, tokenizer: Tokenizer, *, max_chars: int) -> str:
    """A row decoded, with the ends of documents shown: one printable line, at most `max_chars`."""
    pieces = cut_at_end_of_text(row, tokenizer)
    text = "<end of text>".join(map(tokenizer.decode, pieces))
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def is_heldout(first: int, count: int, heldout_frac: float) -> np.ndarray:
    """Which of `count` documents from number `first` on are held out, whatever follows them.

    Args:
      first: Number of the first in reading order, from 0.
      count: Documents asked about.
      heldout_frac: Share to hold out, in [0, 1).

    Returns:
      bool[count]; of the first n documents, round(n · heldout_frac) are held out.
    """
    marks = np.floor(np.arange(first, first + count + 1) * heldout_frac + 0.5)
    return np.diff(marks) > 0


def choose(documents: Documents, mask: np.ndarray) -> Documents:
    """The documents that a mask bool[documents] marks."""
    about = documents.about
    return Documents(documents.tokens[np.repeat(mask, about["length"])], about[mask])


def chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Batches of texts in order, each to be tokenised together."""
    chunk, num_chars = [], 0
    for text in texts:
        chunk.append(text)
        num_chars += len(text)
        if num_chars >= _CHUNK_CHARS:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk
