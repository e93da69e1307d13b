"""The ledger: plain numbers on complete lines, and readers that survive a killed writer."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.errors import DataError
from adloco_jax.run.ledger import Ledger, deterministic_lines, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_line_is_its_event_and_fields_in_order_and_reopening_appends(path):
    written = []
    ledger = Ledger(path, lambda line: written.append((line, read(path)[-1])))
    ledger.write("round", round=1, loss=np.float32(2.5), noise=float("nan"), done=True)
    line = '{"event": "round", "round": 1, "loss": 2.5, "noise": null, "done": true}\n'
    assert path.read_text() == line  # before it is closed
    assert written == [(read(path)[0], read(path)[0])]  # on disk when observers get it
    ledger.close()
    with Ledger(path) as again:
        again.write("end")
    assert path.read_text() == line + '{"event": "end"}\n'


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
        ledger.write("round", value=value)
    [event] = read(path)
    assert event["value"] == plain
    assert type(event["value"]) is type(plain)


def test_a_value_without_a_plain_form_raises_and_leaves_no_line(path):
    with Ledger(path) as ledger:
        for value in (object(), {1, 2}, b"bytes", jax.random.key(0), {(0, 1): 2}, [{"x": 1j}]):
            with pytest.raises(TypeError):
                ledger.write("round", fine=1, value=value)
        with pytest.raises(TypeError, match="Path"):
            ledger.write("merge", members=[Path("runs")])
    assert read(path) == []


LINES = b'{"event": "start", "seed": 1}\n{"event": "round", "loss": 2.5}\n'


@pytest.mark.parametrize("cut", range(LINES.index(b"\n") + 1, len(LINES)))
def test_a_last_line_cut_anywhere_is_dropped_and_repaired(path, cut):
    path.write_bytes(LINES[:cut])
    lines: list[dict] = [{"event": "start", "seed": 1}]
    if cut == len(LINES) - 1:  # only its newline is missing
        lines.append({"event": "round", "loss": 2.5})
    assert read(path) == lines
    with Ledger(path) as ledger:
        ledger.write("end")
    assert read(path) == [*lines, {"event": "end"}]


@pytest.mark.parametrize("damage", [b"", b'{"event": "rou', b'{"round": 1}', b"\xff\xfe", b"[" * 9])
@pytest.mark.parametrize("number", [1, 3])
def test_damage_on_a_complete_line_raises_naming_file_and_line(path, damage, number):
    lines = [b'{"event": "start"}', b'{"event": "end"}']
    lines.insert(number - 1, damage)
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError) as raised:
        read(path)
    assert f"{path}:{number}: " in str(raised.value)
    assert "\n" not in str(raised.value)


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
