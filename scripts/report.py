"""Draws the report on one run or several: a page that opens offline, and its figures.

python scripts/report.py RUN [RUN ...] --out FOLDER [--labels LABEL ...]

Runs that differ in their seed alone are drawn as one, with a band.
"""

import argparse
import sys
from pathlib import Path

from adloco_jax.errors import UserError
from adloco_jax.study import report


def main() -> int:
    """Writes, and prints the page's path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, required=True, help="the report's folder")
    parser.add_argument("--labels", nargs="+", help="one per run; default: the folders' names")
    options = parser.parse_args()
    try:
        print(f"report: {report.write(options.runs, options.out, labels=options.labels)}")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
