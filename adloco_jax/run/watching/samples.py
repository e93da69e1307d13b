"""Continue a held-out text with a model, to see what it writes.

A row is a sequence of tokens of the run's length, with the beginning of a document or with several
documents; a row of chats has weights, which are above zero at the tokens of answers. The base is
the frozen weights of a model with an adapter.
"""

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

_MOST_CHARACTERS = 16  # of a token, more than a tokenizer has


def sampler(run: Run) -> Callable[[PyTree, PyTree], tuple[str, str]] | None:
    """Make a function that continues the first held-out text with a model.

    The function is given parameters, and the frozen weights of a model with an adapter, or None. It
    returns the beginning of the text and what the model writes after it. A chat is continued after
    its first question, another text from the middle of its row on.

    Returns None if `eval.sample_tokens` is 0 or the caller of `fit` has given the model. Raises
    ConfigError if the model is no decoder.
    """
    settings = run.settings
    count = settings.eval.sample_tokens
    length = settings.data.sequence_length
    if not count or run.by_fit:
        return None
    form = "scan"  # over the layers, whose weights are stacked
    if settings.adapter.rank:  # frozen weights are not stacked
        form = layer_form(run.spec.machine)
    network = build_network(settings.model, settings.adapter, layer_form=form)
    corpus = run.corpus
    if not isinstance(network, llama.Llama):
        raise ConfigError(
            f"eval.sample_tokens = {count}: a {type(network).__name__} writes no text; set 0"
        )
    assert isinstance(corpus, Corpus), "of text, as the model writes text and `fit` did not make it"
    tokenizer = corpus.tokenizer
    rows = as_row_batch(run.heldout.report_rows)
    row = rows.tokens[0]
    prompt_end = length // 2  # position in the row: the first half of it is the prompt
    stops = []  # ids at which the model ends what it writes; none: it writes all `count` tokens
    if rows.weights is not None:  # chats: tokens of answers alone have a weight
        answers = np.flatnonzero(rows.weights[0])
        prompt_end = int(answers[0])  # where the first answer begins
        stops = sorted({*tokenizer.ends, *tokenizer.turn_end})
    # So that prompt and text together fit the model, and the prompt has a token at least.
    prompt_end = max(1, min(prompt_end, settings.model.max_length - count))
    prompt_start = 0  # a row may have several documents: where that of the prompt begins
    if rows.starts is not None:
        prompt_start = int(rows.starts[0, prompt_end - 1])
    prompt_1L = np.asarray(row[None, prompt_start:prompt_end], np.int32)
    prompt_length = prompt_end - prompt_start

    def sample(params: PyTree, base: PyTree) -> tuple[str, str]:
        """Return the text of the prompt, and what a model writes after it until its end."""
        written = llama.generate(
            network,
            params,
            prompt_1L,
            num_tokens=count,
            temperature=0.8,  # as `adloco generate` by default
            key=jax.random.key(0),  # always the same, so that samples of a run compare
            ends=stops,
            base=base,
        )
        (tokens,) = fetch(written)  # of the only row: the prompt, and what follows
        prompt = tokens[:prompt_length]
        new = tokens[prompt_length:]
        ends = np.flatnonzero(np.isin(new, stops))  # what follows the first is no text
        if ends.size:
            new = new[: ends[0]]
        return _as_text(prompt, tokenizer), _as_text(new, tokenizer)

    return sample


def _as_text(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Decode tokens to a text on one line that a terminal shows, without cutting it."""
    return readable(tokens, tokenizer, max_chars=_MOST_CHARACTERS * len(tokens))
