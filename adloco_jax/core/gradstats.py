"""Per-example gradient statistics at one point, for the batch-size tests.

The noise S = (sum |g_j|^2 - t |g|^2) / (t - 1) and the signal G2 = |g|^2 - S / t of t gradients g_j
with mean g are unbiased; so is the variance from inner products (docs/algorithm.md, section 2).

Axes of arrays, besides those of `core.types`: B all examples here, of which C are in one pass; P
the parts of a batch (its thirds, or the whole), of which I are chosen; E directions. `on_any_mesh`
lets a function take arrays that are sharded over explicit axes of a mesh too.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from adloco_jax.core.arguments import takes, trainable_loss, with_fixed_key
from adloco_jax.core.meshes import on_any_mesh, replicated, varying_alike
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


@on_any_mesh(replicated)
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

    Raises:
      ValueError: If leaves of `batch` differ in B, or B is below 2; if the loss is not one number;
        or, with `taps`, if the loss takes `tap_B` without using it.

    Source: docs/algorithm.md, section 2; S and G2: McCandlish et al. 2018 (arXiv 1812.06162),
      appendix A.
    """
    method = _METHODS[resolve_estimator(estimator, loss_fn)]
    # In `jax.shard_map`, JAX would otherwise sum the gradients over devices.
    params, batch = varying_alike(params, batch)
    loss_of = _scalar_loss(loss_fn, params, has_aux=has_aux)
    params = trainable(params)
    examples = _examples(batch, chunk_size, num_examples, inner_products)

    sums_P, norms_B = _sum_gradients(loss_of, params, examples, method)
    count = examples.count.astype(jnp.float32)
    mean = jax.tree.map(lambda sum_P: sum_P.sum(axis=0) / count, sums_P)
    # Each gradient is that of one example.
    stats, rms, mean_norm_sq = _of_means(mean, norms_B, count, batch_size=1)
    if not inner_products:
        return stats
    products_3B = _multiply(loss_of, params, examples, method, sums_P, rms)
    return _with_products(stats, examples, products_3B, mean_norm_sq)


@on_any_mesh(replicated)
def gradient_stats_of_means(
    mean: PyTree, norms_N: Float[Array, " N"], *, batch_size: int
) -> GradientStats:
    """Compute gradient statistics from N mean gradients that a training loop has in any case.

    These are the gradients of devices or micro-batches, each the mean of `batch_size` examples:
    `mean` is their mean, `norms_N` are their L2 norms. The result, fields [], has no inner
    products.

    Noise and signal are unbiased, but the noise has the relative standard error
    sqrt(2 / ((N - 1) d)), d = (tr Sigma)^2 / tr Sigma^2, Sigma being the covariance of the
    examples' gradients; `gradient_stats` has N * batch_size in place of N. So average over steps
    before a test: convert each step's statistics with `in_units_of(1.0)`, then average sums and
    weights separately. N = 1 shows no noise: its weights are zero, and a test of it alone gives
    NaN.

    Raises ValueError if `norms_N` is not one axis of at least one norm, or `batch_size` is below 1.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A, extended from 2 to N gradients.
    """
    norms_N = jnp.asarray(norms_N, jnp.float32)
    if norms_N.ndim != 1 or len(norms_N) < 1 or batch_size < 1:
        raise ValueError(
            f"norms_N has shape {norms_N.shape}, batch_size={batch_size}: expected one norm for"
            " each mean gradient, and the positive number of examples behind each"
        )
    count = jnp.float32(len(norms_N))
    stats, _, _ = _of_means(mean, norms_N, count, batch_size=batch_size)
    return stats


def _of_means(
    mean: PyTree, norms_X: Array, count: Array, *, batch_size: int
) -> tuple[GradientStats, Array, Array]:
    """Compute statistics from gradients that are themselves means of `batch_size` examples.

    Args:
      mean: The mean of all gradients, with the parameters' shapes.
      norms_X: Each gradient's L2 norm, float32 [X]; zero where an entry is padding.
      count: Number of gradients without padding, float32 [].
      batch_size: Number of examples of which each gradient is the mean.

    Returns:
      The statistics, without inner products; the root mean square of the norms (1 if it is zero);
      and |mean|^2 divided by the square of this root mean square. The last two are float32 [].
    """
    # Divide before squaring: the squares of tiny gradients would vanish in float32.
    rms = norms(norms_X[None])[0] / jnp.sqrt(count)
    safe = jnp.where(rms > 0, rms, 1.0)
    mean_norm_sq = jnp.square(norms(jax.tree.map(lambda leaf: leaf[None], mean))[0] / safe)
    # The noise of one example, which is `batch_size` times that of a mean of so many.
    noise_sum = batch_size * (jnp.sum(jnp.square(norms_X / safe)) - count * mean_norm_sq)
    noise_sum = jnp.where(count > 1, noise_sum, 0.0)  # else only a rounding error
    zero = jnp.zeros((), jnp.float32)
    stats = GradientStats(
        scale=jnp.square(rms),
        num_examples=count * batch_size,
        noise_sum=noise_sum,
        noise_weight=count - 1,
        # |mean|^2 - noise / (count * batch_size), times the weight.
        signal_sum=count * ((count - 1) * mean_norm_sq - noise_sum / (count * batch_size)),
        signal_weight=count * (count - 1),
        ip_sum=zero,
        ip_weight=zero,
        plugin_ip_sum=zero,
        plugin_orth_sum=zero,
    )
    return stats, safe, mean_norm_sq


def _with_products(
    stats: GradientStats, examples: "_Examples", products_3B: Array, mean_norm_sq: Array
) -> GradientStats:
    """Return `stats` with the sums of inner products.

    `products_3B`, from `_multiply`, has each gradient's products with the mean gradients of all
    examples, of the first third and of the second third. `mean_norm_sq` is the squared norm of the
    first of these means, float32 []. Both are in units of the mean squared norm of a gradient.
    """
    with_mean_B, with_first_B, with_second_B = products_3B
    t = examples.count
    index_B = jnp.arange(examples.size)
    # The products with the means of the first two thirds are compared on the last third only, whose
    # gradients are independent of both means.
    is_last_B = (index_B >= 2 * jnp.maximum(t // 3, 1)) & (index_B < t)  # in the last third
    num_last = jnp.sum(is_last_B).astype(jnp.float32)

    def centred(values_B: Array) -> Array:
        """Subtract the mean over the last third; return zero outside it."""
        # Divide by at least 1, as the last third of one or two examples is empty.
        mean = jnp.sum(jnp.where(is_last_B, values_B, 0.0)) / jnp.maximum(num_last, 1.0)
        return jnp.where(is_last_B, values_B - mean, 0.0)

    has_products = t >= MIN_EXAMPLES_INNER_PRODUCT
    covariance_sum = jnp.sum(centred(with_first_B) * centred(with_second_B))
    plugin_ip_sum = jnp.sum(jnp.where(index_B < t, (with_mean_B - mean_norm_sq) ** 2, 0.0))
    divisor = jnp.where(mean_norm_sq > 0, mean_norm_sq, 1.0)
    return stats.replace(
        ip_sum=jnp.where(has_products, covariance_sum, 0.0),
        ip_weight=jnp.where(has_products, num_last - 1, 0.0),
        plugin_ip_sum=plugin_ip_sum,
        # By the identity S = V_ip / |mean|^2 + V_o (docs/algorithm.md, section 2).
        plugin_orth_sum=stats.noise_sum - plugin_ip_sum / divisor,
    )


def pool(stats: GradientStats) -> GradientStats:
    """Combine the statistics of several workers at the same point: fields [n] -> [].

    n is the number of workers. Sums are added in units of the largest scale. A gradient's inner
    products stay those with the mean gradient of its own worker. Arrays may be NumPy's or JAX's.

    Source: docs/algorithm.md, section 2, "Several workers".
    """
    scale = stats.scale.max(axis=0)
    # `scale` is [n] here, like all other fields, so that one `tree.map` adds every field.
    in_one_unit = stats.in_units_of(scale).replace(scale=stats.scale)
    sums = jax.tree.map(lambda values_n: values_n.sum(axis=0), in_one_unit)
    return sums.replace(scale=scale)


def _scalar_loss(loss_fn: LossFn, params: PyTree, *, has_aux: bool = False) -> LossFn:
    """Make a loss of the trainable parameters that returns one number, with the same key always.

    The result is called `loss(values, batch) -> float []`, also with `tap_B=` if `loss_fn` takes
    that. `values` are the parameters with None in place of leaves that are not floating-point,
    which it takes from `params`. With `has_aux`, `loss_fn` returns a pair (scalar, auxiliary
    output), of which the second is dropped.
    """
    loss_and_aux = trainable_loss(with_fixed_key(loss_fn), params, has_aux=has_aux)

    # `**keywords` is `tap_B`, only for the estimator `taps`.
    def loss_of(values: PyTree, batch: PyTree, **keywords: Any) -> Array:
        """Return the loss without the auxiliary output."""
        loss, _ = loss_and_aux(values, batch, **keywords)
        return loss

    return loss_of


class _Examples(NamedTuple):
    """A batch whose examples are processed in passes of a fixed number of examples.

    Its parts are thirds, or one part if inner products are not measured. A pass has examples of one
    part only.
    """

    batch_B: PyTree  # leaves [B, 1, ...]: every example is a batch of size 1
    group: int  # number of examples in one pass
    count: Array  # int32 []: number of valid examples; the others are padding
    ends_P: Array  # int32 [P]: for each part, the position after its last example

    @property
    def size(self) -> int:
        """Number of examples, valid or not: B."""
        return jax.tree.leaves(self.batch_B)[0].shape[0]

    def scan_passes(self, parts_I: np.ndarray, body: Callable, carry: PyTree) -> PyTree:
        """Call `carry = body(i, index_C, valid_C, batch_C, carry)` pass by pass; return `carry`.

        All passes of the first part come first, then those of the next.

        Args:
          parts_I: Positions of the parts to pass over, in `ends_P`.
          body: Called for each pass. `i`, int32 [], is the position in `parts_I` of the part to
            which the pass belongs. `index_C` has the positions of the pass's examples in the batch.
            `valid_C` is false where a position is behind the part's end. `batch_C` has the
            examples, leaves [C, 1, ...]; where `valid_C` is false, copies of the part's last.
          carry: The value for the first call of `body`.
        """
        # A part starts where the one before it ends.
        starts_P = jnp.concatenate([jnp.zeros(1, jnp.int32), self.ends_P[:-1]])
        starts_I = starts_P[parts_I]
        ends_I = self.ends_P[parts_I]
        num_passes_I = -(-(ends_I - starts_I) // self.group)  # rounded up
        end_pass_I = jnp.cumsum(num_passes_I)  # the number of passes up to the end of each part

        def one_pass(k: Array | int, carry: PyTree) -> PyTree:
            """Run pass `k`, counted over all parts; return the new carry."""
            i = jnp.sum(k >= end_pass_I)  # the number of parts that ended before pass k
            first_pass_of_part = end_pass_I[i] - num_passes_I[i]
            pass_in_part = k - first_pass_of_part
            first = starts_I[i] + pass_in_part * self.group
            index_C = first + jnp.arange(self.group)
            # The last pass of a part is filled with the part's last example, because padding may
            # hold anything.
            inside_C = jnp.minimum(index_C, ends_I[i] - 1)
            batch_C = jax.tree.map(lambda leaf: leaf[inside_C], self.batch_B)
            return body(i, index_C, index_C < ends_I[i], batch_C, carry)

        if len(parts_I) == 1 and self.group >= self.size:  # one pass has all examples: no loop
            return one_pass(0, carry)
        # A loop's carry must vary over the mesh axes over which the examples vary.
        carry, _ = varying_alike(carry, self.batch_B)
        return lax.fori_loop(0, end_pass_I[-1], one_pass, carry)


class _Method(NamedTuple):
    """The two functions by which an estimator measures the examples of one pass."""

    # `(loss_of, params, batch_C, valid_C) -> (sum of the valid examples' gradients, norms_C)`
    gradients: Callable[[LossFn, PyTree, PyTree, Array], tuple[PyTree, Array]]
    # `(loss_of, params, batch_C, directions_E) -> inner products with the gradients [E, C]`
    products: Callable[[LossFn, PyTree, PyTree, PyTree], Array]


def _sum_gradients(
    loss_of: LossFn, params: PyTree, examples: _Examples, method: _Method
) -> tuple[PyTree, Array]:
    """Return the sum of each part's gradients, float32 [P, ...], and the examples' norms.

    The norms are float32 [B], with zero for padding. `params` are the trainable parameters,
    `loss_of(params, batch)` is the loss, and `method` measures the examples of one pass.
    """

    def add_pass(
        part: Array, index_C: Array, valid_C: Array, batch_C: PyTree, carry: tuple[PyTree, Array]
    ) -> tuple[PyTree, Array]:
        """Add the gradients and norms of one pass; the body of `scan_passes`."""
        sums_P, norms_B = carry
        grad_sum, norms_C = method.gradients(loss_of, params, batch_C, valid_C)
        sums_P = jax.tree.map(lambda sum_P, leaf: sum_P.at[part].add(leaf), sums_P, grad_sum)
        # A position behind the part's end adds zero; JAX drops one that is not in the batch.
        return sums_P, norms_B.at[index_C].add(jnp.where(valid_C, norms_C, 0.0))

    num_parts = len(examples.ends_P)
    zeros_P = jax.tree.map(lambda leaf: jnp.zeros((num_parts, *leaf.shape), jnp.float32), params)
    carry = (zeros_P, jnp.zeros(examples.size, jnp.float32))
    return examples.scan_passes(np.arange(num_parts), add_pass, carry)


def _multiply(
    loss_of: LossFn,
    params: PyTree,
    examples: _Examples,
    method: _Method,
    sums_3: PyTree,
    rms: Array,
) -> Array:
    """Multiply each example's gradient with three mean gradients; return float32 [3, B].

    The means are those of all examples, of the first third and of the second third. Products with
    the last two are zero outside the last third.

    Args:
      loss_of: `loss_of(params, batch)` is the loss.
      params: The trainable parameters.
      examples: The batch in thirds.
      method: Computes the products of one pass.
      sums_3: The sum of each third's gradients, leaves [3, ...].
      rms: Root mean square of the gradients' norms, float32 []; products are in units of `rms**2`.
    """
    # The three means as weights of the thirds' sums: a row for each mean, a column for each third.
    weights_13 = jnp.ones((1, 3), jnp.float32) / examples.count
    weights_23 = jnp.eye(3, dtype=jnp.float32)[:2] / jnp.maximum(examples.count // 3, 1)
    # A product is divided by `rms` twice: here, and when it is computed.
    weights_33 = jnp.concatenate([weights_13, weights_23]) / rms
    means_3 = jax.tree.map(
        lambda sum_3: jnp.tensordot(weights_33, sum_3, 1, precision="highest"), sums_3
    )

    def multiply(parts_I: np.ndarray, num_means: int, products_3B: Array) -> Array:
        """Multiply the gradients of the thirds `parts_I` with the first `num_means` of the means.

        Returns `products_3B` with these products added.
        """
        rows = slice(num_means)
        directions_E = jax.tree.map(lambda leaf_3: leaf_3[rows], means_3)

        def multiply_pass(
            _: Array, index_C: Array, valid_C: Array, batch_C: PyTree, products_3B: Array
        ) -> Array:
            """Add the products of one pass; the body of `scan_passes`."""
            products_EC = method.products(loss_of, params, batch_C, directions_E)
            products_EC = products_EC.astype(jnp.float32) / rms  # as the means were divided
            products_EC = jnp.where(valid_C[None], products_EC, 0.0)
            return products_3B.at[rows, index_C].add(products_EC)

        return examples.scan_passes(parts_I, multiply_pass, products_3B)

    # The products with the means of thirds are compared on the last third only, which is
    # independent of them. The first two thirds need only the products with the mean of all.
    products_3B = jnp.zeros((3, examples.size), jnp.float32)
    products_3B = multiply(np.array([0, 1]), num_means=1, products_3B=products_3B)
    return multiply(np.array([2]), num_means=3, products_3B=products_3B)


def resolve_estimator(estimator: Estimator, loss_fn: LossFn) -> Estimator:
    """Resolve `auto` to `taps` if a loss names the parameter `tap_B`, else to `vmap`."""
    if estimator != "auto":
        return estimator
    return "taps" if takes(loss_fn, "tap_B") else "vmap"


def _examples(
    batch: PyTree, chunk_size: int | None, num_examples: Array | int | None, inner_products: bool
) -> _Examples:
    """Divide a batch into parts, and choose the number of examples in a pass.

    Args:
      batch: Pytree of leaves [B, ...].
      chunk_size: Largest number of examples in one pass; None sets no bound.
      num_examples: Number of valid examples, the first of the batch; None: all B.
      inner_products: Whether the parts are thirds of the valid examples; else there is one part.

    Raises:
      ValueError: If leaves differ in B, or B is below 2.
    """
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or min(sizes) < MIN_EXAMPLES:
        raise ValueError(
            f"batch: leading axes {sorted(sizes)}, expected one size, at least {MIN_EXAMPLES}"
        )
    (size,) = sizes
    t = jnp.asarray(size if num_examples is None else num_examples, jnp.int32)
    # The largest size of each part, and where the parts of t examples end.
    if inner_products:
        part_sizes = [size // 3, size // 3, size - 2 * (size // 3)]
        third = jnp.maximum(t // 3, 1)  # with fewer than three examples the last third is empty
        ends_P = jnp.minimum(jnp.stack([third, 2 * third, t]), t)
    else:
        part_sizes = [size]
        ends_P = t[None]

    def cost(group: int) -> int:
        """Return the cost of all passes if each has `group` examples, in costs of one example.

        A pass of n examples costs about as much as n + 1 examples.
        """
        num_passes = sum(math.ceil(part_size / group) for part_size in part_sizes)
        return (group + 1) * num_passes

    largest = min(chunk_size or size, part_sizes[-1])  # the last part is the largest
    return _Examples(
        batch_B=jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], batch),
        group=min(range(largest, 0, -1), key=cost),  # of equally cheap ones the largest
        count=t,
        ends_P=ends_P,
    )


def _example_grads(loss_fn: LossFn, params: PyTree, batch_C: PyTree) -> PyTree:
    """Return the gradient of each example, float32 [C, ...]."""
    grads_C = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, batch_C)
    return jax.tree.map(lambda leaf_C: leaf_C.astype(jnp.float32), grads_C)


def _gradients_by_vmap(
    loss_fn: LossFn, params: PyTree, batch_C: PyTree, valid_C: Array
) -> tuple[PyTree, Array]:
    """Compute each gradient; return the sum of the valid ones, and all norms, float32 [C].

    Leaves of `batch_C` are [C, 1, ...]. `valid_C`, bool [C], is false for padding.
    """
    grads_C = _example_grads(loss_fn, params, batch_C)
    grads_C = where_leading(valid_C, grads_C, jax.tree.map(jnp.zeros_like, grads_C))
    return jax.tree.map(lambda leaf_C: jnp.sum(leaf_C, axis=0), grads_C), norms(grads_C)


def _gradients_by_taps(
    loss_fn: LossFn, params: PyTree, batch_C: PyTree, valid_C: Array
) -> tuple[PyTree, Array]:
    """Compute the sum of the valid gradients, and all norms, float32 [C], in one backward pass.

    Leaves of `batch_C` are [C, 1, ...]. `valid_C`, bool [C], is false for padding. The mean loss is
    differentiated by the parameters and by `tap_B`, for which the layers return, in place of a
    derivative, the squared norm of each example's share of the mean gradient.

    Raises ValueError if the loss takes `tap_B` without using it.
    """
    batch = jax.tree.map(lambda leaf: leaf[:, 0], batch_C)  # without the axis of length 1
    is_tap_used = False

    # `watched` is the identity, but its backward pass, which JAX runs only if a layer of the loss
    # used the tap, notes that it was.
    @jax.custom_vjp
    def watched(tap_C: Array) -> Array:
        """Return the tap as it is."""
        return tap_C

    def forward(tap_C: Array) -> tuple[Array, None]:
        """Return the result of `watched`, and nothing for the backward pass."""
        return tap_C, None

    def backward(_: None, squares_C: Array) -> tuple[Array]:
        """Note that the tap is used; return its cotangent as it is."""
        nonlocal is_tap_used
        is_tap_used = True
        return (squares_C,)

    watched.defvjp(forward, backward)

    def loss(params: PyTree, tap_C: Array) -> Array:
        """Return the mean loss of the pass, to be differentiated by both arguments."""
        return loss_fn(params, batch, tap_B=watched(tap_C))

    # The tap is -1 for padding, which leaves it out of the gradient.
    tap_C, _ = varying_alike(jnp.where(valid_C, 0.0, -1.0).astype(jnp.float32), params)
    mean_grad, squares_C = jax.grad(loss, argnums=(0, 1))(params, tap_C)
    if not is_tap_used:
        raise ValueError(
            "loss_fn: takes the keyword tap_B without using it, so that it gives no gradient norms;"
            " hand it to the layers (`models.layers`), or use estimator='vmap'"
        )
    # The loss is a mean, so an example's gradient is `size` times its share of the mean gradient.
    size = len(valid_C)
    grad_sum = jax.tree.map(lambda leaf: size * leaf.astype(jnp.float32), mean_grad)
    norms_C = size * jnp.sqrt(squares_C.astype(jnp.float32))
    return grad_sum, norms_C


def _products_by_vmap(
    loss_fn: LossFn, params: PyTree, batch_C: PyTree, directions_E: PyTree
) -> Array:
    """Multiply each example's gradient with each direction; return the inner products [E, C].

    Leaves of `batch_C` are [C, 1, ...]. Those of `directions_E` are [E, ...], with the parameters'
    shapes after E.
    """

    def product(leaf_E: Array, leaf_C: Array) -> Array:
        """Multiply one leaf of each direction with the same leaf of each gradient: [E, C]."""
        rows_E = leaf_E.reshape(len(leaf_E), -1)
        rows_C = leaf_C.reshape(len(leaf_C), -1)
        return jnp.matmul(rows_E, rows_C.T, precision="highest")

    grads_C = _example_grads(loss_fn, params, batch_C)
    product_EC_of_leaves = jax.tree.leaves(jax.tree.map(product, directions_E, grads_C))
    return jnp.sum(jnp.stack(product_EC_of_leaves), axis=0)


def _products_by_jvp(
    loss_fn: LossFn, params: PyTree, batch_C: PyTree, directions_E: PyTree
) -> Array:
    """Multiply each example's gradient with each direction; return the inner products [E, C].

    A product is the slope of the example's loss along the direction, computed in forward mode, so
    that no gradient is held. Leaves of `batch_C` are [C, 1, ...], those of `directions_E` [E, ...].
    """

    def losses_C(params: PyTree) -> Array:
        """Return the loss of each example."""
        return jax.vmap(loss_fn, in_axes=(None, 0))(params, batch_C)

    def slopes_C(direction: PyTree) -> Array:
        """Return the derivative of each example's loss along one direction."""
        tangents = jax.tree.map(lambda leaf, param: leaf.astype(param.dtype), direction, params)
        _, slopes = jax.jvp(losses_C, (params,), (tangents,))
        return slopes

    return jax.vmap(slopes_C)(directions_E)


# By the name that the argument `estimator` resolves to.
_METHODS: dict[str, _Method] = {
    "vmap": _Method(gradients=_gradients_by_vmap, products=_products_by_vmap),
    "taps": _Method(gradients=_gradients_by_taps, products=_products_by_jvp),
}
