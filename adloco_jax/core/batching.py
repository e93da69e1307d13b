"""Choose each trainer's batch size and round length: batch-size tests, caps, switch mode.

The three batch-size tests are functions of `GradientStats` with the same signature. The tests use
only ratios of the sums in these statistics. They accept NumPy arrays (float64 on the host, without
a device) and JAX arrays (under `jit` and `vmap`). A run chooses a test or a schedule by its name in
the table `BATCH_TESTS`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from adloco_jax.core.types import BatchPlan, GradientStats

TestMode = Literal["unbiased", "paper"]
Scalar: TypeAlias = Float[Array, "..."] | Float[np.ndarray, "..."] | np.floating | float

SIGNAL_FLOOR = 1e-3  # lower bound of the estimated |G|^2, as a fraction of the noise


def norm_test(
    stats: GradientStats,
    *,
    eta: float,
    num_workers: int = 1,
    mode: TestMode = "unbiased",
    batch_size: int | None = None,
) -> Scalar:
    """Smallest batch per worker whose gradient noise passes the norm test.

    Args:
      stats: Statistics at one common point, of at least two examples; pooled over the trainer's
        workers if there are several.
      eta: Allowed ratio of the noise of the averaged gradient to its norm (dimensionless, > 0).
      num_workers: Workers whose gradients are averaged: all workers of the trainer with scope
        `trainer`, 1 with scope `worker` (the paper's equation).
      mode: `unbiased` divides by the unbiased |G|^2, which is at least 1e-3 of the noise. `paper`
        divides by the value that the plug-in |mean|^2 would have on the trainer's own batch, so the
        request never exceeds batch_size / eta^2 and growth stops by itself.
      batch_size: Only for `paper`: the trainer's present batch in sequences per worker. None means
        that the tested examples are the whole batch.

    Returns:
      Requested sequences per worker, a float before rounding and limits; NaN if the statistics are
      degenerate (no noise and no signal).

    Raises:
      ValueError: If `mode` is unknown, or `eta` is a number that is not positive.

    Source: Byrd et al. 2012, eq. 3.9; AdLoCo eq. 10 (without `num_workers`).
    """
    _require_positive(eta=eta)
    noise = stats.noise_sum / stats.noise_weight
    return noise / (num_workers * eta**2 * _signal(stats, mode, num_workers, batch_size))


def inner_product_test(
    stats: GradientStats,
    *,
    vartheta: float,
    num_workers: int = 1,
    mode: TestMode = "unbiased",
    batch_size: int | None = None,
) -> Scalar:
    """Smallest batch per worker that passes the inner-product test.

    In such a batch the averaged gradient is a descent direction with high probability.

    Args:
      stats: Statistics taken with inner products, of at least four examples per worker. With fewer
        examples the result is NaN.
      vartheta: Allowed ratio of the standard deviation of <mean, G> to |G|^2 (> 0).
      num_workers: Workers whose gradients are averaged, as in `norm_test`.
      mode: `unbiased` or `paper`, as in `norm_test`. `paper` also uses the plug-in variance of the
        inner products, which is biased low.
      batch_size: Only for `paper`: the trainer's present batch in sequences per worker. None means
        that the tested examples are the whole batch.

    Returns:
      Requested sequences per worker, a float before rounding and limits.

    Raises:
      ValueError: If `mode` is unknown, `vartheta` is a number that is not positive, or `stats` was
        taken without inner products. Missing inner products cannot be detected while tracing; the
        result is then NaN, or 0 in mode `paper`.

    Source: Bollapragada et al. 2017, eq. 2.6; AdLoCo eq. 12. The paper's vartheta of 0.01 only
      works with the reference's scaling errors (docs/algorithm.md, 2, "Constants").
    """
    _require_positive(vartheta=vartheta)
    signal = _signal(stats, mode, num_workers, batch_size)
    # Divide twice, because the square of the signal would underflow.
    return _ip_variance(stats, mode) / signal / signal / (num_workers * vartheta**2)


def augmented_inner_product_test(
    stats: GradientStats,
    *,
    vartheta: float,
    nu: float,
    num_workers: int = 1,
    mode: TestMode = "unbiased",
    batch_size: int | None = None,
) -> Scalar:
    """Smallest batch per worker that passes the augmented inner-product test.

    This test adds to the inner-product test a bound on the noise orthogonal to the gradient. In
    high dimension nearly all noise is orthogonal, and the test is close to the norm test with
    eta = nu.

    Args:
      stats: Statistics taken with inner products, of at least four examples per worker. With fewer
        examples the result is NaN.
      vartheta: Allowed ratio of the standard deviation of <mean, G> to |G|^2 (> 0).
      nu: Allowed ratio of the orthogonal noise to the norm of the gradient (> 0).
      num_workers: Workers whose gradients are averaged, as in `norm_test`.
      mode: `unbiased` or `paper`, as in `norm_test`. `paper` also uses the plug-in variance of the
        inner products, which is biased low.
      batch_size: Only for `paper`: the trainer's present batch in sequences per worker. None means
        that the tested examples are the whole batch.

    Returns:
      Requested sequences per worker, a float before rounding and limits: the larger of the
      inner-product request and the request for the orthogonal noise.

    Raises:
      ValueError: If `mode` is unknown, a threshold is a number that is not positive, or `stats` was
        taken without inner products.

    Source: Bollapragada et al. 2017, eq. 3.3; AdLoCo eq. 13.
    """
    _require_positive(nu=nu)
    signal = _signal(stats, mode, num_workers, batch_size)
    if mode == "paper":
        orthogonal = stats.plugin_orth_sum / stats.noise_weight
    else:
        orthogonal = stats.noise_sum / stats.noise_weight - _ip_variance(stats, mode) / signal
    inner_product = inner_product_test(
        stats, vartheta=vartheta, num_workers=num_workers, mode=mode, batch_size=batch_size
    )
    return _maximum(inner_product, orthogonal / (num_workers * nu**2 * signal))


def _require_positive(**thresholds: float) -> None:
    """Raise ValueError if a threshold is not positive; traced arrays are not checked."""
    for name, value in thresholds.items():
        if isinstance(value, int | float) and not value > 0:
            raise ValueError(f"{name}={value} must be positive.")


def constant(*, batch_size: int) -> int:
    """The rule for a constant batch, as in DiLoCo and LocalSGD, in sequences per worker."""
    return batch_size


def ramp(*, schedule: Sequence[tuple[int, int]], round_index: int) -> int:
    """A fixed schedule of batch sizes, the baseline for adaptive methods.

    Args:
      schedule: Pairs (first round, sequences per worker), rounds increasing from 0.
      round_index: Rounds completed.

    Returns:
      Sequences per worker, from the last pair whose first round is at most `round_index`.

    Raises:
      ValueError: If the schedule does not start at round 0 or does not increase.
    """
    rounds = [first for first, _ in schedule]
    if not rounds or rounds[0] != 0 or sorted(set(rounds)) != rounds:
        raise ValueError(f"schedule: rounds {rounds}, expected increasing whole numbers from 0")
    return next(size for first, size in reversed(schedule) if first <= round_index)


class BatchTest(NamedTuple):
    """An entry of `BATCH_TESTS`: a function that computes a trainer's request for a batch."""

    request: Callable[..., Scalar]
    """`request(stats, *, ...) -> sequences per worker`, before rounding and caps. The function
    receives the keywords that its signature names: `num_workers` and `mode` as in `norm_test`;
    `batch_size`, the present sequences per worker; `round_index`, the number of completed rounds;
    and any key of the config's group `batching`, such as `eta`."""
    needs: Literal["norms", "inner_products", "nothing"] = "norms"
    """The statistics that `request` reads. With "nothing" `stats` is None, and the result is used
    without the growth limit and the cap."""


BATCH_TESTS: dict[str, BatchTest] = {
    "norm": BatchTest(norm_test),
    "inner_product": BatchTest(inner_product_test, "inner_products"),
    "augmented": BatchTest(augmented_inner_product_test, "inner_products"),
    "constant": BatchTest(lambda stats, *, batch_size: constant(batch_size=batch_size), "nothing"),
    "ramp": BatchTest(
        lambda stats, *, ramp, round_index: _ramp(schedule=ramp, round_index=round_index), "nothing"
    ),
}
"""Batch-size tests and schedules by name, for the knob `batching.test`. To use your own test, add
an entry."""

_ramp = ramp  # the knob has the same name


def next_batch_size(
    requested: float, *, batch_size: int, max_growth: float, batch_cap: int, monotone: bool = True
) -> int:
    """The next batch size: a test's request after rounding, growth limit and cap.

    Args:
      requested: The result of a test. If it is not finite, the batch does not change.
      batch_size: The present requested batch, in sequences per worker.
      max_growth: Largest factor by which one test may enlarge the batch.
      batch_cap: Upper limit of the batch, in sequences per worker.
      monotone: Whether the batch may only grow; otherwise it may fall to 1.

    Returns:
      A whole number in [1, max(batch_size, batch_cap)].

    Raises:
      ValueError: If `batch_size` or `batch_cap` is not a positive whole number.

    Source: docs/algorithm.md, 2, "Then, always"; the reference has no cap (section 7, defect 7).
    """
    batch_size = _whole("batch_size", batch_size)
    batch_cap = _whole("batch_cap", batch_cap)
    if not math.isfinite(requested):
        return batch_size
    low = batch_size if monotone else 1
    high = max(low, min(int(max_growth * batch_size), batch_cap))
    return min(max(math.ceil(requested), low), high)


def switch_mode(
    requested_batch_size: int,
    *,
    max_batch_size: int,
    multiplier: int = 2,
    mode: Literal["threshold", "accumulate", "clip"] = "threshold",
) -> BatchPlan:
    """Choose the micro-batch and the number of accumulation steps for a requested batch.

    A batch above `max_batch_size`, up to `multiplier` times this size, is clipped to
    `max_batch_size`; this keeps updates frequent. A still larger batch is run with gradient
    accumulation.

    Args:
      requested_batch_size: Sequences per worker and update, >= 1.
      max_batch_size: Sequences per worker in one micro-batch, >= 1.
      multiplier: The paper's n, >= 1.
      mode: `threshold`: as described above. `accumulate`: accumulate every batch above
        `max_batch_size`. `clip`: never accumulate.

    Returns:
      The micro-batch and the number of accumulation steps. Their product covers the request, or is
      `max_batch_size` if the batch is clipped.

    Raises:
      ValueError: If a number is not positive or not whole, or `mode` is unknown.

    Source: AdLoCo section 4.4.
    """
    requested_batch_size = _whole("requested_batch_size", requested_batch_size)
    max_batch_size = _whole("max_batch_size", max_batch_size)
    multiplier = _whole("multiplier", multiplier)
    if mode not in ("threshold", "accumulate", "clip"):
        raise ValueError(f"mode={mode!r}: expected threshold, accumulate or clip")
    if requested_batch_size <= max_batch_size:
        return BatchPlan(requested_batch_size, 1)
    clipped = requested_batch_size <= multiplier * max_batch_size and mode == "threshold"
    if clipped or mode == "clip":
        return BatchPlan(max_batch_size, 1)
    return BatchPlan(max_batch_size, -(-requested_batch_size // max_batch_size))


def _whole(name: str, value) -> int:
    if not hasattr(value, "__index__") or value < 1:
        raise ValueError(
            f"{name}={value!r}: expected a positive whole number; round it first, see"
            " next_batch_size"
        )
    return operator.index(value)


def _signal(stats: GradientStats, mode: TestMode, num_workers: int, batch_size: int | None):
    noise = stats.noise_sum / stats.noise_weight
    signal = stats.signal_sum / stats.signal_weight
    if mode == "unbiased":
        return _maximum(signal, SIGNAL_FLOOR * noise)
    if mode == "paper":
        batch = stats.num_examples if batch_size is None else batch_size * num_workers
        return _maximum(signal, 0.0 * signal) + noise / batch
    raise ValueError(f"mode={mode!r}: expected unbiased or paper")


def _ip_variance(stats: GradientStats, mode: TestMode):
    products = (stats.ip_weight, stats.plugin_ip_sum, stats.plugin_orth_sum, stats.noise_sum)
    if not any(isinstance(field, jax.core.Tracer) for field in products):
        *sums, noise_sum = (np.asarray(field) for field in products)
        # Measured plug-in sums add up to the noise, so both are zero only if they were not
        # measured.
        if np.any((noise_sum != 0) & np.logical_and.reduce([value == 0 for value in sums])):
            raise ValueError(
                "stats: taken without inner products; for this test use"
                " gradient_stats(..., inner_products=True)"
            )
    if mode == "paper":
        return stats.plugin_ip_sum / stats.noise_weight
    return stats.ip_sum / stats.ip_weight


def _maximum(a, b):
    """The larger of two NumPy or JAX arrays, without a branch, so that it can be traced."""
    return a.__array_namespace__().maximum(a, b)


def fixed(*, steps_per_round: int) -> int:
    """The rule for rounds of constant length: every round has `steps_per_round` inner steps."""
    return steps_per_round


ROUND_LENGTHS: dict[str, Callable[..., float]] = {"fixed": fixed}
"""Rules by name, for the knob `inner.round_length`.

`rule(*, ...) -> steps` returns the number of inner steps of a trainer's next round. A rule receives
the keywords that its signature names: `next_rate`, the learning rate of the round's first update;
`updates`, the trainer's inner updates so far; `round_index`, the number of completed rounds;
`share_done`, the fraction of the run that is done; and any key of the config's group `inner`, such
as `steps_per_round`.
"""
