"""Where the objects of driver and learners are: what a `Store` asks of a keeper, and two keepers.

`Bucket` is S3, Google Cloud, Azure or a folder; `Memory` is this process.
"""

import contextlib
import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from adloco_jax.elastic.messages import Refused
from adloco_jax.errors import ConfigError, reason

REQUEST_BYTES = 8 * 2**20  # bytes of a request; larger objects are sent in pieces
SECOND = datetime.timedelta(seconds=1)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
# Of errors without a class. Without credentials, the host's own are asked for.
_DENIED = "403 Forbidden", "401 Unauthorized", "os error 13", "169.254.169", "metadata.google"
_BUSY = r"status code: (429|5\d\d)"


class Denied(Exception):
    """Error: objects may not be read or written, or their place is missing; `remedy` helps."""

    def __init__(self, cause: str, remedy: str):
        super().__init__(cause)
        self.remedy = remedy


class Busy(Exception):
    """Error: the keeper asks for another try."""


class Objects(Protocol):
    """Keeps objects by name. Calls come from several threads; a `Store` repeats those that fail.

    An error that no other try can mend is `Refused` or ConfigError. One that is `Denied` ends the
    first requests, and later ones are repeated, as credentials expire.
    """

    address: str
    """How users and messages name the keeper."""

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces, or None if there is none."""
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
        self.address, self._objects = address, dict[str, bytes]()

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces, or None if there is none."""
        if (data := self._objects.get(name)) is None:
            return None
        starts = range(0, len(data), REQUEST_BYTES)
        return len(data), (data[start : start + REQUEST_BYTES] for start in starts)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        self._objects[name] = data

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call has written it."""
        return self._objects.setdefault(name, data) is data

    def delete(self, name: str) -> None:
        """Delete an object, or raise KeyError."""
        del self._objects[name]

    def names(self) -> list[str]:
        """List the names of all objects, in order."""
        return sorted([*self._objects])


class Bucket:
    """A bucket, or the part of one whose names begin with a prefix."""

    def __init__(self, url: str):
        """Open a bucket, such as s3://bucket/run1 or file:///shared/run1, without a request.

        Raises ConfigError for another address, or a missing parent folder.
        """
        from obstore.store import from_url

        self.address = url
        self._folder: Path | None = None  # of file://
        if not url.startswith(("file:///", "s3://", "gs://", "az://")):
            raise ConfigError(
                f"{url}: no bucket; write s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER"
            )
        how: dict[str, Any] = {"mkdir": True}
        if url.startswith("file://"):
            folder = Path(url.removeprefix("file://"))
            if not folder.parent.is_dir():
                raise ConfigError(
                    f"{url}: {folder.parent} is no folder here; make it (mkdir -p), or name another"
                )
            self._folder = folder.resolve()
        else:
            backoff = {"init_backoff": SECOND / 10, "max_backoff": 2 * SECOND, "base": 2}
            retry = {"backoff": backoff, "max_retries": 3, "retry_timeout": 15 * SECOND}
            # http is used only if the user's endpoint says so; a `Store` has shorter deadlines.
            client = {"connect_timeout": "10s", "read_timeout": "180s", "timeout": "86400s"}
            client |= {"allow_http": True}
            how = {"retry_config": retry, "client_options": client}
        try:
            self._store: Any = from_url(url, **how)
        except Exception as error:  # deliberately broad: obstore's errors have no common meaning
            raise ConfigError(f"{url}: {first_line(error)}") from error

    def get(self, name: str) -> tuple[int, Iterator[bytes]] | None:
        """Return the size of an object and its pieces, or None if there is none."""
        self._follow_no_link(name, Refused)
        with explained():
            try:
                found = self._store.get(name)
            except FileNotFoundError as error:
                if any(word in str(error) for word in _NO_BUCKET):
                    raise  # not only the object is missing
                return None
        return found.meta["size"], self._pieces(found)

    def _pieces(self, found: Any) -> Iterator[bytes]:
        with explained():
            yield from found.stream(min_chunk_size=REQUEST_BYTES)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, or replace it."""
        self._follow_no_link(name, ConfigError)
        with explained():
            # More pieces at a time would each take longer than a client waits on a slow link.
            self._store.put(name, data, chunk_size=REQUEST_BYTES, max_concurrency=2)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one; return whether this call has written it."""
        from obstore.exceptions import AlreadyExistsError

        self._follow_no_link(name, ConfigError)
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

    def _follow_no_link(self, name: str, error: type[Exception]) -> None:
        if self._folder and (self._folder / name).resolve() != self._folder / name:
            raise error(f"{self.address}: {name}: not followed, as it is a link; remove it")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise obstore's errors as `Denied` or `Busy` if they are of that kind, others as they are."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except Exception as error:  # deliberately broad: obstore's errors have no common kind
        text = str(error)  # has the address, and seconds such as 1.403
        refused = PermissionDeniedError, UnauthenticatedError, FileNotFoundError
        if isinstance(error, refused) or any(word in text for word in _DENIED):
            remedy = (
                "make the bucket, set its credentials in the environment (docs/guides/sites.md),"
                " and allow what is listed there"
            )
            raise Denied(first_line(error), remedy) from error
        if re.search(_BUSY, text):
            raise Busy(first_line(error)) from error
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error of obstore, whose later lines are Rust's."""
    return reason(RuntimeError(str(error).partition("\n")[0]), 200)
