"""Compute the order in which workers read rows, and draw held-out rows, without storing either.

A *trainer* is a model in training, which has several workers. Each worker reads a *stream* of rows,
an endless sequence of numbers of rows. `stream_rows` computes any part of it from a few numbers
(`RowOrder`), by pseudo-random permutations (`permute`), whose *keys* are hashes, uint64. *Guard
rows* are held-out rows by which merges of trainers are judged. E counts held-out rows. Integers
and single operations of float64 give the same result on every platform and NumPy version.
"""

import dataclasses

import numpy as np

from adloco_jax.data.prepared import DocumentRows, rows_at
from adloco_jax.errors import ConfigError, DataError, counted
from adloco_jax.row_batch import RowBatch, as_row_batch
from adloco_jax.settings import Settings

_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment: 2**64 over the golden ratio, made odd
_UINT64_MASK = 2**64 - 1
# Rounds of the Feistel network. Four rounds hide the structure of a large range; a small range
# needs a few more.
_NUM_ROUNDS = 8
# If there are few entries, a Feistel network cannot produce most of their orders, however many
# rounds it has. So up to this number of entries are sorted by random numbers instead.
_MAX_SORTED = 9
MAX_GUARD_ROWS = 32  # most guard rows of a run; they are at most half of the held-out rows
# Hashed into a key for `permute`, so that keys for the two purposes differ.
_SUBSET = 1  # the choice of a trainer's subset of the rows
_EPOCH = 2  # the order of a worker's stream in an epoch


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The numbers that determine in which order each worker reads the rows.

    Attributes:
      seed: The run's seed, any integer.
      num_rows: Number of rows to train on.
      num_streams: Number of streams into which the subset of each trainer is divided.
      subset_frac: Fraction of all rows in the random subset of each trainer, in (0, 1].
    """

    seed: int
    num_rows: int
    num_streams: int
    subset_frac: float = 1.0

    @property
    def subset_size(self) -> int:
        """Number of rows in a trainer's random subset: the fraction rounded down, at least one."""
        return max(1, int(self.subset_frac * self.num_rows))


def order_of(settings: Settings, num_rows: int, *, where: str) -> RowOrder:
    """Make the `RowOrder` of a run.

    `num_rows` is the number of rows to train on, and `where` the "key=value" that names them in
    messages. Each trainer has `ensemble.num_workers` streams.

    Raises:
      DataError: If a trainer's subset has fewer rows than the first batches of all its workers.
    """
    num_streams = settings.ensemble.num_workers
    subset_frac = settings.data.subset_frac
    batch_size = settings.batching.initial_batch_size
    order = RowOrder(settings.seed, num_rows, num_streams, subset_frac)
    have = min(num_rows, order.subset_size)  # `subset_size` is at least one, also without rows
    need = num_streams * batch_size
    if have >= need:
        return order
    remedy = "a smaller batch"
    if have >= batch_size:  # there are enough for fewer workers
        remedy = f"ensemble.num_workers={have // batch_size}"
    raise DataError(
        f"{where}: have {have} rows for a trainer ({num_rows} rows in all,"
        f" data.subset_frac={subset_frac}), need {need}, a batch of {batch_size} for each of"
        f" {num_streams} worker streams; give more text, {remedy}, a smaller"
        " batching.initial_batch_size or data.sequence_length, or a larger data.subset_frac or"
        " data.num_sequences"
    )


def with_rows(settings: Settings, num_rows: int) -> Settings:
    """Return settings that know how many rows all trainers together read from.

    Each trainer reads a random subset, and together they read at most all rows. With `num_epochs`,
    the number of tokens at which training ends (`last_token`) follows from the number of these
    rows. `num_rows` is the number of rows to train on; 0 if it is not known, as of a user's own
    corpus.

    Raises ConfigError if `num_epochs` is set and `num_rows` is not known, or if the learning rate's
    warm-up would last longer than all training.
    """
    num_epochs = settings.num_epochs
    warmup_updates = settings.inner.warmup_updates
    if num_epochs and not num_rows:
        raise ConfigError("num_epochs: the corpus has no `rows` to count; set num_rounds")
    subset_size = max(1, int(settings.data.subset_frac * num_rows))  # as `RowOrder.subset_size`
    # The method keeps the number in the settings, where `last_token` needs it.
    settings = settings.with_rows(min(num_rows, subset_size * settings.ensemble.num_trainers))
    # Warm-up is a number of updates, of which a round has `steps_per_round`. The end of training is
    # a number of tokens.
    tokens_per_update = settings.round_tokens / settings.inner.steps_per_round
    warmup_tokens = warmup_updates * tokens_per_update
    if num_epochs and warmup_updates and warmup_tokens >= settings.last_token:
        raise ConfigError(
            f"inner.warmup_updates = {warmup_updates}, num_epochs = {num_epochs:g}: the warm-up"
            f" would outlast the passes over {counted(num_rows, 'row')}; shorten it"
        )
    return settings


def stream_rows(
    order: RowOrder, *, trainer: int, stream: int, start: int, count: int
) -> np.ndarray:
    """Return the numbers of `count` rows of a worker's stream, int64, from the position `start` on.

    Each trainer permutes all rows; the first `subset_size` are its subset. Stream w owns the
    positions of the subset that are congruent to w modulo `num_streams`, and visits them once an
    epoch, each epoch in a new order. How the stream is divided into batches does not matter.

    Args:
      order: The numbers that determine the order in this run.
      trainer: Permanent id of the trainer, not its position in the stack of trainers.
      stream: Number of the stream in [0, num_streams). It has rows, as `order_of` makes sure.
      start: Number of rows of the stream that were read before (the cursor).
      count: Number of rows, beyond the end of an epoch if need be.

    Source: docs/algorithm.md, section 1, "Data".
    """
    num_streams = order.num_streams
    num_owned = len(range(stream, order.subset_size, num_streams))  # rows of this stream
    # Of each wanted row: the epoch, and how many rows the stream visited before in this epoch.
    epoch, step = np.divmod(np.arange(start, start + count, dtype=np.int64), num_owned)
    epoch_key = _hash_to_key(_EPOCH, order.seed, trainer, stream, epoch)
    turn = permute(step, num_items=num_owned, key=epoch_key)  # which of its rows the stream visits
    position = stream + num_streams * turn
    subset_key = _hash_to_key(_SUBSET, order.seed, trainer)
    return permute(position, num_items=order.num_rows, key=subset_key)


def permute(index: np.ndarray, *, num_items: int, key: np.ndarray) -> np.ndarray:
    """Permute range(num_items) pseudo-randomly; return the images of `index`, as int64.

    A Feistel network permutes the smallest range(2**n) that contains range(num_items); an image
    outside goes through it again (cycle walking, less than twice on average). Cost and memory are
    proportional to the length of `index`.

    Args:
      index: Integers in [0, num_items), any length.
      num_items: Size of the range, 1 to 2**62.
      key: uint64[1], or one key, and so one permutation, for each entry of `index`.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"; the round function is
    the finaliser of splitmix64 (Steele, Lea and Flood 2014). Good for shuffling; not a cipher.
    """
    has_one_key = key.size == 1
    if num_items <= _MAX_SORTED:
        # So few items would get only some of their orders by a Feistel network. Sort them by random
        # numbers instead: those of splitmix64 from a seed, [keys, num_items].
        noise = _mix(_mix(key)[:, None] + _GAMMA * np.arange(1, num_items + 1, dtype=np.uint64))
        order = np.argsort(noise, axis=1, kind="stable")
        if has_one_key:
            return order[0, index]
        return order[np.arange(len(index)), index]

    num_bits = (num_items - 1).bit_length()
    image = _feistel(index.astype(np.uint64), num_bits, key)
    outside = np.flatnonzero(image >= num_items)
    while outside.size:
        outside_key = key if has_one_key else key[outside]
        image[outside] = _feistel(image[outside], num_bits, outside_key)
        outside = outside[image[outside] >= num_items]
    return image.astype(np.int64)


def interleave(labels: np.ndarray) -> np.ndarray:
    """Order labelled items so that every part of the order has about the same mix of labels.

    `labels` are integers [N]. Returns the items' indices in the new order, int64 [N]. Items of one
    label keep their order.
    """
    place = np.zeros(len(labels))
    for label in np.unique(labels):
        index = np.flatnonzero(labels == label)
        # Items of one label are spread evenly over the places between 0 and 1.
        place[index] = (np.arange(len(index)) + 0.5) / len(index)
    return np.argsort(place, kind="stable")


def _feistel(block: np.ndarray, num_bits: int, key: np.ndarray) -> np.ndarray:
    """Permute range(2**num_bits) by a Feistel network; return the images of `block`.

    `block` is uint64 [n] in this range, and `key` uint64 [1] or [n], one for each entry.
    """
    # The halves have the same number of bits, or differ by one. They change places after every
    # round.
    left_bits = num_bits // 2
    right_bits = num_bits - left_bits
    left = block >> right_bits
    right = block & (2**right_bits - 1)
    for round_number in range(_NUM_ROUNDS):
        # The round's number stands in the highest byte, above the bits of `right`.
        noise = _mix(key ^ (right | round_number << 56))
        left, right = right, left ^ (noise & (2**left_bits - 1))
        left_bits, right_bits = right_bits, left_bits
    return left << right_bits | right


def _hash_to_key(*parts: int | np.ndarray) -> np.ndarray:
    """Return a key for `permute`, uint64 [1]: a hash of integers in their order.

    If one of `parts` is an array [n], the result has n keys, one for each of its entries.
    """
    # An array of one key, because NumPy warns if a scalar overflows, but not if an array does.
    key = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, int):
            word = np.uint64(part & _UINT64_MASK)
        else:
            word = part.astype(np.uint64)
        key = _mix((key ^ word) + _GAMMA)
    return key


def _mix(bits: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64 by the finaliser of splitmix64, whose constants these are."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


# --- Held-out rows -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Disjoint held-out rows: guard rows serve decisions only, reported rows the losses shown.

    Attributes:
      guard_rows: Rows by which merges are judged and the final model is chosen, [E, L + 1] as a
        model reads them; there may be none.
      report_rows: Rows on which the reported losses are measured, in the same form.
      batch_size: Number of rows in a call of the evaluation program.
      guard_E: Positions of the guard rows among all held-out rows, ascending int64 [E].
      report_E: Positions of the reported rows, ascending int64 [E].
    """

    guard_rows: np.ndarray | RowBatch
    report_rows: np.ndarray | RowBatch
    batch_size: int
    guard_E: np.ndarray
    report_E: np.ndarray

    def describe(self, num_classes: int | None = None) -> str:
        """Describe in one line how many rows each part has, and of each class if labelled."""

        def by_class(rows: np.ndarray | RowBatch) -> str:
            """Say how many rows each class has, as in " (5, 7 by class)"; empty without classes."""
            if num_classes is None:
                return ""
            classes = as_row_batch(rows).tokens[:, 0]  # a labelled row begins with its class
            counts = np.bincount(classes, minlength=num_classes)
            return f" ({', '.join(map(str, counts))} by class)"

        text = f"held out: losses are of {len(self.report_E)} rows{by_class(self.report_rows)}"
        if len(self.guard_E):
            text += f"; {len(self.guard_E)} others{by_class(self.guard_rows)} judge merges and"
            text += " choose the model"
        return text


def split_heldout(
    rows: np.ndarray | DocumentRows,
    *,
    num_sequences: int,
    batch_size: int,
    num_classes: int | None = None,
    num_trainers: int = 1,
) -> HeldOut:
    """Draw guard rows and reported rows from the held-out rows, each in the order of `rows`.

    Guard rows judge merges and choose the final model; reported rows measure the losses that are
    shown. The draw ignores the run's seed, so runs with different seeds report on the same rows.

    Args:
      rows: All held-out rows.
      num_sequences: Upper limit of reported rows.
      batch_size: Number of rows in a call of the evaluation program.
      num_classes: Number of classes of labelled rows, which then have about the same shares in both
        draws; else None.
      num_trainers: With one trainer there is nothing to choose, and no row is a guard row.

    Raises:
      DataError: Without a row, or with only one for several trainers.
    """
    num_rows = len(rows)
    need = 1
    use = "to report on"
    if num_trainers > 1:
        need = 2
        use = "half of them to choose among trainers"
    if num_rows < need:
        raise DataError(
            f"corpus.heldout_rows: have {num_rows}, need {need}, {use}; hold out more, for"
            " instance by data.heldout_frac"
        )
    same_key = np.zeros(1, np.uint64)  # in all runs, whatever their seed
    order = permute(np.arange(num_rows), num_items=num_rows, key=same_key)
    if num_classes is not None:
        # Then both draws, which are parts of the order, have about the same mix of classes.
        labels = np.asarray(rows)[order, 0]  # a labelled row begins with its class
        order = order[interleave(labels)]
    num_guard = min(MAX_GUARD_ROWS, num_rows // 2)
    guard_E = order[:num_guard]
    report_E = order[num_guard:]
    if num_trainers == 1:
        # The rows that would be guard rows come last, so that losses of one trainer and of several
        # are of the same rows.
        report_E = np.concatenate([report_E, guard_E])
        guard_E = guard_E[:0]
    guard_E = np.sort(guard_E)
    report_E = np.sort(report_E[:num_sequences])
    return HeldOut(
        guard_rows=rows_at(rows, guard_E),
        report_rows=rows_at(rows, report_E),
        batch_size=batch_size,
        guard_E=guard_E,
        report_E=report_E,
    )
