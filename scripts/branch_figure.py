"""Draws the critical batch over a run: as its branches measured it, beside the noise scale.

python scripts/branch_figure.py runs/branches [--out branches.png]
"""

import argparse
import sys
from pathlib import Path

from adloco_jax.errors import UserError
from adloco_jax.study.branch_figure import figure
from adloco_jax.study.curves import read_run


def main() -> int:
    """Writes the figure, and prints its path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, help="a file; default: branches.png in the folder")
    options = parser.parse_args()
    out = options.out or options.run / "branches.png"
    try:
        figure(read_run(options.run).events).savefig(out, dpi=150)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"figure: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
