"""Draws the report on one run or several: a page that opens offline.

adloco report RUN [RUN ...] --out FOLDER [--labels LABEL ...]
adloco report RUN [RUN ...] --live [--port 8000]

Runs that differ in their seed alone are drawn as one, with a band.
"""

from collections.abc import Sequence
from pathlib import Path

from adloco_jax.cli.parser import Parser
from adloco_jax.study import live, report


def run(words: Sequence[str]) -> int:
    """Writes, and prints the page's path; or serves it until it is interrupted."""
    parser = Parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="the report's folder")
    what.add_argument("--live", action="store_true", help="serve a page that follows the runs")
    parser.add_argument("--port", type=int, default=0, help="of --live; default: any that is free")
    parser.add_argument("--labels", nargs="+", help="one per run; default: the folders' names")
    options = parser.parse(words)
    if options.live:
        live.serve(options.runs, labels=options.labels, port=options.port)
    else:
        print(f"report: {report.write(options.runs, options.out, labels=options.labels)}")
    return 0
