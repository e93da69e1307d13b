"""Start runs as processes, and read the logs of their learners."""

import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Two trainers with two workers each, on the quickstart's model and text; batches do not grow.
RUN = """
    quickstart engine.kind=ray ensemble.num_trainers=2 ensemble.num_workers=4 merge.policy=none
    batching.test=constant eval.every_rounds=10 checkpoint.every_s=20 checkpoint.keep=1
""".split()


# -- What learners have logged ---------------------------------------------------------------


def logs(run: Path) -> dict[str, dict[tuple[int, int], list[dict]]]:
    """Read the learners' logs (identity, sequences read), by driver start, learner, incarnation."""
    found: dict = defaultdict(dict)
    for path in sorted((run / "learners").rglob("*.jsonl")):
        if lines := _lines(path, path.stat().st_size):
            number, incarnation = map(int, path.stem.split("-"))
            found[str(path.parent.relative_to(run))][number, incarnation] = lines
    return found


@functools.lru_cache(4096)
def _lines(path: Path, size: int) -> list[dict]:
    """The lines of a log; its size shows whether they have been read before."""
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of one that was killed
            lines.append(json.loads(text))
    return lines


def parts(run: Path) -> dict[tuple[str, int, int], list[dict]]:
    """The parts of streams that have been read, by driver start, trainer and stream."""
    found = defaultdict(list)
    for attempt, incarnations in logs(run).items():
        for line in (line for lines in incarnations.values() for line in lines[1:]):
            found[attempt, line["trainer"], line["stream"]].append(line)
    return found


def audit(run: Path) -> list[str]:
    """Find streams of which a part was left out or counted twice, from the learners' logs alone.

    A part counts if the next part of its stream starts where it ends. Parts that count must follow
    one another without a gap, from the stream's beginning (or a checkpoint's position) to the last
    part that was read.
    """
    faults = []
    for (attempt, _, stream), lines in parts(run).items():
        ranges = {(line["start"], line["start"] + line["count"]) for line in lines}
        for pair in itertools.pairwise(sorted({start for start, _ in ranges})):
            if pair not in ranges:
                faults.append(f"{attempt}: stream {stream}: {pair[0]} to {pair[1]}")
    return faults


def first_counted_s(run: Path, stream: tuple[int, int], after_s: float) -> float | None:
    """The time at which the first counted part of a stream was read after a time; None: not yet."""
    found = []
    for (_, *where), lines in parts(run).items():
        if tuple(where) == stream:
            starts = {line["start"] for line in lines}
            found += [e["time"] for e in lines if e["start"] + e["count"] in starts]
    return min((t for t in found if t > after_s), default=None)


def living(run: Path) -> dict[int, dict]:
    """The present processes of learners, by number: pid, last stream, number of rounds."""
    attempts = logs(run)
    incarnations = attempts[max(attempts)] if attempts else {}
    found = {}
    for number, incarnation in incarnations:
        first, *rest = incarnations[number, incarnation]
        if incarnation == max(each for n, each in incarnations if n == number) and _is_there(
            first["pid"]
        ):
            streams = {(line["trainer"], line["stream"]) for line in rest[-1:]}
            found[number] = {"pid": first["pid"], "streams": streams, "rounds": len(rest)}
    return found


def _is_there(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"ray::" in command or b"\0join\0" in command
    except OSError:
        return False


def is_of(pid: int, run: Path) -> bool:
    """Whether a process belongs to a cluster that a run's driver has started."""
    return cluster_folder(pid, run) is not None


def cluster_folder(pid: int, run: Path) -> str | None:
    """The folder of a run's cluster, if a process belongs to one."""
    with contextlib.suppress(OSError):
        environ = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        if f"CHAOS={run}" in environ:
            found = re.search("RAY_TMPDIR=(/tmp/adloco-[^ ]*)", " ".join(environ))
            return found and found[1]
    return None


def with_open_files(folder: str) -> list[int]:
    """The processes that have open files in a folder."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            files = os.listdir(f"/proc/{pid}/fd")
            if any(os.readlink(f"/proc/{pid}/fd/{file}").startswith(folder) for file in files):
                found.append(int(pid))
    return found


def left_running(run: Path) -> int:
    """The number of processes of clusters that a run's driver has started."""
    return sum(is_of(int(pid), run) for pid in os.listdir("/proc") if pid.isdecimal())


# -- Runs ------------------------------------------------------------------------------------


def keys_of(options: list[str]) -> dict[str, str]:
    """The settings of a run; a later option replaces an earlier one."""
    return dict(option.split("=", 1) for option in [*RUN[1:], *options])


@contextlib.contextmanager
def driver(run: Path, options: list[str]) -> Iterator[subprocess.Popen]:
    """Start a run's process, and end it when the context ends."""
    command = [sys.executable, "-m", "adloco_jax.main", "train", RUN[0], "--workdir", str(run)]
    command += [f"--config.{key}={value}" for key, value in keys_of(options).items()]
    run.parent.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CHAOS": str(run)}
    with open(run.parent / f"{run.name}.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def events(run: Path, name: str) -> list[dict]:
    """The ledger's lines of one kind."""
    path = run / "ledger.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = (json.loads(line) for line in lines if line.endswith("}"))
    return [event for event in found if event["event"] == name]


def wait_for(what, process: subprocess.Popen, seconds: float):
    """Wait until a function returns a true value; None if the run ends or time is up."""
    until_s = time.time() + seconds
    while time.time() < until_s and process.poll() is None:
        if found := what():
            return found
        time.sleep(0.25)
    return None
