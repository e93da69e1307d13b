"""The folder of a run: its lock, its recorded config, and the state to resume from.

The file `config.json` in the run's folder records the value of every setting. When the run is
resumed, some settings may have changed. Others may have changed only with
`--accept-config-change`. All other settings must be the same.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import platform
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from filelock import FileLock, Timeout
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from adloco_jax import __version__, files, hf
from adloco_jax.config import default_config, tables, validate, with_recorded_sizes
from adloco_jax.data.files import shard_changes
from adloco_jax.data.tokenizers import default_tokenizer
from adloco_jax.engine.programs import Programs, ensemble_spec, placement
from adloco_jax.engine.spec import OnCompile, ProgramKey, Spec
from adloco_jax.errors import CheckpointError, ConfigError, DataError, ResourceError
from adloco_jax.files import replaced_file, write_errors
from adloco_jax.hub import COMMIT
from adloco_jax.loop.adloco import Control, State, Trainer, start
from adloco_jax.loop.plans import share_done
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.run import checkpoint, processes
from adloco_jax.run.build import Run, attention
from adloco_jax.run.checkpoint import Damaged
from adloco_jax.run.choose import Choice, Mode, choose
from adloco_jax.run.ledger import finish, read
from adloco_jax.settings import ENTRIES, KNOBS, Change, Settings, change

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def require_utf8(option: str, path: Path) -> None:
    """Check that a path is UTF-8, because some libraries that write to it accept only UTF-8.

    Raises:
      ConfigError: If the path is not UTF-8. The message names the option that gave the path.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{option} {str(path)[:200]!r}: not UTF-8; name another") from error


def check_workdir(workdir: str | Path) -> None:
    """Check that a run can be stored in a folder; the folder need not exist.

    Raises:
      ConfigError: If a run cannot be stored there. The message says why, and what to do.
    """
    folder = Path(workdir)
    require_utf8("--workdir", folder)
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # the folder is made later; if one of its parents is a file, this is found below
    except (OSError, ValueError) as error:  # the name is too long or has a NUL; links form a loop
        raise ConfigError(f"--workdir {str(workdir)[:200]!r}: {error}; name another") from error
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
    """Create the folder of a run, and lock it as long as the `with` block runs.

    If a process is killed, the operating system releases its lock. If a run has several processes,
    process 0 locks the folder for all of them. All processes must see the same folder.

    Raises:
      ConfigError: If another run uses the folder, if the folder cannot be written, or if it is not
        the same folder for all processes.
      ResourceError: If the disk is full.
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
    """Check that a run can write to a folder, before its data are loaded; leave nothing there.

    Raises:
      ConfigError: If another run uses the folder, or it cannot be written.
      ResourceError: If the disk is full.
    """
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


def finished(
    workdir: str | Path,
    config: ConfigDict,
    *,
    accept_config_change: bool = False,
) -> list[str] | None:
    """Check whether a folder contains a finished run, and whether its newest checkpoint is whole.

    A run is finished if its ledger says so, if the config asks for no more rounds or tokens, and if
    the model was exported.

    Args:
      workdir: The run's folder; it need not exist.
      config: The run's config, which is compared with the recorded config.
      accept_config_change: Whether the config may differ from the recorded one in settings such as
        the learning rate.

    Returns:
      None if the run is not finished. Otherwise a list of the faults of the run's newest
      checkpoint. The list is empty if the checkpoint is not damaged.

    Raises:
      ConfigError: If the config or the folder cannot be used.
      CheckpointError: If the recorded config of a run in the folder cannot be read.
      DataError: If the run's ledger cannot be read.
    """
    folder, settings = Path(workdir), validate(with_recorded_sizes(config, workdir))
    check_config(folder, settings, accept=accept_config_change)
    ledger, checkpoints = folder / "ledger.jsonl", folder / "checkpoints"
    end = finish(read(ledger)) if ledger.exists() else None
    if not end or share_done(end["rounds"], end["tokens_total"], settings) < 1:
        return None
    if not (folder / "export").exists():
        return None
    rounds = checkpoint.list_rounds(checkpoints)
    if not rounds:
        return [f"{checkpoints}: gone, or empty"]
    try:
        checkpoint.verify(checkpoints / str(rounds[0]))
    except Damaged as error:
        return [str(error)]
    return []


def check_config(workdir: Path, settings: Settings, *, accept: bool) -> None:
    """Compare the settings of a run to be resumed with the settings recorded in its folder.

    The folder itself is checked first (`check_workdir`).

    Args:
      workdir: The run's folder. If it contains no run, nothing is compared.
      settings: The settings of the run to be resumed.
      accept: Whether changes that alter the following rounds, such as another learning rate, are
        accepted.

    Raises:
      ConfigError: If settings have changed that may not change, or that may change only with
        `accept`. The message lists the changes.
      CheckpointError: If the recorded config cannot be read.
    """
    check_workdir(workdir)
    path = workdir / "config.json"
    if not path.exists():
        if (workdir / "checkpoints").exists() or (workdir / "ledger.jsonl").exists():
            raise CheckpointError(
                f"{path}: missing from a folder that holds a run; restore it from a copy"
            )
        return
    changed = changes(workdir, settings)
    lines = changed["refused"]
    if lines:
        lines.append(f"{workdir}: these make another run; name another folder, or change them back")
    if changed["accepted"] and not accept:
        lines += changed["accepted"]
        lines.append(
            f"{workdir}: these change the run from here on; --accept-config-change to do so"
        )
    if lines:
        raise ConfigError("\n".join(lines))


def changes(workdir: Path, settings: Settings) -> dict[Change, list[str]]:
    """Describe the settings that differ from those recorded in the folder of a run.

    The result has one list of lines for each kind of change: "harmless", "accepted" only if the
    user says so, and "refused". The kind of a change is declared with the setting.
    """
    before, now = flat_settings(_read(workdir / "config.json")), flat_settings(settings)
    changed: dict[Change, list[str]] = {"harmless": [], "accepted": [], "refused": []}
    for key in KNOBS:
        if before[key] != now[key]:
            line = f"{key}: was {before[key]!r}, is {now[key]!r}"
            changed[_class(key, settings)].append(line)
    return changed


def with_checkpoint(settings: Settings, workdir: Path | None = None) -> Settings:
    """Add to the settings the description and the tokenizer of the checkpoint `model.init_from`.

    The description is the checkpoint's `config.json`. A run records it with the tokenizer's name,
    and needs the checkpoint's weights only once.

    Args:
      settings: The run's settings.
      workdir: The run's folder. If it contains a run, the description is that of the record.

    Raises:
      UserError: If the checkpoint cannot be read.
    """
    model, path = settings.model, (workdir or Path()) / "config.json"
    if not model.init_from or ARCHITECTURES[model.arch].weight_map is None:
        return settings
    content, name = "", settings.data.tokenizer
    if workdir is not None and path.is_file():
        recorded = _read(path)
        content, name = recorded.model.checkpoint, name or recorded.data.tokenizer
    content = content or json.dumps(hf.inspect(model.init_from).config)
    model = model.model_copy(update={"checkpoint": content})
    name = name or default_tokenizer(model.init_from)
    data = settings.data.model_copy(update={"tokenizer": name})
    return settings.model_copy(update={"model": model, "data": data})


def recorded_settings(workdir: Path) -> Settings:
    """Read the settings that are recorded in a run's folder.

    Settings that the record lacks, because a later version added them, have their defaults. If the
    run reads a data set on the hub, `data.revision` is the commit that the run began with.

    Raises:
      CheckpointError: If there is no record, or the record cannot be read.
      ConfigError: If the run uses an entry that the user added to a table of the library, for
        instance an optimizer, and that is not defined now.
    """
    path = workdir / "config.json"
    config = _recorded(path).model_dump()
    if commit := recorded_commit(workdir):
        config["data"]["revision"] = commit
    try:
        return with_checkpoint(validate(config), workdir)
    except ConfigError as error:
        raise CheckpointError(f"{path}: damaged ({error}); restore it from a copy") from error


def recorded_config(workdir: Path) -> ConfigDict:
    """Read the config with which `train` resumes the run in a folder.

    Raises:
      CheckpointError: If there is no record, or the record cannot be read.
      ConfigError: If the run was made by `fit`, or uses an entry of a table that is not defined
        now.
    """
    refuse_fit(workdir)
    recorded = _recorded(workdir / "config.json")
    config, values = default_config(), {key: attrgetter(key)(recorded) for key in KNOBS}
    # A setting that is unset is None in the record, and may be "auto" in a config.
    config.update_from_flattened_dict({k: v for k, v in values.items() if v is not None})
    return config


def refuse_fit(workdir: Path) -> None:
    """Refuse a run that `fit` made, for a command that would need the model's code.

    Raises:
      ConfigError: If the run was made by `fit`.
      CheckpointError: If the record of the run's config cannot be read.
    """
    path = workdir / "config.json"
    if path.is_file() and _record(path).get("made_by") == "fit":
        raise ConfigError(
            f"{workdir}: made by fit with a model of your own, which the command does not have;"
            f" fit called again resumes it, and {workdir / 'export'} has its model"
        )


def how_to_resume(workdir: Path, settings: Settings, *, command: str, by_fit: bool = False) -> str:
    """Return the command that resumes a run, or say which call does.

    Args:
      workdir: The run's folder.
      settings: The run's settings.
      command: The command that started the run; empty if a Python program did.
      by_fit: Whether the run was made by `fit`.
    """
    now = flat_settings(settings)
    adds_entries = any(now[key] not in entry.names.split() for key, entry in ENTRIES.items())
    if by_fit or (adds_entries and not command):
        return f"{'fit' if by_fit else 'train'} called again with the same arguments"
    folder = shlex.quote(str(workdir))
    if command.startswith("adloco compare "):
        line = command
    elif adds_entries:  # only the config file has them
        named = {folder, f"--workdir={folder}"} & set(command.split())
        line = command if named else f"{command} --workdir {folder}"
    else:
        line = f"adloco train {folder}"
    if jax.process_count() > 1:
        line += ", in each process with its options for several processes"
    return line


def unfinished(command: str) -> Path | None:
    """Return the folder of the newest run in `runs/` that a command began and nobody continues.

    The result is None if there is no such run.
    """
    found = {}
    for path in Path("runs").glob("*/ledger.jsonl"):
        # A ledger may be damaged, or of another user; the run may be under way.
        with contextlib.suppress(DataError, OSError, Timeout):
            events = read(path)
            if events and events[0].get("command") == command and finish(events) is None:
                with FileLock(path.parent / ".lock", timeout=0):
                    found[path.stat().st_mtime] = path.parent
    return found[max(found)] if found else None


def _recorded(path: Path) -> Settings:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; name the folder of a run")
    recorded, known = _read(path), tables()
    faults = [
        f"{path}: {key} = {name!r}: no entry of this library; give --config the file that adds it"
        for key, entry in ENTRIES.items()
        if (name := attrgetter(key)(recorded)) not in known[entry.table]
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    return recorded


def recorded_commit(workdir: Path) -> str:
    """Return the commit of the hub's data set that a run reads, as recorded in the run's folder.

    The result is empty if the run does not read a data set on the hub.

    Raises:
      CheckpointError: If the record cannot be read.
    """
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
    """Record all settings of a run, and the fields in `more`, in `config.json` in its folder.

    An older record is replaced atomically.

    Raises:
      ResourceError: If the file cannot be written.
    """
    path = workdir / "config.json"
    record = {"format": checkpoint.FORMAT, "config": settings.model_dump(), **more}
    with write_errors(path):
        with replaced_file(path) as file:
            file.write(json.dumps(record, indent=1).encode())


def _class(key: str, settings: Settings) -> Change:
    # The length of a run may change freely only if no earlier round depends on the length. A
    # decaying schedule of the learning rate depends on the length, and a rule for the length of
    # rounds may. Also, if rounds leave updates of workers unsynchronised, the last round of the run
    # has synchronised them; in a longer run this round would have left them unsynchronised.
    inner = settings.inner
    lasting = inner.schedule == "constant" and inner.round_length == "fixed"
    lasting = lasting and not settings.outer.leaves_unsynchronised
    if key in ("num_rounds", "num_tokens") and not lasting:
        return "accepted"
    return change(key)


def flat_settings(settings: Settings) -> dict[str, object]:
    """Return all settings of a run in one dict, with keys such as `inner.tx`.

    Tuples become lists, as in JSON.
    """
    return dict(flatten_dict(settings.model_dump(mode="json"), sep="."))


def _read(path: Path) -> Settings:
    """Read the recorded config of a run, the file `config.json` in its folder.

    Raises:
      CheckpointError: If the record cannot be read, or was written by another version.
    """
    record = _record(path)
    if record.get("format") != checkpoint.FORMAT:
        raise CheckpointError(f"{path}: a run of another version of adloco_jax; use that version")
    if fault := files.fault(record.get("config"), Settings, "config"):
        raise CheckpointError(f"{path}: {fault}; restore the file from a copy")
    return Settings.model_validate_json(json.dumps(record["config"]), extra="ignore")


# The fields of a checkpoint's `host.json` that are read, and their types.
_HOST: dict[str, Any] = {
    "control": Control,
    "max_batch_size_given": int | None,
    "loss": float | None,
    "wall_s": float,
    "data": {"fingerprint": str, "shards": list[files.FileRecord]},
}


class Restored(NamedTuple):
    """The content of a checkpoint: the state of the run, and all fields of `host.json`."""

    state: State
    host: dict


def read_state(path: Path, settings: Settings, spec: Spec) -> Restored:
    """Read the state of a run from a checkpoint whose files have the recorded hashes.

    Raises:
      Damaged: If the content does not fit the settings of this run.
    """
    host = checkpoint.read_host(path)
    if fault := files.fault(host, _HOST, "host"):
        raise Damaged(f"{path}: {fault}")
    control = read_control(path, host["control"], settings)
    owners = tuple(control.owners)
    template = ensemble_spec(spec, owners, placement(spec, ProgramKey("stats", owners)))
    return Restored(State(checkpoint.read_arrays(path, template), control), host)


def read_control(path: Path, data: Any, settings: Settings) -> Control:
    """Make the host's data about a run (`Control`) from JSON, and check that they fit the settings.

    Args:
      path: The checkpoint's folder.
      data: The field `control` of the checkpoint's `host.json`. Unknown fields are ignored.
      settings: The run's settings.

    Raises:
      Damaged: If the data do not fit the settings of this run, or are of another round.
    """
    if fault := files.fault(data, Control, "host.control"):
        raise Damaged(f"{path}: {fault}")
    control, ensemble = control_from_json(data), settings.ensemble
    num_trainers, owners = len(control.trainers), control.owners
    if num_trainers > ensemble.num_trainers or len(owners) > ensemble.num_workers:
        raise Damaged(f"{path}: not this run's: {num_trainers} trainers, {len(owners)} workers")
    if set(owners) != set(range(num_trainers)) or control.round != int(path.name):
        raise Damaged(f"{path}: not this run's: owners {owners}, round {control.round}")
    return control


def control_from_json(data: dict) -> Control:
    """Make the host's data about a run (`Control`) from a dict with its fields.

    The dict is of the form that `dataclasses.asdict` gives. Unknown fields are ignored.
    """
    fields = {each.name: data[each.name] for each in dataclasses.fields(Control)}
    names = [each.name for each in dataclasses.fields(Trainer)]
    trainers = [Trainer(**{name: trainer[name] for name in names}) for trainer in data["trainers"]]
    return Control(**fields | {"trainers": trainers})


def begin_control(
    run: Run,
    restored: Restored | None,
    max_batch: int | None,
    on_compile: OnCompile,
) -> tuple[Control, Programs]:
    """Choose the largest micro-batch, and how devices run workers, before the first round.

    All processes of a run make the same choice.

    Args:
      run: The data of the run.
      restored: The checkpoint to resume from; None: the run starts.
      max_batch: The micro-batch to use after an earlier attempt ran out of memory. None: there was
        no such attempt.
      on_compile: Called before and after each compilation.

    Returns:
      The host's data about the run, with the chosen micro-batch, and the compiled programs.
    """
    settings = run.settings
    size, control = settings.batching.max_batch_size, restored.state.control if restored else None
    if restored and control and (size is None or size == restored.host["max_batch_size_given"]):
        size = control.max_batch_size
    size = size if max_batch is None else max_batch

    def chosen(allowed: Sequence[Mode]) -> Choice:
        how = {"size": size, "allowed": allowed, "on_compile": on_compile}
        return choose(settings, run.spec, run.loss_of, **how)

    choice = chosen(run.modes)
    mode = Mode(choice.programs.spec.in_turn, choice.programs.spec.remat)
    # All processes use the most frugal of the modes that they have chosen: the last one, because
    # modes are in order of preference.
    last = max(processes.gather(run.modes.index(mode)))
    if run.modes[last] != mode:
        choice.programs.close()
        choice = chosen(run.modes[last : last + 1])
    size = min(processes.gather(choice.max_batch_size))
    if control is None:
        return start(settings, size), choice.programs
    return dataclasses.replace(control, max_batch_size=size), choice.programs


def restore(run: Run) -> tuple[Restored | None, list[str], dict | None]:
    """Restore the state of the newest checkpoint that is not damaged.

    Returns:
      Three values. The first is the content of the checkpoint; None if there is no checkpoint. The
      second is a list of lines, one for each newer checkpoint that is damaged. The third is the
      `end` line of the ledger; None if the run is not finished.

    Raises:
      CheckpointError: If all checkpoints are damaged, or were deleted.
      DataError: If the data have changed since the run began.
    """
    folder, path = run.workdir / "checkpoints", run.workdir / "ledger.jsonl"
    found = checkpoint.newest(folder, lambda at: read_state(at, run.settings, run.spec))
    restored, damage = found or (None, [])
    events = read(path) if path.exists() else []
    # All processes wait here for one another, because process 0 later changes the ledger that the
    # others read.
    processes.gather(None)
    if restored is None and any(event["event"] == "checkpoint" for event in events):
        raise CheckpointError(
            f"{folder}: the checkpoints that {path.name} records are gone; restore them from a"
            " copy, or name another folder"
        )
    recorded = restored.host["data"] if restored and not run.accept_data_change else None
    if recorded and recorded["fingerprint"] != run.corpus.fingerprint:
        changes = shard_changes(recorded["shards"], list(run.corpus.shards))
        advice = (
            f"{run.workdir}: the data have changed since this run began; restore them, or"
            " --accept-data-change to resume with these"
        )
        raise DataError("\n".join([*changes, advice]))
    return restored, damage, finish(events)


def host(run: Run, recorded: dict, state: State) -> dict:
    """Return the part of a checkpoint that is not in arrays, as a dict for the file `host.json`.

    `recorded` is the result of `Recorder.record`: loss and seconds.
    """
    return {
        "control": dataclasses.asdict(state.control),
        "max_batch_size_given": run.settings.batching.max_batch_size,
        **recorded,
        "data": {
            "fingerprint": run.corpus.fingerprint,
            "shards": list(run.corpus.shards),
        },
        "config": run.settings.model_dump(),
        "versions": versions(),
        "devices": run.spec.machine.describe(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that may change the results of a run.

    The key is the name of the package.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "orbax.checkpoint", "numpy")
    installed = {name: metadata.version(name.replace(".", "-")) for name in packages}
    return {"adloco_jax": __version__, "python": platform.python_version(), **installed}


def require_equal_processes(run: Run) -> None:
    """Check that all processes have the same config, data, weights and versions.

    Raises:
      ConfigError: In every process, if something differs. The message names what differs.
    """
    if jax.process_count() == 1:
        return
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(run.params):
        weights.update(f"{leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes())
    keys = flat_settings(run.settings).items()
    processes.require_equal(
        {key: repr(value) for key, value in keys if key not in ("data.path", "data.heldout_path")}
        | {f"the version of {name}": version for name, version in versions().items()}
        | {
            "model_shards, as found there": repr(run.spec.model_shards),
            "attention, as found there": repr(attention(run.settings, run.spec.machine)),
            "the data": run.corpus.fingerprint,
            "the weights it starts from": weights.hexdigest(),
        },
        "all processes of a run need the same",
    )
