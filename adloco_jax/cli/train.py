"""The commands `adloco train` and `adloco plan`.

A table maps names to what an option can name, such as optimizers; a config file can add entries.
The record of a run is `config.json` in its folder, with the settings that it began with.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ml_collections import ConfigDict

from adloco_jax.cli.keys import override
from adloco_jax.cli.names import add_entries, find_config, is_run, load_config, runs_in
from adloco_jax.config import completed, validate
from adloco_jax.errors import ConfigError, ResourceError, reason
from adloco_jax.settings import OPTIONS, Config, Settings


def configure(options: argparse.Namespace) -> tuple[Path, Config]:
    """Load a config file, or a named run's recorded config, and set the keys of the command line.

    A config file that is named beside a run only adds entries to tables, such as an optimizer.
    Returns the path of the file or of the run's folder, and the validated config. For a named run,
    `options.workdir` becomes its folder.

    Raises:
      ConfigError: If the file or the resulting config has faults, of which the message lists all;
        or if options contradict one another, or no config is named.
    """
    is_resumed = bool(options.name) and is_run(options.name)
    if options.name and options.config and not is_resumed:
        raise ConfigError(f"{options.name}: unexpected, as --config names a config")
    if is_resumed:
        path, config = _recorded(options)
    else:
        path, config = _load(options.name or options.config, options.size)
    for key in OPTIONS:
        text = vars(options)[f"config.{key}"]  # the option's name has a dot, so no attribute
        if text is not None:
            override(config, key, text)
    return path, validate(config)


def _load(name: str | None, size: str | None) -> tuple[Path, ConfigDict]:
    """Find and run a config file; return its path, and the config.

    `name` is a path or the name of a config of the package, `size` the argument of those that have
    sizes. None: not given on the command line. Raises ConfigError if no config is named or found,
    or the file has a fault.
    """
    if name is None:
        raise ConfigError(
            "no config; write: adloco train quickstart, or another name that adloco configs"
            " lists, or a file"
        )
    path = find_config(name)
    if size:
        return path, load_config(path, size=size)
    return path, load_config(path)


def _recorded(options: argparse.Namespace) -> tuple[Path, ConfigDict]:
    """Read the recorded config of a named run; return its folder, and the config.

    Sets `options.workdir` to the folder, so that the run is resumed there. Raises ConfigError if
    `--size` or another `--workdir` is given, `fit` made the run, or an entry that it needs in a
    table is not defined. Raises CheckpointError if the record cannot be read.
    """
    from adloco_jax.run.kept.folder import recorded_config

    run = Path(options.name)
    if options.size:
        raise ConfigError(f"--size {options.size}: {run} keeps its size; leave it out")
    if options.workdir not in (None, run):
        raise ConfigError(f"{run}: a run, which stays in its folder; leave --workdir out")
    options.workdir = run
    add_entries(options.config)
    return run, recorded_config(run)


def train(options: argparse.Namespace, command: str) -> None:
    """Train a run, or resume it; a finished one has only its table and report made again.

    `command` is the command line, which the run records. Raises a UserError if the config, the data
    or the run's folder cannot be used, or training ends with such an error.
    """
    path, settings = configure(options)
    _connect(options, needs_folder=True)
    # Imported only here, so that an error in the config is reported before JAX is imported.
    from adloco_jax import training
    from adloco_jax.host import processes
    from adloco_jax.run.kept.folder import faults_if_finished, how_to_resume, runs_of_command
    from adloco_jax.study import report

    folder = options.workdir
    if folder is None:
        folder = f"runs/{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
        # Runs of the same command, the newest of each kind, or None.
        unfinished, complete = runs_of_command(runs_in("runs"), command)
        if unfinished:
            how = how_to_resume(unfinished)
            print(f"{unfinished}: an unfinished run of this command; to resume it: {how}")
        elif complete:
            print(f"{complete}: a finished run of this command; {folder} starts anew")

    accept_config_change = options.accept_config_change
    # `completed` finds what the config leaves unset, such as sizes of a checkpoint. What fails in
    # one process is raised in all by `run_on_all`, so that none waits forever.
    with processes.only_first_prints():
        settings = processes.run_on_all(lambda: completed(settings, folder, note=print))
    # Lines on damaged checkpoints of a finished run; None if the run is not finished. All processes
    # go by what process 0 has found.
    damage = processes.run_on_all(
        lambda: faults_if_finished(folder, settings, accept_config_change=accept_config_change)
    )
    damage = processes.broadcast(damage)
    if damage is None:
        training.train(
            settings,
            folder,
            command=command,
            accept_config_change=accept_config_change,
            accept_data_change=options.accept_data_change,
        )
        return

    if processes.is_first():
        print(f"{folder}: already finished; nothing was trained")
        for line in damage:
            print(f"damaged: {line}", file=sys.stderr)
        report.conclude(folder)  # the table and the report
    processes.barrier("the report is written")  # no process ends while process 0 still writes


def plan(options: argparse.Namespace, command: str) -> None:
    """Print the plan of a run: its memory and communication, and a round's seconds over a link.

    `command`, the command line, is not used: only a run records it. With `--device` the plan is for
    devices that are not here, and no rows are prepared. Raises ConfigError if options or the config
    have faults, DataError if the data cannot be used, and ResourceError if the run does not fit the
    devices.
    """
    if options.save is not None and not options.device:
        raise ConfigError("--save: saves a plan for devices; add --device KINDxN")
    if options.device is not None:
        _plan_devices(options)
        return
    _, settings = configure(options)
    _connect(options, needs_folder=False)
    from adloco_jax.elastic.transport import require_known_engine
    from adloco_jax.host import processes
    from adloco_jax.run.before import estimate

    require_known_engine(settings.engine.kind)
    workdir = options.workdir
    with processes.only_first_prints():
        settings = processes.run_on_all(lambda: completed(settings, workdir, note=print))
        text = estimate.plan(
            settings,
            workdir,
            memory=options.memory,
            accept_config_change=options.accept_config_change,
        )
        print(text)
        _plan_sites(options, settings)


def _plan_devices(options: argparse.Namespace) -> None:
    """Print the plan of a run on devices that are not here; without a kind, the kinds that exist.

    Raises ConfigError if there is no such kind, or the config has faults. Raises ResourceError,
    after all is printed and saved, if the run does not fit there.
    """
    with _without_native_messages():
        from adloco_jax.run.before.estimate import check_kind, device_plan, kinds

        if options.device == "":
            print(*kinds(), sep="\n")
            return
        check_kind(options.device)  # first, because faults of the config would hide this one
        _, settings = configure(options)
        lines, record = device_plan(settings, options.device)
        print(*lines, sep="\n")
    if options.save is not None:
        options.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not record["fits"]:
        raise ResourceError(f"--device {options.device}: {record['fault']}")


def _plan_sites(options: argparse.Namespace, settings: Settings) -> None:
    """Print the seconds of a round over slow links, if `--link` or the config names a link.

    A site is a machine that trains; all sites have equal links. A link is its rate in each
    direction, such as "10Mbit/s". There is a site for each worker unless `--sites` says how many.
    `--tokens-per-s` is the speed of one site; without it, it is measured here. Raises ConfigError
    for fewer than two sites, or if `--tokens-per-s` is not above 0.
    """
    link = options.link or settings.engine.link
    if not link:
        return
    # Imported only here, as elsewhere in this module: they import JAX, which takes seconds. So an
    # error in the config is reported before.
    from adloco_jax.engine.model import spec_of
    from adloco_jax.engine.spec import this_machine
    from adloco_jax.study.sites import site_lines

    sites = options.sites
    if sites is None:
        sites = settings.ensemble.num_workers
    lines = site_lines(
        settings,
        spec_of(settings, this_machine()),
        link=link,
        sites=sites,
        tokens_per_s=options.tokens_per_s,
    )
    print(*lines, sep="\n")


def _connect(options: argparse.Namespace, *, needs_folder: bool) -> None:
    """Connect the processes of a run, if the command line names several; then check the devices.

    `needs_folder`: several processes must be given the run's folder, which each would else name by
    its own clock. Raises ConfigError if this folder is missing, a part of the address is missing or
    wrong, or JAX cannot use the devices; ResourceError if the processes cannot be connected.
    """
    address = (options.coordinator, options.num_processes, options.process_id)
    if options.distributed or any(value is not None for value in address):
        from adloco_jax.host import processes

        processes.connect(
            coordinator=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
            timeout_s=options.meeting_s,
        )
        if needs_folder and options.workdir is None:
            raise ConfigError("--workdir: several processes need the name of one folder")
    require_devices()


@contextlib.contextmanager
def _without_native_messages() -> Iterator[None]:
    """Discard what JAX and XLA write to the standard error, as long as the `with` block runs.

    They write to the file descriptor, past `sys.stderr`. JAX, which is imported in the block, is
    told not to look for devices.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    stderr = 2  # its file descriptor
    kept = os.dup(stderr)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stderr)
    try:
        yield
    finally:
        os.dup2(kept, stderr)
        os.close(kept)


def require_devices() -> None:
    """Check that JAX can use the devices that the environment variable JAX_PLATFORMS names.

    Raises:
      ConfigError: If JAX cannot use them on this machine.
    """
    wanted = os.environ.get("JAX_PLATFORMS")
    if not wanted:
        return
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        cause = reason(error, limit=200)
        raise ConfigError(
            f"JAX_PLATFORMS={wanted}: JAX cannot use it here ({cause}); unset it, or"
            " install the extra for the device (docs/start.md)"
        ) from error
