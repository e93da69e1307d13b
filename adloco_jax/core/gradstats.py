"""Per-example gradient statistics at one point: the raw material of the batch-size tests.

With n_j = |g_j|^2, the mean gradient g and p_j = <g_j, g> over t examples (docs/algorithm.md, 2):

  noise    S = (sum n_j - t |g|^2) / (t - 1)            trace of the gradient covariance, unbiased
  signal   G2 = (t^2 |g|^2 - sum n_j) / (t (t - 1))     squared norm of the true gradient, unbiased
  V        covariance of <g_j, g_1> and <g_j, g_2> over the last third, g_1 and g_2 the means of the
           first two: the variance of inner products with the true gradient, unbiased
"""

import inspect
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from adloco_jax.core.arguments import trainable_loss, with_fixed_key
from adloco_jax.core.meshes import on_any_mesh
from adloco_jax.core.types import (
    GradientStats,
    LossFn,
    squared_norms,
    trainable,
    where_leading,
)

Estimator: TypeAlias = Literal["vmap", "taps", "chunks", "jvp", "auto"]

MIN_EXAMPLES = 2  # a sample variance needs two
MIN_EXAMPLES_INNER_PRODUCT = 4  # thirds of 1, 1 and 2


@on_any_mesh(lambda whole, *_, **__: whole)
def gradient_stats(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    estimator: Estimator = "vmap",
    chunk_size: int | None = None,
    num_examples: Int[Array, ""] | int | None = None,
    inner_products: bool = True,
    has_aux: bool = False,
) -> GradientStats:
    """Statistics of the per-example gradients of `batch` at `params`.

    The estimators differ in what they cost and in which loss functions they serve:

      vmap    per-example gradients. Any loss function; memory is `chunk_size` times the parameters.
      taps    the same numbers from one plain backward pass, if `loss_fn` takes the keyword `tap_B`
              (or any, and hands it on): float32 [B], zero, or -1 for an example to be left out of
              the parameters' gradient. Its cotangent must be the squared norms of the examples'
              gradients of the mean loss, summed over all parameters (see `models.layers`). A
              parameter without a tap, or one used twice (tied weights), makes the norms wrong, and
              nothing here can notice: compare a new model with `vmap` once, see
              `per_example_products`.
      chunks  means of `chunk_size` examples in place of single ones: another estimate of the same
              quantities, with more spread, for one gradient per chunk. Any loss function.
      jvp     inner products of single examples without their gradients; noise and signal only from
              the means of the three thirds, unbiased but with two degrees of freedom, and weighted
              accordingly. Any loss function that `jax.jvp` can differentiate; at least 3 examples.
      auto    taps if `loss_fn` has a parameter named `tap_B`, else vmap.

    All make one forward and backward pass over the batch. Inner products add a second: for taps
    and jvp a forward-mode pass of the single examples' losses, with three directions instead of one
    for the last third; else the gradients again. They also hold six float32 copies of the
    parameters (sums by third, and directions) instead of one.

    Args:
      loss_fn: `loss_fn(params, batch) -> scalar`, the mean over examples; `vmap` and `jvp` call it
        with one example at a time, its leading axis kept. If it takes a `key`, it is given the same
        one in every call.
      params: Any pytree of arrays; the gradients are of its floating-point leaves.
      batch: Pytree of leaves [B, ...], B >= 2.
      estimator: See above.
      chunk_size: Most examples in one pass, which bounds memory; with inner products a pass stays
        within a third of the batch. None sets no bound. For `chunks` the size of a chunk: B is a
        multiple of it, at least twice.
      num_examples: t <= B: only the first t examples count, the rest is padding and may hold
        anything; data, so that one compiled program serves every t. None counts all. `chunks`
        counts whole chunks only.
      inner_products: Whether the inner-product fields are wanted; the norm test does without.
      has_aux: Whether `loss_fn` returns a pair (scalar, auxiliary output), which is not looked at.

    Returns:
      The statistics, fields of shape []; for `chunks` and `jvp` in units of single examples too,
      with weights that count means.

    Raises:
      ValueError: While tracing, if the estimator is unknown or does not serve `loss_fn` or
        `inner_products`, `loss_fn` does not return one number or takes `tap_B` without using it,
        parameters are complex or none is floating-point, the leaves disagree on B or B < 2, or
        `chunk_size` does not fit.

    Source: docs/algorithm.md, 2; S and G2: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.
    """
    estimator = resolve_estimator(estimator, loss_fn, inner_products=inner_products)
    loss_of, params = _scalar_loss(loss_fn, params, has_aux=has_aux), trainable(params)
    units = _units(batch, estimator, chunk_size, num_examples, inner_products)
    sums_P, norms_U = _sum_gradients(loss_of, params, units, estimator)
    num_units = units.num_units.astype(jnp.float32)
    squares, num_means = units.unit_size * norms_U, num_units
    if estimator == "jvp":
        sizes_P = jnp.diff(units.ends_P, prepend=0)
        squares = squared_norms(sums_P) / jnp.maximum(sizes_P, 1)
        num_means = jnp.sum(sizes_P > 0, dtype=jnp.float32)
    scale = jnp.sum(squares) / num_means
    # Divide before summing or squaring: the squares of tiny gradients would vanish in float32.
    safe = jnp.where(scale > 0, scale, 1.0)
    mean_1 = jax.tree.map(lambda sum_P: sum_P.sum(axis=0, keepdims=True) / num_units, sums_P)
    mean_norm = squared_norms(mean_1)[0] / safe
    count = num_units * units.unit_size
    # Analysis of variance between means of equal or unequal numbers of examples; for single
    # examples it is the module docstring's S and G2.
    noise_sum = jnp.sum(squares / safe) - count * mean_norm
    zero = jnp.zeros((), jnp.float32)
    stats = GradientStats(
        scale=scale,
        num_examples=count,
        noise_sum=noise_sum,
        noise_weight=num_means - 1,
        signal_sum=num_means * ((num_means - 1) * mean_norm - noise_sum / count),
        signal_weight=num_means * (num_means - 1),
        **dict.fromkeys(("ip_sum", "ip_weight", "plugin_ip_sum", "plugin_orth_sum"), zero),
    )
    if inner_products:
        products_3U = _multiply(loss_of, params, units, estimator, sums_P, safe)
        return _with_products(stats, units, products_3U, mean_norm)
    return stats


def _with_products(
    stats: GradientStats, units: "_Units", products_3U: Array, mean_norm: Array
) -> GradientStats:
    """The inner-product fields too; products and |mean gradient|^2 are in units of the scale."""
    p_U, first_U, second_U = products_3U
    u, index_U = units.num_units, jnp.arange(units.size)
    last_U = (index_U >= 2 * jnp.maximum(u // 3, 1)) & (index_U < u)
    num_last = jnp.sum(last_U).astype(jnp.float32)

    def centred(values_U):
        mean = jnp.sum(jnp.where(last_U, values_U, 0.0)) / jnp.maximum(num_last, 1.0)
        return jnp.where(last_U, values_U - mean, 0.0)

    has_products = u >= MIN_EXAMPLES_INNER_PRODUCT
    covariance_sum = units.unit_size * jnp.sum(centred(first_U) * centred(second_U))
    plugin_ip_sum = units.unit_size * jnp.sum(jnp.where(index_U < u, (p_U - mean_norm) ** 2, 0.0))
    # Its weight is that of the noise, which for `jvp` counts thirds.
    plugin_ip_sum *= stats.noise_weight / jnp.maximum(u - 1, 1)
    return stats.replace(
        ip_sum=jnp.where(has_products, covariance_sum, 0.0),
        ip_weight=jnp.where(has_products, num_last - 1, 0.0),
        plugin_ip_sum=plugin_ip_sum,
        # By the identity S = V_ip / |mean|^2 + V_o.
        plugin_orth_sum=stats.noise_sum - plugin_ip_sum / jnp.where(mean_norm > 0, mean_norm, 1.0),
    )


@on_any_mesh(lambda whole, *_, **__: whole)
def per_example_products(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    estimator: Literal["vmap", "taps", "auto"] = "vmap",
    chunk_size: int | None = None,
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Squared norm of each example's gradient, and its inner product with the mean gradient.

    Args:
      loss_fn: `loss_fn(params, batch) -> scalar`, the mean over examples.
      params: Any pytree of arrays; the gradients are of its floating-point leaves.
      batch: Pytree of leaves [B, ...], B >= 2.
      estimator: One that measures single examples, as `gradient_stats` describes them.
      chunk_size: Most examples in one pass, which bounds memory.

    Returns:
      n_j and p_j, float32.

    Raises:
      ValueError: While tracing, for what `gradient_stats` refuses too.
    """
    if estimator not in ("vmap", "taps", "auto"):
        raise ValueError(f"estimator={estimator!r}: expected vmap, taps or auto")
    resolved = resolve_estimator(estimator, loss_fn, inner_products=True)
    loss_of, params = _scalar_loss(loss_fn, params), trainable(params)
    units = _units(batch, resolved, chunk_size, None, True)
    sums_3, norms_B = _sum_gradients(loss_of, params, units, resolved)
    return norms_B, _multiply(loss_of, params, units, resolved, sums_3, jnp.ones(()))[0]


def pool(stats: GradientStats) -> GradientStats:
    """Combine the statistics of several workers at the same point: sums add, and so do weights.

    Scalars only; no vector of model size is reduced. Inner products stay those with each worker's
    own mean. Works on NumPy arrays as on JAX arrays.

    Args:
      stats: Fields of shape [n].

    Returns:
      Fields of shape [], in units of the largest scale.

    Source: docs/algorithm.md, 2, "Several workers".
    """
    scale = stats.scale.max(axis=0)
    same = stats.in_units_of(scale).replace(scale=stats.scale)
    return jax.tree.map(lambda values_n: values_n.sum(axis=0), same).replace(scale=scale)


def _scalar_loss(loss_fn: LossFn, params: PyTree, *, has_aux: bool = False) -> LossFn:
    """`loss_fn` of the floating-point parameters, without its auxiliary output, at a fixed key."""
    loss_of = trainable_loss(with_fixed_key(loss_fn), params, has_aux=has_aux)
    return lambda values, batch, **taps: loss_of(values, batch, **taps)[0]


class _Units(NamedTuple):
    """A batch as units, in parts whose gradients are summed apart: thirds, or everything."""

    batch_U: PyTree  # leaves [U, examples of a unit, ...]
    unit_size: int  # examples of a unit
    group: int  # units of one pass
    num_units: Array  # int32 []: those that count; the rest is padding
    ends_P: Array  # int32 [P]: where each part ends

    @property
    def size(self) -> int:
        """Units with padding."""
        return jax.tree.leaves(self.batch_U)[0].shape[0]

    def fold(self, parts_I: np.ndarray, body: Callable, carry: PyTree) -> PyTree:
        """Fold `body(i, index_C, valid_C, units_C, carry)` over the passes of each part listed."""
        starts_P = jnp.concatenate([jnp.zeros(1, jnp.int32), self.ends_P[:-1]])
        starts_I, ends_I = starts_P[parts_I], self.ends_P[parts_I]
        passes_I = -(-(ends_I - starts_I) // self.group)
        done_I = jnp.cumsum(passes_I)

        def one_pass(k, carry):
            i = jnp.sum(k >= done_I)
            first = starts_I[i] + (k - done_I[i] + passes_I[i]) * self.group
            index_C = first + jnp.arange(self.group)
            # The last pass repeats its part's last unit, as padding may hold anything.
            inside_C = jnp.minimum(index_C, ends_I[i] - 1)
            units_C = jax.tree.map(lambda leaf: leaf[inside_C], self.batch_U)
            return body(i, index_C, index_C < ends_I[i], units_C, carry)

        if len(parts_I) == 1 and self.group >= self.size:
            return one_pass(0, carry)
        return lax.fori_loop(0, done_I[-1], one_pass, carry)


def _sum_gradients(
    loss_of: LossFn, params: PyTree, units: _Units, estimator: str
) -> tuple[PyTree, Array]:
    """Each part's sum of gradients, leaves [P, ...], and each unit's squared norm, float32 [U]."""

    def add_pass(part, index_C, valid_C, units_C, carry):
        sums_P, norms_U = carry
        grad_sum, norms_C = _ESTIMATORS[estimator][0](loss_of, params, units_C, valid_C)
        sums_P = jax.tree.map(lambda sum_P, leaf: sum_P.at[part].add(leaf), sums_P, grad_sum)
        return sums_P, norms_U.at[index_C].add(jnp.where(valid_C, norms_C, 0.0))

    num_parts = len(units.ends_P)
    zeros_P = jax.tree.map(lambda leaf: jnp.zeros((num_parts, *leaf.shape), jnp.float32), params)
    carry = (zeros_P, jnp.zeros(units.size, jnp.float32))
    return units.fold(np.arange(num_parts), add_pass, carry)


def _multiply(
    loss_of: LossFn, params: PyTree, units: _Units, estimator: str, sums_3: PyTree, scale: Array
) -> Array:
    """Products of units' gradients with the mean, and with the first two thirds': float32 [3, U].

    Only the last third is multiplied with the means of the other two. In units of `scale`.
    """
    root = jnp.sqrt(scale)
    thirds_23 = jnp.eye(3, dtype=jnp.float32)[:2] / jnp.maximum(units.num_units // 3, 1)
    shares_33 = jnp.stack([jnp.ones(3, jnp.float32) / units.num_units, *thirds_23]) / root
    directions_3 = jax.tree.map(
        lambda sum_3: jnp.tensordot(shares_33, sum_3, 1, precision="highest"), sums_3
    )

    def multiply(parts_I, num_directions, products_3U):
        rows = slice(num_directions)
        directions = jax.tree.map(lambda leaf_3: leaf_3[rows], directions_3)

        def multiply_pass(_, index_C, valid_C, units_C, products_3U):
            products = _ESTIMATORS[estimator][1](loss_of, params, units_C, directions)
            products = products.astype(jnp.float32) / root
            return products_3U.at[rows, index_C].add(jnp.where(valid_C[None], products, 0.0))

        return units.fold(parts_I, multiply_pass, products_3U)

    products_3U = jnp.zeros((3, units.size), jnp.float32)
    return multiply(np.array([2]), 3, multiply(np.array([0, 1]), 1, products_3U))


def resolve_estimator(estimator: Estimator, loss_fn: LossFn, *, inner_products: bool) -> Estimator:
    """The estimator that `gradient_stats` uses for a loss function: `auto` resolved.

    Args:
      estimator: Its name, or `auto`.
      loss_fn: Whose gradients are measured.
      inner_products: Whether inner products are wanted.

    Returns:
      `vmap`, `taps`, `chunks` or `jvp`.

    Raises:
      ValueError: If it is unknown, or does not serve `loss_fn` or the request.
    """
    if estimator not in (*_ESTIMATORS, "auto"):
        raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(_ESTIMATORS)}, auto")
    parameters = inspect.signature(loss_fn).parameters
    if estimator == "auto":
        # One that takes any keyword may drop this one.
        return "taps" if "tap_B" in parameters else "vmap"
    takes_taps = "tap_B" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    if estimator == "taps" and not takes_taps:
        name = getattr(loss_fn, "__name__", repr(loss_fn))
        raise ValueError(
            f"estimator='taps': loss_fn {name} does not take the keyword tap_B; use vmap, chunks "
            "or (for inner products) jvp, or auto"
        )
    if estimator == "jvp" and not inner_products:
        raise ValueError(
            "estimator='jvp' measures inner products: for a test without them use taps, vmap, "
            "chunks or auto"
        )
    return estimator


def _units(
    batch: PyTree,
    estimator: str,
    chunk_size: int | None,
    num_examples: Array | int | None,
    inner_products: bool,
) -> _Units:
    """Divide a batch into units, passes and parts."""
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or min(sizes) < MIN_EXAMPLES:
        raise ValueError(
            f"batch: leading axes {sorted(sizes)}, expected one size, at least {MIN_EXAMPLES}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: expected at least 1")
    (size,) = sizes
    if estimator == "chunks":
        if chunk_size is None or size % chunk_size or size < MIN_EXAMPLES * chunk_size:
            raise ValueError(
                f"chunk_size={chunk_size}: estimator='chunks' needs one that divides the batch's "
                f"{size} examples into at least {MIN_EXAMPLES} chunks"
            )
        unit_size, group = chunk_size, 1
    else:
        parts = [size // 3, size // 3, size - 2 * (size // 3)] if inner_products else [size]
        # The least padding; a pass costs about one example more than it has places.
        limit = min(chunk_size or size, parts[-1])
        cost = {g: (g + 1) * sum(-(-part // g) for part in parts) for g in range(limit, 0, -1)}
        unit_size, group = 1, min(cost, key=cost.__getitem__)
    count = (size if num_examples is None else num_examples) // unit_size
    u = jnp.asarray(count, jnp.int32)
    third = jnp.maximum(u // 3, 1)
    return _Units(
        batch_U=jax.tree.map(
            lambda leaf: jnp.asarray(leaf).reshape(-1, unit_size, *leaf.shape[1:]), batch
        ),
        unit_size=unit_size,
        group=group,
        num_units=u,
        ends_P=jnp.minimum(jnp.stack([third, 2 * third, u]), u) if inner_products else u[None],
    )


def _unit_grads(loss_fn: LossFn, params: PyTree, units_C: PyTree) -> PyTree:
    grads_C = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, units_C)
    return jax.tree.map(lambda leaf_C: leaf_C.astype(jnp.float32), grads_C)


def _unit_losses(loss_fn: LossFn, params: PyTree, units_C: PyTree) -> Array:
    return jax.vmap(loss_fn, in_axes=(None, 0))(params, units_C)


# Sum of the gradients of the valid units of a group, and each one's squared norm.


def _gradients_by_vmap(loss_fn, params, units_C, valid_C):
    grads_C = _unit_grads(loss_fn, params, units_C)
    grads_C = where_leading(valid_C, grads_C, jax.tree.map(jnp.zeros_like, grads_C))
    return jax.tree.map(lambda leaf_C: jnp.sum(leaf_C, axis=0), grads_C), squared_norms(grads_C)


def _gradients_by_taps(loss_fn, params, units_C, valid_C):
    batch_B = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), units_C)
    size = len(valid_C)
    is_reached = []

    @jax.custom_vjp
    def watched(tap_B):
        return tap_B

    def backward(_, norms_B):
        is_reached.append(True)  # while tracing, and only if a cotangent is formed at all
        return (norms_B,)

    watched.defvjp(lambda tap_B: (tap_B, None), backward)

    def loss(params, tap_B):
        return loss_fn(params, batch_B, tap_B=watched(tap_B))

    tap_B = jnp.where(valid_C, 0.0, -1.0).astype(jnp.float32)
    grad, norms_B = jax.grad(loss, argnums=(0, 1))(params, tap_B)
    if not is_reached:
        raise ValueError(
            "loss_fn: takes the keyword tap_B without using it, so that it gives no gradient norms;"
            " hand it to the layers (`models.layers`), or use estimator='vmap'"
        )
    # Of the mean loss: an example's gradient is `size` times its share.
    return jax.tree.map(
        lambda leaf: size * leaf.astype(jnp.float32), grad
    ), size**2 * norms_B.astype(jnp.float32)


def _gradients_by_losses(loss_fn, params, units_C, valid_C):
    def loss(params):
        return jnp.sum(jnp.where(valid_C, _unit_losses(loss_fn, params, units_C), 0.0))

    grad = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), jax.grad(loss)(params))
    return grad, jnp.zeros(len(valid_C), jnp.float32)


# Inner products of the directions [E, ...] with the gradients of a group's units: [E, C].


def _products_by_vmap(loss_fn, params, units_C, directions_E):
    def product(leaf_E, leaf_C):
        rows_E, rows_C = (leaf.reshape(len(leaf), -1) for leaf in (leaf_E, leaf_C))
        return jnp.matmul(rows_E, rows_C.T, precision="highest")

    grads_C = _unit_grads(loss_fn, params, units_C)
    products = jax.tree.leaves(jax.tree.map(product, directions_E, grads_C))
    return jnp.sum(jnp.stack(products), axis=0)


def _products_by_jvp(loss_fn, params, units_C, directions_E):
    def slopes(direction):
        tangents = jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), direction, params)
        return jax.jvp(lambda p: _unit_losses(loss_fn, p, units_C), (params,), (tangents,))[1]

    return jax.vmap(slopes)(directions_E)


# By estimator: the sum of gradients and each one's squared norm; inner products.
_ESTIMATORS: dict[str, tuple[Callable[..., tuple[PyTree, Array]], Callable[..., Array]]] = {
    "vmap": (_gradients_by_vmap, _products_by_vmap),
    "taps": (_gradients_by_taps, _products_by_jvp),
    "chunks": (_gradients_by_vmap, _products_by_vmap),
    "jvp": (_gradients_by_losses, _products_by_jvp),
}
