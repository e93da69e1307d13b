"""What driver and learners tell each other: the JSON of a bucket's objects, and answers on Ray."""

from typing import Any, Literal

from adloco_jax.files import Count, Format


class RunDescription(Format):
    """`run.json`: what a machine needs to build the run's model and data."""

    id: str
    adloco_jax: str  # version of the driver's package
    fingerprint: str  # hash of the content of the data
    commit: str  # of the data set on the hub; empty if there is none
    settings: dict[str, Any]


class LearnerOrders(Format):
    """The driver's part of the exchange with a learner, whose number any machine may take."""

    number: Count
    life: Count  # how many times the learner has been restarted
    num_orders: Count  # that have been written
    is_free: bool  # whether no machine has taken the number


class DriverBoard(Format):
    """The driver's sign of life, by which learners find their orders."""

    id: str
    count: Count
    learners: list[LearnerOrders] = []
    is_over: bool = False
    has_ended: bool = False


class Hello(Format):
    """A learner's first answer: its data, versions, and devices in words."""

    fingerprint: str
    versions: dict[str, str]
    devices: str


class Sign(Format):
    """A learner's answer to a heartbeat: whether it was asked to leave, and whether it compiles."""

    leaving: bool
    compiling: bool


class LearnerBoard(Format):
    """A learner's sign of life."""

    id: str
    count: Count
    num_answers: Count  # that have been written in this life
    sign: Sign
    hello: Hello


class OrderId(Format):
    """Which order of a learner this is, or the answer to it."""

    epoch: Count
    learner: Count
    life: Count
    order: Count

    def order_name(self) -> str:
        """Return the name of the order in the bucket."""
        return f"orders/{self._where()}"

    def answer_name(self) -> str:
        """Return the name of its answer."""
        return f"answers/{self._where()}"

    def _where(self) -> str:
        return f"{self.epoch}/{self.learner}-{self.life}/{self.order}.safetensors"


class WorkerPart(Format):
    """The size of a worker's part of an order."""

    num_micro_batches: Count
    has_state: bool  # whether its inner state is sent


class Params(Format):
    """The object with a trainer's parameters."""

    name: str
    sha256: str


class StateKey(Format):
    """Which inner state is meant: of a trainer's worker, at a position in its stream."""

    trainer: Count
    stream: Count
    start: Count


class OrderMessage(Format):
    """An order without its arrays: a call of a learner's method."""

    id: OrderId
    method: Literal["play", "prepare", "states"]
    parts: list[WorkerPart] = []
    params: Params | None = None
    wanted: list[StateKey] = []
    tests: bool = False


class AnswerMessage(Format):
    """An answer without its arrays."""

    id: OrderId
    error: str = ""
    there: list[bool] = []  # which of the wanted states follow


def learner_board_name(epoch: int, number: int, life: int) -> str:
    """Return the name of a learner's board in the bucket."""
    return f"learners/{epoch}/{number}-{life}.json"
