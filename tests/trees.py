"""Compares and indexes pytrees leaf by leaf in NumPy, so that tests compile no programs."""

import jax
import numpy as np


def at(tree, *index):
    """`leaf[index]` of every leaf."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


def rows(tree, *positions):
    """These positions of every leaf's first axis."""
    return at(tree, list(positions))


def same(left, right):
    """Whether two pytrees are equal bit for bit."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in pairs)


def assert_close(actual, expected, *, rtol=1e-6, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


def assert_equal(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0)
