"""Choose each trainer's batch size and round length: batch-size tests, limits, accumulation.

A batch-size test computes from gradient statistics the batch that a trainer requests: the smallest
batch whose gradient has little noise. The three tests here take the same arguments, except for
their thresholds. The tests use only ratios of the sums in `GradientStats`. They accept NumPy arrays
(float64 on the host, without a device) and JAX arrays (under `jit` and `vmap`). A run chooses a
test or a schedule by its name in the table `BATCH_TESTS`.
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
    """Compute the smallest batch per worker that passes the norm test.

    A batch passes if the noise of the averaged gradient is at most `eta` times the gradient's norm.

    Args:
      stats: Statistics at one common point, of at least two examples. The statistics of several
        workers must be combined by `core.gradstats.pool`.
      eta: Allowed ratio of the noise of the averaged gradient (root mean square) to the norm of the
        true gradient G (dimensionless, > 0).
      num_workers: Number of workers whose gradients are averaged. With `batching.scope=trainer` it
        is the number of the trainer's workers, with `worker` it is 1 (the paper's equation).
      mode: How |G|^2 is estimated. `unbiased` takes the unbiased estimate, raised to at least 1e-3
        of the noise. `paper` takes the value that the squared norm of the mean gradient would have
        on the trainer's own batch. This value includes noise, so the request never exceeds
        batch_size / eta^2, and growth stops by itself.
      batch_size: Only for `paper`: the trainer's present batch in sequences per worker. None: the
        tested examples are the whole batch.

    Returns:
      Requested sequences per worker, a float before rounding and limits; NaN if the statistics are
      degenerate (no noise and no signal).

    Raises:
      ValueError: If `mode` is unknown, or `eta` is not positive. A traced `eta` is not checked.

    Source: Byrd et al. 2012, eq. 3.9; AdLoCo eq. 10, which has no `num_workers`.
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
    """Compute the smallest batch per worker that passes the inner-product test.

    A batch passes if the noise along the gradient is small enough. The averaged gradient is then a
    descent direction with high probability.

    Args:
      stats: Statistics taken with inner products, of at least four examples per worker. With fewer
        examples the result is NaN.
      vartheta: Allowed ratio of the standard deviation of the inner product <averaged gradient, G>
        to |G|^2 (> 0), where G is the true gradient.
      num_workers: Number of workers whose gradients are averaged, as in `norm_test`.
      mode: `unbiased` or `paper`, as in `norm_test`. With `paper`, the variance is also computed in
        another way: as the sample variance of the inner products of each example's gradient with
        the mean gradient. This variance is biased low.
      batch_size: Only for `paper`: the trainer's present batch in sequences per worker. None: the
        tested examples are the whole batch.

    Returns:
      Requested sequences per worker, a float before rounding and limits.

    Raises:
      ValueError: If `mode` is unknown, `vartheta` is not positive, or `stats` was taken without
        inner products. While tracing, missing inner products cannot be detected; they make the
        result NaN, or 0 in mode `paper`.

    Source: Bollapragada et al. 2017, eq. 2.6; AdLoCo eq. 12. The paper's vartheta of 0.01 works
      only with the scaling errors of the reference code (docs/algorithm.md, section 2,
      "Constants").
    """
    _require_positive(vartheta=vartheta)
    signal = _signal(stats, mode, num_workers, batch_size)
    # Divide twice, because the square of a small signal would underflow.
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
    """Compute the smallest batch per worker that passes the augmented inner-product test.

    A batch passes if it passes the inner-product test and if the noise that is orthogonal to the
    gradient is small enough. In high dimension nearly all noise is orthogonal, so this test
    requests nearly the same batch as the norm test with eta = nu.

    Args:
      stats: Statistics taken with inner products, of at least four examples per worker. With fewer
        examples the result is NaN.
      vartheta: Allowed ratio of the standard deviation of the inner product <averaged gradient, G>
        to |G|^2 (> 0), where G is the true gradient.
      nu: Allowed ratio of the orthogonal noise (root mean square) to the norm of G (> 0).
      num_workers: Number of workers whose gradients are averaged, as in `norm_test`.
      mode: `unbiased` or `paper`, as in `norm_test`. With `paper`, the variance is also computed in
        another way: as the sample variance of the inner products of each example's gradient with
        the mean gradient. This variance is biased low.
      batch_size: Only for `paper`: the trainer's present batch in sequences per worker. None: the
        tested examples are the whole batch.

    Returns:
      Requested sequences per worker, a float before rounding and limits: the larger of the
      inner-product request and the request for the orthogonal noise.

    Raises:
      ValueError: If `mode` is unknown, `vartheta` or `nu` is not positive, or `stats` was taken
        without inner products.

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
    """Return `batch_size`, in sequences per worker: the constant batch of DiLoCo and LocalSGD."""
    return batch_size


def ramp(*, schedule: Sequence[tuple[int, int]], round_index: int) -> int:
    """Return the batch size of a round by a fixed schedule, a baseline for adaptive methods.

    Args:
      schedule: Pairs (first round, sequences per worker). The first pair begins at round 0, and the
        rounds increase from pair to pair.
      round_index: Number of rounds completed before this one.

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
    """An entry of `BATCH_TESTS`: a function that requests a batch, and the statistics it needs."""

    request: Callable[..., Scalar]
    """`request(stats, *, ...) -> sequences per worker`: the batch that a trainer requests, before
    rounding and limits. The function receives these keywords, and ignores the others by `**_`:
    `eta`, `vartheta`, `nu`, `num_workers` and `mode` as in `augmented_inner_product_test` and
    `norm_test`; `batch_size`, the present sequences per worker; `round_index`, the number of
    completed rounds; and `schedule`, the setting `batching.ramp`."""
    needs: Literal["norms", "inner_products", "nothing"] = "norms"
    """The statistics that `request` reads: only those from gradient norms, also those from inner
    products, or none. With "nothing", `stats` is None, and no limit is applied to the result."""


BATCH_TESTS: dict[str, BatchTest] = {
    "norm": BatchTest(
        lambda stats, *, eta, num_workers, mode, batch_size, **_: norm_test(
            stats, eta=eta, num_workers=num_workers, mode=mode, batch_size=batch_size
        )
    ),
    "inner_product": BatchTest(
        lambda stats, *, vartheta, num_workers, mode, batch_size, **_: inner_product_test(
            stats, vartheta=vartheta, num_workers=num_workers, mode=mode, batch_size=batch_size
        ),
        "inner_products",
    ),
    "augmented": BatchTest(
        lambda stats, *, vartheta, nu, num_workers, mode, batch_size, **_: (
            augmented_inner_product_test(
                stats,
                vartheta=vartheta,
                nu=nu,
                num_workers=num_workers,
                mode=mode,
                batch_size=batch_size,
            )
        ),
        "inner_products",
    ),
    "constant": BatchTest(lambda stats, *, batch_size, **_: batch_size, "nothing"),
    "ramp": BatchTest(
        lambda stats, *, schedule, round_index, **_: ramp(
            schedule=schedule, round_index=round_index
        ),
        "nothing",
    ),
}
"""Batch-size tests and schedules by name, for the knob `batching.test`. To use your own test, add
an entry."""


def next_batch_size(
    requested: float, *, batch_size: int, max_growth: float, batch_cap: int, monotone: bool = True
) -> int:
    """Compute the next batch size: round a test's request up, and limit its growth and its size.

    Args:
      requested: The result of a batch-size test, in sequences per worker. If it is not finite, the
        batch does not change.
      batch_size: The present requested batch, in sequences per worker.
      max_growth: Largest factor by which one test may enlarge the batch.
      batch_cap: Upper limit of the batch, in sequences per worker.
      monotone: Whether the batch may only grow. If False, it may also fall, but not below 1.

    Returns:
      Sequences per worker, a whole number in [1, max(batch_size, batch_cap)].

    Raises:
      ValueError: If `batch_size` or `batch_cap` is not a positive whole number.

    Source: docs/algorithm.md, section 2, "What a request changes". The reference code has no upper
      limit (defect 7 in section 7).
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

    By default a batch of up to `max_batch_size` sequences runs as it is. A larger batch, up to
    `multiplier` times this size, is clipped to `max_batch_size`, which keeps updates frequent. A
    still larger batch is divided into micro-batches whose gradients are accumulated.

    Args:
      requested_batch_size: Sequences per worker and update, >= 1.
      max_batch_size: Sequences per worker in one micro-batch, >= 1.
      multiplier: The multiple of `max_batch_size` above which a batch is accumulated (the paper's
        n), >= 1.
      mode: `threshold`: clip or accumulate as described above. `accumulate`: accumulate every batch
        above `max_batch_size`. `clip`: never accumulate.

    Returns:
      The micro-batch and the number of accumulation steps. Their product is at least the request,
      or `max_batch_size` if the batch is clipped.

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
        # By the identity S = V_ip / |mean|^2 + V_o, the measured plug-in sums are not both zero if
        # there is noise. So if these values are zero, inner products were not measured.
        if np.any((noise_sum != 0) & np.logical_and.reduce([value == 0 for value in sums])):
            raise ValueError(
                "stats: taken without inner products; for this test use"
                " gradient_stats(..., inner_products=True)"
            )
    if mode == "paper":
        return stats.plugin_ip_sum / stats.noise_weight
    return stats.ip_sum / stats.ip_weight


def _maximum(a, b):
    """Return the larger of two NumPy or JAX arrays without a branch, so that it can be traced."""
    return a.__array_namespace__().maximum(a, b)


def fixed(*, steps_per_round: int, **_: object) -> int:
    """Return `steps_per_round`, in inner steps: every round has the same length."""
    return steps_per_round


ROUND_LENGTHS: dict[str, Callable[..., float]] = {"fixed": fixed}
"""Rules for the length of a round by name, for the knob `inner.round_length`.

`rule(*, ...) -> steps` returns the number of inner steps of a trainer's next round. A rule receives
these keywords, and ignores the others by `**_`: `steps_per_round`, `max_steps_per_round` and
`warmup_updates`, settings of the config's group `inner`; `next_rate`, the learning rate of the
round's first update; `updates`, the trainer's inner updates so far; `round_index`, the number of
completed rounds; and `share_done`, the fraction of the run that is done.
"""
