"""The bandwidth that a utilisation takes: by hand, and beside the Streaming DiLoCo paper's."""

import math
import re
from pathlib import Path

import pytest

from adloco_jax.errors import ConfigError
from adloco_jax.study import bandwidth
from adloco_jax.study.bandwidth import METHODS, PAPER, UTILISATIONS, needed_bandwidth, needed_gbits
from adloco_jax.study.cluster import Cluster, Link
from adloco_jax.study.network import Traffic

FREE = Link(math.inf, 0.0)
RUN = {"num_params": 250, "num_workers": 2, "batch_size": 4, "steps_per_round": 10}


def cluster(between=FREE, within=FREE):
    return Cluster(2, 2, lambda num_sequences: 0.1 * num_sequences, within, between)


@pytest.mark.parametrize(
    "traffic, latency_s, expected",
    [
        (Traffic(), 0.0, 1000 / 1.0),  # a round of 4 s, and 1 s more is 80 %
        (Traffic(), 0.2, 1000 / 0.6),
        (Traffic(4.0), 0.0, 125 / 1.0),
        (Traffic(num_fragments=2, delay_updates=1), 0.0, 1000 / (1.0 + 2 * 0.4)),
        (Traffic(early_frac=0.5), 0.0, 1000 / (1.0 + 0.2)),
    ],
)
def test_needed_bandwidth_by_hand(traffic, latency_s, expected):
    place = cluster(Link(math.inf, latency_s))
    assert needed_bandwidth(place, 0.8, traffic=traffic, **RUN) == pytest.approx(expected)


def test_any_bandwidth_does_where_nothing_is_synchronised():
    assert needed_bandwidth(cluster(), 0.99, num_trainers=2, **RUN) == 0.0


def test_a_utilisation_out_of_reach_says_why():
    with pytest.raises(ConfigError, match="out of reach at any bandwidth .* less latency"):
        needed_bandwidth(cluster(Link(math.inf, 0.6)), 0.8, **RUN)
    with pytest.raises(ConfigError, match="utilisation=1.0: expected a fraction"):
        needed_bandwidth(cluster(), 1.0, **RUN)


# Streaming DiLoCo, arXiv 2501.18512v1, Table 4: 1 B model, 24 layers, step time 0.1 s, Gbit/s at a
# compute utilisation of 95 %.
FIGURES = {
    "data parallel": 222.3,
    "DiLoCo": 23.3,
    "Streaming DiLoCo": 16.0,
    "with overlapped communication": 9.1,
    "and in 4 bits": 2.0,
}


@pytest.mark.parametrize("step_s", [0.102, bandwidth.STEP_S, 0.117])
@pytest.mark.parametrize("method", FIGURES)
def test_the_papers_bandwidth_for_95_percent_is_met_within_15_percent(method, step_s):
    ours = needed_gbits(method, 0.95, step_s=step_s)
    assert ours == pytest.approx(FIGURES[method], rel=0.15)
    assert round(step_s, 1) == 0.1  # as the paper prints it
    assert PAPER[method][UTILISATIONS.index(0.95)] == FIGURES[method]


def test_with_a_step_of_exactly_a_tenth_only_diloco_is_further_off():
    ratios = {m: needed_gbits(m, 0.95, step_s=0.1) / figure for m, figure in FIGURES.items()}
    assert ratios.pop("DiLoCo") == pytest.approx(1.163, abs=0.001)
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values())


def test_data_parallel_rests_on_the_overlap_with_the_backward_pass():
    run = RUN | {"num_params": bandwidth.NUM_PARAMS, "steps_per_round": 1, "batch_size": 1}
    place = Cluster(2, 2, lambda num_sequences: bandwidth.STEP_S * num_sequences, FREE, FREE)
    needed = needed_bandwidth(place, 0.95, traffic=Traffic(16.0), **run)
    assert 8 * needed / 1e9 == pytest.approx(2760, rel=0.002)  # 16 Gbit in 0.11 / 0.95 - 0.11 s


def test_on_the_papers_grid_all_but_two_of_its_25_figures_are_met():
    ours = {
        (method, utilisation): bandwidth.on_grid(
            needed_gbits(method, utilisation, step_s=bandwidth.GRID_STEP_S)
        )
        for method in METHODS
        for utilisation in UTILISATIONS
    }
    paper = {
        (method, utilisation): figure
        for method, figures in PAPER.items()
        for utilisation, figure in zip(UTILISATIONS, figures, strict=True)
    }
    assert set(paper.values()) <= {float(f"{tried:.1f}") for tried in bandwidth.GRID}
    others = {key for key, figure in paper.items() if ours[key] != figure}
    assert others == {("data parallel", 0.99), ("and in 4 bits", 0.5)}
    assert round(bandwidth.GRID_STEP_S, 1) == 0.1


def test_the_table_in_the_docs_is_what_the_command_prints():
    page = Path(__file__).parents[1] / "docs" / "NETWORK.md"
    (table,) = re.findall(r"^\| Gbit/s for 95 % .*?(?=\n\n)", page.read_text("utf-8"), re.M | re.S)
    assert table == bandwidth.table()
