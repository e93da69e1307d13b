"""What has changed since a run was recorded, and the command that resumes the run.

When a run is resumed, some settings may have changed. Others may have changed only with
`--accept-config-change`. All other settings must be the same.
"""

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
    before, now = flat_settings(recorded_values(workdir / "config.json")), flat_settings(settings)
    changed: dict[Change, list[str]] = {"harmless": [], "accepted": [], "refused": []}
    for key in KNOBS:
        if before[key] != now[key]:
            line = f"{key}: was {before[key]!r}, is {now[key]!r}"
            changed[_class(key, settings)].append(line)
    return changed


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
