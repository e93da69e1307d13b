"""Errors that a user can correct, each with its exit code (docs/guides/running.md)."""

import contextlib
import errno
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from typing import NoReturn

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)  # of this process, of this machine

# Patterns of secrets in addresses and in messages of libraries, with the texts that replace them;
# \1 is what the first parentheses of a pattern matched. Secrets are never shown or saved.
_SECRETS = {
    r"(\w://)[^\s/@]+@": r"\1",  # user and password
    # The query of an address, which may have a signature; a name in a bucket may have a "?".
    r"((?:https?|\w+(?=://[^\s?'\"]*\?[\w-]+=))://[^\s?'\"]*)\?[^\s'\")]*": r"\1",
    r"\bhf_\w{4,}": "hf_...",
    r"(?i)\b(bearer|basic) [\w.~+/=-]{4,}": r"\1 ...",
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]": "?",  # with these, text of others could rewrite a terminal
}


def without_secrets(text: str) -> str:
    """Remove passwords, signatures and tokens from the addresses and headers in a text."""
    for pattern, replacement in _SECRETS.items():
        text = re.sub(pattern, replacement, text)
    return text


def reason(error: BaseException, limit: int = 300) -> str:
    """Return an error's message on one line, without secrets, cut at `limit` characters.

    An error without a message gives the name of its class.
    """
    line = " ".join(str(error).split())
    return without_secrets(line)[:limit] or type(error).__name__


def remedy(error: BaseException) -> str:
    """Say what a user can do about an error of the file system."""
    if getattr(error, "errno", None) in TOO_MANY_FILES:
        return "raise the limit of open files (ulimit -n)"
    return "make room or grant access"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, which has an s unless the number is 1."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def in_bytes(value: float) -> str:
    """Format a number of bytes with a binary unit, such as 1.5 GiB."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while value >= 1024 and power < len(units) - 1:
        value /= 1024
        power += 1
    return f"{value:,.4g} {units[power]}"


def check_installed(package: str, *, where: str, extra: str = "") -> None:
    """Raise ConfigError unless a package is installed.

    `where` says what needs it, at the beginning of the message. `extra` is the extra of adloco_jax
    that installs it. If it is empty, adloco_jax itself requires the package, but only on platforms
    for which the package has a wheel.
    """
    if importlib.util.find_spec(package) is not None:
        return
    if extra:
        need = f"pip install 'adloco_jax[{extra}]'"
    else:
        need = f"pip install {package}, if it has a wheel for this computer (docs/start.md)"
    raise ConfigError(f"{where}: {package} is not installed; {need}")


@contextlib.contextmanager
def own_code(what: str) -> Iterator[None]:
    """Raise ConfigError for an error in a user's function, called in the `with` block.

    The message begins with `what`, which names the function or the option that chose it. The error
    and the line of the user's code follow. A UserError is raised as it is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # deliberately broad, because the function is arbitrary
        line = f"{what}: {reason(error)}"
        if type(error) is not ValueError:  # of a ValueError, the message suffices
            line = f"{what}: {type(error).__name__}: {reason(error)}"
        place = own_line(error)
        if place:
            line += f" ({place})"
        raise ConfigError(line) from error


def own_line(error: BaseException) -> str:
    """Return file and line of the user's code in an error's traceback, the innermost if several.

    The result is empty if the traceback has only code of libraries.
    """
    # Python's own library, this package, and modules that are built into the interpreter.
    libraries = (sysconfig.get_path("stdlib"), os.path.dirname(__file__), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        in_library = frame.filename.startswith(libraries) or "site-packages" in frame.filename
        if not in_library:
            return f"{frame.filename}, line {frame.lineno}"
    return ""


class UserError(Exception):
    """An error that the user can correct: one line for each fault, with what, where and the remedy.

    Secrets are removed. The command prints it without a traceback, and ends with `exit_code`.
    """

    exit_code: int = 2

    def __init__(self, message: str):
        super().__init__(without_secrets(message))


class ConfigError(UserError):
    """Error: a config or a command-line argument is invalid (exit 2)."""

    exit_code = 2


class DataError(UserError):
    """Error: text, tokens or a tokenizer is missing, damaged or too small (exit 3)."""

    exit_code = 3


class CheckpointError(UserError):
    """Error: no checkpoint can be used, or a record of the run is damaged (exit 3)."""

    exit_code = 3


class ResourceError(UserError):
    """Error: a resource is missing, such as memory, disk space or the hub (exit 5)."""

    exit_code = 5


class DivergedError(UserError):
    """Error: the loss of every trainer is not finite (exit 4)."""

    exit_code = 4


class Preempted(UserError):
    """The run was stopped by a signal and is saved; the message says how to resume it (exit 75)."""

    exit_code = 75


def end_process(error: BaseException | None) -> NoReturn:
    """Say on stderr why this process ends, and end it; for a thread, which nobody waits for.

    The exit code is that of a UserError, and 1 for another error, which has its traceback.
    """
    if isinstance(error, UserError):
        text = f"{error}\n"
        exit_code = error.exit_code
    else:
        text = "".join(traceback.format_exception(error))
        exit_code = 1
    print(without_secrets(text), end="", file=sys.stderr, flush=True)
    os._exit(exit_code)  # `sys.exit` would end this thread only
