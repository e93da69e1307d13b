"""Layers with weights, which can measure the gradient norm of each example by a *tap*.

`tap_B` is float32 zeros, one for each example. Its cotangent in the backward pass is the squared
norm of each example's part of the gradient, summed over the layers that get the tap. If the loss is
a mean over B examples, such a part is 1/B of the gradient of the example's own loss. A tap changes
no result, but a negative entry masks its example out of all weight gradients. Taps work in reverse
mode only (`custom_vjp`). A weight must be used by one tapped layer, once per pass; a tied embedding
has `look_up_tied`. A *tied* embedding is a table that is also the matrix of the *head*, the last
layer, which returns logits. A *frozen* weight is not trained: it has no gradient and no tap.

Axes of arrays: B examples, L positions of an example, V token ids, N layers, D and F the inputs and
outputs of a layer, A the rank of an adapter, 1 an axis of size one. A name that ends in `_B` alone
is of an array whose first axis is B. Einsums have `precision="highest"` where an accelerator would
by default round float32 factors.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from adloco_jax.models.kernels import BASE, multiply_float32
from adloco_jax.models.quantised import dequantised, is_quantised

DTYPES = ("float32", "bfloat16")  # the dtypes in which a model may compute

# The Hugging Face default (`initializer_range`) for embeddings and matrices.
_INIT = nn.initializers.normal(stddev=0.02)
# PEFT's default for A, `kaiming_uniform_(a=sqrt(5))`: uniform up to 1 / sqrt(D). B begins at zero.
_LORA_A_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

Tap: TypeAlias = Float[Array, " B"] | None
"""A gradient tap, float32 [B], or None for plain operations."""

Rule: TypeAlias = tuple[tuple[str, ...], Callable[..., bool], str]
"""A condition on a model's attributes: their names, a predicate of their values in this order, and
the remedy in words."""

HEADS_DIVIDE_WIDTH: Rule = (
    ("num_heads", "width"),
    lambda heads, width: width % heads == 0,
    "the heads must divide the width; choose a width that is a multiple of num_heads",
)


class Adapter(NamedTuple):
    """Low-rank products that are trained beside frozen weights (LoRA, Hu et al. 2021).

    The product with a weight W becomes x W + (alpha / rank) x A B. `layers` says which weights of a
    block have one: "attention", "mlp" or "all".
    """

    rank: int
    alpha: float
    layers: str = "all"

    def of(self, part: str) -> "Adapter | None":
        """Return the adapter of the linear layers of a part, "attention" or "mlp", if any."""
        return self if self.layers in (part, "all") else None


LOW_RANK = ("lora_a", "lora_b")  # the leaves of an adapter


def merge_adapter(params: PyTree, adapter: Adapter) -> PyTree:
    """Return the parameters of the model without an adapter that computes the same.

    `params` has the adapter's leaves. The product of each pair, times alpha / rank, is added to the
    "kernel" of the same module.
    """
    leaves: dict[tuple[str, ...], Any] = flatten_dict(params)
    modules = [path[:-1] for path in leaves if path[-1] == "lora_a"]
    for module in modules:
        a_NDA = leaves.pop((*module, "lora_a"))  # all layers of the module, stacked
        b_NAF = leaves.pop((*module, "lora_b"))
        product = adapter.alpha / adapter.rank * (a_NDA @ b_NAF)
        leaves[*module, "kernel"] = leaves[*module, "kernel"] + product
    return unflatten_dict(leaves)


def split_adapter(params: PyTree) -> tuple[PyTree, PyTree]:
    """Divide the parameters of a model with an adapter: return the adapter's, and the base weights.

    Both are trees of nested dicts, with the same paths as in `params`.
    """
    adapter: dict[tuple[str, ...], Any] = {}
    base: dict[tuple[str, ...], Any] = {}
    for path, leaf in flatten_dict(params).items():
        part = adapter if path[-1] in LOW_RANK else base
        part[path] = leaf
    return unflatten_dict(adapter), unflatten_dict(base)


def with_adapter(base: PyTree, adapter: PyTree) -> PyTree:
    """Return the parameters with the leaves of both trees; the inverse of `split_adapter`."""
    return unflatten_dict(flatten_dict(base) | flatten_dict(adapter))


def _weight_and_tap(
    module: nn.Module, name: str, init: Callable, shape: tuple[int, ...], tap_B: Tap = None
) -> tuple[Any, Tap]:
    """Return the weight `name` of a module, and the tap for the layer that uses it.

    `tap_B` is the module's tap. A weight in the collection `BASE` is frozen: it gets no gradient,
    and the tap is None. Any other is a float32 parameter, drawn by `init(key, shape, dtype)`.
    """
    if module.has_variable(BASE, name):
        return lax.stop_gradient(module.get_variable(BASE, name)), None
    return module.param(name, init, shape, jnp.float32), tap_B


_KNOWN_DTYPE: Rule = (
    ("dtype",),
    lambda dtype: dtype in DTYPES,
    f"must be one of {', '.join(DTYPES)}",
)


def check_sizes(network: nn.Module, rules: Sequence[Rule]) -> None:
    """Raise ValueError if a model has a size below 1 or an unknown dtype, or breaks a rule.

    Sizes are the attributes of type int. A rule has the names of attributes, a predicate of their
    values, and the remedy in words.
    """
    for field in dataclasses.fields(network):
        size = getattr(network, field.name)
        if field.type is int and size < 1:
            raise ValueError(f"{field.name}={size!r}: must be at least 1.")
    for names, holds, need in (_KNOWN_DTYPE, *rules):
        values = {name: getattr(network, name) for name in names}
        if not holds(*values.values()):
            pairs = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise ValueError(f"{pairs}: {need}.")


def check_length(length: int, max_length: int) -> None:
    """Raise ValueError if sequences are longer than a model's `max_length`."""
    if length > max_length:
        raise ValueError(
            f"tokens_BL has {length} tokens per sequence, max_length is {max_length}: "
            "shorten the sequences or raise max_length."
        )


@functools.cache
def param_shapes(network: nn.Module) -> PyTree:
    """Return a model's parameter tree with `jax.ShapeDtypeStruct` for arrays.

    Nothing is computed. Raises ValueError if the model's sizes contradict one another.
    """
    tokens_BL = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)  # a real key would make JAX start its devices
    return jax.eval_shape(network.init, key, tokens_BL)["params"]


def project(
    x_BLD: Float[Array, "B L D"],
    w_DF: Float[Array, "D F"],
    tap_B: Tap = None,
    *,
    dtype: DTypeLike,
    to_float32: bool = False,
) -> Float[Array, "B L F"]:
    """Multiply the vector at every position by one matrix.

    Args:
      x_BLD: Activations.
      w_DF: Weights, float32; frozen ones may be bfloat16.
      tap_B: Gradient tap.
      dtype: Both factors are cast to this dtype, and derivatives are computed in it.
      to_float32: Whether sums and result are float32, whatever `dtype` is.
    """
    multiply = functools.partial(_multiply, dtype=dtype, to_float32=to_float32)
    # None: a matrix's gradient norms have no shorter way than each example's gradient.
    return _apply_layer(multiply, None, x_BLD, w_DF, tap_B)


def apply_gain(
    x_BLD: Float[Array, "B L D"], gain_D: Float[Array, " D"], tap_B: Tap = None
) -> Float[Array, "B L D"]:
    """Multiply each feature of the activations by its gain, whose gradient `tap_B` measures."""
    return _apply_layer(_scale, _example_norms, x_BLD, gain_D, tap_B)


def add_bias(
    x_BLD: Float[Array, "B L D"],
    bias: Float[Array, " D"] | Float[Array, "L D"],
    tap_B: Tap = None,
) -> Float[Array, "B L D"]:
    """Add a vector, the same or one for each position, in float32; keep the dtype of `x_BLD`.

    `tap_B` measures the gradient of the bias.
    """
    return _apply_layer(_shift, _example_norms, x_BLD, bias, tap_B)


def look_up(
    table_VD: Float[Array, "V D"], tokens_BL: Int[Array, "B L"], tap_B: Tap = None
) -> Float[Array, "B L D"]:
    """Look up the row of the table for every token; an id past the end of the table gives NaN.

    `tap_B` measures the gradient of the table.
    """
    return _apply_layer(_take, _token_norms, tokens_BL, table_VD, tap_B)


class TiedTap(NamedTuple):
    """The tap of a head whose matrix is the embedding table, from `look_up_tied`.

    Attributes:
      tap_B: The tap.
      tokens_BL: The ids that were looked up.
      rows_BLD: Zeros. Their cotangent is the head's part of the table's gradient, at the rows of
        these tokens.
    """

    tap_B: Array
    tokens_BL: Array
    rows_BLD: Array


def look_up_tied(
    table_VD: Float[Array, "V D"], tokens_BL: Int[Array, "B L"], tap_B: Tap = None
) -> tuple[Float[Array, "B L D"], TiedTap | None]:
    """Look up tokens in a table that is also the head's matrix; also return the head's tap.

    Without `tap_B` the second result is None.

    The table's gradient for an example is e + h: e as the embedding, h as the head. Its squared
    norm is |e|^2 + |h|^2 + 2 e.h. The product e.h needs only those rows of h that belong to the
    example's tokens. In the backward pass `attend_tied` adds |h|^2 to the tap, and passes these
    rows back as the cotangent of `TiedTap.rows_BLD`. With them this function adds the rest.
    """
    if tap_B is None:
        return look_up(table_VD, tokens_BL), None
    x_BLD, rows_BLD = _apply_layer(_take_and_zeros, _tied_norms, tokens_BL, table_VD, tap_B)
    return x_BLD, TiedTap(tap_B, tokens_BL, rows_BLD)


def attend_tied(
    x_BLD: Float[Array, "B L D"],
    table_VD: Float[Array, "V D"],
    tap: TiedTap | None = None,
    *,
    dtype: DTypeLike,
) -> Float[Array, "B L V"]:
    """Multiply the vector at every position by the transposed embedding table: return the logits.

    `tap` is the second result of `look_up_tied`. Factors are cast to `dtype`; sums and result are
    float32.
    """
    if tap is None:
        return project(x_BLD, table_VD.T, dtype=dtype, to_float32=True)
    y_BLV = project(x_BLD, table_VD.T, tap.tap_B, dtype=dtype, to_float32=True)
    # This returns the logits unchanged. In the backward pass it gives `tap.rows_BLD` a cotangent.
    return _with_rows(y_BLV, x_BLD, tap.tokens_BL, tap.rows_BLD)


@jax.custom_vjp
def _with_rows(y_BLV: Array, x_BLD: Array, tokens_BL: Array, rows_BLD: Array) -> Array:
    """Return `y_BLV`, the logits that a tied head computes from `x_BLD`.

    The cotangent of `rows_BLD` is the head's part of the table's gradient at `tokens_BL`: for
    example b and position l, the gradient of the row of token `tokens_BL[b, l]`.
    """
    return y_BLV


def _with_rows_forward(
    y_BLV: Array, x_BLD: Array, tokens_BL: Array, rows_BLD: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Return the result of `_with_rows`, and two of its arguments, for the backward pass."""
    return y_BLV, (x_BLD, tokens_BL)


def _with_rows_backward(
    residuals: tuple[Array, Array], dy_BLV: Array
) -> tuple[Array, Array, None, Array]:
    """Return the cotangents of the four arguments of `_with_rows`; ids have None."""
    x_BLD, tokens_BL = residuals
    # The gradient of the row of the token at position m is a sum over all positions l: of the
    # cotangent of this token's logit at l, times the vector at l. M and L are both the positions.
    dy_BLM = jnp.take_along_axis(dy_BLV, tokens_BL[:, None, :], axis=2)
    x32_BLD = x_BLD.astype(dy_BLM.dtype)
    rows_BMD = jnp.einsum("blm,bld->bmd", dy_BLM, x32_BLD, precision="highest")
    # The gradient of `x_BLD` comes through `y_BLV`, which was computed from it.
    return dy_BLV, jnp.zeros_like(x_BLD), None, rows_BMD


_with_rows.defvjp(_with_rows_forward, _with_rows_backward)


def _apply_layer(
    layer: Callable[[Array, Array], Any],
    norms_fn: Callable[..., Array] | None,
    x_B: Array,
    weight: Array,
    tap_B: Tap,
) -> Any:
    """Return `layer(x_B, weight)`; with a tap, the backward pass also measures gradient norms.

    Args:
      layer: A function of a batch of inputs and one weight; it returns an array with the axis B
        first, or a tuple of such arrays.
      norms_fn: `norms_fn(weight_grad, x_B, dy_B)` returns the squared norm of each example's weight
        gradient, float32 [B]. `dy_B` is the cotangent of the layer's result, and
        `weight_grad(x_B, dy_B)` the weight's gradient for some examples. None: each example's
        gradient is computed on its own.
      x_B: Inputs.
      weight: The weight.
      tap_B: The tap.
    """
    # This constraint has an effect only under `nn.logical_axis_rules`. There a sharded weight is
    # all-gathered where it is used, and its gradient is reduce-scattered. Without the constraint
    # XLA would move the activations instead, which are larger for a batch of long sequences.
    weight = nn.with_logical_constraint(weight, (None,) * weight.ndim)
    if tap_B is None:
        return layer(x_B, weight)
    return _tapped(layer, norms_fn, x_B, weight, tap_B)


# The layers of `_apply_layer`: functions of inputs and a weight.


def _multiply(x_BLD: Array, w_DF: Array, *, dtype: DTypeLike, to_float32: bool) -> Array:
    """Return the product with one matrix at every position, [B, L, F].

    Factors are cast to `dtype`. With `to_float32` sums and result are float32, else `dtype`.
    """
    batch, length, width = x_BLD.shape
    # All positions are one axis (P). On a CPU, weight gradients summed over two axes made a step
    # 1.2 to 1.4 times as long.
    x_PD = x_BLD.reshape(batch * length, width).astype(dtype)
    w_DF = w_DF.astype(dtype)
    if to_float32:
        y_PF = multiply_float32("pd,df->pf", x_PD, w_DF)
    else:
        y_PF = jnp.matmul(x_PD, w_DF, preferred_element_type=dtype)
    return y_PF.reshape(batch, length, w_DF.shape[1])


def _scale(x_BLD: Array, gain_D: Array) -> Array:
    """Multiply every feature of the activations by its gain."""
    return x_BLD * gain_D[None, None, :]


def _shift(x_BLD: Array, bias: Array) -> Array:
    """Add a bias [D] at all positions, or [L, D] with a row for each; keep the dtype of `x_BLD`."""
    # In float32, because the gradient of the bias is a sum over all positions.
    bias_BLD = lax.expand_dims(bias, range(x_BLD.ndim - bias.ndim))
    return (x_BLD.astype(jnp.float32) + bias_BLD).astype(x_BLD.dtype)


def _take(tokens_BL: Array, table_VD: Array) -> Array:
    """Return the row of the table for every token; NaN for an id past the end of the table."""
    return jnp.take(table_VD, tokens_BL, axis=0, mode="fill")


def _take_and_zeros(tokens_BL: Array, table_VD: Array) -> tuple[Array, Array]:
    """Return the tokens' rows of the table, and as many zeros, for `TiedTap.rows_BLD`."""
    x_BLD = _take(tokens_BL, table_VD)
    return x_BLD, jnp.zeros_like(x_BLD)


# The functions `norms_fn` of `_apply_layer`.


def _example_norms(weight_grad: Callable[..., Array], x_B: Array, dy_B: Array) -> Array:
    """Return the squared norms [B] by computing each example's gradient; for small weights."""
    grads_B = jax.vmap(lambda x, dy: weight_grad(x[None], dy[None]))(x_B, dy_B)
    return jnp.sum(jnp.square(grads_B), axis=range(1, grads_B.ndim))


def _token_norms(weight_grad: Callable[..., Array], tokens_BL: Array, dy_BLD: Array) -> Array:
    """Return the squared norm of each example's gradient of a table, [B].

    `dy_BLD` is the cotangent of the looked-up rows; `weight_grad` is not needed. The gradient's row
    of a token is the sum r of `dy_BLD` over the token's positions. The squared norm |r|^2 is the
    sum of dy.r over these positions.
    """
    same_BLL = (tokens_BL[:, :, None] == tokens_BL[:, None, :]).astype(dy_BLD.dtype)
    row_grads_BLD = jnp.einsum("blm,bmd->bld", same_BLL, dy_BLD, precision="highest")
    return jnp.sum(dy_BLD * row_grads_BLD, axis=(1, 2))


def _tied_norms(weight_grad: Callable, tokens_BL: Array, dy_B: tuple[Array, Array]) -> Array:
    """Return |e + h|^2 - |h|^2 for the gradients e of the embedding and h of a tied head, [B].

    The head itself adds |h|^2 to the same tap. `dy_B` has the cotangents of the looked-up rows, and
    of `TiedTap.rows_BLD`: h at the tokens.
    """
    dy_BLD, rows_BLD = dy_B
    products_B = jnp.sum(dy_BLD * rows_BLD, axis=(1, 2))
    return _token_norms(weight_grad, tokens_BL, dy_BLD) + 2 * products_B


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tapped(
    layer: Callable[[Array, Array], Any],
    norms_fn: Callable[..., Array] | None,
    x_B: Array,
    weight: Array,
    tap_B: Array,
) -> Any:
    """Return `layer(x_B, weight)`; the cotangent of `tap_B` is the squared norms [B].

    `norms_fn` computes these norms. None: each example's gradient is computed on its own. A
    negative entry of `tap_B` masks its example out of the gradient of `weight`.
    """
    return layer(x_B, weight)


def _tapped_forward(
    layer: Callable[[Array, Array], Any],
    norms_fn: Callable[..., Array] | None,
    x_B: Array,
    weight: Array,
    tap_B: Array,
) -> tuple[Any, tuple[Array, Array, Array]]:
    """Return the result of `_tapped`, and its array arguments, for the backward pass."""
    return layer(x_B, weight), (x_B, weight, tap_B)


def _tapped_backward(
    layer: Callable[[Array, Array], Any],
    norms_fn: Callable[..., Array] | None,
    residuals: tuple[Array, Array, Array],
    dy_B: Any,
) -> tuple[Array, Array, Array]:
    """Return the cotangents of `x_B`, `weight` and `tap_B`, given that of the result, `dy_B`.

    That of `weight` is the sum of the examples' gradients, and that of `tap_B` their squared norms.
    """
    x_B, weight, tap_B = residuals
    _, input_vjp = jax.vjp(lambda x_B: layer(x_B, weight), x_B)
    (dx_B,) = input_vjp(dy_B)

    def weight_grad(x_B: Array, dy_B: Any) -> Array:
        """Return the weight's gradient, summed over some examples."""
        _, weight_vjp = jax.vjp(lambda weight: layer(x_B, weight), weight)
        (grad,) = weight_vjp(dy_B)
        return grad

    if norms_fn is not None:
        # Examples with a negative tap are masked out of the weight's gradient, not out of `dx_B`:
        # each layer masks the gradient of its own weight.
        select = jax.vmap(lambda tap, array: jnp.where(tap < 0, jnp.zeros_like(array), array))
        x_B, dy_B = jax.tree.map(lambda array_B: select(tap_B, array_B), (x_B, dy_B))
        return dx_B, weight_grad(x_B, dy_B), norms_fn(weight_grad, x_B, dy_B)

    def example_grad(x: Array, dy: Any, tap: Array) -> tuple[Array, Array]:
        """Return one example's gradient, and its squared norm; zeros if the example is masked."""
        grad = jnp.where(tap < 0, 0.0, weight_grad(x[None], dy[None]))
        return grad, jnp.sum(jnp.square(grad))

    # On a CPU this loop needs as many FLOPs as a batched product, and the memory of one more
    # gradient, which stays in the cache. The loop makes a training step 1.1 to 1.2 times as long. A
    # batched product that is reduced over [B] makes it 1.75 times as long (width 256, 4 layers, 128
    # tokens). The Gram form (norms from [L, L] products) would need no gradient per example, but
    # L (1/D + 1/F) times the FLOPs of such a gradient.
    def sequential(*examples_B: Any) -> tuple[Array, Array]:
        """Return the sum of the examples' gradients, and their squared norms [B], in a loop.

        `examples_B` are the arguments of `example_grad`, each with the axis B.
        """

        def add_example(grad_sum: Array, example: tuple) -> tuple[Array, Array]:
            """Return the sum with one more example's gradient, and this one's squared norm."""
            grad, norm = example_grad(*example)
            return grad_sum + grad, norm

        return lax.scan(add_example, jnp.zeros_like(weight), examples_B)

    def at_once(*examples_B: Any) -> tuple[Array, Array]:
        """Return what `sequential` does, with all gradients in memory at once."""
        grads_B, norms_B = jax.vmap(example_grad)(*examples_B)
        return jnp.sum(grads_B, axis=0), norms_B

    weight_grads, norms_B = lax.platform_dependent(
        x_B, dy_B, tap_B, cpu=sequential, default=at_once
    )
    return dx_B, weight_grads, norms_B


_tapped.defvjp(_tapped_forward, _tapped_backward)


class Linear(nn.Module):
    """A product with one matrix [D, F] at every position; F is `features`.

    With `to_float32` sums and result are float32, whatever `dtype` is. A matrix from the collection
    `BASE` is frozen, and may be in four or eight bits. An adapter's product is added, then a bias.
    """

    features: int
    dtype: DTypeLike
    to_float32: bool = False
    use_bias: bool = False
    adapter: Adapter | None = None

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"], tap_B: Tap = None) -> Float[Array, "B L F"]:
        """Return x W, plus the adapter's product and the bias if the layer has them.

        `tap_B` measures the gradients of all parameters; a frozen weight has none.
        """
        num_inputs = x_BLD.shape[-1]
        num_outputs = self.features
        shape = (num_inputs, num_outputs)
        # The tap of the matrix is None if the matrix is frozen; it may then be a `Quantised`.
        w_DF, kernel_tap_B = _weight_and_tap(self, "kernel", _INIT, shape, tap_B)
        if is_quantised(w_DF):
            # The barrier makes the matrix wait for `x_BLD`. Without it XLA for GPUs dequantises the
            # matrices of several layers ahead, and holds them in memory.
            w_DF, x_BLD = lax.optimization_barrier((w_DF, x_BLD))
            w_DF = dequantised(w_DF)
        y_BLF = project(x_BLD, w_DF, kernel_tap_B, dtype=self.dtype, to_float32=self.to_float32)

        if self.adapter is not None:
            # The product (alpha / rank) x A B with two low-rank matrices, which are never frozen.
            rank = self.adapter.rank
            scale = self.adapter.alpha / rank
            a_DA = self.param("lora_a", _LORA_A_INIT, (num_inputs, rank), jnp.float32)
            b_AF = self.param("lora_b", nn.initializers.zeros, (rank, num_outputs), jnp.float32)
            h_BLA = project(x_BLD, a_DA, tap_B, dtype=self.dtype)
            y_BLF = y_BLF + project(
                scale * h_BLA, b_AF, tap_B, dtype=self.dtype, to_float32=self.to_float32
            )

        if not self.use_bias:
            return y_BLF
        zeros = nn.initializers.zeros
        bias_F, bias_tap_B = _weight_and_tap(self, "bias", zeros, (num_outputs,), tap_B)
        return add_bias(y_BLF, bias_F, bias_tap_B)


class RMSNorm(nn.Module):
    """A layer that divides each vector by its root mean square, then multiplies it by a gain.

    The gain is the parameter plus `offset`.
    """

    eps: float
    dtype: DTypeLike
    offset: float = 0.0

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"], tap_B: Tap = None) -> Float[Array, "B L D"]:
        """Normalise in float32, multiply by the gain, and return [B, L, D] in `dtype`."""
        init = nn.initializers.constant(1 - self.offset)  # so that the gain begins at 1
        gain_D, tap_B = _weight_and_tap(self, "scale", init, x_BLD.shape[-1:], tap_B)
        if self.offset:  # added in float32, because a frozen parameter may be bfloat16
            gain_D = gain_D.astype(jnp.float32) + self.offset
        x_BLD = x_BLD.astype(jnp.float32)
        mean_square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        normed_BLD = x_BLD * lax.rsqrt(mean_square_BL1 + self.eps)
        return apply_gain(normed_BLD, gain_D, tap_B).astype(self.dtype)


class LayerNorm(nn.Module):
    """A layer that normalises each vector to mean 0 and variance 1, then applies gain and bias."""

    eps: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"], tap_B: Tap = None) -> Float[Array, "B L D"]:
        """Normalise in float32, apply gain and bias, and return [B, L, D] in `dtype`."""
        # Not frozen: BERT, the model that has this layer, has no adapter.
        gain_D = self.param("scale", nn.initializers.ones, (x_BLD.shape[-1],), jnp.float32)
        bias_D = self.param("bias", nn.initializers.zeros, (x_BLD.shape[-1],), jnp.float32)
        x_BLD = x_BLD.astype(jnp.float32)
        # `standardize` alone would compute E[x^2] - E[x]^2, which loses digits.
        variance_BL1 = jnp.var(x_BLD, axis=-1, keepdims=True)
        normed_BLD = jax.nn.standardize(x_BLD, variance=variance_BL1, epsilon=self.eps)
        return add_bias(apply_gain(normed_BLD, gain_D, tap_B), bias_D, tap_B).astype(self.dtype)


class Embed(nn.Module):
    """A layer that gives each token a learned vector; that of `pad_id` gets no gradient."""

    vocab_size: int
    width: int
    dtype: DTypeLike
    pad_id: int | None = None

    def setup(self) -> None:
        """Create the table, or take the frozen one; each call brings its own tap."""
        shape = (self.vocab_size, self.width)
        self.embedding, _ = _weight_and_tap(self, "embedding", _INIT, shape)

    def __call__(self, tokens_BL: Int[Array, "B L"], tap_B: Tap = None) -> Float[Array, "B L D"]:
        """Return the vector of each token, in `dtype`; NaN for an id past the vocabulary."""
        x_BLD = look_up(self.embedding, tokens_BL, self._tap(tap_B))
        return self._without_pad_grad(x_BLD, tokens_BL).astype(self.dtype)

    def look_up_tied(
        self, tokens_BL: Int[Array, "B L"], tap_B: Tap = None
    ) -> tuple[Float[Array, "B L D"], TiedTap | None]:
        """Look up a table that is the head's too: return vectors in `dtype`, and the head's tap."""
        x_BLD, tap = look_up_tied(self.embedding, tokens_BL, self._tap(tap_B))
        return self._without_pad_grad(x_BLD, tokens_BL).astype(self.dtype), tap

    def _tap(self, tap_B: Tap) -> Tap:
        """Return the tap, or None if the table is frozen."""
        return None if self.has_variable(BASE, "embedding") else tap_B

    def _without_pad_grad(self, x_BLD: Array, tokens_BL: Array) -> Array:
        """Return the embeddings `x_BLD` of tokens; those of `pad_id` get no gradient (PyTorch)."""
        if self.pad_id is None:
            return x_BLD
        is_pad_BL1 = (tokens_BL == self.pad_id)[:, :, None]
        return jnp.where(is_pad_BL1, lax.stop_gradient(x_BLD), x_BLD)

    def attend(
        self, x_BLD: Float[Array, "B L D"], tap: TiedTap | None = None
    ) -> Float[Array, "B L V"]:
        """Return the float32 logits of a tied head; `tap` is from `look_up_tied`."""
        return attend_tied(x_BLD, self.embedding, tap, dtype=self.dtype)


class Offset(nn.Module):
    """A layer that adds rows of a table of learned vectors to the activations."""

    num_rows: int

    @nn.compact
    def __call__(
        self, x_BLD: Float[Array, "B L D"], rows: int | slice, tap_B: Tap = None
    ) -> Float[Array, "B L D"]:
        """Add one row of the table at every position, or a slice of L rows, one at each."""
        shape = (self.num_rows, x_BLD.shape[-1])
        table = self.param("embedding", _INIT, shape, jnp.float32)
        return add_bias(x_BLD, table[rows], tap_B)
