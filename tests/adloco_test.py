"""The loop and what the host decides: batches, plans, learning rates, who works for whom."""

import dataclasses
import json
import math
import signal
import time

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import Table, bigram_loss, corpus, init_fn, settings_of

from adloco_jax import accounting, adloco
from adloco_jax.accounting import Control, RoundPlan, StateBytes, Trainer
from adloco_jax.adloco import State
from adloco_jax.core.types import GradientStats
from adloco_jax.errors import Preempted
from adloco_jax.run import batches
from adloco_jax.run.ledger import batch_history, read
from adloco_jax.run.programs import Programs
from adloco_jax.run.resume import control_from_json
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")


def a_control(batches=(4, 4, 4), owners=(0, 0, 1, 2), max_batch_size=4):
    trainers = [Trainer(id=i, requested_batch_size=b) for i, b in enumerate(batches)]
    return Control(trainers, list(owners), list(range(len(owners))), max_batch_size, max_batch_size)


def plans_of(control, settings):
    return {m: adloco.round_plan(control, m, settings) for m in range(len(control.trainers))}


def groups_of(control, settings):
    return batches.group_trainers(control, plans_of(control, settings), model_shards=1)


def stats(noise, signal, *, workers, examples=4, scale=1.0):
    """Every worker saw the same noise and signal, which it gives in units of a scale."""
    weight, full = examples - 1.0, examples * (examples - 1.0)
    fields = dict.fromkeys(GradientStats.__dataclass_fields__, 0.0) | {
        "scale": scale,
        "num_examples": float(examples),
        "noise_sum": noise * weight / scale,
        "noise_weight": weight,
        "signal_sum": signal * full / scale,
        "signal_weight": full,
    }
    return GradientStats(**{name: np.full(workers, value) for name, value in fields.items()})


def observed(settings, control, noise, signal, scale=1.0):
    workers = len(control.owners)
    stats_R = stats(noise, signal, workers=workers, scale=scale)
    return with_batch_sizes(settings, control, stats_R, np.full(workers, 4, np.int32))


def with_batch_sizes(settings, control, stats_R, count_R):
    trainers = tuple(range(len(control.trainers)))
    tested = [(trainers, tuple(control.owners), count_R, stats_R)]
    return adloco.with_batch_sizes(control, tested, settings)


class HostEngine:
    """Trains nothing, and notes what it is asked for; a merged trainer has the loss given."""

    state_bytes = StateBytes(params=100, outer_state=10, inner_state=200)

    def __init__(self, settings, merged_loss=0.0, *, unsynchronised=False):
        self.settings, self.loss, self.calls = settings, merged_loss, []
        self.unsynchronised = unsynchronised

    def asked(self, name):
        return [arguments for called, *arguments in self.calls if called == name]

    def ready(self, state):
        self.calls.append(("ready",))
        return list(range(len(state.control.trainers)))

    def batch(self, state, plans):
        self.calls.append(("batch",))
        return plans

    def gradient_stats(self, state, batch):
        self.calls.append(("gradient_stats",))
        return []

    def outer_step(self, state, batch):
        self.calls.append(("outer_step",))
        control, _ = accounting.count_round(state.control, batch, sequence_length=8, sync_bytes=4)
        return state._replace(control=control), None

    def without_broken(self, state):
        self.calls.append(("without_broken",))
        return state

    def flush(self, state, trainers):
        self.calls.append(("flush", list(trainers)))
        return State(*state) if self.unsynchronised else state

    def guard_losses(self, state):
        self.calls.append(("guard_losses",))
        return [0.0] * len(state.control.trainers)

    def merged_loss(self, state, members, weights):
        self.calls.append(("merged_loss", list(members), list(weights)))
        return self.loss

    def merge(self, ensemble, members, weights, owners):
        self.calls.append(("merge", list(members), list(weights), list(owners)))
        return ensemble


def merged_by(settings, control, members, merged_loss=0.0, **how):
    """The engine that was asked, the control after it, and the ledger's line."""
    engine, losses = HostEngine(settings, merged_loss, **how), [0.0] * len(control.trainers)
    state, event = adloco.merge_trainers(State(None, control), members, losses, settings, engine)
    return engine, state.control, event


def test_a_round_goes_as_the_algorithm_has_it_and_a_merge_comes_at_its_end():
    settings = settings_of(num_rounds=3, merge={"every_rounds": 2})
    engine, seen = HostEngine(settings), []
    control = adloco.start(settings, 4)

    def observe(state, boundary):
        engine.calls.append(("observe",))
        seen.append((state.control.round, boundary.merged and boundary.merged["members"]))

    end = adloco.adloco(
        State(None, control), settings=settings, engine=engine, observers=[observe, observe]
    )
    steps = ["ready", "batch", "gradient_stats", "outer_step", "without_broken"]
    merging = ["guard_losses", "flush", "merged_loss", "flush", "merge"]
    observed = ["observe", "observe"]
    assert [name for name, *_ in engine.calls] == [
        *(*steps, *observed, *steps, *merging, *observed),
        *(*steps, "flush", *observed),
    ]
    assert engine.asked("flush")[-1] == [[0, 1]]  # all, at the end
    assert seen[::2] == seen[1::2] == [(1, None), (2, [0, 1]), (3, None)]
    assert (end.control.round, [t.rounds for t in end.control.trainers]) == (3, [3, 3])
    assert (control.round, len(control.trainers)) == (0, 3)  # what was given is as it was


def test_a_run_that_tokens_end_stops_at_the_first_round_that_has_them():
    settings = settings_of(num_rounds=9, num_tokens=8 * 2 * 3 * 4 + 1, merge={"policy": "none"})
    start = State(None, adloco.start(settings, 4))
    end = adloco.adloco(start, settings=settings, engine=HostEngine(settings))
    assert end.control.round == 2


def test_a_control_survives_json():
    control = a_control()
    control.trainers[1].cursors["2"] = 7
    control.trainers[1].smoothing = {"noise_sum": 0.1}
    control.redo_round, control.redo_max_batch_size = 3, 8
    text = json.dumps(dataclasses.asdict(control))
    assert control_from_json(json.loads(text)) == control


def test_trainers_with_one_plan_share_a_group_with_all_their_workers():
    settings = settings_of(
        batching={"max_batch_size": 8, "buckets": (4, 8), "initial_batch_size": 4}
    )
    groups = groups_of(a_control(batches=(3, 20, 4), max_batch_size=8), settings)
    assert [(g.trainers, g.workers, g.owners, g.plan) for g in groups] == [
        ((0, 2), (0, 1, 3), (0, 0, 1), RoundPlan(4, 1, 3, 3)),
        ((1,), (2,), (0,), RoundPlan(8, 3, 9, 3)),
    ]


def test_micro_batches_as_the_unit_make_fewer_updates_and_a_short_last_one():
    settings = settings_of(
        batching={"max_batch_size": 2, "buckets": (2,)},
        inner={"unit": "microbatches", "steps_per_round": 7},
    )
    control = a_control(batches=(6,), owners=(0,), max_batch_size=2)
    plan = adloco.round_plan(control, 0, settings)
    assert (plan.num_micro_batches, plan.num_updates) == (7, 3)
    assert batches.update_flags(plan).tolist() == [False, False, True] * 2 + [True]


def test_lengthening_makes_updates_of_what_would_be_accumulated():
    settings = settings_of(switch={"mode": "lengthen"}, inner={"steps_per_round": 3})
    control = a_control(batches=(3, 9, 4))
    plans = plans_of(control, settings)
    short, long = RoundPlan(4, 1, 3, 3), RoundPlan(4, 1, 9, 9)
    assert plans == {0: short, 1: long, 2: short}
    assert batches.update_flags(long).all()
    control.max_batch_size = 2  # after running out of memory: the same sequences
    assert adloco.smaller_plan(short, control, settings) == RoundPlan(2, 1, 6, 6)
    assert adloco.smaller_plan(long, control, settings) == RoundPlan(2, 1, 18, 18)


@pytest.mark.parametrize(
    ("requested", "before", "after", "inner", "switch", "micro_accum"),
    [
        (12, 12, 8, {}, {}, (6, 2)),
        (48, 16, 12, {}, {"mode": "accumulate"}, (12, 4)),
        (7, 7, 3, {}, {}, (1, 7)),
        (4, 4, 3, {}, {}, (2, 2)),
        (21, 21, 10, {}, {}, (3, 7)),
        (36, 12, 8, {"unit": "microbatches"}, {"mode": "accumulate"}, (6, 6)),
        (24, 12, 8, {}, {"mode": "lengthen"}, (8, 1)),
    ],
)
def test_after_running_out_of_memory_the_same_sequences_make_the_same_updates(
    requested, before, after, inner, switch, micro_accum
):
    settings = settings_of(
        inner={"steps_per_round": 5} | inner,
        switch=switch,
        batching={"max_batch_size": before, "buckets": (), "batch_cap": 64},
    )
    control = a_control(batches=(requested,), owners=(0,), max_batch_size=before)
    planned = adloco.round_plan(control, 0, settings)
    control.max_batch_size = after
    smaller = adloco.smaller_plan(planned, control, settings)
    assert smaller[:2] == micro_accum
    # A round that is run again is planned as it was, and then made smaller.
    control.redo_round, control.redo_max_batch_size = 1, before
    assert adloco.round_plan(control, 0, settings) == smaller
    control.round = 1  # and the ones after it are planned with what is in force
    assert adloco.round_plan(control, 0, settings) == adloco.round_plan(
        a_control(batches=(requested,), owners=(0,), max_batch_size=after), 0, settings
    )

    def sequences(plan):
        ends = np.flatnonzero(batches.update_flags(plan))
        return np.diff(ends, prepend=-1) * plan.micro_batch_size

    assert sequences(smaller).sum() == sequences(planned).sum()
    assert smaller.num_updates == len(sequences(smaller))
    assert smaller.num_micro_batches % 5 == 0  # whole calls
    if switch.get("mode") != "lengthen":  # there every micro-batch is an update
        assert sequences(smaller).tolist() == sequences(planned).tolist()


def test_a_run_stopped_while_rounds_are_run_again_goes_on_planning_them_as_they_were(
    tmp_path, monkeypatch
):
    """Out of memory in round 3, back to the start, stopped in round 2: a smaller device clips."""
    settings = settings_of(
        num_rounds=4,
        ensemble={"num_trainers": 1, "num_workers": 1},
        batching={"test": "constant", "initial_batch_size": 4, "max_batch_size": 4},
    )
    program, calls, starts = Programs.__getitem__, [], []

    def exhausted(programs, key):
        calls.append(key)
        if key.kind == "steps" and key.micro_batch_size == 4 and calls.count(key) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory (a fake)")
        return program(programs, key)

    def batch(rows, trainer, stream, start, count):
        starts.append(start)
        if starts == [0, 12, 24, 0, 12]:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.3)  # another thread takes it
        return read_batch(rows, trainer, stream, start, count)

    read_batch = Table.batch
    monkeypatch.setattr(Programs, "__getitem__", exhausted)
    monkeypatch.setattr(Table, "batch", batch)
    run = {
        "corpus": corpus(),
        "init_fn": init_fn,
        "loss_fn": bigram_loss,
        "workdir": tmp_path / "r",
    }
    with pytest.raises(Preempted, match="after round 2"):
        fit(settings, **run)
    fit(settings, **run)
    events = read(tmp_path / "r" / "ledger.jsonl")
    plans = [
        (e["round"], e["micro_batch_size"], e["num_accum_steps"])
        for e in events
        if e["event"] == "round"
    ]
    assert plans == [(1, 2, 2), (2, 2, 2), (3, 2, 2), (4, 2, 1)]


def test_learning_rate_follows_the_trainers_own_updates():
    settings = settings_of(
        num_rounds=10,
        inner={
            "steps_per_round": 4,
            "learning_rate": 1.0,
            "warmup_updates": 4,
            "schedule": "linear",
        },
    )
    control = a_control()
    control.trainers[1].updates = 22
    (group,) = groups_of(control, settings)
    rate_TR = batches.learning_rates(control, group, settings)
    np.testing.assert_allclose(rate_TR[:, 0], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(rate_TR[:, 2], 1 - (np.arange(22, 26) - 4) / 36, rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "power", "batch"), [("none", 0, 20), ("sqrt", 0.5, 7), ("linear", 1, 20)]
)
def test_learning_rate_on_growth_follows_the_effective_batch(rule, power, batch):
    settings = settings_of(
        inner={"learning_rate": 0.1, "lr_on_growth": rule},
        batching={"initial_batch_size": 2, "max_batch_size": 8, "buckets": (2, 8)},
    )
    control = a_control(batches=(batch,), owners=(0,), max_batch_size=8)
    (group,) = groups_of(control, settings)
    rate_TR = batches.learning_rates(control, group, settings)
    effective = {7: 8, 20: 3 * 8}[batch]  # its bucket holds 8; three accumulated micro-batches
    np.testing.assert_allclose(rate_TR, 0.1 * (effective / 2) ** power, rtol=1e-6)


def test_growth_counts_the_micro_batches_that_an_update_really_averages():
    """Seven micro-batches of two in updates of three, three and one."""
    settings = settings_of(
        batching={"max_batch_size": 2, "buckets": (2,)},
        inner={
            "unit": "microbatches",
            "steps_per_round": 7,
            "learning_rate": 1.0,
            "lr_on_growth": "linear",
        },
    )
    control = a_control(batches=(6,), owners=(0,), max_batch_size=2)
    (group,) = groups_of(control, settings)
    rate_TR = batches.learning_rates(control, group, settings)
    assert rate_TR[:, 0].tolist() == [3.0] * 6 + [1.0]
    # A round accumulates no more micro-batches than it has.
    control.trainers[0].requested_batch_size = 99
    assert adloco.round_plan(control, 0, settings) == RoundPlan(2, 7, 7, 1)


@pytest.mark.parametrize(
    ("owners", "micro_batches", "counts"),
    [
        ((0,), 50, [8]),  # 4 % of 200
        ((0,), 500, [80]),
        ((0,), 5000, [256]),
        ((0,), 1, [4]),  # the whole round
        ((0, 0, 0), 50, [8, 8, 8]),  # 4 % of 600
        ((0,) * 6, 2, [2] * 6),  # at least two per worker
    ],
)
def test_auto_test_batch_is_4_percent_within_8_and_256(owners, micro_batches, counts):
    settings = settings_of(
        inner={"steps_per_round": micro_batches}, batching={"initial_batch_size": 4}
    )
    control = a_control(batches=(4,), owners=owners)
    counts_R = batches.test_counts(control, plans_of(control, settings), settings)
    assert counts_R.tolist() == counts


def test_a_round_too_short_for_a_test_skips_it_and_says_so():
    settings = settings_of(
        inner={"steps_per_round": 1}, batching={"initial_batch_size": 1, "buckets": (1, 4)}
    )
    control = a_control(batches=(1,), owners=(0,))
    counts_R = batches.test_counts(control, plans_of(control, settings), settings)
    assert counts_R.tolist() == [0]
    for tested in ([], [((0,), (0,), counts_R, stats(9.0, 1.0, workers=1))]):
        after, (decision,) = adloco.with_batch_sizes(control, tested, settings)
        assert decision.reason == "skipped" and decision.next_batch_size == 1
        assert after.counts == {"skipped": 1}


def test_workers_that_tested_nothing_are_left_out_of_their_trainers_statistics():
    settings = settings_of(batching={"eta": 1.0, "max_growth": 100, "batch_cap": 99})
    stats_R = stats(np.array([8.0, 1e9]), np.array([1.0, 0.0]), workers=2)
    control = a_control(batches=(4,), owners=(0, 0))
    _, (decision,) = with_batch_sizes(settings, control, stats_R, np.array([4, 0], np.int32))
    assert (decision.noise, decision.signal, decision.next_batch_size) == (8.0, 1.0, 4)


def test_a_trainers_statistics_are_its_own_whatever_class_it_was_tested_in():
    settings = settings_of(batching={"eta": 1.0, "max_growth": 100, "batch_cap": 99})
    control = a_control(batches=(4, 4, 4), owners=(0, 1, 1, 2))
    four = np.full(2, 4, np.int32)
    tested = [
        ((1,), (0, 0), four, stats(np.array([30.0, 50.0]), np.ones(2), workers=2)),
        ((0, 2), (0, 1), four, stats(np.array([10.0, 70.0]), np.ones(2), workers=2)),
    ]
    _, decisions = adloco.with_batch_sizes(control, tested, settings)
    assert [d.noise for d in decisions] == [10.0, 40.0, 70.0]


def test_growth_is_asked_for_per_worker_of_the_trainer():
    settings = settings_of(batching={"eta": 1.0, "max_growth": 100, "batch_cap": 99})
    _, decisions = observed(settings, a_control(), noise=32.0, signal=1.0)
    assert [d.next_batch_size for d in decisions] == [16, 32, 32]  # two workers, one, one
    scope = settings_of(
        batching={"eta": 1.0, "max_growth": 100, "batch_cap": 99, "scope": "worker"}
    )
    _, decisions = observed(scope, a_control(), noise=32.0, signal=1.0)
    assert [d.next_batch_size for d in decisions] == [32, 32, 32]


def test_smoothing_averages_numerators_and_denominators_apart_whatever_their_scales():
    settings = settings_of(batching={"eta": 1.0, "max_growth": 1000, "smoothing": 0.9})
    start = a_control(batches=(1,), owners=(0,))
    first, _ = observed(settings, start, noise=10.0, signal=1.0, scale=2.0**-20)
    _, (decision,) = observed(settings, first, noise=90.0, signal=4.0, scale=2.0**30)
    noise = (0.9 * 10 + 90) / 1.9
    signal = (0.9 * 1 + 4) / 1.9
    assert decision.test_value == pytest.approx(noise / signal, rel=1e-12)
    assert start.trainers[0].smoothing == {}  # what was given is as it was


def test_noise_and_signal_are_reported_as_measured_not_smoothed():
    settings = settings_of(batching={"smoothing": 0.9})
    first, _ = observed(settings, a_control(batches=(1,), owners=(0,)), noise=10.0, signal=1.0)
    _, (decision,) = observed(settings, first, noise=90.0, signal=4.0)
    assert (decision.noise, decision.signal) == (90.0, 4.0)


def test_smoothed_inner_products_are_in_squared_units():
    settings = settings_of(
        batching={"test": "inner_product", "vartheta": 1.0, "max_growth": 1000, "smoothing": 0.5}
    )
    control = a_control(batches=(1,), owners=(0,))
    for product, scale in ((6.0, 4.0), (18.0, 0.5)):
        stats_R = stats(1.0, 1.0, workers=1, scale=scale).replace(
            ip_sum=np.array([product / scale**2]), ip_weight=np.array([1.0])
        )
        count_R = np.full(1, 4, np.int32)
        control, (decision,) = with_batch_sizes(settings, control, stats_R, count_R)
    assert decision.test_value == pytest.approx((0.5 * 6 + 18) / 1.5, rel=1e-12)


@pytest.mark.parametrize(
    ("noise", "signal", "reason", "batch"),
    [
        (0.0, 1.0, "degenerate", 4),  # identical gradients
        (0.0, 0.0, "degenerate", 4),
        (float("nan"), 1.0, "degenerate", 4),
        (float("inf"), 1.0, "degenerate", 4),
        (1.0, -0.5, "signal", 8),  # one step of growth
        (1e-30, 1e-31, "capped", 8),
        (1.0, 1e6, "kept", 4),
    ],
)
def test_degenerate_statistics_keep_the_batch_and_are_counted(noise, signal, reason, batch):
    settings = settings_of(batching={"max_growth": 2})
    control = a_control(batches=(4,), owners=(0,))
    after, (decision,) = observed(settings, control, noise, signal)
    assert (decision.reason, decision.next_batch_size) == (reason, batch)
    assert after.counts == {reason: 1}
    if reason == "degenerate":
        assert after.trainers[0].smoothing == {}  # nothing broken is remembered


def test_defect_05_a_trainer_with_one_worker_adapts_from_the_first_round():
    control = a_control(batches=(2, 2), owners=(0, 1))
    _, decisions = observed(settings_of(batching={"eta": 0.8}), control, noise=3.0, signal=1.0)
    assert [d.next_batch_size for d in decisions] == [5, 5]  # 3 / 0.64, up


def test_ramp_takes_the_declared_batch_of_the_next_round():
    settings = settings_of(
        batching={"test": "ramp", "ramp": ((0, 2), (2, 6)), "initial_batch_size": 2}
    )
    control, sizes = adloco.start(settings, 4), []
    for _ in range(3):
        plans = plans_of(control, settings)
        control, _ = accounting.count_round(control, plans, sequence_length=8, sync_bytes=4)
        control, decisions = adloco.with_batch_sizes(control, [], settings)
        sizes.append(decisions[0].next_batch_size)
    assert sizes == [2, 6, 6]


def test_a_run_is_over_by_rounds_or_by_tokens():
    settings = settings_of(num_rounds=10, num_tokens=1000)
    shares = [adloco.share_done(*done, settings) for done in ((5, 100), (2, 750), (3, 1000))]
    assert shares == [0.5, 0.75, 1.0]
    assert adloco.share_done(9, 10**9, settings_of(num_rounds=10)) == 0.9


def test_where_tokens_end_a_run_the_schedule_follows_them():
    settings = settings_of(
        num_rounds=99,
        num_tokens=1000,
        inner={"steps_per_round": 4, "learning_rate": 1.0, "schedule": "linear"},
    )
    control = a_control()
    control.tokens_total = 600
    for trainer, updates in zip(control.trainers, (3, 22, 7), strict=True):
        trainer.updates = updates  # does not matter
    (group,) = groups_of(control, settings)
    rate_TR = batches.learning_rates(control, group, settings, round_tokens=480)
    expected_T = [0.4, 0.28, 0.16, 0.04]  # a quarter of 480 tokens a step
    np.testing.assert_allclose(rate_TR, np.tile(expected_T, (4, 1)).T, rtol=1e-6)
    control.tokens_total = 990
    rate_TR = batches.learning_rates(control, group, settings, round_tokens=480)
    np.testing.assert_allclose(rate_TR[:, 0], [0.01, 0, 0, 0], rtol=1e-5, atol=1e-9)


def test_a_history_is_replayed_by_trainer_or_as_the_mean_over_workers():
    def line(index, trainer, workers, size):
        shape = {"workers": workers, "requested_batch_size": size}
        return {"event": "round", "round": index, "trainer": trainer, **shape}

    events = [
        *({"event": "start"}, line(1, 0, 2, 4), line(1, 1, 1, 4)),
        *(line(2, 0, 2, 5), line(2, 1, 1, 9), {"event": "merge"}, line(3, 1, 3, 12)),
    ]
    assert batch_history(events, num_trainers=2) == {"0": [4, 5, 5], "1": [4, 9, 12]}
    # (2 x 5 + 9) / 3, up
    assert batch_history(events, num_trainers=1) == {"0": [4, 7, 12]}
    assert batch_history(events, num_trainers=3) == dict.fromkeys("012", [4, 7, 12])
    assert batch_history(events[:1], num_trainers=1) == {}


def test_accounting_of_rounds():
    settings = settings_of(inner={"steps_per_round": 3}, batching={"initial_batch_size": 2})
    start = a_control(batches=(2, 2, 2))
    plans = plans_of(start, settings)
    control, spent = accounting.count_round(start, plans, sequence_length=8, sync_bytes=100)
    assert spent[0] == {"updates": 3, "tokens": 3 * 2 * 2 * 8, "syncs": 1, "bytes": 200}
    assert spent[1] == {"updates": 3, "tokens": 3 * 2 * 8, "syncs": 0, "bytes": 0}
    assert (control.syncs_total, control.bytes_total) == (1, 200)
    assert control.tokens_total == 3 * 2 * 4 * 8
    assert control.trainers[0].cursors == {"0": 6, "1": 6}
    assert start == a_control(batches=(2, 2, 2))  # what was given is as it was
    # Only trainer 0 runs another round, with the same and one more stream.
    control.owners[3] = 0
    again, spent = accounting.count_round(control, {0: plans[0]}, sequence_length=8, sync_bytes=100)
    assert spent == [{"updates": 3, "tokens": 3 * 2 * 3 * 8, "syncs": 1, "bytes": 400}]
    assert again.trainers[0].cursors == {"0": 12, "1": 12, "3": 6}
    assert [(t.rounds, t.updates) for t in again.trainers] == [(2, 6), (1, 3), (1, 3)]
    assert (again.round, again.updates_total, again.bytes_total) == (2, 12, 600)


def test_merge_is_due_every_so_many_rounds_while_two_trainers_live():
    settings = settings_of(merge={"every_rounds": 3})
    control = a_control(batches=(5, 3, 4))
    due = []
    for control.round in range(7):
        due.append(adloco.merge_due(control, settings))
    assert due == [False, False, False, True, False, False, True]
    assert not adloco.merge_due(
        dataclasses.replace(control, trainers=control.trainers[:1]), settings
    )
    assert not adloco.merge_due(control, settings_of(merge={"policy": "none", "every_rounds": 3}))


def test_members_weigh_what_they_ask_for_the_representative_first():
    settings, control = settings_of(), a_control(batches=(5, 3, 4))
    members = adloco.choose_members(control, [0.0] * 3, settings)
    assert members == (2, 1)
    engine, after, event = merged_by(settings, control, members)
    assert engine.asked("merged_loss") == [[[2, 1], [4, 3]]]
    # Batches 5 and 4 of four workers: two each, trainer 1's goes to the representative.
    assert engine.asked("merge") == [[[2, 1], [4, 3], [0, 0, 1, 1]]]
    assert (event["members"], event["into"], event["weights"]) == ([2, 1], 2, [4, 3])
    assert (event["requested_batch_size"], event["workers"]) == (4, {0: 2, 2: 2})
    assert after.merges == [{"round": 0, "members": [2, 1], "into": 2}]
    assert adloco.choose_members(control, [0.0] * 3, settings_of(merge={"policy": "none"})) == ()


def test_demand_gives_the_workers_to_whoever_asks_for_more():
    control = a_control(batches=(8, 1, 1, 6), owners=(0, 1, 2, 2, 3, 3))
    after, owners = adloco.after_merge(control, (1, 2), settings_of())
    # Shares of six workers at batches 8, 1, 6: 3, 1, 2. Trainer 1 keeps its own worker; what it
    # absorbed is free, and fills trainer 0.
    assert owners == [0, 1, 0, 0, 2, 2]
    assert [t.id for t in after.trainers] == [0, 1, 3]
    assert control == a_control(batches=(8, 1, 1, 6), owners=(0, 1, 2, 2, 3, 3))
    # The representative has the first choice of what it absorbed, though trainer 0 comes before.
    _, owners = adloco.after_merge(
        a_control(batches=(4, 4, 1), owners=(0, 1, 2, 2)), (1, 2), settings_of()
    )
    assert owners == [0, 1, 1, 0]


def test_who_loses_a_worker_to_a_merge_synchronises_before_it():
    control = a_control(batches=(8, 1, 1, 1), owners=(0, 1, 2, 3, 3, 3))
    # Shares of six workers at batches 8, 1, 1: 4, 1, 1. The absorbed trainer 2 and 3 lose some.
    engine, _, _ = merged_by(settings_of(), control, (1, 2))
    assert engine.asked("flush") == [[[1, 2]], [[2, 3]]]
    assert engine.asked("guard_losses") == []  # nothing was left unsynchronised: as they were
    engine, _, _ = merged_by(settings_of(), control, (1, 2), unsynchronised=True)
    assert [name for name, *_ in engine.calls][:3] == ["flush", "guard_losses", "merged_loss"]


@pytest.mark.parametrize(
    ("on_refusal", "merged_with", "ids"),
    [("keep", None, [0, 1, 2]), ("retire", [1.0, 0.0], [0, 1])],
)
def test_a_refused_merge_keeps_the_trainers_or_the_representatives_parameters(
    on_refusal, merged_with, ids
):
    settings = settings_of(merge={"max_barrier": 0.1, "on_refusal": on_refusal})
    control = a_control(batches=(4, 3, 2))
    engine, after, event = merged_by(settings, control, (1, 2), merged_loss=0.2)
    assert (event["event"], event["action"]) == ("refusal", on_refusal)
    assert event["barrier"] == pytest.approx(0.2) and after.merges == []
    assert [weights for _, weights, _ in engine.asked("merge")] == [merged_with] * bool(merged_with)
    assert [t.id for t in after.trainers] == ids
    assert merged_by(settings, control, (1, 2), merged_loss=0.1)[2]["event"] == "merge"
    # A loss that is no number is no loss that is low enough.
    assert merged_by(settings, control, (1, 2), merged_loss=math.nan)[2]["event"] == "refusal"


def test_fragments_and_whole_synchronisations_are_counted():
    control = a_control(batches=(2, 2), owners=(0, 0, 0, 1))
    plans = plans_of(control, settings_of())
    control, spent = accounting.count_round(
        control, plans, sequence_length=8, sync_bytes=25, num_syncs=4
    )
    assert [(cost["syncs"], cost["bytes"]) for cost in spent] == [(4, 4 * 2 * 2 * 25), (0, 0)]
    control, line = accounting.count_flush(control, [0, 1], sync_bytes=100)
    assert line == {"round": 1, "trainers": [0, 1], "syncs": 1, "bytes": 400}
    assert (control.syncs_total, control.bytes_total) == (5, 800)


@pytest.mark.parametrize(
    ("refused", "on_refusal", "allocation", "num_bytes"),
    [
        # One trainer's parameters and momentum; two workers join, with two moments each.
        (False, "keep", "demand", 100 + 10 + 2 * (100 + 200)),
        (True, "retire", "demand", 100 + 2 * (100 + 200)),
        (True, "keep", "demand", 100),
        (False, "keep", "retire", 100 + 10),
    ],
)
def test_a_merge_and_its_hand_over_are_one_communication(
    refused, on_refusal, allocation, num_bytes
):
    """Trainer 2's workers: one stays with the merged trainer, one goes on to trainer 0."""
    settings = settings_of(
        ensemble={"num_trainers": 3, "num_workers": 4, "allocation": allocation},
        merge={"on_refusal": on_refusal},
    )
    settings = dataclasses.replace(
        settings, merge=dataclasses.replace(settings.merge, max_barrier=0.1)
    )
    control = a_control(batches=(4, 4, 1), owners=(0, 1, 2, 2))
    _, after, event = merged_by(settings, control, (1, 2), merged_loss=float(refused))
    assert (event["syncs"], event["bytes"]) == (1, num_bytes)
    assert (after.syncs_total, after.bytes_total) == (1, num_bytes)


def test_a_hand_over_without_a_merge_is_a_communication_and_nothing_is_none():
    state_bytes = StateBytes(params=100, outer_state=10, inner_state=200)
    assert accounting.merge_cost(state_bytes, num_joining=2) == {"syncs": 1, "bytes": 600}
    assert accounting.merge_cost(state_bytes) == {"syncs": 0, "bytes": 0}


def test_retire_sends_the_absorbed_workers_away():
    settings = settings_of(ensemble={"num_trainers": 3, "num_workers": 4, "allocation": "retire"})
    control = a_control(batches=(2, 1, 4))
    after, owners = adloco.after_merge(control, (0, 1), settings)
    assert owners == [0, 0, -1, 1]
    assert (after.owners, after.streams) == ([0, 0, 1], [0, 1, 3])


@pytest.mark.parametrize(("rule", "batch"), [("max", 6), ("total", 3)])
def test_representative_batch(rule, batch):
    settings = settings_of(merge={"representative_batch": rule}, batching={"batch_cap": 64})
    control = a_control(batches=(6, 4), owners=(0, 1, 1))
    after, _ = adloco.after_merge(control, (0, 1), settings)
    # The larger total that was asked for is 4 x 2 workers; three workers share it: 8 / 3, up.
    assert after.trainers[0].requested_batch_size == batch


def test_a_merged_trainer_averages_its_members_sums():
    control = a_control(batches=(4, 4), owners=(0, 1))
    control.trainers[0].smoothing = {"noise_sum": 1.0, "signal_sum": 4.0}
    control.trainers[1].smoothing = {"noise_sum": 3.0, "signal_sum": 0.0}
    after, _ = adloco.after_merge(control, (0, 1), settings_of())
    assert after.trainers[0].smoothing == {"noise_sum": 2.0, "signal_sum": 2.0}


ANY_SETTINGS = settings_of()
SIZES = [0.0, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, math.inf, math.nan]
WHOLE = st.integers(1, 2**31 - 1) | st.sampled_from([1, 2, 2**31 - 2, 2**31 - 1])


def any_values(rng, count, *, signs=(1.0,)):
    """Half of them sizes that are special."""
    others = 10 ** rng.uniform(-30, 30, count)
    sizes = np.where(rng.random(count) < 0.5, rng.choice(SIZES, count), others)
    return sizes * rng.choice(signs, count)


@hypothesis.settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    batches=st.tuples(WHOLE, WHOLE).map(sorted),
    growth=st.integers(1, 100),
    test=st.sampled_from(["norm", "inner_product", "augmented"]),
    mode=st.sampled_from(["unbiased", "paper"]),
    scope=st.sampled_from(["trainer", "worker"]),
    monotone=st.booleans(),
)
def test_any_statistics_give_a_whole_number_within_the_bounds(
    seed, batches, growth, test, mode, scope, monotone
):
    """10,000 of them, drawn by NumPy: Hypothesis would take most of the time for its draws."""
    batch, cap = batches
    batching = dataclasses.replace(
        ANY_SETTINGS.batching,
        test=test,
        mode=mode,
        scope=scope,
        monotone=monotone,
        max_growth=growth,
        batch_cap=cap,
    )
    settings = dataclasses.replace(ANY_SETTINGS, batching=batching)
    rng = np.random.default_rng(seed)
    owner_R = np.repeat(np.arange(25), rng.integers(1, 4, 25))
    num_workers = len(owner_R)
    control = a_control(batches=(batch,) * 25, owners=owner_R.tolist())
    for _ in range(2):
        noises = any_values(rng, num_workers)
        signals, products = (any_values(rng, num_workers, signs=(-1.0, 1.0)) for _ in range(2))
        stats_R = stats(noises, signals, workers=num_workers).replace(
            ip_sum=products,
            ip_weight=np.ones(num_workers),
            plugin_ip_sum=np.abs(products),
            plugin_orth_sum=noises,
        )
        broken = set(owner_R[~np.isfinite(noises)].tolist())
        befores = [trainer.requested_batch_size for trainer in control.trainers]
        control, decisions = with_batch_sizes(
            settings, control, stats_R, np.full(num_workers, 4, np.int32)
        )
        for m, (before, decision) in enumerate(zip(befores, decisions, strict=True)):
            after = control.trainers[m].requested_batch_size
            assert type(after) is int and after == decision.next_batch_size
            assert (before if monotone else 1) <= after <= min(max(before, growth * before), cap)
            if m in broken:
                assert (decision.reason, after) == ("degenerate", before)
    assert sum(control.counts.values()) == 2 * 25
