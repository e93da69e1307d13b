"""What has changed since a run was recorded, and the command that resumes the run."""

import contextlib
import shlex
from pathlib import Path

import jax
from filelock import FileLock, Timeout
from ml_collections import ConfigDict

from adloco_jax.config import validate
from adloco_jax.errors import CheckpointError, ConfigError, DataError
from adloco_jax.loop.plans import share_done
from adloco_jax.run import checkpoint
from adloco_jax.run.checkpoint import Damaged
from adloco_jax.run.folder import check_workdir, flat_settings, recorded_values
from adloco_jax.run.ledger import finish, read
from adloco_jax.settings import ENTRIES, KNOBS, Change, Settings, change


def finished(
    workdir: str | Path,
    config: ConfigDict,
    *,
    accept_config_change: bool = False,
) -> list[str] | None:
    """Return the faults of a finished run's newest checkpoint; None if it is not finished.

    Finished: the ledger says so, the config asks for no more, and the model was exported. Raises
    ConfigError, CheckpointError or DataError if config, record or ledger cannot be used.
    """
    folder, settings = Path(workdir), validate(config, workdir)
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
    """Compare settings with those recorded in the run's folder, if there is a run.

    Raises ConfigError with the changes that are refused, or need `accept`; CheckpointError if the
    record cannot be read.
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
    """Describe the settings that differ from the record, by kind: harmless, accepted, refused."""
    before, now = flat_settings(recorded_values(workdir / "config.json")), flat_settings(settings)
    changed: dict[Change, list[str]] = {"harmless": [], "accepted": [], "refused": []}
    for key in KNOBS:
        if before[key] != now[key]:
            line = f"{key}: was {before[key]!r}, is {now[key]!r}"
            changed[_class(key, settings)].append(line)
    return changed


def how_to_resume(workdir: Path, settings: Settings, *, command: str, by_fit: bool = False) -> str:
    """Return the command that resumes a run, or say which call does."""
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
    """Return the folder of the newest run in `runs/` that a command began and nobody continues."""
    found = {}
    for path in Path("runs").glob("*/ledger.jsonl"):
        # A ledger may be damaged, or of another user; the run may be under way.
        with contextlib.suppress(DataError, OSError, Timeout):
            events = read(path)
            if events and events[0].get("command") == command and finish(events) is None:
                with FileLock(path.parent / ".lock", timeout=0):
                    found[path.stat().st_mtime] = path.parent
    return found[max(found)] if found else None


def _class(key: str, settings: Settings) -> Change:
    # The length may change freely only if no earlier round depends on it, as with a decaying
    # learning rate, perhaps a rule for the length of rounds, and rounds that leave updates
    # unsynchronised, which the last round has synchronised.
    inner = settings.inner
    lasting = inner.schedule == "constant" and inner.round_length == "fixed"
    lasting = lasting and not settings.outer.leaves_unsynchronised
    if key in ("num_rounds", "num_tokens") and not lasting:
        return "accepted"
    return change(key)
