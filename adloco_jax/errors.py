"""Mistakes a user can mend, each with the process's exit code (docs: README, "Exit codes")."""

import re

# What an address or a library's text may hold that no file and no screen shall show.
_SECRETS = {
    r"(\w://)[^\s/@]+@": r"\1",  # user and password
    r"(\w://[^\s?'\"]*)\?[^\s'\")]*": r"\1",  # a signature in a query
    r"\bhf_\w{4,}": "hf_...",
    r"(?i)\b(bearer|basic) [\w.~+/=-]{4,}": r"\1 ...",
}


def without_secrets(text: str) -> str:
    """A text without passwords, signatures and tokens of the addresses and headers in it."""
    for pattern, replacement in _SECRETS.items():
        text = re.sub(pattern, replacement, text)
    return text


def reason(error: BaseException, limit: int = 300) -> str:
    """What a library's error says, in one line without secrets; else the name of its class."""
    return without_secrets(" ".join(str(error).split()))[:limit] or type(error).__name__


class UserError(Exception):
    """A mistake outside the program: one clear line says what, where and what to do.

    The command line prints the message without a traceback and ends with `exit_code`.
    Several faults found together are given one per line. Secrets are left out of the message.
    """

    exit_code: int = 2

    def __init__(self, message: str):
        super().__init__(without_secrets(message))


class ConfigError(UserError):
    """A config key, value or combination, or a command-line argument, that cannot run (exit 2)."""

    exit_code = 2


class DataError(UserError):
    """Text, tokens or a tokenizer that is missing, damaged, or too little (exit 3)."""

    exit_code = 3


class CheckpointError(UserError):
    """Checkpoints of which none can be used, or a damaged record of the run (exit 3)."""

    exit_code = 3


class ResourceError(UserError):
    """Not enough memory, even one sequence at a time, or a disk that takes no more (exit 5)."""

    exit_code = 5


class DivergedError(UserError):
    """Every trainer's loss has stopped being a number (exit 4)."""

    exit_code = 4


class Preempted(UserError):
    """Stopped by a signal with everything saved; the same command goes on (exit 75)."""

    exit_code = 75
