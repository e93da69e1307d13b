"""Runs variants against each other and says what each loss has cost.

    adloco compare --config compare_quick [--workdir FOLDER] [--processes 2]

Stopped, the same command goes on with the same --workdir (by default `runs/<config's name>`).
Several processes share the runs among themselves; so do several such commands with one folder.
"""

import argparse
import functools
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from adloco_jax.commands.parser import Parser
from adloco_jax.run import config_file
from adloco_jax.study import compare, report
from adloco_jax.study.compare_figure import figure


def run(words: Sequence[str]) -> int:
    """Makes the runs that are left, then the tables and figures."""
    parser = Parser("compare", __doc__)
    parser.add_argument("--config", required=True, help="a file with get_comparison(), or its name")
    parser.add_argument("--workdir", type=Path, help="the folder; one that holds runs goes on")
    parser.add_argument("--processes", type=int, default=1, help="that share the runs; default: 1")
    parser.add_argument(
        "--results", type=Path, help="a JSON line for each finished run, whose folder is deleted"
    )
    parser.add_argument("--only-run", action="store_true", help="leave tables to another command")
    return _compare(parser.parse(words), shlex.join(["adloco", "compare", *words]))


def _compare(options: argparse.Namespace, command: str) -> int:
    path = config_file.find(options.config)
    comparison = config_file.load(path, "get_comparison", compare.Comparison)
    folder = options.workdir or Path("runs") / path.stem
    runs = compare.runs_of(comparison, folder)
    folder.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()

    def say(run: compare.Run, made: bool) -> None:
        how = f"after {time.monotonic() - start_s:.0f} s" if made else "was finished"
        print(f"{run.variant}, seed {run.seed}: {how}", flush=True)

    print(f"{len(runs)} runs in {folder}", flush=True)
    this = [sys.executable, "-m", "adloco_jax", "compare", f"--config={path}", "--only-run"]
    this += [f"--workdir={folder}"] + [f"--results={p}" for p in [options.results] if p]
    others = [subprocess.Popen(this) for _ in range(options.processes - 1)]
    execute = functools.partial(
        compare.execute,
        on_end=say,
        command=command,
        config_file=path,
        results_file=options.results,
    )
    try:
        whole = execute(comparison, folder)
        codes = [other.wait() for other in others]
    finally:
        for other in others:
            other.terminate()  # saves, and ends with the round
    if options.only_run:
        return 0
    # Another's replay may have waited for the run that this process made.
    whole = whole or execute(comparison, folder)
    if not whole:
        print("the other runs are in another process's hands")
        return max(codes, default=0)
    table = compare.write(comparison, folder, results_file=options.results)
    print(compare.markdown(table))
    figure(table, command=command).savefig(folder / "front.png", dpi=150)
    print(f"front: {folder / 'front.png'}")
    if options.results is None:
        labels = [run.variant for run in runs]
        page = report.write([run.workdir for run in runs], folder / "report", labels=labels)
        print(f"report: {page}")
    return 0
