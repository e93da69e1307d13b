"""The bandwidth between sites that keeps devices computing, beside the Streaming DiLoCo paper's.

`python -m adloco_jax.study.bandwidth` prints the table of docs/CLUSTER.md, which states the
assumptions and their reasons.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from adloco_jax.study.replay import Traffic
from adloco_jax.study.summary import markdown_table

# The paper's 1 B model (its Tables 1 and 4, sections 3.1 and 3.3.1) and our assumptions where it is
# silent: docs/CLUSTER.md says which is which.
NUM_PARAMS = 10**9
NUM_LAYERS = 24
NUM_FRAGMENTS = 8  # of three layers, strided: 0, 8, 16; then 1, 9, 17; ...
STEPS_PER_ROUND = 100
BACKWARD_FRAC = 2 / 3  # of a step: a layer has one node forward and two of the same cost backward
PRINTED_STEP_S = 0.1  # as the paper prints it, to one digit
GRID_STEP_S = 0.12  # prints the same, and on the paper's grid meets 23 of its 25 figures
STEP_S = 0.11  # between the two, where no figure at 95 % is far off without the grid
# Bandwidths in Gbit/s that the paper must have tried: they include all figures of its Table 4.
GRID = np.logspace(-1, 3, 50).round(2)
UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)


def _early_frac(num_fragments: int) -> float:
    """Fraction of a step that remains when a fragment has its first gradient, mean over fragments.

    Gradients are computed from the last layer to the first, so it is the fragment's last layer, and
    the layers below it remain.
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
"""By the paper's method: inner steps between synchronisations, and traffic."""

PAPER: Mapping[str, tuple[float, ...]] = {
    "data parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
    "DiLoCo": (1.4, 6.2, 13.3, 23.3, 86.8),
    "Streaming DiLoCo": (1.4, 5.2, 9.1, 16.0, 28.1),
    "with overlapped communication": (1.4, 4.3, 6.2, 9.1, 11.0),
    "and in 4 bits": (0.4, 0.9, 1.7, 2.0, 3.0),
}
"""Gbit/s by `UTILISATIONS`: arXiv 2501.18512v1, Table 4, the 1 B model."""


def needed_gbits(
    traffic: Traffic, utilisation: float, *, num_params: int, num_steps: int, step_s: float
) -> float:
    """Bandwidth at which two replicas, one per site, reach a compute utilisation.

    The inverse of the simulator's communication time (`study.replay`) where nothing but the
    bandwidth between the sites costs time.

    Args:
      traffic: How outer gradients travel.
      utilisation: Compute time as a fraction of all time, between 0 and 1.
      num_params: Parameters of the model.
      num_steps: Inner steps between two synchronisations of a fragment.
      step_s: Seconds of an inner step.

    Returns:
      Gbit/s.
    """
    round_s = num_steps * step_s
    blocked_s = round_s * (1 / utilisation - 1) / traffic.num_fragments
    hidden_s = traffic.hidden_s(round_s, num_updates=num_steps, num_micro_batches=num_steps)
    # A ring of two moves every byte once in each direction.
    return 8 * traffic.sync_bytes(num_params) / (blocked_s + hidden_s) / 1e9


def needed_by(method: str, utilisation: float, *, step_s: float) -> float:
    """Gbit/s that the paper's 1 B model needs with one of `METHODS`: see `needed_gbits`."""
    num_steps, traffic = METHODS[method]
    return needed_gbits(
        traffic, utilisation, num_params=NUM_PARAMS, num_steps=num_steps, step_s=step_s
    )


def on_grid(gbits: float) -> float:
    """Smallest sufficient bandwidth of the paper's grid, in Gbit/s, as printed there."""
    return float(f"{min(GRID[gbits <= GRID], default=math.inf):.1f}")


def table() -> str:
    """Markdown table of the paper's figures at 95 % beside ours."""
    head = ("paper", "ours, step of 0.11 s", "ratio", "0.1 s", "0.12 s, on the grid")
    rows = [("Gbit/s for 95 %", *head)]
    for method in METHODS:
        paper = PAPER[method][UTILISATIONS.index(0.95)]
        ours, printed, grid = (
            needed_by(method, 0.95, step_s=step_s)
            for step_s in (STEP_S, PRINTED_STEP_S, GRID_STEP_S)
        )
        cells = (f"{paper}", f"{ours:.3g}", f"{ours / paper:.2f}", f"{printed:.3g}")
        rows.append((method, *cells, f"{on_grid(grid)}"))
    return markdown_table(rows)


if __name__ == "__main__":
    print(table())
