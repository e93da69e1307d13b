"""Lines on the terminal."""

import sys
from typing import TextIO

from tqdm import tqdm


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line at once, above a progress bar if one is shown; by default to stdout."""
    file = sys.stdout if file is None else file
    with tqdm.external_write_mode(file):
        print(line, file=file, flush=True)
