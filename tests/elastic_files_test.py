"""Files that the driver serves: pieces, a transfer that was cut, and rows that a learner reads."""

import jax
import numpy as np
import pytest
from learners import opened
from texts import numbered_documents, write_documents
from toy import data_settings

from adloco_jax.data import load_corpus
from adloco_jax.elastic import files, store
from adloco_jax.elastic.direct_driver import RunObjects
from adloco_jax.elastic.messages import Refused
from adloco_jax.elastic.objects import Memory
from adloco_jax.elastic.signatures import Unneeded
from adloco_jax.errors import ResourceError

PIECE = files.FILE_PIECE_BYTES


class Counted(RunObjects):
    """A driver's objects, which count what is read, and may damage it."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read, self.damaged = [], ""

    def get(self, name):
        self.read.append(name.rpartition("/")[2])
        found = super().get(name)
        if found is not None and name.endswith(self.damaged) and self.damaged:
            return found[0], iter([bytes(found[0])])
        return found


@pytest.fixture
def served(tmp_path):
    """A file of two and a half pieces, its driver's objects, and its description."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes(PIECE * 5 // 2))
    library, there = files.Library({("weights", path.name): path}), Counted(tmp_path)
    there.offer(library)
    return path, there, library.files[0]


def cached(served, folder):
    return files.CachedFile(store.Store(served[1], Unneeded()), served[2], folder)


def test_pieces_are_read_once_and_a_cut_transfer_goes_on(served, tmp_path):
    path, there, _ = served
    cached(served, tmp_path / "cache").read([1])
    assert there.read == ["hashes", "1"]
    found = cached(served, tmp_path / "cache")
    found.read()
    assert sorted(there.read) == ["0", "1", "2", "hashes", "hashes"]
    assert found.path.read_bytes() == path.read_bytes()


def test_a_piece_that_was_damaged_on_disk_is_read_again(served, tmp_path):
    path, there, _ = served
    found = cached(served, tmp_path / "cache")
    found.read()
    data = bytearray(path.read_bytes())
    data[PIECE] ^= 1
    found.path.write_bytes(data)
    there.read.clear()
    cached(served, tmp_path / "cache").read()
    assert there.read == ["hashes", "1"] and found.path.read_bytes() == path.read_bytes()


def test_a_cache_that_is_full_is_named_with_what_helps(monkeypatch, served, tmp_path):
    found = cached(served, tmp_path / "cache")
    found._kept.unlink()
    found._kept.symlink_to("/dev/full")
    with pytest.raises(ResourceError, match=r"cannot be written \(No space left.*make room"):
        found.read()


def test_a_cache_that_cannot_be_made_is_named(served, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(ResourceError, match=r"cache/here/model\.safetensors: cannot be written"):
        cached(served, tmp_path / "cache/here")


@pytest.mark.parametrize("damaged", ["hashes", "1"])
def test_a_piece_that_is_not_what_the_description_says_is_refused(
    monkeypatch, served, tmp_path, damaged
):
    monkeypatch.setattr(store, "READ_PAUSES_S", ())
    served[1].damaged = damaged
    with pytest.raises(Refused, match=f"files/{served[2].root}/{damaged}: missing or damaged"):
        cached(served, tmp_path / "cache").read()


def test_a_bucket_gets_the_pieces_once(served, tmp_path, capsys):
    path, _, about = served
    library, there = files.Library({("weights", path.name): path}), opened(tmp_path / "bucket")
    library.write_to(there)
    library.write_to(there)
    assert capsys.readouterr().out.count("writing model.safetensors, 2.5 MiB") == 1
    found = files.CachedFile(opened(tmp_path / "bucket"), about, tmp_path / "cache")
    found.read()
    assert found.path.read_bytes() == path.read_bytes()


def test_pieces_in_a_bucket_that_another_run_has_signed_are_written_anew(served, tmp_path):
    path, _, about = served
    library = files.Library({("weights", path.name): path})
    library.write_to(opened(tmp_path / "bucket", run="before"))
    there = opened(tmp_path / "bucket", run="now")
    library.write_to(there)
    files.CachedFile(there, about, tmp_path / "cache").read()


def serve_rows(monkeypatch, tmp_path, path, **data):
    """A driver's rows, its files, the objects that serve them, and the rows of a learner."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "driver"))
    settings = data_settings(path=str(path), source="jsonl", **data)
    corpus = load_corpus(settings, note=lambda line: None)
    there = Counted(tmp_path)
    library = files.Library(files.files_of(corpus, ""))
    there.offer(library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "learner"))
    keeper = store.Store(there, Unneeded())
    rows = files.ServedRows(keeper, library.files, settings, num_classes=None)
    return corpus, library, there, rows


def test_a_row_of_several_pieces_comes_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "FILE_PIECE_BYTES", 128)  # room for the array's header
    path = write_documents(tmp_path, numbered_documents(2000))
    corpus, *_, rows = serve_rows(monkeypatch, tmp_path, path, sequence_length=255)
    np.testing.assert_array_equal(rows.batch(0, 0, 5, 2), corpus.batch(0, 0, 5, 2))


@pytest.mark.parametrize("kind", ["packed", "documents", "chats"])
def test_served_rows_are_those_of_the_driver_and_only_what_is_read_is_sent(
    monkeypatch, tmp_path, kind
):
    monkeypatch.setattr(files, "FILE_PIECE_BYTES", 1024)
    data = {"attention": "document"} if kind == "documents" else {}
    path = write_documents(tmp_path, numbered_documents(2000))
    if kind == "chats":
        path = tmp_path / "chats.jsonl"
        chat = '{"prompt": "%d?", "completion": "%d"}\n'
        path.write_text("".join(chat % (n, n) for n in range(2000)))
        data = {"text_column": "prompt+completion"}
    data["sequence_length"] = 15
    corpus, library, there, rows = serve_rows(monkeypatch, tmp_path, path, **data)
    assert rows.fingerprint == corpus.fingerprint and len(rows.rows) == len(corpus.rows)
    before = len(there.read)
    for start in (0, 40):
        want = corpus.batch(0, 0, start, 3)
        jax.tree.map(np.testing.assert_array_equal, rows.batch(0, 0, start, 3), want)
    total = sum(file.size for file in library.files if file.name.startswith("train."))
    assert 0 < len(there.read) - before <= 24 and total > 50 * 1024


def test_nothing_outside_the_files_is_served(served, tmp_path):
    (tmp_path / "endpoint.key").write_bytes(b"secret")
    library = files.Library({("weights", "model.safetensors"): served[0]})
    assert library.get(f"files/{'0' * 64}/0") is None
    assert library.get(f"files/{served[2].root}/3") is None
    assert Memory("").get("files/../endpoint.key") is None
