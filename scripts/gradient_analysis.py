"""Looks at the gradients of a checkpoint: their noise, its law, and the run's own estimates of it.

python scripts/gradient_analysis.py --workdir runs/my-first [--round 12] [--trainer 3]

Without --trainer it is the consensus; without --round the newest checkpoint.
"""

import argparse
import shlex
import sys
from pathlib import Path

from adloco_jax.errors import ConfigError, UserError
from adloco_jax.study.gradients import analyse_run
from adloco_jax.study.gradients_figure import describe


def main() -> int:
    """Measures, writes, and prints the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--round", type=int)
    parser.add_argument("--trainer", type=int, help="a trainer's id, as the ledger has it")
    parser.add_argument("--num-sequences", type=int, default=512, help="of the training data")
    parser.add_argument("--batch-sizes", default="4,16,64", help="separated by commas")
    parser.add_argument("--draws", type=int, default=200, help="random batches of each size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pass-size", type=int, help="sequences on the device; default: the run's")
    parser.add_argument("--out", type=Path, help="a folder; default: report in the run's")
    options = parser.parse_args()
    try:
        result = analyse_run(
            options.workdir,
            round=options.round,
            trainer=options.trainer,
            num_sequences=options.num_sequences,
            batch_sizes=_integers(options.batch_sizes),
            draws=options.draws,
            seed=options.seed,
            pass_size=options.pass_size,
            out=options.out,
            command=shlex.join(["python", *sys.argv]),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join(describe(result)))
    print(f"report: {(options.out or options.workdir / 'report') / 'gradient_analysis.png'}")
    return 0


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--batch-sizes {text}: expected integers such as 4,16,64") from error


if __name__ == "__main__":
    sys.exit(main())
