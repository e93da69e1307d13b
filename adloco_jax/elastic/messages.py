"""What driver and learners tell each other: the JSON of a bucket's objects, and responses on Ray.

What a process says is compared with what it was asked, before it is used. A form is a tree of
`jax.ShapeDtypeStruct`: the shapes and types that arrays must have. A learner has a number, which
stays with its workers, and an incarnation, which counts how often it was restarted; both name its
place. A `ProgramSpec` has what all compiled programs of the run share, such as the optimizers. A
trainer is a model in training; its workers train copies of it.
"""

import hashlib
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree
from pydantic import Field, Strict

from adloco_jax.core.compress import Precision
from adloco_jax.core.outer import mean
from adloco_jax.data.formats import Count, Format
from adloco_jax.engine.spec import ProgramSpec, num_bytes
from adloco_jax.settings import INT32, Number
from adloco_jax.settings import Count as Size  # at least 1; a `Count` of `formats` may be 0

StateKey: TypeAlias = Annotated[tuple[Number, Number, Number], Strict(False)]
"""Which inner state is meant: trainer id, worker id, and position in its rows; a JSON list."""


USES = ("computing", "uploading", "waiting", "downloading")
"""What a learner does with its time; `Response.seconds` and `between_s` have them in this order."""

_SHOWN_CHARACTERS = 300  # of what another process says


class Refused(Exception):
    """Error: something from another process is not what it should be, and was not used."""


def said(text: str) -> str:
    """Quote the words of another process in a message: on one line, without control characters.

    Only the first `_SHOWN_CHARACTERS` are shown.
    """
    line = " ".join(text.split())
    return f"it says {line[:_SHOWN_CHARACTERS]!r}"


def array_bytes(tree: PyTree) -> int:
    """Return the size in bytes of a tree's arrays; leaves that are no arrays do not count."""
    return num_bytes([leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")])


def check_form(tree: PyTree, form: PyTree, name: str) -> None:
    """Raise Refused unless a tree's leaves are arrays of NumPy with the shapes and types of a form.

    `form` is a tree of `jax.ShapeDtypeStruct`; `name` is the tree's, for the error.
    """
    leaves = _leaves_by_path(tree)
    wanted = _leaves_by_path(form)
    if leaves.keys() != wanted.keys():
        raise Refused(f"{name}: parts are missing or unknown")
    for key, want in wanted.items():
        have = leaves[key]
        is_array = isinstance(have, np.ndarray)
        if not is_array or have.shape != want.shape or have.dtype != want.dtype:
            raise Refused(f"{name}{key}: no array {want.shape} of {want.dtype}")


def _leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths in it, as text."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def tree_sha256(tree: PyTree) -> str:
    """Return the hash of the bytes of a tree's arrays, by which two processes compare them.

    Shapes do not matter, so an axis of length one changes nothing.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        as_bytes = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        digest.update(as_bytes.data)
    return digest.hexdigest()


class ServedFile(Format):
    """A file that the driver serves (`elastic.files`): of which kind it is, and its content."""

    kind: Annotated[str, Field(pattern="^(rows|weights)$")]
    name: Annotated[str, Field(pattern=r"^\w[\w.-]{0,99}$")]
    size: Annotated[Count, Field(le=2**40)]  # in bytes
    root: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # hash of its content


class RunDescription(Format):
    """`run.json`: what a machine needs to build the run's model and data, and the driver."""

    id: str
    adloco_jax: str  # version of the driver's package
    fingerprint: str  # hash of the content of the data
    commit: str  # of the data set on the hub; empty if there is none
    settings: dict[str, Any]
    base: str = ""  # hash of the frozen weights; empty if there are none
    files: list[ServedFile] = []  # that learners who lack them read from the driver
    by_fit: bool = False  # whether learners have to be given model and rows, by `join`
    driver: Count = 0  # number of the newest driver; 0: none has begun


class RequestId(Format):
    """Which request to a learner this is, or the response to it; without a request, a place."""

    generation: Count  # number of the driver among the run's drivers
    learner: Count  # number of the learner
    incarnation: Count  # how many times the learner has been restarted
    request: Count = 0  # number of the request, from 1 on; 0: none, the id is that of the place

    def of(self, request: int) -> "RequestId":
        """Return the id of a request with this number in the same place; 0 gives the place's id."""
        return self.model_copy(update={"request": request})

    def heartbeat_name(self) -> str:
        """Return the name of the learner's heartbeat in the bucket."""
        return f"learners/{self.generation}/{self.learner}-{self.incarnation}.json"

    def name(self, part: str) -> str:
        """Return the name of a request's object in the bucket, or of its response's.

        `part` is "requests" or "responses", with which the name begins.
        """
        return (
            f"{part}/{self.generation}/{self.learner}-{self.incarnation}/{self.request}.safetensors"
        )


class LearnerRequests(Format):
    """What the driver's heartbeat says of a place for a learner."""

    id: RequestId  # of the newest request that was written there
    num_read: Count = 0  # responses that the driver has read
    is_free: bool  # whether no learner has taken the place


class DriverHeartbeat(Format):
    """The driver's sign of life, by which learners find their requests."""

    start: str = ""  # id of the driver's start, with which its objects are signed
    count: Count  # a heartbeat with a smaller one is older
    learners: list[LearnerRequests] = []  # one for each place
    adloco_jax: str = ""  # version of the driver's package
    is_over: bool = False  # whether the run is over, so learners leave
    has_ended: bool = False  # whether the driver has ended; this heartbeat is its last


class Hello(Format):
    """What a learner has, for the driver to compare."""

    fingerprint: str  # hash of the content of its data
    versions: dict[str, str]  # of packages and Python, by name
    devices: str  # in words
    base: str = ""  # hash of its frozen weights; empty if there are none


class Sign(Format):
    """A learner's response to a ping, by which the driver asks for a sign of life."""

    leaving: bool  # whether it was asked to leave, as by a signal
    compiling: bool  # whether it compiles a program now
    hello: Hello
    max_batch_size: Size = INT32  # largest micro-batch for which its memory may suffice
    has_left: bool = False  # whether this is its last sign
    owner: str = ""  # how the driver names the learner's machine; what the learner says is ignored


class LearnerHeartbeat(Format):
    """A learner's sign of life."""

    count: Count  # a heartbeat with a smaller one is older
    num_responses: Count  # that have been written in this incarnation
    sign: Sign


class WorkerRequest(NamedTuple):
    """The part of a request that is about one worker: where to read rows, and what to compute."""

    worker_id: Number  # which is also the number of its data stream
    start: Number  # position of the round's first sequence in the stream
    num_updates: Size
    num_tested: Number  # number of the first sequences on which gradient statistics are measured


class Request(NamedTuple):
    """The driver's request to a learner: run the round of a trainer for some of its workers."""

    trainer: Number  # id of the trainer
    round: Size  # number of the trainer's round, from 1 on
    micro_batch_size: Size
    num_accum_steps: Size
    num_updates: Size  # that a worker makes at most
    is_single: bool  # whether the trainer has only one worker, which sends float32 differences
    work: Annotated[tuple[WorkerRequest, ...], Strict(False)] = ()  # one entry for each worker
    params_sha256: str = ""  # `tree_sha256` of the parameters with which the round begins
    is_update: bool = False  # whether an outer update is sent, not whole parameters

    def precision(self, spec: ProgramSpec) -> Precision:
        """Return the precision in which differences (trainer's minus worker's parameters) are sent.

        Those of a single worker are not quantised.
        """
        if self.is_single:
            return "float32"
        return spec.outer.precision

    def takes_worker_params(self, spec: ProgramSpec) -> bool:
        """Whether the outer update gives the trainer the parameters of its only worker as they are.

        Then the worker's learner has the trainer's new parameters already. It is so if the mean of
        workers is taken, here of one, and no outer optimizer is applied (`outer.skip_single`).
        """
        return self.is_single and spec.outer.skip_single and spec.aggregate is mean

    def sequences(self, num_updates: int) -> int:
        """Return the number of sequences that a worker reads for so many updates."""
        return num_updates * self.num_accum_steps * self.micro_batch_size

    @property
    def num_sequences(self) -> int:
        """How many sequences all workers of the request read."""
        return sum(self.sequences(work.num_updates) for work in self.work)


class RequestMessage(Format):
    """A request without its arrays: a call of a learner's method."""

    id: RequestId
    request: Request | None = None  # None: inner states are asked for
    states: list[Number] = []  # the workers whose inner states are sent
    params: str | None = None  # name of the object with parameters; None: the learner has them
    wanted: list[StateKey] = []  # the inner states that are asked for


class ResponseMessage(Format):
    """A response without its arrays."""

    id: RequestId
    error: str = ""  # why the request was not run; the learner leaves, unless it is `refused`
    refused: bool = False
