"""Broken trainers: their detection from a round's losses, and their removal from a run."""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adloco_jax.loop.adloco import Control

SKIPS_BEFORE_QUARANTINE = 3  # updates in a row, of every worker of a trainer


class Diverged(Exception):
    """No trainer's loss is a number any more."""

    def __init__(self, round_index: int):
        """Names the round after which this was so."""
        super().__init__(f"round {round_index}")
        self.round = round_index


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


def with_outcomes(
    control: Control, outcomes: Sequence[Outcome], *, after_round: int
) -> tuple[Control, list[dict]]:
    """Counts skipped updates of a round, and marks trainers that are broken.

    A trainer is broken once every one of its workers has skipped its last updates, whatever it does
    later.

    Args:
      control: Its trainers are still the round's, and so are their workers but for new ones.
      outcomes: In stack order.
      after_round: The round they are of.

    Returns:
      The changed copy, and ledger fields for each trainer: `skipped_updates`.
    """
    control = copy.deepcopy(control)
    noted = []
    for position, (trainer, outcome) in enumerate(zip(control.trainers, outcomes, strict=True)):
        streams = [str(control.streams[w]) for w in control.workers_of(position)]
        rows = {}
        # Workers that have joined since then, the last, have no outcome yet.
        for stream, skipped_S in zip(streams, outcome.skipped_SR.T, strict=False):
            made = np.flatnonzero(~skipped_S)
            before = 0 if made.size else trainer.skipped_in_a_row.get(stream, 0)
            rows[stream] = before + len(skipped_S) - (int(made[-1]) + 1 if made.size else 0)
        trainer.skipped_in_a_row = rows
        if trainer.broken_since is None and min(rows.values()) >= SKIPS_BEFORE_QUARANTINE:
            trainer.broken_since = after_round
        noted.append({"skipped_updates": int(outcome.skipped_SR.sum())})
    control.outcomes_round = after_round
    return control, noted


def broken_trainers(control: Control, *, by_round: int) -> list[int]:
    """Positions of the trainers that were broken by the end of a round."""
    return [
        position
        for position, trainer in enumerate(control.trainers)
        if trainer.broken_since is not None and trainer.broken_since <= by_round
    ]


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


def consensus_weights(control: Control) -> tuple[float, ...]:
    """Each trainer's weight in the average of all: its demand, or 0 if it is broken."""
    return tuple(
        float(trainer.demand) if trainer.broken_since is None else 0.0
        for trainer in control.trainers
    )
