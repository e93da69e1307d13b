"""The folder of a run: whether it can be used, its lock, and the settings in `config.json`."""

import contextlib
import errno
import functools
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from importlib import metadata
from operator import attrgetter
from pathlib import Path

from filelock import FileLock, Timeout
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from adloco_jax import __version__, files, hf
from adloco_jax.config import default_config, tables, validate
from adloco_jax.data.tokenizers import default_tokenizer
from adloco_jax.errors import TOO_MANY_FILES, CheckpointError, ConfigError, ResourceError
from adloco_jax.files import local_path, replaced_file, write_errors
from adloco_jax.hub import COMMIT
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.run import checkpoint, processes
from adloco_jax.run.checkpoint import Damaged
from adloco_jax.settings import ENTRIES, KNOBS, Settings

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, *TOO_MANY_FILES)


def require_utf8(option: str, path: Path) -> None:
    """Raise ConfigError if a path is not UTF-8, which some libraries that write there need."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{option} {str(path)[:200]!r}: not UTF-8; name another") from error


def check_workdir(workdir: str | Path) -> None:
    """Raise ConfigError, with what to do, if a run cannot be stored in a folder."""
    folder = Path(workdir)
    require_utf8("--workdir", folder)
    local_path(workdir, "--workdir ")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--workdir {folder}: {existing} is a file; name a folder")
    for name in ("ledger.jsonl", "config.json", "checkpoints"):
        if (folder / name).is_symlink():
            raise ConfigError(
                f"--workdir {folder}: {name} is a symbolic link; a run keeps its files in its"
                " folder (the folder itself may be a link)"
            )


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Create and lock the folder of a run while the `with` block runs; process 0 locks for all.

    Raises ConfigError if another run uses it, it cannot be written or is not shared by all
    processes, ResourceError if the disk is full.
    """
    lock = FileLock(workdir / ".lock", timeout=0)

    def acquire() -> None:
        with _lock_errors(workdir):
            if processes.is_first():
                workdir.mkdir(parents=True, exist_ok=True)
                lock.acquire()

    try:
        processes.run_on_all(acquire)
        processes.require_shared(workdir)
        yield
    finally:
        lock.release()


def require_usable(workdir: Path) -> None:
    """Check that a run can write to a folder; leave nothing there. Raises as `exclusive`."""
    if not processes.is_first():
        return
    with _lock_errors(workdir):
        if workdir.exists():
            with FileLock(workdir / ".lock", timeout=0):
                return
        parent = next(path for path in workdir.absolute().parents if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".adloco-", dir=parent))


@contextlib.contextmanager
def _lock_errors(workdir: Path) -> Iterator[None]:
    try:
        yield
    except Timeout:
        raise ConfigError(
            f"--workdir {workdir}: another process runs there; wait for it, or name another folder"
        ) from None
    except OSError as error:
        kind = ResourceError if error.errno in _DISK_FULL else ConfigError
        raise kind(f"--workdir {workdir}: cannot be written ({error.strerror})") from error


def completed(settings: Settings, workdir: Path | None = None) -> Settings:
    """Add to the settings what `model.init_from` says; raise UserError if it cannot be read.

    It is its `config.json`, or what the run in `workdir` recorded of it, and its tokenizer.
    """
    model, path = settings.model, (workdir or Path()) / "config.json"
    if not model.init_from or ARCHITECTURES[model.arch].weight_map is None:
        return settings
    content, name = "", settings.data.tokenizer
    if workdir is not None and path.is_file():
        recorded = recorded_values(path)
        content, name = recorded.model.checkpoint, name or recorded.data.tokenizer
    content = content or json.dumps(hf.inspect(model.init_from).config)
    model = model.model_copy(update={"checkpoint": content})
    name = name or default_tokenizer(model.init_from)
    data = settings.data.model_copy(update={"tokenizer": name})
    return settings.model_copy(update={"model": model, "data": data})


def recorded_settings(workdir: Path) -> Settings:
    """Read the settings recorded in a run's folder; what a later version added has its default.

    `data.revision` is the commit that the run began with. Raises CheckpointError without a readable
    record, ConfigError if an entry that the user added to a table is not defined now.
    """
    path = workdir / "config.json"
    config = _recorded(path).model_dump()
    if commit := recorded_commit(workdir):
        config["data"]["revision"] = commit
    try:
        return completed(validate(config), workdir)
    except ConfigError as error:
        raise CheckpointError(f"{path}: damaged ({error}); restore it from a copy") from error


def recorded_config(workdir: Path) -> ConfigDict:
    """Read the config with which `train` resumes a run; ConfigError also if `fit` made it."""
    refuse_fit(workdir)
    recorded = _recorded(workdir / "config.json")
    config, values = default_config(), {key: attrgetter(key)(recorded) for key in KNOBS}
    # A setting that is unset is None in the record, and may be "auto" in a config.
    config.update_from_flattened_dict({k: v for k, v in values.items() if v is not None})
    return config


def refuse_fit(workdir: Path) -> None:
    """Raise ConfigError if `fit` made the run, whose model's code a command would need."""
    path = workdir / "config.json"
    if path.is_file() and _record(path).get("made_by") == "fit":
        raise ConfigError(
            f"{workdir}: made by fit with a model of your own, which the command does not have;"
            f" fit called again resumes it, and {workdir / 'export'} has its model"
        )


def _recorded(path: Path) -> Settings:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; name the folder of a run")
    recorded, known = recorded_values(path), tables()
    faults = [
        f"{path}: {key} = {name!r}: no entry of this library; give --config the file that adds it"
        for key, entry in ENTRIES.items()
        if (name := attrgetter(key)(recorded)) not in known[entry.table]
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    return recorded


def recorded_commit(workdir: Path) -> str:
    """Return the recorded commit of the hub's data set; empty if the run reads none."""
    path = workdir / "config.json"
    commit = _record(path).get("data_commit", "") if path.is_file() else ""
    if commit and not COMMIT.fullmatch(str(commit)):
        raise CheckpointError(
            f"{path}: damaged (data_commit = {commit!r:.60}); restore it from a copy"
        )
    return commit


def _record(path: Path) -> dict:
    try:
        return files.read_json(path, Damaged)
    except Damaged as error:
        raise CheckpointError(f"{path}: damaged ({error}); restore it from a copy") from error


def write_config(workdir: Path, settings: Settings, **more: object) -> None:
    """Record all settings of a run, and the fields in `more`, atomically in `config.json`."""
    path = workdir / "config.json"
    record = {"format": checkpoint.FORMAT, "config": settings.model_dump(), **more}
    with write_errors(path):
        with replaced_file(path) as file:
            file.write(json.dumps(record, indent=1).encode())


def flat_settings(settings: Settings) -> dict[str, object]:
    """Return all settings in one dict by dotted key, such as `inner.tx`; tuples become lists."""
    return dict(flatten_dict(settings.model_dump(mode="json"), sep="."))


def recorded_values(path: Path) -> Settings:
    """Read a `config.json`; CheckpointError if it is unreadable or of another version."""
    record = _record(path)
    if record.get("format") != checkpoint.FORMAT:
        raise CheckpointError(f"{path}: a run of another version of adloco_jax; use that version")
    try:
        return files.checked(files.with_tuples(record.get("config")), Settings, "config", Damaged)
    except Damaged as error:
        raise CheckpointError(f"{path}: {error}; restore the file from a copy") from error


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that may change the results of a run."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax.checkpoint", "numpy")
    installed = {name: metadata.version(name.replace(".", "-")) for name in packages}
    return {"adloco_jax": __version__, "python": platform.python_version(), **installed}
