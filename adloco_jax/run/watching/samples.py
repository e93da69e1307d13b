"""Continue a held-out text with a model, to see what it writes."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.data import Corpus
from adloco_jax.data.corpus import readable
from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.engine.model import layer_form
from adloco_jax.engine.sharding import fetch
from adloco_jax.errors import ConfigError
from adloco_jax.models import llama
from adloco_jax.models.configured import build_network
from adloco_jax.row_batch import as_row_batch
from adloco_jax.run.before.assemble import Run


def sampler(run: Run) -> Callable[[PyTree, PyTree], tuple[str, str]] | None:
    """Make a function that continues the first held-out text; it returns both texts, decoded.

    It is given parameters, and frozen weights or None.

    None if `eval.sample_tokens` is 0 or `fit` has the model. ConfigError if it is no decoder.
    """
    settings = run.settings
    count = settings.eval.sample_tokens
    length = settings.data.sequence_length
    if not count or run.by_fit:
        return None
    # A scan needs stacked weights, and frozen ones are not.
    form = layer_form(run.spec.machine) if settings.adapter.rank else "scan"
    network = build_network(settings.model, settings.adapter, layer_form=form)
    corpus = run.corpus
    if not isinstance(network, llama.Llama):
        raise ConfigError(
            f"eval.sample_tokens = {count}: a {type(network).__name__} writes no text; set 0"
        )
    assert isinstance(corpus, Corpus)
    tokenizer = corpus.tokenizer
    rows = as_row_batch(run.heldout.report_rows)
    row = rows.tokens[0]
    size = length // 2  # tokens of the row until the end of the prompt
    stops = []
    if rows.weights is not None:  # chats: all before the first answer, which then ends by itself
        answers = np.flatnonzero(rows.weights[0])
        size = int(answers[0])
        stops = sorted({*tokenizer.ends, *tokenizer.turn_end})
    size = max(1, min(size, settings.model.max_length - count))
    first = 0  # where the document of the prompt begins
    if rows.starts is not None:
        first = int(rows.starts[0, size - 1])
    prompt_1L = np.asarray(row[None, first:size], np.int32)

    def sample(params: PyTree, base: PyTree) -> tuple[str, str]:
        """Return the text of the prompt, and what a model writes after it until its end."""
        written = llama.generate(
            network,
            params,
            prompt_1L,
            num_tokens=count,
            temperature=0.8,  # as `adloco generate` by default
            key=jax.random.key(0),
            ends=stops,
            base=base,
        )
        (tokens,) = fetch(written)
        prompt = tokens[: size - first]
        new = tokens[size - first :]
        ends = np.flatnonzero(np.isin(new, stops))
        if ends.size:
            new = new[: ends[0]]
        return _as_text(prompt, tokenizer), _as_text(new, tokenizer)

    return sample


def _as_text(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    return readable(tokens, tokenizer, max_chars=16 * len(tokens))  # no token is so long: all
