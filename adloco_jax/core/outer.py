"""One round: every worker's inner updates, then one outer update per trainer (AdLoCo algorithm 1).

`outer_step` is the whole round for callers with data at hand. A host loop that streams a long,
accumulated round in pieces calls its three parts: `start_round`, `inner_steps`, `outer_update`.
Where workers are in other programs, the last is in two: `pack_differences`, `apply_differences`.
One that synchronises a fragment of the parameters at a time has, in place of the last,
`outer_update_fragment` and `receive_fragment`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Key, PyTree

from adloco_jax.core.aggregate import Aggregator, by_trainers, mean
from adloco_jax.core.arguments import (
    checked_batch_length,
    checked_factors,
    checked_update,
    fold_in_each,
)
from adloco_jax.core.compress import Precision, check_precision, pack, unpack
from adloco_jax.core.inner import inner_steps
from adloco_jax.core.meshes import on_any_mesh
from adloco_jax.core.types import (
    Ensemble,
    LossFn,
    RoundMetrics,
    Workers,
    at_least_float32,
    norms,
    of_owners,
    trainable,
    where_leading,
    with_dtypes,
    with_trainable,
)


@on_any_mesh(lambda whole, _, ensemble, *args, **kwargs: (ensemble, whole))
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

    Pure and not jitted; wrap it in `jax.jit` with the functions and `num_accum_steps` fixed.
    Buffers are not donated here. What is not finite is left out, see `inner_steps` and
    `outer_update`. Arrays may be sharded over a mesh with automatic or explicit axes; the ensemble
    keeps its shardings, and metrics are replicated.

    Parameters are the floating-point leaves of any pytree: a dict, a named tuple, `flax.nnx.State`,
    the arrays of a partitioned Equinox module. Others, such as typed PRNG keys and counts, are
    given to `loss_fn` and stay as they are. Transformations get gradients, state and parameters, no
    more; `outer_update` can give an `outer_tx` extra arguments:

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
      loss_fn: `loss_fn(params, micro_batch) -> scalar`, the mean loss over B examples; with a
        parameter `key` if `key` is given.
      inner_tx: Transformation of a worker's gradients (AdamW in the paper).
      outer_tx: Transformation of a trainer's pseudo-gradient (Nesterov in DiLoCo, SGD in AdLoCo).
      num_accum_steps: A >= 1; gradients of A micro-batches are averaged for one update.
      learning_rate_SR: Factors on the updates that `inner_tx` makes, which is then built with
        learning rate 1; None leaves them as they are.
      weights_R: Relative weights of the workers in their trainer's mean, for instance the examples
        each consumed; None weighs them alike.
      key: For a loss that takes `key`, which each micro-batch is given a typed key of its own for:
        this one folded with the trainer's position, the worker's, and the number of examples that
        the worker has used before in this round.
      has_aux: Whether `loss_fn` returns a pair (scalar, pytree of arrays); of the latter the
        metrics have each update's mean.
      aggregate: How workers' differences become a trainer's pseudo-gradient: an entry of
        `AGGREGATORS`, or a function like them.
      precision: In which differences and updates travel between workers: "float32", "bfloat16"
        or "int4".
      skip_single: Whether a trainer with one worker takes its parameters as they are, without
        `outer_tx`, whose state waits until it has more.

    Returns:
      The ensemble after the round, and its metrics.

    Raises:
      ValueError: While tracing, if the leaves of `batch` do not start with the same [S, R, A*B],
        `learning_rate_SR` or `weights_R` has another shape, `precision` is unknown, parameters are
        complex or none is floating-point, `loss_fn` does not return one number, or needs a key and
        has none, or a transformation is one of those above.

    Source: AdLoCo algorithm 1, lines 5-16; DiLoCo (arXiv 2311.08105), algorithm 1.
    """
    num_updates = checked_batch_length(batch, ensemble.num_workers, num_accum_steps, name="batch")
    shape_SR = (num_updates, ensemble.num_workers)
    learning_rate_TR = checked_factors("learning_rate_SR", learning_rate_SR, shape_SR)
    update_T = None
    if num_accum_steps > 1:
        batch = jax.tree.map(lambda leaf: _split_micro_batches(leaf, num_accum_steps), batch)
        update_T = (jnp.arange(num_updates * num_accum_steps) + 1) % num_accum_steps == 0
        if learning_rate_TR is not None:
            learning_rate_TR = jnp.repeat(learning_rate_TR, num_accum_steps, axis=0)
    workers, *measured_TR = inner_steps(
        start_round(ensemble, accumulate=num_accum_steps > 1),
        batch,
        loss_fn,
        inner_tx=inner_tx,
        learning_rate_TR=learning_rate_TR,
        update_T=update_T,
        key_TRB=None if key is None else _example_keys(key, ensemble.owners, batch),
        has_aux=has_aux,
    )
    ensemble, pseudo_grad_norm_M = outer_update(
        ensemble,
        workers,
        outer_tx=outer_tx,
        weights_R=weights_R,
        aggregate=aggregate,
        precision=precision,
        skip_single=skip_single,
    )
    loss_SAR, skipped_SAR, *aux_SAR = jax.tree.map(
        lambda leaf: leaf.reshape(num_updates, num_accum_steps, *leaf.shape[1:]), measured_TR
    )
    return ensemble, RoundMetrics(
        loss_SR=jnp.mean(loss_SAR, axis=1),
        skipped_SR=jnp.any(skipped_SAR, axis=1),
        pseudo_grad_norm_M=pseudo_grad_norm_M,
        aux=jax.tree.map(lambda leaf: jnp.mean(leaf, axis=1), aux_SAR[0]) if has_aux else None,
    )


def _workers_shardings(whole: NamedSharding, _, ensemble: Ensemble, **__) -> Workers:
    """Like the workers' inner states: what is [R, ...] is spread as their first axis is."""
    spec = next((at.spec for at in jax.tree.leaves(ensemble.inner_state_R)), P())
    pool = NamedSharding(whole.mesh, P(*spec[:1]))
    shardings: list[Any] = [pool, ensemble.inner_state_R, pool, whole, pool]
    return Workers(*shardings)


@on_any_mesh(_workers_shardings)
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


@on_any_mesh(lambda whole, _, ensemble, *args, **kwargs: (ensemble, whole))
def outer_update(
    ensemble: Ensemble,
    workers: Workers,
    *,
    outer_tx: optax.GradientTransformation,
    weights_R: Float[Array, " R"] | Sequence[float] | None = None,
    aggregate: Aggregator = mean,
    precision: Precision = "float32",
    extra_M: Mapping[str, Float[Array, " M"] | Sequence[float]] | None = None,
    skip_single: bool = False,
    reduce_scatter: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    all_gather: Callable[[PyTree], PyTree] = lambda packed_M: packed_M,
) -> tuple[Ensemble, Float[Array, " M"]]:
    """End a round: the only communication between the workers of a trainer.

    Below float32 both of its halves are quantised (`core.compress`): the workers' differences,
    whose aggregate is formed in float32 and reaches the outer optimizer unrounded; and the
    optimizer's updates, which all workers dequantise from the same bits, so that their copies of
    the parameters agree. Single-worker trainers bypass quantisation.

    A worker whose difference is not finite is left out of the aggregate, by selection; a trainer
    without a finite pseudo-gradient keeps its parameters and outer state bit for bit. Workers that
    had parameters of their own are at their trainer's afterwards.

    Args:
      ensemble: As it was when the round began.
      workers: The workers after their inner updates.
      outer_tx: Transformation of the pseudo-gradient, which is the aggregate, in float32, of the
        trainer's parameters minus its workers'. Which ones are refused, and why, is said at
        `outer_step`.
      weights_R: Relative weights of the workers in their trainer's mean; None weighs them alike.
      aggregate: How workers' differences become a trainer's pseudo-gradient: an entry of
        `AGGREGATORS`, or a function like them.
      precision: In which differences and updates travel: "float32", "bfloat16" or "int4".
      extra_M: Extra arguments for an `outer_tx` that takes some, by name, a number for each
        trainer: `{"interval": ...}` for `contrib.nesterov_by_interval`. Others ignore them.
      skip_single: Whether a trainer with one worker takes its parameters as they are, without
        `outer_tx`, whose state waits until it has more.
      reduce_scatter: Applied to pytrees of leaves [R, ...] before they are averaged: the workers'
        differences, packed, and whether they are usable. Where workers are spread over devices, a
        sharding constraint by which each device holds its shard of the parameters for all workers.
      all_gather: Applied to the trainers' updates [M, ...], packed. In float32 the new parameters
        travel instead, by whatever sharding they are given.

    Returns:
      The ensemble after the round, and the L2 norm of each pseudo-gradient, NaN for one left out.

    Raises:
      ValueError: While tracing, as `outer_step` does for `weights_R`, `precision`, parameters and
        `outer_tx`, and if an array of `extra_M` has another shape.

    Source: AdLoCo algorithm 1, lines 14-16; DiLoCo algorithm 1, lines 12-14. Low precision with
    sums in float32: Streaming DiLoCo (arXiv 2501.18512), section 2.4, whose outer optimizer runs on
    every worker; here it runs once for each share, and its updates are what goes back.
    """
    difference = pack_differences(ensemble, workers, precision=precision)
    ensemble, norm_M = apply_differences(
        ensemble,
        difference,
        outer_tx=outer_tx,
        weights_R=weights_R,
        aggregate=aggregate,
        precision=precision,
        extra_M=extra_M,
        skip_single=skip_single,
        reduce_scatter=reduce_scatter,
        all_gather=all_gather,
    )
    return ensemble.replace(inner_state_R=workers.inner_state_R), norm_M


class Differences(NamedTuple):
    """Workers' differences from their trainers, as they are sent; a pytree node."""

    packed_R: PyTree  # [R, ...] from `core.compress.pack`
    exact_W: PyTree  # [W, ...] float32, those of W single-worker trainers; None if all are exact
    usable_R: Bool[Array, " R"]  # whether a worker's difference is finite


@on_any_mesh(lambda whole, result, *args, **kwargs: jax.tree.map(lambda _: whole, result))
def pack_differences(
    ensemble: Ensemble,
    workers: Workers,
    *,
    precision: Precision = "float32",
    single_R: Sequence[bool] | None = None,
) -> Differences:
    """The first half of `outer_update`: what workers send to their trainers at a round's end.

    Args:
      ensemble: As it was when the round began; of it the owners and `params_M` are read.
      workers: The workers after their inner updates.
      precision: In which differences travel: "float32", "bfloat16" or "int4". The differences of
        single-worker trainers, which are not sent, stay in float32.
      single_R: Which workers are their trainer's only one; None: as the owners say. A program that
        has a part of the workers says it.

    Returns:
      The differences, for `apply_differences` with the same precision.

    Raises:
      ValueError: While tracing, if `precision` is unknown, or as `outer_update` for parameters.

    Source: AdLoCo algorithm 1, line 14; Streaming DiLoCo (arXiv 2501.18512), section 2.4.
    """
    check_precision(precision)
    chosen_R = _are_single(ensemble) if single_R is None else np.array(single_R)

    def subtract(start_R, end_R):
        # Cast only now: a float64 parameter moves by less than its float32 neighbours are apart.
        difference_R = start_R.astype(at_least_float32(start_R.dtype)) - end_R
        return difference_R.astype(jnp.float32)

    start_R = of_owners(trainable(ensemble.params_M), ensemble.owners)
    end_R = trainable(workers.params_R)
    difference_R = jax.tree.map(subtract, start_R, end_R)
    # Looked at the other way round, as XLA would keep all differences between two uses of them.
    usable_R = _are_finite(jax.tree.map(subtract, end_R, start_R))
    if precision == "float32" or chosen_R.all():
        return Differences(difference_R, None, usable_R)
    exact_W = jax.tree.map(lambda leaf: leaf[chosen_R], difference_R) if chosen_R.any() else None
    return Differences(pack(difference_R, precision), exact_W, usable_R)


@on_any_mesh(lambda whole, _, ensemble, *args, **kwargs: (ensemble, whole))
def apply_differences(
    ensemble: Ensemble,
    differences: Differences,
    *,
    outer_tx: optax.GradientTransformation,
    weights_R: Float[Array, " R"] | Sequence[float] | None = None,
    aggregate: Aggregator = mean,
    precision: Precision = "float32",
    extra_M: Mapping[str, Float[Array, " M"] | Sequence[float]] | None = None,
    skip_single: bool = False,
    reduce_scatter: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    all_gather: Callable[[PyTree], PyTree] = lambda packed_M: packed_M,
) -> tuple[Ensemble, Float[Array, " M"]]:
    """The second half of `outer_update`: the trainers' step on what their workers have sent.

    A worker whose difference is missing has any finite one, and False in `usable_R`.

    Args:
      ensemble: As it was when the round began; inner states are not read.
      differences: From `pack_differences`, or of several calls of it, one after another.
      outer_tx: As of `outer_update`, like all that follow.
      weights_R: Relative weights of the workers in their trainer's mean.
      aggregate: How workers' differences become a trainer's pseudo-gradient.
      precision: The one that the differences were packed in.
      extra_M: Extra arguments for an `outer_tx` that takes some.
      skip_single: Whether a trainer with one worker takes its parameters as they are.
      reduce_scatter: Applied to the packed differences and to `usable_R`.
      all_gather: Applied to the trainers' updates, packed.

    Returns:
      The ensemble after the round, with the inner states that it had, and the L2 norm of each
      pseudo-gradient, NaN for one left out.

    Raises:
      ValueError: While tracing, as `outer_update`.

    Source: AdLoCo algorithm 1, lines 15 and 16; DiLoCo algorithm 1, lines 12 to 14.
    """
    owners = ensemble.owners
    weights_R = checked_factors("weights_R", weights_R, (ensemble.num_workers,))
    extra = {
        name: checked_factors(f"extra_M[{name!r}]", values, (ensemble.num_trainers,))
        for name, values in (extra_M or {}).items()
    }
    transform = checked_update(
        "outer_tx", outer_tx, ensemble.outer_state_M, refused=(optax.LookaheadState,)
    )
    check_precision(precision)
    single_M, single_R = np.bincount(owners) == 1, _are_single(ensemble)
    if single_R.all():
        precision = "float32"  # each has one worker: nothing is sent
    start_M = trainable(ensemble.params_M)
    like_R = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(owners), *leaf.shape[1:]), jnp.float32), start_M
    )
    difference_R = unpack(reduce_scatter(differences.packed_R), like_R, precision)
    if differences.exact_W is not None:
        difference_R = jax.tree.map(
            lambda leaf, exact: leaf.at[single_R].set(exact), difference_R, differences.exact_W
        )
    usable_R = reduce_scatter(differences.usable_R)
    pseudo_grad_M, is_usable_M = by_trainers(
        difference_R, owners, weights_R=weights_R, usable_R=usable_R, aggregate=aggregate
    )
    norm_M = norms(pseudo_grad_M)
    is_usable_M &= jnp.isfinite(norm_M)
    updates_M, outer_state_M = jax.vmap(transform)(
        pseudo_grad_M, ensemble.outer_state_M, start_M, **extra
    )
    outer_state_M = with_dtypes(outer_state_M, ensemble.outer_state_M)
    if skip_single:
        as_is_M = jax.tree.map(jnp.negative, pseudo_grad_M)
        updates_M = where_leading(single_M, as_is_M, updates_M)
        outer_state_M = where_leading(single_M, ensemble.outer_state_M, outer_state_M)
    if precision != "float32":
        updates_M = _send(updates_M, single_M, precision, all_gather)
    end_M = jax.vmap(optax.apply_updates)(start_M, updates_M)
    params_M = with_trainable(ensemble.params_M, where_leading(is_usable_M, end_M, start_M))
    params_R = None if ensemble.params_R is None else of_owners(params_M, owners)
    ensemble = ensemble.replace(
        params_M=params_M,
        params_R=params_R,
        outer_state_M=where_leading(is_usable_M, outer_state_M, ensemble.outer_state_M),
        round=ensemble.round + 1,
    )
    return ensemble, jnp.where(is_usable_M, norm_M, jnp.nan)


def _are_single(ensemble: Ensemble) -> np.ndarray:
    """Bool [R]: the workers that are their trainer's only one."""
    return (np.bincount(ensemble.owners) == 1)[ensemble.owner_R]


def _are_finite(tree_X: PyTree) -> Array:
    """Whether all numbers of each entry of the leading axis are finite, bool [X]."""
    leaves = jax.tree.leaves(tree_X)
    found = [jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in leaves]
    return functools.reduce(jnp.logical_and, found)


def _send(
    tree_X: PyTree, single_X: np.ndarray, precision: Precision, move: Callable[[PyTree], PyTree]
) -> PyTree:
    """`tree_X` as received: quantised, except for the entries of single-worker trainers."""
    arrived_X = unpack(move(pack(tree_X, precision)), tree_X, precision)
    if precision == "float32" or not single_X.any():
        return arrived_X
    return jax.tree.map(lambda leaf, own: leaf.at[single_X].set(own[single_X]), arrived_X, tree_X)


def _example_keys(key: Array, owners: Sequence[int], batch_TRB: PyTree) -> Array:
    """Typed keys [T, R, B]: of the trainer, the worker, and the example's place in its round."""
    num_T, num_R, num_B = jax.tree.leaves(batch_TRB)[0].shape[:3]
    place_TRB = np.arange(num_T * num_B).reshape(num_T, 1, num_B)
    return fold_in_each(
        key, np.reshape(owners, (1, num_R, 1)), np.arange(num_R).reshape(1, num_R, 1), place_TRB
    )


def _split_micro_batches(leaf: Array, num_accum_steps: int) -> Array:
    """[S, R, A*B, ...] -> [S*A, R, B, ...]."""
    num_updates, num_workers, examples = leaf.shape[:3]
    micro = examples // num_accum_steps
    leaf = leaf.reshape(num_updates, num_workers, num_accum_steps, micro, *leaf.shape[3:])
    leaf = jnp.moveaxis(leaf, 2, 1)
    return leaf.reshape(num_updates * num_accum_steps, num_workers, micro, *leaf.shape[4:])
