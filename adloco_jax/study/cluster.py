"""Clusters to simulate a run on: devices, their step times, and the links between them."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from adloco_jax.errors import ConfigError

StepTime = Callable[[int], float]
"""Seconds of one forward and backward pass, by the number of sequences on one device."""

EFFICIENCY = 0.4  # of the peak in matrix products; assumed, as reported of well tuned training
# Memory traffic of a pass, whatever its batch: float32 weights are read forward and backward,
# gradients read and written.
PASS_BYTES_PER_PARAM = 16.0


@dataclass(frozen=True)
class Link:
    """The path of a transfer between two neighbours of a ring."""

    bandwidth: float  # bytes/s, may be infinite
    latency_s: float
    jitter: float = 0.0  # coefficient of variation of a transfer's time (lognormal, mean 1)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, in equal numbers per site."""

    num_devices: int
    num_sites: int
    step_time: StepTime
    within: Link  # between devices of one site
    between: Link  # between sites
    compute_jitter: float = 0.0  # coefficient of variation of a replica's compute time in a round
    failures_per_device_hour: float = 0.0
    restart_s: float = 0.0  # from a failure until the replica restarts its round

    def __post_init__(self) -> None:
        if not self.num_devices >= self.num_sites >= 1:
            raise ConfigError(
                f"a cluster of {self.num_devices} devices in {self.num_sites} sites: expected at"
                " least one site, and a device in each"
            )


class Device(NamedTuple):
    """An accelerator's published figures."""

    peak_flops: float  # dense bfloat16 tensor FLOP/s
    memory_bandwidth: float  # bytes/s


# NVIDIA's data sheets: A100 80 GB SXM, H100 SXM, H200 SXM, L4; figures without sparsity.
DEVICES: Mapping[str, Device] = {
    "a100_80gb": Device(312e12, 2.039e12),
    "h100": Device(989e12, 3.35e12),
    "h200": Device(989e12, 4.8e12),
    "l4": Device(121e12, 0.3e12),
}

# NVLink is the A100's 600 GB/s, half of it in each direction. The other links are round figures of
# our own: what one may rent, not what was measured.
_NVLINK = Link(300e9, 5e-6)
_ETHERNET = Link(100e9 / 8, 20e-6)
PRESETS: Mapping[str, Callable[..., Cluster]] = {
    # One host; `between` is never crossed.
    "one_host": functools.partial(Cluster, num_sites=1, within=_NVLINK, between=_NVLINK),
    # One data centre: every transfer over 100 Gbit/s Ethernet.
    "one_datacenter": functools.partial(
        Cluster, num_sites=1, within=_ETHERNET, between=_ETHERNET, compute_jitter=0.01
    ),
    # Two data centres, a leased line of 10 Gbit/s and 30 ms.
    "two_sites": functools.partial(
        Cluster, num_sites=2, within=_NVLINK, between=Link(1.25e9, 0.03, 0.1), compute_jitter=0.01
    ),
    # Eight sites on the open internet: 1 Gbit/s, 100 ms.
    "eight_sites": functools.partial(
        Cluster, num_sites=8, within=_ETHERNET, between=Link(125e6, 0.1, 0.3), compute_jitter=0.05
    ),
}
"""Clusters by name, without their devices: `PRESETS[name](num_devices=..., step_time=...)`."""


def roofline(device: str, *, num_params: int, sequence_length: int) -> StepTime:
    """Step time of a device according to its data sheet.

    Args:
      device: One of `DEVICES`.
      num_params: Parameters of the model.
      sequence_length: Tokens per sequence.

    Returns:
      Seconds of a pass: the longer of compute, 6 * parameters * tokens FLOPs (Kaplan et al. 2020,
      section 2.1; the attention scores, small for short sequences, are left out) at `EFFICIENCY`,
      and of memory traffic, `PASS_BYTES_PER_PARAM` per parameter.

    Raises:
      ConfigError: If the device is unknown.
    """
    if device not in DEVICES:
        raise ConfigError(f"device {device!r}: expected one of {', '.join(DEVICES)}")
    figures = DEVICES[device]
    sequence_s = 6 * num_params * sequence_length / (figures.peak_flops * EFFICIENCY)
    memory_s = PASS_BYTES_PER_PARAM * num_params / figures.memory_bandwidth
    return lambda num_sequences: max(num_sequences * sequence_s, memory_s)


@dataclass(frozen=True)
class Simulated:
    """The cluster whose time is reported, and the size of the model trained there.

    A small model's run is timed as if its schedule were a large one's.
    """

    preset: str = "two_sites"  # of `PRESETS`
    num_devices: int = 4
    device: str = "a100_80gb"
    num_params: int = 300_000_000
    sequence_length: int = 1024  # tokens

    def cluster(self) -> Cluster:
        """The cluster for the simulator.

        Raises:
          ConfigError: If there is no such preset or device, or fewer devices than sites.
        """
        if self.preset not in PRESETS:
            raise ConfigError(f"preset = {self.preset!r}: expected one of {', '.join(PRESETS)}")
        step_time = roofline(
            self.device, num_params=self.num_params, sequence_length=self.sequence_length
        )
        return PRESETS[self.preset](num_devices=self.num_devices, step_time=step_time)

    def __str__(self) -> str:
        return (
            f"on the cluster {self.preset}, {self.num_devices} × {self.device}, as if the model had"
            f" {self.num_params:,} parameters and sequences of {self.sequence_length:,} tokens"
        )
