"""The closing table and the figure, on a small written ledger whose numbers are added by hand."""

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from adloco_jax.errors import DataError
from adloco_jax.run.ledger import Ledger, read
from adloco_jax.study import report

LENGTH = 16  # tokens per sequence; every trainer makes 4 updates per round
# Six rounds, max_batch_size 8, switch multiplier 2, four workers; trainer 1 goes into 2 after
# round 3. Columns: round, trainer, workers, requested, micro, accum, train loss, next, reason.
ROUNDS = [
    (1, 0, 2, 2, 2, 1, 5.50, 4, "grew"),
    (1, 1, 1, 2, 2, 1, 5.52, 2, "kept"),
    (1, 2, 1, 2, 2, 1, 5.51, 4, "grew"),
    (2, 0, 2, 4, 4, 1, 4.40, 12, "capped"),
    (2, 1, 1, 2, 2, 1, 4.72, 2, "kept"),
    (2, 2, 1, 4, 4, 1, 4.61, 4, "signal"),
    (3, 0, 2, 12, 8, 1, 3.60, 20, "grew"),
    (3, 1, 1, 2, 2, 1, 4.12, 4, "grew"),
    (3, 2, 1, 4, 4, 1, 4.01, 4, "kept"),
    (4, 0, 3, 20, 8, 3, 2.90, 20, "kept"),
    (4, 2, 1, 4, 4, 1, 3.51, 9, "grew"),
    (5, 0, 3, 20, 8, 3, 2.50, 20, "kept"),
    (5, 2, 1, 9, 8, 1, 3.11, 9, "kept"),
    (6, 0, 3, 20, 8, 3, 2.25, 20, "degenerate"),
    (6, 2, 1, 9, 8, 1, 2.81, 9, "skipped"),
]


def write_run(
    workdir,
    *,
    rounds=ROUNDS,
    merge=True,
    refusal=False,
    evals=True,
    start=True,
    end=True,
    no_loss=(),
    memory=True,
    command="python -m adloco_jax.main --config configs/quickstart.py --set x='$a_$'",
):
    """Writes the lines of a run; `no_loss` are the rounds whose losses are not finite."""
    workdir.mkdir(parents=True, exist_ok=True)
    last = max(row[0] for row in rounds)
    with Ledger(workdir / "ledger.jsonl") as ledger:
        if start:
            ledger.write(
                "start",
                time="2025-01-01T00:00:00",
                run="quickstart",
                command=command,
                config={"seed": 0},
                num_params=250_000,
                devices="1 cpu",
                jax="0.10.2",
                versions={},
                data_fingerprint="0",
                tokens_per_byte=0.25,
                max_batch_size=8,
                buckets=[2, 4, 8],
            )
        for cache, seconds in (("miss", 1.5), ("miss", 2.25), ("hit", 0.25)):
            ledger.write(
                "compile",
                key="k",
                seconds=seconds,
                cache=cache,
                where="foreground",
                needed_bytes=int(seconds * 2**30) if memory else None,
            )
        tokens_total = syncs_total = bytes_total = updates_total = 0
        for number, lines in itertools.groupby(rounds, key=lambda row: row[0]):
            losses = {}
            for _, trainer, workers, requested, micro, accum, loss, following, reason in lines:
                tokens = workers * micro * accum * 4 * LENGTH
                syncs = int(workers > 1)
                moved = 500_000 * (workers if workers > 1 else 0)
                losses[trainer] = math.nan if number in no_loss else loss
                ledger.write(
                    "round",
                    round=number,
                    trainer=trainer,
                    workers=workers,
                    requested_batch_size=requested,
                    micro_batch_size=micro,
                    num_accum_steps=accum,
                    updates=4,
                    tokens=tokens,
                    learning_rate=1e-3,
                    train_loss=losses[trainer],
                    noise=1.0,
                    signal=0.1,
                    test_value=math.inf,
                    next_batch_size=following,
                    reason=reason,
                    syncs=syncs,
                    bytes=moved,
                    pseudo_grad_norm=0.5,
                    step_s=0.2,
                    stall_s=0.0,
                )
                tokens_total += tokens
                syncs_total += syncs
                bytes_total += moved
                updates_total += 4
            if evals:
                best = min(losses.values()) - 0.25
                for who, loss in [(t, x - 0.2) for t, x in losses.items()] + [("consensus", best)]:
                    ledger.write(
                        "eval",
                        round=number,
                        trainer=who,
                        loss=loss,
                        perplexity=math.exp(loss),
                        tokens_total=tokens_total,
                        bytes_total=bytes_total,
                        updates_total=updates_total,
                        syncs_total=syncs_total,
                        wall_s=1.5 * number,
                        **({"source": "best"} if who == "consensus" else {}),
                    )
            if merge and number == 3:
                ledger.write(
                    "merge",
                    round=3,
                    members=[2, 1],
                    into=2,
                    weights=[0.5, 0.5],
                    loss_before=[4.0, 4.1],
                    loss_after=4.05,
                    barrier=0.0,
                    bytes=250_000,
                    requested_batch_size=4,
                    workers={0: 3, 2: 1},
                )
                bytes_total += 250_000
            if refusal and number == 3:
                ledger.write(
                    "refusal",
                    round=3,
                    members=[2, 1],
                    into=2,
                    loss_before=[4.0, 4.1],
                    loss_after=5.0,
                    barrier=0.95,
                    action="keep",
                )
        for peak in (2, 3) if memory else ():
            ledger.write(
                "memory",
                round=last,
                host_peak_bytes=peak * 2**29,
                device_peak_bytes=[None, peak * 2**30, 2**30],
            )
        if end:
            ledger.write(
                "end",
                reason="done",
                rounds=last,
                tokens_total=tokens_total,
                bytes_total=bytes_total,
                syncs_total=syncs_total,
                updates_total=updates_total,
                wall_s=75.0,
            )
    return workdir


def test_the_table_has_the_hand_added_numbers(tmp_path):
    lines = report.closing_table(write_run(tmp_path, refusal=True)).splitlines()
    assert [line.split() for line in lines[2:5]] == [
        # 16 tokens x 4 updates = 64 per sequence of the batch: 64 x (2x2 + 2x4 + 2x8 + 3x3x24)
        ["0", "1-6", "-", "2", "->", "20", "3", "15,616", "24", "2.2500"],
        ["1", "1-3", "2", "2", "->", "2", "1", "384", "12", "4.1200"],
        ["2", "1-6", "-", "2", "->", "9", "1", "1,920", "24", "2.8100"],
    ]
    assert lines[6:] == [
        "rounds          6",
        "tokens          17,920",
        "updates         60",
        # 500,000 bytes x (3 rounds x 2 workers + 3 rounds x 3 workers) + the merge's 250,000
        "communications  6 blocking, summed over trainers; 7.391 MiB moved",
        "merges          1, 1 refused",
        "batch growths   6, accumulating from round 4",
        "programs        3 compiled in 4.0 s, 1 of them from the cache",
        "memory          host 1.5 GiB peak, device 3 GiB peak, largest program 2.25 GiB",
        "wall time       0:01:15",
        "held-out loss   2.0000 nats/token, consensus (best) after round 6",
        "perplexity      7.3891",  # e squared
        "nats per byte   0.5000",  # a quarter of a token per byte
        "bits per byte   0.7213",  # over ln 2
    ]
    assert max(map(len, lines)) <= 80


def test_memory_that_nobody_measured_is_not_made_up(tmp_path):
    write_run(tmp_path, memory=False)
    assert "memory          -\n" in report.closing_table(tmp_path)
    assert "Memory" not in report._figure(read(tmp_path / "ledger.jsonl")).get_supxlabel()


def test_columns_of_the_table_are_flush(tmp_path):
    header, rule, *rows = report.closing_table(write_run(tmp_path)).splitlines()[:5]
    assert set(rule) == {"-"}
    assert {len(line) for line in (header, rule, *rows)} == {len(header)}


def test_the_table_of_a_run_that_was_cut_short_says_what_is_missing(tmp_path):
    table = report.closing_table(write_run(tmp_path, evals=False, end=False, start=False))
    assert "held-out loss   not evaluated" in table
    assert "wall time       -" in table
    assert "per byte" not in table


def test_the_table_before_the_first_round_has_zeros(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("start", run="quickstart")
    table = report.closing_table(tmp_path)
    assert "tokens          0\n" in table
    assert "communications  0 blocking, summed over trainers; 0 bytes moved\n" in table


def test_losses_that_are_not_finite_are_named_so(tmp_path):
    table = report.closing_table(write_run(tmp_path, no_loss=(6,)))
    assert table.splitlines()[2].endswith("not finite")
    assert "held-out loss   not finite, consensus (best) after round 6" in table


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**3, "1 GiB"),
        (5000 * 1024**4, "5,000 TiB"),
    ],
)
def test_bytes_are_in_the_unit_a_person_would_take(count, shown):
    assert report._bytes(count) == shown


def test_drawing_needs_no_pyplot(tmp_path):
    script = """
import sys
from adloco_jax.study import report
report.draw(sys.argv[1])
sys.exit("matplotlib.pyplot" in sys.modules)
"""
    command = [sys.executable, "-c", script, write_run(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)


def test_drawing_leaves_a_png_and_the_totals(tmp_path):
    path = report.draw(write_run(tmp_path))
    assert path == tmp_path / "report" / "summary.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["tokens_total"] == 17_920
    assert summary["bytes_total"] == 7_750_000
    assert summary["num_batch_growths"] == 6
    assert summary["nats_per_byte"] == pytest.approx(0.5)
    assert summary["bits_per_byte"] == pytest.approx(0.5 / math.log(2))


def curves(ax):
    """The drawn points of each labelled or dashed line, by label and line style."""
    return {
        (line.get_label().lstrip("_"), line.get_linestyle()): line.get_xydata().tolist()
        for line in ax.get_lines()
    }


def test_the_figure_draws_the_ledgers_numbers_over_tokens_and_communications(tmp_path):
    figure = report._figure(read(write_run(tmp_path) / "ledger.jsonl"))
    grid = [figure.axes[i : i + 2] for i in (0, 2, 4)]
    # Tokens after each round, all trainers: 512, +896, +1408, +4864, then twice +5120.
    ends = {"tokens": [0, 512, 1408, 2816, 7680, 12800, 17920], "communications": list(range(7))}
    for (loss, batch, alive), (name, x) in zip(zip(*grid, strict=True), ends.items(), strict=True):
        assert alive.get_xlabel().startswith(name)
        consensus = curves(loss)["consensus", "-"]
        assert consensus == [
            [at, pytest.approx(y)]
            for at, y in zip(x[1:], [5.25, 4.15, 3.35, 2.65, 2.25, 2.0], strict=True)
        ]
        assert curves(loss)["trainer 1", "-"] == [
            [at, pytest.approx(y)] for at, y in zip(x[1:4], [5.32, 4.52, 3.92], strict=True)
        ]
        requested = curves(batch)["trainer 0", "-"]
        assert requested == [[at, y] for at, y in zip(x, [2, 4, 12, 20, 20, 20, 20], strict=True)]
        effective = curves(batch)["trainer 0", "--"]
        assert effective == [[at, y] for at, y in zip(x, [2, 4, 8, 24, 24, 24, 24], strict=True)]
        assert [y for _, y in curves(batch)["max_batch_size", ":"]] == [8, 8]
        for ax in (loss, batch, alive):
            assert [at for at, _ in curves(ax)["merge", "-."]] == [x[3], x[3]]
        [steps] = [line for line in alive.get_lines() if line.get_linewidth() == 2]
        assert steps.get_ydata().tolist() == [3, 3, 3, 2, 2, 2, 2]
        assert steps.get_drawstyle() == "steps-post"


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path):
    figure = report._figure(read(write_run(tmp_path, no_loss=(2,)) / "ledger.jsonl"))
    losses = [y for _, y in curves(figure.axes[0])["trainer 1", "-"]]
    assert losses == [
        pytest.approx(5.32),
        pytest.approx(math.nan, nan_ok=True),
        pytest.approx(3.92),
    ]


def test_trainers_differ_by_colour_and_by_marker_and_keep_both_in_every_panel(tmp_path):
    figure = report._figure(read(write_run(tmp_path) / "ledger.jsonl"))
    styles = {
        (line.get_label(), to_hex(line.get_color()), line.get_marker())
        for ax in figure.axes
        for line in ax.get_lines()
        if str(line.get_label()).startswith("trainer") and line.get_linestyle() == "-"
    }
    assert len(styles) == len({s[1] for s in styles}) == len({s[2] for s in styles}) == 3


SITUATIONS = {
    "growth and a merge": {},
    "one round": {"rounds": ROUNDS[:3], "merge": False},
    "one trainer": {"rounds": [row for row in ROUNDS if row[1] == 0], "merge": False},
    "one worker": {"rounds": [row for row in ROUNDS if row[1] == 2], "merge": False},
    "no evaluation": {"evals": False, "end": False},
    "no finite loss": {"no_loss": range(7)},
    "some losses not finite": {"no_loss": (2, 6)},
    "no start line": {"start": False},
    "many trainers": {
        "rounds": [
            (r, t, 1 + t % 2, 3, 3, 1, 5.0 - r, 3, "kept") for r in (1, 2) for t in range(16)
        ],
        "merge": False,
    },
    "a long command": {"command": "python -m adloco_jax.main " + 99 * "--set data.path=corpus "},
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_panel_is_filled_and_nothing_lies_over_it(tmp_path, situation):
    figure = report._figure(
        read(write_run(tmp_path, **SITUATIONS[situation]) / "ledger.jsonl"),
    )
    figure.draw_without_rendering()
    assert all(ax.get_lines() for ax in figure.axes)
    [legend], [caption] = figure.legends, figure.texts
    boxes = [box for ax in figure.axes if (box := ax.get_tightbbox())]
    for other in (legend.get_window_extent(), caption.get_window_extent()):
        assert not any(box.overlaps(other) for box in boxes)
        assert figure.bbox.padded(1).containsx(other.x0) and figure.bbox.containsx(other.x1)
        assert figure.bbox.containsy(other.y0) and figure.bbox.containsy(other.y1)
    for ax in figure.axes:
        x_low, x_high = ax.get_xlim()
        assert x_low < 0 < x_high  # what happens at zero is not hidden by the axis
        assert ax.bbox.height > 0.1 * figure.bbox.height


def test_where_nothing_was_communicated_there_is_no_empty_column(tmp_path):
    run = write_run(tmp_path, **SITUATIONS["one worker"])
    figure = report._figure(read(run / "ledger.jsonl"))
    assert len(figure.axes) == 3
    assert "no communications to draw over" in figure.get_supxlabel().replace("\n", " ")


def test_before_an_evaluation_the_training_loss_is_drawn(tmp_path):
    figure = report._figure(read(write_run(tmp_path, evals=False) / "ledger.jsonl"))
    assert figure.axes[0].get_ylabel() == "training loss (nats/token)"
    assert curves(figure.axes[0])["trainer 1", "-"] == [[512, 5.52], [1408, 4.72], [2816, 4.12]]


def test_an_evaluation_whose_round_is_not_on_record_yet_can_be_drawn(tmp_path):
    run = write_run(tmp_path, end=False)
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.write("eval", round=7, trainer="consensus", loss=1.9, perplexity=6.7, wall_s=9.0)
    figure = report._figure(read(run / "ledger.jsonl"))
    assert curves(figure.axes[0])["consensus", "-"][-1] == [17920, 1.9]


def test_the_caption_names_the_run_and_its_command_word_for_word(tmp_path):
    caption = report._figure(read(write_run(tmp_path) / "ledger.jsonl")).get_supxlabel()
    assert caption.startswith("Run quickstart.")
    assert "Memory: host 1.5 GiB peak, device 3 GiB peak" in caption.replace("\n", " ")
    assert re.search(r"^Command: python -m .* x='\$a_\$'$", caption, re.MULTILINE)


def test_nothing_to_draw_is_the_users_mistake_and_leaves_no_folder(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("start", run="quickstart")
    with pytest.raises(DataError, match="no round has finished"):
        report.draw(tmp_path)
    assert not (tmp_path / "report").exists()
