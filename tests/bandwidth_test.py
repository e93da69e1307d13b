"""The bandwidth that a utilisation needs: against the simulator, and the Streaming DiLoCo paper."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from adloco_jax.errors import ConfigError
from adloco_jax.study import bandwidth
from adloco_jax.study.bandwidth import GRID_STEP_S, METHODS, PAPER, UTILISATIONS, needed_gbits
from adloco_jax.study.cluster import Cluster, Link
from adloco_jax.study.replay import Traffic, replay


@pytest.mark.parametrize("utilisation", [0.5, 0.95])
@pytest.mark.parametrize("method", METHODS)
def test_the_simulator_reaches_the_utilisation_at_the_needed_bandwidth(method, utilisation):
    num_steps, traffic = METHODS[method]
    config = {"inner": {"unit": "updates", "steps_per_round": num_steps}}
    start = {"event": "start", "num_params": bandwidth.NUM_PARAMS, "config": config}
    plan = {"micro_batch_size": 1, "num_accum_steps": 1, "updates": num_steps}
    line = {"event": "round", "round": 1, "trainer": 0, "workers": 2} | plan
    link = Link(needed_gbits(method, utilisation, step_s=0.11) * 1e9 / 8, 0.0)
    place = Cluster(2, 2, lambda num_sequences: 0.11 * num_sequences, link, link)
    result = replay([start, line], place, traffic=traffic)
    assert result.frac("compute_s") == pytest.approx(utilisation)


@pytest.mark.parametrize("utilisation", [0.0, 1.0, math.nan])
def test_a_utilisation_out_of_reach_is_refused(utilisation):
    with pytest.raises(ConfigError, match="utilisation=.*: expected a fraction"):
        needed_gbits("DiLoCo", utilisation, step_s=0.1)


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


def test_data_parallel_rests_on_the_overlap_with_the_backward_pass(monkeypatch):
    traffic = dataclasses.replace(METHODS["data parallel"][1], early_frac=0.0)
    assert traffic == Traffic(16.0)
    monkeypatch.setattr(bandwidth, "METHODS", {"data parallel": (1, traffic)})
    needed = needed_gbits("data parallel", 0.95, step_s=bandwidth.STEP_S)
    assert needed == pytest.approx(2760, rel=0.002)  # 16 Gbit in 0.11 / 0.95 - 0.11 s


def test_on_the_papers_grid_all_but_two_of_its_25_figures_are_met():
    others = {
        (method, utilisation)
        for method, figures in PAPER.items()
        for utilisation, figure in zip(UTILISATIONS, figures, strict=True)
        if bandwidth.on_grid(needed_gbits(method, utilisation, step_s=GRID_STEP_S)) != figure
    }
    assert others == {("data parallel", 0.99), ("and in 4 bits", 0.5)}
    printed = {float(f"{tried:.1f}") for tried in bandwidth.GRID}
    assert {figure for figures in PAPER.values() for figure in figures} <= printed
    assert round(GRID_STEP_S, 1) == 0.1


def test_the_table_in_the_docs_is_what_the_command_prints():
    page = Path(__file__).parents[1] / "docs" / "CLUSTER.md"
    (table,) = re.findall(r"^\| Gbit/s for 95 % .*?(?=\n\n)", page.read_text("utf-8"), re.M | re.S)
    assert table == bandwidth.table()
