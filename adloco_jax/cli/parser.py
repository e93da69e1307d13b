"""Parse the command line: options of all commands, and values of knobs (`--config.KEY=VALUE`).

It is parsed before the command's module is imported, so that help does not wait for JAX.
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
from typing import Any, NoReturn, get_origin

from ml_collections import ConfigDict
from pydantic import TypeAdapter, ValidationError

from adloco_jax.cli.names import is_run, runs_in
from adloco_jax.config import plain_type
from adloco_jax.errors import ConfigError
from adloco_jax.files import local_path
from adloco_jax.settings import GROUPS, INT32, KNOBS, SIZES, Settings, default_of, meaning


def parse(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words after a command; `--num-rows` and `--num_rows` are the same.

    If every knob is an option of the command, unknown words are returned as `unknown`.

    Raises:
      ConfigError: If a word is invalid. The message gives the command to write instead.
    """
    parser = Parser(command, words)
    options, unknown = parser.parse_known_intermixed_args([_spelled(word) for word in words])
    if command in ("train", "plan"):
        options.unknown, given = unknown, options.config or [None]
        options.config = given[0] if len(given) == 1 else parser.error("name one CONFIG")
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    parser.settle(options)
    return options


class Parser(argparse.ArgumentParser):
    """Parses the options of one command; an invalid command line raises an error of one line."""

    def __init__(self, command: str, words: Sequence[str]):
        self.example, *card, arguments = _GRAMMAR[command].split("\n\n")
        super().__init__(
            prog=f"adloco {command}",
            usage=f"adloco {command} {self.example}",
            description="\n\n".join(card),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.words, self.subject, self.takes_several = words, "", False
        for line in arguments.splitlines():
            self._add(*line.split(": ", 1))
        if command in ("train", "plan"):
            self.add_argument("words", nargs="*", metavar="CONFIG", help="see above")
            self.add_argument("--config", action="append", metavar="CONFIG", help="same as CONFIG")
            for key in KNOBS:
                self.add_argument(f"--config.{key}", help=argparse.SUPPRESS)
            if {"-h", "--help"} & {*words}:
                self.epilog = knobs_help()

    def _add(self, argument: str, text: str) -> None:
        name, _, value = argument.partition(" ")
        kind, equals, default = value.partition("=")
        if not name.startswith("-"):
            self.subject, self.takes_several = name.strip(".").lower(), name.endswith("...")
            self.add_argument(self.subject, nargs="*", metavar=name, help=text)
            for other in value.split():
                same = f"same as {name}"
                self.add_argument(other, dest="same", action="append", metavar=name, help=same)
        elif not value:
            self.add_argument(name, action="store_true", help=text)
        else:
            how: dict[str, Any] = {"nargs": "+"} if kind.endswith("...") else {}
            how |= {"nargs": "?", "const": ""} if kind.endswith("]") else {}
            how |= {"default": default} if equals else {"required": text.startswith("required")}
            text += f"; default: {default}" if default else ""
            kind = kind.strip("[.]")
            self.add_argument(
                *name.split("|"), type=_KINDS.get(kind, str), metavar=kind, help=text, **how
            )

    def print_help(self, file: Any = None) -> None:
        """Print the help; unlike argparse, raise an error if nobody reads it."""
        print(self.format_help(), end="", file=file)

    def settle(self, options: argparse.Namespace) -> None:
        """Take the main argument from the word or the option that gives it.

        The folders of runs must exist; the folder for the output must be empty or missing.
        """
        if self.subject:
            given = [*vars(options)[self.subject], *(vars(options).pop("same", None) or ())]
            if self.subject == "config" and given and all(map(is_run, given)):
                runs = shlex.join([*given, *["--out", "report"] * (len(given) > 1)])
                raise ConfigError(f"these are runs; write: adloco report {runs}")
            if not given or (len(given) > 1 and not self.takes_several):
                self.error(f"name {'a' if not given else 'one'} {self.subject}")
            vars(options)[self.subject] = given if self.takes_several else given[0]
            for name in given if self.subject == "run" else ():
                if not os.path.exists(name):
                    self.error(f"{name}: no such folder")
        out = getattr(options, "out", None)
        if out is not None and out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"--out {out}: exists already and is not empty; name another folder")

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with an example of a correct command line, for the run at hand."""
        named = [word for word in self.words if not word.startswith("-")]
        folders = [word.partition("=")[2] or word for word in self.words]
        found = {
            "RUN": [folder for folder in [*folders, *runs_in("runs")] if is_run(folder)][:1],
            "TEXT": named[:1],
            "FOLDER": ["prepared"],
            "CONFIG": [
                "studies/compare_quick.py" if self.prog.endswith("compare") else "quickstart"
            ],
        }
        example = f"{self.prog} {self.example.split('[')[0]}".strip()
        for name, values in found.items():
            for value in values:
                example = re.sub(rf"\b{name}\b", lambda _, v=value: shlex.quote(str(v)), example)
        for stray in re.findall(r"^unrecognized arguments: (--[\w-]+)", message):
            for near in difflib.get_close_matches(stray, self._option_string_actions, n=1):
                message += f" (did you mean {near}?)"
        raise ConfigError(f"{message}; write: {example} ({self.prog} --help says more)")


def _spelled(word: str) -> str:
    """Spell the name of an option as the parser knows it; a switch among the knobs gets a value."""
    name, equals, value = word.partition("=")
    if name.startswith("--config."):
        name = f"--{name[2:].replace('-', '_')}"
        key = name.removeprefix("--config.")
        is_switch = not equals and key in KNOBS and plain_type(key) is bool
        return f"{name}=True" if is_switch else f"{name}{equals}{value}"
    return f"--{name[2:].replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def _shaped(pattern: str, example: str) -> Callable[[str], str]:
    def shaped(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text}: expected for instance {example}")
        return text

    return shaped


# The kinds of values that are not text.
_KINDS: dict[str, Callable[[str], Any]] = {
    "N": int,
    "X": float,
    "MINUTES": float,
    "FILE": local_path,
    "FOLDER": local_path,
    "DIR": lambda text: str(local_path(text)),
    "SIZE": _shaped(r"[1-9]\d*[KMGT]B", "500MB"),
    "OWNER/NAME": _shaped(r"[\w-][\w.-]*/[\w-][\w.-]*", "OWNER/NAME"),
    "DTYPE": _shaped("float32|bfloat16", "bfloat16"),
    "PARAMETERS": _shaped("10M|35M|100M", "35M"),
}
_ENTRIES = """
--config FILE: the run's config file, to execute if it adds an entry of a table that the run uses"""
_RUN = """
adloco train CONFIG [--config.GROUP.KEY=VALUE ...] [--workdir DIR]
adloco train RUN [--config.GROUP.KEY=VALUE ...]
adloco plan CONFIG|RUN [--config.GROUP.KEY=VALUE ...] [--memory | --device KINDxN [--save FILE]]

CONFIG is a file, or a name that `adloco configs` lists. RUN is the folder of a stopped run, which
is resumed with its recorded settings; so does the same command with the same --workdir. Every key
of the config is an option; if it is given twice, the last value counts. To run on several
processes, start each with this command and --distributed (under Slurm, Open MPI, Kubernetes) or
--coordinator, --num-processes and --process-id.

--workdir DIR: the run's folder; by default a new one in runs/
--size PARAMETERS: of diloco and growing_pool: a model of about 10M, 35M or 100M parameters
--plan: print the plan of the run, as adloco plan does, and stop
--memory: with plan: compile, and print each program's memory
--device [KINDxN]: with plan: compile for devices that are not here; without a value: list them
--save FILE: with plan --device: also write the plan to a JSON file
--accept-config-change: resume with changed settings
--accept-data-change: resume with other data
--distributed: several processes, started by a known launcher
--coordinator HOST:PORT: several processes: address of process 0
--num-processes N: number of processes
--process-id N: index of this process
--meeting-s N=300: seconds to wait for the other processes"""
_OF_DATA = "heldout_path name split revision heldout_split text_column template loss"
_OF_DATA += " tokenizer sequence_length skip_bad"


def _of_data(name: str) -> str:
    """Return the line of an option of `prepare` that is a knob of the group `data`."""
    key = f"data.{name}"
    kind = {int: "N", float: "X"}.get(plain_type(key), "TEXT")
    default = "bytes" if name == "tokenizer" else default_of(key)
    value = kind if default is None else f"{kind}={default}"
    return f"\n--{name.replace('_', '-')} {value}: {meaning(key).rstrip('.')}"


# For each command: an example, the text of --help, and the arguments. The main argument comes with
# the options that may give it instead. An option without a value is a switch; a value in brackets
# may be left out, VALUE... is one or more, and VALUE=DEFAULT has a default.
_GRAMMAR = {
    "train": f"""CONFIG [--config.GROUP.KEY=VALUE ...] [--workdir DIR]

Trains what a config describes, or resumes a stopped run.
{_RUN}""",
    "plan": f"""CONFIG [--config.GROUP.KEY=VALUE ...] [--memory | --device KINDxN]

Prints the memory and communication of a run, without training.
{_RUN}""",
    "configs": """[--schema]

Lists the configs that come with the package.

--schema: print a JSON schema of all config keys, for editors and other programs""",
    "prepare": """TEXT --out FOLDER [--tokenizer NAME] [--sequence-length L]

Tokenises and packs text into a folder of rows, which runs read by data.source=tokens.

TEXT is a file, folder or glob of C4 shards, JSON lines, parquet, CSV or text, a data set on the
Hugging Face hub (allenai/c4 --name en), or stdlib. The same command continues a stopped
preparation.

TEXT: file, folder, glob, name of a data set, or stdlib
--output|--out FOLDER: required: folder to make
--source KIND: kind of text; default: guessed from the endings of the files"""
    + "".join(map(_of_data, f"{_OF_DATA} heldout_frac num_sequences".split())),
    "join": """ADDRESS [--config FILE] [--config.data.path PATH] [--workdir FOLDER]

Trains for a run with engine.kind=bucket until the run is over.

ADDRESS is the run's engine.address, such as s3://BUCKET/RUN. After SIGTERM or ^C the learner leaves
when its round has ended.

ADDRESS: bucket of the run, and its prefix there
--config FILE: a config file, to execute if it adds an entry of a table that the run uses
--config.data.path PATH: the run's text on this machine; default: as the driver names it
--config.data.heldout_path PATH: the held-out text on this machine; likewise
--config.data.tokenizer PATH: the tokenizer on this machine; likewise
--config.data.template PATH: the template of chats on this machine; likewise
--config.model.init_from PATH: the weights on this machine; likewise
--leave-after MINUTES=inf: end, with exit code 5, after so long without a driver or the bucket
--accept-data: read from addresses that the driver names, with this machine's credentials
--workdir FOLDER: folder for a log of what is read; default: no log""",
    "compare": """CONFIG [--workdir FOLDER] [--processes 2]

Runs variants with several seeds, and reports the cost of each loss.

The same command with the same --workdir (by default runs/CONFIG) continues a stopped
comparison. Several processes, or several such commands, divide the runs.

CONFIG --config: a file with get_comparison(), or its name
--workdir FOLDER: the folder; a comparison in it is continued
--processes N=1: number of processes that divide the runs
--results FILE: file with a JSON line for each finished run; the run's folder is deleted
--only-run: do not write tables and figures""",
    "report": """RUN [RUN ...] [--out FOLDER] [--labels LABEL ...]

Draws a report on one or more runs: a page that a browser opens offline.

Lists the runs if RUN is a folder of runs. Runs that differ only in the seed are drawn as one curve
with a band.

RUN... --workdir: a run's folder
--out FOLDER: an empty folder, or a new one; default for one run: report in its folder
--labels LABEL...: one per run; default: the folders' names""",
    "export": f"""RUN [--out FOLDER] [--round 12] [--trainer 3] [--push OWNER/NAME]

Turns a checkpoint of a run into a folder that transformers loads, with a model card.

With --push the folder is uploaded to the Hugging Face hub; the run's own export as it is.

RUN --workdir: a run's folder
--round N: round of the checkpoint; default: the newest
--trainer N: id of a trainer in the ledger; default: the consensus model{_ENTRIES}
--out FOLDER: an empty folder, or a new one; default: export in the run's folder
--merge: of a run with an adapter, write the whole model; default: the adapter
--dtype DTYPE: type of the written weights; default: those of init_from, or else float32
--shard-size SIZE: size of the largest file of weights; default: 5GB
--push OWNER/NAME: upload to this repository on the hub
--private: make the repository private""",
    "generate": f"""RUN --prompt "Once upon a time" [--tokens 100] [--chat "Who are you?"]

Writes text with a run's export, or with another Llama in Hugging Face layout.

MODEL --model --workdir: a run's folder, a folder in Hugging Face layout, or a hub name
--prompt TEXT=: beginning of the text
--chat [TEXT]: a question, by the chat template; without TEXT: those that you type, until ^D
--tokens N=100: number of tokens to write, limited by the model's context
--samples N=3: number of texts to write
--temperature X=0.8: temperature of sampling; 0: the most likely token
--seed N=0: random seed{_ENTRIES}""",
}


# The first sentence about each command.
COMMANDS = {command: text.split("\n\n")[1] for command, text in _GRAMMAR.items()}


# -- Knobs -----------------------------------------------------------------------------------


def override(config: ConfigDict, key: str, text: str) -> None:
    """Convert the text of a value on the command line, and set a key of a config to the value.

    Text that does not fit the key's type is set as it is, for `validate`; unknown keys are skipped.
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
