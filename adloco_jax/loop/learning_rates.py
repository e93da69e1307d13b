"""The learning rate of inner updates: warm-up and schedule."""

import numpy as np

from adloco_jax.loop.control import Control, single_since
from adloco_jax.settings import Settings


def learning_rate(
    control: Control,
    settings: Settings,
    *,
    updates: int | np.ndarray,
    tokens: float | np.ndarray,
) -> np.ndarray:
    """The learning rate of inner updates; arguments that are arrays broadcast.

    Depends on the trainer's own count of updates, so neither a reset of the inner state nor a merge
    restarts a schedule. Where tokens end the run, a schedule depends on those of all trainers.

    Args:
      control: Tells since when only one trainer is left.
      settings: The run's settings.
      updates: The trainer's inner updates before each.
      tokens: Of all trainers together before each.

    Returns:
      Float64, of the shape to which the arguments broadcast.
    """
    inner = settings.inner
    warmup = np.minimum(1.0, (updates + 1) / max(inner.warmup_updates, 1))
    horizon = max(settings.num_rounds * inner.steps_per_round - inner.warmup_updates, 1)

    def progress(*, updates, tokens):
        by_updates = (updates - inner.warmup_updates) / horizon
        done = by_updates if settings.num_tokens is None else tokens / settings.num_tokens
        return np.clip(done, 0.0, 1.0)

    done = progress(updates=updates, tokens=tokens)
    since = single_since(control)
    left = max(1 - progress(**since), 1e-9) if since else 1.0  # of the run, then
    decay = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + np.cos(np.pi * done)) / 2,
        "linear_after_merge": (1 - done) / left if since else 1.0,
    }[inner.schedule]
    final = inner.final_lr_frac
    return inner.learning_rate * warmup * (final + (1 - final) * decay)
