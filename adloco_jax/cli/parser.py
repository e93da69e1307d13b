"""Parse the command line: options of all commands, and values of knobs (`--config.KEY=VALUE`).

A command line is parsed before the command's module is imported, so that help does not wait for
JAX.
"""

import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import itertools
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_origin

from absl import flags
from ml_collections import ConfigDict
from pydantic import TypeAdapter, ValidationError

from adloco_jax.config import plain_type
from adloco_jax.errors import ConfigError
from adloco_jax.settings import GROUPS, INT32, KNOBS, SIZES, Settings, default_of, meaning


def parse(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after a command; return the options.

    The name of an option may have hyphens or underscores: `--num-rows` or `--num_rows`.

    Raises:
      ConfigError: If a word is invalid. The message gives the command to write instead.
    """
    parser = Parser(command, words)
    _GRAMMAR[command](parser)
    options = parser.parse_intermixed_args([with_separator(word, "-") for word in words])
    parser.settle(options)
    return options


class Parser(argparse.ArgumentParser):
    """Parses the options of one command; an invalid command line raises an error of one line."""

    def __init__(self, command: str, words: Sequence[str]):
        super().__init__(
            prog=f"adloco {command}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.words = words
        self.subject = self.example = ""

    def describe(self, example: str, card: str) -> None:
        """Set the text that --help prints above the options, and an example for error messages."""
        self.example, self.usage, self.description = example, f"{self.prog} {example}", card

    def about(self, subject: str, *names: str, text: str, nargs: str = "?") -> None:
        """Add the main argument of the command, such as RUN.

        The user gives it as a word, or by one of the options in `names`.
        """
        self.subject = subject.lower()
        self.add_argument(self.subject, nargs=nargs, metavar=subject, help=text)
        for name in names:
            self.add_argument(name, dest="same", metavar=subject, help=f"same as {subject}")

    def option(self, name: str, default: str | float, text: str) -> None:
        """Add an option with a default value, which determines the type and is part of the help."""
        help_text = f"{text}; default: {default!r}"
        self.add_argument(name, type=type(default), default=default, help=help_text)

    def checkpoint(self) -> None:
        """Add the arguments that select a run, a checkpoint of the run, and a trainer."""
        self.about("RUN", "--workdir", text="a run's folder")
        self.add_argument("--round", type=int, help="round of the checkpoint; default: the newest")
        text = "id of a trainer in the ledger; default: the consensus model"
        self.add_argument("--trainer", type=int, help=text)
        self.entries()

    def entries(self) -> None:
        """Add the option --config, for a run that uses entries which a user added to tables.

        An entry is for instance an optimizer. The command executes the config file, which adds the
        entries. The user must name the file, because code in the folder of a run is never executed.
        """
        text = "the run's config file, if it adds an entry of a table that the run uses"
        self.add_argument("--config", metavar="FILE", help=text)

    def settle(self, options: argparse.Namespace) -> None:
        """Take the main argument from the word or the option that gives it, and check folders.

        The folders of runs must exist. The folder for the output must be empty or missing.
        """
        if self.subject:
            value, same = getattr(options, self.subject), options.__dict__.pop("same", None)
            given = (value if isinstance(value, list) else [value] * (value is not None)) + (
                [same] * (same is not None)
            )
            if not given or (len(given) > 1 and not isinstance(value, list)):
                self.error(f"name {'a' if not given else 'one'} {self.subject}")
            setattr(options, self.subject, given if isinstance(value, list) else given[0])
            waits = getattr(options, "watch", False)  # with --watch the run may begin later
            for name in given if self.subject == "run" and not waits else ():
                if not os.path.exists(name):
                    self.error(f"{name}: no such folder")
        out = getattr(options, "out", None)
        if out is not None and out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"--out {out}: exists already and is not empty; name another folder")

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with an example of a correct command line.

        What is known replaces words such as RUN in the example: the folder that the user named, or
        the newest run.
        """
        named = [word for word in self.words if not word.startswith("-")]
        folders = [word.partition("=")[2] or word for word in self.words]
        found = {
            "RUN": ([folder for folder in folders if is_run(folder)] or newest_run())[:1],
            "SOURCE": named[:1],
            "FOLDER": ["prepared"],
            "CONFIG": ["compare_quick"],
        }
        example = self.example.split(" [")[0]
        for name, values in found.items():
            for value in values:
                example = re.sub(rf"\b{name}\b", lambda _, v=value: shlex.quote(v), example)
        for stray in re.findall(r"^unrecognized arguments: (--[\w-]+)", message):
            for near in difflib.get_close_matches(stray, self._option_string_actions, n=1):
                message += f" (did you mean {near}?)"
        raise ConfigError(f"{message}; write: {self.prog} {example} ({self.prog} --help says more)")


def is_run(folder: str | Path) -> bool:
    """Whether a folder contains a run."""
    return os.path.isfile(Path(folder) / "ledger.jsonl")  # False also for invalid names


def newest_run() -> list[str]:
    """Return a list with the folder of the newest run in `runs/`, or an empty list."""
    return [str(run) for run in runs_in("runs")[:1]]


def runs_in(folder: str | Path) -> list[Path]:
    """Return the folders of the runs in a folder, the newest first."""
    found = [path for path in Path(folder).glob("*") if is_run(path)]
    return sorted(found, key=lambda run: run.stat().st_mtime, reverse=True)


def with_separator(word: str, separator: str) -> str:
    """Spell the name of an option with a separator: `--num-rows` or `--num_rows`.

    A word that is not an option is returned unchanged.
    """
    name, equals, value = word.partition("=")
    spelled = re.sub("[-_]", separator, name[2:])
    return f"--{spelled}{equals}{value}" if name.startswith("--") else word


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: expected integers such as 4,16,64") from error


def _shaped(pattern: str, example: str) -> Callable[[str], str]:
    def shaped(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text}: expected for instance {example}")
        return text

    return shaped


def _configs(parser: Parser) -> None:
    parser.describe("[--schema]", "Lists the configs that come with the package.")
    text = "print a JSON schema of all config keys, for editors and other programs"
    parser.add_argument("--schema", action="store_true", help=text)


def _prepare(parser: Parser) -> None:
    parser.describe(
        "SOURCE --out FOLDER [--tokenizer NAME] [--sequence-length L]",
        "Tokenises and packs text into a folder of rows, which runs read by data.source=tokens.\n\n"
        "SOURCE is a file, folder or glob of C4 shards, JSON lines, parquet, CSV or text, a data"
        " set on\nthe Hugging Face hub (allenai/c4 --name en), or stdlib. The same command"
        " continues\na stopped preparation.",
    )
    parser.about("SOURCE", text="file, folder, glob, name of a data set, or stdlib")
    parser.add_argument(
        "--out", "--output", dest="output", type=Path, required=True, help="folder to make"
    )
    text = "kind of text; default: guessed from the endings of the files"
    parser.add_argument("--source", dest="kind", help=text)
    names = ("heldout_path", "name", "split", "revision", "heldout_split", "text_column")
    for name in (*names, "tokenizer", "sequence_length", "heldout_frac"):
        key = f"data.{name}"
        default = "bytes" if name == "tokenizer" else default_of(key)
        parser.option(f"--{name.replace('_', '-')}", default, meaning(key).rstrip("."))
    text = meaning("data.num_sequences").rstrip(".")
    parser.add_argument("--num-sequences", type=int, help=text)


def _compare(parser: Parser) -> None:
    parser.describe(
        "CONFIG [--workdir FOLDER] [--processes 2]",
        "Runs variants with several seeds, and reports the cost of each loss.\n\n"
        "The same command with the same --workdir (by default runs/CONFIG) continues a stopped\n"
        "comparison. Several processes, or several such commands, divide the runs.",
    )
    parser.about("CONFIG", "--config", text="a file with get_comparison(), or its name")
    parser.add_argument("--workdir", type=Path, help="the folder; a comparison in it is continued")
    parser.option("--processes", 1, "number of processes that divide the runs")
    text = "file with a JSON line for each finished run; the run's folder is deleted"
    parser.add_argument("--results", type=Path, metavar="FILE", help=text)
    parser.add_argument("--only-run", action="store_true", help="do not write tables and figures")


def _report(parser: Parser) -> None:
    parser.describe(
        "RUN [RUN ...] [--out FOLDER] [--labels LABEL ...] [--watch]",
        "Draws a report on one or more runs: a page that a browser opens offline. Lists the runs"
        " if RUN\nis a folder of runs.\n\n"
        "Runs that differ only in the seed are drawn as one curve with a band. With --watch the"
        " page\nis redrawn until the runs end, and refreshes itself in a browser.",
    )
    parser.about("RUN", "--workdir", text="a run's folder", nargs="*")
    text = "a folder that is empty or does not exist; default for one run: report in its folder"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--watch", action="store_true", help="redraw the page until the runs end")
    parser.add_argument("--labels", nargs="+", help="one per run; default: the folders' names")


def _export(parser: Parser) -> None:
    parser.describe(
        "RUN [--out FOLDER] [--round 12] [--trainer 3] [--push OWNER/NAME]",
        "Turns a checkpoint of a run into a folder that transformers loads, with a model card. With"
        "\n--push the folder is uploaded to the Hugging Face hub; the run's own export is uploaded"
        " as it is.",
    )
    parser.checkpoint()
    text = "a folder that is empty or does not exist; default: export in the run's folder"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    kinds, text = ("float32", "bfloat16"), "type of the written weights; default: float32"
    parser.add_argument("--dtype", choices=kinds, help=text)
    text = "size of the largest file of weights; default: 5GB"
    size = _shaped(r"[1-9]\d*[KMGT]B", "500MB")
    parser.add_argument("--shard-size", type=size, metavar="SIZE", help=text)
    name, text = _shaped(r"[\w-][\w.-]*/[\w-][\w.-]*", "OWNER/NAME"), "repository on the hub"
    parser.add_argument("--push", type=name, metavar="OWNER/NAME", help=f"upload to this {text}")
    parser.add_argument("--private", action="store_true", help="make the repository private")


def _generate(parser: Parser) -> None:
    parser.describe(
        'RUN --prompt "Once upon a time" [--tokens 100]',
        "Writes text with a run's export, or with another Llama in Hugging Face layout.",
    )
    text = "a run's folder, a folder in Hugging Face layout, or a hub name"
    parser.about("MODEL", "--model", "--workdir", text=text)
    parser.option("--prompt", "", "beginning of the text")
    parser.option("--tokens", 100, "number of tokens to write, limited by the model's context")
    parser.option("--samples", 3, "number of texts to write")
    parser.option("--temperature", 0.8, "temperature of sampling; 0: the most likely token")
    parser.option("--seed", 0, "random seed")
    parser.entries()


def _gradients(parser: Parser) -> None:
    parser.describe(
        "RUN [--round 12] [--trainer 3]",
        "Measures the gradients at a checkpoint, and compares the noise with the run's estimates.",
    )
    parser.checkpoint()
    parser.option("--num-sequences", 512, "number of training sequences")
    text = "batch sizes in sequences, separated by commas; default: 4,16,64"
    parser.add_argument("--batch-sizes", type=_integers, default="4,16,64", help=text)
    parser.option("--draws", 200, "number of random batches of each size")
    parser.option("--seed", 0, "random seed")
    text = "sequences per forward and backward pass; default: as in the run"
    parser.add_argument("--pass-size", type=int, help=text)
    text = "a folder that is empty or does not exist; default: report in the run's folder"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)


def _eval(parser: Parser) -> None:
    parser.describe(
        "RUN --tasks arc_easy,hellaswag [--limit 100]",
        "Runs tasks of lm-evaluation-harness on a run's export, and adds them to its report.",
    )
    text = "a run's folder, or a folder in Hugging Face layout"
    parser.about("MODEL", "--model", "--workdir", text=text)
    text = "names of tasks, or the YAML file of a task of your own, separated by commas"
    parser.add_argument("--tasks", required=True, help=text)
    parser.add_argument("--limit", type=int, help="examples of each task; default: all")
    parser.option("--batch-size", 8, "examples that the model reads at once")


# -- Knobs -----------------------------------------------------------------------------------


def define_flags(options: flags.FlagValues) -> None:
    """Define an option `--config.KEY` for every knob; its value is kept as text."""
    for key in KNOBS:
        parser, is_bool = flags.ArgumentParser(), plain_type(key) is bool
        flag = flags.Flag(parser, None, f"config.{key}", None, "", boolean=is_bool)
        flags.DEFINE_flag(flag, options)


def override(config: ConfigDict, key: str, text: str) -> None:
    """Convert the text of a value on the command line, and set a key of a config to the value.

    Text that is not of the key's type is set as it is; `validate` then reports it. If the config
    lacks the key, nothing is set; `validate` then reports the missing key.
    """
    group, _, name = key.rpartition(".")
    holder = config.get(group) if group else config
    if not isinstance(holder, ConfigDict) or name not in holder:
        return
    kind, default, value = plain_type(key), default_of(key), text
    if default in (None, "auto") and text == (default or "none"):
        value = default
    elif get_origin(kind) is tuple:
        with contextlib.suppress(SyntaxError, TypeError, ValueError):
            literal = ast.literal_eval(text)
            value = literal if isinstance(literal, tuple) else (literal,)
    else:
        with contextlib.suppress(ValidationError):
            value = TypeAdapter(kind).validate_strings(text)
    with holder.ignore_type():
        holder[name] = value


def knobs_help() -> str:
    """Describe every knob: its meaning, unit, allowed values and default, and how to unset it."""
    lines = []
    for group, keys in itertools.groupby(KNOBS, key=lambda key: key.rpartition(".")[0]):
        card = inspect.getdoc(GROUPS[group]) if group else "The whole run."
        lines += ["", f"config.{group}".removesuffix("."), f"  {card}"]
        for key in keys:
            lines.append(f"  --config.{key}")
            lines += [
                textwrap.fill(text, 98, initial_indent=" " * 6, subsequent_indent=" " * 6)
                for text in (meaning(key), f"{allowed(key)}{_unset(key)}")
            ]
    return "\n".join(lines[1:])


def allowed(key: str) -> str:
    """Describe in words the values that a key of the config may have, and its default."""
    group, _, name = key.rpartition(".")
    schema = _schema()["$defs"][GROUPS[group].__name__] if group else _schema()
    default = default_of(key)
    words = "unset" if default is None else repr(default)
    if name in SIZES and group == "model":
        words = f"that of the checkpoint, else {KNOBS[key].default}"
    return f"{_in_words(schema['properties'][name])} (default: {words})"


def _unset(key: str) -> str:
    default = default_of(key)
    if default in (None, "auto"):
        return f"; unset with ={default or 'none'}"
    return f"; unset with ={default!r}" if default in ("", ()) else ""


_schema = functools.cache(Settings.model_json_schema)
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "True or False",
    "string": "text",
}
_LIMITS = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def _in_words(schema: dict[str, Any]) -> str:
    """Describe in words the values that a part of a JSON schema allows."""
    schema = schema.get("anyOf", [schema])[0]  # the other is null
    if names := schema.get("enum") or schema.get("examples"):
        return " or ".join(map(repr, names))
    if "items" in schema:
        return f"a tuple, each item {_in_words(schema['items'])}"
    if "prefixItems" in schema:
        return f"a pair, each item {_in_words(schema['prefixItems'][0])}"
    limits = [
        f"{words} {schema[name]:.12g}"
        for name, words in _LIMITS.items()
        if schema.get(name, INT32) != INT32
    ]
    return ", ".join([_TYPES[schema["type"]], *["not empty"] * ("minLength" in schema), *limits])


_GRAMMAR: dict[str, Callable[[Parser], Any]] = {
    "configs": _configs,
    "prepare": _prepare,
    "compare": _compare,
    "report": _report,
    "export": _export,
    "eval": _eval,
    "generate": _generate,
    "gradients": _gradients,
}
