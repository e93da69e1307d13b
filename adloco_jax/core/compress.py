"""Quantise outer gradients for communication: to bfloat16, or to four bits with block scales.

Numbers are quantised only to be sent; sums and averages are float32. With "int4" a block of at most
128 entries has one float32 scale, and each entry is sent as a code: the whole number from -7 to 7
nearest to the entry divided by the scale. Blocks depend on shapes, not on devices (see `_Blocks`).
X is any first axis, such as trainers or workers.
"""

import math
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

Precision: TypeAlias = Literal["float32", "bfloat16", "int4"]

SCALE_BLOCK = 128  # largest number of entries that share a float32 scale
LARGEST_CODE = 7  # largest int4 value in use; -8 is not used
# The low bits of a scale are zero, so its product with a code is exact, and a sum with it does not
# depend on whether a device fuses the two.
_SCALE_BITS = np.uint32(0xFFFFFFF8)
_EVEN_SHARES = 8  # an axis whose length is a multiple of 8 divides over 2, 4 or 8 devices


class Packed(NamedTuple):
    """One array [X, ...], quantised to four bits by `pack`; a pytree node."""

    codes: Array  # uint8, two codes to a byte [X, rows, blocks of a row, bytes of a block]
    scales: Array  # float32 [X, rows, blocks of a row]


class _Blocks(NamedTuple):
    """How one trainer's or worker's part of a leaf is divided into blocks with one scale each.

    The part is seen as a table with a line for each position along one axis; the entries at this
    position are the line. A row is one line, or several; it is cut into one block or more.

    `axis` may be sharded: the longest whose length is a multiple of 8, else the longest. With more
    than 64 other entries a block lies at one position of it; otherwise it covers several.
    """

    axis: int  # the axis that is divided into rows
    length: int  # length of the axis
    rest: int  # number of entries at each position of the axis
    rows: int  # number of rows, the last of which may be padded
    positions: int  # positions of the axis in a row; 1 if a row has several blocks
    per_row: int  # number of blocks in a row
    width: int  # entries of a block at each of its positions

    @property
    def size(self) -> int:
        """Number of entries of a block, made even by padding, because a byte holds two codes."""
        return self.positions * self.width + self.positions * self.width % 2


def check_precision(precision: str) -> None:
    """Raise ValueError if `precision` is not "float32", "bfloat16" or "int4"."""
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise ValueError(f"precision={precision!r}: expected one of {known}")


def pack(tree_X: PyTree, precision: Precision) -> PyTree:
    """Quantise arrays for communication, separately at each index of the first axis.

    Args:
      tree_X: Leaves [X, ...].
      precision: "float32" (nothing changes), "bfloat16" or "int4".

    Returns:
      With "int4", a `Packed` for each leaf; a block with an entry that is not finite unpacks to
      NaN. With "bfloat16", its bits as uint16 [X, ...]: a compiler might send bfloat16 as float32.

    Raises:
      ValueError: If `precision` is unknown.

    Source: Streaming DiLoCo (arXiv 2501.18512), section 2.4, which sends floats with 3 exponent
      bits. Here an entry is a whole number from -7 to 7, times the scale of its block.
    """
    check_precision(precision)
    if precision == "float32":
        return tree_X
    if precision == "bfloat16":
        return jax.tree.map(
            lambda leaf: lax.bitcast_convert_type(jnp.asarray(leaf, jnp.bfloat16), jnp.uint16),
            tree_X,
        )
    return jax.tree.map(lambda leaf: _pack_leaf(jnp.asarray(leaf, jnp.float32)), tree_X)


def unpack(packed_X: PyTree, like_X: PyTree, precision: Precision) -> PyTree:
    """Dequantise what `pack` returned; with "int4" an entry is off by at most half of its scale.

    Leaves of `like_X`, arrays or `jax.ShapeDtypeStruct`, are [X, ...]; the result has their shapes
    and dtypes. `precision` is that of `pack`; with "float32" `packed_X` is returned as it is.
    """
    if precision == "float32":
        return packed_X

    def unpack_leaf(leaf: Any, packed: Any) -> Array:
        """Dequantise one array to the shape and dtype of `leaf`."""
        if precision == "bfloat16":
            return lax.bitcast_convert_type(packed, jnp.bfloat16).astype(leaf.dtype)
        return _unpack_leaf(packed, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(unpack_leaf, like_X, packed_X)


def packed_bytes(tree: PyTree, precision: Precision) -> int:
    """Return the bytes that one model's parameters take when sent, with scales and padding."""
    # `pack` takes stacked arrays, so the model is a stack of one; only shapes are computed.
    tree_1 = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), jnp.float32), tree)
    sent = jax.eval_shape(lambda tree_X: pack(tree_X, precision), tree_1)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sent))


def _blocks_of(shape: tuple[int, ...]) -> _Blocks:
    """Choose the blocks of an array of this shape, each of at most `SCALE_BLOCK` entries.

    The array is the part of one trainer or worker, without the stack's first axis.
    """
    shape = shape or (1,)  # a scalar is an array of one entry
    # The axis that may be sharded: one that 2, 4 or 8 devices divide evenly, if there is any; of
    # several the longest.
    even_lengths = [dim for dim in shape if dim % _EVEN_SHARES == 0]
    length = max(even_lengths or shape)
    axis = max(d for d, dim in enumerate(shape) if dim == length)  # the last of equally long axes
    rest = math.prod(shape[:axis] + shape[axis + 1 :])
    # The fewest blocks that hold a line of `rest` entries. At least 1, as the array may be empty.
    per_row = max(math.ceil(rest / SCALE_BLOCK), 1)
    width = max(math.ceil(rest / per_row), 1)
    # As many positions as fit in a block, rounded down to a power of two, by which the length of an
    # axis is most often divisible.
    positions = 2 ** ((SCALE_BLOCK // width).bit_length() - 1)
    positions = max(min(positions, length), 1)
    return _Blocks(
        axis=axis,
        length=length,
        rest=rest,
        rows=math.ceil(length / positions),
        positions=positions,
        per_row=per_row,
        width=width,
    )


def _pack_leaf(leaf_X: Array) -> Packed:
    """Quantise float32 [X, ...] to whole numbers from -7 to 7, times the scale of their block."""
    values = _to_blocks(leaf_X)  # [X, rows, blocks of a row, entries of a block]
    scales = jnp.max(jnp.abs(values), axis=-1) / LARGEST_CODE
    # A block with NaN or infinity becomes NaN. The maximum alone might ignore a NaN.
    scales = jnp.where(jnp.all(jnp.isfinite(values), axis=-1), scales, jnp.nan)
    # Clear the low bits, so that the product of a scale and a code is exact.
    bits = lax.bitcast_convert_type(scales, jnp.uint32) & _SCALE_BITS
    scales = lax.bitcast_convert_type(bits, jnp.float32)
    # Divide by 1 where the scale is zero or NaN: the scale alone makes the result zero or NaN.
    codes = jnp.round(values / jnp.where(scales > 0, scales, 1.0)[..., None])
    codes = jnp.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(jnp.int8)
    # A byte holds one code from each half of the block, in its low and in its high four bits.
    # Packing neighbours would not vectorise.
    low, high = jnp.split(lax.bitcast_convert_type(codes, jnp.uint8), 2, axis=-1)
    packed_codes = (low & 0b00001111) | (high << 4)
    return Packed(packed_codes, scales)


def _unpack_leaf(packed: Packed, shape: tuple[int, ...]) -> Array:
    """Dequantise what `_pack_leaf` returned, to float32 of the given shape [X, ...]."""
    # Both codes of a byte, each in the upper four bits of its own byte.
    low, high = packed.codes << 4, packed.codes & 0b11110000
    shifted_codes = jnp.concatenate([low, high], axis=-1)
    codes = lax.bitcast_convert_type(shifted_codes, jnp.int8) >> 4  # this shift keeps the sign
    return _from_blocks(codes.astype(jnp.float32) * packed.scales[..., None], shape)


def _to_blocks(leaf_X: Array) -> Array:
    """Divide an array [X, ...] into blocks, separately at each index of X.

    Returns [X, rows, blocks of a row, entries of a block], with the sizes of `_blocks_of`; rows and
    blocks that are not full are padded with zeros.
    """
    num = leaf_X.shape[0]
    dims = leaf_X.shape[1:] or (1,)  # a scalar at each index of X is an array of one entry
    blocks = _blocks_of(dims)

    # Move the axis that is divided into rows to position 1, and join all others behind it.
    values = jnp.moveaxis(leaf_X.reshape(num, *dims), blocks.axis + 1, 1)
    values = values.reshape(num, blocks.length, blocks.rest)

    # Pad to whole rows and whole blocks, cut into blocks, and make their number of entries even.
    values = _pad_to(values, (blocks.rows * blocks.positions, blocks.per_row * blocks.width))
    values = values.reshape(num, blocks.rows, blocks.per_row, blocks.positions * blocks.width)
    return _pad_to(values, (blocks.size,))


def _from_blocks(values: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_to_blocks`: join blocks to an array, without their padding.

    `values` is [X, rows, blocks of a row, entries of a block]. `shape`, which is [X, ...], is that
    of the array which was divided, and of the result.
    """
    num = shape[0]
    dims = shape[1:] or (1,)  # a scalar at each index of X is divided as an array of one entry
    blocks = _blocks_of(dims)

    # Drop the padding of each block, then join the blocks of a row and the positions of all rows.
    values = values[..., : blocks.positions * blocks.width]
    values = values.reshape(num, blocks.rows * blocks.positions, blocks.per_row * blocks.width)

    # Drop the padding of the last row, and of the last block in each row.
    values = values[:, : blocks.length, : blocks.rest]

    # Restore the other axes, and move the divided axis from position 1 back to its own.
    other_dims = dims[: blocks.axis] + dims[blocks.axis + 1 :]
    values = values.reshape(num, blocks.length, *other_dims)
    return jnp.moveaxis(values, 1, blocks.axis + 1).reshape(shape)


def _pad_to(array: Array, lengths: tuple[int, ...]) -> Array:
    """Pad the last axes of an array with zeros at their ends, to these lengths."""
    num_other_axes = array.ndim - len(lengths)
    padding = [(0, 0)] * num_other_axes
    for length, dim in zip(lengths, array.shape[num_other_axes:], strict=True):
        padding.append((0, length - dim))
    return jnp.pad(array, padding)
