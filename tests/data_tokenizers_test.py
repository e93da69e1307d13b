import json

import numpy as np
import pytest
import tokenizers
from texts import write_documents
from toy import data_settings

from adloco_jax.data import load_corpus, load_tokenizer
from adloco_jax.data.tokenizers import check_round_trip
from adloco_jax.errors import ConfigError, DataError

TEXTS = [
    "Hello, world.\n\n  Indented — ünïcode 日本語 🙂\t.",
    "",
    "</s> and <|endoftext|> are text",
]


@pytest.fixture
def shared_tokenizers(data_dir):
    return data_dir / "tokenizers"


def byte_level_tokenizer(*special_tokens):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello there"], trainer)
    return tokenizer


def save_folder(tokenizer, folder, **special_tokens):
    """A folder in Hugging Face layout, as `save_pretrained` writes it."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens})
    )
    return str(folder)


def assert_round_trip(tokenizer, texts=TEXTS):
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(i) for i in ids] == texts
    for array in ids:
        assert array.dtype == np.int32 and array.ndim == 1
        assert tokenizer.eot_id not in array
        assert array.max(initial=0) < tokenizer.vocab_size
    assert 0 <= tokenizer.eot_id < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.eot_id, *ids[0], tokenizer.vocab_size + 5]) == texts[0]


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode_batch(["aé"])[0].tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"
    assert_round_trip(tokenizer)


def test_tokenizer_json_round_trips_and_knows_its_end_of_text(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer("<pad>", "</s>").save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eot_id == 1
    assert_round_trip(tokenizer)
    plain = byte_level_tokenizer()  # a tokenizer without special tokens gets an end of text
    plain.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eot_id == plain.get_vocab_size() == tokenizer.vocab_size - 1
    assert_round_trip(tokenizer)
    byte_level_tokenizer("<pad>", "<finis>").save(str(path))
    with pytest.raises(ConfigError, match=r"<pad>, <finis>.*need one of .*</s>"):
        load_tokenizer(str(path))


def test_defect_12_truncation_padding_and_special_tokens_saved_with_a_tokenizer_are_off(tmp_path):
    """A tokenizer.json can ask for padding and for truncation; the reference trains on padding."""
    tokenizer = byte_level_tokenizer("</s>", "<s>")
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


def test_hugging_face_folder_round_trips_and_uses_its_eos_token(tmp_path):
    folder = save_folder(byte_level_tokenizer("<finis>"), tmp_path / "hf", eos_token="<finis>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eot_id == 0
    assert_round_trip(tokenizer)
    other = save_folder(byte_level_tokenizer("<finis>"), tmp_path / "other")
    with pytest.raises(ConfigError, match="no end-of-text token: set eos_token"):
        load_tokenizer(other)


@pytest.mark.parametrize(
    ("file", "vocab_size", "eot_id", "lossless"),
    [
        ("torchtune_tokenizer_2000.json", 2001, 2000, True),
        ("mistral-v1.model", 32000, 2, True),
        ("torchtune_m_2000.model", 2000, 2, False),  # normalises spaces, knows few characters
    ],
)
def test_published_tokenizers(shared_tokenizers, file, vocab_size, eot_id, lossless):
    tokenizer = load_tokenizer(str(shared_tokenizers / file))
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (vocab_size, eot_id)
    assert_round_trip(tokenizer, TEXTS if lossless else ["the quick brown fox", ""])


def test_published_sentencepiece_model_as_a_folder(shared_tokenizers, tmp_path):
    (tmp_path / "tokenizer.model").symlink_to(shared_tokenizers / "mistral-v1.model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert_round_trip(load_tokenizer(str(tmp_path)))


def test_fingerprint_follows_the_content(tmp_path):
    one = save_folder(byte_level_tokenizer("</s>"), tmp_path / "one", eos_token="</s>")
    same = save_folder(byte_level_tokenizer("</s>"), tmp_path / "same", eos_token="</s>")
    other = save_folder(byte_level_tokenizer("</s>", "<s>"), tmp_path / "other", eos_token="</s>")
    for suffix in ("", "/tokenizer.json"):
        prints = [load_tokenizer(folder + suffix).fingerprint for folder in (one, same, other)]
        assert prints[0] == prints[1] != prints[2]


def test_a_path_that_does_not_exist_is_a_data_error():
    for name in ("/no/such/tokenizer", "lost.json", "x/y.model"):
        with pytest.raises(DataError, match=f"data.tokenizer={name}: no such file or folder"):
            load_tokenizer(name)


def test_a_cached_hub_tokenizer_needs_no_network(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--somebody--words" / "snapshots" / ("0" * 40)
    refs = tmp_path / "models--somebody--words" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0" * 40)
    snapshot.parent.mkdir()
    save_folder(byte_level_tokenizer("</s>"), snapshot, eos_token="</s>")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_round_trip(load_tokenizer("somebody/words"))


def test_a_damaged_tokenizer_is_a_data_error_that_names_it(tmp_path):
    (tmp_path / "folder").mkdir()
    for file in ("tokenizer.json", "spiece.model", "folder/tokenizer.json"):
        (tmp_path / file).write_text('{"unrelated": 1}')
        name = file.removesuffix("/tokenizer.json")
        with pytest.raises(DataError, match=f"{name}: damaged or no tokenizer"):
            load_tokenizer(str(tmp_path / name))


def test_a_sentencepiece_model_without_the_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for file in ("spiece.model", "folder/tokenizer.model"):
        (tmp_path / file).touch()
        name = str(tmp_path / file.removesuffix("/tokenizer.model"))
        with pytest.raises(ConfigError, match=r"not installed; pip install 'adloco-jax\[sente"):
            load_tokenizer(name)


def test_a_file_of_another_kind_and_an_empty_name_are_config_errors(tmp_path):
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(ConfigError, match="must be a tokenizer.json or a SentencePiece"):
        load_tokenizer(str(tmp_path / "vocab.txt"))
    with pytest.raises(ConfigError, match="data.tokenizer is empty"):
        load_tokenizer("")


def test_a_tokenizer_that_is_written_in_python_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(
        ConfigError, match="ByT5Tokenizer is a slow tokenizer, written in Python only"
    ):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_leaves_almost_nothing_of_the_text_is_refused(tmp_path):
    model = tokenizers.models.WordLevel({"1": 0, "2": 1, "3": 2, "[UNK]": 3}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    numbers_only = str(tmp_path / "tokenizer.json")
    backend.save(numbers_only)
    texts = [f"about the noise of gradients {n % 3 + 1}" for n in range(200)]
    records = [{"text": text, "label": n % 2} for n, text in enumerate(texts)]
    path = write_documents(tmp_path, records)
    settings = data_settings(source="jsonl", path=str(path), tokenizer=numbers_only)
    for num_classes in (None, 2):
        with pytest.raises(DataError, match=r"of 30 sampled documents.* of 900 bytes come back"):
            load_corpus(settings, num_classes=num_classes)


def test_a_tokenizer_that_drops_case_accents_and_spaces_is_not_refused(tmp_path):
    alphabet = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    check_round_trip(["TRÈS DÉJÀ VU\n"], load_tokenizer(str(tmp_path / "tokenizer.json")))
