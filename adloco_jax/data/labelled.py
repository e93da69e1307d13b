"""Texts with a class each: rows `[label, n, tokens...]`, held out by class."""

import dataclasses

import numpy as np

from adloco_jax.data import packing, sources
from adloco_jax.data.corpus import Corpus, find_sides, fingerprint_of, row_order, where_of
from adloco_jax.data.sampling import permute
from adloco_jax.data.tokenizers import Tokenizer, check_round_trip, load_fitting_tokenizer
from adloco_jax.errors import DataError
from adloco_jax.settings import Settings

NUM_FIELDS = 2  # before a row's tokens: its class, and how many of its tokens are real
_MIN_HELDOUT = 4  # per class


def load_labelled(settings: Settings) -> Corpus:
    """Read JSON lines of text and class, tokenise them, and split them class by class.

    A text of which a copy is held out is not trained on, whatever its class; texts that only begin
    alike are.

    A text becomes `[first] tokens [last]`: the tokenizer's own classification and separator tokens,
    or its end of text for both. Longer texts are truncated. Rows are no longer than the longest
    text needs, rounded up to a power of two or the midpoint of two, so that data of about one
    length share their programs.

    Args:
      settings: The run's; `data.sequence_length` is that of the longest text in tokens, first and
        last included, and `data.heldout_frac` the share of each class.

    Returns:
      Rows int32 [num_sequences, 2 + L] in memory: class, number of real tokens n, tokens (zeros
      from n on).

    Raises:
      ConfigError: If a path leads nowhere, or the tokenizer does not suit the model.
      DataError: If a text or label is missing or damaged, or a class has too few texts.
    """
    data, num_classes = settings.data, settings.model.num_classes
    tokenizer = load_fitting_tokenizer(data.tokenizer, settings.model.vocab_size)
    intake = sources.Intake()
    texts, labels, is_heldout = _read(settings, intake)
    check_round_trip(texts, tokenizer)
    rows, num_truncated = _rows(texts, labels, tokenizer, data.sequence_length)
    known = {text for text, held in zip(texts, is_heldout, strict=True) if held}
    is_known = np.array([text in known for text in texts], bool)
    heldout_rows, rows = rows[is_heldout], rows[~is_known]
    num_also_heldout = int(np.sum(is_known & ~is_heldout))
    if data.num_sequences is not None and data.num_sequences < len(rows):
        index = np.arange(data.num_sequences)
        drawn = permute(index, num_items=len(rows), key=np.zeros(1, np.uint64))
        rows = rows[np.sort(drawn)]  # at random: files are often sorted by class
    fewest = np.bincount(heldout_rows[:, 0], minlength=num_classes).min()
    if fewest < _MIN_HELDOUT:
        raise DataError(
            f"{where_of(data)}: too few texts: have {fewest} held out of the rarest class, need"
            f" {_MIN_HELDOUT}; give more, or a larger data.heldout_frac"
        )
    corpus = Corpus(
        rows=rows,
        heldout_rows=heldout_rows,
        tokenizer=tokenizer,
        fingerprint=fingerprint_of(
            tokenizer, f"{rows.shape}", rows, f"{heldout_rows.shape}", heldout_rows
        ),
        shards=tuple(intake.shards),
        num_documents=len(rows),
        num_heldout_documents=len(heldout_rows),
        tokens_per_byte=None,  # the loss is per example, not per token
        num_also_heldout=num_also_heldout,
        order=row_order(settings, rows, heldout_rows, num_also_heldout),
        num_truncated=num_truncated,
    )
    label, length, *tokens = corpus.batch(0, 0, 0, 1)[0]
    excerpt = packing.readable(np.array(tokens[1 : length - 1]), tokenizer, max_chars=240)
    return dataclasses.replace(
        corpus,
        description=f"data: {len(rows)} texts of at most {rows.shape[1] - NUM_FIELDS} tokens to"
        f" train on ({_counts(rows)} by class), {len(heldout_rows)} held out"
        f" ({_counts(heldout_rows)}); {num_truncated} were cut; a model will see, for"
        f" instance, of class {label}:\n  | {excerpt}",
    )


def _read(settings: Settings, intake: sources.Intake) -> tuple[list[str], np.ndarray, np.ndarray]:
    """All texts, their labels, and which are held out."""
    data, num_classes = settings.data, settings.model.num_classes
    columns = {"text_column": data.text_column, "label_column": data.label_column}
    sides = []
    for files, is_second in zip(find_sides(data), (False, True), strict=True):
        found = sources.labelled_documents(files, intake, num_classes=num_classes, **columns)
        side = list(found)
        counts = np.bincount([label for _, label in side], minlength=num_classes)
        if files and counts.min() < 1:
            raise DataError(
                f"{where_of(data, heldout=is_second)}: have {', '.join(map(str, counts))} texts of"
                f" classes 0 to {num_classes - 1}, need some of each; check"
                f" model.num_classes={num_classes}"
            )
        sides.append(side)
    texts, labels = zip(*sides[0], *sides[1], strict=True)
    labels = np.array(labels)
    is_heldout = np.repeat([False, True], [len(side) for side in sides])
    if not sides[1]:  # a share of each class, evenly along the reading order
        for label in range(num_classes):
            places = np.flatnonzero(labels == label)
            is_heldout[places] = packing.is_heldout(0, len(places), data.heldout_frac)
    return list(texts), labels, is_heldout


def balanced(rows: np.ndarray) -> np.ndarray:
    """Positions of rows, as many of each class and the classes taking turns, in the rows' order."""
    by_class = [np.flatnonzero(rows[:, 0] == label) for label in np.unique(rows[:, 0])]
    fewest = min(map(len, by_class))
    return np.stack([places[:fewest] for places in by_class], axis=1).reshape(-1)


def _rows(
    texts: list[str], labels: np.ndarray, tokenizer: Tokenizer, sequence_length: int
) -> tuple[np.ndarray, int]:
    first = tokenizer.eot_id if tokenizer.first_id is None else tokenizer.first_id
    room = sequence_length - 2
    all_ids = tokenizer.encode_batch(texts)
    lengths = np.array([min(len(ids), room) + 2 for ids in all_ids])
    rows = np.zeros((len(texts), NUM_FIELDS + _bucket(lengths.max(), sequence_length)), np.int32)
    rows[:, 0], rows[:, 1] = labels, lengths
    for row, ids, length in zip(rows, all_ids, lengths, strict=True):
        row[NUM_FIELDS : NUM_FIELDS + length] = [first, *ids[:room], tokenizer.eot_id]
    return rows, sum(len(ids) > room for ids in all_ids)


def _bucket(length: int, longest: int) -> int:
    """The next power of two, or midpoint of two, that holds a length; at most `longest`."""
    power = 1 << (int(length) - 1).bit_length()
    return min(power * 3 // 4 if length <= power * 3 // 4 else power, longest)


def _counts(rows: np.ndarray) -> str:
    return ", ".join(map(str, np.bincount(rows[:, 0])))
