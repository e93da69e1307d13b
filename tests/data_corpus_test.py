import json
import re

import numpy as np
import pytest

from adloco_jax.data import load_corpus, packing
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.run.build import check_data, load_data
from adloco_jax.run.config import default_config, validate
from adloco_jax.run.plan import data_header

END = 256


def settings_of(**data):
    config = default_config()
    config.data.update(data)
    return validate(config)


def load(path="", **changes):
    settings = dict(
        source="jsonl",
        heldout_path="",
        text_column="text",
        tokenizer="bytes",
        sequence_length=15,
        num_sequences=None,
        heldout_frac=0.1,
        subset_frac=1.0,
        num_streams=3,
        seed=0,
        vocab_size=257,
    )
    return load_corpus(path=str(path), **(settings | changes))


def write_documents(folder, texts, name="docs.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def numbered_documents(count, seed=0):
    """Texts of uneven length, each made of one number that no other has."""
    repeats = np.random.default_rng(seed).integers(5, 60, count)
    return [f"<{number}>" * int(times) for number, times in enumerate(repeats)]


def as_stream(rows):
    """The text of consecutive rows, end of text shown as a NUL."""
    flat = rows.reshape(-1).astype(int)
    return bytes(np.where(flat == END, 0, flat).astype(np.uint8)).decode()


def numbers_in(rows):
    return set(re.findall(r"<(\d+)>", as_stream(rows)))


def test_rows_are_the_documents_end_to_end_without_overlap_or_gap(tmp_path):
    texts = numbered_documents(50)
    heldout = write_documents(tmp_path, ["held out " * 10], "heldout.jsonl")
    corpus = load(write_documents(tmp_path, texts), heldout_path=str(heldout))
    stream = "".join(text + "\0" for text in texts)
    assert corpus.rows.shape == (len(stream) // 16, 16)
    assert as_stream(corpus.rows) == stream[: corpus.rows.size]
    assert corpus.num_documents == 50 and corpus.num_heldout_documents == 1
    assert corpus.num_tokens == corpus.rows.size
    assert corpus.num_dropped_tokens == len(stream) % 16
    assert as_stream(corpus.heldout_rows) == ("held out " * 10 + "\0")[:80]


def test_every_row_is_seen_once_per_epoch_over_all_streams(tmp_path):
    corpus = load(write_documents(tmp_path, numbered_documents(50)))
    num_rows, num_streams = corpus.num_sequences, corpus.num_streams
    for epoch in range(2):
        seen = []
        for stream in range(num_streams):
            size = len(range(stream, num_rows, num_streams))
            seen.append(corpus.batch(0, stream, epoch * size, size))
        seen = np.concatenate(seen)
        np.testing.assert_array_equal(
            seen[np.lexsort(seen.T)], corpus.rows[np.lexsort(corpus.rows.T)]
        )


def test_a_batch_is_int32_and_a_pure_function_of_its_arguments(tmp_path):
    path = write_documents(tmp_path, numbered_documents(50))
    corpus, again, other = load(path), load(path), load(path, seed=1)
    batch = corpus.batch(1, 2, 40, 12)
    assert batch.dtype == np.int32 and batch.shape == (12, 16)
    corpus.batch(0, 0, 0, 5)
    np.testing.assert_array_equal(batch, again.batch(1, 2, 40, 12))
    pieces = [corpus.batch(1, 2, 40 + k, 1) for k in range(12)]
    np.testing.assert_array_equal(batch, np.concatenate(pieces))
    assert not np.array_equal(batch, other.batch(1, 2, 40, 12))
    np.testing.assert_array_equal(corpus.sequence(3), corpus.rows[3])
    assert corpus.sequence(3).dtype == np.int32


def test_the_split_is_by_document_and_independent_of_the_seed(tmp_path):
    path = write_documents(tmp_path, numbered_documents(200))
    corpus = load(path)
    assert corpus.num_heldout_documents == 20 and corpus.num_documents == 180
    train, heldout = numbers_in(corpus.rows), numbers_in(corpus.heldout_rows)
    assert not train & heldout
    assert len(train | heldout) >= 198  # the dropped tails may hold one document each
    # Spread over the reading order, not taken from one end.
    assert np.histogram([int(n) for n in heldout], bins=4, range=(0, 200))[0].min() >= 4
    np.testing.assert_array_equal(corpus.heldout_rows, load(path, seed=9).heldout_rows)


@pytest.mark.parametrize(("count", "heldout"), [(24, 2), (27, 3), (34, 3), (36, 4)])
def test_the_held_out_share_of_the_documents_is_rounded(tmp_path, count, heldout):
    corpus = load(write_documents(tmp_path, numbered_documents(count)))
    assert corpus.num_heldout_documents == heldout


@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_tiny_corpus_still_holds_out_a_document_with_two_rows(tmp_path, count):
    texts = ["a" * 200, *(chr(ord("b") + i) * 40 for i in range(count - 1))]
    corpus = load(write_documents(tmp_path, texts), heldout_frac=0.01)
    assert corpus.num_heldout_documents == 1
    assert len(corpus.heldout_rows) == 2
    assert ord("a") in corpus.rows  # the shortest document that will do is held out


def test_more_documents_are_held_out_where_the_share_is_too_short_for_two_rows(tmp_path):
    texts = [f"abcde{n:02}" for n in range(40)]
    corpus = load(write_documents(tmp_path, texts), heldout_frac=0.05)
    assert corpus.num_heldout_documents == 4
    assert corpus.num_documents == 36


def test_of_the_documents_that_fill_the_gap_the_shortest_is_held_out(tmp_path):
    texts = ["a" * 90, "b" * 200, "c" * 40, "d" * 31, "e" * 9]  # two rows are 32 with end of text
    corpus = load(write_documents(tmp_path, texts), heldout_frac=0.01)
    assert as_stream(corpus.heldout_rows) == "d" * 31 + "\0"
    assert corpus.num_heldout_documents == 1


def test_a_length_of_whole_rows_keeps_its_last_row(tmp_path):
    tokens = np.arange(48, dtype=np.uint16)
    np.testing.assert_array_equal(packing.pack_rows(tokens, 16), tokens.reshape(3, 16))
    assert packing.pack_rows(tokens[:47], 16).shape == (2, 16)
    heldout = write_documents(tmp_path, ["kept apart " * 9], "heldout.jsonl")
    corpus = load(write_documents(tmp_path, ["x" * 63]), heldout_path=str(heldout))
    assert (corpus.num_sequences, corpus.num_dropped_tokens) == (4, 0)


def test_num_sequences_bounds_the_rows_and_stops_reading_early(tmp_path):
    texts = [f"{i:03}" + str(i % 10) * 3997 for i in range(800)]
    path = write_documents(tmp_path, texts)
    corpus = load(path, num_sequences=50)
    assert corpus.num_sequences == 50
    assert corpus.num_documents + corpus.num_heldout_documents < 400
    assert corpus.num_tokens == 50 * 16
    everything = load(path)
    np.testing.assert_array_equal(corpus.rows, everything.rows[:50])
    np.testing.assert_array_equal(
        corpus.heldout_rows, everything.heldout_rows[: len(corpus.heldout_rows)]
    )
    assert load(path, num_sequences=10**9).num_sequences == everything.num_sequences


def test_held_out_tokens_do_not_count_towards_num_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK_CHARS", 1)  # reading may stop after every document
    texts = [f"<{n}>" * 8 for n in range(24)]
    texts[1] = texts[3] = texts[0]  # which is held out
    path = write_documents(tmp_path, texts)
    corpus = load(path, num_sequences=4, heldout_frac=0.5)
    assert corpus.num_sequences == 4
    np.testing.assert_array_equal(corpus.rows, load(path, heldout_frac=0.5).rows[:4])


def test_num_sequences_reads_on_until_something_is_held_out(tmp_path):
    texts = [f"{i:02}" + "x" * (2**20 - 2) for i in range(12)]
    corpus = load(write_documents(tmp_path, texts), num_sequences=5)
    assert corpus.num_sequences == 5 and len(corpus.heldout_rows) == 2**20 // 16
    assert corpus.num_documents == 4 and corpus.num_heldout_documents == 1


def test_a_lone_text_document_is_cut_in_two(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"<{i}> paragraph\n\n" for i in range(200)))
    (tmp_path / "empty.txt").write_text("")
    for path in (tmp_path, tmp_path / "book.txt"):
        corpus = load(path, source="text")
        assert corpus.num_documents == corpus.num_heldout_documents == 1
        assert max(map(int, numbers_in(corpus.rows))) < min(
            map(int, numbers_in(corpus.heldout_rows))
        )
        assert len(corpus.heldout_rows) / corpus.num_sequences == pytest.approx(1 / 9, rel=0.1)


def test_stdlib_needs_no_files():
    corpus = load(source="stdlib", num_sequences=100, sequence_length=63)
    assert corpus.rows.shape == (100, 64) and corpus.rows.dtype == np.uint16
    assert corpus.rows.max() <= END


def test_c4_shards_with_a_published_tokenizer(data_dir):
    corpus = load(
        data_dir / "c4" / "c4-train.*.json.gz",
        heldout_path=str(data_dir / "c4" / "c4-validation.*.json.gz"),
        tokenizer=str(data_dir / "tokenizers" / "mistral-v1.model"),
        vocab_size=32000,
        sequence_length=128,
    )
    assert corpus.num_documents == 1000 and corpus.num_heldout_documents == 200
    assert corpus.rows.dtype == np.uint16
    assert int((corpus.rows == 2).sum()) == 1000 - (corpus.rows[-1, -1] != 2)
    assert 0.2 < corpus.tokens_per_byte < 0.3


def test_tokens_per_byte_counts_utf8_bytes_and_end_of_text(tmp_path):
    heldout = write_documents(tmp_path, ["ü" * 40, "ab" * 10], "heldout.jsonl")
    corpus = load(write_documents(tmp_path, numbered_documents(9)), heldout_path=str(heldout))
    assert corpus.tokens_per_byte == 102 / 100


def test_fingerprint_follows_rows_and_not_the_order_they_are_seen_in(tmp_path):
    path = write_documents(tmp_path, numbered_documents(50))
    base = load(path).fingerprint
    assert base == load(path, seed=5, num_streams=1, subset_frac=0.5).fingerprint
    assert len(base) == 64
    changed = numbered_documents(50)
    changed[-2] = changed[-2].replace("4", "5")
    others = {
        load(path, sequence_length=14).fingerprint,
        load(path, heldout_frac=0.2).fingerprint,
        load(write_documents(tmp_path, changed, "changed.jsonl")).fingerprint,
    }
    assert len(others - {base}) == 3
    heldout = [write_documents(tmp_path, [letter * 50], letter + ".jsonl") for letter in "xy"]
    prints = {load(path, heldout_path=str(file)).fingerprint for file in heldout}
    assert len(prints) == 2


def test_sample_is_one_printable_line_of_the_first_row_trained_on(tmp_path):
    texts = [f"line\n\t\x1b[31m {i} é" for i in range(60)]
    corpus = load(write_documents(tmp_path, texts), sequence_length=40)
    sample = corpus.sample(500)
    assert sample.isprintable()
    assert r"line\n\t\x1b[31m " in sample and "é<end of text>line" in sample
    short = corpus.sample(20)
    assert len(short) == 20 and short == sample[:19] + "…"
    first = corpus.batch(0, 0, 0, 1)
    assert sample.count("<end of text>") == int((first == END).sum())


def write_tokens(folder, name="tokens.npy", dtype=np.uint16, texts=None):
    """The stream of some documents as an array on disk."""
    texts = numbered_documents(50) if texts is None else texts
    stream = b"".join(text.encode() + b"\0" for text in texts)
    tokens = np.frombuffer(stream, np.uint8).astype(dtype)
    tokens[tokens == 0] = END
    np.save(folder / name, tokens)
    return folder / name, tokens


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, ">i4"])
def test_a_token_stream_gives_the_same_corpus_as_its_text(tmp_path, dtype):
    path, _ = write_tokens(tmp_path, dtype=dtype)
    from_tokens = load(path, source="tokens")
    from_text = load(write_documents(tmp_path, numbered_documents(50)))
    np.testing.assert_array_equal(from_tokens.rows, from_text.rows)
    np.testing.assert_array_equal(from_tokens.heldout_rows, from_text.heldout_rows)
    assert from_tokens.num_documents == from_text.num_documents
    assert from_tokens.tokens_per_byte == from_text.tokens_per_byte
    np.testing.assert_array_equal(from_tokens.batch(0, 1, 3, 4), from_text.batch(0, 1, 3, 4))


def test_num_sequences_leaves_the_held_out_part_of_a_token_stream_alone(tmp_path):
    path, _ = write_tokens(tmp_path)
    few, everything = load(path, source="tokens", num_sequences=5), load(path, source="tokens")
    np.testing.assert_array_equal(few.rows, everything.rows[:5])
    np.testing.assert_array_equal(few.heldout_rows, everything.heldout_rows)


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_stay_memory_mapped_when_held_out_text_is_given(tmp_path, packed):
    path, tokens = write_tokens(tmp_path)
    if packed:
        tokens = tokens[: len(tokens) // 16 * 16].reshape(-1, 16)
        np.save(path, tokens)
    heldout, _ = write_tokens(tmp_path, "heldout.npy", texts=["kept apart " * 9])
    corpus = load(path, source="tokens", heldout_path=str(heldout), num_sequences=20)
    assert isinstance(corpus.rows, np.memmap)
    np.testing.assert_array_equal(corpus.rows.reshape(-1), tokens.reshape(-1)[: 20 * 16])
    assert corpus.tokens_per_byte == 100 / 99
    assert corpus.batch(0, 0, 0, 2).dtype == np.int32


def test_an_unclosed_last_document_of_a_token_stream_counts(tmp_path):
    path, tokens = write_tokens(tmp_path)
    np.save(path, tokens[:-1])
    corpus = load(path, source="tokens")
    assert corpus.num_documents + corpus.num_heldout_documents == 50


@pytest.mark.parametrize("bad", [257, 40_000, -1])
def test_a_token_id_out_of_range_is_named_with_its_place(tmp_path, bad):
    path, tokens = write_tokens(tmp_path, dtype=np.int32)
    tokens[123] = bad
    np.save(path, tokens)
    with pytest.raises(
        DataError, match=rf"tokens\.npy: token id {bad} at position 123.*0 to 256 .*vocab_size=257"
    ):
        load(path, source="tokens")


def test_packed_rows_need_held_out_rows(tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((8, 16), np.uint16))
    with pytest.raises(ConfigError, match=r"rows\.npy: ready-packed rows.*data.heldout_path"):
        load(tmp_path / "rows.npy", source="tokens")


def test_several_token_files_are_refused(tmp_path):
    write_tokens(tmp_path, "a.npy")
    write_tokens(tmp_path, "b.npy")
    with pytest.raises(ConfigError, match="have 2 files, data.source=tokens reads one"):
        load(tmp_path, source="tokens")


def test_held_out_ids_that_decode_to_nothing_are_refused(tmp_path):
    path, _ = write_tokens(tmp_path)
    np.save(tmp_path / "heldout.npy", np.full(64, END))
    with pytest.raises(DataError, match="decode to no text"):
        load(path, source="tokens", heldout_path=str(tmp_path / "heldout.npy"))


def test_a_tokenizer_larger_than_the_model_names_both_keys_and_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"data.tokenizer=bytes has 257 ids.*vocab_size is 256"):
        load(write_documents(tmp_path, ["x"]), vocab_size=256)


def test_an_unknown_source_and_a_path_for_stdlib_are_config_errors(tmp_path):
    with pytest.raises(
        ConfigError, match="data.source=parquet: need stdlib, text, jsonl or tokens"
    ):
        load(tmp_path, source="parquet")
    with pytest.raises(ConfigError, match="data.source=stdlib"):
        load(tmp_path, source="stdlib")
    with pytest.raises(ConfigError, match="data.source=stdlib"):
        load(source="stdlib", heldout_path=str(tmp_path))


def test_text_that_is_trained_on_cannot_be_held_out(tmp_path):
    write_documents(tmp_path, numbered_documents(50), "a.jsonl")
    write_documents(tmp_path, numbered_documents(50), "b.jsonl")
    with pytest.raises(ConfigError, match=r"both hold b\.jsonl"):
        load(tmp_path, heldout_path=str(tmp_path / "b*"))


def test_no_text_at_all_is_a_data_error(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt: no text in it"):
        load(tmp_path / "empty.txt", source="text")
    with pytest.raises(DataError, match=r"docs\.jsonl: no text in it"):
        load(write_documents(tmp_path, ["", ""]))


def test_one_json_document_cannot_be_split(tmp_path):
    with pytest.raises(DataError, match="have 1 document, need 2 to hold one out"):
        load(write_documents(tmp_path, ["long enough " * 50]))


def test_too_little_text_to_hold_out_and_train_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="too little text: have 18 tokens in 3 documents, need 2"):
        load(write_documents(tmp_path, ["short"] * 3))


def test_too_little_held_out_text_is_a_data_error(tmp_path):
    heldout = write_documents(tmp_path, ["x" * 30], "heldout.jsonl")
    train = write_documents(tmp_path, numbered_documents(9))
    with pytest.raises(DataError, match=r"data.heldout_path=.*have 31 tokens, need 2 rows of 16"):
        load(train, heldout_path=str(heldout))


@pytest.mark.parametrize(
    ("changes", "have"),
    [
        (dict(num_streams=64), "have 20 rows"),
        (dict(num_streams=11, subset_frac=0.5), "have 10 rows"),
        (dict(num_streams=4, num_sequences=3), "have 3 rows"),
        (dict(sequence_length=400), "have 0 rows"),
    ],
)
def test_too_few_rows_for_the_streams_is_a_data_error(tmp_path, changes, have):
    heldout = write_documents(tmp_path, ["x" * 1000], "heldout.jsonl")
    train = write_documents(tmp_path, ["y" * 325])
    settings = dict(num_streams=3) | changes
    with pytest.raises(DataError, match=f"{have} .*need {settings['num_streams']}, one per"):
        load(train, heldout_path=str(heldout), **settings)


def test_defect_3_a_batch_larger_than_the_shard_still_trains(tmp_path):
    """The reference's loader gives no batch at all, in silence, when the shard is smaller."""
    corpus = load(write_documents(tmp_path, [f"{n}" + "z" * 99 for n in range(3)]), num_streams=2)
    batch = corpus.batch(0, 1, 0, 256)
    assert batch.shape == (256, 16)
    assert corpus.num_sequences < 256


def test_defect_9_data_are_not_dealt_anew_each_round(tmp_path):
    """The reference re-splits all data every round from a global generator."""
    corpus = load(write_documents(tmp_path, numbered_documents(50)))
    size = len(range(1, corpus.num_sequences, corpus.num_streams))

    def rows_of_epoch(epoch):
        np.random.random(7)  # noqa: NPY002
        return {row.tobytes() for row in corpus.batch(0, 1, epoch * size, size)}

    assert rows_of_epoch(0) == rows_of_epoch(1) == rows_of_epoch(50)


def test_defect_12_no_padding_is_ever_trained_on(tmp_path):
    """The reference pads each document to a fixed length and trains on the padding."""
    texts = numbered_documents(50)
    corpus = load(write_documents(tmp_path, texts))
    tokens = np.concatenate([corpus.rows.reshape(-1), corpus.heldout_rows.reshape(-1)])
    counts = np.bincount(tokens, minlength=257)
    expected = np.bincount(np.frombuffer("".join(texts).encode(), np.uint8), minlength=257)
    expected[END] = len(texts)
    assert (counts <= expected).all()  # nothing but the text and one end per document
    assert expected.sum() - counts.sum() < 2 * 16  # all of it but two tails


def copied(count):
    """Numbered documents, of which number 12 says again what the held-out number 4 says."""
    texts = numbered_documents(count)
    texts[4] = "<4>" * 30
    texts[12] = texts[4]
    return texts


@pytest.mark.parametrize("source", ["jsonl", "text", "tokens"])
def test_a_document_that_is_held_out_too_is_not_trained_on(tmp_path, source):
    texts = copied(50)
    if source == "text":
        for number, text in enumerate(texts):
            (tmp_path / f"{number:02}.txt").write_text(text)
        path = tmp_path
    else:
        path, _ = write_tokens(tmp_path, texts=texts)
        path = write_documents(tmp_path, texts) if source == "jsonl" else path
    corpus = load(path, source=source)
    assert "4" in numbers_in(corpus.heldout_rows)
    assert corpus.num_also_heldout == 1
    assert (corpus.num_documents, corpus.num_heldout_documents) == (44, 5)
    held = packing.is_heldout(0, 50, 0.1)
    kept = [text for n, text in enumerate(texts) if not held[n] and n != 12]
    stream = "".join(text + "\0" for text in kept)
    assert as_stream(corpus.rows) == stream[: corpus.rows.size]
    assert corpus.num_tokens + corpus.num_dropped_tokens == len(stream)
    assert "left out: 1 documents that are held out too" in data_header(corpus)
    assert "held out too" not in data_header(
        load(write_documents(tmp_path, numbered_documents(50)))
    )


@pytest.mark.parametrize("source", ["jsonl", "tokens"])
def test_of_a_held_out_file_too_no_document_is_trained_on_and_reading_goes_on(tmp_path, source):
    texts, heldout = numbered_documents(50), ["kept apart " * 9, "<0>" * 40]
    texts[:10] = [heldout[1]] * 10
    if source == "jsonl":
        path = write_documents(tmp_path, texts)
        heldout_path = write_documents(tmp_path, heldout, "heldout.jsonl")
    else:
        path, _ = write_tokens(tmp_path, texts=texts)
        heldout_path, _ = write_tokens(tmp_path, "heldout.npy", np.int32, heldout)
    stream = "".join(text + "\0" for text in texts[10:])
    for num_sequences in (None, 20, 10**6):
        corpus = load(
            path, source=source, heldout_path=str(heldout_path), num_sequences=num_sequences
        )
        assert len(corpus.rows) == min(num_sequences or 10**6, len(stream) // 16)
        assert as_stream(corpus.rows) == stream[: corpus.rows.size]
        assert corpus.num_also_heldout == 10
    other = path.with_stem("other")
    other.write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="have 0 rows .* 50 documents held out too are left out"):
        load(path, source=source, heldout_path=str(other))


@pytest.mark.parametrize(
    "path", ["gone", "gone/*.txt", "x" * 300, "~no_such_user/x", "gone/deep/x.npy"]
)
@pytest.mark.parametrize("source", ["text", "jsonl", "tokens", "hf"])
@pytest.mark.parametrize("refuse", [check_data, load_data])
def test_a_missing_path_of_data_is_a_line_and_never_a_traceback(source, path, refuse, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((ConfigError, DataError), match=r"data\.path=") as error:
        refuse(settings_of(source=source, path=path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["heldout_path", "tokenizer"])
@pytest.mark.parametrize("value", ["gone.json", "x" * 300, "~no_such_user/x"])
def test_a_missing_held_out_path_or_tokenizer_is_known_before_text_is_read(tmp_path, key, value):
    path = write_documents(tmp_path, [])
    with pytest.raises(DataError, match=f"data.{key}={value[:100]}"):
        check_data(settings_of(source="jsonl", path=str(path), **{key: value}))


def test_data_that_could_be_read_pass_the_check_unread(tmp_path):
    path = write_documents(tmp_path, [])
    check_data(settings_of(source="jsonl", path=str(path)))
    with pytest.raises(DataError):
        load_data(settings_of(source="jsonl", path=str(path)))
