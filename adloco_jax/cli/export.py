"""Turns a checkpoint of a run into a folder that `transformers` loads."""

import argparse
from pathlib import Path

from adloco_jax import hf
from adloco_jax.config import add_entries
from adloco_jax.run.build import build_network
from adloco_jax.run.export import read_trained
from adloco_jax.run.resume import require_utf8


def run(options: argparse.Namespace, command: str) -> int:
    """Reads, writes, and says what was written."""
    add_entries(options.config)
    out = options.out or Path(options.run) / "export"
    require_utf8("--out", out)
    trained = read_trained(options.run, round=options.round, trainer=options.trainer)
    network = build_network(trained.settings)
    hf.save(trained.params, out, trained.tokenizer, network=network, dtype=options.dtype)
    print(f"{out}: round {trained.round}, {trained.source}, {options.dtype}")
    return 0
