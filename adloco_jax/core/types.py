"""The shared types of `core`, the key of array dimensions, and the stack of trainers.

  M  trainers (model instances)          L  tokens of a sequence
  R  workers, all trainers together      D  width
  S  inner updates of a round            F  MLP width
  A  accumulation steps of an update     H  query heads
  T  micro-batches of a round (S * A)    G  key/value heads
  B  sequences in a micro-batch          K  head size
  N  layers                              V  vocabulary

An array's name ends with its axes (`tokens_SRBL`), a pytree's with the first axes of its leaves.
In helpers W are the workers of one trainer, and X is any first axis, such as M or R. `on_any_mesh`
lets a function take arrays that are sharded over explicit axes of a mesh too; its argument says how
the results are sharded.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array, lax
from jaxtyping import PyTree

from adloco_jax.core.meshes import like_ensemble, on_any_mesh

LossFn: TypeAlias = Callable[..., Any]
"""`loss_fn(params, batch) -> scalar`, the mean over the leading axis of `batch`.

It may take a random `key`. With `has_aux=True` it returns `(scalar, auxiliary output)`.
"""


class Ensemble(struct.PyTreeNode):
    """All trainers and all workers between two rounds; a pytree.

    A trainer is identified by its position in the stack, which changes at a merge; its workers are
    adjacent. `sizes` is static: it changes only at merges and when workers join.
    """

    params_M: PyTree  # [M, ...] each trainer's parameters
    outer_state_M: PyTree  # [M, ...] each trainer's outer optimizer state
    inner_state_R: PyTree  # [R, ...] each worker's inner optimizer state
    sizes: tuple[int, ...] = struct.field(pytree_node=False)  # [M] workers of each trainer
    round: Array  # int32 []: rounds completed
    params_R: PyTree = None  # [R, ...] workers' own parameters; None: a round starts at params_M
    average_M: PyTree = None  # [M, ...] averages of params_M over rounds; None: not kept

    def __repr__(self) -> str:
        return (
            f"Ensemble({self.num_trainers} trainers, {self.num_workers} workers,"
            f" params_M: {array_summary(self.params_M)})"
        )

    @property
    def num_trainers(self) -> int:
        """Number of trainers in the stack; static, so equal in all calls of a compiled program."""
        return len(self.sizes)

    @property
    def num_workers(self) -> int:
        """Number of workers in the pool; static, so equal in all calls of a compiled program."""
        return sum(self.sizes)

    @property
    def workers(self) -> list[range]:
        """The positions of each trainer's workers in arrays [R, ...]."""
        ends = itertools.accumulate(self.sizes)
        return [range(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


class Workers(struct.PyTreeNode):
    """The workers in the middle of a round, when their parameters differ; a pytree."""

    params_R: PyTree  # [R, ...]
    inner_state_R: PyTree  # [R, ...]
    grad_sum_R: PyTree = None  # [R, ...] float32: sum of the current update's gradients
    num_grads: Array | None = None  # int32 []: number of gradients in the sum
    finite_R: Array | None = None  # bool [R]: whether all losses in the sum were finite


class RoundMetrics(struct.PyTreeNode):
    """What a round measures: losses, skipped updates, pseudo-gradients' norms, auxiliary output."""

    loss_SR: Array  # float32 [S, R]: mean training loss of each inner update
    skipped_SR: Array  # bool [S, R]: whether an update was skipped as not finite
    pseudo_grad_norm_M: Array  # float32 [M]: L2 norm of each trainer's pseudo-gradient
    aux: PyTree = None  # [S, R, ...] auxiliary output: means over an update's micro-batches


class GradientStats(struct.PyTreeNode):
    """Statistics of per-example gradients at one point, as sums with their weights.

    A quantity is its sum divided by its weight. To combine statistics, add or average sums and
    weights separately (`core.gradstats.pool`).

    Sums are in units of `scale`, those of inner products in units of `scale**2`, so that they stay
    within float32. If squared norms do not, `scale` is 0 or infinite; ratios of one worker's sums
    are valid even then, but `noise`, `signal` and pooled statistics are not. On the host the fields
    are NumPy float64.

    In the comments, g_j is the gradient of example j of t, mean the mean gradient, n_j = |g_j|^2
    and p_j = <g_j, mean>; mean_1 and mean_2 are those of the first and of the second third.
    """

    scale: Array | np.ndarray  # mean squared norm of a per-example gradient
    num_examples: Array | np.ndarray  # t
    noise_sum: Array | np.ndarray  # sum_j n_j - t |mean|^2
    noise_weight: Array | np.ndarray  # t - 1
    signal_sum: Array | np.ndarray  # t^2 |mean|^2 - sum_j n_j
    signal_weight: Array | np.ndarray  # t (t - 1)
    ip_sum: Array | np.ndarray  # last third: covariance sum of <g_j, mean_1> and <g_j, mean_2>
    ip_weight: Array | np.ndarray  # size of the last third - 1; 0 without inner products
    plugin_ip_sum: Array | np.ndarray  # sum_j (p_j - |mean|^2)^2, weight t - 1
    plugin_orth_sum: Array | np.ndarray  # sum_j n_j - sum_j p_j^2 / |mean|^2, weight t - 1

    def __repr__(self) -> str:
        # Traced statistics have no values to show, and stacked ones have too many.
        if isinstance(self.scale, jax.core.Tracer) or np.shape(self.scale) != ():
            return f"GradientStats({array_summary(self.scale)} in each field)"
        return (
            f"GradientStats(num_examples={float(self.num_examples):.4g},"
            f" noise={float(self.noise):.4g}, signal={float(self.signal):.4g})"
        )

    def in_units_of(self, scale: Array | np.ndarray | float) -> "GradientStats":
        """Return the same statistics with the sums in units of another scale.

        Fields and `scale` are broadcast; they may be NumPy arrays or JAX arrays.
        """
        # An array's boolean is 0 or 1 here, so that one line serves NumPy and traced JAX arrays.
        divisor = scale + (scale == 0)  # 1 for a scale of 0
        ratio = self.scale / divisor  # 0 if both scales are 0
        # Sums of inner products are in units of `scale**2`.
        return self.replace(
            scale=scale,
            noise_sum=self.noise_sum * ratio,
            signal_sum=self.signal_sum * ratio,
            plugin_orth_sum=self.plugin_orth_sum * ratio,
            ip_sum=self.ip_sum * ratio**2,
            plugin_ip_sum=self.plugin_ip_sum * ratio**2,
        )

    @property
    def noise(self) -> Array | np.ndarray:
        """Unbiased estimate of the gradient noise, S_hat in docs/algorithm.md, section 2."""
        return self.scale * (self.noise_sum / self.noise_weight)

    @property
    def signal(self) -> Array | np.ndarray:
        """Unbiased estimate of the squared norm of the true gradient; may be negative."""
        return self.scale * (self.signal_sum / self.signal_weight)


def array_summary(tree: PyTree) -> str:
    """Describe a tree of arrays in a few words, for a `repr`: how many numbers, of which types.

    Leaves that are no arrays are left out. Of a single array the shape is shown.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    dtypes = " and ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    if len(leaves) == 1:
        shape = list(leaves[0].shape)
        return f"{dtypes}{shape}"
    num_numbers = sum(leaf.size for leaf in leaves)
    return f"{num_numbers:,} numbers, {dtypes}, in {len(leaves)} arrays"


class BatchPlan(NamedTuple):
    """Size and number of the micro-batches of one inner update of a worker."""

    micro_batch_size: int
    num_accum_steps: int


def trainable(params: PyTree) -> PyTree:
    """Return `params` with None in place of the leaves that are not floating-point.

    Raises ValueError if there is no floating-point leaf, or if a leaf is complex.
    """

    def select(leaf: Array) -> Array | None:
        """Return a floating-point leaf as it is, and None for all others."""
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(
                f"params: a leaf of shape {leaf.shape} is {leaf.dtype}, expected real numbers;"
                " hold its real and imaginary parts as two leaves"
            )
        return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None

    values = jax.tree.map(select, params)
    if not jax.tree.leaves(values):
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
        raise ValueError(
            "params: expected a pytree with at least one floating-point array, got"
            f" {', '.join(dtypes) or 'no array'}; convert the trainable arrays to float32"
        )
    return values


def without_state(params: PyTree) -> PyTree:
    """Return `params`; raise ValueError if they hold state that is no parameter.

    Random state, such as that of NNX's Dropout, would be the same for all workers and in all
    updates. Batch statistics, of Linen or NNX, are no function of the parameters.
    """

    # Classes are compared by name, so that `flax.nnx` need not be imported.
    def flax_classes(node: Any) -> set[str]:
        """Return the names of the classes of Flax that the node is an instance of."""
        classes = type(node).__mro__
        return {kind.__name__ for kind in classes if kind.__module__.startswith("flax.")}

    def is_variable(node: Any) -> bool:
        """Return whether a node is a variable of NNX that is no parameter."""
        return "Variable" in flax_classes(node) and "Param" not in flax_classes(node)

    for path, node in jax.tree.leaves_with_path(params, is_leaf=is_variable):
        where = f"params{jax.tree_util.keystr(path)}"
        if is_variable(node):
            is_random = "RngState" in flax_classes(node)
        else:
            is_random = is_key(node)
        if is_random:
            raise ValueError(
                f"{where}: random state, which would give all workers and updates the same numbers;"
                " leave it out (nnx.split(model, nnx.Param, ...)), and let loss_fn take `key`"
            )
        # Batch statistics of Linen are in a dict under this key; those of NNX are variables.
        in_batch_stats = any(getattr(part, "key", None) == "batch_stats" for part in path)
        has_floats = any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(node))
        if has_floats and (in_batch_stats or is_variable(node)):
            kind = "batch_stats" if in_batch_stats else type(node).__name__
            raise ValueError(
                f"{where}: state that the model changes ({kind}), not a parameter; a model"
                " must be a function of its parameters alone: replace batch by layer normalisation"
            )
    return params


def with_trainable(params: PyTree, values: PyTree) -> PyTree:
    """Replace the floating-point leaves of `params` by those of `values`, which has None elsewhere.

    This is the inverse of `trainable`.
    """
    return jax.tree.map(lambda leaf, new: leaf if new is None else new, params, values)


# The label of a parameter by the names in its path, without a number at their ends: norm_2/scale
# has the names norm and scale. The first label counts whose pattern fits one of these names.
_PATTERNS = {
    "other": r"\w*norm\w*|ln\w*|\w*bias|scale|gain",
    "head": r"(lm_?|output_)?head|unembed\w*|logits|classifier",
    "embedding": r"\w*embed\w*|(\w*_)?emb|wte|wpe",
}


def label_by_name(
    params: PyTree, known: Callable[[tuple, Array], str | None] = lambda path, leaf: None
) -> PyTree:
    """Return a tree with a label for each leaf of `params`.

    "embedding", "head" and "other" (norms and biases) follow from names in a leaf's path. Of the
    other leaves those with two axes are "matrix", and those with fewer are "other". A leaf that
    `known(path, leaf)` labels keeps this label; where it returns None, the rules above decide.

    Raises:
      ValueError: If a leaf that no name labels has more than two axes, of which one may count
        layers; or has two and may be an embedding or the head, because no leaf is labelled as an
        embedding, or because it has the shape of one.
    """

    def path_name(path: tuple) -> str:
        """Return a leaf's path as text, its parts joined by slashes."""
        return jax.tree_util.keystr(path, simple=True, separator="/")

    def label_one(path: tuple, leaf: Array) -> str:
        """Return the leaf's label; "" if its name tells none and it has two or more axes."""
        label = known(path, leaf)
        if label:
            return label
        parts = path_name(path).lower().split("/")
        # Without the number at the end of a name, as in norm_2.
        names = [re.sub(r"(?<=\w)_?\d+$", "", part) for part in parts]
        for label, pattern in _PATTERNS.items():
            if any(re.fullmatch(pattern, name) for name in names):
                return label
        return "other" if leaf.ndim < 2 else ""

    labels = jax.tree.map_with_path(label_one, params)
    labelled_leaves = list(
        zip(jax.tree.leaves_with_path(params), jax.tree.leaves(labels), strict=True)
    )

    # A leaf without a label is a matrix, unless it may be an embedding or the head. It may be if no
    # leaf is known as an embedding, or if it has the shape of one, transposed for a head.
    embedding_shapes = set()
    for (_, leaf), label in labelled_leaves:
        if label.endswith("embedding"):
            embedding_shapes.add(leaf.shape)
            embedding_shapes.add(leaf.shape[::-1])
    unclear = []
    for (path, leaf), label in labelled_leaves:
        if label:
            continue
        may_be_embedding = not embedding_shapes or leaf.shape in embedding_shapes
        if leaf.ndim != 2 or may_be_embedding:
            unclear.append(f"{path_name(path)} {list(leaf.shape)}")
    if unclear:
        leaves = ", ".join(unclear[:3])  # a few show what is meant
        if len(unclear) > 3:
            leaves += " and others"
        raise ValueError(
            f"names do not say what {leaves}"
            " is; give label_params, a function that labels each parameter matrix (of a hidden"
            " layer), embedding, head or other, with stacked_ before it if the first axis counts"
            " layers"
        )
    return jax.tree.map(lambda label: label or "matrix", labels)


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype in which to compute: float64 for float64 values, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def is_key(leaf: Array) -> bool:
    """Return whether an array holds typed PRNG keys, which cannot be averaged or converted."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def with_dtypes(tree: PyTree, like: PyTree) -> PyTree:
    """Cast the leaves of `tree` to the dtypes of those of `like`, which has the same structure.

    An optax update may have widened them. PRNG keys stay as they are.
    """

    def cast(leaf: Array, old: Array) -> Array:
        """Cast one leaf, unless it is a PRNG key."""
        return leaf if is_key(old) else leaf.astype(old.dtype)

    return jax.tree.map(cast, tree, like)


def init(
    params: PyTree,
    *,
    num_trainers: int,
    num_workers: int,
    inner_tx: optax.GradientTransformation,
    outer_tx: optax.GradientTransformation,
    sizes: Sequence[int] | np.ndarray | None = None,
    own_params: bool = False,
    average: bool = False,
) -> Ensemble:
    """Stack `num_trainers` trainers that all start from `params`, and a pool of workers.

    To give trainers different parameters, replace `params_M` of the result (and `params_R`, if
    workers have their own). Random keys in inner states, such as that of `optax.add_noise`, are
    equal in all workers; for different noise, replace them in `inner_state_R`.

    Args:
      params: Parameters of one model, any pytree of arrays but PRNG keys. Optimizers receive the
        floating-point leaves; others do not change.
      num_trainers: M >= 1.
      num_workers: R >= M, the workers of all trainers together.
      inner_tx: Transformation of the workers' gradients; each worker has a state of it.
      outer_tx: Transformation of the trainers' pseudo-gradients; each trainer has a state of it.
      sizes: Number of each trainer's workers, which sum to R. None divides them evenly.
      own_params: Whether workers keep their own parameters between rounds, as in Streaming DiLoCo.
      average: Whether trainers have an average of their parameters (`core.outer.running_average`).

    Returns:
      The ensemble before its first round.

    Raises:
      ValueError: If `sizes` do not give each trainer a worker or do not sum to R; if `params` have
        no floating-point leaf or a complex one; or if they hold random state, or state that the
        model changes (such as batch statistics).

    Source: AdLoCo algorithm 1, lines 1-3.
    """
    if sizes is None:
        trainers = max(num_trainers, 1)  # no division by zero; zero trainers are refused below
        # The workers of the first m trainers are the share m / M of the pool, rounded up.
        ends = [-(-m * num_workers // trainers) for m in range(trainers + 1)]
        sizes = np.diff(ends)
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != num_trainers or sum(sizes) != num_workers or 0 in sizes:
        raise ValueError(
            f"sizes={sizes}: expected the workers, at least one, of each of num_trainers="
            f"{num_trainers}, together num_workers={num_workers}"
        )

    def stack(tree: PyTree, size: int) -> PyTree:
        """Return a tree of leaves [size, ...], all copies of those of `tree`."""

        def copies(leaf: Any) -> Array:
            """Repeat one leaf along a new first axis."""
            leaf = jnp.asarray(leaf)
            if not is_key(leaf):
                # This removes a weak type, which would make the second round compile again.
                leaf = leaf.astype(leaf.dtype)
            return jnp.broadcast_to(leaf, (size, *leaf.shape))

        return jax.tree.map(copies, tree)

    params = without_state(jax.tree.map(jnp.asarray, params))
    values = trainable(params)
    return Ensemble(
        params_M=stack(params, num_trainers),
        outer_state_M=stack(outer_tx.init(values), num_trainers),
        inner_state_R=stack(inner_tx.init(values), num_workers),
        sizes=sizes,
        round=jnp.zeros((), jnp.int32),
        params_R=stack(params, num_workers) if own_params else None,
        average_M=stack(params, num_trainers) if average else None,
    )


@on_any_mesh(like_ensemble)
def take(ensemble: Ensemble, trainers: Sequence[int]) -> Ensemble:
    """Take trainers with their workers out of the stack, to run a round of them separately.

    `trainers` are distinct positions, in the order of the result. `round` of the result is that of
    the whole stack; `put` writes trainers back. Raises ValueError if there is no position, one
    repeats or one is out of range.
    """
    chosen = positions("trainers", trainers, ensemble.num_trainers)
    workers = _workers_of(ensemble, chosen)
    return Ensemble(
        params_M=_pick(ensemble.params_M, chosen),
        outer_state_M=_pick(ensemble.outer_state_M, chosen),
        inner_state_R=_pick(ensemble.inner_state_R, workers),
        sizes=tuple(ensemble.sizes[m] for m in chosen),
        round=ensemble.round,
        params_R=_pick(ensemble.params_R, workers),
        average_M=_pick(ensemble.average_M, chosen),
    )


@on_any_mesh(like_ensemble)
def put(ensemble: Ensemble, trainers: Sequence[int], sub: Ensemble) -> Ensemble:
    """Write trainers and workers that `take` returned back into the stack, after a round.

    `round` becomes the larger count of `ensemble` and `sub`. So groups count as one round if all
    are taken before any is put back:

        start = ensemble
        for trainers in groups:
            sub, _ = step(take(start, trainers), ...)
            ensemble = put(ensemble, trainers, sub)

    If instead each group is taken from the result of `put`, for instance because `start` was
    donated, end with `ensemble.replace(round=first + 1)`, `first` being the count at the start.

    Raises ValueError if there is no position, one repeats or one is out of range, or if `sub` has
    other numbers of workers than the trainers there.
    """
    chosen = positions("trainers", trainers, ensemble.num_trainers)
    workers = _workers_of(ensemble, chosen)
    taken = tuple(ensemble.sizes[m] for m in chosen)
    if sub.sizes != taken:
        raise ValueError(f"sub has trainers of {sub.sizes} workers, expected {taken}, as taken")

    def write(tree: PyTree, index: np.ndarray, part: PyTree) -> PyTree:
        """Write the leaves of `part` into those of `tree`, at positions of the first axis."""
        return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), tree, part)

    return ensemble.replace(
        params_M=write(ensemble.params_M, chosen, sub.params_M),
        outer_state_M=write(ensemble.outer_state_M, chosen, sub.outer_state_M),
        inner_state_R=write(ensemble.inner_state_R, workers, sub.inner_state_R),
        round=jnp.maximum(ensemble.round, sub.round),
        params_R=write(ensemble.params_R, workers, sub.params_R),
        average_M=write(ensemble.average_M, chosen, sub.average_M),
    )


def to_workers(tree_M: PyTree, sizes: Sequence[int]) -> PyTree:
    """Give each worker a copy of the entry of its trainer: leaves [M, ...] -> [R, ...]."""
    if len(set(sizes)) == 1:  # XLA's partitioner sees that trainers are independent
        return jax.tree.map(lambda leaf_M: jnp.repeat(leaf_M, sizes[0], axis=0), tree_M)
    return jax.tree.map(lambda leaf_M: leaf_M[of_workers(sizes)], tree_M)


def of_workers(sizes: Sequence[int]) -> np.ndarray:
    """Return the position of each worker's trainer, int32 [R]."""
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def map_trainers(
    function: Callable[[PyTree], PyTree], tree_R: PyTree, sizes: Sequence[int]
) -> PyTree:
    """Call a function on the workers of each trainer; return the stacked results [M, ...].

    Neighbours with equally many workers share one `vmap`: no padding, and memory grows with R.

    Args:
      function: Called with a tree like `tree_R`, but with leaves [W, ...], one trainer's workers.
      tree_R: Leaves [R, ...], one trainer's workers after another.
      sizes: Number of each trainer's workers [M].
    """

    def call_on_neighbours(first: int, num_trainers: int, size: int) -> PyTree:
        """Call the function on trainers with `size` workers each, from worker `first` on."""

        def split(leaf_R: Array) -> Array:
            """Return the neighbours' entries of a leaf, [num_trainers, size, ...]."""
            leaf = leaf_R[first : first + num_trainers * size]
            return leaf.reshape(num_trainers, size, *leaf.shape[1:])

        return jax.vmap(function)(jax.tree.map(split, tree_R))

    results = []
    first = 0  # position of the neighbours' first worker
    for size, neighbours in itertools.groupby(sizes):
        count = len(list(neighbours))
        results.append(call_on_neighbours(first, count, size))
        first += count * size
    if len(results) == 1:  # nothing to concatenate, which would copy
        return results[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)


def where_leading(condition_X: Array | np.ndarray, tree_X: PyTree, other_X: PyTree) -> PyTree:
    """Take `tree_X` where `condition_X` is True along the leaves' first axis, else `other_X`."""

    def select(leaf: Array, other: Array) -> Array:
        """Choose between two leaves, entry by entry of the first axis."""
        # The condition, broadcast over all axes but the first.
        return jnp.where(condition_X.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, other)

    return jax.tree.map(select, tree_X, other_X)


def shares(weights_X: Array, usable_X: Array) -> tuple[Array, Array]:
    """Normalise weights to shares that sum to 1; return the shares, and which entries count.

    An entry counts if it is usable and its weight is positive and finite. If there is no such
    entry, all usable entries count equally. If no entry is usable, all shares are zero.

    `weights_X` and the shares are float32 [X]; `usable_X` and which entries count are bool [X].
    """
    weighted_X = usable_X & (weights_X > 0) & jnp.isfinite(weights_X)
    any_weight = jnp.any(weighted_X)
    chosen_X = jnp.where(any_weight, weighted_X, usable_X)
    # Smaller units keep the sum of large weights finite; 2**-64, a power of two, loses no bits. To
    # divide by the largest weight, and then by the sum, would not do: XLA merges two divisions into
    # one by the product of the divisors, which may be infinite.
    unit = jnp.where(jnp.any(weighted_X & (weights_X > 1)), 2.0**-64, 1.0)
    relative_X = jnp.where(any_weight, weights_X * unit, 1.0)
    share_X = jnp.where(chosen_X, relative_X, 0.0)
    total = jnp.sum(share_X)
    return share_X / jnp.where(total > 0, total, 1.0), chosen_X


def squared_norms(tree_X: PyTree) -> Array:
    """Squared L2 norms over all leaves [X, ...] together, float32 [X]; infinite on overflow."""
    squares = (_sum_entries(jnp.square(leaf_X)) for leaf_X in _as_float32(tree_X))
    return sum(squares, jnp.zeros((), jnp.float32))


def norms(tree_X: PyTree) -> Array:
    """L2 norms over all leaves [X, ...] together, float32 [X]; no square under- or overflows.

    A norm is not finite if one of its values is not. The derivative of a zero norm is zero.
    """
    leaves_X = _as_float32(tree_X)
    # The largest absolute value at each index, or 1 if that is zero or not finite.
    peak_X_of_leaves = [
        jnp.max(jnp.abs(leaf_X), axis=tuple(range(1, leaf_X.ndim)), initial=0.0)
        for leaf_X in leaves_X
    ]
    # It is only a unit, on which the norm does not depend, so it needs no derivative.
    peak_X = lax.stop_gradient(functools.reduce(jnp.maximum, peak_X_of_leaves))
    peak_X = jnp.where((peak_X > 0) & jnp.isfinite(peak_X), peak_X, 1.0)

    # Square values in units of the largest one, and multiply the root by it again.
    square_X_of_leaves = []
    for leaf_X in leaves_X:
        unit_X = peak_X.reshape((-1,) + (1,) * (leaf_X.ndim - 1))  # broadcast over all other axes
        square_X_of_leaves.append(_sum_entries(jnp.square(leaf_X / unit_X)))
    square_X = sum(square_X_of_leaves)
    # The derivative of sqrt at zero is infinite, even where the result is not taken.
    root_X = jnp.sqrt(jnp.where(square_X > 0, square_X, 1.0))
    return peak_X * jnp.where(square_X > 0, root_X, square_X)


def _as_float32(tree: PyTree) -> list[Array]:
    """List the leaves of a tree, cast to float32."""
    return [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]


def _sum_entries(leaf_X: Array) -> Array:
    """Sum over all axes but the first."""
    return jnp.sum(leaf_X, axis=tuple(range(1, leaf_X.ndim)))


def moved_states(
    ensemble: Ensemble,
    source: np.ndarray,
    stays_R: Array | np.ndarray,
    trainer_R: Array | np.ndarray,
) -> PyTree:
    """Return the inner states of workers, some of which have moved to other trainers.

    A worker that moves takes the mean state of the workers that its new trainer had. Whole numbers
    such as Adam's count are then rounded, values that are equal in all do not change, and a PRNG
    key is that of the trainer's first worker.

    Args:
      ensemble: The trainers and workers before the move.
      source: For each worker of the result, its old position in the pool, int64.
      stays_R: For each worker of the result, whether it stays with its trainer.
      trainer_R: For each worker of the result, the old position of its new trainer.
    """

    def join(leaf_W: Array) -> Array:
        """Return the state of a worker that joins a trainer, with workers' states `leaf_W`."""
        if is_key(leaf_W):
            return leaf_W[0]
        mean = jnp.mean(leaf_W.astype(at_least_float32(leaf_W.dtype)), axis=0)
        if not jnp.issubdtype(leaf_W.dtype, jnp.inexact):
            mean = jnp.round(mean)
        # The mean of equal values may differ from them by rounding.
        is_equal = jnp.all(leaf_W == leaf_W[:1], axis=0)
        return jnp.where(is_equal, leaf_W[0], mean.astype(leaf_W.dtype))

    def move(leaf_R: Array) -> Array:
        """Keep the states of workers that stay; give the others their new trainer's mean."""
        joined_M = map_trainers(join, leaf_R, ensemble.sizes)
        return where_leading(stays_R, leaf_R[source], joined_M[trainer_R])

    return jax.tree.map(move, ensemble.inner_state_R)


def moved_params(ensemble: Ensemble, source: np.ndarray, stays_R: np.ndarray) -> PyTree:
    """Return the workers' own parameters after a move, or None if workers have none.

    A worker that moved takes the parameters of its new trainer. `source` has the old position of
    each worker of the result, and `stays_R` says whether it stays with its trainer. `ensemble` has
    the new trainers and sizes, and the workers' own parameters in the old order.
    """
    if ensemble.params_R is None:
        return None
    own_R = jax.tree.map(lambda leaf_R: leaf_R[source], ensemble.params_R)
    return where_leading(stays_R, own_R, to_workers(ensemble.params_M, ensemble.sizes))


def positions(name: str, indices: Sequence[int], size: int) -> np.ndarray:
    """Check positions in a stack of `size` entries; return them as an array int64 [X].

    Raises ValueError if there is none, or if one repeats, is negative, or is not below `size`.
    `name` is the argument's, for the message.
    """
    chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
    is_distinct = len(set(chosen.tolist())) == len(chosen)
    is_inside = all(0 <= position < size for position in chosen.tolist())
    if len(chosen) == 0 or not is_distinct or not is_inside:
        need = f"expected distinct positions below {size}, at least one"
        raise ValueError(f"{name}: {need}; got {chosen.tolist()}")
    return chosen


def _workers_of(ensemble: Ensemble, trainers: np.ndarray) -> np.ndarray:
    """Return the positions of trainers' workers in arrays [R, ...], trainer by trainer."""
    return np.concatenate([ensemble.workers[m] for m in trainers])


def _pick(tree: PyTree, index: np.ndarray) -> PyTree:
    """Take the entries at these positions out of leaves [X, ...]."""
    return jax.tree.map(lambda leaf: leaf[index], tree)
