"""Start, call and restart a run's learners, and record their events for the ledger.

A learner has a number, which stays with its workers, and a process, which may be lost and
started again. `LearnerRecord` is what the driver knows of the process. The driver pings a learner,
which asks for a sign of life. Times are seconds of `time.monotonic`. A transport reaches learners:
it starts processes ("launches"), or offers their numbers to machines that join by themselves. The
quorum (`engine.quorum`) is the number of learners with which a run can go on. A learner has joined
once its first answer has shown that it has the driver's data and versions. The control is the
host's part of the run's state, with its trainers and their workers. A handle is what the transport
knows a learner's process by, a call what it knows an unanswered call of a method by, and a
reference what it knows stored parameters by; here they are only handed on.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import PyTree

from adloco_jax.elastic.decisions import LearnerRecord, pause_s
from adloco_jax.elastic.learner import Inputs, LearnerSetup, Response
from adloco_jax.elastic.messages import Hello, Refused, Request, Sign, StateKey, said
from adloco_jax.elastic.transport import TRANSPORTS, Call, Handle, Reference, Transport
from adloco_jax.errors import ConfigError, Preempted, ResourceError, counted
from adloco_jax.host import processes
from adloco_jax.host.terminal import say
from adloco_jax.host.versions import versions
from adloco_jax.loop.control import Control
from adloco_jax.loop.plans import is_over

_PRINTED_VERSIONS = ("python", "jax")  # they may differ between machines that join by themselves
_PINGS = 4  # a learner is asked so many times in the time after which it counts as lost
_POLL_S = 0.2  # seconds to wait for responses before learners are checked for faults again


class PendingCall(NamedTuple):
    """A call of a method of a learner that has not been answered yet."""

    learner: int  # number of the learner
    method: str  # "ping", "states" or "run_round"
    request: Request | None = None  # the argument of "run_round"
    keys: Sequence[StateKey] = ()  # the argument `wanted` of "states"


class RoundAnswer(NamedTuple):
    """A learner has answered a request to run a round."""

    learner: LearnerRecord  # of the process that has answered
    request: Request  # the request that was answered
    responses: list[Response] | Refused  # one for each entry of `request.work`, if not refused


class StatesAnswer(NamedTuple):
    """A learner has answered a request for inner states."""

    keys: Sequence[StateKey]  # the states that were asked for
    states: list[PyTree] | Refused  # one for each key, if not refused


class Loss(NamedTuple):
    """A learner's process has ended, has left, or counts as lost."""

    learner: LearnerRecord  # of the process that has ended
    cause: str  # in words


Event: TypeAlias = RoundAnswer | StatesAnswer | Loss
"""Something that the engine must process."""


class LearnerPool:
    """Starts the learners of a run, calls their methods, and restarts learners that are lost."""

    def __init__(self, setup: LearnerSetup, write: Callable[..., object]):
        """Store the arguments; `start_all` starts the learners.

        `setup` is what each learner is made from. `write(event, **fields)` adds a line to the run's
        ledger, its file of events.
        """
        self._setup = setup
        self._settings = setup.settings
        self._write = write
        self.transport: Transport  # once the learners are started
        self.learners: dict[int, LearnerRecord] = {}  # by number
        # The control after the newest round, for the ledger's lines; the engine sets it.
        self.control: Control
        # The transport's handles of processes, by the learner's number. A number has none while its
        # next process is planned.
        self._handles: dict[int, Handle] = {}
        self._calls: dict[Call, PendingCall] = {}  # those that have not been answered yet
        self._connection = contextlib.ExitStack()  # has entered the transport, to close it
        self._looked_s = time.monotonic()  # when the driver last looked for responses
        # How long processes that have ended were up, all together; a part of `up_s`.
        self._ended_up_s = 0.0
        # Two counts, which the engine sets back when it writes them to the ledger.
        self.lost_s = 0.0  # seconds between a learner's last report of what it did and its loss
        self.wire_bytes = 0  # sent and received
        self._has_started = False  # whether the run has begun with enough learners

    def start_all(self, num_workers: int) -> None:
        """Connect to the learners, start them all, and wait until enough have joined.

        `_wait_for_learners` says how many are enough.

        Args:
          num_workers: Number of workers; also that of learners, unless `engine.max_learners` is
            set.

        Raises:
          ConfigError: If a learner has other data or versions, or the address does not answer.
          ResourceError: If too few join, or the learners cannot be reached.
          Preempted: If a signal comes before enough have joined.
        """
        rule = self._settings.engine
        count = rule.max_learners or num_workers  # of learners
        now_ms = int(time.time() * 1000)  # milliseconds
        log = Path(self._setup.log) / str(now_ms)  # a folder for each start of the driver

        # The driver's devices cannot be sent to another process; a learner finds its own.
        machine = dataclasses.replace(self._setup.spec.machine, devices=())
        spec = dataclasses.replace(self._setup.spec, machine=machine)
        setup = self._setup._replace(spec=spec, log=str(log))

        def run_is_over() -> bool:
            """Whether the run is over, after the newest round; the transport asks at its end."""
            return is_over(self.control, self._settings)

        connect = TRANSPORTS[rule.kind].connect  # reaches learners in the configured way
        connection = connect(rule.address, count, setup, run_is_over)  # a context manager
        self.transport = self._connection.enter_context(connection)
        log.mkdir(parents=True)
        for number in range(count):
            self.learners[number] = LearnerRecord(
                number=number, incarnation=0, started_s=time.monotonic()
            )
            self._launch(self.learners[number])
        self._wait_for_learners()
        self._has_started = True

    def _wait_for_learners(self) -> None:
        """Wait until enough learners have joined, or too few have for too long.

        Of processes that the transport starts, all are awaited for `engine.restart_s` seconds;
        after that a quorum is enough, or one if no quorum is set. Learners that join by themselves
        are awaited without an end: a quorum of them; if none is set, one if the driver's computer
        trains too (`engine.trains_here`), else all.

        Raises ResourceError if too few join, ConfigError if one has other data or versions, and
        Preempted if a signal comes before.
        """
        rule = self._settings.engine
        count = len(self.learners)
        launches = self.transport.launches  # whether the transport starts processes

        # With fewer than `least` the run cannot begin. One is enough if the driver starts it; it
        # starts none for `fit`, as it cannot send that caller's model.
        if rule.quorum:
            least = min(rule.quorum, count)
        elif launches or (rule.starts_learner and not self._setup.by_fit):
            least = 1
        else:
            least = count
        # The wait ends when `wanted` have joined, or after `patience_s`.
        if launches:
            wanted = count
            patience_s = rule.restart_s
        else:  # they join by themselves, at any time
            wanted = least
            patience_s = math.inf

        until_s = time.monotonic() + patience_s
        told = -1  # number of learners in the last line that was printed
        while self.num_present < wanted and time.monotonic() < until_s:
            if not launches and self.num_present != told:
                told = self.num_present
                say(f"learners: {told} of {wanted} have joined")
            # `cause` is why the last process was lost; empty if it was not.
            if launches and all(each.cause for each in self.learners.values()):
                break  # each has failed once, so the next ones would fail too
            if processes.is_asked_to_stop():
                raise Preempted("stopped by a signal before enough learners had joined")
            self.poll()
        if self.num_present >= least:
            return

        few = f"{self.num_present} of {count} learners have started within {patience_s:g} s"
        for number, learner in self.learners.items():
            if learner.cause:  # one of them is enough to know
                few += f"; learner {number}: {learner.cause}"
                break
        if rule.quorum is None:
            raise ResourceError(f"{few}; start nodes, or raise engine.restart_s")
        raise ResourceError(
            f"engine.quorum = {rule.quorum}: {few}; start more nodes, or lower engine.quorum"
        )

    def poll(self) -> list[Event]:
        """Return the responses and losses of learners since the last call; restart lost ones.

        It waits a fraction of a second at most. A learner is lost if its process has ended, gives
        no sign of life, or works for much longer than its speed explains.

        Raises ConfigError if, at the start, a learner has other data or versions; ResourceError if
        no learner is left, or none can be reached any more.
        """
        before_s = self._looked_s
        replies = self.transport.poll([*self._calls], _POLL_S)
        self._looked_s = time.monotonic()
        # If the last call is long ago, the driver was busy, and has not seen what learners sent.
        away_s = self._looked_s - before_s - _POLL_S
        if away_s > _POLL_S:
            self._put_off_deadlines(away_s)

        events: list[Event] = []
        for call, reply in replies.items():
            pending = self._calls.pop(call, None)
            if pending is None:
                continue  # a call to a process that has ended
            learner = self.learners[pending.learner]
            self.wire_bytes += reply.num_bytes
            if reply.error:  # the learner has ended
                events.append(self._lose(learner, reply.error, has_run=True))
            elif pending.method == "ping":
                events += self._process_ping(learner, reply.value)
            elif pending.request is not None:  # of "run_round"
                events.append(RoundAnswer(learner, pending.request, reply.value))
            else:  # "states"
                events.append(StatesAnswer(pending.keys, reply.value))
        return events + self._check_learners()

    def _check_learners(self) -> list[Event]:
        """Start processes that are due, ping learners, and return the losses.

        A learner counts as lost if `LearnerRecord.fault` finds one, such as a ping without an
        answer for too long. Raises ResourceError if no learner is left.
        """
        rule = self._settings.engine
        restart_s = math.inf  # learners that join by themselves may do so at any time
        if self.transport.launches:
            restart_s = rule.restart_s
        losses: list[Event] = []
        now_s = time.monotonic()
        for number, learner in [*self.learners.items()]:  # a copy, as records are replaced
            # A process without a handle is planned: `started_s` is when it is due.
            if number not in self._handles and now_s >= learner.started_s:
                self._launch(learner)
            # In words why it counts as lost; empty if it does not.
            cause = learner.fault(now_s, heartbeat_s=rule.heartbeat_s, restart_s=restart_s)
            if cause:
                losses.append(self._lose(learner, cause))
            elif learner.joined and learner.asked_s is None and now_s > learner.next_s:
                self._ping(number)
                learner.asked_s = now_s
                learner.next_s = now_s + rule.heartbeat_s / _PINGS
        return losses

    def _put_off_deadlines(self, away_s: float) -> None:
        """Move the deadlines of all learners by `away_s`: so long the driver did not look."""
        for learner in self.learners.values():
            if learner.asked_s is not None:  # a ping waits for an answer
                learner.asked_s += away_s
            if learner.due_s is not None:  # its work must be done by a time
                learner.due_s += away_s

    def up_s(self) -> float:
        """Return the total seconds that learner processes have been up since the driver's start.

        A process is up from the request to start it; one that joins by itself, from when it has
        joined (`started_s` is then set anew). A process that has not joined is not counted yet, as
        it may be waiting for a node. If it has run, it is counted when it ends.
        """
        now_s = time.monotonic()
        present = [each for each in self.learners.values() if each.joined]
        return self._ended_up_s + sum(now_s - each.started_s for each in present)

    @property
    def num_present(self) -> int:
        """How many learners have joined and are not lost."""
        return sum(learner.joined for learner in self.learners.values())

    def _launch(self, learner: LearnerRecord) -> None:
        """Start a learner's process, or offer its number to machines that join; ping it.

        By its answer to this ping the process joins.
        """
        learner.started_s = time.monotonic()
        self._handles[learner.number] = self.transport.start(learner.number, learner.incarnation)
        self._ping(learner.number)

    def put(self, params: PyTree, kind: Hashable) -> Reference:
        """Store a trainer's parameters for learners; return the reference for `ask_for_round`.

        `params` are whole parameters, or a packed update. `kind` says which, and of which trainer:
        newer ones of the same kind replace older ones.
        """
        reference, sent_bytes = self.transport.put(params, kind)
        self.wire_bytes += sent_bytes
        return reference

    def pending(self, method: str) -> list[PendingCall]:
        """Return the calls of a method, such as "run_round", that have not been answered yet."""
        return [call for call in self._calls.values() if call.method == method]

    def ask_for_round(
        self, number: int, request: Request, inputs: Inputs, params: Reference | None
    ) -> None:
        """Ask a learner to run a round; `poll` returns a `RoundAnswer` later.

        Args:
          number: Number of the learner.
          request: Which trainer's round, and for which workers.
          inputs: Learning rates, and the inner states that the learner lacks.
          params: What `put` returned; None if the learner has the parameters.
        """
        call, sent_bytes = self.transport.submit(
            self._handles[number], "run_round", request=request, inputs=inputs, params=params
        )
        self.wire_bytes += sent_bytes
        self._calls[call] = PendingCall(number, "run_round", request=request)

    def ask_for_states(self, number: int, keys: list[StateKey]) -> None:
        """Ask a learner for the inner states with these keys; `poll` returns a `StatesAnswer`."""
        call, sent_bytes = self.transport.submit(self._handles[number], "states", wanted=keys)
        self.wire_bytes += sent_bytes
        self._calls[call] = PendingCall(number, "states", keys=keys)

    def _ping(self, number: int) -> None:
        """Ask a learner for a sign of life, which `poll` processes."""
        call, sent_bytes = self.transport.submit(self._handles[number], "ping")
        self.wire_bytes += sent_bytes
        self._calls[call] = PendingCall(number, "ping")

    def note(self, number: int, what: str, why: str, trainer: int | None = None) -> None:
        """Write a line about a learner to the ledger, and print it.

        Args:
          number: Number of the learner.
          what: What has happened to it, such as "joined" or "lost".
          why: The cause, in words.
          trainer: Id of the trainer in question; None: that of a worker that the learner runs.
        """
        learner = self.learners[number]
        if trainer is None:
            for worker_id in sorted(learner.worker_ids):
                if worker_id in self.control.trainer_of:  # else its trainer is no more there
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
        if learner.owner:  # the name of its machine, if the driver knows it by a key
            line["owner"] = learner.owner
            name += f" ({learner.owner})"
        self._write("learner", **line)
        if what in ("left", "lost"):
            what += f" ({counted(learner.num_responses, 'response')})"
        say(f"{name} {what}: {why}")

    def _process_ping(self, learner: LearnerRecord, sign: Sign) -> list[Event]:
        """Process a learner's answer to a ping.

        By its first answer a process joins, if it has the driver's data and versions. Returns a
        `Loss` if it must not join, or has left; otherwise nothing. Raises ConfigError if, at the
        start, a process of the driver must not join; ResourceError if no learner is left.
        """
        if not learner.joined:
            learner.owner = sign.owner
            return self._admit(learner, sign.hello)
        learner.asked_s = None  # no ping waits for an answer
        if sign.leaving:
            learner.leaving = True

        # Each time when memory does not suffice, a learner at least halves its micro-batches.
        if sign.max_batch_size <= learner.max_batch_size / 2:
            learner.max_batch_size = sign.max_batch_size
            why = f"out of memory; it takes micro-batches of at most {sign.max_batch_size}"
            self.note(learner.number, "limited", why)

        now_s = time.monotonic()
        if not sign.compiling:
            learner.compiling_s = None
        elif learner.compiling_s is None:
            learner.compiling_s = now_s
        if sign.compiling and learner.due_s is not None:
            # Its work may take longer than its speed predicts, as long as it compiles.
            learner.due_s = max(learner.due_s, now_s + self._settings.engine.heartbeat_s)

        if sign.has_left:
            self.let_go(learner)
            return [Loss(learner, "it has left")]
        return []

    def _admit(self, learner: LearnerRecord, hello: Hello) -> list[Event]:
        """Let a learner join if it has the driver's data and versions, as `hello` describes them.

        Otherwise its process is ended, and its loss is in the list that is returned. Raises
        ConfigError instead if the driver has started the process, and the run has not begun;
        ResourceError if no learner is left.
        """
        differing = self._differing(hello)  # in words; empty if nothing differs
        if not differing:
            learner.joined = True
            learner.lost_s = None
            learner.cause = ""
            about = hello.devices
            if not self.transport.launches:
                learner.started_s = time.monotonic()  # until then no machine had joined
                for name in _PRINTED_VERSIONS:
                    about += f", {name} {hello.versions.get(name)}"
            self.note(learner.number, "joined", said(about))
            return []

        fault = f"has {' and '.join(differing)} than the driver"
        if self.transport.launches and not self._has_started:
            raise ConfigError(
                f"learner {learner.number} ({said(hello.devices)}): {fault}; install the same, and"
                " give it the same files"
            )
        if self.transport.launches:
            learner.failures = math.inf  # the next process would differ too, so none is started
            fault += "; not started again"
        return [self._lose(learner, fault, has_run=True)]  # it has answered

    def _differing(self, hello: Hello) -> list[str]:
        """Return in words what differs between a learner and the driver; empty if nothing does."""
        differing = []
        if hello.fingerprint != self._setup.fingerprint:
            differing.append("other data")
        if hello.base != self._setup.base.fingerprint:
            differing.append("other base weights")
        # A learner that joins by itself has compared this package's version itself, and may have
        # other versions of the rest.
        if self.transport.launches and hello.versions != versions():
            differing.append("other versions of packages")
        return differing

    def let_go(self, learner: LearnerRecord) -> None:
        """End the process of a learner that was asked to leave; others get its workers at once.

        The ledger gets a line, and another process may take the learner's number.
        """
        self.note(learner.number, "left", "asked to end")
        learner.worker_ids = []  # the next process does not get them
        self._replace_process(learner.number)

    def _lose(self, learner: LearnerRecord, cause: str, *, has_run: bool = False) -> Loss:
        """Record the loss of a learner for the ledger, end its process, and plan the next one.

        Args:
          learner: The learner.
          cause: Why it is lost, in words.
          has_run: Whether the process has answered, so that it has run. Without an answer it has
            run only if it has joined: it may have waited for a node. Of losses of processes that
            have not run, with the same cause in a row, only the first is in the ledger.

        Raises:
          ResourceError: If no learner is left: no process runs, and none is planned.
        """
        number = learner.number
        has_run = has_run or learner.joined
        if has_run or learner.cause != cause:  # `cause` of a record is that of the process before
            self.note(number, "lost", cause)
        if learner.joined:  # what it did since its last report, or its start, is lost
            self.lost_s += time.monotonic() - max(learner.spent_s, learner.started_s)
        self._replace_process(number, cause, has_run=has_run)
        # Infinity: the learner's next process is never started.
        if all(math.isinf(each.started_s) for each in self.learners.values()):
            raise ResourceError(f"no learner is left; learner {number}: {cause}")
        return Loss(learner, cause)

    def _replace_process(self, number: int, cause: str = "", *, has_run: bool = True) -> None:
        """End a learner's process, and plan the next, which keeps its workers.

        Args:
          number: The learner's number.
          cause: Why it was lost; empty if it was asked to end.
          has_run: Whether its process has run. The pause before the next grows with the number of
            processes in a row that have run but not joined.
        """
        before = self.learners[number]
        now_s = time.monotonic()
        # Of the processes before this one; infinity if `_admit` has found that all would fail.
        failures = before.failures
        if before.joined:
            failures = 0.0
        elif has_run:
            failures += 1
        if has_run:  # `up_s` counts it from now on as one that has ended
            self._ended_up_s += now_s - before.started_s
        self._kill(number)
        self.learners[number] = LearnerRecord(
            number=number,
            incarnation=before.incarnation + 1,
            started_s=now_s + pause_s(failures),  # when the next process is due; infinity: never
            failures=failures,
            worker_ids=before.worker_ids,
            cause=cause,
            lost_s=before.lost_s or now_s,  # the time of the first, if several are lost in a row
        )

    def close(self) -> None:
        """End all learners, and what was started to reach them."""
        for number in [*self._handles]:
            self._kill(number)
        self._connection.close()

    def _kill(self, number: int) -> None:
        """End the process of the learner with this number; forget the calls it has not answered."""
        self._calls = {
            call: pending for call, pending in self._calls.items() if pending.learner != number
        }
        self.transport.kill(self._handles.pop(number))
