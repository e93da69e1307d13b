"""What `fit` is given, checked before it compiles or creates anything: faults name arguments."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.engine.inputs import Rows
from adloco_jax.errors import ConfigError
from adloco_jax.settings import Settings

_OF_ROWS = ("heldout_rows", "fingerprint", "shards", "tokens_per_byte", "batch")


def check_arguments(
    settings: Settings,
    corpus: Rows,
    init_fn: Callable[..., PyTree],
    loss_fn: Callable[..., Any],
    params: PyTree | None,
    workdir: str | os.PathLike,
) -> None:
    """Refuses arguments of `fit` that cannot be what their names say.

    Raises:
      ConfigError: A line for each fault.
    """
    faults = []
    if not isinstance(settings, Settings):
        faults.append(f"settings: {_kind(settings)}; give what config.validate(config) returns")
    if not isinstance(workdir, str | os.PathLike):
        faults.append(f"workdir: {_kind(workdir)}; give the path of a folder")
    if lacks := [name for name in _OF_ROWS if not hasattr(corpus, name)]:
        faults.append(
            f"corpus: {_kind(corpus)} without {', '.join(lacks)};"
            " adloco_jax.engine.inputs.Rows says what rows need"
        )
    elif (rows := corpus.heldout_rows) is None or np.ndim(rows) != 2 or not _are_ids(rows):
        shape, dtype = np.shape(rows), getattr(rows, "dtype", type(rows).__name__)
        faults.append(
            f"corpus.heldout_rows: {dtype} of shape {shape}; give an array of integers [E, L + 1]"
        )
    faults += [
        f"{name}: {_kind(given)}; give {expected}"
        for name, given, expected in (
            ("init_fn", init_fn, "a function of a PRNG key that returns parameters"),
            ("loss_fn", loss_fn, "a function of parameters and rows [B, L + 1]"),
        )
        if not callable(given)
    ]
    if callable(init_fn):
        faults += _of_params(init_fn, params)
    if faults:
        raise ConfigError("\n".join(faults))


def _of_params(init_fn: Callable[..., PyTree], params: PyTree | None) -> list[str]:
    drawn = jax.eval_shape(init_fn, jax.random.key(0))
    if not jax.tree.leaves(drawn):
        return ["init_fn: its parameters hold no array; expected at least one"]
    if params is None:
        return []
    own, given = (
        {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in found}
        for found in (jax.tree.leaves_with_path(drawn), jax.tree.leaves_with_path(params))
    )
    if own == given:
        return []
    one = min(path for path in own | given if own.get(path) != given.get(path))
    return [
        f"params: params{one} has shape {given.get(one, 'none')}, init_fn gives"
        f" {own.get(one, 'none')}; give what init_fn would make"
    ]


def _are_ids(rows: np.ndarray) -> bool:
    return np.issubdtype(getattr(rows, "dtype", object), np.integer)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
