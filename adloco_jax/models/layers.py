"""Layers with weights: the only places where a parameter meets an activation.

Each layer does its weight arithmetic in one function of arrays (`project`, `apply_gain`,
`look_up`), so that a statistic of the weight gradients can be taken there, whatever the network.
Parameters are float32; `dtype` is the dtype of the arithmetic.
"""

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# The Hugging Face Llama's default (`initializer_range`), for embeddings and matrices alike.
_INIT = nn.initializers.normal(stddev=0.02)


def project(
    x_BLD: Float[Array, "B L D"],
    w_DF: Float[Array, "D F"],
    *,
    dtype: DTypeLike,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "B L F"]:
    """Multiplies the vector at every position by one matrix.

    The leading axes are flattened first: XLA contracts two axes slowly on a CPU, where weight
    gradients over [B, L] made a whole training step 1.2 to 1.4 times as long.

    Args:
      x_BLD: Activations.
      w_DF: Weights, float32.
      dtype: Dtype both factors are cast to.
      out_dtype: Dtype of the sums and of the result; `dtype` if None.

    Returns:
      The products, of dtype `out_dtype`.
    """
    batch, length, width = x_BLD.shape
    y_TF = jnp.matmul(
        x_BLD.reshape(batch * length, width).astype(dtype),
        w_DF.astype(dtype),
        preferred_element_type=dtype if out_dtype is None else out_dtype,
    )
    return y_TF.reshape(batch, length, w_DF.shape[1])


def apply_gain(x_BLD: Float[Array, "B L D"], gain_D: Float[Array, " D"]) -> Float[Array, "B L D"]:
    """Multiplies every feature by its gain."""
    return x_BLD * gain_D[None, None, :]


def look_up(table_VD: Float[Array, "V D"], tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    """Picks the table's row for every token; an id past the end gives NaN, not another row."""
    return jnp.take(table_VD, tokens_BL, axis=0, mode="fill")


class Linear(nn.Module):
    """One matrix at every position, without bias."""

    features: int
    dtype: DTypeLike
    out_dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L F"]:
        """Applies `project`."""
        w_DF = self.param("kernel", _INIT, (x_BLD.shape[-1], self.features), jnp.float32)
        return project(x_BLD, w_DF, dtype=self.dtype, out_dtype=self.out_dtype)


class RMSNorm(nn.Module):
    """Division by the root mean square over the width, then a gain; float32 inside."""

    eps: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Normalises in float32, applies `apply_gain` and casts to `dtype`."""
        gain_D = self.param("scale", nn.initializers.ones, (x_BLD.shape[-1],), jnp.float32)
        x_BLD = x_BLD.astype(jnp.float32)
        mean_square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
        return apply_gain(x_BLD * lax.rsqrt(mean_square_BL1 + self.eps), gain_D).astype(self.dtype)


class Embed(nn.Module):
    """One learned vector per token."""

    vocab_size: int
    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens_BL: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Applies `look_up` and casts to `dtype`."""
        table_VD = self.param("embedding", _INIT, (self.vocab_size, self.width), jnp.float32)
        return look_up(table_VD, tokens_BL).astype(self.dtype)
