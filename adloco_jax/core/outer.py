"""One round: every worker's inner updates, then one outer update per trainer (AdLoCo algorithm 1).

`outer_step` is a whole round; `start_round`, `inner_steps` and `outer_update` are its parts. For
workers in other processes, `pack_differences` and `apply_differences` replace `outer_update`.

A worker's difference is its trainer's parameters minus its own; it is usable if it is finite. The
pseudo-gradient of a trainer is the mean of its workers' differences. Packed arrays are in the form
that is sent (`core.compress`). `on_any_mesh` lets a function take arrays that are sharded over
explicit axes of a mesh too; its argument says how the results are sharded. Axes of arrays: M
trainers, R workers, W those of one trainer, S updates of a worker, each of A micro-batches of B
examples, T micro-batches.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Key, PyTree

from adloco_jax.core.arguments import (
    checked_batch_length,
    checked_factors,
    checked_key,
    checked_update,
    fold_in_each,
)
from adloco_jax.core.compress import Precision, check_precision, pack, unpack
from adloco_jax.core.inner import inner_steps
from adloco_jax.core.meshes import (
    like_argument,
    like_argument_and_replicated,
    on_any_mesh,
    refuse_in_shard_map,
    replicated,
)
from adloco_jax.core.types import (
    Ensemble,
    LossFn,
    RoundMetrics,
    Workers,
    at_least_float32,
    map_trainers,
    norms,
    of_workers,
    shares,
    to_workers,
    trainable,
    where_leading,
    with_dtypes,
    with_trainable,
    without_state,
)

Aggregator: TypeAlias = Callable[..., PyTree]
"""`aggregate(difference_W, share_W) -> pseudo_grad`, for one trainer.

`difference_W`, float32 [W, ...], is the trainer's parameters minus each worker's; `share_W`,
float32 [W], sums to 1. Both are zero for a worker that is left out. The result has leaves [...].
A keyword `label_params`, if it has one, is that of the model's entry in `ARCHITECTURES`.
"""


def mean(difference_W: PyTree, share_W: Float[Array, " W"]) -> PyTree:
    """Compute the weighted mean of a trainer's differences, leaves [...].

    `share_W` has the workers' weights, which sum to 1.

    Source: DiLoCo (arXiv 2311.08105), algorithm 1, line 12.
    """

    def weighted_sum(leaf_W: Array) -> Array:
        """Sum one leaf over the workers, each times its share."""
        # The shares [W], with axes of size one added, so that they multiply all axes but the first.
        return jnp.sum(leaf_W * share_W.reshape((-1,) + (1,) * (leaf_W.ndim - 1)), axis=0)

    return jax.tree.map(weighted_sum, difference_W)


AGGREGATORS: dict[str, Aggregator] = {"mean": mean}
"""Aggregators by name, for the option `outer.aggregator`. To use one of your own, add an entry."""


def aggregate_by_trainer(
    difference_R: PyTree,
    sizes: Sequence[int],
    *,
    weights_R: Array | None,
    usable_R: Array,
    aggregate: Aggregator,
) -> tuple[PyTree, Array]:
    """Aggregate the differences of each trainer's workers to its pseudo-gradient.

    Args:
      difference_R: Leaves float32 [R, ...]: trainers' parameters minus their workers'.
      sizes: Number of each trainer's workers [M]; they sum to R.
      weights_R: Relative weights of the workers, float32 [R]; None weighs them equally.
      usable_R: Whether a worker's difference is finite, bool [R]; the others are left out.
      aggregate: Called for each trainer, with its workers' shares in the mean, which sum to 1.

    Returns:
      The pseudo-gradients, leaves [M, ...], and whether a trainer has a usable worker, bool [M].
    """
    if weights_R is None:
        weights_R = jnp.ones(sum(sizes), jnp.float32)

    def one_trainer(trainer_entries: tuple[Array, Array, PyTree]) -> tuple[PyTree, Array]:
        """Aggregate one trainer's workers; return its pseudo-gradient, and whether one is usable.

        `trainer_entries` has usability, weights and differences of the workers [W, ...]. `shares`
        normalises the weights of the usable ones, so that they sum to 1.
        """
        usable_W, weights_W, difference_W = trainer_entries
        share_W, chosen_W = shares(weights_W, usable_W)
        # Set excluded differences to zero: multiplying by a share of zero would keep a NaN.
        zeros_W = jax.tree.map(jnp.zeros_like, difference_W)
        pseudo_grad = aggregate(where_leading(chosen_W, difference_W, zeros_W), share_W)
        return pseudo_grad, jnp.any(usable_W)

    return map_trainers(one_trainer, (usable_R, weights_R, difference_R), sizes)


OUTER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "nesterov": lambda *, momentum: optax.sgd(1.0, momentum=momentum, nesterov=True),
    "sgd": lambda *, momentum: optax.sgd(1.0),
    "adamw": lambda *, momentum: optax.adamw(1.0, weight_decay=0.0),
}
"""Factories of outer optimizers by name, for the option `outer.tx`.

`factory(*, momentum)` returns an optax transformation with learning rate 1; `momentum` is that of
the option `outer.momentum`, which `sgd` and `adamw` ignore.
"""


@on_any_mesh(like_argument_and_replicated)
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
    key: Key[Array, ""] | None = None,
    has_aux: bool = False,
    aggregate: Aggregator = mean,
    precision: Precision = "float32",
    skip_single: bool = False,
) -> tuple[Ensemble, RoundMetrics]:
    """Run one round: S inner updates on every worker, then one outer update of every trainer.

    Pure and not jitted: before `jax.jit`, bind all arguments that are not arrays. No buffers are
    donated. Inner updates, and workers' differences from their trainer, are left out if they are
    not finite (`inner_steps`, `outer_update`). Arrays may be sharded over a mesh with automatic or
    explicit axes; the ensemble keeps its shardings, and metrics are replicated.

    Parameters are the floating-point leaves of any pytree: a dict, a named tuple, a
    `flax.nnx.State`, or the arrays of a partitioned Equinox module. Other leaves are passed to
    `loss_fn` and do not change. These transformations are refused:

    - Those that need the loss or its gradient's function: `optax.contrib.reduce_on_plateau`,
      `optax.lbfgs`, `optax.polyak_sgd`, line searches, an opaque `optax.contrib.sam`.
    - As `inner_tx`, those whose state holds parameters, which an outer update would not change:
      `optax.contrib.schedule_free` and `optax.contrib.sam`. With `schedule_free` as `outer_tx`,
      evaluate at `optax.contrib.schedule_free_eval_params`.
    - `optax.lookahead`, which expects a pair of parameters; the outer update replaces it.

    Args:
      ensemble: Trainers and workers before the round.
      batch: Pytree of leaves [S, R, A*B, ...], one micro-batch of B examples after another.
      loss_fn: `loss_fn(params, micro_batch) -> scalar`, the mean over B examples; with a parameter
        `key` if `key` is given.
      inner_tx: Transformation of a worker's gradients (AdamW in the paper).
      outer_tx: Transformation of a trainer's pseudo-gradient (Nesterov in DiLoCo, SGD in AdLoCo).
      num_accum_steps: A >= 1; gradients of A micro-batches are averaged for one update.
      learning_rate_SR: A factor on each update of `inner_tx`, which should then have learning rate
        1. None means 1.
      weights_R: Relative weights of the workers in their trainer's mean; None weighs them equally.
      key: A typed key, a new one for each round, needed if the loss takes `key`. Each micro-batch
        gets it with the trainer's position, the worker's position and the number of examples used
        before in this round folded in.
      has_aux: Whether `loss_fn` returns a pair (scalar, pytree of arrays); the metrics have the
        arrays' means over each update.
      aggregate: An entry of `AGGREGATORS`, or a function with the same signature.
      precision: Format in which workers send differences and receive the outer update.
      skip_single: Whether a trainer with one worker takes the worker's parameters without
        `outer_tx`, whose state then does not change.

    Returns:
      The ensemble after the round, and its metrics.

    Raises:
      ValueError: If shapes do not fit, `precision` is unknown, the loss is not one number, a key is
        missing or not typed, a transformation is refused or is not the one that made the states, or
        the call is in `jax.shard_map`.

    Source: AdLoCo algorithm 1, lines 5-16; DiLoCo (arXiv 2311.08105), algorithm 1.
    """
    refuse_in_shard_map("outer_step")
    checked_key("key", key, loss_fn)
    num_updates = checked_batch_length(batch, ensemble.num_workers, num_accum_steps, name="batch")
    shape_SR = (num_updates, ensemble.num_workers)
    learning_rate_TR = checked_factors("learning_rate_SR", learning_rate_SR, shape_SR)

    # Divide each update's batch into micro-batches, the last of which completes the update:
    # `update_T` is true there. Without accumulation each micro-batch completes one, which
    # `inner_steps` assumes if `update_T` is None.
    update_T = None
    if num_accum_steps > 1:
        batch = jax.tree.map(lambda leaf: _split_micro_batches(leaf, num_accum_steps), batch)
        update_T = (jnp.arange(num_updates * num_accum_steps) + 1) % num_accum_steps == 0
        if learning_rate_TR is not None:
            learning_rate_TR = jnp.repeat(learning_rate_TR, num_accum_steps, axis=0)
    key_TRB = None
    if key is not None:
        key_TRB = _example_keys(key, ensemble.sizes, batch)

    workers = start_round(ensemble, accumulate=num_accum_steps > 1)
    results = inner_steps(
        workers,
        batch,
        loss_fn,
        inner_tx=inner_tx,
        learning_rate_TR=learning_rate_TR,
        update_T=update_T,
        key_TRB=key_TRB,
        has_aux=has_aux,
    )
    aux_TR = None
    if has_aux:
        workers, loss_TR, skipped_TR, aux_TR = results
    else:
        workers, loss_TR, skipped_TR = results
    ensemble, pseudo_grad_norm_M = outer_update(
        ensemble,
        workers,
        outer_tx=outer_tx,
        weights_R=weights_R,
        aggregate=aggregate,
        precision=precision,
        skip_single=skip_single,
    )

    def by_updates(leaf_TR: Array) -> Array:
        """Divide the micro-batches by their updates: [T, R, ...] -> [S, A, R, ...]."""
        return leaf_TR.reshape(num_updates, num_accum_steps, *leaf_TR.shape[1:])

    metrics = RoundMetrics(
        loss_SR=jnp.mean(by_updates(loss_TR), axis=1),
        skipped_SR=jnp.any(by_updates(skipped_TR), axis=1),
        pseudo_grad_norm_M=pseudo_grad_norm_M,
        aux=jax.tree.map(lambda leaf_TR: jnp.mean(by_updates(leaf_TR), axis=1), aux_TR),
    )
    return ensemble, metrics


def _workers_shardings(
    whole: NamedSharding,
    result: Workers,
    ensemble: Ensemble,
    *,
    accumulate: bool = False,
    reset_tx: optax.GradientTransformation | None = None,
) -> Workers:
    """Return the shardings of the result of `start_round`, whose arguments follow `result`.

    `ensemble` has shardings in place of arrays, and `whole` is the replicated sharding. Workers'
    parameters and sums of gradients are sharded by worker, as the inner states are. Fields that are
    None in `result`, such as the sums if gradients are not accumulated, get a sharding too. So
    `accumulate` and `reset_tx`, which decide about these fields, are not read.
    """
    # The mesh axes of the first axis of the inner states, which counts workers. Some optimizers,
    # such as SGD, have no state.
    state_shardings = jax.tree.leaves(ensemble.inner_state_R)
    workers_axes = state_shardings[0].spec[:1] if state_shardings else ()
    # `Any`, as the fields of `Workers` are declared as arrays. One sharding serves a whole tree.
    by_workers: Any = NamedSharding(whole.mesh, P(*workers_axes))
    count: Any = whole
    return Workers(
        params_R=by_workers,
        inner_state_R=ensemble.inner_state_R,
        grad_sum_R=by_workers,
        num_grads=count,
        finite_R=by_workers,
    )


@on_any_mesh(_workers_shardings)
def start_round(
    ensemble: Ensemble,
    *,
    accumulate: bool = False,
    reset_tx: optax.GradientTransformation | None = None,
) -> Workers:
    """Give every worker the parameters and the inner state that it starts the round with.

    The parameters are its own (`params_R`) if the ensemble keeps them, as that of Streaming DiLoCo
    does. Otherwise `params_R` is None, and the parameters are its trainer's.

    Args:
      ensemble: Trainers and workers between two rounds.
      accumulate: Whether an update averages the gradients of several micro-batches. `inner_steps`
        is then given `update_T`, bool [T], which is true where an update ends. Each worker then has
        a sum of gradients, float32, of the size of the parameters.
      reset_tx: The inner transformation, to start with fresh inner states (as in the reference code
        of AdLoCo). None keeps them (as in DiLoCo).

    Returns:
      The workers; `inner_steps` trains them, and `outer_update` ends their round.

    Raises:
      ValueError: If the parameters hold random state, or state that the model changes.

    Source: AdLoCo algorithm 1, line 6.
    """
    params_R = ensemble.params_R
    if params_R is None:
        params_R = to_workers(ensemble.params_M, ensemble.sizes)
    # `without_state` raises ValueError if a user has put random state or batch statistics there.
    workers = Workers(without_state(params_R), ensemble.inner_state_R)
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


@on_any_mesh(like_argument_and_replicated)
def outer_update(
    ensemble: Ensemble,
    workers: Workers,
    *,
    outer_tx: optax.GradientTransformation,
    weights_R: Float[Array, " R"] | Sequence[float] | None = None,
    aggregate: Aggregator = mean,
    precision: Precision = "float32",
    skip_single: bool = False,
    reduce_scatter: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    all_gather: Callable[[PyTree], PyTree] = lambda packed_M: packed_M,
) -> tuple[Ensemble, Float[Array, " M"]]:
    """End a round: aggregate the workers' differences and apply the outer optimizer.

    This is the only communication between the workers of a trainer. Below float32, differences are
    quantised (`core.compress`), aggregated in float32, and the outer optimizer's updates are
    quantised again; all workers dequantise the same bits, so their parameters agree. Trainers with
    a single worker bypass quantisation.

    A worker whose difference is not finite is masked out. A trainer without a finite
    pseudo-gradient keeps its parameters and outer state bit for bit. Afterwards all workers have
    their trainer's parameters, even if they had their own before.

    Args:
      ensemble: Trainers with the parameters and outer states of the round's start.
      workers: The workers after their inner steps.
      outer_tx: Transformation of a trainer's pseudo-gradient (Nesterov in DiLoCo, SGD in AdLoCo).
      weights_R: Relative weights of the workers in their trainer's mean; None weighs them equally.
      aggregate: An entry of `AGGREGATORS`, or a function with the same signature.
      precision: Format in which workers send differences and receive the outer update.
      skip_single: Whether a trainer with one worker takes the worker's parameters without
        `outer_tx`, whose state then does not change.
      reduce_scatter: Applied to the packed differences and to whether each worker is usable, leaves
        [R, ...], before the aggregation. If workers are spread over devices, pass a constraint that
        shards the parameters and gathers the workers.
      all_gather: Applied to the packed updates of the trainers [M, ...]. If they are spread over
        devices, pass a constraint that gathers them. Not called with float32, where the sharding of
        the new parameters decides.

    Returns:
      The ensemble after the round, and the L2 norm of each trainer's pseudo-gradient, float32 [M];
      NaN if a trainer has no finite pseudo-gradient.

    Raises:
      ValueError: If `weights_R` has another shape, `precision` is unknown, `outer_tx` is lookahead
        or is not the transformation that made the states, or the call is in `jax.shard_map`.

    Source: AdLoCo algorithm 1, lines 14-16; DiLoCo algorithm 1, lines 12-14. Low precision with
      sums in float32: Streaming DiLoCo (arXiv 2501.18512), section 2.4, where every worker runs the
      outer optimizer. Here it runs once for each shard, and its updates are sent back.
    """
    # Two functions, because elsewhere workers and trainers are in different processes.
    difference = pack_differences(ensemble, workers, precision=precision)
    ensemble, norm_M = apply_differences(
        ensemble,
        difference,
        outer_tx=outer_tx,
        weights_R=weights_R,
        aggregate=aggregate,
        precision=precision,
        skip_single=skip_single,
        reduce_scatter=reduce_scatter,
        all_gather=all_gather,
    )
    return ensemble.replace(inner_state_R=workers.inner_state_R), norm_M


@on_any_mesh(like_argument)
def running_average(
    average_M: PyTree, params_M: PyTree, share_M: Float[Array, " M"] | Sequence[float]
) -> PyTree:
    """Move each trainer's average towards its parameters after a round; return the new averages.

    `share_M`, 0 to 1, is the share of the old average: 0 gives `params_M`, 1 the old average. If
    it is 1 - 1 / n after round n, up to a limit, the average is the plain mean of the first
    rounds, and then exponential; the initial parameters do not enter. The new averages have the
    dtypes of `params_M`, and its leaves where these are not floating-point.
    """
    share_M = jnp.asarray(share_M, jnp.float32)

    def mix(old_M: Array | np.ndarray, new_M: Array | np.ndarray) -> Array:
        """Mix one leaf [M, ...] of the old averages with that of the parameters."""
        dtype = at_least_float32(new_M.dtype)
        share = share_M.reshape((-1,) + (1,) * (new_M.ndim - 1)).astype(dtype)
        mixed_M = share * old_M.astype(dtype) + (1 - share) * new_M.astype(dtype)
        return mixed_M.astype(new_M.dtype)

    mixed_M = jax.tree.map(mix, trainable(average_M), trainable(params_M))
    return with_trainable(params_M, mixed_M)


class Differences(NamedTuple):
    """The trainers' parameters minus those of their workers, in the form that is sent; a pytree."""

    packed_R: PyTree  # [R, ...] from `core.compress.pack`
    # [W, ...] float32: the differences of the W single-worker trainers. None if there is no such
    # trainer, or if `packed_R` is not quantised.
    exact_W: PyTree
    usable_R: Bool[Array, " R"]  # whether a worker's difference is finite


@on_any_mesh(replicated)
def pack_differences(
    ensemble: Ensemble,
    workers: Workers,
    *,
    precision: Precision = "float32",
    single_R: Sequence[bool] | None = None,
) -> Differences:
    """Compute the differences that workers send to trainers, the first half of `outer_update`.

    Args:
      ensemble: The trainers at the start of the round; only `sizes` and `params_M` are read.
      workers: The workers after their inner steps; only `params_R` is read.
      precision: Format in which the differences are sent.
      single_R: Whether a worker is its trainer's only one [R]. None: by the sizes. A process that
        holds only some of the workers must pass it.

    Returns:
      The differences in the form that is sent, and which of them are finite.

    Raises:
      ValueError: If `precision` is unknown.

    Source: AdLoCo algorithm 1, line 14; Streaming DiLoCo (arXiv 2501.18512), section 2.4.
    """
    check_precision(precision)
    is_single_R = _are_single(ensemble) if single_R is None else np.array(single_R)

    def subtract(start_R: Array, end_R: Array) -> Array:
        """Return one leaf's difference, in float32."""
        # Cast after the subtraction: a float64 update may be smaller than the spacing of float32.
        difference_R = start_R.astype(at_least_float32(start_R.dtype)) - end_R
        return difference_R.astype(jnp.float32)

    start_R = to_workers(trainable(ensemble.params_M), ensemble.sizes)
    end_R = trainable(workers.params_R)
    difference_R = jax.tree.map(subtract, start_R, end_R)
    # Check the reversed difference, which is finite where the difference is. XLA would store a
    # difference that has two uses; this one is computed within the check.
    usable_R = _are_finite(jax.tree.map(subtract, end_R, start_R))
    if precision == "float32" or is_single_R.all():  # nothing is quantised
        return Differences(difference_R, exact_W=None, usable_R=usable_R)
    exact_W = None
    if is_single_R.any():
        exact_W = jax.tree.map(lambda leaf: leaf[is_single_R], difference_R)
    return Differences(pack(difference_R, precision), exact_W, usable_R)


@on_any_mesh(like_argument_and_replicated)
def apply_differences(
    ensemble: Ensemble,
    differences: Differences,
    *,
    outer_tx: optax.GradientTransformation,
    weights_R: Float[Array, " R"] | Sequence[float] | None = None,
    factor_R: Float[Array, " R"] | Sequence[float] | None = None,
    aggregate: Aggregator = mean,
    precision: Precision = "float32",
    skip_single: bool = False,
    reduce_scatter: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    all_gather: Callable[[PyTree], PyTree] = lambda packed_M: packed_M,
) -> tuple[Ensemble, Float[Array, " M"]]:
    """Aggregate differences and update the trainers, the second half of `outer_update`.

    Inner states are not read and do not change.

    Args:
      ensemble: Trainers with the parameters and outer states of the round's start.
      differences: The result of `pack_differences`, or the concatenated results of several calls.
        For a worker whose difference is missing, pass any finite one and False in `usable_R`.
      outer_tx: Transformation of a trainer's pseudo-gradient.
      weights_R: Relative weights of the workers in their trainer's mean; None weighs them equally.
      factor_R: Multiplies each worker's difference, for instance to clip it; None means 1.
      aggregate: An entry of `AGGREGATORS`, or a function with the same signature.
      precision: Format in which the differences were packed and in which updates are sent.
      skip_single: Whether a trainer with one worker takes the worker's parameters without
        `outer_tx`, whose state then does not change.
      reduce_scatter: Applied to the packed differences and to `usable_R`, leaves [R, ...], before
        the aggregation. If workers are spread over devices, pass a constraint that shards the
        parameters and gathers the workers.
      all_gather: Applied to the packed updates [M, ...]; not called with float32.

    Returns:
      The ensemble after the round, and the L2 norm of each trainer's pseudo-gradient, float32 [M];
      NaN if a trainer has no finite pseudo-gradient and so does not change.

    Raises:
      ValueError: If `weights_R` or `factor_R` has another shape, `precision` is unknown, `outer_tx`
        is lookahead or is not the transformation that made the states, or the call is in
        `jax.shard_map`.

    Source: AdLoCo algorithm 1, lines 15 and 16; DiLoCo algorithm 1, lines 12 to 14.
    """
    refuse_in_shard_map("outer_update")  # there a device could not average over others
    weights_R = checked_factors("weights_R", weights_R, (ensemble.num_workers,))
    factor_R = checked_factors("factor_R", factor_R, (ensemble.num_workers,))
    transform = checked_update(
        "outer_tx",
        outer_tx,
        ensemble.outer_state_M,
        ensemble.params_M,
        refused=(optax.LookaheadState,),
    )
    check_precision(precision)
    sizes = ensemble.sizes
    single_M = np.array(sizes) == 1
    single_R = _are_single(ensemble)
    if single_R.all():
        precision = "float32"  # each trainer has one worker: nothing is sent

    # What the workers sent: dequantised differences, and the exact ones of single workers.
    start_M = trainable(ensemble.params_M)
    like_R = jax.tree.map(  # shapes and dtypes of the differences
        lambda leaf: jax.ShapeDtypeStruct((sum(sizes), *leaf.shape[1:]), jnp.float32), start_M
    )
    difference_R = unpack(reduce_scatter(differences.packed_R), like_R, precision)
    if differences.exact_W is not None:
        difference_R = jax.tree.map(
            lambda leaf, exact: leaf.at[single_R].set(exact), difference_R, differences.exact_W
        )
    if factor_R is not None:
        difference_R = jax.tree.map(
            lambda leaf: leaf * factor_R.reshape((-1,) + (1,) * (leaf.ndim - 1)), difference_R
        )
    usable_R = reduce_scatter(differences.usable_R)

    # The pseudo-gradients, and the outer optimizer's updates.
    pseudo_grad_M, is_usable_M = aggregate_by_trainer(
        difference_R, sizes, weights_R=weights_R, usable_R=usable_R, aggregate=aggregate
    )
    norm_M = norms(pseudo_grad_M)
    is_usable_M &= jnp.isfinite(norm_M)
    # A transformation may widen the dtypes of its state; the ensemble keeps them.
    updates_M, outer_state_M = jax.vmap(transform)(pseudo_grad_M, ensemble.outer_state_M, start_M)
    outer_state_M = with_dtypes(outer_state_M, ensemble.outer_state_M)
    if skip_single:
        # The pseudo-gradient is the trainer minus its worker, so this update leads to the worker.
        to_worker_M = jax.tree.map(jnp.negative, pseudo_grad_M)
        updates_M = where_leading(single_M, to_worker_M, updates_M)
        outer_state_M = where_leading(single_M, ensemble.outer_state_M, outer_state_M)
    if precision != "float32":
        updates_M = _quantised_if_sent(updates_M, single_M, precision, all_gather)

    # The trainers after the round; one without a finite pseudo-gradient does not change.
    end_M = jax.vmap(optax.apply_updates)(start_M, updates_M)
    params_M = with_trainable(ensemble.params_M, where_leading(is_usable_M, end_M, start_M))
    params_R = None
    if ensemble.params_R is not None:  # workers keep parameters of their own
        params_R = to_workers(params_M, sizes)
    ensemble = ensemble.replace(
        params_M=params_M,
        params_R=params_R,
        outer_state_M=where_leading(is_usable_M, outer_state_M, ensemble.outer_state_M),
        round=ensemble.round + 1,
    )
    return ensemble, jnp.where(is_usable_M, norm_M, jnp.nan)


def add_packed(params_M: PyTree, packed_M: PyTree, precision: Precision) -> PyTree:
    """Add packed updates of the outer optimizer to trainers' parameters; return the new parameters.

    `packed_M` is what `outer_update` hands to `all_gather`. Leaves of `params_M` and of the result
    are [M, ...]. The result has the same bits as the new parameters in `outer_update`, on every
    device.
    """
    start_M = trainable(params_M)
    like_M = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), start_M)
    updates_M = unpack(packed_M, like_M, precision)
    return with_trainable(params_M, jax.vmap(optax.apply_updates)(start_M, updates_M))


def _are_single(ensemble: Ensemble) -> np.ndarray:
    """Return whether each worker is its trainer's only one, bool [R]."""
    return np.repeat(np.array(ensemble.sizes) == 1, ensemble.sizes)


def _are_finite(tree_X: PyTree) -> Array:
    """Return whether all leaves [X, ...] are finite at each index of the first axis, bool [X]."""
    finite_X_of_leaves = [
        jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
        for leaf in jax.tree.leaves(tree_X)
    ]
    return functools.reduce(jnp.logical_and, finite_X_of_leaves)


def _quantised_if_sent(
    updates_M: PyTree,
    single_M: np.ndarray,
    precision: Precision,
    all_gather: Callable[[PyTree], PyTree],
) -> PyTree:
    """Return the updates [M, ...] as they arrive: packed, gathered and unpacked.

    Those of a trainer with one worker (`single_M`) are not sent, so they stay exact.
    """
    arrived_M = unpack(all_gather(pack(updates_M, precision)), updates_M, precision)
    if not single_M.any():
        return arrived_M

    def keep_single(arrived: Array, exact: Array) -> Array:
        """Put the exact updates of trainers with one worker back, in one leaf."""
        return arrived.at[single_M].set(exact[single_M])

    return jax.tree.map(keep_single, arrived_M, updates_M)


def _example_keys(key: Array, sizes: Sequence[int], batch_TRB: PyTree) -> Array:
    """Derive from `key` a random key for each example of a batch with leaves [T, R, B, ...].

    T counts micro-batches, R the workers of all trainers, and B examples. `sizes` has the number of
    each trainer's workers. The result is [T, R, B]. Folded in are the position of the trainer, that
    of the worker among the workers of all trainers, and that of the example among all that this
    worker has in the round. The trainer is folded in so that a worker that has moved to another
    trainer draws other numbers.
    """
    num_T, num_R, num_B = jax.tree.leaves(batch_TRB)[0].shape[:3]
    trainer_1R1 = of_workers(sizes)[None, :, None]
    worker_1R1 = np.arange(num_R)[None, :, None]
    position_T1B = np.arange(num_T * num_B).reshape(num_T, 1, num_B)  # in the worker's round
    return fold_in_each(key, trainer_1R1, worker_1R1, position_T1B)


def _split_micro_batches(leaf: Array, num_accum_steps: int) -> Array:
    """Split the batches of updates into micro-batches: [S, R, A*B, ...] -> [S*A, R, B, ...]."""
    num_updates, num_workers, num_examples, *rest = leaf.shape
    size = num_examples // num_accum_steps
    leaf_SRAB = leaf.reshape(num_updates, num_workers, num_accum_steps, size, *rest)
    leaf_SARB = jnp.moveaxis(leaf_SRAB, 2, 1)
    return leaf_SARB.reshape(num_updates * num_accum_steps, num_workers, size, *rest)
