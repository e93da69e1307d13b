"""Decide how each trainer's workers, rounds and batch grow, by a batch-size test or a schedule.

A batch-size test requests a batch from measured gradient noise and signal (|G|^2, the squared norm
of the true gradient). A schedule, such as `ramp`, measures nothing. Growth is blind if the measured
signal is not positive. Free workers are those of the pool that no trainer has yet. A trainer is
quarantined, which means removed, if its workers only skip updates.

The size of a trainer is its number of workers, its round length (a multiple of the shortest round)
and its batch per worker. `Size.total` is the product of the three. A trainer's demand is the batch
times the round length, without the workers. `Control` is what the host knows of a run: trainers,
their workers and sizes. `grow_to` stores a size that a trainer requests. Its round length and batch
hold from the next round on; workers join later, if some are free.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from adloco_jax.core.batching import BATCH_TESTS, Scalar, next_batch_size
from adloco_jax.core.gradstats import pool
from adloco_jax.core.types import GradientStats
from adloco_jax.loop.control import Control, Size, Trainer
from adloco_jax.settings import BatchingSettings, EnsembleSettings, InnerSettings, Settings

Stats: TypeAlias = Mapping[int, GradientStats]
"""By trainer, the statistics of its workers that measured some, as NumPy arrays float64 [W]."""


class Decision(NamedTuple):
    """The outcome of a trainer's batch-size test: the new size, the reason, and measured values."""

    size: Size  # size that the trainer requests for the next rounds
    reason: str  # one word, such as "grew" or "capped"
    noise: float | None = None  # S_hat, the estimated gradient noise of this test alone
    signal: float | None = None  # estimate of |G|^2 of this test alone
    test_value: float | None = None  # the test's result before limits, in sequences per worker


def measures_gradients(batching: BatchingSettings) -> bool:
    """Return whether the configured test measures gradients; schedules such as `ramp` do not."""
    return BATCH_TESTS[batching.test].needs != "nothing"  # `needs`: which statistics it reads


def measures_inner_products(batching: BatchingSettings) -> bool:
    """Return whether the configured batch-size test needs inner products of gradients."""
    return BATCH_TESTS[batching.test].needs == "inner_products"


def with_batch_sizes(
    control: Control, stats: Stats, settings: Settings, trainers: Iterable[int]
) -> tuple[Control, list[Decision]]:
    """Decide the sizes that trainers request for their next rounds.

    Args:
      control: The host's data, in which the round is already counted.
      stats: By trainer id, what its workers measured; trainers that were not tested are missing.
      settings: The settings of the run.
      trainers: Ids of the trainers that have completed a round.

    Returns:
      A copy of `control` with the sizes, and one decision for each of `trainers`, in their order.
    """
    control = copy.deepcopy(control)
    measures = measures_gradients(settings.batching)
    free = _workers_for_tests(control, settings.ensemble)  # workers that may still join
    decisions = []
    with np.errstate(all="ignore"):  # values that are not finite keep the batch
        for m in trainers:
            trainer = control.trainers[m]
            now = control.size(m)
            request = _request(control, m, settings.batching)
            if not measures:  # a schedule, which needs no statistics
                size = now._replace(batch_size=int(request(None)))
                decision = Decision(size, "kept" if size == now else "schedule")
            elif m not in stats:
                decision = Decision(now, "skipped")
            else:  # `pool` joins the statistics of the trainer's workers, fields [W], to fields []
                decision = _tested(
                    trainer, pool(stats[m]), request, now, free, settings.batching, settings.inner
                )
            trainer.grow_to(decision.size)  # workers are only requested; they join later
            free -= decision.size.num_workers - now.num_workers
            control.counts[decision.reason] = control.counts.get(decision.reason, 0) + 1
            decisions.append(decision)
    return control, decisions


def with_growth(
    control: Control,
    growth: float,
    ensemble: EnsembleSettings,
    batching: BatchingSettings,
    inner: InnerSettings,
) -> Control:
    """Return a copy of `control` in which each trainer requests `growth` times its `Size.total`.

    So it predicts what a batch-size test may request. Growth ends at the limits of the settings and
    at the workers that are free; earlier trainers are served first. Round length and batch are set
    in the copy. More workers are only requested: none joins here.

    Args:
      control: The host's data before the test.
      growth: By what the test multiplies a trainer's size: 1 or more.
      ensemble: Says how many workers the pool has.
      batching: The order of growth, and the limits of the batch.
      inner: The limits of the round length.
    """
    control = copy.deepcopy(control)
    free = _workers_for_tests(control, ensemble)
    for m, trainer in control.trainers.items():
        now = control.size(m)
        size = grown(
            now,
            growth * trainer.demand,  # the request for each of the present workers
            batching,
            inner,
            limit=math.floor(growth * now.total),  # the same for all workers, as a whole number
            free_workers=free,
        )
        free -= size.num_workers - now.num_workers
        trainer.grow_to(size)
    return control


def free_workers(control: Control, ensemble: EnsembleSettings) -> int:
    """Return the number of workers that may still join: those of the pool that no trainer has had.

    The workers of quarantined trainers do not join another.
    """
    if ensemble.initial_workers is None:  # all workers are there from the start
        return 0
    retired = sum(trainer["workers"] for trainer in control.quarantined)
    return ensemble.num_workers - retired - control.num_workers


def _workers_for_tests(control: Control, ensemble: EnsembleSettings) -> int:
    """Return the number of workers that may join because a batch-size test requests them."""
    if ensemble.spawn_frac is not None:  # all join at that fraction of the run, whatever tests say
        return 0
    return free_workers(control, ensemble)


def grown(
    now: Size,
    request: float,
    batching: BatchingSettings,
    inner: InnerSettings,
    *,
    limit: int,
    free_workers: int = 0,
) -> Size:
    """Grow a trainer's workers, round length and batch until they provide a requested batch.

    They do once `Size.total` is `request` times the present number of workers. They grow in the
    order of `batching.growth`, each up to its cap before the next; nothing shrinks, and workers at
    most double.

    Args:
      now: The present size.
      request: The requested batch, in sequences per worker. If it is not finite, nothing changes.
      batching: The order of growth, and the limits of the batch.
      inner: The limits of the round length.
      limit: The largest `Size.total` that is allowed.
      free_workers: Number of workers that may join.

    Returns:
      The size to request; `now` if nothing grows.
    """
    if not math.isfinite(request):
        return now
    size = now
    request = min(request, limit / now.num_workers)  # the limit is of all workers together
    for quantity in batching.growth:
        # The request per worker, if the workers that have just been added share it.
        share = request * (now.num_workers / size.num_workers)
        if quantity == "workers":
            per_worker = size.round_length * size.batch_size  # what a worker adds to the total
            most = min(size.num_workers + free_workers, limit // per_worker)
            needed = min(math.ceil(share * size.num_workers / per_worker), most)
            if needed > size.num_workers:
                size = size._replace(num_workers=min(2 * size.num_workers, most))
            if size.num_workers < needed:
                break  # workers double again before anything else grows
        elif quantity == "rounds":
            most_steps = inner.max_steps_per_round or inner.steps_per_round  # unset: no growth
            most = most_steps // inner.steps_per_round
            most = min(most, limit // (size.num_workers * size.batch_size))
            needed = min(math.ceil(share / size.batch_size), most)
            size = size._replace(round_length=max(size.round_length, needed))
        else:  # the batch
            batch = next_batch_size(
                share / size.round_length,
                batch_size=size.batch_size,
                max_growth=batching.max_growth,
                batch_cap=batching.batch_cap,
            )
            most = limit // (size.num_workers * size.round_length)
            size = size._replace(batch_size=min(batch, most))
    return size


def _request(
    control: Control, trainer_id: int, batching: BatchingSettings
) -> Callable[[GradientStats | None], Scalar]:
    """Bind a trainer's present sizes and the settings to the configured batch-size test.

    The result takes `GradientStats` (None for a schedule, which measures nothing) and returns the
    requested batch in sequences per worker, before limits and rounding; NaN if it is undefined.
    """
    trainer = control.trainers[trainer_id]
    is_pooled = batching.scope == "trainer"  # the test is on the mean of all workers' gradients
    return functools.partial(
        BATCH_TESTS[batching.test].request,
        eta=batching.eta,
        vartheta=batching.vartheta,
        nu=batching.nu,
        mode=batching.mode,
        schedule=batching.ramp,
        num_workers=len(trainer.streams) if is_pooled else 1,
        batch_size=trainer.requested_batch_size,
        round_index=control.rounds_of(trainer_id),
    )


def _tested(
    trainer: Trainer,
    stats: GradientStats,
    request: Callable[[GradientStats | None], Scalar],
    now: Size,
    free_workers: int,
    batching: BatchingSettings,
    inner: InnerSettings,
) -> Decision:
    """Decide a trainer's next size by the batch-size test.

    Args:
      trainer: Its moving averages of statistics and its `measured_size` are updated in place.
      stats: The statistics of the trainer's workers, pooled: fields [].
      request: The test; it takes statistics, and returns a batch in sequences per worker.
      now: The trainer's present size.
      free_workers: Number of workers that may join the trainer.
      batching: Smoothing, and the limits of growth.
      inner: The limits of the round length.

    Returns:
      The decision. Its reason is "degenerate" (a value is not finite, or there is no noise);
      "no_signal" (the signal is not positive), or then "held" (the limit of growth without a signal
      kept the size); "capped" (limits give less than was requested); "kept", "grew" or "shrank".
    """
    noise = float(stats.noise)
    signal = float(stats.signal)
    if not (math.isfinite(noise) and math.isfinite(signal)) or noise <= 0:
        return Decision(now, "degenerate", noise, signal)
    # Use units that are equal for all tests. In float64 the sums do not overflow in these units.
    sums = {name: float(value) for name, value in vars(stats.in_units_of(1.0)).items()}
    if batching.mode == "unbiased":  # mode "paper" uses this test's values alone
        decay = batching.smoothing
        old = trainer.smoothing or dict.fromkeys(sums, 0.0)
        # The averages start at zero and are too small by the factor 1 - decay^n. The factor is the
        # same for a sum and its weight, so it cancels in their ratio.
        sums = {name: decay * old[name] + (1 - decay) * value for name, value in sums.items()}
        trainer.smoothing = sums
    smoothed = GradientStats(**{name: np.asarray(value) for name, value in sums.items()})
    requested = float(request(smoothed))  # sequences per worker, before limits

    # Without a positive signal the request is a guess: its growth is limited to a multiple of the
    # size at the last positive signal.
    is_blind = smoothed.signal_sum <= 0
    if not is_blind or not trainer.measured_size:
        trainer.measured_size = now.total
    limit = batching.max_growth * now.total
    is_held = False  # whether the limit for blind growth is the lower one
    if is_blind and batching.max_blind_growth is not None:
        blind_limit = max(batching.max_blind_growth * trainer.measured_size, now.total)
        is_held = blind_limit < limit
        limit = min(limit, blind_limit)
    size = grown(now, requested, batching, inner, limit=limit, free_workers=free_workers)

    if not math.isfinite(requested):
        reason = "degenerate"
    elif is_blind:
        reason = "held" if is_held and size == now else "no_signal"
    elif size.total < now.num_workers * requested:
        reason = "capped"
    elif size == now:
        reason = "kept"
    elif size.total > now.total:
        reason = "grew"
    else:
        reason = "shrank"
    return Decision(size, reason, noise, signal, requested)
