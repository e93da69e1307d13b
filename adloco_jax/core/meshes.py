"""Run functions on arrays that are sharded over a mesh with explicit axes.

On an explicit axis of a mesh the sharding of an array is part of its type, so operations must say
how their results are sharded. On an automatic axis XLA's partitioner chooses.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree


def on_any_mesh(shardings: Callable[..., PyTree]) -> Callable[[Callable], Callable]:
    """Make a decorator with which a function also accepts arrays on meshes with explicit axes.

    On explicit axes many operations must name the sharding of their result. So the function runs
    with automatic axes, and only the shardings of its results are prescribed. A dimension that the
    mesh axes do not divide evenly is not sharded. Outside of `jax.jit`, each call on such a mesh is
    compiled anew, because the function that is compiled holds the call's other arguments.

    Args:
      shardings: `shardings(whole, result, *args, **kwargs)` returns a tree of shardings that is a
        prefix of the result's tree. `replicated` below is an example. `whole` is the replicated
        sharding. `result` is what the function returns, with shapes and dtypes in place of arrays.
        The function's arguments follow, with shardings in place of arrays.

    Returns:
      The decorator. If no array is on such a mesh, the decorated function is called as it is.
    """

    def decorate(function: Callable) -> Callable:
        """Return a function that calls `function`, and also accepts arrays on explicit axes."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> PyTree:  # the arguments of any decorated function
            """Call the function as it is, or with automatic axes if one of its arrays needs it."""
            leaves, structure = jax.tree.flatten((args, kwargs))
            array_shardings = {}  # by the position of an array in `leaves`
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Array | np.ndarray):
                    array_shardings[i] = jax.typeof(leaf).sharding
            mesh = _explicit_mesh(array_shardings.values())
            if mesh is None:
                return function(*args, **kwargs)
            # Only arrays can be arguments of `jit`, so the other leaves are bound in `call_with`.
            arrays = [jnp.asarray(leaves[i]) for i in array_shardings]

            def call_with(*arrays: Any) -> PyTree:
                """Call the function with these arrays in place of those in its arguments."""
                values = list(leaves)
                for i, array in zip(array_shardings, arrays, strict=True):
                    values[i] = array
                new_args, new_kwargs = structure.unflatten(values)
                return function(*new_args, **new_kwargs)

            # The shapes of the results, computed as on a mesh whose axes are all automatic.
            shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
            automatic = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
            with jax.sharding.use_abstract_mesh(automatic):
                result = jax.eval_shape(call_with, *shapes)

            # The results' shardings, from the arguments with shardings in place of arrays. They are
            # made on `mesh`, because the sharding of an array of one device names no mesh.
            sharding_leaves = list(leaves)
            for i, sharding in array_shardings.items():
                sharding_leaves[i] = NamedSharding(mesh, sharding.spec)
            sharding_args, sharding_kwargs = structure.unflatten(sharding_leaves)
            whole = NamedSharding(mesh, P())
            prefix = shardings(whole, result, *sharding_args, **sharding_kwargs)
            wanted = jax.tree.broadcast(prefix, result)
            out_sharding = jax.tree.map(_where_even, wanted, result)

            # Use `jit`: otherwise a result that depends on no argument is on one device only.
            return jax.jit(jax.sharding.auto_axes(call_with, out_sharding=out_sharding))(*arrays)

        return call

    return decorate


def _explicit_mesh(shardings: Iterable[NamedSharding]) -> AbstractMesh | None:
    """Return the mesh of the first sharding whose mesh has an explicit axis; None without one."""
    for sharding in shardings:
        mesh: Any = sharding.mesh  # an AbstractMesh, as the sharding is that of an array's type
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _where_even(sharding: NamedSharding, result: jax.ShapeDtypeStruct) -> NamedSharding:
    """Return `sharding` without the mesh axes that do not divide the dimension they shard.

    `result` has the shape of the array. `sharding`, which may be that of an array with other
    dimensions, may name fewer (the others are not divided) or more (these are ignored).
    """
    spec = []
    for dim, axes in zip(result.shape, sharding.spec, strict=False):
        # `axes` is None (the dimension is not divided), a name, or several names.
        if axes is None:
            names = ()
        elif isinstance(axes, str):
            names = (axes,)
        else:
            names = axes
        num_shards = math.prod(sharding.mesh.shape[name] for name in names)
        spec.append(axes if dim % num_shards == 0 else None)
    return NamedSharding(sharding.mesh, P(*spec))


# Arguments of `on_any_mesh`: functions that return the shardings of a decorated function's results.
# `whole` is the replicated sharding, and `result` has the results' shapes. Of the decorated
# function's arguments, which have shardings in place of arrays, at most the first matters; `*_` and
# `**__` take the others.


def replicated(whole: NamedSharding, result: PyTree, *_: Any, **__: Any) -> PyTree:
    """Return the replicated sharding for all results."""
    return whole


def like_argument(
    whole: NamedSharding, result: PyTree, argument: PyTree, *_: Any, **__: Any
) -> PyTree:
    """Return the shardings of the function's first argument, which has the result's tree."""
    return argument


def like_argument_and_replicated(
    whole: NamedSharding, result: PyTree, argument: PyTree, *_: Any, **__: Any
) -> PyTree:
    """Shard the first result like the function's first argument, and replicate the others."""
    others = [whole] * (len(result) - 1)
    return (argument, *others)


def like_ensemble(
    whole: NamedSharding, result: PyTree, ensemble: PyTree, *_: Any, **__: Any
) -> PyTree:
    """Shard a result of the class `Ensemble` like the argument `ensemble`.

    The count of rounds is replicated. `sizes` are those of the result, because it may have other
    trainers and workers than the argument.
    """
    everywhere = jax.tree.map(lambda _: whole, result)
    return everywhere.replace(
        params_M=ensemble.params_M,
        outer_state_M=ensemble.outer_state_M,
        inner_state_R=ensemble.inner_state_R,
        params_R=ensemble.params_R,
        average_M=ensemble.average_M,
    )


def varying_alike(*trees: PyTree) -> PyTree:
    """In `jax.shard_map`, mark arrays as varying over all mesh axes over which one of them varies.

    An array varies over an axis if it may differ between the devices along the axis. If examples
    vary and parameters do not, JAX sums the gradients of the parameters over devices. Returns a
    tuple of the trees; outside `jax.shard_map` nothing changes.
    """

    def varying_axes(leaf: Any) -> frozenset:
        """Return the names of the mesh axes over which an array varies, a frozenset."""
        return jax.typeof(leaf).manual_axis_type.varying

    all_axes = frozenset()
    for leaf in jax.tree.leaves(trees):
        all_axes = all_axes | varying_axes(leaf)

    def vary(leaf: Any) -> Any:
        """Mark one array as varying over the axes of all."""
        missing = all_axes - varying_axes(leaf)
        if not missing:
            return leaf
        return jax.lax.pcast(leaf, tuple(missing), to="varying")

    return jax.tree.map(vary, trees)


def refuse_in_shard_map(name: str) -> None:
    """Raise ValueError in `jax.shard_map`, where workers of several devices cannot be averaged.

    `name` is that of the function which refuses, for the message.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes:
        raise ValueError(
            f"{name}: called in jax.shard_map over {', '.join(map(str, axes))}, where it does not"
            " average over devices; call it in jax.jit, with sharded arrays"
        )
