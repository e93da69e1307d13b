"""Per-example gradient statistics at one point, for the batch-size tests.

The noise S = (sum |g_j|^2 - t |g|^2) / (t - 1) and the signal G2 = |g|^2 - S / t of t gradients g_j
with mean g are unbiased; so is the variance from inner products (docs/algorithm.md, section 2).
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
from adloco_jax.core.meshes import on_any_mesh, varying_alike
from adloco_jax.core.types import (
    GradientStats,
    LossFn,
    norms,
    trainable,
    where_leading,
)

Estimator: TypeAlias = Literal["vmap", "taps", "auto"]

MIN_EXAMPLES = 2  # a sample variance needs two
MIN_EXAMPLES_INNER_PRODUCT = 4  # thirds of 1, 1 and 2 examples; a covariance needs two


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
    """Measure statistics of the per-example gradients of `batch` at the point `params`.

    The estimators give the same numbers from one forward and backward pass; inner products need a
    second pass, and six float32 arrays of the size of the parameters instead of one.

    - `vmap` computes every gradient, for any loss. It needs memory for `chunk_size` gradients.
    - `taps` reads norms from a plain backward pass, for a `loss_fn` with the keyword `tap_B` or any
      keyword. Its inner products come from a forward-mode pass.
    - `auto` means `taps` if `loss_fn` has a parameter named `tap_B`, else `vmap`.

    `tap_B`, float32 [B], is zero, or -1 to leave an example out of the gradient. Its cotangent must
    be the squared norm of each example's share of the mean loss's gradient (see `models.layers`);
    gradients below 1e-15 or above 1e15 are not measured. A parameter without a tap, or used twice
    (tied weights), gives wrong norms unnoticed: compare a new model with `vmap` once.

    Args:
      loss_fn: `loss_fn(params, batch) -> scalar`, the mean over examples, also called with batches
        of one. If it takes a `key`, it receives the same key in every call.
      params: Any pytree of arrays; gradients are those of its floating-point leaves.
      batch: Pytree of leaves [B, ...], B >= 2.
      estimator: `vmap`, `taps` or `auto`.
      chunk_size: Largest number of examples in one pass; None sets no bound.
      num_examples: t <= B: examples after the first t are padding and may hold anything. A traced t
        lets one program serve every t. None: all count.
      inner_products: Whether to measure inner products; the norm test does not need them.
      has_aux: Whether `loss_fn` returns a pair (scalar, auxiliary output, ignored here).

    Returns:
      The statistics; each field has shape [].

    Source: docs/algorithm.md, section 2; S and G2: McCandlish et al. 2018 (arXiv 1812.06162),
      appendix A.
    """
    estimator = resolve_estimator(estimator, loss_fn)
    params, batch = varying_alike(params, batch)
    loss_of, params = _scalar_loss(loss_fn, params, has_aux=has_aux), trainable(params)
    examples = _examples(batch, chunk_size, num_examples, inner_products)
    sums_P, norms_B = _sum_gradients(loss_of, params, examples, estimator)
    count = examples.count.astype(jnp.float32)
    mean = jax.tree.map(lambda sum_P: sum_P.sum(axis=0) / count, sums_P)
    stats, rms, mean_norm = _of_means(mean, norms_B, count, 1)
    if inner_products:
        products_3B = _multiply(loss_of, params, examples, estimator, sums_P, rms)
        return _with_products(stats, examples, products_3B, mean_norm)
    return stats


@on_any_mesh(lambda whole, *_, **__: whole)
def gradient_stats_of_means(
    mean: PyTree, norms_N: Float[Array, " N"], *, batch_size: int
) -> GradientStats:
    """Compute gradient statistics from N mean gradients that a training loop has in any case.

    These are the gradients of devices or micro-batches, each the mean of `batch_size` examples:
    `mean` is their mean, `norms_N` are their L2 norms. The result, fields [], has no inner
    products.

    Noise and signal are unbiased, but the noise has the relative standard error
    sqrt(2 / ((N - 1) d)), d = (tr Sigma)^2 / tr Sigma^2; `gradient_stats` has N * batch_size in
    place of N. So average over steps before a test: convert each step's statistics with
    `in_units_of(1.0)`, then average sums and weights separately. N = 1 shows no noise: its weights
    are zero, and a test of it alone gives NaN.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A, extended from 2 to N gradients.
    """
    norms_N = jnp.asarray(norms_N, jnp.float32)
    if norms_N.ndim != 1 or len(norms_N) < 1 or batch_size < 1:
        raise ValueError(
            f"norms_N has shape {norms_N.shape}, batch_size={batch_size}: expected one norm for"
            " each mean gradient, and the positive number of examples behind each"
        )
    return _of_means(mean, norms_N, jnp.float32(len(norms_N)), batch_size)[0]


def _of_means(
    mean: PyTree, norms_X: Array, count: Array, batch_size: int
) -> tuple[GradientStats, Array, Array]:
    """Compute statistics from gradients that are themselves means of `batch_size` examples."""
    # Divide before squaring: the squares of tiny gradients would vanish in float32.
    rms = norms(norms_X[None])[0] / jnp.sqrt(count)
    safe = jnp.where(rms > 0, rms, 1.0)
    mean_norm = jnp.square(norms(jax.tree.map(lambda leaf: leaf[None], mean))[0] / safe)
    noise_sum = batch_size * (jnp.sum(jnp.square(norms_X / safe)) - count * mean_norm)
    noise_sum = jnp.where(count > 1, noise_sum, 0.0)  # else only a rounding error
    zero = jnp.zeros((), jnp.float32)
    stats = GradientStats(
        scale=jnp.square(rms),
        num_examples=count * batch_size,
        noise_sum=noise_sum,
        noise_weight=count - 1,
        signal_sum=count * ((count - 1) * mean_norm - noise_sum / (count * batch_size)),
        signal_weight=count * (count - 1),
        **dict.fromkeys(("ip_sum", "ip_weight", "plugin_ip_sum", "plugin_orth_sum"), zero),
    )
    return stats, safe, mean_norm


def _with_products(
    stats: GradientStats, examples: "_Examples", products_3B: Array, mean_norm: Array
) -> GradientStats:
    p_B, first_B, second_B = products_3B
    t, index_B = examples.count, jnp.arange(examples.size)
    last_B = (index_B >= 2 * jnp.maximum(t // 3, 1)) & (index_B < t)
    num_last = jnp.sum(last_B).astype(jnp.float32)

    def centred(values_B):
        mean = jnp.sum(jnp.where(last_B, values_B, 0.0)) / jnp.maximum(num_last, 1.0)
        return jnp.where(last_B, values_B - mean, 0.0)

    has_products = t >= MIN_EXAMPLES_INNER_PRODUCT
    covariance_sum = jnp.sum(centred(first_B) * centred(second_B))
    plugin_ip_sum = jnp.sum(jnp.where(index_B < t, (p_B - mean_norm) ** 2, 0.0))
    return stats.replace(
        ip_sum=jnp.where(has_products, covariance_sum, 0.0),
        ip_weight=jnp.where(has_products, num_last - 1, 0.0),
        plugin_ip_sum=plugin_ip_sum,
        # By the identity S = V_ip / |mean|^2 + V_o (docs/algorithm.md, section 2).
        plugin_orth_sum=stats.noise_sum - plugin_ip_sum / jnp.where(mean_norm > 0, mean_norm, 1.0),
    )


def pool(stats: GradientStats) -> GradientStats:
    """Combine the statistics of several workers at the same point: fields [n] -> [].

    The result is in units of the largest scale. Inner products stay those with each worker's own
    mean gradient. Arrays may be NumPy's or JAX's.

    Source: docs/algorithm.md, section 2, "Several workers".
    """
    scale = stats.scale.max(axis=0)
    same = stats.in_units_of(scale).replace(scale=stats.scale)
    return jax.tree.map(lambda values_n: values_n.sum(axis=0), same).replace(scale=scale)


def _scalar_loss(loss_fn: LossFn, params: PyTree, *, has_aux: bool = False) -> LossFn:
    loss_of = trainable_loss(with_fixed_key(loss_fn), params, has_aux=has_aux)
    return lambda values, batch, **taps: loss_of(values, batch, **taps)[0]


class _Examples(NamedTuple):
    """A batch in several passes; its parts are thirds, or the whole without inner products."""

    batch_B: PyTree  # leaves [B, 1, ...]: every example is a batch of size 1
    group: int  # number of examples in one pass
    count: Array  # int32 []: number of valid examples; the others are padding
    ends_P: Array  # int32 [P]: for each part, the position after its last example

    @property
    def size(self) -> int:
        return jax.tree.leaves(self.batch_B)[0].shape[0]

    def fold(self, parts_I: np.ndarray, body: Callable, carry: PyTree) -> PyTree:
        """Call `carry = body(i, index_C, valid_C, batch_C, carry)` pass by pass; return `carry`.

        `i` is the part's index in `parts_I`, `index_C` the examples' positions in the batch, and
        `valid_C` whether they belong to the part.
        """
        starts_P = jnp.concatenate([jnp.zeros(1, jnp.int32), self.ends_P[:-1]])
        starts_I, ends_I = starts_P[parts_I], self.ends_P[parts_I]
        passes_I = -(-(ends_I - starts_I) // self.group)
        done_I = jnp.cumsum(passes_I)

        def one_pass(k, carry):
            i = jnp.sum(k >= done_I)
            first = starts_I[i] + (k - done_I[i] + passes_I[i]) * self.group
            index_C = first + jnp.arange(self.group)
            # The last pass of a part is filled with the part's last example, because padding may
            # hold anything.
            inside_C = jnp.minimum(index_C, ends_I[i] - 1)
            batch_C = jax.tree.map(lambda leaf: leaf[inside_C], self.batch_B)
            return body(i, index_C, index_C < ends_I[i], batch_C, carry)

        if len(parts_I) == 1 and self.group >= self.size:
            return one_pass(0, carry)
        carry, _ = varying_alike(carry, self.batch_B)
        return lax.fori_loop(0, done_I[-1], one_pass, carry)


def _sum_gradients(
    loss_of: LossFn, params: PyTree, examples: _Examples, estimator: str
) -> tuple[PyTree, Array]:
    """Sum the gradients of each part, [P, ...]; measure each example's norm, float32 [B]."""
    measure, _ = _ESTIMATORS[estimator]

    def add_pass(part, index_C, valid_C, batch_C, carry):
        sums_P, norms_B = carry
        grad_sum, norms_C = measure(loss_of, params, batch_C, valid_C)
        sums_P = jax.tree.map(lambda sum_P, leaf: sum_P.at[part].add(leaf), sums_P, grad_sum)
        return sums_P, norms_B.at[index_C].add(jnp.where(valid_C, norms_C, 0.0))

    num_parts = len(examples.ends_P)
    zeros_P = jax.tree.map(lambda leaf: jnp.zeros((num_parts, *leaf.shape), jnp.float32), params)
    carry = (zeros_P, jnp.zeros(examples.size, jnp.float32))
    return examples.fold(np.arange(num_parts), add_pass, carry)


def _multiply(
    loss_of: LossFn,
    params: PyTree,
    examples: _Examples,
    estimator: str,
    sums_3: PyTree,
    rms: Array,
) -> Array:
    """Multiply gradients with the means of all, of the first and of the second third: [3, B].

    The last two are zero outside the last third. Products are in units of `rms**2`.
    """
    thirds_23 = jnp.eye(3, dtype=jnp.float32)[:2] / jnp.maximum(examples.count // 3, 1)
    shares_33 = jnp.stack([jnp.ones(3, jnp.float32) / examples.count, *thirds_23]) / rms
    directions_3 = jax.tree.map(
        lambda sum_3: jnp.tensordot(shares_33, sum_3, 1, precision="highest"), sums_3
    )
    _, product = _ESTIMATORS[estimator]

    def multiply(parts_I, num_directions, products_3B):
        rows = slice(num_directions)
        directions = jax.tree.map(lambda leaf_3: leaf_3[rows], directions_3)

        def multiply_pass(_, index_C, valid_C, batch_C, products_3B):
            products = product(loss_of, params, batch_C, directions)
            products = products.astype(jnp.float32) / rms
            return products_3B.at[rows, index_C].add(jnp.where(valid_C[None], products, 0.0))

        return examples.fold(parts_I, multiply_pass, products_3B)

    products_3B = jnp.zeros((3, examples.size), jnp.float32)
    return multiply(np.array([2]), 3, multiply(np.array([0, 1]), 1, products_3B))


def resolve_estimator(estimator: Estimator, loss_fn: LossFn) -> Estimator:
    """Resolve `auto` to `taps` if a loss names the parameter `tap_B`, else to `vmap`."""
    if estimator != "auto":
        return estimator
    return "taps" if "tap_B" in inspect.signature(loss_fn).parameters else "vmap"


def _examples(
    batch: PyTree, chunk_size: int | None, num_examples: Array | int | None, inner_products: bool
) -> _Examples:
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or min(sizes) < MIN_EXAMPLES:
        raise ValueError(
            f"batch: leading axes {sorted(sizes)}, expected one size, at least {MIN_EXAMPLES}"
        )
    (size,) = sizes
    parts = [size // 3, size // 3, size - 2 * (size // 3)] if inner_products else [size]
    # Choose the cheapest size of a pass. A pass over g examples costs about as much as g + 1
    # examples.
    limit = min(chunk_size or size, parts[-1])
    cost = {g: (g + 1) * sum(-(-part // g) for part in parts) for g in range(limit, 0, -1)}
    t = jnp.asarray(size if num_examples is None else num_examples, jnp.int32)
    third = jnp.maximum(t // 3, 1)
    return _Examples(
        batch_B=jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], batch),
        group=min(cost, key=cost.__getitem__),
        count=t,
        ends_P=jnp.minimum(jnp.stack([third, 2 * third, t]), t) if inner_products else t[None],
    )


def _example_grads(loss_fn: LossFn, params: PyTree, batch_C: PyTree) -> PyTree:
    grads_C = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, batch_C)
    return jax.tree.map(lambda leaf_C: leaf_C.astype(jnp.float32), grads_C)


# The next two functions return the sum of the gradients of the valid examples of a pass, and the
# norm of each gradient.


def _gradients_by_vmap(loss_fn, params, batch_C, valid_C):
    grads_C = _example_grads(loss_fn, params, batch_C)
    grads_C = where_leading(valid_C, grads_C, jax.tree.map(jnp.zeros_like, grads_C))
    return jax.tree.map(lambda leaf_C: jnp.sum(leaf_C, axis=0), grads_C), norms(grads_C)


def _gradients_by_taps(loss_fn, params, batch_C, valid_C):
    batch_B = jax.tree.map(lambda leaf: leaf[:, 0], batch_C)
    size = len(valid_C)
    is_reached = []

    @jax.custom_vjp
    def watched(tap_B):
        return tap_B

    def backward(_, norms_B):
        is_reached.append(True)  # runs while tracing, if the tap has a cotangent
        return (norms_B,)

    watched.defvjp(lambda tap_B: (tap_B, None), backward)

    def loss(params, tap_B):
        return loss_fn(params, batch_B, tap_B=watched(tap_B))

    tap_B, _ = varying_alike(jnp.where(valid_C, 0.0, -1.0).astype(jnp.float32), params)
    grad, norms_B = jax.grad(loss, argnums=(0, 1))(params, tap_B)
    if not is_reached:
        raise ValueError(
            "loss_fn: takes the keyword tap_B without using it, so that it gives no gradient norms;"
            " hand it to the layers (`models.layers`), or use estimator='vmap'"
        )
    # The loss is a mean, so an example's gradient is `size` times its share of the mean gradient.
    return jax.tree.map(lambda leaf: size * leaf.astype(jnp.float32), grad), size * jnp.sqrt(
        norms_B.astype(jnp.float32)
    )


# The next two functions return the inner products of directions [E, ...] with the gradients of the
# examples of a pass: [E, C].


def _products_by_vmap(loss_fn, params, batch_C, directions_E):
    def product(leaf_E, leaf_C):
        rows_E, rows_C = (leaf.reshape(len(leaf), -1) for leaf in (leaf_E, leaf_C))
        return jnp.matmul(rows_E, rows_C.T, precision="highest")

    grads_C = _example_grads(loss_fn, params, batch_C)
    products = jax.tree.leaves(jax.tree.map(product, directions_E, grads_C))
    return jnp.sum(jnp.stack(products), axis=0)


def _products_by_jvp(loss_fn, params, batch_C, directions_E):
    def slopes(direction):
        tangents = jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), direction, params)
        losses_of = jax.vmap(loss_fn, in_axes=(None, 0))
        return jax.jvp(lambda p: losses_of(p, batch_C), (params,), (tangents,))[1]

    return jax.vmap(slopes)(directions_E)


# For each estimator: the function for sums and norms, and the function for inner products.
_ESTIMATORS: dict[str, tuple[Callable[..., tuple[PyTree, Array]], Callable[..., Array]]] = {
    "vmap": (_gradients_by_vmap, _products_by_vmap),
    "taps": (_gradients_by_taps, _products_by_jvp),
}
