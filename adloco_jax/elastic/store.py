"""What driver and learners read and write: objects, wherever they are kept (`objects`).

An object has a name and bytes: JSON, or JSON with arrays (safetensors), with a SHA-256 and a
signature. Its JSON is a `Format`, whose fields are checked. Nothing that is read is executed or
unpickled. `Refused` is raised for an object that is damaged, or is not what it should be.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import load, save

from adloco_jax.data.formats import Format, checked
from adloco_jax.elastic.messages import Refused, check_form
from adloco_jax.elastic.objects import REQUEST_BYTES, Bucket, Busy, Denied, Objects, first_line
from adloco_jax.elastic.signatures import NUM_BYTES, Signatures
from adloco_jax.errors import ConfigError, ResourceError, reason
from adloco_jax.host import processes
from adloco_jax.host.terminal import say
from adloco_jax.settings import bytes_per_s

JSON_LIMIT = 2**20  # largest accepted JSON object in bytes
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0  # between two looks at an object that has not changed
LIMIT_S, BYTE_S = 5.0, 1e-5  # the deadline of a request: seconds, and more for each byte
TELL_S = 20.0  # seconds of waiting from one line about it to the next
# A failed request is repeated after the first pause, which then doubles up to the longest.
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 3.0
_LONGER_DEADLINE = 8  # factor by which a request's deadline grows at most
_GROWTH = 1.025  # of the pause from one look at an object to the next
_TOLD_FAILURES = 3  # failures of a request before the user is told
LAST_S = 3.0  # how long a driver waits for learners, and for the bucket, after a signal
_FIRST_TRIES = 4  # failures after which a kind of request that never succeeded is given up
READ_PAUSES_S = (0.5, 2.0)  # before an object that was refused is read again
_BURST_S = 0.05  # for which a link may catch up; what it carries at a time lasts as long

T = TypeVar("T")
F = TypeVar("F", bound=Format)


class Link:
    """One direction of a link of limited rate, which several threads share."""

    def __init__(self, bytes_per_s: float = math.inf):
        """Begin with an idle link; infinity is no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when it has carried all bytes so far, on the clock `time.monotonic`
        self._using = threading.Lock()

    def carry(self, num_bytes: float) -> None:
        """Wait until the link would have carried some bytes after those of other threads.

        They are taken in parts, so that threads take turns.
        """
        while num_bytes > 0:
            part = min(num_bytes, self._bytes_per_s * _BURST_S)
            with self._using:
                now_s = time.monotonic()
                self._free_s = max(self._free_s, now_s - _BURST_S) + part / self._bytes_per_s
                wait_s = self._free_s - now_s
            num_bytes -= part
            if wait_s > 0:
                time.sleep(wait_s)


class Store:
    """Reads and writes objects for driver or learner, wherever they are kept; thread-safe.

    A request that fails, or is not answered in a few times the usual time, is repeated, with
    growing pauses, until it succeeds. The first of its kind (read, write) is given up soon if there
    is no server, or no permission.
    """

    def __init__(self, objects: Objects, signing: Signatures, *, patience_s: float = math.inf):
        """Use the objects of a keeper, such as a bucket, without a request.

        `signing` signs what is written, and checks what is read. A request that keeps failing for
        `patience_s` seconds raises ResourceError.
        """
        self._objects = objects
        self.signatures = signing
        self.patience_s = patience_s
        self.url = objects.address
        self._known = set[str]()  # kinds of request that have succeeded: "read", "write"
        self._up = Link()
        self._down = Link()

    def hold(self, link: str) -> None:
        """Hold each direction of this process's transfers to the rate `link` (`engine.link`).

        It is written as "10Mbit/s"; empty is no limit.
        """
        self._up = Link(bytes_per_s(link))
        self._down = Link(bytes_per_s(link))

    def get(self, name: str, *, limit: int = JSON_LIMIT) -> bytes | None:
        """Read an object's content; None if there is no object.

        Raises Refused if it has more than `limit` bytes, or is not signed as it must be.
        """
        most_bytes = limit + NUM_BYTES  # with its signature

        def read(failures: int) -> bytearray | None:
            """Read the object, with its signature, once; raise an error if that fails."""
            begin = functools.partial(self._objects.get, name)
            stored = self._try(begin, num_bytes=0, failures=failures)
            if stored is None:
                return None
            size, pieces = stored  # bytes of the object, and an iterator of its parts
            if not 0 < size <= most_bytes:
                raise Refused(f"{name}: {size} bytes, expected 1 to {most_bytes}")
            data = bytearray()
            while len(data) < size:
                length = min(REQUEST_BYTES, size - len(data))
                read_piece = functools.partial(next, pieces)
                piece = self._try(read_piece, num_bytes=length, failures=failures)
                self._down.carry(len(piece))
                data += piece
            return data

        data = self.patiently("read", read)
        if data is None:
            return None
        return self.signatures.opened(name, bytes(data))

    def message(self, name: str, kind: type[F]) -> F | None:
        """Read an object of JSON, which `to_json` made; None if there is no object.

        Raises Refused if it is damaged, not signed, or no message of this kind.
        """
        data = self.get(name)
        if data is None:
            return None
        return from_json(data, name, kind)

    def valid(self, name: str, kind: type[F]) -> F | None:
        """Read an object of JSON; None if there is no object, or `message` would refuse it."""
        with contextlib.suppress(Refused):
            return self.message(name, kind)
        return None

    def read(
        self, name: str, limit: int, kind: type[F], form: Callable[[F], PyTree]
    ) -> tuple[F, PyTree, int]:
        """Read an object of JSON and arrays, which `pack` made.

        It is read again if it was damaged on its way. Raises Refused if it is missing, or refused
        each time.

        Args:
          name: The object's name.
          limit: Its largest size in bytes.
          kind: What its JSON is.
          form: Returns the tree of `jax.ShapeDtypeStruct` that the arrays of a message must have.

        Returns:
          The message, the arrays in NumPy as a tree, and the object's size in bytes.
        """

        def once() -> tuple[F, PyTree, int]:
            data = self.get(name, limit=limit)
            if data is None:
                raise Refused(f"{name}: missing")
            message, tree = unpack(data, name, kind, form)
            return message, tree, len(data)

        return again(once)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        signed = self.signatures.signed(name, data)
        put = functools.partial(self._objects.put, name, signed)

        def write(failures: int) -> None:
            self._try(put, num_bytes=len(signed), failures=failures)

        self._up.carry(len(signed))
        self.patiently("write", write)

    def create(self, name: str, message: Format) -> bool:
        """Write an object of JSON unless there is one; return whether this call has written it.

        A request whose response is lost is repeated, and then finds the object that it has written
        itself. A random text in the object tells it from that of another writer.
        """
        data = to_json(message, uuid.uuid4().hex)
        signed = self.signatures.signed(name, data)
        put = functools.partial(self._objects.create, name, signed)

        def write(failures: int) -> bool:
            """Write the object once; return whether this call of `create` has written it."""
            if self._try(put, num_bytes=len(signed), failures=failures):
                return True
            try:
                return self.get(name, limit=len(data)) == data
            except Refused:  # larger, or signed with another key: another writer's
                return False

        return self.patiently("write", write)

    def delete(self, *names: str) -> None:
        """Delete objects, if they are there and may be deleted.

        Errors are ignored, as an object that is left costs only space. If a request is not
        answered, the rest is left.
        """
        for name in names:
            delete = functools.partial(self._objects.delete, name)
            try:
                self._try(delete, num_bytes=0, failures=0)
            except TimeoutError:
                return
            except Exception:  # noqa: S110  deliberately broad: missing, or not permitted
                pass

    def names(self) -> list[str]:
        """List the names of all objects; the list is empty if listing is not permitted."""
        with contextlib.suppress(Exception):
            return self._try(self._objects.names, num_bytes=0, failures=0)
        return []

    def _try(self, request: Callable[[], T], *, num_bytes: int, failures: int) -> T:
        """Make a request once, and return its result; raise TimeoutError after its deadline.

        The deadline grows with `num_bytes`, the bytes that are sent or received, and doubles with
        each of the `failures` of the same request before. A request that is never answered ends in
        its own thread.
        """
        limit_s = LIMIT_S + num_bytes * BYTE_S
        if not processes.is_asked_to_stop():
            limit_s *= min(2**failures, _LONGER_DEADLINE)
        try:
            return aside(request).result(limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"no response in {limit_s:.0f} s") from error

    def patiently(self, kind: str, request: Callable[[int], T]) -> T:
        """Repeat a request until it succeeds, and return its result.

        Refused and ConfigError are raised at once, as no other try can mend them. Raises
        ResourceError after `patience_s` seconds, after a signal, or as `_give_up` says.

        Args:
          kind: "read" or "write".
          request: Called with the number of its failures so far; raises an error if it fails.
        """
        start_s = time.monotonic()
        told_s = 0.0  # seconds after the start at which the user was last told; 0: not yet
        pause_s = _FIRST_RETRY_S
        failures = 0
        while True:
            try:
                result = request(failures)
            except (Refused, ConfigError):
                raise
            except Exception as error:  # deliberately broad: keepers' errors have no common kind
                failures += 1
                failed_s = time.monotonic() - start_s
                fault = f"{self.url}: cannot {kind} ({first_line(error)})"
                if processes.is_asked_to_stop() or failed_s > self.patience_s:
                    raise ResourceError(fault) from error
                if kind not in self._known:
                    self._give_up(kind, error, failures)
                if failures >= _TOLD_FAILURES and (not told_s or failed_s > told_s + TELL_S):
                    told_s = failed_s
                    say(f"{fault}; waiting for the bucket, {failed_s:.0f} s")
            else:
                self._known.add(kind)
                if told_s:
                    gone_s = time.monotonic() - start_s
                    say(f"{self.url}: can {kind} again, after {gone_s:.0f} s")
                return result
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    def _give_up(self, kind: str, error: Exception, failures: int) -> None:
        """Raise an error if a kind of request that has never succeeded will hardly ever do so.

        Raises ConfigError if it is not permitted, ResourceError after several failures, unless the
        server says that it is busy.
        """
        fault = f"{self.url}: cannot {kind} objects ({first_line(error)})"
        if isinstance(error, Denied):
            raise ConfigError(f"{fault}; {error.remedy}") from error
        if failures >= _FIRST_TRIES and not isinstance(error, Busy):
            raise ResourceError(fault) from error


def at(url: str, key: str, *, patience_s: float = math.inf) -> Store:
    """Open the bucket at an address, whose objects are signed with a key, without a request.

    Raises ConfigError for another address, or a missing parent folder.
    """
    return Store(Bucket(url), Signatures(key), patience_s=patience_s)


def again(read: Callable[[], T]) -> T:
    """Return what `read` returns; call it again, after a pause, if it raises Refused.

    The object may have been damaged only on its way. Raises Refused if it is refused each time.
    """
    for pause_s in READ_PAUSES_S:
        with contextlib.suppress(Refused):
            return read()
        time.sleep(pause_s)
    return read()


def longer(pause_s: float) -> float:
    """Return the pause before the next look at an object, from the one before this look.

    It grows by 1/40 with each look, so it is about 1/40 of the time since the object changed.
    """
    return min(_GROWTH * pause_s, LONGEST_PAUSE_S)


def aside(act: Callable[..., T], *arguments: Any) -> "concurrent.futures.Future[T]":
    """Call a function in a thread of its own; return the future of its result, or of its error.

    The thread does not hold up the end of the process.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(act(*arguments))
        except Exception as error:  # deliberately broad: who asks for the result raises it
            future.set_exception(error)

    processes.start_thread(run, name="request")
    return future


# -- Objects ---------------------------------------------------------------------------------


def to_json(message: Format, by: str = "") -> bytes:
    """Return an object of JSON without arrays.

    `by` is a text that is written, but not read. It makes equal messages of two writers differ.
    """
    content = message.model_dump()
    return json.dumps({"sha256": _sha256(content), "message": content, "by": by}).encode()


def from_json(data: bytes, name: str, kind: type[F]) -> F:
    """Return the message of an object of JSON without arrays, or raise Refused.

    `name` is the object's, for errors; `kind` is what the message must be.
    """
    try:
        content = json.loads(data)
        message = content["message"]
        digest = content["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(f"{name}: no JSON of adloco_jax") from error
    if _sha256(message) != digest:
        raise Refused(f"{name}: damaged (SHA-256)")
    return checked(message, kind, name, Refused)


def _sha256(message: Any) -> str:
    """Return the hash of a message's content, as `Format.model_dump` returns it."""
    return hashlib.sha256(json.dumps(message).encode()).hexdigest()


def pack(message: Format, tree: PyTree) -> bytes:
    """Return an object of JSON and a tree of arrays; it begins with its SHA-256, in 64 digits.

    An array is named by its path in the tree. Arrays of zeros, such as fresh optimizer states, take
    no space: the JSON has only their names. The JSON itself is one more array, of bytes.
    """
    sent: dict[str, np.ndarray] = {}
    zeros: list[str] = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        array = np.asarray(leaf, order="C")
        if array.any():
            sent[name] = array
        else:
            zeros.append(name)
    zeros.sort()
    text = json.dumps({"message": message.model_dump(), "zeros": zeros})
    data = save({**sent, "message": np.frombuffer(text.encode(), np.uint8)})
    return hashlib.sha256(data).hexdigest().encode() + data


def unpack(data: bytes, name: str, kind: type[F], form: Callable[[F], PyTree]) -> tuple[F, PyTree]:
    """Return the message and the tree of arrays of an object that `pack` made.

    `name` is the object's, for errors, and `kind` what the message must be. `form` returns the tree
    of `jax.ShapeDtypeStruct` that the arrays of a message must have. Raises Refused if the object
    is damaged, or has another form.
    """
    packed = data[64:]
    if hashlib.sha256(packed).hexdigest().encode() != data[:64]:
        raise Refused(f"{name}: damaged (SHA-256)")
    try:
        parts = load(packed)
        content = json.loads(parts.pop("message").tobytes())
        message = checked(content["message"], kind, name, Refused)
        wanted = form(message)
        zeros = set(content["zeros"])

        def leaf(path: jax.tree_util.KeyPath, want: jax.ShapeDtypeStruct) -> np.ndarray:
            key = jax.tree_util.keystr(path)
            if key in zeros:
                return np.zeros(want.shape, want.dtype)
            return parts.pop(key)

        tree = jax.tree.map_with_path(leaf, wanted)
    except Refused:
        raise
    except Exception as error:  # deliberately broad: whoever wrote it may have written anything
        raise Refused(f"{name}: unknown ({type(error).__name__}: {reason(error, 100)})") from error
    if parts:
        raise Refused(f"{name}: unknown parts")
    check_form(tree, wanted, f"{name}: ")
    return message, tree
