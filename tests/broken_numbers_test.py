"""Losses that are not finite: updates are skipped and counted, and the trainer is quarantined."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_runs
from toy import VOCAB, bigram_loss, corpus, settings_of
from toy_runs import events
from trees import same

from adloco_jax.engine import local as engine
from adloco_jax.engine.local import count_skips
from adloco_jax.engine.round import Outcome
from adloco_jax.errors import DivergedError
from adloco_jax.loop.adloco import start
from scripts.golden import deterministic_lines

pytestmark = pytest.mark.usefixtures("one_device")

RUN = {
    "num_rounds": 7,
    "ensemble": {"num_trainers": 3, "num_workers": 6},
    "batching": {"eta": 0.5},
    "merge": {"every_rounds": 4},
    "eval": {"every_rounds": 3, "num_sequences": 8},
}


def loss_fn(params, tokens):
    """The toy's loss; a row whose first id is the marker VOCAB makes it NaN."""
    factor = jnp.where(jnp.any(tokens[:, 0] == VOCAB), jnp.nan, 1.0)
    return factor * bigram_loss(params, jnp.minimum(tokens, VOCAB - 1))


@dataclasses.dataclass(frozen=True)
class Marked:
    """The toy's rows; some rows of a trainer get the marker as their first id."""

    trainers: tuple[int, ...]
    first: int  # first marked row of each stream
    last: int = 10**9

    def __getattr__(self, name):
        return getattr(corpus(), name)

    def batch(self, trainer, stream, start, count):
        rows = corpus().batch(trainer, stream, start, count).copy()
        place = start + np.arange(count)
        if trainer in self.trainers:
            rows[(self.first <= place) & (place < self.last), 0] = VOCAB
        return rows


def run(workdir, rows, groups=RUN, **others):
    return toy_runs.run(workdir, settings_of(**groups), corpus=rows, loss_fn=loss_fn, **others)


def test_one_broken_sequence_costs_one_update_and_nothing_else(tmp_path):
    # The batches and the trainers stay the same whatever is measured.
    constant = RUN | {"num_rounds": 3, "batching": {"test": "constant"}}
    clean = run(tmp_path / "clean", corpus(), constant)
    broken = run(tmp_path / "broken", Marked((1,), first=8, last=9), constant)
    (line,) = [e for e in events(broken.workdir, "round") if e["skipped_updates"]]
    assert (line["round"], line["trainer"], line["skipped_updates"]) == (2, 1, 2)  # both workers
    assert math.isfinite(line["train_loss"])
    (fault,) = events(broken.workdir, "fault")
    assert (fault["kind"], fault["trainer"], fault["updates"]) == ("skipped_updates", 1, 2)
    both = (deterministic_lines(events(w.workdir, "round")) for w in (clean, broken))
    first, second = ([e for e in own if e["trainer"] != 1] for own in both)
    assert first == second
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(broken.ensemble))


def test_a_trainer_that_stays_broken_is_quarantined_and_the_others_go_on_as_without_it(
    tmp_path, monkeypatch
):
    groups = RUN | {"batching": {"eta": 0.5, "test": "constant", "batch_cap": 4}}
    saved = groups | {"checkpoint": {"every_rounds": 1}}
    broken = run(tmp_path / "broken", Marked((1,), first=8), saved)
    (fault,) = events(broken.workdir, "fault", kind="quarantine")
    assert fault["trainer"] == 1 and fault["skipped_in_a_row"] >= 3
    assert broken.state.control.quarantined == [
        {"trainer": 1, "round": fault["round"], "workers": 2}
    ]
    since = min(e["round"] for e in events(broken.workdir, "round") if e["skipped_updates"] == 6)
    assert fault["round"] == since

    # For comparison: the same trainer is removed from a run in which nothing breaks.
    def drop(control, outcomes):
        control, _ = count_skips(control, outcomes)
        gone = [1] * (1 in control.trainers and control.round >= since)
        return control, gone

    monkeypatch.setattr(engine, "count_skips", drop)
    masked = run(tmp_path / "masked", corpus(), groups)
    both = [toy_runs.lines(w) for w in (broken.workdir, masked.workdir)]
    lines = [[e for e in own if e["event"] == "round" and e["trainer"] != 1] for own in both]
    assert lines[0] == lines[1]
    assert same(broken.ensemble, masked.ensemble)
    merged = [[e for e in own if e["event"] == "merge"] for own in both]
    first, second = ([(e["members"], e["weights"]) for e in own] for own in merged)
    assert first == second


def test_when_all_are_broken_the_run_ends_and_names_what_is_saved(tmp_path):
    groups = RUN | {"checkpoint": {"every_rounds": 1}}
    with pytest.raises(DivergedError, match="the last checkpoint is .*checkpoints/1;") as error:
        run(tmp_path / "r", Marked((0, 1, 2), first=8), groups)
    assert error.value.exit_code == 4
    assert events(tmp_path / "r", "end")[-1]["reason"] == "diverged"
    assert [e["round"] for e in events(tmp_path / "r", "round", skipped_updates=6)] == [2] * 3
    assert [e["trainer"] for e in events(tmp_path / "r", "fault", kind="quarantine")] == [0, 1, 2]


def alone(num_workers=1):
    """The control of a single trainer."""
    settings = settings_of(ensemble={"num_trainers": 1, "num_workers": num_workers})
    return start(settings.ensemble, settings.batching, 4)


def outcome(losses, skipped=()):
    loss_SR = np.array(losses, float)[:, None]
    skipped_SR = np.isin(np.arange(len(losses)), skipped)[:, None]
    return Outcome(np.where(skipped_SR, np.nan, loss_SR), skipped_SR, 1.0)


@pytest.mark.parametrize(
    ("rounds", "in_a_row", "is_broken"),
    [
        ([[0, 0, 1], [1, 0, 0]], 0, False),
        ([[0, 0, 1], [1, 1, 0]], 0, False),  # three skips in a row, but the last was usable
        ([[0, 0, 1], [1, 1, 1]], 4, True),
        ([[1, 1, 1]], 3, True),
    ],
)
def test_skips_in_a_row_are_counted_across_rounds(rounds, in_a_row, is_broken):
    control = alone()
    for skipped in rounds:
        control, broken = count_skips(control, {0: outcome([2.0] * 3, np.flatnonzero(skipped))})
    (trainer,) = control.trainers.values()
    assert (trainer.skipped_in_a_row, broken) == ({"0": in_a_row}, [0] * is_broken)


def test_a_worker_that_was_absent_keeps_its_count():
    control = alone()
    half = Outcome(np.full((2, 1), np.nan), np.array([[False], [True]]), 1.0)
    absent = Outcome(np.full((2, 1), np.nan), np.zeros((2, 1), bool), 1.0)
    for found, in_a_row in ((half, 1), (absent, 1), (half, 2), (half, 3)):
        control, broken = count_skips(control, {0: found})
        assert control.trainers[0].skipped_in_a_row == {"0": in_a_row}
    assert broken == [0]


def test_a_trainer_goes_on_while_one_of_its_workers_does():
    control = alone(num_workers=2)
    skipped_SR = np.array([[True, False]] * 3)
    both = Outcome(np.where(skipped_SR, np.nan, 2.0), skipped_SR, 1.0)
    for _ in range(3):
        control, broken = count_skips(control, {0: both})
        assert broken == []


@pytest.mark.parametrize(
    ("every", "expected"),
    [(None, [(1, 0.5), (2, 4.0), (3, 7.0)]), (2, [(2, 1.6666666666666667), (3, 7.0)])],
)
def test_losses_within_a_round_are_means_of_the_updates_that_were_made(every, expected):
    loss_SR = np.array([[0.0, 1.0], [np.nan, 4.0], [6.0, 8.0]])
    assert Outcome(loss_SR, np.isnan(loss_SR), 1.0).losses(every) == expected


def test_a_round_has_at_most_ten_losses():
    found = Outcome(np.ones((25, 1)), np.zeros((25, 1), bool), 1.0).losses(None)
    assert [end for end, _ in found] == [3, 6, 9, 12, 15, 18, 21, 24, 25]
