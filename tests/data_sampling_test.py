import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adloco_jax.data.sampling import RowOrder, permute, stream_rows


def key(number):
    return np.array([number], np.uint64)


def rows_of(seed=0, *, num_rows=100, num_streams=2, subset_frac=1.0, **changes):
    order = RowOrder(seed, num_rows, num_streams, subset_frac)
    return stream_rows(order, **(dict(trainer=0, stream=0, start=0, count=50) | changes))


@settings(max_examples=60, deadline=None)
@given(num_items=st.integers(1, 3000), number=st.integers(0, 2**64 - 1))
@example(num_items=1, number=7)
@example(num_items=256, number=7)
@example(num_items=257, number=7)
def test_permute_is_a_permutation(num_items, number):
    image = permute(np.arange(num_items), num_items=num_items, key=key(number))
    np.testing.assert_array_equal(np.sort(image), np.arange(num_items))


def test_permute_of_hundreds_of_millions_spreads_entries_and_keeps_no_array_of_them():
    num_items = 3 * 10**8
    index = np.concatenate([np.arange(50_000), num_items - 1 - np.arange(50_000)])
    image = permute(index, num_items=num_items, key=key(1))
    assert image.min() >= 0 and image.max() < num_items
    assert len(np.unique(image)) == len(index)
    # Consecutive entries are spread over the whole range: each tenth holds about a tenth.
    counts = np.histogram(image, bins=10, range=(0, num_items))[0]
    np.testing.assert_allclose(counts, len(index) / 10, rtol=0.05)
    # The least of several, because another thread of the process may allocate meanwhile.
    assert min(peak_bytes(num_items) for _ in range(5)) < 100_000


def peak_bytes(num_items):
    """Most bytes that a hundred entries of a permutation hold at a time."""
    tracemalloc.start()
    try:
        permute(np.arange(100), num_items=num_items, key=key(1))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def images_of(num_items, keys):
    """The position to which each entry goes, for each key."""
    places = range(num_items)
    return [permute(np.full(len(keys), i), num_items=num_items, key=keys) for i in places]


def assert_uniform(counts, num_draws):
    """Pearson's chi-squared test of equal cells at level 1e-4 (Wilson and Hilferty)."""
    cells = counts.size
    expected = num_draws / cells
    freedom = 2 / (9 * (cells - 1))
    bound = (cells - 1) * (1 - freedom + 3.72 * freedom**0.5) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < bound


@pytest.mark.parametrize("num_items", [3, 6])
def test_every_order_of_a_few_rows_is_equally_likely(num_items):
    orders = {order: k for k, order in enumerate(itertools.permutations(range(num_items)))}
    keys = np.arange(50 * len(orders), dtype=np.uint64)  # also for small consecutive keys
    found = [orders[order] for order in zip(*images_of(num_items, keys), strict=True)]
    assert_uniform(np.bincount(found, minlength=len(orders)), len(keys))


def test_every_place_of_several_rows_has_every_value_equally_often():
    num_items = 9
    keys = np.arange(20_000, dtype=np.uint64)
    images = images_of(num_items, keys)
    for image in images:
        assert_uniform(np.bincount(image, minlength=num_items), len(keys))
    # In a Feistel network of so few entries the first value fixes nearly all of the second.
    pairs = np.bincount(num_items * images[0] + images[1], minlength=num_items**2)
    assert_uniform(pairs[pairs > 0], len(keys))
    assert np.count_nonzero(pairs) == num_items * (num_items - 1)


def test_permute_keeps_its_golden_values():
    # permute(np.arange(10), num_items=10, key=np.array([2025], np.uint64)); rows_of(17, ...):
    # no library enters, so a change here changes the data order of every run.
    image = permute(np.arange(10), num_items=10, key=key(2025))
    assert image.tolist() == [3, 7, 4, 5, 8, 0, 9, 6, 1, 2]
    stream = dict(trainer=2, stream=1, start=5, count=8)
    rows = rows_of(17, **stream, num_rows=1000, num_streams=4, subset_frac=0.5)
    assert rows.tolist() == [584, 247, 862, 607, 609, 562, 246, 364]
    assert rows.dtype == np.int64


@pytest.mark.parametrize(
    ("num_rows", "num_streams", "subset_frac"),
    [(1, 1, 1.0), (7, 7, 1.0), (100, 3, 1.0), (101, 4, 0.5)],
)
def test_streams_are_disjoint_and_cover_the_subset_every_epoch(num_rows, num_streams, subset_frac):
    seen = []
    for stream in range(num_streams):
        size = len(range(stream, int(subset_frac * num_rows), num_streams))
        pool = dict(num_rows=num_rows, num_streams=num_streams, subset_frac=subset_frac)
        rows = rows_of(5, trainer=1, stream=stream, count=3 * size, **pool)
        epochs = np.sort(rows.reshape(3, size), axis=1)
        np.testing.assert_array_equal(epochs, epochs[:1].repeat(3, axis=0))
        seen.append(epochs[0])
    owned = np.concatenate(seen)
    assert len(np.unique(owned)) == len(owned) == max(1, int(subset_frac * num_rows))
    assert owned.min() >= 0 and owned.max() < num_rows


def test_each_epoch_trainer_and_seed_has_its_own_order():
    changes = [dict(start=50 * epoch) for epoch in range(3)] + [dict(trainer=1)]
    changes += [dict(seed=seed) for seed in (1, -1, 2**70 + 3)]
    orders = {tuple(rows_of(**change)) for change in changes}
    assert len(orders) == len(changes)


def test_trainers_draw_different_subsets():
    pool = dict(count=500, num_rows=1000, num_streams=1, subset_frac=0.5)
    subsets = [set(rows_of(trainer=trainer, **pool)) for trainer in (0, 1)]
    assert [len(subset) for subset in subsets] == [500, 500]
    assert 200 < len(subsets[0] & subsets[1]) < 300


@settings(max_examples=50, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 200), max_size=6).map(sorted),
    num_rows=st.integers(3, 60),
    start=st.integers(0, 2**40),
)
def test_any_slicing_into_batches_gives_the_same_sequence(cuts, num_rows, start):
    def rows(first, last):
        pool = dict(num_rows=num_rows, num_streams=3)
        return rows_of(3, stream=2, start=start + first, count=last - first, **pool)

    edges = [0, *cuts, 200]
    parts = [rows(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    np.testing.assert_array_equal(np.concatenate(parts), rows(0, 200))
