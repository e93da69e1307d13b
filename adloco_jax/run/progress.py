"""Terminal output of a run: a progress bar on a terminal, plain lines elsewhere."""

import sys
import time
import warnings
from collections.abc import Mapping
from typing import TextIO

from tqdm import TqdmWarning

with warnings.catch_warnings():  # without ipywidgets a notebook gets the text bar, not a warning
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


class Progress:
    """A bar over rounds on a terminal or in a notebook; elsewhere one plain line per round."""

    def __init__(self, num_rounds: int | None, *, every: int = 1, file: TextIO | None = None):
        """Starts the clock, and draws the bar if there is one.

        Args:
          num_rounds: Rounds of the whole run; None where tokens end it.
          every: Rounds between two plain lines; the last round always has one.
          file: Where to write; None is standard output.
        """
        self._file = sys.stdout if file is None else file
        self._num_rounds = num_rounds
        self._every = every
        self._start_s = time.perf_counter()
        self._bar = None
        # A Jupyter kernel's output is no terminal, yet shows bars; this is how tqdm.auto decides.
        in_notebook = self._file is sys.stdout and "ipykernel.zmqshell" in sys.modules
        if self._file.isatty() or in_notebook:
            self._bar = tqdm(total=num_rounds, unit="round", file=self._file, dynamic_ncols=True)

    def note(self, line: str) -> None:
        """Writes a line of its own, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._file)
        else:
            print(line, file=self._file, flush=True)

    def round(self, index: int, fields: Mapping[str, object], *, share_done: float) -> None:
        """Shows a finished round.

        Args:
          index: The round's number, from 1.
          fields: What to show beside it, in order: numbers, strings, None, or lists of numbers.
          share_done: Fraction of the whole run that is done.
        """
        shown = " ".join(f"{name} {_format(value)}" for name, value in fields.items())
        if self._num_rounds is None:
            shown = f"done {share_done:.0%} {shown}"
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(index - self._bar.n)
        elif index % self._every == 0 or share_done >= 1:
            elapsed_s = time.perf_counter() - self._start_s
            eta_s = elapsed_s * max(0.0, 1 / share_done - 1)
            of = "" if self._num_rounds is None else f"/{self._num_rounds}"
            self.note(f"round {index}{of} {shown} eta_s {eta_s:.0f}")

    def close(self) -> None:
        """Leaves the bar on the terminal and ends its line."""
        if self._bar is not None:
            self._bar.close()


def _format(value: object) -> str:
    """A value without spaces, so that a line splits into keys and values."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return ",".join(_format(item) for item in value)
    return str(value)
