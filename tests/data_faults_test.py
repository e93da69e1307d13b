"""Bad files and bad rows are refused, with the file and the line."""

import gzip
import json
import random
import tracemalloc
import zlib

import pytest
from toy import data_settings

from adloco_jax.data import load_corpus, rows, sources
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import DataError

DATA = data_settings(label_column="").data


def jsonl(path):
    """The texts of a file of JSON lines."""
    found = sources.jsonl_documents(path, DATA)
    how = {"where": "x", "num_classes": None, "tokenizer": load_tokenizer("bytes")}
    return [document.text for document in sources.documents_of(found, DATA, **how)]


def corpus(path, **options):
    defaults = dict(source="jsonl", path=str(path), sequence_length=16, heldout_frac=0.1)
    return load_corpus(data_settings(**defaults | options), note=lambda line: None)


BAD_ROWS = {
    "no text": (b'{"body": 1, "id": 3}', "have body, id; set data.text_column=body"),
    "null": (b'{"text": null}', "'text': have None, need Unicode text"),
    "half a surrogate pair": (
        b'{"text": "\\ud800"}',
        "'text': have .* at character 0, need Unicode",
    ),
    "invalid UTF-8": (b'{"text": "\xff"}', "not one JSON object per line .*position 10"),
    "deep": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    "NUL": (b'{"text": "a\\u0000"}', "'text': have .* at character 1, need Unicode"),
    "too long": (b'{"text": "' + b"a" * (sources.MAX_LINE_BYTES + 5) + b'"}', "a line of more"),
    "a BOM in the middle": (b'\xef\xbb\xbf{"text": "a"}', "not one JSON object"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_by_line(tmp_path, bad, message):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n' + bad + b'\n{"text": "two"}\n'))
    with pytest.raises(DataError, match=rf"a\.jsonl.gz:2: .*{message}") as error:
        jsonl(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_harmless_rows_are_read_plain_and_compressed(tmp_path):
    content = b'\xef\xbb\xbf{"text": "one", "n": 1}\r\n\n{"text": ""}\n  {"text":"\\u0001"} '
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(content))
    assert [jsonl(path) for path in sorted(tmp_path.iterdir())] == [["one", "\1"]] * 2


def test_random_rows_are_read_or_refused(tmp_path):
    rng = random.Random(1)
    alphabet = [b'{"text": "', b'"}', b"{", b"}", b"[", b'"', b"\\u", b"\\", b"\xff", b"\0", b"a"]
    alphabet += [b":", b",", b"null", b"1e999", b"NaN", b'"text"', b"\xef\xbb\xbf", b" ", b"\r"]
    path, num_refused = tmp_path / "fuzz.jsonl", 0
    for _ in range(500):
        path.write_bytes(b"".join(rng.choices(alphabet, k=rng.randint(1, 12))))
        try:
            jsonl(path)
        except DataError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert 375 < num_refused < 500


GOOD = [{"text": f"document {i}: {'words and more ' * 6}"} for i in range(40)]
WHOLE = gzip.compress("\n".join(map(json.dumps, GOOD)).encode())
DAMAGED = {
    "truncated": (WHOLE[:-20], r"damaged or unreadable \(Compressed"),
    "trailing junk": (WHOLE + b"junk", "damaged or unreadable"),
    "no rows": (gzip.compress(b""), "empty"),
}


@pytest.mark.parametrize("num_sequences", [None, 3])  # the limit falls into the first file
@pytest.mark.parametrize(("fault", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_also_behind_the_limit(
    tmp_path, monkeypatch, fault, message, num_sequences
):
    monkeypatch.setattr(rows, "CHUNK_CHARS", 1)  # reading may stop after every document
    bad = "b" if num_sequences is None else "a"
    for name in "abc":
        (tmp_path / f"{name}.json.gz").write_bytes(fault if name == bad else WHOLE)
    with pytest.raises(DataError, match=rf"{bad}\.json\.gz: {message}") as error:
        corpus(tmp_path, num_sequences=num_sequences)
    assert "\n" not in str(error.value)


def test_a_hundred_flipped_bits_are_all_refused_by_file(tmp_path):
    rng, path = random.Random(0), tmp_path / "a.json.gz"
    for _ in range(100):
        content, position = bytearray(WHOLE), rng.randrange(10, len(WHOLE))
        content[position] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.json\.gz"):
            jsonl(path)


def test_a_bomb_takes_no_memory_whatever_it_unpacks_to(tmp_path):
    packer = zlib.compressobj(9, wbits=31)
    zeros = [packer.compress(b"\0" * 2**20) for _ in range(200)]
    (tmp_path / "bomb.json.gz").write_bytes(b"".join([*zeros, packer.flush()]))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"bomb\.json\.gz:1: a line of more than"):
        jsonl(tmp_path / "bomb.json.gz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * sources.MAX_LINE_BYTES
