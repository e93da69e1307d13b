"""Reads compiled programs: which devices communicate, how much, and whether inside a loop."""

import math
import re
from typing import NamedTuple

import numpy as np

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "u16": 2, "bf16": 2, "f16": 2}
_ITEM_BYTES |= {"s32": 4, "u32": 4, "f32": 4}
_OPERATION = re.compile(
    r"= (?P<result>\(.*?\)|\S+)"
    r" (?P<kind>all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)


class Collective(NamedTuple):
    """One operation of a compiled program between devices."""

    kind: str
    num_bytes: float  # bytes that each device sends, by the cheapest known algorithm (rings)
    groups: tuple[tuple[int, ...], ...]  # devices that communicate with one another
    in_loop: bool
    line: str


def collectives(text: str, *, loops: bool = True) -> list[Collective]:
    """All collectives of an optimised HLO text."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            lines = computations.setdefault(header[1], [])
        else:
            lines.append(line)
    looped = _within_loops(computations)
    assert looped or not loops, "no loop found: the reading of the program is broken"
    return [
        _collective(match, line, in_loop=name in looped)
        for name, own in computations.items()
        for line in own
        if (match := _OPERATION.search(line))
    ]


def _within_loops(computations: dict[str, list[str]]) -> set[str]:
    def called(line):
        names = re.findall(r"(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.\-]+)", line)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
            names += re.findall(r"[\w.\-]+", branches)
        return names

    every_line = [line for lines in computations.values() for line in lines]
    waiting = [name for line in every_line if " while(" in line for name in called(line)]
    looped = set()
    while waiting:
        name = waiting.pop()
        if name not in looped:
            looped.add(name)
            waiting += [other for line in computations[name] for other in called(line)]
    return looped


def _collective(match: re.Match, line: str, *, in_loop: bool) -> Collective:
    kind, groups = match["kind"], _groups(line)
    size = sum(
        _ITEM_BYTES[dtype] * math.prod(map(int, filter(None, shape.split(","))))
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match["result"])
    )
    count = len(groups[0])
    factor = {
        "all-reduce": 2 * (count - 1) / count,
        "all-gather": (count - 1) / count,
        "reduce-scatter": count - 1,
        "all-to-all": (count - 1) / count,
        "collective-permute": 1,
    }[kind]
    return Collective(kind, factor * size, groups, in_loop, line.strip())


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """The device groups of a collective, in each notation of XLA's versions."""
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", line):
        return tuple(
            tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])
        )
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, tile = _numbers(found[1]), _numbers(found[2])
        order = _numbers(found[3]) if found[3] else range(len(tile))
        ids = np.arange(math.prod(tile)).reshape(tile).transpose(tuple(order)).reshape(shape)
        return tuple(map(tuple, ids.tolist()))
    order = r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))?"
    found = re.search(rf"replica_groups=mesh\[([^\]]*)\]{order} \{{([^}}]*)\}}", line)
    assert found, f"unknown way to write groups: {line[:300]}"
    axes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
    names, together = list(axes), re.findall(r"'(\w+)'", found[4])
    apart = [name for name in names if name not in together]
    ids = np.arange(math.prod(map(int, axes.values())))
    if found[2]:
        ids = ids.reshape(_numbers(found[2])).transpose(_numbers(found[3]))
    ids = ids.reshape([int(axes[name]) for name in names])
    ids = ids.transpose([names.index(name) for name in apart + together])
    size = math.prod(int(axes[name]) for name in together)
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
