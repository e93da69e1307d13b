"""The folder of a run: its lock, its recorded config, and the state to resume from.

`config.json` in the run's folder holds the resolved config. When a run is resumed, some keys may
change freely, others only with `--accept-config-change`, and the rest may not change.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from filelock import FileLock, Timeout
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from adloco_jax import __version__, files
from adloco_jax.config import default_config, validate
from adloco_jax.crashpoints import crash_point
from adloco_jax.data.files import shard_changes
from adloco_jax.engine.programs import Programs, ensemble_spec, placement
from adloco_jax.engine.spec import Compiled, ProgramKey, Spec
from adloco_jax.errors import CheckpointError, ConfigError, DataError, ResourceError
from adloco_jax.files import replaced_file, write_errors
from adloco_jax.hub import COMMIT
from adloco_jax.knobs import Change
from adloco_jax.loop.adloco import Control, State, Trainer, start
from adloco_jax.loop.plans import share_done
from adloco_jax.run import checkpoint, processes
from adloco_jax.run.build import Run, attention
from adloco_jax.run.checkpoint import Damaged
from adloco_jax.run.choose import Choice, Mode, choose
from adloco_jax.run.ledger import finish, read
from adloco_jax.settings import KNOBS, Settings

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def require_utf8(option: str, path: Path) -> None:
    """Refuse a path that is not UTF-8, because libraries that write to it accept only UTF-8.

    Raises:
      ConfigError: If the path is not UTF-8. The message names the option.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{option} {str(path)[:200]!r}: not UTF-8; name another") from error


def check_workdir(workdir: str | Path) -> None:
    """Refuse a folder in which a run cannot be stored.

    Raises:
      ConfigError: If a run cannot be stored there. The message says why, and what to do.
    """
    folder = Path(workdir)
    require_utf8("--workdir", folder)
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # the folder is made later, or the code below names a file in its place
    except (OSError, ValueError) as error:  # a name too long, with NUL in it, a loop of links
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
    """Create the folder of a run and lock it until the run ends.

    The lock of a process that has ended does not count.

    Process 0 locks the folder for all processes of a run, which must all see the folder.

    Raises:
      ConfigError: If another process uses the folder, if the folder cannot be written, or if it is
        not the same folder for all processes.
      ResourceError: If the disk is full.
    """
    lock = FileLock(workdir / ".lock", timeout=0)

    def acquire() -> None:
        try:
            if processes.is_first():
                workdir.mkdir(parents=True, exist_ok=True)
                lock.acquire()
        except Timeout:
            raise ConfigError(
                f"--workdir {workdir}: another process runs there; wait for it, or name another"
                " folder"
            ) from None
        except OSError as error:
            kind = ResourceError if error.errno in _DISK_FULL else ConfigError
            raise kind(f"--workdir {workdir}: cannot be written ({error.strerror})") from error

    try:
        processes.run_on_all(acquire)
        processes.require_shared(workdir)
        yield
    finally:
        lock.release()


def finished(
    workdir: str | Path,
    config: ConfigDict,
    *,
    accept_config_change: bool = False,
) -> list[str] | None:
    """Whether a folder contains a finished run, and whether its newest checkpoint is damaged.

    Args:
      workdir: The run's folder; it need not exist.
      config: The run's config, which is compared with the recorded config.
      accept_config_change: Whether a resumed run may change settings such as the learning rate.

    Returns:
      None if the run is not finished. For a finished run, a list of faults of its newest
      checkpoint; the list is empty if the checkpoint is not damaged.

    Raises:
      ConfigError: If the config or the folder cannot be used.
      CheckpointError: If the recorded config of a run in the folder cannot be read.
      DataError: If the run's ledger cannot be read.
    """
    folder, settings = Path(workdir), validate(config)
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
      accept: Whether changes that alter the rest of the run are accepted.

    Raises:
      ConfigError: If changes are refused, or need `accept`. The message lists them.
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

    The lines are grouped by whether a resumed run may change the setting (`Knob.resume`).
    """
    before, now = _read(workdir / "config.json"), flat_settings(settings)
    changed: dict[Change, list[str]] = {"harmless": [], "accepted": [], "refused": []}
    for key in KNOBS:
        if key in before and before[key] != now[key]:
            change = f"{key}: was {before[key]!r}, is {now[key]!r}"
            changed[_class(key, settings)].append(change)
    return changed


def recorded_settings(workdir: Path) -> Settings:
    """Read the settings that are recorded in a run's folder.

    Keys that the record lacks, because a later version added them, have their defaults. The
    revision of a data set on the hub is the commit with which the run began.

    Raises:
      CheckpointError: If there is no record, or the record cannot be read.
      ConfigError: If the run uses an entry of a table that this library does not define.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; name the folder of a run")
    known = {
        key: _as_tuples(value)
        for key, value in _read(path, exported=True).items()
        if key in KNOBS and value is not None  # null is what an unset default resolves to
    }
    faults = [
        f"{path}: {key} = {known[key]!r}: no entry of this library; give --config the file that"
        " adds it"
        for key in known
        if KNOBS[key].table and known[key] not in [*KNOBS[key].entries()]
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    config = _flat(default_config().to_dict()) | known
    if commit := recorded_commit(workdir):
        config["data.revision"] = commit
    try:
        return validate(unflatten_dict(config, sep="."))
    except ConfigError as error:
        raise CheckpointError(f"{path}: damaged ({error}); restore it from a copy") from error


def recorded_commit(workdir: Path) -> str:
    """The commit of the hub's data set with which a run began; empty if it uses no such data set.

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


def _as_tuples(value: object) -> object:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def write_config(workdir: Path, settings: Settings, **more: object) -> None:
    """Write the resolved config to the run's folder; an older record is replaced atomically.

    Raises:
      ResourceError: If the file cannot be written.
    """
    path = workdir / "config.json"
    record = {"format": checkpoint.FORMAT, "config": dataclasses.asdict(settings), **more}
    with write_errors(path):
        crash_point("config.write")
        with replaced_file(path) as file:
            file.write(json.dumps(record, indent=1).encode())
            crash_point("config.written")


def _class(key: str, settings: Settings) -> Change:
    # A decaying schedule depends on the total number of rounds or tokens, and so may a rule for the
    # length of rounds. If rounds leave worker updates unsynchronised, the last round of the run has
    # synchronised them.
    inner = settings.inner
    lasting = inner.schedule == "constant" and inner.round_length == "fixed"
    lasting = lasting and not settings.outer.leaves_unsynchronised
    if key in ("num_rounds", "num_tokens") and not lasting:
        return "accepted"
    return cast(Change, KNOBS[key].resume)


def flat_settings(settings: Settings) -> dict[str, object]:
    """Every setting of a run by its full key, such as `inner.tx`; tuples become lists."""
    return _flat(json.loads(json.dumps(dataclasses.asdict(settings))))


def _flat(config: dict) -> dict[str, object]:
    return dict(flatten_dict(config, sep="."))


def _read(path: Path, *, exported: bool = False) -> dict[str, object]:
    """Read the recorded config of a run.

    Args:
      path: The file of the record.
      exported: Whether the run may be of version 0.2, from whose record only the groups for an
        export are read.

    Raises:
      CheckpointError: If the record cannot be read, or was written by another version.
    """
    record = _record(path)
    if exported and "format" not in record:
        groups = ("seed", "model", "data", "eval", "ensemble")
        config = record["config"] if isinstance(record.get("config"), dict) else {}
        return {key: v for key, v in _flat(config).items() if key.split(".")[0] in groups}
    if record.get("format") != checkpoint.FORMAT:
        raise CheckpointError(
            f"{path}: a run of another version of adloco_jax; use that version, or"
            " make a model of a checkpoint with `adloco export`"
        )
    if fault := files.fault(record.get("config"), Settings, "config"):
        raise CheckpointError(f"{path}: {fault}; restore the file from a copy")
    return _flat(record["config"])


# The fields that are read from a checkpoint's `host.json`, with their types.
_HOST: dict[str, Any] = {
    "control": Control,
    "max_batch_size_given": int | None,
    "loss": float | None,
    "wall_s": float,
    "ledger": {"bytes": int, "sha256": str},
    "data": {"fingerprint": str, "shards": list[files.FileRecord]},
}


class Restored(NamedTuple):
    """The content of a checkpoint: the state of the run, and the data of `host.json`."""

    state: State
    host: dict


def read_state(path: Path, settings: Settings, spec: Spec) -> Restored:
    """Read the state of a run from a checkpoint whose hashes are right.

    Raises:
      Damaged: If the content is not a state of this run.
    """
    host = checkpoint.read_host(path)
    if fault := files.fault(host, _HOST, "host"):
        raise Damaged(f"{path}: {fault}")
    control = read_control(path, host["control"], settings)
    owners = tuple(control.owners)
    template = ensemble_spec(spec, owners, placement(spec, ProgramKey("stats", owners)))
    return Restored(State(checkpoint.read_arrays(path, template), control), host)


def read_control(path: Path, data: Any, settings: Settings) -> Control:
    """Make the host's data about a run (`Control`) from JSON, and check that they fit the run.

    Args:
      path: The checkpoint's folder.
      data: The field `control` of the checkpoint's `host.json`. Unknown fields are ignored.
      settings: The run's settings.

    Raises:
      Damaged: If the data do not fit this run.
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
    """Make a `Control` from the dict that `dataclasses.asdict` made; ignore unknown fields."""
    fields = {each.name: data[each.name] for each in dataclasses.fields(Control)}
    names = [each.name for each in dataclasses.fields(Trainer)]
    trainers = [Trainer(**{name: trainer[name] for name in names}) for trainer in data["trainers"]]
    return Control(**fields | {"trainers": trainers})


def begin_control(
    run: Run,
    restored: Restored | None,
    max_batch: int | None,
    on_compile: Callable[[Compiled], None],
) -> tuple[Control, Programs]:
    """Choose the largest micro-batch and how workers run, at the start of an attempt.

    Args:
      run: The data that all attempts of the run share.
      restored: The checkpoint to resume from; None: the run starts.
      max_batch: A smaller micro-batch to use, after memory ran out; else None.
      on_compile: Called after each compilation.
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
    last = max(processes.gather(run.modes.index(mode)))  # all processes use the most frugal choice
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
      The content of the checkpoint, or None if there is no checkpoint; a line for each newer
      checkpoint that is damaged; the `end` line of the ledger, or None if the run is not finished.
    """
    folder, path = run.workdir / "checkpoints", run.workdir / "ledger.jsonl"
    found = checkpoint.newest(folder, lambda at: read_state(at, run.settings, run.spec))
    restored, damage = found or (None, [])
    events = read(path) if path.exists() else []
    processes.gather(None)  # a barrier: process 0 changes the ledger after all have read it
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
    """The part of a checkpoint that is not in arrays, as a dict for `host.json`.

    `recorded` is the result of `Recorder.record`.
    """
    return {
        "control": dataclasses.asdict(state.control),
        "max_batch_size_given": run.settings.batching.max_batch_size,
        **recorded,
        "data": {
            "fingerprint": run.corpus.fingerprint,
            "shards": list(run.corpus.shards),
        },
        "config": dataclasses.asdict(run.settings),
        "versions": versions(),
        "devices": run.spec.machine.describe(),
    }


def versions() -> dict[str, str]:
    """The versions of all software that may change the numbers of a run, by package name."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax.checkpoint", "numpy")
    installed = {name: metadata.version(name.replace(".", "-")) for name in packages}
    return {"adloco_jax": __version__, "python": platform.python_version(), **installed}


def require_equal_processes(run: Run) -> None:
    """Check that all processes have the same config, data, weights and versions.

    Raises:
      ConfigError: In every process, if something differs. The message names it.
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
