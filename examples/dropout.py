"""Dropout with Flax NNX: the loss takes a key, and rests without one."""

import optax
from flax import nnx


class Net(nnx.Module):
    """Predicts each token from the one before it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens_BL):
        """Return the logits of the next token after each token."""
        return self.head(self.dropout(self.embed(tokens_BL)))


graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)


def loss_fn(params, rows_BL, key=None):
    """Return the mean loss; with a key, some numbers are dropped."""
    model = nnx.merge(graph, params, rest, copy=True)  # the copy takes the changes below
    if key is None:
        model.eval()
    else:
        nnx.reseed(model, default=key)
    logits_BLV = model(rows_BL[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, rows_BL[:, 1:]).mean()
