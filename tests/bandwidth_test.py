"""The bandwidth that a utilisation needs: against the simulator, and the Streaming DiLoCo paper."""

import re
from pathlib import Path

import pytest

from adloco_jax.study import bandwidth
from adloco_jax.study.bandwidth import GRID_STEP_S, METHODS, PAPER, UTILISATIONS, needed_gbits
from adloco_jax.study.cluster import Cluster, Link
from adloco_jax.study.replay import Traffic, replay


@pytest.mark.parametrize("method", METHODS)
def test_the_simulator_reaches_the_utilisation_at_the_needed_bandwidth(method):
    num_steps, traffic = METHODS[method]
    outer = {"precision": "float32", "fragments": 1, "delay_updates": 0}
    config = {"inner": {"unit": "updates", "steps_per_round": num_steps}, "outer": outer}
    start = {"event": "start", "num_params": bandwidth.NUM_PARAMS, "config": config}
    start |= {"state_bytes": {"params": 1, "outer_state": 0, "inner_state": 0}}
    plan = {"micro_batch_size": 1, "num_accum_steps": 1, "updates": num_steps}
    line = {"event": "round", "round": 1, "trainer": 0, "workers": 2} | plan
    link = Link(needed_gbits(method, 0.95, step_s=0.11) * 1e9 / 8, 0.0)
    place = Cluster(2, 2, lambda num_sequences: 0.11 * num_sequences, link, link)
    result = replay([start, line], place, traffic=traffic)
    assert result.frac("compute_s") == pytest.approx(0.95)


def test_the_papers_bandwidth_for_95_percent_is_met_within_15_percent():
    for method, figures in PAPER.items():
        figure = figures[UTILISATIONS.index(0.95)]
        for step_s in (0.102, bandwidth.STEP_S, 0.117):
            assert needed_gbits(method, 0.95, step_s=step_s) == pytest.approx(figure, rel=0.15)


def test_data_parallel_rests_on_the_overlap_with_the_backward_pass(monkeypatch):
    monkeypatch.setattr(bandwidth, "METHODS", {"data parallel": (1, Traffic(16.0))})
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


def test_the_table_in_the_docs_is_what_the_command_prints():
    page = Path(__file__).parents[1] / "docs" / "CLUSTER.md"
    (table,) = re.findall(r"^\| Gbit/s for 95 % .*?(?=\n\n)", page.read_text("utf-8"), re.M | re.S)
    assert table == bandwidth.table()
