"""A synchronisation in fewer bits: what it computes, and what moves between eight devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from toy import bigram_loss, corpus, init_fn, settings_of

from adloco_jax import init, outer_step, outer_update, start_round
from adloco_jax.core.compress import packed_bytes
from adloco_jax.run.ledger import deterministic_lines, read
from adloco_jax.run.sharding import bring, place
from adloco_jax.training import fit

LOW = ["bfloat16", "int8", "int4"]
LARGEST = {"int8": 127, "int4": 7}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
SHAPES = {"embed": (257, 64), "up": (2, 64, 256), "key": (2, 64, 32), "norm": (2, 64), "gain": ()}


def shapes_of(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@functools.cache
def drifted(num_trainers, num_workers, owner_R=None, seed=0):
    """An ensemble with momentum, and its workers after a round: no two at one place."""
    rng = np.random.default_rng(seed)

    def draw(*lead, size=1.0):
        return {
            name: jnp.asarray(size * rng.normal(size=(*lead, *shape)), jnp.float32)
            for name, shape in SHAPES.items()
        }

    ensemble = init(
        draw(),
        num_trainers=num_trainers,
        num_workers=num_workers,
        inner_tx=optax.sgd(0.1),
        outer_tx=NESTEROV,
        owner_R=owner_R,
    )
    ensemble = ensemble.replace(params_M=draw(num_trainers))
    workers = start_round(ensemble)
    drift_R = draw(num_workers, size=0.01)
    return ensemble, workers.replace(params_R=jax.tree.map(jnp.add, workers.params_R, drift_R))


@functools.cache
def update_of(precision, known_owners=None):
    def update(ensemble, workers, weights_R=None):
        if known_owners is not None:
            ensemble = ensemble.replace(owner_R=np.asarray(known_owners, np.int32))
        return outer_update(
            ensemble, workers, outer_tx=NESTEROV, precision=precision, weights_R=weights_R
        )

    return jax.jit(update)


def assert_close(actual, expected, *, rtol=1e-6, atol=1e-6):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


def same(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)


# --- What it computes


@pytest.mark.parametrize("known_owners", [None, (0, 0, 0, 1, 1, 1)])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_both_halves_are_rounded_and_the_mean_is_not(precision, known_owners):
    ensemble, workers = drifted(2, 6)
    after, norm_M = update_of(precision, known_owners)(ensemble, workers)
    rounded = functools.partial(oracle.in_blocks, largest_code=LARGEST[precision], most=128)
    for m, mine in enumerate([(0, 1, 2), (3, 4, 5)]):
        square = 0.0
        for name in SHAPES:
            start = np.asarray(ensemble.params_M[name][m])
            ends = [np.asarray(workers.params_R[name][r]) for r in mine]
            mean = np.mean([rounded(start - end)[0] for end in ends], axis=0)
            square += np.sum(np.square(mean))
            # The outer optimizer sees the mean as it is. Where rounding nearly ties, the last bit
            # of a quotient decides: less than one entry in a thousand.
            seen = np.asarray(after.outer_state_M[0].trace[name][m])
            assert np.mean(~np.isclose(seen, mean, rtol=1e-5, atol=1e-8)) < 1e-3, name
            sent, scales = rounded(-0.7 * 1.9 * mean)
            actual = np.asarray(after.params_M[name][m])
            off = np.abs(actual - (start + sent))
            assert np.mean(off > 1e-6) < 2e-3, name
            assert np.all(off <= 1.001 * scales + 1e-6), name
        np.testing.assert_allclose(norm_M[m], math.sqrt(square), rtol=1e-5)


@pytest.mark.parametrize("known_owners", [None, (0, 1)])
@pytest.mark.parametrize("precision", LOW)
def test_a_trainer_of_one_worker_is_not_rounded(precision, known_owners):
    ensemble, workers = drifted(2, 2)
    exact = update_of("float32", known_owners)(ensemble, workers)
    assert same(update_of(precision, known_owners)(ensemble, workers), exact)


@pytest.mark.parametrize("precision", LOW)
def test_beside_a_trainer_of_several_workers_one_of_one_is_not_rounded(precision):
    ensemble, workers = drifted(3, 4, owner_R=(1, 0, 1, 2))

    def states(precision, m):
        after, _ = update_of(precision)(ensemble, workers)
        states = (after.params_M, after.outer_state_M)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[m], states)

    for m in (0, 2):  # compiled, two programs may join products and sums in different ways
        assert_close(states(precision, m), states("float32", m), rtol=3e-7, atol=3e-8)
    assert not same(states(precision, 1), states("float32", 1))


@pytest.mark.parametrize("precision", LOW)
def test_order_of_workers_changes_nothing(precision):
    ensemble, workers = drifted(1, 4)
    order = np.array([2, 0, 3, 1])
    moved = workers.replace(params_R=jax.tree.map(lambda leaf: leaf[order], workers.params_R))
    plain, norm_M = update_of(precision)(ensemble, workers)
    after, moved_norm_M = update_of(precision)(ensemble, moved)
    assert_close(after.outer_state_M, plain.outer_state_M, atol=1e-8)
    assert_close(moved_norm_M, norm_M)
    for name, leaf in plain.params_M.items():  # but for ties of the second half
        off = np.abs(np.asarray(after.params_M[name] - leaf))
        assert np.mean(off > 1e-6) < 2e-3 and np.max(off) < 0.02


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("precision", LOW)
def test_a_worker_that_is_not_finite_harms_nobody(precision, broken):
    ensemble, workers = drifted(2, 5, owner_R=(0, 0, 0, 1, 1))
    bad = dict(workers.params_R, embed=workers.params_R["embed"].at[1, 5, 5].set(broken))
    after, norm_M = update_of(precision)(ensemble, workers.replace(params_R=bad))
    without, expected_M = update_of(precision)(ensemble, workers, jnp.array([1.0, 0, 1, 1, 1]))
    assert np.isfinite(np.asarray(norm_M)).all()
    assert_close(norm_M, expected_M)
    assert_close(after.outer_state_M, without.outer_state_M, atol=1e-8)
    bad = jax.tree.map(lambda leaf: leaf.at[3:].set(broken), workers.params_R)
    after, norm_M = update_of(precision)(ensemble, workers.replace(params_R=bad))
    assert np.isnan(norm_M).tolist() == [False, True]
    for name in SHAPES:
        assert same(after.params_M[name][1], ensemble.params_M[name][1])


@pytest.mark.parametrize("precision", LOW)
def test_a_round_where_nothing_moved_changes_nothing(precision):
    ensemble, _ = drifted(2, 4)
    after, norm_M = update_of(precision)(ensemble, start_round(ensemble))
    assert same(after.params_M, ensemble.params_M) and norm_M.tolist() == [0, 0]


@pytest.mark.parametrize("precision", LOW)
def test_a_whole_round_takes_a_precision_and_keeps_every_dtype(precision):
    params = {"w": jnp.zeros((6, 6), jnp.bfloat16)}
    inner_tx = optax.sgd(0.1)
    ensemble = init(params, num_trainers=2, num_workers=3, inner_tx=inner_tx, outer_tx=NESTEROV)
    tokens = corpus().rows[:24].reshape(2, 3, 4, -1)

    def step(ensemble, tokens, precision):
        return outer_step(
            ensemble,
            tokens,
            bigram_loss,
            inner_tx=inner_tx,
            outer_tx=NESTEROV,
            precision=precision,
        )

    exact, _ = step(ensemble, tokens, "float32")
    after, _ = step(ensemble, tokens, precision)
    assert shapes_of(after) == shapes_of(ensemble)
    assert not same(after.params_M["w"][0], exact.params_M["w"][0]) or precision == "bfloat16"
    assert same(after.params_M["w"][1], exact.params_M["w"][1])  # the one worker's


# --- What moves


@functools.cache
def sharded(precision, num_trainers, num_workers, model_shards=1):
    """The compiled synchronisation on eight devices, with its arguments' shardings."""
    at = place(num_trainers, num_workers, 4, blocks=True, model_shards=model_shards)
    ensemble, workers = drifted(num_trainers, num_workers)
    states = (at.ensemble(shapes_of(ensemble)), at.by_worker(shapes_of(workers)))
    owners = np.arange(num_workers, dtype=np.int32) * num_trainers // num_workers

    def update(ensemble, workers):
        return outer_update(
            ensemble.replace(owner_R=owners),
            workers,
            outer_tx=NESTEROV,
            precision=precision,
            exchange=at.exchange,
            publish=at.publish,
        )

    shardings = dict(in_shardings=states, out_shardings=(states[0], at.whole))
    jitted = jax.jit(update, **shardings)
    return jitted.lower(shapes_of(ensemble), shapes_of(workers)).compile(), states


def moved_bytes(hlo):
    """Bytes a device receives by collectives, by element type."""
    sizes = {"f32": 4, "s32": 4, "u32": 4, "u16": 2, "bf16": 2, "u8": 1, "s8": 1, "pred": 1}
    operation = r" = (.*?) (?:all-reduce|all-gather|reduce-scatter|collective-\w+|all-to-all)\S*\("
    moved = dict.fromkeys(sizes, 0)
    for result in re.findall(operation, hlo):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", result):
            moved[dtype] += sizes[dtype] * math.prod(map(int, dims.split(","))) if dims else 0
    return moved


LAYOUTS = [(1, 8, 1), (2, 4, 1), (1, 4, 2)]


@pytest.mark.parametrize(("num_trainers", "num_workers", "model_shards"), LAYOUTS)
def test_four_bits_move_a_seventh_and_nothing_large_in_float32(
    num_trainers, num_workers, model_shards
):
    layout = (num_trainers, num_workers, model_shards)
    moved = {p: moved_bytes(sharded(p, *layout)[0].as_text()) for p in ["float32", *LOW]}
    total = {precision: sum(moved[precision].values()) for precision in moved}
    assert total["float32"] >= 7 * total["int4"]
    assert total["float32"] >= 3.7 * total["int8"]
    assert total["float32"] >= 1.99 * total["bfloat16"]
    assert moved["int4"]["u8"] > 0.85 * total["int4"]  # the rest are scales
    assert moved["int8"]["s8"] > 0.9 * total["int8"]
    assert moved["bfloat16"]["u16"] > 0.99 * total["bfloat16"]


@pytest.mark.parametrize(("num_trainers", "num_workers", "model_shards"), LAYOUTS)
@pytest.mark.parametrize("precision", LOW)
def test_sharded_is_unsharded_and_all_copies_agree(
    precision, num_trainers, num_workers, model_shards
):
    ensemble, workers = drifted(num_trainers, num_workers)
    owners = tuple(np.arange(num_workers) * num_trainers // num_workers)
    expected, expected_norm_M = update_of(precision, owners)(ensemble, workers)
    compiled, states = sharded(precision, num_trainers, num_workers, model_shards)
    after, norm_M = compiled(*bring((ensemble, workers), states))
    assert_close(norm_M, expected_norm_M)
    assert_close(after.outer_state_M, expected.outer_state_M, atol=1e-8)
    for name, leaf in after.params_M.items():
        off = np.abs(np.asarray(leaf) - np.asarray(expected.params_M[name]))
        assert np.mean(off > 1e-6) < 2e-3 and np.max(off) < 0.02, name  # ties
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(repr(shard.index), []).append(np.asarray(shard.data))
        assert all(same(some, [some[0]] * len(some)) for some in copies.values())


# --- A run


def run(workdir, settings):
    return fit(
        settings, workdir=workdir, init_fn=init_fn, loss_fn=bigram_loss, corpus=corpus()
    ).workdir


def lines_of(workdir):
    return list(deterministic_lines(read(workdir / "ledger.jsonl")))


@pytest.mark.parametrize("precision", ["float32", *LOW])
def test_a_run_counts_the_bytes_of_its_precision(tmp_path, precision):
    settings = settings_of(
        num_rounds=2,
        ensemble={"num_trainers": 2, "num_workers": 4},
        outer={"precision": precision},
        merge={"every_rounds": 2},
    )
    events = lines_of(run(tmp_path / "run", settings))
    # A table of 6 x 6: one block, of six rows.
    params = jax.eval_shape(init_fn, jax.random.key(0))
    one_way = {"float32": 144, "bfloat16": 72, "int8": 36 + 4, "int4": 18 + 4}[precision]
    assert packed_bytes(params, precision) == one_way
    rounds = [event["bytes"] for event in events if event["event"] == "round"]
    assert rounds == [2 * one_way] * 4
    (merge,) = [event for event in events if event["event"] == "merge"]
    assert merge["bytes"] == 144  # whole parameters


def test_a_run_rounds_what_several_workers_send_and_nothing_else(tmp_path):
    common = {"num_rounds": 3, "merge": {"policy": "none"}}
    for name, num_workers, precision in (
        *(("exact", 3, "float32"), ("alone", 3, "int4")),
        *(("together", 6, "float32"), ("rounded", 6, "int4")),
    ):
        ensemble = {"num_trainers": 3, "num_workers": num_workers}
        run(
            tmp_path / name,
            settings_of(**common, ensemble=ensemble, outer={"precision": precision}),
        )
    assert lines_of(tmp_path / "exact") == lines_of(tmp_path / "alone")
    losses = [
        [event["train_loss"] for event in lines_of(tmp_path / name) if event["event"] == "round"]
        for name in ("together", "rounded")
    ]
    assert losses[0][:3] == losses[1][:3] and losses[0] != losses[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.01)
