"""Timing alternatives against one another."""

import time
from collections.abc import Callable

import jax


def interleave(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times, taken in turn; the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start_s = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append(time.perf_counter() - start_s)
    return times
