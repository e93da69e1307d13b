"""The local engine: it runs the rounds of all trainers on the devices that JAX sees.

Trainers whose rounds have equal sizes run together in one compiled program. If trainers have
unequal numbers of workers, groups of them have devices of their own (`inputs.classes`).
"""

import copy
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.compress import packed_bytes
from adloco_jax.core.types import Ensemble, put
from adloco_jax.crashpoints import crash_point
from adloco_jax.engine.evaluate import HeldOut, guard_losses, merged_loss
from adloco_jax.engine.inputs import (
    Batch,
    Group,
    Rows,
    classes,
    foreseen,
    make_batch,
    programs_ahead,
    reads,
    whole_pool,
)
from adloco_jax.engine.programs import Programs, merged, replace, spawned, taken
from adloco_jax.engine.round import Outcome, by_update, inner_round, measure
from adloco_jax.engine.sharding import placement, reshard
from adloco_jax.engine.spec import ProgramKey, Spec
from adloco_jax.loop.adloco import State, Stats
from adloco_jax.loop.control import Control, RoundPlan, StateBytes, count_flush, count_round
from adloco_jax.loop.plans import round_plans, share_done
from adloco_jax.settings import Settings

# A trainer is removed if each of its workers has skipped this many updates in a row.
SKIPS_BEFORE_QUARANTINE = 3


class UnderWay(NamedTuple):
    """A round whose programs have been dispatched to the devices; its results are read later."""

    lines: list[dict]  # for each trainer, ledger fields of the round's sizes and cost
    groups: list[Group]  # groups of trainers whose workers ran the same programs
    measured: list[list[tuple[Array, Array]]]  # by group and call: losses, skipped; [T, R]
    stacks: list[Group]  # groups that were synchronised together
    norms: list[list[Array]]  # by stack and synchronisation: norms of pseudo-gradients [M]


class Metrics(NamedTuple):
    """The results of a round that has ended."""

    lines: list[dict]  # for each trainer, ledger fields of the round: sizes, cost, skipped updates
    outcomes: list[Outcome]  # one for each trainer
    step_s: float  # seconds from the round's first row to its last update
    stall_s: float  # seconds within `step_s` in which the round waited for compilation


OnCall: TypeAlias = Callable[[float, Array], None] | None
"""Called with the share of the run that is done and losses; None: nobody is called."""


class LocalEngine:
    """Runs the rounds of all trainers; `loop.adloco.Engine` describes the methods."""

    def __init__(
        self,
        settings: Settings,
        spec: Spec,
        programs: Programs,
        rows: Rows,
        heldout: HeldOut,
        on_call: OnCall = None,
    ):
        """Make an engine; `on_call` learns the share of the run and the losses of an ended call."""
        self.settings, self.spec, self.programs = settings, spec, programs
        self._on_call = on_call
        # Calls of `steps` that are not yet reported: the share of the run at their end, the losses.
        self._unreported: deque[tuple[float, Array]] = deque()
        self._shares: Iterator[float] = iter(())  # the shares of the calls to come
        self.rows, self.heldout = rows, heldout
        # The host's data before the current round; a caller needs them if the round fails.
        self.underway: Control
        # Inputs made ahead, or the exception, with the values that determine them.
        self._ahead: tuple[tuple, Batch | Exception] | None = None
        # When the round began: the clock, and the seconds that calls had waited for compilation.
        self._start_s = self._stalled_s = 0.0
        self._flushed: set[int] = set()  # ids of trainers that were flushed after the last round

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes of the parameters and optimizer states that are sent in merges and joins."""
        return self.spec.state_bytes

    def ready(self, state: State) -> list[int]:
        """Return all positions: all trainers run each round together. Start the round's clock."""
        self.underway = state.control  # set before sequences are read, which may fail
        self._start_s, self._stalled_s = time.perf_counter(), self.programs.stall_s
        return list(range(len(state.control.trainers)))

    def batch(self, state: State, plans: Mapping[int, RoundPlan]) -> Batch:
        """Return a round's inputs, if possible those that `look_ahead` made; raise its errors."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == reads(state.control, plans):
            if isinstance(ahead[1], Exception):
                raise ahead[1]
            return ahead[1]
        return make_batch(state.control, plans, self.settings, self.spec, self.rows)

    def look_ahead(self, control: Control) -> None:
        """Make the next round's inputs; compile the next two rounds' programs in the background."""
        after_merge = foreseen(control, self.settings)
        self.programs.prefetch(programs_ahead(after_merge, self.settings, self.spec))
        plans = round_plans(control, self.settings)
        try:
            batch: Batch | Exception = make_batch(
                control, plans, self.settings, self.spec, self.rows
            )
        except Exception as error:  # deliberately broad, because `batch` raises the error later
            batch = error
        self._ahead = reads(control, plans), batch

    def gradient_stats(self, state: State, batch: Batch) -> Stats:
        """Start to measure gradient statistics of all trainers on the round's first sequences."""
        stats = []
        for test in batch.tests:
            params_M, group = state.ensemble.params_M, test.group
            if len(group.trainers) < state.ensemble.num_trainers:
                params_M = _rows(params_M, group.trainers)
            stats_R = measure(self.programs, params_M, test)
            stats.append((group.trainers, group.owners, test.count_R, stats_R))
        return stats

    def outer_step(self, state: State, batch: Batch) -> tuple[State, UnderWay]:
        """Dispatch the programs of a round to the devices; `finish` waits for their results."""
        control, spent = count_round(
            state.control,
            batch.plans,
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            num_syncs=self.spec.outer.fragments,
        )
        before, after = (
            share_done(each.round, each.tokens_total, self.settings)
            for each in (state.control, control)
        )
        shares = np.linspace(before, after, sum(map(len, batch.calls)) + 1)
        self._shares = iter(shares[1:].tolist())
        self._unreported.clear()
        ensemble, *dispatched = self._dispatch(state, batch)
        self._flushed.clear()
        lines = [line | cost for line, cost in zip(batch.lines, spent, strict=True)]
        return State(ensemble, control), UnderWay(lines, batch.groups, *dispatched)

    def finish(self, state: State, underway: UnderWay) -> tuple[State, Metrics, list[dict]]:
        """Wait for a round, count skipped updates, remove broken trainers (a ledger line each)."""
        crash_point("round.decided")
        self._report(wait=True)
        jax.block_until_ready(underway.norms)
        step_s, stall_s = time.perf_counter() - self._start_s, self.programs.stall_s
        outcomes = _outcomes(underway)
        for line, outcome in zip(underway.lines, outcomes, strict=True):
            line["skipped_updates"] = int(outcome.skipped_SR.sum())
        metrics = Metrics(underway.lines, outcomes, step_s, stall_s - self._stalled_s)
        control, broken = count_skips(state.control, outcomes)
        state, changes = without_broken(State(state.ensemble, control), broken)
        return state, metrics, changes

    def complete(self, state: State) -> Ensemble:
        """Return the ensemble: here it is always complete."""
        return state.ensemble

    def close(self) -> None:
        """Do nothing: the run, which made the programs, closes them."""

    def _dispatch(self, state: State, batch: Batch) -> tuple[Ensemble, list, list, list]:
        ensemble, measured, norms = state.ensemble, [], []
        work = list(zip(batch.groups, batch.calls, strict=True))
        stacks = [(group, [(group, calls)]) for group, calls in work]
        if self.spec.by_position:
            stacks = [(whole_pool(state.control, self.spec), work)]
        for stack, inputs in stacks:
            extra_M = {name: x_M[list(stack.trainers)] for name, x_M in batch.extra_M.items()}
            sub, workers, stack_measured, stack_norms = inner_round(
                self.programs, self._take(ensemble, stack), stack, inputs, self._note
            )
            inner_state_R, workers = workers.inner_state_R, workers.replace(inner_state_R=None)
            if self.spec.outer.own_params:
                sub = sub.replace(params_R=workers.params_R)
            else:
                sub, norm_M = self.programs.call(stack.key("outer"), sub, workers, extra_M)
                stack_norms.append(norm_M)
            ensemble = self._put(ensemble, stack, sub.replace(inner_state_R=inner_state_R))
            measured += stack_measured
            norms.append(stack_norms)
        if len(stacks) > 1:
            at = ensemble.round.sharding
            ensemble = ensemble.replace(round=reshard(np.int32(state.control.round + 1), at))
        return ensemble, measured, [stack for stack, _ in stacks], norms

    def _note(self, loss_TR: Array) -> None:
        self._unreported.append((next(self._shares), loss_TR))
        self._report(wait=False)

    def _report(self, *, wait: bool) -> None:
        """Report the calls that have ended; with `wait`, all calls of the round."""
        while self._on_call and self._unreported:
            share, loss_TR = self._unreported[0]
            # Arrays have this method, but the type `jax.Array` does not declare it.
            if not wait and not loss_TR.is_ready():  # pyrefly: ignore[missing-attribute]
                break
            self._unreported.popleft()
            self._on_call(share, loss_TR.block_until_ready())

    def guard_losses(self, state: State) -> list[float]:
        """Compute each trainer's loss on the guard rows, the held-out rows for decisions."""
        return guard_losses(state.ensemble, self.programs, self.heldout)

    def merged_loss(self, state: State, members: Sequence[int], weights: Sequence[float]) -> float:
        """Compute the loss that a merged trainer would have on the guard rows."""
        return merged_loss(state.ensemble, members, weights, self.programs, self.heldout)

    def merge(
        self,
        ensemble: Ensemble,
        members: Sequence[int],
        weights: Sequence[float],
        owners: Sequence[int],
    ) -> Ensemble:
        """Merge trainers (`core.merge`), then move workers between trainers (`core.reassign`)."""
        weights_n = np.asarray(weights, np.float32)
        return replace(merged, ensemble, weights_n, tuple(members), tuple(owners))

    def spawn(self, ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
        """Add workers to a trainer until it has `num_workers` of them (`core.spawn`)."""
        return replace(spawned, ensemble, trainer, num_workers)

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Synchronise what is left unsynchronised, which happens only in Streaming DiLoCo."""
        ensemble, control = state
        owed = [m for m in sorted(trainers) if control.trainers[m].id not in self._flushed]
        if not owed or not self.settings.outer.leaves_unsynchronised:
            return state, []
        for group in classes(control, owed, self.spec):
            sub = self._take(ensemble, group)
            flushed = self.programs.call(group.key("flush"), sub.replace(inner_state_R=None))
            sub = flushed.replace(inner_state_R=sub.inner_state_R)
            ensemble = self._put(ensemble, group, sub)
        full_sync_bytes = packed_bytes(self.spec.params, self.spec.outer.precision)
        control, line = count_flush(control, owed, sync_bytes=full_sync_bytes)
        self._flushed.update(line["trainers"])
        return State(ensemble, control), [line]

    def _take(self, ensemble: Ensemble, group: Group) -> Ensemble:
        """Return the part of an ensemble that has only a group's trainers and their workers."""
        if group.workers == tuple(range(ensemble.num_workers)):
            return ensemble
        return taken(ensemble, group.trainers)

    def _put(self, ensemble: Ensemble, group: Group, sub: Ensemble) -> Ensemble:
        if group.workers == tuple(range(ensemble.num_workers)):
            return sub
        at = placement(self.spec, ProgramKey("outer", group.owners))  # a mesh of all devices
        return _put(ensemble, group.trainers, reshard(sub, at.ensemble(sub)))


def count_skips(
    control: Control, outcomes: Sequence[Outcome], trainers: Sequence[int] | None = None
) -> tuple[Control, list[int]]:
    """Return `control` with each worker's skipped updates in a row, and who is broken.

    `outcomes` are those of the trainers at the positions `trainers` (None: all), which `control`
    must still have with the workers that ran the round. A trainer is broken if each of its workers
    skipped its last `SKIPS_BEFORE_QUARANTINE` updates; the second result lists their positions.
    """
    control = copy.deepcopy(control)
    broken = []
    positions = range(len(control.trainers)) if trainers is None else trainers
    for position, outcome in zip(positions, outcomes, strict=True):
        trainer = control.trainers[position]
        streams = [str(control.streams[w]) for w in control.workers_of(position)]
        rows = {}
        columns = zip(streams, outcome.loss_SR.T, outcome.skipped_SR.T, strict=True)
        for stream, loss_S, skipped_S in columns:
            made = np.flatnonzero(~np.isnan(loss_S))
            before = 0 if made.size else trainer.skipped_in_a_row.get(stream, 0)
            rows[stream] = before + int(skipped_S[made[-1] + 1 if made.size else 0 :].sum())
        trainer.skipped_in_a_row = rows
        if min(rows.values()) >= SKIPS_BEFORE_QUARANTINE:
            broken.append(position)
    return control, broken


def without_broken(state: State, broken: Sequence[int]) -> tuple[State, list[dict]]:
    """Remove trainers from a state; return a ledger line for each of them too.

    If no trainer is left, the returned ensemble must not be used.
    """
    ensemble, control = state
    changes = []
    for trainer in (control.trainers[position] for position in broken):
        skips = max(trainer.skipped_in_a_row.values())
        fault = {"event": "fault", "kind": "quarantine", "round": control.round}
        changes.append(fault | {"trainer": trainer.id, "skipped_in_a_row": skips})
    if broken:
        control, survivors = without_trainers(control, broken)
        if survivors:
            ensemble = replace(taken, ensemble, tuple(survivors))
    return State(ensemble, control), changes


def without_trainers(control: Control, broken: Sequence[int]) -> tuple[Control, list[int]]:
    """Remove trainers from the control; return the old positions of those that remain too."""
    control = copy.deepcopy(control)
    survivors = [m for m in range(len(control.trainers)) if m not in broken]
    workers = [w for w, owner in enumerate(control.owners) if owner not in broken]
    for position in broken:
        trainer = control.trainers[position]
        retired = {"workers": control.owners.count(position)}
        control.quarantined.append({"trainer": trainer.id, "round": control.round} | retired)
    control.trainers = [control.trainers[m] for m in survivors]
    # As in the result of `core.take`, the workers of each trainer come next to one another.
    workers.sort(key=lambda worker: control.owners[worker])
    control.streams = [control.streams[w] for w in workers]
    control.owners = [survivors.index(control.owners[w]) for w in workers]
    return control, survivors


def _outcomes(underway: UnderWay) -> list[Outcome]:
    """Wait for the results of a round, and return the outcome of each trainer, by position."""
    outcomes, norm_of = {}, {}
    for stack, norms in zip(underway.stacks, underway.norms, strict=True):
        # The norm of all fragments joined; in float64, so that one fragment keeps its float32 norm.
        norm_M = np.linalg.norm(np.asarray(jax.device_get(norms), np.float64), axis=0).tolist()
        norm_of |= dict(zip(stack.trainers, norm_M, strict=True))
    for group, measured in zip(underway.groups, underway.measured, strict=True):
        loss_SR, skipped_SR = by_update(group, measured)
        for position, trainer in enumerate(group.trainers):
            own = np.array(group.owners) == position
            outcomes[trainer] = Outcome(loss_SR[:, own], skipped_SR[:, own], norm_of[trainer])
    return [outcomes[m] for m in sorted(outcomes)]


@functools.partial(jax.jit, static_argnums=1)
def _rows(tree_M: PyTree, trainers: tuple[int, ...]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[np.array(trainers)], tree_M)


_put = jax.jit(put, static_argnums=1, donate_argnums=0)
