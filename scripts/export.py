"""Turns a checkpoint of a run into a folder that `transformers` loads.

python scripts/export.py --workdir runs/my-first --out my-model [--round 12] [--trainer 3]

Without --trainer it is the consensus; without --round the newest checkpoint.
"""

import argparse
import sys
from pathlib import Path

from adloco_jax import hf
from adloco_jax.errors import ConfigError, UserError
from adloco_jax.run.build import build_network
from adloco_jax.run.export import read_trained


def main() -> int:
    """Reads, writes, and says what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--round", type=int)
    parser.add_argument("--trainer", type=int, help="a trainer's id, as the ledger has it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    try:
        if options.out.exists():
            raise ConfigError(f"--out {options.out}: exists already; name another folder")
        trained = read_trained(options.workdir, round=options.round, trainer=options.trainer)
        network = build_network(trained.settings)
        hf.save(
            trained.params, options.out, trained.tokenizer, network=network, dtype=options.dtype
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{options.out}: round {trained.round}, {trained.source}, {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
