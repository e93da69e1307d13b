"""The local engine: it implements `adloco.Engine` on the devices that JAX sees.

Trainers that run the same plan share one compiled program. If there are several devices and
trainers have unequal numbers of workers, trainers with equally many workers form groups with
separate devices. A synchronisation then moves exactly the bytes that the ledger records.
"""

import copy
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.compress import packed_bytes
from adloco_jax.core.types import Ensemble, Workers, put
from adloco_jax.crashpoints import crash_point
from adloco_jax.engine.evaluate import HeldOut, guard_losses, merged_loss
from adloco_jax.engine.inputs import (
    Batch,
    Call,
    Group,
    Rows,
    classes,
    foreseen,
    make_batch,
    programs_ahead,
    reads,
    whole_pool,
)
from adloco_jax.engine.memory import merged, replace, spawned, taken
from adloco_jax.engine.programs import Programs, placement
from adloco_jax.engine.sharding import reshard
from adloco_jax.engine.spec import ProgramKey, Spec
from adloco_jax.loop.adloco import State, Stats
from adloco_jax.loop.control import Control, RoundPlan, StateBytes, count_flush, count_round
from adloco_jax.loop.plans import round_plans
from adloco_jax.settings import Settings

SKIPS_BEFORE_QUARANTINE = 3  # consecutive updates that every worker of a trainer has skipped
_SUMS = ("grad_sum_R", "num_grads", "finite_R")  # fields for gradient accumulation


class Outcome(NamedTuple):
    """Losses, skipped updates and the norm of the outer gradient of one trainer's round."""

    loss_SR: np.ndarray  # loss of each update of each worker; NaN for a skipped update
    skipped_SR: np.ndarray  # bool: whether the update was skipped
    pseudo_grad_norm: float  # NaN if no worker's difference is finite

    @property
    def mean_loss(self) -> float:
        """Mean loss over the updates that were not skipped; NaN if there are none."""
        made = self.loss_SR[np.isfinite(self.loss_SR)]
        return float(np.mean(made)) if made.size else math.nan


class UnderWay(NamedTuple):
    """A round whose programs the devices have been given; its results are read later."""

    lines: list[dict]  # for each trainer, ledger fields of plan and cost
    groups: list[Group]
    measured: list[list[tuple[Array, Array]]]  # by group and call: losses, skipped; [T, R]
    stacks: list[Group]  # groups that were synchronised together
    norms: list[list[Array]]  # by stack and synchronisation: norms of pseudo-gradients [M]


class Metrics(NamedTuple):
    """The results of a round that has ended."""

    lines: list[dict]  # for each trainer, ledger fields of plan, cost and skipped updates
    outcomes: list[Outcome]  # one for each trainer
    step_s: float  # seconds from the round's first row to its last update
    stall_s: float  # seconds of `step_s` that were spent waiting for compilation


class LocalEngine:
    """Runs the rounds of all trainers on the devices that JAX sees; see `adloco.Engine`."""

    def __init__(
        self, settings: Settings, spec: Spec, programs: Programs, rows: Rows, heldout: HeldOut
    ):
        """Make an engine that has not started a round.

        Args:
          settings: The run's settings.
          spec: The data that all programs share.
          programs: The programs; each is compiled before its first call.
          rows: The rows to train on.
          heldout: Held-out rows; merges are decided by losses on the guard rows among these.
        """
        self.settings, self.spec, self.programs = settings, spec, programs
        self.rows, self.heldout = rows, heldout
        self.underway: Control  # the control before the current round, for handlers of a failure
        self._ahead: tuple[tuple, Batch | Exception] | None = None  # next round's reads, inputs
        self._start_s = self._stalled_s = 0.0  # clock and stall time when the round began
        self._flushed: set[int] = set()  # ids of trainers without unsynchronised worker updates

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes of the states that trainers send in a merge, and that moving workers receive."""
        return self.spec.state_bytes

    def ready(self, state: State) -> list[int]:
        """The positions of all trainers, because here all trainers run each round together."""
        self.underway = state.control  # set before sequences are read, which may fail
        self._start_s, self._stalled_s = time.perf_counter(), self.programs.stall_s
        return list(range(len(state.control.trainers)))

    def batch(self, state: State, plans: Mapping[int, RoundPlan]) -> Batch:
        """Send the next sequences of every worker's stream to the devices."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == reads(state.control, plans):
            if isinstance(ahead[1], Exception):
                raise ahead[1]
            return ahead[1]
        return make_batch(state.control, plans, self.settings, self.spec, self.rows)

    def look_ahead(self, control: Control) -> None:
        """Prepare the rows of the next round, and compile programs of the next two rounds."""
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
        """Start to measure the gradient statistics of the round on its first sequences."""
        stats = []
        for group, rows_RBL, count_R in batch.tests:
            params_M = state.ensemble.params_M
            if len(group.trainers) < state.ensemble.num_trainers:
                params_M = _rows(params_M, group.trainers)
            stats_R = self.programs.call(group.key("stats"), params_M, rows_RBL, count_R)
            stats.append((group.trainers, group.owners, count_R, stats_R))
        return stats

    def outer_step(self, state: State, batch: Batch) -> tuple[State, UnderWay]:
        """Give the devices the programs of a round, without waiting; `finish` waits for them."""
        ensemble, *dispatched = self._dispatch(state, batch)
        self._flushed.clear()
        control, spent = count_round(
            state.control,
            batch.plans,
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            num_syncs=self.spec.outer.fragments,
        )
        lines = [line | cost for line, cost in zip(batch.lines, spent, strict=True)]
        return State(ensemble, control), UnderWay(lines, batch.groups, *dispatched)

    def finish(self, state: State, underway: UnderWay) -> tuple[State, Metrics, list[dict]]:
        """Wait for a round, count its skipped updates and remove broken trainers."""
        crash_point("round.decided")
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
        """Return the ensemble of the state, because the local engine always holds all of it."""
        return state.ensemble

    def _dispatch(self, state: State, batch: Batch) -> tuple[Ensemble, list, list, list]:
        ensemble, measured, norms = state.ensemble, [], []
        work = list(zip(batch.groups, batch.calls, strict=True))
        stacks = [(group, [(group, calls)]) for group, calls in work]
        if self.spec.by_position:
            stacks = [(whole_pool(state.control, self.spec), work)]
        for stack, inputs in stacks:
            extra_M = {
                name: values_M[list(stack.trainers)] for name, values_M in batch.extra_M.items()
            }
            sub, stack_measured, stack_norms = self._run_stack(
                self._take(ensemble, stack), stack, inputs, extra_M
            )
            ensemble = self._put(ensemble, stack, sub)
            measured += stack_measured
            norms.append(stack_norms)
        if len(stacks) > 1:
            at = ensemble.round.sharding
            ensemble = ensemble.replace(round=reshard(np.int32(state.control.round + 1), at))
        return ensemble, measured, [stack for stack, _ in stacks], norms

    def _run_stack(
        self,
        sub: Ensemble,
        stack: Group,
        work: list[tuple[Group, list[Call]]],
        extra_M: dict[str, np.ndarray],
    ) -> tuple[Ensemble, list, list]:
        """Dispatch a round of trainers that share one stack (AdLoCo algorithm 1, lines 6 to 16)."""
        spec = self.spec
        accumulates = any(group.steps_key().accumulates for group, _ in work)
        workers = Workers(sub.params_R, sub.inner_state_R)
        sub = sub.replace(params_R=None, inner_state_R=None)
        if not spec.outer.own_params or accumulates or spec.reset_inner_state:
            bare = sub.replace(outer_state_M=None, round=None)
            if spec.outer.own_params:
                bare = bare.replace(params_M=None, params_R=workers.params_R)
            started = self.programs.call(stack.key("start", accumulates=accumulates), bare)
            kept = {} if spec.reset_inner_state else {"inner_state_R": workers.inner_state_R}
            workers = started.replace(**kept)
        measured, norms = [], []
        for group, calls in work:
            steps, pairs = group.steps_key(), []
            unused = {} if steps.accumulates else dict.fromkeys(_SUMS)
            sums = {name: getattr(workers, name) for name in unused}
            workers = workers.replace(**unused)
            num_calls = len(calls) // spec.outer.fragments  # for each synchronisation
            for i, inputs in enumerate(calls):
                fragment, rest = divmod(i + 1, num_calls)
                if spec.outer.own_params and not rest:
                    key = steps._replace(kind="fragment", owners=group.owners)
                    sub, workers, pair, norm_M = self.programs.call(
                        key, sub, workers, *inputs[:-1], np.int32(fragment - 1)
                    )
                    norms.append(norm_M)
                else:
                    workers, *pair = self.programs.call(steps, workers, *inputs[:-1], *inputs.turn)
                pairs.append(tuple(pair))
            workers = workers.replace(**sums)
            measured.append(pairs)
        inner_state_R, workers = workers.inner_state_R, Workers(workers.params_R, None)
        if spec.outer.own_params:
            sub = sub.replace(params_R=workers.params_R)
        else:
            sub, norm_M = self.programs.call(stack.key("outer"), sub, workers, extra_M)
            norms.append(norm_M)
        return sub.replace(inner_state_R=inner_state_R), measured, norms

    def guard_losses(self, state: State) -> list[float]:
        """Each trainer's loss on the guard rows (held-out rows for decisions), nats/token."""
        return guard_losses(state.ensemble, self.programs, self.heldout)

    def merged_loss(self, state: State, members: Sequence[int], weights: Sequence[float]) -> float:
        """The merged trainer's loss on the guard rows (held-out rows for decisions), nats/token."""
        return merged_loss(state.ensemble, members, weights, self.programs, self.heldout)

    def merge(
        self,
        ensemble: Ensemble,
        members: Sequence[int],
        weights: Sequence[float],
        owners: Sequence[int],
    ) -> Ensemble:
        """Merge trainers (`core.merge`), then move workers between trainers (`core.reassign`)."""
        crash_point("merge.decided")
        weights_n = np.asarray(weights, np.float32)
        return replace(merged, ensemble, weights_n, tuple(members), tuple(owners))

    def spawn(self, ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
        """Add workers to a trainer (`core.spawn`)."""
        crash_point("spawn.decided")
        return replace(spawned, ensemble, trainer, num_workers)

    def flush(self, state: State, trainers: Sequence[int]) -> tuple[State, list[dict]]:
        """Synchronise the worker updates of some trainers that have not been sent yet.

        Only Streaming DiLoCo has such updates. Without it, the end of a round synchronises all
        parameters.
        """
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
        """The ensemble of a group's trainers; the whole ensemble if the group has all workers."""
        if group.workers == tuple(range(ensemble.num_workers)):
            return ensemble
        return taken(ensemble, group.trainers)

    def _put(self, ensemble: Ensemble, group: Group, sub: Ensemble) -> Ensemble:
        """Write the trainers and workers of a group back into the ensemble."""
        if group.workers == tuple(range(ensemble.num_workers)):
            return sub
        at = placement(self.spec, ProgramKey("outer", group.owners))  # on all devices
        return _put(ensemble, group.trainers, reshard(sub, at.ensemble(sub)))


def count_skips(
    control: Control, outcomes: Sequence[Outcome], trainers: Sequence[int] | None = None
) -> tuple[Control, list[int]]:
    """Count the updates that workers have skipped in a round, and find broken trainers.

    A trainer is broken if every one of its workers has skipped its last
    `SKIPS_BEFORE_QUARANTINE` updates.

    Args:
      control: The host's data about the run after the round, with the trainers and workers that ran
        it.
      outcomes: Losses and skipped updates of each trainer in the round, in stack order.
      trainers: Positions of the trainers of `outcomes`. None: all trainers.

    Returns:
      A changed copy of `control`, and the positions of the broken trainers.
    """
    control = copy.deepcopy(control)
    broken = []
    positions = range(len(control.trainers)) if trainers is None else trainers
    for position, outcome in zip(positions, outcomes, strict=True):
        trainer = control.trainers[position]
        streams = [str(control.streams[w]) for w in control.workers_of(position)]
        rows = {}
        for stream, skipped_S in zip(streams, outcome.skipped_SR.T, strict=True):
            made = np.flatnonzero(~skipped_S)
            before = 0 if made.size else trainer.skipped_in_a_row.get(stream, 0)
            rows[stream] = before + len(skipped_S) - (int(made[-1]) + 1 if made.size else 0)
        trainer.skipped_in_a_row = rows
        if min(rows.values()) >= SKIPS_BEFORE_QUARANTINE:
            broken.append(position)
    return control, broken


def without_broken(state: State, broken: Sequence[int]) -> tuple[State, list[dict]]:
    """Remove broken trainers from the state; also return a line for the ledger about each of them.

    The returned ensemble is meaningless if no trainer is left.
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
    """Remove trainers and their workers from the host's data (`Control`).

    Also return the positions of the remaining trainers before the removal.
    """
    control = copy.deepcopy(control)
    survivors = [m for m in range(len(control.trainers)) if m not in broken]
    workers = [w for w, owner in enumerate(control.owners) if owner not in broken]
    for position in broken:
        trainer = control.trainers[position]
        retired = {"workers": control.owners.count(position)}
        control.quarantined.append({"trainer": trainer.id, "round": control.round} | retired)
    control.trainers = [control.trainers[m] for m in survivors]
    # In the order of `core.take`: each trainer's workers next to one another.
    workers.sort(key=lambda worker: control.owners[worker])
    control.streams = [control.streams[w] for w in workers]
    control.owners = [survivors.index(control.owners[w]) for w in workers]
    return control, survivors


def _outcomes(underway: UnderWay) -> list[Outcome]:
    """Wait for a round, and collect the losses and skipped updates of each trainer."""
    outcomes, norm_of = {}, {}
    for stack, norms in zip(underway.stacks, underway.norms, strict=True):
        # The norm over all fragments as one vector; with one fragment float64 keeps it exactly.
        norm_M = np.linalg.norm(np.asarray(jax.device_get(norms), np.float64), axis=0).tolist()
        norm_of |= dict(zip(stack.trainers, norm_M, strict=True))
    for group, measured in zip(underway.groups, underway.measured, strict=True):
        loss_TR, skipped_TR = (
            _by_worker(group, parts) for parts in zip(*jax.device_get(measured), strict=True)
        )
        accum = group.plan.num_accum_steps
        loss_SAR = loss_TR.reshape(-1, accum, loss_TR.shape[1])
        skipped_SR = skipped_TR[accum - 1 :: accum]
        loss_SR = np.where(skipped_SR, np.nan, loss_SAR.sum(axis=1) / np.float64(accum))
        for position, trainer in enumerate(group.trainers):
            own = np.array(group.owners) == position
            outcomes[trainer] = Outcome(loss_SR[:, own], skipped_SR[:, own], norm_of[trainer])
    return [outcomes[m] for m in sorted(outcomes)]


def _by_worker(group: Group, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the results of a group's calls of the program `steps` to one array [T, R].

    The calls of one turn (one worker of each device) come first, then those of the next turn.
    """
    num_turns = len(group.workers) // parts[0].shape[1]
    calls = len(parts) // num_turns
    turns = [np.concatenate(parts[i : i + calls]) for i in range(0, len(parts), calls)]
    return np.stack(turns, axis=-1).reshape(len(turns[0]), -1)  # each device's workers in order


@functools.partial(jax.jit, static_argnums=1)
def _rows(tree_M: PyTree, trainers: tuple[int, ...]) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[np.array(trainers)], tree_M)


_put = jax.jit(put, static_argnums=1, donate_argnums=0)
