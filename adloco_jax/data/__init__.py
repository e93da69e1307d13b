"""Text in, rows of tokens out: sources, tokenizers, packing, and the order rows are seen in.

`load_corpus` reads everything once, before anything compiles. From then on
`Corpus.batch(trainer, stream, start, count)` is a pure function, so a cursor per worker stream is
the whole state of the data.
"""

from adloco_jax.data.arrays import ArrayRows
from adloco_jax.data.corpus import DATA_SOURCES, Corpus, DataSource, check_corpus, load_corpus
from adloco_jax.data.sampling import permute, stream_rows
from adloco_jax.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "DATA_SOURCES",
    "ArrayRows",
    "Corpus",
    "DataSource",
    "Tokenizer",
    "check_corpus",
    "load_corpus",
    "load_tokenizer",
    "permute",
    "stream_rows",
]
