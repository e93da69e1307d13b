"""Frozen matrices in four or eight bits, as in QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

Each 64 numbers of a column, which are weights of one output, have a float32 scale, the largest of
them. Layers compute with what `dequantised` returns; XLA makes it where it is used, and keeps the
codes.
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

    Two codes of four bits are a byte, because JAX does not pass arrays of four bits that are
    committed to a device to a program that is compiled ahead.
    """

    codes: PyTree  # int8 [D, F]; of "nf4" uint8 [D, ceil(F / 2)]
    scales: PyTree  # float32 [D / block, F]
    kind: Literal["int8", "nf4"] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [D, F] of the matrix."""
        return self.codes.shape[0], self.scales.shape[1]


@functools.partial(jax.jit, static_argnames="kind")
def quantise(w_DF: Float[Array, "D F"], kind: Literal["int8", "nf4"]) -> Quantised:
    """Quantise a matrix; where 64 does not divide D, blocks have the largest power of 2 that does.

    Of "nf4", codes and scales are those of bitsandbytes, except at rounding.
    """
    import qwix  # takes seconds

    num_inputs, num_outputs = w_DF.shape
    block = math.gcd(_BLOCK, num_inputs)
    found = qwix.quantize(
        w_DF.astype(jnp.float32), kind, channelwise_axes=(1,), tiled_axes={0: block}
    )
    codes = found.qvalue
    if kind == "nf4":
        even = jnp.pad(codes, ((0, 0), (0, num_outputs % 2)))
        codes = jax.lax.bitcast_convert_type(even.reshape(num_inputs, -1, 2), jnp.uint8)
    return Quantised(codes=codes, scales=found.scale, kind=kind)


def is_quantised(weight: object) -> bool:
    """Whether a weight consists of codes and scales."""
    return isinstance(weight, Quantised)


def unpacked(weight: Quantised) -> Array:
    """Return the codes of a matrix, [D, F]: int8, or of "nf4" uint4."""
    if weight.kind != "nf4":
        return weight.codes
    num_inputs, num_outputs = weight.shape
    pairs = jax.lax.bitcast_convert_type(weight.codes, jnp.uint4)
    return pairs.reshape(num_inputs, -1)[:, :num_outputs]


def dequantised(weight: Array | Quantised) -> Array:
    """Return a weight as an array, float32 if it was quantised."""
    if isinstance(weight, Quantised):
        import qwix

        found = qwix.QArray(unpacked(weight), weight.scales, qtype=weight.kind)
        return qwix.dequantize(found)
    return weight
