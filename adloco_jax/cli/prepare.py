"""The command `prepare`: tokenise text into a folder of rows, which runs can read later."""

import argparse
import shlex
from pathlib import Path

from adloco_jax.config import default_config, validate
from adloco_jax.data import Corpus, prepared, rows
from adloco_jax.data.corpus import column_of_texts, make_job
from adloco_jax.data.files import find, is_on_hub
from adloco_jax.data.sampling import MAX_GUARD_ROWS, order_of
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError
from adloco_jax.settings import DataSettings

# The source that reads a file, by the ending of its name. Others are read as text.
SOURCES = {
    **{"json": "jsonl", "jsonl": "jsonl", "parquet": "parquet"},
    **{"csv": "hf", "tsv": "hf", "arrow": "hf"},
}
# Endings of files that contain other data beside text, which a model would learn, too.
_MARKUP, _PACKED = "html htm xhtml xml ipynb rtf".split(), "zip tar bz2 xz zst 7z".split()
_BINARY = "xls xlsx ods feather orc avro npy npz pkl h5 db sqlite pdf docx odt epub".split()
_REFUSED = dict.fromkeys(_MARKUP, "convert it, or name the source text, which reads it as it is")
_REFUSED |= dict.fromkeys(_PACKED, "unpack it, or compress it with gzip")
_REFUSED |= dict.fromkeys(_BINARY, "convert it")


def guess_source(path: str, key: str = "path") -> str:
    """Guess the `data.source` that reads a path by its files' endings; `hf` for a name on the hub.

    Raises:
      ConfigError: If the files are of several kinds, or of a kind that is not plain text.
      DataError: If the path leads to no file and is not the name of a data set.
    """
    if path == "stdlib":
        return path
    if _ending(path) not in {*SOURCES, *_REFUSED, "txt"} and is_on_hub(path, key=key):
        return "hf"
    kinds = {}
    for name in find(path, key=key):
        ending = _ending(name)
        if ending in _REFUSED:
            raise ConfigError(
                f"{key}={path}: {name}: .{ending} is no plain text; {_REFUSED[ending]}"
            )
        kinds.setdefault(SOURCES.get(ending, "text"), name)
    if any(name.endswith(".arrow") for name in kinds.values()):
        return "hf"  # a data set that the library `datasets` saved; it also has files in JSON
    if len(kinds) > 1:
        raise ConfigError(
            f"{key}={path}: files of several kinds ({', '.join(kinds.values())}); give a glob, or"
            " name the source"
        )
    return next(iter(kinds))


def _ending(name: str) -> str:
    return name.lower().removesuffix(".gz").rpartition(".")[2]


def prepare(options: argparse.Namespace, command: str) -> None:
    """Make a folder of rows; print what it contains, and the command that trains on these rows."""
    data = dict(vars(options))
    path, output, source = (data.pop(key) for key in ("text", "output", "source"))
    if source is None:
        source = guess_source(path)
        print(f"source: {source}, by the name {path}; --source names another")
    if data["text_column"] == "text":
        given = DataSettings().model_copy(update=data | {"source": source, "path": path})
        data["text_column"] = column_of_texts(given)
    config = default_config()
    config.data.update(data | {"source": source, "path": "" if source == "stdlib" else path})
    config.model.max_length = max(1, data["sequence_length"])
    settings = validate(config)
    encoder = load_tokenizer(data["tokenizer"], template=data["template"])
    limit = MAX_GUARD_ROWS + settings.eval.num_sequences
    output = Path(output).expanduser().absolute()
    begun = {"date": rows.request_of(output).get("date", "")}  # as when it was begun
    job = make_job(settings.data.model_copy(update=begun), encoder, num_heldout_rows=limit)
    if prepared.is_prepared(output):
        print(f"{output}: exists; comparing its settings with the options")
    manifest = rows.prepare(job, output)
    arrays, length = prepared.open_rows(output, manifest), settings.data.sequence_length
    order = order_of(settings, len(arrays[0]), where=str(output))
    train, heldout = prepared.document_rows(arrays)
    print(Corpus(train, heldout, encoder, manifest, order, manifest.tokens_per_byte).describe())
    keys = {  # config keys that these rows determine
        "data.source": "tokens",
        "data.path": output,
        "data.tokenizer": data["tokenizer"],
        "data.sequence_length": length,
        "model.vocab_size": encoder.vocab_size,
        "model.max_length": length,
    }
    if settings.data.is_chat:
        keys |= {
            f"data.{key}": data[key] for key in ("text_column", "loss", "template") if data[key]
        }
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    print(f"train with: {shlex.join(['adloco', 'train', 'quickstart', *words])}")
