"""What watches a run: its ledger, evaluation, terminal, checkpoints and compilation ahead of time.

Observers are called after every round, in the order that `training` declares. Each sees the state
of the boundary it is called at; what they make of it changes nothing in the run.
"""

import dataclasses
import faulthandler
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from adloco_jax.adloco import (
    Boundary,
    Control,
    Decision,
    Observer,
    State,
    after_merge,
    choose_members,
    is_over,
    merge_due,
    round_plan,
    share_done,
)
from adloco_jax.batch_sizes import measures_gradients
from adloco_jax.core.batching import next_batch_size
from adloco_jax.errors import CheckpointError, Preempted, ResourceError
from adloco_jax.run import checkpoint, evaluate, processes
from adloco_jax.run.batches import classes, round_keys
from adloco_jax.run.checkpoint import Saver
from adloco_jax.run.crashpoints import hit
from adloco_jax.run.engine import LocalEngine
from adloco_jax.run.health import consensus_weights
from adloco_jax.run.ledger import Ledger
from adloco_jax.run.programs import Key, Spec, measured_peaks
from adloco_jax.run.progress import Progress
from adloco_jax.run.throughput import flops_per_token, matmul_flops_per_s
from adloco_jax.settings import Settings


@dataclass
class Watch:
    """What the observers of one run share."""

    settings: Settings
    engine: LocalEngine
    ledger: Ledger
    progress: Progress
    workdir: Path
    num_classes: int | None
    start_s: float  # on the process's clock, earlier by what the run has taken before
    loss: float = float("nan")  # of the last consensus, on the reported rows
    consensus: PyTree | None = None
    evaluated_round: int = -1

    @property
    def spec(self) -> Spec:
        """What the programs of the run share."""
        return self.engine.spec

    def wall_s(self) -> float:
        """Seconds of the run so far, of all its processes one after the other."""
        return round(time.perf_counter() - self.start_s, 3)

    def share_of_matmul(self, tokens_per_s: float) -> float:
        """Of the rate that the machine's own matrix product reaches."""
        machine = matmul_flops_per_s(self.settings.model.dtype)
        return round(tokens_per_s * flops_per_token(self.spec.params) / machine, 3)


@dataclass
class Recorder:
    """Writes a round's lines: at the next boundary, when its losses are known without waiting.

    Where something else of a boundary is to be recorded after them, they are waited for.
    """

    watch: Watch
    tokens: int = 0  # of the rounds of this process
    seconds: float = 0.0
    unshown: tuple[int, dict, float] | None = None  # a recorded round, for the terminal
    _last_end_s: float = field(default_factory=time.perf_counter)
    _pending: tuple[Boundary, float] | None = None  # with how much of the run was done

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Records the round before, and this one with what happened at its boundary."""
        self._write_pending(state)
        self._pending = (
            boundary,
            share_done(state.control.round, state.control.tokens_total, self.watch.settings),
        )
        for line, decision in zip(boundary.metrics.lines, boundary.decisions, strict=True):
            if decision.next_batch_size != line["requested_batch_size"]:
                self.watch.progress.note(_batch_note(line, decision))
        hit("round.decided")
        if self.watch.engine.events or boundary.merged:
            self.flush(state)

    def flush(self, state: State) -> None:
        """Records all that has happened up to this boundary; waits for its round."""
        watch, pending = self.watch, self._pending
        self._write_pending(state)
        self.write_events()
        if pending is not None and pending[0].merged is not None:
            merged = dict(pending[0].merged)
            watch.ledger.write(merged.pop("event"), **merged)
            watch.progress.note(_merge_note(merged, watch.settings.merge.max_barrier))

    def write_events(self) -> None:
        """Records what the engine has done beside its rounds."""
        for event, fields, note in self.watch.engine.events:
            self.watch.ledger.write(event, **fields)
            if note:
                self.watch.progress.note(note)
        self.watch.engine.events.clear()

    def _write_pending(self, state: State) -> None:
        if self._pending is None:
            return
        boundary, share = self._pending
        metrics, watch = boundary.metrics, self.watch
        if metrics.noted is None:
            watch.engine.settled(state)
        self._pending = None
        end_s = metrics.end_s.result()
        began_s = max(metrics.start_s, self._last_end_s)
        step_s = end_s - began_s
        self._last_end_s = end_s
        tokens = sum(line["tokens"] for line in metrics.lines)
        # Of waiting for compilation, what passed while the round before was under way is not in it.
        waited_s = metrics.start_s + metrics.stall_s - began_s
        self.seconds += step_s - max(waited_s, 0.0)
        self.tokens += tokens
        outcomes, noted = metrics.outcomes, metrics.noted or []
        for line, decision, outcome, counts in zip(
            metrics.lines, boundary.decisions, outcomes, noted, strict=True
        ):
            watch.ledger.write(
                "round",
                **line,
                **decision._asdict(),
                train_loss=outcome.mean_loss,
                pseudo_grad_norm=outcome.pseudo_grad_norm,
                **counts,
                step_s=round(step_s, 6),
                stall_s=round(metrics.stall_s, 6),
            )
            if skipped := counts["skipped_updates"]:
                where = {"round": line["round"], "trainer": line["trainer"]}
                watch.ledger.write("fault", kind="skipped_updates", **where, updates=skipped)
                watch.progress.note(
                    f"round {line['round']}: trainer {line['trainer']} skipped {skipped} updates"
                    " whose loss or gradient was not finite"
                )
        losses = [outcome.mean_loss for outcome in outcomes]
        fields = {
            "loss": float(np.mean([loss for loss in losses if np.isfinite(loss)] or [np.nan])),
            "heldout": None,
            "trainers": len(losses),
            "batch": [line["requested_batch_size"] for line in metrics.lines],
            "accum": [line["num_accum_steps"] for line in metrics.lines],
            "tokens/s": tokens / step_s,
            "of_matmul": watch.share_of_matmul(tokens / step_s),
        }
        self.show()
        self.unshown = metrics.round, fields, share

    def show(self) -> None:
        """Shows the recorded round, if it is not shown yet, with the held-out loss so far."""
        if self.unshown is not None:
            index, fields, share = self.unshown
            heldout = None if np.isnan(self.watch.loss) else self.watch.loss
            self.watch.progress.round(index, fields | {"heldout": heldout}, share_done=share)
            self.unshown = None

    def write_end(self, control: Control, reason: str) -> None:
        """Records that the run ends, or this process's part of it."""
        watch = self.watch
        watch.ledger.write("memory", round=control.round, **measured_peaks())
        speed = {}
        if self.seconds:
            rate = self.tokens / self.seconds
            speed = {
                "tokens_per_s": round(rate, 1),
                "share_of_matmul": watch.share_of_matmul(rate),
            }
        totals = {"rounds": control.round, **_totals(control)}
        watch.ledger.write("end", reason=reason, **totals, **speed, wall_s=watch.wall_s())


def _totals(control: Control) -> dict[str, int]:
    names = ("tokens_total", "bytes_total", "syncs_total", "updates_total")
    return {name: getattr(control, name) for name in names}


@dataclass
class Evaluator:
    """Records the held-out loss of each trainer and of the consensus, every so many rounds."""

    watch: Watch
    recorder: Recorder

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Evaluates this boundary's state, if that is due; waits for its round."""
        watch, control = self.watch, state.control
        is_due = control.round % watch.settings.eval.every_rounds == 0
        if not (is_due or is_over(control, watch.settings)):
            self.recorder.show()
            return
        self.recorder.flush(state)
        state = watch.engine.settled(state)
        for position, trainer in enumerate(control.trainers):
            params = evaluate.trainer_params(state.ensemble, position)
            self._record(control, trainer.id, params)
        hit("eval.trainers")
        self.consensus(state, record=True)
        watch.ledger.write("memory", round=control.round, **measured_peaks())
        self.recorder.show()

    def consensus(self, state: State, *, record: bool = False) -> None:
        """Finds the consensus, which the watch keeps with its loss."""
        watch, heldout = self.watch, self.watch.engine.heldout
        weights = consensus_weights(state.control)
        watch.consensus, source = evaluate.consensus(
            state.ensemble, watch.engine.programs, heldout, weights
        )
        if record:
            watch.loss = self._record(state.control, "consensus", watch.consensus, source=source)
            watch.evaluated_round = state.control.round
        else:
            watch.loss = self._mean_loss(watch.consensus)

    def _mean_loss(self, params: PyTree) -> float:
        engine = self.watch.engine
        rows, size = engine.heldout.report_EL, engine.heldout.batch_size
        return evaluate.mean_loss(engine.programs, params, rows, size)

    def _record(self, control: Control, trainer: int | str, params: PyTree, **more: Any) -> float:
        watch, heldout = self.watch, self.watch.engine.heldout
        loss = self._mean_loss(params)
        if watch.num_classes is None:
            with np.errstate(over="ignore"):  # not finite: null in the ledger
                more["perplexity"] = float(np.exp(loss))
        else:
            more |= evaluate.class_report(
                watch.engine.programs,
                params,
                heldout.report_EL,
                heldout.batch_size,
                watch.num_classes,
            )
        watch.ledger.write(
            "eval",
            round=control.round,
            trainer=trainer,
            loss=loss,
            **_totals(control),
            **more,
            wall_s=watch.wall_s(),
        )
        return loss


class Checkpoints:
    """Saves the boundary's own state when that is due or at a signal, which then stops the run."""

    def __init__(
        self,
        watch: Watch,
        recorder: Recorder,
        saver: Saver,
        stop: Callable[[], bool],
        host: Callable[[State], dict],
    ):
        """Starts the clock of the next save.

        Args:
          watch: Of the run.
          recorder: Writes down what has happened before a state is saved.
          saver: Writes the files.
          stop: Whether the process has received a signal.
          host: What is saved of a state beside its arrays, as plain JSON.
        """
        self.watch, self.recorder, self.saver = watch, recorder, saver
        self._stop, self._host = stop, host
        self._last_save_s = time.perf_counter()
        self._vote = self._ask()

    def __call__(self, state: State, boundary: Boundary) -> None:
        """Saves, if that is due, and ends the run at a signal.

        Raises:
          Preempted: After a signal, once everything is saved.
          ResourceError: If a save has failed, and the config says to stop then.
        """
        watch, index = self.watch, state.control.round
        last, every = is_over(state.control, watch.settings), watch.settings.checkpoint.every_rounds
        stop_now, save_by_clock = self._vote.read()
        if last or stop_now or save_by_clock or (every and index % every == 0):
            self._save(state)
        if stop_now and not last:
            self.settle(index)
            self.recorder.write_end(state.control, "preempted")
            saved = checkpoint.last(watch.workdir / "checkpoints")
            raise Preempted(
                f"{watch.workdir}: stopped by a signal after round {index}; {saved}; the same"
                " command goes on from there"
            )
        if last:
            self.settle(index)
            self.recorder.write_end(state.control, "finished")
        else:
            self._vote = self._ask()

    def _ask(self) -> processes.Vote:
        """Asks all processes, before the next round is dispatched; alone, when it is read."""
        return processes.Vote(lambda: [self._stop(), self._is_time()])

    def _is_time(self) -> bool:
        """Whether a checkpoint is due by now; also looks after the one before."""
        self.settle(wait=False)
        due_s = self._last_save_s + self.watch.settings.checkpoint.every_s
        return processes.is_first() and time.perf_counter() >= due_s

    def _save(self, state: State) -> None:
        self._last_save_s = time.perf_counter()
        self.recorder.flush(state)
        index = state.control.round
        self.settle(index)
        state = self.watch.engine.settled(state)
        evaluated = self.watch.loss if self.watch.evaluated_round == index else None
        known = evaluated is not None and np.isfinite(evaluated)
        try:
            self.saver.save(
                index, state.ensemble, self._host(state), loss=evaluated if known else None
            )
        except (CheckpointError, ResourceError) as error:
            self._failed(error, index)

    def settle(self, round_index: int = 0, *, wait: bool = True) -> None:
        """Raises, or records, what a save that is over has raised; by default waits for it."""
        try:
            if wait:
                self.saver.wait()
            else:
                self.saver.check()
        except (CheckpointError, ResourceError) as error:
            self._failed(error, round_index)

    def _failed(self, error: CheckpointError | ResourceError, round_index: int) -> None:
        if self.watch.settings.checkpoint.on_save_error == "stop":
            raise error
        self.watch.ledger.write("fault", kind="save", round=round_index, cause=str(error))
        self.watch.progress.note(str(error))


def prefetch(watch: Watch) -> Observer:
    """Compiles the programs that coming rounds need in the background, the soonest first."""

    def observe(state: State, boundary: Boundary) -> None:
        if not is_over(state.control, watch.settings):
            keys = programs_ahead(state.control, watch.settings, watch.engine.spec)
            watch.engine.programs.prefetch(keys)

    return observe


def watchdog(seconds: float) -> Observer:
    """Ends the process, with where each thread stood, if no round ends for so long."""

    def observe(state: State, boundary: Boundary) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True)

    return observe


def programs_ahead(control: Control, settings: Settings, spec: Spec) -> list[Key]:
    """The programs of the next round, and of the one after that if batches grow as far as they may.

    Each after the merge that may come before it, as the guard's losses would have it if all were
    alike.
    """
    keys = _keys(control, settings, spec)
    later = dataclasses.replace(control, round=control.round + 1)
    last = is_over(later, settings)
    if settings.outer.leaves_unsynchronised:
        owed = range(len(later.trainers)) if last else _members(later, settings)
        keys += [group.key("flush") for group in classes(later, owed, spec.model_shards)]
    batching = settings.batching
    if not last and measures_gradients(settings):
        for growth in (batching.max_growth, 1):
            grown = [
                dataclasses.replace(
                    trainer,
                    requested_batch_size=next_batch_size(
                        growth * trainer.requested_batch_size,
                        batch_size=trainer.requested_batch_size,
                        max_growth=growth,
                        batch_cap=batching.batch_cap,
                    ),
                )
                for trainer in later.trainers
            ]
            ahead = dataclasses.replace(later, trainers=grown)
            if members := _members(ahead, settings):
                ahead, _ = after_merge(ahead, members, settings)
            keys += _keys(ahead, settings, spec)
    return list(dict.fromkeys(keys))


def _members(control: Control, settings: Settings) -> tuple[int, ...]:
    """Who merges at a control's boundary, if anybody, were all guard losses alike."""
    if not merge_due(control, settings):
        return ()
    return choose_members(control, [0.0] * len(control.trainers), settings)


def _keys(control: Control, settings: Settings, spec: Spec) -> list[Key]:
    plans = {m: round_plan(control, m, settings) for m in range(len(control.trainers))}
    return round_keys(control, plans, settings, spec)


def _batch_note(line: dict, decision: Decision) -> str:
    why = {
        "grew": "the test asks for {:.1f}",
        "shrank": "the test asks for {:.1f}",
        "capped": "the test asks for {:.1f}, held by max_growth or batch_cap",
        "signal": "no signal above the noise yet, one step of growth",
        "schedule": "as declared",
    }[decision.reason].format(decision.test_value or 0.0)
    return (
        f"round {line['round']}: trainer {line['trainer']} batch per worker"
        f" {line['requested_batch_size']} -> {decision.next_batch_size} ({why})"
    )


def _merge_note(event: dict, max_barrier: float | None) -> str:
    if "action" in event:
        return (
            f"round {event['round']}: merging trainers {event['members']} would raise the loss by"
            f" {event['barrier']:.4f} nats/token, more than merge.max_barrier={max_barrier}:"
            f" {event['action']}"
        )
    losses = ", ".join(f"{loss:.4f}" for loss in event["loss_before"])
    return (
        f"round {event['round']}: trainers {event['members']} merge into {event['into']}, held-out"
        f" loss {losses} -> {event['loss_after']:.4f}; workers {event['workers']}"
    )
