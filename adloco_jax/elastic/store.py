"""What driver and learners read and write: objects, wherever they are kept (`objects`).

An object has a name and bytes: JSON, or JSON with arrays (safetensors), with a SHA-256 and a
signature. Its JSON is a `Format`, a message whose fields are checked. Nothing that is read is
executed or unpickled. `Refused` is raised for an object that is damaged, or is not what it should
be. A keeper holds the objects: a bucket, or a driver that serves them. A request is one call of a
keeper's method, to read or write an object. The user's patience is how long a request may fail
before it is given up. A look is a read of an object to see whether it has changed.
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
# The pause between two looks at an object that has not changed.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
# The deadline of a request: so many seconds, and more for each byte.
LIMIT_S = 5.0
BYTE_S = 1e-5
TELL_S = 20.0  # seconds of waiting from one line about it to the next
# A failed request is repeated after the first pause, which then doubles up to the longest.
_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 3.0
_LONGER_DEADLINE = 8  # factor by which a request's deadline grows at most
_GROWTH = 1 + 1 / 40  # of the pause between two looks, from one look at an object to the next
_TOLD_FAILURES = 3  # failures of a request before the user is told
LAST_S = 3.0  # how long a driver waits for learners, and for the bucket, after a signal
_FIRST_TRIES = 4  # failures after which a kind of request that never succeeded is given up
READ_PAUSES_S = (0.5, 2.0)  # before an object that was refused is read a second and a third time
_SHOWN_CHARACTERS = 100  # of an error that an object has caused
_SHA256_DIGITS = 64  # hexadecimal digits, with which an object of `pack` begins
# A link carries bytes in parts that take so long. It may catch up as much time that it was idle.
_BURST_S = 0.05

T = TypeVar("T")
F = TypeVar("F", bound=Format)


class Link:
    """One direction of a link of limited rate, which several threads share."""

    def __init__(self, bytes_per_s: float = math.inf):
        """Begin with an idle link of this rate in each second; infinity: no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0  # when it has carried all bytes so far, on the clock `time.monotonic`
        self._using = threading.Lock()

    def wait_for(self, num_bytes: float) -> None:
        """Wait as long as a link of this rate needs to carry so many bytes.

        It carries those of one thread at a time, in small parts, so that threads take turns.
        Nothing is sent here: the caller sends, or has received, the bytes itself.
        """
        while num_bytes > 0:
            part = min(num_bytes, self._bytes_per_s * _BURST_S)
            with self._using:
                now_s = time.monotonic()
                # A part begins when the link is free; if it was idle, up to `_BURST_S` before now,
                # to make up for sleeps that were too long.
                begin_s = max(self._free_s, now_s - _BURST_S)
                self._free_s = begin_s + part / self._bytes_per_s
                wait_s = self._free_s - now_s
            num_bytes -= part
            if wait_s > 0:
                time.sleep(wait_s)


class Store:
    """Reads and writes objects for driver or learner, wherever they are kept; thread-safe.

    A request that fails, or is not answered before its deadline, is repeated, with growing pauses,
    until it succeeds. The first of its kind (read, write) is given up soon if there is no server,
    or no permission.
    """

    def __init__(self, objects: Objects, signing: Signatures, *, patience_s: float = math.inf):
        """Store the arguments, without a request.

        Args:
          objects: What keeps the objects, such as a bucket.
          signing: Signs what is written, and checks what is read.
          patience_s: Seconds after which a request that keeps failing raises ResourceError.
        """
        self._objects = objects
        self.signatures = signing
        self.patience_s = patience_s
        self.url = objects.address
        self._known = set[str]()  # kinds of request that have succeeded: "read", "write"
        self._upload = Link()  # without a limit
        self._download = Link()

    def limit_rate(self, link: str) -> None:
        """Limit the rate of this store's uploads to `link`, and that of its downloads as well.

        `link` is the option `engine.link`, such as "10Mbit/s"; empty is no limit.
        """
        self._upload = Link(bytes_per_s(link))
        self._download = Link(bytes_per_s(link))

    def get(self, name: str, *, limit: int = JSON_LIMIT) -> bytes | None:
        """Read an object's content; None if there is no object.

        Raises Refused if it is empty, has more than `limit` bytes, or is not signed as it must be;
        ResourceError if reads fail for longer than `patience_s` or after a signal, or if the first
        ones fail; ConfigError if the first ones are not permitted.
        """
        most_bytes = limit + NUM_BYTES  # with its signature

        def read(failures: int) -> bytearray | None:
            """Read the object, with its signature, after so many `failures` of earlier tries.

            Returns None if there is no object; raises an error if this try fails too.
            """
            begin = functools.partial(self._objects.get, name)
            stored = self._request_once(begin, num_bytes=0, failures=failures)
            if stored is None:
                return None
            size, pieces = stored  # bytes of the object, and an iterator of its parts
            if not 0 < size <= most_bytes:
                raise Refused(f"{name}: {size} bytes, expected 1 to {most_bytes}")
            data = bytearray()
            while len(data) < size:
                length = min(REQUEST_BYTES, size - len(data))  # of the next piece
                read_piece = functools.partial(next, pieces)
                piece = self._request_once(read_piece, num_bytes=length, failures=failures)
                self._download.wait_for(len(piece))  # as long as a link of the limited rate needs
                data += piece
            return data

        data = self.retry("read", read)
        if data is None:
            return None
        return self.signatures.verified_content(name, bytes(data))

    def read_message(self, name: str, kind: type[F]) -> F | None:
        """Read an object of JSON, which `to_json` made; None if there is no object.

        `kind` is the class of the message. Raises Refused if the object is damaged, not signed, or
        no such message; ResourceError or ConfigError if it cannot be read (as `get`).
        """
        data = self.get(name)
        if data is None:
            return None
        return from_json(data, name, kind)

    def valid_message(self, name: str, kind: type[F]) -> F | None:
        """Read an object of JSON; None if there is no object, or it is damaged or no such message.

        Raises ResourceError or ConfigError if it cannot be read.
        """
        with contextlib.suppress(Refused):
            return self.read_message(name, kind)
        return None

    def read_with_arrays(
        self, name: str, limit: int, kind: type[F], form: Callable[[F], PyTree]
    ) -> tuple[F, PyTree, int]:
        """Read an object of JSON and arrays, which `pack` made.

        It is read up to three times, as it may have been damaged on its way. Raises Refused if it
        is missing, damaged, or not what it should be each time; ResourceError or ConfigError if it
        cannot be read.

        Args:
          name: The object's name.
          limit: Its largest size in bytes.
          kind: The class of its message, which is JSON.
          form: Called with the message; returns the tree of `jax.ShapeDtypeStruct` that its arrays
            must have. May raise Refused.

        Returns:
          The message, the arrays in NumPy as a tree, and the object's size in bytes.
        """

        def read() -> tuple[F, PyTree, int]:
            """Read the object once, and check it."""
            data = self.get(name, limit=limit)
            if data is None:
                raise Refused(f"{name}: missing")
            message, tree = unpack(data, name, kind, form)
            return message, tree, len(data)

        return retry_if_refused(read)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it.

        Returns when it is written. Raises ResourceError if writes fail for longer than `patience_s`
        or after a signal, or if the first ones fail; ConfigError if writing is not permitted.
        """
        signed = self.signatures.signed(name, data)
        put = functools.partial(self._objects.put, name, signed)

        def write(failures: int) -> None:
            """Write the object, after so many `failures` of earlier tries, or raise an error."""
            self._request_once(put, num_bytes=len(signed), failures=failures)

        # As long as a link of the limited rate needs, once; a repeated write does not wait again.
        self._upload.wait_for(len(signed))
        self.retry("write", write)

    def create(self, name: str, message: Format) -> bool:
        """Write an object of JSON unless there is one; return whether this call has written it.

        If the answer to a request is lost, the request is repeated, and then finds the object that
        it has written itself. A random text in the object tells it from that of another writer.
        Raises ResourceError or ConfigError if it cannot be written.
        """
        data = to_json(message, by=uuid.uuid4().hex)
        signed = self.signatures.signed(name, data)
        create = functools.partial(self._objects.create, name, signed)

        def write(failures: int) -> bool:
            """Write the object unless there is one, after so many `failures` of earlier tries.

            Returns whether this or an earlier try has written it.
            """
            has_written = self._request_once(create, num_bytes=len(signed), failures=failures)
            if has_written:
                return True
            try:
                present = self.get(name, limit=len(data))
            except Refused:  # larger, or signed with another key: another writer's
                return False
            return present == data  # then an earlier try has written it

        return self.retry("write", write)

    def delete(self, *names: str) -> None:
        """Delete objects, if they are there and may be deleted.

        Errors are ignored, as an object that is left costs only space.
        """
        for name in names:
            delete = functools.partial(self._objects.delete, name)
            try:
                self._request_once(delete, num_bytes=0, failures=0)
            except TimeoutError:  # the others would not be answered either, each after its deadline
                return
            except Exception:  # noqa: S110  deliberately broad: missing, or not permitted
                pass

    def names(self) -> list[str]:
        """List the names of all objects; none if they cannot be listed.

        They serve only to delete old objects, so an error does no harm.
        """
        with contextlib.suppress(Exception):  # deliberately broad: such as a missing permission
            return self._request_once(self._objects.names, num_bytes=0, failures=0)
        return []

    def _request_once(self, request: Callable[[], T], *, num_bytes: int, failures: int) -> T:
        """Make a request once, and return its result.

        It runs in its own thread, which may wait on after the deadline. Raises TimeoutError after
        the deadline, and the request's own errors.

        Args:
          request: Calls a method of the keeper, without arguments.
          num_bytes: Bytes that it sends or receives; with them the deadline grows.
          failures: How often the same request has failed before. Each failure doubles the deadline,
            up to eight times the first one.
        """
        limit_s = LIMIT_S + num_bytes * BYTE_S
        if not processes.is_asked_to_stop():  # after a signal there is no time for longer ones
            limit_s *= min(2**failures, _LONGER_DEADLINE)
        try:
            return in_thread(request).result(limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"no response in {limit_s:.0f} s") from error

    def retry(self, kind: str, request: Callable[[int], T]) -> T:
        """Repeat a request until it succeeds, and return its result.

        The user is told if it takes several tries, and when it succeeds after all.

        Args:
          kind: "read" or "write".
          request: Makes the request once. It is called with the number of failures so far, and
            raises an error if it fails.

        Raises:
          Refused: At once if `request` raises it, as no other try can mend that.
          ConfigError: At once if `request` raises it; or if a kind of request that has never
            succeeded is not permitted.
          ResourceError: If it has failed for `patience_s` seconds or fails after a signal, or if a
            kind that has never succeeded fails a few times.
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
            except Exception as error:  # deliberately broad: errors of buckets have no common kind
                failures += 1
                failed_s = time.monotonic() - start_s
                fault = f"{self.url}: cannot {kind} ({first_line(error)})"
                if processes.is_asked_to_stop() or failed_s > self.patience_s:
                    raise ResourceError(fault) from error
                if kind not in self._known:  # none of this kind has ever succeeded
                    self._raise_if_hopeless(kind, error, failures)
                is_time = told_s == 0 or failed_s > told_s + TELL_S
                if failures >= _TOLD_FAILURES and is_time:
                    told_s = failed_s
                    say(f"{fault}; waiting for the bucket, {failed_s:.0f} s")
            else:
                self._known.add(kind)
                if told_s:  # the user waits to know
                    gone_s = time.monotonic() - start_s
                    say(f"{self.url}: can {kind} again, after {gone_s:.0f} s")
                return result
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    def _raise_if_hopeless(self, kind: str, error: Exception, failures: int) -> None:
        """Raise an error if a kind of request that has never succeeded will hardly ever do so.

        Raises ConfigError if it is not permitted, or the bucket is missing; ResourceError after
        several failures, unless the server says that it is busy. Otherwise nothing is raised, and
        the caller tries again.

        Args:
          kind: "read" or "write".
          error: What the request has raised.
          failures: How often it has failed in a row.
        """
        fault = f"{self.url}: cannot {kind} objects ({first_line(error)})"
        if isinstance(error, Denied):
            raise ConfigError(f"{fault}; {error.remedy}") from error
        if failures >= _FIRST_TRIES and not isinstance(error, Busy):
            raise ResourceError(fault) from error


def open_bucket(url: str, key: str, *, patience_s: float = math.inf) -> Store:
    """Return a store of the bucket at an address, without a request.

    Objects are signed with `key`. A request that keeps failing raises ResourceError after
    `patience_s` seconds. Raises ConfigError if `url` is not the address of a bucket, or the parent
    folder of a file:// is missing.
    """
    return Store(Bucket(url), Signatures(key), patience_s=patience_s)


def retry_if_refused(read: Callable[[], T]) -> T:
    """Return what `read` returns; call it again, after a pause, if it raises Refused.

    The object may have been damaged only on its way. Raises Refused if the third call does too.
    """
    for pause_s in READ_PAUSES_S:
        with contextlib.suppress(Refused):
            return read()
        time.sleep(pause_s)
    return read()  # the last time: its error is raised


def next_pause_s(pause_s: float) -> float:
    """Return the pause before the next look at an object, if the last pause was `pause_s` seconds.

    A look reads the object to see whether it has changed. The pause grows by 1/40 with each, up to
    `LONGEST_PAUSE_S`. So it is about 1/40 of the time since the object changed.
    """
    return min(_GROWTH * pause_s, LONGEST_PAUSE_S)


def in_thread(act: Callable[..., T], *arguments: Any) -> "concurrent.futures.Future[T]":
    """Call a function in a thread of its own; return the future of its result, or of its error.

    The process may end while the thread still runs.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        """Set the future's result or error; this is what the thread runs."""
        try:
            future.set_result(act(*arguments))
        except Exception as error:  # deliberately broad: who asks for the result raises it
            future.set_exception(error)

    processes.start_thread(run, name="request")
    return future


# -- Objects ---------------------------------------------------------------------------------


def to_json(message: Format, by: str = "") -> bytes:
    """Return the bytes of an object of JSON without arrays, which `from_json` reads.

    `by` is a text about the writer, which nobody reads: equal messages of two writers differ by it.
    """
    content = message.model_dump()
    return json.dumps({"sha256": _sha256(content), "message": content, "by": by}).encode()


def from_json(data: bytes, name: str, kind: type[F]) -> F:
    """Return the message of an object that `to_json` made.

    `name` is the object's, for errors; `kind` is the class of the message. Raises Refused if the
    object is damaged, or no such message.
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
    """Return the bytes of an object of JSON and a tree of arrays, which `unpack` reads.

    It begins with the SHA-256 of the rest, in 64 digits. The rest is a safetensors file, in which
    an array is named by its path in the tree. Arrays of zeros, such as fresh optimizer states, take
    no space: the JSON has only their names. The JSON is one more array, "message", of bytes.
    """
    sent: dict[str, np.ndarray] = {}
    zeros: list[str] = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        array = np.asarray(leaf, order="C")  # safetensors writes the bytes as they lie in memory
        if array.any():
            sent[name] = array
        else:
            zeros.append(name)
    zeros.sort()
    text = json.dumps({"message": message.model_dump(), "zeros": zeros})
    data = save({**sent, "message": np.frombuffer(text.encode(), np.uint8)})
    return hashlib.sha256(data).hexdigest().encode() + data


def unpack(data: bytes, name: str, kind: type[F], form: Callable[[F], PyTree]) -> tuple[F, PyTree]:
    """Return the message and the tree of arrays, in NumPy, of an object that `pack` made.

    Raises Refused if the object is damaged, its message is of another class, or its arrays have
    another form; and if `form` raises it.

    Args:
      data: The object's bytes.
      name: The object's name, for errors.
      kind: The class of the message.
      form: Called with the message; returns the tree of `jax.ShapeDtypeStruct` that the arrays must
        have.
    """
    packed = data[_SHA256_DIGITS:]
    if hashlib.sha256(packed).hexdigest().encode() != data[:_SHA256_DIGITS]:
        raise Refused(f"{name}: damaged (SHA-256)")
    try:
        parts = load(packed)
        content = json.loads(parts.pop("message").tobytes())
        message = checked(content["message"], kind, name, Refused)
        wanted = form(message)
        zeros = set(content["zeros"])

        def leaf(path: jax.tree_util.KeyPath, want: jax.ShapeDtypeStruct) -> np.ndarray:
            """Return the array at a path in the tree, and take it out of `parts`."""
            key = jax.tree_util.keystr(path)
            if key in zeros:
                return np.zeros(want.shape, want.dtype)
            return parts.pop(key)  # if it is missing, the KeyError becomes Refused below

        tree = jax.tree.map_with_path(leaf, wanted)
    except Refused:
        raise
    except Exception as error:  # deliberately broad: whoever wrote it may have written anything
        cause = f"{type(error).__name__}: {reason(error, _SHOWN_CHARACTERS)}"
        raise Refused(f"{name}: unknown ({cause})") from error
    if parts:  # arrays that the form does not have
        raise Refused(f"{name}: unknown parts")
    check_form(tree, wanted, f"{name}: ")  # shapes and types
    return message, tree
