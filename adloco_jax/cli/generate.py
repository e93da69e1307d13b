"""Writes text with a Llama in Hugging Face layout, such as a run's export."""

import argparse
import os
import sys
from pathlib import Path

import jax
import numpy as np

from adloco_jax import hf
from adloco_jax.cli.parser import is_run
from adloco_jax.config import add_entries
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError
from adloco_jax.models.llama import Llama, generate


def run(options: argparse.Namespace, command: str) -> int:
    """Reads, draws, prints."""
    add_entries(options.config)
    model = options.model
    if is_run(model):
        model = str(Path(model) / "export")
        if not os.path.exists(model):
            raise ConfigError(f"{model}: not there yet; write: adloco export {options.model}")
    network, params, *_ = hf.load(model, key="model")
    if not isinstance(network, Llama):
        raise ConfigError(f"{model}: a {type(network).__name__} writes no text")
    tokenizer = load_tokenizer(model)
    text = os.fsencode(options.prompt).decode(errors="replace")  # bytes of argv may be no UTF-8
    (ids,) = tokenizer.encode_batch([text])
    prompt = np.concatenate([[tokenizer.eot_id], ids]).astype(np.int32)
    room = network.max_length - len(prompt)
    if min(options.tokens, options.samples) < 1 or options.temperature < 0:
        raise ConfigError("--tokens and --samples must be at least 1, --temperature 0 or more")
    if room < 1:
        raise ConfigError(
            f"--prompt: {len(prompt)} tokens, the model reads {network.max_length}; shorten it"
        )
    if max(prompt.max(), tokenizer.vocab_size - 1) >= network.vocab_size:
        raise ConfigError(
            f"{model}: the tokenizer has {tokenizer.vocab_size} ids, the model {network.vocab_size}"
        )
    if options.tokens > room:
        print(
            f"--tokens {options.tokens}: the model reads {network.max_length} tokens and the"
            f" prompt has {len(prompt)}; writing {room}",
            file=sys.stderr,
        )
    tokens_BL = generate(
        network,
        params,
        np.tile(prompt, (options.samples, 1)),
        num_tokens=min(options.tokens, room),
        temperature=options.temperature,
        key=jax.random.key(options.seed),
    )
    for tokens in np.asarray(tokens_BL):
        ends = np.flatnonzero(tokens[1:] == tokenizer.eot_id) + 1
        print("-" * 72)
        print(tokenizer.decode(tokens[1 : ends[0] if ends.size else None]))
    return 0
