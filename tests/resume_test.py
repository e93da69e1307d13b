"""A run that was stopped goes on as if it had not been: bit for bit, from any round."""

import dataclasses
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from toy import bigram_loss, corpus, init_fn, settings_of

from adloco_jax.errors import Preempted
from adloco_jax.run.ledger import deterministic_lines, read
from adloco_jax.run.train import fit

# Growth, accumulation, and a merge of two after rounds 3 and 6, evaluated at every second round.
RUN = {
    "num_rounds": 7,
    "batching": {"eta": 0.5},
    "merge": {"every_rounds": 3},
    "eval": {"every_rounds": 2, "num_sequences": 8},
}


def run(workdir, settings=None, *, rows=None, **others):
    return fit(
        settings or settings_of(**RUN),
        workdir=workdir,
        corpus=rows or corpus(),
        init_fn=init_fn,
        loss_fn=bigram_loss,
        **others,
    )


@dataclasses.dataclass(frozen=True)
class Signalling:
    """The toy's rows; a signal is sent when the sequences of a round are read."""

    at_read: int
    number: int = signal.SIGTERM
    reads: list = dataclasses.field(default_factory=list)

    def __getattr__(self, name):
        return getattr(corpus(), name)

    def batch(self, trainer, stream, start, count):
        self.reads.append(start)
        if len(self.reads) == self.at_read:
            signal.raise_signal(self.number)
        return corpus().batch(trainer, stream, start, count)


def stop_at(workdir, at_read, settings=None, number=signal.SIGTERM):
    with pytest.raises(Preempted, match="the same command goes on") as stopped:
        run(workdir, settings, rows=Signalling(at_read, number))
    assert stopped.value.exit_code == 75


def lines(workdir):
    return deterministic_lines(read(Path(workdir) / "ledger.jsonl"))


def events(workdir, name):
    return [e for e in read(Path(workdir) / "ledger.jsonl") if e["event"] == name]


def assert_same_end(first, second):
    assert first.controller == second.controller
    assert first.loss == second.loss
    leaves = zip(jax.tree.leaves(first.ensemble), jax.tree.leaves(second.ensemble), strict=True)
    for one, other in leaves:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert lines(first.workdir) == lines(second.workdir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never interrupted."""
    result = run(tmp_path_factory.mktemp("whole") / "r")
    kinds = {line["event"] for line in lines(result.workdir)}
    assert kinds == {"round", "eval", "merge"} and len(result.controller.trainers) == 1
    assert max(line.get("num_accum_steps", 0) for line in lines(result.workdir)) > 1
    return result


@pytest.mark.parametrize("at_read", [1, 6, 10, 14, 18, 22])
def test_a_run_stopped_in_any_round_ends_as_the_uninterrupted_one(tmp_path, whole, at_read):
    stop_at(tmp_path / "r", at_read)
    assert_same_end(run(tmp_path / "r"), whole)


def test_a_run_stopped_after_every_round_ends_as_the_uninterrupted_one(tmp_path, whole):
    for _ in range(6):
        stop_at(tmp_path / "r", at_read=1)
    assert_same_end(run(tmp_path / "r"), whole)
    assert [e["round"] for e in events(tmp_path / "r", "start")] == list(range(7))
