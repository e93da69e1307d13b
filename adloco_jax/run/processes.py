"""The processes of one run: connect them, exchange values between them, stop them by signals.

Every process runs the same program, and must make the same decisions; only process 0 prints and
writes. But the time on a clock, a signal or a full disk is known to one process only. So the
processes tell one another such facts before a decision depends on them. These values go through
JAX's coordinator, a server in process 0, and not through the devices, which may be busy.
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
_EXCHANGE_MS = 2 * 60 * 60 * 1000  # time limit of an exchange, longer than any load or save takes
_END_MS = 10 * 1000  # for so long a process that ends waits for the other processes to end

T = TypeVar("T")

_stops: list[threading.Event] = []  # the event of the present `stop_requests`

_num_sent: Counter[str] = Counter()  # for each name of an exchange, how many values were sent


def machine_id() -> str:
    """Return an id of this machine since its last boot.

    A process can be ended by a signal only on the machine with the same id.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.uname().nodename
    return os.uname().nodename


def connect(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: int = 300,
) -> None:
    """Connect this process with the other processes of a run.

    JAX must not have been used before in this process.

    Args:
      coordinator: HOST:PORT of process 0. None: JAX reads this argument and the next two from the
        launcher (Slurm, Open MPI, Kubernetes).
      num_processes: Number of processes.
      process_id: Index of this process, from 0.
      timeout_s: Seconds to wait for the other processes.

    Raises:
      ConfigError: If the first three arguments contradict one another, or JAX detects no launcher.
      ResourceError: If the processes cannot connect. After `timeout_s` seconds nothing is raised;
        this process prints a message and exits with the exit code of `ResourceError`.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ConfigError("--coordinator, --num_processes, --process_id: give all three, or none")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise ConfigError(f"--process_id={process_id}: expected 0 to {num_processes - 1}")
    if coordinator is not None and process_id == 0:
        _check_port(coordinator)
    # JAX's preemption service would handle SIGTERM. Here SIGTERM makes a run save and stop.
    jax.config.update("jax_enable_preemption_service", False)
    whose = "" if process_id is None else f"process {process_id} of {num_processes}: "
    failure = f"{whose}not all processes connected{f' at {coordinator}' if coordinator else ''}"

    def give_up():
        # The wait in JAX cannot be interrupted, and JAX's own time limit would abort this process
        # with a stack trace.
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
    """Check that the port of the coordinator is free, because JAX would abort the process if not.

    Raises:
      ResourceError: If another program uses the port.
      ConfigError: If the text is not HOST:PORT.
    """
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(coordinator.rpartition(":")[2])))
    except (OSError, OverflowError) as error:
        raise ResourceError(f"--coordinator={coordinator}: {error}; name another port") from error
    except ValueError as error:
        raise ConfigError(f"--coordinator={coordinator}: expected HOST:PORT") from error


def is_first() -> bool:
    """Whether this is process 0, the one that prints and writes."""
    return jax.process_index() == 0


@contextlib.contextmanager
def only_first_prints() -> Iterator[None]:
    """Discard what processes other than process 0 print, as long as the `with` block runs."""
    with open(os.devnull, "w", errors="backslashreplace") as null:
        with contextlib.redirect_stdout(sys.stdout if is_first() else null):
            yield


def _send(name: str, value: object) -> int:
    """Send the value of this process to all processes, as its part of an exchange with a name.

    Returns the number of the exchange among those with this name, which `_receive` needs.
    """
    _num_sent[name] += 1
    number = _num_sent[name]
    _client().key_value_set(f"{name} ({number})/{jax.process_index()}", json.dumps(value))
    return number


def _receive(name: str, number: int) -> list:
    """Wait until all processes have sent their values for an exchange; return the values in order.

    The exchange is identified by its name and number.
    """
    client = _client()
    keys = [f"{name} ({number})/{index}" for index in range(jax.process_count())]
    values = [json.loads(client.blocking_key_value_get(key, _EXCHANGE_MS)) for key in keys]
    # All processes have sent a value for this exchange, so they have received those of the previous
    # exchange, which can be deleted.
    if number > 1:
        client.key_value_delete(f"{name} ({number - 1})/{jax.process_index()}")
    return values


def gather(value: T, name: str = "gather") -> list[T]:
    """Collect one value from each process; return all values, in the order of the processes.

    All processes must call this function. Each of them receives all values.

    Args:
      value: The value of this process, plain JSON data.
      name: Name of the exchange. Two threads of a process must use different names.
    """
    return [value] if jax.process_count() == 1 else _receive(name, _send(name, value))


def broadcast(value: T) -> T:
    """Return the value of process 0 in all processes.

    All processes must call this function. The values of other processes are ignored. The value is
    plain JSON data.
    """
    return gather(value)[0]


def barrier(name: str) -> None:
    """Wait until all processes have called this function.

    Args:
      name: Name of the barrier. Two threads of a process must use different names.
    """
    gather(None, name)


def run_on_all(
    act: Callable[[], T],
    *,
    name: str = "run_on_all",
    faults: type[Exception] | tuple[type[Exception], ...] = UserError,
    elsewhere: type[Exception] | None = None,
) -> T:
    """Run a function in every process; if it fails in one of them, raise an error in all of them.

    All processes must call `run_on_all`. Without it, the other processes would wait for the process
    in which the function failed.

    Args:
      act: The function. It must not exchange anything with other processes.
      name: Name of the exchange. Two threads of a process must use different names.
      faults: Classes of errors about which other processes are told.
      elsewhere: Class of the error that is raised in a process where the function did not fail.
        None: the class of the error in the process where the function failed.

    Returns:
      The result of `act` in this process.

    Raises:
      Exception: If `act` failed in any process. A process in which `act` failed raises its own
        error. The other processes raise an error with the message of the first process that failed.
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
    """End all other processes of the run, because this process has failed.

    The other processes watch for this call in `ending_together`. They print the message and exit
    with code 5. They may be waiting for this process in a collective, which cannot be interrupted.
    Without this call, JAX would abort them when process 0 ends.
    """
    failure = json.dumps([jax.process_index(), message])
    _client().key_value_set("failure", failure, allow_overwrite=True)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """End this process with exit code 5 if another process calls `end_others`.

    A thread watches for such a call as long as the `with` block runs.
    """
    done = threading.Event()

    def watch(client) -> None:
        while not done.wait(1):
            try:
                index, message = json.loads(client.key_value_try_get("failure"))
            except jax.errors.JaxRuntimeError:  # no process has failed
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
    """Wait up to 10 s for the other processes to call this function; return whether all have.

    A process calls this function when it ends. If the result is False, the caller must skip the
    shutdown of JAX. At exit JAX waits five minutes for the other processes, which may be waiting
    for this one. Then JAX aborts all processes, and their exit codes are lost.
    """
    if jax._src.distributed.global_state.client is None:
        return True
    try:
        _client().wait_at_barrier("the end", _END_MS)
    except jax.errors.JaxRuntimeError:
        return False
    if is_first():
        # Process 0 is the coordinator. Its last answers must reach the other processes.
        time.sleep(1)
    return True


def _client():
    client = jax._src.distributed.global_state.client  # no public name; Orbax relies on it too
    assert client is not None
    return client


def require_equal(what: dict[str, str], advice: str) -> None:
    """Check that all processes have the same values.

    Args:
      what: The values to compare, as strings; the key is the name of the value. All processes must
        give the same names.
      advice: Last line of the error message.

    Raises:
      ConfigError: In every process, if any values differ. The message names the values that differ,
        and the processes.
    """
    first, *others = gather(dict(what))
    lines = []
    for number, values in enumerate(others, start=1):
        if differing := [name for name in what if values.get(name) != first.get(name)]:
            lines.append(f"process {number} differs from process 0 in {', '.join(differing)}")
    if lines:
        raise ConfigError("\n".join([*lines, advice]))


def require_shared(folder: Path) -> None:
    """Check that all processes see the folder to which process 0 writes.

    Raises:
      ConfigError: In every process, if one process sees a different folder under this name.
      ResourceError: In every process, if process 0 cannot write to the folder.
    """
    if jax.process_count() == 1:
        return
    # The file has a new name each time. A file system may remember for a while that there is no
    # file of some name, even if process 0 has made it since then.
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


def is_asked_to_stop() -> bool:
    """Whether the present `stop_requests` has received a signal."""
    return any(stop.is_set() for stop in _stops)


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; a second signal ends the process.

    The signals are caught as long as the `with` block runs. Python runs a signal handler only
    between two bytecodes of the main thread, which may be compiling for minutes. But the
    interpreter writes the number of each signal to a pipe at once. Here a thread reads that pipe,
    and sets the event.

    If the caller is not on the main thread, Python cannot set handlers. The event is then never
    set, and signals keep their usual effect.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    _stops.append(stop)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch():
        while data := os.read(reader, 1):
            if data[0] not in _SIGNALS:
                if fd_before >= 0:  # an event loop, as in a notebook, waits for signals, too
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
        _stops.remove(stop)
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writer)  # ends the thread
        watcher.join()
        os.close(reader)
