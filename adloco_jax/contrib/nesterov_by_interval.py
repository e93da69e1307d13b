"""Nesterov momentum as an outer optimizer, for rounds of unequal length."""

import math

import jax
import jax.numpy as jnp
import optax

from adloco_jax.core.outer import OUTER_OPTIMIZERS


def nesterov_by_interval(*, momentum: float) -> optax.GradientTransformationExtraArgs:
    """Make an outer optimizer with Nesterov momentum for rounds of unequal length.

    A round as long as p base rounds (`steps_per_round` updates at the full learning rate), with
    pseudo-gradient D, has the effect of p base rounds with D / p. With momentum decay mu and
    momentum m before the round, for any p > 0:

        n = (1 - mu^p) / (1 - mu)
        m <- mu^p m + n D / p
        update = D + mu (mu n m + (p - mu n) / (1 - mu) D / p)

    For p = 1 this is plain Nesterov. `update` takes p as the keyword `interval`, float32 [], 1 by
    default.

    Source: AutoLoCo (arXiv 2609.36662, known only from citations) uses D / p and mu^p. The step of
      p base rounds and its closed form are derived here.
    """
    mu = momentum
    log_mu = math.log(mu) if mu > 0 else -math.inf  # float64: its errors are divided by 1 - mu

    def init(params):
        return optax.TraceState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None, *, interval=1.0, **_):
        p = jnp.maximum(interval, 1e-6)  # p is 0 if the learning rate is 0 in the whole round
        kept = mu**p
        n = -jnp.expm1(p * log_mu) / (1 - mu)  # sum of mu^k, k from 0 to p - 1
        moved = 1 + mu * (p - mu * n) / (1 - mu) / p

        def step(grad, momentum):
            return -(moved * grad + mu * mu * n * momentum)

        trace = jax.tree.map(lambda m, grad: kept * m + n / p * grad, state.trace, updates)
        return jax.tree.map(step, updates, state.trace), optax.TraceState(trace)

    return optax.GradientTransformationExtraArgs(init, update)


OUTER_OPTIMIZERS["nesterov_by_interval"] = nesterov_by_interval
