"""The connection between the driver and its learners, actors of a Ray cluster; only this uses Ray.

Its processes exchange pickled data, with which a sender could run any code, so those without the
cluster's token are refused.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from adloco_jax.data.sources import DATA_SOURCES
from adloco_jax.elastic.learner import Learner, LearnerSetup, Reply
from adloco_jax.elastic.messages import Refused, array_bytes, said
from adloco_jax.errors import ConfigError, ResourceError, check_installed, reason
from adloco_jax.models.architectures import ARCHITECTURES

# Of the cluster that a run starts. Ray reads them once, when it is imported, so they stay.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    # Without this, Ray replaces the loopback address by an address that other machines see.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # By default Ray gives its workers niceness 15, so any other process would slow a round.
    "RAY_worker_niceness": "0",
}
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}


class RayLearner(Learner):
    """A learner in a process of the cluster, which ends with its parent, Ray's own process."""

    def __init__(self, number: int, incarnation: int, setup: LearnerSetup):
        """Begin an incarnation of the learner. SIGTERM asks it to leave."""
        signal.signal(signal.SIGTERM, self.leave)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        model, data = setup.settings.model, setup.settings.data
        ARCHITECTURES[model.arch], DATA_SOURCES[data.source] = setup.entries
        super().__init__(setup)
        self.enlist(number, incarnation, setup.log)


def _end_with(parent: int) -> None:
    """End this process once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def check_possible(*_: object) -> None:
    """Raise ConfigError if Ray is missing, or in use here; a bucket has more conditions."""
    check_installed("ray", "ray", "engine.kind = ray")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise ConfigError(
            "engine.kind = ray: this process is connected to Ray already; call ray.shutdown() first"
        )


@contextlib.contextmanager
def connected(
    address: str, num_learners: int, setup: LearnerSetup | None, is_over: Callable[[], bool]
) -> Iterator["RayTransport"]:
    """Connect to the Ray cluster at an address (HOST:PORT), or start one on this machine.

    A started cluster has a token, no dashboard and no usage reports, keeps its files in a temporary
    folder, and ends with the driver. Raises ConfigError if none is there or it refuses the token,
    ResourceError if none can be started.
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
        import ray

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, at_sigterm)  # Ray has replaced it
        try:
            yield RayTransport(num_learners, setup)
        finally:
            ray.shutdown()


def _connect(address: str) -> None:
    """Connect to a cluster that is there."""
    import ray

    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()  # Ray tries for minutes
        ray.init(address=address, **_QUIET)
    except Exception as error:  # deliberately broad, because Ray raises many kinds
        raise ConfigError(
            f"engine.address = {address}: no Ray cluster there accepts this process"
            f" ({reason(error, 200)}); see docs/guides/elastic.md for addresses and tokens"
        ) from error


def _start(num_learners: int, folder: str) -> None:
    """Start a cluster whose files are in a folder; learners import from the driver's folders."""
    if "ray" in sys.modules and not _ENVIRONMENT.items() <= os.environ.items():
        needed = " ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
        raise ConfigError(
            f"engine.kind = ray: Ray was imported without {needed}; import it later, or set these"
        )
    os.environ.update(_ENVIRONMENT)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    own = {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        with warnings.catch_warnings():  # about forks: harmless, as exec follows at once
            warnings.simplefilter("ignore", RuntimeWarning)
            ray.init(address="local", num_cpus=num_learners, include_dashboard=False, **_QUIET)
    except Exception as error:  # deliberately broad, because Ray raises many kinds
        cause = reason(error, 200)
        raise ResourceError(f"engine.kind = ray: no cluster started here ({cause})") from error
    finally:
        for name in own:
            del os.environ[name]
        os.environ.update(before)


def _reply(call: Any) -> Reply:
    """Return the result of a call that has ended, or in words why there is none."""
    import ray

    try:
        value = ray.get(call)
        return Reply(value, num_bytes=array_bytes(value))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Refused):
            return Reply(Refused(f"it refused the request: {said(str(error.cause))}"))
        return Reply(None, said(f"{type(error.cause).__name__}: {error.cause}"))
    except ray.exceptions.ActorUnavailableError:
        return Reply(None, "its process or its node cannot be reached")
    except ray.exceptions.RayActorError as error:
        if not error.actor_init_failed:
            return Reply(None, "its process or its node has ended")
        return Reply(None, said(str(error).strip().splitlines()[-1]))


class RayTransport:
    """The transport of a run whose learners are actors of a Ray cluster."""

    launches = moves_states = True

    def __init__(self, num_learners: int, setup: LearnerSetup | None):
        import ray

        self._ray = ray
        self._num_learners = num_learners
        self._setup, _ = self.put(setup, None)

    def put(self, params: Any, kind: Any) -> tuple[Any, int]:
        """Store a value once for several calls; return a reference, and the bytes of its arrays.

        Raises ConfigError if it cannot be pickled.
        """
        try:
            return self._ray.put(params), array_bytes(params)
        except TypeError as error:  # the message of Ray would list the whole value
            raise ConfigError(
                "engine.kind = ray: functions and rows that learners are sent must be picklable"
                f" ({type(error.__cause__).__name__}: {str(error.__cause__)[:200]})"
            ) from None

    def start(self, number: int, incarnation: int) -> Any:
        """Ask for a process on any node with a free CPU (and GPUs, if any); return its handle."""
        gpus = self._ray.cluster_resources().get("GPU", 0)
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": max(int(gpus // self._num_learners), 1) if gpus else 0,
            "max_restarts": 0,  # Ray must not restart a learner, because its state would be lost
            "max_task_retries": 0,
            "concurrency_groups": {"aside": 2},
            "scheduling_strategy": "SPREAD",
        }
        return self._ray.remote(**options)(RayLearner).remote(number, incarnation, self._setup)

    def submit(self, handle: Any, method: str, **arguments: Any) -> tuple[Any, int]:
        """Call a method of a learner without waiting; return a reference for `poll`, and bytes."""
        function = getattr(handle, method)
        if method in ("ping", "states"):  # beside the others, which run one after another
            function = function.options(concurrency_group="aside")
        return function.remote(**arguments), array_bytes(arguments)

    def poll(self, calls: Sequence[Any], timeout_s: float) -> dict[Any, Reply]:
        """Wait until a call has ended or the time is over; ResourceError if the cluster is gone."""
        if not calls:
            time.sleep(timeout_s)
            return {}
        try:
            ended, _ = self._ray.wait([*calls], num_returns=len(calls), timeout=0)
            if not ended:
                ended, _ = self._ray.wait([*calls], num_returns=1, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise ResourceError(
                f"the Ray cluster is gone ({reason(error, 200)}); the same command continues from"
                " the newest checkpoint"
            ) from error
        return {call: _reply(call) for call in ended}

    def kill(self, handle: Any) -> None:
        """End a learner's process."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # it has ended
            self._ray.kill(handle, no_restart=True)
