"""BERT for sequence classification on a plain parameter tree, with the arithmetic of Hugging Face.

Departures: no dropout, since a loss must depend on parameters and data alone; every token is of
type 0; what follows a text's tokens has no gradient.

Axes of arrays: B examples, L positions, D features of a position, N layers, H heads, K features of
a head, F features inside the MLP, C classes, 1 an axis of size one. A *tap*, `tap_B`, is zeros, one
for each example. In the backward pass its cotangent is the squared norm of each example's gradient,
summed over the layers that get it (`models.layers`); None: nothing is measured.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from adloco_jax.models.kernels import multiply_float32, run_layers, stacked
from adloco_jax.models.layers import (
    HEADS_DIVIDE_WIDTH,
    Embed,
    LayerNorm,
    Linear,
    Offset,
    Rule,
    Tap,
    check_length,
    check_sizes,
)

RULES: tuple[Rule, ...] = (
    HEADS_DIVIDE_WIDTH,
    (("num_classes",), lambda num_classes: num_classes >= 2, "must be at least 2"),
)


class _Attention(nn.Module):
    """Attention of every position to the real tokens of its sequence. Heads precede positions."""

    num_heads: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Array, real_BL: Array, tap_B: Tap) -> Array:
        """Return the output [B, L, D]; `real_BL` is true at real tokens, false at padding."""
        B, L, D = x_BLD.shape
        H = self.num_heads
        K = D // H

        def heads(name: str) -> Array:
            """Return the queries, keys or values of all heads, [B, H, L, K]."""
            y = Linear(D, self.dtype, use_bias=True, name=name)(x_BLD, tap_B)
            return y.reshape(B, L, H, K).transpose(0, 2, 1, 3)

        q_BHLK = heads("query")
        k_BHLK = heads("key")
        v_BHLK = heads("value")
        scores = multiply_float32("bhqk,bhsk->bhqs", q_BHLK, k_BHLK)
        # Hugging Face adds the smallest finite float instead. The weights of padding are exactly
        # zero there too.
        is_seen_B11L = real_BL[:, None, None, :]  # the same for each head and query
        scores = jnp.where(is_seen_B11L, scores * K**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_BHLK.dtype)
        y_BHLK = jnp.einsum("bhqs,bhsk->bhqk", weights, v_BHLK)
        y_BLD = y_BHLK.transpose(0, 2, 1, 3).reshape(B, L, D)
        return Linear(D, self.dtype, use_bias=True, name="out")(y_BLD, tap_B)


class _MLP(nn.Module):
    """Two matrices with the exact gelu between them."""

    width: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Array, tap_B: Tap) -> Array:
        """Return the output [B, L, D]."""
        up_BLF = Linear(self.width, self.dtype, use_bias=True, name="up")(x_BLD, tap_B)
        # The gelu is computed in float32, as in PyTorch.
        y_BLF = jax.nn.gelu(up_BLF.astype(jnp.float32), approximate=False).astype(up_BLF.dtype)
        return Linear(x_BLD.shape[-1], self.dtype, use_bias=True, name="down")(y_BLF, tap_B)


class _Block(nn.Module):
    """One transformer layer: attention and an MLP, each added to its input and normalised."""

    num_heads: int
    mlp_width: int
    norm_eps: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_BLD: Array, real_BL: Array, tap_B: Tap) -> tuple[Array, None]:
        """Return the new activations [B, L, D], and None, as `nn.scan` requires two results.

        `real_BL` is true at real tokens, false at padding.
        """
        attention = _Attention(self.num_heads, self.dtype, name="attention")
        mlp = _MLP(self.mlp_width, self.dtype, name="mlp")
        attention_norm = LayerNorm(self.norm_eps, self.dtype, name="attention_norm")
        mlp_norm = LayerNorm(self.norm_eps, self.dtype, name="mlp_norm")
        x_BLD = attention_norm(x_BLD + attention(x_BLD, real_BL, tap_B), tap_B)
        return mlp_norm(x_BLD + mlp(x_BLD, tap_B), tap_B), None


class Bert(nn.Module):
    """Encoder and classifier: `model.apply({"params": params}, tokens_BL, lengths_B)` gives logits.

    Parameters are a dict of float32 arrays, those of all layers stacked along a leading axis N;
    matrices are Hugging Face's, transposed. Invalid sizes raise ValueError while tracing. A length
    outside 1..L, or a real token's id past the vocabulary, gives NaN.

    Attributes:
      vocab_size: V, number of token ids.
      width: D, length of the vector at each position, a multiple of `num_heads`.
      num_layers: N, number of layers.
      num_heads: H, number of attention heads.
      mlp_width: F, length of the vectors inside the MLP.
      max_length: Longest input in tokens; the table of positions has as many rows.
      num_classes: C, number of classes, at least 2.
      type_vocab_size: Rows in the table of token types; those past the first get no gradient.
      norm_eps: Added to the variance in every norm.
      pad_id: Token id whose embedding gets no gradient.
      dtype: Dtype of the arithmetic, "float32" or "bfloat16". Norms, biases, gelu, softmax, logits,
        and the sum of the embeddings are float32 in any case.
      remat: Whether the backward pass keeps only the input of each layer. If not, it keeps products
        with weights, and recomputes other activations. Results do not depend on it.
      layer_form: See `models.kernels.run_layers`. Results depend on it only by rounding.

    Source: Devlin et al. 2019.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    max_length: int
    num_classes: int
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    pad_id: int | None = None
    dtype: str = "float32"
    remat: bool = False
    layer_form: str = "scan"

    def setup(self) -> None:
        """Check the sizes and create the submodules, whose names are those of the parameters."""
        check_sizes(self, RULES)
        # The policy keeps products with weights, or only the layers' inputs (None). Keeping all
        # activations was slower for the Llama (studies/LOG.md, 2026-11-21).
        policy = None if self.remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        # XLA would merge what inlined layers recompute with the original, and so keep it, unless
        # that is prevented.
        prevent_cse = self.remat and self.layer_form == "inline"
        block = nn.remat(_Block, prevent_cse=prevent_cse, policy=policy)
        self.embed = Embed(self.vocab_size, self.width, jnp.float32, self.pad_id)
        self.token_type = Offset(self.type_vocab_size)
        self.position = Offset(self.max_length)
        self.embed_norm = LayerNorm(self.norm_eps, self.dtype)
        sizes = (self.num_heads, self.mlp_width, self.norm_eps, self.dtype)
        self.layers = stacked(block, self.num_layers)(*sizes)
        self.layer = block(*sizes, parent=None)  # without parameters, for `run_layers`
        self.pooler = Linear(self.width, self.dtype, use_bias=True)
        self.classifier = Linear(self.num_classes, self.dtype, to_float32=True, use_bias=True)

    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        lengths_B: Int[Array, " B"] | None = None,
        tap_B: Tap = None,
    ) -> Float[Array, "B C"]:
        """Return the classes' float32 logits from the first `lengths_B` tokens; None: from all.

        Raises ValueError if L is more than `max_length`.
        """
        batch, length = tokens_BL.shape
        check_length(length, self.max_length)
        if lengths_B is None:
            lengths_B = jnp.full(batch, length)
        # A length past L becomes 0: a softmax over no tokens gives NaN, which shows the fault.
        lengths_B = jnp.where(lengths_B <= length, lengths_B, 0)
        real_BL = jnp.arange(length)[None, :] < lengths_B[:, None]

        x_BLD = self.embed(jnp.where(real_BL, tokens_BL, 0), tap_B)  # padding may hold anything
        x_BLD = self.token_type(x_BLD, 0, tap_B)
        x_BLD = self.position(x_BLD, slice(length), tap_B)
        x_BLD = self.embed_norm(x_BLD, tap_B)
        arguments = (real_BL, tap_B)  # of each layer, besides the activations
        x_BLD, _ = run_layers(self.layers, self.layer, x_BLD, arguments, form=self.layer_form)

        first_B1D = x_BLD[:, :1]  # the token [CLS], which stands for the text
        pooled_B1D = jnp.tanh(self.pooler(first_B1D, tap_B))
        logits_B1C = self.classifier(pooled_B1D, tap_B)
        return logits_B1C[:, 0]


def class_logits(model: Bert) -> Callable[..., Array]:
    """Make a function that returns the logits of each example.

    Returns:
      `logits_fn(params, rows, tap_B=None)`, float32 [B, C]. Rows are int32 [B, 2 + L]: the label
      0..C-1, ignored here; the number n of real tokens, 1..L; then L tokens, real up to the n-th.

    Raises:
      ValueError: While tracing the returned function, if `rows` has another shape.
    """
    # A bound method can be pickled and sent to another process, unlike a result of `nn.apply`.
    logits: Any = model.apply

    def logits_fn(params: PyTree, rows: Array, tap_B: Tap = None) -> Array:
        """Return the logits of each example, float32 [B, C]."""
        if rows.ndim != 2 or rows.shape[1] < 3:  # label, number of tokens, and a token at least
            raise ValueError(f"rows has shape {rows.shape}, expected [B, 2 + L] with L >= 1.")
        lengths_B = rows[:, 1]
        tokens_BL = rows[:, 2:]
        return logits({"params": params}, tokens_BL, lengths_B, tap_B)

    return logits_fn


def classification_losses(model: Bert) -> Callable[..., Array]:
    """Make a function that returns the cross-entropy of each example.

    It is `losses_fn(params, rows, tap_B=None)`, float32 [B] in nats. Rows are int32 [B, 2 + L]:
    label, number of real tokens, tokens; another shape raises ValueError while tracing. A label
    outside 0..C-1 gives NaN.
    """
    logits_fn = class_logits(model)

    def losses_fn(params: PyTree, rows: Array, tap_B: Tap = None) -> Array:
        """Return the cross-entropy of each example, float32 [B]."""
        logits_BC = logits_fn(params, rows, tap_B)
        # A negative label would count from the last class. As the label C it is filled with NaN.
        labels_B = jnp.where(rows[:, 0] < 0, model.num_classes, rows[:, 0])
        picked_B1 = jnp.take_along_axis(logits_BC, labels_B[:, None], axis=-1, mode="fill")
        return jax.nn.logsumexp(logits_BC, axis=-1) - picked_B1[:, 0]

    return losses_fn


def classification_loss(model: Bert) -> Callable[..., Array]:
    """Make the training loss: the mean of `classification_losses`.

    Returns `loss_fn(params, rows, tap_B=None)`, a float32 scalar. Every example has the same
    weight, whatever its number of tokens.
    """
    losses_fn = classification_losses(model)

    def loss_fn(params: PyTree, rows: Array, tap_B: Tap = None) -> Array:
        """Return the mean cross-entropy of the examples."""
        return jnp.mean(losses_fn(params, rows, tap_B))

    return loss_fn
