"""Kill runs, fill disks and damage files, and check that nothing is lost (studies/reliability.md).

python scripts/faults.py --scale long     takes hours; the same command continues a stopped test
python scripts/faults.py --rows K1,K6     some rows only

Every trial is a line of `<folder>/results.jsonl`. A trial passes if the deterministic ledger lines,
every array of the last checkpoint and the control equal those of the uninterrupted run, bit for
bit. A trial that fails keeps its folder.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from filelock import FileLock
from jax.sharding import SingleDeviceSharding

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from adloco_jax.run.kept import checkpoint  # noqa: E402
from adloco_jax.run.kept.ledger import read  # noqa: E402
from probes.crashes import POINTS  # noqa: E402
from scripts.golden import deterministic_lines  # noqa: E402

Trial = tuple[bool, str]  # whether it passed, and what was done
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_ENVIRONMENT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # On a CPU every process except the first compiles at each start, which takes most of a trial.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # Saves a third of the compile time of jax 0.10 on CPUs; later versions ignore unknown flags.
    "XLA_FLAGS": os.environ.get(
        "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    ),
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


@dataclasses.dataclass
class Bench:
    """The folder of trials, and the uninterrupted run."""

    folder: Path
    random: random.Random
    count: int = 0

    def fresh(self) -> Path:
        """A folder for the next run."""
        self.count += 1
        path = self.folder / f"run-{self.count}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def start(
        self,
        workdir: Path,
        *overrides: str,
        limit: int = 0,
        program: Sequence[str] = ("-m", "adloco_jax.main"),
        **environment: str,
    ):
        """Starts or resumes the run in a folder; `limit` bounds the size of a file, in bytes."""
        words = (f"--config={ROOT}/probes/faults.py", f"--workdir={workdir}", *overrides)
        restrict = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        return subprocess.Popen(
            [sys.executable, *program, *words],
            env=os.environ | _ENVIRONMENT | {_CACHE: str(self.folder / "programs")} | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=restrict if limit else None,
        )

    def run(self, workdir: Path, *overrides: str, **others) -> tuple[int, str]:
        """Exit code and standard error of an undisturbed run."""
        process = self.start(workdir, *overrides, **others)
        _, err = process.communicate(timeout=600)
        return process.returncode, err

    @functools.cached_property
    def reference(self) -> tuple[dict, float]:
        """The final state of the uninterrupted run, and its seconds with compiled programs."""
        for _ in range(2):
            workdir, start_s = self.fresh(), time.perf_counter()
            code, err = self.run(workdir)
            if code:
                raise RuntimeError(f"the uninterrupted run ended with {code}: {err}")
        return state_of(workdir), time.perf_counter() - start_s

    @functools.cached_property
    def reference_of_two(self) -> dict:
        """The final state of the uninterrupted run of two processes."""
        workdir = self.fresh()
        codes, text = self.ends_together(workdir)
        if codes != [0, 0]:
            raise RuntimeError(f"the uninterrupted run ended with {codes}: {text}")
        return state_of(workdir)

    def ends_together(self, workdir: Path, **others) -> tuple[list[int], str]:
        """Exit codes and standard error of two undisturbed processes."""
        with self.together(workdir, **others) as group:
            said = [process.communicate(timeout=600)[1] for process in group]
        return [process.returncode for process in group], "\n".join(said)

    def ends_alike(self, workdir: Path) -> str:
        """Resume the run to its end; return the differences from the uninterrupted run."""
        code, err = self.run(workdir)
        if code or "Traceback" in err:
            return f"ended with {code}: {err.strip()[-300:]}"
        return differences(state_of(workdir), self.reference[0])

    @contextlib.contextmanager
    def together(
        self, workdir: Path, *, watchdog_s: float = 120, **how
    ) -> Iterator[list[subprocess.Popen]]:
        """Start the run as two processes, and kill them when the context ends."""
        words = [f"--config.checkpoint.watchdog_s={watchdog_s}", "--num_processes=2"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            words.append(f"--coordinator=127.0.0.1:{probe.getsockname()[1]}")
        group = [self.start(workdir, *words, f"--process_id={n}", **how) for n in (0, 1)]
        try:
            yield group
        finally:
            for process in group:
                process.kill()  # a stopped process reacts to no other signal
                process.wait()

    def half_way(self) -> Path:
        """Copy a run that was killed after its fifth round, with two checkpoints."""
        base, copy = self.folder / "half", self.fresh()
        if not base.exists():
            self.run(base, program=at("round.decided:5"))
        shutil.copytree(base, copy)
        return copy


def state_of(workdir: Path) -> dict:
    """The data that must be equal at the end of two runs."""
    newest = workdir / "checkpoints" / str(checkpoint.list_rounds(workdir / "checkpoints")[0])
    path, here = newest.absolute() / "arrays", SingleDeviceSharding(jax.devices()[0])
    reader = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        reader.metadata(path).item_metadata.tree,
    )
    arrays = reader.restore(path, args=ocp.args.StandardRestore(template))
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {
        "ledger": deterministic_lines(read(workdir / "ledger.jsonl")),
        "control": checkpoint.read_host(newest)["control"],
        "arrays": {
            jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
            for path, leaf in leaves
        },
    }


def at(fault: str) -> tuple[str, ...]:
    """The program that is killed, or whose write fails, at a point of `probes.crashes`."""
    return "-m", "probes.crashes", fault


def differences(found: dict, expected: dict) -> str:
    """The names of the data that differ at the ends of two runs; empty if all are equal."""
    return ", ".join(name for name in expected if found[name] != expected[name])


def verdict(difference: str, what: str) -> Trial:
    """A trial's result: it has passed if nothing differs."""
    return not difference, f"{what} : {difference}" if difference else what


# -- trials: one case of a row each -------------------------------------------------------------


def k1(bench: Bench, _: int) -> Iterator[Trial]:
    """SIGKILL at a random time and the same command again, until the run ends."""
    _, duration_s = bench.reference
    workdir, kills = bench.fresh(), []
    while True:
        process = bench.start(workdir)
        after_s = bench.random.uniform(0, duration_s)
        try:
            process.communicate(timeout=after_s)
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills.append(round(after_s, 2))
    difference = bench.ends_alike(workdir)
    for kill in kills:
        yield verdict(difference, f"killed after {kill} s, {workdir}")


def k2(bench: Bench, case: tuple[str, int]) -> Iterator[Trial]:
    """SIGKILL at every named point, at its first three arrivals."""
    crash = f"{case[0]}:{case[1]}"
    workdir, code, _ = _with_fault(bench, crash)
    if code == 0 and case[1] > 1:
        return  # the point has fewer arrivals
    difference = bench.ends_alike(workdir) if code == -9 else f"never reached ({code})"
    yield verdict(difference, f"{crash}, {workdir}")


def _with_fault(bench: Bench, fault: str) -> tuple[Path, int, str]:
    """Run with a fault; return folder, exit code, stderr. Some faults need a resumed run."""
    workdir = bench.fresh()
    code, err = bench.run(workdir, program=at(fault))
    if code == 0 and not _events(workdir, "fault"):
        workdir = bench.half_way()
        code, err = bench.run(workdir, program=at(fault))
    return workdir, code, err


def k3(bench: Bench, _: int) -> Iterator[Trial]:
    """Twenty kills in one long run, one to three seconds after each start of its rounds."""
    longer = "--config.num_rounds=400"
    expected = bench.fresh()
    bench.run(expected, longer)
    workdir, reached = bench.fresh(), []
    for _ in range(20):
        process = bench.start(workdir, longer)
        _await_starts(process, workdir, 1 + len(_events(workdir, "start")))
        time.sleep(bench.random.uniform(1, 3))
        process.kill()
        process.communicate()
        rounds = checkpoint.list_rounds(workdir / "checkpoints")
        reached.append(max(rounds, default=0))
    bench.run(workdir, longer)
    same = state_of(workdir) == state_of(expected)
    grew = all(a <= b for a, b in itertools.pairwise(reached)) and reached[-1] > 0
    for at in reached:
        yield same and grew, f"killed with round {at} saved, {workdir}"


def k4(bench: Bench, _: int) -> Iterator[Trial]:
    """SIGTERM or SIGINT during a run, once or twice within a second."""
    workdir = bench.fresh()
    process = bench.start(workdir)
    _await_starts(process, workdir, 1)
    number = bench.random.choice((signal.SIGTERM, signal.SIGINT))
    twice = bench.random.random() < 0.5
    time.sleep(bench.random.uniform(0, 2.5))
    process.send_signal(number)
    if twice:
        time.sleep(bench.random.uniform(0.05, 0.5))
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    allowed = (75, 0, 128 + number) if twice else (75, 0)
    what = f"{number.name}{' twice' * twice} gave {process.returncode}, {workdir}"
    yield verdict(bench.ends_alike(workdir) + _unexpected(process.returncode, err, allowed), what)


def _unexpected(code: int, err: str, allowed: Sequence[int]) -> str:
    """Describe an unexpected exit code or output; empty if both are as expected."""
    wrong = code not in allowed or "Traceback" in err
    return f" ended with {code}: {err.strip()[-300:]}" if wrong else ""


def k5(bench: Bench, case: tuple[str, str] | int) -> Iterator[Trial]:
    """A full disk and an I/O error at every point, and a limit on the size of files."""
    if isinstance(case, int):
        workdir, allowed, fault = bench.fresh(), (5,), f"files of at most {case} bytes"
        code, err = bench.run(workdir, limit=case)
    else:
        name, error = case
        fault = f"{error} at {name}"
        allowed = (5,) if name.split(".")[0] in ("save", "ledger", "config") else (0, 5)
        workdir, code, err = _with_fault(bench, f"{name}:1:{error}")
    difference = bench.ends_alike(workdir) + _unexpected(code, err, allowed)
    yield verdict(difference, f"{fault}, gave {code}, {workdir}")


def k6(bench: Bench, number: int) -> Iterator[Trial]:
    """Any file of the newest checkpoint truncated, emptied, deleted, extended, flipped, swapped."""
    base, copy = bench.folder / "intact", bench.folder / "mutated"
    if number == 0 or not base.exists():
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(bench.half_way() / "checkpoints", base)
    newest, older = checkpoint.list_rounds(base)[:2]
    files = sorted(
        file.relative_to(base) for file in (base / str(newest)).rglob("*") if file.is_file()
    )
    for file, kind in itertools.product(files, (*DAMAGES, "flip")):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy)
        if not damage(copy / file, kind, bench.random, copy / bench.random.choice(files)):
            continue
        found = checkpoint.read_newest(copy, lambda path: int(path.name))
        named = found is not None and len(found[1]) == 1 and f"/{newest}/" in found[1][0]
        yield named and found is not None and found[0] == older, f"{kind} {file}: {found}"


def k6_command(bench: Bench, file: str) -> Iterator[Trial]:
    """K6 by command line: the run falls back, names the file, and ends as the uninterrupted run."""
    workdir = bench.half_way()
    newest = checkpoint.list_rounds(workdir / "checkpoints")[0]
    damage(workdir / "checkpoints" / str(newest) / file, "flip", bench.random)
    difference = bench.ends_alike(workdir)
    faults = [f["cause"] for f in _events(workdir, "fault")]
    if not any(f"{newest}/{file}" in cause for cause in faults):
        difference += f" {file} not named: {faults}"
    yield verdict(difference, f"{file} flipped, {workdir}")


def k7(bench: Bench, what: str) -> Iterator[Trial]:
    """All checkpoints damaged or deleted: the run is not restarted, and nothing is written."""
    workdir = bench.half_way()
    for number in checkpoint.list_rounds(workdir / "checkpoints"):
        folder = workdir / "checkpoints" / str(number)
        if what == "gone":
            shutil.rmtree(folder)
        else:
            damage(folder / "host.json", what, bench.random)
    before = _tree(workdir)
    code, err = bench.run(workdir)
    passed = code == 3 and "Traceback" not in err and _tree(workdir) == before
    yield passed, f"all checkpoints {what} gave {code}, {workdir}"


def k9(bench: Bench, what: str) -> Iterator[Trial]:
    """Folders that cannot hold a run, two runs in one folder, and the lock of a dead process."""
    if what == "a file in the folder's place":
        workdir = bench.fresh()
        workdir.write_text("")
        code, err = bench.run(workdir)
        yield code == 2 and "Traceback" not in err, f"{what} gave {code}"
    elif what == "checkpoints elsewhere":
        workdir, elsewhere = bench.half_way(), bench.folder / "elsewhere"
        shutil.move(workdir / "checkpoints", elsewhere)
        (workdir / "checkpoints").symlink_to(elsewhere)
        code, err = bench.run(workdir)
        shutil.rmtree(elsewhere)
        yield code == 2 and "symbolic link" in err, f"{what} gave {code}"
    else:
        workdir = bench.half_way()
        (workdir / ".lock").write_text("999999")
        process = bench.start(workdir)
        _await_starts(process, workdir, 2)
        process.send_signal(signal.SIGSTOP)  # still there, however long the second one takes
        code, err = bench.run(workdir)
        process.send_signal(signal.SIGCONT)
        process.communicate()
        yield code == 2 and "another process" in err, f"a second run in the folder gave {code}"
        yield verdict(bench.ends_alike(workdir), f"{what}, {workdir}")


def k10(bench: Bench, how: str) -> Iterator[Trial]:
    """A run that is copied, or packed and unpacked, continues in its new folder."""
    workdir = bench.half_way()
    if how == "packed":
        packed, moved = bench.folder / "run.tar", bench.fresh()
        with tarfile.open(packed, "w") as archive:
            archive.add(workdir, moved.name)
        with tarfile.open(packed) as archive:
            archive.extractall(bench.folder, filter="data")
        workdir = moved
    yield verdict(bench.ends_alike(workdir), f"{how}, {workdir}")


def r3(bench: Bench, devices: tuple[int, int]) -> Iterator[Trial]:
    """Another number of devices: the same decisions, losses within 1e-5."""
    device_count = "--xla_force_host_platform_device_count"
    before, after = (f"{_ENVIRONMENT['XLA_FLAGS']} {device_count}={n}" for n in devices)
    workdir = bench.fresh()
    bench.run(workdir, program=at("round.decided:5"), XLA_FLAGS=before)
    code, err = bench.run(workdir, XLA_FLAGS=after)
    measured = {"perplexity", "noise", "signal", "test_value", "pseudo_grad_norm"}
    measured |= {"train_loss", "train_losses", "loss", "loss_before", "loss_after", "barrier"}
    lines = deterministic_lines(read(workdir / "ledger.jsonl")) if code == 0 else []
    expected = bench.reference[0]["ledger"]
    alike = len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=False):
        alike &= all(line[k] == other[k] for k in other.keys() - measured)
        losses = other.keys() & {"train_loss", "loss"}
        alike &= all(np.allclose(line[k], other[k], rtol=1e-5) for k in losses)
    yield code == 0 and alike, f"{devices[0]} to {devices[1]} devices, {workdir} {err[-300:]}"


def p1(bench: Bench, number: int) -> Iterator[Trial]:
    """One of two processes killed or stopped: the other ends; the same commands, the same end."""
    kind, turn = number % 3, number // 3
    victim, sign = (kind, signal.SIGKILL) if kind < 2 else (turn % 2, signal.SIGSTOP)
    after = bench.random.randrange(1, 6)
    workdir = bench.fresh()
    with bench.together(workdir, watchdog_s=_WATCHDOG_S) as group:
        while len(_events(workdir, "checkpoint")) < after and group[0].poll() is None:
            time.sleep(0.02)
        time.sleep(bench.random.random() / 5)
        start_s = time.monotonic()
        group[victim].send_signal(sign)
        code = group[1 - victim].wait(timeout=300)
        seconds = time.monotonic() - start_s
    in_time = seconds <= 5 + (_WATCHDOG_S if sign == signal.SIGSTOP else _HEARTBEAT_S)
    codes, difference = bench.ends_together(workdir)
    if codes == [0, 0]:
        difference = differences(state_of(workdir), bench.reference_of_two)
    what = f"{sign.name} of process {victim} after round {after}, the other: {code} in"
    yield (not difference and in_time), f"{what} {seconds:.1f} s : {difference[-600:]}"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Two processes started by hand, and the expected result."""

    what: str
    codes: tuple[int, ...]
    word: str = ""  # text that each process must print
    own: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # further options of each process
    late_s: float = 0  # seconds between the two starts
    without: int | None = None  # a process that is not started
    take_port: bool = False

    def __str__(self):
        return self.what


def _meetings(bench: Bench) -> list[Meeting]:
    for name in "ab":
        (bench.folder / name).write_text(f"Once upon a time there was an {name}.\n\n" * 4000)
    a, b, none = (
        ("--config.data.source=text", f"--config.data.path={bench.folder / name}")
        for name in ("a", "b", "none")
    )
    there = (f"--workdir={bench.folder / 'there'}",)
    change = ("--config.inner.learning_rate=0.5",)
    return [
        Meeting("the second comes five seconds late", (0,), late_s=5),
        Meeting("the port is taken", (5,), take_port=True),
        Meeting("other data", (2, 2), "the data", (a, b)),
        Meeting("no data", (3, 3), "none", (a, none)),
        Meeting("another folder", (2, 2), "not the folder", ((), there)),
        Meeting("a run is there", (2, 2), "another process runs there", (there, there)),
        Meeting("the second never comes", (5,), without=1),
        Meeting("the first never comes", (5,), without=0),
        Meeting("another config", (2, 2), "inner.learning_rate", ((), change)),
    ]


def p2(bench: Bench, meeting: Meeting) -> Iterator[Trial]:
    """A process starts late or never, its port is in use, or its arguments differ."""
    workdir, start_s = bench.fresh(), time.monotonic()
    there = bench.folder / "there"
    there.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        if meeting.what == "a run is there":
            stack.enter_context(FileLock(there / ".lock"))
        held = stack.enter_context(socket.socket())
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.listen() if meeting.take_port else held.close()
        group = []
        for number, own in enumerate(meeting.own):
            if number == meeting.without:
                continue
            limit_s = 120 if meeting.codes == (0,) else 15
            words = (f"--coordinator=127.0.0.1:{port}", "--num_processes=2", *own)
            words += (f"--process_id={number}", f"--meeting_s={limit_s}")
            group.append(bench.start(workdir, *words))
            time.sleep(meeting.late_s)
        said = [process.communicate(timeout=300)[1] for process in group]
    ended = tuple(process.returncode for process in group)
    # If they never meet, jax decides how the second process ends.
    judged = len(meeting.codes)
    passed = ended[:judged] == meeting.codes and all(meeting.word in text for text in said)
    passed &= "Traceback" not in "".join(said[:judged])
    seconds = time.monotonic() - start_s
    yield passed, f"{meeting}: exit {ended} in {seconds:.0f} s, {' / '.join(said)[-400:]}"


def m2(bench: Bench, number: int) -> Iterator[Trial]:
    """One of two processes runs out of memory: both end with 5 and the batch size to set."""
    workdir, start_s = bench.fresh(), time.monotonic()
    fake = _OUT_OF_MEMORY.format(process=number % 2, call=1 + number % 6)
    first = "--config.batching.initial_batch_size=2"  # no limit below the first batch is advised
    codes, text = bench.ends_together(workdir, program=["-c", fake, first])
    seconds = time.monotonic() - start_s
    passed = codes == [5, 5] and "set batching.max_batch_size to 2" in text and seconds < 60
    yield passed, f"process {number % 2}: exit {codes}, {seconds:.0f} s {text[-300:]}"


# Stands in for the main program: one process's n-th round finds no memory at the full size.
_OUT_OF_MEMORY = """
import jax
from adloco_jax import main
from adloco_jax.engine.local import LocalEngine
calls, real = 0, LocalEngine._dispatch

def dispatch(engine, state, batch):
    global calls
    calls += 1
    if jax.process_index() == {process} and calls == {call} and state.control.max_batch_size > 2:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory (a fake)")
    return real(engine, state, batch)

LocalEngine._dispatch = dispatch
main.command()
"""

_WATCHDOG_S = 20
_HEARTBEAT_S = 100  # after which JAX ends a process whose coordinator or peer has gone


class Row(NamedTuple):
    """Trials of one kind."""

    trial: Callable[..., Iterator[Trial]]  # of the bench and a case
    cases: Callable[[Bench], Iterable]  # in random order
    short: int  # trials
    long: int


def _numbers(bench: Bench) -> Iterable[int]:
    return itertools.count()


def _shuffled(*choices: Sequence) -> Callable[[Bench], list]:
    def cases(bench: Bench) -> list:
        listed = list(itertools.product(*choices))
        return bench.random.sample(listed, len(listed))

    return cases


def _full_disks(bench: Bench) -> list:
    return [*_shuffled(sorted(POINTS), ("ENOSPC", "EIO"))(bench), 1000, 5000, 9000]


_FILES = ("manifest.json", "host.json", "arrays/manifest.ocdbt")
_FOLDERS = ("a file in the folder's place", "checkpoints elsewhere", "a dead process's lock")
ROWS = {
    "K1": Row(k1, _numbers, 5, 300),
    "K2": Row(k2, _shuffled(sorted(POINTS), (1, 2, 3)), 1, 10**9),
    "K3": Row(k3, _numbers, 0, 20),
    "K4": Row(k4, _numbers, 2, 50),
    "K5": Row(k5, _full_disks, 2, 10**9),
    "K6": Row(k6, _numbers, 60, 540),
    "K6 by command": Row(k6_command, lambda _: _FILES, 1, 3),
    "K7": Row(k7, lambda _: ("flip", "empty", "gone"), 1, 3),
    "K9": Row(k9, lambda _: _FOLDERS, 4, 4),
    "K10": Row(k10, lambda _: ("copied", "packed"), 1, 2),
    "R3": Row(r3, lambda _: ((1, 2), (2, 1), (4, 2)), 0, 3),
    "P1": Row(p1, _numbers, 0, 60),
    "P2": Row(p2, _meetings, 5, 9),
    "M2": Row(m2, _numbers, 1, 20),
}


def _events(workdir: Path, name: str) -> list[dict]:
    path = workdir / "ledger.jsonl"
    return [e for e in read(path) if e["event"] == name] if path.exists() else []


def _await_starts(process: subprocess.Popen, workdir: Path, count: int) -> None:
    """Wait until the ledger has a number of `start` lines, or the process has ended."""
    while len(_events(workdir, "start")) < count and process.poll() is None:
        time.sleep(0.05)


def _tree(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _flip(content: bytes, rng: random.Random) -> bytes:
    index = rng.randrange(len(content))
    flipped = content[index] ^ (1 << rng.randrange(8))
    return content[:index] + bytes([flipped]) + content[index + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "append": lambda content, rng: content + rng.randbytes(rng.randint(1, 64)),
    "empty": lambda content, rng: b"",
    "truncate": lambda content, rng: content[: rng.randrange(len(content))],
    "flip": _flip,
    "delete": lambda content, rng: b"",
    "swap": lambda content, rng: content,
}


def damage(path: Path, kind: str, rng: random.Random, other: Path | None = None) -> bool:
    """Damage a file, or swap it with another; False if the content of the files is unchanged."""
    content = path.read_bytes()
    if kind == "delete":
        path.unlink()
        return True
    if not content and kind in ("truncate", "flip"):
        return False
    changed = DAMAGES[kind](content, rng)
    if kind == "swap" and other is not None:
        changed = other.read_bytes()
        other.write_bytes(content)
    path.write_bytes(changed)
    return changed != content


def trials(bench: Bench, row: str, number: int, results: list[dict]) -> Iterator[dict]:
    """Run the trials that a row's results lack, up to a total number; yield a line for each."""
    of_row = [result for result in results if result["row"] == row]
    done, left = {result["case"] for result in of_row}, number - len(of_row)
    for case in ROWS[row].cases(bench):
        if left <= 0:  # before a trial too many is run
            return
        if str(case) not in done:
            for passed, what in itertools.islice(ROWS[row].trial(bench, case), left):
                yield {"row": row, "case": str(case), "passed": passed, "what": what}
                left -= 1


def table(results: list[dict]) -> str:
    """Make a table with a line per row: number of trials, number passed, description."""
    lines = ["| row | trials | passed | |", "|---|---|---|---|"]
    for name, row in ROWS.items():
        passed = [result["passed"] for result in results if result["row"] == name]
        if passed:
            about = (row.trial.__doc__ or "").splitlines()[0]
            lines.append(f"| {name} | {len(passed)} | {sum(passed)} | {about} |")
    return "\n".join(lines)


def main() -> int:
    """Run the selected rows, without the trials that the results already have."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=("short", "long"), default="long")
    parser.add_argument("--rows", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--trials", type=int, help="of each row, in place of the scale's")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "results.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    bench = Bench(options.folder.absolute(), random.Random(options.seed + len(results)))
    for row in options.rows.split(","):
        number = options.trials or getattr(ROWS[row], options.scale)
        for result in trials(bench, row, number, results):
            results.append(result)
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print("passed" if result["passed"] else "FAILED", row, result["what"], flush=True)
            failed = " ".join(r["what"] for r in results if not r["passed"])
            for workdir in bench.folder.glob("run-*"):
                if result["passed"] and str(workdir) not in failed:
                    shutil.rmtree(workdir, ignore_errors=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.platform()}")
    print(table(results))
    return int(not all(result["passed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
