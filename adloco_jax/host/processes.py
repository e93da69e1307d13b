"""The processes of one run: connect them, exchange values between them, stop them by signals.

All run the same program and must decide alike; a clock, a signal or a full disk is known to one
only, and is exchanged through JAX's coordinator, as devices may be busy. Only process 0 prints and
writes.

The coordinator is a table of texts in process 0 that all processes read and write. An exchange is
one value from each process, read by all (`gather`).
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
from typing import Any, TypeVar, cast

import jax

from adloco_jax import errors
from adloco_jax.errors import ConfigError, ResourceError, UserError
from adloco_jax.host.terminal import say

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXCHANGE_MS = 2 * 60 * 60 * 1000  # time limit of an exchange, longer than any load or save takes
_END_MS = 10 * 1000  # for so long a process that ends waits for the other processes to end
# The exit code of a process that a signal has ended is this plus the signal's number.
_SIGNALLED = 128

T = TypeVar("T")

_stops: list[threading.Event] = []  # the event of the present `stop_requests`

_num_sent: Counter[str] = Counter()  # for each name of an exchange, how many values were sent


def connect(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: int = 300,
) -> None:
    """Connect this process with the others; JAX must not have been used before.

    Give `coordinator` (HOST:PORT of process 0), `num_processes` and `process_id`, or none of them:
    JAX then asks the launcher (Slurm, Open MPI, Kubernetes). After `timeout_s` seconds the process
    exits with ResourceError's code.

    Raises:
      ConfigError: If arguments are contradictory or missing.
      ResourceError: If connecting fails.
    """
    if num_processes is not None:
        number = 0 if process_id is None else process_id
        if not 0 <= number < num_processes:
            raise ConfigError(f"--process_id={process_id}: expected 0 to {num_processes - 1}")
    if coordinator is not None and process_id == 0:
        _check_port(coordinator)
    # JAX's preemption service would handle SIGTERM. Here SIGTERM makes a run save and stop.
    jax.config.update("jax_enable_preemption_service", False)

    # The beginning of the message if connecting fails.
    failure = "not all processes connected"
    if process_id is not None:
        failure = f"process {process_id} of {num_processes}: {failure}"
    if coordinator:
        failure += f" at {coordinator}"

    def give_up() -> None:
        """End this process with a line on stderr, from the thread of the timer."""
        print(f"{failure} within {timeout_s} s", file=sys.stderr, flush=True)
        os._exit(ResourceError.exit_code)

    # JAX's wait cannot be interrupted, and at its own time limit it aborts with a stack trace. So a
    # timer ends the process before that limit.
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    jax_timeout_s = timeout_s + 60  # is not reached: the timer is earlier
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=jax_timeout_s
        )
    except ValueError as error:
        raise ConfigError(
            "--distributed: no launcher of several processes was found (Slurm, Open MPI,"
            f" Kubernetes); give --coordinator, --num_processes, --process_id ({error})"
        ) from error
    except RuntimeError as error:
        reason = " ".join(str(error).split())  # JAX's message, of several lines, as one
        raise ResourceError(f"{failure} ({reason[:300]})") from error
    finally:
        timer.cancel()


def _check_port(coordinator: str) -> None:
    """Raise ConfigError unless the port in HOST:PORT is free; JAX would abort the process.

    The port is tried by listening on it for a moment.
    """
    _, _, port = coordinator.rpartition(":")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))
    except (OSError, OverflowError, ValueError) as error:
        need = "need HOST:PORT, with a free port"
        raise ConfigError(f"--coordinator={coordinator}: {error}; {need}") from error


def leave_accelerator() -> None:
    """Let this process compute on the CPU, because a learner on this computer has the accelerator.

    A learner is a process that trains for an elastic run. Raises ConfigError if this process uses
    the accelerator already.
    """
    # Once JAX has been used, its platform is fixed. No public function tells whether it has.
    if not jax._src.xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "cpu":
        raise ConfigError(
            "engine.trains_here: this process uses the accelerator, which the learner needs; call"
            " train before other functions of JAX, or set engine.trains_here=false"
        )


def is_first() -> bool:
    """Whether this is process 0, the one that prints and writes."""
    return jax.process_index() == 0


@contextlib.contextmanager
def only_first_prints() -> Iterator[None]:
    """Discard what processes other than process 0 print, as long as the `with` block runs."""
    # With "backslashreplace" no character can fail to be written.
    with open(os.devnull, "w", errors="backslashreplace") as null:
        with contextlib.redirect_stdout(sys.stdout if is_first() else null):
            yield


def gather(value: T, name: str = "gather") -> list[T]:
    """Return every process's value, which is plain JSON, in the processes' order.

    All processes must call this, equally often for each `name`, and they wait for each other. Two
    threads of a process must use different names. Raises JaxRuntimeError if a process gives no
    value within two hours.
    """
    if jax.process_count() == 1:
        return [value]
    client = _client()
    own_index = jax.process_index()
    _num_sent[name] += 1
    number = _num_sent[name]  # of this exchange, among those of the name
    client.key_value_set(f"{name} ({number})/{own_index}", json.dumps(value))
    values = []
    for index in range(jax.process_count()):
        text = client.blocking_key_value_get(f"{name} ({number})/{index}", _EXCHANGE_MS)
        values.append(json.loads(text))
    # All have sent for this exchange, so they have received the values of the previous one, and
    # this process's value for that can go.
    if number > 1:
        client.key_value_delete(f"{name} ({number - 1})/{own_index}")
    return values


def broadcast(value: T) -> T:
    """Return process 0's value, plain JSON, in all processes; all must call this."""
    return gather(value)[0]


def barrier(name: str) -> None:
    """Wait until all have called this; threads of a process need different names."""
    gather(None, name)  # no value: an exchange makes all wait for all


def run_on_all(
    act: Callable[[], T],
    *,
    name: str = "run_on_all",
    faults: type[Exception] | tuple[type[Exception], ...] = UserError,
    elsewhere: type[Exception] | None = None,
) -> T:
    """Run a function in every process and return its result; if it fails in one, raise in all.

    Otherwise the others would wait forever. All processes must call this.

    Args:
      act: The function, which must not exchange anything itself.
      name: Name of the exchange; two threads of a process must use different names.
      faults: Classes of errors that are exchanged; others end this process alone.
      elsewhere: Class of the error in processes where `act` succeeded. None: the class in `errors`
        of the first error, for which `faults` must be errors of that module.

    Raises:
      Exception: The error of `act`, where it failed. Elsewhere one of the class `elsewhere`, with
        the message of the first process that failed.
    """
    result = None
    own_error = None
    own_report = None  # of an error: the name of its class, and its message, as JSON
    try:
        result = act()
    except faults as error:
        own_error = error
        own_report = [_public_class(error), str(error) or repr(error)]

    reports = gather(own_report, name)
    if own_error is not None:
        raise own_error
    for index, report in enumerate(reports):
        if report is not None:
            class_name, message = report
            error_class = elsewhere or getattr(errors, class_name)
            raise error_class(f"process {index}: {message}")
    return cast(T, result)


def _public_class(error: Exception) -> str:
    """Return the name of the error's class in `errors`, or of its nearest base there; else ""."""
    for error_class in type(error).__mro__:  # the class itself, then its bases
        if hasattr(errors, error_class.__name__):
            return error_class.__name__
    return ""


def import_path() -> str:
    """Return a `PYTHONPATH` with which a child imports from the same folders as this process."""
    # An empty entry stands for the working directory, in which a folder may have a package's name.
    return os.pathsep.join(path for path in sys.path if path)


def start_thread(act: Callable[[], object], *, name: str) -> threading.Thread:
    """Start a thread that calls `act`; if that raises an error, the process says so and ends.

    It is a daemon thread, which does not keep the process alive.
    """

    def run() -> None:
        """Call `act`; if it raises an error, print that and end the process."""
        try:
            act()
        except Exception as error:  # deliberately broad, because nobody waits for the thread
            errors.end_process(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def every(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call a function again and again in a thread, as long as the `with` block runs.

    `seconds` pass before each call. If the function raises an error, the process says so and ends.
    """
    ended = threading.Event()

    def repeat() -> None:
        """Call `act` after each pause, until the `with` block has ended."""
        while not ended.wait(seconds):
            act()

    thread = start_thread(repeat, name=f"every {seconds:g} s")
    try:
        yield
    finally:
        ended.set()
        thread.join(seconds)  # not longer, because what it calls may hang


def end_others(message: str) -> None:
    """End all other processes with exit code 5, because this process has failed.

    They look for the failure every second (`ending_if_another_fails`), and print the message. They
    may be in a collective, a computation of all processes, which cannot be interrupted; without
    this, JAX would abort them when process 0 ends.
    """
    failure = json.dumps([jax.process_index(), message])
    _client().key_value_set("failure", failure, allow_overwrite=True)


def ending_if_another_fails() -> contextlib.AbstractContextManager[None]:
    """End this process with exit code 5 if another calls `end_others` in the `with` block.

    A thread looks for that every second. It prints the other process's message to stderr.
    """
    if jax.process_count() == 1:
        return contextlib.nullcontext()

    def look() -> None:
        """End this process if another has reported a failure."""
        try:
            report = _client().key_value_try_get("failure")
        except jax.errors.JaxRuntimeError:  # there is no such entry: no process has failed
            return
        index, message = json.loads(report)
        # The process that has failed ends by itself.
        if index != jax.process_index():
            print(message, file=sys.stderr, flush=True)
            # Process 0 has the table in which the others look for the failure, so all wait for all.
            wait_for_others_to_end()
            # This is not the main thread, which may be in a collective that cannot be interrupted.
            os._exit(ResourceError.exit_code)

    return every(1.0, look)


def wait_for_others_to_end() -> bool:
    """Wait up to 10 s for the other processes to end too; return whether all have.

    If not, the caller must end this process without JAX's shutdown (`os._exit`): at exit JAX waits
    five minutes for processes that may wait for this one, then aborts all of them.
    """
    if jax._src.distributed.global_state.client is None:  # `connect` was not called: one process
        return True
    try:
        _client().wait_at_barrier("the end", _END_MS)
    except jax.errors.JaxRuntimeError:
        return False
    if is_first():
        # Process 0 is the coordinator. Its last answers must reach the other processes.
        time.sleep(1)
    return True


def _client() -> Any:
    """Return the client of JAX's coordinator; `connect` must have been called before."""
    client = jax._src.distributed.global_state.client  # no public name; Orbax relies on it too
    assert client is not None
    return client


def require_equal(what: dict[str, str], advice: str) -> None:
    """Raise ConfigError in every process if named values differ between processes.

    `what` has this process's values by their names. The message names those that differ, and ends
    with `advice`. All processes must call this.
    """
    values_of_processes = gather(dict(what))
    values_of_first = values_of_processes[0]
    lines = []
    for index, values in enumerate(values_of_processes):
        differing = [name for name in what if values.get(name) != values_of_first.get(name)]
        if differing:
            lines.append(f"process {index} differs from process 0 in {', '.join(differing)}")
    if lines:
        lines.append(advice)
        raise ConfigError("\n".join(lines))


def is_asked_to_stop() -> bool:
    """Whether the present `stop_requests` has received a signal."""
    return any(stop.is_set() for stop in _stops)


@contextlib.contextmanager
def stop_requests(what: str) -> Iterator[threading.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; a second signal ends the process.

    The first is answered with a line on stderr, in which `what` tells what the process does then.

    Python's handlers wait for the main thread, which may be compiling for minutes, so a thread
    reads the pipe of signals. Outside the main thread no handler can be set, and signals act as
    usual.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    _stops.append(stop)
    # Python writes the number of each signal, a byte, to this pipe. It must not wait if it is full.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        """Read signals from the pipe until it is closed: set the event, or end the process."""
        while True:
            data = os.read(reader, 1)
            if not data:  # the pipe is closed
                return
            number = data[0]
            if number not in _SIGNALS:
                continue
            if stop.is_set():
                os._exit(_SIGNALLED + number)
            stop.set()
            line = f"{signal.Signals(number).name}: {what}; send it again to stop at once"
            say(line, file=sys.stderr)

    # A signal without a handler is not written to the pipe, so there are handlers that do nothing.
    handlers_before = {}
    for number in _SIGNALS:
        handlers_before[number] = signal.signal(number, lambda *_: None)
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = start_thread(watch, name="signals")
    try:
        yield stop
    finally:
        _stops.remove(stop)
        signal.set_wakeup_fd(fd_before)
        for number, handler in handlers_before.items():
            # None: the handler was not set by Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(writer)  # ends the thread
        watcher.join()
        os.close(reader)
