"""Make the default config of a run, check a config, and report all faults.

A config file calls `default_config()`, a locked ConfigDict of the options in `adloco_jax.settings`,
and changes some. `validate` turns it into `Settings`, which all other modules read.
"""

import contextlib
import datetime
import difflib
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ml_collections import ConfigDict, FieldReference
from pydantic import ValidationError

from adloco_jax.errors import ConfigError
from adloco_jax.settings import (
    ENTRIES,
    GROUPS,
    OPTIONS,
    SIZES,
    Settings,
    default_of,
    meaning,
    shown,
)

# What a value needs, by the type of pydantic's error. Other errors have pydantic's own words.
_NEEDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be True or False",
    "string_type": "must be text",
    "tuple_type": "must be a tuple",
    "string_too_short": "must not be empty: {meaning}",
    "greater_than_equal": "must be at least {ge:.12g}",
    "less_than_equal": "must be at most {le:.12g}",
    "model_type": "must be a group of keys; see default_config()",
}


def default_config() -> ConfigDict:
    """Return a locked config in which every option has its default value."""
    config = ConfigDict({group: {} for group in GROUPS})
    for key in OPTIONS:
        group, _, name = key.rpartition(".")
        value = default_of(key)
        if value in (None, "auto"):
            # A field whose default is "auto" must accept an int too. So it may have any type.
            value = FieldReference(value, field_type=object if value else plain_type(key))
        (config[group] if group else config)[name] = value
    if shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)():
        # A notebook would show the Python types of some values.
        plain = shell.display_formatter.formatters["text/plain"]
        plain.for_type(ConfigDict, lambda config, out, cycle: out.text(str(config)))
    return config.lock()


def plain_type(key: str) -> Any:
    """Return the type of an option that is set, without its limits."""
    group, _, name = key.rpartition(".")
    kind = get_type_hints(GROUPS.get(group, Settings))[name]
    return get_args(kind)[0] if type(None) in get_args(kind) else kind


def validate(
    config: ConfigDict | Mapping[str, Any] | Settings, workdir: str | Path | None = None
) -> Settings:
    """Check a whole config, and return its values.

    Args:
      config: The groups and options of `default_config()`, as a ConfigDict or nested dicts.
        Settings are returned as they are.
      workdir: The folder of the run. A run that it contains is resumed without its checkpoint
        `model.init_from`, because unset sizes of the model are read from its record.

    Returns:
      The settings. `batching.buckets` lists all allowed micro-batch sizes, ascending. Unset sizes
      of the model are those of the checkpoint `model.init_from`, or else the options' defaults.

    Raises:
      ConfigError: With a line for each option that is unknown, missing, of a wrong type, out of
        range or contradicts another; also if the hub has no such checkpoint.
      ResourceError: If sizes of the model must be read from the hub, and it cannot be reached.
      DataError: If the checkpoint of `model.init_from` cannot be used.
    """
    if isinstance(config, Settings):
        return config
    if not isinstance(config, ConfigDict | Mapping):
        need = "must be a config; start from default_config()"
        raise ConfigError(f"config = {shown(config)}: {need}")
    given = ConfigDict(dict(config), allow_dotted_keys=True).to_dict()
    values: dict[str, Any] = {group: {} for group in GROUPS} | given
    faults = [
        f"{key}: missing; start from default_config(), which has every key"
        for key in OPTIONS
        for group, _, name in (key.rpartition("."),)
        if isinstance(holder := values[group] if group else values, dict) and name not in holder
    ]
    if isinstance(model := values["model"], dict):
        values["model"] = {k: v for k, v in model.items() if v is not None or k not in SIZES}
    settings, wrong, known = None, [], tables()
    try:
        typed = Settings.model_validate(values)
        values["model"] |= _of_checkpoint(typed, known["ARCHITECTURES"], workdir)
    except ValidationError as error:  # of types and limits, which need no tables
        faults += worded(error)
        for group, *rest in (map(str, fault["loc"]) for fault in error.errors()):
            (values[group] if rest else values).pop(rest[0] if rest else group, None)
            wrong.append(".".join([group, *rest[:1]]) + " = ")
    try:
        settings = Settings.model_validate(values)
    except ValidationError:  # a group that is no group, which has a line already
        pass
    else:
        rules = settings.faults(known)
        faults += [line for line in rules if not any(key in line for key in wrong)]
    if faults or settings is None:
        raise ConfigError("\n".join(faults))
    batching = settings.batching.model_copy(update={"buckets": _resolve_buckets(settings)})
    return settings.model_copy(update={"batching": batching})


def tables() -> dict[str, Mapping[str, Any]]:
    """Return the public tables that options name, with the entries that config files have added."""
    package = importlib.import_module("adloco_jax")
    return {entry.table: getattr(package, entry.table) for entry in ENTRIES.values()}


def _of_checkpoint(
    settings: Settings, architectures: Mapping[str, Any], workdir: str | Path | None
) -> dict[str, Any]:
    """Return unset sizes: those that a run recorded, or of the checkpoint, or else the defaults.

    If the checkpoint was read for them, its `config.json` too.
    """
    model = settings.model
    sizes = {name: getattr(model, name) for name in SIZES if name not in model.model_fields_set}
    if recorded := _recorded(settings, workdir):
        return {name: recorded[name] for name in sizes if name in recorded}
    names = architectures[model.arch].weight_map if model.arch in architectures else None
    read = set() if names is None else sizes.keys() & {ours for ours, _ in names.sizes.values()}
    if model.init_from and read:
        from adloco_jax import hf  # imported only here, because it imports JAX

        found = hf.inspect(model.init_from)
        # A checkpoint of another architecture may lack some sizes. The default is used for these,
        # and the run later refuses such a checkpoint.
        sizes |= {name: getattr(found.network, name, sizes[name]) for name in read}
        sizes["checkpoint"] = json.dumps(found.config)
    return sizes


def completed(settings: Settings, workdir: str | Path | None = None) -> Settings:
    """Add the `config.json` of `model.init_from`, and the date that templates of chats write.

    They are those that the run in `workdir` recorded, if there is one. Raises UserError if the
    first cannot be read.
    """
    if settings.data.is_chat:
        date = _of_record(workdir, "data").get("date") or settings.data.date
        date = {"date": date or datetime.date.today().isoformat()}
        settings = settings.model_copy(update={"data": settings.data.model_copy(update=date)})
    model = settings.model
    if not model.init_from or tables()["ARCHITECTURES"][model.arch].weight_map is None:
        return settings
    content = _recorded(settings, workdir).get("checkpoint") or model.checkpoint
    if not content:
        from adloco_jax import hf

        content = json.dumps(hf.inspect(model.init_from).config)
    model = model.model_copy(update={"checkpoint": content})
    return settings.model_copy(update={"model": model})


def _recorded(settings: Settings, workdir: str | Path | None) -> dict[str, Any]:
    """Return what a run recorded of the same `model.init_from`; empty if it recorded nothing."""
    source, recorded = settings.model.init_from, _of_record(workdir, "model")
    return recorded if source and recorded.get("init_from") == source else {}


def _of_record(workdir: str | Path | None, group: str) -> dict[str, Any]:
    """Return a group of the settings that a run recorded; empty if there is no such record.

    A record that is damaged is reported later.
    """
    if workdir is not None:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return dict(json.loads(Path(workdir, "config.json").read_bytes())["config"][group])
    return {}


def worded(error: ValidationError) -> list[str]:
    """Describe the faults that pydantic has found in settings, each on one line."""
    lines = []
    for fault in error.errors(include_url=False):
        loc = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]]
        key = "".join(loc).removeprefix(".")
        if fault["type"] == "extra_forbidden":
            lines.append(unknown_key_fault(key))
        else:
            words = fault.get("ctx", {}) | {"meaning": meaning(key) if key in OPTIONS else ""}
            need = _NEEDS.get(fault["type"], fault["msg"]).format(**words)
            need = need.replace("Input should be", "must be")
            lines.append(f"{key} = {shown(fault['input'])}: {need}")
    return lines


def unknown_key_fault(key: str) -> str:
    """Return one line: a key is unknown, and which known keys are nearest in name."""
    nearest = namesakes(key) or difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.0)
    return f"{key}: no such key; did you mean {' or '.join(nearest)}?"


def namesakes(key: str) -> list[str]:
    """List the known keys with the same last part, or whose words begin with its letters (`lr`).

    Else those that contain it as words (`batch_size`), or the first of the group that it names. Of
    several, keys of the same group are preferred.
    """
    group, _, name = key.rpartition(".")
    lasts = {known: known.rpartition(".")[2] for known in OPTIONS}
    found = [
        known
        for known, last in lasts.items()
        if name in (last, "".join(word[0] for word in last.split("_") if "_" in last))
    ]
    found = found or [known for known, last in lasts.items() if f"_{name}_" in f"_{last}_"]
    found = found or [known for known in OPTIONS if known.startswith(f"{name}.")][:2]
    return [known for known in found if known.rpartition(".")[0] == group] or found


def _resolve_buckets(settings: Settings) -> tuple[int, ...]:
    batching = settings.batching
    largest = batching.max_batch_size or batching.batch_cap
    powers = [2**n for n in range(largest.bit_length())]
    sizes = batching.buckets or [*powers, *(3 * power // 2 for power in powers[1:]), largest]
    return tuple(sorted({size for size in sizes if size <= largest}))
