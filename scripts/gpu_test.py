"""scripts/gpu.py without a GPU: every part runs with a small model."""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

H100 = {"device": "NVIDIA H100 80GB HBM3", "machine": "a machine"}
SPEED = {"tokens_per_s": [9e5, 1e6, 2e6], "ratio": 1.25}
TORCH = {
    name: {"tokens_per_s": [1, rate, 3]}
    for name, rate in (("adloco_jax", 2e6), ("compile", 1e6), ("eager", 5e5))
}
ARM = {"tokens_total": [10, 20, 30], "updates_total": [1, 2, 3], "syncs_total": [0, 0, 1]}
ARM |= {"loss": [4.0, 3.5, 3.25], "round_tokens": [10, 10, 10], "round_s": [9.0, 1.0, 1.0]}
FOUND = {
    "growing_pool": H100 | {"flops_per_token": 494.5e6, "shipped": SPEED, "one worker": SPEED},
    "torch": {"growing_pool": TORCH, "microllama": {"error": "torch is not installed"}},
    "acceptance": {"update": {"float32 loss": 1e-6}},
    "training": {
        "growing_pool": ARM,
        "DiLoCo": ARM | {"tokens_total": [12, 22], "loss": [4.5, 4.25]},
    },
}


def rows_of(text):
    lines = re.findall(r"^\| (.+) \|$", text, flags=re.MULTILINE)
    return {name: cells for name, *cells in (line.split(" | ") for line in lines)}


def started(monkeypatch, tmp_path, *words, codes=()):
    """The exit code of a start, and the time limit of each part that was started."""
    calls = {}

    def run_part(part, options, limit_s):
        calls[part] = limit_s
        code = dict(codes).get(part, 0)
        if code == 0:
            gpu.Figures(options.out / f"{part}.json").write(done=True)
        return code

    monkeypatch.setattr(gpu, "run_part", run_part)
    given = [f"--out={tmp_path}", "--texts=texts", "--tokenizer=bytes", *words]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *given])
    return gpu.main(), calls


def test_all_parts_take_at_most_twelve_minutes():
    assert sum(seconds for _, seconds in gpu.PARTS.values()) <= 12 * 60


def test_a_second_start_measures_what_is_missing(monkeypatch, tmp_path):
    code, calls = started(monkeypatch, tmp_path, codes=[("microllama", -9)])
    assert code == 1 and list(calls) == [*gpu.PARTS]
    # Each may use what the parts before have left: here all of it.
    seconds = {part: seconds for part, (_, seconds) in gpu.PARTS.items()}
    later = {part: sum([*seconds.values()][at + 1 :]) for at, part in enumerate(seconds)}
    assert calls == {part: pytest.approx(12 * 60 - later[part], abs=1) for part in calls}
    stopped = gpu.Figures(tmp_path / "microllama.json").known["stopped"]
    assert stopped.startswith("exit code -9 after")
    assert started(monkeypatch, tmp_path, "--minutes=0.1") == (1, {})
    code, calls = started(monkeypatch, tmp_path, "--minutes=1")
    assert code == 0 and list(calls) == ["microllama"] and calls["microllama"] <= 60


def test_no_accelerator_is_said_in_a_line(monkeypatch, tmp_path, capsys):
    code, calls = started(monkeypatch, tmp_path, codes=[("acceptance", 2)])
    assert code == 2 and list(calls) == ["acceptance"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", f"--out={tmp_path}", "--part=acceptance"])
    assert gpu.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("no accelerator: jax finds only a CPU; install jax[cuda12]")


def test_figures_are_written_as_they_come_and_not_measured_twice(tmp_path):
    path = tmp_path / "part.json"
    figures = gpu.Figures(path)
    figures.measure("array", lambda: {"values": np.arange(2)})
    figures.measure("fault", lambda: 1 / 0)
    expected = {
        "array": {"values": [0, 1]},
        "fault": {"error": "ZeroDivisionError: division by zero"},
    }
    assert json.loads(path.read_text()) == expected
    again = gpu.Figures(path)
    again.measure("array", pytest.fail)
    assert again.known == expected


def test_figures_of_another_card_are_not_kept(monkeypatch, tmp_path):
    path = tmp_path / "acceptance.json"
    gpu.Figures(path).write(device="NVIDIA A100", update={"float32 loss": 1.0})
    part = (lambda figures, size, options: figures.measure("resume", lambda: "yes"), 1)
    monkeypatch.setitem(gpu.PARTS, "acceptance", part)
    gpu.measure_part("acceptance", argparse.Namespace(out=tmp_path, tiny=True))
    found = json.loads(path.read_text())
    assert found["device"] == "cpu" and found["resume"] == "yes" and found["done"]
    assert "update" not in found


def test_the_page_is_that_of_the_records(tmp_path):
    page, records = ROOT / "studies" / "GPU.md", ROOT / "studies" / "gpu"
    (tmp_path / "GPU.md").write_text(page.read_text("utf-8"), encoding="utf-8")
    gpu.write_page(records, tmp_path / "GPU.md")
    written = (tmp_path / "GPU.md").read_text("utf-8")
    assert written == page.read_text("utf-8"), f"python scripts/gpu.py --out {records} --tables"


def test_the_page_gets_its_front_and_tables(tmp_path):
    page, out = tmp_path / "GPU.md", tmp_path / "out"
    page.write_text((ROOT / "studies" / "GPU.md").read_text("utf-8"), encoding="utf-8")
    for part, known in FOUND.items():
        gpu.Figures(out / f"{part}.json").write(**known)
    gpu.write_page(out, page)
    text = page.read_text("utf-8")
    assert "`growing_pool` 1,000,000 tokens/s (0.50 of the peak)." in " ".join(text.split())
    assert "DiLoCo 4.250" in text and "Machine: a machine." in text
    found = " ".join(text.split())
    assert "`growing_pool` 2.00 and 4.0." in found
    # to the higher of both last losses
    assert "To 4.250: growing_pool 0.0 M tokens, 1 updates, 0 synchronisations; DiLoCo 0.0" in found
    rows = rows_of(text.partition("<!-- end of the table -->")[0])
    beside = [f"{rate} (1 to 3)" for rate in ("2,000,000", "1,000,000", "500,000")]
    assert rows[gpu.TITLES["growing_pool"]] == ["1,000,000", "0.500", *beside]
    reason = "not measured: torch is not installed"
    assert rows[gpu.TITLES["microllama"]] == ["not measured", "", *[reason] * 3]
    assert rows["one worker"] == ["1.250", "1,000,000", "0.500"]
    # at the tokens that both have
    assert rows["growing_pool"][:3] == ["3.500", "0.0 M", "2"] and rows["growing_pool"][-1] == "10"
    assert rows["DiLoCo"][0] == "4.250"
    assert "float32 loss 1.0e-06" in text
    gpu.write_page(tmp_path / "empty", page)
    assert "Training: not measured." in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_the_peak_is_that_of_the_kind(kind, peak):
    assert gpu.peak_of(kind) == peak
    assert math.isnan(gpu.peak_of("NVIDIA A10"))


def test_figures_of_a_round_are_compared_by_their_relative_distance():
    own = {"float32 change": np.array([3.0, 4.0])}
    assert gpu.compare(own, own) == {"float32 change": 0.0}
    assert gpu.compare({"float32 change": np.array([3.0, 9.0])}, own) == {"float32 change": 1.0}


def arm(monkeypatch, tmp_path, tokens):
    """Figures and options of a training whose next curves have so many tokens, and their limits."""
    calls = []

    def curve(command, workdir, limit_s):
        calls.append((workdir.name, round(limit_s)))
        return {"tokens_total": [tokens.pop(0)]}

    monkeypatch.setattr(gpu, "curve", curve)
    how = {"texts": tmp_path, "tokenizer": "bytes", "work": tmp_path, "limit": 450}
    return gpu.Figures(tmp_path / "training.json"), argparse.Namespace(**how), calls


def test_an_arm_that_was_cut_short_continues_and_a_finished_one_does_not(monkeypatch, tmp_path):
    all_of_it = gpu.TINY.num_tokens
    figures, options, calls = arm(monkeypatch, tmp_path, [all_of_it, 5, all_of_it, all_of_it])
    monkeypatch.setattr(gpu, "SHARES_S", dict.fromkeys(gpu.ARMS, 100))
    with pytest.raises(TimeoutError, match="cut"):
        gpu.training(figures, gpu.TINY, options)
    # Each may use what is left but for the shares of those after it.
    assert calls == [("growing_pool", 250), ("DiLoCo", 350), ("data_parallel", 450)]
    assert [figures.known[name]["cut"] for name in gpu.ARMS] == [False, True, False]
    options.limit = 300
    gpu.training(figures, gpu.TINY, options)
    assert calls[3:] == [("DiLoCo", 300)]
    options.limit = 1
    with pytest.raises(TimeoutError, match="not enough for growing_pool"):
        gpu.training(gpu.Figures(tmp_path / "other.json"), gpu.TINY, options)


def test_pytorch_is_timed_beside_one_worker_of_each_model(monkeypatch, tmp_path):
    of_one = {name: {"tokens_per_s": [1, 2, 3], "seconds": 1.0} for name in gpu.LIBRARIES}
    calls = []
    monkeypatch.setattr(gpu, "measure", lambda *given: calls.append(given) or of_one)
    lacks = ["torch is not installed", ""]
    monkeypatch.setattr(gpu, "torch_lacks", lambda: lacks.pop(0))
    figures = gpu.Figures(tmp_path / "torch.json")
    gpu.torch(figures, gpu.FULL, argparse.Namespace())
    assert figures.known["growing_pool"] == {"error": "torch is not installed"}
    assert figures.known["microllama"]["compile"] == {"tokens_per_s": [1, 2, 3]}
    assert calls == [(gpu.FULL.steps["microllama"].shape, 8, 1, 5)]


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().split()[2]
    except OSError:
        return False
    return state != "Z"


def test_a_part_that_takes_too_long_is_stopped_with_what_it_has_started(monkeypatch, tmp_path):
    script = tmp_path / "part.py"
    child = "import time; time.sleep(60)"
    script.write_text(
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nchild.wait()\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    how = {"out": tmp_path, "work": tmp_path, "texts": None, "tokenizer": None}
    options = argparse.Namespace(tiny=True, **how)
    assert gpu.run_part("training", options, 2) == -signal.SIGKILL
    # A killed process dies when it next runs. Nobody waits for it, so it may stay a zombie.
    child_id, until = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while is_running(child_id) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(child_id)
    script.write_text("raise SystemExit(7)")
    assert gpu.run_part("training", options, 60) == 7


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu_with_tiny_models(tmp_path):
    (tmp_path / "texts").mkdir()
    for file in (ROOT / "adloco_jax").rglob("*.py"):
        (tmp_path / "texts" / f"{file.parent.name}_{file.stem}.txt").write_text(file.read_text())
    command = [str(ROOT / "scripts" / "gpu.py"), "--tiny", f"--out={tmp_path}/out"]
    command += [f"--work={tmp_path}/work", f"--texts={tmp_path}/texts", "--tokenizer=bytes"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command.append("--minutes=40")
    run = subprocess.run([sys.executable, *command], env=environment, timeout=2400, check=False)
    assert run.returncode == 0
    found = gpu.read_all(tmp_path / "out")
    assert max(found["acceptance"]["update"].values()) == 0  # one device beside itself
    for part, steps in gpu.TINY.steps.items():
        assert {"shipped", *steps.variants} <= set(found[part])
    assert set(gpu.TINY.steps) <= set(found["torch"])
    for name in gpu.ARMS:
        assert found["training"][name]["tokens_total"][-1] >= gpu.TINY.num_tokens
