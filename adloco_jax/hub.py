"""Use the Hugging Face hub: find commits, download files, and turn errors into clear messages."""

import contextlib
import fnmatch
import gzip
import hashlib
import logging
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adloco_jax.errors import ConfigError, DataError, ResourceError, UserError, reason

COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
FIRST_ANSWER_S, PATIENCE_S = 10.0, 60.0
_LOGGERS = ("huggingface_hub", "datasets")  # loggers whose lines `_Patience` replaces


class Unreachable(ResourceError):
    """Error: the Hugging Face hub does not answer."""


class NoSuchFile(ConfigError):
    """Error: a repository has none of the wanted files."""


def commit_of(name: str, revision: str, *, where: str) -> str:
    """Ask the hub for the commit of a data set's revision (branch, tag or commit), within 10 s.

    `where` has the config's keys and values, for messages.

    Raises:
      Unreachable: If the hub does not answer.
      ConfigError: If there is no such data set or revision, or no access to it.
    """
    import huggingface_hub

    with faults(where, f"datasets/{name}"):
        api = huggingface_hub.HfApi()
        return str(api.dataset_info(name, revision=revision, timeout=FIRST_ANSWER_S).sha)


def download(
    name: str, wanted: Sequence[str], *, one_of: Sequence[str], where: str, hint: str = ""
) -> Path:
    """Download files of a model's repository to the hub's cache; return their folder.

    Files that match `wanted` are downloaded, and those of the first pattern of `one_of` that any
    file matches. A lost connection is tried again for 60 s. Every file is compared with the hub's
    hash. Messages mention `where`, the config's key and value, and `hint` if nothing matches.

    Raises:
      Unreachable: If the hub does not answer.
      NoSuchFile: If no file of the repository matches `one_of`.
      ConfigError: If there is no such repository, or no access to it.
      DataError: If a hash differs.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()

    def get(pattern: str, *, offline: bool = False) -> Path:
        options: Any = {"allow_patterns": [*wanted, pattern], "local_files_only": offline}
        return Path(huggingface_hub.snapshot_download(name, **options))

    def cached() -> Path | None:
        for pattern in one_of:
            with contextlib.suppress(OSError, ValueError):  # missing, or incomplete
                if any((folder := get(pattern, offline=True)).glob(pattern)):
                    return folder
        return None

    if (folder := cached()) is None:
        with faults(where, name) as patience:
            info = huggingface_hub.HfApi().model_info(name, timeout=FIRST_ANSWER_S)
            names = [file.rfilename for file in info.siblings or ()]
            best = next((pattern for pattern in one_of if fnmatch.filter(names, pattern)), None)
            if best is None:
                missing = f"the repository has no file {' or '.join(one_of)}"
                raise NoSuchFile(f"{where}: {missing}{hint and '; '}{hint}")
            while folder is None:
                try:
                    folder = get(best)
                except Exception as error:  # deliberately broad, as in `faults`
                    if not isinstance(_fault(error, where, name), Unreachable):
                        raise
                    time.sleep(patience.wait(2.0))
    for file in sorted(folder.rglob("*")):
        _check_content(file, where)
    return folder


def make_repository(name: str, *, private: bool) -> None:
    """Create a model's repository on the hub, unless it exists.

    Raises:
      ConfigError: If the token in use may not write there, or if `private` and it is public.
      Unreachable: If it fails otherwise, for instance because the hub does not answer.
    """
    with _pushing(name) as api:
        api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name, timeout=FIRST_ANSWER_S).private:
            raise ConfigError(f"--push {name}: exists and is public; make it private on the hub")


def upload(folder: Path, name: str) -> str:
    """Upload a folder to a model's repository, in place of its weights; return its address.

    Raises:
      ConfigError: If the token in use may not write there.
      Unreachable: If the hub does not answer.
    """
    with _pushing(name) as api:
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Export of a run",
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )
        return f"{api.endpoint}/{name}"


@contextlib.contextmanager
def _pushing(name: str) -> Iterator[Any]:
    import huggingface_hub

    try:
        yield huggingface_hub.HfApi()
    except UserError:
        raise
    except Exception as error:  # deliberately broad, as in `faults`
        answers = [getattr(cause, "response", None) for cause in (error, error.__cause__)]
        if {401, 403} & {getattr(answer, "status_code", 0) for answer in answers}:
            raise ConfigError(
                f"--push {name}: refused; log in with a token that may write there (hf auth login,"
                " or HF_TOKEN)"
            ) from error
        raise Unreachable(
            f"--push {name}: not uploaded ({reason(error)}); run the same command again"
        ) from error


def _check_content(file: Path, where: str) -> None:
    """Check that the content of a file in the hub's cache has the hash that is its name."""
    blob = file.resolve()
    if not file.is_symlink() or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return
    digest = hashlib.sha256()
    if len(blob.name) == 40:  # a small file has the hash that git computes
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    with open(blob, "rb") as content:
        while part := content.read(2**20):
            digest.update(part)
    if digest.hexdigest() != blob.name:
        raise DataError(
            f"{where}: {file.name} does not have the hash that the hub states;"
            f" delete {blob} and run the same command again"
        )


# -- Faults ----------------------------------------------------------------------------------


class _Patience(logging.Handler):
    """Prints a line whenever a library logs that it waits for the hub; gives up after 60 s."""

    def __init__(self, where: str):
        super().__init__(logging.WARNING)
        self._where = where
        # The time of the first failure since the hub last answered; None: no failure since then.
        self._since: float | None = None

    def answered(self) -> None:
        """Record that the hub has sent data; the 60 s then begin with the next failure."""
        self._since = None

    def wait(self, seconds: float) -> float:
        """Print a line about a pause before the hub is asked again; return the seconds to pause."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now + seconds - self._since > PATIENCE_S:
            raise Unreachable(
                f"{self._where}: the Hugging Face hub does not answer, tried for"
                f" {now - self._since:.0f} s; once it does, the same command continues"
                " from here"
            )
        left = PATIENCE_S - (now - self._since)
        tqdm.write(
            f"{self._where}: connection lost; next attempt in {seconds:.0f} s, giving up in"
            f" {left:.0f} s"
        )
        return seconds

    def emit(self, record: logging.LogRecord) -> None:
        """Read the length of a pause from a library's log line; print another line instead."""
        if match := re.search(r"(?:Retrying in|Waiting) ([\d.]+) ?s", record.getMessage()):
            self.wait(float(match[1]))


@contextlib.contextmanager
def faults(where: str, repo: str) -> Iterator[_Patience]:
    """Turn errors of the hub's libraries into `UserError`, and their log lines into clear ones."""
    patience = _Patience(where)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [patience], False
    try:
        yield patience
    except UserError:
        raise
    except Exception as error:  # deliberately broad, because each library raises its own
        raise _fault(error, where, repo) from error
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate


def _fault(error: BaseException, where: str, repo: str) -> UserError:
    from huggingface_hub import constants, errors, get_token

    chain = [error]
    while len(chain) < 20 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    for cause in chain:
        if isinstance(cause, UserError):
            return cause
        # `datasets` raises an error without a cause, so its text is compared.
        if isinstance(cause, errors.GatedRepoError) or "is a gated dataset" in str(cause):
            return ConfigError(
                f"{where}: gated; request access at {constants.ENDPOINT}/{repo} and log in"
                " (hf auth login, or HF_TOKEN)"
            )
        if isinstance(cause, errors.RevisionNotFoundError):
            return ConfigError(f"{where}: {repo} has no such revision")
        if isinstance(cause, errors.RepositoryNotFoundError):
            access = "log in if it is private (hf auth login, or HF_TOKEN)"
            if get_token() is not None:
                access = "ask for access if it is private: the token in use has none"
            return ConfigError(
                f"{where}: no public repository of that name on the Hugging Face hub, and no file"
                f" or folder here; correct the name, or {access}"
            )
        if isinstance(cause, errors.RemoteEntryNotFoundError):
            return ConfigError(
                f"{where}: {repo} lacks a file that it should have ({reason(cause)})"
            )
        if isinstance(cause, OSError) and cause.filename and cause.errno is not None:
            return ResourceError(
                f"{where}: the Hugging Face libraries cannot write to their cache"
                f" (HF_HOME={constants.HF_HOME}: {cause.filename}: {cause.strerror})"
            )
        if isinstance(cause, (gzip.BadGzipFile, zlib.error, EOFError)):
            return DataError(f"{where}: damaged ({reason(cause)})")
    if any(_is_connection(cause) for cause in chain):
        return Unreachable(
            f"{where}: no file or folder of that name here, the cache lacks what is needed, and the"
            f" Hugging Face hub does not answer ({reason(chain[-1])}); once it does, run the same"
            " command again"
        )
    return DataError(f"{where}: cannot be read ({reason(error)})")


def _is_connection(error: BaseException) -> bool:
    from huggingface_hub import errors

    known = (ConnectionError, TimeoutError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError)
    libraries = ("httpx", "httpx2", "httpcore", "httpcore2", "aiohttp")
    return isinstance(error, known) or type(error).__module__.partition(".")[0] in libraries
