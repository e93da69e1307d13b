"""The commands `adloco train` and `adloco plan`.

Their options are absl flags, because every key of a config is an option too.
"""

import contextlib
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Container, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict

from adloco_jax import config
from adloco_jax.cli.parser import (
    allowed,
    define_flags,
    is_run,
    knobs_help,
    override,
    with_separator,
)
from adloco_jax.errors import ConfigError, ResourceError, UserError, reason, without_secrets
from adloco_jax.settings import KNOBS, SIZES

_TRAIN = """Trains what a config describes, resumes a stopped run, or prints the plan of a run.

adloco train CONFIG [--config.GROUP.KEY=VALUE ...] [--workdir DIR]
adloco train RUN [--config.GROUP.KEY=VALUE ...]
adloco plan CONFIG|RUN [--config.GROUP.KEY=VALUE ...] [--memory | --device KINDxN [--save FILE]]

CONFIG is a file, or a name that `adloco configs` lists. RUN is the folder of a stopped run, which
is resumed with its recorded settings; so does the same command with the same --workdir. Every key
of the config is an option; if it is given twice, the last value counts. To run on several
processes, start each with this command and --distributed (under Slurm, Open MPI, Kubernetes) or
--coordinator, --num-processes and --process-id.
"""


# For each flag: type, name, default, help, and limits.
_FLAGS: tuple[tuple[Any, ...], ...] = (
    (flags.DEFINE_string, "config", None, "same as CONFIG", {"allow_overwrite": False}),
    (flags.DEFINE_string, "workdir", None, "the run's folder; by default a new one in runs/"),
    (flags.DEFINE_bool, "plan", False, "print the plan of the run, as adloco plan does, and stop"),
    (flags.DEFINE_bool, "memory", False, "with plan: compile, and print each program's memory"),
    (flags.DEFINE_string, "device", None, "with plan: compile for devices that are not here"),
    (flags.DEFINE_string, "save", None, "with plan --device: also write the plan to a JSON file"),
    (flags.DEFINE_bool, "accept_config_change", False, "resume with changed settings"),
    (flags.DEFINE_bool, "accept_data_change", False, "resume with other data"),
    (flags.DEFINE_bool, "distributed", False, "several processes, started by a known launcher"),
    (flags.DEFINE_string, "coordinator", None, "several processes: HOST:PORT of process 0"),
    (flags.DEFINE_integer, "num_processes", None, "number of processes", {"lower_bound": 1}),
    (flags.DEFINE_integer, "process_id", None, "index of this process", {"lower_bound": 0}),
    (flags.DEFINE_integer, "meeting_s", 300, "seconds to wait for the other processes (300)"),
    (flags.DEFINE_bool, "help", False, "print this help, and stop"),
)


_OF_A_DATA_SET = ("data.path", "data.name", "data.split", "data.revision", "data.heldout_split")


def train(argv: Sequence[str], *, is_plan: bool) -> int:
    """Run the command `train` or `plan`, or print its options; return the exit code."""
    if is_plan and argv and argv[-1] == "--device":
        from adloco_jax.run.plan import kinds

        print(*kinds(), sep="\n")
        return 0
    options, words = parse_options(argv)
    if options.help:
        own = [f"  --{name.replace('_', '-'):22} {text}" for _, name, _, text, *_ in _FLAGS]
        print("\n".join([_TRAIN, *own, "", knobs_help()]))
        return 0
    path, made = configure(options, words)
    # Libraries log their errors and raise them, too. So the lines of the log are not needed.
    logging.set_verbosity(logging.FATAL)
    varying = ("--coordinator=", "--num_processes=", "--process_id=")  # processes may differ here
    shared = [word for word in argv if not word.startswith(varying)]
    command_line = without_secrets(shlex.join(["adloco", "train", *shared]))
    _execute(options, path, made, command_line, is_plan=is_plan)
    return 0


def parse_options(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Parse the options of `train` or `plan`; return them, and the words that are no known options.

    The values of `--config.KEY` options stay text.
    """
    options = flags.FlagValues()
    options.set_gnu_getopt(True)  # options may stand before, between and after other words
    for define, name, default, text, *limits in _FLAGS:
        define(name, default, text, flag_values=options, **dict(*limits))
    define_flags(options)
    try:
        spelled = [with_separator(word, "_") for word in argv]
        words = options(["adloco", *spelled], known_only=True)[1:]
    except (flags.Error, ValueError) as error:
        raise ConfigError(str(error)) from error
    return options, words


def _named_run(options: flags.FlagValues, words: list[str]) -> str | None:
    """Return the folder of the run to resume with its recorded settings, and set it as --workdir.

    The result is None if the command line names a config; a first word becomes the option --config.
    """
    has_word = bool(words) and not words[0].startswith("-")
    if has_word and is_run(words[0]):
        run = words.pop(0)
    elif options.config and is_run(options.config):
        run, options.config = options.config, None
    else:
        if has_word and options.config is None:
            options.config = words.pop(0)
        run = options.workdir if options.config is None else None
        return run if run and is_run(run) else None
    if options.workdir not in (None, run):
        raise ConfigError(f"{run}: a run, which stays in its folder; leave --workdir out")
    options.workdir = run
    return run


def configure(options: flags.FlagValues, words: list[str]) -> tuple[Path, ConfigDict]:
    """Load a config file, and set the keys that the command line gives; return path and config.

    If the command line names a run, the config is the one recorded in the folder of the run. A
    config file beside it only adds entries to tables.

    Raises:
      ConfigError: If the file, a word of the command line, or the resulting config has a fault. The
        message lists all faults.
    """
    run = _named_run(options, words)
    faults = [_unknown(word, options) for word in words]
    path, made, is_loaded = Path(), config.default_config(), False
    try:
        if run is not None:
            from adloco_jax.run.folder import recorded_config

            config.add_entries(options.config)
            path, made = Path(run), recorded_config(Path(run))
        else:
            if options.config is None:
                raise ConfigError("no config; write: adloco train quickstart")
            path = config.find_config(options.config)
            made = config.load_config(path, "get_config", ConfigDict)
        is_loaded = True
    except ConfigError as error:
        faults.insert(0, str(error))
    values = {key: options[f"config.{key}"].value for key in KNOBS}
    if values["data.path"] is not None or values["data.source"] is not None:
        # The command line names another text. So the settings with which the config file selects
        # its own data set do not apply.
        values |= {key: KNOBS[key].default for key in _OF_A_DATA_SET if values[key] is None}
    guessed = None
    if (at := values["data.path"]) and not values["data.source"] and made.data.source == "stdlib":
        from adloco_jax.cli.prepare import guess_source
        from adloco_jax.data.prepared import is_prepared

        guessed = "tokens" if is_prepared(at) else guess_source(at, "data.path")
        values["data.source"] = guessed
    if (kind := values["data.source"]) is not None:
        from adloco_jax.cli.prepare import SOURCES
        from adloco_jax.data import DATA_SOURCES

        if kind not in DATA_SOURCES and (source := SOURCES.get(kind)):
            faults.append(f"data.source = {kind!r}: no source; {source} reads such files")
            values["data.source"] = source
    for key, text in values.items():
        if text is not None:
            override(made, key, text)
    sizes = ""
    if is_loaded:
        model = made.get("model")
        if run is None and isinstance(model, ConfigDict) and model.get("init_from"):
            sizes = take_sizes(made, {name for name in SIZES if values[f"model.{name}"]})
        try:
            config.validate(made, options.workdir)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    if sizes:
        print(sizes)
    if guessed is not None:
        print(f"data.source={guessed}, by the name {at}; --config.data.source names another")
    return path, made


def take_sizes(config: ConfigDict, given: Container[str]) -> str:
    """Set the model's sizes that a config file has set to those of the checkpoint; say which.

    The sizes stay as they are if the checkpoint cannot be read, such as without a network. A run
    reports this when it reads the weights.

    Args:
      config: The config, which is changed.
      given: Names of the sizes that the command line has set, and that therefore stay.
    """
    from adloco_jax import hf

    model, changed = config.model, []
    with contextlib.suppress(UserError):
        found = hf.inspect(model.init_from)
        for name in SIZES:
            size, before = getattr(found.network, name, None), model[name]
            is_free = name in given or (name == "num_classes" and not found.has_head)
            if not is_free and None not in (size, before) and size != before:
                model[name] = size
                changed.append(f"{name} {size}, not {before}")
    return f"sizes of model.init_from={model.init_from}: {'; '.join(changed)}" if changed else ""


def _unknown(word: str, options: flags.FlagValues) -> str:
    """Describe on one line what is wrong with a word of the command line that is not known."""
    if key := re.match(r"--?(?:no)?config\.([^=]*)", word):
        if key[1] in KNOBS:
            return f"{key[1]}: no value given; must be {allowed(key[1])}"
        return config.unknown_key_fault(key[1])
    if not word.startswith("-"):
        return f"{word}: unexpected; write adloco train CONFIG --config.GROUP.KEY=VALUE"
    name = word.partition("=")[0]
    nearest = [f"--config.{key}" for key in config.namesakes(name.lstrip("-").replace("-", "_"))]
    names = [f"--{name}" for name in options]
    nearest = nearest or difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"{word}: no such option; did you mean {' or '.join(nearest)}?"


def _execute(
    options: flags.FlagValues, path: Path, made: ConfigDict, command_line: str, *, is_plan: bool
) -> None:
    """Train a run, resume it, or print its plan.

    If the run is already finished, nothing is trained, and its table and report are made again.
    """
    # Imported only here, so that an error in the config is reported before JAX is imported.
    from adloco_jax import training
    from adloco_jax.run import processes
    from adloco_jax.run.changes import changes, finished, how_to_resume, unfinished
    from adloco_jax.run.plan import plan
    from adloco_jax.study import report

    is_plan = is_plan or options.plan
    several = {name: options[name].value for name in ("coordinator", "num_processes", "process_id")}
    if options.distributed or any(value is not None for value in several.values()):
        processes.connect(**several, timeout_s=options.meeting_s)
        if options.workdir is None and not is_plan:
            raise ConfigError("--workdir: several processes need the name of one folder")
    require_devices()
    accept = {"accept_config_change": options.accept_config_change}
    if is_plan and options.device is not None:
        _plan_device(made, options.device, options.save)
        return
    if is_plan:
        with processes.only_first_prints():
            print(plan(made, options.workdir, memory=options.memory, **accept))
            if options.workdir and is_run(options.workdir):
                settings = config.validate(made, options.workdir)
                how = how_to_resume(Path(options.workdir), settings, command=command_line)
                print(f"to resume: {how}")
        return
    before = unfinished(command_line) if options.workdir is None else None
    if before is not None:
        how = how_to_resume(before, config.validate(made, before), command=command_line)
        print(f"{before}: an unfinished run of this command; to resume it: {how}")
    folder = options.workdir or f"runs/{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    damage = processes.broadcast(processes.run_on_all(lambda: finished(folder, made, **accept)))
    if damage is None:
        accept_data = options.accept_data_change
        training.train(made, folder, command=command_line, accept_data_change=accept_data, **accept)
        return
    if processes.is_first():
        print(f"{folder}: already finished; nothing was trained")
        for lines in changes(Path(folder), config.validate(made, folder)).values():
            print(*(f"not applied: {line}" for line in lines), sep="\n", end="\n" * bool(lines))
        for line in damage:
            print(f"damaged: {line}", file=sys.stderr)
        report.conclude(folder)
    processes.barrier("the report is written")


def _plan_device(made: ConfigDict, device: str, save: str | None) -> None:
    """Print the plan of a run for the devices that `device` names, such as `h100x8`.

    With `save`, the plan is also written to this file, as JSON.

    Raises:
      ResourceError: If the run does not fit on the devices.
    """
    from adloco_jax.run.plan import device_plan

    lines, record = device_plan(made, device)
    print(*lines, sep="\n")
    if save is not None:
        Path(save).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not record["fits"]:
        raise ResourceError(f"--device {device}: {record['change']}")


def require_devices() -> None:
    """Check that JAX can use the devices that the environment variable JAX_PLATFORMS names.

    Raises:
      ConfigError: If JAX cannot use them on this machine.
    """
    if not (wanted := os.environ.get("JAX_PLATFORMS")):
        return
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"JAX_PLATFORMS={wanted}: JAX cannot use it here ({reason(error, 200)}); unset it, or"
            " install the extra for the device (docs/install.md)"
        ) from error
