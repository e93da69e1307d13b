"""A model of your own, trained by `fit`, which evaluates, saves, resumes and reports.

Run it:  python examples/fit.py
"""

import jax
import numpy as np
import optax

from adloco_jax import ArrayRows, fit
from adloco_jax.config import default_config


def init_fn(key):
    """Return the parameters: a tree of arrays with names of your own."""
    of_embed, of_head = jax.random.split(key)
    embed = jax.random.normal(of_embed, (16, 32)) / 32**0.5
    return {"embed": embed, "head": jax.random.normal(of_head, (32, 16)) / 32**0.5}


def loss_fn(params, rows_BL):
    """Return the mean loss of rows whose last token is a target only."""
    hidden_BLD = jax.nn.gelu(params["embed"][rows_BL[:, :-1]])
    logits_BLV = hidden_BLD @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, rows_BL[:, 1:]).mean()


def run(workdir):
    """Train two workers on sequences in which each token is 1 to 3 above the last, modulo 16."""
    steps = np.random.default_rng(0).integers(1, 4, 33 * 2000)
    rows = (steps.cumsum() % 16).reshape(-1, 33).astype(np.int32)
    config = default_config()
    config.num_rounds, config.inner.steps_per_round = 4, 20
    config.ensemble.num_trainers, config.ensemble.num_workers = 1, 2
    config.batching.test = "constant"  # DiLoCo; with "norm" the batch follows the gradient noise
    config.data.sequence_length = 32
    return fit(
        config,
        corpus=ArrayRows(rows, heldout=0.05),
        init_fn=init_fn,
        loss_fn=loss_fn,
        inner_tx=optax.adamw(0.02),
        loss_unit="nats/token",
        workdir=workdir,
    )


if __name__ == "__main__":
    print("held-out loss", run("runs/own-model").loss)
