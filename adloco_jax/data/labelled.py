"""Texts with a class each: rows `[label, n, tokens...]`, held out by class."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from adloco_jax.data import sources
from adloco_jax.data.sampling import permute, stream_rows, subset_size
from adloco_jax.data.tokenizers import Tokenizer, check_round_trip
from adloco_jax.errors import DataError

NUM_FIELDS = 2  # before a row's tokens: its class, and how many of its tokens are real
_MIN_HELDOUT = 4  # per class


@dataclasses.dataclass(frozen=True, eq=False)
class Labelled:
    """Labelled rows, and which of them each worker stream sees when.

    Attributes:
      rows: int32 [num_sequences, 2 + L]: class, number of real tokens n, tokens (zeros from n on).
      heldout_rows: The same, none of them in `rows`.
      tokenizer: What made the ids.
      fingerprint: SHA-256 (hex) of both arrays and of the tokenizer's own fingerprint.
      shards: What was read, see `sources.Intake`.
      num_truncated: Texts of which only the first L tokens are in a row.
      seed: Decides the order, not the split.
      num_streams: Streams that each trainer's subset is divided into.
      subset_frac: Share of the rows each trainer draws from.
      num_also_heldout: Texts left out of training because a held-out one is the same.
    """

    rows: np.ndarray
    heldout_rows: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str
    shards: Sequence[dict]
    num_truncated: int
    seed: int
    num_streams: int
    subset_frac: float
    num_also_heldout: int = 0
    tokens_per_byte: float | None = None  # the loss is per example, not per token

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count - 1` of a worker stream as int32[count, 2 + L]."""
        index = stream_rows(
            self.seed,
            trainer=trainer,
            stream=stream,
            start=start,
            count=count,
            num_rows=len(self.rows),
            num_streams=self.num_streams,
            subset_frac=self.subset_frac,
        )
        return self.rows[index]

    def describe(self) -> str:
        """The data of a run in words, with an excerpt of what the model will see."""
        label, length, *tokens = self.batch(0, 0, 0, 1)[0]
        text = self.tokenizer.decode(tokens[:length])
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)[:240]
        return (
            f"data: {len(self.rows)} texts of at most {self.rows.shape[1] - NUM_FIELDS} tokens to"
            f" train on ({_counts(self.rows)} by class), {len(self.heldout_rows)} held out"
            f" ({_counts(self.heldout_rows)}); {self.num_truncated} were cut; a model will see, for"
            f" instance, of class {label}:\n  | {text}"
        )


def load_labelled(
    *,
    path: str,
    heldout_path: str,
    text_column: str,
    label_column: str,
    num_classes: int,
    tokenizer: Tokenizer,
    sequence_length: int,
    num_sequences: int | None,
    heldout_frac: float,
    subset_frac: float,
    num_streams: int,
    seed: int,
    intake: sources.Intake,
) -> Labelled:
    """Reads JSON lines of text and class, tokenises them, and splits them class by class.

    A text of which a copy is held out is not trained on, whatever its class; texts that only begin
    alike are.

    A text becomes `[first] tokens [last]`: the tokenizer's own classification and separator tokens,
    or its end of text for both. Of longer texts the beginning is kept. Rows are no longer than the
    longest text needs, rounded up to a power of two or the midpoint of two, so that data of about
    one length share their programs.

    Args:
      path: File, folder or glob of JSON lines.
      heldout_path: The same for held-out texts, used whole; `""` to split what `path` holds.
      text_column: Field of the text.
      label_column: Field of the class, a whole number in [0, num_classes).
      num_classes: C.
      tokenizer: Makes the ids.
      sequence_length: The longest text in tokens, first and last included.
      num_sequences: Upper limit on training rows, None for all.
      heldout_frac: Share of each class to hold out, in (0, 1).
      subset_frac: Share of the rows each trainer draws from, in (0, 1].
      num_streams: Worker streams that a trainer's subset is divided into.
      seed: Decides the order of the rows.
      intake: What may be left out.

    Returns:
      The rows, in memory.

    Raises:
      ConfigError: If a path leads nowhere.
      DataError: If a text or label is missing or damaged, or a class has too few texts.
    """

    def read(path: str, key: str) -> tuple[list[str], np.ndarray]:
        found = sources.labelled_documents(
            sources.find_files(path, key=key),
            intake,
            text_column=text_column,
            label_column=label_column,
            num_classes=num_classes,
        )
        texts, labels = zip(*found, strict=True) if (found := list(found)) else ((), ())
        counts = np.bincount(np.array(labels, np.int64), minlength=num_classes)
        if counts.min() < 1:
            raise DataError(
                f"{key}={path}: have {', '.join(map(str, counts))} texts of classes 0 to "
                f"{num_classes - 1}, need some of each; check model.num_classes={num_classes}"
            )
        return list(texts), np.array(labels)

    texts, labels = read(path, "data.path")
    if heldout_path:
        heldout_texts, heldout_labels = read(heldout_path, "data.heldout_path")
        is_heldout = np.repeat([False, True], [len(texts), len(heldout_texts)])
        texts, labels = texts + heldout_texts, np.concatenate([labels, heldout_labels])
    else:
        is_heldout = _by_class(labels, heldout_frac)
    check_round_trip(texts, tokenizer)
    rows, num_truncated = _rows(texts, labels, tokenizer, sequence_length)
    known = {text for text, held in zip(texts, is_heldout, strict=True) if held}
    is_known = np.array([text in known for text in texts], bool)
    num_also_heldout = int(np.sum(is_known & ~is_heldout))
    heldout_rows, rows = rows[is_heldout], rows[~is_known]
    if num_sequences is not None and num_sequences < len(rows):
        drawn = permute(np.arange(num_sequences), num_items=len(rows), key=np.zeros(1, np.uint64))
        rows = rows[np.sort(drawn)]  # at random: files are often sorted by class
    fewest = np.bincount(heldout_rows[:, 0], minlength=num_classes).min()
    have_rows = min(len(rows), subset_size(len(rows), subset_frac))
    if fewest < _MIN_HELDOUT or have_rows < num_streams:
        raise DataError(
            f"data.path={path}: too few texts: have {have_rows} for a trainer"
            f" ({num_also_heldout} that are held out too are left out) and {fewest} held out"
            f" of the rarest class, need {num_streams}, one per worker stream, and {_MIN_HELDOUT};"
            " give more, fewer workers (ensemble.num_workers) or a larger data.heldout_frac"
        )
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for part in (rows, heldout_rows):
        digest.update(f"{part.shape}".encode())
        digest.update(np.ascontiguousarray(part).data)
    return Labelled(
        rows=rows,
        heldout_rows=heldout_rows,
        tokenizer=tokenizer,
        fingerprint=digest.hexdigest(),
        shards=tuple(intake.shards),
        num_truncated=num_truncated,
        seed=seed,
        num_streams=num_streams,
        subset_frac=subset_frac,
        num_also_heldout=num_also_heldout,
    )


def balanced(rows: np.ndarray) -> np.ndarray:
    """Positions of rows, as many of each class and the classes taking turns, in the rows' order."""
    by_class = [np.flatnonzero(rows[:, 0] == label) for label in np.unique(rows[:, 0])]
    fewest = min(map(len, by_class))
    return np.stack([places[:fewest] for places in by_class], axis=1).reshape(-1)


def _by_class(labels: np.ndarray, heldout_frac: float) -> np.ndarray:
    """Which texts are held out: of the first n of a class, round(n * heldout_frac)."""
    is_heldout = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        marks = np.floor(np.arange(len(places) + 1) * heldout_frac + 0.5)
        is_heldout[places] = np.diff(marks) > 0
    return is_heldout


def _rows(
    texts: list[str], labels: np.ndarray, tokenizer: Tokenizer, sequence_length: int
) -> tuple[np.ndarray, int]:
    first = tokenizer.eot_id if tokenizer.first_id is None else tokenizer.first_id
    room = sequence_length - 2
    encoded, num_truncated = [], 0
    for start in range(0, len(texts), 1000):
        for ids in tokenizer.encode_batch(texts[start : start + 1000]):
            num_truncated += len(ids) > room
            encoded.append([first, *ids[:room], tokenizer.eot_id])
    lengths = np.array([len(ids) for ids in encoded])
    rows = np.zeros((len(texts), NUM_FIELDS + _bucket(lengths.max(), sequence_length)), np.int32)
    rows[:, 0], rows[:, 1] = labels, lengths
    for row, ids in zip(rows, encoded, strict=True):
        row[NUM_FIELDS : NUM_FIELDS + len(ids)] = ids
    return rows, num_truncated


def _bucket(length: int, longest: int) -> int:
    """The next power of two, or midpoint of two, that holds a length; at most `longest`."""
    power = 1 << (int(length) - 1).bit_length()
    return min(power * 3 // 4 if length <= power * 3 // 4 else power, longest)


def _counts(rows: np.ndarray) -> str:
    return ", ".join(map(str, np.bincount(rows[:, 0])))
