"""The folder of a run: whether it can be used, what it recorded, and what has changed since.

The record of a run is `config.json`, with its settings; the ledger is its log. A table maps names
to what an option can name, such as optimizers; a user's config file can add entries.
"""

import contextlib
import errno
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import jax
from filelock import FileLock, Timeout
from ml_collections import ConfigDict
from pydantic import BeforeValidator

from adloco_jax.config import completed, tables, validate
from adloco_jax.data import formats
from adloco_jax.data.disk import local_path, replaced_file, write_errors
from adloco_jax.errors import TOO_MANY_FILES, CheckpointError, ConfigError, DataError, ResourceError
from adloco_jax.host import processes
from adloco_jax.run.kept import checkpoint
from adloco_jax.run.kept.checkpoint import Damaged
from adloco_jax.run.kept.ledger import finished_line, read
from adloco_jax.settings import (
    ENTRIES,
    OPTIONS,
    Change,
    Settings,
    kind_of_change,
)

# The disk is full or broken, or the process has too many files open.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, *TOO_MANY_FILES)


class InUse(ConfigError):
    """Error: another process runs in the folder."""


def check_workdir(workdir: str | Path) -> None:
    """Raise ConfigError, with what to do, if a run cannot be stored in a folder.

    It can in a local path in which none of its files is a symbolic link.
    """
    folder = local_path(workdir, "workdir ")  # raises for an address, such as s3://
    for name in ("ledger.jsonl", "config.json", "checkpoints"):
        if (folder / name).is_symlink():
            raise ConfigError(
                f"workdir {folder}: {name} is a symbolic link; a run keeps its files in its"
                " folder (the folder itself may be a link)"
            )


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Create and lock the folder of a run while the `with` block runs; process 0 locks for all.

    Raises ConfigError if another run uses it, it cannot be written or is not shared by all
    processes, ResourceError if the disk is full.
    """
    path = workdir / ".lock"
    token = processes.broadcast(os.urandom(8).hex())  # process 0 writes it, all look for it
    lock = FileLock(path, timeout=0)  # does not wait for another process

    def acquire_if_first() -> None:
        """In process 0: make and lock the folder, and write the token that the others look for.

        Raises InUse, a ConfigError, at once if another process holds the lock; ConfigError if the
        folder cannot be written; ResourceError if the disk is full.
        """
        if not processes.is_first():
            return
        with _lock_errors(workdir):  # turns errors of the lock and of files into these
            workdir.mkdir(parents=True, exist_ok=True)
            lock.acquire()  # raises Timeout at once if it is held
            path.write_text(token)

    def require_shared() -> None:
        """Raise ConfigError unless this process sees the token of process 0 in the folder."""
        if not path.exists() or path.read_text() != token:
            raise ConfigError(
                f"workdir {workdir}: not the folder that process 0 has under this name; name one"
                " that all machines share"
            )

    try:
        # All processes end the first step before one begins the second; an error ends all.
        processes.run_on_all(acquire_if_first)
        processes.run_on_all(require_shared)
        yield
    finally:
        lock.release()  # does nothing in the other processes, which have not acquired it


def require_usable(workdir: Path) -> None:
    """Check that a run can write to a folder; leave there at most a lock file. Process 0 looks.

    Raises InUse, a ConfigError, if another run uses it; ConfigError if it cannot be written;
    ResourceError if the disk is full.
    """
    if not processes.is_first():
        return
    with _lock_errors(workdir):
        if workdir.exists():
            # Raises Timeout if another run holds the lock.
            with FileLock(workdir / ".lock", timeout=0):
                return
        # A folder is made and deleted where the run's folder will be.
        parent = next(path for path in workdir.absolute().parents if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".adloco-", dir=parent))


@contextlib.contextmanager
def _lock_errors(workdir: Path) -> Iterator[None]:
    """Turn errors of a lock and its file into errors for the user.

    InUse, a ConfigError, if another process holds the lock; ResourceError for a full disk;
    ConfigError for another OSError.
    """
    try:
        yield
    except Timeout:
        raise InUse(
            f"workdir {workdir}: another process runs there; wait for it, or name another folder"
        ) from None
    except OSError as error:
        kind = ResourceError if error.errno in _DISK_FULL else ConfigError
        raise kind(f"workdir {workdir}: cannot be written ({error.strerror})") from error


class Recorded(formats.Format):
    """What is read of a run's `config.json`."""

    # What a later version has added has its default.
    config: Annotated[Settings, BeforeValidator(formats.with_tuples)]
    data_commit: str = ""  # of the hub's data set; empty if the run reads none
    made_by: str = "train"  # or "fit", so that the model's code is not here
    base_fingerprint: str = ""  # hash of the frozen weights; empty if there are none


def recorded(workdir: Path) -> Recorded | None:
    """Read what a run recorded; None if it has no record.

    Raises CheckpointError if it is unreadable or of another version.
    """
    path = workdir / "config.json"
    if not path.is_file():
        return None
    try:
        content = formats.read_json(path, Damaged)
        if content.get("format") != checkpoint.FORMAT:
            version = "a run of another version of adloco_jax; use that version"
            raise CheckpointError(f"{path}: {version}")
        # Raises Damaged for a field that is missing or of a wrong type.
        return formats.checked(content, Recorded, "record", Damaged)
    except Damaged as error:
        raise CheckpointError(f"{path}: damaged ({error}); restore it from a copy") from error


def write_config(workdir: Path, settings: Settings, **more: object) -> None:
    """Record all settings of a run, and the fields in `more`, atomically in `config.json`.

    `more` has the fields of `Recorded`, and others that are only for people to read. Raises
    ResourceError if the file cannot be written.
    """
    path = workdir / "config.json"
    record = {"format": checkpoint.FORMAT, "config": settings.model_dump(), **more}
    # An OSError becomes a ResourceError; the old file is replaced once the new one is whole.
    with write_errors(path), replaced_file(path) as file:
        file.write(json.dumps(record, indent=1).encode())


def recorded_settings(workdir: Path) -> Settings:
    """Return the complete settings of a run, with the data's commit at its start as the revision.

    Raises CheckpointError without a readable record, ConfigError if an entry that the user added to
    a table is not defined now, or a rule is broken that was not known then.
    """
    before = _resumable_record(workdir)
    values = before.config.model_dump()
    if before.data_commit:  # so that the same data are read, wherever the branch leads now
        values["data"]["revision"] = before.data_commit
    return completed(validate(values), workdir)


def recorded_config(workdir: Path) -> ConfigDict:
    """Read the config with which `train` resumes a run.

    Raises ConfigError if `fit` made the run, or an entry that the user added to a table is not
    defined now; CheckpointError without a readable record.
    """
    refuse_fit(workdir)
    return ConfigDict(_resumable_record(workdir).config.model_dump())


def refuse_fit(workdir: Path) -> None:
    """Raise ConfigError if `fit` made the run, whose model's code a command would need."""
    before = recorded(workdir)
    if before is not None and before.made_by == "fit":
        raise ConfigError(
            f"{workdir}: made by fit with a model of your own, which the command does not have;"
            f" fit called again resumes it, and {workdir / 'export'} has its model"
        )


def _resumable_record(workdir: Path) -> Recorded:
    """Read the record of a run, whose table entries must all be defined in this process.

    A user's config file may have added entries; it must have been run here, too. Raises ConfigError
    with those that are missing, CheckpointError without a readable record.
    """
    path = workdir / "config.json"
    before = recorded(workdir)
    if before is None:
        raise CheckpointError(f"{path}: missing; name the folder of a run")
    known = tables()
    faults = []
    # `key` is an option that names an entry, such as `model.arch`; `entry.table` names its table.
    for key, entry in ENTRIES.items():
        name = attrgetter(key)(before.config)  # the name of the entry that the run used
        if name not in known[entry.table]:
            faults.append(
                f"{path}: {key} = {name!r}: no entry of this library; run the config file that adds"
                " it (--config FILE)"
            )
    if faults:
        raise ConfigError("\n".join(faults))
    return before


# --- What has changed, and how the run goes on -------------------------------------------------


def faults_if_finished(
    workdir: str | Path, settings: Settings, *, accept_config_change: bool = False
) -> list[str] | None:
    """Return lines on what is wrong with a finished run's newest checkpoint, or on its absence.

    None if the run is not finished. It is if the ledger says so, the config asks for no more, and
    the model was exported. The result is empty if the checkpoint is whole.

    Raises ConfigError if settings have changed that may not, CheckpointError if the record cannot
    be read or the checkpoint has another format, DataError if the ledger is damaged.
    """
    folder = Path(workdir)
    check_config(folder, settings, accept=accept_config_change)
    before = recorded(folder)
    ledger = folder / "ledger.jsonl"
    checkpoints = folder / "checkpoints"
    if before is None or not ledger.exists():
        return None
    end = finished_line(read(ledger))
    if end is None or not (folder / "export").exists():
        return None
    settings = settings.with_rows(before.config.num_rows)  # from which epochs become tokens
    if settings.share_done(end["rounds"], end["tokens_total"]) < 1:  # the config asks for more
        return None
    rounds = checkpoint.list_rounds(checkpoints)  # the newest first
    if not rounds:
        return [f"{checkpoints}: gone, or empty"]
    try:
        checkpoint.verify(checkpoints / str(rounds[0]))
    except Damaged as error:
        return [str(error)]
    return []


def check_config(workdir: Path, settings: Settings, *, accept: bool) -> None:
    """Compare settings with those recorded in the run's folder, if there is a run.

    A changed option is harmless, changes the run from here on, which the caller has to `accept`, or
    is refused, as it would be another run. Raises ConfigError with the changes that are not
    allowed, or if a run cannot be stored in the folder; CheckpointError if the record cannot be
    read or is missing beside a run.
    """
    check_workdir(workdir)
    before = recorded(workdir)
    if before is None:
        if (workdir / "checkpoints").exists() or (workdir / "ledger.jsonl").exists():
            raise CheckpointError(
                f"{workdir / 'config.json'}: missing from a folder that holds a run; restore it"
                " from a copy"
            )
        return
    # The number of rows, which config files do not have, and a round's length that follows from it.
    settings = settings.with_rows(before.config.num_rows)
    changed: dict[Change, list[str]] = {"harmless": [], "accepted": [], "refused": []}
    for key in OPTIONS:
        value_of = attrgetter(key)
        was = value_of(before.config)
        now = value_of(settings)
        if was != now:
            changed[kind_of_change_now(key, settings)].append(f"{key}: was {was!r}, is {now!r}")
    lines = changed["refused"]
    if lines:
        lines.append(f"{workdir}: these make another run; name another folder, or change them back")
    if changed["accepted"] and not accept:
        lines += changed["accepted"]
        lines.append(
            f"{workdir}: these change the run from here on; to do so:"
            " accept_config_change=True (--accept-config-change)"
        )
    if lines:
        raise ConfigError("\n".join(lines))


def how_to_resume(workdir: Path, *, by_fit: bool = False) -> str:
    """Return the command that resumes a run, or say which call does."""
    if by_fit:
        return "fit called again with the same arguments"
    command = f"adloco train {shlex.quote(str(workdir))}"
    if jax.process_count() > 1:
        command += ", in each process with its options for several processes"
    return command


def runs_of_command(runs: Iterable[Path], command: str) -> tuple[Path | None, Path | None]:
    """Return the first unfinished and the first finished of some runs that a command began.

    `runs` are folders, and `command` a command line, as the ledger records it. Either is None if
    there is no such run. An unfinished run that another process continues does not count.
    """
    unfinished = None
    complete = None
    for run in runs:
        # Runs that cannot be read are left out: the caller only looks for what may be resumed. A
        # ledger may be damaged, or of another user; the run may be under way.
        with contextlib.suppress(DataError, OSError, Timeout):
            events = read(run / "ledger.jsonl")
            if not events or events[0].get("command") != command:
                continue
            if finished_line(events) is not None:
                complete = complete or run
            elif unfinished is None:
                with FileLock(run / ".lock", timeout=0):  # raises Timeout if the run is under way
                    unfinished = run
    return unfinished, complete


def kind_of_change_now(key: str, settings: Settings) -> Change:
    """Return what another value of the option `key` means for a run, given its other settings.

    That is "harmless", "accepted" (it goes on if the user accepts that) or "refused". A run may be
    made longer freely only if no earlier round depends on its length. Rounds depend on it if the
    learning rate decays, if a rule that may read it sets their length, or if they leave updates
    unsynchronised: only the last round synchronises all.
    """
    inner = settings.inner
    rounds_depend_on_length = (
        inner.schedule != "constant"
        or inner.round_length != "fixed"
        or settings.outer.leaves_unsynchronised
    )
    if key in ("num_rounds", "num_tokens", "num_epochs") and rounds_depend_on_length:
        return "accepted"
    return kind_of_change(key)
