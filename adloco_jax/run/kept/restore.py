"""The state of a run in a checkpoint: what is written beside its arrays, and what is read.

The state has two parts: the ensemble (`Ensemble`: the arrays of trainers and workers) and the
control (`Control`: what the host knows of them, such as sizes and counts, as JSON). A trainer is a
model in training; its workers train copies of it. The base is the frozen weights of a model with an
adapter, which no checkpoint has. The ledger is the log of a run. A micro-batch is the part of a
worker's batch that a device takes at once.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import PyTree

from adloco_jax.core.types import Ensemble
from adloco_jax.data.formats import Count, Format, Seconds, checked
from adloco_jax.data.prepared import shard_changes
from adloco_jax.engine.memory import Choice, Mode, choose, modes
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.sharding import ensemble_spec, first_ensemble, placement
from adloco_jax.engine.spec import Layout, OnCompile, ProgramSpec
from adloco_jax.errors import CheckpointError, DataError
from adloco_jax.host import processes
from adloco_jax.host.versions import versions
from adloco_jax.loop.adloco import Control, State, start
from adloco_jax.run.before.assemble import Run
from adloco_jax.run.kept import checkpoint
from adloco_jax.run.kept.checkpoint import Damaged
from adloco_jax.run.kept.ledger import finished_line, read
from adloco_jax.settings import EnsembleSettings


class DataRecord(Format):
    """The data that a run has read: a hash of its content, and a record of each file."""

    fingerprint: str
    shards: list[dict[str, Any]]


class HostRecord(Format):
    """What is read of a checkpoint's `host.json`."""

    control: dict[str, Any]
    max_batch_size_given: Count | None
    loss: float | None
    wall_s: Seconds
    data: DataRecord


class CheckpointContent(NamedTuple):
    """The content of a checkpoint: the state of the run, and what is read of `host.json`."""

    state: State
    host: HostRecord


def read_state(path: Path, ensemble: EnsembleSettings, spec: ProgramSpec) -> CheckpointContent:
    """Read a run's state from the folder of a verified checkpoint.

    `ensemble` are the run's settings of trainers and workers, and `spec` has the shapes of its
    parameters and states. Raises Damaged if a file cannot be read or `host.json` does not fit these
    settings, ConfigError if the arrays do not fit `spec`.
    """
    # `checked` raises Damaged for a field that is missing or of a wrong type.
    host = checked(checkpoint.read_host(path), HostRecord, f"{path}: host", Damaged)
    control = read_control(path, host.control, ensemble)
    # Of each array to be read: shape, dtype, and how it is divided among the devices.
    template = ensemble_spec(spec, Layout(control.sizes))
    return CheckpointContent(State(checkpoint.read_arrays(path, template), control), host)


def read_control(path: Path, data: Any, ensemble: EnsembleSettings) -> Control:
    """Make `Control`, the host's data about trainers, from `data`: the `control` of `host.json`.

    Raises Damaged if a field is missing or of a wrong type; if it has more trainers or workers than
    the settings `ensemble`, a trainer without workers or a worker of two trainers; or another round
    than the checkpoint, whose folder is `path`.
    """
    control = checked(data, Control, f"{path}: host.control", Damaged)
    sizes = control.sizes  # workers of each trainer
    workers = control.num_workers
    fits = 1 <= len(sizes) <= ensemble.num_trainers and workers <= ensemble.num_workers
    # `trainer_of` has the trainer of each worker, so fewer entries if two trainers share a worker.
    are_matched = 0 not in sizes and len(control.trainer_of) == workers
    is_of_folder = control.round == int(path.name)
    if not (fits and are_matched and is_of_folder):
        raise Damaged(f"{path}: not this run's: workers {sizes}, round {control.round}")
    return control


def begin_control(
    run: Run,
    content: CheckpointContent | None,
    max_batch: int | None,
    on_compile: OnCompile,
) -> tuple[Control, Programs]:
    """Choose the largest micro-batch and the mode before the first round, alike in all processes.

    A mode (`engine.memory.Mode`) says how programs spare memory: by workers one after another, and
    by activations that are computed again ("remat").

    Args:
      run: What the attempts share: settings, data and model.
      content: Of the checkpoint that is restored; None: the run begins.
      max_batch: Largest micro-batch after an earlier attempt ran out of memory; None: none did.
      on_compile: Called when the compilation of a program begins, and when it ends.

    Returns:
      The state of the host before the next round, and the programs, compiled or being compiled.

    Raises:
      ResourceError: If not even the smallest micro-batch fits the memory.
    """
    settings = run.settings
    remat = False  # a model of the caller of `fit` may not be able to
    if run.model.can_remat:
        remat = settings.model.remat  # None: if memory requires it
    allowed = modes(remat, run.spec.machine.platform)  # by preference
    # Sequences of the largest micro-batch; None: the largest that fits is to be found.
    size = settings.batching.max_batch_size
    if content is not None and size in (None, content.host.max_batch_size_given):
        # The setting has not changed, so the run goes on with the micro-batch that it had.
        size = content.state.control.max_batch_size
    if max_batch is not None:  # less, because memory ran out
        size = max_batch

    def choose_among(modes_to_try: Sequence[Mode]) -> Choice:
        """Choose one of some modes, and the largest micro-batch that fits, by compiling."""
        return choose(
            run.spec,
            run.model.loss_of,
            settings.ensemble,
            settings.batching,
            settings.switch,
            allowed=modes_to_try,
            size=size,
            on_compile=on_compile,
        )

    choice = choose_among(allowed)
    mode = Mode(choice.programs.spec.sequential, choice.programs.spec.remat)
    # All processes use the most frugal mode that one has chosen, the last in preference.
    most_frugal = allowed[max(processes.gather(allowed.index(mode)))]
    if mode != most_frugal:
        choice.programs.close()  # they were compiled for the other mode
        choice = choose_among([most_frugal])
    choice.programs.set_frozen(run.model.base.params)  # frozen weights go to the devices
    # All processes use the smallest micro-batch that one has chosen.
    max_batch_size = min(processes.gather(choice.max_batch_size))
    if content is None:
        control = start(settings.ensemble, settings.batching, max_batch_size)
    else:
        control = dataclasses.replace(content.state.control, max_batch_size=max_batch_size)
    return control, choice.programs


def initial_ensemble(run: Run, control: Control) -> Ensemble:
    """Make parameters and optimizer states at the start of a run, where they are needed.

    All trainers start with the same parameters: those that the run begins with, or new ones by its
    seed. The arrays are divided among the devices.
    """
    spec = run.spec
    layout = Layout(control.sizes)

    def make(key: Array, params: PyTree | None) -> Ensemble:
        """Make the ensemble from these parameters; None: from new ones, drawn by the random key."""
        if params is None:
            params = run.model.init_fn(key)
        return first_ensemble(spec, layout.sizes, params)

    # Compiled with the sharding of each array, so that each device makes only its part.
    shardings = placement(spec, layout).ensemble(ensemble_spec(spec, layout))
    key = jax.random.key(run.settings.seed)
    # `run.model.params`: those that the run begins with, or None.
    return jax.jit(make, out_shardings=shardings)(key, run.model.params)


def restore(run: Run) -> tuple[CheckpointContent | None, list[str], dict | None]:
    """Restore the newest undamaged checkpoint of a run; damaged ones that are newer are renamed.

    Returns:
      Its content, None without a checkpoint; a line on each damaged checkpoint; the ledger's `end`
      line, None if the run is not finished.

    Raises:
      CheckpointError: If all are damaged, the ledger records checkpoints and there are none, or one
        has another format.
      ConfigError: If the arrays of a checkpoint are not those of the configured model.
      DataError: If the data have changed, and this is not accepted; or the ledger is damaged.
    """
    folder = run.workdir / "checkpoints"
    path = run.workdir / "ledger.jsonl"
    content = None
    damage = []
    found = checkpoint.read_newest(
        folder, lambda at: read_state(at, run.settings.ensemble, run.spec)
    )
    if found is not None:
        content, damage = found
    events = []
    if path.exists():
        events = read(path)
    # All processes wait here until each has read the ledger, because process 0 later changes it.
    processes.gather(None)
    if content is None and any(event["event"] == "checkpoint" for event in events):
        raise CheckpointError(
            f"{folder}: the checkpoints that {path.name} records are gone; restore them from a"
            " copy, or name another folder"
        )
    if content is None or run.accept_data_change:
        return content, damage, finished_line(events)
    data = content.host.data
    if data.fingerprint != run.corpus.fingerprint:
        changes = shard_changes(data.shards, list(run.corpus.shards))  # a line on each file
        advice = (
            f"{run.workdir}: the data have changed since this run began; restore them, or"
            " resume with these: accept_data_change=True (--accept-data-change)"
        )
        raise DataError("\n".join([*changes, advice]))
    return content, damage, finished_line(events)


def host_record(run: Run, recorded: dict, state: State) -> dict:
    """Return what `host.json` of a checkpoint stores of a run and its state, as plain JSON.

    `recorded` has the last held-out loss and the run's seconds so far, as `loss` and `wall_s`.
    """
    return {
        "control": dataclasses.asdict(state.control),
        # As set, perhaps None; `control` has the micro-batch that was found.
        "max_batch_size_given": run.settings.batching.max_batch_size,
        **recorded,
        "data": {
            "fingerprint": run.corpus.fingerprint,
            "shards": list(run.corpus.shards),  # a record of each file
        },
        # Only for people to read.
        "config": run.settings.model_dump(),
        "versions": versions(),
        "devices": run.spec.machine.describe(),
    }
