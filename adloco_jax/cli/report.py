"""Draws the report on one run or several: a page that opens offline.

adloco report RUN [RUN ...] [--out FOLDER] [--labels LABEL ...] [--watch]

Runs that differ in their seed alone are drawn as one, with a band. The report on one run is
written to `report` in its folder; --out FOLDER names another one. With --watch the page is drawn
again while the runs go on, and a browser that shows it follows.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from adloco_jax.cli.parser import Parser
from adloco_jax.errors import ConfigError
from adloco_jax.study import report


def run(words: Sequence[str]) -> int:
    """Writes the page and prints its path; with --watch again and again, until the runs end."""
    parser = Parser("report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, help="a folder; default, of one run: report in it")
    parser.add_argument("--watch", action="store_true", help="draw the page again while runs go on")
    parser.add_argument("--labels", nargs="+", help="one per run; default: the folders' names")
    options = parser.parse(words)
    if options.out is None and len(options.runs) > 1:
        raise ConfigError(f"{len(options.runs)} runs: give --out FOLDER for their report")
    folder = options.out or options.runs[0] / "report"
    if not options.watch:
        print(f"report: {report.write(options.runs, folder, labels=options.labels)}")
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        report.watch(options.runs, folder, labels=options.labels)
    return 0
