"""The files of a path or an address: find them, and copy those on servers to this machine.

An *address* has a protocol, such as `s3://bucket/folder`; fsspec reads it from a bucket, the hub or
a web server. A *glob* is a path with wildcards, and in this file a `pattern` the list of its parts.
A remote file is copied as a whole before it is read, so that hashes, checksums and the readers of
tables work as for files on this machine. `key` is the config's key that gave a path, for messages.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import glob
import hashlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import filelock

from adloco_jax.data import hub
from adloco_jax.data.disk import replaced_folder
from adloco_jax.errors import ConfigError, DataError

_PROTOCOLS = ("s3", "gs", "az", "hf", "https", "http")  # before the "://" of an address
# What the servers call the properties of a file that differ after its content has changed.
_VERSION_NAMES = (
    *("blob_id", "content-md5", "etag", "generation", "last-modified", "last_modified"),
    *("lastmodified", "updated", "versionid"),
)
# A name that ends so is a file, and not the name of a repository on the hub.
_FILE_ENDINGS = (".arrow", ".csv", ".gz", ".json", ".jsonl", ".model", ".parquet", ".tsv", ".txt")
_KEPT_S = 24 * 60 * 60  # how long what was used stays in the cache
_SAMPLE_BYTES = 2**16  # bytes at each end of a file that are hashed at every start


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file on a server.

    Attributes:
      address: The full address.
      size: Size in bytes; None if the server does not say it.
      version: What the server says about the content, such as its hash or the time of its last
        change, each as "name=value".
    """

    address: str
    size: int | None
    version: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last part of the address."""
        return PurePosixPath(self.address).name

    def open(self) -> io.BufferedReader:
        """Open the file on its server for reading; only what is read is transferred, in blocks."""
        system, path = _file_system(self.address, "address")
        return io.BufferedReader(system.open(path, block_size=2**20))  # bytes, of one request


File = Path | RemoteFile


class _CacheEntry(NamedTuple):
    """A file or folder of the user's cache; entries are ordered by their last use."""

    used_s: float  # time of the last use, in seconds since 1970
    num_bytes: int
    path: Path


def cache_folder(name: str) -> Path:
    """Return the path of a folder ("data", "programs") in the user's cache; it need not exist.

    An empty name gives the path of the cache itself.

    Raises FileNotFoundError if the user has no home folder, so that callers treat this like any
    other cache that cannot be used.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # neither the variable HOME nor the list of users names a folder
        raise FileNotFoundError(errno.ENOENT, str(error)) from error
    return Path(home) / "adloco_jax" / name


def trim_cache() -> None:
    """Delete the longest unused entries of the user's cache until its size is `ADLOCO_CACHE_GB`.

    This variable of the environment is in gigabytes, 100 by default. An entry is a file or folder
    in one of the cache's folders. Those that were used within a day stay, because a run may read
    them. Raises ConfigError if the variable is not a number.
    """
    gigabytes = os.environ.get("ADLOCO_CACHE_GB") or "100"
    if not re.fullmatch(r"\d+(\.\d+)?", gigabytes):
        raise ConfigError(f"ADLOCO_CACHE_GB={gigabytes}: expected a number of gigabytes")
    # An error ends this, as the next run tries again: there is no such folder, it is not this
    # user's, or another process deletes the same entries.
    with contextlib.suppress(OSError):
        entries = [_cache_entry(path) for path in cache_folder(name="").glob("*/*")]
        excess_bytes = sum(entry.num_bytes for entry in entries) - float(gigabytes) * 1e9
        for entry in sorted(entries):  # by their last use, the longest unused first
            if excess_bytes <= 0 or entry.used_s > time.time() - _KEPT_S:
                break
            if entry.path.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                entry.path.unlink(missing_ok=True)
            excess_bytes -= entry.num_bytes


def _cache_entry(path: Path) -> _CacheEntry:
    """Return the entry of a file or folder: the sum of its files' sizes, and their last use.

    Raises OSError if another process deletes a file meanwhile.
    """
    stats = [file.stat() for file in (path, *path.rglob("*")) if file.is_file()]
    num_bytes = sum(stat.st_size for stat in stats)
    used_s = 0.0  # of an empty folder: it is deleted first
    for stat in stats:
        used_s = max(used_s, stat.st_atime, stat.st_mtime)  # when it was read, and written
    return _CacheEntry(used_s, num_bytes, path)


def is_address(path: str) -> bool:
    """Return whether a value of the config is an address, not a path or a name on the hub."""
    return "://" in path


def _local_path(name: str, *, key: str) -> Path:
    """Return the path that the config's `key` gives, with `~` expanded; it need not exist.

    Raises DataError if the system cannot look there: the path has a NUL, is too long, or access is
    forbidden, or there is no home folder.
    """
    try:
        path = Path(name).expanduser()
        path.exists()  # called only for its errors
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home folder for `~`
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{key}={name[:200]}: not a readable path ({why})") from error
    return path


def is_on_hub(name: str, *, key: str) -> bool:
    """Return whether a value of the config's `key` can only be a name on the hub.

    It has the form OWNER/NAME, or NAME, without the ending of a file, and no path of this name
    exists. The hub is not asked. Raises DataError if the system cannot look for the path.
    """
    if not hub.NAME.fullmatch(name) or name.endswith(_FILE_ENDINGS):
        return False
    return not _local_path(name, key=key).exists()


# -- Find files ------------------------------------------------------------------------------


def find(path: str, *, key: str) -> dict[str, File]:
    """Find the files of a path or an address: of a file, a folder (at any depth) or a glob.

    A glob may have `**`. Links are followed, and a file to which several lead is listed once. Names
    that begin with `.` or `_` are left out unless `path` spells it. What exists is never
    interpreted as a glob.

    Returns:
      The files, at least one, sorted by path. A key is the path relative to the folder, or to the
      part of the glob before the first wildcard.

    Raises:
      ConfigError: If `path` is an address of a kind that is not supported or not installed, or
        has a password or signature; if a server refuses access.
      DataError: If there is no file, or a link leads nowhere.
      hub.Unreachable: If the server does not answer.
    """
    if is_address(path):
        files, is_folder = _find_remote(path, key)
    else:
        files, is_folder = _find_local(path, key)
    if files:
        return files
    left_out = "(names that begin with . or _ are left out)"
    if is_folder:
        what = f"an empty folder {left_out}"
    elif glob.has_magic(path):
        what = f"no file matches {left_out}"
    else:
        what = "no such file or folder"
    raise DataError(f"{key}={path}: {what}")


def _find_local(path: str, key: str) -> tuple[dict[str, File], bool]:
    """Return the files of a path by name, if there are any, and whether the path is a folder.

    A name is the path relative to the folder, or to the part of a glob before its first wildcard.
    Raises DataError if the system cannot look there, or a link leads nowhere.
    """
    start = _local_path(path, key=key)  # raises DataError if the system cannot look there
    # Files are looked for below `base`, by the parts of a glob, `pattern`.
    if start.is_dir():
        base = start
        pattern = ["**"]
    else:
        # The closest parent without a wildcard in its path.
        base = next(parent for parent in start.parents if not glob.has_magic(str(parent)))
        pattern = list(start.relative_to(base).parts)

    files: dict[Path, Path] = {}  # by the path without links, so that each is read once
    with contextlib.suppress(FileNotFoundError):  # without the folder `base` there is no file
        if start.is_file():
            candidates = [start]
        else:
            candidates = list(_expand(base, pattern, entered=set()))  # no folder is entered yet
        for file in sorted(candidates, key=Path.as_posix):
            if file.is_file():
                files.setdefault(file.resolve(), file)
            elif not file.exists():
                raise DataError(f"{key}={path}: {file} is a link that leads nowhere; remove it")

    by_name: dict[str, File] = {file.relative_to(base).as_posix(): file for file in files.values()}
    return by_name, start.is_dir()


def _is_read(name: str, wildcard: str) -> bool:
    """Return whether the name of a file or folder matches one part of a glob.

    A name that begins with `.` or `_` matches only a part that begins so.
    """
    is_shown = not name.startswith((".", "_")) or wildcard.startswith(name[0])
    return is_shown and fnmatch.fnmatchcase(name, wildcard)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path of the parts `names` matches a glob of the parts `pattern`.

    `**` stands for any number of folders, also for none; at the end also for the file in them.
    """
    if pattern and pattern[0] == "**":
        is_folder_read = len(names) > 1 and _is_read(names[0], "*")
        if is_folder_read and _matches(names[1:], pattern):
            return True  # `**` stands for this folder, and may stand for more
        return _matches(names, pattern[1:] or ["*"])  # for no folder; at the end for any file
    if not names or not pattern:
        return not names and not pattern
    return _is_read(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _expand(folder: Path, pattern: Sequence[str], entered: set) -> Iterator[Path]:
    """Yield the files in a folder, at any depth, that match a glob of the parts `pattern`.

    `**` stands for any number of folders, also for none; at the end also for the file in them.
    `entered` is a set to which each pair of a folder and a pattern is added that is read. No pair
    is read twice, so that a link to a parent folder does not lead in a circle.
    """
    visit = (folder.resolve(), tuple(pattern))
    if visit in entered:
        return
    entered.add(visit)

    first = pattern[0]
    rest = pattern[1:]
    if first == "**":
        # For no folder; a `**` at the end stands for any file.
        yield from _expand(folder, rest or ["*"], entered)
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and _is_read(entry.name, "*"):
                yield from _expand(entry, pattern, entered)
        return

    for entry in sorted(folder.iterdir()):
        if not _is_read(entry.name, first):
            continue
        if entry.is_dir() and rest:
            yield from _expand(entry, rest, entered)
        elif not entry.is_dir() and not rest:
            yield entry


def _find_remote(address: str, key: str) -> tuple[dict[str, File], bool]:
    """Return the files of an address by name, if there are any, and whether it is a folder's.

    A name is the path relative to the folder, or to the part of a glob before its first wildcard.

    Raises:
      ConfigError: If addresses of this kind cannot be read, or the server refuses access.
      DataError: If the server has no such file or folder.
      hub.Unreachable: If the server does not answer.
    """
    protocol, _, _ = address.partition("://")
    with hub.as_user_errors(f"{key}={address}"):
        system, path = _file_system(address, key)
        system.invalidate_cache()  # ask the server again; fsspec keeps listings of folders
        # Files are looked for below `base`, by the parts of a glob, `pattern`: at first all files.
        base = path.rstrip("/")
        pattern = ["**"]
        is_glob = False
        try:
            about = system.info(path)
            if about["type"] == "file":
                return {PurePosixPath(path).name: _remote_file(protocol, about)}, False
        except FileNotFoundError:
            if not glob.has_magic(path):
                raise  # `hub.as_user_errors` makes it a DataError
            is_glob = True
            parts = path.split("/")
            # The index of the first part with a wildcard.
            first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
            base = "/".join(parts[:first])
            pattern = parts[first:]
        # Not `system.glob`, which leaves out an object beside a folder of the same name.
        depth = None if "**" in pattern else len(pattern)  # None: any
        listing = system.find(base, maxdepth=depth, detail=True)  # dicts about files, by path

    files: dict[str, File] = {}
    for name in sorted(listing):
        relative = name.removeprefix(base).lstrip("/")
        # A bucket may have an empty object for a folder, whose name ends with a slash.
        is_file = listing[name]["type"] == "file" and not name.endswith("/")
        if is_file and relative and _matches(relative.split("/"), pattern):
            files[relative] = _remote_file(protocol, listing[name])
    return files, not is_glob


def _file_system(address: str, key: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path of the address in it.

    `key` is the config's key, for messages. Raises ConfigError if the protocol is not supported, or
    the address has a user or a query, which may be secret; ImportError if the protocol's package is
    not installed.
    """
    import fsspec

    protocol, _, rest = address.partition("://")
    # In an address of Azure the part before the @ is a container.
    host, _, _ = rest.partition("/")
    has_user = "@" in host and protocol != "az"
    has_query = protocol.startswith("http") and "?" in rest
    if protocol not in _PROTOCOLS or has_user or has_query:
        # Plain http, the last of the protocols, is read but not proposed.
        raise ConfigError(
            f"{key}: is an address; give a path, a name on the Hugging Face hub, or an address that"
            f" begins with {'://, '.join(_PROTOCOLS[:-1])}://, without a user or a query, as a run"
            " records its addresses; give access by the environment"
        )
    return fsspec.url_to_fs(address)


def _remote_file(protocol: str, about: Mapping[str, Any]) -> RemoteFile:
    """Make a `RemoteFile` from fsspec's dict about a file, whose keys differ by server."""
    name = about["name"]  # a path, or of a web server the full address
    address = name if is_address(name) else f"{protocol}://{name}"
    version = [f"{key}={about[key]}" for key in sorted(about) if key.lower() in _VERSION_NAMES]
    return RemoteFile(address, about.get("size"), tuple(version))


def identity(file: File) -> list:
    """Return a list, as plain JSON, that differs after a file's content has changed.

    The first member is the address or path, the second the size in bytes. For a file here, the time
    of change, which no program can set, and a hash of both ends of the file are among the others.
    Raises OSError if it cannot be opened.
    """
    if isinstance(file, RemoteFile):
        return [file.address, file.size, *file.version]
    with open(file, "rb") as content:
        stat = os.fstat(content.fileno())
        ends = content.read(_SAMPLE_BYTES)
        content.seek(max(len(ends), stat.st_size - _SAMPLE_BYTES))  # read no byte twice
        ends += content.read(_SAMPLE_BYTES)
    times = [stat.st_mtime_ns, stat.st_ctime_ns]
    sha256 = hashlib.sha256(ends).hexdigest()
    return [str(file.resolve()), stat.st_size, stat.st_ino, *times, sha256]


# -- Copy files ------------------------------------------------------------------------------


@contextlib.contextmanager
def local_copy(file: Path | RemoteFile | None, folder: Path) -> Iterator[Path | None]:
    """Yield the path of a file on this machine; for a remote file, of a copy in `folder`.

    `folder` is made anew, and deleted when the `with` block ends without an error. A path or None
    is yielded as it is. A `DataError` of the block names the address instead of the path of the
    copy. Raises DataError if the file on the server is gone or has changed, ConfigError if access
    is refused, and `hub.Unreachable` if the server does not answer.
    """
    if not isinstance(file, RemoteFile):
        yield file
        return
    shutil.rmtree(folder, ignore_errors=True)  # it may have the copy of the file before
    folder.mkdir()
    download(file, folder / file.name)
    with _naming_address(folder / file.name, file.address):
        yield folder / file.name
    shutil.rmtree(folder)


@contextlib.contextmanager
def fetched(
    name: str,
    wanted: Sequence[str],
    *,
    one_of: Sequence[str],
    key: str,
    hint: str = "",
    revision: str | None = None,
) -> Iterator[Path]:
    """Yield a path, or the copy in the user's cache of a remote folder or a repository on the hub.

    A `DataError` of the `with` block names the address instead of the copy.

    Args:
      name: A path, which need not exist, an address, or a name on the hub.
      wanted: Globs of names of files that are copied if they exist.
      one_of: Globs of names, in order of preference; files of the first that matches are copied.
      key: The config's key, for messages.
      hint: What the message advises if no file matches a pattern of `one_of`.
      revision: Branch, tag or commit of a repository on the hub. None: its main branch.

    Raises:
      ConfigError: If no file matches a pattern of `one_of`, the hub has no such repository or
        revision, the address has a password or is of a kind that cannot be read, or access is
        refused.
      DataError: If the system cannot look for the path, there is no file at the address, or a copy
        does not have the size or hash that the server states.
      hub.Unreachable: If the server does not answer.
    """
    if is_address(name):
        folder = _copied(name, wanted, one_of=one_of, key=key, hint=hint)
        with _naming_address(folder, name.rstrip("/")):
            yield folder
    elif not is_on_hub(name, key=key):
        yield _local_path(name, key=key)
    else:
        where = f"{key}={name}"
        yield hub.download(name, wanted, one_of=one_of, where=where, hint=hint, revision=revision)


def _copied(
    address: str, wanted: Sequence[str], *, one_of: Sequence[str], key: str, hint: str
) -> Path:
    """Copy files of the folder at `address` to the user's cache, unless this version is there.

    Returns the folder with the copies. Files of folders in the folder are not copied.

    Args:
      address: Address of the folder.
      wanted: Globs of names of files that are copied if they exist.
      one_of: Globs of names, in order of preference; files of the first that matches are copied.
      key: The config's key, for messages.
      hint: What the message advises if no file matches a pattern of `one_of`.

    Raises:
      ConfigError: If no file matches a pattern of `one_of`, the address has a password or is of a
        kind that cannot be read, or access is refused.
      DataError: If there is no file, or a copy does not have the size that the server states.
      hub.Unreachable: If the server does not answer.
    """
    remote_files: Any = find(address, key=key)  # each a `RemoteFile`, by its name
    # The first glob of `one_of` that any name matches.
    best = hub.first_match(list(remote_files), one_of, f"{key}={address}", hint)
    names: set[str] = set()
    for pattern in (*wanted, best):
        names.update(fnmatch.filter(remote_files, pattern))
    files = {name: remote_files[name] for name in sorted(names) if "/" not in name}

    # The name of the copies' folder is a hash of addresses, sizes and versions, of which half the
    # digits suffice.
    content = json.dumps([dataclasses.astuple(file) for file in files.values()])
    folder = cache_folder("checkpoints") / hashlib.sha256(content.encode()).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):  # one process copies, others wait
        if not folder.exists():
            with replaced_folder(folder) as partial:
                for name, file in files.items():
                    download(file, partial / name)
    return folder


def download(file: RemoteFile, path: Path) -> None:
    """Copy a remote file to `path`.

    Raises:
      DataError: If its size is not that of the listing, or it is no longer there.
      ConfigError: If the server refuses access.
      hub.Unreachable: If the server does not answer.
    """
    with hub.as_user_errors(file.address):
        system, name = _file_system(file.address, "address")
        system.get_file(name, str(path))
    size = path.stat().st_size
    if file.size not in (None, size):
        raise DataError(f"{file.address}: changed or cut while it was read; run it again")


@contextlib.contextmanager
def _naming_address(path: Path, address: str) -> Iterator[None]:
    """Let a `DataError` of the `with` block name the address instead of the path of its copy."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(str(path), address)) from error
