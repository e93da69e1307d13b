"""Predictions for recorded runs: their time on simulated clusters."""

from collections import Counter
from collections.abc import Sequence

from adloco_jax.errors import ConfigError, DataError
from adloco_jax.study import curves
from adloco_jax.study.cluster import Cluster, Simulated
from adloco_jax.study.curves import Run
from adloco_jax.study.loss import Clock
from adloco_jax.study.replay import Replay, replay

DEVICE = "a100_80gb"
PRESET = "two_sites"  # the cluster of loss against time: communication matters between sites
PRESET_IN_WORDS = "two sites with a leased line of 10 Gbit/s and 30 ms between them"
# The table of clusters: preset and devices.
SIZES = (
    *(("one_host", 4), ("one_host", 8), ("one_datacenter", 32), ("one_datacenter", 256)),
    *(("two_sites", 32), ("two_sites", 256), ("eight_sites", 256), ("eight_sites", 4096)),
)


def cluster(run: Run, preset: str, num_devices: int) -> Cluster:
    """A preset cluster whose devices train this run's model at the speed of their data sheet.

    Raises:
      ConfigError: If there are fewer devices than sites.
    """
    return Simulated(
        preset,
        num_devices,
        DEVICE,
        run.start["num_params"],
        run.start["config"]["data"]["sequence_length"],
    ).cluster()


def simulate(runs: Sequence[Run]) -> tuple[Clock | None, list[str]]:
    """The runs' times on one preset cluster, with a device for each worker of the largest run.

    Returns:
      The clock, None where no run can be simulated; and for each run that cannot be, the reason.
    """
    workers = Counter()  # by run and round: pools grow
    for number, run in enumerate(runs):
        for event in curves.lines(run.events, "round"):
            workers[number, event["round"]] += event["workers"]
    num_devices = max(workers.values())
    end_s, reasons = {}, []
    for run in runs:
        try:
            end_s[run.folder] = replay(run.events, cluster(run, PRESET, num_devices)).end_s
        except (ConfigError, DataError) as error:
            reasons.append(f"{run.folder.name}: {error}")
    name = f"{PRESET}, {num_devices} × {DEVICE}"
    return (Clock(name, end_s) if end_s else None), reasons


def on_clusters(run: Run) -> dict[tuple[str, int], Replay]:
    """The run's times on the clusters of `SIZES`, from one host to thousands of devices.

    Raises:
      DataError: If the ledger cannot be replayed.
    """
    return {(name, n): replay(run.events, cluster(run, name, n)) for name, n in SIZES}
