"""Write the terminal output of a run: lines about rounds and events, above a progress bar."""

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
# The line for each kind of change at the end of a round.
_CHANGES = {
    "spawn": "trainer {trainer}: workers {workers_before} -> {workers_after} ({why})",
    "merge": "trainers {listed} merge into trainer {into}:"
    " decision loss {losses} -> {loss_after:.4f}",
    "refusal": "trainers {listed} do not merge: the decision loss would rise by {barrier:.4f} over"
    " their mean, more than merge.max_barrier; {why}",
    "fault": "trainer {trainer} leaves the run with its workers: its last {skipped_in_a_row}"
    " updates were not finite",
}
_WHY = {
    "keep": "all of them continue",
    "retire": "the weaker one ends",
    "test": "the test asks for a larger batch than the trainer's workers have",
    "spawn_frac": "the share of the run that ensemble.spawn_frac declares is done",
}


class Progress:
    """Writes the lines of a run, above a progress bar if on a terminal."""

    def __init__(self, num_rounds: int | None, *, every: int = 1, file: TextIO | None = None):
        """Start the clock, and draw the bar; a line follows `every` rounds, and the last.

        Without `num_rounds` tokens may end the run.
        """
        self._file = sys.stdout if file is None else file
        self._num_rounds = num_rounds
        self._every = every
        self._bar = None
        self._next_call_s = 0.0
        # The words beside the bar.
        self._shown = dict.fromkeys(("round", "loss", "speed", "left", "compiling"), "")
        if self._file.isatty():
            self._bar = tqdm(
                total=1.0,
                file=self._file,
                bar_format="{percentage:3.0f}%|{bar}| {elapsed}{postfix}",
                dynamic_ncols=True,
                mininterval=0.0,
                miniters=0,
            )
        self.begin(0.0)

    def begin(self, share_done: float, stalled_s: Callable[[], float] = lambda: 0.0) -> None:
        """Start the clock of the time left, without the seconds that `stalled_s` has counted.

        `share_done` is what earlier processes completed.
        """
        self._stalled_s = stalled_s
        self._first_share = share_done
        self._begin_s = time.perf_counter() - stalled_s()
        self._draw(min(share_done, 1.0))

    def _left(self, share: float) -> str:
        """Estimate the time that is left, at the mean pace since `begin`."""
        seconds = time.perf_counter() - self._stalled_s() - self._begin_s
        done = max(share - self._first_share, 1e-9)  # never zero
        left_s = (1 - share) * seconds / done
        return f"{tqdm.format_interval(left_s)} left"

    def call(self, share_done: float, losses: Array | np.ndarray) -> None:
        """Move the bar within a round, at most ten times a second, to a share of the whole run."""
        now_s = time.perf_counter()
        if self._bar is None or now_s < self._next_call_s:
            return
        self._next_call_s = now_s + _BETWEEN_CALLS_S
        share = min(share_done, 1.0)
        made = np.asarray(losses)[np.isfinite(losses)]
        loss = np.mean(made) if made.size else np.nan
        self._draw(share, loss=f"loss {loss:.4g}", left=self._left(share))

    def compiling(self, event: Compiling | Compiled) -> None:
        """Show beside the bar that a program is being compiled."""
        text = ""
        if isinstance(event, Compiling):
            text = f"compiling {event.number} of {event.of}"
        self._draw(compiling=text)

    def _draw(self, share: float | None = None, **words: str) -> None:
        """Move the bar to a share of the run (None: leave it), and replace some words beside it."""
        if self._bar is not None:
            self._shown |= words
            text = ", ".join(filter(None, self._shown.values()))
            self._bar.set_postfix_str(text, refresh=share is None)
            if share is not None:
                self._bar.update(share - self._bar.n)

    def note(self, line: str) -> None:
        """Write a line to the terminal, above the progress bar if one is shown."""
        if self._bar is not None:
            self._bar.write(line, file=self._file)
        else:
            print(line, file=self._file, flush=True)

    def round(self, index: int, share_done: float, text: str, speed: str = "") -> None:
        """Move the bar after a round (from 1), and write `text` about it if a line is due."""
        share = min(share_done, 1.0)
        left = self._left(share)
        if self._num_rounds is None:
            number = str(index)
            reached = f"{index} ({share:.0%} of the run)"
        else:
            number = f"{index}/{self._num_rounds}"
            reached = number
        self._draw(share, left=left, speed=speed, round=f"round {number}")
        if index % self._every == 0 or share >= 1:
            parts = [text, speed, left] if speed else [text, left]
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

    `lines` are the trainers' ledger lines, `num_trainers` those that are left after the round,
    `pool` the workers once all have started.
    """
    finite = [line["train_loss"] for line in lines if np.isfinite(line["train_loss"])]
    loss = f"loss {np.mean(finite or [np.nan]):.4g}"
    if not np.isnan(heldout):
        loss += f", held-out {heldout:.4g}"

    trainers = str(len(lines))
    if num_trainers != len(lines):
        trainers += f"->{num_trainers}"

    workers = sum(line["workers"] for line in lines)
    missing = workers - sum(line.get("workers_counted", line["workers"]) for line in lines)
    counted_of_pool = f"{workers - missing}/{pool}"
    if missing:
        counted_of_pool += f" ({missing} missing)"

    sizes = {(line["micro_batch_size"], line["num_accum_steps"]) for line in lines}
    if len(sizes) > _MOST_LISTED:
        batches = [size * accum for size, accum in sizes]
        batch = f"{min(batches)}-{max(batches)}"
    else:
        batch = " ".join(f"{size}x{accum}".removesuffix("x1") for size, accum in sorted(sizes))
    return f"{loss}, trainers {trainers}, workers {counted_of_pool}, batch {batch}"


def describe_growth(line: dict, decision: Decision, batching: BatchingSettings) -> list[str]:
    """Describe in up to two lines why a trainer grows or not, and its skipped updates."""
    requested = f"the test asks for {decision.test_value or 0.0:.1f}"
    if "batch" not in batching.growth:
        limit = "batching.growth, which has no 'batch'"
    elif decision.size.batch_size >= batching.batch_cap:
        limit = "batching.batch_cap"
    else:
        limit = "batching.max_growth"
    reasons = {
        "capped": f"{requested}, limited by {limit}",
        "no_signal": "no signal above the noise yet, so one step of growth",
        "held": "no signal above the noise, limited by batching.max_blind_growth",
        "schedule": "as declared",
    }
    why = reasons.get(decision.reason, requested)

    batch, next_batch = line["requested_batch_size"], line["next_batch_size"]
    updates, next_updates = line["steps_per_round"], line["next_steps_per_round"]
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
    """Describe a change, such as a merge, on one line; empty if it is not shown."""
    template = _CHANGES.get(change["event"])
    if template is None:
        return ""
    words = dict(change)
    reason = change.get("action", change.get("reason", ""))
    words["why"] = change.get("why", _WHY.get(reason, ""))
    words["listed"] = ", ".join(map(str, change.get("members", ())))
    words["losses"] = ", ".join(f"{loss:.4f}" for loss in change.get("loss_before", ()))
    return f"round {change['round']}: {template.format(**words)}"
