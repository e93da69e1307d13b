"""Frozen matrices in four or eight bits, as in QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

A matrix [D, F] has D inputs and F outputs. Each 64 numbers of a column, which are weights of one
output, share a float32 scale, which follows from the largest of their magnitudes. A number is kept
as a *code*: an integer of eight bits, or the index of one of the 16 values of NF4. Layers compute
with the array that `dequantised` returns. XLA computes this array where a layer uses it, and keeps
only codes and scales in memory.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, PyTree

QUANTISED = ("int8", "nf4")  # types of `model.base_dtype` with codes and scales
_BLOCK = 64  # numbers that share a scale, as in bitsandbytes


class Quantised(struct.PyTreeNode):
    """A matrix [D, F] in the codes and scales of `qwix.QArray`.

    Two codes of four bits are packed into a byte. JAX would not pass arrays of four bits that are
    committed to a device to a program that is compiled ahead.

    Attributes:
      codes: int8 [D, F], or for "nf4" uint8 [D, ceil(F / 2)].
      scales: float32 [D / block, F], where `block` numbers of a column share a scale.
      kind: What the codes mean.
    """

    codes: PyTree
    scales: PyTree
    kind: Literal["int8", "nf4"] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [D, F] of the matrix."""
        return self.codes.shape[0], self.scales.shape[1]


@functools.partial(jax.jit, static_argnames="kind")
def quantise(w_DF: Float[Array, "D F"], kind: Literal["int8", "nf4"]) -> Quantised:
    """Return a float matrix in codes and scales.

    64 numbers of a column share a scale. If 64 does not divide D, it is the largest power of two
    that does. For "nf4", codes and scales are those of bitsandbytes, except for rounding.
    """
    import qwix  # only here, because its import takes seconds

    num_inputs, num_outputs = w_DF.shape
    block = math.gcd(_BLOCK, num_inputs)  # a power of two, because 64 is one
    # Each column has its own scales, one for each block of its numbers.
    quantised = qwix.quantize(
        w_DF.astype(jnp.float32), kind, channelwise_axes=(1,), tiled_axes={0: block}
    )
    codes = quantised.qvalue
    if kind == "nf4":
        # Pack the codes of two neighbouring outputs into a byte. If their number is odd, the last
        # one gets a zero beside it.
        padded = jnp.pad(codes, ((0, 0), (0, num_outputs % 2)))
        pairs = padded.reshape(num_inputs, -1, 2)
        codes = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
    return Quantised(codes=codes, scales=quantised.scale, kind=kind)


def is_quantised(weight: object) -> bool:
    """Return whether a weight is a `Quantised`, not an array."""
    return isinstance(weight, Quantised)


def unpacked(weight: Quantised) -> Array:
    """Return the codes of a matrix in an array [D, F]: int8, or uint4 for "nf4"."""
    if weight.kind != "nf4":
        return weight.codes
    num_inputs, num_outputs = weight.shape
    pairs = jax.lax.bitcast_convert_type(weight.codes, jnp.uint4)  # [D, ceil(F / 2), 2]
    return pairs.reshape(num_inputs, -1)[:, :num_outputs]


def dequantised(weight: Array | Quantised) -> Array:
    """Return a weight as an array: float32 [D, F] of a `Quantised`, an array as it is."""
    if not isinstance(weight, Quantised):
        return weight
    import qwix  # only here, because its import takes seconds

    return qwix.dequantize(qwix.QArray(unpacked(weight), weight.scales, qtype=weight.kind))
