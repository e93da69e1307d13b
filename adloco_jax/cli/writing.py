"""Write text with a Llama: continue a text, or answer in a chat (`adloco generate`).

The base is the frozen weights of a model with an adapter. Ids are the numbers of tokens.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.data.tokenizers import Tokenizer, load_tokenizer
from adloco_jax.engine.model import layer_form
from adloco_jax.engine.spec import this_machine
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
    ends: frozenset[int]  # ids of tokens that end a text; a text is cut before the first of them
    num_tokens: int  # most tokens to write
    temperature: float  # 0: the most likely token
    seed: int


def load_writer(folder: str, *, num_tokens: int, temperature: float, seed: int) -> Writer:
    """Load a model, with its tokenizer, from a folder in Hugging Face layout or the hub.

    The other arguments are the options of sampling, as in `Writer`. Raises ConfigError if it is no
    Llama, or the hub has no such model; DataError if there is no such folder, or a file is damaged;
    ResourceError if the hub does not answer.
    """
    # Frozen weights of an adapter are held in the dtype with which the adapter was trained.
    loaded = hf.load(folder, as_trained=True, key="model")
    network = loaded.network
    if loaded.base is not None:
        # Layers are by default run as a scan over stacked weights, and frozen ones are not stacked.
        # `layer_form` says how they are run on this machine instead.
        network = network.clone(layer_form=layer_form(this_machine()))
    if not isinstance(network, llama.Llama):
        raise ConfigError(f"{folder}: a {type(network).__name__} writes no text")
    tokenizer = load_tokenizer(folder)
    return Writer(
        folder=folder,
        network=network,
        params=loaded.params,
        base=loaded.base,
        tokenizer=tokenizer,
        # Those that files of the model name, and those that the tokenizer knows.
        ends=frozenset({*loaded.ends, *tokenizer.ends}),
        num_tokens=num_tokens,
        temperature=temperature,
        seed=seed,
    )


def complete(writer: Writer, text: str, *, num_samples: int) -> None:
    """Print a text with each of `num_samples` continuations.

    Raises ConfigError, which names `--prompt`, if the text is too long for the model.
    """
    tokenizer = writer.tokenizer
    (ids,) = tokenizer.encode_batch([_as_utf8(text)])
    # `prefix` and `suffix` are ids that the tokenizer puts around each text.
    prompt = [*tokenizer.prefix, *ids, *tokenizer.suffix]
    num_hidden = len(tokenizer.prefix)  # first tokens, which are not printed
    if not prompt:  # the model then begins a document, as after the end of another
        prompt = [tokenizer.eot_id]
        num_hidden = 1
    samples = _sampled(writer, prompt, num_samples, writer.ends, option="--prompt")
    _print_texts([tokenizer.decode(sample[num_hidden:]) for sample in samples])


def chat(writer: Writer, questions: Iterable[str], *, num_samples: int) -> None:
    """Print `num_samples` answers to each question by the tokenizer's chat template.

    The chat goes on: the model reads all earlier questions, each with the last of its answers.
    Raises ConfigError, which names `--chat`, if the chat is too long for the model.
    """
    tokenizer = writer.tokenizer
    assert tokenizer.render is not None, "the caller has looked for a chat template"
    ends = writer.ends.union(tokenizer.turn_end)  # also the ids that end a turn
    turns: list[dict[str, str]] = []
    for question in questions:
        turns.append({"role": "user", "content": _as_utf8(question)})
        # The text of all turns, until where an answer begins.
        chat_text = tokenizer.render(turns, prompts=True)
        (ids,) = tokenizer.encode_batch([chat_text])
        prompt = list(ids) or [tokenizer.eot_id]  # a model needs a token to begin with
        samples = _sampled(writer, prompt, num_samples, ends, option="--chat")
        answers = [tokenizer.decode(sample[len(prompt) :]) for sample in samples]
        _print_texts(answers)
        turns.append({"role": "assistant", "content": answers[-1]})


def _as_utf8(text: str) -> str:
    """Replace what is not UTF-8 by a sign for it; words of a command line may be any bytes."""
    return os.fsencode(text).decode(errors="replace")


def _sampled(
    writer: Writer, prompt: Sequence[int], num_samples: int, ends: frozenset[int], *, option: str
) -> list[np.ndarray]:
    """Continue a prompt with `num_samples` samples of the model.

    Args:
      writer: The model and the options of sampling.
      prompt: Ids of the prompt's tokens, at least one.
      num_samples: Number of samples.
      ends: Ids at which a sample ends.
      option: The option that gave the prompt, for messages.

    Returns:
      For each sample the ids of the prompt and of what the model wrote, before the first of `ends`.

    Raises:
      ConfigError: If the prompt is too long, or the tokenizer has more ids than the model.
    """
    network = writer.network
    room = network.max_length - len(prompt)  # tokens that the model can write after the prompt
    if room < 1:
        raise ConfigError(
            f"{option}: {len(prompt)} tokens, the model reads {network.max_length}; shorten it"
        )
    num_ids = writer.tokenizer.vocab_size
    if max(*prompt, num_ids - 1) >= network.vocab_size:  # the model cannot read larger ids
        raise ConfigError(
            f"{writer.folder}: the tokenizer has {num_ids} ids, the model {network.vocab_size}"
        )
    prompt_BL = np.tile(np.array(prompt, np.int32), (num_samples, 1))  # the same in each row
    tokens_BL = llama.generate(
        network,
        writer.params,
        prompt_BL,
        num_tokens=min(writer.num_tokens, room),
        temperature=writer.temperature,
        key=jax.random.key(writer.seed),
        ends=sorted(ends),
        base=writer.base,
    )
    samples = []
    for row in np.asarray(tokens_BL):
        written = row[len(prompt) :]
        end_positions = np.flatnonzero(np.isin(written, sorted(ends)))
        if end_positions.size:
            row = row[: len(prompt) + end_positions[0]]
        samples.append(row)
    return samples


def _print_texts(texts: Sequence[str]) -> None:
    """Print texts; if there are several, each below a line with its number."""
    for number, text in enumerate(texts, start=1):
        if len(texts) > 1:
            print(f"-- sample {number} of {len(texts)} ".ljust(72, "-"))
        print(text)
