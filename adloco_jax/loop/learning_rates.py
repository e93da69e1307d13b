"""The learning rate of inner updates: warm-up and schedule."""

import numpy as np

from adloco_jax.settings import Settings


def learning_rate(
    settings: Settings,
    *,
    updates: int | np.ndarray,
    tokens: float | np.ndarray,
) -> np.ndarray:
    """The learning rate of inner updates; arguments that are arrays broadcast.

    Depends on the trainer's own count of updates, so neither a reset of the inner state nor a merge
    restarts a schedule. Where tokens end the run, a schedule depends on those of all trainers.

    Args:
      settings: The run's settings.
      updates: The trainer's inner updates before each.
      tokens: Of all trainers together before each.

    Returns:
      Float64, of the shape to which the arguments broadcast.
    """
    inner = settings.inner
    warmup = np.minimum(1.0, (updates + 1) / max(inner.warmup_updates, 1))
    horizon = max(settings.num_rounds * inner.steps_per_round - inner.warmup_updates, 1)
    by_updates = (updates - inner.warmup_updates) / horizon
    by_tokens = settings.num_tokens is not None
    done = np.clip(tokens / settings.num_tokens if by_tokens else by_updates, 0.0, 1.0)
    decay = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + np.cos(np.pi * done)) / 2,
    }[inner.schedule]
    final = inner.final_lr_frac
    return inner.learning_rate * warmup * (final + (1 - final) * decay)
