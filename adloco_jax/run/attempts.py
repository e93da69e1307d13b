"""The attempts to finish a run: each begins at the newest checkpoint, and may fail.

A process makes all of them, one after another, so that a full memory or a failed device does not
end the run. The engine runs rounds: on devices of this program, or on learners, other processes.
Control (`Control`) is what the host knows of trainers and workers, as a checkpoint stores it. The
ledger is the log of a run. An observer is called after each round, to record, evaluate and save.

A trainer is a model in training; its workers train copies of it. A micro-batch is the part of a
worker's batch that a device takes at once. The base is the frozen weights of a model with an
adapter.
"""

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
from adloco_jax.engine.spec import ProgramSpec
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
from adloco_jax.run.kept.ledger import Ledger, read, remove_rounds_after
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

    The ledger is opened, lines that describe the run are shown, and nothing is trained yet.

    Args:
      run: What the attempts share: settings, data, model and folder.
      stack: Closes what the attempt opens.
      stop: Is set when a signal asks the run to stop.
      failures: Those of earlier attempts, which are recorded and may lower the micro-batch.

    Returns:
      The state before the next round, and the observers to call after each round.

    Raises:
      ConfigError: If a sample of text is asked of a model that writes none, or the arrays of the
        checkpoint are not those of the configured model.
      CheckpointError: If all checkpoints are damaged or gone, or the ledger lacks lines.
      DataError: If the data have changed, or the ledger is damaged.
      ResourceError: If the run does not fit the memory, or the disk is full.
    """
    settings = run.settings

    start_s = run.began_s  # on this process's clock: where the attempt begins
    if failures.faults:  # the first attempt began when the run was put together, a later one now
        start_s = time.perf_counter()
    # Continues a held-out text with a model, or is None. Made first, as it may refuse the settings.
    sample = sampler(run)

    # What the run has kept: the content of the newest checkpoint (None: there is none), a line on
    # each damaged one, and the ledger's line of a finished run (None: it is not finished).
    content, damage, end = restore(run)
    num_rounds = None  # if tokens end the run, nobody knows the number of rounds before
    if math.isinf(settings.last_token):
        num_rounds = int(settings.last_round)
    had_ledger = (run.workdir / "ledger.jsonl").exists()  # before it is opened, which makes it
    progress = Progress(num_rounds, every=settings.log.every_rounds)
    stack.callback(progress.close)
    saved_control = None
    if content is not None:
        saved_control = content.state.control
    # If process 0 fails in this, all processes raise its error.
    ledger = processes.run_on_all(lambda: _open_ledger(run, stack, saved_control, progress))

    # What runs the rounds: programs, and an engine that calls them. `begin_control` finds the
    # largest micro-batch that fits the memory, by compiling programs for it. `on_compile` shows
    # and records what is compiled.
    control, programs = begin_control(
        run,
        content,
        failures.max_batch_size,
        functools.partial(observers.on_compile, ledger, progress),
    )
    stack.callback(programs.close)
    # Held-out rows are evaluated in batches of this size, which fit the memory too.
    heldout = dataclasses.replace(run.heldout, batch_size=control.eval_batch_size)
    engine = _make_engine(run, programs, heldout, progress, stop, ledger)
    stack.callback(engine.close)
    engine.control_before = control  # what `after_failure` reads, if the first round fails

    # The recorder, and what it writes before the first round.
    # Tokens per second at the peak of the devices. They are not known of learners, which may be of
    # any kind, nor of the model of a caller of `fit`.
    peak_tokens_per_s = math.nan
    if settings.engine.kind == "local" and not run.by_fit:
        peak_tokens_per_s = most_tokens_per_s(programs.spec)
    earlier_s = 0.0  # seconds of the run until the checkpoint
    loss = math.nan  # the last held-out loss; NaN: none was measured
    if content is not None:
        earlier_s = content.host.wall_s
        if content.host.loss is not None:
            loss = content.host.loss
    recorder = observers.Recorder(
        settings=settings,
        engine=engine,
        ledger=ledger,
        progress=progress,
        start_s=start_s - earlier_s,
        loss=loss,
        most_tokens_per_s=peak_tokens_per_s,
    )
    # A finished run whose last checkpoint is damaged has rounds to run again.
    ended = end is not None and is_over(control, settings)
    if not ended:
        observers.write_start(
            run,
            ledger,
            control,
            damage,
            failures.faults,
            start_s=time.perf_counter() - start_s,
            stall_s=programs.stall_s,
        )
    notes = [f"damaged, and set aside: {line}" for line in damage]
    if content is not None:
        notes.append(f"resuming after round {control.round}")
    elif had_ledger:
        notes.append("begins again: no round was saved")
    # Written above the bar, which `progress` draws on a terminal.
    notes += _first_lines(run, programs.spec, control, peak_tokens_per_s)
    for line in notes:
        progress.note(line)

    # The arrays of trainers and workers, and the observers that evaluate and save them.
    if content is None:
        ensemble = initial_ensemble(run, control)
    else:
        ensemble = content.state.ensemble
    saver = Saver(
        run.workdir / "checkpoints",
        keep=settings.checkpoint.keep,
        on_saved=lambda saved: ledger.write("checkpoint", **saved),
    )
    stack.callback(saver.close)
    evaluator = observers.Evaluator(recorder, run.model.num_classes, run.unit, sample)
    # `host_record` makes what a checkpoint has beside the arrays.
    checkpoints = observers.Checkpoints(
        recorder, saver, stop.is_set, lambda state: host_record(run, recorder.record(), state)
    )
    # From here on the bar counts the time left, without the seconds spent waiting to compile.
    share_done = settings.share_done(control.round, control.tokens_total)
    progress.begin(share_done, lambda: programs.stall_s)
    return Attempt(State(ensemble, control), ended, recorder, evaluator, checkpoints)


def _first_lines(
    run: Run, spec: ProgramSpec, control: Control, peak_tokens_per_s: float
) -> list[str]:
    """Return lines for the terminal that describe the run before its first round.

    They tell, in this order, how programs spare a GPU's memory, the held-out rows, which optimizer
    has which parameters, how the run is resumed, its model, trainers and batches, how long it is,
    and how it could read all rows. `spec` is that of the compiled programs; `peak_tokens_per_s` is
    the speed at the peak of the devices, NaN if it is not known.
    """
    settings = run.settings
    lines = []
    if spec.machine.platform != "cpu":  # of a GPU it tells how its memory was made to suffice
        lines.append(f"chosen by what compiles: {Mode(spec.sequential, spec.remat)}")
    lines.append(run.heldout.describe(run.model.num_classes))
    # The label of each parameter, such as "matrix", by which some inner optimizers and aggregators
    # treat it; empty if those of this run do not.
    labels = parameter_labels(
        spec.params,
        labeller(settings.model.arch, run.model.label_params),
        inner=settings.inner,
        outer=settings.outer,
    )
    lines += label_lines(settings.inner.tx, labels)
    resume = how_to_resume(run.workdir, by_fit=run.by_fit)
    lines.append(f"folder: {run.workdir}; if the run stops, to resume: {resume}")
    lines += run_header(settings, spec, control.max_batch_size, run.own)
    lines += length_lines(settings, peak_tokens_per_s, len(run.heldout.report_E))
    if not run.by_fit:  # advice in options of the command line
        lines += longer_lines(settings)
    return lines


def _make_engine(
    run: Run,
    programs: Programs,
    heldout: HeldOut,
    progress: Progress,
    stop: threading.Event,
    ledger: Ledger,
) -> observers.RunEngine:
    """Make the engine that `engine.kind` names: of this program's devices, or of learners.

    Args:
      run: What the attempts share: settings, data and model.
      programs: The compiled programs, or those that are being compiled.
      heldout: The held-out rows, with the batch in which they are evaluated.
      progress: The terminal, whose bar moves within a round.
      stop: Is set by a signal. The engine of this program's devices then leaves the round that it
        is in, if there is one process alone.
      ledger: Gets the lines on learners.

    Returns:
      The engine, which has begun nothing yet. The caller closes it.
    """
    if run.settings.engine.kind == "local":
        is_alone = jax.process_count() == 1

        def is_stopped() -> bool:
            """Return whether to leave the round now.

            Several processes compute a round together, so none of them may leave it by itself.
            """
            return is_alone and stop.is_set()

        return LocalEngine(
            run.settings,
            programs.spec,
            programs,
            run.corpus,
            heldout,
            on_call=progress.move_within_round,
            is_stopped=is_stopped,
        )
    model = run.settings.model
    data = run.settings.data
    corpus = run.corpus
    if isinstance(corpus, Corpus):
        corpus = None  # learners load the configured corpus themselves
    frozen_from = ""  # the checkpoint that has frozen weights
    if run.settings.adapter.rank:
        frozen_from = model.init_from
    setup = LearnerSetup(
        settings=run.settings,
        spec=run.spec,
        corpus=corpus,
        base=run.model.base._replace(params=None),  # learners load frozen weights themselves
        by_fit=run.by_fit,
        # Of the data set on the hub; rows that the caller of `fit` gave have none.
        commit=getattr(run.corpus, "commit", ""),
        fingerprint=run.corpus.fingerprint,
        # Entries of tables, so that learners have those that a config file has added.
        entries=(ARCHITECTURES[model.arch], DATA_SOURCES[data.source]),
        log=str(run.workdir.resolve() / "learners"),  # a folder: what learners print
        files=files_of(run.corpus, frozen_from),  # that the driver gives to learners without them
    )
    return ElasticEngine(setup, programs, heldout, ledger.write)


def _open_ledger(
    run: Run, stack: contextlib.ExitStack, control: Control | None, progress: Progress
) -> Ledger:
    """Record the config, open the ledger and its trackers; only process 0 writes.

    Lines on rounds after those of `control`, the state in the checkpoint, are removed from the
    ledger; None: on all rounds. Trackers, such as TensorBoard, get each line of the ledger. `stack`
    closes the ledger and the trackers.

    Raises CheckpointError if the ledger lacks lines on rounds that the checkpoint has, DataError if
    it is damaged, ResourceError if a file cannot be written.
    """
    if not processes.is_first():  # other processes write their lines to nowhere
        return stack.enter_context(Ledger(os.devnull))
    write_config(  # of a resumed run it may have changed
        run.workdir,
        run.settings,
        versions=versions(),
        data_fingerprint=run.corpus.fingerprint,
        data_commit=getattr(run.corpus, "commit", ""),
        base_fingerprint=run.model.base.fingerprint,
        made_by="fit" if run.by_fit else "train",
    )
    path = run.workdir / "ledger.jsonl"
    remove_rounds_after(path, control)  # these are run again
    ledger = stack.enter_context(Ledger(path))

    def drop(name: str, at_round: int, cause: str) -> None:
        """Say in the ledger and on the terminal that a tracker failed and is used no more."""
        ledger.write("fault", kind="tracker", round=at_round, tracker=name, cause=cause)
        progress.note(f"log.{name} is off from here on: {cause}")

    # `read(path)`: the lines so far, which trackers get again.
    trackers = Trackers(run.settings.log, run.workdir, read(path), drop)
    ledger.listeners.append(trackers)  # is called with each new line
    stack.callback(trackers.close)
    return ledger


def after_failure(
    run: Run, attempt: Attempt, error: jax.errors.JaxRuntimeError | OSError, before: Failures
) -> Failures:
    """Return the failures `before` with this one; raise if the run should not be tried again.

    `error` ended the attempt. If memory ran out, the next attempt has half the largest micro-batch
    (`max_batch_size`). Batches may then differ: one that is larger than a micro-batch is cut to it,
    or is accumulated from whole micro-batches. The run is not tried again if:

    - the micro-batch was one sequence when memory ran out: ResourceError
    - there are several processes, which are all ended and must be started again: ResourceError
    - memory did not run out, and the same round had failed before: the error itself
    """
    control = attempt.recorder.engine.control_before  # as it was before the failed round
    index = control.round + 1  # of the failed round
    size = control.max_batch_size  # the largest micro-batch of a worker, in sequences
    cause = reason(error)
    is_memory = "RESOURCE_EXHAUSTED" in str(error)  # XLA's word for it
    are_several = jax.process_count() > 1
    smallest = 1  # the least micro-batch that can be tried next
    if are_several:  # it must be set as batching.max_batch_size, which is at least the first batch
        smallest = run.settings.batching.initial_batch_size
    end = ""  # why the run ends here; empty: it is tried again
    if is_memory and size <= smallest:
        end = (
            f"round {index}: out of memory at a micro-batch of {size}: {cause}; use fewer workers,"
            " a smaller model or shorter sequences, or model.remat"
        )
    elif are_several:
        advice = ""
        if is_memory:
            half = max(size // 2, smallest)
            advice = f"; set batching.max_batch_size to {half} in all (--accept-config-change)"
        end = (
            f"round {index}: process {jax.process_index()} failed ({cause}){advice}; all"
            f" start again from the newest checkpoint: {last_checkpoint(run, attempt)}"
        )
    if end:
        if are_several:  # they may wait for this process in a computation that nothing interrupts
            processes.end_others(end)
        raise ResourceError(end) from error
    if not is_memory and control.round == before.round:  # the same round has failed before
        raise error

    note = f"round {index} failed ({cause}); restoring the newest checkpoint"
    fault = {"kind": "round_failed", "round": index, "cause": cause}
    max_batch_size = before.max_batch_size  # None: memory has not run out before
    if is_memory:
        max_batch_size = size // 2
        note += f" with max_batch_size {max_batch_size} (was {size})"
        note += "; batches may differ from there on"
        fault["kind"] = "out_of_memory"
        fault["max_batch_size_before"] = size
        fault["max_batch_size"] = max_batch_size
        fault["effect"] = "batches may differ from the restored round on"
    attempt.recorder.progress.note(note)
    return Failures((*before.faults, fault), max_batch_size, control.round)


def last_checkpoint(run: Run, attempt: Attempt) -> str:
    """Describe the newest checkpoint of a run, after a save that is under way has ended.

    If that save fails, an earlier checkpoint is the newest; this raises nothing.
    """
    with contextlib.suppress(CheckpointError, ResourceError):
        attempt.checkpoints.saver.wait()
    return checkpoint.describe_newest(run.workdir / "checkpoints")


def require_equal_processes(run: Run) -> None:
    """Raise ConfigError in every process if config, data, weights or versions differ.

    One process alone has nothing to compare.
    """
    if jax.process_count() == 1:
        return
    # A hash of all parameters that the run starts from: of each leaf its dtype, shape and bytes.
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(run.model.params):
        weights.update(f"{leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes())
    values = {}  # what must be equal, by the name that the message gives it
    for key, value in run.settings.flat().items():
        if key not in ("data.path", "data.heldout_path"):  # may lie elsewhere on each machine
            values[key] = repr(value)
    for name, version in versions().items():
        values[f"the version of {name}"] = version
    # What settings leave open, and each process has found for its machine.
    values["model_shards, as found there"] = repr(run.spec.model_shards)
    values["attention, as found there"] = repr(run.spec.attention)
    values["the data"] = run.corpus.fingerprint
    values["the weights it starts from"] = weights.hexdigest()
    values["the frozen weights"] = run.model.base.fingerprint
    processes.require_equal(values, "all processes of a run need the same")
