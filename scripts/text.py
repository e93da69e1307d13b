"""Collect the text of Debian's documentation, as JSON lines, for runs without a network.

    python scripts/text.py PACKAGES texts.jsonl.gz

PACKAGES is a folder of unpacked packages; studies/GPU.md says which. A document is a page of the
kernel's documentation, or 100 entries of a dictionary.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

_ENTRIES = 100  # of a dictionary in a document


def documents(folder: Path) -> Iterator[str]:
    """The texts of the unpacked packages, in the order of their paths."""
    for path in sorted(folder.rglob("*.rst.gz")):
        yield gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    for path in sorted(folder.rglob("*.dict.dz")):  # gzip with an index of its own
        text = gzip.decompress(path.read_bytes())
        # a line of the index is a word, and where its entry begins, in base 64
        lines = path.with_name(f"{path.name.partition('.')[0]}.index").read_text("utf-8")
        starts = sorted({_number(line.split("\t")[1]) for line in lines.splitlines()})
        starts = [*starts[::_ENTRIES], len(text)]
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            yield text[start:end].decode("utf-8", "replace")


_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + _DIGITS.index(digit)
    return value


if __name__ == "__main__":
    with gzip.open(sys.argv[2], "wt", encoding="utf-8") as file:
        for text in documents(Path(sys.argv[1])):
            file.write(json.dumps({"text": text}) + "\n")
