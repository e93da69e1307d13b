"""The stack of trainers and its pool of workers: making it, taking parts of it, moving workers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.base import (
    Ensemble,
    is_key,
    move_workers,
    place_workers,
    positions,
    trainable,
)


def init(
    params: PyTree,
    *,
    num_trainers: int,
    num_workers: int,
    inner_tx: optax.GradientTransformation,
    outer_tx: optax.GradientTransformation,
    owner_R: Sequence[int] | np.ndarray | None = None,
    own_params: bool = False,
) -> Ensemble:
    """Stacks `num_trainers` trainers that all start from `params`, and a pool of workers.

    For trainers with parameters of their own, replace `params_M` of the result (and `params_R`, if
    it has any). Random keys in an optimizer's state (`optax.add_noise`) are alike too: for noise of
    its own in each worker, replace them in `inner_state_R`.

    Args:
      params: Parameters of one model, any pytree of arrays. Optimizers see the floating-point ones;
        others, such as typed PRNG keys and counts, stay as they are.
      num_trainers: M >= 1.
      num_workers: R >= M, all trainers together.
      inner_tx: Transformation of the workers' gradients; its state belongs to the worker.
      outer_tx: Transformation of the trainers' pseudo-gradients.
      owner_R: Trainer position of each worker; by default as even as possible, in order.
      own_params: Whether workers keep parameters of their own from round to round, as they must
        where only a fragment is synchronised at a time.

    Returns:
      The ensemble before its first round.

    Raises:
      ValueError: If there are fewer workers than trainers, or `owner_R` names a trainer that is
        not there or leaves one without a worker, or if `params` has a leaf that is no array or is
        complex, or no floating-point leaf.

    Source: AdLoCo algorithm 1, lines 1-3.
    """
    if num_trainers < 1:
        raise ValueError(f"num_trainers={num_trainers}: expected at least 1")
    if num_workers < num_trainers:
        raise ValueError(
            f"num_workers={num_workers} for num_trainers={num_trainers}: expected at least one"
            " worker per trainer"
        )
    if owner_R is None:
        owner_R = np.arange(num_workers) * num_trainers // num_workers
    owners = np.asarray(owner_R)
    if owners.shape != (num_workers,):
        raise ValueError(f"owner_R has shape {owners.shape}, expected [num_workers={num_workers}]")
    _check_owners(owners, num_trainers)

    def stack(tree, size):
        def copies(leaf):
            leaf = jnp.asarray(leaf)
            if not is_key(leaf):  # not weakly typed, or the second round compiles anew
                leaf = leaf.astype(leaf.dtype)
            return jnp.broadcast_to(leaf, (size, *leaf.shape))

        return jax.tree.map(copies, tree)

    params = jax.tree_util.tree_map_with_path(_parameter, params)
    values = trainable(params)
    if not jax.tree.leaves(values):
        raise ValueError("params: expected a pytree with at least one floating-point array")
    return Ensemble(
        params_M=stack(params, num_trainers),
        outer_state_M=stack(outer_tx.init(values), num_trainers),
        inner_state_R=stack(inner_tx.init(values), num_workers),
        owners=tuple(owners.tolist()),
        round=jnp.zeros((), jnp.int32),
        params_R=stack(params, num_workers) if own_params else None,
    )


def take(ensemble: Ensemble, trainers: Sequence[int]) -> Ensemble:
    """The sub-ensemble of some trainers and their workers, which can run a round of its own.

    The result has the `round` of the whole stack, which counts the rounds of all trainers together.
    In a loop that runs a round in groups, take every group from the stack as it was when the round
    began, or set `round` when it ends, see `put`.

    Args:
      ensemble: The whole stack.
      trainers: Positions in the stack, distinct; their order becomes the order of the result.

    Returns:
      An ensemble of `len(trainers)` trainers, each with its workers next to one another.

    Raises:
      ValueError: If a position is out of range or repeated.
    """
    chosen = positions("trainers", trainers, ensemble.num_trainers)
    theirs = _workers_of(ensemble, chosen)
    return Ensemble(
        params_M=_pick(ensemble.params_M, chosen),
        outer_state_M=_pick(ensemble.outer_state_M, chosen),
        inner_state_R=_pick(ensemble.inner_state_R, theirs),
        owners=tuple(chosen.tolist().index(ensemble.owners[w]) for w in theirs),
        round=ensemble.round,
        params_R=_pick(ensemble.params_R, theirs),
    )


def put(ensemble: Ensemble, trainers: Sequence[int], sub: Ensemble) -> Ensemble:
    """Writes back what `take` took, after a round: the inverse of `take`.

    The `round` of the result is the larger of the two, so that groups which were all taken before
    any of them was put back count as one round:

      start = ensemble
      for trainers in groups:
          sub, _ = step(take(start, trainers), ...)
          ensemble = put(ensemble, trainers, sub)

    A loop that takes the next group from what `put` returned, for instance because `start` was
    donated, counts a round for each group; it ends with
    `ensemble.replace(round=<round at the start> + 1)`.

    Args:
      ensemble: The whole stack.
      trainers: The positions given to `take`, in the same order.
      sub: The sub-ensemble, with the trainers and workers that `take` gave it.

    Returns:
      The whole stack with those trainers and workers replaced; the owners stay, and the round is
      that of `sub` if it is further.

    Raises:
      ValueError: If `sub` has another number of trainers or workers than was taken, and as `take`.
    """
    chosen = positions("trainers", trainers, ensemble.num_trainers)
    theirs = _workers_of(ensemble, chosen)
    if (sub.num_trainers, sub.num_workers) != (len(chosen), len(theirs)):
        raise ValueError(
            f"sub has {sub.num_trainers} trainers and {sub.num_workers} workers, expected"
            f" {len(chosen)} and {len(theirs)}, as taken"
        )

    def write(tree, index, part):
        return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), tree, part)

    return ensemble.replace(
        params_M=write(ensemble.params_M, chosen, sub.params_M),
        outer_state_M=write(ensemble.outer_state_M, chosen, sub.outer_state_M),
        inner_state_R=write(ensemble.inner_state_R, theirs, sub.inner_state_R),
        round=jnp.maximum(ensemble.round, sub.round),
        params_R=write(ensemble.params_R, theirs, sub.params_R),
    )


def reassign(ensemble: Ensemble, owner_R: Sequence[int]) -> Ensemble:
    """Moves workers between trainers; lets workers join the pool or retire from it.

    A worker that stays with its trainer keeps its inner state. One that joins a trainer takes the
    mean inner state of the workers that were already there (whole numbers, such as Adam's count of
    updates, are rounded; a PRNG key is the first worker's), so that it does not restart or distort
    that trainer's optimizer; where workers have parameters of their own, it starts at that
    trainer's.

    Args:
      ensemble: The stack.
      owner_R: The new trainer position of each worker, by worker position; -1 retires a worker;
        entries beyond the present pool are new workers.

    Returns:
      The stack with the new pool, the retired workers gone, the order of the others kept.

    Raises:
      ValueError: If an entry names no trainer, the list is shorter than the pool, or a trainer is
        left without a worker.

    Source: ALGORITHM 4; AdLoCo section 4.3 divides the workers anew after each merge.
    """
    owners = np.asarray(owner_R, dtype=np.int64).reshape(-1)
    pool = ensemble.num_workers
    if len(owners) < pool:
        raise ValueError(f"owner_R has {len(owners)} entries for a pool of {pool} workers")
    staying = np.flatnonzero(owners != -1)
    new_owner = owners[owners != -1]
    _check_owners(new_owner, ensemble.num_trainers)
    source = np.minimum(staying, pool - 1)
    stays_R = (ensemble.owner_R[source] == new_owner) & (staying < pool)
    return ensemble.replace(
        inner_state_R=move_workers(ensemble, source, stays_R, new_owner),
        owners=tuple(new_owner.tolist()),
        params_R=place_workers(ensemble, source, stays_R, new_owner.tolist()),
    )


def _check_owners(owners: np.ndarray, num_trainers: int) -> None:
    missing = sorted(set(range(num_trainers)) - set(owners.tolist()))
    strange = sorted(set(owners.tolist()) - set(range(num_trainers)))
    if missing or strange:
        raise ValueError(
            f"owner_R={owners.tolist()}: expected every one of the {num_trainers} trainers at least"
            f" once; without a worker: {missing}; unknown: {strange}"
        )


def _workers_of(ensemble: Ensemble, trainers: np.ndarray) -> np.ndarray:
    """Positions of some trainers' workers, trainer by trainer."""
    return np.concatenate([np.flatnonzero(ensemble.owner_R == m) for m in trainers])


def _parameter(path: tuple, leaf) -> Array:
    if not isinstance(leaf, (Array, np.ndarray, np.generic, float, int, complex)):
        raise ValueError(
            f"params{jax.tree_util.keystr(path)}: got {leaf!r}, expected an array; pass the model's"
            " parameters, without functions and settings"
        )
    return jnp.asarray(leaf)


def _pick(tree: PyTree, index: np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], tree)
