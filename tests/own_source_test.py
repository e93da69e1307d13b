"""A data source from a user's config file, through the command line."""

from pathlib import Path

import pytest

from adloco_jax import DATA_SOURCES, main

EXAMPLE = Path(__file__).parents[1] / "examples" / "data_source.py"
# A model and rounds of the sizes of `toy.tiny_config`, for which other tests compile, too.
WORDS = """train own.py --workdir=run --config.model.width=16 --config.model.num_layers=1
    --config.model.num_heads=2 --config.model.num_kv_heads=1 --config.model.mlp_width=24
    --config.model.max_length=32 --config.ensemble.num_trainers=1 --config.ensemble.num_workers=1
    --config.data.sequence_length=16 --config.data.heldout_frac=0.1 --config.eval.num_sequences=8
    --config.inner.steps_per_round=2 --config.batching.test=constant
    --config.batching.max_batch_size=1""".split()


@pytest.mark.usefixtures("one_device")
def test_a_data_source_of_a_config_file_trains_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DATA_SOURCES, "diary", None)  # removes the example's entry afterwards
    Path("own.py").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    Path("diaries").mkdir()
    for name in "ab":
        lines = "".join(f'{n},"entry {name} {n}, quoted"\n' for n in range(40))
        Path(f"diaries/{name}.csv").write_text(lines, encoding="utf-8")

    assert main.main([*WORDS, "--config.num_rounds=1"]) == 0
    assert "72 documents to train on, 8 held out" in capsys.readouterr().out
    with open("diaries/b.csv", "a", encoding="utf-8") as file:
        file.write("40,one more\n")
    assert main.main([*WORDS, "--config.num_rounds=2"]) == 3
    assert "b.csv: edited" in capsys.readouterr().err
