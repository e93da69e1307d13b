"""Whole runs of the toy, lines of their ledgers, and rows that interrupt them."""

import dataclasses
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from toy import bigram_loss, corpus, init_fn, settings_of

from adloco_jax.errors import Preempted
from adloco_jax.run.kept.ledger import read
from adloco_jax.training import fit
from scripts.golden import deterministic_lines

# Growth, accumulation, and a merge of two after rounds 3 and 6, evaluated at every second round.
GROWING = {
    "num_rounds": 7,
    "batching": {"eta": 0.5},
    "merge": {"every_rounds": 3},
    "eval": {"every_rounds": 2, "num_sequences": 8},
}


def run(workdir, settings=None, **others):
    """Runs `fit` with the toy; `others` adds or replaces arguments."""
    given = {"corpus": corpus(), "init_fn": init_fn, "loss_fn": bigram_loss} | others
    given.setdefault("loss_unit", "nats/token")
    return fit(settings or settings_of(**GROWING), workdir=workdir, **given)


def events(workdir, name=None, **having):
    """The lines of a run's ledger, or those of one kind, with these fields."""
    wanted = having if name is None else having | {"event": name}
    return [e for e in read(Path(workdir) / "ledger.jsonl") if wanted.items() <= e.items()]


def lines(workdir):
    """The lines that are equal in all runs with one seed."""
    return deterministic_lines(events(workdir))


def assert_same_end(first, second):
    """Checks that two runs end with equal states and ledger lines."""
    assert first.state.control == second.state.control and first.loss == second.loss
    jax.tree.map(np.testing.assert_array_equal, first.ensemble, second.ensemble)
    assert lines(first.workdir) == lines(second.workdir)


@dataclasses.dataclass(frozen=True)
class Signalling:
    """The toy's rows; a signal is sent when the sequences of a round are read.

    Rows are read one round ahead.
    """

    at_read: int
    number: int = signal.SIGTERM
    times: int = 1
    reads: list = dataclasses.field(default_factory=list)

    def __getattr__(self, name):
        return getattr(corpus(), name)

    def batch(self, *place):
        self.reads.append(place)
        if self.at_read <= len(self.reads) < self.at_read + self.times:
            self.act()
        return corpus().batch(*place)

    def act(self):
        signal.raise_signal(self.number)


def stop_at(workdir, at_read, settings=None, number=signal.SIGTERM):
    """Makes a run that a signal stops at one of its reads."""
    with pytest.raises(Preempted, match="to resume: fit called again") as stopped:
        run(workdir, settings, corpus=Signalling(at_read, number))
    assert stopped.value.exit_code == 75
