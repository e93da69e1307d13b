"""A learner that joins a run by itself, through a bucket or by a ticket (`run.join` starts it)."""

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adloco_jax import __version__
from adloco_jax.data.formats import Format
from adloco_jax.elastic import store
from adloco_jax.elastic.bucket import SIGNS, limit
from adloco_jax.elastic.direct import Remote, is_ticket
from adloco_jax.elastic.learner import (
    Learner,
    LearnerSetup,
    inputs_form,
    pack_state,
    sent_form,
    state_form,
    unpack_state,
)
from adloco_jax.elastic.messages import (
    DriverHeartbeat,
    LearnerHeartbeat,
    LearnerRequests,
    Refused,
    Request,
    RequestId,
    RequestMessage,
    ResponseMessage,
    RunDescription,
)
from adloco_jax.elastic.signatures import Unneeded, given_key
from adloco_jax.elastic.store import Store
from adloco_jax.errors import ConfigError, ResourceError, check_installed, reason
from adloco_jax.host import processes


@contextlib.contextmanager
def opened(address: str, patience_s: float, key: bytes | None) -> Iterator[Store]:
    """Open the bucket at an address, or connect to the driver that a ticket names."""
    if not is_ticket(address):
        check_installed("obstore", "", "adloco join")
        secret = given_key()
        if not secret:
            raise ConfigError(
                f"{address}: ADLOCO_KEY is not set; copy the whole command from the driver"
            )
        yield store.at(address, secret, patience_s=patience_s)
        return
    remote = Remote(address, key)
    try:
        remote.open()
        yield Store(remote, Unneeded(), patience_s=patience_s)
    finally:
        remote.close()


def read_run(bucket: Store) -> RunDescription | None:
    """Read the description of the run, or wait for it; None after a signal."""
    start_s, told = time.monotonic(), False
    while not processes.is_asked_to_stop():
        try:
            run = store.again(lambda: bucket.message("run.json", RunDescription))
            if run is not None:
                return run
        except Refused as error:
            raise ConfigError(
                f"{bucket.url}: {error}; copy the whole command from the driver, and use its"
                " version of adloco_jax"
            ) from error
        except ResourceError:
            if processes.is_asked_to_stop():
                break
            raise
        if not told:
            print(f"{bucket.url}: waiting for a driver", flush=True)
        told = True
        _check_patience(bucket, start_s)
        time.sleep(store.LONGEST_PAUSE_S)
    return None


def _check_patience(bucket: Store, since_s: float) -> None:
    if time.monotonic() - since_s > bucket.patience_s:
        minutes = bucket.patience_s / 60
        raise ResourceError(f"{bucket.url}: left, as for {minutes:g} minutes there was no driver")


def check_version(bucket: Store, version: str) -> None:
    """Raise ConfigError unless the driver's version of this package is this one."""
    if version != __version__:
        raise ConfigError(
            f"{bucket.url}: the driver has adloco_jax {version[:20]!r}, this machine"
            f" {__version__!r}; install the same"
        )


class BucketLearner:
    """A learner that joins by itself. Only `serve` waits; `step` does what can be done now."""

    def __init__(
        self,
        bucket: Store,
        learner: Learner,
        setup: LearnerSetup,
        workdir: Path | None,
        run_id: str,
    ):
        self._store, self.learner, self._spec, self._run_id = bucket, learner, setup.spec, run_id
        bucket.signatures.run = run_id
        self._heartbeat_s, self._workdir = setup.settings.engine.heartbeat_s, workdir
        bucket.hold(setup.settings.engine.link)
        self._num_workers = setup.settings.ensemble.num_workers
        self.generation = 0  # number of the driver; 0: none is known yet
        self.handle: RequestId | None = None  # None: not in the run
        self.num_responses = self._count = 0  # responses in this incarnation; own signs of life
        self.driver = DriverHeartbeat(count=0)  # the driver's newest heartbeat
        self._changed_s = time.monotonic()  # when it came
        self._is_others = False  # whether the bucket is another run's now
        self._writing = threading.Lock()
        self._idle_s = time.monotonic()  # when the last response was sent
        self._has_left = False
        self._said = ""  # the last line that was printed

    def serve(self) -> bool:
        """Take part in the run until it is over, or until the learner has left.

        Returns False if the bucket has become another run's instead.
        """
        pause_s = store.FIRST_PAUSE_S
        with processes.every(self._heartbeat_s / SIGNS, self.give_sign):
            while (what := self.step()) != "over":
                self.learner.leaving |= processes.is_asked_to_stop()
                pause_s = store.longer(pause_s)
                if what == "done":
                    pause_s = store.FIRST_PAUSE_S
                elif self.learner.leaving and not self._is_awaited():
                    break
                elif not self._is_alive():
                    if self._is_others:
                        self._say("the driver gives no sign, and another run is there; joining it")
                        return False
                    _check_patience(self._store, self._changed_s)
                time.sleep(pause_s)
        self._has_left = what == "nothing" and self._is_alive()
        if self._has_left:
            self.give_sign()
        elif self.handle is not None:
            self._store.delete(self.handle.heartbeat_name())
        why = "left" if self.learner.leaving else "the run is over"
        self._say(f"{why}: {self.num_responses} responses")
        return True

    def step(self) -> str:
        """Look at the driver's heartbeat, and do the next request: "over", "done" or "nothing"."""
        if not self._find_driver():
            return "nothing"
        if self.driver.is_over:
            return "over"
        if self.handle is None:
            return "done" if not self.learner.leaving and self._enlist() else "nothing"
        if (own := self._own_requests()) is None:
            number = self.handle.learner
            self._resign()
            if self.learner.leaving:
                return "over"
            self._say(f"lost: the driver goes on without learner {number}, as it was silent")
            return "done"
        if own.id.request <= self.num_responses:
            return "nothing"
        self._do(self.handle.of(self.num_responses + 1))
        return "done"

    def give_sign(self) -> None:
        """Write this learner's heartbeat, if it takes part."""
        with self._writing:
            if self.handle is not None:
                self._store.put(self.handle.heartbeat_name(), store.to_json(self._heartbeat()))

    def _own_requests(self) -> LearnerRequests | None:
        return next((e for e in self.driver.learners if e.id.of(0) == self.handle), None)

    def _is_awaited(self) -> bool:
        """Whether there is a driver that still has to read a response."""
        own = self._own_requests() if self._is_alive() else None
        return own is not None and own.num_read < self.num_responses

    def _heartbeat(self) -> LearnerHeartbeat:
        self._count += 1
        self.learner.leaving |= processes.is_asked_to_stop()
        sign = self.learner.ping().model_copy(update={"has_left": self._has_left})
        return LearnerHeartbeat(count=self._count, num_responses=self.num_responses, sign=sign)

    def _say(self, line: str) -> None:
        if line != self._said:
            print(line, flush=True)
        self._said = line

    def _is_alive(self) -> bool:
        """Whether the driver has not ended, nor been silent until it counts as lost."""
        return self._silent_s() < self._heartbeat_s and not self.driver.has_ended

    def _silent_s(self) -> float:
        return time.monotonic() - self._changed_s

    def _find_driver(self) -> bool:
        """Read the heartbeat of the newest driver; return whether there is one that works."""
        heartbeat = self._read_driver(self.generation) if self.generation else None
        if heartbeat is not None and heartbeat.start == self.driver.start:
            if heartbeat.count > self.driver.count:
                self._changed_s, self.driver = time.monotonic(), heartbeat
        if self.handle is None or not self._is_alive():
            self._find_newest()
        if self.driver.has_ended and not self.driver.is_over:
            self._say("the driver has ended; waiting until it is started again")
            return False
        if not (self._is_alive() or self.driver.is_over):
            self._say("the driver gives no sign; waiting for it")
        return self.generation > 0

    def _find_newest(self) -> None:
        """Go to the driver that `run.json` names, if it has a heartbeat of another start."""
        run = self._store.valid("run.json", RunDescription)
        self._is_others = run is not None and run.id != self._run_id
        if run is None or self._is_others:
            return
        heartbeat = self._read_driver(run.driver)
        if heartbeat is None or heartbeat.start == self.driver.start:
            return
        self._resign()
        self.generation, self.driver = run.driver, heartbeat
        self._store.signatures.start = heartbeat.start
        self._changed_s = time.monotonic()

    def _resign(self) -> None:
        """Take part no more; delete what was written after the driver had lost this learner."""
        if self.handle is not None:
            with self._writing:
                before, self.handle = self.handle, None
            self._store.delete(
                before.heartbeat_name(), before.of(self.num_responses).name("responses")
            )

    def _read_driver(self, generation: int) -> DriverHeartbeat | None:
        return self._store.valid(f"driver/{generation}.json", DriverHeartbeat)

    def _enlist(self) -> bool:
        """Become a learner of the run, if it has room for one, and this version is the driver's."""
        check_version(self._store, self.driver.adloco_jax)
        free = [each.id for each in self.driver.learners if each.is_free]
        random.shuffle(free)
        for handle in free:
            with self._writing:
                self.handle, self.num_responses = handle, 0
                if not self._store.create(handle.heartbeat_name(), self._heartbeat()):
                    self.handle = None
                    continue
            folder = self._workdir or Path(os.devnull)
            folder = folder / f"{self.generation}-{self.driver.start[:8]}"  # one for each start
            if self._workdir is not None:
                folder.mkdir(parents=True, exist_ok=True)
            self.learner.enlist(handle.learner, handle.incarnation, folder)
            self._say(f"joined as learner {handle.learner}")
            return True
        if free:
            self._say("the free places are not cleared yet; waiting for one")
        else:
            self._say("the run has its learners; waiting to replace one")
        return False

    def _do(self, request: RequestId) -> None:
        """Run a request of the driver, and write the response."""
        message, fault, start_s = ResponseMessage(id=request), None, time.monotonic()
        ran, found = None, []
        try:
            ran, found = self._execute(request)
        except Exception as error:  # deliberately broad: the driver is told, whatever it was
            why, refused = f"{type(error).__name__}: {reason(error)}", isinstance(error, Refused)
            message, fault = ResponseMessage(id=request, error=why, refused=refused), error
        worked_s = time.monotonic() - start_s
        self._store.put(request.name("responses"), store.pack(message, found))
        sent_s, waited_s = time.monotonic() - start_s - worked_s, start_s - self._idle_s
        self._idle_s, self.learner.uploading_s = time.monotonic(), sent_s
        if ran and found:
            tokens = self._spec.sequence_length * ran.num_sequences
            computed_s = min(worked_s, sum(each.seconds for each in found))
            loss = np.nanmean(np.concatenate([each.loss_SR for each in found]))
            self._say(
                f"round {ran.round} of trainer {ran.trainer}: loss {loss:.4g},"
                f" {tokens / max(computed_s, 1e-9):,.0f} tok/s; waited {waited_s:.1f} s, prepared"
                f" {worked_s - computed_s:.1f} s, computed {computed_s:.1f} s, sent {sent_s:.1f} s"
            )
        self.num_responses = request.request
        self.give_sign()
        if isinstance(fault, Refused):
            print(f"refused: {fault}", file=sys.stderr, flush=True)
        elif fault is not None:
            raise fault

    def _execute(self, which: RequestId) -> tuple[Request | None, list]:
        """Run a request; return the round that ran, if one did, and what was found."""
        spec, name = self._spec, which.name("requests")

        def form(message: RequestMessage) -> Any:
            if message.id != which:
                raise Refused(f"{name}: another request")
            if message.request is None:
                return None
            return inputs_form(spec, message.request, message.states)

        start_s = time.monotonic()
        most = limit([state_form(spec)] * self._num_workers)
        message, inputs, _ = self._store.read(name, most, RequestMessage, form)
        request, params = message.request, message.params
        if request is None:
            states = self.learner.states(message.wanted)
            return None, [jax.device_get(pack_state(x, spec.outer.precision)) for x in states]
        states = {s: unpack_state(x, spec) for s, x in inputs.inner_states.items()}
        inputs = inputs._replace(inner_states=states)
        whole = None
        if params is not None:
            want = sent_form(spec, request)
            _, whole, _ = self._store.read(params, limit(want), Format, lambda _: want)
        self.learner.downloading_s = time.monotonic() - start_s
        return request, self.learner.run_round(request, inputs, whole)
