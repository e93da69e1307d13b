"""Small commands on configs, runs and models.

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
    cards = {
        path.stem: (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]
        for path in sorted(SHIPPED.glob("[!_]*.py"))
    }
    print("adloco train NAME")
    for name, card in cards.items():
        print(f"  {name:20} {card}")
    print(f"the files: {SHIPPED}")


def ticket(options: argparse.Namespace, command: str) -> None:
    """Print the ticket of a run."""
    path = Path(options.run) / "learners" / "ticket"
    if not path.exists():
        raise ConfigError(f"{path}: missing; a run has a ticket once engine.kind=direct has begun")
    print(path.read_text("utf-8"))


def report(options: argparse.Namespace, command: str) -> None:
    """Write a report on one or more runs."""
    from adloco_jax.study.report import write

    if options.out is None and len(options.run) > 1:
        raise ConfigError(f"{len(options.run)} runs: give --out FOLDER for their report")
    folder = options.out or Path(options.run[0]) / "report"
    print(f"report: {write(options.run, folder, labels=options.labels)}")


def join(options: argparse.Namespace, command: str) -> None:
    """Train for a run until it is over, or a signal asks to leave."""
    from adloco_jax.run.join import OWN, join

    add_entries(options.config)
    named = {key: vars(options)[f"config.{key}"] for key in OWN}
    own = {key: value for key, value in named.items() if value is not None}
    join(
        options.address,
        own=own,
        accepts_data=options.accept_data,
        workdir=options.workdir,
        patience_s=60 * options.leave_after,
    )


def export(options: argparse.Namespace, command: str) -> None:
    """Write the model in a checkpoint of a run to a folder that `transformers` can load."""
    from adloco_jax.engine.spec import here
    from adloco_jax.run.kept.export import read_trained, save
    from adloco_jax.study import card
    from adloco_jax.study.summary import SOURCES

    add_entries(options.config)
    out = options.out or Path(options.run) / "export"
    chosen = {"dtype": options.dtype, "shard_size": options.shard_size}
    trained = read_trained(options.run, here(), round=options.round, trainer=options.trainer)
    dtype = save(
        trained.params,
        out,
        trained.settings.model,
        trained.settings.adapter,
        trained.tokenizer,
        base_sha256=trained.base_sha256,
        merge=options.merge,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    try:
        card.write(out, Path(options.run), round=trained.round, trainer=options.trainer)
    except DataError as error:  # a damaged ledger, which the model does not need
        print(f"the card was not written: {error}", file=sys.stderr)
    source = SOURCES.get(trained.source, trained.source)
    merged = ", the adapter in the weights as published" if options.merge else ""
    print(f"{out}: round {trained.round}, {source}, {dtype}{merged}")


def generate(options: argparse.Namespace, command: str) -> None:
    """Generate text with a Llama from a folder in Hugging Face layout, such as a run's export."""
    import jax
    import numpy as np

    from adloco_jax.data.tokenizers import load_tokenizer
    from adloco_jax.engine.model import layer_form
    from adloco_jax.engine.spec import here
    from adloco_jax.models import hf, llama
    from adloco_jax.run.kept.folder import refuse_fit

    add_entries(options.config)
    model = options.model
    if is_run(model):
        refuse_fit(Path(model))
        model = str(Path(model) / "export")
        if not os.path.exists(model):
            raise ConfigError(f"{model}: not there yet; write: adloco export {options.model}")
    loaded = hf.load(model, as_trained=True, key="model")
    network, params = loaded.network, loaded.params
    if loaded.base is not None:
        network = network.clone(layer_form=layer_form(here()))
    if not isinstance(network, llama.Llama):
        raise ConfigError(f"{model}: a {type(network).__name__} writes no text")
    tokenizer = load_tokenizer(model)
    render, asked, is_loop, turns = tokenizer.render, options.chat, options.chat == "", []
    stops = {*loaded.ends, *tokenizer.ends}
    if asked is not None and render is None:
        raise ConfigError(f"--chat: the tokenizer of {model} has no chat template; use --prompt")
    num_samples = options.samples
    if num_samples is None:
        num_samples = 3 if asked is None else 1
    if min(options.tokens, num_samples) < 1 or options.temperature < 0:
        raise ConfigError("--tokens and --samples must be at least 1, --temperature 0 or more")
    for text in _lines() if is_loop else [options.prompt if asked is None else asked]:
        text = os.fsencode(text).decode(errors="replace")  # a command line need not be UTF-8
        prefix, suffix = tokenizer.prefix, tokenizer.suffix  # as `transformers` puts around a text
        if asked is not None and render is not None:
            turns.append({"role": "user", "content": text})
            text, prefix, suffix = render(turns, True), (), ()
            stops.update(tokenizer.turn_end)
        (ids,) = tokenizer.encode_batch([text])
        # An empty prompt is the beginning of a document.
        prompt = [*prefix, *ids, *suffix] or [tokenizer.eot_id]
        shown = len(prompt) if turns else len(prompt) - len(ids) - len(suffix)
        room = network.max_length - len(prompt)
        if room < 1:
            raise ConfigError(
                f"--{'chat' if turns else 'prompt'}: {len(prompt)} tokens, the model reads"
                f" {network.max_length}; shorten it"
            )
        if max(*prompt, tokenizer.vocab_size - 1) >= network.vocab_size:
            raise ConfigError(
                f"{model}: the tokenizer has {tokenizer.vocab_size} ids, the model"
                f" {network.vocab_size}"
            )
        tokens_BL = llama.generate(
            network,
            params,
            np.tile(np.array(prompt, np.int32), (1 if is_loop else num_samples, 1)),
            num_tokens=min(options.tokens, room),
            temperature=options.temperature,
            key=jax.random.key(options.seed),
            ends=sorted(stops),
            base=loaded.base,
        )
        for number, tokens in enumerate(np.asarray(tokens_BL), 1):
            ends = np.flatnonzero(np.isin(tokens[len(prompt) :], sorted(stops))) + len(prompt)
            text = tokenizer.decode(tokens[shown : ends[0] if ends.size else None])
            if len(tokens_BL) > 1:
                print(f"-- sample {number} of {len(tokens_BL)} ".ljust(72, "-"))
            print(text)
        turns.append({"role": "assistant", "content": text})


def _lines() -> Iterator[str]:
    """Yield the lines that a person types, until the end of input (^D)."""
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
