"""Creating the ensemble, reading and writing parts of it, moving workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ensembles import ADAMW, NESTEROV, TXS, ensemble_of, filled, params_of
from flax import nnx
from trees import assert_equal, at, rows

import adloco_jax
from adloco_jax import State, gradient_stats, put, reassign, start_round, take
from adloco_jax.core.merge import move_workers
from adloco_jax.core.types import Ensemble
from adloco_jax.loop.control import Control

init = functools.partial(adloco_jax.init, **TXS)
W = jnp.zeros(2)


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
    for sizes in ((1, 1, 1), (3, 2, 4)):  # three retire; three are new
        assert jax.eval_shape(lambda e, sizes=sizes: reassign(e, sizes), whole).sizes == sizes


def test_joining_worker_rounds_the_count_of_updates():
    whole = different([3, 3])
    counts = jnp.array([4, 5, 5, 8, 8, 9], jnp.int32)
    adam, *rest = whole.inner_state_R
    whole = whole.replace(inner_state_R=(adam._replace(count=counts), *rest))
    moved = jax.jit(reassign, static_argnums=1)(whole, (4, 4))
    assert moved.inner_state_R[0].count.tolist() == [4, 5, 5, 5, 8, 8, 9, 8]
    assert moved.inner_state_R[0].count.dtype == jnp.int32


# --- State that is not a parameter


def new(params=W, num_trainers=2, num_workers=3, sizes=None):
    return lambda: init(params, num_trainers=num_trainers, num_workers=num_workers, sizes=sizes)


def put_taken(trainers):
    whole = different([1, 1, 2])
    return lambda: put(whole, trainers, take(whole, (0, 1)))


NORM = nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
REFUSED = [
    *((new(W, *how), "sizes=.* each of num_trainers=") for how in ((0, 1), (3, 2))),
    *((new(sizes=sizes), "sizes=.* together num_workers=3") for sizes in ([3], [1, 1], [3, 0])),
    (put_taken(()), "trainers: expected distinct positions below 3, at least one"),
    (put_taken((1, 1)), "trainers: expected distinct positions"),
    (put_taken((0, 3)), "trainers: expected .* below 3, at least one; got .0, 3."),
    (put_taken((1, 2)), r"sub has trainers of \(1, 1\) workers, expected \(1, 2\)"),
    *(
        (lambda sizes=sizes: reassign(different([1, 2]), sizes), "at least one, for each of 2 tr")
        for sizes in ((3,), (1, 1, 1), (3, 0))
    ),
    (new({}), "params: expected a pytree with at least one floating-point array"),
    (new({"steps": jnp.zeros(2, jnp.int32)}), "at least one floating-point array"),
    (new({"w": jnp.zeros(2, jnp.complex64)}), "complex64, expected real numbers"),
    (
        new({"params": {"w": W}, "batch_stats": {"mean": W}}),
        r"params\['batch_stats'\]\['mean'\]: state that the model changes \(batch_stats\)",
    ),
    (new(NORM), r"params\['mean'\]: state that the model changes \(BatchStat\), not a"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_impossible_is_refused(call, words, unchecked):
    with pytest.raises(ValueError, match=words):
        call()


def test_what_a_round_returns_has_a_short_repr():
    ensemble = ensemble_of([2, 1], {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)})
    text = "Ensemble(2 trainers, 3 workers, params_M: 20 numbers, float32, in 2 arrays)"
    assert repr(ensemble) == text and repr(jax.tree.map(jnp.shape, ensemble))
    state = State(ensemble, Control({}, 1, 1, round=3, tokens_total=5000))
    assert repr(state) == f"State(round 3, 5,000 tokens, {text})"
    measure = jax.jit(lambda w, x: gradient_stats(lambda w, x: jnp.mean(x @ w), w, x))
    stats = measure(W, jnp.eye(2).at[1, 0].set(1))
    assert repr(stats) == "GradientStats(num_examples=2, noise=0.5, signal=1)"
    several = jax.tree.map(lambda leaf: leaf[None], stats)
    assert repr(several) == "GradientStats(float32[1] in each field)"
    jax.jit(lambda *traced: [repr(traced), traced][1])(ensemble, stats)


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
