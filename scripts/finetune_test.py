"""scripts/finetune.py: the table on the page is that of the records."""

import json

import finetune


def test_the_page_has_the_table_of_the_records():
    lines = [json.loads(line) for line in finetune.RECORDS.read_text().splitlines()]
    page = finetune.links.ROOT / "docs" / "RESULTS.md"
    assert finetune.table(lines) in page.read_text(encoding="utf-8")
