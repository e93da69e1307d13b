"""One round between host and devices: its plan and data, its dispatch, its results.

Nothing here waits for the devices but `read_outcomes`; a dispatched round runs while the host
prepares the next one.
"""

import copy
import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from adloco_jax.core.base import Ensemble, GradientStats
from adloco_jax.core.batching import next_batch_size
from adloco_jax.core.ensemble import put, take
from adloco_jax.run import controller as control
from adloco_jax.run.config import Settings
from adloco_jax.run.controller import Controller, Group, Outcome
from adloco_jax.run.placement import bring
from adloco_jax.run.programs import (
    Key,
    Programs,
    Spec,
    buffers_spec,
    placement,
)


class Rows(Protocol):
    """What `fit` needs of a corpus; `adloco_jax.data.Corpus` is one."""

    @property
    def heldout_rows(self) -> np.ndarray:
        """Int [E, L + 1]; no training row shares a document with them."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of the content that decides the rows."""
        ...

    @property
    def shards(self) -> Sequence[dict]:
        """A JSON record of each part that was read, to name which has changed; may be empty."""
        ...

    @property
    def tokens_per_byte(self) -> float | None:
        """Of the held-out text, where tokens are text."""
        ...

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count` of a stream: int32 [count, L + 1]."""
        ...


@runtime_checkable
class SequentialRows(Rows, Protocol):
    """Rows dealt in the order of asking, whose place in their sequence is part of a run's state."""

    def state(self) -> dict:
        """The place of the rows not yet dealt, as plain JSON."""
        ...

    def restore(self, state: dict | None) -> None:
        """Goes to a place that `state` has given, or to the beginning."""
        ...

    def close(self) -> None:
        """Ends what reads ahead."""
        ...


class Prepared(NamedTuple):
    """A round's plan with its data on the devices."""

    groups: list[Group]
    parts: list[list[tuple[Array, np.ndarray, np.ndarray]]]
    """By group, by dispatch: tokens [S, R, B, L + 1], learning rates [S, R], update flags [S]."""
    test_rows_RBL: Array | None
    test_counts_R: np.ndarray
    lines: list[dict]
    """The round's ledger lines, by trainer, as far as the plan decides them."""


class Dispatched(NamedTuple):
    """A round under way on the devices, and the test that runs before it."""

    groups: list[Group]
    workers: list[list[int]]  # by trainer
    stats_R: GradientStats | None  # of the test; ready before the round is
    measured: list[list[tuple[Array, Array]]]  # by group, by dispatch: losses, skipped; [S, R]
    norms: list[list[Array]]  # by group, by synchronisation: [M], of the pseudo-gradients
    start_s: float
    stall_s: float  # waited for compilation
    end_s: Future[float]  # when the devices were done


def update_keys(groups: list[Group]) -> list[Key]:
    """The program that each group runs."""
    return [
        Key(
            "round" if group.plan.num_accum_steps == group.num_dispatches == 1 else "accumulate",
            len(group.trainers),
            len(group.workers),
            group.plan.micro_batch_size,
            group.blocks,
        )
        for group in groups
    ]


def test_key(controller: Controller) -> Key:
    """The program of the batch-size test, over all trainers."""
    blocks = control.owns_blocks(controller)
    return Key("test", len(controller.trainers), len(controller.owners), blocks=blocks)


def sync_key(controller: Controller, trainers: Sequence[int]) -> Key:
    """The program that synchronises some trainers as a whole."""
    workers = sum(owner in trainers for owner in controller.owners)
    blocks = control.owns_blocks(controller, trainers)
    return Key("synchronise", len(trainers), workers, blocks=blocks)


def synchronise(
    programs: Programs, controller: Controller, ensemble: Ensemble, trainers: Sequence[int]
) -> Ensemble:
    """Synchronises all parameters of some trainers at once; the ensemble's buffers are given up."""
    key = sync_key(controller, trainers)
    if len(trainers) == ensemble.num_trainers:
        return _call(programs, key, ensemble)
    workers = tuple(w for w, owner in enumerate(controller.owners) if owner in trainers)
    sub = _call(programs, key, _take(ensemble, tuple(trainers), workers))
    return _put(ensemble, sub, tuple(trainers), workers, False)


def programs_ahead(controller: Controller, settings: Settings) -> list[Key]:
    """The programs that coming rounds need, the soonest first.

    First those of the next round, after the merge that may come before it; then those of the round
    after that, if batches grow as far as they may and if they stay.
    """
    next_round = _after_merge(controller, settings)
    keys = _keys(next_round, settings)
    if settings.outer.leaves_untold:
        ended = copy.deepcopy(next_round)
        ended.round += 1
        merge = control.due_merge(ended, settings)
        if ended.round >= settings.num_rounds:
            keys.append(sync_key(ended, range(len(ended.trainers))))
        elif merge:
            keys.append(sync_key(ended, sorted(merge.members)))
    if next_round.round + 1 < settings.num_rounds and control.measures_gradients(settings):
        batching = settings.batching
        for growth in (batching.max_growth, 1):
            later = copy.deepcopy(next_round)
            later.round += 1
            for trainer in later.trainers:
                trainer.requested_batch_size = next_batch_size(
                    growth * trainer.requested_batch_size,
                    batch_size=trainer.requested_batch_size,
                    max_growth=growth,
                    batch_cap=batching.batch_cap,
                )
            keys += _keys(_after_merge(later, settings), settings)
    return list(dict.fromkeys(keys))


def prepare(
    controller: Controller, settings: Settings, spec: Spec, corpus: Rows, groups: list[Group]
) -> Prepared:
    """Puts the sequences of a planned round on the devices."""
    counts_R = np.zeros(len(controller.owners), np.int32)
    if control.measures_gradients(settings):
        counts_R = control.test_counts(controller, groups, settings)
    test_shape = (len(counts_R), spec.max_test_sequences, spec.row_length)
    test_rows_RBL = np.zeros(test_shape, np.int32)
    steps = spec.num_micro_batches
    round_tokens = spec.sequence_length * sum(
        group.num_micro_batches * group.plan.micro_batch_size * len(group.workers)
        for group in groups
    )
    test_at = placement(spec, test_key(controller)).workers
    tested_here = _here(test_at, test_shape, axis=0) if counts_R.any() else set()
    parts, lines = [], {}
    for group in groups:
        (key,) = update_keys([group])
        tokens_at = placement(spec, key).tokens_TRBL(key.micro_batch_size)
        rows_TRBL = _sequences(controller, group, spec, corpus, tokens_at, tested_here)
        for place, worker in enumerate(group.workers):
            flat = rows_TRBL[:, place].reshape(-1, spec.row_length)
            test_rows_RBL[worker, : counts_R[worker]] = flat[: counts_R[worker]]
        rate_TR = control.learning_rates(controller, group, settings, round_tokens=round_tokens)
        flag_T = control.update_flags(group)
        parts.append(
            [
                (
                    bring(rows_TRBL[t : t + steps], tokens_at),
                    rate_TR[t : t + steps],
                    flag_T[t : t + steps],
                )
                for t in range(0, group.num_micro_batches, steps)
            ]
        )
        for position in group.trainers:
            trainer, workers = controller.trainers[position], controller.workers_of(position)
            lines[position] = {
                "round": controller.round + 1,
                "trainer": trainer.id,
                "workers": len(workers),
                "requested_batch_size": trainer.requested_batch_size,
                **group.plan._asdict(),
                "learning_rate": float(rate_TR[-1, group.workers.index(workers[0])]),
            }
    tested = None
    if counts_R.any():
        tested = bring(test_rows_RBL, test_at)
    return Prepared(groups, parts, tested, counts_R, [lines[m] for m in sorted(lines)])


# Waits for the devices on behalf of the host, which may not look in before the next round is under
# way (and then blocked by it): the clock of a round is read when it ends.
_clock = ThreadPoolExecutor(1, thread_name_prefix="clock")


def dispatch(
    programs: Programs, controller: Controller, ensemble: Ensemble, prepared: Prepared
) -> tuple[Ensemble, Dispatched]:
    """Starts the test and then the round on the devices; the ensemble's buffers are given up."""
    start_s, stall_s = time.perf_counter(), programs.stall_s
    stats_R = None
    if prepared.test_rows_RBL is not None:
        tested = (prepared.test_rows_RBL, prepared.test_counts_R)
        stats_R = _call(
            programs, test_key(controller), ensemble.params_M, ensemble.owner_R, *tested
        )
    measured, norms = [], []
    for group, parts in zip(prepared.groups, prepared.parts, strict=True):
        if len(group.trainers) == ensemble.num_trainers:
            ensemble, group_measured, group_norms = _run_group(programs, group, ensemble, parts)
        else:
            sub = _take(ensemble, group.trainers, group.workers)
            sub, group_measured, group_norms = _run_group(programs, group, sub, parts)
            ends_round = group is prepared.groups[-1]
            ensemble = _put(ensemble, sub, group.trainers, group.workers, ends_round)
        measured.append(group_measured)
        norms.append(group_norms)
    workers = [controller.workers_of(m) for m in range(ensemble.num_trainers)]
    stall_s = programs.stall_s - stall_s
    end_s = _clock.submit(lambda: (jax.block_until_ready(norms), time.perf_counter())[1])
    return ensemble, Dispatched(
        prepared.groups, workers, stats_R, measured, norms, start_s, stall_s, end_s
    )


def read_outcomes(dispatched: Dispatched) -> list[Outcome]:
    """Waits for a round, and reads what came of it for each trainer."""
    outcomes: dict[int, Outcome] = {}
    for group, measured, group_norms in zip(
        dispatched.groups, dispatched.measured, dispatched.norms, strict=True
    ):
        parts = jax.device_get(measured)
        loss_TR, skipped_TR = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        ends = np.flatnonzero(control.update_flags(group))
        starts = np.concatenate([[0], ends[:-1] + 1])
        loss_SR = np.add.reduceat(loss_TR, starts) / (ends + 1 - starts)[:, None]
        skipped_SR = skipped_TR[ends]
        loss_SR = np.where(skipped_SR, np.nan, loss_SR)
        # Over the fragments, as of one vector; of a single one float64 gives it back exactly.
        squares = np.square(np.asarray(jax.device_get(group_norms), np.float64))
        norms = np.sqrt(squares.sum(axis=0)).tolist()
        for trainer, norm in zip(group.trainers, norms, strict=True):
            places = [group.workers.index(worker) for worker in dispatched.workers[trainer]]
            outcomes[trainer] = Outcome(loss_SR[:, places], skipped_SR[:, places], norm)
    return [outcomes[m] for m in sorted(outcomes)]


def _after_merge(controller: Controller, settings: Settings) -> Controller:
    """A copy of the controller as the merge that is due leaves it, if one is."""
    ahead = copy.deepcopy(controller)
    if merge := control.due_merge(ahead, settings):
        control.apply_merge(ahead, settings, merge)
    return ahead


def _keys(controller: Controller, settings: Settings) -> list[Key]:
    """The programs of a controller's next round."""
    keys = update_keys(control.plan_round(controller, settings))
    if control.measures_gradients(settings):
        keys.append(test_key(controller))
    return keys


def _here(sharding: NamedSharding, shape: tuple[int, ...], *, axis: int) -> set[int]:
    """The places on an axis that this process's devices have a part of."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return {place for index in indices if index for place in range(shape[axis])[index[axis]]}


def _sequences(
    controller: Controller,
    group: Group,
    spec: Spec,
    corpus: Rows,
    tokens_at: NamedSharding,
    tested_here: set[int],
) -> np.ndarray:
    """Int32 [T, R, B, L + 1]: what every worker of a group trains on, in its stream's order.

    Of several processes each fills in the workers that its devices train or test alone, but where
    rows come in the order of asking.
    """
    size = group.plan.micro_batch_size
    shape = (group.num_micro_batches, len(group.workers), size, spec.row_length)
    rows_TRBL = np.zeros(shape, np.int32)
    trained_here = _here(tokens_at, shape, axis=1)
    for place, worker in enumerate(group.workers):
        is_wanted = place in trained_here or worker in tested_here
        if not is_wanted and not isinstance(corpus, SequentialRows):
            continue
        trainer = controller.trainers[controller.owners[worker]]
        stream = controller.streams[worker]
        cursor = trainer.cursors.get(str(stream), 0)
        rows = corpus.batch(trainer.id, stream, cursor, len(rows_TRBL) * size)
        rows_TRBL[:, place] = rows.reshape(len(rows_TRBL), size, -1)
    return rows_TRBL


def _run_group(programs: Programs, group: Group, sub: Ensemble, parts: list) -> tuple:
    (key,) = update_keys([group])
    in_turn = programs.spec.own_params
    if key.kind == "round" and not in_turn:
        ((tokens, rate_TR, _),) = parts
        sub, measured, norm_M = _call(programs, key, sub, tokens, rate_TR)
        return sub, [measured], [norm_M]
    buffers = ()
    if key.kind == "accumulate":
        at = placement(programs.spec, key)
        buffers = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
            buffers_spec(programs.spec, key.num_workers, at),
        )
    measured, norms = [], []
    for i, part in enumerate(parts):
        num_synced, short_of = divmod(i + 1, group.num_dispatches)
        end = np.int32(-1 if short_of else num_synced - 1) if in_turn else np.bool_(not short_of)
        call = (key, sub, buffers, *part, np.bool_(i == 0), end)
        sub, buffers, part_measured, norm_M = _call(programs, *call)
        measured.append(part_measured)
        if not short_of:
            norms.append(norm_M)
    return sub, measured, norms


def _call(programs: Programs, key: Key, *arguments):
    """Runs a program with its arguments moved to where it wants them."""
    program = programs[key]
    return program(*bring(arguments, program.input_shardings[0]))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _take(ensemble: Ensemble, trainers: tuple[int, ...], workers: tuple[int, ...]) -> Ensemble:
    return take(ensemble, trainers, workers=workers)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), donate_argnums=0)
def _put(
    ensemble: Ensemble,
    sub: Ensemble,
    trainers: tuple[int, ...],
    workers: tuple[int, ...],
    ends_round: bool,
) -> Ensemble:
    """`put`; of the groups of a round only the last one counts it."""
    after = put(ensemble, trainers, sub, workers=workers)
    return after if ends_round else after.replace(round=ensemble.round)
