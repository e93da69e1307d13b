"""From settings to functions: the network, its loss, the optimizers, what programs are made of."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import PyTree

from adloco_jax import hf
from adloco_jax.adloco import start
from adloco_jax.core.aggregate import AGGREGATORS
from adloco_jax.core.arguments import takes, with_knobs
from adloco_jax.core.batching import BATCH_TESTS
from adloco_jax.core.gradstats import resolve_estimator
from adloco_jax.core.optimizers import INNER_OPTIMIZERS, OUTER_OPTIMIZERS
from adloco_jax.core.types import LossFn
from adloco_jax.data import Corpus, load_corpus
from adloco_jax.data.corpus import check_corpus
from adloco_jax.data.hub import open_stream
from adloco_jax.data.labelled import NUM_FIELDS, Labelled, load_labelled
from adloco_jax.data.sources import Intake
from adloco_jax.data.streaming import Streaming, load_stream
from adloco_jax.data.tokenizers import load_fitting_tokenizer
from adloco_jax.errors import ConfigError
from adloco_jax.hf import Network
from adloco_jax.models.bert import Bert, classification_loss
from adloco_jax.models.llama import Llama, next_token_loss
from adloco_jax.run.evaluate import MAX_GUARD_SEQUENCES
from adloco_jax.run.ledger import batch_history, read
from adloco_jax.run.programs import AUTO_TEST_MAX, Spec, fewest_model_shards
from adloco_jax.settings import Settings

InitFn = Callable[[Array], PyTree]
"""`init_fn(key) -> params`, from a typed PRNG key."""


def load_data(settings: Settings) -> Corpus | Labelled | Streaming:
    """The configured text or tokens; with classes, where the network is to learn them.

    Of `data.source=hf` no more is read than the held-out rows take.

    Raises:
      ConfigError: As `load_corpus`.
      DataError: As `load_corpus`.
    """
    data, model = settings.data, settings.model
    if model.arch == "bert":
        return load_labelled(
            path=data.path,
            heldout_path=data.heldout_path,
            text_column=data.text_column,
            label_column=data.label_column,
            num_classes=model.num_classes,
            tokenizer=load_fitting_tokenizer(data.tokenizer, model.vocab_size),
            sequence_length=data.sequence_length,
            num_sequences=data.num_sequences,
            heldout_frac=data.heldout_frac,
            subset_frac=data.subset_frac,
            num_streams=settings.ensemble.num_workers,
            seed=settings.seed,
            intake=Intake(data.max_bad_rows, data.on_bad_shard == "skip"),
        )
    if data.source == "hf":
        return load_stream(
            path=data.path,
            name=data.name,
            split=data.split,
            text_column=data.text_column,
            tokenizer=data.tokenizer,
            sequence_length=data.sequence_length,
            num_sequences=data.num_sequences,
            heldout_frac=data.heldout_frac,
            num_heldout_rows=MAX_GUARD_SEQUENCES + settings.eval.num_sequences,
            vocab_size=model.vocab_size,
            max_bad_rows=data.max_bad_rows,
        )
    return load_corpus(
        source=data.source,
        path=data.path,
        heldout_path=data.heldout_path,
        text_column=data.text_column,
        tokenizer=data.tokenizer,
        sequence_length=data.sequence_length,
        num_sequences=data.num_sequences,
        heldout_frac=data.heldout_frac,
        subset_frac=data.subset_frac,
        num_streams=settings.ensemble.num_workers,
        seed=settings.seed,
        vocab_size=model.vocab_size,
        on_bad_shard=data.on_bad_shard,
        max_bad_rows=data.max_bad_rows,
    )


def check_data(settings: Settings) -> None:
    """Refuses data that `load_data` would refuse before it reads any text: seconds, not minutes.

    Raises:
      ConfigError: If keys contradict one another, the tokenizer does not suit the model, or a data
        set is not on the hub.
      DataError: If files or the tokenizer are missing or damaged, as far as names, sizes and
        headers tell.
    """
    data, vocab_size = settings.data, settings.model.vocab_size
    if data.source == "hf":
        load_fitting_tokenizer(data.tokenizer, vocab_size)
        open_stream(data.path, data.name, data.split, text_column=data.text_column)
        return
    check_corpus(
        source=data.source,
        path=data.path,
        heldout_path=data.heldout_path,
        tokenizer=data.tokenizer,
        sequence_length=data.sequence_length,
        vocab_size=vocab_size,
    )


def class_count(settings: Settings) -> int | None:
    """Classes to tell apart, where that is what the network learns."""
    return settings.model.num_classes if settings.model.arch == "bert" else None


def row_length(settings: Settings) -> int:
    """Integers in the longest row: the tokens, and a last target or the fields of `labelled`."""
    fields = 1 if class_count(settings) is None else NUM_FIELDS
    return settings.data.sequence_length + fields


def attention(settings: Settings) -> str:
    """How the configured network attends: "cudnn" where all that it needs is there, else "xla".

    Raises:
      ConfigError: If `model.attention` asks for cuDNN in vain; says why.
    """
    lacks = _cudnn_lacks(settings)
    if settings.model.attention == "cudnn" and lacks:
        raise ConfigError(f"model.attention = cudnn: {lacks}; use auto")
    return "xla" if lacks or settings.model.attention == "xla" else "cudnn"


def _cudnn_lacks(settings: Settings) -> str:
    """Why cuDNN's fused attention cannot be used; empty if it can.

    Its limits as `jax.nn.dot_product_attention` states them, the smallest of all GPUs'.
    """
    model = settings.model
    head_size = model.width // model.num_heads
    if model.arch != "llama":
        return f"not for model.arch = {model.arch}"
    if model.dtype != "bfloat16":
        return "needs model.dtype = bfloat16"
    if head_size > 128 or head_size % 8:
        return f"heads have {head_size} features, it takes multiples of 8 up to 128"
    if measures_inner_products(settings):
        return f"batching.test = {settings.batching.test} needs forward mode, which it lacks"
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return "needs an NVIDIA GPU"
    if tuple(map(int, device.compute_capability.split("."))) < (8, 0):
        return f"{device.device_kind} is older than compute capability 8.0"
    return ""


def build_network(settings: Settings) -> Network:
    """The configured network."""
    model, scan_layers = settings.model, jax.default_backend() != "cpu"
    if model.arch == "bert":
        return Bert(
            vocab_size=model.vocab_size,
            width=model.width,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            mlp_width=model.mlp_width,
            max_length=model.max_length,
            num_classes=model.num_classes,
            norm_eps=model.norm_eps,
            dtype=model.dtype,
            remat=model.remat,
            scan_layers=scan_layers,
        )
    return Llama(
        vocab_size=model.vocab_size,
        width=model.width,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        mlp_width=model.mlp_width,
        max_length=model.max_length,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        dtype=model.dtype,
        remat=model.remat,
        attention=attention(settings),
        scan_layers=scan_layers,
    )


def build_model(settings: Settings) -> tuple[InitFn, LossFn]:
    """The configured network as two plain functions."""
    network = build_network(settings)
    tokens_BL = jnp.zeros((1, 1), jnp.int32)
    if isinstance(network, Bert):
        inputs, loss_fn = (tokens_BL, jnp.ones(1, jnp.int32)), classification_loss(network)
    else:
        chunk = settings.model.loss_chunk
        inputs, loss_fn = (tokens_BL,), next_token_loss(network, sequences_per_chunk=chunk)

    def init_fn(key):
        return network.init(key, *inputs)["params"]

    return init_fn, loss_fn


def pretrained_params(settings: Settings) -> PyTree:
    """The weights that `model.init_from` names, for the configured network.

    Raises:
      ConfigError: If the checkpoint is of another size, or its name leads nowhere.
      DataError: If it cannot be used.
    """
    model = settings.model
    loaded = hf.load(model.init_from, head=not model.reinit_head)
    require_same_network(settings, loaded.network)
    if not model.reinit_head:
        return loaded.params
    init_fn, _ = build_model(settings)
    head = hf.head_of(loaded.network)
    return loaded.params | {head: jax.jit(init_fn)(jax.random.key(settings.seed))[head]}


def require_same_network(settings: Settings, found: Network) -> None:
    """Compares the network of `model.init_from` with the configured one.

    Raises:
      ConfigError: Naming all sizes that differ.
    """
    model, network = settings.model, build_network(settings)
    if type(found) is not type(network):
        raise ConfigError(
            f"model.arch = {model.arch}: {model.init_from} is a {type(found).__name__}"
        )
    # On these, what the weights mean does not depend.
    free = {"name", "parent", "dtype", "remat", "attention", "scan_layers"}
    free |= {"max_length"} if isinstance(network, Llama) else set()
    free |= {"num_classes"} if model.reinit_head else set()
    faults = [
        f"model.{name} = {getattr(network, name)}: {model.init_from} has"
        f" {getattr(found, name)}; set --config.model.{name} to that"
        for name in (field.name for field in dataclasses.fields(network))
        if name not in free and getattr(network, name) != getattr(found, name)
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def replayed_batches(settings: Settings) -> dict[str, list[int]]:
    """The batches that `batching.replay` names, by trainer; none where it names no run.

    Raises:
      ConfigError: If they do not fit the config.
      DataError: If the run's ledger cannot be read.
    """
    batching = settings.batching
    if batching.test != "replay":
        return {}
    events = read(Path(batching.replay) / "ledger.jsonl")
    history = batch_history(events, num_trainers=settings.ensemble.num_trainers)
    firsts = {batches[0] for batches in history.values()}
    largest = max((max(batches) for batches in history.values()), default=0)
    if firsts != {batching.initial_batch_size} or largest > batching.batch_cap:
        found = f"begins with {firsts.pop()} and reaches {largest}" if firsts else "has no round"
        raise ConfigError(
            f"batching.replay = {batching.replay!r}: that run {found}; set"
            " batching.initial_batch_size to its first batch and batching.batch_cap to no less"
            " than its largest"
        )
    return history


def measures_inner_products(settings: Settings) -> bool:
    """Whether the batch-size test needs inner products of gradients."""
    return BATCH_TESTS[settings.batching.test].needs == "inner_products"


def inner_transform(
    settings: Settings, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """The workers' optimizer at learning rate 1: the rate is an input of each update.

    Args:
      settings: The run's.
      tx: In place of the one that `inner.tx` names.
    """
    inner = settings.inner
    # A state of one structure with and without clipping, so that a run may change it.
    clip = optax.identity()
    if inner.clip_norm is not None:
        clip = optax.clip_by_global_norm(inner.clip_norm)
    return optax.chain(clip, INNER_OPTIMIZERS[inner.tx](inner) if tx is None else tx)


def outer_transform(
    settings: Settings, tx: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """The trainers' optimizer on the pseudo-gradient, at the configured rate; `tx` as above."""
    outer = settings.outer
    chosen = OUTER_OPTIMIZERS[outer.tx](outer) if tx is None else tx
    return optax.chain(chosen, optax.scale(outer.learning_rate))


def worker_parallelism(settings: Settings) -> int | None:
    """How many of a device's workers compute as one batch; None: all.

    A CPU has few cores, which one worker's batch fills: four workers at once took 1.2 times as long
    as in turn, and twice the memory.
    """
    chosen = settings.ensemble.worker_parallelism
    return 1 if chosen is None and jax.default_backend() == "cpu" else chosen


def examples_per_pass(settings: Settings) -> int | None:
    """How many rows of a micro-batch a device takes forward and backward together; None: all.

    A CPU is faster where its cache keeps what a layer passes on: passes of so many rows took 0.8 of
    the time of 16 whole ones, of 131,072 numbers each, and up to 1.12 where they need not be cut.
    """
    if jax.default_backend() != "cpu":
        return None
    return max(1, _NUMBERS_IN_A_PASS // (settings.data.sequence_length * settings.model.width))


_NUMBERS_IN_A_PASS = 2**19  # between two layers: 2 MiB in float32


def program_spec(
    settings: Settings,
    init_fn: InitFn,
    loss_fn: LossFn,
    row_length: int,
    num_classes: int | None = None,
    inner_tx: optax.GradientTransformation | None = None,
    outer_tx: optax.GradientTransformation | None = None,
) -> Spec:
    """What every program of the run shares, from the settings and the model's functions."""
    batching = settings.batching
    uses_inner_products = measures_inner_products(settings)
    spec = Spec(
        loss_fn=loss_fn,
        params=jax.eval_shape(init_fn, jax.random.key(0)),
        inner_tx=inner_transform(settings, inner_tx),
        outer_tx=outer_transform(settings, outer_tx),
        num_micro_batches=settings.inner.steps_per_round // settings.outer.fragments,
        row_length=row_length,
        sequence_length=row_length - (1 if num_classes is None else NUM_FIELDS),
        max_test_sequences=batching.test_batch_size or AUTO_TEST_MAX,
        estimator=resolve_estimator(
            batching.estimator, loss_fn, inner_products=uses_inner_products
        ),
        inner_products=uses_inner_products,
        reset_inner_state=settings.inner.state == "reset",
        precision=settings.outer.precision,
        aggregate=with_knobs(AGGREGATORS[settings.outer.aggregator], vars(settings.outer)),
        key_seed=settings.seed if takes(loss_fn, "key") else None,
        worker_parallelism=worker_parallelism(settings),
        examples_per_pass=examples_per_pass(settings),
        num_fragments=settings.outer.fragments,
        delay=settings.outer.delay_updates,
        mixing=settings.outer.mixing,
        own_params=settings.outer.own_params,
    )
    ensemble, num_devices = settings.ensemble, len(jax.devices())
    shards = ensemble.model_shards
    if shards is None:
        owners = tuple(start(settings, 1).owners)
        shards = fewest_model_shards(spec, owners, memory_frac=batching.memory_frac)
    elif num_devices % shards:
        raise ConfigError(
            f"ensemble.model_shards = {shards}: does not divide the {num_devices} devices"
        )
    return dataclasses.replace(spec, model_shards=shards)
