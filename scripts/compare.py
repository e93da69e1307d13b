"""Runs variants against each other and says what each loss has cost.

    python scripts/compare.py --config configs/compare_quick.py [--workdir FOLDER] [--processes 2]

Stopped, the same command goes on with the same --workdir (by default `runs/<config's name>`).
Several processes share the runs among themselves; so do several such commands with one folder.
"""

import argparse
import functools
import shlex
import subprocess
import sys
import time
from pathlib import Path

from adloco_jax.errors import UserError
from adloco_jax.run import config_file
from adloco_jax.study import compare, report
from adloco_jax.study.compare_figure import figure


def main() -> int:
    """Makes the runs that are left, then the tables and figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="a file with get_comparison(), or its name")
    parser.add_argument("--workdir", type=Path, help="the folder; one that holds runs goes on")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--results", type=Path, help="a JSON line for each finished run, whose folder is deleted"
    )
    parser.add_argument("--only-run", action="store_true", help="leave tables to another command")
    options = parser.parse_args()
    try:
        return _compare(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _compare(options: argparse.Namespace) -> int:
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
    others = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, f"--config={path}", f"--workdir={folder}"),
                *([f"--results={options.results}"] if options.results else []),
                "--only-run",
            ]
        )
        for _ in range(options.processes - 1)
    ]
    command = shlex.join(["python", *sys.argv])
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
        written = report.write([run.workdir for run in runs], folder / "report", labels=labels)
        print(f"report: {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
