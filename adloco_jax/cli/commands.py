"""Small commands on configs, runs and models.

Each is called with its parsed options, and with the command line as a text, which only runs record.
A *ticket* is a text that a run's driver prints: it has the address and the secret by which other
computers join the run. The *card* of a model is the README.md beside it, which describes it. A
*trainer* is a model in training, of which a run may have several. A *table* maps names to what an
option can name, such as optimizers; a config file can add entries.

A command imports what it needs when it is called, so that other commands start quickly.
"""

import argparse
import ast
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from adloco_jax.cli.names import SHIPPED, add_entries, is_run
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.settings import Config


def configs(options: argparse.Namespace, command: str) -> None:
    """List the configs of the package; with `--schema`, print a JSON schema of a run's `config`."""
    if options.schema:
        print(json.dumps(Config.model_json_schema(), indent=1))
        return
    print("adloco train NAME")
    # `SHIPPED` is the folder of the package's configs. What begins with "_" there is none.
    for path in sorted(SHIPPED.glob("[!_]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        first_line = docstring.partition("\n")[0]
        print(f"  {path.stem:20} {first_line}")
    print(f"the files: {SHIPPED}")


def ticket(options: argparse.Namespace, command: str) -> None:
    """Print the ticket of a run, a text with which other computers can join it.

    Raises ConfigError if the run has none.
    """
    path = Path(options.run) / "learners" / "ticket"
    if not path.exists():
        raise ConfigError(f"{path}: missing; a run has a ticket once engine.kind=direct has begun")
    print(path.read_text("utf-8"))


def report(options: argparse.Namespace, command: str) -> None:
    """Write a report on one or more runs, and print where; one run has it in its own folder.

    Raises ConfigError if several runs have no `--out` folder, a run is named twice, or the labels
    do not fit the runs, and DataError if a run's ledger is missing, damaged or without a round.
    """
    from adloco_jax.study.report import write

    if options.out is None and len(options.run) > 1:
        raise ConfigError(f"{len(options.run)} runs: give --out FOLDER for their report")
    folder = options.out or Path(options.run[0]) / "report"
    print(f"report: {write(options.run, folder, labels=options.labels)}")


def join(options: argparse.Namespace, command: str) -> None:
    """Train for a run, of another process, until it is over or a signal asks to leave.

    Raises ConfigError if the ticket, the data or the weights do not fit the run, DataError if data
    or weights here are damaged, and ResourceError if the driver does not answer.
    """
    from adloco_jax.run import join as joining

    add_entries(options.config)  # table entries that the run names, such as an optimizer
    own = {}  # this machine's values of settings that name files
    for key in joining.OWN:
        value = vars(options)[f"config.{key}"]  # the option's name has a dot, so no attribute
        if value is not None:
            own[key] = value
    joining.join(
        options.address,
        own=own,
        accepts_data=options.accept_data,
        workdir=options.workdir,
        patience_s=60 * options.leave_after,  # the option is in minutes
    )


def export(options: argparse.Namespace, command: str) -> None:
    """Write the model in a checkpoint of a run to a folder that `transformers` can load.

    Without `options.trainer` it is the consensus of all trainers, which is chosen by held-out rows.
    Raises ConfigError if there is no such checkpoint or trainer, CheckpointError if the checkpoint
    is damaged, and DataError if data or weights that are needed cannot be read.
    """
    from adloco_jax.engine.spec import this_machine
    from adloco_jax.run.kept.export import read_trained, save
    from adloco_jax.study import card
    from adloco_jax.study.summary import SOURCES

    add_entries(options.config)  # table entries that the run names, such as an architecture
    out = options.out or Path(options.run) / "export"
    trained = read_trained(
        options.run, this_machine(), round=options.round, trainer=options.trainer
    )
    dtype = save(
        trained.params,
        out,
        trained.settings.model,
        trained.settings.adapter,
        trained.tokenizer,
        base_sha256=trained.base_sha256,
        merge=options.merge,
        dtype=options.dtype,
        shard_size=options.shard_size,
    )
    try:
        card.write(out, Path(options.run), round=trained.round, trainer=options.trainer)
    except DataError as error:  # a damaged ledger, which the model does not need
        print(f"the card was not written: {error}", file=sys.stderr)
    # The words for the source of the model, such as the consensus; others, "trainer 3", have none.
    source = SOURCES.get(trained.source, trained.source)
    merged = ", the adapter in the weights as published" if options.merge else ""
    print(f"{out}: round {trained.round}, {source}, {dtype}{merged}")


def generate(options: argparse.Namespace, command: str) -> None:
    """Generate text with a Llama from a folder in Hugging Face layout, such as a run's export.

    `options.chat` is a question to answer, "" if a person types questions, or None: then
    `options.prompt` is continued. Raises ConfigError if there is no such model, it is no Llama, a
    chat has no template, or an option is out of range, and DataError if a file is damaged.
    """
    from adloco_jax.cli.writing import chat, complete, load_writer
    from adloco_jax.run.kept.folder import refuse_fit

    add_entries(options.config)  # table entries that the run names, such as an architecture
    folder = options.model
    if is_run(folder):
        refuse_fit(Path(folder))  # a run of `fit` has a model of the user, maybe no Llama
        folder = str(Path(folder) / "export")
        if not os.path.exists(folder):
            raise ConfigError(f"{folder}: not there yet; write: adloco export {options.model}")
    writer = load_writer(
        folder,
        num_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    if options.chat is not None and writer.tokenizer.render is None:
        raise ConfigError(f"--chat: the tokenizer of {folder} has no chat template; use --prompt")
    num_samples = options.samples
    if num_samples is None and options.chat is None:
        num_samples = 3  # continuations differ much, so that one says little
    elif num_samples is None:
        num_samples = 1  # the chat goes on with one answer
    if min(options.tokens, num_samples) < 1 or options.temperature < 0:
        raise ConfigError("--tokens and --samples must be at least 1, --temperature 0 or more")

    if options.chat is None:
        complete(writer, options.prompt, num_samples=num_samples)
    elif options.chat == "":  # a person asks, and gets one answer to go on from
        chat(writer, _lines(), num_samples=1)
    else:
        chat(writer, [options.chat], num_samples=num_samples)


def _lines() -> Iterator[str]:
    """Yield the lines that a person types, until the end of input (^D)."""
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
