"""The connection between the driver and its learners, actors of a Ray cluster; only this uses Ray.

An actor is an object in a process of the cluster, whose methods other processes call. Ray's
processes exchange pickled data, with which a sender could run any code, so those without the
cluster's token are refused. A learner's number stays with its workers; its incarnation counts the
processes that had the number before.
"""

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from adloco_jax.data.sources import DATA_SOURCES
from adloco_jax.elastic.learner import Learner, LearnerSetup, Reply
from adloco_jax.elastic.messages import Refused, array_bytes, said
from adloco_jax.errors import ConfigError, ResourceError, check_installed, reason
from adloco_jax.host import processes
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.settings import Settings

_CONNECT_S = 10  # a cluster must accept a connection within so many seconds
_CHECK_PARENT_S = 1.0  # between two checks of whether a learner's parent runs
_SHOWN_CHARACTERS = 200  # of an error of Ray
_TOKEN_BYTES = 32  # random bytes of a token, which is written in hexadecimal digits

# Environment of the cluster that a run starts. Ray reads it once, when it is imported, so it stays.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # Without this, Ray replaces the loopback address by an address that other machines see.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # By default Ray gives its workers niceness 15, so any other process would slow a round.
    "RAY_worker_niceness": "0",
}


class RayLearner(Learner):
    """A learner in a process of the cluster, which ends with its parent, Ray's own process."""

    def __init__(self, number: int, incarnation: int, setup: LearnerSetup):
        """Load data and prepare programs; from then on the driver may call the methods.

        SIGTERM asks the learner to leave. Raises UserError, of which Ray tells the driver, if the
        data cannot be read or the devices do not fit.
        """
        signal.signal(signal.SIGTERM, self.leave)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        # The model's architecture and the data source of the run: a user may have added them to
        # the driver's tables, so this process may not have them.
        architecture, data_source = setup.entries
        ARCHITECTURES[setup.settings.model.arch] = architecture
        DATA_SOURCES[setup.settings.data.source] = data_source
        super().__init__(setup)
        self.enlist(number, incarnation, setup.log)


def _end_with(parent: int) -> None:
    """End this process once the process with the id `parent` has ended."""
    while os.getppid() == parent:  # an orphan gets another parent
        time.sleep(_CHECK_PARENT_S)
    os._exit(1)  # `sys.exit` would end only this thread


def check_possible(settings: Settings, folder: Path) -> None:
    """Raise ConfigError if Ray is missing, or this process is connected to a cluster already.

    The arguments, which every transport's check gets, do not matter.
    """
    check_installed("ray", where="engine.kind = ray", extra="ray")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise ConfigError(
            "engine.kind = ray: this process is connected to Ray already; call ray.shutdown() first"
        )


@contextlib.contextmanager
def connected(
    address: str, num_learners: int, setup: LearnerSetup | None, is_over: Callable[[], bool]
) -> Iterator["RayTransport"]:
    """Connect to the Ray cluster at an address, or start one on this machine.

    A started cluster has a token, no dashboard and no usage reports, keeps its files in a temporary
    folder, and ends with the driver.

    Args:
      address: HOST:PORT of the cluster; empty: one is started.
      num_learners: Number of learners that the run has at most.
      setup: What each learner is made from; None where no learner is started, as in tests.
      is_over: Not used: learners end with the `with` block, whether the run is over or not.

    Yields:
      The transport, by which the driver starts learners and calls them.

    Raises:
      ConfigError: If no cluster is at the address, or it refuses this process; if Ray was imported
        with another environment; or if the setup cannot be pickled.
      ResourceError: If no cluster can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    at_sigterm = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(
        prefix="adloco-",
        dir="/tmp",  # short, because a socket's path must be
        ignore_cleanup_errors=True,
    ) as folder:
        if address:
            _connect(address)
        else:
            _start(num_learners, folder)
        import ray  # only now: it reads the environment, which `_start` has changed, when imported

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, at_sigterm)  # Ray has replaced it
        try:
            yield RayTransport(num_learners, setup)
        finally:
            ray.shutdown()


def _connect(address: str) -> None:
    """Connect to the cluster at HOST:PORT; raise ConfigError if that fails."""
    import ray

    try:
        host, _, port = address.rpartition(":")
        # Ray itself would try for minutes.
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # deliberately broad, because Ray raises many kinds
        raise ConfigError(
            f"engine.address = {address}: no Ray cluster there accepts this process"
            f" ({reason(error, _SHOWN_CHARACTERS)}); see docs/guides/elastic.md for addresses and"
            " tokens"
        ) from error


def _start(num_learners: int, folder: str) -> None:
    """Start a cluster on this machine, with one CPU for each learner and its files in a folder.

    Ray reads its settings from the environment when it is imported, and its processes inherit that.
    So `_ENVIRONMENT` and a token are set for good. `RAY_TMPDIR`, the `folder`, and `PYTHONPATH`,
    with which learners import what the driver can, are set back after the start.

    Raises ConfigError if Ray was imported with another environment, ResourceError if no cluster can
    be started.
    """
    if "ray" in sys.modules and not _ENVIRONMENT.items() <= os.environ.items():
        needed = " ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
        raise ConfigError(
            f"engine.kind = ray: Ray was imported without {needed}; import it later, or set these"
        )
    os.environ.update(_ENVIRONMENT)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # else the user's file has the token
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(_TOKEN_BYTES))
    import ray

    # The environment for the start only; `before` is what it replaces.
    for_start = {"RAY_TMPDIR": folder, "PYTHONPATH": processes.import_path()}
    before = {name: os.environ[name] for name in for_start if name in os.environ}
    os.environ.update(for_start)
    try:
        with warnings.catch_warnings():  # about forks: harmless, as exec follows at once
            warnings.simplefilter("ignore", RuntimeWarning)
            ray.init(
                address="local",
                num_cpus=num_learners,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
    except Exception as error:  # deliberately broad, because Ray raises many kinds
        cause = reason(error, _SHOWN_CHARACTERS)
        raise ResourceError(f"engine.kind = ray: no cluster started here ({cause})") from error
    finally:
        for name in for_start:
            del os.environ[name]
        os.environ.update(before)  # those that were set before the start


def _reply(call: Any) -> Reply:
    """Return the result of a call that has ended, or in words why there is none.

    `call` is Ray's reference to the result. If the learner has refused the request, the reply's
    value is `Refused`, and the learner goes on. After any other error the reply has an `error`, and
    the learner counts as ended.
    """
    import ray

    try:
        value = ray.get(call)
        return Reply(value, num_bytes=array_bytes(value))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Refused):
            return Reply(Refused(f"it refused the request: {said(str(error.cause))}"))
        return Reply(value=None, error=said(f"{type(error.cause).__name__}: {error.cause}"))
    except ray.exceptions.ActorUnavailableError:
        return Reply(value=None, error="its process or its node cannot be reached")
    except ray.exceptions.RayActorError as error:
        if not error.actor_init_failed:
            return Reply(value=None, error="its process or its node has ended")
        last_line = str(error).strip().splitlines()[-1]  # has the error of `__init__`
        return Reply(value=None, error=said(last_line))


class RayTransport:
    """The transport of a run whose learners are actors of a Ray cluster.

    `transport.Transport` describes the methods `put`, `start`, `submit`, `poll` and `kill`. A
    handle is Ray's handle of an actor, and a call its reference to a result.
    """

    launches = True
    moves_states = True

    def __init__(self, num_learners: int, setup: LearnerSetup | None):
        """Store the setup of learners in the Ray cluster to which this process is connected.

        The GPUs of the cluster are divided among `num_learners` learners. `setup` is None only
        where no learner is started, as in tests. Raises ConfigError if it cannot be pickled.
        """
        import ray

        self._ray = ray
        self._num_learners = num_learners
        self._setup, _ = self.put(setup, kind=None)  # Ray's reference to it

    def put(self, params: Any, kind: Hashable) -> tuple[Any, int]:
        """Store a value once for several calls; return a reference, and the bytes of its arrays.

        `kind` is not used: Ray deletes a value when its reference is gone. Raises ConfigError if
        the value cannot be pickled.
        """
        try:
            return self._ray.put(params), array_bytes(params)
        except TypeError as error:  # the message of Ray would list the whole value
            cause = error.__cause__
            raise ConfigError(
                "engine.kind = ray: functions and rows that learners are sent must be picklable"
                f" ({type(cause).__name__}: {str(cause)[:_SHOWN_CHARACTERS]})"
            ) from None

    def start(self, number: int, incarnation: int) -> Any:
        """Ask for a learner's process; return its actor, which Ray starts later.

        It runs on any node with a free CPU and, if the cluster has GPUs, with its share of them, at
        least one.
        """
        gpus = self._ray.cluster_resources().get("GPU", 0)  # of all nodes
        num_gpus = 0  # of this learner
        if gpus:
            num_gpus = max(int(gpus // self._num_learners), 1)
        options: dict[str, Any] = {  # Ray's types do not know all of them
            "num_cpus": 1,
            "num_gpus": num_gpus,
            "max_restarts": 0,  # Ray must not restart a learner, because its state would be lost
            "max_task_retries": 0,
            # Calls of "ping" and "states" are answered while "run_round" runs, two at a time.
            "concurrency_groups": {"aside": 2},
            "scheduling_strategy": "SPREAD",  # over the nodes
        }
        actor_class = self._ray.remote(**options)(RayLearner)
        return actor_class.remote(number, incarnation, self._setup)  # arguments of `__init__`

    # `**arguments` are those of the method, which Ray forwards.
    def submit(self, handle: Any, method: str, **arguments: Any) -> tuple[Any, int]:
        """Call a method of a learner without waiting.

        `handle` is the learner's actor, and `method` the method's name. Returns a reference for
        `poll`, and the bytes of the arguments' arrays.
        """
        function = getattr(handle, method)
        if method in ("ping", "states"):  # answered while a round runs
            function = function.options(concurrency_group="aside")
        return function.remote(**arguments), array_bytes(arguments)

    def poll(self, calls: Sequence[Any], timeout_s: float) -> dict[Any, Reply]:
        """Return the replies to calls that have ended; wait until one has, or the time is over.

        Raises ResourceError if the cluster is gone.
        """
        if not calls:
            time.sleep(timeout_s)
            return {}
        try:
            # First all that have ended. If none has, wait for the first that ends.
            ended, _ = self._ray.wait([*calls], num_returns=len(calls), timeout=0)
            if not ended:
                ended, _ = self._ray.wait([*calls], num_returns=1, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            cause = reason(error, _SHOWN_CHARACTERS)
            raise ResourceError(
                f"the Ray cluster is gone ({cause}); the same command continues from the newest"
                " checkpoint"
            ) from error
        return {call: _reply(call) for call in ended}

    def kill(self, handle: Any) -> None:
        """End a learner's process; `handle` is its actor, as `start` returned it."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # it has ended already
            self._ray.kill(handle, no_restart=True)
