"""Outer gradients in fewer bits: rounding, blocks, what they weigh."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from adloco_jax.core.compress import BITS_PER_PARAM, SCALE_BLOCK, pack, packed_bytes, unpack

LOW = ["bfloat16", "int8", "int4"]
WHOLE = ["int8", "int4"]
LARGEST = {"int8": 127, "int4": 7}
SHAPES = [
    *((), (7,), (128,), (1009,), (3, 0)),
    *((257, 48), (48, 24), (130, 3), (5, 11, 129), (9, 1, 7, 5)),
]


def leaf_of(*shape, seed=0):
    """Entries of very different sizes, from block to block."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=shape) * 2)
    return (rng.normal(size=shape) * sizes).astype(np.float32)


@functools.cache
def round_trip_of(precision):
    return jax.jit(lambda tree: unpack(pack(tree, precision), tree, precision))


@pytest.mark.parametrize("precision", WHOLE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_oracle_within_half_a_scale(shape, precision):
    leaf = leaf_of(3, *shape)
    actual = np.asarray(round_trip_of(precision)(leaf))
    assert (actual.shape, actual.dtype) == (leaf.shape, leaf.dtype)
    for worker in range(3):
        expected, scales = oracle.in_blocks(leaf[worker], LARGEST[precision], SCALE_BLOCK)
        np.testing.assert_allclose(actual[worker], expected, rtol=3e-7)
        # Half a unit, and the rounding of float32 at the largest code.
        assert np.all(np.abs(actual[worker] - leaf[worker]) <= 0.500_02 * scales)


@pytest.mark.parametrize("precision", LOW)
def test_jit_and_vmap_change_nothing(precision):
    tree = {"a": leaf_of(2, 4, 30, 9), "b": leaf_of(2, 4, 5)}
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(2)]
    together = jax.vmap(round_trip_of(precision))(tree)
    for i in range(2):
        alone = unpack(pack(each[i], precision), each[i], precision)
        for name in tree:
            np.testing.assert_allclose(together[name][i], alone[name], rtol=3e-7)


@pytest.mark.parametrize("precision", LOW)
def test_what_can_be_said_exactly_arrives_exactly(precision):
    rng = np.random.default_rng(1)
    codes = rng.integers(-7, 8, size=(2, 300, 40)).astype(np.float32)
    # Of each block the largest is 7 (for int8: 127) units, a unit being a power of two.
    codes[:, ::50] = LARGEST.get(precision, 7)
    tree = {"w": codes * np.float32(2.0**-13), "zero": np.zeros((2, 130), np.float32)}
    arrived = round_trip_of(precision)(tree)
    for name in tree:
        np.testing.assert_array_equal(arrived[name], tree[name])


@pytest.mark.parametrize("precision", LOW)
def test_once_rounded_nothing_is_rounded_again(precision):
    once = round_trip_of(precision)(leaf_of(2, 257, 48))
    np.testing.assert_allclose(round_trip_of(precision)(once), once, rtol=3e-7)


def test_bfloat16_is_rounding_to_bfloat16():
    leaf = leaf_of(2, 50, 3)
    packed = pack(leaf, "bfloat16")
    assert packed.dtype == jnp.uint16
    expected = np.asarray(jnp.asarray(leaf).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(round_trip_of("bfloat16")(leaf), expected)
    assert np.max(np.abs(expected / leaf - 1)) <= 2.0**-8


def test_float32_is_left_alone():
    tree = {"w": leaf_of(2, 3)}
    assert pack(tree, "float32") is tree
    assert unpack(tree, tree, "float32") is tree


def test_four_bits_are_four_bits():
    """Every pair of codes in one byte, low half first, and back."""
    low, high = np.meshgrid(np.arange(-7, 8), np.arange(-7, 8))
    leaf = np.concatenate([low.ravel(), high.ravel()]).astype(np.float32).reshape(2, 225)
    rows = np.stack([leaf[0], leaf[1]], axis=1)[:, None, :]  # [225, 1, 2]: blocks of a pair
    packed = pack(rows, "int4")
    codes = np.asarray(packed.codes).ravel()
    assert codes.dtype == np.uint8 and codes.size == 225
    signed = np.stack([(codes & 15).astype(int), (codes >> 4).astype(int)])
    signed = np.where(signed > 7, signed - 16, signed)
    units = np.asarray(packed.scales).ravel()
    np.testing.assert_allclose(signed * units, leaf, rtol=3e-7, atol=0.5)  # scales follow the pair
    largest = np.max(np.abs(leaf), axis=0)
    np.testing.assert_array_equal(np.max(np.abs(signed), axis=0), np.where(largest, 7, 0))
    arrived = np.asarray(unpack(packed, rows, "int4"))[:, 0].T
    np.testing.assert_allclose(arrived, signed * units, rtol=3e-7)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", LOW)
def test_what_is_not_finite_stays_with_its_worker(precision, broken):
    clean = leaf_of(4, 257, 48)
    leaf = clean.copy()
    leaf[2, 100, 7] = broken
    arrived, expected = round_trip_of(precision)(leaf), round_trip_of(precision)(clean)
    assert not np.isfinite(arrived[2, 100, 7])  # never mistaken for a number
    for worker in (0, 1, 3):
        np.testing.assert_array_equal(arrived[worker], expected[worker])


@pytest.mark.parametrize("precision", WHOLE)
def test_tiny_and_huge_entries(precision):
    leaf = np.zeros((1, 8, 100), np.float32)  # eight blocks
    leaf[0, 0], leaf[0, 1], leaf[0, 2] = 1e-30, 1e18, 1e-44
    arrived = np.asarray(round_trip_of(precision)(leaf))
    np.testing.assert_allclose(arrived[0, :2], leaf[0, :2], rtol=1e-6)
    assert np.isfinite(arrived).all() and np.abs(arrived[0, 2:]).max() <= 1e-42


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_arrays_that_travel(shape, precision):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    one = jax.eval_shape(lambda: pack({"w": jnp.zeros((1, *shape))}, precision))
    held = sum(math.prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(one))
    assert packed_bytes({"w": leaf}, precision) == held


@pytest.mark.parametrize("shape", [(4096, 4096), (32000, 4096), (50257, 768), (12, 768, 2048)])
def test_large_leaves_take_the_bits_that_are_promised(shape):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    size = math.prod(shape)
    assert packed_bytes(leaf, "float32") == 4 * size
    assert packed_bytes(leaf, "bfloat16") == 2 * size
    for precision in WHOLE:
        assert packed_bytes(leaf, precision) * 8 / size == pytest.approx(
            BITS_PER_PARAM[precision], rel=2e-3
        )


def test_no_matrix_is_much_less_than_seven_times_smaller_in_four_bits():
    """129 is the worst width: two blocks of 65, each with an entry that fills it up."""
    for rows in range(96, 160, 7):
        for columns in (16, 33, 48, 65, 129, 257):
            leaf = jax.ShapeDtypeStruct((rows - rows % 8, columns), jnp.float32)
            assert 4 * math.prod(leaf.shape) >= 6.97 * packed_bytes(leaf, "int4"), leaf.shape


def test_blocks_keep_clear_of_the_axis_that_devices_share():
    """A part of the longest axis is packed as it is within the whole."""
    leaf = leaf_of(2, 3, 96, 70)
    whole = pack(leaf, "int4")
    assert whole.codes.shape == (2, 96, 2, 53) and whole.scales.shape == (2, 96, 2)
    for first in range(0, 96, 16):
        rows = slice(first, first + 16)
        part = pack(leaf[:, :, rows], "int4")
        np.testing.assert_array_equal(part.codes, whole.codes[:, rows])
        np.testing.assert_array_equal(part.scales, whole.scales[:, rows])
