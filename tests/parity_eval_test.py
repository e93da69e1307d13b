"""Benchmarks by lm-evaluation-harness agree with the run's own model, tokenizer and loss."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_config

from adloco_jax import hf
from adloco_jax import main as cli
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.engine.spec import here
from adloco_jax.run.assemble import build_model
from adloco_jax.run.export import read_trained
from adloco_jax.study import benchmarks
from adloco_jax.training import train

pytest.importorskip("lm_eval", reason="not installed (the parity extra)")

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


def task(folder, name, card, docs):
    """The file of a task on these documents."""
    data, path = folder / f"{name}.jsonl", folder / f"{name}.yaml"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    path.write_text(card.format(path=data))
    return path


def test_choices_are_those_of_the_models_own_probabilities(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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
    path = task(tmp_path, "tiny_choice", CHOICES, docs)
    assert cli.main(["eval", str(trained.workdir), f"--tasks={path}"]) == 0
    assert "tiny_choice" in capsys.readouterr().out
    found = benchmarks.read(trained.workdir)["tiny_choice"]
    assert found["metrics"]["acc,none"] == pytest.approx(right / 12)
    assert (found["samples"], found["limit"]) == (12, None)
    assert "tiny_choice" in (trained.workdir / "report" / "index.html").read_text()


def test_bits_per_byte_are_the_runs_own_loss_on_the_same_windows(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = read_trained(trained.workdir, here())
    length = own.settings.model.max_length - 1
    texts = [f"for number in range({n}): print(number)"[:length] for n in range(6)]
    _, loss_fn = build_model(own.settings)
    ids = own.tokenizer.encode_batch(texts)
    rows = [np.concatenate([[own.tokenizer.eot_id], each]).astype(np.int32) for each in ids]
    params = jax.tree.map(jnp.asarray, own.params)
    nats = sum(float(loss_fn(params, jnp.asarray(row[None]))) * (len(row) - 1) for row in rows)
    expected = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    path = task(tmp_path, "tiny_rolling", ROLLING, [{"text": text} for text in texts])
    assert cli.main(["eval", str(trained.workdir), f"--tasks={path}"]) == 0
    found = benchmarks.read(trained.workdir)["tiny_rolling"]["metrics"]["bits_per_byte,none"]
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_task_that_is_not_there_is_one_line(trained, capsys):
    assert cli.main(["eval", str(trained.workdir), "--tasks=arc_eas"]) == 2
    line = capsys.readouterr().err
    assert "did you mean arc_easy?" in line and line.count("\n") == 1


def test_a_forged_export_runs_nothing(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, canary = (
        shutil.copytree(trained.workdir / "export", tmp_path / "m"),
        tmp_path / "canary",
    )
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    (folder / "pytorch_model.bin").write_bytes(
        b"cposix\nsystem\n(S'touch " + bytes(canary) + b"'\ntR."
    )
    forged = {"auto_map": {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | forged))
    path = task(tmp_path, "tiny_rolling", ROLLING, [{"text": "def f(): return"}])
    cli.main(["eval", str(folder), f"--tasks={path}"])
    assert not canary.exists()
