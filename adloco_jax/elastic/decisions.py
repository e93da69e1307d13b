"""Decisions about learners, as pure functions.

A worker is known by its id, a trainer by its id, and a learner by its number, which its next
process keeps. Arguments and fields that end in `_s` are seconds: durations, or times of one clock,
such as `time.monotonic`.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from adloco_jax.settings import INT32, EngineSettings

# A learner at work counts as lost after this factor times the seconds that its speed predicts; one
# that is stopped sooner, as it sends no heartbeat.
SLOW = 5.0
_LONGEST_PAUSE_S = 60.0  # before a learner that keeps failing is started again
KEPT_NORMS = 64  # number of a trainer's last accepted norms, with which new ones are compared
_FEW_NORMS = 8  # fewer say little about what is usual
_TRANSFER_ROUNDS = 16  # the time of a learner's transfers is the median of so many rounds
_SPEED_ROUNDS = 5  # a learner's speed is the median of so many rounds
FEWEST_ROUNDS = 3  # rounds in which a learner's speed is measured before it makes fewer updates
_FEWEST_PARTS = 8  # into which a round is divided, so that a slower learner can do some of them
_SHORTEST_S = 1e-300  # in place of zero seconds, which a learner may claim, to divide by
_SHORTEST_SUM_S = 1e-9  # likewise for the sum of its uses of time
_CLEARLY_SLOWER = 8 / 9  # of the fastest one's speed: an eighth more seconds for a sequence


@dataclass
class LearnerRecord:
    """What the driver (the process with the training loop) knows about a learner's process."""

    number: int  # the learner's number, which its next processes keep
    incarnation: int  # how many times the learner has been restarted
    started_s: float  # when the process was started, or will be
    joined: bool = False  # whether the process has answered its first call
    owner: str = ""  # how the driver names its machine, if it knows it by a key
    leaving: bool = False  # whether the process has been asked to end
    asked_s: float | None = None  # time of a ping without a response yet
    next_s: float = 0.0  # time of the next ping
    max_batch_size: int = INT32  # largest micro-batch for which its memory may suffice
    # Measured seconds per sequence of its last rounds, in this process.
    sequence_s: deque[float] = field(default_factory=partial(deque, maxlen=_SPEED_ROUNDS))
    # The last seconds from a request to its response, without the round itself.
    transfer_s: deque[float] = field(default_factory=partial(deque, maxlen=_TRANSFER_ROUNDS))
    spent_s: float = 0.0  # the time up to which it has reported what it did
    sent_s: float = 0.0  # when its present request was submitted
    compiling_s: float | None = None  # since when it has said that it compiles; None: it does not
    num_responses: int = 0
    # Number of processes before it, in a row, that ran but did not join; infinity: all would fail.
    failures: float = 0
    lost_s: float | None = None  # when its last process ended; None if it has joined since
    cause: str = ""  # why that one was lost; empty if it has joined since
    due_s: float | None = None  # time by which its present work must be done; None: no such time
    worker_ids: list[int] = field(default_factory=list)  # the workers that it runs
    # By trainer's id, which version of its parameters the learner has (`states.SentParams`).
    params_ids: dict[int, int] = field(default_factory=dict)

    def fault(self, now_s: float, *, heartbeat_s: float, restart_s: float) -> str:
        """Return in words why the learner now counts as lost; empty if it does not.

        `heartbeat_s` limits the wait for an answer to a ping, `restart_s` that for the first answer
        of a process. `now_s` is the present time.
        """
        if not self.joined:
            if now_s - self.started_s > restart_s:
                return f"did not start within {restart_s:g} s"
            return ""
        if self.asked_s is not None and now_s - self.asked_s > heartbeat_s:
            return f"gave no sign for {now_s - self.asked_s:.1f} s"
        if self.due_s is not None and now_s > self.due_s:
            return "at work for longer than its measured speed explains"
        return ""

    def predicted_s(self, sequences: int) -> float:
        """Return the seconds from a request for so many sequences to its response.

        It is infinity if the learner has not been measured yet.
        """
        if not self.sequence_s:
            return math.inf
        transfer_s = statistics.median(self.transfer_s or [0.0])  # none was measured: 0
        return statistics.median(self.sequence_s) * sequences + transfer_s

    def record_request(self, sequences: int, now_s: float, *, heartbeat_s: float) -> None:
        """Record that a request for some sequences is sent, and until when they must be done.

        They may take `SLOW` times the predicted seconds, and at least `SLOW` times `heartbeat_s`. A
        later deadline that the learner has already stays.
        """
        self.sent_s = now_s
        due_s = now_s + SLOW * max(heartbeat_s, self.predicted_s(sequences))
        # A learner may still be at work on an earlier request.
        if self.due_s is None or self.due_s < due_s:
            self.due_s = due_s

    def credible_s(self, claimed_s: Sequence[float], now_s: float) -> np.ndarray:
        """Return the seconds that a learner claims for each use of its time, cut to be credible.

        They are scaled down if their sum is more than the time since its last report, or since the
        process was started if this is the first. `now_s` is stored as the time of this report.
        """
        since_s = now_s - max(self.spent_s, self.started_s)
        self.spent_s = now_s
        total_s = max(sum(claimed_s), _SHORTEST_SUM_S)  # never zero
        return np.array(claimed_s) * min(1.0, since_s / total_s)


def pause_s(failures: float) -> float:
    """Return the wait before a restart, after `failures` processes in a row that did not join.

    It is nothing after none, one second after one, and doubles with each, up to a minute. It is
    infinite after infinitely many failures, which stand for a learner that would always fail.
    """
    if failures == 0:
        return 0.0
    if math.isinf(failures):
        return math.inf
    return min(2.0 ** (failures - 1), _LONGEST_PAUSE_S)


def assign(
    learners: Sequence[LearnerRecord],
    trainers: Mapping[int, int],
    movable: Collection[int],
    *,
    returning: Collection[int],
) -> dict[int, int]:
    """Assign workers to learners; return, by worker id, the number of the learner that runs it.

    A worker that has to wait is not in the result. Nothing else is changed.

    1. A worker whose learner is present (in `learners`) stays with it.
    2. Those of the other workers that are `movable` are divided among the spare learners, which
       have no worker.
    3. Without a spare learner, a worker waits if it is `returning`; otherwise it goes to a learner
       with the fewest workers.
    4. A learner that is still spare takes a movable worker from the learner with the most, if that
       has at least two.

    Args:
      learners: The learners that are present; `worker_ids` are the workers that each runs now.
      trainers: The trainer id of each worker of the run, by worker id.
      movable: Ids of the workers that may move to another learner: those between two rounds.
      returning: Ids of workers whose lost learner may soon be back.
    """
    numbers = [learner.number for learner in learners]
    hosts: dict[int, int] = {}  # the result; first as it is now, by rule 1
    for learner in learners:
        for worker_id in learner.worker_ids:
            if worker_id in trainers:  # else its trainer has been merged into another
                hosts[worker_id] = learner.number

    def workers_of(number: int) -> list[int]:
        """Return the ids of the workers that are assigned to a learner up to now."""
        return [worker_id for worker_id, host in hosts.items() if host == number]

    # 2. Workers without a learner, sorted so that a trainer's workers stay together.
    homeless = [worker_id for worker_id in movable if worker_id not in hosts]
    homeless.sort(key=lambda worker_id: (trainers[worker_id], worker_id))
    spares = [number for number in numbers if not workers_of(number)]
    if spares and homeless:
        size = math.ceil(len(homeless) / len(spares))  # workers of each spare learner
        for index, worker_id in enumerate(homeless):
            hosts[worker_id] = spares[index // size]
    elif numbers:  # 3. No learner is spare.
        for worker_id in homeless:
            if worker_id in returning:
                continue

            # The default binds the trainer of this worker: a closure would see a later one.
            def cost(number: int, trainer: int = trainers[worker_id]) -> tuple[int, bool, int]:
                """Return a key that sorts learners; this worker goes to the first.

                First come learners with fewer workers; among equals, those that have a worker of
                its trainer, whose parameters they then have; then those with a smaller number.
                """
                held = workers_of(number)
                is_new = all(trainers[held_id] != trainer for held_id in held)
                return len(held), is_new, number

            hosts[worker_id] = min(numbers, key=cost)

    # 4. Of several learners with the most workers, the one with the smallest number gives.
    for spare in [number for number in numbers if not workers_of(number)]:
        largest = max(numbers, key=lambda number: (len(workers_of(number)), -number))
        candidates = [worker_id for worker_id in workers_of(largest) if worker_id in movable]
        if len(workers_of(largest)) >= 2 and candidates:
            hosts[candidates[-1]] = spare
    return hosts


def usual_norm(past: Sequence[float], now: Sequence[float]) -> float:
    """Return the usual norm of a worker's difference, per update; 0: not known yet.

    A difference (the trainer's parameters minus the worker's) that is much larger than this will be
    scaled down ("clipped"). The usual norm is the larger of two medians: of `past`, the accepted
    norms of many rounds, and of `now`, one norm for each learner of this round. So when all make
    larger steps, as in a warm-up, nobody is clipped.

    A median needs at least eight of `past`, or two of `now`. Of an even number of norms it is the
    smaller of the two in the middle. Their mean would be larger, and a single huge norm of two
    learners would raise the limit by which it is judged. A learner has one norm in `now`, the
    largest of its workers', so that many workers of a faulty learner do not outvote the others.
    """
    usual = 0.0
    if len(past) >= _FEW_NORMS:
        usual = statistics.median_low(past)
    if len(now) >= 2:
        usual = max(usual, statistics.median_low(now))
    return usual


def num_parts(steps: int, engine: EngineSettings) -> int:
    """Return the number of equal parts of a round, of which a slow learner does only some.

    `steps` is `inner.steps_per_round`. The number is its smallest divisor that is at least eight;
    with fewer steps, each is a part. A round's updates are a multiple of `steps`, and so of the
    number of parts. With `engine.steps=equal` all learners do the whole round, which is one part.
    """
    if engine.steps != "by_speed":
        return 1
    parts = min(_FEWEST_PARTS, steps)
    while steps % parts != 0:  # ends at `steps` at the latest
        parts += 1
    return parts


def updates_by_speed(
    num_updates: int, parts: int, sequence_s: Mapping[int, Collection[float]]
) -> dict[int, int]:
    """Return how many updates each worker makes in a round, by worker id, as its speed allows.

    A worker makes all `num_updates` unless it is clearly slower than the fastest one: its median
    time for a sequence is an eighth longer, and its shortest time is longer than the fastest one's
    longest. So equal learners on a noisy machine make equal updates. A slower worker makes whole
    parts, at least one.

    Args:
      num_updates: Updates of the fastest worker.
      parts: Number of equal parts into which these can be divided.
      sequence_s: By worker id, its learner's measured seconds per sequence, one for each of the
        last rounds. With fewer than three a worker counts as not measured, and makes all updates.

    Source: DyLU of Async DiLoCo (arXiv 2401.09135), which uses one measurement.
    """
    updates = dict.fromkeys(sequence_s, num_updates)
    measured = {}  # the entries of `sequence_s` with enough rounds
    for worker_id, seconds in sequence_s.items():
        if len(seconds) >= FEWEST_ROUNDS:
            measured[worker_id] = seconds
    if not measured:
        return updates
    fastest = min(measured.values(), key=statistics.median)  # the seconds of the fastest worker
    for worker_id, seconds in measured.items():
        # Its speed, as a fraction of the fastest one's; never divided by zero.
        speed = statistics.median(fastest) / max(statistics.median(seconds), _SHORTEST_S)
        if speed < _CLEARLY_SLOWER and min(seconds) > max(fastest):
            num_parts_done = max(round(speed * parts), 1)
            updates[worker_id] = num_parts_done * num_updates // parts
    return updates
