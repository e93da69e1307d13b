"""Observers of a run: functions that write, evaluate, print and save after every round.

Observers are called in the order that `training` declares. Each observer receives the state after
that round, and must not change it.
"""

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble
from adloco_jax.crashpoints import crash_point
from adloco_jax.engine import evaluate
from adloco_jax.engine.memory import measured_peaks
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.spec import Compiled
from adloco_jax.errors import Preempted
from adloco_jax.loop.adloco import Boundary, Control, Engine, State
from adloco_jax.loop.growth import Decision
from adloco_jax.loop.plans import is_over, share_done
from adloco_jax.run import checkpoint, processes
from adloco_jax.run.build import Run, attention
from adloco_jax.run.checkpoint import Saver
from adloco_jax.run.ledger import Ledger
from adloco_jax.run.resume import versions
from adloco_jax.run.terminal import Progress, describe_change, describe_growth, describe_round
from adloco_jax.settings import Settings


class RunEngine(Engine, Protocol):
    """An `Engine` with the attributes that observers need to evaluate and to save."""

    programs: Programs
    heldout: evaluate.HeldOut
    underway: Control  # the control before the current round

    def complete(self, state: State) -> Ensemble:
        """The ensemble of a state, with the inner states that learners hold; waits for these."""


@dataclass
class Recorder:
    """Writes the results of a round to the ledger file and to the terminal.

    Other observers write to the ledger through this object.
    """

    settings: Settings
    engine: "RunEngine"
    ledger: Ledger
    progress: Progress
    start_s: float  # start of the run on this process's clock, as if earlier processes were here
    loss: float  # loss of the last consensus model on the reported rows
    evaluated_round: int = -1  # round after which `loss` was measured
    tokens: int = 0  # tokens of the rounds of this process
    seconds: float = 0.0  # seconds of these rounds, without compilation

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Write a line to the ledger for each trainer of the round, then one for each change."""
        metrics = boundary.metrics
        self.tokens += sum(line["tokens"] for line in metrics.lines)
        self.seconds += metrics.step_s - metrics.stall_s
        seconds = {"step_s": round(metrics.step_s, 6), "stall_s": round(metrics.stall_s, 6)}
        rows = zip(metrics.lines, boundary.decisions, metrics.outcomes, strict=True)
        for line, decision, outcome in rows:
            measured = {"train_loss": outcome.mean_loss}
            measured["pseudo_grad_norm"] = outcome.pseudo_grad_norm
            whole = line | _decided(decision, self.settings)
            self.ledger.write("round", **whole, **measured, **seconds)
            if skipped := line["skipped_updates"]:
                where = {"round": line["round"], "trainer": line["trainer"]}
                self.ledger.write("fault", kind="skipped_updates", **where, updates=skipped)
            for note in describe_growth(whole, decision, self.settings):
                self.progress.note(note)
        for change in boundary.changes:
            self.ledger.write(**change)
            if note := describe_change(change):
                self.progress.note(note)

    def show(self, state: State, boundary: Boundary) -> None:
        """Write a line about the round to the terminal, with the newest held-out loss."""
        metrics, control = boundary.metrics, state.control
        losses = [outcome.mean_loss for outcome in metrics.outcomes]
        how = {"heldout": self.loss, "pool": self.settings.ensemble.num_workers}
        text = describe_round(metrics.lines, losses, **how, seconds=metrics.step_s)
        done = share_done(control.round, control.tokens_total, self.settings)
        self.progress.round(control.round, done, text)

    def record(self) -> dict:
        """What a checkpoint has to store of this object: loss, seconds, position in the ledger."""
        return {
            "loss": self.loss if np.isfinite(self.loss) else None,
            "wall_s": time.perf_counter() - self.start_s,
            "ledger": self.ledger.position() if processes.is_first() else None,
        }

    def wall_s(self) -> float:
        """Seconds of the run so far, including the time of earlier processes."""
        return round(time.perf_counter() - self.start_s, 3)

    def write_memory(self, control: Control) -> None:
        """Write the peak memory of this process so far to the ledger."""
        peaks = measured_peaks(self.engine.programs.spec.machine.local_devices)
        self.ledger.write("memory", round=control.round, **peaks)

    def write_end(self, control: Control, reason: str) -> None:
        """Write the `end` line to the ledger: the run, or this process's part of it, has ended."""
        self.write_memory(control)
        fields: dict[str, Any] = {"rounds": control.round, **_totals(control)}
        if self.seconds:
            fields["tokens_per_s"] = round(self.tokens / self.seconds, 1)
        self.ledger.write("end", reason=reason, **fields, wall_s=self.wall_s())


def _decided(decision: Decision, settings: Settings) -> dict:
    """The fields of a ledger line that a trainer's batch-size decision determines.

    If a rule determines the length of a round when the round starts, the next length is not known
    yet and is None.
    """
    fields, inner = decision._asdict(), settings.inner
    size, is_known = fields.pop("size"), inner.round_length == "fixed"
    return fields | {
        "next_workers": size.num_workers,
        "next_steps_per_round": size.round_length * inner.steps_per_round if is_known else None,
        "next_batch_size": size.batch_size,
    }


def _totals(control: Control) -> dict[str, int]:
    names = ("tokens_total", "bytes_total", "syncs_total", "updates_total")
    return {name: getattr(control, name) for name in names}


@dataclass
class Evaluator:
    """Measures and records the held-out loss of each trainer and of the consensus model."""

    recorder: Recorder
    num_classes: int | None  # number of classes of labelled rows; None for text
    unit: str  # unit of the loss
    params: PyTree | None = None  # parameters of the last consensus model

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Evaluate all models if an evaluation is due, and write the round to the terminal."""
        if not boundary.advanced:
            return
        recorder, control = self.recorder, state.control
        is_due = control.round % recorder.settings.eval.every_rounds == 0
        if is_due or is_over(control, recorder.settings):
            for position, trainer in enumerate(control.trainers):
                params = evaluate.trainer_params(state.ensemble, position)
                self._record(control, trainer.id, params)
            crash_point("eval.trainers")
            self.consensus(state, record=True)
            recorder.write_memory(control)
        recorder.show(state, boundary)

    def consensus(self, state: State, *, record: bool = False) -> None:
        """Choose the consensus model and measure its loss; store the parameters and the loss."""
        engine = self.recorder.engine
        self.params, source = evaluate.consensus(
            state.ensemble, engine.programs, engine.heldout, state.control.demands
        )
        if record:
            loss = self._record(state.control, "consensus", self.params, source=source)
            self.recorder.evaluated_round = state.control.round
        else:
            loss = evaluate.mean_loss(*self._given(self.params))
        self.recorder.loss = loss

    def _given(self, params: PyTree) -> tuple[Programs, PyTree, np.ndarray, int]:
        """Arguments of functions of `evaluate`: a model, and the rows for reported losses."""
        engine = self.recorder.engine
        return engine.programs, params, engine.heldout.report_EL, engine.heldout.batch_size

    def _record(self, control: Control, trainer: int | str, params: PyTree, **more: Any) -> float:
        loss = evaluate.mean_loss(*self._given(params))
        if self.unit == "nats/token":
            with np.errstate(over="ignore"):  # infinity becomes null in the ledger
                more["perplexity"] = float(np.exp(loss))
        if self.num_classes is not None:
            more |= evaluate.class_report(*self._given(params), self.num_classes)
        fields = {"round": control.round, "trainer": trainer, "loss": loss}
        fields |= _totals(control) | more
        self.recorder.ledger.write("eval", **fields, wall_s=self.recorder.wall_s())
        return loss


@dataclass
class Checkpoints:
    """Saves the state of a run after a round, if it is time; after a signal it ends the run."""

    recorder: Recorder
    saver: Saver
    stop: Callable[[], bool]  # whether the process has received a signal
    host: Callable[[State], dict]  # returns the host's part of a checkpoint, as plain JSON
    _last_save_s: float = field(default_factory=time.perf_counter)

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Save the state if it is time to, and end the run after a signal.

        Raises:
          Preempted: After a signal, once everything is saved.
          ResourceError: If a save has failed.
        """
        if not boundary.advanced:  # a checkpoint's name is the round of the slowest trainer
            return
        settings, index = self.recorder.settings, state.control.round
        last, every = is_over(state.control, settings), settings.checkpoint.every_rounds
        asked = processes.gather([self.stop(), self._is_time()], "boundary")
        stop_now, save_by_clock = (any(answers) for answers in zip(*asked, strict=True))
        stop_now = stop_now and not last
        if last or stop_now or save_by_clock or (every and index % every == 0):
            self._save(state)
        if not (last or stop_now):
            return
        self.saver.wait()
        self.recorder.write_end(state.control, "preempted" if stop_now else "finished")
        if stop_now:
            folder = self.saver.folder
            raise Preempted(
                f"{folder.parent}: stopped by a signal after round {index};"
                f" {checkpoint.last(folder)}; the same command continues from there"
            )

    def _is_time(self) -> bool:
        """Whether a checkpoint is due by the clock; raises the error of an earlier save."""
        self.saver.wait(only_if_ended=True)
        due_s = self._last_save_s + self.recorder.settings.checkpoint.every_s
        return processes.is_first() and time.perf_counter() >= due_s

    def _save(self, state: State) -> None:
        recorder, index = self.recorder, state.control.round
        self._last_save_s = time.perf_counter()
        self.saver.wait()
        known = recorder.evaluated_round == index and np.isfinite(recorder.loss)
        loss = recorder.loss if known else None
        self.saver.save(index, recorder.engine.complete(state), self.host(state), loss=loss)


def compile_fields(compiled: Compiled) -> dict:
    """The fields of a `compile` line of the ledger, which describes one compilation."""
    return {
        "key": str(compiled.key),
        "seconds": round(compiled.seconds, 3),
        "cache": "hit" if compiled.hit else "miss",
        "where": "background" if compiled.background else "foreground",
        "needed_bytes": compiled.needed_bytes,
    }


def write_start(
    run: Run, ledger: Ledger, control: Control, damage: list[str], faults: Sequence[dict]
) -> None:
    """Write the `start` line to the ledger, then a `fault` line for each earlier failure."""
    settings, spec = run.settings, run.spec
    ledger.write(
        "start",
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        run=run.workdir.resolve().name,
        command=run.command,
        config=dataclasses.asdict(settings),
        num_params=spec.num_params,
        state_bytes=spec.state_bytes._asdict(),
        attention=attention(settings, spec.machine),
        devices=spec.machine.describe(),
        jax=jax.__version__,
        versions=versions(),
        data_fingerprint=run.corpus.fingerprint,
        tokens_per_byte=run.corpus.tokens_per_byte,
        loss_unit=run.unit,
        round=control.round,
        max_batch_size=control.max_batch_size,
        buckets=settings.batching.buckets,
    )
    found = [{"kind": "checkpoint", "round": control.round, "cause": line} for line in damage]
    for fault in [*found, *faults]:
        ledger.write("fault", **fault)
