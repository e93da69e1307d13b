"""A quantised synchronisation: its result, and the bytes between eight devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ensembles import NESTEROV, SGD, draw, ensemble_of
from trees import assert_close, same

from adloco_jax import apply_differences, outer_update, pack_differences, start_round
from adloco_jax.core.compress import unpack
from adloco_jax.core.outer import add_packed
from adloco_jax.core.types import Workers
from adloco_jax.engine.sharding import arrange, reshard

LOW = ["bfloat16", "int4"]
SHAPES = {"embed": (257, 64), "up": (2, 64, 256), "norm": (2, 64), "gain": ()}


def shapes_of(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@functools.cache
def drifted(*sizes):
    """An ensemble with momentum after a round; no two workers have equal parameters."""
    ensemble = ensemble_of(sizes, draw(SHAPES), inner_tx=SGD)
    ensemble = ensemble.replace(
        params_M=jax.tree.map(jnp.asarray, draw(SHAPES, len(sizes), seed=1))
    )
    workers, drift_R = start_round(ensemble), draw(SHAPES, sum(sizes), seed=2)
    params_R = jax.tree.map(lambda leaf, by: leaf + 0.01 * by, workers.params_R, drift_R)
    return ensemble, workers.replace(params_R=params_R)


@functools.cache
def pack_of(precision):
    return jax.jit(functools.partial(pack_differences, precision=precision))


@functools.cache
def update_of(precision):
    return jax.jit(functools.partial(outer_update, outer_tx=NESTEROV, precision=precision))


def assert_close_but_for_ties(params, expected):
    """Compares up to one code where rounding nearly ties: the last bit decides there."""
    for name, leaf in expected.items():
        off = np.abs(np.asarray(params[name]) - np.asarray(leaf))
        assert np.mean(off > 1e-6) < 2e-3 and np.max(off) < 0.02, name


# --- What it computes


@pytest.mark.parametrize("precision", ["float32", "int4"])
def test_workers_in_programs_of_their_own_send_what_the_outer_update_takes(precision):
    """Each worker packs alone. A missing worker counts like one that is not finite."""
    ensemble, workers = drifted(3, 2, 1)
    form = functools.partial(pack_differences, precision=precision, single_R=[False])
    pack, sent = jax.jit(form), []
    for worker, trainer in enumerate([0, 0, 0, 1, 1, 2]):
        own = ensemble.replace(
            params_M=jax.tree.map(lambda leaf, m=trainer: leaf[m : m + 1], ensemble.params_M),
            sizes=(1,),
        )
        params_R = jax.tree.map(lambda leaf, w=worker: leaf[w : w + 1], workers.params_R)
        sent.append(pack(own, Workers(params_R, None)))
    packed_R = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[s.packed_R for s in sent])
    together = pack_of(precision)(ensemble, workers)
    assert same(packed_R, together.packed_R)
    missing_R = jnp.arange(6) == 3
    assert bool(together.usable_R.all())
    take = jax.jit(functools.partial(apply_differences, outer_tx=NESTEROV, precision=precision))
    after, norm_M = take(ensemble, together._replace(usable_R=~missing_R))
    broken = jax.tree.map(lambda leaf: leaf.at[3].set(jnp.nan), workers.params_R)
    expected, expected_M = update_of(precision)(ensemble, workers.replace(params_R=broken))
    assert_close_but_for_ties(after.params_M, expected.params_M)
    np.testing.assert_allclose(norm_M, expected_M, rtol=1e-6)
    assert int(after.round) == 1


@pytest.mark.parametrize("precision", ["float32", "int4"])
def test_a_factor_multiplies_what_a_worker_has_sent(precision):
    ensemble, workers = drifted(3, 2, 1)
    factor_R = jnp.array([1.0, 0.25, 0.5, 0.125, 0.75, 0.5])
    sent = pack_of(precision)(ensemble, workers)
    apply = jax.jit(functools.partial(apply_differences, outer_tx=NESTEROV, precision=precision))
    _, norm_M = apply(ensemble, sent, factor_R=factor_R)
    found_R = jax.device_get(unpack(sent.packed_R, workers.params_R, precision))
    if sent.exact_W is not None:
        for name, exact in sent.exact_W.items():
            found_R[name] = np.concatenate([found_R[name][:5], exact])
    for m, members in enumerate(ensemble.workers):
        square = 0.0
        for leaf in found_R.values():
            mean = np.mean([factor_R[r] * np.asarray(leaf[r]) for r in members], axis=0)
            square += np.sum(np.square(mean))
        assert norm_M[m] == pytest.approx(math.sqrt(square), rel=1e-5)


@pytest.mark.parametrize("precision", LOW)
def test_the_updates_that_are_sent_give_the_same_bits_everywhere(precision):
    """NumPy rounds the product before the sum, which a compiler may fuse."""
    ensemble, workers = drifted(*EVEN)

    @jax.jit
    def update(ensemble, workers):
        sent = []
        how = {"outer_tx": NESTEROV, "precision": precision}
        after, _ = outer_update(
            ensemble, workers, all_gather=lambda packed: sent.append(packed) or packed, **how
        )
        return after.params_M, sent[0]

    params_M, packed_M = update(ensemble, workers)
    assert same(add_packed(ensemble.params_M, packed_M, precision), params_M)
    arrived_M = jax.device_get(unpack(packed_M, ensemble.params_M, precision))
    start_M = jax.device_get(ensemble.params_M)
    assert same(jax.tree.map(np.add, start_M, arrived_M), jax.device_get(params_M))


EVEN = (3, 3)  # one program for most tests below


@pytest.mark.parametrize("sizes", [EVEN, (5, 3)], ids=str)
def test_both_halves_are_rounded_and_the_mean_is_not(sizes):
    ensemble, workers = drifted(*sizes)
    after, norm_M = update_of("int4")(ensemble, workers)
    rounded = functools.partial(oracle.in_blocks, largest_code=7, most=128)
    for m, members in enumerate(ensemble.workers):
        square = 0.0
        for name in SHAPES:
            start = np.asarray(ensemble.params_M[name][m])
            ends = [np.asarray(workers.params_R[name][r]) for r in members]
            mean = np.mean([rounded(start - end)[0] for end in ends], axis=0)
            square += np.sum(np.square(mean))
            # The outer optimizer sees the mean, except for ties: fewer than one entry in a
            # thousand.
            seen = np.asarray(after.outer_state_M[0].trace[name][m])
            assert np.mean(~np.isclose(seen, mean, rtol=1e-5, atol=1e-8)) < 1e-3, name
            sent, scales = rounded(-0.7 * 1.9 * mean)
            actual = np.asarray(after.params_M[name][m])
            off = np.abs(actual - (start + sent))
            assert np.mean(off > 1e-6) < 2e-3, name
            assert np.all(off <= 1.001 * scales + 1e-6), name
        np.testing.assert_allclose(norm_M[m], math.sqrt(square), rtol=1e-5)


def test_beside_a_trainer_of_several_workers_one_of_one_is_not_rounded():
    ensemble, workers = drifted(1, 2, 1)

    def states(precision, m):
        after, _ = update_of(precision)(ensemble, workers)
        states = (after.params_M, after.outer_state_M)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[m], states)

    for m in (0, 2):  # two compiled programs may fuse products and sums differently
        assert_close(states("int4", m), states("float32", m), rtol=3e-7, atol=3e-8)
    assert not same(states("int4", 1), states("float32", 1))


def test_order_of_workers_and_a_round_without_updates_change_nothing():
    ensemble, workers = drifted(*EVEN)
    order = np.array([2, 0, 1, 4, 3, 5])
    moved = workers.replace(params_R=jax.tree.map(lambda leaf: leaf[order], workers.params_R))
    plain, norm_M = update_of("int4")(ensemble, workers)
    after, moved_norm_M = update_of("int4")(ensemble, moved)
    assert_close(after.outer_state_M, plain.outer_state_M, atol=1e-8)
    assert_close(moved_norm_M, norm_M)
    assert_close_but_for_ties(after.params_M, plain.params_M)
    after, norm_M = update_of("int4")(ensemble, start_round(ensemble))
    assert same(after.params_M, ensemble.params_M) and norm_M.tolist() == [0, 0]


# --- What moves


def test_sharded_is_unsharded_and_all_copies_agree():
    """Two trainers of two workers, each on two devices."""
    sizes = (2, 2)
    ensemble, workers = drifted(*sizes)
    expected, expected_norm_M = update_of("int4")(ensemble, workers)
    shapes = tuple(map(shapes_of, (ensemble, workers)))
    at = arrange(sizes, 4, devices=jax.devices(), model_shards=2)
    states = (at.ensemble(shapes[0]), at.by_worker(shapes[1]))
    update = functools.partial(
        outer_update,
        outer_tx=NESTEROV,
        precision="int4",
        reduce_scatter=at.reduce_scatter,
        all_gather=at.all_gather,
    )
    jitted = jax.jit(update, in_shardings=states, out_shardings=(states[0], at.replicated))
    compiled = jitted.lower(*shapes).compile()
    after, norm_M = compiled(*reshard((ensemble, workers), states))
    assert_close(norm_M, expected_norm_M)
    assert_close(after.outer_state_M, expected.outer_state_M, atol=1e-8)
    assert_close_but_for_ties(after.params_M, expected.params_M)
    for leaf in after.params_M.values():
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(repr(shard.index), []).append(np.asarray(shard.data))
        assert all(same(some, [some[0]] * len(some)) for some in copies.values())
