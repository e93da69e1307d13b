"""A worker's round: gradient statistics, start, inner steps, and what they gave.

The local engine runs the round of many workers with these functions, a learner (a process that
trains for an elastic run) that of one. A group is trainers that one program runs together. A call
is one run of the program of inner steps; a round has several.

Axes of arrays: M trainers, R workers, S updates, each of A micro-batches, T micro-batches, B rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble, GradientStats, Workers
from adloco_jax.engine.inputs import Call, Group, StatsRows, needs_start
from adloco_jax.engine.programs import Programs

_MOST_MEANS = 10  # mean losses of a round that are written, unless the settings say how many


class Outcome(NamedTuple):
    """What one trainer's round gave: losses, skipped updates, and the outer gradient's norm."""

    # Loss of each update of each worker; NaN for a skipped update, and for one that a learner's
    # shorter round does not have.
    loss_SR: np.ndarray
    skipped_SR: np.ndarray  # bool: whether the update was skipped
    pseudo_grad_norm: float  # norm of the outer gradient; NaN if no worker's difference is finite

    @property
    def mean_loss(self) -> float:
        """Mean loss over the updates that were not skipped; NaN if there are none."""
        made = self.loss_SR[np.isfinite(self.loss_SR)]
        return float(np.mean(made)) if made.size else math.nan

    def losses(self, every: int | None) -> list[tuple[int, float]]:
        """List the mean losses of parts of the round, each after how many updates it ended.

        A part has `every` updates; None: as many as give at most ten parts. A mean is over all
        workers; it is NaN if all updates of the part were skipped.
        """
        num_updates = len(self.loss_SR)
        if every is None:
            every = math.ceil(num_updates / _MOST_MEANS)
        losses = []
        for start in range(0, num_updates, every):
            end = min(start + every, num_updates)
            part_SR = self.loss_SR[start:end]
            made = part_SR[np.isfinite(part_SR)]  # losses of updates that were not skipped
            losses.append((end, float(np.mean(made)) if made.size else math.nan))
        return losses


def measure(programs: Programs, params_M: PyTree, test: StatsRows) -> GradientStats:
    """Start to measure gradient statistics of a group's workers, at their trainers' parameters.

    `params_M` are the parameters of the group's trainers. `test` has the group, and the rows on
    which each worker is measured. Returns statistics with fields [R], which may still be computed.
    """
    return programs.call(test.group.key("stats"), params_M, test.rows_RB, test.count_R)


def inner_round(
    programs: Programs,
    sub: Ensemble,
    group: Group,
    calls: Sequence[Call],
    on_call: Callable[[Array], object] = lambda loss_TR: None,
) -> tuple[Ensemble, Workers, list[tuple[Array, Array]], list[Array]]:
    """Dispatch a round of a group's workers to the devices (AdLoCo algorithm 1, lines 6-15).

    Nothing is awaited. With Streaming DiLoCo (`own_params`) the fragments are synchronised on the
    way; otherwise the caller makes the outer update.

    Args:
      programs: The run's compiled programs.
      sub: The group's trainers and workers; its arrays may be donated.
      group: The trainers, their workers, and the plan of their round.
      calls: The arguments of each call of the inner steps, in order (`inputs.calls_of`).
      on_call: Called with the losses [T, R] of each call that was dispatched.

    Returns:
      The ensemble without the workers' arrays; the workers after the round; for each call losses
      and skipped updates [T, R]; for each fragment the norms of outer gradients [M], none without
      Streaming DiLoCo.
    """
    spec = programs.spec
    is_streaming = spec.outer.own_params
    steps_key = group.steps_key()  # of the program of inner steps
    inner_state_R = sub.inner_state_R
    workers = Workers(sub.params_R, inner_state_R)
    sub = sub.replace(params_R=None, inner_state_R=None)
    if needs_start(spec, steps_key):  # else the workers go on with what they have
        # The program takes only the parameters from which the workers start.
        bare = sub.replace(outer_state_M=None, round=None, average_M=None)
        if is_streaming:  # from the workers' own, else from the trainers'
            bare = bare.replace(params_M=None, params_R=workers.params_R)
        start_key = group.key("start", accumulates=steps_key.accumulates)
        workers = programs.call(start_key, bare)
        if not spec.reset_inner_state:  # the program has not seen the states that are kept
            workers = workers.replace(inner_state_R=inner_state_R)

    measured = []
    norms = []
    calls_per_fragment = len(calls) // spec.outer.fragments
    for number, call in enumerate(calls, start=1):
        inputs = (call.rows_TRB, call.rate_TR, call.update_T, call.stream_R3)
        if is_streaming and number % calls_per_fragment == 0:  # a fragment ends with this call
            # A synchronisation depends on whose the workers are, so the key has the number of each
            # trainer's workers, and not only their sum.
            key = steps_key._replace(kind="fragment", sizes=group.sizes)
            fragment = np.int32(number // calls_per_fragment - 1)
            sub, workers, (loss_TR, skipped_TR), norm_M = programs.call(
                key, sub, workers, *inputs, fragment
            )
            norms.append(norm_M)
        else:
            workers, loss_TR, skipped_TR = programs.call(
                steps_key, workers, *inputs, *call.position
            )
        measured.append((loss_TR, skipped_TR))
        on_call(loss_TR)
    return sub, Workers(workers.params_R, workers.inner_state_R), measured, norms


def by_update(
    group: Group, measured: Sequence[tuple[Array, Array]]
) -> tuple[np.ndarray, np.ndarray]:
    """Wait for a group's calls, and compute the results of each update of each worker.

    `measured` has losses and skipped updates [T, R] for each call, in order. Returns the mean loss
    of each update, NaN if the update was skipped, and whether the update was skipped: both [S, R].
    """
    losses, skips = zip(*jax.device_get(measured), strict=True)  # waits for the devices
    loss_TR = _by_worker(group, losses)
    skipped_TR = _by_worker(group, skips)
    num_A = group.plan.num_accum_steps
    loss_SAR = loss_TR.reshape(-1, num_A, loss_TR.shape[1])  # T is S times A
    mean_loss_SR = loss_SAR.sum(axis=1) / np.float64(num_A)
    skipped_SR = skipped_TR[num_A - 1 :: num_A]  # of each update's last micro-batch
    return np.where(skipped_SR, np.nan, mean_loss_SR), skipped_SR


def _by_worker(group: Group, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the results of a round's calls to one array [T of the round, R].

    If a device's workers run one after another, a turn runs one worker of each device; otherwise
    there is one turn, with all workers. A call runs some micro-batches of a turn's workers, and all
    calls of a turn follow one another. `parts` has the result of each call, [T of the call, workers
    of the turn].
    """
    workers_per_turn = parts[0].shape[1]
    num_turns = sum(group.sizes) // workers_per_turn
    calls_per_turn = len(parts) // num_turns
    turns = []
    for first in range(0, len(parts), calls_per_turn):
        turns.append(np.concatenate(parts[first : first + calls_per_turn]))
    # A device's workers are adjacent in R, one from each turn.
    return np.stack(turns, axis=-1).reshape(len(turns[0]), -1)
