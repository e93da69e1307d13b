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

    On explicit axes many operations must name the sharding of their result, so the function runs
    with automatic axes, and only its results' shardings are prescribed, where they divide evenly.

    Args:
      shardings: `shardings(whole, result, *args, **kwargs)` returns a prefix of the result's tree.
        `whole` is the replicated sharding, `result` has shapes and dtypes, and the arguments have
        shardings in place of arrays.
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


def varying_alike(*trees: PyTree) -> PyTree:
    """In `jax.shard_map`, mark arrays as varying over all axes over which one of them varies.

    Otherwise JAX sums the gradients of replicated parameters over devices.
    """
    axes = [jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(trees)]
    every = frozenset().union(*axes)

    def vary(leaf):
        lacking = tuple(every - jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pcast(leaf, lacking, to="varying") if lacking else leaf

    return jax.tree.map(vary, trees)


def refuse_in_shard_map(name: str) -> None:
    """Raise ValueError in `jax.shard_map`, where workers of several devices cannot be averaged."""
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"{name}: called in jax.shard_map over {', '.join(map(str, axes))}, where it does not"
            " average over devices; call it in jax.jit, with sharded arrays"
        )


def like_ensemble(whole: NamedSharding, result: PyTree, ensemble: PyTree, *_: Any, **__: Any):
    """Shard a result like the argument `ensemble`, with its count of rounds replicated."""
    return jax.tree.map(lambda _: whole, result).replace(
        params_M=ensemble.params_M,
        outer_state_M=ensemble.outer_state_M,
        inner_state_R=ensemble.inner_state_R,
        params_R=ensemble.params_R,
        average_M=ensemble.average_M,
    )
