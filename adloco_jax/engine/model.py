"""The model of a run with its weights, and what all programs of the run share (`ProgramSpec`).

A mode says whether workers run at once or in turn, and whether the backward pass recomputes layers.
Frozen weights are those of a model that is trained only by an adapter: they are its base. A kernel
is the code that computes attention: "xla" is XLA's, "cudnn" that of cuDNN. Devices share a worker
if each has a part of its parameters (`model_shards` is their number).
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from adloco_jax.core.arguments import takes
from adloco_jax.core.types import LossFn
from adloco_jax.data.rows import NUM_FIELDS
from adloco_jax.engine.memory import Mode, choose_model_shards
from adloco_jax.engine.optimizers import (
    Labeller,
    aggregator,
    inner_transform,
    labeller,
    outer_transform,
    parameter_labels,
)
from adloco_jax.engine.spec import Kernel, Machine, ProgramSpec
from adloco_jax.errors import ConfigError
from adloco_jax.loop.growth import measures_gradients, measures_inner_products
from adloco_jax.loop.plans import AUTO_TEST_MAX
from adloco_jax.models import hf, llama
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.models.configured import (
    InitFn,
    build_model,
    build_network,
    class_count,
    initialiser,
)
from adloco_jax.models.layers import split_adapter
from adloco_jax.row_batch import RowBatch
from adloco_jax.settings import BatchingSettings, DataSettings, ModelSettings, Settings


class Base(NamedTuple):
    """The frozen weights of a model with an adapter, and a hash of all of them; else neither."""

    params: PyTree | None = None
    fingerprint: str = ""


class Model(NamedTuple):
    """A model to train: what the settings describe, or what the caller of `fit` gives."""

    init_fn: InitFn  # draws the parameters from a key
    loss_of: Callable[[Mode, Kernel], LossFn]  # returns the loss for a mode and attention's kernel
    network: nn.Module | None = None  # None: the caller of `fit` has it
    num_classes: int | None = None  # None: the model is no classifier
    # Takes the number of devices that share a worker; returns the kernel: "xla" or "cudnn".
    attention: Callable[[int], Kernel] = lambda model_shards: "xla"
    params: PyTree | None = None  # where to start; None: `init_fn` draws them
    can_remat: bool = True  # whether the loss can recompute layers in the backward pass
    label_params: Labeller | None = None  # None: the architecture's, or by name
    eval_loss_fn: LossFn | None = None  # for held-out losses; None: the loss, without a key
    inner_tx: optax.GradientTransformation | None = None  # None: the configured one
    outer_tx: optax.GradientTransformation | None = None  # None: the configured one
    base_shapes: PyTree | None = None  # of the frozen weights of a model with an adapter
    base: Base = Base()


def configured_model(settings: Settings, machine: Machine) -> Model:
    """Return the model that the settings describe, for programs compiled for `machine`.

    No parameters are drawn, and no weights are read. With an adapter (`adapter.rank` above 0),
    `init_fn` draws the adapter alone, and `base_shapes` has the shapes of the frozen weights. The
    field `attention` is a function: it takes the number of devices that share a worker, and returns
    the kernel, "xla" or "cudnn".
    """
    model = settings.model
    data = settings.data
    network = build_network(model, settings.adapter)
    init_all = initialiser(network)

    def loss_of(mode: Mode, kernel: Kernel) -> LossFn:
        """Return the loss of the model with recomputed layers or not, and a kernel of attention."""
        # `layer_form` says how programs run the layers: "call" on a CPU, elsewhere "inline".
        _, loss_fn = build_model(
            model,
            settings.adapter,
            remat=mode.remat,
            attention=kernel,
            layer_form=layer_form(machine),
        )
        return loss_fn

    init_fn = init_all
    base_shapes = None
    if settings.adapter.rank:
        # The parameters are those of the adapter and the frozen weights, which are then held in
        # `model.base_dtype`, perhaps quantised. Only shapes are computed here.
        _, frozen = split_adapter(jax.eval_shape(init_all, jax.random.key(0)))
        in_base_dtype = functools.partial(hf.as_held, dtype=model.base_dtype or "bfloat16")
        base_shapes = jax.eval_shape(in_base_dtype, frozen)

        def init_adapter(key: jax.Array) -> PyTree:
            """Draw all parameters, and return only those of the adapter."""
            adapter, _ = split_adapter(init_all(key))
            return adapter

        init_fn = init_adapter

    # All arguments of `attention_kernel` are bound but the last, the number of devices.
    return Model(
        init_fn=init_fn,
        loss_of=loss_of,
        network=network,
        num_classes=class_count(model),
        attention=functools.partial(
            attention_kernel, network, model, data, settings.batching, machine
        ),
        base_shapes=base_shapes,
    )


def attention_kernel(
    network: nn.Module,
    model: ModelSettings,
    data: DataSettings,
    batching: BatchingSettings,
    machine: Machine,
    model_shards: int = 1,
) -> Kernel:
    """Choose the attention kernel: "cudnn" if devices, model and data allow it, else "xla".

    `network` is the module that the settings `model` describe. `data` has the length of a row, and
    says whether attention separates documents; `batching` says what the batch-size test measures.
    What cuDNN needs is what
    `jax.nn.dot_product_attention` asks for on the strictest GPU. `model_shards` is the number of
    devices that share a worker's parameters.
    """
    # The GPU: NVIDIA's, of compute capability 8.0 (A100) or above. GPUs of other vendors do not
    # report their capability as a pair of numbers.
    if machine.platform != "gpu":
        return "xla"
    reported = getattr(machine.devices[0], "compute_capability", "")
    capability = re.fullmatch(r"(\d+)\.\d+", str(reported))
    if capability is None or int(capability[1]) < 8:
        return "xla"

    # The model: one whose attention can be chosen, in bfloat16, with heads that cuDNN can read.
    head_size = getattr(network, "head_size", None) or model.width // model.num_heads
    can_choose = takes(ARCHITECTURES[model.arch].build, "attention")
    if not can_choose or model.dtype != "bfloat16" or head_size > 128 or head_size % 8 != 0:
        return "xla"

    # The rows: documents are separated by a mask, which cuDNN refuses if its length is odd. A row
    # must not be longer than a layer's window, which would need another mask.
    length = data.sequence_length
    kinds: tuple[llama.LayerKind, ...] = getattr(network, "kinds", ())
    windows = [kind.window for kind in kinds if kind.window is not None]
    if data.separates_documents and length % 2 != 0:
        return "xla"
    if length > min(windows, default=math.inf):
        return "xla"

    # The batch-size test: inner products need differentiation in forward mode, which cuDNN lacks.
    # XLA cannot partition the cuDNN call in gradient tests of workers that are sharded.
    if measures_inner_products(batching):
        return "xla"
    if model_shards > 1 and measures_gradients(batching):
        return "xla"
    return "cudnn"


def layer_form(machine: Machine) -> str:
    """Return how programs of a machine run a model's layers.

    "call" calls each layer as a function, which is fastest on a CPU. "inline" writes all layers one
    after another, which gives other devices the fewest kernels.
    """
    return "call" if machine.platform == "cpu" else "inline"


def examples_per_pass(num_activations: int, machine: Machine) -> int | None:
    """Return the rows of one forward and backward pass on a CPU; elsewhere None, for all rows.

    If a micro-batch has more rows, its gradient is the mean over several passes. Activations
    between two layers (`num_activations` a row) should stay in the cache: with 16 rows of 131,072
    activations, fewer rows took 0.8 of the time. If all fits in the cache, fewer rows took up to
    1.12 times the time.
    """
    if machine.platform != "cpu":
        return None
    return max(1, _NUMBERS_IN_A_PASS // num_activations)


_NUMBERS_IN_A_PASS = 2**19  # activations between two layers: 2 MiB in float32


def with_weights(
    model: Model, settings: ModelSettings, machine: Machine, *, seed: int
) -> tuple[Model, list[str]]:
    """Read the weights of `model.init_from`, from which the model starts or which stay frozen.

    They stay frozen if the model has an adapter. Otherwise a head that the checkpoint lacks is
    drawn with `seed`.

    Returns the model with the weights, and lines for the user: about a head that was drawn, about
    weights that were left out, and about dropout, with which the checkpoint was trained.

    Raises ConfigError if there is no such checkpoint, its sizes differ, or it lacks the head of a
    model with an adapter; DataError if it is damaged.
    """
    source = settings.init_from
    frozen = model.base_shapes is not None
    base_dtype = None
    if frozen:
        base_dtype = settings.base_dtype or "bfloat16"
    # The checkpoint may lack the head, of which the lines below tell. If it is an adapter, it is
    # added to its weights, unless they stay frozen.
    loaded = hf.load(source, head=False, merges=not frozen, base_dtype=base_dtype)
    # Raise ConfigError if the checkpoint has other sizes than the run's network.
    hf.require_same_network(model.network, loaded, settings)

    params = loaded.params
    lines = []
    head = loaded.lacks  # the name of a head that the checkpoint lacks, else empty
    if head and frozen:
        raise ConfigError(f"adapter.rank: {source} has no {head}; set adapter.rank=0")
    if head:
        drawn = jax.jit(model.init_fn)(jax.random.key(seed))
        params = params | {head: drawn[head]}
        lines.append(f"model.init_from = {source}: has no {head}; a random one is used")
    if loaded.left_out:
        lines.append(f"model.init_from = {source}: left out: {', '.join(loaded.left_out)}")
    rates = [f"{key}={rate}" for key, rate in loaded.config.items() if "dropout" in key and rate]
    if rates:
        lines.append(f"model.init_from = {source}: trained without {', '.join(rates)}")
    if not frozen:
        return model._replace(params=params), lines

    base = loaded.base
    if machine.platform == "cpu":  # where host and device then share the arrays
        base = jax.tree.map(jnp.asarray, base)
    return model._replace(params=params, base=Base(base, loaded.sha256)), lines


def program_spec(
    settings: Settings,
    model: Model,
    machine: Machine,
    *,
    mode: Mode | None = None,
    found_length: int | None = None,
) -> ProgramSpec:
    """Make the `ProgramSpec` of a run: what all its compiled programs share. Nothing is compiled.

    Args:
      settings: The complete settings of the run.
      model: The model to train; nothing is drawn or read, only shapes are computed.
      machine: The devices for which the programs will be compiled.
      mode: How a device runs its workers. None: in turn on a CPU, else at once, and with
        recomputed layers only if `model.remat` says so.
      found_length: Integers in a row of the data, which may be fewer than the settings allow.
        None: as many as they allow.

    Raises:
      ConfigError: If the held-out loss needs a key, a parameter's label is unclear, or the devices
        cannot be divided as `ensemble.model_shards` says.
    """
    batching = settings.batching
    data = settings.data
    if mode is None:
        # One worker's batch keeps a CPU's cores busy: four workers at once took 1.2 times the time,
        # and twice the memory, of four in turn.
        mode = Mode(sequential=machine.platform == "cpu", remat=bool(settings.model.remat))
    loss_fn = model.loss_of(mode, "xla")  # `on_devices` chooses the kernel below
    _require_no_key(model.eval_loss_fn or loss_fn)

    longest = data.sequence_length + 1  # integers of the longest row
    if model.num_classes is not None:  # its class and its number of tokens, before at most L tokens
        longest = data.sequence_length + NUM_FIELDS
    unused = 0  # integers by which all rows are shorter than the settings allow
    if found_length is not None:
        unused = longest - found_length
    # Numbers (activations) that one layer hands to the next, for one row.
    num_activations = data.sequence_length * settings.model.width
    params = jax.eval_shape(model.init_fn, jax.random.key(0))
    label_params = labeller(settings.model.arch, model.label_params)
    # This raises if a parameter's label is unclear; the labels themselves are not needed here.
    parameter_labels(params, label_params, inner=settings.inner, outer=settings.outer)
    spec = ProgramSpec(
        machine=machine,
        loss_fn=loss_fn,
        params=params,
        inner_tx=inner_transform(settings.inner, label_params, model.inner_tx),
        outer_tx=outer_transform(settings.outer, model.outer_tx),
        outer=settings.outer,
        # Of one call: with Streaming DiLoCo a fragment is synchronised after each.
        num_micro_batches=settings.inner.steps_per_round // settings.outer.fragments,
        row=_row(data, longest - unused),
        sequence_length=data.sequence_length - unused,
        # As set, else the most that a test chooses by itself.
        max_test_sequences=batching.test_batch_size or AUTO_TEST_MAX,
        inner_products=measures_inner_products(batching),
        reset_inner_state=settings.inner.state == "reset",
        aggregate=aggregator(settings.outer, label_params),
        eval_loss_fn=model.eval_loss_fn,
        key_seed=settings.seed if takes(loss_fn, "key") else None,
        sequential=mode.sequential,
        remat=mode.remat,
        examples_per_pass=examples_per_pass(num_activations, machine),
        loss_chunk=settings.model.loss_chunk,
        base=model.base_shapes,
    )
    return on_devices(
        spec,
        model,
        settings.ensemble.sizes(whole_pool=True),  # also the workers that join later
        given=settings.ensemble.model_shards,
        memory_frac=batching.memory_frac,
    )


def _row(data: DataSettings, length: int) -> PyTree:
    """Return shapes and dtypes of a row of `length` integers: of an array, or of a `RowBatch`.

    A `RowBatch` has the starts of documents, if the model separates them, and weights in chats.
    """
    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
    if not data.separates_documents:
        return tokens
    starts = jax.ShapeDtypeStruct((length,), jnp.int32)
    weights = None
    if data.is_chat:
        weights = jax.ShapeDtypeStruct((length,), jnp.float32)
    return RowBatch(tokens, starts, weights)


def _require_no_key(loss_fn: LossFn) -> None:
    """Raise ConfigError if the loss for held-out rows has a parameter `key` without a default."""
    key = inspect.signature(loss_fn).parameters.get("key")
    if key is not None and key.default is key.empty:
        raise ConfigError(
            "loss_fn: needs a `key`, and held-out losses are computed without one; give it the"
            " default None, without dropout, or give fit another function, eval_loss_fn"
        )


def on_devices(
    spec: ProgramSpec,
    model: Model | None,
    sizes: tuple[int, ...],
    *,
    given: int | None,
    memory_frac: float | None,
) -> ProgramSpec:
    """Return a spec with the number of model shards and the attention kernel for its devices.

    Args:
      spec: What all programs of the run share; `spec.machine` has the devices.
      model: Chooses the kernel and makes its loss. None: both stay as they are in `spec`.
      sizes: The number of each trainer's workers, whose state must fit in memory.
      given: The setting `ensemble.model_shards`; None: the least number with which the state fits.
      memory_frac: The setting `batching.memory_frac`.

    Raises:
      ConfigError: If `given` does not divide the number of devices.
    """
    shards = choose_model_shards(spec, sizes, given=given, memory_frac=memory_frac)
    if model is None:
        return dataclasses.replace(spec, model_shards=shards)
    kernel = model.attention(shards)
    loss_fn = model.loss_of(Mode(spec.sequential, spec.remat), kernel)
    return dataclasses.replace(spec, model_shards=shards, attention=kernel, loss_fn=loss_fn)


def spec_of(settings: Settings, machine: Machine, mode: Mode | None = None) -> ProgramSpec:
    """Collect what all compiled programs of a run of the configured model share (`ProgramSpec`).

    `mode` is how devices run workers; None: the usual mode of the machine's platform. Raises
    ConfigError if a parameter's label is unclear, or the devices cannot be divided as
    `ensemble.model_shards` says.
    """
    return program_spec(settings, configured_model(settings, machine), machine, mode=mode)
