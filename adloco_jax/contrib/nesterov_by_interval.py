"""Nesterov momentum as an outer optimizer, for rounds of unequal length."""

import math

import jax
import jax.numpy as jnp
import optax

from adloco_jax.core.outer import OUTER_OPTIMIZERS


def nesterov_by_interval(*, momentum: float) -> optax.GradientTransformationExtraArgs:
    """Make an outer optimizer with Nesterov momentum for rounds of unequal length.

    A base round has `inner.steps_per_round` updates at the full learning rate. A round that is as
    long as p base rounds, with pseudo-gradient D, changes the parameters and the momentum as p base
    rounds with pseudo-gradient D / p would. p > 0 need not be whole, because the change has a
    closed form. With momentum decay mu and momentum m it is

        n = (1 - mu^p) / (1 - mu)
        m <- mu^p m + n D / p
        update = D + mu (mu n m + (p - mu n) / (1 - mu) D / p),  with m before the round

    The update is subtracted from the parameters. For p = 1 this is plain Nesterov.

    Args:
      momentum: Decay of the momentum over a base round; mu above.

    Returns:
      A transformation whose `update` takes p as the keyword argument `interval`, a float32 scalar.
      Without this argument p is 1.

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
