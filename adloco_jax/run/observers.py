"""Observers of a run: ledger, evaluation, terminal, checkpoints and compilation ahead of time.

Observers are called after every round, in the order that `training` declares. Each sees the state
of the boundary it is called at, and changes nothing in the run.
"""

import dataclasses
import faulthandler
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import PyTree

from adloco_jax.crashpoints import hit
from adloco_jax.engine import evaluate
from adloco_jax.engine.health import consensus_weights
from adloco_jax.engine.inputs import classes, round_keys
from adloco_jax.engine.local import LocalEngine
from adloco_jax.engine.memory import measured_peaks
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.spec import Key, Spec
from adloco_jax.errors import Preempted
from adloco_jax.loop.adloco import (
    Boundary,
    Control,
    Observer,
    State,
    after_merge,
    choose_members,
    is_over,
    joining_workers,
    merge_due,
    round_plan,
    share_done,
    with_workers,
)
from adloco_jax.loop.growth import measures_gradients, with_growth
from adloco_jax.run import checkpoint, notes, processes
from adloco_jax.run.checkpoint import Saver
from adloco_jax.run.ledger import Ledger
from adloco_jax.run.progress import Progress
from adloco_jax.settings import Settings


@dataclass
class Recorder:
    """Writes a round's lines at the next boundary, when its losses are known without waiting.

    If another event of the boundary has to follow them in the ledger, it waits for the losses.
    The other observers write through it, and keep here what is said of the run besides.
    """

    settings: Settings
    engine: LocalEngine
    ledger: Ledger
    progress: Progress
    start_s: float  # on this process's clock, earlier by the seconds of earlier processes
    loss: float  # of the last consensus, on the reported rows
    evaluated_round: int = -1
    tokens: int = 0  # of the rounds of this process
    seconds: float = 0.0
    unshown: tuple[int, dict, float] | None = None  # a recorded round, for the terminal
    _last_end_s: float = field(default_factory=time.perf_counter)
    _pending: tuple[Boundary, float] | None = None  # with how much of the run was done

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Records the round before; and this one, if an event of its boundary follows it."""
        self._write_pending(state)
        control = state.control
        share = share_done(control.round, control.tokens_total, self.settings)
        self._pending = boundary, share
        for line, decision in zip(boundary.metrics.lines, boundary.decisions, strict=True):
            if note := notes.growth(line, decision, self.settings):
                self.progress.note(note)
        hit("round.decided")
        if self.engine.events or boundary.changes:
            self.flush(state)

    def flush(self, state: State) -> None:
        """Records everything up to this boundary; waits for its round."""
        pending = self._pending
        self._write_pending(state)
        self.write_events()
        for change in pending[0].changes if pending is not None else []:
            self.ledger.write(**change)
            self.progress.note(notes.OF_CHANGES[change["event"]](change, self.settings))

    def write_events(self) -> None:
        """Records the engine's events between rounds."""
        for event, fields, note in self.engine.events:
            self.ledger.write(event, **fields)
            if note:
                self.progress.note(note)
        self.engine.events.clear()

    def _write_pending(self, state: State) -> None:
        if self._pending is None:
            return
        boundary, share = self._pending
        metrics = boundary.metrics
        if metrics.noted is None:
            self.engine.settled(state)
        self._pending = None
        end_s = metrics.end_s.result()
        began_s = max(metrics.start_s, self._last_end_s)
        step_s = end_s - began_s
        self._last_end_s = end_s
        tokens = sum(line["tokens"] for line in metrics.lines)
        # Waiting for compilation counts only from the end of the round before.
        waited_s = metrics.start_s + metrics.stall_s - began_s
        self.seconds += step_s - max(waited_s, 0.0)
        self.tokens += tokens
        noted = metrics.noted or []
        seconds = {"step_s": round(step_s, 6), "stall_s": round(metrics.stall_s, 6)}
        rows = zip(metrics.lines, boundary.decisions, metrics.outcomes, noted, strict=True)
        for line, decision, outcome, counts in rows:
            decided = notes.decided(decision, self.settings)
            measured = {"train_loss": outcome.mean_loss}
            measured["pseudo_grad_norm"] = outcome.pseudo_grad_norm
            self.ledger.write("round", **line, **decided, **measured, **counts, **seconds)
            if skipped := counts["skipped_updates"]:
                where = {"round": line["round"], "trainer": line["trainer"]}
                self.ledger.write("fault", kind="skipped_updates", **where, updates=skipped)
                self.progress.note(
                    f"round {line['round']}: trainer {line['trainer']} skipped {skipped} updates"
                    " whose loss or gradient was not finite"
                )
        losses = [outcome.mean_loss for outcome in metrics.outcomes]
        fields = {
            "loss": float(np.mean([loss for loss in losses if np.isfinite(loss)] or [np.nan])),
            "heldout": None,
            "trainers": len(losses),
            "batch": [line["requested_batch_size"] for line in metrics.lines],
            "accum": [line["num_accum_steps"] for line in metrics.lines],
            "tokens/s": tokens / step_s,
        }
        self.show()
        self.unshown = metrics.round, fields, share

    def show(self) -> None:
        """Shows the last recorded round once, with the newest held-out loss."""
        if self.unshown is not None:
            index, fields, share = self.unshown
            heldout = None if np.isnan(self.loss) else self.loss
            self.progress.round(index, fields | {"heldout": heldout}, share_done=share)
            self.unshown = None

    def wall_s(self) -> float:
        """Seconds of the run so far, those of resumed processes added up."""
        return round(time.perf_counter() - self.start_s, 3)

    def write_memory(self, control: Control) -> None:
        """Records the most memory that the process has held so far."""
        self.ledger.write("memory", round=control.round, **measured_peaks())

    def write_end(self, control: Control, reason: str) -> None:
        """Records the end of the run, or of this process's part of it."""
        self.write_memory(control)
        fields: dict[str, Any] = {"rounds": control.round, **_totals(control)}
        if self.seconds:
            fields["tokens_per_s"] = round(self.tokens / self.seconds, 1)
        self.ledger.write("end", reason=reason, **fields, wall_s=self.wall_s())


def _totals(control: Control) -> dict[str, int]:
    names = ("tokens_total", "bytes_total", "syncs_total", "updates_total")
    return {name: getattr(control, name) for name in names}


@dataclass
class Evaluator:
    """Records the held-out loss of each trainer and of the consensus, every so many rounds."""

    recorder: Recorder
    num_classes: int | None  # of labelled rows
    params: PyTree | None = None  # the last consensus

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Evaluates this boundary's state, if that is due; waits for its round."""
        recorder, control = self.recorder, state.control
        is_due = control.round % recorder.settings.eval.every_rounds == 0
        if is_due or is_over(control, recorder.settings):
            recorder.flush(state)
            state = recorder.engine.settled(state)
            for position, trainer in enumerate(control.trainers):
                params = evaluate.trainer_params(state.ensemble, position)
                self._record(control, trainer.id, params)
            hit("eval.trainers")
            self.consensus(state, record=True)
            recorder.write_memory(control)
        recorder.show()

    def consensus(self, state: State, *, record: bool = False) -> None:
        """Finds the consensus and its loss, and keeps both."""
        engine, weights = self.recorder.engine, consensus_weights(state.control)
        self.params, source = evaluate.consensus(
            state.ensemble, engine.programs, engine.heldout, weights
        )
        if record:
            loss = self._record(state.control, "consensus", self.params, source=source)
            self.recorder.evaluated_round = state.control.round
        else:
            loss = evaluate.mean_loss(*self._given(self.params))
        self.recorder.loss = loss

    def _given(self, params: PyTree) -> tuple[Programs, PyTree, np.ndarray, int]:
        """What a function of `evaluate` takes to report on a model."""
        engine = self.recorder.engine
        return engine.programs, params, engine.heldout.report_EL, engine.heldout.batch_size

    def _record(self, control: Control, trainer: int | str, params: PyTree, **more: Any) -> float:
        loss = evaluate.mean_loss(*self._given(params))
        if self.num_classes is None:
            with np.errstate(over="ignore"):  # not finite: null in the ledger
                more["perplexity"] = float(np.exp(loss))
        else:
            more |= evaluate.class_report(*self._given(params), self.num_classes)
        fields = {"round": control.round, "trainer": trainer, "loss": loss}
        fields |= _totals(control) | more
        self.recorder.ledger.write("eval", **fields, wall_s=self.recorder.wall_s())
        return loss


@dataclass
class Checkpoints:
    """Saves the boundary's own state when that is due or at a signal, which then stops the run."""

    recorder: Recorder  # records the rounds up to a boundary before its state is saved
    saver: Saver
    stop: Callable[[], bool]  # whether the process has received a signal
    host: Callable[[State], dict]  # what is saved of a state beside its arrays, as plain JSON
    _last_save_s: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        """Asks for the first time, before the first round is dispatched."""
        self._read_vote = self._ask()

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Saves, if that is due, and ends the run at a signal.

        Raises:
          Preempted: After a signal, once everything is saved.
          ResourceError: If a save has failed.
        """
        settings, index = self.recorder.settings, state.control.round
        last, every = is_over(state.control, settings), settings.checkpoint.every_rounds
        stop_now, save_by_clock = self._read_vote()
        stop_now = stop_now and not last
        if last or stop_now or save_by_clock or (every and index % every == 0):
            self._save(state)
        if not (last or stop_now):
            self._read_vote = self._ask()
            return
        self.saver.wait()
        self.recorder.write_end(state.control, "preempted" if stop_now else "finished")
        if stop_now:
            folder = self.saver.folder
            raise Preempted(
                f"{folder.parent}: stopped by a signal after round {index};"
                f" {checkpoint.last(folder)}; the same command goes on from there"
            )

    def _ask(self) -> Callable[[], list[bool]]:
        """Asks all processes, before the next round is dispatched; a single one when it is read."""
        return processes.vote(lambda: [self.stop(), self._is_time()])

    def _is_time(self) -> bool:
        """Whether a checkpoint is due by now; also reports a failure of the one before."""
        self.saver.wait(only_if_ended=True)
        due_s = self._last_save_s + self.recorder.settings.checkpoint.every_s
        return processes.is_first() and time.perf_counter() >= due_s

    def _save(self, state: State) -> None:
        recorder, index = self.recorder, state.control.round
        self._last_save_s = time.perf_counter()
        recorder.flush(state)
        self.saver.wait()
        state = recorder.engine.settled(state)
        known = recorder.evaluated_round == index and np.isfinite(recorder.loss)
        loss = recorder.loss if known else None
        self.saver.save(index, state.ensemble, self.host(state), loss=loss)


def prefetch(engine: LocalEngine) -> Observer:
    """Compiles the programs of coming rounds in the background, the next round's first."""

    def observe(state: State, boundary: Boundary) -> None:
        if not is_over(state.control, engine.settings):
            keys = programs_ahead(state.control, engine.settings, engine.spec)
            engine.programs.prefetch(keys)

    return observe


def watchdog(seconds: float) -> Observer:
    """Ends the process with every thread's traceback if no round ends for so many seconds."""

    def observe(state: State, boundary: Boundary) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True)

    return observe


def programs_ahead(control: Control, settings: Settings, spec: Spec) -> list[Key]:
    """The programs of the next round, and of the one after it with unchanged and fastest growth.

    Both include a merge that may come before them, chosen as if all guard losses were equal.
    """
    keys = _keys(control, settings, spec)
    later = dataclasses.replace(control, round=control.round + 1)
    last = is_over(later, settings)
    if settings.outer.leaves_unsynchronised:
        owed = range(len(later.trainers)) if last else _members(later, settings)
        keys += [group.key("flush") for group in classes(later, owed, spec)]
    if not last and measures_gradients(settings):
        for growth in (settings.batching.max_growth, 1):
            ahead = with_growth(later, growth, settings)
            if members := _members(ahead, settings):
                ahead = after_merge(ahead, members)
            for position, num_workers in joining_workers(ahead, settings):
                ahead = with_workers(ahead, position, num_workers)
            keys += _keys(ahead, settings, spec)
    return list(dict.fromkeys(keys))


def _members(control: Control, settings: Settings) -> tuple[int, ...]:
    """The trainers that merge at a control's boundary if all guard losses are equal."""
    if not merge_due(control, settings):
        return ()
    return choose_members(control, [0.0] * len(control.trainers), settings)


def _keys(control: Control, settings: Settings, spec: Spec) -> list[Key]:
    plans = {m: round_plan(control, m, settings) for m in range(len(control.trainers))}
    return round_keys(control, plans, settings, spec)
