"""One run, from its config to its report: what it needs is put together here, then `adloco` runs.

`train` is the run that a config describes; `fit` is the same for the caller's own model and data.
"""

import contextlib
import datetime
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from adloco_jax.config import validate
from adloco_jax.core.types import Ensemble, LossFn
from adloco_jax.data import ArrayRows, Corpus
from adloco_jax.engine import evaluate
from adloco_jax.engine.inputs import Rows
from adloco_jax.engine.sharding import fetch
from adloco_jax.errors import ConfigError
from adloco_jax.loop.adloco import Control, State
from adloco_jax.run import processes
from adloco_jax.run.arguments import check_arguments, check_optimizer, check_transform
from adloco_jax.run.attempt import Failures, Run, after_failure, begin, execute, versions
from adloco_jax.run.build import (
    InitFn,
    attention,
    build_model,
    class_count,
    inner_transform,
    load_data,
    pretrained_params,
    program_spec,
)
from adloco_jax.run.checkpoint import list_rounds
from adloco_jax.run.export import write_consensus
from adloco_jax.run.interrupts import stop_requests
from adloco_jax.run.machines import here
from adloco_jax.run.resume import check_config, exclusive, flat_settings, recorded_commit
from adloco_jax.run.trackers import check_installed
from adloco_jax.settings import KNOBS, Settings
from adloco_jax.study import report

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
    """Runs what a config describes, from text to a trained consensus, or resumes such a run.

    At the end the closing table is printed, and the folder has the report in `report/` and the
    consensus in `export/` (`run.export.write_consensus`).

    SIGTERM or SIGINT saves and raises `Preempted` after the round under way. A second
    signal ends the process. (Signals are handled only if this is called on the main thread.)

    Args:
      config: From a file in `configs/`, or `default_config()` with changes.
      workdir: The run's folder, created if missing; one that holds a run is resumed. None creates
        `runs/train-<date>-<time>`.
      command: Recorded in the ledger, for the report's caption.
      accept_config_change: Whether a resumed run may continue with another learning rate and the
        like.
      accept_data_change: Whether it may continue with other data than it began with.

    Returns:
      The consensus, its loss and the whole final state.

    Raises:
      ConfigError: If the config or the folder cannot be used; nothing is compiled or created then.
      DataError: If the text or tokens cannot be used, or are not those the run began with; nothing
        is compiled or created then.
      CheckpointError: If the folder holds a run that cannot be read, or its checkpoints are deleted
        while one is written.
      DivergedError: If the loss of every trainer is not finite.
      ResourceError: If memory or disk do not suffice; what was saved stays.
      Preempted: After a signal, once everything is saved.
    """
    settings = validate(config)
    check_installed(settings.log)
    _use_compilation_cache()
    if workdir is None:
        if jax.process_count() > 1:
            raise ConfigError("workdir: several processes need the name of one folder")
        workdir = Path("runs") / f"train-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    workdir = Path(workdir)

    def load() -> tuple[PyTree | None, list[str], Corpus]:
        check_config(workdir, settings, accept=accept_config_change)
        params, lines = None, []
        if settings.model.init_from and not list_rounds(workdir / "checkpoints"):
            params, lines = pretrained_params(settings)
        return params, lines, load_data(settings, recorded_commit(workdir))

    with processes.only_first_prints():
        params, lines, corpus = processes.run_on_all(load)
    init_fn, loss_fn = build_model(settings, here())
    with processes.only_first_prints():
        print(*lines, corpus.describe(), sep="\n")
        return fit(
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
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
) -> Result:
    """Runs AdLoCo on any model and rows of tokens, or resumes such a run.

    It ends as `train` does: with the closing table, `report/` and `export/`.

    Args:
      settings: From `validate`; its `model` and `data` groups are only recorded, except as
        `ArrayRows.ordered` says.
      corpus: Rows to train on and to hold out: `ArrayRows`, or an object with the methods of
        `engine.inputs.Rows`.
      init_fn: Makes one trainer's parameters from a PRNG key.
      loss_fn: `loss_fn(params, rows) -> scalar`, the mean over int32 rows [B, L + 1].
      workdir: The run's folder; one that holds a run of these settings is resumed.
      params: What all trainers start from, of `init_fn`'s structure; None draws them.
      num_classes: Where rows begin with a class and a length (`data.labelled`): how many classes,
        whose prediction is then evaluated too. None for rows of text.
      inner_tx: The workers' optimizer in place of the one that `inner.tx` names, built with
        learning rate 1, or a schedule times 1: the config's rate, warm-up and schedule multiply its
        updates. A resumed run needs the same one.
      outer_tx: The trainers' optimizer in place of the one that `outer.tx` names, built in
        the same way.
      loss_unit: What the loss is in: "nats/token", for which perplexity is reported too,
        "nats/example", or other words. None: nats/example with `num_classes`, nats/token if the
        corpus knows its tokens per byte of text, else a plain number.
      command: Recorded in the ledger.
      accept_config_change: Whether a resumed run may continue with other settings that change it.
      accept_data_change: Whether it may continue with other data than it began with.

    Returns:
      The consensus, its loss and the whole final state.

    Raises:
      ValueError: If an optimizer is given here and also named in the settings.
      ConfigError: If an argument is not what its name says, a line each; if the folder cannot be
        used.
      DataError: If there are too few held-out rows: one, or two with several trainers (of each
        class, where there are classes); if `corpus.batch` gives two workers the same rows.
      UserError: Otherwise see `train`; no text is read here.
    """
    check_arguments(settings, corpus, init_fn, loss_fn, params, workdir)
    for name, given in (("inner_tx", inner_tx), ("outer_tx", outer_tx)):
        check_optimizer(name, given)
    if isinstance(corpus, ArrayRows):
        corpus = corpus.ordered(settings, num_classes=num_classes)
    workdir = Path(workdir)
    check_installed(settings.log)
    for key, given in (("inner.tx", inner_tx), ("outer.tx", outer_tx)):
        group, name = getattr(settings, key[:5]), KNOBS[key].default
        if given is not None and group.tx != name:
            raise ValueError(
                f"{key[:5]}_tx: given beside {key}={group.tx!r}; leave {key} at {name!r}"
            )

    def check() -> evaluate.HeldOut:
        check_config(workdir, settings, accept=accept_config_change)
        return evaluate.split_heldout(
            corpus.heldout_rows,
            num_sequences=settings.eval.num_sequences,
            batch_size=settings.batching.initial_batch_size,  # replaced by the control's
            num_classes=num_classes,
            num_trainers=settings.ensemble.num_trainers,
        )

    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    check_transform("inner_tx", inner_transform(settings, inner_tx), shapes)
    if outer_tx is not None:
        check_transform("outer_tx", outer_tx, shapes)
    heldout = processes.run_on_all(check)
    row_length, txs = corpus.heldout_rows.shape[1], {"inner_tx": inner_tx, "outer_tx": outer_tx}
    spec = program_spec(
        settings, init_fn, loss_fn, row_length, num_classes=num_classes, machine=here(), **txs
    )
    if loss_unit is None:
        is_text = num_classes is None and corpus.tokens_per_byte is not None
        loss_unit = "nats/token" if is_text else "nats/example" * (num_classes is not None)
    own = {"init_fn": init_fn, "params": params, "num_classes": num_classes, "unit": loss_unit}
    run = Run(settings, spec, corpus, heldout, workdir, command, accept_data_change, **own)
    _require_equal_processes(run)
    result = _until_done(run)
    exported = fetch(result.params)
    if processes.is_first():
        tokenizer = getattr(corpus, "tokenizer", None)
        write_consensus(exported, workdir / "export", settings, tokenizer)
        report.conclude(workdir)
    processes.barrier("the export and the report are written")
    return result


def _until_done(run: Run) -> Result:
    """Runs the rounds that are left, again from the newest checkpoint after a failure."""
    failures = Failures()
    with exclusive(run.workdir), stop_requests() as stop:
        while True:
            # Everything that a failed round has changed is restored from the newest checkpoint.
            with contextlib.ExitStack() as stack:
                attempt = begin(run, stack, stop, failures)
                try:
                    state = execute(run, attempt)
                    params, loss = attempt.evaluator.params, attempt.recorder.loss
                    return Result(run.workdir, params, loss, state)
                except (jax.errors.JaxRuntimeError, OSError) as error:
                    failures = after_failure(run, attempt, error, failures)


def _require_equal_processes(run: Run) -> None:
    if jax.process_count() == 1:
        return
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(run.params):
        weights.update(f"{leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes())
    keys = flat_settings(run.settings).items()
    processes.require_equal(
        {key: repr(value) for key, value in keys if key not in _OWN_KEYS}
        | {f"the version of {name}": version for name, version in versions().items()}
        | {
            "model_shards, as found there": repr(run.spec.model_shards),
            "attention, as found there": repr(attention(run.settings, run.spec.machine)),
            "the data": run.corpus.fingerprint,
            "the weights it starts from": weights.hexdigest(),
        },
        "all processes of a run need the same",
    )


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs, in a folder of the user's own.

    Does nothing where JAX has been given a folder already (`JAX_COMPILATION_CACHE_DIR`). Compiled
    programs are code: the folder must not be one that others can write to.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(home) / "adloco_jax" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
