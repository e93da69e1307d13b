"""The loop and the host's decisions: batches, plans, learning rates, assignment of workers."""

import dataclasses
import functools
import itertools
import json
import math
import types
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from ensembles import ensemble_of
from hypothesis import example, given
from hypothesis import strategies as st
from toy import settings_of

from adloco_jax.core.types import GradientStats
from adloco_jax.engine import inputs as batches
from adloco_jax.engine.local import by_trainer, without_broken
from adloco_jax.engine.spec import this_machine
from adloco_jax.loop import adloco
from adloco_jax.loop import control as accounting
from adloco_jax.loop import growth as batch_sizes
from adloco_jax.loop import plans as planning
from adloco_jax.loop.adloco import Boundary, State
from adloco_jax.loop.control import Control, RoundPlan, Size, StateBytes, Trainer
from adloco_jax.run.kept.checkpoint import Damaged
from adloco_jax.run.kept.restore import read_control

pytestmark = pytest.mark.usefixtures("one_device")


def done(control, settings) -> float:
    """The fraction of the run that is done."""
    return settings.share_done(control.round, control.tokens_total)


def a_control(batches=(4, 4, 4), sizes=(2, 1, 1), max_batch_size=4):
    streams = itertools.count()
    trainers = {
        m: Trainer(batch, [*itertools.islice(streams, size)])
        for m, (batch, size) in enumerate(zip(batches, sizes, strict=True))
    }
    return Control(trainers, max_batch_size, max_batch_size)


def streams_of(control):
    return {m: trainer.streams for m, trainer in control.trainers.items()}


def plans_of(control, settings):
    return planning.round_plans(control, settings)


def groups_of(control, settings):
    spec = types.SimpleNamespace(machine=this_machine(), model_shards=1)
    return batches.group_by_plan(control, plans_of(control, settings), spec)


def rates_of(control, settings, round_tokens=0):
    how = {"round_tokens": round_tokens}
    return [
        planning.learning_rates(control, m, plan, settings, **how)
        for m, plan in plans_of(control, settings).items()
    ]


FREELY = {"eta": 1.0, "max_growth": 100, "batch_cap": 99}  # limits that never bind


def stats(noise, signal, *, workers, examples=4, scale=1.0):
    """Statistics in which every worker saw this noise and signal, in units of a scale."""
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
    measured = {
        m: stats(noise, signal, workers=size, scale=scale)
        for m, size in zip(control.trainers, control.sizes, strict=True)
    }
    return adloco.with_batch_sizes(control, measured, settings, control.trainers)


class InMemory:
    """An engine without arrays: it decides by given statistics, and merges have a given loss."""

    state_bytes = StateBytes(params=100, outer_state=10, inner_state=200)

    def __init__(self, settings, stats=(), *, merged_loss=0.0, unsynchronised=False):
        self.settings, self.stats = settings, iter(stats)
        self.merged_loss, self.unsynchronised = merged_loss, unsynchronised

    def round(self, state, decide):
        plans = planning.round_plans(state.control, self.settings)
        how = {"sequence_length": 8, "sync_bytes": 4}
        control, _ = accounting.count_round(state.control, plans, **how)
        control, decisions = decide(control, next(self.stats, {}), plans)
        return State(state.ensemble, control), Boundary("metrics", decisions, [])

    def flush(self, state, trainers):
        return state, [{"event": "sync"}] * self.unsynchronised

    def losses(self, state, models):
        return [self.merged_loss if len(weights) > 1 else 0.0 for weights in models]

    def merge(self, state, members, weights, after):
        return state.ensemble

    def spawn(self, state, trainer, num_workers):
        return state.ensemble


def host_engine(settings, stats=(), **how):
    """The engine in memory; its calls are recorded."""
    engine = mock.Mock(wraps=InMemory(settings, stats, **how))
    engine.state_bytes, engine.observe = InMemory.state_bytes, mock.Mock()
    return engine


def asked(method):
    """The arguments, apart from the state, of the calls to an engine's method."""
    return [[_plain(argument) for argument in call.args[1:]] for call in method.call_args_list]


def _plain(argument):
    return argument if isinstance(argument, int) else list(argument)


def merged_by(settings, control, members, merged_loss=0.0, **how):
    """Merges: the engine, the control after the merge, and the ledger's line."""
    engine = host_engine(settings, merged_loss=merged_loss, **how)
    losses = dict.fromkeys(control.trainers, 0.0)
    state, changes = adloco.merge_trainers(
        State(None, control), members, losses, settings.merge, engine
    )
    return engine, state.control, changes[-1]


def test_a_round_goes_as_the_algorithm_has_it_and_a_merge_comes_at_its_end():
    settings = settings_of(num_rounds=3, merge={"every_rounds": 2})
    control, engine = adloco.start(settings.ensemble, settings.batching, 4), host_engine(settings)
    observers = [engine.observe, engine.observe]
    end = adloco.adloco(State(None, control), settings=settings, engine=engine, observers=observers)
    merging = ["losses", "flush", "losses", "flush", "merge"]
    observed = ["observe", "observe"]
    assert [name for name, *_ in engine.method_calls] == [
        *("round", *observed),
        *("round", *merging, *observed),
        *("round", "flush", *observed),
    ]
    assert asked(engine.flush)[-1] == [[0, 2]]  # all trainers, at the end of the run
    seen = [
        (state.control.round, [change["members"] for change in boundary.changes])
        for state, boundary in (call.args for call in engine.observe.call_args_list)
    ]
    assert seen[::2] == seen[1::2] == [(1, []), (2, [[0, 1]]), (3, [])]
    assert (end.control.round, [t.rounds for t in end.control.trainers.values()]) == (3, [3, 3])
    assert (control.round, len(control.trainers)) == (0, 3)  # what was given is as it was


def test_a_round_that_leaves_no_trainer_is_seen_by_no_observer():
    settings, gone = settings_of(num_rounds=3), {"event": "fault", "kind": "quarantine"}
    engine = host_engine(settings)

    def round_(state, decide):
        control = dataclasses.replace(state.control, trainers={}, round=1)
        return State(None, control), Boundary("metrics", [], [gone])

    engine.round.side_effect = round_
    with pytest.raises(adloco.Diverged, match="round 1") as error:
        adloco.adloco(
            State(None, adloco.start(settings.ensemble, settings.batching, 4)),
            settings=settings,
            engine=engine,
            observers=[engine.observe],
        )
    assert engine.observe.call_count == 0
    assert (error.value.boundary.metrics, error.value.boundary.changes) == ("metrics", [gone])


@pytest.mark.parametrize(
    "change", [{"x": None}, {}, {"1": {"streams": []}}, {"1": {"streams": [0]}}]
)
def test_trainers_of_a_forged_checkpoint_are_refused(change):
    """An id that is no number, no trainer, none of its workers, a worker of two trainers."""
    control = dataclasses.replace(a_control(batches=(4, 4), sizes=(1, 1)), round=3)
    data = json.loads(json.dumps(dataclasses.asdict(control)))
    assert read_control(Path("3"), data, settings_of().ensemble) == control
    if not change:
        data["trainers"] = {}
    for trainer, fields in change.items():
        data["trainers"][trainer] = data["trainers"].pop("1") | (fields or {})
    with pytest.raises(Damaged, match="trainers.x|not this run's"):
        read_control(Path("3"), data, settings_of().ensemble)


def test_trainers_with_one_plan_share_a_group_with_all_their_workers():
    batching = {"max_batch_size": 8, "buckets": (4, 8), "initial_batch_size": 4}
    settings = settings_of(batching=batching)
    control = a_control(batches=(3, 20, 4), max_batch_size=8)
    control.trainers[1].round_length = 2
    groups = groups_of(control, settings)
    assert [(g.trainers, g.sizes, g.plan) for g in groups] == [
        ((0, 2), (2, 1), RoundPlan(4, 1, 3)),
        ((1,), (1,), RoundPlan(8, 3, 6)),
    ]


def test_a_schedule_that_ends_at_a_tenth_of_the_peak_is_nanogpts():
    """nanoGPT's cosine: lowest + (highest - lowest) * (1 + cos(pi * share done)) / 2."""
    inner = {"learning_rate": 1e-3, "warmup_updates": 5, "steps_per_round": 5}
    settings = settings_of(num_rounds=9, inner=inner | {"schedule": "cosine", "final_lr_frac": 0.1})
    done = (np.arange(5, 45) - 5) / 40
    how = {"updates": np.arange(5, 46), "tokens": 0}
    rate = planning.learning_rate(settings, **how)
    expected = [*(1e-4 + 9e-4 * (1 + np.cos(np.pi * done)) / 2), 1e-4]
    np.testing.assert_allclose(rate, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("num_workers", "micro_batches", "test_batch_size", "count"),
    [
        (1, 50, "auto", 8),  # 4 % of 200
        (1, 5000, "auto", 256),
        (1, 1, "auto", 4),  # the whole round
        (3, 50, "auto", 8),  # 4 % of 600
        (6, 2, "auto", 2),  # at least two per worker
        *((2, 2, 8, 4), (3, 2, 8, 2), (4, 2, 8, 2), (7, 2, 8, 2)),
    ],
)
def test_a_test_batch_is_4_percent_within_8_and_256_or_as_declared_and_two_per_worker(
    num_workers, micro_batches, test_batch_size, count
):
    batching = {"initial_batch_size": 4, "test_batch_size": test_batch_size}
    settings = settings_of(inner={"steps_per_round": micro_batches}, batching=batching)
    control = a_control(batches=(4,), sizes=(num_workers,))
    (plan,) = plans_of(control, settings).values()
    assert planning.test_count(plan, num_workers, settings.batching) == count


def test_a_round_too_short_for_a_test_skips_it_and_says_so():
    batching = {"initial_batch_size": 1, "buckets": (1, 4)}
    settings = settings_of(inner={"steps_per_round": 1}, batching=batching)
    control = a_control(batches=(1,), sizes=(1,))
    assert planning.test_count(plans_of(control, settings)[0], 1, settings.batching) == 0
    after, (decision,) = adloco.with_batch_sizes(control, {}, settings, control.trainers)
    assert decision.reason == "skipped" and decision.size.batch_size == 1
    assert after.counts == {"skipped": 1}


def test_a_trainers_statistics_are_its_own_whatever_class_it_was_tested_in():
    """Trainer 3's round was too short for a test."""
    group = functools.partial(batches.Group, plan=RoundPlan(4, 1, 3))
    tests = [
        batches.StatsRows(group((1,), (2,)), None, np.array([4, 4])),
        batches.StatsRows(group((0, 3, 2), (1, 1, 1)), None, np.array([4, 0, 4])),
    ]
    measured = [
        stats(np.array([30.0, 50.0]), np.ones(2), workers=2),
        stats(np.array([10.0, 1e9, 70.0]), np.ones(3), workers=3),
    ]
    tested = by_trainer(tests, measured)
    control = a_control(batches=(4, 4, 4, 4), sizes=(1, 2, 1, 1))
    settings = settings_of(batching=FREELY)
    _, decisions = adloco.with_batch_sizes(control, tested, settings, control.trainers)
    assert [d.noise for d in decisions] == [10.0, 40.0, 70.0, None]


GROWING = {"num_trainers": 2, "num_workers": 8, "initial_workers": 2}


@pytest.mark.parametrize(
    ("request_", "free", "limit", "growth", "size"),
    [
        (4.0, 9, 800, "workers rounds batch", (2, 1, 4)),
        (4.1, 9, 800, "workers rounds batch", (4, 1, 4)),  # three are needed: 2 workers double
        (90.0, 9, 800, "workers rounds batch", (4, 1, 4)),  # workers grow before anything else
        (90.0, 1, 800, "workers rounds batch", (3, 3, 12)),  # 180 = 3 x 3 x 20, capped
        (90.0, 1, 40, "workers rounds batch", (3, 3, 4)),  # 36: rounding up would exceed 40
        (90.0, 9, 15, "workers rounds batch", (3, 1, 5)),
        (20.0, 0, 800, "workers rounds batch", (2, 3, 7)),
        (20.0, 0, 800, "batch rounds", (2, 2, 12)),
        (20.0, 9, 800, "batch workers", (4, 1, 12)),
        (math.nan, 9, 800, "workers rounds batch", (2, 1, 4)),
    ],
)
def test_a_request_is_spent_in_the_declared_order_up_to_each_cap(
    request_, free, limit, growth, size
):
    settings = settings_of(
        inner={"max_steps_per_round": 9},
        batching={"growth": tuple(growth.split()), "batch_cap": 12, "max_growth": 100},
    )
    how = {"limit": limit, "free_workers": free}
    grown = batch_sizes.grown(Size(2, 1, 4), request_, settings.batching, settings.inner, **how)
    assert grown == size


@given(
    st.builds(Size, *[st.integers(1, 9)] * 3),
    st.integers(1, 5),
    st.integers(0, 9),
    st.floats(0, 1e300),
    st.permutations(["workers", "rounds", "batch"]),
)
@example(Size(3, 1, 1), 2, 1, 99.0, ["workers", "rounds", "batch"])  # from 3 to 8 workers, once
def test_growth_is_limited_as_a_product_of_workers_rounds_and_batch(
    now, factor, free, request_, by
):
    settings = settings_of(
        inner={"max_steps_per_round": 27}, batching={"growth": tuple(by), "batch_cap": 99}
    )
    limit = factor * now.total
    how = {"limit": limit, "free_workers": free}
    grown = batch_sizes.grown(now, request_, settings.batching, settings.inner, **how)
    assert now.total <= grown.total <= limit
    assert all(before <= after for before, after in zip(now, grown, strict=True))


def test_workers_join_while_the_noise_asks_for_more_and_read_what_nobody_reads():
    batching = {"eta": 1.0, "batch_cap": 4}
    settings = settings_of(ensemble=GROWING, batching=batching)
    control = adloco.start(settings.ensemble, settings.batching, 4)
    assert streams_of(control) == {0: [0], 1: [1]}
    control.round = 1
    control, decisions = observed(settings, control, noise=1000.0, signal=1.0)
    assert [d.size.num_workers for d in decisions] == [2, 2]
    engine = host_engine(settings)
    state, events = State(None, control), []
    for trainer, num_workers in adloco.joining_workers(
        control, settings.ensemble, done(control, settings)
    ):
        state, event = adloco.spawn_workers(state, trainer, num_workers, settings.ensemble, engine)
        events.append(event)
    assert streams_of(state.control) == {0: [0, 2], 1: [1, 3]}
    assert asked(engine.spawn) == [[0, 2], [1, 2]]
    fields = {"event": "spawn", "round": 1, "workers_before": 1, "workers_after": 2}
    fields |= {"reason": "test", "syncs": 1, "bytes": 100 + 200}
    assert events == [fields | {"trainer": 0}, fields | {"trainer": 1}]
    assert (state.control.syncs_total, state.control.bytes_total) == (2, 600)
    # One worker of the pool of five is free: the first trainer gets it.
    settings = settings_of(ensemble=GROWING | {"num_workers": 5}, batching=batching)
    _, decisions = observed(settings, state.control, noise=1000.0, signal=1.0)
    assert [d.size.num_workers for d in decisions] == [3, 2]


def test_a_declared_share_of_the_run_lets_the_whole_pool_join():
    ensemble = GROWING | {"spawn_frac": 0.25}
    settings = settings_of(num_rounds=8, ensemble=ensemble, batching={"test": "constant"})
    control = adloco.start(settings.ensemble, settings.batching, 4)
    joining = []
    for control.round in (1, 2, 8):
        joining.append(adloco.joining_workers(control, settings.ensemble, done(control, settings)))
    assert joining == [[], [(0, 4), (1, 4)], []]  # after the last round no worker joins
    pool = {"num_trainers": 4, "num_workers": 6, "initial_workers": 4, "spawn_frac": 0.25}
    settings = settings_of(num_rounds=8, ensemble=pool, batching={"test": "constant"})
    control = dataclasses.replace(adloco.start(settings.ensemble, settings.batching, 4), round=4)
    assert adloco.joining_workers(control, settings.ensemble, done(control, settings)) == [
        (0, 2),
        (2, 2),
    ]
    assert settings.ensemble.sizes(whole_pool=True) == (2, 1, 2, 1)  # what is planned for


def test_without_a_signal_growth_stops_at_a_multiple_of_what_was_last_measured():
    batching = {"max_growth": 4, "batch_cap": 1000, "smoothing": 0.0}
    settings = settings_of(batching=batching | {"max_blind_growth": 2})
    control, sizes, reasons = a_control(batches=(4,), sizes=(1,)), [], []
    for signal in (-1.0, -1.0, 1.0, -30.0, -30.0):
        control, (decision,) = observed(settings, control, noise=100.0, signal=signal)
        sizes.append(decision.size.batch_size)
        reasons.append(decision.reason)
    assert sizes[:2] == [8, 8] and reasons[:2] == ["no_signal", "held"]
    assert sizes[2:] == [32, 32, 32]
    _, (decision,) = observed(settings_of(batching=batching), control, noise=100.0, signal=-1.0)
    assert decision.size.batch_size == 128


def test_smoothing_averages_numerators_and_denominators_apart_whatever_their_scales():
    settings = settings_of(batching={"eta": 1.0, "max_growth": 1000, "smoothing": 0.9})
    start = a_control(batches=(1,), sizes=(1,))
    first, _ = observed(settings, start, noise=10.0, signal=1.0, scale=2.0**-20)
    _, (decision,) = observed(settings, first, noise=90.0, signal=4.0, scale=2.0**30)
    noise = (0.9 * 10 + 90) / 1.9
    signal = (0.9 * 1 + 4) / 1.9
    assert decision.test_value == pytest.approx(noise / signal, rel=1e-12)
    assert (decision.noise, decision.signal) == (90.0, 4.0)  # as measured
    assert start.trainers[0].smoothing == {}  # what was given is as it was


@pytest.mark.parametrize(
    ("noise", "signal", "reason", "batch"),
    [
        (0.0, 1.0, "degenerate", 4),  # all gradients are identical
        (float("nan"), 1.0, "degenerate", 4),
        (1.0, -0.5, "no_signal", 8),  # the growth of one round
        (1e-30, 1e-31, "capped", 8),
        (1.0, 1e6, "kept", 4),
    ],
)
def test_degenerate_statistics_keep_the_batch_and_are_counted(noise, signal, reason, batch):
    settings = settings_of(batching={"max_growth": 2})
    control = a_control(batches=(4,), sizes=(1,))
    after, (decision,) = observed(settings, control, noise, signal)
    assert (decision.reason, decision.size.batch_size) == (reason, batch)
    assert after.counts == {reason: 1}
    if reason == "degenerate":
        assert after.trainers[0].smoothing == {}  # broken statistics are not remembered


def test_a_run_is_over_by_rounds_or_by_tokens():
    settings = settings_of(num_rounds=10, num_tokens=1000)
    shares = [settings.share_done(*done) for done in ((5, 100), (2, 750), (3, 1000))]
    assert shares == [0.5, 0.75, 1.0]
    assert settings_of(num_rounds=10).share_done(9, 10**9) == 0.9
    assert settings_of(num_rounds=None, num_tokens=1000).share_done(99, 900) == 0.9
    assert settings_of(num_rounds=None).share_done(10, 900) == 0.5


def test_where_tokens_end_a_run_the_schedule_follows_them():
    inner = {"steps_per_round": 4, "learning_rate": 1.0, "schedule": "linear"}
    settings = settings_of(num_rounds=None, num_tokens=1000, inner=inner)
    control = a_control()
    control.tokens_total = 600
    for trainer, updates in zip(control.trainers.values(), (3, 22, 7), strict=True):
        trainer.updates = updates  # its value does not matter
    for rate_T in rates_of(control, settings, round_tokens=480):
        # A step uses 480 tokens, so this is a quarter.
        np.testing.assert_allclose(rate_T, [0.4, 0.28, 0.16, 0.04], rtol=1e-6)
    control.tokens_total = 990
    for rate_T in rates_of(control, settings, round_tokens=480):
        np.testing.assert_allclose(rate_T, [0.01, 0, 0, 0], rtol=1e-5, atol=1e-9)
    both = settings_of(num_rounds=10, num_tokens=1000, inner=inner)  # 40 updates or 1000 tokens
    done = ((30, 500), (10, 900), (40, 0))
    rates = [planning.learning_rate(both, updates=u, tokens=t) for u, t in done]
    np.testing.assert_allclose(rates, [0.25, 0.1, 0], rtol=1e-6)


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
    # Only trainer 0 runs another round, with its streams and one more.
    control.trainers[0].streams += control.trainers[2].streams
    again, spent = accounting.count_round(control, {0: plans[0]}, sequence_length=8, sync_bytes=100)
    assert spent == {0: {"updates": 3, "tokens": 3 * 2 * 3 * 8, "syncs": 1, "bytes": 400}}
    assert again.trainers[0].cursors == {"0": 12, "1": 12, "3": 6}
    assert [(t.rounds, t.updates) for t in again.trainers.values()] == [(2, 6), (1, 3), (1, 3)]
    assert (again.round, again.updates_total, again.bytes_total) == (1, 12, 600)  # the slowest


def test_merge_is_due_every_so_many_rounds_while_two_trainers_live():
    settings = settings_of(merge={"every_rounds": 3})
    control = a_control(batches=(5, 3, 4))
    due = []
    for control.round in range(7):
        due.append(adloco.merge_due(control, settings.merge, done(control, settings)))
    assert due == [False, False, False, True, False, False, True]
    for last in ({"num_rounds": 6}, {"num_tokens": 100}):
        control.tokens_total = last.get("num_tokens", 0)
        ending = settings_of(merge={"every_rounds": 3}, **last)
        assert not adloco.merge_due(control, ending.merge, done(control, ending))  # nothing follows
    assert not adloco.merge_due(a_control(batches=(5,), sizes=(1,)), settings.merge, 0.0)
    assert not adloco.merge_due(control, settings_of(merge={"policy": "none"}).merge, 0.0)


def test_requests_for_workers_stand_after_a_refused_merge_and_are_one_communication_with_it():
    settings = settings_of(
        num_rounds=2,
        ensemble={"num_trainers": 3, "num_workers": 7, "initial_workers": 4},
        merge={"every_rounds": 1, "max_barrier": 0.5},
    )
    control = a_control(batches=(8, 2, 2), sizes=(1, 1, 2))
    # Every trainer asks for more workers.
    noisy = {m: stats(1e3, 1.0, workers=size) for m, size in enumerate(control.sizes)}
    engine = host_engine(settings, [noisy], merged_loss=1.0)
    seen = []
    adloco.adloco(
        State(None, control),
        settings=settings,
        engine=engine,
        observers=[lambda state, boundary: seen.append((state.control, boundary.changes))],
    )
    after, (attempt, *spawns) = seen[0]
    found = [(e["trainer"], e["workers_after"], e["syncs"], e["bytes"]) for e in spawns]
    assert found == [(0, 2, 0, 300), (1, 2, 0, 300), (2, 3, 0, 300)]
    assert after.syncs_total == 1 + attempt["syncs"] == 2  # trainer 2's round and the refused merge
    assert after.bytes_total == 8 + attempt["bytes"] + sum(e["bytes"] for e in spawns)


def test_workers_of_a_quarantined_trainer_do_not_come_back():
    settings = settings_of(ensemble=GROWING | {"spawn_frac": 0.25}, num_rounds=8)
    control = a_control(batches=(4, 4), sizes=(4, 4))
    control.trainers[0].skipped_in_a_row = {"0": 3}
    ensemble = ensemble_of(control.sizes)
    ensemble = ensemble.replace(params_M={"w": jnp.arange(2.0)})
    (after, control), _ = without_broken(State(ensemble, control), [0])
    assert (after.sizes, after.params_M["w"].tolist()) == (control.sizes, [1.0]) == ((4,), [1.0])
    control.round = 4
    assert adloco.joining_workers(control, settings.ensemble, done(control, settings)) == []


def test_who_loses_a_worker_to_a_merge_synchronises_before_it():
    control = a_control(batches=(8, 1, 1, 1), sizes=(1, 1, 1, 3))
    # Six workers at batches 8, 1, 1 are divided into 4, 1, 1. Trainers 2 and 3 lose workers.
    engine, _, _ = merged_by(settings_of(), control, (1, 2))
    assert asked(engine.flush) == [[[1, 2]], [[2, 3]]]
    assert engine.losses.call_count == 1  # every update was synchronised: only the merge's
    engine, _, _ = merged_by(settings_of(), control, (1, 2), unsynchronised=True)
    first_calls = [name for name, *_ in engine.method_calls][:3]
    assert first_calls == ["flush", "losses", "losses"]


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
    found = [call.args[2] for call in engine.merge.call_args_list]
    assert found == [merged_with] * bool(merged_with)
    assert [*after.trainers] == ids
    assert merged_by(settings, control, (1, 2), merged_loss=0.1)[2]["event"] == "merge"
    # A loss of NaN never counts as low enough.
    assert merged_by(settings, control, (1, 2), merged_loss=math.nan)[2]["event"] == "refusal"


@pytest.mark.parametrize(
    ("refused", "on_refusal", "num_bytes"),
    [
        # One trainer's parameters and momentum, and two moments for each of two joining workers.
        (False, "keep", 100 + 10 + 2 * (100 + 200)),
        (True, "retire", 100 + 2 * (100 + 200)),
        (True, "keep", 100),
    ],
)
def test_a_merge_and_its_hand_over_are_one_communication(refused, on_refusal, num_bytes):
    """Of trainer 2's workers one stays with the merged trainer and one moves to trainer 0."""
    settings = settings_of(merge={"on_refusal": on_refusal, "max_barrier": 0.1})
    control = a_control(batches=(4, 4, 1), sizes=(1, 1, 2))
    _, after, event = merged_by(settings, control, (1, 2), merged_loss=float(refused))
    assert (event["syncs"], event["bytes"]) == (1, num_bytes)
    assert (after.syncs_total, after.bytes_total) == (1, num_bytes)
