"""Lines on the terminal."""

import re
import sys
from typing import TextIO

from tqdm import tqdm

# Characters with which words of others could move the cursor, recolour or retitle a terminal, begin
# another line, or show its letters in another order.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line at once, above a progress bar if one is shown; by default to stdout.

    Control characters become "?", because a line may have words of other machines, such as errors.
    """
    file = sys.stdout if file is None else file
    with tqdm.external_write_mode(file):
        print(_CONTROL.sub("?", line), file=file, flush=True)
