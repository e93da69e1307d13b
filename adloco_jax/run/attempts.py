"""The attempts to finish a run: each begins at the newest checkpoint, and may fail."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import threading
import time
from dataclasses import dataclass

import jax
import numpy as np

from adloco_jax.data import Corpus
from adloco_jax.data.sampling import HeldOut
from adloco_jax.data.sources import DATA_SOURCES
from adloco_jax.elastic.engine import ElasticEngine
from adloco_jax.elastic.files import files_of
from adloco_jax.elastic.learner import LearnerSetup
from adloco_jax.engine.local import LocalEngine
from adloco_jax.engine.memory import Mode
from adloco_jax.engine.optimizers import labeller, parameter_labels
from adloco_jax.engine.programs import Programs
from adloco_jax.errors import CheckpointError, ResourceError, reason
from adloco_jax.host import processes
from adloco_jax.host.versions import versions
from adloco_jax.loop.adloco import Control, State
from adloco_jax.loop.plans import is_over
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.run.before.assemble import Run
from adloco_jax.run.before.describe import label_lines, length_lines, longer_lines, run_header
from adloco_jax.run.before.estimate import most_tokens_per_s
from adloco_jax.run.kept import checkpoint
from adloco_jax.run.kept.checkpoint import Saver
from adloco_jax.run.kept.folder import how_to_resume, write_config
from adloco_jax.run.kept.ledger import Ledger, cut, read
from adloco_jax.run.kept.restore import begin_control, host_record, initial_ensemble, restore
from adloco_jax.run.watching import observers
from adloco_jax.run.watching.loggers import Trackers
from adloco_jax.run.watching.samples import sampler
from adloco_jax.run.watching.terminal import Progress


@dataclass(frozen=True)
class Failures:
    """The failures of earlier attempts to finish a run, and what the next attempt changes."""

    faults: tuple[dict, ...] = ()  # for each failure, the fields of its line in the ledger
    max_batch_size: int | None = None  # limit of micro-batches if memory ran out before
    round: int | None = None  # number of rounds completed before the last failure


@dataclass
class Attempt:
    """An attempt to finish a run: its state, and the observers that are called after each round."""

    state: State  # the state before the next round
    ended: bool  # whether the ledger says that the run is finished
    recorder: observers.Recorder
    evaluator: observers.Evaluator
    checkpoints: observers.Checkpoints


def begin(
    run: Run,
    stack: contextlib.ExitStack,
    stop: threading.Event,
    failures: Failures,
) -> Attempt:
    """Begin an attempt: restore the newest checkpoint, or else start the run.

    `stack` closes what the attempt opens; `stop` is set by a signal. Raises UserError as `train`
    does.
    """
    settings, spec = run.settings, run.spec
    start_s = time.perf_counter() if failures.faults else run.began_s
    sample = sampler(run)
    restored, damage, end = restore(run)
    num_rounds = int(settings.last_round) if math.isinf(settings.last_token) else None
    before = restored.state.control if restored else None
    began_before = (run.workdir / "ledger.jsonl").exists()
    progress = Progress(num_rounds, every=settings.log.every_rounds)
    stack.callback(progress.close)
    ledger = processes.run_on_all(lambda: _open_ledger(run, stack, before, progress))
    control, programs = begin_control(
        run,
        restored,
        failures.max_batch_size,
        functools.partial(observers.on_compile, ledger, progress),
    )
    stack.callback(programs.close)
    spec = programs.spec
    heldout = dataclasses.replace(run.heldout, batch_size=control.eval_batch_size)
    engine = _make_engine(run, programs, heldout, progress, stop, ledger)
    stack.callback(engine.close)
    engine.control_before = control
    earlier_s, loss = (restored.host.wall_s, restored.host.loss) if restored else (0.0, None)
    loss = float("nan") if loss is None else loss
    is_known = settings.engine.kind == "local" and not run.by_fit
    most = most_tokens_per_s(spec) if is_known else math.nan
    clock_s = start_s - earlier_s
    recorder = observers.Recorder(settings, engine, ledger, progress, clock_s, loss, most)
    ended = end is not None and is_over(control, settings)
    if not ended:  # a finished run whose checkpoint is damaged trains again
        used = {"start_s": time.perf_counter() - start_s, "stall_s": programs.stall_s}
        observers.write_start(run, ledger, control, damage, failures.faults, **used)
    notes = [f"damaged, and set aside: {line}" for line in damage]
    if restored:
        notes.append(f"resuming after round {control.round}")
    elif began_before:
        notes.append("begins again: no round was saved")
    if spec.machine.platform != "cpu":
        notes.append(f"chosen by what compiles: {Mode(spec.sequential, spec.remat)}")
    notes.append(run.heldout.describe(run.model.num_classes))
    label_params = labeller(settings.model.arch, run.model.label_params)
    rules = {"inner": settings.inner, "outer": settings.outer}
    labels = parameter_labels(spec.params, label_params, **rules)
    notes += label_lines(settings.inner.tx, labels)
    how = how_to_resume(run.workdir, by_fit=run.by_fit)
    notes.append(f"folder: {run.workdir}; if the run stops, to resume: {how}")
    notes += run_header(settings, spec, control.max_batch_size, run.own)
    notes += length_lines(settings, most, len(run.heldout.report_EL))
    if not run.by_fit:
        notes += longer_lines(settings)
    for line in notes:
        progress.note(line)
    ensemble = restored.state.ensemble if restored else initial_ensemble(run, control)

    saver = Saver(
        run.workdir / "checkpoints",
        keep=settings.checkpoint.keep,
        on_saved=lambda saved: ledger.write("checkpoint", **saved),
    )
    stack.callback(saver.close)
    evaluator = observers.Evaluator(recorder, run.model.num_classes, run.unit, sample)
    checkpoints = observers.Checkpoints(
        recorder, saver, stop.is_set, lambda state: host_record(run, recorder.record(), state)
    )
    done = settings.share_done(control.round, control.tokens_total)
    progress.begin(done, lambda: programs.stall_s)
    return Attempt(State(ensemble, control), ended, recorder, evaluator, checkpoints)


def _make_engine(
    run: Run,
    programs: Programs,
    heldout: HeldOut,
    progress: Progress,
    stop: threading.Event,
    ledger: Ledger,
) -> observers.RunEngine:
    """Make the engine that `engine.kind` names."""
    if run.settings.engine.kind == "local":
        # Several processes all end the round, because one does not know what others do.
        is_stopped = stop.is_set if jax.process_count() == 1 else bool
        return LocalEngine(
            run.settings,
            programs.spec,
            programs,
            run.corpus,
            heldout,
            on_call=progress.call,
            is_stopped=is_stopped,
        )
    model, data = run.settings.model, run.settings.data
    setup = LearnerSetup(
        settings=run.settings,
        spec=run.spec,
        corpus=None if isinstance(run.corpus, Corpus) else run.corpus,
        base=run.model.base._replace(params=None),
        by_fit=run.by_fit,
        commit=getattr(run.corpus, "commit", ""),
        fingerprint=run.corpus.fingerprint,
        entries=(ARCHITECTURES[model.arch], DATA_SOURCES[data.source]),
        log=str(run.workdir.resolve() / "learners"),
        files=files_of(run.corpus, model.init_from if run.settings.adapter.rank else ""),
    )
    return ElasticEngine(setup, programs, heldout, ledger.write)


def _open_ledger(
    run: Run, stack: contextlib.ExitStack, control: Control | None, progress: Progress
) -> Ledger:
    """Record the config again, open the ledger and its trackers; only process 0 writes."""
    if not processes.is_first():
        return stack.enter_context(Ledger(os.devnull))
    made_with = {"versions": versions(), "data_fingerprint": run.corpus.fingerprint}
    made_with["data_commit"] = getattr(run.corpus, "commit", "")
    made_with["base_fingerprint"] = run.model.base.fingerprint
    made_with["made_by"] = "fit" if run.by_fit else "train"
    write_config(run.workdir, run.settings, **made_with)
    path = run.workdir / "ledger.jsonl"
    cut(path, control)
    ledger = stack.enter_context(Ledger(path))

    def drop(name: str, at_round: int, cause: str) -> None:
        ledger.write("fault", kind="tracker", round=at_round, tracker=name, cause=cause)
        progress.note(f"log.{name} is off from here on: {cause}")

    trackers = Trackers(run.settings.log, run.workdir, read(path), drop)
    ledger.listeners.append(trackers)
    stack.callback(trackers.close)
    return ledger


def after_failure(
    run: Run, attempt: Attempt, error: jax.errors.JaxRuntimeError | OSError, before: Failures
) -> Failures:
    """Return the failures with this one; raise if the run should not be tried again.

    After memory ran out, the micro-batch is halved: ResourceError if it was one sequence, or if
    there are several processes, which must all start again, and a config has at least the first
    batch. Another error is raised if it came twice in the same round.
    """
    control = attempt.recorder.engine.control_before
    index, size = control.round + 1, control.max_batch_size
    cause = reason(error)
    exhausted, several = "RESOURCE_EXHAUSTED" in str(error), jax.process_count() > 1
    smallest = run.settings.batching.initial_batch_size if several else 1
    if exhausted and size <= smallest:
        failure = (
            f"round {index}: out of memory at a micro-batch of {size}: {cause}; use fewer workers,"
            " a smaller model or shorter sequences, or model.remat"
        )
    elif several:
        half = max(size // 2, smallest)
        mend = f"; set batching.max_batch_size to {half} in all (--accept-config-change)"
        failure = (
            f"round {index}: process {jax.process_index()} failed ({cause}){mend * exhausted}; all"
            f" start again from the newest checkpoint: {last_checkpoint(run, attempt)}"
        )
    else:
        failure = ""
    if failure:
        if several:
            processes.end_others(failure)
        raise ResourceError(failure) from error
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


def last_checkpoint(run: Run, attempt: Attempt) -> str:
    """Describe the newest checkpoint of a run, after a save that is under way has ended."""
    with contextlib.suppress(CheckpointError, ResourceError):
        attempt.checkpoints.saver.wait()
    return checkpoint.last(run.workdir / "checkpoints")


def require_equal_processes(run: Run) -> None:
    """Raise ConfigError in every process if config, data, weights or versions differ."""
    if jax.process_count() == 1:
        return
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(run.model.params):
        weights.update(f"{leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes())
    keys = run.settings.flat().items()
    processes.require_equal(
        {key: repr(value) for key, value in keys if key not in ("data.path", "data.heldout_path")}
        | {f"the version of {name}": version for name, version in versions().items()}
        | {
            "model_shards, as found there": repr(run.spec.model_shards),
            "attention, as found there": repr(run.spec.attention),
            "the data": run.corpus.fingerprint,
            "the weights it starts from": weights.hexdigest(),
            "the frozen weights": run.model.base.fingerprint,
        },
        "all processes of a run need the same",
    )
