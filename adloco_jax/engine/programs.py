"""The compiled programs of a run: what they compute, and how they are called.

`start` begins a round, `steps` runs a fixed number of micro-batches, `outer` synchronises;
Streaming DiLoCo calls `fragment` (inner steps, then one synchronisation) instead of `outer`, and
`flush` for the updates that workers have not sent. `stats` measures gradients, `loss` the loss of
held-out rows. An ensemble is all trainers with their workers. The members of a merge become one
trainer; the first, the representative, remains.

The functions that make programs are given `at`, the mesh of devices with its shardings. Its axes
`trainer` and `worker`, together POOL, divide the workers; along the others devices share a worker.
`spec`, a `ProgramSpec`, holds what all programs of the run share: loss, optimizers, and the shapes
of the parameters and of a row. A key (`ProgramKey`) names a program by what it is compiled for; its
`layout` says which workers and devices that are. Rows are a tree: an array of tokens, or a
`RowBatch` of several arrays. A random key is one of JAX, for a loss that takes it. Gradients are
accumulated if an update has several micro-batches.

Axes of arrays: M trainers, R workers, T micro-batches, B rows, L tokens.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from adloco_jax.contrib.streaming import flush_workers, fragment_steps
from adloco_jax.core.arguments import fold_in_each
from adloco_jax.core.gradstats import MIN_EXAMPLES, gradient_stats
from adloco_jax.core.merge import merge, move_workers, spawn
from adloco_jax.core.outer import inner_steps, outer_update
from adloco_jax.core.types import Ensemble, GradientStats, Workers, of_workers, take
from adloco_jax.data.files import cache_folder, trim_cache
from adloco_jax.engine.sharding import (
    POOL,
    Placement,
    base_spec,
    begin_workers,
    ensemble_spec,
    num_sequential,
    params_spec,
    placement,
    reshard,
    workers_spec,
)
from adloco_jax.engine.spec import (
    Compiled,
    Compiling,
    Kind,
    OnCompile,
    ProgramKey,
    ProgramSpec,
    num_bytes,
)
from adloco_jax.loop.control import Control
from adloco_jax.loop.plans import AUTO_TEST_MIN
from adloco_jax.row_batch import as_row_batch

# Most float32 values of per-example gradients that a worker holds at once: 256 MB.
GRADIENTS_HELD = 2**26

# XLA's CPU client queues 32 programs on a device; one more blocks a thread that they may need, so
# devices can deadlock. With resharding, `Programs.call` runs up to four programs.
_MAX_IN_FLIGHT = 8

# The programs that compute losses; they take frozen weights as the keyword argument `base`.
_WITH_LOSS = ("steps", "fragment", "stats", "loss")


class Programs:
    """Compiles a run's programs when they are first needed, or ahead (`prefetch`)."""

    def __init__(self, spec: ProgramSpec, on_compile: OnCompile = lambda event: None):
        """Start without programs; `on_compile` is called around each compilation, in its thread."""
        self.spec = spec
        self.stall_s = 0.0  # seconds that callers have waited for compilation so far
        self.compiling = False  # whether a caller waits for a compilation now
        self._on_compile = on_compile
        self._known: set[ProgramKey] = set()  # compiled, being compiled, or queued
        self._numbers = itertools.count(1)  # of compilations, for `Compiling`
        self._x64 = jnp.result_type(float) == jnp.float64  # other threads may have another setting
        self._programs: dict[ProgramKey, Future[jax.stages.Compiled]] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._in_flight: deque[Array] = deque()  # a result of each of the last calls
        self._base: PyTree = None  # frozen weights, on the host or on devices
        # Parts of the frozen weights on devices, by number of the leaf, device, and slices.
        self._parts: dict[tuple[int, jax.Device, str], Array] = {}
        # For each program, frozen weights made of these parts, sharded as the program takes them.
        self._bases: dict[ProgramKey, PyTree] = {}

    def set_frozen(self, base: PyTree) -> None:
        """Set the frozen weights of the run, for the programs that compute losses; None: none.

        They are copied to devices when a program first needs them. Programs share the copies: a
        device holds each part of the weights only once.
        """
        self._base = base

    def call(self, key: ProgramKey, *arguments: PyTree) -> Any:
        """Dispatch the program of `key`, and return its results, which may still be computed.

        `arguments` are those of the program (`Program.function`), on the host or on devices; they
        are resharded if need be. Those that the program donates are deleted. The call waits for the
        compilation, and for the results of the call `_MAX_IN_FLIGHT` calls earlier.
        """
        program = self[key]
        positional_shardings, _ = program.input_shardings
        placed = reshard(arguments, positional_shardings)
        if self._base is not None and key.kind in _WITH_LOSS:
            results = program(*placed, base=self.frozen(key))
        else:
            results = program(*placed)
        self._in_flight.append(jax.tree.leaves(results)[-1])  # any one: they end together
        if len(self._in_flight) > _MAX_IN_FLIGHT:
            oldest = self._in_flight.popleft()
            if not oldest.is_deleted():  # a deleted result was donated to a later call
                # An error of the program is raised again where its results are read.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    oldest.block_until_ready()
        return results

    def frozen(self, key: ProgramKey) -> PyTree:
        """Return the frozen weights on devices, sharded as the program of `key` takes them.

        The program must be one that computes losses. None if the run has no frozen weights.
        """
        if self._base is not None and key not in self._bases:  # the program's first call
            leaves, structure = jax.tree.flatten(self._base)
            _, keyword_shardings = self[key].input_shardings
            shardings = structure.flatten_up_to(keyword_shardings["base"])
            placed = []
            for number, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
                placed.append(self._place_leaf(number, leaf, sharding))
            self._bases[key] = structure.unflatten(placed)
        return self._bases.get(key)

    def _place_leaf(self, number: int, leaf: Any, to: jax.sharding.Sharding) -> Array:
        """Return a leaf of the frozen weights with the sharding `to`.

        Parts that a device holds already are used again. `number` is the leaf's, among all leaves.
        """
        is_whole = to.shard_shape(leaf.shape) == leaf.shape  # each device has the whole leaf
        parts = []
        for device, slices in to.addressable_devices_indices_map(leaf.shape).items():
            part_key = (number, device, str(slices))  # a slice cannot be hashed
            if part_key not in self._parts:
                part = leaf if is_whole else np.asarray(leaf)[slices]
                self._parts[part_key] = jax.device_put(part, device)
            parts.append(self._parts[part_key])
        return jax.make_array_from_single_device_arrays(leaf.shape, to, parts)

    def __getitem__(self, key: ProgramKey) -> jax.stages.Compiled:
        """Return the compiled program of `key`; compile it, or wait for it, if need be.

        A program that is queued for the background, and whose compilation has not begun, is
        compiled in this thread. An error of the compilation (JaxRuntimeError, or what tracing
        raises) is raised here; if this thread compiled, the next call tries again. `stall_s` counts
        the time.
        """
        start_s = time.perf_counter()
        self._known.add(key)
        begun = self._programs.get(key)
        if begun is None or begun.cancel():  # `cancel` takes it out of the queue, if it is there
            begun = self._programs[key] = Future()
            self.compiling = True
            try:
                begun.set_result(self._compile(key, background=False))
            except BaseException:  # also an interrupt: nobody must wait for this future
                del self._programs[key]
                raise
            finally:
                self.compiling = False
        program = begun.result()
        self.stall_s += time.perf_counter() - start_s
        return program

    def prefetch(self, keys: Iterable[ProgramKey]) -> None:
        """Queue programs, unless they are compiled or queued, for compilation in the background."""
        wanted = list(keys)
        self._known.update(wanted)  # their number is in the message of a compilation
        for key in wanted:
            if key not in self._programs:
                self._programs[key] = self._background.submit(self._compile, key, background=True)

    def close(self) -> None:
        """Cancel queued compilations, and wait for the one that has begun, if any."""
        self._background.shutdown(cancel_futures=True)

    def _compile(self, key: ProgramKey, *, background: bool) -> jax.stages.Compiled:
        """Compile the program of `key` in this thread; call `on_compile` before and after.

        `background` is only reported: whether no caller waits for the program.
        """
        start_s = time.perf_counter()
        self._on_compile(Compiling(next(self._numbers), len(self._known)))
        _on_this_thread.hits = 0  # JAX's events count the cache hits of this compilation
        # The setting of the thread that made this object, which is JAX's for that thread alone.
        with jax.enable_x64(self._x64):
            program = lower(self.spec, key).compile()
        seconds = time.perf_counter() - start_s
        is_hit = _on_this_thread.hits > 0
        planned = needed_bytes(program) if program.memory_analysis() else None
        self._on_compile(Compiled(key, seconds, is_hit, background, planned))
        return program


def use_compilation_cache() -> None:
    """Let JAX save compiled programs in the user's cache, unless JAX has a folder for them already.

    Runs execute the programs that they find in the folder, so other users must not be able to write
    to it.

    Raises ConfigError if `ADLOCO_CACHE_GB`, the cache's largest size, is no number;
    FileNotFoundError if the user has no home folder for the cache.
    """
    trim_cache()  # deletes the longest unused files of a cache that has grown too large
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
    # Save programs of every compilation time and of every size (-1).
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_on_this_thread = threading.local()  # cache hits on this thread since its last compilation began


def _note_cache_hit(event: str, **_: str | int) -> None:
    """Count a hit of JAX's cache of programs; JAX calls this for each event that it records."""
    if event == "/jax/compilation_cache/cache_hits":
        _on_this_thread.hits = getattr(_on_this_thread, "hits", 0) + 1


jax.monitoring.register_event_listener(_note_cache_hit)


def lower(spec: ProgramSpec, key: ProgramKey) -> jax.stages.Lowered:
    """Trace the program of `key`, and lower it to XLA's input language; it is not compiled yet."""
    at = placement(spec, key.layout)
    with contextlib.ExitStack() as stack:
        if spec.model_shards > 1:  # tells the layers of `models` that weights are sharded
            stack.enter_context(jax.set_mesh(at.mesh))
            stack.enter_context(nn.logical_axis_rules((("weight", "model"),)))
        build = _PROGRAMS[key.kind]
        program = build(spec, key, at)
        jitted = functools.partial(
            jax.jit, donate_argnums=program.donated, out_shardings=program.out_shardings
        )
        if spec.base is None or key.kind not in _WITH_LOSS:
            return jitted(program.function).lower(*program.arguments)

        # Frozen weights are an argument of the program, because as constants they would be copied
        # into it. So the loss gets them while the program is traced.
        def with_base(*arguments: PyTree, base: PyTree) -> Any:
            """Run the program with a loss to which the frozen weights are bound."""
            loss_fn = functools.partial(spec.loss_fn, base=base)
            traced = build(dataclasses.replace(spec, loss_fn=loss_fn), key, at)
            return traced.function(*arguments)

        return jitted(with_base).lower(*program.arguments, base=base_spec(spec, key.layout))


class Program(NamedTuple):
    """A program to compile; the functions below make one for each kind of `ProgramKey`.

    Each of these functions takes the run's `ProgramSpec`, the key, and the mesh on which the
    program runs (`at`).
    """

    function: Callable
    arguments: tuple  # of the function: shapes, dtypes and shardings
    donated: tuple[int, ...]  # positions of the arguments whose memory the program may reuse
    out_shardings: PyTree  # of the results; one sharding stands for all arrays of a result


def _start(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program that begins a round: it gives each worker the parameters to start from.

    Its argument is an ensemble that has only these parameters: the trainers' or, with Streaming
    DiLoCo, the workers' own, whose memory the program reuses. Its result is a `Workers`: their
    parameters, inner states if these are reset, and sums of gradients if they are accumulated.
    """
    bare = ensemble_spec(spec, key.layout)
    bare = bare.replace(outer_state_M=None, inner_state_R=None, round=None, average_M=None)
    donated = ()
    if spec.outer.own_params:
        bare = bare.replace(params_M=None)
        donated = (0,)
    start = functools.partial(begin_workers, spec, key.layout, accumulates=key.accumulates)
    workers = jax.eval_shape(start, bare)
    return Program(start, (bare,), donated=donated, out_shardings=at.by_worker(workers))


def _steps(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program of inner steps, for a fixed number of micro-batches.

    If a device's workers run in turn, a call runs one worker of each device. R then counts these
    workers in rows, rates, streams and results.

    The arguments of the program:

    - `workers`: all workers, in the middle of their round.
    - `rows_TRB`: leaves [T, R, B, L + 1].
    - `rate_TR`: the learning rates.
    - `update_T`: True where an update ends; None if gradients are not accumulated.
    - `stream_R3`: each worker's trainer id, its data stream, and the position of its first row
      there, from which random keys are made; None if the loss takes no key.
    - `position`: which of a device's workers runs, from 0; only if they run in turn.

    Its results are the workers, and losses and skipped updates [T, R].
    """
    workers = workers_spec(spec, key.layout, accumulates=key.accumulates)
    num_turns = num_sequential(spec, key.layout)
    arguments = (workers, *_batch_spec(spec, key, at, num_turns))
    if num_turns == 1:
        advance = _inner_steps(spec, at)
    else:
        advance = _one_worker(spec, at)
        position = jax.ShapeDtypeStruct((), jnp.int32, sharding=at.replicated)
        arguments = (*arguments, position)

    def steps(
        workers: Workers,
        rows_TRB: PyTree,
        rate_TR: Array,
        update_T: Array | None,
        stream_R3: Array | None,
        *position: Array,
    ) -> tuple[Workers, Array, Array]:
        """Run inner steps, after making the random keys of a loss that takes one."""
        rows_and_keys = add_keys(spec, rows_TRB, stream_R3)
        return advance(workers, rows_and_keys, rate_TR, update_T, *position)

    out_shardings = (_shardings(workers), at.replicated, at.replicated)
    return Program(steps, arguments, donated=(0,), out_shardings=out_shardings)


def _outer(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program of a synchronisation: the outer update of all trainers.

    Its arguments are the ensemble and the workers after their inner steps, both without inner
    states, which it does not need. Its results are the ensemble, and the norms of the
    pseudo-gradients [M].
    """
    ensemble = ensemble_spec(spec, key.layout).replace(inner_state_R=None)
    workers = Workers(workers_spec(spec, key.layout).params_R, inner_state_R=None)

    def update(ensemble: Ensemble, workers: Workers) -> tuple[Ensemble, Array]:
        """Run `outer_update` with the settings of the run, and the shardings of the mesh."""
        return outer_update(
            ensemble,
            workers,
            outer_tx=spec.outer_tx,
            aggregate=spec.aggregate,
            skip_single=spec.outer.skip_single,
            precision=spec.outer.precision,
            reduce_scatter=at.reduce_scatter,
            all_gather=at.all_gather,
        )

    out_shardings = (_shardings(ensemble), at.replicated)
    return Program(update, (ensemble, workers), donated=(0,), out_shardings=out_shardings)


def _fragment(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program of inner steps that end with the synchronisation of one fragment.

    The arguments of the program:

    - `ensemble`: the trainers, without inner states and workers' parameters.
    - `workers`: the workers, which have these two.
    - `rows_TRB`: leaves [T, R, B, L + 1].
    - `rate_TR`: the learning rates.
    - `update_T`: True where an update ends; None if gradients are not accumulated.
    - `stream_R3`: each worker's trainer id, its data stream, and the position of its first row
      there, from which random keys are made; None if the loss takes no key.
    - `fragment`: number of the fragment, from 0.

    Its results are the ensemble and the workers; a list of losses and skipped updates, both [T, R];
    and the norms of the pseudo-gradients over the fragment [M].
    """
    ensemble = ensemble_spec(spec, key.layout).replace(inner_state_R=None, params_R=None)
    workers = workers_spec(spec, key.layout, accumulates=key.accumulates)
    advance = _inner_steps(spec, at)

    def steps(workers: Workers, *inputs: Any) -> tuple:
        """Run inner steps; return the workers, and losses and skipped updates, both [T, R].

        `inputs` are rows with random keys, learning rates, and the flags of updates or None. T may
        be a part of the call: `fragment_steps` calls this twice if the fragment arrives late.
        """
        workers, *measured_TR = advance(workers, *inputs)
        # Without this constraint, the operations after the inner steps would determine how arrays
        # are sharded in the loop over inner steps.
        return jax.lax.with_sharding_constraint(workers, at.by_worker(workers)), *measured_TR

    def fragment_program(
        ensemble: Ensemble,
        workers: Workers,
        rows_TRB: PyTree,
        rate_TR: Array,
        update_T: Array | None,
        stream_R3: Array | None,
        fragment: Array,
    ) -> tuple[Ensemble, Workers, PyTree, Array]:
        """Run `fragment_steps` with the settings of the run, and the shardings of the mesh."""
        inputs_T = (add_keys(spec, rows_TRB, stream_R3), rate_TR, update_T)
        return fragment_steps(
            ensemble,
            workers,
            inputs_T,
            fragment,
            steps=steps,
            num_fragments=spec.outer.fragments,
            outer_tx=spec.outer_tx,
            aggregate=spec.aggregate,
            delay=spec.outer.delay_updates,
            mixing=spec.outer.mixing,
            keep=lambda tree_M: jax.lax.with_sharding_constraint(tree_M, at.by_trainer(tree_M)),
            precision=spec.outer.precision,
            reduce_scatter=at.reduce_scatter,
            all_gather=at.all_gather,
        )

    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=at.replicated)
    arguments = (ensemble, workers, *_batch_spec(spec, key, at), index)
    out_shardings = (_shardings(ensemble), _shardings(workers), at.replicated, at.replicated)
    return Program(fragment_program, arguments, donated=(0, 1), out_shardings=out_shardings)


def _flush(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program of a flush: it sets trainers and workers to the mean of the workers.

    Only Streaming DiLoCo needs it, because its workers have updates that are not synchronised yet.
    Its argument and result are the ensemble without inner states.
    """
    ensemble = ensemble_spec(spec, key.layout).replace(inner_state_R=None)
    flush = functools.partial(
        flush_workers,
        precision=spec.outer.precision,
        reduce_scatter=at.reduce_scatter,
        all_gather=at.all_gather,
    )
    return Program(flush, (ensemble,), donated=(0,), out_shardings=_shardings(ensemble))


def _stats(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program that measures each worker's gradient statistics at its trainer.

    Its arguments are the trainers' parameters, leaves [M, ...], rows [R, B, L + 1], and how many of
    these rows count for each worker [R]. Its result is a `GradientStats` with fields [R].
    """
    num_trainers = len(key.sizes)
    num_workers = sum(key.sizes)
    params_M = ensemble_spec(spec, key.layout).params_M
    rows = _rows_spec(spec, (num_workers, spec.max_test_sequences), at.workers)
    counts = jax.ShapeDtypeStruct((num_workers,), jnp.int32, sharding=at.workers)
    # The most sequences of a pass. A pass is padded to this number, so it is no larger than a
    # worker's part of the smallest test (`AUTO_TEST_MIN`), or the fewest that can be measured.
    fewest = AUTO_TEST_MIN // math.ceil(num_workers / num_trainers)
    chunk = max(fewest, MIN_EXAMPLES)
    if spec.estimator == "vmap":  # which holds a gradient for each example of a pass
        chunk = max(min(chunk, GRADIENTS_HELD // spec.num_params), 1)
    trainers_here = num_trainers // at.mesh.shape["trainer"]  # trainers of a device
    own_stats = functools.partial(
        gradient_stats,
        spec.loss_fn,
        estimator=spec.estimator,
        chunk_size=chunk,
        inner_products=spec.inner_products,
    )

    by_trainer = P("trainer")
    by_worker = P(POOL)

    # A device measures its workers in turn: it holds one worker's gradients, and stops at each
    # one's number of sequences. A few workers at once with vmap took a quarter more time.
    @functools.partial(
        jax.shard_map,
        mesh=at.mesh,
        in_specs=(by_trainer, by_worker, by_worker, by_worker),
        out_specs=by_worker,
        axis_names=set(POOL),  # along the other axes, XLA's partitioner divides a worker
        # The check would refuse losses with a loop whose carry begins as a constant: it begins
        # equal on all devices, and differs afterwards.
        check_vma=False,
    )
    def of_each(
        params_M: PyTree, trainer_R: Array, rows_RB: PyTree, count_R: Array
    ) -> GradientStats:
        """On each device, measure its workers; M and R count those of the device."""

        def of_worker(worker: tuple[Array, PyTree, Array]) -> GradientStats:
            """Measure one worker: (position of its trainer, rows, number of rows that count)."""
            trainer, rows_B, count = worker
            # `trainer` is the position among all trainers; those of a device are adjacent.
            params = jax.tree.map(lambda leaf: leaf[trainer % trainers_here], params_M)
            return own_stats(params, rows_B, num_examples=count)

        return jax.lax.map(of_worker, (trainer_R, rows_RB, count_R))

    def stats(params_M: PyTree, rows_RB: PyTree, count_R: Array) -> GradientStats:
        """Measure all workers; give each the position of its trainer."""
        return of_each(params_M, jnp.array(of_workers(key.sizes)), rows_RB, count_R)

    arguments = (params_M, rows, counts)
    return Program(stats, arguments, donated=(), out_shardings=at.replicated)


def _loss(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program that computes one model's loss of each row.

    The loss is `spec.eval_loss_fn`, or that of training if it is None. Its arguments are the
    model's parameters and rows [B, L + 1]; its result is float32 [B].
    """
    params = params_spec(spec, key.layout)
    loss_fn = spec.eval_loss_fn or spec.loss_fn
    size = key.micro_batch_size
    rows = _rows_spec(spec, (size,), at.tokens_BL(size))

    # Devices that share the rows have few of them each, so they need no smaller parts.
    at_once = spec.loss_chunk if at.mesh.size == 1 else 0

    def losses(params: PyTree, rows_B: PyTree) -> Array:
        """Return the loss of each row: of all at once, or of `at_once` rows at a time."""

        def loss_of(row: PyTree) -> Array:
            """Return the loss of a batch that has only this row, leaves [L + 1]."""
            return loss_fn(params, jax.tree.map(lambda leaf_L: leaf_L[None], row))

        if at_once:
            return jax.lax.map(loss_of, rows_B, batch_size=at_once)
        return jax.vmap(loss_of)(rows_B)

    return Program(losses, (params, rows), donated=(), out_shardings=at.replicated)


# What builds the program of each kind.
_PROGRAMS: Mapping[Kind, Callable[[ProgramSpec, ProgramKey, Placement], Program]] = {
    "start": _start,
    "steps": _steps,
    "outer": _outer,
    "fragment": _fragment,
    "flush": _flush,
    "stats": _stats,
    "loss": _loss,
}


def add_keys(
    spec: ProgramSpec, rows_TRB: PyTree, stream_R3: Array | None
) -> tuple[PyTree, Array | None]:
    """Pair rows with random keys [T, R, B], one for each row; with None if the loss takes no key.

    `stream_R3`, int32 [R, 3], has each worker's trainer id, its data stream, and the position in
    the stream of the first of these rows. So the random key of a row does not depend on how a round
    is divided into calls. It is None if the loss takes no key.
    """
    if spec.key_seed is None or stream_R3 is None:
        return rows_TRB, None
    num_T, _, num_B = as_row_batch(rows_TRB).tokens.shape[:3]
    row_T1B = jnp.arange(num_T * num_B).reshape(num_T, 1, num_B)  # number of a row in these
    trainer_1R1 = stream_R3[None, :, None, 0]
    stream_1R1 = stream_R3[None, :, None, 1]
    first_1R1 = stream_R3[None, :, None, 2]
    key = jax.random.key(spec.key_seed)
    return rows_TRB, fold_in_each(key, trainer_1R1, stream_1R1, first_1R1 + row_T1B)


def _advance(spec: ProgramSpec, at: Placement, *, sequential: bool) -> Callable:
    """Bind the run's loss and inner optimizer to `core.inner_steps`, and return the function.

    With `sequential`, the function runs workers one after another, with the activations of one at a
    time in memory; otherwise all at once. It takes

    - `workers`: the workers, in the middle of their round;
    - `rows_and_keys`: rows, leaves [T, R, B, L + 1], and their random keys [T, R, B]; None in place
      of the keys if the loss takes none;
    - `rate_TR`: the learning rates;
    - `update_T`: True where an update ends; None if gradients are not accumulated.

    It returns the workers, and losses and skipped updates, both [T, R].
    """
    # Whether several devices share the batch of a worker.
    is_shared = at.mesh.shape["data"] * at.mesh.shape["model"] > 1

    def advance(
        workers: Workers,
        rows_and_keys: tuple[PyTree, Array | None],
        rate_TR: Array,
        update_T: Array | None,
    ) -> tuple:
        """Run `inner_steps` with the loss and the optimizer of the run."""
        rows_TRB, key_TRB = rows_and_keys
        return inner_steps(
            workers,
            rows_TRB,
            spec.loss_fn,
            inner_tx=spec.inner_tx,
            learning_rate_TR=rate_TR,
            update_T=update_T,
            key_TRB=key_TRB,
            sequential=sequential,
            # If devices share a batch, they would communicate gradients after every pass, so there
            # is only one pass.
            examples_per_pass=None if is_shared else spec.examples_per_pass,
        )

    return advance


def _on_each_device(advance: Callable, at: Placement) -> Callable:
    """Make a function that runs `advance` on each device, only for the workers of this device.

    Args:
      advance: A function `(workers, rows_and_keys, rate_TR, update_T, *position)` that returns the
        workers, and losses and skipped updates, both [T, R]. `rows_and_keys` are rows, leaves
        [T, R, B, L + 1], and their random keys [T, R, B] or None; `update_T` is True where an
        update ends, or None. `position`, if it is given, is one int32 [], which is equal on all
        devices: which of a device's workers runs.
      at: The mesh. Its axes `trainer` and `worker` divide the workers (axis R); the other axes are
        left to XLA's partitioner.

    Returns:
      A function with the parameters and results of `advance`, in which R counts all workers.
    """
    if at.mesh.shape["trainer"] * at.mesh.shape["worker"] == 1:
        return advance  # all workers are on every device already
    pool = P(POOL)  # the first axis of an array is R
    pool_T = P(None, POOL)  # the first axes are T and R
    # What divides each field of `Workers`, in their order. The fourth, `num_grads`, is the same for
    # all workers, so each device gets a copy (`P()`). `Any`, as the fields are declared as arrays.
    specs: list[Any] = [pool, pool, pool, P(), pool]
    by_worker = Workers(*specs)

    def mapped(
        workers: Workers,
        rows_and_keys: tuple[PyTree, Array | None],
        rate_TR: Array,
        update_T: Array | None,
        *position: Array,
    ) -> tuple[Workers, Array, Array]:
        """Run `advance` on the workers of each device; the arguments are those of `advance`."""
        # In the order of the arguments: workers, rows and keys, rates, and flags of updates. Each
        # holds for all arrays of an argument; for None there is nothing to divide.
        in_specs = [by_worker, pool_T, pool_T, P()]
        if position:
            in_specs.append(P())
        function = jax.shard_map(
            advance,
            mesh=at.mesh,
            in_specs=tuple(in_specs),
            out_specs=(by_worker, pool_T, pool_T),
            axis_names=set(POOL),
            # The check would refuse losses with a loop whose carry begins as a constant: it begins
            # equal on all devices, and differs afterwards.
            check_vma=False,
        )
        return function(workers, rows_and_keys, rate_TR, update_T, *position)

    return mapped


def _inner_steps(spec: ProgramSpec, at: Placement) -> Callable:
    """Make the function that runs inner steps of all workers of a program, at once or in turn.

    It takes the workers; a pair of rows, leaves [T, R, B, L + 1], and random keys [T, R, B] or
    None; learning rates [T, R]; and flags [T], True where an update ends, or None. It returns the
    workers, and losses and skipped updates, both [T, R].
    """
    # Groups of devices, over which the workers are divided; the devices of one share its workers.
    num_groups = at.mesh.shape["trainer"] * at.mesh.shape["worker"]
    sequential = _on_each_device(_advance(spec, at, sequential=True), at)
    # All workers at once: their micro-batches are one batch, which XLA's partitioner divides over
    # the devices.
    at_once = _advance(spec, at, sequential=False)

    def steps(
        workers: Workers,
        rows_and_keys: tuple[PyTree, Array | None],
        rate_TR: Array,
        update_T: Array | None,
    ) -> tuple[Workers, Array, Array]:
        """Run the inner steps, in turn if the run says so and a device has several workers."""
        num_workers = rate_TR.shape[1]
        # Each group of devices has one worker: there are no turns.
        one_each = num_groups > 1 and num_workers == num_groups
        if spec.sequential and not one_each:
            return sequential(workers, rows_and_keys, rate_TR, update_T)
        return at_once(workers, rows_and_keys, rate_TR, update_T)

    return steps


def _one_worker(spec: ProgramSpec, at: Placement) -> Callable:
    """Make the function that runs inner steps of one worker on each device.

    It takes all workers; a pair of rows, leaves [T, R, B, L + 1], and random keys [T, R, B] or
    None; learning rates [T, R]; flags [T], True where an update ends, or None; and `position`,
    int32 [], which of the device's workers runs: equal on all devices. It returns all workers, and
    losses and skipped updates, both [T, R].

    Here R counts the running workers, one of each device. Parameters and inner states of the other
    workers do not change.
    """
    advance = _advance(spec, at, sequential=True)

    def advance_one(
        workers: Workers,
        rows_and_keys: tuple[PyTree, Array | None],
        rate_TR: Array,
        update_T: Array | None,
        position: Array,
    ) -> tuple[Workers, Array, Array]:
        """On each device, run the worker at `position`, an int32 [].

        R counts the workers of the device in `workers`; in rows, keys, rates and measurements it is
        1, that worker alone. Returns the workers, and losses and skipped updates [T, 1].
        """
        # Take the parameters and the inner state of that worker out of the stack, as one of one.
        # The sum of gradients is already that of one worker, as workers in turn share it.
        stack_R = (workers.params_R, workers.inner_state_R)
        params_1, state_1 = jax.tree.map(
            lambda leaf_R: jax.lax.dynamic_index_in_dim(leaf_R, position), stack_R
        )
        one = workers.replace(params_R=params_1, inner_state_R=state_1)
        one, loss_TR, skipped_TR = advance(one, rows_and_keys, rate_TR, update_T)

        # Write them back to their position.
        params_R, state_R = jax.tree.map(
            lambda leaf_R, new_1: jax.lax.dynamic_update_index_in_dim(leaf_R, new_1, position, 0),
            stack_R,
            (one.params_R, one.inner_state_R),
        )
        return one.replace(params_R=params_R, inner_state_R=state_R), loss_TR, skipped_TR

    return _on_each_device(advance_one, at)


def _batch_spec(spec: ProgramSpec, key: ProgramKey, at: Placement, turns: int = 1) -> tuple:
    """Make the shapes and shardings of the arguments of inner steps, apart from the workers.

    They are, in this order: rows, leaves [T, R, B, L + 1]; learning rates [T, R]; flags [T], True
    where an update ends, or None if gradients are not accumulated; and streams [R, 3], from which
    random keys are made, or None if the loss takes no key. A call runs one of `turns` equal parts
    of the workers, and R is the number of these.
    """
    num_T = spec.num_micro_batches
    num_R = sum(key.sizes) // turns
    num_B = key.micro_batch_size
    rows = _rows_spec(spec, (num_T, num_R, num_B), at.tokens_TRBL(num_B))
    rates = jax.ShapeDtypeStruct((num_T, num_R), jnp.float32, sharding=at.rates_TR)
    flags = None
    if key.accumulates:
        flags = jax.ShapeDtypeStruct((num_T,), jnp.bool_, sharding=at.replicated)
    streams = None
    if spec.key_seed is not None:  # the loss takes a key
        streams = jax.ShapeDtypeStruct((num_R, 3), jnp.int32, sharding=at.workers)
    return rows, rates, flags, streams


def _rows_spec(spec: ProgramSpec, shape: tuple[int, ...], at: NamedSharding) -> PyTree:
    """Make the shapes of rows as the model reads them, leaves [*shape, L + 1], sharded alike."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype, sharding=at), spec.row
    )


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of a device's memory that a program needs, with its arguments and results."""
    memory = compiled.memory_analysis()
    assert memory is not None, "the compiler gives no memory analysis"
    # Results in the memory of donated arguments (aliases) are counted twice in the first two.
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


def _shardings(shapes: PyTree) -> PyTree:
    """Return the sharding of each leaf, a `jax.ShapeDtypeStruct` that has one."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


# -- Merges, growth, quarantine --------------------------------------------------------------

# Merges, joins and departures replace all inner states, which fill most of a device's memory: old
# and new arrays may not fit together, so they are replaced in parts.

PART_BYTES = 2**30  # most bytes of inner states that one step replaces, unless an array is larger


@functools.partial(jax.jit, static_argnums=(2, 3))  # positions, which decide about shapes
def merged(
    ensemble: Ensemble,
    weights_n: Array,
    members: tuple[int, ...],
    workers: tuple[tuple[int, ...], ...],
) -> Ensemble:
    """Merge trainers (`core.merge`), then move workers (`move_workers`), in a compiled program.

    Args:
      ensemble: All trainers and workers before the merge.
      weights_n: The weight of each member in the mean.
      members: The members' positions in arrays [M, ...], the representative first.
      workers: For each trainer after the merge, the positions of its workers in arrays [R, ...]
        once the members are merged.
    """
    return move_workers(merge(ensemble, members, weights=weights_n), workers)


@functools.partial(jax.jit, static_argnums=(1, 2))
def spawned(ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
    """Add workers to a trainer until it has `num_workers` (`core.spawn`), in a compiled program.

    `trainer` is its position in arrays [M, ...].
    """
    return spawn(ensemble, trainer, num_workers)


@functools.partial(jax.jit, static_argnums=1)
def taken(ensemble: Ensemble, trainers: tuple[int, ...]) -> Ensemble:
    """Take trainers and their workers out of an ensemble (`core.take`), in a compiled program.

    `trainers` are their positions in arrays [M, ...].
    """
    return take(ensemble, trainers)


def merge_positions(
    before: Control, members: Sequence[int], after: Control
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the arguments `members` and `workers` of `merged`, from ids to positions in arrays.

    Args:
      before: The host's data before the merge.
      members: Ids of the trainers that merge, the representative first.
      after: The host's data after the merge, when workers have moved to other trainers.

    Returns:
      The members' positions in arrays [M, ...] before the merge; and for each trainer `after` the
      positions of its workers, in arrays [R, ...] after `core.merge`, before `move_workers`.
    """
    streams = {m: before.trainers[m].streams for m in before.trainers}
    merged_streams: list[int] = []
    for m in members:
        merged_streams += streams[m]
    streams[members[0]] = merged_streams

    order: list[int] = []  # the workers' streams in arrays [R, ...], once the members are merged
    for m in after.trainers:
        order += streams[m]
    position_of = {stream: position for position, stream in enumerate(order)}
    workers = []
    for trainer in after.trainers.values():
        workers.append(tuple(position_of[stream] for stream in trainer.streams))
    return before.positions(members), tuple(workers)


def parts_of(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield lists of arrays, in order, each of at most `PART_BYTES` bytes, or one larger array."""
    part: list[Any] = []
    for leaf in leaves:
        if part and num_bytes([*part, leaf]) > PART_BYTES:
            yield part
            part = []
        part.append(leaf)
    if part:
        yield part


def replace_in_parts(change: Any, ensemble: Ensemble, *arguments: Any) -> Ensemble:
    """Return `change(ensemble, *arguments)`, computed in parts so that less memory is needed.

    `change` is `merged`, `spawned` or `taken`. Each part (`parts_of`) of the inner states is
    replaced, and its old arrays deleted, before the next; the rest of the ensemble comes last. If
    there is at most one part, nothing is deleted.
    """
    leaves, structure = jax.tree.flatten(ensemble.inner_state_R)
    parts = list(parts_of(leaves))
    if len(parts) <= 1:
        return change(ensemble, *arguments)
    new_leaves = []
    for part in parts:
        # `change` also returns new parameters, which are not used: those of `rest` are.
        # A list of arrays is a tree too, so it can stand for the inner states.
        alone = ensemble.replace(params_R=None, inner_state_R=part)
        new_leaves += change(alone, *arguments).inner_state_R
        for leaf in part:
            leaf.delete()
    rest = change(ensemble.replace(inner_state_R=None), *arguments)
    return rest.replace(inner_state_R=structure.unflatten(new_leaves))
