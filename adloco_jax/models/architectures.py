"""The table of model architectures (`ARCHITECTURES`), and the type of its entries.

A *tap* measures gradient norms of examples (`models.layers`). An *adapter* is low-rank matrices
that are trained beside frozen weights.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

from jaxtyping import PyTree

from adloco_jax.core.types import LossFn
from adloco_jax.models import bert, llama
from adloco_jax.models.layers import Adapter, Rule
from adloco_jax.models.weight_maps import BERT, LLAMA, WeightMap


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model architecture: an entry of the table `ARCHITECTURES`.

    Attributes:
      build: `build(*, ...)` returns a Flax module whose `init(key, tokens_BL)["params"]` is a tree
        of arrays. Keywords, others to be ignored by `**_`: the sizes of the group `model`, `dtype`,
        `remat`, `checkpoint` (the text of the `config.json` of `model.init_from`, or empty),
        `attention` ("xla", or "cudnn" if `build` names the keyword and the device allows it),
        `adapter` (given only if `build` names the keyword, which says that it can have one),
        `layer_form` (see `models.kernels.run_layers`).
      loss: `loss(module, *, loss_chunk)` returns `loss_fn(params, rows)`, the mean loss over int32
        rows. With the keyword `tap_B` (`models.layers`), batch-size tests measure by taps. With an
        adapter, `loss_fn` is given the frozen weights as the keyword `base`.
      data: "text": rows of L + 1 tokens, loss in nats per token. "labelled": rows
        [label, number of tokens n, L tokens], loss in nats per example.
      separates_documents: Whether `loss_fn` also takes `row_batch.RowBatch` as rows, so that
        `data.attention` may limit attention to documents, and text may be chats.
      rules: Conditions on the group `model`, checked with the config.
      weight_map: Hugging Face names of the parameters, which exports and `model.init_from` need.
      label_params: Maps the parameters to a tree of labels, by which optimizers and aggregators
        tell kinds apart: "matrix" for a hidden layer's matrix [in, out], "embedding", "head" or
        "other", with the prefix "stacked_" if the first axis counts layers. None: by shape.
    """

    build: Callable[..., Any]
    loss: Callable[..., LossFn]
    data: Literal["text", "labelled"] = "text"
    separates_documents: bool = False
    rules: tuple[Rule, ...] = ()
    weight_map: WeightMap | None = None
    label_params: Callable[[PyTree], PyTree] | None = None


def _attributes(weights: WeightMap, checkpoint: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes with which the class `weights.model` is built, by name.

    Args:
      weights: The architecture's weight map.
      checkpoint: The text of a checkpoint's config.json, which describes more than the sizes. Empty
        if there is no checkpoint.
      keywords: Keywords of `Architecture.build`. Those that name no attribute are ignored. Others
        replace what the checkpoint says.

    Raises:
      Unusable: If the checkpoint's config.json describes a model that is not supported.
    """
    attributes: dict[str, Any] = {}
    if checkpoint:
        attributes = weights.attributes(json.loads(checkpoint))
    for field in dataclasses.fields(weights.model):
        if field.name in keywords:
            attributes[field.name] = keywords[field.name]
    return attributes


# `_build_llama` and `_build_bert` take all keywords of `Architecture.build` (`**keywords`), and
# `_attributes` chooses those that name attributes of the model.


def _build_llama(
    *, attention: str, checkpoint: str, adapter: Adapter | None = None, **keywords: Any
) -> llama.Llama:
    """Build a Llama."""
    attributes = _attributes(LLAMA, checkpoint, keywords)
    return llama.Llama(**attributes, attention=attention, adapter=adapter)


def _build_bert(*, checkpoint: str, **keywords: Any) -> bert.Bert:
    """Build a Bert."""
    return bert.Bert(**_attributes(BERT, checkpoint, keywords))


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        build=_build_llama,
        loss=lambda module, *, loss_chunk: llama.next_token_loss(
            module, sequences_per_chunk=loss_chunk
        ),
        separates_documents=True,
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
"""Architectures by name, for the option `model.arch`."""
