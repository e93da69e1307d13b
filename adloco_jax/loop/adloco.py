"""AdLoCo (arXiv 2508.18182, algorithms 1 to 3): the training loop and the host's decisions.

`adloco` is the paper's method, with one line for each step. Devices are the `Engine`'s; observers
write, print, evaluate and save after each round.
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
    """All that determines how a run continues: the arrays, and the host's numbers."""

    ensemble: Ensemble
    control: Control

    def __repr__(self) -> str:
        done = f"round {self.control.round}, {self.control.tokens_total:,} tokens"
        return f"State({done}, {self.ensemble!r})"


class Boundary(NamedTuple):
    """The results of a round, and what changed for trainers and workers at its end."""

    metrics: Any  # the metrics of the round that `Engine.finish` returned
    decisions: list[Decision]  # one for each trainer, in the stack order of the round
    # One dict for each change since the round, in order: the fields of its line in the ledger, with
    # the kind of change under `event`. Changes are quarantined trainers, flushes, a merge or its
    # refusal, and workers that joined.
    changes: list[dict]
    # Whether the slowest trainer has completed one more round. It is False only if trainers run at
    # their own pace, and only faster trainers have completed a round.
    advanced: bool = True


class Diverged(Exception):
    """Raised when no trainer is left: all were removed, because their updates were not finite."""

    def __init__(self, state: State, boundary: Boundary):
        super().__init__(f"round {state.control.round}")
        self.state, self.boundary = state, boundary


Observer = Callable[[State, Boundary], None]


class Engine(Protocol):
    """The interface between the training loop and the devices.

    A method returns before the devices have computed, unless it says that it waits. Changes are
    dicts, one for each ledger line, with its kind under `event`.
    """

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes of the parameters and optimizer states that are sent in merges and joins."""

    def ready(self, state: State) -> list[int]:
        """Return the positions of the trainers whose round the loop runs next.

        An engine whose trainers run at their own pace waits here until at least one round has
        ended, and returns the trainers of all that have.
        """

    def batch(self, state: State, plans: Mapping[int, RoundPlan]) -> Any:
        """Read the next sequences of each worker's stream, for the trainers in `plans`."""

    def gradient_stats(self, state: State, batch: Any) -> Stats:
        """Measure gradient statistics on the round's first sequences, before its updates."""

    def outer_step(self, state: State, batch: Any) -> tuple[State, Any]:
        """Start a round of the trainers in `batch`; return its state and `finish`'s argument."""

    def look_ahead(self, control: Control) -> None:
        """Prepare the round that would follow from `control`; the loop may run another."""

    def finish(self, state: State, underway: Any) -> tuple[State, Any, list[dict]]:
        """Wait for a round; return the state, the round's metrics, and the changes.

        A trainer is removed if all its workers have skipped several updates in a row. If none is
        left, the ensemble must not be used.
        """

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Synchronise what Streaming DiLoCo has not sent yet; return the state and the changes."""

    def guard_losses(self, state: State) -> list[float]:
        """Compute each trainer's loss on the guard rows, in nats/token; wait for it."""

    def merged_loss(self, state: State, members: Sequence[int], weights: Sequence[float]) -> float:
        """Compute the guard loss, in nats/token, of the trainer that a merge would give; wait."""

    def merge(
        self,
        ensemble: Ensemble,
        members: Sequence[int],
        weights: Sequence[float],
        owners: Sequence[int],
    ) -> Ensemble:
        """Merge trainers (`core.merge`), then move workers between trainers (`core.reassign`)."""

    def spawn(self, ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
        """Add new workers to a trainer (`core.spawn`), up to the number `num_workers`."""


def adloco(
    state: State, *, settings: Settings, engine: Engine, observers: Sequence[Observer] = ()
) -> State:
    """Train for the configured number of rounds or tokens: algorithms 1 to 3 of AdLoCo.

    While the devices run a round, the host prepares the next; it waits only for the gradient
    statistics, which are computed before the updates. Observers are called in order after each
    round, and any state that they receive can be continued.

    Raises:
      Diverged: If no trainer is left after a round, for which observers are not called.

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
        for trainer, size in joining_workers(state.control, settings):  # not in the paper
            state, spawned = spawn_workers(
                state, trainer, size, settings, engine, merged_now=bool(merging)
            )
            changes.append(spawned)
        for observer in observers:
            observer(state, Boundary(metrics, decisions, changes, advanced))
    return state


def start(settings: Settings, max_batch_size: int, *, whole_pool: bool = False) -> Control:
    """Return the host's data before the first round, perhaps with the workers that join later."""
    ensemble, first = settings.ensemble, settings.batching.initial_batch_size
    owners = ensemble.owners(whole_pool=whole_pool)
    return Control(
        trainers=[Trainer(id=i, requested_batch_size=first) for i in range(ensemble.num_trainers)],
        owners=list(owners),
        streams=list(range(len(owners))),
        max_batch_size=max_batch_size,
        eval_batch_size=max_batch_size,
    )


def merge_due(control: Control, settings: Settings) -> bool:
    """Return whether trainers may merge after this round, which is counted and not the last."""
    merge = settings.merge
    is_round = control.round % merge.every_rounds == 0 < control.round
    is_round = is_round and not is_over(control, settings)
    return merge.policy != "none" and is_round and len(control.trainers) > 1


def choose_members(
    control: Control, guard_losses: Sequence[float], settings: Settings
) -> tuple[int, ...]:
    """Choose the trainers to merge, the representative first (CheckMerge); empty: none."""
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
    """Merge `members` into the first of them, and reassign the workers (the paper's DoMerge).

    A merge is refused if the merged loss exceeds the members' mean guard loss (`losses` has that of
    each trainer) by more than `merge.max_barrier`. `merge.on_refusal` then decides: "keep" changes
    nothing; "retire" leaves only the representative, as it was, and reassigns the workers.

    Returns the state, and the ledger lines: flushes, then the merge or its refusal.
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
    """Merge the members into the first of them, and divide the workers again."""
    before = state.control
    changed = after_merge(before, members, refused=refused)
    owners = changed.owners
    left = [  # for each worker that moves, the position of the trainer that it leaves
        old
        for old, new in zip(before.owners, owners, strict=True)
        if changed.trainers[new].id != before.trainers[old].id
    ]
    state, flushed = engine.flush(state, sorted(set(left)))
    control = dataclasses.replace(state.control, trainers=changed.trainers, owners=owners)
    ensemble = engine.merge(state.ensemble, members, weights, owners)
    return State(ensemble, control), len(left), flushed


def after_merge(control: Control, members: Sequence[int], *, refused: bool = False) -> Control:
    """Return the host's data after a merge of `members`, the representative first.

    It takes batch and round length from the member with the largest demand (their product), and the
    mean of the smoothed statistics. Workers are divided in proportion to demand. If `refused`, the
    representative keeps its own, and the other members leave the run.
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
    """List (trainer, its new number of workers) for the workers that join now.

    With `ensemble.spawn_frac`, all join after that fraction of the run; otherwise a trainer gets
    the free workers that its batch-size tests have requested.
    """
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
    """Return the host's data after new workers, with new data streams, have joined a trainer."""
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
    """Add workers of the pool to a trainer, up to `num_workers`, in one communication.

    If trainers were merged, or a merge refused, after the same round (`merged_now`), it is that of
    the merge, counted already. Returns the state, and the fields of the ledger line.
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
