"""Merge trainers, and divide the workers among the remaining trainers (AdLoCo section 4.3)."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from adloco_jax.core.meshes import like_ensemble, on_any_mesh
from adloco_jax.core.types import (
    Ensemble,
    at_least_float32,
    check_owners,
    moved_params,
    moved_states,
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
    """Select the `width` trainers with the smallest requested batches for a merge.

    Returns the positions of the selected trainers. The first is the representative, the trainer
    that absorbs the others: of the selected trainers, the one with the largest request.

    A small requested batch means that the gradient is large compared with its noise. Such trainers
    gain least from staying separate.

    Source: AdLoCo algorithm 2, lines 2-4.
    """
    members = _smallest_first(trainers)[:width]
    return _represented(trainers, members)


def best_with_worst(trainers: Sequence[Candidate], *, width: int) -> tuple[int, ...]:
    """Select for a merge the trainer with the largest requested batch and those with the smallest.

    Returns the positions of `width` trainers. The first is the representative, the trainer that
    absorbs the others: the one with the largest request.
    """
    by_size = _smallest_first(trainers)
    best = max(by_size, key=lambda m: (trainers[m].requested_batch_size, -m))
    return _represented(trainers, [best, *[m for m in by_size if m != best][: width - 1]])


MergePolicy: TypeAlias = Callable[..., tuple[int, ...]]
"""`policy(trainers, *, width) -> positions` chooses the trainers that merge.

`trainers` is a sequence of at least two `Candidate`. The first position is that of the
representative, the trainer that absorbs the others. An empty result means no merge.
"""

MERGE_POLICIES: dict[str, MergePolicy] = {
    "worst_with_worst": worst_with_worst,
    "best_with_worst": best_with_worst,
    "none": lambda trainers, *, width: (),
}
"""Merge policies by name, for the knob `merge.policy`. To use your own policy, add an entry."""


def _smallest_first(trainers: Sequence[Candidate]) -> list[int]:
    return sorted(range(len(trainers)), key=lambda m: (trainers[m].requested_batch_size, m))


def _represented(trainers: Sequence[Candidate], members: Sequence[int]) -> tuple[int, ...]:
    """Order the members of a merge: first the representative, then the others by position."""
    first = max(members, key=lambda m: (trainers[m].requested_batch_size, -m))
    return (first, *sorted(m for m in members if m != first))


def choose_merge(
    requested_batch_sizes: Sequence[int], *, policy: str, width: int
) -> tuple[int, ...]:
    """Choose the trainers to merge, by a policy that reads only requested batch sizes.

    Args:
      requested_batch_sizes: Each trainer's requested batch in sequences per worker, in stack order.
      policy: A name in `MERGE_POLICIES`.
      width: Number of trainers to merge, >= 2. If there are fewer trainers, all are merged.

    Returns:
      Positions of the trainers to merge: first the representative, which absorbs the others, then
      the others in stack order. If trainers have equal requests, the one at the lower position is
      chosen first. The result is empty if there are fewer than two trainers, or the policy merges
      none.

    Raises:
      ValueError: If `policy` is unknown or `width` below 2.

    Source: AdLoCo algorithm 2, lines 2-4.
    """
    if width < 2:
        raise ValueError(f"width={width}: expected at least 2 trainers to become one")
    if policy not in MERGE_POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(MERGE_POLICIES)}")
    if len(requested_batch_sizes) < 2:
        return ()
    candidates = [Candidate(size) for size in requested_batch_sizes]
    return MERGE_POLICIES[policy](candidates, width=width)


@on_any_mesh(like_ensemble)
def merge(
    ensemble: Ensemble, members: Sequence[int], *, weights: Sequence[float] | Float[Array, " n"]
) -> Ensemble:
    """Merge several trainers into the first of them.

    The first member is the representative. The other members are absorbed: they leave the stack,
    and their workers join the representative. `reassign` can then move these workers.

    The parameters of the representative and the floating-point part of its outer state (momentum)
    become weighted means over the members. The means are computed in float32, or in float64 for
    float64 arrays. Values that are equal in all members do not change. A member is left out of the
    means if its weight is not positive and finite, or if it has a value that is not finite and that
    is not the same in all members. The values of such a member are masked out, because multiplying
    a NaN by a weight of zero would give NaN. If no finite member has a usable weight, all finite
    members count equally. If no member is finite, the representative stays as it is.

    The representative's own workers keep their inner states, and the workers of the absorbed
    members take the mean of these states. If the representative is left out of the means, the first
    member that is not left out takes its place here: that member's workers keep their inner states,
    and the workers of all other members take the mean of these states.

    The remaining trainers keep their order. If workers have their own parameters, all workers of
    the members start at the merged parameters. Worker updates that are not yet synchronised are
    then lost, so call `outer_update` before.

    Args:
      ensemble: The stack of M trainers.
      members: Distinct positions, at least two, the representative first.
      weights: One weight for each member; the paper uses the requested batch sizes.

    Returns:
      The ensemble with M - len(members) + 1 trainers.

    Raises:
      ValueError: If a position repeats or is out of range, or the number of weights differs from
        that of members.

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
    representative, absorbed = chosen[0], chosen[1:]
    survivors = [m for m in range(ensemble.num_trainers) if m not in absorbed]
    stacked = (ensemble.params_M, ensemble.outer_state_M)
    finite_n = jnp.ones(len(chosen), bool)
    for leaf in jax.tree.leaves(stacked):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            member_n = leaf[chosen].reshape(len(chosen), -1)
            is_equal = jnp.all(
                member_n == member_n[:1], axis=0, keepdims=True
            )  # an infinite value that all members share does no harm
            finite_n &= jnp.all(jnp.isfinite(member_n) | is_equal, axis=1)
    share_n, usable_n = shares(weights_n, finite_n)
    origin = jnp.argmax(usable_n)

    def merge_leaf(leaf_M):
        if not jnp.issubdtype(leaf_M.dtype, jnp.inexact):
            return leaf_M[np.array(survivors)]
        # Average differences from one member, so that equal members are reproduced exactly.
        member_n = leaf_M[chosen].astype(at_least_float32(leaf_M.dtype))
        base, zeros_n = member_n[origin], jnp.zeros_like(member_n)
        difference_n = jnp.where(member_n == base[None], zeros_n, member_n - base[None])
        difference_n = where_leading(usable_n, difference_n, zeros_n)
        mean = base + jnp.tensordot(share_n, difference_n, 1, precision="highest")
        mean = jnp.where(jnp.any(usable_n), mean, leaf_M[representative]).astype(leaf_M.dtype)
        return leaf_M.at[representative].set(mean)[np.array(survivors)]

    params_M, outer_state_M = jax.tree.map(merge_leaf, stacked)
    # The trainer whose workers keep their inner states: the first member that is not masked out,
    # normally the representative.
    heir = jnp.asarray(chosen)[origin]
    is_member_R = np.isin(ensemble.owner_R, chosen)
    owners = tuple(survivors.index(representative if m in absorbed else m) for m in ensemble.owners)
    pool = np.arange(ensemble.num_workers)
    return ensemble.replace(
        params_M=params_M,
        outer_state_M=outer_state_M,
        params_R=moved_params(
            ensemble.replace(params_M=params_M, owners=owners), pool, ~is_member_R, owners
        ),
        inner_state_R=moved_states(
            ensemble,
            pool,
            ~is_member_R | (ensemble.owner_R == heir),
            jnp.full(ensemble.num_workers, heir),
        ),
        owners=owners,
    )


@on_any_mesh(like_ensemble)
def reassign(ensemble: Ensemble, owner_R: Sequence[int]) -> Ensemble:
    """Move workers between trainers, add workers to the pool, or retire workers from it.

    A worker that stays with its trainer keeps its inner state. A worker that joins a trainer takes
    the mean inner state of the workers that the trainer already had, so that it does not restart or
    distort that trainer's optimizer. In this mean, whole numbers such as Adam's count of updates
    are rounded, and values that are equal in all these workers do not change. A PRNG key cannot be
    averaged, so the key of the trainer's first worker is copied. If workers have their own
    parameters, a worker that joins a trainer starts at the trainer's parameters.

    Args:
      ensemble: The stack of trainers and the pool of workers.
      owner_R: The position of each worker's new trainer, in the order of the workers. -1 retires a
        worker. Entries beyond the present pool are new workers.

    Returns:
      The ensemble with the new pool. Retired workers are gone; the others keep their order.

    Raises:
      ValueError: If an entry is neither -1 nor the position of a trainer, the list is shorter than
        the pool, or a trainer is left without a worker.

    Source: docs/algorithm.md, section 4. AdLoCo, section 4.3, divides the workers again after each
      merge.
    """
    owners = np.asarray(owner_R, dtype=np.int64).reshape(-1)
    pool = ensemble.num_workers
    if len(owners) < pool:
        raise ValueError(f"owner_R has {len(owners)} entries for a pool of {pool} workers")
    staying = np.flatnonzero(owners != -1)
    new_owner = owners[owners != -1]
    check_owners(new_owner, ensemble.num_trainers)
    source = np.minimum(staying, pool - 1)
    stays_R = (ensemble.owner_R[source] == new_owner) & (staying < pool)
    return ensemble.replace(
        inner_state_R=moved_states(ensemble, source, stays_R, new_owner),
        owners=tuple(new_owner.tolist()),
        params_R=moved_params(ensemble, source, stays_R, new_owner.tolist()),
    )


def spawn(ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
    """Add new workers to a trainer; they start at the parameters of the trainer.

    New workers are added at the end of the pool. They take the mean inner state of the workers that
    the trainer already had, as in `reassign`. They have the parameters of the trainer, so averaging
    its workers directly after spawning changes nothing.

    Args:
      ensemble: The stack of trainers and the pool of workers.
      trainer: Position of the trainer.
      num_workers: Number of the trainer's workers afterwards, at least the present number.

    Returns:
      The ensemble with a larger pool.

    Raises:
      ValueError: If the trainer does not exist, or already has more workers.

    Source: docs/algorithm.md, section 4; not in the paper.
    """
    (position,) = positions("trainer", [trainer], ensemble.num_trainers).tolist()
    joining = num_workers - ensemble.owners.count(position)
    if joining < 0:
        raise ValueError(
            f"num_workers={num_workers}: trainer {position} has {num_workers - joining} workers"
            " already; to take some away use reassign"
        )
    return reassign(ensemble, (*ensemble.owners, *[position] * joining))


def divide_workers(
    owners: Sequence[int], members: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    """Assign each worker to a trainer after a merge, given how many workers each trainer gets.

    The workers are assigned in this order, until each trainer has its number of workers. First,
    each trainer keeps its own workers. Then the representative keeps workers of the trainers that
    it absorbed. Finally, trainers that still lack workers take unassigned workers, in the order of
    the workers' positions.

    Args:
      owners: Position of each worker's trainer before the merge.
      members: Positions of the merged trainers, the representative first.
      sizes: Number of workers of each remaining trainer, in stack order; their sum is the size of
        the pool.

    Returns:
      For each worker the position of its trainer after the merge. It is the argument `owner_R` for
      `reassign` on the merged ensemble.
    """
    absorbed = members[1:]
    survivors = [m for m in range(max(owners) + 1) if m not in absorbed]
    own = [[w for w, owner in enumerate(owners) if owner == old] for old in survivors]
    own[survivors.index(members[0])] += [w for w, owner in enumerate(owners) if owner in absorbed]
    divided = [-1] * len(owners)
    for new, workers in enumerate(own):
        for worker in workers[: sizes[new]]:
            divided[worker] = new
    free = [w for w, owner in enumerate(divided) if owner < 0]
    for new, size in enumerate(sizes):
        for _ in range(size - divided.count(new)):
            divided[free.pop(0)] = new
    return divided


def allocate_workers(requested_batch_sizes: Sequence[int], num_workers: int) -> tuple[int, ...]:
    """Divide the workers of the pool among trainers in proportion to their requested batch sizes.

    A trainer's exact share of the pool is proportional to its request, and need not be whole. Every
    trainer gets the whole part of its share, but at least one worker. The workers that are left go
    one by one to the trainer that lacks most of its share (largest remainder). If the minimum of
    one worker has given out more workers than there are, workers are taken back one by one, each
    from the trainer that exceeds its share most, of those with more than one worker. Of equal
    trainers, the one at the lower position gets or keeps the worker.

    Args:
      requested_batch_sizes: Each trainer's requested batch, positive, in stack order.
      num_workers: Size of the pool, at least one worker per trainer.

    Returns:
      Number of workers of each trainer; their sum is exactly `num_workers`.

    Raises:
      ValueError: If the pool is too small, or a requested batch is not positive.

    Source: AdLoCo section 4.3. The reference code rounds the shares and may leave a trainer without
      a worker (docs/algorithm.md, section 7, defect 16).
    """
    requested = [int(b) for b in requested_batch_sizes]
    if not requested or num_workers < len(requested):
        raise ValueError(
            f"num_workers={num_workers} for {len(requested)} trainers: expected one each at least"
        )
    if min(requested) < 1:
        raise ValueError(f"requested_batch_sizes={requested}: expected positive whole numbers")
    total = sum(requested)
    # Compute in whole numbers. The exact share of a trainer is requested * num_workers / total.
    shares = [max(1, b * num_workers // total) for b in requested]

    def shortfall(i):
        return requested[i] * num_workers - shares[i] * total, -i

    while sum(shares) < num_workers:
        shares[max(range(len(shares)), key=shortfall)] += 1
    while sum(shares) > num_workers:
        above_one = [i for i in range(len(shares)) if shares[i] > 1]
        shares[min(above_one, key=shortfall)] -= 1
    return tuple(shares)
