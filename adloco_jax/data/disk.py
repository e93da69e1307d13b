"""Write files so that a crash leaves the old or the new content, and hash them.

A new file or folder is written under another name (".NAME.partial"), forced to disk, and renamed.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from adloco_jax.errors import ConfigError, ResourceError, remedy


def file_sha256(path: Path) -> str:
    """Compute the SHA-256 hash of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write a file's content, or a folder's list of entries, from the system's buffers to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file for writing, which replaces `path` when the `with` block ends without an error.

    The new content is on disk before the old is replaced. After an error the old content stays.
    Raises ConfigError if `path` is an address, or no file can have this name.

    Args:
      path: The file to be written.
      mode: Its permissions, of which the umask takes some away; 0o600: only its user may read it.
    """
    partial = local_path(path).with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # of a process that was killed, with other permissions

    def opener(name: str, flags: int) -> int:
        """Open the file as `open` would, but create it with the permissions `mode`."""
        return os.open(name, flags, mode)

    with open(partial, "wb", opener=opener) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` when the `with` block ends without an error.

    The new content is on disk before the old is replaced. After an error the old folder stays. A
    kill between the two renames leaves it as `.NAME.old`, and the next call puts it back. Raises
    ConfigError if `folder` is an address, or no folder can have this name.
    """
    partial = local_path(folder).with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():  # an earlier call was killed between its renames
        old.rename(folder)
    # What killed calls may have left is deleted. Usually there is nothing, which is no error.
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial

    # Files get the permissions that the umask allows, because some libraries write them with 0600.
    mode = partial.stat().st_mode & 0o666  # those of the new folder, without the bits to execute
    for path in [*partial.rglob("*"), partial]:
        if path.is_file():
            path.chmod(mode)
        sync(path)
    if folder.exists():  # a rename cannot replace a folder that is not empty
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def local_path(path: str | Path, where: str = "") -> Path:
    """Return `path`, under which something is to be written, as a `Path`.

    Raises ConfigError if it is an address, such as s3://bucket, of which `Path` would make folders
    here; or if no file can have this name. `where` stands before the path in the message: the
    "key=" of the config.
    """
    # A protocol before ":/", because `Path` has made "s3:/x" of "s3://x". One letter before it is a
    # drive of Windows.
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ConfigError(f"{where}{path}: an address; name a path here, and copy what is written")
    try:
        str(path).encode()  # a ValueError if the name is not UTF-8
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it need not exist
            os.lstat(path)  # an error if the name is too long or has a NUL
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}{str(path)[:200]!r}: {error}; name another") from error
    return Path(path)


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block, which writes `path`, into a `ResourceError`.

    Its message names the path, the system's reason, and what a user can do.
    """
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written ({error.strerror}); {remedy(error)}"
        ) from error
