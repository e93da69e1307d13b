"""The command line `adloco COMMAND`.

Every command is a function in `adloco_jax.cli`, whose module is imported only when it is called.
"""

import contextlib
import difflib
import importlib
import os
import select
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from absl import logging

from adloco_jax import errors
from adloco_jax.cli.names import find_config, is_run
from adloco_jax.cli.parser import COMMANDS, parse
from adloco_jax.cli.train import require_devices
from adloco_jax.errors import ConfigError, ResourceError, UserError, reason, without_secrets

_CLOSED_PIPE = 128 + signal.SIGPIPE  # exit code, as of a program that SIGPIPE ends
# By command, its module in `adloco_jax.cli`; other commands are in `commands`.
_MODULES = {"train": "train", "plan": "train"}


def command() -> NoReturn:
    """Run `main` as the main program of a process, and exit with the code that it returns.

    What only a main program may do is done here: streams, signals, hooks for errors, and an exit
    that does not wait for threads of libraries.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before this process began
            stream = open(os.devnull, "w")
        # A character that the encoding of the output lacks must not end the command with an error.
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
    sys.unraisablehook = _unraisablehook
    threading.excepthook = lambda failed: errors.end_process(failed.exc_value)
    # Also for a job in the background, which a shell starts with SIGINT ignored.
    signal.signal(signal.SIGINT, _interrupt)
    # The share of a GPU's memory that JAX takes; its default, 0.75, would leave a quarter unused.
    # It is `engine.spec.TAKEN`, whose import would take seconds.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    try:
        code = main()
    # Deliberately broad: this prints the traceback that Python would print. Python must not end the
    # process by itself, because JAX may block its exit.
    except Exception as error:
        code = _CLOSED_PIPE
        if not _is_closed_pipe(error):
            print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
            code = 1  # as of Python itself
    # A run may have several processes, which are waited for up to 10 s; the result is whether they
    # have ended. The module is not imported if an error ended the command early.
    processes = sys.modules.get("adloco_jax.host.processes")
    together = processes is None or processes.wait_for_others_to_end()
    # JAX's exit waits for processes that do not end. A library that ran out of files or memory may
    # leave a thread that never ends. So the process is ended without cleaning up.
    if code in (ResourceError.exit_code, _CLOSED_PIPE) or not together:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the terminal may be closed
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(*_: object) -> NoReturn:
    """End the process at SIGINT; during a run another handler makes it save before it ends.

    The exit code is that of a program that the signal ends. A signal may come while Python holds
    the lock of a stream, so the line is written past the streams.
    """
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")  # to the standard error
    os._exit(128 + signal.SIGINT)  # as shells report a program that a signal has ended


def _unraisablehook(unraisable: "sys.UnraisableHookArgs") -> None:
    """Hide an error that Orbax prints when it cleans up after a failed checkpoint."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _is_closed_pipe(error: BaseException) -> bool:
    """Return whether an error means that nobody reads this process's output any more.

    A BrokenPipeError alone may come from another pipe, such as that to a process started here.
    """
    output = select.poll()
    for descriptor in (1, 2):  # standard output and error
        output.register(descriptor, 0)  # no events asked for; errors are always reported
    broken = any(event & select.POLLERR for _, event in output.poll(0))
    return isinstance(error, BrokenPipeError) and broken


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code: 0, or that of the error that was printed.

    `argv` lacks the program's name. None: the arguments of the process. Errors that a user can do
    nothing about are raised.
    """
    if argv is None:
        argv = sys.argv[1:]
    try:
        return _run(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except SystemExit:  # of argparse, after it has printed help
        return 0
    # A path that the user has named is in the way, or may not be read or written.
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
        line = f"out of resources: {reason(error)}"
        if getattr(error, "filename", None):
            line += f"; {errors.remedy(error)}"
        print(line, file=sys.stderr)
        return ResourceError.exit_code


def _run(argv: Sequence[str]) -> int:
    """Run a command line, without the program's name, and return the exit code.

    The first word names the command; no word at all means `--help`. Options without a command are
    options of `train`. Raises UserError for what the user can mend, and SystemExit after help.
    """
    words = list(argv) or ["--help"]
    if words[0] in ("help", "version"):
        # `adloco help train` is `adloco train --help`.
        option = "--" + words.pop(0)
        words.append(option)
    if words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        words.insert(0, "train")

    name = words[0]
    arguments = words[1:]
    if name not in COMMANDS and not name.startswith("-"):
        raise ConfigError(f"{name}: no such command; {_right_command(name, arguments)}")
    options = parse(words)  # prints help and exits if one of the words asks for help

    # Libraries log their errors and raise them, too. So the lines of the log are not needed.
    logging.set_verbosity(logging.FATAL)
    if name in ("export", "generate", "join"):  # these compute with JAX; others check it themselves
        require_devices()
    line = without_secrets(shlex.join(["adloco", *words]))  # as runs record it

    module = importlib.import_module("adloco_jax.cli." + _MODULES.get(name, "commands"))
    run_command = getattr(module, name)  # (options, line) -> exit code; None: success
    return run_command(options, line) or 0


def _right_command(word: str, arguments: Sequence[str]) -> str:
    """Return advice for a `word` that stands where a command is expected, but names none.

    A run's folder was probably to be reported, a config to be trained. For any other word the
    command with the nearest spelling is proposed, with the `arguments` that followed the word.
    """
    if is_run(word):
        return f"write: adloco report {word}"

    try:
        find_config(word)
    except ConfigError:
        pass  # the word is no config
    else:
        return f"write: adloco train {word}"

    # Without a cutoff there is always a nearest name.
    (nearest,) = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.0)
    proposal = shlex.join(["adloco", nearest, *arguments])
    return f"did you mean {proposal}? adloco --help lists them"


if __name__ == "__main__":
    command()
