"""Broken trainers: their detection from a round's losses, and their removal from a run."""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adloco_jax.loop.control import Control

SKIPS_BEFORE_QUARANTINE = 3  # updates in a row, of every worker of a trainer


class Outcome(NamedTuple):
    """Losses and skipped updates of one trainer's round."""

    loss_SR: np.ndarray  # of each update of each of its workers; NaN where it was skipped
    skipped_SR: np.ndarray  # bool
    pseudo_grad_norm: float  # NaN if there was no finite one

    @property
    def mean_loss(self) -> float:
        """Over the updates that were made; NaN if there were none."""
        made = self.loss_SR[~self.skipped_SR]
        return float(np.mean(made)) if made.size else math.nan


def count_skips(control: Control, outcomes: Sequence[Outcome]) -> tuple[Control, list[int]]:
    """Counts the skipped updates of a round.

    A trainer is broken once every one of its workers has skipped its last updates.

    Args:
      control: At the round's boundary, with the round's trainers and workers.
      outcomes: In stack order.

    Returns:
      The changed copy, and the positions of the broken trainers.
    """
    control = copy.deepcopy(control)
    broken = []
    for position, (trainer, outcome) in enumerate(zip(control.trainers, outcomes, strict=True)):
        streams = [str(control.streams[w]) for w in control.workers_of(position)]
        rows = {}
        for stream, skipped_S in zip(streams, outcome.skipped_SR.T, strict=True):
            made = np.flatnonzero(~skipped_S)
            before = 0 if made.size else trainer.skipped_in_a_row.get(stream, 0)
            rows[stream] = before + len(skipped_S) - (int(made[-1]) + 1 if made.size else 0)
        trainer.skipped_in_a_row = rows
        if min(rows.values()) >= SKIPS_BEFORE_QUARANTINE:
            broken.append(position)
    return control, broken


def without_trainers(control: Control, broken: Sequence[int]) -> tuple[Control, list[int]]:
    """The control without some trainers, whose workers retire with them; who remains."""
    control = copy.deepcopy(control)
    survivors = [m for m in range(len(control.trainers)) if m not in broken]
    workers = [w for w, owner in enumerate(control.owners) if owner not in broken]
    for position in broken:
        trainer = control.trainers[position]
        retired = {"workers": control.owners.count(position)}
        control.quarantined.append({"trainer": trainer.id, "round": control.round} | retired)
    control.trainers = [control.trainers[m] for m in survivors]
    # As `core.take` orders them: each trainer's workers next to one another.
    workers.sort(key=lambda worker: control.owners[worker])
    control.streams = [control.streams[w] for w in workers]
    control.owners = [survivors.index(control.owners[w]) for w in workers]
    return control, survivors
