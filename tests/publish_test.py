"""The card of an export, and its shards."""

import json
import re
import shutil

import pytest
from huggingface_hub import ModelCard
from ledgers import round_line, start_line
from toy import tiny_config
from trees import assert_equal

from adloco_jax import main as cli
from adloco_jax.cli.names import find_config, load_config
from adloco_jax.models import hf
from adloco_jax.run.kept.ledger import Ledger
from adloco_jax.study import card
from adloco_jax.training import train

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny_config(num_rounds=2, checkpoint={"every_rounds": 1})
    return train(config, tmp_path_factory.mktemp("trained") / "demo", command="adloco train x")


def export(run, *words):
    return cli.main(["export", str(run), *map(str, words)])


# --- The card ---------------------------------------------------------------------------------


def test_every_export_of_a_run_says_in_fifteen_lines_how_it_was_trained(trained, tmp_path, capsys):
    folder = trained.workdir / "export"
    totals = json.loads((trained.workdir / "report" / "summary.json").read_text())
    found = ModelCard.load(folder / "README.md")
    assert (found.data.library_name, found.data.pipeline_tag) == ("transformers", "text-generation")
    assert found.data.license is None and found.data.base_model is None
    assert f"- held-out loss: {totals['loss']:.4f} nats/token" in found.text
    assert (
        "- trained for: 4 updates, " in found.text and "\n- command: adloco train x\n" in found.text
    )
    lines = (folder / "README.md").read_text().splitlines()
    assert sum(bool(line) for line in lines) <= 15

    assert export(trained.workdir, "--out", tmp_path / "first", "--round=1", "--trainer=0") == 0
    first = ModelCard.load(tmp_path / "first" / "README.md")
    lines = map(json.loads, (trained.workdir / "ledger.jsonl").read_text().splitlines())
    (loss,) = [e["loss"] for e in lines if e["event"] == "eval" and e["trainer"] == e["round"] - 1]
    assert re.search(rf"- held-out loss: {loss:.4f} nats.*, trainer 0 after round 1", first.text)
    assert " 2 updates, " in first.text

    damaged = shutil.copytree(trained.workdir, tmp_path / "damaged")
    (damaged / "ledger.jsonl").write_text("{}\n")
    assert export(damaged, "--out", tmp_path / "model") == 0
    assert capsys.readouterr().err.startswith("the card was not written: ")
    assert_equal(hf.load(tmp_path / "model").params, trained.params)


def carded(folder, run, **start):
    """Write the card of a run of one round; return it."""
    run.mkdir(parents=True)
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.write(**start_line(**start))
        ledger.write(**round_line(1))
    card.write(folder, run)
    return ModelCard.load(folder / "README.md")


def test_the_card_names_what_is_on_the_hub_and_nothing_local(tmp_path):
    data = {"source": "hf", "path": "allenai/c4", "name": "en"}
    for init_from, base in (("a/base", "a/base"), ("hf://a/b", "a/b"), (str(tmp_path), None)):
        more = {"data": data, "model": {"vocab_size": 257, "init_from": init_from}}
        found = carded(tmp_path / "out", tmp_path / str(base), config=more)
        assert (found.data.base_model, found.data.datasets) == (base, ["allenai/c4"])
        assert str(tmp_path) not in str(found)


def test_the_card_names_what_the_caller_of_fit_gave(tmp_path):
    own = ["model", "rows", "inner_tx"]
    text = carded(tmp_path / "out", tmp_path / "run", own=own).text
    assert "\n- data: own rows\n" in text and "\n- starts from: own weights; " in text
    assert "updates (own optimizer), outer nesterov 0.7" in text and "adamw" not in text
    assert "(adamw 0.001), outer own optimizer" in card.method(start_line()["config"], ["outer_tx"])


ONE_WORKER = {"ensemble.num_workers": 1}


@pytest.mark.parametrize(
    ("name", "changes", "method"),
    [
        ("quickstart", {}, "AdLoCo (arXiv 2508.18182), 3 trainers, 3 workers; "),
        (
            "diloco",
            {"ensemble.num_workers": 3},
            "DiLoCo (arXiv 2311.08105), 3 workers; rounds of 30 updates (muon 0.006)",
        ),
        ("finetune", ONE_WORKER, "one worker; rounds of 50 updates (adamw 0.0002)"),
        ("finetune", {}, "DiLoCo (arXiv 2311.08105), 4 workers; "),
        ("growing_pool", {}, "a growing pool of up to 4 workers; "),
        ("streaming_diloco", {}, "Streaming DiLoCo (arXiv 2501.18512), "),
        ("local_sgd", {}, "local SGD, "),
        ("data_parallel", {}, "data parallelism, "),
    ],
)
def test_the_card_names_the_method_that_ran(name, changes, method):
    config = load_config(find_config(name))
    config.update_from_flattened_dict(changes)
    assert card.method(config.to_dict(), []).startswith(method)


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


def test_a_shards_size_that_is_none_is_refused(trained, tmp_path, capsys):
    assert export(trained.workdir, "--shard-size=5", "--out", tmp_path / "out") == 2
    assert "5: expected for instance 500MB" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
