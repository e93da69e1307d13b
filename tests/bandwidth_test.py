"""The bandwidth that a utilisation needs: against the simulator, and the Streaming DiLoCo paper."""

import re
from pathlib import Path

import pytest
from ledgers import round_line, start_line

from adloco_jax.study import bandwidth
from adloco_jax.study.bandwidth import METHODS, PAPER, UTILISATIONS, needed_by
from adloco_jax.study.cluster import Cluster, Link
from adloco_jax.study.replay import Traffic, replay


@pytest.mark.parametrize("method", METHODS)
def test_the_simulator_reaches_the_utilisation_at_the_needed_bandwidth(method):
    num_steps, traffic = METHODS[method]
    start = start_line(num_params=bandwidth.NUM_PARAMS)
    lines = [start, round_line(1, batch=1, updates=num_steps)]
    link = Link(needed_by(method, 0.95, step_s=0.11) * 1e9 / 8, 0.0)
    place = Cluster(2, 2, lambda num_sequences: 0.11 * num_sequences, link, link)
    result = replay(lines, place, traffic=traffic)
    assert result.frac("compute_s") == pytest.approx(0.95)


def test_the_papers_bandwidth_for_95_percent_is_met_within_15_percent():
    for method, figures in PAPER.items():
        figure = figures[UTILISATIONS.index(0.95)]
        for step_s in (0.102, bandwidth.STEP_S, 0.117):
            assert needed_by(method, 0.95, step_s=step_s) == pytest.approx(figure, rel=0.15)


def test_data_parallel_rests_on_the_overlap_with_the_backward_pass():
    needed = bandwidth.needed_gbits(
        Traffic(16.0), 0.95, num_params=10**9, num_steps=1, step_s=bandwidth.STEP_S
    )
    assert needed == pytest.approx(2760, rel=0.002)  # 16 Gbit in 0.11 / 0.95 - 0.11 s


def test_the_table_in_the_docs_is_what_the_command_prints():
    page = Path(__file__).parents[1] / "docs" / "CLUSTER.md"
    (table,) = re.findall(r"^\| Gbit/s for 95 % .*?(?=\n\n)", page.read_text("utf-8"), re.M | re.S)
    assert table == bandwidth.table()
