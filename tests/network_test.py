"""Replays against cases computed by hand, closed forms, and what must hold of any run."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import LENGTH, bigram_loss, corpus, init_fn, settings_of

from adloco_jax.adloco import Control, Trainer, after_merge
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.run.ledger import read
from adloco_jax.study.cluster import PRESETS, Cluster, Link, roofline
from adloco_jax.study.network import (
    BITS_PER_PARAM,
    BLOCKING,
    Traffic,
    closed_form_s,
    measured_step_times,
    replay,
    scaling,
)
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")

FREE = Link(math.inf, 0.0)


def tenth(num_sequences):
    """A tenth of a second per sequence."""
    return 0.1 * num_sequences


def start(**changes):
    inner = {"unit": "updates", "steps_per_round": 10}
    event = {"event": "start", "num_params": 250, "config": {"inner": inner}, "devices": "1 x cpu"}
    # 250 parameters are 1000 bytes; no momentum, no moments.
    state_bytes = {"params": 1000, "outer_state": 0, "inner_state": 0}
    return event | {"state_bytes": state_bytes} | changes


def line(round, trainer, workers, batch, *, accum=1, updates=10, step_s=1.0, stall_s=0.0):
    return {
        "event": "round",
        "round": round,
        "trainer": trainer,
        "workers": workers,
        "micro_batch_size": batch,
        "num_accum_steps": accum,
        "updates": updates,
        "step_s": step_s,
        "stall_s": stall_s,
    }


def merge(round, members, **changes):
    return {"event": "merge", "round": round, "members": members} | changes


def cluster(num_devices, num_sites=1, *, within=FREE, between=FREE, step_time=tenth, **changes):
    return Cluster(num_devices, num_sites, step_time, within, between, **changes)


def test_diloco_over_two_sites_by_hand():
    events = [start(), line(1, 0, 2, 4), line(2, 0, 2, 4)]
    result = replay(events, cluster(2, 2, between=Link(100.0, 0.5)))
    # Compute 10 x 0.4; ring of two: 2 x 1/2 x 1000 / 100 + 2 x 0.5.
    first, second = result.rounds
    assert (first.compute_s, first.communication_s) == pytest.approx((4, 11))
    assert (first.end_s, second.start_s, second.end_s) == pytest.approx((15, 15, 30))
    assert result.end_s == pytest.approx({1: 15, 2: 30})
    assert result.utilisation == pytest.approx(8 / 30)
    assert result.frac("communication_s") == pytest.approx(22 / 30)
    assert (result.waiting_s, result.idle_s, result.lost_s) == (0, 0, 0)


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
    assert result.wall_s == pytest.approx(10.5 + 4 + 1.5)
    assert result.end_s == pytest.approx({1: 4, 2: 10.5, 3: 16})
    assert result.waiting_s == pytest.approx(6 + (16 - 6))
    assert result.compute_s == pytest.approx(2 * (1 + 4 + 2) + 2 * 4 + 2)


def test_a_trainer_whose_workers_change_waits_for_the_merge():
    events = [start(), line(1, 0, 1, 4), line(1, 1, 1, 1), line(1, 2, 1, 2)]
    events += [merge(1, [0, 1]), line(2, 0, 1, 4), line(2, 2, 2, 2)]
    result = replay(events, cluster(3, within=Link(1000.0, 0.25)))
    bystander = next(time for time in result.rounds if (time.round, time.trainer) == (1, 2))
    assert bystander.waiting_s == pytest.approx((4 - 2) + 1.25)  # it gets trainer 1's worker
    assert bystander.communication_s == pytest.approx(1.25)
    assert bystander.end_s == pytest.approx(6.5)


def test_a_merge_of_three_moves_two_trainers_parameters():
    events = [start(), *(line(1, trainer, 1, 1) for trainer in range(3)), merge(1, [2, 0, 1])]
    events += [line(2, 2, 3, 1)]
    # Sites 0, 0, 1 of the three workers: both others lie across the slow link.
    slow = replay(events, cluster(4, 2, between=Link(100.0, 0.5)))
    assert slow.end_s[1] == pytest.approx(1 + 2 * 10.5 + 2 * 10.5)  # and back, to two workers
    near = replay([*events[:4], merge(1, [0, 1]), line(2, 0, 2, 1), line(2, 2, 1, 1)], _slow())
    assert near.end_s[1] == pytest.approx(1)  # trainers 0 and 1 share a site


def _slow():
    return cluster(4, 2, between=Link(100.0, 0.5))


@pytest.mark.parametrize(
    "batch, compute_s, waiting_s, idle_s",
    [
        (6, 0.15, 0.05, 0.0),  # shares of 2, 2, 1, 1
        (3, 0.075, 0.0, 0.025),  # one device has none
        (8, 0.2, 0.0, 0.0),
    ],
)
def test_a_replicas_devices_share_its_batch(batch, compute_s, waiting_s, idle_s):
    (time,) = replay([start(), line(1, 0, 1, batch, updates=1)], cluster(4)).rounds
    assert time.compute_s == pytest.approx(compute_s)
    assert time.waiting_s == pytest.approx(waiting_s)
    assert time.idle_s == pytest.approx(idle_s)
    assert time.end_s == pytest.approx(compute_s + waiting_s + idle_s)


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


def test_the_last_update_of_a_round_counted_in_micro_batches_may_be_short():
    inner = {"unit": "microbatches", "steps_per_round": 5}
    events = [start(config={"inner": inner}), line(1, 0, 1, 2, accum=2, updates=3)]
    assert replay(events, cluster(1)).wall_s == pytest.approx(0.4 + 0.4 + 0.2)


def test_workers_share_devices_where_there_are_too_few():
    result = replay([start(), line(1, 0, 4, 1, updates=1)], cluster(2))
    assert result.wall_s == pytest.approx(0.2)
    assert result.utilisation == pytest.approx(1)
    three = replay([start(), line(1, 0, 3, 1, updates=1)], cluster(2))
    assert three.wall_s == pytest.approx(0.2)
    assert three.utilisation == pytest.approx(3 / 4)
    assert three.idle_s == pytest.approx(0.1)


def test_devices_left_over_by_equal_replicas_are_idle():
    result = replay([start(), line(1, 0, 3, 2, updates=1)], cluster(8))
    assert result.rounds[0].devices == 6
    assert result.idle_s == pytest.approx(2 * result.wall_s)


def test_a_replica_spans_sites_only_where_there_are_fewer_workers_than_sites():
    slow = Link(100.0, 0.5)
    one = replay([start(), line(1, 0, 1, 2, updates=1)], cluster(2, 2, between=slow))
    assert one.wall_s == pytest.approx(0.1 + 11)
    two = replay([start(), line(1, 0, 2, 2, updates=1)], cluster(4, 2, between=slow))
    assert two.wall_s == pytest.approx(0.1 + 11)  # one synchronisation, within nothing to pay
    apart = [start(), line(1, 0, 1, 2, updates=1), line(1, 1, 1, 2, updates=1)]
    assert replay(apart, cluster(4, 2, between=slow)).wall_s == pytest.approx(0.1)


def test_retired_workers_are_idle_from_their_merge_on():
    events = [start(), line(1, 0, 1, 4), line(1, 1, 1, 1), merge(1, [0, 1]), line(2, 0, 1, 4)]
    result = replay(events, cluster(2, within=Link(1000.0, 0.0)))
    assert result.wall_s == pytest.approx(4 + 1 + 4)
    assert result.idle_s == pytest.approx(4)
    assert result.waiting_s == pytest.approx(3)


def test_a_quarantined_trainer_holds_nobody_up():
    events = [start(), line(1, 0, 1, 4), line(1, 1, 1, 1)]
    events += [{"event": "fault", "kind": "quarantine", "round": 1, "trainer": 0}]
    result = replay([*events, line(2, 1, 1, 1), line(3, 1, 1, 1)], cluster(2))
    assert result.rounds[2].start_s == pytest.approx(1)
    assert result.wall_s == pytest.approx(4)
    assert result.idle_s == pytest.approx(0)  # its round was the longest thing
    assert result.waiting_s == pytest.approx(1)
    assert list(result.end_s.values()) == pytest.approx([4, 4, 4])  # never back in time


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


@pytest.mark.parametrize("num_params", [250, 500])
@pytest.mark.parametrize("kind, absorbed_bytes", [("merge", 1500), ("refusal", 1000)])
def test_a_merge_takes_the_bytes_that_the_ledger_counts_scaled_with_the_model(
    kind, absorbed_bytes, num_params
):
    state_bytes = {"params": 1000, "outer_state": 500, "inner_state": 2000}
    events = [start(state_bytes=state_bytes), line(1, 0, 1, 1), line(1, 1, 1, 1)]
    events += [merge(1, [0, 1], event=kind, action="retire"), line(2, 0, 2, 1)]
    place = cluster(2, within=Link(1000.0, 0.25))
    seconds = num_params / 250 * (absorbed_bytes + 3000) / 1000 + 2 * 0.25
    assert replay(events, place, num_params=num_params).end_s[1] == pytest.approx(1 + seconds)
    # At the run's end, too; a worker that retires receives nothing.
    last = [*events[:3], events[3] | {"workers": {"0": 2}}]
    assert replay(last, place, num_params=num_params).wall_s == pytest.approx(1 + seconds)
    if kind == "merge":
        retired = [*events[:3], events[3] | {"workers": {"0": 1}}]
        seconds -= num_params / 250 * 3 + 0.25
        assert replay(retired, place, num_params=num_params).wall_s == pytest.approx(1 + seconds)


def test_a_merge_of_an_older_ledger_is_not_timed_by_guesswork():
    events = [start(state_bytes=None), line(1, 0, 1, 1), line(1, 1, 1, 1)]
    assert replay(events, cluster(2)).wall_s == pytest.approx(1)
    with pytest.raises(DataError, match="state_bytes = None.*run it again"):
        replay([*events, merge(1, [0, 1])], cluster(2))


def test_a_resumed_ledger_and_one_in_file_order_replay_alike():
    events = [start(), line(1, 0, 2, 4), line(2, 0, 2, 4), line(3, 0, 2, 8)]
    eval_line = {"event": "eval", "round": 1, "trainer": 0, "loss": 1.0}
    resumed = [*events[:2], eval_line, start(round=1), *events[2:]]
    place = cluster(4, 2, between=Link(100.0, 0.5, 0.2), compute_jitter=0.1)
    assert replay(resumed, place) == replay(events, place)
    assert replay(events[:3], place).end_s == {k: replay(events, place).end_s[k] for k in (1, 2)}


def test_the_seed_alone_decides_jitter():
    events = [start(), line(1, 0, 2, 4)]
    place = cluster(2, 2, between=Link(100.0, 0.5, 0.2), compute_jitter=0.1)
    assert replay(events, place, seed=1) == replay(events, place, seed=1)
    assert replay(events, place, seed=1).wall_s != replay(events, place, seed=2).wall_s


def test_jitter_has_mean_one_and_the_given_variation():
    events = [start(), *(line(index, 0, 1, 1, updates=1) for index in range(1, 4001))]
    result = replay(events, cluster(1, compute_jitter=0.3))
    seconds = np.array([time.compute_s for time in result.rounds]) / 0.1
    assert np.mean(seconds) == pytest.approx(1, abs=5 * 0.3 / math.sqrt(4000))
    assert np.std(seconds) == pytest.approx(0.3, rel=0.1)


def test_failures_cost_what_a_poisson_process_predicts():
    # With rate a and restart c, a round of T takes (exp(aT) - 1)(1/a + c) in the mean.
    events = [start(), *(line(index, 0, 1, 10) for index in range(1, 3001))]
    rate, restart_s, round_s = 0.05, 4.0, 10.0
    result = replay(
        events, cluster(2, failures_per_device_hour=3600 * rate / 2, restart_s=restart_s)
    )
    round_s /= 2  # two devices share the batch, and the rate is theirs together
    expected_s = (math.exp(rate * round_s) - 1) * (1 / rate + restart_s)
    assert result.wall_s / 3000 == pytest.approx(expected_s, rel=0.05)
    assert result.lost_s == pytest.approx(2 * (result.wall_s - 3000 * round_s))
    assert result.compute_s == pytest.approx(2 * 3000 * round_s)


def test_devices_without_a_sequence_do_not_fail():
    events = [start(), *(line(index, 0, 1, 1) for index in range(1, 401))]
    few, many = (
        replay(events, cluster(count, failures_per_device_hour=360.0, restart_s=1.0))
        for count in (1, 64)
    )
    assert few.lost_s > 0
    assert many.wall_s == pytest.approx(few.wall_s)


def test_a_round_that_no_replica_survives_is_an_error():
    with pytest.raises(ConfigError, match="failures_per_device_hour=3600.0: .* 10 times"):
        replay([start(), line(1, 0, 1, 10)], cluster(1, failures_per_device_hour=3600.0))


# Ten updates of 0.4 s; all parameters in one piece and float32 take 1000 / 100 + 2 x 0.5 = 11 s.
SLOW = Link(100.0, 0.5)


@pytest.mark.parametrize(
    "traffic, still_s",
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
def test_a_trainer_stands_still_for_what_its_updates_do_not_hide(traffic, still_s):
    events = [start(), line(1, 0, 2, 4)]
    result = replay(events, cluster(2, 2, between=SLOW), traffic=traffic)
    assert result.rounds[0].communication_s == pytest.approx(still_s)
    assert result.wall_s == pytest.approx(4 + still_s)
    alone = replay([start(), line(1, 0, 1, 4)], cluster(1), traffic=traffic)
    assert alone.wall_s == pytest.approx(4)  # nobody to synchronise with


def test_the_peak_falls_with_fragments_and_with_precision():
    assert Traffic().sync_bytes(1024) == 4096
    assert Traffic(num_fragments=8).sync_bytes(1024) == 512
    assert Traffic(BITS_PER_PARAM["bfloat16"]).sync_bytes(1024) == 2048
    assert Traffic(BITS_PER_PARAM["int8"]).sync_bytes(1024) == 1024 + 8 * 4  # and eight scales
    assert Traffic(BITS_PER_PARAM["int4"]).sync_bytes(1024) == 512 + 8 * 4


def test_outer_gradients_travel_as_the_start_line_says():
    config = start()["config"]
    outer = {"precision": "int8", "fragments": 2, "delay_updates": 1}
    place, rounds = cluster(2, 2, between=SLOW), [line(1, 0, 2, 4), line(2, 0, 2, 4)]
    recorded = replay([start(config=config | {"outer": outer}), *rounds], place)
    said = Traffic(BITS_PER_PARAM["int8"], 2, 1)
    assert recorded == replay([start(), *rounds], place, traffic=said)
    assert recorded.wall_s < replay([start(), *rounds], place).wall_s
    older = start(config=config | {"outer": {"lr": 0.7}})
    assert replay([older, *rounds], place) == replay([start(), *rounds], place, traffic=BLOCKING)
    unknown = start(config=config | {"outer": {"precision": "int3"}})
    with pytest.raises(DataError, match="precision is 'int3': expected one of float32, bfloat16"):
        replay([unknown, *rounds], place)


def test_a_trainer_stands_still_for_a_synchronisation_of_all_its_parameters():
    traffic = Traffic(num_fragments=2, delay_updates=5)
    rounds = [line(1, 0, 2, 4), line(1, 1, 1, 4)]
    whole = {"event": "sync", "round": 1, "trainers": [0, 1], "syncs": 1, "bytes": 1}
    place = cluster(3, 3, between=SLOW)
    without, absorbed = (
        replay([start(), *rounds, *more], place, traffic=traffic) for more in ([], [whole])
    )
    assert absorbed.rounds[0].end_s - without.rounds[0].end_s == pytest.approx(11)
    assert absorbed.rounds[1].end_s == without.rounds[1].end_s  # one worker, nobody to wait for


def test_where_updates_accumulate_a_delay_is_of_micro_batches():
    traffic = Traffic(num_fragments=1, delay_updates=5)
    events = [start(), line(1, 0, 2, 4, accum=2)]
    result = replay(events, cluster(2, 2, between=SLOW), traffic=traffic)
    assert result.rounds[0].compute_s == pytest.approx(8)
    assert result.rounds[0].communication_s == pytest.approx(11 - 5 * 0.4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits_per_param": 0.0},
        {"num_fragments": 0},
        {"delay_updates": -1},
        {"early_frac": 1.5},
        {"early_frac": math.nan},
    ],
)
def test_traffic_that_cannot_be_says_why(wrong):
    with pytest.raises(ConfigError, match="expected more than 0 bits, 1 or more fragments"):
        Traffic(**wrong)


@pytest.mark.parametrize("num_sites", [1, 2])
@pytest.mark.parametrize(
    "traffic", [BLOCKING, Traffic(4.0, 2, 1), Traffic(16.0, early_frac=0.6)], ids=str
)
@pytest.mark.parametrize(
    "num_trainers, num_workers, steps",
    [(1, 4, 1), (1, 4, 25), (4, 4, 25), (2, 4, 5)],
    ids=["data parallel", "DiLoCo", "one-worker trainers", "two trainers of two"],
)
@pytest.mark.parametrize("num_devices", [4, 16, 256])
def test_replay_equals_the_closed_form(
    num_sites, num_trainers, num_workers, steps, num_devices, traffic
):
    place = cluster(num_devices, num_sites, within=Link(1e4, 1e-3), between=Link(300.0, 0.2))
    each = num_workers // num_trainers
    events = [start()] + [
        line(index, trainer, each, 8, updates=steps)
        for index in (1, 2, 3)
        for trainer in range(num_trainers)
    ]
    expected_s = closed_form_s(
        place,
        num_params=250,
        num_trainers=num_trainers,
        num_workers=num_workers,
        batch_size=8,
        steps_per_round=steps,
        num_rounds=3,
        traffic=traffic,
    )
    assert replay(events, place, traffic=traffic).wall_s == pytest.approx(expected_s)


def test_the_closed_form_by_hand():
    # 4 workers of 2 devices, 2 per site; batch 8: 0.4 s; ring of two within: 0.1 + 0.002; ring of
    # four between: 2 x 3/4 x 1000 / 300 + 6 x 0.2 = 6.2.
    place = cluster(8, 2, within=Link(1e4, 1e-3), between=Link(300.0, 0.2))
    shared = {"num_params": 250, "num_workers": 4, "batch_size": 8, "num_rounds": 3}
    diloco_s = closed_form_s(place, steps_per_round=25, **shared)
    assert diloco_s == pytest.approx(3 * (25 * 0.502 + 6.2))
    parallel_s = closed_form_s(place, steps_per_round=1, **shared)
    assert parallel_s == pytest.approx(3 * (0.502 + 6.2))
    alone_s = closed_form_s(place, steps_per_round=25, num_trainers=4, **shared)
    assert alone_s == pytest.approx(3 * 25 * 0.502)
    with pytest.raises(ConfigError, match="4 workers do not divide evenly among 3"):
        closed_form_s(place, steps_per_round=1, num_trainers=3, **shared)


def test_freed_replicas_go_to_trainers_in_order():
    before, after = {0: 1, 1: 2, 2: 2, 3: 1}, {0: 2, 1: 1, 3: 3}
    events = [start(), *(line(1, trainer, count, 1) for trainer, count in before.items())]
    events += [merge(1, [2, 1]), *(line(2, trainer, count, 1) for trainer, count in after.items())]
    with pytest.raises(DataError, match="round 2: workers"):
        replay(events, cluster(6))  # trainer 1 was absorbed
    events[5] = merge(1, [1, 2])
    times = replay(events, cluster(6)).rounds
    assert [time.replicas for time in times[4:]] == [(0, 2), (1,), (3, 4, 5)]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["demand", "retire"]))
def test_replicas_move_as_a_run_moves_workers(data, allocation):
    num_trainers = data.draw(st.integers(2, 5))
    num_workers = data.draw(st.integers(num_trainers, 9))
    knobs = settings_of(
        ensemble={
            "num_trainers": num_trainers,
            "num_workers": num_workers,
            "allocation": allocation,
        }
    )
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


def test_a_resumed_runs_own_ledger_is_replayed_to_the_last_token(tmp_path):
    for num_rounds in (1, 3):
        knobs = settings_of(
            num_rounds=num_rounds,
            batching={"test": "ramp", "ramp": ((0, 2), (1, 7))},
            inner={"unit": "microbatches"},
            switch={"mode": "accumulate"},
            merge={"every_rounds": 2, "width": 3},
        )
        parts = {"corpus": corpus(), "init_fn": init_fn, "loss_fn": bigram_loss}
        fit(knobs, workdir=tmp_path / "r", **parts)
    events = read(tmp_path / "r" / "ledger.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    assert sum(event["event"] == "start" for event in events) == 2
    assert sum(event["event"] == "merge" for event in events) == 1
    # Two of the round's three micro-batches make an update; the last one is short.
    assert {event["num_accum_steps"] for event in rounds} == {1, 2}
    result = replay(events, cluster(5))
    assert [(time.round, time.trainer) for time in result.rounds] == [
        (event["round"], event["trainer"]) for event in rounds
    ]
    tokens = sum(event["tokens"] for event in rounds)
    assert result.compute_s == pytest.approx(0.1 * tokens / LENGTH)
    assert set(result.end_s) == {1, 2, 3}


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
clusters = st.builds(
    lambda devices, sites, within, between, jitter, failures: cluster(
        max(devices, sites),
        sites,
        within=within,
        between=dataclasses.replace(between, jitter=jitter),
        compute_jitter=jitter,
        failures_per_device_hour=failures,
        restart_s=2.0,
    ),
    st.integers(1, 40),
    st.integers(1, 5),
    links,
    links,
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.01]),
)
traffics = st.builds(
    Traffic,
    st.sampled_from(list(BITS_PER_PARAM.values())),
    st.integers(1, 5),
    st.integers(0, 5),
    st.floats(0, 1),
)
few = settings(max_examples=60, deadline=None)


@few
@given(ledgers(), clusters, traffics)
def test_every_second_of_every_device_is_accounted_for(events, place, traffic):
    result = replay(events, place, traffic=traffic, seed=3)
    parts = ("compute_s", "communication_s", "waiting_s", "idle_s", "lost_s")
    assert sum(map(result.frac, parts)) == pytest.approx(1)
    assert all(-1e-9 <= result.frac(name) for name in parts)
    assert 0 < result.utilisation <= 1 + 1e-9
    for time in result.rounds:
        spent_s = sum(getattr(time, name) for name in parts)
        assert spent_s == pytest.approx(time.end_s - time.start_s)


@few
@given(ledgers(), clusters, traffics, st.floats(1, 100))
def test_more_bandwidth_is_never_slower(events, place, traffic, factor):
    def faster(link):
        return dataclasses.replace(link, bandwidth=factor * link.bandwidth)

    place = dataclasses.replace(place, failures_per_device_hour=0.0)
    before = replay(events, place, traffic=traffic)
    wide = dataclasses.replace(place, within=faster(place.within), between=faster(place.between))
    assert replay(events, wide, traffic=traffic).wall_s <= before.wall_s * (1 + 1e-9)


@few
@given(ledgers(), clusters, traffics)
def test_waiting_less_and_sending_less_is_never_slower(events, place, traffic):
    place = dataclasses.replace(place, failures_per_device_hour=0.0, compute_jitter=0.0)
    place = dataclasses.replace(place, between=dataclasses.replace(place.between, jitter=0.0))
    waiting = dataclasses.replace(traffic, delay_updates=0, early_frac=0.0)
    larger = dataclasses.replace(traffic, bits_per_param=32.0)
    wall_s = replay(events, place, traffic=traffic).wall_s
    assert wall_s <= replay(events, place, traffic=waiting).wall_s * (1 + 1e-9)
    assert wall_s <= replay(events, place, traffic=larger).wall_s * (1 + 1e-9)


@few
@given(ledgers(), clusters)
def test_free_links_leave_only_computing(events, place):
    place = dataclasses.replace(place, within=FREE, between=FREE)
    result = replay(events, place)
    assert result.communication_s == 0
    # What was computed is the recorded sequences, wherever it happened.
    sequences = sum(
        e["workers"] * e["micro_batch_size"] * e["num_accum_steps"] * e["updates"]
        for e in events
        if e["event"] == "round"
    )
    if not place.compute_jitter:
        assert result.compute_s == pytest.approx(0.1 * sequences)


@few
@given(ledgers(), clusters)
def test_twice_the_times_are_twice_the_wall_clock(events, place):
    def slower(link):
        return dataclasses.replace(link, bandwidth=link.bandwidth / 2, latency_s=2 * link.latency_s)

    place = dataclasses.replace(place, failures_per_device_hour=0.0)
    twice = dataclasses.replace(
        place,
        step_time=lambda num_sequences: 2 * place.step_time(num_sequences),
        within=slower(place.within),
        between=slower(place.between),
    )
    assert replay(events, twice).wall_s == pytest.approx(2 * replay(events, place).wall_s)


def test_a_table_from_4_to_4096_devices():
    events = [start(), *(line(index, 0, 4, 64) for index in (1, 2))]
    step_time = roofline("a100_80gb", num_params=250, sequence_length=64, overhead_s=1e-3)
    places = [
        Cluster(num_devices=num_devices, step_time=step_time, **PRESETS["two_sites"])
        for num_devices in (4, 64, 4096)
    ]
    rows = scaling(events, places)
    assert [(row["devices"], row["sites"]) for row in rows] == [(4, 2), (64, 2), (4096, 2)]
    for row in rows:
        parts = ("communication_frac", "waiting_frac", "idle_frac", "lost_frac", "utilisation")
        assert sum(row[name] for name in parts) == pytest.approx(1)
    assert rows[0]["utilisation"] > rows[2]["utilisation"]
    assert rows[0]["wall_s"] == replay(events, places[0]).wall_s


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_clusters(name):
    place = Cluster(num_devices=64, step_time=tenth, **PRESETS[name])
    assert replay([start(), line(1, 0, 8, 8)], place).wall_s > 1.0


def test_step_times_are_read_from_rounds_that_ran_alone_and_without_stall():
    events = [
        start(devices="2 x gpu"),
        line(1, 0, 1, 4, step_s=9.0, stall_s=5.0),  # waited for a program
        line(1, 1, 3, 4, step_s=9.0, stall_s=5.0),
        line(2, 0, 1, 4, step_s=2.0),
        line(2, 1, 3, 4, step_s=2.0),
        line(3, 0, 1, 4, step_s=7.0),  # two programs, one after the other
        line(3, 1, 3, 8, step_s=7.0),
        merge(3, [1, 0]),
        line(4, 1, 4, 8, accum=2, step_s=6.0),
        line(5, 1, 4, 8, accum=2, step_s=8.0),
    ]
    # Four workers on two devices: twice the batch on each. Ten passes; then twenty.
    assert measured_step_times(events) == pytest.approx({8: 0.2, 16: 0.35})
    assert measured_step_times(events[:3]) == {}


@pytest.mark.parametrize(
    "events, message",
    [
        ([], "no start"),
        ([start()], "no round"),
        ([line(1, 0, 1, 4)], "no start"),
        ([start(), line(2, 0, 1, 4)], "rounds begin 2; expected every one from 1 on"),
        ([start(), line(1, 0, 1, 4), line(1, 0, 1, 4)], "round 1: more than one line"),
        ([start(), line(1, 0, 1, 4), merge(1, [0, 5])], r"names trainers \[5\], not in it"),
        ([start(), line(1, 0, 1, 4), line(2, 0, 2, 4)], "round 2: workers {0: 2}"),
        ([start(), line(1, 0, 1, 4), line(2, 7, 1, 4)], "round 2: workers {7: 1}"),
    ],
)
def test_a_ledger_that_cannot_be_replayed_says_why(events, message):
    with pytest.raises(DataError, match=message):
        replay(events, cluster(4))
