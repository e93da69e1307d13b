"""Names that Hugging Face checkpoints have for the parameters and sizes of the models here.

`LLAMA` and `BERT` are the two maps. *content* is the dict of a checkpoint's file config.json; its
`model_type` is the *family*, such as "qwen3", and determines how other keys are read. Functions
raise `Unusable` for the first key that describes a model which is not supported.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from jaxtyping import PyTree

from adloco_jax.core.types import label_by_name
from adloco_jax.errors import reason
from adloco_jax.models.bert import Bert
from adloco_jax.models.llama import LayerKind, Llama, RopeScaling


class Unusable(ValueError):
    """Error: a value of config.json describes a model that is not supported.

    `have` is the value of `key`, of which the message shows 80 characters, and `need` says which
    values are supported.
    """

    def __init__(self, key: str, have: object, need: object):
        super().__init__(f"{key}: have {str(have)[:80]}, need {need}")


@dataclasses.dataclass(frozen=True)
class WeightMap:
    """How a model's parameters and sizes are named in a checkpoint in Hugging Face layout.

    Attributes:
      model: The Flax module's class.
      classes: From each `model_type` of config.json to the class of `transformers` that loads it.
      modules: From the path of a module here, such as "layers/mlp/up", to its name in the
        checkpoint, with `{}` for the number of the layer. The parameter `kernel` is the transposed
        tensor `weight`; `scale` and `embedding` are `weight`.
      head: Path of the module here that is initialised at random if a checkpoint does not have it.
      sizes: From a key of config.json to the name of an attribute of `model` and the default of
        its value. A key without a default (None) is required.
      fixed: Values that keys of config.json must have if present; with others a model is not
        supported.
      normalise: `normalise(content)` returns a dict with the keys of `sizes` and `fixed`, from a
        config.json that may spell them in other ways. It may raise `Unusable`.
      features: `features(content, sizes)` returns a dict of the attributes of `model` that are not
        sizes. `content` is a result of `normalise`, `sizes` a dict of the attributes that are. It
        may raise `Unusable`.
      extra: `extra(model)` returns those entries of config.json for an export that `sizes` and
        `fixed` do not determine, such as `model_type`, in the spelling of `normalise`.
      ties: From the name of a tensor to another with the same values under `tie_word_embeddings`.
        One of the two may then be absent.
      free: Attributes that may differ from the checkpoint's, because no weight depends on them.
      prefix: Start of the names of all modules but the head. The names may lack it in a checkpoint
        of the model without its head.
    """

    model: type[nn.Module]
    classes: Mapping[str, str]
    modules: Mapping[str, str]
    head: str
    sizes: Mapping[str, tuple[str, object]]
    fixed: Mapping[str, object]
    extra: Callable[[Any], dict]
    normalise: Callable[[dict], dict] = lambda content: content
    features: Callable[[dict, dict], dict] = lambda content, sizes: {}
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    free: frozenset[str] = frozenset()
    prefix: str = ""

    def attributes(self, content: dict) -> dict[str, Any]:
        """Return the keywords with which to build the `model` that a config.json describes.

        Raises Unusable for the first key that describes a model which is not supported.
        """
        return self.attributes_of_normalised(self.normalise(content))

    def attributes_of_normalised(self, content: dict) -> dict[str, Any]:
        """Return the keywords with which to build `model`; `content` is a result of `normalise`.

        Raises Unusable for the first key that describes a model which is not supported.
        """
        # The types of the model's attributes, int or float for sizes.
        types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(self.model)}
        sizes: dict[str, Any] = {}
        for key, (attribute, default) in self.sizes.items():
            value = content.get(key, default)
            sizes[attribute] = _positive(key, value, types[attribute])  # or Unusable
        _require(content, self.fixed)
        return sizes | self.features(content, sizes)

    def label_params(self, params: PyTree) -> PyTree:
        """Return a tree of labels for optimizers, in the structure of `params`.

        A parameter of a module in `modules` is a "matrix", an "embedding", the "head" or "other",
        with the prefix "stacked_" if its first axis counts layers. Others get such a label by their
        own names and numbers of axes (`core.types.label_by_name`).
        """

        def label(path: tuple, leaf: Any) -> str | None:
            """Return the label of the leaf at a path of JAX keys; None outside of `modules`.

            A key of a dict has its name in the attribute `key`.
            """
            names = [str(getattr(key, "key", key)) for key in path]
            module = "/".join(names[:-1])
            name = names[-1]
            if module not in self.modules:
                return None
            is_stacked = "{}" in self.modules[module]  # the first axis counts layers
            prefix = "stacked_" if is_stacked else ""
            num_axes = leaf.ndim - 1 if is_stacked else leaf.ndim
            if name == "embedding":
                return prefix + "embedding"
            if num_axes != 2:
                return prefix + "other"
            return "head" if module == self.head else prefix + "matrix"

        return label_by_name(params, label)


# The part of `WeightMap.sizes` that both models have.
_SIZES = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("width", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("num_heads", None),
    "intermediate_size": ("mlp_width", None),
    "max_position_embeddings": ("max_length", None),
}


def _positive(key: str, value: Any, kind: type) -> Any:
    """Return `value`, the value of `key`, as an int or float (`kind`).

    Raises Unusable unless it is a positive number below a limit. A `kind` of float takes an int.
    """
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)  # a bool is an int
    limit = 2**31  # of int32
    if key == "num_hidden_layers":
        limit = 2**12  # one entry for each layer is held in lists
    if not is_number or not 0 < value < limit:
        raise Unusable(key, value, f"a positive {kind.__name__} below {limit}")
    return kind(value)


def _require(content: dict, fixed: Mapping[str, object]) -> None:
    """Raise Unusable if a key of `fixed` is in `content`, with another value than in `fixed`."""
    for key, need in fixed.items():
        if content.get(key, need) != need:
            raise Unusable(key, content[key], need)


def _pad_id(content: dict) -> int | None:
    """Return the id of padding, whose embedding PyTorch does not train; None if there is none.

    In config.json it is `pad_token_id`; a negative one counts from the end of the vocabulary.
    Raises Unusable if it is not an id of the vocabulary.
    """
    pad_id = content.get("pad_token_id")
    size = content["vocab_size"]
    if pad_id is None:
        return None
    if not isinstance(pad_id, int) or not -size <= pad_id < size:
        raise Unusable("pad_token_id", pad_id, f"null or an id below {size}")
    return pad_id % size


# Values that these keys of a Gemma must have, if present.
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
# The keys of each family that switch biases on; a family that is not here ignores these keys.
_BIASES = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "smollm3": ("attention_bias", "mlp_bias"),
    "gemma3_text": ("attention_bias",),
}
# The names of `layer_types`.
_FULL = "full_attention"
_SLIDING = "sliding_attention"
# The supported values of `rope_type`, each with the keys of the fields of `RopeScaling`, in order.
_ROPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _normalised_llama(content: dict) -> dict:
    """Return a Llama's content with the keys that the class in transformers has.

    The class fills in defaults, and renames keys of older versions. Set here are `rope_parameters`
    (one dict, maybe empty), `rope_theta` and, for Gemma, `sliding_rope`, a dict of the same keys
    for its layers of sliding attention. Raises Unusable if a size is missing or no positive number,
    transformers refuses the content, or the layers have several rotary objects.
    """
    from transformers import CONFIG_MAPPING  # slow, and needed only for a checkpoint

    # Sizes that are missing are not filled in: a checkpoint without them is refused.
    sizes = {key: _positive(key, content.get(key), int) for key in _SIZES}
    try:
        # A copy, because transformers may change what it is given.
        config = CONFIG_MAPPING[content["model_type"]].from_dict(copy.deepcopy(content))
        config.standardize_rope_params()  # into `rope_parameters`, from keys of older versions
        filled = config.to_dict()
    except Exception as error:  # deliberately broad, because each version raises its own kinds
        raise Unusable("keys", "one that transformers refuses", reason(error, limit=200)) from error

    rope = filled.get("rope_parameters") or {}
    if content["model_type"] == "gemma3_text":  # has one object for each type of layers
        filled["sliding_rope"] = rope.get(_SLIDING) or {}
        rope = rope.get(_FULL) or {}
    if not isinstance(rope, Mapping) or any(isinstance(part, Mapping) for part in rope.values()):
        raise Unusable("rope_parameters", rope, "one object for all layers, or null")

    # Null means false. Only false is supported, and compared with (`_GEMMA`).
    filled["use_bidirectional_attention"] = filled.get("use_bidirectional_attention") or False
    filled["rope_parameters"] = rope
    filled["rope_theta"] = rope.get("rope_theta")
    return filled | sizes  # sizes as the checkpoint has them


def _rope_scaling(rope: Mapping) -> RopeScaling | None:
    """Return how the model divides rotary frequencies; None: it does not.

    `rope` is the value of `rope_parameters`, or of one type of layers in it. Raises Unusable if its
    type is not in `_ROPES`, it rotates only a part of each head, or its numbers are out of range.
    """
    key = "rope_parameters"
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPES:
        raise Unusable(f"{key}: rope type", kind, " or ".join(_ROPES))
    rotated_part = rope.get("partial_rotary_factor", 1.0)
    if rotated_part != 1.0:
        raise Unusable(f"{key}: partial_rotary_factor", rotated_part, 1.0)
    if kind == "default":
        return None
    # The types of the fields of `RopeScaling`. "linear" has a key for the first one only.
    field_types = (float, float, float, int)
    numbers = []
    for name, field_type in zip(_ROPES[kind], field_types, strict=False):
        numbers.append(_positive(f"{key}: {name}", rope.get(name), field_type))
    scaling = RopeScaling(*numbers)
    if scaling.low >= scaling.high:
        raise Unusable(f"{key}: high_freq_factor", scaling.high, f"more than {scaling.low}")
    return scaling


def _layer_kinds(content: dict, full: LayerKind, count: int) -> tuple[LayerKind, ...]:
    """Return how positions enter the layers of a Llama: one kind of each layer, or one for all.

    A layer of full attention attends to all positions before, one of sliding attention to a window
    (`sliding_window`) of them.

    Args:
      content: A result of `_normalised_llama`.
      full: The kind of a layer of full attention, with the model's rotary frequencies.
      count: Number of layers, and of kinds unless there is one for all.

    Raises:
      Unusable: If the lists in `content` do not describe so many layers, or a window or a rotary
        base is not a positive number.
    """
    family = content["model_type"]
    if family == "llama":  # full attention in all layers
        return (full,)
    window = content.get("sliding_window")
    if window is not None:
        window = _positive("sliding_window", window, int)
    if family == "mistral":  # the window in all layers
        return (full._replace(window=window),)

    # In all other families `layer_types` says which layers have the window.
    layer_types = content.get("layer_types") or ()
    sliding = full._replace(window=window)
    if family == "gemma3_text":  # there these layers have rotary frequencies of their own
        rope = content["sliding_rope"]
        theta = _positive("rope_parameters: rope_theta", rope.get("rope_theta"), float)
        sliding = LayerKind(theta, _rope_scaling(rope), window)
    is_rotated = [True] * count
    if family == "smollm3":  # there some layers do not rotate queries and keys
        is_rotated = content["no_rope_layers"]  # 1 for a layer that rotates, despite the name

    is_complete = len(layer_types) == count and len(is_rotated) >= count
    if not is_complete or not set(layer_types) <= {_FULL, _SLIDING}:
        raise Unusable("layer_types", layer_types, f"a list of {count} names {_FULL} or {_SLIDING}")
    kinds = []
    for layer, layer_type in enumerate(layer_types):
        kind = full if layer_type == _FULL else sliding
        if not is_rotated[layer]:
            kind = LayerKind(rope_theta=None, window=kind.window)
        kinds.append(kind)
    return tuple(kinds)


def _llama_features(content: dict, sizes: dict) -> dict[str, Any]:
    """Return the attributes of a Llama that are not sizes, by the keys of its family.

    `content` is a result of `_normalised_llama`, and `sizes` has the attributes of `LLAMA.sizes`.
    Raises Unusable if a key says what is not supported, such as another activation.
    """
    family = content["model_type"]
    # Whether the keys that switch biases on are true; a key that the family ignores is absent.
    biases = {key: bool(content.get(key)) for key in _BIASES.get(family, ())}
    qkv_bias = biases.get("attention_bias", False)

    # Layers that are alike, with the model's rotary frequencies, are described by the attributes
    # `rope_theta`, `rope_scaling` and `window`, all others by `layer_kinds`.
    full = LayerKind(sizes["rope_theta"], _rope_scaling(content["rope_parameters"]))
    kinds = _layer_kinds(content, full, sizes["num_layers"])
    is_uniform = len(set(kinds)) == 1 and kinds[0]._replace(window=None) == full

    is_gemma = family == "gemma3_text"
    _require(content, _GEMMA if is_gemma else {"hidden_act": "silu"})
    query_size = None  # the size of a head
    if is_gemma:
        scalar = content.get("query_pre_attn_scalar")
        query_size = _positive("query_pre_attn_scalar", scalar, float)

    head_size = content.get("head_dim")
    if head_size is not None:
        head_size = _positive("head_dim", head_size, int)
        if head_size * sizes["num_heads"] == sizes["width"]:
            head_size = None  # the usual one

    return {
        "rope_scaling": full.rope_scaling,
        "head_size": head_size,
        "window": kinds[0].window if is_uniform else None,
        "layer_kinds": None if is_uniform else kinds,
        "qkv_bias": family == "qwen2" or qkv_bias,  # without a key, a Qwen2 always has them
        "out_bias": qkv_bias,
        "mlp_bias": biases.get("mlp_bias", False),
        "qk_norm": family in ("qwen3", "gemma3_text"),
        "out_norms": is_gemma,
        "norm_offset": 1.0 if is_gemma else 0.0,
        "query_size": query_size,
        "activation": "gelu_tanh" if is_gemma else "silu",
        "scales_embedding": is_gemma,
        "tied": bool(content.get("tie_word_embeddings")),
        "pad_id": _pad_id(content),
    }


def _normalised_bert(content: dict) -> dict:
    """Return a BERT's content with the defaults that transformers fills in.

    They are the id of padding, the number of classes and the problem type. Without names of classes
    (`id2label`) and a number, transformers assumes two classes.
    """
    labels = content.get("id2label")  # an object with a name for each class
    filled = {"pad_token_id": 0} | content
    if isinstance(labels, dict):
        filled["num_labels"] = len(labels)
    else:
        filled["num_labels"] = content.get("num_labels", 2)
    filled["problem_type"] = content.get("problem_type") or "single_label_classification"
    return filled


def _extra_llama(model: Llama) -> dict:
    """Return entries of config.json that describe a model of the family "llama".

    Models of other families are exported with the config.json that they came with.
    """
    rope = {"rope_theta": model.rope_theta, "rope_type": "default"}
    scaling = model.rope_scaling
    if scaling is not None:
        rope["rope_type"] = "llama3" if scaling.original_length else "linear"
        # `_ROPES` has the keys of the fields in order; "linear" has the first one only.
        for key, number in zip(_ROPES[rope["rope_type"]], scaling, strict=False):
            rope[key] = number
    return {
        "model_type": "llama",
        "head_dim": model.head_size or model.width // model.num_heads,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "hidden_act": "silu",
        # transformers 5 reads the rotary base here; transformers 4 reads the key `rope_theta`.
        "rope_parameters": rope,
        "rope_scaling": rope if scaling else None,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": model.pad_id,
    }


def _extra_bert(model: Bert) -> dict:
    """Return entries of config.json that describe a Bert; its classes are named by numbers."""
    labels = {str(label): f"LABEL_{label}" for label in range(model.num_classes)}
    return {
        "model_type": "bert",
        "id2label": labels,
        "label2id": {name: int(label) for label, name in labels.items()},
        "hidden_dropout_prob": 0.0,  # the model was trained without dropout
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": model.pad_id,
    }


_LLAMA_LAYER = "model.layers.{}."
_BERT_LAYER = "bert.encoder.layer.{}."

LLAMA = WeightMap(
    model=Llama,
    classes={
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
    },
    modules={
        "embed": "model.embed_tokens",
        "layers/attention_norm": f"{_LLAMA_LAYER}input_layernorm",
        "layers/attention/query": f"{_LLAMA_LAYER}self_attn.q_proj",
        "layers/attention/key": f"{_LLAMA_LAYER}self_attn.k_proj",
        "layers/attention/value": f"{_LLAMA_LAYER}self_attn.v_proj",
        "layers/attention/query_norm": f"{_LLAMA_LAYER}self_attn.q_norm",
        "layers/attention/key_norm": f"{_LLAMA_LAYER}self_attn.k_norm",
        "layers/attention/out": f"{_LLAMA_LAYER}self_attn.o_proj",
        "layers/mlp_norm": f"{_LLAMA_LAYER}post_attention_layernorm",
        "layers/attention_out_norm": f"{_LLAMA_LAYER}post_attention_layernorm",
        "layers/mlp_in_norm": f"{_LLAMA_LAYER}pre_feedforward_layernorm",
        "layers/mlp_out_norm": f"{_LLAMA_LAYER}post_feedforward_layernorm",
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
    fixed={"is_causal": True, "quantization_config": None},
    normalise=_normalised_llama,
    features=_llama_features,
    extra=_extra_llama,
    ties={"lm_head.weight": "model.embed_tokens.weight"},
    free=frozenset({"max_length"}),
    prefix="model.",
)

BERT = WeightMap(
    model=Bert,
    classes={"bert": "BertForSequenceClassification"},
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
        "quantization_config": None,
    },
    normalise=_normalised_bert,
    features=lambda content, sizes: {"pad_id": _pad_id(content)},
    extra=_extra_bert,
    prefix="bert.",
)
