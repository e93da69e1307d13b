"""Read and write models in Hugging Face layout: `config.json`, safetensors, tokenizer files.

Every tensor's name, shape and type is checked; `models.weight_maps` has the names.
"""

import collections
import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree
from pydantic import Field
from safetensors.numpy import save_file

from adloco_jax.data.disk import replaced_folder
from adloco_jax.data.files import fetched, is_address, is_on_hub
from adloco_jax.data.formats import Format, checked, read_json
from adloco_jax.data.tokenizers import GENERATION, Tokenizer, stop_ids
from adloco_jax.errors import ConfigError, DataError, UserError
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.models.layers import Adapter, merge_adapter, param_shapes, with_adapter
from adloco_jax.models.quantised import QUANTISED, quantise
from adloco_jax.models.weight_maps import Unusable, WeightMap
from adloco_jax.settings import ModelSettings

_JSON: Any = {"max_bytes": 2**26, "links": True}  # how config.json and an index file are read
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The files that may have the weights, or an index of other files; the first that exists is read.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Buffers (constant tensors) that old versions of transformers saved; config.json determines them.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|bert\.embeddings\.position_ids")
_CONVERT = "convert with `save_pretrained(..., safe_serialization=True)`"
_HEADS = re.compile(r"(lm_head|classifier|score|qa_outputs|cls)\..*")


_TENSORS = {"bias": "{}.bias"}
_TENSORS |= {f"lora_{x}": f"base_model.model.{{}}.lora_{x.upper()}.weight" for x in "ab"}
_TRANSPOSED = ("kernel", "lora_a", "lora_b")
# Keys of an adapter_config.json that are read, or change no output of a trained adapter.
_READ = {"base_model_name_or_path", "r", "lora_alpha", "target_modules", "revision"}
_HARMLESS = {"auto_mapping", "inference_mode", "lora_dropout", "peft_version", "task_type"}
_HARMLESS |= {"layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"}  # of others
# Those of an initialisation, which `init_lora_weights` names.
_HARMLESS |= {"corda_config", "eva_config", "loftq_config", "lora_ga_config"}
# What all other keys, also those that are not known, may say: these, or nothing. PEFT's other
# initialisations change the base weights, also when an adapter is loaded.
_PLAIN = {"peft_type": ["LORA"], "bias": ["none"]}
_PLAIN |= {"init_lora_weights": [True, "gaussian", "eva", "orthogonal", "mica"]}


class PretrainedModel(NamedTuple):
    """A model that was read from a checkpoint.

    Attributes:
      network: The model, in float32; `network.clone(dtype=...)` computes in another dtype.
      params: Its parameters, NumPy arrays, of which some are transposed views; None from `inspect`.
      stored_as: Dtypes of the weights in the checkpoint, such as `("bfloat16",)`; empty if only
        `config.json` was read.
      left_out: Names of tensors that were not read: they belong to a head that the model lacks.
      config: The content of the checkpoint's `config.json`, for `save`.
      lacks: Name of the head among the parameters, if the checkpoint has none; else empty.
      ends: Ids at which generation stops by the checkpoint, of its generation_config.json, or else
        its config.json.
      base: The frozen weights as programs take them, if asked for: `params` are then the
        adapter's, or None.
      sha256: Hash of the weights as published, without an adapter.
    """

    network: nn.Module
    params: PyTree
    stored_as: tuple[str, ...]
    left_out: tuple[str, ...]
    config: dict[str, Any]
    lacks: str
    ends: tuple[int, ...] = ()
    base: PyTree = None
    sha256: str = ""


def weight_map(network: nn.Module) -> WeightMap | None:
    """Return the Hugging Face names of a model's parameters, if an architecture has any."""
    for known in _weight_maps():
        if type(network) is known.model:
            return known
    return None


class Tensor(NamedTuple):
    """A tensor of a checkpoint, and the place of its values in this package's parameter tree.

    `path` is that of the leaf with its values, and `layer` the index on the leaf's first axis if it
    stacks layers, else `...`. `transposed` says whether the checkpoint has the leaf's transpose.
    """

    name: str
    path: tuple[str, ...]
    layer: int | EllipsisType
    transposed: bool

    def of(self, leaf: np.ndarray) -> np.ndarray:
        """Return the part of `leaf`, the array at `path`, that is this tensor, as a view."""
        part = leaf[self.layer]
        return part.T if self.transposed else part

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array for the leaf, in whose memory the tensor is contiguous."""
        if not self.transposed:
            return np.empty(shape, dtype)
        return np.empty((*shape[:-2], *shape[:-3:-1]), dtype).swapaxes(-1, -2)


def tensors(network: nn.Module, names: WeightMap) -> list[Tensor]:
    """List the tensors of a model's checkpoint in Hugging Face layout."""
    found = []
    for path, leaf in _leaves(param_shapes(network)).items():
        *modules, kind = path
        module = names.modules["/".join(modules)]
        name = _TENSORS.get(kind, "{}.weight").replace("{}", module)
        transposed = kind in _TRANSPOSED
        if "{}" not in name:
            found.append(Tensor(name, path, ..., transposed))
            continue
        for layer in range(leaf.shape[0]):
            found.append(Tensor(name.format(layer), path, layer, transposed))
    return found


def _low_rank(network: nn.Module) -> list[Tensor]:
    """List the tensors of a model's adapter, as PEFT names them."""
    names = weight_map(network)
    assert names is not None, "only models with names can have an adapter"
    return [tensor for tensor in tensors(network, names) if ".lora_" in tensor.name]


def load(
    path_or_name: str | Path,
    *,
    head: bool = True,
    merges: bool = False,
    base_dtype: str | None = None,
    as_trained: bool = False,
    revision: str | None = None,
    key: str = "model.init_from",
) -> PretrainedModel:
    """Read a model and its weights from a checkpoint in Hugging Face layout.

    The model may be of any family in `models.weight_maps`, or an added architecture with a weight
    map.

    Args:
      path_or_name: A folder, its address (`data.files`), or a repository on the hub, with
        `config.json` and `model.safetensors`, or safetensors files with an index. What is in the
        cache is not downloaded again.
      head: Whether the checkpoint must have the head (the matrix to the vocabulary or to the
        classes). If False, the returned parameters may lack it; a head of another kind is not read.
      merges: Whether an adapter is added to the weights that it belongs to.
      base_dtype: How frozen weights are held, as `model.base_dtype` says. None: none are frozen,
        and all are float32.
      as_trained: Whether the base of an adapter is held as the run held it that trained the
        adapter, if that is recorded.
      revision: Branch, tag or commit of a repository on the hub. None: its main branch.
      key: The config's key, or the option, that messages mention.

    Returns:
      The model and its weights. Head and embedding are one parameter if the checkpoint declares
      them tied, unless both are stored and differ.

    Raises:
      ConfigError: If the hub has no such repository, or it has no safetensors.
      ResourceError: If the hub cannot be reached.
      DataError: If the architecture is another, or tensors are missing, unexpected, stored twice,
        of a wrong shape, not of a float dtype or not finite, or an adapter's base has other weights
        than recorded.
    """
    with _folder(str(path_or_name), ["*.safetensors"], key=key, revision=revision) as folder:
        if (folder / _ADAPTER).exists():
            return _load_adapter(
                folder,
                merges=merges,
                head=head,
                base_dtype=base_dtype,
                as_trained=as_trained,
                key=key,
            )
        found, stored = _checked(folder, needs_head=head)
        digest = hashlib.sha256()
        params = base = None
        if base_dtype is None:
            params = _values(found.network, stored, digest)
        else:
            base = _frozen(stored, base_dtype, digest)
        ends = stop_ids(folder, getattr(found.network, "vocab_size", 0))
        return found._replace(params=params, base=base, sha256=digest.hexdigest(), ends=ends)


def _read(
    stored: "Mapping[Tensor, _Stored]", digest: "hashlib._Hash"
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Read tensors one at a time, as they are stored; add each to a hash."""
    for tensor, where in stored.items():
        values = where.read()
        digest.update(f"{tensor.name} {where.kind} {where.shape}".encode())
        digest.update(values.view(np.uint8).data)
        if where.kind == "F64":
            values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise DataError(f"{where.file}: {tensor.name}: not all of its numbers are finite")
        yield tensor, values


def _values(
    network: nn.Module, stored: "Mapping[Tensor, _Stored]", digest: "hashlib._Hash"
) -> PyTree:
    """Read tensors; return the parameters that they are, float32."""
    shapes, leaves = _leaves(param_shapes(network)), {}
    for tensor, values in _read(stored, digest):
        if tensor.path not in leaves:
            leaves[tensor.path] = tensor.empty(shapes[tensor.path].shape, "float32")
        tensor.of(leaves[tensor.path])[...] = values
    return unflatten_dict(leaves)


def _frozen(stored: "Mapping[Tensor, _Stored]", dtype: str, digest: "hashlib._Hash") -> PyTree:
    """Read tensors; return them as `as_held` does. The host has one tensor that is not yet so."""
    whole = {}
    apart = collections.defaultdict(list)  # a leaf for each layer
    for tensor, values in _read(stored, digest):
        held = _held(tensor.path, values.T if tensor.transposed else values, dtype)
        if tensor.layer is ...:
            whole[tensor.path] = held
        else:
            apart[tensor.path].append(held)
    layers = {path: tuple(arrays) for path, arrays in apart.items()}
    return unflatten_dict(whole | layers)


def as_held(base: PyTree, dtype: str) -> PyTree:
    """Hold frozen weights as `model.base_dtype` says: only matrices of layers are quantised.

    Those of layers are unstacked, because programs would copy a stack to take one out.
    """
    held = {}
    for path, leaf in _leaves(base).items():
        if path[0] == "layers":
            held[path] = tuple(_held(path, part, dtype) for part in leaf)
        else:
            held[path] = _held(path, leaf, dtype)
    return unflatten_dict(held)


def _held(path: tuple[str, ...], weight: Any, dtype: str) -> Any:
    """Hold the weight of a layer, or one that no layer has."""
    if dtype not in QUANTISED:
        return weight.astype(dtype, copy=False)
    if path[0] == "layers" and path[-1] == "kernel":
        return quantise(weight, dtype)
    return weight.astype("bfloat16", copy=False)


def _load_adapter(
    folder: Path,
    *,
    merges: bool,
    head: bool,
    base_dtype: str | None,
    as_trained: bool,
    key: str,
) -> PretrainedModel:
    """Read an adapter in PEFT's layout, and the model for which it was made."""
    content = _adapter_config(folder)
    name, revision = content["base_model_name_or_path"], content.get("revision")
    stored = _open(folder / _ADAPTER_WEIGHTS)
    with safetensors.safe_open(folder / _ADAPTER_WEIGHTS, framework="numpy") as file:
        metadata = file.metadata() or {}
    if as_trained:
        base_dtype = metadata.get("base_dtype") or None
    loaded = load(name, head=head, base_dtype=base_dtype, revision=revision, key=key)
    network = _adapted(folder, loaded.network, content)
    wanted = {tensor: tensor.name for tensor in _low_rank(network)}
    faults = [f"{folder}: {name}: unexpected" for name in stored.keys() - wanted.values()]
    faults += _unfit(folder, wanted, stored, network)
    if faults:
        raise DataError(_listed(faults))
    require_same_base(loaded, metadata.get("base_sha256", ""), f"{folder}: {name}")
    own = {tensor: stored[name] for tensor, name in wanted.items()}
    low_rank = _values(network, own, hashlib.sha256())
    if loaded.base is not None:
        return loaded._replace(network=network, params=low_rank)
    params = with_adapter(loaded.params, low_rank)
    if merges:
        return loaded._replace(params=merge_adapter(params, network.adapter))
    return loaded._replace(network=network, params=params)


def _adapter_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json`, of an adapter that is plain LoRA."""
    path = folder / _ADAPTER
    content = read_json(path, DataError, **_JSON)
    faults: list[tuple[str, str]] = []  # key, and what it must say
    for key in sorted(content.keys() - _READ - _HARMLESS):
        plain = _PLAIN.get(key, [])
        if content[key] not in [None, False, [], {}, "", *plain]:
            need = " or ".join(map(str, plain)) if plain else "none"
            faults.append((key, f"{need}; or merge_and_unload() in PEFT"))
    base = content.get("base_model_name_or_path")
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if not isinstance(base, str) or not base or _is_adapter(base, content.get("revision")):
        faults.append(("base_model_name_or_path", "a model, no adapter"))
    if type(rank) is not int or rank < 1:
        faults.append(("r", "a positive integer"))
    if not isinstance(alpha, int | float) or alpha <= 0:
        faults.append(("lora_alpha", "a positive number"))
    if faults:
        lines = [f"{path}: {key}: have {str(content.get(key))[:80]}, need {n}" for key, n in faults]
        raise DataError("\n".join(lines))
    return content


def _is_adapter(name: str, revision: str | None) -> bool:
    key = "base_model_name_or_path"
    with _folder(name, ["config.json", _ADAPTER], key=key, revision=revision) as folder:
        return (folder / _ADAPTER).exists()


def require_same_base(loaded: PretrainedModel, sha256: str, where: str) -> None:
    """Raise DataError if the hash of an adapter's base is known, and that of a model is another."""
    if sha256 and loaded.sha256 != sha256:
        need = "other weights than those for which the adapter was made"
        raise DataError(f"{where} has {need}; restore them")


def _adapted(folder: Path, network: Any, content: Mapping[str, Any]) -> Any:
    """Return a model with the adapter that the content of an `adapter_config.json` describes."""
    given, known = content.get("target_modules"), []
    targets = given if isinstance(given, list) and all(map(_is_text, given)) else []
    for layers in ("all", "attention", "mlp") if hasattr(network, "adapter") else ():
        adapter = Adapter(content["r"], float(content["lora_alpha"]), layers)
        found = network.clone(adapter=adapter)
        known.append(_targets(found))
        modules = _modules(found)
        of_target = [{m for m in modules if f".{m}".endswith(f".{name}")} for name in targets]
        # Each name stands for some module, and each module has a name.
        if all(of_target) and set().union(*of_target) == modules:
            return found
    need = " or ".join(map(", ".join, known)) or "a model that can have an adapter"
    raise DataError(
        f"{folder / _ADAPTER}: target_modules: have {str(given)[:200]}, need {need}, or names of"
        " the same modules; or merge_and_unload() in PEFT"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _modules(network: nn.Module) -> set[str]:
    """Return the names of the modules with an adapter, such as model.layers.0.mlp.up_proj."""
    start, end = "base_model.model.", r"\.lora_[AB]\.weight"
    names = (tensor.name.removeprefix(start) for tensor in _low_rank(network))
    return {re.sub(end, "", name) for name in names}


def _targets(network: nn.Module) -> list[str]:
    """List the last names of the modules that have an adapter, such as q_proj."""
    return sorted({name.rpartition(".")[2] for name in _modules(network)})


def inspect(path_or_name: str | Path, *, revision: str | None = None) -> PretrainedModel:
    """Describe the model of a checkpoint; of its weights only two that may be tied are read.

    Of an address or a repository on the hub only `config.json` is read. Checks and errors are those
    of `load(..., head=False)`, except for weights that are not finite.
    """
    name, key = str(path_or_name), "model.init_from"
    with _folder(name, ["config.json", _ADAPTER], key=key, revision=revision) as folder:
        if (folder / _ADAPTER).exists():
            content = _adapter_config(folder)
            base, revision = content["base_model_name_or_path"], content.get("revision")
            found = inspect(base, revision=revision)
            return found._replace(network=_adapted(folder, found.network, content))
        if not is_address(name) and not is_on_hub(name, key=key):
            return _checked(folder, needs_head=False)[0]
        network, names, config = _described(folder)
    # If config.json lists no class, the class that is supported here is assumed. The weights then
    # have the head of this class.
    name = names.classes[config["model_type"]]
    is_whole = name in (config.get("architectures") or [name])
    return PretrainedModel(network, None, (), (), config, "" if is_whole else names.head)


def require_same_network(network: Any, found: PretrainedModel, settings: ModelSettings) -> None:
    """Raise ConfigError, with all sizes that differ, unless `found` is the configured network."""
    names = weight_map(network)
    if names is None or type(found.network) is not names.model:
        other = type(found.network).__name__
        raise ConfigError(f"model.arch = {settings.arch}: {settings.init_from} is a {other}")
    free = names.free | ({"num_classes"} if found.lacks else set())
    sizes = {ours for ours, _ in names.sizes.values()}
    faults = [
        f"model.{ours} = {getattr(network, ours)}: {settings.init_from} has"
        f" {getattr(found.network, ours)}"
        + (f"; unset it: model.{ours}=none" if ours in sizes else "")
        for ours in names.attributes(found.config)
        if ours not in free and getattr(network, ours) != getattr(found.network, ours)
    ]
    own, other = (getattr(each, "adapter", None) for each in (network, found.network))
    if own and other and own != other:
        faults.append(
            f"adapter: {settings.init_from} is one of rank {other.rank}, alpha {other.alpha:g} and"
            f" layers {other.layers}; set these, or adapter.rank=0 to train the merged weights"
        )
    if faults:
        raise ConfigError("\n".join(faults))


def save(
    params: PyTree,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    network: nn.Module,
    dtype: str = "float32",
    config: Mapping[str, Any] | None = None,
    shard_size: str = "5GB",
) -> None:
    """Write a model in Hugging Face layout, as `transformers` loads it without any key amiss.

    An existing `folder` is replaced when everything is written. `dtype` is "float32", which is
    lossless, or "bfloat16". `config` is the `config.json` of the checkpoint from which the model
    comes, in which sizes that have changed are replaced; without it the model is a Llama or a BERT.
    Weights of more than `shard_size` are divided into several files with an index.

    Raises:
      ConfigError: If no architecture has a weight map for this model, or if no model of this family
        has its attributes.
      OSError: If the folder cannot be written.
    """
    folder, names = Path(folder), weight_map(network)
    if names is None:
        raise ConfigError(
            f"{folder}: {type(network).__name__} has no Hugging Face names; give its Architecture"
            " a weight_map"
        )
    if config:
        config = _with_changed_sizes(config, network, names)
        differing = _differing(network, names.attributes(config))
    else:
        config = {key: getattr(network, ours) for key, (ours, _) in names.sizes.items()}
        config |= {**names.fixed, **names.extra(network), "dtype": dtype, "torch_dtype": dtype}
        if tokenizer is not None:
            config |= tokenizer.token_ids
        differing = _differing(network, names.attributes_of_normalised(config))
    if differing:
        have = ", ".join(f"{name}={value}" for name, value in differing.items())
        kind = config["model_type"]
        raise ConfigError(f"{folder}: no {kind} has {have}; give the config.json of such a model")
    # The tokenizer is another one if the checkpoint had none.
    ends = np.ravel(config.get("eos_token_id", [])).tolist()
    if tokenizer is not None and ends and tokenizer.eot_id not in ends:
        config |= tokenizer.token_ids
    config["architectures"] = [names.classes[config["model_type"]]]
    if "torch_dtype" in config:  # the older name
        config["torch_dtype"] = dtype
    if "dtype" in config or "torch_dtype" not in config:
        config["dtype"] = dtype
    params = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), params)
    arrays = _arrays(params, tensors(network, names))
    split = huggingface_hub.split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_size,
    )
    with replaced_folder(folder) as partial:
        for file, members in split.filename_to_tensors.items():
            part = {name: arrays[name] for name in members}
            save_file(part, partial / file, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            path = partial / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial, network)


def _with_changed_sizes(
    config: Mapping[str, Any], network: nn.Module, names: WeightMap
) -> dict[str, Any]:
    """Return a checkpoint's config.json with the sizes of a model that has other ones."""
    changed = _differing(network, names.attributes(dict(config)))  # such as a longer context
    result = dict(config)
    for key, (ours, _) in names.sizes.items():
        if ours in changed:
            result[key] = getattr(network, ours)
    if "num_classes" in changed:  # names of classes would contradict it
        result = {key: value for key, value in result.items() if "label2" not in key}
    return result


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, network: Any) -> None:
    """Write a tokenizer; let generation_config.json name its ends that `transformers` misses."""
    tokenizer.save(folder, getattr(network, "max_length", None))
    known, path = stop_ids(folder), folder / GENERATION
    ends = [*stop_ids(folder, network.vocab_size)]
    ends += [i for i in tokenizer.ends if i not in ends]
    if ends != [*known]:
        content = read_json(path, DataError, **_JSON) if path.exists() else {}
        content["eos_token_id"] = ends
        path.write_text(json.dumps(content, indent=2) + "\n")


def base_of(name: str, revision: str | None = None) -> dict[str, str | None]:
    """Return how an adapter's config names a model and its commit; of an adapter, its base's."""
    key = "model.init_from"
    with (
        contextlib.suppress(UserError),
        _folder(name, ["config.json", _ADAPTER], key=key, revision=revision) as folder,
    ):
        if (folder / _ADAPTER).exists():
            content = _adapter_config(folder)
            return base_of(content["base_model_name_or_path"], content.get("revision"))
        if is_on_hub(name, key=key):
            revision = folder.name  # of the hub's cache, snapshots/<commit>
        elif not is_address(name):
            name = str(folder.resolve())
    return {"base_model_name_or_path": name, "revision": revision}


def save_adapter(
    params: PyTree,
    folder: str | Path,
    tokenizer: Tokenizer | None,
    *,
    network: Any,
    base: Mapping[str, str | None],
    sha256: str = "",
    base_dtype: str = "float32",
) -> None:
    """Write a model's adapter in PEFT's layout, in float32.

    An existing `folder` is replaced when everything is written. `base` is the result of `base_of`
    for the model to which the adapter belongs. `sha256` is the hash of its weights, which `load`
    then compares (empty: not known), and `base_dtype` how the run held them.
    """
    arrays = _arrays(jax.tree.map(np.asarray, params), _low_rank(network))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **base,
        "r": network.adapter.rank,
        "lora_alpha": network.adapter.alpha,
        "target_modules": _targets(network),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    with replaced_folder(Path(folder)) as partial:
        metadata = {"format": "pt"}
        if sha256:
            metadata |= {"base_sha256": sha256, "base_dtype": base_dtype}
        save_file(arrays, partial / _ADAPTER_WEIGHTS, metadata=metadata)
        (partial / _ADAPTER).write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial, network)


def _arrays(params: PyTree, named: Iterable[Tensor]) -> dict[str, np.ndarray]:
    """Return the arrays to write, by name; contiguous, because a file stores no strides."""
    leaves = _leaves(params)
    return {tensor.name: np.ascontiguousarray(tensor.of(leaves[tensor.path])) for tensor in named}


def _differing(network: nn.Module, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a model that differ from those that a `config.json` describes."""
    return {
        name: getattr(network, name)
        for name, value in described.items()
        if getattr(network, name) != value and name != "pad_id"  # it follows the tokenizer
    }


def _leaves(tree: PyTree) -> dict[tuple[str, ...], Any]:
    return flatten_dict(tree)


def _weight_maps() -> list[WeightMap]:
    return [known.weight_map for known in ARCHITECTURES.values() if known.weight_map is not None]


@contextlib.contextmanager
def _folder(
    name: str, one_of: Sequence[str], *, key: str, revision: str | None = None
) -> Iterator[Path]:
    """Yield the folder of a checkpoint, after its files were copied to this machine."""
    files = ("config.json", "*.index.json", _ADAPTER, GENERATION)
    with fetched(name, files, one_of=one_of, key=key, hint=_CONVERT, revision=revision) as folder:
        if not folder.is_dir():
            raise DataError(f"{name}: no such folder")
        yield folder


# --- config.json --------------------------------------------------------------------------------


def _described(folder: Path) -> tuple[Any, WeightMap, dict]:
    """Read a checkpoint's config.json: the model, the names of its weights, and the content."""
    path = folder / "config.json"
    config = read_json(path, DataError, **_JSON)
    known = {kind: names for names in _weight_maps() for kind in names.classes}
    names = known.get(str(config.get("model_type")))
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise DataError(
            f"{path}: quantization_config: have weights quantised by {method}, need those from"
            " which they were made, and model.base_dtype=nf4 to hold these in four bits"
        )
    try:
        if names is None:
            have = repr(config.get("model_type"))
            raise Unusable("model_type", have, " or ".join(map(repr, known)))
        network = names.model(**names.attributes(config))
        param_shapes(network)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: {error}") from error
    return network, names, config


# --- Weights ----------------------------------------------------------------------------------


class _Stored(NamedTuple):
    """A tensor in a file: its name, its shape, and its dtype by the name that safetensors uses."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    def read(self) -> np.ndarray:
        """Return a copy of the values."""
        with safetensors.safe_open(self.file, framework="numpy") as content:
            return content.get_tensor(self.name)


def _stored(folder: Path) -> dict[str, _Stored]:
    """List the tensors of a checkpoint by name."""
    files = [folder / name for name in _WEIGHTS if (folder / name).exists()]
    if not files:
        need = "needs model.safetensors, or an index and its shards; no other weights are read"
        raise DataError(f"{folder}: {need}; {_CONVERT}")
    file = files[0]
    if file.suffix != ".json":
        return _open(_inside(folder, file.name))
    index = checked(read_json(file, DataError, **_JSON), _Index, f"{file}: index", DataError)
    pairs: list[tuple[str, _Stored]] = []
    for name in sorted({*index.weight_map.values()}):
        pairs += _open(_inside(folder, name)).items()
    return _joined(pairs)


class _Index(Format):
    """What is read of an index: the file of each tensor, beside the index."""

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\\x00]+\.safetensors$")]]


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file of weights.

    Refuses links that lead out of the folder, except the hub cache's links to `blobs`.
    """
    # The hub's cache has links from models--x--y/snapshots/<commit>/ to models--x--y/blobs/.
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    target = (folder / name).resolve()
    if target.parent not in allowed:
        raise ConfigError(f"{folder / name}: leads out of its folder, to {target}")
    return folder / name


def _open(file: Path) -> dict[str, _Stored]:
    """List the tensors of a safetensors file by name; their values are read later.

    The library checks that each byte after the header belongs to exactly one tensor.
    """
    try:
        with safetensors.safe_open(file, framework="numpy") as content:
            parts = {name: content.get_slice(name) for name in content.keys()}
            return {
                name: _Stored(file, name, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{file}: damaged, or no safetensors file ({error})") from error


def _joined(pairs: Iterable[tuple[str, _Stored]]) -> dict[str, _Stored]:
    """Put tensors into one table by name; raise DataError if a name comes twice."""
    found: dict[str, _Stored] = {}
    for name, where in pairs:
        other = found.setdefault(name, where)
        if other is not where:
            both = f"{other.name} of {other.file.name} and {where.name} of {where.file.name}"
            raise DataError(f"{where.file}: {name}: stored twice, as {both}")
    return found


def _checked(folder: Path, *, needs_head: bool) -> tuple[PretrainedModel, dict[Tensor, _Stored]]:
    """Check a checkpoint; return what `inspect` does, and where its tensors are."""
    network, names, config = _described(folder)
    stored = _under_usual_names(_stored(folder), names)
    ties: dict[str, str] = {}  # from each tensor of a tied pair to the other
    if config.get("tie_word_embeddings") is True:
        ties = {**names.ties, **{second: first for first, second in names.ties.items()}}
    if _differ(stored, ties):
        # Both are used, as in transformers 5: somebody may have trained only the head, or merged a
        # LoRA into it.
        ties = {}
        config = config | {"tie_word_embeddings": False}
        network = network.clone(tied=False)

    wanted: dict[Tensor, str] = {}  # the name under which each tensor is stored
    for tensor in tensors(network, names):
        twin = ties.get(tensor.name)
        is_missing = tensor.name not in stored and twin in stored
        wanted[tensor] = twin if twin is not None and is_missing else tensor.name
    head = {tensor: name for tensor, name in wanted.items() if tensor.path[0] == names.head}
    lacks_head = bool(head) and not needs_head and stored.keys().isdisjoint(head.values())
    if lacks_head:
        wanted = {tensor: name for tensor, name in wanted.items() if tensor not in head}

    copies = {other for name, other in ties.items() if name in stored and other in stored}
    rest = stored.keys() - wanted.values() - copies
    left_out: set[str] = set()
    if not needs_head:
        left_out = {name for name in rest if _HEADS.fullmatch(name)}
    unknown = {name for name in rest - left_out if not _BUFFERS.fullmatch(name)}
    faults = [f"{folder}: {name}: unexpected" for name in unknown]
    faults += _unfit(folder, wanted, stored, network)
    if faults:
        raise DataError(_listed(faults))
    found = {tensor: stored[name] for tensor, name in wanted.items()}
    model = PretrainedModel(
        network=network,
        params=None,
        stored_as=tuple(sorted({_FLOATS[where.kind] for where in found.values()})),
        left_out=tuple(sorted(left_out)),
        config=config,
        lacks=names.head if lacks_head else "",
    )
    return model, found


def _under_usual_names(stored: dict[str, _Stored], names: WeightMap) -> dict[str, _Stored]:
    """Rename what some checkpoints call differently, or save without the model's prefix."""
    # The BERT that Google published calls the gains and biases of norms gamma and beta. All other
    # checkpoints call them weight and bias.
    pairs = []
    for name, where in stored.items():
        usual = re.sub(r"\.beta$", ".bias", name)
        usual = re.sub(r"\.gamma$", ".weight", usual)
        pairs.append((usual, where))
    renamed = _joined(pairs)
    if any(name.startswith(names.prefix) for name in renamed):
        return renamed
    # Saved without a head.
    prefixed = {}
    for name, where in renamed.items():
        prefixed[name if _HEADS.fullmatch(name) else names.prefix + name] = where
    return prefixed


def _differ(stored: Mapping[str, _Stored], ties: Mapping[str, str]) -> bool:
    """Whether two tensors that are declared one parameter are both stored, and not equal."""
    for name, twin in ties.items():
        if name in stored and twin in stored:
            one, other = stored[name], stored[twin]
            are_floats = one.kind in _FLOATS and other.kind in _FLOATS
            if not (are_floats and np.array_equal(one.read(), other.read())):
                return True
    return False


def _unfit(
    folder: Path, wanted: Mapping[Tensor, str], stored: Mapping[str, _Stored], network: nn.Module
) -> list[str]:
    """Describe the wanted tensors, by their stored names, that are missing or of another kind."""
    leaves, faults = _leaves(param_shapes(network)), []
    for tensor, name in wanted.items():
        need = tensor.of(np.broadcast_to(np.float32(0), leaves[tensor.path].shape)).shape
        if name not in stored:
            faults.append(f"{folder}: {name}: missing, want {need}")
            continue
        where = stored[name]
        if where.shape != need:
            faults.append(f"{where.file}: {name}: have {where.shape}, want {need}")
        if where.kind not in _FLOATS:
            faults.append(f"{where.file}: {name}: have {where.kind}, want a float type")
    return faults


def _listed(faults: list[str], most: int = 12) -> str:
    """Sort faults into lines, at most so many of them."""
    faults = sorted(set(faults))
    lines = faults[:most]
    if len(faults) > most:
        lines.append(f"... and {len(faults) - most} more")
    return "\n".join(lines)
