"""The card of an export, its shards, and its way to the Hugging Face hub."""

import fnmatch
import json
import re
import shutil
import types
import xml.etree.ElementTree as xml

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from ledgers import round_line, start_line
from toy import tiny_config
from trees import assert_equal

from adloco_jax import main as cli
from adloco_jax.models import hf
from adloco_jax.run.ledger import Ledger
from adloco_jax.study import card
from adloco_jax.study.benchmarks import Score
from adloco_jax.training import train

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny_config(num_rounds=2, checkpoint={"every_rounds": 1})
    return train(config, tmp_path_factory.mktemp("trained") / "demo", command="adloco train x")


class Hub:
    """Stands in for `huggingface_hub.HfApi`: repositories are folders, and calls may fail."""

    endpoint = "https://hub"

    def __init__(self, root, fault=None):
        self.root, self.fault = root, fault

    def create_repo(self, name, *, private, exist_ok):
        if self.fault:
            raise self.fault
        folder = self.root / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "private").touch() if private else None

    def model_info(self, name, **_):
        return types.SimpleNamespace(private=(self.root / name / "private").exists())

    def upload_folder(self, *, repo_id, folder_path, delete_patterns, **_):
        for file in (self.root / repo_id).iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in delete_patterns):
                file.unlink()
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that accepts uploads."""
    made = Hub(tmp_path / "hub")
    made.root.mkdir()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    return made


def export(run, *words):
    return cli.main(["export", str(run), *map(str, words)])


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- The card ---------------------------------------------------------------------------------


def test_every_export_of_a_run_says_how_it_was_trained(trained, tmp_path, capsys):
    folder = trained.workdir / "export"
    totals = json.loads((trained.workdir / "report" / "summary.json").read_text())
    found = ModelCard.load(folder / "README.md")
    assert (found.data.library_name, found.data.pipeline_tag) == ("transformers", "text-generation")
    assert found.data.license is None and found.data.base_model is None
    scores = {each.metric_type: each.metric_value for each in found.data.eval_results}
    assert scores == {name: totals[name] for name in ("loss", "perplexity", "bits_per_byte")}
    assert "| updates | 4 |" in found.text and "\n    adloco train x\n" in found.text
    assert xml.parse(folder / "loss.svg") and "](loss.svg)" in found.text

    assert export(trained.workdir, "--out", tmp_path / "first", "--round=1", "--trainer=0") == 0
    first = ModelCard.load(tmp_path / "first" / "README.md")
    lines = map(json.loads, (trained.workdir / "ledger.jsonl").read_text().splitlines())
    (loss,) = [e["loss"] for e in lines if e["event"] == "eval" and e["trainer"] == e["round"] - 1]
    assert first.data.eval_results[0].metric_value == loss and "| updates | 2 |" in first.text

    damaged = shutil.copytree(trained.workdir, tmp_path / "damaged")
    (damaged / "ledger.jsonl").write_text("{}\n")
    assert export(damaged, "--out", tmp_path / "model") == 0
    assert capsys.readouterr().err.startswith("the card was not written: ")
    assert_equal(hf.load(tmp_path / "model").params, trained.params)


def test_the_card_names_what_is_on_the_hub_and_nothing_local(tmp_path):
    data = {"source": "hf", "path": "allenai/c4", "name": "en"}
    folder = tmp_path / "out"
    for init_from, base in (("a/base", "a/base"), ("hf://a/b", "a/b"), (str(tmp_path), None)):
        more = {"data": data, "model": {"vocab_size": 257, "init_from": init_from}}
        run = tmp_path / str(base)
        run.mkdir(parents=True)
        with Ledger(run / "ledger.jsonl") as ledger:
            ledger.write(**start_line(config=more))
            ledger.write(**round_line(1))
        card.write(folder, run)
        found = ModelCard.load(folder / "README.md")
        assert (found.data.base_model, found.data.datasets) == (base, ["allenai/c4"])
        assert found.data.language == "en" and str(tmp_path) not in str(found)


def test_scores_join_the_metadata_and_the_users_text_stays(trained, tmp_path):
    folder = shutil.copytree(trained.workdir / "export", tmp_path / "copy")
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("\n---\n", "\nlicense: mit\n---\nMine.\n", 1))
    for value in (0.25, 0.5):
        card.add_scores(folder, [Score("arc", "acc", value, None)])
    found = ModelCard.load(folder / "README.md")
    assert found.data.license == "mit" and found.text.startswith("Mine.\n# demo")
    (arc,) = [each for each in found.data.eval_results if each.dataset_type == "arc"]
    assert (arc.metric_type, arc.metric_value) == ("acc", 0.5)
    assert len(found.data.eval_results) == 4


# --- Shards -----------------------------------------------------------------------------------


def test_a_model_in_shards_is_the_same_model(trained, tmp_path):
    folder = tmp_path / "shards"
    assert export(trained.workdir, "--out", folder, "--shard-size=10KB") == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values()))
    assert shards[-1] == f"model-{len(shards):05}-of-{len(shards):05}.safetensors"
    assert len(shards) == 3 and index["metadata"]["total_size"] == 40_768
    assert_equal(hf.load(folder).params, trained.params)


# --- To the hub -------------------------------------------------------------------------------


def test_the_runs_export_is_pushed_with_the_users_changes(trained, tmp_path, hub, capsys):
    run = shutil.copytree(trained.workdir, tmp_path / "run")
    path = run / "export" / "README.md"
    path.write_text(path.read_text().replace("\n---\n", "\nlicense: mit\n---\n", 1))
    scores = {"results": {"arc": {"acc,none": 0.5}}, "n-shot": {}, "n-samples": {}}
    (run / "benchmarks_1.json").write_text(json.dumps(scores))
    assert export(run, "--push=me/model") == 0
    assert "/me/model\n" in capsys.readouterr().out
    assert files(hub.root / "me" / "model") == files(run / "export")
    assert b"license: mit" in files(run / "export")["README.md"]
    assert b"type: arc" in files(run / "export")["README.md"]
    assert export(run, "--push=me/model", "--dtype=bfloat16", "--shard-size=10KB") == 0
    assert files(hub.root / "me" / "model") == files(run / "export")
    assert not re.search(b"license: mit|type: arc", files(run / "export")["README.md"])
    assert hf.load(run / "export").stored_as == ("bfloat16",)


def test_a_private_repository_is_private_or_nothing_is_pushed(trained, hub, capsys):
    assert export(trained.workdir, "--push=me/secret", "--private") == 0
    assert (hub.root / "me" / "secret" / "private").exists()
    (hub.root / "me" / "open").mkdir()
    capsys.readouterr()
    assert export(trained.workdir, "--push=me/open", "--private") == 2
    assert "me/open: exists and is public" in capsys.readouterr().err
    assert files(hub.root / "me" / "open") == {}


class HTTPError(Exception):
    response = types.SimpleNamespace(status_code=401)


@pytest.mark.parametrize(
    "words, code, raised, fault",
    [
        (["--push=me/model"], 2, HTTPError(), "no access"),
        (["--push=me/model"], 5, ConnectionError(), "does not answer"),
        (["--push=model"], 2, None, "model: expected for instance me/my-model"),
        (["--private"], 2, None, "--private: needs --push OWNER/NAME"),
        (["--shard-size=5"], 2, None, "5: expected for instance 500MB"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(
    words, code, raised, fault, trained, tmp_path, hub, capsys
):
    hub.fault = raised
    assert export(trained.workdir, *words, "--out", tmp_path / "out") == code
    line = capsys.readouterr().err
    assert fault in line and line.count("\n") == 1
    assert not (tmp_path / "out").exists() and not any(hub.root.iterdir())
