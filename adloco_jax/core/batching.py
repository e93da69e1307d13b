"""Choose each trainer's batch size and round length: batch-size tests, limits, accumulation.

The noise of a gradient is the sum of its entries' variances over examples. The signal is |G|^2, the
squared norm of the true gradient G. A test requests the batch with which the noise of the mean
gradient is small enough beside the signal. g_j is the gradient of example j, <a, b> an inner
product. A plug-in estimate takes the mean gradient of the examples for G.

The tests read only ratios of the sums in `GradientStats`. They accept NumPy arrays (float64 on the
host, without a device) and JAX arrays (under `jit` and `vmap`).
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

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
    """Compute the smallest batch per worker whose noise is at most `eta` times the gradient.

    Args:
      stats: Statistics at one common point, of at least two examples; those of several workers
        combined by `core.gradstats.pool`.
      eta: Allowed ratio of the averaged gradient's noise (root mean square) to |G|, > 0.
      num_workers: Workers whose gradients are averaged; 1 in the paper's equation.
      mode: Estimate of |G|^2. `unbiased`: unbiased, but at least 1e-3 of the noise. `paper`: the
        estimated squared norm of the mean gradient on the trainer's own batch; it includes noise,
        so the request is at most batch_size / eta^2.
      batch_size: For `paper`: the present batch per worker. None: tested examples / num_workers.

    Returns:
      Requested sequences per worker, before rounding and limits; NaN if noise and signal are zero.

    Raises:
      ValueError: If `eta` is not positive, or `mode` is unknown.

    Source: Byrd et al. 2012, eq. 3.9; AdLoCo eq. 10, which has no `num_workers`.
    """
    _require_positive("eta", eta)
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
    """Compute the smallest batch per worker that is likely to give a descent direction.

    Args:
      stats: Statistics with inner products, of at least four examples per worker; with fewer, mode
        `unbiased` gives NaN.
      vartheta: Allowed ratio of the standard deviation of <averaged gradient, G> to |G|^2, > 0.
      num_workers: Workers whose gradients are averaged; 1 in the paper's equation.
      mode: Estimates of |G|^2 and of the variance of <g_j, G>. `unbiased`: |G|^2 unbiased, but at
        least 1e-3 of the noise; the variance from independent thirds of the examples. `paper`: the
        squared norm of the mean gradient on the trainer's own batch, which includes noise; the
        sample variance of <g_j, mean gradient>, biased low.
      batch_size: For `paper`: the present batch per worker. None: tested examples / num_workers.

    Returns:
      Requested sequences per worker, before rounding and limits.

    Raises:
      ValueError: If `vartheta` is not positive, `mode` is unknown, or `stats` has no inner
        products. While tracing the last is not refused, but gives NaN, or 0 in mode `paper`.

    Source: Bollapragada et al. 2017, eq. 2.6; AdLoCo eq. 12. The paper's vartheta of 0.01 works
      only with the scaling errors of the reference code (docs/algorithm.md, section 2).
    """
    _require_positive("vartheta", vartheta)
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
    """Compute the smallest batch that passes `inner_product_test` and bounds the orthogonal noise.

    In high dimension nearly all noise is orthogonal to the gradient, so the request is nearly that
    of the norm test with eta = nu.

    Args:
      stats: Statistics with inner products, of at least four examples per worker; with fewer, mode
        `unbiased` gives NaN.
      vartheta: Allowed ratio of the standard deviation of <averaged gradient, G> to |G|^2, > 0.
      nu: Allowed ratio of the orthogonal noise (root mean square) to |G|, > 0.
      num_workers: Workers whose gradients are averaged; 1 in the paper's equation.
      mode: Estimates of |G|^2 and of the variances: `unbiased` from independent thirds of the
        examples, or the biased ones of the `paper`, with the mean gradient for G.
      batch_size: For `paper`: the present batch per worker. None: tested examples / num_workers.

    Returns:
      Requested sequences per worker, before rounding and limits: the larger of both requests.

    Raises:
      ValueError: If `vartheta` or `nu` is not positive, `mode` is unknown, or `stats` has no inner
        products. While tracing the last is not refused.

    Source: Bollapragada et al. 2017, eq. 3.3; AdLoCo eq. 13.
    """
    _require_positive("nu", nu)
    signal = _signal(stats, mode, num_workers, batch_size)
    # The noise that is orthogonal to the gradient: all noise but that along the gradient.
    if mode == "paper":
        orthogonal = stats.plugin_orth_sum / stats.noise_weight
    else:
        orthogonal = stats.noise_sum / stats.noise_weight - _ip_variance(stats, mode) / signal

    inner_product = inner_product_test(
        stats, vartheta=vartheta, num_workers=num_workers, mode=mode, batch_size=batch_size
    )
    orthogonal_request = orthogonal / (num_workers * nu**2 * signal)
    return _maximum(inner_product, orthogonal_request)


def _require_positive(name: str, threshold: float) -> None:
    """Raise ValueError if a number is not positive; traced arrays are not checked."""
    # `not threshold > 0` is also true of NaN.
    if isinstance(threshold, int | float) and not threshold > 0:
        raise ValueError(f"{name}={threshold} must be positive.")


def constant(*, batch_size: int) -> int:
    """Return `batch_size`, in sequences per worker: the constant batch of DiLoCo and LocalSGD."""
    return batch_size


def ramp(*, schedule: Sequence[tuple[int, int]], round_index: int) -> int:
    """Return the sequences per worker that a schedule gives for a round, counted from 0.

    Entries are (first round, sequences per worker); an entry holds until the next one's first
    round. Raises ValueError unless first rounds start at 0 and increase.
    """
    rounds = [first for first, _ in schedule]
    is_increasing = sorted(set(rounds)) == rounds
    if not rounds or rounds[0] != 0 or not is_increasing:
        raise ValueError(f"schedule: rounds {rounds}, expected increasing whole numbers from 0")
    # The last entry whose first round is not later than this one.
    return next(size for first, size in reversed(schedule) if first <= round_index)


class BatchTest(NamedTuple):
    """An entry of `BATCH_TESTS`: a function that requests a batch, and the statistics it needs."""

    request: Callable[..., Scalar]
    """`request(stats, *, ...) -> sequences per worker`, before rounding and limits.

    It is called with the keywords `eta`, `vartheta`, `nu`, `num_workers`, `mode` and `batch_size`
    (as in the tests above), `round_index` (completed rounds) and `schedule` (as in `ramp`). It
    names those that it uses, and takes all others as `**_`.
    """
    needs: Literal["norms", "inner_products", "nothing"] = "norms"
    """What `request` reads. With "nothing", `stats` is None and the result is not limited."""


# The functions of the table, each a `BatchTest.request`. All are called with the same keywords; one
# names those that its test needs, and ignores the others (`**_`).


def _request_norm(
    stats: GradientStats,
    *,
    eta: float,
    num_workers: int,
    mode: TestMode,
    batch_size: int,
    **_: object,
) -> Scalar:
    """Request a batch by the norm test."""
    return norm_test(stats, eta=eta, num_workers=num_workers, mode=mode, batch_size=batch_size)


def _request_inner_product(
    stats: GradientStats,
    *,
    vartheta: float,
    num_workers: int,
    mode: TestMode,
    batch_size: int,
    **_: object,
) -> Scalar:
    """Request a batch by the inner-product test."""
    return inner_product_test(
        stats, vartheta=vartheta, num_workers=num_workers, mode=mode, batch_size=batch_size
    )


def _request_augmented(
    stats: GradientStats,
    *,
    vartheta: float,
    nu: float,
    num_workers: int,
    mode: TestMode,
    batch_size: int,
    **_: object,
) -> Scalar:
    """Request a batch by the augmented inner-product test."""
    return augmented_inner_product_test(
        stats, vartheta=vartheta, nu=nu, num_workers=num_workers, mode=mode, batch_size=batch_size
    )


def _request_constant(stats: None, *, batch_size: int, **_: object) -> int:
    """Request the present batch again."""
    return constant(batch_size=batch_size)


def _request_ramp(
    stats: None, *, schedule: Sequence[tuple[int, int]], round_index: int, **_: object
) -> int:
    """Request the batch that a schedule gives for the round."""
    return ramp(schedule=schedule, round_index=round_index)


BATCH_TESTS: dict[str, BatchTest] = {
    "norm": BatchTest(_request_norm, "norms"),
    "inner_product": BatchTest(_request_inner_product, "inner_products"),
    "augmented": BatchTest(_request_augmented, "inner_products"),
    "constant": BatchTest(_request_constant, "nothing"),
    "ramp": BatchTest(_request_ramp, "nothing"),
}
"""Batch-size tests and schedules by name, for `batching.test`; add an entry for your own."""


def next_batch_size(requested: float, *, batch_size: int, max_growth: float, batch_cap: int) -> int:
    """Round a test's request up, and limit its growth and its size, in sequences per worker.

    `requested` is what a test asks for, `batch_size` the present batch. The result is at most
    `max_growth` times `batch_size`, and at most `batch_cap`, but never below `batch_size`. A
    request that is not finite changes nothing.

    Raises ValueError if `batch_size` or `batch_cap` is not a positive whole number.

    Source: docs/algorithm.md, section 2. The reference code has no upper limit
      (studies/published.md, defect 7).
    """
    batch_size = _positive_whole("batch_size", batch_size)
    batch_cap = _positive_whole("batch_cap", batch_cap)
    if not math.isfinite(requested):
        return batch_size
    largest = min(int(max_growth * batch_size), batch_cap)
    largest = max(batch_size, largest)  # the present batch may exceed the cap
    return min(max(math.ceil(requested), batch_size), largest)


def switch_mode(
    requested_batch_size: int,
    *,
    max_batch_size: int,
    multiplier: int = 2,
    mode: Literal["threshold", "accumulate", "clip"] = "threshold",
) -> BatchPlan:
    """Choose the micro-batch and the number of accumulation steps for a requested batch.

    With `threshold`, a batch of up to `multiplier` (the paper's n) times `max_batch_size` is
    clipped to `max_batch_size`, which keeps updates frequent, and a larger one is accumulated.
    `accumulate` accumulates every batch above `max_batch_size`, `clip` none. The plan's product is
    at least the request, unless it is clipped. Sizes are in sequences per worker.

    Raises ValueError if a size or `multiplier` is not a positive whole number.

    Source: AdLoCo section 4.4.
    """
    requested_batch_size = _positive_whole("requested_batch_size", requested_batch_size)
    max_batch_size = _positive_whole("max_batch_size", max_batch_size)
    multiplier = _positive_whole("multiplier", multiplier)
    if requested_batch_size <= max_batch_size:
        return BatchPlan(requested_batch_size, num_accum_steps=1)
    # A request is clipped up to this multiple of `max_batch_size`, and accumulated above it.
    multiples = {"threshold": multiplier, "accumulate": 1, "clip": math.inf}
    if requested_batch_size <= multiples[mode] * max_batch_size:
        return BatchPlan(max_batch_size, num_accum_steps=1)
    num_accum_steps = -(-requested_batch_size // max_batch_size)  # rounded up
    return BatchPlan(max_batch_size, num_accum_steps)


def _positive_whole(name: str, value: int | np.integer) -> int:
    """Return a positive whole number of any integer type as int, else raise ValueError.

    `name` is the argument's, for the message.
    """
    if not hasattr(value, "__index__") or value < 1:
        raise ValueError(
            f"{name}={value!r}: expected a positive whole number; round it first, see"
            " next_batch_size"
        )
    return operator.index(value)


def _signal(
    stats: GradientStats, mode: TestMode, num_workers: int, batch_size: int | None
) -> Scalar:
    """Estimate |G|^2, the squared norm of the true gradient, in units of `stats.scale`.

    `unbiased`: unbiased, but at least 1e-3 of the noise. `paper`: the squared norm of the mean
    gradient on the trainer's own batch, which includes noise; this batch has `batch_size` examples
    for each of `num_workers`, or, if None, the tested ones. Raises ValueError for another mode.
    """
    noise = stats.noise_sum / stats.noise_weight
    signal = stats.signal_sum / stats.signal_weight
    if mode == "unbiased":
        return _maximum(signal, SIGNAL_FLOOR * noise)
    if mode == "paper":
        batch = stats.num_examples if batch_size is None else batch_size * num_workers
        zero = 0.0 * signal  # of the same type and shape
        # The mean gradient of a batch has the squared norm |G|^2 + noise / batch.
        return _maximum(signal, zero) + noise / batch
    raise ValueError(f"mode={mode!r}: expected unbiased or paper")


def _ip_variance(stats: GradientStats, mode: TestMode) -> Scalar:
    """Estimate the variance over examples of <g_j, G>, in units of the square of `stats.scale`.

    `paper` is the plug-in estimate; `unbiased` takes means of independent thirds of the examples.
    Raises ValueError if inner products were not measured, unless `stats` are traced.
    """
    fields = (stats.ip_weight, stats.plugin_ip_sum, stats.plugin_orth_sum, stats.noise_sum)
    if not any(isinstance(field, jax.core.Tracer) for field in fields):
        # The plug-in sums are the noise along the mean gradient and across it. They are both zero
        # although there is noise only if inner products were not measured.
        has_noise = np.asarray(stats.noise_sum) != 0
        lacks_weight = np.asarray(stats.ip_weight) == 0
        lacks_plugin_ip = np.asarray(stats.plugin_ip_sum) == 0
        lacks_plugin_orth = np.asarray(stats.plugin_orth_sum) == 0
        if np.any(has_noise & lacks_weight & lacks_plugin_ip & lacks_plugin_orth):
            raise ValueError(
                "stats: taken without inner products; for this test use"
                " gradient_stats(..., inner_products=True)"
            )
    if mode == "paper":
        return stats.plugin_ip_sum / stats.noise_weight
    return stats.ip_sum / stats.ip_weight


def _maximum(a: Any, b: Any) -> Any:
    """Return the larger of two NumPy or JAX numbers, by the library of the first."""
    # `max` would branch on the values, which is impossible while tracing.
    return a.__array_namespace__().maximum(a, b)


def fixed(*, steps_per_round: int, **_: object) -> int:
    """Give every round the same length: return `steps_per_round`, in inner steps.

    A rule in `ROUND_LENGTHS` is called with more keywords, which this one ignores (`**_`).
    """
    return steps_per_round


ROUND_LENGTHS: dict[str, Callable[..., float]] = {"fixed": fixed}
"""Rules for the length of a round by name, for the option `inner.round_length`.

`rule(*, ...) -> steps` returns the inner steps of a trainer's next round. It is called with the
keywords `steps_per_round`, `max_steps_per_round`, `warmup_updates` (config group `inner`),
`next_rate` (learning rate of the round's first update), `updates` (the trainer's inner updates so
far), `round_index` (completed rounds) and `share_done` (fraction of the run). It names those that
it uses, and takes all others as `**_`.
"""
