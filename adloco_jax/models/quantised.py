"""Frozen matrices in four or eight bits, as in QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

A matrix [D, F] becomes a pytree of codes and scales, `qwix.QArray`: each 64 numbers of a column,
which are weights of one output, have a float32 scale, the largest of them. Layers compute with what
`dequantised` returns; XLA makes it where it is used, and keeps the codes.
"""

import functools
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Quantised: TypeAlias = Any
"""A `qwix.QArray`; only the functions here import qwix, because that takes seconds."""

QUANTISED = ("int8", "nf4")  # types of `model.base_dtype` with codes and scales
_BLOCK = 64  # numbers that share a scale, as in bitsandbytes


@functools.partial(jax.jit, static_argnames="kind")
def quantise(w_DF: Float[Array, "D F"], kind: Literal["int8", "nf4"]) -> Quantised:
    """Quantise a matrix; where 64 does not divide D, blocks have the largest power of 2 that does.

    Of "nf4", codes and scales are those of bitsandbytes, except at rounding.
    """
    import qwix

    block = math.gcd(_BLOCK, w_DF.shape[0])
    return qwix.quantize(
        w_DF.astype(jnp.float32), kind, channelwise_axes=(1,), tiled_axes={0: block}
    )


def is_quantised(weight: object) -> bool:
    """Whether a weight consists of codes and scales."""
    return hasattr(weight, "qvalue")


def dequantised(weight: Array | Quantised) -> Array:
    """Return a weight as an array, float32 if it was quantised."""
    if is_quantised(weight):
        import qwix

        codes: Any = weight
        return qwix.dequantize(codes)
    return weight
