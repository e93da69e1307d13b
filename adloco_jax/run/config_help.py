"""What each key of a config means: the comments beside its declaration in `adloco_jax.settings`."""

import ast
import inspect
import io
import itertools
import textwrap
import tokenize
from types import NoneType
from typing import get_args

from adloco_jax import settings
from adloco_jax.run.config import KNOBS, allowed

_INDENT = {"initial_indent": " " * 6, "subsequent_indent": " " * 6, "width": 98}


def config_help() -> str:
    """Every key by group: its meaning and unit, what it may hold, its default, how to unset it."""
    meaning = meanings()
    lines = []
    for group, keys in itertools.groupby(KNOBS, key=lambda key: key.rpartition(".")[0]):
        card = inspect.getdoc(getattr(settings, group.capitalize())) if group else "The whole run."
        lines += ["", f"config.{group}".removesuffix("."), f"  {card}"]
        for key in keys:
            lines.append(f"  --config.{key}")
            lines.append(textwrap.fill(meaning[key], **_INDENT))
            lines.append(textwrap.fill(f"{allowed(key)}{_unset(key)}", **_INDENT))
    return "\n".join(lines[1:])


def _unset(key: str) -> str:
    default = KNOBS[key].metadata["default"]
    if NoneType in get_args(KNOBS[key].type):
        return f"; unset with ={'none' if default is None else default}"
    return f"; unset with ={default!r}" if default in ("", ()) else ""


def meanings() -> dict[str, str]:
    """The meaning of each key, by the key.

    A comment at the end of a declaration belongs to it, as do the comment lines right above it.
    """
    source = inspect.getsource(settings)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for group in ast.parse(source).body:
        if not isinstance(group, ast.ClassDef):
            continue
        prefix = "" if group.name == "Settings" else f"{group.name.lower()}."
        end = group.lineno
        for node in group.body:
            if isinstance(node, ast.AnnAssign):
                assert isinstance(node.target, ast.Name) and node.end_lineno is not None
                # Above the declaration nothing but comments follows the one before.
                lines = range(end + 1, node.end_lineno + 1)
                found[prefix + node.target.id] = " ".join(
                    comments[line] for line in lines if line in comments
                )
            end = node.end_lineno or end
    return {key: found[key] for key in KNOBS}
