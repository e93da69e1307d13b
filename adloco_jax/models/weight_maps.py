"""Names that Hugging Face checkpoints have for the parameters and sizes of the models here.

This module reads no files.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import PyTree

from adloco_jax.models.bert import Bert
from adloco_jax.models.llama import Llama

Fault = Callable[[str, object, object], None]
"""`fault(key, have, need)` records an unusable value of config.json."""


@dataclasses.dataclass(frozen=True)
class WeightMap:
    """How a model's parameters and sizes are named in a checkpoint in Hugging Face layout.

    Attributes:
      model: The Flax module's class.
      model_type: The value of `model_type` in config.json.
      class_name: The class of `transformers` that loads the folder.
      modules: Maps the path of each module in this package's parameter tree to the path of the
        module in a Hugging Face checkpoint, with `{}` for the number of the layer. An array
        `kernel` is the transposed `weight` of the checkpoint, `scale` and `embedding` are its
        `weight`, and `bias` is its `bias`.
      head: Path of the module that is initialised at random if a checkpoint does not have it.
      sizes: Maps a key of config.json to a pair: the attribute of `model`, and the default if the
        key is absent. The key is required if the default is None.
      fixed: Maps keys of config.json to the values that they must have if they are present. Other
        values describe a model that is not supported.
      normalise: `normalise(content, fault) -> content` converts other spellings of config.json to
        the keys of `sizes` and `fixed`.
      extra: `extra(model)` returns the entries of config.json that neither `sizes` nor `fixed` has,
        for an export.
      ties: Maps a tensor to another one that has the same values if config.json sets
        `tie_word_embeddings`. One of the two may then be absent from the checkpoint.
      free: Attributes of `model` that may differ from those of the checkpoint, because no weight
        depends on them.
    """

    model: type[nn.Module]
    model_type: str
    class_name: str
    modules: Mapping[str, str]
    head: str
    sizes: Mapping[str, tuple[str, object]]
    fixed: Mapping[str, object]
    normalise: Callable[[dict, Fault], dict] = lambda content, fault: content
    extra: Callable[[Any], dict] = lambda model: {}
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    free: frozenset[str] = frozenset()

    def label_params(self, params: PyTree) -> PyTree:
        """Label each parameter by its path, with the labels of `Architecture.label_params`.

        A leaf whose path is not in `modules` is labelled by its shape.
        """

        def label(path: tuple, leaf: Any) -> str:
            *names, kind = (str(getattr(key, "key", key)) for key in path)
            module = "/".join(names)
            stacked = "stacked_" if "{}" in self.modules.get(module, "") else ""
            if kind == "embedding" and module in self.modules:
                return f"{stacked}embedding"
            if leaf.ndim - bool(stacked) != 2:
                return f"{stacked}other"
            return "head" if module == self.head else f"{stacked}matrix"

        return jax.tree.map_with_path(label, params)


_SIZES = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("width", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("num_heads", None),
    "intermediate_size": ("mlp_width", None),
    "max_position_embeddings": ("max_length", None),
}


def _normalised_llama(content: dict, fault: Fault) -> dict:
    rope: Mapping = {}
    for key in ("rope_parameters", "rope_scaling"):  # transformers takes the second if both exist
        found = content.get(key) or {}
        if not isinstance(found, Mapping):
            fault(key, found, "an object or null")
            continue
        if (kind := found.get("rope_type", found.get("type", "default"))) != "default":
            fault(f"{key}: rope type", kind, "default")
        rope = found or rope
    theta = rope.get("rope_theta", content.get("rope_theta", 10_000.0))
    kv_heads = content.get("num_key_value_heads")
    if kv_heads is None:  # an old file; the model has as many key/value heads as query heads
        kv_heads = content.get("num_attention_heads")
    return content | {"rope_theta": theta, "num_key_value_heads": kv_heads}


def _normalised_bert(content: dict, fault: Fault) -> dict:
    labels = content.get("id2label")
    num_classes = len(labels) if isinstance(labels, dict) else content.get("num_labels", 2)
    problem = content.get("problem_type") or "single_label_classification"
    return content | {"num_labels": num_classes, "problem_type": problem}


def _extra_llama(model: Llama) -> dict:
    return {
        # transformers 5 reads the rotary base here; transformers 4 reads the key `rope_theta`.
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _extra_bert(model: Bert) -> dict:
    labels = {str(label): f"LABEL_{label}" for label in range(model.num_classes)}
    return {
        "id2label": labels,
        "label2id": {name: int(label) for label, name in labels.items()},
        "hidden_dropout_prob": 0.0,  # the model was trained without dropout
        "attention_probs_dropout_prob": 0.0,
    }


_LLAMA_LAYER, _BERT_LAYER = "model.layers.{}.", "bert.encoder.layer.{}."

LLAMA = WeightMap(
    model=Llama,
    model_type="llama",
    class_name="LlamaForCausalLM",
    modules={
        "embed": "model.embed_tokens",
        "layers/attention_norm": f"{_LLAMA_LAYER}input_layernorm",
        "layers/attention/query": f"{_LLAMA_LAYER}self_attn.q_proj",
        "layers/attention/key": f"{_LLAMA_LAYER}self_attn.k_proj",
        "layers/attention/value": f"{_LLAMA_LAYER}self_attn.v_proj",
        "layers/attention/out": f"{_LLAMA_LAYER}self_attn.o_proj",
        "layers/mlp_norm": f"{_LLAMA_LAYER}post_attention_layernorm",
        "layers/mlp/gate": f"{_LLAMA_LAYER}mlp.gate_proj",
        "layers/mlp/up": f"{_LLAMA_LAYER}mlp.up_proj",
        "layers/mlp/down": f"{_LLAMA_LAYER}mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    head="head",
    sizes={
        **_SIZES,
        "num_key_value_heads": ("num_kv_heads", None),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "rope_theta": ("rope_theta", None),
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    normalise=_normalised_llama,
    extra=_extra_llama,
    ties={"lm_head.weight": "model.embed_tokens.weight"},
    free=frozenset({"max_length"}),
)

BERT = WeightMap(
    model=Bert,
    model_type="bert",
    class_name="BertForSequenceClassification",
    modules={
        "embed": "bert.embeddings.word_embeddings",
        "position": "bert.embeddings.position_embeddings",
        "token_type": "bert.embeddings.token_type_embeddings",
        "embed_norm": "bert.embeddings.LayerNorm",
        "layers/attention/query": f"{_BERT_LAYER}attention.self.query",
        "layers/attention/key": f"{_BERT_LAYER}attention.self.key",
        "layers/attention/value": f"{_BERT_LAYER}attention.self.value",
        "layers/attention/out": f"{_BERT_LAYER}attention.output.dense",
        "layers/attention_norm": f"{_BERT_LAYER}attention.output.LayerNorm",
        "layers/mlp/up": f"{_BERT_LAYER}intermediate.dense",
        "layers/mlp/down": f"{_BERT_LAYER}output.dense",
        "layers/mlp_norm": f"{_BERT_LAYER}output.LayerNorm",
        "pooler": "bert.pooler.dense",
        "classifier": "classifier",
    },
    head="classifier",
    sizes={
        **_SIZES,
        "num_labels": ("num_classes", None),
        "type_vocab_size": ("type_vocab_size", 2),
        "layer_norm_eps": ("norm_eps", 1e-12),
    },
    fixed={
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "problem_type": "single_label_classification",
    },
    normalise=_normalised_bert,
    extra=_extra_bert,
)
