"""The command `compare`: train variants of a run with several seeds, and compare their costs."""

import argparse
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from adloco_jax.cli.names import find_config, load_config
from adloco_jax.config import completed, validate
from adloco_jax.errors import counted
from adloco_jax.run.folder import InUse, finished
from adloco_jax.study import compare as comparisons
from adloco_jax.study import report
from adloco_jax.study.compare import Trial
from adloco_jax.training import train


def compare(options: argparse.Namespace, command: str) -> int:
    """Train the runs of a comparison that are not finished; then write the tables and a report."""
    path = find_config(options.config)
    comparison = load_config(path, "get_comparison", comparisons.Comparison)
    folder = options.workdir or Path("runs") / path.stem
    runs = comparisons.runs_of(comparison, folder)
    folder.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()

    def say(run: Trial, made: bool) -> None:
        how = f"after {time.monotonic() - start_s:.0f} s" if made else "was finished"
        print(f"{run.variant}, seed {run.seed}: {how}", flush=True)

    print(f"{counted(len(runs), 'run')} in {folder}", flush=True)
    this = [sys.executable, "-m", "adloco_jax", "compare", str(path), "--only-run"]
    this.append(f"--workdir={folder}")
    others = [subprocess.Popen(this) for _ in range(options.processes - 1)]
    make_runs = functools.partial(execute, runs, on_end=say, command=command)
    try:
        is_whole = make_runs()
        codes = [other.wait() for other in others]
    finally:
        for other in others:
            other.terminate()  # the other process saves its run, and ends after the current round
    if options.only_run:
        return 0
    # If runs were skipped, they are tried once more: the process that had them may have ended.
    if not (is_whole or make_runs()):
        print("the other runs are in another process's hands")
        return max(codes, default=0)
    tables = comparisons.markdown(comparison, folder)
    (folder / "comparison.md").write_text(tables, encoding="utf-8")
    print(tables)
    labels = [run.variant for run in runs]
    page = report.write([run.workdir for run in runs], folder / "report", labels=labels)
    print(f"report: {page}")
    return 0


def execute(runs: Iterable[Trial], *, on_end: Callable[[Trial, bool], None], command: str) -> bool:
    """Train the unfinished ones of runs, one by one; return whether all are finished.

    Several processes may share runs: one that another process trains is skipped. What a run prints
    goes to `output.txt` in its folder.

    Args:
      runs: Of a comparison (`runs_of`); unfinished ones are resumed.
      on_end: Called for each finished run, with True if it was trained now.
      command: The command line, which is recorded in the ledgers of the runs.

    Raises:
      UserError: If a run raises it (`train`). Another call resumes the comparison.
    """
    is_whole = True
    for run in runs:
        try:
            settings = completed(validate(run.config), run.workdir)
            made = finished(run.workdir, settings) is None
            if made:
                run.workdir.mkdir(parents=True, exist_ok=True)
                path, how = run.workdir / "output.txt", {"errors": "backslashreplace"}
                with (
                    open(path, "a", encoding="utf-8", **how) as output,
                    contextlib.redirect_stdout(output),
                ):
                    train(settings, run.workdir, command=command)
        except InUse:
            is_whole = False
            continue
        on_end(run, made)
    return is_whole
