"""Makes one mistake of scripts/mutants.toml at a time, and says whether its tests notice it.

python scripts/mutants.py                      all of them; started again, it goes on
python scripts/mutants.py --only merge,cursor  those with such a word in their name or area

Each is made in a temporary copy of the repository's tracked files, of which the tests are run that
the table names. A test that fails, or runs out of time, has noticed; where all pass, the mistake
has survived, and a test is missing. It is stale where its old text is not there exactly once, or
where its tests do not run, or fail, without it. Exits with 1 unless every one was noticed.

Every verdict is a line of the results file, and holds until the table's entry, the file it changes
or one of its test files does.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "scripts" / "mutants.toml"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One mistake, and the tests meant to notice it."""

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest

    @property
    def test_files(self) -> list[str]:
        """The files that the tests are in."""
        return [part.partition("::")[0] for part in shlex.split(self.tests) if ".py" in part]


def read_table() -> list[Mutant]:
    """The mutants of the table, in its order."""
    return [Mutant(**entry) for entry in tomllib.loads(TABLE.read_text())["mutant"]]


class Results:
    """Verdicts by name and the hash of what they depend on; each is kept as a line of a file."""

    def __init__(self, path: Path):
        """Reads what is there already; a last line that was cut short is left out."""
        self._path, self._known = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        text = path.read_text()
        path.write_text(text[: text.rfind("\n") + 1])
        for line in map(json.loads, path.read_text().splitlines()):
            self._known[line["name"], line["key"]] = line

    def once(self, name: str, inputs: list[str], run: Callable[[], dict]) -> dict:
        """The verdict on these inputs: the one that is known, or else that of running now."""
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        if (name, key) not in self._known:
            line = self._known[name, key] = {"name": name, "key": key, **run()}
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
        return self._known[name, key]


def copy_tracked(folder: Path) -> None:
    """Copies the tracked files, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def run_tests(tests: str, folder: Path, limit_s: float) -> dict:
    """Runs tests on the copy: survived (all pass), killed, or stale (they do not run)."""
    # Python would take a file's old bytecode where it has changed within a second.
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(tests)]
    start_s = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
        )
        failed = FAILED.search(done.stdout)
        status = {0: "survived", 1: "killed"}.get(done.returncode, "stale")
        by = failed[1].partition("::")[2] if failed and status == "killed" else ""
        if status == "stale":
            by = f"pytest ends with {done.returncode}: {done.stdout[-200:].strip()}"
    except subprocess.TimeoutExpired:
        status, by = "killed", "timeout"
    return {"status": status, "seconds": round(time.perf_counter() - start_s, 1), "by": by}


def judge(mutant: Mutant, folder: Path, results: Results, limit_s: float) -> dict:
    """The verdict on one mutant; the copy is as before afterwards."""
    files = [mutant.file, *mutant.test_files]
    if missing := [name for name in files if not (folder / name).is_file()]:
        return {"status": "stale", "seconds": 0.0, "by": f"not there: {', '.join(missing)}"}
    path, contents = folder / mutant.file, [(folder / name).read_text() for name in files]
    if (count := contents[0].count(mutant.old)) != 1:
        return {"status": "stale", "seconds": 0.0, "by": f"the old text occurs {count} times"}

    def run() -> dict:
        return run_tests(mutant.tests, folder, limit_s)

    inputs = [mutant.file, mutant.tests, *contents]
    without = results.once(f"(no mutant) {mutant.tests}", inputs, run)
    if without["status"] != "survived":
        return without | {"status": "stale", "by": f"without the mutant: {without['by']}"}
    path.write_text(contents[0].replace(mutant.old, mutant.new))
    try:
        return results.once(mutant.name, [*inputs, mutant.old, mutant.new], run)
    finally:
        path.write_text(contents[0])


def main() -> None:
    """Judges the mutants asked for, and prints a table of the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="words, separated by commas")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run of tests")
    args = parser.parse_args()
    words = args.only.split(",")
    chosen = [m for m in read_table() if any(word in f"{m.name} {m.area}" for word in words)]
    results, counts = Results(args.results), {"killed": 0, "survived": 0, "stale": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tracked(folder)
        for mutant in chosen:
            verdict = judge(mutant, folder, results, args.timeout)
            counts[verdict["status"]] += 1
            print(
                f"{verdict['status']:8}  {mutant.area:12}  {mutant.name:50}"
                f"  {verdict['seconds']:5.1f} s  {verdict['by']}",
                flush=True,
            )
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if not chosen or counts["survived"] or counts["stale"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
