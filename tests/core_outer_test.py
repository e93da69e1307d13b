"""One round: laws, the oracle, shapes, sharding and the compiled loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import oracle
import pytest
from ensembles import (
    ADAMW,
    NESTEROV,
    PLAIN,
    SGD,
    TXS,
    batch_of,
    ensemble_of,
    loss_fn,
    params_of,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_close, assert_equal, at, same

from adloco_jax import inner_steps, outer_step, outer_update, start_round
from adloco_jax.core.outer import running_average
from probes.hlo import collectives

grad_fn = jax.jit(jax.grad(loss_fn))


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
    """The inner optimizer alone, on `batches` one after another."""
    state = tx.init(params)
    for batch in batches:
        updates, state = jax.jit(tx.update)(grad_fn(params, batch), state, params)
        params = at(optax.apply_updates(params, updates))
    return params, state


def different_trainers(sizes, inner_tx=ADAMW, outer_tx=NESTEROV, seed=0):
    ensemble = ensemble_of(sizes, inner_tx=inner_tx, outer_tx=outer_tx)
    each = [params_of(seed + m) for m in range(ensemble.num_trainers)]
    return ensemble.replace(params_M=jax.tree.map(lambda *ms: jnp.asarray(np.stack(ms)), *each))


# --- Laws


@pytest.mark.parametrize(
    ("accumulates", "how"),
    [
        (True, {"sequential": True}),
        (False, {"examples_per_pass": 2}),
        (True, {"examples_per_pass": 5}),
    ],
)
def test_workers_in_turn_and_batches_in_passes_are_all_at_once(accumulates, how):
    """Also if a worker skips."""
    batch = batch_of(4, 4, 6)
    batch["y"][1, 2, 4] = np.nan
    data = {"learning_rate_TR": jnp.asarray(np.linspace(0.1, 1.0, 16).reshape(4, 4), jnp.float32)}
    if accumulates:
        data["update_T"] = jnp.asarray([0, 1, 0, 0], bool)
    workers = start_round(different_trainers([1, 3]), accumulate=accumulates)
    at_once = inner_steps_of(ADAMW)(workers, batch, **data)
    assert at_once[2].any(axis=0).tolist() == [False, False, True, False]
    assert_close(inner_steps_of(ADAMW, **how)(workers, batch, **data), at_once)


def test_the_gradients_of_passes_are_summed_in_float32():
    """512 gradients of 1 on a bfloat16 parameter: a bfloat16 sum would stop at 256."""
    ensemble = ensemble_of([1], jnp.bfloat16(0), inner_tx=PLAIN, outer_tx=PLAIN)
    workers, *_ = inner_steps(
        start_round(ensemble),
        jnp.ones((1, 1, 512), jnp.bfloat16),
        lambda param, batch: jnp.mean(param * batch),
        inner_tx=PLAIN,
        examples_per_pass=1,
    )
    assert workers.params_R.dtype == jnp.bfloat16
    assert workers.params_R.tolist() == [-1]


def test_single_worker_outer_lr_one_is_the_inner_optimizer_alone():
    ensemble, batch = different_trainers([1, 1], ADAMW, PLAIN), batch_of(3, 2, 4)
    after, _ = step_of(ADAMW, PLAIN)(ensemble, batch)
    for worker, trainer in enumerate([0, 1]):
        batches = [at(batch, s, worker) for s in range(3)]
        params, state = plain_updates(ADAMW, params_of(trainer), batches)
        assert_close(at(after.params_M, trainer), params, rtol=3e-7, atol=3e-7)
        assert_close(at(after.inner_state_R, worker), state, rtol=3e-6, atol=1e-7)


def test_zero_inner_learning_rate_gives_a_pseudo_gradient_of_exactly_zero():
    ensemble, step = different_trainers([1, 2]), step_of(ADAMW, NESTEROV)
    after, metrics = step(ensemble, batch_of(2, 3, 4), learning_rate_SR=jnp.zeros((2, 3)))
    assert_equal(after.params_M, ensemble.params_M)
    assert_equal(metrics.pseudo_grad_norm_M, jnp.zeros(2))


def test_accumulated_micro_batches_are_one_large_batch():
    ensemble, batch = different_trainers([1, 2]), batch_of(2, 3, 4)
    whole = step_of(ADAMW, NESTEROV)(ensemble, batch)
    split = step_of(ADAMW, NESTEROV, num_accum_steps=2)(ensemble, batch)
    assert_close(split, whole)


def test_data_parallel_form_is_the_outer_optimizer_on_the_union_batch():
    outer_tx = optax.contrib.schedule_free_sgd(0.1)
    # Inner SGD with lr 1 and one step: the pseudo-gradient is the gradient of the union batch.
    ensemble = ensemble_of([4], inner_tx=PLAIN, outer_tx=outer_tx)
    batches = [batch_of(1, 4, 3, seed=seed) for seed in range(3)]
    for batch in batches:
        ensemble, _ = step_of(PLAIN, outer_tx)(ensemble, batch)
    unions = [jax.tree.map(lambda leaf: leaf.reshape(12, -1), batch) for batch in batches]
    params, _ = plain_updates(outer_tx, params_of(), unions)
    assert_close(at(ensemble.params_M, 0), params)


def test_each_worker_and_each_update_has_its_own_learning_rate():
    ensemble, batch = different_trainers([2], SGD, PLAIN), batch_of(2, 2, 4)
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


plain_outer_update = jax.jit(functools.partial(outer_update, outer_tx=PLAIN))


@pytest.mark.parametrize(
    ("sizes", "drift_R", "weights_R", "moved_M"),
    [
        ([2, 2], [1, 4, 5, 9], [1, 2, 300, 100], [3, 6]),  # weights count within a trainer
        ([3], [1, np.nan, 3], [1, 0, 1], [2]),
        ([2, 1], [1, 3, 5], [0, 0, 1], [2, 5]),  # without a positive weight: the plain mean
        ([2, 1], [1, 3, 5], [np.nan, 1, 1], [3, 5]),
        ([2, 1], [1, 3, 5], [np.inf, 3, 1], [3, 5]),
        ([2, 1], [1, 3, 5], [-2, 7, 1], [3, 5]),
        ([2, 1], [1, np.nan, 5], [1, 1, 1], [1, 5]),
        ([2, 1], [1, 3, np.inf], [1, 1, 1], [2, 0]),
    ],
)
def test_weights_and_finite_workers_make_a_trainers_mean(sizes, drift_R, weights_R, moved_M):
    """`b` of each trainer moves by the weighted mean of its workers' moves."""
    ensemble = different_trainers(sizes, SGD, PLAIN)
    workers = start_round(ensemble)
    moved_R = workers.params_R["b"] + jnp.asarray(drift_R, jnp.float32)[:, None]
    after, _ = plain_outer_update(
        ensemble,
        workers.replace(params_R=dict(workers.params_R, b=moved_R)),
        weights_R=jnp.asarray(weights_R, jnp.float32),
    )
    actual_M = (after.params_M["b"] - ensemble.params_M["b"])[:, 0]
    np.testing.assert_allclose(actual_M, moved_M, rtol=1e-6)


# --- What is not finite


def states_of(workers, worker):
    return at((workers.params_R, workers.inner_state_R), worker)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAMW)


@pytest.mark.parametrize(
    ("inner_tx", "value"), [(CLIPPED, np.inf), (SGD, 1e30)], ids=["clipped", "sgd"]
)
def test_an_update_that_is_not_finite_is_skipped_by_its_worker_alone(inner_tx, value):
    """The bad update is in the first or the last step; the square of 1e30 overflows."""
    steps = inner_steps_of(inner_tx)
    for bad_step in (0, 2):
        clean = broken = start_round(different_trainers([1, 2], inner_tx))
        for step in range(3):
            clean, *_ = steps(clean, batch_of(1, 3, 4, seed=step))
            before = broken
            # a new batch: a step may still read the previous one
            batch = batch_of(1, 3, 4, seed=step)
            if step == bad_step:
                batch["y"][:, 1, 0] = value
            broken, loss_TR, skipped_TR = steps(broken, batch)
            assert skipped_TR.tolist() == [[False, step == bad_step, False]]
            if step == bad_step:
                assert same(states_of(broken, 1), states_of(before, 1))
        for worker in (0, 2):
            assert same(states_of(broken, worker), states_of(clean, worker))
        assert not same(states_of(broken, 1), states_of(clean, 1))


def test_a_skipped_update_is_the_same_on_an_accelerator(as_on_a_gpu):
    batch = batch_of(2, 2, 4)
    batch["y"][0, 1, 0] = np.nan
    start = start_round(different_trainers([1, 1]))
    on_a_cpu = inner_steps_of(ADAMW)(start, batch)
    as_on_a_gpu()
    on_a_gpu = inner_steps_of(ADAMW)(start, batch)
    assert on_a_gpu[2].tolist() == [[False, True], [False, False]]
    assert_close(on_a_gpu, on_a_cpu, rtol=1e-6)


def test_an_update_of_finite_loss_whose_gradient_is_not_is_skipped():
    """The gradient of a root at zero is NaN."""

    def root_loss(params, batch_B):
        return jnp.mean(jnp.sqrt(jnp.square(batch_B * params)))

    ensemble = ensemble_of([1], np.float32(1.0), inner_tx=SGD, outer_tx=PLAIN)
    start, batch_TRB = start_round(ensemble), np.zeros((1, 1, 2), np.float32)
    steps = jax.jit(functools.partial(inner_steps, loss_fn=root_loss, inner_tx=SGD))
    after, loss_TR, skipped_TR = steps(start, batch_TRB)
    assert np.isfinite(loss_TR).all() and skipped_TR.tolist() == [[True]]
    assert same(states_of(after, 0), states_of(start, 0))


@pytest.mark.parametrize("bad_micro_batch", [0, 3])
def test_an_accumulated_update_with_a_broken_micro_batch_is_skipped_whole(bad_micro_batch):
    steps = inner_steps_of(ADAMW)
    start = start_round(different_trainers([1, 1]), accumulate=True)
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
    start = start_round(different_trainers([2], SGD), accumulate=accumulates)
    update_T = flags(0, 1) if accumulates else None
    steps = jax.jit(functools.partial(inner_steps, loss_fn=loss, inner_tx=SGD))
    after, _, skipped_TR = steps(start, batch, update_T=update_T)
    assert skipped_TR.any(axis=0).tolist() == [False, True]
    if accumulates:
        assert same(states_of(after, 1), states_of(start, 1))


def test_a_round_reports_its_skipped_updates():
    """An update is skipped if one of its micro-batches is broken."""
    batch = batch_of(2, 3, 4)
    batch["x"][1, 1, 0] = np.nan
    _, metrics = step_of(ADAMW, NESTEROV, num_accum_steps=2)(different_trainers([1, 2]), batch)
    assert metrics.skipped_SR.tolist() == [[False] * 3, [False, True, False]]
    assert np.isfinite(metrics.pseudo_grad_norm_M).all()


# --- Accumulation as data


def flags(*pattern):
    return jnp.asarray(pattern, bool)


def test_update_flags_as_data_are_the_static_accumulation_count_wherever_a_round_is_cut():
    """Updates of three micro-batches and a shorter last one, in calls of two micro-batches."""
    start = start_round(different_trainers([1, 2]), accumulate=True)
    batch = batch_of(8, 3, 2)
    data = {
        "learning_rate_TR": np.linspace(0.1, 1.0, 24, dtype=np.float32).reshape(8, 3),
        "update_T": np.array([0, 0, 1, 0, 0, 1, 0, 1], bool),
    }
    whole, *whole_measured = inner_steps_of(ADAMW)(start, batch, **data)
    workers, measured = start, []
    for first in range(0, 8, 2):
        part = slice(first, first + 2)
        workers, *some = inner_steps_of(ADAMW)(workers, at(batch, part), **at(data, part))
        measured.append(some)
    assert_close(workers, whole)
    assert_close(jax.tree.map(lambda *leaves: np.concatenate(leaves), *measured), whole_measured)


# --- Defects of the reference (studies/published.md)


def test_defect_04_last_short_window_is_a_full_mean():
    # Five micro-batches, two per update: the last update is the plain gradient of the fifth.
    start, batch = different_trainers([2], SGD), batch_of(5, 2, 3)
    workers, *_ = inner_steps_of(SGD)(
        start_round(start, accumulate=True), batch, update_T=flags(0, 1, 0, 1, 1)
    )
    windows = [
        jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), at(batch, slice(*window), 1))
        for window in ((0, 2), (2, 4), (4, 5))
    ]
    params, _ = plain_updates(SGD, params_of(), windows)
    assert_close(at(workers.params_R, 1), params)


def test_defect_10_inner_state_is_kept_and_outer_momentum_present():
    step = step_of(ADAMW, NESTEROV)
    start = different_trainers([1, 2])
    once, _ = step(start, batch_of(2, 3, 4))
    twice, _ = step(once, batch_of(2, 3, 4, seed=2))
    assert twice.inner_state_R[0].count.tolist() == [4, 4, 4]
    reset, _ = step(once.replace(inner_state_R=start.inner_state_R), batch_of(2, 3, 4, seed=2))
    assert not np.allclose(reset.params_M["w"], twice.params_M["w"], atol=1e-3)
    # If a round changes nothing, momentum alone still moves the trainer.
    frozen, _ = step(once, batch_of(2, 3, 4), learning_rate_SR=jnp.zeros((2, 3)))
    coasting = once.params_M["w"] - 0.7 * 0.9 * 0.9 * once.outer_state_M[0].trace["w"]
    assert_close(frozen.params_M["w"], coasting)


# --- Transforms, shapes, programs


def test_vmap_over_ensembles_is_a_loop_over_them():
    step = step_of(ADAMW, NESTEROV, num_accum_steps=2)
    ensembles = [different_trainers([1, 2], seed=seed) for seed in (0, 1)]
    batches = [batch_of(2, 3, 4, seed=seed) for seed in (5, 6)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *zip(ensembles, batches, strict=True))
    together = jax.vmap(step)(*stacked)
    for i in range(2):
        assert_close(at(together, i), step(ensembles[i], batches[i]))


def test_repeated_shapes_compile_once_weakly_typed_parameters_too():
    step = jax.jit(step_of(ADAMW, NESTEROV, jit=False))
    ensemble = ensemble_of([1], dict(params_of(), scale=0.7))
    for seed in range(3):
        ensemble, _ = step(ensemble, batch_of(2, 1, 4, seed=seed))
    assert step._cache_size() == 1


def test_bfloat16_parameters_keep_every_dtype():
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params_of())
    ensemble = ensemble_of([2], params)
    step = step_of(ADAMW, NESTEROV, jit=False, num_accum_steps=2)
    after, _ = jax.eval_shape(step, ensemble, batch_of(2, 2, 4))
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (after, ensemble)]
    assert dtypes[0] == dtypes[1] and dtypes[0][0] == jnp.bfloat16


# --- Parameters and transformations of other kinds


def test_float64_parameters_move_as_far_as_their_workers():
    """Casting to float32 before the subtraction gave an error of 41 %."""
    with jax.enable_x64(True):
        params = np.full(1, 1.0 / 3)
        ensemble = ensemble_of([1], params, inner_tx=SGD, outer_tx=PLAIN)
        workers = start_round(ensemble)
        workers = workers.replace(params_R=workers.params_R - 1e-8)
        after, norm_M = plain_outer_update(ensemble, workers)
        np.testing.assert_allclose(params - after.params_M[0], 1e-8, rtol=1e-6)
        np.testing.assert_allclose(norm_M, 1e-8, rtol=1e-6)


def test_random_keys_in_states_and_whole_numbers_go_through_a_round():
    """One worker, outer rate 1: equal to the optimizer alone, noise included."""
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 0), SGD)
    params = dict(params_of(), count=np.int32(7))

    def loss(params, batch):
        return loss_fn(params, batch) + 0.0 * params["count"]

    ensemble = ensemble_of([1, 1], params, inner_tx=noisy, outer_tx=PLAIN)
    batch = batch_of(2, 2, 4)

    @jax.jit
    def step(ensemble):
        workers, *_ = inner_steps(
            start_round(ensemble, accumulate=True),
            batch,
            loss,
            inner_tx=noisy,
            update_T=flags(1, 1),
            sequential=True,
        )
        return outer_update(ensemble, workers, outer_tx=PLAIN)[0]

    after = step(ensemble)
    end, state = plain_updates(noisy, params_of(), [at(batch, s, 1) for s in range(2)])
    moved = {name: after.params_M[name] for name in end}
    assert_close(at(moved, 1), end)
    assert after.inner_state_R[0].rng_key[1] == state[0].rng_key
    assert after.params_M["count"].tolist() == [7, 7]


def test_single_workers_may_go_on_without_the_outer_optimizer():
    """Their trainer takes their parameters and keeps its momentum; other trainers do not change."""
    batch, sizes = batch_of(2, 3, 4), [2, 1]
    start = different_trainers(sizes, SGD)
    start, _ = step_of(SGD, NESTEROV)(start, batch)  # now there is a momentum

    @functools.partial(jax.jit, static_argnames="skip_single")
    def step(start, skip_single):
        how = {"precision": "int4", "skip_single": skip_single}
        return outer_step(start, batch, loss_fn, inner_tx=SGD, outer_tx=NESTEROV, **how)[0]

    usual, after = step(start, skip_single=False), step(start, skip_single=True)
    for tree in ("params_M", "outer_state_M"):
        assert_close(at(getattr(after, tree), 0), at(getattr(usual, tree), 0))
    end, _ = plain_updates(SGD, at(start.params_M, 1), [at(batch, s, 2) for s in range(2)])
    assert_close(at(after.params_M, 1), end)
    assert_equal(at(after.outer_state_M, 1), at(start.outer_state_M, 1))


def refused(batch, txs=TXS, ensemble=None, **how):
    return lambda: outer_step(ensemble or ensemble_of([1, 1, 1]), batch, loss_fn, **txs, **how)


def shapes(*each):
    return [np.zeros(shape, np.float32) for shape in each]


GOOD = batch_of(2, 3, 4)
SAM = {"inner_tx": optax.chain(optax.contrib.sam(SGD, SGD), SGD), "outer_tx": PLAIN}
REFUSED = [
    (refused(shapes((2, 4, 6))), r"batch: .*\(2, 4, 6\).* R=3"),
    (refused(shapes((2, 3, 6)), num_accum_steps=4), r"batch: .*\(2, 3, 6\).* num_accum_steps=4"),
    (refused(shapes((2, 3, 0))), r"batch: .*\(2, 3, 0\)"),
    (refused([]), r"batch: its leaves begin with \[\]"),
    (refused(shapes((2, 3, 3), (1, 3, 3))), r"batch: .* \[\(1, 3, 3\), \(2, 3, 3\)\]"),
    (
        refused(GOOD, weights_R=[1.0, 2.0]),
        r"weights_R has shape \(2,\), expected one number for e",
    ),
    (refused(GOOD, learning_rate_SR=0.1), r"learning_rate_SR has shape \(\), expected .* \(2, 3\)"),
    # also if nothing is sent
    (refused(GOOD, precision="int2"), "precision='int2': expected one of float32, bfloat16, int4"),
    (
        lambda: refused(GOOD, SAM, ensemble_of([1, 1, 1], **SAM))(),
        "inner_tx: .*a SAMState, which holds parameters",
    ),
    *(
        (
            refused(GOOD, TXS | {name: optax.lion(0.1)}),
            f"^{name}: another transformation than the o",
        )
        for name in TXS
    ),
    (
        refused(GOOD, key=jax.random.PRNGKey(0)),
        r"^key: got uint32\(2,\), not typed keys; use jax",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_a_round_cannot_use_is_named(call, words, unchecked):
    with pytest.raises(ValueError, match=words):
        call()


def test_in_shard_map_a_round_is_refused_and_inner_steps_are_each_devices():
    ensemble, batch = ensemble_of([1], **TXS), batch_of(2, 1, 8)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    how = {"mesh": mesh, "in_specs": (P(), P(None, None, "data"))}

    def round_of(ensemble, batch):
        return outer_step(ensemble, batch, loss_fn, **TXS)[0]

    with pytest.raises(ValueError, match="outer_step: called in jax.shard_map over data, where"):
        jax.shard_map(round_of, out_specs=P(), **how)(ensemble, batch)

    @jax.jit
    def steps(ensemble, batch):
        workers, *_ = inner_steps(start_round(ensemble), batch, loss_fn, inner_tx=TXS["inner_tx"])
        return workers.params_R

    actual = jax.jit(jax.shard_map(steps, out_specs=P("data"), **how))(ensemble, batch)
    parts_4 = jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf.reshape(2, 1, 4, 2, *leaf.shape[3:]), 2, 0), batch
    )
    each = [steps(ensemble, at(parts_4, n)) for n in range(4)]
    assert_close(actual, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each))


def test_sharded_over_workers_is_unsharded_and_communicates_only_between_rounds():
    ensemble = different_trainers([3, 2, 3])
    batch, step = batch_of(3, 8, 4), step_of(ADAMW, NESTEROV, num_accum_steps=2)
    expected = step(ensemble, batch)
    mesh = jax.make_mesh((8,), ("worker",), axis_types=(AxisType.Auto,))
    placed = jax.device_put(ensemble, NamedSharding(mesh, P())).replace(
        inner_state_R=jax.device_put(ensemble.inner_state_R, NamedSharding(mesh, P("worker")))
    )
    arguments = placed, jax.device_put(batch, NamedSharding(mesh, P(None, "worker")))
    compiled = step.lower(*arguments).compile()
    actual = compiled(*arguments)
    assert_close(jax.device_get(actual), jax.device_get(expected))
    found = collectives(compiled.as_text())
    assert found, "the outer update of a sharded round must communicate: the reading is broken"
    assert not any(collective.in_loop for collective in found)


# --- The running average


@pytest.mark.parametrize("average", [running_average, jax.jit(running_average)])
def test_a_running_average_is_a_mean_at_first_and_then_exponential(average):
    rounds = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    found = {"w": jnp.full((2, 3), 7.0), "step": jnp.zeros(2, jnp.int32)}
    for number, new_M in enumerate(rounds, 1):
        # The second trainer is still in its round after the third.
        share_M = [min(0.7, 1 - 1 / number), 1.0 if number > 3 else min(0.7, 1 - 1 / number)]
        params_M = {"w": jnp.asarray(new_M), "step": jnp.full(2, number)}
        found = average(found, params_M, jnp.array(share_M, jnp.float32))
    assert found["step"].tolist() == [5, 5]  # what is not trained is that of the parameters
    expected = [oracle.running_averages(rounds[:, m], 0.7) for m in (0, 1)]
    assert_close(found["w"], np.stack([expected[0][4], expected[1][2]]), rtol=1e-6, atol=1e-7)


def test_a_running_average_keeps_the_old_or_takes_the_new_bit_for_bit_in_its_dtype():
    old_M, new_M = (params_of(seed)["w"][None].astype(jnp.bfloat16) for seed in (1, 2))
    for share, expected in ((0.0, new_M), (1.0, old_M)):
        found = running_average([old_M], [new_M], [share])[0]
        assert found.dtype == jnp.bfloat16
        assert_equal(found, expected)
