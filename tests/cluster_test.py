"""A run's seconds on a cluster, against cases computed by hand and published tables."""

import re
from pathlib import Path

import pytest
from ledgers import LENGTH, round_line, start_line

from adloco_jax.study.sites import ring_s
from studies import conformance_clusters
from studies.cluster import Cluster, blocked_s, run_seconds

# 250 parameters: the 6 x 250 FLOPs of a token take 1 ms, and 1000 bytes take 10 s.
SLOW = Cluster(bandwidth=100.0, latency_s=0.5, flops=1.5e6)
TOKEN_S = 1e-3


def line(number, trainer=0, workers=2, *, syncs=1, **changes):
    """A ledger line: a round of 100 tokens per worker, synchronised in float32."""
    spent = {"syncs": syncs if workers > 1 else 0, "bytes": 2 * (workers - 1) * 1000}
    return round_line(number, trainer, workers, **{"tokens": 100 * workers} | spent | changes)


def event(name, number, num_bytes, *, syncs=1, **fields):
    return {"event": name, "round": number, "syncs": syncs, "bytes": num_bytes, **fields}


def test_a_round_is_compute_and_a_ring_among_the_workers():
    ring = 2 * (1000 / 2 / 100 + 0.5)  # of two
    assert ring_s(2, 1000, bandwidth=100, latency_s=0.5) == pytest.approx(ring)
    events = [start_line(), line(1), line(2), start_line(), line(3)]  # resumed
    each = 100 * TOKEN_S + ring
    assert run_seconds(events, SLOW) == pytest.approx({1: each, 2: 2 * each, 3: 3 * each})
    four = run_seconds([start_line(), line(1, workers=4)], SLOW)[1]
    assert four == pytest.approx(100 * TOKEN_S + ring_s(4, 1000, bandwidth=100, latency_s=0.5))
    assert run_seconds([start_line(), line(1, workers=1)], SLOW)[1] == pytest.approx(0.1)


def test_the_schedule_of_a_small_run_is_timed_for_a_large_model():
    large = Cluster(100.0, 0.5, 1.5e6, num_params=500, sequence_length=3 * LENGTH)
    (seconds,) = run_seconds([start_line(), line(1)], large).values()
    assert seconds == pytest.approx(2 * 3 * 0.1 + ring_s(2, 2000, bandwidth=100, latency_s=0.5))


@pytest.mark.parametrize("kind", ["merge", "refusal"])
def test_trainers_wait_for_one_another_only_at_a_merge(kind):
    alone = [line(1, trainer, 1, tokens=1000 * (1 + trainer)) for trainer in range(3)]
    merge = event(kind, 1, 200, members=[2, 0], into=2)  # 2.5 s
    joined = event("spawn", 1, 100, syncs=0, trainer=1)  # 1 s
    after = [line(2, trainer, 1, tokens=1000) for trainer in (1, 2)]
    seconds = run_seconds([start_line(), *alone, merge, joined, *after], SLOW)
    assert seconds == pytest.approx({1: 3 + 2.5, 2: 5.5 + 1})
    # Trainer 1 did not have to wait: it ends at 2 + 1 + 1.
    slow = [line(2, 1, 1, tokens=3000), line(2, 2, 1, tokens=1000)]
    assert run_seconds([start_line(), *alone, merge, joined, *slow], SLOW)[2] == pytest.approx(6.5)


def test_a_synchronisation_of_everything_comes_on_top_for_trainers_of_several_workers():
    flush = event("sync", 1, 2000 + 4000, trainers=[0, 1, 2])
    rounds = [line(1, 0, 2), line(1, 1, 3), line(1, 2, 1)]
    before, after = (run_seconds([start_line(), *rounds, *end], SLOW)[1] for end in ([], [flush]))
    assert after - before == pytest.approx(6000 / 5 / 100 + 2 * 2 * 0.5)


@pytest.mark.parametrize(
    "outer, accum, transfer_s",
    [
        ({}, 1, 11),
        ({"fragments": 5}, 1, 5 * (2 + 1)),  # each fragment has a latency
        ({"fragments": 2, "delay_updates": 2}, 1, 2 * (6 - 2)),
        ({"fragments": 2, "delay_updates": 1}, 1, 2 * (6 - 1)),
        ({"fragments": 2, "delay_updates": 2}, 2, 2 * (6 - 1)),  # the delay counts micro-batches
        ({"fragments": 2, "delay_updates": 9}, 1, 2 * (6 - 2)),  # the other fragment is sent before
        ({"delay_updates": 4}, 1, 11 - 4),
    ],
)
def test_a_trainer_waits_for_what_its_updates_do_not_hide(outer, accum, transfer_s):
    start = start_line(config={"outer": {"fragments": 1, "delay_updates": 0} | outer})
    fragments = outer.get("fragments", 1)
    own = line(1, syncs=fragments, accum=accum, tokens=8000, updates=4)  # 4 s for each worker
    assert run_seconds([start, own], SLOW)[1] == pytest.approx(4 + transfer_s)


def test_a_transfer_that_is_hidden_costs_nothing():
    assert blocked_s(1.0, 4.0, hidden_frac=0.5) == 0
    assert blocked_s(3.0, 4.0, num_fragments=4, hidden_frac=0.1) == pytest.approx(3 - 4 * 0.4)


def test_the_table_in_the_docs_is_what_is_computed():
    page = Path(__file__).parents[1] / "studies" / "conformance.md"
    (table,) = re.findall(r"^\| Gbit/s for 95 % .*?(?=\n\n)", page.read_text("utf-8"), re.M | re.S)
    assert table == conformance_clusters.table()
