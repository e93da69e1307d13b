"""Compare frozen weights in bfloat16, int8 and nf4: an adapter's loss, seconds and bytes.

    python -m studies.four_bits MODEL CHATS HELDOUT --out studies/four_bits.jsonl

MODEL is a folder with SmolLM2-135M-Instruct (`make real`), CHATS and HELDOUT are files of chats.
The updates of the three are made in turn, so that they share the machine's load. There is a line
for each seed and kind.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path

import jax
import numpy as np
import optax

from adloco_jax.config import completed, default_config, validate
from adloco_jax.data import load_corpus
from adloco_jax.engine.memory import Mode
from adloco_jax.engine.model import configured_model, with_weights
from adloco_jax.engine.spec import here, num_bytes

KINDS = ("bfloat16", "int8", "nf4")


def config_of(model: str, chats: str, heldout: str, kind: str) -> dict:
    """Make the config: an adapter of rank 8, and rows of 128 tokens, of about three chats each."""
    config = default_config()
    config.model.init_from, config.model.base_dtype = model, kind
    config.adapter.rank, config.adapter.alpha = 8, 16.0
    config.data.path, config.data.heldout_path = chats, heldout
    config.data.sequence_length, config.data.num_sequences = 128, 256
    config.batching.test = "constant"
    return config


@dataclasses.dataclass
class Arm:
    """A model with one kind of frozen weights, and what it was trained with so far."""

    update: jax.stages.Compiled
    loss: jax.stages.Compiled
    base: dict
    fresh: dict
    state: tuple
    seconds: list[float]


def compiled_arm(settings, tx: optax.GradientTransformation, rows: np.ndarray) -> Arm:
    """Read the weights, and compile an update and a loss."""
    model, _ = with_weights(configured_model(settings, here()), settings.model, here(), seed=0)
    loss_fn = model.loss_of(Mode(sequential=True, remat=False), "xla")
    fresh = jax.jit(model.init_fn)(jax.random.key(0))

    def update(params, state, rows, base):
        grads = jax.grad(lambda params: loss_fn(params, rows, base=base))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    base, state = model.base.params, tx.init(fresh)
    return Arm(
        update=jax.jit(update).lower(fresh, state, rows, base).compile(),
        loss=jax.jit(lambda *given, base: loss_fn(*given, base=base))
        .lower(fresh, rows, base=base)
        .compile(),
        base=base,
        fresh=model.init_fn,
        state=(),
        seconds=[],
    )


def main() -> None:
    """Train three seeds of each kind, and write their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("chats")
    parser.add_argument("heldout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--heldout-rows", type=int, default=16)
    options = parser.parse_args()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-4, weight_decay=0.0))
    corpus, arms = None, {}
    for kind in KINDS:
        settings = completed(
            validate(config_of(options.model, options.chats, options.heldout, kind))
        )
        corpus = corpus or load_corpus(settings)
        arms[kind] = compiled_arm(settings, tx, corpus.batch(0, 0, 0, options.rows))
    heldout = corpus.heldout_rows[: options.heldout_rows]
    parts = np.split(heldout, len(heldout) // options.rows)

    def heldout_loss(arm: Arm, params) -> float:
        return float(np.mean([arm.loss(params, part, base=arm.base) for part in parts]))

    for seed in range(3):
        for arm in arms.values():
            params = jax.jit(arm.fresh)(jax.random.key(seed))
            arm.state, arm.seconds = (params, tx.init(params)), []
        before = {kind: heldout_loss(arm, arm.state[0]) for kind, arm in arms.items()}
        for number in range(options.updates):
            rows = corpus.batch(0, seed, number * options.rows, options.rows)
            for arm in arms.values():
                start_s = time.perf_counter()
                arm.state = jax.block_until_ready(arm.update(*arm.state, rows, arm.base))
                arm.seconds.append(time.perf_counter() - start_s)
        for kind, arm in arms.items():
            memory = arm.update.memory_analysis()
            ratios = np.divide(arm.seconds, arms["bfloat16"].seconds)
            line = {
                "kind": kind,
                "seed": seed,
                "load": os.getloadavg()[0],
                "updates": options.updates,
                "loss_before": before[kind],
                "loss": heldout_loss(arm, arm.state[0]),
                "update_s": statistics.median(arm.seconds),
                "seconds_by_those_of_bfloat16": sorted(ratios.tolist()),
                "base_bytes": num_bytes(arm.base),
                "argument_bytes": memory.argument_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
            }
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
