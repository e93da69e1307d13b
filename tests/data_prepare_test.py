"""Prepared folders: the rows of the in-memory way, whatever the processes, kills and damage."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy import data_settings

from adloco_jax.data import hub, load_corpus, load_tokenizer, packing, prepare, prepared
from adloco_jax.data.check import check, check_tokens, guess_source
from adloco_jax.data.prepare import Request
from adloco_jax.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import prepare_data  # noqa: E402

LENGTH = 15


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts_of(300), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return str(path)


def texts_of(count, seed=0):
    rng = random.Random(seed)
    words = ["ölig", "batch", "gradient", "trainer", "noise", "x" * 20, "и", "日本"]
    return [f"<{n}> " + " ".join(rng.choices(words, k=rng.randint(1, 60))) for n in range(count)]


def shards_in(folder, *, count=4, documents=40):
    folder.mkdir(exist_ok=True)
    for number in range(count):
        lines = [json.dumps({"text": text}) for text in texts_of(documents, number)]
        content = gzip.compress("\n".join(lines).encode(), mtime=0)
        (folder / f"part-{number}.json.gz").write_bytes(content)
    return folder


@pytest.fixture
def source(tmp_path):
    return shards_in(tmp_path / "source")


def request_for(path, **changes):
    defaults = {"source": "jsonl", "path": str(path), "sequence_length": LENGTH}
    return Request(**defaults | {"heldout_frac": 0.1} | changes)


def load(path, **changes):
    defaults = {"source": "tokens", "path": str(path), "heldout_path": "", "text_column": "text"}
    defaults |= {"tokenizer": "bytes", "sequence_length": LENGTH, "num_sequences": None, "seed": 0}
    defaults |= {"heldout_frac": 0.1, "subset_frac": 1.0, "num_streams": 2, "vocab_size": 600}
    return load_corpus(data_settings(**defaults | changes))


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def numbers_in(rows, tokenizer="bytes"):
    return load_tokenizer(tokenizer).decode(rows.reshape(-1).tolist())


@pytest.mark.parametrize("kind", ["jsonl", "text", "lone text"])
def test_the_rows_are_those_of_the_corpus_read_in_memory(tmp_path, source, kind):
    path = source
    if kind != "jsonl":
        path = tmp_path / "texts"
        path.mkdir()
        for number, text in enumerate(texts_of(30)):
            (path / f"{number}.txt").write_text(text * (number % 3))
    if kind == "lone text":
        path = path / "lone"
        path.mkdir()
        (path / "one.txt").write_text("\n\n".join(texts_of(50)))
        (path / "empty.txt").write_text("")
    wanted = request_for(path, source=kind.split()[-1])
    prepare.prepare(wanted, tmp_path / "out")
    ours, theirs = load(tmp_path / "out"), load(path, source=wanted.source)
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    np.testing.assert_array_equal(ours.heldout_rows, theirs.heldout_rows)
    for field in ("num_documents", "num_heldout_documents", "num_tokens", "num_dropped_tokens"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.tokens_per_byte == theirs.tokens_per_byte
    assert ours.shards == theirs.shards
    assert ours.rows.dtype == theirs.rows.dtype
    np.testing.assert_array_equal(ours.batch(1, 1, 3, 9), theirs.batch(1, 1, 3, 9))


def test_a_document_that_is_held_out_too_is_left_out_and_counted(tmp_path, source):
    copy = json.dumps({"text": texts_of(40)[4]}) + "\n"  # number 4 is held out
    (source / "part-1a.jsonl").write_text(copy * 3)
    wanted = request_for(source)
    sidecar = prepare.prepare(wanted, tmp_path / "out")
    ours, theirs = load(tmp_path / "out"), load(source, source="jsonl")
    assert sidecar.also_heldout == ours.num_also_heldout == theirs.num_also_heldout == 3
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    assert ours.num_documents == theirs.num_documents
    assert ours.num_dropped_tokens == theirs.num_dropped_tokens
    (train, heldout) = (getattr(sidecar, side) for side in ("train", "heldout"))
    texts = [text for number in range(4) for text in texts_of(40, number)]
    assert train.text_bytes + heldout.text_bytes == sum(len(text.encode()) for text in texts)
    assert f"{sidecar.train.rows} rows of {LENGTH} tokens" in check(wanted)
    assert "left out of training: 3 documents that are held out too" in check(wanted)
    report = check_tokens(str(tmp_path / "out"), tokenizer=None, sequence_length=LENGTH)
    assert "left out of training: 3 documents held out too" in report and "prepare" not in report


def test_the_check_finds_what_is_held_out_too_in_a_folder_of_an_earlier_version(
    tmp_path, source, monkeypatch
):
    (source / "part-9.jsonl").write_text(json.dumps({"text": texts_of(40)[4]}))
    (source / "part-99.jsonl").write_text(json.dumps({"text": "the last one is cut short" * 9}))
    monkeypatch.setattr(prepare._Work, "_leave_out_heldout", lambda work: 0)
    prepare.prepare(request_for(source), tmp_path / "out")
    sidecar = json.loads((tmp_path / "out" / "prepared.json").read_text())
    del sidecar["also_heldout"]
    (tmp_path / "out" / "prepared.json").write_text(json.dumps(sidecar))
    assert load(tmp_path / "out").num_also_heldout == 0
    report = check_tokens(str(tmp_path / "out"), tokenizer=None, sequence_length=LENGTH)
    assert "1 documents to train on are held out too; prepare the data again" in report


def test_every_token_stands_once_in_a_row_but_for_the_two_tails(tmp_path, source, tokenizer_file):
    sidecar = prepare.prepare(request_for(source, tokenizer=tokenizer_file), tmp_path / "out")
    encoder = load_tokenizer(tokenizer_file)
    expected = []
    for number in range(4):
        for ids in encoder.encode_batch(texts_of(40, number)):
            expected.append([*ids.tolist(), encoder.eot_id])
    heldout = packing.is_heldout(0, len(expected), 0.1)
    for name, side, mask in (
        ("train", sidecar.train, ~heldout),
        ("heldout", sidecar.heldout, heldout),
    ):
        stream = [i for ids, mine in zip(expected, mask, strict=True) if mine for i in ids]
        rows = np.load(tmp_path / "out" / f"{name}.npy")
        assert rows.reshape(-1).tolist() == stream[: len(stream) // 16 * 16]
        assert side.tokens == len(stream) and side.rows == len(rows) == len(stream) // 16
        assert side.documents == mask.sum()
    assert sidecar.train.tokens + sidecar.heldout.tokens == sum(map(len, expected))


def test_the_result_is_the_same_for_any_number_of_processes(tmp_path, source, monkeypatch):
    monkeypatch.setattr(packing, "_CHUNK_CHARS", 1500)  # several blocks to a shard
    for processes in (1, 3):
        wanted = request_for(source)
        prepare.prepare(wanted, tmp_path / f"out{processes}", processes=processes)
    assert content(tmp_path / "out1") == content(tmp_path / "out3")
    assert multiprocessing.active_children() == []


def test_a_stop_between_shards_goes_on_and_reads_no_shard_again(tmp_path, source):
    wanted = request_for(source)
    prepare.prepare(wanted, tmp_path / "whole")
    seen = []

    def stop(done, total, tokens):
        seen.append((done, total))
        if done == 2 and len(seen) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(wanted, tmp_path / "out", on_progress=stop)
    assert not (tmp_path / "out").exists()
    read = []
    shards = prepare.find_shards(wanted)
    for shard in shards:
        (name, _), *_ = shard.files
        read.append(name)
    (source / read[0]).write_bytes(b"x" * (source / read[0]).stat().st_size)  # would be refused
    first = []
    prepare.prepare(
        wanted, tmp_path / "out", on_progress=lambda done, total, tokens: first.append(done)
    )
    assert first[0] == 2
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


COMMAND = [sys.executable, str(ROOT / "scripts" / "prepare_data.py")]


# Lines of the progress before each kill: the request, then one per shard.
@pytest.mark.parametrize("kills", [(4,), pytest.param((1, 3, 6), marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_same_command_ends_alike(tmp_path, tokenizer_file, capsys, kills):
    source = shards_in(tmp_path / "source", count=8, documents=400)
    arguments = [str(source), "--tokenizer", tokenizer_file, "--output"]
    assert prepare_data.main([*arguments, str(tmp_path / "whole"), "--processes", "1"]) == 0
    capsys.readouterr()
    progress = tmp_path / "out.partial" / "progress.jsonl"
    rng, lines = random.Random(int.from_bytes(os.urandom(4))), 0
    for least in kills:
        process = subprocess.Popen(
            [*COMMAND, *arguments, str(tmp_path / "out"), "--processes", "2"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while process.poll() is None and lines < least:
            lines = progress.read_bytes().count(b"\n") if progress.exists() else 0
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert prepare_data.main([*arguments, str(tmp_path / "out"), "--processes", "1"]) == 0
    output = capsys.readouterr().out
    assert "going on: " in output or "already prepared" in output
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize(
    "moment", ["others copied", "sidecar written", "one tail cut", "progress gone"]
)
def test_a_stop_while_finishing_ends_alike(tmp_path, source, moment, copies, monkeypatch):
    copy = json.dumps({"text": texts_of(40)[4]}) + "\n"  # of one that is held out
    (source / "part-9.jsonl").write_text(json.dumps({"text": "other"}) + "\n" + copy * copies)
    wanted = request_for(source)
    prepare.prepare(wanted, tmp_path / "whole")
    stop = {
        "others copied": (prepare, "_sha256"),
        "sidecar written": (os, "truncate"),  # called at the end alone
        "one tail cut": (prepare, "_sync"),
        "progress gone": (os, "rename"),
    }[moment]
    true, calls = getattr(*stop), []

    def broken(*arguments):
        calls.append(arguments)
        # Two folders are synced before the end begins.
        if len(calls) == {"truncate": 1, "_sync": 3, "rename": 1, "_sha256": 2}[stop[1]]:
            raise OSError("stopped")
        return true(*arguments)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="stopped"):
        patch.setattr(*stop, broken)
        prepare.prepare(wanted, tmp_path / "out")
    is_written = (tmp_path / "out.partial" / prepared.SIDECAR).exists()
    assert is_written == (moment != "others copied")
    prepare.prepare(wanted, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_other_arguments_are_refused_with_what_differs_and_nothing_is_overwritten(tmp_path, source):
    def stop(done, total, tokens):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(request_for(source), tmp_path / "out", on_progress=stop)
    before = content(tmp_path / "out.partial")
    for changes, named in (
        ({"sequence_length": 31}, "sequence_length 15 there, 31 asked for"),
        ({"heldout_frac": 0.2}, "heldout_frac 0.1 there, 0.2 asked for"),
    ):
        with pytest.raises(ConfigError, match=named):
            prepare.prepare(request_for(source, **changes), tmp_path / "out")
    assert content(tmp_path / "out.partial") == before
    prepare.prepare(request_for(source), tmp_path / "out")
    whole = content(tmp_path / "out")
    with pytest.raises(ConfigError, match="never overwritten"):
        prepare.prepare(request_for(source, sequence_length=31), tmp_path / "out")
    assert prepare.prepare(request_for(source), tmp_path / "out").row_length == 16
    (source / "part-9.json.gz").write_bytes(b"more")
    with pytest.raises(ConfigError, match=r"files none there, part-9\.json\.gz of 4 asked for"):
        prepare.prepare(request_for(source), tmp_path / "out")
    assert content(tmp_path / "out") == whole


def test_a_beginning_without_a_shard_binds_nobody_and_a_file_to_come_may_be_mended(
    tmp_path, source
):
    damaged = source / "part-2.json.gz"
    whole = damaged.read_bytes()
    with pytest.raises(DataError, match="no field 'body'"):
        prepare.prepare(request_for(source, text_column="body"), tmp_path / "out")
    damaged.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=r"part-2\.json\.gz: damaged"):
        prepare.prepare(request_for(source), tmp_path / "out")
    damaged.write_bytes(whole)
    shards_done = []
    prepare.prepare(
        request_for(source), tmp_path / "out", on_progress=lambda done, *_: shards_done.append(done)
    )
    assert shards_done[0] == 2
    prepare.prepare(request_for(source), tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_what_is_not_ours_is_never_touched(tmp_path, source):
    for name in ("out", "out2.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    for name in ("out", "out2"):
        with pytest.raises(ConfigError, match="name another"):
            prepare.prepare(request_for(source), tmp_path / name)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    assert content(tmp_path / "out2.partial") == {"thesis.txt": b"mine"}


def test_a_second_process_is_refused(tmp_path, source):
    def again(done, total, tokens):
        if done == 1:
            prepare.prepare(request_for(source), tmp_path / "out")

    with pytest.raises(ConfigError, match="another process"):
        prepare.prepare(request_for(source), tmp_path / "out", on_progress=again)


def test_damage_is_refused_by_file_and_line_or_left_out(tmp_path, source):
    (source / "part-1.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": 5}\n'))
    (source / "part-2.json.gz").write_bytes(b"damage")
    with pytest.raises(DataError, match=r"part-1\.json\.gz:2: .*must be a string"):
        prepare.prepare(request_for(source), tmp_path / "out")
    wanted = request_for(source, max_bad_rows=1, on_bad_shard="skip")
    sidecar = prepare.prepare(wanted, tmp_path / "out2")
    assert [shard.get("rows") for shard in sidecar.shards] == [40, 1, None, 40]
    assert sidecar.shards[1]["bad_rows"] == 1 and "damaged" in sidecar.shards[2]["skipped"]


def test_the_budget_of_bad_rows_holds_over_an_interruption(tmp_path, source):
    for number in (0, 3):
        (source / f"part-{number}.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\nbad\n'))
    wanted = request_for(source, max_bad_rows=1)
    shards_done = []
    for _ in range(2):
        shards_done.clear()
        with pytest.raises(DataError, match=r"part-3.*max_bad_rows=1"):
            prepare.prepare(
                wanted, tmp_path / "out", on_progress=lambda done, *_: shards_done.append(done)
            )
    assert shards_done[0] == 3


def test_too_little_text_is_said(tmp_path, source):
    with pytest.raises(DataError, match="heldout rows, need 2 rows of 3001"):
        prepare.prepare(request_for(source, sequence_length=3000), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_parquet(path, columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_is_read_and_its_faults_are_named(tmp_path, source):
    texts = [text for number in range(4) for text in texts_of(40, number)]
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_parquet(folder / "a[1].parquet", {"text": texts[:90], "n": list(range(90))})
    write_parquet(folder / "b.parquet", {"text": texts[90:], "n": list(range(70))})
    assert guess_source(str(folder)) == "parquet"
    ours = prepare.prepare(request_for(folder, source="parquet"), tmp_path / "out")
    theirs = prepare.prepare(request_for(source), tmp_path / "out2")
    assert (ours.train, ours.heldout) == (theirs.train, theirs.heldout)
    assert [shard["rows"] for shard in ours.shards] == [90, 70]
    for wanted, message in (
        ({"text_column": "body"}, r"a\[1\]\.parquet: no column 'body' .*have text, n"),
        ({"text_column": "n"}, "must be a column of strings, have int64"),
    ):
        with pytest.raises(DataError, match=message):
            prepare.prepare(request_for(folder, source="parquet", **wanted), tmp_path / "out3")
    write_parquet(folder / "b.parquet", {"text": ["a", None, "c"]})
    with pytest.raises(DataError, match=r"b\.parquet:2: 'text' must be a string"):
        prepare.prepare(request_for(folder, source="parquet"), tmp_path / "out4")
    (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"b\.parquet: damaged or no parquet") as error:
        prepare.prepare(request_for(folder, source="parquet"), tmp_path / "out5")
    assert "\n" not in str(error.value)


def test_a_data_set_of_the_hub_is_read_part_by_part(tmp_path, monkeypatch):
    import datasets

    def rows(numbers):
        for number in numbers:
            yield from ({"text": text} for text in texts_of(40, number))

    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"numbers": [0, 1, 2, 3]})
    asked = []

    def stand_in(path, name, **options):
        asked.append((path, name, options))
        return stream

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    wanted = request_for("allenai/c4", source="hub", name="en")
    sidecar = prepare.prepare(wanted, tmp_path / "out")
    assert asked == [("allenai/c4", "en", {"split": "train", "streaming": True})]
    assert [shard["rows"] for shard in sidecar.shards] == [40] * 4
    assert sidecar.shards[1]["name"] == "allenai/c4/en/train/00001-of-00004"
    theirs = prepare.prepare(request_for(shards_in(tmp_path / "source")), tmp_path / "out2")
    assert sidecar.train.sha256 == theirs.train.sha256


def test_no_network_is_one_line_with_the_remedy(monkeypatch, capsys, tmp_path):
    import datasets

    def offline(*arguments, **options):
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    code = prepare_data.main(["allenai/c4", "--name", "en", "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert "no network" in error and "give their path" in error and "LocalEntry" not in error


@pytest.fixture
def finished(tmp_path, source):
    prepare.prepare(request_for(source), tmp_path / "out")
    return tmp_path / "out"


def test_training_maps_the_arrays_and_takes_the_sidecars_hashes(finished, source):
    corpus = load(finished)
    assert isinstance(corpus.rows, np.memmap) and isinstance(corpus.heldout_rows, np.memmap)
    assert corpus.fingerprint == load(finished).fingerprint
    assert corpus.fingerprint != load(finished, num_sequences=100).fingerprint
    assert load(finished, num_sequences=100).num_sequences == 100
    bare = load(finished / "train.npy", heldout_path=str(finished / "heldout.npy"))
    np.testing.assert_array_equal(bare.rows, corpus.rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 16}, "rows of 16 tokens, need 17 .*set data.sequence_length=15"),
        ({"tokenizer": "FILE"}, "made with the tokenizer bytes .*prepare the data again"),
        ({"vocab_size": 200}, "model.vocab_size"),
        ({"heldout_path": "/x"}, "has its own held-out rows"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(finished, tokenizer_file, changes, message):
    changes = {key: tokenizer_file if v == "FILE" else v for key, v in changes.items()}
    with pytest.raises(ConfigError, match=message) as error:
        load(finished, **changes)
    assert "\n" not in str(error.value)


def edit(**changes):
    def apply(folder):
        sidecar = json.loads((folder / "prepared.json").read_bytes())
        for key, value in changes.items():
            side, _, field = key.rpartition("__")
            (sidecar[side] if side else sidecar)[field] = value
        (folder / "prepared.json").write_text(json.dumps(sidecar))

    return apply


def cut(folder):
    os.truncate(folder / "train.npy", (folder / "train.npy").stat().st_size - 1)


def link(folder):
    (folder / "train.npy").rename(folder.parent / "elsewhere.npy")
    (folder / "train.npy").symlink_to(folder.parent / "elsewhere.npy")


def other_type(folder):
    rows = np.load(folder / "heldout.npy").astype(np.int16)
    np.save(folder / "heldout.npy", rows)


DAMAGE = {
    "cut": (cut, r"train\.npy: .* bytes, prepared.json says"),
    "missing": (lambda folder: (folder / "heldout.npy").unlink(), r"heldout\.npy: missing"),
    "link": (link, "a link out of the folder"),
    "other type": (other_type, "int16 of shape"),
    "rows": (edit(train__rows=1), "says uint16 of"),
    "negative": (edit(train__rows=-1), "damaged, rows is -1"),
    "a bool": (edit(row_length=True), "damaged, row_length is True"),
    "a text": (edit(heldout__sha256=5), "damaged, sha256 is 5"),
    "no side": (edit(train=None), "damaged, rows is None"),
    "shards": (edit(shards=[5]), "not every one of shards"),
    "format": (edit(format=2), "format 2, need 1"),
    "no object": (lambda folder: (folder / "prepared.json").write_text("[]"), "format None"),
    "no JSON": (lambda folder: (folder / "prepared.json").write_text('{"for'), "no JSON"),
    "deep": (lambda folder: (folder / "prepared.json").write_text("[" * 10**6), "no JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_in_a_line(finished, damage):
    apply, message = DAMAGE[damage]
    apply(finished)
    with pytest.raises(DataError, match=message) as error:
        load(finished)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_flipped_bit_is_found_by_the_check(finished):
    with open(finished / "train.npy", "r+b") as file:
        file.seek(200)
        byte = file.read(1)
        file.seek(200)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DataError, match=r"train\.npy damaged"):
        check_tokens(str(finished), tokenizer=None, sequence_length=128)


def test_the_check_tells_lengths_rows_and_round_trips(tmp_path):
    texts = [f"a{n}aaaaaaa" for n in range(6)] + [f"{n}" + "b" * 18 for n in range(3)] + ["c" * 99]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    wanted = Request("jsonl", str(tmp_path), sequence_length=9, heldout_frac=0.2)
    report = check(wanted)
    assert "min 10, median 10, mean 22.0, 90 % 20, max 100" in report
    assert "10 documents, 2 of them held out" in report
    heldout = sum(len(texts[i]) + 1 for i in np.flatnonzero(packing.is_heldout(0, 10, 0.2)))
    rows = f"{(220 - heldout) // 10} rows of 9 tokens to train on, {heldout // 10} held-out rows"
    assert rows in report
    assert "10 of 10 sampled documents (100.0%)" in report
    assert "  | a0aaaaaaa<end of text>" in report
    prepare.prepare(wanted, tmp_path / "out")
    assert rows in check_tokens(str(tmp_path / "out"), tokenizer=None, sequence_length=128)


def test_the_check_counts_documents_that_do_not_come_back(tmp_path, monkeypatch):
    import dataclasses

    from adloco_jax.data import check as check_module

    (tmp_path / "a.jsonl").write_text('{"text": "Upper"}\n{"text": "lower"}')
    encoder = load_tokenizer("bytes")
    lossy = dataclasses.replace(encoder, decode=lambda ids: encoder.decode(ids).lower())
    monkeypatch.setattr(check_module, "load_tokenizer", lambda name: lossy)
    assert "1 of 2 sampled documents" in check(Request("jsonl", str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing/file.jsonl", "--check"], 3, "no such file"),
        (["*.parquet", "--check"], 3, "no file matches"),
        (["x" * 300, "--check"], 3, "no path that can be read (File name too long)"),
        (["~no_such_user/x", "--check"], 3, "no path that can be read"),
        (["stdlib"], 2, "either --output FOLDER or --check"),
        (["stdlib", "--output", "out", "--sequence_length", "0"], 2, "at least 1"),
        (["stdlib", "--output", "out", "--processes", "0"], 2, "processes=0"),
        (["stdlib", "--output", "out", "--tokenizer", "no/such.json"], 3, "no such file or folder"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    assert prepare_data.main(arguments) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_made_and_that_it_is_there(tmp_path, source, capsys):
    command = [str(source), "--sequence_length", "15", "--processes", "1"]
    command += ["--output", str(tmp_path / "out")]
    assert prepare_data.main(command) == 0
    first = capsys.readouterr().out
    assert "tokens/s" in first and "held-out rows" in first and "  | <0> " in first
    assert prepare_data.main(command) == 0
    assert "already prepared" in capsys.readouterr().out
    assert prepare_data.main([str(tmp_path / "out"), "--check"]) == 0
    assert "as they were written" in capsys.readouterr().out


def test_the_record_of_texts_is_of_all_of_them():
    record = {"bytes": 0}
    assert list(hub.hashed(["a", "ö"], record)) == ["a", "ö"]
    other = {"bytes": 0}
    list(hub.hashed(["aö"], other))
    assert record["bytes"] == other["bytes"] == 3 and record["sha256"] != other["sha256"]
