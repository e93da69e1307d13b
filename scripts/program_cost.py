"""What a compiled program computes and moves, read from its optimised HLO text.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs. Bytes
are what every operation reads and writes, as if no cache kept anything between two of them; of what
is sliced or updated in place, only the slice.
"""

import math
import re
from typing import NamedTuple

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "f64": 8}  # others: 4
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}
_LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")


class Cost(NamedTuple):
    """Of one execution."""

    flops: float  # of products of matrices
    num_bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.num_bytes + other.num_bytes)

    def times(self, count: float) -> "Cost":
        """Of as many executions."""
        return Cost(self.flops * count, self.num_bytes * count)


class _Operation(NamedTuple):
    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str
    is_root: bool


def program_cost(text: str) -> Cost:
    """Cost of an optimised HLO text, such as `jax.stages.Compiled.as_text()` gives."""
    computations: dict[str, dict[str, _Operation]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _LINE.match(line):
            arguments, _, rest = match[5].partition(")")
            operands = re.findall(r"%([\w.\-]+)", arguments)
            operation = _Operation(match[2], match[3], match[4], operands, rest, bool(match[1]))
            current[operation.name] = operation
    return _of_computation(computations, entry)


def _of_computation(computations: dict, name: str) -> Cost:
    total = Cost(0.0, 0.0)
    for operation in computations[name].values():
        total += _of_operation(computations, name, operation)
    return total


def _of_operation(computations: dict, home: str, operation: _Operation) -> Cost:
    operations = computations[home]
    called = re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", operation.rest)
    if operation.kind == "while":
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.rest)
        assert trips, f"a loop of unknown length: {operation.name}"
        return _of_computation(computations, called[0]).times(int(trips[1]))
    if operation.kind == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", operation.rest)
        names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", operation.rest)
        names += re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return max(_of_computation(computations, branch) for branch in names)
    if operation.kind == "call":
        return _of_computation(computations, called[0])
    if operation.kind in _FREE:
        return Cost(0.0, 0.0)
    inside = computations[called[0]] if operation.kind == "fusion" else {}
    flops = sum(_dot_flops(inside, other) for other in inside.values() if other.kind == "dot")
    if operation.kind == "dot":
        flops = _dot_flops(operations, operation)
    return Cost(flops, _moved(operations, operation, inside))


def _dot_flops(operations: dict[str, _Operation], dot: _Operation) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    left = _dimensions(operations[dot.operands[0]].shape)
    sizes = [left[int(d)] for d in contracted[1].split(",") if d] if contracted else []
    return 2.0 * math.prod(_dimensions(dot.shape)) * math.prod(sizes)


def _moved(
    operations: dict[str, _Operation], operation: _Operation, inside: dict[str, _Operation]
) -> float:
    if not inside:
        if operation.kind == "dynamic-slice":
            return 2 * _bytes(operation.shape)
        if operation.kind == "dynamic-update-slice":
            return 2 * _bytes(operations[operation.operands[1]].shape)
        read = [operations[name].shape for name in operation.operands if name in operations]
        return _bytes(operation.shape) + sum(map(_bytes, read))
    total = 0.0
    for other in inside.values():
        if other.kind == "parameter":
            users = [user for user in inside.values() if other.name in user.operands]
            total += sum(_read_by(inside, other, user) for user in users[:1])
        if other.is_root:
            updates = other.kind == "dynamic-update-slice"
            total += _bytes(inside[other.operands[1]].shape if updates else operation.shape)
    return total


def _read_by(inside: dict[str, _Operation], read: _Operation, user: _Operation) -> float:
    if user.kind in ("dynamic-slice", "gather"):
        return _bytes(user.shape)
    if user.kind == "dynamic-update-slice" and user.operands[0] == read.name:
        return 0.0
    return _bytes(read.shape)


def _dimensions(shape: str) -> list[int]:
    found = re.match(r"\w+\[([\d,]*)\]", shape)
    return [int(size) for size in found[1].split(",") if size] if found else []


def _bytes(shape: str) -> float:
    return float(
        sum(
            _ITEM_BYTES.get(kind, 4) * math.prod(int(n) for n in sizes.split(",") if n)
            for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape)
        )
    )
