"""Start, call and restart the learner processes of a run; note their events for the ledger."""

import contextlib
import dataclasses
import time
from typing import Any, NamedTuple

from adloco_jax.data import Corpus
from adloco_jax.data.sources import DATA_SOURCES
from adloco_jax.elastic import cluster, members
from adloco_jax.elastic.learner import Given, Learner
from adloco_jax.errors import ConfigError, ResourceError
from adloco_jax.loop.control import Control
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.run.build import Run
from adloco_jax.run.resume import versions

_POLL_S = 0.2  # seconds to wait for answers between two checks of the learners


class Call(NamedTuple):
    """A call to a method of a learner's present process that has not been answered."""

    learner: int
    what: str  # "hello", "ping", "states", "prepare" or "play"
    about: Any  # for "play" the trainer's id; for "states" the workers


class Event(NamedTuple):
    """Something that the driver has to process: the answer of a learner, or the loss of one."""

    what: str  # "play", "states", "prepare" or "lost"
    learner: members.Learner  # the learner's process that has answered or ended
    about: Any  # as in the call
    value: Any  # the answer, or the cause of a loss


class Fleet:
    """Starts the learner processes of a run, calls them, and restarts those that are lost."""

    def __init__(self, run: Run):
        """Store the arguments; `start_all` connects to a cluster and starts learners."""
        self._run, self._settings = run, run.settings
        self.learners: dict[int, members.Learner] = {}
        self.control: Control  # the control after the newest round, to which ledger lines refer
        self.changes: list[dict] = []  # ledger lines to write after the next round
        self._handles: dict[int, Any] = {}
        self._processes: dict[int, tuple[str, int]] = {}
        self._calls: dict[Any, Call] = {}
        self._causes: dict[int, str] = {}  # cause of the last loss, by learner
        self._cluster = contextlib.ExitStack()
        self._given: Any = None
        self._count = 0  # number of learners that the run needs
        self._ended_up_s = 0.0  # seconds up of processes that have ended
        self._has_started = False

    def start_all(self, num_workers: int) -> None:
        """Start all learners, and wait until they have joined or `engine.restart_s` has passed."""
        rule = self._settings.engine
        self._count = count = rule.max_learners or num_workers
        self._cluster.enter_context(cluster.connected(rule.address, count))
        corpus = self._run.corpus
        own = isinstance(corpus, Corpus)
        data, arch = self._settings.data.source, self._settings.model.arch
        entries = {
            "ARCHITECTURES": {arch: ARCHITECTURES[arch]},
            "DATA_SOURCES": {data: DATA_SOURCES[data]},
        }
        log = self._run.workdir.resolve() / "learners" / str(int(time.time() * 1000))
        log.mkdir(parents=True)
        nowhere = dataclasses.replace(self._run.spec.machine, devices=())
        spec = dataclasses.replace(self._run.spec, machine=nowhere)
        given = Given(
            self._settings,
            spec,
            None if own else corpus,
            getattr(corpus, "commit", ""),
            entries,
            str(log),
        )
        self._given = cluster.put(given)
        for number in range(count):
            self._start(number, 0)
        deadline_s = time.monotonic() + rule.restart_s
        while time.monotonic() < deadline_s and self._absent():
            self.poll()
            if len(self._causes) == count:
                break
        there, least = count - len(self._absent()), max(rule.quorum or 1, 1)
        if there < min(least, count) or there == 0:
            cause = "".join(f"; learner {n}: {why}" for n, why in [*self._causes.items()][:1])
            raise ResourceError(
                f"engine.quorum = {rule.quorum}: {there} of {count} learners have started within"
                f" {rule.restart_s:g} s{cause}; start more nodes, or lower engine.quorum"
            )
        self._has_started = True

    def poll(self) -> list[Event]:
        """Return what has happened: answers and losses of learners. Restart lost learners.

        Raises:
          ConfigError: If, at the start, a learner has other data or versions than the driver.
          ResourceError: If the cluster is gone.
        """
        rule, events = self._settings.engine, []
        for call, outcome in cluster.poll([*self._calls], _POLL_S).items():
            asked = self._calls.pop(call, None)
            if asked is None:
                continue  # a call to a process that has ended
            learner = self.learners[asked.learner]
            if outcome.error:
                events.append(self._lose(learner, outcome.error))
            elif asked.what == "hello":
                events += self._greet(learner, outcome.value)
            elif asked.what == "ping":
                self._hear(learner, outcome.value)
            else:
                events.append(Event(asked.what, learner, asked.about, outcome.value))
        now_s = time.monotonic()
        for number, learner in [*self.learners.items()]:
            how = {"heartbeat_s": rule.heartbeat_s, "restart_s": rule.restart_s}
            if cause := learner.fault(now_s, **how):
                events.append(self._lose(learner, cause))
            elif learner.joined and learner.asked_s is None and now_s > learner.next_s:
                self.ask(number, "ping", about=None)
                learner.asked_s, learner.next_s = now_s, now_s + rule.heartbeat_s / 4
        return events

    def up_s(self) -> float:
        """Total seconds that learner processes have been up, from the request to start each one.

        Learners that have not joined yet do not count, because they may be waiting for room.
        """
        now_s = time.monotonic()
        there = (each for each in self.learners.values() if each.joined)
        return self._ended_up_s + sum(now_s - each.started_s for each in there)

    def _absent(self) -> list[int]:
        return [n for n, learner in self.learners.items() if not learner.joined]

    def _start(self, number: int, life: int) -> None:
        """Start the next process of a learner; the learner's workers wait for this process."""
        before, now_s = self.learners.get(number), time.monotonic()
        learner = self.learners[number] = members.Learner(number, life, now_s)
        if before is not None:
            learner.streams, learner.lost_s = before.streams, before.lost_s or now_s
        self._handles[number] = cluster.start(Learner, self._count, number, life, self._given)
        self.ask(number, "hello", about=None)

    def asked(self, what: str) -> set[int]:
        """The numbers of learners that have not yet answered a call of the method `what`."""
        return {call.learner for call in self._calls.values() if call.what == what}

    def ask(self, number: int, what: str, *arguments: Any, about: Any) -> None:
        """Call a method of a learner without waiting; `poll` returns the answer later."""
        aside = what in ("ping", "states")
        call = cluster.submit(self._handles[number], what, *arguments, aside=aside)
        self._calls[call] = Call(number, what, about)

    def host(self, stream: int) -> int | None:
        """The number of the learner that hosts the worker of a stream.

        None: no learner hosts this worker, or the learner's process has not joined yet.
        """
        for number, learner in self.learners.items():
            if stream in learner.streams:
                return number if learner.joined else None
        return None

    def note(self, number: int, what: str, why: str, trainer: int | None = None) -> None:
        """Keep a line about a learner, to be written to the ledger after the next round."""
        if trainer is None and (streams := self.learners[number].streams):
            owners = zip(self.control.streams, self.control.owners, strict=True)
            owner = next((m for stream, m in owners if stream in streams), None)
            trainer = None if owner is None else self.control.trainers[owner].id
        line = {"event": "learner", "round": self.control.round, "learner": number}
        self.changes.append({**line, "trainer": trainer, "what": what, "why": why})

    def _greet(self, learner: members.Learner, found: dict) -> list[Event]:
        """Process the first answer of a learner's process: it has joined.

        A learner with other data or other versions of packages than the driver counts as lost.
        """
        number = learner.number
        self._processes[number] = tuple(found["process"])
        here = {"fingerprint": self._run.corpus.fingerprint, "versions": versions()}
        names = {"fingerprint": "other data", "versions": "other versions of packages"}
        if differing := [names[name] for name in here if found[name] != here[name]]:
            fault = f"has {' and '.join(differing)} than the driver"
            if self._has_started:
                return [self._lose(learner, fault)]
            raise ConfigError(
                f"learner {number} ({found['devices']}): {fault}; install the same, and give it the"
                " same files"
            )
        learner.joined, learner.lost_s = True, None
        self._causes.pop(number, None)
        self.note(number, "joined", found["devices"])
        return []

    def _hear(self, learner: members.Learner, found: dict) -> None:
        """Process the answer to a heartbeat; a learner that compiles gets more time."""
        learner.asked_s = None
        learner.leaving |= found["leaving"]
        if found["compiling"] and learner.due_s is not None:
            learner.due_s = max(learner.due_s, time.monotonic() + self._settings.engine.heartbeat_s)

    def _lose(self, learner: members.Learner, cause: str) -> Event:
        """Note the loss of a learner for the ledger, end its process, and start the next one."""
        number = learner.number
        if learner.joined or self._causes.get(number) != cause:
            self.note(number, "lost", cause)
        self._causes[number] = cause
        self.start_again(number)
        return Event("lost", learner, None, cause)

    def start_again(self, number: int) -> None:
        """End a learner's process, and start the next one."""
        learner = self.learners[number]
        if learner.joined:
            self._ended_up_s += time.monotonic() - learner.started_s
        self._kill(number)
        self._start(number, learner.life + 1)

    def close(self) -> None:
        """End all learners, and the cluster if this run started it."""
        for number in [*self._handles]:
            self._kill(number)
        self._cluster.close()

    def _kill(self, number: int) -> None:
        self._calls = {call: c for call, c in self._calls.items() if c.learner != number}
        cluster.kill(self._handles.pop(number), self._processes.pop(number, None))
