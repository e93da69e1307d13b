"""Reading what a compiled program computes and moves, against programs of known cost."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from program_cost import program_cost  # noqa: E402


def cost_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program_cost(jax.jit(function).lower(*arguments).compile().as_text())


def test_products_in_a_loop_count_as_often_as_it_runs():
    def chain(x, w):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=7)[0]

    cost = cost_of(chain, (64, 32), (32, 32))
    assert cost.flops == 7 * 2 * 64 * 32 * 32
    # Each turn reads the product's factors, and writes, reads and writes its result.
    least = 7 * 4 * (64 * 32 + 32 * 32 + 3 * 64 * 32)
    assert least <= cost.num_bytes <= 1.5 * least


def test_of_what_is_sliced_only_the_slice_moves():
    def walk(table, x):
        return lax.scan(lambda x, row: (x + jnp.sin(row), None), x, table)[0]

    cost = cost_of(walk, (100, 4096), (4096,))
    assert cost.flops == 0
    assert 100 * 4 * 3 * 4096 <= cost.num_bytes <= 2 * 100 * 4 * 3 * 4096


def test_of_two_branches_the_dearer_counts():
    def choose(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x)

    assert cost_of(choose, (16, 16), (16, 16)).flops == 2 * 2 * 16**3
