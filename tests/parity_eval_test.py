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

from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.engine.spec import here
from adloco_jax.models import hf
from adloco_jax.models.configured import build_model
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


def choices(trained):
    """Questions with a labelled choice each, and the share that the model's choices get right."""
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
    return docs, right / 12


def windows(trained):
    """Texts of at most the model's length, and the run's own loss on them in bits per byte."""
    own = read_trained(trained.workdir, here())
    length = own.settings.model.max_length - 1
    texts = [f"for number in range({n}): print(number)"[:length] for n in range(6)]
    _, loss_fn = build_model(own.settings.model)
    ids = own.tokenizer.encode_batch(texts)
    rows = [np.concatenate([[own.tokenizer.eot_id], each]).astype(np.int32) for each in ids]
    params = jax.tree.map(jnp.asarray, own.params)
    nats = sum(float(loss_fn(params, jnp.asarray(row[None]))) * (len(row) - 1) for row in rows)
    expected = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    return [{"text": text} for text in texts], expected


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run, its scores by the line of the guide on evaluation, and what they should be."""
    trained = train(tiny_config(num_rounds=3), tmp_path_factory.mktemp("trained") / "run")
    page = (Path(__file__).parents[1] / "docs/guides/after.md").read_text("utf-8")
    (line,) = re.findall(r"^lm_eval (?:.*\\\n)*.+$", page, re.M)
    folder, expected = tmp_path_factory.mktemp("tasks"), {}
    cases = {"colours": (CHOICES, choices), "windows": (ROLLING, windows)}
    for name, (card, make) in cases.items():
        docs, expected[name] = make(trained)
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / f"{name}.yaml").write_text(card.format(path=data))
    (folder / "runs").mkdir()
    (folder / "runs/demo").symlink_to(trained.workdir)
    # Each start of the harness reads the thousands of tasks that it ships.
    line = line.replace("\\\n", " ").replace("colours.yaml", "colours.yaml,windows.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", shlex.split(line))
        patch.setenv("HF_HUB_OFFLINE", "1")
        harness.cli_evaluate()
    return (
        trained.workdir,
        {score.task: score for score in benchmarks.read(trained.workdir)},
        expected,
    )


def test_choices_are_those_of_the_models_own_probabilities(scored):
    workdir, scores, expected = scored
    found = scores["tiny_choice"]
    assert found.value == pytest.approx(expected["colours"])
    assert found.metric == "acc"
    assert "tiny_choice" in write([workdir], workdir / "report").read_text()


def test_bits_per_byte_are_the_runs_own_loss_on_the_same_windows(scored):
    _, scores, expected = scored
    assert scores["tiny_rolling"].value == pytest.approx(expected["windows"], abs=1e-3)
