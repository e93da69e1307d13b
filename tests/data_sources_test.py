"""The files that a path names, and the texts that each source reads from them."""

import errno
import gzip
import os
import re
import sysconfig
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from texts import write_documents
from toy import data_settings

from adloco_jax.data import load_corpus, sources
from adloco_jax.data.corpus import column_of_texts, source_of
from adloco_jax.data.disk import write_errors
from adloco_jax.data.files import find
from adloco_jax.data.prepared import shard_changes
from adloco_jax.errors import DataError, ResourceError

DATA = data_settings(label_column="").data


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def names(path):
    return list(find(str(path), key="data.path"))


def corpus(path, **options):
    defaults = dict(source="text", path=str(path), sequence_length=16, heldout_frac=0.1)
    settings = data_settings(**defaults | options)
    return load_corpus(settings, num_classes=options.get("classes"), note=lambda line: None)


# -- Files -----------------------------------------------------------------------------------


def test_a_file_a_folder_and_a_glob_name_their_files_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/e.txt", "d.md"):
        write(tmp_path / name, name)
    assert names(tmp_path / "d.md") == ["d.md"]
    everything = ["a.txt", "b.txt", "d.md", "deep/c.txt", "deep/er/e.txt"]
    assert names(tmp_path) == names(tmp_path / "**") == names(f"{tmp_path}/**/*") == everything
    assert names(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert names(tmp_path / "**" / "*.txt") == [n for n in everything if n != "d.md"]
    assert names(tmp_path / "*" / "er" / "*") == ["deep/er/e.txt"]
    write(tmp_path / "a1", "other")
    write(tmp_path / "a[1]", "this")
    assert names(tmp_path / "a[1]") == ["a[1]"]  # an existing file is not read as a glob


@pytest.fixture
def linked(tmp_path):
    """Six files, four of them behind links; two loops of links; hidden names."""
    for name in ("other/three.txt", "other/sub/four.txt", "far/five.txt", "six.txt"):
        write(tmp_path / name, f"text {name}\n" * 20)
    for name in ("data/one.txt", "data/two.txt", "data/.git/config", "data/.hidden.txt"):
        write(tmp_path / name, f"text {name}\n" * 20)
    for folder in (".ipynb_checkpoints", "_temporary/0"):  # the second as Spark leaves it
        write(tmp_path / "data" / folder / "x.txt", "x\n" * 20)
    write(tmp_path / "data/_SUCCESS", "")
    write(tmp_path / "data/._one.txt", b"\xff\xfe")
    for name, target in (("other", "other"), ("again", "other"), ("far", "far"), ("up", "data")):
        (tmp_path / "data" / name).symlink_to(tmp_path / target)
    (tmp_path / "other" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "6.txt").symlink_to(tmp_path / "six.txt")
    return tmp_path / "data"


def test_a_folder_and_a_glob_follow_links_once_and_leave_hidden_names_out(linked):
    expected = ["6.txt", "again/sub/four.txt", "again/three.txt", "far/five.txt"]
    expected += ["one.txt", "two.txt"]
    assert names(linked) == names(linked / "**" / "*.txt") == expected
    folder, by_glob = corpus(linked), corpus(linked / "**" / "*.txt")
    np.testing.assert_array_equal(folder.rows, by_glob.rows)
    assert "data: 6 files; 5 documents to train on, 1 held out" in folder.describe()
    for name in ("one.txt", "two.txt", "6.txt"):
        (linked / name).unlink()
    assert len(names(linked)) == 3  # a folder with only links
    assert names(linked / ".git" / "*") == ["config"]  # a hidden name is read if the path spells it
    assert names(linked / "**" / "_temporary" / "**") == ["_temporary/0/x.txt"]
    (linked / "lost.txt").symlink_to(linked / "nowhere")
    with pytest.raises(DataError, match="lost.txt is a link that leads nowhere"):
        names(linked)


def test_a_path_without_regular_files_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe")
    for path, message in (
        ("gone.txt", "no such file or folder"),
        ("*.gz", "no file matches"),
        ("folder", "an empty folder"),
        ("folder/pipe", "no such file or folder"),
    ):
        with pytest.raises(DataError, match=message) as error:
            names(tmp_path / path)
        assert str(error.value).startswith(f"data.path={tmp_path / path}")


def test_what_changed_between_two_readings_is_named():
    first = [{"name": f"{name}.jsonl", "rows": 40, "sha256": name} for name in "abc"]
    assert shard_changes(first, first) == []
    second = [first[0], first[1] | {"sha256": "B"}, first[2] | {"name": "d.jsonl"}]
    assert sorted(shard_changes(first, second)) == [
        "b.jsonl: edited",
        "c.jsonl: no longer there",
        "d.jsonl: was not there before",
    ]
    assert shard_changes(first, first[::-1]) == ["the same files in another order"]


# -- Text ------------------------------------------------------------------------------------


def test_stdlib_is_the_librarys_own_sources_and_topics_without_tests():
    documents = list(sources.stdlib_documents(None, DATA))
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "json" / "__init__.py").read_text() in documents
    assert any(document.startswith('The "assert" statement') for document in documents)
    assert not any("class TestCase(unittest.TestCase)" in document for document in documents)
    assert not any(text.startswith("# system configuration generated") for text in documents)
    assert sum(map(len, documents)) > 5_000_000


def test_text_gives_a_document_per_file_that_is_not_empty(tmp_path):
    contents = {"a": "one\r\ntwo", "b": "", "c": b"\xef\xbb\xbf\xc3\xbc"}
    files = [write(tmp_path / name, content) for name, content in contents.items()]
    texts = [text for file in files for text in sources.text_documents(file, DATA)]
    assert texts == ["one\r\ntwo", "ü"]  # without a byte-order mark


def test_too_many_open_files_are_not_damage(tmp_path, monkeypatch):
    fault = OSError(errno.EMFILE, "Too many open files", "a.txt")
    monkeypatch.setattr(sources, "open", mock.Mock(side_effect=fault), raising=False)
    write(tmp_path / "a.txt", "a line\n\n" * 400)
    with pytest.raises(ResourceError, match="a.txt.*raise the limit of open files .ulimit -n"):
        corpus(tmp_path)
    with pytest.raises(ResourceError, match="ulimit"), write_errors(tmp_path):
        raise fault


def test_a_single_document_is_cut_at_the_blank_line_nearest_to_the_held_out_share():
    text = "".join(f"paragraph {i}\nline two\n\n" for i in range(100))
    for given in (text, text.replace("\n", "\r\n")):
        head, tail = sources.cut_in_two(given, where="data.path=x", heldout_frac=0.1)
        assert head + tail == given
        assert head.splitlines()[-2:] == ["line two", ""] and tail.startswith("paragraph")
        blank_lines = [match.end() for match in re.finditer(r"(\r?\n){2}", given)]
        assert len(head) == min(blank_lines, key=lambda end: abs(end - 0.9 * len(given)))


# -- Tables ----------------------------------------------------------------------------------

TEXTS = [f'{n}: words, "quoted"\nand a second line' for n in range(40)]
TEXTS[3:7] = ["None", "NA", "null", "nan"]  # text like any other text
COLUMNS = {"id": range(40), "text": TEXTS, "label": [n % 2 for n in range(40)]}


def as_csv(path, columns, separator=",", bom=""):
    def cell(value):
        return '"' + str(value).replace('"', '""') + '"' if isinstance(value, str) else str(value)

    rows = [list(columns), *zip(*columns.values(), strict=True)]
    text = "\r\n".join(separator.join(map(cell, row)) for row in rows)
    content = (bom + text).encode()
    return write(path, gzip.compress(content) if path.suffix == ".gz" else content)


def as_parquet(path, columns):
    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    pyarrow.parquet.write_table(table, path)
    return path


def as_arrow(path, columns):
    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    with pyarrow.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=7)
    return path


def saved(path, columns):
    import datasets

    columns = {name: list(values) for name, values in columns.items()}
    datasets.Dataset.from_dict(columns).save_to_disk(path, num_shards=2)
    return path


ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
TABLES = {
    "csv with a mark": ("hf", lambda at: as_csv(at / "a.csv.gz", COLUMNS, bom="\ufeff")),
    "tsv": ("hf", lambda at: as_csv(at / "a.tsv", COLUMNS, "\t")),
    "saved": ("hf", lambda at: saved(at / "saved", COLUMNS)),
    "arrow file": ("hf", lambda at: as_arrow(at / "a.arrow", COLUMNS)),
    "parquet": ("parquet", lambda at: as_parquet(at / "a[1].parquet", COLUMNS)),
    "jsonl": ("jsonl", lambda at: write_documents(at, ROWS)),
}


@pytest.mark.parametrize("kind", TABLES)
def test_texts_and_classes_come_from_every_source_with_columns(tmp_path, kind):
    source, make = TABLES[kind]
    path = make(tmp_path)
    expected = corpus(write_documents(tmp_path / "texts", TEXTS), source="jsonl", num_streams=1)
    found = corpus(path, source=source)
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.heldout_rows, expected.heldout_rows)
    assert source_of(str(path)) == source
    settings = data_settings(source=source, path=str(path), sequence_length=16, heldout_frac=0.1)
    labelled = load_corpus(settings, num_classes=2, note=lambda line: None)
    assert np.bincount(labelled.rows[:, 0]).tolist() == [18, 18]
    assert "36 (18, 18 by class) of 16 tokens" in labelled.describe()


NUL = "a line\n\n" * 400 + "\0" * 99


@pytest.mark.parametrize(
    ("source", "name", "content", "message"),
    [
        ("hf", "a.csv", b"id,body\n1,x\n", "no field 'text', have id, body"),
        ("hf", "a.csv", b"text,id,text\na,1,b\n", r"a\.csv: 2 fields 'text', have text, id, text"),
        ("hf", "a.csv", b"text\nfine\nx,y\n", r"a\.csv:3: more cells than there are columns"),
        ("hf", "a.csv", b'text\nfine\n"open\n\n', r"a\.csv:3: damaged \(unexpe.*a quote may not"),
        ("hf", "a.xml", b"<a/>", r".jsonl, .parquet, .arrow; data.source=text reads plain text"),
        ("hf", "a.arrow", b"ARROW1", r"a\.arrow: damaged or unreadable"),
        ("text", "a.txt", NUL, r"a\.txt: have .* at character 3200, need Unicode"),
        ("text", "d", b"a\xff", "d: damaged or unreadable .*position 1.*a glob can leave"),
    ],
)
def test_a_damaged_file_is_refused_in_a_line(tmp_path, source, name, content, message):
    write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as error:
        corpus(tmp_path, source=source)
    assert "\n" not in str(error.value)


def test_a_damaged_parquet_file_and_a_wrong_column_are_refused_in_a_line(tmp_path):
    path = as_parquet(tmp_path / "a.parquet", COLUMNS)
    for column, message in (
        ("body", r"a\.parquet: no field 'body', have id, text, label"),
        ("id", r"a\.parquet: row 1: 'id': have 0, need Unicode text"),
    ):
        with pytest.raises(DataError, match=message):
            corpus(path, source="parquet", text_column=column)
    twice = pyarrow.table([pyarrow.array(["a"])] * 2, ["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet: 2 fields 'text'"):
        corpus(tmp_path / "twice.parquet", source="parquet")
    content = path.read_bytes()
    for damaged in (content[:99], b"PAR1", content[:200] + b"\0" * 400 + content[600:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.parquet: damaged or unreadable") as error:
            corpus(path, source="parquet")
        assert "\n" not in str(error.value)


ROW = {"prompt": "Twice 2?", "completion": "4", "source": "a"}


def write_arrow(path, make):
    table = pyarrow.Table.from_pylist([ROW])
    with make(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "arrow", "stream.arrow"])
def test_columns_of_the_first_row_are_asked_for_without_naming_one(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        write_documents(tmp_path, [ROW], path.name)
    elif ending == "csv":
        path.write_text(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n")
    elif ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), path)
    else:
        write_arrow(path, pyarrow.ipc.new_stream if "stream" in ending else pyarrow.ipc.new_file)
    data = data_settings(source=source_of(str(path)), path=str(path)).data
    source = sources.DATA_SOURCES[data.source]
    assert sorted(sources.first_columns(source, path, data)) == sorted(ROW)
    assert column_of_texts(data) == "prompt+completion"


def test_column_of_a_source_that_reads_no_file_is_found_by_its_first_row(monkeypatch):
    source = sources.DataSource(
        documents=lambda file, data: [sources.Record("row 1", ROW)], needs=("text_column",)
    )
    monkeypatch.setitem(sources.DATA_SOURCES, "memory", source)
    assert column_of_texts(data_settings(source="memory").data) == "prompt+completion"
