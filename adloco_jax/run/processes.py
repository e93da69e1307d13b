"""The processes of one run: starting them together, and what they must know of one another.

Every process runs the same program on the same host state; only the first one prints and writes.
What only one of them can know (a clock, a signal, a full disk) is exchanged here before anything is
decided by it.
"""

import contextlib
import functools
import itertools
import json
import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from adloco_jax import errors
from adloco_jax.errors import ConfigError, ResourceError, UserError

_MEETING_MS = 30 * 60 * 1000  # the slowest disk's save; who dies is noticed by heartbeats
_PARTING_MS = 10 * 1000  # for which a process that ends waits for the others to do so

T = TypeVar("T")

_times: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # a name was used, so far


def connect(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: int = 300,
) -> None:
    """Makes this process one of several; before anything else of JAX is used.

    Args:
      coordinator: HOST:PORT of process 0; None has JAX find out what started it (Slurm, Open MPI,
        Kubernetes), and leave the rest to that too.
      num_processes: How many there are.
      process_id: Which one this is.
      timeout_s: How long to wait for the others.

    Raises:
      ConfigError: If the three do not fit one another, or nothing is found that started several.
      ResourceError: If they cannot meet. If they do not in time, the process ends with its code.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ConfigError("--coordinator, --num_processes, --process_id: give all three, or none")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise ConfigError(f"--process_id={process_id}: expected 0 to {num_processes - 1}")
    if coordinator is not None and process_id == 0:
        _check_port(coordinator)
    # Its preemption service takes SIGTERM for itself; here the run saves and stops at it.
    jax.config.update("jax_enable_preemption_service", False)
    whose = "" if process_id is None else f"process {process_id} of {num_processes}: "
    where = "" if coordinator is None else f" at {coordinator}"

    def give_up():
        # JAX would abort the process with a stack trace, and cannot be interrupted in its waiting.
        print(f"{whose}not all processes met{where} within {timeout_s} s", file=sys.stderr)
        sys.stderr.flush()
        os._exit(ResourceError.exit_code)

    patience = threading.Timer(timeout_s, give_up)
    patience.daemon = True
    patience.start()
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=timeout_s + 60
        )
    except ValueError as error:
        raise ConfigError(
            "--distributed: nothing was found that started several processes (Slurm, Open MPI,"
            f" Kubernetes); give --coordinator, --num_processes, --process_id ({error})"
        ) from error
    except RuntimeError as error:
        cause = " ".join(str(error).split())[:300]
        raise ResourceError(f"{whose}not all processes met{where} ({cause})") from error
    finally:
        patience.cancel()


def _check_port(coordinator: str) -> None:
    """JAX is aborted where its port is taken."""
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
    """Standard output of all other processes goes nowhere."""
    with contextlib.ExitStack() as stack:
        if not is_first():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield


def gather(value: T) -> list[T]:
    """What each process gives, in their order; all must call it, and wait for the devices.

    Args:
      value: Plain JSON data.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([len(text)], np.int32)).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [
        json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes.tolist(), strict=True)
    ]


def from_first(value: T) -> T:
    """What the first process gives, of plain JSON data; as `gather` otherwise."""
    return gather(value)[0]


def together(act: Callable[[], T]) -> T:
    """Does something in every process; a mistake that one of them finds is one of all.

    A process that ended alone would leave the others waiting for it.

    Args:
      act: What to do; it exchanges nothing with the others.

    Returns:
      What it has returned here.

    Raises:
      UserError: In every process: its own, or the first of the others'.
    """
    try:
        outcome, mistake = act(), None
    except UserError as error:
        outcome, mistake = None, error
    everyone = gather(None if mistake is None else [type(mistake).__name__, str(mistake)])
    if mistake is not None:
        raise mistake
    for number, theirs in enumerate(everyone):
        if theirs is not None:
            name, message = theirs
            raise getattr(errors, name)(f"process {number}: {message}")
    return cast(T, outcome)


def meet(name: str) -> None:
    """Waits on the host, on any thread, until all processes have come to the same place.

    Args:
      name: Of the place; all come to it equally often.
    """
    if jax.process_count() > 1:
        _client().wait_at_barrier(f"{name} ({next(_times[name])})", _MEETING_MS)


def all_end() -> bool:
    """Whether the others come to their end, too; if not, this one must not wait for them in JAX.

    Leaving, JAX waits five minutes for processes that may be waiting for this one, and then aborts
    them all, whatever their exit codes.
    """
    if jax._src.distributed.global_state.client is None:
        return True
    try:
        _client().wait_at_barrier("the end", _PARTING_MS)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def tell(name: str, text: str) -> list[str]:
    """As `gather` for text, but on the host, on any thread, and under a name as in `meet`."""
    if jax.process_count() == 1:
        return [text]
    client, place = _client(), f"{name} ({next(_times[name])})"
    client.key_value_set(f"{place}/{jax.process_index()}", f"={text}")
    keys = [f"{place}/{number}" for number in range(jax.process_count())]
    return [client.blocking_key_value_get(key, _MEETING_MS).removeprefix("=") for key in keys]


def _client():
    client = jax._src.distributed.global_state.client  # no public name; Orbax relies on it too
    assert client is not None
    return client


def require_equal(what: dict[str, str], advice: str) -> None:
    """Compares the processes.

    Args:
      what: Strings by name, such as hashes; of the same names in every process.
      advice: Ends the message.

    Raises:
      ConfigError: In every process, naming what differs and in which.
    """
    everyone = gather(dict(what))
    lines = []
    for number, theirs in enumerate(everyone):
        differing = [name for name in what if theirs.get(name) != everyone[0].get(name)]
        if differing:
            lines.append(f"process {number} differs from process 0 in {', '.join(differing)}")
    if lines:
        raise ConfigError("\n".join([*lines, advice]))


def require_shared(folder: Path) -> None:
    """Has all processes look for a file that the first one makes, and removes again.

    Raises:
      ConfigError: In every process, if the folder of this name is not the same one for all.
      ResourceError: In every process, if nothing can be made there.
    """
    if jax.process_count() == 1:
        return
    # A name of its own: a file system may remember for a while that another was not there.
    mark = folder / f".seen-{from_first(os.urandom(8).hex())}"

    def make() -> None:
        try:
            if is_first():
                mark.touch()
        except OSError as error:
            raise ResourceError(f"{folder}: cannot be written ({error.strerror})") from error

    def look() -> None:
        if not mark.exists():
            raise ConfigError(
                f"--workdir {folder}: not the folder that process 0 has under this name; name one"
                " that all machines share"
            )

    try:
        together(make)
        together(look)
    finally:
        if is_first():
            mark.unlink(missing_ok=True)


class Vote:
    """A few yes or no questions, answered yes if any process says so.

    Asked before a round is dispatched and read while it runs: unlike `gather` nobody waits for the
    devices to finish what they have begun since.
    """

    def __init__(self, ask: Callable[[], list[bool]]):
        """Sends this process's answers to the others; alone, it asks when the result is read."""
        self._ask, self._result = ask, None
        if jax.process_count() > 1:
            devices = np.array(jax.devices())
            answers = np.array(ask())
            over_all = NamedSharding(Mesh(devices, "device"), P("device"))
            votes = jax.make_array_from_callback(
                (len(devices), len(answers)), over_all, lambda index: answers[None]
            )
            self._result = _any_of(over_all.mesh)(votes)

    def read(self) -> list[bool]:
        """The answers."""
        return self._ask() if self._result is None else np.asarray(self._result).tolist()


@functools.cache
def _any_of(mesh: Mesh):
    return jax.jit(lambda votes: votes.any(axis=0), out_shardings=NamedSharding(mesh, P()))
