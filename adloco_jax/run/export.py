"""A model out of a run's folder: the consensus, or one trainer, of any checkpoint."""

import contextlib
import dataclasses
from pathlib import Path
from typing import NamedTuple

from jaxtyping import PyTree

from adloco_jax.data.tokenizers import Tokenizer, load_tokenizer
from adloco_jax.errors import CheckpointError, ConfigError
from adloco_jax.run import checkpoint, evaluate
from adloco_jax.run.build import build_model, class_count, load_data, program_spec, row_length
from adloco_jax.run.health import consensus_weights
from adloco_jax.run.programs import Programs
from adloco_jax.run.resume import read_state, recorded_settings
from adloco_jax.settings import Settings


class Trained(NamedTuple):
    """One model of a run.

    Attributes:
      settings: The run's.
      params: The model's parameters.
      tokenizer: What its ids mean.
      round: The checkpoint's.
      source: `trainer 3`, or where the consensus comes from: `only`, `best` or `average`.
    """

    settings: Settings
    params: PyTree
    tokenizer: Tokenizer
    round: int
    source: str


def read_trained(
    workdir: str | Path, *, round: int | None = None, trainer: int | None = None
) -> Trained:
    """Reads a model from a run's folder, which is left as it is.

    Args:
      workdir: The run's folder.
      round: Whose checkpoint; None is the newest.
      trainer: A trainer's id; None is the consensus, for which the run's data are read where more
        than one trainer is left: held-out text chooses between the best and the average.

    Returns:
      The model.

    Raises:
      ConfigError: If there is no such checkpoint or trainer; says which there are.
      CheckpointError: If the folder holds no run, or the checkpoint is damaged.
      DataError: If the data are needed and cannot be used.
    """
    workdir = Path(workdir)
    settings = recorded_settings(workdir)
    rounds = checkpoint.list_rounds(workdir / "checkpoints")
    if not rounds or (round is not None and round not in rounds):
        have = ", ".join(map(str, reversed(rounds))) or "none"
        raise ConfigError(f"{workdir / 'checkpoints'}: no checkpoint of round {round}, have {have}")
    path = workdir / "checkpoints" / str(rounds[0] if round is None else round)
    classes = class_count(settings)
    spec = program_spec(settings, *build_model(settings), row_length(settings), num_classes=classes)
    try:
        checkpoint.verify(path)
        ensemble, control = read_state(path, settings, spec).state
    except checkpoint.Damaged as error:
        raise CheckpointError(f"{error}; choose another round of {workdir}") from error
    ids = [trainer.id for trainer in control.trainers]
    if trainer is not None and trainer not in ids:
        raise ConfigError(
            f"{path}: no trainer {trainer}, have {', '.join(map(str, ids))}; the others have merged"
        )
    if trainer is not None or len(ids) == 1:
        params = evaluate.trainer_params(ensemble, 0 if trainer is None else ids.index(trainer))
        source = "only" if trainer is None else f"trainer {trainer}"
        tokenizer = load_tokenizer(settings.data.tokenizer)
        return Trained(settings, params, tokenizer, control.round, source)
    corpus = load_data(settings)
    spec = dataclasses.replace(spec, row_length=corpus.heldout_rows.shape[1])
    heldout = evaluate.split_heldout(
        corpus.heldout_rows,
        num_sequences=settings.eval.num_sequences,
        batch_size=control.eval_batch_size,
        num_classes=classes,
        num_trainers=len(ids),
    )
    weights = consensus_weights(control)
    with contextlib.closing(Programs(spec)) as programs:
        params, source = evaluate.consensus(ensemble, programs, heldout, weights)
    return Trained(settings, params, corpus.tokenizer, control.round, source)
