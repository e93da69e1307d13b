"""The cluster simulator against cases by hand, a closed form, and properties of every run."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import LENGTH, round_line
from ledgers import start_line as start
from toy import settings_of

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.loop.adloco import Control, Trainer, after_merge
from adloco_jax.study import predictions
from adloco_jax.study.cluster import PRESETS, Cluster, Link, roofline
from adloco_jax.study.curves import Run
from adloco_jax.study.replay import BITS_PER_PARAM, PARTS, Traffic, replay

FREE = Link(math.inf, 0.0)
# All 250 parameters in one piece and float32 take 1000 / 100 + 2 x 0.5 = 11 s in a ring of two.
SLOW = Link(100.0, 0.5)


def tenth(num_sequences):
    """A tenth of a second per sequence."""
    return 0.1 * num_sequences


def line(round, trainer, workers, batch, *, accum=1, updates=10):
    return round_line(round, trainer, workers, batch, accum=accum, updates=updates)


def merge(round, members, **changes):
    return {"event": "merge", "round": round, "members": members} | changes


few = settings(max_examples=40, deadline=None)


def cluster(num_devices, num_sites=1, *, within=FREE, between=FREE, step_time=tenth, **changes):
    return Cluster(num_devices, num_sites, step_time, within, between, **changes)


def test_diloco_over_two_sites_by_hand():
    events = [start(), line(1, 0, 2, 4), line(2, 0, 2, 4)]
    result = replay(events, cluster(2, 2, between=SLOW))
    # Compute 10 x 0.4; ring of two: 2 x 1/2 x 1000 / 100 + 2 x 0.5.
    first, second = result.rounds
    assert (first.compute_s, first.communication_s) == pytest.approx((4, 11))
    assert (first.end_s, second.start_s, second.end_s) == pytest.approx((15, 15, 30))
    assert result.end_s == pytest.approx({1: 15, 2: 30})
    assert result.frac("compute_s") == pytest.approx(8 / 30)
    assert (result.waiting_s, result.idle_s, result.lost_s) == (0, 0, 0)


def test_branches_run_one_after_the_other():
    branch = {"event": "branch", "round": 1, "batch_sizes": [4, 8, 16], "chosen": 8}
    chosen = line(1, 0, 2, 4, accum=2, updates=4)
    result = replay([start(), chosen, branch, line(2, 0, 2, 8)], cluster(2, 2, between=SLOW))
    first, second = result.rounds
    # 32 sequences of a replica, three times, and three synchronisations.
    assert (first.compute_s, first.communication_s) == pytest.approx((3 * 3.2, 3 * 11))
    assert (first.end_s, second.start_s) == pytest.approx((42.6, 42.6))


def test_trainers_wait_for_one_another_only_at_a_merge():
    events = [start()]
    for index in (1, 2):
        events += [line(index, 0, 1, 1), line(index, 1, 1, 4), line(index, 2, 1, 2)]
    events += [merge(2, [1, 0]), line(3, 1, 2, 4), line(3, 2, 1, 2)]
    result = replay(events, cluster(3, within=Link(1000.0, 0.25)))
    times = {(time.round, time.trainer): time for time in result.rounds}
    assert times[2, 0].start_s == pytest.approx(1)
    assert times[2, 1].start_s == pytest.approx(4)
    # Trainer 0 is done at 2 and waits till 8; 1000 bytes take 1.25 s, there and back again.
    assert times[2, 0].waiting_s == pytest.approx(6)
    assert times[2, 0].communication_s == pytest.approx(2.5)
    assert times[3, 1].start_s == times[2, 0].end_s == pytest.approx(10.5)
    # Trainer 2 has nothing to do with it, until the run's end.
    assert times[3, 2].start_s == pytest.approx(4)
    assert times[3, 2].end_s == pytest.approx(6)
    # Ring of two: 2 x 1/2 x 1000 / 1000 + 2 x 0.25 = 1.5.
    assert result.end_s == pytest.approx({1: 4, 2: 10.5, 3: 10.5 + 4 + 1.5})
    assert result.waiting_s == pytest.approx(6 + (16 - 6))
    assert result.compute_s == pytest.approx(2 * (1 + 4 + 2) + 2 * 4 + 2)


def test_a_trainer_whose_workers_change_waits_for_the_merge():
    events = [start(), line(1, 0, 1, 4), line(1, 1, 1, 1), line(1, 2, 1, 2)]
    events += [merge(1, [0, 1]), line(2, 0, 1, 4), line(2, 2, 2, 2)]
    result = replay(events, cluster(3, within=Link(1000.0, 0.25)))
    bystander = result.rounds[2]  # it gets trainer 1's worker
    assert bystander.waiting_s == pytest.approx((4 - 2) + 1.25)
    assert bystander.communication_s == pytest.approx(1.25)
    assert bystander.end_s == pytest.approx(6.5)


def test_a_merge_moves_parameters_over_the_link_of_the_nearest_replicas():
    place = cluster(4, 2, between=SLOW)  # the three workers are at sites 0, 0 and 1
    events = [start(), *(line(1, trainer, 1, 1) for trainer in range(3))]
    far = replay([*events, merge(1, [2, 0, 1]), line(2, 2, 3, 1)], place)
    assert far.end_s[1] == pytest.approx(1 + 2 * 10.5 + 2 * 10.5)  # and back, to two workers
    near = [*events, merge(1, [0, 1]), line(2, 0, 2, 1), line(2, 2, 1, 1)]
    assert replay(near, place).end_s[1] == pytest.approx(1)


@pytest.mark.parametrize(
    "batch, compute_s, waiting_s, idle_s",
    [
        (6, 0.15, 0.05, 0.0),  # shares of 2, 2, 1, 1
        (3, 0.075, 0.0, 0.025),  # one device has none
    ],
)
def test_a_replicas_devices_share_its_batch(batch, compute_s, waiting_s, idle_s):
    (time,) = replay([start(), line(1, 0, 1, batch, updates=1)], cluster(4)).rounds
    parts = (time.compute_s, time.waiting_s, time.idle_s)
    assert parts == pytest.approx((compute_s, waiting_s, idle_s))
    assert time.end_s == pytest.approx(sum(parts))


def test_every_update_is_reduced_over_the_devices_that_have_a_sequence():
    link = Link(1000.0, 0.01)
    (time,) = replay([start(), line(1, 0, 1, 8)], cluster(4, within=link)).rounds
    assert time.communication_s == pytest.approx(10 * (2 * 3 / 4 + 6 * 0.01))
    (time,) = replay([start(), line(1, 0, 1, 2)], cluster(4, within=link)).rounds
    ring_s = 2 * 1 / 2 + 2 * 0.01  # of two; the other half of the devices are idle meanwhile
    assert time.communication_s == pytest.approx(10 * ring_s / 2)
    assert time.idle_s == pytest.approx(10 * (0.1 + ring_s) / 2)


def test_micro_batches_run_one_after_the_other():
    def costly(num_sequences):
        return 0.1 + 0.01 * num_sequences

    events = [start(), line(1, 0, 1, 2, accum=3, updates=1)]
    alone = replay(events, cluster(1, step_time=costly))
    assert alone.wall_s == pytest.approx(3 * 0.12)
    pair = replay(events, cluster(2, step_time=costly))  # three sequences each: two, then one
    assert pair.wall_s == pytest.approx(0.12 + 0.11)

    # The last update of a round counted in micro-batches may be short.
    inner = {"unit": "microbatches", "steps_per_round": 5}
    result = replay(
        [start(config={"inner": inner}), line(1, 0, 1, 2, accum=2, updates=3)], cluster(1)
    )
    assert result.wall_s == pytest.approx(0.4 + 0.4 + 0.2)


@pytest.mark.parametrize(
    "num_workers, num_devices, wall_s, utilisation",
    [(4, 2, 0.2, 1), (3, 2, 0.2, 3 / 4), (3, 8, 0.1, 3 / 8)],
    ids=["two share a device", "one has a device to itself", "devices left over"],
)
def test_equal_replicas_share_devices_or_leave_some_idle(
    num_workers, num_devices, wall_s, utilisation
):
    result = replay([start(), line(1, 0, num_workers, 1, updates=1)], cluster(num_devices))
    assert result.wall_s == pytest.approx(wall_s)
    assert result.frac("compute_s") == pytest.approx(utilisation)
    assert result.frac("idle_s") == pytest.approx(1 - utilisation)


def test_a_replica_spans_sites_only_where_there_are_fewer_workers_than_sites():
    one = replay([start(), line(1, 0, 1, 2, updates=1)], cluster(2, 2, between=SLOW))
    assert one.wall_s == pytest.approx(0.1 + 11)
    two = replay([start(), line(1, 0, 2, 2, updates=1)], cluster(4, 2, between=SLOW))
    assert two.wall_s == pytest.approx(0.1 + 11)  # one synchronisation; links within are free
    apart = [start(), line(1, 0, 1, 2, updates=1), line(1, 1, 1, 2, updates=1)]
    assert replay(apart, cluster(4, 2, between=SLOW)).wall_s == pytest.approx(0.1)


def test_retired_workers_are_idle_after_their_merge():
    events = [start(), line(1, 0, 1, 4), line(1, 1, 1, 1), merge(1, [0, 1]), line(2, 0, 1, 4)]
    result = replay(events, cluster(2, within=Link(1000.0, 0.0)))
    assert result.wall_s == pytest.approx(4 + 1 + 4)
    assert (result.idle_s, result.waiting_s) == pytest.approx((4, 3))
    wide = replay(events, cluster(4))  # trainer 1 uses one of its two devices for a second
    assert wide.idle_s == pytest.approx(1 + 2 * 2)
    unmerged = replay(events[:3], cluster(4))  # both its devices wait for the end of trainer 0
    assert (unmerged.wall_s, unmerged.waiting_s) == pytest.approx((2, 2 * 1))


def test_nobody_waits_for_a_quarantined_trainer():
    events = [start(), line(1, 0, 1, 4), line(1, 1, 1, 1)]
    events += [{"event": "fault", "kind": "quarantine", "round": 1, "trainer": 0}]
    result = replay([*events, line(2, 1, 1, 1), line(3, 1, 1, 1)], cluster(2))
    assert result.rounds[2].start_s == pytest.approx(1)
    assert result.idle_s == pytest.approx(0)  # its round took longest
    assert result.waiting_s == pytest.approx(1)
    assert list(result.end_s.values()) == pytest.approx([4, 4, 4])  # never decreasing


@pytest.mark.parametrize("action, workers", [("keep", (1, 1)), ("retire", (2,))])
def test_a_refused_merge_costs_its_attempt(action, workers):
    events = [start(), line(1, 0, 1, 4), line(1, 1, 1, 1)]
    events += [merge(1, [0, 1], event="refusal", action=action)]
    events += [line(2, trainer, count, 1) for trainer, count in enumerate(workers)]
    result = replay(events, cluster(2, within=Link(1000.0, 0.25)))
    handed_s = 1.25 if action == "retire" else 0  # to trainer 1's worker
    assert result.end_s[1] == pytest.approx(4 + 1.25 + handed_s)
    sync_s = 1.5 if action == "retire" else 0
    assert result.wall_s == pytest.approx(5.25 + handed_s + 1 + sync_s)


@pytest.mark.parametrize("kind, absorbed_bytes", [("merge", 1500), ("refusal", 1000)])
def test_a_merge_takes_the_bytes_that_the_ledger_counts_scaled_with_the_model(kind, absorbed_bytes):
    num_params = 500
    state_bytes = {"params": 1000, "outer_state": 500, "inner_state": 2000}
    events = [start(state_bytes=state_bytes), line(1, 0, 1, 1), line(1, 1, 1, 1)]
    events += [merge(1, [0, 1], event=kind, action="retire"), line(2, 0, 2, 1)]
    place = cluster(2, within=Link(1000.0, 0.25))
    seconds = num_params / 250 * (absorbed_bytes + 3000) / 1000 + 2 * 0.25
    assert replay(events, place, num_params=num_params).end_s[1] == pytest.approx(1 + seconds)
    # At the run's end, too; a worker that retires receives nothing.
    for workers, handed in (({"0": 2}, 1), ({"0": 1}, 0)):
        last = [*events[:3], events[3] | {"workers": workers}]
        less_s = (1 - handed) * (num_params / 250 * 3 + 0.25)
        wall_s = replay(last, place, num_params=num_params).wall_s
        assert wall_s == pytest.approx(1 + seconds - less_s)


def test_resuming_changes_no_time_and_only_the_seed_decides_jitter():
    events = [start(), line(1, 0, 2, 4), line(2, 0, 2, 4), line(3, 0, 2, 8)]
    eval_line = {"event": "eval", "round": 1, "trainer": 0, "loss": 1.0}
    resumed = [*events[:2], eval_line, start(round=1), *events[2:]]
    place = cluster(4, 2, between=dataclasses.replace(SLOW, jitter=0.2), compute_jitter=0.1)
    whole = replay(events, place)
    assert replay(resumed, place) == whole
    assert replay(events, place, seed=1).wall_s != whole.wall_s


def test_jitter_has_mean_one_and_the_given_variation():
    events = [start(), *(line(index, 0, 1, 1, updates=1) for index in range(1, 4001))]
    result = replay(events, cluster(1, compute_jitter=0.3))
    seconds = np.array([time.compute_s for time in result.rounds]) / 0.1
    assert np.mean(seconds) == pytest.approx(1, abs=3 * 0.3 / math.sqrt(4000))
    assert np.std(seconds) == pytest.approx(0.3, rel=0.1)


def test_failures_cost_what_a_poisson_process_predicts():
    # With rate a and restart c, a round of T takes (exp(aT) - 1)(1/a + c) in the mean. Two devices
    # share the batch, and the rate is of both together; the others have no sequence to lose.
    events = [start(), *(line(index, 0, 1, 2) for index in range(1, 1501))]
    rate, restart_s, round_s = 0.25, 0.8, 1.0
    failing = {"failures_per_device_hour": 3600 * rate / 2, "restart_s": restart_s}
    result = replay(events, cluster(2, **failing))
    expected_s = (math.exp(rate * round_s) - 1) * (1 / rate + restart_s)
    assert result.wall_s / 1500 == pytest.approx(expected_s, rel=0.05)
    assert result.lost_s == pytest.approx(2 * (result.wall_s - 1500 * round_s))
    assert result.compute_s == pytest.approx(2 * 1500 * round_s)
    assert replay(events, cluster(64, **failing)).wall_s == pytest.approx(result.wall_s)
    with pytest.raises(ConfigError, match="failures_per_device_hour=18000.0: .* 10 times"):
        replay(events, cluster(1, failures_per_device_hour=18000.0))


@pytest.mark.parametrize(
    "traffic, blocked_s",
    [
        (Traffic(), 11),
        (Traffic(16.0), 5 + 1),
        (Traffic(num_fragments=5), 5 * (2 + 1)),  # each has its own latency
        (Traffic(num_fragments=2, delay_updates=5), 2 * (6 - 2)),
        (Traffic(num_fragments=2, delay_updates=3), 2 * (6 - 1.2)),
        (Traffic(num_fragments=2, delay_updates=9), 2 * (6 - 2)),  # the other's turn comes before
        (Traffic(num_fragments=2, early_frac=0.5), 2 * (6 - 0.2)),
        (Traffic(1.0, delay_updates=5), 0),
    ],
)
def test_a_trainer_blocks_for_what_its_updates_do_not_hide(traffic, blocked_s):
    events = [start(), line(1, 0, 2, 4)]  # ten updates of 0.4 s
    result = replay(events, cluster(2, 2, between=SLOW), traffic=traffic)
    assert result.rounds[0].communication_s == pytest.approx(blocked_s)
    assert result.wall_s == pytest.approx(4 + blocked_s)


def test_outer_gradients_travel_as_the_start_line_says():
    outer = {"precision": "int8", "fragments": 2, "delay_updates": 1}
    place, rounds = cluster(2, 2, between=SLOW), [line(1, 0, 2, 4), line(2, 0, 2, 4)]
    recorded = replay([start(config={"outer": outer}), *rounds], place)
    traffic = Traffic(BITS_PER_PARAM["int8"], 2, 1)
    assert recorded == replay([start(), *rounds], place, traffic=traffic)
    assert recorded.wall_s < replay([start(), *rounds], place).wall_s


def test_a_trainer_blocks_for_a_synchronisation_of_all_its_parameters():
    traffic = Traffic(num_fragments=2, delay_updates=5)
    events = [start(), line(1, 0, 2, 4), line(1, 1, 1, 4)]
    flush = {"event": "sync", "round": 1, "trainers": [0, 1], "syncs": 1, "bytes": 1}
    place = cluster(3, 3, between=SLOW)
    without = replay(events, place, traffic=traffic).rounds
    flushed = replay([*events, flush], place, traffic=traffic).rounds
    assert flushed[0].end_s - without[0].end_s == pytest.approx(11)
    assert flushed[1].end_s == without[1].end_s  # a single worker


def test_where_updates_accumulate_a_delay_is_of_micro_batches():
    traffic = Traffic(num_fragments=1, delay_updates=5)
    events = [start(), line(1, 0, 2, 4, accum=2)]
    result = replay(events, cluster(2, 2, between=SLOW), traffic=traffic)
    assert result.rounds[0].compute_s == pytest.approx(8)
    assert result.rounds[0].communication_s == pytest.approx(11 - 5 * 0.4)


@pytest.mark.parametrize("num_sites", [1, 2])
@pytest.mark.parametrize(
    "traffic", [Traffic(), Traffic(4.0, 2, 1), Traffic(16.0, early_frac=0.6)], ids=str
)
@pytest.mark.parametrize(
    "num_trainers, steps",
    [(1, 1), (1, 25), (4, 25), (2, 5)],
    ids=["data parallel", "DiLoCo", "single workers", "two trainers of two"],
)
@pytest.mark.parametrize("num_devices", [4, 256])
def test_replay_equals_the_closed_form(num_sites, num_trainers, steps, num_devices, traffic):
    """Three rounds of four workers with batch 8: every time in one expression."""
    place = cluster(num_devices, num_sites, within=Link(1e4, 1e-3), between=Link(300.0, 0.2))
    each, num_used = 4 // num_trainers, min(8, num_devices // 4)
    events = [start()] + [
        line(index, trainer, each, 8, updates=steps)
        for index in (1, 2, 3)
        for trainer in range(num_trainers)
    ]

    def ring_s(m, num_bytes, bandwidth, latency_s):
        return 2 * (m - 1) / m * num_bytes / bandwidth + 2 * (m - 1) * latency_s

    round_s = steps * (0.1 * 8 / num_used + ring_s(num_used, 1000, 1e4, 1e-3))
    link = (300.0, 0.2) if num_sites == 2 and num_trainers == 1 else (1e4, 1e-3)
    f, hidden_updates = traffic.num_fragments, traffic.delay_updates + traffic.early_frac
    transfer_s = ring_s(each, 250 * traffic.bits_per_param / 8 / f, *link)
    blocked_s = f * max(0, transfer_s - round_s * min(hidden_updates / steps, 1 / f))
    wall_s = replay(events, place, traffic=traffic).wall_s
    assert wall_s == pytest.approx(3 * (round_s + blocked_s))


@few
@given(st.data(), st.sampled_from(["demand", "retire"]))
def test_replicas_move_as_a_run_moves_workers(data, allocation):
    num_trainers = data.draw(st.integers(2, 5))
    num_workers = data.draw(st.integers(num_trainers, 9))
    counts = {"num_trainers": num_trainers, "num_workers": num_workers}
    knobs = settings_of(ensemble=counts | {"allocation": allocation})
    trainers = [Trainer(i, data.draw(st.integers(1, 40))) for i in range(num_trainers)]
    owners = [r * num_trainers // num_workers for r in range(num_workers)]
    control = Control(trainers, owners, list(range(num_workers)), 8, 8)
    events, expected = [start()], {}
    for index in (1, 2, 3):
        for position, trainer in enumerate(control.trainers):
            own = control.workers_of(position)
            events.append(line(index, trainer.id, len(own), 1))
            expected[index, trainer.id] = tuple(control.streams[worker] for worker in own)
        if len(control.trainers) > 1:
            positions = data.draw(st.permutations(range(len(control.trainers))))
            members = tuple(positions[: data.draw(st.integers(2, len(positions)))])
            events.append(merge(index, [control.trainers[m].id for m in members]))
            control, _ = after_merge(control, members, knobs)
    times = replay(events, cluster(num_workers)).rounds
    assert {(time.round, time.trainer): time.replicas for time in times} == expected


@st.composite
def ledgers(draw):
    """Runs with merges of both allocations, refusals and quarantines."""
    workers = {t: draw(st.integers(1, 3)) for t in range(draw(st.integers(1, 4)))}
    events = [start()]
    for index in range(1, draw(st.integers(1, 5)) + 1):
        for trainer, count in workers.items():
            batch, accum = draw(st.integers(1, 9)), draw(st.integers(1, 3))
            updates = draw(st.integers(1, 4))
            events.append(line(index, trainer, count, batch, accum=accum, updates=updates))
        ids = draw(st.permutations(list(workers)))
        happening = draw(st.sampled_from(["nothing", "merge", "retire", "keep", "quarantine"]))
        if len(ids) < 2 or happening == "nothing":
            continue
        if happening == "quarantine":
            workers.pop(ids[0])
            fault = {"event": "fault", "kind": "quarantine", "round": index, "trainer": ids[0]}
            events.append(fault)
            continue
        members = ids[: draw(st.integers(2, len(ids)))]
        refused = {} if happening != "keep" else {"event": "refusal", "action": "keep"}
        events.append(merge(index, members, **refused))
        if happening == "keep":
            continue
        freed = sum(workers.pop(trainer) for trainer in members[1:])
        if happening == "merge":  # all workers stay in the run, somewhere
            for _ in range(freed):
                workers[draw(st.sampled_from(sorted(workers)))] += 1
    return events


links = st.builds(Link, st.floats(1, 1e6), st.floats(0, 1))


@st.composite
def clusters(draw):
    sites, jitter = draw(st.integers(1, 5)), draw(st.sampled_from([0.0, 0.2]))
    between = dataclasses.replace(draw(links), jitter=jitter)
    failing = {"failures_per_device_hour": draw(st.sampled_from([0.0, 0.01])), "restart_s": 2.0}
    place = {"within": draw(links), "between": between, "compute_jitter": jitter}
    return cluster(max(draw(st.integers(1, 40)), sites), sites, **place, **failing)


traffics = st.builds(
    Traffic,
    st.sampled_from(list(BITS_PER_PARAM.values())),
    st.integers(1, 5),
    st.integers(0, 5),
    st.floats(0, 1),
)


@few
@given(ledgers(), clusters(), traffics)
def test_every_second_of_every_device_is_accounted_for(events, place, traffic):
    result = replay(events, place, traffic=traffic, seed=3)
    assert sum(map(result.frac, PARTS)) == pytest.approx(1)
    assert all(-1e-9 <= result.frac(name) for name in PARTS)
    assert 0 < result.frac("compute_s") <= 1 + 1e-9
    for time in result.rounds:
        spent_s = sum(getattr(time, name) for name in PARTS)
        assert spent_s == pytest.approx(time.end_s - time.start_s)


@few
@given(ledgers(), clusters(), traffics, st.floats(1, 100))
def test_more_bandwidth_overlap_or_fewer_bits_is_never_slower(events, place, traffic, factor):
    def faster(link):
        return dataclasses.replace(link, bandwidth=factor * link.bandwidth)

    place = dataclasses.replace(place, failures_per_device_hour=0.0)
    most_s = replay(events, place, traffic=traffic).wall_s * (1 + 1e-9)
    wide = dataclasses.replace(place, within=faster(place.within), between=faster(place.between))
    assert replay(events, wide, traffic=traffic).wall_s <= most_s
    smaller = dataclasses.replace(traffic, bits_per_param=traffic.bits_per_param / factor)
    assert replay(events, place, traffic=smaller).wall_s <= most_s
    earlier = dataclasses.replace(traffic, delay_updates=traffic.delay_updates + 1, early_frac=1.0)
    assert replay(events, place, traffic=earlier).wall_s <= most_s


def test_roofline_by_hand():
    # 6 x 1e9 x 1000 FLOPs per sequence at 0.4 of 989e12; 16e9 bytes at 3.35e12.
    time = roofline("h100", num_params=10**9, sequence_length=1000)
    assert time(1) == pytest.approx(6e12 / 395.6e12)
    assert time(8) == pytest.approx(48e12 / 395.6e12)
    short = roofline("h100", num_params=10**9, sequence_length=10)
    assert short(1) == pytest.approx(16 / 3350)


def test_a_run_is_replayed_on_every_preset():
    events = [start(num_params=10**8), line(1, 0, 4, 64)]
    found = predictions.on_clusters(Run(Path("r"), events))
    assert list(found) == list(predictions.SIZES)
    assert {preset for preset, _ in found} == set(PRESETS)
    step_time = roofline(predictions.DEVICE, num_params=10**8, sequence_length=LENGTH)
    for (preset, num_devices), times in found.items():
        place = PRESETS[preset](num_devices=num_devices, step_time=step_time)
        assert times == replay(events, place)


def test_impossible_clusters_are_refused():
    with pytest.raises(ConfigError, match="device 'tpu': expected one of a100_80gb, h100"):
        roofline("tpu", num_params=1, sequence_length=1)
    with pytest.raises(ConfigError, match="1 devices in 2 sites"):
        cluster(1, 2)


@pytest.mark.parametrize(
    "events, message",
    [
        ([], "no start"),
        ([start()], "no round"),
        ([line(1, 0, 1, 4)], "no start"),
        ([start(), line(2, 0, 1, 4)], "rounds begin 2; expected every one from 1 on"),
        ([start(), line(1, 0, 1, 4), merge(1, [0, 5])], r"round 2: .* a merge of \[0, 5\]"),
        ([start(), line(1, 0, 1, 4), line(2, 0, 2, 4)], "round 2: workers {0: 2}"),
        ([start(), line(1, 0, 1, 4), line(2, 7, 1, 4)], "round 2: workers {7: 1}"),
    ],
)
def test_a_ledger_that_cannot_be_replayed_is_refused(events, message):
    with pytest.raises(DataError, match=message):
        replay(events, cluster(4))
