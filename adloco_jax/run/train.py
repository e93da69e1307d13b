"""A whole run: data, rounds, statistics, batch plans, merges, evaluation, ledger.

`train` is the run a config describes; `fit` is the same loop for a model and data of one's own. The
devices are kept busy: the batch-size test and the round are dispatched first, and the host decides
the next round's batches and prepares its data while they run.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import hashlib
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import orbax.checkpoint
from jax import Array
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax import __version__, hf
from adloco_jax.core.base import Ensemble, LossFn, of_owners
from adloco_jax.core.ensemble import init, reassign, take
from adloco_jax.core.merge import merge
from adloco_jax.data import Corpus
from adloco_jax.data.labelled import Labelled
from adloco_jax.data.sources import shard_changes
from adloco_jax.data.streaming import Streaming
from adloco_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    Preempted,
    ResourceError,
)
from adloco_jax.run import checkpoint, evaluate, memory_notes, processes
from adloco_jax.run import controller as control
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
from adloco_jax.run.config import Settings, validate
from adloco_jax.run.controller import Controller, Decision, Merge
from adloco_jax.run.crashpoints import hit
from adloco_jax.run.interrupts import stop_requests
from adloco_jax.run.ledger import START, Ledger, cut, finish, read
from adloco_jax.run.placement import Placement, copy_back, copy_to_host, fetch
from adloco_jax.run.plan import data_header, devices, max_batch_size, run_header
from adloco_jax.run.programs import (
    Compiled,
    Key,
    Programs,
    Spec,
    ensemble_spec,
    measured_peaks,
    placement,
    use_compilation_cache,
)
from adloco_jax.run.progress import Progress
from adloco_jax.run.resume import (
    check_config,
    check_workdir,
    exclusive,
    flat_settings,
    write_config,
)
from adloco_jax.run.rounds import (
    Dispatched,
    Prepared,
    Rows,
    SequentialRows,
    dispatch,
    prepare,
    programs_ahead,
    read_outcomes,
    synchronise,
    test_key,
    update_keys,
)
from adloco_jax.run.throughput import flops_per_token, matmul_flops_per_s
from adloco_jax.run.trackers import Trackers, check_installed

_OWN_KEYS = ("data.path", "data.heldout_path")  # may differ between processes: the data may not


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    workdir: Path
    params: PyTree  # the consensus
    loss: float  # its held-out loss, nats/token
    ensemble: Ensemble
    controller: Controller


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
      DataError: If the text or tokens cannot be used, or are not those of the run; likewise.
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
    if processes.is_first():
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
      command: Recorded in the ledger.
      accept_config_change: As in `train`.
      accept_data_change: As in `train`.

    Returns:
      As `train`.

    Raises:
      ConfigError: As `train`, and if `init_fn` makes no array.
      DataError: If there are too few held-out rows: one, or two with several trainers (of each
        class, where there are classes).
      Exception: Otherwise as `train`, but for faults in text.
    """
    workdir = Path(workdir)
    check_installed(settings.log)

    def check() -> evaluate.HeldOut:
        check_workdir(workdir)
        check_config(workdir, settings, accept=accept_config_change)
        if not jax.tree.leaves(jax.eval_shape(init_fn, jax.random.key(0))):
            raise ConfigError("init_fn: its parameters hold no array; expected at least one")
        return evaluate.split_heldout(
            corpus.heldout_rows,
            num_sequences=settings.eval.num_sequences,
            batch_size=settings.batching.initial_batch_size,  # for now, see `_Run.begin`
            num_classes=num_classes,
            num_trainers=settings.ensemble.num_trainers,
        )

    heldout = processes.together(check)
    spec = program_spec(
        settings, init_fn, loss_fn, corpus.heldout_rows.shape[1], num_classes=num_classes
    )
    found = {"model_shards": spec.model_shards, "attention": attention(settings)}
    start = _digest(params) if jax.process_count() > 1 else ""
    processes.require_equal(
        {key: repr(value) for key, value in flat_settings(settings).items() if key not in _OWN_KEYS}
        | {f"{name}, as found there": repr(value) for name, value in found.items()}
        | {"the data": corpus.fingerprint, "the weights it starts from": start}
        | {f"the version of {name}": version for name, version in _versions().items()},
        "all processes of a run need the same",
    )
    failed_round, faults, max_batch, redo = None, [], None, None
    with exclusive(workdir), stop_requests() as stop:
        while True:
            # All that a failed round has touched is made anew, from the newest checkpoint.
            with contextlib.closing(
                _Run(
                    settings,
                    spec,
                    corpus,
                    heldout,
                    num_classes,
                    workdir,
                    stop,
                    command,
                    faults,
                    max_batch,
                    redo,
                )
            ) as run:
                run.begin(init_fn, params, accept_data_change=accept_data_change)
                try:
                    return run.execute()
                except (jax.errors.JaxRuntimeError, OSError) as error:
                    faults, max_batch, redo = run.after_failure(error, failed_round)
                    failed_round = run.controller.round


class _State(NamedTuple):
    """What a checkpoint holds."""

    controller: Controller
    ensemble: Ensemble
    host: dict


class _Redo(NamedTuple):
    """Rounds that are run again after running out of memory, on the same sequences."""

    up_to_round: int
    max_batch_size: int  # that they were planned with


@dataclass
class _Run:
    """One run's moving parts; `execute` reads top-down as the algorithm does."""

    settings: Settings
    spec: Spec
    corpus: Rows
    heldout: evaluate.HeldOut
    num_classes: int | None
    workdir: Path
    stop: threading.Event
    command: str
    faults: list[dict]  # of the attempt before this one
    max_batch: int | None  # what is left of it after an attempt that ran out of memory
    redo: _Redo | None
    exit: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    place: dict | None = None  # of sequential rows, once those of the last dispatched round are out
    up_to_date: set[int] = field(default_factory=set)  # trainers, by id; see `_synchronise`
    unshown: tuple[int, dict, float] | None = None  # a recorded round: its line; see `_show`

    def begin(self, init_fn: InitFn, params: PyTree | None, *, accept_data_change: bool) -> None:
        """Takes up the newest checkpoint, or starts from the beginning where there is none."""
        settings, folder = self.settings, self.workdir / "checkpoints"
        start_s = time.perf_counter()
        found = checkpoint.newest(folder, self._read_state)
        state, damage = found or (None, [])
        path = self.workdir / "ledger.jsonl"
        events = read(path) if path.exists() else []
        processes.gather(None)  # all have read what the first one is about to change
        if state is None and any(event["event"] == "checkpoint" for event in events):
            raise CheckpointError(
                f"{folder}: the checkpoints that {path.name} records are gone; restore them from a"
                " copy, or name another folder"
            )
        host = state.host if state else {"ledger": START, "wall_s": 0.0, "loss": None}
        known = state is not None and state.controller.replayed
        replayed = known or processes.together(lambda: replayed_batches(settings))
        if state and not accept_data_change:
            self._check_data(state.host["data"])
        fingerprint = self.corpus.fingerprint

        def open_ledger() -> Ledger:
            if not processes.is_first():
                return self.exit.enter_context(Ledger(os.devnull))
            write_config(self.workdir, settings, versions=_versions(), data_fingerprint=fingerprint)
            cut(path, host["ledger"])
            kept = read(path) if path.exists() else []
            trackers = Trackers(settings.log, self.workdir, kept, self._drop_tracker)
            ledger = self.exit.enter_context(Ledger(path, trackers))
            self.exit.callback(trackers.close)
            return ledger

        self.ledger = processes.together(open_ledger)
        self.saver = Saver(folder, keep=settings.checkpoint.keep, on_saved=self._saved)
        self.exit.callback(self.saver.close)
        self.programs = Programs(self.spec, self._compiled)
        self.exit.callback(self.programs.close)
        if isinstance(self.corpus, SequentialRows):
            self.exit.callback(self.corpus.close)
            self.place = state.host["data"].get("place") if state else None
            self.corpus.restore(self.place)
        if state is None:
            max_batch = min(processes.gather(max_batch_size(settings, self.programs)))
            self.controller = control.start(settings, max_batch)
        else:
            self.controller = state.controller
            given = settings.batching.max_batch_size
            if given is not None and given != host["max_batch_size_given"]:
                self.controller.max_batch_size = given
        self.controller.replayed = replayed
        if self.redo is None and host.get("redo"):
            self.redo = _Redo(*host["redo"])
        if self.max_batch is not None:
            self.controller.max_batch_size = min(self.controller.max_batch_size, self.max_batch)
        self._heed_memory_notes()
        self.heldout = dataclasses.replace(self.heldout, batch_size=self.controller.eval_batch_size)
        self.tried: set[Key] = set()  # programs that have run without exhausting the memory
        self.progress = Progress(settings.num_rounds, every=settings.log.every_rounds)
        self.exit.callback(self.progress.close)
        self.start_s = start_s - host["wall_s"]
        self.last_end_s = self.last_save_s = time.perf_counter()
        self.tokens, self.seconds = 0, 0.0  # of the rounds of this process, see `_throughput`
        self.loss = float("nan") if host["loss"] is None else host["loss"]
        # What is damaged in a finished run is run again.
        end = finish(events)
        said = bool(end) and control.share_done(end["rounds"], end["tokens_total"], settings) >= 1
        self.ended = said and self._share_done() >= 1
        if not self.ended:
            self._write_start(damage)
        for line in damage:
            self.progress.note(f"damaged, and set aside: {line}")
        if self.controller.round:
            self.progress.note(f"going on after round {self.controller.round}")
        for line in run_header(settings, self.spec, self.controller.max_batch_size):
            self.progress.note(line)
        self.ensemble = state.ensemble if state else self._initial_ensemble(init_fn, params)

    def close(self) -> None:
        """Ends what `begin` has started, in the reverse order."""
        self.exit.close()

    def execute(self) -> Result:
        """All rounds that are left."""
        settings, controller = self.settings, self.controller
        if self._share_done() >= 1:
            consensus, _ = self._consensus()
            if not self.ended:
                self._write_end("finished")
            return Result(self.workdir, consensus, self.loss, self.ensemble, controller)
        ahead = programs_ahead(controller, settings)
        self.programs.prefetch([*ahead, evaluate.evaluate_key(self.heldout.batch_size)])
        prepared, previous, consensus = self._prepare(), None, None
        watchdog_s = settings.checkpoint.watchdog_s
        self.exit.callback(faulthandler.cancel_dump_traceback_later)
        while self._share_done() < 1:
            if watchdog_s is not None:
                faulthandler.dump_traceback_later(watchdog_s, exit=True)
            vote = processes.Vote(lambda: [self.stop.is_set(), self._save_by_clock()])
            prepared, dispatched = self._dispatch(prepared)
            if previous:
                self._record(*previous)
                self._show()
            previous = dispatched, self._decide(dispatched, prepared), self._share_done()
            hit("round.decided")
            last = self._share_done() >= 1
            if not last:
                self.programs.prefetch(programs_ahead(controller, settings))
            evaluate_now = last or controller.round % settings.eval.every_rounds == 0
            stop_now, save_by_clock = vote.read()
            save_now = last or stop_now or save_by_clock or self._save_by_round()
            merge_round = control.is_merge_round(controller, settings)
            # What this round broke is known now before a merge only, lest it depend on how often
            # one evaluates or saves.
            if merge_round:
                self._record(*previous)
                previous = None
            by_round = controller.round - (0 if merge_round else 1)
            broken = control.broken_trainers(controller, by_round=by_round)
            if broken:
                if previous:
                    self._record(*previous)
                    previous = None
                self._quarantine(broken)
            merge_now = control.due_merge(controller, settings)
            if not merge_now and not last:
                prepared = self._prepare()  # while the devices are at work
            if previous and (evaluate_now or save_now):
                self._record(*previous)
                previous = None
            if last:
                self._synchronise(range(len(controller.trainers)))
            if merge_now:
                self._merge(merge_now)
                if not last:
                    prepared = self._prepare()
            if evaluate_now:
                consensus = self._evaluate()
            self._show()  # what has been recorded, now that it is evaluated if it is to be
            if save_now:
                self._save(self.loss if evaluate_now else None)
            if stop_now and not last:
                self._preempted()
        self._settle_saves()
        self._write_end("finished")
        return Result(self.workdir, consensus, self.loss, self.ensemble, controller)

    def _share_done(self) -> float:
        return control.share_done(
            self.controller.round, self.controller.tokens_total, self.settings
        )

    def after_failure(
        self, error: jax.errors.JaxRuntimeError | OSError, failed_round: int | None
    ) -> tuple[list[dict], int | None, _Redo | None]:
        """What the next attempt records, the largest micro-batch it may use, and what it redoes.

        Raises:
          ResourceError: If there is no smaller one to try.
          Exception: The error itself, if the same round has failed before.
        """
        this_round, max_batch = self.controller.round, self.controller.max_batch_size
        cause = " ".join(str(error).split())[:300]
        if "RESOURCE_EXHAUSTED" in str(error) and max_batch == 1:
            raise ResourceError(
                f"round {this_round + 1}: out of memory at a micro-batch of 1: {cause}; use"
                " fewer workers, a smaller model or shorter sequences, or model.remat"
            ) from error
        if jax.process_count() > 1:
            if "RESOURCE_EXHAUSTED" in str(error):
                memory_notes.leave(
                    self.workdir,
                    round_index=this_round + 1,
                    process=jax.process_index(),
                    max_batch_size=max_batch // 2,
                )
            raise ResourceError(
                f"round {this_round + 1}: process {jax.process_index()} failed ({cause}); all start"
                f" again from what is saved: {self._last_checkpoint()}"
            ) from error
        fault, redo = {"round": this_round + 1, "cause": cause}, self.redo
        if "RESOURCE_EXHAUSTED" in str(error):
            halved = {"max_batch_size_before": max_batch, "max_batch_size": max_batch // 2}
            fault |= {"kind": "out_of_memory", **halved}
            up_to_round = max(this_round + 1, redo.up_to_round if redo else 0)
            redo = _Redo(up_to_round, self._planned_max_batch())
            max_batch //= 2
        elif this_round == failed_round:
            raise error
        else:
            fault |= {"kind": "round_failed"}
            max_batch = self.max_batch
        self.progress.note(f"round {this_round + 1} failed ({cause}); going back to what is saved")
        return [*self.faults, fault], max_batch, redo

    def _heed_memory_notes(self) -> None:
        before = self.controller.max_batch_size
        noted = memory_notes.least(self.workdir, after_round=self.controller.round)
        # A process may not yet see what another has written, but what it has written itself.
        least = min(processes.gather(before if noted is None else noted))
        if least < before:
            self.controller.max_batch_size = least
            sizes = {"max_batch_size_before": before, "max_batch_size": least}
            cause = "a process had run out of memory"
            fault = {"round": self.controller.round + 1, "cause": cause, **sizes}
            self.faults = [*self.faults, {"kind": "out_of_memory", **fault}]

    def _prepare(self) -> Prepared:
        controller, settings = self.controller, self.settings
        planned = dataclasses.replace(controller, max_batch_size=self._planned_max_batch())
        groups = control.plan_round(planned, settings)
        if planned.max_batch_size > controller.max_batch_size:
            groups = control.smaller_micro_batches(controller, settings, groups)
        return prepare(controller, settings, self.spec, self.corpus, groups)

    def _planned_max_batch(self) -> int:
        """What the next round is planned with: of a round that is run again, as it was before."""
        if self.redo is not None and self.controller.round < self.redo.up_to_round:
            return self.redo.max_batch_size
        return self.controller.max_batch_size

    def _dispatch(self, prepared: Prepared) -> tuple[Prepared, Dispatched]:
        """Starts a round. Where its programs exhaust the memory, the round is undone and halved.

        The ensemble's buffers are given up to the round, so a copy is kept on the host while a
        program has not proved itself. The same sequences are then used in smaller micro-batches.
        """
        keys = update_keys(prepared.groups)
        untried = self.controller.max_batch_size > 1 and not self.tried.issuperset(keys)
        backup = copy_to_host(self.ensemble) if untried else None
        try:
            self.ensemble, dispatched = dispatch(
                self.programs, self.controller, self.ensemble, prepared
            )
            if untried:
                jax.block_until_ready((self.ensemble, dispatched.measured))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or backup is None:
                raise
            if jax.process_count() > 1:
                raise  # the others may have begun: all go back, see `after_failure`
            self.ensemble = copy_back(backup)
            self._halve_max_batch(str(error).splitlines()[0])
            groups = control.smaller_micro_batches(self.controller, self.settings, prepared.groups)
            if isinstance(self.corpus, SequentialRows):
                self.corpus.restore(self.place)
            return self._dispatch(
                prepare(self.controller, self.settings, self.spec, self.corpus, groups)
            )
        self.tried.update(keys)
        self.up_to_date.clear()
        if isinstance(self.corpus, SequentialRows):
            self.place = self.corpus.state()  # now: the next round's rows may be out before a save
        return prepared, dispatched

    def _halve_max_batch(self, cause: str) -> None:
        before = self.controller.max_batch_size
        self.controller.max_batch_size = before // 2
        self.ledger.write(
            "fault",
            kind="out_of_memory",
            round=self.controller.round + 1,
            cause=cause,
            max_batch_size_before=before,
            max_batch_size=before // 2,
        )
        self.progress.note(
            f"round {self.controller.round + 1}: out of memory; the round is undone and"
            f" max_batch_size is {before // 2} from here on (was {before})"
        )

    def _decide(self, dispatched: Dispatched, prepared: Prepared) -> list[dict]:
        """Reads the test, sets the next batches, counts the round; returns its drafted lines."""
        stats_R = dispatched.stats_R
        if stats_R is not None:
            stats_R = jax.tree.map(np.float64, jax.device_get(stats_R))
        decisions = control.observe(self.controller, self.settings, stats_R, prepared.test_counts_R)
        spent = control.advance(
            self.controller,
            prepared.groups,
            sequence_length=self.spec.sequence_length,
            sync_bytes=self.spec.sync_bytes,
            num_syncs=self.spec.num_fragments,
        )
        for line, decision in zip(prepared.lines, decisions, strict=True):
            if decision.next_batch_size != line["requested_batch_size"]:
                self.progress.note(_batch_note(line, decision))
        return [
            line | cost | decision._asdict()
            for line, cost, decision in zip(prepared.lines, spent, decisions, strict=True)
        ]

    def _record(self, dispatched: Dispatched, lines: list[dict], share_done: float) -> None:
        """Waits for a round, and records what came of it; so much of the run was done then."""
        outcomes = read_outcomes(dispatched)
        end_s = dispatched.end_s.result()
        began_s = max(dispatched.start_s, self.last_end_s)
        step_s = end_s - began_s
        self.last_end_s = end_s
        tokens = sum(line["tokens"] for line in lines)
        # Of waiting for compilation, what passed while the round before was under way is not in it.
        waited_s = dispatched.start_s + dispatched.stall_s - began_s
        self.seconds += step_s - max(waited_s, 0.0)
        self.tokens += tokens
        index = lines[0]["round"]
        noted = control.note_outcomes(self.controller, outcomes, after_round=index)
        for line, outcome, counts in zip(lines, outcomes, noted, strict=True):
            self.ledger.write(
                "round",
                **line,
                train_loss=outcome.mean_loss,
                pseudo_grad_norm=outcome.pseudo_grad_norm,
                **counts,
                step_s=round(step_s, 6),
                stall_s=round(dispatched.stall_s, 6),
            )
            if counts["skipped_updates"]:
                self._note_skipped(line, counts["skipped_updates"])
        losses = [outcome.mean_loss for outcome in outcomes]
        fields = {
            "loss": float(np.mean([loss for loss in losses if np.isfinite(loss)] or [np.nan])),
            "heldout": None,
            "trainers": len(losses),
            "batch": [line["requested_batch_size"] for line in lines],
            "accum": [line["num_accum_steps"] for line in lines],
            "tokens/s": tokens / step_s,
            "of_matmul": self._share_of_matmul(tokens / step_s),
        }
        self.unshown = index, fields, share_done
        if len(control.broken_trainers(self.controller, by_round=index)) == len(outcomes):
            self._show()
            self._diverged(index)

    def _show(self) -> None:
        """Shows the recorded round, if it is not shown yet, with the held-out loss so far."""
        if self.unshown is not None:
            index, fields, share_done = self.unshown
            heldout = None if np.isnan(self.loss) else self.loss
            self.progress.round(index, fields | {"heldout": heldout}, share_done=share_done)
            self.unshown = None

    def _share_of_matmul(self, tokens_per_s: float) -> float:
        """Of the rate that the machine's own matrix product reaches."""
        machine = matmul_flops_per_s(self.settings.model.dtype)
        return round(tokens_per_s * flops_per_token(self.spec.params) / machine, 3)

    def _note_skipped(self, line: dict, num_skipped: int) -> None:
        where = {"round": line["round"], "trainer": line["trainer"], "updates": num_skipped}
        self.ledger.write("fault", kind="skipped_updates", **where)
        self.progress.note(
            f"round {line['round']}: trainer {line['trainer']} skipped {num_skipped} updates whose"
            " loss or gradient was not finite"
        )

    # -- between rounds ----------------------------------------------------------------------

    def _quarantine(self, broken: list[int]) -> None:
        """Takes trainers that are broken out of the run; nobody is averaged with them."""
        for position in broken:
            trainer = self.controller.trainers[position]
            skips = max(trainer.skipped_in_a_row.values())
            self.ledger.write(
                "fault",
                kind="quarantine",
                round=self.controller.round,
                trainer=trainer.id,
                skipped_in_a_row=skips,
            )
            self.progress.note(
                f"round {self.controller.round}: trainer {trainer.id} leaves the run with its"
                f" workers: its last {skips} updates were not finite"
            )
        self.ensemble = _take(
            self.ensemble, *map(tuple, control.quarantine(self.controller, broken))
        )

    def _synchronise(self, trainers: Sequence[int]) -> None:
        """Has trainers, by position, take over all that their workers have not yet told them.

        Where all parameters are synchronised at once, and taken as they arrive, nothing is left.
        """
        owed = [m for m in trainers if self.controller.trainers[m].id not in self.up_to_date]
        if not owed or not self.settings.outer.leaves_untold:
            return
        self.ensemble = synchronise(self.programs, self.controller, self.ensemble, owed)
        line = control.count_synchronisation(
            self.controller, owed, sync_bytes=self.spec.whole_sync_bytes
        )
        self.ledger.write("sync", **line)
        self.up_to_date.update(line["trainers"])

    def _merge(self, due: Merge) -> None:
        """Merges trainers unless the guard refuses, and divides the workers anew."""
        controller, settings = self.controller, self.settings
        self._synchronise(sorted(due.members))
        guard = self.heldout.guard_EL
        before = [
            self._mean_loss(evaluate.trainer_params(self.ensemble, m), guard) for m in due.members
        ]
        merged = evaluate.merged_params(self.ensemble, due.members, due.weights)
        after = self._mean_loss(merged, guard)
        barrier = after - float(np.average(before, weights=due.weights))
        ids = [controller.trainers[m].id for m in due.members]
        event = {
            "round": controller.round,
            "members": ids,
            "into": ids[0],
            "weights": list(due.weights),
            "loss_before": before,
            "loss_after": after,
            "barrier": barrier,
        }
        limit = settings.merge.max_barrier
        refused = limit is not None and not barrier <= limit
        event |= control.count_merge(
            controller, settings, due, state_bytes=self.spec.state_bytes, refused=refused
        )
        if refused:
            action = settings.merge.on_refusal
            self.ledger.write("refusal", **event, action=action)
            self.progress.note(
                f"round {controller.round}: merging trainers {ids} would raise the loss by"
                f" {barrier:.4f} nats/token, more than merge.max_barrier={limit}: {action}"
            )
            if action == "keep":
                return
        weights = (1.0,) + (0.0,) * (len(ids) - 1) if refused else due.weights
        self._synchronise(control.losing_workers(controller, settings, due, refused=refused))
        owners = control.apply_merge(controller, settings, due, refused=refused)
        hit("merge.decided")
        self.ensemble = _merge_and_reassign(
            self.ensemble, jnp.asarray(weights, jnp.float32), due.members, tuple(owners)
        )
        workers = {
            trainer.id: len(controller.workers_of(position))
            for position, trainer in enumerate(controller.trainers)
        }
        if not refused:
            size = next(t.requested_batch_size for t in controller.trainers if t.id == ids[0])
            self.ledger.write("merge", **event, requested_batch_size=size, workers=workers)
            controller.merges.append({"round": controller.round, "members": ids, "into": ids[0]})
            self.progress.note(
                f"round {controller.round}: trainers {ids} merge into {ids[0]}, held-out loss"
                f" {', '.join(f'{loss:.4f}' for loss in before)} -> {after:.4f}; workers {workers}"
            )

    def _evaluate(self) -> PyTree:
        """Records the held-out loss of each trainer and of the consensus, which it returns."""
        controller, report = self.controller, self.heldout.report_EL
        totals = {
            "tokens_total": controller.tokens_total,
            "bytes_total": controller.bytes_total,
            "updates_total": controller.updates_total,
            "syncs_total": controller.syncs_total,
        }

        def record(trainer, loss, **more):
            if self.num_classes is None:
                with np.errstate(over="ignore"):  # not finite: null in the ledger
                    more["perplexity"] = float(np.exp(loss))
            self.ledger.write(
                "eval",
                round=controller.round,
                trainer=trainer,
                loss=loss,
                **totals,
                **more,
                wall_s=round(time.perf_counter() - self.start_s, 3),
            )

        for position, trainer in enumerate(controller.trainers):
            params = evaluate.trainer_params(self.ensemble, position)
            record(trainer.id, self._mean_loss(params, report), **self._class_report(params))
        hit("eval.trainers")
        params, source = self._consensus()
        record("consensus", self.loss, source=source, **self._class_report(params))
        self._record_memory()
        return params

    def _record_memory(self) -> None:
        self.ledger.write("memory", round=self.controller.round, **measured_peaks())

    def _consensus(self) -> tuple[PyTree, str]:
        """The consensus, whose held-out loss becomes the run's, and where it comes from."""
        weights = control.consensus_weights(self.controller)
        params, source = evaluate.consensus(self.ensemble, self.programs, self.heldout, weights)
        self.loss = self._mean_loss(params, self.heldout.report_EL)
        return params, source

    def _class_report(self, params: PyTree) -> dict:
        """What an evaluation of classes has beside the loss."""
        if self.num_classes is None:
            return {}
        rows, size = self.heldout.report_EL, self.heldout.batch_size
        return evaluate.class_report(self.programs, params, rows, size, self.num_classes)

    def _mean_loss(self, params: PyTree, rows_EL: np.ndarray) -> float:
        return evaluate.mean_loss(self.programs, params, rows_EL, self.heldout.batch_size)

    # -- checkpoints -------------------------------------------------------------------------

    def _save_by_clock(self) -> bool:
        """Whether a checkpoint is due by now; also looks after the one before."""
        self._settle_saves(wait=False)
        due_s = self.last_save_s + self.settings.checkpoint.every_s
        return processes.is_first() and time.perf_counter() >= due_s

    def _save_by_round(self) -> bool:
        every = self.settings.checkpoint.every_rounds
        return bool(every) and self.controller.round % every == 0

    def _save(self, loss: float | None) -> None:
        """Starts to write a checkpoint of this very boundary between two rounds."""
        self.last_save_s = time.perf_counter()
        self._settle_saves()
        known = loss is not None and np.isfinite(loss)
        host = {
            "controller": self.controller.to_json(),
            "max_batch_size_given": self.settings.batching.max_batch_size,
            "redo": self.redo,
            "loss": self.loss if np.isfinite(self.loss) else None,
            "wall_s": time.perf_counter() - self.start_s,
            "ledger": self.ledger.position() if processes.is_first() else None,
            "data": {
                "fingerprint": self.corpus.fingerprint,
                "shards": list(self.corpus.shards),
                "place": self.place,
            },
            "config": dataclasses.asdict(self.settings),
            "versions": _versions(),
            "devices": devices(),
        }
        try:
            self.saver.save(
                self.controller.round, self.ensemble, host, loss=loss if known else None
            )
        except (CheckpointError, ResourceError) as error:
            self._save_failed(error)

    def _settle_saves(self, *, wait: bool = True) -> None:
        try:
            if wait:
                self.saver.wait()
            else:
                self.saver.check()
        except (CheckpointError, ResourceError) as error:
            self._save_failed(error)

    def _save_failed(self, error: CheckpointError | ResourceError) -> None:
        if self.settings.checkpoint.on_save_error == "stop":
            raise error
        self.ledger.write("fault", kind="save", round=self.controller.round, cause=str(error))
        self.progress.note(str(error))

    def _saved(self, saved: Saved) -> None:
        if processes.is_first():
            memory_notes.forget(self.workdir, up_to_round=saved.round)
        self.ledger.write(
            "checkpoint",
            round=saved.round,
            bytes=saved.size_bytes,
            blocked_s=round(saved.blocked_s, 4),
            save_s=round(saved.save_s, 4),
        )

    def _read_state(self, path: Path) -> _State:
        """The run's state as a verified checkpoint holds it."""
        host = checkpoint.read_host(path)
        ensemble = self.settings.ensemble
        try:
            controller = Controller.from_json(host["controller"])
            num_trainers, num_workers = len(controller.trainers), len(controller.owners)
            if num_trainers > ensemble.num_trainers or num_workers > ensemble.num_workers:
                raise ValueError(f"{num_trainers} trainers, {num_workers} workers")
            if controller.round != int(path.name):
                raise ValueError(f"round {controller.round}")
        except (KeyError, ValueError) as error:
            raise checkpoint.Damaged(f"{path}: not this run's state ({error})") from error
        template = ensemble_spec(self.spec, num_trainers, num_workers, self._at_rest(controller))
        return _State(controller, checkpoint.read_arrays(path, template), host)

    def _check_data(self, recorded: dict) -> None:
        if recorded["fingerprint"] == self.corpus.fingerprint:
            return
        changes = shard_changes(recorded["shards"], list(self.corpus.shards))
        raise DataError(
            "\n".join(
                [
                    *changes,
                    f"{self.workdir}: the data are not those that this run began with; restore"
                    " them, or --accept-data-change to go on with these",
                ]
            )
        )

    def _drop_tracker(self, name: str, at_round: int, cause: str) -> None:
        self.ledger.write("fault", kind="tracker", round=at_round, tracker=name, cause=cause)
        self.progress.note(f"log.{name} is off from here on: {cause}")

    def _last_checkpoint(self) -> str:
        with contextlib.suppress(CheckpointError, ResourceError):
            self.saver.wait()
        folder = self.workdir / "checkpoints"
        saved = checkpoint.list_rounds(folder)[:1]
        return f"the last checkpoint is {folder / str(saved[0])}" if saved else "none was saved"

    def _preempted(self) -> None:
        self._settle_saves()
        self._write_end("preempted")
        raise Preempted(
            f"{self.workdir}: stopped by a signal after round {self.controller.round};"
            f" {self._last_checkpoint()}; the same command goes on from there"
        )

    def _diverged(self, index: int) -> None:
        saved = self._last_checkpoint()
        self._write_end("diverged")
        raise DivergedError(
            f"round {index}: no trainer's loss is a number any more; {saved}; try a lower"
            " inner.learning_rate, a warm-up (inner.warmup_updates) or inner.clip_norm"
        )

    # -- start and end -----------------------------------------------------------------------

    def _initial_ensemble(self, init_fn: InitFn, params: PyTree | None) -> Ensemble:
        ensemble = self.settings.ensemble
        key = jax.random.key(self.settings.seed)

        def make(key, params):
            stack = init(
                init_fn(key) if params is None else params,
                num_trainers=ensemble.num_trainers,
                num_workers=ensemble.num_workers,
                inner_tx=self.spec.inner_tx,
                outer_tx=self.spec.outer_tx,
            )
            if ensemble.init == "independent":
                keys_M = jax.random.split(key, ensemble.num_trainers)
                stack = stack.replace(params_M=jax.vmap(init_fn)(keys_M))
            if self.spec.own_params:
                stack = stack.replace(params_R=of_owners(stack.params_M, stack.owner_R))
            return stack

        shapes = jax.eval_shape(make, key, params)
        at = self._at_rest(self.controller)
        return jax.jit(make, out_shardings=at.ensemble(shapes))(key, params)

    def _at_rest(self, controller: Controller) -> Placement:
        return placement(self.spec, test_key(controller))

    def _compiled(self, compiled: Compiled) -> None:
        self.ledger.write(
            "compile",
            key=str(compiled.key),
            seconds=round(compiled.seconds, 3),
            cache="hit" if compiled.hit else "miss",
            where="background" if compiled.background else "foreground",
            needed_bytes=compiled.needed_bytes,
        )

    def _write_start(self, damage: list[str]) -> None:
        settings, spec = self.settings, self.spec
        self.ledger.write(
            "start",
            time=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            run=self.workdir.resolve().name,
            command=self.command,
            config=dataclasses.asdict(settings),
            num_params=spec.num_params,
            state_bytes=spec.state_bytes._asdict(),
            attention=attention(settings),
            flops_per_token=flops_per_token(spec.params),
            matmul_flops_per_s=round(matmul_flops_per_s(settings.model.dtype)),
            devices=devices(),
            jax=jax.__version__,
            versions=_versions(),
            data_fingerprint=self.corpus.fingerprint,
            tokens_per_byte=self.corpus.tokens_per_byte,
            round=self.controller.round,
            max_batch_size=self.controller.max_batch_size,
            buckets=settings.batching.buckets,
        )
        for line in damage:
            self.ledger.write("fault", kind="checkpoint", round=self.controller.round, cause=line)
        for shard in self.corpus.shards:
            if shard.get("skipped") or shard.get("bad_rows"):
                self.ledger.write("fault", kind="bad_data", round=self.controller.round, **shard)
        for fault in self.faults:
            self.ledger.write("fault", **fault)

    def _write_end(self, reason: str) -> None:
        controller = self.controller
        self._record_memory()
        self.ledger.write(
            "end",
            reason=reason,
            rounds=controller.round,
            tokens_total=controller.tokens_total,
            bytes_total=controller.bytes_total,
            syncs_total=controller.syncs_total,
            updates_total=controller.updates_total,
            **self._throughput(),
            wall_s=round(time.perf_counter() - self.start_s, 3),
        )

    def _throughput(self) -> dict[str, float]:
        """Of the rounds of this process, waiting for compilation aside."""
        if not self.seconds:
            return {}
        rate = self.tokens / self.seconds
        return {"tokens_per_s": round(rate, 1), "share_of_matmul": self._share_of_matmul(rate)}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _merge_and_reassign(
    ensemble: Ensemble, weights_n: Array, members: tuple[int, ...], owners: tuple[int, ...]
) -> Ensemble:
    return reassign(merge(ensemble, members, weights=weights_n), owners)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _take(ensemble: Ensemble, trainers: tuple[int, ...], workers: tuple[int, ...]) -> Ensemble:
    return take(ensemble, trainers, workers=workers)


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
