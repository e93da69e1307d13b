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

from adloco_jax import __version__, files
from adloco_jax.config import validate
from adloco_jax.elastic import store
from adloco_jax.elastic.bucket import ORDER, RUN, SIGNS, limit, names, order_form
from adloco_jax.elastic.learner import Given, Learner
from adloco_jax.elastic.store import Refused, Store
from adloco_jax.engine.spec import here
from adloco_jax.errors import ConfigError, DataError, reason
from adloco_jax.run.assemble import load_data, spec_of

_BOARD = {"count": int, "is_over": bool, "has_ended": bool}
_BOARD |= {"places": dict[str, tuple[int, int, bool]]}


def join(url: str, *, own: Mapping[str, str], workdir: Path | None = None) -> None:
    """Train for the run in a bucket until it is over, or a signal asks to leave.

    `own` has this machine's `data.path` and `data.heldout_path`, if they differ; `workdir`, logs of
    the rows read. Raises ConfigError if the bucket, version, data or table entries do not fit, and
    as `load_data` does.
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
    Site(bucket, learner, given, workdir).serve()


def _read_run(bucket: Store) -> dict[str, Any]:
    """Read the description of the run; wait for it if no driver has begun yet."""
    pause_s, data = store.FIRST_PAUSE_S, bucket.get("run.json")
    if data is None:
        print(f"{bucket.url}: waiting for a driver", flush=True)
    while data is None:
        time.sleep(pause_s)
        pause_s = store.longer(pause_s)
        data = bucket.get("run.json")
    try:
        run = store.from_json(data, "run.json")
    except Refused as error:
        raise DataError(f"{bucket.url}: {error}; name the prefix of a run") from error
    if fault := files.fault(run, RUN, "run.json"):
        raise DataError(f"{bucket.url}: {fault}; use the driver's version of adloco_jax")
    return run


def _given(bucket: Store, run: dict[str, Any], own: Mapping[str, str]) -> Given:
    """Build what the driver of a Ray cluster would send: settings, spec and data of the run."""
    if run["adloco_jax"] != __version__:
        raise ConfigError(
            f"{bucket.url}: the driver has adloco_jax {run['adloco_jax']}, this machine"
            f" {__version__}; install the same"
        )
    values = files.with_tuples(run["settings"])
    values["data"].update(own)
    settings = validate(values)
    corpus = load_data(settings, run["commit"])
    if corpus.fingerprint != run["fingerprint"]:
        raise ConfigError(
            f"{bucket.url}: the driver has other data than this machine; give it the same files, by"
            " --config.data.path if they are elsewhere here"
        )
    spec = spec_of(settings, here())
    return Given(settings, spec, corpus, run["commit"], run["fingerprint"], {}, "")


class Site:
    """A learner with its place in a run. Only `serve` waits; `step` does what can be done now."""

    def __init__(self, bucket: Store, learner: Learner, given: Given, workdir: Path | None):
        self._store, self.learner, self._spec = bucket, learner, given.spec
        self._heartbeat_s, self._workdir = given.settings.engine.heartbeat_s, workdir
        self._num_workers = given.settings.ensemble.num_workers
        self._epoch = 0  # number of the driver; 0: none is known yet
        self.place: tuple[int, int] | None = None  # number and life; None: not in the run
        self._answered = self._count = 0
        self._driver: dict[str, Any] = {}  # the driver's board
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
                is_there = self.place is not None and self._is_alive()
                if what == "nothing" and self.learner.leaving and not is_there:
                    break
                time.sleep(pause_s)
        if self.place is not None:
            self._store.delete(self._board_name())
        bytes_up, bytes_down = self._store.bytes_up, self._store.bytes_down
        self._say(
            f"{'left' if self.learner.leaving else 'the run is over'}: {self._answered} answers,"
            f" {self._store.requests} requests, {bytes_up} bytes up, {bytes_down} bytes down"
        )

    def step(self) -> str:
        """Look at the driver's board, and do the next order: "over", "done" or "nothing"."""
        if not self._find_driver():
            return "nothing"
        if self._driver["is_over"]:
            return "over"
        if self.place is None:
            return "done" if not self.learner.leaving and self._take_place() else "nothing"
        life, sent, *_ = self._driver["places"].get(str(self.place[0]), (-1, 0))
        if life != self.place[1]:
            self._say(f"place {self.place[0]} is lost: the driver goes on without this life of it")
            self._give_up_place()
            return "over" if self.learner.leaving else "done"
        if sent <= self._answered:
            return "nothing"
        self._do(self._answered + 1)
        return "done"

    def give_sign(self) -> None:
        """Write this learner's board, if it has a place."""
        with self._writing:
            if self.place is not None:
                self._store.put(self._board_name(), self._board())

    def _board_name(self) -> str:
        assert self.place is not None
        return f"learners/{self._epoch}/{self.place[0]}-{self.place[1]}.json"

    def _board(self) -> bytes:
        self._count += 1
        board = {"id": self._id, "count": self._count, "answered": self._answered}
        return store.to_json(board | self.learner.ping() | {"hello": self.learner.hello()})

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
            if board["count"] != self._driver.get("count"):
                self._changed_s = time.monotonic()
            self._driver = board
        if not self._driver or self._driver["has_ended"] or not self._is_alive():
            if (board := self._read_driver(self._epoch + 1)) is not None:
                self._give_up_place()
                self._epoch, self._driver = self._epoch + 1, board
                self._changed_s = time.monotonic()
                return False  # perhaps there is a newer one
            if not self._driver:
                return False
            if not self._driver["is_over"]:
                self._say("the driver gives no sign; waiting for it")
                return self._driver["has_ended"] is False
        return True

    def _give_up_place(self) -> None:
        """Delete what was written after the driver had given the place to somebody else."""
        if (place := self.place) is not None:
            with self._writing:
                board, self.place = self._board_name(), None
            self._store.delete(board, names(self._epoch, place, self._answered)[1])

    def _read_driver(self, epoch: int) -> dict[str, Any] | None:
        name = f"driver/{epoch}.json"
        try:
            if (data := self._store.get(name)) is None:
                return None
            board = store.from_json(data, name)
            if fault := files.fault(board, _BOARD, name):
                raise Refused(fault)
        except Refused as error:
            self._say(str(error))
            return None
        return board

    def _take_place(self) -> bool:
        """Take a free place in the run, if there is one."""
        free = [
            (int(n), life) for n, (life, _, is_free) in self._driver["places"].items() if is_free
        ]
        random.shuffle(free)
        for place in free:
            with self._writing:
                self.place, self._answered = place, 0
                if not self._store.create(self._board_name(), self._board()):
                    self.place = None
            if self.place is not None:
                folder = Path(os.devnull)
                if self._workdir is not None:
                    folder = self._workdir / str(self._epoch)
                    folder.mkdir(parents=True, exist_ok=True)
                self.learner.enlist(*place, folder)
                self._say(f"joined as learner {place[0]}, life {place[1]}")
                return True
        self._say("all places are taken; waiting for one")
        return False

    def _do(self, number: int) -> None:
        """Run an order of the driver, and write the answer."""
        assert self.place is not None
        where, name = names(self._epoch, self.place, number)
        call = [self._epoch, *self.place, number]
        tree, fault = None, None
        try:
            more, tree = self._execute(where, call)
        except Exception as error:  # deliberately broad: the driver is told, whatever it was
            more, fault = {"error": f"{type(error).__name__}: {reason(error)}"}, error
        data, _ = store.pack({"call": call} | more, tree)
        self._store.put(name, data)
        self._answered = number
        self.give_sign()
        if isinstance(fault, Refused):
            print(f"refused: {fault}", file=sys.stderr, flush=True)
        elif fault is not None:
            raise fault

    def _execute(self, name: str, call: list[int]) -> tuple[dict[str, Any], Any]:
        """Run an order; return what the answer's message and tree contain."""
        spec = self._spec
        state = jax.eval_shape(spec.inner_tx.init, spec.params)

        def form(message: dict[str, Any]) -> Any:
            if fault := files.fault(message, ORDER, name):
                raise Refused(fault)
            if message["call"] != call:
                raise Refused(f"{name}: another order")
            return None if message["method"] == "states" else order_form(spec, message)

        most = limit([state] * self._num_workers)
        message, order, _ = self._store.read(name, most, form)
        if message["method"] == "states":
            found = self.learner.states([(a, b, c) for a, b, c in message["wanted"]])
            return {"there": [each is not None for each in found]}, found
        if message["method"] == "prepare":
            self.learner.prepare(order, bool(message["tests"]))
            return {}, None
        where, sha256 = message["params"]
        with concurrent.futures.ThreadPoolExecutor(1) as aside:
            how = where, limit(spec.params), lambda _: spec.params
            reading = aside.submit(self._store.read, *how)
            self.learner.prepare(order, any(work.num_tested for work in order.work))
        _, params, found = reading.result()
        if found != sha256:
            raise Refused(f"{where}: other parameters than the order names")
        return {}, self.learner.play(order, params)
