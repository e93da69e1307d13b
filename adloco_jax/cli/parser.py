"""The options of a command beside `train`, whose options are the keys of a config."""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from adloco_jax.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Options that may be written with hyphens or underscores; a mistake is one line."""

    def __init__(self, command: str, card: str | None):
        super().__init__(
            prog=f"adloco {command}",
            description=card,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def option(self, name: str, default: str | float, text: str) -> None:
        """Adds an option whose default gives its type and is named at the end of its help."""
        help_text = f"{text}; default: {default}"
        self.add_argument(name, type=type(default), default=default, help=help_text)

    def config_option(self) -> None:
        """Adds `--config`, for `config.add_entries`."""
        text = "the run's config file, where that adds the entry of a table that the run uses"
        self.add_argument("--config", help=text)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses the words after the command, `--num_sequences` as `--num-sequences`."""
        return self.parse_args([with_separator(word, "-") for word in words])

    def error(self, message: str) -> NoReturn:
        """Raises a ConfigError in place of printing the usage and exiting."""
        raise ConfigError(f"{message}; {self.prog} --help lists what there is")


def with_separator(word: str, separator: str) -> str:
    """An option with hyphens or underscores in its name: `--num_rows` or `--num-rows`."""
    name, equals, value = word.partition("=")
    spelled = re.sub("[-_]", separator, name[2:])
    return f"--{spelled}{equals}{value}" if name.startswith("--") else word
