"""Objects over iroh: a driver is reached by its public key, encrypted, through NAT and relays.

This is what both sides share, and the learner's side, `Remote`; the driver's is `served`. iroh is
asynchronous: its coroutines run in one thread (`wait_for`). A ticket is the text with which a
learner finds a driver, such as a user sends to others. An endpoint is one side's socket; its id is
a public key. A connection of two endpoints has streams, each with a sending and a receiving
end. A stream carries one request: a `Question` with what is to be written, then an `Answer` with
what was read. A relay is a server that passes packets on between computers that cannot reach each
other. The wheel of iroh has no types, so its objects are `Any`.
"""

import asyncio
import base64
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import inspect
import io
import ipaddress
import itertools
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import filelock
from pydantic import Field

from adloco_jax.data.disk import replaced_file, write_errors
from adloco_jax.data.formats import Count, Format, checked
from adloco_jax.elastic.messages import Refused
from adloco_jax.elastic.objects import REQUEST_BYTES
from adloco_jax.errors import ConfigError, ResourceError, check_installed, reason
from adloco_jax.host import processes
from adloco_jax.host.terminal import say

PROTOCOL = b"adloco/1"  # which both ends of a connection must name
CONNECT_S = 20.0  # for which a connection is tried
SILENT_S = 30.0  # for a part of a transfer (`_SENT_BYTES`), after which it has failed
LOOK_S = 4.0  # between two checks of whether a connection works
LATE_S = 10.0  # for the answer to such a check, after which the connection is given up
SECRET_MODE = 0o600  # permissions of a file that only its user may read
_HEADER_BYTES = 4096  # of a `Question` or `Answer` at most
_SENT_BYTES = 2**18  # written or read at a time, so that a slow link is not taken for a silent one
_TOLD_BYTES = 2**20  # the rate of a smaller transfer says little, and is not told
_PREFIX = "adloco-"  # of a ticket's text
_FORMAT = 1  # of tickets
_KEY_BYTES = 32  # of a public key, and of a secret one
SECRET_BYTES = 16  # of a run, in a ticket
_PORT_BYTES = 2  # of a port, in a ticket
_CHECKSUM_BYTES = 2  # at the end of a ticket
_SIZE_BYTES = 4  # of a message's length, before it
_SHOWN_CHARACTERS = 40  # of a text that is no ticket
_CLOSING_S = 3.0  # for an endpoint to close
_ERROR_CHARACTERS = 200  # that are shown of an error of iroh
_CHANGED = 2.0  # a rate is told again if it has changed by this factor

T = TypeVar("T")


# -- Tickets ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What a learner needs to reach a run: the driver's key and addresses, and the run's secret."""

    key: bytes  # public, 32 bytes
    secret: bytes  # 16 bytes
    addresses: tuple[str, ...] = ()  # IP:PORT
    relay: str = ""  # its address; empty: none

    def __str__(self) -> str:
        """Return the text that a user sends to others.

        It is base32 of the format, the key, the secret, the number of addresses, each address (the
        length of its IP, the IP, two bytes of port), the relay, and a checksum.
        """
        parts = [bytes([_FORMAT]), self.key, self.secret, bytes([len(self.addresses)])]
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            packed = ipaddress.ip_address(host.strip("[]")).packed  # IPv6 is written in brackets
            parts += [bytes([len(packed)]), packed, int(port).to_bytes(_PORT_BYTES, "big")]
        content = b"".join([*parts, self.relay.encode()])
        text = base64.b32encode(content + _checksum(content)).decode()
        return _PREFIX + text.rstrip("=")  # `read_ticket` adds the padding again


def _checksum(content: bytes) -> bytes:
    """Return the last bytes of a ticket, which do not fit if it was not copied whole."""
    return hashlib.sha256(content).digest()[:_CHECKSUM_BYTES]


def is_ticket(text: str) -> bool:
    """Whether a text is meant to be a ticket."""
    return text.lower().startswith(_PREFIX)


def read_ticket(text: str) -> Ticket:
    """Return the ticket that a text, which `str(ticket)` made, stands for.

    Spaces and lower case do not matter. Raises ConfigError if the text is no ticket, or not whole.
    """
    letters = "".join(text.split()).upper()[len(_PREFIX) :]  # without "adloco-"
    padding = "=" * (-len(letters) % 8)  # base32 wants groups of 8
    try:
        content = base64.b32decode(letters + padding)
        body = content[:-_CHECKSUM_BYTES]
        if content[-_CHECKSUM_BYTES:] != _checksum(body) or body[0] != _FORMAT:
            raise ValueError  # the ConfigError below is raised in its place
        fields = io.BytesIO(body[1:])  # in the order in which `Ticket.__str__` writes them
        key = fields.read(_KEY_BYTES)
        secret = fields.read(SECRET_BYTES)
        count = fields.read(1)[0]
        addresses = []
        for _ in range(count):
            length = fields.read(1)[0]
            ip = ipaddress.ip_address(fields.read(length))
            port = int.from_bytes(fields.read(_PORT_BYTES), "big")
            host = str(ip)
            if ip.version == 6:
                host = f"[{ip}]"
            addresses.append(f"{host}:{port}")
        relay = fields.read().decode()
        return Ticket(key, secret, tuple(addresses), relay)
    except (ValueError, IndexError) as error:
        shown = text[:_SHOWN_CHARACTERS]  # so short that the secret is not in it
        raise ConfigError(
            f"{shown}: no ticket of this version of adloco_jax, or not all of it; adloco ticket RUN"
            " prints it where the driver is"
        ) from error


# -- iroh ------------------------------------------------------------------------------------


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of everything that uses iroh; the first call starts its thread."""
    loop = asyncio.new_event_loop()
    processes.start_thread(loop.run_forever, name="iroh")
    return loop


def wait_for(action: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in iroh's thread, wait for its end, and return its result or raise its error.

    It is called from other threads.
    """
    return asyncio.run_coroutine_threadsafe(action, _loop()).result()


def begin(action: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine in iroh's thread, without waiting for it; nobody gets its result or error."""
    asyncio.run_coroutine_threadsafe(action, _loop())


@functools.cache
def send_at_once() -> bool:
    """Make iroh's Python package copy the bytes it sends in one step; return whether that is done.

    By itself it copies them one by one, 4 MB/s, with the interpreter's lock held (uniffi-rs #2824).
    A method of a private class is replaced, and only if its source is the expected one. Otherwise
    False is returned, and sending stays slow.
    """
    import iroh.iroh_ffi

    builder: Any = getattr(iroh.iroh_ffi, "_UniffiRustBufferBuilder", None)
    write = getattr(builder, "write", None)
    if write is None or "self.rbuf.data[self.rbuf.len + i] = byte" not in inspect.getsource(write):
        return False

    def write_at_once(self: Any, value: bytes) -> None:
        """Append bytes to the buffer of Rust, `self.rbuf`."""
        with self._reserve(len(value)):  # makes room for the bytes, and counts them at its end
            # The address after the last byte.
            start = ctypes.cast(self.rbuf.data, ctypes.c_void_p).value + self.rbuf.len
            ctypes.memmove(start, value, len(value))

    builder.write = write_at_once
    return True


async def bind(key: bytes, *, relay: str, port: int = 0, port_v6: int = 0) -> Any:
    """Open an endpoint of iroh, which has a socket for IPv4 and one for IPv6, and return it.

    Raises IrohError if a port cannot be used.

    Args:
      key: Its secret key, 32 bytes.
      relay: Address of the relay to use; "off": none; empty: the public ones.
      port: UDP port of IPv4; 0: any that is free.
      port_v6: UDP port of IPv6; 0: any that is free, or no socket if there is no IPv6.
    """
    import iroh

    send_at_once()  # sending is fast from then on, if iroh's package is the expected one
    builder = iroh.EndpointBuilder()
    builder.apply_minimal()  # nothing is published about this endpoint
    if relay == "off":
        builder.relay_mode(iroh.RelayMode.disabled())
    elif relay:
        builder.relay_mode(iroh.RelayMode.custom_from_urls([relay]))
    else:
        builder.relay_mode(iroh.RelayMode.default_mode())
    builder.bind_addr(f"0.0.0.0:{port}")
    if port_v6:
        builder.bind_addr(f"[::]:{port_v6}")
    builder.alpns([PROTOCOL])  # only endpoints that name the same protocol are connected
    builder.secret_key(key)
    return await builder.bind()


def describe_path(connection: Any) -> tuple[str, str]:
    """Say in words how packets of a connection travel now.

    Returns the other side's address with the way, such as "1.2.3.4:5, directly", and the time of a
    round trip; "no path" and an empty text if iroh has not chosen a path.
    """
    for each in connection.paths():
        if each.is_selected:
            way = "by relay, which is shared and slow" if each.is_relay else "directly"
            return f"{each.remote_addr}, {way}", f"round trip {each.rtt_ms} ms"
    return "no path", ""


# -- Messages --------------------------------------------------------------------------------


class Question(Format):
    """What a learner asks; after it come `size` bytes to write.

    "hello" begins a connection. "look" asks only for an answer, to see whether the connection
    works. The others are methods of `objects.Objects`, for the object `name`.
    """

    do: Literal["hello", "look", "get", "put", "create", "delete"]
    name: Annotated[str, Field(max_length=200)] = ""
    size: Count = 0
    # The run's secret in hexadecimal digits, in "hello", the first message of a connection.
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""


Status: TypeAlias = Literal["done", "missing", "there", "gone", "refused"]
"""What became of a request.

"missing": there is no object to read. "there": an object to create exists already. "gone": the
place is no longer the learner's. "refused": the learner may not do it.
"""


class Answer(Format):
    """What the driver answers; after it come `size` bytes that were read."""

    status: Status
    size: Count = 0
    why: Annotated[str, Field(max_length=300)] = ""


M = TypeVar("M", Question, Answer)


async def send_message(send: Any, message: Format, pieces: Iterable[bytes] = ()) -> None:
    """Write a message and the bytes that follow it to a stream's sending end, and end the stream.

    The bytes are in `pieces` of any length, of which the next is taken when the last is sent.
    Raises TimeoutError if a part of `_SENT_BYTES` takes longer than `SILENT_S` seconds, and
    IrohError if the connection is closed.
    """
    header = message.model_dump_json().encode()
    size = len(header).to_bytes(_SIZE_BYTES, "big")
    await asyncio.wait_for(send.write_all(size + header), SILENT_S)
    for piece in pieces:
        for start in range(0, len(piece), _SENT_BYTES):
            part = bytes(piece[start : start + _SENT_BYTES])
            await asyncio.wait_for(send.write_all(part), SILENT_S)
    await send.finish()


async def read_message(recv: Any, kind: type[M]) -> M:
    """Read a message of this kind from a stream's receiving end.

    A message is its length in 4 bytes, and JSON. Raises Refused if it is too long or no such
    message, and IrohError if the connection is closed or the stream ends before.
    """
    size = int.from_bytes(await recv.read_exact(_SIZE_BYTES), "big")
    if not 0 < size <= _HEADER_BYTES:
        raise Refused(f"a message of {size} bytes, expected 1 to {_HEADER_BYTES}")
    try:
        content = json.loads(await recv.read_exact(size))
    except (ValueError, RecursionError) as error:
        raise Refused("no message of adloco_jax") from error
    return checked(content, kind, "message", Refused)


async def read_body(recv: Any, size: int) -> bytes:
    """Read `size` bytes from a stream's receiving end.

    Raises TimeoutError if a part of them, `_SENT_BYTES`, takes longer than `SILENT_S` seconds, and
    IrohError if the connection is closed, or the stream ends before.
    """
    body = bytearray()
    while len(body) < size:
        length = min(_SENT_BYTES, size - len(body))
        body += await asyncio.wait_for(recv.read_exact(length), SILENT_S)
    return bytes(body)


# -- The learner's side ----------------------------------------------------------------------


def own_key() -> tuple[bytes, filelock.FileLock]:
    """Return this learner's secret key, by which drivers know it, and the lock that keeps it.

    Keys lie in the user's configuration folder. Of learners that run at the same time each has its
    own: the first whose lock is free, until the caller releases it. Raises ResourceError if that
    folder cannot be written.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    folder = Path(home) / "adloco_jax"
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = folder / f"learner-{number}.key"
            lock = filelock.FileLock(f"{path}.lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                continue  # another learner that runs now has this key
            return secret_file(path, new_key), lock
    raise AssertionError("the loop does not end")


def new_key() -> bytes:
    """Return a new secret key of an endpoint."""
    return os.urandom(_KEY_BYTES)


def secret_file(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of a file that only its user may read.

    If the file is missing, it is written first, with what `make` returns. Another process sees it
    whole or not at all.
    """
    if not path.exists():
        with replaced_file(path, SECRET_MODE) as file:
            file.write(make())
    return path.read_bytes()


class Remote:
    """Reads and writes the objects of a run at its driver, which a learner reaches with a ticket.

    `objects.Objects` describes the methods `get`, `put`, `create`, `delete` and `names`. The first
    four wait for the driver's answer. They raise ConnectionError if there is no connection or no
    answer, and ConfigError if the driver does not let this learner in.
    """

    def __init__(self, text: str, key: bytes | None = None):
        """Read the ticket `text`, without connecting.

        `key` is the learner's secret key; None or empty: one of its user's, which is locked until
        `close`. Raises ConfigError if `text` is no ticket, or iroh is missing; ResourceError if the
        user's folder of keys cannot be written.
        """
        check_installed("iroh", where="a ticket")
        self.ticket = read_ticket(text)
        self.address = f"{text[: len(_PREFIX) + 8]}…"  # for messages, without the secret
        self._lock: filelock.FileLock | None = None
        if key:
            self._key = key
        else:
            self._key, self._lock = own_key()
        self._endpoint: Any = None  # None until the first connection
        self._connection: Any = None  # the last one, which may be closed
        self._attempt: asyncio.Task | None = None  # the last attempt to connect
        self._watching: asyncio.Task | None = None  # looks at the connection until it ends
        self._told: set[str] = set()  # reasons of refusals that were printed
        self._rates: dict[str, float] = {}  # that were printed, in bits a second, by direction

    def open(self) -> None:
        """Connect to the driver, unless this is connected already.

        Raises ResourceError if the driver is not reached in `CONNECT_S` seconds (20), or then does
        not answer in `LATE_S` (10); the message says what helps. Raises ConfigError if it does not
        let this learner in.
        """
        try:
            wait_for(self._connected())
        except OSError as error:  # ConnectionError is one
            tried = ", ".join(self.ticket.addresses) or "no address"
            relay = f"the relay {self.ticket.relay}" if self.ticket.relay else "no relay"
            raise ResourceError(
                f"{self.address}: cannot reach the driver in {CONNECT_S:.0f} s (UDP to {tried};"
                f" {relay}); is it running, and is this its ticket (adloco ticket RUN)? What helps:"
                " one network or VPN for both, a forwarded UDP port (engine.address) or a relay"
                " of your own (engine.relay) at the driver, or a bucket (docs/guides/two_pcs.md)"
            ) from error

    def close(self) -> None:
        """Close the endpoint, and let another learner have the key."""
        if self._endpoint is not None:
            with contextlib.suppress(TimeoutError):  # nobody needs the endpoint any more
                wait_for(asyncio.wait_for(self._endpoint.close(), _CLOSING_S))
        if self._lock is not None:
            self._lock.release()

    async def _connected(self) -> Any:
        """Return the open connection, or wait for a new one.

        Requests that wait at the same time share one attempt. Raises ConnectionError if the driver
        cannot be reached, ConfigError if it does not let this learner in.
        """
        if self._connection is not None and self._connection.close_reason() is None:
            return self._connection
        if self._attempt is None or self._attempt.done():
            self._attempt = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._attempt)  # a cancelled request must not end the attempt

    async def _connect(self) -> Any:
        """Connect to the driver, say the run's secret, and return the connection.

        Raises ConfigError if the driver does not let this learner in, ConnectionError if it cannot
        be reached.
        """
        import iroh

        with connection_errors():
            if self._endpoint is None:
                # Of all relays only the driver's own leads to it; without one, none is used.
                self._endpoint = await bind(self._key, relay=self.ticket.relay or "off")
            driver = iroh.EndpointId.from_bytes(self.ticket.key)
            relay = self.ticket.relay or None
            address = iroh.EndpointAddr(driver, relay, [*self.ticket.addresses])
            attempt = self._endpoint.connect(address, PROTOCOL)
            connection = await asyncio.wait_for(attempt, CONNECT_S)
            hello = Question(do="hello", secret=self.ticket.secret.hex())
            answer, _ = await asyncio.wait_for(_ask_on(connection, hello), LATE_S)
        if answer.status == "refused":
            connection.close(1, b"refused")  # 1: a code that nobody reads
            raise ConfigError(
                f"{self.address}: the driver does not let this computer in: {answer.why}"
            )
        self._connection = connection
        path = ", ".join(describe_path(connection))
        say(f"connected to the driver at {path}; this computer is {self._endpoint.id()}")
        # Nobody awaits the task. It is kept, because asyncio itself may forget a running task.
        self._watching = asyncio.ensure_future(self._watch(connection))
        return connection

    async def _watch(self, connection: Any) -> None:
        """Check a connection until it is closed: close it if the driver does not answer in time.

        A line is printed when its packets take another path, such as directly and no more by relay.
        """
        told, _ = describe_path(connection)  # the path that was printed last
        while connection.close_reason() is None:
            await asyncio.sleep(LOOK_S)
            try:
                with connection_errors():
                    await asyncio.wait_for(_ask_on(connection, Question(do="look")), LATE_S)
            except OSError:
                connection.close(1, b"no answer")
                return
            path, rtt = describe_path(connection)
            if path == "no path":
                continue
            if told not in (path, "no path"):  # it has changed, and is not the first path
                say(f"the driver is reached at {path} now, {rtt}")
            told = path

    async def _ask(self, question: Question, body: bytes = b"") -> tuple[Answer, Any]:
        """Ask the driver; return its answer, and the stream's end with the bytes that follow it.

        `body` has the bytes to write. Each reason for which the driver refuses is printed once.
        Raises ConnectionError if there is no connection or no answer, and ConfigError if the driver
        does not let this learner in.
        """
        connection = await self._connected()
        with connection_errors():
            answer, recv = await _ask_on(connection, question, body)
        if answer.status == "refused" and answer.why not in self._told:
            self._told.add(answer.why)
            say(f"the driver refuses to {question.do} {question.name}: {answer.why}")
        return answer, recv

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces.

        Bytes are received as the iterator of pieces is used. None: there is no such object, or this
        learner may not read it.
        """
        answer, recv = wait_for(self._ask(Question(do="get", name=name)))
        if answer.status != "done":
            return None
        return answer.size, self._pieces(recv, answer.size)

    def _pieces(self, recv: Any, size: int) -> Iterator[bytes]:
        """Yield an object of `size` bytes in pieces, and print the rate at the end if it is new.

        `recv` is the stream's receiving end, before the first byte. If the caller does not take all
        pieces, the driver is told to send no more. Raises ConnectionError if a piece does not come.
        """
        left = size  # bytes that have not come yet
        start_s = time.monotonic()
        try:
            while left:
                size_of_piece = min(REQUEST_BYTES, left)  # the last one is smaller
                with connection_errors():
                    piece = wait_for(read_body(recv, size_of_piece))
                left -= len(piece)
                yield piece
            self._tell_rate("down", size, start_s)
        finally:
            if left:
                with contextlib.suppress(Exception):  # deliberately broad: it may be closed
                    wait_for(recv.stop(0))  # 0: a code that nobody reads

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it; without effect if the driver refuses it."""
        start_s = time.monotonic()
        wait_for(self._ask(Question(do="put", name=name, size=len(data)), data))
        self._tell_rate("up", len(data), start_s)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call has written it."""
        asked = Question(do="create", name=name, size=len(data))
        answer, _ = wait_for(self._ask(asked, data))
        return answer.status == "done"

    def delete(self, name: str) -> None:
        """Delete an object of this learner; without effect if the driver refuses it."""
        wait_for(self._ask(Question(do="delete", name=name)))

    def names(self) -> list[str]:
        """Return no names: a learner may not list the driver's objects."""
        return []

    def _tell_rate(self, direction: str, num_bytes: int, start_s: float) -> None:
        """Print the rate of a transfer that began at `start_s`, if it is large and its rate is new.

        `direction` is "up" or "down". A rate is new if it is half or twice that printed last.
        """
        seconds = max(time.monotonic() - start_s, 1e-3)  # not zero
        rate = 8 * num_bytes / seconds  # bits a second
        told = self._rates.get(direction, 0.0)
        is_like_told = told / _CHANGED < rate < _CHANGED * told
        if num_bytes >= _TOLD_BYTES and not is_like_told:
            self._rates[direction] = rate
            say(f"rate {direction} measured: {rate / 1e6:,.1f} Mbit/s")


async def _ask_on(connection: Any, question: Question, body: bytes = b"") -> tuple[Answer, Any]:
    """Ask in a new stream of a connection; return the answer, and the stream's receiving end.

    `body` has the bytes to write. If the answer has `size` bytes of an object, these are still to
    be read from the receiving end. Raises IrohError or TimeoutError if the connection fails,
    Refused if the answer is no `Answer`.
    """
    import iroh

    stream = await connection.open_bi()
    # The driver may stop the stream before it has read all, and answer at once with the reason.
    with contextlib.suppress(iroh.IrohError):
        await send_message(stream.send(), question, [body])
    return await read_message(stream.recv(), Answer), stream.recv()


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """Turn IrohError, TimeoutError and Refused within the `with` block into ConnectionError."""
    import iroh

    try:
        yield
    except iroh.IrohError as error:
        # `reason` takes secrets out of an error's message, and cuts it.
        raise ConnectionError(reason(RuntimeError(error.message()), _ERROR_CHARACTERS)) from error
    except TimeoutError as error:
        raise ConnectionError("no answer") from error
    except Refused as error:
        raise ConnectionError(str(error)) from error
