"""Training straight from a data set: its rows, its place in a run's state, its faults."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from texts import numbers_in, write_documents
from toy import bigram_loss, data_settings, settings_of

from adloco_jax.data import hub, load_corpus, packing
from adloco_jax.data.streaming import Streaming, load_stream
from adloco_jax.engine.inputs import SequentialRows
from adloco_jax.engine.local import LocalEngine
from adloco_jax.errors import ConfigError, DataError, Preempted
from adloco_jax.run import plan as plan_module
from adloco_jax.run.config import default_config, validate
from adloco_jax.run.ledger import deterministic_lines, read
from adloco_jax.run.resume import check_config, write_config
from adloco_jax.training import fit, train

pytestmark = pytest.mark.usefixtures("one_device")

LENGTH = 8
PACKING = dict(sequence_length=LENGTH, heldout_frac=0.1)


_opened: list[Streaming] = []


def stream(path, *, num_heldout_rows=20, **changes) -> Streaming:
    """Opens a data set; it is closed after the test."""
    settings = data_settings(source="hf", path=str(path), **(PACKING | changes))
    limit = dataclasses.replace(
        settings.eval, num_sequences=num_heldout_rows - packing.MAX_GUARD_ROWS
    )
    _opened.append(load_stream(dataclasses.replace(settings, eval=limit)))
    return _opened[-1]


def packed(path):
    return load_corpus(data_settings(source="jsonl", path=str(path), **PACKING))


def documents(count: int) -> list[str]:
    """Texts of uneven length, each of one number that no other has; every eleventh is empty."""
    repeats = np.random.default_rng(0).integers(1, 15, count)
    return [f"<{i}>" * int(n) if i % 11 != 5 else "" for i, n in enumerate(repeats)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four shards in C4's layout, 750 rows or so, and one of another split."""
    texts, stem = documents(240), tmp_path_factory.mktemp("data") / "c4"
    for number, size in enumerate([100, 7, 70, 63]):
        taken, texts = texts[:size], texts[size:]
        records = [{"text": text, "url": f"u{number}"} for text in taken]
        write_documents(stem, records, f"c4-train.{number:05d}-of-00004.json.gz")
    assert not texts
    validation = [{"text": f"({i})" * 9, "url": "u"} for i in range(40)]
    write_documents(stem, validation, "c4-validation.00000-of-00001.json.gz")
    return stem


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Many blocks to a shard, as in large data sets."""
    monkeypatch.setattr(packing, "_CHUNK_CHARS", 300)
    yield
    while _opened:
        _opened.pop().close()


# -- rows --------------------------------------------------------------------------------------


def test_every_epoch_has_the_rows_of_the_same_documents_packed_in_memory(folder):
    expected = packed(folder / "c4-train*").rows
    rows = stream(folder)
    assert isinstance(rows, SequentialRows) and len(expected) > 500
    for number in range(2):
        got = rows.batch(0, 0, number * len(expected), len(expected))
        np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.int32
    limited = stream(folder, num_sequences=70)
    np.testing.assert_array_equal(limited.batch(0, 0, 0, 210), np.concatenate([expected[:70]] * 3))


def test_copies_of_heldout_documents_are_not_trained_on(tmp_path):
    texts = documents(200)
    (held,) = np.flatnonzero(packing.is_heldout(0, 10, 0.1))
    copies = [n for n in range(20, 120) if n % 7 == 0]
    for n in copies:
        texts[n] = texts[held]
    path = write_documents(tmp_path, texts, "a.jsonl.gz")
    expected = packed(tmp_path)
    assert expected.num_also_heldout > 9
    rows = stream(path)
    for number in range(2):
        got = rows.batch(0, 0, number * len(expected.rows), len(expected.rows))
        np.testing.assert_array_equal(got, expected.rows)
    assert "left out as it is read" in plan_module.data_header(rows)


def test_files_by_glob_and_other_splits_are_read_too(folder):
    expected = packed(folder / "c4-val*").rows[:50]
    for rows in (stream(folder / "c4-val*"), stream(folder, split="validation")):
        np.testing.assert_array_equal(rows.batch(0, 0, 0, 50), expected)


def test_configurations_are_those_of_the_folders_card(tmp_path):
    for name in ("en", "de"):
        examples = [{"body": f"{name} {i} " * 5} for i in range(50)]
        write_documents(tmp_path / "set" / name, examples)
    card = "---\nconfigs:\n- config_name: en\n  data_files: en/*\n- config_name: de\n"
    (tmp_path / "set" / "README.md").write_text(card + "  data_files: de/*\n---\n")
    rows = stream(tmp_path / "set", name="de", text_column="body")
    assert "de 0 de 0" in rows.describe() and "data.name=de" in rows.describe()
    with pytest.raises(ConfigError, match="'en', 'de'"):
        stream(tmp_path / "set", text_column="body")


def test_each_call_gets_the_next_rows(folder):
    expected = packed(folder / "c4-train*").rows
    rows = stream(folder)
    asked = [(0, 0, 0, 5), (2, 1, 0, 7), (0, 0, 5, 1), (0, 1, 0, 40), (2, 1, 7, 3), (1, 0, 0, 0)]
    got = np.concatenate([rows.batch(*arguments) for arguments in asked])
    np.testing.assert_array_equal(got, expected[: len(got)])
    with pytest.raises(AssertionError, match="has read 6 rows"):
        rows.batch(0, 0, 5, 1)


def test_heldout_documents_are_those_of_a_corpus_and_are_never_trained_on(folder):
    corpus, rows = packed(folder / "c4-train*"), stream(folder)
    np.testing.assert_array_equal(rows.heldout_rows, corpus.heldout_rows[:20])
    seen = numbers_in(rows.batch(0, 0, 0, 2 * len(corpus.rows)))
    assert len(seen) > 150 and seen == numbers_in(corpus.rows)
    assert not seen & numbers_in(corpus.heldout_rows)
    assert numbers_in(stream(folder, num_heldout_rows=10**6).heldout_rows) == numbers_in(
        corpus.heldout_rows
    )
    assert rows.tokens_per_byte == pytest.approx(corpus.tokens_per_byte, rel=0.05)


# -- state -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts, num_sequences, total", [((17,), 190, 400), ((64, 1, 300, 0, 97), None, 1700)]
)
def test_a_state_continues_with_the_next_row(folder, counts, num_sequences, total):
    """Resumed after every call, by another process's object, over three shards and two epochs."""
    whole = stream(folder, num_sequences=num_sequences)
    expected = whole.batch(0, 0, 0, total)
    rows, num_read, turn = stream(folder, num_sequences=num_sequences), 0, 0
    while num_read < total:
        count = min(counts[turn % len(counts)], total - num_read)
        got = rows.batch(0, 0, num_read, count)
        np.testing.assert_array_equal(got, expected[num_read : num_read + count])
        num_read, turn = num_read + count, turn + 1
        state = json.dumps(rows.state())
        assert len(state) < 1500 and state == json.dumps(rows.state())
        rows.close()
        if turn % 8 == 0:  # opening takes longer than going back
            rows = stream(folder, num_sequences=num_sequences)
        rows.restore(json.loads(state))
        assert json.dumps(rows.state()) == state
    assert json.loads(state)["place"]["epoch"] >= 2


def test_a_state_of_another_version_of_datasets_gives_the_same_rows(folder):
    rows = stream(folder)
    rows.batch(0, 0, 0, 350)
    state = rows.state()
    expected = rows.batch(0, 0, 350, 300)
    strange = {"place": state["place"] | {"source": {"what": "?"}}, "datasets": "0.1"}
    rows.restore(state | strange)
    np.testing.assert_array_equal(rows.batch(0, 0, 350, 300), expected)
    rows.restore(rows.state())  # and from there by the library's own again
    assert rows.state()["place"]["source"]


def test_a_state_is_a_copy_and_none_restarts(folder):
    rows = stream(folder)
    first = rows.batch(1, 0, 0, 30)
    state = rows.state()
    second = rows.batch(1, 0, 30, 300)
    rows.restore(state)
    np.testing.assert_array_equal(rows.batch(1, 0, 30, 300), second)
    rows.restore(None)
    np.testing.assert_array_equal(rows.batch(1, 0, 0, 30), first)
    rows.close()
    np.testing.assert_array_equal(rows.batch(1, 0, 30, 300), second)  # also after close


def test_other_data_have_another_fingerprint_and_start_at_their_beginning(folder, tmp_path):
    rows = stream(folder)
    rows.batch(0, 0, 0, 30)
    state = rows.state()
    shutil.copytree(folder, tmp_path / "moved")
    assert stream(tmp_path / "moved").fingerprint == rows.fingerprint
    for changes in (dict(split="validation"), dict(text_column="url"), dict(sequence_length=5)):
        assert stream(folder, **changes).fingerprint != rows.fingerprint
    many, more = stream(folder, num_heldout_rows=40), stream(folder, num_heldout_rows=50)
    assert (len(many.heldout_rows), len(more.heldout_rows)) == (40, 50)
    assert many.fingerprint == more.fingerprint
    other_records = [{"text": "other", "url": "u"}]
    last = write_documents(tmp_path / "moved", other_records, "c4-train.00003-of-00004.json.gz")
    other = stream(tmp_path / "moved")
    assert other.fingerprint != rows.fingerprint
    changed = [a["name"] for a, b in zip(rows.shards, other.shards, strict=True) if a != b]
    assert changed == [last.name]
    other.restore(state)
    beginning = packed(tmp_path / "moved" / "c4-train*").rows
    np.testing.assert_array_equal(other.batch(0, 0, 30, 10), beginning[:10])


def test_a_streamed_run_accepts_another_number_of_evaluated_rows_only_explicitly(tmp_path):
    for data, is_free in (({}, True), ({"source": "hf", "path": "x"}, False)):
        config = default_config()
        config.data.update(data)
        workdir = tmp_path / str(is_free)
        workdir.mkdir()
        write_config(workdir, validate(config))
        config.eval.num_sequences = 128
        if not is_free:
            with pytest.raises(ConfigError, match="eval.num_sequences: was 64, is 128"):
                check_config(workdir, validate(config), accept=False)
        check_config(workdir, validate(config), accept=not is_free)


# -- runs --------------------------------------------------------------------------------------

# Accumulation from the third round on, a merge after it; over three epochs of 100 rows.
RUN = {
    "num_rounds": 5,
    "ensemble": {"num_trainers": 2, "num_workers": 3},
    "batching": {"test": "ramp", "ramp": ((0, 2), (2, 12))},
    "merge": {"every_rounds": 3},
    "eval": {"every_rounds": 2, "num_sequences": 8},
}


def run(workdir, rows, settings=None, **options):
    return fit(
        settings or settings_of(**RUN),
        workdir=workdir,
        corpus=rows,
        init_fn=lambda key: {"w": jnp.zeros((257, 257))},
        loss_fn=bigram_loss,
        **options,
    )


def at_read(rows, number, action):
    """The rows, with something done when rows are asked for the given time."""
    real, asked = rows.batch, []

    def batch(*arguments):
        asked.append(arguments)
        if len(asked) == number:
            action()
        return real(*arguments)

    rows.batch = batch
    return rows


def interrupt():
    signal.raise_signal(signal.SIGTERM)


def fail():
    raise OSError(5, "Input/output error")


def lines(workdir):
    return deterministic_lines(read(Path(workdir) / "ledger.jsonl"))


def events(workdir, name):
    return [e for e in read(Path(workdir) / "ledger.jsonl") if e["event"] == name]


def assert_same_end(first, second):
    assert first.controller == second.controller and first.loss == second.loss
    leaves = zip(jax.tree.leaves(first.ensemble), jax.tree.leaves(second.ensemble), strict=True)
    assert all(np.array_equal(one, other) for one, other in leaves)
    assert lines(first.workdir) == lines(second.workdir)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The run that is never interrupted."""
    rows = stream(folder, num_sequences=100)
    result = run(tmp_path_factory.mktemp("whole") / "r", rows)
    assert {e["event"] for e in lines(result.workdir)} == {"round", "eval", "merge"}
    assert max(e["num_accum_steps"] for e in events(result.workdir, "round")) > 1
    assert rows.state()["place"]["epoch"] >= 2
    return result


def test_a_run_stopped_twice_ends_as_the_uninterrupted_one(tmp_path, folder, whole):
    for number in (5, 3):
        with pytest.raises(Preempted):
            run(tmp_path / "r", at_read(stream(folder, num_sequences=100), number, interrupt))
    rows, threads = stream(folder, num_sequences=100), []
    at_read(rows, 2, lambda: threads.append(rows._ahead._thread))
    result = run(tmp_path / "r", rows)
    assert len(events(tmp_path / "r", "start")) == 3
    assert_same_end(result, whole)
    assert threads and not threads[0].is_alive()


def test_a_failed_round_is_run_again_on_the_same_rows(tmp_path, folder, whole):
    settings = settings_of(**RUN, checkpoint={"every_rounds": 1})
    rows = at_read(stream(folder, num_sequences=100), 8, fail)
    result = run(tmp_path / "r", rows, settings)
    starts = [e["round"] for e in events(tmp_path / "r", "start")]
    assert starts == [0, 2]  # it reads in round 3
    assert_same_end(result, whole)


def test_a_round_out_of_memory_is_run_again_on_the_same_rows(tmp_path, folder, monkeypatch):
    groups = {
        "num_rounds": 2,
        "ensemble": {"num_trainers": 2, "num_workers": 3},
        "inner": {"tx": "sgd", "learning_rate": 0.5, "weight_decay": 0.0},
        "batching": {"test": "constant", "initial_batch_size": 4, "max_batch_size": 4},
        "merge": {"policy": "none"},
        "switch": {"mode": "accumulate"},
    }
    real = LocalEngine._dispatch

    def dispatch(engine, state, batch):
        if state.control.max_batch_size == 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory (a fake)")
        return real(engine, state, batch)

    monkeypatch.setattr(LocalEngine, "_dispatch", dispatch)
    rows = stream(folder)
    run(tmp_path / "halved", rows, settings_of(**groups))
    assert [e["kind"] for e in events(tmp_path / "halved", "fault")] == ["out_of_memory"]
    assert len(events(tmp_path / "halved", "start")) == 1
    assert sum(rows.state()["num_read"].values()) == 2 * 3 * 3 * 4  # rounds, steps, workers, batch


def tiny_config(path, **data):
    config = default_config()
    config.model.update(width=8, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=8)
    config.data.update(source="hf", path=str(path), sequence_length=LENGTH, heldout_frac=0.1)
    config.data.update(data)
    config.ensemble.update(num_trainers=1, num_workers=1)
    config.inner.steps_per_round = 2
    config.batching.update(test="constant", max_batch_size=1)
    config.eval.num_sequences = 8
    config.num_rounds = 1
    return config


@pytest.mark.slow
def test_a_config_trains_from_a_folder(tmp_path, folder, capsys):
    result = train(tiny_config(folder), tmp_path / "r")
    header = capsys.readouterr().out
    assert "streamed from data.path=" in header and "<0><0>" in header
    assert (tmp_path / "r" / "export" / "model.safetensors").exists()
    assert np.isfinite(result.loss)


def test_a_plan_reads_no_data(monkeypatch):
    monkeypatch.setattr(hub, "open_stream", None)
    assert "parameters" in plan_module.plan(tiny_config("nobody/nothing"))


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        (dict(split="test"), ConfigError, "no such split, have train, validation"),
        (dict(name="en"), ConfigError, "data.name=en, .*Available: \\['default'\\]"),
        (dict(text_column="body"), DataError, r"no column 'body' \(data.text_column\), have text"),
        (dict(path="*.json.gz", name="en"), ConfigError, "files have no configurations"),
        (dict(path=__file__), DataError, r"reads .jsonl, .*use data.source=text"),
        (dict(sequence_length=5000), DataError, "too little held-out text: .* data.heldout_frac"),
    ],
)
def test_faults_are_one_line_with_the_remedy(folder, changes, kind, message):
    path = folder.parent / changes.pop("path") if "path" in changes else folder
    if path.name == "*.json.gz":
        path = folder / path.name
    with pytest.raises(kind, match=message) as caught:
        stream(path, **changes)
    assert "\n" not in str(caught.value) and type(caught.value) is kind


def test_without_a_network_a_hub_name_is_one_line_and_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    config = tiny_config("nobody/nothing-of-the-kind", name="en")
    with pytest.raises(ConfigError, match="no network.*give their folder") as caught:
        train(config, tmp_path / "r")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert not (tmp_path / "r").exists()


def test_documents_without_text_are_refused_by_number_or_left_out(tmp_path):
    good = [{"text": text, "n": 0} for text in documents(60)]
    damaged = [*good[:20], {"n": 1}, {"text": None, "n": 2}, *good[20:]]
    path = write_documents(tmp_path / "set", damaged, "train.jsonl.gz")
    with pytest.raises(DataError, match="split=train:21: 'text' must be a string, have NoneType"):
        stream(path.parent)
    with pytest.raises(DataError, match=r"split=train:22: .*\(data.max_bad_rows=1\)"):
        stream(path.parent, max_bad_rows=1, num_heldout_rows=10**6)
    expected = packed(write_documents(tmp_path, good)).rows
    rows = stream(path.parent, max_bad_rows=2)
    got = rows.batch(0, 0, 0, 3 * len(expected))  # so many an epoch
    np.testing.assert_array_equal(got, np.concatenate([expected] * 3))


def test_a_bad_row_counts_once_however_often_one_resumes(tmp_path):
    good, bad = documents(60), {"text": None}
    write_documents(tmp_path, [*good[:20], bad, *good[20:40], bad, *good[40:]])
    rows = stream(tmp_path, max_bad_rows=1, num_heldout_rows=2)
    with pytest.raises(DataError, match="split=train:42"):
        for number in range(0, 1000, 9):
            rows.batch(0, 0, number, 9)
            rows.restore(rows.state())


def test_damage_is_raised_at_every_call(tmp_path):
    write_documents(tmp_path, documents(100), "train-00000-of-00002.jsonl.gz")
    (tmp_path / "train-00001-of-00002.jsonl.gz").write_bytes(b"not gzip")
    rows = stream(tmp_path)
    with pytest.raises(DataError, match="damaged .Not a gzipped file") as caught:
        rows.batch(0, 0, 0, 5000)
    assert not isinstance(caught.value, OSError)  # trying again would not help
    with pytest.raises(DataError, match="damaged .Not a gzipped file"):
        rows.batch(0, 0, 0, 5000)


def test_a_lost_connection_may_be_tried_again():
    class Lost:
        def __iter__(self):
            yield {"text": "one"}
            raise ConnectionError("Server Disconnected")

    with pytest.raises(hub.Unreachable, match="Server Disconnected.*again") as caught:
        list(hub.texts(Lost(), "data.path=x", "text"))
    assert isinstance(caught.value, OSError) and caught.value.exit_code == 3


def test_text_that_makes_no_row_is_an_error_not_an_endless_search(tmp_path):
    texts = ["held out, and long enough for two rows", "a"] * 3
    write_documents(tmp_path, texts)
    rows = stream(tmp_path, heldout_frac=0.5)
    with pytest.raises(DataError, match="not one row of 9 tokens"):
        rows.batch(0, 0, 0, 1)
    write_documents(tmp_path, [""] * 3)
    with pytest.raises(DataError, match="no text in it"):
        stream(tmp_path)


def test_ids_outside_of_the_vocabulary_are_refused(folder):
    rows = stream(folder)
    strange = dataclasses.replace(rows.tokenizer, vocab_size=100)
    rows.reader = dataclasses.replace(rows.reader, tokenizer=strange)
    with pytest.raises(DataError, match="gives ids from .* to 256, need 0 to 99"):
        rows.batch(0, 0, 0, 1)


def test_a_state_beyond_the_data_is_refused(folder):
    rows = stream(folder)
    rows.batch(0, 0, 0, 1)
    rows.restore(rows.state() | {"offset": 1000})
    with pytest.raises(DataError, match="have changed since the checkpoint"):
        rows.batch(0, 0, 1, 1)
