"""A resumed run ends bit for bit like the uninterrupted one, from any round."""

import dataclasses
import json
import shutil
import signal
import threading
import time

import jax
import numpy as np
import optax
import oracle
import pytest
from toy import corpus, settings_of
from toy_runs import GROWING, Signalling, assert_same_end, events, lines, run, stop_at

from adloco_jax import ROUND_LENGTHS
from adloco_jax import main as cli
from adloco_jax.engine import local
from adloco_jax.engine.programs import Programs
from adloco_jax.errors import CheckpointError, ConfigError, DataError, Preempted
from adloco_jax.host import processes
from adloco_jax.run.kept import checkpoint
from adloco_jax.run.kept.folder import check_config, exclusive, recorded_settings, write_config
from adloco_jax.settings import OPTIONS, kind_of_change

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    result = run(tmp_path_factory.mktemp("whole") / "r")
    kinds = {line["event"] for line in lines(result.workdir)}
    assert kinds == {"round", "eval", "merge"} and len(result.state.control.trainers) == 1
    assert max(line.get("num_accum_steps", 0) for line in lines(result.workdir)) > 1
    return result


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run stopped by SIGTERM while rows of round 3 are read; tests must not change it."""
    folder = tmp_path_factory.mktemp("stopped") / "r"
    stop_at(folder, at_read=10)
    return folder


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of the stopped run."""
    return shutil.copytree(stopped_run, tmp_path / "r")


def test_a_run_stopped_after_every_round_ends_as_the_uninterrupted_one(tmp_path, whole):
    for _ in range(6):
        stop_at(tmp_path / "r", at_read=1)
    harmless = {"log": {"every_rounds": 3}, "checkpoint": {"keep": 1, "every_s": 1.0}}
    assert_same_end(run(tmp_path / "r", settings_of(**GROWING, **harmless)), whole)
    assert [e["round"] for e in events(tmp_path / "r", "start")] == list(range(7))


def test_a_running_average_is_reported_and_resumed_bit_for_bit(tmp_path):
    two = {"num_trainers": 2, "num_workers": 2}
    groups = GROWING | {"num_rounds": 4, "ensemble": two, "outer": {"average": 0.3}}
    settings, seen = settings_of(**groups), []

    def on_round(state, _):
        ensemble = state.ensemble
        seen.append([np.array(tree["w"]) for tree in (ensemble.params_M, ensemble.average_M)])

    whole = run(tmp_path / "whole", settings, on_round=on_round)
    assert [len(params_M) for params_M, _ in seen] == [2, 2, 1, 1]  # a merge after round 3
    after = oracle.running_averages([params_M for params_M, _ in seen[:2]], 0.3)
    np.testing.assert_allclose([average_M for _, average_M in seen[:2]], after, rtol=1e-5)
    last = 0.3 * seen[-2][1] + 0.7 * seen[-1][0]
    np.testing.assert_allclose(seen[-1][1], last, rtol=1e-5)
    np.testing.assert_array_equal(whole.params["w"], seen[-1][1][0])
    evals = events(tmp_path / "whole", "eval")
    assert {e["average"] for e in evals} == {0.3} and evals[-1]["loss"] == whole.loss
    stop_at(tmp_path / "r", at_read=5, settings=settings)
    assert_same_end(run(tmp_path / "r", settings), whole)
    # A finished run measures its consensus anew, and gives the same.
    assert run(tmp_path / "r", settings).loss == whole.loss
    said = "after round 4, running average over rounds (0.3 of the old)"
    assert said in (tmp_path / "r" / "report" / "index.html").read_text()


def test_a_finished_run_is_left_as_it_is_and_gives_its_result(tmp_path, whole):
    folder = shutil.copytree(whole.workdir, tmp_path / "r")
    again = run(folder)
    assert_same_end(again, whole)
    assert len(events(folder, "start")) == len(events(folder, "end")) == 1
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


@pytest.mark.parametrize("words", ["train", "plan", "export --out=x", "generate"])
def test_commands_say_that_fit_made_a_run_with_a_model_of_ones_own(whole, capsys, words):
    command, *more = words.split()
    assert cli.main([command, str(whole.workdir), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{whole.workdir}: made by fit with a model of your own")


def test_a_damaged_newest_checkpoint_is_set_aside_and_its_rounds_are_run_again(tmp_path, whole):
    settings = settings_of(**GROWING, checkpoint={"every_rounds": 1})
    stop_at(tmp_path / "r", at_read=18, settings=settings)
    newest, older = checkpoint.list_rounds(tmp_path / "r" / "checkpoints")[:2]
    (tmp_path / "r" / "checkpoints" / str(newest) / "host.json").write_text("{}")
    assert_same_end(run(tmp_path / "r", settings), whole)
    (fault,) = events(tmp_path / "r", "fault")
    assert fault["kind"] == "checkpoint" and f"{newest}/host.json" in fault["cause"]
    assert [e["round"] for e in events(tmp_path / "r", "start")] == [0, older]


def test_a_run_killed_before_its_first_checkpoint_says_that_it_begins_again(stopped, whole, capsys):
    shutil.rmtree(stopped / "checkpoints")
    path = stopped / "ledger.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"checkpoint"' not in line]
    path.write_text("\n".join(kept) + "\n")
    assert_same_end(run(stopped), whole)
    assert "begins again: no round was saved\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [("host.json", "no checkpoint is whole"), ("checkpoint", "are gone"), ("ledger", "adloco exp")],
)
def test_a_run_that_lacks_rounds_never_starts_over(stopped, damage, words):
    path, (saved,) = stopped / "ledger.jsonl", (stopped / "checkpoints").iterdir()
    if damage == "host.json":
        (saved / "host.json").write_text("{}")
    elif damage == "checkpoint":
        shutil.rmtree(saved)
    else:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    before = path.read_bytes()
    with pytest.raises((CheckpointError, DataError), match=words) as refusal:
        run(stopped)
    assert refusal.value.exit_code == 3 and path.read_bytes() == before


# -- what may change ---------------------------------------------------------------------------


def test_every_key_has_a_class():
    assert {kind_of_change(key) for key in OPTIONS} == {"harmless", "accepted", "refused"}
    another_run = ["seed", "model.width", "data.source", "inner.tx", "ensemble.num_trainers"]
    assert {kind_of_change(key) for key in another_run} == {"refused"}


def test_changes_and_other_data_that_alter_the_run_need_the_flag(stopped):
    inner = {"learning_rate": 0.01, "clip_norm": 1.0}
    # the micro-batches of a larger device
    batching = {"eta": 0.5, "max_batch_size": 8, "buckets": (2, 4, 8)}
    changed = settings_of(**GROWING | {"inner": inner, "batching": batching})
    before = (stopped / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="accept_config_change=True") as error:
        run(stopped, changed)
    assert "inner.learning_rate: was 0.05, is 0.01" in str(error.value)
    assert "inner.clip_norm: was None, is 1.0" in str(error.value)
    assert (stopped / "config.json").read_bytes() == before
    other = dataclasses.replace(corpus(), fingerprint="another")
    with pytest.raises(DataError, match="accept_data_change=True"):
        run(stopped, corpus=other)
    accept = {"accept_config_change": True, "accept_data_change": True}
    result = run(stopped, changed, corpus=other, **accept)
    rates = [e["learning_rate"] for e in events(stopped, "round")]
    assert rates[0] == pytest.approx(0.05) and rates[-1] == pytest.approx(0.01)
    assert result.state.control.max_batch_size == 8


@pytest.mark.parametrize(
    "stretched", [{"schedule": "cosine"}, {"round_length": "own", "max_steps_per_round": 6}]
)
def test_a_structural_change_is_refused_with_a_diff_and_whatever_the_flag(
    tmp_path, stretched, monkeypatch
):
    monkeypatch.setitem(ROUND_LENGTHS, "own", None)  # an entry of a config file; nothing calls it
    decaying = GROWING | {"inner": stretched}
    write_config(tmp_path, settings_of(**decaying))
    other = settings_of(**decaying | {"seed": 1, "ensemble": {"num_trainers": 2}})
    with pytest.raises(ConfigError, match="name another folder") as error:
        check_config(tmp_path, other, accept=True)
    assert "seed: was 0, is 1" in str(error.value)
    assert "ensemble.num_trainers: was 3, is 2" in str(error.value)
    longer = settings_of(**decaying | {"num_rounds": 9})  # stretches the schedule or the ramp
    with pytest.raises(ConfigError, match="num_rounds: was 7, is 9"):
        check_config(tmp_path, longer, accept=False)
    check_config(tmp_path, longer, accept=True)


def test_a_damaged_record_of_the_config_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="config.json: missing"):
        check_config(tmp_path, settings_of(**GROWING), accept=True)
    write_config(tmp_path, settings_of(**GROWING))
    whole = json.loads((tmp_path / "config.json").read_text())
    for text, fault in (
        ("", "damaged"),
        (json.dumps(whole | {"format": 2}), "a run of another version"),
        (
            json.dumps(whole | {"config": 5}),
            r"damaged \(record.config: have 5, expected",
        ),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"config.json: {fault}"):
            check_config(tmp_path, settings_of(**GROWING), accept=True)


def test_a_record_without_a_new_key_is_read_with_its_default(tmp_path):
    settings = settings_of(**GROWING)
    write_config(tmp_path, settings)
    record = json.loads((tmp_path / "config.json").read_text())
    del record["config"]["inner"]["decay"], record["config"]["adapter"]
    record["config"]["inner"]["of_another_version"] = 1
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert recorded_settings(tmp_path) == settings
    check_config(tmp_path, settings, accept=False)
    other = settings_of(**GROWING | {"inner": {"decay": "matrices"}})
    with pytest.raises(ConfigError, match="inner.decay: was 'all', is 'matrices'"):
        check_config(tmp_path, other, accept=True)


def test_another_optimizer_than_the_checkpoints_is_named(stopped):
    default = settings_of(**GROWING | {"inner": {"learning_rate": 4e-4}})
    expected = "checkpoints/2: of another inner optimizer: inner_state_R.* there, .* here; give wh"
    with pytest.raises(ConfigError, match=expected) as refused:
        run(stopped, default, inner_tx=optax.sgd(0.1), accept_config_change=True)
    assert "\n" not in str(refused.value)


def test_another_number_of_devices_takes_the_same_decisions(tmp_path, monkeypatch, one_device):
    two = {"num_trainers": 1, "num_workers": 2}
    settings = settings_of(**GROWING | {"num_rounds": 4, "ensemble": two})
    whole = run(tmp_path / "whole", settings)
    stop_at(tmp_path / "r", at_read=5, settings=settings)
    monkeypatch.setattr(jax, "devices", lambda: one_device[:2])
    result = run(tmp_path / "r", settings)
    found, expected = (dataclasses.replace(r.state.control, trainers=[]) for r in (result, whole))
    assert found == expected
    rounds = [[e for e in lines(r.workdir) if e["event"] == "round"] for r in (result, whole)]
    assert max(e["num_accum_steps"] for e in rounds[1]) > 1
    for name in ("trainer", "workers", "requested_batch_size", "num_accum_steps", "tokens"):
        assert [e[name] for e in rounds[0]] == [e[name] for e in rounds[1]]
    np.testing.assert_allclose(
        [e["train_loss"] for e in rounds[0]], [e["train_loss"] for e in rounds[1]], rtol=1e-5
    )


# -- the folder, signals, failures -------------------------------------------------------------


def test_a_second_process_is_kept_out_and_a_dead_ones_lock_is_not(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").write_text("999999")
    with exclusive(tmp_path / "r"), pytest.raises(ConfigError, match="another process runs there"):
        run(tmp_path / "r")


def test_signals_are_as_before_after_a_run_and_left_alone_on_another_thread(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop_at(tmp_path / "r", at_read=4, number=signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert events(tmp_path / "r", "end")[-1]["reason"] == "preempted"
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path / "r")))
    thread.start()
    thread.join()
    assert results[0].state.control.round == 7


@pytest.mark.parametrize(
    ("groups", "saved"),
    [
        ({"checkpoint": {"every_rounds": 1}}, 3),
        ({"checkpoint": {"every_rounds": 2}}, 2),
        ({"inner": {"state": "reset"}}, 3),
    ],
)
def test_a_long_round_is_left_and_resumed_from_its_start_or_a_checkpoint(
    tmp_path, monkeypatch, capfd, whole, groups, saved
):
    real, calls = Programs.call, []

    def call(programs, key, *arguments):
        if calls and key.kind == "steps":
            calls.append(key)
            if len(calls) == 4:  # the third of round 4
                signal.raise_signal(signal.SIGTERM)
                while not processes.is_asked_to_stop():
                    time.sleep(0.01)
        return real(programs, key, *arguments)

    settings = settings_of(**GROWING | groups)
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "call", call)
        patch.setattr(local, "LONG_S", -1.0)
        patch.setattr(local, "LAST_S", -1.0)
        with pytest.raises(Preempted, match=f"within round 4; the last .*/{saved}"):
            how = {"on_round": lambda state, _: calls.extend("x" * (state.control.round == 3))}
            run(tmp_path / "r", settings, **how)
    assert "SIGTERM: finishing and saving the round under way" in capfd.readouterr().err
    expected = run(tmp_path / "whole", settings) if "inner" in groups else whole
    assert_same_end(run(tmp_path / "r", settings), expected)


class Failing(Signalling):
    """The toy's rows; some reads fail."""

    def act(self):
        raise OSError(5, "Input/output error")


def test_a_round_that_fails_is_run_once_more(tmp_path, whole):
    settings = settings_of(**GROWING, checkpoint={"every_rounds": 1})
    result = run(tmp_path / "r", settings, corpus=Failing(at_read=10))
    assert_same_end(result, whole)
    (fault,) = events(tmp_path / "r", "fault")
    assert fault["kind"] == "round_failed" and "Input/output error" in fault["cause"]
    assert [e["round"] for e in events(tmp_path / "r", "start")] == [0, 2]  # the read is round 3's


def test_a_round_that_fails_twice_ends_the_run(tmp_path):
    with pytest.raises(OSError, match="Input/output error"):
        run(tmp_path / "r", corpus=Failing(at_read=14, times=100))
