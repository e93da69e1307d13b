"""The command `compare`: train variants of a run with several seeds, and compare their costs."""

import argparse
import contextlib
import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from adloco_jax.cli.names import find_config, load_config
from adloco_jax.config import completed, validate
from adloco_jax.errors import UserError, counted
from adloco_jax.run.folder import InUse, check_workdir, finished
from adloco_jax.study import compare as comparisons
from adloco_jax.study import report, results
from adloco_jax.study.curves import read_run
from adloco_jax.study.page import write_files
from adloco_jax.study.results import Trial
from adloco_jax.training import train


def compare(options: argparse.Namespace, command: str) -> int:
    """Train the runs of a comparison that are not finished; then write the tables and figures."""
    path = find_config(options.config)
    comparison = load_config(path, "get_comparison", comparisons.Comparison)
    folder = options.workdir or Path("runs") / path.stem
    check_workdir(folder)
    runs = comparisons.runs_of(comparison, folder)
    folder.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()

    def say(run: Trial, made: bool) -> None:
        how = f"after {time.monotonic() - start_s:.0f} s" if made else "was finished"
        print(f"{run.variant}, seed {run.seed}: {how}", flush=True)

    print(f"{counted(len(runs), 'run')} in {folder}", flush=True)
    this = [sys.executable, "-m", "adloco_jax", "compare", str(path), "--only-run"]
    this += [f"--workdir={folder}"] + [f"--results={p}" for p in [options.results] if p]
    others = [subprocess.Popen(this) for _ in range(options.processes - 1)]
    made_as = {"command": command, "results_file": options.results}
    make_runs = functools.partial(execute, comparison, folder, on_end=say, **made_as)
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
    table = comparisons.write(comparison, folder, results_file=options.results)
    print(comparisons.markdown(table))
    if options.results is None:
        labels = [run.variant for run in runs]
        page = report.write([run.workdir for run in runs], folder / "report", labels=labels)
        print(f"report: {page}")
    write_files(folder, {"front.svg": comparisons.figure(table, command=command)})
    print(f"front: {folder / 'front.svg'}")
    return 0


def execute(
    comparison: comparisons.Comparison,
    folder: str | Path,
    *,
    on_end: Callable[[Trial, bool], None],
    command: str = "",
    results_file: Path | None = None,
) -> bool:
    """Train the unfinished runs of a comparison, one by one; return whether all are finished.

    Several processes may share a comparison: a run that another process trains is skipped. What a
    run prints goes to `output.txt` in its folder.

    Args:
      comparison: The comparison, with its variants and seeds.
      folder: The folder of all runs; unfinished runs in it are resumed.
      on_end: Called for each finished run, with True if it was trained now.
      command: The command line, which is recorded in the ledgers of the runs.
      results_file: Gets a line for each finished run, whose folder is then deleted. A run with a
        line is not trained. None: all folders stay.

    Raises:
      UserError: If a run raises it (`train`). Another call of `execute` resumes the comparison.
    """
    is_whole = True

    def has_line(run: Trial) -> bool:
        return results_file is not None and results.key(run) in results.read(results_file)

    def keep(run: Trial) -> None:
        if results_file is None:
            return
        with FileLock(Path(folder) / "results.lock"):
            if not has_line(run):
                events = read_run(run.workdir).events
                points = comparisons.curve(events, comparison.simulated)
                changes = comparison.variants[run.variant]
                results.append(results_file, run, changes=changes, curve=points, events=events)
            if run.workdir.exists():
                shutil.rmtree(run.workdir)

    for run in comparisons.runs_of(comparison, folder):
        if has_line(run):
            on_end(run, False)
            continue
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
        except (UserError, OSError):
            if not has_line(run):
                raise
            made = False  # another process has just finished the run, and deleted the folder
        keep(run)
        on_end(run, made)
    return is_whole
