"""Dropout with Flax NNX: the loss takes a key, and has no dropout without one.

Run it:  python examples/dropout.py
"""

import jax
import numpy as np
import optax
from flax import nnx

import adloco_jax as al


class Net(nnx.Module):
    """Predicts each token from those before it, by a layer of attention."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, dropout_rate=0.1, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens_BL):
        """Return the logits of the next token after each token."""
        x_BLD = self.embed(tokens_BL)
        x_BLD += self.attention(x_BLD, mask=nnx.make_causal_mask(tokens_BL))
        return self.head(self.dropout(x_BLD))


graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)


def loss_fn(params, rows_BL, key=None):
    """Return the mean loss; with a key, some numbers are dropped."""
    model = nnx.merge(graph, params, rest, copy=True)  # the copy takes the changes below
    if key is None:
        model.eval()
    else:
        model.train()  # attention has no default
        nnx.reseed(model, default=key)
    logits_BLV = model(rows_BL[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, rows_BL[:, 1:]).mean()


steps = np.random.default_rng(0).integers(1, 4, 33 * 2000)
rows = (steps.cumsum() % 16).reshape(-1, 33)  # each token is 1 to 3 above the last one, modulo 16
how = {"inner_tx": optax.adamw(0.01), "outer_tx": optax.sgd(0.7, momentum=0.9, nesterov=True)}
ensemble = al.init(params, num_trainers=1, num_workers=2, **how)


@jax.jit
def run_round(ensemble, rows_SRBL, key):
    """Train a round; `key` turns dropout on, and another one drops other numbers."""
    return al.outer_step(ensemble, rows_SRBL, loss_fn, key=key, **how)


rounds_SRBL = rows[:1600].reshape(5, 20, 2, 8, 33)  # 5 rounds of 20 steps, 2 workers, 8 rows
for number, rows_SRBL in enumerate(rounds_SRBL):
    key = jax.random.fold_in(jax.random.key(1), number)
    ensemble, metrics = run_round(ensemble, rows_SRBL, key)
    trained = jax.tree.map(lambda leaf_M: leaf_M[0], ensemble.params_M)
    print(
        f"round {number + 1}: training loss {metrics.loss_SR[-1].mean():.3f} with dropout,"
        f" held-out loss {loss_fn(trained, rows[1600:]):.3f} without"
    )
