"""Every knob of a run: declared once with its default and range, and checked all at once.

A config file starts from `default_config()`, a locked ConfigDict, and overrides what differs.
`validate` turns the whole into frozen dataclasses; nothing after it meets a ConfigDict. The knobs
are declared in `adloco_jax.settings`.
"""

import dataclasses
import difflib
import operator
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ml_collections import ConfigDict, FieldReference

from adloco_jax.core.batching import BATCH_TESTS
from adloco_jax.errors import ConfigError
from adloco_jax.settings import Settings

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
    table = KNOBS[key].metadata["table"]
    words = _in_words(KNOBS[key].type, KNOBS[key].metadata["within"])
    return f"{words if table is None else ' or '.join(map(repr, table))} (default: {shown})"


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
    if knob.metadata["table"] is not None and value not in knob.metadata["table"]:
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
        lambda tx, decay: tx != "sgd" or decay == 0,
        "sgd decays no weights; set inner.weight_decay=0.0",
    ),
    (
        ("outer.tx", "outer.weight_decay"),
        lambda tx, decay: tx not in ("sgd", "nesterov") or decay == 0,
        "neither sgd nor nesterov decays weights; set outer.weight_decay=0.0",
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
        ("outer.aggregator", "outer.fragments"),
        lambda aggregator, fragments: aggregator == "mean" or fragments == 1,
        "other rules than the mean take whole tensors, which fragments cut; set"
        " outer.aggregator='mean' or outer.fragments=1",
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
        lambda estimator, test: estimator != "jvp" or BATCH_TESTS[test].needs == "inner_products",
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
