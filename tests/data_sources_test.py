import os
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from adloco_jax.data import sources
from adloco_jax.errors import ConfigError, DataError


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_a_folder_and_a_glob_name_their_files_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        write(tmp_path / name, name)

    def names(path):
        found = sources.find_files(str(path), key="data.path")
        return [file.relative_to(tmp_path).as_posix() for file in found]

    assert names(tmp_path / "d.md") == ["d.md"]
    assert names(tmp_path) == ["a.txt", "b.txt", "d.md", "deep/c.txt"]
    assert names(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert names(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "deep/c.txt"]
    write(tmp_path / "a1", "other")
    write(tmp_path / "a[1]", "this")
    assert names(tmp_path / "a[1]") == ["a[1]"]  # an existing file is not read as a glob


def test_a_path_without_files_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    for path, message in (
        ("gone.txt", "no such file or folder"),
        ("*.gz", "no file matches"),
        ("folder", "an empty folder"),
    ):
        with pytest.raises(DataError, match=message) as error:
            sources.find_files(str(tmp_path / path), key="data.heldout_path")
        assert str(error.value).startswith(f"data.heldout_path={tmp_path / path}")
    with pytest.raises(ConfigError, match="data.path is empty"):
        sources.find_files("", key="data.path")


def test_stdlib_is_the_librarys_own_sources_and_topics_without_tests():
    documents = list(sources.stdlib_documents())
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "json" / "__init__.py").read_text() in documents
    assert any(document.startswith('The "assert" statement') for document in documents)
    assert not any("class TestCase(unittest.TestCase)" in document for document in documents)
    assert not any(text.startswith("# system configuration generated") for text in documents)
    assert sum(map(len, documents)) > 5_000_000


def test_text_gives_a_document_per_file_that_is_not_empty(tmp_path):
    contents = {"a": "one\r\ntwo", "b": "", "c": "ü", "d": b"a\xff"}
    files = [write(tmp_path / name, content) for name, content in contents.items()]
    assert list(sources.text_documents(files[:3], sources.Intake())) == ["one\r\ntwo", "ü"]
    with pytest.raises(DataError, match="d: not UTF-8 at byte 1 .*or leave it out by a glob"):
        list(sources.text_documents(files, sources.Intake()))


def test_a_file_of_another_kind_is_no_json(tmp_path):
    with pytest.raises(DataError, match=r"README\.md: data.source=jsonl reads .jsonl and .json"):
        list(sources.jsonl_documents([tmp_path / "README.md"], sources.Intake(), text_column="t"))


def test_texts_without_a_file_are_recorded_by_their_hash():
    first, other = sources.Intake(), sources.Intake()
    assert list(first.read_unfiled("x", ["a", "", "ö"])) == ["a", "ö"]
    list(other.read_unfiled("x", ["aö"]))
    (one,), (two,) = first.shards, other.shards
    assert one["bytes"] == two["bytes"] == 3 and one["rows"] == 2
    assert one["sha256"] != two["sha256"]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(8, np.float32), "token ids are integers, have float32"),
        (np.zeros((2, 5), np.int32), r"rows of 5 tokens, need 4 \(data.sequence_length 3"),
        (np.zeros((2, 2, 4), np.int32), "have 3 dimensions"),
        (np.arange(1000), "no readable, whole .npy array"),  # truncated below
    ],
)
def test_an_array_of_another_kind_is_a_data_error(tmp_path, array, message):
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    os.truncate(tmp_path / "t.npy", min(200, (tmp_path / "t.npy").stat().st_size))
    with pytest.raises(DataError, match=rf"t\.npy: {message}"):
        sources.open_tokens(tmp_path / "t.npy", row_length=4)


def test_a_single_document_is_cut_at_the_blank_line_nearest_to_the_held_out_share():
    text = "".join(f"paragraph {i}\nline two\n\n" for i in range(100))
    for given in (text, text.replace("\n", "\r\n")):
        head, tail = sources.cut_in_two(given, where="data.path=x", heldout_frac=0.1)
        assert head + tail == given
        assert head.splitlines()[-2:] == ["line two", ""] and tail.startswith("paragraph")
        blank_lines = [match.end() for match in re.finditer(r"(\r?\n){2}", given)]
        assert len(head) == min(blank_lines, key=lambda end: abs(end - 0.9 * len(given)))


def test_a_blank_line_far_from_the_held_out_share_gives_way_to_a_newline():
    text = "Title\n\n" + "a line of verse\n" * 100
    head, tail = sources.cut_in_two(text, where="data.path=x", heldout_frac=0.2)
    assert head + tail == text
    assert head.endswith("verse\n") and tail.startswith("a line")
    assert len(tail) / len(text) == pytest.approx(0.2, abs=0.02)
    with pytest.raises(DataError, match="data.path=x: the only document has no line break"):
        sources.cut_in_two("one line only\n", where="data.path=x", heldout_frac=0.5)
