"""Clusters that a run may be timed on: devices, their step times, and the links between them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from adloco_jax.errors import ConfigError

StepTime = Callable[[int], float]
"""Seconds of one forward and backward pass, by the sequences that one device holds."""


@dataclass(frozen=True)
class Link:
    """What a transfer between two neighbours of a ring goes through."""

    bandwidth: float  # bytes/s, may be infinite
    latency_s: float
    jitter: float = 0.0  # coefficient of variation of a transfer's time (lognormal, mean 1)

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 <= self.latency_s < math.inf > self.jitter >= 0):
            raise ConfigError(
                f"{self}: expected a bandwidth above 0 bytes/s, and a latency and a jitter of 0 or"
                " more"
            )


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, evenly spread over sites."""

    num_devices: int
    num_sites: int
    step_time: StepTime  # from `roofline` or `measured`
    within: Link  # between devices of one site
    between: Link  # between sites
    compute_jitter: float = 0.0  # coefficient of variation of a replica's computing in a round
    failures_per_device_hour: float = 0.0
    restart_s: float = 0.0  # from a failure until the replica begins its round again

    def __post_init__(self) -> None:
        if not self.num_devices >= self.num_sites >= 1:
            raise ConfigError(
                f"a cluster of {self.num_devices} devices in {self.num_sites} sites: expected at"
                " least one site, and a device in each"
            )
        for name in ("compute_jitter", "failures_per_device_hour", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a number of 0 or more")


@dataclass(frozen=True)
class Device:
    """An accelerator's public figures."""

    peak_flops: float  # dense bfloat16 tensor FLOP/s
    memory_bandwidth: float  # bytes/s


# NVIDIA's data sheets: A100 80 GB SXM, H100 SXM, H200 SXM, L4; figures without sparsity.
DEVICES: Mapping[str, Device] = {
    "a100_80gb": Device(312e12, 2.039e12),
    "h100": Device(989e12, 3.35e12),
    "h200": Device(989e12, 4.8e12),
    "l4": Device(121e12, 0.3e12),
}


class Preset(TypedDict):
    """A cluster but for its devices: `Cluster(num_devices=..., step_time=..., **preset)`."""

    num_sites: int
    within: Link
    between: Link
    compute_jitter: float


# NVLink is the A100's 600 GB/s, of which half goes each way. The rest are round figures of our own:
# what one may rent, not what was measured.
_NVLINK = Link(300e9, 5e-6)
_ETHERNET = Link(100e9 / 8, 20e-6)
PRESETS: Mapping[str, Preset] = {
    # One host; `between` is never crossed.
    "one_host": Preset(num_sites=1, within=_NVLINK, between=_NVLINK, compute_jitter=0.0),
    # One data centre: every transfer over 100 Gbit/s Ethernet.
    "one_datacenter": Preset(num_sites=1, within=_ETHERNET, between=_ETHERNET, compute_jitter=0.01),
    # Two data centres, a leased line of 10 Gbit/s and 30 ms.
    "two_sites": Preset(
        num_sites=2, within=_NVLINK, between=Link(10e9 / 8, 0.03, 0.1), compute_jitter=0.01
    ),
    # Eight sites on the open internet: 1 Gbit/s, 100 ms.
    "eight_sites": Preset(
        num_sites=8, within=_ETHERNET, between=Link(1e9 / 8, 0.1, 0.3), compute_jitter=0.05
    ),
}


def roofline(
    device: str | Device,
    *,
    num_params: int,
    sequence_length: int,
    efficiency: float = 0.4,
    overhead_s: float = 0.0,
    bytes_per_param: float = 16.0,
) -> StepTime:
    """A device's step time from its data sheet.

    Args:
      device: One of `DEVICES`, or figures of one's own.
      num_params: Of the model.
      sequence_length: Tokens of a sequence.
      efficiency: Of the peak that matrix multiplications reach; 0.4 is our assumption, what well
        tuned training of large models reports.
      overhead_s: Seconds per pass that do not depend on the batch.
      bytes_per_param: Moved to and from memory per pass whatever the batch: by default float32
        weights read forward and backward, gradients read and written.

    Returns:
      Seconds of a pass: the longer of 6 * parameters * tokens FLOPs (Kaplan et al. 2020, section
      2.1; the attention scores, small for short sequences, are left out) and the parameters'
      traffic, plus the overhead.

    Raises:
      ConfigError: If the device is unknown or a figure is not positive.
    """
    if isinstance(device, str):
        if device not in DEVICES:
            raise ConfigError(f"device {device!r}: expected one of {', '.join(DEVICES)}")
        device = DEVICES[device]
    if not (min(num_params, sequence_length, efficiency) > 0 <= min(overhead_s, bytes_per_param)):
        raise ConfigError(
            f"roofline of num_params={num_params}, sequence_length={sequence_length}, "
            f"efficiency={efficiency}, overhead_s={overhead_s}, bytes_per_param={bytes_per_param}: "
            "expected the first three above 0 and the others not below"
        )
    sequence_s = 6 * num_params * sequence_length / (device.peak_flops * efficiency)
    memory_s = bytes_per_param * num_params / device.memory_bandwidth
    return lambda num_sequences: max(num_sequences * sequence_s, memory_s) + overhead_s


def measured(step_times: Mapping[int, float]) -> StepTime:
    """A step time that goes through measured ones.

    Args:
      step_times: Seconds of one pass by sequences on the device, e.g. of
        `network.measured_step_times`.

    Returns:
      Straight lines between them. Below the smallest batch, the line through the two smallest ones
      as far as it lies between that batch's time and its time per sequence; with a single one, its
      time per sequence, which flatters small shares. Above the largest, its time per sequence.

    Raises:
      ConfigError: If there is none, or one is not positive.
    """
    if not step_times or not all(
        size > 0 and 0 < seconds < math.inf for size, seconds in step_times.items()
    ):
        raise ConfigError(
            f"step times {dict(step_times)}: expected one at least, of positive batches and seconds"
        )
    sizes, seconds = zip(*sorted(step_times.items()), strict=True)
    fixed_s = 0.0
    if len(sizes) > 1:
        slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
        fixed_s = min(max(seconds[0] - slope * sizes[0], 0.0), seconds[0])

    def step_time(num_sequences: int) -> float:
        if num_sequences < sizes[0]:
            return fixed_s + (seconds[0] - fixed_s) * num_sequences / sizes[0]
        if num_sequences > sizes[-1]:
            return seconds[-1] * num_sequences / sizes[-1]
        return float(np.interp(num_sequences, sizes, seconds))

    return step_time
