"""The numbers that the host keeps about a run, and the costs of communication.

Words of this module:

- A stream is the sequence of training rows that one worker reads; its number is the worker's id,
  and its cursor is the number of rows read so far.
- A synchronisation (`syncs`) is one communication between the workers of a trainer, or one merge.
- A fragment is the part of the parameters that Streaming DiLoCo synchronises at once. A flush
  synchronises all that it has not sent yet.
- The ledger is the run's file of events, one line each.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Size(NamedTuple):
    """The quantities of a trainer that grow with gradient noise: workers, round length, batch."""

    num_workers: int
    round_length: int  # in multiples of inner.steps_per_round
    batch_size: int  # sequences per worker and update

    @property
    def total(self) -> int:
        """Workers times round length times batch.

        Times `steps_per_round`, it is the sequences in a round. One batch-size test multiplies it
        at most by `batching.max_growth`.
        """
        return self.num_workers * self.round_length * self.batch_size


@dataclass
class Trainer:
    """The numbers that the host keeps about one active trainer, and its workers."""

    requested_batch_size: int  # sequences per worker and update
    # The data stream of each worker, which is also its permanent id, in the order of the arrays.
    streams: list[int]
    round_length: int = 1  # in multiples of inner.steps_per_round
    requested_workers: int = 0  # number of workers that the trainer asks for; 0: no request
    measured_size: int = 0  # `Size.total` at the last positive signal, or the first test; 0: none
    rounds: int = 0  # rounds completed
    updates: int = 0  # inner updates of a worker so far; the learning rate depends on it
    cursors: dict[str, int] = field(default_factory=dict)  # by stream, number of sequences read
    smoothing: dict[str, float] = field(default_factory=dict)  # moving averages of GradientStats
    # By stream: number of the last updates that the stream's worker has skipped in a row.
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)

    @property
    def demand(self) -> int:
        """The requested batch (sequences per worker and update) times the round length."""
        return self.requested_batch_size * self.round_length

    def grow_to(self, size: Size) -> None:
        """Store the workers, round length and batch that the trainer requests from now on."""
        self.requested_workers = size.num_workers
        self.round_length = size.round_length
        self.requested_batch_size = size.batch_size


@dataclass
class Control:
    """The host's part of a run's state: sizes, counts and costs, as JSON can hold them.

    Functions return changed copies.
    """

    trainers: dict[int, Trainer]  # by the trainer's permanent id, in the order of the arrays
    max_batch_size: int  # largest micro-batch at present, in sequences per worker
    eval_batch_size: int  # `max_batch_size` at the start; it stays, so that evaluations compare
    round: int = 0  # rounds that every trainer has completed: the count of the slowest trainer
    tokens_total: int = 0
    updates_total: int = 0
    syncs_total: int = 0
    bytes_total: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # number of batch-size tests by outcome
    merges: list[dict[str, Any]] = field(default_factory=list)
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    # By trainer's id, the last norms per update of differences that learners sent and that counted.
    norms: dict[str, list[float]] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of each trainer's workers."""
        return tuple(len(trainer.streams) for trainer in self.trainers.values())

    @property
    def num_workers(self) -> int:
        """The number of all trainers' workers."""
        return sum(self.sizes)

    @property
    def trainer_of(self) -> dict[int, int]:
        """The id of each stream's trainer."""
        return {stream: m for m, trainer in self.trainers.items() for stream in trainer.streams}

    @property
    def demands(self) -> tuple[float, ...]:
        """The demand of each trainer, which is its weight in the average of all trainers."""
        return tuple(float(trainer.demand) for trainer in self.trainers.values())

    def rounds_of(self, trainer: int) -> int:
        """Return a trainer's completed rounds; `round` counts those of the slowest trainer."""
        # The larger of both, as a prediction of the next round advances only `round`.
        return max(self.round, self.trainers[trainer].rounds)

    def positions(self, trainers: Iterable[int]) -> tuple[int, ...]:
        """Return the positions of trainers in arrays [M, ...]."""
        order = [*self.trainers]
        return tuple(order.index(trainer) for trainer in trainers)

    def reads(self, trainers: Iterable[int] | None = None) -> list[tuple[int, int, int]]:
        """List where each worker of trainers (None: all) reads next, in the order of the arrays.

        An entry is (trainer id, data stream, position in the stream).
        """
        chosen = self.trainers if trainers is None else trainers
        reads = []
        for m in chosen:
            trainer = self.trainers[m]
            for stream in trainer.streams:
                reads.append((m, stream, trainer.cursors.get(str(stream), 0)))
        return reads

    def size(self, trainer: int) -> Size:
        """Return the number of workers, round length and batch of a trainer."""
        numbers = self.trainers[trainer]
        return Size(
            num_workers=len(numbers.streams),
            round_length=numbers.round_length,
            batch_size=numbers.requested_batch_size,
        )


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
    """Sizes in bytes of what is sent when trainers merge or workers move to other trainers."""

    params: int  # parameters of one trainer, in their own dtype
    outer_state: int  # what else of a trainer a merge averages: momentum, the running average
    inner_state: int  # inner state that a worker receives when it joins a trainer: AdamW's moments


class Work(NamedTuple):
    """What one worker did in a round."""

    num_updates: int
    num_sequences: int  # sequences that it read
    num_learned: int  # sequences of updates that were not skipped


def count_round(
    control: Control,
    plans: Mapping[int, RoundPlan],
    *,
    sequence_length: int,
    sync_bytes: int,
    num_syncs: int = 1,
    counted: Mapping[int, Work] | None = None,
) -> tuple[Control, dict[int, dict[str, int]]]:
    """Count a round that has ended, in a copy of `control`; return the copy and the costs.

    Args:
      control: The host's data before the round.
      plans: By trainer id, the sizes of the round, for the trainers that ran.
      sequence_length: Tokens of a sequence on which a worker trains.
      sync_bytes: Bytes of one worker's outer gradient, or of its fragment, as sent.
      num_syncs: Number of fragments, each of which is synchronised once.
      counted: By data stream, the work of each worker that took part. None: all took part, and did
        what `plans` say.

    Returns:
      The copy, and the costs of each trainer that ran, by its id: `updates`, `tokens`,
      synchronisations (`syncs`) and `bytes`.
    """
    control = copy.deepcopy(control)
    spent = {}
    for m, plan in plans.items():
        trainer = control.trainers[m]
        if counted is None:
            as_planned = Work(plan.num_updates, plan.num_sequences, plan.num_sequences)
            work = dict.fromkeys(trainer.streams, as_planned)
        else:
            work = {stream: counted[stream] for stream in trainer.streams if stream in counted}
        # Some workers may have made fewer updates. If no worker took part, there are none.
        num_updates = max((each.num_updates for each in work.values()), default=0)
        trainer.rounds += 1
        trainer.updates += num_updates
        for stream, each in work.items():
            position = trainer.cursors.get(str(stream), 0)
            trainer.cursors[str(stream)] = position + each.num_sequences
        tokens = sum(each.num_learned for each in work.values()) * sequence_length
        cost = sync_cost(len(work), sync_bytes, num_syncs)
        spent[m] = {"updates": num_updates, "tokens": tokens, **cost}
    # The round of the run is that of its slowest trainer.
    control.round = min(control.rounds_of(m) for m in control.trainers)
    control.tokens_total += sum(cost["tokens"] for cost in spent.values())
    control.updates_total += sum(cost["updates"] for cost in spent.values())
    control.syncs_total += sum(cost["syncs"] for cost in spent.values())
    control.bytes_total += sum(cost["bytes"] for cost in spent.values())
    return control, spent


def count_flush(
    control: Control, trainers: Sequence[int], *, sync_bytes: int
) -> tuple[Control, dict]:
    """Count the communication of a flush of these trainers (ids), at the end of a round.

    `sync_bytes` is the size of all parameters of one worker as they are sent. Returns a copy of
    `control` with the cost added to its totals, and the ledger line of the flush.
    """
    cost = {"syncs": 0, "bytes": 0}
    for m in trainers:
        of_trainer = sync_cost(len(control.trainers[m].streams), sync_bytes)
        cost["syncs"] += of_trainer["syncs"]
        cost["bytes"] += of_trainer["bytes"]
    line = {"event": "sync", "round": control.round, "trainers": [*trainers], **cost}
    return with_cost(control, cost), line


def with_cost(control: Control, cost: Mapping[str, int]) -> Control:
    """Return a copy of `control` with the cost of a synchronisation added to its totals.

    `cost` has the number of synchronisations, `syncs`, and their `bytes`.
    """
    return dataclasses.replace(
        control,
        syncs_total=control.syncs_total + cost["syncs"],
        bytes_total=control.bytes_total + cost["bytes"],
    )


def sync_cost(num_workers: int, sync_bytes: int, num_syncs: int = 1) -> dict[str, int]:
    """Return the synchronisations (`syncs`) and `bytes` of a trainer in a round.

    A ring all-reduce among m workers, `num_workers`, moves 2 (m - 1) times `sync_bytes`, the size
    of a pseudo-gradient or its fragment as sent (docs/algorithm.md, section 6). `num_syncs` is the
    number of fragments, each of which is synchronised once. A single worker sends nothing.
    """
    if num_workers <= 1:
        return {"syncs": 0, "bytes": 0}
    return {"syncs": num_syncs, "bytes": num_syncs * 2 * (num_workers - 1) * sync_bytes}


def merge_cost(
    state_bytes: StateBytes, *, num_absorbed: int = 0, num_joining: int = 0, refused: bool = False
) -> dict[str, int]:
    """Return the `syncs` and bytes of a merge with its moves: one blocking synchronisation.

    `num_absorbed` trainers merge into another; `num_joining` workers get another trainer, or are
    new. Each absorbed trainer sends its parameters and, unless `refused`, its outer momentum. Each
    joining worker receives parameters and an inner state (docs/algorithm.md, section 6).
    """
    absorbed_bytes = state_bytes.params
    if not refused:
        absorbed_bytes += state_bytes.outer_state
    joining_bytes = state_bytes.params + state_bytes.inner_state
    return {
        "syncs": int(num_absorbed + num_joining > 0),
        "bytes": num_absorbed * absorbed_bytes + num_joining * joining_bytes,
    }
