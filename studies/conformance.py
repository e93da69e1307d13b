"""The rows of studies/conformance.md: numbers of others, and the numbers of this code.

`python -m studies.conformance` prints the table. `make conformance` installs drjax, which one row
needs, and checks that the page has the computed rows.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from adloco_jax import init, inner_steps, outer_step, start_round
from adloco_jax.contrib.streaming import fragment_steps
from studies.conformance_clusters import measured, scaling_table, streaming_table, wall_clock
from studies.conformance_training import order, shakespeare
from studies.published import TORCHFT, Row

COLUMNS = ("name", "case", "published", "here", "difference")

# --- Golden trajectories


def torchft() -> list[Row]:
    """A row of the first fragment's last weight in every case."""
    theirs = [fragments[0][-1] for fragments in TORCHFT.values()]
    shown = (", ".join(f"{w:g}" for w in last) for last in (theirs, map(_torchft, TORCHFT)))
    return [Row("delay 0 and 1, alpha 0, 0.5 and 1", *shown, "none")]


def _torchft(case: tuple[int, float]) -> float:
    """A run of two workers; the loss function outputs the parameters before every inner step."""
    delay, alpha = case
    rates = {"inner_tx": optax.sgd(1.0), "outer_tx": optax.sgd(2.0)}
    ensemble = init({"w": jnp.ones(2)}, num_trainers=1, num_workers=2, own_params=True, **rates)

    def loss_fn(params, batch):
        return 2 * jnp.sum(params["w"]) * jnp.mean(batch), params["w"]

    steps = functools.partial(
        inner_steps, loss_fn=loss_fn, inner_tx=rates["inner_tx"], has_aux=True
    )

    @jax.jit
    def turn(ensemble, workers, fragment):
        how = {"num_fragments": 2, "delay": delay, "mixing": alpha, "outer_tx": rates["outer_tx"]}
        batch_TRB = (jnp.ones((3, 2, 1)),)
        return fragment_steps(ensemble, workers, batch_TRB, fragment, steps=steps, **how)

    workers, seen = start_round(ensemble), []
    for index in range(6):
        ensemble, workers, (_, _, before_TR), _ = turn(ensemble, workers, index % 2)
        seen += [*np.asarray(before_TR)]
    theirs = np.transpose(TORCHFT[case])
    ours = np.stack(seen)[: len(theirs)]  # both weights of each worker
    assert np.array_equal(ours, np.stack([theirs, theirs], axis=1))
    return float(ours[-1, 0, 0])


# --- The algebra of other optimizers: a small neural network, 20 rounds

ROUNDS, STEPS, BATCH = 20, 5, 8
TOLERANCE = 1e-6
ADAMW = optax.adamw(0.003, weight_decay=0.1)


def _draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"in": _draw(3, 8, seed=0) / 2, "bias": np.zeros(8, np.float32)}
PARAMS |= {"out": _draw(8, 2, seed=1) / 3}


def _loss(params: dict, batch: dict) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"][None])
    return jnp.mean(jnp.square(hidden @ params["out"] - batch["y"]))


def _batches(*shape: int) -> dict:
    """Inputs and noisy targets that a neural network of this kind could compute."""
    x = _draw(*shape, 3, seed=2)
    return {"x": x, "y": np.sin(x[..., :2]) + _draw(*shape, 2, seed=3) / 10}


def _scanned(one: Callable, carry, batch: dict):
    """The outputs of `one(carry, batch of a round)` in all rounds."""
    return jax.jit(lambda: lax.scan(one, carry, batch)[1])()


def _alone(tx: optax.GradientTransformation, start, state, batches, *, at=lambda params: params):
    """(parameters, state) after one update with each batch; gradients are taken at `at`."""

    def step(carry, batch):
        params, state = carry
        updates, state = tx.update(jax.grad(_loss)(at(params), batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (start, state), batches)[0]


def _ours(batch: dict, inner_tx, outer_tx) -> dict:
    """Parameters of one trainer after every round; `batch` is [rounds, S, R, B, ...]."""
    num_workers = batch["x"].shape[2]
    how = {"inner_tx": inner_tx, "outer_tx": outer_tx}
    ensemble = init(PARAMS, num_trainers=1, num_workers=num_workers, **how)
    step = functools.partial(outer_step, loss_fn=_loss, **how)

    def one(ensemble, batch):
        ensemble, _ = step(ensemble, batch)
        return ensemble, jax.tree.map(lambda leaf: leaf[0], ensemble.params_M)

    return _scanned(one, ensemble, batch)


def _theirs(tx: optax.GradientTransformation, start, batch: dict, **how):
    """Parameters after every round of the other optimizer, on the batches of all workers."""

    def one(carry, batch_SB):
        carry = _alone(tx, *carry, batch_SB, **how)
        return carry, carry[0]

    union = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:2], -1, leaf.shape[-1]), batch)
    return _scanned(one, (start, tx.init(start)), union)


def _compared(case: str, theirs: dict, ours: dict) -> Row:
    """Parameters after every round, and the final loss on fixed examples."""
    gaps = jax.tree.map(lambda a, b: np.max(np.abs(np.asarray(a) - np.asarray(b))), theirs, ours)
    assert max(jax.tree.leaves(gaps)) <= TOLERANCE
    moved = jax.tree.map(lambda leaf, start: np.max(np.abs(leaf[-1] - start)), ours, PARAMS)
    assert max(jax.tree.leaves(moved)) > 0.1
    losses = [float(_loss(jax.tree.map(lambda x: x[-1], p), _batches(64))) for p in (theirs, ours)]
    return Row(case, *(f"{loss:.4f}" for loss in losses), f"below {TOLERANCE:g}")


def lookahead() -> list[Row]:
    """A row beside `optax.lookahead`."""
    batch = _batches(ROUNDS, STEPS, 1, BATCH)
    tx = optax.lookahead(ADAMW, sync_period=STEPS, slow_step_size=0.5)
    start = optax.LookaheadParams.init_synced(PARAMS)
    theirs = _theirs(tx, start, batch, at=lambda params: params.fast).slow
    case = "`optax.lookahead`: one worker, SGD at 0.5 outside"
    return [_compared(case, theirs, _ours(batch, ADAMW, optax.sgd(0.5)))]


class WrappedState(NamedTuple):
    """The state of `_diloco_wrapper`."""

    inner: optax.OptState
    start: optax.Params  # at the start of the round
    momentum: optax.Updates  # u
    count: jax.Array


def _diloco_wrapper(inner, *, period: int, learning_rate: float, momentum: float):
    """DiLoCo of one worker, as MuLoCo writes it.

    u <- mu u + eta Delta; theta <- theta - mu u - eta Delta. Delta is the parameters at the
    round's start minus those at its end.
    """

    def init_fn(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return WrappedState(inner.init(params), params, zeros, jnp.zeros((), jnp.int32))

    def update_fn(grads, state, params):
        updates, inner_state = inner.update(grads, state.inner, params)
        ends = (state.count + 1) % period == 0
        step = jax.tree.map(
            lambda start, now, update: learning_rate * (start - now - update),
            *(state.start, params, updates),
        )
        u = jax.tree.map(lambda u, step: momentum * u + step, state.momentum, step)
        after = jax.tree.map(lambda th, u, step: th - momentum * u - step, state.start, u, step)

        def at_end(new, old):
            return jax.tree.map(lambda a, b: jnp.where(ends, a, b), new, old)

        updates = at_end(jax.tree.map(jnp.subtract, after, params), updates)
        start, u = at_end(after, state.start), at_end(u, state.momentum)
        return updates, WrappedState(inner_state, start, u, state.count + 1)

    return optax.GradientTransformation(init_fn, update_fn)


def wrapper() -> list[Row]:
    """A row beside the wrapper of an optimizer that MuLoCo describes."""
    batch = _batches(ROUNDS, STEPS, 1, BATCH)
    tx = _diloco_wrapper(ADAMW, period=STEPS, learning_rate=0.7, momentum=0.6)
    ours = _ours(batch, ADAMW, optax.sgd(0.7, momentum=0.6, nesterov=True))
    case = "MuLoCo, K = 1: one worker, Nesterov (0.7, 0.6) outside"
    return [_compared(case, _theirs(tx, PARAMS, batch), ours)]


def delayed() -> list[Row]:
    """A row beside Delayed Nesterov."""
    num_workers, rate, beta = 4, 0.7, 0.9
    batch = _batches(ROUNDS, STEPS, num_workers, BATCH)

    def one(carry, batch_SR):
        """The pushes of four workers with equal start parameters, one after another."""
        params, momentum, states = carry
        start, pushed = params, jax.tree.map(jnp.zeros_like, params)
        for worker in range(num_workers):
            own = jax.tree.map(lambda leaf, r=worker: leaf[:, r], batch_SR)
            end, states[worker] = _alone(ADAMW, start, states[worker], own)
            push = jax.tree.map(jnp.subtract, start, end)
            pushed = jax.tree.map(jnp.add, pushed, push)
            ahead = jax.tree.map(lambda g: g / num_workers, push)
            if worker == num_workers - 1:
                momentum = jax.tree.map(lambda m, d: beta * m + d / num_workers, momentum, pushed)
                ahead = jax.tree.map(lambda m, g: beta * m + g, momentum, ahead)
            params = jax.tree.map(lambda theta, g: theta - rate * g, params, ahead)
        return (params, momentum, states), params

    start = (PARAMS, jax.tree.map(np.zeros_like, PARAMS), [ADAMW.init(PARAMS)] * num_workers)
    theirs = _scanned(one, start, batch)
    ours = _ours(batch, ADAMW, optax.sgd(rate, momentum=beta, nesterov=True))
    case = f"Delayed Nesterov, c = 0: {num_workers} workers, Nesterov (0.7, 0.9) outside"
    return [_compared(case, theirs, ours)]


def parallel() -> list[Row]:
    """A row beside the optimizer alone on the union of the workers' batches."""
    batch = _batches(ROUNDS, 1, 4, BATCH)
    tx = optax.adamw(0.02, weight_decay=0.1)
    case = "`optax.adamw`: 4 workers, one step of SGD at 1, AdamW outside"
    theirs = _theirs(tx, PARAMS, batch)
    return [_compared(case, theirs, _ours(batch, optax.sgd(1.0), tx))]


def drjax() -> list[Row]:
    """A row beside federated averaging in DrJAX, which must be installed."""
    import drjax as library

    num_workers, tx = 4, optax.sgd(0.05)
    batch = _batches(ROUNDS, STEPS, num_workers, BATCH)

    @library.program(placements={"clients": num_workers})
    def federated(params, batch_R):
        def train(params, batch):
            return _alone(tx, params, tx.init(params), batch)[0]

        ends = library.map_fn(train, (library.broadcast(params), batch_R))
        return library.reduce_mean(ends)

    def one(params, batch):
        params = federated(params, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), batch))
        return params, params

    theirs = _scanned(one, PARAMS, batch)
    case = f"DrJAX 0.2: {num_workers} workers, SGD at 1 outside"
    return [_compared(case, theirs, _ours(batch, tx, optax.sgd(1.0)))]


# --- The page

CLAIMS: dict[str, Callable[[], list[Row]]] = {
    claim.__name__: claim
    for claim in (
        *(torchft, lookahead, wrapper, delayed, parallel, drjax),
        *(streaming_table, scaling_table, measured, wall_clock, shakespeare, order),
    )
}
"""By the name that `pytest -k` takes."""


def lines(name: str) -> list[str]:
    """The rows of a claim, as the page has them."""
    return [f"| {' | '.join((name, *row))} |" for row in CLAIMS[name]()]


if __name__ == "__main__":
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    for claim in CLAIMS:
        print(*lines(claim), sep="\n")
