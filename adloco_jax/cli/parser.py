"""The options of the command line.

It is parsed before the command's module is imported, so that help does not wait for JAX.
"""

import argparse
import difflib
import inspect
import itertools
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
    followers = [*words[1:], ""]
    spelled = []
    for word, follower in zip(words, followers, strict=True):
        spelled.append(_spelled(word, follower))
    return _parser().parse_args(spelled)


def _spelled(word: str, follower: str) -> str:
    """Spell the name of an option as it is declared; a switch among the keys gets its value.

    The switch has a value if one follows it, as in `--config.log.wandb False`.
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
    """Whether a word says True or False, so that it is a switch's value and no other argument."""
    try:
        TypeAdapter(bool).validate_strings(text)
    except ValidationError:
        return False
    return True


class Parser(argparse.ArgumentParser):
    """A parser whose error is one line, with an example of a correct command line.

    In the `example`, {run} is the run at hand.
    """

    example = ""
    takes_keys = False  # whether keys of a config are among the options
    words: Sequence[str] = ()  # of the command line, for messages

    def __init__(self, **argparse_options: Any):
        """Forward the options of `argparse.ArgumentParser`, which also makes the subparsers."""
        super().__init__(**argparse_options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; raise ConfigError with a line for each that is unknown."""
        self.words = args
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise ConfigError("\n".join(map(self._unknown, unknown)))
        return options, unknown

    def _unknown(self, word: str) -> str:
        """Say that a word is unknown, and which options are the nearest."""
        name, _, _ = word.partition("=")
        if not word.startswith("-"):
            advice = ""
            if self.takes_keys:
                advice = f"; a text to train on is --config.data.path={word}"
            return f"{word}: unexpected{advice}"
        if self.takes_keys and name.startswith("--config."):
            return unknown_key_fault(name.removeprefix("--config."))
        known = self._option_string_actions
        # A key without its group, or else a name that is spelled alike.
        keys = [f"--config.{key}" for key in namesakes(name.lstrip("-").replace("-", "_"))]
        nearest = [key for key in keys if key in known]
        if not nearest:
            nearest = difflib.get_close_matches(name, known, n=1)
        if not nearest:
            return f"{word}: no such option"
        return f"{word}: no such option; did you mean {' or '.join(nearest)}?"

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with an example, which names the run that was meant, or the last."""
        values = [word.rpartition("=")[2] for word in self.words]
        runs = [folder for folder in [*values, *runs_in("runs")] if is_run(folder)]
        run = str(runs[0]) if runs else "RUN"
        example = self.example.format(run=shlex.quote(run))
        raise ConfigError(f"{message}; write: {self.prog} {example} ({self.prog} --help says more)")


def _run(text: str) -> str:
    """Type of the options that name a run."""
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return text


def _path(text: str) -> Path:
    """Type of the options that name a file or folder of this machine."""
    from adloco_jax.data.disk import local_path  # imported only here, because it imports NumPy

    return local_path(text)


def _new_folder(text: str) -> Path:
    """Type of the options that name an output folder, which must be new or empty."""
    folder = _path(text)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out {text}: exists already and is not empty; name another folder")
    return folder


def _matching(pattern: str, example: str) -> Callable[[str], str]:
    """Make a type of options whose text matches a pattern; a message names the example."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text}: expected for instance {example}")
        return text

    return check


# What several options share.
_FILE: dict[str, Any] = {"type": _path, "metavar": "FILE"}
_FOLDER: dict[str, Any] = {"type": _path, "metavar": "FOLDER"}
_OUT: dict[str, Any] = {"type": _new_folder, "metavar": "FOLDER"}
_INT: dict[str, Any] = {"type": int, "metavar": "N"}
_FLAG: dict[str, Any] = {"action": "store_true"}
_ENTRIES = _FILE | {"help": "the run's config file, to execute if it adds a table entry of the run"}


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
    add("--workdir", **_FOLDER, help="the run's folder; by default a new one in runs/")
    add("--size", choices=("10M", "35M", "100M"), help="of diloco and growing_pool: parameters")
    add("--accept-config-change", **_FLAG, help="resume with changed settings")
    add("--accept-data-change", **_FLAG, help="resume with other data")
    add("--distributed", **_FLAG, help="several processes, started by a known launcher")
    add("--coordinator", metavar="HOST:PORT", help="several processes: address of process 0")
    add("--num-processes", **_INT, help="number of processes")
    add("--process-id", **_INT, help="index of this process")
    add("--meeting-s", **_INT, default=300, help="to wait for the other processes (default: 300)")
    for name, keys in itertools.groupby(OPTIONS, key=lambda key: key.rpartition(".")[0]):
        card = inspect.getdoc(GROUPS[name]) if name else "The whole run."
        group = parser.add_argument_group(f"config.{name}".removesuffix("."), card)
        for key in keys:
            group.add_argument(f"--config.{key}", metavar="VALUE", help=describe(key) + unset(key))


def _plan(parser: Parser) -> None:
    """Prints the memory and communication of a run, and prepares its data, without training.

    The options are those of adloco train, and those for the plan.
    """
    _train(parser)
    add = parser.add_argument
    add("--memory", **_FLAG, help="compile, and print each program's memory")
    text = "compile for devices that are not here; without a value: list them"
    add("--device", nargs="?", const="", metavar="KINDxN", help=text)
    add("--save", **_FILE, help="with --device: also write the plan to a JSON file")
    text = "also the seconds of a round, and of small models the method that ends first, at a rate"
    add("--link", type=_matching(LINK, "10Mbit/s"), metavar="RATE", help=f"{text} such as 10Mbit/s")
    add("--sites", **_INT, help="with --link: machines (default: one for each worker)")
    text = "with --link: of each machine (default: measured here)"
    add("--tokens-per-s", type=float, metavar="N", help=text)


def _configs(parser: Parser) -> None:
    """Lists the configs that come with the package."""
    text = "print a JSON schema of all config keys, for editors and other programs"
    parser.add_argument("--schema", **_FLAG, help=text)


def _join(parser: Parser) -> None:
    """Trains for a run with engine.kind=direct or bucket until the run is over.

    The driver prints the command, for a bucket with the run's secret in ADLOCO_KEY. After SIGTERM
    or ^C the learner leaves when its round has ended.
    """
    parser.example = "adloco-TICKET"
    add = parser.add_argument
    text = "the ticket that the run's driver prints, or the address of its bucket"
    add("address", metavar="TICKET|ADDRESS", help=text)
    add("--config", **_ENTRIES)
    for key in "data.path data.heldout_path data.tokenizer data.template model.init_from".split():
        text = "its value on this machine; default: as the driver names it"
        add(f"--config.{key}", metavar="PATH", help=text)
    text = "end, with exit code 5, after so long without a driver or the bucket"
    add("--leave-after", type=float, default=float("inf"), metavar="MINUTES", help=text)
    text = "read from addresses that the driver names, with this machine's credentials"
    add("--accept-data", **_FLAG, help=text)
    add("--workdir", **_FOLDER, help="folder for a log of what is read; default: no log")


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
    add("--out", **_OUT, help="a new or empty folder; default for one run: report in its folder")
    add("--labels", nargs="+", metavar="LABEL", help="one per run; default: the folders' names")


def _export(parser: Parser) -> None:
    """Turns a checkpoint of a run into a folder that transformers loads, with a model card."""
    parser.example = "{run}"
    add = parser.add_argument
    add("run", type=_run, metavar="RUN", help="a run's folder")
    add("--round", **_INT, help="round of the checkpoint; default: the newest")
    add("--trainer", **_INT, help="id of a trainer in the ledger; default: the consensus model")
    add("--config", **_ENTRIES)
    add("--out", **_OUT, help="a new or empty folder; default: export in the run's folder")
    add("--merge", **_FLAG, help="of a run with an adapter, write the whole model")
    text = "of the written weights; default: that of init_from, or else float32"
    add("--dtype", choices=("float32", "bfloat16"), help=text)
    size = _matching(r"[1-9]\d*[KMGT]B", "500MB")
    text = "of the largest file; default: 5GB"
    add("--shard-size", type=size, default="5GB", metavar="SIZE", help=text)


def _generate(parser: Parser) -> None:
    """Writes text with a run's export, or with another Llama in Hugging Face layout."""
    parser.example = '{run} --prompt "Once upon a time"'
    add = parser.add_argument
    text = "a run's folder, a folder in Hugging Face layout, or a hub name"
    add("model", metavar="MODEL", help=text)
    add("--prompt", default="", metavar="TEXT", help="beginning of the text")
    text = "a question, by the chat template; without TEXT: those that you type, until ^D"
    add("--chat", nargs="?", const="", metavar="TEXT", help=text)
    add("--tokens", **_INT, default=100, help="most tokens to write (default: 100)")
    text = "number of texts to write (default: 3; of answers to --chat 1)"
    add("--samples", **_INT, help=text)
    text = "temperature of sampling; 0: the most likely token (default: 0.8)"
    add("--temperature", type=float, default=0.8, metavar="X", help=text)
    add("--seed", **_INT, default=0, help="random seed (default: 0)")
    add("--config", **_ENTRIES)


# Declares the options of each command, which its docstring describes.
COMMANDS = {
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
    parser = Parser(
        prog="adloco",
        description="Trains language models with AdLoCo (arXiv 2508.18182).",
        epilog="To begin: adloco train quickstart. adloco COMMAND --help lists the options of a"
        " command; adloco train --help every key of a config.",
    )
    parser.add_argument("--version", action="version", version=f"adloco_jax {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, declare in COMMANDS.items():
        text = inspect.getdoc(declare) or ""
        help = text.partition("\n")[0]
        declare(commands.add_parser(name, help=help, description=text))
    return parser
