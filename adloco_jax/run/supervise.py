"""Launches the processes of one run on this machine, and restarts them all if one fails.

A process of a group cannot go on without the others, and the rest of a broken group blocks or is
aborted. So when one dies, or the run's ledger stops growing, all are ended and started again: the
same command with the same workdir goes on from its newest checkpoint.

The number of restarts is bounded. Progress is a checkpoint of a higher round than any before it, or
a smaller micro-batch to try after running out of memory; both are bounded by the run. Rounds in the
ledger are no progress, as they are run again after a restart. Without progress there are at most
`max_restarts` restarts.

The processes have sessions of their own, so that a Ctrl-C reaches them once, through here. If this
process itself is killed, they go on unsupervised.
"""

import contextlib
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
from typing import NamedTuple, TextIO

from adloco_jax.errors import ConfigError, DataError, DivergedError, Preempted, ResourceError
from adloco_jax.run import memory_notes

_USER_CODES = (ConfigError.exit_code, DataError.exit_code, DivergedError.exit_code)

_POLL_S = 0.1
_SETTLE_S = 1.0  # in which others of a broken group may end too, one perhaps with the real cause
_TAIL = 20  # last lines of a process that are kept, for the reason of its end


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

    Each process gets `--coordinator=127.0.0.1:PORT --num_processes=N --process_id=I` appended.
    Process 0 writes to this one's terminal; lines of the others go to stderr with the prefix `[1] `
    etc. To be called from the main thread: until it returns, SIGTERM, SIGINT and SIGHUP ask the
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
    with _stop_signals() as stops:
        while True:
            group: list[_Process] = []
            place = [f"--coordinator=127.0.0.1:{_free_port()}", f"--num_processes={num_processes}"]
            try:
                for number in range(num_processes):
                    words = [*command, *place, f"--process_id={number}"]
                    group.append(_start(words, number, num_processes, environment))
                end = _follow(group, workdir / "ledger.jsonl", watchdog_s, grace_s, stops)
            finally:
                _end(group, grace_s, stops)
            # A process may find its user's mistake while the rest of the group is being ended.
            mistakes = [p for p in group if p.popen.returncode in _USER_CODES]
            if end.retry and mistakes:
                end = _why(mistakes[0], ())
            if stops or not end.retry:
                break
            newest, noted = _newest_round(workdir), memory_notes.least(workdir)
            if newest > reached or (noted or math.inf) < (smallest or math.inf):
                fruitless = 0
            reached, smallest = max(newest, reached), noted
            if fruitless == max_restarts:
                what = f"{end.what}; gave up after {fruitless} restarts without progress"
                end = end._replace(what=what)
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
    """The highest round with a checkpoint, or -1; unlike `checkpoint.list_rounds` without JAX."""
    paths = workdir.glob("checkpoints/*")
    return max((int(path.name) for path in paths if path.name.isdecimal()), default=-1)


def _free_port() -> int:
    """A free port; if another program takes it before it is used, the group starts again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals to forward: a list that grows as they arrive."""
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


class _Process(NamedTuple):
    popen: subprocess.Popen[str]
    name: str
    tail: deque[str]  # its last lines, if they pass through here
    reader: threading.Thread | None


class _End(NamedTuple):
    code: int
    what: str  # empty when all is well
    retry: bool


def _start(
    command: list[str], number: int, num_processes: int, environment: Mapping[str, str] | None
) -> _Process:
    popen = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if number else None,
        stderr=subprocess.STDOUT if number else None,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    tail, reader = deque(maxlen=_TAIL), None
    if popen.stdout is not None:
        arguments = (popen.stdout, f"[{number}] ", tail)
        reader = threading.Thread(target=_pass_on, args=arguments, daemon=True)
        reader.start()
    return _Process(popen, f"process {number} of {num_processes}", tail, reader)


def _pass_on(stream: TextIO, prefix: str, tail: deque[str]) -> None:
    """Passes lines on to stderr, and keeps the last ones."""
    with stream:
        for line in stream:
            tail.append(line.rstrip("\n"))
            _say(prefix + tail[-1])


def _say(line: str) -> None:
    """Writes one line to stderr, unless that is closed, as a terminal may be."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))  # in one piece, from any thread


def _follow(
    group: Sequence[_Process], ledger: Path, watchdog_s: float, grace_s: float, stops: list[int]
) -> _End:
    """Watches a group until all have ended, or the rest has to be ended; returns the reason."""
    num_forwarded = 0
    seen, idle_s = _state(ledger), 0.0
    now_s, deadline_s = time.monotonic(), math.inf
    while True:
        ended = [process for process in group if process.popen.poll() is not None]
        before_s, now_s = now_s, time.monotonic()
        if len(ended) == len(group) or now_s >= deadline_s or len(stops) > 1:
            break
        codes = {process.popen.returncode for process in ended}
        if deadline_s == math.inf and any(codes):
            saved = codes <= {0, Preempted.exit_code}
            deadline_s = now_s + (grace_s if saved else _SETTLE_S)
        if len(stops) > num_forwarded:
            num_forwarded += 1
            for process in group:
                process.popen.send_signal(stops[0])
        # A pause of the whole machine is one poll, not silence: it counts for a second at most.
        state = _state(ledger)
        idle_s = 0.0 if state != seen else idle_s + min(now_s - before_s, 1.0)
        seen = state
        if idle_s >= watchdog_s:
            what = f"the processes are stuck: {ledger} has not changed for {watchdog_s:g} s"
            return _End(ResourceError.exit_code, what, retry=True)
        time.sleep(_POLL_S)
    if len(stops) > 1:
        return _End(128 + stops[1], f"killed by a second {_name(stops[1])}", retry=False)
    return _why(min(ended, key=_rank), stops)  # the first of several alike


def _rank(process: _Process) -> int:
    """How likely an exit code is a group's cause, not a consequence; the likeliest is 0."""
    code = process.popen.returncode
    known = dict.fromkeys(_USER_CODES, 0) | {Preempted.exit_code: 1, ResourceError.exit_code: 2}
    known |= {-signal.SIGABRT: 5, 0: 6}  # JAX aborts a process when another has gone
    return known.get(code, 3 if code < 0 else 4)


def _why(process: _Process, stops: Sequence[int]) -> _End:
    """What the exit code of a process means for its group."""
    code = process.popen.returncode
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


def _end(group: Sequence[_Process], grace_s: float, stops: Sequence[int]) -> None:
    """Ends the rest of a group, and waits for that, so that no two groups write to one run."""
    for process in group:
        process.popen.terminate()
    deadline_s = time.monotonic() + grace_s
    while any(process.popen.poll() is None for process in group):
        if time.monotonic() >= deadline_s or len(stops) > 1:
            break
        time.sleep(_POLL_S)
    for process in group:
        if process.popen.poll() is None:  # a stopped process reacts to no other signal
            os.killpg(process.popen.pid, signal.SIGKILL)  # with its children
    for process in group:
        process.popen.wait()
        if process.reader is not None:
            process.reader.join(_SETTLE_S)


def _state(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
