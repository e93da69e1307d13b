"""The elastic engine: `loop.adloco.Engine` in the driver, with workers in learners.

The driver is this process: it holds parameters and outer states. A learner is a process that runs
rounds of workers, and holds their inner states. These are sent only at the start, after a merge,
and when a worker moves. Each trainer runs at its own pace (`round`).

A worker's difference is its trainer's parameters minus its own, packed to be sent. Its inner state
is that of its inner optimizer. A worker's id is also the number of its data stream. `m` is a
trainer's id; `M` is the axis of trainers, `R` that of workers, `S` that of updates, and `T` that of
micro-batches.

A response is of one worker: its difference, losses and skipped updates. It counts if it is part of
the outer update. A plan has the sizes of a round. The control is the host's part of a run's state:
trainers, their workers, and counts; a state has the control, and the arrays of all trainers (the
ensemble). The ledger is the run's file of events. A learner is late if it has not answered when the
grace of the quorum is over: the time that a round still waits once enough learners
(`engine.quorum`) have answered. The members of a merge become one trainer; the first, the
representative, remains. Observers evaluate and save after a round.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from adloco_jax.core.compress import Precision, unpack
from adloco_jax.core.outer import Aggregator, Differences, apply_differences
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
from adloco_jax.engine.programs import Programs, merge_positions, merged, replace_in_parts, spawned
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


class _OuterUpdate(NamedTuple):
    """What an outer update of trainers gives: the trainers, and what learners can be sent of it."""

    ensemble: Ensemble  # the trainers after the update, with their outer states
    # L2 norm of the mean difference of each trainer's workers; NaN: the trainer has not changed.
    norm_M: jax.Array
    # One update, packed to be sent, with axis M. Empty if nothing is packed: in float32, or if each
    # trainer has one worker, whose difference is always in float32.
    packed_updates: list[PyTree]


@functools.partial(jax.jit, static_argnames=("outer_tx", "aggregate", "precision", "skip_single"))
def _apply(
    ensemble: Ensemble,
    differences: Differences,
    weights_R: jax.Array,
    factor_R: jax.Array | None,
    *,
    outer_tx: optax.GradientTransformation,
    aggregate: Aggregator,
    precision: Precision,
    skip_single: bool,
) -> _OuterUpdate:
    """Apply the outer update to trainers, and return it in the form in which it can be sent too.

    Args:
      ensemble: The trainers before the update.
      differences: Those of all their workers.
      weights_R: The weight of each difference in its trainer's mean.
      factor_R: By what each difference is multiplied first; None: by 1.
      outer_tx: The outer optimizer.
      aggregate: Makes one difference of a trainer's workers' ones, such as their mean.
      precision: That in which differences were packed, and the update is packed.
      skip_single: Whether a trainer with one worker takes its parameters, without the optimizer.

    Returns:
      The trainers after the update, the norms of their mean differences, and the packed update.
    """
    packed_updates: list[PyTree] = []

    def all_gather(packed_M: PyTree) -> PyTree:
        """Keep the packed update, and return it as it is; it is not called in float32.

        Nothing is gathered, as this process has all workers' arrays.
        """
        packed_updates.append(packed_M)
        return packed_M

    ensemble, norm_M = apply_differences(
        ensemble,
        differences,
        outer_tx=outer_tx,
        weights_R=weights_R,
        factor_R=factor_R,
        aggregate=aggregate,
        precision=precision,
        skip_single=skip_single,
        all_gather=all_gather,
    )
    return _OuterUpdate(ensemble, norm_M, packed_updates)


def _difference_norms(params: PyTree, precision: Precision, packed_R: PyTree) -> jax.Array:
    """Return the norm of one worker's difference, after packing and unpacking: an array `(1,)`.

    That is what the outer update uses. `params` has the shapes and types of one worker's
    parameters. `packed_R` is its difference, packed in `precision`, with an axis R of length one.
    """
    shapes = trainable(params)
    like_R = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), np.float32), shapes)
    return norms(unpack(packed_R, like_R, precision))


class _Failure(NamedTuple):
    """The rounds of a trainer, in a row, to which no learner has responded.

    Times are those of the clock `time.monotonic`.
    """

    first_s: float  # when the first of them failed
    count: int  # how many have failed
    until_s: float  # when the next one may begin


class ElasticEngine:
    """Runs the rounds of workers in learners; `loop.adloco.Engine` describes the public methods."""

    def __init__(
        self,
        setup: LearnerSetup,
        programs: Programs,
        heldout: HeldOut,
        write: Callable[..., object],
    ):
        """Store the arguments; the first call of `round` starts the learners.

        Args:
          setup: What learners are made from; the devices in `setup.spec` are the driver's own.
          programs: Compiled programs of the driver, for merges and held-out losses.
          heldout: Held-out rows, on which the losses of trainers are computed before a merge.
          write: `write(event, **fields)` adds a line about a learner to the ledger.
        """
        spec = setup.spec
        self.settings = setup.settings
        self.spec = spec
        self.state_bytes = spec.state_bytes
        self.programs = programs
        self.heldout = heldout
        self.control_before: Control  # that with which the rounds under way were begun
        self.rounds: dict[int, RoundRecord] = {}  # rounds under way, by the trainer's id
        self.pool = LearnerPool(setup, write)  # starts learners, and calls them
        self._states = InnerStates(spec, self.pool, self._poll)  # knows where each inner state is
        self._params = SentParams(self.pool)  # knows which parameters each learner has
        self._fault: ResourceError | None = None  # of a round that could not begin
        self._finished_s = time.monotonic()  # when the last round ended
        self._tell_s = math.inf  # when to say what the driver waits for
        self._stop_s = math.inf  # when rounds under way are given up, after a signal
        # Since the last round ended, the seconds of learners for each use of their time (`USES`).
        self._spent_s = np.zeros(len(USES))
        self._up_s = 0.0  # seconds that learners had been up when the last round ended
        self._failures: dict[int, _Failure] = {}  # by trainer's id
        self._accepted_norms: dict[str, list[float]] = {}  # `Control.norms` after the next rounds
        measure = functools.partial(_difference_norms, spec.params)
        # Called with a precision, which is compiled in, and a packed difference.
        self._norms_of = jax.jit(measure, static_argnums=0)
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

        The rounds of all trainers end together if the run adds workers, or ends at a number of
        tokens.

        Args:
          state: Ensemble and control after the rounds before.
          decide: `decide(control, stats, plans)` returns the control with the next sizes, and a
            decision for each trainer in `plans`; `stats` are gradient statistics by trainer id.

        Returns:
          The state after the rounds, and a `Boundary`: their results and decisions.

        Raises:
          ConfigError: At the start, if a learner has other data or versions.
          ResourceError: If too few learners start, or none is left; if a trainer's rounds keep
            failing; or if the learners cannot be reached any more.
          Preempted: If a signal comes before enough learners have joined.
          Stopped: Some seconds after a signal, if too few rounds have ended until then.
        """
        ended = self._wait_for_rounds(state)

        # Count what the rounds have cost, and choose the next sizes.
        plans = {m: each.plan for m, each in ended.items()}
        counted = {}  # by worker id, the updates and sequences of the workers whose response counts
        for each in ended.values():
            for worker_id in each.counted:
                counted[worker_id] = each.spent(worker_id)
        control, costs = count_round(
            state.control,
            plans,
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            counted=counted,
        )
        control.norms = self._accepted_norms  # as `_judge` has set them
        control, decided = decide(control, _stats_by_trainer(ended), plans)

        ensemble, outcomes = self._outer_updates(state, ended)

        # Collect the fields of the ledger's lines, one line for each round: each has an equal share
        # of the bytes that were sent, and of the learners' seconds.
        shares = self._shares(len(ended))
        lines = {}
        for m, each in ended.items():
            line = planned(state.control, m, each.plan, each.rate_T)  # known before the round
            lines[m] = line | {"workers_counted": len(each.useful)} | shares | costs[m]

        # The duration begins at the last round's end or later, so no second is counted twice.
        now_s = time.monotonic()
        start_s = min(each.start_s for each in ended.values())
        step_s = now_s - max(self._finished_s, start_s)
        self._finished_s = now_s

        # It also removes trainers that have skipped too many updates in a row.
        state, boundary = end_round(
            State(ensemble, control), lines, outcomes, decided, step_s=step_s
        )
        self._begin_next_rounds(state)
        return state, boundary

    def _shares(self, num_ended: int) -> dict[str, float]:
        """Divide what learners did since the last round ended among the rounds that end now.

        Returns the fields of one round's line in the ledger, equal for the `num_ended` rounds:
        bytes sent and received (`wire_bytes`), and the seconds that learners were up (`up_s`), that
        were lost with a learner (`lost_s`), and of each use of their time (`computing_s`,
        `uploading_s`, `waiting_s`, `downloading_s`). The counts start again at zero.
        """

        def share_s(seconds: float) -> float:
            """Return one round's share of some seconds, rounded to microseconds."""
            return round(seconds / num_ended, 6)

        up_s = self.pool.up_s()
        num_bytes = self.pool.wire_bytes
        shares: dict[str, float] = {
            "wire_bytes": num_bytes // num_ended,
            "up_s": share_s(up_s - self._up_s),
            "lost_s": share_s(self.pool.lost_s),
        }
        for use, seconds in zip(USES, self._spent_s.tolist(), strict=True):
            shares[f"{use}_s"] = share_s(seconds)

        self._up_s = up_s
        self.pool.wire_bytes = num_bytes % num_ended  # the rest counts next time
        self.pool.lost_s = 0.0
        self._spent_s = np.zeros(len(USES))
        return shares

    def _wait_for_rounds(self, state: State) -> dict[int, RoundRecord]:
        """Start rounds, wait until enough have ended, and decide which responses count in these.

        Enough is one round, or those of all trainers if they must stay together. Returns the rounds
        that have ended, by trainer id, in the order of `control.trainers`; they are no more in
        `self.rounds`.

        After a signal no round is started; `LAST_S` seconds later Stopped is raised if too few have
        ended. Raises ResourceError if a round cannot begin, a trainer's rounds keep failing, or no
        learner is left; when the learners are first started, also ConfigError and Preempted.
        """
        if self._fault is not None:  # the next rounds could not begin when the last ones ended
            raise self._fault
        control = state.control
        self.control_before = control
        self.pool.control = control
        if not self.pool.learners:  # this is the first round
            self.pool.start_all(control.num_workers)
        if not self.rounds:
            # After a resume, a merge or a spawn the ensemble has inner states to send.
            self._states.keep_states_of(state)
        num_needed = 1  # rounds that must end before this returns
        if self._keeps_together():
            num_needed = len(control.trainers)
        self._tell_s = time.monotonic()  # what is missing is said at once if there is no learner
        if self.pool.num_present:
            self._tell_s += TELL_S
        while True:
            if processes.is_asked_to_stop():
                # Set once: rounds under way have `LAST_S` seconds after the signal.
                self._stop_s = min(self._stop_s, time.monotonic() + LAST_S)
                if not self.rounds or time.monotonic() >= self._stop_s:
                    raise Stopped(state)
            else:
                self._begin_rounds(state)
            under_way = [m for m in control.trainers if m in self.rounds]
            over = [m for m in under_way if self.rounds[m].is_over(self.settings.engine)]
            if over and len(over) >= num_needed:
                break
            self._poll()
            self._say_progress(control)

        ended = {m: self.rounds.pop(m) for m in over}
        self._judge(state, ended)
        return ended

    def _judge(self, state: State, ended: Mapping[int, RoundRecord]) -> None:
        """Decide which responses count, and by which factor a difference is scaled down.

        Each round of `ended`, by trainer id, stores its result (`RoundRecord.judge`). A difference
        is scaled down if its norm, per update, is much larger than usual: than the norms that were
        accepted in the trainer's earlier rounds.

        `self._accepted_norms` is set for the next rounds: by trainer, the last `KEPT_NORMS`
        accepted norms, with those of this round.
        """
        control = state.control
        self._accepted_norms = {}
        for key, past in control.norms.items():  # keys are ids as text, as in JSON
            if int(key) in control.trainers:  # else it was merged into another
                self._accepted_norms[key] = past
        for m, each in ended.items():
            past = self._accepted_norms.get(str(m), [])
            # The parameters with which the round began, of this trainer alone (M is 1). Only
            # floating-point ones are trained.
            start_M = take(state.ensemble, control.positions([m])).params_M
            params_norm = float(norms(trainable(start_M))[0])
            accepted = each.judge(past, params_norm, self.settings.outer.clip_workers)
            self._accepted_norms[str(m)] = [*past, *accepted][-decisions.KEPT_NORMS :]

    def _say_progress(self, control: Control) -> None:
        """Print what the driver waits for, if that takes long: at `_tell_s`, then every `TELL_S` s.

        The line has the next round of the slowest trainer, which `control.round` counts; its counts
        of responses are of all rounds under way (`self.rounds`).
        """
        if time.monotonic() < self._tell_s:
            return
        self._tell_s = time.monotonic() + TELL_S
        if not self.pool.num_present:
            say("no learner: waiting for one")
            return

        now_s = time.monotonic()
        # Seconds until the last response comes, as the learners' speeds predict; infinity: some
        # learner has not been measured yet.
        left_s = 0.0
        unknown: list[str] = []  # texts about the learners whose work ends at an unknown time
        for call in self.pool.pending("run_round"):
            assert call.request is not None
            learner = self.pool.learners[call.learner]
            end_s = learner.sent_s + learner.predicted_s(call.request.num_sequences)
            left_s = max(left_s, end_s - now_s)
            if learner.compiling_s is not None:
                unknown.append(
                    f"learner {call.learner} compiles, {now_s - learner.compiling_s:.0f} s"
                )
            elif math.isinf(end_s):  # its first round
                unknown.append(f"learner {call.learner} works, {now_s - learner.sent_s:.0f} s")

        num_come = sum(len(each.reported) for each in self.rounds.values())
        num_asked = num_come + sum(len(each.awaited) for each in self.rounds.values())
        line = f"round {control.round + 1}: {num_come} of {num_asked} responses have come"
        if 1 <= left_s < math.inf:
            line += f", the last in about {left_s:.0f} s"
        say("; ".join([line, *unknown]))

    def _outer_updates(
        self, state: State, ended: Mapping[int, RoundRecord]
    ) -> tuple[Ensemble, dict[int, Outcome]]:
        """Apply the outer update to each trainer whose round has ended, and close the round.

        `ended` has the rounds by trainer id. Returns the ensemble without inner states, which are
        in the learners now; and by trainer id the losses and skipped updates of the round, with the
        norm of the workers' mean difference, NaN if the trainer has not changed.
        """
        ensemble = state.ensemble.replace(inner_state_R=None)
        outcomes = {}
        for m, each in ended.items():
            worker_ids = state.control.trainers[m].streams
            norm = math.nan  # if no response counts
            if each.counted:
                # The trainer alone is taken out of the arrays [M, ...], updated, and put back.
                position_M = state.control.positions([m])
                updated = self._outer_update(take(ensemble, position_M), worker_ids, each)
                ensemble = put(ensemble, position_M, updated.ensemble)
                norm = float(updated.norm_M[0])
                if math.isfinite(norm):  # otherwise the parameters are as before
                    self._record_change(m, each, worker_ids, updated.packed_updates)
            outcomes[m] = each.outcome(worker_ids, norm)
            self._close_round(each)
        return ensemble, outcomes

    def _record_change(
        self,
        trainer: int,
        record: RoundRecord,
        worker_ids: Sequence[int],
        packed_updates: Sequence[PyTree],
    ) -> None:
        """Record that a trainer's parameters have changed, for the next requests to learners.

        `record` is the round that has changed them, by its outer update; `worker_ids` are all
        workers of the trainer. `packed_updates` has the update, packed to be sent, or nothing.
        """
        update = None
        if packed_updates:  # there is one, unless differences are sent in float32
            update = jax.device_get(packed_updates[0])
        sender = None
        if record.request.takes_worker_params(self.spec) and not record.factors:
            # The trainer has taken the parameters of its only worker, whose learner has them. With
            # a factor, as the difference was scaled down, they are other ones.
            sender = record.senders[worker_ids[0]]
        self._params.record_change(trainer, update, sender)

    def _begin_next_rounds(self, state: State) -> None:
        """Begin the next rounds, so that learners work while observers evaluate and save.

        `state` is that after a round. Nothing begins after a signal, or if trainers may merge or
        get workers first. A ResourceError is kept for the next call of `round`.
        """
        self.control_before = state.control
        self.pool.control = state.control
        if not (processes.is_asked_to_stop() or self._changes_now(state.control)):
            try:
                self._begin_rounds(state)
            except ResourceError as error:
                self._fault = error  # observers must still save this round

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Return the state as it is, and no changes: nothing is left to synchronise.

        Only Streaming DiLoCo, which cannot use learners, synchronises again at the end of a run.
        """
        return state, []

    def losses(self, state: State, models: Sequence[Mapping[int, float]]) -> list[float]:
        """Compute the losses, on held-out rows, by which a planned merge is accepted or refused.

        Each of `models` is a trainer, or a planned merge of several: it maps ids of trainers to
        their weights, the representative first. Returns a loss for each, in nats per token, or per
        row for labelled rows. They are computed in this process.
        """
        return guard_losses(state, models, self.programs, self.heldout)

    def merge(
        self, state: State, members: Sequence[int], weights: Sequence[float], after: Control
    ) -> Ensemble:
        """Merge trainers, then move workers, after fetching the inner states from the learners.

        Args:
          state: Ensemble and control before the merge.
          members: Ids of the trainers that merge, the representative first.
          weights: Their weights in the merge, in the same order.
          after: The host's data after it, which says where each worker belongs then.

        Returns:
          The ensemble after the merge, with inner states.
        """
        # Where the members and each trainer's workers are in the ensemble's arrays.
        member_positions, worker_positions = merge_positions(state.control, members, after)
        for m in members:  # whole parameters are sent next, as no outer update makes a merge
            self._params.record_change(m, update=None)
        ensemble = self._states.ensemble_with_states(state, fetches=True)
        member_weights = np.asarray(weights, np.float32)
        # This calls `merged`, the compiled program, on parts of the ensemble, to save memory.
        return replace_in_parts(
            merged, ensemble, member_weights, member_positions, worker_positions
        )

    def spawn(self, state: State, trainer: int, num_workers: int) -> Ensemble:
        """Add workers to a trainer up to `num_workers`, after fetching the inner states.

        `state` has the ensemble and control before. Returns the ensemble with the new workers.
        """
        (position,) = state.control.positions([trainer])  # in arrays [M, ...]
        ensemble = self._states.ensemble_with_states(state, fetches=True)
        # This calls `spawned`, the compiled program, on parts of the ensemble, to save memory.
        return replace_in_parts(spawned, ensemble, position, num_workers)

    def complete(self, state: State) -> Ensemble:
        """Return the ensemble with inner states, fetched from the learners, to save it.

        They are fresh instead if the links to learners are slow, or `inner.state=reset`.
        """
        # Before the learners are started there is no transport, and all states are here.
        fetches = not self.pool.learners or self.pool.transport.moves_states
        return self._states.ensemble_with_states(state, fetches=fetches)

    def close(self) -> None:
        """End all learners, and what was started to reach them."""
        self.pool.close()

    # -- Rounds --------------------------------------------------------------------------------

    def _keeps_together(self) -> bool:
        """Whether all trainers must have ended a round before any of them starts the next.

        They must if the run adds workers, or ends at a number of tokens: both depend on what all
        trainers have done.
        """
        settings = self.settings
        return settings.ensemble.initial_workers is not None or math.isfinite(settings.last_token)

    def _may_begin(self, control: Control, trainer: int) -> bool:
        """Whether a trainer may begin its next round now, without waiting for others.

        If trainers stay together, it waits until all have ended as many rounds as it has.
        Otherwise it waits only before the next possible merge, and at the end of the run.
        """
        settings = self.settings
        num_ended = control.rounds_of(trainer)  # `control.round` counts those of the slowest one
        if self._keeps_together():
            return num_ended == control.round
        last_round = settings.last_round
        if settings.merge.policy != "none" and len(control.trainers) > 1:
            every = settings.merge.every_rounds
            merge_round = (control.round // every + 1) * every  # after which a merge comes next
            last_round = min(merge_round, last_round)
        return num_ended < last_round

    def _changes_now(self, control: Control) -> bool:
        """Whether the run is over, or trainers may merge or get workers before their next round."""
        settings = self.settings
        done = settings.share_done(control.round, control.tokens_total)  # 1 or more: all of the run
        if not control.trainers or done >= 1:
            return True
        joining = joining_workers(control, settings.ensemble, done)
        return merge_due(control, settings.merge, done) or bool(joining)

    def _begin_rounds(self, state: State) -> None:
        """Start a round of every trainer that may begin one and has a worker on a free learner.

        Workers are assigned to learners first. The record of each round is added to `self.rounds`.
        Raises ResourceError if no learner is left.
        """
        control = state.control
        now_s = time.monotonic()
        # Trainers whose last round has failed, until the pause after it is over.
        waiting = {m for m, failure in self._failures.items() if now_s < failure.until_s}
        idle = []  # trainers that may begin a round
        for m in control.trainers:
            if m not in self.rounds and m not in waiting and self._may_begin(control, m):
                idle.append(m)
        if not idle:
            return
        self._assign_workers(control, idle)

        plans = round_plans(control, self.settings, idle)
        # Learning rates may depend on the run's tokens, to which all these rounds add.
        num_sequences = 0
        for m, plan in plans.items():
            num_sequences += plan.num_sequences * len(control.trainers[m].streams)
        round_tokens = self.spec.sequence_length * num_sequences

        hosts = self._free_hosts()
        for m, plan in plans.items():
            rate_T = learning_rates(control, m, plan, self.settings, round_tokens=round_tokens)
            record = self._start_round(state, m, plan, rate_T, hosts)
            if record is not None:
                self.rounds[m] = record

    def _free_hosts(self) -> dict[int, decisions.LearnerRecord]:
        """Return, by worker id, the learners that can run a round of these workers now.

        A learner cannot if it has not joined, is leaving, or runs a round.
        """
        occupied = {call.learner for call in self.pool.pending("run_round")}  # their numbers
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
        """Send a trainer's round to the learners of its workers; return its record.

        Workers whose learner is not free have no part in the round.

        Args:
          state: Ensemble and control before the round.
          trainer: Id of the trainer.
          plan: Sizes of the round.
          rate_T: Learning rate of each micro-batch.
          hosts: The learners that are free, by the ids of their workers.

        Returns:
          The record, in which the learners that were asked are awaited. None if no worker's learner
          is free: the round does not begin.
        """
        control = state.control
        settings = self.settings
        # Position of the round's first sequence in each worker's rows.
        starts = {worker_id: start for _, worker_id, start in control.reads([trainer])}
        # Those of this trainer's workers whose learner is free, and that learner.
        free = {worker_id: hosts[worker_id] for worker_id in starts if worker_id in hosts}
        if not free:
            return None

        # What all learners are asked; each is sent a copy with its workers in the field `work`.
        request = Request(
            trainer=trainer,
            round=control.rounds_of(trainer) + 1,
            micro_batch_size=plan.micro_batch_size,
            num_accum_steps=plan.num_accum_steps,
            num_updates=plan.num_updates,
            is_single=len(starts) == 1,
        )
        record = RoundRecord(plan, rate_T, request, time.monotonic())

        # Slower learners make fewer updates: only some of the equal parts of a round.
        parts = decisions.num_parts(settings.inner.steps_per_round, settings.engine)
        measured_s = {worker_id: learner.sequence_s for worker_id, learner in free.items()}
        updates = decisions.updates_by_speed(plan.num_updates, parts, measured_s)  # by worker id
        # On how many of a worker's first sequences gradient statistics are measured.
        num_tested = test_count(plan, len(starts), settings.batching)
        (position,) = control.positions([trainer])  # in arrays [M, ...]

        @functools.cache  # several learners may need the parameters, or none
        def whole_params() -> PyTree:
            """Return the trainer's parameters, in NumPy and without axis M."""
            return jax.device_get(trainer_params(state.ensemble, position))

        # Each learner gets one request, with the workers that it runs, in the order of numbers.
        learners = {learner.number: learner for learner in free.values()}
        for _, learner in sorted(learners.items()):
            work = []
            for worker_id, host in free.items():
                if host is learner:
                    num_updates = updates[worker_id]
                    work.append(
                        WorkerRequest(
                            worker_id=worker_id,
                            start=starts[worker_id],
                            num_updates=num_updates,
                            # A slow worker may read fewer sequences than are to be measured.
                            num_tested=min(num_tested, request.sequences(num_updates)),
                        )
                    )
            own_request = request._replace(work=tuple(work))
            self._send_request(learner, own_request, rate_T, whole_params)
            record.awaited.add(learner.number)
        return record

    def _send_request(
        self,
        learner: decisions.LearnerRecord,
        request: Request,
        rate_T: np.ndarray,
        whole_params: Callable[[], PyTree],
    ) -> None:
        """Send a learner its part of a round, with the parameters and inner states that it lacks.

        `request` has the learner's workers. Its fields about parameters are set here:
        `params_sha256`, their hash, and `is_update`, whether an update is sent. `rate_T` is
        the learning rate of each micro-batch. `whole_params` returns the trainer's parameters, in
        NumPy and without axis M; it is called only if they are sent or hashed.
        """
        states = {}  # by worker id
        for work in request.work:
            state = self._states.state_to_send(work.worker_id, learner)
            if state is not None:  # the learner lacks it
                states[work.worker_id] = state
        completed = self._params.complete_request(request, learner, whole_params)
        inputs = Inputs(rate_T, inner_states=states)
        self.pool.ask_for_round(learner.number, completed.request, inputs, completed.params)
        heartbeat_s = self.settings.engine.heartbeat_s
        learner.record_request(request.num_sequences, time.monotonic(), heartbeat_s=heartbeat_s)

    def _outer_update(
        self, ensemble: Ensemble, worker_ids: Sequence[int], record: RoundRecord
    ) -> _OuterUpdate:
        """Apply the outer update to a trainer, from the differences that learners have sent.

        A worker's weight in the mean is the number of sequences that it has read; it is zero if the
        worker's response does not count.

        Args:
          ensemble: This trainer alone, and its workers in the order of `worker_ids`.
          worker_ids: The ids of all its workers.
          record: The round. At least one response counts. `record.factors` has, by worker id, the
            number below 1 by which a difference is scaled down, as it is much larger than usual.

        Returns:
          The trainer after the update; the norm of the mean difference, `(1,)`; and a list with
          the update, packed to be sent. It is empty in float32, or if there is one worker.
        """
        # In place of a difference that does not count: zeros, and False for "is usable", as zeros
        # of a boolean array are. Such a difference is left out of the mean.
        some = next(iter(record.counted.values()))  # any one, for the shapes
        missing = jax.tree.map(np.zeros_like, some.differences)
        differences = []
        weights = []
        for worker_id in worker_ids:
            if worker_id in record.counted:
                num_sequences = record.spent(worker_id).num_sequences
                differences.append(record.counted[worker_id].differences)
                weights.append(num_sequences)
            else:
                differences.append(missing)
                weights.append(0)
        factor_R = None
        if record.factors:  # some difference is scaled down; those of other workers count as sent
            factors = [record.factors.get(worker_id, 1.0) for worker_id in worker_ids]
            factor_R = np.array(factors, np.float32)
        weights_R = np.array(weights, np.float32)
        return self._apply(ensemble, _concatenated(differences), weights_R, factor_R)

    def _close_round(self, record: RoundRecord) -> None:
        """Record the end of a round: who holds the workers' inner states now, and what went wrong.

        In `record`, `counted` has the responses that are part of the outer update, `awaited` the
        learners that have not answered, and `senders` the learner of each response. The ledger gets
        a line for each learner that is late, and for each worker's difference that was scaled down
        ("clipped") or does not count ("rejected").
        """
        trainer = record.request.trainer
        self._failures.pop(trainer, None)  # only failures in a row count
        for worker_id in record.counted:
            self._states.record_counted(worker_id, record.senders[worker_id])

        for number in sorted(record.awaited):  # learners that have not answered
            self.pool.note(number, "late", "no response within the grace of the quorum", trainer)
        for worker_id, factor in sorted(record.factors.items()):
            norm = record.norms[worker_id]
            cause = (
                f"worker {worker_id}: an update of norm {norm:.3g} counts as {factor * norm:.3g}"
            )
            self.pool.note(record.senders[worker_id].number, "clipped", cause, trainer)
        for worker_id in sorted(record.responses.keys() - record.counted.keys()):
            cause = f"worker {worker_id}: an update of norm {record.norms[worker_id]:.3g}"
            self.pool.note(record.senders[worker_id].number, "rejected", cause, trainer)

        # A worker without a usable update may have broken parameters or states in its learner.
        for worker_id in record.responses.keys() - record.useful:
            self._assume_empty(record.senders[worker_id], trainer)

    def _assume_empty(self, learner: decisions.LearnerRecord, trainer: int) -> None:
        """Assume that a learner has no parameters and inner states: its next requests bring them.

        It may lack them, or have broken ones. The parameters of `trainer`, whose round has failed
        there, are also stored anew for learners, as the stored ones may be the cause.
        """
        self._params.forget(learner, trainer)
        self._states.forget(learner)

    def _poll(self) -> None:
        """Process the responses of learners that have come, and the losses of learners.

        Waits a fraction of a second for them. Raises ResourceError if no learner is left or can be
        reached, or a trainer's rounds have failed for `PATIENCE_S` seconds; ConfigError if, at the
        start, a learner has other data or versions.
        """
        for event in self.pool.poll():
            match event:
                case StatesAnswer():
                    self._states.receive(event.keys, event.states)
                case RoundAnswer():
                    self._process_answer(event.learner, event.request, event.responses)
                case Loss():
                    if not self.pool.num_present:
                        self._tell_s = 0.0  # say at once that a learner is missing
                    self._continue_without(event.learner, event.cause)

    def _process_answer(
        self,
        learner: decisions.LearnerRecord,
        request: Request,
        responses: Sequence[Response] | Refused,
    ) -> None:
        """Add a learner's responses to its trainer's round; measure the learner's speed anew.

        `responses` has one for each entry of `request.work`. If the learner has refused the
        request, or they are not what was asked for, the round goes on without this learner. Raises
        ResourceError if the trainer's rounds have failed for `PATIENCE_S` seconds.
        """
        learner.due_s = None  # it has no work that must be done by a time
        try:
            if isinstance(responses, Refused):
                raise responses  # is treated like responses that are refused here
            check_responses(responses, request, self.spec)
        except Refused as error:
            self._assume_empty(learner, request.trainer)
            self.pool.note(learner.number, "refused", str(error), request.trainer)
            self._continue_without(learner, str(error))
            return
        learner.num_responses += 1
        if request.takes_worker_params(self.spec):
            # The trainer will take its only worker's parameters if the response counts. The learner
            # has done so already, so its parameters are no version that is known here.
            learner.params_ids.pop(request.trainer, None)

        precision = request.precision(self.spec)
        by_worker: dict[int, Response] = {}
        norms: dict[int, float] = {}
        for work, response in zip(request.work, responses, strict=True):
            by_worker[work.worker_id] = response
            norm_R = self._norms_of(precision, response.differences.packed_R)
            norms[work.worker_id] = float(norm_R[0])

        # A learner may claim anything, but it cannot have computed before it was asked.
        elapsed_s = time.monotonic() - learner.sent_s
        claimed_s = float(sum(response.seconds for response in responses))
        computing_s = min(claimed_s, elapsed_s)
        between_s = np.zeros(3)  # since its last round: uploading, waiting, downloading
        for response in responses:
            between_s += response.between_s
        self._spent_s += learner.credible_s([computing_s, *between_s], time.monotonic())
        learner.sequence_s.append(computing_s / request.num_sequences)
        learner.transfer_s.append(elapsed_s - computing_s)

        if request.trainer in self.rounds:  # otherwise the round has ended
            self.rounds[request.trainer].add_responses(learner, by_worker, norms)

    def _continue_without(self, learner: decisions.LearnerRecord, cause: str) -> None:
        """Continue the rounds that wait for a learner without it.

        A round to which no other learner has responded, or will, is dropped, and begins again
        after a pause. Raises ResourceError if a trainer's rounds have failed for `PATIENCE_S`
        seconds. `cause` says in words why the learner has failed.
        """
        now_s = time.monotonic()
        for trainer, each in [*self.rounds.items()]:  # a copy, as rounds are deleted
            each.awaited.discard(learner.number)
            if each.awaited or each.responses:
                continue
            del self.rounds[trainer]
            none = _Failure(first_s=now_s, count=0, until_s=now_s)  # this is the first one
            before = self._failures.get(trainer, none)
            failed_s = now_s - before.first_s
            if failed_s > PATIENCE_S:
                raise ResourceError(
                    f"trainer {trainer}: its round has failed for {failed_s:.0f} s; learner"
                    f" {learner.number}: {cause}"
                )
            count = before.count + 1
            until_s = now_s + decisions.pause_s(count)  # pauses grow with the failures in a row
            self._failures[trainer] = _Failure(first_s=before.first_s, count=count, until_s=until_s)

    # -- Membership ----------------------------------------------------------------------------

    def _assign_workers(self, control: Control, idle: Sequence[int]) -> None:
        """Assign workers to learners, and fetch the inner states of those that move to another.

        The result is in `LearnerRecord.worker_ids`. `idle` are trainers that may begin a round now.
        A worker may move only if it is one of theirs, and its learner runs no round. Learners that
        were asked to leave are let go first.
        """
        trainers = control.trainer_of  # by worker id
        busy = {call.learner for call in self.pool.pending("run_round")}  # numbers of learners
        self._let_leave(control, busy)

        movable: set[int] = set()  # workers between two rounds
        for m in idle:
            movable.update(control.trainers[m].streams)
        for number in busy:
            movable.difference_update(self.pool.learners[number].worker_ids)
        returning: set[int] = set()  # workers whose lost learner may soon be back
        now_s = time.monotonic()
        for learner in self.pool.learners.values():
            if learner.lost_s is None:
                continue
            is_recent = now_s - learner.lost_s < self.settings.engine.restart_s
            if is_recent and learner.started_s < math.inf:  # infinity: it is not started again
                returning.update(learner.worker_ids)

        present = [each for each in self.pool.learners.values() if each.joined]
        # By worker id, the number of its learner; without the workers that wait for one.
        hosts = decisions.assign(present, trainers, movable, returning=returning)
        moving = {}  # by worker id, the learner to which it goes or where it stays
        for worker_id in movable & hosts.keys():
            moving[worker_id] = self.pool.learners[hosts[worker_id]]
        self._states.bring_here(control, moving)

        for learner in self.pool.learners.values():
            given = {worker_id for worker_id, number in hosts.items() if number == learner.number}
            # A lost learner keeps those that wait for it.
            kept = {
                worker_id
                for worker_id in learner.worker_ids
                if worker_id in trainers and worker_id not in hosts
            }
            learner.worker_ids = sorted(kept | given)

    def _let_leave(self, control: Control, busy: set[int]) -> None:
        """End learners that were asked to leave and have no part in a round under way.

        A learner has a part if it is in `busy`, the numbers of learners that run a round, or has
        responded to a round. The inner states of its workers are brought here first.
        """
        taking_part = busy.union(*(each.reported for each in self.rounds.values()))  # numbers
        for number, learner in [*self.pool.learners.items()]:
            is_asked = learner.leaving and learner.joined
            if not is_asked or number in taking_part:
                continue
            targets = dict.fromkeys(learner.worker_ids)  # None each: their next learner is unknown
            self._states.bring_here(control, targets)
            if self.pool.learners[number] is not learner:
                continue  # it was lost while its states were awaited
            self.pool.let_go(learner)


def _concatenated(trees: Sequence[PyTree]) -> PyTree:
    """Join trees, one for each worker, to one tree: their arrays along axis R, the first."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)


def _stats_by_trainer(ended: Mapping[int, RoundRecord]) -> Stats:
    """Collect the gradient statistics of the workers whose responses count, by trainer id.

    `ended` has the rounds by trainer id. Each field of the statistics is an array float64 [R], as
    the batch-size tests want it; R counts the trainer's workers that measured some. A trainer of
    which nothing was measured is left out.
    """
    stats = {}
    for m, each in ended.items():
        responses = each.counted.values()
        tested = [response.stats_R for response in responses if response.stats_R is not None]
        if tested:
            stats[m] = jax.tree.map(lambda x: x.astype(np.float64), _concatenated(tested))
    return stats
