"""AdLoCo: the training loop (arXiv 2508.18182, algorithms 1 to 3) and the host's decisions in it.

`adloco` is the method, one line for each step of the paper. It runs on an `Engine`, which owns the
devices. Observers are called after each round: they write, print, evaluate and save. `State` holds
everything that determines how a run continues.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from adloco_jax.core.merge import MERGE_POLICIES, Candidate, allocate_workers, divide_workers
from adloco_jax.core.types import Ensemble
from adloco_jax.loop.control import (
    Control,
    RoundPlan,
    StateBytes,
    Trainer,
    merge_cost,
    with_cost,
)
from adloco_jax.loop.growth import Decision, Stats, free_workers, with_batch_sizes
from adloco_jax.loop.plans import is_over, round_plans, share_done
from adloco_jax.settings import Settings


class State(NamedTuple):
    """Everything that determines how a run continues, between two rounds."""

    ensemble: Ensemble
    control: Control


class Boundary(NamedTuple):
    """The data of a round's end that observers receive beside the state."""

    metrics: Any  # the engine's
    decisions: list[Decision]  # by trainer, in the round's stack
    # Ledger fields, including `event`, of all changes since the round, in order: quarantined
    # trainers, flushes, the merge or its refusal, workers that joined.
    changes: list[dict]
    # Whether all trainers have now made one round more; else some are further than before, each on
    # its own clock.
    advanced: bool = True


class Diverged(Exception):
    """No trainer is left with finite updates."""

    def __init__(self, state: State, boundary: Boundary):
        """Keep the state and the boundary that observers would have received."""
        super().__init__(f"round {state.control.round}")
        self.state, self.boundary = state, boundary


Observer = Callable[[State, Boundary], None]


class Engine(Protocol):
    """Runs the trainers.

    A method returns when its work is dispatched, unless its docstring says that it waits.
    Changes are ledger fields, including `event`.
    """

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes that a merge or a reallocation sends."""

    def ready(self, state: State) -> list[int]:
        """Positions of the trainers whose next round is to be taken; waits until there is one.

        Where each trainer has a clock of its own, their rounds have begun before.
        """

    def batch(self, state: State, plans: Mapping[int, RoundPlan]) -> Any:
        """The next sequences of these trainers' workers, each from its own stream."""

    def gradient_stats(self, state: State, batch: Any) -> Stats:
        """Gradient statistics at each trainer's parameters, on the round's first sequences."""

    def outer_step(self, state: State, batch: Any) -> tuple[State, Any]:
        """Dispatches a round of these trainers; `finish` waits for it."""

    def look_ahead(self, control: Control) -> None:
        """Prepares the next round as `control` plans it; the loop may discard it."""

    def finish(self, state: State, underway: Any) -> tuple[State, Any, list[dict]]:
        """Waits for a round: the state without trainers that only skip updates, metrics, changes.

        The state's ensemble is meaningless if no trainer is left.
        """

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """The state with unsynchronised worker updates (Streaming DiLoCo) flushed, and changes."""

    def guard_losses(self, state: State) -> list[float]:
        """Each trainer's loss on rows that are never reported, nats/token; waits."""

    def merged_loss(self, state: State, members: Sequence[int], weights: Sequence[float]) -> float:
        """The guard loss of the trainer that a merge would give, nats/token; waits."""

    def merge(
        self,
        ensemble: Ensemble,
        members: Sequence[int],
        weights: Sequence[float],
        owners: Sequence[int],
    ) -> Ensemble:
        """`core.merge` of the members, then `core.reassign` to the owners."""

    def spawn(self, ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
        """`core.spawn`."""


def adloco(
    state: State, *, settings: Settings, engine: Engine, observers: Sequence[Observer] = ()
) -> State:
    """Train until the configured rounds, or tokens, are done: algorithms 1 to 3 of AdLoCo.

    A round ends at its boundary: everything that happened in it is known there, and observers are
    called before the next round begins. During a round the host waits only for the gradient
    statistics, which are ready before the round's updates, and prepares the next round.

    Args:
      state: The state to start or continue from, for instance one that an observer received.
      settings: The run's settings.
      engine: Runs the trainers.
      observers: Called in order after each round with the state and the boundary.

    Returns:
      The state after the last round.

    Raises:
      Diverged: If no trainer is left after a round; observers have not been called for it.

    Source: AdLoCo (arXiv 2508.18182), algorithms 1 to 3 and section 4.
    """
    while not is_over(state.control, settings):
        before = state.control.round
        trainers = engine.ready(state)
        plans = round_plans(state.control, settings, trainers)  # 4.4, switch mode
        batch = engine.batch(state, plans)
        stats = engine.gradient_stats(state, batch)  # 4.2, at the round's common point
        state, underway = engine.outer_step(state, batch)  # algorithm 1, lines 5 to 16
        control, decisions = with_batch_sizes(state.control, stats, settings, plans)  # eq. 10-13
        if not is_over(control, settings):
            engine.look_ahead(control)
        state, metrics, changes = engine.finish(state._replace(control=control), underway)
        if not state.control.trainers:
            raise Diverged(state, Boundary(metrics, decisions, changes))
        advanced = state.control.round > before
        if is_over(state.control, settings):
            state, flushed = engine.flush(state, range(len(state.control.trainers)))
            changes += flushed
        merging = []
        if advanced and merge_due(state.control, settings):
            losses = engine.guard_losses(state)
            members = choose_members(state.control, losses, settings)  # algorithm 2, CheckMerge
            if members:  # algorithm 3, DoMerge
                state, merging = merge_trainers(state, members, losses, settings, engine)
                changes += merging
        for trainer, size in joining_workers(state.control, settings):  # ours
            state, spawned = spawn_workers(
                state, trainer, size, settings, engine, merged_now=bool(merging)
            )
            changes.append(spawned)
        for observer in observers:
            observer(state, Boundary(metrics, decisions, changes, advanced))
    return state


def start(settings: Settings, max_batch_size: int, *, whole_pool: bool = False) -> Control:
    """The control before the first round: workers are divided as evenly as possible.

    With `whole_pool` it includes the workers that join later; devices need memory for them.
    """
    ensemble, first = settings.ensemble, settings.batching.initial_batch_size
    initial = None if whole_pool else ensemble.initial_workers
    num_workers = initial or ensemble.num_workers
    owners = np.arange(num_workers) * ensemble.num_trainers // num_workers
    return Control(
        trainers=[Trainer(id=i, requested_batch_size=first) for i in range(ensemble.num_trainers)],
        owners=owners.tolist(),
        streams=list(range(num_workers)),
        max_batch_size=max_batch_size,
        eval_batch_size=max_batch_size,
    )


def merge_due(control: Control, settings: Settings) -> bool:
    """Whether trainers may merge at the end of this round."""
    merge = settings.merge
    is_round = control.round % merge.every_rounds == 0 < control.round
    return merge.policy != "none" and is_round and len(control.trainers) > 1


def choose_members(
    control: Control, guard_losses: Sequence[float], settings: Settings
) -> tuple[int, ...]:
    """The trainers to merge, the representative first; empty for no merge (CheckMerge)."""
    candidates = [
        Candidate(trainer.demand, loss, trainer.rounds)
        for trainer, loss in zip(control.trainers, guard_losses, strict=True)
    ]
    return MERGE_POLICIES[settings.merge.policy](candidates, width=settings.merge.width)


def merge_trainers(
    state: State,
    members: Sequence[int],
    losses: Sequence[float],
    settings: Settings,
    engine: Engine,
) -> tuple[State, list[dict]]:
    """Merge trainers unless the guard refuses, and reallocate the workers (DoMerge).

    Args:
      state: The stack.
      members: Positions, the representative first.
      losses: Guard losses of all trainers, from the engine.
      settings: The run's settings.
      engine: Measures the loss of the merged trainer, and moves the parameters.

    Returns:
      The new state, and ledger fields of the flushes before the merge and of the merge.
    """
    rule, trainers = settings.merge, state.control.trainers
    state, changes = engine.flush(state, members)
    if changes:
        losses = engine.guard_losses(state)
    weights = [trainers[m].demand for m in members]
    before = [losses[m] for m in members]
    after = engine.merged_loss(state, members, weights)
    barrier = after - float(np.average(before, weights=weights))
    refused = rule.max_barrier is not None and not barrier <= rule.max_barrier
    num_joining = 0
    if not (refused and rule.on_refusal == "keep"):
        shares = [1.0] + [0.0] * (len(members) - 1) if refused else weights
        state, num_joining, flushed = _join(state, members, shares, engine, refused=refused)
        changes += flushed
    cost = merge_cost(
        engine.state_bytes, num_absorbed=len(members) - 1, num_joining=num_joining, refused=refused
    )
    ids = [trainers[m].id for m in members]
    event: dict[str, Any] = {
        "event": "refusal" if refused else "merge",
        "round": state.control.round,
        "members": ids,
        "into": ids[0],
        "weights": weights,
        "loss_before": before,
        "loss_after": after,
        "barrier": barrier,
        **cost,
    }
    control = with_cost(state.control, cost)
    if refused:
        event["action"] = rule.on_refusal
    else:
        into = next(trainer for trainer in control.trainers if trainer.id == ids[0])
        event["requested_batch_size"] = into.requested_batch_size
        event["workers"] = {t.id: control.owners.count(m) for m, t in enumerate(control.trainers)}
        merge = {name: event[name] for name in ("round", "members", "into")}
        control = dataclasses.replace(control, merges=[*control.merges, merge])
    return State(state.ensemble, control), [*changes, event]


def _join(
    state: State, members: Sequence[int], weights: Sequence[float], engine: Engine, *, refused: bool
) -> tuple[State, int, list[dict]]:
    """Merge the members into one trainer; also return the number of moving workers, and flushes."""
    before = state.control
    changed = after_merge(before, members, refused=refused)
    owners = changed.owners
    left = [  # for each worker that moves, the trainer it leaves
        old
        for old, new in zip(before.owners, owners, strict=True)
        if changed.trainers[new].id != before.trainers[old].id
    ]
    state, flushed = engine.flush(state, sorted(set(left)))
    control = dataclasses.replace(state.control, trainers=changed.trainers, owners=owners)
    ensemble = engine.merge(state.ensemble, members, weights, owners)
    return State(ensemble, control), len(left), flushed


def after_merge(control: Control, members: Sequence[int], *, refused: bool = False) -> Control:
    """The control after a merge, with the workers divided by demand.

    Args:
      control: Before the merge.
      members: Positions, the representative first.
      refused: Whether the merge was refused: the weaker members leave, the representative stays.
    """
    changed = copy.deepcopy(control)
    if not refused:
        merged = [changed.trainers[m] for m in members]
        largest = max(merged, key=lambda trainer: trainer.demand)
        merged[0].requested_batch_size = largest.requested_batch_size
        merged[0].round_length = largest.round_length
        merged[0].smoothing = _mean_smoothing([t.smoothing for t in merged])
    changed.trainers = [t for m, t in enumerate(changed.trainers) if m not in members[1:]]
    sizes = allocate_workers([t.demand for t in changed.trainers], len(control.owners))
    for trainer, size in zip(changed.trainers, sizes, strict=True):
        trainer.requested_workers = size  # the division cancels every earlier request for workers
    changed.owners = divide_workers(control.owners, members, sizes)
    return changed


def joining_workers(control: Control, settings: Settings) -> list[tuple[int, int]]:
    """Position and new number of workers of each trainer that gains workers now."""
    ensemble, num_trainers = settings.ensemble, len(control.trainers)
    if ensemble.initial_workers is None or is_over(control, settings):
        return []
    sizes = [control.owners.count(m) for m in range(num_trainers)]
    free = free_workers(control, settings)
    if ensemble.spawn_frac is None:
        wanted = [trainer.requested_workers for trainer in control.trainers]
    elif share_done(control.round, control.tokens_total, settings) >= ensemble.spawn_frac:
        wanted = allocate_workers([1] * num_trainers, ensemble.num_workers)
    else:
        wanted = sizes
    joining = []
    for position, (size, want) in enumerate(zip(sizes, wanted, strict=True)):
        count = min(max(want - size, 0), free)
        free -= count
        if count:
            joining.append((position, size + count))
    return joining


def with_workers(control: Control, trainer: int, num_workers: int) -> Control:
    """The control after workers have joined a trainer; they read unused streams."""
    joining = num_workers - control.owners.count(trainer)
    unused = (stream for stream in itertools.count() if stream not in control.streams)
    return dataclasses.replace(
        control,
        owners=[*control.owners, *[trainer] * joining],
        streams=[*control.streams, *itertools.islice(unused, joining)],
    )


def spawn_workers(
    state: State,
    trainer: int,
    num_workers: int,
    settings: Settings,
    engine: Engine,
    *,
    merged_now: bool = False,
) -> tuple[State, dict]:
    """Let workers of the pool join a trainer, in one communication.

    Args:
      state: The stack.
      trainer: Position of the trainer.
      num_workers: Number of its workers afterwards.
      settings: The run's settings.
      engine: Copies the parameters.
      merged_now: Whether a merge or a refused attempt precedes at this boundary. Both are then one
        communication, which the merge has counted.

    Returns:
      The new state, and the fields of the ledger line, including `event`.
    """
    before = state.control.owners.count(trainer)
    cost = merge_cost(engine.state_bytes, num_joining=num_workers - before)
    if merged_now:
        cost["syncs"] = 0
    event = {
        "event": "spawn",
        "round": state.control.round,
        "trainer": state.control.trainers[trainer].id,
        "workers_before": before,
        "workers_after": num_workers,
        "reason": "test" if settings.ensemble.spawn_frac is None else "spawn_frac",
        **cost,
    }
    control = with_cost(with_workers(state.control, trainer, num_workers), cost)
    return State(engine.spawn(state.ensemble, trainer, num_workers), control), event


def _mean_smoothing(members: list[dict[str, float]]) -> dict[str, float]:
    measured = [sums for sums in members if sums]
    if not measured:
        return {}
    return {name: sum(m[name] for m in measured) / len(measured) for name in measured[0]}
