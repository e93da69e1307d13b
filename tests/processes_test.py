"""Several processes of one run: their messages; their number changes no decision."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from adloco_jax import errors
from adloco_jax.data.hub import Unreachable
from adloco_jax.errors import ConfigError, DataError, Preempted, ResourceError
from adloco_jax.host import processes
from adloco_jax.run.kept.folder import exclusive
from adloco_jax.run.kept.ledger import read
from scripts.golden import deterministic_lines

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("train_loss", "noise", "signal", "test_value", "pseudo_grad_norm", "perplexity")
MEASURED += ("train_losses", "loss", "loss_before", "loss_after", "barrier")


def test_what_differs_is_named_in_every_process(monkeypatch):
    everyone = [{"lr": "1", "seed": "0"}, {"lr": "2", "seed": "0"}, {"lr": "1", "seed": "3"}]
    monkeypatch.setattr(processes, "gather", lambda value: everyone)
    with pytest.raises(ConfigError) as error:
        processes.require_equal(everyone[0], "use one config")
    assert str(error.value).splitlines() == [
        "process 1 differs from process 0 in lr",
        "process 2 differs from process 0 in seed",
        "use one config",
    ]


@pytest.mark.parametrize(
    ("error", "there"),
    [(DataError("text: missing"), DataError), (Unreachable("hub: gone"), ResourceError)],
)
def test_an_error_of_one_process_is_raised_in_all(monkeypatch, error, there):
    sent = []
    monkeypatch.setattr(processes, "gather", lambda value, name: [sent.append(value)])
    with pytest.raises(type(error), match=f"^{error}$"):
        processes.run_on_all(mock.Mock(side_effect=error))
    everyone = [None, *sent, ["ConfigError", "later"]]
    monkeypatch.setattr(processes, "gather", lambda value, name: everyone)
    with pytest.raises(there, match=f"^process 1: {error}$"):
        processes.run_on_all(lambda: 3)


@pytest.mark.parametrize(
    ("fault", "code", "words"), [(ResourceError("gone"), 5, "^gone$"), (KeyError("x"), 1, "^KeyEr")]
)
def test_a_thread_that_fails_ends_the_process(capsys, monkeypatch, fault, code, words):
    ended = mock.Mock()
    monkeypatch.setattr(errors.os, "_exit", ended)
    with processes.every(0.001, mock.Mock(side_effect=fault)):
        while not ended.called:
            time.sleep(0.001)
    ended.assert_called_once_with(code)
    assert re.search(words, capsys.readouterr().err, re.MULTILINE)


def test_a_folder_that_is_not_the_same_for_all_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "gather", lambda value, name="": [value, value])
    with exclusive(tmp_path):
        pass
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # process 0 is on another machine
    with pytest.raises(ConfigError, match="not the folder that process 0 has"):
        with exclusive(tmp_path):
            pass


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"num_processes": 2, "process_id": 0}, "give --coordinator"),
        ({"coordinator": "localhost:1", "num_processes": 2, "process_id": 2}, "0 to 1"),
        ({"coordinator": "here", "num_processes": 2, "process_id": 0}, "HOST:PORT"),
        ({"coordinator": "here:99999999", "num_processes": 2, "process_id": 0}, "a free port"),
        ({}, "no launcher of several processes was found"),
    ],
)
def test_invalid_places_are_named(monkeypatch, place, words):
    def initialize(coordinator, *_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises((ConfigError, ResourceError), match=words):
        processes.connect(**place)


def test_only_the_first_process_prints(capsys, monkeypatch):
    with processes.only_first_prints():
        print("first")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with processes.only_first_prints():
        print("second")
    assert capsys.readouterr().out == "first\n"


@contextlib.contextmanager
def started(workdir, *overrides, num_processes=1, num_devices=1, cache):
    """Starts probes/faults.py on several processes with several devices; kills leftovers."""
    command = [sys.executable, "-m", "adloco_jax.main"]
    command += [f"--config={ROOT}/probes/faults.py", f"--workdir={workdir}", *overrides]
    places = [[]]
    if num_processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"--coordinator=127.0.0.1:{probe.getsockname()[1]}"
        several = [coordinator, f"--num_processes={num_processes}"]
        places = [[*several, f"--process_id={number}"] for number in range(num_processes)]
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    settings = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    how = {"env": os.environ | settings, "stdout": subprocess.DEVNULL}
    with open(f"{workdir}.log", "w") as log:
        processes = [subprocess.Popen([*command, *p], stderr=log, **how) for p in places]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


def run(workdir, *overrides, **where):
    """Runs it to its end; returns the lines of its ledger."""
    with started(workdir, *overrides, **where) as processes:
        for process in processes:
            assert process.wait(timeout=580) == 0, Path(f"{workdir}.log").read_text()[-3000:]
    return deterministic_lines(read(workdir / "ledger.jsonl"))


def assert_alike(lines, expected):
    """Checks that decisions are equal and losses agree to 1e-5."""
    for ours, theirs in zip(lines, expected, strict=True):
        decided = [{k: v for k, v in e.items() if k not in MEASURED} for e in (ours, theirs)]
        assert decided[0] == decided[1]
        for name in {
            "train_loss",
            "train_losses",
            "loss",
            "loss_before",
            "loss_after",
        } & theirs.keys():
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
            assert np.all(np.isfinite(np.asarray(ours[name])))


TEN = ("--config.num_rounds=10", "--config.ensemble.num_workers=4")
TEN += ("--config.merge.every_rounds=7", "--config.checkpoint.every_rounds=100")
TEN += ("--config.outer.average=0.5",)
FRAGMENTS = ("--config.outer.fragments=2", "--config.outer.delay_updates=1")
FRAGMENTS += ("--config.outer.mixing=0.5", "--config.inner.steps_per_round=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "before", "after", "kinds"),
    [
        ((), {"num_devices": 2}, {"num_processes": 2, "num_devices": 4}, {"merge", "eval"}),
        (FRAGMENTS, {"num_processes": 2}, {"num_devices": 2}, {"merge", "sync"}),
    ],
    ids=["whole", "fragments"],
)
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, settings, before, after, kinds):
    """Workers' own parameters and fragments in flight survive the change of the number."""
    cache, overrides = tmp_path / "programs", (*TEN, *settings)
    expected = run(tmp_path / "whole", *overrides, cache=cache)
    ledger = tmp_path / "run" / "ledger.jsonl"

    def rounds():
        return ledger.read_text().count('"event": "round"') if ledger.exists() else 0

    with started(tmp_path / "run", *overrides, **before, cache=cache) as processes:
        while processes[0].poll() is None and not rounds():
            time.sleep(0.1)
        for process in processes:
            process.terminate()
        assert [process.wait(timeout=580) for process in processes] == (
            [Preempted.exit_code] * len(processes)
        )
    lines = run(tmp_path / "run", *overrides, **after, cache=cache)
    assert_alike(lines, expected)
    assert kinds < {line["event"] for line in lines}


STUCK = """
import time
from adloco_jax import main
from adloco_jax.engine.local import LocalEngine
from adloco_jax.engine.programs import Programs
Programs.prefetch = lambda *_: None  # no thread may run while the others' frames are read
LocalEngine.round = lambda *_: time.sleep(600)
main.command()
"""


def test_a_run_that_hangs_ends_itself_and_says_where(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-c", STUCK, f"--config={ROOT}/probes/faults.py"),
            *(f"--workdir={tmp_path / 'run'}", "--config.checkpoint.watchdog_s=1"),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr
    assert "in adloco" in done.stderr
