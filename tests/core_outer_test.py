"""One round: the laws, the written-out oracle, shapes, sharding and the compiled loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import oracle
import pytest
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_close, assert_equal, at, same

from adloco_jax import init, inner_steps, outer_step, outer_update, start_round

ADAMW = optax.adamw(0.05, weight_decay=0.1)
SGD = optax.sgd(0.1)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
PLAIN = optax.sgd(1.0)  # the outer step that takes the workers' mean as it is


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(3, 2)).astype(np.float32),
        "b": rng.normal(size=2).astype(np.float32),
        "scale": np.float32(0.7 + 0.1 * seed),
    }


def loss_fn(params, batch):
    output = jnp.tanh(batch["x"] @ params["w"] + params["b"][None]) * params["scale"]
    return jnp.mean(jnp.square(output - batch["y"]))


grad_fn = jax.jit(jax.grad(loss_fn))


def batch_of(*shape, seed=1):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(*shape, 3)).astype(np.float32),
        "y": rng.normal(size=(*shape, 2)).astype(np.float32),
    }


@functools.cache
def step_of(inner_tx, outer_tx, *, jit=True, num_accum_steps=1):
    def step(ensemble, batch, **kwargs):
        return outer_step(
            ensemble,
            batch,
            loss_fn,
            inner_tx=inner_tx,
            outer_tx=outer_tx,
            num_accum_steps=num_accum_steps,
            **kwargs,
        )

    return jax.jit(step) if jit else step


@functools.cache
def inner_steps_of(inner_tx, **fixed):
    return jax.jit(
        lambda workers, batch, **kwargs: inner_steps(
            workers, batch, loss_fn, inner_tx=inner_tx, **fixed, **kwargs
        )
    )


def plain_updates(tx, params, batches):
    """The optimizer on its own; `batches` one after the other."""
    state = tx.init(params)
    for batch in batches:
        updates, state = jax.jit(tx.update)(grad_fn(params, batch), state, params)
        params = at(optax.apply_updates(params, updates))
    return params, state


def different_trainers(num_trainers, owner_R, inner_tx=ADAMW, outer_tx=NESTEROV, seed=0):
    ensemble = init(
        params_of(),
        num_trainers=num_trainers,
        num_workers=len(owner_R),
        inner_tx=inner_tx,
        outer_tx=outer_tx,
        owner_R=owner_R,
    )
    each = [params_of(seed + m) for m in range(num_trainers)]
    return ensemble.replace(params_M=jax.tree.map(lambda *ms: jnp.asarray(np.stack(ms)), *each))


# --- Laws


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("accumulates", [False, True])
def test_workers_in_turn_are_workers_at_once(accumulates, parallelism):
    """Also where the number at once does not divide them, and with a worker that skips."""
    batch = batch_of(4, 4, 3)
    batch["y"][1, 2, 0] = np.nan
    data = {"learning_rate_TR": jnp.asarray(np.linspace(0.1, 1.0, 16).reshape(4, 4), jnp.float32)}
    if accumulates:
        data["update_T"] = jnp.asarray([0, 1, 0, 0], bool)
    workers = start_round(different_trainers(2, [0, 1, 1, 1]), accumulate=accumulates)
    at_once = inner_steps_of(ADAMW)(workers, batch, **data)
    in_turn = inner_steps_of(ADAMW, worker_parallelism=parallelism)(workers, batch, **data)
    assert np.isnan(at_once[1]).any() and at_once[2].any()
    assert_close(in_turn, at_once)


@pytest.mark.parametrize("limit", [2, 5])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_batch_in_passes_is_the_whole_batch(accumulates, limit):
    """Also where the limit does not divide it, and with a worker that skips."""
    batch = batch_of(4, 2, 6)
    batch["y"][1, 1, 4] = np.nan
    data = {"update_T": jnp.asarray([0, 1, 0, 1], bool)} if accumulates else {}
    workers = start_round(different_trainers(2, [0, 1]), accumulate=accumulates)
    whole = inner_steps_of(ADAMW)(workers, batch, **data)
    passes = inner_steps_of(ADAMW, examples_per_pass=limit)(workers, batch, **data)
    np.testing.assert_array_equal(whole[2].any(axis=0), [False, True])
    assert_close(passes, whole)


def test_the_gradients_of_passes_are_summed_in_float32():
    """512 of one each, on a bfloat16 parameter: bfloat16's own sum would stay at 256."""
    ensemble = init(jnp.bfloat16(0), num_trainers=1, num_workers=1, inner_tx=PLAIN, outer_tx=PLAIN)
    workers, *_ = inner_steps(
        start_round(ensemble),
        jnp.ones((1, 1, 512), jnp.bfloat16),
        lambda param, batch: jnp.mean(param * batch),
        inner_tx=PLAIN,
        examples_per_pass=1,
    )
    assert workers.params_R.dtype == jnp.bfloat16
    assert workers.params_R.tolist() == [-1]


@pytest.mark.parametrize("name", ["worker_parallelism", "examples_per_pass"])
def test_nothing_at_once_is_refused(name):
    workers = start_round(different_trainers(1, [0]))
    with pytest.raises(ValueError, match=f"{name}=0: expected at least 1"):
        inner_steps_of(ADAMW, **{name: 0})(workers, batch_of(1, 1, 2))


@pytest.mark.parametrize(("inner_tx", "num_updates", "jit"), [(SGD, 1, False), (ADAMW, 5, True)])
def test_single_worker_outer_lr_one_is_the_inner_optimizer_alone(inner_tx, num_updates, jit):
    ensemble = different_trainers(2, [1, 0], inner_tx, PLAIN)
    batch = batch_of(num_updates, 2, 4)
    after, _ = step_of(inner_tx, PLAIN, jit=jit)(ensemble, batch)
    for worker, trainer in enumerate([1, 0]):
        batches = [at(batch, s, worker) for s in range(num_updates)]
        params, state = plain_updates(inner_tx, params_of(trainer), batches)
        assert_close(at(after.params_M, trainer), params, rtol=3e-7, atol=3e-7)
        assert_close(at(after.inner_state_R, worker), state, rtol=3e-6, atol=1e-7)


def test_zero_inner_learning_rate_gives_a_pseudo_gradient_of_exactly_zero():
    ensemble, step = different_trainers(2, [0, 0, 1]), step_of(ADAMW, NESTEROV, num_accum_steps=2)
    rates = jnp.zeros((3, 3))
    after, metrics = step(ensemble, batch_of(3, 3, 4), learning_rate_SR=rates)
    assert_equal(after.params_M, ensemble.params_M)
    assert_equal(metrics.pseudo_grad_norm_M, jnp.zeros(2))


def test_accumulated_micro_batches_are_one_large_batch():
    ensemble, batch = different_trainers(2, [0, 1, 1]), batch_of(3, 3, 6)
    whole = step_of(ADAMW, NESTEROV)(ensemble, batch)
    split = step_of(ADAMW, NESTEROV, num_accum_steps=3)(ensemble, batch)
    assert_close(split, whole)


def test_data_parallel_form_is_adamw_on_the_union_batch():
    # Inner SGD with lr 1 and one step: the pseudo-gradient is the gradient of the union batch.
    inner_tx, outer_tx = optax.sgd(1.0), optax.adamw(0.05, weight_decay=0.1)
    ensemble = init(
        params_of(), num_trainers=1, num_workers=4, inner_tx=inner_tx, outer_tx=outer_tx
    )
    batches = [batch_of(1, 4, 3, seed=seed) for seed in range(5)]
    for batch in batches:
        ensemble, _ = step_of(inner_tx, outer_tx)(ensemble, batch)
    unions = [jax.tree.map(lambda leaf: leaf.reshape(12, -1), batch) for batch in batches]
    params, _ = plain_updates(outer_tx, params_of(), unions)
    assert_close(at(ensemble.params_M, 0), params)


def test_stacked_trainers_are_a_loop_over_them_in_any_order_of_workers():
    owner_R, num_trainers, step = [0, 1, 0], 2, step_of(ADAMW, NESTEROV)
    batches = [batch_of(2, len(owner_R), 4, seed=seed) for seed in (1, 2)]
    together = different_trainers(num_trainers, owner_R)
    for batch in batches:
        together, metrics = step(together, batch)
    for m in range(num_trainers):
        mine = np.flatnonzero(np.array(owner_R) == m)
        alone = init(
            params_of(m), num_trainers=1, num_workers=len(mine), inner_tx=ADAMW, outer_tx=NESTEROV
        )
        for batch in batches:
            alone, alone_metrics = step(alone, at(batch, slice(None), mine))
        assert_close(at(together.params_M, m), at(alone.params_M, 0))
        assert_close(at(metrics.loss_SR, slice(None), mine), alone_metrics.loss_SR)
        assert_close(at(metrics.pseudo_grad_norm_M, m), at(alone_metrics.pseudo_grad_norm_M, 0))


# --- The written-out algorithm


@pytest.mark.parametrize(("num_accum_steps", "outer"), [(1, "adamw"), (3, "nesterov")])
def test_several_rounds_agree_with_the_oracle(num_accum_steps, outer):
    vocab, micro, num_updates, owners = 5, 2, 3, [0, 0, 1]
    rng = np.random.default_rng(0)
    table = rng.normal(size=(vocab, vocab))
    inner_tx = optax.adamw(0.03, weight_decay=0.2)
    outer_tx = NESTEROV if outer == "nesterov" else optax.adamw(0.3, weight_decay=0.05)
    ensemble = init(
        {"w": jnp.asarray(table, jnp.float32)},
        num_trainers=2,
        num_workers=3,
        inner_tx=inner_tx,
        outer_tx=outer_tx,
        owner_R=owners,
    )

    def bigram_loss(params, tokens):
        logits = params["w"][tokens[:, :-1]]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def step(ensemble, tokens):
        return outer_step(
            ensemble,
            tokens,
            bigram_loss,
            inner_tx=inner_tx,
            outer_tx=outer_tx,
            num_accum_steps=num_accum_steps,
        )

    step = jax.jit(step)
    params = [table.copy(), table.copy()]
    velocity = [np.zeros_like(table) if outer == "nesterov" else oracle.adamw_start(table)] * 2
    inner = [oracle.adamw_start(table) for _ in owners]
    for _ in range(3):
        tokens = rng.integers(0, vocab, size=(num_updates, 3, num_accum_steps * micro, 5))
        ensemble, metrics = step(ensemble, jnp.asarray(tokens, jnp.int32))
        ends, loss_SR = [], np.zeros((num_updates, 3))
        for r, owner in enumerate(owners):
            end = params[owner]
            for s in range(num_updates):
                loss_SR[s, r], grad = oracle.batch_loss_and_grad(end, tokens[s, r])
                end, inner[r] = oracle.adamw(end, grad, inner[r], 0.03, weight_decay=0.2)
            ends.append(end)
        norms = []
        for m, mean in enumerate([(ends[0] + ends[1]) / 2, ends[2]]):
            pseudo_grad = params[m] - mean
            norms.append(np.linalg.norm(pseudo_grad))
            if outer == "nesterov":
                update = oracle.nesterov(params[m], pseudo_grad, velocity[m], 0.7, momentum=0.9)
            else:
                update = oracle.adamw(params[m], pseudo_grad, velocity[m], 0.3, weight_decay=0.05)
            params[m], velocity[m] = update
        np.testing.assert_allclose(metrics.loss_SR, loss_SR, rtol=1e-5)
        np.testing.assert_allclose(metrics.pseudo_grad_norm_M, norms, rtol=1e-5)
        np.testing.assert_allclose(ensemble.params_M["w"], np.stack(params), rtol=1e-5, atol=1e-5)
    assert ensemble.round == 3


def test_each_worker_and_each_update_has_its_own_learning_rate():
    ensemble, batch = different_trainers(1, [0, 0], SGD, PLAIN), batch_of(2, 2, 4)
    rates = np.array([[0.1, 0.0], [0.02, 0.3]], np.float32)
    step = step_of(optax.sgd(1.0), PLAIN, num_accum_steps=2)
    after, _ = step(ensemble, batch, learning_rate_SR=jnp.asarray(rates))
    ends = []
    for r in range(2):
        params = params_of()
        for s in range(2):
            grads = grad_fn(params, at(batch, s, r))
            params = jax.tree.map(
                lambda p, g, rate=rates[s, r]: p - rate * np.asarray(g), params, grads
            )
        ends.append(params)
    assert_close(at(after.params_M, 0), jax.tree.map(lambda a, b: (a + b) / 2, *ends))


# --- Weights, and workers that broke


def outer_move(num_trainers, owner_R, drift_R, weights_R):
    """How far each trainer's `b` moves when its workers went `drift_R` away from it: [M]."""
    ensemble = different_trainers(num_trainers, owner_R, SGD, PLAIN)
    workers = start_round(ensemble)
    drift_R = np.asarray(drift_R, np.float32)
    params_R = dict(workers.params_R, b=np.asarray(workers.params_R["b"]) + drift_R[:, None])
    after, _ = jax.jit(functools.partial(outer_update, outer_tx=PLAIN))(
        ensemble, workers.replace(params_R=params_R), weights_R=jnp.asarray(weights_R, jnp.float32)
    )
    return np.asarray(after.params_M["b"] - ensemble.params_M["b"])[:, 0]


def test_weights_are_relative_within_a_trainer():
    moved_M = outer_move(2, [0, 1, 0, 1], [1, 5, 4, 9], [1, 300, 2, 100])
    np.testing.assert_allclose(moved_M, [3.0, 6.0], rtol=1e-6)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_worker_of_zero_weight_is_left_out_even_if_it_is_not_finite(broken):
    moved_M = outer_move(1, [0, 0, 0], [1, broken, 3], [1, 0, 1])
    np.testing.assert_allclose(moved_M, [2.0], rtol=1e-6)


def test_trainer_without_a_positive_weight_takes_the_plain_mean():
    moved_M = outer_move(2, [0, 0, 1], [1, 3, 5], [0, 0, 1])
    np.testing.assert_allclose(moved_M, [2.0, 5.0], rtol=1e-6)


@pytest.mark.parametrize("weights", [[np.nan, 1, 1], [np.inf, 3, 1], [-2.0, 7, 1]])
def test_a_weight_that_is_no_weight_is_left_out(weights):
    np.testing.assert_allclose(outer_move(2, [0, 0, 1], [1, 3, 5], weights), [3.0, 5.0], rtol=1e-6)


# --- What is not finite


def states_of(workers, worker):
    return at((workers.params_R, workers.inner_state_R), worker)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAMW)


@pytest.mark.parametrize(
    ("inner_tx", "value"),
    [(ADAMW, np.nan), (CLIPPED, np.inf), (SGD, 1e30)],
    ids=["adamw", "clipped", "sgd"],
)
def test_an_update_that_is_not_finite_is_skipped_by_its_worker_alone(inner_tx, value):
    """In every step of a round; the square of 1e30 overflows."""
    steps = inner_steps_of(inner_tx)
    for bad_step in range(3):
        clean = broken = start_round(different_trainers(2, [0, 1, 1], inner_tx))
        for step in range(3):
            clean, *_ = steps(clean, batch_of(1, 3, 4, seed=step))
            before = broken
            batch = batch_of(1, 3, 4, seed=step)  # its own: a step may still read what it was given
            if step == bad_step:
                batch["y"][:, 1, 0] = value
            broken, loss_TR, skipped_TR = steps(broken, batch)
            assert skipped_TR.tolist() == [[False, step == bad_step, False]]
            if step == bad_step:
                assert same(states_of(broken, 1), states_of(before, 1))
        for worker in (0, 2):
            assert same(states_of(broken, worker), states_of(clean, worker))
        assert not same(states_of(broken, 1), states_of(clean, 1))


def root_loss(params, batch_B):
    return jnp.mean(jnp.sqrt(jnp.square(batch_B * params)))


def steep_loss(params, batch_B):
    return jnp.mean(1e25 * batch_B * params)


@pytest.mark.parametrize(
    ("loss_fn", "value", "accumulate"), [(root_loss, 0.0, False), (steep_loss, 1.0, True)]
)
def test_an_update_of_finite_loss_whose_gradient_is_not_is_skipped(loss_fn, value, accumulate):
    """The root's gradient at zero is NaN; the square of a steep one's norm overflows."""
    batch_TRB = np.full((1, 1, 2), value, np.float32)
    ensemble = init(np.float32(1.0), num_trainers=1, num_workers=1, inner_tx=SGD, outer_tx=PLAIN)
    start = start_round(ensemble, accumulate=accumulate)
    update_T = flags(1) if accumulate else None
    after, loss_TR, skipped_TR = inner_steps(
        start, batch_TRB, loss_fn, inner_tx=SGD, update_T=update_T
    )
    assert np.isfinite(loss_TR).all() and skipped_TR.tolist() == [[True]]
    assert same(states_of(after, 0), states_of(start, 0))


@pytest.mark.parametrize("bad_micro_batch", [0, 3])
def test_an_accumulated_update_with_a_broken_micro_batch_is_skipped_whole(bad_micro_batch):
    steps = inner_steps_of(ADAMW)
    start = start_round(different_trainers(2, [0, 1]), accumulate=True)
    batch = batch_of(4, 2, 3)
    clean, *_ = steps(start, batch, update_T=flags(0, 1, 0, 1))
    other, *_ = steps(start, at(batch, slice(2)), update_T=flags(0, 1))
    batch["y"][bad_micro_batch, 1] = np.inf
    broken, _, skipped_TR = steps(start, batch, update_T=flags(0, 1, 0, 1))
    expected = [[False, t == bad_micro_batch | 1] for t in range(4)]
    assert skipped_TR.tolist() == expected
    assert same(states_of(broken, 0), states_of(clean, 0))
    if bad_micro_batch >= 2:
        assert_close(states_of(broken, 1), states_of(other, 1), rtol=3e-7, atol=1e-7)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(broken))
    assert broken.finite_R.tolist() == [True, True] and broken.num_grads == 0


@pytest.mark.parametrize("accumulates", [False, True])
def test_an_update_whose_loss_alone_is_not_finite_is_skipped(accumulates):
    def loss(params, batch):
        return loss_fn(params, batch) + batch["constant"][0]

    batch = batch_of(2, 2, 3) | {"constant": np.zeros((2, 2, 3), np.float32)}
    batch["constant"][0, 1] = np.inf
    start = start_round(different_trainers(1, [0, 0], SGD), accumulate=accumulates)
    update_T = flags(0, 1) if accumulates else None
    steps = jax.jit(functools.partial(inner_steps, loss_fn=loss, inner_tx=SGD))
    after, _, skipped_TR = steps(start, batch, update_T=update_T)
    assert skipped_TR.any(axis=0).tolist() == [False, True]
    if accumulates:
        assert same(states_of(after, 1), states_of(start, 1))


def test_a_round_reports_its_skipped_updates_and_goes_on_without_them():
    ensemble, batch = different_trainers(3, [0, 1, 2, 1]), batch_of(2, 4, 4)
    step = step_of(ADAMW, NESTEROV, num_accum_steps=2)
    expected, _ = step(ensemble, batch)
    batch["x"][1, 3] = np.nan
    after, metrics = step(ensemble, batch)
    assert metrics.skipped_SR.tolist() == [[False] * 4, [False, False, False, True]]
    assert np.isfinite(metrics.pseudo_grad_norm_M).all()
    for m in (0, 2):
        assert same(at(after.params_M, m), at(expected.params_M, m))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_a_worker_that_is_not_finite_is_left_out_of_its_trainers_mean():
    moved_M = outer_move(2, [0, 0, 1], [1, np.nan, 5], [1, 1, 1])
    np.testing.assert_allclose(moved_M, [1.0, 5.0], rtol=1e-6)
    moved_M = outer_move(2, [0, 0, 1], [1, 3, np.inf], [1, 1, 1])
    np.testing.assert_allclose(moved_M, [2.0, 0.0], rtol=1e-6)


def test_a_trainer_without_a_finite_pseudo_gradient_keeps_parameters_and_momentum():
    ensemble = different_trainers(2, [0, 1])
    ensemble, _ = step_of(ADAMW, NESTEROV)(ensemble, batch_of(2, 2, 3))  # momentum to lose
    workers = start_round(ensemble)
    poisoned = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), workers.params_R)
    after, norm_M = jax.jit(functools.partial(outer_update, outer_tx=NESTEROV))(
        ensemble, workers.replace(params_R=poisoned)
    )
    assert np.isnan(norm_M).tolist() == [False, True]
    before = at((ensemble.params_M, ensemble.outer_state_M), 1)
    assert same(at((after.params_M, after.outer_state_M), 1), before)


# --- Accumulation as data


def flags(*pattern):
    return jnp.asarray(pattern, bool)


def test_update_flags_as_data_are_the_static_accumulation_count():
    # Cut into calls of equal shape; a window straddles a cut.
    num_accum_steps, pieces = 2, 4
    ensemble = different_trainers(2, [0, 1, 1])
    num_updates, micro = 6, 2
    batch = batch_of(num_updates, 3, num_accum_steps * micro)
    rates = np.linspace(0.1, 1.0, num_updates * 3, dtype=np.float32).reshape(num_updates, 3)
    expected, expected_metrics = step_of(ADAMW, NESTEROV, num_accum_steps=num_accum_steps)(
        ensemble, batch, learning_rate_SR=jnp.asarray(rates)
    )
    micro_batches = [
        at(batch, s, slice(None), slice(a * micro, (a + 1) * micro))
        for s in range(num_updates)
        for a in range(num_accum_steps)
    ]
    batch_TRB = jax.tree.map(lambda *leaves: np.stack(leaves), *micro_batches)
    update_T = np.tile(np.arange(num_accum_steps) == num_accum_steps - 1, num_updates)
    rate_TR = np.repeat(rates, num_accum_steps, axis=0)
    workers, losses = start_round(ensemble, accumulate=True), []
    for part in np.split(np.arange(num_updates * num_accum_steps), pieces):
        workers, loss_TR, _ = inner_steps_of(ADAMW)(
            workers,
            at(batch_TRB, part),
            learning_rate_TR=jnp.asarray(rate_TR[part]),
            update_T=jnp.asarray(update_T[part]),
        )
        losses.append(loss_TR)
    actual, norm_M = outer_update(ensemble, workers, outer_tx=NESTEROV)
    assert_close(actual, expected)
    assert_close(norm_M, expected_metrics.pseudo_grad_norm_M)
    loss_SR = np.concatenate(losses).reshape(num_updates, num_accum_steps, 3).mean(axis=1)
    assert_close(loss_SR, expected_metrics.loss_SR)


def test_one_program_serves_every_accumulation_count():
    traces = []

    def counted_loss(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    steps = jax.jit(
        lambda workers, batch, update_T: inner_steps(
            workers, batch, counted_loss, inner_tx=SGD, update_T=update_T
        )
    )
    workers = start_round(different_trainers(1, [0, 0], SGD), accumulate=True)
    steps(workers, batch_of(6, 2, 3), flags(0, 1, 0, 1, 0, 1))
    first = len(traces)
    for pattern in [(0, 0, 1, 0, 0, 1), (0, 0, 0, 0, 0, 1)]:
        steps(workers, batch_of(6, 2, 3), flags(*pattern))
    assert len(traces) == first


def test_micro_batches_after_the_last_update_change_nothing():
    workers = start_round(different_trainers(1, [0, 0]), accumulate=True)
    batch = batch_of(4, 2, 3)
    padded, *_ = inner_steps_of(ADAMW)(workers, batch, update_T=flags(0, 1, 0, 0))
    whole, *_ = inner_steps_of(ADAMW)(workers, at(batch, slice(2)), update_T=flags(0, 1))
    assert_close(padded.params_R, whole.params_R, rtol=3e-7, atol=1e-7)
    assert_close(padded.inner_state_R, whole.inner_state_R, rtol=1e-6, atol=1e-8)


# --- Defects of the reference (docs/algorithm.md, 7)


def test_defect_02_accumulation_does_not_multiply_the_batch():
    batch = batch_of(2, 1, 12)
    step = step_of(ADAMW, PLAIN, num_accum_steps=4)
    after, _ = step(different_trainers(1, [0], ADAMW, PLAIN), batch)
    assert after.inner_state_R[0].count.tolist() == [2]  # of 12 examples: not 8 of 3, nor of 48
    params, _ = plain_updates(ADAMW, params_of(), [at(batch, s, 0) for s in range(2)])
    assert_close(at(after.params_M, 0), params)


def test_defect_04_last_short_window_is_a_full_mean():
    # Five micro-batches in windows of two: the last update is the plain gradient of the fifth.
    batch = batch_of(5, 2, 3)
    workers, *_ = inner_steps_of(SGD)(
        start_round(different_trainers(1, [0, 0], SGD), accumulate=True),
        batch,
        update_T=flags(0, 1, 0, 1, 1),
    )
    for r in range(2):
        windows = [
            jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), at(batch, window, r))
            for window in (slice(0, 2), slice(2, 4), slice(4, 5))
        ]
        params, _ = plain_updates(SGD, params_of(), windows)
        assert_close(at(workers.params_R, r), params)


def test_defect_10_inner_state_is_kept_and_outer_momentum_present():
    step = step_of(ADAMW, NESTEROV)
    start = different_trainers(1, [0, 0])
    once, _ = step(start, batch_of(3, 2, 4))
    twice, _ = step(once, batch_of(3, 2, 4, seed=2))
    assert twice.inner_state_R[0].count.tolist() == [6, 6]
    reset, _ = step(once.replace(inner_state_R=start.inner_state_R), batch_of(3, 2, 4, seed=2))
    assert not np.allclose(reset.params_M["w"], twice.params_M["w"], atol=1e-3)
    # With nothing learned in a round, momentum alone still moves the trainer.
    frozen, _ = step(once, batch_of(3, 2, 4), learning_rate_SR=jnp.zeros((3, 2)))
    coasting = once.params_M["w"] - 0.7 * 0.9 * 0.9 * once.outer_state_M[0].trace["w"]
    assert_close(frozen.params_M["w"], coasting)


# --- Transforms, shapes, programs


def test_vmap_over_ensembles_is_a_loop_over_them():
    step = step_of(ADAMW, NESTEROV, num_accum_steps=2)
    ensembles = [different_trainers(2, [0, 1, 1], seed=seed) for seed in (0, 1)]
    batches = [batch_of(2, 3, 4, seed=seed) for seed in (5, 6)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *zip(ensembles, batches, strict=True))
    together = jax.vmap(step)(*stacked)
    for i in range(2):
        assert_close(at(together, i), step(ensembles[i], batches[i]))


def test_repeated_shapes_compile_once_weakly_typed_parameters_too():
    step = jax.jit(step_of(ADAMW, NESTEROV, jit=False))
    params = dict(params_of(), scale=0.7)
    ensemble = init(params, num_trainers=1, num_workers=1, inner_tx=ADAMW, outer_tx=NESTEROV)
    for seed in range(3):
        ensemble, _ = step(ensemble, batch_of(2, 1, 4, seed=seed))
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("dtype", "num_accum_steps"), [("bfloat16", 1), ("bfloat16", 2), ("float64", 2)]
)
def test_parameters_of_another_precision_keep_every_dtype(dtype, num_accum_steps):
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params_of())
        ensemble = init(params, num_trainers=1, num_workers=2, inner_tx=ADAMW, outer_tx=NESTEROV)
        step = step_of(ADAMW, NESTEROV, jit=False, num_accum_steps=num_accum_steps)
        after, _ = jax.eval_shape(step, ensemble, batch_of(2, 2, 4))
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (after, ensemble)]
    assert dtypes[0] == dtypes[1] and dtypes[0][0] == dtype


@pytest.mark.parametrize(
    ("shape", "num_accum_steps", "words"),
    [
        ((2, 4, 6), 1, ["batch", "(2, 4, 6, 3)", "R=3"]),
        ((2, 3, 6), 4, ["batch", "6 examples", "num_accum_steps=4"]),
        ((2, 3, 6), 0, ["num_accum_steps=0", "at least 1"]),
        ((0, 3, 6), 1, ["batch", "S >= 1"]),
        ((2, 3, 0), 1, ["batch", "(2, 3, 0, 3)"]),
        ((3,), 1, ["batch", "(3, 3)"]),
    ],
)
def test_wrong_shapes_are_named_while_tracing(shape, num_accum_steps, words):
    step = step_of(ADAMW, NESTEROV, jit=False, num_accum_steps=num_accum_steps)
    batch = {"x": jax.ShapeDtypeStruct((*shape, 3), jnp.float32)}
    with pytest.raises(ValueError) as error:
        jax.eval_shape(step, different_trainers(2, [0, 1, 1]), batch)
    assert all(word in str(error.value) for word in words), error.value


def test_leaves_that_disagree_and_empty_batches_are_refused():
    step, ensemble = step_of(ADAMW, NESTEROV, jit=False), different_trainers(1, [0])
    with pytest.raises(ValueError, match="batch: expected a pytree"):
        step(ensemble, {})
    with pytest.raises(ValueError, match="batch: a leaf has shape"):
        step(ensemble, {"x": jnp.zeros((2, 1, 3, 3)), "y": jnp.zeros((1, 1, 3, 2))})


def test_a_leaf_with_a_single_example_is_not_broadcast_over_the_batch():
    ensemble, batch = different_trainers(1, [0]), batch_of(2, 1, 3)
    batch["y"] = batch["y"][:, :, :1]
    words = r"leaves have \[1, 3\] examples on the third axis"
    with pytest.raises(ValueError, match=f"batch: {words}"):
        step_of(ADAMW, NESTEROV, jit=False)(ensemble, batch)
    with pytest.raises(ValueError, match=f"batch_TRB: {words}"):
        inner_steps(start_round(ensemble), batch, loss_fn, inner_tx=ADAMW)


def test_weights_may_be_a_list(unchecked):
    assert outer_move(2, [0, 0, 1], [1, 3, 5], [1, 0, 1]).tolist() == pytest.approx([1.0, 5.0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"weights_R": [1.0, 2.0]}, r"weights_R has shape \(2,\), expected one number for each of"),
        ({"weights_R": [[1.0], [1.0, 2.0]]}, r"weights_R: expected numbers of shape \(3,\)"),
        ({"learning_rate_SR": 0.1}, r"learning_rate_SR has shape \(\), expected .* \(2, 3\)"),
        ({"precision": "int2"}, "precision='int2': expected one of float32, bfloat16, int8, int4"),
    ],
)
def test_what_a_round_cannot_use_is_named(wrong, words, unchecked):
    step = step_of(ADAMW, NESTEROV, jit=False)
    with pytest.raises(ValueError, match=words):
        step(different_trainers(2, [0, 1, 1]), batch_of(2, 3, 4), **wrong)


# --- Parameters and transformations of other kinds


def test_complex_parameters_are_refused():
    ensemble = different_trainers(1, [0])
    ensemble = ensemble.replace(params_M=jax.tree.map(lambda x: x + 1j, ensemble.params_M))
    words = "complex64, expected real numbers"
    with pytest.raises(ValueError, match=words):
        step_of(ADAMW, NESTEROV, jit=False)(ensemble, batch_of(1, 1, 2))
    with pytest.raises(ValueError, match=words):
        workers = start_round(different_trainers(1, [0]))
        outer_update(ensemble, workers, outer_tx=NESTEROV)


def test_float64_parameters_move_as_far_as_their_workers():
    """Cast to float32 before they are subtracted, they were 41 % off."""
    with jax.enable_x64(True):
        params = np.full(1, 1.0 / 3)
        ensemble = init(params, num_trainers=1, num_workers=1, inner_tx=SGD, outer_tx=PLAIN)
        workers = start_round(ensemble)
        workers = workers.replace(params_R=workers.params_R - 1e-8)
        after, norm_M = outer_update(ensemble, workers, outer_tx=PLAIN)
        np.testing.assert_allclose(params - after.params_M[0], 1e-8, rtol=1e-6)
        np.testing.assert_allclose(norm_M, 1e-8, rtol=1e-6)


def test_random_keys_in_states_and_parameters_go_through_a_round():
    """One worker, outer rate 1: the optimizer alone, noise included; the parameters' key stays."""
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 0), SGD)
    params = dict(params_of(), key=jax.random.key(1), count=np.int32(7))

    def loss(params, batch):
        return loss_fn(params, batch) + 0.0 * jax.random.normal(params["key"]) * params["count"]

    ensemble = init(params, num_trainers=2, num_workers=2, inner_tx=noisy, outer_tx=PLAIN)
    batch = batch_of(2, 2, 4)

    @jax.jit
    def step(ensemble):
        workers, *_ = inner_steps(
            start_round(ensemble, accumulate=True),
            batch,
            loss,
            inner_tx=noisy,
            update_T=flags(1, 1),
            worker_parallelism=1,
        )
        return outer_update(ensemble, workers, outer_tx=PLAIN)[0]

    after = step(ensemble)
    end, state = plain_updates(noisy, params_of(), [at(batch, s, 1) for s in range(2)])
    moved = {name: after.params_M[name] for name in end}
    assert_close(at(moved, 1), end)
    assert after.inner_state_R[0].rng_key[1] == state[0].rng_key
    assert (after.params_M["key"] == jax.random.key(1)).all()
    assert after.params_M["count"].tolist() == [7, 7]


@pytest.mark.parametrize(
    ("name", "tx", "words"),
    [
        ("inner_tx", optax.lbfgs(), "'value', 'grad', and 'value_fn'; a round gives"),
        (
            "outer_tx",
            optax.chain(SGD, optax.contrib.reduce_on_plateau()),
            "argument: 'value'; a round gives",
        ),
    ],
    ids=["lbfgs", "plateau"],
)
def test_a_transformation_that_needs_the_loss_is_refused(name, tx, words):
    txs = {"inner_tx": SGD, "outer_tx": PLAIN, name: tx}
    ensemble = init(params_of(), num_trainers=1, num_workers=1, **txs)
    with pytest.raises(ValueError, match=f"{name}: .*{words}"):
        jax.eval_shape(lambda e, b: outer_step(e, b, loss_fn, **txs), ensemble, batch_of(1, 1, 2))


KEEPERS = {
    "ScheduleFreeState": optax.contrib.schedule_free_sgd(0.1),
    "SAMState": optax.contrib.sam(SGD, SGD),
    "LookaheadState": optax.lookahead(SGD, 3, 0.5),
}


@pytest.mark.parametrize("state", KEEPERS)
def test_a_transformation_that_keeps_parameters_of_its_own_is_refused(state):
    """The next inner update would go back to, or on from, what the outer update has left."""
    inner_tx = optax.chain(optax.clip_by_global_norm(1.0), KEEPERS[state])
    ensemble = init(params_of(), num_trainers=1, num_workers=1, inner_tx=inner_tx, outer_tx=PLAIN)
    with pytest.raises(ValueError, match=f"inner_tx: its {state} holds parameters of its own"):
        outer_step(ensemble, batch_of(1, 1, 2), loss_fn, inner_tx=inner_tx, outer_tx=PLAIN)


def test_a_schedule_free_outer_optimizer_is_the_optimizer_alone():
    inner_tx, outer_tx = optax.sgd(1.0), KEEPERS["ScheduleFreeState"]
    ensemble = init(
        params_of(), num_trainers=1, num_workers=1, inner_tx=inner_tx, outer_tx=outer_tx
    )
    batches = [batch_of(1, 1, 3, seed=seed) for seed in range(2)]
    for batch in batches:
        ensemble, _ = step_of(inner_tx, outer_tx)(ensemble, batch)
    params, _ = plain_updates(outer_tx, params_of(), [at(batch, 0, 0) for batch in batches])
    assert_close(at(ensemble.params_M, 0), params)


def worker_mesh():
    return jax.make_mesh((8,), ("worker",), axis_types=(AxisType.Auto,))


def sharded_arguments(mesh, ensemble, batch):
    by_worker = NamedSharding(mesh, P("worker"))
    whole = NamedSharding(mesh, P())
    placed = jax.device_put(ensemble, whole).replace(
        inner_state_R=jax.device_put(ensemble.inner_state_R, by_worker)
    )
    return placed, jax.device_put(batch, NamedSharding(mesh, P(None, "worker")))


def test_sharded_over_workers_is_unsharded_and_communicates_only_between_rounds():
    ensemble = different_trainers(3, [0, 0, 0, 1, 1, 2, 2, 2])
    batch, step = batch_of(3, 8, 4), step_of(ADAMW, NESTEROV, num_accum_steps=2)
    expected = step(ensemble, batch)
    compiled = step.lower(*sharded_arguments(worker_mesh(), ensemble, batch)).compile()
    actual = compiled(*sharded_arguments(worker_mesh(), ensemble, batch))
    assert_close(jax.device_get(actual), jax.device_get(expected))
    found = collectives(compiled.as_text())
    assert found, "the outer update of a sharded round must communicate: the reading is broken"
    assert not any(collective.in_loop for collective in found)
