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

A driver's generation is its number among the run's drivers; its start is a random id. A place for a
learner is a number and an incarnation, which counts the learners that had the number before. A
`RequestId` names a place, and a request to the learner there. To join is to take a free place. A
look is a read of a learner's heartbeat. An object is refused (`Refused`) if it is damaged, or is
not what it should be. A `Store` repeats a read or write that fails.
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
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from adloco_jax import __version__
from adloco_jax.data.formats import Format
from adloco_jax.elastic import store
from adloco_jax.elastic.child import own_learner
from adloco_jax.elastic.files import Library
from adloco_jax.elastic.learner import (
    Inputs,
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
from adloco_jax.settings import OPTIONS, Settings, kind_of_change

_SLACK = 2**24  # bytes that an object may have besides its arrays
# Settings that may not change when a run continues, though a change of them is harmless elsewhere:
# learners have them from `run.json`.
_THEIRS = ("engine.heartbeat_s", "engine.link")
_LOOK_S = 0.02  # from one look at the results of threads to the next
_CUT_OFF_S = 0.2  # from one look at whether the link works again to the next
SIGNS = 4  # signs of life in the time after which a learner or a driver counts as lost


@dataclasses.dataclass(eq=False)
class RequestCall:
    """A call of a learner's method, or a question that the learner's heartbeat answers."""

    what: str  # the method; "ping" is answered by the heartbeat
    id: RequestId  # its `request` is, for "ping", the heartbeat's count when it was asked
    # The trees of `jax.ShapeDtypeStruct` that the response must have, one for each worker or state.
    form: list[PyTree] = dataclasses.field(default_factory=list)
    response: concurrent.futures.Future | None = None  # set once the response is being read


def max_object_bytes(form: PyTree) -> int:
    """Return the largest accepted size, in bytes, of an object with arrays of this form.

    `form` is a tree of `jax.ShapeDtypeStruct`.
    """
    return array_bytes(form) + _SLACK


def check_possible(settings: Settings, folder: Path) -> None:
    """Check that a run can use learners through the bucket at its address `engine.address`.

    `folder` is the run's, in which nothing is written. In its folder `learners` an earlier start
    may have left two files: `id` has the run's id, and `key` the secret key with which objects are
    signed, unless `ADLOCO_KEY` has it. Without a key a new one serves for this check only. In the
    bucket an object is written as a trial, and deleted.

    Raises:
      ConfigError: If obstore is missing, `ADLOCO_KEY` is too short, or the address is no bucket; or
        if the bucket holds another run or other settings, cannot be read or written, or overwrites
        objects that it should keep.
      ResourceError: If the bucket cannot be reached.
    """
    check_installed("obstore", where="engine.kind = bucket")
    key = find_key(folder / "learners" / "key")  # ADLOCO_KEY, else the file's, else a new one
    bucket = store.open_bucket(settings.engine.address, key)
    check_continues(bucket, settings, folder / "learners" / "id")

    # Try to write an object, an empty message, twice. `create` keeps an object that is there, and
    # returns whether it has written; so the second time it must return False.
    # No driver has the number 0, so the object is nobody's heartbeat.
    has_written = [bucket.create("driver/0.json", Format()) for _ in range(2)]
    bucket.delete("driver/0.json")
    if all(has_written):
        raise ConfigError(
            f"{bucket.url}: the store overwrites objects that it was asked to keep (If-None-Match),"
            " so two learners would take one place; use another store"
        )


@contextlib.contextmanager
def connected(
    address: str, num_learners: int, setup: LearnerSetup, is_over: Callable[[], bool]
) -> Iterator["BucketTransport"]:
    """Become the driver of the run in a bucket, and print the command with which learners join.

    At the end of the `with` block learners are told that the driver has ended. They leave if
    `is_over()` returns True, and otherwise wait for the run to be continued.

    Args:
      address: The bucket's, with a prefix.
      num_learners: Number of learners that the run has at most.
      setup: What each learner is made from. `setup.log` is in the folder `learners` of the run.
      is_over: Returns whether the run is over.

    Raises:
      ConfigError: If `ADLOCO_KEY` is too short, or the bucket cannot be used, holds another run, or
        has a driver that is alive.
      ResourceError: If the bucket cannot be reached.
    """
    folder = Path(setup.log).parent
    key = find_key(folder / "key")  # the user's, that of an earlier start, or a new one
    shown = key
    if given_key():  # the user has set it, and may not want to see it printed
        shown = '"$ADLOCO_KEY"'
    command = f"ADLOCO_KEY={shown} adloco join {address}"
    if setup.by_fit:  # `join` is called in a program that has the model and the rows
        command = f"adloco_jax.join({address!r}, ...) with ADLOCO_KEY={shown} in the environment"
    invitation = f"to join, on up to {num_learners} machines: {command}"
    keep_key(folder / "key", key)  # before anything is signed with it
    there = store.open_bucket(address, key)

    def offer(files: Library) -> None:
        """Write the files that the driver serves to the bucket, from which learners read them."""
        files.write_to(there)

    driver = driving(there, setup, is_over, invitation, offer)
    # A learner on this machine too, if the settings want one.
    with own_learner(setup, address, is_over, secret=key), driver as transport:
        yield transport


def nobody(place: RequestId) -> str:
    """Return an empty name for the learner in a place: a bucket does not know who writes."""
    return ""


@contextlib.contextmanager
def driving(
    there: Store,
    setup: LearnerSetup,
    is_over: Callable[[], bool],
    invitation: str,
    offer: Callable[[Library], None],
    owner: Callable[[RequestId], str] = nobody,
) -> Iterator["BucketTransport"]:
    """Become the driver of the run whose objects are in a store, and print an invitation.

    The driver gives signs of life within the `with` block, and says at its end that it has ended.

    Args:
      there: The store.
      setup: What each learner is made from. `setup.log` is in the folder `learners` of the run.
      is_over: Returns, at the end of the `with` block, whether the run is over.
      invitation: The line that says how learners join.
      offer: Makes the files that the driver serves available to learners.
      owner: Returns the name of the learner in a place; empty if it is not known.

    Yields:
      The transport, by which the driver calls learners.

    Raises:
      ConfigError: If the store holds another run, has a driver that is alive, or cannot be read or
        written.
      ResourceError: If the store cannot be reached, at the beginning or at the end of the block.
    """
    folder = Path(setup.log).parent
    heartbeat_s = setup.settings.engine.heartbeat_s
    there.limit_rate(setup.settings.engine.link)
    run = _own_description(there, setup, folder / "id")
    library = Library({})
    if setup.settings.engine.serves:  # learners may read files from the driver
        library = Library(setup.files)

    # From here on objects are signed for this run, and this start of its driver.
    there.signatures.run = run.id
    there.signatures.start = uuid.uuid4().hex
    # Take the run over. Learners find this driver, and its files, in `run.json`.
    generation = become_next_driver(there, run.driver, heartbeat_s)
    offer(library)
    of_this_driver = {"adloco_jax": __version__, "driver": generation, "files": library.files}
    description = store.to_json(run.model_copy(update=of_this_driver))
    there.put("run.json", description)
    # As it is read from JSON, it is equal to what the transport reads later, to check `run.json`.
    run = store.from_json(description, "run.json", RunDescription)

    transport = BucketTransport(there, run, setup, owner)
    _delete_rounds(there, generation)  # what a driver that was killed has left
    say(invitation)

    def give_sign() -> None:
        """Write the driver's heartbeat, in a thread; its error is raised where learners are polled.

        An error that is raised in the thread would end the process at once. `poll` of the transport
        raises it in the main thread, where the run can end in order.
        """
        transport.act_and_keep_fault(transport.give_sign)

    try:
        # So often that `SIGNS` signs come in the time after which learners count it as lost.
        with processes.every(heartbeat_s / SIGNS, give_sign):
            yield transport
    finally:
        transport.close(is_over=is_over())


def _own_description(bucket: Store, setup: LearnerSetup, path: Path) -> RunDescription:
    """Return the description of the driver's run: that in the bucket, else a new one, not written.

    `setup` is what learners are made from. The file at `path` has the run's id; a new id is written
    if it is missing. Raises ConfigError if the bucket holds another run, or a `run.json` that is
    damaged.
    """
    run = _read_description(bucket, path)
    if run is not None:
        return run
    path.parent.mkdir(parents=True, exist_ok=True)
    # An id that is there stays: learners that have read it before wait for a driver of this run.
    if not path.exists():
        path.write_text(uuid.uuid4().hex, "utf-8")
    return RunDescription(
        id=path.read_text("utf-8"),
        adloco_jax=__version__,
        fingerprint=setup.fingerprint,
        commit=setup.commit,
        base=setup.base.fingerprint,
        settings=setup.settings.model_dump(),
        by_fit=setup.by_fit,  # learners cannot make the model of a caller of `fit` themselves
    )


def _read_description(bucket: Store, path: Path) -> RunDescription | None:
    """Return the run's description, `run.json` of the bucket; None if there is none.

    Raises ConfigError if it is damaged, or of another run: its id is not the one in the file at
    `path`, or there is no such file, as this run is new.
    """

    def read() -> RunDescription | None:
        """Read `run.json` once; None if there is none."""
        return bucket.read_message("run.json", RunDescription)

    try:
        run = store.retry_if_refused(read)
    except Refused as error:
        raise ConfigError(
            f"{bucket.url}: {error}; delete it if no other run is there, else name another prefix,"
            f" such as {bucket.url}-2"
        ) from error
    if run is None:
        return None
    if path.exists() and run.id == path.read_text("utf-8"):
        return run
    raise ConfigError(f"{bucket.url}: holds another run; name another, such as {bucket.url}-2")


def check_continues(bucket: Store, settings: Settings, path: Path) -> None:
    """Check that a run which continues has the settings that its learners have from `run.json`.

    Settings that a resumed run may change without harm may differ, but for `_THEIRS`. Raises
    ConfigError if another one differs, or if `run.json` is damaged, or of another run than the file
    at `path`, which has the id of this one.
    """
    run = _read_description(bucket, path)
    if run is None:  # the run is new
        return
    before = flatten_dict(run.settings, sep=".")  # by key, such as "engine.link"
    # The length of a round may depend on the number of rows, which the run found when it began.
    now = settings.with_rows(run.settings.get("num_rows", 0)).flat()  # by key, too
    differ = []
    for key in OPTIONS:  # the keys of all settings
        matters = kind_of_change(key) != "harmless" or key in _THEIRS
        if matters and before.get(key) != now[key]:
            differ.append(f"{key} = {before.get(key)!r}, now {now[key]!r}")
    if differ:
        raise ConfigError(
            f"{bucket.url}: learners there have {'; '.join(differ)}; change it back, or name"
            " another prefix"
        )


class _Driver(NamedTuple):
    """A driver of the run, as the bucket shows it."""

    generation: int  # its number, from 1 on; 0: no driver has begun
    heartbeat: DriverHeartbeat


def become_next_driver(bucket: Store, last: int, heartbeat_s: float) -> int:
    """Become the run's next driver, and return its number, the generation.

    This process waits until the newest driver has ended, or its heartbeat has not changed for
    `heartbeat_s` seconds. Then it writes the first heartbeat of the next driver, unless another
    process was faster. Raises ConfigError if the newest driver is still alive after twice
    `heartbeat_s`, or the bucket cannot be written.

    `last` is the number of the last driver in `run.json`; 0 if there was none.
    """
    start_s = time.monotonic()
    changed_s = start_s  # when the newest driver's heartbeat last changed
    newest = _newest_driver(bucket, last)
    if not newest.heartbeat.has_ended:  # it may be alive, or may have been killed
        say(f"{bucket.url}: waiting {heartbeat_s:g} s for a sign of an earlier driver")
    first = DriverHeartbeat(start=bucket.signatures.start, count=0, adloco_jax=__version__)
    # Twice `heartbeat_s`: a bucket may first show an old heartbeat of a driver that is gone, and
    # then its last one. That is a change, after which the wait begins again.
    while time.monotonic() <= start_s + 2 * heartbeat_s:
        is_free = newest.heartbeat.has_ended or time.monotonic() - changed_s >= heartbeat_s
        generation = newest.generation + 1
        # `create` returns False if another process has written this heartbeat before.
        if is_free and bucket.create(f"driver/{generation}.json", first):
            return generation
        time.sleep(min(store.LONGEST_PAUSE_S, heartbeat_s / SIGNS))
        before = newest
        newest = _newest_driver(bucket, before.generation)
        if newest != before:
            changed_s = time.monotonic()
    raise ConfigError(
        f"{bucket.url}: another driver runs there; wait for it, or name another prefix"
    )


def _newest_driver(bucket: Store, generation: int) -> _Driver:
    """Return the newest driver of the run; `generation` is the number of one that is known.

    Drivers are numbered one after another, so the numbers from `generation` on are tried until one
    has no heartbeat. If `generation` itself has none, the driver counts as silent: it gets a
    heartbeat without content, which never changes. Number 0 is no driver, and counts as ended, so
    that nobody waits for it.
    """

    def read(number: int) -> DriverHeartbeat | None:
        """Return the heartbeat of a driver; None if there is no driver of this number."""
        try:
            return bucket.read_message(f"driver/{number}.json", DriverHeartbeat)
        except Refused:
            return DriverHeartbeat(count=0)  # not readable, but the number is taken

    heartbeat = read(generation)
    if heartbeat is None:
        heartbeat = DriverHeartbeat(count=0, has_ended=generation == 0)
    while True:
        later = read(generation + 1)
        if later is None:
            return _Driver(generation, heartbeat)
        generation += 1
        heartbeat = later


def _delete_rounds(bucket: Store, last: int) -> None:
    """Delete the parameters, requests and responses of drivers whose number is at most `last`."""
    old = []
    for name in bucket.names():
        # The second part of these names is the driver's number.
        match = re.match(r"(?:params|requests|responses)/(\d+)/", name)
        if match and int(match[1]) <= last:
            old.append(name)
    bucket.delete(*old)


@dataclasses.dataclass
class _Exchange:
    """What the driver has written to the learner in a place, and read from it."""

    id: RequestId  # of the last request that was written
    num_asked: int = 0  # requests that have been submitted
    num_read: int = 0  # responses that have been read
    heartbeat: LearnerHeartbeat | None = None  # the newest; None: no learner has taken the place
    # Future of the thread that writes the newest request, after earlier ones; None: no request.
    writes: concurrent.futures.Future | None = None
    # Future of the thread that reads the heartbeat; None between two looks.
    look: concurrent.futures.Future | None = None
    next_s: float = 0.0  # when to look at the heartbeat next or, during a look, when it began
    pause_s: float = store.FIRST_PAUSE_S  # between two looks


class BucketTransport:
    """The transport of a run whose learners join by themselves, through a bucket.

    `transport.Transport` describes the methods `put`, `start`, `submit`, `poll` and `kill`.
    """

    launches = False
    moves_states = False

    def __init__(
        self,
        bucket: Store,
        run: RunDescription,
        setup: LearnerSetup,
        owner: Callable[[RequestId], str] = nobody,
    ):
        """Begin without a learner.

        Args:
          bucket: The run's objects.
          run: The run's description, with the number of this driver.
          setup: What each learner is made from; used for the spec of its programs and the settings.
          owner: Returns the name of the learner in a place; empty if it is not known.
        """
        self._store = bucket
        self._run = run
        self._generation = run.driver
        self._spec = setup.spec
        self._owner = owner
        self._exchanges: dict[int, _Exchange] = {}  # by the learner's number
        # Names in the bucket of parameters, by their kind, the argument of `put`.
        self._params: dict[Hashable, list[str]] = {}
        # Futures of the threads that write parameters, by name.
        self._writes: dict[str, concurrent.futures.Future] = {}
        self._num_params = itertools.count()  # parameters that were stored
        self._count = itertools.count(1)  # numbers own heartbeats; `become_next_driver` wrote 0
        # A request that takes longer than this makes the link suspect (`_is_cut_off`).
        self._late_s = setup.settings.engine.heartbeat_s / SIGNS
        # When the writing of a heartbeat began; infinity: none is being written.
        self._sign_began_s = math.inf
        self._returned_s = 0.0  # when a look at a learner's heartbeat last returned
        self._writing = threading.Lock()  # held while a heartbeat is made and written
        self._is_closed = False  # set by `close`: only the last heartbeat is still to be written
        # Names of refused heartbeats that were deleted from a free place, to print each once.
        self._cleared: set[str] = set()
        self._fault: BaseException | None = None  # an error of a thread, which `poll` raises

    def give_sign(self) -> None:
        """Write the heartbeat, and `run.json` if it is gone, damaged or overwritten.

        Raises ResourceError if `run.json` names a later driver, which has taken over, or the bucket
        cannot be reached.
        """
        self._sign_began_s = time.monotonic()  # if it takes long, `_is_cut_off` notices
        found = self._store.valid_message("run.json", RunDescription)  # None: gone or damaged
        if found is not None and found.id == self._run.id and found.driver > self._generation:
            raise ResourceError(f"{self._store.url}: another driver has taken over")
        if found != self._run:
            self._store.put("run.json", store.to_json(self._run))
        self._write_heartbeat()
        self._sign_began_s = math.inf

    def _write_heartbeat(self, *, is_over: bool = False, has_ended: bool = False) -> None:
        """Write the driver's heartbeat, which lists all places, and the requests in each.

        `has_ended` marks the last heartbeat: once the transport is closed, no other is written.
        `is_over` says in it that the run is over, and learners need not wait for the next driver.
        """
        with self._writing:
            if self._is_closed and not has_ended:
                return
            learners = []
            for each in [*self._exchanges.values()]:  # a copy: other threads change the dict
                is_free = each.heartbeat is None  # no learner has taken the place
                learners.append(
                    LearnerRequests(id=each.id, num_read=each.num_read, is_free=is_free)
                )
            heartbeat = DriverHeartbeat(
                adloco_jax=__version__,
                start=self._store.signatures.start,
                count=next(self._count),
                learners=learners,
                is_over=is_over,
                has_ended=has_ended,
            )
            self._store.put(f"driver/{self._generation}.json", store.to_json(heartbeat))

    def put(self, params: PyTree, kind: Hashable) -> tuple[str, int]:
        """Begin to write a trainer's parameters, or their update, in a thread.

        `kind` says what they are, such as the update of trainer 0. Of each kind the last two
        objects stay, as a late learner may still read the older one; others are deleted. Returns
        the object's name, by which requests refer to it, and its size in bytes.
        """
        name = f"params/{self._generation}/{next(self._num_params)}.safetensors"
        names = [*self._params.get(kind, []), name]
        old = names[:-2]
        self._params[kind] = names[-2:]
        data = store.pack(Format(), params)

        def write() -> None:
            """Delete old objects, and write the parameters."""
            self._store.delete(*old)
            self._store.put(name, data)

        for each in old:  # no later request names them
            self._writes.pop(each, None)
        self._writes[name] = self._act_in_thread(write)
        return name, len(data)

    def _act_in_thread(
        self, act: Callable[[], None], *after: concurrent.futures.Future | None
    ) -> concurrent.futures.Future:
        """Call a function in a thread, after other calls have ended; return the call's future.

        `after` are futures that this method has returned for the other calls; None is ignored. The
        function is not called if the transport was closed meanwhile. `poll` raises its error.
        """

        def wait_and_act() -> None:
            """Wait for the other calls, and call the function."""
            for future in after:
                if future is not None:
                    future.result()  # raises nothing, as errors are kept
            if not self._is_closed:
                self.act_and_keep_fault(act)

        return store.in_thread(wait_and_act)

    def act_and_keep_fault(self, act: Callable[[], None]) -> None:
        """Call a function; if it raises an error, keep that for `poll`, which raises it.

        This is for other threads: `poll` runs in the main one, which can end the run.
        """
        try:
            act()
        except Exception as error:  # deliberately broad: `poll` raises it
            self._fault = error

    def start(self, number: int, incarnation: int) -> RequestId:
        """Offer a place to machines that want to join; return its handle for calls.

        `number` is that of the learner, and `incarnation` counts the learners that had it before.
        """
        handle = RequestId(generation=self._generation, learner=number, incarnation=incarnation)
        self._exchanges[number] = _Exchange(handle)
        self._act_in_thread(self._write_heartbeat)  # it says that the place is free
        return handle

    def submit(self, handle: RequestId, method: str, **arguments: Any) -> tuple[RequestCall, int]:
        """Call a method of a learner; return the call, for `poll`, and the request's bytes.

        The request is written in a thread, after the learner's earlier requests and the parameters
        that it names. A "ping" writes nothing: the learner's next heartbeat answers it.

        Args:
          handle: The learner's place, as `start` returned it.
          method: "run_round", "states" or "ping".
          **arguments: Of "run_round": `request`, `inputs` (arrays: learning rates and inner states)
            and `params` (the name that `put` returned, or None). Of "states": `wanted`, the keys of
            the inner states.
        """
        exchange = self._exchanges[handle.learner]
        if method == "ping":
            count = 0
            if exchange.heartbeat is not None:
                count = exchange.heartbeat.count
            return RequestCall(method, handle.of(count)), 0

        exchange.num_asked += 1
        call = RequestCall(method, handle.of(exchange.num_asked))
        # What the learner will write is compared with `call.form`, the form of its arrays.
        inputs: Inputs | None = arguments.pop("inputs", None)
        if inputs is not None:  # the method is "run_round"
            request = arguments["request"]
            # `request.work` has an entry for each worker, and each has a response.
            call.form = [response_form(self._spec, request, work) for work in request.work]
            packed = {}  # inner states by worker id, quantised, as the link may be slow
            for worker_id, state in inputs.inner_states.items():
                packed[worker_id] = jax.device_get(pack_state(state, self._spec.outer.precision))
            inputs = inputs._replace(inner_states=packed)
            arguments["states"] = [*packed]  # the workers' ids
        message = RequestMessage(id=call.id, **arguments)
        if message.wanted:  # the method is "states"
            call.form += [state_form(self._spec)] * len(message.wanted)
        data = store.pack(message, inputs)

        def write() -> None:
            """Write the request, and tell the learner of it."""
            self._store.put(call.id.name("requests"), data)
            exchange.id = call.id  # only now, as the heartbeat names requests that are there
            self._write_heartbeat()

        # It is written after this learner's earlier requests, and after its parameters.
        params_write = None  # the future of the parameters' write
        if message.params is not None:
            params_write = self._writes.get(message.params)
        exchange.writes = self._act_in_thread(write, exchange.writes, params_write)
        return call, len(data)

    def poll(self, calls: Sequence[RequestCall], timeout_s: float) -> dict[RequestCall, Reply]:
        """Return the replies to calls that have ended; wait until one has, or the time is over.

        `calls` are those that `submit` returned and that have no reply yet; `timeout_s` is how long
        to wait. As long as the link to the bucket does not work, it waits on. Raises the error of a
        thread, which is ResourceError or ConfigError if the bucket cannot be read or written, and
        ResourceError if another driver has taken over.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            # After a signal requests are given up, and their errors mean nothing.
            if self._fault is not None and not processes.is_asked_to_stop():
                raise self._fault
            for number in {call.id.learner for call in calls}:
                self._look_for_heartbeat(self._exchanges[number])
            replies = {call: self._reply_to(call) for call in calls}
            ended = {call: reply for call, reply in replies.items() if reply is not None}
            if ended or time.monotonic() >= until_s:
                return ended
            time.sleep(min(_LOOK_S, timeout_s))
            # The caller counts silent learners as lost, so it must not see them as silent now.
            while self._is_cut_off() and not (self._fault or processes.is_asked_to_stop()):
                time.sleep(_CUT_OFF_S)

    def _is_cut_off(self) -> bool:
        """Whether the link to the bucket seems not to work.

        It seems so if the sign of life under way takes longer than `_late_s` seconds. It also does
        if a look at a learner's heartbeat takes longer, and no other look has returned since that
        one began.
        """
        late_since_s = time.monotonic() - self._late_s  # what began before takes too long
        if self._sign_began_s < late_since_s:  # never if it is infinity
            return True
        for exchange in self._exchanges.values():
            is_under_way = exchange.look is not None and not exchange.look.done()
            # During a look `next_s` is when it began.
            if is_under_way and self._returned_s < exchange.next_s < late_since_s:
                return True
        return False

    def _look_for_heartbeat(self, exchange: _Exchange) -> None:
        """Look for a newer heartbeat of a learner, and store it in `exchange.heartbeat`.

        The learner is the one in the place of the `exchange`, if one has taken it. A call does not
        wait: it begins a look in a thread if it is time for one, or takes the result of a look that
        has ended. The pauses between looks grow. They are short again once the learner has joined,
        or has written a response.
        """
        if exchange.look is None:
            if time.monotonic() >= exchange.next_s:
                name = exchange.id.heartbeat_name()
                is_free = exchange.heartbeat is None
                exchange.look = store.in_thread(self._read_heartbeat, name, is_free)
                exchange.next_s = time.monotonic()
            return
        if not exchange.look.done():
            return

        heartbeat = exchange.look.result()  # raises the error of the thread, if there is one
        exchange.look = None
        self._returned_s = time.monotonic()
        exchange.pause_s = store.next_pause_s(exchange.pause_s)
        before = exchange.heartbeat
        # A store may show an older heartbeat for a while; its count is not larger.
        if heartbeat is not None and (before is None or heartbeat.count > before.count):
            if before is None or heartbeat.num_responses != before.num_responses:
                exchange.pause_s = store.FIRST_PAUSE_S
            exchange.heartbeat = heartbeat
            if before is None:  # the place is taken now: tell other learners
                self._act_in_thread(self._write_heartbeat)
        exchange.next_s = time.monotonic() + exchange.pause_s

    def _read_heartbeat(self, name: str, is_free: bool) -> LearnerHeartbeat | None:
        """Read a learner's heartbeat, the object `name`, in a thread.

        Returns None if there is none, if it is refused, or if it cannot be read, as after a signal.

        `is_free` says that no learner has the place yet. Then an object that is refused, such as
        one of an earlier start of the driver, is deleted, as it keeps learners out.
        """

        def read() -> LearnerHeartbeat | None:
            """Read the heartbeat once; None if there is none."""
            return self._store.read_message(name, LearnerHeartbeat)

        try:
            if is_free:
                # Before it is deleted, it is read again: it may have been damaged on its way.
                return store.retry_if_refused(read)
            return read()
        except ResourceError:  # such as after a signal, when a failed read is not repeated
            return None
        except Refused as error:
            if is_free:
                self._store.delete(name)
                if name not in self._cleared:
                    say(f"{self._store.url}: {error}; deleted, as it keeps learners out")
                self._cleared.add(name)
            return None

    def _reply_to(self, call: RequestCall) -> Reply | None:
        """Return the reply to a call; None if it has not come yet.

        What counts is the newest heartbeat of the learner that was read: it answers a ping, and has
        the number of responses that the learner has written. A response is read in a thread, which
        begins once this number includes it. An error of the thread is raised here. A response that
        is missing, damaged or cannot be read is none: its reply has `Refused` as its value.
        """
        exchange = self._exchanges[call.id.learner]
        heartbeat = exchange.heartbeat
        if heartbeat is None:  # no learner has taken the place, or its heartbeat was not read yet
            return None
        if call.what == "ping":
            # The first heartbeat after the ping answers it. `call.id.request` is the count of the
            # newest heartbeat when the learner was pinged, so a newer one has another count. A
            # learner that has left writes no newer one: its last heartbeat is the answer.
            is_answer = heartbeat.sign.has_left or heartbeat.count != call.id.request
            if not is_answer:
                return None
            # The driver, not the learner, says whose machine it is, as a learner could claim any.
            return Reply(heartbeat.sign.model_copy(update={"owner": self._owner(call.id)}))
        if call.response is not None and call.response.done():
            # The driver's next heartbeat tells the learner that this response was read.
            exchange.num_read = max(exchange.num_read, call.id.request)
            return call.response.result()  # raises the error of the thread, if there is one
        if call.response is None and heartbeat.num_responses >= call.id.request:
            call.response = store.in_thread(self._read_response, call)
        return None

    def _read_response(self, call: RequestCall) -> Reply:
        """Read the response to a call, and delete it with its request; return it as a reply.

        The reply's value is a list: the `Response` of each worker, or the inner states that were
        asked for. It is `Refused` if the object is missing, is not what it should be or cannot be
        read, or if the learner has refused the request. The reply's `error` says why the learner
        has ended; empty if it has not.
        """
        name = call.id.name("responses")

        def form_of(message: ResponseMessage) -> list[PyTree] | None:
            """Return the form that the arrays of the response must have; None: it must have none.

            Raises Refused if the message responds to another request.
            """
            if message.id != call.id:
                raise Refused(f"{name}: responds to another request")
            if message.error:  # the request was not run
                return None
            return call.form

        try:
            message, value, size = self._store.read_with_arrays(
                name, max_object_bytes(call.form), ResponseMessage, form_of
            )
            if message.refused:
                fault = Refused(f"it refused the request: {said(message.error)}")
                return Reply(fault, num_bytes=size)
            if message.error:  # the learner ends after this
                return Reply(value, error=said(message.error), num_bytes=size)
            if call.what == "states":
                value = [unpack_state(state, self._spec) for state in value]
            return Reply(value, num_bytes=size)
        except (Refused, ResourceError) as error:
            return Reply(Refused(str(error)))
        finally:
            request_name = call.id.name("requests")
            self._act_in_thread(lambda: self._store.delete(request_name, name))

    def kill(self, handle: RequestId) -> None:
        """End the exchange with a learner, and delete its objects.

        The driver's heartbeat names the place no more, so a learner there gives it up when it sees
        this. `handle` is the place, as `start` returned it.
        """
        exchange = self._exchanges.pop(handle.learner)
        left = [handle.heartbeat_name()]  # names of objects to delete
        # Those of requests whose responses were read are deleted already.
        for request in range(exchange.num_read + 1, exchange.num_asked + 1):
            left.append(handle.of(request).name("requests"))
            left.append(handle.of(request).name("responses"))
        self._act_in_thread(self._write_heartbeat)
        # Only after the requests under way are written, else they would stay.
        self._act_in_thread(lambda: self._store.delete(*left), exchange.writes)

    def close(self, *, is_over: bool) -> None:
        """Say on the heartbeat that the driver has ended; delete parameters, requests, responses.

        `is_over` says that the run is over, so learners need not wait for the next driver. After a
        signal this waits only a few seconds for the bucket, and raises nothing. Otherwise it raises
        ResourceError or ConfigError if the bucket cannot be written.
        """

        def end() -> None:
            """Write the last heartbeat, and delete what learners read no more."""
            self._write_heartbeat(is_over=is_over, has_ended=True)
            _delete_rounds(self._store, self._generation)

        self._is_closed = True  # so other threads write no heartbeat after the last one
        self._fault = None  # from here on only an error of `end` matters
        until_s = math.inf  # without a signal
        ending = store.in_thread(self.act_and_keep_fault, end)
        while not ending.done() and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            if processes.is_asked_to_stop():
                until_s = min(until_s, time.monotonic() + store.LAST_S)
        if self._fault is not None and not processes.is_asked_to_stop():
            raise self._fault
