"""docs/guides/loop.md: the loop, the programs that its diffs make of it, and its examples."""

import re
import runpy
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from toy import corpus
from toy_runs import events

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "loop.md"
TEXT = PAGE.read_text(encoding="utf-8")
(LOOP,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
NOISE, WORKERS, FIT, BUCKET = re.findall(r"^```diff\n(.*?)^```", TEXT, re.M | re.S)

pytestmark = pytest.mark.usefixtures("one_device")


def changed(program, diff):
    """The program after a diff, whose parts between lines of @@ are each found once."""
    for part in re.split(r"^@@\n", diff, flags=re.M):
        lines = [line.rstrip("\n") or " " for line in part.splitlines()]
        old, new = (
            "".join(line[1:] + "\n" for line in lines if line[0] in signs) for signs in (" -", " +")
        )
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


def run(program, capsys):
    """The program's variables, its output and the loss in it."""
    names: dict = {}
    exec(compile(program, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    return names, printed, loss_in(printed)


def loss_in(printed):
    return float(re.search(r"held-out loss ([\d.]+)", printed)[1])


def test_only_the_outer_step_moves_as_nesterov_does():
    names = runpy.run_path(str(ROOT / "examples" / "outer_step.py"))
    x = momentum = 0.0
    for _ in range(5):  # workers move by 0.1 and 0.2
        momentum = 0.9 * momentum - 0.15
        x -= 0.7 * (0.9 * momentum - 0.15)
    np.testing.assert_allclose(names["params"]["w"], x, rtol=1e-5)


def test_a_model_of_ones_own_is_trained_by_fit_and_the_same_call_resumes(tmp_path):
    names = runpy.run_path(str(ROOT / "examples" / "fit.py"))
    result = names["run"](tmp_path / "own")
    assert np.log(3) < result.loss < 1.4  # three tokens may follow; guessing has log(16)
    assert result.params.keys() == {"embed", "head"}
    assert names["run"](tmp_path / "own").loss == result.loss
    assert len(events(tmp_path / "own", "round")) == 4


def test_dropout_draws_from_each_key_and_rests_without_one(capsys):
    names = runpy.run_path(str(ROOT / "examples" / "dropout.py"))
    losses = re.findall(r"loss ([\d.]+)", capsys.readouterr().out)
    assert len(losses) == 10 and 1.09 < float(losses[-1]) < float(losses[-2]) < float(losses[0])
    loss_fn, params = jax.jit(names["loss_fn"]), names["params"]
    rows, keys = corpus().rows[:4], jax.random.split(jax.random.key(0), 2)
    plain, first, other = (float(loss_fn(params, rows, key=key)) for key in (None, *keys))
    assert len({plain, first, other}) == 3
    assert (plain, first) == (loss_fn(params, rows), loss_fn(params, rows, key=keys[0]))


def test_the_loop_and_its_two_workers_learn_and_the_noise_asks_for_more(capsys):
    assert run(LOOP, capsys)[2] < 1.2  # log 3 = 1.099 is the lowest, log 16 untrained
    names, _, loss = run(changed(LOOP, NOISE), capsys)
    assert names["size"] > 4 and loss < 1.2
    names, _, loss = run(changed(LOOP, WORKERS), capsys)
    assert names["ensemble"].sizes == (2,) and loss < 1.15


def test_fit_leaves_report_table_and_parameters_here_and_equal_ones_through_a_bucket(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names, printed, _ = run(changed(LOOP, FIT), capsys)
    loss = names["result"].loss
    assert loss < 1.2 and f"held-out loss   {loss:.4f} nats/token" in printed
    assert "batches: 4 sequences of own rows per worker and update, in all" in printed
    assert "; up to 4 at once" in printed
    assert printed.count(", batch 4, ") == 5
    assert "export: runs/own/export/params.safetensors" in printed
    assert "report: runs/own/report/index.html" in printed
    assert "Held-out loss" in Path("runs/own/report/index.html").read_text(encoding="utf-8")
    exported = load_file("runs/own/export/params.safetensors")
    np.testing.assert_array_equal(exported["next/logits"], names["result"].params["next"]["logits"])

    (tmp_path / "bucket").mkdir()
    monkeypatch.setenv("ADLOCO_KEY", "a secret of at least 32 characters")
    program = changed(changed(LOOP, FIT), BUCKET).replace('"runs/own"', '"runs/far"')
    program = program.replace("s3://BUCKET", f"file://{tmp_path}/bucket")
    how = 'config.engine.steps, config.engine.heartbeat_s = "equal", 8.0'
    program = program.replace("parts = dict(", f"{how}\nparts = dict(")
    joins = program.replace('sys.argv[1:] == ["join"]', "True")
    learners = [threading.Thread(target=exec, args=(joins, {})) for _ in range(2)]
    for learner in learners:
        learner.start()
    far = run(program, capsys)[0]["result"]
    for learner in learners:
        learner.join(timeout=60)
        assert not learner.is_alive()
    assert [e["what"] for e in events("runs/far", "learner")] == ["joined", "joined"]
    each, other = (of.state.control.trainers[0] for of in (far, names["result"]))
    assert (each.cursors, each.updates) == (other.cursors, other.updates)
    np.testing.assert_allclose(far.params["next"]["logits"], exported["next/logits"], atol=1e-5)


@pytest.mark.slow
def test_two_processes_hold_one_worker_each_and_end_with_equal_parameters(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = (ROOT / "examples" / "two_processes.py").read_text("utf-8")
    program = program.replace(":9911", f":{port}")
    (tmp_path / "loop.py").write_text(program, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "loop.py")]
    started = [subprocess.Popen([*command, n], stdout=subprocess.PIPE, text=True) for n in "01"]
    losses = [loss_in(process.communicate(timeout=300)[0]) for process in started]
    assert losses[0] == losses[1] < 1.15
