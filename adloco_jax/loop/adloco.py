"""AdLoCo (arXiv 2508.18182, algorithms 1 to 3): the training loop and the host's decisions.

`adloco` is the paper's method, with one line for each step. Devices are the `Engine`'s; observers
write, print, evaluate and save after each round.

Words of this module:

- A stream is the sequence of training rows that one worker reads; its number is the worker's id.
- Guard rows are held-out rows that serve decisions alone, such as whether to merge.
- The demand of a trainer is its requested batch times its round length, which weighs it in a merge.
- Members are the trainers that merge. The first, the representative, remains; the others are
  absorbed.
- A flush synchronises the updates that Streaming DiLoCo has not sent yet.
- The pool is all workers that a run may have. Some may join after the start.
- The ledger is the run's file of events; a change is one line of it, as a dict.
- A merge is refused if it would raise the guard loss too much. The members are then all kept, or
  all but the representative leave the run (`merge.on_refusal`).
- The average of a trainer is the running average of its parameters over its rounds.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from adloco_jax.core.merge import MERGE_POLICIES, Candidate, allocate_workers, divide_workers
from adloco_jax.core.outer import running_average
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
from adloco_jax.loop.plans import is_over
from adloco_jax.settings import (
    BatchingSettings,
    EnsembleSettings,
    MergeSettings,
    Settings,
    even_sizes,
)


class State(NamedTuple):
    """All that determines how a run continues: the arrays, and the host's numbers."""

    ensemble: Ensemble
    control: Control  # round, trainers, their workers and sizes, costs so far

    def __repr__(self) -> str:
        done = f"round {self.control.round}, {self.control.tokens_total:,} tokens"
        return f"State({done}, {self.ensemble!r})"


class Boundary(NamedTuple):
    """The results of a round, and what changed for trainers and workers at its end."""

    metrics: Any  # what the engine measured
    decisions: list[Decision]  # one for each trainer that ran, in their order
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
        self.state = state
        self.boundary = boundary


class Stopped(Exception):
    """Raised by an engine after a signal, if its round cannot end soon; `state` is the last one."""

    def __init__(self, state: State):
        super().__init__(f"round {state.control.round}")
        self.state = state


Observer = Callable[[State, Boundary], None]


Decide = Callable[[Control, Stats, Mapping[int, RoundPlan]], tuple[Control, list[Decision]]]
"""`decide(control, stats, plans)` chooses the next sizes of the trainers that have run a round.

In `control` this round is counted. `stats` has by trainer id what the workers measured, and lacks
trainers that measured nothing; `plans` has by trainer id the sizes of the round. Returns a copy of
`control` with the new sizes, and a decision for each trainer in `plans`.
"""


class Engine(Protocol):
    """What runs rounds. Trainers are named by their ids, in the order of `Control.trainers`."""

    state_bytes: StateBytes

    def round(self, state: State, decide: Decide) -> tuple[State, Boundary]:
        """Run a round of one trainer at least, and wait for its end: algorithm 1, lines 5 to 16.

        `round_plans` has its sizes. Gradient statistics are measured on each worker's first
        sequences, at the parameters with which it begins. `decide` is called between these and the
        updates: what it chooses holds from the next round on, so updates need not wait for it.

        A trainer whose workers have all skipped several updates in a row is removed. If none is
        left, the ensemble must not be used.
        """

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Synchronise what Streaming DiLoCo has not sent yet; return the state and the changes."""

    def losses(self, state: State, models: Sequence[Mapping[int, float]]) -> list[float]:
        """Compute losses on the guard rows, in nats/token, of trainers or merges of several.

        A model has its members' weights in a merge, by trainer, the representative first.
        """

    def merge(
        self, state: State, members: Sequence[int], weights: Sequence[float], after: Control
    ) -> Ensemble:
        """Merge trainers (`core.merge`), and give each trainer the workers that it has in `after`.

        Members are ids, the representative's first; `weights` are in their order.
        """

    def spawn(self, state: State, trainer: int, num_workers: int) -> Ensemble:
        """Add new workers to a trainer (its id), until it has `num_workers` (`core.spawn`)."""


def adloco(
    state: State, *, settings: Settings, engine: Engine, observers: Sequence[Observer] = ()
) -> State:
    """Train for the configured number of rounds or tokens: algorithms 1 to 3 of AdLoCo.

    Observers are called in order after each round, and any state that they receive can be
    continued.

    Raises:
      Diverged: If no trainer is left after a round, for which observers are not called.
      Stopped: By the engine, after a signal.

    Source: AdLoCo (arXiv 2508.18182), algorithms 1 to 3 and section 4.
    """

    def decide(
        control: Control, stats: Stats, plans: Mapping[int, RoundPlan]
    ) -> tuple[Control, list[Decision]]:
        """Choose the next sizes of the trainers that ran, by the configured batch-size test."""
        return with_batch_sizes(control, stats, settings, plans)  # 4.2, eq. 10-13

    while not is_over(state.control, settings):
        before = state.control
        state, boundary = engine.round(state, decide)  # 4.4; algorithm 1, lines 5 to 16
        if not state.control.trainers:
            raise Diverged(state, boundary)
        changes = [*boundary.changes]
        # The count of the slowest trainer; trainers may run at their own pace.
        advanced = state.control.round > before.round
        # The fraction of the run that is complete.
        done = settings.share_done(state.control.round, state.control.tokens_total)
        if done >= 1:  # after the last round, no worker may keep updates to itself
            state, flushed = engine.flush(state, [*state.control.trainers])
            changes += flushed
        # The running averages of the trainers' parameters; not in the paper.
        state = with_average(state, before, settings.outer.average)

        members: tuple[int, ...] = ()
        if advanced and merge_due(state.control, settings.merge, done):
            losses = guard_losses(state, engine)
            # Algorithm 2, CheckMerge.
            members = choose_members(state.control, losses, settings.merge)
            if members:  # algorithm 3, DoMerge
                state, merged = merge_trainers(state, members, losses, settings.merge, engine)
                changes += merged

        joining = joining_workers(state.control, settings.ensemble, done)  # not in the paper
        # After a merge, or one that was refused, joins are a part of its communication.
        merged_now = bool(members)
        for trainer, num_workers in joining:
            state, spawned = spawn_workers(
                state, trainer, num_workers, settings.ensemble, engine, merged_now=merged_now
            )
            changes.append(spawned)

        # The engine's boundary, with the merges and joins since.
        for observer in observers:
            observer(state, boundary._replace(changes=changes, advanced=advanced))
    return state


_running_average = jax.jit(running_average, donate_argnums=0)


def with_average(state: State, before: Control, average: float) -> State:
    """Update the running averages of the trainers that completed a round since `before`.

    `before` is the host's data before that round. The new average of a trainer is `share` times the
    old average plus `1 - share` times the trainer's parameters. The share is at most `average`. In
    the first rounds it is smaller, so that the average is the plain mean of the rounds. The old
    averages are donated: JAX may reuse their memory. With `average=0` no averages are kept, and
    `state` is returned as it is.
    """
    if average == 0:
        return state
    ensemble, control = state
    share_M = np.ones(len(control.trainers), np.float32)  # 1: a trainer is still in a round
    for position, m in enumerate(control.trainers):
        num_rounds = control.rounds_of(m)
        if num_rounds > before.rounds_of(m):
            # With 1 - 1 / n in round n, the average is the mean of n rounds.
            share_M[position] = min(average, 1 - 1 / num_rounds)
    average_M = _running_average(ensemble.average_M, ensemble.params_M, share_M)
    return State(ensemble.replace(average_M=average_M), control)


def start(
    ensemble: EnsembleSettings,
    batching: BatchingSettings,
    max_batch_size: int,
    *,
    whole_pool: bool = False,
) -> Control:
    """Return the host's data before the first round: trainers 0, 1, … with streams in that order.

    Args:
      ensemble: The numbers of trainers and workers.
      batching: Has the batch with which each trainer starts.
      max_batch_size: The largest micro-batch that fits on a device, in sequences.
      whole_pool: Whether trainers also have the workers that join later, as for a plan of memory.
    """
    trainers = {}
    num_streams = 0
    # `sizes` has the number of each trainer's workers.
    for m, size in enumerate(ensemble.sizes(whole_pool=whole_pool)):
        streams = [*range(num_streams, num_streams + size)]
        trainers[m] = Trainer(requested_batch_size=batching.initial_batch_size, streams=streams)
        num_streams += size
    return Control(
        trainers=trainers,
        max_batch_size=max_batch_size,
        eval_batch_size=max_batch_size,  # this stays, while the line above may change in a run
    )


def merge_due(control: Control, merge: MergeSettings, done: float) -> bool:
    """Return whether trainers may merge after the round that has just ended.

    `control.round` already counts that round. `done` is the fraction of the run that is complete,
    from 0 to 1; after the last round nothing merges.
    """
    if merge.policy == "none" or len(control.trainers) < 2 or done >= 1:
        return False
    return control.round > 0 and control.round % merge.every_rounds == 0


def guard_losses(state: State, engine: Engine) -> dict[int, float]:
    """Return the loss of each trainer on the guard rows, in nats/token."""
    trainers = [*state.control.trainers]
    losses = engine.losses(state, [{m: 1.0} for m in trainers])
    return dict(zip(trainers, losses, strict=True))


def choose_members(
    control: Control, losses: Mapping[int, float], rule: MergeSettings
) -> tuple[int, ...]:
    """Choose the trainers to merge by the configured policy (the paper's CheckMerge).

    `losses` has the loss of each trainer on the guard rows, by trainer id. Returns the ids of
    the chosen trainers, the representative first; an empty tuple if none are to merge.
    """
    ids = [*control.trainers]
    candidates = []
    for m, trainer in control.trainers.items():
        candidates.append(Candidate(trainer.demand, guard_loss=losses[m], age=trainer.rounds))
    chosen = MERGE_POLICIES[rule.policy](candidates, width=rule.width)
    return tuple(ids[position] for position in chosen)


def merge_trainers(
    state: State,
    members: Sequence[int],
    losses: Mapping[int, float],
    rule: MergeSettings,
    engine: Engine,
) -> tuple[State, list[dict]]:
    """Merge `members` into the first of them, and reassign the workers (the paper's DoMerge).

    Parameters become the mean of the members', weighted by their demands. A merge is refused if the
    merged loss exceeds the members' mean guard loss (`losses` has that of each trainer) by more
    than `rule.max_barrier`. `rule.on_refusal` then decides: "keep" changes nothing; "retire" leaves
    only the representative, as it was, and reassigns the workers.

    Returns the state, and the ledger lines: flushes, then the merge or its refusal.
    """
    trainers = state.control.trainers
    state, changes = engine.flush(state, members)
    if changes:  # the flush has changed parameters
        losses = guard_losses(state, engine)

    # Try the merge: the barrier is the guard loss of the members' weighted mean, minus the weighted
    # mean of the members' guard losses.
    weights = [trainers[m].demand for m in members]
    before = [losses[m] for m in members]
    (after,) = engine.losses(state, [dict(zip(members, weights, strict=True))])
    barrier = after - float(np.average(before, weights=weights))
    # Written with `not`, so that a NaN is refused too.
    refused = rule.max_barrier is not None and not barrier <= rule.max_barrier

    num_joining = 0  # workers that receive the state of another trainer
    if not refused:
        state, num_joining, flushed = _merge_and_reassign(
            state, members, weights, engine, refused=False
        )
        changes += flushed
    elif rule.on_refusal == "retire":
        # All weight is on the representative, whose parameters therefore stay as they are.
        representative_alone = [1.0] + [0.0] * (len(members) - 1)
        state, num_joining, flushed = _merge_and_reassign(
            state, members, representative_alone, engine, refused=True
        )
        changes += flushed

    # The communication: `syncs` and `bytes`.
    cost = merge_cost(
        engine.state_bytes, num_absorbed=len(members) - 1, num_joining=num_joining, refused=refused
    )
    event: dict[str, Any] = {
        "event": "refusal" if refused else "merge",
        "round": state.control.round,
        "members": [*members],
        "into": members[0],
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
        event["requested_batch_size"] = control.trainers[members[0]].requested_batch_size
        event["workers"] = dict(zip(control.trainers, control.sizes, strict=True))
        merge = {"round": control.round, "members": [*members], "into": members[0]}
        control = dataclasses.replace(control, merges=[*control.merges, merge])
    return State(state.ensemble, control), [*changes, event]


def _merge_and_reassign(
    state: State, members: Sequence[int], weights: Sequence[float], engine: Engine, *, refused: bool
) -> tuple[State, int, list[dict]]:
    """Merge trainers into one, and divide the workers of the pool over the remaining trainers.

    Args:
      state: The run's state. The ids in `members` are keys of `state.control.trainers`.
      members: Ids of the trainers to merge. The first is the representative, which remains.
      weights: Each member's weight in the mean of parameters, in the order of `members`; only
        their ratios count.
      engine: Merges the arrays.
      refused: Whether the representative keeps its batch size and round length, because the merge
        was refused; else it takes those of the member with the largest demand.

    Returns:
      The new state; the number of workers that now belong to another trainer than before; and the
      ledger lines of the trainers that were flushed because workers leave them.
    """
    control_after = after_merge(state.control, members, refused=refused)
    old_trainers = []  # for each worker that moves, the trainer that the worker leaves
    for stream, trainer in state.control.trainer_of.items():
        if control_after.trainer_of[stream] != trainer:
            old_trainers.append(trainer)

    # The flush adds its communication to `state.control`, so only the trainers are replaced there.
    state, flushed = engine.flush(state, sorted(set(old_trainers)))
    control = dataclasses.replace(state.control, trainers=control_after.trainers)
    ensemble = engine.merge(state, members, weights, control)
    return State(ensemble, control), len(old_trainers), flushed


def after_merge(control: Control, members: Sequence[int], *, refused: bool = False) -> Control:
    """Return a copy of `control` after a merge of `members` into the first, the representative.

    The representative takes batch size and round length from the member with the largest demand
    (the product of both), and the mean of the members' smoothed statistics. The other members leave
    the run. All workers are then divided over the remaining trainers in proportion to demand.

    If the merge was `refused`, as it would have raised the loss too much, and the settings still
    let one trainer remain, the representative keeps its own batch size, round length and
    statistics; the rest is done as above.
    """
    changed = copy.deepcopy(control)
    merged = [changed.trainers[m] for m in members]
    representative = merged[0]
    if not refused:
        largest = max(merged, key=lambda trainer: trainer.demand)  # of equal ones the first
        representative.requested_batch_size = largest.requested_batch_size
        representative.round_length = largest.round_length
        representative.smoothing = _mean_smoothing([trainer.smoothing for trainer in merged])

    # The representative takes over the workers of the other members, which leave the run.
    absorbed_streams: list[int] = []
    for m in members[1:]:
        absorbed_streams += changed.trainers.pop(m).streams
    representative.streams += sorted(absorbed_streams)

    # A trainer keeps its first workers, as many as it shall have; the others move to trainers that
    # have too few.
    remaining = changed.trainers.values()
    sizes = allocate_workers([t.demand for t in remaining], control.num_workers)
    divided = divide_workers([t.streams for t in remaining], sizes)
    for trainer, streams in zip(remaining, divided, strict=True):
        trainer.streams = streams
        trainer.requested_workers = len(streams)  # cancels every earlier request for workers
    return changed


def joining_workers(
    control: Control, ensemble: EnsembleSettings, done: float
) -> list[tuple[int, int]]:
    """List the trainers that workers join now, as pairs (trainer id, new number of workers).

    `done` is the fraction of the run that is complete. If `ensemble.spawn_frac` is set, all workers
    join as soon as `done` reaches it. Otherwise a trainer gets the workers that its batch-size
    tests have requested, as far as workers of the pool are free. Earlier trainers are served first.
    """
    trainers = control.trainers
    # `initial_workers` None: all workers are there from the start. At `done` 1 no round follows.
    if ensemble.initial_workers is None or done >= 1:
        return []
    sizes = control.sizes
    free = free_workers(control, ensemble)
    if ensemble.spawn_frac is None:
        wanted = tuple(trainer.requested_workers for trainer in trainers.values())
    elif done >= ensemble.spawn_frac:
        wanted = even_sizes(len(trainers), ensemble.num_workers)  # the whole pool, evenly divided
    else:  # the time has not come: nobody joins
        wanted = sizes
    joining = []
    for trainer, size, want in zip(trainers, sizes, wanted, strict=True):
        # The workers that join this trainer. It may want fewer than it has; none leaves.
        count = min(max(want - size, 0), free)
        free -= count
        if count > 0:
            joining.append((trainer, size + count))
    return joining


def with_workers(control: Control, trainer: int, num_workers: int) -> Control:
    """Return a copy of `control` in which a trainer has `num_workers` workers, not fewer than now.

    Each new worker reads the data stream with the lowest number that no worker of the run has.
    """
    trainers = copy.deepcopy(control.trainers)
    used = control.trainer_of  # its keys are the streams of all workers
    unused = (stream for stream in itertools.count() if stream not in used)
    num_joining = num_workers - len(trainers[trainer].streams)
    trainers[trainer].streams += itertools.islice(unused, num_joining)
    return dataclasses.replace(control, trainers=trainers)


def spawn_workers(
    state: State,
    trainer: int,
    num_workers: int,
    ensemble: EnsembleSettings,
    engine: Engine,
    *,
    merged_now: bool = False,
) -> tuple[State, dict]:
    """Add workers of the pool to a trainer, up to `num_workers`, in one communication.

    If trainers were merged after the same round, or a merge was refused, `merged_now` is true: this
    is then part of the merge's communication, which is counted already.

    Returns the state, and the fields of the ledger line.
    """
    before = len(state.control.trainers[trainer].streams)
    cost = merge_cost(engine.state_bytes, num_joining=num_workers - before)
    if merged_now:
        cost["syncs"] = 0
    event = {
        "event": "spawn",
        "round": state.control.round,
        "trainer": trainer,
        "workers_before": before,
        "workers_after": num_workers,
        "reason": "test" if ensemble.spawn_frac is None else "spawn_frac",
        **cost,
    }
    control = with_cost(with_workers(state.control, trainer, num_workers), cost)
    return State(engine.spawn(state, trainer, num_workers), control), event


def _mean_smoothing(members: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean over trainers of each smoothed statistic (`Trainer.smoothing`), by name.

    Trainers that have measured nothing, whose dict is empty, are left out. Without any measured
    trainer the result is empty.
    """
    measured = [sums for sums in members if sums]
    if not measured:
        return {}
    means = {}
    for name in measured[0]:  # all have the same names
        means[name] = sum(sums[name] for sums in measured) / len(measured)
    return means
