"""A learner that joins a run through a bucket (`elastic.bucket`): `adloco join`."""

import concurrent.futures
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from adloco_jax import __version__
from adloco_jax.config import validate
from adloco_jax.elastic import store
from adloco_jax.elastic.bucket import SIGNS, limit, order_form
from adloco_jax.elastic.formats import (
    AnswerMessage,
    DriverBoard,
    LearnerBoard,
    LearnerOrders,
    OrderId,
    OrderMessage,
    Refused,
    RunDescription,
)
from adloco_jax.elastic.learner import Given, Learner
from adloco_jax.elastic.store import Store
from adloco_jax.engine.spec import here
from adloco_jax.errors import ConfigError, DataError, reason
from adloco_jax.files import Format, with_tuples
from adloco_jax.run.assemble import assemble


def join(url: str, *, own: Mapping[str, str], workdir: Path | None = None) -> None:
    """Train for the run in a bucket until it is over, or a signal asks to leave.

    `own` has this machine's `data.path` and `data.heldout_path`, if they differ; `workdir`, logs of
    the rows read. Raises ConfigError if the bucket, version, data or table entries do not fit, and
    as `assemble` does.
    """
    store.check_installed("adloco join")
    bucket = Store(url)
    run = _read_run(bucket)
    given = _given(bucket, run, own)
    learner = Learner(given)

    def leave(number: int, _: object) -> None:
        if learner.leaving:
            os._exit(128 + number)
        learner.leave()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    BucketLearner(bucket, learner, given, workdir).serve()


def _read_run(bucket: Store) -> RunDescription:
    """Read the description of the run; wait for it if no driver has begun yet."""
    pause_s, data = store.FIRST_PAUSE_S, bucket.get("run.json")
    if data is None:
        print(f"{bucket.url}: waiting for a driver", flush=True)
    while data is None:
        time.sleep(pause_s)
        pause_s = store.longer(pause_s)
        data = bucket.get("run.json")
    try:
        return store.from_json(data, "run.json", RunDescription)
    except Refused as error:
        raise DataError(
            f"{bucket.url}: {error}; name the prefix of a run, and use its version of adloco_jax"
        ) from error


def _given(bucket: Store, run: RunDescription, own: Mapping[str, str]) -> Given:
    """Build what the driver of a Ray cluster would send: settings, spec and data of the run."""
    if run.adloco_jax != __version__:
        raise ConfigError(
            f"{bucket.url}: the driver has adloco_jax {run.adloco_jax}, this machine"
            f" {__version__}; install the same"
        )
    values = with_tuples(run.settings)
    settings = validate(values | {"data": values["data"] | own})
    here_too = assemble(settings, here(), Path(), commit=run.commit)
    if here_too.corpus.fingerprint != run.fingerprint:
        raise ConfigError(
            f"{bucket.url}: the driver has other data than this machine; give it the same files, by"
            " --config.data.path if they are elsewhere here"
        )
    return Given(settings, here_too.spec, here_too.corpus, run.commit, run.fingerprint, {}, "")


class BucketLearner:
    """A learner that joins by itself. Only `serve` waits; `step` does what can be done now."""

    def __init__(self, bucket: Store, learner: Learner, given: Given, workdir: Path | None):
        self._store, self.learner, self._spec = bucket, learner, given.spec
        self._heartbeat_s, self._workdir = given.settings.engine.heartbeat_s, workdir
        self._num_workers = given.settings.ensemble.num_workers
        self._epoch = 0  # number of the driver; 0: none is known yet
        self.handle: OrderId | None = None  # None: not in the run
        self._num_answers = self._count = 0  # answers in this life; own signs of life
        self._driver = DriverBoard(id="", count=0)  # the driver's newest board
        self._changed_s = time.monotonic()  # when its count last changed
        self._writing = threading.Lock()
        self._id = uuid.uuid4().hex
        self._said = ""  # the last line that was printed

    def serve(self) -> None:
        """Take part in the run until it is over, or until the learner has left."""
        pause_s = store.FIRST_PAUSE_S
        with store.every(self._heartbeat_s / SIGNS, self.give_sign):
            while (what := self.step()) != "over":
                pause_s = store.longer(pause_s)
                if what == "done":
                    pause_s = store.FIRST_PAUSE_S
                is_there = self.handle is not None and self._is_alive()
                if what == "nothing" and self.learner.leaving and not is_there:
                    break
                time.sleep(pause_s)
        if self.handle is not None:
            self._store.delete(self.handle.board_name())
        bytes_up, bytes_down = self._store.bytes_up, self._store.bytes_down
        self._say(
            f"{'left' if self.learner.leaving else 'the run is over'}: {self._num_answers} answers,"
            f" {self._store.requests} requests, {bytes_up} bytes up, {bytes_down} bytes down"
        )

    def step(self) -> str:
        """Look at the driver's board, and do the next order: "over", "done" or "nothing"."""
        if not self._find_driver():
            return "nothing"
        if self._driver.is_over:
            return "over"
        if self.handle is None:
            return "done" if not self.learner.leaving and self._enlist() else "nothing"
        orders = {self._id_of(each): each.num_orders for each in self._driver.learners}
        if self.handle not in orders:
            self._say(
                f"lost: the driver goes on without learner {self.handle.learner}, as it was silent"
            )
            self._resign()
            return "over" if self.learner.leaving else "done"
        if orders[self.handle] <= self._num_answers:
            return "nothing"
        self._do(self.handle.of(self._num_answers + 1))
        return "done"

    def give_sign(self) -> None:
        """Write this learner's board, if it takes part."""
        with self._writing:
            if self.handle is not None:
                self._store.put(self.handle.board_name(), self._board())

    def _id_of(self, orders: LearnerOrders) -> OrderId:
        return OrderId(epoch=self._epoch, learner=orders.number, life=orders.life)

    def _board(self) -> bytes:
        self._count += 1
        board = LearnerBoard(
            id=self._id,
            count=self._count,
            num_answers=self._num_answers,
            sign=self.learner.ping(),
            hello=self.learner.hello(),
        )
        return store.to_json(board)

    def _say(self, line: str) -> None:
        if line != self._said:
            print(line, flush=True)
        self._said = line

    def _is_alive(self) -> bool:
        """Whether the driver has given a sign in the time after which it counts as lost."""
        return time.monotonic() - self._changed_s < self._heartbeat_s

    def _find_driver(self) -> bool:
        """Read the board of the newest driver; return whether there is one that works."""
        if self._epoch and (board := self._read_driver(self._epoch)) is not None:
            if board.count != self._driver.count:
                self._changed_s = time.monotonic()
            self._driver = board
        if not self._epoch or self._driver.has_ended or not self._is_alive():
            if (board := self._read_driver(self._epoch + 1)) is not None:
                self._resign()
                self._epoch, self._driver = self._epoch + 1, board
                self._changed_s = time.monotonic()
                return False  # perhaps there is a newer one
            if not self._epoch:
                return False
            if not self._driver.is_over:
                self._say("the driver gives no sign; waiting for it")
                return not self._driver.has_ended
        return True

    def _resign(self) -> None:
        """Take part no more; delete what was written after the driver had lost this learner."""
        if self.handle is not None:
            with self._writing:
                before, self.handle = self.handle, None
            self._store.delete(before.board_name(), before.of(self._num_answers).answer_name())

    def _read_driver(self, epoch: int) -> DriverBoard | None:
        name = f"driver/{epoch}.json"
        try:
            if (data := self._store.get(name)) is not None:
                return store.from_json(data, name, DriverBoard)
        except Refused as error:
            self._say(str(error))
        return None

    def _enlist(self) -> bool:
        """Become a learner of the run, if it has room for one."""
        free = [self._id_of(each) for each in self._driver.learners if each.is_free]
        random.shuffle(free)
        for handle in free:
            with self._writing:
                self.handle, self._num_answers = handle, 0
                if not self._store.create(handle.board_name(), self._board()):
                    self.handle = None
            if self.handle is not None:
                folder = Path(os.devnull)
                if self._workdir is not None:
                    folder = self._workdir / str(self._epoch)
                    folder.mkdir(parents=True, exist_ok=True)
                self.learner.enlist(handle.learner, handle.life, folder)
                self._say(f"joined as learner {handle.learner}")
                return True
        self._say("the run has its learners; waiting to replace one")
        return False

    def _do(self, order: OrderId) -> None:
        """Run an order of the driver, and write the answer."""
        tree, fault = None, None
        try:
            message, tree = self._execute(order)
        except Exception as error:  # deliberately broad: the driver is told, whatever it was
            why, refused = f"{type(error).__name__}: {reason(error)}", isinstance(error, Refused)
            message, fault = AnswerMessage(id=order, error=why, refused=refused), error
        self._store.put(order.answer_name(), store.pack(message, tree)[0])
        self._num_answers = order.order
        self.give_sign()
        if isinstance(fault, Refused):
            print(f"refused: {fault}", file=sys.stderr, flush=True)
        elif fault is not None:
            raise fault

    def _execute(self, which: OrderId) -> tuple[AnswerMessage, Any]:
        """Run an order; return what the answer's message and tree contain."""
        spec, answer = self._spec, AnswerMessage(id=which)
        state = jax.eval_shape(spec.inner_tx.init, spec.params)

        def form(message: OrderMessage) -> Any:
            if message.id != which or (message.method == "play") != (message.params is not None):
                raise Refused(f"{which.order_name()}: another order")
            if max(len(message.parts), len(message.wanted)) > self._num_workers:
                raise Refused(f"{which.order_name()}: for more workers than the run has")
            return None if message.method == "states" else order_form(spec, message.parts)

        most = limit([state] * self._num_workers)
        message, order, _ = self._store.read(which.order_name(), most, OrderMessage, form)
        if message.method == "states":
            found = self.learner.states(message.wanted)
            there = [each is not None for each in found]
            return answer.model_copy(update={"there": there}), found
        if message.params is None:
            self.learner.prepare(order, message.tests)
            return answer, None
        name = message.params.name
        with concurrent.futures.ThreadPoolExecutor(1) as aside:
            how = name, limit(spec.params), Format, lambda _: spec.params
            reading = aside.submit(self._store.read, *how)
            self.learner.prepare(order, any(work.num_tested for work in order.work))
        _, params, found = reading.result()
        if found != message.params.sha256:
            raise Refused(f"{name}: other parameters than the order names")
        return answer, self.learner.play(order, params)
