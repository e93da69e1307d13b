"""What driver and learners tell each other: the JSON of a bucket's objects, and answers on Ray.

What a process says is compared with what it was asked, before it is used.
"""

from typing import Annotated, Any, Literal, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree
from pydantic import Field, Strict

from adloco_jax.engine.spec import num_bytes
from adloco_jax.files import Count, Format, checked

Duration = Annotated[float, Field(ge=0, lt=1e12)]  # in seconds
StateKey: TypeAlias = Annotated[tuple[Count, Count, Count], Strict(False)]
"""Which inner state is meant: trainer id, stream, and position in it; a list in JSON."""


class Refused(Exception):
    """Error: something from another process is not what it should be, and was not used."""


def said(text: str) -> str:
    """Show the words of another process: on one line, without control characters, cut."""
    return f"it says {' '.join(text.split())[:300]!r}"


def array_bytes(tree: PyTree) -> int:
    """Return the size in bytes of the arrays of a tree or of a form, beside plain values."""
    return num_bytes([leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")])


def check_form(tree: PyTree, form: PyTree, name: str) -> None:
    """Raise Refused unless a tree has the leaves of a form.

    A form has a `jax.ShapeDtypeStruct` for an array, and for a plain value its type or the number.
    """
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(form)}
    if leaves.keys() != wanted.keys():
        raise Refused(f"{name}: parts are missing or unknown")
    for key, want in wanted.items():
        have = leaves[key]
        if isinstance(want, jax.ShapeDtypeStruct):
            like = getattr(have, "shape", None), getattr(have, "dtype", None)
            if not isinstance(have, np.ndarray) or like != (want.shape, want.dtype):
                raise Refused(f"{name}{key}: no array {want.shape} of {want.dtype}")
        elif not isinstance(want, int):
            kind: Any = Annotated[want, Strict()]
            checked(have, kind, f"{name}{key}", Refused)
        elif type(have) is not int or have != want:
            raise Refused(f"{name}{key}: have {repr(have)[:60]}, expected {want}")


class RunDescription(Format):
    """`run.json`: what a machine needs to build the run's model and data."""

    id: str
    adloco_jax: str  # version of the driver's package
    fingerprint: str  # hash of the content of the data
    commit: str  # of the data set on the hub; empty if there is none
    settings: dict[str, Any]
    base: str = ""  # hash of the frozen weights; empty if there are none
    by_fit: bool = False  # whether learners have to be given model and rows, by `join`


class OrderId(Format):
    """Which order of a learner this is, or the answer to it."""

    epoch: Count
    learner: Count
    life: Count  # how many times the learner has been restarted
    order: Count = 0  # 0: none; the id is that of the learner

    def of(self, order: int) -> "OrderId":
        """Return the id of an order of this learner."""
        return self.model_copy(update={"order": order})

    def board_name(self) -> str:
        """Return the name of the learner's board in the bucket."""
        return f"learners/{self.epoch}/{self.learner}-{self.life}.json"

    def name(self, part: str) -> str:
        """Return the name of the order, in the part `orders` of the bucket, or of its answer."""
        return f"{part}/{self.epoch}/{self.learner}-{self.life}/{self.order}.safetensors"


class LearnerOrders(Format):
    """The driver's part of the exchange with a learner, whose number any machine may take."""

    id: OrderId  # of the last order that was written
    num_read: Count = 0  # answers that the driver has read
    is_free: bool  # whether no machine has taken the number


class DriverBoard(Format):
    """The driver's sign of life, by which learners find their orders."""

    id: str
    count: Count  # a board with a smaller one is older
    learners: list[LearnerOrders] = []
    adloco_jax: str = ""  # version of the driver's package
    is_over: bool = False
    has_ended: bool = False


class Hello(Format):
    """A learner's first answer: its data, versions, and devices in words."""

    fingerprint: str
    versions: dict[str, str]
    devices: str
    base: str = ""


class Sign(Format):
    """A learner's answer to a heartbeat."""

    leaving: bool  # whether it was asked to leave
    compiling: bool
    has_left: bool = False  # whether this is its last one


class LearnerBoard(Format):
    """A learner's sign of life."""

    id: str
    count: Count
    num_answers: Count  # that have been written in this life
    sign: Sign
    hello: Hello


class Params(Format):
    """The object with a trainer's parameters."""

    name: Annotated[str, Field(pattern=r"^params/\d+/\d+\.safetensors$")]
    sha256: str


class OrderMessage(Format):
    """An order without its arrays: a call of a learner's method."""

    id: OrderId
    method: Literal["play", "prepare", "states"]
    num_rates: Count = 0
    has_state: list[bool] = []  # by worker, whether its inner state is sent
    params: Params | None = None  # None: the learner has them
    wanted: list[StateKey] = []


class AnswerMessage(Format):
    """An answer without its arrays."""

    id: OrderId
    error: str = ""  # why the order was not run; the learner leaves, unless it is `refused`
    refused: bool = False
    there: list[bool] = []  # which of the wanted states follow
