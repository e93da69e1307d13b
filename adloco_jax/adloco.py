"""AdLoCo: the training loop (arXiv 2508.18182, algorithms 1 to 3) and the host's decisions in it.

`adloco` is the method, one line for each step of the paper. It runs on an `Engine`, which owns the
devices, and is watched by observers, which write, print, evaluate and save. All that decides how a
run goes on is its `State`.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from adloco_jax.core.batching import BATCH_TESTS, next_batch_size, request_batch, switch_mode
from adloco_jax.core.gradstats import pool
from adloco_jax.core.merge import (
    MERGE_POLICIES,
    Candidate,
    allocate_workers,
    divide_workers,
)
from adloco_jax.core.types import Ensemble, GradientStats
from adloco_jax.settings import Settings


@dataclass
class Trainer:
    """What the host knows of a living trainer; its parameters are in the ensemble's stack."""

    id: int  # permanent, unlike its position in the stack
    requested_batch_size: int  # sequences per worker and update
    rounds: int = 0  # completed
    updates: int = 0  # inner updates so far, per worker; drives the learning rate
    cursors: dict[str, int] = field(default_factory=dict)  # sequences read, by stream
    smoothing: dict[str, float] = field(default_factory=dict)  # averaged sums of GradientStats
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)  # updates, by stream
    recent_losses: list[float] = field(default_factory=list)  # of the last updates, all finite
    broken_since: int | None = None  # the round after which all its workers only skipped updates


@dataclass
class Control:
    """The host's half of a run's state: JSON-able, in the order of the ensemble's stack.

    Functions that change it return a changed copy.
    """

    trainers: list[Trainer]
    owners: list[int]  # trainer position of each worker
    streams: list[int]  # the data stream each worker reads, which is its permanent id
    max_batch_size: int  # in force: sequences per worker that a device holds at once
    eval_batch_size: int  # as it was at the start: evaluation's figures stay comparable
    round: int = 0
    tokens_total: int = 0
    updates_total: int = 0
    syncs_total: int = 0
    bytes_total: int = 0
    outcomes_round: int = 0  # the last round whose losses are known here
    # Rounds up to this one are run again after running out of memory, and planned as they were.
    redo_round: int = 0
    redo_max_batch_size: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # tests by outcome
    merges: list[dict[str, Any]] = field(default_factory=list)
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    replayed: dict[str, list[int]] = field(default_factory=dict)  # batches by trainer id, by round

    def workers_of(self, trainer: int) -> list[int]:
        """Positions of the workers of the trainer at a position."""
        return [w for w, owner in enumerate(self.owners) if owner == trainer]


class State(NamedTuple):
    """Everything that decides how a run goes on, between two rounds."""

    ensemble: Ensemble
    control: Control


class RoundPlan(NamedTuple):
    """What every worker of one trainer runs in a round."""

    micro_batch_size: int  # B
    num_accum_steps: int  # A
    num_micro_batches: int  # T
    num_updates: int


class Decision(NamedTuple):
    """What one trainer's batch-size test said."""

    noise: float | None  # S_hat
    signal: float | None  # |G|^2
    test_value: float | None
    next_batch_size: int
    reason: str  # why it is this one


class StateBytes(NamedTuple):
    """Bytes of what trainers and workers send one another when they merge or move."""

    params: int  # of one trainer, in their own dtype
    outer_state: int  # of one trainer, which a merge averages: momentum
    inner_state: int  # given to a worker that joins a trainer: AdamW's moments


class Boundary(NamedTuple):
    """The end of a round, as observers see it beside the state."""

    metrics: Any  # the engine's, on the devices still
    decisions: list[Decision]  # by trainer, in the round's stack
    merged: dict | None  # ledger fields of the merge, or of the refusal, at this boundary


Stats = list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray, GradientStats]]
"""By class of trainers: their positions; of each worker its trainer among them, how many examples
it tested, and its statistics, arrays [R] that may still be computed."""

Observer = Callable[[State, Boundary], None]


class Engine(Protocol):
    """Where trainers run. A method returns as soon as its work is dispatched, unless it says so."""

    @property
    def state_bytes(self) -> StateBytes:
        """What a merge or a hand-over sends."""
        ...

    def ready(self, state: State) -> list[int]:
        """Positions of the trainers to run a round: waits until there are some."""
        ...

    def batch(self, state: State, plans: Mapping[int, RoundPlan]) -> Any:
        """The sequences that these trainers' workers train on next, each of its own stream."""
        ...

    def gradient_stats(self, state: State, batch: Any) -> Stats:
        """Per-example gradient statistics at each trainer's parameters, on the round's first."""
        ...

    def outer_step(self, state: State, batch: Any) -> tuple[State, Any]:
        """A round of these trainers, and its metrics."""
        ...

    def without_broken(self, state: State) -> State:
        """The state without trainers whose updates have stopped being finite."""
        ...

    def flush(self, state: State, trainers: Sequence[int]) -> State:
        """The state with what fragments (Streaming DiLoCo) left unsynchronised synchronised."""
        ...

    def guard_losses(self, state: State) -> list[float]:
        """Each trainer's loss on rows that are never reported, nats/token; waits."""
        ...

    def merged_loss(self, state: State, members: Sequence[int], weights: Sequence[float]) -> float:
        """The same of the trainer that a merge would make; waits."""
        ...

    def merge(
        self,
        ensemble: Ensemble,
        members: Sequence[int],
        weights: Sequence[float],
        owners: Sequence[int],
    ) -> Ensemble:
        """`core.merge` of the members, then `core.reassign` to the owners."""
        ...


def adloco(
    state: State, *, settings: Settings, engine: Engine, observers: Sequence[Observer] = ()
) -> State:
    """Trains until the configured rounds, or tokens, are done: algorithms 1 to 3 of AdLoCo.

    Rounds are dispatched and not waited for: of each, the host needs the gradient statistics alone,
    which are ready before the round's own updates.

    Args:
      state: Where to start, or to go on: a state that an observer has seen, for instance.
      settings: The run's settings.
      engine: Where the trainers run.
      observers: Called in order with the state after each round and what happened in it.

    Returns:
      The state after the last round.

    Source: AdLoCo (arXiv 2508.18182), algorithms 1 to 3 and section 4.
    """
    while not is_over(state.control, settings):
        trainers = engine.ready(state)
        plans = {m: round_plan(state.control, m, settings) for m in trainers}  # 4.4, switch mode
        batch = engine.batch(state, plans)
        stats = engine.gradient_stats(state, batch)  # 4.2, at the round's common point
        state, metrics = engine.outer_step(state, batch)  # algorithm 1, lines 5 to 16
        control, decisions = with_batch_sizes(state.control, stats, settings)  # eq. 10 to 13
        state = engine.without_broken(state._replace(control=control))
        if is_over(state.control, settings):
            state = engine.flush(state, range(len(state.control.trainers)))
        merged = None
        if merge_due(state.control, settings):
            losses = engine.guard_losses(state)
            members = choose_members(state.control, losses, settings)  # algorithm 2, CheckMerge
            if members:  # algorithm 3, DoMerge
                state, merged = merge_trainers(state, members, losses, settings, engine)
        for observer in observers:
            observer(state, Boundary(metrics, decisions, merged))
    return state


def start(settings: Settings, max_batch_size: int) -> Control:
    """The control before the first round: workers spread as evenly as possible."""
    ensemble, first = settings.ensemble, settings.batching.initial_batch_size
    owners = np.arange(ensemble.num_workers) * ensemble.num_trainers // ensemble.num_workers
    return Control(
        trainers=[Trainer(id=i, requested_batch_size=first) for i in range(ensemble.num_trainers)],
        owners=owners.tolist(),
        streams=list(range(ensemble.num_workers)),
        max_batch_size=max_batch_size,
        eval_batch_size=max_batch_size,
    )


def share_done(rounds: int, tokens: int, settings: Settings) -> float:
    """How much of a run is behind it; from 1 on it is over."""
    by_tokens = tokens / settings.num_tokens if settings.num_tokens else 0.0
    return max(rounds / settings.num_rounds, by_tokens)


def is_over(control: Control, settings: Settings) -> bool:
    """Whether no round is left."""
    return share_done(control.round, control.tokens_total, settings) >= 1


def round_plan(control: Control, trainer: int, settings: Settings) -> RoundPlan:
    """Switch mode, and the micro-batch rounded up to its bucket (section 4.4)."""
    largest = planned_max_batch_size(control)
    size, accum = switch_mode(
        control.trainers[trainer].requested_batch_size,
        max_batch_size=largest,
        multiplier=settings.switch.multiplier,
        mode=settings.switch.mode,
    )
    bucket = min(n for n in (*settings.batching.buckets, largest) if size <= n <= largest)
    steps = settings.inner.steps_per_round
    if settings.switch.mode == "lengthen":
        plan = RoundPlan(bucket, 1, steps * accum, steps * accum)
    elif settings.inner.unit == "microbatches":
        accum = min(accum, steps)  # a round has no more to average
        plan = RoundPlan(bucket, accum, steps, -(-steps // accum))
    else:
        plan = RoundPlan(bucket, accum, steps * accum, steps)
    return smaller_plan(plan, control, settings)


def planned_max_batch_size(control: Control) -> int:
    """What the next round is planned with: of a round that is run again, as it was before."""
    is_redone = control.round < control.redo_round
    return control.redo_max_batch_size if is_redone else control.max_batch_size


def smaller_plan(plan: RoundPlan, control: Control, settings: Settings) -> RoundPlan:
    """The same sequences with the `max_batch_size` now in force; what does not fit is accumulated.

    Updates keep their sequences, but with `switch.mode=lengthen`, where each micro-batch is one. A
    micro-batch is the largest bucket that divides what it replaces, else the largest divisor.
    """
    largest, size = control.max_batch_size, plan.micro_batch_size
    if size <= largest:
        return plan
    steps = settings.inner.steps_per_round
    sequences = size * plan.num_micro_batches // steps  # of a call, all of which are equally long
    buckets = {*settings.batching.buckets, largest}
    divisors = [n for n in range(1, largest + 1) if sequences % n == 0]
    micro = max(divisors, key=lambda n: (n in buckets, n))
    num_micro_batches = steps * sequences // micro
    if settings.switch.mode == "lengthen":
        return RoundPlan(micro, 1, num_micro_batches, num_micro_batches)
    accum = plan.num_accum_steps * size // micro
    return RoundPlan(micro, accum, num_micro_batches, plan.num_updates)


def measures_gradients(settings: Settings) -> bool:
    """Whether the batch size follows the gradients rather than a declaration."""
    return BATCH_TESTS[settings.batching.test].needs != "nothing"


def with_batch_sizes(
    control: Control, stats: Stats, settings: Settings
) -> tuple[Control, list[Decision]]:
    """Sets every trainer's requested batch for the next round; waits for the statistics.

    Args:
      control: Already counts the round.
      stats: From the engine; a trainer that was not tested is not in it.
      settings: The run's settings.

    Returns:
      The changed copy, and one decision per trainer, in stack order.
    """
    control = copy.deepcopy(control)
    decisions = []
    with np.errstate(all="ignore"):  # what has no meaning comes out not finite, keeps the batch
        tested = _by_trainer(stats)
        for position, trainer in enumerate(control.trainers):
            num_workers = len(control.workers_of(position))
            if measures_gradients(settings):
                measured = tested.get(position)
                decision = _tested(control, settings, trainer, measured, num_workers)
            else:
                decision = _scheduled(control, settings, trainer)
            trainer.requested_batch_size = decision.next_batch_size
            control.counts[decision.reason] = control.counts.get(decision.reason, 0) + 1
            decisions.append(decision)
    return control, decisions


def _by_trainer(stats: Stats) -> dict[int, GradientStats]:
    """Each tested trainer's statistics, pooled over its workers, on the host in float64."""
    pooled = {}
    for trainers, owners, count_R, stats_R in stats:
        fields = {name: np.asarray(value, np.float64) for name, value in vars(stats_R).items()}
        for place, trainer in enumerate(trainers):
            own = [w for w, owner in enumerate(owners) if owner == place and count_R[w] > 0]
            if own:
                mine = {name: values[own] for name, values in fields.items()}
                pooled[trainer] = pool(GradientStats(**mine))
    return pooled


def _scheduled(control: Control, settings: Settings, trainer: Trainer) -> Decision:
    old = trainer.requested_batch_size
    size = int(_request(control, settings, trainer, None, num_workers=1))
    return Decision(None, None, None, size, "kept" if size == old else "schedule")


def _tested(
    control: Control,
    settings: Settings,
    trainer: Trainer,
    stats: GradientStats | None,
    num_workers: int,
) -> Decision:
    batching, size = settings.batching, trainer.requested_batch_size
    if stats is None:
        return Decision(None, None, None, size, "skipped")
    noise, signal = float(stats.noise), float(stats.signal)
    if not (math.isfinite(noise) and math.isfinite(signal)) or noise <= 0:
        return Decision(noise, signal, None, size, "degenerate")
    sums = _in_true_units(stats)
    if batching.mode == "unbiased":
        decay = batching.smoothing
        old = trainer.smoothing or dict.fromkeys(sums, 0.0)
        # Both sides of a ratio carry the same bias correction 1 - decay^n, which cancels.
        sums = {name: decay * old[name] + (1 - decay) * value for name, value in sums.items()}
        trainer.smoothing = sums
    smoothed = GradientStats(**{name: np.asarray(value) for name, value in sums.items()})
    value = float(_request(control, settings, trainer, smoothed, num_workers=num_workers))
    growth = {"max_growth": batching.max_growth, "batch_cap": batching.batch_cap}
    new = next_batch_size(value, batch_size=size, monotone=batching.monotone, **growth)
    if not math.isfinite(value):
        reason = "degenerate"
    elif smoothed.signal_sum <= 0:
        reason = "signal"
    elif new < value:
        reason = "capped"
    else:
        reason = "kept" if new == size else "grew" if new > size else "shrank"
    return Decision(noise, signal, value, new, reason)


def _request(
    control: Control,
    settings: Settings,
    trainer: Trainer,
    stats: GradientStats | None,
    *,
    num_workers: int,
):
    """What the configured test asks for, before it is rounded and capped."""
    batching = settings.batching
    available = {
        **{knob.name: getattr(batching, knob.name) for knob in dataclasses.fields(batching)},
        "num_workers": num_workers if batching.scope == "trainer" else 1,
        "batch_size": trainer.requested_batch_size,
        "round_index": control.round,
        "history": control.replayed.get(str(trainer.id), []),
    }
    return request_batch(BATCH_TESTS[batching.test], stats, available)


def _in_true_units(stats: GradientStats) -> dict[str, float]:
    """The sums with their scale multiplied in, which float64 holds."""
    scale = float(stats.scale)
    power = {"noise_sum": 1, "signal_sum": 1, "plugin_orth_sum": 1, "ip_sum": 2, "plugin_ip_sum": 2}
    fields = vars(stats) | {"scale": 1.0}
    return {name: float(value) * scale ** power.get(name, 0) for name, value in fields.items()}


def merge_due(control: Control, settings: Settings) -> bool:
    """Whether trainers may merge at the end of this round."""
    merge = settings.merge
    is_round = control.round % merge.every_rounds == 0 < control.round
    return merge.policy != "none" and is_round and len(control.trainers) > 1


def choose_members(
    control: Control, guard_losses: Sequence[float], settings: Settings
) -> tuple[int, ...]:
    """The trainers that become one, the representative first; empty for nobody (CheckMerge)."""
    candidates = [
        Candidate(trainer.requested_batch_size, loss, trainer.rounds)
        for trainer, loss in zip(control.trainers, guard_losses, strict=True)
    ]
    return MERGE_POLICIES[settings.merge.policy](candidates, width=settings.merge.width)


def merge_trainers(
    state: State,
    members: Sequence[int],
    losses: Sequence[float],
    settings: Settings,
    engine: Engine,
) -> tuple[State, dict]:
    """Merges trainers unless the guard refuses, and divides the workers again (DoMerge).

    Args:
      state: The stack.
      members: Positions, the representative first.
      losses: Of all trainers, from the engine's guard.
      settings: The run's settings.
      engine: Measures the loss of the merged trainer, and moves the parameters.

    Returns:
      The new state, and the fields of its ledger line, `event` among them.
    """
    rule, trainers = settings.merge, state.control.trainers
    flushed = engine.flush(state, members)
    if flushed is not state:
        state, losses = flushed, engine.guard_losses(flushed)
    weights = [trainers[m].requested_batch_size for m in members]
    before = [losses[m] for m in members]
    after = engine.merged_loss(state, members, weights)
    barrier = after - float(np.average(before, weights=weights))
    refused = rule.max_barrier is not None and not barrier <= rule.max_barrier
    changed, moved = state.control, []
    if not (refused and rule.on_refusal == "keep"):
        changed, owners = after_merge(state.control, members, settings, refused=refused)
        moved = [
            (old, new)
            for old, new in zip(state.control.owners, owners, strict=True)
            if new < 0 or changed.trainers[new].id != trainers[old].id
        ]
        state = engine.flush(state, sorted({old for old, _ in moved}))
        shares = [1.0] + [0.0] * (len(members) - 1) if refused else weights
        state = State(engine.merge(state.ensemble, members, shares, owners), state.control)
    cost = merge_cost(
        engine.state_bytes,
        num_absorbed=len(members) - 1,
        num_joining=sum(new >= 0 for _, new in moved),
        refused=refused,
    )
    ids = [trainers[m].id for m in members]
    event = {
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
    merges = state.control.merges
    if refused:
        event["action"] = rule.on_refusal
    else:
        sizes = {trainer.id: changed.owners.count(m) for m, trainer in enumerate(changed.trainers)}
        (into,) = (trainer for trainer in changed.trainers if trainer.id == ids[0])
        event |= {"requested_batch_size": into.requested_batch_size, "workers": sizes}
        merges = [*merges, {name: event[name] for name in ("round", "members", "into")}]
    control = dataclasses.replace(
        state.control,
        trainers=changed.trainers,
        owners=changed.owners,
        streams=changed.streams,
        merges=merges,
        syncs_total=state.control.syncs_total + cost["syncs"],
        bytes_total=state.control.bytes_total + cost["bytes"],
    )
    return State(state.ensemble, control), event


def after_merge(
    control: Control, members: Sequence[int], settings: Settings, *, refused: bool = False
) -> tuple[Control, list[int]]:
    """One trainer made of the members, and the workers divided again.

    Args:
      control: Before the merge.
      members: Positions, the representative first.
      settings: The run's settings.
      refused: The weaker members only leave; the representative takes nothing over.

    Returns:
      The changed copy, and the new trainer position of every worker of the old pool, -1 for a
      retired one: the argument of `reassign` on the merged ensemble.
    """
    batching, representative = settings.batching, members[0]
    sizes = [control.owners.count(m) for m in range(len(control.trainers))]
    totals = [t.requested_batch_size * n for t, n in zip(control.trainers, sizes, strict=True)]
    changed = copy.deepcopy(control)
    if not refused:
        merged = [changed.trainers[m] for m in members]
        merged[0].requested_batch_size = max(t.requested_batch_size for t in merged)
        merged[0].smoothing = _mean_smoothing([t.smoothing for t in merged])
        totals[representative] = max(totals[m] for m in members)
    survivors = [m for m in range(len(control.trainers)) if m not in members[1:]]
    changed.trainers = [changed.trainers[m] for m in survivors]
    new_sizes = [sizes[m] for m in survivors]
    if settings.ensemble.allocation == "demand":
        requested = [trainer.requested_batch_size for trainer in changed.trainers]
        new_sizes = allocate_workers(requested, len(control.owners))
    owners = divide_workers(control.owners, members, new_sizes)
    if settings.merge.representative_batch == "total":
        for trainer, old, size in zip(changed.trainers, survivors, new_sizes, strict=True):
            if size != sizes[old]:
                trainer.requested_batch_size = min(-(-totals[old] // size), batching.batch_cap)
    changed.streams = [s for s, owner in zip(control.streams, owners, strict=True) if owner >= 0]
    changed.owners = [owner for owner in owners if owner >= 0]
    return changed, owners


def _mean_smoothing(members: list[dict[str, float]]) -> dict[str, float]:
    measured = [sums for sums in members if sums]
    if not measured:
        return {}
    return {name: sum(m[name] for m in measured) / len(measured) for name in measured[0]}


def count_round(
    control: Control,
    plans: Mapping[int, RoundPlan],
    *,
    sequence_length: int,
    sync_bytes: int,
    num_syncs: int = 1,
) -> tuple[Control, list[dict[str, int]]]:
    """Counts a round as done, and returns what each trainer spent, in stack order.

    Args:
      control: Before the round.
      plans: What ran, by trainer position.
      sequence_length: Tokens of a sequence.
      sync_bytes: Of one worker's outer gradient on its way, see `sync_cost`.
      num_syncs: Synchronisations of a round, one for each fragment.
    """
    control = copy.deepcopy(control)
    spent = []
    for position, plan in sorted(plans.items()):
        trainer, workers = control.trainers[position], control.workers_of(position)
        sequences = plan.num_micro_batches * plan.micro_batch_size
        trainer.rounds += 1
        trainer.updates += plan.num_updates
        for worker in workers:
            stream = str(control.streams[worker])
            trainer.cursors[stream] = trainer.cursors.get(stream, 0) + sequences
        tokens = sequences * len(workers) * sequence_length
        cost = sync_cost(len(workers), sync_bytes, num_syncs)
        spent.append({"updates": plan.num_updates, "tokens": tokens, **cost})
    control.round += 1
    for name in ("tokens", "updates", "syncs", "bytes"):
        total = getattr(control, f"{name}_total") + sum(cost[name] for cost in spent)
        setattr(control, f"{name}_total", total)
    return control, spent


def count_flush(
    control: Control, trainers: Sequence[int], *, sync_bytes: int
) -> tuple[Control, dict]:
    """Counts a synchronisation of trainers beside those of the rounds, and its ledger fields."""
    costs = [sync_cost(len(control.workers_of(m)), sync_bytes) for m in trainers]
    spent = {name: sum(cost[name] for cost in costs) for name in ("syncs", "bytes")}
    ids = [control.trainers[m].id for m in trainers]
    line = {"round": control.round, "trainers": ids, **spent}
    return dataclasses.replace(
        control,
        syncs_total=control.syncs_total + spent["syncs"],
        bytes_total=control.bytes_total + spent["bytes"],
    ), line


def sync_cost(num_workers: int, sync_bytes: int, num_syncs: int = 1) -> dict[str, int]:
    """Communications and bytes of a trainer's synchronisations, all its workers together.

    A ring all-reduce among m workers moves 2 (m - 1) times what one outer gradient takes; a trainer
    with one worker communicates nothing (docs/algorithm.md, accounting).
    """
    return {
        "syncs": num_syncs * (num_workers > 1),
        "bytes": num_syncs * 2 * (num_workers - 1) * sync_bytes,
    }


def merge_cost(
    state_bytes: StateBytes, *, num_absorbed: int = 0, num_joining: int = 0, refused: bool = False
) -> dict[str, int]:
    """Communications and bytes of a merge or an attempt at one, and of the hand-over with it.

    One blocking communication. Each absorbed trainer sends its parameters and, unless the merge is
    refused, its outer momentum; each worker that joins a trainer receives the parameters and an
    inner state (docs/algorithm.md, accounting).

    Args:
      state_bytes: What travels.
      num_absorbed: Trainers whose parameters come to the representative.
      num_joining: Workers that are another trainer's afterwards; those of an absorbed trainer, too.
      refused: Whether the parameters came together only to know the merged loss.
    """
    absorbed_bytes = state_bytes.params + (0 if refused else state_bytes.outer_state)
    joining_bytes = state_bytes.params + state_bytes.inner_state
    return {
        "syncs": int(num_absorbed + num_joining > 0),
        "bytes": num_absorbed * absorbed_bytes + num_joining * joining_bytes,
    }
