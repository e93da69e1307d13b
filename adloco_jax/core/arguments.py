"""Check and adapt the arguments of functions in `core`: losses, learning rates, optimizers."""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.types import LossFn, at_least_float32, is_key, trainable, with_trainable


def trainable_loss(loss_fn: LossFn, params: PyTree, *, has_aux: bool = False) -> LossFn:
    """Make a loss function of the floating-point parameters that returns (loss, aux).

    Without `has_aux`, aux is None; with it, its arrays are cast to at least float32. While tracing,
    a loss that is not one number raises ValueError.
    """

    def loss_of(values, batch, **keywords):  # `key` and `tap_B`, which only some losses take
        returned = loss_fn(with_trainable(params, values), batch, **keywords)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        loss, aux = returned, None
        if has_aux and is_pair:
            loss, aux = returned
        shape = jax.tree.map(jnp.shape, loss)  # of a tree, a tree of shapes
        if shape != () or (has_aux and not is_pair):
            expected = "a pair (loss, aux) whose loss is one number" if has_aux else "one number"
            raise ValueError(
                f"loss_fn: returned shape {shape}, expected {expected}, the mean over the batch;"
                " return jnp.mean of the losses, and set has_aux=True for an auxiliary output"
            )
        return loss, jax.tree.map(widen, aux)

    def widen(leaf):
        return jnp.asarray(leaf, at_least_float32(jnp.result_type(leaf)))

    return loss_of


def takes(function: Callable, name: str) -> bool:
    """Return whether `function` has a parameter with this name."""
    return name in inspect.signature(function).parameters


def with_fixed_key(loss_fn: LossFn) -> LossFn:
    """If a loss takes `key`, bind a fixed one: values then differ only by params and data."""
    if not takes(loss_fn, "key"):
        return loss_fn
    return functools.partial(loss_fn, key=jax.random.key(0))


def fold_in_each(key: Array, *numbers: Array | np.ndarray) -> Array:
    """Derive a key for each element of the broadcast `numbers`, by folding all of them in."""

    def fold_in_all(*element_numbers):
        element_key = key
        for number in element_numbers:
            element_key = jax.random.fold_in(element_key, number)
        return element_key

    shape = np.broadcast_shapes(*[np.shape(number) for number in numbers])
    flat_numbers = [jnp.broadcast_to(jnp.asarray(number), shape).reshape(-1) for number in numbers]
    return jax.vmap(fold_in_all)(*flat_numbers).reshape(shape)


def checked_batch_length(
    batch: PyTree, num_workers: int, num_accum_steps: int | None = None, *, name: str
) -> int:
    """Check that leaves start with [T, R, B], or [S, R, A*B] if accumulated; return T or S."""
    if num_accum_steps is None:
        length_axis, examples_axis, num_parts = "T", "B", 1
    else:
        length_axis, examples_axis, num_parts = "S", "A*B", num_accum_steps
    shapes = {leaf.shape[:3] for leaf in jax.tree.leaves(batch)}
    if len(shapes) == 1:
        (shape,) = shapes
        is_filled = len(shape) == 3 and 0 not in shape
        if is_filled and shape[1] == num_workers and shape[2] % num_parts == 0:
            return shape[0]
    raise ValueError(
        f"{name}: its leaves begin with {sorted(shapes)}, expected one shape"
        f" [{length_axis}, R, {examples_axis}, ...] of R={num_workers} workers, without a zero,"
        f" and {examples_axis} divisible by num_accum_steps={num_parts}"
    )


def checked_factors(name: str, values, shape: tuple[int, ...]) -> Array | None:
    """Convert weights or learning rates to float32 of the given shape, else raise ValueError."""
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
    """Raise ValueError for a key that is not a typed one, and for none if the loss takes one."""
    if key is not None:
        if not is_key(key):
            found = f"{key.dtype}{key.shape}"
            raise ValueError(f"{name}: got {found}, not typed keys; use jax.random.key")
        return
    parameter = inspect.signature(loss_fn).parameters.get("key")
    if parameter is None:
        return
    # A loss whose `key` has another default, as that of `with_fixed_key`, needs none.
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
    """Return the `update` function of `tx`, unless `state` has a node of a class in `refused`.

    An outer update would not change parameters that an optimizer's state holds. ValueError too if
    `tx` makes another state of `params_X`, leaves [X, ...]. `update` ignores extra arguments that
    `tx` does not take.
    """

    def keeps_params(node):
        if not isinstance(node, refused):
            return False
        # SAM in its opaque mode holds no copy between updates.
        is_opaque_sam = hasattr(node, "cache") and node.cache is None
        return not is_opaque_sam

    for node in jax.tree.leaves(state, is_leaf=keeps_params):
        if keeps_params(node):
            raise ValueError(
                f"{name}: its state has a {type(node).__name__}, which holds parameters or expects"
                " a pair of them; the outer update cannot move these, so use another transformation"
            )

    expected = jax.eval_shape(jax.vmap(tx.init), trainable(params_X))
    if jax.tree.structure(expected) != jax.tree.structure(state):
        raise ValueError(
            f"{name}: another transformation than the one that made the ensemble's states; give"
            " `init` and this call the same"
        )
    return optax.with_extra_args_support(tx).update
