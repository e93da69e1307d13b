"""Fragments of the parameters, which are synchronised in turn (Streaming DiLoCo).

A fragment knows no model: along the first axis of a leaf that is at least F long, its leading one
aside, entry i belongs to fragment i % F. Of layers stacked for a scan these are strided groups of
layers, as in the paper; of an embedding, every F-th row. A leaf without such an axis is small, and
belongs to fragment 0. Which fragment is meant is data, so that one program serves all of them: each
has the same shapes, filled up with zeros.

F is the number of fragments here, and X a leaf's leading axis.

Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), section 2.2.
"""

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Int, PyTree


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


def put_fragment(
    tree_X: PyTree, part_X: PyTree, fragment: int | Int[Array, ""], *, num_fragments: int
) -> PyTree:
    """Writes a fragment back: the inverse of `take_fragment`.

    Args:
      tree_X: Leaves [X, ...].
      part_X: The fragment's new entries, as `take_fragment` returned the old ones.
      fragment: As it was taken.
      num_fragments: As it was taken.

    Returns:
      `tree_X` with these entries replaced, all others bit for bit; what filled up is dropped.
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
