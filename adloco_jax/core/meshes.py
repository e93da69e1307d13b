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

    On explicit axes many operations must name the sharding of their result, so the function runs
    with automatic axes, and only its results' shardings are prescribed, where they divide evenly.

    Args:
      shardings: `shardings(whole, result, *args, **kwargs)` returns a tree of shardings that is a
        prefix of the result's tree. `replicated` below is an example. `whole` is the replicated
        sharding, `result` has shapes and dtypes, and the function's arguments, which follow, have
        shardings in place of arrays.

    Returns:
      The decorator. If no array is on such a mesh, the decorated function is called as it is.
    """

    def decorate(function):
        """Return a function that calls `function`, and also accepts arrays on explicit axes."""

        @functools.wraps(function)
        def call(*args, **kwargs):  # the arguments of any decorated function
            """Call the function as it is, or with automatic axes if one of its arrays needs it."""
            leaves, structure = jax.tree.flatten((args, kwargs))
            array_shardings = {}  # by the position of an array in `leaves`
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Array | np.ndarray):
                    array_shardings[i] = jax.typeof(leaf).sharding
            mesh = _explicit_mesh(array_shardings.values())
            if mesh is None:
                return function(*args, **kwargs)
            arrays = [jnp.asarray(leaves[i]) for i in array_shardings]

            def call_with(*arrays):
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

            # The results' shardings, from the arguments with shardings in place of arrays.
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
    """Return the first mesh that has an explicit axis; None if there is none."""
    for sharding in shardings:
        mesh: Any = sharding.mesh  # an AbstractMesh, as the sharding is that of an array's type
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _where_even(sharding: NamedSharding, result: jax.ShapeDtypeStruct) -> NamedSharding:
    """Return `sharding` without the mesh axes that do not divide the dimension they shard.

    `result` has the shape of the array. `sharding` may name fewer or more dimensions.
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
# Of its arguments at most the first matters; `*_` and `**__` take the others, which differ from
# function to function.


def replicated(whole: NamedSharding, result: PyTree, *_: Any, **__: Any) -> PyTree:
    """Return the replicated sharding for all results."""
    return whole


def like_argument(whole: NamedSharding, result: PyTree, argument: PyTree, *_: Any, **__: Any):
    """Return the shardings of the function's first argument, which has the result's tree."""
    return argument


def like_argument_and_replicated(
    whole: NamedSharding, result: PyTree, argument: PyTree, *_: Any, **__: Any
) -> PyTree:
    """Shard the first result like the function's first argument, and replicate the others."""
    others = [whole] * (len(result) - 1)
    return (argument, *others)


def like_ensemble(whole: NamedSharding, result: PyTree, ensemble: PyTree, *_: Any, **__: Any):
    """Shard a result like the argument `ensemble`, with its count of rounds replicated.

    The result may have other trainers and workers than the argument, so `sizes` are its own.
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

    An array varies over an axis if it differs between the devices along the axis. If parameters did
    not vary and examples did, JAX would sum the gradients of the parameters over devices. Returns
    the trees; outside `jax.shard_map` nothing changes.
    """

    def varying_axes(leaf):
        return jax.typeof(leaf).manual_axis_type.varying

    all_axes = frozenset()
    for leaf in jax.tree.leaves(trees):
        all_axes = all_axes | varying_axes(leaf)

    def vary(leaf):
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
