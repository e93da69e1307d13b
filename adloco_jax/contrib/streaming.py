"""Streaming DiLoCo: a round that synchronises fragments of the parameters in turn.

It replaces `core.outer.outer_update`: each worker keeps parameters of its own from round to round,
and `fragment_steps` runs the inner steps up to and around the synchronisation of one fragment.

A fragment knows no model: along the first axis of a leaf that is at least F long, its leading one
aside, entry i belongs to fragment i % F. Of layers stacked for a scan these are strided groups of
layers, as in the paper; of an embedding, every F-th row. A leaf without such an axis is small, and
belongs to fragment 0. Which fragment is meant is data, so that one program serves all of them: each
has the same shapes, padded with zeros.

F is the number of fragments here, and X a leaf's leading axis.

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
    """One fragment of some parameters.

    Args:
      tree_X: Leaves [X, ...], such as trainers' or workers' parameters.
      fragment: Its index, from 0 to F - 1.
      num_fragments: F >= 1; with 1 the fragment is the whole.

    Returns:
      Leaves [X, ...] whose one axis has become ceil(n / F) long, zero where there is no such entry;
      a leaf that is too small is whole in fragment 0, and zero in all others.
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
    """Write a fragment back: the inverse of `take_fragment`.

    Args:
      tree_X: Leaves [X, ...].
      part_X: The fragment's new entries, as `take_fragment` returned the old ones.
      fragment: Its index, from 0 to F - 1.
      num_fragments: F >= 1.

    Returns:
      `tree_X` with these entries replaced, all others bit for bit; padding is dropped.
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
    """The trainers' half of a fragment's synchronisation: `outer_update` on these entries alone.

    Of parameters and outer state all other entries stay bit for bit, and so does all of the workers
    (see `receive_fragment`). What workers do between the sending and the arrival is no input, so
    that a compiler may let the two run at once.

    Args:
      ensemble: As it was when the fragment was last synchronised, in these entries.
      sent_R: Of each worker's parameters what `take_fragment` takes, when it was sent.
      fragment: Which one; the last ends the round.
      num_fragments: F >= 1, synchronised in turn.
      outer_tx: Transformation of the pseudo-gradient. State that belongs to no single parameter,
        such as a count, is updated with every fragment.
      precision: In which differences and updates travel: "float32", "bfloat16" or "int4".
      keep: Applied to the fragment of the trainers' parameters as it is taken. Where they are
        replicated over several devices, a sharding constraint that says so, or the partitioner
        shards and gathers them again.
      all_gather: Applied to the trainers' updates [M, ...], packed, or in float32 to the fragment's
        new parameters.
      **how: `weights_R`, `aggregate` and `reduce_scatter` of `outer_update`.

    Returns:
      The ensemble with the trainers' part of the synchronisation done, and the L2 norm of each
      trainer's pseudo-gradient in these entries, NaN for one left out.

    Raises:
      ValueError: While tracing, as `outer_update` does.

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
    """The workers' half of a fragment's synchronisation: they take their trainer's new entries.

    Args:
      workers: When the fragment arrives.
      ensemble: From `outer_update_fragment`.
      fragment: Its index, from 0 to F - 1.
      num_fragments: F >= 1.
      mixing: Share of a worker's own entries that stays, from 0 to 1; of a worker whose entries
        are not finite none does.

    Returns:
      The workers, whose other entries and inner states are as they were.

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
    """Inner steps that end with the synchronisation of one fragment; F of them make a round.

    The fragment is sent `delay` micro-batches before the end. What workers compute meanwhile is no
    input of the synchronisation, so that a compiler may let the two run at once.

    Args:
      ensemble: As it was when the fragment was last synchronised; it needs no workers' state.
      workers: With parameters of their own.
      inputs_T: What `steps` is called with beside the workers: a tuple of leaves [T, ...].
      fragment: Which one.
      steps: `inner_steps` with its loss and transformation bound.
      num_fragments: F >= 1, synchronised in turn.
      delay: Micro-batches from the sending of the fragment to its arrival, from 0 to below T.
      mixing: Share of a worker's own entries that stays when the fragment arrives, in [0, 1].
      **how: Keyword arguments of `outer_update_fragment`, `outer_tx` among them.

    Returns:
      The ensemble and workers, what `steps` measured for each micro-batch, and the norms of the
      pseudo-gradients in these entries.

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
    """Set every trainer, and its workers, to the mean of its workers' parameters.

    For the end of a run and before a merge, where fragments leave worker updates unsynchronised. It
    is no outer step: momentum and the count of rounds stay.

    Args:
      ensemble: Its workers have parameters of their own.
      **how: `precision`, `reduce_scatter` and `all_gather` of `outer_update`.

    Returns:
      The ensemble with the new parameters.
    """
    mean = optax.sgd(1.0)
    bare = ensemble.replace(outer_state_M=jax.vmap(mean.init)(trainable(ensemble.params_M)))
    after, _ = outer_update(bare, start_round(bare), outer_tx=mean, **how)
    return after.replace(round=ensemble.round, outer_state_M=ensemble.outer_state_M)


def of_params(tx: optax.GradientTransformation, state: optax.OptState) -> PyTree:
    """Which arrays of an optimizer state have an entry for each parameter, and so have fragments.

    Args:
      tx: The transformation; its `init` must take any pytree.
      state: A state of it, or a stack of them; of its leaves nothing is read.

    Returns:
      A pytree of bools of the structure of `state`: True for momentum and the like, False for what
      belongs to the whole, such as a count of updates.
    """
    return optax.tree_utils.tree_map_params(
        tx.init, lambda _: True, state, transform_non_params=lambda _: False
    )


def _axis(leaf_X: Array, num_fragments: int) -> int | None:
    long = (axis for axis in range(1, leaf_X.ndim) if leaf_X.shape[axis] >= num_fragments)
    return next(long, None)


def _split(leaf_X: Array, axis: int, num_fragments: int) -> Array:
    """[X, ..., n, ...] -> [X, ..., ceil(n / F), F, ...]; entry i is at (i // F, i % F)."""
    rows = -(-leaf_X.shape[axis] // num_fragments)
    missing = rows * num_fragments - leaf_X.shape[axis]
    if missing:
        leaf_X = jnp.pad(leaf_X, [(0, missing if d == axis else 0) for d in range(leaf_X.ndim)])
    shape = (*leaf_X.shape[:axis], rows, num_fragments, *leaf_X.shape[axis + 1 :])
    return leaf_X.reshape(shape)
