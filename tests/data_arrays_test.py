"""Rows from an array: how they are cut, held out, sampled and refused."""

import numpy as np
import pytest
from toy import LENGTH, bigram_loss, init_fn, settings_of

from adloco_jax import ArrayRows, fit
from adloco_jax.errors import ConfigError, DataError, UserError

pytestmark = pytest.mark.usefixtures("one_device")

NUMBERED = np.arange(40 * (LENGTH + 1)).reshape(40, LENGTH + 1)  # no two rows are equal


def sampled(rows, count, trainer=0, **groups):
    """The first token of each row that the worker streams give first."""
    settings = settings_of(ensemble={"num_workers": 4, "num_trainers": 2}, **groups)
    ordered = rows.ordered(settings)
    return [ordered.batch(trainer, stream, 0, count)[:, 0].tolist() for stream in range(4)]


def test_worker_streams_share_out_all_rows_and_trainers_and_seeds_order_them_anew():
    rows = ArrayRows(NUMBERED, heldout=0.1)
    first = sampled(rows, 9)
    assert sorted(sum(first, [])) == rows.rows[:, 0].tolist()  # each row once, to one worker
    assert sampled(rows, 9) == first
    assert sampled(rows, 9, trainer=1) != first != sampled(rows, 9, seed=1)
    subsets = [sum(sampled(rows, 4, m, data={"subset_frac": 0.5}), []) for m in (0, 1)]
    assert [len(set(subset)) for subset in subsets] == [16, 16]
    assert set(subsets[0]) != set(subsets[1])
    batch = rows.ordered(settings_of()).batch(1, 2, 5, 3)
    assert batch.dtype == np.int32 and batch.shape == (3, LENGTH + 1)


def test_a_sequence_is_cut_and_its_end_held_out():
    cut = ArrayRows(np.arange(40 * 9 + 5), sequence_length=8, heldout=0.1)
    np.testing.assert_array_equal(np.concatenate([cut.rows, cut.heldout_rows]), NUMBERED)
    assert len(cut.heldout_rows) == 4
    own = ArrayRows(NUMBERED, heldout=NUMBERED[:3] + 1)
    assert len(own.rows) == 40 and own.heldout_rows[0, 0] == 1


def test_held_out_rows_that_are_trained_on_are_a_warning():
    for heldout in (NUMBERED[[0, 3]], np.stack([NUMBERED[0], NUMBERED[0] + 1, NUMBERED[0]])):
        with pytest.warns(UserWarning, match=rf"^heldout: 2 of {len(heldout)} rows are also"):
            ArrayRows(NUMBERED.astype(np.uint16), heldout=heldout)


def test_the_fingerprint_is_of_the_content():
    rows = ArrayRows(NUMBERED)
    assert ArrayRows(NUMBERED.astype(np.uint16)).fingerprint == rows.fingerprint
    assert ArrayRows(NUMBERED.ravel(), sequence_length=LENGTH).fingerprint == rows.fingerprint
    changed = NUMBERED.copy()
    changed[7, 3] += 1
    others = [ArrayRows(changed), ArrayRows(NUMBERED, heldout=0.2)]
    assert rows.fingerprint not in {other.fingerprint for other in others}


REFUSED = {
    "tokens: float64 of shape": lambda: ArrayRows(NUMBERED * 1.0),
    "tokens: int64 of shape (2, 2, 2)": lambda: ArrayRows(np.zeros((2, 2, 2), np.int64)),
    "tokens: int64 of shape (9, 2), sequence_length=None, ids from 0 to 4294967296": lambda: (
        ArrayRows([[0, 2**32]] * 9)
    ),
    "(90,), sequence_length=None; give ArrayRows the length of its rows: ArrayRows(..., seq": (
        lambda: ArrayRows(np.arange(90))
    ),
    "sequence_length=5; give": lambda: ArrayRows(NUMBERED, sequence_length=5),
    "corpus: have 0 rows for a trainer": lambda: ArrayRows(NUMBERED, heldout=1.5).ordered(
        settings_of()
    ),
    "heldout: int64 of shape (40, 4), seq": lambda: ArrayRows(NUMBERED, heldout=NUMBERED[:, :4]),
    "data.sequence_length = 8": lambda: ArrayRows(NUMBERED[:, :5]).ordered(settings_of()),
    "corpus: have 3 rows": lambda: ArrayRows(NUMBERED[:5]).ordered(settings_of()),
}


@pytest.mark.parametrize("start", REFUSED)
def test_what_cannot_be_read_is_refused_in_a_line_that_names_it(start):
    with pytest.raises((ConfigError, DataError)) as refusal:
        REFUSED[start]()
    (line,) = str(refusal.value).splitlines()
    assert start in line


def test_fit_refuses_rows_of_another_length_before_it_makes_a_folder(tmp_path):
    functions = {"init_fn": init_fn, "loss_fn": bigram_loss}
    with pytest.raises(UserError, match="data.sequence_length = 8: .* have 4; set it to 4"):
        fit(settings_of(), corpus=ArrayRows(NUMBERED[:, :5]), workdir=tmp_path / "r", **functions)
    assert list(tmp_path.iterdir()) == []
