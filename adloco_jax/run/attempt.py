"""One attempt at a run: restored from its newest checkpoint, trained to its end or to a failure."""

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from adloco_jax import __version__
from adloco_jax.core.types import Ensemble, init, of_owners
from adloco_jax.data.files import shard_changes
from adloco_jax.engine import evaluate
from adloco_jax.engine.inputs import Rows, programs_ahead
from adloco_jax.engine.local import LocalEngine
from adloco_jax.engine.programs import Compiled, Programs, placement
from adloco_jax.engine.spec import ProgramKey, Spec
from adloco_jax.errors import CheckpointError, DataError, DivergedError, ResourceError
from adloco_jax.loop.adloco import (
    Control,
    Diverged,
    Observer,
    State,
    adloco,
    start,
)
from adloco_jax.loop.plans import is_over, share_done
from adloco_jax.run import checkpoint, observers, processes, resume
from adloco_jax.run.build import InitFn, attention
from adloco_jax.run.checkpoint import Saver
from adloco_jax.run.ledger import START, Ledger, cut, finish, read
from adloco_jax.run.plan import max_batch_size, run_header
from adloco_jax.run.progress import Progress
from adloco_jax.run.trackers import Trackers
from adloco_jax.settings import Settings


@dataclass(frozen=True)
class Run:
    """What all attempts at a run share."""

    settings: Settings
    spec: Spec
    corpus: Rows
    heldout: evaluate.HeldOut
    workdir: Path
    command: str
    accept_data_change: bool
    init_fn: InitFn
    params: PyTree | None  # that trainers start from; None: drawn by `init_fn`
    num_classes: int | None  # of labelled rows
    unit: str  # of the loss; empty for a plain number


@dataclass(frozen=True)
class Failures:
    """Faults of the attempts so far, and what the next one does differently."""

    faults: tuple[dict, ...] = ()  # to record
    max_batch_size: int | None = None  # after memory ran out
    round: int | None = None  # before which the last one failed


@dataclass
class Attempt:
    """A run that is ready to train."""

    state: State
    ended: bool  # according to its ledger
    recorder: observers.Recorder
    evaluator: observers.Evaluator
    checkpoints: observers.Checkpoints


def begin(
    run: Run, stack: contextlib.ExitStack, stop: threading.Event, failures: Failures
) -> Attempt:
    """Restores the newest checkpoint, or starts from the beginning if there is none.

    Args:
      run: What to run.
      stack: Closes what is opened here.
      stop: Set at a signal.
      failures: Of the attempts before this one.

    Raises:
      UserError: See `train`.
    """
    settings, spec, start_s = run.settings, run.spec, time.perf_counter()
    restored, damage, end = _restore(run)
    host = restored.host if restored else {"ledger": START, "wall_s": 0.0, "loss": None}
    num_rounds = settings.num_rounds if settings.num_tokens is None else None
    progress = Progress(num_rounds, every=settings.log.every_rounds)
    stack.callback(progress.close)
    begins_again = restored is None and not failures.faults
    begins_again = begins_again and (run.workdir / "ledger.jsonl").exists()
    ledger = processes.run_on_all(lambda: _open_ledger(run, stack, host["ledger"], progress))
    programs = Programs(spec, lambda compiled: ledger.write("compile", **_compile_fields(compiled)))
    stack.callback(programs.close)
    control = _control(run, restored, programs, failures.max_batch_size)
    heldout = dataclasses.replace(run.heldout, batch_size=control.eval_batch_size)
    engine = LocalEngine(settings, spec, programs, run.corpus, heldout)
    engine.underway = control
    began_s = start_s - host["wall_s"]
    loss = float("nan") if host["loss"] is None else host["loss"]
    recorder = observers.Recorder(settings, engine, ledger, progress, began_s, loss)
    ended = bool(end) and share_done(end["rounds"], end["tokens_total"], settings) >= 1
    ended = ended and is_over(control, settings)
    if not ended:  # a finished run whose checkpoint is damaged trains again
        _write_start(run, ledger, control, damage, failures.faults)
    notes = [f"damaged, and set aside: {line}" for line in damage]
    notes += [f"resuming after round {control.round}"] if control.round else []
    notes += ["stopped before its first save: the run begins again"] if begins_again else []
    notes.append(run.heldout.describe(run.num_classes))
    for line in [*notes, *run_header(settings, spec, control.max_batch_size)]:
        progress.note(line)
    progress.resume(share_done(control.round, control.tokens_total, settings))
    ensemble = restored.state.ensemble if restored else _initial_ensemble(run, control)

    saver = Saver(
        run.workdir / "checkpoints",
        keep=settings.checkpoint.keep,
        on_saved=lambda saved: ledger.write("checkpoint", **saved),
    )
    stack.callback(saver.close)
    evaluator = observers.Evaluator(recorder, run.num_classes, run.unit)
    checkpoints = observers.Checkpoints(
        recorder, saver, stop.is_set, lambda state: _host(run, recorder, state)
    )
    return Attempt(State(ensemble, control), ended, recorder, evaluator, checkpoints)


def execute(run: Run, attempt: Attempt) -> State:
    """Runs all remaining rounds; the attempt's observers then have the consensus and its loss.

    Raises:
      DivergedError: If every trainer's loss is not finite.
      Exception: Whatever a round raises; `after_failure` says if another attempt may succeed.
    """
    settings, engine, state = run.settings, attempt.recorder.engine, attempt.state
    if is_over(state.control, settings):
        attempt.evaluator.consensus(state)
        if not attempt.ended:
            attempt.recorder.write_end(state.control, "finished")
        return state
    observe: list[Observer] = [attempt.recorder, attempt.evaluator, attempt.checkpoints]
    with contextlib.ExitStack() as stack:
        if settings.checkpoint.watchdog_s is not None:
            stack.callback(faulthandler.cancel_dump_traceback_later)
            faulthandler.dump_traceback_later(settings.checkpoint.watchdog_s, exit=True)
            observe.insert(0, observers.watchdog(settings.checkpoint.watchdog_s))
        ahead = programs_ahead(state.control, settings, run.spec)
        engine.programs.prefetch([*ahead, evaluate.loss_key(engine.heldout.batch_size)])
        try:
            return adloco(state, settings=settings, engine=engine, observers=observe)
        except Diverged as error:
            attempt.recorder(error.state, error.boundary)
            saved = _last_checkpoint(run, attempt)
            attempt.recorder.write_end(error.state.control, "diverged")
            raise DivergedError(
                f"{error}: the loss of every trainer is not finite; {saved}; try a"
                " lower inner.learning_rate, a warm-up (inner.warmup_updates) or inner.clip_norm"
            ) from None


def after_failure(
    run: Run, attempt: Attempt, error: jax.errors.JaxRuntimeError | OSError, before: Failures
) -> Failures:
    """Decides what the next attempt records and changes.

    Raises:
      ResourceError: If memory is exhausted at a micro-batch of one sequence, or this process is one
        of several, which all restart.
      Exception: The error itself, if the same round has failed before.
    """
    control = attempt.recorder.engine.underway
    index, size = control.round + 1, control.max_batch_size
    cause = " ".join(str(error).split())[:300]
    exhausted = "RESOURCE_EXHAUSTED" in str(error)
    if exhausted and size == 1:
        raise ResourceError(
            f"round {index}: out of memory at a micro-batch of 1: {cause}; use fewer workers, a"
            " smaller model or shorter sequences, or model.remat"
        ) from error
    if jax.process_count() > 1:
        mend = (
            f"; set batching.max_batch_size to {size // 2} in all (--accept-config-change)"
            if exhausted
            else ""
        )
        raise ResourceError(
            f"round {index}: process {jax.process_index()} failed ({cause}){mend}; all start again"
            f" from the newest checkpoint: {_last_checkpoint(run, attempt)}"
        ) from error
    if not exhausted and control.round == before.round:
        raise error
    note = f"round {index} failed ({cause}); restoring the newest checkpoint"
    fault, largest = {"kind": "round_failed", "round": index, "cause": cause}, before.max_batch_size
    if exhausted:
        largest = size // 2
        note += f" with max_batch_size {largest} (was {size}); batches may differ from there on"
        fault |= {"kind": "out_of_memory", "max_batch_size_before": size, "max_batch_size": largest}
        fault["effect"] = "batches may differ from the restored round on"
    attempt.recorder.progress.note(note)
    return Failures((*before.faults, fault), largest, control.round)


def versions() -> dict[str, str]:
    """Versions of everything that may change a run's bits, by name."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax.checkpoint", "numpy")
    installed = {name: metadata.version(name.replace(".", "-")) for name in packages}
    return {"adloco_jax": __version__, "python": platform.python_version(), **installed}


def _restore(run: Run) -> tuple[resume.Restored | None, list[str], dict | None]:
    """The newest whole checkpoint, what is damaged in newer ones, and the ledger's `end` line."""
    folder, path = run.workdir / "checkpoints", run.workdir / "ledger.jsonl"
    found = checkpoint.newest(folder, lambda at: resume.read_state(at, run.settings, run.spec))
    restored, damage = found or (None, [])
    events = read(path) if path.exists() else []
    processes.gather(None)  # all have read what the first one is about to change
    if restored is None and any(event["event"] == "checkpoint" for event in events):
        raise CheckpointError(
            f"{folder}: the checkpoints that {path.name} records are gone; restore them from a"
            " copy, or name another folder"
        )
    recorded = restored.host["data"] if restored and not run.accept_data_change else None
    if recorded and recorded["fingerprint"] != run.corpus.fingerprint:
        changes = shard_changes(recorded["shards"], list(run.corpus.shards))
        advice = (
            f"{run.workdir}: the data are not those that this run began with; restore them, or"
            " --accept-data-change to resume with these"
        )
        raise DataError("\n".join([*changes, advice]))
    return restored, damage, finish(events)


def _open_ledger(
    run: Run, stack: contextlib.ExitStack, position: dict, progress: Progress
) -> Ledger:
    """The run's ledger, cut to the restored state, and its trackers."""
    if not processes.is_first():
        return stack.enter_context(Ledger(os.devnull))
    path = run.workdir / "ledger.jsonl"
    made_with = {"versions": versions(), "data_fingerprint": run.corpus.fingerprint}
    made_with["data_commit"] = getattr(run.corpus, "commit", "")
    resume.write_config(run.workdir, run.settings, **made_with)
    cut(path, position)
    kept = read(path) if path.exists() else []

    def drop(name: str, at_round: int, cause: str) -> None:
        ledger.write("fault", kind="tracker", round=at_round, tracker=name, cause=cause)
        progress.note(f"log.{name} is off from here on: {cause}")

    trackers = Trackers(run.settings.log, run.workdir, kept, drop)
    ledger = stack.enter_context(Ledger(path, trackers))
    stack.callback(trackers.close)
    return ledger


def _control(
    run: Run, restored: resume.Restored | None, programs: Programs, max_batch: int | None
) -> Control:
    """The control to start or to resume with; `max_batch` replaces its `max_batch_size`."""
    settings = run.settings
    if restored is None:
        control = start(settings, min(processes.gather(max_batch_size(settings, programs))))
    else:
        control, given = restored.state.control, settings.batching.max_batch_size
        if given is not None and given != restored.host["max_batch_size_given"]:
            control = dataclasses.replace(control, max_batch_size=given)
    return control if max_batch is None else dataclasses.replace(control, max_batch_size=max_batch)


def _initial_ensemble(run: Run, control: Control) -> Ensemble:
    settings, spec = run.settings.ensemble, run.spec
    key = jax.random.key(run.settings.seed)

    def make(key, params):
        sizes = {"num_trainers": settings.num_trainers, "num_workers": len(control.owners)}
        txs = {"inner_tx": spec.inner_tx, "outer_tx": spec.outer_tx}
        stack = init(run.init_fn(key) if params is None else params, **sizes, **txs)
        if spec.outer.own_params:
            stack = stack.replace(params_R=of_owners(stack.params_M, stack.owners))
        return stack

    at = placement(spec, ProgramKey("stats", tuple(control.owners)))
    shardings = at.ensemble(jax.eval_shape(make, key, run.params))
    return jax.jit(make, out_shardings=shardings)(key, run.params)


def _last_checkpoint(run: Run, attempt: Attempt) -> str:
    with contextlib.suppress(CheckpointError, ResourceError):
        attempt.checkpoints.saver.wait()
    return checkpoint.last(run.workdir / "checkpoints")


def _host(run: Run, recorder: observers.Recorder, state: State) -> dict:
    """What a checkpoint holds of a state beside its arrays."""
    return {
        "control": dataclasses.asdict(state.control),
        "max_batch_size_given": run.settings.batching.max_batch_size,
        "loss": recorder.loss if np.isfinite(recorder.loss) else None,
        "wall_s": time.perf_counter() - recorder.start_s,
        "ledger": recorder.ledger.position() if processes.is_first() else None,
        "data": {
            "fingerprint": run.corpus.fingerprint,
            "shards": list(run.corpus.shards),
        },
        "config": dataclasses.asdict(run.settings),
        "versions": versions(),
        "devices": run.spec.machine.describe(),
    }


def _compile_fields(compiled: Compiled) -> dict:
    return {
        "key": str(compiled.key),
        "seconds": round(compiled.seconds, 3),
        "cache": "hit" if compiled.hit else "miss",
        "where": "background" if compiled.background else "foreground",
        "needed_bytes": compiled.needed_bytes,
    }


def _write_start(
    run: Run, ledger: Ledger, control: Control, damage: list[str], faults: Sequence[dict]
) -> None:
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
