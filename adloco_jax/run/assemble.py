"""Build the parts of a run from its settings: data, model, loss, optimizers, first parameters."""

import dataclasses
import functools
import inspect
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jaxtyping import PyTree

from adloco_jax import hf
from adloco_jax.contrib import AGGREGATORS, INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.core.arguments import takes
from adloco_jax.core.batching import BATCH_TESTS
from adloco_jax.core.gradstats import resolve_estimator
from adloco_jax.core.outer import Aggregator
from adloco_jax.core.types import Ensemble, LossFn, label_by_name
from adloco_jax.data import Corpus, load_corpus
from adloco_jax.data.corpus import is_small, readable
from adloco_jax.data.prepared import DocumentRows
from adloco_jax.data.rows import NUM_FIELDS
from adloco_jax.data.sampling import HeldOut, split_heldout
from adloco_jax.engine.inputs import Rows
from adloco_jax.engine.sharding import ensemble_spec, fetch, first_ensemble, placement
from adloco_jax.engine.spec import Kernel, Layout, Machine, Spec
from adloco_jax.errors import ConfigError, DataError, counted, own_code
from adloco_jax.loop.adloco import Control
from adloco_jax.loop.growth import measures_gradients
from adloco_jax.loop.plans import AUTO_TEST_MAX
from adloco_jax.models import llama
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.models.layers import LOW_RANK, Adapter
from adloco_jax.run.checkpoint import list_rounds
from adloco_jax.run.choose import Mode, model_shards
from adloco_jax.run.folder import recorded
from adloco_jax.settings import Settings

InitFn = Callable[[Array], PyTree]
"""`init_fn(key) -> params`: draws a model's parameters with a typed PRNG key."""


Labeller = Callable[[PyTree], PyTree]
"""`label_params(params)` labels each parameter (`models.architectures.Architecture`)."""


class Base(NamedTuple):
    """The frozen weights of a model with an adapter, and a hash of all of them; else neither."""

    params: PyTree | None = None
    fingerprint: str = ""


class Model(NamedTuple):
    """A model to train: what the settings describe, or what the caller of `fit` gives.

    `loss_of(mode, kernel)` returns the loss; `attention` chooses the kernel by the number of
    devices that share a worker; `row_length` counts the integers of the longest row; `params`:
    where to start; `eval_loss_fn` computes held-out losses (None: the loss, without a key).
    """

    init_fn: InitFn
    loss_of: Callable[[Mode, Kernel], LossFn]
    row_length: int
    num_classes: int | None = None
    attention: Callable[[int], Kernel] = lambda model_shards: "xla"
    params: PyTree | None = None
    can_remat: bool = True
    label_params: Labeller | None = None  # None: the architecture's, or by name
    eval_loss_fn: LossFn | None = None
    base_shapes: PyTree | None = None  # of the frozen weights of a model with an adapter
    base: Base = Base()


def configured_model(settings: Settings, machine: Machine) -> Model:
    """Describe the model of a config, for programs that are compiled for a machine."""
    init_fn, base_shapes = build_model(settings)[0], None
    if settings.adapter.rank:
        whole_fn = init_fn
        shapes = split_adapter(jax.eval_shape(whole_fn, jax.random.key(0)))[1]
        hold = functools.partial(hf.as_held, dtype=settings.model.base_dtype)
        base_shapes = jax.eval_shape(hold, shapes)

        def init_fn(key):
            return split_adapter(whole_fn(key))[0]

    return Model(
        init_fn=init_fn,
        base_shapes=base_shapes,
        loss_of=lambda mode, kernel: build_model(settings, machine, mode, kernel)[1],
        row_length=row_length(settings),
        num_classes=class_count(settings),
        attention=lambda model_shards: attention(settings, machine, model_shards),
    )


def load_data(settings: Settings, commit: str = "") -> Corpus:
    """Load the rows of tokens for training and evaluation; a classifier's rows have labels."""
    return load_corpus(settings, num_classes=class_count(settings), commit=commit)


def class_count(settings: Settings) -> int | None:
    """Return the number of classes of a configured classifier; None if rows have no labels."""
    model = settings.model
    return model.num_classes if ARCHITECTURES[model.arch].data == "labelled" else None


def row_length(settings: Settings) -> int:
    """Integers in the longest row that the model reads, with L = `data.sequence_length`.

    A text has L + 1 tokens, perhaps with starts and weights (`data.prepared.DocumentRows`); a
    labelled row at most L, after its class and its length.
    """
    fields = 1 if class_count(settings) is None else NUM_FIELDS
    return (settings.data.sequence_length + fields) * settings.data.row_parts


def attention(settings: Settings, machine: Machine, model_shards: int = 1) -> Kernel:
    """Choose the attention kernel: "cudnn" if possible, else "xla".

    The conditions are those of `jax.nn.dot_product_attention` on the strictest GPU. "xla" also
    serves tests by inner products, and gradient tests of sharded workers, where XLA cannot
    partition the cuDNN call.
    """
    model, device, network = settings.model, machine.devices[0], build_network(settings)
    head_size = getattr(network, "head_size", None) or model.width // model.num_heads
    kinds: tuple[llama.LayerKind, ...] = getattr(network, "kinds", ())
    windows = [kind.window for kind in kinds if kind.window is not None]
    # GPUs of other vendors do not report their capability as a pair of numbers.
    capability = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    is_sharded = model_shards > 1 and measures_gradients(settings.batching)
    return (
        "cudnn"
        if (
            takes(ARCHITECTURES[model.arch].build, "attention")
            and (settings.data.row_parts == 1 or settings.data.sequence_length % 2 == 0)
            and settings.data.sequence_length <= min(windows, default=math.inf)
            and model.dtype == "bfloat16"
            and head_size <= 128
            and head_size % 8 == 0
            # Inner products need differentiation in forward mode, which cuDNN lacks.
            and not measures_inner_products(settings)
            and machine.platform == "gpu"
            and capability is not None
            and int(capability[1]) >= 8
            and not is_sharded
        )
        else "xla"
    )


def build_network(
    settings: Settings,
    machine: Machine | None = None,
    mode: Mode | None = None,
    kernel: Kernel | None = None,
) -> nn.Module:
    """Build the Flax module of the configured model; of `mode` it takes `remat`.

    Without `machine`, layers are scanned and attention's kernel is "xla", which is right on any
    device. Without `mode`, layers are rematerialised if `model.remat` is true. With `machine` but
    no `kernel`, the kernel is that of an unsharded worker.
    """
    mode = mode or Mode(in_turn=True, remat=bool(settings.model.remat))
    layer_form = "scan"
    if machine is not None:
        kernel = kernel or attention(settings, machine)
        layer_form = "call" if machine.platform == "cpu" else "inline"
    adapter, adapted = settings.adapter, {}
    if adapter.rank:
        adapted = {"adapter": Adapter(adapter.rank, adapter.alpha, adapter.layers)}
    build = ARCHITECTURES[settings.model.arch].build
    return own_code(f"model.arch = {settings.model.arch}")(build)(
        vocab_size=settings.model.vocab_size,
        width=settings.model.width,
        num_layers=settings.model.num_layers,
        num_heads=settings.model.num_heads,
        num_kv_heads=settings.model.num_kv_heads,
        mlp_width=settings.model.mlp_width,
        max_length=settings.model.max_length,
        norm_eps=settings.model.norm_eps,
        rope_theta=settings.model.rope_theta,
        num_classes=settings.model.num_classes,
        dtype=settings.model.dtype,
        checkpoint=settings.model.checkpoint,
        remat=mode.remat,
        attention=kernel or "xla",
        layer_form=layer_form,
        **adapted,
    )


def build_model(
    settings: Settings,
    machine: Machine | None = None,
    mode: Mode | None = None,
    kernel: Kernel | None = None,
) -> tuple[InitFn, LossFn]:
    """Return the functions that initialise the model and compute its loss; see `build_network`."""
    network = build_network(settings, machine, mode, kernel)

    def init_fn(key):
        return network.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    loss: Callable[..., LossFn] = ARCHITECTURES[settings.model.arch].loss
    if settings.data.row_parts > 1:
        loss = functools.partial(loss, row_parts=settings.data.row_parts)
    with own_code(f"model.arch = {settings.model.arch}"):
        return init_fn, loss(network, loss_chunk=settings.model.loss_chunk)


def pretrained_params(settings: Settings) -> tuple[PyTree, list[str]]:
    """Load the weights of `model.init_from`; return lines about random and unused heads too.

    Raises ConfigError if there is no such checkpoint or its sizes differ, DataError if it is
    damaged.
    """
    source = settings.model.init_from
    # Frozen weights are read in the dtype in which they are held.
    dtype = settings.model.base_dtype if settings.adapter.rank else "float32"
    loaded = hf.load(source, head=False, merges=not settings.adapter.rank, dtype=dtype)
    require_same_network(settings, loaded)
    params, lines = loaded.params, []
    if loaded.lacks and settings.adapter.rank:
        raise ConfigError(f"adapter.rank: {source} has no {loaded.lacks}; set adapter.rank=0")
    if head := loaded.lacks:
        init_fn, _ = build_model(settings)
        params |= {head: jax.jit(init_fn)(jax.random.key(settings.seed))[head]}
        lines.append(f"model.init_from = {source}: has no {head}; a random one is used")
    if loaded.left_out:
        lines.append(f"model.init_from = {source}: left out: {', '.join(loaded.left_out)}")
    if rates := [f"{key}={x}" for key, x in loaded.config.items() if "dropout" in key and x]:
        lines.append(f"model.init_from = {source}: trained without {', '.join(rates)}")
    return params, lines


def split_adapter(params: PyTree) -> tuple[PyTree, PyTree]:
    """Divide the parameters of a model with an adapter into the adapter's and the base weights."""
    parts: tuple[dict, dict] = {}, {}
    for path, leaf in flatten_dict(params).items():
        parts[path[-1] not in LOW_RANK][path] = leaf
    return unflatten_dict(parts[0]), unflatten_dict(parts[1])


def frozen(settings: Settings, params: PyTree, machine: Machine) -> tuple[Base, PyTree | None]:
    """Divide weights into those that stay frozen and an adapter, if they have one already."""
    adapter, base = split_adapter(params)
    base = hf.as_held(base, settings.model.base_dtype)
    sha256 = hf.fingerprint(base)
    if machine.platform == "cpu":  # where host and device then share the arrays
        base = jax.tree.map(jnp.asarray, base)
    return Base(base, sha256), adapter or None


def read_base(settings: Settings, machine: Machine) -> Base:
    """Read the frozen weights of a model with an adapter; raise as `pretrained_params`."""
    if not settings.adapter.rank:
        return Base()
    return frozen(settings, pretrained_params(settings)[0], machine)[0]


def require_same_network(settings: Settings, found: hf.Description | hf.Loaded) -> None:
    """Raise ConfigError, with all sizes that differ, unless `found` is the configured network."""
    model, network = settings.model, build_network(settings)
    names = hf.weight_map(network)
    if names is None or type(found.network) is not names.model:
        raise ConfigError(
            f"model.arch = {model.arch}: {model.init_from} is a {type(found.network).__name__}"
        )
    free = names.free | (set() if found.has_head else {"num_classes"})
    sizes = {ours for ours, _ in names.sizes.values()}
    faults = [
        f"model.{ours} = {getattr(network, ours)}: {model.init_from} has"
        f" {getattr(found.network, ours)}"
        + (f"; unset it: model.{ours}=none" if ours in sizes else "")
        for ours in names.attributes(found.config)
        if ours not in free and getattr(network, ours) != getattr(found.network, ours)
    ]
    own, other = (getattr(each, "adapter", None) for each in (network, found.network))
    if own and other and own != other:
        faults.append(
            f"adapter: {model.init_from} is one of rank {other.rank}, alpha {other.alpha:g} and"
            f" layers {other.layers}; set these, or adapter.rank=0 to train the merged weights"
        )
    if faults:
        raise ConfigError("\n".join(faults))


def measures_inner_products(settings: Settings) -> bool:
    """Whether the configured batch-size test needs inner products of gradients."""
    return BATCH_TESTS[settings.batching.test].needs == "inner_products"


def _labeller(settings: Settings, label_params: Labeller | None) -> Labeller:
    return label_params or ARCHITECTURES[settings.model.arch].label_params or label_by_name


def parameter_labels(settings: Settings, model: Model) -> dict[str, str]:
    """Label each parameter, by its path, if the optimizer or the aggregator uses labels.

    Raises ConfigError if labels are not known, or not possible.
    """
    inner = settings.inner
    used = takes(INNER_OPTIMIZERS[inner.tx], "label_params")
    used = used and (inner.tx != "adamw" or inner.decay == "matrices")
    if not (used or takes(AGGREGATORS[settings.outer.aggregator], "label_params")):
        return {}
    params = jax.eval_shape(model.init_fn, jax.random.key(0))
    with own_code("label_params"):
        labels = _labeller(settings, model.label_params)(params)
    if jax.tree.structure(labels) != jax.tree.structure(params):
        raise ConfigError(
            "label_params: its tree differs from the parameters'; return one label each"
        )
    named = {}
    for (path, leaf), label in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(labels), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = str(label).removeprefix("stacked_")
        least = {"matrix": 2, "embedding": 0, "head": 0, "other": 0}.get(kind, math.inf)
        if leaf.ndim < least + (kind != label):
            raise ConfigError(
                f"label_params: {name} {list(leaf.shape)}: has {label!r}; need matrix (two axes),"
                " embedding, head or other, with stacked_ before it if one more axis counts layers"
            )
        named[name] = str(label)
    return named


def inner_transform(
    settings: Settings,
    tx: optax.GradientTransformation | None = None,
    label_params: Labeller | None = None,
) -> optax.GradientTransformation:
    """Make the workers' optimizer (`tx` or `inner.tx`) with learning rate 1 and gradient clipping.

    A round multiplies each update by the learning rate, which may change with every update.
    """
    inner = settings.inner
    # The state has one structure with and without clipping, so a resumed run may switch it.
    norm = inner.clip_norm
    clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
    if tx is None:
        with own_code(f"inner.tx = {inner.tx}"):
            tx = INNER_OPTIMIZERS[settings.inner.tx](
                beta1=settings.inner.beta1,
                beta2=settings.inner.beta2,
                weight_decay=settings.inner.weight_decay,
                decay=settings.inner.decay,
                label_params=_labeller(settings, label_params),
            )
    return optax.chain(clip, tx)


def aggregator(settings: Settings, label_params: Labeller | None = None) -> Aggregator:
    """Return the configured aggregator, with the labels of the parameters if it takes them."""
    rule = AGGREGATORS[settings.outer.aggregator]
    if not takes(rule, "label_params"):
        return rule
    return functools.partial(rule, label_params=_labeller(settings, label_params))


def outer_transform(
    settings: Settings, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Make the trainers' optimizer (`tx` or `outer.tx`)."""
    outer = settings.outer
    with own_code(f"outer.tx = {outer.tx}"):
        chosen = tx or OUTER_OPTIMIZERS[outer.tx](momentum=outer.momentum)
    return optax.chain(chosen, optax.scale(outer.learning_rate))


def examples_per_pass(settings: Settings, machine: Machine) -> int | None:
    """Rows of one forward and backward pass on a CPU; None elsewhere: the whole micro-batch.

    Activations between two layers should stay in the cache: with 16 rows of 131,072 activations,
    fewer rows took 0.8 of the time. If all fits in the cache, fewer rows took up to 1.12 times the
    time.
    """
    if machine.platform != "cpu":
        return None
    return max(1, _NUMBERS_IN_A_PASS // (settings.data.sequence_length * settings.model.width))


_NUMBERS_IN_A_PASS = 2**19  # activations between two layers: 2 MiB in float32


def program_spec(
    settings: Settings,
    model: Model,
    machine: Machine,
    *,
    mode: Mode | None = None,
    inner_tx: optax.GradientTransformation | None = None,
    outer_tx: optax.GradientTransformation | None = None,
    must_fit: bool = False,
) -> Spec:
    """Collect what all programs of a run share; choose model shards and the attention kernel.

    `must_fit` and errors are those of `model_shards`.
    """
    # One worker's batch keeps a CPU's cores busy: four workers at once took 1.2 times the time,
    # and twice the memory, of four in turn.
    mode = mode or Mode(machine.platform == "cpu", bool(settings.model.remat))
    loss_fn, batching = model.loss_of(mode, "xla"), settings.batching
    parameter_labels(settings, model)  # refuses what is unclear
    _require_no_key(model.eval_loss_fn or loss_fn)
    spec = Spec(
        machine=machine,
        loss_fn=loss_fn,
        params=jax.eval_shape(model.init_fn, jax.random.key(0)),
        inner_tx=inner_transform(settings, inner_tx, model.label_params),
        outer_tx=outer_transform(settings, outer_tx),
        outer=settings.outer,
        num_micro_batches=settings.inner.steps_per_round // settings.outer.fragments,
        row_length=model.row_length,
        sequence_length=model.row_length // settings.data.row_parts
        - (1 if model.num_classes is None else NUM_FIELDS),
        max_test_sequences=batching.test_batch_size or AUTO_TEST_MAX,
        estimator=resolve_estimator("auto", loss_fn),
        inner_products=measures_inner_products(settings),
        reset_inner_state=settings.inner.state == "reset",
        aggregate=aggregator(settings, model.label_params),
        eval_loss_fn=model.eval_loss_fn,
        key_seed=settings.seed if takes(loss_fn, "key") else None,
        in_turn=mode.in_turn,
        remat=mode.remat,
        examples_per_pass=examples_per_pass(settings, machine),
        base=model.base_shapes,
    )
    sizes = settings.ensemble.sizes(whole_pool=True)
    return on_devices(settings, spec, model, sizes, must_fit=must_fit)


def _require_no_key(loss_fn: LossFn) -> None:
    key = inspect.signature(loss_fn).parameters.get("key")
    if key is not None and key.default is key.empty:
        raise ConfigError(
            "loss_fn: needs a `key`, and held-out losses are computed without one; give it the"
            " default None, without dropout, or give fit another function, eval_loss_fn"
        )


def on_devices(
    settings: Settings,
    spec: Spec,
    model: Model | None,
    sizes: tuple[int, ...],
    *,
    must_fit: bool = False,
) -> Spec:
    """Choose model shards for a spec's devices and, unless `model` is None, attention's kernel.

    `sizes`, `must_fit` and errors are those of `model_shards`.
    """
    shards = model_shards(settings, spec, sizes, must_fit=must_fit)
    if model is None:
        return dataclasses.replace(spec, model_shards=shards)
    kernel = model.attention(shards)
    loss_fn = model.loss_of(Mode(spec.in_turn, spec.remat), kernel)
    return dataclasses.replace(spec, model_shards=shards, attention=kernel, loss_fn=loss_fn)


def spec_of(settings: Settings, machine: Machine, mode: Mode | None = None) -> Spec:
    """Collect what all compiled programs of a run of the configured model share (`Spec`)."""
    return program_spec(settings, configured_model(settings, machine), machine, mode=mode)


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from a run's first round to its last, in all attempts to finish it."""

    settings: Settings
    model: Model
    spec: Spec
    corpus: Rows
    heldout: HeldOut
    workdir: Path
    command: str
    by_fit: bool  # whether the caller gave model and data, so that the config describes neither
    accept_data_change: bool
    unit: str  # unit of the loss; empty for a plain number
    began_s: float  # this process's clock when it began to put the run together


def assemble(
    settings: Settings,
    machine: Machine,
    workdir: Path,
    *,
    trains: bool = False,
    model: Model | None = None,
    corpus: Rows | None = None,
    inner_tx: optax.GradientTransformation | None = None,
    outer_tx: optax.GradientTransformation | None = None,
    unit: str | None = None,
    commit: str | None = None,
    command: str = "",
    accept_data_change: bool = False,
) -> Run:
    """Put a run together: its model, what its programs share, its weights, and its rows.

    Args:
      settings: The result of `config.completed`.
      machine: The devices on which the programs run.
      workdir: The run's folder.
      trains: Whether the run goes on here. If so, its state must fit in memory, and a run that
        begins gets the weights of `model.init_from`.
      model: The model, and below it rows and optimizers, of the caller of `fit`; None: those that
        the settings describe.
      corpus: See `model`.
      inner_tx: See `model`.
      outer_tx: See `model`.
      unit: Unit of the loss. None: nats/example for a classifier, nats/token if the corpus knows
        its tokens per byte, else none.
      commit: Commit of the hub's data set. None: the recorded one. Empty: where `data.revision`
        now leads.
      command: As in `train`.
      accept_data_change: As in `train`.
    """
    began_s = time.perf_counter()
    by_fit, model = model is not None, model or configured_model(settings, machine)
    txs = {"inner_tx": inner_tx, "outer_tx": outer_tx}
    spec = program_spec(settings, model, machine, must_fit=trains, **txs)
    notes: list[str] = []
    begins = trains and not by_fit and not list_rounds(workdir / "checkpoints")
    if settings.model.init_from and begins or settings.adapter.rank:
        params, notes = pretrained_params(settings)
        model = model._replace(params=params)
    if settings.adapter.rank:
        base, adapter = frozen(settings, model.params, machine)
        model = model._replace(base=base, params=adapter)
    before = recorded(workdir) if commit is None else None
    if before and before.base_fingerprint != model.base.fingerprint:
        raise DataError(
            f"{workdir}: model.init_from has other weights than when this run began; restore them,"
            " or start a run in another folder"
        )
    if corpus is None:
        commit = commit or (before.data_commit if before else "")
        corpus = load_corpus(settings, num_classes=model.num_classes, commit=commit, run=workdir)
        if trains:
            print(*notes, corpus.describe(), sep="\n")
    settings = with_rows(settings, corpus)
    if unit is None:
        is_text = model.num_classes is None and corpus.tokens_per_byte is not None
        unit = "nats/token" if is_text else "nats/example" * (model.num_classes is not None)
    # Rows of labelled texts are as long as the longest of them.
    unused = spec.row_length - corpus.heldout_rows.shape[1]
    length = spec.sequence_length - unused
    return Run(
        settings=settings,
        model=model,
        spec=dataclasses.replace(
            spec,
            num_micro_batches=settings.inner.steps_per_round // settings.outer.fragments,
            row_length=spec.row_length - unused,
            sequence_length=length,
        ),
        corpus=corpus,
        heldout=heldout_of(settings, corpus.heldout_rows, model.num_classes),
        workdir=workdir,
        command=command,
        by_fit=by_fit,
        accept_data_change=accept_data_change,
        unit=unit,
        began_s=began_s,
    )


def heldout_of(
    settings: Settings, rows_EL: np.ndarray | DocumentRows, num_classes: int | None = None
) -> HeldOut:
    """Divide held-out rows as a run does; an attempt replaces the size of their batch."""
    return split_heldout(
        rows_EL,
        num_sequences=settings.eval.num_sequences,
        batch_size=settings.batching.initial_batch_size,
        num_classes=num_classes,
        num_trainers=settings.ensemble.num_trainers,
    )


def small_corpus(settings: Settings, run: Path | None) -> Corpus | None:
    """Load the rows of a configured text if they are here, and small enough for a plan."""
    if not is_small(settings, run):
        return None
    return load_corpus(settings, num_classes=class_count(settings), run=run, note=lambda line: None)


def with_rows(settings: Settings, corpus: Rows) -> Settings:
    """Return settings that know the rows from which the trainers draw; 0 if `corpus` has none.

    Raises ConfigError if `num_epochs` needs them, or the warm-up would outlast its updates.
    """
    rows, inner, epochs = len(getattr(corpus, "rows", ())), settings.inner, settings.num_epochs
    if epochs and not rows:
        raise ConfigError("num_epochs: the corpus has no `rows` to count; set num_rounds")
    subset = max(1, int(settings.data.subset_frac * rows)) * settings.ensemble.num_trainers
    settings = settings.with_rows(min(rows, subset))
    tokens = inner.warmup_updates * settings.round_tokens / settings.inner.steps_per_round
    if epochs and inner.warmup_updates and tokens >= settings.last_token:
        raise ConfigError(
            f"inner.warmup_updates = {inner.warmup_updates}, num_epochs = {epochs:g}: the warm-up"
            f" would outlast the passes over {counted(rows, 'row')}; shorten it"
        )
    return settings


def sampler(run: Run) -> Callable[[PyTree, PyTree], tuple[str, str]] | None:
    """Make a function that continues the first held-out text; it returns both texts, decoded.

    It is given parameters, and frozen weights or None.

    None if `eval.sample_tokens` is 0 or `fit` has the model. ConfigError if it is no decoder.
    """
    settings = run.settings
    count, length = settings.eval.sample_tokens, settings.data.sequence_length
    if not count or run.by_fit:
        return None
    machine = run.spec.machine if settings.adapter.rank else None  # a scan needs stacked weights
    network, corpus = build_network(settings, machine, kernel="xla"), run.corpus
    if not isinstance(network, llama.Llama):
        raise ConfigError(
            f"eval.sample_tokens = {count}: a {type(network).__name__} writes no text; set 0"
        )
    assert isinstance(corpus, Corpus)
    tokenizer = corpus.tokenizer
    row, size = run.heldout.report_EL[0], length // 2
    if settings.data.is_chat:  # all before the first answer
        size = int(np.flatnonzero(row[2 * (length + 1) :])[0])
    size = max(1, min(size, settings.model.max_length - count))
    first = row[length + size] if settings.data.row_parts > 1 else 0
    prompt_1L = np.asarray(row[None, first:size], np.int32)

    def sample(params, base):
        how = {"num_tokens": count, "temperature": 0.8, "key": jax.random.key(0), "base": base}
        (tokens,) = fetch(llama.generate(network, params, prompt_1L, **how))
        parts = (tokens[: size - first], tokens[size - first :])
        start, text = (readable(part, tokenizer, max_chars=16 * len(part)) for part in parts)
        return start, text

    return sample


def initial_ensemble(run: Run, control: Control) -> Ensemble:
    """Make parameters and optimizer states at the start of a run, where they are needed."""
    spec, layout = run.spec, Layout(control.sizes)

    def make(key, params):
        params = run.model.init_fn(key) if params is None else params
        return first_ensemble(spec, layout.sizes, params)

    shardings = placement(spec, layout).ensemble(ensemble_spec(spec, layout))
    key = jax.random.key(run.settings.seed)
    return jax.jit(make, out_shardings=shardings)(key, run.model.params)
