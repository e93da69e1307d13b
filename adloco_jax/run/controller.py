"""What the host decides between rounds: batch sizes, groups, merges, who works for whom.

Whole numbers only, from settings and the statistics of the device; no array of model size. The
`Controller` is the host's half of a run's state: plain data that turns into a page of JSON.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from adloco_jax.core.base import BatchPlan, GradientStats, block_size
from adloco_jax.core.batching import (
    augmented_inner_product_test,
    inner_product_test,
    next_batch_size,
    norm_test,
    ramp,
    replay,
    switch_mode,
)
from adloco_jax.core.gradstats import MIN_EXAMPLES, MIN_EXAMPLES_INNER_PRODUCT, pool
from adloco_jax.core.merge import allocate_workers, choose_merge
from adloco_jax.run.config import Settings

CHUNK_SIZE = 2  # sequences whose mean gradient stands for one, with batching.estimator="chunks"
SKIPS_BEFORE_QUARANTINE = 3  # updates in a row, of every worker of a trainer
SPIKE_STDS, SPIKE_WINDOW, SPIKE_MIN = 6, 64, 16  # a spike stands out of the last updates' losses
AUTO_TEST_FRAC, AUTO_TEST_MIN, AUTO_TEST_MAX = 0.04, 8, 256  # sequences per trainer; ALGORITHM 2


@dataclass
class Trainer:
    """A living trainer, by its permanent id."""

    id: int
    requested_batch_size: int  # sequences per worker and update
    updates: int = 0  # inner updates so far, per worker; drives the learning rate
    cursors: dict[str, int] = field(default_factory=dict)  # sequences read, by stream
    smoothing: dict[str, float] = field(default_factory=dict)  # averaged sums of GradientStats
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)  # updates, by stream
    recent_losses: list[float] = field(default_factory=list)  # of the last updates, all finite
    broken_since: int | None = None  # the round after which it counted as broken


@dataclass
class Controller:
    """The host's state; trainers and workers are in the order of the ensemble's stack."""

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
    counts: dict[str, int] = field(default_factory=dict)  # tests by outcome
    merges: list[dict[str, Any]] = field(default_factory=list)
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    replayed: dict[str, list[int]] = field(default_factory=dict)  # batches by trainer id, by round

    def workers_of(self, trainer: int) -> list[int]:
        """Positions of the workers of the trainer at a position."""
        return [w for w, owner in enumerate(self.owners) if owner == trainer]

    def to_json(self) -> dict:
        """Plain JSON data, from which `from_json` makes an equal controller."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict) -> "Controller":
        """The inverse of `to_json`.

        Raises:
          ValueError: If the data cannot be a controller's; the state of a run comes from a file.
        """
        controller = _from_json(data, Controller)
        trainers, owners = controller.trainers, controller.owners
        if not (
            set(owners) == set(range(len(trainers))) != set()
            and len(controller.streams) == len(set(controller.streams)) == len(owners)
            and len({trainer.id for trainer in trainers}) == len(trainers)
            and all(trainer.requested_batch_size > 0 for trainer in trainers)
            and controller.max_batch_size > 0 < controller.eval_batch_size
        ):
            raise ValueError("trainers, owners, streams and batches do not fit one another")
        return controller


class Group(NamedTuple):
    """Trainers that share a batch plan and so run together in one program."""

    trainers: tuple[int, ...]  # positions
    workers: tuple[int, ...]  # positions of all their workers
    plan: BatchPlan
    num_micro_batches: int  # T, per worker
    num_updates: int
    # For each fragment; what is compiled takes steps_per_round / fragments micro-batches at a time.
    num_dispatches: int
    blocks: bool  # each trainer owns as many workers, next to one another


class Decision(NamedTuple):
    """What one trainer's test said."""

    noise: float | None
    signal: float | None
    test_value: float | None
    next_batch_size: int
    reason: str


class Outcome(NamedTuple):
    """What came of one trainer's round."""

    loss_SR: np.ndarray  # of each update of each of its workers; NaN where it was skipped
    skipped_SR: np.ndarray  # bool
    pseudo_grad_norm: float  # NaN if there was no finite one

    @property
    def mean_loss(self) -> float:
        """Over the updates that were made; NaN if there were none."""
        made = self.loss_SR[~self.skipped_SR]
        return float(np.mean(made)) if made.size else math.nan


class StateBytes(NamedTuple):
    """Bytes of what trainers and workers send one another when they merge or move."""

    params: int  # of one trainer, in their own dtype
    outer_state: int  # of one trainer, which a merge averages: momentum
    inner_state: int  # given to a worker that joins a trainer: AdamW's moments


class Merge(NamedTuple):
    """A merge to come, by positions; the representative first."""

    members: tuple[int, ...]
    weights: tuple[int, ...]


def start(settings: Settings, max_batch_size: int) -> Controller:
    """The controller before the first round: workers spread as evenly as possible."""
    ensemble, first = settings.ensemble, settings.batching.initial_batch_size
    owners = np.arange(ensemble.num_workers) * ensemble.num_trainers // ensemble.num_workers
    return Controller(
        trainers=[Trainer(id=i, requested_batch_size=first) for i in range(ensemble.num_trainers)],
        owners=owners.tolist(),
        streams=list(range(ensemble.num_workers)),
        max_batch_size=max_batch_size,
        eval_batch_size=max_batch_size,
    )


def plan_round(controller: Controller, settings: Settings) -> list[Group]:
    """Groups the trainers by the batch they will really run, in order of their first member."""
    shapes = [
        _shape(
            batch_plan(trainer.requested_batch_size, controller.max_batch_size, settings), settings
        )
        for trainer in controller.trainers
    ]
    return _group(controller, settings, shapes)


def smaller_micro_batches(
    controller: Controller, settings: Settings, groups: list[Group]
) -> list[Group]:
    """The same sequences with the `max_batch_size` now in force: what does not fit is accumulated.

    Updates keep their sequences, but with `switch.mode=lengthen`, where each micro-batch is one.
    A micro-batch is the largest bucket that divides what it replaces, else the largest divisor.
    """
    largest = controller.max_batch_size
    buckets = {*settings.batching.buckets, largest}
    shapes = {}
    for group in groups:
        (micro, accum), updates, dispatches = group.plan, group.num_updates, group.num_dispatches
        if micro > largest:
            # Dispatches are whole rounds of steps, so that one program serves them all.
            sequences, before = micro * dispatches, micro
            divisors = [n for n in range(1, largest + 1) if sequences % n == 0]
            micro = max(divisors, key=lambda size: (size in buckets, size))
            dispatches = sequences // micro
            if settings.switch.mode == "lengthen":
                updates = settings.inner.steps_per_round * dispatches
            else:
                accum = accum * before // micro
        shape = _Shape(BatchPlan(micro, accum), updates, dispatches)
        shapes |= dict.fromkeys(group.trainers, shape)
    return _group(controller, settings, [shapes[m] for m in sorted(shapes)])


def batch_plan(requested_batch_size: int, max_batch_size: int, settings: Settings) -> BatchPlan:
    """Switch mode, then the micro-batch rounded up to its bucket."""
    plan = switch_mode(
        requested_batch_size,
        max_batch_size=max_batch_size,
        multiplier=settings.switch.multiplier,
        mode=settings.switch.mode,
    )
    sizes = [*settings.batching.buckets, max_batch_size]
    bucket = min(size for size in sizes if plan.micro_batch_size <= size <= max_batch_size)
    return plan._replace(micro_batch_size=bucket)


def owns_blocks(controller: Controller, trainers: Sequence[int] | None = None) -> bool:
    """Whether some trainers, by default all, own as many workers each, next to one another."""
    chosen = range(len(controller.trainers)) if trainers is None else trainers
    owners = [chosen.index(owner) for owner in controller.owners if owner in chosen]
    return block_size(np.array(owners), len(chosen)) is not None


def update_flags(group: Group) -> np.ndarray:
    """Bool [T]: the micro-batches that end an update; the last one always does."""
    flags = (np.arange(group.num_micro_batches) + 1) % group.plan.num_accum_steps == 0
    flags[-1] = True
    return flags


def share_done(rounds: int, tokens: int, settings: Settings) -> float:
    """How much of a run is behind it; from 1 on it is over."""
    by_tokens = tokens / settings.num_tokens if settings.num_tokens else 0.0
    return max(rounds / settings.num_rounds, by_tokens)


def learning_rates(
    controller: Controller, group: Group, settings: Settings, *, round_tokens: int = 0
) -> np.ndarray:
    """Float32 [T, R of the group]: the learning rate of the update each micro-batch belongs to.

    Depends on the trainer's own count of updates, so neither a reset of the inner state nor a merge
    restarts a schedule. Where tokens end the run, a schedule depends on those of all trainers:
    `round_tokens` are this round's.
    """
    inner = settings.inner
    update_T = np.cumsum(update_flags(group)) - update_flags(group)
    # A round may end with an update of fewer micro-batches.
    effective_T = group.plan.micro_batch_size * np.bincount(update_T)[update_T]
    exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[inner.lr_on_growth]
    growth_T = (effective_T / settings.batching.initial_batch_size) ** exponent
    start_R = np.array([controller.trainers[controller.owners[w]].updates for w in group.workers])
    count_TR = update_T[:, None] + start_R[None, :]
    warmup = np.minimum(1.0, (count_TR + 1) / max(inner.warmup_updates, 1))
    horizon = max(settings.num_rounds * inner.steps_per_round - inner.warmup_updates, 1)
    if settings.num_tokens is None:
        progress = (count_TR - inner.warmup_updates) / horizon
    else:
        used_T = controller.tokens_total + update_T / group.num_updates * round_tokens
        progress = np.broadcast_to(used_T[:, None] / settings.num_tokens, count_TR.shape)
    progress = np.clip(progress, 0.0, 1.0)
    decay = {
        "constant": np.ones_like(progress),
        "linear": 1 - progress,
        "cosine": (1 + np.cos(np.pi * progress)) / 2,
    }[inner.schedule]
    return (inner.learning_rate * growth_T[:, None] * warmup * decay).astype(np.float32)


def test_counts(controller: Controller, groups: list[Group], settings: Settings) -> np.ndarray:
    """Int32 [R]: how many of its round's first sequences each worker tests; 0 skips a trainer."""
    counts = np.zeros(len(controller.owners), np.int32)
    least = min_examples(settings)
    for group in groups:
        per_worker = group.num_micro_batches * group.plan.micro_batch_size
        for trainer in group.trainers:
            workers = controller.workers_of(trainer)
            total = settings.batching.test_batch_size
            if total is None:
                fraction = math.ceil(AUTO_TEST_FRAC * per_worker * len(workers))
                total = min(max(fraction, AUTO_TEST_MIN), AUTO_TEST_MAX)
                total = max(total, least * len(workers))
            share = min(total // len(workers), per_worker)
            counts[workers] = share if share >= least else 0
    return counts


def min_examples(settings: Settings) -> int:
    """Sequences a worker must test for its statistics to exist."""
    batching = settings.batching
    least = MIN_EXAMPLES if batching.test == "norm" else MIN_EXAMPLES_INNER_PRODUCT
    return least * CHUNK_SIZE if batching.estimator == "chunks" else least


def measures_gradients(settings: Settings) -> bool:
    """Whether the batch size follows the gradients rather than a declaration."""
    return settings.batching.test not in ("constant", "ramp", "replay")


def observe(
    controller: Controller,
    settings: Settings,
    stats_R: GradientStats | None,
    counts_R: np.ndarray,
) -> list[Decision]:
    """Sets every trainer's requested batch for the next round.

    Args:
      controller: Changed in place: requested batches, smoothing, outcome counts.
      settings: The run's settings.
      stats_R: Each worker's statistics, NumPy float64 fields [R]; None where nothing was measured.
      counts_R: Sequences each worker tested; 0 where its trainer's test was skipped.

    Returns:
      One decision per trainer, in stack order.
    """
    decisions = []
    for position, trainer in enumerate(controller.trainers):
        workers = controller.workers_of(position)
        if measures_gradients(settings):
            # What has no meaning comes out not finite, and keeps the batch.
            with np.errstate(all="ignore"):
                decision = _tested(settings, trainer, stats_R, workers, counts_R)
        else:
            decision = _scheduled(controller, settings, trainer)
        trainer.requested_batch_size = decision.next_batch_size
        controller.counts[decision.reason] = controller.counts.get(decision.reason, 0) + 1
        decisions.append(decision)
    return decisions


def advance(
    controller: Controller,
    groups: list[Group],
    *,
    sequence_length: int,
    sync_bytes: int,
    num_syncs: int = 1,
) -> list[dict]:
    """Counts a round as done, and returns what each trainer spent, in stack order.

    One synchronisation of a trainer with m workers moves 2 (m - 1) times `sync_bytes` in all, what
    its outer gradient takes on its way (ring all-reduce); a trainer with one worker communicates
    nothing (ALGORITHM 6). A round has `num_syncs`, one for each fragment.
    """
    spent: dict[int, dict] = {}
    for group in groups:
        sequences = group.num_micro_batches * group.plan.micro_batch_size
        for position in group.trainers:
            trainer, workers = controller.trainers[position], controller.workers_of(position)
            trainer.updates += group.num_updates
            for worker in workers:
                stream = str(controller.streams[worker])
                trainer.cursors[stream] = trainer.cursors.get(stream, 0) + sequences
            spent[position] = {
                "updates": group.num_updates,
                "tokens": sequences * len(workers) * sequence_length,
                **sync_cost(len(workers), sync_bytes, num_syncs),
            }
    controller.round += 1
    for position in sorted(spent):
        controller.tokens_total += spent[position]["tokens"]
        controller.updates_total += spent[position]["updates"]
        controller.syncs_total += spent[position]["syncs"]
        controller.bytes_total += spent[position]["bytes"]
    return [spent[position] for position in sorted(spent)]


def count_synchronisation(
    controller: Controller, trainers: Sequence[int], *, sync_bytes: int
) -> dict:
    """Counts a synchronisation of the trainers at some positions, beside those of the rounds.

    Returns:
      Its ledger fields, with costs as in `advance`.
    """
    costs = [sync_cost(len(controller.workers_of(m)), sync_bytes) for m in trainers]
    spent = {name: sum(cost[name] for cost in costs) for name in ("syncs", "bytes")}
    controller.syncs_total += spent["syncs"]
    controller.bytes_total += spent["bytes"]
    ids = [controller.trainers[position].id for position in trainers]
    return {"round": controller.round, "trainers": ids, **spent}


def count_merge(
    controller: Controller,
    settings: Settings,
    merge: Merge,
    *,
    state_bytes: StateBytes,
    refused: bool,
) -> dict[str, int]:
    """Counts a merge that is about to be applied, or a refused one, with the hand-over after it.

    Args:
      controller: Before `apply_merge`; its totals are changed in place.
      settings: The run's settings.
      merge: The members, by position.
      state_bytes: What travels.
      refused: Whether only the members' parameters came together, to know the loss.

    Returns:
      Ledger fields `syncs` and `bytes`, as in `merge_cost`.
    """
    kept = refused and settings.merge.on_refusal == "keep"
    moves = [] if kept else _moves(controller, settings, merge, refused=refused)
    cost = merge_cost(
        state_bytes,
        num_absorbed=len(merge.members) - 1,
        num_joining=sum(after is not None and after != before for before, after in moves),
        refused=refused,
    )
    controller.syncs_total += cost["syncs"]
    controller.bytes_total += cost["bytes"]
    return cost


def sync_cost(num_workers: int, sync_bytes: int, num_syncs: int = 1) -> dict[str, int]:
    """Communications and bytes of a trainer's synchronisations, as in `advance`."""
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
    inner state (ALGORITHM 6).

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


def note_outcomes(
    controller: Controller, outcomes: list[Outcome], *, after_round: int
) -> list[dict]:
    """Counts skipped updates and spikes of a round, and marks trainers that are broken.

    A trainer is broken once every one of its workers has skipped its last updates, whatever it does
    later. A spike is an update whose loss lies `SPIKE_STDS` standard deviations above the mean of
    the last ones, themselves cut off there: neither a spike nor NaN may blind the window.

    Args:
      controller: Changed in place.
      outcomes: In stack order; the stack is still the round's.
      after_round: The round they are of.

    Returns:
      Ledger fields for each trainer: `skipped_updates`, `spikes`.
    """
    noted = []
    for position, (trainer, outcome) in enumerate(zip(controller.trainers, outcomes, strict=True)):
        streams = [str(controller.streams[w]) for w in controller.workers_of(position)]
        rows = {}
        for stream, skipped_S in zip(streams, outcome.skipped_SR.T, strict=True):
            made = np.flatnonzero(~skipped_S)
            before = 0 if made.size else trainer.skipped_in_a_row.get(stream, 0)
            rows[stream] = before + len(skipped_S) - (int(made[-1]) + 1 if made.size else 0)
        trainer.skipped_in_a_row = rows
        if trainer.broken_since is None and min(rows.values()) >= SKIPS_BEFORE_QUARANTINE:
            trainer.broken_since = after_round
        noted.append(
            {
                "skipped_updates": int(outcome.skipped_SR.sum()),
                "spikes": _count_spikes(trainer, outcome),
            }
        )
    return noted


def broken_trainers(controller: Controller, *, by_round: int) -> list[int]:
    """Positions of the trainers that were broken by the end of a round."""
    return [
        position
        for position, trainer in enumerate(controller.trainers)
        if trainer.broken_since is not None and trainer.broken_since <= by_round
    ]


def quarantine(controller: Controller, broken: list[int]) -> tuple[list[int], list[int]]:
    """Takes broken trainers out of the stack; their workers retire with them.

    Args:
      controller: Changed in place.
      broken: Positions, not all.

    Returns:
      The positions of the trainers and of the workers that remain: the arguments of `take`.
    """
    survivors = [p for p in range(len(controller.trainers)) if p not in broken]
    workers = [w for w, owner in enumerate(controller.owners) if owner not in broken]
    for position in broken:
        trainer = controller.trainers[position]
        controller.quarantined.append({"trainer": trainer.id, "round": controller.round})
    controller.trainers = [controller.trainers[p] for p in survivors]
    controller.owners = [survivors.index(controller.owners[w]) for w in workers]
    controller.streams = [controller.streams[w] for w in workers]
    return survivors, workers


def consensus_weights(controller: Controller) -> tuple[float, ...]:
    """Each trainer's weight in the average of all: its requested batch, or 0 if it is broken."""
    return tuple(
        float(trainer.requested_batch_size) if trainer.broken_since is None else 0.0
        for trainer in controller.trainers
    )


def is_merge_round(controller: Controller, settings: Settings) -> bool:
    """Whether trainers may merge at the end of this round."""
    merge = settings.merge
    return merge.policy != "none" and controller.round % merge.every_rounds == 0 < controller.round


def due_merge(controller: Controller, settings: Settings) -> Merge | None:
    """The merge at the end of this round, if one is due."""
    merge = settings.merge
    if merge.policy == "none" or not is_merge_round(controller, settings):
        return None
    requested = [trainer.requested_batch_size for trainer in controller.trainers]
    members = choose_merge(requested, policy=merge.policy, width=merge.width)
    return Merge(members, tuple(requested[m] for m in members)) if members else None


def apply_merge(
    controller: Controller,
    settings: Settings,
    merge: Merge,
    *,
    refused: bool = False,
) -> list[int]:
    """Makes one trainer of the members and divides the workers anew; `count_merge` counts it.

    Args:
      controller: Changed in place.
      settings: The run's settings.
      merge: The members, by position.
      refused: The weaker members only leave; the representative takes nothing over.

    Returns:
      The new trainer position of every worker of the old pool, -1 for a retired one: the argument
      of `reassign` on the merged ensemble.
    """
    representative, absorbed = merge.members[0], merge.members[1:]
    totals = [
        trainer.requested_batch_size * len(controller.workers_of(position))
        for position, trainer in enumerate(controller.trainers)
    ]
    old_sizes = [len(controller.workers_of(p)) for p in range(len(controller.trainers))]
    if not refused:
        members = [controller.trainers[m] for m in merge.members]
        members[0].requested_batch_size = max(t.requested_batch_size for t in members)
        members[0].smoothing = _mean_smoothing([t.smoothing for t in members])
        totals[representative] = max(totals[m] for m in merge.members)

    survivors = [p for p in range(len(controller.trainers)) if p not in absorbed]
    controller.trainers = [controller.trainers[p] for p in survivors]
    requested = [trainer.requested_batch_size for trainer in controller.trainers]
    place = {old: new for new, old in enumerate(survivors)}
    # A trainer's own workers come first, then those of the members it absorbed.
    own = [[w for w, o in enumerate(controller.owners) if o == old] for old in survivors]
    if settings.ensemble.allocation == "retire":
        sizes = [len(workers) for workers in own]
    else:
        sizes = list(allocate_workers(requested, len(controller.owners)))
        joined = [w for w, o in enumerate(controller.owners) if o in absorbed]
        own[place[representative]] += joined
    owners = [-1] * len(controller.owners)
    for new, workers in enumerate(own):
        for worker in workers[: sizes[new]]:
            owners[worker] = new
    if settings.ensemble.allocation == "demand":
        free = [w for w, owner in enumerate(owners) if owner < 0]
        for new, size in enumerate(sizes):
            for _ in range(size - owners.count(new)):
                owners[free.pop(0)] = new

    if settings.merge.representative_batch == "total":
        for new, old in enumerate(survivors):
            if sizes[new] != old_sizes[old]:
                share = -(-totals[old] // sizes[new])
                controller.trainers[new].requested_batch_size = min(
                    max(share, 1), settings.batching.batch_cap
                )
    controller.streams = [
        s for s, owner in zip(controller.streams, owners, strict=True) if owner >= 0
    ]
    controller.owners = [owner for owner in owners if owner >= 0]
    return owners


def losing_workers(
    controller: Controller, settings: Settings, merge: Merge, *, refused: bool
) -> list[int]:
    """Positions of the trainers of which a merge takes workers away, its members among them."""
    moves = _moves(controller, settings, merge, refused=refused)
    losing = {before for before, after in moves if after != before}
    return [m for m, trainer in enumerate(controller.trainers) if trainer.id in losing]


def _moves(
    controller: Controller, settings: Settings, merge: Merge, *, refused: bool
) -> list[tuple[int, int | None]]:
    """Each worker's trainer before and after a merge, by id; None after it where it retires."""
    applied = copy.deepcopy(controller)
    owners = apply_merge(applied, settings, merge, refused=refused)
    return [
        (controller.trainers[old].id, applied.trainers[new].id if new >= 0 else None)
        for old, new in zip(controller.owners, owners, strict=True)
    ]


def _count_spikes(trainer: Trainer, outcome: Outcome) -> int:
    spikes = 0
    for loss_R, skipped_R in zip(outcome.loss_SR, outcome.skipped_SR, strict=True):
        if skipped_R.all():
            continue
        loss, window = float(np.mean(loss_R[~skipped_R])), trainer.recent_losses
        if len(window) >= SPIKE_MIN:
            mean = float(np.mean(window))
            # At least one per cent: losses that hardly vary do not make spikes of rounding.
            limit = mean + SPIKE_STDS * max(float(np.std(window)), 0.01 * abs(mean))
            spikes += loss > limit
            loss = min(loss, limit)
        window.append(loss)
        del window[:-SPIKE_WINDOW]
    return spikes


def _from_json(value: Any, kind: Any) -> Any:
    """`value` as the annotation `kind` says, dataclasses made from dicts; else ValueError."""
    parts = get_args(kind)
    if dataclasses.is_dataclass(kind):
        fields = get_type_hints(kind)
        if isinstance(value, dict) and value.keys() == fields.keys():
            return kind(**{name: _from_json(value[name], fields[name]) for name in fields})
    elif get_origin(kind) is list and isinstance(value, list):
        return [_from_json(item, parts[0]) for item in value]
    elif get_origin(kind) is dict and isinstance(value, dict):
        return {name: _from_json(item, parts[1]) for name, item in value.items()}
    elif type(kind) is UnionType:  # optional
        return None if value is None else _from_json(value, parts[0])
    elif kind is Any or (type(value) is kind and (kind is not int or 0 <= value < 2**62)):
        return value
    raise ValueError(f"{str(value)[:40]}: no {getattr(kind, '__name__', kind)}")


class _Shape(NamedTuple):
    """What trainers of one group have in common, as in `Group`."""

    plan: BatchPlan
    num_updates: int
    num_dispatches: int


def _shape(plan: BatchPlan, settings: Settings) -> _Shape:
    steps, accum = settings.inner.steps_per_round, plan.num_accum_steps
    if settings.switch.mode == "lengthen":
        return _Shape(plan._replace(num_accum_steps=1), steps * accum, accum)
    if settings.inner.unit == "microbatches":
        accum = min(accum, steps)  # a round has no more to average
        return _Shape(plan._replace(num_accum_steps=accum), -(-steps // accum), 1)
    return _Shape(plan, steps, accum)


def _group(controller: Controller, settings: Settings, shapes: list[_Shape]) -> list[Group]:
    by_shape: dict[_Shape, list[int]] = {}
    for position, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(position)
    return [
        Group(
            tuple(trainers),
            tuple(w for w, owner in enumerate(controller.owners) if owner in trainers),
            shape.plan,
            settings.inner.steps_per_round * shape.num_dispatches,
            shape.num_updates,
            shape.num_dispatches,
            owns_blocks(controller, trainers),
        )
        for shape, trainers in by_shape.items()
    ]


def _scheduled(controller: Controller, settings: Settings, trainer: Trainer) -> Decision:
    batching = settings.batching
    size = trainer.requested_batch_size
    if batching.test == "ramp":
        size = ramp(schedule=batching.ramp, round_index=controller.round + 1)
    elif batching.test == "replay":
        history = controller.replayed[str(trainer.id)]
        size = replay(history=history, round_index=controller.round + 1)
    reason = "kept" if size == trainer.requested_batch_size else "schedule"
    return Decision(None, None, None, size, reason)


def _tested(
    settings: Settings,
    trainer: Trainer,
    stats_R: GradientStats | None,
    workers: list[int],
    counts_R: np.ndarray,
) -> Decision:
    batching, size = settings.batching, trainer.requested_batch_size
    tested = [w for w in workers if counts_R[w] > 0]
    if stats_R is None or not tested:
        return Decision(None, None, None, size, "skipped")
    fields = dataclasses.asdict(stats_R)
    stats = pool(GradientStats(**{name: values[tested] for name, values in fields.items()}))
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
    value = float(_request(settings, smoothed, size, len(workers)))
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


def _request(settings: Settings, stats: GradientStats, batch_size: int, num_workers: int):
    batching = settings.batching
    shared = {
        "num_workers": num_workers if batching.scope == "trainer" else 1,
        "mode": batching.mode,
        "batch_size": batch_size,
    }
    if batching.test == "norm":
        return norm_test(stats, eta=batching.eta, **shared)
    if batching.test == "inner_product":
        return inner_product_test(stats, vartheta=batching.vartheta, **shared)
    return augmented_inner_product_test(stats, vartheta=batching.vartheta, nu=batching.nu, **shared)


def _in_true_units(stats: GradientStats) -> dict[str, float]:
    """The sums with their scale multiplied in, which float64 holds."""
    scale = float(stats.scale)
    power = {"noise_sum": 1, "signal_sum": 1, "plugin_orth_sum": 1, "ip_sum": 2, "plugin_ip_sum": 2}
    fields = dataclasses.asdict(stats) | {"scale": 1.0}
    return {name: float(value) * scale ** power.get(name, 0) for name, value in fields.items()}


def _mean_smoothing(members: list[dict[str, float]]) -> dict[str, float]:
    measured = [sums for sums in members if sums]
    if not measured:
        return {}
    return {name: sum(m[name] for m in measured) / len(measured) for name in measured[0]}
