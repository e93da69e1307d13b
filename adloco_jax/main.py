"""The command line `adloco COMMAND`, with the commands `train` and `plan`.

Every other command is a function in `adloco_jax.cli`. Its module is imported only when the command
is called.
"""

import contextlib
import difflib
import importlib
import json
import os
import re
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from absl import flags, logging
from ml_collections import ConfigDict

from adloco_jax import __version__, config
from adloco_jax.cli.parser import (
    allowed,
    define_flags,
    is_run,
    knobs_help,
    override,
    parse,
    with_separator,
)
from adloco_jax.errors import ConfigError, ResourceError, UserError, reason, without_secrets
from adloco_jax.settings import KNOBS, SIZES

COMMANDS = {
    "train": "train what a config describes, or resume a stopped run",
    "plan": "print the memory and communication of a run, without training",
    "configs": "list the configs that come with the package",
    "prepare": "tokenise and pack text into a folder of rows, which runs can read",
    "compare": "run variants with several seeds, and report the cost of each loss",
    "report": "draw a report on one or more runs",
    "export": "turn a checkpoint into a folder that transformers loads",
    "eval": "run benchmarks on an exported model",
    "generate": "write text with an exported model",
    "gradients": "measure the gradient noise at a checkpoint",
}

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
_CLOSED_PIPE = 128 + signal.SIGPIPE  # exit code, as of a program that SIGPIPE ends


def command() -> NoReturn:
    """Run `main` as the main program of a process, and exit with the code that it returns."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # a closed stream is None
        # A character that the encoding of the output lacks must not end the command with an error.
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
    sys.unraisablehook = _unraisablehook
    # Also for a job in the background, which a shell starts with SIGINT ignored.
    signal.signal(signal.SIGINT, _interrupt)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    try:
        code = main()
    # Deliberately broad: this prints the traceback that Python would print. Python must not end the
    # process by itself, because JAX may block its exit.
    except Exception as error:
        code = _CLOSED_PIPE
        if not _is_closed_pipe(error):
            print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
            code = 1
    # The module is not imported if an error ended the command early.
    processes = sys.modules.get("adloco_jax.run.processes")
    together = processes is None or processes.all_end()
    # A library that ran out of files or memory may leave a thread that never ends.
    if code in (ResourceError.exit_code, _CLOSED_PIPE) or not together:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the terminal may be closed
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(*_: object) -> NoReturn:
    """End the process at SIGINT, outside the rounds of a run (see `processes.stop_requests`).

    A KeyboardInterrupt could be lost: Python ignores errors in callbacks of the garbage collector,
    of which JAX has one, and imports turn them into other errors.
    """
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)


def _unraisablehook(unraisable: "sys.UnraisableHookArgs") -> None:
    """Hide an error that Orbax prints when it cleans up after a failed checkpoint.

    The failure of the checkpoint itself is reported elsewhere.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _is_closed_pipe(error: BaseException) -> bool:
    """Whether an error means that nobody reads this process's output any more."""
    output = select.poll()
    for number in (1, 2):
        output.register(number, 0)  # errors are always reported
    broken = any(event & select.POLLERR for _, event in output.poll(0))
    return isinstance(error, BrokenPipeError) and broken


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code.

    Args:
      argv: Arguments without the program's name. None: the arguments of the process.

    Returns:
      0 after success, and 130 after an interrupt. After a `UserError`, whose message is printed to
      stderr, the exit code of its class.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        print(f"{error.filename}: {error.strerror}; name another", file=sys.stderr)
        return ConfigError.exit_code
    except (OSError, MemoryError, RuntimeError) as error:
        if _is_closed_pipe(error):
            raise  # for `command`
        # These errors mean that the machine lacks something. A RuntimeError means this only if the
        # memory that JAX may use is exhausted.
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"out of resources: {reason(error)}", file=sys.stderr)
        return ResourceError.exit_code


def _run(argv: Sequence[str]) -> int:
    """Run the command that the first word names, and return the exit code.

    Without a command, print an overview or the version. If the first word is an option, the command
    is `train`.
    """
    first, *words = argv or ["--help"]
    if first in ("-h", "--help", "help"):
        if words and words[0] in COMMANDS:
            return _run([words[0], "--help"])
        print(_overview())
        return 0
    if first in ("--version", "version"):
        print(f"adloco_jax {__version__}")
        return 0
    if first.startswith("-"):
        first, words = "train", list(argv)
    if first == "plan" and any(word.partition("=")[0] == "--device" for word in words):
        with _without_native_messages():
            return _train(words, is_plan=True)
    if first in ("train", "plan"):
        return _train(words, is_plan=first == "plan")
    if first not in COMMANDS:
        raise ConfigError(f"{first}: no such command; {_right_command(first, words)}")
    options = parse(first, words)
    if first in ("compare", "export", "generate", "gradients"):
        _require_devices()
    line = without_secrets(shlex.join(["adloco", first, *words]))
    name = "evaluate" if first == "eval" else first  # eval is a function of Python
    module = name if name in ("compare", "evaluate", "prepare") else "commands"
    run = getattr(importlib.import_module(f"adloco_jax.cli.{module}"), name)
    return run(options, line) or 0


@contextlib.contextmanager
def _without_native_messages() -> Iterator[None]:
    """Hide what JAX and XLA print about devices, as long as the `with` block runs.

    They warn that devices are missing, or that a program needs more memory than a device has. Both
    are expected when a run is planned for devices that are not here.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # set before JAX is imported, because JAX looks for devices
    sys.stderr.flush()
    python, native = sys.stderr, os.dup(2)
    with open(os.devnull, "wb") as nowhere, os.fdopen(os.dup(2), "w", buffering=1) as real:
        os.dup2(nowhere.fileno(), 2)
        sys.stderr = real
        try:
            yield
        finally:
            sys.stderr = python
            os.dup2(native, 2)
            os.close(native)


def _require_devices() -> None:
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


def _right_command(word: str, others: Sequence[str]) -> str:
    """Suggest a command line to a user whose first word is not a command.

    The word may be the folder of a run, the name of a config, or a misspelt command.
    """
    if is_run(word):
        return f"write: adloco report {word}"
    with contextlib.suppress(ConfigError):
        name = config.find_config(word).stem
        return f"write: adloco {'compare' if name.startswith('compare_') else 'train'} {word}"
    nearest = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.0)
    return f"did you mean {shlex.join(['adloco', *nearest, *others])}? adloco --help lists them"


def _overview() -> str:
    lines = [f"  {name:10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Trains language models with AdLoCo (arXiv 2508.18182).\n",
            "adloco COMMAND [OPTIONS]\n",
            *lines,
            "\nTo begin: adloco train quickstart",
            "adloco COMMAND --help lists the options; adloco train --help every key of a config.",
        ]
    )


def _train(argv: Sequence[str], *, is_plan: bool) -> int:
    """Run the command `train` or `plan`, or print its options; return the exit code."""
    if is_plan and argv and argv[-1] == "--device":
        from adloco_jax.run.machines import kinds

        print(*kinds(), sep="\n")
        return 0
    options, words = _parse(argv)
    if options.help:
        own = [f"  --{name.replace('_', '-'):22} {text}" for _, name, _, text, *_ in _FLAGS]
        print("\n".join([_TRAIN, *own, "", knobs_help()]))
        return 0
    path, made = _configure(options, words)
    # Libraries log their errors and raise them, too. So the lines of the log are not needed.
    logging.set_verbosity(logging.FATAL)
    varying = ("--coordinator=", "--num_processes=", "--process_id=")  # processes may differ here
    shared = [word for word in argv if not word.startswith(varying)]
    command_line = without_secrets(shlex.join(["adloco", "train", *shared]))
    _execute(options, path, made, command_line, is_plan=is_plan)
    return 0


def _parse(argv: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
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


def _configure(options: flags.FlagValues, words: list[str]) -> tuple[Path, ConfigDict]:
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
            sizes = config.take_sizes(made, {name for name in SIZES if values[f"model.{name}"]})
        made = config.with_recorded_sizes(made, options.workdir)
        try:
            config.validate(made)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    if sizes:
        print(sizes)
    if guessed is not None:
        print(f"data.source={guessed}, by the name {at}; --config.data.source names another")
    return path, made


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
    from adloco_jax.run import processes
    from adloco_jax.run.changes import changes, finished, how_to_resume, unfinished
    from adloco_jax.run.plan import plan
    from adloco_jax.study import report
    from adloco_jax.training import train

    is_plan = is_plan or options.plan
    several = {name: options[name].value for name in ("coordinator", "num_processes", "process_id")}
    if options.distributed or any(value is not None for value in several.values()):
        processes.connect(**several, timeout_s=options.meeting_s)
        if options.workdir is None and not is_plan:
            raise ConfigError("--workdir: several processes need the name of one folder")
    _require_devices()
    accept = {"accept_config_change": options.accept_config_change}
    if is_plan and options.device is not None:
        _plan_device(made, options.device, options.save)
        return
    if is_plan:
        with processes.only_first_prints():
            print(plan(made, options.workdir, memory=options.memory, **accept))
            if options.workdir and is_run(options.workdir):
                settings = config.validate(made)
                how = how_to_resume(Path(options.workdir), settings, command=command_line)
                print(f"to resume: {how}")
        return
    before = unfinished(command_line) if options.workdir is None else None
    if before is not None:
        how = how_to_resume(before, config.validate(made), command=command_line)
        print(f"{before}: an unfinished run of this command; to resume it: {how}")
    folder = options.workdir or f"runs/{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    damage = processes.broadcast(processes.run_on_all(lambda: finished(folder, made, **accept)))
    if damage is None:
        accept_data = options.accept_data_change
        train(made, folder, command=command_line, accept_data_change=accept_data, **accept)
        return
    if processes.is_first():
        print(f"{folder}: already finished; nothing was trained")
        for lines in changes(Path(folder), config.validate(made)).values():
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
    from adloco_jax.run.device_plan import device_plan

    lines, record = device_plan(made, device)
    print(*lines, sep="\n")
    if save is not None:
        Path(save).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not record["fits"]:
        raise ResourceError(f"--device {device}: {record['change']}")


if __name__ == "__main__":
    command()
