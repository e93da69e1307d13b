"""The data of charts and their SVG, against numbers computed by hand."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from ledgers import write_run

from adloco_jax.study import chart, curves, loss, run_figures
from adloco_jax.study.chart import Curve
from adloco_jax.study.curves import Variant

# Tokens of all trainers after each round: 512, +896, +1408, +4864, then +5120 twice.
TOKENS = [512, 1408, 2816, 7680, 12800, 17920]
CONSENSUS = [5.25, 4.15, 3.35, 2.65, 2.25, 2.0]


def read(folder, **settings):
    return curves.read_run(write_run(folder, **settings))


@pytest.fixture
def drawn(monkeypatch):
    """All charts by the label of the vertical axis: the horizontal label, and curves by label."""
    made, chart_chart = {}, chart.chart

    def record(x, y, shown, **settings):
        made[y.label, x.label] = {c.label or (c.key, c.classes): c for c in shown}
        return chart_chart(x, y, shown, **settings)

    monkeypatch.setattr(chart, "chart", record)
    return made


def points(curve):
    return [*zip(curve.x, curve.y, strict=True)]


def near(x, y):
    return [(a, pytest.approx(b, nan_ok=True)) for a, b in zip(x, y, strict=True)]


def test_loss_of_a_run_is_drawn_over_every_cost(tmp_path, drawn):
    run = read(tmp_path)
    made = loss.charts([Variant("run", [run])])
    assert [*made] == ["Tokens", "Sequential steps", "Synchronisations", "Bytes"]
    moved = [10**6, 2 * 10**6, 3_250_000, 4_750_000, 6_250_000, 7_750_000]
    spent = [TOKENS, [4, 8, 12, 16, 20, 24], [1, 2, 4, 5, 6, 7], moved]
    for ((up, _), lines), x in zip(drawn.items(), spent, strict=True):
        assert up == "held-out loss (nats/token)"
        assert points(lines["consensus"]) == near(x, CONSENSUS)
        absorbed = points(lines["trainer 1", "c1 thin"])  # absorbed in round 3
        assert absorbed == near(x[:2], [5.32, 4.52])


def coordinates(html):
    """The points of each curve's path, as fractions from the left and from the bottom."""
    root = ET.fromstring(html)
    size = int(next(e for e in root.iter("svg") if e.get("viewBox")).get("viewBox").split()[-1])
    paths = [e.get("d") for e in root.iter("path") if e.get("class") == "line"]
    pairs = [re.findall(r"(\d+),(\d+)", path) for path in paths]
    return [[(int(a) / size, 1 - int(b) / size) for a, b in path] for path in pairs]


def test_a_chart_has_each_point_where_its_axes_say():
    x, y = chart.axis("x", [0, 8]), chart.axis("y", [1, 100], base=10)
    lines = [Curve([0, 2, 4, 8], [1, 10, math.nan, 100], "c0"), Curve([4], [10], "c1", "one")]
    html = chart.chart(x, y, lines, title="<both>").html()
    first, second = coordinates(html)
    assert first == near([0, 0.25, 1], [0, 0.5, 1]) and second == near([0.5], [0.5])
    ends = [e.get("d").count("M") for e in ET.fromstring(html).iter("path")]
    assert ends == [2, 1]  # the curve has a gap
    assert ET.fromstring(html).find("svg").get("aria-label") == "<both>"


@pytest.mark.parametrize(
    ("values", "settings", "ticks"),
    [
        ([0, 1.36e6], {}, [0, 5e5, 1e6]),
        ([2.0, 3.3], {"max_ticks": 7}, [2, 2.2, 2.4, 2.6, 2.8, 3, 3.2]),
        ([0, 3], {"whole": True}, [0, 1, 2, 3]),
        ([500, 2e6], {"base": 10}, [1e3, 1e4, 1e5, 1e6]),
        ([3, 64], {"base": 2}, [4, 8, 16, 32, 64]),
        ([0, math.nan, 7], {"base": 10}, [1, 10]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(values, settings, ticks):
    axis = chart.axis("x", values, **settings)
    assert len(axis.ticks) <= settings.get("max_ticks", 5)
    assert axis.ticks == pytest.approx(ticks)
    assert all(0 <= axis.at(tick) <= 1 for tick in axis.ticks)


def test_the_trainers_lanes_show_batches_and_merges(tmp_path):
    root = ET.fromstring(run_figures.life(read(tmp_path, refusal=True)))
    rows = [e.text for e in root.iter("text") if "left" in e.get("class", "")]
    assert rows == ["0", "2", "1"]  # 1 is drawn beside the trainer that absorbs it
    sizes = [e.text for e in root.iter("text") if e.get("class") == "size"]
    # two workers of batch 2; at the end three of 8, accumulated 3 times
    assert sizes[:4] == ["4", "8", "16", "72"]
    (merge,) = (e for e in root.iter("g") if e.get("class") == "event")
    assert merge.find("title").text == "round 3: 2 + 1 into 2"
