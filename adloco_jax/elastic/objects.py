"""Where the objects of driver and learners are: what a `Store` asks of a keeper, and two keepers.

An object has a name, such as `driver/1.json`, and bytes. A keeper keeps objects: `Bucket` in S3,
Google Cloud, Azure or a folder, `Memory` in this process. A `Store` reads and writes for driver and
learner, and repeats requests to a keeper that fail. `Refused` is an error for what another process
should not have written. obstore is the library that reads and writes buckets.
"""

import contextlib
import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from adloco_jax.elastic.messages import Refused
from adloco_jax.errors import ConfigError, reason

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

REQUEST_BYTES = 8 * 2**20  # bytes of a piece; larger objects are sent in several
SECOND = datetime.timedelta(seconds=1)
# Words in obstore's errors by which kinds are told that have no class of their own.
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_DENIED = (
    "403 Forbidden",
    "401 Unauthorized",
    "os error 13",  # permission denied
    # Without credentials, obstore asks the host for its own, at these addresses.
    "169.254.169",
    "metadata.google",
)
_BUSY = r"status code: (429|5\d\d)"  # too many requests, or an error of the server
_SHOWN_CHARACTERS = 200  # of an error


class Denied(Exception):
    """Error: objects may not be read or written, or their place is missing."""

    def __init__(self, cause: str, remedy: str):
        """Store what is wrong and, in `remedy`, what the user can do; both in words."""
        super().__init__(cause)
        self.remedy = remedy


class Busy(Exception):
    """Error: the server has too many requests, or a fault of its own; it may succeed later."""


class Objects(Protocol):
    """Keeps objects by name. Calls come from several threads; a `Store` repeats those that fail.

    An error that no other try can mend is `Refused` or ConfigError. After one that is `Denied` only
    the first requests are given up; later ones are repeated, as credentials may have expired.
    """

    address: str
    """How users and messages name the keeper."""

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object in bytes, and an iterator of its pieces, in order.

        The last piece may be shorter than `REQUEST_BYTES`. None: there is no object of this name.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call has written it."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object, or raise an error if it is missing or may not be deleted."""
        ...

    def names(self) -> list[str]:
        """List the names of all objects, in order."""
        ...


class Memory:
    """Keeps objects in this process."""

    def __init__(self, address: str):
        """Begin without objects; `address` is for messages."""
        self.address = address
        self._objects = dict[str, bytes]()  # by name

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object in bytes and its pieces in order; None if there is none."""
        data = self._objects.get(name)
        if data is None:
            return None
        starts = range(0, len(data), REQUEST_BYTES)
        return len(data), (data[start : start + REQUEST_BYTES] for start in starts)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        self._objects[name] = data

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call has written it."""
        # One step, as another thread may write meanwhile. It returns the object that is there then.
        stored = self._objects.setdefault(name, data)
        return stored is data

    def delete(self, name: str) -> None:
        """Delete an object; raise KeyError if there is none."""
        del self._objects[name]

    def names(self) -> list[str]:
        """List the names of all objects, in order."""
        return sorted([*self._objects])


class Bucket:
    """A bucket, or the part of one whose names begin with a prefix."""

    def __init__(self, url: str):
        """Open a bucket, such as s3://bucket/run1 or file:///shared/run1, without a request.

        Raises ConfigError if the address is of no such kind, if obstore does not accept it, or if
        the parent folder of a file:// is missing.
        """
        from obstore.store import from_url

        self.address = url
        self._folder: Path | None = None  # of file://
        if not url.startswith(("file:///", "s3://", "gs://", "az://")):
            raise ConfigError(
                f"{url}: no bucket; write s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER"
            )
        if url.startswith("file://"):
            folder = Path(url.removeprefix("file://"))
            if not folder.parent.is_dir():
                raise ConfigError(
                    f"{url}: {folder.parent} is no folder here; make it (mkdir -p), or name another"
                )
            self._folder = folder.resolve()
        try:
            if self._folder is not None:
                self._store: Any = from_url(url, mkdir=True)
            else:  # only a server has options for retries and deadlines
                self._store = from_url(url, retry_config=_retry(), client_options=_client())
        except Exception as error:  # deliberately broad: obstore's errors have no common meaning
            raise ConfigError(f"{url}: {first_line(error)}") from error

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object in bytes and its pieces in order; None if there is none.

        Raises Refused if its file is a link, Denied if it may not be read or there is no bucket,
        Busy if the server is busy or has a fault, and other errors of obstore as they are.
        """
        self._refuse_link(name, Refused)
        with explained():
            try:
                response = self._store.get(name)
            except FileNotFoundError as error:
                if any(words in str(error) for words in _NO_BUCKET):
                    raise  # not only the object is missing, but the bucket
                return None
        return response.meta["size"], self._pieces(response)

    def _pieces(self, response: Any) -> Iterator[bytes]:
        """Yield the pieces of an object that is being read; `response` is obstore's GetResult.

        Raises Denied, Busy, or another error of obstore if the rest cannot be read.
        """
        with explained():
            yield from response.stream(min_chunk_size=REQUEST_BYTES)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it.

        Raises ConfigError if its file is a link, Denied if it may not be written or there is no
        bucket, Busy if the server is busy or has a fault, and other errors of obstore as they are.
        """
        self._refuse_link(name, ConfigError)
        with explained():
            # With more than two pieces at a time each would take so long on a slow link that
            # obstore would give it up.
            self._store.put(name, data, chunk_size=REQUEST_BYTES, max_concurrency=2)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call has written it.

        Raises ConfigError if its file is a link, Denied if it may not be written or there is no
        bucket, Busy if the server is busy or has a fault, and other errors of obstore as they are.
        """
        from obstore.exceptions import AlreadyExistsError

        self._refuse_link(name, ConfigError)
        with explained():
            try:
                self._store.put(name, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def delete(self, name: str) -> None:
        """Delete an object, or raise an error if it is missing or may not be deleted."""
        self._store.delete(name)

    def names(self) -> list[str]:
        """List the names of all objects, in order."""
        return sorted(each["path"] for each in self._store.list().collect())

    def _refuse_link(self, name: str, error: type[Exception]) -> None:
        """Raise `error` if the bucket is a folder, and its path to the object has a symbolic link.

        By a link, somebody who may write to a shared folder could make others read or overwrite any
        file.
        """
        if self._folder is None:
            return
        path = self._folder / name
        if path.resolve() != path:
            raise error(f"{self.address}: {name}: not followed, as it is a link; remove it")


def _retry() -> "RetryConfig":
    """Return how obstore itself repeats a request that fails; a `Store` repeats it for longer."""
    return {
        # Pauses of 0.1 s to 2 s, each twice the one before.
        "backoff": {"init_backoff": SECOND / 10, "max_backoff": 2 * SECOND, "base": 2},
        "max_retries": 3,
        "retry_timeout": 15 * SECOND,
    }


def _client() -> "ClientConfig":
    """Return the options of obstore's client; a `Store` has shorter deadlines of its own."""
    return {
        "connect_timeout": "10s",
        "read_timeout": "180s",  # without a byte
        "timeout": "86400s",  # of a whole request: a day
        "allow_http": True,  # used only if the user's endpoint says so
    }


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn obstore's errors within the `with` block into `Denied` or `Busy`.

    It is Denied if the bucket is missing or may not be used, and Busy if the server has too many
    requests or a fault. Other errors are raised as they are.
    """
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except Exception as error:  # deliberately broad: obstore's errors have no common kind
        text = str(error)  # has the address too, and seconds such as 1.403
        kinds = (PermissionDeniedError, UnauthenticatedError, FileNotFoundError)
        if isinstance(error, kinds) or any(words in text for words in _DENIED):
            remedy = (
                "make the bucket, set its credentials in the environment (docs/guides/sites.md),"
                " and allow what is listed there"
            )
            raise Denied(first_line(error), remedy) from error
        if re.search(_BUSY, text):
            raise Busy(first_line(error)) from error
        raise


def first_line(error: BaseException) -> str:
    """Return an error's first line, cut to a length; obstore adds lines about its Rust code."""
    line, _, _ = str(error).partition("\n")
    return reason(RuntimeError(line), _SHOWN_CHARACTERS)
