"""Keys of a config on the command line: set from text, and described in words."""

import ast
import contextlib
import functools
from typing import Any, get_origin

from ml_collections import ConfigDict
from pydantic import TypeAdapter, ValidationError

from adloco_jax.config import plain_type
from adloco_jax.settings import FOUND, GROUPS, INT32, OPTIONS, Config, default_of, meaning


def override(config: ConfigDict, key: str, text: str) -> None:
    """Convert the text of a value on the command line, and set a key of a config to the value.

    Text that does not fit the key's type is set as it is, for `validate`, which also refuses a
    group that is none.
    """
    group, _, name = key.rpartition(".")
    if group and group not in config:
        with config.unlocked():
            config[group] = ConfigDict()
    holder = config[group] if group else config
    if not isinstance(holder, ConfigDict):
        return
    kind = plain_type(key)
    default = default_of(key)
    value: object = text
    if default is None and text == "none":
        value = None
    elif default == "auto" and text == "auto":
        value = "auto"
    elif get_origin(kind) is tuple:
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            literal = ast.literal_eval(text)
            value = literal if isinstance(literal, tuple) else (literal,)
    else:
        with contextlib.suppress(ValidationError):
            value = TypeAdapter(kind).validate_strings(text)
    with holder.unlocked(), holder.ignore_type():
        holder[name] = value


def describe(key: str) -> str:
    """Describe a key for argparse: its meaning, allowed values and default."""
    return f"{meaning(key)} Value: {allowed(key)}".replace("%", "%%")


def allowed(key: str) -> str:
    """Describe in words the values that a key of the config may have, and its default."""
    group, _, name = key.rpartition(".")
    schema = _schema()["$defs"][GROUPS[group].__name__] if group else _schema()
    default = default_of(key)
    words = "unset" if default is None else repr(default)
    if key in FOUND:  # its default is looked for in the data or the checkpoint
        words = f"{FOUND[key].words}, else {OPTIONS[key].default!r}"
    return f"{_in_words(schema['properties'][name])} (default: {words})"


def unset(key: str) -> str:
    """Say how to unset a key, if it can be."""
    default = default_of(key)
    if default is None:
        return "; unset with =none"
    if default == "auto":
        return "; unset with =auto"
    if default in ("", ()):
        return f"; unset with ={default!r}"
    return ""


_schema = functools.cache(Config.model_json_schema)
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "True or False",
    "string": "text",
}
_LIMITS = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def _in_words(schema: dict[str, Any]) -> str:
    """Describe the values that a JSON schema allows, such as "a whole number, at least 1"."""
    if "anyOf" in schema:
        schema, _null = schema["anyOf"]
    names = schema.get("enum") or schema.get("examples")
    if names:
        return " or ".join(map(repr, names))
    if "items" in schema:
        return f"a tuple, each item {_in_words(schema['items'])}"
    if "prefixItems" in schema:
        return f"a pair, each item {_in_words(schema['prefixItems'][0])}"
    words = [_TYPES[schema["type"]]]
    if "minLength" in schema:
        words.append("not empty")
    for name, limit in _LIMITS.items():
        if schema.get(name, INT32) != INT32:  # of all whole numbers, so not worth a word
            words.append(f"{limit} {schema[name]:.12g}")
    return ", ".join(words)
