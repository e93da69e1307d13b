"""Weights in and out of the Hugging Face layout, and files that are not what they claim to be."""

import json
import pickle
import resource
import shutil
import struct
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from adloco_jax import hf
from adloco_jax.data.tokenizers import load_tokenizer
from adloco_jax.errors import ConfigError, DataError
from adloco_jax.models import Bert, Llama
from adloco_jax.models.layers import param_shapes

SIZES = dict(vocab_size=11, width=12, num_layers=3, num_heads=3, mlp_width=10, max_length=16)
NETWORK, BERT = Llama(**SIZES, num_kv_heads=1), Bert(**SIZES, num_classes=3)
TEXTS = ["Hello wörld  two\n\tspaces 日本", " lead", "trail ", "", "a\x00b\x7f", "<|endoftext|>"]


def drawn(network):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), param_shapes(network)
    )


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
    """Drawn parameters, and the folder they were saved in."""
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


def test_what_is_saved_comes_back_bit_for_bit(folder, params):
    loaded = hf.load(folder)
    assert_same(loaded.params, params)
    assert loaded.network == NETWORK and loaded.stored_as == ("float32",)
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 3 + 9 * 3
    gate = tensors["model.layers.2.mlp.gate_proj.weight"]
    assert gate.shape == (10, 12)  # outputs, inputs: the order of PyTorch
    np.testing.assert_array_equal(gate, params["layers"]["mlp"]["gate"]["kernel"][2].T)


def test_shards_an_index_and_buffers_of_old_versions_are_one_checkpoint(folder, params):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: np.ones(2, np.float32)}))
    split(folder)
    assert_same(hf.load(folder).params, params)


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_float_types_are_cast_and_reported(folder, params, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    edit_tensors(
        folder, lambda t: t.update({name: array.astype(kind) for name, array in t.items()})
    )
    loaded = hf.load(folder)
    assert loaded.stored_as == (dtype,)
    assert_same(loaded.params, jax.tree.map(lambda x: x.astype(kind).astype(np.float32), params))


def test_bfloat16_is_written_on_request(tmp_path, params):
    hf.save(params, tmp_path / "half", network=NETWORK, dtype="bfloat16")
    assert hf.load(tmp_path / "half").stored_as == ("bfloat16",)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("stores_head", [False, True])
def test_a_tied_head_is_the_embedding(folder, params, stores_head):
    edit_config(folder, tie_word_embeddings=True)
    if not stores_head:
        edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    tied = params | {"head": {"kernel": params["embed"]["embedding"].T}}
    assert_same(hf.load(folder).params, tied)


def test_old_and_new_keys_of_the_config(folder):
    edit_config(folder, rope_parameters=..., rope_theta=5e5)
    assert hf.load(folder).network.rope_theta == 5e5
    edit_config(folder, rope_theta=..., rope_parameters={"rope_theta": 7e5, "rope_type": "default"})
    assert hf.load(folder).network.rope_theta == 7e5
    edit_config(folder, rope_parameters=..., rope_scaling=None, head_dim=None)
    assert hf.load(folder).network.rope_theta == 10_000.0
    for absent in (..., None):  # as many key heads as heads, which these weights are not
        edit_config(folder, num_key_value_heads=absent)
        assert "k_proj.weight: have (4, 12), want (12, 12)" in refused(folder)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_theta": 9e5}])
def test_of_both_keys_of_the_rotation_transformers_takes_the_older(folder, scaling):
    edit_config(folder, rope_theta=5e5, rope_parameters={"rope_theta": 7e5}, rope_scaling=scaling)
    config = json.loads((folder / "config.json").read_text())
    theirs = transformers.LlamaConfig(**config).rope_parameters["rope_theta"]
    assert hf.load(folder).network.rope_theta == theirs


def test_a_foreign_checkpoint_is_read(data_dir):
    loaded = hf.load(data_dir / "fixtures" / "opendiloco_llama-2m-fresh")
    assert loaded.network.vocab_size == 1024 and loaded.network.num_layers == 2
    assert abs(loaded.params["embed"]["embedding"].std() - 0.02) < 1e-3


def test_the_hubs_cache_is_read_through_its_links(tmp_path, folder, params, monkeypatch):
    root = tmp_path / "hub" / "models--somebody--llama"
    snapshot = root / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(root / "blobs" / f"{number:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert_same(hf.load("somebody/llama").params, params)


def test_an_unreachable_hub_name_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    line = refused("nobody/nothing-of-the-kind", ConfigError)
    assert "give a local path" in line and "\n" not in line and "Repo id" not in line


@pytest.mark.parametrize("name", ["bytes", "torchtune_tokenizer_2000.json", "mistral-v1.model"])
def test_an_exported_tokenizer_gives_the_same_ids(tmp_path, params, request, name):
    if name != "bytes":
        name = str(request.getfixturevalue("data_dir") / "tokenizers" / name)
    tokenizer = load_tokenizer(name)
    hf.save(params, tmp_path / "out", tokenizer, network=NETWORK)
    exported = load_tokenizer(str(tmp_path / "out"))
    assert (exported.vocab_size, exported.eot_id) == (tokenizer.vocab_size, tokenizer.eot_id)
    for text, ids, same in zip(
        TEXTS, tokenizer.encode_batch(TEXTS), exported.encode_batch(TEXTS), strict=True
    ):
        np.testing.assert_array_equal(ids, same, err_msg=text)
        assert exported.decode(same) == tokenizer.decode(ids)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eot_id and config["bos_token_id"] is None


def test_a_unigram_model_is_exported_as_one(tmp_path, data_dir):
    tokenizer = load_tokenizer(str(data_dir / "tokenizers" / "torchtune_m_2000.model"))
    tokenizer.save(tmp_path)
    text = (data_dir / "text" / "tinyshakespeare.txt").read_text()[:20_000]
    (ids,), (same,) = (
        tokenizer.encode_batch([text]),
        load_tokenizer(str(tmp_path)).encode_batch([text]),
    )
    np.testing.assert_array_equal(ids, same)


def test_an_older_export_is_replaced_as_a_whole(folder, params):
    (folder / "stale.txt").write_text("x")
    hf.save(params, folder, network=NETWORK)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_bert_comes_back_bit_for_bit(bert):
    params, folder = bert
    loaded = hf.load(folder)
    assert loaded.network == BERT
    assert_same(loaded.params, params)
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 3 + 2 + 3 * 16 + 4
    assert tensors["bert.encoder.layer.1.output.dense.weight"].shape == (12, 10)


def test_a_bert_without_its_head_and_with_another_models(bert):
    params, folder = bert

    def edit(tensors):
        del tensors["classifier.weight"], tensors["classifier.bias"]
        tensors["cls.predictions.bias"] = np.ones(3, np.float32)
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[old] = tensors.pop(name)

    edit_tensors(folder, edit)
    line = refused(folder)
    assert "classifier.bias: missing, want (3,)" in line and "cls.predictions.bias" in line
    edit_config(folder, problem_type="multi_label_classification")  # of the head that is left out
    loaded = hf.load(folder, head=False)
    assert loaded.network == BERT
    assert "classifier" not in loaded.params
    assert_same(loaded.params, {name: params[name] for name in params if name != "classifier"})


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(hidden_act="relu"), "hidden_act: have relu, need gelu"),
        (dict(position_embedding_type="relative_key"), "position_embedding_type"),
        (dict(is_decoder=True), "is_decoder: have True"),
        (dict(type_vocab_size=0), "type_vocab_size: have 0"),
        (dict(id2label=..., num_labels=5), "classifier.bias: have (3,), want (5,)"),
        (dict(problem_type="multi_label_classification"), "problem_type: have multi_label_class"),
    ],
)
def test_another_bert_is_refused(bert, changes, expected):
    edit_config(bert[1], **changes)
    assert expected in refused(bert[1])


# --- Checkpoints that are refused -------------------------------------------------------------


def put(name, array):
    return lambda tensors: tensors.update({name: array})


GAIN = "model.layers.1.input_layernorm.weight"
NOT_FINITE = np.ones(12, np.float32)
NOT_FINITE[7] = np.nan
UP = "model.layers.0.mlp.up_proj.weight"
BAD_TENSORS = [
    (lambda t: t.pop(GAIN), [f"{GAIN}: missing, want (12,)"]),
    (put("bias", np.ones(3, np.float32)), ["bias: unexpected"]),
    (put(GAIN, np.ones(13, np.float32)), [f"{GAIN}: have (13,), want (12,)"]),
    (put(UP, np.ones((12, 10), np.float32)), [f"{UP}: have (12, 10), want (10, 12)"]),
    (put(GAIN, np.ones(12, np.int8)), [f"{GAIN}: have I8, want a float type"]),
    (put(GAIN, NOT_FINITE), [f"{GAIN}: not all of its numbers are finite"]),
    (lambda t: t.pop("lm_head.weight"), ["lm_head.weight: missing"]),  # and not tied
    (lambda t: t.update({"bias": t.pop(GAIN)}), [f"{GAIN}: missing", "bias: unexpected"]),
]


@pytest.mark.parametrize("edit, expected", BAD_TENSORS)
def test_a_bad_tensor_is_named(folder, edit, expected):
    edit_tensors(folder, edit)
    lines = refused(folder)
    assert all(part in lines for part in expected) and str(folder) in lines


BAD_CONFIGS = [
    (dict(model_type="mistral"), "model_type: have 'mistral', need 'llama' or 'bert'"),
    (dict(hidden_act="gelu"), "hidden_act: have gelu, need silu"),
    (dict(attention_bias=True), "attention_bias: have True"),
    (dict(rope_parameters={"rope_type": "llama3"}), "rope type: have llama3, need default"),
    (dict(rope_parameters=..., rope_scaling={"type": "linear"}), "rope type: have linear"),
    (dict(rope_scaling={"rope_type": "linear"}), "rope_scaling: rope type: have linear, need defa"),
    (dict(rope_parameters={"rope_theta": True}), "rope_theta: have True"),
    (dict(rope_parameters={"rope_theta": "1e4"}), "rope_theta: have 1e4"),
    (dict(rope_parameters="x"), "rope_parameters: have x"),
    (dict(num_key_value_heads=False), "num_key_value_heads: have False"),
    (dict(head_dim=False), "head_dim: have False"),
    (dict(head_dim=8), "head_dim: have 8, need 4"),
    (dict(hidden_size="12"), "hidden_size: have 12, need a positive int"),
    (dict(vocab_size=...), "vocab_size: have None"),
    (dict(num_hidden_layers=2**62), "num_hidden_layers"),
    (dict(num_hidden_layers=10**9), "1000000000 layers, have 30 tensors"),
    (dict(intermediate_size=-10), "intermediate_size: have -10"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps: have nan"),
    (dict(num_attention_heads=5), "num_heads=5, width=12: the heads must divide the width"),
]


@pytest.mark.parametrize("changes, expected", BAD_CONFIGS)
def test_another_architecture_is_refused(folder, changes, expected):
    edit_config(folder, **changes)
    assert expected in refused(folder)


def with_header(header: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + body


DAMAGES = {
    "truncated": lambda content, header, body: content[:-5],
    "appended": lambda content, header, body: content + b"\0" * 8,
    "empty": lambda content, header, body: b"",
    "header of 2^60": lambda content, header, body: (2**60).to_bytes(8, "little") + content[8:],
    "no json": lambda content, header, body: with_header("x" * len(header), body),
    "twice": lambda content, header, body: with_header(
        "{" + header[1:].split("},", 1)[0] + "}," + header[1:], body
    ),
    "shape of 2^62": lambda content, header, body: with_header(
        header.replace('"shape":[12]', '"shape":[4611686018427387904]', 1), body
    ),
    "deep": lambda content, header, body: with_header("[" * 10**6),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_takes_no_memory(folder, damage):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(damage(content, content[8:end].decode(), content[end:]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = refused(folder)
    assert "model.safetensors: damaged, or no safetensors file" in line and "\n" not in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.pt", "weights.ckpt", "model.npz", "model.safetensors"],
)
def test_a_pickle_is_never_read(folder, tmp_path, name):
    canary = tmp_path / "canary"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    line = refused(folder)
    assert name in line and not canary.exists()
    assert name in refused(folder / name) and not canary.exists()


OUTSIDE = ["../llama2/x.safetensors", "/etc/x.safetensors", "~/x.safetensors", "a\0.safetensors"]
OUTSIDE += ["..", "", "sub/x.safetensors", "model.bin"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_opens_nothing_outside_its_folder(folder, tmp_path, name):
    weight_map = split(folder)
    shutil.copytree(folder, tmp_path / "llama2")
    write_index(folder, weight_map | {GAIN: name})
    opened = []
    watching = True

    def watch(event, arguments):
        if watching and event == "open" and isinstance(arguments[0], str):
            opened.append(arguments[0])

    sys.addaudithook(watch)
    line = refused(folder, ConfigError)
    watching = False
    assert "is not the name of a .safetensors file" in line
    outside = [path for path in opened if "safetensors" in path and str(folder) not in path]
    assert outside == []


def test_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "leads out of its folder" in refused(folder, ConfigError)


@pytest.mark.parametrize("fault", ["no file", "wrong shard", "no map", "not a map", "numbers"])
def test_a_bad_index_is_refused(folder, fault):
    weight_map = split(folder)
    shards = sorted(set(weight_map.values()))
    if fault == "no file":
        (folder / shards[0]).unlink()
    elif fault == "wrong shard":
        write_index(folder, {name: shards[0] for name in weight_map})
    else:
        write_index(folder, {"no map": None, "not a map": [1], "numbers": {GAIN: 3}}[fault])
    assert "index.json" in refused(folder) or shards[0] in refused(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "llama", "model_type": "llama"}'])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json: " in refused(folder)


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./missing", "a/b/c", "~nobody/x", "x\0y", "x" * 5000, ""]
)
def test_a_path_that_does_not_exist_is_said_to_be_one(name):
    assert "Repo id" not in refused(name)
