"""Run a whole experiment: build its parts, call the training loop, and write the report.

A run may be tried several times: an attempt begins at the newest checkpoint. Its rounds are run by
an engine, in this process or in learners: other processes, for which this one is the driver. A
trainer is a model in training; its workers train copies of it. The consensus is the model that
stands for all trainers: the only one, the best, or their average. The ledger is the log of a run.
An observer is a function that is called after each round.
"""

import contextlib
import datetime
import faulthandler
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax.config import completed, validate
from adloco_jax.core.types import Ensemble, LossFn, array_summary
from adloco_jax.engine import evaluate
from adloco_jax.engine.inputs import Rows, programs_ahead
from adloco_jax.engine.memory import Mode
from adloco_jax.engine.model import Model
from adloco_jax.engine.optimizers import Labeller
from adloco_jax.engine.programs import use_compilation_cache
from adloco_jax.engine.sharding import fetch
from adloco_jax.engine.spec import this_machine
from adloco_jax.errors import (
    ConfigError,
    DivergedError,
    Preempted,
    ResourceError,
    UserError,
    own_line,
    reason,
)
from adloco_jax.host import processes
from adloco_jax.loop.adloco import Boundary, Diverged, Observer, State, Stopped, adloco
from adloco_jax.loop.plans import is_over
from adloco_jax.models.configured import InitFn
from adloco_jax.run.attempts import (
    Attempt,
    Failures,
    after_failure,
    begin,
    last_checkpoint,
    require_equal_processes,
)
from adloco_jax.run.before.assemble import Run, assemble
from adloco_jax.run.before.checks import check_own, check_rules, own_model
from adloco_jax.run.join import join as join_run
from adloco_jax.run.kept.export import write_consensus
from adloco_jax.run.kept.folder import exclusive, how_to_resume
from adloco_jax.run.kept.ledger import Ledger
from adloco_jax.settings import Config, Settings
from adloco_jax.study import report

_STOPPING = "finishing and saving the round under way, or leaving it if it lasts long"

OnRound = Callable[[State, list[dict]], object]
"""`on_round(state, lines)`: what the caller of `fit` does after each round."""


@dataclass(frozen=True)
class Result:
    """What a run returns: its folder, the consensus model with its loss, and the final state."""

    workdir: Path  # the run's folder
    params: PyTree  # parameters of the consensus model
    loss: float  # held-out loss of the consensus model, in the run's unit (nats/token for text)
    state: State  # the state after the last round

    def __repr__(self) -> str:
        return (
            f"Result({str(self.workdir)!r}, loss {self.loss:.4f}, round {self.state.control.round},"
            f" params: {array_summary(self.params)})"
        )

    @property
    def ensemble(self) -> Ensemble:
        """The parameters and optimizer states of all trainers and workers in the final state."""
        return self.state.ensemble


def train(
    config: ConfigDict | Config,
    workdir: str | Path | None = None,
    *,
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
) -> Result:
    """Run the experiment that a config describes, or resume it from its folder.

    A table is printed at the end; the folder has the report in `report/`, the consensus in
    `export/`. On the main thread, SIGTERM or SIGINT saves the run after the current round, or
    leaves a long round, and raises `Preempted`; a second signal ends the process at once.

    Args:
      config: A config from a file in `configs/`, or `default_config()` with changes, or the result
        of `validate`.
      workdir: The run's folder, created if missing, else resumed. None: `runs/train-<date>-<time>`.
      command: The command line, for the ledger and the report.
      accept_config_change: Whether a resumed run may continue with changed settings, such as
        another learning rate.
      accept_data_change: Whether a resumed run may continue with other data.

    Returns:
      A `Result` with the run's folder (`workdir`), the parameters of the consensus model
      (`params`), its held-out loss (`loss`), and the final `state`.

    Raises:
      ConfigError: If the config or the folder cannot be used. Nothing is compiled or created (in a
        bucket an object is written and deleted).
      DataError: If the data cannot be used, or have changed. Nothing is created, and nothing is
        compiled but what finds an unset `model.base_dtype`.
      CheckpointError: If the run in the folder cannot be read, or its checkpoints are deleted.
      DivergedError: If the losses of all trainers have become infinite or NaN.
      ResourceError: If memory or disk space is missing. Files that were saved before stay.
      Preempted: If the process received a signal to stop. The run has been saved.
    """
    if workdir is None and jax.process_count() > 1:
        raise ConfigError("workdir: several processes need the name of one folder")
    folder = Path(workdir or f"runs/train-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    settings = validate(config)
    if settings.engine.starts_learner:  # which needs the accelerator, so that this process must not
        processes.leave_accelerator()
    use_compilation_cache()  # programs that are compiled stay on disk for later processes

    def put_together() -> Run:
        """Complete the settings and make the run; an error in one process is raised in all."""
        whole = completed(settings, folder, note=print)
        return assemble(
            whole,
            this_machine(),
            folder,
            trains=True,
            command=command,
            accept_config_change=accept_config_change,
            accept_data_change=accept_data_change,
        )

    with processes.only_first_prints():
        return run_to_end(processes.run_on_all(put_together))


def fit(
    settings: Config | ConfigDict,
    *,
    corpus: Rows,
    loss_fn: LossFn,
    workdir: str | Path,
    init_fn: InitFn | None = None,
    params: PyTree | None = None,
    num_classes: int | None = None,
    inner_tx: optax.GradientTransformation | None = None,
    outer_tx: optax.GradientTransformation | None = None,
    loss_unit: str | None = None,
    loss_of: Callable[[Mode], LossFn] | None = None,
    eval_loss_fn: LossFn | None = None,
    label_params: Labeller | None = None,
    on_round: OnRound | None = None,
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
) -> Result:
    """Run AdLoCo on the caller's model and rows of tokens, or resume such a run, as `train` does.

    Args:
      settings: A config, or the result of `validate`. Of the groups `model` and `data` training
        uses only `model.arch` (labels of parameters), `model.remat`, `model.width` (how many rows
        a CPU takes at once), `data.sequence_length` and `data.subset_frac`.
      corpus: The rows to train on and the held-out rows: `ArrayRows`, or an object with the methods
        of `engine.inputs.Rows`.
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean loss over int32 rows [B, L + 1]. If it
        has a parameter `key`, it gets a PRNG key, another for each micro-batch (for dropout, say),
        a fixed one in batch-size tests, and none in evaluations.
      workdir: The run's folder; a run of these settings in it is resumed.
      init_fn: Makes one trainer's parameters from a PRNG key. Not needed with `params`.
      params: Initial parameters of all trainers. None: `init_fn` draws them.
      num_classes: Number of classes, if each row begins with its class and its length; the run then
        reports how well they are predicted. None for rows of text.
      inner_tx: Replaces `inner.tx` and is used as it is: it has its own rate and schedule, and the
        config's do not act (the ledger's learning_rate is 1). A resumed run needs the same.
      outer_tx: Replaces `outer.tx`, likewise.
      loss_unit: "nats/token" (perplexity is then reported too), "nats/example", or other words.
        None: "nats/example" with `num_classes`, "nats/token" if the corpus knows its tokens per
        byte, else no unit.
      loss_of: `loss_of(mode) -> loss_fn`, for a model that recomputes layers in the backward pass
        if `mode.remat` (`engine.memory.Mode`) says so. None: `loss_fn`, without.
      eval_loss_fn: `eval_loss_fn(params, rows)`, for held-out losses. None: `loss_fn`, whose `key`
        must then have a default, such as None for no dropout.
      label_params: `label_params(params)` returns a tree like `params` with "matrix", "embedding",
        "head" or "other" for each parameter (docs/extend.md), for Muon and others that treat these
        kinds unlike. None: by names, and refused if these do not say.
      on_round: `on_round(state, lines)` is called after each round; `lines` are the ledger's since
        the last call, such as `round` and `eval`. If a round fails, the run goes on from its newest
        checkpoint: `on_round` is called again for rounds that are repeated.
      command: The command line, for the ledger and the report.
      accept_config_change: Whether a resumed run may continue with changed settings, such as
        another learning rate.
      accept_data_change: Whether a resumed run may continue with other data.

    Returns:
      A `Result` with the run's folder (`workdir`), the parameters of the consensus model
      (`params`), its held-out loss (`loss`), and the final `state`.

    Raises:
      ConfigError: For an argument that cannot be used, an optimizer that the settings also name, or
        a folder that cannot be used.
      DataError: If there are too few held-out rows: one with one trainer, else two.
      UserError: In the other cases in which `train` raises an error, except while reading text.
    """
    folder = Path(workdir)
    model = own_model(
        loss_fn,
        loss_of=loss_of,
        init_fn=init_fn,
        params=params,
        num_classes=num_classes,
        inner_tx=inner_tx,
        outer_tx=outer_tx,
        eval_loss_fn=eval_loss_fn,
        label_params=label_params,
    )
    # Nothing is found in files: model and rows are the caller's.
    settings = completed(validate(settings), folder, reads=False)
    settings = check_own(settings, model, corpus)

    def put_together() -> Run:
        """Make the run; an error in one process is raised in all."""
        return assemble(
            settings,
            this_machine(),
            folder,
            trains=True,
            model=model,
            corpus=corpus,
            unit=loss_unit,
            command=command,
            accept_config_change=accept_config_change,
            accept_data_change=accept_data_change,
        )

    return run_to_end(processes.run_on_all(put_together), on_round)


def join(
    address: str,
    *,
    corpus: Rows,
    loss_fn: LossFn,
    init_fn: InitFn | None = None,
    params: PyTree | None = None,
    num_classes: int | None = None,
    inner_tx: optax.GradientTransformation | None = None,
    outer_tx: optax.GradientTransformation | None = None,
    loss_of: Callable[[Mode], LossFn] | None = None,
    eval_loss_fn: LossFn | None = None,
    label_params: Labeller | None = None,
) -> None:
    """Train for a run of `fit`, as `adloco join` does for `train`.

    The address is a ticket, or a bucket's. The other arguments are those of the driver's `fit` that
    describe model and rows. Only rows and shapes are compared, so run one script on all machines;
    settings come from the driver. Returns when the run is over, or on the main thread after SIGTERM
    or SIGINT, when the round under way has ended.

    Raises:
      ConfigError: If the bucket, the version, the rows or other arguments do not fit the run.
      ResourceError: If the driver cannot be reached.
    """
    model = own_model(
        loss_fn,
        loss_of=loss_of,
        init_fn=init_fn,
        params=params,
        num_classes=num_classes,
        inner_tx=inner_tx,
        outer_tx=outer_tx,
        eval_loss_fn=eval_loss_fn,
        label_params=label_params,
    )

    def checked_parts(settings: Settings) -> tuple[Model, Rows]:
        """Check the caller's model and rows against the driver's settings, and return both."""
        # The driver has set the rates that go with its own optimizers. `check_own` would refuse
        # options that are set beside an optimizer, so it gets none.
        check_own(settings, model._replace(inner_tx=None, outer_tx=None), corpus)
        return model, corpus

    join_run(address, own={}, parts=checked_parts)


def run_to_end(run: Run, on_round: OnRound | None = None) -> Result:
    """Run all remaining rounds of a run, export its consensus model, and write the report.

    `on_round` is that of `fit`. All processes of the run call this; process 0 writes.

    Raises:
      ConfigError: If another run uses the folder, the processes differ in config or data, or the
        user's own code raises an error.
      DataError: If the data have changed, or the ledger is damaged.
      CheckpointError: If no checkpoint can be used.
      DivergedError: If the losses of all trainers have become infinite or NaN.
      ResourceError: If memory or disk space is missing.
      Preempted: If the process received a signal to stop.
      Exception: What `on_round` raises.
    """
    check_rules(run)  # calls each function of the user's that the settings name, once
    require_equal_processes(run)
    if on_round is None:
        on_round = _ignore_round
    result = _last_attempt(run, on_round)
    exported = fetch(result.params)  # in all processes, because each may hold a part of an array
    if processes.is_first():
        tokenizer = getattr(run.corpus, "tokenizer", None)  # rows of the caller of `fit` have none
        write_consensus(
            exported,
            run.workdir / "export",
            run.settings,
            tokenizer,
            base_sha256=run.model.base.fingerprint,
        )
        report.conclude(run.workdir)  # prints the final table, and writes the report
    # No process returns before, or its caller might read an export that is not whole.
    processes.barrier("the export and the report are written")
    return result


def _ignore_round(state: State, lines: list[dict]) -> None:
    """Do nothing after a round: the caller gave no `on_round`."""


def _last_attempt(run: Run, on_round: OnRound) -> Result:
    """Run all remaining rounds, with a new attempt from the newest checkpoint on failure.

    The folder is locked meanwhile, and a signal sets the event `stop`. `after_failure` raises the
    error, or a ResourceError in its place, if another attempt would not help. Other errors end the
    run at once.
    """
    failures = Failures()  # of earlier attempts
    with (
        exclusive(run.workdir),
        processes.stop_requests(_STOPPING) as stop,
        processes.ending_if_another_fails(),
        _explaining(run),
    ):
        while True:
            # The newest checkpoint restores everything that a failed round has changed.
            with contextlib.ExitStack() as stack:  # closes what the attempt opens
                attempt = begin(run, stack, stop, failures)
                try:
                    state = _run_rounds(run, attempt, on_round)
                    return Result(
                        workdir=run.workdir,
                        params=attempt.evaluator.params,
                        loss=attempt.recorder.loss,
                        state=state,
                    )
                except (jax.errors.JaxRuntimeError, OSError) as error:
                    failures = after_failure(run, attempt, error, failures)


@contextlib.contextmanager
def _explaining(run: Run) -> Iterator[None]:
    """Add to errors of the `with` block what the user can do about them.

    The error of a run that was stopped, or lacked memory or disk space, says how it is resumed. An
    error in a user's function, such as a loss, becomes a ConfigError of one line, with the place.
    An error of `on_round` is raised as it was; all others pass.
    """
    try:
        yield
    except (Preempted, ResourceError) as error:
        if (run.workdir / "ledger.jsonl").exists():
            how = how_to_resume(run.workdir, by_fit=run.by_fit)
            error.args = (f"{error}; to resume: {how}",)
        raise
    except (UserError, OSError, jax.errors.JaxRuntimeError):
        raise
    except _ErrorOfOnRound as wrapped:  # the caller of `fit` catches its own errors
        raise wrapped.error from None
    except Exception as error:  # deliberately broad: a user's function may raise anything
        place = own_line(error)
        if not place:  # no user's function: a fault of the library, with its traceback
            raise
        raise ConfigError(f"{place}: {type(error).__name__}: {reason(error)}") from error


class _ErrorOfOnRound(Exception):
    """Wraps an error of the caller's `on_round`, so that it is not taken for one of the run."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def _run_rounds(run: Run, attempt: Attempt, on_round: OnRound) -> State:
    """Run the rounds that are left, and return the last state.

    Raises Preempted after a signal, DivergedError once no trainer's loss is finite, ResourceError
    if the run cannot be saved, and JAX's errors and OSError of a failed round, after which another
    attempt may help.
    """
    settings = run.settings
    engine = attempt.recorder.engine
    state = attempt.state
    if is_over(state.control, settings):  # as after a stop between the last round and the export
        attempt.evaluator.choose_consensus(state)  # which the result has
        if not attempt.ended:
            attempt.recorder.write_end(state.control, "finished")
        return state

    observers: list[Observer] = [  # called after each round, in this order
        attempt.recorder,
        attempt.evaluator,
        attempt.checkpoints,
        _observer_for_caller(attempt.recorder.ledger, on_round),
    ]
    # With learners, the driver compiles no programs of rounds: the learners do.
    is_local = settings.engine.kind == "local"
    with contextlib.ExitStack() as stack:
        if settings.checkpoint.watchdog_s is not None:
            watchdog = stack.enter_context(_watchdog(settings.checkpoint.watchdog_s))
            observers.insert(0, watchdog)
        # The programs of the next rounds, and that of held-out losses, begin to compile in the
        # background.
        needed = [evaluate.loss_key(engine.heldout.batch_size)]
        if is_local:
            needed = [*programs_ahead(state.control, settings, engine.programs.spec), *needed]
        engine.programs.prefetch(needed)
        try:
            state = adloco(state, settings=settings, engine=engine, observers=observers)
            # With learners, the driver has the parameters, and asks them for optimizer states.
            return State(engine.complete(state), state.control)
        except Stopped as error:  # by a signal: save, and raise Preempted
            # On this process's devices the round has begun, and may have taken the arrays' memory.
            attempt.checkpoints.end_by_signal(error.state, within=is_local)
        except Diverged as error:
            attempt.recorder(error.state, error.boundary)  # the loop has not recorded this round
            saved = last_checkpoint(run, attempt)
            attempt.recorder.write_end(error.state.control, "diverged")
            raise DivergedError(
                f"{error}: the loss of every trainer is not finite; {saved}; try a"
                " lower inner.learning_rate, a warm-up (inner.warmup_updates) or inner.clip_norm"
            ) from None


def _observer_for_caller(ledger: Ledger, on_round: OnRound) -> Observer:
    """Make an observer that calls `on_round` of the caller of `fit`.

    It is given the state, and the lines of the ledger since its last call.
    """
    lines: deque[dict] = deque()  # another thread writes lines too, on what it compiles
    ledger.listeners.append(lines.append)  # is called with each line that is written

    def call_on_round(state: State, boundary: Boundary) -> None:
        """Call `on_round` with the new lines.

        Raises _ErrorOfOnRound for an error of it, so that this is not taken for one of the run. A
        UserError is raised as it is.
        """
        # Only lines that are there now are taken: more may come meanwhile.
        new_lines = [lines.popleft() for _ in range(len(lines))]
        try:
            on_round(state, new_lines)
        except UserError:
            raise
        except Exception as error:  # deliberately broad: it is the caller's
            raise _ErrorOfOnRound(error) from error

    return call_on_round


@contextlib.contextmanager
def _watchdog(seconds: float) -> Iterator[Observer]:
    """End the process, with the tracebacks of all threads, if no round ends within some seconds.

    Yields an observer, which begins to count anew after each round.
    """

    def count_anew(state: State, boundary: Boundary) -> None:
        """Replace the timer by one that begins now."""
        faulthandler.dump_traceback_later(seconds, exit=True)

    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield count_anew
    finally:
        faulthandler.cancel_dump_traceback_later()
