"""The local engine: every trainer on this program's own devices, dispatched and not waited for.

It implements `adloco.Engine`. Trainers that run the same plan share one program. Where
there are several devices and trainers have unequal numbers of workers, each such class of trainers
has devices of its own, so that what a synchronisation moves is what is accounted.
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.compress import packed_bytes
from adloco_jax.core.merge import merge, reassign, spawn
from adloco_jax.core.types import Ensemble, Workers, put, take
from adloco_jax.crashpoints import hit
from adloco_jax.engine.evaluate import HeldOut, mean_loss, merged_params, trainer_params
from adloco_jax.engine.health import (
    Diverged,
    Outcome,
    broken_trainers,
    with_outcomes,
    without_trainers,
)
from adloco_jax.engine.inputs import (
    Batch,
    Group,
    Rows,
    classes,
    make_batch,
)
from adloco_jax.engine.programs import Programs, placement
from adloco_jax.engine.sharding import reshard
from adloco_jax.engine.spec import Key, Spec
from adloco_jax.loop.adloco import State, Stats, merge_due
from adloco_jax.loop.control import Control, RoundPlan, StateBytes, count_flush, count_round
from adloco_jax.settings import Settings


class Event(NamedTuple):
    """What the engine has done about a fault or a flush, for the ledger and the terminal."""

    event: str  # of the ledger's line
    fields: dict[str, Any]
    note: str = ""


@dataclass
class Metrics:
    """A round under way on the devices."""

    round: int
    lines: list[dict]  # ledger fields by trainer: plan and cost
    groups: list[Group]
    measured: list[list[tuple[Array, Array]]]  # by group, by call: losses, skipped; [T, R]
    norms: list[list[Array]]  # by group, by synchronisation: [M], of the pseudo-gradients
    start_s: float
    stall_s: float  # waited for compilation
    end_s: Future[float]  # when the devices were done
    noted: list[dict] | None = None  # ledger fields by trainer, once a state has the outcomes

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """Losses and skipped updates of each trainer; waits for the round."""
        outcomes: dict[int, Outcome] = {}
        for group, measured, norms in zip(self.groups, self.measured, self.norms, strict=True):
            parts = jax.device_get(measured)
            loss_TR, skipped_TR = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            accum = group.plan.num_accum_steps
            loss_SAR = loss_TR.reshape(-1, accum, loss_TR.shape[1])
            loss_SR = loss_SAR.sum(axis=1) / np.float64(accum)
            skipped_SR = skipped_TR[accum - 1 :: accum]
            loss_SR = np.where(skipped_SR, np.nan, loss_SR)
            # Over the fragments, as of one vector; of a single one float64 gives it back exactly.
            norm_M = np.linalg.norm(np.asarray(jax.device_get(norms), np.float64), axis=0).tolist()
            for place, (trainer, norm) in enumerate(zip(group.trainers, norm_M, strict=True)):
                own = np.array(group.owners) == place
                outcomes[trainer] = Outcome(loss_SR[:, own], skipped_SR[:, own], norm)
        return [outcomes[m] for m in sorted(outcomes)]


# Reads the clock when a round ends; the host itself must not wait for the devices before it has
# dispatched the next round.
_clock = ThreadPoolExecutor(1, thread_name_prefix="clock")


class LocalEngine:
    """Runs rounds on this program's devices; see `adloco.Engine`."""

    def __init__(
        self, settings: Settings, spec: Spec, programs: Programs, rows: Rows, heldout: HeldOut
    ):
        """Starts with no round under way.

        Args:
          settings: The run's settings.
          spec: What its programs share.
          programs: Compiled, or to be compiled when first called.
          rows: What to train on.
          heldout: Its guard rows judge merges.
        """
        self.settings, self.spec, self.programs = settings, spec, programs
        self.rows, self.heldout = rows, heldout
        self.events: list[Event] = []  # not yet recorded
        self.underway: Control  # before the round under way, for who deals with its failure
        self._unread: list[Metrics] = []  # rounds whose outcomes the loop's state lacks
        self._flushed: set[int] = set()  # trainers, by id, with nothing left unsynchronised

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes that a merge or a reassignment of workers sends."""
        return self.spec.state_bytes

    def ready(self, state: State) -> list[int]:
        """All trainers: their devices take one round after the other."""
        self.underway = state.control  # reading its sequences may fail, too
        return list(range(len(state.control.trainers)))

    def batch(self, state: State, plans: Mapping[int, RoundPlan]) -> Batch:
        """The next sequences of every worker's stream, on their way to the devices."""
        return make_batch(state.control, plans, self.settings, self.spec, self.rows)

    def gradient_stats(self, state: State, batch: Batch) -> Stats:
        """Dispatches the statistics of the round's first sequences at the trainers' parameters."""
        stats = []
        for group, rows_RBL, count_R in batch.tests:
            params_M = state.ensemble.params_M
            if len(group.trainers) < state.ensemble.num_trainers:
                params_M = _rows(params_M, group.trainers)
            stats_R = self.programs.call(group.key("stats"), params_M, rows_RBL, count_R)
            stats.append((group.trainers, group.owners, count_R, stats_R))
        return stats

    def outer_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Dispatches a round."""
        control = self.underway = state.control
        start_s, stalled_s = time.perf_counter(), self.programs.stall_s
        ensemble, measured, norms = self._dispatch(state, batch)
        self._flushed.clear()
        control, spent = count_round(
            control,
            batch.plans,
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            num_syncs=self.spec.outer.fragments,
        )
        metrics = Metrics(
            round=control.round,
            lines=[line | cost for line, cost in zip(batch.lines, spent, strict=True)],
            groups=batch.groups,
            measured=measured,
            norms=norms,
            start_s=start_s,
            stall_s=self.programs.stall_s - stalled_s,
            end_s=_clock.submit(lambda: (jax.block_until_ready(norms), time.perf_counter())[1]),
        )
        self._unread.append(metrics)
        return State(ensemble, control), metrics

    def _dispatch(self, state: State, batch: Batch) -> tuple[Ensemble, list, list]:
        ensemble, measured, norms = state.ensemble, [], []
        inputs = zip(batch.groups, batch.parts, batch.intervals, strict=True)
        for group, parts, interval_M in inputs:
            sub, group_measured, group_norms = self._run_group(
                self._take(ensemble, group), group, parts, interval_M
            )
            ensemble = self._put(ensemble, group, sub)
            measured.append(group_measured)
            norms.append(group_norms)
        if len(batch.groups) > 1:
            at = ensemble.round.sharding
            ensemble = ensemble.replace(round=reshard(np.int32(state.control.round + 1), at))
        return ensemble, measured, norms

    def _run_group(
        self, sub: Ensemble, group: Group, parts: list, interval_M: np.ndarray
    ) -> tuple[Ensemble, list, list]:
        """Algorithm 1, lines 6 to 16, for trainers that run the same plan."""
        spec, steps = self.spec, group.steps_key()
        workers = Workers(sub.params_R, sub.inner_state_R)
        sub = sub.replace(params_R=None, inner_state_R=None)
        if not spec.outer.own_params or steps.accumulates or spec.reset_inner_state:
            bare = sub.replace(outer_state_M=None, round=None)
            if spec.outer.own_params:
                bare = bare.replace(params_M=None, params_R=workers.params_R)
            started = self.programs.call(group.key("start", accumulates=steps.accumulates), bare)
            kept = {} if spec.reset_inner_state else {"inner_state_R": workers.inner_state_R}
            workers = started.replace(**kept)
        measured, norms = [], []
        num_calls = len(parts) // spec.outer.fragments  # for each synchronisation
        for i, (tokens_TRBL, rate_TR, flag_T, stream_R3) in enumerate(parts):
            inputs = (tokens_TRBL, rate_TR, flag_T if steps.accumulates else None, stream_R3)
            fragment, rest = divmod(i + 1, num_calls)
            if spec.outer.own_params and not rest:
                key = steps._replace(kind="fragment", owners=group.owners)
                sub, workers, pair, norm_M = self.programs.call(
                    key, sub, workers, *inputs, np.int32(fragment - 1)
                )
                norms.append(norm_M)
            else:
                workers, *pair = self.programs.call(steps, workers, *inputs)
            measured.append(tuple(pair))
        if spec.outer.own_params:
            sub = sub.replace(params_R=workers.params_R)
        else:
            ended = Workers(workers.params_R, None)
            sub, norm_M = self.programs.call(group.key("outer"), sub, ended, interval_M)
            norms.append(norm_M)
        return sub.replace(inner_state_R=workers.inner_state_R), measured, norms

    def settled(self, state: State, *, up_to: float = math.inf) -> State:
        """The state with the outcomes of the dispatched rounds up to one; waits for them.

        Raises:
          Diverged: If no trainer is left that makes updates.
        """
        control = state.control
        for metrics in self._unread:
            if control.outcomes_round < metrics.round <= up_to:
                control, metrics.noted = with_outcomes(
                    control, metrics.outcomes, after_round=metrics.round
                )
                if len(broken_trainers(control, by_round=metrics.round)) == len(control.trainers):
                    raise Diverged(metrics.round)
        return state._replace(control=control)

    def without_broken(self, state: State) -> State:
        """The state without trainers that make no updates any more; their workers retire.

        What the last round broke is waited for before a merge only; else what is known by then
        would depend on how often one evaluates or saves.

        Raises:
          Diverged: If no trainer is left.
        """
        merge_now = merge_due(state.control, self.settings)
        by_round = state.control.round - (0 if merge_now else 1)
        state = self.settled(state, up_to=by_round)
        broken = broken_trainers(state.control, by_round=by_round)
        if broken:
            state = self.settled(state)
            for position in broken:
                trainer = state.control.trainers[position]
                skips = max(trainer.skipped_in_a_row.values())
                note = (
                    f"round {state.control.round}: trainer {trainer.id} leaves the run with its"
                    f" workers: its last {skips} updates were not finite"
                )
                fault = {"kind": "quarantine", "round": state.control.round, "trainer": trainer.id}
                self.events.append(Event("fault", fault | {"skipped_in_a_row": skips}, note))
            control, survivors = without_trainers(state.control, broken)
            state = State(_take(state.ensemble, tuple(survivors)), control)
        self._unread = [m for m in self._unread if m.round > state.control.outcomes_round]
        return state

    def guard_losses(self, state: State) -> list[float]:
        """Each trainer's loss on the guard's rows, nats/token."""
        positions = range(len(state.control.trainers))
        return [self._guard_loss(trainer_params(state.ensemble, m)) for m in positions]

    def merged_loss(self, state: State, members: Sequence[int], weights: Sequence[float]) -> float:
        """The loss that the merged trainer would have on the guard's rows, nats/token."""
        merged = merged_params(state.ensemble, tuple(members), tuple(weights))
        return self._guard_loss(merged)

    def _guard_loss(self, params: PyTree) -> float:
        return mean_loss(self.programs, params, self.heldout.guard_EL, self.heldout.batch_size)

    def merge(
        self,
        ensemble: Ensemble,
        members: Sequence[int],
        weights: Sequence[float],
        owners: Sequence[int],
    ) -> Ensemble:
        """`core.merge`, then `core.reassign` of the workers."""
        hit("merge.decided")
        weights_n = np.asarray(weights, np.float32)
        return _merge_and_reassign(ensemble, weights_n, tuple(members), tuple(owners))

    def spawn(self, ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
        """`core.spawn`."""
        hit("spawn.decided")
        return _spawn(ensemble, trainer, num_workers)

    def flush(self, state: State, trainers: Sequence[int]) -> State:
        """Synchronises all that the trainers' workers have not synchronised yet.

        Without fragments (Streaming DiLoCo), where all parameters are synchronised at every round's
        end and taken as they arrive, nothing is left.
        """
        ensemble, control = state
        owed = [m for m in sorted(trainers) if control.trainers[m].id not in self._flushed]
        if not owed or not self.settings.outer.leaves_unsynchronised:
            return state
        for group in classes(control, owed, self.spec):
            sub = self._take(ensemble, group)
            flushed = self.programs.call(group.key("flush"), sub.replace(inner_state_R=None))
            sub = flushed.replace(inner_state_R=sub.inner_state_R)
            ensemble = self._put(ensemble, group, sub)
        full_sync_bytes = packed_bytes(self.spec.params, self.spec.outer.precision)
        control, line = count_flush(control, owed, sync_bytes=full_sync_bytes)
        self.events.append(Event("sync", line))
        self._flushed.update(line["trainers"])
        return State(ensemble, control)

    def _take(self, ensemble: Ensemble, group: Group) -> Ensemble:
        """A group's part of the ensemble: all of it, without a copy, where it has all workers."""
        if group.workers == tuple(range(ensemble.num_workers)):
            return ensemble
        return _take(ensemble, group.trainers)

    def _put(self, ensemble: Ensemble, group: Group, sub: Ensemble) -> Ensemble:
        """The ensemble with a group's part replaced by `sub`."""
        if group.workers == tuple(range(ensemble.num_workers)):
            return sub
        at = placement(self.spec, Key("outer", group.owners))  # on all devices
        return _put(ensemble, group.trainers, reshard(sub, at.ensemble(sub)))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _merge_and_reassign(
    ensemble: Ensemble, weights_n: Array, members: tuple[int, ...], owners: tuple[int, ...]
) -> Ensemble:
    return reassign(merge(ensemble, members, weights=weights_n), owners)


@functools.partial(jax.jit, static_argnums=1)
def _rows(tree_M: PyTree, trainers: tuple[int, ...]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[np.array(trainers)], tree_M)


_spawn = jax.jit(spawn, static_argnums=(1, 2))
_take = jax.jit(take, static_argnums=1)
_put = jax.jit(put, static_argnums=1, donate_argnums=0)
