"""Rows straight from a Hugging Face data set: read, tokenised and packed while the run goes on.

There is one sequence of rows, and whoever asks gets the next of them, so the order of asking
decides who trains on what. An epoch has the rows that `load_corpus` would make of the same
documents, in reading order; its tail too short for a row is left out, and the next epoch is the
same again.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import metadata
from typing import NamedTuple, Protocol

import numpy as np

from adloco_jax.data import hub, packing
from adloco_jax.data.packing import Documents
from adloco_jax.data.tokenizers import Tokenizer, check_round_trip, load_fitting_tokenizer
from adloco_jax.errors import DataError

# Blocks of rows made ahead; one is of about 2^20 characters of text (`packing.chunks`).
_NUM_AHEAD = 4
# The head of the data in the fingerprint: no more than the rows held out of any data set.
_MARK_ROWS = 32
_POLL_S, _JOIN_S = 0.1, 5.0


class Source(Protocol):
    """An iterable of examples that knows its place; `datasets.IterableDataset` is one."""

    def __iter__(self) -> Iterator[dict]:
        """Examples, from the loaded state on."""
        ...

    def state_dict(self) -> dict:
        """The place behind the example given last, as plain JSON."""
        ...

    def load_state_dict(self, state_dict: dict) -> object:
        """Makes the next iteration start there."""
        ...


@dataclasses.dataclass(frozen=True)
class _Place:
    """A place between two documents from which the stream can go on; all counts are the epoch's."""

    source: dict | None = None  # the library's own; None: to be found by counting the examples
    leftover: tuple[int, ...] = ()  # tokens of earlier documents that are in no row, fewer than one
    num_examples: int = 0
    num_documents: int = 0  # examples with text, which `packing.is_heldout` counts
    num_bad: int = 0
    num_rows: int = 0
    epoch: int = 0


class _Block(NamedTuple):
    """Rows made together, and the place where their documents begin."""

    place: _Place
    rows: np.ndarray  # int32 [N, L + 1]
    most: int  # rows there were, N at least, had no document been held out too


@dataclasses.dataclass(eq=False)
class Streaming:
    """Rows of a data set that is read as they are needed, a little ahead on a thread.

    Attributes:
      heldout_rows: Token ids int32 [E, L+1] of the first documents held out; no held-out document
        is ever given out.
      tokenizer: What makes the ids.
      fingerprint: SHA-256 (hex) of configuration, split, column, tokenizer, the files'
        records and the first held-out rows. A data set of the hub that changes later than these
        without new file names goes unnoticed.
      shards: A record per file, see `hub.open_stream`; none where they are too many to list.
      tokens_per_byte: Of the held-out documents.
      excerpt: The beginning of the first document, as the tokenizer gives it back.
      reader: Makes documents and ids.
      row_length: L+1.
      num_sequences: Rows after which the data set starts over, None for all.
      heldout_digests: Of the documents that `heldout_rows` are made of; documents that are the same
        are left out.
    """

    heldout_rows: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    shards: Sequence[dict]
    tokens_per_byte: float
    excerpt: str
    reader: "_Reader"
    row_length: int
    num_sequences: int | None
    heldout_digests: np.ndarray
    _place: _Place = dataclasses.field(default_factory=_Place, init=False)
    _block: _Block | None = dataclasses.field(default=None, init=False)  # None: begins at _place
    _offset: int = dataclasses.field(default=0, init=False)  # rows of the block already given out
    _dealt: dict[str, int] = dataclasses.field(default_factory=dict, init=False)  # by stream
    _ahead: "_Ahead | None" = dataclasses.field(default=None, init=False)

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """The next `count` rows as int32 [count, L+1], given to a stream that has had `start`.

        Raises:
          DataError: If the text is damaged, or there is less than one row of it. A source that
            cannot be reached is an `OSError` too, and the round worth another try.
        """
        key = f"{trainer}/{stream}"
        dealt = self._dealt.get(key, 0)
        assert start == dealt, f"stream {key} has had {dealt} rows, asked for those from {start}"
        if self._ahead is None:
            self._ahead = _Ahead(self._blocks(self._place))
        parts = [np.zeros((0, self.row_length), np.int32)]
        missing = count
        while missing:
            if self._block is None:
                self._block = self._ahead.next()
                if self._offset > self._block.most:
                    raise DataError(
                        f"{self.reader.where}: the data have changed since the checkpoint was"
                        " written; restore them, or start a new run in another folder"
                    )
                # Fewer than when it was left, if more documents are known to be held out since.
                self._offset = min(self._offset, len(self._block.rows))
            elif self._offset == len(self._block.rows):
                self._block, self._offset = self._ahead.next(), 0
            parts.append(self._block.rows[self._offset : self._offset + missing])
            self._offset += len(parts[-1])
            missing -= len(parts[-1])
        self._dealt[key] = dealt + count
        return np.concatenate(parts)

    def state(self) -> dict:
        """Where the rows not yet given out begin, as plain JSON: for `restore`."""
        place = self._block.place if self._block else self._place
        state = {
            "place": dataclasses.asdict(place),
            "offset": self._offset,
            "dealt": self._dealt,
            "fingerprint": self.fingerprint,
            "datasets": metadata.version("datasets"),
        }
        return json.loads(json.dumps(state))

    def restore(self, state: dict | None) -> None:
        """Goes to where `state` was taken, or back to the beginning.

        Of the state of other data, only how many rows each stream has had is used. Where another
        version of `datasets` wrote it, the examples up to there are read and left.
        """
        self.close()
        self._place, self._offset, self._dealt = _Place(), 0, {}
        if state is None:
            return
        self._dealt = dict(state["dealt"])
        if state["fingerprint"] == self.fingerprint:
            place = state["place"] | {"leftover": tuple(state["place"]["leftover"])}
            if state["datasets"] != metadata.version("datasets"):
                place["source"] = None
            self._place = _Place(**place)
            self._offset = state["offset"]

    def close(self) -> None:
        """Stops reading ahead; a later `batch` goes on where this one's left off."""
        if self._block:
            self._place, self._block = self._block.place, None
        if self._ahead:
            self._ahead.close()
            self._ahead = None

    def describe(self) -> str:
        """The data of a run in words, with an excerpt of what the model will see."""
        return (
            f"data: rows of {self.row_length - 1} tokens, streamed from {self.reader.where};"
            f" {len(self.heldout_rows)} held out; a model will see, for instance:\n"
            f"  | {self.excerpt}"
        )

    def _blocks(self, place: _Place) -> Generator[_Block]:
        """All rows from a place on, epoch after epoch."""
        while True:
            source = self.reader.open()
            for texts, after in self.reader.chunks(source, place):
                found = self.reader.encode(texts, place, is_heldout=False)
                kept = packing.choose(found, ~np.isin(found.digests, self.heldout_digests))
                tokens = np.concatenate([np.array(place.leftover, np.int32), kept.tokens])
                most = (len(place.leftover) + len(found.tokens)) // self.row_length
                rows = packing.pack_rows(tokens, self.row_length)
                leftover = tuple(tokens[rows.size :].tolist())
                if self.num_sequences is not None:
                    rows = rows[: self.num_sequences - place.num_rows]
                num_rows = place.num_rows + len(rows)
                if most:
                    yield _Block(place, rows, most)
                place = dataclasses.replace(after, leftover=leftover, num_rows=num_rows)
                if num_rows == self.num_sequences:
                    break
            if not place.num_rows:
                raise DataError(
                    f"{self.reader.where}: too little text: have {place.num_documents} documents"
                    f" and not one row of {self.row_length} tokens (data.sequence_length + 1) to"
                    " train on; give more text or a smaller data.sequence_length"
                )
            place = _Place(epoch=place.epoch + 1)


def load_stream(
    *,
    path: str,
    name: str,
    split: str,
    text_column: str,
    tokenizer: str,
    sequence_length: int,
    num_sequences: int | None,
    heldout_frac: float,
    num_heldout_rows: int,
    vocab_size: int,
    max_bad_rows: int = 0,
) -> Streaming:
    """Opens a data set, and reads its first documents to hold some out.

    Documents are held out by their number, as everywhere (`packing.is_heldout`). All of them are
    kept out of training; the first of them make the held-out rows. Documents that are the same as
    one of these first ones are left out too, as they come; `load_corpus` knows all.

    Args:
      path: Name on the Hugging Face hub, a folder that `datasets` reads, a file or a glob.
      name: Configuration of the data set; `""` where it has but one.
      split: Of the data set.
      text_column: Column that holds the text.
      tokenizer: See `load_tokenizer`.
      sequence_length: L; rows have L+1 tokens.
      num_sequences: Training rows after which the data set starts over, None for all of it.
      heldout_frac: Share of the documents to hold out, in (0, 1).
      num_heldout_rows: Upper limit on held-out rows.
      vocab_size: The model's; every id lies below it.
      max_bad_rows: Examples without text to leave out per epoch before one is an error.

    Raises:
      ConfigError: If there is no such data set, or the tokenizer does not suit the model.
      DataError: If text is missing, damaged or too little.
    """
    encoder = load_fitting_tokenizer(tokenizer, vocab_size)
    opened = hub.open_stream(path, name, split, text_column=text_column)
    reader = _Reader(
        opened.open, opened.where, text_column, encoder, vocab_size, heldout_frac, max_bad_rows
    )
    row_length = sequence_length + 1
    place, heldout, num_bytes, first = _Place(), [], 0, ""
    for texts, after in reader.chunks(reader.open(), place):
        if not place.num_documents:
            check_round_trip(texts, encoder)
        mask = packing.is_heldout(place.num_documents, len(texts), heldout_frac)
        first = first or next((t for t, held in zip(texts, mask, strict=True) if not held), "")
        heldout.append(reader.encode(texts, place, is_heldout=True))
        num_bytes += sum(len(t.encode()) for t, held in zip(texts, mask, strict=True) if held)
        place = after
        if sum(len(part.tokens) for part in heldout) >= num_heldout_rows * row_length:
            break
    if not place.num_documents:
        raise DataError(
            f"{opened.where}: no text in it, need at least two documents that are not empty"
        )
    heldout_tokens = np.concatenate([part.tokens for part in heldout])
    heldout_rows = packing.pack_rows(heldout_tokens, row_length)[:num_heldout_rows]
    if len(heldout_rows) < packing.MIN_HELDOUT_ROWS:
        raise DataError(
            f"{opened.where}: too little held-out text: have {len(heldout_tokens)} tokens, need "
            f"{packing.MIN_HELDOUT_ROWS} rows of {row_length} (data.sequence_length + 1); give "
            "more text, a larger data.heldout_frac or a smaller data.sequence_length"
        )
    mark = np.ascontiguousarray(heldout_rows[:_MARK_ROWS]).tobytes()
    parts = [name, split, text_column, encoder.fingerprint, list(opened.files)]
    fingerprint = hashlib.sha256(json.dumps(parts).encode() + mark).hexdigest()
    sample = np.concatenate(encoder.encode_batch([first[:1000]]))
    return Streaming(
        heldout_rows=heldout_rows,
        tokenizer=encoder,
        fingerprint=fingerprint,
        shards=opened.files if len(opened.files) <= hub.MAX_LISTED_FILES else (),
        tokens_per_byte=len(heldout_tokens) / num_bytes,
        excerpt=packing.readable(sample, encoder, max_chars=240),
        reader=reader,
        row_length=row_length,
        num_sequences=num_sequences,
        heldout_digests=np.concatenate([part.digests for part in heldout]),
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """How a data set becomes documents, and documents token ids."""

    open: Callable[[], Source]
    where: str
    text_column: str
    tokenizer: Tokenizer
    vocab_size: int
    heldout_frac: float
    max_bad_rows: int

    def chunks(self, source: Source, place: _Place) -> Iterator[tuple[list[str], _Place]]:
        """Texts from a place on, as many at a time as are tokenised together, and the place behind.

        That place has no leftover and no new rows yet; the last one's source is at its end.
        """
        if place.source is not None:
            source.load_state_dict(place.source)
        reading = _Reading(self, source, place)
        for texts in packing.chunks(reading):
            yield texts, dataclasses.replace(reading.place, source=source.state_dict())

    def encode(self, texts: list[str], place: _Place, *, is_heldout: bool) -> Documents:
        """The documents on one side, as int32 ids.

        Raises:
          DataError: If an id is not in [0, vocab_size).
        """
        mask = packing.is_heldout(place.num_documents, len(texts), self.heldout_frac)
        chosen = [text for text, held in zip(texts, mask, strict=True) if held == is_heldout]
        documents = self.tokenizer.encode_batch(chosen) if chosen else []
        end_of_text = np.array([self.tokenizer.eot_id], np.int32)
        closed = [part for ids in documents for part in (ids, end_of_text)]
        ids = np.concatenate([np.zeros(0, np.int32), *closed])
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise DataError(
                f"{self.where}: the tokenizer gives ids from {ids.min()} to {ids.max()}, need 0 to "
                f"{self.vocab_size - 1} (model.vocab_size={self.vocab_size})"
            )
        lengths = np.array([len(ids) + 1 for ids in documents], np.int64)
        return Documents(ids.astype(np.int32), lengths, None, packing.digests_of(documents))


class _Reading:
    """The texts of one pass over a data set, with a count of what has been read."""

    def __init__(self, reader: _Reader, source: Source, place: _Place):
        self.place = place
        self._reader, self._source = reader, source

    def __iter__(self) -> Iterator[str]:
        where, column = self._reader.where, self._reader.text_column
        num_read = self.place.num_examples if self.place.source is None else 0
        for example in itertools.islice(hub.examples(self._source, where), num_read, None):
            number, num_bad = self.place.num_examples + 1, self.place.num_bad
            if column not in example:
                raise DataError(
                    f"{where}: document {number} has no column {column!r} (data.text_column), have "
                    f"{', '.join(example)}"
                )
            text = example[column]
            is_bad = not isinstance(text, str)
            if is_bad and num_bad >= self._reader.max_bad_rows:
                raise DataError(
                    f"{where}: document {number}: {column!r} must be a string, have "
                    f"{type(text).__name__} (data.max_bad_rows={self._reader.max_bad_rows})"
                )
            self.place = dataclasses.replace(
                self.place,
                num_examples=number,
                num_documents=self.place.num_documents + (not is_bad and text != ""),
                num_bad=num_bad + is_bad,
            )
            if not is_bad and text:
                yield text


class _Ahead:
    """An iterator run on a thread of its own, a few items ahead."""

    def __init__(self, blocks: Generator[_Block]):
        self._queue: queue.Queue[_Block | Exception] = queue.Queue(_NUM_AHEAD)
        self._stop = threading.Event()
        # A daemon: a connection that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(blocks,), name="read-ahead", daemon=True
        )
        self._thread.start()

    def next(self) -> _Block:
        """Waits for the next item; raises what making it has raised."""
        item = self._queue.get()
        if isinstance(item, Exception):
            self._queue.put(item)  # for whoever asks again
            raise item
        return item

    def close(self) -> None:
        """Ends the thread behind the item it is at; one that hangs is left to itself."""
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self, blocks: Generator[_Block]) -> None:
        try:
            for block in blocks:
                if not self._put(block):
                    return
        except Exception as error:  # handed over to whoever waits for the item
            self._put(error)

    def _put(self, item: _Block | Exception) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=_POLL_S)
                return True
        return False
