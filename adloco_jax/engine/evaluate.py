"""Held-out losses: of each trainer, of the consensus model, and of a planned merge.

Losses are means over rows, in nats per token of text, or nats per labelled row; those of chats are
means over the tokens that count. Guard rows are held-out rows that serve decisions alone: whether
to merge, and which model stands for all trainers. The members of a merge become one trainer; the
first, the representative, remains. An ensemble has the arrays of all trainers and workers.
`programs` compiles the run's programs and calls them; a key (`ProgramKey`) names one of them.

Axes of arrays: E rows, B rows of one call of a program, C classes, L tokens, M trainers.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.merge import merge
from adloco_jax.core.types import Ensemble
from adloco_jax.data.sampling import HeldOut
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.sharding import reshard
from adloco_jax.engine.spec import ProgramKey
from adloco_jax.loop.adloco import State
from adloco_jax.row_batch import RowBatch, as_row_batch


def mean_loss(programs: Programs, params: PyTree, rows_E: PyTree, batch_size: int) -> float:
    """Compute the mean loss of one model over some rows.

    `rows_E` are an array of token ids, or a `RowBatch`, which may have a weight for each token (0
    for those of a chat that do not count). The loss is in nats per token for rows of text, and in
    nats per row for labelled rows. A call of the program takes `batch_size` rows.
    """
    mean = np.mean(_losses(programs, params, rows_E, batch_size))
    weights_EL = as_row_batch(rows_E).weights
    if weights_EL is None:
        return float(mean)
    # The loss of a weighted row is a sum over its tokens, so divide by the mean sum of weights.
    weight_E = weights_EL.sum(axis=1, dtype=np.float64)
    return float(mean / np.mean(weight_E))


def class_report(
    programs: Programs,
    params: PyTree,
    rows: np.ndarray | RowBatch,
    batch_size: int,
    num_classes: int,
) -> dict:
    """Measure how well a classifier predicts the labels of rows.

    The predicted class is the label with which the row has the smallest loss.

    Returns `accuracy`, the share of rows with the right prediction, and `classes`, a list of dicts
    with `precision`, `recall`, `f1` and `support` (number of rows) for each class. A score is None
    if its denominator is zero.
    """
    rows_EL = as_row_batch(rows).tokens  # each row begins with its label, of `num_classes`
    label_E = rows_EL[:, 0]

    # The loss of each row with each label in place of its own.
    losses_CE = []
    for label in range(num_classes):
        relabelled_EL = rows_EL.copy()
        relabelled_EL[:, 0] = label
        losses_CE.append(_losses(programs, params, relabelled_EL, batch_size))
    predicted_E = np.argmin(losses_CE, axis=0)

    classes = []
    for label in range(num_classes):
        num_right = int(np.sum((label_E == label) & (predicted_E == label)))
        num_predicted = int(np.sum(predicted_E == label))
        support = int(np.sum(label_E == label))
        precision = num_right / num_predicted if num_predicted else None
        recall = num_right / support if support else None
        f1 = None  # the harmonic mean of precision and recall
        if num_predicted + support:
            f1 = 2 * num_right / (num_predicted + support)
        classes.append({"precision": precision, "recall": recall, "f1": f1, "support": support})
    return {"accuracy": float(np.mean(predicted_E == label_E)), "classes": classes}


def _losses(programs: Programs, params: PyTree, rows_E: PyTree, batch_size: int) -> np.ndarray:
    """Compute one model's loss of each row, [E]; a call of the program takes `batch_size` rows.

    `params` are those of the model; `rows_E` are an array of token ids, or a `RowBatch`.
    """
    key = loss_key(batch_size)
    # Reshard the parameters once, not again in each call: to the shardings that the compiled
    # program wants of its positional arguments.
    positional_shardings, _ = programs[key].input_shardings
    params = reshard(params, positional_shardings[0])  # the program's arguments are params and rows
    losses = []
    num_rows = len(as_row_batch(rows_E).tokens)
    for start in range(0, num_rows, batch_size):
        # The last batch is padded with copies of the last row, whose losses are dropped.
        index_B = np.minimum(np.arange(start, start + batch_size), num_rows - 1)
        losses.append(programs.call(key, params, _batch(rows_E, index_B)))
    return np.concatenate(losses)[:num_rows]


def _batch(rows_E: PyTree, index_B: np.ndarray) -> PyTree:
    """Take the rows at these positions, leaves [B, L + 1]."""
    return jax.tree.map(lambda leaf_EL: leaf_EL[index_B], rows_E)


def loss_key(batch_size: int) -> ProgramKey:
    """Make the key of the compiled program that computes a model's loss of each row in a batch."""
    return ProgramKey("loss", micro_batch_size=batch_size)


def trainer_params(ensemble: Ensemble, position: int) -> PyTree:
    """Take the parameters of one trainer, without the axis M, out of an ensemble.

    `position` is the trainer's in arrays [M, ...].
    """
    return _row(ensemble.params_M, position)


def reported(ensemble: Ensemble) -> Ensemble:
    """Return an ensemble whose parameters are the running averages, or itself if it keeps none.

    The averages over rounds are the models that a run evaluates and exports.
    """
    if ensemble.average_M is None:
        return ensemble
    return ensemble.replace(params_M=ensemble.average_M)


def merged_params(
    ensemble: Ensemble, members: tuple[int, ...], weights: tuple[float, ...]
) -> PyTree:
    """Compute the parameters that a merge would give; the ensemble does not change.

    `members` are positions of trainers, the representative first; `weights` are their weights in
    the mean. The result has the parameters of one model.
    """
    return _merged_params(ensemble.params_M, members, np.asarray(weights, np.float32))


def guard_losses(
    state: State, models: Sequence[Mapping[int, float]], programs: Programs, heldout: HeldOut
) -> list[float]:
    """Compute the mean loss of each model on the guard rows, in the order of `models`.

    Args:
      state: The run's state; nothing in it changes.
      models: Each is a trainer or a planned merge of several. It maps ids of trainers to their
        weights in the merge, the representative first; one id alone is that trainer as it is.
      programs: The run's compiled programs.
      heldout: Has the guard rows, and the number of rows in a call of the program.

    Returns:
      Losses in nats per token, or in nats per row for labelled rows.
    """
    losses = []
    for weights in models:
        members = state.control.positions(weights)  # positions in arrays [M, ...]
        if len(members) == 1:
            params = trainer_params(state.ensemble, members[0])
        else:
            params = merged_params(state.ensemble, members, tuple(weights.values()))
        losses.append(_guard_loss(params, programs, heldout))
    return losses


def _guard_loss(params: PyTree, programs: Programs, heldout: HeldOut) -> float:
    """Compute the mean loss of one model on the guard rows, which serve decisions alone."""
    return mean_loss(programs, params, heldout.guard_rows, heldout.batch_size)


def consensus(
    ensemble: Ensemble, programs: Programs, heldout: HeldOut, weights: tuple[float, ...]
) -> tuple[PyTree, str]:
    """Choose the model that stands for all trainers; return its parameters and where it is from.

    "only": it is the only trainer. Otherwise it is the model with the lower guard loss: the "best"
    trainer, or the "average" of all trainers. `weights` has the weight of each trainer in the
    average, in the order of arrays [M, ...]. `heldout` has the guard rows.
    """
    if ensemble.num_trainers == 1:
        return trainer_params(ensemble, 0), "only"
    trainers = range(ensemble.num_trainers)
    losses = [_guard_loss(trainer_params(ensemble, m), programs, heldout) for m in trainers]
    # A NaN, which `argmin` alone would take, is never the best, unless all are: then the first is.
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    average = merged_params(ensemble, tuple(trainers), weights)
    if _guard_loss(average, programs, heldout) < losses[best]:  # false if either is NaN
        return average, "average"
    return trainer_params(ensemble, best), "best"


@jax.jit
def _row(tree_M: PyTree, position: int) -> PyTree:
    """Take the entry at a position out of leaves [M, ...]."""
    return jax.tree.map(lambda leaf: leaf[position], tree_M)


@functools.partial(jax.jit, static_argnames="members")
def _merged_params(params_M: PyTree, members: tuple[int, ...], weights_n: jax.Array) -> PyTree:
    """Merge trainers that have parameters alone; return the merged ones, without the axis M.

    `members` are the positions of the trainers that merge, the representative first; `weights_n`,
    float32, has the weight of each.
    """
    num_trainers = jax.tree.leaves(params_M)[0].shape[0]
    without_states = Ensemble(
        params_M=params_M,
        outer_state_M=(),
        inner_state_R=(),
        sizes=(1,) * num_trainers,
        round=jnp.int32(0),
    )
    merged = merge(without_states, members, weights=weights_n)
    representative = members[0]
    survivors = [m for m in range(num_trainers) if m not in members[1:]]  # in their new order
    return _row(merged.params_M, survivors.index(representative))
