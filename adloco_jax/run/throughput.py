"""A run's FLOP per token, and the FLOP/s that this machine reaches in a matrix product."""

import functools
import math
import timeit

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def flops_per_token(params: PyTree) -> int:
    """Floating-point operations to train on a token: 6 for every weight of a matrix.

    A multiplication and an addition forward, twice that backward. Embeddings, which are looked up,
    attention's own products and anything computed twice are not counted, so that a fraction of the
    machine's rate is never overestimated.

    Args:
      params: One model's parameters, or their shapes; an embedding has `embedding` in its path.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1.
    """
    return 6 * sum(
        math.prod(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(params)
        if leaf.ndim >= 2 and "embedding" not in jax.tree_util.keystr(path)
    )


@functools.cache
def matmul_flops_per_s(dtype: str) -> float:
    """FLOP/s that a large product of square matrices reaches on all devices together.

    The median of five on one device, once per process; a CPU's emulated devices count as one.

    Args:
      dtype: Of the matrices.
    """
    device = jax.local_devices()[0]
    size = 1024 if device.platform == "cpu" else 8192
    square = jax.device_put(jnp.ones((size, size), dtype), device)
    product = jax.jit(jnp.matmul).lower(square, square).compile()
    seconds = timeit.repeat(lambda: product(square, square).block_until_ready(), number=1, repeat=6)
    num_devices = jax.process_count() if device.platform == "cpu" else len(jax.devices())
    return num_devices * 2 * size**3 / float(np.median(seconds[1:]))
