"""Kernels written for speed: attention, SwiGLU's product, and a stack of layers.

The comment above a kernel has the measurement behind its form, dated as in studies/LOG.md.

Axes of arrays: B examples, L positions, D features of a position, N layers, V token ids, H query
heads, G key and value heads, K features of a head. Attention is computed for a block of queries at
a time: r is the query heads of one key/value head (H / G), l the positions of a block of queries, q
these for all r heads (r l, heads first), s the keys that a block may see, t or T earlier positions
of a text that is generated. A `d` before a name is its tangent or cotangent.

`kept(x)` is x, marked to be kept for the backward pass, which recomputes what is not marked. Layers
that take different arguments, such as a window of attention, are of several *kinds*. *Fused* is
cuDNN's kernel, which computes attention without storing the scores.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import compute_on
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

# studies/LOG.md, 2026-11-21: the backward pass keeps activations that are chosen by name. A step
# took 3519 ms. It took 3694 ms when every product with a weight was kept, and 1.2 times as
# long when all activations were kept.
_KEPT = "kept"
kept = functools.partial(checkpoint_name, name=_KEPT)  # kept(x) returns x, marked
KEEP_NAMED = jax.checkpoint_policies.save_only_these_names(_KEPT)  # the policy for `nn.remat`

# studies/LOG.md, 2026-11-21 and 22: the queries are processed in four blocks, and a block skips the
# keys that none of its queries sees. This reduced a training step from 633 to 572 ms; two and eight
# blocks gained less.
_NUM_BLOCKS = 4
_MIN_BLOCK = 32  # queries

# A frozen weight is in this Flax collection, and needs no gradient and no tap (`models.layers`).
BASE = "base"
# Keys and values [B, G, T, K] of each layer, for earlier positions of texts that grow by a token.
PAST = "past"

# Wraps a function so that the compiled program has it as a function, too, and calls it instead of
# inlining it. Before jax 0.12 it is named `compute_on2`.
_as_function: Callable = getattr(compute_on, "compute_on2", compute_on.compute_on)


def attend(
    q_BHLK: Float[Array, "B H L K"],
    k_BGLK: Float[Array, "B G L K"],
    v_BGLK: Float[Array, "B G L K"],
    starts_BL: Int[Array, "#B L"] | None = None,
) -> Float[Array, "B L D"]:
    """Compute causal grouped-query attention: softmax(q k^T, masked) v, with heads concatenated.

    The softmax is float32; the result (D = H K) has the dtype of `v_BGLK`.

    Args:
      q_BHLK: Queries, already scaled. H/G consecutive query heads share a key and value head.
      k_BGLK: Keys.
      v_BGLK: Values.
      starts_BL: The first position to which each position attends, [1, L] if rows are alike. None:
        position 0.
    """
    B, H, L, K = q_BHLK.shape
    G = k_BGLK.shape[1]
    q_BGrLK = q_BHLK.reshape(B, G, H // G, L, K)
    block_length = max(math.ceil(L / _NUM_BLOCKS), _MIN_BLOCK)  # short sequences: fewer blocks
    blocks = []
    for start in range(0, L, block_length):
        end = min(start + block_length, L)  # no query of the block sees a key from here on
        # The heads that share a key become one axis with the positions, so that the product with
        # the keys is one matrix product.
        q_BGqK = q_BGrLK[:, :, :, start:end].reshape(B, G, -1, K)
        k_BGsK = k_BGLK[:, :, :end]
        v_BGsK = v_BGLK[:, :, :end]
        starts_Bl = None if starts_BL is None else starts_BL[:, start:end]
        y_BGqK = _attend_block(q_BGqK, k_BGsK, v_BGsK, starts_Bl, H // G)
        blocks.append(y_BGqK.reshape(B, H, end - start, K))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3).reshape(B, L, H * K)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _attend_block(
    q_BGqK: Array, k_BGsK: Array, v_BGsK: Array, starts_Bl: Array | None, num_shared: int
) -> Array:
    """Return the attention output [B, G, q, K] of a block of queries.

    The queries are those of the last l of the s positions, for the `num_shared` query heads of each
    key head. `starts_Bl` is the first position that each may see; None: position 0. The derivative
    is `_attend_block_jvp`.
    """
    y_BGqK, _ = _attend_block_and_sums(q_BGqK, k_BGsK, v_BGsK, starts_Bl, num_shared)
    return y_BGqK


def _attend_block_and_sums(
    q_BGqK: Array, k_BGsK: Array, v_BGsK: Array, starts_Bl: Array | None, num_shared: int
) -> tuple[Array, Array]:
    """Return the attention output of a block of queries, and the logs of the softmax's sums.

    The queries are those of the last l of the s positions, for the `num_shared` query heads of each
    key head. `starts_Bl` is the first position that each may see; None: position 0. The output is
    [B, G, q, K]. The second result is the log of the sum of exp(score) over the keys that a query
    sees, float32 [B, G, q, 1].
    """
    scores = jnp.einsum("bgqk,bgsk->bgqs", q_BGqK, k_BGsK, preferred_element_type=jnp.float32)
    scores = jnp.where(_visible(q_BGqK, k_BGsK, starts_Bl, num_shared), scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)  # subtracted, so that no `exp` overflows
    powers = jnp.exp(scores - largest)
    sums = jnp.sum(powers, axis=-1, keepdims=True)
    y = jnp.einsum(
        "bgqs,bgsk->bgqk", powers.astype(v_BGsK.dtype), v_BGsK, preferred_element_type=jnp.float32
    )
    output = (y / sums).astype(v_BGsK.dtype)
    log_sums = largest + jnp.log(sums)  # `powers` lack the factor exp(largest)
    return output, log_sums


# studies/LOG.md, 2026-11-21: the backward pass recomputes the weights from the logarithms of their
# sums (Dao et al. 2022), keys first, so that only the gradient of the queries needs a transpose.
# The speed relative to PyTorch rose from 0.95 to 1.09 on a machine with busy memory, and from 0.850
# to 0.859 on an idle one.
@_attend_block.defjvp
def _attend_block_jvp(num_shared: int, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Return the attention output of a block of queries, and its tangent, both [B, G, q, K].

    `primals` are the queries, keys, values and first visible positions that `_attend_block` is
    given, and `tangents` the tangents of these; positions are integers, and have none. For the
    backward pass JAX transposes the computation of the tangent.
    """
    q, k, v, starts = primals
    dq, dk, dv, _ = tangents
    y, log_sums_BGq1 = _attend_block_and_sums(q, k, v, starts, num_shared)
    # The backward pass has these, and recomputes the scores and weights, which are larger.
    y = kept(y)
    log_sums_BGq1 = kept(log_sums_BGq1)
    scores = jnp.einsum("bgsk,bgqk->bgsq", k, q, preferred_element_type=jnp.float32)
    scores = jnp.where(_visible(q, k, starts, num_shared).swapaxes(-1, -2), scores, -jnp.inf)
    weights = jnp.exp(scores - log_sums_BGq1.swapaxes(2, 3))  # those of the softmax, [B, G, s, q]
    # Keys that a query does not see need no mask here: their weights are zero.
    dscores = jnp.einsum("bgsk,bgqk->bgsq", dk, q) + jnp.einsum("bgsk,bgqk->bgsq", k, dq)
    # The tangent of the weights as if the softmax's sum were constant. The sum's tangent enters in
    # the term with y below.
    dweights = weights * dscores
    dy = (
        jnp.einsum("bgsq,bgsk->bgqk", dweights.astype(y.dtype), v)
        + jnp.einsum("bgsq,bgsk->bgqk", weights.astype(y.dtype), dv)
        - jnp.sum(dweights, axis=2)[..., None] * y
    )
    return y, dy.astype(y.dtype)


def _visible(
    q_BGqK: Array, k_BGsK: Array, starts_Bl: Array | None, num_shared: int
) -> np.ndarray | Array:
    """Return the mask of the keys that each query of a block may see: those before, and its own.

    The queries are those of the last l of the s positions, for `num_shared` heads. `starts_Bl` is
    the first position that each may see; None: position 0. The mask is [q, s]; with `starts_Bl`
    [B, 1, q, s].
    """
    num_queries = q_BGqK.shape[2] // num_shared
    num_keys = k_BGsK.shape[2]
    # The first query is at position `num_keys - num_queries`.
    causal = np.tri(num_queries, num_keys, num_keys - num_queries, bool)
    causal = np.tile(causal, (num_shared, 1))  # the same for each head: in q, heads come first
    if starts_Bl is None:
        return causal
    starts_B1q1 = jnp.tile(starts_Bl, (1, num_shared))[:, None, :, None]
    return causal[None, None] & (np.arange(num_keys)[None, None, None] >= starts_B1q1)


def _fused(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, starts_BL: Array | None = None) -> Array:
    """Compute causal attention [B, L, H, K] with cuDNN's kernel, which has positions before heads.

    Queries are already scaled, so that the kernel's own scale is 1. `starts_BL` is the first
    position to which each position attends, in all heads; None: position 0.
    """
    mask = None
    if starts_BL is not None:  # [B, 1, L, L]: by query and key
        mask = np.arange(starts_BL.shape[1])[None, None, None] >= starts_BL[:, None, :, None]
    return jax.nn.dot_product_attention(
        q_BLHK, k_BLGK, v_BLGK, mask=mask, scale=1.0, is_causal=True, implementation="cudnn"
    )


def _fused_grads(
    q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, starts_BL: Array, dy_BLHK: Array
) -> tuple[Array, Array, Array]:
    """Return the cotangents of queries, keys and values, given that of the result of `_fused`."""
    _, vjp = jax.vjp(functools.partial(_fused, starts_BL=starts_BL), q_BLHK, k_BLGK, v_BLGK)
    return vjp(dy_BLHK)


def _in_one_batch(function: Callable) -> Callable:
    """Return a function that computes `function`, and that `vmap` maps by a single call.

    Arguments and results of `function` are arrays [B, ...]. Under `vmap` over M batches it is
    called once, with arrays [M B, ...].

    jax 0.10.2 cannot map over cuDNN's call if heads share the mask. A mask for each head takes H
    times the memory: 4.3 GB of bfloat16 with 32 heads and 8,192 positions.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def of_batch(axis_size: int, is_mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        """Return the results with a leading mapped axis, and True for each, as vmap requires.

        `is_mapped` tells which of the arrays have this axis, of size `axis_size`; others have none.
        """
        merged = []  # of the two first axes, [M, B, ...] becomes [M B, ...]
        for array, has_axis in zip(arrays, is_mapped, strict=True):
            if not has_axis:
                array = jnp.broadcast_to(array, (axis_size, *array.shape))
            merged.append(array.reshape(-1, *array.shape[2:]))
        results = mapped(*merged)  # not `function`: there may be a further `vmap` around this one
        split = jax.tree.map(lambda y: y.reshape(axis_size, -1, *y.shape[1:]), results)
        return split, jax.tree.map(lambda y: True, results)

    return mapped


_fused_batch = _in_one_batch(_fused)
_fused_batch_grads = _in_one_batch(_fused_grads)


@jax.custom_vjp
def _attend_in_documents(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, starts_BL: Array) -> Array:
    """Compute causal attention within documents by cuDNN's kernel, [B, L, H, K].

    `starts_BL` is the first position to which each position attends: its document's first. It
    works under `vmap`, and is differentiable in reverse mode only.
    """
    return _fused_batch(q_BLHK, k_BLGK, v_BLGK, starts_BL)


def _attend_in_documents_forward(*inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    """Return the attention output, and all inputs as residuals for the backward pass."""
    return _fused_batch(*inputs), inputs


def _attend_in_documents_backward(inputs: tuple[Array, ...], dy_BLHK: Array) -> tuple:
    """Return the cotangents of queries, keys and values, and None for the integer starts."""
    return *_fused_batch_grads(*inputs, dy_BLHK), None


_attend_in_documents.defvjp(_attend_in_documents_forward, _attend_in_documents_backward)


def _attend_cudnn(
    q_BHLK: Array, k_BGLK: Array, v_BGLK: Array, starts_BL: Array | None = None
) -> Array:
    """Compute causal grouped-query attention with cuDNN's kernel, which does not store the scores.

    Queries are already scaled. `starts_BL` [B or 1, L] is the first position to which each position
    attends; None: position 0. The result [B, L, D] has the heads concatenated.
    """

    def call_kernel(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, starts_BL: Array | None) -> Array:
        """Return the attention output [B, L, H, K] of the examples that are given."""
        if starts_BL is None:
            return _fused(q_BLHK, k_BLGK, v_BLGK)
        return _attend_in_documents(q_BLHK, k_BLGK, v_BLGK, starts_BL)

    if starts_BL is not None:
        # They are [1, L] if all rows are alike. The mesh below may divide the examples.
        starts_BL = jnp.broadcast_to(starts_BL, (q_BHLK.shape[0], q_BHLK.shape[2]))

    # The engine divides workers over some axes of the mesh by `shard_map`, and leaves the others to
    # XLA: the first are "manual" here, and the others "auto".
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and mesh.auto_axes:
        # XLA cannot partition the kernel's call if only some axes of the mesh are manual. Make the
        # others manual too. They divide the examples if these can be divided evenly; if not, each
        # device computes all of them.
        num_shares = math.prod(mesh.shape[axis] for axis in mesh.auto_axes)
        is_divisible = q_BHLK.shape[0] % num_shares == 0
        examples = P(mesh.auto_axes) if is_divisible else P()
        call_kernel = jax.shard_map(
            call_kernel,
            in_specs=examples,
            out_specs=examples,
            axis_names=set(mesh.auto_axes),
            # Do not check over which axes values vary, as the `shard_map` around this one, in
            # `engine.programs`, does not check it either.
            check_vma=False,
        )

    # The kernel wants positions before heads.
    q_BLHK = q_BHLK.transpose(0, 2, 1, 3)
    k_BLGK = k_BGLK.transpose(0, 2, 1, 3)
    v_BLGK = v_BGLK.transpose(0, 2, 1, 3)
    y_BLHK = call_kernel(q_BLHK, k_BLGK, v_BLGK, starts_BL)
    y_BLD = y_BLHK.reshape(*y_BLHK.shape[:2], -1)  # heads are concatenated
    return kept(y_BLD)


def attend_past(
    past: dict[str, Float[Array, "B G T K"]],
    q_BHLK: Float[Array, "B H 1 K"],
    k_BGLK: Float[Array, "B G 1 K"],
    v_BGLK: Float[Array, "B G 1 K"],
    is_seen_1T: Bool[Array, "1 T"],
) -> Float[Array, "B 1 D"]:
    """Compute grouped-query attention of one new position of each text, with heads concatenated.

    `past` has the earlier positions' "keys" and "values". The query, already scaled, sees the new
    key, and the past keys where `is_seen_1T` is true. The softmax is float32; D is H K.
    """
    B, H, _, K = q_BHLK.shape
    q_BGrK = q_BHLK.reshape(B, k_BGLK.shape[1], -1, K)  # by the key head that r query heads share
    # Scores and weights are [B, G, r, T + 1]: those of the new key come after those of past keys.
    score = functools.partial(jnp.einsum, "bgrk,bgtk->bgrt", preferred_element_type=jnp.float32)
    before = jnp.where(is_seen_1T, score(q_BGrK, past["keys"]), -jnp.inf)
    scores = jnp.concatenate([before, score(q_BGrK, k_BGLK)], axis=-1)
    weights = jax.nn.softmax(scores).astype(v_BGLK.dtype)
    average = functools.partial(jnp.einsum, "bgrt,bgtk->bgrk", preferred_element_type=jnp.float32)
    y = average(weights[..., :-1], past["values"]) + average(weights[..., -1:], v_BGLK)
    return y.astype(v_BGLK.dtype).reshape(B, 1, H * K)


ATTENTION = {"xla": attend, "cudnn": _attend_cudnn}
"""Implementations of `attend` by name, for the attribute `attention` of a model."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def multiply_float32(
    subscripts: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Compute `einsum(subscripts, x, y)` with sums and results in float32.

    Derivatives are multiplied in the dtype of the factors; JAX would use float32, which is slower.
    """
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


@multiply_float32.defjvp
def _multiply_float32_jvp(subscripts: str, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Return the float32 product, and its tangent, computed in the dtype of the factors."""
    x, y = primals
    dx, dy = tangents
    product = jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
    dproduct = jnp.einsum(subscripts, dx, y) + jnp.einsum(subscripts, x, dy)
    return product, dproduct.astype(jnp.float32)  # JAX requires the dtype of the product


# studies/LOG.md, 2026-11-26: the transpose of a lookup is a scatter into the logits' gradient.
# XLA for GPUs fuses the transpose of this sum with what follows. This saves 4.2 GB of 85 in an
# update of MicroLlama.
@jax.custom_jvp
def pick(logits_BLV: Float[Array, "B L V"], ids_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """Return the logit of one id at each position; NaN for an id past the vocabulary."""
    return _look_up(logits_BLV, ids_BL)


def _look_up(logits_BLV: Array, ids_BL: Array) -> Array:
    """Return the logit of one id at each position, by a lookup: the fastest way on a CPU."""
    return jnp.take_along_axis(logits_BLV, ids_BL[:, :, None], axis=-1, mode="fill")[:, :, 0]


@pick.defjvp
def _pick_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Return the picked logits and their tangent: the same pick of the logits' tangent."""

    def sum_up(dlogits_BLV: Array, ids_BL: Array) -> Array:
        """Return the tangent of the logit of one id at each position, by a masked sum."""
        is_picked_BLV = jax.nn.one_hot(ids_BL, dlogits_BLV.shape[-1], dtype=bool)
        return jnp.sum(jnp.where(is_picked_BLV, dlogits_BLV, 0), axis=-1)

    logits_BLV, ids_BL = primals
    dlogits_BLV, _ = tangents  # ids are integers, and have no tangent
    # Chosen when the program is compiled for a device.
    dpicked_BL = lax.platform_dependent(dlogits_BLV, ids_BL, cpu=_look_up, default=sum_up)
    return pick(logits_BLV, ids_BL), dpicked_BL


# studies/LOG.md, 2026-11-21: this derivative takes one pass for each factor; JAX's writes
# intermediate values to memory. On a machine with busy memory the speed relative to PyTorch rose
# from 0.94 to 1.05.
@jax.custom_jvp
def swiglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute `silu(gate) * up`, the product inside SwiGLU."""
    return gate * jax.nn.sigmoid(gate) * up


@swiglu.defjvp
def _swiglu_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """Return the product of SwiGLU and its tangent; `primals` are gate and up."""
    gate, up = primals
    dgate, dup = tangents
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    by_gate = up * sigmoid * (1 + gate * (1 - sigmoid))  # the derivative by `gate`
    return silu * up, dgate * by_gate + dup * silu


def stacked(
    block: Callable[..., nn.Module], num_layers: int, in_axes: Any = nn.broadcast
) -> Callable[..., nn.Module]:
    """Make a module class that applies `num_layers` layers of the class `block` in a scan.

    Parameters have a leading axis N, and so do two collections of variables that a layer may read:
    `BASE`, frozen weights, and `PAST`, keys and values of earlier positions of texts that are
    generated. A layer takes activations and further arguments, and returns new activations, and
    None or arrays that the scan stacks. `in_axes` is for the further arguments, as in `nn.scan`:
    `nn.broadcast` for one that all layers share, 0 for one with a leading axis N, of which each
    layer gets its own element.
    """
    return nn.scan(
        block,
        variable_axes={"params": 0, BASE: 0, PAST: 0},  # all have the axis N of layers first
        split_rngs={"params": True},  # each layer draws its own parameters
        in_axes=in_axes,
        length=num_layers,
    )


# studies/LOG.md, 2026-11-22: on a CPU calls are 1.03 to 1.08 times as fast as a scan, which copies
# activations into stacks and back. Inlined layers are 0.77 to 1.04 times as fast as a scan and need
# twice the memory, because XLA interleaves them. 2026-11-26: XLA for GPUs fuses nothing in a called
# layer: MicroLlama's update has 3119 kernels, and 1109 if inlined; a scan moves 2.5 times the bytes
# and, with rematerialised layers, needs no less memory.
def run_layers(
    layers: nn.Module,
    layer: nn.Module,
    x_BLD: Float[Array, "B L D"],
    *kinds: tuple[Array | None, ...],
    order: Sequence[int] = (),
    form: str,
) -> tuple[Float[Array, "B L D"], PyTree]:
    """Apply a stack of layers, the first to the activations, each other to the result before it.

    A layer takes activations and further arguments. It returns new activations, and a second
    result: None or a tree of arrays, such as new keys and values.

    Args:
      layers: Module of a class from `stacked`, bound to the parameters. Each leaf of its variables
        is a stack [N, ...]; except with "scan" it may be a tuple of N arrays instead.
      layer: Module of a single layer with the same attributes, not bound to parameters.
      x_BLD: Activations, the input of the first layer.
      *kinds: For each kind of layers, a tuple of the further arguments. If there are several kinds,
        a layer that is scanned is given all kinds' arguments, each stacked over the kinds, and its
        own kind as the last argument.
      order: The kind of each layer, an index into `kinds`, if there are several; else empty.
      form: What the compiled program does: "scan" over the layers, "call" each layer as a function,
        which is fastest on a CPU, or "inline" every layer, which gives a GPU the fewest kernels.

    Returns:
      The last layer's activations, and the layers' second results, stacked to [N, ...].
    """
    # While parameters are initialised, only `layers` can create them, whatever the form.
    if form == "scan" or layers.is_initializing():
        if len(kinds) == 1:
            return layers(x_BLD, *kinds[0])
        # A scan gives every layer the same arrays, so that each layer chooses its kind's.
        stacks = jax.tree.map(lambda *arrays: jnp.stack(arrays), *kinds)
        return layers(x_BLD, *stacks, jnp.asarray(order))

    def make_layer(arguments: tuple[Array | None, ...]) -> Callable[[PyTree, Array], Any]:
        """Return the function that applies one layer of a kind.

        `arguments` are the kind's further arguments. The function takes the layer's variables and
        its input [B, L, D], and returns the new activations and the layer's second result.
        """

        def apply_layer(variables: PyTree, x_BLD: Array) -> Any:
            """Return the layer's new activations, and its second result."""
            return layer.apply(variables, x_BLD, *arguments)

        if form == "call":
            # What `compute_on` wraps becomes a function of the compiled program. The device and its
            # memory are where a program computes anyway, so that nothing else changes.
            space = jax.memory.Space.Device
            return _as_function(apply_layer, compute_type="device", out_memory_spaces=space)
        return apply_layer

    layer_of_kinds = [make_layer(arguments) for arguments in kinds]

    # Split all layers at once, so that the gradients are concatenated in one step too.
    leaves_N, structure = jax.tree.flatten(layers.variables, is_leaf=_is_split)
    parts_of_leaves = []  # for each leaf, the arrays of the layers
    for leaf_N in leaves_N:
        if _is_split(leaf_N):
            parts_of_leaves.append(leaf_N)
        else:
            parts_1 = lax.split(leaf_N, [1] * len(leaf_N))
            parts_of_leaves.append([part_1[0] for part_1 in parts_1])

    outputs = []
    for index, leaves in enumerate(zip(*parts_of_leaves, strict=True)):  # leaves of one layer
        kind = order[index] if order else 0  # without an order there is one kind
        apply_layer = layer_of_kinds[kind]
        x_BLD, output = apply_layer(structure.unflatten(leaves), x_BLD)
        outputs.append(output)
    return x_BLD, jax.tree.map(lambda *arrays: jnp.stack(arrays), *outputs)


def _is_split(leaf: object) -> bool:
    """Return whether a leaf is a tuple of the layers' arrays instead of their stack."""
    return isinstance(leaf, tuple)
