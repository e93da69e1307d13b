"""Run a whole experiment: build its parts, call the training loop, and write the report.

`train` runs the experiment that a config describes. `fit` runs an experiment with the caller's own
model and data. The training loop is `loop.adloco.adloco`.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax.config import validate, with_recorded_sizes
from adloco_jax.core.types import Ensemble, LossFn
from adloco_jax.data import ArrayRows, Corpus
from adloco_jax.elastic.engine import ElasticEngine
from adloco_jax.elastic.fleet import TRANSPORTS
from adloco_jax.engine import evaluate
from adloco_jax.engine.inputs import Rows, programs_ahead
from adloco_jax.engine.local import LocalEngine
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.sharding import fetch
from adloco_jax.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    Preempted,
    ResourceError,
    reason,
)
from adloco_jax.loop.adloco import Control, Diverged, Observer, State, adloco
from adloco_jax.loop.plans import is_over, share_done
from adloco_jax.run import checkpoint, observers, processes, resume
from adloco_jax.run.arguments import check_arguments
from adloco_jax.run.build import (
    InitFn,
    Run,
    build_model,
    class_count,
    initial_ensemble,
    load_data,
    pretrained_params,
    program_spec,
)
from adloco_jax.run.checkpoint import Saver, list_rounds
from adloco_jax.run.choose import Mode, modes
from adloco_jax.run.export import write_consensus
from adloco_jax.run.machines import here, use_compilation_cache
from adloco_jax.run.plan import require_memory, run_header
from adloco_jax.run.resume import check_config, exclusive, recorded_commit, with_checkpoint
from adloco_jax.run.terminal import Progress
from adloco_jax.run.trackers import check_installed, open_ledger
from adloco_jax.settings import Settings
from adloco_jax.study import report


@dataclass(frozen=True)
class Result:
    """What a run returns: its folder, the consensus model with its loss, and the final state.

    The consensus is the one model that stands for all trainers.
    """

    workdir: Path  # the run's folder
    params: PyTree  # parameters of the consensus model
    loss: float  # held-out loss of the consensus model, in the run's unit (nats/token for text)
    state: State  # the state after the last round

    @property
    def ensemble(self) -> Ensemble:
        """The parameters and optimizer states of all trainers and workers in the final state."""
        return self.state.ensemble

    @property
    def controller(self) -> Control:
        """The numbers of the final state that the host keeps, such as batches and total tokens."""
        return self.state.control


def train(
    config: ConfigDict,
    workdir: str | Path | None = None,
    *,
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
) -> Result:
    """Run the experiment that a config describes, or resume it from its folder.

    The run trains one or several trainers (model instances). Its result is the consensus model: the
    trainer with the lowest loss, or the average of all trainers. At the end a table is printed, and
    the run's folder has the report in `report/` and the consensus model in `export/`
    (`run.export.write_consensus`).

    If the process receives SIGTERM or SIGINT, the run is saved after the current round, and
    `Preempted` is raised. A second signal ends the process at once. Signals are handled only if the
    function is called on the main thread.

    Args:
      config: A config from a file in `configs/`, or `default_config()` with changes.
      workdir: The run's folder, which is created if it is missing. If it contains a run, this run
        is resumed. If it is None, the folder `runs/train-<date>-<time>` is created.
      command: The command line. It is recorded in the ledger (the log file of the run), and the
        report shows it in a caption.
      accept_config_change: Whether a resumed run may continue with changed settings, such as
        another learning rate.
      accept_data_change: Whether a resumed run may continue with other data.

    Returns:
      The consensus model, its loss and the whole final state.

    Raises:
      ConfigError: If the config or the folder cannot be used. Nothing is compiled or created then.
      DataError: If the text or tokens cannot be used, or have changed since the run began. Nothing
        is compiled or created then.
      CheckpointError: If the folder contains a run that cannot be read, or if checkpoints are
        deleted while the run writes one.
      DivergedError: If the losses of all trainers have become infinite or NaN.
      ResourceError: If memory or disk space is missing. Files that were saved before stay.
      Preempted: If the process received a signal to stop. The run has been saved.
    """
    if workdir is not None:
        config = with_recorded_sizes(config, workdir)
    settings = validate(config)
    check_installed(settings.log)
    use_compilation_cache()
    if workdir is None:
        if jax.process_count() > 1:
            raise ConfigError("workdir: several processes need the name of one folder")
        workdir = Path("runs") / f"train-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    workdir, machine = Path(workdir), here()
    settings = processes.run_on_all(lambda: with_checkpoint(settings, workdir))

    def load() -> tuple[PyTree | None, list[str], Corpus]:
        check_config(workdir, settings, accept=accept_config_change)
        resume.require_usable(workdir)
        require_memory(settings, machine)
        params, lines = None, []
        if settings.model.init_from and not list_rounds(workdir / "checkpoints"):
            params, lines = pretrained_params(settings)
        return params, lines, load_data(settings, recorded_commit(workdir))

    with processes.only_first_prints():
        params, lines, corpus = processes.run_on_all(load)
    init_fn, loss_fn = build_model(settings, machine)
    with processes.only_first_prints():
        print(*lines, corpus.describe(), sep="\n")
        return fit(
            settings,
            corpus=corpus,
            init_fn=init_fn,
            loss_fn=loss_fn,
            loss_of=lambda mode: build_model(settings, machine, mode)[1],
            params=params,
            num_classes=class_count(settings),
            workdir=workdir,
            command=command,
            accept_config_change=accept_config_change,
            accept_data_change=accept_data_change,
            _by_fit=False,
        )


def fit(
    settings: Settings,
    *,
    corpus: Rows,
    init_fn: InitFn,
    loss_fn: LossFn,
    workdir: str | Path,
    params: PyTree | None = None,
    num_classes: int | None = None,
    inner_tx: optax.GradientTransformation | None = None,
    outer_tx: optax.GradientTransformation | None = None,
    loss_unit: str | None = None,
    loss_of: Callable[[Mode], LossFn] | None = None,
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
    _by_fit: bool = True,  # False: `train` calls, so a command can resume the run
) -> Result:
    """Run AdLoCo on the caller's model and rows of tokens, or resume such a run.

    As with `train`, a table is printed at the end. The run's folder then has the report in
    `report/` and the consensus model in `export/`.

    Args:
      settings: The result of `validate`. The groups `model` and `data` are recorded, but describe
        neither model nor data here; `ArrayRows.ordered` lists the few settings that are used.
      corpus: The rows to train on and the held-out rows: `ArrayRows`, or an object with the
        methods of `engine.inputs.Rows`.
      init_fn: Makes one trainer's parameters from a PRNG key.
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean loss over int32 rows [B, L + 1].
      workdir: The run's folder. If it contains a run of these settings, this run is resumed.
      params: Initial parameters of all trainers, with the structure of `init_fn`'s result. If None,
        `init_fn` draws the parameters.
      num_classes: Number of classes, if each row begins with its class and its length. The run then
        also reports how well classes are predicted. None for rows of text.
      inner_tx: The workers' optimizer, in place of the one that `inner.tx` names. It must have
        learning rate 1, because its updates are multiplied by the learning rate of the config, with
        warm-up and schedule. A resumed run needs the same optimizer.
      outer_tx: The trainers' optimizer, in place of the one that `outer.tx` names. It must have
        learning rate 1, because its updates are multiplied by `outer.learning_rate`.
      loss_unit: Unit of the loss: "nats/token" (perplexity is then reported too), "nats/example",
        or other words. None: "nats/example" if `num_classes` is given, "nats/token" if the corpus
        knows its number of tokens per byte of text, and otherwise no unit.
      loss_of: `loss_of(mode) -> loss_fn`, for a model that can save memory by recomputing layers in
        the backward pass. The field `remat` of `mode` (a `run.choose.Mode`) says whether the loss
        must do so. If `loss_of` is None, `loss_fn` is used, and layers are not recomputed.
      command: The command line, which is recorded in the ledger (the log file of the run).
      accept_config_change: Whether a resumed run may continue with changed settings.
      accept_data_change: Whether a resumed run may continue with other data.

    Returns:
      The consensus model, its loss and the whole final state.

    Raises:
      ConfigError: If arguments are invalid, if an optimizer is given here and also named in the
        settings, or if the folder cannot be used. The message has one line for each fault.
      DataError: If there are too few held-out rows (a run with one trainer needs one row, a run
        with several needs two), or if `corpus.batch` gives two workers the same rows.
      UserError: In the other cases in which `train` raises an error, except while reading text.
    """
    check_arguments(settings, corpus, init_fn, loss_fn, params, workdir, inner_tx, outer_tx)
    if settings.engine.kind in TRANSPORTS:
        TRANSPORTS[settings.engine.kind].check_possible()
    if isinstance(corpus, ArrayRows):
        corpus = corpus.ordered(settings, num_classes=num_classes)
    workdir = Path(workdir)
    check_installed(settings.log)

    def check() -> evaluate.HeldOut:
        check_config(workdir, settings, accept=accept_config_change)
        return evaluate.split_heldout(
            corpus.heldout_rows,
            num_sequences=settings.eval.num_sequences,
            batch_size=settings.batching.initial_batch_size,  # `begin` replaces it
            num_classes=num_classes,
            num_trainers=settings.ensemble.num_trainers,
        )

    heldout = processes.run_on_all(check)
    row_length, txs = corpus.heldout_rows.shape[1], {"inner_tx": inner_tx, "outer_tx": outer_tx}
    spec = program_spec(
        settings, init_fn, loss_fn, row_length, num_classes=num_classes, machine=here(), **txs
    )
    if loss_unit is None:
        is_text = num_classes is None and corpus.tokens_per_byte is not None
        loss_unit = "nats/token" if is_text else "nats/example" * (num_classes is not None)
    allowed = modes(settings, spec.machine.platform)
    if loss_of is None:
        allowed = list(dict.fromkeys(mode._replace(remat=False) for mode in allowed))
    run = Run(
        settings=settings,
        spec=spec,
        corpus=corpus,
        heldout=heldout,
        workdir=workdir,
        command=command,
        by_fit=_by_fit,
        accept_data_change=accept_data_change,
        init_fn=init_fn,
        params=params,
        num_classes=num_classes,
        unit=loss_unit,
        loss_of=loss_of or (lambda mode: loss_fn),
        modes=tuple(allowed),
    )
    resume.require_equal_processes(run)
    result = _until_done(run)
    exported = fetch(result.params)
    if processes.is_first():
        tokenizer = getattr(corpus, "tokenizer", None)
        write_consensus(exported, workdir / "export", settings, tokenizer)
        report.conclude(workdir)
    processes.barrier("the export and the report are written")
    return result


def _until_done(run: Run) -> Result:
    """Run all remaining rounds of a run, with a new attempt from the newest checkpoint on failure.

    `after_failure` decides after each failure whether there is a new attempt.
    """
    failures = Failures()
    with (
        exclusive(run.workdir),
        processes.stop_requests() as stop,
        processes.ending_together(),
        _saying_how_to_resume(run),
    ):
        while True:
            # The newest checkpoint restores everything that a failed round has changed.
            with contextlib.ExitStack() as stack:
                attempt = begin(run, stack, stop, failures)
                try:
                    state = execute(run, attempt)
                    params, loss = attempt.evaluator.params, attempt.recorder.loss
                    return Result(run.workdir, params, loss, state)
                except (jax.errors.JaxRuntimeError, OSError) as error:
                    failures = after_failure(run, attempt, error, failures)


@contextlib.contextmanager
def _saying_how_to_resume(run: Run) -> Iterator[None]:
    try:
        yield
    except (Preempted, ResourceError) as error:
        if (run.workdir / "ledger.jsonl").exists():
            error.args = (f"{error}; to resume: {_how(run)}",)
        raise


@dataclass(frozen=True)
class Failures:
    """The failures of earlier attempts to finish a run, and what the next attempt changes."""

    faults: tuple[dict, ...] = ()  # for each failure, the fields of its line in the ledger
    max_batch_size: int | None = None  # limit of micro-batches if memory ran out before
    round: int | None = None  # number of rounds completed before the last failure


@dataclass
class Attempt:
    """An attempt to finish a run: the restored or initial state, and the run's observers.

    Observers are called after each round with its results.
    """

    state: State  # the state before the next round
    ended: bool  # whether the ledger says that the run is finished
    recorder: observers.Recorder
    evaluator: observers.Evaluator
    checkpoints: observers.Checkpoints


def begin(
    run: Run, stack: contextlib.ExitStack, stop: threading.Event, failures: Failures
) -> Attempt:
    """Begin an attempt to finish a run: restore the newest checkpoint, or else start the run.

    Args:
      run: The data that all attempts of the run share.
      stack: Closes all files and programs that the attempt opens, when the attempt has ended.
      stop: An event that is set when the process receives a signal to stop.
      failures: The failures of earlier attempts.

    Raises:
      UserError: In the cases that `train` lists.
    """
    settings, spec, start_s = run.settings, run.spec, time.perf_counter()
    restored, damage, end = resume.restore(run)
    host = restored.host if restored else {"wall_s": 0.0, "loss": None}
    num_rounds = settings.num_rounds if settings.num_tokens is None else None
    before = restored.state.control if restored else None
    done = share_done(before.round, before.tokens_total, settings) if before else 0.0
    progress = Progress(num_rounds, every=settings.log.every_rounds, share_done=done)
    stack.callback(progress.close)
    begins_again = restored is None and not failures.faults
    begins_again = begins_again and (run.workdir / "ledger.jsonl").exists()
    ledger = processes.run_on_all(lambda: open_ledger(run, stack, before, progress))
    control, programs = resume.begin_control(
        run,
        restored,
        failures.max_batch_size,
        functools.partial(observers.on_compile, ledger, progress),
    )
    stack.callback(programs.close)
    spec = programs.spec
    heldout = dataclasses.replace(run.heldout, batch_size=control.eval_batch_size)
    engine = _engine(run, stack, programs, heldout, progress)
    engine.underway = control
    began_s = start_s - host["wall_s"]
    loss = float("nan") if host["loss"] is None else host["loss"]
    recorder = observers.Recorder(settings, engine, ledger, progress, began_s, loss)
    ended = bool(end) and share_done(end["rounds"], end["tokens_total"], settings) >= 1
    ended = ended and is_over(control, settings)
    if not ended:  # a finished run whose checkpoint is damaged trains again
        observers.write_start(run, ledger, control, damage, failures.faults)
    notes = [f"damaged, and set aside: {line}" for line in damage]
    notes += [f"resuming after round {control.round}"] if control.round else []
    notes += ["stopped before its first save: the run begins again"] if begins_again else []
    if spec.machine.platform != "cpu":
        notes.append(f"chosen by what compiles: {Mode(spec.in_turn, spec.remat)}")
    notes.append(run.heldout.describe(run.num_classes))
    notes.append(f"folder: {run.workdir}; if the run stops, to resume: {_how(run)}")
    for line in [*notes, *run_header(settings, spec, control.max_batch_size)]:
        progress.note(line)
    ensemble = restored.state.ensemble if restored else initial_ensemble(run, control)

    saver = Saver(
        run.workdir / "checkpoints",
        keep=settings.checkpoint.keep,
        on_saved=lambda saved: ledger.write("checkpoint", **saved),
    )
    stack.callback(saver.close)
    evaluator = observers.Evaluator(recorder, run.num_classes, run.unit)
    checkpoints = observers.Checkpoints(
        recorder, saver, stop.is_set, lambda state: resume.host(run, recorder.record(), state)
    )
    return Attempt(State(ensemble, control), ended, recorder, evaluator, checkpoints)


def execute(run: Run, attempt: Attempt) -> State:
    """Run all remaining rounds of an attempt, and return the state after the last round.

    `attempt.evaluator` then has the consensus model, and `attempt.recorder` has its loss.

    Raises:
      DivergedError: If the losses of all trainers have become infinite or NaN.
      Exception: Any error of a round. The caller asks `after_failure` whether to try again.
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
            # If no round ends within this number of seconds, the tracebacks of all threads are
            # printed, and the process ends.
            watchdog = functools.partial(
                faulthandler.dump_traceback_later, settings.checkpoint.watchdog_s, exit=True
            )
            stack.callback(faulthandler.cancel_dump_traceback_later)
            watchdog()
            observe.insert(0, lambda state, boundary: watchdog())
        # With learners, the driver compiles no programs of rounds: the learners do.
        is_local = settings.engine.kind == "local"
        ahead = programs_ahead(state.control, settings, engine.programs.spec) if is_local else []
        engine.programs.prefetch([*ahead, evaluate.loss_key(engine.heldout.batch_size)])
        try:
            state = adloco(state, settings=settings, engine=engine, observers=observe)
            return State(engine.complete(state), state.control)
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
    """Decide after a failed round whether to try again, and what the next attempt changes.

    If memory ran out, the next attempt has half the largest micro-batch. If anything else failed,
    the next attempt changes nothing.

    Args:
      run: The data that all attempts of the run share.
      attempt: The attempt that has failed.
      error: The error that ended it.
      before: The failures of earlier attempts.

    Returns:
      All failures so far, with the changes for the next attempt.

    Raises:
      ResourceError: If memory ran out at a micro-batch of one sequence, or if the run has several
        processes. In the second case all processes must be started again.
      Exception: The error itself, if memory did not run out and the same round has failed before.
    """
    control = attempt.recorder.engine.underway
    index, size = control.round + 1, control.max_batch_size
    cause = reason(error)
    exhausted = "RESOURCE_EXHAUSTED" in str(error)
    if exhausted and size == 1:
        failure = (
            f"round {index}: out of memory at a micro-batch of 1: {cause}; use fewer workers, a"
            " smaller model or shorter sequences, or model.remat"
        )
    elif jax.process_count() > 1:
        mend = f"; set batching.max_batch_size to {size // 2} in all (--accept-config-change)"
        failure = (
            f"round {index}: process {jax.process_index()} failed ({cause}){mend * exhausted}; all"
            f" start again from the newest checkpoint: {_last_checkpoint(run, attempt)}"
        )
    else:
        failure = ""
    if failure:
        if jax.process_count() > 1:
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


def _engine(
    run: Run,
    stack: contextlib.ExitStack,
    programs: Programs,
    heldout: evaluate.HeldOut,
    progress: Progress,
) -> observers.RunEngine:
    """Make the engine that the setting `engine.kind` names: it runs the rounds on devices."""
    if run.settings.engine.kind == "local":
        on_call = progress.call if progress.shows_bar else None
        return LocalEngine(run.settings, programs.spec, programs, run.corpus, heldout, on_call)
    engine = ElasticEngine(run, programs, heldout)
    stack.callback(engine.close)
    return engine


def _how(run: Run) -> str:
    return resume.how_to_resume(run.workdir, run.settings, command=run.command, by_fit=run.by_fit)


def _last_checkpoint(run: Run, attempt: Attempt) -> str:
    with contextlib.suppress(CheckpointError, ResourceError):
        attempt.checkpoints.saver.wait()
    return checkpoint.last(run.workdir / "checkpoints")
