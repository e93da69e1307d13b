"""Run functions on arrays that are sharded over a mesh with explicit axes."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree


def on_any_mesh(shardings: Callable[..., PyTree]) -> Callable[[Callable], Callable]:
    """Make a decorator with which a function also accepts arrays on meshes with explicit axes.

    On explicit axes JAX requires that many operations name the sharding of their result. The
    decorated function therefore runs with automatic axes, on which the compiler chooses these
    shardings. Only the shardings of the final results are prescribed, by `shardings`. If no
    argument is on a mesh with explicit axes, the decorated function calls the original function
    directly.

    Args:
      shardings: `shardings(whole, result, *args, **kwargs)` returns the shardings of the function's
        results, as a prefix of their tree. `whole` is the sharding of an array that is replicated
        on all devices. `result` has the shapes and dtypes of the results. `args` and `kwargs` are
        the arguments of the decorated function, with each array replaced by its sharding.

    Returns:
      The decorator. If an axis of a result cannot be divided evenly over its devices, the decorator
      replicates the result along this axis.
    """

    def sharding_of(leaf):
        return jax.typeof(leaf).sharding if isinstance(leaf, Array | np.ndarray) else None

    def fitting(at, shape):
        def divides(dim, axes):
            names = (axes,) if isinstance(axes, str) else axes or ()
            return dim % math.prod(at.mesh.shape[name] for name in names) == 0

        spec = [
            axes if divides(dim, axes) else None
            for dim, axes in zip(shape.shape, at.spec, strict=False)
        ]
        return NamedSharding(at.mesh, P(*spec))

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            leaves, structure = jax.tree.flatten((args, kwargs))
            found = [sharding_of(leaf) for leaf in leaves]
            meshes = [at.mesh for at in found if at is not None]
            mesh = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
            if mesh is None:
                return function(*args, **kwargs)
            indices = [i for i, at in enumerate(found) if at is not None]

            def of_arrays(*arrays):
                filled = dict(zip(indices, arrays, strict=True))
                whole = [filled.get(i, leaf) for i, leaf in enumerate(leaves)]
                args, kwargs = structure.unflatten(whole)
                return function(*args, **kwargs)

            arrays = [jnp.asarray(leaves[i]) for i in indices]
            shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays]
            automatic = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
            with jax.sharding.use_abstract_mesh(automatic):
                result = jax.eval_shape(of_arrays, *shapes)
            at_args, at_kwargs = structure.unflatten(
                leaf if at is None else NamedSharding(mesh, at.spec)
                for leaf, at in zip(leaves, found, strict=True)
            )
            out = shardings(NamedSharding(mesh, P()), result, *at_args, **at_kwargs)
            out = jax.tree.map(fitting, jax.tree.broadcast(out, result), result)
            # Use `jit`: otherwise a result that depends on no argument is on one device only.
            return jax.jit(jax.sharding.auto_axes(of_arrays, out_sharding=out))(*arrays)

        return call

    return decorate


def like_ensemble(whole: NamedSharding, result: PyTree, ensemble: PyTree, *_: Any, **__: Any):
    """Return the shardings of a function's result that is an ensemble, for use by `on_any_mesh`.

    The parameters and optimizer states of the result are sharded like those of the argument
    `ensemble`. The count of rounds is replicated (`whole`).
    """
    return jax.tree.map(lambda _: whole, result).replace(
        params_M=ensemble.params_M,
        outer_state_M=ensemble.outer_state_M,
        inner_state_R=ensemble.inner_state_R,
        params_R=ensemble.params_R,
    )
