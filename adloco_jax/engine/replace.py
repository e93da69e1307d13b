"""Merges, and workers that join or leave: a new stack replaces the old one in parts.

Two stacks may not fit a device, because the workers' inner states fill most of its memory. So some
leaves of the inner states are replaced at a time, and the old leaves are deleted before the next
ones are made.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import Array

from adloco_jax.core.merge import merge, reassign, spawn
from adloco_jax.core.types import Ensemble, take
from adloco_jax.engine.spec import num_bytes

PART_BYTES = 2**30  # of inner states that are replaced at a time; at least one leaf


@functools.partial(jax.jit, static_argnums=(2, 3))
def merged(
    ensemble: Ensemble, weights_n: Array, members: tuple[int, ...], owners: tuple[int, ...]
) -> Ensemble:
    """`core.merge` of the members, then `core.reassign` to the owners."""
    return reassign(merge(ensemble, members, weights=weights_n), owners)


@functools.partial(jax.jit, static_argnums=(1, 2))
def spawned(ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
    """`core.spawn`."""
    return spawn(ensemble, trainer, num_workers)


@functools.partial(jax.jit, static_argnums=1)
def taken(ensemble: Ensemble, trainers: tuple[int, ...]) -> Ensemble:
    """`core.take`."""
    return take(ensemble, trainers)


def parts_of(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Leaves in order, in parts of at most `PART_BYTES`, or of one leaf."""
    part: list[Any] = []
    for leaf in leaves:
        if part and num_bytes([*part, leaf]) > PART_BYTES:
            yield part
            part = []
        part.append(leaf)
    if part:
        yield part


def replace(change: Any, ensemble: Ensemble, *arguments: Any) -> Ensemble:
    """`change(ensemble, *arguments)`, one of the functions above; deletes large inner states."""
    leaves, structure = jax.tree.flatten(ensemble.inner_state_R)
    parts = list(parts_of(leaves))
    if len(parts) <= 1:
        return change(ensemble, *arguments)
    new_leaves = []
    for part in parts:
        alone = ensemble.replace(params_R=None, inner_state_R=part)
        new_leaves += change(alone, *arguments).inner_state_R
        for leaf in part:
            leaf.delete()
    rest = change(ensemble.replace(inner_state_R=None), *arguments)
    return rest.replace(inner_state_R=structure.unflatten(new_leaves))
