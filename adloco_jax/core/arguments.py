"""Check and adapt the arguments of functions in `core`: losses, learning rates, optimizers.

Axes of arrays: R workers, B examples of a micro-batch, T micro-batches, S updates of a worker, each
of A micro-batches; X any first axis. A key is a random key of JAX.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.types import LossFn, at_least_float32, is_key, trainable, with_trainable


def trainable_loss(loss_fn: LossFn, params: PyTree, *, has_aux: bool = False) -> LossFn:
    """Make a loss function of the floating-point parameters that returns (loss, aux).

    The result is called `loss(values, batch)`: `values` are the parameters with None in place of
    the leaves that are not floating-point, which it takes from `params`. Keywords such as `key` go
    to `loss_fn`. Without `has_aux`, aux is None; with it, aux is the auxiliary output of `loss_fn`.

    The result raises ValueError, while it is traced, if `loss_fn` does not return one number, or
    with `has_aux` a pair of one number and an auxiliary output.
    """

    def widen(leaf: Any) -> Array:
        """Cast an auxiliary value to at least float32, because its means are taken later."""
        return jnp.asarray(leaf, at_least_float32(jnp.result_type(leaf)))

    def loss_of(values: PyTree, batch: PyTree, **keywords: Any) -> tuple[Array, PyTree]:
        """Call the loss; check what it returned, and return it as a pair (loss, aux)."""
        returned = loss_fn(with_trainable(params, values), batch, **keywords)
        loss = returned
        aux = None
        expected = "one number"
        is_as_expected = True
        if has_aux:
            expected = "a pair (loss, aux) whose loss is one number"
            is_as_expected = isinstance(returned, tuple) and len(returned) == 2
            if is_as_expected:
                loss, aux = returned
        shape = jax.tree.map(jnp.shape, loss)  # if the loss is a tree: a tree of shapes
        if not is_as_expected or shape != ():
            raise ValueError(
                f"loss_fn: returned shape {shape}, expected {expected}, the mean over the batch;"
                " return jnp.mean of the losses, and set has_aux=True for an auxiliary output"
            )
        return loss, jax.tree.map(widen, aux)

    return loss_of


def takes(function: Callable, name: str) -> bool:
    """Return whether `function` has a parameter with this name."""
    return name in inspect.signature(function).parameters


def with_fixed_key(loss_fn: LossFn) -> LossFn:
    """Return a loss without the parameter `key`: a fixed key is bound, if `loss_fn` takes one.

    Values of the loss then differ only by parameters and data.
    """
    if not takes(loss_fn, "key"):
        return loss_fn
    return functools.partial(loss_fn, key=jax.random.key(0))


def fold_in_each(key: Array, *numbers: Array | np.ndarray) -> Array:
    """Derive a key for each element of arrays that are broadcast to one shape.

    Folded into `key` is the element of the first array, then that of the second, and so on. The
    arrays are integers. The keys have the broadcast shape.
    """

    def fold_in_all(*element_numbers: Array) -> Array:
        """Derive the key of one element from its numbers, one of each array."""
        element_key = key
        for number in element_numbers:
            element_key = jax.random.fold_in(element_key, number)
        return element_key

    # `vmap` maps over one axis, so the arrays are flattened for it.
    shape = np.broadcast_shapes(*[np.shape(number) for number in numbers])
    flat_numbers = [jnp.broadcast_to(jnp.asarray(number), shape).reshape(-1) for number in numbers]
    return jax.vmap(fold_in_all)(*flat_numbers).reshape(shape)


def checked_batch_length(
    batch: PyTree, num_workers: int, num_accum_steps: int | None = None, *, name: str
) -> int:
    """Return the number of micro-batches, or of updates, of a batch.

    Leaves are [T, R, B, ...], of which T is returned. If `num_accum_steps`, A, is given, they are
    [S, R, A*B, ...], and S is returned. `name` is the argument's, for the message.

    Raises ValueError if leaves differ in their first three axes, or one of these axes is missing or
    empty; if R is not `num_workers`; or if A does not divide the third axis.
    """
    # The names of the axes, for the message.
    length_axis = "T"
    examples_axis = "B"
    num_parts = 1  # which must divide the third axis
    if num_accum_steps is not None:
        length_axis = "S"
        examples_axis = "A*B"
        num_parts = num_accum_steps

    first_axes = {leaf.shape[:3] for leaf in jax.tree.leaves(batch)}
    if len(first_axes) == 1:
        (shape,) = first_axes
        if len(shape) == 3 and 0 not in shape:
            length, found_workers, num_examples = shape
            if found_workers == num_workers and num_examples % num_parts == 0:
                return length
    raise ValueError(
        f"{name}: its leaves begin with {sorted(first_axes)}, expected one shape"
        f" [{length_axis}, R, {examples_axis}, ...] of R={num_workers} workers, without a zero,"
        f" and {examples_axis} divisible by num_accum_steps={num_parts}"
    )


def checked_factors(
    name: str, values: Array | np.ndarray | Sequence[float] | None, shape: tuple[int, ...]
) -> Array | None:
    """Return weights or learning rates as float32; raise ValueError if their shape is not `shape`.

    None, which means that all factors are 1, stays None. `name` is the argument's, for the message.
    """
    if values is None:
        return None
    array = jnp.asarray(values, jnp.float32)
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}, expected one number for each of {shape};"
            f" jnp.full({shape}, value) repeats a single one"
        )
    return array


def checked_key(name: str, key: Array | None, loss_fn: LossFn) -> None:
    """Raise ValueError if a key is not typed (`jax.random.key`), or `loss_fn` lacks one.

    `loss_fn` lacks a key if `key` is None and it has a parameter `key` without a default, or with
    the default None. `name` is the argument's, for the message.
    """
    if key is not None:
        if not is_key(key):
            found = f"{key.dtype}{key.shape}"
            raise ValueError(f"{name}: got {found}, not typed keys; use jax.random.key")
        return
    parameter = inspect.signature(loss_fn).parameters.get("key")
    if parameter is None:
        return
    # A loss to which `with_fixed_key` has bound a key has that key as the default.
    if parameter.default is None or parameter.default is parameter.empty:
        raise ValueError(
            f"{name}: none is given, and loss_fn takes a `key`, without which its dropout is off;"
            f" pass {name}=, or a loss without this parameter"
        )


def checked_update(
    name: str,
    tx: optax.GradientTransformation,
    state: PyTree,
    params_X: PyTree,
    *,
    refused: tuple[type, ...],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Check the state of an optax transformation; return the transformation's `update` function.

    Args:
      name: The argument's name, for messages.
      tx: The transformation.
      state: Its stacked states, leaves [X, ...], of which the structure is checked.
      params_X: The parameters that it updates, leaves [X, ...].
      refused: Classes of optax states that hold a copy of the parameters. An outer update changes
        the parameters, but not this copy.

    Returns:
      `update(gradients, state, params) -> (updates, state)`, which ignores other keywords.

    Raises:
      ValueError: If `state` has a node of a class in `refused` with such a copy, or its structure
        is not that of a state of `tx`.
    """

    def keeps_params(node: Any) -> bool:
        """Return whether a node of the state is of a refused class, and holds parameters."""
        if not isinstance(node, refused):
            return False
        # The state of optax.contrib.sam in its opaque mode holds no copy between updates.
        is_opaque_sam = hasattr(node, "cache") and node.cache is None
        return not is_opaque_sam

    # With `is_leaf` such a node is itself a leaf of the tree.
    for node in jax.tree.leaves(state, is_leaf=keeps_params):
        if keeps_params(node):
            raise ValueError(
                f"{name}: its state has a {type(node).__name__}, which holds parameters or expects"
                " a pair of them; the outer update cannot move these, so use another transformation"
            )

    # The states that `tx` would make for the stacked models, as shapes only. Optimizers receive
    # only the floating-point leaves (`trainable`).
    expected = jax.eval_shape(jax.vmap(tx.init), trainable(params_X))
    if jax.tree.structure(expected) != jax.tree.structure(state):
        raise ValueError(
            f"{name}: another transformation than the one that made the ensemble's states; give"
            " `init` and this call the same"
        )
    return optax.with_extra_args_support(tx).update
