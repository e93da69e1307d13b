"""Measure held-out losses: of each trainer, of the consensus model, and of a planned merge.

A held-out row is a row of tokens that no worker trains on. A run has several trainers (model
instances that are trained side by side); the consensus model is the one model that stands for all
of them.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.merge import merge
from adloco_jax.core.types import Ensemble
from adloco_jax.data.rows import MAX_GUARD_ROWS
from adloco_jax.data.sampling import interleave, permute
from adloco_jax.engine.programs import Programs
from adloco_jax.engine.sharding import reshard
from adloco_jax.engine.spec import ProgramKey
from adloco_jax.errors import DataError


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows of a run in two disjoint parts: guard rows and reported rows.

    Only decisions use the guard rows: which trainers merge, whether a planned merge is refused, and
    which model is the consensus. The losses that a run reports are measured on the reported rows.
    """

    guard_EL: np.ndarray  # rows that only decisions use
    report_EL: np.ndarray  # rows on which the reported losses are measured
    batch_size: int  # rows per call of the evaluation program

    def describe(self, num_classes: int | None = None) -> str:
        """Describe in one line how many rows serve reported losses, and how many serve decisions.

        For labelled rows the line also gives the number of rows of each class in both parts.
        """
        parts, counts = (self.report_EL, self.guard_EL), ["", ""]
        if num_classes is not None:
            of_classes = [np.bincount(part[:, 0], minlength=num_classes) for part in parts]
            counts = [f" ({', '.join(map(str, count))} by class)" for count in of_classes]
        return (
            f"held out: losses are of {len(self.report_EL)} rows{counts[0]};"
            f" {len(self.guard_EL)} others{counts[1]} judge merges and choose the model"
        )


def split_heldout(
    rows_EL: np.ndarray,
    *,
    num_sequences: int,
    batch_size: int,
    num_classes: int | None = None,
    num_trainers: int = 1,
) -> HeldOut:
    """Draw two disjoint parts of the held-out rows: guard rows and reported rows.

    Only decisions use the guard rows: which trainers merge, whether a planned merge is refused, and
    which model is the consensus. The losses that a run reports are measured on the reported rows.

    The draw does not depend on the run's seed. Runs with different seeds report losses on the same
    rows, so the spread of their losses comes only from training. If rows are labelled, each class
    has about the same share in both parts as in all held-out rows.

    Args:
      rows_EL: Held-out rows of integers; a labelled row begins with its class.
      num_sequences: Upper limit of the number of reported rows.
      batch_size: Rows per call of the evaluation program.
      num_classes: Number of classes of labelled rows; None for rows of text.
      num_trainers: Number of trainers. If there are several, at least one guard row is needed to
        choose among them.

    Returns:
      The two parts. The rows of a part have the same order as in `rows_EL`.

    Raises:
      DataError: If there is no held-out row, or if there is only one for several trainers.
    """
    order = permute(np.arange(len(rows_EL)), num_items=len(rows_EL), key=np.zeros(1, np.uint64))
    if num_classes is not None and len(order):
        order = order[interleave(rows_EL[order, 0])]
    fewest = 1 if num_trainers == 1 else 2
    if len(order) < fewest:
        use = "to report on" if num_trainers == 1 else "half of them to choose among trainers"
        raise DataError(
            f"corpus.heldout_rows: have {len(order)}, need {fewest}, {use}; hold out more, for"
            " instance by data.heldout_frac"
        )
    num_guard = min(MAX_GUARD_ROWS, len(order) // 2)
    chosen = order[num_guard : num_guard + num_sequences]
    guard, report = np.sort(order[:num_guard]), np.sort(chosen)
    return HeldOut(rows_EL[guard], rows_EL[report], batch_size)


def mean_loss(programs: Programs, params: PyTree, rows_EL: np.ndarray, batch_size: int) -> float:
    """Compute the mean loss of one model over some rows; every row has the same weight.

    The loss is in nats per token for rows of text, and in nats per row for labelled rows.
    """
    return float(np.mean(_losses(programs, params, rows_EL, batch_size)))


def class_report(
    programs: Programs, params: PyTree, rows_EL: np.ndarray, batch_size: int, num_classes: int
) -> dict:
    """Measure how well one model predicts the classes of labelled rows.

    The held-out loss of all rows is computed once for each class, as if every row had this class as
    its label. The loss of a row is then the negative log-probability of the class. So the class
    with the smallest loss is the class that the model predicts for the row.

    Returns:
      A dict with two entries. `accuracy` is the share of rows whose class is predicted correctly.
      `classes` has one dict for each class: `precision`, `recall` and `f1`, each None if it is
      undefined, and `support`, the number of rows of the class.
    """

    def losses_under(label: int) -> np.ndarray:
        labels_E1 = np.full_like(rows_EL[:, :1], label)
        return _losses(programs, params, np.hstack([labels_E1, rows_EL[:, 1:]]), batch_size)

    predicted_E = np.argmin([losses_under(label) for label in range(num_classes)], axis=0)
    count_CC = np.zeros((num_classes, num_classes), int)  # number of rows, by class and prediction
    np.add.at(count_CC, (rows_EL[:, 0], predicted_E), 1)
    classes = []
    columns = (count_CC.diagonal(), count_CC.sum(axis=0), count_CC.sum(axis=1))
    for hits, claims, support in np.stack(columns, axis=1).tolist():
        precision = hits / claims if claims else None
        recall = hits / support if support else None
        f1 = 2 * hits / (claims + support) if claims + support else None
        classes.append({"precision": precision, "recall": recall, "f1": f1, "support": support})
    return {"accuracy": float(np.mean(predicted_E == rows_EL[:, 0])), "classes": classes}


def _losses(programs: Programs, params: PyTree, rows_EL: np.ndarray, batch_size: int) -> np.ndarray:
    """Compute the loss of each row under one model, in batches of `batch_size` rows."""
    key = loss_key(batch_size)
    params = reshard(params, programs[key].input_shardings[0][0])  # once, not again in each call
    losses = []
    for start in range(0, len(rows_EL), batch_size):
        rows = rows_EL[start : start + batch_size].astype(np.int32)
        # The last batch is padded with copies of its last row, whose losses are dropped.
        padded = np.pad(rows, ((0, batch_size - len(rows)), (0, 0)), mode="edge")
        losses.append(programs.call(key, params, padded))
    return np.concatenate(losses)[: len(rows_EL)]


def loss_key(batch_size: int) -> ProgramKey:
    """Make the key of the compiled program that computes a model's loss of each row in a batch."""
    return ProgramKey("loss", micro_batch_size=batch_size)


def trainer_params(ensemble: Ensemble, position: int) -> PyTree:
    """Take the parameters of one trainer, by its position, out of an ensemble.

    An ensemble has the arrays of all trainers and workers. The parameters of all trainers are
    stacked along the first axis, M. The result does not have this axis.
    """
    return _row(ensemble.params_M, position)


def merged_params(ensemble: Ensemble, members: tuple[int, ...], weights: tuple[float, ...]):
    """Compute the parameters that a merge of trainers would give; the ensemble does not change.

    `members` and `weights` are the arguments of `core.merge`: the positions of the trainers to
    merge, and their weights in the mean.
    """
    return _merged_params(ensemble.params_M, members, np.asarray(weights, np.float32))


def guard_losses(ensemble: Ensemble, programs: Programs, heldout: HeldOut) -> list[float]:
    """Compute the mean loss of each trainer on the guard rows, in the order of the trainers.

    Guard rows are the held-out rows that only decisions use, such as the choice of trainers to
    merge. Losses are in nats per token for rows of text, and in nats per row for labelled rows.
    """
    trainers = range(ensemble.num_trainers)
    return [_guard_loss(trainer_params(ensemble, m), programs, heldout) for m in trainers]


def merged_loss(
    ensemble: Ensemble,
    members: Sequence[int],
    weights: Sequence[float],
    programs: Programs,
    heldout: HeldOut,
) -> float:
    """Compute the mean loss that a merged trainer would have on the guard rows.

    The ensemble does not change. Guard rows are the held-out rows that only decisions use, such as
    the refusal of a merge. `members` and `weights` are the arguments of `core.merge`: the positions
    of the trainers to merge, and their weights in the mean. The loss is in nats per token for rows
    of text, and in nats per row for labelled rows.
    """
    params = merged_params(ensemble, tuple(members), tuple(weights))
    return _guard_loss(params, programs, heldout)


def _guard_loss(params: PyTree, programs: Programs, heldout: HeldOut) -> float:
    return mean_loss(programs, params, heldout.guard_EL, heldout.batch_size)


def consensus(
    ensemble: Ensemble, programs: Programs, heldout: HeldOut, weights: tuple[float, ...]
) -> tuple[PyTree, str]:
    """Choose the consensus: the one model that stands for all trainers.

    Returns:
      The parameters of the consensus, and a word that says where they come from. If there is one
      trainer, its parameters are the consensus, and the word is `only`. If there are several, two
      models are compared by their losses on the guard rows (the held-out rows that only decisions
      use): the trainer with the lowest loss, and the mean of all trainers' parameters with the
      weights `weights`. If the mean has the lower loss, the mean is the consensus, and the word is
      `average`. Otherwise the trainer is the consensus, and the word is `best`.
    """
    if ensemble.num_trainers == 1:
        return trainer_params(ensemble, 0), "only"
    losses = guard_losses(ensemble, programs, heldout)
    best = int(np.argmin(np.where(np.isfinite(losses), losses, np.inf)))
    average = merged_params(ensemble, tuple(range(ensemble.num_trainers)), weights)
    if _guard_loss(average, programs, heldout) < losses[best]:
        return average, "average"
    return trainer_params(ensemble, best), "best"


@jax.jit
def _row(tree_M: PyTree, position: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[position], tree_M)


@functools.partial(jax.jit, static_argnames="members")
def _merged_params(params_M, members, weights_n):
    num_trainers = jax.tree.leaves(params_M)[0].shape[0]
    bare = Ensemble(params_M, (), (), tuple(range(num_trainers)), jnp.int32(0))
    survivors = [m for m in range(num_trainers) if m not in members[1:]]
    merged_M = merge(bare, members, weights=weights_n).params_M
    return _row(merged_M, survivors.index(members[0]))
