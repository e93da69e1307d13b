"""The compiled programs of a run: which there are, where their arrays live, what they cost.

Everything that runs on the devices each round is one of four programs, compiled ahead of its first
call and kept by key: `round` and `accumulate` per (trainers, workers, micro-batch), `test` per
(trainers, workers), and `evaluate`. Accumulation counts are data, not keys. Where fragments of the
parameters are synchronised in turn, `round` and `accumulate` run up to one synchronisation, which
fragment is data, and a fifth program, `synchronise`, now and then synchronises all of them.
"""

import dataclasses
import functools
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from adloco_jax.core.base import Ensemble, LossFn, Workers
from adloco_jax.core.compress import Precision, packed_bytes
from adloco_jax.core.ensemble import init
from adloco_jax.core.fragments import take_fragment
from adloco_jax.core.gradstats import MIN_EXAMPLES, Estimator, gradient_stats
from adloco_jax.core.outer import (
    inner_steps,
    outer_update,
    outer_update_fragment,
    receive_fragment,
    start_round,
)
from adloco_jax.errors import ResourceError
from adloco_jax.run.controller import AUTO_TEST_MIN, CHUNK_SIZE, StateBytes
from adloco_jax.run.placement import Placement, place

GRADIENTS_HELD = 2**26  # float32 values: 256 MB of per-example gradients at once per worker


Kind = Literal["round", "accumulate", "test", "evaluate", "synchronise"]


class Key(NamedTuple):
    """What a program is compiled for."""

    kind: Kind
    num_trainers: int = 1
    num_workers: int = 1
    micro_batch_size: int = 0
    blocks: bool = False  # each trainer owns a block of as many workers

    def __str__(self):
        return f"{self.kind} M={self.num_trainers} R={self.num_workers} B={self.micro_batch_size}"


def first_key(kind: Kind, num_trainers: int, num_workers: int, micro_batch_size: int = 0) -> Key:
    """A program of the first round, in which all trainers take part."""
    if kind == "evaluate":
        return Key(kind, micro_batch_size=micro_batch_size)
    blocks = num_workers % num_trainers == 0
    return Key(kind, num_trainers, num_workers, micro_batch_size, blocks)


@dataclass(frozen=True)
class Spec:
    """What every program of one run shares."""

    loss_fn: LossFn
    params: PyTree  # one model's shapes and dtypes
    inner_tx: optax.GradientTransformation
    outer_tx: optax.GradientTransformation
    num_micro_batches: int  # per dispatch: S, or with fragments S / F
    row_length: int  # integers of a row: L + 1, the last target's; or 2 + L, class and length first
    sequence_length: int  # L
    max_test_sequences: int  # per worker
    estimator: Estimator  # resolved: not auto
    inner_products: bool
    reset_inner_state: bool
    model_shards: int = 1  # devices that share one worker's parameters
    precision: Precision = "float32"  # in which outer gradients travel
    worker_parallelism: int | None = None  # of a device's workers, as in `inner_steps`
    examples_per_pass: int | None = None  # where no devices share a batch, as in `inner_steps`
    num_fragments: int = 1  # F, synchronised in turn
    delay: int = 0  # micro-batches from the sending of a fragment to its arrival
    mixing: float = 0.0  # share of its own that a worker keeps then
    own_params: bool = False  # which workers keep from one synchronisation to the next

    @property
    def param_bytes(self) -> int:
        """Bytes of one trainer's parameters."""
        return sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(self.params))

    @property
    def sync_bytes(self) -> int:
        """Bytes of one trainer's outer gradient on its way, or of the updates on theirs back.

        Of one fragment, what fills it up included, where there are several.
        """

        def take(params):
            stacked = jax.tree.map(lambda leaf: leaf[None], params)
            part = take_fragment(stacked, 0, num_fragments=self.num_fragments)
            return jax.tree.map(lambda leaf: leaf[0], part)

        return packed_bytes(jax.eval_shape(take, self.params), self.precision)

    @property
    def whole_sync_bytes(self) -> int:
        """The same of all parameters at once."""
        return packed_bytes(self.params, self.precision)

    @property
    def state_bytes(self) -> StateBytes:
        """What trainers and workers send one another when they merge or move."""
        inner_bytes = 0 if self.reset_inner_state else _float_bytes(self.inner_tx, self.params)
        return StateBytes(self.param_bytes, _float_bytes(self.outer_tx, self.params), inner_bytes)

    @property
    def num_params(self) -> int:
        """Parameters of one trainer."""
        return sum(math.prod(p.shape) for p in jax.tree.leaves(self.params))


def _float_bytes(tx: optax.GradientTransformation, params: PyTree) -> int:
    """Bytes of an optimizer's floating-point state; its counts are the host's to know."""
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, params))
    floating = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in floating)


class Compiled(NamedTuple):
    """What became of one compilation, for the ledger."""

    key: Key
    seconds: float
    hit: bool  # it came from the persistent cache
    background: bool
    needed_bytes: int | None  # on a device while it runs; None where the compiler does not say


class Programs:
    """Compiles programs once, in the background where they were foreseen, and keeps them."""

    def __init__(self, spec: Spec, on_compile: Callable[[Compiled], None] = lambda compiled: None):
        """Starts with no program; `on_compile` is told of each, on the thread that compiled it."""
        self.spec = spec
        self.stall_s = 0.0  # waited for compilation so far
        self._on_compile = on_compile
        self._x64 = jnp.result_type(float) == jnp.float64  # a context may set it for one thread
        self._programs: dict[Key, Future[jax.stages.Compiled]] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="compile")

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        """The program for a key: waited for, or compiled now if nobody has begun to."""
        start_s = time.perf_counter()
        begun = self._programs.get(key)
        if begun is None or begun.cancel():  # cancelled: it was still in the queue
            begun = self._programs[key] = Future()
            try:
                begun.set_result(self._compile(key, background=False))
            except BaseException:
                del self._programs[key]
                raise
        program = begun.result()
        self.stall_s += time.perf_counter() - start_s
        return program

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Has programs compiled in the background, in this order; ones already begun stay."""
        for key in keys:
            if key not in self._programs:
                self._programs[key] = self._background.submit(self._compile, key, background=True)

    def close(self) -> None:
        """Gives up what is still in the queue, and waits for what is being compiled."""
        self._background.shutdown(cancel_futures=True)

    def _compile(self, key: Key, *, background: bool) -> jax.stages.Compiled:
        start_s = time.perf_counter()
        _on_this_thread.hits = 0
        with jax.enable_x64(self._x64):
            program = lower(self.spec, key).compile()
        seconds = time.perf_counter() - start_s
        is_hit = _on_this_thread.hits > 0
        planned = needed_bytes(program) if program.memory_analysis() else None
        self._on_compile(Compiled(key, seconds, is_hit, background, planned))
        return program


_on_this_thread = threading.local()  # hits of the persistent cache since its last compilation began


def _note_cache_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _on_this_thread.hits = getattr(_on_this_thread, "hits", 0) + 1


jax.monitoring.register_event_listener(_note_cache_hit)


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, in a folder of the user's own.

    Does nothing where JAX has been given a folder already (`JAX_COMPILATION_CACHE_DIR`). Compiled
    programs are code: the folder must not be one that others can write to.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(home) / "adloco_jax" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def placement(spec: Spec, key: Key) -> Placement:
    """Where the arrays of a key's program live."""
    return place(
        key.num_trainers,
        key.num_workers,
        max(key.micro_batch_size, 1),
        blocks=key.blocks,
        model_shards=spec.model_shards,
    )


def ensemble_spec(spec: Spec, num_trainers: int, num_workers: int, at: Placement) -> Ensemble:
    """Shapes, dtypes and shardings of an ensemble, without making it."""
    shapes = _ensemble_shapes(spec, num_trainers, num_workers)
    return _with_shardings(shapes, at.ensemble(shapes))


def buffers_spec(spec: Spec, num_workers: int, at: Placement) -> tuple[PyTree, ...]:
    """Shapes of what an accumulating round carries between dispatches.

    Parameters, unless the ensemble holds them; the sum of gradients, their number, and whether
    their losses were finite.
    """
    ensemble = _ensemble_shapes(spec, 1, num_workers)  # workers are alike, whoever owns them
    workers = jax.eval_shape(functools.partial(start_round, accumulate=True), ensemble)

    def stacked(shapes):
        return _with_shardings(shapes, at.by_worker(shapes))

    return (
        *(() if spec.own_params else (stacked(workers.params_R),)),
        stacked(workers.grad_sum_R),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=at.whole),
        jax.ShapeDtypeStruct((num_workers,), jnp.bool_, sharding=at.workers),
    )


def _ensemble_shapes(spec: Spec, num_trainers: int, num_workers: int) -> Ensemble:
    make = functools.partial(
        init,
        num_trainers=num_trainers,
        num_workers=num_workers,
        inner_tx=spec.inner_tx,
        outer_tx=spec.outer_tx,
        own_params=spec.own_params,
    )
    return jax.eval_shape(make, spec.params)


def lower(spec: Spec, key: Key) -> jax.stages.Lowered:
    """Traces and lowers the program of a key; its `.compile()` is what costs time."""
    builders = {
        "round": _lower_round,
        "accumulate": _lower_round,
        "test": _lower_test,
        "evaluate": _lower_evaluate,
        "synchronise": _lower_synchronise,
    }
    if spec.model_shards == 1:
        return builders[key.kind](spec, key)
    # Tells the layers of `models` that weights are dealt out.
    with jax.set_mesh(placement(spec, key).mesh), nn.logical_axis_rules((("weight", "model"),)):
        return builders[key.kind](spec, key)


def _lower_round(spec: Spec, key: Key) -> jax.stages.Lowered:
    at = placement(spec, key)
    ensemble = ensemble_spec(spec, key.num_trainers, key.num_workers, at)
    steps, workers, size = spec.num_micro_batches, key.num_workers, key.micro_batch_size
    tokens = jax.ShapeDtypeStruct(
        (steps, workers, size, spec.row_length), jnp.int32, sharding=at.tokens_TRBL(size)
    )
    rates = jax.ShapeDtypeStruct((steps, workers), jnp.float32, sharding=at.rates_TR)
    flags = jax.ShapeDtypeStruct((steps,), jnp.bool_, sharding=at.whole)
    switch = jax.ShapeDtypeStruct((), jnp.bool_, sharding=at.whole)
    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=at.whole)
    accumulates = key.kind == "accumulate"

    def begin(ensemble, accumulate):
        if spec.reset_inner_state:
            template = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec.params)
            fresh = spec.inner_tx.init(template)
            ensemble = ensemble.replace(
                inner_state_R=jax.tree.map(
                    lambda leaf: jnp.broadcast_to(leaf, (workers, *leaf.shape)), fresh
                )
            )
        started = start_round(ensemble, accumulate=accumulate)
        return jax.lax.with_sharding_constraint(started, at.by_worker(started))

    def advance(workers, tokens_TRBL, rate_TR, update_T):
        advance_here = _inner_steps(spec, at, key.num_workers)
        workers, *measured_TR = advance_here(workers, tokens_TRBL, rate_TR, update_T)
        # Held on both sides, or what follows would decide where the loop keeps its parameters.
        return jax.lax.with_sharding_constraint(workers, at.by_worker(workers)), *measured_TR

    end = functools.partial(_outer_update, spec, at, outer_tx=spec.outer_tx)

    def plain_round(ensemble, tokens_TRBL, rate_TR):
        ensemble = _known_owners(ensemble, at)
        workers, *measured_TR = advance(begin(ensemble, False), tokens_TRBL, rate_TR, None)
        ensemble, norm_M = end(ensemble, workers)
        return ensemble, tuple(measured_TR), norm_M

    def accumulating_part(ensemble, buffers, tokens_TRBL, rate_TR, update_T, is_first, is_last):
        ensemble = _known_owners(ensemble, at)
        params_R, *accumulated = buffers
        carried = Workers(params_R, ensemble.inner_state_R, *accumulated)
        workers = jax.lax.cond(is_first, lambda: begin(ensemble, True), lambda: carried)
        workers, *measured_TR = advance(workers, tokens_TRBL, rate_TR, update_T)
        ensemble, norm_M = jax.lax.cond(
            is_last,
            lambda: end(ensemble, workers),
            lambda: (
                ensemble.replace(inner_state_R=workers.inner_state_R),
                jnp.zeros(key.num_trainers, jnp.float32),
            ),
        )
        buffers = (workers.params_R, workers.grad_sum_R, workers.num_grads, workers.finite_R)
        return ensemble, buffers, tuple(measured_TR), norm_M

    def fragment_part(ensemble, buffers, tokens_TRBL, rate_TR, update_T, is_first, fragment):
        """Up to a fragment's synchronisation, or, where `fragment` is -1, short of it."""
        ensemble = _known_owners(ensemble, at)

        def when_due(act, otherwise):
            return jax.lax.cond(fragment >= 0, act, otherwise) if accumulates else act()

        def send(sent_R):
            return outer_update_fragment(
                ensemble,
                sent_R,
                fragment,
                num_fragments=spec.num_fragments,
                outer_tx=spec.outer_tx,
                precision=spec.precision,
                keep=lambda tree_M: jax.lax.with_sharding_constraint(tree_M, at.by_trainer(tree_M)),
                exchange=at.exchange,
                publish=at.publish,
            )

        def receive(ensemble, workers):
            return receive_fragment(
                workers,
                ensemble,
                fragment,
                num_fragments=spec.num_fragments,
                mixing=spec.mixing,
            )

        def measured(part):
            flag_T = update_T[part] if accumulates else None
            return tokens_TRBL[part], rate_TR[part], flag_T

        workers = Workers(ensemble.params_R, ensemble.inner_state_R, *buffers)
        if accumulates or spec.reset_inner_state:
            carried = workers
            workers = jax.lax.cond(is_first, lambda: begin(ensemble, accumulates), lambda: carried)
        before, after = slice(None, steps - spec.delay), slice(steps - spec.delay, None)
        workers, *measured_TR = advance(workers, *measured(before))
        sent_R = take_fragment(workers.params_R, fragment, num_fragments=spec.num_fragments)
        arrived, norm_M = when_due(
            lambda: send(sent_R), lambda: (ensemble, jnp.zeros(key.num_trainers, jnp.float32))
        )
        if spec.delay:  # what is on its way neither waits for these steps nor do they for it
            workers, *rest_TR = advance(workers, *measured(after))
            pairs = zip(measured_TR, rest_TR, strict=True)
            measured_TR = [jnp.concatenate(pair) for pair in pairs]
        going_on = workers
        workers = when_due(lambda: receive(arrived, going_on), lambda: going_on)
        ensemble = arrived.replace(params_R=workers.params_R, inner_state_R=workers.inner_state_R)
        if accumulates:
            buffers = (workers.grad_sum_R, workers.num_grads, workers.finite_R)
        return ensemble, buffers, tuple(measured_TR), norm_M

    state = at.ensemble(ensemble)
    if spec.own_params:
        buffers = buffers_spec(spec, workers, at) if accumulates else ()
        out = (state, jax.tree.map(lambda leaf: leaf.sharding, buffers), at.whole, at.whole)
        jitted = jax.jit(fragment_part, donate_argnums=(0, 1), out_shardings=out)
        return jitted.lower(ensemble, buffers, tokens, rates, flags, switch, index)
    if key.kind == "round":
        out = (state, at.whole, at.whole)
        jitted = jax.jit(plain_round, donate_argnums=0, out_shardings=out)
        return jitted.lower(ensemble, tokens, rates)
    buffers = buffers_spec(spec, workers, at)
    out = (state, jax.tree.map(lambda leaf: leaf.sharding, buffers), at.whole, at.whole)
    jitted = jax.jit(accumulating_part, donate_argnums=(0, 1), out_shardings=out)
    return jitted.lower(ensemble, buffers, tokens, rates, flags, switch, switch)


def _inner_steps(spec: Spec, at: Placement, num_workers: int) -> Callable:
    """`inner_steps` of (workers, tokens, rates, flags), every device's workers in their turns."""
    num_places = at.mesh.shape["trainer"] * at.mesh.shape["worker"]
    at_once, in_a_pass = spec.worker_parallelism, spec.examples_per_pass
    if num_places > 1 and (at_once or num_workers) >= num_workers // num_places:
        at_once = None  # one batch of all workers, which the partitioner divides
    if at.mesh.shape["data"] * at.mesh.shape["model"] > 1:
        in_a_pass = None  # gradients would be exchanged in every pass

    def advance(workers, tokens_TRBL, rate_TR, update_T):
        return inner_steps(
            workers,
            tokens_TRBL,
            spec.loss_fn,
            inner_tx=spec.inner_tx,
            learning_rate_TR=rate_TR,
            update_T=update_T,
            worker_parallelism=at_once,
            examples_per_pass=in_a_pass,
        )

    if num_places == 1 or at_once is None:
        return advance
    pool, pool_T = P(("trainer", "worker")), P(None, ("trainer", "worker"))
    specs: list[Any] = [pool, pool, pool, P(), pool]  # the count of gradients is everybody's
    by_worker = Workers(*specs)
    return jax.shard_map(
        advance,
        mesh=at.mesh,
        in_specs=(by_worker, pool_T, pool_T, P()),
        out_specs=(by_worker, pool_T, pool_T),
        axis_names={"trainer", "worker"},
        check_vma=False,
    )


def _lower_synchronise(spec: Spec, key: Key) -> jax.stages.Lowered:
    at = placement(spec, key)
    ensemble = ensemble_spec(spec, key.num_trainers, key.num_workers, at)

    def synchronise(ensemble):
        """Trainers at the mean of their workers, which is no outer step: momentum takes no part."""
        mean = optax.sgd(1.0)
        known = _known_owners(ensemble, at)
        known = known.replace(outer_state_M=jax.vmap(mean.init)(known.params_M))
        after, _ = _outer_update(spec, at, known, start_round(known), outer_tx=mean)
        return after.replace(round=ensemble.round, outer_state_M=ensemble.outer_state_M)

    out = at.ensemble(ensemble)
    return jax.jit(synchronise, donate_argnums=0, out_shardings=out).lower(ensemble)


def _outer_update(
    spec: Spec,
    at: Placement,
    ensemble: Ensemble,
    workers: Workers,
    *,
    outer_tx: optax.GradientTransformation,
):
    """`outer_update` as the run has it, on its devices."""
    return outer_update(
        ensemble,
        workers,
        outer_tx=outer_tx,
        precision=spec.precision,
        exchange=at.exchange,
        publish=at.publish,
    )


def _known_owners(ensemble: Ensemble, at: Placement) -> Ensemble:
    """With owners that are known while tracing, where trainers own equal blocks of the pool."""
    if not at.blocks:
        return ensemble
    block = ensemble.num_workers // ensemble.num_trainers
    return ensemble.replace(owner_R=np.arange(ensemble.num_workers, dtype=np.int32) // block)


def _lower_test(spec: Spec, key: Key) -> jax.stages.Lowered:
    at = placement(spec, key)
    ensemble = ensemble_spec(spec, key.num_trainers, key.num_workers, at)
    workers = key.num_workers
    tokens = jax.ShapeDtypeStruct(
        (workers, spec.max_test_sequences, spec.row_length), jnp.int32, sharding=at.workers
    )
    counts = jax.ShapeDtypeStruct((workers,), jnp.int32, sharding=at.workers)
    # A pass is filled up, so it is no larger than the least that a worker has to test.
    least = AUTO_TEST_MIN // -(-workers // key.num_trainers)
    chunk = max(min(least, spec.num_micro_batches * spec.num_fragments), MIN_EXAMPLES)
    if spec.estimator == "vmap":
        chunk = max(min(chunk, GRADIENTS_HELD // spec.num_params), 1)
    elif spec.estimator == "chunks":
        chunk = CHUNK_SIZE
    trainers_here = key.num_trainers // at.mesh.shape["trainer"]

    def one_worker(params_M, owner, tokens_BL, count):
        return gradient_stats(
            spec.loss_fn,
            jax.tree.map(lambda leaf: leaf[owner % trainers_here], params_M),
            tokens_BL,
            estimator=spec.estimator,
            chunk_size=chunk,
            num_examples=count,
            inner_products=spec.inner_products,
        )

    # A device's workers in turn: one gradient is held at a time, each worker stops at its own
    # count, and a vmap over few workers made the products of single examples a quarter slower.
    @functools.partial(
        jax.shard_map,
        mesh=at.mesh,
        in_specs=(P("trainer"), *(P(("trainer", "worker")),) * 3),
        out_specs=P(("trainer", "worker")),
        axis_names={"trainer", "worker"},  # what shares a worker is left to the partitioner
        check_vma=False,
    )
    def test(params_M, owner_R, tokens_RBL, count_R):
        return jax.lax.map(
            lambda worker: one_worker(params_M, *worker), (owner_R, tokens_RBL, count_R)
        )

    jitted = jax.jit(test, out_shardings=at.whole)
    return jitted.lower(ensemble.params_M, ensemble.owner_R, tokens, counts)


def _lower_evaluate(spec: Spec, key: Key) -> jax.stages.Lowered:
    at = placement(spec, key)
    params = _with_shardings(spec.params, at.params(spec.params))
    size = key.micro_batch_size
    tokens = jax.ShapeDtypeStruct((size, spec.row_length), jnp.int32, sharding=at.tokens_BL(size))

    def evaluate(params, tokens_BL):
        return jax.vmap(lambda tokens_L: spec.loss_fn(params, tokens_L[None]))(tokens_BL)

    return jax.jit(evaluate, out_shardings=at.whole).lower(params, tokens)


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """Device bytes a program holds while it runs, with its arguments: the compiler's analysis."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"{jax.default_backend()}: its compiler gives no memory analysis")
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


def peak_bytes(programs: Programs, key: Key, num_trainers: int, num_workers: int) -> int:
    """Bytes a device holds while a program runs: the ensemble's that it does not take included."""
    at = placement(programs.spec, key._replace(num_trainers=num_trainers, num_workers=num_workers))
    state = ensemble_spec(programs.spec, num_trainers, num_workers, at)
    held = (state.outer_state_M, state.inner_state_R, state.params_R)
    parts = state if key.kind == "evaluate" else held
    beside = parts if key.kind in ("test", "evaluate") else ()
    return needed_bytes(programs[key]) + _bytes_here(beside)


def device_bytes() -> int:
    """Memory of one device; of a CPU the machine's RAM, shared by its emulated devices."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def fewest_model_shards(
    spec: Spec, *, num_trainers: int, num_workers: int, memory_frac: float
) -> int:
    """How many devices must share a worker's parameters for what a round keeps to fit.

    Args:
      spec: Its own `model_shards` is not looked at.
      num_trainers: M at the start; merges only need less.
      num_workers: R.
      memory_frac: Share of a device's memory to plan with.

    Returns:
      The smallest divisor of the number of devices with which the ensemble, the workers' parameters
      and their gradients fit, activations not counted; all devices if none is enough.
    """
    budget = int(memory_frac * device_bytes())
    key = first_key("round", num_trainers, num_workers)
    count = len(jax.devices())
    for shards in (n for n in range(1, count + 1) if count % n == 0):
        tried = dataclasses.replace(spec, model_shards=shards)
        at = placement(tried, key)
        buffers = buffers_spec(tried, num_workers, at)
        state = ensemble_spec(tried, num_trainers, num_workers, at)
        if _bytes_here((state, buffers)) <= budget:
            return shards
    return count


def _bytes_here(shapes: PyTree) -> int:
    """Bytes of one device's share of arrays, known by shape and sharding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def measured_peaks() -> dict[str, int | list[int | None]]:
    """The most memory this process has held so far: on the host, and on each device, in bytes.

    A device is null where its backend does not count, as a CPU, whose memory is the host's.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "device_peak_bytes": [
            (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
        ],
    }


def find_max_batch(
    programs: Programs,
    *,
    num_trainers: int,
    num_workers: int,
    buckets: Sequence[int],
    smallest: int,
    accumulates: bool,
    tests: bool,
    memory_frac: float,
) -> int:
    """The largest micro-batch whose programs fit a device, found by compiling, not by crashing.

    Memory grows linearly with the micro-batch, so two compiled sizes predict which one fits; that
    one is then compiled and looked at.

    Args:
      programs: Those compiled here are kept for the run.
      num_trainers: M at the start; merges only need less.
      num_workers: R, the whole pool.
      buckets: Sizes to choose from, ascending.
      smallest: The initial batch, below which no size is of use.
      accumulates: Whether the accumulating program must fit as well.
      tests: Whether the program of the batch-size test must.
      memory_frac: Share of a device's memory to plan with.

    Returns:
      One of the buckets.

    Raises:
      ResourceError: If not even the smallest size fits; says how much it needs.
    """
    budget = int(memory_frac * device_bytes())
    update = "accumulate" if accumulates else "round"

    def peak(kind, size=0):
        key = first_key(kind, num_trainers, num_workers, size)
        return peak_bytes(programs, key, num_trainers, num_workers)

    def whole_run(size):
        return max(peak(update, size), peak("evaluate", size), peak("test") if tests else 0)

    sizes = [size for size in buckets if size >= smallest]
    rounds = {n: peak("round", n) for n in (sizes[0], sizes[min(2, len(sizes) - 1)])}
    (small, least), (large, more) = min(rounds.items()), max(rounds.items())
    per_sequence = (more - least) / max(large - small, 1)
    fitting = [size for size in sizes if least + per_sequence * (size - small) <= budget]
    for size in reversed(fitting):
        if whole_run(size) <= budget:
            return size
    raise ResourceError(
        f"batching.initial_batch_size={sizes[0]}: {num_workers} workers of {num_trainers} trainers"
        f" need {whole_run(sizes[0])} bytes on a device, have {budget}"
        f" (batching.memory_frac={memory_frac} of {device_bytes()}); use fewer workers, a smaller"
        " batch or model, or model.remat"
    )


def _with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
