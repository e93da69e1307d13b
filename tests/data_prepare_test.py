"""Prepared folders: the rows of `load_corpus`, whatever the interruptions and damage."""

import gzip
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from texts import write_documents
from toy import data_settings

from adloco_jax import main as cli
from adloco_jax.cli.prepare import guess_source
from adloco_jax.config import validate
from adloco_jax.data import hub, load_corpus, prepare, sources
from adloco_jax.data.prepare import Request
from adloco_jax.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[1]

LENGTH = 15


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Each file is a shard."""
    monkeypatch.setattr(prepare, "_SHARD_BYTES", 1)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    import tokenizers

    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(texts_of(300), vocab_size=500, show_progress=False)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return str(path)


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


def request_for(path, **changes):
    defaults = {"source": "jsonl", "path": str(path), "sequence_length": LENGTH}
    return Request(**defaults | {"heldout_frac": 0.1} | changes)


def load(path, **changes):
    defaults = dict(source="tokens", path=str(path), sequence_length=LENGTH, heldout_frac=0.1)
    return load_corpus(data_settings(**defaults | {"vocab_size": 600} | changes))


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def stop_after(shards):
    """Stops `prepare` once so many shards are done."""

    def on_progress(done, total, tokens):
        if done == shards:
            raise KeyboardInterrupt

    return on_progress


# -- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl with BPE", "text", "single text"])
def test_rows_are_those_of_the_corpus_read_in_memory(tmp_path, source, tokenizer_file, kind):
    path, name = source, "text" if "text" in kind else "jsonl"
    tokenizer = tokenizer_file if "BPE" in kind else "bytes"
    if name == "text":
        path = tmp_path / "texts"
        path.mkdir()
        texts = texts_of(30)
        for number, text in enumerate(texts if kind == "text" else ["\n\n".join(texts), ""]):
            (path / f"{number}.txt").write_text(text * (number % 3 if kind == "text" else 1))
    wanted = request_for(path, source=name, tokenizer=tokenizer)
    prepare.prepare(wanted, tmp_path / "out")
    ours = load(tmp_path / "out", tokenizer=tokenizer)
    theirs = load(path, source=name, tokenizer=tokenizer)
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    np.testing.assert_array_equal(ours.heldout_rows, theirs.heldout_rows)
    for field in ("num_documents", "num_heldout_documents", "tokens_per_byte", "shards"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.rows.dtype == theirs.rows.dtype


def test_copies_of_heldout_documents_are_left_out_and_counted(tmp_path, source):
    write_documents(source, [texts_of(40)[4]] * 3, "part-1a.jsonl")  # number 4 is held out
    wanted = request_for(source)
    sidecar = prepare.prepare(wanted, tmp_path / "out")
    ours, theirs = load(tmp_path / "out"), load(source, source="jsonl")
    assert sidecar.also_heldout == ours.num_also_heldout == theirs.num_also_heldout == 3
    np.testing.assert_array_equal(ours.rows, theirs.rows)


# -- interruptions -----------------------------------------------------------------------------


def test_a_shard_that_is_done_is_not_read_again(tmp_path, source):
    wanted = request_for(source)
    prepare.prepare(wanted, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(wanted, tmp_path / "out", on_progress=stop_after(2))
    assert not (tmp_path / "out").exists()
    first = source / "part-0.json.gz"
    first.write_bytes(b"x" * first.stat().st_size)  # would be refused
    done = []
    prepare.prepare(wanted, tmp_path / "out", on_progress=lambda number, *_: done.append(number))
    assert done[0] == 2
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_a_stop_at_any_step_gives_the_same_folder(tmp_path, monkeypatch):
    source = shards_in(tmp_path / "source", count=1, documents=40)
    held_out = texts_of(40)[4]
    write_documents(source, ["other", held_out], "part-9.jsonl")
    wanted = request_for(source)
    prepare.prepare(wanted, tmp_path / "whole")
    steps = [(sources, "sync"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "fsync")]
    calls, number = [], 0

    def stopping(real):
        def step(*arguments, **options):
            calls.append(real)
            if len(calls) == number:
                raise OSError("stopped")
            return real(*arguments, **options)

        return step

    while len(calls) >= number:
        number, out = number + 1, tmp_path / f"out{number}"
        calls.clear()
        with monkeypatch.context() as patch:
            for owner, name in steps:
                patch.setattr(owner, name, stopping(getattr(owner, name)))
            try:
                prepare.prepare(wanted, out)
            except OSError as error:
                assert "stopped" in str(error)
        prepare.prepare(wanted, out)
        assert content(out) == content(tmp_path / "whole")
        assert not Path(f"{out}.partial").exists()
    assert number > 15


@pytest.mark.slow
def test_killed_and_run_again_the_command_gives_the_same_folder(tmp_path, tokenizer_file, capsys):
    source = shards_in(tmp_path / "source", count=6, documents=200)
    arguments = [str(source), "--tokenizer", tokenizer_file, "--output"]
    assert cli.main(["prepare", *arguments, str(tmp_path / "whole")]) == 0
    program = "import sys; from adloco_jax import main; from adloco_jax.data import prepare; "
    program += "prepare._SHARD_BYTES = 1; sys.exit(main.main(['prepare', *sys.argv[1:]]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments, str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and not (tmp_path / "out.partial" / "3.npz").exists():
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.02))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and is_running(process.pid):
        time.sleep(0.05)
    assert not is_running(process.pid)  # nor the processes that it had started
    capsys.readouterr()
    assert cli.main(["prepare", *arguments, str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "continuing: " in output or "already prepared" in output
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def is_running(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_damaged_beginning_is_refused_in_a_line(tmp_path, source):
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(request_for(source), tmp_path / "out", on_progress=stop_after(2))
    for name in ("tokens", "1.npz"):
        damaged = tmp_path / "out.partial" / name
        damaged.write_bytes(damaged.read_bytes()[:-1])
        with pytest.raises(DataError, match=f"{name}: damaged; delete .* and start again"):
            prepare.prepare(request_for(source), tmp_path / "out")


def test_other_arguments_are_refused_with_what_differs_and_nothing_is_overwritten(tmp_path, source):
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(request_for(source), tmp_path / "out", on_progress=stop_after(1))
    before = content(tmp_path / "out.partial")
    with pytest.raises(ConfigError, match="sequence_length 15 there, 31 asked for"):
        prepare.prepare(request_for(source, sequence_length=31), tmp_path / "out")
    assert content(tmp_path / "out.partial") == before
    prepare.prepare(request_for(source), tmp_path / "out")
    whole = content(tmp_path / "out")
    (source / "part-9.json.gz").write_bytes(b"more")
    with pytest.raises(ConfigError, match="part-9.json.gz of 4 asked for.*never overwritten"):
        prepare.prepare(request_for(source), tmp_path / "out")
    assert content(tmp_path / "out") == whole


def test_files_of_others_are_never_touched(tmp_path, source):
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


# -- sources -----------------------------------------------------------------------------------


def test_damage_is_refused_by_file_and_line(tmp_path, source):
    (source / "part-1.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": 5}\n'))
    with pytest.raises(DataError, match=r"part-1\.json\.gz:2: .*must be a string"):
        prepare.prepare(request_for(source), tmp_path / "out")


def test_too_little_text_is_refused(tmp_path, source):
    with pytest.raises(DataError, match="heldout rows, need 2 rows of 3001"):
        prepare.prepare(request_for(source, sequence_length=3000), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_parquet(path, columns):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


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
    write_parquet(folder / "b.parquet", {"text": ["a", None, "c"]})
    for column, message in (
        ("body", r"a\[1\]\.parquet: no column 'body' .*have text, n"),
        ("n", "must be a column of strings, have int64"),
        ("text", r"b\.parquet:2: 'text' must be a string"),
    ):
        with pytest.raises(DataError, match=message):
            prepare.prepare(
                request_for(folder, source="parquet", text_column=column), tmp_path / column
            )
    (folder / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"b\.parquet: damaged \([^\n]*$"):
        prepare.prepare(request_for(folder, source="parquet"), tmp_path / "out5")


def test_a_data_set_of_the_hub_is_read_part_by_part(tmp_path, monkeypatch):
    import datasets

    def rows(numbers):
        for number in numbers:
            yield from ({"text": text} for text in texts_of(40, number))

    stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"numbers": [0, 1, 2, 3]})
    asked = []

    def open_stream(*names, text_column):
        asked.append((*names, text_column))
        return hub.Opened(lambda: stream.select_columns([text_column]), "a test", ())

    monkeypatch.setattr(hub, "open_stream", open_stream)
    sidecar = prepare.prepare(request_for("allenai/c4", source="hub", name="en"), tmp_path / "out")
    assert asked == [("allenai/c4", "en", "train", "text")]
    assert [shard["rows"] for shard in sidecar.shards] == [40] * 4
    assert sidecar.shards[1]["name"] == "allenai/c4/en/train/00001-of-00004"
    theirs = prepare.prepare(request_for(shards_in(tmp_path / "source")), tmp_path / "out2")
    assert sidecar.train.sha256 == theirs.train.sha256


# -- training ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare.prepare(request_for(shards_in(folder / "source")), folder / "out")
    return folder / "out"


@pytest.fixture
def finished(tmp_path, prepared_once):
    return shutil.copytree(prepared_once, tmp_path / "out")


def test_training_maps_the_arrays_and_takes_the_sidecars_hashes(finished):
    corpus = load(finished)
    assert isinstance(corpus.rows, np.memmap) and isinstance(corpus.heldout_rows, np.memmap)
    fewer = load(finished, num_sequences=100)
    assert corpus.fingerprint == load(finished).fingerprint != fewer.fingerprint
    assert len(fewer.rows) == 100


def test_a_config_that_does_not_fit_is_refused(prepared_once, tokenizer_file):
    for changes, message in (
        ({"sequence_length": 16}, "rows of 16 tokens, need 17 .*set data.sequence_length=15"),
        ({"tokenizer": tokenizer_file}, "made with the tokenizer bytes .*prepare the data again"),
        ({"heldout_path": "/x"}, "has its own held-out rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(prepared_once, **changes)


def edit(**changes):
    """Writes other values into the sidecar; None deletes."""

    def apply(folder):
        sidecar = json.loads((folder / "prepared.json").read_bytes())
        for key, value in changes.items():
            side, _, field = key.rpartition("__")
            (sidecar[side] if side else sidecar)[field] = value
        sidecar = {key: value for key, value in sidecar.items() if value is not None}
        (folder / "prepared.json").write_text(json.dumps(sidecar))

    return apply


def write(text):
    return lambda folder: (folder / "prepared.json").write_text(text)


def link(folder):
    (folder / "train.npy").rename(folder.parent / "elsewhere.npy")
    (folder / "train.npy").symlink_to(folder.parent / "elsewhere.npy")


def other_type(folder):
    np.save(folder / "heldout.npy", np.load(folder / "heldout.npy").astype(np.int16))


DAMAGE = {
    "truncated": (lambda folder: os.truncate(folder / "train.npy", 99), r"train\.npy: 99 bytes"),
    "link": (link, "a link out of the folder"),
    "other type": (other_type, "int16 of shape"),
    "rows": (edit(train__rows=1), "says uint16 of"),
    "a bool": (edit(row_length=True), "damaged, row_length is True"),
    "no side": (edit(train=None), "damaged, rows is None"),
    "shards": (edit(shards=[5]), "not every one of shards"),
    "format": (edit(format=2), "format 2, need 1"),
    "no object": (write("[]"), "format None"),
    "deep": (write("[" * 10**6), "no JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_in_a_line(finished, damage):
    apply, message = DAMAGE[damage]
    apply(finished)
    with pytest.raises(DataError, match=message) as error:
        load(finished)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing/file.jsonl", "--output", "out"], 3, "no such file"),
        (["x" * 300, "--output", "out"], 3, "no path that can be read (File name too long)"),
        (["stdlib"], 2, "required: --out/--output; write: adloco prepare stdlib --out prepared"),
        (["stdlib", "--output", "out", "--sequence_length", "0"], 2, "at least 1"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["prepare", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_reports_what_it_made_and_what_is_there(tmp_path, source, capsys):
    command = [str(source), "--sequence-length", "15"]
    command += ["--output", str(tmp_path / "out")]
    assert cli.main(["prepare", *command]) == 0
    first = capsys.readouterr().out
    assert "tokens/s" in first and "held-out rows" in first and "  | <0> " in first
    *_, to_train = first.splitlines()
    assert to_train.startswith("train with: adloco train quickstart ")
    words = shlex.split(to_train.partition("adloco train ")[2])
    settings = validate(cli._configure(*cli._parse(words))[1])
    assert load_corpus(settings).rows.shape[1] == 16 and settings.model.vocab_size == 257
    assert cli.main(["prepare", *command]) == 0
    assert "already prepared" in capsys.readouterr().out
