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
      build: `build(*, ...)` returns a Flax module. `module.init(key, tokens_BL)["params"]` must be
        the parameters, a tree of arrays. `build` receives these keywords, and ignores the others by
        `**_`: the sizes of the config's group `model`, `dtype`, `remat`, `checkpoint`, `attention`,
        `layer_form` and `separator`. `checkpoint` is the text of the `config.json` of
        `model.init_from`, or empty. `attention` is "xla", or "cudnn" if `build` names this keyword
        and the device allows it. `layer_form` says how the compiled program shall run the layers
        (`models.kernels.run_layers`). `separator` is the id of the token that separates documents,
        or None if tokens attend to whole rows; a `build` must name it to be given one.
      loss: `loss(module, *, loss_chunk)` returns `loss_fn(params, rows)`, the mean loss over int32
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

    build: Callable[..., Any]
    loss: Callable[..., LossFn]
    data: Literal["text", "labelled"] = "text"
    rules: tuple[Rule, ...] = ()
    weight_map: WeightMap | None = None
    label_params: Callable[[PyTree], PyTree] | None = None


def _attributes(module: type[nn.Module], given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the given keywords that are attributes of the Flax module."""
    names = {field.name for field in dataclasses.fields(module)}
    return {name: value for name, value in given.items() if name in names}


def _build_llama(
    *, attention: str, checkpoint: str, separator: int | None, **given: Any
) -> llama.Llama:
    # A checkpoint describes more than sizes, and the settings of sizes agree with it.
    described = LLAMA.attributes(json.loads(checkpoint)) if checkpoint else {}
    described |= _attributes(llama.Llama, given)
    return llama.Llama(**described, attention=attention, separator=separator)


def _build_bert(**given: Any) -> bert.Bert:
    return bert.Bert(**_attributes(bert.Bert, given))


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        build=_build_llama,
        loss=lambda module, *, loss_chunk: llama.next_token_loss(
            module, sequences_per_chunk=loss_chunk
        ),
        rules=llama.RULES,
        weight_map=LLAMA,
        label_params=LLAMA.label_params,
    ),
    "bert": Architecture(
        build=_build_bert,
        loss=lambda module, **_: bert.classification_loss(module),
        data="labelled",
        rules=bert.RULES,
        weight_map=BERT,
        label_params=BERT.label_params,
    ),
}
"""Architectures by name, for the knob `model.arch`."""
