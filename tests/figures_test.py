"""What figures draw, read back from their curves, against numbers added by hand."""

import math

import numpy as np
import pytest
from ledgers import ROUNDS, write_run
from matplotlib.text import Text

from adloco_jax.study import curves, figures, predictions, run_figures, theory
from adloco_jax.study.curves import Variant
from adloco_jax.study.figures import Clock

# Tokens after each round, all trainers: 512, +896, +1408, +4864, then twice +5120.
TOKENS = [512, 1408, 2816, 7680, 12800, 17920]
CONSENSUS = [5.25, 4.15, 3.35, 2.65, 2.25, 2.0]


def read(folder, **settings):
    return curves.read_run(write_run(folder, **settings))


def rounds_of(run, **having):
    return [e for e in curves.lines(run.events, "round") if having.items() <= e.items()]


def drawn(ax):
    """The points of each curve, by label and line style."""
    return {
        (str(line.get_label()), line.get_linestyle()): line.get_xydata().tolist()
        for line in ax.get_lines()
    }


def points(x, y):
    return [[a, pytest.approx(b)] for a, b in zip(x, y, strict=True)]


def panels(*runs, clock=None, **field):
    """Axes of the loss figure by the first word of their x label, and the caption."""
    drawing = figures.loss([Variant(run.folder.name, [run]) for run in runs], clock, **field)
    axes = {ax.get_xlabel().split()[0].strip(","): ax for ax in drawing.figure.axes}
    return axes, drawing.caption


def test_loss_of_a_run_is_drawn_over_every_cost(tmp_path):
    clock = Clock("two_sites, 4 × l4", {tmp_path: {n: 100.0 * n for n in range(1, 7)}})
    by_cost, _ = panels(read(tmp_path), clock=clock)
    moved = [10**6, 2 * 10**6, 3_250_000, 4_750_000, 6_250_000, 7_750_000]
    costs = {
        "tokens": TOKENS,
        "communications": [1, 2, 4, 5, 6, 7],
        "bytes": moved,
        "simulated": [n * 100 for n in range(1, 7)],
    }
    assert by_cost.keys() == costs.keys()
    for cost, x in costs.items():
        lines = drawn(by_cost[cost])
        assert lines["consensus", "-"] == points(x, CONSENSUS)
        assert lines["trainer 1", "-"] == points(x[:2], [5.32, 4.52])  # absorbed in round 3
        low, high = by_cost[cost].get_xlim()
        assert low < 0 < x[-1] < high
    assert by_cost["simulated"].get_xlabel() == "simulated time on two_sites, 4 × l4 (s)"


def test_no_number_has_the_prefix_of_a_thousandth():
    labels = {0.8: "0.8", 0.004: "0.004", 0: "0", 999: "999", 2.5e6: "2.5 M"}
    for value, label in labels.items():
        assert figures.Thousands()(value) == label
        assert figures.Thousands(unit="B")(value) == label + ("B" if label[-1] == "M" else " B")


def test_costs_that_stay_zero_have_no_panel(tmp_path):
    alone = [row for row in ROUNDS if row[1] == 2]
    axes, _ = panels(read(tmp_path, rounds=alone, merge=False))
    assert axes.keys() == {"tokens"}


def test_training_losses_gaps_and_accuracies_are_drawn(tmp_path):
    ax = panels(read(tmp_path / "a", evals=False))[0]["tokens"]  # before an evaluation
    assert ax.get_ylabel() == "training loss (nats/token)"
    assert drawn(ax)["trainer 1", "-"] == points(TOKENS[:3], [5.52, 4.72, 4.12])
    ax = panels(read(tmp_path / "b", no_loss=(2,)))[0]["tokens"]
    y = [y for _, y in drawn(ax)["consensus", "-"]]
    assert y == pytest.approx([5.25, math.nan, *CONSENSUS[2:]], nan_ok=True)
    run = read(tmp_path / "c", accuracy=0.75)
    assert panels(run)[0]["tokens"].get_ylabel().endswith("(nats/example)")
    lines = drawn(panels(run, field="accuracy")[0]["tokens"])
    assert lines["consensus", "-"] == points(TOKENS, [0.75] * 6)


def test_a_variant_of_several_seeds_is_a_median_with_a_band(tmp_path):
    seeds = [read(tmp_path / str(i), seed=i, loss_shift=shift) for i, shift in enumerate((0, 2, 1))]
    other = read(tmp_path / "b", learning_rate=1.0)
    drawing = figures.loss([Variant("a", seeds), Variant("b", [other])], None)
    ax = drawing.figure.axes[0]
    assert drawn(ax)["a (3 seeds)", "-"] == points(TOKENS, [y + 1 for y in CONSENSUS])
    [band] = ax.collections
    edges = {tuple(vertex) for vertex in np.round(band.get_paths()[0].vertices, 9).tolist()}
    for x, y in zip(TOKENS, CONSENSUS, strict=True):
        assert {(x, round(y, 9)), (x, round(y + 2, 9))} <= edges
    other_line = next(line for line in ax.get_lines() if line.get_label() == "b")
    assert other_line.get_xydata().tolist() == points(TOKENS, CONSENSUS)


def test_costs_that_span_decades_are_drawn_on_a_logarithmic_axis(tmp_path):
    short = [(1, 0, 2, 1, 1, 1, 5.0, 1, "kept")]
    axes, _ = panels(read(tmp_path / "a"), read(tmp_path / "b", rounds=short, merge=False))
    x = axes["tokens"].transData.transform([[n, 1] for n in (128, 1280, 12800)])[:, 0]
    assert x[2] - x[1] == pytest.approx(x[1] - x[0])  # 128 tokens beside 17,920
    assert axes["communications"].get_xscale() == "linear"


def test_a_label_is_one_line_of_letters_that_the_font_has():
    shown = {
        "adloco": "adloco",
        "_hidden": " _hidden",
        "two\nlines": "two\N{REPLACEMENT CHARACTER}lines",
        "日": "\N{REPLACEMENT CHARACTER}",
        "a" * 30 + "b" * 30: "a" * 18 + "…" + "b" * 17,
    }
    assert {label: figures.printable(label) for label in shown} == shown


def test_batches_are_steps_from_round_to_round(tmp_path):
    sizes, accum, alive = run_figures.batches(read(tmp_path)).figure.axes
    x = range(7)
    assert drawn(sizes)["trainer 0", "-"] == points(x, [2, 4, 12, 20, 20, 20, 20])
    effective = [line for line in sizes.get_lines() if line.get_linestyle() == "--"]
    assert effective[0].get_xydata().tolist() == points(x, [2, 4, 8, 24, 24, 24, 24])
    assert [y for _, y in drawn(sizes)["max_batch_size", ":"]] == [8, 8]
    assert drawn(accum)["_child0", "-"] == points(x, [1, 1, 1, 3, 3, 3, 3])
    for ax in (sizes, accum, alive):
        assert [at for at, _ in drawn(ax)["merge", "-."]] == [3, 3]
    [steps] = alive.patches
    values, edges, _ = steps.get_data()
    assert np.repeat(values, np.diff(edges).astype(int)).tolist() == [3, 3, 3, 2, 2, 2]


def test_the_tree_of_merges_has_weights_barriers_and_the_workers(tmp_path):
    run = read(tmp_path, refusal=True)
    run.events.append({"event": "fault", "kind": "quarantine", "round": 6, "trainer": 2})
    [ax] = run_figures.merges(run).figure.axes
    lanes = {
        label.get_text(): y for y, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
    }
    assert lanes == {"trainer 0": 0, "trainer 2": 1, "trainer 1": 2}  # beside whom it goes into
    texts = sorted((text.xy, text.get_text()) for text in ax.texts)
    assert texts == [
        ((2, 1), "+0.9500"),
        ((2, 1), "0.67"),  # 4 to 2
        ((2, 2), "0.33"),
        ((3, 1), "+0.0000"),
        ((3, 1), "0.50"),
        ((3, 2), "0.50"),
    ]
    lines = {
        (tuple(map(tuple, line.get_xydata())), line.get_linestyle()) for line in ax.get_lines()
    }
    assert (((3, 1), (3, 2)), "-") in lines and (((2, 1), (2, 2)), "--") in lines
    of_0 = [line for line in ax.get_lines() if (line.get_ydata() == 0).all()]
    assert [line.get_xdata().tolist() for line in of_0] == [[0, 3], [3, 6]]
    assert of_0[1].get_linewidth() > of_0[0].get_linewidth()  # three workers after two
    assert drawn(ax)["quarantined", "None"] == [[6, 1]]


def test_no_vertical_line_of_a_merge_crosses_a_trainer_that_is_alive():
    members = [(3, 1), (2, 0), (3, 4), (2, 3)]  # each into its first
    order = run_figures._lanes(range(6), [{"members": [*own], "into": own[0]} for own in members])
    assert sorted(order) == list(range(6))
    alive = set(range(6))
    for own in members:
        low, high = sorted(map(order.index, own))
        assert not alive & set(order[low + 1 : high])
        alive.remove(own[1])


def test_noise_has_gaps_and_marks_what_is_not_positive(tmp_path):
    run = read(tmp_path)
    rounds = rounds_of(run, trainer=2)
    rounds[1]["noise"], rounds[2]["signal"] = None, -0.5
    noise, signal, value = run_figures.noise(run).figure.axes
    shown = [y for _, y in drawn(noise)["trainer 2", "-"]]
    assert shown == pytest.approx([1, math.nan, 1, 1, 1, 1], nan_ok=True)
    assert drawn(signal)["not positive", "None"] == [[3, 0.05]]  # at the edge: half the smallest
    following = next(line for line in value.get_lines() if line.get_linestyle() == "--")
    assert following.get_ydata().tolist() == [4, 12, 20, 20, 20, 20]  # of trainer 0
    for event in rounds_of(run):
        event.update(noise=None, signal=None, test_value=None)
    assert run_figures.noise(run) is None


def test_time_has_each_round_once_and_its_stall_within(tmp_path):
    run = read(tmp_path)
    for event in rounds_of(run, round=2):
        event.update(step_s=3.0, stall_s=1.25)
    drawing = run_figures.times(run)
    rounds, programs = drawing.figure.axes
    step, stall = (patch.get_data().values.tolist() for patch in rounds.patches)
    assert step == pytest.approx([0.2, 3.0, 0.2, 0.2, 0.2, 0.2])
    assert stall == [0, 1.25, 0, 0, 0, 0]
    assert [bar.get_width() for bar in programs.patches] == [1.5, 2.25, 0.25]
    assert "4 s in all, of which 1.25 s" in drawing.caption


def test_memory_is_the_fullest_devices(tmp_path):
    [ax] = run_figures.memory(read(tmp_path)).figure.axes
    lines = drawn(ax)
    assert lines["host process", "-"] == [[6, 1.5]]  # GiB, the last measurement of the round
    assert lines["fullest device", "-"] == [[6, 3.0]]
    assert [y for _, y in lines["largest program's need", "--"]] == [2.25, 2.25]
    assert ax.get_ylabel() == "memory (GiB)"


def test_the_theory_is_drawn_as_it_is_computed(tmp_path):
    run = read(tmp_path)
    constants = theory.fit(run.events)
    points = theory.measured(run.events, constants)
    signal, batch, _ = predictions.theory_beside(run, constants).figure.axes
    steps = [4, 8, 12, 16, 20, 24]
    assert drawn(signal)["measured", "-"] == [[n, pytest.approx(0.1)] for n in steps]
    assert drawn(batch)["lower bound (Theorem 1)", "-."] == [
        [p.num_steps, p.batch_bound] for p in points
    ]


def test_simulated_time_ends_where_the_replay_ends(tmp_path):
    run = read(tmp_path, rounds=[row for row in ROUNDS if row[0] <= 3 and row[1] == 0], merge=False)
    clock, reasons = predictions.simulate([run])
    assert reasons == [] and clock.cluster == "two_sites, 2 × a100_80gb"
    end_s = clock.end_s[tmp_path]
    assert list(end_s) == [1, 2, 3] and sorted(end_s.values()) == list(end_s.values())
    alone = read(tmp_path / "alone", rounds=[(1, 2, 1, 2, 2, 1, 5.0, 2, "kept")], merge=False)
    clock, [reason] = predictions.simulate([alone])
    assert clock is None and "1 devices in 2 sites" in reason


MANY = [(r, t, 1 + t % 2, 3, 3, 1, 5.0 - r, 3, "kept") for r in (1, 2) for t in range(20)]
SITUATIONS = {
    "growth and a merge": {},
    "twenty trainers, no finite loss": {"rounds": MANY, "merge": False, "no_loss": range(7)},
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_panel_is_filled_and_no_legend_lies_over_it(tmp_path, situation):
    run = read(tmp_path, **SITUATIONS[situation])
    for drawing in [figures.loss([Variant("run", [run])], None), *run_figures.draw(run)]:
        figure = drawing.figure
        figure.draw_without_rendering()
        assert figure.get_figwidth() == figures.WIDTH
        boxes = [box for ax in figure.axes if (box := ax.get_tightbbox())]
        legends = [legend.get_window_extent() for legend in figure.legends]
        assert not any(box.overlaps(legend) for box in boxes for legend in legends)
        for ax in figure.axes:
            assert ax.get_lines() or ax.patches
            assert ax.bbox.height > 0.09 * figure.bbox.height
        for box in [*boxes, *legends]:  # nothing is cut off
            assert figure.bbox.padded(1).contains(box.x0, box.y0)
            assert figure.bbox.padded(1).contains(box.x1, box.y1)
        written = [text for text in figure.findobj(Text) if text.get_text()]
        assert min(text.get_fontsize() for text in written) >= 8


def test_of_many_trainers_the_last_ones_stand_out(tmp_path):
    looks = figures.trainer_looks(read(tmp_path, rounds=MANY, merge=False))
    labels = [label for _, label in looks.values()]
    assert labels == [f"trainer {t}" for t in range(6)] + ["other trainers"] * 14
