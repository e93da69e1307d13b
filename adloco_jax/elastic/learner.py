"""A learner: a process that runs rounds of workers for the driver, and reads their rows itself.

It keeps a worker's inner state, that of the inner optimizer, before and after a round: if the round
does not count, the driver asks for the same rows again.

`M` is the axis of trainers and `R` that of workers, both of length one here. `S` is the axis of
updates, `T` that of micro-batches, `B` that of sequences and `L` that of their tokens. An inner
state without a letter is that of one worker, in NumPy and without axis R.

A learner has a place in a run: its number, and its incarnation, which counts the learners that had
the number before. A stall is the time in which a round waits for compilation. A worker's stream is
the order in which it reads rows; its number is the worker's id. Programs run an ensemble, which has
trainers and their workers; here it has one of each. A key names a program. A worker's difference is
its trainer's parameters minus its own. To pack is to quantise to a precision, such as int4, for
sending. An inner state is known by a key (`StateKey`): trainer id, worker id, and the position in
the worker's stream where the round begins that it belongs to. A `ProgramSpec` has what all programs
of the run share. Gradient statistics are measured for the batch-size test.
"""

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from numpy.typing import DTypeLike

from adloco_jax.core.compress import Precision, pack, unpack
from adloco_jax.core.outer import Differences, add_packed, pack_differences
from adloco_jax.core.types import Ensemble, GradientStats, Workers, trainable
from adloco_jax.data import load_corpus
from adloco_jax.elastic.decisions import num_parts
from adloco_jax.elastic.messages import (
    USES,
    Hello,
    Refused,
    Request,
    Sign,
    StateKey,
    WorkerRequest,
    tree_sha256,
)
from adloco_jax.engine.inputs import Group, Rows, calls_of, padded_stats_rows
from adloco_jax.engine.memory import peak
from adloco_jax.engine.model import (
    Base,
    configured_model,
    examples_per_pass,
    on_devices,
    with_weights,
)
from adloco_jax.engine.programs import Programs, use_compilation_cache
from adloco_jax.engine.round import by_update, inner_round, measure
from adloco_jax.engine.sharding import fetch
from adloco_jax.engine.spec import Compiled, Compiling, ProgramKey, ProgramSpec, this_machine
from adloco_jax.host.terminal import say
from adloco_jax.host.versions import versions
from adloco_jax.loop.control import RoundPlan
from adloco_jax.models.configured import class_count
from adloco_jax.settings import INT32, Settings


class LearnerSetup(NamedTuple):
    """What the driver sends to each learner process at its start: a description of the run."""

    settings: Settings
    spec: ProgramSpec  # what all programs of the run share, without the driver's devices
    corpus: Rows | None  # the rows to train on; None: the learner loads the configured corpus
    base: Base = Base()  # frozen weights; without `params`, the learner reads those of `settings`
    by_fit: bool = False  # whether the caller of `fit` gave model and rows
    commit: str = ""  # commit of the data set on the hub; empty if there is none
    fingerprint: str = ""  # hash of the content of the data
    # The configured architecture and data source, which a user may have added in the driver.
    entries: tuple[Any, ...] = ()
    log: str = ""  # folder of the learners' logs
    # Paths of files that the driver can serve, by kind and name (`elastic.files`).
    files: Mapping[tuple[str, str], Path] = {}


class Inputs(NamedTuple):
    """The arrays of a request, in NumPy."""

    rate_T: np.ndarray  # learning rate of each of the driver's micro-batches
    inner_states: dict[int, PyTree]  # by worker id, where the learner does not have it


class Response(NamedTuple):
    """What one worker's round gave, which a learner sends to the driver; arrays in NumPy.

    For whom, and how many sequences that took, the driver knows from its request.
    """

    differences: Differences  # trainer's parameters minus the worker's; leaves [1, ...]
    loss_SR: np.ndarray  # loss of each update, [S, 1]; NaN for a skipped update
    skipped_SR: np.ndarray  # bool [S, 1]: whether the update was skipped
    stats_R: GradientStats | None  # of this worker; None if nothing was measured
    seconds: np.ndarray  # [], of the round, without compilation
    # [3], since the learner's last round: uploading, waiting, downloading; zero in a later response
    # to the same request.
    between_s: np.ndarray = np.zeros(3)


class Reply(NamedTuple):
    """The result of a call to a learner's method, or the error that ended the call."""

    value: Any  # the result, or why it is `Refused`; None if the learner has ended
    error: str = ""  # why the learner has ended, in one line; empty if it goes on
    num_bytes: int = 0  # size of what was received


def say_compiling(event: Compiling | Compiled) -> None:
    """Say that a program is being compiled, which may take a minute, or how long that took."""
    if isinstance(event, Compiling):
        say(f"compiling program {event.number} of {event.of}")
    elif event.hit:  # it was in the cache
        say(f"read it from the cache of compiled programs in {event.seconds:.1f} s")
    else:
        say(f"compiled in {event.seconds:.1f} s; the next start reads it from the cache")


class Learner:
    """Runs workers one after another, each on all devices of this process."""

    def __init__(self, setup: LearnerSetup):
        """Load the rows and prepare the programs; `enlist` must be called before a round.

        Raises UserError if the data or the frozen weights cannot be read, or
        `ensemble.model_shards` does not divide the number of devices.
        """
        use_compilation_cache()  # so that a next start reads programs from a file
        settings = setup.settings
        machine = this_machine()  # this process's devices
        self.corpus = setup.corpus or load_corpus(
            settings, num_classes=class_count(settings.model), commit=setup.commit
        )

        # Updates of the shortest planned round; longer ones are multiples of it.
        steps = settings.inner.steps_per_round
        spec = dataclasses.replace(
            setup.spec,
            machine=machine,
            # A call of the program makes one part of a round, as a slow learner makes only some.
            num_micro_batches=steps // num_parts(steps, settings.engine),
            sequential=machine.platform == "cpu",  # one worker keeps a CPU's cores busy
            # On a CPU so few sequences at a time that their activations stay in its cache.
            examples_per_pass=examples_per_pass(
                settings.data.sequence_length * settings.model.width, machine
            ),
        )
        # Attention and layers as these devices want them, not the driver's. A model that the caller
        # of `fit` has made stays as it is.
        model = None
        if not setup.by_fit:
            model = configured_model(settings, machine)
        # The spec with the number of devices that share a model, and a kernel for attention.
        self.spec = on_devices(
            spec,
            model,
            (1,),  # one trainer with one worker
            given=settings.ensemble.model_shards,
            memory_frac=settings.batching.memory_frac,
        )

        base = setup.base
        if model is not None and settings.adapter.rank and base.params is None:
            # The model has an adapter, and the driver has not sent its frozen weights: read them.
            model, _ = with_weights(model, settings.model, machine, seed=settings.seed)
            base = model.base
        self.base = base.fingerprint
        self.programs = Programs(self.spec, say_compiling)
        self.programs.set_frozen(base.params)  # the frozen weights; None: there are none

        self.held: dict[StateKey, PyTree] = {}  # workers' inner states
        self._params: dict[int, PyTree] = {}  # of the last round, with axis M, by trainer's id
        # Bytes of a device's memory that a run may use.
        self._budget = machine.budget(settings.batching.memory_frac)
        self._max_batch_size = INT32  # largest micro-batch for which memory may suffice
        self._needed: dict[ProgramKey, int] = {}  # bytes of a device that a program needs
        self.leaving = False  # whether it was asked to leave the run

    def enlist(self, number: int, incarnation: int, log: str | Path) -> None:
        """Take a place in a run, without parameters and inner states.

        `number` is the place's, and `incarnation` how many learners had it before. Rounds are
        logged to a file in the folder `log`, if that exists.
        """
        self.held.clear()
        self._params.clear()
        self._begin_to_wait()
        self._log_file = Path(log) / f"{number}-{incarnation}.jsonl"
        self._log_line({"pid": os.getpid(), "learner": number, "incarnation": incarnation})

    def _begin_to_wait(self) -> None:
        """Begin to measure what the learner does until its next round."""
        self._free_s = time.monotonic()  # when the last round ended
        # Seconds since then. `BucketLearner`, which sends and reads objects, sets them; with Ray
        # they stay zero, and count as waiting.
        self.uploading_s = 0.0
        self.downloading_s = 0.0

    def leave(self, *_: object) -> None:
        """Ask the learner to leave the run; the driver sees it in the answer to the next ping.

        It is also a handler of signals, whose arguments do not matter.
        """
        self.leaving = True

    def hello(self) -> Hello:
        """Describe data, versions, base weights and devices, for the driver to compare."""
        return Hello(
            fingerprint=self.corpus.fingerprint,
            versions=versions(),
            base=self.base,
            devices=self.spec.machine.describe(),
        )

    def ping(self) -> Sign:
        """Answer a ping: say what the learner has, and how it is."""
        return Sign(
            leaving=self.leaving,
            compiling=self.programs.compiling,
            hello=self.hello(),
            max_batch_size=self._max_batch_size,
        )

    def states(self, wanted: list[StateKey]) -> list[PyTree]:
        """Return the inner states with these keys, in their order.

        Raises Refused if one of them is not here.
        """
        return [self._held_state(key) for key in wanted]

    def _held_state(self, key: StateKey) -> PyTree:
        """Return the inner state with a key, without axis R; raise Refused if it is not here."""
        if key not in self.held:
            _, worker_id, position = key
            raise Refused(f"no inner state of worker {worker_id} at {position}")
        return self.held[key]

    def run_round(self, request: Request, inputs: Inputs, params: PyTree | None) -> list[Response]:
        """Run a trainer's round for the workers of a request.

        Args:
          request: What to run.
          inputs: Learning rates, and the inner states that this learner lacks.
          params: The trainer's parameters, in NumPy and without axis M. If `request.is_update`, the
            packed outer update instead, with axis M, that changes those of the learner's last round
            of this trainer. None if the learner has the parameters.

        Returns:
          One response for each worker of the request, in their order.

        Raises:
          Refused: If parameters or inner states are not those that the request needs.
          JaxRuntimeError: If memory does not suffice, or for another fault of a device.
        """
        # What the learner did since its last round.
        uploading_s = self.uploading_s
        downloading_s = self.downloading_s
        since_s = time.monotonic() - self._free_s
        # The three are measured one by one, so that the difference may be a little negative.
        waiting_s = max(since_s - uploading_s - downloading_s, 0.0)

        params_M = self._present_params(request, params)
        responses = [self._run_worker(request, work, inputs, params_M) for work in request.work]
        if request.takes_worker_params(self.spec):
            # The trainer takes its only worker's parameters: its own minus the difference, which a
            # single worker sends in float32.
            step_M = jax.tree.map(np.negative, responses[0].differences.packed_R)
            params_M = fetch(_add_packed(params_M, step_M, "float32"))
        self._params[request.trainer] = params_M

        self._begin_to_wait()
        # Only the first response says what the learner did between its rounds: the driver adds up
        # those of all.
        between_s = np.array([uploading_s, waiting_s, downloading_s])
        responses[0] = responses[0]._replace(between_s=between_s)
        return responses

    def _present_params(self, request: Request, params: PyTree | None) -> PyTree:
        """Return the parameters, with axis M, with which a trainer's round begins.

        `params` is the argument of `run_round`. If it has whole parameters, they are these; if it
        has a packed update, those of the trainer's last round here, changed by the update; if it is
        None, those of the last round as they are. The last round's are forgotten here. Raises
        Refused if the result has not the hash in the request.
        """
        params_M = self._params.pop(request.trainer, None)  # of the last round; None: there is none
        if params is not None and not request.is_update:  # whole parameters
            params_M = jax.tree.map(lambda leaf: leaf[None], params)
        elif params is not None and params_M is not None:  # an update
            params_M = fetch(_add_packed(params_M, params, self.spec.outer.precision))
        if params_M is None or tree_sha256(params_M) != request.params_sha256:
            raise Refused(
                f"request: other parameters of trainer {request.trainer} than this learner has"
            )
        return params_M

    def _run_worker(
        self, request: Request, work: WorkerRequest, inputs: Inputs, params_M: PyTree
    ) -> Response:
        """Run a worker's round, in smaller micro-batches if memory does not suffice.

        An update still has as many sequences as the driver wants: gradients of more micro-batches
        are accumulated. The size that suffices is kept for later rounds.

        Args:
          request: The round of the worker's trainer.
          work: The worker's part of it.
          inputs: Learning rates, and the inner states that this learner lacked.
          params_M: The trainer's parameters, with which the round begins.

        Raises:
          Refused: If the worker's inner state is not here.
          JaxRuntimeError: If memory does not suffice even for micro-batches of one sequence, or for
            another fault of a device.
        """
        wanted = request.micro_batch_size
        while True:
            # A size that memory may allow. It divides the driver's, so that each micro-batch of the
            # driver becomes several of this size.
            size = math.gcd(wanted, min(wanted, self._max_batch_size))
            plan = RoundPlan(
                micro_batch_size=size,
                num_accum_steps=wanted // size * request.num_accum_steps,
                num_updates=work.num_updates,
            )
            group = Group((request.trainer,), (1,), plan=plan)  # one trainer with this worker alone
            try:
                # One sequence is tried even if it may not fit, as nothing is smaller.
                if size == 1 or self._fits(group):
                    return self._run_group(group, request, work, inputs, params_M)
            except jax.errors.JaxRuntimeError as error:
                if size == 1 or "RESOURCE_EXHAUSTED" not in str(error):
                    raise
            self._max_batch_size = size // 2  # try again with this

    def _fits(self, group: Group) -> bool:
        """Whether the program that runs a group's inner steps fits in a device's memory.

        It is compiled if it was not yet. Raises JaxRuntimeError if that fails.
        """
        key = group.steps_key()
        if key not in self._needed:
            sizes = (1,)  # workers of each trainer
            self._needed[key] = peak(self.programs, key, sizes).total  # bytes while it runs
        return self._needed[key] <= self._budget

    def _run_group(
        self,
        group: Group,
        request: Request,
        work: WorkerRequest,
        inputs: Inputs,
        params_M: PyTree,
    ) -> Response:
        """Run a worker's round in the group's micro-batches, and keep its inner state.

        Gradient statistics are measured at `params_M`, if the request wants some. Raises Refused if
        the worker's inner state is not here, and JaxRuntimeError if memory does not suffice.

        Args:
          group: This worker alone, with a plan whose micro-batches may be parts of the driver's.
          request: The round of the worker's trainer.
          work: The worker's part of it.
          inputs: Learning rates, and the inner states that this learner lacked.
          params_M: The trainer's parameters, with which the round begins.
        """
        spec = self.spec
        plan = group.plan
        key: StateKey = (request.trainer, work.worker_id, work.start)
        self._keep_state(key, inputs)
        start_s = time.perf_counter()
        stalled_s = self.programs.stall_s  # up to now

        # Read the rows of the round, and measure gradient statistics on the first ones.
        rows_B = self.corpus.batch(request.trainer, work.worker_id, work.start, plan.num_sequences)
        stats_R = None
        if work.num_tested:
            test = padded_stats_rows(group, [rows_B], np.array([work.num_tested], np.int32), spec)
            stats_R = measure(self.programs, params_M, test)

        # Make the worker's updates, in an ensemble that has this worker alone. The inner state gets
        # its axis R.
        alone = _alone(params_M)
        if not spec.reset_inner_state:
            before_R = jax.tree.map(lambda leaf: leaf[None], self._held_state(key))
            alone = alone.replace(inner_state_R=before_R)
        shape = (plan.num_micro_batches, 1, plan.micro_batch_size, -1)  # -1: length of a row
        rows_T1B = jax.tree.map(lambda rows_BL: rows_BL.reshape(shape), rows_B)
        # Each micro-batch of the driver, with its learning rate, is so many of the plan's. Of a
        # round that a slow learner does in part, only the first learning rates are used.
        num_smaller = request.micro_batch_size // plan.micro_batch_size
        rate_TR = inputs.rate_T.repeat(num_smaller)[:, None]
        reads_R3 = np.array([key], np.int32)  # which rows are read; random keys are made from it
        calls = calls_of(group, rows_T1B, rate_TR, reads_R3, spec)  # of the compiled program
        # `measured` has the losses and skipped updates of each call. The ensemble is not needed any
        # more, as the driver makes the outer update; norms come from Streaming DiLoCo only, which
        # learners cannot run.
        _, workers, measured, _ = inner_round(self.programs, alone, group, calls)

        # Pack the difference to send, which is not quantised if the trainer has no other worker
        # (`is_single`). Keep the state with which the next round begins.
        ended = workers.replace(inner_state_R=None)  # only its parameters are needed
        sent = _packed_difference(params_M, ended, request.precision(spec), request.is_single)
        if not spec.reset_inner_state:
            after_R = fetch(workers.inner_state_R)
            next_start = work.start + plan.num_sequences
            next_key = (request.trainer, work.worker_id, next_start)
            self.held[next_key] = jax.tree.map(lambda leaf: leaf[0], after_R)
        loss_SR, skipped_SR = by_update(group, measured)  # of each update, not each micro-batch
        sent, stats_R = fetch((sent, stats_R))  # waits for the devices

        stall_s = self.programs.stall_s - stalled_s  # in which the round waited for compilation
        seconds = time.perf_counter() - start_s - stall_s
        self._log_line(
            {
                "trainer": request.trainer,
                "round": request.round,
                "stream": work.worker_id,
                "start": work.start,
                "count": plan.num_sequences,
                "stall_s": stall_s,
            }
        )
        return Response(
            differences=sent,
            loss_SR=loss_SR,
            skipped_SR=skipped_SR,
            stats_R=stats_R,
            seconds=np.array(max(seconds, 0.0)),  # rounding may make it a little negative
        )

    def _keep_state(self, key: StateKey, inputs: Inputs) -> None:
        """Keep the inner state with which a worker begins its round, and forget its other states.

        `key` names that state: it is stored here if `inputs` has it. Otherwise the learner may have
        it from the round before.
        """
        _, worker_id, _ = key
        if worker_id in inputs.inner_states:
            self.held[key] = inputs.inner_states[worker_id]
        for other in [*self.held]:
            _, other_id, _ = other
            if other_id == worker_id and other != key:
                del self.held[other]

    def _log_line(self, fields: Mapping[str, float]) -> None:
        """Add a line, with the time and these fields, to the log file of this process."""
        if self._log_file.parent.is_dir():  # the learner's machine may not have the run's folder
            with open(self._log_file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), **fields}) + "\n")


def _alone(params_M: PyTree) -> Ensemble:
    """Make an ensemble of one trainer with one worker, without optimizer states, at round 0.

    `params_M` are the trainer's parameters, with an axis M of length one.
    """
    return Ensemble(
        params_M=params_M,
        outer_state_M=None,
        inner_state_R=None,
        sizes=(1,),
        round=jnp.zeros((), jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=(2, 3))  # the last two arguments
def _packed_difference(
    params_M: PyTree, workers: Workers, precision: Precision, is_single: bool
) -> Differences:
    """Compute one worker's difference, and pack it as it is sent: leaves [1, ...].

    Args:
      params_M: The trainer's parameters, with which the round began.
      workers: The worker after its inner steps; only its parameters are read.
      precision: That in which the difference is sent.
      is_single: Whether the trainer has no other worker.
    """
    return pack_differences(_alone(params_M), workers, precision=precision, single_R=(is_single,))


_add_packed = jax.jit(add_packed, static_argnums=2)  # the last argument is the precision


def stacked(tree: PyTree) -> PyTree:
    """Return the shapes and types of a tree's arrays with another, first axis of length one.

    The result is a tree of `jax.ShapeDtypeStruct`.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), tree)


def sent_form(spec: ProgramSpec, request: Request) -> PyTree:
    """Return the shapes and types of the parameters that are sent with a request.

    They are whole parameters without axis M, or a packed update with it (`Request.is_update`).
    """
    if not request.is_update:
        return spec.params  # has only shapes and types
    params_M = trainable(stacked(spec.params))  # without what is not floating-point
    return jax.eval_shape(lambda tree_M: pack(tree_M, spec.outer.precision), params_M)


def _state_precision(path: tuple, precision: Precision) -> Precision:
    """Return the precision in which a leaf of an inner optimizer's state is sent.

    `path` is the leaf's in the state, as `jax.tree.map_with_path` gives it. optax names first
    moments `mu` or `trace`, and second moments `nu`. `precision` is that of differences.
    """
    names = {getattr(key, "name", "") for key in path}
    if "nu" in names and precision == "int4":
        return "bfloat16"  # in int4 many would be zero, and updates, divided by them, huge
    if names & {"mu", "trace", "nu"}:
        return precision
    return "float32"  # no moment, such as the number of updates


def pack_state(state: PyTree, precision: Precision) -> PyTree:
    """Quantise the moments of a worker's inner state, to send it through a bucket.

    `state` has arrays without axis R. In the result each is packed by `core.compress.pack`, with an
    axis R of length one. `precision` is that of differences; second moments have bfloat16 at least.
    """

    def pack_leaf(path: tuple, leaf: np.ndarray) -> PyTree:
        """Pack the leaf at `path` in the state."""
        return pack(jnp.asarray(leaf)[None], _state_precision(path, precision))

    return jax.tree.map_with_path(pack_leaf, state)


def unpack_state(packed: PyTree, spec: ProgramSpec) -> PyTree:
    """Return the inner state, in NumPy and without axis R, that `pack_state` has packed.

    `spec` has the optimizer, from which the state's shapes follow, and the precision of moments.
    """

    def unpack_leaf(path: tuple, want: jax.ShapeDtypeStruct, packed_leaf: PyTree) -> jax.Array:
        """Unpack the leaf at `path`; the result has the shape and type of `want`."""
        like = jax.ShapeDtypeStruct((1, *want.shape), want.dtype)  # with axis R, as it was packed
        precision = _state_precision(path, spec.outer.precision)
        return jnp.asarray(unpack(packed_leaf, like, precision))[0]

    form = jax.eval_shape(spec.inner_tx.init, spec.params)
    return jax.device_get(jax.tree.map_with_path(unpack_leaf, form, packed))


def state_form(spec: ProgramSpec) -> PyTree:
    """Return the shapes and types of a worker's inner state that `pack_state` has packed."""
    state = jax.eval_shape(spec.inner_tx.init, spec.params)
    return jax.eval_shape(functools.partial(pack_state, precision=spec.outer.precision), state)


def inputs_form(spec: ProgramSpec, request: Request, worker_ids: Sequence[int]) -> Inputs:
    """Return the shapes and types of a request's arrays, as `jax.ShapeDtypeStruct`.

    `worker_ids` are the workers whose packed inner states are sent with it.
    """
    rate_T = _array(np.float32, request.num_updates * request.num_accum_steps)
    return Inputs(rate_T, dict.fromkeys(worker_ids, state_form(spec)))


def response_form(spec: ProgramSpec, request: Request, work: WorkerRequest) -> Response:
    """Return the shapes and types that the arrays of a worker's response must have.

    They are `jax.ShapeDtypeStruct` in place of arrays. `work` is the worker's part of the request.
    """
    params_M = stacked(spec.params)
    # The worker's parameters have the same shapes as the trainer's; its inner state is not sent.
    workers = Workers(params_R=params_M, inner_state_R=None)
    # Only shapes are computed, by tracing.
    differences = _packed_difference.eval_shape(
        params_M, workers, request.precision(spec), request.is_single
    )
    stats_R = None
    if work.num_tested:
        one_number = _array(np.float32, 1)
        # Each field of the statistics has one number for this worker.
        names = [field.name for field in dataclasses.fields(GradientStats)]
        stats_R = GradientStats(**dict.fromkeys(names, one_number))
    return Response(
        differences=differences,
        loss_SR=_array(float, work.num_updates, 1),
        skipped_SR=_array(bool, work.num_updates, 1),
        stats_R=stats_R,
        seconds=_array(float),
        between_s=_array(float, len(USES) - 1),  # without computing
    )


def _array(dtype: DTypeLike, *shape: int) -> Any:
    """Return a `jax.ShapeDtypeStruct`, which stands for an array of NumPy.

    Its type is `Any`, as it takes an array's place in typed fields.
    """
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
