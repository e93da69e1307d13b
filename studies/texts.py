"""Make the text "debian": an English dictionary and the documentation of Linux, 64 MB.

    apt-get download dict-gcide=0.48.5+nmu2 linux-doc-6.1=6.1.176-1
    python -m studies.texts runs

Debian's archive of snapshots keeps these versions when its mirrors have newer ones. The packages
are unpacked by dpkg-deb.
"""

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Each package, and its SHA-256.
PACKAGES = {
    "dict-gcide_0.48.5+nmu2_all.deb": (
        "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f"
    ),
    "linux-doc-6.1_6.1.176-1_all.deb": (
        "0d843674607703b9ef8c1db5e715c38ed52ff23574feabfe0d961d552126859f"
    ),
}


def documents(root: Path) -> Iterator[str]:
    """Return the entries of the dictionary, then the pages of Linux, from unpacked packages."""
    with gzip.open(
        root / "usr/share/dictd/gcide.dict.dz", "rt", encoding="utf-8", errors="replace"
    ) as file:
        yield from re.split(r"\n(?=\S)", file.read())  # other lines of an entry are indented
    for path in sorted((root / "usr/share/doc/linux-doc-6.1/Documentation").rglob("*.rst.gz")):
        yield gzip.decompress(path.read_bytes()).decode()


def main() -> None:
    """Check the packages of a folder, and write debian.jsonl there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the packages")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as unpacked:
        for name, expected in PACKAGES.items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                parser.error(f"{folder / name}: its SHA-256 is not {expected}")
            subprocess.run(["dpkg-deb", "-x", folder / name, unpacked], check=True)
        with open(folder / "debian.jsonl", "w", encoding="utf-8") as file:
            for text in documents(Path(unpacked)):
                file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
