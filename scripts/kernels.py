"""Count kernels and their bytes in the text of a compiled program."""

import functools
import math
import re
from typing import NamedTuple, TypeAlias


class Work(NamedTuple):
    """What a device does in one call of a program."""

    num_bytes: float = 0  # operands and results of all kernels
    kernels: float = 0  # instructions that run by themselves; a fusion is one

    def times(self, factor: float) -> "Work":
        """Return the work of `factor` calls."""
        return Work(*(factor * number for number in self))


_COMPUTATION = re.compile(r"(?ms)^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\s*\n(.*?)^\}")
_INSTRUCTION = re.compile(
    r"(?m)^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<result>\(.*?\)|\S+) (?P<kind>[\w\-]+)"
    r"\((?P<operands>[^)\n]*)\)(?P<attributes>.*)"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_FREE = ("parameter", "get-tuple-element", "tuple", "constant", "bitcast", "after-all")
_SLICES = ("slice", "dynamic-slice", "gather", "dynamic-update-slice")

_Instruction: TypeAlias = re.Match[str]


def count(text: str | None) -> Work:
    """Count the work in the compiler's text of a program.

    A loop counts as often as it runs (once if unknown), a conditional by its branch with the most
    bytes, a slice by what is read or written.
    """
    assert text is not None, "the compiler gives no text"
    computations = {
        name: {one["name"]: one for one in _INSTRUCTION.finditer(body)}
        for name, body in _COMPUTATION.findall(re.sub(r"/\*.*?\*/", "", text))
    }

    @functools.cache
    def work_of(name: str) -> Work:
        own = computations[name]
        works = [work(one, own) for one in own.values()]
        return Work(*(float(sum(column)) for column in zip(Work(), *works, strict=True)))

    def work(one: _Instruction, own: dict[str, _Instruction]) -> Work:
        if one["kind"] in _FREE or one["kind"].endswith("-done"):
            return Work()
        called = [name for name in _names(one["attributes"]) if name in computations]
        if one["kind"] in ("while", "conditional", "call", "async-start"):
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', one["attributes"])
            largest = max(map(work_of, called), key=lambda work: work.num_bytes)
            return largest.times(int(trips[1]) if trips else 1)
        inner = computations[called[0]] if one["kind"] == "fusion" else {}
        return Work(_bytes(one, own, inner), 1)

    return work_of([*computations][-1])  # the program's own computation


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", text)


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _num_bytes(one: _Instruction) -> float:
    arrays = _ARRAY.findall(one["result"])
    return sum(int(bits or 8) / 8 * math.prod(_integers(sizes)) for bits, sizes in arrays)


def _bytes(
    one: _Instruction, own: dict[str, _Instruction], inner: dict[str, _Instruction]
) -> float:
    """Count the bytes that a kernel reads and writes; `inner` has the instructions of a fusion."""
    reads = [_num_bytes(own[name]) for name in _names(one["operands"])]
    written, update = _num_bytes(one), "dynamic-update-slice"
    operands = {name: _names(part["operands"]) for name, part in inner.items()}
    for name, part in inner.items():
        if part["kind"] == "parameter":
            users = [user for user in inner.values() if name in operands[user["name"]]]
            if all(u["kind"] in _SLICES and operands[u["name"]][0] == name for u in users):
                read = sum(_num_bytes(user) for user in users if user["kind"] != update)
                reads[int(part["operands"])] = read
        elif part["kind"] == update:
            array, new = (_num_bytes(inner[name]) for name in operands[name][:2])
            written -= array - new
    return written + sum(reads)
