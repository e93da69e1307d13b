import json
import shutil

import numpy as np
import pytest
import tokenizers
import transformers
from texts import byte_tokenizer
from toy import tiny_config

from adloco_jax.config import validate
from adloco_jax.data import load_tokenizer
from adloco_jax.data.tokenizers import tokenizer_of
from adloco_jax.errors import ConfigError, DataError

TEXTS = [
    "Hello, world.\n\n  Indented — ünïcode 日本語 🙂\t.",
    "",
    "</s> and <|endoftext|> are text",
]


def save_folder(tokenizer, folder, **special_tokens):
    """A folder in Hugging Face layout, as `save_pretrained` writes it."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens})
    )
    return str(folder)


def assert_round_trip(tokenizer):
    ids = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(i) for i in ids] == TEXTS
    for array in ids:
        assert array.dtype == np.int32 and array.ndim == 1
        assert array.max(initial=0) < tokenizer.vocab_size
    assert 0 <= tokenizer.eot_id < tokenizer.vocab_size
    assert tokenizer.decode([*ids[0], tokenizer.vocab_size + 5]) == TEXTS[0]


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode_batch(["aé"])[0].tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    assert_round_trip(tokenizer)


def test_tokenizer_json_round_trips_and_knows_its_end_of_text(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_tokenizer("<pad>", "</s>").save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eot_id == 1
    assert_round_trip(tokenizer)
    plain = byte_tokenizer()  # a tokenizer without special tokens gets an end of text
    plain.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eot_id == plain.get_vocab_size() == tokenizer.vocab_size - 1
    assert_round_trip(tokenizer)
    byte_tokenizer("<pad>", "<finis>").save(str(path))
    with pytest.raises(ConfigError, match="with eos_token None: need a folder"):
        load_tokenizer(str(path))


def test_defect_12_truncation_padding_and_special_tokens_saved_with_a_tokenizer_are_off(tmp_path):
    """A tokenizer.json can ask for padding and for truncation; the reference trains on padding."""
    tokenizer = byte_tokenizer("</s>", "<s>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 0)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_id=0, pad_token="</s>")
    folder = save_folder(tokenizer, tmp_path / "saved", eos_token="</s>")
    for name in (folder, f"{folder}/tokenizer.json"):
        loaded = load_tokenizer(name)
        assert_round_trip(loaded)
        assert not {0, 1} & set(loaded.encode_batch(["hello"])[0].tolist())


@pytest.mark.parametrize(
    ("file", "vocab_size", "eot_id"),
    [("torchtune_tokenizer_2000.json", 2001, 2000), ("mistral-v1.model", 32000, 2)],
)
def test_published_tokenizers(data_dir, file, vocab_size, eot_id):
    tokenizer = load_tokenizer(str(data_dir / "tokenizers" / file))
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (vocab_size, eot_id)
    assert_round_trip(tokenizer)


def test_a_cached_hub_tokenizer_needs_no_network_and_yields_to_a_path(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--somebody--words" / "snapshots" / ("0" * 40)
    refs = tmp_path / "models--somebody--words" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0" * 40)
    snapshot.parent.mkdir()
    save_folder(byte_tokenizer("</s>"), snapshot, eos_token="</s>")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = load_tokenizer("somebody/words")
    assert_round_trip(cached)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somebody").mkdir()
    save_folder(byte_tokenizer("</s>", "<s>"), tmp_path / "somebody/words", eos_token="</s>")
    assert load_tokenizer("somebody/words").fingerprint != cached.fingerprint


def test_a_damaged_tokenizer_is_a_data_error_that_names_it(tmp_path):
    (tmp_path / "folder").mkdir()
    for file in ("tokenizer.json", "spiece.model", "folder/tokenizer.json"):
        (tmp_path / file).write_text('{"unrelated": 1}')
        name = file.removesuffix("/tokenizer.json")
        with pytest.raises(DataError, match=f"{name}: damaged or no tokenizer"):
            load_tokenizer(str(tmp_path / name))


# --- What an export makes of a text -----------------------------------------------------------

SPEAKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def with_template(*template):
    backend = byte_tokenizer("<s>", "</s>")
    named = [(name, backend.token_to_id(name)) for name in template if name != "$A"]
    backend.post_processor = tokenizers.processors.TemplateProcessing(template, None, named)
    return backend


def chat_folder(folder):
    """A folder as those of Qwen's chat models."""
    save_folder(
        byte_tokenizer(*SPEAKERS),
        folder,
        tokenizer_class="Qwen2Tokenizer",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=131072,
        chat_template="{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    )
    ids = {"model_type": "qwen3", "bos_token_id": 0, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(ids))
    generation = {"eos_token_id": [2, 0], "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def named_tokenizer(kind, folder, data_dir):
    """The value of data.tokenizer for a kind of tokenizer."""
    path = folder / "tokenizer.json"
    templates = {"plain": ["$A"], "one end": ["<s>", "$A"], "both ends": ["<s>", "$A", "</s>"]}
    if kind in templates:
        with_template(*templates[kind]).save(str(path))
    elif kind == "wordpiece":
        backend = tokenizers.BertWordPieceTokenizer()
        backend.train_from_iterator(["a good film"], vocab_size=99, show_progress=False)
        path = folder / "bert"
        named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer"}
        save_folder(backend, path, **named)
    elif kind == "chat":
        path = chat_folder(folder / "chat")
    elif kind == "folder of SentencePiece":
        path = folder / "llama"
        path.mkdir()
        shutil.copy(data_dir / "tokenizers" / "torchtune_m_2000.model", path / "tokenizer.model")
        named = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
        (path / "tokenizer_config.json").write_text(json.dumps(named))
    else:
        return kind if kind == "bytes" else str(data_dir / "tokenizers" / kind)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "around", "added"),  # ids around a text to be classified; of these, around any text
    [
        ("bytes", [256, 256], ""),
        ("plain", [1, 1], ""),
        ("one end", [0, 1], "first"),
        ("both ends", [0, 1], "both"),
        ("wordpiece", [2, 3], "both"),
        ("chat", [2, 2], ""),
        ("torchtune_m_2000.model", [2, 2], ""),
        ("folder of SentencePiece", [1, 2], "first"),
    ],
)
def test_an_export_makes_of_a_text_what_was_trained_on(tmp_path, data_dir, kind, around, added):
    name = named_tokenizer(kind, tmp_path, data_dir)
    texts = ["a good film", "", *TEXTS, *(f"a {token} b" for token in SPEAKERS), "long " * 40]
    for length in (None, 16):
        tokenizer = load_tokenizer(name, text_length=length)
        out = tmp_path / f"out {length}"
        out.mkdir()
        tokenizer.save(out, 64)
        exported = transformers.AutoTokenizer.from_pretrained(out)
        prefix, suffix = [*tokenizer.prefix], [*tokenizer.suffix]
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            kept = ids[: length and length - len(prefix) - len(suffix)].tolist()
            found = exported(text, truncation=length is not None).input_ids
            assert found == [*prefix, *kept, *suffix]
        assert exported.model_max_length == (length or 64)
        if length is None:
            assert prefix == around[:1] * (added != "") and suffix == around[1:] * (added == "both")
        else:
            assert [*prefix, *suffix] == around
            assert exported.pad_token is not None and exported.padding_side == "right"


def test_the_tokenizer_of_a_run_is_its_checkpoints(tmp_path):
    chat, bare = chat_folder(tmp_path / "chat"), tmp_path / "bare"
    bare.mkdir()

    def of(tokenizer, init_from=chat, **model):
        settings = validate(tiny_config(model={"vocab_size": 300} | model))
        groups = {"data": {"tokenizer": tokenizer}, "model": {"init_from": str(init_from)}}
        for group, changes in groups.items():
            changed = getattr(settings, group).model_copy(update=changes)
            settings = settings.model_copy(update={group: changed})
        return tokenizer_of(settings.data, settings.model)

    for name, init_from in ((None, ""), ("bytes", bare), ("bytes", tmp_path / "gone")):
        assert of(name, init_from).name == "bytes"
    (bare / "sub").mkdir()
    shutil.copy(chat / "tokenizer.json", bare / "sub")
    with pytest.raises(ConfigError, match=r"bare: has no tokenizer.*data.tokenizer names"):
        of(None, bare)
    assert of(None).name == str(chat) and of(None).eot_id == 2
    with pytest.raises(ConfigError, match=r"data.tokenizer=bytes: 257 ids, .*tokenizer unset"):
        of("bytes")
    with pytest.raises(ConfigError, match=r"chat has 259 ids.*resize_token_embeddings.259. gives"):
        of(None, vocab_size=258)
    # The same tokenizer by another name: what belongs to the weights is kept.
    copy = shutil.copytree(chat, tmp_path / "copy")
    (copy / "generation_config.json").unlink()
    same = of(str(copy))
    assert same.name == str(copy) and same.fingerprint == load_tokenizer(str(copy)).fingerprint
    out = tmp_path / "out"
    out.mkdir()
    same.save(out, None)
    kept, original = (transformers.AutoTokenizer.from_pretrained(path) for path in (out, chat))
    assert kept.special_tokens_map == original.special_tokens_map
    assert kept.chat_template == original.chat_template
    assert kept.model_max_length == 131072
    files = (path / "generation_config.json" for path in (out, chat))
    assert len({file.read_text() for file in files}) == 1
