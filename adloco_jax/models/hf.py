"""Read and write models in Hugging Face layout: `config.json`, safetensors, tokenizer files.

A *checkpoint* is a folder in this layout, or one on the hub or at an address. An *adapter* is a
folder in PEFT's layout, with low-rank matrices (LoRA) for a checkpoint, its *base*. *Frozen*
weights are not trained; a frozen matrix may be a `Quantised`, in four or eight bits. A *tensor* is
a named array in a safetensors file. A *leaf* is an array of this package's parameter tree: one leaf
with the axis N of layers holds N tensors of one name. `models.weight_maps` has the names. Every
tensor's name, shape and type is checked before any of its values are used.
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

_MAX_JSON_BYTES = 2**26  # of config.json, an index file, and other files of a checkpoint
# The names that safetensors has for the dtypes that are read, and NumPy's names.
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ADAPTER = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# The files that may have the weights, or an index of other files; the first that exists is read.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Buffers (constant tensors) that old versions of transformers saved; config.json determines them.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|bert\.embeddings\.position_ids")
_CONVERT = "convert with `save_pretrained(..., safe_serialization=True)`"
# Names of tensors that belong to the head of some class of `transformers`.
_HEADS = re.compile(r"(lm_head|classifier|score|qa_outputs|cls)\..*")

# From the last name of a leaf's path to the tensor's name, with `{}` for the module's name there.
# All other leaves ("kernel", "scale", "embedding") are `{}.weight`.
_TENSORS = {
    "bias": "{}.bias",
    "lora_a": "base_model.model.{}.lora_A.weight",
    "lora_b": "base_model.model.{}.lora_B.weight",
}
_TRANSPOSED = ("kernel", "lora_a", "lora_b")  # leaves [in, out], which are tensors [out, in]

# Characters of a faulty value that a message shows: all of a path, not all of a nested table.
_LONGEST_VALUE = 300

# Keys of an adapter_config.json that are read.
_READ = {"base_model_name_or_path", "r", "lora_alpha", "target_modules", "revision"}
# Keys that change no output of a trained LoRA adapter, whatever they say.
_HARMLESS = {
    *("auto_mapping", "inference_mode", "lora_dropout", "peft_version", "task_type"),
    # Keys that matter to other kinds of adapters only.
    *("layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
    # Keys about one kind of initialisation, which `init_lora_weights` names.
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
}
# Every other key, known or not, must be empty or false, or say one of these values: those of an
# adapter that only adds its products. PEFT's other initialisations change the base weights, also
# when an adapter is loaded.
_PLAIN = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "eva", "orthogonal", "mica"],
}


class PretrainedModel(NamedTuple):
    """A model that was read from a checkpoint.

    Attributes:
      network: The model, in float32; `network.clone(dtype=...)` computes in another dtype.
      params: Its parameters, a tree of float32 NumPy arrays, of which some are transposed views.
        None from `inspect`. If `base` is given: the adapter's parameters, or None without adapter.
      stored_as: Dtypes of the weights in the checkpoint, such as `("bfloat16",)`; empty if only
        `config.json` was read.
      left_out: Names of tensors that were not read: they belong to a head that the model lacks.
      config: The content of the checkpoint's `config.json`, for `save`.
      lacks: Name of the head among the parameters, if the checkpoint has none; else empty.
      ends: Ids at which generation stops: those that the checkpoint's generation_config.json names,
        or else its config.json.
      base: Tree of the frozen weights, in the layout of `as_held`. None: no weights are frozen.
      sha256: Hash of the stored weights, in hexadecimal digits, without those of an adapter. Empty
        from `inspect`.
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
    """Return the map of a model's parameters to their Hugging Face names; None if it has none."""
    for names in _weight_maps():
        if type(network) is names.model:
            return names
    return None


class Tensor(NamedTuple):
    """A tensor of a checkpoint, and the place of its values in this package's parameter tree.

    Attributes:
      name: Name in the checkpoint, such as `model.layers.0.mlp.up_proj.weight`.
      path: Keys from the root of the tree to the leaf with the values.
      layer: Index on the leaf's first axis if the leaf stacks layers, else `...`.
      transposed: Whether the checkpoint has the transpose of the leaf, or of the layer's part.
    """

    name: str
    path: tuple[str, ...]
    layer: int | EllipsisType
    transposed: bool

    def view_in(self, leaf: np.ndarray) -> np.ndarray:
        """Return the part of the array at `path` that is this tensor, as a view in its shape."""
        part = leaf[self.layer]
        return part.T if self.transposed else part

    def empty_leaf(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an uninitialised array of the leaf's `shape`, in which this tensor is contiguous.

        A transposed tensor is so if the memory has the leaf's last two axes in the other order.
        """
        if not self.transposed:
            return np.empty(shape, dtype)
        *stacked, num_inputs, num_outputs = shape
        return np.empty((*stacked, num_outputs, num_inputs), dtype).swapaxes(-1, -2)


def tensors(network: nn.Module, names: WeightMap) -> list[Tensor]:
    """List the tensors that a checkpoint of the model has, in the order of the parameter tree.

    Tensors of an adapter are listed too, if the network has one. `names` is the map of the
    network's class.
    """
    listed = []
    for path, leaf in _leaves(param_shapes(network)).items():  # leaves have shapes, no values
        *modules, kind = path  # such as layers, mlp, up, and kernel
        module = names.modules["/".join(modules)]  # with `{}` where the layer's number stands
        # `replace`, not `format`, because a `{}` of the module is for the layer's number below.
        name = _TENSORS.get(kind, "{}.weight").replace("{}", module)
        transposed = kind in _TRANSPOSED
        if "{}" not in name:  # a module outside the layers
            listed.append(Tensor(name, path, layer=..., transposed=transposed))
            continue
        for layer in range(leaf.shape[0]):
            listed.append(Tensor(name.format(layer), path, layer=layer, transposed=transposed))
    return listed


def _adapter_tensors(network: nn.Module) -> list[Tensor]:
    """List the tensors of a model's adapter, as PEFT names them; empty if it has no adapter."""
    names = weight_map(network)
    assert names is not None, "only models with names can have an adapter"
    # Only tensors of an adapter are named so (`_TENSORS`).
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
      ConfigError: If the hub has no such repository, or it has no safetensors; or if a file of
        weights is a link that leads out of the folder.
      ResourceError: If the hub cannot be reached.
      DataError: If there is no such folder, the architecture is another, or tensors are missing,
        unexpected, stored twice, of a wrong shape, not of a float dtype or not finite. For an
        adapter, also if it is not a plain LoRA, or its base has other weights than recorded.
    """
    with _local_folder(str(path_or_name), ["*.safetensors"], key=key, revision=revision) as folder:
        if (folder / _ADAPTER).exists():
            return _load_adapter(
                folder,
                merges=merges,
                head=head,
                base_dtype=base_dtype,
                as_trained=as_trained,
                key=key,
            )
        # The model without its weights, and the place of each tensor in the files.
        model, stored = _check_checkpoint(folder, needs_head=head)

        digest = hashlib.sha256()
        params = None
        base = None
        if base_dtype is None:
            params = _read_params(model.network, stored, digest)
        else:
            base = _read_frozen(stored, base_dtype, digest)

        # Ids at which generation stops; a model without a vocabulary has none.
        ends = stop_ids(folder, getattr(model.network, "vocab_size", 0))
        return model._replace(params=params, base=base, sha256=digest.hexdigest(), ends=ends)


def _read_values(
    stored: "Mapping[Tensor, _StoredTensor]", digest: "hashlib._Hash"
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yield each tensor with its values, in the checkpoint's shape; add both to the hash `digest`.

    `stored` has the places of the tensors in files. A tensor is read when the iterator gets there.
    Values have the stored dtype, but float32 instead of float64. Raises DataError if a value is not
    finite.
    """
    for tensor, where in stored.items():
        values = where.read()
        digest.update(f"{tensor.name} {where.kind} {where.shape}".encode())
        digest.update(values.view(np.uint8).data)  # the bytes
        if where.kind == "F64":
            values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise DataError(f"{where.file}: {tensor.name}: not all of its numbers are finite")
        yield tensor, values


def _read_params(
    network: nn.Module, stored: "Mapping[Tensor, _StoredTensor]", digest: "hashlib._Hash"
) -> PyTree:
    """Read tensors and return them as a tree of float32 parameters; add their values to `digest`.

    `stored` has the places of the tensors in files: of all layers of a leaf, or of none. The tree
    has those leaves of the network's parameters that have tensors. Raises DataError if a value is
    not finite.
    """
    shapes = _leaves(param_shapes(network))
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for tensor, values in _read_values(stored, digest):
        if tensor.path not in leaves:
            leaves[tensor.path] = tensor.empty_leaf(shapes[tensor.path].shape, "float32")
        tensor.view_in(leaves[tensor.path])[...] = values
    return unflatten_dict(leaves)


def _read_frozen(
    stored: "Mapping[Tensor, _StoredTensor]", dtype: str, digest: "hashlib._Hash"
) -> PyTree:
    """Read tensors and return them as a tree of frozen weights; add their values to `digest`.

    The tree has the layout of `as_held`: a leaf below "layers" is a tuple of the layers' weights.
    `dtype` is a value of `model.base_dtype`. Each tensor is converted before the next is read: the
    host holds one at a time in the stored dtype. Raises DataError if a value is not finite.
    """
    leaves: dict[tuple[str, ...], Any] = {}
    # By the path of a leaf, the weights of all layers. `stored` has them in the layers' order.
    layers_of_leaves = collections.defaultdict(list)
    for tensor, values in _read_values(stored, digest):
        values = values.T if tensor.transposed else values
        weight = _convert_frozen(tensor.path, values, dtype)
        if tensor.layer is ...:
            leaves[tensor.path] = weight
        else:
            layers_of_leaves[tensor.path].append(weight)

    for path, weights in layers_of_leaves.items():
        leaves[path] = tuple(weights)
    return unflatten_dict(leaves)


def as_held(base: PyTree, dtype: str) -> PyTree:
    """Convert a tree of float weights to frozen ones of a `model.base_dtype`.

    Each leaf below "layers", with a leading axis of N layers, becomes a tuple of N weights, because
    programs would copy a stack to take one out. A matrix of a layer becomes a `Quantised` if
    `dtype` is "int8" or "nf4"; all other weights are then bfloat16. With a float `dtype` all
    weights have that dtype.
    """
    leaves: dict[tuple[str, ...], Any] = {}
    for path, leaf in _leaves(base).items():
        if path[0] == "layers":
            leaves[path] = tuple(_convert_frozen(path, weight, dtype) for weight in leaf)
        else:
            leaves[path] = _convert_frozen(path, leaf, dtype)
    return unflatten_dict(leaves)


def _convert_frozen(path: tuple[str, ...], weight: Any, dtype: str) -> Any:
    """Convert one array of frozen weights: that of one layer, or one outside the layers.

    `path` is that of its leaf in the parameter tree, and `dtype` a value of `model.base_dtype`. A
    matrix of a layer becomes a `Quantised` if `dtype` is "int8" or "nf4"; other weights are then
    bfloat16. With a float `dtype` all have that dtype.
    """
    if dtype not in QUANTISED:  # a float dtype
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
    """Read an adapter in a folder of this machine, and its base, which its config names.

    The result's `network` and `params` have the adapter, unless `merges` adds it to the weights.
    With frozen weights (`base_dtype`, or the recorded one) `base` has the base's weights and
    `params` the adapter's only; then `merges` has no effect.

    Args:
      folder: The adapter's folder.
      merges: Whether the adapter is added to the weights that it belongs to.
      head: Whether the base must have the head.
      base_dtype: How the base's weights are held frozen, as `model.base_dtype` says. None: they are
        not frozen.
      as_trained: Whether they are held as the run held them that trained the adapter, if that is
        recorded.
      key: The config's key, or the option, that messages mention.

    Raises:
      ConfigError: If the hub has no such base, it has no safetensors, or a file of weights is a
        link that leads out of its folder.
      ResourceError: If the hub cannot be reached.
      DataError: If the adapter is not a plain LoRA, lacks tensors or has others, or a file is
        damaged; if the base is missing, damaged or unsupported, or has other weights than recorded.
    """
    content = _read_adapter_config(folder)
    stored = _list_file(folder / _ADAPTER_WEIGHTS)  # by name; the values are read below
    with safetensors.safe_open(folder / _ADAPTER_WEIGHTS, framework="numpy") as file:
        metadata = file.metadata() or {}  # with what `save_adapter` records of the base

    # Read the base, and add the adapter to its network.
    base_name = content["base_model_name_or_path"]
    if as_trained:
        base_dtype = metadata.get("base_dtype") or None
    base_model = load(
        base_name, head=head, base_dtype=base_dtype, revision=content.get("revision"), key=key
    )
    network = _with_adapter_of(folder, base_model.network, content)

    # Check that the file has exactly the network's low-rank matrices, and that the base is the one
    # for which they were trained.
    wanted = {tensor: tensor.name for tensor in _adapter_tensors(network)}
    faults = [f"{folder}: {name}: unexpected" for name in stored.keys() - wanted.values()]
    faults += _missing_or_wrong(folder, wanted, stored, network)
    if faults:
        raise DataError(_fault_lines(faults))
    require_same_base(base_model, metadata.get("base_sha256", ""), f"{folder}: {base_name}")

    adapter_stored = {tensor: stored[name] for tensor, name in wanted.items()}
    adapter_params = _read_params(network, adapter_stored, hashlib.sha256())  # the hash is not used
    if base_model.base is not None:  # frozen weights stay apart
        return base_model._replace(network=network, params=adapter_params)
    params = with_adapter(base_model.params, adapter_params)
    if merges:  # the network of the base computes the same with the merged weights
        return base_model._replace(params=merge_adapter(params, network.adapter))
    return base_model._replace(network=network, params=params)


def _read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint, also through a link, as the hub's cache has them.

    Raises DataError if the file is missing, too large or not a JSON object.
    """
    return read_json(path, DataError, max_bytes=_MAX_JSON_BYTES, links=True)


def _read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `adapter_config.json`.

    Raises DataError, with one line for each faulty key, unless it describes a plain LoRA adapter of
    a model that is not itself an adapter; DataError, ConfigError or ResourceError if this model is
    not found.
    """
    path = folder / _ADAPTER
    content = _read_config(path)
    needs: dict[str, str] = {}  # from each faulty key to what it must say

    # Keys that are neither read below nor harmless must say what a plain adapter says, or nothing.
    for key in sorted(content.keys() - _READ - _HARMLESS):
        plain = _PLAIN.get(key, [])  # what the key may say besides nothing
        if content[key] not in [None, False, [], {}, "", *plain]:
            need = " or ".join(map(str, plain)) if plain else "none"
            needs[key] = f"{need}; or merge_and_unload() in PEFT"

    base = content.get("base_model_name_or_path")
    if not isinstance(base, str) or not base or _is_adapter(base, content.get("revision")):
        needs["base_model_name_or_path"] = "a model, no adapter"
    rank = content.get("r")
    if type(rank) is not int or rank < 1:  # a bool is an instance of int, too
        needs["r"] = "a positive integer"
    alpha = content.get("lora_alpha")
    if not isinstance(alpha, int | float) or alpha <= 0:
        needs["lora_alpha"] = "a positive number"

    if needs:
        lines = []
        for key, need in needs.items():
            value = str(content.get(key))[:_LONGEST_VALUE]
            lines.append(f"{path}: {key}: have {value}, need {need}")
        raise DataError("\n".join(lines))
    return content


def _is_adapter(name: str, revision: str | None) -> bool:
    """Return whether a folder, address or name on the hub holds an adapter instead of a checkpoint.

    Raises DataError, ConfigError or ResourceError if it is not found, or a server does not answer.
    """
    key = "base_model_name_or_path"
    with _local_folder(name, ["config.json", _ADAPTER], key=key, revision=revision) as folder:
        return (folder / _ADAPTER).exists()


def require_same_base(model: PretrainedModel, sha256: str, where: str) -> None:
    """Raise DataError if a model is not the one for which an adapter was made.

    `sha256` is the hash of the weights for which it was made; empty: not known, and not compared.
    `where` names the model in the message.
    """
    if sha256 and model.sha256 != sha256:
        need = "other weights than those for which the adapter was made"
        raise DataError(f"{where} has {need}; restore them")


def _with_adapter_of(folder: Path, network: Any, content: Mapping[str, Any]) -> Any:
    """Return the network of a base with the adapter that an `adapter_config.json` describes.

    `content` is from `_read_adapter_config(folder)`. Raises DataError unless its `target_modules`
    are all linear layers of a block, those of attention, or those of the MLP.
    """
    given = content.get("target_modules")
    targets: list[str] = []
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        targets = given

    choices = ("all", "attention", "mlp") if hasattr(network, "adapter") else ()
    possible = []  # for the message, the target_modules of each choice
    for layers in choices:
        adapter = Adapter(content["r"], float(content["lora_alpha"]), layers)
        adapted = network.clone(adapter=adapter)
        modules = _adapter_modules(adapted)
        possible.append(", ".join(_target_modules(adapted)))

        # These layers are the described ones if they have the same modules. As in PEFT, a target
        # stands for all modules whose names end with it. Each target must stand for some module
        # with an adapter, and each of these modules have a target.
        modules_of_targets = []
        for target in targets:
            of_target = {module for module in modules if f".{module}".endswith(f".{target}")}
            modules_of_targets.append(of_target)
        if all(modules_of_targets) and set().union(*modules_of_targets) == modules:
            return adapted

    need = " or ".join(possible) or "a model that can have an adapter"
    raise DataError(
        f"{folder / _ADAPTER}: target_modules: have {str(given)[:200]}, need {need}, or names of"
        " the same modules; or merge_and_unload() in PEFT"
    )


def _adapter_modules(network: nn.Module) -> set[str]:
    """Return the names of the modules with an adapter, such as model.layers.0.mlp.up_proj."""
    modules = set()
    for tensor in _adapter_tensors(network):
        # PEFT's names are base_model.model.<module>.lora_A.weight, and lora_B.
        name = tensor.name.removeprefix("base_model.model.")
        modules.add(re.sub(r"\.lora_[AB]\.weight", "", name))
    return modules


def _target_modules(network: nn.Module) -> list[str]:
    """List the last names of the modules that have an adapter, such as q_proj, sorted."""
    return sorted({name.split(".")[-1] for name in _adapter_modules(network)})


def inspect(path_or_name: str | Path, *, revision: str | None = None) -> PretrainedModel:
    """Return the description of a checkpoint's model, without its parameters.

    For a local checkpoint, only weights that may be tied are read. For an address or a repository
    on the hub, only `config.json` is read. For an adapter, the network has the adapter, and
    everything else describes the base. The head may be missing, or one of another kind.

    Raises:
      ConfigError: If the hub has no such repository, or a local file of weights is a link that
        leads out of the folder.
      ResourceError: If the hub cannot be reached.
      DataError: If there is no such folder, the architecture is another, an adapter is not a plain
        LoRA, or tensors of a local checkpoint are missing, unexpected, stored twice, of a wrong
        shape or not of a float dtype.
    """
    name = str(path_or_name)
    key = "model.init_from"
    with _local_folder(name, ["config.json", _ADAPTER], key=key, revision=revision) as folder:
        if (folder / _ADAPTER).exists():
            content = _read_adapter_config(folder)
            model = inspect(content["base_model_name_or_path"], revision=content.get("revision"))
            return model._replace(network=_with_adapter_of(folder, model.network, content))
        if not is_address(name) and not is_on_hub(name, key=key):
            model, _ = _check_checkpoint(folder, needs_head=False)
            return model
        # For an address or a repository, only config.json was copied.
        network, names, config = _read_network(folder)

    # If config.json lists no class, the class that is supported here is assumed. The weights then
    # have the head of this class.
    supported_class = names.classes[config["model_type"]]
    classes = config.get("architectures") or [supported_class]
    return PretrainedModel(
        network=network,
        params=None,
        stored_as=(),
        left_out=(),
        config=config,
        lacks="" if supported_class in classes else names.head,
    )


def require_same_network(network: Any, loaded: PretrainedModel, settings: ModelSettings) -> None:
    """Raise ConfigError, with all sizes that differ, unless a checkpoint has the run's network.

    `network` is built from `settings`, and `loaded` is from `inspect` or `load` of
    `settings.init_from`. Not compared are attributes on which no weight depends (`names.free`), and
    the number of classes if the checkpoint has no head.
    """
    names = weight_map(network)  # None: the network has no names in Hugging Face layout
    if names is None or type(loaded.network) is not names.model:
        other = type(loaded.network).__name__
        raise ConfigError(f"model.arch = {settings.arch}: {settings.init_from} is a {other}")

    free = set(names.free)
    if loaded.lacks:
        free.add("num_classes")
    sizes = {attribute for attribute, _ in names.sizes.values()}  # options of `model` set these
    faults = []
    for attribute in names.attributes(loaded.config):  # those that config.json determines
        have = getattr(network, attribute)
        need = getattr(loaded.network, attribute)
        if attribute in free or have == need:
            continue
        fault = f"model.{attribute} = {have}: {settings.init_from} has {need}"
        if attribute in sizes:
            fault += f"; unset it: model.{attribute}=none"
        faults.append(fault)

    # An adapter is compared if both have one: the run may add one, or train merged weights.
    own = getattr(network, "adapter", None)
    other = getattr(loaded.network, "adapter", None)
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
    """Write a model in Hugging Face layout; `transformers` loads it without a missing key.

    Args:
      params: All parameters of `network`, without an adapter.
      folder: An existing folder is replaced when everything is written.
      tokenizer: Its files are written too, unless None.
      network: The model, of an architecture with a weight map.
      dtype: Of the weights in the files: "float32", which is lossless, or "bfloat16".
      config: Content of the `config.json` of the checkpoint from which the model comes; sizes that
        have changed are replaced. None: the model is described as a plain Llama or BERT.
      shard_size: Weights of more than this size, such as "5GB", are divided into several files with
        an index.

    Raises:
      ConfigError: If no architecture has a weight map for this model, or if no model of this family
        has its attributes.
      Unusable: If `config` describes a model that is not supported; a ValueError.
      OSError: If the folder cannot be written.
    """
    folder = Path(folder)
    names = weight_map(network)
    if names is None:
        raise ConfigError(
            f"{folder}: {type(network).__name__} has no Hugging Face names; give its Architecture"
            " a weight_map"
        )

    # Describe the model in a config.json. `differing` are attributes of the network that a model of
    # this description would not have.
    if config:
        config = _with_changed_sizes(config, network, names)
        differing = _differing(network, names.attributes(config))
    else:
        config = {key: getattr(network, attribute) for key, (attribute, _) in names.sizes.items()}
        config.update(names.fixed)
        config.update(names.extra(network))
        config.update(dtype=dtype, torch_dtype=dtype)
        if tokenizer is not None:
            config.update(tokenizer.token_ids)
        # What is written here has the spelling of `names.normalise`, which need not be called.
        differing = _differing(network, names.attributes_of_normalised(config))
    if differing:
        have = ", ".join(f"{name}={value}" for name, value in differing.items())
        kind = config["model_type"]
        raise ConfigError(f"{folder}: no {kind} has {have}; give the config.json of such a model")

    # The config.json names another tokenizer's ids if the checkpoint came without a tokenizer.
    ends = np.ravel(config.get("eos_token_id", [])).tolist()  # it may be one id or a list
    if tokenizer is not None and ends and tokenizer.eot_id not in ends:
        config.update(tokenizer.token_ids)
    config["architectures"] = [names.classes[config["model_type"]]]
    if "torch_dtype" in config:  # the older name
        config["torch_dtype"] = dtype
    if "dtype" in config or "torch_dtype" not in config:  # at least one of the names
        config["dtype"] = dtype

    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.dtype(dtype)), params)
    arrays = _arrays_by_name(params, tensors(network, names))
    split = huggingface_hub.split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_size,
    )
    with replaced_folder(folder) as partial:
        for file, members in split.filename_to_tensors.items():
            shard = {name: arrays[name] for name in members}
            # transformers 4 reads no file without the entry "format".
            save_file(shard, partial / file, metadata={"format": "pt"})
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
    """Return a copy of a checkpoint's config.json, with `network`'s sizes where these differ.

    `config` is the content of config.json, and `names` the map of the network's class. Raises
    Unusable if `config` describes a model that is not supported.
    """
    changed = _differing(network, names.attributes(dict(config)))  # such as a longer context
    result = dict(config)
    for key, (attribute, _) in names.sizes.items():  # for each key the network's attribute
        if attribute in changed:
            result[key] = getattr(network, attribute)
    if "num_classes" in changed:
        # The names of the classes would contradict their number: drop id2label and label2id.
        result = {key: value for key, value in result.items() if "label2" not in key}
    return result


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, network: Any) -> None:
    """Write a tokenizer beside a `config.json`; complete the ids at which generation stops.

    `transformers` reads these ids from generation_config.json, or else config.json. If they lack
    ids at which the tokenizer ends a text, or have ids past the vocabulary, the list is written to
    generation_config.json anew.
    """
    tokenizer.save(folder, getattr(network, "max_length", None))
    stored_ends = list(stop_ids(folder))
    ends = list(stop_ids(folder, network.vocab_size))  # without ids past the vocabulary
    for end in tokenizer.ends:
        if end not in ends:
            ends.append(end)

    if ends != stored_ends:
        path = folder / GENERATION
        content = _read_config(path) if path.exists() else {}
        content["eos_token_id"] = ends
        path.write_text(json.dumps(content, indent=2) + "\n")


def base_of(name: str, revision: str | None = None) -> dict[str, str | None]:
    """Return the entries of an adapter_config.json that name its base.

    They are `base_model_name_or_path` and `revision`. `name` is a folder, an address or a name on
    the hub, as for `load`. A folder becomes an absolute path, and `revision` the commit of a
    repository on the hub. For an adapter, the entries name its base. If the checkpoint cannot be
    read, they are the arguments.
    """
    key = "model.init_from"
    with (
        contextlib.suppress(UserError),  # the entries are a record, and not read here
        _local_folder(name, ["config.json", _ADAPTER], key=key, revision=revision) as folder,
    ):
        if (folder / _ADAPTER).exists():
            content = _read_adapter_config(folder)
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

    Args:
      params: A parameter tree with the adapter's leaves; others are not written.
      folder: An existing folder is replaced when everything is written.
      tokenizer: Its files are written too, unless None.
      network: The model with the adapter.
      base: The result of `base_of` for the checkpoint to which the adapter belongs.
      sha256: Hash of the base's weights, which `load` then compares. Empty: not known.
      base_dtype: The dtype in which the run held the base's weights, for `load(as_trained=True)`;
        written only with `sha256`.
    """
    arrays = _arrays_by_name(jax.tree.map(np.asarray, params), _adapter_tensors(network))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **base,
        "r": network.adapter.rank,
        "lora_alpha": network.adapter.alpha,
        "target_modules": _target_modules(network),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    with replaced_folder(Path(folder)) as partial:
        metadata = {"format": "pt"}  # as PEFT writes it
        if sha256:
            metadata["base_sha256"] = sha256
            metadata["base_dtype"] = base_dtype
        save_file(arrays, partial / _ADAPTER_WEIGHTS, metadata=metadata)
        (partial / _ADAPTER).write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial, network)


def _arrays_by_name(params: PyTree, wanted: Iterable[Tensor]) -> dict[str, np.ndarray]:
    """Return the wanted tensors' arrays by their names in the checkpoint, in its shapes.

    `params` is a tree of NumPy arrays. The result is contiguous, because a file stores no strides.
    """
    leaves = _leaves(params)  # by path
    arrays = {}
    for tensor in wanted:
        arrays[tensor.name] = np.ascontiguousarray(tensor.view_in(leaves[tensor.path]))
    return arrays


def _differing(network: nn.Module, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Compare a network with `attributes` (values by name); return its own values that differ.

    The attribute `pad_id` is not compared, because it follows the tokenizer.
    """
    differing = {}
    for name, value in attributes.items():
        if name != "pad_id" and getattr(network, name) != value:
            differing[name] = getattr(network, name)
    return differing


def _leaves(tree: PyTree) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a tree of nested dicts by their paths, tuples of keys, in its order."""
    return flatten_dict(tree)


def _weight_maps() -> list[WeightMap]:
    """List the weight maps of all architectures that have one, added architectures too."""
    maps = [architecture.weight_map for architecture in ARCHITECTURES.values()]
    return [names for names in maps if names is not None]


@contextlib.contextmanager
def _local_folder(
    name: str, one_of: Sequence[str], *, key: str, revision: str | None = None
) -> Iterator[Path]:
    """Yield the folder of a checkpoint on this machine; of a remote one, the copy in the cache.

    Args:
      name: A folder, its address (`data.files`), or a repository on the hub.
      one_of: Names or patterns of files, in order of preference. Those of the first that matches
        are copied, besides JSON files.
      key: The config's key, or the option, that messages mention.
      revision: Branch, tag or commit of a repository on the hub.

    Raises:
      ConfigError: If the hub has no such repository, or a remote one has none of `one_of`.
      ResourceError: If the hub cannot be reached.
      DataError: If there is no such folder, there is no file at the address, or a copy is damaged.
    """
    files = ("config.json", "*.index.json", _ADAPTER, GENERATION)  # copied if they exist
    with fetched(name, files, one_of=one_of, key=key, hint=_CONVERT, revision=revision) as folder:
        if not folder.is_dir():
            raise DataError(f"{name}: no such folder")
        yield folder


# --- config.json --------------------------------------------------------------------------------


def _read_network(folder: Path) -> tuple[nn.Module, WeightMap, dict[str, Any]]:
    """Return the network that a folder's config.json describes, and the names of its weights.

    The third result is the content of config.json. Raises DataError if no such model is supported.
    """
    path = folder / "config.json"
    config = _read_config(path)
    maps: dict[str, WeightMap] = {}  # by the `model_type` of config.json
    for weights in _weight_maps():
        for model_type in weights.classes:
            maps[model_type] = weights
    names = maps.get(str(config.get("model_type")))

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
            raise Unusable("model_type", have, " or ".join(map(repr, maps)))
        network = names.model(**names.attributes(config))  # its attributes by name
        param_shapes(network)  # raises ValueError if the sizes contradict one another
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: {error}") from error
    return network, names, config


# --- Weights ----------------------------------------------------------------------------------


class _StoredTensor(NamedTuple):
    """A tensor in a safetensors file, whose values have not been read.

    `name` is that in the file. `kind` is the dtype by the name that safetensors uses, such as
    "BF16".
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    def read(self) -> np.ndarray:
        """Return a copy of the values."""
        with safetensors.safe_open(self.file, framework="numpy") as content:
            return content.get_tensor(self.name)


def _list_checkpoint(folder: Path) -> dict[str, _StoredTensor]:
    """Return the tensors of a checkpoint by the names in its files, one or several.

    Raises DataError if there is no such file, one is damaged, or a name is stored twice, and
    ConfigError if a file is a link that leads out of the folder.
    """
    files = [folder / name for name in _WEIGHTS if (folder / name).exists()]
    if not files:
        need = "needs model.safetensors, or an index and its shards; no other weights are read"
        raise DataError(f"{folder}: {need}; {_CONVERT}")
    file = files[0]
    if file.suffix != ".json":
        return _list_file(_path_inside(folder, file.name))

    # From the name of each tensor to its file.
    index = checked(_read_config(file), _Index, f"{file}: index", DataError)
    pairs: list[tuple[str, _StoredTensor]] = []
    for name in sorted(set(index.weight_map.values())):
        pairs += _list_file(_path_inside(folder, name)).items()
    return _by_unique_name(pairs)


class _Index(Format):
    """What is read of an index: from the name of each tensor to its file, beside the index."""

    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\\x00]+\.safetensors$")]]


def _path_inside(folder: Path, name: str) -> Path:
    """Return the path of a file of weights, `folder / name`.

    Raises ConfigError if a link there leads out of the folder. The hub cache's links to `blobs` are
    allowed.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        # The hub's cache has links from models--x--y/snapshots/<commit>/ to models--x--y/blobs/.
        allowed.append(root.parent.parent / "blobs")
    target = (folder / name).resolve()
    if target.parent not in allowed:
        raise ConfigError(f"{folder / name}: leads out of its folder, to {target}")
    return folder / name


def _list_file(file: Path) -> dict[str, _StoredTensor]:
    """Return the tensors of a safetensors file by name, from its header.

    The library checks that each byte after the header belongs to exactly one tensor. Raises
    DataError if the file is missing or damaged.
    """
    tensors_of_file = {}
    try:
        with safetensors.safe_open(file, framework="numpy") as content:
            for name in content.keys():
                header = content.get_slice(name)
                shape = tuple(header.get_shape())
                tensors_of_file[name] = _StoredTensor(file, name, shape, header.get_dtype())
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{file}: damaged, or no safetensors file ({error})") from error
    return tensors_of_file


def _by_unique_name(pairs: Iterable[tuple[str, _StoredTensor]]) -> dict[str, _StoredTensor]:
    """Return a dict of pairs of name and tensor; raise DataError if a name comes twice.

    A pair's name may be another than the tensor has in its file.
    """
    by_name: dict[str, _StoredTensor] = {}
    for name, where in pairs:
        if name in by_name:
            other = by_name[name]
            both = f"{other.name} of {other.file.name} and {where.name} of {where.file.name}"
            raise DataError(f"{where.file}: {name}: stored twice, as {both}")
        by_name[name] = where
    return by_name


def _check_checkpoint(
    folder: Path, *, needs_head: bool
) -> tuple[PretrainedModel, dict[Tensor, _StoredTensor]]:
    """Check that a folder has exactly the tensors that its config.json describes.

    Returns the model without its parameters, and the place of each tensor that `load` has to read.
    Without `needs_head` the head may be absent, or one of another kind, which is then left out.
    Raises DataError, with a line for each fault, if tensors are missing, unexpected, stored twice,
    or of a wrong shape or dtype, or if no such model is supported. Raises ConfigError if a file of
    weights is a link that leads out of the folder.
    """
    network, names, config = _read_network(folder)
    stored = _with_usual_names(_list_checkpoint(folder), names)

    ties: dict[str, str] = {}  # from each tensor of a tied pair to the other
    if config.get("tie_word_embeddings") is True:
        for first, second in names.ties.items():
            ties[first] = second
            ties[second] = first
    if _tied_tensors_differ(stored, ties):
        # Both are used, as in transformers 5: somebody may have trained only the head, or merged a
        # LoRA into it.
        ties = {}
        config = config | {"tie_word_embeddings": False}
        network = network.clone(tied=False)

    # The name under which each tensor is stored: that of its twin if only the twin is there.
    wanted: dict[Tensor, str] = {}
    for tensor in tensors(network, names):
        wanted[tensor] = tensor.name
        twin = ties.get(tensor.name)
        is_missing = tensor.name not in stored and twin in stored
        if twin is not None and is_missing:
            wanted[tensor] = twin

    head = {tensor: name for tensor, name in wanted.items() if tensor.path[0] == names.head}
    lacks_head = bool(head) and not needs_head and stored.keys().isdisjoint(head.values())
    if lacks_head:
        wanted = {tensor: name for tensor, name in wanted.items() if tensor not in head}

    # Of a tied pair that is stored twice, one tensor is wanted, and the other is its copy.
    copies = {other for name, other in ties.items() if name in stored and other in stored}
    unread = stored.keys() - wanted.values() - copies
    left_out: set[str] = set()
    if not needs_head:
        left_out = {name for name in unread if _HEADS.fullmatch(name)}
    unknown = {name for name in unread - left_out if not _BUFFERS.fullmatch(name)}
    faults = [f"{folder}: {name}: unexpected" for name in unknown]
    faults += _missing_or_wrong(folder, wanted, stored, network)
    if faults:
        raise DataError(_fault_lines(faults))

    places = {tensor: stored[name] for tensor, name in wanted.items()}
    model = PretrainedModel(
        network=network,
        params=None,
        stored_as=tuple(sorted({_FLOATS[where.kind] for where in places.values()})),
        left_out=tuple(sorted(left_out)),
        config=config,
        lacks=names.head if lacks_head else "",
    )
    return model, places


def _with_usual_names(
    stored: dict[str, _StoredTensor], names: WeightMap
) -> dict[str, _StoredTensor]:
    """Return a checkpoint's tensors by the names that `names` has, where files have other names.

    The BERT that Google published calls the gains and biases of norms gamma and beta, not weight
    and bias. In a model that was saved without its head, names lack the prefix `names.prefix`.
    Raises DataError if two tensors then have the same name.
    """
    pairs = []
    for name, where in stored.items():
        usual = re.sub(r"\.beta$", ".bias", name)
        usual = re.sub(r"\.gamma$", ".weight", usual)
        pairs.append((usual, where))
    renamed = _by_unique_name(pairs)
    if any(name.startswith(names.prefix) for name in renamed):
        return renamed

    prefixed = {}
    for name, where in renamed.items():
        if not _HEADS.fullmatch(name):  # a head's name has no prefix
            name = names.prefix + name
        prefixed[name] = where
    return prefixed


def _tied_tensors_differ(stored: Mapping[str, _StoredTensor], ties: Mapping[str, str]) -> bool:
    """Return whether two tied tensors are both stored, with different values.

    `stored` has tensors by name. `ties` maps the name of each tensor of a tied pair to the other's.
    """
    for name, twin in ties.items():
        if name in stored and twin in stored:
            one = stored[name]
            other = stored[twin]
            # Other types are not read here; they are refused later.
            are_floats = one.kind in _FLOATS and other.kind in _FLOATS
            if not (are_floats and np.array_equal(one.read(), other.read())):
                return True
    return False


def _missing_or_wrong(
    folder: Path,
    wanted: Mapping[Tensor, str],
    stored: Mapping[str, _StoredTensor],
    network: nn.Module,
) -> list[str]:
    """Return a line for each wanted tensor that is missing, or has a wrong shape or dtype.

    Args:
      folder: The checkpoint or adapter, for messages.
      wanted: Tensors of `network`, each with the name under which it should be stored.
      stored: The tensors in the files, by name.
      network: Determines the shapes.
    """
    leaves = _leaves(param_shapes(network))
    faults = []
    for tensor, name in wanted.items():
        # An array of the leaf's shape that takes no memory.
        leaf = np.broadcast_to(np.float32(0), leaves[tensor.path].shape)
        need = tensor.view_in(leaf).shape
        if name not in stored:
            faults.append(f"{folder}: {name}: missing, want {need}")
            continue
        where = stored[name]
        if where.shape != need:
            faults.append(f"{where.file}: {name}: have {where.shape}, want {need}")
        if where.kind not in _FLOATS:
            faults.append(f"{where.file}: {name}: have {where.kind}, want a float type")
    return faults


def _fault_lines(faults: list[str], most: int = 12) -> str:
    """Return a text with each fault once, sorted, on a line of its own.

    After `most` faults, the last line counts the rest.
    """
    faults = sorted(set(faults))
    lines = faults[:most]
    if len(faults) > most:
        lines.append(f"... and {len(faults) - most} more")
    return "\n".join(lines)
