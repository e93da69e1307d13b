"""Weights in and out of the Hugging Face layout: `config.json`, safetensors, tokenizer files.

Only JSON and safetensors are read, never a pickle; every tensor is named, and its shape and type
are checked, before memory is taken for it.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import PyTree
from safetensors.numpy import save_file

from adloco_jax.data.tokenizers import HUB_NAME, Tokenizer
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models.llama import Llama

MAX_JSON_BYTES = 2**26  # of config.json, of an index, of a safetensors header
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".msgpack", ".h5")
# Tensors that hold no parameter of ours: buffers that old versions saved.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")


class Loaded(NamedTuple):
    """A network with its weights.

    Attributes:
      network: Computes in float32; `network.clone(dtype=...)` for another type.
      params: Float32 parameter tree of NumPy arrays.
      stored_as: Types the weights were stored in, such as `("bfloat16",)`.
    """

    network: Llama
    params: PyTree
    stored_as: tuple[str, ...]


class _Tensor(NamedTuple):
    """Where one of our leaves lies in a checkpoint; `{}` in a name stands for the layer."""

    path: tuple[str, ...]
    name: str
    transposed: bool = False


_LLAMA = (
    _Tensor(("embed", "embedding"), "model.embed_tokens.weight"),
    _Tensor(("layers", "attention_norm", "scale"), "model.layers.{}.input_layernorm.weight"),
    *(
        _Tensor(
            ("layers", "attention", ours, "kernel"),
            f"model.layers.{{}}.self_attn.{theirs}_proj.weight",
            transposed=True,
        )
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
    ),
    _Tensor(("layers", "mlp_norm", "scale"), "model.layers.{}.post_attention_layernorm.weight"),
    *(
        _Tensor(
            ("layers", "mlp", name, "kernel"),
            f"model.layers.{{}}.mlp.{name}_proj.weight",
            transposed=True,
        )
        for name in ("gate", "up", "down")
    ),
    _Tensor(("norm", "scale"), "model.norm.weight"),
    _Tensor(("head", "kernel"), "lm_head.weight", transposed=True),
)


def load(path_or_name: str | Path) -> Loaded:
    """Reads a Llama (`LlamaForCausalLM`) from a folder in Hugging Face layout or from the hub.

    Args:
      path_or_name: A folder with `config.json` and `model.safetensors`, or an index and its shards;
        else a hub name, of which what is in the cache is used without the network.

    Returns:
      Network, float32 weights, and what they were stored as. A tied head becomes a matrix of its
      own, equal to the embedding: the two then train apart.

    Raises:
      ConfigError: If the name leads nowhere.
      DataError: If the folder has another architecture, pickled weights only, or tensors that are
        missing, unexpected, misshapen, not of a float type or not finite: all of them, by name.
    """
    folder = _find(str(path_or_name))
    config = _read_json(folder / "config.json")
    network, is_tied = _llama(config, folder / "config.json")
    files = _tensor_files(folder)
    if network.num_layers > len(files):
        raise DataError(
            f"{folder}: config.json names {network.num_layers} layers, have {len(files)} tensors"
        )
    tree = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
    return Loaded(network, *_read(folder, files, tree, _LLAMA, tied))


def save(
    params: PyTree,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    network: Llama,
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
      OSError: If the folder cannot be written.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {}
    for entry in _LLAMA:
        leaf = np.asarray(_at(params, entry.path)).astype(jnp.dtype(dtype))
        for name, place in _layers(entry.name, len(leaf)):
            array = leaf[place].T if entry.transposed else leaf[place]
            tensors[name] = np.ascontiguousarray(array)  # a view's strides would be lost
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = _llama_config(network, dtype, tokenizer)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(partial)
    for file in partial.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _find(name: str) -> Path:
    """The folder that a path or a hub name means."""
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
    return _download(name)


def _download(name: str) -> Path:
    """A hub checkpoint's snapshot; the network is asked only for what the cache does not have."""
    import huggingface_hub

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        try:
            folder = huggingface_hub.snapshot_download(
                name, allow_patterns=wanted, local_files_only=True
            )
        except (OSError, ValueError):
            folder = huggingface_hub.snapshot_download(name, allow_patterns=wanted)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: no folder of that name here, and the Hugging Face hub gave no checkpoint for"
            " it (wrong or private name, or no network); correct the name, log in, or give a local"
            " folder"
        ) from error
    return Path(folder)


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
        raise ValueError("a name stands there twice")
    return content


# --- Llama's config.json ----------------------------------------------------------------------

# Their key, ours; all are required but the number of key heads, which once was that of heads.
_LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "max_length",
}


def _llama(config: Mapping, file: Path) -> tuple[Llama, bool]:
    """The network that a `config.json` describes, and whether its head is its embedding."""
    faults = []

    def number(key: str, kind: type, default: object = None):
        value = config.get(key, default)
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or not 0 < value < 2**31:
            faults.append(f"{file}: {key}: have {str(value)[:80]}, need a positive {kind.__name__}")
            return kind(1)
        return kind(value)

    if config.get("model_type") != "llama":
        raise DataError(
            f"{file}: model_type: have {str(config.get('model_type'))[:80]!r}, need 'llama'"
        )
    sizes = {
        ours: number(
            theirs, int, config.get("num_attention_heads") if ours == "num_kv_heads" else None
        )
        for theirs, ours in _LLAMA_SIZES.items()
    }
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise DataError(f"{file}: rope_parameters: have {str(rope)[:80]}, need an object or null")
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    norm_eps = number("rms_norm_eps", float, 1e-6)
    if not isinstance(theta, int | float) or not 1 <= theta < 1e12:
        faults.append(f"{file}: rope_theta: have {str(theta)[:80]}, need a number of at least 1")
        theta = 10_000.0
    head_size = sizes["width"] // sizes["num_heads"]
    # What our Llama does not compute must be off, or the same weights would mean another function.
    for key, needed, have in (
        ("hidden_act", "silu", config.get("hidden_act", "silu")),
        ("attention_bias", False, config.get("attention_bias", False)),
        ("mlp_bias", False, config.get("mlp_bias", False)),
        ("rope type", "default", rope.get("rope_type", rope.get("type", "default"))),
        ("head_dim", head_size, config.get("head_dim") or head_size),
    ):
        if have != needed:
            faults.append(f"{file}: {key}: have {str(have)[:80]}, need {needed}")
    network = Llama(norm_eps=norm_eps, rope_theta=float(theta), **sizes)
    if not faults:
        try:
            jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        except (ValueError, OverflowError) as error:
            faults.append(f"{file}: {error}")
    if faults:
        raise DataError("\n".join(faults))
    return network, config.get("tie_word_embeddings") is True


def _llama_config(network: Llama, dtype: str, tokenizer: Tokenizer | None) -> dict:
    """What `transformers` 4 and 5 read: the rotary base and the type under old and new names."""
    eot_id = None if tokenizer is None else tokenizer.eot_id
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(network, ours) for theirs, ours in _LLAMA_SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": network.norm_eps,
        "rope_theta": network.rope_theta,
        "rope_parameters": {"rope_theta": network.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eot_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


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


def _read(
    folder: Path,
    files: Mapping[str, Path],
    tree: PyTree,
    entries: tuple[_Tensor, ...],
    tied: Mapping[str, str],
) -> tuple[PyTree, tuple[str, ...]]:
    """The float32 leaves of `tree`, and the types they were stored in; all is checked first."""
    wanted = {}
    for entry in entries:
        whole = _at(tree, entry.path).shape
        for name, place in _layers(entry.name, whole[0]):
            shape = whole if place is ... else whole[1:]
            wanted[tied.get(name, name)] = shape[::-1] if entry.transposed else shape
    faults = [f"{folder}: {name}: missing, want {wanted[name]}" for name in wanted.keys() - files]
    unknown = files.keys() - wanted.keys() - tied.keys()
    faults += [f"{folder}: {name}: unexpected" for name in unknown if not _BUFFERS.fullmatch(name)]
    opened = {file: safetensors.safe_open(file, framework="numpy") for file in set(files.values())}
    stored_as = set()
    for name in wanted.keys() & files:
        tensor = opened[files[name]].get_slice(name)
        shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
        stored_as.add(_FLOATS.get(kind, kind))
        if shape != wanted[name]:
            faults.append(f"{files[name]}: {name}: have {shape}, want {wanted[name]}")
        if kind not in _FLOATS:
            faults.append(f"{files[name]}: {name}: have {kind}, want a float type")
    if faults:
        raise DataError(_listed(faults))

    def fill(entry: _Tensor) -> np.ndarray:
        leaf = np.empty(_at(tree, entry.path).shape, np.float32)
        for name, place in _layers(entry.name, len(leaf)):
            name = tied.get(name, name)
            array = opened[files[name]].get_tensor(name).astype(np.float32)
            if not np.isfinite(array).all():
                raise DataError(f"{files[name]}: {name}: not all of its numbers are finite")
            leaf[place] = array.T if entry.transposed else array
        return leaf

    return _tree({entry.path: fill(entry) for entry in entries}), tuple(sorted(stored_as))


def _layers(name: str, num_layers: int) -> list[tuple[str, int | EllipsisType]]:
    """A leaf's tensors and where they lie in it: the whole, or its layers one by one."""
    return [(name.format(n), n) for n in range(num_layers)] if "{}" in name else [(name, ...)]


def _at(tree: PyTree, path: tuple[str, ...]):
    for name in path:
        tree = tree[name]
    return tree


def _tree(leaves: Mapping[tuple[str, ...], np.ndarray]) -> dict:
    tree: dict = {}
    for path, leaf in leaves.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = leaf
    return tree


def _listed(faults: list[str], most: int = 12) -> str:
    faults = sorted(faults)
    more = [f"... and {len(faults) - most} more"] if len(faults) > most else []
    return "\n".join(faults[:most] + more)
