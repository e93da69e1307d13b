"""What driver and learners read and write: objects, wherever they are kept (`objects`).

An object is JSON, or JSON with arrays (safetensors), with a SHA-256 and a signature. Nothing that
is read is executed or unpickled.
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
_RETRY_S = 3.0  # longest pause before a failed request is repeated
LAST_S = 3.0  # how long a driver waits for learners, and for the bucket, after a signal
_FIRST_TRIES = 4  # failures after which a kind of request that never succeeded is given up
READ_PAUSES_S = (0.5, 2.0)  # before an object that was refused is read again
_BURST_S = 0.05  # for which a link may catch up; what it carries at a time lasts as long

T = TypeVar("T")
F = TypeVar("F", bound=Format)


class Link:
    """One direction of a link with a rate, which those who use it at a time share."""

    def __init__(self, bytes_per_s: float = math.inf):
        self._bytes_per_s, self._free_s, self._using = bytes_per_s, 0.0, threading.Lock()

    def carry(self, num_bytes: float) -> None:
        """Return once the link would have carried some bytes."""
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
        """Use the objects of a keeper; a request that fails for `patience_s` seconds raises."""
        self._objects, self.signatures, self.patience_s = objects, signing, patience_s
        self.url, self._known = objects.address, set[str]()
        self.hold("")

    def hold(self, link: str) -> None:
        """Hold each direction of this process's transfers to the rate of `engine.link`."""
        self._up, self._down = Link(bytes_per_s(link)), Link(bytes_per_s(link))

    def get(self, name: str, *, limit: int = JSON_LIMIT) -> bytes | None:
        """Read an object; None if there is none.

        Raises Refused if it has more than `limit` bytes, or is not signed as it must be.
        """
        limit += NUM_BYTES

        def read(failures: int) -> bytearray | None:
            begin = functools.partial(self._objects.get, name)
            if (found := self._answered(0, failures, begin)) is None:
                return None
            size, pieces = found
            data = bytearray()
            if not 0 < size <= limit:
                raise Refused(f"{name}: {size} bytes, expected 1 to {limit}")
            while len(data) < size:
                length = min(REQUEST_BYTES, size - len(data))
                piece = self._answered(length, failures, functools.partial(next, pieces))
                self._down.carry(len(piece))
                data += piece
            return data

        data = self.patiently("read", name, read)
        return None if data is None else self.signatures.opened(name, bytes(data))

    def message(self, name: str, kind: type[F]) -> F | None:
        """Read what `to_json` made; None if there is none, Refused if it is something else."""
        data = self.get(name)
        return None if data is None else from_json(data, name, kind)

    def valid(self, name: str, kind: type[F]) -> F | None:
        """Read as `message` does; what is something else is ignored."""
        with contextlib.suppress(Refused):
            return self.message(name, kind)
        return None

    def read(
        self, name: str, limit: int, kind: type[F], form: Callable[[F], PyTree]
    ) -> tuple[F, PyTree, int]:
        """Read what `pack` made (see `get`, `unpack`), again if it was damaged on its way.

        Also returns its size in bytes. Raises Refused if it is missing, or refused each time.
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
        data = self.signatures.signed(name, data)
        put = functools.partial(self._objects.put, name, data)
        self._up.carry(len(data))
        self.patiently("write", name, lambda n: self._answered(len(data), n, put))

    def create(self, name: str, message: Format) -> bool:
        """Write an object of JSON unless there is one; say whether this call has written it."""
        data = to_json(message, uuid.uuid4().hex)  # nobody else would write the same
        signed = self.signatures.signed(name, data)

        def write(failures: int) -> bool:
            put = functools.partial(self._objects.create, name, signed)
            if self._answered(len(signed), failures, put):
                return True
            with contextlib.suppress(Refused):  # larger, so another's
                # Perhaps written by this call, whose response was lost.
                return self.get(name, limit=len(data)) == data
            return False

        return self.patiently("write", name, write)

    def delete(self, *names: str) -> None:
        """Delete objects, if they are there and may be deleted."""
        for name in names:  # what is left costs space only
            try:
                self._answered(0, 0, functools.partial(self._objects.delete, name))
            except TimeoutError:
                return
            except Exception:  # noqa: S110  deliberately broad: missing, or not permitted
                pass

    def names(self) -> list[str]:
        """List the names of all objects; the list is empty if listing is not permitted."""
        with contextlib.suppress(Exception):
            return self._answered(0, 0, self._objects.names)
        return []

    def _answered(self, num_bytes: int, failures: int, act: Callable[[], T]) -> T:
        """Return what `act` returns, a request for some bytes, or raise TimeoutError.

        The deadline doubles with each failure. A request that is never answered ends in its own
        thread.
        """
        limit_s = LIMIT_S + num_bytes * BYTE_S
        limit_s *= 1 if processes.is_asked_to_stop() else min(2**failures, 8)
        try:
            return aside(act).result(limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"no response in {limit_s:.0f} s") from error

    def patiently(self, kind: str, name: str, act: Callable[[int], T]) -> T:
        """Return what `act` returns for a number of failures; repeat it while it fails."""
        pause_s, failures, start_s, told_s = 0.2, 0, time.monotonic(), 0.0
        while True:
            try:
                result = act(failures)
            except (Refused, ConfigError):
                raise
            except Exception as error:  # deliberately broad: keepers' errors have no common kind
                failures, failed_s = failures + 1, time.monotonic() - start_s
                if processes.is_asked_to_stop() or failed_s > self.patience_s:
                    raise ResourceError(
                        f"{self.url}: cannot {kind} ({first_line(error)})"
                    ) from error
                if kind not in self._known:
                    self._give_up(kind, error, failures)
                if failures >= 3 and (not told_s or failed_s > told_s + TELL_S):
                    told_s = failed_s
                    why = f"cannot {kind} ({first_line(error)})"
                    say(f"{self.url}: {why}; waiting for the bucket, {failed_s:.0f} s")
            else:
                self._known.add(kind)
                if told_s:
                    gone_s = time.monotonic() - start_s
                    say(f"{self.url}: can {kind} again, after {gone_s:.0f} s")
                return result
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_S)

    def _give_up(self, kind: str, error: Exception, failures: int) -> None:
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
    """Read an object again if it is refused, as it may be damaged on its way only."""
    for pause_s in READ_PAUSES_S:
        with contextlib.suppress(Refused):
            return read()
        time.sleep(pause_s)
    return read()


def longer(pause_s: float) -> float:
    """Return the next pause between looks at an object: 1/40 of the time since it changed."""
    return min(1.025 * pause_s, LONGEST_PAUSE_S)


def aside(act: Callable[..., T], *arguments: Any) -> "concurrent.futures.Future[T]":
    """Call a function in a thread that does not hold up the end of the process."""
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
    """Make an object of JSON without arrays; `by` makes it differ from others."""
    content = message.model_dump()
    return json.dumps({"sha256": _sha256(content), "message": content, "by": by}).encode()


def from_json(data: bytes, name: str, kind: type[F]) -> F:
    """Read an object of JSON without arrays, or raise Refused."""
    try:
        found = json.loads(data)
        message, digest = found["message"], found["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(f"{name}: no JSON of adloco_jax") from error
    if _sha256(message) != digest:
        raise Refused(f"{name}: damaged (SHA-256)")
    return checked(message, kind, name, Refused)


def _sha256(message: Any) -> str:
    return hashlib.sha256(json.dumps(message).encode()).hexdigest()


def pack(message: Format, tree: PyTree) -> bytes:
    """Make an object of JSON and a tree of arrays; it begins with its SHA-256, in 64 digits.

    Arrays of zeros, such as fresh optimizer states, take no space.
    """
    leaves = jax.tree.leaves_with_path(tree)
    arrays = {jax.tree_util.keystr(path): np.asarray(x, order="C") for path, x in leaves}
    sent = {name: x for name, x in arrays.items() if x.any()}
    zeros = sorted(arrays.keys() - sent.keys())
    text = json.dumps({"message": message.model_dump(), "zeros": zeros})
    data = save({**sent, "message": np.frombuffer(text.encode(), np.uint8)})
    return hashlib.sha256(data).hexdigest().encode() + data


def unpack(data: bytes, name: str, kind: type[F], form: Callable[[F], PyTree]) -> tuple[F, PyTree]:
    """Read what `pack` made: message and tree.

    `form` returns the tree that a message must have (`messages.check_form`). Raises Refused if the
    object is damaged, or has another form.
    """
    packed = data[64:]
    if hashlib.sha256(packed).hexdigest().encode() != data[:64]:
        raise Refused(f"{name}: damaged (SHA-256)")
    try:
        parts = load(packed)
        content = json.loads(parts.pop("message").tobytes())
        message = checked(content["message"], kind, name, Refused)
        wanted, zeros = form(message), set(content["zeros"])

        def leaf(path, want):
            key = jax.tree_util.keystr(path)
            return np.zeros(want.shape, want.dtype) if key in zeros else parts.pop(key)

        tree = jax.tree.map_with_path(leaf, wanted)
    except Refused:
        raise
    except Exception as error:  # deliberately broad: whoever wrote it may have written anything
        raise Refused(f"{name}: unknown ({type(error).__name__}: {reason(error, 100)})") from error
    if parts:
        raise Refused(f"{name}: unknown parts")
    check_form(tree, wanted, f"{name}: ")
    return message, tree
