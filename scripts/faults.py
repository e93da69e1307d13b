"""Kills, starves and corrupts real runs, and checks that nothing was lost: docs/RELIABILITY.md.

python scripts/faults.py --scale long     hours; stopped and started again, it goes on
python scripts/faults.py --rows K1,K6     some rows only

Every trial is a line of `<folder>/results.jsonl`. A run has come through if its deterministic
ledger lines, every array of its last checkpoint and its control equal the uninterrupted run's,
bit for bit. What fails keeps its folder.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from filelock import FileLock
from jax.sharding import SingleDeviceSharding

from adloco_jax.run import checkpoint
from adloco_jax.run.ledger import deterministic_lines, read

ROOT = Path(__file__).resolve().parents[1]
Trial = tuple[bool, str]  # whether it passed, and what was done
# Spares jax 0.10's compiler for CPUs a third of its time; later ones pass over what they lack.
_XLA_FLAGS = os.environ.get(
    "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


@dataclasses.dataclass
class Bench:
    """Where trials run, and the run they are compared with."""

    folder: Path
    random: random.Random
    done: set[str] = dataclasses.field(default_factory=set)  # cases that need no second trial
    num_done: int = 0  # trials of the row
    count: int = 0

    def fresh(self) -> Path:
        """A folder for the next run."""
        self.count += 1
        path = self.folder / f"run-{self.count}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def start(self, workdir: Path, *overrides: str, limit: int = 0, **environment: str):
        """Starts the run in a folder, or goes on with it."""
        command = [sys.executable, "-m", "adloco_jax.main", f"--config={ROOT}/configs/faults.py"]
        sizes = (limit, limit)
        return subprocess.Popen(
            [*command, f"--workdir={workdir}", *overrides],
            env=os.environ | self.settings() | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, sizes))
            if limit
            else None,
        )

    def settings(self) -> dict[str, str]:
        """Of the environment of every process."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            # On a CPU every process but the first compiles again at each start: most of a trial.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "XLA_FLAGS": _XLA_FLAGS,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }

    def run(self, workdir: Path, *overrides: str, **others) -> tuple[int, str]:
        """Exit code and standard error of a run that is left alone."""
        process = self.start(workdir, *overrides, **others)
        _, err = process.communicate(timeout=600)
        return process.returncode, err

    @functools.cached_property
    def reference(self) -> tuple[dict, float]:
        """How the uninterrupted run ends, and its seconds with warm programs."""
        for _ in range(2):
            workdir, start_s = self.fresh(), time.perf_counter()
            code, err = self.run(workdir)
            if code:
                raise RuntimeError(f"the uninterrupted run ended with {code}: {err}")
        return state_of(workdir), time.perf_counter() - start_s

    def ends_alike(self, workdir: Path) -> str:
        """Lets the run go on to its end; what differs from the uninterrupted one, or nothing."""
        code, err = self.run(workdir)
        if code or "Traceback" in err:
            return f"ended with {code}: {err.strip()[-300:]}"
        return self.differs(workdir, self.reference)

    def differs(self, workdir: Path, reference: tuple[dict, float]) -> str:
        """In what the end of a run differs from another's; empty if in nothing."""
        ours, theirs = state_of(workdir), reference[0]
        return ", ".join(name for name in theirs if ours[name] != theirs[name])

    def together(
        self,
        workdir: Path,
        *,
        watchdog_s: float = 120,
        program: Sequence[str] = ("-m", "adloco_jax.main"),
        **environment: str,
    ) -> "Group":
        """The run as two supervised processes."""
        words = (f"--config={ROOT}/configs/faults.py", f"--workdir={workdir}")
        command = (sys.executable, *program, *words)
        return Group(
            subprocess.Popen(
                [sys.executable, "-c", _SUPERVISE, str(watchdog_s), str(workdir), *command],
                env=os.environ | self.settings() | environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    @functools.cached_property
    def reference_of_two(self) -> tuple[dict, float]:
        """As `reference`, of two processes."""
        for _ in range(2):
            workdir, start_s = self.fresh(), time.perf_counter()
            with self.together(workdir) as group:
                code = group.process.wait(timeout=600)
            if code:
                raise RuntimeError(f"the uninterrupted run ended with {code}: {group.text}")
        return state_of(workdir), time.perf_counter() - start_s

    def half_way(self) -> Path:
        """A run killed after its fifth round, with two checkpoints; made once, then copied."""
        base, copy = self.folder / "half", self.fresh()
        if not base.exists():
            self.run(base, ADLOCO_CRASH_AT="round.decided:5")
        shutil.copytree(base, copy)
        return copy


_SUPERVISE = """
import sys
from adloco_jax.run.supervise import supervise
watchdog_s, workdir, *command = sys.argv[1:]
sys.exit(supervise(command, workdir, num_processes=2, watchdog_s=float(watchdog_s)))
"""


class Group:
    """Two supervised processes, and what is said of them, with the time."""

    def __init__(self, process: subprocess.Popen):
        """Listens to the supervisor."""
        self.process = process
        self.said: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self._thread.join(5)

    @property
    def text(self) -> str:
        """All that was said so far."""
        return "\n".join(line for _, line in self.said)

    def member(self, number: int) -> int:
        """The process with a number, of those that run now."""
        pid = self.process.pid
        while True:
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(OSError):  # it has just ended
                    words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                    if f"--process_id={number}".encode() in words:
                        return int(child)
            time.sleep(0.01)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.said.append((time.monotonic(), line.rstrip()))


def state_of(workdir: Path) -> dict:
    """What must be equal at the end of two runs."""
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


def points() -> list[str]:
    """Every named crash point in the package's source."""
    names = set()
    for path in (ROOT / "adloco_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "hit":
                names.add(ast.literal_eval(node.args[0]))
    return sorted(names)


def verdict(difference: str, what: str) -> Trial:
    """Passed, if nothing differs."""
    return not difference, f"{what} : {difference}" if difference else what


# -- kills and storage --------------------------------------------------------------------------


def _in_any_order(bench: Bench, *choices: Sequence) -> list[tuple]:
    """All combinations, so that the few trials of the short scale are others every time."""
    combinations = list(itertools.product(*choices))
    return bench.random.sample(combinations, len(combinations))


def k1(bench: Bench) -> Iterator[Trial]:
    """SIGKILL at a random time, restart, kill again, until the run comes to its end."""
    _, duration_s = bench.reference
    while True:
        workdir, kills = bench.fresh(), []
        while True:
            process = bench.start(workdir)
            after_s = bench.random.uniform(0, duration_s)
            try:
                process.wait(after_s)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills.append(round(after_s, 2))
        process.communicate()
        difference = bench.ends_alike(workdir)
        for kill in kills:
            yield verdict(difference, f"killed after {kill} s, {workdir}")


def k2(bench: Bench) -> Iterator[Trial]:
    """SIGKILL at every named point, at its first three arrivals."""
    for name, arrival in _in_any_order(bench, points(), (1, 2, 3)):
        if f"{name}:{arrival}" in bench.done:
            continue
        crash = {"ADLOCO_CRASH_AT": f"{name}:{arrival}"}
        workdir = bench.fresh()
        code, _ = bench.run(workdir, **crash)
        if code == 0:  # a point that only a resumed run comes by
            workdir = bench.half_way()
            code, _ = bench.run(workdir, **crash)
        if code == 0 and arrival > 1:
            continue  # it has fewer arrivals
        difference = bench.ends_alike(workdir) if code == -9 else f"never reached ({code})"
        yield verdict(difference, f"{name}:{arrival}, {workdir}")


def k3(bench: Bench) -> Iterator[Trial]:
    """Twenty kills in one long run, one to three seconds after each start of its rounds."""
    longer = "--config.num_rounds=400"
    expected = bench.fresh()
    bench.run(expected, longer)
    workdir, reached = bench.fresh(), []
    for _ in range(20):
        process = bench.start(workdir, longer)
        starts = len(_events(workdir, "start"))
        while len(_events(workdir, "start")) == starts and process.poll() is None:
            time.sleep(0.05)
        time.sleep(bench.random.uniform(1, 3))
        process.kill()
        process.communicate()
        rounds = checkpoint.list_rounds(workdir / "checkpoints")
        reached.append(max(rounds, default=0))
    bench.run(workdir, longer)
    same = state_of(workdir) == state_of(expected)
    grew = all(a <= b for a, b in zip(reached, reached[1:], strict=False)) and reached[-1] > 0
    for at in reached:
        yield same and grew, f"killed with round {at} saved, {workdir}"


def k4(bench: Bench) -> Iterator[Trial]:
    """SIGTERM or SIGINT while it runs, once or twice within a second."""
    while True:
        workdir = bench.fresh()
        process = bench.start(workdir)
        while not _events(workdir, "start") and process.poll() is None:
            time.sleep(0.05)
        number = bench.random.choice((signal.SIGTERM, signal.SIGINT))
        twice = bench.random.random() < 0.5
        time.sleep(bench.random.uniform(0, 2.5))
        process.send_signal(number)
        if twice:
            time.sleep(bench.random.uniform(0.05, 0.5))
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
        code = process.returncode
        allowed = (75, 0, 128 + number) if twice else (75, 0)
        difference = bench.ends_alike(workdir)
        if code not in allowed or "Traceback" in err:
            difference += f" ended with {code}: {err.strip()[-300:]}"
        yield verdict(difference, f"{number.name}{' twice' * twice} gave {code}, {workdir}")


def k5(bench: Bench) -> Iterator[Trial]:
    """A full disk and an I/O error at every point, and a limit on the size of files."""
    for name, error in _in_any_order(bench, points(), ("ENOSPC", "EIO")):
        if f"{error} at {name}" in bench.done:
            continue
        workdir = bench.fresh()
        fault = {"ADLOCO_FAIL_AT": f"{name}:1:{error}"}
        code, err = bench.run(workdir, **fault)
        if code == 0 and not _events(workdir, "fault"):
            workdir = bench.half_way()
            code, err = bench.run(workdir, **fault)
        difference = bench.ends_alike(workdir)
        loud = code == 5 if name.split(".")[0] in ("save", "ledger", "config") else code in (0, 5)
        if not loud or "Traceback" in err:
            difference += f" ended with {code}: {err.strip()[-300:]}"
        yield verdict(difference, f"{error} at {name}, gave {code}, {workdir}")
    for limit in (1000, 5000, 9000):
        if f"files of at most {limit} bytes" in bench.done:
            continue
        workdir = bench.fresh()
        code, err = bench.run(workdir, limit=limit)
        difference = bench.ends_alike(workdir)
        if code != 5 or "Traceback" in err:
            difference += f" ended with {code}: {err.strip()[-300:]}"
        yield verdict(difference, f"files of at most {limit} bytes, gave {code}, {workdir}")


def k6(bench: Bench) -> Iterator[Trial]:
    """Any file of the newest checkpoint truncated, emptied, deleted, extended, flipped, swapped."""
    base = bench.folder / "intact"
    shutil.rmtree(base, ignore_errors=True)
    shutil.copytree(bench.half_way() / "checkpoints", base)
    newest, older = checkpoint.list_rounds(base)[:2]
    files = sorted(
        file.relative_to(base) for file in (base / str(newest)).rglob("*") if file.is_file()
    )
    while True:
        for file in files:
            for kind in ("truncate", "empty", "delete", "append", "flip", "flip", "swap"):
                copy = bench.folder / "mutated"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(base, copy)
                if not _mutate(copy, file, kind, bench.random, files):
                    continue
                found = checkpoint.newest(copy, lambda path: int(path.name))
                named = found is not None and len(found[1]) == 1 and f"/{newest}/" in found[1][0]
                passed = named and found is not None and found[0] == older
                yield passed, f"{kind} {file}: {found}"


def k6_command(bench: Bench) -> Iterator[Trial]:
    """As K6, by command line: the run falls back, says so, and ends as the uninterrupted one."""
    for file in ("manifest.json", "host.json", "arrays/manifest.ocdbt"):
        workdir = bench.half_way()
        newest = checkpoint.list_rounds(workdir / "checkpoints")[0]
        _mutate(workdir, Path("checkpoints", str(newest), file), "flip", bench.random, [])
        difference = bench.ends_alike(workdir)
        faults = [f["cause"] for f in _events(workdir, "fault")]
        if not any(f"{newest}/{file}" in cause for cause in faults):
            difference += f" {file} not named: {faults}"
        yield verdict(difference, f"{file} flipped, {workdir}")


def k7(bench: Bench) -> Iterator[Trial]:
    """All checkpoints damaged, or gone: nothing starts over, nothing is written."""
    for what in ("flip", "empty", "gone"):
        workdir = bench.half_way()
        folder = workdir / "checkpoints"
        for number in checkpoint.list_rounds(folder):
            if what == "gone":
                shutil.rmtree(folder / str(number))
            else:
                _mutate(folder, Path(str(number), "host.json"), what, bench.random, [])
        before = _tree(workdir)
        code, err = bench.run(workdir)
        passed = code == 3 and "Traceback" not in err and _tree(workdir) == before
        yield passed, f"all checkpoints {what} gave {code}, {workdir}"


def k9(bench: Bench) -> Iterator[Trial]:
    """Folders that cannot be a run's, two runs in one, and a lock whose owner is dead."""
    file = bench.fresh()
    file.write_text("")
    code, err = bench.run(file)
    yield code == 2 and "Traceback" not in err, f"a file in the folder's place gave {code}"
    workdir = bench.half_way()
    shutil.move(workdir / "checkpoints", bench.folder / "elsewhere")
    (workdir / "checkpoints").symlink_to(bench.folder / "elsewhere")
    code, err = bench.run(workdir)
    yield code == 2 and "symbolic link" in err, f"checkpoints elsewhere gave {code}"
    shutil.rmtree(bench.folder / "elsewhere")
    workdir = bench.half_way()
    (workdir / ".lock").write_text("999999")
    process = bench.start(workdir)
    while len(_events(workdir, "start")) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGSTOP)  # so that it is there, however long the second one takes
    code, err = bench.run(workdir)
    process.send_signal(signal.SIGCONT)
    process.communicate()
    yield code == 2 and "another process" in err, f"a second run in the folder gave {code}"
    yield verdict(bench.ends_alike(workdir), f"a dead process's lock, {workdir}")


def k10(bench: Bench) -> Iterator[Trial]:
    """A run copied, and packed and unpacked, to another place goes on there."""
    workdir = bench.half_way()
    yield verdict(bench.ends_alike(workdir), f"copied, {workdir}")
    workdir, packed = bench.half_way(), bench.folder / "run.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(workdir, "moved")
    shutil.rmtree(bench.folder / "moved", ignore_errors=True)
    with tarfile.open(packed) as archive:
        archive.extractall(bench.folder, filter="data")
    yield verdict(bench.ends_alike(bench.folder / "moved"), "packed and unpacked")


def r3(bench: Bench) -> Iterator[Trial]:
    """Another number of devices: the same decisions, losses within 1e-5."""
    for before, after in ((1, 2), (2, 1), (4, 2)):
        device_count = "--xla_force_host_platform_device_count"
        flags = [f"{_XLA_FLAGS} {device_count}={n}" for n in (before, after)]
        workdir = bench.fresh()
        bench.run(workdir, ADLOCO_CRASH_AT="round.decided:5", XLA_FLAGS=flags[0])
        code, err = bench.run(workdir, XLA_FLAGS=flags[1])
        measured = ("train_loss", "loss", "perplexity", "noise", "signal", "test_value")
        measured += ("pseudo_grad_norm", "loss_before", "loss_after", "barrier")
        lines = deterministic_lines(read(workdir / "ledger.jsonl")) if code == 0 else []
        expected = bench.reference[0]["ledger"]
        alike = len(lines) == len(expected)
        for ours, theirs in zip(lines, expected, strict=False):
            alike &= all(ours[k] == theirs[k] for k in theirs if k not in measured)
            alike &= all(
                np.allclose(ours[k], theirs[k], rtol=1e-5)
                for k in ("train_loss", "loss")
                if k in theirs
            )
        yield code == 0 and alike, f"{before} to {after} devices, {workdir} {err[-300:]}"


def p1(bench: Bench) -> Iterator[Trial]:
    """One of two processes killed or stopped at a random round: all start again, and end alike."""
    for number in itertools.count(bench.num_done):
        kind, turn = number % 3, number // 3
        victim, sign = (kind, signal.SIGKILL) if kind < 2 else (turn % 2, signal.SIGSTOP)
        after = bench.random.randrange(1, 6)
        workdir = bench.fresh()
        with bench.together(workdir, watchdog_s=_WATCHDOG_S) as group:
            while _rounds(workdir) < after and group.process.poll() is None:
                time.sleep(0.02)
            time.sleep(bench.random.random() / 5)
            hit_s = time.monotonic()
            os.kill(group.member(victim), sign)
            code = group.process.wait(timeout=300)
        starts_s = (s - hit_s for s, line in group.said if "start again" in line)
        noticed_s = min((s for s in starts_s if s >= 0), default=math.inf)
        # What is left of the group has ten seconds to end by itself.
        in_time = noticed_s <= 15 + (_WATCHDOG_S if sign == signal.SIGSTOP else 0)
        difference = bench.differs(workdir, bench.reference_of_two) if code == 0 else group.text
        what = f"{sign.name} of process {victim} after round {after}, again after {noticed_s:.1f} s"
        yield (not difference and in_time), f"{what} : {difference[-600:]}"


def p2(bench: Bench) -> Iterator[Trial]:
    """A process comes late, never, or to a taken port, or is given or finds something else."""
    yield _meet(bench, "the second comes five seconds late", [0], late_s=5)
    yield _meet(bench, "the port is taken", [5], take_port=True)
    text = bench.folder / "text"
    if not text.exists():
        text.mkdir()
        for name in "ab":
            (text / name).write_text(f"Once upon a time there was an {name}.\n\n" * 4000)
    own = [
        ["--config.data.source=text", f"--config.data.path={text / name}"]
        for name in ("a", "b", "none")
    ]
    yield _meet(bench, "other data", [2, 2], "the data", first=own[0], second=own[1])
    yield _meet(bench, "no data", [3, 3], "none", first=own[0], second=own[2])
    other = bench.fresh()
    elsewhere = [f"--workdir={other}"]
    yield _meet(bench, "another folder", [2, 2], "not the folder", second=elsewhere)
    other.mkdir(exist_ok=True)
    with FileLock(other / ".lock"):
        taken = "another process runs there"
        yield _meet(bench, "a run is there", [2, 2], taken, first=elsewhere, second=elsewhere)
    yield _meet(bench, "the second never comes", [5], without=1)
    yield _meet(bench, "the first never comes", [5], without=0)
    change = "--config.inner.learning_rate=0.5"
    yield _meet(bench, "another config", [2, 2], "inner.learning_rate", second=[change])


def p3(bench: Bench) -> Iterator[Trial]:
    """A failure at every start: given up after three restarts, with the cause."""
    for number in itertools.count(bench.num_done):
        point = ("round.decided:1", "restore.read:1", "eval.trainers:1")[number % 3]
        workdir = bench.fresh()
        if "restore" in point:
            shutil.copytree(bench.half_way(), workdir, dirs_exist_ok=True)
        with bench.together(workdir, ADLOCO_CRASH_AT=point) as group:
            code = group.process.wait(timeout=300)
        restarts = sum("start again" in line for _, line in group.said)
        passed = code == 5 and restarts == 3 and "gave up after 3 restarts" in group.text
        yield passed, f"SIGKILL at {point}: exit {code}, {restarts} restarts"


def m2(bench: Bench) -> Iterator[Trial]:
    """One of two processes runs out of memory: both go on with the half, none waits for ever."""
    for number in itertools.count(bench.num_done):
        workdir, start_s = bench.fresh(), time.monotonic()
        fake = _OUT_OF_MEMORY.format(process=number % 2, call=1 + number % 6)
        with bench.together(workdir, program=["-c", fake]) as group:
            code = group.process.wait(timeout=300)
        seconds = time.monotonic() - start_s
        sizes = [e["max_batch_size"] for e in _events(workdir, "start")] if code == 0 else []
        rounds = _events(workdir, "round")
        covered = all(  # switch.multiplier x 2 and less are clipped, by the rule
            e["requested_batch_size"] <= 2 * 2
            or e["micro_batch_size"] * e["num_accum_steps"] >= e["requested_batch_size"]
            for e in rounds
        )
        done = {e["round"] for e in rounds} == set(range(1, 7)) and seconds < 120
        what = f"process {number % 2}: exit {code}, {sizes}, {seconds:.0f} s"
        yield (code == 0 and sizes == [4, 2] and covered and done), f"{what} {group.text[-300:]}"


# Stands in for the main program: one process's n-th round finds no memory at the full size.
_OUT_OF_MEMORY = """
import jax
from adloco_jax import main
from adloco_jax.run.engine import LocalEngine
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


def _rounds(workdir: Path) -> int:
    ledger = workdir / "ledger.jsonl"
    return ledger.read_bytes().count(b'{"event": "checkpoint"') if ledger.exists() else 0


def _meet(
    bench: Bench,
    what: str,
    codes: list[int],
    word: str = "",
    *,
    first: Sequence[str] = (),
    second: Sequence[str] = (),
    late_s: float = 0,
    without: int | None = None,
    take_port: bool = False,
) -> Trial:
    """Two processes started by hand; whether they end with these codes, and say the word."""
    workdir, start_s = bench.fresh(), time.monotonic()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        if take_port:
            held.listen()
        else:
            held.close()
        group = []
        for number, own in enumerate((first, second)):
            if number == without:
                continue
            place = (f"--coordinator=127.0.0.1:{port}", "--num_processes=2")
            meeting = (f"--process_id={number}", f"--meeting_s={120 if codes == [0] else 15}")
            group.append(bench.start(workdir, *place, *meeting, *own))
            time.sleep(late_s)
        said = [process.communicate(timeout=300)[1] for process in group]
    ended = [process.returncode for process in group]
    seconds = time.monotonic() - start_s
    # Where they never meet, what the second process ends with is its library's own affair.
    passed = ended[: len(codes)] == codes and all(word in text for text in said)
    passed &= "Traceback" not in "".join(said[: len(codes)])
    return passed, f"{what}: exit {ended} in {seconds:.0f} s, {' / '.join(said)[-400:]}"


ROWS: dict[str, tuple[Callable[[Bench], Iterator[Trial]], int, int]] = {
    # row: trials, of the short scale, of the long one
    "K1": (k1, 5, 300),
    "K2": (k2, 1, 10**9),
    "K3": (k3, 0, 20),
    "K4": (k4, 2, 50),
    "K5": (k5, 2, 10**9),
    "K6": (k6, 60, 540),
    "K6 by command": (k6_command, 1, 3),
    "K7": (k7, 1, 3),
    "K9": (k9, 4, 4),
    "K10": (k10, 1, 2),
    "R3": (r3, 0, 3),
    "P1": (p1, 0, 60),
    "P2": (p2, 5, 9),
    "P3": (p3, 0, 3),
    "M2": (m2, 0, 20),
}


def _events(workdir: Path, name: str) -> list[dict]:
    path = workdir / "ledger.jsonl"
    return [e for e in read(path) if e["event"] == name] if path.exists() else []


def _tree(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _mutate(folder: Path, file: Path, kind: str, rng: random.Random, others: list[Path]) -> bool:
    """Damages a file; False where that would leave it as it is."""
    path = folder / file
    content = path.read_bytes()
    changed = content
    if kind == "delete":
        path.unlink()
        return True
    if kind == "swap":
        other = folder / rng.choice(others)
        changed = other.read_bytes()
        other.write_bytes(content)
    elif kind == "append":
        changed = content + rng.randbytes(rng.randint(1, 64))
    elif kind == "empty":
        changed = b""
    elif kind == "truncate":
        changed = content[: rng.randrange(len(content))] if content else content
    elif content:
        place = rng.randrange(len(content))
        flipped = content[place] ^ (1 << rng.randrange(8))
        changed = content[:place] + bytes([flipped]) + content[place + 1 :]
    path.write_bytes(changed)
    return changed != content


def trials(bench: Bench, row: str, number: int, results: list[dict]) -> Iterator[Trial]:
    """The trials of a row that its results lack, up to a number in all."""
    mine = [result for result in results if result["row"] == row]
    if len(mine) >= number:
        return
    bench.done = {result["what"].split(",")[0] for result in mine}
    bench.num_done = len(mine)
    # Rows without an end go on; those of a list know what is done; the short ones run again.
    again = row not in ("K1", "K2", "K4", "K5", "K6", "P1", "P3", "M2")
    skip = len(mine) if again else 0
    # Cut before a trial too many has run, not after.
    yield from itertools.islice(ROWS[row][0](bench), skip, skip + number - len(mine))


def table(results: list[dict]) -> str:
    """A line per row: trials, passed, what it is."""
    lines = ["| row | trials | passed | |", "|---|---|---|---|"]
    for row, (function, _, _) in ROWS.items():
        passed = [result["passed"] for result in results if result["row"] == row]
        if passed:
            about = (function.__doc__ or "").splitlines()[0]
            lines.append(f"| {row} | {len(passed)} | {sum(passed)} | {about} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the rows asked for, as far as the results do not have them yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=("short", "long"), default="long")
    parser.add_argument("--rows", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "results.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    bench = Bench(options.folder.absolute(), random.Random(options.seed + len(results)))
    for row in options.rows.split(","):
        number = ROWS[row][1 if options.scale == "short" else 2]
        for passed, what in trials(bench, row, number, results):
            results.append({"row": row, "passed": passed, "what": what})
            with path.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
            print("passed" if passed else "FAILED", row, what, flush=True)
            for workdir in options.folder.glob("run-*"):
                if passed and not any(
                    str(workdir) in r["what"] for r in results if not r["passed"]
                ):
                    shutil.rmtree(workdir, ignore_errors=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.platform()}")
    print(table(results))
    return int(not all(result["passed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
