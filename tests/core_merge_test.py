"""The choice of members, the division of workers, and the merge: laws, broken members, oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import trees
from ensembles import ADAMW, PLAIN, ensemble_of, filled
from hypothesis import example, given
from hypothesis import strategies as st
from trees import assert_equal, at, rows

import adloco_jax
from adloco_jax import allocate_workers, choose_merge

assert_close = functools.partial(trees.assert_close, atol=1e-7)
BATCHES = st.lists(st.integers(1, 40), min_size=1, max_size=7)


# --- Who merges


@given(BATCHES, st.sampled_from(["worst_with_worst", "best_with_worst"]), st.integers(2, 5))
# ties go to the lower position, for the representative too
@example([9, 3, 5, 5], "worst_with_worst", 2)
@example([9, 3, 9, 3], "best_with_worst", 2)
@example([2, 6], "worst_with_worst", 5)  # at most all trainers
def test_choice_agrees_with_the_oracle(batches, policy, width):
    members = choose_merge(batches, policy=policy, width=width)
    assert list(members) == oracle.merge_members(batches, policy=policy, width=width)


# --- The division of workers


@given(BATCHES, st.integers(0, 30))
@example([100, 1, 1], 1)  # at least one worker each
@example([5, 5, 1, 1, 1], 1)  # ties go to the lower position, also for the minimum of one
def test_allocation_is_exact_leaves_nobody_out_and_agrees_with_fractions(batches, spare):
    num_workers = len(batches) + spare
    workers = allocate_workers(batches, num_workers)
    assert sum(workers) == num_workers and min(workers) >= 1
    assert list(workers) == oracle.allocated(batches, num_workers)


# --- The merge


def different(sizes, **txs):
    params = {"w": jnp.zeros((2, 3)), "deep": {"b": jnp.zeros(())}}
    return filled(ensemble_of(sizes, params, average=True, **txs))


TRAINERS = different([1, 1, 1])
# without jit each operation compiles separately
jitted = jax.jit(adloco_jax.merge, static_argnames="members")


def merge(ensemble, members, weights):
    return jitted(ensemble, members, weights=jnp.asarray(weights, jnp.float32))


@pytest.mark.parametrize(
    ("broken", "where", "member", "weights", "shares"),
    [
        (0, "params_M", 1, (6, 1, 3), (0.6, 0.1, 0.3)),
        (np.nan, "params_M", 2, (5, 2, 3), (0, 0.4, 0.6)),  # the representative
        (np.inf, "outer_state_M", 0, (5, 2, 3), (0.625, 0, 0.375)),
        (0, "params_M", 1, (3, 0, 1), (0.75, 0, 0.25)),
        (0, "params_M", 1, (3, np.inf, 1), (0.75, 0, 0.25)),
        (np.nan, "params_M", 0, (0, 0, np.nan), (0.5, 0, 0.5)),  # no usable weight: equal weights
    ],
)
def test_merge_is_the_weighted_mean_of_usable_members_and_keeps_the_order_of_the_others(
    broken, where, member, weights, shares
):
    ensemble, members = different([1, 1, 1, 2]), (2, 0, 3)
    sick = jax.tree.map(lambda leaf: leaf.at[member].add(broken), getattr(ensemble, where))
    merged = merge(ensemble.replace(**{where: sick}), members, weights)
    assert merged.num_trainers == 2
    for name in ("params_M", "outer_state_M", "average_M"):
        before, after = getattr(ensemble, name), getattr(merged, name)
        mean = jax.tree.map(
            lambda leaf: np.tensordot(shares, np.asarray(leaf)[list(members)], 1), before
        )
        assert_equal(at(after, 0), at(before, 1))
        assert_close(at(after, 1), mean)


def test_merge_moves_the_absorbed_workers_to_the_representative():
    ensemble = different([1, 1, 2, 1])
    merged = merge(ensemble, (2, 0), weights=(1, 1))
    assert merged.sizes == (1, 3, 1)
    # The other workers and the representative's keep their states; joining workers take the mean.
    assert_equal(rows(merged.inner_state_R, 0, 1, 2, 4), rows(ensemble.inner_state_R, 1, 2, 3, 4))
    own = rows(ensemble.inner_state_R, 2, 3)
    assert_close(
        rows(merged.inner_state_R, 3), jax.tree.map(lambda leaf: leaf.mean(0, keepdims=True), own)
    )
    assert merged.inner_state_R[0].count.tolist() == [10, 20, 30, 25, 40]


def test_merging_equal_trainers_is_exactly_the_identity():
    def alike(leaf_M):
        return jnp.broadcast_to(leaf_M[:1], leaf_M.shape)

    ensemble = different([1, 1, 1])
    ensemble = ensemble.replace(
        params_M=jax.tree.map(alike, ensemble.params_M),
        outer_state_M=jax.tree.map(alike, ensemble.outer_state_M),
        average_M=jax.tree.map(alike, ensemble.average_M),
    )
    merged = merge(ensemble, (1, 2), weights=(0.1, 0.7))
    assert_equal(merged.params_M, rows(ensemble.params_M, 0, 1))
    assert_equal(merged.outer_state_M, rows(ensemble.outer_state_M, 0, 1))


def test_broken_representative_does_not_hand_on_its_inner_state():
    ensemble = different([1, 2, 1])
    sick = ensemble.replace(
        params_M=jax.tree.map(lambda leaf: leaf.at[1].set(np.nan), ensemble.params_M),
        inner_state_R=jax.tree.map(
            lambda leaf: leaf if leaf.dtype == jnp.int32 else leaf.at[1].set(np.nan),
            ensemble.inner_state_R,
        ),
    )
    merged = merge(sick, (1, 2), weights=(3.0, 1.0))
    assert_close(rows(merged.params_M, 1), rows(ensemble.params_M, 2))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(merged.inner_state_R))
    assert_close(rows(merged.inner_state_R, 0, 3), rows(ensemble.inner_state_R, 0, 3))


def test_spawning_and_averaging_at_once_changes_nothing():
    ensemble = different([1, 2])
    spawned = jax.jit(adloco_jax.spawn, static_argnums=(1, 2))(ensemble, 1, 4)
    assert spawned.sizes == (1, 4)
    assert_equal(spawned.average_M, ensemble.average_M)
    spawned = spawned.replace(outer_state_M=PLAIN.init(None))
    update = jax.jit(functools.partial(adloco_jax.outer_update, outer_tx=PLAIN))
    after, _ = update(spawned, adloco_jax.start_round(spawned))
    for name in ("params_M", "inner_state_R"):
        expected = getattr(ensemble if name == "params_M" else spawned, name)
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), expected)
    moments_R = spawned.inner_state_R[0].mu["w"]
    np.testing.assert_array_equal(moments_R[:3], ensemble.inner_state_R[0].mu["w"])
    for joined in (3, 4):
        np.testing.assert_allclose(moments_R[joined], moments_R[1:3].mean(axis=0), rtol=1e-6)


def constants(tx):
    """`tx` with constants in its state: the mean of three 0.1 is not 0.1, that of inf is NaN."""

    def init(params):
        return tx.init(params), np.float32([0.1, 0.7]), np.float32(np.inf)

    def update(grads, state, params):
        updates, inside = tx.update(grads, state[0], params)
        return updates, (inside, *state[1:])

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "move",
    [
        lambda e: adloco_jax.merge(e, (1, 0, 2), weights=(0.1, 0.7, 0.3)),
        lambda e: adloco_jax.spawn(e, 0, 5),
        lambda e: adloco_jax.reassign(e, (2, 1, 3)),
    ],
    ids=["merge", "spawn", "reassign"],
)
def test_a_state_that_is_equal_in_all_members_is_taken_and_not_averaged(move):
    txs = {name: constants(tx) for name, tx in (("inner_tx", ADAMW), ("outer_tx", PLAIN))}
    ensemble = ensemble_of([3, 1, 1], {"w": jnp.zeros(3)}, **txs)
    params_M = {"w": jnp.float32([[1, 2, 4], [2, 4, 8], [3, 6, 12]])}
    moved = jax.jit(move)(ensemble.replace(params_M=params_M))
    for state in (moved.inner_state_R, moved.outer_state_M):
        for row in range(len(state[2])):
            assert_equal(at(state[1:], row), (np.float32([0.1, 0.7]), np.float32(np.inf)))
    if moved.num_trainers == 1:
        mean = 0.7 * 1 + 0.1 * 2 + 0.3 * 3
        np.testing.assert_allclose(moved.params_M["w"][0], mean / 1.1 * np.float32([1, 2, 4]), 1e-6)


def test_whole_numbers_in_the_outer_state_are_the_representatives_own():
    merged = merge(different([1, 1, 1], outer_tx=ADAMW), (2, 0), weights=(1, 1))
    assert merged.outer_state_M[0].count.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (allocate_workers, ([4, 4, 4], 2), "num_workers=2 for 3 trainers"),
        (allocate_workers, ([], 2), "num_workers=2 for 0 trainers"),
        (adloco_jax.spawn, (different([1, 2]), 1, 1), "has 2 workers already"),
        (adloco_jax.spawn, (TRAINERS, 3, 4), "positions below 3"),
        (merge, (TRAINERS, (0,), (1.0,)), "members=.0.*expected at least two members"),
        (merge, (TRAINERS, (0, 1), (1.0,)), "weights of shape .1,.*one weight for each"),
        (merge, (TRAINERS, (0, 0), (1.0, 1.0)), "members: expected distinct positions"),
        (merge, (TRAINERS, (0, 3), (1, 1)), "members: expected .* below 3, .* got .0, 3."),
        (merge, (TRAINERS, (-1, 0), (1.0, 1.0)), "members: expected .* got .-1, 0."),
    ],
)
def test_what_is_impossible_is_refused(function, arguments, words):
    with pytest.raises(ValueError, match=words):
        function(*arguments)


def test_equal_float64_trainers_merge_into_what_they_were():
    """In float32 they would change by one part in ten million."""
    with jax.enable_x64(True):
        params = np.random.default_rng(0).normal(size=(2, 3))
        ensemble = ensemble_of([1, 1, 1], params, inner_tx=PLAIN, outer_tx=PLAIN)
        merged = merge(ensemble, (2, 0, 1), weights=[3, 1, 2])
        assert merged.params_M.dtype == np.float64
        np.testing.assert_array_equal(merged.params_M[0], params)


def test_keys_of_the_representative_survive_a_merge():
    noisy = optax.add_noise(0.1, 0.5, 0)
    ensemble = ensemble_of([1, 1], {"w": jnp.zeros(2)}, inner_tx=noisy, outer_tx=noisy)
    keys_M = jax.random.split(jax.random.key(3))
    state_M = ensemble.outer_state_M._replace(rng_key=keys_M)
    merged = merge(ensemble.replace(outer_state_M=state_M), (1, 0), weights=[1, 3])
    assert (merged.outer_state_M.rng_key == keys_M[1:]).all()
    assert merged.inner_state_R.rng_key.shape == (2,)
