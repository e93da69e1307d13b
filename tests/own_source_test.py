"""A data source of the user's own config file, through the command line."""

import re
from pathlib import Path

import pytest

from adloco_jax import DATA_SOURCES, main
from adloco_jax.run.ledger import read

pytestmark = pytest.mark.usefixtures("one_device")

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
(SNIPPET,) = re.findall(
    r"```python\n((?:(?!```).)*DATA_SOURCES.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S
)


@pytest.fixture
def own_source(tmp_path, monkeypatch):
    """The page's own data source, and CSV files for it in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DATA_SOURCES, "csv", None)  # so that the snippet's entry goes afterwards
    Path("own.py").write_text(SNIPPET, encoding="utf-8")
    Path("reviews").mkdir()
    for name in "ab":
        lines = "".join(f'{n},"review {name} {n}, quoted"\n' for n in range(40))
        Path(f"reviews/{name}.csv").write_text("id,text\n" + lines, encoding="utf-8")


def test_a_data_source_of_a_config_file_trains_plans_and_resumes(own_source, capsys):
    assert sum(line.strip() != "" for line in SNIPPET.splitlines()) <= 20
    changes = """model.width=8 model.num_layers=1 model.num_heads=2 model.num_kv_heads=1
        model.mlp_width=8 data.sequence_length=8 data.heldout_frac=0.1 ensemble.num_trainers=1
        ensemble.num_workers=1 inner.steps_per_round=2 batching.test=constant
        batching.max_batch_size=1 eval.num_sequences=8"""
    words = [f"--config.{change}" for change in changes.split()]

    def run(*more):
        code = main.main(["--config=own.py", *words, *more])
        return code, capsys.readouterr()

    code, printed = run("--plan")
    assert code == 0 and "not checked: data.path = reviews/*.csv: what its files" in printed.out
    for num_rounds in (1, 2):
        code, printed = run("--workdir=run", f"--config.num_rounds={num_rounds}")
        assert code == 0 and "rows of 8 tokens to train on" in printed.out
    rounds = [e["round"] for e in read("run/ledger.jsonl") if e["event"] == "round"]
    assert rounds == [1, 2]
    with open("reviews/b.csv", "a", encoding="utf-8") as file:
        file.write("40,one more\n")
    code, printed = run("--workdir=run", "--config.num_rounds=3")
    assert code == 3 and "b.csv: edited" in printed.err
