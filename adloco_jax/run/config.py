"""Every knob of a run: declared once with its default and range, and checked all at once.

A config file starts from `default_config()`, a locked ConfigDict, and overrides what differs.
`validate` turns the whole into frozen dataclasses; nothing after it meets a ConfigDict. A new knob
is one line in its group below: the annotation is its type, `_knob` its default and range.
"""

import dataclasses
import difflib
import operator
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ml_collections import ConfigDict, FieldReference

from adloco_jax.errors import ConfigError

_COUNT = "[1, 2147483647]"  # counts are int32 on the device
_COUNT_OR_0 = "[0, 2147483647]"


def _knob(default: object, within: str = "") -> Any:
    """A knob's default (of an optional one: how unset is written), and a number's interval."""
    return dataclasses.field(metadata={"default": default, "within": within})


INNER_PRODUCT_TESTS = ("inner_product", "augmented")


@dataclasses.dataclass(frozen=True)
class Model:
    """The network; the defaults are a Llama for bytes that a CPU trains in a minute."""

    arch: Literal["llama", "bert"] = _knob("llama")  # bert: classifies whole texts
    vocab_size: int = _knob(257, "[2, 2147483647]")  # V; bytes need 257 (256 and end of text)
    width: int = _knob(64, _COUNT)  # D
    num_layers: int = _knob(2, _COUNT)  # N
    num_heads: int = _knob(4, _COUNT)  # H, query heads
    num_kv_heads: int = _knob(2, _COUNT)  # G, each serves num_heads / num_kv_heads; llama only
    mlp_width: int = _knob(176, _COUNT)  # F
    max_length: int = _knob(512, _COUNT)  # tokens, the longest context the model is meant for
    norm_eps: float = _knob(1e-5, "(0, 1)")  # of RMSNorm, or of bert's LayerNorm
    rope_theta: float = _knob(10_000.0, "[1, 1e9]")  # base of the rotary wavelengths; llama only
    num_classes: int = _knob(2, "[2, 2147483647]")  # C, bert only
    dtype: Literal["float32", "bfloat16"] = _knob("float32")  # compute; parameters stay float32
    # auto: cuDNN's fused kernel where it can be used (bfloat16 on newer NVIDIA GPUs), else xla.
    attention: Literal["auto", "xla", "cudnn"] = _knob("auto")
    remat: bool = _knob(False)  # recompute each layer in the backward pass: less memory, more time
    loss_chunk: int = _knob(0, _COUNT_OR_0)  # sequences per chunk of the cross-entropy, 0: all
    # Folder in Hugging Face layout, or hub name, whose weights all trainers start from; the sizes
    # above must be its own. Empty: random weights.
    init_from: str = _knob("")
    reinit_head: bool = _knob(False)  # with init_from: a random head, the same for all trainers


@dataclasses.dataclass(frozen=True)
class Data:
    """Where text comes from, and how it becomes rows of sequence_length + 1 tokens."""

    # stdlib: no download. hf: a Hugging Face data set, read while the run goes on.
    source: Literal["stdlib", "text", "jsonl", "tokens", "hf"] = _knob("stdlib")
    path: str = _knob("")  # file, folder, prepared folder or glob; of hf, also a hub name
    name: str = _knob("")  # configuration of a data set; hf only
    split: str = _knob("train")  # of a data set; hf only
    heldout_path: str = _knob("")  # as path; empty: a fraction of the documents is held out
    text_column: str = _knob("text")  # field of a JSONL row, column of hf
    label_column: str = _knob("label")  # likewise, its class from 0 on; bert only
    tokenizer: str = _knob("bytes")  # bytes, tokenizer.json, *.model, folder, or hub name
    sequence_length: int = _knob(128, _COUNT)  # L, tokens that are predicted per row
    num_sequences: int | None = _knob(None, _COUNT)  # upper limit of training rows; unset: all
    heldout_frac: float = _knob(0.05, "(0, 1)")  # of documents; not with heldout_path, prepared
    subset_frac: float = _knob(1.0, "(0, 1]")  # of the training rows, each trainer's own draw
    on_bad_shard: Literal["reject", "skip"] = _knob("reject")  # a damaged file, skipped whole
    max_bad_rows: int = _knob(0, _COUNT_OR_0)  # JSON lines to leave out before one is an error


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Trainers, and the workers they share."""

    num_trainers: int = _knob(4, _COUNT)  # M at the start (AdLoCo table A.2)
    num_workers: int = _knob(4, _COUNT)  # R, the whole pool, not per trainer
    # independent: each trainer draws its own initial parameters. A negative control: averaging two
    # such networks raised the loss of a character model from 2.43 to 2.67 (ALGORITHM 1).
    init: Literal["shared", "independent"] = _knob("shared")
    # Devices that share one worker's parameters and optimizer state (fully sharded data parallel);
    # auto: no more than its memory needs.
    model_shards: int | None = _knob("auto", _COUNT)
    # Workers of one device that compute as one batch, the others after them: less memory, and on a
    # CPU less time. auto: one on a CPU, elsewhere all.
    worker_parallelism: int | None = _knob("auto", _COUNT)
    allocation: Literal["demand", "retire"] = _knob("demand")  # workers after a merge (ALGORITHM 4)


@dataclasses.dataclass(frozen=True)
class Inner:
    """What a worker does between two synchronisations."""

    steps_per_round: int = _knob(200, _COUNT)  # S (AdLoCo table A.2)
    unit: Literal["updates", "microbatches"] = _knob("updates")  # of S; AdLoCo: microbatches
    tx: Literal["adamw", "sgd"] = _knob("adamw")
    learning_rate: float = _knob(4e-4, "(0, 100]")  # DiLoCo's; AdLoCo goes on from a model at 2e-5
    warmup_updates: int = _knob(0, _COUNT_OR_0)  # linear from zero, in the trainer's own updates
    # After the warm-up; cosine and linear fall to zero over the run's planned updates.
    schedule: Literal["constant", "cosine", "linear"] = _knob("constant")
    weight_decay: float = _knob(0.1, "[0, 100]")  # decoupled (AdLoCo 6.1); adamw only
    beta1: float = _knob(0.9, "[0, 1)")  # decay of the first moment (Kingma & Ba 2015)
    beta2: float = _knob(0.999, "[0, 1)")  # of the second; the same source, PyTorch's default too
    clip_norm: float | None = _knob(None, "(0, 1e9]")  # of an update's gradient; unset: no clipping
    state: Literal["keep", "reset"] = _knob("keep")  # over rounds; the reference resets
    lr_on_growth: Literal["none", "sqrt", "linear"] = _knob("none")  # in batch / initial batch


@dataclasses.dataclass(frozen=True)
class Outer:
    """What a trainer does with its workers' pseudo-gradient."""

    tx: Literal["nesterov", "sgd", "adamw"] = _knob("nesterov")  # DiLoCo's; AdLoCo: sgd at 0.5
    learning_rate: float = _knob(0.7, "(0, 100]")
    momentum: float = _knob(0.9, "[0, 1)")  # nesterov only
    weight_decay: float = _knob(0.0, "[0, 100]")  # adamw only
    # In which outer gradients travel; sums and averages of them are float32 (arXiv 2501.18512).
    precision: Literal["float32", "bfloat16", "int8", "int4"] = _knob("float32")
    # Streaming DiLoCo (the same source, sections 2.2 and 2.3); 1, 0 and 0: all at once, at the end.
    fragments: int = _knob(1, _COUNT)  # of the parameters, synchronised in turn within a round
    # From a fragment's sending to its arrival (accumulating: in micro-batches); 1 in the paper.
    delay_updates: int = _knob(0, _COUNT_OR_0)
    mixing: float = _knob(0.0, "[0, 1)")  # of a worker's own, what an arrival leaves; paper: 0.5

    @property
    def own_params(self) -> bool:
        """Whether workers keep parameters of their own from one synchronisation to the next."""
        return self.fragments > 1 or self.delay_updates > 0

    @property
    def leaves_untold(self) -> bool:
        """Whether workers have something at the end of a round that their trainer does not have."""
        return self.fragments > 1 or self.mixing > 0


@dataclasses.dataclass(frozen=True)
class Batching:
    """How the requested batch per worker grows (ALGORITHM 2 and 3); batches are in sequences."""

    test: Literal["norm", "inner_product", "augmented", "constant", "ramp", "replay"] = _knob(
        "norm"
    )
    mode: Literal["unbiased", "paper"] = _knob("unbiased")
    scope: Literal["trainer", "worker"] = _knob("trainer")  # whose gradient passes; AdLoCo: worker
    eta: float = _knob(0.8, "(0, 100]")  # noise to signal, norm test (AdLoCo table A.2)
    vartheta: float = _knob(0.9, "(0, 100]")  # inner-product tests; AdLoCo 0.01: see ALGORITHM 2
    nu: float = _knob(1.0, "(0, 100]")  # augmented test, orthogonal part; AdLoCo 0.3: the same
    # How per-example gradients are measured (core.gradstats); auto: taps where the model has them.
    estimator: Literal["auto", "taps", "vmap", "chunks", "jvp"] = _knob("auto")
    initial_batch_size: int = _knob(1, _COUNT)  # per worker (AdLoCo table A.2)
    # Per worker, what a device holds: the micro-batch. auto: the largest bucket whose programs fit.
    max_batch_size: int | None = _knob("auto", _COUNT)
    memory_frac: float = _knob(0.8, "(0, 1]")  # of a device's memory (on a CPU, RAM), for auto
    batch_cap: int = _knob(1024, _COUNT)  # no request goes above
    max_growth: int = _knob(4, _COUNT)  # factor from one request to the next
    monotone: bool = _knob(True)  # a request never falls
    smoothing: float = _knob(0.9, "[0, 1)")  # decay per test of the averaged statistics
    # Sequences per trainer and test: auto (4 % of the round's, 8 to 256), or a number.
    test_batch_size: int | None = _knob("auto", "[8, 2147483647]")
    # Micro-batch sizes to compile for; empty: powers of two and their midpoints.
    buckets: tuple[int, ...] = _knob((), _COUNT)
    # Pairs (from round, batch), for test=ramp only; --config.batching.ramp="((0, 4), (10, 8))".
    ramp: tuple[tuple[int, int], ...] = _knob((), _COUNT_OR_0)
    # Folder of a run whose batches are used again, trainer by trainer, or of a run with another
    # number of trainers their mean over workers, rounded up; for test=replay only.
    replay: str = _knob("")


@dataclasses.dataclass(frozen=True)
class Switch:
    """When a batch that no device holds is accumulated (ALGORITHM 3)."""

    # lengthen (ours): the micro-batches that would be accumulated are updates of their own, so that
    # rounds grow in place of batches.
    mode: Literal["threshold", "accumulate", "clip", "lengthen"] = _knob("threshold")
    multiplier: int = _knob(2, _COUNT)  # accumulate above this many times max_batch_size


@dataclasses.dataclass(frozen=True)
class Merge:
    """Which trainers become one, and when (ALGORITHM 4)."""

    policy: Literal["worst_with_worst", "best_with_worst", "none"] = _knob("worst_with_worst")
    every_rounds: int = _knob(3, _COUNT)  # AdLoCo table A.2
    width: int = _knob(2, "[2, 2147483647]")  # trainers that become one
    representative_batch: Literal["max", "total"] = _knob("max")  # per worker, or kept in total
    max_barrier: float | None = _knob(None, "[0, 1e9]")  # nats/token a merge may cost; unset: any
    on_refusal: Literal["keep", "retire"] = _knob("keep")  # the weaker trainer of a refused merge


@dataclasses.dataclass(frozen=True)
class Eval:
    """Loss on held-out text: on the same rows whatever the seed."""

    every_rounds: int = _knob(1, _COUNT)
    num_sequences: int = _knob(64, _COUNT)  # upper limit behind the reported figure


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the whole state is saved, besides at the end and when the run is told to stop."""

    every_rounds: int | None = _knob(None, _COUNT)  # unset: by time alone
    every_s: float = _knob(300.0, "[0, 1e9]")  # seconds from save to save, at a round's end
    keep: int = _knob(2, _COUNT)  # of the last ones; the one of the lowest held-out loss stays too
    on_save_error: Literal["stop", "continue"] = _knob("stop")  # the save before stays either way
    # End the process, with where each thread stood, if no round begins for so many seconds: more
    # than a round with its compilation, evaluation and save take. For what restarts it.
    watchdog_s: float | None = _knob(None, "(0, 1e9]")


@dataclasses.dataclass(frozen=True)
class Log:
    """What the terminal shows, and who else is told; see `adloco_jax.run.trackers`."""

    every_rounds: int = _knob(1, _COUNT)  # of the terminal alone
    tensorboard: bool = _knob(False)  # to tensorboard/ in the run's folder; an extra
    wandb: bool = _knob(False)  # Weights & Biases; an extra


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run, checked: plain Python values, unset is None, test_batch_size "auto" is None."""

    model: Model
    data: Data
    ensemble: Ensemble
    inner: Inner
    outer: Outer
    batching: Batching
    switch: Switch
    merge: Merge
    eval: Eval
    checkpoint: Checkpoint
    log: Log
    seed: int = _knob(0, "[0, 4294967295]")
    num_rounds: int = _knob(20, _COUNT)  # AdLoCo table A.2: outer steps
    # Ends the run after the round in which all trainers together have used so many; unset: rounds
    # alone end it. Schedules then fall over tokens, as growing batches make updates no measure.
    num_tokens: int | None = _knob(None, "[1, 4e18]")


# The schema above as tables: the groups, and each knob's field under its full key.
_GROUPS: dict[str, Any] = {
    field.name: field.type
    for field in dataclasses.fields(Settings)
    if dataclasses.is_dataclass(field.type)
}
KNOBS: dict[str, dataclasses.Field] = {
    field.name: field for field in dataclasses.fields(Settings) if field.name not in _GROUPS
} | {
    f"{name}.{field.name}": field
    for name, group in _GROUPS.items()
    for field in dataclasses.fields(group)
}


def default_config() -> ConfigDict:
    """The locked config that every config file starts from: each knob at its default."""
    config: dict[str, Any] = {group: {} for group in _GROUPS}
    for key, knob in KNOBS.items():
        group, _, name = key.rpartition(".")
        default, types = knob.metadata["default"], get_args(knob.type)
        if NoneType in types:
            # A field made from "auto" would take no int; one of type object takes both.
            default = FieldReference(default, field_type=types[0] if default is None else object)
        (config[group] if group else config)[name] = default
    return ConfigDict(config).lock()


def validate(config: ConfigDict | Mapping[str, Any]) -> Settings:
    """Checks a whole config and gives it as plain frozen dataclasses.

    Args:
      config: The groups and knobs of `default_config()`; unlocked or nested plain dicts will do.

    Returns:
      The settings; `batching.buckets` is resolved to every size in use, ascending.

    Raises:
      ConfigError: If anything is unknown, missing, of a wrong type, out of range or contradictory:
        all faults at once, one line each.
    """
    given, faults = _flatten(config)
    values = {}
    for key, value in given.items():
        try:
            values[key] = _read(KNOBS[key], value)
        except ValueError:
            faults.append(value_fault(key, value))
    for keys, holds, need in _RULES:
        if values.keys() >= set(keys) and not holds(*(values[key] for key in keys)):
            pairs = ", ".join(f"{key} = {_shown(values[key])}" for key in keys)
            faults.append(f"{pairs}: {need}")
    if faults:
        raise ConfigError("\n".join(faults))
    values["batching.buckets"] = _resolve_buckets(
        values["batching.buckets"],
        largest=values["batching.max_batch_size"] or values["batching.batch_cap"],
    )
    groups = {
        name: group(
            **{field.name: values[f"{name}.{field.name}"] for field in dataclasses.fields(group)}
        )
        for name, group in _GROUPS.items()
    }
    return Settings(**{key: values[key] for key in KNOBS if "." not in key}, **groups)


def allowed(key: str) -> str:
    """What a known key may hold, and its default, in words."""
    default = KNOBS[key].metadata["default"]
    shown = "unset" if default is None else repr(default)
    return f"{_in_words(KNOBS[key].type, KNOBS[key].metadata['within'])} (default: {shown})"


def value_fault(key: str, value: object) -> str:
    """The line that refuses a known key's value."""
    return f"{key} = {_shown(value)}: must be {allowed(key)}"


def unknown_key_fault(key: str) -> str:
    """The line that refuses an unknown key and names the nearest known one."""
    name = key.rpartition(".")[2]
    namesakes = [known for known in KNOBS if known.rpartition(".")[2] == name]
    nearest = namesakes or difflib.get_close_matches(key, KNOBS, n=1, cutoff=0.0)
    return f"{key}: no such key; did you mean {' or '.join(nearest)}?"


def _flatten(config: object) -> tuple[dict[str, Any], list[str]]:
    """The values under known keys, and a line for each key that is unknown, missing or no group."""
    if not isinstance(config, ConfigDict | Mapping):
        return {}, [f"config = {_shown(config)}: must be a config, as default_config() gives one"]
    given: dict[str, Any] = {}
    for name, value in config.items():
        if name in _GROUPS and isinstance(value, ConfigDict | Mapping):
            given |= {f"{name}.{key}": member for key, member in value.items()}
        else:
            given[str(name)] = value
    faults = [
        f"{key} = {_shown(value)}: must be a group of keys, as in default_config()"
        if key in _GROUPS
        else unknown_key_fault(key)
        for key, value in given.items()
        if key not in KNOBS
    ]
    faults += [
        f"{key}: missing; start from default_config(), which has every key"
        for key in KNOBS
        if key not in given and key.partition(".")[0] not in given
    ]
    return {key: given[key] for key in KNOBS if key in given}, faults


def _read(knob: dataclasses.Field, value: Any) -> Any:
    """The value as Settings holds it; ValueError if the knob does not allow it."""
    default, annotation = knob.metadata["default"], knob.type
    if NoneType in get_args(annotation):
        if type(value) is type(default) and value == default:
            return None
        if default == "auto" and type(value) is str and value.isdecimal():
            value = int(value)
        annotation = get_args(annotation)[0]
    if not _fits(value, annotation, knob.metadata["within"]):
        raise ValueError
    return float(value) if annotation is float else value


def _fits(value: Any, annotation: Any, within: str) -> bool:
    """Strictly: a bool is no int and a list no tuple; an int will do for a float."""
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return type(value) is str and value in members
    if get_origin(annotation) is tuple:
        sized = type(value) is tuple and (members[-1] is ... or len(value) == len(members))
        return sized and all(_fits(member, members[0], within) for member in value)
    if annotation in (int, float):
        low, high = map(float, within[1:-1].split(","))
        above = operator.gt if within[0] == "(" else operator.ge
        below = operator.lt if within[-1] == ")" else operator.le
        return type(value) in (int, annotation) and above(value, low) and below(value, high)
    return type(value) is annotation


def _in_words(annotation: Any, within: str) -> str:
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, members))
    if get_origin(annotation) is tuple:
        kind = "a tuple" if members[-1] is ... else "a pair"
        return f"{kind}, each item {_in_words(members[0], within)}"
    if NoneType in members:
        return _in_words(members[0], within)
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
    return f"{names[annotation]} in {within}" if within else names[annotation]


def _shown(value: object) -> str:
    """A value on one line, cut where it would fill the screen."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 200 else f"{text[:200]}..."


def _resolve_buckets(buckets: tuple[int, ...], *, largest: int) -> tuple[int, ...]:
    """The sizes to use, ascending: as given, else powers of two and their midpoints."""
    powers = [2**n for n in range(largest.bit_length())]
    sizes = buckets or [*powers, *(3 * power // 2 for power in powers[1:]), largest]
    return tuple(sorted({size for size in sizes if size <= largest}))


# What values must hold together: keys, condition, remedy. A rule is asked where each of its values
# is allowed by itself.
_RULES: tuple[tuple[tuple[str, ...], Callable[..., bool], str], ...] = (
    (
        ("model.num_heads", "model.width"),
        lambda heads, width: width % heads == 0,
        "the heads must divide the width; choose a width that is a multiple of num_heads",
    ),
    (
        ("model.arch", "model.num_heads", "model.width"),
        lambda arch, heads, width: arch == "bert" or width % heads != 0 or width // heads % 2 == 0,
        "rotary embeddings need an even head size (width / num_heads); choose another width",
    ),
    (
        ("model.num_kv_heads", "model.num_heads", "model.arch"),
        lambda kv_heads, heads, arch: arch == "bert" or heads % kv_heads == 0,
        "the key/value heads must divide the query heads; choose a divisor of num_heads",
    ),
    (
        ("model.reinit_head", "model.init_from"),
        lambda reinit_head, init_from: init_from != "" or not reinit_head,
        "without a checkpoint every head is random; set model.init_from or leave it off",
    ),
    (
        ("ensemble.init", "model.init_from"),
        lambda init, init_from: init == "shared" or init_from == "",
        "trainers that start from a checkpoint share it; set ensemble.init=shared",
    ),
    (
        ("data.sequence_length", "model.max_length"),
        lambda length, max_length: length <= max_length,
        "rows must not be longer than the model's context; lower the first or raise the second",
    ),
    (
        ("model.arch", "data.source"),
        lambda arch, source: arch != "bert" or source == "jsonl",
        "bert classifies JSON lines of a text and a label; set data.source=jsonl",
    ),
    (
        ("data.sequence_length", "model.arch"),
        lambda length, arch: arch != "bert" or length >= 3,
        "a text has a first and a last token of its own; set at least 3",
    ),
    (
        ("data.label_column",),
        lambda label_column: label_column != "",
        "no field for the class; name it",
    ),
    (
        ("data.tokenizer", "model.vocab_size"),
        lambda tokenizer, vocab_size: tokenizer != "bytes" or vocab_size >= 257,
        "bytes need 257 ids (256 and end of text); raise model.vocab_size",
    ),
    (
        ("data.tokenizer",),
        lambda tokenizer: tokenizer != "",
        "no tokenizer; name bytes, a tokenizer.json, a .model file, a folder, or a hub name",
    ),
    (
        ("data.source", "data.path"),
        lambda source, path: source == "stdlib" or path != "",
        "this source needs a file, folder or glob (hf: or a hub name); set data.path",
    ),
    (
        ("data.source", "data.path", "data.heldout_path"),
        lambda source, path, heldout_path: source != "stdlib" or path == heldout_path == "",
        "stdlib reads this Python's own library; leave both paths empty or change data.source",
    ),
    (
        ("data.source", "data.text_column"),
        lambda source, column: source not in ("jsonl", "hf") or column != "",
        "name the field that holds a row's text; set data.text_column",
    ),
    (
        ("data.source", "data.name", "data.split"),
        lambda source, name, split: source == "hf" or (name, split) == ("", "train"),
        "only hf has configurations and splits; leave both as they are or set data.source=hf",
    ),
    (
        ("data.split",),
        lambda split: split != "",
        "no part of the data set; name one, such as train",
    ),
    (
        ("data.source", "data.heldout_path"),
        lambda source, heldout_path: source != "hf" or heldout_path == "",
        "hf holds out documents of the data set itself; leave data.heldout_path empty",
    ),
    (
        ("data.source", "data.subset_frac"),
        lambda source, subset_frac: source != "hf" or subset_frac == 1,
        "a stream is dealt in its order, and no subset drawn; set 1.0, or prepare the data first",
    ),
    (
        ("data.source", "data.on_bad_shard"),
        lambda source, on_bad_shard: source != "hf" or on_bad_shard == "reject",
        "a stream is not read to its end before it is used; set reject, or prepare the data first",
    ),
    (
        ("ensemble.num_workers", "ensemble.num_trainers"),
        lambda workers, trainers: workers >= trainers,
        "each trainer needs a worker; raise the first (the whole pool) or lower the second",
    ),
    (
        ("inner.warmup_updates", "num_rounds", "inner.steps_per_round"),
        lambda warmup, rounds, steps: warmup < rounds * steps,
        "the warm-up would outlast the run's updates; shorten it",
    ),
    (
        ("switch.mode", "inner.unit", "inner.schedule", "num_tokens"),
        lambda mode, unit, schedule, tokens: (
            schedule == "constant"
            or tokens
            or mode == "clip"
            or (mode != "lengthen" and unit == "updates")
        ),
        "rounds that grow, or that accumulate within so many micro-batches, make as many updates as"
        " nobody knows; end the run, and its schedule, by num_tokens, or set"
        " inner.schedule=constant",
    ),
    (
        ("inner.tx", "inner.weight_decay"),
        lambda tx, decay: tx == "adamw" or decay == 0,
        "only adamw decays weights; set inner.weight_decay=0.0",
    ),
    (
        ("outer.tx", "outer.weight_decay"),
        lambda tx, decay: tx == "adamw" or decay == 0,
        "only adamw decays weights; set outer.weight_decay=0.0",
    ),
    (
        ("outer.fragments", "inner.steps_per_round"),
        lambda fragments, steps: steps % fragments == 0,
        "a round is cut into as many equal parts; choose a divisor of inner.steps_per_round",
    ),
    (
        ("outer.delay_updates", "outer.fragments", "inner.steps_per_round"),
        lambda delay, fragments, steps: delay == 0 or delay * fragments < steps,
        "a fragment must arrive before the next one's turn; lower the first below"
        " steps_per_round / fragments",
    ),
    (
        ("outer.tx", "outer.fragments"),
        lambda tx, fragments: tx != "adamw" or fragments == 1,
        "adamw counts updates of all parameters at once, which a fragment's is not; set"
        " outer.tx='nesterov' or 'sgd', or outer.fragments=1",
    ),
    (
        ("outer.mixing", "outer.fragments", "outer.delay_updates"),
        lambda mixing, fragments, delay: mixing == 0 or fragments > 1 or delay > 0,
        "only what arrives in fragments or late is mixed; set outer.mixing=0.0",
    ),
    (
        ("batching.initial_batch_size", "batching.max_batch_size"),
        lambda initial, largest: largest is None or initial <= largest,
        "a run starts without accumulation; lower the first or raise the second",
    ),
    (
        ("batching.initial_batch_size", "batching.batch_cap"),
        lambda initial, cap: initial <= cap,
        "the first request is above the cap; lower the first or raise the second",
    ),
    (
        ("batching.estimator", "batching.test"),
        lambda estimator, test: estimator != "jvp" or test in INNER_PRODUCT_TESTS,
        "jvp measures inner products, which this test does not use; set batching.estimator='auto'",
    ),
    (
        ("batching.buckets", "batching.max_batch_size"),
        lambda buckets, largest: not buckets or largest is None or max(buckets) == largest,
        "the largest bucket must be max_batch_size; add it, or remove what is above it",
    ),
    (
        (
            *("batching.buckets", "batching.max_batch_size"),
            *("batching.initial_batch_size", "batching.batch_cap"),
        ),
        lambda buckets, largest, initial, cap: (
            not buckets or largest is not None or any(initial <= size <= cap for size in buckets)
        ),
        "no bucket is from the first batch to the cap; add one",
    ),
    (
        ("batching.test", "batching.ramp"),
        lambda test, ramp: (test == "ramp") == (ramp != ()),
        "the two belong together; set test='ramp' and (round, batch) pairs, or neither",
    ),
    (
        ("batching.ramp",),
        lambda ramp: not ramp or (ramp[0][0] == 0 and all(a[0] < b[0] for a, b in pairwise(ramp))),
        "the first round must be 0 and rounds must increase; mend the (round, batch) pairs",
    ),
    (
        ("batching.test", "batching.replay"),
        lambda test, replay: (test == "replay") == (replay != ""),
        "the two belong together; set test='replay' and the folder of a run, or neither",
    ),
    (
        ("batching.ramp", "batching.initial_batch_size"),
        lambda ramp, initial: not ramp or ramp[0][1] == initial,
        "both name the first batch; make them equal",
    ),
    (
        ("batching.ramp", "batching.batch_cap"),
        lambda ramp, cap: all(1 <= size <= cap for _, size in ramp),
        "the ramp's batches must be from 1 to the cap; change them or raise batching.batch_cap",
    ),
    (
        ("batching.ramp", "batching.monotone"),
        lambda ramp, monotone: not monotone or all(a[1] <= b[1] for a, b in pairwise(ramp)),
        "a monotone batch does not fall; order the batches or set batching.monotone=False",
    ),
)
