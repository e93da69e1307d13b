"""Terminal output of a run: a line for each round and event, and a bar on a terminal."""

import collections
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from tqdm import TqdmWarning

with warnings.catch_warnings():  # without ipywidgets a notebook gets the text bar, not a warning
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

_MOST_LISTED = 4  # trainers whose batches are shown one by one


class Shown(NamedTuple):
    """What a round's line shows.

    Attributes:
      index: The round's number, from 1.
      loss: Mean training loss of its trainers; not finite if none has one.
      heldout: Newest held-out loss of the consensus; None if there is none yet.
      sizes: Of each trainer: sequences per update and worker, accumulation steps, workers.
      pool: Workers of the whole pool.
      tokens_per_s: Tokens of all trainers per second.
      share_done: Fraction of the whole run that is done; may exceed 1.
    """

    index: int
    loss: float
    heldout: float | None
    sizes: Sequence[tuple[int, int, int]]
    pool: int
    tokens_per_s: float
    share_done: float


class Progress:
    """Writes lines, above a bar where the output is a terminal or a notebook."""

    def __init__(self, num_rounds: int | None, *, every: int = 1, file: TextIO | None = None):
        """Starts the clock, and draws the bar if there is one.

        Args:
          num_rounds: Rounds of the whole run; None where tokens end it.
          every: Rounds between two lines; the last round always has one.
          file: Where to write; None is standard output.
        """
        self._file = sys.stdout if file is None else file
        self._num_rounds = num_rounds
        self._every = every
        self._last_s, self._last_share = time.perf_counter(), 0.0
        self._seconds_per_run: float | None = None
        self._bar = None
        # A Jupyter kernel's output is no terminal, yet shows bars; this is how tqdm.auto decides.
        in_notebook = self._file is sys.stdout and "ipykernel.zmqshell" in sys.modules
        if self._file.isatty() or in_notebook:
            style = "{percentage:3.0f}%|{bar}| {elapsed}{postfix}"
            self._bar = tqdm(total=1.0, bar_format=style, file=self._file, dynamic_ncols=True)

    def note(self, line: str) -> None:
        """Writes a line of its own, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._file)
        else:
            print(line, file=self._file, flush=True)

    def resume(self, share_done: float) -> None:
        """Starts the bar and the time left where an earlier process stopped."""
        self._last_share = share_done
        if self._bar is not None:
            self._bar.update(min(share_done, 1.0) - self._bar.n)

    def round(self, shown: Shown) -> None:
        """Writes a finished round's line, if it is due, and moves the bar."""
        share = min(shown.share_done, 1.0)
        left = f"{_duration(self._seconds_left(share))} left"
        if self._bar is not None:
            self._bar.set_postfix_str(left, refresh=False)
            self._bar.update(share - self._bar.n)
        if shown.index % self._every == 0 or share >= 1:
            self.note(f"round {self._place(shown.index, share)}: {_line(shown)}, {left}")

    def close(self) -> None:
        """Leaves the bar on the terminal and ends its line."""
        if self._bar is not None:
            self._bar.close()

    def _place(self, index: int, share: float) -> str:
        if self._num_rounds is None:
            return f"{index} ({share:.0%} of the tokens)"
        return f"{index}/{self._num_rounds}"

    def _seconds_left(self, share: float) -> float:
        """By the pace of the last rounds: the first one also compiles."""
        now_s = time.perf_counter()
        pace = (now_s - self._last_s) / max(share - self._last_share, 1e-9)
        before = pace if self._seconds_per_run is None else self._seconds_per_run
        self._seconds_per_run = (pace + before) / 2
        self._last_s, self._last_share = now_s, share
        return (1 - share) * self._seconds_per_run


def _line(shown: Shown) -> str:
    heldout = "" if shown.heldout is None else f", held-out {shown.heldout:.4g}"
    sizes = ["x".join(map(str, size)) for size in shown.sizes]
    if len(sizes) > _MOST_LISTED:
        counts = collections.Counter(sizes).most_common()
        sizes = [f"{size} in {count} trainers" for size, count in counts]
    workers, trainers = sum(size[2] for size in shown.sizes), len(shown.sizes)
    return (
        f"loss {shown.loss:.4g}{heldout}, batch x accumulation x workers {' '.join(sizes)},"
        f" {trainers} trainer{'s' * (trainers != 1)}, {workers} of {shown.pool} workers,"
        f" {shown.tokens_per_s:,.0f} tokens/s"
    )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
