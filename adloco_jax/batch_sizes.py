"""The batch-size decisions: each trainer's next requested batch, by its test or its schedule."""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from adloco_jax.accounting import Control, Trainer
from adloco_jax.core.arguments import with_knobs
from adloco_jax.core.batching import BATCH_TESTS, next_batch_size
from adloco_jax.core.gradstats import pool
from adloco_jax.core.types import GradientStats
from adloco_jax.settings import Settings

Stats: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...], np.ndarray, GradientStats]]
"""By class of trainers: their positions; of each worker its trainer among them, how many examples
it tested, and its statistics, arrays [R] that may still be computed."""


class Decision(NamedTuple):
    """The outcome of one trainer's batch-size test."""

    noise: float | None  # S_hat
    signal: float | None  # |G|^2
    test_value: float | None
    next_batch_size: int
    reason: str  # why it is this one


def measures_gradients(settings: Settings) -> bool:
    """Whether the batch size follows the gradients rather than a declaration."""
    return BATCH_TESTS[settings.batching.test].needs != "nothing"


def with_batch_sizes(
    control: Control, stats: Stats, settings: Settings
) -> tuple[Control, list[Decision]]:
    """Set every trainer's requested batch for the next round; waits for the statistics.

    Args:
      control: Already counts the round.
      stats: From the engine; a trainer that was not tested is not in it.
      settings: The run's settings.

    Returns:
      The changed copy, and one decision per trainer, in stack order.
    """
    control = copy.deepcopy(control)
    decide = _tested if measures_gradients(settings) else _scheduled
    decisions = []
    with np.errstate(all="ignore"):  # what has no meaning is not finite, and keeps the batch
        tested = _by_trainer(stats)
        for position, trainer in enumerate(control.trainers):
            request = _request(control, position, settings)
            decision = decide(trainer, tested.get(position), request, settings)
            trainer.requested_batch_size = decision.next_batch_size
            control.counts[decision.reason] = control.counts.get(decision.reason, 0) + 1
            decisions.append(decision)
    return control, decisions


def _by_trainer(stats: Stats) -> dict[int, GradientStats]:
    """Each tested trainer's statistics, pooled over its workers, on the host in float64."""
    pooled = {}
    for trainers, owners, count_R, stats_R in stats:
        fields = {name: np.asarray(value, np.float64) for name, value in vars(stats_R).items()}
        for place, trainer in enumerate(trainers):
            own = [w for w, owner in enumerate(owners) if owner == place and count_R[w] > 0]
            if own:
                mine = {name: values[own] for name, values in fields.items()}
                pooled[trainer] = pool(GradientStats(**mine))
    return pooled


def _request(control: Control, position: int, settings: Settings) -> Callable:
    """The configured test as a function of the statistics alone, for one trainer."""
    batching, trainer = settings.batching, control.trainers[position]
    num_workers = len(control.workers_of(position))
    available = {
        **vars(batching),
        "num_workers": num_workers if batching.scope == "trainer" else 1,
        "batch_size": trainer.requested_batch_size,
        "round_index": control.round,
        "history": control.replayed.get(str(trainer.id), []),
    }
    return with_knobs(BATCH_TESTS[batching.test].request, available)


def _scheduled(
    trainer: Trainer, stats: GradientStats | None, request: Callable, settings: Settings
) -> Decision:
    size = int(request(stats))  # without any
    is_kept = size == trainer.requested_batch_size
    return Decision(None, None, None, size, "kept" if is_kept else "schedule")


def _tested(
    trainer: Trainer, stats: GradientStats | None, request: Callable, settings: Settings
) -> Decision:
    """The test's answer within its limits; the trainer's smoothed sums change in place."""
    batching, size = settings.batching, trainer.requested_batch_size
    if stats is None:
        return Decision(None, None, None, size, "skipped")
    noise, signal = float(stats.noise), float(stats.signal)
    if not (math.isfinite(noise) and math.isfinite(signal)) or noise <= 0:
        return Decision(noise, signal, None, size, "degenerate")
    # Without a scale, which differs from test to test: float64 holds it.
    sums = {name: float(value) for name, value in vars(stats.in_units_of(1.0)).items()}
    if batching.mode == "unbiased":
        decay = batching.smoothing
        old = trainer.smoothing or dict.fromkeys(sums, 0.0)
        # Both sides of a ratio carry the same bias correction 1 - decay^n, which cancels.
        sums = {name: decay * old[name] + (1 - decay) * value for name, value in sums.items()}
        trainer.smoothing = sums
    smoothed = GradientStats(**{name: np.asarray(value) for name, value in sums.items()})
    value = float(request(smoothed))
    new = next_batch_size(
        value,
        batch_size=size,
        max_growth=batching.max_growth,
        batch_cap=batching.batch_cap,
        monotone=batching.monotone,
    )
    if not math.isfinite(value):
        reason = "degenerate"
    elif smoothed.signal_sum <= 0:
        reason = "signal"
    elif new < value:
        reason = "capped"
    else:
        reason = "kept" if new == size else "grew" if new > size else "shrank"
    return Decision(noise, signal, value, new, reason)
