"""Make the inputs of a round: each worker's next rows, on the devices that run the worker.

Trainers are divided into groups, so that one compiled program can run each group. A group's plan is
the sizes of its round. A stream is the sequence of rows that one worker reads; its number is the
worker's id. A row is one sequence of training data, with L + 1 integers. `Control` is what the host
knows of a run: trainers, their workers and sizes.

`spec`, a `ProgramSpec`, holds what all programs of the run share: loss, optimizers, devices
(`machine`), the form of a row, and how many micro-batches a call has. A call is one run of the
program of inner steps; a round has several. A key (`ProgramKey`) names a program by its kind and by
the sizes for which it is compiled. A layout (`Layout`) says whose workers arrays belong to, and on
which devices they are.

Axes of arrays: T micro-batches, R workers, B rows of a micro-batch, L tokens, M trainers.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from adloco_jax.core.merge import allocate_workers
from adloco_jax.data.prepared import DocumentRows
from adloco_jax.engine.sharding import num_sequential, placement, reshard
from adloco_jax.engine.spec import Kind, Layout, ProgramKey, ProgramSpec
from adloco_jax.loop.adloco import (
    after_merge,
    choose_members,
    joining_workers,
    merge_due,
    with_workers,
)
from adloco_jax.loop.control import Control, RoundPlan
from adloco_jax.loop.growth import measures_gradients, with_growth
from adloco_jax.loop.plans import (
    learning_rates,
    planned,
    round_plans,
    test_count,
    update_flags,
)
from adloco_jax.row_batch import RowBatch
from adloco_jax.settings import BatchingSettings, EnsembleSettings, MergeSettings, Settings


class Rows(Protocol):
    """The data that `fit` trains on, as `data.ArrayRows` and `data.Corpus` implement it."""

    @property
    def heldout_rows(self) -> np.ndarray | DocumentRows:
        """Held-out rows, integers [E, L + 1], from documents that no training row contains."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content from which the rows are made; a resumed run must have the same."""

    @property
    def shards(self) -> Sequence[dict]:
        """One JSON record for each part of the data, by which an error names what has changed."""

    @property
    def tokens_per_byte(self) -> float | None:
        """Tokens per UTF-8 byte of the held-out text; None if the data are known only as tokens."""

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray | RowBatch:
        """Return `count` rows of a data stream from row `start` on: int32 [count, L + 1].

        Trainer id and permanent worker id (`stream`) together identify the stream, which has no
        end. Labelled rows have L + 2 integers. Rows whose documents a model separates have their
        starts, and perhaps weights, beside the tokens (`RowBatch`).
        """


class Group(NamedTuple):
    """A group of trainers with their workers, which one compiled program runs together."""

    trainers: tuple[int, ...]  # ids of the trainers
    sizes: tuple[int, ...]  # number of each trainer's workers
    devices: tuple[int, int] | None = None  # first device and number of devices; None: all
    plan: RoundPlan = RoundPlan(0, 1, 0)  # sizes of the trainers' round, if the group runs one

    @property
    def layout(self) -> Layout:
        """Where the arrays of the group's trainers and workers are between inner steps."""
        return Layout(self.sizes, devices=self.devices)

    def key(self, kind: Kind, *, accumulates: bool = False) -> ProgramKey:
        """Make the key of one of this group's programs; `accumulates` matters to "start" alone."""
        return ProgramKey(kind, self.sizes, devices=self.devices, accumulates=accumulates)

    def steps_key(self) -> ProgramKey:
        """Make the key of the group's inner steps.

        They do not depend on whose the workers are, so the key has only the sum of `sizes`.
        """
        return ProgramKey(
            kind="steps",
            sizes=(sum(self.sizes),),
            micro_batch_size=self.plan.micro_batch_size,
            accumulates=self.plan.num_accum_steps > 1,
            devices=self.devices,
        )


class StatsRows(NamedTuple):
    """The rows on which the gradient statistics of a group's workers are measured."""

    group: Group
    rows_RB: PyTree  # leaves [R, B, L + 1]
    count_R: np.ndarray  # number of rows that count, for each worker; all later rows are padding


class Call(NamedTuple):
    """The arguments of one call of `steps` except the workers: T micro-batches of R workers."""

    rows_TRB: PyTree  # leaves [T, R, B, L + 1]
    rate_TR: np.ndarray  # learning rates
    update_T: np.ndarray | None  # True where an update ends; None: gradients are not accumulated
    # For a loss that takes `key`: trainer id, data stream, position of the call's first sequence.
    stream_R3: np.ndarray | None
    # If a device's workers run in turn: which of them runs, from 0, as one int32 []; else empty.
    position: tuple[np.ndarray, ...]


class RoundInputs(NamedTuple):
    """The inputs of a round: groups with the sizes of their round, sequences on their devices."""

    groups: list[Group]
    calls: list[list[Call]]  # for each group: all calls of the first workers, then of the next
    stats_rows: list[StatsRows]
    lines: dict[int, dict]
    """For each trainer, the ledger fields of the round that its plan determines."""


def group_by_size(control: Control, trainers: Iterable[int], spec: ProgramSpec) -> list[Group]:
    """Divide trainers into groups of trainers that have equally many workers.

    Each group has devices of its own, in proportion to the group's workers. But all trainers are
    one group on all devices if there are fewer devices than groups, or several processes (each
    process must take part in every program).

    Args:
      control: The host's data; a trainer's workers are its `streams`.
      trainers: Ids of the trainers to divide, in any order.
      spec: Names the devices, and how many of them share the parameters of a worker.

    Returns:
      Groups without a plan, those of the trainers with the most workers first; ids in a group
      ascend. Empty without trainers.
    """
    chosen = sorted(trainers)
    if not chosen:
        return []
    num_workers = {m: len(control.trainers[m].streams) for m in chosen}
    sizes = sorted(set(num_workers.values()), reverse=True)  # the groups' workers of a trainer

    # A worker's parameters are divided over `model_shards` devices, which stay together.
    model_shards = spec.model_shards
    num_shares = len(spec.machine.devices) // model_shards
    if len(sizes) == 1 or spec.machine.num_processes > 1 or num_shares < len(sizes):
        return [_group(control, chosen)]

    members_of_groups = [[m for m in chosen if num_workers[m] == size] for size in sizes]
    workers_of_groups = []
    for size, members in zip(sizes, members_of_groups, strict=True):
        workers_of_groups.append(size * len(members))  # workers of all members together
    # Devices are divided over groups by the rule that divides workers over trainers.
    shares = allocate_workers(workers_of_groups, num_shares)
    groups = []
    first_share = 0
    for members, share in zip(members_of_groups, shares, strict=True):
        devices = (first_share * model_shards, share * model_shards)
        groups.append(_group(control, members, devices))
        first_share += share
    return groups


def _group(
    control: Control, trainers: Iterable[int], devices: tuple[int, int] | None = None
) -> Group:
    """Make a group of trainers (ids), without a plan.

    `devices` are the first device and the number of devices on which it runs; None: all.
    """
    chosen = tuple(trainers)
    sizes = tuple(len(control.trainers[m].streams) for m in chosen)
    return Group(chosen, sizes, devices)


def group_by_plan(
    control: Control, plans: Mapping[int, RoundPlan], spec: ProgramSpec
) -> list[Group]:
    """Divide trainers into groups of trainers that have equally many workers, and the same plan.

    Groups whose trainers have equally many workers use the same devices, one group after another.
    With several processes, or with too few devices, all groups use all devices, and the trainers of
    a group may have unequal numbers of workers (`group_by_size`).

    Args:
      control: The host's data; a trainer's workers are its `streams`.
      plans: By trainer id, the sizes of the round, for the trainers that run.
      spec: Names the devices, and how many of them share the parameters of a worker.

    Returns:
      The groups, each with its plan. Empty without trainers.
    """
    groups = []
    for group in group_by_size(control, plans, spec):
        for plan in dict.fromkeys(plans[m] for m in group.trainers):
            trainers = [m for m in group.trainers if plans[m] == plan]
            # `_group` makes a group without a plan, so the plan is set afterwards.
            groups.append(_group(control, trainers, group.devices)._replace(plan=plan))
    return groups


def round_keys(
    control: Control, plans: Mapping[int, RoundPlan], batching: BatchingSettings, spec: ProgramSpec
) -> list[ProgramKey]:
    """List the keys of the programs that a round may call, in the order of their first calls.

    Args:
      control: The host's data before the round.
      plans: By trainer id, the sizes of the round, for the trainers that run.
      batching: Says whether the round measures gradients.
      spec: Names the devices, and says whether the run is Streaming DiLoCo's (`own_params`).
    """
    is_streaming = spec.outer.own_params  # workers keep their own parameters between rounds
    keys: list[ProgramKey] = []
    if measures_gradients(batching):
        keys += [group.key("stats") for group in group_by_size(control, plans, spec)]
    for group in group_by_plan(control, plans, spec):
        steps_key = group.steps_key()
        if needs_start(spec, steps_key):
            keys.append(group.key("start", accumulates=steps_key.accumulates))
        if is_streaming:
            # "fragment" runs the last call before each synchronisation, "steps" those before it, if
            # the round has more calls than synchronisations.
            if group.plan.num_micro_batches > spec.steps_per_round:
                keys.append(steps_key)
            keys.append(steps_key._replace(kind="fragment", sizes=group.sizes))
        else:
            keys += [steps_key, group.key("outer")]
    return list(dict.fromkeys(keys))  # each once, in order


def needs_start(spec: ProgramSpec, steps_key: ProgramKey) -> bool:
    """Return whether a round begins with the program "start", which prepares the workers.

    `steps_key` is the key of the round's inner steps. Without "start", the workers of Streaming
    DiLoCo go on with the parameters and inner states that they have.
    """
    return not spec.outer.own_params or steps_key.accumulates or spec.reset_inner_state


def programs_ahead(control: Control, settings: Settings, spec: ProgramSpec) -> list[ProgramKey]:
    """List the keys of the programs that the next two rounds may call.

    `control` is the host's data before the first of them, with the sizes of that round. The sizes
    of the second are not known if a test on measured gradients will choose them. So it is listed
    twice: for the fastest growth that a test allows, and for none. A merge and workers that join
    between the two rounds are predicted (`foreseen`).

    Without such a test the second round is not listed. A constant batch calls the same programs
    again. A schedule, such as `ramp`, sets the next batch when the first round is counted; the next
    call of this function then lists that round.
    """
    batching = settings.batching
    keys = round_keys(control, round_plans(control, settings), batching, spec)
    later = dataclasses.replace(control, round=control.round + 1)
    # The share of the run that is done after the first round, whose tokens are not counted here. At
    # 1 there is no second round.
    done = settings.share_done(later.round, later.tokens_total)
    if measures_gradients(batching) and done < 1:
        for growth in (batching.max_growth, 1):  # the most that a test allows, and none
            # `with_growth` changes what trainers request; `foreseen` lets the workers join.
            grown = with_growth(later, growth, settings.ensemble, batching, settings.inner)
            ahead = foreseen(grown, settings.merge, settings.ensemble, done)
            keys += round_keys(ahead, round_plans(ahead, settings), batching, spec)
    return list(dict.fromkeys(keys))


def foreseen(
    control: Control, merge: MergeSettings, ensemble: EnsembleSettings, done: float
) -> Control:
    """Predict the host's data at the start of the next round: after a merge and joining workers.

    `control` is the data at the end of a round, and `done` the fraction of the run that is
    complete. `merge` and `ensemble` say when trainers merge and when workers join. Held-out losses
    are not known, so the members of a merge are chosen as if all losses were equal, and no merge is
    refused.
    """
    if merge_due(control, merge, done):
        equal_losses = dict.fromkeys(control.trainers, 0.0)
        members = choose_members(control, equal_losses, merge)
        if members:
            control = after_merge(control, members)
    for trainer, num_workers in joining_workers(control, ensemble, done):
        control = with_workers(control, trainer, num_workers)
    return control


def round_identity(control: Control, plans: Mapping[int, RoundPlan]) -> tuple:
    """Collect what determines a round's inputs: its number, what each worker reads, and the plans.

    `plans` has the sizes of the round by trainer id. Inputs are made ahead. If what is returned
    here has changed when the round begins, they are not used.
    """
    return control.round, control.reads(), dict(plans)


def make_round_inputs(
    control: Control,
    plans: Mapping[int, RoundPlan],
    settings: Settings,
    spec: ProgramSpec,
    rows: Rows,
) -> RoundInputs:
    """Read every worker's next sequences, and send them to the devices.

    Args:
      control: The host's data before the round.
      plans: By trainer id, the sizes of the round, for the trainers that run.
      settings: The settings of the run.
      spec: Says which devices there are, and how rows look.
      rows: The data; what reading them raises, such as DataError, is passed on.

    Returns:
      The groups, and for each the arguments of its programs; rows are on the devices.
    """
    groups = group_by_plan(control, plans, spec)

    # Which sequences the batch-size test measures: each worker's first ones. All trainers with
    # equally many workers are measured together, even if their plans differ.
    num_tested = {}  # by trainer id: the number of each worker's sequences that are measured
    for m, plan in plans.items():
        num_tested[m] = test_count(plan, control.size(m).num_workers, settings.batching)
    tested_groups = []
    for group in group_by_size(control, plans, spec):
        if any(num_tested[m] for m in group.trainers):
            tested_groups.append(group)
    # The workers that are measured on devices of this process, each as (trainer id, stream,
    # position in the stream), as `Control.reads` lists them.
    tested_here: set[tuple[int, int, int]] = set()
    for group in tested_groups:
        workers_at = placement(spec, group.layout).workers
        worker_reads = control.reads(group.trainers)
        for worker in _local_indices(workers_at, shape=(sum(group.sizes),), axis=0):
            tested_here.add(worker_reads[worker])

    # The learning rates depend on the tokens of all trainers together.
    round_tokens = 0
    for group in groups:
        num_workers = sum(group.sizes)
        round_tokens += group.plan.num_sequences * num_workers * spec.sequence_length
    rates = {}  # by trainer id: float32 [T]
    for m, plan in plans.items():
        rates[m] = learning_rates(control, m, plan, settings, round_tokens=round_tokens)

    # The arguments of the inner steps.
    calls: list[list[Call]] = []
    first_rows: dict[tuple[int, int, int], PyTree] = {}  # those that are measured, by worker
    for group in groups:
        worker_reads = control.reads(group.trainers)
        rows_TRB = _sequences(worker_reads, group, spec, rows, tested_here)
        for worker, read in enumerate(worker_reads):
            trainer, _, _ = read
            first_rows[read] = _first_rows(rows_TRB, worker, num_tested[trainer])
        rate_MT = [rates[m] for m in group.trainers]
        rate_TR = np.repeat(rate_MT, group.sizes, axis=0).T  # its trainer's rates for each worker
        reads_R3 = np.array(worker_reads, np.int32)
        calls.append(calls_of(group, rows_TRB, rate_TR, reads_R3, spec))

    # The arguments of the measurements.
    stats_rows = []
    for group in tested_groups:
        first_rows_R = [first_rows[read] for read in control.reads(group.trainers)]
        count_M = np.array([num_tested[m] for m in group.trainers], np.int32)
        count_R = np.repeat(count_M, group.sizes)
        stats_rows.append(padded_stats_rows(group, first_rows_R, count_R, spec))

    # The fields of each trainer's ledger line that the plan determines.
    lines = {m: planned(control, m, plans[m], rate_T) for m, rate_T in rates.items()}
    return RoundInputs(groups, calls, stats_rows, lines)


def calls_of(
    group: Group,
    rows_TRB: PyTree,
    rate_TR: np.ndarray,
    reads_R3: np.ndarray,
    spec: ProgramSpec,
) -> list[Call]:
    """Divide a group's round into calls of the program of inner steps; send rows to the devices.

    Args:
      group: The trainers, with the plan of their round.
      rows_TRB: The rows of the whole round, on the host: leaves [T, R, B, L + 1].
      rate_TR: The learning rates of the whole round.
      reads_R3: Each worker's trainer id, its stream, and the position of its first row there.
      spec: Says how many micro-batches a call has, and whether workers run in turn.

    Returns:
      All calls of the workers that run first, then those of the next.
    """
    size = group.plan.micro_batch_size
    key = group.steps_key()
    tokens_at = placement(spec, key.layout).tokens_TRBL(size)  # the sharding of a call's rows
    flag_T = update_flags(group.plan)  # of the whole round: True where an update ends
    calls = []
    # Workers of a device that run in turn have calls of their own, those of one turn first.
    for workers, position in _positions(group, num_sequential(spec, key.layout)):
        for first in range(0, group.plan.num_micro_batches, spec.num_micro_batches):
            part = slice(first, first + spec.num_micro_batches)  # the micro-batches of this call
            update_T = None
            if key.accumulates:
                update_T = flag_T[part]
            stream_R3 = None
            if spec.key_seed is not None:
                # Each worker has read `first * size` rows before; ids and streams stay.
                stream_R3 = reads_R3[workers] + np.array([0, 0, first * size], np.int32)
            calls.append(
                Call(
                    rows_TRB=_sent(_part(rows_TRB, part, workers), tokens_at),
                    rate_TR=rate_TR[part, workers],
                    update_T=update_T,
                    stream_R3=stream_R3,
                    position=position,
                )
            )
    return calls


def padded_stats_rows(
    group: Group, first_rows_R: Sequence[PyTree], count_R: np.ndarray, spec: ProgramSpec
) -> StatsRows:
    """Send the rows that a batch-size test measures to the devices.

    They are the first `count_R[r]` of the rows `first_rows_R[r]` (leaves [B, L + 1]) of worker r of
    the `group`. All workers' rows are padded with zeros to `spec.max_test_sequences`.
    """
    test_RB = _zero_rows(spec, (len(count_R), spec.max_test_sequences))
    for worker, (rows_B, count) in enumerate(zip(first_rows_R, count_R, strict=True)):
        for test_RBL, rows_BL in _pairs(test_RB, rows_B):
            test_RBL[worker, :count] = rows_BL[:count]
    return StatsRows(group, _sent(test_RB, placement(spec, group.layout).workers), count_R)


def _zero_rows(spec: ProgramSpec, shape: tuple[int, ...]) -> PyTree:
    """Make arrays of zeros for rows as the run's model reads them: leaves [*shape, L + 1].

    `spec.row` has the shape and type of each array of one row, such as its tokens.
    """
    return jax.tree.map(lambda leaf: np.zeros((*shape, *leaf.shape), leaf.dtype), spec.row)


def _pairs(to: PyTree, rows: PyTree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pair the arrays of two trees of rows: the tokens of both, then other arrays, if any."""
    return zip(jax.tree.leaves(to), jax.tree.leaves(rows), strict=True)


def _sent(rows: PyTree, to: NamedSharding) -> PyTree:
    """Send all arrays of rows to the same devices."""
    return reshard(rows, jax.tree.map(lambda leaf: to, rows))


def _part(rows_TRB: PyTree, micro_batches: slice, workers: np.ndarray) -> PyTree:
    """Take some micro-batches of some workers (positions in R) out of rows on the host."""
    return jax.tree.map(lambda leaf_TRBL: leaf_TRBL[micro_batches, workers], rows_TRB)


def _first_rows(rows_TRB: PyTree, worker: int, count: int) -> PyTree:
    """Return the first rows of a round that a worker reads, at most `count`: leaves [B, L + 1]."""
    return jax.tree.map(
        lambda leaf_TRBL: leaf_TRBL[:, worker].reshape(-1, leaf_TRBL.shape[-1])[:count], rows_TRB
    )


def _positions(group: Group, num_turns: int) -> list[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """List, for each turn, the workers that run in it and their position on their devices.

    A device has `num_turns` adjacent workers, and runs one in each turn. Workers are positions in
    R. The position on the device is in a tuple of one int32 [], to be appended to a program's
    arguments. If all run at once, this tuple is empty.
    """
    workers = np.arange(sum(group.sizes))
    if num_turns == 1:
        return [(workers, ())]
    turns: list[tuple[np.ndarray, tuple[np.ndarray, ...]]] = []
    for turn in range(num_turns):
        workers_of_turn = workers[turn::num_turns]  # one of each device
        turns.append((workers_of_turn, (np.array(turn, np.int32),)))
    return turns


def _local_indices(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> set[int]:
    """Find the indices along an axis of an array whose entries are on devices of this process.

    `sharding` and `shape` are the array's.
    """
    found: set[int] = set()
    for slices in sharding.addressable_devices_indices_map(shape).values():
        if slices is not None:  # the device has a part: a slice along each axis
            found.update(range(shape[axis])[slices[axis]])
    return found


def _sequences(
    reads: Sequence[tuple[int, int, int]],
    group: Group,
    spec: ProgramSpec,
    rows: Rows,
    tested_here: Set[tuple[int, int, int]],
) -> PyTree:
    """Read the rows that a group's workers train on in a round: leaves [T, R, B, L + 1].

    Args:
      reads: For each of the group's workers: trainer id, data stream, and the position in the
        stream from which it reads next.
      group: The trainers, with the plan of their round.
      spec: Says which devices there are, and how rows look.
      rows: The data.
      tested_here: The entries of `reads` of the workers that are measured in this process.

    Returns:
      The rows, on the host. Those of workers that this process neither trains nor measures are
      zeros.
    """
    num_micro_batches = group.plan.num_micro_batches
    size = group.plan.micro_batch_size
    shape = (num_micro_batches, len(reads), size)  # T, R and B
    rows_TRB = _zero_rows(spec, shape)
    tokens_at = placement(spec, group.steps_key().layout).tokens_TRBL(size)
    trained_here = _local_indices(tokens_at, shape, 1)
    for worker, read in enumerate(reads):
        if worker not in trained_here and read not in tested_here:
            continue
        trainer, stream, start = read
        rows_B = rows.batch(trainer, stream, start, num_micro_batches * size)
        for leaf_TRBL, rows_BL in _pairs(rows_TRB, rows_B):
            leaf_TRBL[:, worker] = rows_BL.reshape(num_micro_batches, size, -1)
    return rows_TRB
