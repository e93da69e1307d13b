"""Make the inputs of a round: groups of trainers, and their sequences on the devices."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from adloco_jax.core.merge import allocate_workers
from adloco_jax.core.types import block_size
from adloco_jax.engine.programs import num_turns, placement
from adloco_jax.engine.sharding import reshard
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

# Number of first rows of two workers that are compared, and how many distinct rows this needs.
_COMPARED, _FEWEST_COMPARED = 32, 6


class Rows(Protocol):
    """The interface of rows that `fit` trains on; `data.ArrayRows` and `data.Corpus` have it."""

    @property
    def heldout_rows(self) -> np.ndarray:
        """Held-out rows, integers [E, L + 1], of documents that no training row contains."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content that determines the rows; it shows whether data have changed."""

    @property
    def shards(self) -> Sequence[dict]:
        """A JSON record for each file, or part of a data set, that was read.

        A resumed run names the parts whose records have changed.
        """

    @property
    def tokens_per_byte(self) -> float | None:
        """Tokens per UTF-8 byte of the held-out text; None if the text is not known."""

    def batch(self, trainer: int, stream: int, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count - 1` of one worker's stream, int32 [count, L + 1]."""


class Group(NamedTuple):
    """Some trainers and their workers, which run in one compiled program."""

    trainers: tuple[int, ...]  # positions of the trainers
    workers: tuple[int, ...]  # positions of their workers, in the order of the group's own stack
    owners: tuple[int, ...]  # each worker's trainer, as a position in the group's own stack
    devices: tuple[int, int] | None  # first device and number of devices; None: all
    plan: RoundPlan = RoundPlan(0, 1, 0)  # plan of the round, if the group runs one
    in_pool: int | None = None  # size of the pool if its workers run one by one; else None

    def key(self, kind: Kind, **more) -> ProgramKey:
        """The `ProgramKey` of a program that depends on which worker belongs to which trainer."""
        return ProgramKey(kind, self.owners, devices=self.devices, **more)

    def steps_key(self) -> ProgramKey:
        """The `ProgramKey` of the inner steps, which do not depend on the workers' trainers."""
        pool, size = (0,) * (self.in_pool or len(self.workers)), self.plan.micro_batch_size
        return ProgramKey("steps", pool, size, self.plan.num_accum_steps > 1, self.devices)


class Test(NamedTuple):
    """The rows on which the gradient statistics of a group of trainers are measured."""

    group: Group
    rows_RBL: Array
    count_R: np.ndarray  # number of rows of each worker that count; the rest is padding


EXTRAS = {"interval": interval}
"""Functions for the extra arguments of an outer optimizer's update, by keyword. Each computes the
value of one trainer from its learning rates and its plan."""


class Call(NamedTuple):
    """The arguments of one call of the program `steps` (inner steps), without the workers.

    R counts the workers that step in this call.
    """

    tokens_TRBL: Array  # [T, R, B, L + 1]
    rate_TR: np.ndarray  # learning rates
    update_T: np.ndarray | None  # True where an update ends; None: gradients are not accumulated
    # For a loss that takes `key`: each worker's trainer id, stream, and first sequence in it.
    stream_R3: np.ndarray | None
    turn: tuple[np.ndarray, ...]  # int32 []: the worker's position, if workers run one by one


class Batch(NamedTuple):
    """The inputs of a round: the sizes that each trainer runs, and the sequences on the devices."""

    plans: Mapping[int, RoundPlan]
    groups: list[Group]
    calls: list[list[Call]]  # for each group: all calls of one worker, then of the next
    # The extra arguments of the outer optimizer by name: float32 [M], one number per trainer.
    extra_M: dict[str, np.ndarray]
    tests: list[Test]
    lines: list[dict]
    """For each trainer, the ledger fields of the round that its plan determines."""


def classes(control: Control, trainers: Iterable[int], spec: Spec) -> list[Group]:
    """Group trainers that have equally many workers; each group gets its own devices if possible.

    With several processes all trainers share all devices, because every process must take part in
    every program.
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
    """Group trainers that have equally many workers and the same plan (sizes) for the round."""
    groups = []
    for group in classes(control, plans, spec):
        for plan in dict.fromkeys(plans[m] for m in group.trainers):
            trainers = [m for m in group.trainers if plans[m] == plan]
            part = _group(control, trainers, spec.machine, group.devices)
            in_pool = len(control.owners) if spec.by_position else None
            groups.append(part._replace(plan=plan, in_pool=in_pool))
    return groups


def whole_pool(control: Control, spec: Spec) -> Group:
    """The group of all trainers and all workers, in the order of the ensemble."""
    return _group(control, range(len(control.trainers)), spec.machine)


def round_keys(
    control: Control, plans: Mapping[int, RoundPlan], settings: Settings, spec: Spec
) -> list[ProgramKey]:
    """The `ProgramKey`s of the programs of a round, in the order of the calls."""
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
    """The `ProgramKey`s of the programs of the next round, and of possible rounds after it.

    Two cases of the later round are considered: unchanged batches, and the fastest possible growth.
    A merge between the two rounds is included. Its members are chosen as if all trainers had equal
    losses on the guard rows (held-out rows for decisions).
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
    """The host's data (`Control`) as they will be after the merge and the spawns that are now due.

    The merging trainers are chosen as if all had equal losses on the guard rows.
    """
    if members := _members(control, settings):
        control = after_merge(control, members)
    for position, num_workers in joining_workers(control, settings):
        control = with_workers(control, position, num_workers)
    return control


def _members(control: Control, settings: Settings) -> tuple[int, ...]:
    """The positions of the trainers that will merge after this round.

    They are chosen as if all trainers had equal losses on the guard rows.
    """
    if not merge_due(control, settings):
        return ()
    return choose_members(control, [0.0] * len(control.trainers), settings)


def reads(control: Control, plans: Mapping[int, RoundPlan]) -> tuple:
    """Collect the values that determine a round's inputs, to see if two rounds have the same."""
    sequences = [control.reads(worker) for worker in range(len(control.owners))]
    return control.round, [*control.owners], sequences, dict(plans)


def make_batch(
    control: Control, plans: Mapping[int, RoundPlan], settings: Settings, spec: Spec, rows: Rows
) -> Batch:
    """Read the next sequences of every worker's stream, and send them to the devices."""
    groups = group_trainers(control, plans, spec)
    round_tokens = spec.sequence_length * sum(
        group.plan.num_sequences * len(group.workers) for group in groups
    )
    count_R = np.zeros(len(control.owners), np.int32)
    for m, plan in plans.items():
        workers = control.workers_of(m)
        count_R[workers] = test_count(plan, len(workers), settings)
    tested = []
    for group in classes(control, plans, spec):
        if count_R[list(group.workers)].any():
            shape = (len(group.workers), spec.max_test_sequences, spec.row_length)
            at = placement(spec, group.key("stats")).workers
            tested.append((group, at, np.zeros(shape, np.int32)))
    tested_here = {group.workers[i] for group, at, test in tested for i in _here(at, test.shape, 0)}
    calls, extra_MX, lines, beginnings = [], {}, {}, {}
    for group in groups:
        size, steps, key = group.plan.micro_batch_size, spec.num_micro_batches, group.steps_key()
        devices = placement(spec, key)
        at, turns = devices.tokens_TRBL(size), num_turns(spec, key, devices)
        rows_TRBL = _sequences(control, group, spec, rows, at, tested_here)
        for index, worker in enumerate(group.workers):
            flat = rows_TRBL[:, index].reshape(-1, spec.row_length)
            beginnings[worker] = flat[: max(count_R[worker], _COMPARED)]
        flag_T, rates = update_flags(group.plan), []
        for m in group.trainers:
            how = {"round_tokens": round_tokens}
            rates.append(learning_rates(control, m, group.plan, settings, **how))
            lines[m] = planned(control, m, group.plan, rates[-1])
        rate_TR = np.stack(rates, axis=1)[:, group.owners]
        for m, rate_T in zip(group.trainers, rates, strict=True):
            extra_MX[m] = [EXTRAS[name](rate_T, group.plan, settings) for name in spec.extras]
        calls.append(
            [
                Call(
                    reshard(rows_TRBL[t : t + steps, chosen], at),
                    rate_TR[t : t + steps, chosen],
                    flag_T[t : t + steps] if key.accumulates else None,
                    None if spec.key_seed is None else _streams(control, group, t * size)[chosen],
                    turn,
                )
                for chosen, turn in _turns(group, turns)
                for t in range(0, group.plan.num_micro_batches, steps)
            ]
        )
    if control.round == 0:
        _require_different_rows(control, beginnings)
    tests = []
    for group, at, test_RBL in tested:
        for index, worker in enumerate(group.workers):
            test_RBL[index, : count_R[worker]] = beginnings[worker][: count_R[worker]]
        tests.append(Test(group, reshard(test_RBL, at), count_R[list(group.workers)]))
    values_XM = zip(*(extra_MX[m] for m in sorted(extra_MX)), strict=True)
    extra_M = {
        name: np.array(values_M, np.float32)
        for name, values_M in zip(spec.extras, values_XM, strict=True)
    }
    return Batch(plans, groups, calls, extra_M, tests, [lines[m] for m in sorted(lines)])


def _turns(group: Group, count: int) -> list[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """List the turns in which a group's workers run inner steps, one after another.

    A turn runs one worker of each device; if all workers step at once, there is one turn. For each
    turn the list has the positions of these workers, and the argument `turn` of the program: the
    worker's position in the group's own stack, or in the pool of all workers. The argument is empty
    if all workers step at once.
    """
    workers = np.arange(len(group.workers))
    if count == 1:
        return [(workers, ())]
    if group.in_pool:
        return [(workers[i : i + 1], (np.array(w, np.int32),)) for i, w in enumerate(group.workers)]
    return [(workers[turn::count], (np.array(turn, np.int32),)) for turn in range(count)]


def _require_different_rows(control: Control, beginnings: Mapping[int, np.ndarray]) -> None:
    """Raise DataError if two workers read the same rows, and so compute the same update."""
    first_with = {}
    for worker, rows_BL in ((w, rows_BL[:_COMPARED]) for w, rows_BL in beginnings.items()):
        read = control.reads(worker)
        before = first_with.setdefault(rows_BL.tobytes(), read)
        # A few rows may be equal by chance. Rows that another process reads are all zero here.
        if before != read and len(np.unique(rows_BL, axis=0)) >= _FEWEST_COMPARED:
            raise DataError(
                f"corpus.batch: gives trainer {before[0]}, stream {before[1]} and trainer"
                f" {read[0]}, stream {read[1]} the same {len(rows_BL)} rows; choose rows by both"
                " arguments, trainer and stream"
            )


def _streams(control: Control, group: Group, offset: int) -> np.ndarray:
    """Each worker's trainer (its id), stream, and first sequence of a call; int32 [R, 3]."""
    reads_R3 = np.array([control.reads(w) for w in group.workers], np.int32)
    return reads_R3 + np.array([0, 0, offset], np.int32)


def _here(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> set[int]:
    """The indices on an axis for which a device of this process holds data."""
    slices = sharding.addressable_devices_indices_map(shape).values()
    return {index for part in slices if part for index in range(shape[axis])[part[axis]]}


def _sequences(
    control: Control,
    group: Group,
    spec: Spec,
    rows: Rows,
    tokens_at: NamedSharding,
    tested_here: Set[int],
) -> np.ndarray:
    """The training rows of every worker of a group, int32 [T, R, B, L + 1], in stream order.

    A process reads only the rows of workers that its devices train or test; others are zero.
    """
    size = group.plan.micro_batch_size
    shape = (group.plan.num_micro_batches, len(group.workers), size, spec.row_length)
    rows_TRBL = np.zeros(shape, np.int32)
    trained_here = _here(tokens_at, shape, 1)
    for index, worker in enumerate(group.workers):
        if index not in trained_here and worker not in tested_here:
            continue
        taken = rows.batch(*control.reads(worker), len(rows_TRBL) * size)
        rows_TRBL[:, index] = taken.reshape(len(rows_TRBL), size, -1)
    return rows_TRBL
