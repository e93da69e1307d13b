"""The counts of compiled programs, and the bounds that follow from them."""

import jax
import jax.numpy as jnp
import pytest

from adloco_jax.engine.work import Rates, Work, count

pytestmark = pytest.mark.usefixtures("one_device")


def test_a_product_in_a_loop_counts_as_often_as_the_loop_runs():
    def multiply(x_BD, w_NDD):
        return jax.lax.scan(lambda x_BD, w_DD: (x_BD @ w_DD, None), x_BD, w_NDD)[0]

    x_BD, w_NDD = jnp.zeros((32, 64)), jnp.zeros((5, 64, 64))
    work = count(jax.jit(multiply).lower(x_BD, w_NDD).compile().as_text())
    assert work.operations == 5 * 2 * 32 * 64 * 64
    # Each turn reads one matrix and the activations, and writes activations.
    least = 5 * 4 * (64 * 64 + 2 * 32 * 64)
    assert least <= work.num_bytes <= 3 * least and work.kernels >= 5


PROGRAM = """
%fused (a: f32[8,16,4], i: s32[], new: f32[1,16,4]) -> f32[8,16,4] {
  %a = f32[8,16,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %new = f32[1,16,4]{2,1,0} parameter(2)
  ROOT %update = f32[8,16,4]{2,1,0} dynamic-update-slice(%a, %new, %i)
}

%sliced (a: f32[8,16,4], i: s32[]) -> bf16[1,16,4] {
  %a = f32[8,16,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %part = f32[1,16,4]{2,1,0} dynamic-slice(%a, %i)
  ROOT %half = bf16[1,16,4]{2,1,0} convert(%part)
}

%small (x: f32[10]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  ROOT %copy = f32[10]{0} copy(%x)
}

%large (x: f32[10]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  %one = f32[10]{0} copy(%x)
  ROOT %two = f32[10]{0} copy(%one)
}

ENTRY %main (a: f32[8,16,4], q: bf16[2,32,4,8]) -> f32[8,16,4] {
  %i = s32[] constant(0)
  %a = f32[8,16,4]{2,1,0} parameter(0)
  %q = bf16[2,32,4,8]{3,2,1,0} parameter(1)
  %new = f32[1,16,4]{2,1,0} parameter(2)
  %left = f32[6,5]{1,0} parameter(3)
  %right = f32[5,7]{1,0} parameter(4)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "operations", "num_bytes", "kernels"),
    [
        # the update read and written, and the index
        ("f32[8,16,4]{2,1,0} fusion(%a, %i, %new), calls=%fused", 0, 2 * 256 + 4, 1),
        # the slice read in float32 and written in bfloat16, and the index
        ("bf16[1,16,4]{2,1,0} fusion(%a, %i), calls=%sliced", 0, 256 + 128 + 4, 1),
        ("f32[10]{0} conditional(%i), branch_computations={%small, %large}", 0, 160, 2),
        (
            "(bf16[2,4,32,8]{3,1,2,0}, f32[2,4,32]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q),"
            ' custom_call_target="__cudnn$fmhaSoftmax"',
            2 * (2 * 2 * 4 * 32 * 32 * 8) / 2,
            4 * 4096 + 1024,
            1,
        ),
        (
            "(f32[6,7]{1,0}, s8[100]{0}) custom-call(%left, %right),"
            ' custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
            2 * 6 * 7 * 5,
            4 * (42 + 30 + 35) + 100,
            1,
        ),
        (
            "f32[6,7]{1,0} convolution(%left, %right), dim_labels=bf_io->bf",
            2 * 6 * 7 * 5,
            4 * (42 + 30 + 35),
            1,
        ),
    ],
)
def test_an_instruction_has_its_operations_bytes_and_kernels(line, operations, num_bytes, kernels):
    text = PROGRAM.replace("LINE", f"ROOT %r = {line}")
    assert count(text) == Work(operations, num_bytes, kernels)


def test_a_bound_is_the_slower_of_products_and_memory_and_the_starts_of_kernels():
    rates = Rates(operations=100.0, num_bytes=10.0, kernel_s=0.5)
    assert rates.least_seconds(Work(400, 20, 3)) == 4 + 1.5
    assert rates.least_seconds(Work(100, 20, 3)) == 2 + 1.5
