"""Rows straight from a Hugging Face data set: read, tokenised and packed during the run.

There is one sequence of rows, and each call gets the next of them, so the order of the calls
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
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from adloco_jax.data import hub, packing
from adloco_jax.data.tokenizers import Tokenizer, check_round_trip, load_fitting_tokenizer
from adloco_jax.errors import DataError
from adloco_jax.settings import Data, Settings

if TYPE_CHECKING:
    from datasets import IterableDataset

# Blocks of rows made ahead; one is of about 2^20 characters of text (`packing.chunks`).
_NUM_AHEAD = 4
# The head of the data in the fingerprint: no more than the rows held out of any data set.
_MARK_ROWS = 32
_JOIN_S = 5.0


@dataclasses.dataclass
class _Place:
    """A position between two documents, to resume at; all counts are of the present epoch."""

    source: dict | None = None  # state of the data set; None: skip `num_examples` instead
    # Of earlier documents, fewer tokens than a row.
    leftover: list[int] = dataclasses.field(default_factory=list)
    num_examples: int = 0
    num_documents: int = 0  # examples with text, which `packing.is_heldout` counts
    num_bad: int = 0
    num_rows: int = 0
    epoch: int = 0


class _Block(NamedTuple):
    """Rows made together, and the place where their documents begin."""

    place: _Place
    rows: np.ndarray  # int32 [N, L+1], N >= 0
    most: int  # rows with all copies of held-out documents, at least N


@dataclasses.dataclass(eq=False)
class Streaming:
    """Rows of a data set that is read as they are needed, a little ahead on a thread.

    Attributes:
      heldout_rows: Token ids int32 [E, L+1] of the first documents held out; `batch` never returns
        a held-out document.
      tokenizer: What makes the ids.
      fingerprint: SHA-256 (hex) of configuration, split, column, tokenizer, the files'
        records and the first held-out rows. A data set of the hub that changes later than these
        without new file names goes unnoticed.
      shards: A record per file, see `hub.open_stream`; none where they are too many to list.
      tokens_per_byte: Of the held-out documents.
      excerpt: The beginning of the first document, as the tokenizer gives it back.
      reader: Makes documents and ids.
      row_length: L+1.
      heldout_digests: Of the documents that `heldout_rows` are made of; their copies are left out.
    """

    heldout_rows: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    shards: Sequence[dict]
    tokens_per_byte: float
    excerpt: str
    reader: "_Reader"
    row_length: int
    heldout_digests: np.ndarray
    _place: _Place = dataclasses.field(default_factory=_Place, init=False)
    _rows: np.ndarray | None = dataclasses.field(default=None, init=False)  # of the block at _place
    _offset: int = dataclasses.field(default=0, init=False)  # rows of it already returned
    _num_read: dict[str, int] = dataclasses.field(default_factory=dict, init=False)  # by stream
    _ahead: "_Ahead | None" = dataclasses.field(default=None, init=False)

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """The next rows of the data set, for one worker stream.

        Args:
          trainer: Number of the trainer.
          stream: Number of its worker stream.
          start: Rows that this stream has read so far.
          count: Rows to return.

        Returns:
          Token ids int32 [count, L+1].

        Raises:
          DataError: If the text is damaged, or there is less than one row of it. A source that
            cannot be reached is an `OSError` too, and the round may be tried again.
        """
        key = f"{trainer}/{stream}"
        num_read = self._num_read.get(key, 0)
        assert start == num_read, f"stream {key} has read {num_read} rows, have start={start}"
        if self._ahead is None:
            self._ahead = _Ahead(self._blocks(self._place))
        parts = [np.zeros((0, self.row_length), np.int32)]
        missing = count
        while missing:
            if self._rows is None or self._offset == len(self._rows):
                offset = self._offset if self._rows is None else 0
                self._place, self._rows, most = self._ahead.next()
                if offset > most:
                    raise DataError(
                        f"{self.reader.opened.where}: the data have changed since the checkpoint"
                        " was written; restore them, or start a new run in another folder"
                    )
                # Fewer rows than at the checkpoint if more held-out documents are known since.
                self._offset = min(offset, len(self._rows))
            parts.append(self._rows[self._offset : self._offset + missing])
            self._offset += len(parts[-1])
            missing -= len(parts[-1])
        self._num_read[key] = num_read + count
        return np.concatenate(parts)

    def state(self) -> dict:
        """Position of the next row, as plain JSON: for `restore`."""
        return {
            "place": dataclasses.asdict(self._place),
            "offset": self._offset,
            "num_read": dict(self._num_read),
            "fingerprint": self.fingerprint,
            "datasets": metadata.version("datasets"),
        }

    def restore(self, state: dict | None) -> None:
        """Go to the position of a `state`, or with None to the beginning.

        Of the state of other data, only how many rows each stream has read is used. If another
        version of `datasets` wrote it, the examples before the position are read and skipped.
        """
        self.close()
        self._place, self._offset, self._num_read = _Place(), 0, {}
        if state is None:
            return
        self._num_read = dict(state["num_read"])
        if state["fingerprint"] == self.fingerprint:
            self._place, self._offset = _Place(**state["place"]), state["offset"]
            if state["datasets"] != metadata.version("datasets"):
                self._place.source = None

    def close(self) -> None:
        """Stop reading ahead; a later `batch` continues with the next row."""
        self._rows = None
        if self._ahead:
            self._ahead.close()
            self._ahead = None

    def describe(self) -> str:
        """The data of a run in words, with an excerpt of what the model will see."""
        return (
            f"data: rows of {self.row_length - 1} tokens, streamed from {self.reader.opened.where};"
            f" {len(self.heldout_rows)} held out; a model will see, for instance:\n"
            f"  | {self.excerpt}"
        )

    def _blocks(self, place: _Place) -> Iterator[_Block]:
        """All rows from a place on, epoch after epoch."""
        num_sequences = self.reader.data.num_sequences
        while True:
            source = self.reader.opened.open()
            for texts, after in self.reader.chunks(source, place):
                chosen = self.reader.choose(texts, place, is_heldout=False)
                found = packing.encode_chunk(chosen, self.reader.tokenizer)
                kept = packing.choose(found, ~np.isin(found.about["digest"], self.heldout_digests))
                leftover = np.array(place.leftover, np.int32)
                tokens = np.concatenate([leftover, kept.tokens], dtype=np.int32, casting="unsafe")
                rows = packing.pack_rows(tokens, self.row_length)
                after = dataclasses.replace(after, leftover=tokens[rows.size :].tolist())
                if num_sequences is not None:
                    rows = rows[: num_sequences - place.num_rows]
                most = (len(leftover) + len(found.tokens)) // self.row_length
                yield _Block(place, rows, most)
                place = dataclasses.replace(after, num_rows=place.num_rows + len(rows))
                if place.num_rows == num_sequences:
                    break
            if not place.num_rows:
                raise DataError(
                    f"{self.reader.opened.where}: too little text: have {place.num_documents}"
                    f" documents and not one row of {self.row_length} tokens (data.sequence_length"
                    " + 1) to train on; give more text or a smaller data.sequence_length"
                )
            place = _Place(epoch=place.epoch + 1)


def load_stream(settings: Settings) -> Streaming:
    """Open a data set, and read its first documents to hold some out.

    Documents are held out by their number (`packing.is_heldout`). None of them is trained on; the
    first of them make the held-out rows. Copies of these first ones are left out of training as
    they are read; `load_corpus` finds copies of all held-out documents.

    Args:
      settings: The run's. After `data.num_sequences` rows the data set starts over;
        `eval.num_sequences` limits the held-out rows, and `data.max_bad_rows` the examples without
        text that are left out in an epoch.

    Raises:
      ConfigError: If there is no such data set, or the tokenizer does not suit the model.
      DataError: If text is missing, damaged or too little.
    """
    data, row_length = settings.data, settings.data.sequence_length + 1
    num_heldout_rows = packing.MAX_GUARD_ROWS + settings.eval.num_sequences
    encoder = load_fitting_tokenizer(data.tokenizer, settings.model.vocab_size)
    opened = hub.open_stream(data.path, data.name, data.split, text_column=data.text_column)
    reader = _Reader(opened, encoder, data)
    place, heldout, first = _Place(), [], ""
    for texts, after in reader.chunks(opened.open(), place):
        if not heldout:
            check_round_trip(texts, encoder)
        first = first or next(iter(reader.choose(texts, place, is_heldout=False)), "")
        chosen = reader.choose(texts, place, is_heldout=True)
        heldout.append(packing.encode_chunk(chosen, encoder))
        place = after
        if sum(len(part.tokens) for part in heldout) >= num_heldout_rows * row_length:
            break
    if not place.num_documents:
        raise DataError(
            f"{opened.where}: no text in it, need at least two documents that are not empty"
        )
    tokens, about = map(np.concatenate, zip(*heldout, strict=True))
    heldout_rows = packing.pack_rows(tokens.astype(np.int32), row_length)[:num_heldout_rows]
    packing.require_heldout_rows(heldout_rows, opened.where)
    mark = np.ascontiguousarray(heldout_rows[:_MARK_ROWS]).tobytes()
    parts = [data.name, data.split, data.text_column, encoder.fingerprint, list(opened.files)]
    fingerprint = hashlib.sha256(json.dumps(parts).encode() + mark).hexdigest()
    (sample,) = encoder.encode_batch([first[:1000]])
    return Streaming(
        heldout_rows=heldout_rows,
        tokenizer=encoder,
        fingerprint=fingerprint,
        shards=opened.files if len(opened.files) <= hub.MAX_LISTED_FILES else (),
        tokens_per_byte=len(tokens) / int(about["num_bytes"].sum()),
        excerpt=packing.readable(sample, encoder, max_chars=240),
        reader=reader,
        row_length=row_length,
        heldout_digests=about["digest"],
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """How a data set becomes documents, and documents token ids."""

    opened: hub.Opened
    tokenizer: Tokenizer
    data: Data

    def chunks(
        self, source: "IterableDataset", place: _Place
    ) -> Iterator[tuple[list[str], _Place]]:
        """Texts from a place on, as many at a time as are tokenised together, and the place behind.

        That place has no leftover and no new rows yet.
        """
        if place.source is not None:
            source.load_state_dict(place.source)
        num_skipped = place.num_examples if place.source is None else 0
        examples = itertools.islice(source, num_skipped, None)
        place = dataclasses.replace(place)
        for texts in packing.chunks(self._texts(examples, place)):
            place.source = source.state_dict()
            yield texts, dataclasses.replace(place, leftover=[])

    def choose(self, texts: list[str], place: _Place, *, is_heldout: bool) -> list[str]:
        """The texts on one side."""
        mask = packing.is_heldout(place.num_documents, len(texts), self.data.heldout_frac)
        return list(itertools.compress(texts, mask == is_heldout))

    def _texts(self, examples: Iterator[dict], place: _Place) -> Iterator[str]:
        """Texts that are not empty; the place counts what was read."""
        where, column = self.opened.where, self.data.text_column
        for text in hub.texts(examples, where, column, first=place.num_examples + 1):
            place.num_examples += 1
            if isinstance(text, DataError):
                place.num_bad += 1
                if place.num_bad > self.data.max_bad_rows:
                    raise DataError(f"{text} (data.max_bad_rows={self.data.max_bad_rows})")
            elif text:
                place.num_documents += 1
                yield text


class _Ahead:
    """An iterator run on a thread of its own, a few items ahead."""

    def __init__(self, blocks: Iterator[_Block]):
        self._queue: queue.Queue[_Block | Exception] = queue.Queue(_NUM_AHEAD)
        self._is_closed = False
        # A daemon: a connection that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(blocks,), daemon=True)
        self._thread.start()

    def next(self) -> _Block:
        """Wait for the next item; raise what making it has raised."""
        item = self._queue.get()
        if isinstance(item, Exception):
            self._queue.put(item)  # for the next call
            raise item
        return item

    def close(self) -> None:
        """End the thread after its present item; a thread that hangs is abandoned."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:  # the thread may be waiting for room
                self._queue.get_nowait()
        self._thread.join(_JOIN_S)

    def _run(self, blocks: Iterator[_Block]) -> None:
        try:
            for block in blocks:
                self._queue.put(block)
                if self._is_closed:
                    return
        except Exception as error:  # raised by `next`, in the thread that waits for the item
            self._queue.put(error)
