"""What a run prints: plain lines without a terminal, a bar with one."""

import io
import re
import subprocess
import sys
from pathlib import Path

from adloco_jax.run.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(file, *, num_rounds=4, every=1):
    progress = Progress(num_rounds, every=every, file=file)
    for index in range(1, num_rounds + 1):
        fields = {"loss": 2.41349 / index, "batch": [4, 8], "trainers": 2, "tokens_per_s": 51234.5}
        progress.round(index, fields, share_done=index / num_rounds)
        if index == 2:
            progress.note("trainer 1 merged into 0")
    progress.close()
    return file.getvalue()


def test_without_a_terminal_each_round_is_one_line_of_keys_and_values():
    lines = show(io.StringIO()).splitlines()
    assert len(lines) == 5
    assert lines[2] == "trainer 1 merged into 0"
    fields = r"batch 4,8 trainers 2 tokens_per_s 5123[45]"
    assert re.fullmatch(rf"round 1/4 loss 2\.413 {fields} eta_s \d+", lines[0])
    assert re.fullmatch(rf"round 4/4 loss 0\.6034 {fields} eta_s 0", lines[4])
    shown = re.findall(r"^round (\d+)/7", show(io.StringIO(), num_rounds=7, every=3), re.MULTILINE)
    assert shown == ["3", "6", "7"]


def test_each_plain_line_is_flushed_and_ends_with_the_time_left(monkeypatch):
    clock = iter([100.0, 106.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    file = io.TextIOWrapper(io.BytesIO(), write_through=False)
    Progress(5, file=file).round(2, {"loss": None}, share_done=0.4)
    assert file.buffer.getvalue() == b"round 2/5 loss - eta_s 9\n"


def test_where_tokens_end_the_run_its_share_is_shown():
    file = io.StringIO()
    Progress(None, file=file).round(2, {"loss": 1.5}, share_done=1.0)
    assert file.getvalue() == "round 2 done 100% loss 1.5 eta_s 0\n"
    bar = Progress(None, file=(terminal := Terminal()))
    bar.round(2, {"loss": 1.5}, share_done=0.4)
    bar.close()
    assert "done 40% loss 1.5" in terminal.getvalue()


def test_a_terminal_gets_a_bar_with_notes_on_lines_of_their_own():
    text = show(Terminal())
    assert "\r" in text
    assert "4/4" in text and "loss 0.6034 batch 4,8 trainers 2" in text
    assert "\rtrainer 1 merged into 0\n" in text
    assert "round 4/4" not in text


def test_a_notebook_without_widgets_gets_a_bar_and_no_warning():
    # A kernel's output is no terminal, and without ipywidgets tqdm warns when it is imported.
    script = """
import sys, types
sys.modules["ipykernel.zmqshell"] = types.ModuleType("zmqshell")
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: None)
sys.modules["ipywidgets"] = None
from adloco_jax.run.progress import Progress
progress = Progress(2)
progress.round(2, {"loss": 1.5}, share_done=1.0)
progress.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "100%" in done.stdout and "loss 1.5" in done.stdout
    assert done.stderr == ""
