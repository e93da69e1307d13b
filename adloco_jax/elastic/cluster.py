"""The connection between the driver and its learners, actors of a Ray cluster; only this uses Ray.

Its processes exchange pickled data, with which a sender could run any code, so those without the
cluster's token are refused.
"""

import contextlib
import importlib.util
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from adloco_jax.data.sources import DATA_SOURCES
from adloco_jax.elastic.learner import Given, Learner, Reply
from adloco_jax.errors import ConfigError, ResourceError, reason
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.run.processes import machine_id

# A program that ends the cluster's processes once the driver has ended, which closes its pipe.
_REAPER = """
import contextlib, os, pathlib, shutil, signal, sys, time
folder, spared = sys.argv[1], (os.getpid(), os.getppid())
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setsid()
sys.stdin.buffer.read()
def of_cluster(pid):  # tested by its environment, or for agents by their open log files
    if folder.encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
        return True
    files = os.listdir(f"/proc/{pid}/fd")
    return any(os.readlink(f"/proc/{pid}/fd/{file}").startswith(folder) for file in files)
def kill(pid):
    with contextlib.suppress(OSError):
        if pid not in spared and of_cluster(pid):
            os.kill(pid, signal.SIGKILL)
            return True
for _ in range(100):
    if not any([kill(int(pid)) for pid in os.listdir("/proc") if pid.isdecimal()]):
        break
    time.sleep(0.05)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


# A learner's end in short, by a part of Ray's message about it, which has several lines.
_DEATHS = {
    "worker process has died": "its process has ended",
    "its node has died": "its node ended",
    "temporarily unavailable": "its process or its node cannot be reached",
}

_PATIENCE_S = 20.0  # how long Ray's head may be out of reach, and an end of the run may take
_lost: list[str] = []  # which of Ray's own processes has ended; empty while all of them work
_raylet: list[int] = []  # a file that can be read once Ray's process on this machine has ended


class Actor(Learner):
    """A learner in a process of the cluster."""

    def __init__(self, number: int, life: int, given: Given):
        """Begin a life of the learner. SIGTERM asks it to leave; it ends with its parent."""
        signal.signal(signal.SIGTERM, self.leave)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        ARCHITECTURES.update(given.entries["ARCHITECTURES"])
        DATA_SOURCES.update(given.entries["DATA_SOURCES"])
        super().__init__(given)
        self.enlist(number, life, given.log)


def _end_with(parent: int) -> None:
    """Wait until the parent process has ended, then end this process."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def check_possible(*_: object, **__: object) -> None:
    """Raise ConfigError if Ray is missing, or in use here; a bucket has more conditions."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("engine.kind = ray: not installed; pip install 'adloco_jax[ray]'")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise ConfigError(
            "engine.kind = ray: this process is connected to Ray already; call ray.shutdown() first"
        )


@contextlib.contextmanager
def connected(
    address: str, num_learners: int, given: Given | None, is_over: Callable[[], bool]
) -> Iterator["RayTransport"]:
    """Connect to the Ray cluster at an address (HOST:PORT), or start one on this machine.

    A started cluster has a token, no dashboard and no usage reports, keeps its files in a temporary
    folder, and ends with the driver. Raises ConfigError if none is there or it refuses the token,
    ResourceError if none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with contextlib.ExitStack() as stack:
        at_sigterm = signal.getsignal(signal.SIGTERM)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        if address:
            import ray

            fault = "nothing answers there"
            try:
                _reach(address)  # Ray would try the address for minutes
                fault = "the Ray cluster there does not accept this process"
                ray.init(address=address, **quiet)
            except Exception as error:  # deliberately broad, because Ray raises many kinds
                cause = reason(error, 200)
                raise ConfigError(
                    f"engine.address = {address}: {fault} ({cause}); see docs/guides/elastic.md for"
                    " addresses and tokens"
                ) from error
            stack.enter_context(_tamed(ray, at_sigterm))
            yield RayTransport(num_learners, given)
            return
        folder = tempfile.mkdtemp(prefix="adloco-", dir="/tmp")  # a socket's path must be short
        reap = [sys.executable, "-c", _REAPER, folder]
        reaper = subprocess.Popen(reap, stdin=subprocess.PIPE, env={}, start_new_session=False)
        stack.callback(_end, reaper, folder)
        token = Path(folder) / "token"
        with os.fdopen(os.open(token, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(os.urandom(32).hex())
        changed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        # Without this, Ray replaces the loopback address by an address that other machines see.
        changed["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # By default Ray gives its workers niceness 15, so any other process would slow a round.
        changed["RAY_worker_niceness"] = "0"
        # Learners import the user's functions from the same folders as the driver.
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        before = {name: os.environ.get(name) for name in (*changed, "RAY_AUTH_TOKEN")}
        stack.callback(_read_environment)
        stack.callback(_restore, before)
        os.environ.update(changed)
        os.environ.pop("RAY_AUTH_TOKEN", None)
        import ray

        _read_environment()
        try:
            with warnings.catch_warnings():  # about forks: harmless, as exec follows at once
                warnings.simplefilter("ignore", RuntimeWarning)
                ray.init(
                    address="local",
                    num_cpus=num_learners,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=f"{folder}/ray",  # Ray lets everybody write here
                    **quiet,
                )
        except Exception as error:  # deliberately broad, because Ray raises many kinds
            cause = reason(error, 200)
            raise ResourceError(f"engine.kind = ray: no cluster started here ({cause})") from error
        stack.enter_context(_tamed(ray, at_sigterm))
        yield RayTransport(num_learners, given)


@contextlib.contextmanager
def _tamed(ray: Any, at_sigterm: Any) -> Iterator[None]:
    """Keep the run's SIGTERM handler, hide messages on ended processes, watch the cluster."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, at_sigterm)
    worker, closed = ray._private.worker, threading.Event()
    # Ray prints these messages even if `log_to_driver` is False.
    shown, worker.print_worker_logs = worker.print_worker_logs, lambda *_: None
    _lost.clear()
    head = ray.get_runtime_context().gcs_address

    def watch():
        answered_s = time.monotonic()
        while not (closed.wait(2.0) or _is_gone()):
            with contextlib.suppress(OSError):
                _reach(head)
                answered_s = time.monotonic()
            if time.monotonic() - answered_s > _PATIENCE_S:
                _lost.append(f"its head at {head} does not answer")
        if not closed.wait(_PATIENCE_S) and _lost:
            print(_gone(), file=sys.stderr, flush=True)
            os._exit(ResourceError.exit_code)

    watcher = threading.Thread(target=watch, name="ray", daemon=True)
    try:
        if hasattr(os, "pidfd_open"):  # on Linux
            with socket.socket(socket.AF_UNIX) as own:
                own.connect(worker._global_node.raylet_socket_name)
                credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _raylet.append(os.pidfd_open(struct.unpack("3i", credentials)[0]))
        watcher.start()
        yield
    finally:
        ray.shutdown()
        closed.set()
        watcher.join()
        while _raylet:
            os.close(_raylet.pop())
        worker.print_worker_logs = shown


def _is_gone() -> bool:
    if not _lost and select.select(_raylet, [], [], 0)[0]:
        _lost.append("its process on this machine has ended")
    return bool(_lost)


def _gone() -> ResourceError:
    return ResourceError(
        f"the Ray cluster is gone ({_lost[0]}); the same command continues from the newest"
        " checkpoint"
    )


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10):
        pass


def _read_environment() -> None:
    """Let Ray read the environment, which it otherwise does only when it is imported."""
    import ray

    native: Any = ray._raylet
    native.Config.initialize("")
    native.AuthenticationTokenLoader.instance().reset_cache()
    constants: Any = ray._private.ray_constants
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not constants.IS_WINDOWS_OR_OSX
    )


def _end(reaper: subprocess.Popen, folder: str) -> None:
    assert reaper.stdin is not None
    reaper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        reaper.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _check() -> None:
    if _is_gone():
        raise _gone()


def _reply(call: Any) -> Reply:
    import ray

    try:
        return Reply(ray.get(call), "")
    except ray.exceptions.RayTaskError as error:
        return Reply(None, f"{type(error.cause).__name__}: {error.cause}"[:300])
    except ray.exceptions.RayError as error:
        for words, cause in _DEATHS.items():
            if words in str(error):
                return Reply(None, cause)
        return Reply(None, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"[:300])


class RayTransport:
    """The transport of a run whose learners are actors of a Ray cluster."""

    is_remote = False  # the learners are near, and the driver starts them

    def __init__(self, num_learners: int, given: Given | None):
        self._num_learners, self._given = num_learners, self.put(given, None)

    def put(self, value: Any, trainer: int | None) -> Any:
        """Store a value once for several calls; ConfigError if it cannot be pickled."""
        import ray

        _check()
        try:
            return ray.put(value)
        except TypeError as error:  # the message of Ray would list the whole value
            raise ConfigError(
                "engine.kind = ray: functions and rows that learners are sent must be picklable"
                f" ({type(error.__cause__).__name__}: {str(error.__cause__)[:200]})"
            ) from None

    def start(self, number: int, life: int) -> Any:
        """Ask for a process on any node with a free CPU (and GPUs, if any); return its handle."""
        import ray

        _check()
        gpus = ray.cluster_resources().get("GPU", 0)
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": max(int(gpus // self._num_learners), 1) if gpus else 0,
            "max_restarts": 0,  # Ray must not restart a learner, because its state would be lost
            "max_task_retries": 0,
            "concurrency_groups": {"aside": 2},
            "scheduling_strategy": "SPREAD",
        }
        return ray.remote(**options)(Actor).remote(number, life, self._given)

    def submit(self, handle: Any, method: str, *arguments: Any, aside: bool = False) -> Any:
        """Call a method of a learner without waiting; return a reference for `poll`.

        Calls run one after another, but with `aside` beside the others, in another thread.
        """
        _check()
        function = getattr(handle, method)
        if aside:
            function = function.options(concurrency_group="aside")
        return function.remote(*arguments)

    def poll(self, calls: Sequence[Any], timeout_s: float) -> dict[Any, Reply]:
        """Wait until a call has ended or the time is over; ResourceError if the cluster is gone."""
        import ray

        _check()
        if not calls:
            time.sleep(timeout_s)
            return {}
        try:
            ended, _ = ray.wait([*calls], num_returns=len(calls), timeout=0)
            if not ended:
                ended, _ = ray.wait([*calls], num_returns=1, timeout=timeout_s)
        except ray.exceptions.RayError as error:
            _lost.append(reason(error, 200))
            raise _gone() from error
        return {call: _reply(call) for call in ended}

    def kill(self, handle: Any, process: tuple[str, int] | None) -> None:
        """End a learner through Ray, and by a signal if `process` is on this machine."""
        import ray

        if not _is_gone():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle, no_restart=True)
        if process is not None and process[0] == machine_id():
            with contextlib.suppress(OSError):
                if b"ray::" in Path(f"/proc/{process[1]}/cmdline").read_bytes():
                    os.kill(process[1], 9)
