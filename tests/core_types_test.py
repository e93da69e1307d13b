"""Creating the ensemble, reading and writing parts of it, moving workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ensembles import ADAMW, NESTEROV, TXS, batch_of, ensemble_of, filled, loss_fn, params_of
from flax import nnx
from trees import assert_close, assert_equal, at, rows

import adloco_jax
from adloco_jax import State, gradient_stats, outer_step, put, reassign, start_round, take
from adloco_jax.core.merge import move_workers
from adloco_jax.core.types import Ensemble
from adloco_jax.loop.control import Control

init = functools.partial(adloco_jax.init, **TXS)


def different(sizes):
    return filled(ensemble_of(sizes, {"w": jnp.zeros((2, 3))}))


# --- Creation


def test_all_trainers_and_workers_start_alike():
    params = params_of()
    ensemble = init(params, num_trainers=2, num_workers=3)
    assert (ensemble.num_trainers, ensemble.num_workers, int(ensemble.round)) == (2, 3, 0)
    for m in range(2):
        assert_equal(at(ensemble.params_M, m), params)
        assert_equal(at(ensemble.outer_state_M, m), NESTEROV.init(params))
    for r in range(3):
        assert_equal(at(ensemble.inner_state_R, r), ADAMW.init(params))


@pytest.mark.parametrize(
    ("num_trainers", "num_workers", "sizes"),
    [(0, 1, None), (3, 2, None), (2, 3, [3]), (2, 3, [1, 1]), (2, 3, [3, 0])],
)
def test_impossible_ensembles_are_refused(num_trainers, num_workers, sizes):
    words = rf"sizes=.* each of num_trainers={num_trainers}, together num_workers={num_workers}"
    with pytest.raises(ValueError, match=words):
        init(jnp.zeros(2), num_trainers=num_trainers, num_workers=num_workers, sizes=sizes)


@pytest.mark.parametrize(
    ("num_workers", "given", "sizes"),
    [(3, None, (1, 1, 1)), (5, None, (2, 2, 1)), (4, np.array([1, 2, 1]), (1, 2, 1))],
)
def test_workers_are_spread_as_evenly_as_possible_or_as_given(num_workers, given, sizes):
    ensemble = init(jnp.zeros(2), num_trainers=3, num_workers=num_workers, sizes=given)
    assert ensemble.sizes == sizes


# --- Parts


def test_take_and_put_round_trip():
    whole = different([1, 2, 1, 1])
    # Trainers 2 and 1, in that order, have worker 3, then workers 1 and 2.
    call_take, call_put = (
        jax.jit(functools.partial(part, trainers=(2, 1))) for part in (take, put)
    )
    sub = call_take(whole)
    assert sub.sizes == (1, 2)
    assert_equal(sub.params_M, rows(whole.params_M, 2, 1))
    assert_equal(sub.outer_state_M, rows(whole.outer_state_M, 2, 1))
    assert_equal(sub.inner_state_R, rows(whole.inner_state_R, 3, 1, 2))
    assert_equal(call_put(whole, sub=sub), whole)
    changed = jax.tree.map(lambda leaf: leaf + 1, sub)
    after = call_put(whole, sub=changed)
    assert int(after.round) == 1
    assert after.sizes == whole.sizes
    assert_equal(rows(after.params_M, 2, 1), rows(changed.params_M, 0, 1))
    assert_equal(rows(after.params_M, 0, 3), rows(whole.params_M, 0, 3))
    assert_equal(rows(after.outer_state_M, 2, 1), rows(changed.outer_state_M, 0, 1))
    assert_equal(rows(after.inner_state_R, 3, 1, 2), rows(changed.inner_state_R, 0, 1, 2))
    assert_equal(rows(after.inner_state_R, 0, 4), rows(whole.inner_state_R, 0, 4))


def test_run_in_groups_is_one_run():
    step = jax.jit(lambda ensemble, batch: outer_step(ensemble, batch, loss_fn, **TXS))
    whole = grouped = filled(ensemble_of([1, 2, 1]), seed=1)
    for seed in range(2):
        batch = batch_of(2, 4, 3, seed=seed)
        whole, metrics = step(whole, batch)
        start = grouped
        for trainers, workers in [((2, 0), (3, 0)), ((1,), (1, 2))]:
            sub, sub_metrics = step(take(start, trainers), at(batch, slice(None), list(workers)))
            grouped = put(grouped, trainers, sub)
            np.testing.assert_allclose(
                sub_metrics.loss_SR, np.asarray(metrics.loss_SR)[:, list(workers)], rtol=1e-6
            )
    assert int(grouped.round) == 2
    assert_close(grouped, whole)


@pytest.mark.parametrize(
    ("trainers", "words"),
    [
        ((), "trainers: expected distinct positions below 3, at least one"),
        ((1, 1), "trainers: expected distinct positions"),
        ((0, 3), "trainers: expected .* below 3, at least one; got .0, 3."),
        ((1, 2), r"sub has trainers of \(1, 1\) workers, expected \(1, 2\)"),
    ],
)
def test_impossible_parts_are_refused(trainers, words):
    whole = different([1, 1, 2])
    with pytest.raises(ValueError, match=words):
        put(whole, trainers, take(whole, (0, 1)))


# --- Moving workers


def test_workers_stay_move_retire_and_join():
    whole = different([2, 1, 2])
    # Worker 2 retires, 1 and 3 change their trainers; new ones join trainers 2 and 1.
    moved = jax.jit(move_workers, static_argnums=1)(whole, ((0, 3), (1, -1), (-1, 4)))
    assert moved.sizes == (2, 2, 2)
    before, after = whole.inner_state_R, moved.inner_state_R
    assert_equal(rows(after, 0, 5), rows(before, 0, 4))  # kept

    # Joining workers take the mean of the previous workers, whether or not these stay.
    for joined, there in [(1, (0, 1)), (2, (2,)), (3, (2,)), (4, (3, 4))]:
        mean = rows(before, *there)[0].mu["w"].mean(axis=0)
        np.testing.assert_allclose(after[0].mu["w"][joined], mean, rtol=1e-6)
    assert_equal(moved.params_M, whole.params_M)
    assert_equal(moved.outer_state_M, whole.outer_state_M)
    assert isinstance(moved, Ensemble) and int(moved.round) == int(whole.round)


def test_workers_are_divided_anew_by_sizes():
    whole = different([3, 1, 2])
    before = whole.inner_state_R
    divided = {(1, 4, 1): {0: 0, 3: 3, 5: 4}, (2, 2, 2): {0: 0, 1: 1, 3: 3, 4: 4, 5: 5}}
    for sizes, kept in divided.items():
        moved = jax.jit(reassign, static_argnums=1)(whole, sizes)
        assert moved.sizes == sizes
        assert_equal(rows(moved.inner_state_R, *kept), rows(before, *kept.values()))
    assert reassign(whole, (1, 1, 1)).num_workers == 3  # the others retire
    assert reassign(whole, (3, 2, 4)).num_workers == 9  # three are new


def test_joining_worker_rounds_the_count_of_updates():
    whole = different([3, 3])
    counts = jnp.array([4, 5, 5, 8, 8, 9], jnp.int32)
    adam, *rest = whole.inner_state_R
    moved = reassign(whole.replace(inner_state_R=(adam._replace(count=counts), *rest)), (4, 4))
    assert moved.inner_state_R[0].count.tolist() == [4, 5, 5, 5, 8, 8, 9, 8]
    assert moved.inner_state_R[0].count.dtype == jnp.int32


@pytest.mark.parametrize("sizes", [(3,), (1, 1, 1), (3, 0)])
def test_impossible_moves_are_refused(sizes):
    with pytest.raises(ValueError, match="at least one, for each of 2 trainers"):
        reassign(different([1, 2]), sizes)


# --- State that is not a parameter


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "params: expected a pytree with at least one floating-point array"),
        ({"steps": jnp.zeros(2, jnp.int32)}, "at least one floating-point array"),
        ({"w": jnp.zeros(2, jnp.complex64)}, "complex64, expected real numbers"),
        (
            {"params": {"w": jnp.zeros(2)}, "batch_stats": {"mean": jnp.zeros(2)}},
            r"params\['batch_stats'\]\['mean'\]: state that the model changes \(batch_stats\)",
        ),
        (
            nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0))),
            r"params\['mean'\]: state that the model changes \(BatchStat\), not a",
        ),
    ],
)
def test_what_is_no_parameter_is_named(params, words, unchecked):
    with pytest.raises(ValueError, match=words):
        init(params, num_trainers=1, num_workers=1)


def test_what_a_round_returns_has_a_short_repr():
    ensemble = ensemble_of([2, 1], {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)})
    text = "Ensemble(2 trainers, 3 workers, params_M: 20 numbers, float32, in 2 arrays)"
    assert repr(ensemble) == text and repr(jax.tree.map(jnp.shape, ensemble))
    jax.jit(lambda ensemble: [repr(ensemble), ensemble][1])(ensemble)
    assert repr(State(ensemble, Control({}, 1, 1, round=3, tokens_total=5000))) == (
        f"State(round 3, 5,000 tokens, {text})"
    )
    measure = jax.jit(lambda w, x: gradient_stats(lambda w, x: jnp.mean(x @ w), w, x))
    stats = measure(jnp.zeros(2), jnp.eye(2).at[1, 0].set(1))
    short = "GradientStats(num_examples=2, noise=0.5, signal=1)"
    assert repr(stats) == repr(jax.tree.map(np.float64, stats)) == short
    several = jax.tree.map(lambda leaf: leaf[None], stats)
    assert repr(several) == "GradientStats(float32[1] in each field)"
    jax.jit(lambda stats: [repr(stats), stats][1])(stats)


@pytest.mark.parametrize(
    "random",
    [nnx.state(nnx.Dropout(0.1, rngs=nnx.Rngs(0))), {"key": jax.random.key(0)}],
    ids=["nnx", "key"],
)
def test_random_state_among_parameters_is_refused(random):
    params = {"w": jnp.zeros(2), "dropout": random}
    with pytest.raises(ValueError, match=r"^params\['dropout'\].*: random state"):
        ensemble_of([1], params)
    ensemble = ensemble_of([1], {"w": jnp.zeros(2)})
    params_M = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], params)
    with pytest.raises(ValueError, match=r"^params\['dropout'\].*: random state"):
        start_round(ensemble.replace(params_M=params_M))


def test_keys_in_an_optimizers_state_are_taken_put_and_moved():
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))
    whole = init(jnp.zeros(2), num_trainers=2, num_workers=3, inner_tx=noisy, outer_tx=noisy)
    keys_R = jax.random.split(jax.random.key(1), 3)
    state, *rest = whole.inner_state_R
    whole = whole.replace(inner_state_R=(state._replace(rng_key=keys_R), *rest))

    def bits(ensemble):
        return jax.random.key_data(ensemble.inner_state_R[0].rng_key)

    sub = jax.jit(take, static_argnums=1)(whole, (1,))
    np.testing.assert_array_equal(bits(sub), bits(whole)[2:])
    back = jax.jit(put, static_argnums=1)(whole, (1,), sub)
    np.testing.assert_array_equal(bits(back), bits(whole))
    # Workers 0 and 1 belong to the first trainer. A joining worker takes the first worker's key.
    moved = jax.jit(move_workers, static_argnums=1)(whole, ((0, -1), (1, 2)))
    np.testing.assert_array_equal(bits(moved), bits(whole)[np.array([0, 0, 2, 2])])
