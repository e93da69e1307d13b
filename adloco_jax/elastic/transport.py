"""How a driver reaches its learners: what a transport does, and the table of transports.

The driver is the process with the training loop. A learner is a process that runs rounds of workers
(`learner.Learner`); what each is made from is a `LearnerSetup`. A call is the driver's request to
run one of a learner's methods; its `Reply` has the result, or why there is none. An engine runs the
rounds of a run: "local" in this process, the others in learners. A trainer is a model in training;
a learner trains copies of it, its workers.
"""

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
from jaxtyping import PyTree

from adloco_jax.elastic import bucket, cluster, direct_driver
from adloco_jax.elastic.learner import LearnerSetup, Reply
from adloco_jax.errors import ConfigError
from adloco_jax.settings import Settings

Handle: TypeAlias = Any
"""A learner's process as its transport knows it: on Ray an actor, in a bucket a `RequestId`."""
Call: TypeAlias = Any
"""A hashable name of a call, by which `Transport.poll` tells its reply."""
Reference: TypeAlias = Any
"""Stored parameters as a call names them: on Ray an object's reference, in a bucket a name."""


class Transport(Protocol):
    """Reaches learners for the driver. No method waits for a learner, except `poll`."""

    launches: bool
    """Whether `start` makes a process. It is lost if it does not answer within `engine.restart_s`.

    If not, learners join by themselves, at any time, and have compared versions themselves."""
    moves_states: bool
    """Whether the links are fast enough to fetch the inner states of workers that move or merge.

    If not, such workers begin with fresh ones."""

    def put(self, params: PyTree, kind: Hashable) -> tuple[Reference, int]:
        """Store a trainer's parameters, or their update, for several calls.

        `params` is a tree of arrays. `kind` says what is stored, for instance the update of trainer
        0; of each kind only the last two need to stay. Returns a reference, which calls of
        `Learner.run_round` have as their argument `params`, and the number of bytes sent.
        """
        ...

    def start(self, number: int, incarnation: int) -> Handle:
        """Ask for a learner; return the handle of its process for `submit` and `kill`.

        A `number` stays with its workers; `incarnation` counts its processes, from 0 on.
        """
        ...

    # `**arguments` are those of the method, which a transport forwards as they are.
    def submit(self, handle: Handle, method: str, **arguments: Any) -> tuple[Call, int]:
        """Call a method of a `Learner`; return the call, for `poll`, and the number of bytes sent.

        `handle` is what `start` returned, and `method` is "run_round", "ping" or "states". Calls of
        "run_round" run one after another; the others are answered while these run. The first call
        of a process is "ping".
        """
        ...

    def poll(self, calls: Sequence[Call], timeout_s: float) -> Mapping[Call, Reply]:
        """Return the replies to those of `calls` that have ended, by call.

        It waits until one has ended, or `timeout_s` seconds are over. Raises ResourceError if no
        learner can be reached any more.
        """
        ...

    def kill(self, handle: Handle) -> None:
        """End a learner's process, or drop it if it cannot be reached; its calls never end."""
        ...


Connect: TypeAlias = Callable[
    [str, int, LearnerSetup, Callable[[], bool]], contextlib.AbstractContextManager[Transport]
]
"""The type of `TransportEntry.connect`, which describes the arguments."""


def always_possible(settings: Settings, folder: Path) -> None:
    """Check nothing, for a transport that any run can use."""


class TransportEntry(NamedTuple):
    """A transport by name: an entry of `TRANSPORTS`.

    It has two functions. `connect(address, num_learners, setup, is_over)` reaches the learners when
    the run begins to train. It returns a context manager that yields the transport, and ends its
    connections. Its arguments are:

    - `address`: the option `engine.address`.
    - `num_learners`: the number of learners that the run has at most.
    - `setup`: what each learner is made from.
    - `is_over`: a function that says, at the end of the `with` block, whether the run is over. If
      not, it will be continued, and learners may wait for that.

    `check(settings, folder)` is called before anything is compiled or written. It raises UserError
    if the run in `folder` cannot use the transport.

    Attributes:
      connect: Reaches the learners.
      check: Checks that the run can use the transport.
    """

    connect: Connect
    check: Callable[[Settings, Path], None] = always_possible


TRANSPORTS: dict[str, TransportEntry] = {
    "ray": TransportEntry(cluster.connected, cluster.check_possible),
    "bucket": TransportEntry(bucket.connected, bucket.check_possible),
    "direct": TransportEntry(direct_driver.connected, direct_driver.check_possible),
}
"""Transports by name, for the option `engine.kind`. To use your own, add an entry."""


def check_engine(settings: Settings, folder: Path) -> None:
    """Check that there is the engine that the settings name, and that this run can use it.

    `folder` is the run's. Raises ConfigError if `engine.kind` is unknown, or if learners are used
    and this program has several processes; also what the check of the transport raises, a UserError
    such as ConfigError or ResourceError.
    """
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
    """Raise ConfigError unless `kind`, of `engine.kind`, is "local" or an entry of `TRANSPORTS`."""
    known = ["local", *TRANSPORTS]
    if kind not in known:
        names = " or ".join(map(repr, known))
        raise ConfigError(
            f"engine.kind = {kind!r}: must be {names}; a config file that adds it is given by"
            " --config FILE"
        )
