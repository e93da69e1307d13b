"""What the host decides: groups, test shares, learning rates, batches, who works for whom."""

import dataclasses
import json
import math

import hypothesis
import numpy as np
import pytest
from adloco_jax.run.controller import Controller, Merge, Trainer
from hypothesis import given
from hypothesis import strategies as st
from toy import settings_of

from adloco_jax.core.types import BatchPlan, GradientStats
from adloco_jax.run import controller as control
from adloco_jax.run.ledger import batch_history


def a_controller(batches=(4, 4, 4), owners=(0, 0, 1, 2), max_batch_size=4):
    trainers = [Trainer(id=i, requested_batch_size=b) for i, b in enumerate(batches)]
    return Controller(
        trainers, list(owners), list(range(len(owners))), max_batch_size, max_batch_size
    )


def stats(noise, signal, *, workers, examples=4):
    """Every worker saw the same noise and signal."""
    weight, full = examples - 1.0, examples * (examples - 1.0)
    fields = dict.fromkeys(GradientStats.__dataclass_fields__, 0.0) | {
        "scale": 1.0,
        "num_examples": float(examples),
        "noise_sum": noise * weight,
        "noise_weight": weight,
        "signal_sum": signal * full,
        "signal_weight": full,
    }
    return GradientStats(**{name: np.full(workers, value) for name, value in fields.items()})


def observed(settings, controller, noise, signal, counts=4):
    workers = len(controller.owners)
    counts_R = np.full(workers, counts, np.int32)
    return control.observe(controller, settings, stats(noise, signal, workers=workers), counts_R)


def test_a_controller_survives_json():
    controller = a_controller()
    controller.trainers[1].cursors["2"] = 7
    controller.trainers[1].smoothing = {"noise_sum": 0.1}
    text = json.dumps(controller.to_json())
    assert Controller.from_json(json.loads(text)) == controller


def test_trainers_with_one_plan_share_a_group_with_all_their_workers():
    settings = settings_of(
        batching={"max_batch_size": 8, "buckets": (4, 8), "initial_batch_size": 4}
    )
    groups = control.plan_round(a_controller(batches=(3, 20, 4), max_batch_size=8), settings)
    assert [(g.trainers, g.workers, g.plan) for g in groups] == [
        ((0, 2), (0, 1, 3), BatchPlan(4, 1)),
        ((1,), (2,), BatchPlan(8, 3)),
    ]
    assert [g.num_micro_batches for g in groups] == [3, 9]


def test_micro_batches_as_the_unit_make_fewer_updates_and_a_short_last_one():
    settings = settings_of(
        batching={"max_batch_size": 2, "buckets": (2,)},
        inner={"unit": "microbatches", "steps_per_round": 7},
    )
    (group,) = control.plan_round(
        a_controller(batches=(6,), owners=(0,), max_batch_size=2), settings
    )
    assert (group.num_micro_batches, group.num_updates) == (7, 3)
    assert control.update_flags(group).tolist() == [False, False, True] * 2 + [True]


def test_lengthening_makes_updates_of_what_would_be_accumulated():
    settings = settings_of(switch={"mode": "lengthen"}, inner={"steps_per_round": 3})
    controller = a_controller(batches=(3, 9, 4))
    short, long = control.plan_round(controller, settings)
    assert (short.trainers, short.plan) == ((0, 2), BatchPlan(4, 1))
    assert (long.trainers, long.plan) == ((1,), BatchPlan(4, 1))
    assert [short.num_updates, short.num_micro_batches, short.num_dispatches] == [3, 3, 1]
    assert [long.num_updates, long.num_micro_batches, long.num_dispatches] == [9, 9, 3]
    assert control.update_flags(long).all()
    controller.max_batch_size = 2  # after running out of memory: the same sequences
    short, long = control.smaller_micro_batches(controller, settings, [short, long])
    assert (short.plan, short.num_updates) == (BatchPlan(2, 1), 6)
    assert (long.plan, long.num_updates) == (BatchPlan(2, 1), 18)


@pytest.mark.parametrize(
    ("requested", "before", "after", "inner", "switch", "plan"),
    [
        (12, 12, 8, {}, {}, BatchPlan(6, 2)),
        (48, 16, 12, {}, {"mode": "accumulate"}, BatchPlan(12, 4)),
        (7, 7, 3, {}, {}, BatchPlan(1, 7)),
        (21, 21, 10, {}, {}, BatchPlan(3, 7)),
        (36, 12, 8, {"unit": "microbatches"}, {"mode": "accumulate"}, BatchPlan(6, 6)),
        (24, 12, 8, {}, {"mode": "lengthen"}, BatchPlan(8, 1)),
    ],
)
def test_after_running_out_of_memory_the_same_sequences_make_the_same_updates(
    requested, before, after, inner, switch, plan
):
    settings = settings_of(
        inner={"steps_per_round": 5} | inner,
        switch=switch,
        batching={"max_batch_size": before, "buckets": (), "batch_cap": 64},
    )
    controller = a_controller(batches=(requested,), owners=(0,), max_batch_size=before)
    (planned,) = control.plan_round(controller, settings)
    controller.max_batch_size = after
    (halved,) = control.smaller_micro_batches(controller, settings, [planned])
    assert halved.plan == plan

    def sequences(group):
        return np.diff(np.flatnonzero(control.update_flags(group)), prepend=-1) * (
            group.plan.micro_batch_size
        )

    assert sequences(halved).sum() == sequences(planned).sum()
    assert halved.num_updates == len(sequences(halved))
    assert halved.num_micro_batches == 5 * halved.num_dispatches
    if switch.get("mode") != "lengthen":  # there every micro-batch is an update
        assert sequences(halved).tolist() == sequences(planned).tolist()


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
    controller = a_controller()
    controller.trainers[1].updates = 22
    (group,) = control.plan_round(controller, settings)
    rate_TR = control.learning_rates(controller, group, settings)
    np.testing.assert_allclose(rate_TR[:, 0], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(rate_TR[:, 2], 1 - (np.arange(22, 26) - 4) / 36, rtol=1e-6)


@pytest.mark.parametrize("batch", [7, 20])
@pytest.mark.parametrize(("rule", "power"), [("none", 0), ("sqrt", 0.5), ("linear", 1)])
def test_learning_rate_on_growth_follows_the_effective_batch(rule, power, batch):
    settings = settings_of(
        inner={"learning_rate": 0.1, "lr_on_growth": rule},
        batching={"initial_batch_size": 2, "max_batch_size": 8, "buckets": (2, 8)},
    )
    controller = a_controller(batches=(batch,), owners=(0,), max_batch_size=8)
    (group,) = control.plan_round(controller, settings)
    rate_TR = control.learning_rates(controller, group, settings)
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
    controller = a_controller(batches=(6,), owners=(0,), max_batch_size=2)
    (group,) = control.plan_round(controller, settings)
    rate_TR = control.learning_rates(controller, group, settings)
    assert rate_TR[:, 0].tolist() == [3.0] * 6 + [1.0]


def test_a_round_accumulates_no_more_micro_batches_than_it_has():
    settings = settings_of(
        batching={"max_batch_size": 2, "buckets": (2,)},
        inner={
            "unit": "microbatches",
            "steps_per_round": 3,
            "learning_rate": 1.0,
            "lr_on_growth": "linear",
        },
    )
    controller = a_controller(batches=(16,), owners=(0,), max_batch_size=2)
    (group,) = control.plan_round(controller, settings)
    assert (group.plan, group.num_updates) == (BatchPlan(2, 3), 1)
    assert control.learning_rates(controller, group, settings)[:, 0].tolist() == [3.0] * 3


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
    controller = a_controller(batches=(4,), owners=owners)
    groups = control.plan_round(controller, settings)
    assert control.test_counts(controller, groups, settings).tolist() == counts


def test_a_round_too_short_for_a_test_skips_it_and_says_so():
    settings = settings_of(inner={"steps_per_round": 1}, batching={"initial_batch_size": 1})
    controller = a_controller(batches=(1,), owners=(0,))
    counts = control.test_counts(controller, control.plan_round(controller, settings), settings)
    (decision,) = control.observe(controller, settings, None, counts)
    assert decision.reason == "skipped" and decision.next_batch_size == 1
    assert controller.counts == {"skipped": 1}


def test_growth_is_asked_for_per_worker_of_the_trainer():
    settings = settings_of(batching={"eta": 1.0, "max_growth": 100, "batch_cap": 99})
    decisions = observed(settings, a_controller(), noise=32.0, signal=1.0)
    assert [d.next_batch_size for d in decisions] == [16, 32, 32]  # two workers, one, one
    scope = settings_of(
        batching={"eta": 1.0, "max_growth": 100, "batch_cap": 99, "scope": "worker"}
    )
    decisions = observed(scope, a_controller(), noise=32.0, signal=1.0)
    assert [d.next_batch_size for d in decisions] == [32, 32, 32]


def test_smoothing_averages_numerators_and_denominators_apart():
    settings = settings_of(batching={"eta": 1.0, "max_growth": 1000, "smoothing": 0.9})
    controller = a_controller(batches=(1,), owners=(0,))
    observed(settings, controller, noise=10.0, signal=1.0)
    (decision,) = observed(settings, controller, noise=90.0, signal=4.0)
    noise = (0.9 * 10 + 90) / 1.9
    signal = (0.9 * 1 + 4) / 1.9
    assert decision.test_value == pytest.approx(noise / signal, rel=1e-12)
    assert (decision.noise, decision.signal) == (90.0, 4.0)  # as measured, not smoothed


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
    controller = a_controller(batches=(4,), owners=(0,))
    (decision,) = observed(settings, controller, noise, signal)
    assert (decision.reason, decision.next_batch_size) == (reason, batch)
    assert controller.counts == {reason: 1}
    if reason == "degenerate":
        assert controller.trainers[0].smoothing == {}  # nothing broken is remembered


def test_defect_05_a_trainer_with_one_worker_adapts_from_the_first_round():
    controller = a_controller(batches=(2, 2), owners=(0, 1))
    decisions = observed(settings_of(batching={"eta": 0.8}), controller, noise=3.0, signal=1.0)
    assert [d.next_batch_size for d in decisions] == [5, 5]  # 3 / 0.64, up


def test_ramp_takes_the_declared_batch_of_the_next_round():
    settings = settings_of(
        batching={"test": "ramp", "ramp": ((0, 2), (2, 6)), "initial_batch_size": 2}
    )
    controller = control.start(settings, 4)
    sizes = []
    for _ in range(3):
        decisions = control.observe(controller, settings, None, np.zeros(4, np.int32))
        sizes.append(decisions[0].next_batch_size)
        groups = control.plan_round(controller, settings)
        control.advance(controller, groups, sequence_length=8, sync_bytes=4)
    assert sizes == [2, 6, 6]


def test_a_run_is_over_by_rounds_or_by_tokens():
    settings = settings_of(num_rounds=10, num_tokens=1000)
    shares = [control.share_done(*done, settings) for done in ((5, 100), (2, 750), (3, 1000))]
    assert shares == [0.5, 0.75, 1.0]
    assert control.share_done(9, 10**9, settings_of(num_rounds=10)) == 0.9


def test_where_tokens_end_a_run_the_schedule_follows_them():
    settings = settings_of(
        num_rounds=99,
        num_tokens=1000,
        inner={"steps_per_round": 4, "learning_rate": 1.0, "schedule": "linear"},
    )
    controller = a_controller()
    controller.tokens_total = 600
    for trainer, updates in zip(controller.trainers, (3, 22, 7), strict=True):
        trainer.updates = updates  # does not matter
    (group,) = control.plan_round(controller, settings)
    rate_TR = control.learning_rates(controller, group, settings, round_tokens=480)
    expected_T = [0.4, 0.28, 0.16, 0.04]  # a quarter of 480 tokens a step
    np.testing.assert_allclose(rate_TR, np.tile(expected_T, (4, 1)).T, rtol=1e-6)
    controller.tokens_total = 990
    rate_TR = control.learning_rates(controller, group, settings, round_tokens=480)
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


def test_accounting_of_a_round():
    settings = settings_of(inner={"steps_per_round": 3}, batching={"initial_batch_size": 2})
    controller = a_controller(batches=(2, 2, 2))
    groups = control.plan_round(controller, settings)
    spent = control.advance(controller, groups, sequence_length=8, sync_bytes=100)
    assert spent[0] == {"updates": 3, "tokens": 3 * 2 * 2 * 8, "syncs": 1, "bytes": 200}
    assert spent[1] == {"updates": 3, "tokens": 3 * 2 * 8, "syncs": 0, "bytes": 0}
    assert (controller.syncs_total, controller.bytes_total) == (1, 200)
    assert controller.tokens_total == 3 * 2 * 4 * 8
    assert controller.trainers[0].cursors == {"0": 6, "1": 6}


def test_merge_is_due_every_so_many_rounds_while_two_trainers_live():
    settings = settings_of(merge={"every_rounds": 3})
    controller = a_controller(batches=(5, 3, 4))
    due = []
    for controller.round in range(1, 7):
        due.append(control.due_merge(controller, settings))
    assert due == [None, None, Merge((2, 1), (4, 3))] * 2
    assert control.due_merge(a_controller(batches=(5,), owners=(0,)), settings) is None
    off = settings_of(merge={"policy": "none"})
    assert control.due_merge(a_controller(), off) is None


def test_demand_gives_the_workers_to_whoever_asks_for_more():
    controller = a_controller(batches=(8, 1, 1, 6), owners=(0, 1, 2, 2, 3, 3))
    owners = control.apply_merge(controller, settings_of(), Merge((1, 2), (1, 1)))
    # Shares of six workers at batches 8, 1, 6: 3, 1, 2. Trainer 1 keeps its own worker; what it
    # absorbed is free, and fills trainer 0.
    assert owners == [0, 1, 0, 0, 2, 2]
    assert [t.id for t in controller.trainers] == [0, 1, 3]


def test_a_merge_takes_workers_from_members_and_from_who_asks_for_less():
    controller = a_controller(batches=(8, 1, 1, 1), owners=(0, 1, 2, 3, 3, 3))
    # Shares of six workers at batches 8, 1, 1: 4, 1, 1.
    losing = control.losing_workers(controller, settings_of(), Merge((1, 2), (1, 1)), refused=False)
    assert losing == [2, 3]
    assert controller.owners == [0, 1, 2, 3, 3, 3] and len(controller.trainers) == 4


def test_fragments_and_whole_synchronisations_are_counted():
    controller = a_controller(batches=(2, 2), owners=(0, 0, 0, 1))
    groups = control.plan_round(controller, settings_of())
    spent = control.advance(controller, groups, sequence_length=8, sync_bytes=25, num_syncs=4)
    assert [(cost["syncs"], cost["bytes"]) for cost in spent] == [(4, 4 * 2 * 2 * 25), (0, 0)]
    line = control.count_synchronisation(controller, [0, 1], sync_bytes=100)
    assert line == {"round": 1, "trainers": [0, 1], "syncs": 1, "bytes": 400}
    assert (controller.syncs_total, controller.bytes_total) == (5, 800)


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
    controller, due = a_controller(batches=(4, 4, 1), owners=(0, 1, 2, 2)), Merge((1, 2), (4, 1))
    state_bytes = control.StateBytes(params=100, outer_state=10, inner_state=200)
    cost = control.count_merge(controller, settings, due, state_bytes=state_bytes, refused=refused)
    assert cost == {"syncs": 1, "bytes": num_bytes}
    assert (controller.syncs_total, controller.bytes_total) == (1, num_bytes)
    assert len(controller.trainers) == 3  # nothing but the totals has changed


def test_a_hand_over_without_a_merge_is_a_communication_and_nothing_is_none():
    state_bytes = control.StateBytes(params=100, outer_state=10, inner_state=200)
    assert control.merge_cost(state_bytes, num_joining=2) == {"syncs": 1, "bytes": 600}
    assert control.merge_cost(state_bytes) == {"syncs": 0, "bytes": 0}


def test_retire_sends_the_absorbed_workers_away():
    settings = settings_of(ensemble={"num_trainers": 3, "num_workers": 4, "allocation": "retire"})
    controller = a_controller(batches=(2, 1, 4))
    owners = control.apply_merge(controller, settings, Merge((0, 1), (2, 1)))
    assert owners == [0, 0, -1, 1]
    assert (controller.owners, controller.streams) == ([0, 0, 1], [0, 1, 3])


@pytest.mark.parametrize(("rule", "batch"), [("max", 6), ("total", 3)])
def test_representative_batch(rule, batch):
    settings = settings_of(merge={"representative_batch": rule}, batching={"batch_cap": 64})
    controller = a_controller(batches=(6, 4), owners=(0, 1, 1))
    control.apply_merge(controller, settings, Merge((0, 1), (6, 4)))
    # The larger total that was asked for is 4 x 2 workers; three workers share it: 8 / 3, up.
    assert controller.trainers[0].requested_batch_size == batch


def test_a_merged_trainer_averages_its_members_sums():
    controller = a_controller(batches=(4, 4), owners=(0, 1))
    controller.trainers[0].smoothing = {"noise_sum": 1.0, "signal_sum": 4.0}
    controller.trainers[1].smoothing = {"noise_sum": 3.0, "signal_sum": 0.0}
    control.apply_merge(controller, settings_of(), Merge((0, 1), (4, 4)))
    assert controller.trainers[0].smoothing == {"noise_sum": 2.0, "signal_sum": 2.0}


ANY_SETTINGS = settings_of()
SIZES = [0.0, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, math.inf, math.nan]
WHOLE = st.integers(1, 2**31 - 1) | st.sampled_from([1, 2, 2**31 - 2, 2**31 - 1])


def any_values(rng, count, *, signs=(1.0,)):
    """Half of them sizes that are special."""
    others = 10 ** rng.uniform(-30, 30, count)
    sizes = np.where(rng.random(count) < 0.5, rng.choice(SIZES, count), others)
    return sizes * rng.choice(signs, count)


@hypothesis.settings(max_examples=400)
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
    for _ in range(25):
        num_workers, rounds = rng.integers(1, 4, 2)
        noises = any_values(rng, num_workers)
        signals, products = (any_values(rng, num_workers, signs=(-1.0, 1.0)) for _ in range(2))
        controller = a_controller(batches=(batch,), owners=(0,) * num_workers)
        stats_R = stats(noises, signals, workers=num_workers).replace(
            ip_sum=products,
            ip_weight=np.ones(num_workers),
            plugin_ip_sum=np.abs(products),
            plugin_orth_sum=noises,
        )
        counts_R = np.full(num_workers, 4, np.int32)
        for _ in range(rounds):
            before = controller.trainers[0].requested_batch_size
            (decision,) = control.observe(controller, settings, stats_R, counts_R)
            after = controller.trainers[0].requested_batch_size
            assert type(after) is int and after == decision.next_batch_size
            assert (before if monotone else 1) <= after <= min(max(before, growth * before), cap)
            if not np.all(np.isfinite(noises)):
                assert (decision.reason, after) == ("degenerate", before)
        assert sum(controller.counts.values()) == rounds
