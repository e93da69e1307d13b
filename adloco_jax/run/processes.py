"""The processes of one run: how they connect, what they agree on, and how signals stop them.

Every process runs the same program on the same host state; only process 0 prints and writes.
Some things only one process can know: a clock, a signal, a full disk. The processes exchange them
here before they decide anything by them. The exchange goes through JAX's coordinator, so that no
process waits for its devices.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import jax

from adloco_jax import errors
from adloco_jax.errors import ConfigError, ResourceError, UserError
from adloco_jax.files import write_errors

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXCHANGE_MS = 2 * 60 * 60 * 1000  # the slowest load or save; heartbeats notice a dead process
_END_MS = 10 * 1000  # for which a process that ends waits for the others to do so

T = TypeVar("T")

_num_sent: Counter[str] = Counter()  # by the name of an exchange


def connect(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: int = 300,
) -> None:
    """Makes this process one of several. To be called before anything else of JAX.

    Args:
      coordinator: HOST:PORT of process 0. None: JAX detects the launcher (Slurm, Open MPI,
        Kubernetes) and takes all three from it.
      num_processes: Number of processes.
      process_id: Index of this process, from 0.
      timeout_s: Seconds to wait for the other processes.

    Raises:
      ConfigError: If the three contradict one another, or JAX detects no launcher.
      ResourceError: If the processes cannot connect. If they have not connected in time, this
        process exits with the error's code.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ConfigError("--coordinator, --num_processes, --process_id: give all three, or none")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise ConfigError(f"--process_id={process_id}: expected 0 to {num_processes - 1}")
    if coordinator is not None and process_id == 0:
        _check_port(coordinator)
    # JAX's preemption service takes SIGTERM for itself. Here a run saves and stops at SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    whose = "" if process_id is None else f"process {process_id} of {num_processes}: "
    failure = f"{whose}not all processes connected{f' at {coordinator}' if coordinator else ''}"

    def give_up():
        # JAX would abort the process with a stack trace, and its waiting cannot be interrupted.
        print(f"{failure} within {timeout_s} s", file=sys.stderr, flush=True)
        os._exit(ResourceError.exit_code)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=timeout_s + 60
        )
    except ValueError as error:
        raise ConfigError(
            "--distributed: no launcher of several processes was found (Slurm, Open MPI,"
            f" Kubernetes); give --coordinator, --num_processes, --process_id ({error})"
        ) from error
    except RuntimeError as error:
        raise ResourceError(f"{failure} ({' '.join(str(error).split())[:300]})") from error
    finally:
        timer.cancel()


def _check_port(coordinator: str) -> None:
    """Refuses a port in use, at which JAX would abort."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(coordinator.rpartition(":")[2])))
    except (OSError, OverflowError) as error:
        raise ResourceError(f"--coordinator={coordinator}: {error}; name another port") from error
    except ValueError as error:
        raise ConfigError(f"--coordinator={coordinator}: expected HOST:PORT") from error


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


@contextlib.contextmanager
def only_first_prints() -> Iterator[None]:
    """Discards the standard output of all other processes."""
    with open(os.devnull, "w", errors="backslashreplace") as null:
        with contextlib.redirect_stdout(sys.stdout if is_first() else null):
            yield


def _send(name: str, value: object) -> int:
    """Sends a value to all processes; returns its number among the exchanges of this name."""
    _num_sent[name] += 1
    number = _num_sent[name]
    _client().key_value_set(f"{name} ({number})/{jax.process_index()}", json.dumps(value))
    return number


def _receive(name: str, number: int) -> list:
    """Waits for the values that all processes send under a name and number."""
    client = _client()
    keys = [f"{name} ({number})/{index}" for index in range(jax.process_count())]
    values = [json.loads(client.blocking_key_value_get(key, _EXCHANGE_MS)) for key in keys]
    if number > 1:  # all others have sent this one, so all have received the one before
        client.key_value_delete(f"{name} ({number - 1})/{jax.process_index()}")
    return values


def gather(value: T, name: str = "gather") -> list[T]:
    """All-gathers a value: one of each process, in the order of the processes.

    All processes must call it.

    Args:
      value: Plain JSON data.
      name: Name of the exchange; each thread uses names of its own.
    """
    return [value] if jax.process_count() == 1 else _receive(name, _send(name, value))


def broadcast(value: T) -> T:
    """Broadcasts process 0's value, which is plain JSON data; all processes must call it."""
    return gather(value)[0]


def barrier(name: str) -> None:
    """Waits until all processes have called it.

    Args:
      name: Name of the barrier; each thread uses names of its own.
    """
    gather(None, name)


def run_on_all(
    act: Callable[[], T],
    *,
    name: str = "run_on_all",
    faults: type[Exception] | tuple[type[Exception], ...] = UserError,
    elsewhere: type[Exception] | None = None,
) -> T:
    """Runs a function in every process, and broadcasts an error of one to all.

    A process that ended alone would leave the others waiting for it.

    Args:
      act: The function. It must not exchange anything with other processes.
      name: Name of the exchange; each thread uses names of its own.
      faults: Classes of errors that are broadcast.
      elsewhere: Class that is raised for another process's error. None: that error's own class.

    Returns:
      The result of `act` in this process.

    Raises:
      Exception: One of `faults`, in every process: its own error, or else the first of the others.
    """
    try:
        outcome, fault = act(), None
    except faults as error:
        outcome, fault = None, error
    report = None if fault is None else [type(fault).__name__, str(fault) or repr(fault)]
    reports = gather(report, name)
    if fault is not None:
        raise fault
    for number, other in enumerate(reports):
        if other is not None:
            kind, message = other
            raise (elsewhere or getattr(errors, kind))(f"process {number}: {message}")
    return cast(T, outcome)


def end_others(message: str) -> None:
    """Ends all other processes, which print the message and exit with 5 (`ending_together`).

    They may be waiting for a collective of this process, which nothing interrupts. Without this,
    the end of process 0 aborts them all.
    """
    failure = json.dumps([jax.process_index(), message])
    _client().key_value_set("failure", failure, allow_overwrite=True)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Ends this process with 5 as soon as another one has called `end_others`."""
    done = threading.Event()

    def watch(client) -> None:
        while not done.wait(1):
            try:
                index, message = json.loads(client.key_value_try_get("failure"))
            except jax.errors.JaxRuntimeError:  # nobody has failed
                continue
            if index != jax.process_index():
                print(message, file=sys.stderr, flush=True)
                all_end()
                os._exit(ResourceError.exit_code)

    if jax.process_count() > 1:
        threading.Thread(target=watch, args=(_client(),), daemon=True).start()
    try:
        yield
    finally:
        done.set()


def all_end() -> bool:
    """Whether all other processes end, too. If not, JAX's shutdown must not wait for them.

    At exit JAX waits five minutes for processes that may be waiting for this one, and then aborts
    them all, whatever their exit codes.
    """
    if jax._src.distributed.global_state.client is None:
        return True
    try:
        _client().wait_at_barrier("the end", _END_MS)
    except jax.errors.JaxRuntimeError:
        return False
    if is_first():
        time.sleep(1)  # the coordinator: its answers to the others are on their way
    return True


def _client():
    client = jax._src.distributed.global_state.client  # no public name; Orbax relies on it too
    assert client is not None
    return client


def require_equal(what: dict[str, str], advice: str) -> None:
    """Checks that all processes have the same values.

    Args:
      what: Strings by name, such as hashes; the same names in every process.
      advice: Last line of the message.

    Raises:
      ConfigError: In every process, naming what differs and in which process.
    """
    first, *others = gather(dict(what))
    lines = []
    for number, values in enumerate(others, start=1):
        if differing := [name for name in what if values.get(name) != first.get(name)]:
            lines.append(f"process {number} differs from process 0 in {', '.join(differing)}")
    if lines:
        raise ConfigError("\n".join([*lines, advice]))


def require_shared(folder: Path) -> None:
    """Checks that all processes see the folder in which process 0 writes.

    Raises:
      ConfigError: In every process, if one of them sees another folder of this name.
      ResourceError: In every process, if process 0 cannot write there.
    """
    if jax.process_count() == 1:
        return
    # A fresh name: a file system may remember for a while that an older name was missing.
    mark = folder / f".seen-{broadcast(os.urandom(8).hex())}"

    def make() -> None:
        if is_first():
            with write_errors(folder):
                mark.touch()

    def look() -> None:
        if not mark.exists():
            raise ConfigError(
                f"--workdir {folder}: not the folder that process 0 has under this name; name one"
                " that all machines share"
            )

    try:
        run_on_all(make)
        run_on_all(look)
    finally:
        if is_first():
            mark.unlink(missing_ok=True)


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Yields an event that the first SIGTERM or SIGINT sets; the second ends the process at once.

    Python runs signal handlers between two bytecodes of the main thread, which may be compiling for
    minutes. The interpreter also writes the number of each signal to a pipe at once, and a thread
    reads that pipe.

    If the caller is not on the main thread, no handler can be set, and signals keep their effect.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch():
        while data := os.read(reader, 1):
            if data[0] not in _SIGNALS:
                if fd_before >= 0:  # set by an event loop, as in a notebook
                    os.write(fd_before, data)
                continue
            if stop.is_set():
                os._exit(128 + data[0])
            stop.set()
            name = signal.Signals(data[0]).name
            print(
                f"{name}: finishing and saving the round under way; send it again to stop at once",
                file=sys.stderr,
                flush=True,
            )

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writer)  # ends the thread
        watcher.join()
        os.close(reader)
