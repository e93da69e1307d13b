"""Every knob of a run: declared once with its default and range, and validated at once.

A config file starts from `default_config()`, a locked ConfigDict, and overrides what differs.
`validate` turns it into frozen dataclasses; no code after it reads a ConfigDict. The knobs are
declared in `adloco_jax.settings`.
"""

import contextlib
import dataclasses
import difflib
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin

from ml_collections import ConfigDict, FieldReference

from adloco_jax.data import DATA_SOURCES
from adloco_jax.errors import ConfigError
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.run.config_rules import RULES
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
# Set here, as `settings` stands below `data` and cannot import this table.
_source = KNOBS["data.source"]
_source.metadata = MappingProxyType({**_source.metadata, "table": DATA_SOURCES})


def default_config() -> ConfigDict:
    """Returns the locked config that every config file starts from: each knob at its default."""
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
    """Checks a whole config and returns it as frozen dataclasses.

    Args:
      config: The groups and knobs of `default_config()`; may be unlocked, or nested dicts.

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
    arch = values.get("model.arch")
    own = ARCHITECTURES[arch].rules if arch else ()
    rules = {need: _of_model(names, holds) for names, holds, need in own} | RULES
    for need, holds in rules.items():
        read = {}
        with contextlib.suppress(KeyError):  # a value with a fault of its own
            if not holds(_Watched(values, read)):
                pairs = ", ".join(f"{key} = {_shown(value)}" for key, value in read.items())
                faults.append(f"{pairs}: {need}")
    source = values.get("data.source")
    for name, reason in DATA_SOURCES[source].refuses.items() if source else ():
        key = f"data.{name}"
        if key in values and values[key] != KNOBS[key].metadata["default"]:
            faults.append(f"data.source = {source!r}, {key} = {_shown(values[key])}: {reason}")
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
    """Describes what a known key may hold, and its default."""
    default = KNOBS[key].metadata["default"]
    shown = "unset" if default is None else repr(default)
    table = KNOBS[key].metadata["table"]
    words = _in_words(KNOBS[key].type, KNOBS[key].metadata["within"])
    return f"{words if table is None else ' or '.join(map(repr, table))} (default: {shown})"


def value_fault(key: str, value: object) -> str:
    """Returns the line that refuses a known key's value."""
    instead = _REPLACED.get((key, value)) if isinstance(value, str) else None
    return f"{key} = {_shown(value)}: {instead or f'must be {allowed(key)}'}"


def unknown_key_fault(key: str) -> str:
    """Returns the line that refuses an unknown key and names the nearest known one."""
    name = key.rpartition(".")[2]
    namesakes = [known for known in KNOBS if known.rpartition(".")[2] == name]
    nearest = namesakes or difflib.get_close_matches(key, KNOBS, n=1, cutoff=0.0)
    return f"{key}: no such key; did you mean {' or '.join(nearest)}?"


def _of_model(names: tuple[str, ...], holds: Callable[..., bool]) -> Callable[..., bool]:
    """A rule of an architecture, on the whole config."""
    return lambda c: holds(*(getattr(c.model, name) for name in names))


def _flatten(config: object) -> tuple[dict[str, Any], list[str]]:
    """The values of known keys, and a line for each key that is unknown, missing or no group."""
    if not isinstance(config, ConfigDict | Mapping):
        return {}, [f"config = {_shown(config)}: must be a config; start from default_config()"]
    given: dict[str, Any] = {}
    for name, value in config.items():
        if name in _GROUPS and isinstance(value, ConfigDict | Mapping):
            given |= {f"{name}.{key}": member for key, member in value.items()}
        else:
            given[str(name)] = value
    faults = [
        f"{key} = {_shown(value)}: must be a group of keys; see default_config()"
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
        annotation = get_args(annotation)[0]
    if not _fits(value, annotation, knob.metadata["within"]):
        raise ValueError
    if knob.metadata["table"] is not None and value not in knob.metadata["table"]:
        raise ValueError
    return float(value) if annotation is float else value


def _fits(value: Any, annotation: Any, within: str) -> bool:
    """Whether a value has the type: a bool is no int, a list no tuple, but an int is a float."""
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


class _Watched:
    """A config as attributes that records what is read; KeyError for a value with a fault."""

    def __init__(self, values: Mapping[str, Any], read: dict[str, Any], group: str = ""):
        self._values, self._read, self._group = values, read, group

    def __getattr__(self, name: str) -> Any:
        if name in _GROUPS:
            return _Watched(self._values, self._read, f"{name}.")
        key = f"{self._group}{name}"
        self._read[key] = self._values[key]
        return self._values[key]


def _resolve_buckets(buckets: tuple[int, ...], *, largest: int) -> tuple[int, ...]:
    """The sizes to use, ascending: as given, else powers of two and their midpoints."""
    powers = [2**n for n in range(largest.bit_length())]
    sizes = buckets or [*powers, *(3 * power // 2 for power in powers[1:]), largest]
    return tuple(sorted({size for size in sizes if size <= largest}))


_REPLACED = {
    ("switch.mode", "lengthen"): (
        "replaced; set batching.growth=('rounds', 'batch') and inner.max_steps_per_round"
    ),
}
