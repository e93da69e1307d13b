"""Starts the processes of one run on this machine, watches them, and starts them again together.

A process of a group cannot go on without the others, and what is left of a broken group blocks or
is aborted. So when one dies, or the run's ledger stands still, all are ended and started again: the
same command with the same workdir goes on from its newest checkpoint.

Restarts end. Progress is a checkpoint of a higher round than any before it, or a smaller
micro-batch to try after one that was too large for the memory, so the rounds of a run and the size
it begins with bound how often there can be some; rounds in the ledger would not do, for they are
run again after a restart. Without progress there are at most `max_restarts` restarts.

The processes have sessions of their own, so that a Ctrl-C reaches them once, through here. Should
this process itself be killed, they go on unwatched.
"""

import contextlib
import dataclasses
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from adloco_jax.errors import ConfigError, DataError, DivergedError, Preempted, ResourceError
from adloco_jax.run import memory_notes

_USER_CODES = (ConfigError.exit_code, DataError.exit_code, DivergedError.exit_code)

_POLL_S = 0.1
_SETTLE_S = 1.0  # in which others of a broken group may end too, one perhaps with the real cause
_LINES, _LINES_S = 200, 10.0  # of a process, passed on in so many seconds
_LINE_LENGTH = 2000
_TAIL = 20  # lines of a flood's end, where the error is


def supervise(
    command: Sequence[str],
    workdir: str | os.PathLike[str],
    *,
    num_processes: int,
    watchdog_s: float = 600.0,
    max_restarts: int = 3,
    grace_s: float = 10.0,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Launches a group of processes, and restarts it on failure until it ends.

    Each process is given `--coordinator=127.0.0.1:PORT --num_processes=N --process_id=I` besides.
    Process 0 writes to this one's terminal; lines of the others go to stderr with `[1] ` etc. in
    front. To be called from the main thread: until it returns, SIGTERM, SIGINT and SIGHUP ask the
    processes to save and stop, and a second one kills them.

    Args:
      command: The program with its arguments, the workdir among them.
      workdir: The run's folder, for its ledger and its checkpoints.
      num_processes: How many processes.
      watchdog_s: The group is taken to be stuck once the ledger has not changed for so many
        seconds: more than a round, and the compilation before the first, take.
      max_restarts: Restarts in a row without progress, after which it gives up.
      grace_s: Seconds between SIGTERM and SIGKILL for what is left of a group.
      environment: Of the processes; None is this process's own.

    Returns:
      The exit code: 0 when all have ended with it; of a mistake that a restart would repeat (2, 3,
      4), of a stop (75), or of the last failure: the process's own, or 5 if a signal killed it or
      the group was stuck; 128 + the signal if it killed them before they had saved.

    Raises:
      OSError: If a process cannot be started, or no port is free; none is left running.
    """
    workdir = Path(workdir)
    reached, smallest, fruitless = _newest_round(workdir), memory_notes.least(workdir), 0
    ports: set[int] = set()
    with _stop_signals() as stops:
        while True:
            ports.add(port := _free_port(ports))
            group: list[_Process] = []
            try:
                _start(group, command, num_processes, port, environment)
                end = _follow(group, workdir / "ledger.jsonl", watchdog_s, grace_s, stops)
            finally:
                _end(group, grace_s, stops)
            end = _with_late_mistake(end, group)
            if stops or not end.retry:
                break
            newest = _newest_round(workdir)
            noted = memory_notes.least(workdir)
            if newest > reached or (noted or math.inf) < (smallest or math.inf):
                fruitless = 0
            reached, smallest = max(newest, reached), noted
            if fruitless == max_restarts:
                end = dataclasses.replace(
                    end, what=f"{end.what}; given up after {fruitless} restarts without progress"
                )
                break
            fruitless += 1
            source = "the beginning" if newest < 0 else f"round {newest}"
            _say(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} {end.what}; all processes start again from"
                f" {source} (restart {fruitless} of {max_restarts} without progress)"
            )
    if end.what:
        _say(end.what)
    return end.code


def _newest_round(workdir: Path) -> int:
    """The highest round with a checkpoint, or -1; as `checkpoint.list_rounds`, without JAX."""
    folder = workdir / "checkpoints"
    if not folder.is_dir():
        return -1
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return max((int(n) for n in names if n.isdecimal() and n == str(int(n))), default=-1)


def _free_port(used: set[int]) -> int:
    """A port that nobody has now, other than those; it may be taken before it is used."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in used:
            return port


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals to be forwarded, as they come in."""
    stops: list[int] = []

    def note(number: int, frame: object) -> None:
        stops.append(signal.SIGTERM if number == signal.SIGHUP else number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclasses.dataclass(frozen=True)
class _Process:
    popen: subprocess.Popen[str]
    name: str
    tail: deque[str]  # its last lines, if they pass through here
    reader: threading.Thread | None


@dataclasses.dataclass(frozen=True)
class _End:
    code: int
    what: str  # empty when all is well
    retry: bool


def _start(
    group: list[_Process],
    command: Sequence[str],
    num_processes: int,
    port: int,
    environment: Mapping[str, str] | None,
) -> None:
    """Starts the processes into `group`, which on an error holds those that were started."""
    for number in range(num_processes):
        popen = subprocess.Popen(
            [
                *command,
                f"--coordinator=127.0.0.1:{port}",
                f"--num_processes={num_processes}",
                f"--process_id={number}",
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if number else None,
            stderr=subprocess.STDOUT if number else None,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        tail: deque[str] = deque(maxlen=_TAIL)
        reader = None
        if popen.stdout is not None:
            arguments = (popen.stdout, f"[{number}] ", tail)
            reader = threading.Thread(target=_pass_on, args=arguments, daemon=True)
            reader.start()
        group.append(_Process(popen, f"process {number} of {num_processes}", tail, reader))


def _pass_on(stream: TextIO, prefix: str, tail: deque[str]) -> None:
    """Passes lines on to stderr; of a flood its beginning, how much is left out, and its end."""
    window_s, num_lines, num_held = time.monotonic(), 0, 0

    def say_held(num_shown: int) -> None:
        if num_held > num_shown:
            _say(f"{prefix}... {num_held - num_shown} lines left out")
        for line in list(tail)[len(tail) - num_shown :]:
            _say(prefix + line)

    with stream:
        while text := stream.readline(_LINE_LENGTH):
            tail.append(text.rstrip("\n"))
            if time.monotonic() - window_s >= _LINES_S:
                say_held(0)
                window_s, num_lines, num_held = time.monotonic(), 0, 0
            if num_lines < _LINES:
                num_lines += 1
                _say(prefix + tail[-1])
            else:
                num_held += 1
    say_held(min(num_held, len(tail)))


def _say(line: str) -> None:
    """One line on stderr; if that has gone, as a terminal does, nobody is there to be told."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))  # whole, whichever thread says it


def _follow(
    group: Sequence[_Process], ledger: Path, watchdog_s: float, grace_s: float, stops: list[int]
) -> _End:
    """Watches a group until all have ended, or the rest is to be ended; why it came to its end."""
    codes: dict[int, int] = {}
    forwarded = 0
    seen, idle_s = _state(ledger), 0.0
    now_s = time.monotonic()
    deadline_s = float("inf")
    while True:
        codes |= {
            number: code
            for number, process in enumerate(group)
            if number not in codes and (code := process.popen.poll()) is not None
        }
        before_s, now_s = now_s, time.monotonic()
        if len(codes) == len(group) or now_s >= deadline_s or len(stops) > 1:
            break
        if deadline_s == float("inf") and any(codes.values()):
            saved = all(code in (0, Preempted.exit_code) for code in codes.values())
            deadline_s = now_s + (grace_s if saved else _SETTLE_S)
        if len(stops) > forwarded:
            forwarded += 1
            for process in group:
                process.popen.send_signal(stops[0])
        # A pause of the whole machine is one poll, not silence: it counts for a second at most.
        state = _state(ledger)
        idle_s = 0.0 if state != seen else idle_s + min(now_s - before_s, 1.0)
        seen = state
        if idle_s >= watchdog_s:
            stopped = [process.name for process in group if _is_stopped(process.popen.pid)]
            whose = f" (stopped: {', '.join(stopped)})" if stopped else ""
            return _End(
                ResourceError.exit_code,
                f"the processes are stuck: {ledger} has not changed for {watchdog_s:g} s{whose}",
                retry=True,
            )
        time.sleep(_POLL_S)
    if len(stops) > 1:
        return _End(128 + stops[1], f"killed by a second {_name(stops[1])}", retry=False)
    number = min(codes, key=lambda number: _rank(codes[number]))  # the first of several alike
    return _why(group[number], codes[number], stops)


def _rank(code: int) -> int:
    """How likely an exit code is a group's cause, not a consequence; the likeliest is 0."""
    if code in _USER_CODES:
        return 0
    if code == Preempted.exit_code:
        return 1
    if code == ResourceError.exit_code:
        return 2
    if code == -signal.SIGABRT:  # what JAX ends a process with when another has gone
        return 5
    return 3 if code < 0 else 4 if code else 6


def _why(process: _Process, code: int, stops: Sequence[int]) -> _End:
    """What the exit code of a process means for its group."""
    if code in (0, Preempted.exit_code):
        return _End(code, "", retry=False)
    if stops and code in (-stops[0], 128 + stops[0]):
        what = f"{process.name} was stopped by {_name(stops[0])} before it could save"
        return _End(128 + stops[0], what, retry=False)
    if code < 0:
        what = f"{process.name} was killed by {_name(-code)}"
        return _End(ResourceError.exit_code, what, retry=True)
    if process.reader is not None:
        process.reader.join(_SETTLE_S)
    said = next((f": {line.strip()}" for line in reversed(process.tail) if line.strip()), "")
    what = f"{process.name} ended with exit code {code}{said}"
    return _End(code, what, retry=code not in _USER_CODES)


def _with_late_mistake(end: _End, group: Sequence[_Process]) -> _End:
    """The end of a group, or the mistake that one of it came to while the rest was ended."""
    for process in group:
        if end.retry and process.popen.returncode in _USER_CODES:
            return _why(process, process.popen.returncode, ())
    return end


def _end(group: Sequence[_Process], grace_s: float, stops: Sequence[int]) -> None:
    """Ends what is left of a group; returns when it is gone, so that no two write to one run."""
    for process in group:
        process.popen.terminate()
    deadline_s = time.monotonic() + grace_s
    while any(process.popen.poll() is None for process in group):
        if time.monotonic() >= deadline_s or len(stops) > 1:
            break
        time.sleep(_POLL_S)
    for process in group:
        if process.popen.poll() is None:  # also where it is stopped, so that no other signal works
            os.killpg(process.popen.pid, signal.SIGKILL)  # with all that it has started
    for process in group:
        process.popen.wait()
        if process.reader is not None:
            process.reader.join(_SETTLE_S)


def _state(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written to or replaced; None where there is none to be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _is_stopped(pid: int) -> bool:
    """Whether a child is stopped (SIGSTOP), where the system says so."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended meanwhile
        return False


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
