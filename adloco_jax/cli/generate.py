"""Writes a few sentences with a Llama in Hugging Face layout, such as a run's export.

adloco generate --model runs/my-first/export --prompt "Once upon a time" --tokens 100
"""

import os
import sys
from collections.abc import Sequence

import jax
import numpy as np

from adloco_jax import hf
from adloco_jax.cli.parser import Parser
from adloco_jax.config import add_entries
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError
from adloco_jax.models.llama import Llama, generate


def run(words: Sequence[str]) -> int:
    """Reads, draws, prints."""
    parser = Parser("generate", __doc__)
    parser.add_argument("--model", required=True, help="a folder, or a hub name")
    parser.add_argument("--prompt", default="", help="empty: from the end of a text on")
    parser.option("--tokens", 100, "to write, at most what the model can read")
    parser.option("--samples", 3, "texts to write")
    parser.option("--temperature", 0.8, "of the next token's distribution, 0: the likeliest")
    parser.option("--seed", 0, "of the draws")
    parser.config_option()
    options = parser.parse(words)
    add_entries(options.config)
    network, params, *_ = hf.load(options.model)
    if not isinstance(network, Llama):
        raise ConfigError(f"--model {options.model}: a {type(network).__name__} writes no text")
    tokenizer = load_tokenizer(options.model)
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
            f"{options.model}: the tokenizer has {tokenizer.vocab_size} ids, the model"
            f" {network.vocab_size}"
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
