"""The driver's side of a run over iroh: it serves objects to learners, each within its rights.

Nobody passes the first message without the run's secret. A learner is known by its key: `peer` is
its public key as text, the id of its endpoint. It may read what is meant for all or for it, and
write and delete only in the place that it has taken. A place is a `RequestId` whose request is 0; a
`part` is the first folder of a name: learners (heartbeats), requests or responses. A stranger is a
connection that has not said the secret yet. A stream carries one request of a learner, a
`Question`, and its `Answer`; each may be followed by the bytes of an object, its body. A driver's
number is its generation. A driver's heartbeat is the object `driver/NUMBER.json`, which learners
can only read; it lists all places, and says which are free. Within `direct.connection_errors`
errors of a connection are raised as ConnectionError, an OSError.
"""

import asyncio
import contextlib
import hmac
import math
import re
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from typing import Any

from adloco_jax.elastic import direct
from adloco_jax.elastic.direct import (
    Answer,
    Question,
    Status,
    describe_path,
    read_body,
    read_message,
)
from adloco_jax.elastic.messages import DriverHeartbeat, RequestId
from adloco_jax.elastic.objects import REQUEST_BYTES, Memory
from adloco_jax.elastic.store import JSON_LIMIT, from_json
from adloco_jax.host.terminal import say

_HELLO_S = 10.0  # for the first message of a connection, and for each later `Question`
_MOST_STREAMS = 32  # of a connection at a time
_MOST_CONNECTIONS = 4  # of a learner; the oldest is closed
_MOST_STRANGERS = 64  # connections that have not said the secret yet
_MOST_LEARNERS = 512  # connections of learners
_MOST_NOTED = 1000  # kinds of refusals that are told and remembered
_SMALL_BYTES = 2**16  # of a body, such as a heartbeat, that always has room
_TELL_S = 60.0  # from one line about strangers to the next
_CLOSING_S = 1.0  # for an answer to arrive before its connection is closed
_MEASURED_S = 0.5  # for the path of a new connection to be measured
_SHOWN_CHARACTERS = 8  # of a learner's id, with which messages name it
# Names of what the driver writes for all learners.
_SHARED = re.compile(
    r"run\.json|driver/\d{1,10}\.json|params/\d{1,10}/\d{1,10}\.safetensors"
    r"|files/[0-9a-f]{64}/(hashes|\d{1,7})"
)
# What the owner of a place may do, by part, without writing anything.
_WITHOUT_BYTES = (
    ("requests", "get"),
    ("learners", "get"),
    ("learners", "delete"),
    ("responses", "delete"),
)
_PLACED = re.compile(
    r"(?P<part>learners|requests|responses)/(?P<generation>\d{1,10})/"
    r"(?P<learner>\d{1,9})-(?P<incarnation>\d{1,9})(\.json|/(?P<request>\d{1,9})\.safetensors)",
    re.ASCII,
)


def _place_of(name: str) -> tuple[RequestId, str] | None:
    """Return the place to which an object's name belongs, and the part of the name.

    None: it is no name of a place's object. Numbers have one spelling, so that a name with "00-0"
    in place of "0-0" is none.
    """
    match = _PLACED.fullmatch(name)
    if match is None:
        return None
    part = match["part"]
    place = RequestId(
        generation=int(match["generation"]),
        learner=int(match["learner"]),
        incarnation=int(match["incarnation"]),
    )
    # The name as the driver spells it.
    if part == "learners":
        usual = place.heartbeat_name()
    else:
        # The number of the request. A name that has none is not the usual one of 0 either.
        usual = place.of(int(match["request"] or 0)).name(part)
    if name != usual:
        return None
    return place, part


class _Turned(Exception):
    """Raised for a request that will not be done; `answer` is what the learner is told."""

    def __init__(self, status: Status, why: str = ""):
        """Make the answer from its status, and the reason in words."""
        super().__init__(why)
        self.answer = Answer(status=status, why=why)


class _Room:
    """Limits the memory for the bodies of requests and answers; a body without room waits.

    A stream whose body waits is not read, so its sender waits, too.
    """

    def __init__(self, most_bytes: int):
        """Begin empty.

        The bodies of a learner have `most_bytes`, and the copies of all bodies twice as many. So
        one learner cannot keep the others waiting.
        """
        self._most_bytes = most_bytes
        self._held: dict[str, int] = {}  # bytes of bodies, by the id of the learner
        self._copied = 0  # bytes of the copies of bodies, of all learners
        self._changed = asyncio.Condition()  # notified when bytes are freed

    @contextlib.asynccontextmanager
    async def hold(self, peer: str, num_bytes: int, copied: int) -> AsyncIterator[None]:
        """Wait until there is room for a body, and keep that for the `async with` block.

        Args:
          peer: Id of the learner that sends or gets the body.
          num_bytes: Size of the body.
          copied: How many of these bytes are copied in memory at a time: all that a learner sends,
            but only a piece of an object that is kept here anyway.
        """
        if num_bytes <= _SMALL_BYTES:  # it always has room
            yield
            return

        def fits() -> bool:
            """Whether there is room for the body among the learner's own, and among all copies.

            If there is no other, a body of any size fits: it would wait for ever otherwise.
            """
            own = self._held.get(peer, 0)
            has_own = own == 0 or own + num_bytes <= self._most_bytes
            has_shared = self._copied == 0 or self._copied + copied <= 2 * self._most_bytes
            return has_own and has_shared

        async with self._changed:
            await self._changed.wait_for(fits)
            self._held[peer] = self._held.get(peer, 0) + num_bytes
            self._copied += copied
        try:
            yield
        finally:
            async with self._changed:
                self._copied -= copied
                self._held[peer] -= num_bytes
                if self._held[peer] == 0:
                    del self._held[peer]
                self._changed.notify_all()


class Server:
    """Serves the objects of a driver over an endpoint of iroh."""

    def __init__(
        self,
        objects: Memory,
        secret: bytes,
        members: Collection[str],
        *,
        most_bytes: int,
        own_id: str = "",
    ):
        """Store the arguments; `accept` lets learners in.

        Args:
          objects: The objects of the run, which the driver reads and writes too.
          secret: The run's secret, which a learner must know.
          members: Ids of the learners that are let in; empty: all that know the secret.
          most_bytes: Largest size in bytes of a response, which may have all workers of a round.
          own_id: Id of the learner on this computer; empty if there is none.
        """
        self._objects = objects
        self._secret = secret
        self._members = members
        self._most_bytes = most_bytes
        self._own_id = own_id
        self._room = _Room(most_bytes)
        self._owners: dict[RequestId, str] = {}  # ids of learners, by the place they have taken
        self._connections: dict[str, list[Any]] = {}  # by the id of the learner
        # Connections that have not said the secret yet; `accept` limits their number.
        self._num_strangers = 0
        self._noted: set[tuple[str, str]] = set()  # learner and fault that were printed
        self._turned_away = 0  # strangers that were not let in
        self._told_s = -math.inf  # when this number was last printed
        self._tasks: set[asyncio.Task] = set()  # that serve connections and answer streams

    def owner(self, place: RequestId) -> str:
        """Return the name of the learner in a place, for messages; empty if the place is free."""
        return self._name(self._owners.get(place.of(0), ""))

    def _name(self, peer: str) -> str:
        """Return how messages name a learner: by the first letters of its id."""
        if peer == self._own_id:
            return "this computer"
        return peer[:_SHOWN_CHARACTERS]

    @property
    def num_connections(self) -> int:
        """How many connections learners have open."""
        return sum(len(each) for each in self._connections.values())

    async def accept(self, endpoint: Any) -> None:
        """Accept connections to an endpoint of iroh until it is closed.

        A connection is refused if there are too many of strangers, or of learners.
        """
        while True:
            incoming = await endpoint.accept_next()
            if incoming is None:  # the endpoint is closed
                return
            if self._num_strangers >= _MOST_STRANGERS or self.num_connections >= _MOST_LEARNERS:
                with contextlib.suppress(OSError), direct.connection_errors():  # the other is gone
                    await incoming.refuse()
                continue
            self._start_task(self._serve(incoming))

    def _start_task(self, coroutine: Coroutine) -> None:
        """Start a task that nobody awaits, and keep it until it ends.

        Otherwise asyncio, which has weak references only, may forget a running task.
        """
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, incoming: Any) -> None:
        """Let a learner in, and answer its requests as long as it is connected.

        Until it is let in it counts as a stranger. `incoming` is a connection of iroh that is not
        accepted yet.
        """
        connection = None
        self._num_strangers += 1
        try:
            with direct.connection_errors():
                accepting = await incoming.accept()
                connection = await asyncio.wait_for(accepting.connect(), _HELLO_S)
                connection.set_max_concurrent_bi_streams(_MOST_STREAMS)
                is_let_in = await asyncio.wait_for(self._greet(connection), _HELLO_S)
        except OSError:  # it failed, was silent for too long, or said something else
            is_let_in = False
        finally:
            self._num_strangers -= 1
        if connection is None:
            return
        if not is_let_in:
            self._count_turned_away()
            await asyncio.sleep(_CLOSING_S)  # the answer is on its way, and closing would lose it
            connection.close(1, b"not let in")  # 1: a code that nobody reads
            return

        peer = str(connection.remote_id())
        of_learner = self._connections.setdefault(peer, [])  # oldest first
        of_learner.append(connection)
        if len(of_learner) > _MOST_CONNECTIONS:
            of_learner[0].close(2, b"too many connections")  # 2: a code that nobody reads
        telling = asyncio.ensure_future(self._say_path(connection, peer))
        try:
            await self._answer_all(connection, peer)  # until the connection is closed
        finally:
            telling.cancel()
            of_learner.remove(connection)
            if not of_learner:
                del self._connections[peer]

    async def _greet(self, connection: Any) -> bool:
        """Read the first message of a connection, answer it, and return whether to let it in.

        It is let in if it says "hello" with the run's secret, and is a member. Raises IrohError or
        TimeoutError if the connection fails, Refused if the message is no `Question`.
        """
        stream = await connection.accept_bi()
        hello = await read_message(stream.recv(), Question)
        peer = str(connection.remote_id())
        answer = Answer(status="done")
        # In a comparison with `!=` the time would tell a stranger how much of it is right.
        if hello.do != "hello" or not hmac.compare_digest(hello.secret, self._secret.hex()):
            answer = Answer(status="refused", why="the ticket is not this run's")
        elif self._members and peer not in self._members:
            why = f"engine.members does not name {peer}"
            answer = Answer(status="refused", why=why)
            say(f"learner {self._name(peer)} has the ticket and was turned away: {why}")
        await direct.send_message(stream.send(), answer)
        return answer.status == "done"

    def _count_turned_away(self) -> None:
        """Count a stranger that was not let in; print the number, at most once a minute."""
        self._turned_away += 1
        if time.monotonic() > self._told_s + _TELL_S:
            self._told_s = time.monotonic()
            say(f"turned away without the run's secret, or silent: {self._turned_away} so far")

    async def _say_path(self, connection: Any, peer: str) -> None:
        """Print which path a learner's packets take, now and when it changes; end if cancelled."""
        await asyncio.sleep(_MEASURED_S)
        told = ""  # the path that was printed last
        while True:
            path, rtt = describe_path(connection)
            if path not in (told, "no path"):
                say(f"learner {self._name(peer)} is connected from {path}, {rtt}; its id: {peer}")
                told = path
            await asyncio.sleep(direct.LOOK_S)

    async def _answer_all(self, connection: Any, peer: str) -> None:
        """Answer the requests of a learner, each in a stream, until its connection is closed.

        Several are answered at the same time. If a learner opens too many streams, its connection
        is closed here.
        """
        num_open = 0  # streams whose answer has not ended

        async def answer(stream: Any) -> None:
            """Answer the request of a stream, or abort the stream if it has none."""
            nonlocal num_open
            num_open += 1
            try:
                with direct.connection_errors():
                    await self._answer(stream, peer)
            except OSError:  # the learner has sent something else, or nothing, or is gone
                with contextlib.suppress(Exception):  # deliberately broad: it may be closed
                    await stream.send().reset(1)  # 1: a code that nobody reads
                    await stream.recv().stop(1)
            finally:
                num_open -= 1

        while True:
            try:
                with direct.connection_errors():
                    stream = await connection.accept_bi()
            except OSError:  # the connection is closed
                return
            # iroh lets a learner have `_MOST_STREAMS`. Here a stream counts until its answer has
            # ended, so there may be more for a moment, but not twice as many.
            if num_open >= 2 * _MOST_STREAMS:
                self._note(peer, "opened too many streams")
                connection.close(2, b"too many streams")
                return
            self._start_task(answer(stream))

    async def _answer(self, stream: Any, peer: str) -> None:
        """Do what a learner asks in a stream, if it may, and answer.

        `stream` is one of iroh, with a sending and a receiving end; `peer` is the learner's id.
        Raises Refused if the stream's message is no `Question`; TimeoutError if it, or its body,
        comes or goes too slowly; IrohError if the connection fails.
        """
        recv = stream.recv()
        question = await asyncio.wait_for(read_message(recv, Question), _HELLO_S)
        pieces: Iterator[bytes] = iter(())  # of the object that was asked for
        try:
            most = self._limit(question, peer)  # bytes that this learner may write
            if question.size > most:
                raise _Turned("refused", f"{question.size} bytes, expected at most {most}")
            async with self._room.hold(peer, question.size, copied=question.size):
                body = await read_body(recv, question.size)
                answer, pieces = self._do(question, body, peer)
        except _Turned as turned:
            answer = turned.answer
            await recv.stop(0)  # the learner need not send the body
        if answer.status == "refused":
            self._note(peer, f"was refused to {question.do} {question.name}: {answer.why}")
        copied = min(answer.size, REQUEST_BYTES)  # a piece at a time
        async with self._room.hold(peer, answer.size, copied):
            await direct.send_message(stream.send(), answer, pieces)

    def _note(self, peer: str, what: str) -> None:
        """Print what a learner did that it may not, once for each kind of thing.

        `what` is in words; two that differ only in numbers, such as a size, are of one kind.
        """
        kind = (peer, re.sub(r"\d+", "", what))  # without numbers
        if kind in self._noted or len(self._noted) >= _MOST_NOTED:
            return
        self._noted.add(kind)
        say(f"learner {self._name(peer)} {what}")

    def _limit(self, question: Question, peer: str) -> int:
        """Return how many bytes a learner may write by a request; 0 if it writes nothing.

        Raises `_Turned`, with the answer to give, if the learner may not make the request. `peer`
        is the learner's id. Of a `question`, `do` says what is asked for, and `name` names the
        object.
        """
        do = question.do
        name = question.name
        # All may read the run's description, drivers' heartbeats, parameters and served files.
        if do in ("hello", "look") or (do == "get" and _SHARED.fullmatch(name)):
            return 0
        found = _place_of(name)
        if found is None:
            raise _Turned("refused", "not its place")
        place, part = found  # `part` is learners (heartbeats), requests or responses

        # A free place is taken by its heartbeat.
        owner = self._owners.get(place)  # None: no learner has taken it from this driver
        if do == "create" and part == "learners":
            # An owner that has deleted its heartbeat has left the place.
            is_taken = owner is not None and self._objects.get(name) is not None
            if is_taken or not self._is_free(place):
                raise _Turned("there")
            return JSON_LIMIT  # a heartbeat is a small object of JSON

        # All else is for the owner of the place.
        if owner is None:  # of a driver before this one
            raise _Turned("gone")
        if owner != peer and (part, do) == ("learners", "get"):
            raise _Turned("gone")  # it has tried to take the place, too, and looks who was first
        if owner != peer:
            raise _Turned("refused", "not its place")

        if part == "responses" and do == "put":
            # Without the request nobody waits for the response.
            if self._objects.get(name.replace("responses/", "requests/")) is None:
                raise _Turned("gone")
            return self._most_bytes
        if part == "learners" and do == "put":
            return JSON_LIMIT
        if (part, do) in _WITHOUT_BYTES:
            return 0
        raise _Turned("refused", "not its place")

    def _is_free(self, place: RequestId) -> bool:
        """Whether the driver's heartbeat says that it waits for a learner in a place.

        `place.generation` is the number of the driver that has offered the place. It is not free if
        this driver has no heartbeat here, as one that has ended long ago.
        """
        name = f"driver/{place.generation}.json"
        stored = self._objects.get(name)
        if stored is None:
            return False
        _, pieces = stored
        # Refused is not raised: this process has written the heartbeat, and learners cannot.
        heartbeat = from_json(b"".join(pieces), name, DriverHeartbeat)
        return any(each.is_free and each.id.of(0) == place for each in heartbeat.learners)

    def _do(self, question: Question, body: bytes, peer: str) -> tuple[Answer, Iterator[bytes]]:
        """Do what a learner asks, after a check that it may; return the answer and its body.

        `body`, an argument, has the bytes to write; that of the answer is an iterator of pieces.
        A "hello" or "look" only wants an answer.
        """
        name = question.name
        nothing: Iterator[bytes] = iter(())
        if question.do == "get":
            stored = self._objects.get(name)
            if stored is None:
                return Answer(status="missing"), nothing
            size, pieces = stored
            return Answer(status="done", size=size), pieces
        if question.do == "create":
            if not self._objects.create(name, body):
                return Answer(status="there"), nothing
            placed = _place_of(name)
            assert placed is not None, "only heartbeats of places are created"
            place, _ = placed
            self._owners[place] = peer  # whoever creates the heartbeat has the place
        elif question.do == "put":
            self._objects.put(name, body)
        elif question.do == "delete":  # done, too, if it is not there
            with contextlib.suppress(KeyError):
                self._objects.delete(name)
        return Answer(status="done"), nothing
