"""The table of model architectures (`ARCHITECTURES`), and the type of its entries."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
from jaxtyping import PyTree

from adloco_jax.core.types import LossFn
from adloco_jax.models import bert, llama
from adloco_jax.models.layers import Rule
from adloco_jax.models.weight_maps import BERT, LLAMA, WeightMap


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model architecture: an entry of the table `ARCHITECTURES`.

    Attributes:
      build: `build(settings.model)` returns a Flax module. `module.init(key, tokens_BL)["params"]`
        must be the parameters, a tree of arrays. `build` may have two further keyword arguments.
        `attention` is "xla", or "cudnn" if the model and the device allow it. `layer_form` says
        how the compiled program shall run the layers (`models.kernels.run_layers`).
      loss: `loss(module, settings.model)` returns `loss_fn(params, rows)`, the mean loss over int32
        rows. If `loss_fn` also takes the keyword `tap_B` (`models.layers`), batch-size tests
        measure gradients by taps.
      data: What a row is. With "text" a row has L + 1 tokens, and the loss is in nats per token.
        With "labelled" a row is [label, number of tokens n, L tokens], and the loss is in nats per
        example.
      rules: Conditions on the settings of the group `model`, which are checked together with the
        config.
      weight_map: Hugging Face names of the parameters. Without it the model cannot be exported to
        Hugging Face format, or start from a checkpoint (`model.init_from`).
      label_params: Function from the parameters to a tree of labels with the same structure.
        Optimizers and aggregators use it to treat kinds of parameters differently. A label is
        "matrix" for a hidden layer's matrix [in, out], "embedding", "head" or "other". It has the
        prefix "stacked_" if the first axis of the leaf counts layers. None: optimizers and
        aggregators use the shape of a leaf instead.
    """

    build: Callable[[Any], Any]
    loss: Callable[[Any, Any], LossFn]
    data: Literal["text", "labelled"] = "text"
    rules: tuple[Rule, ...] = ()
    weight_map: WeightMap | None = None
    label_params: Callable[[PyTree], PyTree] | None = None


def _sizes(module: type[nn.Module], model: Any) -> dict[str, Any]:
    """Return the settings of the config's group `model` that are attributes of the Flax module."""
    names = {field.name for field in dataclasses.fields(module)}
    return {name: value for name, value in vars(model).items() if name in names}


def _build_llama(model: Any, *, attention: str = "xla", layer_form: str = "scan") -> llama.Llama:
    # A checkpoint describes more than sizes, and the settings of sizes agree with it.
    described = LLAMA.attributes(json.loads(model.checkpoint)) if model.checkpoint else {}
    described |= _sizes(llama.Llama, model)
    return llama.Llama(**described, attention=attention, layer_form=layer_form)


def _build_bert(model: Any, *, layer_form: str = "scan") -> bert.Bert:
    return bert.Bert(**_sizes(bert.Bert, model), layer_form=layer_form)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        build=_build_llama,
        loss=lambda module, model: llama.next_token_loss(
            module, sequences_per_chunk=model.loss_chunk
        ),
        rules=llama.RULES,
        weight_map=LLAMA,
        label_params=LLAMA.label_params,
    ),
    "bert": Architecture(
        build=_build_bert,
        loss=lambda module, model: bert.classification_loss(module),
        data="labelled",
        rules=bert.RULES,
        weight_map=BERT,
        label_params=BERT.label_params,
    ),
}
"""Architectures by name, for the knob `model.arch`."""
