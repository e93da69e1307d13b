"""The driver's side of a run whose learners share only a bucket with it (`bucket_learner`: theirs).

A heartbeat is overwritten by its owner; its count is a sign of life, timed by the reader's clock.
Parameters, requests and responses are written once:

    run.json                                 settings, version and data of the run, and the number
                                             of its driver, who replaces it if it is gone
    driver/GENERATION.json                   heartbeat of the run's driver of this number, from 1
                                             on; 0 is written and deleted as a trial
    learners/GENERATION/LEARNER.json         heartbeat of a learner, as NUMBER-INCARNATION
    params/GENERATION/INDEX.safetensors      parameters of a trainer, or their last update
    requests/GENERATION/LEARNER/REQUEST.safetensors    call of a learner's method
    responses/GENERATION/LEARNER/REQUEST.safetensors   result of the call
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from adloco_jax import __version__
from adloco_jax.data.formats import Format
from adloco_jax.elastic import store
from adloco_jax.elastic.child import own_learner
from adloco_jax.elastic.files import Library
from adloco_jax.elastic.learner import (
    LearnerSetup,
    Reply,
    pack_state,
    response_form,
    state_form,
    unpack_state,
)
from adloco_jax.elastic.messages import (
    DriverHeartbeat,
    LearnerHeartbeat,
    LearnerRequests,
    Refused,
    RequestId,
    RequestMessage,
    ResponseMessage,
    RunDescription,
    array_bytes,
    said,
)
from adloco_jax.elastic.signatures import find_key, given_key, keep_key
from adloco_jax.elastic.store import Store
from adloco_jax.errors import ConfigError, ResourceError, check_installed
from adloco_jax.host import processes
from adloco_jax.host.terminal import say
from adloco_jax.settings import OPTIONS, Settings, change

_SLACK = 2**24  # bytes that an object may have besides its arrays
# Settings that learners have from `run.json`, and that may not change either.
_THEIRS = "engine.heartbeat_s", "engine.link"
SIGNS = 4  # signs of life in the time after which a learner or a driver counts as lost


@dataclasses.dataclass(eq=False)
class RequestCall:
    """A call of a learner's method, or a question that the learner's heartbeat answers."""

    what: str  # the method; "ping" is answered by the heartbeat
    id: RequestId  # its `request` is, for "ping", the heartbeat's count when it was asked
    form: list = dataclasses.field(default_factory=list)  # what the response must look like
    response: concurrent.futures.Future | None = None  # set once the response is being read


def limit(form: Any) -> int:
    """Return the largest accepted size of an object of this form, in bytes."""
    return array_bytes(form) + _SLACK


def check_possible(settings: Settings, folder: Path) -> None:
    """Check that a run in a folder can use learners through the bucket at its address.

    Raises ConfigError if obstore is missing, or the bucket holds another run or other settings, or
    cannot be read or written; ResourceError if it cannot be reached.
    """
    check_installed("obstore", "", "engine.kind = bucket")
    bucket = store.at(settings.engine.address, find_key(folder / "learners" / "key"))
    check_continues(bucket, settings, folder / "learners" / "id")
    # Find out if this is permitted, and if an object that is there is kept.
    is_new = [bucket.create("driver/0.json", Format()) for _ in range(2)]
    bucket.delete("driver/0.json")
    if all(is_new):
        raise ConfigError(
            f"{bucket.url}: the store overwrites objects that it was asked to keep (If-None-Match),"
            " so two learners would take one place; use another store"
        )


@contextlib.contextmanager
def connected(
    address: str, num_learners: int, given: LearnerSetup, is_over: Callable[[], bool]
) -> Iterator["BucketTransport"]:
    """Become the driver of the run in a bucket, and print the command with which learners join.

    Learners end with the driver if the run `is_over` then, or wait for it to be continued. Raises
    ConfigError if the bucket cannot be used, holds another run, or has a driver that is alive.
    """
    folder = Path(given.log).parent
    key = find_key(folder / "key")
    shown = '"$ADLOCO_KEY"' if given_key() else key
    command = f"ADLOCO_KEY={shown} adloco join {address}"
    if given.by_fit:
        command = f"adloco_jax.join({address!r}, ...) with ADLOCO_KEY={shown} in the environment"
    invitation = f"to join, on up to {num_learners} machines: {command}"
    keep_key(folder / "key", key)  # before anything is signed with it
    there = store.at(address, key)
    driver = driving(there, given, is_over, invitation, lambda files: files.write_to(there))
    with own_learner(given, address, is_over, secret=key), driver as made:
        yield made


@contextlib.contextmanager
def driving(
    there: Store,
    given: LearnerSetup,
    is_over: Callable[[], bool],
    invitation: str,
    offer: Callable[[Library], None],
    owner: Callable[[RequestId], str] = lambda place: "",
) -> Iterator["BucketTransport"]:
    """Become the driver of the run whose objects are in a store, and print an invitation.

    `offer` makes files available to learners; `owner` names the learner in a place, if it is known.
    Otherwise as `connected`.
    """
    folder, heartbeat_s = Path(given.log).parent, given.settings.engine.heartbeat_s
    there.hold(given.settings.engine.link)
    run = _description(there, given, folder / "id")
    library = Library(given.files if given.settings.engine.serves else {})
    there.signatures.run, there.signatures.start = run.id, uuid.uuid4().hex
    generation = next_generation(there, run.driver, heartbeat_s)
    offer(library)
    now = {"adloco_jax": __version__, "driver": generation, "files": library.files}
    described = store.to_json(run.model_copy(update=now))
    there.put("run.json", described)
    # Read, so that it is equal to what is found later.
    run = store.from_json(described, "run.json", RunDescription)
    made = BucketTransport(there, run, given, owner)
    _delete_rounds(there, generation)  # what a driver that was killed has left
    say(invitation)
    try:
        with processes.every(heartbeat_s / SIGNS, lambda: made.act(made.give_sign)):
            yield made
    finally:
        made.close(is_over=is_over())


def _description(bucket: Store, given: LearnerSetup, path: Path) -> RunDescription:
    """Return `run.json`, which must be of the run that the file at `path` names, or a new one."""
    if (run := _described(bucket, path)) is not None:
        return run
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():  # else learners of this run may be waiting
        path.write_text(uuid.uuid4().hex, "utf-8")
    return RunDescription(
        id=path.read_text("utf-8"),
        adloco_jax=__version__,
        fingerprint=given.fingerprint,
        commit=given.commit,
        base=given.base.fingerprint,
        settings=given.settings.model_dump(),
        by_fit=given.by_fit,
    )


def _described(bucket: Store, path: Path) -> RunDescription | None:
    """Return `run.json`, if it is there; it must have the id of the run that a file names."""
    try:
        run = store.again(lambda: bucket.message("run.json", RunDescription))
    except Refused as error:
        raise ConfigError(
            f"{bucket.url}: {error}; delete it if no other run is there, else name another prefix,"
            f" such as {bucket.url}-2"
        ) from error
    if run is None or (path.exists() and run.id == path.read_text("utf-8")):
        return run
    raise ConfigError(f"{bucket.url}: holds another run; name another, such as {bucket.url}-2")


def check_continues(bucket: Store, settings: Settings, path: Path) -> None:
    """Check that learners, which have the settings of `run.json`, train as the driver means.

    Raises ConfigError if not, or if `run.json` is of another run than the file at `path` names.
    """
    if (run := _described(bucket, path)) is None:
        return
    before = run.settings
    there = flatten_dict(before, sep=".")
    now = settings.with_rows(before.get("num_rows", 0)).flat()  # as when the run began
    matter = (key for key in OPTIONS if change(key) != "harmless" or key in _THEIRS)
    differ = [f"{k} = {there.get(k)!r}, now {now[k]!r}" for k in matter if there.get(k) != now[k]]
    if differ:
        raise ConfigError(
            f"{bucket.url}: learners there have {'; '.join(differ)}; change it back, or name"
            " another prefix"
        )


def next_generation(bucket: Store, last: int, heartbeat_s: float) -> int:
    """Begin as the next driver, once the `last` one or a later gives no sign; return its number.

    A store may show an older list or heartbeat for a while, so one that changes is looked at again.
    """
    start_s = changed_s = time.monotonic()
    generation, heartbeat = _newest(bucket, last)
    if not heartbeat.has_ended:
        say(f"{bucket.url}: waiting {heartbeat_s:g} s for a sign of an earlier driver")
    while time.monotonic() <= start_s + 2 * heartbeat_s:
        start = bucket.signatures.start
        begun = DriverHeartbeat(start=start, count=0, adloco_jax=__version__)
        is_free = heartbeat.has_ended or time.monotonic() - changed_s >= heartbeat_s
        if is_free and bucket.create(f"driver/{generation + 1}.json", begun):
            return generation + 1
        time.sleep(min(1.0, heartbeat_s / SIGNS))
        before, (generation, heartbeat) = (generation, heartbeat), _newest(bucket, generation)
        if before != (generation, heartbeat):
            changed_s = time.monotonic()
    raise ConfigError(
        f"{bucket.url}: another driver runs there; wait for it, or name another prefix"
    )


def _newest(bucket: Store, generation: int) -> tuple[int, DriverHeartbeat]:
    """Return the number of the newest driver, from `generation` on, and its heartbeat."""

    def read(number: int) -> DriverHeartbeat | None:
        try:
            return bucket.message(f"driver/{number}.json", DriverHeartbeat)
        except Refused:
            return DriverHeartbeat(count=0)  # the number is taken

    heartbeat = read(generation) or DriverHeartbeat(count=0, has_ended=not generation)
    while (found := read(generation + 1)) is not None:
        generation, heartbeat = generation + 1, found
    return generation, heartbeat


def _delete_rounds(bucket: Store, last: int) -> None:
    """Delete what drivers up to the `last` one have left."""
    named = [re.match(r"(?:params|requests|responses)/(\d+)/", name) for name in bucket.names()]
    bucket.delete(*(found.string for found in named if found and int(found[1]) <= last))


@dataclasses.dataclass
class _Exchange:
    """What the driver has written to a learner, and read from it."""

    id: RequestId  # of the last request that was written
    num_asked: int = 0  # requests that have been submitted
    num_read: int = 0  # responses that have been read
    heartbeat: LearnerHeartbeat | None = None  # the newest; None: no machine has the number
    writes: concurrent.futures.Future | None = None  # the newest request's; after earlier requests
    look: concurrent.futures.Future | None = None  # a request for the heartbeat that has not ended
    next_s: float = 0.0  # when to look at the heartbeat next, or when the look began
    pause_s: float = store.FIRST_PAUSE_S


class BucketTransport:
    """The transport of a run whose learners join by themselves, through a bucket."""

    launches = moves_states = False

    def __init__(
        self,
        bucket: Store,
        run: RunDescription,
        given: LearnerSetup,
        owner: Callable[[RequestId], str] = lambda place: "",
    ):
        self._store, self._run, self._generation, self._spec = bucket, run, run.driver, given.spec
        self._owner = owner  # names the learner in a place
        self._exchanges: dict[int, _Exchange] = {}
        self._params: dict[Any, list[str]] = {}  # names in the bucket, by kind
        self._writes: dict[str, concurrent.futures.Future] = {}  # of parameters, by name
        self._num_params, self._count = itertools.count(), itertools.count(1)
        self._late_s = given.settings.engine.heartbeat_s / SIGNS
        self._sign_s = math.inf  # when the sign of life under way began
        self._returned_s = 0.0  # when a look at a learner's heartbeat last returned
        self._writing, self._is_closed = threading.Lock(), False
        self._cleared: set[str] = set()  # names of foreign objects that were deleted
        self._fault: BaseException | None = None  # an error of a thread

    def give_sign(self) -> None:
        """Write the heartbeat, and `run.json` if it is gone; raise if another driver took over."""
        self._sign_s = time.monotonic()
        found = self._store.valid("run.json", RunDescription)
        if found is not None and found.id == self._run.id and found.driver > self._generation:
            raise ResourceError(f"{self._store.url}: another driver has taken over")
        if found != self._run:
            self._store.put("run.json", store.to_json(self._run))
        self._write_heartbeat()
        self._sign_s = math.inf

    def _write_heartbeat(self, *, is_over: bool = False, has_ended: bool = False) -> None:
        with self._writing:
            if self._is_closed and not has_ended:
                return
            heartbeat = DriverHeartbeat(
                adloco_jax=__version__,
                start=self._store.signatures.start,
                count=next(self._count),
                learners=[
                    LearnerRequests(id=e.id, num_read=e.num_read, is_free=e.heartbeat is None)
                    for e in [*self._exchanges.values()]
                ],
                is_over=is_over,
                has_ended=has_ended,
            )
            self._store.put(f"driver/{self._generation}.json", store.to_json(heartbeat))

    def put(self, params: PyTree, kind: Any) -> tuple[str, int]:
        """Begin to write a trainer's parameters, or their update: a `kind` of object.

        The last one of a kind stays, for learners that are late; earlier ones are deleted.
        """
        name = f"params/{self._generation}/{next(self._num_params)}.safetensors"
        there = self._params.setdefault(kind, [])
        old, there[:] = there[:-1], [*there[-1:], name]
        data = store.pack(Format(), params)

        def write() -> None:
            self._store.delete(*old)
            self._store.put(name, data)

        self._writes = {n: w for n, w in self._writes.items() if n not in old}
        self._writes[name] = self._begin(write)
        return name, len(data)

    def _begin(
        self, write: Callable[[], None], *after: concurrent.futures.Future | None
    ) -> concurrent.futures.Future:
        """Call a function in a thread, after other calls have ended."""

        def act() -> None:
            for each in filter(None, after):
                each.result()
            if not self._is_closed:
                self.act(write)

        return store.aside(act)

    def act(self, act: Callable[[], None]) -> None:
        """Call a function in a thread; the main thread raises its error."""
        try:
            act()
        except Exception as error:  # deliberately broad: `poll` raises it
            self._fault = error

    def start(self, number: int, incarnation: int) -> RequestId:
        """Let a machine become a learner, and return a handle for calls to it."""
        handle = RequestId(generation=self._generation, learner=number, incarnation=incarnation)
        self._exchanges[number] = _Exchange(handle)
        self._begin(self._write_heartbeat)
        return handle

    def submit(self, handle: RequestId, method: Any, **arguments: Any) -> tuple[RequestCall, int]:
        """Call a method of a learner; return the call, for `poll`, and the request's bytes."""
        exchange = self._exchanges[handle.learner]
        if method == "ping":
            count = 0 if exchange.heartbeat is None else exchange.heartbeat.count
            return RequestCall(method, handle.of(count)), 0
        exchange.num_asked += 1
        call = RequestCall(method, handle.of(exchange.num_asked))
        if inputs := arguments.pop("inputs", None):
            request, arguments["states"] = arguments["request"], [*inputs.inner_states]
            call.form = [response_form(self._spec, request, work) for work in request.work]
            states, precision = inputs.inner_states, self._spec.outer.precision
            states = {s: jax.device_get(pack_state(x, precision)) for s, x in states.items()}
            inputs = inputs._replace(inner_states=states)
        message = RequestMessage(id=call.id, **arguments)
        call.form += [state_form(self._spec)] * len(message.wanted)
        data = store.pack(message, inputs)

        def write() -> None:
            self._store.put(call.id.name("requests"), data)
            exchange.id = call.id
            self._write_heartbeat()

        # One learner's request does not wait for another's, but for its parameters.
        params = self._writes.get(message.params or "")
        exchange.writes = self._begin(write, exchange.writes, params)
        return call, len(data)

    def poll(self, calls: Sequence[RequestCall], timeout_s: float) -> dict[RequestCall, Reply]:
        """Wait until a call has ended or the time is over.

        Raises ResourceError if another driver has taken over.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            if self._fault is not None and not processes.is_asked_to_stop():
                raise self._fault
            for number in {call.id.learner for call in calls}:
                self._look(self._exchanges[number])
            replies = {call: self._reply(call) for call in calls}
            ended = {call: reply for call, reply in replies.items() if reply is not None}
            if ended or time.monotonic() >= until_s:
                return ended
            time.sleep(min(0.02, timeout_s))
            while self._is_cut_off() and not (self._fault or processes.is_asked_to_stop()):
                time.sleep(0.2)  # a driver that cannot see learners must not judge them

    def _is_cut_off(self) -> bool:
        # The link does not work if a sign takes long, or if no look has returned since one began
        # that is late.
        late_s = time.monotonic() - self._late_s
        late = [e for e in self._exchanges.values() if self._returned_s < e.next_s < late_s]
        return self._sign_s < late_s or any(e.look and not e.look.done() for e in late)

    def _look(self, exchange: _Exchange) -> None:
        """Take the heartbeat of a learner if it has come, or request it if it is time."""
        if exchange.look is None:
            if time.monotonic() >= exchange.next_s:
                name, is_free = exchange.id.heartbeat_name(), exchange.heartbeat is None
                exchange.look = store.aside(self._read_heartbeat, name, is_free)
                exchange.next_s = time.monotonic()
            return
        if not exchange.look.done():
            return
        heartbeat, exchange.look, self._returned_s = exchange.look.result(), None, time.monotonic()
        exchange.pause_s = store.longer(exchange.pause_s)
        before = exchange.heartbeat
        if heartbeat is not None and (before is None or heartbeat.count > before.count):
            if before is None or heartbeat.num_responses != before.num_responses:
                exchange.pause_s = store.FIRST_PAUSE_S
            exchange.heartbeat = heartbeat
            if before is None:
                self._begin(self._write_heartbeat)
        exchange.next_s = time.monotonic() + exchange.pause_s

    def _read_heartbeat(self, name: str, is_free: bool) -> LearnerHeartbeat | None:
        """Read a learner's heartbeat; a free place is cleared of what is none of this start."""

        def read() -> LearnerHeartbeat | None:
            return self._store.message(name, LearnerHeartbeat)

        try:
            return store.again(read) if is_free else read()
        except ResourceError:  # a signal has ended the patience
            return None
        except Refused as error:
            if is_free:
                self._store.delete(name)
                if name not in self._cleared:
                    say(f"{self._store.url}: {error}; deleted, as it keeps learners out")
                self._cleared.add(name)
            return None

    def _reply(self, call: RequestCall) -> Reply | None:
        exchange = self._exchanges[call.id.learner]
        if (heartbeat := exchange.heartbeat) is None:
            return None
        if call.what == "ping":
            is_new = heartbeat.sign.has_left or heartbeat.count != call.id.request
            sign = heartbeat.sign.model_copy(update={"owner": self._owner(call.id)})
            return Reply(sign) if is_new else None
        if call.response is not None and call.response.done():
            exchange.num_read = max(exchange.num_read, call.id.request)
            return call.response.result()
        if call.response is None and heartbeat.num_responses >= call.id.request:
            call.response = store.aside(self._read, call)
        return None

    def _read(self, call: RequestCall) -> Reply:
        name = call.id.name("responses")

        def form_of(message: ResponseMessage) -> Any:
            if message.id != call.id:
                raise Refused(f"{name}: responds to another request")
            return None if message.error else call.form

        try:
            how = name, limit(call.form), ResponseMessage, form_of
            message, value, size = self._store.read(*how)
            if message.refused:
                value = Refused(f"it refused the request: {said(message.error)}")
            elif call.what == "states" and not message.error:
                value = [unpack_state(state, self._spec) for state in value]
            error = said(message.error) if message.error and not message.refused else ""
            return Reply(value, error, size)
        except (Refused, ResourceError) as error:
            return Reply(Refused(str(error)))
        finally:
            self._begin(lambda: self._store.delete(call.id.name("requests"), name))

    def kill(self, handle: RequestId) -> None:
        """End the exchange with a learner, which leaves when it sees this."""
        exchange = self._exchanges.pop(handle.learner)
        left = [handle.heartbeat_name()]
        for request in range(exchange.num_read + 1, exchange.num_asked + 1):
            left += [handle.of(request).name(part) for part in ("requests", "responses")]
        self._begin(self._write_heartbeat)
        self._begin(lambda: self._store.delete(*left), exchange.writes)

    def close(self, *, is_over: bool) -> None:
        """Say on the heartbeat that the driver has ended, and delete its rounds.

        After a signal it waits a few seconds for the bucket.
        """

        def end() -> None:
            self._write_heartbeat(is_over=is_over, has_ended=True)
            _delete_rounds(self._store, self._generation)

        self._is_closed, self._fault, until_s = True, None, math.inf
        ending = store.aside(self.act, end)
        while not ending.done() and time.monotonic() < until_s:
            time.sleep(0.02)
            if processes.is_asked_to_stop():
                until_s = min(until_s, time.monotonic() + store.LAST_S)
        if self._fault is not None and not processes.is_asked_to_stop():
            raise self._fault
