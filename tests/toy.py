"""Small models for tests of runs: a bigram model on a random Markov chain, and a tiny Llama."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from adloco_jax.config import completed, default_config, validate
from adloco_jax.engine.model import Model, configured_model, program_spec, with_weights
from adloco_jax.engine.spec import ProgramSpec, this_machine
from adloco_jax.settings import Settings

VOCAB, LENGTH, NUM_ROWS = 6, 8, 997


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows in memory; each trainer and stream reads from a different position."""

    rows: np.ndarray
    fingerprint: str = "table"
    tokens_per_byte: float | None = None
    shards: tuple = ()

    @property
    def heldout_rows(self):
        return self.rows[:16]

    def batch(self, trainer, stream, start, count):
        first = 101 * trainer + 307 * stream + start
        return self.rows[(first + np.arange(count)) % len(self.rows)]


def corpus() -> Table:
    rng = np.random.default_rng(3)
    chain = rng.dirichlet(np.full(VOCAB, 0.7), size=VOCAB)
    rows = np.zeros((NUM_ROWS, LENGTH + 1), np.int32)
    rows[:, 0] = rng.integers(0, VOCAB, NUM_ROWS)
    for position in range(LENGTH):
        draw = rng.random(NUM_ROWS)[:, None]
        rows[:, position + 1] = (
            (chain[rows[:, position]].cumsum(axis=1) < draw).sum(axis=1).clip(max=VOCAB - 1)
        )
    return Table(rows)


def data_settings(*, num_streams=1, seed=0, vocab_size=257, num_classes=2, **data) -> Settings:
    """Settings with changes to the keys that determine the rows of text; not validated."""
    base = validate(default_config())
    sizes = {"vocab_size": vocab_size, "num_classes": num_classes}
    changes = {
        "seed": seed,
        "data": base.data.model_copy(update=data),
        "model": base.model.model_copy(update=sizes),
        "ensemble": base.ensemble.model_copy(update={"num_workers": num_streams}),
    }
    return base.model_copy(update=changes)


def init_fn(key):
    return {"w": jnp.zeros((VOCAB, VOCAB))}


def bigram_loss(params, tokens):
    logits = params["w"][tokens[:, :-1]]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def spec_of(settings, init_fn=init_fn, loss_fn=bigram_loss) -> ProgramSpec:
    """What the programs of a run of this model share, on the devices that are here."""
    return program_spec(settings, Model(init_fn, lambda *_: loss_fn), this_machine())


def with_its_weights(settings):
    """The configured model with the weights that it starts from, and lines about these."""
    model = configured_model(settings, this_machine())
    return with_weights(model, settings.model, this_machine(), seed=settings.seed)


def config_of(**groups) -> ConfigDict:
    """The config of a small run; `groups` overrides it, as in `batching={"eta": 0.5}`."""
    config = default_config()
    config.data.sequence_length = LENGTH
    batching = {"initial_batch_size": 2, "max_batch_size": 4, "buckets": (2, 4)}
    common = {
        "num_rounds": 8,
        "ensemble": {"num_trainers": 3, "num_workers": 4},
        "inner": {"steps_per_round": 3, "learning_rate": 0.05},
        "batching": batching | {"batch_cap": 15, "max_growth": 3},
        "eval": {"every_rounds": 100},
    }
    config.update(common)
    config.update(groups)
    return config


def settings_of(**groups) -> Settings:
    """The settings of `config_of`, with the limits that it leaves unset."""
    return completed(validate(config_of(**groups)), reads=False)


def tiny_config(**groups) -> ConfigDict:
    """The config of a short round of a tiny Llama on the standard library; `groups` overrides."""
    config = default_config()
    sizes = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}
    common = {
        "num_rounds": 1,
        "model": sizes | {"max_length": 32},
        "data": {"sequence_length": 16, "num_sequences": 200},
        "ensemble": {"num_trainers": 1, "num_workers": 1},
        "inner": {"steps_per_round": 2, "learning_rate": 1e-2},
        "batching": {"test": "constant", "max_batch_size": 1},
        "eval": {"num_sequences": 8},
    }
    config.update(common)
    config.update(groups)
    return config
