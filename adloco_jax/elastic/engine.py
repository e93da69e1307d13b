"""The elastic engine: `loop.adloco.Engine` in the driver, with workers in learners.

The driver holds parameters and outer states, learners the inner states, which are sent only at the
start, after a merge, and when a worker moves. Each trainer runs at its own pace (`round`).
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.compress import Precision, unpack
from adloco_jax.core.outer import apply_differences
from adloco_jax.core.types import Ensemble, norms, put, take, trainable
from adloco_jax.data.sampling import HeldOut
from adloco_jax.elastic import decisions
from adloco_jax.elastic.formats import USES, Refused, Request, WorkerRequest
from adloco_jax.elastic.learner import Inputs, LearnerSetup
from adloco_jax.elastic.pool import Event, LearnerPool
from adloco_jax.elastic.rounds import Round, check_responses
from adloco_jax.elastic.states import InnerStates, SentParams
from adloco_jax.elastic.store import LAST_S, TELL_S
from adloco_jax.engine.evaluate import guard_losses, trainer_params
from adloco_jax.engine.local import end_round
from adloco_jax.engine.programs import Programs, merge_positions, merged, replace, spawned
from adloco_jax.engine.round import Outcome
from adloco_jax.errors import ResourceError
from adloco_jax.host import processes
from adloco_jax.host.terminal import say
from adloco_jax.loop.adloco import (
    Boundary,
    Decide,
    State,
    Stats,
    Stopped,
    joining_workers,
    merge_due,
)
from adloco_jax.loop.control import Control, count_round
from adloco_jax.loop.plans import learning_rates, planned, round_plans, test_count

# The run ends if a trainer's rounds have all failed for so long: longer than a bucket is damaged.
PATIENCE_S = 300.0


@functools.partial(jax.jit, static_argnames=("outer_tx", "aggregate", "precision", "skip_single"))
def _apply(*arguments: Any, **how: Any) -> tuple[Ensemble, jax.Array, list[PyTree]]:
    """Call `apply_differences`; also return the updates that are packed, if any."""
    sent: list[PyTree] = []
    all_gather = lambda packed_M: sent.append(packed_M) or packed_M  # noqa: E731
    return *apply_differences(*arguments, all_gather=all_gather, **how), sent


def _norms(params: PyTree, precision: Precision, packed_R: PyTree) -> jax.Array:
    """Return the norms of workers' differences, as they are added up."""
    shapes = trainable(params)
    like_R = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), np.float32), shapes)
    return norms(unpack(packed_R, like_R, precision))


class ElasticEngine:
    """Runs the rounds of workers in learners; `loop.adloco.Engine` describes the methods."""

    def __init__(
        self,
        setup: LearnerSetup,
        programs: Programs,
        heldout: HeldOut,
        write: Callable[..., object],
    ):
        """Store the arguments; the first call of `round` starts the learners.

        `setup` is what learners are made of, in `setup.spec` with the driver's own devices.
        `write(event, **fields)` adds a line about a learner to the ledger.
        """
        spec = setup.spec
        self.settings, self.spec = setup.settings, spec
        self.state_bytes = spec.state_bytes
        self.programs, self.heldout = programs, heldout
        self.control_before: Control
        self.rounds: dict[int, Round] = {}  # rounds under way, by the trainer's id
        self.pool = LearnerPool(setup, write)
        self._states = InnerStates(spec, self.pool, self._poll)
        self._params = SentParams(self.pool)
        self._fault: ResourceError | None = None  # of a round that could not begin
        self._finished_s = time.monotonic()  # when the last round ended
        self._tell_s = math.inf  # when to say what the driver waits for
        self._stop_s = math.inf  # when rounds under way are given up, after a signal
        self._spent_s = np.zeros(4)  # what learners did since the last round ended, as they say
        self._up_s = 0.0  # seconds that learners had been up when the last round ended
        # By trainer's id, rounds without a response: time of the first, number, and time to go on.
        self._failures: dict[int, tuple[float, int, float]] = {}
        self._norms: dict[str, list[float]] = {}  # `Control.norms` after the rounds that end
        self._measure = jax.jit(functools.partial(_norms, spec.params), static_argnums=0)
        self._apply = functools.partial(
            _apply,
            outer_tx=spec.outer_tx,
            aggregate=spec.aggregate,
            precision=spec.outer.precision,
            skip_single=spec.outer.skip_single,
        )

    # -- The protocol --------------------------------------------------------------------------

    def round(self, state: State, decide: Decide) -> tuple[State, Boundary]:
        """Start rounds in learners; end those, at least one, whose learners have answered.

        All end together if trainers must stay together (`_keeps_together`). Raises ConfigError if
        at the start a learner has other data or versions; ResourceError if too few start, a round
        keeps failing, or the cluster is gone; Stopped soon after a signal.
        """
        ended = self._wait_for_rounds(state)
        plans = {m: each.plan for m, each in ended.items()}
        counted = {s: each.spent(s) for each in ended.values() for s in each.counted}
        control, spent = count_round(
            state.control,
            plans,
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            counted=counted,
        )
        control.norms = self._norms
        control, decided = decide(control, _by_trainer(ended), plans)
        ensemble, outcomes = self._outer_updates(state, ended)
        before_s, self._up_s = self._up_s, self.pool.up_s()
        # Trainers whose rounds end together share alike.
        up_s = round((self._up_s - before_s) / len(ended), 6)
        spent_s, self._spent_s = (self._spent_s / len(ended)).round(6).tolist(), np.zeros(4)
        lost_s, self.pool.lost_s = round(self.pool.lost_s / len(ended), 6), 0.0
        wire_bytes, self.pool.wire_bytes = divmod(self.pool.wire_bytes, len(ended))
        lines = {
            m: planned(state.control, m, each.plan, each.rate_T)
            | {"workers_counted": len(each.useful), "wire_bytes": wire_bytes}
            | {"up_s": up_s, "lost_s": lost_s}
            | {f"{use}_s": seconds for use, seconds in zip(USES, spent_s, strict=True)}
            | spent[m]
            for m, each in ended.items()
        }
        # The duration begins at the last round's end or later, so no second is counted twice.
        now_s = time.monotonic()
        step_s = now_s - max(self._finished_s, min(each.start_s for each in ended.values()))
        self._finished_s = now_s
        state = State(ensemble, control)
        state, boundary = end_round(state, lines, outcomes, decided, step_s=step_s)
        self._work_on(state)
        return state, boundary

    def _wait_for_rounds(self, state: State) -> dict[int, Round]:
        """Start rounds, wait until some have ended, take them out and judge their responses."""
        if self._fault is not None:
            raise self._fault
        self.control_before = control = state.control
        self.pool.control = control
        if not self.pool.learners:
            self.pool.start_all(control.num_workers)
        if not self.rounds:
            self._states.adopt(state)
        together, rule = self._keeps_together(), self.settings.engine
        self._tell_s = time.monotonic() + TELL_S * (self.pool.num_present > 0)
        while True:
            if processes.is_asked_to_stop():
                self._stop_s = min(self._stop_s, time.monotonic() + LAST_S)
                if not self.rounds or time.monotonic() >= self._stop_s:
                    raise Stopped(state)
            else:
                self._begin(state)
            under_way = [m for m in control.trainers if m in self.rounds]
            over = [m for m in under_way if self.rounds[m].is_over(rule)]
            if over and (not together or len(over) == len(control.trainers)):
                break
            self._poll()
            self._tell(control)
        ended = {m: self.rounds.pop(m) for m in over}
        self._norms = {k: kept for k, kept in control.norms.items() if int(k) in control.trainers}
        for m, each in ended.items():
            past = self._norms.get(str(m), [])
            start_M = take(state.ensemble, control.positions([m])).params_M
            params_norm = float(norms(trainable(start_M))[0])
            accepted = each.judge(past, params_norm, self.settings.outer.clip_workers)
            self._norms[str(m)] = [*past, *accepted][-decisions.KEPT_NORMS :]
        return ended

    def _tell(self, control: Control) -> None:
        """Say what the driver waits for, if it takes long."""
        if time.monotonic() < self._tell_s:
            return
        self._tell_s = time.monotonic() + TELL_S
        learners, now_s = self.pool.learners, time.monotonic()
        if not self.pool.num_present:
            return say("no learner: waiting for one")
        come = sum(len(each.reported) for each in self.rounds.values())
        to_come = sum(len(each.awaited) for each in self.rounds.values())
        left_s, works = 0.0, []
        for call in self.pool.asked("run_round"):
            learner = learners[call.learner]
            end_s = learner.sent_s + learner.predicted_s(call.about.num_sequences)
            left_s = max(left_s, end_s - now_s)
            if learner.compiling_s is not None:
                works.append(
                    f"learner {call.learner} compiles, {now_s - learner.compiling_s:.0f} s"
                )
            elif math.isinf(end_s):  # its first round
                works.append(f"learner {call.learner} works, {now_s - learner.sent_s:.0f} s")
        soon = f", the last in about {left_s:.0f} s" if 1 <= left_s < math.inf else ""
        line = f"round {control.round + 1}: {come} of {come + to_come} responses have come{soon}"
        say("; ".join([line, *works]))

    def _outer_updates(
        self, state: State, ended: Mapping[int, Round]
    ) -> tuple[Ensemble, dict[int, Outcome]]:
        """Apply the outer update to each trainer whose round has ended."""
        ensemble, outcomes = state.ensemble.replace(inner_state_R=None), {}
        for m, each in ended.items():
            worker_ids, norm = state.control.trainers[m].streams, math.nan
            if each.counted:
                at = state.control.positions([m])
                sub, norm_M, sent = self._outer_update(take(ensemble, at), worker_ids, each)
                ensemble, norm = put(ensemble, at, sub), float(norm_M[0])
                if math.isfinite(norm):  # otherwise the parameters are as before
                    (update,) = jax.device_get(sent or [None])
                    is_taken = each.request.is_taken(self.spec) and not each.factors
                    sender = each.senders[worker_ids[0]] if is_taken else None
                    self._params.change(m, update, sender)
            outcomes[m] = each.outcome(worker_ids, norm)
            self._close(each)
        return ensemble, outcomes

    def _work_on(self, state: State) -> None:
        """Let learners work while observers evaluate and save."""
        self.control_before = self.pool.control = state.control
        if not (processes.is_asked_to_stop() or self._changes_now(state.control)):
            try:
                self._begin(state)
            except ResourceError as error:
                self._fault = error  # after the observers of this round

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Do nothing: only Streaming DiLoCo leaves anything, and it excludes learners."""
        return state, []

    def losses(self, state: State, models: Sequence[Mapping[int, float]]) -> list[float]:
        """Compute guard losses of trainers and of merges (`evaluate.guard_losses`)."""
        return guard_losses(state, models, self.programs, self.heldout)

    def merge(
        self, state: State, members: Sequence[int], weights: Sequence[float], after: Control
    ) -> Ensemble:
        """Merge trainers, then move workers, after fetching the inner states from the learners."""
        at = merge_positions(state.control, members, after)
        for m in members:
            self._params.change(m, None)
        whole = self._states.whole(state, fetches=True)
        return replace(merged, whole, np.asarray(weights, np.float32), *at)

    def spawn(self, state: State, trainer: int, num_workers: int) -> Ensemble:
        """Add workers to a trainer up to `num_workers`, after fetching the inner states."""
        (position,) = state.control.positions([trainer])
        return replace(spawned, self._states.whole(state, fetches=True), position, num_workers)

    def complete(self, state: State) -> Ensemble:
        """Return the ensemble with inner states, fetched from the learners.

        They are fresh instead if learners are far away, or `inner.state=reset`.
        """
        fetches = not self.pool.learners or self.pool.transport.moves_states
        return self._states.whole(state, fetches=fetches)

    def close(self) -> None:
        """End all learners, and what was started to reach them."""
        self.pool.close()

    # -- Rounds --------------------------------------------------------------------------------

    def _keeps_together(self) -> bool:
        """Whether all trainers must have ended a round before any of them starts the next."""
        settings = self.settings
        return settings.ensemble.initial_workers is not None or math.isfinite(settings.last_token)

    def _may_begin(self, control: Control, trainer: int) -> bool:
        settings, rounds = self.settings, control.rounds_of(trainer)
        if self._keeps_together():
            return rounds == control.round
        waits = settings.merge.policy != "none" and len(control.trainers) > 1
        every = settings.merge.every_rounds
        last = (control.round // every + 1) * every if waits else settings.last_round
        return rounds < min(last, settings.last_round)

    def _changes_now(self, control: Control) -> bool:
        """Whether the run is over, or trainers may merge or get workers before their next round."""
        settings = self.settings
        done = settings.share_done(control.round, control.tokens_total)
        if not control.trainers or done >= 1:
            return True
        joining = joining_workers(control, settings.ensemble, done)
        return merge_due(control, settings.merge, done) or bool(joining)

    def _begin(self, state: State) -> None:
        """Start a round of every trainer that may begin one and has a worker on a free learner."""
        control, settings, now_s = state.control, self.settings, time.monotonic()
        until_s = {m: until_s for m, (*_, until_s) in self._failures.items()}
        able = [m for m in control.trainers if self._may_begin(control, m)]
        idle = [m for m in able if m not in self.rounds and now_s >= until_s.get(m, 0.0)]
        if not idle:
            return
        self._divide(control, idle)
        plans = round_plans(control, settings, idle)
        tokens = self.spec.sequence_length * sum(
            plan.num_sequences * len(control.trainers[m].streams) for m, plan in plans.items()
        )
        occupied = {call.learner for call in self.pool.asked("run_round")}
        there = [e for e in self.pool.learners.values() if e.joined and not e.leaving]
        hosts = {s: e.number for e in there if e.number not in occupied for s in e.worker_ids}
        for m, plan in plans.items():
            starts = {worker_id: start for _, worker_id, start in control.reads([m])}
            free = {worker_id: hosts[worker_id] for worker_id in starts if worker_id in hosts}
            if not free:
                continue
            rate_T = learning_rates(control, m, plan, settings, round_tokens=tokens)
            number, is_single = control.rounds_of(m) + 1, len(starts) == 1
            request = Request(m, number, *plan, is_single=is_single)
            (position,) = control.positions([m])
            whole = functools.partial(trainer_params, state.ensemble, position)
            params = functools.cache(lambda whole=whole: jax.device_get(whole()))
            each = Round(plan, rate_T, request, now_s)
            speeds = {s: self.pool.learners[n].sequence_s for s, n in free.items()}
            parts = decisions.num_parts(settings.inner.steps_per_round, settings.engine)
            updates = decisions.updates_by_speed(plan.num_updates, parts, speeds)
            count = test_count(plan, len(starts), settings.batching)
            for number in sorted(set(free.values())):
                worker_ids = [worker_id for worker_id, host in free.items() if host == number]
                tested = {s: min(count, request.sequences(updates[s])) for s in worker_ids}
                work = tuple(WorkerRequest(s, starts[s], updates[s], tested[s]) for s in worker_ids)
                self._send_request(number, request._replace(work=work), rate_T, params)
                each.awaited.add(number)
            self.rounds[m] = each

    def _send_request(
        self, number: int, request: Request, rate_T: np.ndarray, params: Callable[[], PyTree]
    ) -> None:
        learner = self.pool.learners[number]
        states = {w: self._states.to_send(w, learner) for w, *_ in request.work}
        inputs = Inputs(rate_T, {s: state for s, state in states.items() if state is not None})
        request, reference = self._params.to_send(request, learner, params)
        how = {"request": request, "inputs": inputs, "params": reference}
        self.pool.ask(number, "run_round", request, **how)
        sequences, heartbeat_s = request.num_sequences, self.settings.engine.heartbeat_s
        learner.sent(sequences, time.monotonic(), heartbeat_s=heartbeat_s)

    def _outer_update(
        self, sub: Ensemble, worker_ids: Sequence[int], each: Round
    ) -> tuple[Ensemble, jax.Array, list[PyTree]]:
        """Apply the outer update to a trainer, from the differences that learners have sent."""
        responses = [each.counted.get(worker_id) for worker_id in worker_ids]
        some = next(response for response in responses if response is not None)
        missing = jax.tree.map(np.zeros_like, some.differences)
        parts = [missing if a is None else a.differences for a in responses]
        weights = [each.spent(s)[1] if s in each.counted else 0 for s in worker_ids]
        weights_R, factor_R = np.array(weights, np.float32), None
        if each.factors:  # otherwise nothing is multiplied
            factor_R = np.array([each.factors.get(w, 1.0) for w in worker_ids], np.float32)
        return self._apply(sub, _concatenated(parts), weights_R=weights_R, factor_R=factor_R)

    def _close(self, each: Round) -> None:
        """Record for the ledger the late learners, clipped and rejected updates of a round."""
        trainer = each.request.trainer
        for worker_id in each.counted:
            self._states.counted(worker_id, each.senders[worker_id])
        self._failures.pop(trainer, None)
        for number in sorted(each.awaited):
            self.pool.note(number, "late", "no response within the grace of the quorum", trainer)
        for worker_id, factor in sorted(each.factors.items()):
            norm = each.norms[worker_id]
            cause = (
                f"worker {worker_id}: an update of norm {norm:.3g} counts as {factor * norm:.3g}"
            )
            self.pool.note(each.senders[worker_id].number, "clipped", cause, trainer)
        for worker_id in sorted(each.responses.keys() - each.counted.keys()):
            cause = f"worker {worker_id}: an update of norm {each.norms[worker_id]:.3g}"
            self.pool.note(each.senders[worker_id].number, "rejected", cause, trainer)
        for worker_id in each.responses.keys() - each.useful:
            self._forget(each.senders[worker_id], trainer)

    def _forget(self, learner: decisions.LearnerRecord, trainer: int) -> None:
        """Repair what a learner may have: its next request brings parameters and inner states."""
        self._params.forget(learner, trainer)
        self._states.forget(learner)

    def _poll(self) -> None:
        """Process the responses of learners that have come, and the losses of learners."""
        for event in self.pool.poll():
            if event.what == "states":
                self._states.take(event)
            elif event.what == "run_round":
                self._take(event)
            elif event.what == "lost":
                if not self.pool.num_present:
                    self._tell_s = 0.0  # at once
                self._do_without(event.learner, event.value)

    def _take(self, event: Event) -> None:
        """Add a learner's responses to its trainer's round; measure the learner's speed anew."""
        learner, request, responses = event.learner, event.about, event.value
        learner.due_s = None
        try:
            if isinstance(responses, Refused):
                raise responses
            check_responses(responses, request, self.spec)
            learner.num_responses += 1
        except Refused as error:
            self._forget(learner, request.trainer)
            self.pool.note(learner.number, "refused", str(error), request.trainer)
            return self._do_without(learner, str(error))
        packed = [response.differences.packed_R for response in responses]
        norms = [float(self._measure(request.precision(self.spec), each)[0]) for each in packed]
        elapsed_s = time.monotonic() - learner.sent_s
        seconds = min(float(sum(response.seconds for response in responses)), elapsed_s)
        spent_s = sum((r.between_s for r in responses), np.zeros(3))
        self._spent_s += learner.believed([seconds, *spent_s], time.monotonic())
        if request.is_taken(self.spec):  # then it has its own
            learner.params_ids.pop(request.trainer, None)
        learner.sequence_s.append(seconds / request.num_sequences)
        learner.transfer_s.append(elapsed_s - seconds)
        if request.trainer in self.rounds:  # otherwise the round has ended
            worker_ids = [work.worker_id for work in request.work]
            found = dict(zip(worker_ids, zip(responses, norms, strict=True), strict=True))
            self.rounds[request.trainer].take(learner, found)

    def _do_without(self, learner: decisions.LearnerRecord, cause: str) -> None:
        """Continue the rounds that wait for a learner without it; some have to begin again."""
        now_s = time.monotonic()
        for trainer, each in [*self.rounds.items()]:
            each.awaited.discard(learner.number)
            if each.awaited or each.responses:
                continue
            del self.rounds[trainer]
            first_s, count, _ = self._failures.get(trainer, (now_s, 0, 0.0))
            if now_s - first_s > PATIENCE_S:
                raise ResourceError(
                    f"trainer {trainer}: its round has failed for {now_s - first_s:.0f} s; learner"
                    f" {learner.number}: {cause}"
                )
            self._failures[trainer] = first_s, count + 1, now_s + decisions.pause_s(count + 1)

    # -- Membership ----------------------------------------------------------------------------

    def _divide(self, control: Control, idle: Sequence[int]) -> None:
        """Assign workers to learners; fetch the inner states that new learners must get."""
        trainers = control.trainer_of
        busy = {call.learner for call in self.pool.asked("run_round")}
        self._let_leave(control, busy)
        now_s, patience_s = time.monotonic(), self.settings.engine.restart_s
        movable = {worker_id for m in idle for worker_id in control.trainers[m].streams}
        movable -= {s for n in busy for s in self.pool.learners[n].worker_ids}
        learners = [*self.pool.learners.values()]
        away = [e for e in learners if e.lost_s and now_s - e.lost_s < patience_s]
        returning = {s for e in away if e.started_s < math.inf for s in e.worker_ids}
        there = [each for each in learners if each.joined]
        hosts = decisions.assign(there, trainers, movable, returning=returning)
        moving = {s: self.pool.learners[hosts[s]] for s in movable & hosts.keys()}
        self._states.bring(control, moving)
        for each in self.pool.learners.values():
            kept = {s: each.number for s in each.worker_ids if s in trainers} | hosts
            each.worker_ids = sorted(s for s, number in kept.items() if number == each.number)

    def _let_leave(self, control: Control, busy: set[int]) -> None:
        """End learners that were asked to stop, once no round with their responses is under way."""
        taking_part = busy.union(*(each.reported for each in self.rounds.values()))
        for number, learner in [*self.pool.learners.items()]:
            if not (learner.leaving and learner.joined) or number in taking_part:
                continue
            self._states.bring(control, dict.fromkeys(learner.worker_ids))
            if self.pool.learners[number] is not learner:
                continue  # the learner was lost in the meantime
            self.pool.let_go(learner)


def _concatenated(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)


def _by_trainer(ended: Mapping[int, Round]) -> Stats:
    """Collect the gradient statistics of the workers whose responses count in the update."""
    stats = {}
    for m, each in ended.items():
        tested = [a.stats_R for a in each.counted.values() if a.stats_R is not None]
        if tested:
            stats[m] = jax.tree.map(lambda x: x.astype(np.float64), _concatenated(tested))
    return stats
