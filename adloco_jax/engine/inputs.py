"""Make the inputs of a round: each worker's next rows, on the devices that run the worker.

Trainers are divided into groups, so that one compiled program can run each group.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from adloco_jax.core.merge import allocate_workers
from adloco_jax.core.types import block_size
from adloco_jax.data.prepared import DocumentRows
from adloco_jax.engine.sharding import num_turns, placement, reshard
from adloco_jax.engine.spec import Kind, Machine, ProgramKey, Spec
from adloco_jax.errors import DataError
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
    interval,
    is_over,
    learning_rates,
    planned,
    round_plans,
    test_count,
    update_flags,
)
from adloco_jax.settings import Settings

# The first `_COMPARED` rows of a worker are compared with those of all other workers. Equal rows
# are an error only if at least `_FEWEST_COMPARED` of them are distinct.
_COMPARED, _FEWEST_COMPARED = 32, 6


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

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Return `count` rows of a data stream from row `start` on: int32 [count, L + 1].

        Trainer id and permanent worker id (`stream`) together identify the stream, which has no
        end. Labelled rows have L + 2 integers.
        """


class Group(NamedTuple):
    """A group of trainers with their workers, which one compiled program runs together."""

    trainers: tuple[int, ...]  # positions of the trainers
    workers: tuple[int, ...]  # positions of their workers, in the order of the group's arrays
    owners: tuple[int, ...]  # each worker's trainer: its index in `trainers`
    devices: tuple[int, int] | None  # first device and number of devices; None: all
    plan: RoundPlan = RoundPlan(0, 1, 0)  # sizes of the trainers' round, if the group runs one
    in_pool: int | None = None  # number of all workers of the run if `Spec.by_position`; else None

    def key(self, kind: Kind, **more) -> ProgramKey:
        """Make the key of one of this group's programs, with further fields `more`."""
        return ProgramKey(kind, self.owners, devices=self.devices, **more)

    def steps_key(self) -> ProgramKey:
        """Make the key of the group's inner steps, which depend on the workers only."""
        pool, size = (0,) * (self.in_pool or len(self.workers)), self.plan.micro_batch_size
        return ProgramKey("steps", pool, size, self.plan.num_accum_steps > 1, self.devices)


class Test(NamedTuple):
    """The rows on which the gradient statistics of a group's workers are measured."""

    group: Group
    rows_RBL: Array
    count_R: np.ndarray  # number of rows that count, for each worker; all later rows are padding


EXTRAS = {"interval": interval}
"""Functions that compute extra arguments of an outer optimizer's update, by the argument's keyword.

A function computes the value for one trainer from the learning rates of the trainer's round, the
sizes of this round (`RoundPlan`) and the settings.
"""


class Call(NamedTuple):
    """The arguments of one call of `steps` except the workers: T micro-batches of R workers."""

    tokens_TRBL: Array  # [T, R, B, L + 1]
    rate_TR: np.ndarray  # learning rates
    update_T: np.ndarray | None  # True where an update ends; None: gradients are not accumulated
    # For a loss that takes `key`: trainer id, data stream, position of the call's first sequence.
    stream_R3: np.ndarray | None
    turn: tuple[np.ndarray, ...]  # one int32 [], a worker's position (`_turns`), or empty


class Batch(NamedTuple):
    """The inputs of a round: the sizes of each trainer's round, and sequences on their devices."""

    plans: Mapping[int, RoundPlan]
    groups: list[Group]
    calls: list[list[Call]]  # for each group: all calls of the first turn, then of the next
    # The extra arguments of the outer optimizer by name: float32 [M], one number per trainer.
    extra_M: dict[str, np.ndarray]
    tests: list[Test]
    lines: list[dict]
    """For each trainer, the ledger fields of the round that its plan determines."""


def classes(control: Control, trainers: Iterable[int], spec: Spec) -> list[Group]:
    """Group trainers with equally many workers; groups have devices in proportion to their workers.

    All trainers share all devices if there are too few devices, or several processes (every process
    must take part in every program).
    """
    chosen = sorted(trainers)
    if not chosen:
        return []
    counts = [len(control.workers_of(m)) for m in chosen]
    machine, model_shards = spec.machine, spec.model_shards
    units = len(machine.devices) // model_shards
    sizes = sorted(set(counts), reverse=True)
    if len(sizes) == 1 or machine.num_processes > 1 or units < len(sizes):
        return [_group(control, chosen, machine)]
    members = [[m for m, n in zip(chosen, counts, strict=True) if n == size] for size in sizes]
    pools = [size * len(ms) for size, ms in zip(sizes, members, strict=True)]
    shares = allocate_workers(pools, units)
    firsts = np.cumsum([0, *shares[:-1]]).tolist()
    return [
        _group(control, ms, machine, (first * model_shards, share * model_shards))
        for ms, first, share in zip(members, firsts, shares, strict=True)
    ]


def _group(
    control: Control,
    trainers: Sequence[int],
    machine: Machine,
    devices: tuple[int, int] | None = None,
) -> Group:
    if len(trainers) == len(control.trainers) and (
        len(machine.devices) == 1 or block_size(control.owners) is not None
    ):
        workers = tuple(range(len(control.owners)))  # in the order of the ensemble
    else:
        workers = tuple(w for m in trainers for w in control.workers_of(m))
    owners = tuple(trainers.index(control.owners[w]) for w in workers)
    return Group(tuple(trainers), workers, owners, devices)


def group_trainers(control: Control, plans: Mapping[int, RoundPlan], spec: Spec) -> list[Group]:
    """Divide each of `classes` by plan: trainers with the same plan form a group."""
    groups = []
    for group in classes(control, plans, spec):
        for plan in dict.fromkeys(plans[m] for m in group.trainers):
            trainers = [m for m in group.trainers if plans[m] == plan]
            part = _group(control, trainers, spec.machine, group.devices)
            in_pool = len(control.owners) if spec.by_position else None
            groups.append(part._replace(plan=plan, in_pool=in_pool))
    return groups


def whole_pool(control: Control, spec: Spec) -> Group:
    """Make one group of all trainers and all workers of the run, in the order of the ensemble."""
    return _group(control, range(len(control.trainers)), spec.machine)


def round_keys(
    control: Control, plans: Mapping[int, RoundPlan], settings: Settings, spec: Spec
) -> list[ProgramKey]:
    """List the keys of the programs that a round may call, in the order of their first calls."""
    keys = []
    if measures_gradients(settings):
        keys += [group.key("stats") for group in classes(control, plans, spec)]
    groups = group_trainers(control, plans, spec)
    if spec.by_position:
        steps, pool = [group.steps_key() for group in groups], whole_pool(control, spec)
        accumulates = any(key.accumulates for key in steps)
        return [*keys, pool.key("start", accumulates=accumulates), *steps, pool.key("outer")]
    for group in groups:
        steps = group.steps_key()
        if not spec.outer.own_params or steps.accumulates or spec.reset_inner_state:
            keys.append(group.key("start", accumulates=steps.accumulates))
        if not spec.outer.own_params:
            keys += [steps, group.key("outer")]
            continue
        if group.plan.num_micro_batches > spec.num_micro_batches * spec.outer.fragments:
            keys.append(steps)
        keys.append(steps._replace(kind="fragment", owners=group.owners))
    return list(dict.fromkeys(keys))


def programs_ahead(control: Control, settings: Settings, spec: Spec) -> list[ProgramKey]:
    """List the keys of the programs that the next two rounds may call.

    If measured gradients grow the batch, the later round is listed for the fastest growth and for
    none. Merges are predicted as in `foreseen`.
    """
    keys = round_keys(control, round_plans(control, settings), settings, spec)
    later = dataclasses.replace(control, round=control.round + 1)
    last = is_over(later, settings)
    if settings.outer.leaves_unsynchronised:
        owed = range(len(later.trainers)) if last else _members(later, settings)
        keys += [group.key("flush") for group in classes(later, owed, spec)]
    if not last and measures_gradients(settings):
        for growth in (settings.batching.max_growth, 1):
            ahead = foreseen(with_growth(later, growth, settings), settings)
            keys += round_keys(ahead, round_plans(ahead, settings), settings, spec)
    return list(dict.fromkeys(keys))


def foreseen(control: Control, settings: Settings) -> Control:
    """Predict the control at the start of the next round, as if all guard losses were equal."""
    if members := _members(control, settings):
        control = after_merge(control, members)
    for position, num_workers in joining_workers(control, settings):
        control = with_workers(control, position, num_workers)
    return control


def _members(control: Control, settings: Settings) -> tuple[int, ...]:
    if not merge_due(control, settings):
        return ()
    return choose_members(control, [0.0] * len(control.trainers), settings)


def reads(control: Control, plans: Mapping[int, RoundPlan]) -> tuple:
    """Collect what determines a round's inputs; if changed, those made ahead are not used."""
    sequences = [control.reads(worker) for worker in range(len(control.owners))]
    return control.round, [*control.owners], sequences, dict(plans)


def make_batch(
    control: Control, plans: Mapping[int, RoundPlan], settings: Settings, spec: Spec, rows: Rows
) -> Batch:
    """Read every worker's next sequences, and send them to the devices.

    Raises DataError if two workers start the first round of the run with the same rows.
    """
    groups = group_trainers(control, plans, spec)
    round_tokens = spec.sequence_length * sum(
        group.plan.num_sequences * len(group.workers) for group in groups
    )
    count_R = np.zeros(len(control.owners), np.int32)
    for m, plan in plans.items():
        workers = control.workers_of(m)
        count_R[workers] = test_count(plan, len(workers), settings)
    tested = [g for g in classes(control, plans, spec) if count_R[list(g.workers)].any()]
    tested_here = {
        group.workers[index]
        for group in tested
        for index in _here(placement(spec, group.key("stats")).workers, (len(group.workers),), 0)
    }
    rates = {
        m: learning_rates(control, m, plan, settings, round_tokens=round_tokens)
        for m, plan in sorted(plans.items())
    }
    calls, beginnings = [], {}
    for group in groups:
        rows_TRBL = _sequences(control, group, spec, rows, tested_here)
        for index, worker in enumerate(group.workers):
            flat = rows_TRBL[:, index].reshape(-1, spec.row_length)
            beginnings[worker] = flat[: max(count_R[worker], _COMPARED)]
        rate_TR = np.stack([rates[m] for m in group.trainers], axis=1)[:, group.owners]
        reads_R3 = np.array([control.reads(w) for w in group.workers], np.int32)
        calls.append(calls_of(group, rows_TRBL, rate_TR, reads_R3, spec))
    if control.round == 0:
        _require_different_rows(control, beginnings)
    tests = [padded_test(group, beginnings, count_R, spec) for group in tested]
    extra_M = {
        name: np.array([EXTRAS[name](rates[m], plans[m], settings) for m in rates], np.float32)
        for name in spec.extras
    }
    lines = [planned(control, m, plans[m], rate_T) for m, rate_T in rates.items()]
    return Batch(plans, groups, calls, extra_M, tests, lines)


def calls_of(
    group: Group, rows_TRBL: np.ndarray, rate_TR: np.ndarray, reads_R3: np.ndarray, spec: Spec
) -> list[Call]:
    """Divide a group's round into calls of the program `steps`; send the rows to the devices.

    `reads_R3` has each worker's trainer id, its stream, and the position of its first row there.
    """
    size, steps, key = group.plan.micro_batch_size, spec.num_micro_batches, group.steps_key()
    devices = placement(spec, key)
    at, flag_T = devices.tokens_TRBL(size), update_flags(group.plan)
    read_3 = np.array([0, 0, size], np.int32)  # how far a micro-batch takes a worker
    return [
        Call(
            reshard(rows_TRBL[t : t + steps, chosen], at),
            rate_TR[t : t + steps, chosen],
            flag_T[t : t + steps] if key.accumulates else None,
            None if spec.key_seed is None else reads_R3[chosen] + t * read_3,
            turn,
        )
        for chosen, turn in _turns(group, num_turns(spec, key))
        for t in range(0, group.plan.num_micro_batches, steps)
    ]


def padded_test(
    group: Group, beginnings: Mapping[int, np.ndarray], count_R: np.ndarray, spec: Spec
) -> Test:
    """Send the first `count_R` rows of each worker, by position, padded, to the devices."""
    shape = (len(group.workers), spec.max_test_sequences, spec.row_length)
    test_RBL, count_R = np.zeros(shape, np.int32), count_R[list(group.workers)]
    for test_BL, worker, count in zip(test_RBL, group.workers, count_R, strict=True):
        test_BL[:count] = beginnings[worker][:count]
    return Test(group, reshard(test_RBL, placement(spec, group.key("stats")).workers), count_R)


def _turns(group: Group, count: int) -> list[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """Divide a group's workers into `count` turns, which run one after another."""
    workers = np.arange(len(group.workers))
    if count == 1:
        return [(workers, ())]
    if group.in_pool:
        return [(workers[i : i + 1], (np.array(w, np.int32),)) for i, w in enumerate(group.workers)]
    return [(workers[turn::count], (np.array(turn, np.int32),)) for turn in range(count)]


def _require_different_rows(control: Control, beginnings: Mapping[int, np.ndarray]) -> None:
    """Raise DataError if two workers start with the same rows, and so compute the same updates."""
    first_with = {}
    for worker, rows_BL in ((w, rows_BL[:_COMPARED]) for w, rows_BL in beginnings.items()):
        read = control.reads(worker)
        before = first_with.setdefault(rows_BL.tobytes(), read)
        # A few rows may be equal by chance; rows that another process reads are all zero here.
        if before != read and len(np.unique(rows_BL, axis=0)) >= _FEWEST_COMPARED:
            raise DataError(
                f"corpus.batch: gives trainer {before[0]}, stream {before[1]} and trainer"
                f" {read[0]}, stream {read[1]} the same {len(rows_BL)} rows; choose rows by both"
                " arguments, trainer and stream"
            )


def _here(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> set[int]:
    """Find the indices along an axis of an array whose entries are on devices of this process."""
    slices = sharding.addressable_devices_indices_map(shape).values()
    return {index for part in slices if part for index in range(shape[axis])[part[axis]]}


def _sequences(
    control: Control, group: Group, spec: Spec, rows: Rows, tested_here: Set[int]
) -> np.ndarray:
    """Read the rows that a group's workers train on in a round: int32 [T, R, B, L + 1]."""
    size = group.plan.micro_batch_size
    shape = (group.plan.num_micro_batches, len(group.workers), size, spec.row_length)
    rows_TRBL = np.zeros(shape, np.int32)
    tokens_at = placement(spec, group.steps_key()).tokens_TRBL(size)
    trained_here = _here(tokens_at, shape, 1)
    for index, worker in enumerate(group.workers):
        if index not in trained_here and worker not in tested_here:
            continue
        taken = rows.batch(*control.reads(worker), len(rows_TRBL) * size)
        rows_TRBL[:, index] = taken.reshape(len(rows_TRBL), size, -1)
    return rows_TRBL
