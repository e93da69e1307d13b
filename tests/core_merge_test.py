"""Who merges, how workers are divided, and the merge itself: laws, broken members, the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import trees
from hypothesis import example, given
from hypothesis import strategies as st
from trees import assert_equal, rows

import adloco_jax
from adloco_jax import allocate_workers, choose_merge, init

assert_close = functools.partial(trees.assert_close, atol=1e-7)
ADAMW = optax.adamw(0.1)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
BATCHES = st.lists(st.integers(1, 40), min_size=1, max_size=7)


# --- Who merges


@given(BATCHES, st.sampled_from(["worst_with_worst", "best_with_worst"]), st.integers(2, 5))
@example([9, 3, 5, 5], "worst_with_worst", 2)  # ties: the lower position, also to represent
@example([9, 3, 9, 3], "best_with_worst", 2)
@example([2, 6], "worst_with_worst", 5)  # at most all of them
def test_choice_agrees_with_the_oracle(batches, policy, width):
    members = choose_merge(batches, policy=policy, width=width)
    assert list(members) == oracle.merge_members(batches, policy=policy, width=width)


def test_choice_refuses_what_it_does_not_know(unchecked):
    with pytest.raises(ValueError, match="width=1: expected at least 2"):
        choose_merge([1, 2], policy="worst_with_worst", width=1)
    with pytest.raises(ValueError, match="policy='best': expected one of worst_with_worst, best"):
        choose_merge([1, 2], policy="best", width=2)


# --- Who works for whom


@given(BATCHES, st.integers(0, 30))
@example([100, 1, 1], 1)  # at least one each
@example([5, 5, 1, 1, 1], 1)  # ties to the lower position, also where the minimum is paid for
def test_allocation_is_exact_leaves_nobody_out_and_agrees_with_fractions(batches, spare):
    num_workers = len(batches) + spare
    workers = allocate_workers(batches, num_workers)
    assert sum(workers) == num_workers and min(workers) >= 1
    assert list(workers) == oracle.allocated(batches, num_workers)


@pytest.mark.parametrize(
    ("batches", "num_workers", "words"),
    [
        ([4, 4, 4], 2, "num_workers=2 for 3 trainers"),
        ([], 2, "num_workers=2 for 0 trainers"),
        ([4, 0], 2, "requested_batch_sizes=.4, 0.: expected positive"),
    ],
)
def test_impossible_allocations_are_refused(batches, num_workers, words):
    with pytest.raises(ValueError, match=words):
        allocate_workers(batches, num_workers)


# --- The merge


def ensemble_of(num_trainers, owner_R, *, equal=False, outer_tx=NESTEROV):
    """Trainers and workers that differ everywhere, except their Adam counts by trainer."""
    ensemble = init(
        {"w": jnp.zeros((2, 3)), "deep": {"b": jnp.zeros(())}},
        num_trainers=num_trainers,
        num_workers=len(owner_R),
        inner_tx=ADAMW,
        outer_tx=outer_tx,
        owner_R=owner_R,
    )
    rng = np.random.default_rng(0)

    def filled(leaf):
        if leaf.dtype == jnp.int32:
            by_position = np.arange(num_trainers) if len(leaf) == num_trainers else owner_R
            return jnp.asarray(10 * np.asarray(by_position), jnp.int32)
        value = rng.normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(np.broadcast_to(value[:1], leaf.shape) if equal else value)

    return ensemble.replace(
        params_M=jax.tree.map(filled, ensemble.params_M),
        outer_state_M=jax.tree.map(filled, ensemble.outer_state_M),
        inner_state_R=jax.tree.map(filled, ensemble.inner_state_R),
    )


jitted = jax.jit(adloco_jax.merge, static_argnames="members")  # op by op it would compile for long


def merge(ensemble, members, weights):
    return jitted(ensemble, members, weights=jnp.asarray(weights, jnp.float32))


def test_merge_is_the_weighted_mean_and_keeps_the_order_of_the_others():
    ensemble = ensemble_of(4, [0, 1, 2, 3, 3])
    merged = merge(ensemble, (2, 0, 3), weights=(6.0, 1.0, 3.0))
    assert merged.num_trainers == 2
    for before, after in [
        (ensemble.params_M, merged.params_M),
        (ensemble.outer_state_M, merged.outer_state_M),
    ]:
        assert_equal(rows(after, 0), rows(before, 1))
        mean = jax.tree.map(
            lambda leaf: (6.0 * leaf[2:3] + leaf[0:1] + 3.0 * leaf[3:4]) / 10.0,
            rows(before, 0, 1, 2, 3),
        )
        assert_close(rows(after, 1), mean)


def test_merge_moves_the_absorbed_workers_to_the_representative():
    ensemble = ensemble_of(4, [0, 1, 2, 3, 2])
    merged = merge(ensemble, (2, 0), weights=(1, 1))
    assert merged.owner_R.tolist() == [1, 0, 1, 2, 1] and merged.owner_R.dtype == jnp.int32
    # The others and the representative's own keep their state; who joins takes their mean.
    assert_equal(rows(merged.inner_state_R, 1, 2, 3, 4), rows(ensemble.inner_state_R, 1, 2, 3, 4))
    own = rows(ensemble.inner_state_R, 2, 4)
    assert_close(
        rows(merged.inner_state_R, 0), jax.tree.map(lambda leaf: leaf.mean(0, keepdims=True), own)
    )
    assert merged.inner_state_R[0].count.tolist() == [20, 10, 20, 30, 20]


def test_merging_equal_trainers_is_exactly_the_identity():
    ensemble = ensemble_of(3, [0, 1, 2], equal=True)
    merged = merge(ensemble, (1, 2), weights=(0.1, 0.7))
    assert_equal(merged.params_M, rows(ensemble.params_M, 0, 1))
    assert_equal(merged.outer_state_M, rows(ensemble.outer_state_M, 0, 1))


@pytest.mark.parametrize(
    ("broken", "where", "member"),
    [(np.nan, "params_M", 1), (np.inf, "outer_state_M", 0)],
)
def test_member_that_is_not_finite_is_left_out(broken, where, member):
    ensemble = ensemble_of(3, [0, 1, 2])
    sick = jax.tree.map(lambda leaf: leaf.at[member].set(broken), getattr(ensemble, where))
    members, weights = (1, 0, 2), {0: 2.0, 1: 5.0, 2: 3.0}
    merged = merge(
        ensemble.replace(**{where: sick}), members, weights=[weights[m] for m in members]
    )
    a, b = [m for m in range(3) if m != member]
    share = weights[a] / (weights[a] + weights[b])
    mean = jax.tree.map(
        lambda leaf: share * leaf[a : a + 1] + (1 - share) * leaf[b : b + 1],
        rows(ensemble.params_M, 0, 1, 2),
    )
    assert_close(merged.params_M, mean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(merged.outer_state_M))


def test_broken_representative_does_not_hand_on_its_inner_state():
    ensemble = ensemble_of(3, [0, 1, 2, 1])
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
    assert_close(rows(merged.inner_state_R, 0, 2), rows(ensemble.inner_state_R, 0, 2))


@pytest.mark.parametrize("weight", [0.0, np.inf])
def test_member_without_a_usable_weight_is_left_out(weight):
    ensemble = ensemble_of(3, [0, 1, 2])
    merged = merge(ensemble, (0, 1, 2), weights=(3.0, weight, 1.0))
    mean = jax.tree.map(
        lambda leaf: 0.75 * leaf[:1] + 0.25 * leaf[2:], rows(ensemble.params_M, 0, 1, 2)
    )
    assert_close(merged.params_M, mean)


def test_without_any_usable_weight_finite_members_count_alike():
    ensemble = ensemble_of(3, [0, 1, 2])
    sick = jax.tree.map(lambda leaf: leaf.at[0].set(np.nan), ensemble.params_M)
    merged = merge(ensemble.replace(params_M=sick), (0, 1, 2), weights=(0.0, 0.0, np.nan))
    mean = jax.tree.map(lambda leaf: (leaf[1:2] + leaf[2:]) / 2, rows(ensemble.params_M, 0, 1, 2))
    assert_close(merged.params_M, mean)


def test_without_any_finite_member_the_representative_stays_as_it_is():
    ensemble = ensemble_of(2, [0, 1])
    sick = dict(ensemble.params_M, w=ensemble.params_M["w"].at[:, 0, 0].set(np.nan))
    merged = merge(ensemble.replace(params_M=sick), (1, 0), weights=(1.0, 1.0))
    np.testing.assert_array_equal(merged.params_M["w"], sick["w"][1:])
    assert_equal(merged.params_M["deep"], rows(ensemble.params_M["deep"], 1))


def test_spawning_and_averaging_at_once_changes_nothing():
    ensemble = ensemble_of(2, [0, 1, 1])
    spawned = jax.jit(adloco_jax.spawn, static_argnums=(1, 2))(ensemble, 1, 4)
    assert spawned.owners == (0, 1, 1, 1, 1)
    workers = adloco_jax.start_round(spawned)
    after, _ = adloco_jax.outer_update(spawned, workers, outer_tx=optax.sgd(1.0))
    for name in ("params_M", "inner_state_R"):
        expected = getattr(ensemble if name == "params_M" else spawned, name)
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), expected)
    moments_R = spawned.inner_state_R[0].mu["w"]
    np.testing.assert_array_equal(moments_R[:3], ensemble.inner_state_R[0].mu["w"])
    for joined in (3, 4):
        np.testing.assert_allclose(moments_R[joined], moments_R[1:3].mean(axis=0), rtol=1e-6)
    with pytest.raises(ValueError, match="has 2 workers already"):
        adloco_jax.spawn(ensemble, 1, 1)
    with pytest.raises(ValueError, match="out of range"):
        adloco_jax.spawn(ensemble, 2, 4)


def test_whole_numbers_in_the_outer_state_are_the_representatives_own():
    merged = merge(ensemble_of(3, [0, 1, 2], outer_tx=ADAMW), (2, 0), weights=(1, 1))
    assert merged.outer_state_M[0].count.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("members", "weights", "words"),
    [
        ((0,), (1.0,), "members=.0.*expected at least two members"),
        ((0, 1), (1.0,), "weights of shape .1,.*one weight for each"),
        ((0, 0), (1.0, 1.0), "members: expected distinct positions"),
        ((0, 3), (1.0, 1.0), "members: .0, 3. out of range; the stack holds 3"),
        ((-1, 0), (1.0, 1.0), "members: .-1, 0. out of range"),
    ],
)
def test_impossible_merges_are_refused_while_tracing(members, weights, words):
    with pytest.raises(ValueError, match=words):
        merge(ensemble_of(3, [0, 1, 2]), members, weights)


def test_equal_float64_trainers_merge_into_what_they_were():
    """Through float32 they would move by a part in ten million."""
    with jax.enable_x64(True):
        params = np.random.default_rng(0).normal(size=(2, 3))
        tx = optax.sgd(1.0)
        ensemble = init(params, num_trainers=3, num_workers=3, inner_tx=tx, outer_tx=tx)
        merged = merge(ensemble, (2, 0, 1), weights=[3, 1, 2])
        assert merged.params_M.dtype == np.float64
        np.testing.assert_array_equal(merged.params_M[0], params)


def test_keys_of_the_representative_survive_a_merge():
    noisy = optax.add_noise(0.1, 0.5, 0)
    params = {"w": jnp.zeros(2), "key": jax.random.key(3)}
    ensemble = init(params, num_trainers=2, num_workers=2, inner_tx=noisy, outer_tx=noisy)
    keys_M = jax.random.split(jax.random.key(3))
    ensemble = ensemble.replace(params_M=dict(ensemble.params_M, key=keys_M))
    merged = merge(ensemble, (1, 0), weights=[1, 3])
    assert (merged.params_M["key"] == keys_M[1:]).all()
    assert merged.inner_state_R.rng_key.shape == (2,)
