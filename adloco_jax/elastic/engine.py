"""The elastic engine: workers run in learners, which may come, go, hang and die during a run.

It implements `adloco.Engine`. The driver holds the trainers' parameters and outer states; inner
states are with the learners, and here only where a worker has to be given one: at the start, after
a merge, when it moves. Each trainer has a clock of its own: `ready` begins the rounds of all that
may go on, and waits for the first to end.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.outer import Differences, apply_differences
from adloco_jax.core.types import Ensemble, GradientStats, put, take
from adloco_jax.data import Corpus
from adloco_jax.data.sources import DATA_SOURCES
from adloco_jax.elastic import cluster, members
from adloco_jax.elastic.learner import Answer, Given, Learner, Order, Work
from adloco_jax.engine.evaluate import HeldOut, mean_loss, merged_params, trainer_params
from adloco_jax.engine.inputs import EXTRAS
from adloco_jax.engine.local import Metrics, Outcome, count_skips, without_broken
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.replace import merged, replace, spawned
from adloco_jax.engine.spec import num_bytes
from adloco_jax.errors import ConfigError, ResourceError
from adloco_jax.loop.adloco import State, Stats
from adloco_jax.loop.control import Control, RoundPlan, StateBytes, count_round
from adloco_jax.loop.plans import learning_rates, planned, round_plans, test_count
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.run.build import Run
from adloco_jax.run.resume import versions
from adloco_jax.settings import Settings

_POLL_S = 0.2  # between two looks at who is there
_TRIES = 3  # of a trainer's round, without one answer, before the run ends


class Call(NamedTuple):
    """Something that a learner's present life has been asked for."""

    learner: int
    what: str  # "hello", "ping", "states" or "play"
    about: Any  # of "play" the trainer's id; of "states" the workers


@dataclass
class Round:
    """A trainer's round under way."""

    plan: RoundPlan
    order: Order  # without work
    rate_T: np.ndarray
    start_s: float
    wire_bytes: int
    awaited: set[int] = field(default_factory=set)  # learners that have not answered
    reported: set[int] = field(default_factory=set)
    answers: dict[int, Answer] = field(default_factory=dict)  # by stream
    quorum_s: float | None = None  # when there were answers enough


class UnderWay(NamedTuple):
    """A round that learners have ended, for `finish`."""

    trainers: list[int]  # positions
    lines: list[dict]
    outcomes: list[Outcome]
    step_s: float


class RayEngine:
    """Runs rounds in learners on a Ray cluster; see `adloco.Engine`."""

    def __init__(self, run: Run, programs: Programs, heldout: HeldOut):
        """Connects to no cluster and starts no learner yet: `ready` does.

        Args:
          run: What to run.
          programs: Of the driver's own devices, which evaluate.
          heldout: Its guard rows judge merges.
        """
        self.settings, self.spec, self.run = run.settings, run.spec, run
        self.programs, self.heldout = programs, heldout
        self.underway: Control
        self.rounds: dict[int, Round] = {}  # by trainer's id
        self.learners: dict[int, members.Learner] = {}
        self._handles: dict[int, Any] = {}
        self._processes: dict[int, tuple[str, int]] = {}
        self._calls: dict[Any, Call] = {}
        self._cluster = contextlib.ExitStack()
        self._given: Any = None
        self._count = 0  # of learners that there are to be
        self._finished_s = time.monotonic()  # when the last round ended
        self._seeds: dict[int, PyTree] = {}  # inner states to send, by stream
        self._found: dict[tuple[int, int, int], PyTree | None] = {}  # answers of `states`
        self._lost: set[int] = set()  # streams whose inner state went with its learner
        self._changes: list[dict] = []  # ledger lines until the next boundary
        self._failures: dict[int, int] = {}  # rounds without an answer, by trainer's id
        self._causes: dict[int, str] = {}  # of the last loss, by learner
        how = {"outer_tx": run.spec.outer_tx, "aggregate": run.spec.aggregate}
        how |= {"precision": run.spec.outer.precision, "skip_single": run.spec.outer.skip_single}
        self._apply = jax.jit(functools.partial(apply_differences, **how))

    # -- The protocol --------------------------------------------------------------------------

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes that a merge or a reassignment of workers sends."""
        return self.spec.state_bytes

    def ready(self, state: State) -> list[int]:
        """The trainers whose rounds have ended, all of them where they must keep together.

        Raises:
          ConfigError: If a learner has other data or versions than the driver.
          ResourceError: If too few learners start, a round fails again and again, or the cluster is
            gone.
        """
        self.underway = control = state.control
        if not self.learners:
            self._start_all(len(control.owners))
        self._adopt(state)
        together = _keep_together(self.settings)
        while True:
            self._begin(state)
            over = [
                position
                for position, trainer in enumerate(control.trainers)
                if trainer.id in self.rounds and self._is_over(self.rounds[trainer.id])
            ]
            if over and (not together or len(over) == len(control.trainers)):
                return over
            self._poll()

    def batch(self, state: State, plans: Mapping[int, RoundPlan]) -> dict[int, Round]:
        """The rounds that have ended, by the trainers' positions; their learners read the rows."""
        trainers = state.control.trainers
        return {m: self.rounds.pop(trainers[m].id) for m in sorted(plans)}

    def gradient_stats(self, state: State, batch: dict[int, Round]) -> Stats:
        """The statistics that counted workers have sent."""
        stats: Stats = []
        for position, each in batch.items():
            tested = [a for a in self._counted(each).values() if a.num_tested]
            if tested:
                parts = [vars(answer.stats_R) for answer in tested]
                stats_R = GradientStats(
                    **{name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
                )
                counts = np.array([answer.num_tested for answer in tested])
                stats.append(((position,), (0,) * len(tested), counts, stats_R))
        return stats

    def outer_step(self, state: State, batch: dict[int, Round]) -> tuple[State, UnderWay]:
        """The outer updates of trainers whose rounds have ended."""
        ensemble, control = state.ensemble.replace(inner_state_R=None), state.control
        lines, outcomes, counted = [], [], {}
        for position, each in batch.items():
            answers, workers = self._counted(each), control.workers_of(position)
            by_worker = {w: answers.get(control.streams[w]) for w in workers}
            sub, norm_M = self._outer_update(take(ensemble, [position]), by_worker, each)
            ensemble = put(ensemble, [position], sub)
            counted |= {
                w: (a.num_updates, a.num_sequences) for w, a in by_worker.items() if a is not None
            }
            line = planned(control, position, each.plan, each.rate_T)
            lines.append(line | {"workers_counted": len(answers), "wire_bytes": each.wire_bytes})
            outcomes.append(_outcome([*by_worker.values()], each.plan, float(norm_M[0])))
            self._close(control, position, each, answers)
        control, spent = count_round(
            control,
            {position: each.plan for position, each in batch.items()},
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            counted=counted,
        )
        control.round = min(trainer.rounds for trainer in control.trainers)
        lines = [line | cost for line, cost in zip(lines, spent, strict=True)]
        now_s = time.monotonic()  # a round's seconds that another has not had before
        step_s = now_s - max(self._finished_s, min(each.start_s for each in batch.values()))
        self._finished_s = now_s
        ensemble = ensemble.replace(round=np.int32(control.round))
        return State(ensemble, control), UnderWay([*batch], lines, outcomes, step_s)

    def look_ahead(self, control: Control) -> None:
        """Nothing: learners read their own rows, and compile their own programs."""

    def finish(self, state: State, underway: UnderWay) -> tuple[State, Metrics, list[dict]]:
        """Counts skipped updates and retires broken trainers; changes include the learners'."""
        for line, outcome in zip(underway.lines, underway.outcomes, strict=True):
            line["skipped_updates"] = int(outcome.skipped_SR.sum())
        control, broken = count_skips(state.control, underway.outcomes, underway.trainers)
        state, quarantined = without_broken(State(state.ensemble, control), broken)
        if broken and state.control.trainers:
            state.control.round = min(trainer.rounds for trainer in state.control.trainers)
        self.underway = state.control
        changes, self._changes = [*self._changes, *quarantined], []
        return state, Metrics(underway.lines, underway.outcomes, underway.step_s, 0.0), changes

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Nothing is left unsynchronised: fragments are refused."""
        return state, []

    def guard_losses(self, state: State) -> list[float]:
        """Each trainer's loss on the guard's rows, nats/token."""
        positions = range(len(state.control.trainers))
        return [self._guard_loss(trainer_params(state.ensemble, m)) for m in positions]

    def merged_loss(self, state: State, members: Sequence[int], weights: Sequence[float]) -> float:
        """The loss that the merged trainer would have on the guard's rows, nats/token."""
        return self._guard_loss(merged_params(state.ensemble, tuple(members), tuple(weights)))

    def _guard_loss(self, params: PyTree) -> float:
        return mean_loss(self.programs, params, self.heldout.guard_EL, self.heldout.batch_size)

    def merge(
        self,
        ensemble: Ensemble,
        members: Sequence[int],
        weights: Sequence[float],
        owners: Sequence[int],
    ) -> Ensemble:
        """`core.merge`, then `core.reassign`, with the inner states that learners hold."""
        whole = self.complete(State(ensemble, self.underway))
        weights_n = np.asarray(weights, np.float32)
        return replace(merged, whole, weights_n, tuple(members), tuple(owners))

    def spawn(self, ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
        """`core.spawn`, with the inner states that learners hold."""
        whole = self.complete(State(ensemble, self.underway))
        return replace(spawned, whole, trainer, num_workers)

    def complete(self, state: State) -> Ensemble:
        """The ensemble with its workers' inner states, fetched from learners; waits."""
        ensemble, control = state
        if ensemble.inner_state_R is not None or self.spec.reset_inner_state:
            return self._with_fresh(ensemble)
        states = self._inner_states(control, range(len(control.owners)))
        inner_R = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
        return ensemble.replace(inner_state_R=jax.tree.map(jnp.asarray, inner_R))

    def close(self) -> None:
        """Ends all learners, and a cluster of our own."""
        for number in [*self._handles]:
            self._kill(number)
        self._cluster.close()

    # -- Rounds --------------------------------------------------------------------------------

    def _begin(self, state: State) -> None:
        """Begins the rounds of trainers that may go on and have a learner that is free."""
        control, settings, now_s = state.control, self.settings, time.monotonic()
        idle = [
            m
            for m, trainer in enumerate(control.trainers)
            if trainer.id not in self.rounds and _may_begin(control, m, settings)
        ]
        if not idle:
            return
        self._divide(control, idle)
        plans = round_plans(control, settings, idle)
        tokens = self.spec.sequence_length * sum(
            plan.num_sequences * len(control.workers_of(m)) for m, plan in plans.items()
        )
        busy = self._asked("play")
        for position, plan in plans.items():
            workers = control.workers_of(position)
            hosts = {w: self._host(control.streams[w]) for w in workers}
            free = {w: n for w, n in hosts.items() if n is not None and n not in busy}
            if not free:
                continue
            rate_T = learning_rates(control, position, plan, settings, round_tokens=tokens)
            order = Order(
                control.trainers[position].id,
                control.rounds_of(position) + 1,
                plan.micro_batch_size,
                plan.num_accum_steps,
                len(workers) == 1,
                (),
            )
            params = jax.device_get(trainer_params(state.ensemble, position))
            sent_bytes = num_bytes(params)
            each = Round(plan, order, rate_T, now_s, sent_bytes * len(set(free.values())))
            reference = cluster.put(params)
            updates = dict.fromkeys(free, plan.num_updates)
            if settings.engine.steps == "by_speed":
                speeds = {w: self.learners[n].sequence_s for w, n in free.items()}
                updates = members.updates_by_speed(plan.num_updates, speeds)
            count = test_count(plan, len(workers), settings)
            for number in sorted(set(free.values())):
                work = []
                for worker in (w for w, host in free.items() if host == number):
                    _, stream, start = control.reads(worker)
                    seed = self._seeds.get(stream)
                    each.wire_bytes += 0 if seed is None else num_bytes(seed)
                    tested = min(count, updates[worker] * plan.num_sequences // plan.num_updates)
                    work.append(Work(stream, start, updates[worker], tested, rate_T, seed))
                self._play(number, order._replace(work=tuple(work)), reference)
                each.awaited.add(number)
            self.rounds[order.trainer] = each

    def _play(self, number: int, order: Order, params: Any) -> None:
        learner = self.learners[number]
        self._ask(number, "play", order, params, about=order.trainer)
        sequences = sum(work.num_updates for work in order.work)
        sequences *= order.micro_batch_size * order.num_accum_steps
        learner.due_s = members.deadline(
            learner, sequences, time.monotonic(), heartbeat_s=self.settings.engine.heartbeat_s
        )

    def _is_over(self, each: Round) -> bool:
        """Whether a round ends now, with or without some answers."""
        rule, now_s = self.settings.engine, time.monotonic()
        reported, awaited = len(each.reported), len(each.awaited)
        if each.quorum_s is None and members.has_quorum(reported, awaited, rule.quorum):
            each.quorum_s = now_s
        since_s = None if each.quorum_s is None else now_s - each.quorum_s
        how = {"quorum": rule.quorum, "since_quorum_s": since_s, "grace_s": rule.grace_s}
        return members.is_over(reported, awaited, **how)

    def _counted(self, each: Round) -> dict[int, Answer]:
        """The answers that count, by stream; all of them if none is usable."""
        norms = {stream: answer.norm for stream, answer in each.answers.items()}
        out = members.rejected(norms, self.settings.engine.max_norm_ratio)
        kept = {stream: a for stream, a in each.answers.items() if stream not in out}
        return kept or each.answers

    def _outer_update(
        self, sub: Ensemble, by_worker: Mapping[int, Answer | None], each: Round
    ) -> tuple[Ensemble, np.ndarray]:
        """One trainer's outer update, on the differences that have arrived."""
        some = next(answer for answer in by_worker.values() if answer is not None)
        missing = jax.tree.map(np.zeros_like, some.differences)
        parts = [missing if a is None else a.differences for a in by_worker.values()]
        differences: Differences = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        weights_R = np.array(
            [0 if a is None else a.num_sequences for a in by_worker.values()], np.float32
        )
        extra_M = {
            name: np.array([EXTRAS[name](each.rate_T, each.plan, self.settings)], np.float32)
            for name in self.spec.extras
        }
        return self._apply(sub, differences, weights_R=weights_R, extra_M=extra_M)

    def _close(
        self, control: Control, position: int, each: Round, answers: Mapping[int, Answer]
    ) -> None:
        """Notes who was not counted; what was counted is confirmed by the next round."""
        trainer = control.trainers[position].id
        for stream in answers:
            self._seeds.pop(stream, None)
        self._failures.pop(trainer, None)
        for number in sorted(each.awaited):
            self._note(number, "late", "no answer within the grace of the quorum", trainer)
        for stream in sorted(each.answers.keys() - answers.keys()):
            number = self._host(stream)
            if number is not None:
                cause = f"stream {stream}: an update of norm {each.answers[stream].norm:.3g}"
                self._note(number, "rejected", cause, trainer)

    # -- Membership ----------------------------------------------------------------------------

    def _start_all(self, num_workers: int) -> None:
        """Starts the learners, and waits for as many as there can be."""
        rule = self.settings.engine
        self._count = count = rule.max_learners or num_workers
        self._cluster.enter_context(cluster.connected(rule.address, count))
        corpus = self.run.corpus
        own = isinstance(corpus, Corpus)
        data, arch = self.settings.data.source, self.settings.model.arch
        entries = {
            "ARCHITECTURES": {arch: ARCHITECTURES[arch]},
            "DATA_SOURCES": {data: DATA_SOURCES[data]},
        }
        log = self.run.workdir.resolve() / "learners" / str(int(time.time() * 1000))
        log.mkdir(parents=True)
        nowhere = dataclasses.replace(self.spec.machine, devices=())
        spec = dataclasses.replace(self.spec, machine=nowhere)
        given = Given(
            self.settings,
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
            self._poll()
            if len(self._causes) == count:
                break
        there, least = count - len(self._absent()), max(rule.quorum or 1, 1)
        if there < min(least, count) or there == 0:
            cause = "".join(f"; learner {n}: {why}" for n, why in [*self._causes.items()][:1])
            raise ResourceError(
                f"engine.quorum = {rule.quorum}: {there} of {count} learners have started within"
                f" {rule.restart_s:g} s{cause}; start more nodes, or lower engine.quorum"
            )

    def _absent(self) -> list[int]:
        return [n for n, learner in self.learners.items() if not learner.joined]

    def _start(self, number: int, life: int) -> None:
        """Starts a learner's next life, which its workers wait for."""
        before, now_s = self.learners.get(number), time.monotonic()
        learner = self.learners[number] = members.Learner(number, life, now_s)
        if before is not None:
            learner.streams, learner.lost_s = before.streams, before.lost_s or now_s
        self._handles[number] = cluster.start(Learner, self._count, number, life, self._given)
        self._ask(number, "hello", about=None)

    def _asked(self, what: str) -> set[int]:
        """The learners that have not answered to this yet."""
        return {call.learner for call in self._calls.values() if call.what == what}

    def _ask(self, number: int, what: str, *arguments: Any, about: Any) -> Any:
        aside = what in ("ping", "states")
        call = cluster.submit(self._handles[number], what, *arguments, aside=aside)
        self._calls[call] = Call(number, what, about)
        return call

    def _poll(self) -> None:
        """Takes what learners have answered; starts those anew that are lost."""
        rule = self.settings.engine
        for call, outcome in cluster.poll([*self._calls], _POLL_S).items():
            asked = self._calls.pop(call, None)
            if asked is None:
                continue  # of a life that has ended since
            if outcome.error:
                self._lose(asked.learner, outcome.error)
                continue
            learner = self.learners[asked.learner]
            getattr(self, f"_on_{asked.what}")(learner, asked, outcome.value)
        now_s = time.monotonic()
        for number, learner in [*self.learners.items()]:
            how = {"heartbeat_s": rule.heartbeat_s, "restart_s": rule.restart_s}
            if cause := learner.fault(now_s, **how):
                self._lose(number, cause)
            elif learner.joined and learner.asked_s is None and now_s > learner.next_s:
                self._ask(number, "ping", about=None)
                learner.asked_s, learner.next_s = now_s, now_s + rule.heartbeat_s / 4

    def _on_hello(self, learner: members.Learner, asked: Call, found: dict) -> None:
        number = learner.number
        self._processes[number] = tuple(found["process"])
        here = {"fingerprint": self.run.corpus.fingerprint, "versions": versions()}
        names = {"fingerprint": "other data", "versions": "other versions of packages"}
        if differing := [names[name] for name in here if found[name] != here[name]]:
            fault = f"has {' and '.join(differing)} than the driver"
            if self.rounds:
                return self._lose(number, fault)
            raise ConfigError(
                f"learner {number} ({found['devices']}): {fault}; install the same, and give it the"
                " same files"
            )
        learner.joined, learner.lost_s = True, None
        self._causes.pop(number, None)
        self._note(number, "joined", found["devices"])

    def _on_ping(self, learner: members.Learner, asked: Call, found: dict) -> None:
        learner.asked_s = None
        learner.leaving |= found["leaving"]
        if found["compiling"] and learner.due_s is not None:
            learner.due_s = max(learner.due_s, time.monotonic() + self.settings.engine.heartbeat_s)

    def _on_states(self, learner: members.Learner, asked: Call, found: list) -> None:
        self._found |= dict(zip(asked.about, found, strict=True))

    def _on_play(self, learner: members.Learner, asked: Call, answers: list[Answer]) -> None:
        learner.due_s = None
        done = sum(answer.num_sequences for answer in answers)
        learner.sequence_s = sum(answer.seconds for answer in answers) / done
        each = self.rounds.get(asked.about)
        if each is None or asked.learner not in each.awaited:
            return  # too late: the round has ended
        each.awaited.discard(asked.learner)
        each.reported.add(asked.learner)
        for answer in answers:
            each.answers[answer.stream] = answer
            each.wire_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(answer.differences))

    def _lose(self, number: int, cause: str) -> None:
        """Ends a learner that is lost, and starts its next life."""
        learner = self.learners[number]
        if learner.joined:
            self._lost.update(s for s in learner.streams if s not in self._seeds)
        if learner.joined or self._causes.get(number) != cause:
            self._note(number, "lost", cause)
        self._causes[number] = cause
        self._kill(number)
        for trainer, each in [*self.rounds.items()]:
            each.awaited.discard(number)
            if not (each.awaited or each.answers):  # begun again, once there is a learner
                del self.rounds[trainer]
                self._failures[trainer] = self._failures.get(trainer, 0) + 1
                if self._failures[trainer] >= _TRIES:
                    raise ResourceError(
                        f"trainer {trainer}: its round has failed {_TRIES} times; learner"
                        f" {number}: {cause}"
                    )
        self._start(number, learner.life + 1)

    def _kill(self, number: int) -> None:
        self._calls = {call: c for call, c in self._calls.items() if c.learner != number}
        cluster.kill(self._handles.pop(number), self._processes.pop(number, None))

    def _host(self, stream: int) -> int | None:
        """The learner that has a worker and is there."""
        for number, learner in self.learners.items():
            if stream in learner.streams:
                return number if learner.joined else None
        return None

    def _divide(self, control: Control, idle: Sequence[int]) -> None:
        """Gives the workers of trainers at a boundary to learners."""
        owners = zip(control.streams, control.owners, strict=True)
        trainers = {stream: control.trainers[owner].id for stream, owner in owners}
        busy = self._asked("play")
        self._let_leave(control, busy)
        now_s, patience_s = time.monotonic(), self.settings.engine.restart_s
        movable = {control.streams[w] for m in idle for w in control.workers_of(m)}
        movable -= {s for n in busy for s in self.learners[n].streams}
        there = [each for each in self.learners.values() if each.joined]
        away = [each for each in self.learners.values() if not each.joined and each.streams]
        away = [each for each in away if each.lost_s and now_s - each.lost_s < patience_s]
        returning = {stream for each in away for stream in each.streams}
        hosts = members.assign(there, trainers, movable, returning=returning)
        before = {s: each.number for each in self.learners.values() for s in each.streams}
        moved = {s for s, number in hosts.items() if s in before and before[s] != number}
        kept = {s for s in moved if self.learners[before[s]].joined}
        lost = {s for s in hosts if s in self._lost}
        workers = [w for w, s in enumerate(control.streams) if s in kept | lost]
        for worker, state in zip(workers, self._inner_states(control, workers), strict=True):
            self._seeds[control.streams[worker]] = state
        self._lost -= lost
        for each in self.learners.values():
            each.streams = sorted(
                [s for s, number in hosts.items() if number == each.number]
                + [s for s in each.streams if s in trainers and s not in hosts]
            )

    def _let_leave(self, control: Control, busy: set[int]) -> None:
        """Fetches the workers of learners that were asked to stop, and lets those learners exit."""
        for number, learner in [*self.learners.items()]:
            if not (learner.leaving and learner.joined) or number in busy:
                continue
            workers = [w for w, s in enumerate(control.streams) if s in learner.streams]
            for worker, state in zip(workers, self._inner_states(control, workers), strict=True):
                self._seeds[control.streams[worker]] = state
            if not learner.joined:
                continue  # it has not waited
            self._note(number, "left", "asked to end")
            learner.streams = []
            self._kill(number)
            self._start(number, learner.life + 1)

    # -- Inner states --------------------------------------------------------------------------

    def _adopt(self, state: State) -> None:
        """Takes the inner states of an ensemble that has some, to send them to the learners."""
        inner_R = state.ensemble.inner_state_R
        if inner_R is None or self.spec.reset_inner_state or self.rounds:
            return
        inner_R = jax.device_get(inner_R)
        for worker, stream in enumerate(state.control.streams):
            self._seeds[stream] = jax.tree.map(lambda leaf, w=worker: leaf[w], inner_R)
        self._lost.clear()

    def _inner_states(self, control: Control, workers: Sequence[int]) -> list[PyTree]:
        """Workers' inner states: from here, from their learners, or those of their peers.

        A state that is lost is the mean of its trainer's other workers', as of a worker that joins,
        or a fresh one where there are none.
        """
        if self.spec.reset_inner_state:
            return [None for _ in workers]
        wanted = {*workers}
        for worker in workers:
            if control.streams[worker] in self._lost:
                wanted |= {*control.workers_of(control.owners[worker])}
        self._fetch([control.reads(w) for w in sorted(wanted)])
        found = {w: self._state_here(control, w) for w in wanted}
        states = []
        for worker in workers:
            state = found[worker]
            if state is None:
                peers = control.workers_of(control.owners[worker])
                others = [found[w] for w in peers if found.get(w) is not None]
                state = _mean(others) if others else self._fresh()
            states.append(state)
        return states

    def _state_here(self, control: Control, worker: int) -> PyTree | None:
        key = control.reads(worker)
        return self._seeds.get(key[1], self._found.get(key))

    def _fetch(self, keys: Sequence[tuple[int, int, int]]) -> None:
        """Asks learners for the states of workers, by trainer, stream and cursor; waits."""
        self._found.clear()
        asked = {}
        for key in keys:
            number = self._host(key[1])
            if key[1] not in self._seeds and key[1] not in self._lost and number is not None:
                asked.setdefault(number, []).append(key)
        for number, wanted in asked.items():
            self._ask(number, "states", wanted, about=wanted)
        while self._asked("states"):
            self._poll()

    def _fresh(self) -> PyTree:
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.spec.params)
        return jax.device_get(self.spec.inner_tx.init(zeros))

    def _with_fresh(self, ensemble: Ensemble) -> Ensemble:
        if ensemble.inner_state_R is not None:
            return ensemble
        fresh = self._fresh()  # a round begins with one, whatever was saved
        inner_R = jax.tree.map(lambda leaf: np.stack([leaf] * ensemble.num_workers), fresh)
        return ensemble.replace(inner_state_R=jax.tree.map(jnp.asarray, inner_R))

    def _note(self, number: int, what: str, why: str, trainer: int | None = None) -> None:
        if trainer is None and (streams := self.learners[number].streams):
            control = self.underway
            owners = zip(control.streams, control.owners, strict=True)
            trainer = next((control.trainers[m].id for s, m in owners if s in streams), None)
        line = {"event": "learner", "round": self.underway.round, "learner": number}
        self._changes.append({**line, "trainer": trainer, "what": what, "why": why})


def _may_begin(control: Control, position: int, settings: Settings) -> bool:
    """Whether a trainer may go on: it waits for others before a merge, and at the end."""
    rounds, every = control.rounds_of(position), settings.merge.every_rounds
    if _keep_together(settings):
        return rounds == control.round
    waits = settings.merge.policy != "none" and len(control.trainers) > 1
    last = (control.round // every + 1) * every if waits else settings.num_rounds
    return rounds < min(last, settings.num_rounds)


def _keep_together(settings: Settings) -> bool:
    """Whether trainers decide by what all of them have done, and so wait for one another."""
    return settings.ensemble.initial_workers is not None or settings.num_tokens is not None


def _outcome(answers: Sequence[Answer | None], plan: RoundPlan, norm: float) -> Outcome:
    """Losses and skipped updates of a trainer's workers; of those not counted NaN, not skipped."""
    shape = (plan.num_updates, len(answers))
    loss_SR, skipped_SR = np.full(shape, np.nan), np.zeros(shape, bool)
    for column, answer in enumerate(answers):
        if answer is not None:  # its updates are the last ones
            loss_SR[-answer.num_updates :, column] = answer.loss_SR[:, 0]
            skipped_SR[-answer.num_updates :, column] = answer.skipped_SR[:, 0]
    return Outcome(loss_SR, skipped_SR, norm)


def _mean(states: Sequence[PyTree]) -> PyTree:
    """The mean of inner states, as `core.spawn` forms it: whole numbers are rounded."""

    def mean(*leaves: np.ndarray) -> np.ndarray:
        stack = np.stack(leaves)
        if (stack == stack[:1]).all():
            return stack[0]
        value = stack.astype(np.float64).mean(axis=0)
        is_real = np.issubdtype(stack.dtype, np.inexact)
        return (value if is_real else np.round(value)).astype(stack.dtype)

    return jax.tree.map(mean, *states)
