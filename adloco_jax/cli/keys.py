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

    Text that does not fit the key's type is set as it is. `validate`, which is called later, says
    what is wrong with it, and also what is wrong with a group that is no ConfigDict.
    """
    group, _, name = key.rpartition(".")
    holder = config  # where the key is set: the whole config, or its group
    if group:
        if group not in config:
            with config.unlocked():
                config[group] = ConfigDict()
        holder = config[group]
    if not isinstance(holder, ConfigDict):
        return

    kind = plain_type(key)  # of a value that is set: int for one that may also be None
    default = default_of(key)  # None or "auto" for a key that can be unset
    value: object = text  # if it cannot be converted
    if default is None and text == "none":
        value = None
    elif default == "auto" and text == "auto":
        value = "auto"
    elif get_origin(kind) is tuple:
        # As in Python, such as (1, 2); a single value becomes a tuple of one.
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            literal = ast.literal_eval(text)
            value = literal if isinstance(literal, tuple) else (literal,)
    else:
        with contextlib.suppress(ValidationError):
            value = TypeAdapter(kind).validate_strings(text)
    # A locked ConfigDict would refuse keys and types that it does not have yet. It need not check
    # them, because `validate` does.
    with holder.unlocked(), holder.ignore_type():
        holder[name] = value


def describe(key: str) -> str:
    """Describe a key for argparse: its meaning, allowed values and default."""
    text = f"{meaning(key)} Value: {allowed(key)}"
    return text.replace("%", "%%")  # argparse replaces a single "%"


def allowed(key: str) -> str:
    """Describe in words the values that a key of the config may have, and its default."""
    group, _, name = key.rpartition(".")
    schema = _schema()  # the JSON schema of the whole config
    if group:  # the schemas of groups are in it, by the names of their classes
        schema = schema["$defs"][GROUPS[group].__name__]
    default = default_of(key)
    if key in FOUND:  # a key whose default is looked for in the data or the checkpoint
        words = f"{FOUND[key].words}, else {OPTIONS[key].default!r}"
    elif default is None:
        words = "unset"
    else:
        words = repr(default)
    return f"{_in_words(schema['properties'][name])} (default: {words})"


def unset(key: str) -> str:
    """Say how to unset a key, to be added to its description; empty if it cannot be unset."""
    default = default_of(key)
    if default is None:
        return "; unset with =none"
    if default == "auto":
        return "; unset with =auto"
    if default in ("", ()):
        return f"; unset with ={default!r}"
    return ""


_schema = functools.cache(Config.model_json_schema)
# Words for types and limits of a JSON schema.
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
    """Describe the values that a JSON schema allows, such as "a whole number, at least 1".

    `schema` is that of a key of the config.
    """
    if "anyOf" in schema:  # a type or null, which stands for an unset key
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
        # Every whole number has the limit INT32, which is not worth a word.
        if name in schema and schema[name] != INT32:
            words.append(f"{limit} {schema[name]:.12g}")  # without ".0" of a float
    return ", ".join(words)
