"""Write text with a Llama: continue a text, or answer in a chat (`adloco generate`)."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.data.tokenizers import Tokenizer, load_tokenizer
from adloco_jax.engine.model import layer_form
from adloco_jax.engine.spec import here
from adloco_jax.errors import ConfigError
from adloco_jax.models import hf, llama


@dataclass(frozen=True)
class Writer:
    """A model that writes text, with its tokenizer and the options of sampling."""

    folder: str  # of the model, for messages
    network: llama.Llama
    params: PyTree
    base: Any  # frozen weights; None if there are none
    tokenizer: Tokenizer
    ends: frozenset[int]  # ids at which a text ends
    num_tokens: int  # most tokens to write
    temperature: float  # 0: the most likely token
    seed: int


def load_writer(folder: str, *, num_tokens: int, temperature: float, seed: int) -> Writer:
    """Load a model from a folder in Hugging Face layout; raise ConfigError if it is no Llama."""
    loaded = hf.load(folder, as_trained=True, key="model")
    network = loaded.network
    if loaded.base is not None:
        network = network.clone(layer_form=layer_form(here()))
    if not isinstance(network, llama.Llama):
        raise ConfigError(f"{folder}: a {type(network).__name__} writes no text")
    tokenizer = load_tokenizer(folder)
    return Writer(
        folder=folder,
        network=network,
        params=loaded.params,
        base=loaded.base,
        tokenizer=tokenizer,
        ends=frozenset({*loaded.ends, *tokenizer.ends}),
        num_tokens=num_tokens,
        temperature=temperature,
        seed=seed,
    )


def complete(writer: Writer, text: str, *, num_samples: int) -> None:
    """Print a text with its continuations."""
    tokenizer = writer.tokenizer
    (ids,) = tokenizer.encode_batch([_valid(text)])
    prompt = [*tokenizer.prefix, *ids, *tokenizer.suffix]
    shown_from = len(tokenizer.prefix)
    if not prompt:  # the beginning of a document
        prompt = [tokenizer.eot_id]
        shown_from = 1
    rows = _continued(writer, prompt, num_samples, writer.ends, option="--prompt")
    _print_texts([tokenizer.decode(row[shown_from:]) for row in rows])


def chat(writer: Writer, questions: Iterable[str], *, num_samples: int) -> None:
    """Print answers to each question by the tokenizer's chat template.

    A question follows the questions before, each with the last of its answers.
    """
    tokenizer = writer.tokenizer
    assert tokenizer.render is not None, "the caller has looked for a chat template"
    ends = writer.ends.union(tokenizer.turn_end)
    turns: list[dict[str, str]] = []
    for question in questions:
        turns.append({"role": "user", "content": _valid(question)})
        (ids,) = tokenizer.encode_batch([tokenizer.render(turns, prompts=True)])
        prompt = list(ids) or [tokenizer.eot_id]
        rows = _continued(writer, prompt, num_samples, ends, option="--chat")
        answers = [tokenizer.decode(row[len(prompt) :]) for row in rows]
        _print_texts(answers)
        turns.append({"role": "assistant", "content": answers[-1]})


def _valid(text: str) -> str:
    """Replace what is not UTF-8, which a command line need not be."""
    return os.fsencode(text).decode(errors="replace")


def _continued(
    writer: Writer, prompt: Sequence[int], num_samples: int, ends: frozenset[int], *, option: str
) -> list[np.ndarray]:
    """Return the prompt with each sample, without the first id that ends it and what follows.

    `option`, which gave the prompt, is named in the message of a ConfigError.
    """
    network = writer.network
    room = network.max_length - len(prompt)
    if room < 1:
        raise ConfigError(
            f"{option}: {len(prompt)} tokens, the model reads {network.max_length}; shorten it"
        )
    num_ids = writer.tokenizer.vocab_size
    if max(*prompt, num_ids - 1) >= network.vocab_size:
        raise ConfigError(
            f"{writer.folder}: the tokenizer has {num_ids} ids, the model {network.vocab_size}"
        )
    tokens_BL = llama.generate(
        network,
        writer.params,
        np.tile(np.array(prompt, np.int32), (num_samples, 1)),
        num_tokens=min(writer.num_tokens, room),
        temperature=writer.temperature,
        key=jax.random.key(writer.seed),
        ends=sorted(ends),
        base=writer.base,
    )
    rows = []
    for row in np.asarray(tokens_BL):
        found = np.flatnonzero(np.isin(row[len(prompt) :], sorted(ends)))
        if found.size:
            row = row[: len(prompt) + found[0]]
        rows.append(row)
    return rows


def _print_texts(texts: Sequence[str]) -> None:
    for number, text in enumerate(texts, start=1):
        if len(texts) > 1:
            print(f"-- sample {number} of {len(texts)} ".ljust(72, "-"))
        print(text)
