"""Benchmarks by lm-evaluation-harness agree with the run's own model, tokenizer and loss."""

import json
import math
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_config

from adloco_jax import hf
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.engine.spec import here
from adloco_jax.run.assemble import build_model
from adloco_jax.run.export import read_trained
from adloco_jax.study import benchmarks
from adloco_jax.study.report import write
from adloco_jax.training import train

harness = pytest.importorskip("lm_eval.__main__", reason="not installed (the parity extra)")

pytestmark = [
    pytest.mark.usefixtures("one_device"),
    # Libraries that the harness imports are not ours.
    pytest.mark.filterwarnings("ignore"),
]

CHOICES = """task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
ROLLING = """task: tiny_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tiny_config(num_rounds=3), tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def score(trained, tmp_path, monkeypatch):
    """The score of the run on these documents by a task, by the line of the guide on evaluation."""
    page = (Path(__file__).parents[1] / "docs/guides/after.md").read_text("utf-8")
    (line,) = re.findall("^lm_eval .+$", page, re.M)

    def score(card, docs):
        data = tmp_path / "colours.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (tmp_path / "colours.yaml").write_text(card.format(path=data))
        harness.cli_evaluate()
        (found,) = benchmarks.read(trained.workdir)
        return found

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo").symlink_to(trained.workdir)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", shlex.split(line))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield score
    for path in trained.workdir.glob(benchmarks.FILES):
        path.unlink()


def test_choices_are_those_of_the_models_own_probabilities(trained, score):
    network, params, *_ = hf.load(trained.workdir / "export")
    params = jax.tree.map(jnp.asarray, params)
    tokenizer = load_tokenizer(str(trained.workdir / "export"))

    def log_likelihood(question, choice):
        (asked,), (whole,) = (
            tokenizer.encode_batch([text]) for text in (question, question + choice)
        )
        logits = network.apply({"params": params}, jnp.asarray(whole[None, :-1]))
        scores = np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64)[0]
        return sum(scores[i - 1, whole[i]] for i in range(len(asked), len(whole)))

    docs, right = [], 0
    for number in range(12):
        question, choices = f"def f{number}(x):", [" return", " zq", "\n    x"]
        best = int(np.argmax([log_likelihood(question, choice) for choice in choices]))
        docs.append({"question": question, "choices": choices, "label": number % 3})
        right += best == number % 3
    found = score(CHOICES, docs)
    assert found.value == pytest.approx(right / 12)
    assert (found.task, found.metric, found.examples) == ("tiny_choice", "acc", "12")
    assert "tiny_choice" in write([trained.workdir], trained.workdir / "report").read_text()


def test_bits_per_byte_are_the_runs_own_loss_on_the_same_windows(trained, score):
    own = read_trained(trained.workdir, here())
    length = own.settings.model.max_length - 1
    texts = [f"for number in range({n}): print(number)"[:length] for n in range(6)]
    _, loss_fn = build_model(own.settings)
    ids = own.tokenizer.encode_batch(texts)
    rows = [np.concatenate([[own.tokenizer.eot_id], each]).astype(np.int32) for each in ids]
    params = jax.tree.map(jnp.asarray, own.params)
    nats = sum(float(loss_fn(params, jnp.asarray(row[None]))) * (len(row) - 1) for row in rows)
    expected = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    found = score(ROLLING, [{"text": text} for text in texts])
    assert found.value == pytest.approx(expected, abs=1e-3)
