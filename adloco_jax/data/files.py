"""The files of a path or an address: find them, and copy those on servers to this machine.

fsspec reads buckets, the hub and web servers. A file is copied as a whole before it is read, so
that hashes, checksums and the readers of tables work as for files on this machine.
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
from typing import Any

import filelock

from adloco_jax.data import hub
from adloco_jax.data.disk import replaced_folder
from adloco_jax.errors import ConfigError, DataError

_KINDS = ("s3", "gs", "az", "hf", "https", "http")
# What the servers call the properties of a file that differ after its content has changed.
_VERSIONS = ("blob_id", "content-md5", "etag", "generation", "last-modified", "last_modified")
_VERSIONS += ("lastmodified", "updated", "versionid")
_OF_FILES = (".arrow", ".csv", ".gz", ".json", ".jsonl", ".model", ".parquet", ".tsv", ".txt")
_KEPT_S = 24 * 60 * 60  # how long what was used stays in the cache
_SAMPLE_BYTES = 2**16  # bytes at each end of a file that are hashed at every start


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file on a server: its full address, its size in bytes if known, and its version.

    `version` is what the server says about the content: its hash, the time of its last change.
    """

    address: str
    size: int | None
    version: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last part of the address."""
        return PurePosixPath(self.address).name

    def open(self) -> io.BufferedReader:
        """Open the file on its server; what is read is transferred."""
        system, path = _file_system(self.address, "address")
        return io.BufferedReader(system.open(path, block_size=2**20))


File = Path | RemoteFile


def cache_folder(name: str) -> Path:
    """Return the path of a folder ("data", "programs") in the user's cache; it need not exist."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # neither the variable HOME nor the list of users names a folder
        raise FileNotFoundError(errno.ENOENT, str(error)) from error
    return Path(home) / "adloco_jax" / name


def trim_cache() -> None:
    """Delete from the user's cache what was not used for longest, above `ADLOCO_CACHE_GB`.

    What was used within a day stays, because a run may read it. Raises ConfigError if the variable
    is no number.
    """
    gigabytes = os.environ.get("ADLOCO_CACHE_GB") or "100"
    if not re.fullmatch(r"\d+(\.\d+)?", gigabytes):
        raise ConfigError(f"ADLOCO_CACHE_GB={gigabytes}: expected a number of gigabytes")
    with contextlib.suppress(OSError):  # no such folder; not this user's; another process deletes
        entries = []
        for entry in cache_folder("").glob("*/*"):
            found = [path.stat() for path in (entry, *entry.rglob("*")) if path.is_file()]
            last_s = max((max(stat.st_atime, stat.st_mtime) for stat in found), default=0.0)
            entries.append((last_s, sum(stat.st_size for stat in found), entry))
        above = sum(size for _, size, _ in entries) - float(gigabytes) * 1e9
        for last_s, size, entry in sorted(entries):
            if above <= 0 or last_s > time.time() - _KEPT_S:
                break
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
            above -= size


def is_address(path: str) -> bool:
    """Whether a value of the config is an address, and not a path or a name on the hub."""
    return "://" in path


def _local_path(name: str, *, key: str) -> Path:
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{key}={name[:200]}: not a readable path ({why})") from error
    return path


def is_on_hub(name: str, *, key: str) -> bool:
    """Whether a value of the config's `key` is no path here, and may be a name on the hub.

    Raises DataError if the path cannot be followed.
    """
    if not hub.NAME.fullmatch(name) or name.endswith(_OF_FILES):
        return False
    return not _local_path(name, key=key).exists()


# -- Find files ------------------------------------------------------------------------------


def find(path: str, *, key: str) -> dict[str, File]:
    """Find the files of a path or an address: of a file, a folder (at any depth) or a glob.

    A glob may have `**`. Links are followed, and a file is read once. Names that begin with `.` or
    `_` are left out unless `path` spells it. What exists is never interpreted as a glob.

    Returns:
      The files, at least one, sorted by path. A key is the path relative to the folder, or to the
      part of the glob before the first wildcard.

    Raises:
      ConfigError: If `path` is an address of a kind that is not supported or not installed, or
        has a password or signature; if a server refuses access.
      DataError: If there is no file, or a link leads nowhere.
      hub.Unreachable: If the server does not answer.
    """
    files, is_folder = (_find_remote if is_address(path) else _find_local)(path, key)
    if not files:
        what = "no such file or folder"
        if is_folder or glob.has_magic(path):
            what = "an empty folder" if is_folder else "no file matches"
            what += " (names that begin with . or _ are left out)"
        raise DataError(f"{key}={path}: {what}")
    return files


def _find_local(path: str, key: str) -> tuple[dict[str, File], bool]:
    start = _local_path(path, key=key)
    base, parts, files = start, ["**"], {}
    if not start.is_dir():
        base = next(p for p in start.parents if not glob.has_magic(str(p)))
        parts = list(start.relative_to(base).parts)
    with contextlib.suppress(FileNotFoundError):
        found = [start] if start.is_file() else _expand(base, parts, set())
        for file in sorted(found, key=Path.as_posix):
            if file.is_file():
                files.setdefault(file.resolve(), file)
            elif not file.exists():
                raise DataError(f"{key}={path}: {file} is a link that leads nowhere; remove it")
    return {f.relative_to(base).as_posix(): f for f in files.values()}, start.is_dir()


def _is_read(name: str, pattern: str) -> bool:
    is_shown = not name.startswith((".", "_")) or pattern.startswith(name[0])
    return is_shown and fnmatch.fnmatchcase(name, pattern)


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    if parts and parts[0] == "**":
        is_deeper = len(names) > 1 and _is_read(names[0], "*") and _fits(names[1:], parts)
        return is_deeper or _fits(names, parts[1:] or ["*"])
    if not names or not parts:
        return not names and not parts
    return _is_read(names[0], parts[0]) and _fits(names[1:], parts[1:])


def _expand(folder: Path, parts: Sequence[str], entered: set) -> Iterator[Path]:
    visit = folder.resolve(), tuple(parts)
    if visit in entered:  # for instance because a link leads to a parent folder
        return
    entered.add(visit)
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _expand(folder, rest or ["*"], entered)
    for entry in sorted(folder.iterdir()):
        if not _is_read(entry.name, "*" if part == "**" else part):
            continue
        if entry.is_dir():
            if part == "**" or rest:
                yield from _expand(entry, parts if part == "**" else rest, entered)
        elif not rest and part != "**":
            yield entry


def _find_remote(path: str, key: str) -> tuple[dict[str, File], bool]:
    where, kind = f"{key}={path}", path.partition("://")[0]
    with hub.faults(where):
        system, path = _file_system(path, key)
        system.invalidate_cache()
        base, parts = path.rstrip("/"), ["**"]
        try:
            about = system.info(path)
        except FileNotFoundError:
            if not glob.has_magic(path):
                raise
            about, parts = {"type": "missing"}, path.split("/")
            first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
            base, parts = "/".join(parts[:first]), parts[first:]
        if about["type"] == "file":
            return {PurePosixPath(path).name: _remote_file(kind, about)}, False
        # Not `system.glob`, which leaves out an object beside a folder of the same name.
        depth = None if "**" in parts else len(parts)
        found = system.find(base, maxdepth=depth, detail=True)
    names = {name: name.removeprefix(base).lstrip("/") for name in sorted(found)}
    files: dict[str, File] = {
        short: _remote_file(kind, found[name])
        for name, short in names.items()
        if found[name]["type"] == "file" and short and not name.endswith("/")
        if _fits(short.split("/"), parts)
    }
    return files, about["type"] != "missing"


def _file_system(address: str, key: str) -> tuple[Any, str]:
    import fsspec

    kind, _, rest = address.partition("://")
    has_user = "@" in rest.partition("/")[0] and kind != "az"
    if kind not in _KINDS or has_user or (kind.startswith("http") and "?" in rest):
        raise ConfigError(
            f"{key}: is an address; give a path, a name on the Hugging Face hub, or an address that"
            f" begins with {'://, '.join(_KINDS[:-1])}://, without a user or a query, as a run"
            " records its addresses; give access by the environment"
        )
    return fsspec.url_to_fs(address)


def _remote_file(kind: str, about: Mapping[str, Any]) -> RemoteFile:
    name = about["name"]
    address = name if is_address(name) else f"{kind}://{name}"
    version = (f"{key}={about[key]}" for key in sorted(about) if key.lower() in _VERSIONS)
    return RemoteFile(address, about.get("size"), tuple(version))


def identity(file: File) -> list:
    """Return, as plain JSON, what changes with a file's content.

    No program can set the change time `st_ctime_ns`.
    """
    if isinstance(file, RemoteFile):
        return [file.address, file.size, *file.version]
    with open(file, "rb") as content:
        stat = os.fstat(content.fileno())
        ends = content.read(_SAMPLE_BYTES)
        content.seek(max(len(ends), stat.st_size - _SAMPLE_BYTES))
        ends += content.read(_SAMPLE_BYTES)
    times = [stat.st_mtime_ns, stat.st_ctime_ns]
    sha256 = hashlib.sha256(ends).hexdigest()
    return [str(file.resolve()), stat.st_size, stat.st_ino, *times, sha256]


# -- Copy files ------------------------------------------------------------------------------


@contextlib.contextmanager
def local_copy(file: Path | RemoteFile | None, folder: Path) -> Iterator[Path | None]:
    """Replace `folder` by a copy of a remote file for the `with` block; yield the file's path.

    Any other `file` is yielded as it is. A `DataError` of the block names the address instead
    of the path of the copy.
    """
    if not isinstance(file, RemoteFile):
        yield file
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    download(file, folder / file.name)
    with _named(folder / file.name, file.address):
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
      wanted: Patterns of files that are copied if they exist.
      one_of: Patterns, in order of preference; files of the first that matches are copied.
      key: The config's key, for messages.
      hint: What the message advises if no file matches a pattern of `one_of`.
      revision: As in `hub.download`.

    Raises:
      ConfigError: If no file matches a pattern of `one_of`.
      UserError: As from `find` or `hub.download`.
    """
    if is_address(name):
        folder = _copied(name, wanted, one_of=one_of, key=key, hint=hint)
        with _named(folder, name.rstrip("/")):
            yield folder
    elif not is_on_hub(name, key=key):
        yield _local_path(name, key=key)
    else:
        where = f"{key}={name}"
        yield hub.download(name, wanted, one_of=one_of, where=where, hint=hint, revision=revision)


def _copied(
    address: str, wanted: Sequence[str], *, one_of: Sequence[str], key: str, hint: str
) -> Path:
    found: Any = find(address, key=key)
    best = hub.first_match([*found], one_of, f"{key}={address}", hint)
    names = {name for pattern in (*wanted, best) for name in fnmatch.filter(found, pattern)}
    files = {name: found[name] for name in sorted(names) if "/" not in name}
    content = json.dumps([dataclasses.astuple(file) for file in files.values()])
    folder = cache_folder("checkpoints") / hashlib.sha256(content.encode()).hexdigest()[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with replaced_folder(folder) as partial:
                for name, file in files.items():
                    download(file, partial / name)
    return folder


def download(file: RemoteFile, path: Path) -> None:
    """Copy a remote file.

    Raises:
      DataError: If its size is not that of the listing.
    """
    with hub.faults(file.address):
        system, name = _file_system(file.address, "address")
        system.get_file(name, str(path))
    size = path.stat().st_size
    if file.size not in (None, size):
        raise DataError(f"{file.address}: changed or cut while it was read; run it again")


@contextlib.contextmanager
def _named(path: Path, address: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(str(path), address)) from error
