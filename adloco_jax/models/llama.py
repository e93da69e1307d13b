"""The Llama family on a plain parameter tree, its next-token loss, and text generation.

Arithmetic is that of Hugging Face's families of this form (`models.weight_maps`); matrices are
transposed.

Axes of arrays: B examples, L positions, V token ids, D features of a position, N layers, H query
heads, G key and value heads, K features of a head, F features inside the MLP, T positions with
room for new tokens, 1 an axis of size one. Layers that differ are of several *kinds*
(`LayerKind`). A *tap*, `tap_B`, is zeros, one for each example. In the backward pass its cotangent
is the squared norm of each example's gradient, summed over the layers that get it
(`models.layers`); None: nothing is measured. An *adapter* is low-rank matrices that are trained
beside *frozen* weights, which are not. `kept(x)` is x, marked to be kept for the backward pass,
which recomputes what is not marked. `PAST` is the collection of Flax variables with the keys and
values of earlier positions of texts that are generated.
"""

import functools
import math
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
    """How positions enter a layer.

    Attributes:
      rope_theta: Base of the rotary wavelengths; None: queries and keys are not rotated.
      rope_scaling: How rotary frequencies are divided; None: they are not.
      window: Number of positions to which a position attends, its own and those before; None: all.
    """

    rope_theta: float | None
    rope_scaling: RopeScaling | None = None
    window: int | None = None


def rotary_frequencies(
    head_size: int, theta: float | None, scaling: RopeScaling | None = None
) -> np.ndarray:
    """Return the angle, in radians, by which each pair of a head's features turns per position.

    Args:
      head_size: K, the number of a head's features.
      theta: Base of the wavelengths: pair i of K / 2 turns by theta^(-2 i / K). None: none turns.
      scaling: How these angles are divided; None: they are not.

    Returns:
      The angles, float64 [K / 2].
    """
    if theta is None:
        return np.zeros(head_size // 2)
    frequencies = theta ** (-np.arange(0, head_size, 2) / head_size)
    if scaling is None:
        return frequencies
    # The turns of each pair within the original length. For "linear" this length is 0: all pairs
    # have too few turns, and are divided.
    turns = scaling.original_length * frequencies / (2 * np.pi)
    undivided = (turns - scaling.low) / (scaling.high - scaling.low)
    undivided = np.clip(undivided, 0, 1)  # 1: as it is, 0: divided by factor, else a mixture
    return frequencies * (undivided + (1 - undivided) / scaling.factor)


def _rotary_tables(length: int, frequencies: np.ndarray) -> tuple[Array, Array]:
    """Return cosines and signed sines of the angles at `length` positions: two float32 [L, K].

    `frequencies` [K / 2] are from `rotary_frequencies`. In `_rotate`, feature i < K / 2 becomes
    x[i] cos - x[i + K / 2] sin, so that the first half of the sines is negative.
    """
    angles = np.arange(length)[:, None] * frequencies[None, :]
    cos_LK = np.cos(np.hstack([angles, angles]))
    sin_LK = np.sin(np.hstack([-angles, angles]))
    return jnp.asarray(cos_LK, jnp.float32), jnp.asarray(sin_LK, jnp.float32)


def _rotate(x_BHLK: Array, cos_LK: Array, sin_LK: Array) -> Array:
    """Rotate each pair of features (i, i + K/2) by the angle of its position.

    The cosines and signed sines are from `_rotary_tables`. The result has the dtype of `x_BHLK`.
    """
    x = x_BHLK.astype(jnp.float32)
    swapped = jnp.roll(x, x.shape[-1] // 2, axis=-1)  # exchange the two features of each pair
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
        """Return a constructor of the linear layers in a part of a block, "attention" or "mlp".

        It takes the number of outputs, and as keywords `use_bias` and `name`.
        """
        adapter = None if self.adapter is None else self.adapter.of(part)
        return functools.partial(Linear, dtype=self.dtype, adapter=adapter)

    def norm(self, name: str) -> RMSNorm:
        """Return a norm whose parameters have this name."""
        return RMSNorm(self.norm_eps, self.dtype, self.norm_offset, name=name)


class _Attention(nn.Module):
    """Causal grouped-query attention. Heads precede positions, as the products need it."""

    sizes: _Sizes

    @nn.compact
    def __call__(
        self, x_BLD: Array, cos_LK: Array, sin_LK: Array, tap_B: Tap, seen: Array | None
    ) -> tuple[Array, PyTree]:
        """Return the output [B, L, D], and None or the new keys and values.

        `cos_LK` and `sin_LK` are the tables by which `_rotate` rotates queries and keys. There are
        three cases:

        - The variables have no collection `PAST`: `seen` [B or 1, L] is the first position to which
          each position attends; None: position 0. The second result is None.
        - `PAST` has arrays of size 0: a prompt is read. `seen` is as above. The second result is a
          dict of its "keys" and "values", [B, G, L, K].
        - `PAST` has "keys" and "values" [B, G, T, K]: the input is one new token of each text
          (L = 1), and `seen` bool [1, T] are the positions to which it attends. The second result
          is a dict of the token's own "keys" and "values".
        """
        B, L, D = x_BLD.shape
        sizes = self.sizes
        K = sizes.head_size
        linear = sizes.linear("attention")

        def heads(name: str, num_heads: int, *, norm: bool = False) -> Array:
            """Return the queries, keys or values of all heads, [B, num_heads, L, K]."""
            project = linear(num_heads * K, use_bias=sizes.qkv_bias, name=name)
            y = project(x_BLD, tap_B)
            if norm:  # the vector of each position and head is normalised
                norm_heads = sizes.norm(f"{name}_norm")
                y = norm_heads(kept(y).reshape(B, L * num_heads, K), tap_B)
            return y.reshape(B, L, num_heads, K).transpose(0, 2, 1, 3)

        def rotated(x_BHLK: Array, cos_LK: Array, sin_LK: Array) -> Array:
            """Rotate queries or keys. Without norms the result is kept for the backward pass.

            With norms, `heads` keeps the inputs of the norms instead.
            """
            y_BHLK = _rotate(x_BHLK, cos_LK, sin_LK)
            return y_BHLK if sizes.qk_norm else kept(y_BHLK)

        # Queries are rotated and scaled in one multiplication, by tables that are scaled.
        scale = (sizes.query_size or K) ** -0.5
        q_BHLK = heads("query", sizes.num_heads, norm=sizes.qk_norm)
        q_BHLK = rotated(q_BHLK, scale * cos_LK, scale * sin_LK)
        k_BGLK = heads("key", sizes.num_kv_heads, norm=sizes.qk_norm)
        k_BGLK = rotated(k_BGLK, cos_LK, sin_LK)
        v_BGLK = kept(heads("value", sizes.num_kv_heads))

        attend: Any = ATTENTION[sizes.attention]
        new = None
        if self.has_variable(PAST, "keys"):  # a text is generated
            new = {"keys": k_BGLK, "values": v_BGLK}
            past = {name: self.get_variable(PAST, name) for name in new}
            if past["keys"].size:  # it has earlier positions
                attend = functools.partial(attend_past, past)
        y_BLD = attend(q_BHLK, k_BGLK, v_BGLK, seen)
        out = linear(D, use_bias=sizes.out_bias, name="out")
        return kept(out(y_BLD, tap_B)), new


# The gated product inside the MLP, `function(gate_BLF, up_BLF)`, by `Llama.activation`.
_ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "silu": swiglu,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
}


class _MLP(nn.Module):
    """Two matrices, the gated product of their results, and a third matrix."""

    sizes: _Sizes

    @nn.compact
    def __call__(self, x_BLD: Array, tap_B: Tap) -> Array:
        """Return the output [B, L, D]."""
        width = self.sizes.mlp_width
        # A constructor of the MLP's linear layers, which have an adapter if there is one for them.
        linear = functools.partial(self.sizes.linear("mlp"), use_bias=self.sizes.mlp_bias)
        gate_BLF = kept(linear(width, name="gate")(x_BLD, tap_B))
        up_BLF = kept(linear(width, name="up")(x_BLD, tap_B))
        product_BLF = _ACTIVATIONS[self.sizes.activation](gate_BLF, up_BLF)
        return linear(x_BLD.shape[-1], name="down")(product_BLF, tap_B)


class _Block(nn.Module):
    """One transformer layer: attention and an MLP, each added to its input."""

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
        """Return the new activations [B, L, D], and None or the new keys and values.

        `cos_LK` and `sin_LK` are from `_rotary_tables`, and `seen` says to which positions each
        position attends. If `kind` is given, each of the four arguments before
        it has a leading axis of all kinds of layers, of which the layer takes the index `kind`. The
        second result is a dict of "keys" and "values" [B, G, L, K] if a text is generated, else
        None.
        """
        if kind is not None:  # a scan gives each layer the arguments of all kinds
            stacks = (cos_LK, sin_LK, tap_B, seen)
            cos_LK, sin_LK, tap_B, seen = jax.tree.map(lambda stack: stack[kind], stacks)
        attention = _Attention(self.sizes, name="attention")
        mlp = _MLP(self.sizes, name="mlp")
        norm = self.sizes.norm
        # If results are normalised too, the MLP has two norms, whose names tell them apart.
        has_out_norms = self.sizes.out_norms
        attention_norm = norm("attention_norm")
        mlp_norm = norm("mlp_in_norm" if has_out_norms else "mlp_norm")

        y_BLD, new_keys_values = attention(
            attention_norm(x_BLD, tap_B), cos_LK, sin_LK, tap_B, seen
        )
        if has_out_norms:
            y_BLD = norm("attention_out_norm")(y_BLD, tap_B)
        x_BLD = x_BLD + y_BLD

        y_BLD = mlp(mlp_norm(x_BLD, tap_B), tap_B)
        if has_out_norms:
            y_BLD = norm("mlp_out_norm")(y_BLD, tap_B)
        return x_BLD + y_BLD, new_keys_values


class _LayerArguments(NamedTuple):
    """The arguments of a layer besides the activations, for one kind of layers.

    They are the tables by which queries and keys are rotated, the tap, and the positions that each
    position sees (`_Attention`).
    """

    cos_LK: Array
    sin_LK: Array
    tap_B: Tap
    seen: Array | None


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
        check_sizes(self, RULES if self.head_size is None else _HEAD_SIZE_RULES)  # or ValueError
        if self.attention not in ATTENTION:
            raise ValueError(f"attention={self.attention!r} must be one of {', '.join(ATTENTION)}.")

        # The backward pass recomputes the activations that `policy` does not keep. XLA would merge
        # what inlined layers recompute with the original, and so keep it, unless that is prevented.
        # None: only the layers' inputs are kept; else also what is marked by `kept`.
        policy = None if self.remat else KEEP_NAMED
        prevent_cse = self.remat and self.layer_form == "inline"
        block = nn.remat(_Block, prevent_cse=prevent_cse, policy=policy)
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
        # All layers of a scan get the same `_LayerArguments`. If there are several kinds, each
        # layer also gets an element of a fifth argument, its kind.
        in_axes = nn.broadcast
        if len(set(self.kinds)) > 1:
            in_axes = (nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast, 0)
        self.layers = stacked(block, self.num_layers, in_axes)(sizes)
        self.layer = block(sizes, parent=None)  # without parameters, for `run_layers`
        self.norm = RMSNorm(self.norm_eps, self.dtype, self.norm_offset)
        if not self.tied:
            self.head = Linear(self.vocab_size, self.dtype, to_float32=True)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, from the first to the last."""
        uniform = LayerKind(self.rope_theta, self.rope_scaling, self.window)
        return self.layer_kinds or (uniform,) * self.num_layers

    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        tap_B: Tap = None,
        starts_BL: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Return the logits of the next token at each position, in float32.

        `starts_BL` are the first positions to which positions attend; None: position 0. Raises
        ValueError if L is more than `max_length`.
        """
        hidden_BLD, head_tap = self.hidden(tokens_BL, tap_B, starts_BL)
        return self.logits(hidden_BLD, head_tap)

    def hidden(
        self,
        tokens_BL: Int[Array, "B L"],
        tap_B: Tap = None,
        starts_BL: Int[Array, "B L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], Tap | TiedTap]:
        """Return the two arguments of `logits`: the normalised output of the last layer, and a tap.

        `starts_BL` are the first positions to which positions attend; None: position 0. The tap is
        the head's, None without `tap_B`. Raises ValueError if L is more than `max_length`.
        """
        length = tokens_BL.shape[1]
        check_length(length, self.max_length)
        arguments = self._layer_arguments(length, tap_B, starts_BL)
        hidden_BLD, head_tap, _ = self._run(tokens_BL, tap_B, arguments)
        return hidden_BLD, head_tap

    def extend(
        self, tokens_BL: Int[Array, "B L"], position: int | Int[Array, ""] = 0
    ) -> tuple[Float[Array, "B L D"], dict[str, Float[Array, "N B G L K"]]]:
        """Return the normalised output of the last layer for new tokens, and their keys and values.

        The variables must have the collection `PAST`: {"layers": {"attention": {"keys": ...,
        "values": ...}}}, arrays [N, B, G, T, K]. There are two cases:

        - T = 0: the tokens are the first L of each text, and `position` is not used.
        - T > 0: there is one token of each text (L = 1), at `position`. `PAST` has room for T
          positions, and holds the keys and values of all positions before this one. What it holds
          from `position` on is ignored.

        The second result is a dict of "keys" and "values" of the new tokens. `PAST` is not changed.
        """
        num_past = self.variables[PAST]["layers"]["attention"]["keys"].shape[-2]  # T
        if num_past == 0:
            arguments_of_kinds = self._layer_arguments(tokens_BL.shape[1])
        else:
            # Take the arguments of the one new position out of those of all T positions.
            arguments_of_kinds = []
            past_1T = jnp.arange(num_past)[None]
            for of_positions in self._layer_arguments(num_past):
                first_seen = 0  # a kind with a window does not see the positions before it
                if of_positions.seen is not None:
                    first_seen = of_positions.seen[0, position]
                arguments = _LayerArguments(
                    cos_LK=lax.dynamic_slice_in_dim(of_positions.cos_LK, position, 1),
                    sin_LK=lax.dynamic_slice_in_dim(of_positions.sin_LK, position, 1),
                    tap_B=None,
                    seen=(first_seen <= past_1T) & (past_1T < position),
                )
                arguments_of_kinds.append(arguments)

        hidden_BLD, _, new_keys_values = self._run(
            tokens_BL, tap_B=None, arguments_of_kinds=arguments_of_kinds
        )
        return hidden_BLD, new_keys_values

    def _run(
        self, tokens_BL: Array, tap_B: Tap, arguments_of_kinds: list[_LayerArguments]
    ) -> tuple[Array, Tap | TiedTap, PyTree]:
        """Run the embedding and all layers.

        Args:
          tokens_BL: Ids of tokens.
          tap_B: The tap of the embedding, and of the normalisation after the last layer; None:
            nothing is measured.
          arguments_of_kinds: For each distinct kind of layers, what its layers take besides the
            activations (`_layer_arguments`).

        Returns:
          Three results:

          - the normalised output of the last layer [B, L, D];
          - the tap of the head: `tap_B`, unless the head's matrix is the embedding table (`tied`).
            Then it is a `TiedTap`, which also has the tokens, as both gradients of the table belong
            together; or None if nothing is measured, or the table is frozen;
          - None, or with the collection `PAST` the new keys and values of all layers, a dict of
            arrays [N, B, G, L, K].
        """
        head_tap = tap_B
        if self.tied:
            x_BLD, head_tap = self.embed.look_up_tied(tokens_BL, tap_B)
        else:
            x_BLD = self.embed(tokens_BL, tap_B)
        if self.scales_embedding:
            x_BLD = x_BLD * self.width**0.5

        kinds = self._distinct_kinds
        kind_of_layers = []  # of each layer, the position of its kind in `kinds`; empty for one
        if len(kinds) > 1:
            kind_of_layers = [kinds.index(kind) for kind in self.kinds]
        # `self.layers` holds the parameters of all layers, stacked; `self.layer` is one layer
        # without parameters. `run_layers` scans over the first, or applies the second to the
        # parameters of each layer, as `form` says.
        x_BLD, new_keys_values = run_layers(
            self.layers,
            self.layer,
            x_BLD,
            *arguments_of_kinds,
            order=kind_of_layers,
            form=self.layer_form,
        )
        return self.norm(x_BLD, tap_B), head_tap, new_keys_values

    @property
    def _distinct_kinds(self) -> list[LayerKind]:
        """Each kind of layers once, in the order of their first layers."""
        return list(dict.fromkeys(self.kinds))

    def _layer_arguments(
        self, length: int, tap_B: Tap = None, starts_BL: Array | None = None
    ) -> list[_LayerArguments]:
        """Return the arguments of a layer at positions 0 to `length` - 1, for each distinct kind.

        `starts_BL` is the first position to which each position may attend; None: position 0. The
        `seen` of a kind, int32 [B or 1, L] or None, is the same, or later where its window begins
        later. If one kind has a window below `length`, no kind has None, because a scan stacks the
        kinds' arguments.
        """
        kinds = self._distinct_kinds
        if starts_BL is None and any((kind.window or length) < length for kind in kinds):
            starts_BL = jnp.zeros((1, length), jnp.int32)

        arguments_of_kinds = []
        for kind in kinds:
            # Attention depends only on differences of angles, so that the tables need no restart in
            # each document.
            frequencies = rotary_frequencies(self.head_dim, kind.rope_theta, kind.rope_scaling)
            cos_LK, sin_LK = _rotary_tables(length, frequencies)
            seen = starts_BL
            window = kind.window
            if window is not None and window < length and seen is not None:
                # At position i the window begins at i + 1 - window; its last position is i.
                in_window_1L = np.arange(1 - window, length + 1 - window, dtype=np.int32)[None]
                seen = jnp.maximum(seen, in_window_1L)
            arguments_of_kinds.append(_LayerArguments(cos_LK, sin_LK, tap_B, seen))
        return arguments_of_kinds

    def logits(self, hidden_BLD: Float[Array, "B L D"], tap: Any = None) -> Float[Array, "B L V"]:
        """Return the head's float32 logits; the arguments are the two results of `hidden`.

        They are the normalised output of the last layer, and the head's tap or None.
        """
        if self.tied:
            return self.embed.attend(hidden_BLD, tap)
        return self.head(hidden_BLD, tap)


def _variables(params: PyTree, base: PyTree | None) -> dict[str, PyTree]:
    """Return the variables for `model.apply`: parameters, and frozen weights (`base`) if any."""
    if base is None:
        return {"params": params}
    return {"params": params, BASE: base}


# The most logits of a part of a sequence in a chunked loss: 0.5 GB in float32.
_MAX_LOGITS = 2**27


def _num_parts(length: int, vocab_size: int) -> int:
    """Return into how many parts of its length a chunked loss divides a sequence: a power of two.

    It is the least with which the logits of a part are at most `_MAX_LOGITS` numbers.
    """
    parts = 1
    while math.ceil(length / parts) * vocab_size > _MAX_LOGITS:
        parts *= 2
    return parts


def _in_parts(x_BL: Array, parts: int) -> Array:
    """Divide the second axis: [B, L, ...] becomes [B * parts, ceil(L / parts), ...].

    The parts of a row follow one another; zeros fill the last one.
    """
    batch, length, *rest = x_BL.shape
    part_length = math.ceil(length / parts)
    padding = [(0, 0)] * x_BL.ndim
    padding[1] = (0, part_length * parts - length)
    return jnp.pad(x_BL, padding).reshape(batch * parts, part_length, *rest)


def sequence_losses(model: Llama, *, sequences_per_chunk: int = 0) -> Callable[..., Array]:
    """Make a function that returns the mean next-token loss of each sequence.

    Every token counts, unless rows have weights. In rows of documents, an end of text closes one
    document as a target and begins the next as an input, so their loss is that of the documents.

    Args:
      model: The model that computes the logits.
      sequences_per_chunk: Number of sequences whose logits exist at once, forward and backward;
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
        """Return the cross-entropy of each token, [B, L]; all logits exist at once.

        `hidden_BLD` and `tap` are the arguments of the head, from `Llama.hidden`.
        """
        logits_BLV = logits(variables, hidden_BLD, tap)
        return jax.nn.logsumexp(logits_BLV, axis=-1) - pick(logits_BLV, targets_BL)

    def token_losses(
        variables: PyTree, hidden_BLD: Array, targets_BL: Array, tap: Tap | TiedTap
    ) -> Array:
        """Return the cross-entropy of each token, [B, L]; logits exist for one chunk at a time.

        `hidden_BLD` and `tap` are the arguments of the head, from `Llama.hidden`.
        """
        chunk = sequences_per_chunk
        length = targets_BL.shape[1]
        # A tap measures the gradient of a whole sequence, which must then stay in one part.
        is_divided = chunk > 0 and tap is None
        parts = _num_parts(length, model.vocab_size) if is_divided else 1
        # From here on a row is a sequence, or a part of one. The arrays of a tap have rows, too.
        head_inputs = (_in_parts(hidden_BLD, parts), _in_parts(targets_BL, parts), tap)
        num_rows = parts * len(targets_BL)
        if chunk == 0 or chunk >= num_rows:
            return head_losses(variables, *head_inputs)

        num_chunked = num_rows - num_rows % chunk  # rows in full chunks
        chunks = jax.tree.map(
            lambda x: x[:num_chunked].reshape(-1, chunk, *x.shape[1:]), head_inputs
        )
        # The backward pass computes a chunk's logits again, and so holds one chunk's at a time too.
        # In the loop of `lax.map` XLA cannot merge them with the first ones (`prevent_cse`).
        chunk_losses = jax.checkpoint(lambda args: head_losses(variables, *args), prevent_cse=False)
        losses = lax.map(chunk_losses, chunks)
        losses = losses.reshape(num_chunked, -1)
        if num_chunked < num_rows:
            rest = jax.tree.map(lambda x: x[num_chunked:], head_inputs)
            losses = jnp.concatenate([losses, head_losses(variables, *rest)])
        return losses.reshape(len(targets_BL), -1)[:, :length]  # without the parts' padding

    def losses_fn(
        params: PyTree, rows: Array | RowBatch, tap_B: Tap = None, base: PyTree | None = None
    ) -> Array:
        """Return the loss of each sequence, float32 [B]."""
        variables = _variables(params, base)
        rows = as_row_batch(rows)
        tokens = rows.tokens  # [B, L + 1]
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise ValueError(f"rows has shape {tokens.shape}, expected [B, L+1] with L >= 1.")
        # The only shift: the loss at position t is of token t + 1.
        inputs_BL = tokens[:, :-1]
        targets_BL = tokens[:, 1:]
        starts_BL = None if rows.starts is None else rows.starts[:, :-1]
        weights_BL = None if rows.weights is None else rows.weights[:, 1:]
        hidden_BLD, tap = hidden(variables, inputs_BL, tap_B, starts_BL)
        if base is not None:
            tap = None  # the head is frozen, and has no gradient to measure
        losses_BL = token_losses(variables, hidden_BLD, targets_BL, tap)
        if weights_BL is None:
            return jnp.mean(losses_BL, axis=1)
        return jnp.sum(losses_BL * weights_BL, axis=1)

    return losses_fn


def next_token_loss(model: Llama, *, sequences_per_chunk: int = 0) -> Callable[..., Array]:
    """Make the training loss: the mean over sequences of `sequence_losses`.

    Returns `loss_fn(params, rows, tap_B=None, base=None)`, a float32 scalar. Rows are int32 tokens
    [B, L+1] or a `row_batch.RowBatch`; another shape, or L of 0, raises ValueError while tracing.
    `base` has the frozen weights of a model with an adapter. `sequences_per_chunk` is the number of
    sequences whose logits exist at once; 0: all.
    """
    losses_fn = sequence_losses(model, sequences_per_chunk=sequences_per_chunk)

    def loss_fn(
        params: PyTree, rows: Array | RowBatch, tap_B: Tap = None, base: PyTree | None = None
    ) -> Array:
        """Return the mean loss of the sequences."""
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

    The lengths of prompts and of texts are padded to powers of two, so that one compiled program
    serves many lengths.

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
      Prompts followed by the new tokens, int32 [B, P + num_tokens]. Once all texts have ended,
      zeros follow.

    Raises:
      ValueError: If prompt and new tokens do not fit into the model's `max_length`.
    """
    prompt_BL = np.asarray(prompt_BL, np.int32)
    batch, length = prompt_BL.shape
    stop = length + num_tokens
    check_length(stop, model.max_length)
    # T is a padded length. The true lengths are data, and compile no further program.
    text_BT = np.zeros((batch, _padded_length(stop)), np.int32)
    text_BT[:, :length] = prompt_BL
    text_BT = _continue(
        model,
        num_read=_padded_length(length),
        variables=_variables(params, base),
        text_BT=text_BT,
        length=length,
        stop=stop,
        temperature=temperature,
        key=key,
        ends_E=np.array(ends, np.int32),
    )
    return lax.slice_in_dim(text_BT, 0, stop, axis=1)


def _padded_length(num_tokens: int) -> int:
    """Round a length up to a power of two, at least 32, so that few programs are compiled."""
    return max(32, 2 ** (num_tokens - 1).bit_length())


class _Generation(NamedTuple):
    """The state of the loop of `_continue`, in which each pass writes a token of each text.

    Attributes:
      position: Where the next token is written; the texts have tokens at all positions before it.
      text_BT: The texts; what stands from `position` on has no meaning.
      past: A dict of "keys" and "values", [N, B, G, T, K], for the positions before the last known
        token, which is at `position - 1`. The next pass reads this token, and adds its own keys and
        values.
      has_ended_B: Whether a text has a token that ends it.
    """

    position: Array
    text_BT: Array
    past: PyTree
    has_ended_B: Array


@functools.partial(jax.jit, static_argnames=("model", "num_read"))
def _continue(
    model: Llama,
    *,
    num_read: int,
    variables: PyTree,
    text_BT: Array,
    length: Array,
    stop: Array,
    temperature: Array,
    key: Array,
    ends_E: Array,
) -> Array:
    """Return texts [B, T] with new tokens at the positions from `length` to `stop - 1`.

    If all texts have ended earlier, the rest of them stays as it was given.

    Args:
      model: The model.
      num_read: Number of positions that are read at once for the prompts, at least `length`. It is
        static, and `length` is data, so that one program serves several lengths.
      variables: Parameters and frozen weights by collection.
      text_BT: Prompts, with padding from `length` on.
      length: Length of the prompts, at least 1.
      stop: Length of the prompts with the new tokens, at most T.
      temperature: Divides the logits before sampling; 0 takes the most probable token.
      key: Random key for sampling.
      ends_E: Ids that end a text. The loop ends when all texts have ended.
    """
    logits = nn.apply(Llama.logits, model)  # logits(variables, hidden_BLD)

    def extend(tokens_BL: Array, position: Array | int, past: PyTree) -> tuple[Array, PyTree]:
        """Return the last layer's output, and keys and values, of new tokens from `position` on.

        `past` has the keys and values of the positions before, or arrays of size 0.
        """
        collections = variables | {PAST: {"layers": {"attention": past}}}
        hidden_and_new: Any = model.apply(collections, tokens_BL, position, method=Llama.extend)
        return hidden_and_new

    def add_token(state: _Generation) -> _Generation:
        """Read the last known token of each text, and write the next one after it.

        A text that has ended goes on like the others: what follows its end is not part of it.
        """
        position, text_BT, past, has_ended_B = state
        last_B1 = lax.dynamic_slice_in_dim(text_BT, position - 1, 1, axis=1)
        # Only the keys and values of this token are new.
        hidden_B1D, new_keys_values = extend(last_B1, position - 1, past)

        def write(past_NBGTK: Array, new_NBG1K: Array) -> Array:
            """Put the new token's keys or values where they belong in those of all positions."""
            return lax.dynamic_update_slice_in_dim(past_NBGTK, new_NBG1K, position - 1, axis=-2)

        past = jax.tree.map(write, past, new_keys_values)
        logits_BV = logits(variables, hidden_B1D)[:, 0]
        # The Gumbel trick: the argmax is a sample from softmax(logits / temperature).
        noise_BV = jax.random.gumbel(jax.random.fold_in(key, position), logits_BV.shape)
        next_B = jnp.argmax(logits_BV + temperature * noise_BV, axis=-1).astype(text_BT.dtype)
        has_ended_B |= jnp.isin(next_B, ends_E)
        return _Generation(
            position=position + 1,
            text_BT=text_BT.at[:, position].set(next_B),
            past=past,
            has_ended_B=has_ended_B,
        )

    def goes_on(state: _Generation) -> Array:
        """Return whether a text has not ended, and there is room for a token."""
        return (state.position < stop) & ~jnp.all(state.has_ended_B)

    # Read the prompts. Keys and values of the padding are never seen: they are overwritten before
    # texts reach their positions. The last token of the prompts is read again in the first
    # `add_token`, which needs its logits.
    # Arrays of size 0 tell `Llama.extend` to read prompts. Only their first axis, N, is used.
    empty = jnp.zeros((model.num_layers, 0, 0))
    _, past = extend(text_BT[:, :num_read], 0, {"keys": empty, "values": empty})
    num_new_positions = text_BT.shape[1] - num_read  # room for keys and values of new tokens
    padding = [(0, 0), (0, 0), (0, 0), (0, num_new_positions), (0, 0)]  # [N, B, G, T, K]
    past = jax.tree.map(lambda x: jnp.pad(x, padding), past)

    has_ended_B = jnp.zeros(len(text_BT), bool)
    state = _Generation(length, text_BT, past, has_ended_B)
    return lax.while_loop(goes_on, add_token, state).text_BT
