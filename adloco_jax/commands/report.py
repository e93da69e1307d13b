"""Draws the report on one run or several: a page that opens offline, and its figures.

adloco report RUN [RUN ...] --out FOLDER [--labels LABEL ...]

Runs that differ in their seed alone are drawn as one, with a band.
"""

from collections.abc import Sequence
from pathlib import Path

from adloco_jax.commands.parser import Parser
from adloco_jax.study import report


def run(words: Sequence[str]) -> int:
    """Writes, and prints the page's path."""
    parser = Parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, required=True, help="the report's folder")
    parser.add_argument("--labels", nargs="+", help="one per run; default: the folders' names")
    options = parser.parse(words)
    print(f"report: {report.write(options.runs, options.out, labels=options.labels)}")
    return 0
