"""Tokenizers with one interface: UTF-8 bytes, and the tokenizers that `transformers` loads.

A special token whose name stands in a text, such as `<|im_end|>`, becomes one id, as in
`transformers`. Only texts to be classified get special tokens at both ends. A *turn* of a chat is a
dict with "role" and "content"; an *answer* is a turn of the role "assistant". A *chat template* is
a program in Jinja that writes turns as one text, or raises an error of any class. *Added* tokens
are those that a tokenizer never splits. An *export* is a trained model with its tokenizer, in a
folder that `transformers` reads. In this file `backend` is a tokenizer of the library `tokenizers`,
and an untyped `tokenizer` one of `transformers`, around a backend.
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
# Usual names of the end-of-text token, the most usual first.
_END_OF_TEXT_NAMES = (_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MAX_FILE_BYTES = 2**28  # largest file of a tokenizer; published files stay below 40 MB
# The files of a repository on the hub that are downloaded: a vocabulary, in order of preference,
# and the files that describe it.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*")
_HUB_FILES = (
    *("tokenizer_config.json", "merges.txt", "special_tokens_map.json", "*.jinja"),
    *("added_tokens.json", "config.json", GENERATION),
)
_Ids: TypeAlias = StrictInt | list[StrictInt] | None  # `eos_token_id` in a JSON file
_ANSWER = "xyzzy"  # the content of turns by which a template is tried; no template writes it
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
        config. A classifier has none.
      special: The texts that become tokens of their own wherever they stand.
      template: The text of the chat template; empty if there is none.
      render: `render(turns, prompts, tools=None, date="")` returns the text of a chat by the
        template; with `prompts`, the start of an answer follows the last turn. `tools` are objects
        in JSON Schema, or None. `date` (YYYY-MM-DD; empty: today's) is what the template writes as
        today's. None if there is no template.
      mark: `mark(turns, tools, date="")` returns the answers in the text that `render` returns, as
        pairs of the first character and the one after. None unless the template marks answers by
        `{% generation %}`.
      turn_end: The added token after an answer in the text of a chat: a tuple of one id or none.
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
        """Convert a text to int32 ids [N]; also return the characters of each token, int64 [N, 2].

        They are the index of its first character, and of the one after its last.
        """
        encoding = self.backend.encode(text, add_special_tokens=False)
        offsets_N2 = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int32), offsets_N2

    def decode(self, ids: Iterable[int]) -> str:
        """Convert ids to text, special tokens included; leave unknown ids out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def on(self, date: str) -> "Tokenizer":
        """Return this tokenizer with a template that writes `date` (YYYY-MM-DD) as today's."""
        render = self.render
        mark = self.mark
        if render is not None:
            render = functools.partial(render, date=date)
        if mark is not None:
            mark = functools.partial(mark, date=date)
        return dataclasses.replace(self, render=render, mark=mark)

    def reads(self, field: str) -> bool:
        """Return whether a word stands in the chat template.

        It may be the name of a field of turns ("tool_calls"), of a variable ("tools"), or of a
        function ("strftime_now").
        """
        return _has_word(self.template, field)


class _Bytes(Tokenizer):
    """The tokenizer whose ids are UTF-8 bytes, and 256 for the end of text."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Convert texts without the library, which takes a thousand times as long."""
        return [self._encode(text.encode()) for text in texts]

    def _encode(self, text: bytes) -> np.ndarray:
        """Return the bytes of a UTF-8 text as int32 ids; `<|endoftext|>` becomes `eot_id`."""
        first, *others = text.split(_END_OF_TEXT.encode())
        parts = [np.frombuffer(first, np.uint8)]
        for piece in others:
            parts.append(np.array([self.eot_id]))
            parts.append(np.frombuffer(piece, np.uint8))
        return np.concatenate(parts, dtype=np.int32)


@functools.cache
def _has_word(template: str, word: str) -> bool:
    """Return whether a word stands in a template, not as a part of a longer word."""
    return re.search(rf"\b{re.escape(word)}\b", template) is not None


@functools.cache
def _with_date(template: str, date: str) -> str:
    """Return a template that writes a date (YYYY-MM-DD) as today's; if empty, the template itself.

    Calls of `strftime_now` in the template's text are replaced by their result, because
    `transformers` lets no caller give this function.
    """
    if not date:
        return template
    day = datetime.date.fromisoformat(date)
    call = r"""strftime_now\(\s*(["'])(?P<format>.*?)\1\s*\)"""
    # `repr` writes the date in quotes, as the template needs it.
    return re.sub(call, lambda found: repr(day.strftime(found["format"])), template)


def load_tokenizer(
    name: str, *, text_length: int | None = None, template: str = "", key: str = "data.tokenizer"
) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names.

    A classifier reads a text between special tokens. Where the tokenizer puts none, they are its
    classification token in front (`[CLS]`, from which BERT predicts the class; else the
    end-of-text token), and its end-of-text token after it.

    Args:
      name: "bytes" (an id is a UTF-8 byte, and 256 ends a text), a `tokenizer.json`, a
        SentencePiece `.model`, a folder in Hugging Face layout, the address of one
        (`data.files`), or a repository on the hub, unless a path has its name.
      text_length: Upper limit of tokens of a text to be classified, special tokens included; the
        result then has these as prefix and suffix. None: texts are not classified.
      template: File with a chat template that replaces the tokenizer's. Empty: its own.
      key: The key of the config that gave the name, for messages.

    Returns:
      The tokenizer; a `tokenizer.json` without special tokens gets `<|endoftext|>`.

    Raises:
      ConfigError: If a folder, an address or the hub's repository has no tokenizer; the hub has no
        such repository; an address cannot be used, or a server refuses access; the tokenizer has no
        end-of-text token, or is slow (written in Python only).
      DataError: If the template's file cannot be read; a path does not exist or cannot be looked
        at; there is no file at the address, or a copy does not have the size or hash that the
        server states; a file of the tokenizer is damaged or larger than 256 MiB.
      ResourceError: If the hub or the address's server does not answer.
    """
    template_text = ""
    if template:
        try:
            template_text = Path(template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.template={template}: unreadable ({reason(error)})") from error
    if name == "bytes":
        return dataclasses.replace(_bytes_tokenizer(text_length, template_text), name=name)
    hint = "data.tokenizer names another, such as bytes"
    # `path` is the file or folder itself, or a copy on this machine.
    with fetched(name, _HUB_FILES, one_of=_VOCABULARIES, key=key, hint=hint) as path:
        if not path.exists():
            raise DataError(f"{key}={name}: no such file or folder")
        if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _VOCABULARIES):
            raise ConfigError(f"{key}={name}: has no tokenizer; {hint}")
        tokenizer = _hugging_face_tokenizer(path, text_length, template_text, key)
    return dataclasses.replace(tokenizer, name=name)


def tokenizer_of(
    data: DataSettings,
    model: ModelSettings,
    *,
    num_classes: int | None = None,
    run: Path | None = None,
) -> Tokenizer:
    """Load a run's tokenizer: `data.tokenizer`, or that of the checkpoint `model.init_from`.

    If neither is set it is bytes. If both are set, and both tokenizers can be loaded, they must be
    alike, and the checkpoint's is returned, under the configured one's name and fingerprint. It has
    the special tokens that the weights know, and their chat template unless `data.template` is set.
    If the checkpoint's cannot be loaded, the configured one is returned.

    Args:
      data: The config's group `data`.
      model: The config's group `model`.
      num_classes: Number of classes of texts to be classified; else None.
      run: Folder of a run that resumes. The tokenizer of its export stands for one that cannot be
        loaded any more.

    Raises:
      ConfigError: If the two tokenizers are not alike, or the tokenizer has more ids than the
        model; if there is no tokenizer at the path, the address or on the hub; if it has no
        end-of-text token, or is slow (written in Python only); if a server refuses access.
      DataError: If a path does not exist, a file of the tokenizer is damaged, or the file of
        `data.template` cannot be read.
      ResourceError: If the hub or the address's server does not answer.
    """
    name = data.tokenizer  # None: not set
    checkpoint = model.init_from
    text_length = None if num_classes is None else data.sequence_length

    def load(name: str, key: str) -> Tokenizer:
        """Load the tokenizer `name` of the config's `key`; UserError if it cannot be loaded."""
        return load_tokenizer(name, text_length=text_length, template=data.template, key=key)

    try:
        if name:
            tokenizer = load(name, "data.tokenizer")
        else:
            tokenizer = load(checkpoint or "bytes", "model.init_from")
    except UserError:
        if run is None or not (run / "export" / "tokenizer_config.json").exists():
            raise
        # The export has the run's template.
        tokenizer = load_tokenizer(str(run / "export"), text_length=text_length)

    of_weights = None
    if name and checkpoint and name != checkpoint:
        # A run with a configured tokenizer resumes without the checkpoint.
        with contextlib.suppress(UserError):
            of_weights = load(checkpoint, "model.init_from")
    if of_weights is not None:
        if not _are_alike(tokenizer, of_weights):
            raise ConfigError(
                f"data.tokenizer={name}: {tokenizer.vocab_size} ids, and other ids for a text than"
                f" the tokenizer of model.init_from={checkpoint} with {of_weights.vocab_size}, for"
                " which the weights were made; leave data.tokenizer unset (=none)"
            )
        # Rows are found in the cache by the fingerprint, with and without the checkpoint.
        tokenizer = dataclasses.replace(
            of_weights, name=tokenizer.name, fingerprint=tokenizer.fingerprint
        )
    _require_known_ids(tokenizer, model)
    return tokenizer


def _are_alike(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers have the same number of ids, and the same ids for a sample.

    The end of text must have the same id, too. The sample is a text with letters of several
    scripts, digits and white space.
    """
    (ids,) = tokenizer.encode_batch([_SAMPLE])
    (other_ids,) = other.encode_batch([_SAMPLE])
    if tokenizer.vocab_size != other.vocab_size or tokenizer.eot_id != other.eot_id:
        return False
    return np.array_equal(ids, other_ids)


def _require_known_ids(tokenizer: Tokenizer, model: ModelSettings) -> None:
    """Raise ConfigError if a tokenizer has more ids than the model's embedding has rows."""
    size = tokenizer.vocab_size
    if size <= model.vocab_size:
        return
    if model.init_from:
        raise ConfigError(
            f"data.tokenizer={tokenizer.name} has {size} ids, the embedding of"
            f" model.init_from={model.init_from} has {model.vocab_size}; enlarge it: in"
            f" transformers model.resize_token_embeddings({size}) gives new rows the mean of the"
            " others, then save_pretrained(FOLDER) model and tokenizer, and set"
            " model.init_from=FOLDER"
        )
    raise ConfigError(
        f"data.tokenizer={tokenizer.name} has {size} ids, model.vocab_size is "
        f"{model.vocab_size}: set model.vocab_size to at least {size}"
    )


def _bytes_tokenizer(text_length: int | None, template: str) -> Tokenizer:
    """Make the tokenizer whose ids are UTF-8 bytes, and 256 for the end of text.

    `text_length` is the upper limit of tokens of a text to be classified, which gets an end of text
    at both ends; None: texts are not classified. `template` is the text of a chat template; empty:
    none.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # GPT-2's table: a printable byte maps to its own character, the others map to U+0100 on. The
    # library tokenises characters, and `ByteLevel` turns bytes into these.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    vocab = {}
    for byte in range(256):
        character = chr(byte) if byte in printable else chr(next(others))
        vocab[character] = byte
    eot_id = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_END_OF_TEXT])

    def for_transformers() -> Any:
        """Return the tokenizer of `transformers` with the same ids."""
        return _transformers().PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=template or None,
            clean_up_tokenization_spaces=False,  # decoded text keeps the space before "."
            eos_token=_END_OF_TEXT,
            pad_token=_END_OF_TEXT,
        )

    def save(folder: Path, max_length: int | None) -> None:
        """Write the files from which `transformers` makes a tokenizer with the same ids.

        `max_length` is the model's context in tokens, or None.
        """
        tokenizer = for_transformers()
        if text_length is not None:
            _prepare_for_classes(tokenizer, _END_OF_TEXT, text_length)
        _save(tokenizer, folder, max_length)

    is_classifier = text_length is not None
    result = _Bytes(
        backend,
        vocab_size=eot_id + 1,
        eot_id=eot_id,
        fingerprint=hashlib.sha256(b"bytes").hexdigest(),
        save=save,
        prefix=(eot_id,) if is_classifier else (),
        suffix=(eot_id,) if is_classifier else (),
        token_ids={"bos_token_id": None, "eos_token_id": eot_id, "pad_token_id": None},
        ends=() if is_classifier else (eot_id,),
        special=(_END_OF_TEXT,),
    )
    if not template:
        return result
    return _with_chats(result, for_transformers())


def _with_chats(result: Tokenizer, tokenizer: Any) -> Tokenizer:
    """Return the tokenizer `result` with the fields for chats: template, render, mark, turn_end.

    `tokenizer` is one of `transformers` with the same ids. If it has no chat template, `result` is
    returned as it is.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # there is none
        return result

    def dated_template(tools: list | None, date: str) -> str:
        """Return the template for a chat, which writes `date` as today's; empty: the true date.

        A tokenizer may have another template for chats with `tools`.
        """
        return _with_date(tokenizer.get_chat_template(tools=tools), date)

    def render(
        turns: list[dict[str, Any]], prompts: bool, tools: list | None = None, date: str = ""
    ) -> str:
        """Return the text that the template writes for a chat.

        With `prompts`, the start of an answer follows the last turn. `tools` are descriptions in
        JSON Schema, and `date` is written as today's (YYYY-MM-DD; empty: the true date).
        """
        return tokenizer.apply_chat_template(
            turns,
            tools=tools,
            chat_template=dated_template(tools, date),
            tokenize=False,
            add_generation_prompt=prompts,
        )

    def mark(turns: list, tools: list | None, date: str = "") -> list[tuple[int, int]]:
        """Return each answer in the text of `render`: its first character, and the one after.

        The arguments are those of `render`: a chat's turns, descriptions of tools or None, and the
        date that the template writes as today's (empty: the true date).
        """
        encoded = tokenizer.apply_chat_template(
            turns,
            tools=tools,
            chat_template=dated_template(tools, date),
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
        # The mask is 1 for tokens of an answer. It changes where an answer begins and where it has
        # ended, so that each pair of changes is an answer: its first token, and the one after.
        changes = np.flatnonzero(np.diff(encoded["assistant_masks"], prepend=0, append=0))
        offsets = encoded["offset_mapping"]  # first character of each token, and the one after
        answers = []
        for first, end in changes.reshape(-1, 2):
            answers.append((offsets[first][0], offsets[end - 1][1]))
        return answers

    marks_answers = re.search(r"\{%-?\s*generation\b", template) is not None
    return dataclasses.replace(
        result,
        template=template,
        render=render,
        mark=mark if marks_answers else None,
        turn_end=_turn_end(tokenizer, render),
    )


def _turn_end(tokenizer: Any, render: Callable[..., str]) -> tuple[int, ...]:
    """Return the added token that follows an answer in a rendered chat: one id, or none.

    An added token is one that the tokenizer never splits. If the template writes none after the
    last answer (GLM's), it is the one with which the next question begins. There is none if the
    template refuses these chats. `tokenizer` is one of `transformers`, and `render` writes a chat
    by its template.
    """
    question = {"role": "user", "content": _ANSWER}
    answer = {"role": "assistant", "content": _ANSWER}
    try:
        _, _, after_last = render([question, answer], prompts=False).rpartition(_ANSWER)
        # Question and answer are the same word: split there, the third part is between the answer
        # and the next question.
        before_question = render([question, answer, question], prompts=False).split(_ANSWER)[2]
    except Exception:  # deliberately broad, because templates are programs
        return ()
    for text in (after_last, before_question):
        ids = tokenizer.encode(text.strip(), add_special_tokens=False)
        if ids and ids[0] in tokenizer.added_tokens_decoder:
            return (ids[0],)
    return ()


def stop_ids(folder: Path, vocab_size: int | None = None) -> tuple[int, ...]:
    """Return the ids at which `transformers` stops to generate with the model in a folder.

    They are the `eos_token_id` of generation_config.json if there is one, or else of config.json;
    empty if there is neither file, or no id in it. With `vocab_size` only ids below it are
    returned, because the model cannot write others. Raises DataError if the file is damaged.
    """
    path = folder / GENERATION
    if not path.is_file():
        path = folder / "config.json"
    if not path.is_file():
        return ()
    # In the hub's cache, files are links.
    content = read_json(path, DataError, max_bytes=_MAX_FILE_BYTES, links=True)
    ids = checked(content.get("eos_token_id", []), _Ids, f"{path}: eos_token_id", DataError)
    if ids is None:
        return ()
    if isinstance(ids, int):
        ids = [ids]
    return tuple(i for i in ids if vocab_size is None or 0 <= i < vocab_size)


def _transformers() -> Any:
    """Import `transformers` when it is needed, because this takes seconds."""
    import transformers

    return transformers


def _hugging_face_tokenizer(
    path: Path, text_length: int | None, template: str, key: str
) -> Tokenizer:
    """Load a tokenizer from a file or a folder of this machine.

    Args:
      path: The file, or a folder in Hugging Face layout.
      text_length: Upper limit of tokens of a text to be classified; else None.
      template: The text of a chat template; empty: the tokenizer's own.
      key: The key of the config that gave the path, for messages.

    Raises:
      ConfigError: If it has no end-of-text token, or is slow (written in Python only).
      DataError: If a file is damaged, or too large.
    """
    files = list(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        is_part = file.suffix in (".json", ".model", ".txt", ".jinja")
        if is_part and file.stat().st_size > _MAX_FILE_BYTES:
            raise DataError(
                f"{key}={file}: {file.stat().st_size} bytes, no tokenizer is larger than"
                f" {_MAX_FILE_BYTES}"
            )

    tokenizer = _read_tokenizer(path, key)
    if path.suffix == ".json":  # a tokenizer.json alone does not say which token ends a text
        _name_special_tokens(tokenizer)
    eot_id = tokenizer.eos_token_id
    if eot_id is None:  # BERT's kinds have no end of text, but a token that separates texts
        eot_id = tokenizer.sep_token_id
    if eot_id is None or not tokenizer.is_fast:
        raise ConfigError(
            f"{key}={path}: {type(tokenizer).__name__} with eos_token {tokenizer.eos_token}: need a"
            " folder with a tokenizer.json, whose tokenizer_config.json names an eos_token"
        )

    # Complete the tokenizer for the export. A file alone names no token for padding, which a
    # classifier needs in any case.
    end = tokenizer.convert_ids_to_tokens(eot_id)
    if tokenizer.pad_token is None and (path.is_file() or text_length is not None):
        tokenizer.pad_token = end
    if text_length is not None:
        _prepare_for_classes(tokenizer, end, text_length)
    if template:
        tokenizer.chat_template = template

    backend = tokenizer.backend_tokenizer
    # A tokenizer file may enable truncation and padding, which would silently change the text.
    backend.no_truncation()
    backend.no_padding()
    prefix, suffix = _prefix_and_suffix(backend)  # ids put around each text
    # PyTorch does not train the embedding that the model's config names as padding. So the end of
    # text, which the model must learn, is not named there.
    pad_id = None if tokenizer.pad_token_id == eot_id else tokenizer.pad_token_id
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    ends: tuple[int, ...] = ()
    if text_length is None:  # a classifier writes no text
        # The ids at which `transformers` stops to generate, and the end of text.
        ends = tuple(dict.fromkeys((*stop_ids(path, vocab_size), eot_id)))  # each once, in order

    def save(folder: Path, max_length: int | None) -> None:
        """Write the tokenizer's files, and a copy of its generation config if it has one.

        `max_length` is the model's context in tokens, or None.
        """
        _save(tokenizer, folder, max_length)
        generation = path / GENERATION
        if generation.is_file():
            shutil.copyfile(generation, folder / GENERATION)

    result = Tokenizer(
        backend,
        vocab_size=vocab_size,
        eot_id=eot_id,
        fingerprint=hashlib.sha256(f"{eot_id} {backend.to_str()}".encode()).hexdigest(),
        save=save,
        prefix=prefix,
        suffix=suffix,
        token_ids={
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": eot_id,
            "pad_token_id": pad_id,
        },
        ends=ends,
        special=tuple(tokenizer.get_added_vocab()),
    )
    return _with_chats(result, tokenizer)


def _read_tokenizer(path: Path, key: str) -> Any:
    """Return the tokenizer that `transformers` reads from a file or folder.

    No code in the folder is run. Raises DataError, which names the config's `key`, if the tokenizer
    is damaged.
    """
    transformers = _transformers()
    try:
        if path.suffix == ".json":  # a tokenizer.json alone
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        # SentencePiece's .model; or a folder that names code of its own, which is not run.
        if path.is_file() or _has_code(path):
            tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
            tokenizer.init_kwargs.pop("auto_map", None)  # names the code, for an export
            return tokenizer
        return transformers.AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # deliberately broad, because each fault raises its own class
        first_line, _, _ = str(error).strip().partition("\n")
        why = first_line.rstrip(": ") or type(error).__name__
        raise DataError(f"{key}={path}: damaged or no tokenizer ({why})") from error


def _has_code(folder: Path) -> bool:
    """Return whether a folder with a `tokenizer.json` also names code of its own.

    Code is named in tokenizer_config.json by "auto_map". Raises DataError if this file is damaged.
    """
    config = folder / "tokenizer_config.json"
    if not config.exists() or not (folder / "tokenizer.json").exists():
        return False
    return "auto_map" in read_json(config, DataError, max_bytes=_MAX_FILE_BYTES, links=True)


def _prepare_for_classes(tokenizer: Any, end: str, text_length: int) -> None:
    """Change a tokenizer of `transformers` so that it prepares texts to be classified.

    A text gets special tokens at both ends: the tokenizer's own, or else its classification token
    before it and the end of text after it. `end` is the name of the end-of-text token. A text is
    cut and padded on the right, to at most `text_length` tokens.
    """
    from tokenizers import processors

    backend = tokenizer.backend_tokenizer
    prefix, suffix = _prefix_and_suffix(backend)
    before = [backend.id_to_token(i) for i in prefix]
    after = [backend.id_to_token(i) for i in suffix]
    if not before or not after:
        if not before:
            before = [tokenizer.cls_token or end]
        if not after:
            after = [end]
        # $A is the text. Of a pair, $B is the second, to which :1 gives the type 1.
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)],
            special_tokens=[(name, backend.token_to_id(name)) for name in {*before, *after}],
        )
    # Rows begin at position 0, and long texts lose their end. `init_kwargs` are what is saved.
    tokenizer.init_kwargs["padding_side"] = "right"
    tokenizer.init_kwargs["truncation_side"] = "right"
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "right"
    tokenizer.model_max_length = min(tokenizer.model_max_length, text_length)


def _prefix_and_suffix(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a backend puts before a text, and those after it, by trying a text.

    The text is a single id of another tokenizer, as no text is one id in every vocabulary.
    """
    import tokenizers

    one_token = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).encode("a")
    # The backend's last step puts its special tokens around. Their mask is 1, the text's is 0.
    marked = backend.post_process(one_token)
    text_index = marked.special_tokens_mask.index(0)
    return tuple(marked.ids[:text_index]), tuple(marked.ids[text_index + 1 :])


def _save(tokenizer: Any, folder: Path, max_length: int | None) -> None:
    """Write the files of a tokenizer of `transformers` to a folder.

    `max_length` is the context of the model beside it, in tokens, or None.
    """
    if max_length is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, max_length)
    if getattr(tokenizer, "legacy", False):  # transformers reads this key and does not write it
        tokenizer.init_kwargs["legacy"] = True
    tokenizer.save_pretrained(str(folder))


def _name_special_tokens(tokenizer: Any) -> None:
    """Set the end-of-text token of a tokenizer that was read from a `tokenizer.json` alone.

    The file does not say which token has which use. So the names decide, in this order:

    1. The end of text is the first of the usual names (`_END_OF_TEXT_NAMES`) that is in the
       vocabulary.
    2. Without one of these, a tokenizer that has special tokens is not changed at all, because the
       name of its end of text is not known.
    3. A tokenizer without special tokens gets a new one, `<|endoftext|>`.

    In the first and third case `[CLS]`, if it is in the vocabulary, becomes the classification
    token, which is put before texts to be classified (BERT's tokenizers have it).
    """
    vocab = tokenizer.get_vocab()
    present = [name for name in _END_OF_TEXT_NAMES if name in vocab]
    has_special = any(token.special for token in tokenizer.added_tokens_decoder.values())
    if has_special and not present:
        return
    names = {"eos_token": present[0] if present else _END_OF_TEXT}
    if "[CLS]" in vocab:
        names["cls_token"] = "[CLS]"
    tokenizer.add_special_tokens(names)
