"""The command `prepare`: tokenise text into a folder of rows, which runs can read later."""

import argparse
import shlex
from pathlib import Path

from adloco_jax.config import completed, default_config, validate
from adloco_jax.data import load_corpus, prepared, rows
from adloco_jax.data.corpus import make_job
from adloco_jax.data.sampling import MAX_GUARD_ROWS
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
    data_settings = settings.data
    if prepared.is_prepared(output):
        print(f"{output}: exists; comparing its settings with the options")
        date = prepared.read_prepared(output).request.get("date", "")
        data_settings = data_settings.model_copy(update={"date": date})
    rows.prepare(make_job(data_settings, encoder, num_heldout_rows=limit), output)
    groups = {
        "data": settings.data.model_copy(update={"source": "tokens", "path": str(output)}),
        "model": settings.model.model_copy(update={"vocab_size": encoder.vocab_size}),
    }
    print(load_corpus(settings.model_copy(update=groups)).describe())
    length = settings.data.sequence_length
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
