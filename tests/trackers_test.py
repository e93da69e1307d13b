"""TensorBoard and W&B: what they are told, and that no run depends on them."""

import importlib.machinery
import os
import signal
import sys
import threading
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from toy import bigram_loss, corpus, init_fn, settings_of

from adloco_jax.errors import ConfigError, Preempted
from adloco_jax.run import trackers
from adloco_jax.run.ledger import Ledger, deterministic_lines, read
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")

RUN = {
    "num_rounds": 4,
    "batching": {"eta": 0.5},
    "merge": {"every_rounds": 3},
    "eval": {"every_rounds": 2, "num_sequences": 8},
}
BOTH = {"log": {"tensorboard": True, "wandb": True}}


def run(workdir, settings, **others):
    functions = {"init_fn": init_fn, "loss_fn": bigram_loss, "corpus": corpus()} | others
    return fit(settings, workdir=workdir, **functions)


def events(workdir, name):
    return [e for e in read(Path(workdir) / "ledger.jsonl") if e["event"] == name]


class Standin:
    """SummaryWriter and a W&B run at once: remembers what it is told, and may fail or hang."""

    def __init__(self, fail_at=None, hang=None):
        self.calls, self.opened, self.closed = [], [], 0
        self.fail_at, self.hang, self.step = fail_at, hang, 0

    def open(self, *args, **options):
        self.opened.append((args, options))
        if options.get("purge_step") == 0:
            self.calls = []
        self.step = 1 + max((step for _, _, step in self.calls if step), default=-1)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed += 1

    def told(self, name, value, step):
        if self.hang:
            self.hang.wait()
        if len(self.calls) + 1 == self.fail_at:
            raise RuntimeError("a tracker's\nown trouble")
        self.calls.append((name, value, step))

    add_scalar = add_text = told

    def log(self, numbers, step=None, commit=None):
        if step is not None and step < self.step:
            return  # as W&B does
        self.step = self.step if step is None else step
        for name, value in numbers.items():
            self.told(name, value, step)

    def values(self, name):
        return [(step, value) for told, value, step in self.calls if told == name]


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


def assert_same(result, plain):
    jax.tree.map(np.testing.assert_array_equal, result.ensemble, plain.ensemble)
    lines = [deterministic_lines(read(r.workdir / "ledger.jsonl")) for r in (result, plain)]
    assert lines[0] == lines[1]


def test_trackers_are_told_the_ledgers_numbers(tmp_path, board, wandb, plain):
    assert_same(run(tmp_path / "r", settings_of(**RUN, **BOTH)), plain)
    rounds = [e for e in events(tmp_path / "r", "round") if e["trainer"] == 0]
    evals = [e for e in events(tmp_path / "r", "eval") if e["trainer"] == "consensus"]
    memory = events(tmp_path / "r", "memory")
    (merge,) = events(tmp_path / "r", "merge")
    for told in (board, wandb):
        for name, lines, field in [
            ("train_loss/trainer_0", rounds, "train_loss"),
            ("batch_requested/trainer_0", rounds, "requested_batch_size"),
            ("accumulation/trainer_0", rounds, "num_accum_steps"),
            ("heldout_loss/consensus", evals, "loss"),
            ("memory/host_peak_bytes", memory, "host_peak_bytes"),
            ("merge/barrier", [merge], "barrier"),
        ]:
            assert told.values(name) == [(e["round"], e[field]) for e in lines], name
        assert dict(told.values("total/bytes"))[4] == evals[-1]["bytes_total"]
        (text,) = told.values("merge")
        assert f'"into": {merge["into"]}' in text[1]
        assert all(value > 0 for _, value in told.values("tokens_per_s/trainer_0"))
        assert told.closed == 1
    assert not events(tmp_path / "r", "fault")
    ((folder,), options) = board.opened[0]
    assert folder == str(tmp_path / "r" / "tensorboard") and options["purge_step"] == 0
    assert wandb.opened[0][1]["config"]["batching"]["eta"] == 0.5


def test_what_was_not_finite_is_no_scalar():
    line = {"event": "eval", "round": 1, "trainer": 3, "loss": None, "perplexity": 2.0}
    assert trackers.scalars(line) == {"perplexity/trainer_3": 2.0}


def test_devices_that_do_not_count_are_left_out():
    line = {"event": "memory", "round": 1, "host_peak_bytes": 5, "device_peak_bytes": [None, 7]}
    named = {"memory/host_peak_bytes": 5, "memory/device_1_peak_bytes": 7}
    assert trackers.scalars(line) == named


@pytest.mark.parametrize("fail_at", [1, 3])
def test_a_tracker_that_raises_is_dropped_and_changes_nothing(
    tmp_path, monkeypatch, wandb, plain, capsys, fail_at
):
    board = install(monkeypatch, "tensorboardX", Standin(fail_at=fail_at))
    assert_same(run(tmp_path / "r", settings_of(**RUN, **BOTH)), plain)
    (fault,) = events(tmp_path / "r", "fault")
    assert (fault["kind"], fault["tracker"], fault["round"]) == ("tracker", "tensorboard", 1)
    assert fault["cause"] == "RuntimeError: a tracker's own trouble"
    assert capsys.readouterr().out.count("log.tensorboard is off from here on") == 1
    assert len(board.calls) == fail_at - 1 and board.closed == 1
    assert len(wandb.values("heldout_loss/consensus")) == 2  # the other goes on
    assert len(wandb.values("fault")) == 1


def test_a_tracker_that_cannot_be_opened_is_dropped(tmp_path, monkeypatch, plain):
    def no_network(**_):
        raise TimeoutError("no network")

    install(monkeypatch, "wandb", Standin())
    monkeypatch.setattr(sys.modules["wandb"], "init", no_network)
    assert_same(run(tmp_path / "r", settings_of(**RUN, log={"wandb": True})), plain)
    (fault,) = events(tmp_path / "r", "fault")
    assert fault["cause"] == "TimeoutError: no network"


def test_a_tracker_that_hangs_holds_up_nothing_but_the_end(tmp_path, monkeypatch, plain):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    hang = threading.Event()
    install(monkeypatch, "tensorboardX", Standin(hang=hang))
    try:
        result = run(tmp_path / "r", settings_of(**RUN, log={"tensorboard": True}))
    finally:
        hang.set()
    assert_same(result, plain)
    (fault,) = events(tmp_path / "r", "fault")
    assert "0.2 s" in fault["cause"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_missing_is_named_before_anything_is_made(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
    with pytest.raises(ConfigError) as refused:
        run(tmp_path / "r", settings_of(**RUN, log={name: True}))
    assert refused.value.exit_code == 2
    assert f"pip install 'adloco-jax[{name}]'" in str(refused.value)
    assert not (tmp_path / "r").exists()


class Signalling:
    """The toy's rows; in the third round SIGTERM comes, or reading them fails."""

    def __init__(self, fails=False):
        self.reads, self.fails = 0, fails

    def __getattr__(self, name):
        return getattr(corpus(), name)

    def batch(self, *args):
        self.reads += 1
        if self.reads == 10 and self.fails:
            raise OSError(5, "Input/output error")
        if self.reads == 10:
            signal.raise_signal(signal.SIGTERM)
        return corpus().batch(*args)


def test_a_run_that_goes_on_does_so_in_the_same_place(tmp_path, board, wandb, plain):
    settings = settings_of(**RUN, **BOTH)
    with pytest.raises(Preempted):
        run(tmp_path / "r", settings, corpus=Signalling())
    assert_same(run(tmp_path / "r", settings), plain)
    assert run(tmp_path / "r", settings).loss == plain.loss  # finished: nothing is opened
    starts = [e["round"] for e in events(tmp_path / "r", "start")]
    assert len(starts) == 2 and starts[1] > 0
    assert len(board.opened) == len(wandb.opened) == 2
    first, second = (options for _, options in wandb.opened)
    assert first["id"] == second["id"] and second["resume"] == "allow"
    for told in (board, wandb):
        rounds = [e for e in events(plain.workdir, "round") if e["trainer"] == 0]
        losses = [(e["round"], e["train_loss"]) for e in rounds]
        assert told.values("train_loss/trainer_0") == losses


def test_a_tracker_switched_on_late_is_told_the_run_from_its_beginning(tmp_path, board, wandb):
    with pytest.raises(Preempted):
        run(tmp_path / "r", settings_of(**RUN), corpus=Signalling())
    run(tmp_path / "r", settings_of(**RUN, **BOTH))
    evals = [e for e in events(tmp_path / "r", "eval") if e["trainer"] == "consensus"]
    for told in (board, wandb):
        assert len(told.opened) == 1
        assert told.values("heldout_loss/consensus") == [(e["round"], e["loss"]) for e in evals]


def test_rounds_that_are_run_again_leave_no_gap(tmp_path, board, wandb):
    settings = settings_of(**RUN | {"eval": {"every_rounds": 1}}, **BOTH)
    run(tmp_path / "r", settings, corpus=Signalling(fails=True))
    assert [e["kind"] for e in events(tmp_path / "r", "fault")] == ["round_failed"]
    assert [e["round"] for e in events(tmp_path / "r", "start")] == [0, 0]
    assert [e["round"] for e in events(tmp_path / "r", "memory")] == [1, 2, 3, 4, 4]
    for told in (board, wandb):
        assert [step for step, _ in told.values("heldout_loss/consensus")] == [1, 2, 3, 4]


def test_what_wandb_has_already_is_not_sent_again(tmp_path, wandb):
    for num_rounds in (3, 4):
        run(tmp_path / "r", settings_of(**RUN | {"num_rounds": num_rounds}, log={"wandb": True}))
    assert len(wandb.opened) == 2 and len(wandb.values("merge")) == 1


def test_two_runs_have_two_ids(tmp_path, wandb):
    settings = settings_of(**RUN | {"num_rounds": 1}, log={"wandb": True})
    for name in ("a", "b"):
        run(tmp_path / name, settings)
    first, second = (options["id"] for _, options in wandb.opened)
    assert first != second


def test_the_ledger_tells_of_a_line_once_it_is_on_disk(tmp_path):
    told = []
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, lambda line: told.append((line, read(path)[-1]))) as ledger:
        ledger.write("round", loss=np.float32(0.5), noise=float("nan"))
    assert told == [({"event": "round", "loss": 0.5, "noise": None},) * 2]


def test_memory_is_measured_at_each_evaluation_and_at_the_end(plain):
    lines = events(plain.workdir, "memory")
    assert [e["round"] for e in lines] == [2, 4, 4]
    host = [e["host_peak_bytes"] for e in lines]
    assert host == sorted(host)
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 50e6 < host[0] <= host[-1] < ram
    assert lines[0]["device_peak_bytes"] == [None]  # a CPU's
    assert all(e["needed_bytes"] > 0 for e in events(plain.workdir, "compile"))


def test_device_peaks_are_the_backends(tmp_path, monkeypatch):
    from adloco_jax.run import programs

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 34, "bytes_in_use": 3}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(), Device()])
    assert programs.measured_peaks()["device_peak_bytes"] == [34, 34]


def test_the_real_tensorboardx_writes_files_that_hold_the_scalars(tmp_path, plain):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    settings = settings_of(**RUN, log={"tensorboard": True})
    assert_same(run(tmp_path / "r", settings), plain)
    assert not events(tmp_path / "r", "fault")
    (path,) = (tmp_path / "r" / "tensorboard").iterdir()
    content, losses = path.read_bytes(), {}
    while content:  # records: length, its checksum, data, its checksum
        length = int.from_bytes(content[:8], "little")
        data, content = content[12 : 12 + length], content[16 + length :]
        event = Event.FromString(data)
        assert masked_crc32c(data)
        for value in event.summary.value:
            if value.tag == "heldout_loss/consensus":
                losses[event.step] = value.simple_value
    assert losses == pytest.approx(
        {
            e["round"]: e["loss"]
            for e in events(plain.workdir, "eval")
            if e["trainer"] == "consensus"
        }
    )
