"""Observers of a run: called after every round to record, evaluate and save; state is read only.

An observer is given the state after the round and its `Boundary`: what the round measured, what
each trainer decided about its next size, and what changed. With learners (other processes that
train), trainers end their rounds apart, and the number of the run's round is that of the slowest
trainer. A trainer is a model in training; its workers train copies of it. The consensus is the
model that stands for all trainers: the only one, the best, or their average. The ledger is the log
of a run. `Control` is what the host knows of the run, such as trainers, sizes and counts.
"""

import datetime
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble
from adloco_jax.data.sampling import HeldOut
from adloco_jax.engine import evaluate
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.spec import Compiled, Compiling
from adloco_jax.errors import Preempted
from adloco_jax.host import processes
from adloco_jax.host.versions import versions
from adloco_jax.loop.adloco import Boundary, Control, Engine, State
from adloco_jax.loop.growth import Decision
from adloco_jax.loop.plans import is_over
from adloco_jax.run.before.assemble import Run
from adloco_jax.run.kept import checkpoint
from adloco_jax.run.kept.checkpoint import Saver
from adloco_jax.run.kept.ledger import Ledger
from adloco_jax.run.watching.terminal import (
    Progress,
    describe_change,
    describe_growth,
    describe_round,
)
from adloco_jax.settings import InnerSettings, Settings


class RunEngine(Engine, Protocol):
    """An `Engine` (it runs rounds) with the attributes that observers need to evaluate and save."""

    programs: Programs
    heldout: HeldOut
    control_before: Control  # the host's data about the run, as they were before the current round

    def close(self) -> None:
        """End what the engine has started, such as learners."""

    def complete(self, state: State) -> Ensemble:
        """Return the ensemble with all inner states, once learners have sent what they hold."""


@dataclass
class Recorder:
    """Writes the results of a round to the ledger and the terminal, also for other observers."""

    settings: Settings
    engine: RunEngine
    ledger: Ledger
    progress: Progress
    # This process's clock at the start of the run, had it run the earlier processes' rounds.
    start_s: float
    loss: float  # held-out loss of the last consensus model, as reported; NaN: none was measured
    most_tokens_per_s: float = math.nan  # at the peak of the devices, if known
    evaluated_round: int = -1  # the round after which `loss` was measured and recorded
    tokens: int = 0  # tokens of the rounds that this process has run
    seconds: float = 0.0  # seconds of these rounds, without compilation
    # Ledger fields of each trainer's newest round; with learners their rounds end apart.
    _newest: dict[int, dict] = field(default_factory=dict)
    # Of the rounds since the terminal's last line about a round.
    _unshown_tokens: int = 0
    _unshown_s: float = 0.0

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Write a ledger line for each trainer that ran, and for each change, such as a merge.

        The terminal shows changes, growth and skipped updates; `show` writes the line about the
        round, once it has been evaluated. Raises ResourceError if the disk is full.
        """
        # `lines`: of each trainer that ran, the fields of its ledger line that were measured.
        metrics = boundary.metrics
        tokens = sum(line["tokens"] for line in metrics.lines)
        self.tokens += tokens
        self.seconds += metrics.step_s - metrics.stall_s  # without waiting for compilation
        self._unshown_tokens += tokens
        self._unshown_s += metrics.step_s
        # Of each trainer that ran: the measured fields, what it does next, and its losses.
        trainers = zip(metrics.lines, boundary.decisions, metrics.outcomes, strict=True)
        for measured, decision, outcome in trainers:
            line = {**measured, **_decision_fields(decision, self.settings.inner)}
            # The losses may not be finite; they are null in the ledger then.
            line["train_loss"] = outcome.mean_loss
            line["pseudo_grad_norm"] = outcome.pseudo_grad_norm
            within_round = outcome.losses(self.settings.log.every_updates)
            # By the trainer's updates since the run began, not since the round did.
            line["train_losses"] = [
                (measured["updates_before"] + updates, loss) for updates, loss in within_round
            ]
            self._newest[line["trainer"]] = line
            self.ledger.write(
                "round",
                **line,
                step_s=round(metrics.step_s, 6),
                stall_s=round(metrics.stall_s, 6),
            )
            if line["skipped_updates"]:
                self.ledger.write(
                    "fault",
                    kind="skipped_updates",
                    round=line["round"],
                    trainer=line["trainer"],
                    updates=line["skipped_updates"],
                )
            for note in describe_growth(line, decision, self.settings.batching):
                self.progress.note(note)
        for change in boundary.changes:
            self.ledger.write(**change)
            note = describe_change(change)
            if note:
                self.progress.note(note)

    def show(self, state: State, boundary: Boundary) -> None:
        """Write a line about the round to the terminal, with the last measured held-out loss.

        Called after rounds of the slowest trainer alone, with the arguments of an observer. The
        speed is that of all rounds since the last call.
        """
        control = state.control
        text = describe_round(
            [self._newest[trainer] for trainer in sorted(self._newest)],
            heldout=self.loss,
            num_trainers=len(control.trainers),
            pool=self.settings.ensemble.num_workers,
        )
        for trainer in self._newest.keys() - control.trainers.keys():  # trainers that have left
            del self._newest[trainer]
        tokens_per_s = self._unshown_tokens / max(self._unshown_s, 1e-9)  # never divided by zero
        self._unshown_tokens = 0
        self._unshown_s = 0.0
        speed = f"{tokens_per_s:,.0f} tok/s"
        share_of_peak = tokens_per_s / self.most_tokens_per_s
        if share_of_peak > 0:  # false of NaN: the peak is not known
            speed += f" ({share_of_peak:.0%} of the peak)"
        share_done = self.settings.share_done(control.round, control.tokens_total)
        self.progress.round(control.round, share_done, text, speed)

    def record(self) -> dict:
        """Return what a checkpoint stores: the last loss and the run's seconds; sync the ledger.

        The ledger's lines must be on disk before a checkpoint that follows them. Raises
        ResourceError if the disk fails.
        """
        if processes.is_first():
            self.ledger.sync()
        loss = None
        if np.isfinite(self.loss):
            loss = self.loss
        return {"loss": loss, "wall_s": self.wall_s()}

    def wall_s(self) -> float:
        """Return the seconds that the run has taken so far, in this process and earlier ones."""
        return round(time.perf_counter() - self.start_s, 3)

    def write_memory(self, control: Control) -> None:
        """Write to the ledger the peak memory of this process and of its devices so far."""
        unit_bytes = 1024  # of `ru_maxrss`: Linux counts KiB
        if sys.platform == "darwin":  # macOS counts bytes
            unit_bytes = 1
        host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        device_peaks = []  # None of a device that does not count, such as a CPU
        for device in self.engine.programs.spec.machine.local_devices:
            stats = device.memory_stats() or {}
            device_peaks.append(stats.get("peak_bytes_in_use"))
        self.ledger.write(
            "memory",
            round=control.round,
            host_peak_bytes=host_peak * unit_bytes,
            device_peak_bytes=device_peaks,
        )

    def write_end(self, control: Control, reason: str) -> None:
        """Write a line on memory, and the `end` line.

        Its `reason` is "finished", "preempted" or "diverged". `control` has what the run has spent.
        """
        self.write_memory(control)
        line: dict[str, Any] = {"reason": reason, "rounds": control.round, **_totals(control)}
        if self.seconds:  # none if no round was left to run in this process
            line["tokens_per_s"] = round(self.tokens / self.seconds, 1)
        self.ledger.write("end", **line, wall_s=self.wall_s())


def _decision_fields(decision: Decision, inner: InnerSettings) -> dict:
    """Return the fields of a `round` line that say what a trainer does next, and why.

    `decision` is the outcome of the trainer's batch-size test.
    """
    fields = decision._asdict()
    size = fields.pop("size")  # of the next round; the other fields keep their names
    fields["next_workers"] = size.num_workers
    fields["next_steps_per_round"] = None  # a rule finds it when the round begins
    if inner.round_length == "fixed":
        # `round_length` of a size counts in multiples of the setting.
        fields["next_steps_per_round"] = size.round_length * inner.steps_per_round
    fields["next_batch_size"] = size.batch_size
    return fields


def _totals(control: Control) -> dict[str, int]:
    """Return the fields of an `eval` or `end` line that say what the run has spent so far."""
    return {
        "tokens_total": control.tokens_total,
        "bytes_total": control.bytes_total,
        "syncs_total": control.syncs_total,
        "updates_total": control.updates_total,
    }


@dataclass
class Evaluator:
    """Measures and records the held-out loss of each trainer and of the consensus model.

    `outer.average` keeps a running average of each trainer's parameters over its rounds. If it is
    set, the averages are evaluated in place of the parameters.
    """

    recorder: Recorder
    num_classes: int | None  # number of classes of labelled rows; None for text
    unit: str  # unit of the loss
    # Continues a held-out text with a model (`samples.sampler`); None: no evaluation has a sample.
    sample: Callable[[PyTree, PyTree], tuple[str, str]] | None = None
    params: PyTree | None = None  # parameters of the last consensus model
    _since_s: float = 0.0  # when the last loss was recorded, or the evaluation began

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Evaluate if due by `eval.every_rounds`, and at the end; then show the round."""
        if not boundary.advanced:  # only trainers ahead of the slowest have ended a round
            return
        recorder = self.recorder
        control = state.control
        is_due = control.round % recorder.settings.eval.every_rounds == 0
        if is_due or is_over(control, recorder.settings):
            self._since_s = time.perf_counter()
            losses = []  # of each trainer
            ensemble = evaluate.reported(state.ensemble)  # with averaged parameters, if there are
            for position, trainer in enumerate(control.trainers):
                params = evaluate.trainer_params(ensemble, position)
                loss = self._loss(params)
                losses.append(loss)
                self._record(control, trainer, params, loss)
            self.choose_consensus(state, losses)
            recorder.write_memory(control)
        recorder.show(state, boundary)

    def choose_consensus(self, state: State, losses: Sequence[float] = ()) -> None:
        """Choose the consensus and measure its loss; record it if given the trainers' losses.

        The parameters are stored in `params`, the loss in the recorder.

        Args:
          state: The state after a round.
          losses: Those of all trainers, in their order. Empty: nothing is written, as before the
            export of a run whose rounds have all ended.
        """
        recorder = self.recorder
        engine = recorder.engine
        self.params, source = evaluate.consensus(
            evaluate.reported(state.ensemble),
            engine.programs,
            engine.heldout,
            state.control.demands,  # in an average, what trainers weigh: the batch they ask for
        )
        if losses and source == "only":  # the consensus is the only trainer, which was measured
            recorder.loss = losses[0]
        else:
            recorder.loss = self._loss(self.params)
        if not losses:
            return
        own_fields: dict[str, Any] = {"source": source}
        if self.sample is not None:
            # Frozen weights, as the program that measures losses has them on the devices.
            base = engine.programs.frozen(evaluate.loss_key(engine.heldout.batch_size))
            start, text = self.sample(self.params, base)
            own_fields["sample"] = (start, text)
            recorder.progress.note(f"  | {start} -> {text}")
        self._record(state.control, "consensus", self.params, recorder.loss, own_fields)
        recorder.evaluated_round = state.control.round

    def _loss(self, params: PyTree) -> float:
        """Measure the loss of a model on the held-out rows that reports use."""
        engine = self.recorder.engine
        heldout = engine.heldout
        return evaluate.mean_loss(engine.programs, params, heldout.report_rows, heldout.batch_size)

    def _record(
        self,
        control: Control,
        trainer: int | str,
        params: PyTree,
        loss: float,
        own_fields: dict[str, Any] | None = None,
    ) -> None:
        """Write the `eval` line of a trainer (an id) or of "consensus"; measure a classifier.

        `params` are those of the model, `loss` its held-out loss, and `own_fields` what only the
        line of the consensus has: its source, and perhaps a sample.
        """
        line: dict[str, Any] = {"round": control.round, "trainer": trainer, "loss": loss}
        line.update(_totals(control))
        if own_fields is not None:
            line.update(own_fields)
        if self.unit == "nats/token":
            with np.errstate(over="ignore"):  # infinity becomes null in the ledger
                line["perplexity"] = float(np.exp(loss))
        if self.num_classes is not None:
            engine = self.recorder.engine
            scores = evaluate.class_report(
                engine.programs,
                params,
                engine.heldout.report_rows,
                engine.heldout.batch_size,
                self.num_classes,
            )
            line.update(scores)
        average = self.recorder.settings.outer.average
        if average:
            line["average"] = average
        now_s = time.perf_counter()
        line["eval_s"] = round(now_s - self._since_s, 6)
        self._since_s = now_s
        self.recorder.ledger.write("eval", **line, wall_s=self.recorder.wall_s())


@dataclass
class Checkpoints:
    """Saves a run after each round at which a checkpoint is due; at a signal, saves and ends it."""

    recorder: Recorder
    saver: Saver
    stop: Callable[[], bool]  # whether the process has received a signal
    host: Callable[[State], dict]  # returns the host's part of a checkpoint, as plain JSON
    _last_save_s: float = field(default_factory=time.perf_counter)

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Save if due by `CheckpointSettings`, at the end, and after a signal.

        Raises Preempted after a signal, once everything is saved, and ResourceError if a save
        failed.
        """
        # A checkpoint is named after the slowest trainer's round, which has not ended here.
        if not boundary.advanced:
            return
        settings = self.recorder.settings
        index = state.control.round
        last = is_over(state.control, settings)
        every = settings.checkpoint.every_rounds  # None: only by the clock
        # If one process was asked to stop, or finds that it is time, all save: each has a part of
        # the arrays. "boundary" names the exchange, apart from those of the thread that saves.
        asked = processes.gather([self.stop(), self._is_save_time()], "boundary")
        stop_now = any(stop for stop, _ in asked)
        save_by_clock = any(is_time for _, is_time in asked)
        # With learners the first round is saved at once: joining and compiling took long, and a
        # driver that is killed should not begin anew.
        is_first = index == 1 and settings.engine.kind != "local"
        is_due = every is not None and index % every == 0
        if last or is_first or save_by_clock or is_due:
            self._save(state)
        if last:
            self.saver.wait()
            self.recorder.write_end(state.control, "finished")
        elif stop_now:
            self.end_by_signal(state)

    def end_by_signal(self, state: State, *, within: bool = False) -> NoReturn:
        """Save a state unless it has been saved, write the `end` line, and raise Preempted.

        `within`: the signal came within the next round, whose programs may have taken (donated) the
        memory of the state's arrays. Then nothing is saved, and the last checkpoint counts. Raises
        ResourceError if a save failed.
        """
        index = state.control.round
        folder = self.saver.folder
        self.saver.wait()  # so that a save that is under way is in the list below
        # A donated array is deleted.
        is_whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.ensemble))
        # Round 0 has nothing to save: a run that is resumed without a checkpoint begins again.
        if index and is_whole and index not in checkpoint.list_rounds(folder):
            self._save(state)
        self.saver.wait()
        self.recorder.write_end(state.control, "preempted")
        when = f"after round {index}"
        if within:
            when = f"within round {index + 1}"
        saved = checkpoint.describe_newest(folder)
        raise Preempted(f"{folder.parent}: stopped by a signal {when}; {saved}")

    def _is_save_time(self) -> bool:
        """Whether this is process 0, and a save is due by the clock (`checkpoint.every_s`).

        Raises ResourceError if the last save has failed.
        """
        self.saver.wait(only_if_ended=True)
        due_s = self._last_save_s + self.recorder.settings.checkpoint.every_s
        return processes.is_first() and time.perf_counter() >= due_s

    def _save(self, state: State) -> None:
        """Begin to save a state, with the held-out loss if this was measured after its round.

        Raises ResourceError if the last save failed or this one cannot begin.
        """
        recorder = self.recorder
        index = state.control.round
        # The clock for the next save starts here, however long this one takes.
        self._last_save_s = time.perf_counter()
        # Raises if the last save failed, before `complete` asks the learners for their states.
        self.saver.wait()
        loss = None
        if recorder.evaluated_round == index and np.isfinite(recorder.loss):
            loss = recorder.loss
        self.saver.save(index, recorder.engine.complete(state), self.host(state), loss=loss)


def on_compile(ledger: Ledger, progress: Progress, event: Compiling | Compiled) -> None:
    """Show a compilation beside the bar, and write a line about it to the ledger at its end.

    The line says whether the program was loaded from the cache on disk (a "hit"), and whether a
    thread compiled it in the background while rounds ran.
    """
    progress.compiling(event)
    if isinstance(event, Compiled):
        ledger.write(
            "compile",
            key=str(event.key),
            seconds=round(event.seconds, 3),
            cache="hit" if event.hit else "miss",
            where="background" if event.background else "foreground",
            needed_bytes=event.needed_bytes,
        )


def write_start(
    run: Run,
    ledger: Ledger,
    control: Control,
    damage: list[str],
    faults: Sequence[dict],
    *,
    start_s: float,
    stall_s: float,
) -> None:
    """Write the `start` line, and a `fault` line for each damaged checkpoint and failure.

    Args:
      run: What the attempts share.
      ledger: The open ledger.
      control: The host's data about the run before its next round.
      damage: A line on each damaged checkpoint.
      faults: Of failures of earlier attempts, the fields of their lines.
      start_s: Seconds of this process until here.
      stall_s: Those of them that it waited for compilation.
    """
    settings = run.settings
    spec = run.spec
    heldout = run.heldout
    ledger.write(
        "start",
        time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        run=run.workdir.resolve().name,
        command=run.command,
        config=settings.model_dump(),
        num_params=spec.num_params,
        state_bytes=spec.state_bytes._asdict(),
        attention=spec.attention,
        devices=spec.machine.describe(),
        jax=jax.__version__,
        versions=versions(),
        data_fingerprint=run.corpus.fingerprint,
        tokens_per_byte=run.corpus.tokens_per_byte,
        loss_unit=run.unit,
        own=run.own,
        heldout_rows=heldout.report_E.tolist(),
        guard_rows=heldout.guard_E.tolist(),
        round=control.round,
        max_batch_size=control.max_batch_size,
        start_s=round(start_s, 3),
        stall_s=round(stall_s, 3),
        buckets=settings.batching.buckets,
    )
    for line in damage:
        ledger.write("fault", kind="checkpoint", round=control.round, cause=line)
    for fault in faults:
        ledger.write("fault", **fault)
