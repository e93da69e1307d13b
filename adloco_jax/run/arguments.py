"""What `fit` is given, checked before it compiles or creates anything: faults name arguments."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    try:
        drawn = jax.eval_shape(init_fn, jax.random.key(0))
    except TypeError as error:  # a leaf that is no array, or a mistake within
        reason = " ".join(str(error).split())[:300]
        return [f"init_fn: {reason}; its leaves must all be arrays: leave others out of the tree"]
    if not jax.tree.leaves(drawn):
        return ["init_fn: its parameters hold no array; expected at least one"]
    faults = _unsaved("init_fn: params", drawn)
    names = [path for path, _ in jax.tree.leaves_with_path(drawn)]
    # As the export joins the keys of a leaf, and as Orbax does.
    for separator in "/.":
        joined: dict[str, tuple] = {}
        for path in names:
            name = jax.tree_util.keystr(path, simple=True, separator=separator)
            other = joined.setdefault(name, path)
            if other is not path:
                keys = " and ".join(map(jax.tree_util.keystr, (other, path)))
                faults.append(f"init_fn: {keys} are both saved as {name!r}; rename one of them")
    if params is None or faults:
        return faults
    as_arrays = jax.eval_shape(lambda tree: jax.tree.map(jnp.asarray, tree), params)
    own, given = (
        {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in found}
        for found in (jax.tree.leaves_with_path(drawn), jax.tree.leaves_with_path(as_arrays))
    )
    if own != given:
        one = min(path for path in own | given if own.get(path) != given.get(path))
        return [
            f"params: params{one} is {given.get(one, 'missing')}, init_fn gives"
            f" {own.get(one, 'none')}; give what init_fn would make"
        ]
    if jax.tree.structure(drawn) != jax.tree.structure(params):
        return ["params: of another structure than init_fn's; give what init_fn would make"]
    return []


def _unsaved(name: str, tree: PyTree) -> list[str]:
    """A line for each leaf that a checkpoint cannot hold."""
    faults = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        where = f"{name}{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key):
            faults.append(f"{where}: a PRNG key, which cannot be trained or saved; leave it out")
        elif not math.prod(jnp.shape(leaf)):
            faults.append(f"{where}: a leaf of size zero, which cannot be saved; leave it out")
    return faults


def check_optimizer(name: str, tx: object) -> None:
    """Refuses an optimizer that is no optax transformation; None is one that is not given.

    Raises:
      ConfigError: Names the argument.
    """
    if tx is not None and not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
        raise ConfigError(f"{name}: {_kind(tx)}; give a transformation, such as optax.adamw(1.0)")


def check_transform(name: str, tx: optax.GradientTransformation, params: PyTree) -> None:
    """Refuses a transformation that a round cannot run, or whose state cannot be saved.

    Args:
      name: Of the argument, for messages.
      tx: Is not run.
      params: One model's parameters, or their shapes.

    Raises:
      ConfigError: A line for each fault.
    """
    try:
        before = jax.eval_shape(tx.init, params)
        faults = _unsaved(f"{name}: its state", before)
        if not faults:
            update = optax.with_extra_args_support(tx).update
            _, after = jax.eval_shape(update, params, before, params)
            if _shapes(before) != _shapes(after):
                faults = [f"{name}: an update changes the structure of its state"]
    # What third-party code raises where it lacks an argument.
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        faults = [
            f"{name}: {' '.join(str(error).split())[:300]}; a round gives a transformation"
            " gradients, state and parameters alone: use one that needs no more"
        ]
    if faults:
        raise ConfigError("\n".join(faults))


def _shapes(tree: PyTree) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf.shape for leaf in leaves]


def _are_ids(rows: np.ndarray) -> bool:
    return np.issubdtype(getattr(rows, "dtype", object), np.integer)


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
