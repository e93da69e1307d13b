"""Write the terminal output of a run: lines about rounds and events, above a progress bar.

The bar is drawn only on a terminal, not in a file of output. A trainer is a model in training; its
workers train copies of it. A learner is another process that trains workers; a worker's round
counts if its result came in time and was used. The ledger is the log of a run.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

import numpy as np
from jax import Array
from tqdm import tqdm

from adloco_jax.engine.spec import Compiled, Compiling
from adloco_jax.errors import counted
from adloco_jax.loop.growth import Decision
from adloco_jax.settings import BatchingSettings

_BETWEEN_CALLS_S = 0.1  # the bar moves at most so often within a round
_MOST_LISTED = 2  # with more sizes of batches, the line of a round has the range
# By kind of change, the line about it: a template with fields of the change's line in the ledger.
_CHANGES = {
    "spawn": "trainer {trainer}: workers {workers_before} -> {workers_after} ({why})",
    "merge": "trainers {listed} merge into trainer {into}:"
    " decision loss {losses} -> {loss_after:.4f}",
    "refusal": "trainers {listed} do not merge: the decision loss would rise by {barrier:.4f} over"
    " their mean, more than merge.max_barrier; {why}",
    "fault": "trainer {trainer} leaves the run with its workers: its last {skipped_in_a_row}"
    " updates were not finite",
}
# In words, the `action` of a refused merge, and the `reason` of a growth.
_WHY = {
    "keep": "all of them continue",
    "retire": "the weaker one ends",
    "test": "the test asks for a larger batch than the trainer's workers have",
    "spawn_frac": "the share of the run that ensemble.spawn_frac declares is done",
}


class Progress:
    """Writes the lines of a run, above a progress bar if on a terminal."""

    def __init__(self, num_rounds: int | None, *, every: int = 1, file: TextIO | None = None):
        """Start the clock, and draw the bar if `file` is a terminal.

        Args:
          num_rounds: Number of rounds of the run; None: tokens end it.
          every: Rounds from one line to the next; the last round always has one.
          file: By default the standard output.
        """
        self._file = sys.stdout if file is None else file
        self._num_rounds = num_rounds
        self._every = every
        self._bar = None
        self._next_call_s = 0.0  # on this process's clock, when the bar may move within a round
        # The words beside the bar, in their order.
        self._shown = {"round": "", "loss": "", "speed": "", "left": "", "compiling": ""}
        if self._file.isatty():
            self._bar = tqdm(
                total=1.0,
                file=self._file,
                bar_format="{percentage:3.0f}%|{bar}| {elapsed}{postfix}",
                dynamic_ncols=True,  # as wide as the terminal is now
                # Each update is drawn: `move_within_round` limits how often they come.
                mininterval=0.0,
                miniters=0,
            )
        self.begin(0.0)

    def begin(self, share_done: float, stalled_s: Callable[[], float] = lambda: 0.0) -> None:
        """Start the clock of the time left, and move the bar to what is done.

        Called again just before the first round, so that making the run ready does not count.

        Args:
          share_done: The share of the run that earlier processes completed.
          stalled_s: Returns the seconds that this process has waited for compilation so far, which
            the clock leaves out.
        """
        self._stalled_s = stalled_s
        self._first_share = share_done
        self._begin_s = time.perf_counter() - stalled_s()
        self._draw(min(share_done, 1.0))  # more is done if the last round went beyond the tokens

    def _time_left(self, share: float) -> str:
        """Return words on the time that is left, at the mean pace since `begin`.

        `share` is the share of the run that is done.
        """
        seconds = time.perf_counter() - self._stalled_s() - self._begin_s
        done = max(share - self._first_share, 1e-9)  # since `begin`; never divided by zero
        left_s = (1 - share) * seconds / done
        return f"{tqdm.format_interval(left_s)} left"

    def move_within_round(self, share_done: float, losses: Array | np.ndarray) -> None:
        """Move the bar within a round, at most ten times a second, to a share of the whole run.

        `losses` are the training losses of the newest updates, one for each worker; not finite if
        an update was skipped.
        """
        now_s = time.perf_counter()
        if self._bar is None or now_s < self._next_call_s:
            return
        self._next_call_s = now_s + _BETWEEN_CALLS_S
        share = min(share_done, 1.0)
        finite = np.asarray(losses)[np.isfinite(losses)]
        loss = np.nan  # all were skipped
        if finite.size:
            loss = np.mean(finite)
        self._draw(share, loss=f"loss {loss:.4g}", left=self._time_left(share))

    def compiling(self, event: Compiling | Compiled) -> None:
        """Show beside the bar that a program is being compiled, or no longer if `event` ends it."""
        text = ""
        if isinstance(event, Compiling):
            text = f"compiling {event.number} of {event.of}"
        self._draw(compiling=text)

    def _draw(self, share: float | None = None, **words: str) -> None:
        """Move the bar to a share of the run (None: leave it), and replace some words beside it.

        `words` are new values of keys of `_shown`.
        """
        if self._bar is None:
            return
        self._shown.update(words)
        text = ", ".join(shown for shown in self._shown.values() if shown)
        # The bar is drawn once: here if it does not move, else by `update`.
        self._bar.set_postfix_str(text, refresh=share is None)
        if share is not None:
            self._bar.update(share - self._bar.n)  # tqdm adds to `n`, where the bar stands

    def note(self, line: str) -> None:
        """Write a line to the terminal, above the progress bar if one is shown."""
        if self._bar is not None:
            self._bar.write(line, file=self._file)
        else:
            print(line, file=self._file, flush=True)

    def round(self, index: int, share_done: float, text: str, speed: str = "") -> None:
        """Move the bar after a round (from 1), and write a line about it if one is due.

        A line is due every so many rounds, and after the last. `share_done` is the share of the run
        that is done, `text` and `speed` are words of the line.
        """
        share = min(share_done, 1.0)
        left = self._time_left(share)
        if self._num_rounds is None:
            number = str(index)
            reached = f"{index} ({share:.0%} of the run)"
        else:
            number = f"{index}/{self._num_rounds}"
            reached = number
        self._draw(share, left=left, speed=speed, round=f"round {number}")
        if index % self._every == 0 or share >= 1:
            parts = [text]
            if speed:
                parts.append(speed)
            parts.append(left)
            self.note(f"round {reached}: {', '.join(parts)}")

    def close(self) -> None:
        """Stop the progress bar and end its line; the bar stays on the terminal."""
        if self._bar is not None:
            self._bar.close()


def describe_round(
    lines: Sequence[dict],
    *,
    heldout: float,
    num_trainers: int,
    pool: int,
) -> str:
    """Describe a finished round: loss, trainers, workers that counted, batch x accumulation.

    "trainers 4->3" says that one has left; "8/16 (2 missing)", that of 16 workers 8 counted and
    2 more did not; "8x2", micro-batches of 8 sequences, two of which make an update.

    Args:
      lines: The trainers' newest `round` lines of the ledger.
      heldout: The last held-out loss; NaN: none was measured.
      num_trainers: Trainers that are left after the round.
      pool: Workers of the run, once all have started.
    """
    finite = [line["train_loss"] for line in lines if np.isfinite(line["train_loss"])]
    mean = np.nan  # of a round in which all updates were skipped
    if finite:
        mean = np.mean(finite)
    loss = f"loss {mean:.4g}"
    if not np.isnan(heldout):
        loss += f", held-out {heldout:.4g}"

    trainers = str(len(lines))
    if num_trainers != len(lines):
        trainers += f"->{num_trainers}"

    workers = sum(line["workers"] for line in lines)
    # Without learners, all workers count.
    num_counted = sum(line.get("workers_counted", line["workers"]) for line in lines)
    counted_of_pool = f"{num_counted}/{pool}"
    if num_counted < workers:
        counted_of_pool += f" ({workers - num_counted} missing)"

    sizes = {(line["micro_batch_size"], line["num_accum_steps"]) for line in lines}
    if len(sizes) > _MOST_LISTED:
        batches = [size * accum for size, accum in sizes]
        batch = f"{min(batches)}-{max(batches)}"
    else:
        # "8x1", without accumulation, is written as "8".
        batch = " ".join(f"{size}x{accum}".removesuffix("x1") for size, accum in sorted(sizes))
    return f"{loss}, trainers {trainers}, workers {counted_of_pool}, batch {batch}"


def describe_growth(line: dict, decision: Decision, batching: BatchingSettings) -> list[str]:
    """Describe in up to two lines why a trainer grows or not, and its skipped updates.

    A batch-size test measures gradients at the start of a round, and asks for a batch that is as
    large as their noise pays for. `line` is the trainer's `round` line of the ledger, `decision`
    what the trainer requests next. No lines if nothing changes.
    """
    # A schedule has no value of a test; its reason below does not use these words.
    requested = f"the test asks for {decision.test_value or 0.0:.1f}"
    if "batch" not in batching.growth:
        limit = "batching.growth, which has no 'batch'"
    elif decision.size.batch_size >= batching.batch_cap:
        limit = "batching.batch_cap"
    else:
        limit = "batching.max_growth"
    reasons = {  # in words, by `decision.reason`; for other reasons the test's request is enough
        "capped": f"{requested}, limited by {limit}",
        "no_signal": "no signal above the noise yet, so one step of growth",
        "held": "no signal above the noise, limited by batching.max_blind_growth",
        "schedule": "as declared",
    }
    why = reasons.get(decision.reason, requested)

    batch = line["requested_batch_size"]
    next_batch = line["next_batch_size"]
    updates = line["steps_per_round"]
    next_updates = line["next_steps_per_round"]
    grown = []
    if decision.reason == "held":
        grown.append("batch per worker stays")
    else:
        if next_batch != batch:
            grown.append(f"batch per worker {batch} -> {next_batch}")
        if next_updates not in (updates, None):  # None: not known before the round
            grown.append(f"updates per round {updates} -> {next_updates}")

    facts = []
    if grown:
        facts.append(f"{', '.join(grown)} ({why})")
    skipped = line["skipped_updates"]
    if skipped:
        facts.append(f"skipped {counted(skipped, 'update')}: loss or gradient was not finite")
    return [f"round {line['round']}: trainer {line['trainer']}: {fact}" for fact in facts]


def describe_change(change: dict) -> str:
    """Describe a change, such as a merge, on one line; empty if it is not shown.

    `change` has the fields of the change's line in the ledger, of which each kind has its own.
    """
    template = _CHANGES.get(change["event"])
    if template is None:
        return ""
    words = dict(change)  # the fields that the templates name, and three more
    # A refused merge has an `action` and a growth a `reason`, one word each that `_WHY` explains.
    # Where the line says `why` in words of its own, these count.
    reason = change.get("action", change.get("reason", ""))
    words["why"] = change.get("why", _WHY.get(reason, ""))
    words["listed"] = ", ".join(map(str, change.get("members", ())))
    words["losses"] = ", ".join(f"{loss:.4f}" for loss in change.get("loss_before", ()))
    return f"round {change['round']}: {template.format_map(words)}"
