"""Turn text into rows of tokens: sources, tokenizers, rows on disk, and their order in a run.

`load_corpus` makes the rows before anything compiles, or finds them in the user's cache.
`Corpus.batch` computes any part of a stream, so a checkpoint keeps one number for each stream.
"""

from adloco_jax.data.arrays import ArrayRows
from adloco_jax.data.corpus import Corpus, load_corpus
from adloco_jax.data.sampling import permute, stream_rows
from adloco_jax.data.sources import DATA_SOURCES, DataSource, Record
from adloco_jax.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "DATA_SOURCES",
    "ArrayRows",
    "Corpus",
    "DataSource",
    "Record",
    "Tokenizer",
    "load_corpus",
    "load_tokenizer",
    "permute",
    "stream_rows",
]
