"""Streaming DiLoCo (arXiv 2501.18512): a round synchronises F fragments one after another.

The first axis with at least F entries, after that of trainers or workers, is divided: entry i
belongs to fragment i % F, e.g. every F-th layer. Leaves without such an axis are in fragment 0.

Axes of arrays: M trainers, R workers, X either of them, T micro-batches. Packed arrays are in the
form that is sent (`core.compress`). A pseudo-gradient is the mean of the differences of a trainer's
workers from the trainer. `on_any_mesh` lets a function take arrays that are sharded over explicit
axes of a mesh too; its argument says how the results are sharded.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from adloco_jax.core.compress import Precision
from adloco_jax.core.meshes import like_argument, like_argument_and_replicated, on_any_mesh
from adloco_jax.core.outer import Aggregator, mean, outer_update, start_round
from adloco_jax.core.types import (
    Ensemble,
    Workers,
    at_least_float32,
    norms,
    to_workers,
    trainable,
    where_leading,
    with_trainable,
)


@on_any_mesh(like_argument)
def take_fragment(tree_X: PyTree, fragment: int | Int[Array, ""], *, num_fragments: int) -> PyTree:
    """Take one fragment, 0 to F - 1, out of a tree of parameters with leaves [X, ...].

    In the result a divided axis of n entries has ceil(n / F), with zeros as padding. A leaf that is
    not divided is whole in fragment 0, and zero in all others. As `fragment` may be traced, one
    program serves every fragment.
    """
    if num_fragments == 1:  # the fragment is the whole tree
        return tree_X

    def take(leaf_X: Array) -> Array:
        """Take the fragment out of one leaf."""
        axis = _axis(leaf_X, num_fragments)
        if axis is None:
            return jnp.where(fragment == 0, leaf_X, jnp.zeros_like(leaf_X))
        split_X = _split(leaf_X, axis, num_fragments)
        return lax.dynamic_index_in_dim(split_X, fragment, axis + 1, keepdims=False)

    return jax.tree.map(take, tree_X)


@on_any_mesh(like_argument)
def put_fragment(
    tree_X: PyTree, part_X: PyTree, fragment: int | Int[Array, ""], *, num_fragments: int
) -> PyTree:
    """Write the entries of one fragment back into a tree: the inverse of `take_fragment`.

    `tree_X` is the whole tree, `part_X` the fragment in the shape that `take_fragment` returns. The
    result is the whole tree, in which only the fragment's entries have changed.
    """
    if num_fragments == 1:  # the fragment is the whole tree
        return part_X

    def put(leaf_X: Array, new_X: Array) -> Array:
        """Write the fragment's entries, `new_X`, into one leaf."""
        axis = _axis(leaf_X, num_fragments)
        if axis is None:
            return jnp.where(fragment == 0, new_X, leaf_X)
        split_X = _split(leaf_X, axis, num_fragments)
        split_X = lax.dynamic_update_index_in_dim(split_X, new_X, fragment, axis + 1)
        # Join the two axes that `_split` made, and drop its padding.
        shape = list(leaf_X.shape)
        shape[axis] = split_X.shape[axis] * num_fragments
        padded_X = split_X.reshape(shape)
        return lax.slice_in_dim(padded_X, 0, leaf_X.shape[axis], axis=axis)

    return jax.tree.map(put, tree_X, part_X)


@on_any_mesh(like_argument_and_replicated)
def outer_update_fragment(
    ensemble: Ensemble,
    sent_R: PyTree,
    fragment: int | Int[Array, ""],
    *,
    num_fragments: int,
    outer_tx: optax.GradientTransformation,
    precision: Precision = "float32",
    weights_R: Float[Array, " R"] | Sequence[float] | None = None,
    aggregate: Aggregator = mean,
    keep: Callable[[PyTree], PyTree] = lambda tree_M: tree_M,
    reduce_scatter: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    all_gather: Callable[[PyTree], PyTree] = lambda tree_M: tree_M,
) -> tuple[Ensemble, Float[Array, " M"]]:
    """Synchronise one fragment of the parameters: apply `outer_update` to its entries.

    Other entries, in parameters and outer state, do not change, nor do the workers (see
    `receive_fragment`). Updates made after sending do not enter, so a compiler can overlap them.
    State of `outer_tx` that belongs to no single parameter, such as a count, is updated with every
    fragment. The last fragment ends the round.

    Args:
      ensemble: Trainers, which have the fragment as it was last synchronised.
      sent_R: The workers' fragment at the time of sending, from `take_fragment`.
      fragment: Position of the fragment, 0 to F - 1.
      num_fragments: F.
      outer_tx: Transformation of a trainer's pseudo-gradient.
      precision: Format in which workers send differences and receive the outer update.
      weights_R: Relative weights of the workers in their trainer's mean; None weighs them equally.
      aggregate: An entry of `AGGREGATORS`, or a function with the same signature.
      keep: Applied to the fragment of the trainers' parameters. If these are replicated, pass a
        constraint that keeps them so; else the partitioner shards and all-gathers the fragment.
      reduce_scatter: Applied to the packed differences and to whether each worker's difference is
        finite, leaves [R, ...], before the aggregation.
      all_gather: Applied to the trainers' packed updates [M, ...], or with float32 to the
        fragment's new parameters.

    Returns:
      The ensemble, and the L2 norm of each trainer's pseudo-gradient over the fragment; NaN if it
      is not finite and was not applied.

    Source: Streaming DiLoCo (arXiv 2501.18512), sections 2.2 and 2.3.
    """

    def take(tree_X: PyTree) -> PyTree:
        """Take the fragment out of a tree of parameters."""
        return take_fragment(tree_X, fragment, num_fragments=num_fragments)

    def put(tree_X: PyTree, part_X: PyTree) -> PyTree:
        """Write the fragment `part_X` into a tree of parameters."""
        return put_fragment(tree_X, part_X, fragment, num_fragments=num_fragments)

    # For each array of the outer state, whether it follows the parameters, as momentum does, and so
    # is divided into fragments. Others, such as a count, are whole in every fragment.
    is_divided = of_params(outer_tx, ensemble.outer_state_M)

    def take_state(is_divided: bool, leaf_M: Array) -> Array:
        """Take the fragment out of one array of the outer state, if it is divided."""
        return take(leaf_M) if is_divided else leaf_M

    def put_state(is_divided: bool, leaf_M: Array, new_M: Array) -> Array:
        """Write the fragment into one array of the outer state, or replace the whole array."""
        return put(leaf_M, new_M) if is_divided else new_M

    # The fragment as an ensemble of its own.
    part = ensemble.replace(
        params_M=keep(take(ensemble.params_M)),
        outer_state_M=jax.tree.map(take_state, is_divided, ensemble.outer_state_M),
        params_R=None,
    )
    part, norm_M = outer_update(
        part,
        Workers(params_R=sent_R, inner_state_R=ensemble.inner_state_R),
        outer_tx=outer_tx,
        precision=precision,
        weights_R=weights_R,
        aggregate=aggregate,
        reduce_scatter=reduce_scatter,
        all_gather=all_gather,
    )
    all_single = ensemble.num_workers == ensemble.num_trainers
    if precision == "float32" or all_single:  # `outer_update` then has not called `all_gather`
        part = part.replace(params_M=all_gather(part.params_M))

    ensemble = ensemble.replace(
        params_M=put(ensemble.params_M, part.params_M),
        outer_state_M=jax.tree.map(
            put_state, is_divided, ensemble.outer_state_M, part.outer_state_M
        ),
        round=jnp.where(fragment == num_fragments - 1, part.round, ensemble.round),
    )
    return ensemble, norm_M


@on_any_mesh(like_argument)
def receive_fragment(
    workers: Workers,
    ensemble: Ensemble,
    fragment: int | Int[Array, ""],
    *,
    num_fragments: int,
    mixing: float = 0.0,
) -> Workers:
    """Copy a synchronised fragment from each trainer to its workers, or mix it with theirs.

    The fragment is the one at the position `fragment`, 0 to F - 1, of `num_fragments`, F. Only
    `sizes` and `params_M` of `ensemble` are read. `mixing`, 0 to 1, is the share of a worker's
    own entries in the mixture; a worker whose own entries are not finite takes the trainer's alone.
    Returns the workers with the fragment; all else in them stays.

    Source: Streaming DiLoCo (arXiv 2501.18512), section 2.3; its alpha is `mixing`.
    """
    new_M = take_fragment(ensemble.params_M, fragment, num_fragments=num_fragments)
    new_R = to_workers(new_M, ensemble.sizes)
    if mixing:
        # Only floating-point leaves can be mixed.
        own_R = take_fragment(workers.params_R, fragment, num_fragments=num_fragments)
        own_R = trainable(own_R)
        arrived_R = trainable(new_R)

        def mix(own: Array, new: Array) -> Array:
            """Mix one leaf of the worker's fragment with the trainer's, at least in float32."""
            dtype = at_least_float32(own.dtype)
            mixed = mixing * own.astype(dtype) + (1 - mixing) * new.astype(dtype)
            return mixed.astype(own.dtype)

        mixed_R = jax.tree.map(mix, own_R, arrived_R)
        is_finite_R = jnp.isfinite(norms(own_R))
        mixed_R = where_leading(is_finite_R, mixed_R, arrived_R)
        new_R = with_trainable(new_R, mixed_R)
    params_R = put_fragment(workers.params_R, new_R, fragment, num_fragments=num_fragments)
    return workers.replace(params_R=params_R)


def fragment_steps(
    ensemble: Ensemble,
    workers: Workers,
    inputs_T: PyTree,
    fragment: int | Int[Array, ""],
    *,
    steps: Callable,
    num_fragments: int,
    outer_tx: optax.GradientTransformation,
    aggregate: Aggregator = mean,
    precision: Precision = "float32",
    delay: int = 0,
    mixing: float = 0.0,
    keep: Callable[[PyTree], PyTree] = lambda tree_M: tree_M,
    reduce_scatter: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    all_gather: Callable[[PyTree], PyTree] = lambda tree_M: tree_M,
) -> tuple[Ensemble, Workers, PyTree, Float[Array, " M"]]:
    """Run inner steps, and synchronise one fragment at their end; F such calls make a round.

    Args:
      ensemble: Trainers; the inner states in it are not read.
      workers: The workers before the inner steps.
      inputs_T: A tuple of the arguments of `steps` after the workers, leaves [T, ...].
      fragment: Position of the fragment, 0 to F - 1.
      steps: `steps(workers, *inputs) -> (workers, *measured)`: `inner_steps` with its loss and
        transformation bound. Leaves of `measured` are [T, ...].
      num_fragments: F.
      outer_tx: Transformation of a trainer's pseudo-gradient.
      aggregate: An entry of `AGGREGATORS`, or a function with the same signature.
      precision: Format in which workers send differences and receive the outer update.
      delay: Number of micro-batches, 0 to T - 1, from the sending of the fragment to its arrival. A
        compiler can overlap them with the synchronisation.
      mixing: Share, 0 to 1, of a worker's own entries when the fragment arrives.
      keep: Applied to the fragment of the trainers' parameters; for parameters that are replicated
        over devices, a constraint that keeps them so.
      reduce_scatter: Applied to the packed differences, and to whether each worker's is finite,
        leaves [R, ...], before the aggregation.
      all_gather: Applied to the packed updates [M, ...], or with float32 to the new parameters.

    Returns:
      The ensemble; the workers; the list of what `steps` measured for each micro-batch, leaves
      [T, ...]; and the L2 norm of each trainer's pseudo-gradient over the fragment.

    Source: Streaming DiLoCo (arXiv 2501.18512), algorithm 2.
    """

    def advance(workers: Workers, micro_batches: slice) -> tuple:
        """Run the inner steps on the micro-batches of a slice of T."""
        inputs = jax.tree.map(lambda leaf: leaf[micro_batches], inputs_T)
        return steps(workers, *inputs)

    num_micro_batches = jax.tree.leaves(inputs_T)[0].shape[0]
    num_before = num_micro_batches - delay  # those before the fragment is sent
    workers, *measured_T = advance(workers, slice(None, num_before))
    # The synchronisation does not depend on the steps after the sending, so they can overlap.
    sent_R = take_fragment(workers.params_R, fragment, num_fragments=num_fragments)
    ensemble, norm_M = outer_update_fragment(
        ensemble,
        sent_R,
        fragment,
        num_fragments=num_fragments,
        outer_tx=outer_tx,
        aggregate=aggregate,
        precision=precision,
        keep=keep,
        reduce_scatter=reduce_scatter,
        all_gather=all_gather,
    )
    if delay:
        workers, *later_T = advance(workers, slice(num_before, None))
        measured_T = jax.tree.map(
            lambda before, after: jnp.concatenate([before, after]), measured_T, later_T
        )
    workers = receive_fragment(
        workers, ensemble, fragment, num_fragments=num_fragments, mixing=mixing
    )
    return ensemble, workers, measured_T, norm_M


def flush_workers(
    ensemble: Ensemble,
    *,
    precision: Precision = "float32",
    reduce_scatter: Callable[[PyTree], PyTree] = lambda tree_R: tree_R,
    all_gather: Callable[[PyTree], PyTree] = lambda packed_M: packed_M,
) -> Ensemble:
    """Set every trainer and its workers to the mean of the workers' own parameters.

    `ensemble` must have `params_R`. The states of optimizers and the count of rounds do not change.

    Args:
      ensemble: Trainers and workers between two rounds.
      precision: Format in which workers send differences and receive the mean.
      reduce_scatter: Applied to the packed differences, and to whether each worker's is finite.
      all_gather: Applied to the packed updates [M, ...]; not called with float32.

    Returns:
      The ensemble, in which trainers and workers have the mean.
    """
    # An outer update with the optimizer SGD and learning rate 1: a trainer minus the mean of its
    # differences from the workers is the mean of the workers.
    averaging = optax.sgd(1.0)
    averaging_state_M = jax.vmap(averaging.init)(trainable(ensemble.params_M))
    with_averaging = ensemble.replace(outer_state_M=averaging_state_M)
    after, _ = outer_update(
        with_averaging,
        start_round(with_averaging),
        outer_tx=averaging,
        precision=precision,
        reduce_scatter=reduce_scatter,
        all_gather=all_gather,
    )
    return after.replace(round=ensemble.round, outer_state_M=ensemble.outer_state_M)


def of_params(tx: optax.GradientTransformation, state: optax.OptState) -> PyTree:
    """Return a tree like `state`, true where an array belongs to a parameter, else false.

    Momentum is true, for example, and a count of updates is false. `state` is one of `tx`.
    """
    return optax.tree_utils.tree_map_params(
        tx.init, lambda _: True, state, transform_non_params=lambda _: False
    )


def _axis(leaf_X: Array, num_fragments: int) -> int | None:
    """Return the axis that is divided: the first, after X, with an entry for each fragment."""
    for axis in range(1, leaf_X.ndim):
        if leaf_X.shape[axis] >= num_fragments:
            return axis
    return None


def _split(leaf_X: Array, axis: int, num_fragments: int) -> Array:
    """Reshape the divided axis from n to (ceil(n / F), F), padded with zeros at its end.

    The second of both axes is the fragment: entry i of the axis goes to [i // F, i % F].
    """
    num_entries = leaf_X.shape[axis]
    rows = math.ceil(num_entries / num_fragments)
    num_missing = rows * num_fragments - num_entries
    if num_missing:
        padding = [(0, 0)] * leaf_X.ndim
        padding[axis] = (0, num_missing)
        leaf_X = jnp.pad(leaf_X, padding)
    shape = (*leaf_X.shape[:axis], rows, num_fragments, *leaf_X.shape[axis + 1 :])
    return leaf_X.reshape(shape)
