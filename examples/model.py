"""A model of your own: a network over the last four tokens.

Run it:  adloco train examples/model.py --config.num_rounds=2
"""

import flax.linen as nn
import jax.numpy as jnp
import optax

from adloco_jax import ARCHITECTURES, Architecture
from adloco_jax.config import default_config


class MLP(nn.Module):
    """Predicts each token from the four before it (Bengio et al. 2003)."""

    vocab_size: int
    width: int

    @nn.compact
    def __call__(self, tokens_BL):
        """Return the logits of the next token after each token."""
        x_BLD = nn.Embed(self.vocab_size, self.width)(tokens_BL)
        shifted = [jnp.roll(x_BLD, shift, axis=1).at[:, :shift].set(0.0) for shift in range(4)]
        hidden_BLD = nn.gelu(nn.Dense(self.width)(jnp.concatenate(shifted, axis=-1)))
        return nn.Dense(self.vocab_size)(hidden_BLD)


def make_loss(mlp, **_):
    """Return the loss of rows whose last token is a target only."""

    def loss_fn(params, rows):
        logits_BLV = mlp.apply({"params": params}, rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, rows[:, 1:]).mean()

    return loss_fn


ARCHITECTURES["mlp"] = Architecture(
    build=lambda *, vocab_size, width, **_: MLP(vocab_size, width), loss=make_loss
)


def get_config():
    """Return a config that uses it."""
    config = default_config()
    config.model.arch = "mlp"
    return config
