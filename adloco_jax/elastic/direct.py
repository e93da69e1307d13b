"""Objects over iroh: a driver is reached by its public key, encrypted, through NAT and relays.

This is what both sides share, and the learner's side, `Remote`; the driver's is `served`. A stream
carries one request: a `Question` with what is to be written, then an `Answer` with what was read.
"""

import asyncio
import base64
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import inspect
import ipaddress
import itertools
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import filelock
from pydantic import Field

from adloco_jax.data.disk import write_errors
from adloco_jax.data.formats import Count, Format, checked
from adloco_jax.elastic.messages import Refused
from adloco_jax.elastic.objects import REQUEST_BYTES
from adloco_jax.errors import ConfigError, ResourceError, check_installed, reason
from adloco_jax.host import processes
from adloco_jax.host.terminal import say

PROTOCOL = b"adloco/1"
CONNECT_S = 20.0  # for which a connection is tried
SILENT_S = 30.0  # without a byte, after which a transfer has failed
LOOK_S = 4.0  # from one look at a connection to the next
LATE_S = 10.0  # for an answer to a look, after which the connection is given up
_HEADER_BYTES = 4096  # of a `Question` or `Answer` at most
_SENT_BYTES = 2**18  # written or read at a time, so that a slow link is not taken for a silent one
_TOLD_BYTES = 2**20  # of a transfer whose rate is told
_PREFIX = "adloco-"
_FORMAT = 1  # of tickets

T = TypeVar("T")


# -- Tickets ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What a learner needs to reach a run: the driver's key and places, and the run's secret."""

    key: bytes  # public, 32 bytes
    secret: bytes  # 16 bytes
    addresses: tuple[str, ...] = ()  # IP:PORT
    relay: str = ""  # its address; empty: none

    def __str__(self) -> str:
        """Return the text that a user sends to others."""
        parts = [bytes([_FORMAT]), self.key, self.secret, bytes([len(self.addresses)])]
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            packed = ipaddress.ip_address(host.strip("[]")).packed
            parts += [bytes([len(packed)]), packed, int(port).to_bytes(2, "big")]
        content = b"".join([*parts, self.relay.encode()])
        text = base64.b32encode(content + _checksum(content)).decode()
        return _PREFIX + text.rstrip("=")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:2]


def is_ticket(text: str) -> bool:
    """Whether a text is meant to be a ticket."""
    return text.lower().startswith(_PREFIX)


def read_ticket(text: str) -> Ticket:
    """Read what `str(ticket)` made; raise ConfigError if it is not whole."""
    letters = "".join(text.split()).upper()[len(_PREFIX) :]
    try:
        content = base64.b32decode(letters + "=" * (-len(letters) % 8))
        if content[-2:] != _checksum(content[:-2]) or content[0] != _FORMAT:
            raise ValueError
        key, secret, count, rest = content[1:33], content[33:49], content[49], content[50:-2]
        addresses = []
        for _ in range(count):
            length = rest[0]
            host = ipaddress.ip_address(rest[1 : 1 + length])
            port = int.from_bytes(rest[1 + length : 3 + length], "big")
            addresses.append(f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}")
            rest = rest[3 + length :]
        return Ticket(key, secret, tuple(addresses), rest.decode())
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"{text[:40]}: no ticket of this version of adloco_jax, or not all of it; adloco ticket"
            " RUN prints it where the driver is"
        ) from error


# -- iroh ------------------------------------------------------------------------------------


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all that uses iroh, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    processes.start_thread(loop.run_forever, name="iroh")
    return loop


def wait_for(action: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in iroh's thread, and return its result."""
    return asyncio.run_coroutine_threadsafe(action, _loop()).result()


def begin(action: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine in iroh's thread, without waiting for it."""
    asyncio.run_coroutine_threadsafe(action, _loop())


@functools.cache
def send_at_once() -> bool:
    """Let the wheel of iroh copy what is sent at once; return whether it does so now.

    It copies byte by byte, 4 MB/s, with the interpreter's lock held (uniffi-rs #2824). Its class is
    private, so this is done only where it has the known form.
    """
    import iroh.iroh_ffi

    builder: Any = getattr(iroh.iroh_ffi, "_UniffiRustBufferBuilder", None)
    write = getattr(builder, "write", None)
    if write is None or "self.rbuf.data[self.rbuf.len + i] = byte" not in inspect.getsource(write):
        return False

    def copying(self: Any, value: bytes) -> None:
        with self._reserve(len(value)):
            start = ctypes.cast(self.rbuf.data, ctypes.c_void_p).value + self.rbuf.len
            ctypes.memmove(start, value, len(value))

    builder.write = copying
    return True


async def bind(key: bytes, *, relay: str, port: int = 0) -> Any:
    """Open an endpoint of iroh; `relay` is "off", an address, or empty for the public ones."""
    import iroh

    send_at_once()
    builder = iroh.EndpointBuilder()
    builder.apply_minimal()  # nothing is published about this endpoint
    if relay == "off":
        builder.relay_mode(iroh.RelayMode.disabled())
    elif relay:
        builder.relay_mode(iroh.RelayMode.custom_from_urls([relay]))
    else:
        builder.relay_mode(iroh.RelayMode.default_mode())
    builder.bind_addr(f"0.0.0.0:{port}")
    builder.alpns([PROTOCOL])
    builder.secret_key(key)
    return await builder.bind()


def describe_path(connection: Any) -> tuple[str, str]:
    """Say in words how packets reach the other side: its address and the way, and round trip."""
    for each in connection.paths():
        if each.is_selected:
            way = "by relay, which is shared and slow" if each.is_relay else "directly"
            return f"{each.remote_addr}, {way}", f"round trip {each.rtt_ms} ms"
    return "no path", ""


# -- Messages --------------------------------------------------------------------------------


class Question(Format):
    """What a learner asks; after it come `size` bytes to write."""

    do: Literal["hello", "look", "get", "put", "create", "delete"]
    name: Annotated[str, Field(max_length=200)] = ""
    size: Count = 0
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = (
        ""  # of "hello", the first of a connection
    )


class Answer(Format):
    """What the driver answers; after it come `size` bytes that were read."""

    # "there": an object to create exists. "gone": the place is no longer the learner's.
    status: Literal["done", "missing", "there", "gone", "refused"]
    size: Count = 0
    why: Annotated[str, Field(max_length=300)] = ""


M = TypeVar("M", Question, Answer)


async def send_message(send: Any, message: Format, body: bytes = b"") -> None:
    """Write a message and what follows it, and end the stream."""
    header = message.model_dump_json().encode()
    await asyncio.wait_for(send.write_all(len(header).to_bytes(4, "big") + header), SILENT_S)
    for start in range(0, len(body), _SENT_BYTES):
        part = bytes(body[start : start + _SENT_BYTES])
        await asyncio.wait_for(send.write_all(part), SILENT_S)
    await send.finish()


async def read_message(recv: Any, kind: type[M]) -> M:
    """Read a message; raise Refused if it is something else."""
    size = int.from_bytes(await recv.read_exact(4), "big")
    if not 0 < size <= _HEADER_BYTES:
        raise Refused(f"a message of {size} bytes, expected 1 to {_HEADER_BYTES}")
    try:
        content = json.loads(await recv.read_exact(size))
    except (ValueError, RecursionError) as error:
        raise Refused("no message of adloco_jax") from error
    return checked(content, kind, "message", Refused)


async def read_body(recv: Any, size: int) -> bytes:
    """Read so many bytes; raise TimeoutError if none comes for `SILENT_S` seconds."""
    body = bytearray()
    while len(body) < size:
        length = min(_SENT_BYTES, size - len(body))
        body += await asyncio.wait_for(recv.read_exact(length), SILENT_S)
    return bytes(body)


# -- The learner's side ----------------------------------------------------------------------


def own_key() -> tuple[bytes, filelock.FileLock]:
    """Return this learner's key, by which drivers know it, and a lock that holds it.

    The key lies in the user's configuration folder. Learners that run at the same time have one
    each.
    """
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    folder = Path(home) / "adloco_jax"
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = folder / f"learner-{number}.key"
            lock = filelock.FileLock(f"{path}.lock")
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=0)
                return secret_file(path, lambda: os.urandom(32)), lock
    raise AssertionError


def secret_file(path: Path, make: Callable[[], bytes]) -> bytes:
    """Read a file that only its user may read; make it if it is missing."""
    if not path.exists():
        whole = path.with_name(f".{path.name}.{os.getpid()}")  # a kill may leave it, cut
        whole.unlink(missing_ok=True)
        descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(make())
        whole.rename(path)
    return path.read_bytes()


class Remote:
    """Keeps the objects of a run at its driver, which a learner reaches with a ticket."""

    def __init__(self, text: str, key: bytes | None = None):
        """Read a ticket; raise ConfigError if it is none, or iroh is missing.

        Without a `key`, the learner has its user's.
        """
        check_installed("iroh", "", "a ticket")
        self.ticket = read_ticket(text)
        self.address = f"{text[: len(_PREFIX) + 8]}…"
        self._key, self._lock = (key, None) if key else own_key()
        self._endpoint: Any = None
        self._connection: Any = None
        self._attempt: asyncio.Task | None = None  # to connect, under way
        self._told: set[str] = set()
        self._rates: dict[str, float] = {}  # in bits a second, as told, by direction

    def open(self) -> None:
        """Connect; raise ResourceError within 30 s, in one line that says what helps."""
        try:
            wait_for(self._connected())
        except OSError as error:
            tried = ", ".join(self.ticket.addresses) or "no address"
            relay = f"the relay {self.ticket.relay}" if self.ticket.relay else "no relay"
            raise ResourceError(
                f"{self.address}: cannot reach the driver in {CONNECT_S:.0f} s (UDP to {tried};"
                f" {relay}); is it running, and is this its ticket (adloco ticket RUN)? What helps:"
                " one network or VPN for both, a forwarded UDP port (engine.address) or a relay"
                " of your own (engine.relay) at the driver, or a bucket (docs/guides/two_pcs.md)"
            ) from error

    def close(self) -> None:
        """Leave the driver."""
        if self._endpoint is not None:
            with contextlib.suppress(TimeoutError):
                wait_for(asyncio.wait_for(self._endpoint.close(), 3.0))
        if self._lock is not None:
            self._lock.release()

    async def _connected(self) -> Any:
        """Return a connection; all that wait for one share the attempt."""
        if self._connection is not None and self._connection.close_reason() is None:
            return self._connection
        if self._attempt is None or self._attempt.done():
            self._attempt = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._attempt)

    async def _connect(self) -> Any:
        import iroh

        with connection_errors():
            if self._endpoint is None:
                self._endpoint = await bind(self._key, relay=self.ticket.relay or "off")
            driver = iroh.EndpointId.from_bytes(self.ticket.key)
            relay = self.ticket.relay or None
            address = iroh.EndpointAddr(driver, relay, [*self.ticket.addresses])
            attempt = self._endpoint.connect(address, PROTOCOL)
            connection = await asyncio.wait_for(attempt, CONNECT_S)
            hello = Question(do="hello", secret=self.ticket.secret.hex())
            answer, _ = await asyncio.wait_for(_ask_on(connection, hello), LATE_S)
        if answer.status == "refused":
            connection.close(1, b"refused")
            raise ConfigError(f"{self.address}: the driver lets this computer not in: {answer.why}")
        self._connection = connection
        path = ", ".join(describe_path(connection))
        say(f"connected to the driver at {path}; this computer is {self._endpoint.id()}")
        asyncio.ensure_future(self._watch(connection))
        return connection

    async def _watch(self, connection: Any) -> None:
        """Give a connection up if it does not answer; say when it takes another path."""
        told, _ = describe_path(connection)
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
            if told not in (path, "no path"):
                say(f"the driver is reached at {path} now, {rtt}")
            told = path

    async def _ask(self, question: Question, body: bytes = b"") -> tuple[Answer, Any]:
        connection = await self._connected()
        with connection_errors():
            answer, recv = await _ask_on(connection, question, body)
        if answer.status == "refused" and answer.why not in self._told:
            self._told.add(answer.why)
            say(f"the driver refuses to {question.do} {question.name}: {answer.why}")
        return answer, recv

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces, or None if there is none for us."""
        answer, recv = wait_for(self._ask(Question(do="get", name=name)))
        if answer.status != "done":
            return None
        return answer.size, self._pieces(recv, answer.size)

    def _pieces(self, recv: Any, size: int) -> Iterator[bytes]:
        left, start_s = size, time.monotonic()
        try:
            while left:
                with connection_errors():
                    piece = wait_for(read_body(recv, min(REQUEST_BYTES, left)))
                left -= len(piece)
                yield piece
            self._tell_rate("down", size, start_s)
        finally:
            if left:
                with contextlib.suppress(Exception):  # deliberately broad: it may be closed
                    wait_for(recv.stop(0))

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it; what the driver does not want is dropped."""
        start_s = time.monotonic()
        wait_for(self._ask(Question(do="put", name=name, size=len(data)), data))
        self._tell_rate("up", len(data), start_s)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call has written it."""
        asked = Question(do="create", name=name, size=len(data))
        answer, _ = wait_for(self._ask(asked, data))
        return answer.status == "done"

    def delete(self, name: str) -> None:
        """Delete an object of this learner."""
        wait_for(self._ask(Question(do="delete", name=name)))

    def names(self) -> list[str]:
        """Return no names: a learner may not list."""
        return []

    def _tell_rate(self, direction: str, num_bytes: int, start_s: float) -> None:
        """Say the rate of a large transfer, if it differs much from what was told."""
        rate = 8 * num_bytes / max(time.monotonic() - start_s, 1e-3)
        told = self._rates.get(direction, 0.0)
        if num_bytes >= _TOLD_BYTES and not told / 2 < rate < 2 * told:
            self._rates[direction] = rate
            say(f"rate {direction} measured: {rate / 1e6:,.1f} Mbit/s")


async def _ask_on(connection: Any, question: Question, body: bytes = b"") -> tuple[Answer, Any]:
    import iroh

    stream = await connection.open_bi()
    with contextlib.suppress(iroh.IrohError):  # it may answer before it has read all
        await send_message(stream.send(), question, body)
    return await read_message(stream.recv(), Answer), stream.recv()


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """Raise what goes wrong on a connection as ConnectionError, with words."""
    import iroh

    try:
        yield
    except iroh.IrohError as error:
        raise ConnectionError(reason(RuntimeError(error.message()), 200)) from error
    except TimeoutError as error:
        raise ConnectionError("no answer") from error
    except Refused as error:
        raise ConnectionError(str(error)) from error
