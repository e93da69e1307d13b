"""Streaming DiLoCo: a round synchronises fragments of the parameters one after another.

This module replaces `core.outer.outer_update`. Each worker keeps its own parameters from round to
round. A round consists of F calls of `fragment_steps`, where F is the number of fragments. Each
call runs inner steps and then synchronises one fragment.

The parameters are divided by one rule that fits every model. Leaves have shape [X, ...]. The first
axis, X, counts trainers or workers and stays whole. Of the other axes, the first that has at least
F entries is divided: its entry i belongs to fragment i % F. If layers are stacked along this axis,
a fragment has every F-th layer, as in the paper. If the leaf is an embedding table, a fragment has
every F-th row. A leaf without such an axis is small, so all of it belongs to fragment 0.

One compiled program serves all fragments. For this purpose the index of a fragment is an argument
of the program, and all fragments are padded with zeros to the same shapes.

Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), section 2.2.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from adloco_jax.core.compress import Precision
from adloco_jax.core.meshes import on_any_mesh
from adloco_jax.core.outer import outer_update, start_round
from adloco_jax.core.types import (
    Ensemble,
    Workers,
    at_least_float32,
    norms,
    of_owners,
    trainable,
    where_leading,
    with_trainable,
)


@on_any_mesh(lambda whole, _, tree_X, *args, **kwargs: tree_X)
def take_fragment(tree_X: PyTree, fragment: int | Int[Array, ""], *, num_fragments: int) -> PyTree:
    """Take one fragment out of a tree of parameters.

    Args:
      tree_X: Leaves [X, ...], such as trainers' or workers' parameters.
      fragment: Index of the fragment, from 0 to F - 1.
      num_fragments: F >= 1, the number of fragments. If F is 1, the fragment is the whole tree.

    Returns:
      Leaves [X, ...]. The divided axis of a leaf has ceil(n / F) entries instead of n, with zeros
      as padding. A leaf that has no axis of at least F entries is whole in fragment 0, and zero in
      all other fragments.
    """
    if num_fragments == 1:
        return tree_X

    def take(leaf_X):
        axis = _axis(leaf_X, num_fragments)
        if axis is None:
            return jnp.where(fragment == 0, leaf_X, jnp.zeros_like(leaf_X))
        split_X = _split(leaf_X, axis, num_fragments)
        return lax.dynamic_index_in_dim(split_X, fragment, axis + 1, keepdims=False)

    return jax.tree.map(take, tree_X)


@on_any_mesh(lambda whole, _, tree_X, *args, **kwargs: tree_X)
def put_fragment(
    tree_X: PyTree, part_X: PyTree, fragment: int | Int[Array, ""], *, num_fragments: int
) -> PyTree:
    """Write the entries of one fragment back into a tree: the inverse of `take_fragment`.

    Args:
      tree_X: Leaves [X, ...].
      part_X: The fragment's new entries, in the form of `take_fragment`'s result.
      fragment: Index of the fragment, from 0 to F - 1.
      num_fragments: F >= 1, the number of fragments.

    Returns:
      `tree_X` with these entries replaced and all others unchanged. Padding is dropped.
    """
    if num_fragments == 1:
        return part_X

    def put(leaf_X, new_X):
        axis = _axis(leaf_X, num_fragments)
        if axis is None:
            return jnp.where(fragment == 0, new_X, leaf_X)
        split_X = _split(leaf_X, axis, num_fragments)
        split_X = lax.dynamic_update_index_in_dim(split_X, new_X, fragment, axis + 1)
        shape = list(leaf_X.shape)
        shape[axis] = split_X.shape[axis] * num_fragments
        return lax.slice_in_dim(split_X.reshape(shape), 0, leaf_X.shape[axis], axis=axis)

    return jax.tree.map(put, tree_X, part_X)


@on_any_mesh(lambda whole, _, ensemble, *args, **kwargs: (ensemble, whole))
def outer_update_fragment(
    ensemble: Ensemble,
    sent_R: PyTree,
    fragment: int | Int[Array, ""],
    *,
    num_fragments: int,
    outer_tx: optax.GradientTransformation,
    precision: Precision = "float32",
    keep: Callable[[PyTree], PyTree] = lambda tree_M: tree_M,
    all_gather: Callable[[PyTree], PyTree] = lambda tree_M: tree_M,
    **how: Any,
) -> tuple[Ensemble, Float[Array, " M"]]:
    """Synchronise one fragment of the parameters: apply `outer_update` to its entries.

    Entries of other fragments, in parameters and outer state, do not change. The workers do not
    change either; `receive_fragment` copies the new entries to them. The result does not depend on
    updates that the workers make after they have sent the fragment, so a compiler can run these
    updates at the same time.

    Args:
      ensemble: The ensemble whose trainers have the fragment as it was last synchronised.
      sent_R: The fragment of each worker's parameters at the time of sending, from `take_fragment`.
      fragment: Index of the fragment; the last fragment ends the round.
      num_fragments: F >= 1, the number of fragments, which are synchronised one after another.
      outer_tx: Transformation of the pseudo-gradient. State that belongs to no single parameter,
        such as a count, is updated with every fragment.
      precision: Format in which differences and updates are sent: "float32", "bfloat16" or "int4".
      keep: A function that is applied to the fragment of the trainers' parameters when it is taken.
        If the parameters are replicated over several devices, pass a sharding constraint that keeps
        the fragment replicated; otherwise the partitioner shards and all-gathers it again.
      all_gather: A function that is applied to the packed updates [M, ...] of the trainers, or with
        precision float32 to the fragment's new parameters.
      **how: The arguments `weights_R`, `aggregate` and `reduce_scatter` of `outer_update`.

    Returns:
      The ensemble with the trainers' new entries, and the L2 norm of each trainer's pseudo-gradient
      over the entries of the fragment. The norm is NaN if the pseudo-gradient is not finite and was
      not applied.

    Raises:
      ValueError: While tracing, in the same cases as `outer_update`.

    Source: Streaming DiLoCo (arXiv 2501.18512), sections 2.2 and 2.3.
    """
    of_param = of_params(outer_tx, ensemble.outer_state_M)

    def take(tree_X):
        return take_fragment(tree_X, fragment, num_fragments=num_fragments)

    def put(tree_X, part_X):
        return put_fragment(tree_X, part_X, fragment, num_fragments=num_fragments)

    part = ensemble.replace(
        params_M=keep(take(ensemble.params_M)),
        outer_state_M=jax.tree.map(
            lambda has, leaf: take(leaf) if has else leaf, of_param, ensemble.outer_state_M
        ),
        params_R=None,
    )
    part, norm_M = outer_update(
        part,
        Workers(params_R=sent_R, inner_state_R=ensemble.inner_state_R),
        outer_tx=outer_tx,
        precision=precision,
        all_gather=all_gather,
        **how,
    )
    if precision == "float32" or ensemble.num_workers == ensemble.num_trainers:
        part = part.replace(params_M=all_gather(part.params_M))
    ensemble = ensemble.replace(
        params_M=put(ensemble.params_M, part.params_M),
        outer_state_M=jax.tree.map(
            lambda has, leaf, new: put(leaf, new) if has else new,
            of_param,
            ensemble.outer_state_M,
            part.outer_state_M,
        ),
        round=jnp.where(fragment == num_fragments - 1, part.round, ensemble.round),
    )
    return ensemble, norm_M


@on_any_mesh(lambda whole, _, workers, *args, **kwargs: workers)
def receive_fragment(
    workers: Workers,
    ensemble: Ensemble,
    fragment: int | Int[Array, ""],
    *,
    num_fragments: int,
    mixing: float = 0.0,
) -> Workers:
    """Copy a synchronised fragment from each trainer to its workers, or mix it with theirs.

    Args:
      workers: The workers when the fragment arrives.
      ensemble: The result of `outer_update_fragment`.
      fragment: Index of the fragment, from 0 to F - 1.
      num_fragments: F >= 1, the number of fragments.
      mixing: Share of the worker's own entries in the worker's new entries, from 0 to 1. The other
        share is that of the trainer's entries. A worker whose own entries are not finite takes only
        those of the trainer.

    Returns:
      The workers with the new entries. Entries of other fragments, and inner states, do not change.

    Source: Streaming DiLoCo (arXiv 2501.18512), section 2.3; its alpha is `mixing`.
    """
    new_M = take_fragment(ensemble.params_M, fragment, num_fragments=num_fragments)
    new_R = of_owners(new_M, ensemble.owners)
    if mixing:
        own_R = take_fragment(workers.params_R, fragment, num_fragments=num_fragments)
        own_R, arrived_R = trainable(own_R), trainable(new_R)

        def mix(own, new):
            dtype = at_least_float32(own.dtype)
            mixed = mixing * own.astype(dtype) + (1 - mixing) * new.astype(dtype)
            return mixed.astype(own.dtype)

        mixed_R = jax.tree.map(mix, own_R, arrived_R)
        mixed_R = where_leading(jnp.isfinite(norms(own_R)), mixed_R, arrived_R)
        new_R = with_trainable(new_R, mixed_R)
    return workers.replace(
        params_R=put_fragment(workers.params_R, new_R, fragment, num_fragments=num_fragments)
    )


def fragment_steps(
    ensemble: Ensemble,
    workers: Workers,
    inputs_T: PyTree,
    fragment: int | Int[Array, ""],
    *,
    steps: Callable,
    num_fragments: int,
    delay: int = 0,
    mixing: float = 0.0,
    **how: Any,
) -> tuple[Ensemble, Workers, PyTree, Float[Array, " M"]]:
    """Run inner steps, and synchronise one fragment at their end; F such calls make a round.

    The fragment is sent `delay` micro-batches before the end. The synchronisation does not depend
    on the updates that workers make after sending, so a compiler can run both at the same time.

    Args:
      ensemble: The ensemble whose trainers have the fragment as it was last synchronised. The
        workers' inner states are not read from it.
      workers: Workers with their own parameters.
      inputs_T: The arguments of `steps` that follow the workers: a tuple of pytrees with leaves
        [T, ...]. T is the number of micro-batches in this call.
      fragment: Index of the fragment, from 0 to F - 1.
      steps: `inner_steps` with its loss and transformation bound.
      num_fragments: F >= 1, the number of fragments, which are synchronised one after another.
      delay: Micro-batches between sending and arrival of the fragment, from 0 to T - 1.
      mixing: Share of the worker's own entries in the worker's new entries when the fragment
        arrives, from 0 to 1.
      **how: Keyword arguments of `outer_update_fragment`, including `outer_tx`.

    Returns:
      The ensemble; the workers; what `steps` measured for each micro-batch; and the norm of each
      trainer's pseudo-gradient over the entries of the fragment.

    Source: Streaming DiLoCo (arXiv 2501.18512), algorithm 2.
    """

    def advance(workers, part):
        return steps(workers, *jax.tree.map(lambda leaf: leaf[part], inputs_T))

    num_before = jax.tree.leaves(inputs_T)[0].shape[0] - delay
    workers, *measured_T = advance(workers, slice(None, num_before))
    sent_R = take_fragment(workers.params_R, fragment, num_fragments=num_fragments)
    ensemble, norm_M = outer_update_fragment(
        ensemble, sent_R, fragment, num_fragments=num_fragments, **how
    )
    if delay:
        workers, *rest_T = advance(workers, slice(num_before, None))
        measured_T = jax.tree.map(lambda *pair: jnp.concatenate(pair), measured_T, rest_T)
    workers = receive_fragment(
        workers, ensemble, fragment, num_fragments=num_fragments, mixing=mixing
    )
    return ensemble, workers, measured_T, norm_M


def flush_workers(ensemble: Ensemble, **how: Any) -> Ensemble:
    """Set every trainer and its workers to the mean of the workers' parameters.

    With Streaming DiLoCo some worker updates are not synchronised when a round ends. This function
    synchronises (flushes) them before a merge and at the end of a run. Momentum and the count of
    rounds do not change.

    Args:
      ensemble: An ensemble whose workers have their own parameters.
      **how: The arguments `precision`, `reduce_scatter` and `all_gather` of `outer_update`.

    Returns:
      The ensemble with the new parameters.
    """
    mean = optax.sgd(1.0)
    bare = ensemble.replace(outer_state_M=jax.vmap(mean.init)(trainable(ensemble.params_M)))
    after, _ = outer_update(bare, start_round(bare), outer_tx=mean, **how)
    return after.replace(round=ensemble.round, outer_state_M=ensemble.outer_state_M)


def of_params(tx: optax.GradientTransformation, state: optax.OptState) -> PyTree:
    """Mark those arrays of an optimizer state that have an entry for each parameter.

    Args:
      tx: The transformation; its `init` must take any pytree.
      state: A state of `tx`, or a stack of states; only its structure is read.

    Returns:
      A pytree of bools with the structure of `state`: True for arrays such as momentum, False for
      values that belong to no single parameter, such as a count of updates.
    """
    return optax.tree_utils.tree_map_params(
        tx.init, lambda _: True, state, transform_non_params=lambda _: False
    )


def _axis(leaf_X: Array, num_fragments: int) -> int | None:
    long = (axis for axis in range(1, leaf_X.ndim) if leaf_X.shape[axis] >= num_fragments)
    return next(long, None)


def _split(leaf_X: Array, axis: int, num_fragments: int) -> Array:
    """Reshape the divided axis, of length n, to two axes (ceil(n / F), F).

    Entry i goes to (i // F, i % F), so the second index is the fragment. The padding is zero.
    """
    rows = -(-leaf_X.shape[axis] // num_fragments)
    missing = rows * num_fragments - leaf_X.shape[axis]
    if missing:
        leaf_X = jnp.pad(leaf_X, [(0, missing if d == axis else 0) for d in range(leaf_X.ndim)])
    shape = (*leaf_X.shape[:axis], rows, num_fragments, *leaf_X.shape[axis + 1 :])
    return leaf_X.reshape(shape)
