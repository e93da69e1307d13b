"""Weights from and to the Hugging Face layout, and forged files."""

import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from nets import config_of
from safetensors.numpy import load_file, save_file

from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models import Bert, Llama, hf
from adloco_jax.models.layers import param_shapes
from adloco_jax.models.llama import RopeScaling

SIZES = dict(vocab_size=11, width=12, num_layers=3, num_heads=3, mlp_width=10, max_length=16)
NETWORK, BERT = Llama(**SIZES, num_kv_heads=1), Bert(**SIZES, num_classes=3)


def drawn(network):
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), param_shapes(network))


@pytest.fixture(scope="module")
def params():
    return drawn(NETWORK)


@pytest.fixture
def folder(tmp_path, params) -> Path:
    """A sound checkpoint."""
    hf.save(params, tmp_path / "llama", network=NETWORK)
    return tmp_path / "llama"


@pytest.fixture
def bert(tmp_path):
    """Random parameters, and the folder with them."""
    params = drawn(BERT)
    hf.save(params, tmp_path / "bert", load_tokenizer("bytes"), network=BERT)
    return params, tmp_path / "bert"


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert one.dtype == other.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def edit_config(folder: Path, **changes) -> None:
    """Sets keys of config.json; ... removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def split(folder: Path) -> dict[str, str]:
    """Divides the tensors between two shards with an index; returns its weight_map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = dict(list(tensors.items())[number - 1 :: 2])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(path, kind=DataError) -> str:
    with pytest.raises(kind) as caught:
        hf.load(path)
    return str(caught.value)


# --- Sound checkpoints ------------------------------------------------------------------------


def test_who_may_read_an_export_follows_the_umask(tmp_path, params):
    before = os.umask(0o027)
    try:
        hf.save(params, tmp_path / "export", load_tokenizer("bytes"), network=NETWORK)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()}
    assert modes == {0o640}


@pytest.mark.parametrize("base_dtype", [None, "bfloat16"])
def test_reading_takes_the_memory_of_the_file(tmp_path, base_dtype):
    dtype = base_dtype or "float32"
    network = Llama(**SIZES | {"width": 192, "mlp_width": 512, "num_layers": 8}, num_kv_heads=1)
    hf.save(drawn(network), tmp_path, network=network, dtype=dtype)
    hf.load(tmp_path, base_dtype=base_dtype)  # the first time includes imports
    tracemalloc.start()
    loaded = hf.load(tmp_path, base_dtype=base_dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    weights = loaded.params if base_dtype is None else loaded.base
    assert {leaf.dtype.name for leaf in jax.tree.leaves(weights)} == {dtype}
    assert peak < 1.3 * (tmp_path / "model.safetensors").stat().st_size


def test_what_is_saved_comes_back_bit_for_bit(folder, params):
    loaded = hf.load(folder)
    assert_same(loaded.params, params)
    assert loaded.network == NETWORK and loaded.stored_as == ("float32",)
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 3 + 9 * 3
    gate = tensors["model.layers.2.mlp.gate_proj.weight"]
    assert gate.shape == (10, 12)  # (outputs, inputs), as in PyTorch
    np.testing.assert_array_equal(gate, params["layers"]["mlp"]["gate"]["kernel"][2].T)
    (folder / "stale.txt").write_text("x")
    hf.save(params, folder, network=NETWORK, dtype="bfloat16")  # replaces the folder as a whole
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = hf.load(folder)
    assert loaded.stored_as == ("bfloat16",)
    half = ml_dtypes.bfloat16
    assert_same(loaded.params, jax.tree.map(lambda x: x.astype(half).astype(np.float32), params))


def test_shards_an_index_and_buffers_of_old_versions_are_one_checkpoint(folder, params):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: np.float32([1, 0.01])}))
    split(folder)
    assert_same(hf.load(folder).params, params)


# A family's attributes, and what config.json says of them.
FAMILIES = {
    "llama": ({"mlp_bias": True, "rope_scaling": RopeScaling(2.0)}, {}),
    "mistral": ({"window": 9, "head_size": 6}, {"sliding_window": 9, "head_dim": 6}),
    "qwen2": ({"qkv_bias": True, "tied": True}, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_comes_back_and_keeps_what_config_json_says_besides(tmp_path, family):
    attributes, config = FAMILIES[family]
    network = NETWORK.clone(**attributes)
    params, folder = drawn(network), tmp_path / "out"
    given = config and config_of(network, family, **config)
    hf.save(params, folder, network=network, config=given)
    edit_config(folder, eos_token_id=[3, 4], torch_dtype=..., generation={"top_k": 3})
    loaded, names = hf.load(folder), set(load_file(folder / "model.safetensors"))
    assert loaded.network == network and loaded.config["model_type"] == family
    assert_same(loaded.params, params)
    assert ("lm_head.weight" in names) != network.tied
    hf.save(loaded.params, folder, network=loaded.network, config=loaded.config)
    assert json.loads((folder / "config.json").read_text()) == loaded.config
    assert set(load_file(folder / "model.safetensors")) == names
    longer = network.clone(max_length=32)
    hf.save(loaded.params, folder, network=longer, config=loaded.config)
    assert hf.load(folder).network == longer and hf.load(folder).config["eos_token_id"] == [3, 4]


def test_two_tied_tensors_that_differ_are_not_tied(folder, params):
    edit_config(folder, tie_word_embeddings=True)
    loaded = hf.load(folder)
    assert loaded.network == NETWORK and loaded.config["tie_word_embeddings"] is False
    embedding = params["embed"]["embedding"]
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": embedding}))
    assert hf.load(folder).network == hf.inspect(folder).network == NETWORK.clone(tied=True)
    assert not hf.inspect(folder).lacks and "head" not in hf.load(folder, head=False).params


def test_the_hubs_cache_is_read_through_its_links(tmp_path, folder, params, monkeypatch):
    root = tmp_path / "hub" / "models--somebody--llama"
    snapshot = root / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    for file in sorted(folder.iterdir()):
        # the hub names a large file by its hash
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(root / "blobs" / blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert_same(hf.load("somebody/llama").params, params)


def test_an_export_generates_to_the_end_of_text_of_its_tokenizer(tmp_path, params):
    load_tokenizer("bytes").save(tmp_path / "own", None)
    for ends, kept in (([3, 256], [3, 256]), (7, [7, 256]), (None, [256])):
        generation = {"eos_token_id": ends, "top_k": 3}
        (tmp_path / "own" / "generation_config.json").write_text(json.dumps(generation))
        tokenizer = load_tokenizer(str(tmp_path / "own"))
        hf.save(params, tmp_path / "out", tokenizer, network=NETWORK)
        found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
        assert (found["eos_token_id"], found["top_k"]) == (kept, 3)


@pytest.mark.parametrize("kind", ["folder", "bert"])
def test_a_model_that_was_saved_without_its_head_lacks_the_prefix_too(request, kind):
    given = request.getfixturevalue(kind)
    folder, prefix = (given, "model.") if kind == "folder" else (given[1], "bert.")
    whole, heads = hf.load(folder), {"lm_head", "classifier"}

    def edit(tensors):
        for name in [*tensors]:
            tensor = tensors.pop(name)
            if name.startswith(prefix):
                tensors[name.removeprefix(prefix)] = tensor

    edit_tensors(folder, edit)
    body = {name: leaf for name, leaf in whole.params.items() if name not in {"head", *heads}}
    assert_same(hf.load(folder, head=False).params, body)
    (line, *_) = refused(folder).splitlines()
    assert line.split(": ")[1].split(".")[0] in heads and "missing" in line


def test_a_bert_comes_back_bit_for_bit_and_without_its_head(bert):
    params, folder = bert
    loaded = hf.load(folder)
    assert loaded.network == BERT
    assert_same(loaded.params, params)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["bert.encoder.layer.1.output.dense.weight"].shape == (12, 10)

    def edit(tensors):
        del tensors["classifier.weight"], tensors["classifier.bias"]
        tensors["cls.predictions.bias"] = np.ones(3, np.float32)
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[old] = tensors.pop(name)

    edit_tensors(folder, edit)
    line = refused(folder)
    assert "classifier.bias: missing, want (3,)" in line and "cls.predictions.bias" in line
    loaded = hf.load(folder, head=False)
    assert loaded.network == BERT and loaded.left_out == ("cls.predictions.bias",)
    assert "classifier" not in loaded.params
    assert_same(loaded.params, {name: params[name] for name in params if name != "classifier"})


# --- Checkpoints that are refused -------------------------------------------------------------


GAIN = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    "name, array, fault",
    [
        (GAIN, None, "missing, want (12,)"),
        ("lm_head.weight", None, "missing"),  # the head is not tied
        ("bias", np.ones(3, np.float32), "unexpected"),
        (GAIN, np.ones(13, np.float32), "have (13,), want (12,)"),
        (GAIN, np.ones(12, np.int8), "have I8, want a float type"),
        (GAIN, np.float32([1] * 11 + [np.nan]), "not all of its numbers are finite"),
        (GAIN.replace("weight", "gamma"), np.ones(12, np.float32), "stored twice"),
    ],
)
def test_a_bad_tensor_is_named(folder, name, array, fault):
    edit_tensors(folder, lambda t: t.pop(name) if array is None else t.update({name: array}))
    line = refused(folder)
    assert f"{name.replace('gamma', 'weight')}: {fault}" in line and str(folder) in line


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "leads out of its folder" in refused(folder, ConfigError)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("model_type", "gemma", "have 'gemma', need 'llama' or 'mistral' or"),
        ("model_type", ["llama"], "have ['llama'], need 'llama' or"),
        ("hidden_act", "gelu", "have gelu, need silu"),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}, "have yarn, need default"),
        ("rope_parameters", {"full_attention": {}}, ", need one object for all layers"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: have 0.5"),
        ("quantization_config", {"quant_method": "gptq"}, "have weights quantised by gptq"),
        ("attention_bias", "no", "keys: have one that transformers refuses, need"),
        ("rms_norm_eps", float("nan"), "have nan"),
        ("num_key_value_heads", -1, "have -1, need a positive int"),
        ("hidden_size", "12", "hidden_size: have 12, need a positive int"),
        ("vocab_size", ..., "vocab_size: have None"),
        ("num_hidden_layers", 10**9, "have 1000000000, need a positive int below 4096"),
        ("pad_token_id", 11, "have 11, need null or an id below 11"),
        ("head_dim", 5, "=5"),
    ],
)
def test_what_describes_another_model_is_named(folder, key, value, fault):
    edit_config(folder, **{key: value})
    line = refused(folder)
    assert f"{folder / 'config.json'}: " in line and fault in line and "\n" not in line


DAMAGES = {
    "truncated": lambda content: content[:-5],
    "header of 2^60": lambda content: (2**60).to_bytes(8, "little") + content[8:],
    "no json": lambda content: content[:8] + b"x" * len(content[8:]),
    "deep": lambda content: (10**6).to_bytes(8, "little") + b"[" * 10**6,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_takes_no_memory(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = refused(folder)
    assert "model.safetensors: damaged, or no safetensors file" in line and "\n" not in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.npz", "model.safetensors"])
def test_nothing_in_a_pickle_runs(folder, tmp_path, name):
    canary = tmp_path / "canary"
    (folder / "model.safetensors").unlink()
    for content in (Payload(canary), np.ones(3), {GAIN: Payload(canary)}, [1, 2]):
        (folder / name).write_bytes(pickle.dumps(content))
        assert "model.safetensors" in refused(folder)
        assert name in refused(folder / name)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()


@pytest.mark.parametrize("name", ["../llama2/x.safetensors", "/etc/x.safetensors", "", "model.bin"])
def test_an_index_leads_to_nothing_outside_its_folder(folder, tmp_path, name):
    weight_map = split(folder)
    shutil.copytree(folder, tmp_path / "llama2")
    write_index(folder, weight_map | {GAIN: name})
    assert f"index.weight_map.{GAIN}: have" in refused(folder)


def test_a_bad_index_is_refused(folder):
    weight_map = split(folder)
    shard = min(weight_map.values())
    for bad, fault in [
        (None, "index.weight_map: have None"),
        ({GAIN: 3}, "have 3, expected a valid string"),
        (dict.fromkeys(weight_map, shard), "missing, want"),
        (weight_map | {GAIN: "a.safetensors"}, "a.safetensors: damaged, or no safetensors file"),
    ]:
        write_index(folder, bad)
        assert fault in refused(folder)
    write_index(folder, weight_map)
    for file in sorted(set(weight_map.values())):
        save_file(load_file(folder / file) | {GAIN: np.ones(12, np.float32)}, folder / file)
    assert f"{GAIN}: stored twice" in refused(folder)


def test_reading_a_checkpoint_without_pytorch_gives_no_advice_to_install_it():
    code = "import sys; sys.modules['torch'] = None; import adloco_jax.models.hf"
    code += "; from transformers import CONFIG_MAPPING; CONFIG_MAPPING['llama']"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
