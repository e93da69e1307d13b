"""One run, from its config to its report: what it needs is put together here, then `adloco` runs.

`train` is the run a config describes; `fit` is the same for a model and data of one's own.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax
import orbax.checkpoint
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax import __version__, hf
from adloco_jax.adloco import (
    Control,
    State,
    adloco,
    is_over,
    planned_max_batch_size,
    share_done,
    start,
)
from adloco_jax.core.types import Ensemble, LossFn, init, of_owners
from adloco_jax.data import Corpus
from adloco_jax.data.labelled import Labelled
from adloco_jax.data.sources import shard_changes
from adloco_jax.data.streaming import Streaming
from adloco_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ResourceError,
)
from adloco_jax.run import checkpoint, evaluate, memory_notes, observers, processes
from adloco_jax.run.batches import Rows, SequentialRows
from adloco_jax.run.build import (
    InitFn,
    attention,
    build_model,
    build_network,
    class_count,
    load_data,
    pretrained_params,
    program_spec,
    replayed_batches,
)
from adloco_jax.run.checkpoint import Saved, Saver
from adloco_jax.run.config import KNOBS, validate
from adloco_jax.run.engine import LocalEngine
from adloco_jax.run.health import Diverged
from adloco_jax.run.interrupts import stop_requests
from adloco_jax.run.ledger import START, Ledger, cut, finish, read
from adloco_jax.run.plan import data_header, devices, max_batch_size, run_header
from adloco_jax.run.programs import Compiled, Key, Programs, Spec, placement, use_compilation_cache
from adloco_jax.run.progress import Progress
from adloco_jax.run.resume import (
    check_config,
    check_workdir,
    exclusive,
    flat_settings,
    read_state,
    write_config,
)
from adloco_jax.run.sharding import fetch
from adloco_jax.run.throughput import flops_per_token, matmul_flops_per_s
from adloco_jax.run.trackers import Trackers, check_installed
from adloco_jax.settings import Settings

_OWN_KEYS = ("data.path", "data.heldout_path")  # may differ between processes: the data may not


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    workdir: Path
    params: PyTree  # the consensus
    loss: float  # its held-out loss, nats/token
    state: State

    @property
    def ensemble(self) -> Ensemble:
        """The final trainers and workers."""
        return self.state.ensemble

    @property
    def controller(self) -> Control:
        """The host's half of the final state."""
        return self.state.control


def train(
    config: ConfigDict,
    workdir: str | Path | None = None,
    *,
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
) -> Result:
    """Runs what a config describes, from text to a trained consensus, or goes on with such a run.

    SIGTERM or SIGINT saves and raises `Preempted` after the rounds under way: the devices are given
    a round before the last one is over, and several processes agree a round ahead, so that it may
    take two, or three. A second one ends the process. (Only where this is called on the main
    thread.)

    Args:
      config: From a file in `configs/`, or `default_config()` with changes.
      workdir: The run's folder, made if need be; one that holds a run is resumed. None makes
        `runs/train-<date>-<time>`.
      command: Recorded in the ledger, for the report's caption.
      accept_config_change: Whether a resumed run may go on with another learning rate and the like.
      accept_data_change: Whether it may go on with other data than it began with.

    Returns:
      The consensus, its loss and the whole final state.

    Raises:
      ConfigError: If the config or the folder cannot be used; before anything is compiled or made.
      DataError: If the text or tokens cannot be used, or are not those the run began with; before
        anything is compiled or made.
      CheckpointError: If the folder holds a run that cannot be read, or its checkpoints are deleted
        while one is written.
      DivergedError: If every trainer's loss has stopped being a number.
      ResourceError: If memory or disk do not suffice; what was saved stays.
      Preempted: After a signal, once everything is saved.
    """
    settings = validate(config)
    check_installed(settings.log)
    use_compilation_cache()
    if workdir is None and jax.process_count() > 1:
        raise ConfigError("workdir: several processes need the name of one folder")
    if workdir is None:
        workdir = Path("runs") / f"train-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    workdir = Path(workdir)

    def load() -> tuple[PyTree | None, Corpus | Labelled | Streaming]:
        check_workdir(workdir)
        check_config(workdir, settings, accept=accept_config_change)
        params = None
        if settings.model.init_from and not checkpoint.list_rounds(workdir / "checkpoints"):
            params = pretrained_params(settings)
        return params, load_data(settings)

    params, corpus = processes.together(load)
    init_fn, loss_fn = build_model(settings)
    with processes.only_first_prints():
        print(data_header(corpus))
        result = fit(
            settings,
            corpus=corpus,
            init_fn=init_fn,
            loss_fn=loss_fn,
            params=params,
            num_classes=class_count(settings),
            workdir=workdir,
            command=command,
            accept_config_change=accept_config_change,
            accept_data_change=accept_data_change,
        )
    params, network = fetch(result.params), build_network(settings)
    if processes.is_first() and hf.weight_map(network) is None:
        print(f"nothing is exported: model.arch = {settings.model.arch} has no weight_map")
    elif processes.is_first():
        hf.save(params, result.workdir / "export", corpus.tokenizer, network=network)
    processes.meet("the export is written")
    return result


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
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
) -> Result:
    """Runs AdLoCo on any model and rows of tokens, or goes on with such a run.

    Args:
      settings: From `validate`; its `model` and `data` groups are only recorded.
      corpus: Rows to train on and to hold out; `SequentialRows` are taken back to their place at
        the start and after a failure.
      init_fn: Makes one trainer's parameters from a PRNG key.
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean over int32 rows [B, L + 1].
      workdir: The run's folder; one that holds a run of these settings is resumed.
      params: What all trainers start from, of `init_fn`'s structure; None draws it.
      num_classes: Where rows begin with a class and a length (`data.labelled`): how many classes,
        whose prediction is then evaluated too. None for rows of text.
      inner_tx: The workers' optimizer in place of the one that `inner.tx` names, built with
        learning rate 1, or a schedule times 1: the config's rate, warm-up and schedule multiply its
        updates. A run that goes on needs the same one.
      outer_tx: The trainers' optimizer in place of the one that `outer.tx` names, built in
        the same way.
      command: Recorded in the ledger.
      accept_config_change: As in `train`.
      accept_data_change: As in `train`.

    Returns:
      As `train`.

    Raises:
      ValueError: If an optimizer is given here and named in the settings, too.
      ConfigError: As `train`, and if `init_fn` makes no array.
      DataError: If there are too few held-out rows: one, or two with several trainers (of each
        class, where there are classes).
      Exception: Otherwise as `train`, but for faults in text.
    """
    workdir = Path(workdir)
    check_installed(settings.log)
    for key, given in (("inner.tx", inner_tx), ("outer.tx", outer_tx)):
        group, name = getattr(settings, key[:5]), KNOBS[key].metadata["default"]
        if given is not None and group.tx != name:
            raise ValueError(
                f"{key[:5]}_tx: given beside {key}={group.tx!r}; leave {key} at {name!r}"
            )

    def check() -> evaluate.HeldOut:
        check_workdir(workdir)
        check_config(workdir, settings, accept=accept_config_change)
        if not jax.tree.leaves(jax.eval_shape(init_fn, jax.random.key(0))):
            raise ConfigError("init_fn: its parameters hold no array; expected at least one")
        return evaluate.split_heldout(
            corpus.heldout_rows,
            num_sequences=settings.eval.num_sequences,
            batch_size=settings.batching.initial_batch_size,  # replaced by the control's
            num_classes=num_classes,
            num_trainers=settings.ensemble.num_trainers,
        )

    heldout = processes.together(check)
    spec = program_spec(
        settings,
        init_fn,
        loss_fn,
        corpus.heldout_rows.shape[1],
        num_classes=num_classes,
        inner_tx=inner_tx,
        outer_tx=outer_tx,
    )
    _require_equal_processes(settings, spec, corpus, params)
    run = _Run(settings, spec, corpus, heldout, init_fn, params, num_classes, workdir, command)
    faults, smaller, failed_round = [], {}, None
    with exclusive(workdir), stop_requests() as stop:
        while True:
            # All that a failed round has touched is restored from the newest checkpoint.
            with contextlib.ExitStack() as stack:
                attempt = _begin(run, stack, stop, faults, smaller, accept_data_change)
                try:
                    return _execute(run, attempt)
                except (jax.errors.JaxRuntimeError, OSError) as error:
                    control = attempt.watch.engine.underway
                    faults, smaller = _after_failure(
                        run, attempt, error, faults, smaller, failed_round
                    )
                    failed_round = control.round


@dataclass(frozen=True)
class _Run:
    """What all attempts at a run share."""

    settings: Settings
    spec: Spec
    corpus: Rows
    heldout: evaluate.HeldOut
    init_fn: InitFn
    params: PyTree | None
    num_classes: int | None
    workdir: Path
    command: str


@dataclass
class _Attempt:
    """A run from its newest checkpoint to its end, or to a failure."""

    state: State
    ended: bool  # its ledger says so
    watch: observers.Watch
    recorder: observers.Recorder
    evaluator: observers.Evaluator
    checkpoints: observers.Checkpoints


def _begin(
    run: _Run,
    stack: contextlib.ExitStack,
    stop: threading.Event,
    faults: list[dict],
    smaller: dict[str, Any],
    accept_data_change: bool,
) -> _Attempt:
    """Restores the newest checkpoint, or starts from the beginning where there is none.

    Args:
      run: What to run.
      stack: Closes what is opened here.
      stop: Set at a signal.
      faults: Of the attempts before this one.
      smaller: Of the control, what an attempt that ran out of memory has changed.
      accept_data_change: As in `train`.
    """
    settings, spec, folder = run.settings, run.spec, run.workdir / "checkpoints"
    start_s = time.perf_counter()
    found = checkpoint.newest(folder, lambda path: read_state(path, settings, spec))
    restored, damage = found or (None, [])
    path = run.workdir / "ledger.jsonl"
    events = read(path) if path.exists() else []
    processes.gather(None)  # all have read what the first one is about to change
    if restored is None and any(event["event"] == "checkpoint" for event in events):
        raise CheckpointError(
            f"{folder}: the checkpoints that {path.name} records are gone; restore them from a"
            " copy, or name another folder"
        )
    host = restored.host if restored else {"ledger": START, "wall_s": 0.0, "loss": None}
    known = restored.state.control.replayed if restored else {}
    replayed = known or processes.together(lambda: replayed_batches(settings))
    if restored and not accept_data_change:
        _check_data(run, host["data"])
    progress = Progress(settings.num_rounds, every=settings.log.every_rounds)
    stack.callback(progress.close)
    ledger = processes.together(lambda: _open_ledger(run, stack, host["ledger"], progress))
    programs = Programs(spec, lambda compiled: ledger.write("compile", **_compile_fields(compiled)))
    stack.callback(programs.close)
    if isinstance(run.corpus, SequentialRows):
        stack.callback(run.corpus.close)
        run.corpus.restore(restored.host["data"].get("place") if restored else None)
    if restored is None:
        least = min(processes.gather(max_batch_size(settings, programs)))
        control = start(settings, least)
    else:
        control = restored.state.control
        given = settings.batching.max_batch_size
        if given is not None and given != host["max_batch_size_given"]:
            control = dataclasses.replace(control, max_batch_size=given)
    control = dataclasses.replace(control, replayed=replayed, **smaller)
    control, noted = _heed_memory_notes(run.workdir, control)
    heldout = dataclasses.replace(run.heldout, batch_size=control.eval_batch_size)
    engine = LocalEngine(settings, spec, programs, run.corpus, heldout)
    engine.underway = control
    watch = observers.Watch(
        settings=settings,
        engine=engine,
        ledger=ledger,
        progress=progress,
        workdir=run.workdir,
        num_classes=run.num_classes,
        start_s=start_s - host["wall_s"],
        loss=float("nan") if host["loss"] is None else host["loss"],
    )
    end = finish(events)
    ended = bool(end) and share_done(end["rounds"], end["tokens_total"], settings) >= 1
    ended = ended and is_over(control, settings)
    if not ended:  # what is damaged in a finished run is run again
        _write_start(run, ledger, control, damage, [*faults, *noted])
    for line in damage:
        progress.note(f"damaged, and set aside: {line}")
    if control.round:
        progress.note(f"going on after round {control.round}")
    for line in run_header(settings, spec, control.max_batch_size):
        progress.note(line)
    ensemble = restored.state.ensemble if restored else _initial_ensemble(run, control)
    saver = Saver(folder, keep=settings.checkpoint.keep, on_saved=_on_saved(run.workdir, ledger))
    stack.callback(saver.close)
    recorder = observers.Recorder(watch)
    return _Attempt(
        state=State(ensemble, control),
        ended=ended,
        watch=watch,
        recorder=recorder,
        evaluator=observers.Evaluator(watch, recorder),
        checkpoints=observers.Checkpoints(
            watch, recorder, saver, stop.is_set, lambda state: _host(run, watch, state)
        ),
    )


def _execute(run: _Run, attempt: _Attempt) -> Result:
    """All rounds that are left."""
    settings, watch, state = run.settings, attempt.watch, attempt.state
    if is_over(state.control, settings):
        attempt.evaluator.consensus(state)
        if not attempt.ended:
            attempt.recorder.write_end(state.control, "finished")
        return Result(run.workdir, watch.consensus, watch.loss, state)
    # Compilation first, while the devices are busy with the round.
    observe = [observers.prefetch(watch), attempt.recorder, attempt.evaluator, attempt.checkpoints]
    with contextlib.ExitStack() as stack:
        if settings.checkpoint.watchdog_s is not None:
            stack.callback(faulthandler.cancel_dump_traceback_later)
            faulthandler.dump_traceback_later(settings.checkpoint.watchdog_s, exit=True)
            observe.insert(0, observers.watchdog(settings.checkpoint.watchdog_s))
        ahead = observers.programs_ahead(state.control, settings, run.spec)
        watch.engine.programs.prefetch([*ahead, evaluate.loss_key(watch.engine.heldout.batch_size)])
        try:
            state = adloco(state, settings=settings, engine=watch.engine, observers=observe)
            state = watch.engine.settled(state)  # as it was saved
        except Diverged as error:
            attempt.recorder.flush(state)
            saved = _last_checkpoint(run, attempt)
            attempt.recorder.write_end(watch.engine.underway, "diverged")
            raise DivergedError(
                f"round {error.round}: no trainer's loss is a number any more; {saved}; try a lower"
                " inner.learning_rate, a warm-up (inner.warmup_updates) or inner.clip_norm"
            ) from None
    return Result(run.workdir, watch.consensus, watch.loss, state)


def _after_failure(
    run: _Run,
    attempt: _Attempt,
    error: jax.errors.JaxRuntimeError | OSError,
    faults: list[dict],
    smaller: dict[str, Any],
    failed_round: int | None,
) -> tuple[list[dict], dict[str, Any]]:
    """What the next attempt records, and the changes of its control.

    Raises:
      ResourceError: If there is no smaller one to try.
      Exception: The error itself, if the same round has failed before.
    """
    attempt.recorder.write_events()
    control = attempt.watch.engine.underway
    index, max_batch = control.round + 1, control.max_batch_size
    cause = " ".join(str(error).split())[:300]
    exhausted = "RESOURCE_EXHAUSTED" in str(error)
    if exhausted and max_batch == 1:
        raise ResourceError(
            f"round {index}: out of memory at a micro-batch of 1: {cause}; use fewer workers, a"
            " smaller model or shorter sequences, or model.remat"
        ) from error
    if jax.process_count() > 1:
        if exhausted:
            memory_notes.leave(
                run.workdir,
                round_index=index,
                process=jax.process_index(),
                max_batch_size=max_batch // 2,
            )
        raise ResourceError(
            f"round {index}: process {jax.process_index()} failed ({cause}); all start again from"
            f" what is saved: {_last_checkpoint(run, attempt)}"
        ) from error
    fault = {"round": index, "cause": cause}
    if exhausted:
        sizes = {"max_batch_size_before": max_batch, "max_batch_size": max_batch // 2}
        fault |= {"kind": "out_of_memory", **sizes}
        smaller = {
            "max_batch_size": max_batch // 2,
            "redo_round": max(index, control.redo_round),
            "redo_max_batch_size": planned_max_batch_size(control),
        }
    elif control.round == failed_round:
        raise error
    else:
        fault |= {"kind": "round_failed"}
    attempt.watch.progress.note(f"round {index} failed ({cause}); going back to what is saved")
    return [*faults, fault], smaller


def _last_checkpoint(run: _Run, attempt: _Attempt) -> str:
    with contextlib.suppress(CheckpointError, ResourceError):
        attempt.checkpoints.saver.wait()
    return checkpoint.last(run.workdir / "checkpoints")


def _require_equal_processes(
    settings: Settings, spec: Spec, corpus: Rows, params: PyTree | None
) -> None:
    found = {"model_shards": spec.model_shards, "attention": attention(settings)}
    digest = _digest(params) if jax.process_count() > 1 else ""
    processes.require_equal(
        {key: repr(value) for key, value in flat_settings(settings).items() if key not in _OWN_KEYS}
        | {f"{name}, as found there": repr(value) for name, value in found.items()}
        | {"the data": corpus.fingerprint, "the weights it starts from": digest}
        | {f"the version of {name}": version for name, version in _versions().items()},
        "all processes of a run need the same",
    )


def _open_ledger(
    run: _Run, stack: contextlib.ExitStack, position: dict, progress: Progress
) -> Ledger:
    """The run's ledger, as far as the restored state knows it, and its trackers."""
    if not processes.is_first():
        return stack.enter_context(Ledger(os.devnull))
    settings, path = run.settings, run.workdir / "ledger.jsonl"
    fingerprint = run.corpus.fingerprint
    write_config(run.workdir, settings, versions=_versions(), data_fingerprint=fingerprint)
    cut(path, position)
    kept = read(path) if path.exists() else []

    def drop(name: str, at_round: int, cause: str) -> None:
        ledger.write("fault", kind="tracker", round=at_round, tracker=name, cause=cause)
        progress.note(f"log.{name} is off from here on: {cause}")

    trackers = Trackers(settings.log, run.workdir, kept, drop)
    ledger = stack.enter_context(Ledger(path, trackers))
    stack.callback(trackers.close)
    return ledger


def _heed_memory_notes(workdir: Path, control: Control) -> tuple[Control, list[dict]]:
    """A smaller micro-batch where a process of this run had run out of memory, with the fault."""
    before = control.max_batch_size
    noted = memory_notes.least(workdir, after_round=control.round)
    # A process may not yet see what another has written, but what it has written itself.
    least = min(processes.gather(before if noted is None else noted))
    if least >= before:
        return control, []
    sizes = {"max_batch_size_before": before, "max_batch_size": least}
    fault = {"kind": "out_of_memory", "round": control.round + 1, **sizes}
    cause = {"cause": "a process had run out of memory"}
    return dataclasses.replace(control, max_batch_size=least), [fault | cause]


def _check_data(run: _Run, recorded: dict) -> None:
    if recorded["fingerprint"] == run.corpus.fingerprint:
        return
    changes = shard_changes(recorded["shards"], list(run.corpus.shards))
    advice = (
        f"{run.workdir}: the data are not those that this run began with; restore them, or"
        " --accept-data-change to go on with these"
    )
    raise DataError("\n".join([*changes, advice]))


def _initial_ensemble(run: _Run, control: Control) -> Ensemble:
    settings, spec = run.settings.ensemble, run.spec
    key = jax.random.key(run.settings.seed)

    def make(key, params):
        stack = init(
            run.init_fn(key) if params is None else params,
            num_trainers=settings.num_trainers,
            num_workers=settings.num_workers,
            inner_tx=spec.inner_tx,
            outer_tx=spec.outer_tx,
        )
        if settings.init == "independent":
            keys_M = jax.random.split(key, settings.num_trainers)
            stack = stack.replace(params_M=jax.vmap(run.init_fn)(keys_M))
        if spec.own_params:
            stack = stack.replace(params_R=of_owners(stack.params_M, stack.owners))
        return stack

    at = placement(spec, Key("stats", tuple(control.owners)))
    shardings = at.ensemble(jax.eval_shape(make, key, run.params))
    return jax.jit(make, out_shardings=shardings)(key, run.params)


def _host(run: _Run, watch: observers.Watch, state: State) -> dict:
    """What a checkpoint holds of a state beside its arrays."""
    return {
        "control": dataclasses.asdict(state.control),
        "max_batch_size_given": run.settings.batching.max_batch_size,
        "loss": watch.loss if np.isfinite(watch.loss) else None,
        "wall_s": time.perf_counter() - watch.start_s,
        "ledger": watch.ledger.position() if processes.is_first() else None,
        "data": {
            "fingerprint": run.corpus.fingerprint,
            "shards": list(run.corpus.shards),
            "place": watch.engine.place,
        },
        "config": dataclasses.asdict(run.settings),
        "versions": _versions(),
        "devices": devices(),
    }


def _on_saved(workdir: Path, ledger: Ledger) -> Callable[[Saved], None]:
    def record(saved: Saved) -> None:
        if processes.is_first():
            memory_notes.forget(workdir, up_to_round=saved.round)
        ledger.write(
            "checkpoint",
            round=saved.round,
            bytes=saved.size_bytes,
            blocked_s=round(saved.blocked_s, 4),
            save_s=round(saved.save_s, 4),
        )

    return record


def _compile_fields(compiled: Compiled) -> dict:
    return {
        "key": str(compiled.key),
        "seconds": round(compiled.seconds, 3),
        "cache": "hit" if compiled.hit else "miss",
        "where": "background" if compiled.background else "foreground",
        "needed_bytes": compiled.needed_bytes,
    }


def _write_start(
    run: _Run, ledger: Ledger, control: Control, damage: list[str], faults: list[dict]
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
        attention=attention(settings),
        flops_per_token=flops_per_token(spec.params),
        matmul_flops_per_s=round(matmul_flops_per_s(settings.model.dtype)),
        devices=devices(),
        jax=jax.__version__,
        versions=_versions(),
        data_fingerprint=run.corpus.fingerprint,
        tokens_per_byte=run.corpus.tokens_per_byte,
        round=control.round,
        max_batch_size=control.max_batch_size,
        buckets=settings.batching.buckets,
    )
    for line in damage:
        ledger.write("fault", kind="checkpoint", round=control.round, cause=line)
    for shard in run.corpus.shards:
        if shard.get("skipped") or shard.get("bad_rows"):
            ledger.write("fault", kind="bad_data", round=control.round, **shard)
    for fault in faults:
        ledger.write("fault", **fault)


def _digest(params: PyTree) -> str:
    """Of every leaf's path, type, shape and bytes."""
    sha256 = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = np.asarray(leaf)
        sha256.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        sha256.update(leaf.tobytes())
    return sha256.hexdigest()


def _versions() -> dict[str, str]:
    """Of what may change a run's bits."""
    packages = (jax, jaxlib, flax, optax, orbax.checkpoint, np)
    names = {package.__name__: package.__version__ for package in packages}
    return {"adloco_jax": __version__, "python": platform.python_version(), **names}
