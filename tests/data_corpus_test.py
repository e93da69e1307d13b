import numpy as np
import pytest
from texts import END, as_stream, numbered_documents, numbers_in, write_documents
from toy import data_settings

from adloco_jax.data import DATA_SOURCES, DataSource, load_corpus, rows
from adloco_jax.errors import ConfigError, DataError


def settings_of(path="", **changes):
    defaults = dict(source="jsonl", sequence_length=15, heldout_frac=0.1, num_streams=3)
    return data_settings(path=str(path), **(defaults | changes))


def load(path="", **changes):
    return load_corpus(settings_of(path, **changes), note=lambda line: None)


def documents_of(corpus):
    return tuple(corpus.manifest.documents)


@pytest.fixture
def fifty(tmp_path):
    return write_documents(tmp_path, numbered_documents(50))


def test_defect_12_rows_are_the_documents_end_to_end_without_padding_or_gap(tmp_path, fifty):
    """The reference code pads each document to a fixed length and trains on the padding."""
    heldout = write_documents(tmp_path, ["ü" * 40, "ab" * 10], "heldout.jsonl")
    corpus = load(fifty, heldout_path=str(heldout))
    stream = "".join(text + "\0" for text in numbered_documents(50))
    assert corpus.rows.shape == (len(stream) // 16, 16) and corpus.rows.dtype == np.uint16
    assert as_stream(corpus.rows) == stream[: corpus.rows.size]
    assert documents_of(corpus) == (50, 2)
    assert as_stream(corpus.heldout_rows) == "ü" * 40 + "\0" + "ab" * 7 + "a"
    assert corpus.tokens_per_byte == 102 / 100  # per UTF-8 byte, with end-of-text tokens


def test_the_split_is_by_document_and_independent_of_the_seed(tmp_path):
    path = write_documents(tmp_path, numbered_documents(200))
    corpus = load(path)
    assert documents_of(corpus) == (180, 20)
    train, heldout = numbers_in(corpus.rows), numbers_in(corpus.heldout_rows)
    assert not train & heldout
    assert len(train | heldout) >= 198  # each dropped tail may hold one document
    # Held-out documents are spread over the reading order, not taken from one end.
    assert np.histogram([int(n) for n in heldout], bins=4, range=(0, 200))[0].min() >= 4
    np.testing.assert_array_equal(corpus.heldout_rows, load(path, seed=9).heldout_rows)


@pytest.mark.parametrize(("count", "heldout"), [(24, 2), (27, 3)])
def test_the_held_out_share_of_the_documents_is_rounded(tmp_path, count, heldout):
    corpus = load(write_documents(tmp_path, numbered_documents(count)), heldout_frac=0.1)
    assert documents_of(corpus)[1] == heldout


@pytest.mark.parametrize(("num_chars", "num_rows"), [(47, 3), (46, 2)])
def test_a_length_of_whole_rows_keeps_its_last_row(tmp_path, num_chars, num_rows):
    heldout = write_documents(tmp_path, ["h" * 40], "heldout.jsonl")
    path = write_documents(tmp_path, ["x" * num_chars])
    assert len(load(path, heldout_path=str(heldout), num_streams=1).rows) == num_rows


def test_num_sequences_bounds_the_rows_and_stops_reading_early(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_CHARS", 2**10)
    path = write_documents(tmp_path, [f"{i:03}" + str(i % 10) * 97 for i in range(200)])
    corpus, everything = load(path, num_sequences=50), load(path, num_sequences=10**9)
    assert sum(documents_of(corpus)) < 100 and sum(documents_of(everything)) == 200
    np.testing.assert_array_equal(corpus.rows, everything.rows[:50])
    first = everything.heldout_rows[: len(corpus.heldout_rows)]
    np.testing.assert_array_equal(corpus.heldout_rows, first)


def test_held_out_tokens_do_not_count_towards_num_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_CHARS", 1)  # reading may stop after every document
    texts = [f"<{n}>" * 8 for n in range(24)]
    texts[1] = texts[3] = texts[0]  # this text is held out
    path = write_documents(tmp_path, texts)
    corpus = load(path, num_sequences=4, heldout_frac=0.5)
    assert len(corpus.rows) == 4
    np.testing.assert_array_equal(corpus.rows, load(path, heldout_frac=0.5).rows[:4])


def test_num_sequences_reads_on_until_something_is_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_CHARS", 2**10)
    texts = [f"{i:02}" + "x" * (2**10 - 2) for i in range(12)]
    corpus = load(write_documents(tmp_path, texts), num_sequences=5)
    assert len(corpus.rows) == 5 and len(corpus.heldout_rows) == 2**10 // 16
    assert documents_of(corpus) == (1, 1)


def test_a_single_text_document_is_cut_in_two(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"<{i}> paragraph\n\n" for i in range(200)))
    (tmp_path / "empty.txt").write_text("")
    corpus = load(tmp_path, source="text")
    assert documents_of(corpus) == (1, 1)
    train, heldout = map(numbers_in, (corpus.rows, corpus.heldout_rows))
    assert max(map(int, train)) < min(map(int, heldout))
    assert len(corpus.heldout_rows) / len(corpus.rows) == pytest.approx(1 / 9, rel=0.1)


def test_fingerprint_follows_rows_and_not_the_order_they_are_seen_in(tmp_path, fifty):
    base = load(fifty).fingerprint
    assert base == load(fifty, seed=5, num_streams=1, subset_frac=0.5).fingerprint
    changed = numbered_documents(50)
    changed[-2] = changed[-2].replace("4", "5")
    others = {
        load(fifty, sequence_length=14).fingerprint,
        load(write_documents(tmp_path, changed, "changed.jsonl")).fingerprint,
    }
    for letter in "xy":
        heldout = write_documents(tmp_path, [letter * 50], letter + ".jsonl")
        others.add(load(fifty, heldout_path=str(heldout)).fingerprint)
    assert len(others - {base}) == 4


def test_the_description_shows_the_first_row_trained_on_in_one_printable_line(tmp_path):
    texts = [f"line\n\t\x1b[31m {i} é" for i in range(60)]
    path = write_documents(tmp_path, texts)
    corpus = load(path, sequence_length=40)
    first, sample = corpus.describe().split("\n  | ")
    assert first.startswith(
        "data: 1 file; 53 documents to train on, 5 held out\ntokenizer: bytes, 257 ids\n"
    )
    assert " of 40 tokens to train on" in first and sample.isprintable()
    assert r"line\n\t\x1b[31m " in sample and "é<|endoftext|>line" in sample
    assert sample.count("<|endoftext|>") == int((corpus.batch(0, 0, 0, 1) == END).sum())
    long = load(path, sequence_length=300, num_streams=1, heldout_frac=0.7).describe()
    _, long = long.split("\n  | ")
    assert len(long) == 240 and long.endswith("…")


def test_a_warning_says_that_most_documents_are_left_out(tmp_path):
    path = write_documents(tmp_path, numbered_documents(40))
    path.write_text(path.read_text() + '{"text": 1}\n' * 60)
    corpus = load(path, skip_bad=60)
    assert "\nwarning: 60 of 100 documents are left out\n" in corpus.describe() + "\n"


# --- Documents that are held out too ----------------------------------------------------------


def test_a_document_that_is_held_out_too_is_not_trained_on(tmp_path):
    texts = numbered_documents(50)
    texts[4] = texts[12] = "<4>" * 30  # number 4 is held out
    path = write_documents(tmp_path, texts)
    corpus = load(path)
    assert "4" in numbers_in(corpus.heldout_rows)
    assert corpus.manifest.copies == 1 and documents_of(corpus) == (44, 5)
    held = rows.is_heldout(50, 0.1)
    kept = [text for n, text in enumerate(texts) if not held[n] and n != 12]
    assert as_stream(corpus.rows) == "".join(text + "\0" for text in kept)[: corpus.rows.size]
    assert "held out; 1 copies of held-out ones left out" in corpus.describe()


# --- Faults -----------------------------------------------------------------------------------


HELD = {"heldout_path": "thousand.jsonl"}
REFUSED = [  # texts to train on, changes, the error
    (["y"], dict(path=".", heldout_path="d*"), r"both hold docs\.jsonl"),
    (["", ""], {}, r"data.path=docs\.jsonl: no text in it"),
    (["long enough " * 50], {}, "have 0 rows of 16 tokens to hold out, in 0 of 1 documents"),
    (numbered_documents(9)[4:5] * 30, {}, "have 0 rows of 16 tokens to train on, .*27 copies of"),
    (
        ["y" * 325],
        HELD | dict(num_streams=11, subset_frac=0.5),
        "have 10 rows .*need 11, a batch of 1 for each",
    ),
    (["y" * 325], HELD | dict(sequence_length=400), "have 0 rows of 401 tokens to train.*need 1"),
    (
        ["y" * 325],
        dict(heldout_path="five.jsonl", sequence_length=300, num_streams=1),
        "heldout_path=.*have 1 row of 301 tokens",
    ),
    *(
        (["y"], dict(path=path, source=source), r"data\.path=")
        for path in ("gone/*.txt", "~no_such_user/x")
        for source in ("jsonl", "hf")
    ),
    (["y"], dict(path="binary.txt", source="text"), "binary.txt: damaged or unreadable"),
    (["y"], dict(heldout_path="blank.jsonl"), "data.heldout_path=blank.jsonl: no text in it"),
    (["y"], dict(heldout_path="gone.json"), "data.heldout_path=gone.json"),
    (["y"], dict(tokenizer="gone.json"), "data.tokenizer=gone.json"),
    (["y"], dict(vocab_size=256), r"data.tokenizer=bytes has 257 ids.*vocab_size is 256"),
]


@pytest.mark.parametrize(("texts", "changes", "message"), REFUSED)
def test_data_that_cannot_be_used_are_refused_in_a_line(
    tmp_path, monkeypatch, texts, changes, message
):
    monkeypatch.chdir(tmp_path)
    heldout = {"thousand": ["x" * 1000], "five": ["x" * 500], "blank": [""], "docs": texts}
    for name, documents in heldout.items():
        write_documents(tmp_path, documents, f"{name}.jsonl")
    (tmp_path / "binary.txt").write_bytes(b"\xff\x01" * 9)
    with pytest.raises((DataError, ConfigError), match=message) as error:
        load(**{"path": "docs.jsonl"} | changes)
    assert "\n" not in str(error.value)


# --- The table of sources ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (lambda *_: ["a", b"b"], "data.source=own: document 2: 'text': have b'b', need Unicode"),
        (lambda *_: (str(10 // (9 - n)) for n in range(20)), None),
        (lambda *_: (b"\xff".decode() for _ in range(2)), "after document 0: 'utf-8' codec"),
    ],
)
def test_what_a_source_gives_besides_text_is_one_line(monkeypatch, documents, message):
    monkeypatch.setitem(DATA_SOURCES, "own", DataSource(documents, needs=()))
    with pytest.raises(DataError if message else ZeroDivisionError, match=message):
        load(source="own")


@pytest.mark.parametrize("version", [None, 1])
def test_rows_of_an_entry_are_kept_only_if_it_has_a_version(monkeypatch, version):
    calls = []

    def documents(file, data):
        calls.append(file)
        return numbered_documents(50)

    monkeypatch.setitem(DATA_SOURCES, "own", DataSource(documents, needs=(), version=version))
    first, second = load(source="own"), load(source="own")
    assert first.fingerprint == second.fingerprint
    np.testing.assert_array_equal(first.rows, second.rows)  # also after their folder is gone
    assert calls == [None] * (1 if version else 2)
