"""Who is there: learners and their lives, which worker is where, when a round ends without some.

Pure: times are arguments, in seconds of one clock. Workers are known by their streams, which are
their permanent ids; learners by numbers, which a learner's next life keeps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# Times its own measured seconds, after which a learner at work is overdue. One that is stopped
# gives no sign of life, and is lost sooner.
SLOW = 5.0


@dataclass
class Learner:
    """What the driver knows of a learner."""

    number: int
    life: int  # counts its starts
    started_s: float
    joined: bool = False
    leaving: bool = False  # it has been asked to end
    asked_s: float | None = None  # when it was asked for the sign that it has not given yet
    next_s: float = 0.0  # when to ask again
    sequence_s: float | None = None  # measured seconds for a sequence
    lost_s: float | None = None  # when its workers lost it; None: it is there, or has none to lose
    due_s: float | None = None  # when the work that it has must be done; None: not known
    streams: list[int] = field(default_factory=list)  # of the workers that it hosts

    def fault(self, now_s: float, *, heartbeat_s: float, restart_s: float) -> str:
        """Why the learner counts as lost, in words; empty: it does not."""
        if not self.joined:
            is_late = now_s - self.started_s > restart_s
            return f"did not start within {restart_s:g} s" if is_late else ""
        if self.asked_s is not None and now_s - self.asked_s > heartbeat_s:
            return f"gave no sign for {now_s - self.asked_s:.1f} s"
        if self.due_s is not None and now_s > self.due_s:
            return "at work for longer than its measured speed explains"
        return ""


def deadline(learner: Learner, sequences: int, now_s: float, *, heartbeat_s: float) -> float | None:
    """When a learner must have computed so many sequences, by its own speed; None: not known."""
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
    """Divide workers among the learners that are there, at the boundary of their trainers.

    A worker stays with its learner. Those of a lost learner go to a spare, else they wait for its
    next life, else they are divided. A learner that is left without one takes a worker from the
    one that hosts the most, if these are at least two.

    Args:
      learners: Those that are there, with the workers that they host.
      trainers: By stream of every worker, its trainer's id.
      movable: Streams of the workers that may be given to a learner now.
      returning: Of these, the workers whose learner may come back.

    Returns:
      Each hosted worker's learner, by stream.
    """
    hosts = {s: each.number for each in learners for s in each.streams if s in trainers}

    def load(number: int) -> list[int]:
        return [stream for stream, host in hosts.items() if host == number]

    homeless = sorted((s for s in movable if s not in hosts), key=lambda s: (trainers[s], s))
    spares = [each.number for each in learners if not load(each.number)]
    if spares and homeless:  # in equal parts, a trainer's workers next to one another
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
      awaited: Learners that have not, and live.
      quorum: How many answers are enough; None: all.
      since_quorum_s: Seconds since they were enough; None: they are not.
      grace_s: How long the others are waited for.
    """
    if not reported:
        return False
    return not awaited or (
        quorum is not None and since_quorum_s is not None and since_quorum_s >= grace_s
    )


def has_quorum(reported: int, awaited: int, quorum: int | None) -> bool:
    """Whether so many answers are enough; where fewer learners live, these are the quorum."""
    return reported >= min(quorum or reported + awaited, reported + awaited)


def updates_by_speed(num_updates: int, sequence_s: Mapping[int, float | None]) -> dict[int, int]:
    """Each worker's updates of a round, in proportion to its learner's speed; at least one.

    Workers of unknown speed run as many as the fastest.

    Source: DyLU of Async DiLoCo (arXiv 2401.09135).
    """
    known = [seconds for seconds in sequence_s.values() if seconds]
    return {
        worker: max(1, int(min(known) / seconds * num_updates)) if seconds else num_updates
        for worker, seconds in sequence_s.items()
    }


def rejected(norms: Mapping[int, float], max_ratio: float | None) -> list[int]:
    """Workers whose update is not finite, or longer than `max_ratio` times its peers' median.

    A median needs two peers.
    """
    finite = {worker: norm for worker, norm in norms.items() if norm < float("inf")}
    out = [worker for worker in norms if worker not in finite]
    if max_ratio is not None and len(finite) > 2:
        for worker, norm in finite.items():
            peers = sorted(other for w, other in finite.items() if w != worker)
            middle = (peers[(len(peers) - 1) // 2] + peers[len(peers) // 2]) / 2
            out += [worker] * (norm > max_ratio * middle)
    return out
