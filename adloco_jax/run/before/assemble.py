"""Put a run together: its model, what its programs share, its weights, and its rows.

The record of a run is `config.json` in its folder. The base is the frozen weights of a model with
an adapter. Held-out rows are not trained on; losses are measured on them. A learner is a process
of its own that trains.
"""

import dataclasses
import time
from pathlib import Path

from adloco_jax.data import ArrayRows, load_corpus
from adloco_jax.data.sampling import HeldOut, split_heldout, with_rows
from adloco_jax.elastic.child import as_own_learner_fits
from adloco_jax.elastic.transport import check_engine
from adloco_jax.engine.fitting import base_dtype_is_open, base_dtype_line, fitting_choice
from adloco_jax.engine.inputs import Rows
from adloco_jax.engine.memory import require_room
from adloco_jax.engine.model import Model, configured_model, program_spec, with_weights
from adloco_jax.engine.spec import Machine, ProgramSpec
from adloco_jax.errors import DataError
from adloco_jax.row_batch import as_row_batch
from adloco_jax.run.kept.checkpoint import list_rounds
from adloco_jax.run.kept.folder import check_config, recorded, require_usable
from adloco_jax.settings import Settings


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from a run's first round to its last, in all attempts to finish it."""

    settings: Settings  # complete, with the number of rows
    model: Model  # with its frozen weights, and those that it starts from
    spec: ProgramSpec  # what all compiled programs share
    corpus: Rows  # the rows to train on and the held-out rows
    heldout: HeldOut  # the held-out rows, drawn for reports and for comparing trainers
    workdir: Path  # the run's folder
    command: str  # the command line; empty if there is none
    by_fit: bool  # whether the caller gave model and data, so that the config describes neither
    accept_data_change: bool  # as in `train`
    unit: str  # unit of the loss; empty for a plain number
    began_s: float  # this process's clock when it began to put the run together

    @property
    def own(self) -> list[str]:
        """Name what the caller of `fit` gave, which the config therefore does not describe.

        "model", "rows", and perhaps "inner_tx" and "outer_tx"; empty for a run of `train`.
        """
        if not self.by_fit:
            return []
        given = ["model", "rows"]
        if self.model.inner_tx is not None:
            given.append("inner_tx")
        if self.model.outer_tx is not None:
            given.append("outer_tx")
        return given


def assemble(
    settings: Settings,
    machine: Machine,
    workdir: Path,
    *,
    trains: bool = False,
    model: Model | None = None,
    corpus: Rows | None = None,
    unit: str | None = None,
    commit: str | None = None,
    command: str = "",
    accept_config_change: bool = False,
    accept_data_change: bool = False,
) -> Run:
    """Put a run together: its model, what its programs share, its weights, and its rows.

    Args:
      settings: The result of `config.completed`.
      machine: The devices on which the programs run.
      workdir: The run's folder.
      trains: Whether the run goes on here. If so, its folder must be usable and its state fit in
        memory, an unset `model.base_dtype` is found, and a run that begins gets the weights of
        `model.init_from`.
      model: The model of the caller of `fit`; None: the one that the settings describe.
      corpus: The rows of the caller of `fit`; None: those that the settings describe.
      unit: Unit of the loss. None: nats/example for a classifier, nats/token if the corpus knows
        its tokens per byte, else none.
      commit: Commit of the hub's data set. None: the recorded one. Empty: where `data.revision`
        now leads.
      command: The command line, which the run records; empty if there is none.
      accept_config_change: Whether a run that goes on may do so with changed settings, such as
        another learning rate.
      accept_data_change: Whether it may with changed data. Not used here: the result has it.

    Nothing is created in the run's folder. Programs are compiled only with an unset
    `model.base_dtype`.

    Raises:
      ConfigError: If the folder, the engine or the checkpoint of `model.init_from` cannot be used,
        settings have changed that may not, the warm-up would outlast all training, or `num_epochs`
        is set and the number of rows is not known.
      DataError: If the data or the weights are missing, damaged, or other than when the run began,
        or there are too few held-out rows.
      CheckpointError: If the run's record cannot be read.
      ResourceError: If the run needs more memory than there is, or what it reads does not answer.
    """
    began_s = time.perf_counter()
    if trains:
        check_config(workdir, settings, accept=accept_config_change)
        require_usable(workdir)
        # Raises if learners could not be reached. Last, because it may ask over the network.
        check_engine(settings, workdir)
        if base_dtype_is_open(settings):
            if settings.engine.starts_learner:  # it has the accelerator, whose memory decides
                settings = as_own_learner_fits(settings)
            else:
                settings, choice = fitting_choice(settings, machine)
                choice.programs.close()  # compiled to see what fits; the run compiles its own
            print(base_dtype_line(settings))

    by_fit = model is not None
    if model is None:
        model = configured_model(settings, machine)
    # Refuse a run whose state alone has no room in memory, before rows are made and weights are
    # read, which may take long.
    if trains:
        require_room(
            program_spec(settings, model, machine),
            settings.ensemble.sizes(whole_pool=True),  # with the workers that join later
            settings.batching.memory_frac,
        )
    notes: list[str] = []  # lines for the user about what the checkpoint lacks or had in addition
    # A run that goes on has its parameters in its own checkpoints, but never frozen weights.
    begins = trains and not by_fit and not list_rounds(workdir / "checkpoints")
    needs_weights = settings.adapter.rank > 0 or (begins and settings.model.init_from)
    if needs_weights:
        model, notes = with_weights(model, settings.model, machine, seed=settings.seed)

    before = None  # the run's record, which a caller that gives the commit does not have
    if commit is None:
        before = recorded(workdir)
        commit = ""  # of a run without a record
        if before is not None:
            commit = before.data_commit
    if before and before.base_fingerprint != model.base.fingerprint:
        raise DataError(
            f"{workdir}: model.init_from has other weights than when this run began; restore them,"
            " or start a run in another folder"
        )

    if isinstance(corpus, ArrayRows):  # the caller of `fit` made it without settings, such as seed
        corpus = corpus.ordered(settings, num_classes=model.num_classes)
    elif corpus is None:
        corpus = load_corpus(settings, num_classes=model.num_classes, commit=commit, run=workdir)
        if trains:
            print(*notes, corpus.describe(), sep="\n")
    heldout = split_heldout(
        corpus.heldout_rows,
        num_sequences=settings.eval.num_sequences,
        batch_size=settings.batching.initial_batch_size,  # until it is known what fits the memory
        num_classes=model.num_classes,
        num_trainers=settings.ensemble.num_trainers,
    )
    num_rows = len(getattr(corpus, "rows", ()))  # 0: a caller's corpus does not say
    settings = with_rows(settings, num_rows)

    if unit is None:
        if model.num_classes is not None:
            unit = "nats/example"
        elif corpus.tokens_per_byte is not None:
            unit = "nats/token"
        else:
            unit = ""
    # Tokens of a row: rows of labelled texts are as long as the longest, not as configured.
    found_length = as_row_batch(heldout.report_rows).tokens.shape[1]
    spec = program_spec(settings, model, machine, found_length=found_length)
    return Run(
        settings=settings,
        model=model,
        spec=spec,
        corpus=corpus,
        heldout=heldout,
        workdir=workdir,
        command=command,
        by_fit=by_fit,
        accept_data_change=accept_data_change,
        unit=unit,
        began_s=began_s,
    )
