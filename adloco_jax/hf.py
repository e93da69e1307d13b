"""Weights in and out of the Hugging Face layout: `config.json`, safetensors, tokenizer files.

Only JSON and safetensors are read, never a pickle; every tensor is named, and its shape and type
are checked, before memory is taken for it.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import PyTree
from safetensors.numpy import save_file

from adloco_jax.data.snapshot import HUB_NAME, snapshot
from adloco_jax.data.tokenizers import Tokenizer
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models.bert import Bert
from adloco_jax.models.llama import Llama

MAX_JSON_BYTES = 2**26  # of config.json, of an index, of a safetensors header
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HUB_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".msgpack", ".h5")
# Tensors that hold no parameter of ours: buffers that old versions saved.
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|bert\.embeddings\.position_ids")
_HEADS = re.compile(r"(lm_head|classifier|cls)\..*")

Network = Llama | Bert
N = TypeVar("N", int, float)


class Loaded(NamedTuple):
    """A network with its weights.

    Attributes:
      network: Computes in float32; `network.clone(dtype=...)` for another type.
      params: Float32 parameter tree of NumPy arrays.
      stored_as: Types the weights were stored in, such as `("bfloat16",)`.
    """

    network: Network
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


def _with_bias(path: tuple[str, ...], name: str, kind: str) -> tuple[_Tensor, _Tensor]:
    """A matrix or gain of BERT's, and the bias beside it."""
    weight = _Tensor((*path, kind), f"{name}.weight", transposed=kind == "kernel")
    return weight, _Tensor((*path, "bias"), f"{name}.bias")


_LAYER = "bert.encoder.layer.{}."
_BERT = (
    *(
        _Tensor((ours, "embedding"), f"bert.embeddings.{theirs}_embeddings.weight")
        for ours, theirs in (
            ("embed", "word"),
            ("position", "position"),
            ("token_type", "token_type"),
        )
    ),
    *_with_bias(("embed_norm",), "bert.embeddings.LayerNorm", "scale"),
    *(
        tensor
        for name in ("query", "key", "value")
        for tensor in _with_bias(
            ("layers", "attention", name), f"{_LAYER}attention.self.{name}", "kernel"
        )
    ),
    *_with_bias(("layers", "attention", "out"), f"{_LAYER}attention.output.dense", "kernel"),
    *_with_bias(("layers", "attention_norm"), f"{_LAYER}attention.output.LayerNorm", "scale"),
    *_with_bias(("layers", "mlp", "up"), f"{_LAYER}intermediate.dense", "kernel"),
    *_with_bias(("layers", "mlp", "down"), f"{_LAYER}output.dense", "kernel"),
    *_with_bias(("layers", "mlp_norm"), f"{_LAYER}output.LayerNorm", "scale"),
    *_with_bias(("pooler",), "bert.pooler.dense", "kernel"),
    *_with_bias(("classifier",), "classifier", "kernel"),
)


def entries(network: Network) -> tuple[_Tensor, ...]:
    """Where each leaf of a network's parameters lies in a checkpoint."""
    return _LLAMA if isinstance(network, Llama) else _BERT


def head_of(network: Network) -> str:
    """The parameters that `model.reinit_head` draws at random."""
    return "head" if isinstance(network, Llama) else "classifier"


def load(path_or_name: str | Path, *, head: bool = True) -> Loaded:
    """Reads a Llama for language modelling or a BERT for sequence classification.

    Args:
      path_or_name: A folder in Hugging Face layout with `config.json` and `model.safetensors`, or
        an index and its shards; else a hub name, of which what is in the cache is used without the
        network.
      head: Whether to read the matrix to the vocabulary, or to the classes. Without, it may be
        missing or another model's, and is left out of the parameters.

    Returns:
      Network, float32 weights, and what they were stored as. A tied head becomes a matrix of its
      own, equal to the embedding: the two then train apart.

    Raises:
      ConfigError: If the name leads nowhere.
      DataError: If the folder has another architecture, pickled weights only, or tensors that are
        missing, unexpected, misshapen, not of a float type or not finite: all of them, by name.
    """
    name = str(path_or_name)
    folder = _local(name) or _of_hub(name, _HUB_FILES, "*.safetensors", "checkpoint")
    network, config = _described(folder, head=head)
    wanted, read, stored_as = _opened(folder, network, config, head=head)
    tree = _shapes(network)

    def fill(entry: _Tensor) -> np.ndarray:
        leaf = np.empty(_at(tree, entry.path).shape, np.float32)
        for name, place in _layers(entry.name, len(leaf)):
            array = read(name)
            leaf[place] = array.T if entry.transposed else array
        return leaf

    return Loaded(network, _tree({entry.path: fill(entry) for entry in wanted}), stored_as)


def inspect(path_or_name: str | Path, *, head: bool = True) -> tuple[Network, bool]:
    """What `load` would read, but for the numbers.

    Args:
      path_or_name: As for `load`; of a hub name only `config.json` is fetched.
      head: As for `load`.

    Returns:
      The network, and whether names, shapes and types of its tensors were checked too, as those in
      a folder are.

    Raises:
      ConfigError: As `load`.
      DataError: As `load`, but for numbers that are not finite.
    """
    name = str(path_or_name)
    folder = _local(name)
    if folder is None:
        remote = _of_hub(name, ("config.json",), "config.json", "checkpoint")
        return _described(remote, head=head)[0], False
    network, config = _described(folder, head=head)
    _opened(folder, network, config, head=head)
    return network, True


def _described(folder: Path, *, head: bool) -> tuple[Network, dict]:
    """The network of a folder's `config.json`, and its content."""
    path = folder / "config.json"
    config = _read_json(path)
    describe = {"llama": _llama, "bert": _bert}.get(str(config.get("model_type")))
    if describe is None:
        raise DataError(
            f"{path}: model_type: have {str(config.get('model_type'))[:80]!r}, need 'llama' or"
            " 'bert'"
        )
    if not head:
        config = config | {"problem_type": None}  # which is the head's
    return describe(config, path), config


def save(
    params: PyTree,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    network: Network,
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
    for entry in entries(network):
        leaf = np.asarray(_at(params, entry.path)).astype(jnp.dtype(dtype))
        for name, place in _layers(entry.name, len(leaf)):
            array = leaf[place].T if entry.transposed else leaf[place]
            tensors[name] = np.ascontiguousarray(array)  # a view's strides would be lost
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    is_llama = isinstance(network, Llama)
    config = _llama_config(network, tokenizer) if is_llama else _bert_config(network)
    config |= {"dtype": dtype, "torch_dtype": dtype}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save(partial)
    for file in partial.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


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


def _of_hub(name: str, files: Sequence[str], needed: str, what: str) -> Path:
    return snapshot(name, files, one_of=[needed], where=name, what=what)


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


# --- config.json --------------------------------------------------------------------------------

# Their key, ours.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "max_length",
}


class _Config:
    """A `config.json` that is read key by key; what is wrong with it gathers in `faults`."""

    def __init__(self, content: Mapping, file: Path):
        self.content, self.file, self.faults = content, file, []

    def number(self, key: str, kind: type[N], default: object = None) -> N:
        """A positive number; 1 in place of what is none."""
        value = self.content.get(key, default)
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or not 0 < value < 2**31:
            have = str(value)[:80]
            self.faults.append(f"{self.file}: {key}: have {have}, need a positive {kind.__name__}")
            return kind(1)
        return kind(value)

    def sizes(self) -> dict[str, Any]:
        return {ours: self.number(theirs, int) for theirs, ours in _SIZES.items()}

    def need(self, key: str, needed: object, have: object) -> None:
        """What our network does not compute must be off: the weights would mean another one."""
        if have != needed:
            self.faults.append(f"{self.file}: {key}: have {str(have)[:80]}, need {needed}")

    def checked(self, network):
        """The network, if neither its description nor its sizes are at fault."""
        if not self.faults:
            try:
                _shapes(network)
            except (ValueError, OverflowError) as error:
                self.faults.append(f"{self.file}: {error}")
        if self.faults:
            raise DataError("\n".join(self.faults))
        return network


def _llama(content: Mapping, file: Path) -> Llama:
    config = _Config(content, file)
    sizes = config.sizes()
    # Once there were as many key heads as heads, and no key for them; null still says so.
    num_kv_heads = sizes["num_heads"]
    if content.get("num_key_value_heads") is not None:
        num_kv_heads = config.number("num_key_value_heads", int)
    rope: Mapping = {}
    for key in ("rope_parameters", "rope_scaling"):  # of both, transformers takes the second
        found = content.get(key) or {}
        if not isinstance(found, Mapping):
            raise DataError(f"{file}: {key}: have {str(found)[:80]}, need an object or null")
        kind = found.get("rope_type", found.get("type", "default"))
        config.need(f"{key}: rope type", "default", kind)
        rope = found or rope
    theta = rope.get("rope_theta", content.get("rope_theta", 10_000.0))
    norm_eps = config.number("rms_norm_eps", float, 1e-6)
    if type(theta) not in (int, float) or not 1 <= theta < 1e12:
        have = str(theta)[:80]
        config.faults.append(f"{file}: rope_theta: have {have}, need a number of at least 1")
        theta = 10_000.0
    head_size = sizes["width"] // sizes["num_heads"]
    config.need("hidden_act", "silu", content.get("hidden_act", "silu"))
    config.need("attention_bias", False, content.get("attention_bias", False))
    config.need("mlp_bias", False, content.get("mlp_bias", False))
    if content.get("head_dim") is not None:
        config.need("head_dim", head_size, config.number("head_dim", int))
    return config.checked(
        Llama(num_kv_heads=num_kv_heads, norm_eps=norm_eps, rope_theta=float(theta), **sizes)
    )


def _bert(content: Mapping, file: Path) -> Bert:
    config = _Config(content, file)
    sizes = config.sizes()
    names = content.get("id2label")
    num_classes = len(names) if isinstance(names, dict) else config.number("num_labels", int, 2)
    config.need("hidden_act", "gelu", content.get("hidden_act", "gelu"))
    position = content.get("position_embedding_type", "absolute")
    config.need("position_embedding_type", "absolute", position)
    config.need("is_decoder", False, content.get("is_decoder", False))
    needed = "single_label_classification"
    config.need("problem_type", needed, content.get("problem_type") or needed)
    return config.checked(
        Bert(
            num_classes=num_classes,
            type_vocab_size=config.number("type_vocab_size", int, 2),
            norm_eps=config.number("layer_norm_eps", float, 1e-12),
            **sizes,
        )
    )


def _llama_config(network: Llama, tokenizer: Tokenizer | None) -> dict:
    """What `transformers` 4 and 5 read: the rotary base under its old and new name."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(network, ours) for theirs, ours in _SIZES.items()},
        "num_key_value_heads": network.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": network.norm_eps,
        "rope_theta": network.rope_theta,
        "rope_parameters": {"rope_theta": network.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None if tokenizer is None else tokenizer.eot_id,
    }


def _bert_config(network: Bert) -> dict:
    labels = {str(label): f"LABEL_{label}" for label in range(network.num_classes)}
    return {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        **{theirs: getattr(network, ours) for theirs, ours in _SIZES.items()},
        "type_vocab_size": network.type_vocab_size,
        "layer_norm_eps": network.norm_eps,
        "hidden_act": "gelu",
        "problem_type": "single_label_classification",
        "id2label": labels,
        "label2id": {name: int(label) for label, name in labels.items()},
        "hidden_dropout_prob": 0.0,  # as it was trained
        "attention_probs_dropout_prob": 0.0,
    }


def _shapes(network: Network) -> PyTree:
    """The parameters' shapes."""
    tokens_BL, lengths_B = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,)))
    inputs = (tokens_BL,) if isinstance(network, Llama) else (tokens_BL, lengths_B)
    return jax.eval_shape(network.init, jax.random.key(0), *inputs)["params"]


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


def _opened(
    folder: Path, network: Network, config: Mapping, *, head: bool
) -> tuple[list[_Tensor], Callable[[str], np.ndarray], tuple[str, ...]]:
    """The tensors to read, what reads one by its name as float32, and the types they are stored in.

    All names, shapes and types are checked first.
    """
    files = _tensor_files(folder)
    if network.num_layers > len(files):
        raise DataError(
            f"{folder / 'config.json'} names {network.num_layers} layers, have {len(files)} tensors"
        )
    tied = {}
    if isinstance(network, Llama) and config.get("tie_word_embeddings") is True:
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
    tree = _shapes(network)
    chosen = [tensor for tensor in entries(network) if head or tensor.path[0] != head_of(network)]
    # Google's BERT, converted, has its norms' gains and biases under their first names.
    stored = {re.sub("gamma$", "weight", re.sub("beta$", "bias", name)): name for name in files}
    files = {name: files[old] for name, old in stored.items()}
    wanted = {}
    for entry in chosen:
        whole = _at(tree, entry.path).shape
        for name, place in _layers(entry.name, whole[0]):
            shape = whole if place is ... else whole[1:]
            wanted[tied.get(name, name)] = shape[::-1] if entry.transposed else shape
    faults = [f"{folder}: {name}: missing, want {wanted[name]}" for name in wanted.keys() - files]
    unknown = files.keys() - wanted.keys() - tied.keys()
    faults += [
        f"{folder}: {name}: unexpected"
        for name in unknown
        if not _BUFFERS.fullmatch(name) and (head or not _HEADS.fullmatch(name))
    ]
    opened = {file: safetensors.safe_open(file, framework="numpy") for file in set(files.values())}
    stored_as = set()
    for name in wanted.keys() & files:
        tensor = opened[files[name]].get_slice(stored[name])
        shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
        stored_as.add(_FLOATS.get(kind, kind))
        if shape != wanted[name]:
            faults.append(f"{files[name]}: {name}: have {shape}, want {wanted[name]}")
        if kind not in _FLOATS:
            faults.append(f"{files[name]}: {name}: have {kind}, want a float type")
    if faults:
        raise DataError(_listed(faults))

    def read(name: str) -> np.ndarray:
        name = tied.get(name, name)
        array = opened[files[name]].get_tensor(stored[name]).astype(np.float32)
        if not np.isfinite(array).all():
            raise DataError(f"{files[name]}: {name}: not all of its numbers are finite")
        return array

    return chosen, read, tuple(sorted(stored_as))


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
