"""What a run prints: lines, and a progress bar on a terminal."""

import io
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from toy import settings_of

import adloco_jax
from adloco_jax.engine.spec import Compiled, Compiling, ProgramKey
from adloco_jax.host.terminal import say
from adloco_jax.loop.control import Size
from adloco_jax.loop.growth import Decision
from adloco_jax.run.watching.terminal import Progress, describe_growth, describe_round


class Terminal(io.StringIO):
    def isatty(self):
        return True


def round_of(*sizes, heldout=math.nan, loss=2.41349, num_trainers=0):
    """The line of a round, from each trainer's micro-batch, accumulation and workers."""
    names = ("micro_batch_size", "num_accum_steps", "workers")
    lines = [dict(zip(names, size, strict=True)) | {"train_loss": math.nan} for size in sizes]
    lines[0]["train_loss"] = loss  # no update of the others was finite
    return describe_round(lines, heldout=heldout, num_trainers=num_trainers or len(sizes), pool=6)


def show(file, *, num_rounds=4, every=1):
    progress = Progress(num_rounds, every=every, file=file)
    for index in range(1, num_rounds + 1):
        text = round_of((4, 1, 2), (8, 3, 1), loss=2.41349 / index)
        progress.round(index, index / num_rounds, text, "51,234 tok/s")
        if index == 2:
            progress.note("trainer 1 merged into 0")
    progress.close()
    return file.getvalue()


LINE = "loss 2.413, trainers 2, workers 3/6, batch 4 8x3, 51,234 tok/s, "


def test_without_a_terminal_each_round_is_one_line():
    lines = show(io.StringIO()).splitlines()
    assert len(lines) == 5
    assert lines[2] == "trainer 1 merged into 0"
    assert lines[0].startswith(f"round 1/4: {LINE}") and lines[0].endswith(" left")
    assert lines[4].startswith("round 4/4: loss 0.6034, ") and lines[4].endswith(", 00:00 left")
    found = re.findall(r"^round (\d+)/7", show(io.StringIO(), num_rounds=7, every=3), re.MULTILINE)
    assert found == ["3", "6", "7"]


def test_a_line_says_held_out_loss_equal_sizes_once_and_the_trainers_left_in_100_columns():
    text = round_of(*[(8, 1, 1)] * 4, (8, 2, 1), heldout=2.25, num_trainers=4)
    assert "held-out 2.25, trainers 5->4, workers 5/6, batch 8 8x2" in text
    text = round_of((8, 2, 1), (4, 1, 1), (8, 8, 1), heldout=2.2512, num_trainers=1)
    assert "trainers 3->1, workers 3/6, batch 4-64" in text
    assert len(f"round 1/20: {text}, 51,234 tok/s, 00:12 left") <= 104  # 100 without the merge


def test_each_line_is_flushed_and_ends_with_the_time_left_at_the_mean_pace(monkeypatch):
    clock = iter([100.0, 700.0, 710.0, 720.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    file = io.TextIOWrapper(io.BytesIO(), write_through=False)
    progress = Progress(10, file=file)
    for index in (1, 2, 3):  # the first round takes ten minutes
        progress.round(index, index / 10, "")
    # Tenths of the run take 600, 10 and 10 s.
    left = [line.rpartition(b", ")[2] for line in file.buffer.getvalue().splitlines()]
    assert left == [b"1:30:00 left", b"40:40 left", b"24:06 left"]


def test_the_time_left_leaves_out_compilation(monkeypatch):
    now, stalled = [0.0], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    progress = Progress(10, file=(file := io.StringIO()))
    now[0] = 500.0  # compiled before the first round
    progress.begin(0.0, lambda: stalled[0])
    now[0], stalled[0] = 950.0, 400.0
    progress.move_within_round(0.05, np.ones(2))  # without a bar nothing is shown
    progress.round(1, 0.1, "loss 2")
    assert file.getvalue() == "round 1/10: loss 2, 07:30 left\n"


def test_a_terminal_gets_a_bar_under_the_same_lines():
    text = show(Terminal())
    assert "\r" in text and "100%" in text
    assert f"\rround 1/4: {LINE}" in text and "\rtrainer 1 merged into 0\n" in text


def test_the_bar_moves_within_a_round_and_counts_programs():
    progress = Progress(2, file=(terminal := Terminal()))
    progress.compiling(Compiling(2, 6))
    progress.compiling(Compiled(ProgramKey("steps", (1,)), 3.0, False, False, None))
    assert "compiling" not in terminal.getvalue().rpartition("\r")[2]
    progress.compiling(Compiling(3, 6))
    assert terminal.getvalue().endswith("00:00, compiling 3 of 6")
    progress.move_within_round(0.25, np.array([[2.4, math.nan], [math.inf, 2.42698]]))
    progress.move_within_round(0.5, np.ones(2))  # too soon to be shown
    assert re.search(r" 25%.*00:00, loss 2.413, 00:00 left, compiling 3 of 6$", terminal.getvalue())
    progress.round(1, 0.5, "", "12 tok/s")
    words = r" 50%.*, round 1/2, loss 2.413, 12 tok/s, 00:00 left, compiling 3 of 6\r"
    assert re.search(words, terminal.getvalue())


def test_a_line_of_another_thread_begins_where_the_bar_was(monkeypatch):
    for name in ("stdout", "stderr"):
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.stderr", terminal)
        progress = Progress(2)
        progress.compiling(Compiling(1, 1))
        say("every object is signed", file=getattr(sys, name))
        before, _, after = terminal.getvalue().partition("every object is signed")
        # The bar is overwritten by spaces, and drawn again below the line.
        assert before.endswith("\r") and set(before.split("\r")[-2]) == {" "}
        assert after.startswith("\n\r") and "compiling 1 of 1" in after
        progress.close()


def test_what_prints_beside_the_bar_prints_by_say():
    """A learner has no bar; the others print when their process ends."""
    package = Path(adloco_jax.__file__).parent
    expected = {("elastic", "bucket_learner.py"): 3, ("host", "processes.py"): 2}
    expected[("host", "terminal.py")] = 1
    found = {}
    for folder in ("elastic", "host"):
        for path in (package / folder).glob("*.py"):
            count = len(re.findall(r"(?<!\w)print\(", path.read_text("utf-8")))
            if count:
                found[folder, path.name] = count
    assert found == expected


def test_a_resumed_bar_starts_where_the_run_stopped():
    progress = Progress(10, file=(terminal := Terminal()))
    progress.begin(0.5)
    progress.note("resuming after round 5")
    progress.close()
    assert " 50%|" in terminal.getvalue()


@pytest.mark.parametrize(
    ("options", "batch", "limit"),
    [
        ({}, 12, "batching.max_growth"),
        ({}, 15, "batching.batch_cap"),
        ({"growth": ("workers",)}, 4, "batching.growth, which has no 'batch'"),
    ],
)
def test_growth_names_the_limit_that_held_it(options, batch, limit):
    settings = settings_of(batching=options)
    line = {"round": 3, "trainer": 1, "requested_batch_size": 3, "steps_per_round": 3}
    line |= {"next_batch_size": batch, "next_steps_per_round": 3, "skipped_updates": 0}
    decision = Decision(Size(1, 1, batch), "capped", 1.0, 1.0, 99.5)
    assert describe_growth(line, decision, settings.batching) == [
        f"round 3: trainer 1: batch per worker 3 -> {batch} (the test asks for 99.5, limited by"
        f" {limit})"
    ]
