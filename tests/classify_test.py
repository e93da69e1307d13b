"""Classification: labelled rows, held-out texts, scores by class, whole runs."""

import shutil
from pathlib import Path
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from texts import write_documents
from toy import data_settings, with_its_weights
from transformers import AutoTokenizer

from adloco_jax import __version__
from adloco_jax.config import default_config, validate
from adloco_jax.data import load_corpus
from adloco_jax.data.sampling import interleave, split_heldout
from adloco_jax.elastic.messages import RunDescription
from adloco_jax.engine import evaluate
from adloco_jax.engine.spec import this_machine
from adloco_jax.errors import DataError
from adloco_jax.models import hf
from adloco_jax.run import join
from adloco_jax.run.kept.export import read_trained
from adloco_jax.run.kept.ledger import read
from adloco_jax.study import summary
from adloco_jax.training import train

pytestmark = pytest.mark.usefixtures("one_device")


def write(path: Path, records) -> str:
    return str(write_documents(path.parent, records, path.name))


def reviews(count: int, seed: int = 0):
    """Reviews of ten random words, one of which determines the class."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        words = ["".join(rng.choice(list("abcde"), 3)) for _ in range(rng.integers(2, 9))]
        words[rng.integers(len(words))] = ("BAD", "GOOD")[number % 2]
        yield {"text": " ".join(words), "label": number % 2}


def load(path: str, **changes):
    options = dict(path=path, sequence_length=24, heldout_frac=0.25, num_streams=2)
    settings = data_settings(source="jsonl", **(options | changes))
    return load_corpus(settings, num_classes=settings.model.num_classes, note=lambda line: None)


# --- Rows -------------------------------------------------------------------------------------


def test_a_text_is_its_class_its_length_and_its_tokens(tmp_path):
    records = [{"text": f"{n:02}", "label": n % 2} for n in range(40)]
    records.append({"text": "x" * 50, "label": 1})
    data = load(write(tmp_path / "a.jsonl", records))
    short = data.rows[0]
    assert short[:6].tolist() == [0, 4, 256, ord("0"), ord("0"), 256] and not short[6:].any()
    (long,) = [row for row in np.concatenate([data.rows, data.heldout_rows]) if row[1] > 4]
    assert long.tolist() == [1, 24, 256, *[ord("x")] * 22, 256]
    assert data.manifest.truncated == 1 and "1 of the texts cut" in data.describe()


def test_rows_are_as_wide_as_the_longest_text_needs(tmp_path):
    for longest, width in ((4, 6), (5, 8), (40, 24)):
        texts = ["x" * longest if n == 7 else chr(65 + n) for n in range(40)]
        records = [{"text": text, "label": n % 2} for n, text in enumerate(texts)]
        assert load(write(tmp_path / "a.jsonl", records)).rows.shape == (30, 2 + width)


def test_every_text_is_held_out_or_trained_on_class_by_class(tmp_path):
    records = [{"text": f"{n:03}", "label": int(n % 5 == 0)} for n in range(100)]
    data = load(write(tmp_path / "a.jsonl", records))
    tokens = [tuple(row[3:6]) for row in np.concatenate([data.rows, data.heldout_rows])]
    assert sorted(tokens) == sorted(tuple(record["text"].encode()) for record in records)
    assert np.bincount(data.heldout_rows[:, 0]).tolist() == [20, 5]


def test_a_text_that_is_held_out_too_is_not_trained_on_whatever_its_class(tmp_path):
    records = [{"text": f"{n:03}", "label": n % 2} for n in range(40)]
    held = load(write(tmp_path / "a.jsonl", records)).heldout_rows[0]
    text = bytes(held[3:6].tolist()).decode()
    copies = [{"text": text, "label": label} for label in (0, 1)]
    # The held-out positions among the first 40 do not change.
    data = load(write(tmp_path / "a.jsonl", [*records, *copies]))
    assert data.manifest.copies == 2 and len(data.rows) == 30
    assert not (data.rows[:, 1:] == held[1:]).all(axis=1).any()
    assert "held out; 2 copies of held-out ones left out" in data.describe()


def test_a_file_sorted_by_class_is_cut_at_random_and_each_stream_sees_its_rows_once(tmp_path):
    records = [{"text": f"{n:03}", "label": int(n >= 50)} for n in range(100)]
    path = write(tmp_path / "a.jsonl", records)
    data = load(path, num_sequences=40)
    assert len(data.rows) == 40 and 10 < np.bincount(data.rows[:, 0])[0] < 30
    seen = [tuple(row) for stream in (0, 1) for row in data.batch(1, stream, 0, 20)]
    assert sorted(seen) == sorted(map(tuple, data.rows))
    # Which texts are held out does not depend on the seed.
    np.testing.assert_array_equal(load(path, seed=7).heldout_rows, data.heldout_rows)


@pytest.mark.parametrize("counts", [(270, 30), (150, 100, 50), (5, 1)])
def test_every_heldout_row_is_reported_on_or_judges_in_the_proportions_of_all(counts):
    total, num_classes = sum(counts), len(counts)
    labels = np.repeat(np.arange(num_classes), counts)
    rows = np.stack([labels, np.arange(total)], axis=1)
    for limit in (10**6, total // 3):
        how = {"num_classes": num_classes, "num_trainers": 2}
        heldout = split_heldout(rows, num_sequences=limit, batch_size=4, **how)
        num_guard = min(32, total // 2)
        assert len(heldout.guard_rows) == num_guard
        assert len(heldout.report_rows) == min(limit, total - num_guard)
        assert not {*heldout.guard_rows[:, 1]} & {*heldout.report_rows[:, 1]}
        for part in (heldout.guard_rows, heldout.report_rows):
            found = np.bincount(part[:, 0], minlength=num_classes)
            assert np.abs(found - len(part) * np.array(counts) / total).max() <= 1.5
        by_class = ", ".join(
            map(str, np.bincount(heldout.report_rows[:, 0], minlength=num_classes))
        )
        line = heldout.describe(num_classes)
        assert line.startswith(
            f"held out: losses are of {len(heldout.report_rows)} rows ({by_class}"
        )
        assert f"; {num_guard} others (" in line
    order = interleave(labels)
    np.testing.assert_array_equal(np.sort(order), np.arange(total))


def test_a_bad_label_is_refused_by_line(tmp_path):
    for record, expected in (
        ({"text": "x", "label": 2}, "have 2 for 'x', need a class from 0 to 1"),
        ({"text": "x", "label": "0"}, "have '0' for 'x', need a class"),
        ({"text": "x", "label": True}, "have True"),
        ({"text": "x"}, "no field 'label'"),
        ({"text": "", "label": 1}, "'label': have 1 for '', need a class"),
    ):
        path = write(tmp_path / "a.jsonl", [*reviews(40), record, *reviews(4)])
        with pytest.raises(DataError) as caught:
            load(path)
        assert f"{path}:41" in str(caught.value) and expected in str(caught.value)


def test_too_little_of_a_class_is_said(tmp_path):
    with pytest.raises(DataError, match="have 30, 0 texts of classes 0 to 1, need some of each"):
        load(write(tmp_path / "a.jsonl", ({"text": f"{n}", "label": 0} for n in range(40))))
    rare = [{"text": f"{n}", "label": int(n == 7)} for n in range(40)]
    with pytest.raises(DataError, match="have 10, 0 texts of classes"):
        load(write(tmp_path / "b.jsonl", rare))


# --- Scores -----------------------------------------------------------------------------------


def test_scores_by_class_against_counts_by_hand():
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    predicted = np.array([0, 1, 0, 1, 0, 2, 2, 1])
    rows = np.stack([labels, predicted], axis=1)
    programs = MagicMock()  # by which the second column is the likeliest class
    programs.__getitem__.return_value.input_shardings = ([{}], {})
    programs.call = lambda _, params, rows: np.where(rows[:, 0] == rows[:, 1], 0.1, 2.0)
    scores = evaluate.class_report(programs, {}, rows, 4, 4)
    assert scores["accuracy"] == 5 / 8
    zero, one, two, three = scores["classes"]
    assert (zero["precision"], zero["recall"], zero["support"]) == (2 / 3, 2 / 3, 3)
    assert (one["precision"], one["recall"], one["f1"]) == (1 / 3, 1 / 2, 0.4)
    assert (two["precision"], two["recall"], two["f1"]) == (1.0, 2 / 3, 0.8)
    assert three == {"precision": None, "recall": None, "f1": None, "support": 0}


# --- Runs -------------------------------------------------------------------------------------


def bert_config(path: str):
    config = default_config()
    config.model.update(
        dict(arch="bert", width=16, num_layers=1, num_heads=2, mlp_width=32, max_length=64)
    )
    config.model.norm_eps = 1e-12
    config.data.update(dict(source="jsonl", path=path, sequence_length=64, heldout_frac=0.2))
    config.ensemble.num_trainers, config.ensemble.num_workers = 1, 2
    config.inner.learning_rate = 5e-3
    config.inner.weight_decay = 0.0
    config.outer.update(dict(tx="sgd", learning_rate=1.0))
    config.batching.update(dict(initial_batch_size=8, max_batch_size=8))
    return config


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """A run that learns which word determines the class."""
    folder = tmp_path_factory.mktemp("classified")
    config = bert_config(write(folder / "reviews.jsonl", reviews(600)))
    config.num_rounds, config.inner.steps_per_round = 3, 40
    config.batching.test = "constant"
    config.eval.num_sequences = 60
    return train(config, folder / "r")


def test_a_run_learns_to_tell_classes_apart(classified):
    evals = [e for e in read(classified.workdir / "ledger.jsonl") if e["event"] == "eval"]
    assert evals[-1]["accuracy"] > 0.95 and "perplexity" not in evals[-1]
    assert evals[-1]["loss"] < 0.3 < 0.6 < evals[0]["loss"]
    assert [scores["support"] for scores in evals[-1]["classes"]] == [30, 30]
    rounds = [e for e in read(classified.workdir / "ledger.jsonl") if e["event"] == "round"]
    assert rounds[0]["tokens"] == 2 * 40 * 8 * 48  # two workers; padding to the longest text
    table = summary.closing_table(classified.workdir)
    assert "nats/example" in table and "accuracy" in table and "class 1 " in table
    assert "perplexity" not in table


def test_a_machine_that_joins_compiles_for_rows_of_the_longest_text(tmp_path):
    settings = validate(bert_config(write(tmp_path / "reviews.jsonl", reviews(60))))
    corpus = load_corpus(settings, num_classes=2)
    about = {"id": "r", "adloco_jax": __version__, "commit": "", "fingerprint": corpus.fingerprint}
    run = RunDescription(**about, settings=settings.model_dump(mode="json"))
    given = join.learner_setup(Mock(), run, {}, accepts=False, parts=None)
    assert given.spec.row.shape[0] == corpus.heldout_rows.shape[1] < 64


def test_its_export_is_a_bert_that_reads_a_text_as_it_was_trained(classified):
    loaded = hf.load(classified.workdir / "export")
    exported = AutoTokenizer.from_pretrained(classified.workdir / "export")
    assert exported("good").input_ids == [256, *b"good", 256]
    assert len(exported("x" * 99, truncation=True).input_ids) == exported.model_max_length == 64
    assert exported(["a", "bc"], padding=True).attention_mask == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert type(loaded.network).__name__ == "Bert" and loaded.network.num_classes == 2
    trained = read_trained(classified.workdir, this_machine())
    np.testing.assert_array_equal(
        trained.params["classifier"]["kernel"], loaded.params["classifier"]["kernel"]
    )


def test_another_run_starts_from_it_without_its_classifier(classified, tmp_path):
    folder = shutil.copytree(classified.workdir / "export", tmp_path / "encoder")
    tensors = load_file(folder / "model.safetensors")
    del tensors["classifier.weight"], tensors["classifier.bias"]
    tensors["cls.predictions.bias"] = np.ones(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = bert_config("reviews.jsonl")
    config.model.init_from, config.model.num_classes = str(folder), 3
    model, lines = with_its_weights(validate(config))
    params = model.params
    head = np.asarray(params["classifier"]["kernel"])
    assert head.shape == (16, 3) and abs(head.std() - 0.02) < 5e-3
    assert "has no classifier; a random one" in lines[0]
    assert "left out: cls.predictions.bias" in lines[1]
    np.testing.assert_array_equal(
        params["embed"]["embedding"], classified.params["embed"]["embedding"]
    )
