"""How a driver reaches its learners: what a transport does, and the table of transports."""

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import PyTree

from adloco_jax.elastic import bucket, cluster, direct_driver
from adloco_jax.elastic.learner import LearnerSetup, Reply
from adloco_jax.errors import ConfigError
from adloco_jax.settings import Settings


class Transport(Protocol):
    """Reaches learners for the driver. No method waits for a learner, except `poll`."""

    launches: bool
    """Whether `start` makes a process. It is lost if it does not answer within `engine.restart_s`.

    If not, learners join by themselves, at any time, and have checked versions themselves."""
    moves_states: bool
    """Whether the links are fast enough to fetch the inner states of workers that move or merge.

    If not, such workers begin with fresh ones."""

    def put(self, params: PyTree, kind: Any) -> tuple[Any, int]:
        """Store a trainer's parameters, or their update, for several calls.

        Returns a reference, the argument `params` of calls of `Learner.run_round`, and the bytes
        that were sent. Objects of the same `kind` replace one another; the last two stay.
        """
        ...

    def start(self, number: int, incarnation: int) -> Any:
        """Ask for a learner; return the handle of its process for `submit` and `kill`.

        A `number` stays with its workers; `incarnation` counts its processes, from 0 on.
        """
        ...

    def submit(self, handle: Any, method: str, **arguments: Any) -> tuple[Hashable, int]:
        """Call "ping", "run_round" or "states" of a `Learner`; return the call, and bytes sent.

        Calls run one after another, "ping" and "states" beside them. The first is "ping".
        """
        ...

    def poll(self, calls: Sequence[Any], timeout_s: float) -> Mapping[Any, Reply]:
        """Return the replies to calls that have ended; wait until one has, or the time is over.

        Raises ResourceError if no learner can be reached any more.
        """
        ...

    def kill(self, handle: Any) -> None:
        """End a learner's process, or drop it if it cannot be reached; its calls never end."""
        ...


class TransportEntry(NamedTuple):
    """A transport by name: an entry of `TRANSPORTS`.

    `connect(address, num_learners, given, is_over)` is a context manager that yields the transport:
    `address` is `engine.address`, `given` what each learner is made of, and `is_over()` says, at
    the end, whether the run is over or will be continued. `check(settings, folder)` raises
    UserError before anything is compiled or written if a run in `folder` cannot use it.
    """

    connect: Callable[
        [str, int, LearnerSetup, Callable[[], bool]], contextlib.AbstractContextManager[Transport]
    ]
    check: Callable[[Settings, Path], None] = lambda settings, folder: None


TRANSPORTS: dict[str, TransportEntry] = {
    "ray": TransportEntry(cluster.connected, cluster.check_possible),
    "bucket": TransportEntry(bucket.connected, bucket.check_possible),
    "direct": TransportEntry(direct_driver.connected, direct_driver.check_possible),
}
"""Transports by name, for the option `engine.kind`. To use your own, add an entry."""


def check_engine(settings: Settings, folder: Path) -> None:
    """Raise UserError if there is no such engine, or the learners it needs cannot be reached."""
    kind = settings.engine.kind
    require_known_engine(kind)
    if kind == "local":
        return
    if jax.process_count() > 1:
        raise ConfigError(
            f"engine.kind = {kind}: its driver is one process; leave out --distributed and"
            " --coordinator, or set engine.kind=local"
        )
    TRANSPORTS[kind].check(settings, folder)


def require_known_engine(kind: str) -> None:
    """Raise ConfigError unless `kind` is "local", or names an entry of `TRANSPORTS`."""
    known = ["local", *TRANSPORTS]
    if kind not in known:
        need = f"must be {' or '.join(map(repr, known))}; a config file that adds it is given by"
        raise ConfigError(f"engine.kind = {kind!r}: {need} --config FILE")
