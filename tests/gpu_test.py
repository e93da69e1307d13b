"""scripts/gpu.py without a GPU: every part runs with a small model."""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import gpu
import pytest
from ml_collections import ConfigDict

from adloco_jax.cli.names import load_config
from adloco_jax.config import validate
from adloco_jax.run.arguments import check_inputs

ROOT = Path(__file__).resolve().parents[1]

SPEED = {"tokens": {"low": 9e4, "median": 1e5, "high": 2e5}, "flops_per_s": 4945e11}
SPEED |= {"torch": {"ratio": 1.25, "tokens": 8e4, "eager": 6e4}}
FIGURES = {
    "speed": SPEED,
    "statistics": {"statistics": {"time": 1.125, "extra_mib": -3.0}},
    "round": {"round": {"ratio": 1.02}},
    "trainers": {"trainers": {"time": 0.9, "memory": 0.8}},
    "memory": {
        "peak": {"planned": 50.0, "measured": 40.0, "ratio": 1.25, "batch": 96},
        "batch": {"found": 96, "largest": 128},
    },
    "programs": {
        "programs": {
            "steps M=1": {
                "planned": 2**30,
                "measured": 2**31,
                "seconds": 0.1,
                "least_seconds": 0.05,
            }
        }
    },
    "resume": {"resume": {"verdict": "yes, every bit"}},
    "compiler": {"compiler": {"text": "`O1` 0.980", "best": "as shipped"}},
}
H200 = {"size": "microllama", "device": "NVIDIA H200", "platform": "gpu", "machine": "a GPU"}


def rows_of(text):
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, flags=re.MULTILINE))


def started(monkeypatch, tmp_path, about, faults=()):
    """The results file, the page, and the time limit of each part that was started."""
    results, page, calls = tmp_path / "r" / "results.jsonl", tmp_path / "GPU.md", {}
    page.write_text("before\n<!-- table -->\nold\n<!-- end of the table -->\nafter\n")

    def run_part(part, options, limit_s):
        calls[part] = limit_s
        if part in faults:
            return "took more than 450 s"
        gpu.append(results, about | {"part": part} | FIGURES.get(part, {}))
        return ""

    monkeypatch.setattr(gpu, "run_part", run_part)
    words = ["gpu.py", "--results", str(results), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", words)
    return results, page, calls


def test_a_second_start_measures_what_is_missing_and_the_page_keeps_its_text(monkeypatch, tmp_path):
    results, page, calls = started(monkeypatch, tmp_path, H200, faults=("round",))
    # a result of another card
    gpu.append(results, H200 | {"part": "statistics", "device": "NVIDIA A100"})
    without = FIGURES["speed"] | {"torch": "torch is not installed"}
    gpu.append(results, H200 | {"part": "speed"} | without)
    assert gpu.main() == 1
    assert list(calls) == ["machine", *gpu.PARTS] and max(calls.values()) <= gpu.PART_LIMIT_S
    rows = rows_of(page.read_text())
    assert rows["a round over its bare inner steps"] == "not measured: took more than 450 s"
    share = rows["share of the bfloat16 peak"]
    assert share.startswith("0.500 of 989 TFLOP/s (published: 0.398, 50 M parameters on one H100")

    calls.clear()
    _, _, calls = started(monkeypatch, tmp_path, H200)
    assert gpu.main() == 0
    assert list(calls) == ["machine", "round"]
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert not [text for text in rows_of(text).values() if "not measured" in text]
    assert rows_of(text)["largest batch found, and the true one"] == "96 and 128"


def test_no_accelerator_is_said_in_a_line(monkeypatch, tmp_path, capsys):
    _, page, calls = started(monkeypatch, tmp_path, H200 | {"platform": "cpu"})
    before = page.read_text()
    assert gpu.main() == 2 and list(calls) == ["machine"] and page.read_text() == before
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("no accelerator: jax finds only a CPU; install jax[cuda12]")


def test_the_page_has_a_figure_or_says_not_measured_in_every_row():
    page = (ROOT / "docs" / "GPU.md").read_text(encoding="utf-8")
    rows = rows_of(gpu.TABLE.search(page)[0])
    assert [name for name, *_ in gpu.ROWS] == list(rows)
    assert [
        text
        for text in rows.values()
        if re.search(r"\d|yes|not measured|second table", text) is None
    ] == []
    lines = [H200 | {"part": "speed"} | FIGURES["speed"] | {"torch": "torch is not installed"}]
    rows = rows_of(gpu.table(lines, None))
    reasons = [text.removeprefix("not measured: ") for text in list(rows.values())[1:3]]
    assert reasons[0].endswith("give --peak") and reasons[1] == "torch is not installed"


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_the_kind_unless_given(kind, peak):
    assert gpu.peak_of(kind, None) == peak
    assert gpu.peak_of(kind, 1e12) == 1e12


def test_settings_of_the_compiler_that_gain_are_tried_together(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--kept")
    low, high, buffers, triton, remat = gpu.COMPILER
    gains = {low: 1.02, high: 1.2, buffers: 1.005, triton: 0.0, remat: 1.1}
    tried = []

    def speed_of(settings):
        tried.append(gpu.environment_of(settings))
        return 100 * math.prod(gains[name] for name in settings)

    speeds, best = gpu.best_settings(speed_of)
    assert best == f"{high} {remat}" and speeds[best] == pytest.approx(132)
    assert speeds["as shipped"] == 100 and speeds[triton] == 0
    assert tried[0]["XLA_FLAGS"] == "--kept" and tried[-1]["JAX_OPTIMIZATION_LEVEL"] == "O3"
    assert tried[-1]["XLA_FLAGS"] == "--kept --xla_disable_hlo_passes=rematerialization"


@pytest.mark.parametrize(("limit", "largest"), [(1, 1), (2, 2), (6, 6), (99, 8)])
def test_the_true_batch_is_searched_from_the_one_found(monkeypatch, limit, largest):
    tried = []

    def fit_random(settings, workdir):
        tried.append(settings.batching.initial_batch_size)
        return [{"event": "fault"}] if tried[-1] > limit else []

    monkeypatch.setattr(gpu.gc, "collect", lambda: None)
    choice = types.SimpleNamespace(max_batch_size=3)
    monkeypatch.setattr(gpu, "configured_choice", lambda settings, machine: choice)
    monkeypatch.setattr(gpu, "fit_random", fit_random)
    monkeypatch.setattr(gpu, "plan", lambda config, memory: "else\npeak: 2048 bytes (2 KiB)")
    toy = gpu.dataclasses.replace(gpu.SIZES["toy"], batch_cap=8)
    figures = gpu.memory(toy)
    assert figures["batch"] == {"found": 3, "largest": largest}
    assert figures["peak"]["planned"] == 2048 / 2**30 and tried[0] == 3


def test_each_programs_peak_and_seconds_stand_beside_the_compilers(monkeypatch):
    monkeypatch.setitem(gpu.RATES, "cpu", gpu.Rates(1e15, 1e15, 1e-9))
    found = gpu.programs(gpu.SIZES["toy"])["programs"]
    kinds = {name.split()[0] for name in found}
    assert kinds == {"stats", "start", "steps", "outer", "loss"}
    for peak in found.values():
        # on a CPU the peak is that of the whole process
        assert (
            0 < peak["planned"] < peak["measured"] and 0 < peak["least_seconds"] < peak["seconds"]
        )
    text = gpu.table([H200 | {"part": "programs", "programs": found}], None)
    assert all(f"| {name} |" in text for name in found)


@pytest.mark.parametrize("size", gpu.SIZES.values(), ids=gpu.SIZES)
def test_the_run_that_is_resumed_is_a_valid_one(size):
    config = load_config(ROOT / "configs" / f"{size.config}.py", "get_config", ConfigDict)
    config.update_from_flattened_dict(size.changes)
    settings = validate(config)
    check_inputs(settings)
    # The run is stopped after the second round, before the merge.
    assert 2 < settings.merge.every_rounds < settings.num_rounds == 4


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
    options = argparse.Namespace(size="toy", results=tmp_path / "results.jsonl")
    assert gpu.run_part("round", options, 3) == "took more than 3 s"
    # A killed process dies when it next runs. Nobody waits for it, so it may stay a zombie.
    child_id, until = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while is_running(child_id) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(child_id)
    script.write_text("raise RuntimeError('out | of memory')")
    assert gpu.run_part("round", options, 60) == "RuntimeError: out / of memory"


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu_at_a_toys_size(tmp_path):
    results, page = tmp_path / "results.jsonl", tmp_path / "GPU.md"
    page.write_text((ROOT / "docs" / "GPU.md").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "gpu.py"), "--size=toy", "--peak=1e11"]
    command += [f"--results={results}", f"--page={page}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == (1 if "not installed" in run.stdout else 0), run.stderr
    rows = rows_of(gpu.TABLE.search(page.read_text(encoding="utf-8"))[0])
    missing = {name: text for name, text in rows.items() if text.startswith("not measured")}
    reasons = {"not measured: torch is not installed"} if run.returncode else set()
    assert set(missing.values()) == reasons
    assert rows["resumed bit for bit, deterministic operations"] == "yes, every bit"
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["part"] for line in lines] == ["machine", *gpu.PARTS]
