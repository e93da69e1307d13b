"""Tokenizers with one interface: UTF-8 bytes, and the tokenizers that `transformers` loads.

A special token that stands in a text, such as `<|im_end|>`, becomes this token, as in
`transformers`. Only texts to be classified get special tokens at both ends.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import StrictInt

from adloco_jax.data.files import fetched
from adloco_jax.data.formats import checked, read_json
from adloco_jax.errors import ConfigError, DataError, UserError, reason
from adloco_jax.settings import DataSettings, ModelSettings

# Without it, the import of transformers, also that for weights, advises to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

GENERATION = "generation_config.json"
_END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MAX_FILE_BYTES = 2**28  # largest file of a tokenizer; published files stay below 40 MB
# The files of a repository on the hub that are downloaded: a vocabulary, in order of preference,
# and the files that describe it.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*")
_HUB_FILES = ("tokenizer_config.json", "merges.txt", "special_tokens_map.json", "*.jinja")
_HUB_FILES += ("added_tokens.json", "config.json", GENERATION)
_Ids: TypeAlias = StrictInt | list[StrictInt] | None
# A text by which two tokenizers are compared.
_SAMPLE = "The quick brown fox\njumps over 1,300 dogs;\tdef f(x): return x**2  # größer, 日本語 🙂"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Converts text to token ids and back.

    Attributes:
      backend: The tokenizer of the library `tokenizers`.
      vocab_size: Largest id plus one; the end-of-text token counts, too.
      eot_id: The id of the end-of-text token, which closes a document.
      fingerprint: SHA-256 (hex) of the data that determine the ids.
      save: `save(folder, max_length)` writes the files from which `transformers` makes a tokenizer
        with the same ids, and the generation config if there is one. `max_length` is the model's
        context in tokens, or None.
      prefix: Ids that `transformers` puts before a text by default.
      suffix: Ids that it puts after a text.
      token_ids: Entries of config.json that name tokens, for an export.
      ends: Ids that end what the model writes: `eot_id` and those of the folder's generation
        config. Of a classifier none.
      special: The texts that become tokens of their own wherever they stand.
      template: The chat template; empty if there is none.
      render: `render(turns, prompts, tools=None, date="")` returns the text of a chat by the
        template, if `prompts` with the start of an answer; `date` (YYYY-MM-DD, else today's) is
        what the template writes as today's. None if there is no template.
      mark: `mark(turns, tools)` returns the answers in the text, as first character and the one
        behind, if the template marks them (`{% generation %}`); else None.
      turn_end: The added token that ends an answer, whoever writes it: one id or none.
      name: The name in the config, for messages.
    """

    backend: Any
    vocab_size: int
    eot_id: int
    fingerprint: str
    save: Callable[[Path, int | None], None]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    token_ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ends: tuple[int, ...] = ()
    special: tuple[str, ...] = ()
    template: str = ""
    render: Callable[..., str] | None = None
    mark: Callable[..., list[tuple[int, int]]] | None = None
    turn_end: tuple[int, ...] = ()
    name: str = ""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Convert texts to int32 arrays of ids, without prefix and suffix."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_aligned(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Convert a text; also return each token's first character and the one behind, [N, 2]."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        offsets_N2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int32), offsets_N2

    def decode(self, ids: Iterable[int]) -> str:
        """Convert ids to text, special tokens included; leave unknown ids out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def on(self, date: str) -> "Tokenizer":
        """Return a tokenizer whose template writes a date; see `render`."""
        render, mark = (
            call and functools.partial(call, date=date) for call in (self.render, self.mark)
        )
        return dataclasses.replace(self, render=render, mark=mark)

    def reads(self, field: str) -> bool:
        """Whether the chat template names a field of turns, or of what else it is given."""
        return _names(self.template, field)


class _Bytes(Tokenizer):
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Convert texts without the library, which takes a thousand times as long."""
        return [self._encode(text.encode()) for text in texts]

    def _encode(self, text: bytes) -> np.ndarray:
        end = np.array([self.eot_id])
        pieces = [np.frombuffer(piece, np.uint8) for piece in text.split(_END_OF_TEXT.encode())]
        parts = [part for piece in pieces for part in (end, piece)]
        return np.concatenate(parts[1:], dtype=np.int32)


@functools.cache
def _names(template: str, field: str) -> bool:
    return re.search(rf"\b{re.escape(field)}\b", template) is not None


@functools.cache
def _on(template: str, date: str) -> str:
    """Write another date for today's in a template, which gets no function from a caller."""
    if not date:
        return template
    day = datetime.date.fromisoformat(date)
    call = r"""strftime_now\(\s*(["'])(.*?)\1\s*\)"""
    return re.sub(call, lambda found: repr(day.strftime(found[2])), template)


def load_tokenizer(
    name: str, *, text_length: int | None = None, template: str = "", key: str = "data.tokenizer"
) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names.

    Args:
      name: "bytes" (an id is a UTF-8 byte, and 256 ends a text), a `tokenizer.json`, a
        SentencePiece `.model`, a folder in Hugging Face layout, the address of one
        (`data.files`), or a repository on the hub. An existing path takes precedence.
      text_length: Upper limit of tokens of a text to be classified; the tokenizer then has a
        prefix and a suffix, if need be its classification token and end-of-text token. Else None.
      template: File with a chat template that replaces the tokenizer's. Empty: its own.
      key: The key of the config that gave the name, for messages.

    Returns:
      The tokenizer; a `tokenizer.json` without special tokens gets `<|endoftext|>`.

    Raises:
      ConfigError: If the hub has no such tokenizer, or it has no end-of-text token, or is slow
        (written in Python only).
      DataError: If a path does not exist or its content is damaged.
    """
    try:
        text = Path(template).expanduser().read_text("utf-8") if template else ""
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.template={template}: unreadable ({reason(error)})") from error
    if name == "bytes":
        return dataclasses.replace(_bytes_tokenizer(text_length, text), name=name)
    hint = "data.tokenizer names another, such as bytes"
    options: Any = {"one_of": _VOCABULARIES, "key": key, "hint": hint}
    with fetched(name, _HUB_FILES, **options) as path:
        if not path.exists():
            raise DataError(f"{key}={name}: no such file or folder")
        if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _VOCABULARIES):
            raise ConfigError(f"{key}={name}: has no tokenizer; {hint}")
        tokenizer = _hugging_face_tokenizer(path, text_length, text, key)
    return dataclasses.replace(tokenizer, name=name)


def tokenizer_of(
    data: DataSettings,
    model: ModelSettings,
    *,
    num_classes: int | None = None,
    run: Path | None = None,
) -> Tokenizer:
    """Load a run's tokenizer: that of its checkpoint, or else the configured one.

    Without either it is bytes, unless the run starts from weights. If it is gone, the export in the
    folder `run` may have it.

    Raises:
      ConfigError: As from `load_tokenizer`, if the configured tokenizer gives other ids than the
        checkpoint's, if weights have no tokenizer, or if it has more ids than the model.
      DataError: If a path does not exist or its content is damaged.
    """
    name, source = data.tokenizer, model.init_from
    own_options = {"text_length": None if num_classes is None else data.sequence_length}
    options: Any = own_options | {"template": data.template}
    own = None
    # A run with a configured tokenizer resumes without the checkpoint.
    if source and name not in (None, source):
        with contextlib.suppress(UserError):
            own = load_tokenizer(source, key="model.init_from", **options)
    try:
        key = "data.tokenizer" if name else "model.init_from"
        tokenizer = load_tokenizer(name or source or "bytes", key=key, **options)
    except UserError:
        if run is None or not (run / "export" / "tokenizer_config.json").exists():
            raise
        tokenizer = load_tokenizer(str(run / "export"), **own_options)
    if own:
        if _facts(tokenizer) != _facts(own):
            raise ConfigError(
                f"data.tokenizer={name}: {tokenizer.vocab_size} ids, and other ids for a text than"
                f" the tokenizer of model.init_from={source} with {own.vocab_size}, for which the"
                " weights were made; leave data.tokenizer unset (=none)"
            )
        fingerprint = tokenizer.fingerprint
        tokenizer = dataclasses.replace(own, name=tokenizer.name, fingerprint=fingerprint)
    if tokenizer.vocab_size > model.vocab_size and source:
        size = tokenizer.vocab_size
        raise ConfigError(
            f"data.tokenizer={tokenizer.name} has {size} ids, the embedding of"
            f" model.init_from={source} has {model.vocab_size}; enlarge it: in transformers"
            f" model.resize_token_embeddings({size}) gives new rows the mean of the others, then"
            " save_pretrained(FOLDER) model and tokenizer, and set model.init_from=FOLDER"
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"data.tokenizer={tokenizer.name} has {tokenizer.vocab_size} ids, model.vocab_size is "
            f"{model.vocab_size}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _facts(tokenizer: Tokenizer) -> tuple:
    (ids,) = tokenizer.encode_batch([_SAMPLE])
    return tokenizer.vocab_size, tokenizer.eot_id, ids.tolist()


def _bytes_tokenizer(text_length: int | None, template: str) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # GPT-2's table: a printable byte maps to its own character, the others map to U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    vocab = {chr(i if i in printable else next(others)): i for i in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_END_OF_TEXT])

    def for_transformers() -> Any:
        names = {"eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT}
        return _transformers().PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=template or None,
            clean_up_tokenization_spaces=False,
            **names,
        )

    def save(folder: Path, max_length: int | None) -> None:
        tokenizer = for_transformers()
        if text_length is not None:
            _mark_ends(tokenizer, _END_OF_TEXT, text_length)
        _save(tokenizer, folder, max_length)

    end = (256,)
    around, ends = ((), end) if text_length is None else (end, ())
    return _Bytes(
        backend,
        257,
        256,
        hashlib.sha256(b"bytes").hexdigest(),
        save,
        prefix=around,
        suffix=around,
        token_ids={"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None},
        ends=ends,
        special=(_END_OF_TEXT,),
        **(_chats(for_transformers()) if template else {}),
    )


def _chats(tokenizer: Any) -> dict[str, Any]:
    """Return what a tokenizer has for chats."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # it has none
        return {}

    def apply(turns: list[dict[str, Any]], tools: list | None, date: str, **how: Any) -> Any:
        template = _on(tokenizer.get_chat_template(tools=tools), date)
        return tokenizer.apply_chat_template(turns, tools=tools, chat_template=template, **how)

    def render(
        turns: list[dict[str, Any]], prompts: bool, tools: list | None = None, date: str = ""
    ) -> str:
        return apply(turns, tools, date, tokenize=False, add_generation_prompt=prompts)

    def mark(turns: list, tools: list | None, date: str = "") -> list[tuple[int, int]]:
        offsets = {"tokenizer_kwargs": {"return_offsets_mapping": True}}
        found = apply(turns, tools, date, return_assistant_tokens_mask=True, **offsets)
        edges = np.flatnonzero(np.diff(found["assistant_masks"], prepend=0, append=0))
        offsets = found["offset_mapping"]
        return [(offsets[a][0], offsets[b - 1][1]) for a, b in edges.reshape(-1, 2)]

    given = {"template": template, "render": render, "turn_end": _turn_end(tokenizer, render)}
    return given | ({"mark": mark} if re.search(r"\{%-?\s*generation\b", template) else {})


def _turn_end(tokenizer: Any, render: Callable[..., str]) -> tuple[int, ...]:
    """Find the added token that follows an answer when it is rendered.

    If the template writes none (GLM's), it is the one with which the next question begins.
    """
    question, answer = ({"role": r, "content": "xyzzy"} for r in ("user", "assistant"))
    try:
        texts = [
            render([question, answer], False).rpartition("xyzzy")[2],
            render([question, answer, question], False).split("xyzzy")[2],
        ]
    except Exception:  # deliberately broad, because templates are programs
        return ()
    for text in texts:
        first = tokenizer.encode(text.strip(), add_special_tokens=False)[:1]
        if first and first[0] in tokenizer.added_tokens_decoder:
            return tuple(first)
    return ()


def stop_ids(folder: Path, vocab_size: int | None = None) -> tuple[int, ...]:
    """Return the ids at which `transformers` stops to generate with the model in a folder.

    With `vocab_size` only those that the model can write, because others end nothing.

    Raises DataError if the file that names them is damaged.
    """
    for path in (folder / GENERATION, folder / "config.json"):
        if path.is_file():
            content = read_json(path, DataError, max_bytes=_MAX_FILE_BYTES, links=True)
            given = content.get("eos_token_id", [])
            ids = checked(given, _Ids, f"{path}: eos_token_id", DataError)
            if ids is None:
                return ()
            if isinstance(ids, int):
                ids = [ids]
            return tuple(i for i in ids if vocab_size is None or 0 <= i < vocab_size)
    return ()


def _transformers() -> Any:
    import transformers

    return transformers


def _hugging_face_tokenizer(
    path: Path, text_length: int | None, template: str, key: str
) -> Tokenizer:
    tokenizer: Any
    for file in path.iterdir() if path.is_dir() else [path]:
        is_part = file.suffix in (".json", ".model", ".txt", ".jinja")
        if is_part and file.stat().st_size > _MAX_FILE_BYTES:
            raise DataError(
                f"{key}={file}: {file.stat().st_size} bytes, no tokenizer is larger than"
                f" {_MAX_FILE_BYTES}"
            )
    transformers = _transformers()
    try:
        if path.suffix == ".json":
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        elif path.is_file() or _has_code(path):
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
            tokenizer.init_kwargs.pop("auto_map", None)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # deliberately broad, because each fault raises its own class
        reason = str(error).strip().partition("\n")[0].rstrip(": ") or type(error).__name__
        raise DataError(f"{key}={path}: damaged or no tokenizer ({reason})") from error
    if path.suffix == ".json":
        _name_special_tokens(tokenizer)
    eot_id = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if eot_id is None or not tokenizer.is_fast:
        raise ConfigError(
            f"{key}={path}: {type(tokenizer).__name__} with eos_token {tokenizer.eos_token}: need a"
            " folder with a tokenizer.json, whose tokenizer_config.json names an eos_token"
        )
    end = tokenizer.convert_ids_to_tokens(eot_id)
    if tokenizer.pad_token is None and (path.is_file() or text_length is not None):
        tokenizer.pad_token = end
    if text_length is not None:
        _mark_ends(tokenizer, end, text_length)
    backend = tokenizer.backend_tokenizer
    # A tokenizer file may enable truncation and padding, which would silently change the text.
    backend.no_truncation()
    backend.no_padding()
    prefix, suffix = _ends(backend)
    # PyTorch does not train the embedding that the model's config names as padding.
    pad_id = None if tokenizer.pad_token_id == eot_id else tokenizer.pad_token_id
    token_ids = {"bos_token_id": tokenizer.bos_token_id}
    token_ids |= {"eos_token_id": eot_id, "pad_token_id": pad_id}

    def save(folder: Path, max_length: int | None) -> None:
        _save(tokenizer, folder, max_length)
        if (generation := path / GENERATION).is_file():
            shutil.copyfile(generation, folder / GENERATION)

    tokenizer.chat_template = template or tokenizer.chat_template
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    ends: tuple[int, ...] = ()
    if text_length is None:
        ends = tuple(dict.fromkeys((*stop_ids(path, vocab_size), eot_id)))
    return Tokenizer(
        backend,
        vocab_size,
        eot_id,
        hashlib.sha256(f"{eot_id} {backend.to_str()}".encode()).hexdigest(),
        save,
        prefix=prefix,
        suffix=suffix,
        token_ids=token_ids,
        ends=ends,
        special=tuple(tokenizer.get_added_vocab()),
        **_chats(tokenizer),
    )


def _has_code(folder: Path) -> bool:
    """Whether a folder with a `tokenizer.json` names code of its own, which is never run."""
    config = folder / "tokenizer_config.json"
    if not config.exists() or not (folder / "tokenizer.json").exists():
        return False
    return "auto_map" in read_json(config, DataError, max_bytes=_MAX_FILE_BYTES, links=True)


def _mark_ends(tokenizer: Any, end: str, text_length: int) -> None:
    """Make the tokenizer of a classifier: special tokens at both ends, one length, one side."""
    from tokenizers import processors

    backend = tokenizer.backend_tokenizer
    before, after = ([backend.id_to_token(i) for i in ids] for ids in _ends(backend))
    if not before or not after:
        before, after = before or [tokenizer.cls_token or end], after or [end]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)],
            special_tokens=[(name, backend.token_to_id(name)) for name in {*before, *after}],
        )
    # Rows begin at position 0, and long texts lose their end.
    tokenizer.init_kwargs |= {"padding_side": "right", "truncation_side": "right"}
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    tokenizer.model_max_length = min(tokenizer.model_max_length, text_length)


def _ends(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    import tokenizers

    word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).encode("a")
    marked = backend.post_process(word)
    at = marked.special_tokens_mask.index(0)
    return tuple(marked.ids[:at]), tuple(marked.ids[at + 1 :])


def _save(tokenizer: Any, folder: Path, max_length: int | None) -> None:
    if max_length is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, max_length)
    if getattr(tokenizer, "legacy", False):  # transformers reads this key and does not write it
        tokenizer.init_kwargs["legacy"] = True
    tokenizer.save_pretrained(str(folder))


def _name_special_tokens(tokenizer: Any) -> None:
    """Try usual names of the end-of-text token, which a `tokenizer.json` does not name.

    If it has none of them, but others that are special, the name of its own is not known.
    """
    vocab = tokenizer.get_vocab()
    present = [name for name in _END_OF_TEXT_NAMES if name in vocab]
    if present or not any(token.special for token in tokenizer.added_tokens_decoder.values()):
        named = {"eos_token": (present or _END_OF_TEXT_NAMES)[0]}
        tokenizer.add_special_tokens(named | ({"cls_token": "[CLS]"} if "[CLS]" in vocab else {}))
