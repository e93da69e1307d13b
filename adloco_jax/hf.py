"""Weights in and out of the Hugging Face layout: `config.json`, safetensors, tokenizer files.

Only JSON and safetensors are read, never a pickle; every tensor is named, and its shape and type
are checked, before memory is taken for it. The names are those of `models.weight_maps`.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import safetensors
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree
from safetensors.numpy import save_file

from adloco_jax.data.snapshot import HUB_NAME, snapshot
from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models.architectures import ARCHITECTURES
from adloco_jax.models.layers import param_shapes
from adloco_jax.models.weight_maps import WeightMap

MAX_JSON_BYTES = 2**26  # of config.json, of an index, of a safetensors header
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HUB_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".msgpack", ".h5")
# Tensors that hold no parameter of ours: buffers that old versions saved.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|bert\.embeddings\.position_ids")
_HEADS = re.compile(r"(lm_head|classifier|cls)\..*")


class Loaded(NamedTuple):
    """A model with its weights.

    Attributes:
      network: Computes in float32; `network.clone(dtype=...)` for another type.
      params: Float32 parameter tree of NumPy arrays.
      stored_as: Types the weights were stored in, such as `("bfloat16",)`.
    """

    network: nn.Module
    params: PyTree
    stored_as: tuple[str, ...]


def weight_map(network: nn.Module) -> WeightMap | None:
    """What Hugging Face calls the parts of a model; None if no architecture says."""
    return next((known for known in _weight_maps() if type(network) is known.model), None)


class Tensor(NamedTuple):
    """A tensor of a checkpoint, and where it lies in our parameters.

    Attributes:
      name: Its own name.
      path: Of our leaf.
      place: The layer's index in the leaf; `...` for the whole leaf.
      transposed: Whether the tensor is the transpose of ours.
    """

    name: str
    path: tuple[str, ...]
    place: int | EllipsisType
    transposed: bool

    def of(self, leaf: np.ndarray) -> np.ndarray:
        """The tensor as a view of our leaf."""
        return leaf[self.place].T if self.transposed else leaf[self.place]


def tensors(network: nn.Module, names: WeightMap) -> list[Tensor]:
    """All tensors of a model's checkpoint."""
    found = []
    for path, leaf in _leaves(param_shapes(network)).items():
        module, kind = names.modules["/".join(path[:-1])], path[-1]
        name = f"{module}.{'bias' if kind == 'bias' else 'weight'}"
        places = range(leaf.shape[0]) if "{}" in name else (...,)
        found += [Tensor(name.format(place), path, place, kind == "kernel") for place in places]
    return found


def load(path_or_name: str | Path, *, head: bool = True) -> Loaded:
    """Reads a model of an architecture that has a weight map: Llama, or BERT for classification.

    Args:
      path_or_name: A folder in Hugging Face layout with `config.json` and `model.safetensors`, or
        an index and its shards; else a hub name, of which what is in the cache is used without the
        network.
      head: Whether to read the matrix to the vocabulary, or to the classes. Without, it may be
        missing or another model's, and is left out of the parameters.

    Returns:
      Model, float32 weights, and what they were stored as. A tied head becomes a matrix of its
      own, equal to the embedding: the two then train apart.

    Raises:
      ConfigError: If the name leads nowhere.
      DataError: If the folder has another architecture, pickled weights only, or tensors that are
        missing, unexpected, misshapen, not of a float type or not finite: all of them, by name.
    """
    name = str(path_or_name)
    folder = _local(name) or _of_hub(name, _HUB_FILES, "*.safetensors")
    described = _described(folder, head=head)
    network, checkpoint = described.network, _opened(folder, described, head=head)
    shapes, leaves = _leaves(param_shapes(network)), {}
    for tensor in checkpoint.wanted:
        shape = shapes[tensor.path].shape
        leaf = leaves.setdefault(tensor.path, np.empty(shape, np.float32))
        array = checkpoint.read(tensor.name)
        leaf[tensor.place] = array.T if tensor.transposed else array
    return Loaded(network, unflatten_dict(leaves), checkpoint.stored_as)


def inspect(path_or_name: str | Path, *, head: bool = True) -> tuple[nn.Module, bool]:
    """What `load` would read, but for the numbers.

    Args:
      path_or_name: A folder or hub name; of a hub name only `config.json` is fetched.
      head: Whether the matrix to the vocabulary, or to the classes, would be read.

    Returns:
      The model, and whether names, shapes and types of its tensors were checked too, which is so
      for a folder.

    Raises:
      ConfigError: If the name leads nowhere.
      DataError: For all that `load` refuses except numbers that are not finite.
    """
    name = str(path_or_name)
    folder = _local(name)
    if folder is None:
        remote = _of_hub(name, ("config.json",), "config.json")
        return _described(remote, head=head).network, False
    described = _described(folder, head=head)
    _opened(folder, described, head=head)
    return described.network, True


def save(
    params: PyTree,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    network: nn.Module,
    dtype: str = "float32",
) -> None:
    """Writes a folder that `transformers` loads without a missing or unexpected key.

    Args:
      params: One model's parameters.
      folder: Replaced as a whole once everything is written, if it exists.
      tokenizer: Written beside the weights, with the same ids.
      network: What the parameters belong to.
      dtype: "float32", which loses nothing, or "bfloat16".

    Raises:
      ConfigError: If no architecture has a weight map for this model.
      OSError: If the folder cannot be written.
    """
    folder, names = Path(folder), weight_map(network)
    if names is None:
        raise ConfigError(
            f"{folder}: {type(network).__name__} has no Hugging Face names; give its Architecture"
            " a weight_map"
        )
    config = {"architectures": [names.class_name], "model_type": names.model_type}
    config |= {theirs: getattr(network, ours) for theirs, (ours, _) in names.sizes.items()}
    config |= {**names.fixed, **names.extra(network), "dtype": dtype, "torch_dtype": dtype}
    if tokenizer is not None and "eos_token_id" in config:
        config["eos_token_id"] = tokenizer.eot_id
    leaves = {
        path: np.asarray(leaf).astype(jnp.dtype(dtype)) for path, leaf in _leaves(params).items()
    }
    arrays = {
        # Contiguous, as the file would lose a view's strides.
        tensor.name: np.ascontiguousarray(tensor.of(leaves[tensor.path]))
        for tensor in tensors(network, names)
    }
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(arrays, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(partial)
    for file in partial.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _leaves(tree: PyTree) -> dict[tuple[str, ...], Any]:
    return flatten_dict(tree)


def _weight_maps() -> list[WeightMap]:
    return [known.weight_map for known in ARCHITECTURES.values() if known.weight_map is not None]


def _local(name: str) -> Path | None:
    """The folder that a path means; None of what may be a hub name."""
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return path
        if path.is_file():
            kind = "pickled weights are never read" if path.suffix in _PICKLES else "a file"
            raise DataError(f"{path}: {kind}; give a folder with config.json and model.safetensors")
    except (OSError, ValueError) as error:  # a name with NUL in it, or too long
        raise DataError(f"{name[:200]!r}: {error}") from error
    if not HUB_NAME.fullmatch(name):
        raise DataError(f"{name}: no such folder")
    return None


def _of_hub(name: str, files: Sequence[str], needed: str) -> Path:
    return snapshot(name, files, one_of=[needed], where=name, what="checkpoint")


def _read_json(file: Path) -> dict:
    try:
        with open(file, "rb") as opened:
            text = opened.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        content = json.loads(text, object_pairs_hook=_no_repeated_key)
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; a folder in Hugging Face layout has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: no readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: have a JSON {type(content).__name__}, need an object")
    return content


def _no_repeated_key(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name occurs twice")
    return content


# --- config.json --------------------------------------------------------------------------------


class _Described(NamedTuple):
    """What a `config.json` says: its model, and whether head and embedding are one matrix."""

    network: Any
    names: WeightMap
    tied: bool


def _described(folder: Path, *, head: bool) -> _Described:
    """Reads `config.json`; DataError names all its faults at once."""
    path, faults = folder / "config.json", []

    def fault(key: str, have: object, need: object) -> None:
        faults.append(f"{path}: {key}: have {str(have)[:80]}, need {need}")

    config = _read_json(path)
    known = {names.model_type: names for names in _weight_maps()}
    names = known.get(str(config.get("model_type")))
    if names is None:
        have = f"have {str(config.get('model_type'))[:80]!r}"
        raise DataError(f"{path}: model_type: {have}, need {' or '.join(map(repr, known))}")
    content = names.normalise(config if head else config | {"problem_type": None}, fault)
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(names.model)}
    sizes: dict[str, Any] = {}
    for key, (ours, default) in names.sizes.items():
        value, kind = content.get(key, default), kinds[ours]
        usable = isinstance(value, int | kind) and not isinstance(value, bool)
        if not usable or not 0 < value < 2**31:
            fault(key, value, f"a positive {kind.__name__}")
        else:
            sizes[ours] = kind(value)
    for key, need in names.fixed.items():
        if content.get(key, need) != need:
            fault(key, content[key], need)
    if not faults and content.get("head_dim") is not None:
        head_size = sizes["width"] // sizes["num_heads"]
        if isinstance(content["head_dim"], bool) or content["head_dim"] != head_size:
            fault("head_dim", content["head_dim"], head_size)
    if not faults:
        network = names.model(**sizes)
        try:
            param_shapes(network)
            return _Described(network, names, config.get("tie_word_embeddings") is True)
        except (ValueError, OverflowError) as error:
            faults.append(f"{path}: {error}")
    raise DataError("\n".join(faults))


# --- safetensors ------------------------------------------------------------------------------


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Each tensor's file."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return dict.fromkeys(_names_in(_inside(folder, whole.name, whole)), whole)
    if not index.exists():
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
        have = f"have {', '.join(pickled[:3])}, which is never read" if pickled else "have neither"
        raise DataError(
            f"{folder}: need model.safetensors, or an index and its shards; {have}; convert with"
            " `save_pretrained(..., safe_serialization=True)`"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise DataError(f"{index}: need a weight_map from tensor to file")
    files = {name: _inside(folder, name, index) for name in sorted(set(weight_map.values()))}
    have = {name: file for file in files.values() for name in _names_in(file)}
    misplaced = [
        f"{index}: {name}: not in {file}"
        for name, file in weight_map.items()
        if have.get(name) != files[file]
    ]
    if misplaced:
        raise DataError(_listed(misplaced))
    return have


def _inside(folder: Path, name: str, index: Path) -> Path:
    """A file of the folder by its bare name; a link may lead to the hub's own cache only."""
    is_bare = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
    if not is_bare or not name.endswith(".safetensors"):
        raise ConfigError(
            f"{index}: {name[:200]!r} is not the name of a .safetensors file beside it"
        )
    # The hub's cache has links from models--x--y/snapshots/<commit>/ to models--x--y/blobs/.
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    target = (folder / name).resolve()
    if target.parent not in allowed:
        raise ConfigError(f"{folder / name}: leads out of its folder, to {target}")
    if not target.is_file():
        raise DataError(f"{folder / name}: no such file; {index.name} names it")
    return folder / name


def _names_in(file: Path) -> list[str]:
    """Names of a file's tensors, each of which stands there once."""
    try:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > min(MAX_JSON_BYTES, file.stat().st_size):
                raise ValueError(f"a header of {size} bytes")
            json.loads(opened.read(size), object_pairs_hook=_no_repeated_key)
        with safetensors.safe_open(file, framework="numpy") as tensors:
            return list(tensors.keys())
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise DataError(f"{file}: damaged, or no safetensors file ({error})") from error


class _Checkpoint(NamedTuple):
    """An opened checkpoint, all of whose names, shapes and types are those the model needs."""

    wanted: list[Tensor]
    where: Mapping[str, tuple[Path, Any, str]]  # by tensor: file, its handle, the name there
    stored_as: tuple[str, ...]

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32; DataError if it is not finite."""
        path, opened, stored = self.where[name]
        array = opened.get_tensor(stored).astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name}: not all of its numbers are finite")
        return array


def _opened(folder: Path, described: _Described, *, head: bool) -> _Checkpoint:
    network, names, is_tied = described
    files = _tensor_files(folder)
    if network.num_layers > len(files):
        raise DataError(
            f"{folder / 'config.json'} names {network.num_layers} layers, have {len(files)} tensors"
        )
    tied = names.ties if is_tied else {}
    wanted = [
        tensor._replace(name=tied.get(tensor.name, tensor.name))
        for tensor in tensors(network, names)
        if head or tensor.path[0] != names.head
    ]
    opened = {file: safetensors.safe_open(file, framework="numpy") for file in set(files.values())}
    # Google's BERT, converted, has its norms' gains and biases under their first names.
    where = {
        re.sub("gamma$", "weight", re.sub("beta$", "bias", name)): (file, opened[file], name)
        for name, file in files.items()
    }
    faults = [
        f"{folder}: {name}: unexpected"
        for name in where.keys() - {tensor.name for tensor in wanted} - tied.keys()
        if not _BUFFERS.fullmatch(name) and (head or not _HEADS.fullmatch(name))
    ]
    leaves, stored_as = _leaves(param_shapes(network)), set()
    for tensor in wanted:
        shape = leaves[tensor.path].shape[0 if tensor.place is ... else 1 :]
        need = shape[::-1] if tensor.transposed else shape
        if tensor.name not in where:
            faults.append(f"{folder}: {tensor.name}: missing, want {need}")
            continue
        path, handle, stored = where[tensor.name]
        header = handle.get_slice(stored)
        have, kind = tuple(header.get_shape()), header.get_dtype()
        stored_as.add(_FLOATS.get(kind, kind))
        if have != need:
            faults.append(f"{path}: {tensor.name}: have {have}, want {need}")
        if kind not in _FLOATS:
            faults.append(f"{path}: {tensor.name}: have {kind}, want a float type")
    if faults:
        raise DataError(_listed(faults))
    return _Checkpoint(wanted, where, tuple(sorted(stored_as)))


def _listed(faults: list[str], most: int = 12) -> str:
    faults = sorted(set(faults))
    more = [f"... and {len(faults) - most} more"] if len(faults) > most else []
    return "\n".join(faults[:most] + more)
