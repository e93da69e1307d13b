"""Decide which workers each learner process hosts, when a learner is lost, when a round ends.

All functions are pure: times are arguments, in seconds of one clock. A worker is identified by the
number of its data stream, which never changes. A learner is identified by its number, which stays
the same when its process is restarted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# A working learner is overdue after this number times its measured seconds. A learner that is
# stopped sends no heartbeat, and counts as lost sooner.
SLOW = 5.0


@dataclass
class Learner:
    """What the driver knows about a learner and its present process."""

    number: int
    life: int  # number of restarts
    started_s: float  # when the process was started
    joined: bool = False  # whether the process has answered its first call
    leaving: bool = False  # whether the process has been asked to end
    asked_s: float | None = None  # time of a heartbeat request without an answer yet
    next_s: float = 0.0  # time of the next heartbeat request
    sequence_s: float | None = None  # measured seconds for a sequence
    lost_s: float | None = None  # when a process with workers was lost; None: not lost
    due_s: float | None = None  # time by which its present work must be done; None: unknown
    streams: list[int] = field(default_factory=list)  # streams of the workers that it hosts
    prepared: set[tuple[int, bool]] = field(default_factory=set)  # rounds it has programs for

    def fault(self, now_s: float, *, heartbeat_s: float, restart_s: float) -> str:
        """State why the learner counts as lost; the text is empty if it does not."""
        if not self.joined:
            is_late = now_s - self.started_s > restart_s
            return f"did not start within {restart_s:g} s" if is_late else ""
        if self.asked_s is not None and now_s - self.asked_s > heartbeat_s:
            return f"gave no sign for {now_s - self.asked_s:.1f} s"
        if self.due_s is not None and now_s > self.due_s:
            return "at work for longer than its measured speed explains"
        return ""


def deadline(learner: Learner, sequences: int, now_s: float, *, heartbeat_s: float) -> float | None:
    """The latest time by which a learner should have processed some sequences.

    The time follows from the measured speed of the learner. None: the speed is not known.
    """
    if learner.sequence_s is None:
        return None
    return now_s + SLOW * max(heartbeat_s, learner.sequence_s * sequences)


def assign(
    learners: Sequence[Learner],
    trainers: Mapping[int, int],
    movable: Collection[int],
    *,
    returning: Collection[int],
) -> dict[int, int]:
    """Divide workers among the present learners, between two rounds of their trainers.

    A worker stays with the learner that hosts it. The workers of a lost learner are divided among
    spare learners, which have no workers. If there is no spare, the workers wait while the learner
    may come back; otherwise they are divided among the present learners. A spare learner then takes
    one worker from the learner with the most workers, if that learner has at least two.

    Args:
      learners: The present learners, with the workers that they host.
      trainers: The id of each worker's trainer; the key is the worker's stream.
      movable: Streams of the workers that may be moved now.
      returning: Streams of the workers whose lost learner may come back.

    Returns:
      The number of the learner that hosts each worker; the key is the worker's stream.
    """
    hosts = {s: each.number for each in learners for s in each.streams if s in trainers}

    def load(number: int) -> list[int]:
        return [stream for stream, host in hosts.items() if host == number]

    homeless = sorted((s for s in movable if s not in hosts), key=lambda s: (trainers[s], s))
    spares = [each.number for each in learners if not load(each.number)]
    if spares and homeless:  # divide equally; workers of a trainer stay together
        size = -(-len(homeless) // len(spares))
        for index, stream in enumerate(homeless):
            hosts[stream] = spares[index // size]
    else:
        for stream in (s for s in homeless if learners and s not in returning):

            def cost(number: int, stream: int = stream) -> tuple[int, bool, int]:
                held = load(number)
                return len(held), trainers[stream] not in {trainers[s] for s in held}, number

            hosts[stream] = min((each.number for each in learners), key=cost)
    for spare in [each.number for each in learners if not load(each.number)]:
        largest = max((each.number for each in learners), key=lambda n: (len(load(n)), -n))
        given = [stream for stream in load(largest) if stream in movable]
        if len(load(largest)) >= 2 and given:
            hosts[given[-1]] = spare
    return hosts


def is_over(
    reported: int, awaited: int, *, quorum: int | None, since_quorum_s: float | None, grace_s: float
) -> bool:
    """Whether a trainer's round ends now.

    Args:
      reported: Learners that have answered.
      awaited: Present learners that have not answered.
      quorum: Number of learners whose answers are enough; None: all learners must answer.
      since_quorum_s: Seconds since this number of learners has answered; None: it is not reached.
      grace_s: Seconds to wait for the remaining learners after the quorum is reached.
    """
    if not reported:
        return False
    return not awaited or (
        quorum is not None and since_quorum_s is not None and since_quorum_s >= grace_s
    )


def has_quorum(reported: int, awaited: int, quorum: int | None) -> bool:
    """Whether enough learners have answered in a round.

    The quorum is at most the number of learners that take part in the round.
    """
    return reported >= min(quorum or reported + awaited, reported + awaited)


def updates_by_speed(num_updates: int, sequence_s: Mapping[int, float | None]) -> dict[int, int]:
    """The number of updates of each worker in a round, in proportion to its learner's speed.

    Each worker makes at least one update. Workers of unknown speed make as many as the fastest.

    Source: DyLU of Async DiLoCo (arXiv 2401.09135).
    """
    known = [seconds for seconds in sequence_s.values() if seconds]
    return {
        worker: max(1, int(min(known) / seconds * num_updates)) if seconds else num_updates
        for worker, seconds in sequence_s.items()
    }


def rejected(norms: Mapping[int, float], max_ratio: float | None) -> list[int]:
    """Workers whose update is not finite, or longer than `max_ratio` times the peers' median norm.

    Peers are the other workers with a finite update. A worker with fewer than two peers is not
    rejected for its length.
    """
    finite = {worker: norm for worker, norm in norms.items() if norm < float("inf")}
    out = [worker for worker in norms if worker not in finite]
    if max_ratio is not None and len(finite) > 2:
        for worker, norm in finite.items():
            peers = sorted(other for w, other in finite.items() if w != worker)
            middle = (peers[(len(peers) - 1) // 2] + peers[len(peers) // 2]) / 2
            out += [worker] * (norm > max_ratio * middle)
    return out
