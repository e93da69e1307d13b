"""The table of model architectures, and what the rest of the package needs of each."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
from jaxtyping import PyTree

from adloco_jax.core.types import LossFn
from adloco_jax.models import bert, llama
from adloco_jax.models.layers import Rule
from adloco_jax.models.weight_maps import BERT, LLAMA, WeightMap


def label_matrices(params: PyTree) -> PyTree:
    """Labels each leaf for an optimizer that treats the matrices of hidden layers on their own.

    Args:
      params: Parameters named as in `models.layers`: matrices `kernel`, tables `embedding`, stacked
        layers under `layers`, a head named `head` or `classifier`.

    Returns:
      A tree of the same structure: "matrix" for [in, out], "stacked_matrix" for [layers, in, out],
      and "other": vectors, tables, and the head, whose columns are tokens or classes.
    """

    def label(path: tuple, leaf: Any) -> str:
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1:] != ["kernel"] or names[0] in ("head", "classifier"):
            return "other"
        shape = (leaf.ndim, names[0] == "layers")
        return {(2, False): "matrix", (3, True): "stacked_matrix"}.get(shape, "other")

    return jax.tree.map_with_path(label, params)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model architecture, by the name that `model.arch` gives.

    Attributes:
      build: `build(settings.model)` gives a Flax module; `module.init(key, tokens_BL)["params"]`
        must give the parameters, an array for each leaf. `settings.model.attention` is "xla" or
        "cudnn" here.
      loss: `loss(module, settings.model)` gives `loss_fn(params, rows)`, the mean loss over int32
        rows; where it also takes the keyword `tap_B` (`models.layers`), batch-size tests measure
        gradients by taps.
      data: "text": rows are L + 1 tokens, the loss is in nats per token. "labelled": rows are
        [label, number of tokens n, L tokens], the loss is in nats per example.
      rules: What the `model` group must satisfy, checked with the config.
      weight_map: Hugging Face names; without it there is no export and no `model.init_from`.
      label_params: Labels of the parameters, see `label_matrices`.
      fused_attention: Whether `model.attention = cudnn` is supported.
    """

    build: Callable[[Any], Any]
    loss: Callable[[Any, Any], LossFn]
    data: Literal["text", "labelled"] = "text"
    rules: tuple[Rule, ...] = ()
    weight_map: WeightMap | None = None
    label_params: Callable[[PyTree], PyTree] = label_matrices
    fused_attention: bool = False


def _builder(module: type[nn.Module]) -> Callable[[Any], nn.Module]:
    """A builder that passes on the config keys named like the module's attributes."""
    names = {field.name for field in dataclasses.fields(module)}

    def build(model: Any) -> nn.Module:
        sizes = {name: value for name, value in vars(model).items() if name in names}
        return module(**sizes, scan_layers=jax.default_backend() != "cpu")

    return build


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        build=_builder(llama.Llama),
        loss=lambda module, model: llama.next_token_loss(
            module, sequences_per_chunk=model.loss_chunk
        ),
        rules=llama.RULES,
        weight_map=LLAMA,
        fused_attention=True,
    ),
    "bert": Architecture(
        build=_builder(bert.Bert),
        loss=lambda module, model: bert.classification_loss(module),
        data="labelled",
        rules=bert.RULES,
        weight_map=BERT,
    ),
}
"""By the name that `model.arch` gives."""
