"""A run that was stopped goes on as if it had not been: bit for bit, from any round."""

import collections
import dataclasses
import itertools
import json
import shutil
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from toy import bigram_loss, corpus, init_fn, settings_of

from adloco_jax.errors import CheckpointError, ConfigError, DataError, Preempted, ResourceError
from adloco_jax.run import checkpoint, crashpoints, engine
from adloco_jax.run.config import KNOBS
from adloco_jax.run.ledger import deterministic_lines, read
from adloco_jax.run.resume import change_class, exclusive, rebuild_ledger
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")

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


@pytest.mark.parametrize(
    "saves, evaluates, switches, stops", [*itertools.product([0, 1], repeat=4)]
)
def test_the_last_merge_may_fall_on_any_other_event(
    tmp_path, monkeypatch, saves, evaluates, switches, stops
):
    settings = settings_of(
        num_rounds=5,
        ensemble={"num_trainers": 2},
        batching={"test": "ramp", "ramp": ((0, 2), (3, 12 if switches else 4))},
        merge={"every_rounds": 3},
        checkpoint={"every_rounds": 3 if saves else 100},
        eval={"every_rounds": 3 if evaluates else 100, "num_sequences": 8},
    )
    control = run(tmp_path / "control", settings)
    assert len(control.controller.trainers) == 1
    assert [e["round"] for e in events(control.workdir, "merge")] == [3]
    assert (3 in [e["round"] for e in events(control.workdir, "eval")]) == bool(evaluates)
    if stops:
        merge = engine.LocalEngine.merge

        def stopped(*arguments):
            signal.raise_signal(signal.SIGTERM)
            return merge(*arguments)

        with monkeypatch.context() as patch, pytest.raises(Preempted):
            patch.setattr(engine.LocalEngine, "merge", stopped)
            run(tmp_path / "r", settings)
    assert_same_end(run(tmp_path / "r", settings), control)
    accumulates = [e["round"] for e in events(tmp_path / "r", "round") if e["num_accum_steps"] > 1]
    assert bool(accumulates) == bool(switches) and min(accumulates, default=4) == 4


def test_a_finished_run_is_left_as_it_is_and_gives_its_result(tmp_path):
    first = run(tmp_path / "r")
    for _ in range(2):
        again = run(tmp_path / "r")
        assert_same_end(again, first)
        assert len(events(tmp_path / "r", "start")) == len(events(tmp_path / "r", "end")) == 1
    leaves = zip(jax.tree.leaves(again.params), jax.tree.leaves(first.params), strict=True)
    assert all(np.array_equal(one, other) for one, other in leaves)


def test_more_rounds_go_on_from_a_finished_run(tmp_path, whole):
    run(tmp_path / "r", settings_of(**RUN | {"num_rounds": 4}))
    longer = run(tmp_path / "r")
    # The evaluation that ends a run of four rounds is no part of one of seven.
    ledger = [line for line in lines(tmp_path / "r") if line["event"] != "eval"]
    assert ledger == [line for line in lines(whole.workdir) if line["event"] != "eval"]
    assert longer.controller == whole.controller


def test_a_damaged_newest_checkpoint_is_set_aside_and_its_rounds_are_run_again(tmp_path, whole):
    settings = settings_of(**RUN, checkpoint={"every_rounds": 1})
    stop_at(tmp_path / "r", at_read=18, settings=settings)
    newest, older = checkpoint.list_rounds(tmp_path / "r" / "checkpoints")[:2]
    (tmp_path / "r" / "checkpoints" / str(newest) / "host.json").write_text("{}")
    assert_same_end(run(tmp_path / "r", settings), whole)
    (fault,) = events(tmp_path / "r", "fault")
    assert fault["kind"] == "checkpoint" and f"{newest}/host.json" in fault["cause"]
    assert [e["round"] for e in events(tmp_path / "r", "start")] == [0, older]


@pytest.mark.parametrize("lost", ["damaged", "deleted"])
def test_without_a_whole_checkpoint_a_run_never_starts_over(tmp_path, lost):
    stop_at(tmp_path / "r", at_read=10)
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        if lost == "deleted":
            shutil.rmtree(path)
        else:
            (path / "host.json").write_text("{}")
    before = (tmp_path / "r" / "ledger.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="no checkpoint is whole|are gone"):
        run(tmp_path / "r")
    assert (tmp_path / "r" / "ledger.jsonl").read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path, whole):
    stop_at(tmp_path / "r", at_read=10)
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    path = tmp_path / "r" / "ledger.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"checkpoint"' not in line]
    path.write_text("\n".join(kept) + "\n")
    assert_same_end(run(tmp_path / "r"), whole)


def test_a_ledger_that_was_changed_is_refused(tmp_path):
    stop_at(tmp_path / "r", at_read=10)
    path = tmp_path / "r" / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round": 1', b'"round": 9', 1))
    with pytest.raises(CheckpointError, match="ledger.jsonl: its first"):
        run(tmp_path / "r")


def damage_ledger(path, kind):
    """Damages the ledger of a run stopped in round 3; the deterministic lines that are lost."""
    rows = path.read_bytes().splitlines(keepends=True)
    parsed = [json.loads(row) for row in rows]
    place = [e["event"] for e in parsed].index("round") + 1  # the second trainer's line
    lost = [parsed[place]]
    if kind == "garbled":
        rows[place] = b"\0" * (len(rows[place]) - 1) + b"\n"
    elif kind == "deleted":
        del rows[place]
    elif kind == "shortened":
        lost, rows[place:] = parsed[place:], [rows[place][:20]]
    elif kind == "gone":
        lost, rows = parsed, []
    elif kind == "after the checkpoint":
        lost, rows = [], [*rows, b"x\n", rows[place]]
    path.write_bytes(b"".join(rows))
    return deterministic_lines(lost)


@pytest.mark.parametrize(
    "kind", ["garbled", "deleted", "shortened", "gone", "after the checkpoint"]
)
def test_a_damaged_ledger_is_rebuilt_and_the_newest_checkpoint_goes_on(tmp_path, whole, kind):
    stop_at(tmp_path / "r", at_read=10)
    path = tmp_path / "r" / "ledger.jsonl"
    lost = damage_ledger(path, kind)
    before = path.read_bytes()
    with pytest.raises((CheckpointError, DataError)) as refusal:
        run(tmp_path / "r")
    assert refusal.value.exit_code == 3 and path.read_bytes() == before
    assert "--rebuild-ledger" in str(refusal.value) and "scripts/export.py" in str(refusal.value)
    assert "rebuilt for the checkpoint of round 3" in rebuild_ledger(tmp_path / "r")
    # Once is enough: the next start may or may not ask for it, and so may the one after a kill.
    assert rebuild_ledger(tmp_path / "r") is None
    stop_at(tmp_path / "r", at_read=1)
    result = run(tmp_path / "r")
    assert result.controller == whole.controller and result.loss == whole.loss
    for one, other in zip(
        jax.tree.leaves(result.ensemble), jax.tree.leaves(whole.ensemble), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert lines(tmp_path / "r") == [line for line in lines(whole.workdir) if line not in lost]
    (gap,) = events(tmp_path / "r", "gap")
    assert gap["unreadable_lines"] == (kind in ("garbled", "after the checkpoint"))
    assert gap["lost_rounds"] == {"shortened": [2, 3], "gone": [1, 2, 3]}.get(kind, [])
    assert (gap["intact_bytes"] > 0) == (kind == "after the checkpoint")


def test_a_ledger_whose_rebuilt_lines_change_is_refused_again(tmp_path):
    stop_at(tmp_path / "r", at_read=10)
    path = tmp_path / "r" / "ledger.jsonl"
    damage_ledger(path, "deleted")
    rebuild_ledger(tmp_path / "r")
    path.write_bytes(path.read_bytes().replace(b'"round": 1', b'"round": 9', 1))
    with pytest.raises(CheckpointError, match="--rebuild-ledger"):
        run(tmp_path / "r")


def test_a_ledger_is_not_rebuilt_where_it_is_whole_or_no_checkpoint_is(tmp_path):
    assert rebuild_ledger(tmp_path / "r") is None and not (tmp_path / "r").exists()
    stop_at(tmp_path / "r", at_read=10)
    path = tmp_path / "r" / "ledger.jsonl"
    before = path.read_bytes()
    assert rebuild_ledger(tmp_path / "r") is None and path.read_bytes() == before
    damage_ledger(path, "garbled")
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    with pytest.raises(CheckpointError, match="no whole checkpoint to go on from"):
        rebuild_ledger(tmp_path / "r")


# -- what may change ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", KNOBS)
def test_every_key_has_a_class(key):
    assert change_class(key) in ("harmless", "accepted", "refused")


@pytest.mark.parametrize(
    "key",
    ["seed", "model.width", "model.vocab_size", "data.source", "data.sequence_length", "inner.tx"]
    + ["ensemble.num_trainers", "ensemble.num_workers", "data.tokenizer", "outer.tx"],
)
def test_what_makes_another_run_is_refused(key):
    assert change_class(key) == "refused"


def test_harmless_changes_go_on_without_a_word(tmp_path, whole):
    stop_at(tmp_path / "r", at_read=10)
    harmless = {"log": {"every_rounds": 3}, "checkpoint": {"keep": 1, "every_s": 1.0}}
    assert_same_end(run(tmp_path / "r", settings_of(**RUN, **harmless)), whole)


def test_changes_that_alter_the_run_need_the_flag(tmp_path):
    stop_at(tmp_path / "r", at_read=10)
    slower = settings_of(**RUN | {"inner": {"learning_rate": 0.01, "clip_norm": 1.0}})
    before = (tmp_path / "r" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="--accept-config-change") as error:
        run(tmp_path / "r", slower)
    assert "inner.learning_rate: was 0.05, is 0.01" in str(error.value)
    assert "inner.clip_norm: was None, is 1.0" in str(error.value)
    assert (tmp_path / "r" / "config.json").read_bytes() == before
    run(tmp_path / "r", slower, accept_config_change=True)
    rates = [e["learning_rate"] for e in events(tmp_path / "r", "round")]
    assert rates[0] == pytest.approx(0.05) and rates[-1] == pytest.approx(0.01)


def test_a_structural_change_is_refused_with_a_diff_and_whatever_the_flag(tmp_path):
    stop_at(tmp_path / "r", at_read=10)
    other = settings_of(**RUN | {"seed": 1, "ensemble": {"num_trainers": 2, "num_workers": 4}})
    with pytest.raises(ConfigError, match="name another folder") as error:
        run(tmp_path / "r", other, accept_config_change=True)
    assert "seed: was 0, is 1" in str(error.value)
    assert "ensemble.num_trainers: was 3, is 2" in str(error.value)
    assert error.value.exit_code == 2


def test_more_rounds_of_a_decaying_schedule_need_the_flag(tmp_path):
    decaying = RUN | {"inner": {"schedule": "cosine"}}
    stop_at(tmp_path / "r", at_read=10, settings=settings_of(**decaying))
    with pytest.raises(ConfigError, match="num_rounds: was 7, is 9"):
        run(tmp_path / "r", settings_of(**decaying | {"num_rounds": 9}))


def test_a_larger_device_may_take_larger_micro_batches_from_here_on(tmp_path):
    stop_at(tmp_path / "r", at_read=10)
    batching = {"eta": 0.5, "max_batch_size": 8, "buckets": (2, 4, 8)}
    larger = settings_of(**RUN | {"batching": batching})
    result = run(tmp_path / "r", larger, accept_config_change=True)
    assert result.controller.max_batch_size == 8


def test_a_damaged_record_of_the_config_is_refused(tmp_path):
    stop_at(tmp_path / "r", at_read=10)
    for text in ("", "{}", "[1]", '{"config": 5}', "[" * 100_000):
        (tmp_path / "r" / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="config.json: damaged"):
            run(tmp_path / "r")
    (tmp_path / "r" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json: missing"):
        run(tmp_path / "r")


def test_other_data_are_refused_unless_accepted(tmp_path):
    stop_at(tmp_path / "r", at_read=10)
    other = dataclasses.replace(corpus(), fingerprint="another")
    with pytest.raises(DataError, match="--accept-data-change"):
        run(tmp_path / "r", rows=other)
    assert run(tmp_path / "r", rows=other, accept_data_change=True).controller.round == 7


def test_another_number_of_devices_takes_the_same_decisions(
    tmp_path, whole, monkeypatch, one_device
):
    stop_at(tmp_path / "r", at_read=10)
    monkeypatch.setattr(jax, "devices", lambda: one_device[:2])
    result = run(tmp_path / "r")
    assert dataclasses.replace(result.controller, trainers=[]) == dataclasses.replace(
        whole.controller, trainers=[]
    )
    rounds = [
        [e for e in lines(w) if e["event"] == "round"] for w in (tmp_path / "r", whole.workdir)
    ]
    for name in ("trainer", "workers", "requested_batch_size", "num_accum_steps", "tokens"):
        assert [e[name] for e in rounds[0]] == [e[name] for e in rounds[1]]
    np.testing.assert_allclose(
        [e["train_loss"] for e in rounds[0]], [e["train_loss"] for e in rounds[1]], rtol=1e-5
    )


# -- the folder, signals, failures -------------------------------------------------------------


def test_a_second_process_is_kept_out_and_a_dead_ones_lock_is_not(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").write_text("999999")
    with exclusive(tmp_path / "r"):
        with pytest.raises(ConfigError, match="another process runs there"):
            run(tmp_path / "r")
    run(tmp_path / "r", settings_of(**RUN | {"num_rounds": 1}))


def test_handlers_are_as_before_after_a_run(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop_at(tmp_path / "r", at_read=4, number=signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert events(tmp_path / "r", "end")[-1]["reason"] == "preempted"


def test_a_run_on_another_thread_leaves_signals_alone(tmp_path):
    results = []
    short = settings_of(**RUN | {"num_rounds": 1})
    thread = threading.Thread(target=lambda: results.append(run(tmp_path / "r", short)))
    thread.start()
    thread.join()
    assert results[0].controller.round == 1


@dataclasses.dataclass(frozen=True)
class Failing(Signalling):
    """The toy's rows, whose reading fails at some of the reads."""

    times: int = 1

    def batch(self, trainer, stream, start, count):
        self.reads.append(start)
        if self.at_read <= len(self.reads) < self.at_read + self.times:
            raise OSError(5, "Input/output error")
        return corpus().batch(trainer, stream, start, count)


@pytest.mark.parametrize("every_rounds", [1, 100])
def test_a_round_that_fails_is_run_once_more(tmp_path, whole, every_rounds):
    settings = settings_of(**RUN, checkpoint={"every_rounds": every_rounds})
    result = run(tmp_path / "r", settings, rows=Failing(at_read=14))
    assert_same_end(result, whole)
    (fault,) = events(tmp_path / "r", "fault")
    assert fault["kind"] == "round_failed" and "Input/output error" in fault["cause"]
    starts = [e["round"] for e in events(tmp_path / "r", "start")]
    assert starts == ([0, 3] if every_rounds == 1 else [0, 0])  # it reads in round 4


def test_a_round_that_fails_twice_ends_the_run(tmp_path):
    with pytest.raises(OSError, match="Input/output error"):
        run(tmp_path / "r", rows=Failing(at_read=14, times=100))


def test_a_save_that_fails_stops_the_run_or_is_recorded(tmp_path, monkeypatch, whole):
    for action in ("stop", "continue"):
        settings = settings_of(**RUN, checkpoint={"every_rounds": 2, "on_save_error": action})
        monkeypatch.setattr(crashpoints, "_arrivals", collections.Counter())
        monkeypatch.setenv("ADLOCO_FAIL_AT", "save.manifest:2:ENOSPC")
        if action == "stop":
            with pytest.raises(ResourceError, match="No space left on device"):
                run(tmp_path / action, settings)
            assert checkpoint.list_rounds(tmp_path / action / "checkpoints") == [2]
            monkeypatch.delenv("ADLOCO_FAIL_AT")
        assert_same_end(run(tmp_path / action, settings), whole)
    (fault,) = events(tmp_path / "continue", "fault")
    assert fault["kind"] == "save" and "No space left" in fault["cause"]
    assert checkpoint.list_rounds(tmp_path / "continue" / "checkpoints") == [7, 6]
