"""Losses on held-out text: of each trainer, of the consensus, and of a merge about to happen."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from adloco_jax.core.merge import merge
from adloco_jax.core.types import Ensemble
from adloco_jax.data.labelled import balanced
from adloco_jax.data.packing import MAX_GUARD_ROWS
from adloco_jax.data.sampling import permute
from adloco_jax.errors import DataError
from adloco_jax.run.programs import Key, Programs
from adloco_jax.run.sharding import bring


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows in two disjoint parts: one decides, the other is reported."""

    guard_EL: np.ndarray  # chooses the consensus and judges merges
    report_EL: np.ndarray
    batch_size: int  # rows per call of the program


def split_heldout(
    rows_EL: np.ndarray,
    *,
    num_sequences: int,
    batch_size: int,
    num_classes: int | None = None,
    num_trainers: int = 1,
) -> HeldOut:
    """Draws the guard's rows and the reported rows, at most `num_sequences`, from held-out rows.

    No seed enters: runs that differ in theirs report on the same rows, so that the spread of their
    losses is that of training. Rows of classes are drawn in equal numbers of each, as many as there
    are of the rarest.

    Raises:
      DataError: If none are left to report on, or to choose among several trainers by.
    """
    order = permute(np.arange(len(rows_EL)), num_items=len(rows_EL), key=np.zeros(1, np.uint64))
    if num_classes is not None and len(order):
        order = order[balanced(rows_EL[order])]
        num_sequences = max(num_classes, num_sequences - num_sequences % num_classes)
    each = num_classes or 1
    fewest = each if num_trainers == 1 else 2 * each
    if len(order) < fewest:
        have = len(order) if num_classes is None else f"{len(order)}, as many of each class"
        use = "to report on" if num_trainers == 1 else "half of them to choose among trainers by"
        raise DataError(
            f"corpus.heldout_rows: have {have}, need {fewest}, {use}; hold out more, as by"
            " data.heldout_frac"
        )
    num_guard = min(MAX_GUARD_ROWS, len(order) // 2)
    num_guard -= num_guard % each
    chosen = order[num_guard : num_guard + num_sequences]
    guard, report = np.sort(order[:num_guard]), np.sort(chosen)
    return HeldOut(rows_EL[guard], rows_EL[report], batch_size)


def mean_loss(programs: Programs, params: PyTree, rows_EL: np.ndarray, batch_size: int) -> float:
    """Token-mean loss of one model over rows, nats/token; rows are weighted alike."""
    return float(np.mean(_losses(programs, params, rows_EL, batch_size)))


def class_report(
    programs: Programs, params: PyTree, rows_EL: np.ndarray, batch_size: int, num_classes: int
) -> dict:
    """How well one model tells the classes of labelled rows apart.

    A row's loss under each label in turn is the negative log-probability of that class, so that the
    program of the held-out loss also predicts.

    Returns:
      `accuracy`, the share of rows whose likeliest class is theirs, and `classes`: for each class
      its `precision`, `recall`, `f1` (None where undefined) and `support` in rows.
    """
    losses_EC = np.stack(
        [
            _losses(programs, params, _relabelled(rows_EL, label), batch_size)
            for label in range(num_classes)
        ],
        axis=1,
    )
    predicted_E, labels_E = np.argmin(losses_EC, axis=1), rows_EL[:, 0]
    classes = []
    for label in range(num_classes):
        hits = int(np.sum((predicted_E == label) & (labels_E == label)))
        claims, support = int(np.sum(predicted_E == label)), int(np.sum(labels_E == label))
        classes.append(
            {
                "precision": hits / claims if claims else None,
                "recall": hits / support if support else None,
                "f1": 2 * hits / (claims + support) if claims + support else None,
                "support": support,
            }
        )
    return {"accuracy": float(np.mean(predicted_E == labels_E)), "classes": classes}


def _relabelled(rows_EL: np.ndarray, label: int) -> np.ndarray:
    return np.concatenate([np.full_like(rows_EL[:, :1], label), rows_EL[:, 1:]], axis=1)


def _losses(programs: Programs, params: PyTree, rows_EL: np.ndarray, batch_size: int) -> np.ndarray:
    """Each row's loss."""
    program = programs[loss_key(batch_size)]
    params_at, rows_at = program.input_shardings[0]
    params = bring(params, params_at)
    losses = []
    for start in range(0, len(rows_EL), batch_size):
        rows = rows_EL[start : start + batch_size]
        # The last part is filled up with copies of its first row, whose losses are dropped.
        full = np.concatenate([rows, np.repeat(rows[:1], batch_size - len(rows), axis=0)])
        loss_B = program(params, bring(full.astype(np.int32), rows_at))
        losses.append((loss_B, len(rows)))
    return np.concatenate([np.asarray(loss_B)[:n] for loss_B, n in losses])


def loss_key(batch_size: int) -> Key:
    """The one evaluation program: a model at a time, on any number of trainers."""
    return Key("loss", micro_batch_size=batch_size)


def trainer_params(ensemble: Ensemble, position: int) -> PyTree:
    """One trainer's parameters."""
    return _row(ensemble.params_M, position)


def merged_params(ensemble: Ensemble, members: tuple[int, ...], weights: tuple[float, ...]):
    """The parameters that `merge` would give its representative, without touching the ensemble."""
    return _merged_params(ensemble.params_M, members, np.asarray(weights, np.float32))


def consensus(
    ensemble: Ensemble, programs: Programs, heldout: HeldOut, weights: tuple[float, ...]
) -> tuple[PyTree, str]:
    """The one model to use now, and where it comes from; a trainer of weight 0 has no part in it.

    Returns:
      Parameters, and `only`, `best` (the best trainer) or `average` (of all, weighted by requested
      batch), whichever has the lower loss on the guard's rows.
    """
    if ensemble.num_trainers == 1:
        return trainer_params(ensemble, 0), "only"

    def guard_loss(params):
        return mean_loss(programs, params, heldout.guard_EL, heldout.batch_size)

    losses = [
        guard_loss(trainer_params(ensemble, m)) if weight else math.inf
        for m, weight in enumerate(weights)
    ]
    best = int(np.argmin([loss if math.isfinite(loss) else math.inf for loss in losses]))
    average = merged_params(ensemble, tuple(range(ensemble.num_trainers)), weights)
    if guard_loss(average) < losses[best]:
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
