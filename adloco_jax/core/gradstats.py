"""Per-example gradient statistics at one point: the raw material of the batch-size tests.

With n_j = |g_j|^2, the mean gradient g and p_j = <g_j, g> over t examples (ALGORITHM 2):

  noise    S = (sum n_j - t |g|^2) / (t - 1)            trace of the gradient covariance, unbiased
  signal   G2 = (t^2 |g|^2 - sum n_j) / (t (t - 1))     squared norm of the true gradient, unbiased
  V        covariance of <g_j, g_1> and <g_j, g_2> over the last third, g_1 and g_2 the means of the
           first two: the variance of inner products with the true gradient, unbiased
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

from adloco_jax.core.base import GradientStats, LossFn

MIN_EXAMPLES = 2  # a sample variance needs two
MIN_EXAMPLES_INNER_PRODUCT = 4  # thirds of 1, 1 and 2


def gradient_stats(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    *,
    estimator: Literal["vmap"] = "vmap",
    chunk_size: int | None = None,
    num_examples: Int[Array, ""] | int | None = None,
    inner_products: bool = True,
) -> GradientStats:
    """Exact statistics of the per-example gradients of `batch` at `params`.

    Costs one forward and backward pass over the batch, and a second one if inner products are asked
    for and the batch does not fit into one chunk. Accumulates in float32.

    Args:
      loss_fn: `loss_fn(params, batch) -> scalar`, the mean over examples; it is called with one
        example at a time, its leading axis kept.
      params: Any pytree of arrays.
      batch: Pytree of leaves [B, ...], B >= 2.
      estimator: `vmap`: per-example gradients by `vmap(grad)`.
      chunk_size: Examples whose gradients are held at once; memory is `chunk_size` times the
        parameters. None holds all of them.
      num_examples: t <= B: only the first t examples count, the rest is padding; data, so that one
        compiled program serves every t. None counts all.
      inner_products: Whether the inner-product fields are wanted; the norm test does without.

    Returns:
      The statistics, fields of shape [].

    Raises:
      ValueError: While tracing, if the estimator is unknown, the leaves disagree on B or B < 2, or
        `chunk_size` is not positive.

    Source: ALGORITHM 2; McCandlish et al. 2018 (arXiv 1812.06162), appendix A, for S and G2.
    """
    if estimator != "vmap":
        raise ValueError(f"estimator={estimator!r}: expected 'vmap'")
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or min(sizes) < MIN_EXAMPLES:
        raise ValueError(
            f"batch: leading axes {sorted(sizes)}, expected one size, at least {MIN_EXAMPLES}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: expected at least 1")
    (size,) = sizes
    chunk = min(chunk_size or size, size)
    num_chunks = -(-size // chunk)
    t = jnp.asarray(size if num_examples is None else num_examples, jnp.int32)
    index_B = jnp.arange(num_chunks * chunk)
    valid_B = index_B < t
    third_B = jnp.minimum(index_B // jnp.maximum(t // 3, 1), 2)

    def pad(leaf):
        widths = [(0, num_chunks * chunk - size)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, widths).reshape(num_chunks, chunk, *leaf.shape[1:])

    chunks = jax.tree.map(pad, batch)

    def gradients(i):
        """Float32 gradients [chunk, ...] of chunk i, zero where the example is padding."""
        examples = jax.tree.map(lambda leaf: leaf[i], chunks)
        valid = lax.dynamic_slice_in_dim(valid_B, i * chunk, chunk)

        def one(example):
            return jax.grad(loss_fn)(params, jax.tree.map(lambda leaf: leaf[None], example))

        def clean(leaf):
            shape = (-1,) + (1,) * (leaf.ndim - 1)
            return jnp.where(valid.reshape(shape), leaf.astype(jnp.float32), 0.0)

        return jax.tree.map(clean, jax.vmap(one)(examples))

    def over_chunks(body, carry):
        if num_chunks == 1:
            return body(0, carry)
        last = num_chunks if num_examples is None else (t + chunk - 1) // chunk
        return lax.fori_loop(0, last, body, carry)

    # First pass: squared norms, and gradient sums by third (or in all, if nobody needs the thirds).
    num_parts = 3 if inner_products else 1
    part_B = third_B if inner_products else jnp.zeros_like(third_B)

    def add_chunk(i, carry):
        sums_3, norms_B = carry
        grads = gradients(i)
        parts = lax.dynamic_slice_in_dim(part_B, i * chunk, chunk)

        def add(sum_3, leaf):
            shape = (-1,) + (1,) * (leaf.ndim - 1)
            by_part = [
                jnp.sum(jnp.where((parts == part).reshape(shape), leaf, 0.0), axis=0)
                for part in range(num_parts)
            ]
            return sum_3 + jnp.stack(by_part)

        return (
            jax.tree.map(add, sums_3, grads),
            lax.dynamic_update_slice_in_dim(norms_B, _squared_norms(grads), i * chunk, 0),
        )

    zeros_3 = jax.tree.map(lambda leaf: jnp.zeros((num_parts, *leaf.shape), jnp.float32), params)
    sums_3, norms_B = over_chunks(add_chunk, (zeros_3, jnp.zeros(num_chunks * chunk)))
    mean = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) / t, sums_3)

    count = t.astype(jnp.float32)
    scale = jnp.sum(norms_B) / count
    safe = jnp.where(scale > 0, scale, 1.0)
    # Divide before summing or squaring: the squares of tiny gradients would vanish in float32.
    norm_sum = jnp.sum(norms_B / safe)
    mean_norm = _squared_norms(jax.tree.map(lambda leaf: leaf[None], mean))[0] / safe
    zero = jnp.zeros(())
    stats = GradientStats(
        scale=scale,
        num_examples=count,
        noise_sum=norm_sum - count * mean_norm,
        noise_weight=count - 1,
        signal_sum=count**2 * mean_norm - norm_sum,
        signal_weight=count * (count - 1),
        ip_sum=zero,
        ip_weight=zero,
        plugin_ip_sum=zero,
        plugin_orth_sum=zero,
    )
    if not inner_products:
        return stats

    # Second pass: inner products with the mean and with the means of the first two thirds.
    third = jnp.maximum(t // 3, 1)
    root = jnp.sqrt(safe)
    directions_3 = jax.tree.map(
        lambda mean_leaf, sum_3: jnp.stack([mean_leaf, sum_3[0] / third, sum_3[1] / third]) / root,
        mean,
        sums_3,
    )

    def project_chunk(i, products_3B):
        leaves = jax.tree.leaves(jax.tree.map(_projections, directions_3, gradients(i)))
        return lax.dynamic_update_slice_in_dim(products_3B, sum(leaves) / root, i * chunk, 1)

    p_B, first_B, second_B = over_chunks(project_chunk, jnp.zeros((3, num_chunks * chunk)))
    last_B = valid_B & (third_B == 2)
    num_last = jnp.sum(last_B).astype(jnp.float32)

    def centred(values_B):
        mean = jnp.sum(jnp.where(last_B, values_B, 0.0)) / jnp.maximum(num_last, 1.0)
        return jnp.where(last_B, values_B - mean, 0.0)

    has_products = count >= MIN_EXAMPLES_INNER_PRODUCT
    p_sum = jnp.sum(jnp.where(valid_B, p_B**2, 0.0))
    return stats.replace(
        ip_sum=jnp.where(has_products, jnp.sum(centred(first_B) * centred(second_B)), 0.0),
        ip_weight=jnp.where(has_products, num_last - 1, 0.0),
        plugin_ip_sum=jnp.sum(jnp.where(valid_B, (p_B - mean_norm) ** 2, 0.0)),
        plugin_orth_sum=norm_sum - p_sum / jnp.where(mean_norm > 0, mean_norm, 1.0),
    )


def pool(stats: GradientStats) -> GradientStats:
    """Combines the statistics of several workers at the same point: sums add, and so do weights.

    Scalars only; no vector of model size is reduced. Inner products stay those with each worker's
    own mean. Works on NumPy arrays as on JAX arrays.

    Args:
      stats: Fields of shape [n].

    Returns:
      Fields of shape [], in units of the largest scale.

    Source: ALGORITHM 2, "Several workers".
    """
    scale = stats.scale.max(axis=0)
    ratio_n = stats.scale / (scale + (scale == 0))

    def total(values_n, power):
        return (values_n * ratio_n**power).sum(axis=0)

    return GradientStats(
        scale=scale,
        num_examples=stats.num_examples.sum(axis=0),
        noise_sum=total(stats.noise_sum, 1),
        noise_weight=stats.noise_weight.sum(axis=0),
        signal_sum=total(stats.signal_sum, 1),
        signal_weight=stats.signal_weight.sum(axis=0),
        ip_sum=total(stats.ip_sum, 2),
        ip_weight=stats.ip_weight.sum(axis=0),
        plugin_ip_sum=total(stats.plugin_ip_sum, 2),
        plugin_orth_sum=total(stats.plugin_orth_sum, 1),
    )


def _squared_norms(tree_B: PyTree) -> Array:
    """Squared L2 norm of each example's pytree: [B]."""
    norms = [
        jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))
        for leaf in jax.tree.leaves(tree_B)
    ]
    return jnp.sum(jnp.stack(norms), axis=0)


def _projections(directions_3: Array, grads_B: Array) -> Array:
    """Inner products of each example's gradient with each direction: [3, B]."""
    grads_B = grads_B.reshape(grads_B.shape[0], -1)
    return jnp.matmul(directions_3.reshape(3, -1), grads_B.T, precision="highest")
