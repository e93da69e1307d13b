"""Four ideas for ours, each added to its best setting with Muon and a running average of rounds.

Declared before they ran, on seeds 0, 6 and 7; they are the last four of sixteen trials. A run names
its idea in the knob `outer.tx` or `inner.tx`. Importing this file adds these names to the package's
tables and wraps the functions `apply_differences`, `grown` and `spawn_workers`, which behave as
before under any other name.

- filled: while one worker trains, its differences fill the outer momentum, which is not used
  (`outer.skip_single` leaves it at zero). Where n workers follow the one, it is divided by n.
- all at once: 1 -> 4 workers instead of 1 -> 2 -> 4. When the test first asks for a worker, all
  that are free join: one synchronisation less.
- from the average: at a join all workers, also those that were there, continue from the running
  average of rounds instead of the last consensus; so does the consensus itself.
- GPA (arXiv 2512.17131) with Muon, for DiLoCo and for ours. Both are read out as the average of
  rounds of y.

An idea that saves less than 3 % of the steps to 1.60 ends. If GPA costs DiLoCo over 3 % more steps
while another idea gains, the sixteenth trial is not GPA for ours. It is all ideas that gain
together, with eta 1.6, or 2.3 if only the target for tokens is then missed.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from adloco_jax.contrib import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.core import outer
from adloco_jax.loop import adloco, growth

FILLED, AT_ONCE, FROM_AVERAGE = "nesterov_filled", "nesterov_at_once", "nesterov_from_average"
OURS = "ours, 0.006: rounds 110 to 220, average 0.5"
DILOCO = "DiLoCo, 0.006, average 0.5: Muon"


def trials(averaged: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the changes of each trial, by its name, from those of the earlier trials."""
    setting = OURS.partition(": ")[2]
    return {
        f"ours, filled: {setting}": averaged[OURS] | {"outer.tx": FILLED},
        f"ours, all at once: {setting}": averaged[OURS] | {"outer.tx": AT_ONCE},
        f"ours, from the average: {setting}": averaged[OURS] | {"outer.tx": FROM_AVERAGE},
        "DiLoCo, GPA: Muon": averaged[DILOCO] | {"inner.tx": "muon_gpa"},
        f"ours, GPA: {setting}": averaged[OURS] | {"inner.tx": "muon_gpa"},
    }


class Filled(optax.TraceState):
    """Nesterov momentum that the rounds of a single worker fill."""


def nesterov_filled(*, momentum: float) -> optax.GradientTransformation:
    """Make Nesterov momentum whose state is marked, so that `fill` knows it."""
    tx = optax.trace(momentum, nesterov=True)

    def update(updates, state, params=None):
        updates, state = tx.update(updates, state, params)
        return jax.tree.map(jnp.negative, updates), Filled(*state)

    return optax.GradientTransformation(lambda params: Filled(*tx.init(params)), update)


def is_filled(tree: PyTree) -> bool:
    """Return whether the state of an outer optimizer has the mark."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Filled))
    return any(isinstance(leaf, Filled) for leaf in leaves)


def fill(apply, ensemble, differences, *, skip_single=False, **how):
    """Apply differences; the momentum is as if a single worker did not skip the optimizer."""
    after, norm_M = apply(ensemble, differences, skip_single=skip_single, **how)
    if skip_single and is_filled(ensemble.outer_state_M):
        used, _ = apply(ensemble, differences, **how)
        after = after.replace(outer_state_M=used.outer_state_M)
    return after, norm_M


def all_join(grown, now, request, settings, *, free_workers=0, **how):
    """Grow a size; if workers join, all that are free do."""
    size = grown(now, request, settings, free_workers=free_workers, **how)
    if settings.outer.tx == AT_ONCE and size.num_workers > now.num_workers:
        size = size._replace(num_workers=now.num_workers + free_workers)
    return size


def join(spawn_workers, state, trainer, num_workers, settings, engine, **how):
    """Let workers join the only trainer, whose momentum or parameters change before."""
    ensemble, name = state.ensemble, settings.outer.tx
    if name == FILLED and ensemble.sizes == (1,):
        damped_M = jax.tree.map(lambda leaf: leaf / num_workers, ensemble.outer_state_M)
        ensemble = ensemble.replace(outer_state_M=damped_M)
    if name == FROM_AVERAGE:
        ensemble = ensemble.replace(params_M=jax.tree.map(jnp.copy, ensemble.average_M))
    state = state._replace(ensemble=ensemble)
    return spawn_workers(state, trainer, num_workers, settings, engine, **how)


class Ahead(NamedTuple):
    """The base optimizer's state, and x - z in units of the learning rate."""

    base: PyTree
    lag: PyTree


def gpa(make, *, m: float = 0.7, mu: float = 0.9967, **how) -> optax.GradientTransformation:
    """Make GPA (arXiv 2512.17131): y = m x + (1 - m) z; the base moves z; x <- mu x + (1 - mu) z.

    The trained parameters are y. Of x and z only x - z is kept, which an outer update of y leaves
    as it is. The learning rate, a factor on all updates, must be constant.
    """
    base = make(**how)

    def init(params):
        return Ahead(base.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        moved, base_state = base.update(grads, state.base, params)  # z
        lag = jax.tree.map(lambda old, step: mu * (old - step), state.lag, moved)
        updates = jax.tree.map(lambda step, new, old: step + m * (new - old), moved, lag, state.lag)
        return updates, Ahead(base_state, lag)

    return optax.GradientTransformation(init, update)


INNER_OPTIMIZERS["muon_gpa"] = functools.partial(gpa, INNER_OPTIMIZERS["muon"])
OUTER_OPTIMIZERS[FILLED] = nesterov_filled
OUTER_OPTIMIZERS[AT_ONCE] = OUTER_OPTIMIZERS[FROM_AVERAGE] = OUTER_OPTIMIZERS["nesterov"]
outer.apply_differences = functools.partial(fill, outer.apply_differences)
growth.grown = functools.partial(all_join, growth.grown)
adloco.spawn_workers = functools.partial(join, adloco.spawn_workers)
