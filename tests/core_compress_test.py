"""Outer gradients in fewer bits: rounding, blocks, sizes in bytes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from adloco_jax.core.compress import LARGEST_CODE, SCALE_BLOCK, pack, packed_bytes, unpack

LOW = ["bfloat16", "int4"]
SHAPES = [
    *((), (7,), (128,), (1009,), (3, 0)),
    *((257, 48), (48, 24), (130, 3), (5, 11, 129), (9, 1, 7, 5)),
]


def leaf_of(*shape, seed=0):
    """A leaf whose blocks have entries of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=shape) * 2)
    return (rng.normal(size=shape) * sizes).astype(np.float32)


@functools.cache
def round_trip_of(precision):
    return jax.jit(lambda tree: unpack(pack(tree, precision), tree, precision))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_oracle_within_half_a_scale(shape):
    leaf = leaf_of(3, *shape)
    actual = np.asarray(round_trip_of("int4")(leaf))
    assert (actual.shape, actual.dtype) == (leaf.shape, leaf.dtype)
    for worker in range(3):
        expected, scales = oracle.in_blocks(leaf[worker], LARGEST_CODE, SCALE_BLOCK)
        # A scale may be off by its last bit of 21.
        np.testing.assert_allclose(actual[worker], expected, rtol=1e-6)
        # At most half a unit, plus the rounding of float32 at the largest code.
        assert np.all(np.abs(actual[worker] - leaf[worker]) <= 0.500_02 * scales)


@pytest.mark.parametrize("precision", LOW)
def test_what_can_be_said_exactly_arrives_exactly(precision):
    rng = np.random.default_rng(1)
    codes = rng.integers(-7, 8, size=(2, 300, 40)).astype(np.float32)
    # The largest entry of each block is 7 units; a unit is a power of two.
    codes[:, ::50] = LARGEST_CODE
    tree = {"w": codes * np.float32(2.0**-13), "zero": np.zeros((2, 130), np.float32)}
    arrived = round_trip_of(precision)(tree)
    for name in tree:
        np.testing.assert_array_equal(arrived[name], tree[name])


def test_bfloat16_is_rounding_to_bfloat16():
    leaf = leaf_of(2, 50, 3)
    packed = pack(leaf, "bfloat16")
    assert packed.dtype == jnp.uint16
    expected = np.asarray(jnp.asarray(leaf).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(round_trip_of("bfloat16")(leaf), expected)


@pytest.mark.parametrize("precision", LOW)
def test_what_is_not_finite_stays_with_its_worker(precision):
    clean = leaf_of(3, 257, 48)
    for broken in (np.nan, -np.inf):
        leaf = clean.copy()
        leaf[1, 100, 7] = broken
        arrived, expected = round_trip_of(precision)(leaf), round_trip_of(precision)(clean)
        assert not np.isfinite(arrived[1, 100, 7])  # stays non-finite
        for worker in (0, 2):
            np.testing.assert_array_equal(arrived[worker], expected[worker])


def test_tiny_and_huge_entries():
    leaf = np.zeros((1, 8, 100), np.float32)  # eight blocks
    leaf[0, 0], leaf[0, 1], leaf[0, 2] = 1e-30, 1e18, 1e-44
    arrived = np.asarray(round_trip_of("int4")(leaf))
    np.testing.assert_allclose(arrived[0, :2], leaf[0, :2], rtol=1e-6)
    assert np.isfinite(arrived).all() and np.abs(arrived[0, 2:]).max() <= 1e-42


@pytest.mark.parametrize("shape", [(4096, 4096), (50257, 768), (12, 768, 2048)])
def test_large_leaves_take_the_bits_that_are_promised(shape):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    for precision, bits in {"float32": 32, "bfloat16": 16, "int4": 4 + 32 / SCALE_BLOCK}.items():
        per_param = packed_bytes(leaf, precision) * 8 / math.prod(shape)
        assert per_param == pytest.approx(bits, rel=2e-3)


def test_blocks_keep_clear_of_the_axis_that_devices_share():
    """A part of the longest axis is quantised as it is within the whole leaf."""
    leaf, in_int4 = leaf_of(2, 3, 96, 70), jax.jit(lambda leaf: pack(leaf, "int4"))
    whole = in_int4(leaf)
    assert whole.codes.shape == (2, 96, 2, 53) and whole.scales.shape == (2, 96, 2)
    for first in range(0, 96, 16):
        rows = slice(first, first + 16)
        part = in_int4(leaf[:, :, rows])
        np.testing.assert_array_equal(part.codes, whole.codes[:, rows])
        np.testing.assert_array_equal(part.scales, whole.scales[:, rows])
