"""Time alternatives against one another, and describe the machine."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np


def interleave(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Time calls alternately, `repeats` times; a first round of calls is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start_s = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append(time.perf_counter() - start_s)
    return times


def per_second(count: int, seconds: list[float]) -> np.ndarray:
    """Quartiles, ascending, of how many a second there are of what a call does `count` times."""
    return count / np.quantile(seconds, (0.75, 0.5, 0.25))


def report(title: str, times: dict[str, list[float]]) -> None:
    """Print a line for each alternative: median and quartiles in milliseconds."""
    print(title)
    for name, seconds in times.items():
        low, median, high = 1e3 * np.quantile(seconds, (0.25, 0.5, 0.75))
        print(
            f"  {name:20} {median:10.2f} ms   quartiles {low:.2f} to {high:.2f}, n = {len(seconds)}"
        )


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """The ratio of the median times of two alternatives."""
    return round(float(np.median(times[name]) / np.median(times[base])), 3)


def machine() -> str:
    """Processors, devices and versions in one line, with the date."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(": ")[2] if names else cpu
    kinds = sorted({device.device_kind for device in jax.devices()})
    return (
        f"{os.cpu_count()} x {cpu}; devices {len(jax.devices())} x {', '.join(kinds)};"
        f" Python {platform.python_version()}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    )
