"""Turns a checkpoint of a run into a folder that `transformers` loads.

adloco export --workdir runs/my-first --out my-model [--round 12] [--trainer 3]

Without --trainer it is the consensus; without --round the newest checkpoint. Nothing in the folder
is run: --config FILE is needed where the run uses an entry that its config file adds to a table.
"""

from collections.abc import Sequence
from pathlib import Path

from adloco_jax import hf
from adloco_jax.cli.parser import Parser
from adloco_jax.config import add_entries
from adloco_jax.errors import ConfigError
from adloco_jax.run.build import build_network
from adloco_jax.run.export import read_trained
from adloco_jax.run.resume import require_utf8


def run(words: Sequence[str]) -> int:
    """Reads, writes, and says what was written."""
    parser = Parser("export", __doc__)
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--round", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--trainer", type=int, help="its id in the ledger; default: the consensus")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights in the folder; default: float32",
    )
    parser.config_option()
    options = parser.parse(words)
    add_entries(options.config)
    require_utf8("--out", options.out)
    if options.out.exists():
        raise ConfigError(f"--out {options.out}: exists already; name another folder")
    trained = read_trained(options.workdir, round=options.round, trainer=options.trainer)
    network = build_network(trained.settings)
    hf.save(trained.params, options.out, trained.tokenizer, network=network, dtype=options.dtype)
    print(f"{options.out}: round {trained.round}, {trained.source}, {options.dtype}")
    return 0
