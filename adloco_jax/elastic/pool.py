"""Start, call and restart a run's learners, and record their events for the ledger."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import PyTree

from adloco_jax.elastic.decisions import LearnerRecord, pause_s
from adloco_jax.elastic.learner import LearnerSetup
from adloco_jax.elastic.messages import Hello, Sign, said
from adloco_jax.elastic.transport import TRANSPORTS, Transport
from adloco_jax.errors import ConfigError, Preempted, ResourceError, counted
from adloco_jax.host import processes
from adloco_jax.host.terminal import say
from adloco_jax.host.versions import versions
from adloco_jax.loop.control import Control
from adloco_jax.loop.plans import is_over

_TOLD = ("python", "jax")  # whose versions may differ between machines
_PINGS = 4  # a learner is asked so many times in the time after which it counts as lost
_POLL_S = 0.2  # seconds to wait for responses before learners are checked for faults again


class PendingCall(NamedTuple):
    """A call of a method of a learner that has not been answered yet."""

    learner: int  # number of the learner
    what: str  # the method: "ping", "states" or "run_round"
    about: Any  # for "run_round" the request; for "states" the argument `wanted` of the method


class Event(NamedTuple):
    """Something that the driver must process: a response of a learner, or the loss of a learner."""

    what: str  # "lost", or the method that was answered: "run_round" or "states"
    learner: LearnerRecord  # of the process that has answered or ended
    about: Any  # the field `about` of the answered call; None for a loss
    value: Any  # the response, or the cause of the loss


class LearnerPool:
    """Starts the learners of a run, calls their methods, and restarts learners that are lost."""

    def __init__(self, setup: LearnerSetup, write: Callable[..., object]):
        self._setup, self._settings, self._write = setup, setup.settings, write
        self.transport: Transport  # once the learners are started
        self.learners: dict[int, LearnerRecord] = {}
        self.control: Control  # the host's data after the newest round, for the ledger's lines
        self._handles: dict[int, Any] = {}
        self._calls: dict[Any, PendingCall] = {}
        self._connection = contextlib.ExitStack()
        self._looked_s = time.monotonic()  # when the driver last looked for responses
        self._ended_up_s = 0.0  # total seconds that processes were up which have ended since
        # Seconds of lost learners since they last said what they did, until the engine resets it.
        self.lost_s = 0.0
        self.wire_bytes = 0  # sent to learners and received from them, until the engine resets it
        self._has_started = False

    def start_all(self, num_workers: int) -> None:
        """Start all learners, at most `engine.max_learners`, and wait until they have joined.

        Started ones have `engine.restart_s` seconds; then a quorum, or one, is enough. Of those
        that join by themselves, a quorum, or all, is awaited. Raises ConfigError if a learner has
        other data or versions or the address does not answer, ResourceError if too few join.
        """
        rule = self._settings.engine
        count = rule.max_learners or num_workers
        log = Path(self._setup.log) / str(int(time.time() * 1000))
        nowhere = dataclasses.replace(self._setup.spec.machine, devices=())
        setup = self._setup._replace(
            spec=dataclasses.replace(self._setup.spec, machine=nowhere), log=str(log)
        )
        connect = TRANSPORTS[rule.kind].connect
        self.transport = self._connection.enter_context(
            connect(rule.address, count, setup, lambda: is_over(self.control, self._settings))
        )
        log.mkdir(parents=True)
        for number in range(count):
            self.learners[number] = LearnerRecord(number, 0, time.monotonic())
            self._launch(self.learners[number])
        self._wait()
        self._has_started = True

    def _wait(self) -> None:
        """Wait until all learners have joined, or at least enough when the time is over."""
        rule, count, told = self._settings.engine, len(self.learners), -1
        launches = self.transport.launches
        is_one_enough = launches or (rule.starts_learner and not self._setup.by_fit)
        least = min(rule.quorum or (1 if is_one_enough else count), count)
        wanted, seconds = (count, rule.restart_s) if launches else (least, math.inf)
        until_s = time.monotonic() + seconds
        while (there := self.num_present) < wanted and time.monotonic() < until_s:
            if not launches and there != told:
                say(f"learners: {there} of {wanted} have joined")
                told = there
            if launches and all(each.cause for each in self.learners.values()):
                break
            if processes.is_asked_to_stop():
                raise Preempted("stopped by a signal before enough learners had joined")
            self.poll()
        if there < least:
            lost = [f"; learner {n}: {e.cause}" for n, e in self.learners.items() if e.cause]
            few = (
                f"{there} of {count} learners have started within {seconds:g} s{''.join(lost[:1])}"
            )
            if rule.quorum is None:
                raise ResourceError(f"{few}; start nodes, or raise engine.restart_s")
            raise ResourceError(
                f"engine.quorum = {rule.quorum}: {few}; start more nodes, or lower engine.quorum"
            )

    def poll(self) -> list[Event]:
        """Return the responses and losses of learners since the last call; restart lost ones.

        It waits a fraction of a second at most. `LearnerRecord.fault` says which are lost. Raises
        ConfigError if, at the start, one has other data or versions, ResourceError if none is left.
        """
        rule, events, before_s = self._settings.engine, [], self._looked_s
        replies = self.transport.poll([*self._calls], _POLL_S)
        self._looked_s = time.monotonic()
        away_s = self._looked_s - before_s - _POLL_S  # in which the driver did not look
        if away_s > _POLL_S:
            self._put_off_deadlines(away_s)
        for call, reply in replies.items():
            asked = self._calls.pop(call, None)
            if asked is None:
                continue  # a call to a process that has ended
            learner = self.learners[asked.learner]
            self.wire_bytes += reply.num_bytes
            if reply.error:
                events.append(self._lose(learner, reply.error, has_run=True))
            elif asked.what == "ping":
                events += self._hear(learner, reply.value)
            else:
                events.append(Event(asked.what, learner, asked.about, reply.value))
        now_s = time.monotonic()
        for number, learner in [*self.learners.items()]:
            if number not in self._handles and now_s >= learner.started_s:
                self._launch(learner)
            restart_s = rule.restart_s if self.transport.launches else math.inf
            cause = learner.fault(now_s, heartbeat_s=rule.heartbeat_s, restart_s=restart_s)
            if cause:
                events.append(self._lose(learner, cause))
            elif learner.joined and learner.asked_s is None and now_s > learner.next_s:
                self.ask(number, "ping")
                learner.asked_s = now_s
                learner.next_s = now_s + rule.heartbeat_s / _PINGS
        return events

    def _put_off_deadlines(self, away_s: float) -> None:
        """Move the deadlines of all learners: the driver was late, not they."""
        for learner in self.learners.values():
            if learner.asked_s is not None:
                learner.asked_s += away_s
            if learner.due_s is not None:
                learner.due_s += away_s

    def up_s(self) -> float:
        """Return the seconds that learner processes have been up.

        They begin with the request to start one or, if learners join by themselves, when it has
        joined. Not counted is one that has not joined: it may be waiting for a node. If it ran, it
        counts at its end.
        """
        now_s = time.monotonic()
        present = [each for each in self.learners.values() if each.joined]
        return self._ended_up_s + sum(now_s - each.started_s for each in present)

    @property
    def num_present(self) -> int:
        """How many learners have joined and are not lost."""
        return sum(learner.joined for learner in self.learners.values())

    def _launch(self, learner: LearnerRecord) -> None:
        """Start a learner's process, or offer its place to who joins; ask for its first sign."""
        learner.started_s = time.monotonic()
        self._handles[learner.number] = self.transport.start(learner.number, learner.incarnation)
        self.ask(learner.number, "ping")

    def put(self, params: PyTree, kind: Any) -> Any:
        """Store a trainer's parameters for learners; return a reference to pass in calls."""
        reference, sent_bytes = self.transport.put(params, kind)
        self.wire_bytes += sent_bytes
        return reference

    def asked(self, what: str) -> list[PendingCall]:
        """Return the calls of `what` that have not been answered yet."""
        return [call for call in self._calls.values() if call.what == what]

    def ask(self, number: int, what: str, about: Any = None, **arguments: Any) -> None:
        """Call a method of a learner; `poll` returns the response, with `about`, later."""
        call, sent_bytes = self.transport.submit(self._handles[number], what, **arguments)
        self.wire_bytes += sent_bytes
        self._calls[call] = PendingCall(number, what, about)

    def note(self, number: int, what: str, why: str, trainer: int | None = None) -> None:
        """Record an event, such as "joined" or "lost", and its cause, in the ledger.

        `trainer` None: that of a worker that the learner runs.
        """
        learner = self.learners[number]
        if trainer is None:
            for worker_id in sorted(learner.worker_ids):
                if worker_id in self.control.trainer_of:
                    trainer = self.control.trainer_of[worker_id]
                    break
        line: dict[str, Any] = {
            "round": self.control.round,
            "learner": number,
            "trainer": trainer,
            "what": what,
            "why": why,
        }
        name = f"learner {number}"
        if learner.owner:
            line["owner"] = learner.owner
            name += f" ({learner.owner})"
        self._write("learner", **line)
        if what in ("left", "lost"):
            what += f" ({counted(learner.num_responses, 'response')})"
        say(f"{name} {what}: {why}")

    def _greet(self, learner: LearnerRecord, found: Hello) -> list[Event]:
        """Process the first response of a learner's process: record that the learner has joined."""
        number = learner.number
        differing = []
        if found.fingerprint != self._setup.fingerprint:
            differing.append("other data")
        if found.base != self._setup.base.fingerprint:
            differing.append("other base weights")
        # A learner that joins by itself compares the package's, and may have others of the rest.
        if self.transport.launches and found.versions != versions():
            differing.append("other versions of packages")
        if differing:
            fault = f"has {' and '.join(differing)} than the driver"
            if self.transport.launches and not self._has_started:
                raise ConfigError(
                    f"learner {number} ({said(found.devices)}): {fault}; install the same, and give"
                    " it the same files"
                )
            if self.transport.launches:
                learner.failures = math.inf  # the next one would differ too
                fault += "; not started again"
            return [self._lose(learner, fault, has_run=True)]
        learner.joined = True
        learner.lost_s = None
        learner.cause = ""
        about = found.devices
        if not self.transport.launches:
            learner.started_s = time.monotonic()  # until then no machine had joined
            for name in _TOLD:
                about += f", {name} {found.versions.get(name)}"
        self.note(number, "joined", said(about))
        return []

    def _hear(self, learner: LearnerRecord, found: Sign) -> list[Event]:
        """Process a learner's response to a ping; the first says what it has."""
        if not learner.joined:
            learner.owner = found.owner
            return self._greet(learner, found.hello)
        learner.asked_s = None
        learner.leaving |= found.leaving
        if 2 * found.max_batch_size <= learner.max_batch_size:
            learner.max_batch_size = found.max_batch_size
            why = f"out of memory; it takes micro-batches of at most {found.max_batch_size}"
            self.note(learner.number, "limited", why)
        now_s = time.monotonic()
        if not found.compiling:
            learner.compiling_s = None
        elif learner.compiling_s is None:
            learner.compiling_s = now_s
        if found.compiling and learner.due_s is not None:
            learner.due_s = max(learner.due_s, now_s + self._settings.engine.heartbeat_s)
        if not found.has_left:
            return []
        self.let_go(learner)
        return [Event("lost", learner, None, "it has left")]

    def let_go(self, learner: LearnerRecord) -> None:
        """Record that a learner has left as it was asked to; others get its workers at once."""
        self.note(learner.number, "left", "asked to end")
        learner.worker_ids = []
        self.start_again(learner.number)

    def _lose(self, learner: LearnerRecord, cause: str, *, has_run: bool = False) -> Event:
        """Record the loss of a learner for the ledger, end its process, and plan the next one."""
        number = learner.number
        has_run = has_run or learner.joined
        if has_run or learner.cause != cause:
            self.note(number, "lost", cause)
        if learner.joined:
            self.lost_s += time.monotonic() - max(learner.spent_s, learner.started_s)
        self.start_again(number, cause, has_run=has_run)
        if all(math.isinf(each.started_s) for each in self.learners.values()):
            raise ResourceError(f"no learner is left; learner {number}: {cause}")
        return Event("lost", learner, None, cause)

    def start_again(self, number: int, cause: str = "", *, has_run: bool = True) -> None:
        """End a learner's process, and plan the next, which keeps its workers.

        If processes end before they have joined, the pauses grow.
        """
        before, now_s = self.learners[number], time.monotonic()
        failures = 0.0 if before.joined else before.failures
        if has_run:
            self._ended_up_s += now_s - before.started_s
            if not before.joined:
                failures += 1
        self._kill(number)
        self.learners[number] = LearnerRecord(
            number=number,
            incarnation=before.incarnation + 1,
            started_s=now_s + pause_s(failures),
            failures=failures,
            worker_ids=before.worker_ids,
            cause=cause,
            lost_s=before.lost_s or now_s,
        )

    def close(self) -> None:
        """End all learners, and what was started to reach them."""
        for number in [*self._handles]:
            self._kill(number)
        self._connection.close()

    def _kill(self, number: int) -> None:
        """End a learner's process, and forget the calls that it has not answered."""
        self._calls = {call: c for call, c in self._calls.items() if c.learner != number}
        self.transport.kill(self._handles.pop(number))
