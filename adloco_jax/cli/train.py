"""Trains as a config describes, prints the plan, or resumes a run that was stopped.

adloco train --config quickstart [--config.GROUP.KEY=VALUE ...] [--workdir DIR] [--plan]

--config is a file, or a name that `adloco configs` lists. The same command with the same --workdir
resumes a run that was stopped. Every key of the config is an option, of which the last value
counts. To run on several processes, start each with this command and --distributed (under Slurm,
Open MPI, Kubernetes) or --coordinator, --num_processes and --process_id.
"""

import difflib
import re
import resource
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict

from adloco_jax.cli.parser import with_separator
from adloco_jax.config import (
    allowed,
    config_help,
    default_config,
    define_flags,
    find_config,
    load_config,
    override,
    unknown_key_fault,
    validate,
)
from adloco_jax.errors import ConfigError, ResourceError
from adloco_jax.settings import KNOBS

_MIN_ADDRESS_BYTES = 4 * 2**30

# Of each: type, name, default, help, and limits.
_FLAGS: tuple[tuple[Any, ...], ...] = (
    (flags.DEFINE_string, "config", None, "a file, or a name", {"allow_overwrite": False}),
    (flags.DEFINE_string, "workdir", None, "the run's folder; by default a new one in runs/"),
    (flags.DEFINE_bool, "plan", False, "print what would run and what was not checked, and stop"),
    (flags.DEFINE_bool, "accept_config_change", False, "resume with changed learning rates etc."),
    (flags.DEFINE_bool, "accept_data_change", False, "resume with other data"),
    (flags.DEFINE_bool, "distributed", False, "one of several processes, found by JAX"),
    (flags.DEFINE_string, "coordinator", None, "HOST:PORT of process 0 of several"),
    (flags.DEFINE_integer, "num_processes", None, "number of processes", {"lower_bound": 1}),
    (flags.DEFINE_integer, "process_id", None, "index of this process", {"lower_bound": 0}),
    (flags.DEFINE_integer, "meeting_s", 300, "seconds to wait for the other processes (300)"),
    (flags.DEFINE_bool, "help", False, "print this, and stop"),
)


def run(argv: Sequence[str]) -> int:
    """Trains, resumes, or prints the plan or the options."""
    options, words = _parse(argv)
    if options.help:
        print(f"{__doc__}\n{_own_help()}\n\n{config_help()}")
        return 0
    path, config = _configure(options, words)
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY and addresses < _MIN_ADDRESS_BYTES:
        raise ResourceError(
            f"the process may address {addresses} bytes (ulimit -v), need {_MIN_ADDRESS_BYTES}: "
            "with less, JAX aborts while it starts its threads"
        )
    logging.set_verbosity(logging.FATAL)  # what a library logs on an error, it also raises
    own = ("--coordinator=", "--num_processes=", "--process_id=")  # differ between processes
    shared = [word for word in argv if not word.startswith(own)]
    _execute(options, path, config, shlex.join(["python", "-m", "adloco_jax.main", *shared]))
    return 0


def _own_help() -> str:
    """The options that are no keys of a config."""
    return "\n".join(f"  --{name.replace('_', '-'):22} {text}" for _, name, _, text, *_ in _FLAGS)


def _parse(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """The options, values of config keys as text, and the words that are none."""
    options = flags.FlagValues()
    options.set_gnu_getopt(True)  # options may stand between other words
    for define, name, default, text, *limits in _FLAGS:
        define(name, default, text, flag_values=options, **dict(*limits))
    define_flags(options)
    try:
        spelled = [with_separator(word, "_") for word in argv]
        words = options(["adloco", *spelled], known_only=True)
    except (flags.Error, ValueError) as error:
        raise ConfigError(str(error)) from error
    return options, words[1:]


def _configure(options: flags.FlagValues, words: Sequence[str]) -> tuple[Path, ConfigDict]:
    """The config file's path and its config with all overrides; raises all faults at once."""
    faults = [_unknown(word, options) for word in words]
    path, config, is_loaded = Path(), default_config(), False  # to check overrides without a file
    try:
        path = find_config(options.config)
        config, is_loaded = load_config(path, "get_config", ConfigDict), True
    except ConfigError as error:
        faults.insert(0, str(error))
    for key in KNOBS:
        if (text := options[f"config.{key}"].value) is None:
            continue
        try:
            override(config, key, text)
        except ConfigError as error:
            faults.append(str(error))
    if is_loaded:
        try:
            validate(config)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return path, config


def _unknown(word: str, options: flags.FlagValues) -> str:
    """The line that refuses an unknown word."""
    if override := re.match(r"--?(?:no)?config\.([^=]*)", word):
        key = override[1]
        if key in KNOBS:
            return f"{key}: no value given; must be {allowed(key)}"
        return unknown_key_fault(key)
    if not word.startswith("-"):
        return f"{word}: unexpected; write --config FILE, --config.GROUP.KEY=VALUE"
    names = [f"--{name}" for name in options]
    nearest = difflib.get_close_matches(word.partition("=")[0], names, n=1, cutoff=0.0)
    return f"{word}: no such option; did you mean {nearest[0]}?"


def _execute(options: flags.FlagValues, path: Path, config: ConfigDict, command_line: str) -> None:
    """Trains, resumes, or prints the plan."""
    from adloco_jax.run import processes  # here, so that a config error is reported at once
    from adloco_jax.run.plan import plan
    from adloco_jax.run.resume import finished
    from adloco_jax.study import report
    from adloco_jax.training import train

    place = {name: options[name].value for name in ("coordinator", "num_processes", "process_id")}
    if options.distributed or any(value is not None for value in place.values()):
        processes.connect(**place, timeout_s=options.meeting_s)
        if options.workdir is None and not options.plan:
            raise ConfigError("--workdir: several processes need the name of one folder")
    changes = {"accept_config_change": options.accept_config_change}
    if options.plan:
        with processes.only_first_prints():
            print(plan(config, options.workdir, **changes))
        return
    folder = options.workdir or f"runs/{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    damage = processes.broadcast(processes.run_on_all(lambda: finished(folder, config, **changes)))
    if damage is None:
        accept_data = options.accept_data_change
        train(config, folder, command=command_line, accept_data_change=accept_data, **changes)
        return
    if processes.is_first():
        for line in damage:
            print(f"damaged: {line}", file=sys.stderr)
        report.conclude(folder)
    processes.barrier("the report is written")
