"""Use the Hugging Face hub: find commits, download files, and turn errors into clear messages.

`where` is the "key=value" of the config that names a data set, a repository or a file. Messages
begin with it.
"""

import contextlib
import fnmatch
import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adloco_jax.errors import ConfigError, DataError, ResourceError, UserError, reason

COMMIT = re.compile(r"[0-9a-f]{40}")  # the full name of a commit
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # of a repository: owner/name, or a name alone
FIRST_ANSWER_S = 10.0  # how long the hub may take to answer
# Names of classes of errors, in all libraries that ask a server: there is no such thing, there is
# no access to it, and the server does not answer.
_ABSENT = frozenset(
    {
        "DatasetNotFoundError",
        "RemoteEntryNotFoundError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
    }
)
_REFUSED = frozenset({"ClientAuthenticationError", "NoCredentialsError", "PermissionError"})
_NO_ANSWER = frozenset(
    {
        *("ClientConnectionError", "ClientPayloadError", "ConnectionError", "HTTPClientError"),
        *("NetworkError", "OfflineModeIsEnabled", "ProtocolError", "ServiceRequestError"),
        *("ServiceResponseError", "TimeoutError", "TimeoutException", "TransportError"),
    }
)
# HTTP status codes that mean the same; all from 500 on mean that the server has no answer.
_REFUSED_CODES = frozenset({401, 403})  # no credentials, no permission
_NO_ANSWER_CODES = frozenset({408, 425, 429})  # request timed out, too early, too many requests
_MAX_CAUSES = 20  # errors of a chain that are looked at
_SHA1_DIGITS = 40  # hexadecimal digits
_PART_BYTES = 2**20  # of a file that is hashed, in memory at a time


class Unreachable(ResourceError):
    """Error: a server does not answer."""


def commit_of(name: str, revision: str, *, where: str) -> str:
    """Ask the hub for the commit of a data set's revision (branch, tag or commit), and return it.

    Raises:
      Unreachable: If the hub does not answer.
      ConfigError: If there is no such data set or revision, or no access to it.
    """
    import huggingface_hub

    with _as_errors_of_name(where):
        api = huggingface_hub.HfApi()
        return str(api.dataset_info(name, revision=revision, timeout=FIRST_ANSWER_S).sha)


def download(
    name: str,
    wanted: Sequence[str],
    *,
    one_of: Sequence[str],
    where: str,
    hint: str = "",
    revision: str | None = None,
) -> Path:
    """Download files of a model's repository to the hub's cache; return their folder.

    If the cache has the files, the hub is not asked. Every file is compared with the hub's hash.

    Args:
      name: The repository.
      wanted: Globs of names of files that are downloaded if they exist.
      one_of: Globs of names, in order of preference; files of the first that matches are
        downloaded.
      where: The "key=value" that names the repository, for messages.
      hint: What the message advises if no file matches a pattern of `one_of`.
      revision: Branch, tag or commit; None: the main branch.

    Raises:
      Unreachable: If the hub does not answer.
      ConfigError: If there is no such repository or revision, no access to it, or no file for
        `one_of` in it.
      DataError: If a hash differs.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()

    def get(pattern: str, *, offline: bool = False) -> Path:
        """Download the wanted files and those of a glob, `pattern`; return their folder.

        If `offline`, they are only looked up in the cache: OSError or ValueError if it has not all.
        """
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*wanted, pattern],
            local_files_only=offline,
        )
        return Path(folder)

    def find_in_cache() -> Path | None:
        """Return the folder with files of the first pattern that the cache has; else None."""
        for pattern in one_of:
            # Files that are missing or incomplete are errors, and the next pattern is tried.
            with contextlib.suppress(OSError, ValueError):
                folder = get(pattern, offline=True)
                if any(folder.glob(pattern)) and _has_all_shards(folder):
                    return folder
        return None

    folder = find_in_cache()
    if folder is None:
        with _as_errors_of_name(where):
            api = huggingface_hub.HfApi()
            info = api.model_info(name, revision=revision, timeout=FIRST_ANSWER_S)
            names = [file.rfilename for file in info.siblings or ()]
            pattern = first_match(names, one_of, where, hint)
            folder = get(pattern)
    for file in sorted(folder.rglob("*")):
        _check_content(file, where)  # a file in the cache may be damaged
    return folder


def _has_all_shards(folder: Path) -> bool:
    """Return whether a folder has all files that an index of weights in it names.

    It is False, too, if an index is damaged; then the caller reads the folder from the hub. Older
    versions of the hub's library return a folder in which files are missing. Raises OSError or
    ValueError if an index cannot be read, or is not JSON.
    """
    for index in folder.glob("*.index.json"):
        content = json.loads(index.read_text())
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict):  # by the name of a weight, the name of its file
            return False
        shards = {str(shard) for shard in weight_map.values()}
        if not all((folder / shard).exists() for shard in shards):
            return False
    return True


def first_match(names: Sequence[str], one_of: Sequence[str], where: str, hint: str) -> str:
    """Return the first glob of `one_of` that any name matches.

    Names with a slash, of files in other folders, do not count. Raises ConfigError, with the advice
    `hint`, if none matches.
    """
    # A * also stands for a slash.
    in_folder = [name for name in names if "/" not in name]
    for pattern in one_of:
        if fnmatch.filter(in_folder, pattern):
            return pattern
    message = f"{where}: it has no file {' or '.join(one_of)}"
    if hint:
        message += f"; {hint}"
    raise ConfigError(message)


def _check_content(file: Path, where: str) -> None:
    """Raise DataError if a file in the hub's cache does not have the hash that names its content.

    The cache has a link to a file that is named by its hash. Other files are not checked.
    """
    blob = file.resolve()
    is_named_by_hash = re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name)  # SHA-1 or SHA-256
    if not file.is_symlink() or not is_named_by_hash:
        return
    stat = blob.stat()
    if _content_hash(blob, stat.st_size, stat.st_ctime_ns) != blob.name:
        raise DataError(
            f"{where}: {file.name} does not have the hash that the hub states;"
            f" delete {blob} and run the same command again"
        )


@functools.cache  # a run opens a repository several times, and its weights may have many gigabytes
def _content_hash(blob: Path, num_bytes: int, changed_ns: int) -> str:
    """Return a file's hash (hex) by the algorithm of the hash that is its name.

    The result is cached. The time of change is an argument so that a changed file is hashed again.
    """
    if len(blob.name) == _SHA1_DIGITS:  # a small file has the hash that git computes
        digest = hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)
    else:
        digest = hashlib.sha256()
    with open(blob, "rb") as content:
        part = content.read(_PART_BYTES)
        while part:
            digest.update(part)
            part = content.read(_PART_BYTES)
    return digest.hexdigest()


# -- Faults ----------------------------------------------------------------------------------


@contextlib.contextmanager
def as_user_errors(where: str) -> Iterator[None]:
    """Turn an error of the `with` block, which asks a server, into a `UserError` about `where`.

    It is `Unreachable`, ConfigError (the hub has no such thing, there is no access to it, or a
    package is missing) or DataError (a file is not there, or cannot be read). A `UserError` and
    errors of this machine's disk stay. Secrets are removed from what the hub's libraries log.
    """
    for name in ("huggingface_hub", "datasets"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_without_secrets)  # a second time it changes nothing
    try:
        yield
    except Exception as error:  # deliberately broad, because each library raises its own
        fault = _error_to_raise(error, where)
        if fault is error:
            raise
        raise fault from error


@contextlib.contextmanager
def _as_errors_of_name(where: str) -> Iterator[None]:
    """Turn an error of the `with` block, which asks the hub for a name, into a `UserError`.

    It is `Unreachable`, ConfigError or DataError. The name may also be a mistyped path, so messages
    add that there is no such path here.
    """
    try:
        with as_user_errors(f"{where}: no such file or folder here; on the hub"):
            yield
    except Unreachable as error:
        raise Unreachable(f"{error}, or correct the path") from error


def _without_secrets(record: logging.LogRecord) -> bool:
    """Remove secrets from a log message; a filter of `logging`: True keeps the message."""
    record.msg = reason(RuntimeError(record.getMessage()))  # an error's message without secrets
    record.args = ()  # they are in the message already
    return True


def _error_to_raise(error: BaseException, where: str) -> BaseException:
    """Return what `as_user_errors` raises instead of an error.

    It is a `UserError` about `where`. If the error or a cause of it is a `UserError` or of this
    machine's disk, it is that one.
    """
    chain = _with_causes(error)

    # Cases that any error of the chain decides. An error of this machine's disk names a file, and
    # has the system's number. It is not FileNotFoundError, whose file may be the server's.
    for cause in chain:
        is_of_disk = getattr(cause, "filename", None) and getattr(cause, "errno", None)
        if isinstance(cause, UserError):
            return cause
        if is_of_disk and not isinstance(cause, FileNotFoundError):
            return cause
        if _class_names(cause) & _ABSENT:
            return ConfigError(f"{where}: {reason(cause, limit=600)}")  # with the hub's advice
    if isinstance(error, ImportError):  # of fsspec, which names the package
        return ConfigError(f"{where}: {reason(error)}; or pip install 'adloco_jax[remote]'")

    # What a server answered, or that none did.
    names: set[str] = set()
    for cause in chain:
        names.update(_class_names(cause))
    codes = {_status(cause) for cause in chain}  # of HTTP; 0 for an error without one
    if names & _REFUSED or codes & _REFUSED_CODES:
        how = "set credentials in the environment, or log in (hf auth login)"
        return ConfigError(f"{where}: no access ({reason(error)}); {how}")
    if names & _NO_ANSWER or codes & _NO_ANSWER_CODES or max(codes) >= 500:
        how = "once it does, run the same command again"
        return Unreachable(f"{where}: the server does not answer ({reason(chain[-1])}); {how}")
    # File systems of fsspec raise it themselves, or an OSError because of it.
    if isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError):
        return DataError(f"{where}: no such file or folder")
    return DataError(f"{where}: cannot be read ({reason(error)})")


def _with_causes(error: BaseException) -> list[BaseException]:
    """Return an error, its cause, the cause of this one, and so on, up to `_MAX_CAUSES`.

    The cause is what `raise ... from` names, or else the error that was handled meanwhile.
    """
    chain = [error]
    while len(chain) < _MAX_CAUSES:
        cause = chain[-1].__cause__ or chain[-1].__context__
        if cause is None:
            break
        chain.append(cause)
    return chain


def _class_names(error: BaseException) -> set[str]:
    """Return the names of an error's class and of all classes from which it inherits."""
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    """Return the HTTP status that an error of any library has; 0 if it has none."""
    answer: Any = getattr(error, "response", None)  # of the server: an object, or botocore's dict
    if isinstance(answer, dict):  # botocore
        return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    for holder in (error, answer):
        for name in ("status", "status_code", "code"):
            code = getattr(holder, name, 0)
            if isinstance(code, int) and code:
                return code
    return 0
