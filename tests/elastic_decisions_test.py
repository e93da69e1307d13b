"""Membership without Ray: where workers run, when rounds end, which learners are lost or count."""

import math
import types
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
from toy import settings_of

from adloco_jax.elastic import round_record
from adloco_jax.elastic.decisions import (
    LearnerRecord,
    assign,
    num_parts,
    updates_by_speed,
    usual_norm,
)
from adloco_jax.loop.control import RoundPlan
from adloco_jax.settings import EngineSettings


def there(*worker_ids):
    return [
        LearnerRecord(n, 0, 0.0, joined=True, worker_ids=[*own]) for n, own in enumerate(worker_ids)
    ]


TRAINERS = {0: 0, 1: 0, 2: 1, 3: 1}  # trainer by worker id


def divided(learners, *, movable=TRAINERS, returning=()):
    return assign(learners, TRAINERS, movable, returning=returning)


def test_workers_are_spread_and_a_trainers_workers_are_neighbours():
    assert divided(there((), (), (), ())) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert divided(there((), ())) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert sorted(Counter(divided(there((), (), ())).values()).values()) == [1, 1, 2]
    assert divided(there(())) == dict.fromkeys(TRAINERS, 0)
    assert divided([]) == {}


def test_a_worker_stays_and_a_spare_replaces_a_lost_learner_at_once():
    with_spare = there((0,), (1,), (3,), ())  # worker 2's learner is lost
    assert divided(with_spare, returning={2}) == {0: 0, 1: 1, 3: 2, 2: 3}


def test_without_a_spare_workers_wait_for_their_learner_and_are_then_divided():
    rest = there((0,), (1,), (3,))
    assert divided(rest, returning={2}) == {0: 0, 1: 1, 3: 2}
    # joins a learner that has a worker of the same trainer
    assert divided(rest) == {0: 0, 1: 1, 3: 2, 2: 2}


def test_a_learner_that_joins_takes_a_worker_only_where_one_has_two_at_a_boundary():
    crowded = there((0, 1), (2,), ())
    assert divided(crowded, movable={0, 1})[1] == 2
    # its trainer is in the middle of a round: it stays
    assert divided(crowded, movable={2, 3})[1] == 0
    assert divided(there((0,), (1,), (2,), (3,), ())) == {0: 0, 1: 1, 2: 2, 3: 3}  # a spare


def test_workers_that_are_gone_are_forgotten():
    assert 9 not in divided(there((0, 9), (1,), (2,), (3,)))


@pytest.mark.parametrize(
    ("reported", "awaited", "quorum", "since_s", "over"),
    [
        (2, 0, None, 0.0, True),
        (2, 0, 3, 0.0, True),  # where fewer live than the quorum they are the quorum
        (0, 0, None, 9.0, False),  # no learner has answered: the round begins again
        (3, 1, None, 9.0, False),
        (2, 2, 3, 9.0, False),
        (3, 1, 3, 4.9, False),
        (3, 1, 3, 5.0, True),
    ],
)
def test_a_round_ends_with_all_or_after_the_grace_of_a_quorum(
    monkeypatch, reported, awaited, quorum, since_s, over
):
    now_s = iter([100.0, 100.0 + since_s])
    monkeypatch.setattr(round_record, "time", types.SimpleNamespace(monotonic=lambda: next(now_s)))
    rule = EngineSettings(kind="ray", quorum=quorum, grace_s=5.0)
    each = round_record.RoundRecord(None, None, None, start_s=0.0, reported={*range(reported)})
    each.awaited = {*range(reported, reported + awaited)}
    each.is_over(rule)
    assert each.is_over(rule) == over


def test_a_learner_is_lost_when_silent_late_to_start_or_slower_than_its_own_speed():
    limits = {"heartbeat_s": 10.0, "restart_s": 60.0}
    starting = LearnerRecord(0, 0, 100.0)
    assert starting.fault(160.0, **limits) == ""
    assert "start" in starting.fault(161.0, **limits)
    asked = LearnerRecord(0, 0, 0.0, joined=True, asked_s=100.0)
    assert asked.fault(110.0, **limits) == "" and "no sign" in asked.fault(110.1, **limits)
    idle = LearnerRecord(0, 0, 0.0, joined=True)
    assert idle.fault(1e9, **limits) == ""
    idle.record_request(100, 50.0, heartbeat_s=10.0)
    assert idle.due_s == math.inf  # its speed is unknown
    idle.sequence_s.append(0.1)
    idle.due_s = None
    idle.record_request(100, 50.0, heartbeat_s=10.0)
    assert idle.due_s == pytest.approx(50 + 5 * 10)
    idle.record_request(1, 50.0, heartbeat_s=10.0)
    assert idle.due_s == 100.0 and idle.fault(100.0, **limits) == ""
    assert "speed" in idle.fault(100.1, **limits)


@pytest.mark.parametrize(("steps", "parts"), [(40, 8), (30, 10), (110, 10), (13, 13), (3, 3)])
def test_updates_by_speed_are_whole_parts_in_proportion(steps, parts):
    settings = settings_of(
        inner={"steps_per_round": steps}, engine={"kind": "ray", "steps": "by_speed"}
    )
    assert num_parts(settings.inner.steps_per_round, settings.engine) == parts
    seconds = dict(enumerate(np.random.default_rng(steps).uniform(0.1, 2.0, 50).tolist()))
    measured = {worker_id: [each] * 3 for worker_id, each in seconds.items()}
    updates = updates_by_speed(3 * steps, parts, measured | {50: [], 51: [9.0, 9.0]})
    fastest_s = min(seconds.values())
    assert updates[50] == updates[51] == 3 * steps
    for worker, number in updates.items():
        want = 3 * steps * fastest_s / (seconds.get(worker) or fastest_s)
        assert number % (3 * steps // parts) == 0 and number > 0
        if want >= 3 * steps / 1.125:  # equal ones, for what is measured is never equal
            assert number == 3 * steps
        else:
            assert abs(number - want) <= 3 * steps / parts / 2 or number == 3 * steps // parts


@pytest.mark.parametrize(
    ("slower", "updates"),
    [
        ([4.0, 4.4, 3.8], 10),
        ([4.0, 0.9, 4.0, 4.0, 4.0], 40),  # one of its rounds was as fast
        ([4.0, 4.0], 40),  # measured too few times
        ([1.1, 1.1, 1.1], 40),  # slower, but by less than an eighth
    ],
)
def test_a_learner_makes_fewer_updates_only_if_all_its_rounds_were_slower(slower, updates):
    assert updates_by_speed(40, 8, {0: [1.0, 1.0, 1.02], 1: slower}) == {0: 40, 1: updates}


def test_noise_that_equal_learners_share_takes_hardly_any_updates():
    draw, made = np.random.default_rng(0), []
    recent = {worker_id: deque(maxlen=5) for worker_id in range(4)}
    for _ in range(400):
        for each in recent.values():
            each.append(draw.choice([1.0, 1.2, 4.0], p=[0.5, 0.3, 0.2]))
        made.append(sum(updates_by_speed(80, 8, recent).values()) / (4 * 80))
    assert np.mean(made) > 0.97


def test_a_speed_that_is_too_good_leaves_others_a_part():
    measured = {0: [0.0] * 3, 1: [0.1] * 3, 2: [1e9] * 3}
    assert updates_by_speed(40, 8, measured) == {0: 40, 1: 5, 2: 5}
    assert updates_by_speed(7, 7, {0: [], 1: [0.0] * 3}) == {0: 7, 1: 7}
    assert num_parts(16, settings_of(engine={"kind": "ray", "steps": "equal"}).engine) == 1


def slowly_judged(past, sent, clip, params_norm, num_updates):
    """The oracle: what counts of each worker's norm per update, by sorting and counting.

    `sent` has each worker's learner, updates, and norm. The usual norm is the largest that is at
    most half way up the sorted ones.
    """
    each_learners = {}
    for number, updates, norm in sent:
        if norm > 0:
            each_learners.setdefault(number, []).append(norm / updates)
    groups = [past] if len(past) >= 8 else []
    if len(each_learners) >= 2:
        groups.append([max(found) for found in each_learners.values()])
    usual = 0.0
    for group in groups:
        usual = max(usual, sorted(group)[(len(group) - 1) // 2])
    most = clip * (usual or params_norm / num_updates)
    return [norm if norm / updates <= most else most * updates for _, updates, norm in sent]


@pytest.mark.parametrize("seed", range(20))
def test_an_update_counts_at_most_so_many_usual_norms(seed):
    draw = np.random.default_rng(seed)
    num, past, clip = int(draw.integers(1, 7)), [], float(draw.choice([1.0, 3.0]))
    for _ in range(12):
        sent = []
        for _ in range(num):
            norm = draw.choice([0.0, 1.0, 2.0, 9.0, 800.0], p=[0.1, 0.3, 0.3, 0.2, 0.1])
            sent.append((int(draw.integers(0, 4)), int(draw.integers(1, 5)), float(norm)))
        each = round_record.RoundRecord(RoundPlan(1, 1, 4), None, None, start_s=0.0)
        for worker_id, (number, updates, norm) in enumerate(sent):
            each.norms[worker_id] = norm
            each.responses[worker_id] = SimpleNamespace(skipped_SR=np.zeros((updates, 1), bool))
            each.senders[worker_id] = LearnerRecord(number, 0, 0.0)
        each.norms[num], each.responses[num] = math.nan, None
        accepted = each.judge(past, 5.0, clip)
        expected = slowly_judged(past, sent, clip, 5.0, 4)
        found = [each.factors.get(w, 1.0) * norm for w, (*_, norm) in enumerate(sent)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert {*each.counted} == {*range(num)}
        kept = [norm / sent[w][1] for w, norm in enumerate(expected) if norm]
        np.testing.assert_allclose(accepted, kept, rtol=1e-12)
        past = [*past, *accepted]


def test_the_usual_norm_does_not_grow_with_what_one_of_two_sends_nor_stop_what_all_send():
    """Of the last median alone, four updates in a row may each be 800 times the one before."""
    past, usual = [1.0] * 8, []
    for _ in range(40):
        usual.append(usual_norm(past, [1.0, 1e9]))
        past = [*past, 1.0, 3.0 * usual[-1]][-64:]
    assert usual == [1.0] * 40
    assert usual_norm(past, [20.0, 30.0, 25.0]) == 25.0  # all make larger steps
    assert usual_norm(past, [1e9]) == 1.0
    assert usual_norm([1.0] * 7, [1e9]) == 0.0  # not known yet


def test_deadlines_follow_the_median_of_what_was_measured():
    learner = LearnerRecord(0, 0, 0.0, joined=True, sequence_s=deque([0.5]))
    for measured, usual in [
        ([], 0),
        ([30.0], 30),  # the only measurement counts as usual
        ([32.0, 31.0, 500.0, 29.0], 31),  # one of them compiled, too
    ]:
        learner.transfer_s.extend(measured)
        learner.record_request(100, 10.0, heartbeat_s=1.0)
        assert learner.due_s == 10 + 5 * (50 + usual)
    learner.due_s = None
    learner.asked_s = 0.0
    assert "no sign for 21.0 s" in learner.fault(21.0, heartbeat_s=20.0, restart_s=60.0)
    assert not learner.fault(20.0, heartbeat_s=20.0, restart_s=60.0)
