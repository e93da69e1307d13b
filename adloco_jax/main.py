"""Train language models with AdLoCo.

python -m adloco_jax.main --config configs/quickstart.py [--config.GROUP.KEY=VALUE ...]
                          [--workdir DIR] [--plan]

The same command with the same --workdir goes on with a run that was stopped. Of several processes
each is started with it, and with --distributed (under Slurm, Open MPI, Kubernetes) or with
--coordinator, --num_processes and --process_id.
"""

import difflib
import io
import os
import re
import resource
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from adloco_jax.errors import ConfigError, DataError, ResourceError, UserError
from adloco_jax.run import config_file
from adloco_jax.run.config import (
    KNOBS,
    allowed,
    default_config,
    unknown_key_fault,
    validate,
    value_fault,
)

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")

_MIN_ADDRESS_BYTES = 4 * 2**30


class _Outlived(io.FileIO):
    """A standard stream that may go away, as a terminal or a pipe does: then output is dropped."""

    def write(self, data, /) -> int:
        """As any file, until an error; from then on into nothing."""
        try:
            return super().write(data)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def command() -> NoReturn:
    """`main` as a process of its own, whose training does not end with its terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # a closed one is None
        raw = io.BufferedWriter(_Outlived(os.dup(stream.fileno()), "w"))
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, None, True))
    sys.unraisablehook = _unraisablehook
    try:
        code = main()
    except Exception:  # as the interpreter ends, but that JAX's own leave-taking may be in the way
        traceback.print_exc()
        code = 1
    processes = sys.modules.get("adloco_jax.run.processes")  # not where an early mistake ended it
    # Of a library that ran out of files or memory, a thread may be left that never ends.
    if code == ResourceError.exit_code or (processes is not None and not processes.all_end()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def _unraisablehook(unraisable: "sys.UnraisableHookArgs") -> None:
    """As Python's own, but for the writes still under way when one of a checkpoint has failed.

    They call back to an event loop that has gone; the failure itself is reported.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: Arguments without the program's name; None takes the process's own.

    Returns:
      The exit code: 0; a user error's own, its lines then on stderr; 130 after an interrupt.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (OSError, MemoryError, RuntimeError) as error:
        # The machine's limits; of what JAX raises, exhausted memory alone is one.
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"out of resources: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return ResourceError.exit_code


def _run(argv: Sequence[str]) -> int:
    options = flags.FlagValues()
    options.set_gnu_getopt(True)  # options may stand between overrides
    names = flags.DEFINE_multi_string(
        "config", None, "config file, or the name of one in configs/", flag_values=options
    )
    workdir = flags.DEFINE_string(
        "workdir", None, "the run's folder; by default a fresh one in runs/", flag_values=options
    )
    accept_config = flags.DEFINE_bool(
        "accept_config_change",
        False,
        "go on with a changed learning rate etc.",
        flag_values=options,
    )
    accept_data = flags.DEFINE_bool(
        "accept_data_change", False, "go on with other data", flag_values=options
    )
    rebuild = flags.DEFINE_bool(
        "rebuild_ledger",
        False,
        "go on with the readable lines of a damaged ledger, and record the gap",
        flag_values=options,
    )
    plan_only = flags.DEFINE_bool(
        "plan", False, "say what would run, and what was not checked", flag_values=options
    )
    distributed = flags.DEFINE_bool(
        "distributed",
        False,
        "one of several processes, as what started it says",
        flag_values=options,
    )
    coordinator = flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0 of several", flag_values=options
    )
    num_processes = flags.DEFINE_integer(
        "num_processes", None, "how many processes", flag_values=options, lower_bound=1
    )
    process_id = flags.DEFINE_integer(
        "process_id", None, "which of them this is, from 0", flag_values=options, lower_bound=0
    )
    meeting_s = flags.DEFINE_integer(
        "meeting_s", 300, "seconds to wait for the other processes", flag_values=options
    )
    help_only = flags.DEFINE_bool("help", False, "print this, and stop", flag_values=options)
    try:
        words = options(["adloco", *map(_with_underscores, argv)], known_only=True)[1:]
    except (flags.Error, ValueError) as error:
        raise ConfigError(str(error)) from error
    if help_only.value:
        print(_help(options))
        return 0
    given = names.value or []
    if len(given) > 1:
        raise ConfigError(f"--config: given twice ({', '.join(given)}); name one file")
    path, config = _configure(given[0] if given else None, words)

    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY and addresses < _MIN_ADDRESS_BYTES:
        raise ResourceError(
            f"the process may address {addresses} bytes (ulimit -v), need {_MIN_ADDRESS_BYTES}: "
            "with less, JAX is aborted while it starts its threads"
        )
    logging.set_verbosity(logging.FATAL)  # what a library logs on an error, it also raises

    from adloco_jax.run import processes  # late, so that a config error is quick
    from adloco_jax.run.plan import plan
    from adloco_jax.run.resume import finished, rebuild_ledger
    from adloco_jax.study import report
    from adloco_jax.training import train

    placed = (coordinator.value, num_processes.value, process_id.value)
    if distributed.value or placed != (None, None, None):
        processes.connect(
            coordinator=coordinator.value,
            num_processes=num_processes.value,
            process_id=process_id.value,
            timeout_s=meeting_s.value,
        )
        if workdir.value is None and not plan_only.value:
            raise ConfigError("--workdir: several processes need the name of one folder")
    if rebuild.value and workdir.value is None:
        raise ConfigError("--rebuild-ledger: name the run's folder with --workdir")
    if plan_only.value:
        with processes.only_first_prints():
            print(plan(config, workdir.value, accept_config_change=accept_config.value))
        return 0
    folder = workdir.value or f"runs/{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if rebuild.value and (gap := rebuild_ledger(folder)) and processes.is_first():
        print(gap)
    damage = processes.from_first(
        processes.together(
            lambda: finished(folder, config, accept_config_change=accept_config.value)
        )
    )
    if damage is None:
        train(
            config,
            folder,
            command=shlex.join(["python", "-m", "adloco_jax.main", *_shared(argv)]),
            accept_config_change=accept_config.value,
            accept_data_change=accept_data.value,
        )
    if processes.is_first():
        for line in damage or ():
            print(f"damaged: {line}", file=sys.stderr)
        print(report.closing_table(folder))
        try:
            print(f"report: {report.write([folder], Path(folder) / 'report')}")
        except (DataError, OSError) as error:  # the run itself is done, and saved
            print(f"the report was not written: {error}", file=sys.stderr)
    processes.meet("the report is written")
    return 0


def _shared(argv: Sequence[str]) -> list[str]:
    """A command without what is each process's own, and another's at each start."""
    own = ("--coordinator=", "--num_processes=", "--process_id=")
    return [word for word in argv if not word.startswith(own)]


def _with_underscores(word: str) -> str:
    """An option as absl knows it: `--accept-data-change` is `--accept_data_change`."""
    has_dashes = word.startswith(("--accept-", "--rebuild-"))
    return word.replace("-", "_").replace("__", "--", 1) if has_dashes else word


def _help(options: flags.FlagValues) -> str:
    lines = [(__doc__ or "").strip(), ""]
    lines += [f"  --{name:10}{options[name].help}" for name in options]
    lines += ["", "Keys of a config, each overridden by --config.KEY=VALUE; the last one wins,"]
    lines += ["and --config.KEY=none unsets a key that is unset by default:"]
    lines += [f"  {key:32}{allowed(key)}" for key in KNOBS]
    return "\n".join(lines)


def _configure(name: str | None, words: Sequence[str]) -> tuple[Path, ConfigDict]:
    """The config file's path, and its config with all overrides, checked."""
    faults = []
    path, config = Path(), default_config()  # to check the overrides against without a file
    try:
        path = config_file.find(name)
        config = config_file.load(path, "get_config", ConfigDict)
    except ConfigError as error:
        faults.append(str(error))
    is_loaded = not faults
    for argument in _arguments(words):
        faults += _override(config, argument)
    if is_loaded:
        try:
            validate(config)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return path, config


def _arguments(words: Sequence[str]) -> Iterator[list[str]]:
    """Each override together with its value, each other word alone."""
    rest = list(words)
    while rest:
        argument = [rest.pop(0)]
        if _OVERRIDE.match(argument[0]) and "=" not in argument[0]:
            if rest and not rest[0].startswith("--"):
                argument.append(rest.pop(0))
        yield argument


def _override(config: ConfigDict, argument: list[str]) -> list[str]:
    """Applies one override to the config; the faults it has instead, where it has any."""
    override = _OVERRIDE.match(argument[0])
    if override is None:
        if argument[0].startswith("-"):
            nearest = difflib.get_close_matches(
                argument[0], ("--config", "--workdir", "--plan", "--accept-data-change"), 1, 0
            )
            return [f"{argument[0]}: no such option; did you mean {nearest[0]}?"]
        return [f"{argument[0]}: unexpected; write --config FILE, --config.GROUP.KEY=VALUE"]
    key = override[1]
    if key not in KNOBS:
        return [unknown_key_fault(key)]
    group, _, name = key.rpartition(".")
    holder = config.get(group) if group else config
    if not isinstance(holder, ConfigDict) or name not in holder:
        return []  # a file that lacks a key: `validate` says so
    if len(argument) == 2 and KNOBS[key].type is not bool:
        argument = ["=".join(argument)]  # read alike by all types of field
    if KNOBS[key].metadata["default"] is None and argument[0].endswith("=none"):
        holder[name] = None
        return []
    # One parser per override, so that a fault in one does not hide the next.
    parser = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=parser, sys_argv=argument)
        extra = parser(["adloco", *argument])[1:]
    except (flags.Error, ValueError):
        if "=" not in argument[0]:
            return [f"{key}: no value given; must be {allowed(key)}"]
        return [value_fault(key, argument[0].partition("=")[2])]
    return [f"{word}: unexpected; to set the key, write --config.{key}=VALUE" for word in extra]


if __name__ == "__main__":
    command()
