"""The ledger: plain numbers on complete lines, and readers that survive a killed writer."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledgers import round_line

from adloco_jax.errors import CheckpointError, DataError
from adloco_jax.loop.adloco import Control, Trainer
from adloco_jax.run.kept.ledger import Ledger, read, remove_rounds_after
from scripts.golden import deterministic_lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_line_is_its_event_and_fields_in_order_and_reopening_appends(path):
    written = []
    ledger = Ledger(path)
    ledger.listeners.append(lambda line: written.append((line, read(path)[-1])))
    ledger.write("note", round=1, loss=np.float32(2.5), noise=float("nan"), done=True)
    line = '{"event": "note", "round": 1, "loss": 2.5, "noise": null, "done": true}\n'
    assert path.read_text() == line  # the line is there before the ledger is closed
    assert written == [(read(path)[0], read(path)[0])]  # the line is on disk when observers get it
    ledger.close()
    with Ledger(path) as again:
        again.write("last")
    assert path.read_text() == line + '{"event": "last"}\n'


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(2**40), 2**40),
        (np.bool_(True), True),
        (jnp.bfloat16(0.75), 0.75),
        (jnp.asarray([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({0: jnp.int32(3), "a": (1, np.int32(2))}, {"0": 3, "a": [1, 2]}),
        (jnp.float32("-inf"), None),
        ([1.0, [float("inf"), {"x": np.float64("nan")}]], [1.0, [None, {"x": None}]]),
        ("naïve NaN \ud800", "naïve NaN \ud800"),  # argv has a surrogate for a byte outside UTF-8
    ],
)
def test_values_become_plain_json_and_what_is_not_finite_null(path, value, plain):
    with Ledger(path) as ledger:
        ledger.write("note", value=value)
    [event] = read(path)
    assert event["value"] == plain
    assert type(event["value"]) is type(plain)


def test_a_value_without_a_plain_form_raises_and_leaves_no_line(path):
    with Ledger(path) as ledger:
        for value in (object(), {1, 2}, b"bytes", jax.random.key(0), {(0, 1): 2}, [Path("runs")]):
            with pytest.raises((AttributeError, TypeError)):
                ledger.write("note", fine=1, value=value)
    assert read(path) == []


LINES = b'{"event": "first", "seed": 1}\n{"event": "second", "loss": 2.5}\n'


def test_a_last_line_cut_anywhere_is_dropped_and_repaired(path):
    for length in range(LINES.index(b"\n") + 1, len(LINES)):
        path.write_bytes(LINES[:length])
        lines: list[dict] = [{"event": "first", "seed": 1}]
        if length == len(LINES) - 1:  # only the newline is missing
            lines.append({"event": "second", "loss": 2.5})
        assert read(path) == lines
        remove_rounds_after(path, None)
        with Ledger(path) as ledger:
            ledger.write("last")
        assert read(path) == [*lines, {"event": "last"}]


def changed_round(**changes):
    """A `round` line with some fields changed; `...` removes one."""
    line = round_line(1, test_value=2.5) | changes
    return json.dumps({name: value for name, value in line.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("line", "number", "fault"),
    [
        (b"", 1, ""),
        (b'{"event": "rou', 3, ""),
        (b'{"event": 1}', 1, ""),
        (b"\xff\xfe", 3, ""),
        (b"[" * 9, 1, ""),
        (changed_round(tokens=...), 2, "round.tokens: Field required"),
        (changed_round(tokens="12"), 2, "round.tokens: have '12', expected "),
        (changed_round(workers=0), 2, "round.workers: have 0, expected .* 1"),
    ],
)
def test_a_damaged_line_or_one_of_another_form_is_refused_by_its_number(path, line, number, fault):
    lines = [b'{"event": "first"}', changed_round()]
    lines.insert(number - 1, line)
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=rf"ledger\.jsonl:{number}: {fault}") as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}:{number}: ") and "\n" not in str(raised.value)


def test_a_resume_cuts_the_rounds_after_the_checkpoint_by_each_trainers_own_count(path):
    """Trainer 1 is a round ahead of trainer 0; trainer 2 had left the run."""
    kept = [
        *({"event": "round", "round": 1, "trainer": m} for m in (0, 1, 2)),
        {"event": "fault", "kind": "quarantine", "round": 1, "trainer": 2},
        {"event": "round", "round": 2, "trainer": 1},
        {"event": "eval", "round": 1, "trainer": 1},
        {"event": "checkpoint", "round": 1},
    ]
    later = [
        {"event": "round", "round": 3, "trainer": 1},
        {"event": "round", "round": 2, "trainer": 0},
        {"event": "eval", "round": 2, "trainer": 1},
        {"event": "fault", "kind": "quarantine", "round": 1, "trainer": 1},
    ]
    start, learner = {"event": "start"}, {"event": "learner", "round": 2}

    def write(*lines):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    control = Control({m: Trainer(1, [m], rounds=m + 1) for m in (0, 1)}, 1, 1, 1)
    write(start, *kept, *later, learner)
    remove_rounds_after(path, control)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [start, *kept, learner]
    remove_rounds_after(path, None)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        start,
        kept[-1],
        learner,
    ]
    with pytest.raises(CheckpointError, match="has 0 rounds of trainer 0, the checkpoint has 1"):
        remove_rounds_after(path, control)


def test_a_missing_ledger_is_the_users_mistake(tmp_path):
    with pytest.raises(DataError, match=r"nowhere/ledger\.jsonl.*No such file"):
        read(tmp_path / "nowhere" / "ledger.jsonl")


def test_lines_two_runs_share_leave_out_clocks_and_compilations():
    events = [
        {"event": "start", "time": "now"},
        {"event": "compile", "seconds": 3.0},
        {"event": "round", "round": 1, "syncs": 2, "step_s": 0.1, "stall_s": 0.0},
        {"event": "refusal", "round": 1},
        {"event": "sync", "round": 1, "trainers": [0], "bytes": 8},
        {"event": "checkpoint", "round": 1},
        {"event": "merge", "round": 1, "members": [0, 1]},
        {"event": "eval", "round": 1, "loss": 2.0, "wall_s": 9.0},
        {"event": "memory", "round": 1, "host_peak_bytes": 5},
        {"event": "end", "wall_s": 9.0},
    ]
    assert deterministic_lines(events) == [
        {"event": "round", "round": 1, "syncs": 2},
        {"event": "refusal", "round": 1},
        {"event": "sync", "round": 1, "trainers": [0], "bytes": 8},
        {"event": "merge", "round": 1, "members": [0, 1]},
        {"event": "eval", "round": 1, "loss": 2.0},
    ]
