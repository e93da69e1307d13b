"""The local engine: it runs the rounds of all trainers on the devices that JAX sees.

Trainers whose rounds have equal sizes run together in one compiled program. If trainers have
unequal numbers of workers, groups of them have devices of their own (`inputs.group_by_size`).

To dispatch a program is to queue it on the devices without waiting for its results. A call is one
run of the program of inner steps; a round has several. A flush synchronises the updates that
Streaming DiLoCo has not sent yet. A trainer is broken if its workers only skip updates. An ensemble
has the arrays of all trainers and workers. The members of a merge become one trainer; the first,
the representative, remains. The ledger is the run's file of events.

`spec`, a `ProgramSpec`, holds what all programs of the run share, such as loss, optimizers and
devices. A key names a program by its kind and sizes. A layout says whose workers arrays belong to,
and on which devices they are. `Control` is what the host knows of a run: trainers, their workers
and sizes. A state has the ensemble and the control. A boundary is what observers get after a round.

Axes of arrays: M trainers, R workers, W those of one trainer, S updates, T micro-batches.
"""

import copy
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.compress import packed_bytes
from adloco_jax.core.types import Ensemble, GradientStats, put
from adloco_jax.data.sampling import HeldOut
from adloco_jax.engine.evaluate import guard_losses
from adloco_jax.engine.inputs import (
    Group,
    RoundInputs,
    Rows,
    StatsRows,
    foreseen,
    group_by_size,
    make_round_inputs,
    programs_ahead,
    round_identity,
)
from adloco_jax.engine.programs import (
    Programs,
    merge_positions,
    merged,
    replace_in_parts,
    spawned,
    taken,
)
from adloco_jax.engine.round import Outcome, by_update, inner_round, measure
from adloco_jax.engine.sharding import placement, reshard
from adloco_jax.engine.spec import Layout, ProgramSpec
from adloco_jax.loop.adloco import Boundary, Decide, State, Stats, Stopped
from adloco_jax.loop.control import Control, RoundPlan, count_flush, count_round
from adloco_jax.loop.growth import Decision
from adloco_jax.loop.plans import is_over, round_plans
from adloco_jax.settings import Settings

# A trainer is removed if each of its workers has skipped this many updates in a row.
SKIPS_BEFORE_QUARANTINE = 3

LAST_S = 10.0  # after a signal a round that ends within so many seconds is finished
LONG_S = 1.0  # if calls take more seconds, only one is queued, as queued ones cannot be stopped


class Metrics(NamedTuple):
    """The results of a round that has ended."""

    lines: list[dict]  # for each trainer, ledger fields of the round: sizes, cost, skipped updates
    outcomes: list[Outcome]  # one for each trainer
    step_s: float  # seconds from the round's first row to its last update
    stall_s: float  # seconds within `step_s` in which the round waited for compilation


class Measured(NamedTuple):
    """What a group's round measures, in arrays on devices, which may still be computed."""

    group: Group
    calls: list[tuple[Array, Array]]  # for each call: losses, and skipped updates, both [T, R]
    norms: list[Array]  # for each synchronisation: L2 norms of the trainers' pseudo-gradients [M]


OnCall: TypeAlias = Callable[[float, Array], None] | None
"""Called with the share of the run that is done and losses; None: nobody is called."""


class LocalEngine:
    """Runs the rounds of all trainers; `loop.adloco.Engine` describes the methods."""

    def __init__(
        self,
        settings: Settings,
        spec: ProgramSpec,
        programs: Programs,
        rows: Rows,
        heldout: HeldOut,
        on_call: OnCall = None,
        is_stopped: Callable[[], bool] = bool,  # `bool()` is False: never
    ):
        """Make an engine; nothing is computed yet.

        Args:
          settings: The settings of the run.
          spec: What its programs share.
          programs: Its compiled programs; the caller closes them.
          rows: Its data.
          heldout: The rows on which losses are computed.
          on_call: Called when a call of the inner steps has ended, with the share of the run that
            is then done and the call's losses [T, R].
          is_stopped: Whether a signal has been received. Then a round that does not end within
            `LAST_S` seconds raises Stopped.
        """
        self.settings = settings
        self.spec = spec
        self.programs = programs
        self.rows = rows
        self.heldout = heldout
        self.state_bytes = spec.state_bytes
        self._on_call = on_call
        self._is_stopped = is_stopped
        self._begun: State  # before the current round
        # Of the current round, by calls of the inner steps:
        self._num_calls = 0  # how many the round has
        self._shares = deque[float]()  # the share of the run at the end of each call not reported
        self._losses = deque[Array]()  # losses of the calls that are dispatched and not reported
        self._clock_s = 0.0  # `_now_s` when the first call was dispatched
        self._call_s = math.inf  # mean seconds of a call; infinite until the first has ended
        # The host's data before the current round; a caller needs them if the round fails.
        self.control_before: Control
        # Inputs made ahead, or the exception, with the values that determine them.
        self._ahead: tuple[tuple, RoundInputs | Exception] | None = None
        self._flushed: set[int] = set()  # ids of trainers that were flushed after the last round

    def round(self, state: State, decide: Decide) -> tuple[State, Boundary]:
        """Run a round of all trainers.

        While the devices run its updates, the host prepares the next round, whose sizes `decide`
        chooses (`loop.adloco.Decide`). Returns the state after the round, and its results and
        decisions. Raises DataError if the round's rows cannot be read; Stopped after a signal, if
        the round would take more than `LAST_S` seconds.
        """
        settings = self.settings
        before = state.control
        self.control_before = before  # set before sequences are read, which may fail
        start_s = time.perf_counter()
        stalled_s = self.programs.stall_s

        # Read the rows, and dispatch the measurements of gradients.
        plans = round_plans(before, settings)
        round_inputs = self.inputs(before, plans)
        stats = [self._measure(state, test) for test in round_inputs.stats_rows]

        # Count the round. Note for each call the share of the run that is done at its end, in equal
        # steps.
        control, spent = count_round(
            before,
            plans,
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            num_syncs=self.spec.outer.fragments,
        )
        first = settings.share_done(before.round, before.tokens_total)
        last = settings.share_done(control.round, control.tokens_total)
        # What `_report` needs: it tells the caller which share of the run each call has ended.
        self._num_calls = sum(len(calls) for calls in round_inputs.calls)
        ends = np.linspace(first, last, self._num_calls + 1)[1:]
        self._shares = deque(ends.tolist())
        self._losses.clear()
        self._begun = state  # with which `_note` raises Stopped
        self._clock_s = self._now_s()

        # The devices run the updates, while the host decides and prepares the next round.
        ensemble, measured = self._dispatch(state, round_inputs)
        self._flushed.clear()
        stats_of = by_trainer(round_inputs.stats_rows, stats)  # waits for the measurements
        control, decisions = decide(control, stats_of, plans)
        if not is_over(control, settings):
            self.look_ahead(control)

        # Wait for the end of the updates, and of the synchronisations, whose norms end last.
        self._report(0)  # until no call is left
        jax.block_until_ready([of_group.norms for of_group in measured])
        step_s = time.perf_counter() - start_s
        stall_s = self.programs.stall_s - stalled_s

        # For each trainer, the ledger fields that the plan determines, and the costs.
        lines = {m: round_inputs.lines[m] | spent[m] for m in plans}
        outcomes = _outcomes(measured)
        state = State(ensemble, control)
        return end_round(state, lines, outcomes, decisions, step_s=step_s, stall_s=stall_s)

    def inputs(self, control: Control, plans: Mapping[int, RoundPlan]) -> RoundInputs:
        """Return the inputs of a round with these plans, by trainer id.

        Inputs that `look_ahead` made are used if they are for the same round and rows; the error
        with which it failed is then raised here. Otherwise the inputs are made now.
        """
        ahead = self._ahead
        self._ahead = None
        if ahead is not None:
            made_for, round_inputs = ahead
            if made_for == round_identity(control, plans):
                if isinstance(round_inputs, Exception):
                    raise round_inputs
                return round_inputs
        return make_round_inputs(control, plans, self.settings, self.spec, self.rows)

    def look_ahead(self, control: Control) -> None:
        """Make the next round's inputs; compile the next two rounds' programs in the background.

        `control` is the host's data at the end of the current round. Programs are compiled for the
        merge that is foreseen; inputs are made as if trainers and workers stayed the same. If they
        do not, `inputs` sees that by `round_identity`, what the inputs were made for, and makes
        them anew.
        """
        settings = self.settings
        done = settings.share_done(control.round, control.tokens_total)
        after_merge = foreseen(control, settings.merge, settings.ensemble, done)
        self.programs.prefetch(programs_ahead(after_merge, settings, self.spec))
        plans = round_plans(control, settings)
        try:
            round_inputs: RoundInputs | Exception = make_round_inputs(
                control, plans, settings, self.spec, self.rows
            )
        except Exception as error:  # deliberately broad, because `inputs` raises the error later
            round_inputs = error
        self._ahead = round_identity(control, plans), round_inputs

    def _measure(self, state: State, test: StatsRows) -> GradientStats:
        """Dispatch the measurement of a group's gradient statistics, and do not wait for it.

        `test` has the group, and the rows on which each of its workers is measured. Returns the
        statistics with fields [R], for the workers of the group.
        """
        params_M = state.ensemble.params_M
        trainers = test.group.trainers
        if len(trainers) < state.ensemble.num_trainers:  # take those of the group alone
            params_M = _at_positions(params_M, state.control.positions(trainers))
        return measure(self.programs, params_M, test)

    def complete(self, state: State) -> Ensemble:
        """Return the ensemble of `state`, which always has all inner states here."""
        return state.ensemble

    def close(self) -> None:
        """Do nothing: the run, which made the programs, closes them."""

    def _dispatch(self, state: State, round_inputs: RoundInputs) -> tuple[Ensemble, list[Measured]]:
        """Dispatch the programs of a round's updates to the devices, and do not wait for them.

        `round_inputs` has the groups, and for each group the arguments of its calls. Returns the
        ensemble after the round, and what each group measures; both may still be computed. Raises
        Stopped after a signal, if the round would take more than `LAST_S` seconds.
        """
        ensemble = state.ensemble
        measured = []
        for group, calls in zip(round_inputs.groups, round_inputs.calls, strict=True):
            positions = state.control.positions(group.trainers)
            sub, workers, losses_and_skips, norms = inner_round(
                self.programs, _take(ensemble, positions), group, calls, self._note
            )
            if self.spec.outer.own_params:  # Streaming DiLoCo has synchronised on the way
                sub = sub.replace(params_R=workers.params_R)
            else:  # the outer update does not read inner states
                without_states = workers.replace(inner_state_R=None)
                sub, norm_M = self.programs.call(group.key("outer"), sub, without_states)
                norms.append(norm_M)
            sub = sub.replace(inner_state_R=workers.inner_state_R)
            ensemble = self._put(ensemble, positions, sub)
            measured.append(Measured(group, losses_and_skips, norms))
        if len(measured) > 1:  # each group has added one to `round`, where only one has passed
            next_round = reshard(np.int32(state.control.round + 1), ensemble.round.sharding)
            ensemble = ensemble.replace(round=next_round)
        return ensemble, measured

    def _note(self, loss_TR: Array) -> None:
        """Take the losses of a call that was dispatched, and report the calls that have ended.

        If calls are long, wait until only this one is left. Raises Stopped after a signal, if the
        round would take more than `LAST_S` seconds.
        """
        self._losses.append(loss_TR)
        # `_report` waits until at most so many calls have not ended. Any number of short ones may
        # be queued (`inf`), so that devices need not wait.
        self._report(1 if self._call_s > LONG_S else math.inf)
        if self._is_stopped() and self.left_s > LAST_S:
            raise Stopped(self._begun)

    def _report(self, most: float) -> None:
        """Report the calls that have ended, in their order; wait until at most `most` have not."""
        while self._losses:
            # Whether the call has ended; the type `jax.Array` does not declare this method.
            ready = self._losses[0].is_ready()  # pyrefly: ignore[missing-attribute]
            if not ready and len(self._losses) <= most:
                break
            share = self._shares.popleft()
            loss_TR = self._losses.popleft().block_until_ready()
            num_ended = self._num_calls - len(self._shares)
            self._call_s = (self._now_s() - self._clock_s) / num_ended
            if self._on_call:
                self._on_call(share, loss_TR)

    @property
    def left_s(self) -> float:
        """Seconds that the current round will still take; NaN before a first call has ended."""
        num_left = len(self._shares)
        if num_left == self._num_calls:
            return math.nan
        return self._call_s * num_left

    def _now_s(self) -> float:
        """Return a clock's seconds, without those in which the engine waited for compilation."""
        return time.perf_counter() - self.programs.stall_s

    def losses(self, state: State, models: Sequence[Mapping[int, float]]) -> list[float]:
        """Compute losses on the guard rows, in nats/token, of trainers and of planned merges.

        Each of `models` is a trainer, or a merge of several. It maps the ids of its members to
        their weights in the merge, the representative first. Guard rows are the held-out rows that
        decide about merges.
        """
        return guard_losses(state, models, self.programs, self.heldout)

    def merge(
        self, state: State, members: Sequence[int], weights: Sequence[float], after: Control
    ) -> Ensemble:
        """Merge the trainers `members`, and give each trainer the workers that it has in `after`.

        `members` are ids, the representative first; `weights` are their weights in the mean.
        `after` is the host's data after the merge. The arrays of the ensemble in `state` may be
        deleted, to save memory.
        """
        positions, workers = merge_positions(state.control, members, after)
        weights_n = np.asarray(weights, np.float32)
        return replace_in_parts(merged, state.ensemble, weights_n, positions, workers)

    def spawn(self, state: State, trainer: int, num_workers: int) -> Ensemble:
        """Add workers to a trainer (its id) until it has `num_workers` of them.

        The arrays of the ensemble in `state` may be deleted, to save memory.
        """
        (position,) = state.control.positions([trainer])
        return replace_in_parts(spawned, state.ensemble, position, num_workers)

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Set trainers and their workers to the mean of the workers (`contrib.flush_workers`).

        `trainers` are ids. Only Streaming DiLoCo leaves workers with updates that are not
        synchronised. Trainers that were flushed since the last round are left out. Returns the
        state, with the communication counted, and one ledger line; the same state and no line if no
        trainer needs a flush.
        """
        ensemble, control = state
        # `round` empties `self._flushed`, as workers then have new updates.
        owed = [m for m in sorted(trainers) if m not in self._flushed]
        if not owed or not self.settings.outer.leaves_unsynchronised:
            return state, []
        for group in group_by_size(control, owed, self.spec):
            positions = control.positions(group.trainers)
            sub = _take(ensemble, positions)
            # A flush does not read inner states.
            flushed = self.programs.call(group.key("flush"), sub.replace(inner_state_R=None))
            flushed = flushed.replace(inner_state_R=sub.inner_state_R)
            ensemble = self._put(ensemble, positions, flushed)
        full_sync_bytes = packed_bytes(self.spec.params, self.spec.outer.precision)
        control, line = count_flush(control, owed, sync_bytes=full_sync_bytes)
        self._flushed.update(owed)
        return State(ensemble, control), [line]

    def _put(self, ensemble: Ensemble, positions: tuple[int, ...], sub: Ensemble) -> Ensemble:
        """Return the ensemble with the trainers of `sub`, in order, at these positions.

        If they are all trainers, `sub` is the result. Otherwise `ensemble` is donated: its arrays
        are deleted.
        """
        if len(positions) == ensemble.num_trainers:
            return sub
        # The group may have run on some of the devices; the ensemble is on all of them.
        all_devices = placement(self.spec, Layout(sub.sizes))
        return _written(ensemble, positions, reshard(sub, all_devices.ensemble(sub)))


def _take(ensemble: Ensemble, positions: tuple[int, ...]) -> Ensemble:
    """Return the trainers at these positions, with their workers; `ensemble` itself if all."""
    if len(positions) == ensemble.num_trainers:
        return ensemble
    return taken(ensemble, positions)


def end_round(
    state: State,
    lines: Mapping[int, dict],
    outcomes: Mapping[int, Outcome],
    decisions: list[Decision],
    *,
    step_s: float,
    stall_s: float = 0.0,
) -> tuple[State, Boundary]:
    """Count skipped updates, remove broken trainers, and collect the results for observers.

    Args:
      state: The state after the round, whose `control` counts the round.
      lines: By trainer id, the fields of its ledger line except `skipped_updates`.
      outcomes: By trainer id, the results of the round, for the trainers that ran.
      decisions: One for each of these trainers, in the same order.
      step_s: Seconds from the round's first row to its last update.
      stall_s: Seconds within `step_s` in which the round waited for compilation.

    Returns:
      The state without broken trainers, and the boundary, whose metrics are `Metrics`.
    """
    control, broken = count_skips(state.control, outcomes)
    state, changes = without_broken(State(state.ensemble, control), broken)
    ended = []
    for m, outcome in outcomes.items():
        num_skipped = int(outcome.skipped_SR.sum())
        ended.append(lines[m] | {"skipped_updates": num_skipped})
    metrics = Metrics(ended, [*outcomes.values()], step_s, stall_s)
    return state, Boundary(metrics, decisions, changes)


def count_skips(control: Control, outcomes: Mapping[int, Outcome]) -> tuple[Control, list[int]]:
    """Count each worker's skipped updates in a row; find the trainers that are broken.

    A trainer is broken if each of its workers skipped its last `SKIPS_BEFORE_QUARANTINE` updates.

    `outcomes` has the results of a round by trainer id. `control` must have these trainers with the
    workers that ran the round. Returns a copy of `control` with the new counts, and the ids of the
    broken trainers.
    """
    control = copy.deepcopy(control)
    broken = []
    for m, outcome in outcomes.items():
        trainer = control.trainers[m]
        in_a_row = {}  # by stream, as in `Trainer.skipped_in_a_row`
        workers = zip(trainer.streams, outcome.loss_SR.T, outcome.skipped_SR.T, strict=True)
        for stream, loss_S, skipped_S in workers:
            # Positions of updates that were made: those with a loss. Some may be neither made nor
            # skipped: a learner's round may have fewer updates than another's.
            made = np.flatnonzero(~np.isnan(loss_S))
            if made.size:
                after_last = made[-1] + 1
                in_a_row[str(stream)] = int(skipped_S[after_last:].sum())  # skipped since then
            else:  # none was made: the row of skipped updates goes on
                before = trainer.skipped_in_a_row.get(str(stream), 0)
                in_a_row[str(stream)] = before + int(skipped_S.sum())
        trainer.skipped_in_a_row = in_a_row
        if min(in_a_row.values()) >= SKIPS_BEFORE_QUARANTINE:
            broken.append(m)
    return control, broken


def without_broken(state: State, broken: Sequence[int]) -> tuple[State, list[dict]]:
    """Remove trainers from a state; return the state, and a ledger line for each of them.

    `broken` has their ids. If no trainer is left, the returned ensemble must not be used.
    """
    if not broken:
        return state, []
    ensemble = state.ensemble
    control = copy.deepcopy(state.control)
    changes: list[dict] = []
    for m in broken:
        trainer = control.trainers.pop(m)
        control.quarantined.append(
            {"round": control.round, "trainer": m, "workers": len(trainer.streams)}
        )
        changes.append(
            {
                "event": "fault",
                "kind": "quarantine",
                "round": control.round,
                "trainer": m,
                "skipped_in_a_row": max(trainer.skipped_in_a_row.values()),
            }
        )
    if control.trainers:
        # Keep the others, by their positions before the removal.
        ensemble = replace_in_parts(taken, ensemble, state.control.positions(control.trainers))
        # The run's round is that of the trainer with the fewest; the broken one may have been it.
        control.round = min(control.rounds_of(m) for m in control.trainers)
    return State(ensemble, control), changes


def by_trainer(stats_rows: Sequence[StatsRows], measured: Sequence[GradientStats]) -> Stats:
    """Return the gradient statistics of each tested trainer's workers, by trainer id.

    `measured` has the statistics of each group of `stats_rows`, with fields [R]. In the result
    fields are NumPy arrays float64 [W], one entry for each of the trainer's workers. Trainers whose
    workers measured nothing are left out.
    """
    stats = {}
    for test, stats_R in zip(stats_rows, measured, strict=True):
        fields_R = {}
        for name, value_R in vars(stats_R).items():
            fields_R[name] = np.asarray(value_R, np.float64)
        for m, workers in _workers_of(test.group):
            if test.count_R[workers.start]:  # the same number for all workers of a trainer
                fields_W = {name: value_R[workers] for name, value_R in fields_R.items()}
                stats[m] = GradientStats(**fields_W)
    return stats


def _outcomes(measured: Sequence[Measured]) -> dict[int, Outcome]:
    """Wait for what a round's groups measured; return the outcome of each trainer, by id.

    An outcome has the losses and skipped updates [S, W] of the trainer's workers, and the norm of
    its pseudo-gradient. Ids ascend.
    """
    outcomes = {}
    for group, calls, norms in measured:
        loss_SR, skipped_SR = by_update(group, calls)
        # `norms` has one array [M] for each fragment. Taken together they give the norm of all
        # fragments joined; in float64, so that one fragment keeps its float32 norm.
        norm_M = np.linalg.norm(np.asarray(jax.device_get(norms), np.float64), axis=0).tolist()
        for (m, workers), norm in zip(_workers_of(group), norm_M, strict=True):
            outcomes[m] = Outcome(loss_SR[:, workers], skipped_SR[:, workers], norm)
    return {m: outcomes[m] for m in sorted(outcomes)}


def _workers_of(group: Group) -> list[tuple[int, slice]]:
    """List each trainer's id, and the positions of its workers in the group's arrays [..., R]."""
    workers = []
    first = 0
    for m, size in zip(group.trainers, group.sizes, strict=True):
        workers.append((m, slice(first, first + size)))
        first += size
    return workers


@functools.partial(jax.jit, static_argnums=1)
def _at_positions(tree_M: PyTree, positions: tuple[int, ...]) -> PyTree:
    """Take the entries at these positions out of leaves [M, ...]."""
    return jax.tree.map(lambda leaf: leaf[np.array(positions)], tree_M)


# `_written(ensemble, positions, sub)` writes the trainers of `sub` to these positions, as `put`
# does. The memory of the old ensemble is used for the new one.
_written = jax.jit(put, static_argnums=1, donate_argnums=0)
