"""What a recorded run would have taken on a cluster: a replay of its ledger, round by round.

The model, which the tests check against cases computed by hand and against `closed_form_s`:

- **Replicas.** Each of the R workers that the run began with becomes a replica of as many devices
  as every other. Replicas lie in blocks: the first R / sites of them in the first site, and so on;
  each stays within one site unless there are more sites than workers, when it takes several whole
  sites. What the equal division leaves over is idle. With fewer devices than workers, workers share
  a device and each of its passes takes as many times longer.
- **Computing.** An update's batch (micro-batch x accumulation steps) is dealt over the replica's
  devices, whole sequences, as evenly as may be; a device runs its share in passes of at most the
  recorded micro-batch, one after the other. A device without a sequence is idle. Where the replica
  has several devices, each update ends with a ring all-reduce of the gradients among them.
- **Communicating.** A ring all-reduce of P bytes among m takes 2 (m - 1) / m * P / bandwidth +
  2 (m - 1) * latency, over the slowest link that its ring crosses (ALGORITHM 6). A trainer with
  several workers does one per round among its replicas; with one worker, none. A merge moves P
  bytes per absorbed trainer to the representative, one after the other, over the link between
  their nearest replicas.
- **Waiting.** A trainer's round ends when its slowest replica is done and all are synchronised.
  Trainers wait for one another only at a merge: its members, and all whose workers change then. A
  refused merge costs what the merge would have cost, since it has to be tried to be refused. At the
  end of the run, trainers that are done wait for the last.
- **Loss of workers.** A device fails at a constant rate while it computes. Its replica restarts and
  redoes the round from the parameters that the round began with; the trainer's others wait.
- **Left out**: evaluation, checkpoints, the batch-size test's own pass (some 4 % of a round), the
  optimizer's update, traffic of different trainers on one link, overlap of communication with
  computing, and what it takes to bring a worker the parameters of a trainer it joins.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

StepTime = Callable[[int], float]
"""Seconds of one forward and backward pass, by the sequences that one device holds."""

BYTES_PER_PARAM = 4  # float32: parameters, gradients and pseudo-gradients travel so
MAX_EXPECTED_FAILURES = 7.0  # of a replica in one round; beyond it a run would never get through


@dataclass(frozen=True)
class Link:
    """What a transfer between two neighbours of a ring goes through."""

    bandwidth: float  # bytes/s, may be infinite
    latency_s: float
    jitter: float = 0.0  # coefficient of variation of a transfer's time (lognormal, mean 1)


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

# NVLink is the A100's 600 GB/s, of which half goes each way. The rest are round figures of our own:
# what one may rent, not what was measured. A preset is all of a Cluster but devices and step time.
_NVLINK = Link(300e9, 5e-6)
_ETHERNET_100G = Link(100e9 / 8, 20e-6)
PRESETS: Mapping[str, Mapping[str, int | float | Link]] = {
    # One host; `between` is never crossed.
    "one_host": {"num_sites": 1, "within": _NVLINK, "between": _NVLINK},
    # One data centre: hosts behind 100 Gbit/s Ethernet, taken for every transfer.
    "one_datacenter": {"num_sites": 1, "within": _ETHERNET_100G, "between": _ETHERNET_100G},
    # Two data centres, a leased 10 Gbit/s line of 30 ms.
    "two_sites": {"num_sites": 2, "within": _NVLINK, "between": Link(10e9 / 8, 0.03, 0.1)},
    # Eight sites on the open internet.
    "eight_sites": {
        "num_sites": 8,
        "within": _ETHERNET_100G,
        "between": Link(1e9 / 8, 0.1, 0.3),
        "compute_jitter": 0.05,
    },
}


class RoundTime(NamedTuple):
    """One trainer's round on the cluster, with the merge that followed it, if one did.

    The five shares are means over the trainer's devices; together they are `end_s - start_s`.
    """

    round: int
    trainer: int
    workers: int
    devices: float  # a fraction where workers share a device
    start_s: float
    compute_s: float
    communication_s: float
    waiting_s: float  # for the slowest replica, for a device with a sequence more, for a merge
    idle_s: float  # without a sequence
    lost_s: float  # to failures: work thrown away, and restarts
    end_s: float


@dataclass(frozen=True)
class Replay:
    """A run's times on a cluster; the five totals are device-seconds.

    compute_s + communication_s + waiting_s + idle_s + lost_s = num_devices * wall_s.
    """

    rounds: tuple[RoundTime, ...]
    end_s: Mapping[int, float]  # by round: when every trainer was done with it
    num_devices: int
    wall_s: float
    compute_s: float  # of the passes that counted
    communication_s: float
    waiting_s: float
    idle_s: float  # retired and left-over devices too
    lost_s: float

    @property
    def utilisation(self) -> float:
        """Useful computing, as a fraction of all device-time."""
        return self.frac("compute_s")

    def frac(self, name: str) -> float:
        """One of the five totals as a fraction of all device-time."""
        return getattr(self, name) / (self.num_devices * self.wall_s)


def replay(events: Iterable[dict], cluster: Cluster, *, seed: int = 0) -> Replay:
    """Times a recorded run as it would have gone on a cluster.

    Args:
      events: A ledger's lines, also of a resumed or unfinished run.
      cluster: Where it is to run.
      seed: Of jitter and failures; without them it changes nothing.

    Returns:
      The times.

    Raises:
      ConfigError: If the cluster cannot run it.
      DataError: If the ledger lacks a start or a round, or its rounds are not in order.
    """
    raise NotImplementedError


def closed_form_s(
    cluster: Cluster,
    *,
    num_params: int,
    num_trainers: int = 1,
    num_workers: int,
    batch_size: int,
    steps_per_round: int,
    num_rounds: int,
) -> float:
    """Wall-clock seconds of a run with a constant batch and no merge, jitter or failure.

    Data parallel is one trainer with `steps_per_round=1`; DiLoCo one trainer with several workers;
    one-worker trainers are `num_workers=num_trainers`.
    """
    raise NotImplementedError


def scaling(events: Iterable[dict], clusters: Iterable[Cluster], *, seed: int = 0) -> list[dict]:
    """One table row per cluster.

    Returns:
      Dicts with devices, sites, wall_s, utilisation, waiting_frac, communication_frac, idle_frac,
      lost_frac.
    """
    raise NotImplementedError


def roofline(
    device: str | Device,
    *,
    num_params: int,
    sequence_length: int,
    efficiency: float = 0.4,
    overhead_s: float = 0.0,
    bytes_per_param: float = 16.0,
) -> StepTime:
    """A device's step time from its data sheet."""
    raise NotImplementedError


def measured(step_times: Mapping[int, float]) -> StepTime:
    """A step time that interpolates measured ones."""
    raise NotImplementedError


def measured_step_times(events: Iterable[dict]) -> dict[int, float]:
    """Seconds of one pass by sequences on a device, as a run's own rounds show them."""
    raise NotImplementedError
