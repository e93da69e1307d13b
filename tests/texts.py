"""Documents for data tests: written as JSON lines, and recovered from rows of bytes."""

import gzip
import json
import re

import numpy as np

END = 256


def write_documents(folder, documents, name="docs.jsonl"):
    """Writes a JSON line for each text or record, compressed if the file name says so."""
    records = [{"text": given} if isinstance(given, str) else given for given in documents]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def byte_tokenizer(*special):
    """A tokenizer of bytes, of the library `tokenizers`; special tokens have the first ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # slow to import

    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special])
    return backend


def save_byte_tokenizer(folder, **names):
    """Writes a Hugging Face folder of a tokenizer of bytes with special tokens or a template."""
    from transformers import PreTrainedTokenizerFast  # slow to import

    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **names).save_pretrained(folder)
    return folder


def numbered_documents(count):
    """Texts of uneven length, each made of a unique number."""
    repeats = np.random.default_rng(0).integers(5, 60, count)
    return [f"<{number}>" * int(times) for number, times in enumerate(repeats)]


def as_stream(rows):
    """The text of consecutive rows, with NUL for end of text."""
    flat = np.asarray(rows).reshape(-1).astype(int)
    return bytes(np.where(flat == END, 0, flat).astype(np.uint8)).decode()


def numbers_in(rows):
    return set(re.findall(r"<(\d+)>", as_stream(rows)))
