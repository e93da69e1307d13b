"""Looks at the gradients of a checkpoint: their noise, its law, and the run's own estimates of it.

adloco gradients --workdir runs/my-first [--round 12] [--trainer 3]

Without --trainer it is the consensus; without --round the newest checkpoint.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from adloco_jax.cli.parser import Parser
from adloco_jax.config import add_entries
from adloco_jax.errors import ConfigError
from adloco_jax.study.gradients import analyse_run
from adloco_jax.study.gradients_figure import describe


def run(words: Sequence[str]) -> int:
    """Measures, writes, and prints the numbers."""
    parser = Parser("gradients", __doc__)
    parser.add_argument("--workdir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--round", type=int, help="of the checkpoint; default: the newest")
    parser.add_argument("--trainer", type=int, help="its id in the ledger; default: the consensus")
    parser.add_argument(
        "--num-sequences", type=int, default=512, help="of the training data; default: 512"
    )
    parser.add_argument(
        "--batch-sizes",
        type=_integers,
        default="4,16,64",
        help="sequences, separated by commas; default: 4,16,64",
    )
    parser.add_argument(
        "--draws", type=int, default=200, help="random batches of each size; default: 200"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: 0")
    parser.add_argument("--pass-size", type=int, help="sequences on the device; default: the run's")
    parser.add_argument("--out", type=Path, help="a folder; default: report in the run's")
    parser.config_option()
    options = parser.parse(words)
    add_entries(options.config)
    del options.config
    result = analyse_run(**vars(options), command=shlex.join(["adloco", "gradients", *words]))
    print("\n".join(describe(result)))
    print(f"report: {(options.out or options.workdir / 'report') / 'gradient_analysis.svg'}")
    return 0


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--batch-sizes {text}: expected integers such as 4,16,64") from error
