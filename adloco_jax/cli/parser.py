"""The options of the command line.

It is parsed before the command's module is imported, so that help does not wait for JAX. The driver
is the process that holds a run, and learners are other processes that train for it.
"""

import argparse
import difflib
import inspect
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from adloco_jax import __version__
from adloco_jax.cli.keys import describe, unset
from adloco_jax.cli.names import is_run, runs_in
from adloco_jax.config import namesakes, plain_type, unknown_key_fault
from adloco_jax.errors import ConfigError
from adloco_jax.settings import GROUPS, LINK, OPTIONS


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command and its options; `--num-rows` and `--num_rows` are the same.

    Raises:
      ConfigError: If words are unknown, with a line for each; or if one is missing or invalid, with
        the command to write instead.
    """
    # The word after each word, which may be its value, as in `--config.log.wandb False`.
    followers = [*words[1:], ""]
    spelled = []
    for word, follower in zip(words, followers, strict=True):
        spelled.append(_as_declared(word, follower))
    return _parser().parse_args(spelled)


def _as_declared(word: str, follower: str) -> str:
    """Spell the name of an option as it is declared; return other words as they are.

    Options have hyphens, and keys of a config underscores. A key that is True or False may stand
    without a value, and then gets the value True. It has a value if a `=` or the next word, the
    `follower`, gives one, as in `--config.log.wandb False`.
    """
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    if not name.startswith("--config."):
        return f"--{name[2:].replace('_', '-')}{equals}{value}"
    key = name.removeprefix("--config.").replace("-", "_")
    is_switch = key in OPTIONS and plain_type(key) is bool
    if is_switch and not equals and not _is_switch_value(follower):
        return f"--config.{key}=True"
    return f"--config.{key}{equals}{value}"


def _is_switch_value(text: str) -> bool:
    """Return whether a word says True or False, and so is a switch's value, no other argument."""
    try:
        TypeAdapter(bool).validate_strings(text)
    except ValidationError:
        return False
    return True


class Parser(argparse.ArgumentParser):
    """A parser whose error is one line, with an example of a correct command line."""

    example = ""  # what to write after the command; {run} stands for the folder of a run
    takes_keys = False  # whether keys of a config are among the options
    words: Sequence[str] = ()  # of the command line, for messages

    def __init__(self, **argparse_options: Any):
        """Forward the options of `argparse.ArgumentParser`, which also makes the subparsers.

        Abbreviated options are refused: a new option could give one another meaning.
        """
        super().__init__(**argparse_options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; return the options, and no unknown words.

        argparse calls this for the whole command line, and then for the words after the command.
        Raises ConfigError with a line for each word that is unknown.
        """
        self.words = args
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise ConfigError("\n".join(map(self._unknown, unknown)))
        return options, unknown

    def _unknown(self, word: str) -> str:
        """Return a line that says that a word is unknown, and which options are the nearest."""
        name, _, _ = word.partition("=")
        if not word.startswith("-"):
            advice = ""
            if self.takes_keys:
                advice = f"; a text to train on is --config.data.path={word}"
            return f"{word}: unexpected{advice}"
        if self.takes_keys and name.startswith("--config."):
            return unknown_key_fault(name.removeprefix("--config."))
        known = self._option_string_actions  # by its name, each option of this command
        # Probably a key of a config without its group. `namesakes` lists the keys of all groups
        # with such a name, perhaps none.
        keys = namesakes(name.lstrip("-").replace("-", "_"))
        nearest = [f"--config.{key}" for key in keys if f"--config.{key}" in known]
        if not nearest:
            nearest = difflib.get_close_matches(name, known, n=1)
        if not nearest:
            return f"{word}: no such option"
        return f"{word}: no such option; did you mean {' or '.join(nearest)}?"

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with an example of a correct command line; argparse calls this.

        The example names the first run among the words; else the last changed of the folder `runs`.
        """
        values = [word.rpartition("=")[2] for word in self.words]  # of `--option=value`, the value
        runs = [folder for folder in [*values, *runs_in("runs")] if is_run(folder)]
        run = str(runs[0]) if runs else "RUN"
        example = self.example.format(run=shlex.quote(run))
        raise ConfigError(f"{message}; write: {self.prog} {example} ({self.prog} --help says more)")


# The next functions are the `type` of options: argparse gives them the text of a value, and stores
# what they return.


def _run(text: str) -> str:
    """Return the folder of a run as it is written; raise an error of argparse if it is missing."""
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return text


def _path(text: str) -> Path:
    """Return a file or folder of this machine; raise ConfigError if it is an address."""
    from adloco_jax.data.disk import local_path  # imported only here, because it imports NumPy

    return local_path(text)


def _new_folder(text: str) -> Path:
    """Return an output folder; raise ConfigError if it has something in it."""
    folder = _path(text)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out {text}: exists already and is not empty; name another folder")
    return folder


def _matching(pattern: str, example: str) -> Callable[[str], str]:
    """Make a type of options whose text matches a pattern; a message names the example."""

    def check(text: str) -> str:
        """Return the text; raise an error of argparse if it does not match."""
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text}: expected for instance {example}")
        return text

    return check


# Each of the next functions declares the options of a command on the command's parser. Its
# docstring is the command's help. In an `example`, `Parser.error` replaces {run} by the folder of a
# run.

_ENTRIES_HELP = "the run's config file, to execute if it adds a table entry of the run"


def _train(parser: Parser) -> None:
    """Trains what a config describes, or resumes a stopped run.

    CONFIG is a file, or a name that `adloco configs` lists. RUN is the folder of a stopped run,
    which is resumed with its recorded settings; so does the same command with the same --workdir.
    Every key of the config is an option; if it is given twice, the last value counts. To run on
    several processes, start each with this command and --distributed (under Slurm, Open MPI,
    Kubernetes) or --coordinator, --num-processes and --process-id.
    """
    parser.usage = f"{parser.prog} CONFIG|RUN [--config.GROUP.KEY=VALUE ...] [options]"
    parser.example = "quickstart"
    parser.takes_keys = True
    add = parser.add_argument
    add("name", nargs="?", metavar="CONFIG|RUN", help="a config, or a run to resume")
    add("--config", metavar="CONFIG", help="same as CONFIG; with RUN: executed for table entries")
    add(
        "--workdir",
        type=_path,
        metavar="FOLDER",
        help="the run's folder; by default a new one in runs/",
    )
    add("--size", choices=("10M", "35M", "100M"), help="of diloco and growing_pool: parameters")
    add("--accept-config-change", action="store_true", help="resume with changed settings")
    add("--accept-data-change", action="store_true", help="resume with other data")
    add("--distributed", action="store_true", help="several processes, started by a known launcher")
    add("--coordinator", metavar="HOST:PORT", help="several processes: address of process 0")
    add("--num-processes", type=int, metavar="N", help="number of processes")
    add("--process-id", type=int, metavar="N", help="index of this process")
    add(
        "--meeting-s",
        type=int,
        metavar="N",
        default=300,
        help="to wait for the other processes (default: 300)",
    )
    sections = {"": parser.add_argument_group("config", "The whole run.")}  # by group of the config
    for key in OPTIONS:  # such as data.path
        name, _, _ = key.rpartition(".")
        if name not in sections:
            words = inspect.getdoc(GROUPS[name])
            sections[name] = parser.add_argument_group(f"config.{name}", words)
        text = describe(key) + unset(key)  # its meaning, values and default, and how to unset it
        sections[name].add_argument(f"--config.{key}", metavar="VALUE", help=text)


def _plan(parser: Parser) -> None:
    """Prints the memory and communication of a run, and prepares its data, without training.

    The options are those of adloco train, and those for the plan.
    """
    _train(parser)
    add = parser.add_argument
    add("--memory", action="store_true", help="compile, and print each program's memory")
    add(
        "--device",
        nargs="?",
        const="",
        metavar="KINDxN",
        help="compile for devices that are not here; without a value: list them",
    )
    add(
        "--save",
        type=_path,
        metavar="FILE",
        help="with --device: also write the plan to a JSON file",
    )
    add(
        "--link",
        type=_matching(LINK, "10Mbit/s"),
        metavar="RATE",
        help="also the seconds of a round, and of small models the method that ends first, at a"
        " rate such as 10Mbit/s",
    )
    add(
        "--sites",
        type=int,
        metavar="N",
        help="with --link: machines (default: one for each worker)",
    )
    add(
        "--tokens-per-s",
        type=float,
        metavar="N",
        help="with --link: of each machine (default: measured here)",
    )


def _configs(parser: Parser) -> None:
    """Lists the configs that come with the package."""
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print a JSON schema of all config keys, for editors and other programs",
    )


def _join(parser: Parser) -> None:
    """Trains for a run with engine.kind=direct or bucket until the run is over.

    The driver prints the command, for a bucket with the run's secret in ADLOCO_KEY. After SIGTERM
    or ^C the learner leaves when its round has ended.
    """
    parser.example = "adloco-TICKET"
    add = parser.add_argument
    add(
        "address",
        metavar="TICKET|ADDRESS",
        help="the ticket that the run's driver prints, or the address of its bucket",
    )
    add("--config", type=_path, metavar="FILE", help=_ENTRIES_HELP)
    # `run.join.OWN`, which is not imported, because help must not wait for JAX.
    own = ("data.path", "data.heldout_path", "data.tokenizer", "data.template", "model.init_from")
    for key in own:
        add(
            f"--config.{key}",
            metavar="PATH",
            help="its value on this machine; default: as the driver names it",
        )
    add(
        "--leave-after",
        type=float,
        default=float("inf"),
        metavar="MINUTES",
        help="end, with exit code 5, after so long without a driver or the bucket",
    )
    add(
        "--accept-data",
        action="store_true",
        help="read from addresses that the driver names, with this machine's credentials",
    )
    add(
        "--workdir",
        type=_path,
        metavar="FOLDER",
        help="folder for a log of what is read; default: no log",
    )


def _ticket(parser: Parser) -> None:
    """Prints the ticket of a run with engine.kind=direct, with which other computers join it."""
    parser.example = "{run}"
    parser.add_argument("run", type=_run, metavar="RUN", help="the run's folder")


def _report(parser: Parser) -> None:
    """Draws a report on one or more runs: a page that a browser opens offline.

    Runs that differ only in the seed are drawn as one curve with a band.
    """
    parser.example = "{run}"
    add = parser.add_argument
    add("run", nargs="+", type=_run, metavar="RUN", help="a run's folder")
    add(
        "--out",
        type=_new_folder,
        metavar="FOLDER",
        help="a new or empty folder; default for one run: report in its folder",
    )
    add("--labels", nargs="+", metavar="LABEL", help="one per run; default: the folders' names")


def _export(parser: Parser) -> None:
    """Turns a checkpoint of a run into a folder that transformers loads, with a model card."""
    parser.example = "{run}"
    add = parser.add_argument
    add("run", type=_run, metavar="RUN", help="a run's folder")
    add("--round", type=int, metavar="N", help="round of the checkpoint; default: the newest")
    add(
        "--trainer",
        type=int,
        metavar="N",
        help="id of a trainer in the ledger; default: the consensus model",
    )
    add("--config", type=_path, metavar="FILE", help=_ENTRIES_HELP)
    add(
        "--out",
        type=_new_folder,
        metavar="FOLDER",
        help="a new or empty folder; default: export in the run's folder",
    )
    add("--merge", action="store_true", help="of a run with an adapter, write the whole model")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the written weights; default: that of init_from, or else float32",
    )
    size_of_file = _matching(r"[1-9]\d*[KMGT]B", "500MB")
    add(
        "--shard-size",
        type=size_of_file,
        default="5GB",
        metavar="SIZE",
        help="of the largest file; default: 5GB",
    )


def _generate(parser: Parser) -> None:
    """Writes text with a run's export, or with another Llama in Hugging Face layout."""
    parser.example = '{run} --prompt "Once upon a time"'
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a run's folder, a folder in Hugging Face layout, or a hub name",
    )
    add("--prompt", default="", metavar="TEXT", help="beginning of the text")
    add(
        "--chat",
        nargs="?",
        const="",
        metavar="TEXT",
        help="a question, by the chat template; without TEXT: those that you type, until ^D",
    )
    add("--tokens", type=int, metavar="N", default=100, help="most tokens to write (default: 100)")
    add(
        "--samples",
        type=int,
        metavar="N",
        help="number of texts to write (default: 3; of answers to --chat 1)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="temperature of sampling; 0: the most likely token (default: 0.8)",
    )
    add("--seed", type=int, metavar="N", default=0, help="random seed (default: 0)")
    add("--config", type=_path, metavar="FILE", help=_ENTRIES_HELP)


# By command, the function that declares its options.
COMMANDS: dict[str, Callable[[Parser], None]] = {
    "train": _train,
    "plan": _plan,
    "configs": _configs,
    "join": _join,
    "ticket": _ticket,
    "report": _report,
    "export": _export,
    "generate": _generate,
}


def _parser() -> Parser:
    """Make the parser of the whole command line, with a parser for each command."""
    parser = Parser(
        prog="adloco",
        description="Trains language models with AdLoCo (arXiv 2508.18182).",
        epilog="To begin: adloco train quickstart. adloco COMMAND --help lists the options of a"
        " command; adloco train --help every key of a config.",
    )
    parser.add_argument("--version", action="version", version=f"adloco_jax {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    # `declare` adds a command's options to its parser, and its docstring is the command's help.
    for name, declare in COMMANDS.items():
        text = inspect.getdoc(declare) or ""
        first_line, _, _ = text.partition("\n")
        declare(commands.add_parser(name, help=first_line, description=text))
    return parser
