"""Bad files and bad rows: refused by name and line."""

import gzip
import json
import os
import random
import resource

import pytest
from toy import data_settings

from adloco_jax.data import load_corpus, sources
from adloco_jax.data.sources import Intake, shard_changes
from adloco_jax.errors import DataError, UserError

GOOD = [{"text": f"document {i}: {'words and more ' * 6}"} for i in range(40)]


def lines_of(rows):
    return "\n".join(json.dumps(row) for row in rows).encode()


def jsonl(*paths):
    intake = Intake()
    return list(sources.jsonl_documents(paths, intake, text_column="text")), intake


def corpus(path, **options):
    defaults = dict(source="jsonl", path=str(path), sequence_length=16, heldout_frac=0.1)
    return load_corpus(data_settings(**defaults | options))


BAD_ROWS = {
    "cut": (b'{"text": "abc', "not one JSON object per line"),
    "two": (b'{"text": "a"} {"text": "b"}', "not one JSON object"),
    "a list": (b'[{"text": "a"}]', "have a JSON list, need an object"),
    "no text": (b'{"body": 1, "id": 3}', r"no field 'text' \(data.text_column\), have body, id"),
    "null": (b'{"text": null}', "'text' must be a string, have null"),
    "invalid UTF-8": (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "'text' is not Unicode text"),
    "a key twice": (b'{"text": "a", "text": "b"}', "a key stands there twice"),
    "deep": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not one JSON object"),
    "a number too long": (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "not one JSON object"),
    "too long": (b'{"text": "' + b"a" * (sources.MAX_LINE_BYTES + 5) + b'"}', "a line of more"),
    "a BOM in the middle": (b'\xef\xbb\xbf{"text": "a"}', "not one JSON object"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_by_line(tmp_path, bad, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + bad + b'\n{"text": "two"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}") as error:
        jsonl(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_harmless_rows_are_read_plain_and_compressed(tmp_path):
    content = b'\xef\xbb\xbf{"text": "one", "n": 1}\r\n\n{"text": ""}\n  {"text":"NUL \\u0000"} '
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(content))
    assert jsonl(*sorted(tmp_path.iterdir()))[0] == ["one", "NUL \0"] * 2


def test_two_thousand_random_rows_are_read_or_refused(tmp_path):
    rng = random.Random(1)
    alphabet = [b'{"text": "', b'"}', b"{", b"}", b"[", b'"', b"\\u", b"\\", b"\xff", b"\0", b"a"]
    alphabet += [b":", b",", b"null", b"1e999", b"NaN", b'"text"', b"\xef\xbb\xbf", b" ", b"\r"]
    rows = [b"".join(rng.choices(alphabet, k=rng.randint(1, 12))) for _ in range(2000)]
    path, num_refused = tmp_path / "fuzz.jsonl", 0
    for row in rows:
        path.write_bytes(row)
        try:
            jsonl(path)
        except DataError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert 1500 < num_refused < 2000


WHOLE = gzip.compress(lines_of(GOOD))
DAMAGED = {
    "truncated": (WHOLE[:-20], r"damaged or unreadable \(Compressed"),
    "flipped": (WHOLE[:100] + bytes([WHOLE[100] ^ 1]) + WHOLE[101:], "damaged or unreadable"),
    "trailing junk": (WHOLE + b"junk", "damaged or unreadable"),
    "plain": (lines_of(GOOD), r"damaged or unreadable \(Not a gzip"),
    "no rows": (gzip.compress(b""), "empty"),
}


@pytest.mark.parametrize(("fault", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_shard_is_refused_before_its_rows(tmp_path, fault, message):
    for name, content in (("a", WHOLE), ("b", fault), ("c", WHOLE)):
        (tmp_path / f"{name}.json.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"b\.json\.gz: {message}") as error:
        corpus(tmp_path)
    assert "\n" not in str(error.value)
    texts = sources.jsonl_documents([tmp_path / "b.json.gz"], Intake(), text_column="text")
    with pytest.raises(DataError):
        next(texts)


def test_only_regular_files_of_a_folder_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(GOOD))
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "nowhere")
    assert [shard["name"] for shard in corpus(tmp_path).shards] == ["a.jsonl"]
    for name in ("b.jsonl", "c.jsonl"):
        with pytest.raises(UserError, match=name):
            corpus(tmp_path / name)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904,), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (-5,), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (500,), }",
        "__import__('os').system('true')",
    ],
)
def test_strange_arrays_of_tokens_are_refused_before_memory_is_taken(tmp_path, header):
    text = header.encode().ljust(117) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 20
    (tmp_path / "tokens.npy").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"tokens\.npy: "):
        sources.open_tokens(tmp_path / "tokens.npy", row_length=17)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def test_what_changed_between_two_readings_is_named(tmp_path):
    for name in "abc":
        rows = [{"text": f"{name} {row['text']}"} for row in GOOD]
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of(rows))
    first = corpus(tmp_path)
    assert [shard["rows"] for shard in first.shards] == [40, 40, 40]
    assert shard_changes(first.shards, corpus(tmp_path).shards) == []
    with (tmp_path / "b.jsonl").open("ab") as file:
        file.write(b'\n{"text": "more"}')
    (tmp_path / "c.jsonl").rename(tmp_path / "d.jsonl")
    second = corpus(tmp_path)
    assert second.fingerprint != first.fingerprint
    assert sorted(shard_changes(first.shards, second.shards)) == [
        "b.jsonl: edited",
        "c.jsonl: no longer there",
        "d.jsonl: was not there before",
    ]
    reordered = [*first.shards[1:], first.shards[0]]
    assert shard_changes(first.shards, reordered) == ["the same files in another order"]
