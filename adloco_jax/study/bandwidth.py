"""The bandwidth between sites that keeps devices computing, beside the Streaming DiLoCo paper's.

`python -m adloco_jax.study.bandwidth` prints the table of docs/NETWORK.md, which says what is
assumed and why.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from adloco_jax.errors import ConfigError
from adloco_jax.study.cluster import Cluster, Link
from adloco_jax.study.network import BLOCKING, Traffic, closed_form_s

MAX_BANDWIDTH = 1e18  # bytes/s; what is not reached with it is held up by latency


def needed_bandwidth(
    cluster: Cluster,
    utilisation: float,
    *,
    num_params: int,
    num_trainers: int = 1,
    num_workers: int,
    batch_size: int,
    steps_per_round: int,
    traffic: Traffic = BLOCKING,
) -> float:
    """The least bandwidth between sites at which a run computes for a given share of its time.

    Args:
      cluster: Its link between sites has the latency that counts; its bandwidth is not looked at.
      utilisation: Time with links that cost nothing, as a fraction of the time, between 0 and 1.
      num_params: As in `closed_form_s`, like the four that follow.
      num_trainers: Each with as many workers as the others.
      num_workers: All trainers' together.
      batch_size: Sequences per worker and update.
      steps_per_round: Updates between synchronisations.
      traffic: How outer gradients travel.

    Returns:
      Bytes/s, to nine digits; 0 if any bandwidth will do.

    Raises:
      ConfigError: If the utilisation is not between 0 and 1, or latency or the links within sites
        keep it lower at any bandwidth.
    """
    if not 0 < utilisation < 1:
        raise ConfigError(f"utilisation={utilisation}: expected a fraction between 0 and 1")

    def round_s(within: Link, between: Link) -> float:
        return closed_form_s(
            dataclasses.replace(cluster, within=within, between=between),
            num_params=num_params,
            num_trainers=num_trainers,
            num_workers=num_workers,
            batch_size=batch_size,
            steps_per_round=steps_per_round,
            num_rounds=1,
            traffic=traffic,
        )

    def is_enough(bandwidth: float) -> bool:
        between = dataclasses.replace(cluster.between, bandwidth=bandwidth)
        return free_s >= utilisation * round_s(cluster.within, between)

    free = Link(math.inf, 0.0)
    free_s = round_s(free, free)
    low, high = 1.0, MAX_BANDWIDTH
    if is_enough(low):
        return 0.0
    if not is_enough(high):
        raise ConfigError(
            f"utilisation={utilisation}: out of reach at any bandwidth between sites; expected less"
            " latency, a faster link within sites, or rarer synchronisation"
        )
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


# The paper's 1 B model (its Tables 1 and 4, sections 3.1 and 3.3.1), and what we add where it is
# silent: docs/NETWORK.md says which is which.
NUM_PARAMS = 10**9
NUM_LAYERS = 24
NUM_FRAGMENTS = 8  # of three layers, strided: 0, 8, 16; then 1, 9, 17; ...
STEPS_PER_ROUND = 100
BACKWARD_FRAC = 2 / 3  # of a step: a layer has one node forward and two of the same cost backward
PRINTED_STEP_S = 0.1  # as the paper prints it, to one digit
GRID_STEP_S = 0.12  # prints the same, and on the paper's grid meets 23 of its 25 figures
STEP_S = 0.11  # between the two, where no figure at 95 % is far off without the grid
# Bandwidths in Gbit/s that the paper must have tried: all figures of its Table 4 are among these.
GRID = np.logspace(-1, 3, 50).round(2)
UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)


def _early_frac(num_fragments: int) -> float:
    """Of a step, what is left of it when a fragment's first layer to have its gradient has it.

    Gradients are ready from the last layer to the first, so it is the fragment's last layer, and
    the layers below it are still to be done; in the mean over the fragments.
    """
    last_layers = np.arange(NUM_LAYERS - num_fragments, NUM_LAYERS)
    return BACKWARD_FRAC * float(last_layers.mean()) / NUM_LAYERS


_WHOLE = Traffic(16.0, early_frac=_early_frac(1))
_STREAMED = Traffic(16.0, NUM_FRAGMENTS, early_frac=_early_frac(NUM_FRAGMENTS))
_OVERLAPPED = dataclasses.replace(_STREAMED, delay_updates=1)
METHODS: Mapping[str, tuple[int, Traffic]] = {
    "data parallel": (1, _WHOLE),
    "DiLoCo": (STEPS_PER_ROUND, _WHOLE),
    "Streaming DiLoCo": (STEPS_PER_ROUND, _STREAMED),
    "with overlapped communication": (STEPS_PER_ROUND, _OVERLAPPED),
    "and in 4 bits": (STEPS_PER_ROUND, dataclasses.replace(_OVERLAPPED, bits_per_param=4.0)),
}
"""Inner steps between synchronisations and traffic, by the paper's method."""

PAPER: Mapping[str, tuple[float, ...]] = {
    "data parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
    "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
    "Streaming DiLoCo": (1.4, 5.2, 9.1, 16.0, 28.1),
    "with overlapped communication": (1.4, 4.3, 6.2, 9.1, 11.0),
    "and in 4 bits": (0.4, 0.9, 1.7, 2.0, 3.0),
}
"""Gbit/s by `UTILISATIONS`: arXiv 2501.18512v1, Table 4, the 1 B model."""


def needed_gbits(method: str, utilisation: float, *, step_s: float) -> float:
    """Gbit/s that one of the paper's methods needs in our model, with a step of this many seconds.

    Two replicas, one at each of two sites; nothing but the bandwidth between them costs time.
    """
    steps_per_round, traffic = METHODS[method]
    free = Link(math.inf, 0.0)
    bandwidth = needed_bandwidth(
        Cluster(2, 2, lambda num_sequences: step_s * num_sequences, free, free),
        utilisation,
        num_params=NUM_PARAMS,
        num_workers=2,
        batch_size=1,
        steps_per_round=steps_per_round,
        traffic=traffic,
    )
    return 8 * bandwidth / 1e9


def on_grid(gbits: float) -> float:
    """The least bandwidth that the paper tried and that is enough, in Gbit/s, as it is printed."""
    return float(f"{min(GRID[gbits <= GRID], default=math.inf):.1f}")


def table() -> str:
    """The paper's figures at 95 % beside ours, as Markdown."""
    lines = [
        "| Gbit/s for 95 % | paper | ours, step of 0.11 s | ratio | 0.1 s | 0.12 s, on the grid |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        paper = PAPER[method][UTILISATIONS.index(0.95)]
        ours, printed, grid = (
            needed_gbits(method, 0.95, step_s=step_s)
            for step_s in (STEP_S, PRINTED_STEP_S, GRID_STEP_S)
        )
        lines.append(
            f"| {method} | {paper} | {ours:.3g} | {ours / paper:.2f} | {printed:.3g} |"
            f" {on_grid(grid)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
