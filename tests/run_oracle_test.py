"""Whole runs against the oracle, round by round."""

import functools

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import run_oracle
from toy import VOCAB, corpus, settings_of
from toy_runs import events, run

from adloco_jax.loop import adloco

pytestmark = pytest.mark.usefixtures("one_device")

CASES = {
    # The defaults, AdamW and Nesterov; the worst two trainers merge, and two remain.
    "defaults": settings_of(num_rounds=7, batching={"eta": 0.8}, merge={"every_rounds": 4}),
    "paper": settings_of(
        num_rounds=6,
        inner={"warmup_updates": 5, "schedule": "cosine"},
        outer={"tx": "sgd", "learning_rate": 0.5},
        batching={"test": "augmented", "mode": "paper", "vartheta": 0.5, "nu": 0.5},
        merge={"policy": "best_with_worst", "every_rounds": 3},
    ),
    "inner_product": settings_of(
        num_rounds=6,
        inner={"tx": "sgd", "learning_rate": 0.5, "weight_decay": 0.0},
        outer={"tx": "adamw", "learning_rate": 0.05},
        batching={
            "test": "inner_product",
            "scope": "worker",
            "vartheta": 0.7,
            "test_batch_size": 14,
            "smoothing": 0.5,
        },
        switch={"mode": "accumulate"},
        merge={"width": 3, "every_rounds": 5},
    ),
    "clip": settings_of(
        num_rounds=4,
        batching={"eta": 0.5},
        switch={"mode": "clip"},
        merge={"every_rounds": 2},
    ),
    # While the noise asks for more workers, workers join; then rounds and batches grow. A trainer's
    # momentum begins with its second worker.
    "growing pool": settings_of(
        num_rounds=7,
        outer={"skip_single": True},
        inner={"max_steps_per_round": 6},
        batching={"eta": 0.3, "initial_batch_size": 1, "buckets": (1, 2, 4), "batch_cap": 4},
        merge={"every_rounds": 5},
        ensemble={"num_trainers": 2, "num_workers": 6, "initial_workers": 2},
    ),
    # At the merge after round 2, tests ask for workers, but the merge divides them differently.
    "merge among requests": settings_of(
        num_rounds=5,
        inner={"max_steps_per_round": 9},
        batching={"eta": 0.3, "initial_batch_size": 1, "buckets": (1, 2, 4), "batch_cap": 8},
        merge={"every_rounds": 2},
        ensemble={"num_trainers": 3, "num_workers": 9, "initial_workers": 3},
    ),
}


def table_start():
    return 0.3 * np.random.default_rng(1).normal(size=(VOCAB, VOCAB)).astype(np.float32)


@functools.cache
def played_by_hand(name):
    return run_oracle(CASES[name], batch=corpus().batch, table=table_start())


def fields(lines, names):
    return [tuple(line[name] for name in names) for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_runner_plays_the_algorithm(name, tmp_path):
    expected = played_by_hand(name)
    for played in expected.rounds:
        value = played["test_value"]
        assert value is None or abs(value - round(value)) > 1e-3, (
            "no test of rounding: change a seed"
        )

    result = run(tmp_path, CASES[name], init_fn=lambda key: {"w": jnp.asarray(table_start())})
    lines = events(tmp_path, "round")
    same = ("round", "trainer", "workers", "updates")
    decided = [*same, "requested_batch_size", "micro_batch_size", "num_accum_steps"]
    assert fields(lines, decided) == fields(expected.rounds, [*same, "requested", "micro", "accum"])
    for line, played in zip(lines, expected.rounds, strict=True):
        np.testing.assert_allclose(line["train_loss"], played["loss"], rtol=1e-5)
        np.testing.assert_allclose(line["learning_rate"], played["rates"][-1], rtol=1e-6)
        if played["test_value"] is not None:
            np.testing.assert_allclose(line["noise"], played["noise"], rtol=1e-4)
            np.testing.assert_allclose(line["signal"], played["signal"], rtol=1e-3, atol=1e-6)
            np.testing.assert_allclose(line["test_value"], played["test_value"], rtol=1e-3)

    merged = ("round", "members", "into", "weights")
    assert fields(events(tmp_path, "merge"), merged) == fields(expected.merges, merged)
    spawned = ("round", "trainer", "workers_before", "workers_after")
    assert fields(events(tmp_path, "spawn"), spawned) == expected.spawns
    controller = result.state.control
    assert [
        (m, t.requested_batch_size, t.updates, {int(s): c for s, c in t.cursors.items()})
        for m, t in controller.trainers.items()
    ] == [(t.id, t.batch, t.updates, t.cursors) for t in expected.trainers]
    assert controller.trainer_of == {worker.stream: worker.trainer for worker in expected.workers}
    assert result.ensemble.sizes == controller.sizes
    np.testing.assert_allclose(
        result.ensemble.params_M["w"],
        np.stack([t.params for t in expected.trainers]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_the_cases_cover_what_they_are_for():
    """All kinds of growth, rounding up to a bucket, clipping, accumulation, moving workers."""
    plans, merges, pools = set(), 0, set()
    for name in CASES:
        played = played_by_hand(name)
        merges += len(played.merges)
        assert len(played.merges) >= 1 and len({r["requested"] for r in played.rounds}) >= 3, name
        plans |= {(r["requested"], r["micro"], r["accum"]) for r in played.rounds}
        for r in {r["round"] for r in played.rounds}:
            pools.add(tuple(p["workers"] for p in played.rounds if p["round"] == r))
    assert any(micro > requested for requested, micro, _ in plans)
    assert any(micro * accum < requested for requested, micro, accum in plans)
    assert any(accum > 1 for _, _, accum in plans)
    assert len(pools) >= 4 and merges >= 5
    growing = played_by_hand("growing pool")
    assert len(growing.spawns) >= 3 and {r["updates"] for r in growing.rounds} == {3, 6}


ONE = [(1, 1)]


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=9),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=5, max_size=5),
    st.sampled_from(["worst_with_worst", "best_with_worst"]),
    st.integers(2, 4),
)
# Two trainers ask for one worker each, and two workers are free.
@example([0, 1, 1, 1, 1, 2], [(10, 1), (5, 1), (30, 1)] + 2 * ONE, "worst_with_worst", 2)
@example([0, 0, 0, 1, 1, 2, 3], 5 * [(9, 1)], "worst_with_worst", 2)
# The representative chooses first among absorbed workers, although another comes before it.
@example([0, 1, 2, 2], [(4, 1), (3, 1)] + 3 * ONE, "worst_with_worst", 2)
# The member with the largest product of batch and round length has the smaller batch.
@example([0, 1], [(8, 1), (3, 3)] + 3 * ONE, "worst_with_worst", 2)
def test_workers_batches_and_sums_after_a_merge(owners, sizes, policy, width):
    ids = sorted(set(owners))  # positions; ids are 10, 11, ... to tell them apart
    owners, sizes = [ids.index(owner) for owner in owners], sizes[: len(ids)]
    demands = [batch_size * length for batch_size, length in sizes]
    base = CASES["defaults"]
    merge = {"policy": policy, "width": width, "every_rounds": 1}
    settings = base.model_copy(update={"merge": base.merge.model_copy(update=merge)})
    # The trainer with the smallest request has not been tested, so it has no sums to average.
    sums = [
        {"noise_sum": float(b), "noise_weight": 1.0} if b > min(demands) else {} for b in demands
    ]
    control = adloco.Control(
        trainers={
            10 + m: adloco.Trainer(
                b,
                [100 + w for w, owner in enumerate(owners) if owner == m],
                length,
                requested_workers=9,
                smoothing=dict(sums[m]),
            )
            for m, (b, length) in enumerate(sizes)
        },
        max_batch_size=4,
        eval_batch_size=4,
        round=1,
    )
    trainers = [
        oracle.Trainer(10 + m, np.zeros(1), np.zeros(1), b, length, wanted=9, sums=dict(sums[m]))
        for m, (b, length) in enumerate(sizes)
    ]
    workers = [
        oracle.Worker(100 + w, 10 + m, (0, np.zeros(1), np.zeros(1))) for w, m in enumerate(owners)
    ]
    if not adloco.merge_due(
        control, settings.merge, settings.share_done(control.round, control.tokens_total)
    ):
        assert len(ids) == 1
        return
    members = adloco.choose_members(control, dict.fromkeys(control.trainers, 0.0), settings.merge)
    positions = oracle.merge_members(demands, policy=policy, width=width)
    assert list(members) == [10 + m for m in positions]
    control = adloco.after_merge(control, members)
    oracle.merge_trainers(settings, trainers, workers, [trainers[m] for m in positions])

    assert [
        (m, t.requested_batch_size, t.round_length, t.requested_workers, t.smoothing)
        for m, t in control.trainers.items()
    ] == [(t.id, t.batch, t.length, t.wanted, t.sums) for t in trainers]
    assert control.trainer_of == {worker.stream: worker.trainer for worker in workers}
