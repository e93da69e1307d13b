"""Count the operations, bytes and kernels of a compiled program, and bound its seconds.

Only the text of a program is read (`compiled.as_text()`), so the program may be compiled for a
device that is not here.
"""

import functools
import math
import re
from typing import NamedTuple


class Work(NamedTuple):
    """What a device does in one call of a program."""

    operations: float = 0  # of matrix products; a multiplication and an addition are two
    num_bytes: float = 0  # operands and results of all kernels
    kernels: float = 0  # instructions that run by themselves; a fusion is one

    def times(self, factor: float) -> "Work":
        """Return the work of `factor` calls."""
        return Work(*(factor * number for number in self))


class Rates(NamedTuple):
    """How fast a device is at most."""

    operations: float  # per second: dense products of bfloat16 matrices
    num_bytes: float  # per second: of the memory
    kernel_s: float  # seconds to start a kernel

    def least_seconds(self, work: Work) -> float:
        """Return a lower bound of the time that the work takes."""
        products_s, memory_s = work.operations / self.operations, work.num_bytes / self.num_bytes
        return max(products_s, memory_s) + self.kernel_s * work.kernels


class _Instruction(NamedTuple):
    name: str
    result: str  # its type
    kind: str
    operands: list[str]  # their names
    text: str  # operands and attributes


_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_FREE = ("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "after-all")
_SLICES = ("slice", "dynamic-slice", "gather")
# How many products a kernel of cuDNN's attention computes. The causal mask halves each of them.
_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}


def count(text: str | None) -> Work:
    """Count the work of a compiled program, given as the text of the compiler.

    The body of a loop counts as often as the loop runs, or once if the compiler does not know how
    often. Of a conditional, only the branch with the most bytes counts. Where a kernel reads or
    writes only a slice of an array, only the slice counts.
    """
    computations: dict[str, dict[str, _Instruction]] = {}
    own, entry = {}, ""
    assert text is not None, "the compiler gives no text"
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            own = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            operands = re.findall(r"%([\w.\-]+)", found[4].partition(")")[0])
            own[found[1]] = _Instruction(found[1], found[2], found[3], operands, found[4])

    @functools.cache
    def work_of(name: str) -> Work:
        own = computations[name]
        works = [work(one, own) for one in own.values()]
        return Work(*(float(sum(column)) for column in zip(Work(), *works, strict=True)))

    def work(one: _Instruction, own: dict[str, _Instruction]) -> Work:
        if one.kind in _FREE or one.kind.endswith("-done"):
            return Work()
        if one.kind == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', one.text)
            return work_of(_called(one, "body")[0]).times(int(trips[1]) if trips else 1)
        if one.kind == "conditional":
            branches = _called(one, r"branch_computations|\w+_computation")
            return max(map(work_of, branches), key=lambda branch: branch.num_bytes)
        if one.kind in ("call", "async-start"):
            return work_of(_called(one, "to_apply|calls")[0])
        inner = computations[_called(one, "calls")[0]] if one.kind == "fusion" else {}
        products = [_operations(part, inner) for part in inner.values()]
        return Work(_operations(one, own) + sum(products), _bytes(one, own, inner), 1)

    return work_of(entry)


def _called(one: _Instruction, attribute: str) -> list[str]:
    """Return the names of the computations that an instruction calls."""
    groups = re.findall(rf"\b(?:{attribute})=(\{{[^}}]*\}}|%?[\w.\-]+)", one.text)
    return [name for group in groups for name in re.findall(r"[\w.\-]+", group)]


def _sizes(type_text: str) -> list[int]:
    """Return the sizes of the axes of the first array of a type; none for a scalar."""
    found = _ARRAY.search(type_text)
    return [int(size) for size in found[2].split(",") if size] if found else []


def _num_bytes(type_text: str) -> float:
    return sum(
        int(bits or 8) / 8 * math.prod(int(size) for size in sizes.split(",") if size)
        for bits, sizes in _ARRAY.findall(type_text)
    )


def _operations(one: _Instruction, own: dict[str, _Instruction]) -> float:
    """Count the operations of a matrix product; other instructions have none."""
    results = math.prod(_sizes(one.result))
    target = re.search(r'custom_call_target="([^"]*)"', one.text)
    if target and target[1] in _ATTENTION:  # the result is [B, H, L, K]
        return _ATTENTION[target[1]] * results * _sizes(one.result)[2]
    if one.kind == "convolution":  # a TPU's products
        factor = _sizes(own[one.operands[1]].result)
        labels = re.search(r"dim_labels=\w+_(\w+)->", one.text)
        return 2 * results * math.prod(factor) / factor[labels[1].index("o")] if labels else 0
    if one.kind != "dot" and not (target and "gemm" in target[1]):
        return 0
    (axes,) = re.findall(r'lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)', one.text)
    factor = _sizes(own[one.operands[0]].result)
    return 2 * results * math.prod(factor[int(axis)] for axis in re.findall(r"\d+", axes))


def _bytes(
    one: _Instruction, own: dict[str, _Instruction], inner: dict[str, _Instruction]
) -> float:
    """Count the bytes that a kernel reads and writes; `inner` has the instructions of a fusion."""
    reads = [_num_bytes(own[name].result) if name in own else 0 for name in one.operands]
    written = _num_bytes(one.result)
    for part in inner.values():
        if part.kind == "parameter":
            users = [user for user in inner.values() if part.name in user.operands]
            sliced = [u for u in users if u.kind in _SLICES and u.operands[0] == part.name]
            if users and sliced == users:
                read = sum(_num_bytes(user.result) for user in users)
                reads[int(part.text.partition(")")[0])] = read
        elif part.kind == "dynamic-update-slice":
            array, new = (inner[name] for name in part.operands[:2])
            written -= _num_bytes(array.result) - _num_bytes(new.result)
            if array.kind == "parameter":
                reads[int(array.text.partition(")")[0])] = 0
    return written + sum(reads)
