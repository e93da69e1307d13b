"""Make one mistake of scripts/mutants.toml at a time, and check that its tests notice it.

python scripts/mutants.py                      all mistakes; the same command continues
python scripts/mutants.py --only merge,cursor  mistakes with such a word in name or area
python scripts/mutants.py --check              whether each can be made; runs no test

The script makes each mistake in a temporary copy of the repository's tracked files, and runs the
tests that the table names. A mistake is killed if a test fails or runs out of time. It survives if
all tests pass: then a test is missing. It is stale if its place or its old code is not found
exactly once, or if its tests do not pass without it. The exit code is 1 unless all are killed.

Each verdict is a line of the results file. It holds until the table's entry, the mutated file or
one of the test files changes.
"""

import argparse
import ast
import functools
import hashlib
import json
import multiprocessing
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

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "scripts" / "mutants.toml"
SCOPES = (ast.Module, ast.ClassDef)  # whose assignments are constants
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
# Half of a short test's time is importing packages. A server imports them once, and forks.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["jax.numpy", "flax.struct", "optax", "orbax.checkpoint", "hypothesis", "beartype"]


@dataclass(frozen=True)
class Mutant:
    """One mistake, and the tests that should notice it."""

    name: str
    area: str
    where: str  # end of the dotted name of a function, class or constant; unique in the package
    old: str  # a part of its code, whitespace aside
    new: str
    tests: str  # arguments of pytest
    was: str = ""  # the former code, in words, if only a similar mistake can be made today

    @property
    def test_files(self) -> list[str]:
        """The files that contain the tests."""
        return [part.partition("::")[0] for part in shlex.split(self.tests) if ".py" in part]

    def apply(self, folder: Path) -> tuple[Path, str]:
        """Return the file to change, and its text with the mistake.

        Raises:
          LookupError: If the place or the old code is not found exactly once.
        """
        places = definitions(folder)
        found = [places[name] for name in places if name.endswith(f".{self.where}")]
        if len(found) != 1:
            raise LookupError(f"{len(found)} definitions are called {self.where}")
        path, start, end = found[0]
        lines = path.read_text().splitlines(keepends=True)
        code, num_found = re.subn(pattern(self.old), lambda _: self.new, "".join(lines[start:end]))
        if num_found != 1:
            raise LookupError(f"the old code occurs {num_found} times in {self.where}")
        return path, "".join([*lines[:start], code, *lines[end:]])


@functools.cache
def definitions(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """File, first line and end of each function, class and constant, by dotted name."""
    found = {}

    def visit(node: ast.AST, name: str, path: Path) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}"
            elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, SCOPES):
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                if child.value:  # a field that is only declared is no place
                    inner = f"{name}.{ast.unparse(target)}"
            if inner != name:
                first = min([child, *getattr(child, "decorator_list", [])], key=lambda n: n.lineno)
                found[inner] = path, first.lineno - 1, child.end_lineno
            visit(child, inner, path)

    for path in (folder / "adloco_jax").rglob("*.py"):
        module = path.relative_to(folder).with_suffix("")
        visit(ast.parse(path.read_text()), ".".join(module.parts), path)
    return found


def pattern(code: str) -> str:
    """A regular expression for code with any line breaks."""
    words = [re.escape(word) for word in re.findall(r"\w+|[^\w\s]", code)]
    words = [rf"(?:,\s*)?{word}" if word in (r"\)", r"\]", r"\}") else word for word in words]
    before, after = (r"\b" if re.match(r"\w", edge) else "" for edge in (code[0], code[-1]))
    return before + r"\s*".join(words) + after


def read_table() -> list[Mutant]:
    """The mutants of the table, in its order."""
    return [Mutant(**entry) for entry in tomllib.loads(TABLE.read_text())["mutant"]]


class Results:
    """Verdicts by name and hash of their inputs; each is a line of a file."""

    def __init__(self, path: Path):
        """Reads existing lines; an incomplete last line is left out."""
        self._path, self._known = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        text = path.read_text()
        path.write_text(text[: text.rfind("\n") + 1])
        for line in map(json.loads, path.read_text().splitlines()):
            self._known[line["name"], line["key"]] = line

    def once(self, name: str, inputs: list[str], run: Callable[[], dict]) -> dict:
        """Return the recorded verdict on these inputs, or else the result of a new run."""
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
        if (ROOT / name).exists() and name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)  # configs is a link


def run_tests(tests: str, folder: Path, limit_s: float) -> dict:
    """Runs tests on the copy: survived (all pass), killed, or stale (they do not run)."""
    start_s, log = time.perf_counter(), folder / "pytest.log"
    process = PROCESSES.Process(target=_pytest, args=(tests, folder, log))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        status, by = "killed", "timeout"
    else:
        output = log.read_text()
        failed = FAILED.search(output)
        status = {0: "survived", 1: "killed"}.get(process.exitcode, "stale")
        by = failed[1].partition("::")[2] if failed and status == "killed" else ""
        if status == "stale":
            by = f"pytest ends with {process.exitcode}: {output[-200:].strip()}"
    return {"status": status, "seconds": round(time.perf_counter() - start_s, 1), "by": by}


def _pytest(tests: str, folder: Path, log: Path) -> None:
    """Starts a process that runs tests, with its output in a file."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    # Python would take a file's old bytecode where it has changed within a second.
    sys.dont_write_bytecode = True
    rewrites = "ignore::pytest.PytestAssertRewriteWarning"  # of what the server has imported
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-W", rewrites]
    sys.exit(pytest.main([*options, *shlex.split(tests)]))


def judge(mutant: Mutant, folder: Path, results: Results, limit_s: float) -> dict:
    """Judge one mutant, and restore the copy afterwards."""
    try:
        path, mutated = mutant.apply(folder)
        contents = [(folder / name).read_text() for name in mutant.test_files]
    except (LookupError, FileNotFoundError) as error:
        return {"status": "stale", "seconds": 0.0, "by": str(error)}
    original = path.read_text()

    def run() -> dict:
        return run_tests(mutant.tests, folder, limit_s)

    without = results.once(f"(no mutant) {mutant.tests}", [original, mutant.tests, *contents], run)
    if without["status"] != "survived":
        return without | {"status": "stale", "by": f"without the mutant: {without['by']}"}
    path.write_text(mutated)
    try:
        return results.once(mutant.name, [mutated, mutant.tests, *contents], run)
    finally:
        path.write_text(original)


def stale(table: list[Mutant]) -> list[str]:
    """The mistakes that cannot be made in today's code, or whose tests are not there."""
    faults = []
    for mutant in table:
        try:
            path, mutated = mutant.apply(ROOT)
            ast.parse(mutated, str(path))
        except (LookupError, SyntaxError) as error:
            faults.append(f"{mutant.name}: {error}")
        if not mutant.test_files or not all((ROOT / name).is_file() for name in mutant.test_files):
            faults.append(f"{mutant.name}: no such tests: {mutant.tests}")
    names = [mutant.name for mutant in table]
    return faults + [f"{name}: twice in the table" for name in names if names.count(name) > 1]


def main() -> None:
    """Judge the selected mutants, and print a table of the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="words, separated by commas")
    parser.add_argument("--check", action="store_true", help="find the stale ones, run no test")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run of tests")
    args = parser.parse_args()
    if args.check:
        sys.exit("\n".join(stale(read_table())) or 0)
    words = args.only.split(",")
    chosen = [m for m in read_table() if any(word in f"{m.name} {m.area}" for word in words)]
    PROCESSES.set_forkserver_preload(PRELOADED)
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
