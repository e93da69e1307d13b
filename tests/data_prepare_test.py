"""Prepared rows: equal bytes after interruptions; who owns the folder; damage is found."""

import contextlib
import json
import os
import random
import re
import shutil
import sysconfig
import threading
import time
from pathlib import Path

import filelock
import numpy as np
import pytest
from texts import write_documents
from toy import data_settings

from adloco_jax import main as cli
from adloco_jax.cli.parser import parse
from adloco_jax.cli.train import configure
from adloco_jax.config import completed
from adloco_jax.data import corpus as corpus_module
from adloco_jax.data import files, load_corpus, load_tokenizer, rows
from adloco_jax.data.disk import replaced_folder
from adloco_jax.data.tokenizers import tokenizer_of
from adloco_jax.errors import ConfigError, DataError

LENGTH, BYTES = 15, load_tokenizer("bytes")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Tokens are saved, and reading may stop, after every few documents."""
    monkeypatch.setattr(rows, "CHUNK_CHARS", 6000)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A separate cache for the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adloco_jax" / "data"


def texts_of(count, seed=0):
    rng = random.Random(seed)
    words = ["ölig", "batch", "gradient", "trainer", "noise", "x" * 20, "и", "日本"]
    return [f"<{n}> " + " ".join(rng.choices(words, k=rng.randint(1, 60))) for n in range(count)]


def shards_in(folder, *, count=4, documents=40):
    for number in range(count):
        write_documents(folder, texts_of(documents, number), f"part-{number}.json.gz")
    return folder


@pytest.fixture
def source(tmp_path):
    return shards_in(tmp_path / "source")


def settings_of(path, **changes):
    defaults = dict(source="jsonl", path=str(path), sequence_length=LENGTH, heldout_frac=0.1)
    return data_settings(**defaults | changes)


def load(path, *, note=lambda line: None, **changes):
    return load_corpus(settings_of(path, **changes), note=note)


def prepare(path, folder, *, note=lambda line: None, **changes):
    """Prepares a named folder."""
    settings = settings_of(path, **changes)
    job = corpus_module.make_job(settings.data, tokenizer_of(settings.data, settings.model))
    return rows.prepare(job, folder, note=note)


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Stopped(BaseException):
    """Acts like a kill: nothing catches it."""


def stop_at(patch, number, calls):
    """Makes the n-th disk operation or call of the tokenizer fail."""

    def stopping(real):
        def step(*arguments, **options):
            calls.append(real)
            if len(calls) == number:
                raise Stopped
            return real(*arguments, **options)

        return step

    for owner, name in [
        *((os, name) for name in ("rename", "fsync")),
        (rows, "file_sha256"),
        (Path, "rename"),
        (Path, "unlink"),
        (shutil, "rmtree"),
        (type(BYTES), "encode_batch"),
    ]:
        patch.setattr(owner, name, stopping(getattr(owner, name)))


# -- Interruptions ---------------------------------------------------------------------------


def test_a_stop_at_any_step_leaves_no_folder_or_the_whole_one(tmp_path, monkeypatch):
    source = shards_in(tmp_path / "source", count=3, documents=30)
    held = shards_in(tmp_path / "held", count=2, documents=9)
    data = settings_of(source, heldout_path=str(held)).data

    def make(folder):
        job = corpus_module.make_job(data, BYTES)
        return rows.prepare(job, folder, note=lambda line: None)

    make(tmp_path / "whole")
    calls, number = [], 0
    while len(calls) >= number:
        number, out = number + 1, tmp_path / f"out{number}"
        calls.clear()
        with monkeypatch.context() as patch:
            with contextlib.suppress(Stopped):
                stop_at(patch, number, calls)
                make(out)
        assert not out.exists() or content(out) == content(tmp_path / "whole")
        make(out)
        assert content(out) == content(tmp_path / "whole")
        assert not (tmp_path / f".{out.name}.partial").exists()
    assert number > 15


def test_a_stop_while_a_folder_is_replaced_leaves_the_old_or_the_new_one(tmp_path, monkeypatch):
    """Between two renames the old one has another name, and the next call puts it back."""

    def replace(folder, text):
        with replaced_folder(folder) as partial:
            (partial / "file").write_bytes(text)

    calls, number = [], 0
    while len(calls) >= number:
        number, out = number + 1, tmp_path / f"out{number}"
        replace(out, b"old")
        calls.clear()
        with monkeypatch.context() as patch, contextlib.suppress(Stopped):
            stop_at(patch, number, calls)
            replace(out, b"new")
        with contextlib.suppress(Stopped), replaced_folder(out):
            raise Stopped
        assert content(out) in ({"file": b"old"}, {"file": b"new"})
        replace(out, b"newer")
        assert content(out) == {"file": b"newer"}
        assert not [*tmp_path.glob(f".{out.name}.*")]
    assert number > 6


# -- Who owns a folder ------------------------------------------------------------------------


def test_of_two_processes_one_makes_the_rows_and_the_other_waits_with_a_line(source, cache):
    job = corpus_module.make_job(settings_of(source).data, BYTES)
    cache.mkdir(parents=True)
    lines, found = [], []
    with filelock.FileLock(cache / f".{job.key}.lock"):
        other = threading.Thread(target=lambda: found.append(load(source, note=lines.append)))
        other.start()
        while not lines and other.is_alive():
            time.sleep(0.01)
        assert lines and lines[0].startswith("waiting for another process") and not found
    other.join(60)
    (corpus,) = found
    assert len(corpus.rows) > 300
    assert lines[-1].startswith("rows are kept for later runs, ")
    assert lines[-1].endswith(f"to delete them: rm -r {cache / job.key}")
    assert [path.name for path in cache.iterdir()] == [job.key]


def test_a_second_run_finds_its_rows_and_a_changed_key_or_file_makes_others(source, cache):
    def folders():
        return {path.name for path in cache.iterdir()}

    first = load(source)
    assert load(source).fingerprint == first.fingerprint and len(folders()) == 1
    assert isinstance(first.rows, np.memmap) and first.rows.dtype == np.uint16
    changes = [dict(sequence_length=14), dict(heldout_frac=0.2), dict(num_sequences=50)]
    changes += [dict(heldout_path=str(source / "part-0*"), path=str(source / "part-[12]*"))]
    for number, change in enumerate(changes, 2):
        load(change.pop("path", source), **change)
        assert len(folders()) == number
    os.utime(source / "part-1.json.gz", ns=(1, 1))
    assert load(source).fingerprint == first.fingerprint  # the content has not changed
    assert len(folders()) == len(changes) + 2


@pytest.mark.parametrize("kind", ["text", "stdlib"])
def test_a_file_rewritten_with_its_size_and_time_is_read_again(tmp_path, cache, monkeypatch, kind):
    """The rewritten byte is far from both ends of the file."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "other.py").write_text("other text " * 100)
    path, text = tmp_path / "book.py", "one line\n" * 50_000
    path.write_text(text)
    changes = dict(source=kind, path=str(tmp_path / "*.py") if kind == "text" else "")
    changes["heldout_frac"] = 0.5
    first, stat = load(**changes).fingerprint, path.stat()
    assert load(**changes).fingerprint == first
    path.write_text(f"{text[:200_000]}X{text[200_001:]}")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert load(**changes).fingerprint != first


def test_without_a_cache_that_can_be_written_rows_are_made_anew(source, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    lines = []
    found = load(source, note=lines.append)
    assert len(found.rows) > 300 and len(lines) == 1
    assert lines[0].startswith("rows cannot be kept for later runs (")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(OSError, match="no home"):
        files.cache_folder("data")


def test_what_was_unused_for_longest_leaves_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ADLOCO_CACHE_GB", "0.000002")
    root = files.cache_folder("")
    ages = {"data/a/train.npy": 9, "programs/b": 5, "checkpoints/c/x": 4, "data/d/train.npy": 0}
    for name, days in ages.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x" * 900)
        os.utime(root / name, (time.time() - days * 86400,) * 2)
    files.trim_cache()
    left = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
    assert left == ["checkpoints/c/x", "data/d/train.npy"]
    monkeypatch.setenv("ADLOCO_CACHE_GB", "0")
    files.trim_cache()  # what was used today stays
    assert not (root / "checkpoints/c").exists() and (root / "data/d").exists()
    monkeypatch.setenv("ADLOCO_CACHE_GB", "much")
    with pytest.raises(ConfigError, match="ADLOCO_CACHE_GB=much: expected a number"):
        files.trim_cache()


def test_another_request_and_files_of_others_are_refused_and_left_alone(tmp_path, source):
    prepare(source, tmp_path / "out")
    whole = content(tmp_path / "out")
    for change, message in (
        (dict(sequence_length=31), "another setting of sequence_length; it is never overwritten"),
        (
            dict(heldout_frac=0.2, num_sequences=5),
            "another setting of num_sequences, heldout_frac;",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(source, tmp_path / "out", **change)
    (source / "part-9.json.gz").write_bytes(b"more")
    with pytest.raises(ConfigError, match="another setting of files;"):
        prepare(source, tmp_path / "out")
    assert content(tmp_path / "out") == whole
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("a thesis")
    with pytest.raises(ConfigError, match="has other files; .*name another"):
        prepare(source, tmp_path / "thesis")
    assert content(tmp_path / "thesis") == {"thesis.txt": b"a thesis"}


# -- Damage ----------------------------------------------------------------------------------


@pytest.fixture
def kept(source, cache):
    """The folder of the rows of `source` in the cache."""
    load(source)
    (folder,) = cache.iterdir()
    return folder


def other_format(folder):
    (folder / "prepared.json").write_text('{"format": 1}')


def other_type(folder):
    np.save(folder / "heldout.npy", np.load(folder / "heldout.npy").astype(np.int16))


def huge(folder):
    text = repr({"descr": "<u2", "fortran_order": False, "shape": (4611686018427387904,)})
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.encode().ljust(117) + b"\n"
    (folder / "train.npy").write_bytes(header + b"\0" * 20)


DAMAGE = {
    "truncated": (
        lambda folder: os.truncate(folder / "train.npy", 99),
        r"not a complete \.npy array",
    ),
    "other type": (other_type, "int16 of shape"),
    "huge": (huge, r"train\.npy: "),
    "format": (other_format, "format 1, need 6; delete the folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_in_the_cache_are_refused_in_a_line(source, kept, damage):
    apply, message = DAMAGE[damage]
    apply(kept)
    with pytest.raises(DataError, match=message) as error:
        load(source)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_record_with_any_other_value_is_refused_in_a_line(source, kept):
    path = kept / "prepared.json"
    whole = json.loads(path.read_bytes())
    for key in whole.keys() - {"request"}:
        for wrong in (None, True, [{}]):
            path.write_text(json.dumps(whole | {key: wrong}))
            with pytest.raises(DataError, match="prepared") as error:
                load(source)
            assert "\n" not in str(error.value), (key, wrong)


# -- The plan --------------------------------------------------------------------------------


def test_a_plan_prepares_the_data_that_the_run_then_finds(source, cache, capsys):
    words = [f"--config.data.path={source}", "--config.data.sequence_length=15"]
    assert cli.main(["plan", "quickstart", *words]) == 0
    first = capsys.readouterr().out
    assert "found: data.source=jsonl by the files of " in first
    assert "data: 4 files; 152 documents to train on, 8 held out" in first and "  | " in first
    assert re.search(r"length: .* rows, .* over the [\d,]+ to train on", first)
    (folder,) = cache.iterdir()
    before = content(folder)
    settings = completed(configure(parse(["train", "quickstart", *words]))[1])
    assert load_corpus(settings).rows.shape[1] == 16
    assert content(folder) == before and [*cache.iterdir()] == [folder]
    (source / "part-1.json.gz").write_bytes(b"no text")
    assert cli.main(["plan", "quickstart", *words]) == 3
    assert "part-1.json.gz" in capsys.readouterr().err
