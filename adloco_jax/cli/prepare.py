"""The command `prepare`: tokenise text into a folder of rows, which runs can read later."""

import argparse
import shlex
from pathlib import Path

from adloco_jax.config import completed, default_config, validate
from adloco_jax.data import Corpus, prepared, rows
from adloco_jax.data.corpus import make_job
from adloco_jax.data.sampling import MAX_GUARD_ROWS, order_of
from adloco_jax.data.tokenizers import load_tokenizer


def prepare(options: argparse.Namespace, command: str) -> None:
    """Make a folder of rows; print what it contains, and the command that trains on these rows."""
    data = dict(vars(options))
    path, output = data.pop("text"), data.pop("output")
    config = default_config()
    config.data.update(data | {"path": "" if "stdlib" in (path, data["source"]) else path})
    config.model.max_length = max(1, data["sequence_length"])
    settings = completed(validate(config), note=print)
    encoder = load_tokenizer(data["tokenizer"], template=data["template"])
    limit = MAX_GUARD_ROWS + settings.eval.num_sequences
    output = Path(output).expanduser().absolute()
    before = {"date": ""}
    if prepared.is_prepared(output):
        print(f"{output}: exists; comparing its settings with the options")
        before["date"] = prepared.read_prepared(output).request.get("date", "")
    job = make_job(settings.data.model_copy(update=before), encoder, num_heldout_rows=limit)
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
            f"data.{key}": value
            for key in ("text_column", "loss", "template")
            if (value := getattr(settings.data, key))
        }
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    print(f"train with: {shlex.join(['adloco', 'train', 'quickstart', *words])}")
