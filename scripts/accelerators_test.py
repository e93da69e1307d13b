"""What scripts/accelerators.py reports of compiled programs, tested without GPU compilers."""

import dataclasses
import functools
import json
import re
import sys
import types
from pathlib import Path

import accelerators
import jax
import jax.numpy as jnp
import pytest
from kernels import Work, count

from adloco_jax.config import validate
from adloco_jax.engine.model import configured_model, program_spec
from adloco_jax.engine.programs import lower
from adloco_jax.engine.spec import ProgramKey, this_machine

ROOT = Path(__file__).resolve().parents[1]


def test_products_of_float32_matrices_are_found():
    x = jnp.zeros((64, 64), jnp.float32)
    product = jax.jit(lambda x, y: (x + 1) @ (y + 1))
    text = product.lower(x, x).compile().as_text()
    assert len(accelerators.float32_products(text)) == 1
    line = '  %c = (f32[8,8], s8[4]) custom-call(%a, %b), custom_call_target="__cublas$gemm"'
    factors = "  %a = f32[8,8]{1,0} parameter(0)\n  %b = f32[8,8]{1,0} parameter(1)\n"
    assert accelerators.float32_products(f"ENTRY %m {{\n{factors}{line}\n}}") != []
    halves = factors.replace("f32", "bf16")
    assert accelerators.float32_products(f"ENTRY %m {{\n{halves}{line}\n}}") == []


def test_what_is_wrong_with_a_program_is_named(monkeypatch):
    config = accelerators.configured("growing_pool", accelerators.ADAMW | {"model.num_layers": 1})
    config.model.width, config.model.vocab_size, config.model.mlp_width = 48, 257, 64
    config.data.sequence_length, config.inner.steps_per_round = 16, 2
    settings = validate(config)
    machine = dataclasses.replace(this_machine(), devices=this_machine().devices[:1])
    spec = program_spec(settings, configured_model(settings, machine), machine)
    key = ProgramKey("steps", (8,), 16)
    program = lower(dataclasses.replace(spec, sequential=True), key).compile()
    monkeypatch.setattr(accelerators, "float32_products", lambda text: [])
    assert accelerators.faults_of(spec, key, program, fused=False) == []
    (forward, backward) = accelerators.faults_of(spec, key, program, fused=True)
    assert "no fmhaSoftmax among" in forward and "no fmhaSoftmaxBackward among" in backward
    monkeypatch.setattr(accelerators, "MOST_TEMPORARIES", {True: 1, False: 1})
    (fault,) = accelerators.faults_of(spec, key, program, fused=False)
    assert "bytes of temporaries" in fault


def test_a_product_in_a_loop_counts_as_often_as_the_loop_runs():
    def multiply(x_BD, w_NDD):
        return jax.lax.scan(lambda x_BD, w_DD: (x_BD @ w_DD, None), x_BD, w_NDD)[0]

    x_BD, w_NDD = jnp.zeros((32, 64)), jnp.zeros((5, 64, 64))
    work = count(jax.jit(multiply).lower(x_BD, w_NDD).compile().as_text())
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
    ("line", "num_bytes", "kernels"),
    [
        # the update read and written, and the index
        ("f32[8,16,4]{2,1,0} fusion(%a, %i, %new), calls=%fused", 2 * 256 + 4, 1),
        # the slice read in float32 and written in bfloat16, and the index
        ("bf16[1,16,4]{2,1,0} fusion(%a, %i), calls=%sliced", 256 + 128 + 4, 1),
        ("f32[10]{0} conditional(%i), branch_computations={%small, %large}", 160, 2),
        (
            "(bf16[2,4,32,8]{3,1,2,0}, f32[2,4,32]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q),"
            ' custom_call_target="__cudnn$fmhaSoftmax"',
            4 * 4096 + 1024,
            1,
        ),
        (
            "(f32[6,7]{1,0}, s8[100]{0}) custom-call(%left, %right),"
            ' custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
            4 * (42 + 30 + 35) + 100,
            1,
        ),
    ],
)
def test_an_instruction_has_its_bytes_and_kernels(line, num_bytes, kernels):
    text = PROGRAM.replace("LINE", f"ROOT %r = {line}")
    assert count(text) == Work(num_bytes, kernels)


def test_more_kernels_or_bytes_than_are_kept_are_a_fault(monkeypatch):
    monkeypatch.setitem(accelerators.KEPT, (True, False), (100, 20.0))
    spec, key = types.SimpleNamespace(sequential=True), ProgramKey("steps", (1,), 16)
    faults = functools.partial(accelerators.above_kept, spec, key)
    assert faults(Work(20.9e9, 104)) == []
    (kernels,) = faults(Work(20e9, 106))
    (moved,) = faults(Work(21.1e9, 100))
    assert "106.0 kernels in an update, were 100" in kernels and "21.1 GB" in moved


def test_the_table_has_only_what_was_compiled(monkeypatch, tmp_path):
    record = {"fits": True, "mode": "workers at once", "max_batch_size": 16, "programs": 3}
    record |= {"largest_bytes": 4.2e9, "device_bytes": 84e9, "attention": "cudnn"}
    started = []

    def row(title, name, changes, device):
        started.append((title, device))
        if device == "h100x8":
            raise RuntimeError("does not compile\nand more")
        return {"config": title, "device": device} | record

    results, page = tmp_path / "r.jsonl", tmp_path / "GPU.md"
    page.write_text("a\n<!-- compiled -->\nold\n<!-- end of what was compiled -->\nb\n")
    monkeypatch.setattr(accelerators, "row", row)
    words = ["accelerators.py", "--results", str(results), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", [*words, "--minutes=-1"])
    assert accelerators.main() == 1 and started == []
    total = len(list(accelerators.cases()))
    assert f"Not compiled yet: {total} of {total}." in page.read_text()
    monkeypatch.setattr(sys, "argv", words)
    results.write_text(json.dumps({"config": "growing_pool", "device": "h100x1"} | record) + "\n")
    assert accelerators.main() == 0
    assert len(started) == total - 1 and ("growing_pool", "h100x1") not in started
    text = page.read_text()
    expected = "| growing_pool | h100x1 | workers at once | 16 | cudnn | 4.20 | 5% |"
    assert expected in text and "old" not in text and "Not compiled yet: 0 of" in text
    assert "| growing_pool | h100x8 | does not compile: does not compile |" in text


def test_the_cases_are_valid_and_the_page_counts_those_that_are_left():
    for _, name, changes, _ in accelerators.CASES:
        validate(accelerators.configured(name, changes))
    page = (ROOT / "studies" / "GPU.md").read_text(encoding="utf-8")
    table = accelerators.TABLE.search(page)[0]
    left = int(re.search(r"Not compiled yet: (\d+) of", table)[1])
    rows = table.count("\n| ")
    assert rows + left == len(list(accelerators.cases()))
