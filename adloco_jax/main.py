"""The command `adloco`: its first word says what to do; without one it trains.

Only the module of that word is imported, so that `adloco --version` does not wait for JAX.
"""

import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from adloco_jax import __version__
from adloco_jax.errors import ConfigError, ResourceError, UserError

# Each is a module of `adloco_jax.cli`.
COMMANDS = {
    "train": "train as a config describes, or resume a run that was stopped",
    "plan": "print what such a run would hold and communicate, and stop",
    "configs": "list the configs that come with the package",
    "prepare": "tokenise and pack text once, for runs to read as rows",
    "compare": "run variants with several seeds, and say what each loss has cost",
    "report": "draw the report on one run or several",
    "export": "turn a checkpoint into a folder that transformers loads",
    "generate": "write text with an exported model",
    "gradients": "measure the gradient noise at a checkpoint",
}


class _Outlived(io.FileIO):
    """A standard stream that discards output once its terminal or pipe is gone."""

    def write(self, data, /) -> int:
        """Writes until an error; from then on to the null device."""
        try:
            return super().write(data)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def command() -> NoReturn:
    """Runs `main` as a process of its own, which survives the loss of its terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # a closed one is None
        raw = io.BufferedWriter(_Outlived(os.dup(stream.fileno()), "w"))
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, None, True))
    sys.unraisablehook = _unraisablehook
    try:
        code = main()
    except Exception:  # deliberately broad: reported as Python does, but JAX may block its exit
        traceback.print_exc()
        code = 1
    processes = sys.modules.get("adloco_jax.run.processes")  # not imported after an early mistake
    # A library that ran out of files or memory may leave a thread that never ends.
    if code == ResourceError.exit_code or (processes is not None and not processes.all_end()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def _unraisablehook(unraisable: "sys.UnraisableHookArgs") -> None:
    """Silences writes of a failed checkpoint that call a closed event loop: it is reported."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: Arguments without the program's name; None takes those of the process.

    Returns:
      The exit code: 0; that of a user error, whose lines are then on stderr; 130 after an
      interrupt.
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
        # Limits of the machine; of JAX's errors only exhausted memory is one.
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"out of resources: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return ResourceError.exit_code


def _run(argv: Sequence[str]) -> int:
    """Prints what needs no command, or runs the one that is named."""
    first, *words = argv or [""]
    if first in ("-h", "--help"):
        print(_overview())
        return 0
    if first == "--version":
        print(f"adloco_jax {__version__}")
        return 0
    if not first or first.startswith("-"):
        first, words = "train", list(argv)
    if first not in COMMANDS:
        nearest = difflib.get_close_matches(first, COMMANDS, n=1, cutoff=0.0)
        raise ConfigError(
            f"{first}: no such command; did you mean {nearest[0]}? adloco --help lists them"
        )
    return importlib.import_module(f"adloco_jax.cli.{first}").run(words)


def _overview() -> str:
    lines = [f"  {name:10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Trains language models with AdLoCo (arXiv 2508.18182).\n",
            "adloco [COMMAND] [OPTIONS]   without a command: train\n",
            *lines,
            "\nTo begin: adloco train --config quickstart",
            "adloco COMMAND --help lists the options, and of train every key of a config.",
        ]
    )


if __name__ == "__main__":
    command()
