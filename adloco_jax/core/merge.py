"""Merge trainers, and divide the workers among the remaining trainers (AdLoCo section 4.3).

Trainers that merge are members of the merge; the first, the representative, remains. A trainer's
request is the batch that its last test asked for. The pool is all workers together. Array names end
with n where the first axis counts members; M counts trainers, R workers. `on_any_mesh` lets a
function take arrays that are sharded over explicit axes of a mesh too; its argument says how the
results are sharded.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, PyTree

from adloco_jax.core.meshes import like_ensemble, on_any_mesh
from adloco_jax.core.types import (
    Ensemble,
    at_least_float32,
    moved_params,
    moved_states,
    of_workers,
    positions,
    shares,
    where_leading,
)


class Candidate(NamedTuple):
    """What a merge policy knows about a trainer: its requested batch, its loss and its age."""

    requested_batch_size: int  # sequences per worker, times the growth of the round length
    guard_loss: float = math.nan  # nats/token on held-out rows that only decisions use
    age: int = 0  # rounds completed


def worst_with_worst(trainers: Sequence[Candidate], *, width: int) -> tuple[int, ...]:
    """Select the `width` smallest requests; of these, the largest is the representative's.

    A small request means little noise: such trainers gain least from staying separate. Returns the
    positions of their trainers, the representative's first.

    Source: AdLoCo algorithm 2, lines 2-4.
    """
    members = _smallest_first(trainers)[:width]
    return _represented(trainers, members)


def best_with_worst(trainers: Sequence[Candidate], *, width: int) -> tuple[int, ...]:
    """Select the largest request, as the representative's, and the `width` - 1 smallest.

    Returns the positions of their trainers, the representative's first.
    """
    by_size = _smallest_first(trainers)
    # Of equal requests the one at the lower position (`-m`).
    best = max(by_size, key=lambda m: (trainers[m].requested_batch_size, -m))
    worst = [m for m in by_size if m != best][: width - 1]
    return _represented(trainers, [best, *worst])


MergePolicy: TypeAlias = Callable[..., tuple[int, ...]]
"""`policy(trainers, *, width) -> positions` chooses which of at least two `Candidate` merge.

The first position is the representative's. An empty result means no merge.
"""

MERGE_POLICIES: dict[str, MergePolicy] = {
    "worst_with_worst": worst_with_worst,
    "best_with_worst": best_with_worst,
    "none": lambda trainers, *, width: (),
}
"""Merge policies by name, for the option `merge.policy`. To use your own policy, add an entry."""


def _smallest_first(trainers: Sequence[Candidate]) -> list[int]:
    """Return all positions, by the requests of their trainers; of equal ones the lower first."""
    return sorted(range(len(trainers)), key=lambda m: (trainers[m].requested_batch_size, m))


def _represented(trainers: Sequence[Candidate], members: Sequence[int]) -> tuple[int, ...]:
    """Order the members of a merge: first the representative, then the others by position.

    The representative is the member with the largest request.
    """
    # Of equal requests the one at the lower position (`-m`).
    first = max(members, key=lambda m: (trainers[m].requested_batch_size, -m))
    others = sorted(m for m in members if m != first)
    return (first, *others)


def choose_merge(
    requested_batch_sizes: Sequence[int], *, policy: str, width: int
) -> tuple[int, ...]:
    """Choose `width` trainers to merge (all, if there are fewer) by a policy of `MERGE_POLICIES`.

    Args:
      requested_batch_sizes: Each trainer's requested batch, in sequences per worker.
      policy: Name of the policy; it knows neither losses nor ages of these trainers.
      width: Number of trainers that become one.

    Returns:
      Positions, the representative first, the others in stack order; of equal requests the lower
      position is chosen first. Empty if nothing merges.

    Source: AdLoCo algorithm 2, lines 2-4.
    """
    if len(requested_batch_sizes) < 2:
        return ()
    candidates = [Candidate(size) for size in requested_batch_sizes]
    return MERGE_POLICIES[policy](candidates, width=width)


@on_any_mesh(like_ensemble)
def merge(
    ensemble: Ensemble, members: Sequence[int], *, weights: Sequence[float] | Float[Array, " n"]
) -> Ensemble:
    """Merge `members`, at least two, into the first of them, the representative.

    Its parameters, their running average and the floating-point part of its outer state become
    weighted means over the members (the paper's weights are the requested batch sizes), in float32,
    or float64 for float64 arrays; values equal in all members do not change. A member is masked out
    if its weight is not positive and finite, or if it has a value that is not finite and not the
    same in all. If no finite member has a positive finite weight, all finite ones count equally; if
    no member is finite, the representative does not change.

    The workers of the other members join the representative, after its own and in the order of
    `members` (`reassign` can move them), with the mean inner state of its workers; if it is masked
    out, the first member that is not gives this state. Workers with their own parameters start at
    the merged ones: call `outer_update` before, or their unsynchronised updates are lost.

    Args:
      ensemble: Trainers and workers between two rounds.
      members: Positions of the trainers that merge, the representative's first.
      weights: Relative weights of the members, in their order.

    Returns:
      The remaining trainers in their order, with as many workers in all as before.

    Raises:
      ValueError: If `members` are fewer than two, repeat or do not exist, or weights are not one
        for each.

    Source: AdLoCo algorithm 2, line 5. The merged outer momentum and the masking of members are not
      in the paper (docs/algorithm.md, section 4).
    """
    chosen = positions("members", members, ensemble.num_trainers)
    weights_n = jnp.asarray(weights, jnp.float32)
    if len(chosen) < 2 or weights_n.shape != (len(chosen),):
        raise ValueError(
            f"members={chosen.tolist()} with weights of shape {weights_n.shape}: expected at least"
            " two members and one weight for each"
        )
    representative = chosen[0]
    absorbed = chosen[1:]
    survivors = [m for m in range(ensemble.num_trainers) if m not in absorbed]

    # Who is masked out, and the others' shares.
    stacked = (ensemble.params_M, ensemble.outer_state_M, ensemble.average_M)
    finite_n = _finite_members(stacked, chosen)
    share_n, usable_n = shares(weights_n, finite_n)
    origin = jnp.argmax(usable_n)  # the first member that is not masked out

    def merge_leaf(leaf_M: Array) -> Array:
        """Write the members' mean at the representative's position; keep only the survivors."""
        if not jnp.issubdtype(leaf_M.dtype, jnp.inexact):
            # Whole numbers and keys are not averaged: those of the representative stay.
            return leaf_M[np.array(survivors)]
        # Average differences from one member, so that equal members are reproduced exactly. Where
        # values are equal the difference is zero, even if they are infinite.
        member_n = leaf_M[chosen].astype(at_least_float32(leaf_M.dtype))
        base = member_n[origin]
        zeros_n = jnp.zeros_like(member_n)
        difference_n = jnp.where(member_n == base[None], zeros_n, member_n - base[None])
        difference_n = where_leading(usable_n, difference_n, zeros_n)
        mean = base + jnp.tensordot(share_n, difference_n, 1, precision="highest")
        # Without any usable member the representative does not change.
        mean = jnp.where(jnp.any(usable_n), mean, leaf_M[representative]).astype(leaf_M.dtype)
        return leaf_M.at[representative].set(mean)[np.array(survivors)]

    params_M, outer_state_M, average_M = jax.tree.map(merge_leaf, stacked)

    # The workers of each survivor, by their positions before the merge.
    workers: list[list[int]] = []
    for m in survivors:
        own = [*ensemble.workers[m]]
        if m == representative:
            for other in absorbed:
                own += ensemble.workers[other]
        workers.append(own)
    after = ensemble.replace(
        params_M=params_M,
        outer_state_M=outer_state_M,
        average_M=average_M,
        sizes=tuple(len(own) for own in workers),
    )

    # The member whose workers keep their inner states: the first that is not masked out. The
    # workers of the other members take the mean of these states.
    heir = jnp.asarray(chosen)[origin]
    source = np.concatenate(workers)
    old_trainer_R = of_workers(ensemble.sizes)[source]  # of each worker of the result
    is_member_R = np.isin(old_trainer_R, chosen)
    stays_R = ~is_member_R | (old_trainer_R == heir)
    return after.replace(
        # All workers of members take the merged parameters, which are in `after`; the others keep
        # their own. Inner states are still those before the merge.
        params_R=moved_params(after, source, ~is_member_R),
        inner_state_R=moved_states(ensemble, source, stays_R, jnp.full(len(source), heir)),
    )


def _finite_members(stacked: PyTree, chosen: np.ndarray) -> Array:
    """Return for each of the trainers at the positions `chosen` whether it is finite, bool [n].

    Leaves of `stacked` are [M, ...]. A trainer is not finite if one of its values is infinite or
    NaN. An infinity that all chosen trainers have in the same place does no harm.
    """
    finite_n = jnp.ones(len(chosen), bool)
    for leaf in jax.tree.leaves(stacked):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            member_n = leaf[chosen].reshape(len(chosen), -1)
            is_equal = jnp.all(member_n == member_n[:1], axis=0, keepdims=True)
            finite_n &= jnp.all(jnp.isfinite(member_n) | is_equal, axis=1)
    return finite_n


def reassign(ensemble: Ensemble, sizes: Sequence[int]) -> Ensemble:
    """Move workers between trainers, until trainer m has `sizes[m]` of them.

    A trainer keeps its first workers, with their inner states. Its other workers join trainers that
    have too few. Workers that no trainer needs are dropped; if there are too few, new ones are
    added. A worker that joins and a new one take the mean inner state of the workers that the
    trainer had. Raises ValueError unless each trainer has a size, which is at least one.

    Source: docs/algorithm.md, section 4. AdLoCo, section 4.3, divides the workers after each merge.
    """
    if len(sizes) != ensemble.num_trainers or min(sizes) < 1:
        raise ValueError(
            f"sizes={tuple(sizes)}: expected a number of workers, at least one, for each of"
            f" {ensemble.num_trainers} trainers"
        )
    workers = divide_workers(ensemble.workers, sizes)
    for own, size in zip(workers, sizes, strict=True):
        own += [-1] * (size - len(own))  # new workers
    return move_workers(ensemble, workers)


@on_any_mesh(like_ensemble)
def move_workers(ensemble: Ensemble, workers: Sequence[Sequence[int]]) -> Ensemble:
    """Give trainer m the workers at the positions `workers[m]`; -1 is a new worker.

    Positions are those in arrays [R, ...] of `ensemble`; a worker that is not listed is dropped. A
    worker that joins a trainer takes the mean inner state of the workers that the trainer had, and
    the trainer's parameters if workers have their own.
    """
    sizes = tuple(len(own) for own in workers)
    listed = np.concatenate(workers).astype(np.int64)  # the old position of each worker, or -1
    source = np.maximum(listed, 0)  # a new worker takes nothing from its source: any will do
    trainer_R = of_workers(sizes)
    stays_R = (listed >= 0) & (of_workers(ensemble.sizes)[source] == trainer_R)
    after = ensemble.replace(sizes=sizes)
    return after.replace(
        # The means are those before the move, so `ensemble` has the old sizes here.
        inner_state_R=moved_states(ensemble, source, stays_R, trainer_R),
        params_R=moved_params(after, source, stays_R),
    )


def spawn(ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
    """Add workers to the trainer at a position, after its own, until it has `num_workers`.

    They start at the trainer's parameters, with the mean inner state of its workers. Raises
    ValueError if the trainer does not exist or has more workers already.

    Source: docs/algorithm.md, section 4; not in the paper.
    """
    (position,) = positions("trainer", [trainer], ensemble.num_trainers).tolist()
    sizes = list(ensemble.sizes)
    if num_workers < sizes[position]:
        raise ValueError(
            f"num_workers={num_workers}: trainer {position} has {sizes[position]} workers already;"
            " to take some away use reassign"
        )
    sizes[position] = num_workers
    return reassign(ensemble, sizes)


def divide_workers(workers: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Return lists of workers, of the given sizes, for all trainers.

    `workers[m]` are trainer m's present workers: positions or ids, all distinct. A trainer keeps
    its first ones. The rest, in ascending order, go to the trainers that have too few, one trainer
    after another. The lists ascend; one is shorter than its size if there are not enough workers.
    """
    kept: list[list[int]] = []
    free: list[int] = []
    for own, size in zip(workers, sizes, strict=True):
        kept.append([*own[:size]])
        free += own[size:]
    free.sort()

    divided = []
    for own, size in zip(kept, sizes, strict=True):
        num_missing = size - len(own)
        divided.append(sorted(own + free[:num_missing]))
        free = free[num_missing:]
    return divided


def allocate_workers(requested_batch_sizes: Sequence[int], num_workers: int) -> tuple[int, ...]:
    """Divide the pool among trainers in proportion to their requested batch sizes.

    Every trainer gets the whole part of its share, but at least one worker; the rest go one by one
    to the largest remainder. If the minimum of one exceeds the pool, workers are taken back one by
    one from the trainer furthest above its share. Ties favour the lower position.

    Raises ValueError if there is no trainer, or there are fewer workers than trainers.

    Source: AdLoCo section 4.3. The reference code rounds the shares and may leave a trainer without
      a worker (studies/published.md, defect 16).
    """
    requested = [int(b) for b in requested_batch_sizes]
    if not requested or num_workers < len(requested):
        raise ValueError(
            f"num_workers={num_workers} for {len(requested)} trainers: expected one each at least"
        )
    total = sum(requested)
    # Compute in whole numbers. The exact share of a trainer is requested * num_workers / total.
    sizes = [max(1, b * num_workers // total) for b in requested]  # rounded down, but at least 1

    def shortfall(i: int) -> tuple[int, int]:
        """Return a key to sort by: how far trainer i is below its exact share, then its position.

        The position is negative, so that of equal trainers the lower position is the larger key.
        """
        return requested[i] * num_workers - sizes[i] * total, -i

    while sum(sizes) < num_workers:
        sizes[max(range(len(sizes)), key=shortfall)] += 1
    while sum(sizes) > num_workers:
        above_one = [i for i in range(len(sizes)) if sizes[i] > 1]
        sizes[min(above_one, key=shortfall)] -= 1
    return tuple(sizes)
