"""The compiled programs of a run: what they compute, and how they are called.

`start` begins a round, `steps` runs a fixed number of micro-batches, `outer` synchronises;
Streaming DiLoCo calls `fragment` (inner steps, then one synchronisation) instead of `outer`.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
from adloco_jax.core.types import Ensemble, Workers, of_workers, take
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
        self._numbers = itertools.count(1)
        self._x64 = jnp.result_type(float) == jnp.float64  # other threads may have another setting
        self._programs: dict[ProgramKey, Future[jax.stages.Compiled]] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._in_flight: deque[Array] = deque()  # a result of each of the last calls
        self._base: PyTree = None  # frozen weights, wherever they are
        self._parts: dict[tuple, Array] = {}  # parts of them by leaf, device and position
        self._bases: dict[ProgramKey, PyTree] = {}  # made of these parts, as each program takes it

    def hold(self, base: PyTree) -> None:
        """Let programs use frozen weights, of which a device holds each part only once."""
        self._base = base

    def call(self, key: ProgramKey, *arguments: PyTree) -> Any:
        """Dispatch the program of `key`, and return its results, which may still be computed.

        Arguments are resharded if need be. The call waits for the compilation, and for the results
        of the call `_MAX_IN_FLIGHT` calls earlier.
        """
        program = self[key]
        placed = reshard(arguments, program.input_shardings[0])
        takes_base = self._base is not None and key.kind in _WITH_LOSS
        base = {"base": self.frozen(key)} if takes_base else {}
        results = program(*placed, **base)
        self._in_flight.append(jax.tree.leaves(results)[-1])  # any one: they end together
        if len(self._in_flight) > _MAX_IN_FLIGHT:
            oldest = self._in_flight.popleft()
            if not oldest.is_deleted():  # a deleted result was donated to a later call
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # raised again when read
                    oldest.block_until_ready()
        return results

    def frozen(self, key: ProgramKey) -> PyTree:
        """Return the frozen weights as a program takes them that computes losses, if any."""
        if self._base is not None and key not in self._bases:
            leaves, structure = jax.tree.flatten(self._base)
            at = structure.flatten_up_to(self[key].input_shardings[1]["base"])
            placed = [self._place(i, leaf, at[i]) for i, leaf in enumerate(leaves)]
            self._bases[key] = structure.unflatten(placed)
        return self._bases.get(key)

    def _place(self, number: int, leaf: Any, to: jax.sharding.Sharding) -> Array:
        """Put a leaf of the frozen weights on devices, or find the parts that are there already."""
        parts = []
        for device, index in to.addressable_devices_indices_map(leaf.shape).items():
            place = (number, device, str(index))
            if place not in self._parts:
                is_whole = to.shard_shape(leaf.shape) == leaf.shape
                part = leaf if is_whole else np.asarray(leaf)[index]
                self._parts[place] = jax.device_put(part, device)
            parts.append(self._parts[place])
        return jax.make_array_from_single_device_arrays(leaf.shape, to, parts)

    def __getitem__(self, key: ProgramKey) -> jax.stages.Compiled:
        """Return the compiled program of `key`; compile it, or wait for it, if need be."""
        start_s = time.perf_counter()
        self._known.add(key)
        begun = self._programs.get(key)
        if begun is None or begun.cancel():  # it was queued for the background, and is taken out
            begun = self._programs[key] = Future()
            self.compiling = True
            try:
                begun.set_result(self._compile(key, background=False))
            except BaseException:
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
        self._known.update(wanted)
        for key in wanted:
            if key not in self._programs:
                self._programs[key] = self._background.submit(self._compile, key, background=True)

    def close(self) -> None:
        """Cancel queued compilations, and wait for compilations that have begun."""
        self._background.shutdown(cancel_futures=True)

    def _compile(self, key: ProgramKey, *, background: bool) -> jax.stages.Compiled:
        start_s = time.perf_counter()
        self._on_compile(Compiling(next(self._numbers), len(self._known)))
        _on_this_thread.hits = 0
        with jax.enable_x64(self._x64):
            program = lower(self.spec, key).compile()
        seconds = time.perf_counter() - start_s
        is_hit = _on_this_thread.hits > 0
        planned = needed_bytes(program) if program.memory_analysis() else None
        self._on_compile(Compiled(key, seconds, is_hit, background, planned))
        return program


def use_compilation_cache() -> None:
    """Let JAX save compiled programs in the user's cache folder, if it has none yet; trim that.

    Runs execute what is there, so other users must not be able to write to the folder.
    """
    trim_cache()
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_on_this_thread = threading.local()  # cache hits on this thread since its last compilation began


def _note_cache_hit(event: str, **_: str | int) -> None:
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
        function, arguments, donated, out = build(spec, key, at)
        jitted = functools.partial(jax.jit, donate_argnums=donated, out_shardings=out)
        if spec.base is None or key.kind not in _WITH_LOSS:
            return jitted(function).lower(*arguments)

        def with_base(*arguments, base):
            loss_fn = functools.partial(spec.loss_fn, base=base)
            return build(dataclasses.replace(spec, loss_fn=loss_fn), key, at)[0](*arguments)

        return jitted(with_base).lower(*arguments, base=base_spec(spec, key.layout))


Program = tuple[Callable, tuple, tuple[int, ...], PyTree]
"""A function to compile; the shapes of its arguments; the positions of the arguments whose memory
it may reuse (donated arguments); and the shardings of its results."""


def _start(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program that begins a round: it gives each worker its trainer's parameters."""
    bare = ensemble_spec(spec, key.layout)
    bare = bare.replace(outer_state_M=None, inner_state_R=None, round=None, average_M=None)
    if spec.outer.own_params:
        bare = bare.replace(params_M=None)
    start = functools.partial(begin_workers, spec, key.layout, accumulates=key.accumulates)
    donated = (0,) if spec.outer.own_params else ()
    return start, (bare,), donated, at.by_worker(jax.eval_shape(start, bare))


def _steps(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program of inner steps: of all workers, or of one a device, at a position."""
    workers = workers_spec(spec, key.layout, accumulates=key.accumulates)
    out = (_shardings(workers), at.replicated, at.replicated)
    count = num_sequential(spec, key.layout)
    advance = _inner_steps(spec, at) if count == 1 else _one_worker(spec, at)

    def steps(workers, rows_TRB, rate_TR, update_T, stream_R3, *position):
        keyed = add_keys(spec, rows_TRB, stream_R3)
        return advance(workers, keyed, rate_TR, update_T, *position)

    arguments = (workers, *_batch_spec(spec, key, at, count))
    if count > 1:
        position = jax.ShapeDtypeStruct((), jnp.int32, sharding=at.replicated)
        arguments = (*arguments, position)
    return steps, arguments, (0,), out


def _outer(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program of a synchronisation (`outer_update`)."""
    ensemble = ensemble_spec(spec, key.layout).replace(inner_state_R=None)
    workers = Workers(workers_spec(spec, key.layout).params_R, None)

    def update(ensemble, workers):
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

    return update, (ensemble, workers), (0,), (_shardings(ensemble), at.replicated)


def _fragment(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program of inner steps that end with the synchronisation of one fragment."""
    ensemble = ensemble_spec(spec, key.layout).replace(inner_state_R=None, params_R=None)
    workers = workers_spec(spec, key.layout, accumulates=key.accumulates)
    advance = _inner_steps(spec, at)

    def steps(workers, *inputs):
        workers, *measured_TR = advance(workers, *inputs)
        # Without this constraint, the operations after the inner steps would determine how arrays
        # are sharded in the loop over inner steps.
        return jax.lax.with_sharding_constraint(workers, at.by_worker(workers)), *measured_TR

    def fragment_program(ensemble, workers, rows_TRB, rate_TR, update_T, stream_R3, fragment):
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
    out = (_shardings(ensemble), _shardings(workers), at.replicated, at.replicated)
    return fragment_program, arguments, (0, 1), out


def _flush(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program that averages what Streaming DiLoCo has not synchronised yet."""
    ensemble = ensemble_spec(spec, key.layout).replace(inner_state_R=None)
    flush = functools.partial(
        flush_workers,
        precision=spec.outer.precision,
        reduce_scatter=at.reduce_scatter,
        all_gather=at.all_gather,
    )
    return flush, (ensemble,), (0,), _shardings(ensemble)


def _stats(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program that measures each worker's gradient statistics at its trainer."""
    num_trainers, num_workers = len(key.sizes), sum(key.sizes)
    params_M = ensemble_spec(spec, key.layout).params_M
    rows = _rows_spec(spec, (num_workers, spec.max_test_sequences), at.workers)
    counts = jax.ShapeDtypeStruct((num_workers,), jnp.int32, sharding=at.workers)
    # A pass is padded to its full size, so it is at most the fewest sequences of a test.
    least = AUTO_TEST_MIN // -(-num_workers // num_trainers)
    chunk = max(least, MIN_EXAMPLES)
    if spec.estimator == "vmap":
        chunk = max(min(chunk, GRADIENTS_HELD // spec.num_params), 1)
    trainers_here = num_trainers // at.mesh.shape["trainer"]
    own_stats = functools.partial(
        gradient_stats,
        spec.loss_fn,
        estimator=spec.estimator,
        chunk_size=chunk,
        inner_products=spec.inner_products,
    )

    # A device measures its workers in turn: it holds one worker's gradients, and stops at each
    # one's number of sequences. A few workers at once with vmap took a quarter more time.
    @functools.partial(
        jax.shard_map,
        mesh=at.mesh,
        in_specs=(P("trainer"), *(P(("trainer", "worker")),) * 3),
        out_specs=P(("trainer", "worker")),
        axis_names={"trainer", "worker"},  # the partitioner divides a worker over devices
        check_vma=False,
    )
    def of_each(params_M, trainer_R, rows_RB, count_R):
        def of_worker(worker):
            trainer, rows_B, count = worker
            params = jax.tree.map(lambda leaf: leaf[trainer % trainers_here], params_M)
            return own_stats(params, rows_B, num_examples=count)

        return jax.lax.map(of_worker, (trainer_R, rows_RB, count_R))

    def stats(params_M, rows_RB, count_R):
        return of_each(params_M, jnp.array(of_workers(key.sizes)), rows_RB, count_R)

    return stats, (params_M, rows, counts), (), at.replicated


def _loss(spec: ProgramSpec, key: ProgramKey, at: Placement) -> Program:
    """Make the program that computes one model's loss of each row."""
    params = params_spec(spec, key.layout)
    loss_fn = spec.eval_loss_fn or spec.loss_fn
    size = key.micro_batch_size
    rows = _rows_spec(spec, (size,), at.tokens_BL(size))

    # Devices that share the rows have few of them each.
    at_once = spec.loss_chunk if at.mesh.size == 1 else 0

    def losses(params, rows_B):
        def loss_of(row):
            return loss_fn(params, jax.tree.map(lambda leaf_L: leaf_L[None], row))

        if at_once:
            return jax.lax.map(loss_of, rows_B, batch_size=at_once)
        return jax.vmap(loss_of)(rows_B)

    return losses, (params, rows), (), at.replicated


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
    """Pair rows with random keys [T, R, B], one a sequence; None if the loss takes no key."""
    if spec.key_seed is None or stream_R3 is None:
        return rows_TRB, None
    num_T, _, num_B = as_row_batch(rows_TRB).tokens.shape[:3]
    place_TRB = jnp.arange(num_T * num_B).reshape(num_T, 1, num_B)
    trainer_R, stream_R, first_R = (column_R[None, :, None] for column_R in stream_R3.T)
    key = jax.random.key(spec.key_seed)
    return rows_TRB, fold_in_each(key, trainer_R, stream_R, first_R + place_TRB)


def _advance(spec: ProgramSpec, at: Placement, *, sequential: bool) -> Callable:
    """Bind the run's loss and inner optimizer to `core.inner_steps`, and return the function."""
    is_shared = at.mesh.shape["data"] * at.mesh.shape["model"] > 1

    def advance(workers, keyed, rate_TR, update_T):
        rows_TRB, key_TRB = keyed
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
      advance: A function `(workers, keyed, rate_TR, update_T, *position)` that returns the workers
        and two arrays [T, R] of measurements. `keyed` is the pair that `add_keys` returns;
        `position`, if it is given, is one int32 [] that is equal on all devices.
      at: The mesh. Its axes `trainer` and `worker` divide the workers (axis R); the other axes are
        left to XLA's partitioner.

    Returns:
      A function with the parameters and results of `advance`, in which R counts all workers.
    """
    if at.mesh.shape["trainer"] * at.mesh.shape["worker"] == 1:
        return advance  # all workers are on every device already
    pool = P(POOL)  # the first axis of an array is R
    pool_T = P(None, POOL)  # the first axes are T and R
    # The fields in their order; the fourth, `num_grads`, is the same for all workers.
    specs: list[Any] = [pool, pool, pool, P(), pool]
    by_worker = Workers(*specs)

    def mapped(workers, keyed, rate_TR, update_T, *position):
        inputs = [by_worker, pool_T, pool_T, P()]
        if position:
            inputs.append(P())
        function = jax.shard_map(
            advance,
            mesh=at.mesh,
            in_specs=tuple(inputs),
            out_specs=(by_worker, pool_T, pool_T),
            axis_names=set(POOL),
            check_vma=False,
        )
        return function(workers, keyed, rate_TR, update_T, *position)

    return mapped


def _inner_steps(spec: ProgramSpec, at: Placement) -> Callable:
    """Make the function that runs inner steps of all workers of a program, at once or in turn.

    Its parameters are workers, the pair of rows and keys that `add_keys` returns, learning rates
    [T, R], and the flags of updates [T] or None. It returns the workers, and losses and skipped
    updates [T, R].
    """
    num_groups = at.mesh.shape["trainer"] * at.mesh.shape["worker"]
    sequential = _on_each_device(_advance(spec, at, sequential=True), at)
    # All workers at once: their micro-batches are one batch, which XLA's partitioner divides over
    # the devices.
    at_once = _advance(spec, at, sequential=False)

    def steps(workers, keyed, rate_TR, update_T):
        one_each = num_groups > 1 and rate_TR.shape[1] == num_groups  # no worker must wait
        if spec.sequential and not one_each:
            return sequential(workers, keyed, rate_TR, update_T)
        return at_once(workers, keyed, rate_TR, update_T)

    return steps


def _one_worker(spec: ProgramSpec, at: Placement) -> Callable:
    """Make the function that runs inner steps of one worker on each device.

    `position`, int32 [], says which of the device's workers runs; it is equal on all devices. The
    other parameters and the results are those of `_inner_steps`, with rows, rates and measurements
    of the running workers only. Parameters and inner states of the other workers do not change.
    """
    advance = _advance(spec, at, sequential=True)

    def advance_one(workers, keyed, rate_TR, update_T, position):
        stack = (workers.params_R, workers.inner_state_R)
        params, state = jax.tree.map(
            lambda leaf_R: jax.lax.dynamic_index_in_dim(leaf_R, position), stack
        )
        one = workers.replace(params_R=params, inner_state_R=state)
        one, *measured_TR = advance(one, keyed, rate_TR, update_T)
        params_R, state_R = jax.tree.map(
            lambda leaf_R, new: jax.lax.dynamic_update_index_in_dim(leaf_R, new, position, 0),
            stack,
            (one.params_R, one.inner_state_R),
        )
        return one.replace(params_R=params_R, inner_state_R=state_R), *measured_TR

    return _on_each_device(advance_one, at)


def _batch_spec(spec: ProgramSpec, key: ProgramKey, at: Placement, turns: int = 1) -> tuple:
    """Make the shapes and shardings of the arguments of inner steps, apart from the workers."""
    steps = spec.num_micro_batches
    workers = sum(key.sizes) // turns
    size = key.micro_batch_size
    rows = _rows_spec(spec, (steps, workers, size), at.tokens_TRBL(size))
    rates = jax.ShapeDtypeStruct((steps, workers), jnp.float32, sharding=at.rates_TR)
    flags = jax.ShapeDtypeStruct((steps,), jnp.bool_, sharding=at.replicated)
    streams = jax.ShapeDtypeStruct((workers, 3), jnp.int32, sharding=at.workers)
    if not key.accumulates:
        flags = None
    if spec.key_seed is None:  # the loss takes no key
        streams = None
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
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


def _shardings(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


# -- Merges, growth, quarantine --------------------------------------------------------------

# Merges, joins and departures replace all inner states, which fill most of a device's memory: old
# and new arrays may not fit together, so they are replaced in parts.

PART_BYTES = 2**30  # most bytes of inner states that one step replaces, unless an array is larger


@functools.partial(jax.jit, static_argnums=(2, 3))
def merged(
    ensemble: Ensemble,
    weights_n: Array,
    members: tuple[int, ...],
    workers: tuple[tuple[int, ...], ...],
) -> Ensemble:
    """Merge trainers (`core.merge`), then move workers (`move_workers`), in a compiled program."""
    return move_workers(merge(ensemble, members, weights=weights_n), workers)


@functools.partial(jax.jit, static_argnums=(1, 2))
def spawned(ensemble: Ensemble, trainer: int, num_workers: int) -> Ensemble:
    """Add workers to a trainer until it has `num_workers` (`core.spawn`), in a compiled program."""
    return spawn(ensemble, trainer, num_workers)


@functools.partial(jax.jit, static_argnums=1)
def taken(ensemble: Ensemble, trainers: tuple[int, ...]) -> Ensemble:
    """Take trainers and their workers out of an ensemble (`core.take`), in a compiled program."""
    return take(ensemble, trainers)


def merge_positions(
    before: Control, members: Sequence[int], after: Control
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the positions of the members, and each trainer's workers `after`, as in `merged`."""
    streams = {m: before.trainers[m].streams for m in before.trainers}
    merged_streams: list[int] = []
    for m in members:
        merged_streams += streams[m]
    streams[members[0]] = merged_streams

    order: list[int] = []  # the workers in the stack, once the members are merged
    for m in after.trainers:
        order += streams[m]
    position = {stream: index for index, stream in enumerate(order)}
    workers = tuple(
        tuple(position[stream] for stream in trainer.streams) for trainer in after.trainers.values()
    )
    return before.positions(members), workers


def parts_of(leaves: Sequence[Any]) -> Iterator[list[Any]]:
    """Divide arrays, in order, into parts of at most `PART_BYTES` bytes, or of one larger array."""
    part: list[Any] = []
    for leaf in leaves:
        if part and num_bytes([*part, leaf]) > PART_BYTES:
            yield part
            part = []
        part.append(leaf)
    if part:
        yield part


def replace(change: Any, ensemble: Ensemble, *arguments: Any) -> Ensemble:
    """Call `change` (the function merged, spawned or taken) on an ensemble, with less memory.

    Each part (`parts_of`) of the inner states is replaced, and its old arrays deleted, before the
    next; the rest of the ensemble comes last. If there is at most one part, nothing is deleted.
    """
    leaves, structure = jax.tree.flatten(ensemble.inner_state_R)
    parts = list(parts_of(leaves))
    if len(parts) <= 1:
        return change(ensemble, *arguments)
    new_leaves = []
    for part in parts:
        alone = ensemble.replace(params_R=None, inner_state_R=part)
        new_leaves += change(alone, *arguments).inner_state_R
        for leaf in part:
            leaf.delete()
    rest = change(ensemble.replace(inner_state_R=None), *arguments)
    return rest.replace(inner_state_R=structure.unflatten(new_leaves))
