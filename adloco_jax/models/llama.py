"""The Llama family on a plain parameter tree, its next-token loss, and text generation.

Arithmetic is that of Hugging Face's families of this form (`models.weight_maps`); matrices are
transposed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from adloco_jax.models.kernels import (
    ATTENTION,
    BASE,
    KEEP_NAMED,
    PAST,
    attend_past,
    kept,
    pick,
    run_layers,
    stacked,
    swiglu,
)
from adloco_jax.models.layers import (
    HEADS_DIVIDE_WIDTH,
    Adapter,
    Embed,
    Linear,
    RMSNorm,
    Rule,
    Tap,
    TiedTap,
    check_length,
    check_sizes,
)
from adloco_jax.row_batch import RowBatch, as_row_batch

_KV_HEADS_DIVIDE: Rule = (
    ("num_kv_heads", "num_heads"),
    lambda kv_heads, heads: heads % kv_heads == 0,
    "the key/value heads must divide the query heads; choose a divisor of num_heads",
)
RULES: tuple[Rule, ...] = (
    HEADS_DIVIDE_WIDTH,
    (
        ("num_heads", "width"),
        lambda heads, width: width % heads != 0 or width // heads % 2 == 0,
        "rotary embeddings need an even head size (width / num_heads); choose another width",
    ),
    _KV_HEADS_DIVIDE,
)
# The rules of a model whose head size is not width / num_heads.
_HEAD_SIZE_RULES: tuple[Rule, ...] = (
    (
        ("head_size",),
        lambda size: size >= 2 and size % 2 == 0,
        "rotary embeddings need an even head size",
    ),
    _KV_HEADS_DIVIDE,
)


class RopeScaling(NamedTuple):
    """How a model divides its rotary frequencies, so that it reads longer texts.

    "linear" in Hugging Face (`original_length` 0): all are divided by `factor`. "llama3": those
    with fewer than `low` turns within `original_length` are, those with more than `high` are not,
    and in between the change is linear in the turns.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original_length: int = 0


class LayerKind(NamedTuple):
    """What a layer knows of positions.

    `rope_theta` is the base of its rotary wavelengths; None: queries and keys are not rotated.
    `window` is the number of positions to which a position attends, its own included; None: all.
    """

    rope_theta: float | None
    rope_scaling: RopeScaling | None = None
    window: int | None = None


def rotary_frequencies(
    head_size: int, theta: float | None, scaling: RopeScaling | None = None
) -> np.ndarray:
    """Return the angle, in radians, by which each pair of a head's features turns per position."""
    if theta is None:
        return np.zeros(head_size // 2)
    frequencies = theta ** (-np.arange(0, head_size, 2) / head_size)
    if scaling is None:
        return frequencies
    factor, low, high, length = scaling
    turns = length * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: not divided, 0: divided by factor
    return frequencies * (kept + (1 - kept) / factor)


def _rotary_tables(length: int, frequencies: np.ndarray) -> tuple[Array, Array]:
    """Return the cosines, and the sines with the signs that `_rotate` needs: float32 [L, K]."""
    angles = np.arange(length)[:, None] * frequencies[None, :]
    cos_LK = np.cos(np.hstack([angles, angles]))
    sin_LK = np.sin(np.hstack([-angles, angles]))
    return jnp.asarray(cos_LK, jnp.float32), jnp.asarray(sin_LK, jnp.float32)


def _rotate(x_BHLK: Array, cos_LK: Array, sin_LK: Array) -> Array:
    """Rotate each pair of features (i, i + K/2) by the angle of its position."""
    x = x_BHLK.astype(jnp.float32)
    swapped = jnp.roll(x, x.shape[-1] // 2, axis=-1)
    rotated = x * cos_LK[None, None] + swapped * sin_LK[None, None]
    return rotated.astype(x_BHLK.dtype)


class _Sizes(NamedTuple):
    """The attributes of `Llama` that a layer needs."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_width: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    out_norms: bool
    norm_offset: float
    query_size: float | None
    activation: str
    dtype: DTypeLike
    attention: str
    adapter: Adapter | None

    def linear(self, part: str) -> Callable[..., Linear]:
        """Return what makes the linear layers of a part of a block, "attention" or "mlp"."""
        adapter = None if self.adapter is None else self.adapter.of(part)
        return functools.partial(Linear, dtype=self.dtype, adapter=adapter)

    def norm(self, name: str) -> RMSNorm:
        """Return the norm of this name."""
        return RMSNorm(self.norm_eps, self.dtype, self.norm_offset, name=name)


class _Attention(nn.Module):
    """Causal grouped-query attention. Heads precede positions, as the products need it.

    With `PAST` it also returns the new keys and values. One that is not empty has those of earlier
    positions, of a text with one new token; `seen` is then a mask of them, [1, T].
    """

    sizes: _Sizes

    @nn.compact
    def __call__(
        self, x_BLD: Array, cos_LK: Array, sin_LK: Array, tap_B: Tap, seen: Array | None
    ) -> tuple[Array, PyTree]:
        B, L, D = x_BLD.shape
        sizes = self.sizes
        K = sizes.head_size
        linear = sizes.linear("attention")

        def heads(name: str, num_heads: int, *, norm: bool = False) -> Array:
            """Return the queries, keys or values of all heads, [B, heads, L, K]."""
            project = linear(num_heads * K, use_bias=sizes.qkv_bias, name=name)
            y = project(x_BLD, tap_B)
            if norm:  # a vector for each position and head
                norm_heads = sizes.norm(f"{name}_norm")
                y = norm_heads(kept(y).reshape(B, L * num_heads, K), tap_B)
            return y.reshape(B, L, num_heads, K).transpose(0, 2, 1, 3)

        def rotated(x_BHLK: Array, cos_LK: Array, sin_LK: Array) -> Array:
            y_BHLK = _rotate(x_BHLK, cos_LK, sin_LK)
            return y_BHLK if sizes.qk_norm else kept(y_BHLK)  # with norms, their inputs are kept

        # Rotate and scale the queries in one multiplication.
        scale = (sizes.query_size or K) ** -0.5
        q_BHLK = heads("query", sizes.num_heads, norm=sizes.qk_norm)
        q_BHLK = rotated(q_BHLK, scale * cos_LK, scale * sin_LK)
        k_BGLK = heads("key", sizes.num_kv_heads, norm=sizes.qk_norm)
        k_BGLK = rotated(k_BGLK, cos_LK, sin_LK)
        v_BGLK = kept(heads("value", sizes.num_kv_heads))

        attend: Any = ATTENTION[sizes.attention]
        new = None
        if self.has_variable(PAST, "keys"):
            new = {"keys": k_BGLK, "values": v_BGLK}
            past = {name: self.get_variable(PAST, name) for name in new}
            if past["keys"].size:  # it has earlier positions
                attend = functools.partial(attend_past, past)
        y_BLD = attend(q_BHLK, k_BGLK, v_BGLK, seen)
        out = linear(D, use_bias=sizes.out_bias, name="out")
        return kept(out(y_BLD, tap_B)), new


_ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "silu": swiglu,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
}


class _MLP(nn.Module):
    """Two matrices, the gated product of their results, and a third matrix."""

    sizes: _Sizes

    @nn.compact
    def __call__(self, x_BLD: Array, tap_B: Tap) -> Array:
        width = self.sizes.mlp_width
        linear = functools.partial(self.sizes.linear("mlp"), use_bias=self.sizes.mlp_bias)
        gate_BLF = kept(linear(width, name="gate")(x_BLD, tap_B))
        up_BLF = kept(linear(width, name="up")(x_BLD, tap_B))
        down = linear(x_BLD.shape[-1], name="down")
        return down(_ACTIVATIONS[self.sizes.activation](gate_BLF, up_BLF), tap_B)


class _Block(nn.Module):
    """One transformer layer. It returns the activations and, with `PAST`, new keys and values.

    Given the kind of the layer, the arguments from `cos_LK` to `seen` are stacks over all kinds.
    """

    sizes: _Sizes

    @nn.compact
    def __call__(
        self,
        x_BLD: Array,
        cos_LK: Array,
        sin_LK: Array,
        tap_B: Array | None,
        seen: Array | None,
        kind: Array | None = None,
    ) -> tuple[Array, PyTree]:
        if kind is not None:
            stacks = (cos_LK, sin_LK, tap_B, seen)
            cos_LK, sin_LK, tap_B, seen = jax.tree.map(lambda stack: stack[kind], stacks)
        attention = _Attention(self.sizes, name="attention")
        mlp = _MLP(self.sizes, name="mlp")
        norm, has_out_norms = self.sizes.norm, self.sizes.out_norms
        attention_norm = norm("attention_norm")
        mlp_norm = norm("mlp_in_norm" if has_out_norms else "mlp_norm")

        y_BLD, new = attention(attention_norm(x_BLD, tap_B), cos_LK, sin_LK, tap_B, seen)
        if has_out_norms:
            y_BLD = norm("attention_out_norm")(y_BLD, tap_B)
        x_BLD = x_BLD + y_BLD
        y_BLD = mlp(mlp_norm(x_BLD, tap_B), tap_B)
        if has_out_norms:
            y_BLD = norm("mlp_out_norm")(y_BLD, tap_B)
        return x_BLD + y_BLD, new


class Llama(nn.Module):
    """Decoder-only transformer: `model.apply({"params": params}, tokens_BL)` gives logits.

    Parameters are a dict of float32 arrays, those of all layers stacked along a leading axis N.
    Invalid sizes raise ValueError while tracing; a token id past the vocabulary gives NaN. A
    checkpoint determines the attributes from `rope_scaling` to `pad_id` (`models.weight_maps`).

    Attributes:
      vocab_size: V, number of token ids.
      width: D, length of the vector at each position.
      num_layers: N, number of layers.
      num_heads: H, number of query heads.
      num_kv_heads: G, number of key and value heads, a divisor of `num_heads`.
      mlp_width: F, length of the vectors inside the MLP.
      max_length: Longest input in tokens; parameters do not depend on it.
      norm_eps: Added to the mean square in every norm.
      rope_theta: Base of the rotary wavelengths.
      rope_scaling: How rotary frequencies are divided; None: they are not.
      head_size: K, an even number. None: `width / num_heads`.
      window: Number of positions to which a position attends, its own included. None: all.
      layer_kinds: Rotary base, scaling and window of each layer, if these differ. None: as above.
      qkv_bias: Whether the products of queries, keys and values have biases.
      out_bias: Whether the product after attention has a bias.
      mlp_bias: Whether the three products of the MLP have biases.
      qk_norm: Whether the queries and keys of each head are normalised before rotation.
      out_norms: Whether the results of attention and MLP are normalised.
      norm_offset: Added to the parameters of all norms.
      query_size: Number by whose root attention's scores are divided. None: K.
      activation: Of the MLP, "silu" or "gelu_tanh".
      scales_embedding: Whether embeddings are multiplied by the root of D.
      tied: Whether head and embedding table are one parameter.
      pad_id: Token id whose embedding gets no gradient, except as a part of a tied head.
      dtype: Dtype of the arithmetic, "float32" or "bfloat16". Norms, rotation, softmax and logits
        are float32 in any case.
      remat: Whether the backward pass keeps only the input of each layer. If not, it keeps inputs
        and outputs of attention and the first two products of the MLP. Results do not depend on it.
      attention: "xla", or "cudnn" for cuDNN's fused kernel, which needs bfloat16 and an NVIDIA GPU
        from Ampere on, and is differentiable only in reverse mode.
      layer_form: See `models.kernels.run_layers`. Results depend on it only by rounding.
      adapter: Low-rank products beside the linear layers of the blocks. Weights that are in the
        collection "base", not in "params", are frozen (`models.layers.split_adapter`).

    Source: Touvron et al. 2023; grouped-query attention, Ainslie et al. 2023.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    max_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    head_size: int | None = None
    window: int | None = None
    layer_kinds: tuple[LayerKind, ...] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    out_norms: bool = False
    norm_offset: float = 0.0
    query_size: float | None = None
    activation: str = "silu"
    scales_embedding: bool = False
    tied: bool = False
    pad_id: int | None = None
    dtype: str = "float32"
    remat: bool = False
    attention: str = "xla"
    layer_form: str = "scan"
    adapter: Adapter | None = None

    def setup(self) -> None:
        """Check the sizes and create the submodules, whose names are those of the parameters."""
        check_sizes(self, RULES if self.head_size is None else _HEAD_SIZE_RULES)
        if self.attention not in ATTENTION:
            raise ValueError(f"attention={self.attention!r} must be one of {', '.join(ATTENTION)}.")
        # XLA merges what inlined layers recompute with the original, unless that is prevented.
        prevent_cse = self.remat and self.layer_form == "inline"
        block = nn.remat(_Block, prevent_cse=prevent_cse, policy=None if self.remat else KEEP_NAMED)
        self.head_dim = self.head_size or self.width // self.num_heads
        sizes = _Sizes(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            mlp_width=self.mlp_width,
            norm_eps=self.norm_eps,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            out_norms=self.out_norms,
            norm_offset=self.norm_offset,
            query_size=self.query_size,
            activation=self.activation,
            dtype=self.dtype,
            attention=self.attention,
            adapter=self.adapter,
        )
        self.embed = Embed(self.vocab_size, self.width, self.dtype, self.pad_id)
        in_axes = nn.broadcast  # all layers have the same further arguments
        if len(set(self.kinds)) > 1:  # but for the last of five, their kind
            in_axes = (nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast, 0)
        self.layers = stacked(block, self.num_layers, in_axes)(sizes)
        self.layer = block(sizes, parent=None)
        self.norm = RMSNorm(self.norm_eps, self.dtype, self.norm_offset)
        if not self.tied:
            self.head = Linear(self.vocab_size, self.dtype, to_float32=True)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers."""
        uniform = LayerKind(self.rope_theta, self.rope_scaling, self.window)
        return self.layer_kinds or (uniform,) * self.num_layers

    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        tap_B: Tap = None,
        starts_BL: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Return the logits of the next token at each position, in float32.

        `starts_BL` are the first positions to which positions attend (needs `attention="xla"`);
        None: position 0.
        """
        hidden_BLD, head_tap = self.hidden(tokens_BL, tap_B, starts_BL)
        return self.logits(hidden_BLD, head_tap)

    def hidden(
        self,
        tokens_BL: Int[Array, "B L"],
        tap_B: Tap = None,
        starts_BL: Int[Array, "B L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], Tap | TiedTap]:
        """Return what `logits` takes: the last layer's normalised output, and the head's tap."""
        length = tokens_BL.shape[1]
        check_length(length, self.max_length)
        arguments = self._layer_arguments(length, tap_B, starts_BL)
        hidden_BLD, head_tap, _ = self._run(tokens_BL, tap_B, arguments)
        return hidden_BLD, head_tap

    def extend(
        self, tokens_BL: Int[Array, "B L"], position: int | Int[Array, ""] = 0
    ) -> tuple[Float[Array, "B L D"], dict[str, Float[Array, "N B G L K"]]]:
        """Compute `hidden` of new tokens of texts, and their keys and values.

        Those of earlier positions are in the collection `PAST`, at their positions among T: none
        yet if T is 0; otherwise there is one new token, at `position`.
        """
        num_past = self.variables[PAST]["layers"]["attention"]["keys"].shape[-2]
        of_kinds = self._layer_arguments(num_past or tokens_BL.shape[1])
        if num_past:
            past_1T = jnp.arange(num_past)[None]

            def at_position(cos_TK: Any, sin_TK: Any, _: Tap, starts_1T: Array | None) -> tuple:
                cos_1K = lax.dynamic_slice_in_dim(cos_TK, position, 1)
                sin_1K = lax.dynamic_slice_in_dim(sin_TK, position, 1)
                first = 0 if starts_1T is None else starts_1T[0, position]
                is_seen_1T = (first <= past_1T) & (past_1T < position)
                return cos_1K, sin_1K, None, is_seen_1T

            of_kinds = [at_position(*arguments) for arguments in of_kinds]
        hidden_BLD, _, new = self._run(tokens_BL, None, of_kinds)
        return hidden_BLD, new

    def _run(
        self, tokens_BL: Array, tap_B: Tap, of_kinds: list[tuple[Array | None, ...]]
    ) -> tuple[Array, Tap | TiedTap, PyTree]:
        """Return what `hidden` does, and new keys and values if there is `PAST`.

        `of_kinds` is from `_layer_arguments`.
        """
        head_tap = tap_B
        if self.tied:
            x_BLD, head_tap = self.embed.look_up_tied(tokens_BL, tap_B)
        else:
            x_BLD = self.embed(tokens_BL, tap_B)
        if self.scales_embedding:
            x_BLD = x_BLD * self.width**0.5
        kinds = self._distinct_kinds
        order = [kinds.index(kind) for kind in self.kinds] if len(kinds) > 1 else ()
        x_BLD, new = run_layers(
            self.layers, self.layer, x_BLD, *of_kinds, order=order, form=self.layer_form
        )
        return self.norm(x_BLD, tap_B), head_tap, new

    @property
    def _distinct_kinds(self) -> list[LayerKind]:
        """Each kind of layers once, in the order of their first layers."""
        return list(dict.fromkeys(self.kinds))

    def _layer_arguments(
        self, length: int, tap_B: Tap = None, starts_BL: Array | None = None
    ) -> list[tuple[Array | None, ...]]:
        """Return the further arguments of layers, for each of their kinds.

        They are cosines and sines of rotary angles, the tap, and the first position to which each
        position attends (None: position 0).
        """
        kinds = self._distinct_kinds
        if starts_BL is None and any((kind.window or length) < length for kind in kinds):
            starts_BL = jnp.zeros((1, length), jnp.int32)

        def of_kind(kind: LayerKind) -> tuple:
            # Rotary attention depends on distances alone: tables need no restart in a document.
            frequencies = rotary_frequencies(self.head_dim, kind.rope_theta, kind.rope_scaling)
            cos_LK, sin_LK = _rotary_tables(length, frequencies)
            starts, window = starts_BL, kind.window
            if window is not None and window < length and starts is not None:
                first_1L = np.arange(1 - window, length + 1 - window, dtype=np.int32)[None]
                starts = jnp.maximum(starts, first_1L)
            return cos_LK, sin_LK, tap_B, starts

        return [of_kind(kind) for kind in kinds]

    def logits(self, hidden_BLD: Float[Array, "B L D"], tap: Any = None) -> Float[Array, "B L V"]:
        """Return the float32 logits that the head computes from the results of `hidden`."""
        if self.tied:
            return self.embed.attend(hidden_BLD, tap)
        return self.head(hidden_BLD, tap)


def _variables(params: PyTree, base: PyTree | None) -> dict[str, PyTree]:
    """Return the collections of Flax: trained parameters, and frozen weights if there are some."""
    if base is None:
        return {"params": params}
    return {"params": params, BASE: base}


_MAX_LOGITS = 2**27  # of a part of a sequence, in a chunked loss: 0.5 GB in float32


def _num_parts(length: int, vocab_size: int) -> int:
    """Return into how many parts of equal length a chunked loss divides a sequence."""
    parts = 1
    while -(-length // parts) * vocab_size > _MAX_LOGITS:
        parts *= 2
    return parts


def _in_parts(x_BL: Array, parts: int) -> Array:
    """Divide rows [B, L, ...] into parts [B * parts, L / parts, ...]; zeros fill the last one."""
    batch, length, *rest = x_BL.shape
    part = -(-length // parts)
    padding = [(0, 0), (0, part * parts - length), *[(0, 0)] * len(rest)]
    return jnp.pad(x_BL, padding).reshape(batch * parts, part, *rest)


def sequence_losses(model: Llama, *, sequences_per_chunk: int = 0) -> Callable[..., Array]:
    """Make a function that returns the mean next-token loss of each sequence.

    Every token counts, unless rows have weights. In rows of documents, an end of text closes one
    document as a target and begins the next as an input, so their loss is that of the documents.

    Args:
      model: The model that computes the logits.
      sequences_per_chunk: Number of sequences whose logits exist at one time, forward and backward;
        0 for all. A sequence of more than 2^27 logits counts as several, unless its gradient's norm
        is measured. Results depend on it only by rounding.

    Returns:
      `losses_fn(params, rows, tap_B=None, base=None)`, float32 [B] in nats per token; `base` has
      the frozen weights of a model with an adapter. Rows are int32 tokens [B, L+1], of which the
      model reads all but the last, and predicts all but the first; or a `row_batch.RowBatch`. Its
      `starts` limit attention to documents; with `weights` a row's loss is the weighted sum.

    Raises:
      ValueError: While tracing the returned function, if tokens have another shape, or no target.
    """
    # Bound methods can be pickled and sent to another process; a result of `nn.apply` cannot.
    hidden: Any = functools.partial(model.apply, method=Llama.hidden)
    logits: Any = functools.partial(model.apply, method=Llama.logits)

    def head_losses(
        variables: PyTree, hidden_BLD: Array, targets_BL: Array, tap: Tap | TiedTap
    ) -> Array:
        logits_BLV = logits(variables, hidden_BLD, tap)
        return jax.nn.logsumexp(logits_BLV, axis=-1) - pick(logits_BLV, targets_BL)

    def token_losses(
        variables: PyTree, hidden_BLD: Array, targets_BL: Array, tap: Tap | TiedTap
    ) -> Array:
        chunk, length = sequences_per_chunk, targets_BL.shape[1]
        is_divided = chunk > 0 and tap is None
        parts = _num_parts(length, model.vocab_size) if is_divided else 1
        head_inputs = (_in_parts(hidden_BLD, parts), _in_parts(targets_BL, parts), tap)
        num_rows = parts * len(targets_BL)
        if chunk == 0 or chunk >= num_rows:
            return head_losses(variables, *head_inputs)

        whole = num_rows - num_rows % chunk  # the rows of whole chunks
        chunks = jax.tree.map(lambda x: x[:whole].reshape(-1, chunk, *x.shape[1:]), head_inputs)
        chunk_losses = jax.checkpoint(lambda args: head_losses(variables, *args), prevent_cse=False)
        losses = lax.map(chunk_losses, chunks)
        losses = losses.reshape(whole, -1)
        if whole < num_rows:
            rest = jax.tree.map(lambda x: x[whole:], head_inputs)
            losses = jnp.concatenate([losses, head_losses(variables, *rest)])
        return losses.reshape(len(targets_BL), -1)[:, :length]

    def losses_fn(
        params: PyTree, rows: Array | RowBatch, tap_B: Tap = None, base: PyTree | None = None
    ) -> Array:
        variables = _variables(params, base)
        rows = as_row_batch(rows)
        tokens = rows.tokens
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise ValueError(f"rows has shape {tokens.shape}, expected [B, L+1] with L >= 1.")
        # The only shift: the loss at position t is of token t + 1.
        inputs_BL, targets_BL = tokens[:, :-1], tokens[:, 1:]
        starts_BL = None if rows.starts is None else rows.starts[:, :-1]
        weights_BL = None if rows.weights is None else rows.weights[:, 1:]
        hidden_BLD, tap = hidden(variables, inputs_BL, tap_B, starts_BL)
        if base is not None:
            tap = None  # the head is frozen
        losses_BL = token_losses(variables, hidden_BLD, targets_BL, tap)
        if weights_BL is None:
            return jnp.mean(losses_BL, axis=1)
        return jnp.sum(losses_BL * weights_BL, axis=1)

    return losses_fn


def next_token_loss(model: Llama, *, sequences_per_chunk: int = 0) -> Callable[..., Array]:
    """Make the training loss: the mean over sequences of `sequence_losses`, a float32 scalar."""
    losses_fn = sequence_losses(model, sequences_per_chunk=sequences_per_chunk)

    def loss_fn(
        params: PyTree, rows: Array | RowBatch, tap_B: Tap = None, base: PyTree | None = None
    ) -> Array:
        return jnp.mean(losses_fn(params, rows, tap_B, base))

    return loss_fn


def generate(
    model: Llama,
    params: PyTree,
    prompt_BL: Int[Array, "B P"] | Int[np.ndarray, "B P"],
    *,
    num_tokens: int,
    temperature: float | Float[Array, ""],
    key: Key[Array, ""],
    ends: Sequence[int] = (),
    base: PyTree | None = None,
) -> Int[Array, "B L"]:
    """Continue prompts, token by token, until all have ended.

    One compiled program serves prompts whose lengths have the same next power of two, if those with
    the new tokens have too.

    Args:
      model: The model. Prompt and new tokens together must fit into its `max_length`.
      params: Parameters of the model.
      prompt_BL: Token ids of the prompts, [B, P], at least one per prompt.
      num_tokens: Number of new tokens.
      temperature: Divides the logits before sampling; 0 takes the most probable token.
      key: Random key for sampling.
      ends: Token ids that end a text. What follows the first of them is not part of it.
      base: Frozen weights of a model with an adapter.

    Returns:
      Prompts followed by the new tokens, int32 [B, P + num_tokens].
    """
    prompt_BL = np.asarray(prompt_BL, np.int32)
    batch, length = prompt_BL.shape
    stop = length + num_tokens
    check_length(stop, model.max_length)
    text_BT = np.zeros((batch, _room(stop)), np.int32)
    text_BT[:, :length] = prompt_BL
    text_BT = _continue(
        model,
        _room(length),
        _variables(params, base),
        text_BT,
        length,
        stop,
        temperature=temperature,
        key=key,
        ends_E=np.array(ends, np.int32),
    )
    return lax.slice_in_dim(text_BT, 0, stop, axis=1)


def _room(num_tokens: int) -> int:
    """Round a length up to a power of two, at least 32, so that few programs are compiled."""
    return max(32, 2 ** (num_tokens - 1).bit_length())


@functools.partial(jax.jit, static_argnames=("model", "size"))
def _continue(
    model: Llama,
    size: int,
    variables: PyTree,
    text_BT: Array,
    length: Array,
    stop: Array,
    *,
    temperature: Array,
    key: Array,
    ends_E: Array,
) -> Array:
    """Fill texts [B, T] from position `length` to `stop`.

    The prompts are read `size` positions at once, at least `length`. Sampling is as in `generate`.
    """
    logits = nn.apply(Llama.logits, model)

    def extend(tokens_BL: Array, position: Array | int, past: PyTree) -> Any:
        arrays = variables | {PAST: {"layers": {"attention": past}}}
        return model.apply(arrays, tokens_BL, position, method=Llama.extend)

    def add_token(state: tuple[Any, ...]) -> tuple[Any, ...]:
        position, text_BT, past, has_ended_B = state
        last_B1 = lax.dynamic_slice_in_dim(text_BT, position - 1, 1, axis=1)
        hidden_B1D, new = extend(last_B1, position - 1, past)

        def write(past_NBGTK: Array, new_NBG1K: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(past_NBGTK, new_NBG1K, position - 1, axis=-2)

        past = jax.tree.map(write, past, new)
        logits_BV = logits(variables, hidden_B1D)[:, 0]
        # The Gumbel trick: the argmax is a sample from softmax(logits / temperature).
        noise_BV = jax.random.gumbel(jax.random.fold_in(key, position), logits_BV.shape)
        next_B = jnp.argmax(logits_BV + temperature * noise_BV, axis=-1).astype(text_BT.dtype)
        has_ended_B |= jnp.isin(next_B, ends_E)
        return position + 1, text_BT.at[:, position].set(next_B), past, has_ended_B

    def goes_on(state: tuple[Any, ...]) -> Array:
        position, _, _, has_ended_B = state
        return (position < stop) & ~jnp.all(has_ended_B)

    # Read the prompts. What padding has here is never seen: it is overwritten before texts reach
    # its positions.
    empty = jnp.zeros((model.num_layers, 0, 0))
    _, past = extend(text_BT[:, :size], 0, {"keys": empty, "values": empty})
    num_new_positions = text_BT.shape[1] - size
    padding = [(0, 0), (0, 0), (0, 0), (0, num_new_positions), (0, 0)]  # [N, B, G, T, K]
    past = jax.tree.map(lambda x: jnp.pad(x, padding), past)

    state = (length, text_BT, past, jnp.zeros(len(text_BT), bool))
    _, text_BT, _, _ = lax.while_loop(goes_on, add_token, state)
    return text_BT
