"""A learner that joins a run by itself, through a bucket or by a ticket (`run.join` starts it).

A driver has a generation, by which the run's drivers are counted, and a start, which is its random
id. It offers places for learners, each a `RequestId` with a learner's number and incarnation; who
writes the place's heartbeat first has it. A heartbeat is a small object that its owner overwrites
again and again. Driver and learner see in the other's that it is alive, and how many requests and
responses it has written; `bucket` has the names of the objects. A learner's patience is how long it
waits for a driver. The run is over once it needs no more rounds; a driver that has ended before
may be started again. An object or request is refused (`Refused`) if it is not what it should be.

`bucket`, an argument here, is the `Store` that keeps the run's objects: a bucket, or the driver
itself, which a learner with a ticket reaches directly.
"""

import contextlib
import enum
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax import __version__
from adloco_jax.data.formats import Format
from adloco_jax.elastic import store
from adloco_jax.elastic.bucket import SIGNS, max_object_bytes
from adloco_jax.elastic.direct import Remote, is_ticket
from adloco_jax.elastic.learner import (
    Inputs,
    Learner,
    LearnerSetup,
    Response,
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

_SHOWN_CHARACTERS = 20  # of the driver's version
_SHORTEST_S = 1e-9  # that a round may take in a printed speed, as it is divided by


@contextlib.contextmanager
def opened(address: str, patience_s: float, key: bytes | None) -> Iterator[Store]:
    """Open the bucket at an address, or connect to the driver that a ticket names.

    A ticket is the address of a driver that learners reach directly, without a bucket. The
    connection is closed at the end of the `with` block.

    Args:
      address: The bucket's address, or a ticket.
      patience_s: Seconds after which a request that keeps failing raises ResourceError.
      key: This learner's secret key for a ticket; None: that of its user.

    Yields:
      The store of the run's objects.

    Raises:
      ConfigError: If the key of a bucket (`ADLOCO_KEY`) is not set or too short, the address is
        neither a bucket nor a ticket, the package that it needs is missing, or the driver does not
        let this learner in.
      ResourceError: If the driver that a ticket names cannot be reached, or the user's folder of
        keys cannot be written.
    """
    if not is_ticket(address):
        check_installed("obstore", where="adloco join")
        secret = given_key()
        if not secret:
            raise ConfigError(
                f"{address}: ADLOCO_KEY is not set; copy the whole command from the driver"
            )
        yield store.open_bucket(address, secret, patience_s=patience_s)
        return
    remote = Remote(address, key)
    try:
        remote.open()
        # Unsigned: each side knows the other by the key of its connection.
        yield Store(remote, Unneeded(), patience_s=patience_s)
    finally:
        remote.close()


def read_run(bucket: Store) -> RunDescription | None:
    """Read the description of the run, or wait for a driver that writes it; None after a signal.

    Raises ConfigError if the object is no such description, is not signed with this key, or may not
    be read; ResourceError if the bucket cannot be reached, or no driver has come within its
    patience.
    """

    def read() -> RunDescription | None:
        """Read the description once; None if there is none."""
        return bucket.read_message("run.json", RunDescription)

    start_s = time.monotonic()
    has_told = False
    while not processes.is_asked_to_stop():
        try:
            run = store.retry_if_refused(read)
            if run is not None:
                return run
        except Refused as error:
            raise ConfigError(
                f"{bucket.url}: {error}; copy the whole command from the driver, and use its"
                " version of adloco_jax"
            ) from error
        except ResourceError:
            if processes.is_asked_to_stop():  # then a failed read is not repeated
                break
            raise
        if not has_told:
            print(f"{bucket.url}: waiting for a driver", flush=True)
        has_told = True
        _check_patience(bucket, start_s)
        time.sleep(store.LONGEST_PAUSE_S)
    return None


def _check_patience(bucket: Store, since_s: float) -> None:
    """Raise ResourceError if the time `since_s` is longer ago than the bucket's patience.

    `since_s` is when a driver was last there, on the clock `time.monotonic`.
    """
    if time.monotonic() - since_s > bucket.patience_s:
        minutes = bucket.patience_s / 60
        raise ResourceError(f"{bucket.url}: left, as for {minutes:g} minutes there was no driver")


def check_version(bucket: Store, version: str) -> None:
    """Raise ConfigError unless the driver's `version` of this package is this one."""
    if version != __version__:
        shown = version[:_SHOWN_CHARACTERS]  # the driver may write anything
        raise ConfigError(
            f"{bucket.url}: the driver has adloco_jax {shown!r}, this machine {__version__!r};"
            " install the same"
        )


class Step(enum.StrEnum):
    """What `BucketLearner.step` has found."""

    OVER = "over"  # the run is over for this learner
    DONE = "done"  # something was done, so there may be more to do at once
    NOTHING = "nothing"  # there is nothing to do now


class _Result(NamedTuple):
    """The result of a request of the driver that was read and run."""

    request: Request | None  # the round that was run; None: inner states were asked for
    arrays: list[Response] | list[PyTree]  # the round's responses, or the packed inner states


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
        """Begin outside the run, without a request.

        Args:
          bucket: The run's objects; they are signed for the run `run_id` from now on.
          learner: Runs the rounds.
          setup: What the learner was made from; used for the spec of its programs and the settings.
          workdir: Folder of its logs; None: there are none.
          run_id: Id of the run that `run.json` describes.
        """
        self._store = bucket
        self.learner = learner
        self._spec = setup.spec
        self._run_id = run_id
        self._workdir = workdir
        self._heartbeat_s = setup.settings.engine.heartbeat_s
        self._num_workers = setup.settings.ensemble.num_workers
        bucket.signatures.run = run_id
        bucket.limit_rate(setup.settings.engine.link)
        self.generation = 0  # number of the driver; 0: none is known yet
        self.handle: RequestId | None = None  # this learner's place in the run; None: it has none
        self.num_responses = 0  # that were written in this place
        self._count = 0  # own heartbeats that were written
        self.driver = DriverHeartbeat(count=0)  # the driver's newest heartbeat; first an empty one
        self._changed_s = time.monotonic()  # when the newest one came
        self._is_of_another_run = False  # whether the bucket is another run's now
        self._writing = threading.Lock()  # held while `handle` changes, or its heartbeat is written
        self._idle_s = time.monotonic()  # when the last response was sent
        self._has_left = False  # whether the next heartbeat is the last one
        self._said = ""  # the last line that was printed

    def serve(self) -> bool:
        """Take part in the run until it is over, or until the learner has left.

        A learner leaves after a signal, once the driver has read its responses. Returns True in
        both cases, and False if the bucket has become another run's instead. Raises ResourceError
        if there has been no driver for longer than the bucket's patience; ConfigError if the driver
        has another version of this package; and what a request has raised, unless it is Refused.
        """
        pause_s = store.FIRST_PAUSE_S  # it grows as long as there is nothing to do
        # So often that `SIGNS` signs come in the time after which the driver counts it as lost; in
        # a thread, whose error would end the process.
        with processes.every(self._heartbeat_s / SIGNS, self.give_sign):
            while True:
                step = self.step()
                if step == Step.OVER:
                    break
                if processes.is_asked_to_stop():
                    self.learner.leaving = True
                pause_s = store.next_pause_s(pause_s)
                if step == Step.DONE:
                    pause_s = store.FIRST_PAUSE_S
                elif self.learner.leaving and not self._has_unread_response():
                    break
                elif not self._is_driver_alive():
                    if self._is_of_another_run:
                        self._say("the driver gives no sign, and another run is there; joining it")
                        return False
                    _check_patience(self._store, self._changed_s)
                time.sleep(pause_s)

        # A driver that is alive, and goes on, is told by a last heartbeat that the learner leaves.
        # Otherwise nobody reads the heartbeat, and it is deleted.
        self._has_left = step == Step.NOTHING and self._is_driver_alive()
        if self._has_left:
            self.give_sign()
        elif self.handle is not None:
            self._store.delete(self.handle.heartbeat_name())
        why = "left" if self.learner.leaving else "the run is over"
        self._say(f"{why}: {self.num_responses} responses")
        return True

    def step(self) -> Step:
        """Read the driver's heartbeat; take a place in its run, or run its next request.

        Returns what was done; it does not wait for the driver. An error of a request is raised
        after the driver was told, unless it is Refused. Raises ConfigError if the driver has
        another version of this package.
        """
        if not self._look_for_driver():
            return Step.NOTHING
        if self.driver.is_over:
            return Step.OVER

        if self.handle is None:  # no place in the run yet
            if not self.learner.leaving and self._take_free_place():
                return Step.DONE
            return Step.NOTHING

        own = self._own_requests()
        if own is None:  # the driver has given the place up
            number = self.handle.learner
            self._give_place_up()
            if self.learner.leaving:
                return Step.OVER
            self._say(f"lost: the driver goes on without learner {number}, as it was silent")
            return Step.DONE

        # Requests are numbered from 1 on, and each has one response. `own.id.request` is the number
        # of the newest one.
        if own.id.request <= self.num_responses:
            return Step.NOTHING
        self._run_request(self.handle.of(self.num_responses + 1))
        return Step.DONE

    def give_sign(self) -> None:
        """Write this learner's heartbeat, if it has a place in the run."""
        with self._writing:  # the place must not change meanwhile
            if self.handle is not None:
                heartbeat = store.to_json(self._next_heartbeat())
                self._store.put(self.handle.heartbeat_name(), heartbeat)

    def _own_requests(self) -> LearnerRequests | None:
        """Return what the driver's heartbeat says of this learner's place.

        It is the number of the newest request there, and how many responses the driver has read.
        None if the heartbeat does not list the place: the driver has given it up.
        """
        for each in self.driver.learners:
            if each.id.of(0) == self.handle:  # the place's id, without a request
                return each
        return None

    def _has_unread_response(self) -> bool:
        """Whether there is a driver that still has to read a response."""
        if not self._is_driver_alive():
            return False
        own = self._own_requests()
        return own is not None and own.num_read < self.num_responses

    def _next_heartbeat(self) -> LearnerHeartbeat:
        """Return the next heartbeat of this learner, with what it says about itself.

        After a signal it says that the learner wants to leave.
        """
        self._count += 1
        if processes.is_asked_to_stop():
            self.learner.leaving = True
        # `ping` returns the learner's data, versions and devices, and whether it is leaving.
        sign = self.learner.ping().model_copy(update={"has_left": self._has_left})
        return LearnerHeartbeat(count=self._count, num_responses=self.num_responses, sign=sign)

    def _say(self, line: str) -> None:
        """Print a line, unless the last one that was printed was the same."""
        if line != self._said:
            print(line, flush=True)
        self._said = line

    def _is_driver_alive(self) -> bool:
        """Whether the driver has not ended, and its heartbeat has changed within `heartbeat_s`.

        The newest heartbeat that was read counts; nothing is read here. Without a known driver
        `self._changed_s` is when this learner began.
        """
        silent_s = time.monotonic() - self._changed_s
        return silent_s < self._heartbeat_s and not self.driver.has_ended

    def _look_for_driver(self) -> bool:
        """Read the newest driver's heartbeat to `self.driver`; return whether there is a driver.

        Returns False if no driver is known yet (`self.generation` is 0), or the last one has ended
        and may be started again. True does not mean that the driver is alive: it may be silent, or
        the run may be over. A line is printed if the driver has ended or is silent.
        """
        # Drivers are numbered from 1 on. Of a known one, read a newer heartbeat. With another start
        # it is another driver's, and is not stored here.
        if self.generation > 0:
            heartbeat = self._read_driver(self.generation)
            if heartbeat is not None and heartbeat.start == self.driver.start:
                # A bucket may show an older heartbeat for a while; its count is smaller.
                if heartbeat.count > self.driver.count:
                    self._changed_s = time.monotonic()
                    self.driver = heartbeat

        # A learner with a place stays with its driver as long as that is alive. Without a known
        # driver this finds the first one.
        if self.handle is None or not self._is_driver_alive():
            self._change_to_newest_driver()

        if self.driver.has_ended and not self.driver.is_over:
            self._say("the driver has ended; waiting until it is started again")
            return False
        if not self._is_driver_alive() and not self.driver.is_over:
            self._say("the driver gives no sign; waiting for it")
        return self.generation > 0

    def _change_to_newest_driver(self) -> None:
        """Leave the known driver for the one that `run.json` names, if that is another.

        Then the learner has no place. Nothing changes if no driver is named there, or it has no
        heartbeat. If `run.json` is of another run, only `_is_of_another_run` is set.
        """
        run = self._store.valid_message("run.json", RunDescription)
        self._is_of_another_run = run is not None and run.id != self._run_id
        if run is None or self._is_of_another_run:
            return
        heartbeat = self._read_driver(run.driver)
        if heartbeat is None or heartbeat.start == self.driver.start:  # none, or the known one
            return
        self._give_place_up()
        self.generation = run.driver
        self.driver = heartbeat
        self._store.signatures.start = heartbeat.start  # objects are signed for this start
        self._changed_s = time.monotonic()

    def _give_place_up(self) -> None:
        """Give the place up, if there is one; delete its heartbeat and its last response.

        The driver deletes the objects of a learner that it has lost. These two may have been
        written after that.
        """
        if self.handle is None:
            return
        with self._writing:  # a heartbeat under way is written first, and then deleted
            before = self.handle
            self.handle = None
        last_response = before.of(self.num_responses).name("responses")
        self._store.delete(before.heartbeat_name(), last_response)

    def _read_driver(self, generation: int) -> DriverHeartbeat | None:
        """Read the heartbeat of the driver with the number `generation`; None without a valid one.

        It is not valid if it is damaged, or not signed as the driver's heartbeats are.
        """
        return self._store.valid_message(f"driver/{generation}.json", DriverHeartbeat)

    def _take_free_place(self) -> bool:
        """Take a free place in the driver's run; return whether this learner has one now.

        The driver's heartbeat lists the places, and says which are free. Raises ConfigError if the
        driver has another version of this package.
        """
        check_version(self._store, self.driver.adloco_jax)
        free = [each.id for each in self.driver.learners if each.is_free]
        random.shuffle(free)  # so that learners which come together rarely want the same place
        for handle in free:
            with self._writing:
                self.handle = handle
                self.num_responses = 0
                heartbeat = self._next_heartbeat()
                # `create` writes nothing, and returns False, if the object is there.
                is_first = self._store.create(handle.heartbeat_name(), heartbeat)
                if not is_first:  # another was first, or the last owner's heartbeat is still there
                    self.handle = None
                    continue
            # A folder for each start of the driver; eight characters of its id tell them apart.
            start = f"{self.generation}-{self.driver.start[:8]}"
            if self._workdir is None:
                folder = Path(os.devnull) / start  # is never there, so nothing is logged
            else:
                folder = self._workdir / start
                folder.mkdir(parents=True, exist_ok=True)
            self.learner.enlist(handle.learner, handle.incarnation, folder)
            self._say(f"joined as learner {handle.learner}")
            return True
        if free:
            self._say("the free places are not cleared yet; waiting for one")
        else:
            self._say("the run has its learners; waiting to replace one")
        return False

    def _run_request(self, request_id: RequestId) -> None:
        """Read and run a request of the driver, and write the response.

        An error is written in place of the result, and then raised; but one that is Refused is only
        printed, and the learner goes on.

        `request_id` is this learner's place with the number of the request.
        """
        start_s = time.monotonic()
        waited_s = start_s - self._idle_s
        message = ResponseMessage(id=request_id)  # without an error
        result = _Result(request=None, arrays=[])  # stays if the request fails
        fault: Exception | None = None
        try:
            result = self._read_and_execute(request_id)
        except Exception as error:  # deliberately broad: the driver is told, whatever it was
            fault = error
            message = ResponseMessage(
                id=request_id,
                error=f"{type(error).__name__}: {reason(error)}",
                refused=isinstance(error, Refused),
            )
        worked_s = time.monotonic() - start_s

        self._store.put(request_id.name("responses"), store.pack(message, result.arrays))
        sent_s = time.monotonic() - start_s - worked_s
        self._idle_s = time.monotonic()
        self.learner.uploading_s = sent_s  # the next response tells the driver

        if result.request is not None:  # a round was run
            self._say_round(
                result.request,
                result.arrays,
                waited_s=waited_s,
                worked_s=worked_s,
                sent_s=sent_s,
            )
        self.num_responses = request_id.request
        self.give_sign()  # at once: the driver reads a response when a heartbeat counts it
        if isinstance(fault, Refused):
            print(f"refused: {fault}", file=sys.stderr, flush=True)
        elif fault is not None:
            raise fault

    def _say_round(
        self,
        request: Request,
        responses: Sequence[Response],
        *,
        waited_s: float,
        worked_s: float,
        sent_s: float,
    ) -> None:
        """Print the mean loss of a round, its speed, and where its seconds went.

        Args:
          request: What was run.
          responses: One for each worker of the request, with `seconds`, which its round took, and
            `loss_SR`, the loss of each update.
          waited_s: Seconds before the request came.
          worked_s: Seconds in which it was read and run.
          sent_s: Seconds in which the response was written.
        """
        tokens = self._spec.sequence_length * request.num_sequences
        # At most `worked_s`: the two are measured by different clocks, which differ a little, and
        # `prepared_s` must not be negative.
        computed_s = min(worked_s, sum(response.seconds for response in responses))
        # The losses of skipped updates are NaN, and do not count.
        loss = np.nanmean(np.concatenate([response.loss_SR for response in responses]))
        tokens_per_s = tokens / max(computed_s, _SHORTEST_S)
        prepared_s = worked_s - computed_s
        self._say(
            f"round {request.round} of trainer {request.trainer}: loss {loss:.4g},"
            f" {tokens_per_s:,.0f} tok/s; waited {waited_s:.1f} s, prepared {prepared_s:.1f} s,"
            f" computed {computed_s:.1f} s, sent {sent_s:.1f} s"
        )

    def _read_and_execute(self, request_id: RequestId) -> _Result:
        """Read a request of the driver, and the parameters that it names, and run it.

        Raises Refused if an object is not what it should be, or the learner has not the parameters
        or states that the request needs; ResourceError if an object cannot be read; and what a
        round raises, such as JaxRuntimeError if memory does not suffice.
        """
        spec = self._spec
        name = request_id.name("requests")

        def form_of(message: RequestMessage) -> Inputs | None:
            """Return what the arrays of the request must look like: shapes and types.

            None: it must have no arrays. Raises Refused if the message is another request.
            """
            if message.id != request_id:
                raise Refused(f"{name}: another request")
            if message.request is None:  # inner states are asked for
                return None
            return inputs_form(spec, message.request, message.states)

        start_s = time.monotonic()
        # A request brings at most the inner states of all workers, besides small arrays.
        most_bytes = max_object_bytes([state_form(spec)] * self._num_workers)
        message, inputs, _ = self._store.read_with_arrays(name, most_bytes, RequestMessage, form_of)
        request = message.request
        if request is None:  # the driver asks for inner states, which are quantised to be sent
            packed_states = []
            for state in self.learner.states(message.wanted):
                packed_states.append(jax.device_get(pack_state(state, spec.outer.precision)))
            return _Result(request=None, arrays=packed_states)

        inner_states = {
            worker_id: unpack_state(packed, spec)
            for worker_id, packed in inputs.inner_states.items()
        }
        inputs = inputs._replace(inner_states=inner_states)
        params = None  # the learner has them
        if message.params is not None:
            params = self._read_params(message.params, sent_form(spec, request))
        self.learner.downloading_s = time.monotonic() - start_s  # this response tells the driver
        responses = self.learner.run_round(request, inputs, params)
        return _Result(request, responses)

    def _read_params(self, name: str, form: PyTree) -> PyTree:
        """Read a trainer's parameters, or their update, from the object with this name.

        `form` is the tree of `jax.ShapeDtypeStruct` that they must have. Raises Refused if the
        object is missing, damaged, or of another form.
        """

        def form_of(message: Format) -> PyTree:
            """Return the form; the object's message is empty."""
            return form

        _, params, _ = self._store.read_with_arrays(name, max_object_bytes(form), Format, form_of)
        return params
