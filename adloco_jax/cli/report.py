"""Draws the report on one run or several: a page that opens offline."""

import argparse
import contextlib
from pathlib import Path

from adloco_jax.errors import ConfigError
from adloco_jax.study import report


def run(options: argparse.Namespace, command: str) -> int:
    """Writes the page and prints its path; with --watch again and again, until the runs end."""
    if options.out is None and len(options.run) > 1:
        raise ConfigError(f"{len(options.run)} runs: give --out FOLDER for their report")
    folder = options.out or Path(options.run[0]) / "report"
    if not options.watch:
        print(f"report: {report.write(options.run, folder, labels=options.labels)}")
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        report.watch(options.run, folder, labels=options.labels)
    return 0
