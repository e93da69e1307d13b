"""Runs in learners on a Ray cluster: what a local run decides, and what deaths leave of it."""

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")

import toy_runs
from toy import Table, corpus, settings_of
from toy_runs import events, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]  # clusters start slowly

RAY = {"kind": "ray", "heartbeat_s": 5.0, "restart_s": 60.0}


@dataclasses.dataclass(frozen=True)
class Slow(Table):
    """The toy's rows, which take their time."""

    seconds: float = 0.2

    def batch(self, trainer, stream, start, count):
        time.sleep(self.seconds)
        return super().batch(trainer, stream, start, count)


def learners_log(workdir):
    """What the learners have written themselves: (number, life) and their lines."""
    logs = {}
    for path in Path(workdir).glob("learners/*/*.jsonl"):
        number, life = map(int, path.stem.split("-"))
        logs[number, life] = [json.loads(line) for line in path.read_text().splitlines()]
    return logs


def assert_audit_is_clean(workdir, control):
    """Each stream's counted ranges follow one another without a gap: by the learners' logs alone.

    What a learner has read counts if the stream went on from its end, or the run ended there.
    """
    attempts = {}
    for lines in learners_log(workdir).values():
        for line in lines[1:]:
            stream = (line["trainer"], line["stream"])
            attempts.setdefault(stream, set()).add((line["start"], line["start"] + line["count"]))
    for (trainer, stream), ranges in attempts.items():
        living = [t for t in control.trainers if t.id == trainer]
        starts = {start for start, _ in ranges}
        place = 0
        while True:
            onward = {end for start, end in ranges if start == place}
            following = sorted(onward & starts)
            if not following:
                break
            assert len(following) == 1
            place = following[0]
        assert starts <= {0, *(end for _, end in ranges)}
        for each in living:
            if (end := each.cursors.get(str(stream))) is not None:
                assert end == place or end in onward


def when_it_has_read(workdir, number, rounds, act):
    """Acts once on a learner's process, when it has logged so many rounds; on a thread."""

    def watch():
        for _ in range(1200):
            lines = learners_log(workdir).get((number, 0), [])
            if len(lines) > rounds:
                act(lines[0]["pid"])
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_run_in_learners_decides_reads_and_counts_as_a_local_one(tmp_path):
    local = run(tmp_path / "local")
    groups = toy_runs.GROWING | {"engine": RAY}
    elastic = run(tmp_path / "ray", settings_of(**groups))

    def of_rounds(workdir):
        floats = ("train_loss", "pseudo_grad_norm", "noise", "signal", "test_value", "step_s")
        lines = {(e["round"], e["trainer"]): e for e in events(workdir, "round")}
        return lines, {
            key: {n: v for n, v in e.items() if n not in (*floats, "stall_s", *NEW)}
            for key, e in lines.items()
        }

    NEW = ("workers_counted", "wire_bytes")
    (lines, decided), (expected_lines, expected) = map(of_rounds, (elastic.workdir, local.workdir))
    assert decided == expected
    for key, line in lines.items():
        assert line["train_loss"] == pytest.approx(expected_lines[key]["train_loss"], abs=1e-5)
        assert line["workers_counted"] == line["workers"] and line["wire_bytes"] > 0
    merged = [[e["members"] for e in events(w, "merge")] for w in (elastic.workdir, local.workdir)]
    assert merged[0] == merged[1] != []
    assert elastic.loss == pytest.approx(local.loss, abs=1e-5)
    assert elastic.controller == local.controller
    assert_audit_is_clean(elastic.workdir, elastic.controller)
    assert left_running() == []


def left_running():
    """Command lines of processes of a cluster that a run here has started."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"RAY_AUTH_TOKEN_PATH=/tmp/adloco-" in environ:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def test_learners_that_die_or_hang_are_replaced_and_every_sequence_is_read(tmp_path):
    groups = toy_runs.GROWING | {"engine": RAY, "num_rounds": 12}
    threads = [
        when_it_has_read(tmp_path, 0, 1, lambda pid: os.kill(pid, signal.SIGKILL)),
        when_it_has_read(tmp_path, 2, 1, lambda pid: os.kill(pid, signal.SIGSTOP)),
    ]
    slow = Slow(corpus().rows)
    ended = run(tmp_path, settings_of(**groups), corpus=slow)
    for thread in threads:
        thread.join()
    lost = {e["learner"]: e["why"] for e in events(tmp_path, "learner", what="lost")}
    assert lost.keys() == {0, 2} and "no sign" in lost[2]
    joined = [e["learner"] for e in events(tmp_path, "learner", what="joined")]
    assert {*joined} == {0, 1, 2, 3} and joined.count(2) == 2  # a trainer's only one: it waits
    assert ended.controller.round == 12
    counted = sum(e["tokens"] for e in events(tmp_path, "round"))
    assert counted == ended.controller.tokens_total
    assert_audit_is_clean(tmp_path, ended.controller)
    assert left_running() == []
    assert len(events(tmp_path, "end", reason="finished")) == 1
