"""The elastic engine: `loop.adloco.Engine` in the driver, with workers in learners.

The driver holds parameters and outer states, learners the inner states, which are sent only at the
start, after a merge, and when a worker moves. Each trainer runs at its own pace (`round`).
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.compress import Precision, unpack
from adloco_jax.core.outer import apply_differences
from adloco_jax.core.types import Ensemble, norms, put, take, trainable
from adloco_jax.data.sampling import HeldOut
from adloco_jax.elastic import decisions
from adloco_jax.elastic.learner import Inputs, LearnerSetup, Response
from adloco_jax.elastic.messages import USES, Refused, Request, WorkerRequest
from adloco_jax.elastic.pool import LearnerPool, Loss, RoundAnswer, StatesAnswer
from adloco_jax.elastic.round_record import RoundRecord, check_responses
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
from adloco_jax.loop.control import Control, RoundPlan, count_round
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


class _Failure(NamedTuple):
    """The rounds of a trainer, in a row, to which no learner has responded."""

    first_s: float  # when the first of them failed
    count: int
    until_s: float  # when the next one may begin


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
        self.rounds: dict[int, RoundRecord] = {}  # rounds under way, by the trainer's id
        self.pool = LearnerPool(setup, write)
        self._states = InnerStates(spec, self.pool, self._poll)
        self._params = SentParams(self.pool)
        self._fault: ResourceError | None = None  # of a round that could not begin
        self._finished_s = time.monotonic()  # when the last round ended
        self._tell_s = math.inf  # when to say what the driver waits for
        self._stop_s = math.inf  # when rounds under way are given up, after a signal
        self._spent_s = np.zeros(len(USES))  # what learners say they did since then
        self._up_s = 0.0  # seconds that learners had been up when the last round ended
        self._failures: dict[int, _Failure] = {}  # by trainer's id
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
        shares = self._shares(len(ended))
        lines = {}
        for m, each in ended.items():
            line = planned(state.control, m, each.plan, each.rate_T)
            lines[m] = line | {"workers_counted": len(each.useful)} | shares | spent[m]
        # The duration begins at the last round's end or later, so no second is counted twice.
        now_s = time.monotonic()
        step_s = now_s - max(self._finished_s, min(each.start_s for each in ended.values()))
        self._finished_s = now_s
        state = State(ensemble, control)
        state, boundary = end_round(state, lines, outcomes, decided, step_s=step_s)
        self._work_on(state)
        return state, boundary

    def _shares(self, num_ended: int) -> dict[str, float]:
        """Divide what learners did since the last round ended among the rounds that end now.

        The result is fields of a round's line: bytes, and seconds by use.
        """
        before_s, self._up_s = self._up_s, self.pool.up_s()
        wire_bytes, self.pool.wire_bytes = divmod(self.pool.wire_bytes, num_ended)
        shares: dict[str, float] = {
            "wire_bytes": wire_bytes,
            "up_s": round((self._up_s - before_s) / num_ended, 6),
            "lost_s": round(self.pool.lost_s / num_ended, 6),
        }
        self.pool.lost_s = 0.0
        for use, seconds in zip(USES, self._spent_s.tolist(), strict=True):
            shares[f"{use}_s"] = round(seconds / num_ended, 6)
        self._spent_s = np.zeros(len(USES))
        return shares

    def _wait_for_rounds(self, state: State) -> dict[int, RoundRecord]:
        """Start rounds, wait until some have ended, take them out and judge their responses."""
        if self._fault is not None:
            raise self._fault
        self.control_before = control = state.control
        self.pool.control = control
        if not self.pool.learners:
            self.pool.start_all(control.num_workers)
        if not self.rounds:
            self._states.adopt(state)
        together = self._keeps_together()
        # Without a learner, what is missing is said at once.
        self._tell_s = time.monotonic() + (TELL_S if self.pool.num_present else 0.0)
        while True:
            if processes.is_asked_to_stop():
                self._stop_s = min(self._stop_s, time.monotonic() + LAST_S)
                if not self.rounds or time.monotonic() >= self._stop_s:
                    raise Stopped(state)
            else:
                self._begin(state)
            under_way = [m for m in control.trainers if m in self.rounds]
            over = [m for m in under_way if self.rounds[m].is_over(self.settings.engine)]
            if over and (not together or len(over) == len(control.trainers)):
                break
            self._poll()
            self._tell(control)
        ended = {m: self.rounds.pop(m) for m in over}
        self._judge(state, ended)
        return ended

    def _judge(self, state: State, ended: Mapping[int, RoundRecord]) -> None:
        """Decide which responses count, and by which factor; remember the accepted norms."""
        control = state.control
        self._norms = {m: kept for m, kept in control.norms.items() if int(m) in control.trainers}
        for m, each in ended.items():
            past = self._norms.get(str(m), [])
            start_M = take(state.ensemble, control.positions([m])).params_M
            params_norm = float(norms(trainable(start_M))[0])
            accepted = each.judge(past, params_norm, self.settings.outer.clip_workers)
            self._norms[str(m)] = [*past, *accepted][-decisions.KEPT_NORMS :]

    def _tell(self, control: Control) -> None:
        """Say what the driver waits for, if it takes long."""
        if time.monotonic() < self._tell_s:
            return
        self._tell_s = time.monotonic() + TELL_S
        if not self.pool.num_present:
            say("no learner: waiting for one")
            return
        now_s = time.monotonic()
        come = sum(len(each.reported) for each in self.rounds.values())
        to_come = sum(len(each.awaited) for each in self.rounds.values())
        left_s = 0.0  # until the last one comes
        works: list[str] = []  # what learners do of which no end is known
        for call in self.pool.pending("run_round"):
            assert call.request is not None
            learner = self.pool.learners[call.learner]
            end_s = learner.sent_s + learner.predicted_s(call.request.num_sequences)
            left_s = max(left_s, end_s - now_s)
            if learner.compiling_s is not None:
                works.append(
                    f"learner {call.learner} compiles, {now_s - learner.compiling_s:.0f} s"
                )
            elif math.isinf(end_s):  # its first round
                works.append(f"learner {call.learner} works, {now_s - learner.sent_s:.0f} s")
        line = f"round {control.round + 1}: {come} of {come + to_come} responses have come"
        if 1 <= left_s < math.inf:
            line += f", the last in about {left_s:.0f} s"
        say("; ".join([line, *works]))

    def _outer_updates(
        self, state: State, ended: Mapping[int, RoundRecord]
    ) -> tuple[Ensemble, dict[int, Outcome]]:
        """Apply the outer update to each trainer whose round has ended."""
        ensemble, outcomes = state.ensemble.replace(inner_state_R=None), {}
        for m, each in ended.items():
            worker_ids = state.control.trainers[m].streams
            norm = math.nan
            if each.counted:
                at = state.control.positions([m])
                sub, norm_M, updates = self._outer_update(take(ensemble, at), worker_ids, each)
                ensemble = put(ensemble, at, sub)
                norm = float(norm_M[0])
                if math.isfinite(norm):  # otherwise the parameters are as before
                    # Only below float32 is an update packed, and then there is one.
                    update = jax.device_get(updates[0]) if updates else None
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
        """Whether a trainer may begin its next round before others have ended theirs."""
        settings, rounds = self.settings, control.rounds_of(trainer)
        if self._keeps_together():
            return rounds == control.round
        last = settings.last_round
        if settings.merge.policy != "none" and len(control.trainers) > 1:
            every = settings.merge.every_rounds
            next_merge = (control.round // every + 1) * every
            last = min(next_merge, last)
        return rounds < last

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
        control, now_s = state.control, time.monotonic()
        waiting = {m for m, failure in self._failures.items() if now_s < failure.until_s}
        idle = [
            m
            for m in control.trainers
            if m not in self.rounds and m not in waiting and self._may_begin(control, m)
        ]
        if not idle:
            return
        self._divide(control, idle)
        plans = round_plans(control, self.settings, idle)
        round_tokens = self.spec.sequence_length * sum(
            plan.num_sequences * len(control.trainers[m].streams) for m, plan in plans.items()
        )
        hosts = self._free_hosts()
        for m, plan in plans.items():
            rate_T = learning_rates(control, m, plan, self.settings, round_tokens=round_tokens)
            record = self._start_round(state, m, plan, rate_T, hosts)
            if record is not None:
                self.rounds[m] = record

    def _free_hosts(self) -> dict[int, decisions.LearnerRecord]:
        """Return, by worker id, the learners that stay and run no round now."""
        occupied = {call.learner for call in self.pool.pending("run_round")}
        hosts = {}
        for learner in self.pool.learners.values():
            if learner.joined and not learner.leaving and learner.number not in occupied:
                for worker_id in learner.worker_ids:
                    hosts[worker_id] = learner
        return hosts

    def _start_round(
        self,
        state: State,
        trainer: int,
        plan: RoundPlan,
        rate_T: np.ndarray,
        hosts: Mapping[int, decisions.LearnerRecord],
    ) -> RoundRecord | None:
        """Send a trainer's round to the learners of its workers; None if none of them is free."""
        control, settings = state.control, self.settings
        starts = {worker_id: start for _, worker_id, start in control.reads([trainer])}
        free = {worker_id: hosts[worker_id] for worker_id in starts if worker_id in hosts}
        if not free:
            return None
        request = Request(
            trainer=trainer,
            round=control.rounds_of(trainer) + 1,
            micro_batch_size=plan.micro_batch_size,
            num_accum_steps=plan.num_accum_steps,
            num_updates=plan.num_updates,
            is_single=len(starts) == 1,
        )
        record = RoundRecord(plan, rate_T, request, time.monotonic())
        parts = decisions.num_parts(settings.inner.steps_per_round, settings.engine)
        speeds = {worker_id: learner.sequence_s for worker_id, learner in free.items()}
        updates = decisions.updates_by_speed(plan.num_updates, parts, speeds)
        num_tested = test_count(plan, len(starts), settings.batching)
        (position,) = control.positions([trainer])

        @functools.cache  # several learners may need them, or none
        def params() -> PyTree:
            return jax.device_get(trainer_params(state.ensemble, position))

        learners = {learner.number: learner for learner in free.values()}
        for _, learner in sorted(learners.items()):
            work = []
            for worker_id, host in free.items():
                if host is learner:
                    tested = min(num_tested, request.sequences(updates[worker_id]))
                    work.append(
                        WorkerRequest(worker_id, starts[worker_id], updates[worker_id], tested)
                    )
            self._send_request(learner, request._replace(work=tuple(work)), rate_T, params)
            record.awaited.add(learner.number)
        return record

    def _send_request(
        self,
        learner: decisions.LearnerRecord,
        request: Request,
        rate_T: np.ndarray,
        params: Callable[[], PyTree],
    ) -> None:
        """Send a learner its part of a round, with the parameters and states that it lacks."""
        states = {}
        for work in request.work:
            state = self._states.to_send(work.worker_id, learner)
            if state is not None:
                states[work.worker_id] = state
        completed = self._params.complete(request, learner, params)
        self.pool.ask_for_round(
            learner.number, completed.request, Inputs(rate_T, states), completed.params
        )
        heartbeat_s = self.settings.engine.heartbeat_s
        learner.sent(request.num_sequences, time.monotonic(), heartbeat_s=heartbeat_s)

    def _outer_update(
        self, sub: Ensemble, worker_ids: Sequence[int], each: RoundRecord
    ) -> tuple[Ensemble, jax.Array, list[PyTree]]:
        """Apply the outer update to a trainer, from the differences that learners have sent."""
        some = next(iter(each.counted.values()))
        missing = jax.tree.map(np.zeros_like, some.differences)
        differences, weights = [], []
        for worker_id in worker_ids:
            if worker_id in each.counted:
                num_sequences = each.spent(worker_id).num_sequences
                differences.append(each.counted[worker_id].differences)
                weights.append(num_sequences)
            else:
                differences.append(missing)
                weights.append(0)
        factor_R = None
        if each.factors:  # otherwise nothing is multiplied
            factor_R = np.array([each.factors.get(w, 1.0) for w in worker_ids], np.float32)
        return self._apply(
            sub,
            _concatenated(differences),
            weights_R=np.array(weights, np.float32),
            factor_R=factor_R,
        )

    def _close(self, each: RoundRecord) -> None:
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
            match event:
                case StatesAnswer():
                    self._states.take(event.keys, event.states)
                case RoundAnswer():
                    self._take(event.learner, event.request, event.responses)
                case Loss():
                    if not self.pool.num_present:
                        self._tell_s = 0.0  # at once
                    self._do_without(event.learner, event.cause)

    def _take(
        self,
        learner: decisions.LearnerRecord,
        request: Request,
        responses: Sequence[Response] | Refused,
    ) -> None:
        """Add a learner's responses to its trainer's round; measure the learner's speed anew.

        `responses` has one for each entry of `request.work`. If the learner has refused the
        request, or they are not what was asked for, its trainer's round goes on without it.
        """
        learner.due_s = None
        try:
            if isinstance(responses, Refused):
                raise responses
            check_responses(responses, request, self.spec)
        except Refused as error:
            self._forget(learner, request.trainer)
            self.pool.note(learner.number, "refused", str(error), request.trainer)
            self._do_without(learner, str(error))
            return
        learner.num_responses += 1
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
            found = {
                work.worker_id: (response, norm)
                for work, response, norm in zip(request.work, responses, norms, strict=True)
            }
            self.rounds[request.trainer].take(learner, found)

    def _do_without(self, learner: decisions.LearnerRecord, cause: str) -> None:
        """Continue the rounds that wait for a learner without it; some have to begin again."""
        now_s = time.monotonic()
        for trainer, each in [*self.rounds.items()]:
            each.awaited.discard(learner.number)
            if each.awaited or each.responses:
                continue
            del self.rounds[trainer]
            before = self._failures.get(trainer, _Failure(now_s, 0, now_s))
            failed_s = now_s - before.first_s
            if failed_s > PATIENCE_S:
                raise ResourceError(
                    f"trainer {trainer}: its round has failed for {failed_s:.0f} s; learner"
                    f" {learner.number}: {cause}"
                )
            count = before.count + 1
            until_s = now_s + decisions.pause_s(count)
            self._failures[trainer] = _Failure(before.first_s, count, until_s)

    # -- Membership ----------------------------------------------------------------------------

    def _divide(self, control: Control, idle: Sequence[int]) -> None:
        """Assign workers to learners; fetch the inner states that new learners must get."""
        trainers = control.trainer_of
        busy = {call.learner for call in self.pool.pending("run_round")}
        self._let_leave(control, busy)

        movable: set[int] = set()  # workers between two rounds
        for m in idle:
            movable.update(control.trainers[m].streams)
        for number in busy:
            movable.difference_update(self.pool.learners[number].worker_ids)
        returning: set[int] = set()  # workers whose lost learner may soon be back
        now_s = time.monotonic()
        for learner in self.pool.learners.values():
            is_away = learner.lost_s and now_s - learner.lost_s < self.settings.engine.restart_s
            if is_away and learner.started_s < math.inf:
                returning.update(learner.worker_ids)

        there = [each for each in self.pool.learners.values() if each.joined]
        hosts = decisions.assign(there, trainers, movable, returning=returning)
        moving = {s: self.pool.learners[hosts[s]] for s in movable & hosts.keys()}
        self._states.bring(control, moving)
        for learner in self.pool.learners.values():
            kept = {s for s in learner.worker_ids if s in trainers and s not in hosts}
            given = {s for s, number in hosts.items() if number == learner.number}
            learner.worker_ids = sorted(kept | given)

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


def _by_trainer(ended: Mapping[int, RoundRecord]) -> Stats:
    """Collect the gradient statistics of the workers whose responses count in the update."""
    stats = {}
    for m, each in ended.items():
        tested = [a.stats_R for a in each.counted.values() if a.stats_R is not None]
        if tested:
            stats[m] = jax.tree.map(lambda x: x.astype(np.float64), _concatenated(tested))
    return stats
