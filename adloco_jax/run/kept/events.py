"""The lines of a ledger, the log of a run, by event.

A number that was not finite, or not measured, is null. A trainer is a model in training; its
workers train copies of it. A learner is a process of its own that trains workers.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from adloco_jax.data.formats import Count, Format, Pair, Positive, Seconds, with_tuples
from adloco_jax.settings import Settings


class StateBytesLine(Format):
    """Bytes of what is sent of a trainer in a merge, and of a worker that joins (`StateBytes`)."""

    params: Count
    outer_state: Count
    inner_state: Count


class Start(Format):
    """A run begins or resumes."""

    run: str
    command: str
    data_fingerprint: str
    num_params: Positive
    max_batch_size: Positive
    state_bytes: StateBytesLine
    config: Annotated[Settings, BeforeValidator(with_tuples)]
    time: str = ""
    devices: str = ""
    jax: str = ""
    attention: str = ""
    loss_unit: str = ""
    versions: dict[str, str] = {}
    tokens_per_byte: float | None = None
    own: list[str] = []  # what the caller of `fit` gave (`Run.own`)
    round: Count = 0
    buckets: list[Count] = []
    start_s: Seconds = 0.0  # until here, in this process
    stall_s: Seconds = 0.0  # of these, spent waiting for compilation
    heldout_rows: list[Count] = []  # positions of the held-out rows that reported losses use
    guard_rows: list[Count] = []  # those that decide about merges


class Costs(Format):
    """What a round, merge or growth has sent."""

    round: Count
    syncs: Count
    bytes: Count


class Round(Costs):
    """A trainer's round."""

    trainer: Count
    tokens: Count
    updates: Count
    workers: Positive
    requested_batch_size: Positive
    micro_batch_size: Positive
    num_accum_steps: Positive
    next_batch_size: Positive
    train_loss: float | None
    noise: float | None
    signal: float | None
    test_value: float | None
    step_s: Seconds | None
    stall_s: Seconds | None
    learning_rate: float | None = None
    pseudo_grad_norm: float | None = None
    steps_per_round: Count | None = None
    next_steps_per_round: Count | None = None
    next_workers: Count = 0
    skipped_updates: Count = 0
    reason: str = ""
    train_losses: list[Pair[Count, float | None]] = []
    updates_before: Count = 0
    workers_counted: Count = 0
    wire_bytes: Count = 0
    up_s: Seconds = 0.0
    lost_s: Seconds = 0.0  # of learners that were lost, since they last said what they did
    # What learners say that they did, together.
    computing_s: Seconds = 0.0
    uploading_s: Seconds = 0.0
    waiting_s: Seconds = 0.0
    downloading_s: Seconds = 0.0


class Learner(Format):
    """A learner joined, left, was lost, late, clipped, rejected or refused."""

    round: Count
    learner: Count
    trainer: Count | None
    what: str
    why: str
    owner: str = ""  # the first letters of its id, if it has joined by a ticket


class ClassScores(Format):
    """Scores of one class of labelled texts."""

    precision: float | None
    recall: float | None
    f1: float | None
    support: Count


class Eval(Format):
    """Losses on held-out rows."""

    round: Count
    trainer: Count | Literal["consensus"]
    loss: float | None
    tokens_total: Count
    syncs_total: Count
    bytes_total: Count
    updates_total: Count = 0
    source: str = ""
    average: float | None = None
    perplexity: float | None = None
    wall_s: Seconds | None = None
    eval_s: Seconds | None = None
    accuracy: float | None = None
    classes: list[ClassScores] = []
    sample: Pair[str, str] = ("", "")


class Sync(Costs):
    """All fragments were synchronised at once."""

    trainers: list[Count]


class Merge(Costs):
    """Trainers merged."""

    into: Count
    members: list[Count]
    weights: list[float]
    loss_before: list[float | None]
    loss_after: float | None
    barrier: float | None
    requested_batch_size: Count = 0
    workers: dict[str, Count] = {}


class Refusal(Merge):
    """A merge would have raised the loss, and was not made."""

    action: str = ""


class Spawn(Costs):
    """Workers joined a trainer."""

    trainer: Count = 0
    reason: str = ""
    workers_before: Count = 0
    workers_after: Count = 0


class Fault(Format):
    """The run went on after a fault."""

    kind: str
    round: Count
    trainer: Count = 0
    cause: str = ""
    updates: Count = 0
    skipped_in_a_row: Count = 0
    max_batch_size: Count = 0
    max_batch_size_before: Count = 0
    tracker: str = ""
    effect: str = ""


class Compile(Format):
    """A program was compiled or loaded."""

    key: str
    cache: str
    where: str
    seconds: Seconds
    needed_bytes: Count | None = None


class Memory(Format):
    """The most memory that was used so far."""

    round: Count
    host_peak_bytes: Count
    device_peak_bytes: list[Count | None]


class Checkpoint(Format):
    """A checkpoint is complete."""

    round: Count
    bytes: Count = 0
    blocked_s: Seconds = 0.0
    save_s: Seconds = 0.0


class End(Format):
    """The run is finished or was stopped."""

    reason: str
    wall_s: Seconds
    rounds: Count
    tokens_total: Count
    tokens_per_s: float = 0.0
    bytes_total: Count = 0
    syncs_total: Count = 0
    updates_total: Count = 0


# By the `event` of a line, the class that says which fields it has.
EVENTS: dict[str, type[Format]] = {
    "start": Start,
    "round": Round,
    "learner": Learner,
    "eval": Eval,
    "sync": Sync,
    "merge": Merge,
    "refusal": Refusal,
    "spawn": Spawn,
    "fault": Fault,
    "compile": Compile,
    "memory": Memory,
    "checkpoint": Checkpoint,
    "end": End,
}
