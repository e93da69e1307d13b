"""The numbers that the host keeps about a run, and the costs of communication."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Size(NamedTuple):
    """The quantities of a trainer that grow with gradient noise: workers, round length, batch."""

    num_workers: int
    round_length: int  # in multiples of inner.steps_per_round
    batch_size: int  # sequences per worker and update

    @property
    def total(self) -> int:
        """The size as one number: workers times round length times batch.

        It counts the sequences that all workers read in a round, divided by
        `inner.steps_per_round`, if no rule such as `qsr` makes rounds longer. `batching.max_growth`
        limits its growth.
        """
        return self.num_workers * self.round_length * self.batch_size


@dataclass
class Trainer:
    """The host's data about an active trainer; the parameters are in the ensemble (`core.init`)."""

    id: int  # permanent, unlike its position in the stack
    requested_batch_size: int  # sequences per worker and update
    round_length: int = 1  # in multiples of inner.steps_per_round
    requested_workers: int = 0  # 0: no request
    measured_size: int = 0  # `Size.total` when a signal was last measured; 0: never
    rounds: int = 0  # rounds completed
    updates: int = 0  # inner updates so far, per worker; drives the learning rate
    cursors: dict[str, int] = field(default_factory=dict)  # sequences read, by stream
    smoothing: dict[str, float] = field(default_factory=dict)  # averaged sums of GradientStats
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)  # skipped updates, by stream

    @property
    def demand(self) -> int:
        """The requested batch (sequences per worker and update) times the round length."""
        return self.requested_batch_size * self.round_length

    def grow_to(self, size: Size) -> None:
        """Request workers, round length and batch for the next rounds."""
        self.requested_workers, self.round_length, self.requested_batch_size = size


@dataclass
class Control:
    """The host's part of a run's state: sizes, counts and costs of all trainers and workers.

    It can be saved as JSON.

    Trainers and workers are in the order of the ensemble's stack. Functions that change the data
    return a changed copy.
    """

    trainers: list[Trainer]
    owners: list[int]  # trainer position of each worker
    streams: list[int]  # the data stream of each worker, which is the worker's permanent id
    max_batch_size: int  # present limit: sequences per worker that a device holds at once
    eval_batch_size: int  # the limit at the start; a fixed batch keeps evaluations comparable
    round: int = 0  # rounds completed by every trainer: the count of the slowest
    tokens_total: int = 0
    updates_total: int = 0
    syncs_total: int = 0
    bytes_total: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # number of tests by outcome
    merges: list[dict[str, Any]] = field(default_factory=list)
    quarantined: list[dict[str, Any]] = field(default_factory=list)

    @property
    def demands(self) -> tuple[float, ...]:
        """The demand of each trainer: its weight in the average of all trainers."""
        return tuple(float(trainer.demand) for trainer in self.trainers)

    def rounds_of(self, position: int) -> int:
        """Number of rounds that the trainer at a position has completed.

        It is at least `round`, which counts the rounds of the slowest trainer.
        """
        return max(self.round, self.trainers[position].rounds)

    def workers_of(self, trainer: int) -> list[int]:
        """Positions of the workers that belong to the trainer at a position."""
        return [w for w, owner in enumerate(self.owners) if owner == trainer]

    def reads(self, worker: int) -> tuple[int, int, int]:
        """Say where a worker reads next, as (trainer id, data stream, position in the stream)."""
        trainer, stream = self.trainers[self.owners[worker]], self.streams[worker]
        return trainer.id, stream, trainer.cursors.get(str(stream), 0)

    def size(self, position: int) -> Size:
        """The workers, round length and batch of the trainer at a position."""
        trainer = self.trainers[position]
        return Size(self.owners.count(position), trainer.round_length, trainer.requested_batch_size)


class RoundPlan(NamedTuple):
    """The sizes of a trainer's next round, equal for all workers of the trainer."""

    micro_batch_size: int  # B
    num_accum_steps: int  # A
    num_updates: int  # S

    @property
    def num_micro_batches(self) -> int:
        """T: number of micro-batches that each worker runs in the round."""
        return self.num_accum_steps * self.num_updates

    @property
    def num_sequences(self) -> int:
        """Number of sequences that each worker reads in the round."""
        return self.num_micro_batches * self.micro_batch_size


class StateBytes(NamedTuple):
    """Bytes of the states that trainers and workers send in a merge, or when workers move."""

    params: int  # parameters of one trainer, in their own dtype
    outer_state: int  # outer state of one trainer that a merge averages: momentum
    inner_state: int  # inner state that a joining worker receives: AdamW's moments


def count_round(
    control: Control,
    plans: Mapping[int, RoundPlan],
    *,
    sequence_length: int,
    sync_bytes: int,
    num_syncs: int = 1,
    counted: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[Control, list[dict[str, int]]]:
    """Count a round that has ended; return the host's data and each trainer's costs.

    The costs are in stack order, as dicts for the ledger.

    Args:
      control: The host's data before the round.
      plans: The sizes of the round of each trainer that ran; the key is the position of the
        trainer.
      sequence_length: Tokens of a sequence.
      sync_bytes: Bytes of one worker's outer gradient as it is sent, see `sync_cost`.
      num_syncs: Synchronisations of a round, one for each fragment.
      counted: The numbers of updates and of sequences of each worker that took part in the outer
        update; the key is the position of the worker. Each trainer has at least one. None: all
        workers, with the planned numbers.
    """
    control = copy.deepcopy(control)
    spent = []
    for position, plan in sorted(plans.items()):
        trainer, workers = control.trainers[position], control.workers_of(position)
        work = dict.fromkeys(workers, (plan.num_updates, plan.num_sequences))
        if counted is not None:
            work = {worker: counted[worker] for worker in workers if worker in counted}
        updates = max(updates for updates, _ in work.values())
        trainer.rounds += 1
        trainer.updates += updates
        for worker, (_, sequences) in work.items():
            _, stream, cursor = control.reads(worker)
            trainer.cursors[str(stream)] = cursor + sequences
        tokens = sum(sequences for _, sequences in work.values()) * sequence_length
        cost = sync_cost(len(work), sync_bytes, num_syncs)
        spent.append({"updates": updates, "tokens": tokens, **cost})
    control.round += 1
    for name in ("tokens", "updates", "syncs", "bytes"):
        total = getattr(control, f"{name}_total") + sum(cost[name] for cost in spent)
        setattr(control, f"{name}_total", total)
    return control, spent


def count_flush(
    control: Control, trainers: Sequence[int], *, sync_bytes: int
) -> tuple[Control, dict]:
    """Count a synchronisation outside a round; return the host's data and a line for the ledger."""
    costs = [sync_cost(len(control.workers_of(m)), sync_bytes) for m in trainers]
    spent = {name: sum(cost[name] for cost in costs) for name in ("syncs", "bytes")}
    ids = [control.trainers[m].id for m in trainers]
    line = {"event": "sync", "round": control.round, "trainers": ids, **spent}
    return with_cost(control, spent), line


def with_cost(control: Control, cost: Mapping[str, int]) -> Control:
    """Add the cost of a communication to the totals of a run."""
    return dataclasses.replace(
        control,
        syncs_total=control.syncs_total + cost["syncs"],
        bytes_total=control.bytes_total + cost["bytes"],
    )


def sync_cost(num_workers: int, sync_bytes: int, num_syncs: int = 1) -> dict[str, int]:
    """Number of communications and bytes of a trainer's synchronisations in a round.

    The bytes are summed over the workers of the trainer.

    A ring all-reduce among m workers moves 2 (m - 1) outer gradients. A trainer with one worker
    communicates nothing (docs/algorithm.md, accounting).
    """
    return {
        "syncs": num_syncs * (num_workers > 1),
        "bytes": num_syncs * 2 * (num_workers - 1) * sync_bytes,
    }


def merge_cost(
    state_bytes: StateBytes, *, num_absorbed: int = 0, num_joining: int = 0, refused: bool = False
) -> dict[str, int]:
    """Number of communications and bytes of a merge, or of a refused merge.

    They include the move of workers to other trainers.

    The merge and the reallocation are one blocking communication. Each absorbed trainer sends its
    parameters and, unless the merge is refused, its outer momentum. Each worker that joins a
    trainer receives the parameters and an inner state (docs/algorithm.md, accounting).

    Args:
      state_bytes: Bytes of each part that is sent.
      num_absorbed: Trainers that send their parameters to the representative.
      num_joining: Workers whose trainer changes, including those of absorbed trainers.
      refused: Whether the merge was refused; the parameters were sent only for the merged loss.
    """
    absorbed_bytes = state_bytes.params + (0 if refused else state_bytes.outer_state)
    joining_bytes = state_bytes.params + state_bytes.inner_state
    return {
        "syncs": int(num_absorbed + num_joining > 0),
        "bytes": num_absorbed * absorbed_bytes + num_joining * joining_bytes,
    }
