"""Tokenizers with one interface: UTF-8 bytes, and the tokenizers that `transformers` loads.

Special tokens are neither added to a text nor recognised in it. For instance, the characters `</s>`
in a web page are tokenised like other characters. So a text cannot contain an end-of-text token,
and only the packing of documents adds one.
"""

import dataclasses
import hashlib
import importlib.util
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adloco_jax import hub
from adloco_jax.data.files import local_path
from adloco_jax.errors import ConfigError, DataError

_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MAX_FILE_BYTES = 2**28  # largest file of a tokenizer; published files stay below 40 MB
_FILES = (".json", ".model")
# How many documents, and how many characters of each, `check_round_trip` encodes and decodes.
_SAMPLED_DOCUMENTS, _SAMPLED_CHARS = 30, 2**14
# The files of a repository on the hub that are downloaded: a vocabulary, in order of preference,
# and the files that describe it.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*")
_HUB_FILES = ("tokenizer_config.json", "merges.txt", "special_tokens_map.json")
_HUB_FILES += ("added_tokens.json", "config.json")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Converts text to token ids and back.

    Attributes:
      vocab_size: Largest id plus one; the end-of-text token counts, too.
      eot_id: The id of the end-of-text token, which closes a document.
      fingerprint: SHA-256 (hex) of the data that determine the ids.
      encode_batch: Converts each of several texts to an int32 array of ids; adds no special tokens.
      decode: Converts ids to text; leaves special tokens and unknown ids out.
      save: Writes files to a folder, from which `transformers` makes a tokenizer with the same ids.
      first_id: The id of the token that opens a text to be classified; None if the tokenizer has no
        such token.
      name: The name in the config, for messages.
    """

    vocab_size: int
    eot_id: int
    fingerprint: str
    encode_batch: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Iterable[int]], str]
    save: Callable[[Path], None]
    first_id: int | None = None
    name: str = ""


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names.

    Args:
      name: One of four kinds of names. `"bytes"`: each id is a UTF-8 byte, and 256 is the end of
        text. The path of a file: a `tokenizer.json`, or a SentencePiece `.model`, which
        `transformers` converts. The path of a folder in Hugging Face layout. The name of a
        repository on the hub; if its files are in the cache, no network is needed. A path that
        exists takes precedence over a repository of this name.

    Returns:
      The tokenizer. If it is from a `tokenizer.json` without special tokens, the end-of-text token
      `<|endoftext|>` is added.

    Raises:
      ConfigError: If the hub has no such tokenizer, if the tokenizer has no end-of-text token, or
        if it is a slow tokenizer, written in Python only.
      DataError: If a path does not exist or its content is damaged.
    """
    return dataclasses.replace(_load(name), name=name)


def _load(name: str) -> Tokenizer:
    if not name:
        raise ConfigError('data.tokenizer is empty: give "bytes", a path or a hub name')
    if name == "bytes":
        return _bytes_tokenizer()
    path = local_path(name, key="data.tokenizer")
    if path.is_file() and path.suffix not in _FILES:
        raise ConfigError(
            f"data.tokenizer={name}: a file must be a tokenizer.json or a SentencePiece .model"
        )
    if path.exists():
        return _hugging_face_tokenizer(path)
    if not hub.NAME.fullmatch(name) or path.suffix in _FILES:
        raise DataError(f"data.tokenizer={name}: no such file or folder")
    # The files are not loaded by `from_pretrained`, which retries for most of a minute if there is
    # no network.
    folder = hub.download(name, _HUB_FILES, one_of=_VOCABULARIES, where=f"data.tokenizer={name}")
    return _hugging_face_tokenizer(folder)


def load_fitting_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """Load a tokenizer, and check that the model has an embedding for each token id.

    Args:
      name: The value of `data.tokenizer`, see `load_tokenizer`.
      vocab_size: The model's vocabulary size.

    Raises:
      ConfigError: If `load_tokenizer` raises it, or if the tokenizer has more ids than the model.
      DataError: If a path does not exist or its content is damaged.
    """
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"data.tokenizer={name} has {tokenizer.vocab_size} ids, model.vocab_size is "
            f"{vocab_size}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def check_round_trip(texts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Encode and decode a few documents, and refuse a tokenizer that loses most of their text.

    The check counts the bytes that come back, in any order. It ignores case and accents, because
    some tokenizers drop them on purpose.

    Args:
      texts: Documents. The beginnings of at most 30 of them, at even distances in the list, are
        encoded and decoded.
      tokenizer: The configured tokenizer.

    Raises:
      DataError: If less than half of the bytes come back, for instance because most words are
        unknown.
    """
    step = max(1, len(texts) // _SAMPLED_DOCUMENTS)
    sample = [text[:_SAMPLED_CHARS] for text in texts[::step][:_SAMPLED_DOCUMENTS]]
    num_bytes = num_back = 0
    for text, ids in zip(sample, tokenizer.encode_batch(sample), strict=True):
        before, after = map(_count_plain_bytes, (text, tokenizer.decode(ids)))
        num_bytes += int(before.sum())
        num_back += int(np.minimum(before, after).sum())
    if 2 * num_back < num_bytes:
        raise DataError(
            f"data.tokenizer={tokenizer.name}: of {len(sample)} sampled documents, encoded and"
            f" decoded again, {num_back} of {num_bytes} bytes come back"
            f" ({num_back / num_bytes:.1%}), need half: the tokenizer was not made for such text;"
            " name another one, or data.tokenizer=bytes, which accepts any text"
        )


def _count_plain_bytes(text: str) -> np.ndarray:
    plain = unicodedata.normalize("NFKD", text).casefold().encode()
    return np.bincount(np.frombuffer(plain, np.uint8), minlength=256)


def _bytes_tokenizer() -> Tokenizer:
    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(folder: Path) -> None:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        # GPT-2's table: a printable byte maps to its own character, the others map to U+0100 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = iter(range(0x100, 0x200))
        vocab = {chr(i if i in printable else next(others)): i for i in range(256)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        fast = _transformers().PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token=_END_OF_TEXT_NAMES[0],
            clean_up_tokenization_spaces=False,
        )
        fast.save_pretrained(str(folder))

    return Tokenizer(257, 256, hashlib.sha256(b"bytes").hexdigest(), encode_batch, decode, save)


def _transformers() -> Any:
    # Without this variable, the import prints the advice to install PyTorch, which is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def _hugging_face_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer with the library `transformers`, from a folder or a single file."""
    tokenizer: Any
    files = [*path.iterdir()] if path.is_dir() else [path]
    needs_sentencepiece = any(file.suffix == ".model" for file in files)
    needs_sentencepiece &= all(file.name != "tokenizer.json" for file in files)
    if needs_sentencepiece and importlib.util.find_spec("sentencepiece") is None:
        raise ConfigError(
            f"data.tokenizer={path}: the package sentencepiece is not installed; pip install"
            " sentencepiece, or name a tokenizer.json"
        )
    for file in files:
        is_part = file.suffix in (".json", ".model", ".txt") and file.is_file()
        if is_part and file.stat().st_size > _MAX_FILE_BYTES:
            raise DataError(
                f"data.tokenizer={file}: {file.stat().st_size} bytes, no tokenizer is larger than"
                f" {_MAX_FILE_BYTES}"
            )
    transformers = _transformers()
    try:
        if path.suffix == ".json":
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        elif path.is_file() or (path / "tokenizer.json").exists():
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
        else:  # `AutoTokenizer` comes last, because it imports PyTorch if that is installed
            auto = transformers.AutoTokenizer
            tokenizer = auto.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # deliberately broad, because each fault raises its own class
        reason = str(error).strip().partition("\n")[0].rstrip(": ") or type(error).__name__
        raise DataError(f"data.tokenizer={path}: damaged or no tokenizer ({reason})") from error
    if path.suffix == ".json":
        _name_special_tokens(tokenizer, path)
    eot_id = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if eot_id is None:
        raise ConfigError(
            f"data.tokenizer={path}: no end-of-text token: set eos_token in tokenizer_config.json"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"data.tokenizer={path}: {type(tokenizer).__name__} is a slow tokenizer, written in"
            " Python only; name a tokenizer that has a tokenizer.json"
        )
    content = tokenizer.backend_tokenizer.to_str()

    return Tokenizer(
        max(tokenizer.get_vocab().values()) + 1,
        eot_id,
        hashlib.sha256(f"{eot_id} {content}".encode()).hexdigest(),
        _encode_fast(tokenizer.backend_tokenizer),
        lambda ids: tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
        lambda folder: tokenizer.save_pretrained(str(folder)),
        tokenizer.cls_token_id,
    )


def _name_special_tokens(tokenizer: Any, path: Path) -> None:
    """Set the end-of-text token of a tokenizer that was loaded from a `tokenizer.json`.

    Such a file does not say which token ends a text, so usual names such as `</s>` are tried. If
    the file has a token `[CLS]`, it becomes the token that opens a text to be classified.
    """
    vocab = tokenizer.get_vocab()
    specials = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    present = [name for name in _END_OF_TEXT_NAMES if name in vocab]
    if not present and specials:
        raise ConfigError(
            f"data.tokenizer={path}: no end-of-text token: have special tokens "
            f"{', '.join(specials)}, need one of {', '.join(_END_OF_TEXT_NAMES)}; a folder in "
            "Hugging Face layout can name its own (eos_token)"
        )
    named = {"eos_token": (present or _END_OF_TEXT_NAMES)[0]}
    tokenizer.add_special_tokens(named | ({"cls_token": "[CLS]"} if "[CLS]" in vocab else {}))


def _encode_fast(backend: Any) -> Callable[[Sequence[str]], list[np.ndarray]]:
    # A tokenizer file may enable truncation and padding, which would silently change the text.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "special" texts in a document are plain text

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    return encode_batch
