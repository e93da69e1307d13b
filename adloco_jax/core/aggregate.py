"""Aggregation of workers' differences into a pseudo-gradient: their mean, or another rule.

`AGGREGATORS` is the table that a run chooses from by name.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, PyTree

from adloco_jax.core.types import map_trainers, shares, where_leading

Aggregator: TypeAlias = Callable[..., PyTree]
"""`aggregate(difference_W, share_W, **knobs) -> pseudo_grad`, for one trainer.

`difference_W` has float32 leaves [W, ...]: the trainer's parameters minus each worker's. `share_W`,
float32 [W], holds the workers' weights, which sum to 1. A worker that is left out has a share of
zero and differences of zero. The result has leaves [...]. Knobs are keywords: keys of the config's
group `outer`, and `label_params`, the function of that name of `model.arch`'s entry.
"""


def mean(difference_W: PyTree, share_W: Float[Array, " W"]) -> PyTree:
    """The weighted mean of the workers' differences.

    Args:
      difference_W: Leaves [W, ...] float32, the trainer's parameters minus each worker's.
      share_W: Weights that sum to 1.

    Returns:
      Leaves [...].

    Source: DiLoCo (arXiv 2311.08105), algorithm 1, line 12.
    """

    def weighted_sum(leaf_W):
        return jnp.sum(leaf_W * share_W.reshape((-1,) + (1,) * (leaf_W.ndim - 1)), axis=0)

    return jax.tree.map(weighted_sum, difference_W)


def labels_of(label_params: Callable[[PyTree], PyTree] | None, difference_W: PyTree) -> PyTree:
    """The label of each leaf, for rules that depend on labels; "" without `label_params`."""
    if label_params is None:
        return jax.tree.map(lambda _: "", difference_W)
    return label_params(jax.tree.map(lambda leaf_W: leaf_W[0], difference_W))


AGGREGATORS: dict[str, Aggregator] = {"mean": mean}
"""By the name that `outer.aggregator` gives; add an entry to use your own."""


def by_trainers(
    difference_R: PyTree,
    owners: Sequence[int],
    *,
    weights_R: Array | None,
    usable_R: Array,
    aggregate: Aggregator,
) -> tuple[PyTree, Array]:
    """Each trainer's aggregate, leaves [R, ...] -> [M, ...], and whether it has a usable worker.

    Only positive finite weights count. Without such a weight a trainer weighs its usable workers
    equally.
    """
    weights_R = jnp.ones(len(owners), jnp.float32) if weights_R is None else weights_R

    def one_trainer(entries_W):
        usable_W, weights_W, difference_W = entries_W
        share_W, chosen_W = shares(weights_W, usable_W)
        # Excluded by selection, because zero times NaN is NaN.
        zeros_W = jax.tree.map(jnp.zeros_like, difference_W)
        pseudo_grad = aggregate(where_leading(chosen_W, difference_W, zeros_W), share_W)
        return pseudo_grad, jnp.any(usable_W)

    return map_trainers(one_trainer, (usable_R, weights_R, difference_R), owners)
