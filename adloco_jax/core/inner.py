"""The inner steps of a round: each worker's own updates (AdLoCo algorithm 1, lines 7 to 13).

Axes of arrays: T micro-batches, R workers, B examples of a micro-batch. An update ends with one
micro-batch or, if gradients are accumulated, with the last of several. `on_any_mesh` lets a
function take arrays that are sharded over explicit axes of a mesh too; its argument says how the
results are sharded.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array, lax
from jaxtyping import Bool, Float, Key, PyTree

from adloco_jax.core.arguments import (
    checked_batch_length,
    checked_factors,
    checked_key,
    checked_update,
    trainable_loss,
)
from adloco_jax.core.meshes import like_argument_and_replicated, on_any_mesh, varying_alike
from adloco_jax.core.types import (
    LossFn,
    Workers,
    at_least_float32,
    label_by_name,
    squared_norms,
    trainable,
    with_dtypes,
    with_trainable,
)

# Classes of optimizer states that hold a copy of the parameters, which an outer update would not
# change.
_KEEPS_PARAMS = (
    optax.LookaheadState,
    optax.contrib.SAMState,
    optax.contrib.ScheduleFreeState,
)


@on_any_mesh(like_argument_and_replicated)
def inner_steps(
    workers: Workers,
    batch_TRB: PyTree,
    loss_fn: LossFn,
    *,
    inner_tx: optax.GradientTransformation,
    learning_rate_TR: Float[Array, "T R"] | None = None,
    update_T: Bool[Array, " T"] | None = None,
    key_TRB: Key[Array, "T R B"] | None = None,
    has_aux: bool = False,
    sequential: bool = False,
    examples_per_pass: int | None = None,
) -> tuple:
    """Train every worker on T micro-batches; the workers do not communicate.

    A worker skips an update if the loss, or the gradient's squared norm in float32, is not finite;
    its parameters and inner state then do not change. This precedes `inner_tx`, because clipping
    would turn an infinity into a zero step or a NaN.

    Args:
      workers: The result of `start_round` or of an earlier call.
      batch_TRB: Pytree of leaves [T, R, B, ...].
      loss_fn: `loss_fn(params, micro_batch) -> scalar`, the mean over the examples; called with the
        keyword `key` too if `key_TRB` is given.
      inner_tx: Transformation of a worker's gradients. Refused are those whose state holds
        parameters (schedule-free, SAM, lookahead).
      learning_rate_TR: A factor on the update that the micro-batch completes. None means 1.
      update_T: True where a micro-batch completes an update, by the mean of all gradients since the
        last. None: everywhere. An array, so that one program serves every accumulation.
      key_TRB: A key for each example, needed if the loss takes `key`; a call of the loss receives
        the key of its first example.
      has_aux: Whether `loss_fn` returns a pair (scalar, pytree of arrays).
      sequential: Whether workers run one after another, and not at once as one batch. It needs the
        least memory, and is fastest on a CPU. Results change only by rounding. If workers are
        spread over devices, call the function on each device (`jax.shard_map`).
      examples_per_pass: Largest number of examples in one pass, lowered to a divisor of B. None: B.
        Gradients of passes are averaged in float32. Results change only by rounding.

    Returns:
      The workers; the mean loss of every micro-batch, float32 [T, R]; whether the worker skipped
      the update that the micro-batch completes, bool [T, R]; with `has_aux`, leaves [T, R, ...].

    Raises:
      ValueError: If shapes do not fit, the loss is not one number, a key is missing or not typed,
        `update_T` is given but workers have no sum of gradients, or `inner_tx` is refused or is not
        the transformation that made the workers' states.

    Source: AdLoCo algorithm 1, lines 7-13; accumulation is its switch mode (section 4.4).
    """
    # In `jax.shard_map`, JAX would otherwise sum the workers' gradients over devices.
    workers, batch_TRB = varying_alike(workers, batch_TRB)
    num_workers = jax.tree.leaves(workers.params_R)[0].shape[0]
    num_micro_batches = checked_batch_length(batch_TRB, num_workers, name="batch_TRB")
    shape_TR = (num_micro_batches, num_workers)
    learning_rate_TR = checked_factors("learning_rate_TR", learning_rate_TR, shape_TR)
    checked_key("key_TRB", key_TRB, loss_fn)

    # For each micro-batch, whether it ends an update and how many gradients are then in the sum.
    num_grads = workers.num_grads
    accumulation_T = None
    if update_T is not None:
        if num_grads is None:
            raise ValueError("update_T: expected workers from start_round(..., accumulate=True)")
        num_grads, count_T = _count_grads(num_grads, update_T)
        accumulation_T = (update_T, count_T)

    # `step` processes one micro-batch of one worker: its gradient, in passes, then the update.
    one_pass = functools.partial(_value_and_grad, loss_fn, has_aux)
    value_and_grad = functools.partial(_in_passes, one_pass, examples_per_pass)
    transform = checked_update(
        "inner_tx", inner_tx, workers.inner_state_R, workers.params_R, refused=_KEEPS_PARAMS
    )
    step = functools.partial(_step, value_and_grad, transform)

    def run_worker(carry: tuple, inputs_T: tuple) -> tuple[tuple, tuple]:
        """Train one worker on its T micro-batches.

        Returns its carry, and (loss, whether the update was skipped, auxiliary output), [T, ...].
        """
        examples_T, learning_rate_T = inputs_T
        return lax.scan(step, carry, (examples_T, learning_rate_T, accumulation_T))

    # Workers are mapped over the first axis, which is T in the inputs: so T and R are swapped. A
    # worker's carry has what a micro-batch changes; `finite_R` says whether all losses of the
    # gradients in the sum are finite.
    carry_R = (workers.params_R, workers.inner_state_R, workers.grad_sum_R, workers.finite_R)
    inputs_RT = _swap(((batch_TRB, key_TRB), learning_rate_TR))
    carry_R, measured_RT = _map_workers(run_worker, carry_R, inputs_RT, sequential=sequential)

    params_R, state_R, grad_sum_R, finite_R = carry_R
    workers = Workers(
        params_R=params_R,
        inner_state_R=state_R,
        grad_sum_R=grad_sum_R,
        num_grads=num_grads,
        finite_R=finite_R,
    )
    loss_TR, skipped_TR, aux_TR = _swap(measured_RT)
    if has_aux:
        return workers, loss_TR, skipped_TR, aux_TR
    return workers, loss_TR, skipped_TR


def _value_and_grad(
    loss_fn: LossFn, has_aux: bool, params: PyTree, inputs_B: tuple[PyTree, Array | None]
) -> tuple[tuple[Array, PyTree], PyTree]:
    """Compute the loss of some examples and its gradient.

    `loss_fn` and `has_aux` are the arguments of `inner_steps`. `inputs_B` has the examples, leaves
    [B, ...], and a random key for each, or None if the loss takes no key. The loss receives the
    first example's key. Returns ((loss, auxiliary output), gradient); the gradient has None for
    leaves of `params` that are not floating-point.
    """
    batch_B, key_B = inputs_B
    loss_of = trainable_loss(loss_fn, params, has_aux=has_aux)
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if key_B is None:  # the loss may have no parameter `key`
        return value_and_grad(trainable(params), batch_B)
    return value_and_grad(trainable(params), batch_B, key=key_B[0])


def _step(value_and_grad: Callable, transform: Callable, carry: tuple, step: tuple) -> tuple:
    """Process one micro-batch of one worker, as the body of a `lax.scan` over micro-batches.

    Args:
      value_and_grad: `value_and_grad(params, inputs_B) -> ((loss, aux), gradient)`.
      transform: The `update` function of the inner optimizer.
      carry: The worker: parameters, inner state, sum of the update's gradients so far, and whether
        the losses of these gradients are finite. The last two are None without accumulation.
      step: The micro-batch: examples with their keys, learning rate (None means 1), and None or, if
        gradients are accumulated, (whether it ends an update, number of gradients in the sum).

    Returns:
      The carry after the micro-batch, and (loss, whether the update was skipped, auxiliary output).
    """
    params, state, grad_sum, is_finite = carry
    inputs_B, learning_rate, accumulation = step
    (loss, aux), grads = value_and_grad(params, inputs_B)
    if accumulation is None:  # each micro-batch ends an update, so no sum of gradients is kept
        params, state, skipped = _update(
            transform, (params, state), grads, jnp.isfinite(loss), learning_rate
        )
        return (params, state, grad_sum, is_finite), (loss, skipped, aux)

    ends_update, count = accumulation
    # Gradients are added in the dtype of their sum, float32.
    grad_sum = jax.tree.map(jnp.add, grad_sum, with_dtypes(grads, grad_sum))
    is_finite &= jnp.isfinite(loss)

    # Both branches return the new carry, and whether an update was skipped.
    def end_update() -> tuple[tuple, Array]:
        """Update by the mean gradient, and begin a new sum."""
        mean = jax.tree.map(lambda leaf: leaf / count, grad_sum)
        new_params, new_state, skipped = _update(
            transform, (params, state), mean, is_finite, learning_rate
        )
        zeros = jax.tree.map(jnp.zeros_like, grad_sum)
        return (new_params, new_state, zeros, jnp.ones_like(is_finite)), skipped

    def go_on() -> tuple[tuple, Array]:
        """Leave the worker as it is until the update's last micro-batch."""
        return (params, state, grad_sum, is_finite), jnp.zeros_like(is_finite)

    carry, skipped = lax.cond(ends_update, end_update, go_on)
    return carry, (loss, skipped, aux)


def _update(
    transform: Callable,
    before: tuple[PyTree, PyTree],
    grads: PyTree,
    is_finite: Array,
    learning_rate: Array | None,
) -> tuple[PyTree, PyTree, Array]:
    """Apply an update of the inner optimizer, unless the loss or the gradient is not finite.

    Args:
      transform: The `update` function of the optimizer.
      before: The worker's parameters and inner state.
      grads: The gradient, like the trainable parameters.
      is_finite: Whether the loss is finite, bool [].
      learning_rate: Factor on the update, []; None means 1.

    Returns:
      The parameters and the inner state after the update, and whether it was skipped.
    """
    params, state = before
    # `squared_norms` takes stacked arrays, so the gradient is a stack of one.
    stack_of_one = jax.tree.map(lambda leaf: leaf[None], grads)
    is_finite &= jnp.isfinite(squared_norms(stack_of_one)[0])

    def apply(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return parameters and state after the update."""
        values = trainable(params)
        updates, new_state = transform(grads, state, values)
        if learning_rate is not None:
            updates = jax.tree.map(lambda leaf: leaf * learning_rate, updates)
        after = with_trainable(params, optax.apply_updates(values, updates))
        # An update may widen a state's dtypes, which must be the same in both cases below.
        return after, with_dtypes(new_state, state)

    # Two ways to skip the update. On a CPU a select costs a copy of the optimizer's state in every
    # update. On a GPU a branch costs two copies, and a select is a part of the kernels that update
    # the state.
    def branch(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return parameters and state after the update, or as before, by a branch."""
        return lax.cond(is_finite, apply, lambda *before: before, params, state)

    def select(*before: PyTree) -> tuple[PyTree, PyTree]:
        """Return what `branch` does, by a choice between both for each number."""
        return jax.tree.map(functools.partial(jnp.where, is_finite), apply(*before), before)

    params, state = lax.platform_dependent(params, state, cpu=branch, default=select)
    return params, state, ~is_finite


def _in_passes(
    value_and_grad: Callable, limit: int | None, params: PyTree, inputs_B: PyTree
) -> PyTree:
    """Compute the loss and the gradient of a micro-batch in passes of at most `limit` examples.

    `value_and_grad(params, inputs_B) -> ((loss, aux), gradient)` is called for each pass, and the
    result is the mean of its results. Passes are equally long, so the longest length that divides
    B is chosen. `limit` None: one pass. Leaves of `inputs_B` are [B, ...].
    """
    num_examples = jax.tree.leaves(inputs_B)[0].shape[0]
    largest = min(limit or num_examples, num_examples)
    size = max(n for n in range(1, largest + 1) if num_examples % n == 0)
    if size == num_examples:
        return value_and_grad(params, inputs_B)
    num_passes = num_examples // size
    # Leaves [number of passes, examples of a pass, ...].
    passes = jax.tree.map(lambda leaf: leaf.reshape(num_passes, size, *leaf.shape[1:]), inputs_B)

    def add_pass(total: PyTree, pass_inputs: PyTree) -> tuple[PyTree, None]:
        """Add the results of one pass to their sum; the body of a `lax.scan`."""
        return jax.tree.map(jnp.add, total, value_and_grad(params, pass_inputs)), None

    # Sum in float32 at least, and return the dtypes that one pass returns.
    first_pass = jax.tree.map(lambda leaf: leaf[0], passes)
    like = jax.eval_shape(value_and_grad, params, first_pass)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, at_least_float32(leaf.dtype)), like)
    total, _ = lax.scan(add_pass, zeros, passes)
    return jax.tree.map(lambda leaf, like: (leaf / num_passes).astype(like.dtype), total, like)


def _map_workers(
    run: Callable, carry_R: PyTree, inputs_R: PyTree, *, sequential: bool
) -> tuple[PyTree, PyTree]:
    """Call `run(carry, inputs) -> (carry, outputs)` for each worker; return both, leaves [R, ...].

    Leaves of `carry_R` and `inputs_R` are [R, ...]. Workers run at once, or with `sequential` one
    after another. These run in a scan that updates the carries in place; `lax.map` would hold old
    and new carries in memory.
    """
    num_workers = jax.tree.leaves(carry_R)[0].shape[0]
    if num_workers == 1:  # no batching, and no loop
        carry, inputs = jax.tree.map(lambda leaf: leaf[0], (carry_R, inputs_R))
        after = run(carry, inputs)
        return jax.tree.map(lambda leaf: leaf[None], after)
    if not sequential:
        return jax.vmap(run)(carry_R, inputs_R)

    def run_next(carry_R: PyTree, step: tuple[Array, PyTree]) -> tuple[PyTree, PyTree]:
        """Run the worker whose index and inputs are `step`; the body of a `lax.scan`."""
        index, inputs = step
        carry = jax.tree.map(lambda leaf: leaf[index], carry_R)
        carry, outputs = run(carry, inputs)
        return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), carry_R, carry), outputs

    return lax.scan(run_next, carry_R, (jnp.arange(num_workers), inputs_R))


def _count_grads(num_grads: Array, update_T: Array) -> tuple[Array, Array]:
    """Count the gradients of the current update.

    `num_grads`, int32 [], are in the sum before the first micro-batch; `update_T` is true where a
    micro-batch ends an update. Returns how many are in the sum after the last micro-batch, int32
    [], and how many at each one, itself included, int32 [T].
    """

    def count(num_grads: Array, ends_update: Array) -> tuple[Array, Array]:
        """Count one micro-batch; return the gradients in the sum after it, and with it."""
        num_grads += 1
        return jnp.where(ends_update, 0, num_grads), num_grads

    return lax.scan(count, num_grads, update_T)


def _swap(tree: PyTree) -> PyTree:
    """Swap the first two axes of all leaves: [T, R, ...] -> [R, T, ...]."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


def adamw(
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decay: str = "all",
    label_params: Callable[[PyTree], PyTree] = label_by_name,
) -> optax.GradientTransformation:
    """Make AdamW with learning rate 1; `inner_steps` multiplies each update by its own rate.

    With `decay="all"` all parameters decay; with `decay="matrices"` norms and biases do not.
    `label_params(params)` returns a tree with each leaf's label: "matrix", "embedding", "head" or,
    for norms and biases, "other"; "stacked_" before it if the first axis counts layers.
    """

    def decays(params: PyTree) -> PyTree:
        """Return a tree of booleans: whether a leaf, by its label, decays."""
        return jax.tree.map(lambda label: not label.endswith("other"), label_params(params))

    return optax.adamw(
        1.0,
        b1=beta1,
        b2=beta2,
        weight_decay=weight_decay,
        mask=decays if decay == "matrices" else None,
    )


INNER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "sgd": lambda **_: optax.sgd(1.0),
}
"""Factories of inner optimizers by name, for the option `inner.tx`.

`factory(*, beta1, beta2, weight_decay, decay, label_params)` returns an optax transformation with
learning rate 1. `label_params` is the model's, see `contrib.muon`.
"""
