"""One round: every worker's inner updates, then one outer update per trainer (AdLoCo algorithm 1).

`outer_step` is the whole round for callers with data at hand. A host loop that streams a long,
accumulated round in pieces calls its three parts: `start_round`, `inner_steps`, `outer_update`. One
that synchronises a fragment of the parameters at a time has, in place of the last,
`outer_update_fragment` and `receive_fragment`.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import Array, lax
from jaxtyping import Bool, Float, PyTree

from adloco_jax.core.compress import Precision, check_precision, pack, unpack
from adloco_jax.core.types import (
    Ensemble,
    LossFn,
    RoundMetrics,
    Workers,
    at_least_float32,
    by_trainer,
    of_owners,
    owner_mean,
    squared_norms,
    trainable,
    trainable_loss,
    where_leading,
    with_dtypes,
    with_trainable,
)

# States that hold parameters beside those of the workers, which an outer update would not move.
_KEEPS_PARAMS = (
    optax.LookaheadState,
    optax.contrib.SAMState,
    optax.contrib.ScheduleFreeState,
)


def outer_step(
    ensemble: Ensemble,
    batch: PyTree,
    loss_fn: LossFn,
    *,
    inner_tx: optax.GradientTransformation,
    outer_tx: optax.GradientTransformation,
    num_accum_steps: int = 1,
    learning_rate_SR: Float[Array, "S R"] | None = None,
    weights_R: Float[Array, " R"] | Sequence[float] | None = None,
    precision: Precision = "float32",
) -> tuple[Ensemble, RoundMetrics]:
    """Runs one round: S inner updates on every worker, then one outer update of every trainer.

    Pure and not jitted; wrap it in `jax.jit` with the functions and `num_accum_steps` fixed.
    Buffers are not donated here. What is not finite is left out, see `inner_steps` and
    `outer_update`. Arrays may be sharded over a mesh with automatic axes, which
    `jax.sharding.Mesh(devices, names)` has and `jax.make_mesh(shape, names)` may not have.

    Parameters are floating-point leaves. Others, such as typed PRNG keys and counts, are given to
    `loss_fn` and stay as they are. Transformations get gradients, state and parameters, no more:

    - Those that need a `value`, the loss, are refused: `optax.contrib.reduce_on_plateau`,
      `optax.lbfgs`, `optax.polyak_sgd`, line searches.
    - Those that keep parameters of their own are refused as `inner_tx`, since the outer update
      would not move these: `optax.contrib.schedule_free`, and `optax.contrib.sam` unless opaque. As
      `outer_tx` both work. Schedule-free parameters are then those that gradients are taken at:
      evaluate a trainer at `optax.contrib.schedule_free_eval_params`.
    - `optax.lookahead`, which expects a pair of parameters, is refused; the outer update is one.

    Args:
      ensemble: Trainers and workers before the round.
      batch: Pytree whose leaves are [S, R, A*B, ...]: for each update and worker, the examples of
        its A micro-batches of B, in order.
      loss_fn: `loss_fn(params, micro_batch) -> scalar`, the mean loss over B examples.
      inner_tx: Transformation of a worker's gradients (AdamW in the paper).
      outer_tx: Transformation of a trainer's pseudo-gradient (Nesterov in DiLoCo, SGD in AdLoCo).
      num_accum_steps: A >= 1; gradients of A micro-batches are averaged for one update.
      learning_rate_SR: Factors on the updates that `inner_tx` makes, which is then built with
        learning rate 1; None leaves them as they are.
      weights_R: Relative weights of the workers in their trainer's mean, for instance the examples
        each consumed; None weighs them alike.
      precision: As in `outer_update`.

    Returns:
      The ensemble after the round, and its metrics.

    Raises:
      ValueError: While tracing, if the leaves of `batch` do not start with the same [S, R, A*B],
        `learning_rate_SR` or `weights_R` has another shape, `precision` is unknown, parameters are
        complex, `loss_fn` does not return one number, or a transformation is one of those above.

    Source: AdLoCo algorithm 1, lines 5-16; DiLoCo (arXiv 2311.08105), algorithm 1.
    """
    num_updates = _check_batch(batch, ensemble.num_workers, num_accum_steps)
    learning_rate_SR = _factors(
        "learning_rate_SR", learning_rate_SR, (num_updates, ensemble.num_workers)
    )
    learning_rate_TR, update_T = learning_rate_SR, None
    if num_accum_steps > 1:
        batch = jax.tree.map(lambda leaf: _split_micro_batches(leaf, num_accum_steps), batch)
        update_T = (jnp.arange(num_updates * num_accum_steps) + 1) % num_accum_steps == 0
        if learning_rate_SR is not None:
            learning_rate_TR = jnp.repeat(learning_rate_SR, num_accum_steps, axis=0)
    workers, loss_TR, skipped_TR = inner_steps(
        start_round(ensemble, accumulate=num_accum_steps > 1),
        batch,
        loss_fn,
        inner_tx=inner_tx,
        learning_rate_TR=learning_rate_TR,
        update_T=update_T,
    )
    ensemble, pseudo_grad_norm_M = outer_update(
        ensemble, workers, outer_tx=outer_tx, weights_R=weights_R, precision=precision
    )
    by_update = (num_updates, num_accum_steps, -1)
    return ensemble, RoundMetrics(
        loss_SR=jnp.mean(loss_TR.reshape(by_update), axis=1),
        skipped_SR=jnp.any(skipped_TR.reshape(by_update), axis=1),
        pseudo_grad_norm_M=pseudo_grad_norm_M,
    )


def start_round(
    ensemble: Ensemble,
    *,
    accumulate: bool = False,
    reset_tx: optax.GradientTransformation | None = None,
) -> Workers:
    """Every worker at its trainer's parameters, or its own, with the inner state it kept.

    Args:
      ensemble: Trainers and workers between two rounds.
      accumulate: Whether `inner_steps` will be given `update_T`: one parameter-sized float32 buffer
        per worker more.
      reset_tx: The inner transformation, to start from a fresh state of it (the reference's
        choice); None keeps the state over rounds (DiLoCo's).

    Returns:
      The workers at the start of a round.

    Source: AdLoCo algorithm 1, line 6.
    """
    params_R = ensemble.params_R
    if params_R is None:
        params_R = of_owners(ensemble.params_M, ensemble.owners)
    workers = Workers(params_R=params_R, inner_state_R=ensemble.inner_state_R)
    if reset_tx is not None:
        workers = workers.replace(inner_state_R=jax.vmap(reset_tx.init)(trainable(params_R)))
    if accumulate:
        zeros_R = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trainable(params_R))
        workers = workers.replace(
            grad_sum_R=zeros_R,
            num_grads=jnp.zeros((), jnp.int32),
            finite_R=jnp.ones(ensemble.num_workers, bool),
        )
    return workers


def inner_steps(
    workers: Workers,
    batch_TRB: PyTree,
    loss_fn: LossFn,
    *,
    inner_tx: optax.GradientTransformation,
    learning_rate_TR: Float[Array, "T R"] | None = None,
    update_T: Bool[Array, " T"] | None = None,
    worker_parallelism: int | None = None,
    examples_per_pass: int | None = None,
) -> tuple[Workers, Float[Array, "T R"], Bool[Array, "T R"]]:
    """Consumes T micro-batches on every worker; workers do not communicate.

    Which micro-batches end an update is data, so one program serves every accumulation count, and a
    long round may be cut anywhere into calls of equal shape.

    A worker skips an update whose loss is not finite, or whose gradient's squared norm is not in
    float32: its parameters and inner state stay as they are, bit for bit. This is decided before
    `inner_tx`, whose clipping would turn one infinity into a zero step or a NaN.

    Args:
      workers: From `start_round` or an earlier call.
      batch_TRB: Pytree of leaves [T, R, B, ...].
      loss_fn: Mean loss of a micro-batch.
      inner_tx: Transformation of a worker's gradients; which ones are refused, and why, is said at
        `outer_step`.
      learning_rate_TR: Factor on the update that ends with micro-batch t; None means 1.
      update_T: True where a micro-batch completes an update, which then uses the mean of the
        gradients since the last one, however many; None updates after each micro-batch.
      worker_parallelism: Workers that take their T micro-batches side by side, as one batch of all
        arithmetic, before the next ones begin; None for all. One at a time needs the memory of one
        worker's activations, and on a CPU the least time. Numbers differ by rounding. Where workers
        are spread over devices, call it for the workers of each (`jax.shard_map`).
      examples_per_pass: Examples of a micro-batch, at most, that go forward and backward together;
        the gradients of equal passes are averaged in float32. None for all of them. Less memory,
        and on a CPU less time where it keeps activations in the cache. Numbers differ by rounding.

    Returns:
      The workers; the mean loss of every micro-batch; and where a worker skipped the update that
      ended with the micro-batch.

    Raises:
      ValueError: While tracing, if `worker_parallelism` or `examples_per_pass` is below 1, if
        `update_T` is given for workers that were not started to accumulate, and as `outer_step`
        does for `batch_TRB`, `learning_rate_TR`, parameters, `loss_fn` and `inner_tx`.

    Source: AdLoCo algorithm 1, lines 7-13; accumulation is its switch mode (section 4.4).
    """
    num_workers = jax.tree.leaves(workers.params_R)[0].shape[0]
    num_micro_batches = _check_batch(batch_TRB, num_workers, name="batch_TRB", axes="T, R, B")
    learning_rate_TR = _factors(
        "learning_rate_TR", learning_rate_TR, (num_micro_batches, num_workers)
    )
    transform = _transform("inner_tx", inner_tx, workers.inner_state_R, refused=_KEEPS_PARAMS)

    def loss_and_grad(params, batch_B):
        return jax.value_and_grad(trainable_loss(loss_fn, params))(trainable(params), batch_B)

    value_and_grad = functools.partial(_in_passes, loss_and_grad, examples_per_pass)
    num_grads, count_T = workers.num_grads, None
    if update_T is not None:
        if num_grads is None:
            raise ValueError("update_T: expected workers from start_round(..., accumulate=True)")
        num_grads, count_T = _count_grads(num_grads, update_T)

    def update(params, state, grads, is_finite, learning_rate):
        is_finite &= jnp.isfinite(_squared_norm(grads))

        def apply():
            before = trainable(params)
            updates, new_state = transform(grads, state, before)
            if learning_rate is not None:
                updates = jax.tree.map(lambda leaf: leaf * learning_rate, updates)
            after = with_trainable(params, optax.apply_updates(before, updates))
            return after, with_dtypes(new_state, state)

        # Of one worker a branch, of several at once a selection. Selecting always would cost a CPU
        # a copy of the optimizer's state in every update.
        params, state = lax.cond(is_finite, apply, lambda: (params, state))
        return params, state, ~is_finite

    def plain_step(carry, step):
        params, state, *unused = carry
        batch_B, learning_rate, _ = step
        loss, grads = value_and_grad(params, batch_B)
        params, state, skipped = update(params, state, grads, jnp.isfinite(loss), learning_rate)
        return (params, state, *unused), (loss, skipped)

    def accumulating_step(carry, step):
        params, state, grad_sum, is_finite = carry
        batch_B, learning_rate, (ends_update, count) = step
        loss, grads = value_and_grad(params, batch_B)
        grad_sum = jax.tree.map(jnp.add, grad_sum, with_dtypes(grads, grad_sum))
        is_finite &= jnp.isfinite(loss)

        def end_update():
            mean = jax.tree.map(lambda leaf: leaf / count, grad_sum)
            *updated, skipped = update(params, state, mean, is_finite, learning_rate)
            zeros = jax.tree.map(jnp.zeros_like, grad_sum)
            return (*updated, zeros, jnp.ones_like(is_finite)), skipped

        def go_on():
            return (params, state, grad_sum, is_finite), jnp.zeros_like(is_finite)

        carry, skipped = lax.cond(ends_update, end_update, go_on)
        return carry, (loss, skipped)

    def run_worker(carry, inputs):
        batch_TB, learning_rate_T = inputs
        flags = None if update_T is None else (update_T, count_T)
        step = plain_step if update_T is None else accumulating_step
        return lax.scan(step, carry, (batch_TB, learning_rate_T, flags))

    carry_R = (workers.params_R, workers.inner_state_R, workers.grad_sum_R, workers.finite_R)
    carry_R, (loss_RT, skipped_RT) = _map_workers(
        run_worker, carry_R, _swap((batch_TRB, learning_rate_TR)), worker_parallelism
    )
    params_R, state_R, grad_sum_R, finite_R = carry_R
    workers = Workers(params_R, state_R, grad_sum_R, num_grads, finite_R)
    return workers, loss_RT.T, skipped_RT.T


def _in_passes(
    value_and_grad: Callable, limit: int | None, params: PyTree, batch_B: PyTree
) -> tuple[Array, PyTree]:
    """Loss and gradient of a micro-batch: means over equal passes of at most `limit` examples."""
    num_examples = jax.tree.leaves(batch_B)[0].shape[0]
    size = _at_once(num_examples, limit, "examples_per_pass")
    if size == num_examples:
        return value_and_grad(params, batch_B)
    num_passes = num_examples // size
    batch_NB = jax.tree.map(lambda leaf: leaf.reshape(num_passes, size, *leaf.shape[1:]), batch_B)

    def add(total, batch_B):
        return jax.tree.map(jnp.add, total, value_and_grad(params, batch_B)), None

    one = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda leaf: leaf[0], batch_NB))
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), one
    )
    total, _ = lax.scan(add, zeros, batch_NB)
    return jax.tree.map(lambda leaf, like: (leaf / num_passes).astype(like.dtype), total, one)


def _at_once(count: int, limit: int | None, name: str) -> int:
    """The most of `count` that divide it and are within the limit."""
    if limit is None:
        return count
    if limit < 1:
        raise ValueError(f"{name}={limit}: expected at least 1")
    return max(n for n in range(1, min(limit, count) + 1) if count % n == 0)


def _map_workers(
    run: Callable, carry_R: PyTree, inputs_R: PyTree, parallelism: int | None
) -> tuple[PyTree, PyTree]:
    """`run(carry, inputs) -> (carry, outputs)` for every worker, at most `parallelism` at once.

    In turn they are updated in place: `lax.map` would hold all of them twice.
    """
    num_workers = jax.tree.leaves(carry_R)[0].shape[0]
    at_once = _at_once(num_workers, parallelism, "worker_parallelism")
    if 1 < at_once == num_workers:
        return jax.vmap(run)(carry_R, inputs_R)
    lead, run_some = ((), run) if at_once == 1 else ((at_once,), jax.vmap(run))
    turns = num_workers // at_once

    def run_next(carry_N, turn):
        index, inputs = turn
        carry = jax.tree.map(lambda leaf: leaf[index], carry_N)
        carry, outputs = run_some(carry, inputs)
        return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), carry_N, carry), outputs

    carry_N, inputs_N = jax.tree.map(
        lambda leaf: leaf.reshape(turns, *lead, *leaf.shape[1:]), (carry_R, inputs_R)
    )
    after_N = lax.scan(run_next, carry_N, (jnp.arange(turns), inputs_N))
    return jax.tree.map(
        lambda leaf: leaf.reshape(num_workers, *leaf.shape[1 + len(lead) :]), after_N
    )


def _count_grads(num_grads: Array, update_T: Array) -> tuple[Array, Array]:
    """Gradients in the sum after the last micro-batch, and with each one: int32 [] and [T]."""

    def count(num_grads, ends_update):
        num_grads += 1
        return jnp.where(ends_update, 0, num_grads), num_grads

    return lax.scan(count, num_grads, update_T)


def _swap(tree: PyTree) -> PyTree:
    """Leaves [T, R, ...] -> [R, T, ...]."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


def _squared_norm(tree: PyTree) -> Array:
    """In float32; infinite if it overflows."""
    return squared_norms(jax.tree.map(lambda leaf: leaf[None], tree))[0]


def outer_update(
    ensemble: Ensemble,
    workers: Workers,
    *,
    outer_tx: optax.GradientTransformation,
    weights_R: Float[Array, " R"] | Sequence[float] | None = None,
    precision: Precision = "float32",
    exchange: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    publish: Callable[[PyTree], PyTree] = lambda packed_M: packed_M,
) -> tuple[Ensemble, Float[Array, " M"]]:
    """Ends a round: the only communication between the workers of a trainer.

    Below float32 both of its halves travel packed (`core.compress`): each worker's difference on
    its way to the mean, which is taken in float32 and which the outer optimizer sees as it is; and
    on their way back the optimizer's updates, of which every worker unpacks the same bits, so that
    all copies of the parameters agree. A trainer of one worker sends nothing, and nothing of it is
    rounded.

    A worker whose difference is not finite is left out of the mean, by selection; a trainer without
    a finite pseudo-gradient keeps its parameters and outer state bit for bit. Workers that had
    parameters of their own are at their trainer's afterwards.

    Args:
      ensemble: As it was when the round began.
      workers: The workers after their inner updates.
      outer_tx: Transformation of the pseudo-gradient, which is the trainer's parameters minus the
        weighted mean of its workers', formed in float32 from the workers' differences, of float64
        parameters too. Which ones are refused, and why, is said at `outer_step`.
      weights_R: As in `outer_step`.
      precision: In which differences and updates travel.
      exchange: Applied to pytrees of leaves [R, ...] before they are averaged: the workers'
        differences, packed, and whether they are usable. Where workers are spread over devices, a
        sharding constraint that deals each device all workers' share of the parameters: the first
        half of the synchronisation.
      publish: Applied to the trainers' updates [M, ...], packed: the second half, that gathers them
        wherever the parameters are wanted. In float32 the new parameters travel instead, by
        whatever sharding they are given.

    Returns:
      The ensemble after the round, and the L2 norm of each pseudo-gradient, NaN for one left out.

    Raises:
      ValueError: While tracing, as `outer_step` does for `weights_R`, `precision`, parameters and
        `outer_tx`.

    Source: AdLoCo algorithm 1, lines 14-16; DiLoCo algorithm 1, lines 12-14. Low precision with
    sums in float32: Streaming DiLoCo (arXiv 2501.18512), section 2.4, whose outer optimizer runs on
    every worker; here it runs once for each share, and its updates are what goes back.
    """
    owners = ensemble.owners
    check_precision(precision)
    weights_R = _factors("weights_R", weights_R, (ensemble.num_workers,))
    transform = _transform(
        "outer_tx", outer_tx, ensemble.outer_state_M, refused=(optax.LookaheadState,)
    )
    if ensemble.num_workers == ensemble.num_trainers:
        precision = "float32"  # each has one worker: nothing is sent
    alone_M = np.bincount(owners) == 1
    start_M = trainable(ensemble.params_M)

    def subtract(start_R, end_R):
        # Cast only now: a float64 parameter moves by less than its float32 neighbours are apart.
        difference_R = start_R.astype(at_least_float32(start_R.dtype)) - end_R
        return difference_R.astype(jnp.float32)

    difference_R = jax.tree.map(subtract, of_owners(start_M, owners), trainable(workers.params_R))
    usable_R = jnp.isfinite(squared_norms(difference_R))
    difference_R = _send(difference_R, alone_M[ensemble.owner_R], precision, exchange)
    usable_R = exchange(usable_R)
    pseudo_grad_M = owner_mean(difference_R, owners, weights_R, usable_R)
    norm_M = jnp.sqrt(squared_norms(pseudo_grad_M))
    usable_MW, mask_MW = by_trainer(usable_R, owners)
    is_usable_M = jnp.any(usable_MW & mask_MW, axis=1) & jnp.isfinite(norm_M)
    updates_M, outer_state_M = jax.vmap(transform)(pseudo_grad_M, ensemble.outer_state_M, start_M)
    outer_state_M = with_dtypes(outer_state_M, ensemble.outer_state_M)
    if precision != "float32":
        updates_M = _send(updates_M, alone_M, precision, publish)
    end_M = jax.vmap(optax.apply_updates)(start_M, updates_M)
    params_M = with_trainable(ensemble.params_M, where_leading(is_usable_M, end_M, start_M))
    params_R = None if ensemble.params_R is None else of_owners(params_M, owners)
    ensemble = ensemble.replace(
        params_M=params_M,
        params_R=params_R,
        outer_state_M=where_leading(is_usable_M, outer_state_M, ensemble.outer_state_M),
        inner_state_R=workers.inner_state_R,
        round=ensemble.round + 1,
    )
    return ensemble, jnp.where(is_usable_M, norm_M, jnp.nan)


def _send(
    tree_X: PyTree, alone_X: np.ndarray, precision: Precision, move: Callable[[PyTree], PyTree]
) -> PyTree:
    """What arrives of `tree_X`: quantised, but for the entries of single-worker trainers."""
    arrived_X = unpack(move(pack(tree_X, precision)), tree_X, precision)
    if precision == "float32" or not alone_X.any():
        return arrived_X
    return jax.tree.map(lambda leaf, own: leaf.at[alone_X].set(own[alone_X]), arrived_X, tree_X)


def _check_batch(
    batch: PyTree,
    num_workers: int,
    num_accum_steps: int = 1,
    *,
    name: str = "batch",
    axes: str = "S, R, A*B",
) -> int:
    """The length of the first axis, once all leaves agree on the first three."""
    leaves = jax.tree.leaves(batch)
    if num_accum_steps < 1:
        raise ValueError(f"num_accum_steps={num_accum_steps}: expected at least 1")
    if not leaves:
        raise ValueError(f"{name}: expected a pytree with at least one array")
    num_updates = leaves[0].shape[0] if leaves[0].ndim else 0
    for leaf in leaves:
        if leaf.ndim < 3 or leaf.shape[:2] != (num_updates, num_workers) or 0 in leaf.shape[:3]:
            raise ValueError(
                f"{name}: a leaf has shape {leaf.shape}, expected [{axes}, ...] with the same"
                f" {axes[0]} >= 1 in every leaf and R={num_workers} workers"
            )
        if leaf.shape[2] % num_accum_steps:
            raise ValueError(
                f"{name}: {leaf.shape[2]} examples per update do not divide into"
                f" num_accum_steps={num_accum_steps} micro-batches"
            )
    if len(sizes := {leaf.shape[2] for leaf in leaves}) > 1:
        raise ValueError(
            f"{name}: leaves have {sorted(sizes)} examples on the third axis of [{axes}, ...],"
            " expected the same number in every leaf"
        )
    return num_updates


def _factors(name: str, values, shape: tuple[int, ...]) -> Array | None:
    """Weights or learning rates as a float32 array, once they have the shape expected."""
    if values is None:
        return None
    try:
        array = jnp.asarray(values, jnp.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected numbers of shape {shape}; {error}") from error
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}, expected one number for each of {shape};"
            f" jnp.full({shape}, value) repeats a single one"
        )
    return array


def _transform(
    name: str, tx: optax.GradientTransformation, state: PyTree, *, refused: tuple[type, ...]
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """`tx.update`, once its state has nothing that a round would leave out of step."""

    def keeps_params(node):
        # Opaque SAM holds none between updates.
        return isinstance(node, refused) and getattr(node, "cache", ()) is not None

    for node in jax.tree.leaves(state, is_leaf=keeps_params):
        if keeps_params(node):
            raise ValueError(
                f"{name}: its {type(node).__name__} holds parameters of its own, or expects a pair"
                " of them, which the outer update would not move; build it without"
            )

    def update(grads, state, params):
        try:
            return tx.update(grads, state, params)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ValueError(
                f"{name}: {error}; a round gives a transformation gradients, state and parameters"
                " alone: use one that needs no more"
            ) from error

    return update


def _split_micro_batches(leaf: Array, num_accum_steps: int) -> Array:
    """[S, R, A*B, ...] -> [S*A, R, B, ...]."""
    num_updates, num_workers, examples = leaf.shape[:3]
    micro = examples // num_accum_steps
    leaf = leaf.reshape(num_updates, num_workers, num_accum_steps, micro, *leaf.shape[3:])
    leaf = jnp.moveaxis(leaf, 2, 1)
    return leaf.reshape(num_updates * num_accum_steps, num_workers, micro, *leaf.shape[4:])
