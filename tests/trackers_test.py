"""TensorBoard and W&B: the values they receive; no run depends on them."""

import importlib.machinery
import os
import sys
import types

import pytest
from toy import settings_of
from toy_runs import GROWING, assert_same_end, events, run

from adloco_jax.run.watching import loggers as trackers

pytestmark = pytest.mark.usefixtures("one_device")

RUN = GROWING | {"num_rounds": 4}
BOTH = {"tensorboard": True, "wandb": True}


class Standin:
    """Stands in for a SummaryWriter and a W&B run: records what it receives, and may fail."""

    def __init__(self, fail_at=None):
        self.calls, self.opened, self.closed = [], [], 0
        self.fail_at, self.step, self.axes = fail_at, 0, {}

    def open(self, *args, **options):
        self.opened.append((args, options))
        if options.get("purge_step") == 0:
            self.calls = []
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed += 1

    def receive(self, name, value, step):
        if len(self.calls) + 1 == self.fail_at:
            raise RuntimeError("a tracker's\nown trouble")
        self.calls.append((name, value, step))

    add_scalar = add_text = receive

    def define_metric(self, pattern, step_metric):
        self.axes[pattern] = step_metric

    def log(self, numbers, step):
        assert step >= self.step, "W&B drops what comes too late"
        self.step = step + 1
        (axis,) = numbers.keys() & {*self.axes.values()}
        for name, value in numbers.items():
            self.receive(name, value, numbers[axis])

    def values(self, name):
        return [(step, value) for called, value, step in self.calls if called == name]


def install(monkeypatch, name, standin):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.SummaryWriter = module.init = standin.open
    module.Settings = dict
    monkeypatch.setitem(sys.modules, name, module)
    return standin


@pytest.fixture
def board(monkeypatch):
    return install(monkeypatch, "tensorboardX", Standin())


@pytest.fixture
def wandb(monkeypatch):
    return install(monkeypatch, "wandb", Standin())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run without trackers."""
    return run(tmp_path_factory.mktemp("plain") / "r", settings_of(**RUN))


def feed(workdir, lines, *, history=(), **log):
    """Sends ledger lines to trackers; returns the faults that they report."""
    faults = []
    log = settings_of(log=log).log
    sent = trackers.Trackers(log, workdir, history, lambda *fault: faults.append(fault))
    for line in lines:
        sent(line)
    sent.close()
    return faults


def test_trackers_receive_the_ledgers_numbers(tmp_path, board, wandb, plain):
    assert feed(tmp_path, events(plain.workdir), **BOTH) == []
    rounds = events(plain.workdir, "round", trainer=0)
    evals = events(plain.workdir, "eval", trainer="consensus")
    (merge,) = events(plain.workdir, "merge")
    for tracker in (board, wandb):
        for name, lines, field in [
            ("train_loss/trainer_0", rounds, "train_loss"),
            ("requested_batch_size/trainer_0", rounds, "requested_batch_size"),
            ("num_accum_steps/trainer_0", rounds, "num_accum_steps"),
            ("loss/consensus", evals, "loss"),
            ("host_peak_bytes/memory", events(plain.workdir, "memory"), "host_peak_bytes"),
            ("barrier/merge", [merge], "barrier"),
        ]:
            assert tracker.values(name) == [(e["round"], e[field]) for e in lines], name
        assert dict(tracker.values("bytes_total/consensus"))[4] == evals[-1]["bytes_total"]
        (text,) = tracker.values("merge")
        assert f'"into": {merge["into"]}' in text[1]
        assert all(value > 0 for _, value in tracker.values("tokens_per_s/trainer_0"))
        within = tracker.values("train_loss_by_update/trainer_0")
        assert within == [(n, loss) for e in rounds for n, loss in e["train_losses"]]
        assert within[-1][0] == sum(e["updates"] for e in rounds)
        assert tracker.closed == 1
    ((folder,), options) = board.opened[0]
    assert folder == str(tmp_path / "tensorboard") and options["purge_step"] == 0
    assert wandb.opened[0][1]["config"]["batching"]["eta"] == 0.5


def test_a_tracker_that_raises_is_dropped_and_changes_nothing(
    tmp_path, monkeypatch, wandb, plain, capsys
):
    board = install(monkeypatch, "tensorboardX", Standin(fail_at=3))
    result = run(tmp_path / "r", settings_of(**RUN, log=BOTH))
    assert_same_end(result, plain)
    (fault,) = events(result.workdir, "fault")
    assert (fault["kind"], fault["tracker"], fault["round"]) == ("tracker", "tensorboard", 1)
    assert fault["cause"] == "RuntimeError: a tracker's own trouble"
    assert capsys.readouterr().out.count("log.tensorboard is off from here on") == 1
    assert len(board.calls) == 2 and board.closed == 1
    assert len(wandb.values("loss/consensus")) == 2  # the other tracker continues
    assert len(wandb.values("fault")) == 1


def test_a_package_that_is_missing_is_named_and_the_run_goes_on(tmp_path, monkeypatch, plain):
    for package in ("tensorboardX", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    faults = feed(tmp_path, events(plain.workdir), **BOTH)
    assert [name for name, *_ in faults] == ["tensorboard", "wandb"]
    for (*_, cause), package in zip(faults, ("tensorboardX", "wandb"), strict=True):
        assert cause.startswith("ModuleNotFoundError: ") and package in cause


def test_a_resumed_runs_history_is_sent_once_and_rounds_run_again_leave_no_gap(
    tmp_path, board, wandb, plain
):
    lines = events(plain.workdir)
    evals = events(plain.workdir, "eval", trainer="consensus")
    again = [lines[0], *(e for e in lines if e.get("round", 0) > 2)]  # rounds 3 and 4
    history = [e for e in lines if e.get("round", 0) <= 2]
    for switched_on_late in (True, False):
        assert feed(tmp_path, again, history=history, **BOTH) == []
        for tracker in (board, wandb):
            assert tracker.values("loss/consensus") == [(e["round"], e["loss"]) for e in evals]
            assert len(tracker.opened) == (1 if switched_on_late else 2)
    feed(tmp_path, [lines[0] | {"time": "later"}], wandb=True)  # another run
    first, again, other = (options["id"] for _, options in wandb.opened)
    assert first == again != other


def test_memory_is_measured_at_each_evaluation_and_at_the_end(plain):
    lines = events(plain.workdir, "memory")
    assert [e["round"] for e in lines] == [2, 4, 4]
    host = [e["host_peak_bytes"] for e in lines]
    assert host == sorted(host)
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 50e6 < host[0] <= host[-1] < ram
    assert lines[0]["device_peak_bytes"] == [None]  # a CPU reports no peak
    assert all(e["needed_bytes"] > 0 for e in events(plain.workdir, "compile"))
