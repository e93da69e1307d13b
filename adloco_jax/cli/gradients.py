"""Measures the gradients at a checkpoint of a run."""

import argparse
from pathlib import Path

from adloco_jax.config import add_entries
from adloco_jax.study.gradients import analyse_run
from adloco_jax.study.gradients_figure import describe


def run(options: argparse.Namespace, command: str) -> int:
    """Measures, writes, and prints the numbers."""
    how = dict(vars(options))
    add_entries(how.pop("config"))
    run = Path(how.pop("run"))
    result = analyse_run(run, **how, command=command)
    print("\n".join(describe(result)))
    print(f"report: {(options.out or run / 'report') / 'gradient_analysis.svg'}")
    return 0
