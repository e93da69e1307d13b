"""A data source from a user's config file, through the command line and `fit`."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from adloco_jax import DATA_SOURCES, main
from adloco_jax.cli.names import load_config
from adloco_jax.config import validate
from adloco_jax.data import load_corpus
from adloco_jax.models.configured import build_model
from adloco_jax.run.ledger import read
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")

EXAMPLE = Path(__file__).parents[1] / "examples" / "data_source.py"


@pytest.fixture
def own_source(tmp_path, monkeypatch):
    """The example of a data source, and files for it in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DATA_SOURCES, "diary", None)  # removes the example's entry afterwards
    Path("own.py").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    Path("diaries").mkdir()
    for name in "ab":
        lines = "".join(f'{n},"entry {name} {n}, quoted"\n' for n in range(40))
        Path(f"diaries/{name}.csv").write_text(lines, encoding="utf-8")


def test_a_data_source_of_a_config_file_trains_plans_and_resumes(own_source, capsys):
    one = {"num_trainers": 1, "num_workers": 1}
    sizes = {"width": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 8}
    changes = {"model": sizes, "ensemble": one, "data": {"sequence_length": 8, "heldout_frac": 0.1}}
    changes |= {"inner": {"steps_per_round": 2}, "eval": {"num_sequences": 8}}
    changes |= {"batching": {"test": "constant", "max_batch_size": 1}}
    words = [f"--config.{g}.{key}={value}" for g in changes for key, value in changes[g].items()]

    def run_main(command, *more):
        return main.main([command, "own.py", *words, *more]), capsys.readouterr()

    code, printed = run_main("plan")
    assert code == 0 and "data.path=diaries/*.csv: its content after the first" in printed.out
    config = load_config(Path("own.py"), "get_config", ConfigDict)
    config.update(changes | {"num_rounds": 1})
    settings = validate(config)
    own = load_corpus(settings)
    assert [shard["rows"] for shard in own.shards] == [40, 40] and own.manifest.documents[1] == 8
    init_fn, loss_fn = build_model(settings.model)
    fit(settings, workdir="resumed", corpus=own, init_fn=init_fn, loss_fn=loss_fn)
    code, printed = run_main("train", "--workdir=resumed", "--config.num_rounds=2")
    assert code == 0 and " of 8 tokens to train on, " in printed.out
    rounds = [e["round"] for e in read("resumed/ledger.jsonl") if e["event"] == "round"]
    assert rounds == [1, 2]
    with open("diaries/b.csv", "a", encoding="utf-8") as file:
        file.write("40,one more\n")
    code, printed = run_main("train", "--workdir=resumed", "--config.num_rounds=3")
    assert code == 3 and "b.csv: edited" in printed.err
