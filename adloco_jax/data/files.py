"""Files on this machine: find the files of a path, compare two reads, locate the user's cache."""

import errno
import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from adloco_jax.errors import ConfigError, DataError


def cache_folder(name: str) -> Path:
    """Return the path of a folder ("data", "programs") in the user's cache; it need not exist."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # neither the variable HOME nor the list of users names a folder
        raise FileNotFoundError(errno.ENOENT, str(error)) from error
    return Path(home) / "adloco_jax" / name


def shard_changes(before: Sequence[dict], after: Sequence[dict]) -> list[str]:
    """Describe, file by file, how the records `Manifest.files` have changed between two reads."""
    old = {record["name"]: record.get("sha256") for record in before}
    new = {record["name"]: record.get("sha256") for record in after}
    lines = [f"{name}: no longer there" for name in old if name not in new]
    lines += [f"{name}: was not there before" for name in new if name not in old]
    lines += [f"{name}: edited" for name in old if name in new and old[name] != new[name]]
    if not lines and list(old) != list(new):
        lines.append("the same files in another order")
    return lines


def local_path(name: str, *, key: str) -> Path:
    """Convert the value of a config's `key` to a path, with `~` expanded; it need not exist.

    Raises:
      ConfigError: If the value is an address, which the message does not repeat: it may contain a
        password.
      DataError: If the path cannot be followed.
    """
    if "://" in name:
        raise ConfigError(f"{key}: is an address; give a path, or a name on the Hugging Face hub")
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{key}={name[:200]}: not a readable path ({reason})") from error
    return path


def find_files(path: str, *, key: str) -> dict[str, Path]:
    """Find the files of a path, a folder (at any depth) or a glob (with `**`), sorted by path.

    Links are followed, and a file is read once. Names that begin with a dot are left out unless the
    glob contains the dot. A path that exists is never interpreted as a glob.

    Returns:
      The files, at least one. A key is the path relative to the folder, or to the part of the glob
      before the first wildcard.

    Raises:
      ConfigError: If `path` is empty.
      DataError: If there is no file, or a link leads nowhere.
    """
    if not path:
        raise ConfigError(f"{key} is empty: give a file, a folder or a glob")
    start = local_path(path, key=key)
    base, parts, files = start, ["**"], {}
    if not start.is_dir():
        base = next(p for p in start.parents if not glob.has_magic(str(p)))
        parts = list(start.relative_to(base).parts)
    try:
        found = [start] if start.is_file() else _expand(base, parts, set())
        for file in sorted(found, key=Path.as_posix):
            if file.is_file():
                files.setdefault(file.resolve(), file)
            elif not file.exists():
                raise DataError(f"{key}={path}: {file} is a link that leads nowhere; remove it")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DataError(f"{key}={path}: {error.filename}: {error.strerror}") from error
    if not files:
        missing = "an empty folder" if start.is_dir() else "no such file or folder"
        missing = "no file matches" if glob.has_magic(path) else missing
        raise DataError(f"{key}={path}: {missing}")
    return {file.relative_to(base).as_posix(): file for file in files.values()}


def _expand(folder: Path, parts: Sequence[str], entered: set) -> Iterator[Path]:
    visit = folder.resolve(), tuple(parts)
    if visit in entered:  # for instance because a link leads to a parent folder
        return
    entered.add(visit)
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _expand(folder, rest or ["*"], entered)
    for entry in sorted(folder.iterdir()):
        pattern = "*" if part == "**" else part
        is_shown = not entry.name.startswith(".") or pattern.startswith(".")
        if not is_shown or not fnmatch.fnmatchcase(entry.name, pattern):
            continue
        if entry.is_dir():
            if part == "**" or rest:
                yield from _expand(entry, parts if part == "**" else rest, entered)
        elif not rest and part != "**":
            yield entry
