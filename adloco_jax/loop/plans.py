"""Plan a round: the number of updates, the batch and the learning rate of each trainer.

An update of a worker is made from one micro-batch, or from the mean gradient of several
(accumulation). All trainers are named by their ids. A trainer's `streams` are the sequences of rows
that its workers read, one for each worker. T counts the micro-batches of a round.
"""

import math
from collections.abc import Iterable

import numpy as np

from adloco_jax.contrib import ROUND_LENGTHS
from adloco_jax.core.batching import BATCH_TESTS, switch_mode
from adloco_jax.core.gradstats import MIN_EXAMPLES, MIN_EXAMPLES_INNER_PRODUCT
from adloco_jax.loop.control import Control, RoundPlan
from adloco_jax.settings import BatchingSettings, Settings, SwitchSettings

AUTO_TEST_FRAC = 0.04  # share of a trainer's sequences in a round that its batch-size test uses
AUTO_TEST_MIN, AUTO_TEST_MAX = 8, 256  # least and largest number of sequences of that test


def is_over(control: Control, settings: Settings) -> bool:
    """Return whether the run has reached its limit of rounds or of tokens."""
    return settings.share_done(control.round, control.tokens_total) >= 1


def round_plans(
    control: Control, settings: Settings, trainers: Iterable[int] | None = None
) -> dict[int, RoundPlan]:
    """Return the sizes of the next round by trainer id, as in section 4.4 of AdLoCo.

    `trainers` are the ids of the trainers that will run; None: all.
    """
    if trainers is None:
        trainers = control.trainers
    plans = {}
    for m in trainers:
        micro_batch_size, num_accum_steps = _micro_batches(
            control, m, settings.batching, settings.switch
        )
        plans[m] = RoundPlan(
            micro_batch_size=micro_batch_size,
            num_accum_steps=num_accum_steps,
            num_updates=_round_steps(control, m, settings),
        )
    return plans


def _round_steps(control: Control, trainer_id: int, settings: Settings) -> int:
    """Return the updates of a trainer's next round.

    They are `steps_per_round` times the trainer's round length and the factor of the configured
    rule (in `ROUND_LENGTHS`), but no more than the run's limit of tokens leaves, and at least
    `steps_per_round`. They are at most `max_steps_per_round`.
    """
    inner = settings.inner
    trainer = control.trainers[trainer_id]
    rate = learning_rate(settings, updates=trainer.updates, tokens=control.tokens_total)
    rule = ROUND_LENGTHS[inner.round_length]
    wanted = rule(  # in updates
        steps_per_round=inner.steps_per_round,
        max_steps_per_round=inner.max_steps_per_round,
        warmup_updates=inner.warmup_updates,
        next_rate=float(rate),
        updates=trainer.updates,
        round_index=control.rounds_of(trainer_id),
        share_done=settings.share_done(control.rounds_of(trainer_id), control.tokens_total),
    )

    # All lengths below are in multiples of `steps_per_round`.
    left = math.inf  # the length after which the run has its tokens
    if math.isfinite(settings.last_token):  # infinite: the run has no limit of tokens
        sequences = 0  # that all workers together read for one update each
        for m, each in control.trainers.items():
            size, accum = _micro_batches(control, m, settings.batching, settings.switch)
            sequences += size * accum * len(each.streams)
        tokens = inner.steps_per_round * sequences * settings.data.sequence_length
        left = np.ceil((settings.last_token - control.tokens_total) / tokens)
    # `factor` and `length` are at least 1, even if fewer tokens are left. Add 1e-9, because a
    # rounding error in the quotient must not cost the round `steps_per_round` updates.
    factor = max(math.floor(min(wanted / inner.steps_per_round + 1e-9, left)), 1)
    length = max(int(min(trainer.round_length * factor, left)), 1)
    steps = inner.steps_per_round * length
    if inner.max_steps_per_round:
        steps = min(steps, inner.max_steps_per_round)
    return steps


def _micro_batches(
    control: Control, trainer: int, batching: BatchingSettings, switch: SwitchSettings
) -> tuple[int, int]:
    """Return the micro-batch size of a trainer's next round, and the micro-batches of an update.

    The size is rounded up to one of `batching.buckets`, so that few programs are compiled.
    """
    # A requested batch that is larger than fits on a device is clipped, or divided into several
    # micro-batches (the paper's switch mode).
    largest = control.max_batch_size
    size, accum = switch_mode(
        control.trainers[trainer].requested_batch_size,
        max_batch_size=largest,
        multiplier=switch.multiplier,
        mode=switch.mode,
    )
    # The largest that fits is allowed too: the buckets above the size may all exceed it.
    allowed = (*batching.buckets, largest)
    bucket = min(n for n in allowed if size <= n <= largest)
    return bucket, accum


def learning_rate(
    settings: Settings, *, updates: int | np.ndarray, tokens: float | np.ndarray
) -> np.ndarray:
    """Return the learning rate, float64, of inner updates; `updates` and `tokens` broadcast.

    `updates` counts the inner updates of a trainer before this one; warm-up follows them. `tokens`
    counts those of all trainers so far. The schedule after warm-up follows `updates` if the run has
    a limit of rounds, `tokens` if it has a limit of tokens; with both, the one that ends first.
    """
    inner = settings.inner
    # The 1 in both `max` is for settings without warm-up, or whose updates are all warm-up.
    warmup = np.minimum(1.0, (updates + 1) / max(inner.warmup_updates, 1))
    # The fraction of the schedule that is done. A limit that is not set is infinite.
    horizon = max(settings.last_round * inner.steps_per_round - inner.warmup_updates, 1)
    by_updates = (updates - inner.warmup_updates) / horizon
    by_tokens = tokens / settings.last_token
    done = np.clip(np.maximum(by_updates, by_tokens), 0.0, 1.0)
    # Where a curve is 1 the rate is the full one; where it is 0, the fraction `final` of it.
    curves = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}
    final = inner.final_lr_frac
    return inner.learning_rate * warmup * (final + (1 - final) * curves[inner.schedule])


def learning_rates(
    control: Control, trainer: int, plan: RoundPlan, settings: Settings, *, round_tokens: int
) -> np.ndarray:
    """Return the learning rate of each micro-batch's update, float32 [T].

    `round_tokens` are the tokens of all trainers in this round. For the schedule, each update of
    the round counts an equal part of them.
    """
    update_T = np.arange(plan.num_micro_batches) // plan.num_accum_steps  # position in the round
    rate_T = learning_rate(
        settings,
        updates=control.trainers[trainer].updates + update_T,
        tokens=control.tokens_total + update_T / plan.num_updates * round_tokens,
    )
    return rate_T.astype(np.float32)


def update_flags(plan: RoundPlan) -> np.ndarray:
    """Return for each micro-batch whether it is the last one of an update: bool [T]."""
    return (np.arange(plan.num_micro_batches) + 1) % plan.num_accum_steps == 0


def least_test_sequences(batching: BatchingSettings) -> int:
    """Return the smallest number of sequences per worker with which the batch-size test works."""
    needs = BATCH_TESTS[batching.test].needs
    return MIN_EXAMPLES_INNER_PRODUCT if needs == "inner_products" else MIN_EXAMPLES


def test_count(plan: RoundPlan, num_workers: int, batching: BatchingSettings) -> int:
    """Return on how many of its first sequences a worker measures gradients; 0 without a test.

    `plan` is that of the worker's trainer, which has `num_workers`. The setting `test_batch_size`
    is a number for all of them together; unset, it is a fraction of the round's sequences. The
    result is 0 also if the round has too few sequences for the test.
    """
    if BATCH_TESTS[batching.test].needs == "nothing":
        return 0
    least = least_test_sequences(batching)
    total = batching.test_batch_size  # of all workers of the trainer
    if total is None:
        fraction = math.ceil(AUTO_TEST_FRAC * plan.num_sequences * num_workers)
        total = min(max(fraction, AUTO_TEST_MIN), AUTO_TEST_MAX)
    # Each worker measures its part, but at least the fewest with which the test works.
    share = min(max(total // num_workers, least), plan.num_sequences)
    if share < least:  # the round is too short for the test
        return 0
    return share


def planned(control: Control, trainer_id: int, plan: RoundPlan, rate_T: np.ndarray) -> dict:
    """Return the fields of a trainer's ledger line that are known before its round is run.

    `control` is the host's data before the round; `rate_T` has the learning rate of each
    micro-batch. The last is written: the rate that the round has reached at its end.
    """
    trainer = control.trainers[trainer_id]
    return {
        "round": control.rounds_of(trainer_id) + 1,
        "trainer": trainer_id,
        "updates_before": trainer.updates,
        "workers": len(trainer.streams),
        "requested_batch_size": trainer.requested_batch_size,
        "steps_per_round": plan.num_updates,
        "micro_batch_size": plan.micro_batch_size,
        "num_accum_steps": plan.num_accum_steps,
        "learning_rate": float(rate_T[-1]),
    }
