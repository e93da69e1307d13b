"""Models give the numbers of PyTorch's decoders and BERT on equal weights; extra `parity`."""

import functools
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (the parity extra)")

import jax  # noqa: E402
from flax.traverse_util import flatten_dict  # noqa: E402
from nets import loss_of, make_rows  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from toy import tiny_config  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from adloco_jax.data.tokenizers import load_tokenizer  # noqa: E402
from adloco_jax.errors import DataError  # noqa: E402
from adloco_jax.models import Llama, class_logits, hf, next_token_loss  # noqa: E402
from adloco_jax.models.llama import generate  # noqa: E402
from adloco_jax.settings import SIZES as MODEL_SIZES  # noqa: E402
from adloco_jax.training import train  # noqa: E402

SIZES = dict(vocab_size=61, hidden_size=24, intermediate_size=56, num_hidden_layers=3)
SIZES |= dict(max_position_embeddings=64)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e3, factor=4.0, original_max_position_embeddings=16)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=3.0)
BIASES = dict(attention_bias=True, mlp_bias=True)
TIED = dict(tie_word_embeddings=True)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = dict(layer_types=MIXED, sliding_window=7, pad_token_id=5)
PLAIN = dict(rope_type="default", rope_theta=1e3)
# By name: the class of transformers, and what differs from its defaults.
DECODERS = {
    "one head each": (
        LlamaConfig,
        dict(num_attention_heads=4, num_key_value_heads=4, rope_theta=5e5),
    ),
    "grouped heads": (
        LlamaConfig,
        dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, rms_norm_eps=1e-3),
    ),
    "tied": (
        LlamaConfig,
        dict(num_attention_heads=2, num_key_value_heads=1, pad_token_id=5) | TIED,
    ),
    "llama3": (LlamaConfig, HEADS | TIED | dict(rope_parameters=LLAMA3, head_dim=8)),
    "linear": (LlamaConfig, HEADS | BIASES | dict(rope_parameters=LINEAR)),
    "mistral": (MistralConfig, HEADS | dict(head_dim=10, sliding_window=7)),
    "ministral": (MinistralConfig, HEADS | dict(head_dim=6, layer_types=MIXED, sliding_window=7)),
    "qwen2": (Qwen2Config, HEADS | TIED | dict(rope_theta=1e6)),
    "qwen3": (Qwen3Config, HEADS | TIED | dict(head_dim=16)),
    "qwen3 with windows": (
        Qwen3Config,
        HEADS | dict(head_dim=8, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "smollm3": (SmolLM3Config, HEADS | dict(no_rope_layers=[1, 0, 1], pad_token_id=5)),
    "smollm3 with windows": (
        SmolLM3Config,
        HEADS
        | dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7)
        | dict(mlp_bias=True, pad_token_id=5),
    ),
    "gemma3": (Gemma3TextConfig, HEADS | dict(head_dim=8, query_pre_attn_scalar=24) | GEMMA),
    "gemma3 with scaling": (
        Gemma3TextConfig,
        HEADS
        | dict(head_dim=10, sliding_window=3, attention_bias=True, layer_types=MIXED)
        | dict(rope_parameters={"full_attention": LINEAR, "sliding_attention": PLAIN}),
    ),
    "qwen3 with biases": (
        Qwen3Config,
        HEADS | dict(head_dim=6, attention_bias=True, pad_token_id=3),
    ),
}
LONG = 60  # past the windows, and the original context of scaled frequencies
BERTS = {
    "three classes": dict(num_attention_heads=4, num_labels=3),
    "one type": dict(num_attention_heads=6, type_vocab_size=1, layer_norm_eps=1e-2),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIGS = {name: kind(**SIZES | sizes) for name, (kind, sizes) in DECODERS.items()}
CONFIGS |= {name: BertConfig(**SIZES | sizes) for name, sizes in BERTS.items()}


def drawn(config):
    """A PyTorch model with parameters far from their initial values."""
    is_bert = isinstance(config, BertConfig)
    torch.manual_seed(7)
    model = (BertForSequenceClassification if is_bert else AutoModelForCausalLM.from_config)(config)
    with torch.no_grad():
        for name, tensor in model.eval().named_parameters():  # eval: no dropout
            is_gain = name.lower().endswith("norm.weight")
            tensor.copy_(0.2 * torch.randn(tensor.shape) + is_gain)
    return model


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def pair(request, tmp_path):
    """A PyTorch model, and our model read from its files."""
    model = drawn(request.param)
    model.save_pretrained(tmp_path / "theirs")
    return model, hf.load(tmp_path / "theirs")


def theirs_of(model, rows):
    """The output of the PyTorch model for our rows."""
    if not isinstance(model, BertForSequenceClassification):
        tokens = torch.from_numpy(rows).long()
        return model(tokens, labels=tokens)
    is_real = np.arange(rows.shape[1] - 2) < rows[:, 1:2]
    return model(
        input_ids=torch.tensor(rows[:, 2:]),
        attention_mask=torch.tensor(np.int64(is_real)),
        labels=torch.tensor(np.int64(rows[:, 0])),
    )


@functools.cache
def logits_of(network):
    if isinstance(network, Llama):
        return jax.jit(lambda params, rows: network.apply({"params": params}, rows))
    return jax.jit(class_logits(network))


def assert_same_logits(network, params, model, rows):
    theirs = theirs_of(model, rows).logits.detach().numpy()
    ours = logits_of(network)(params, rows)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_logits_loss_and_gradients_are_those_of_hugging_face(pair):
    model, (network, params, *_) = pair
    rows = make_rows(network, length=LONG)
    model.double()
    assert_same_logits(network, params, model, rows)
    loss = theirs_of(model, rows).loss
    loss.backward()
    value, grads = jax.jit(jax.value_and_grad(loss_of(network)))(params, rows)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(grads).items()}
    ours = {t.name: t.view_in(leaves[t.path]) for t in hf.tensors(network, hf.weight_map(network))}
    theirs = {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, other in theirs.items():
        atol = 1e-5 * np.abs(other).max() + 1e-7
        np.testing.assert_allclose(ours[name], other, rtol=1e-4, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", ["grouped heads", "mistral", "gemma3", "smollm3"])
def test_generated_ids_are_those_of_hugging_face(name, tmp_path):
    model = drawn(CONFIGS[name])
    model.save_pretrained(tmp_path)
    network, params, *_ = hf.load(tmp_path)
    prompt_BL = make_rows(network, batch=2, length=10)
    model.generation_config.eos_token_id = None
    how = dict(do_sample=False, max_new_tokens=40, pad_token_id=0)
    ours = generate(
        network, params, prompt_BL, num_tokens=40, temperature=0.0, key=jax.random.key(0)
    )
    theirs = model.generate(torch.from_numpy(prompt_BL).long(), **how)
    np.testing.assert_array_equal(ours, theirs)


def test_export_to_torch_and_back_is_bit_identical(pair, tmp_path):
    theirs, loaded = pair
    network, params = loaded.network, loaded.params
    family = loaded.config["model_type"]
    tokenizer = load_tokenizer("bytes")
    for given in [loaded.config, None] if family in ("llama", "bert") else [loaded.config]:
        hf.save(params, tmp_path / "out", tokenizer, network=network, config=given)
        kind = type(theirs) if given or not isinstance(network, Llama) else AutoModelForCausalLM
        model, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values()), info
        if isinstance(network, Llama) and given is None:
            assert model.config.eos_token_id == 256 and model.config.bos_token_id is None
        model.save_pretrained(tmp_path / "back")
        again = hf.load(tmp_path / "back")
        assert again.network.clone(pad_id=network.pad_id) == network  # bytes have no padding
        for one, other in zip(*map(jax.tree.leaves, (again.params, params)), strict=True):
            np.testing.assert_array_equal(one, other)
        assert_same_logits(network, params, model.double(), make_rows(network, length=LONG))


# Other values of the fields of config.json: by type, and of those that only some classes have.
OTHERS = {bool: [True, False], int: [1, 2], float: [0.5], str: ["relu"], type(None): [1]}
FIELDS = {
    "is_causal": [False],
    "quantization_config": [{"quant_method": "bitsandbytes", "load_in_4bit": True}],
    "layer_types": [["sliding_attention"]],
    "max_window_layers": [0],
    "no_rope_layers": [[0]],
    "no_rope_layer_interval": [1],
    "num_labels": [3],
    "original_max_position_embeddings": [4],
    "partial_rotary_factor": [0.5],
    "position_embedding_type": ["relative_key"],
    "problem_type": ["regression", "multi_label_classification"],
    "rope_parameters": [LLAMA3, LINEAR, LINEAR | {"partial_rotary_factor": 0.5}],
    "rope_scaling": [LLAMA3, LINEAR],
    "rope_theta": [50.0],
    "sliding_window": [3, 61],
    "use_bidirectional_attention": [True],
    "use_sliding_window": [True],
}


@pytest.mark.parametrize(
    "name",
    ["grouped heads", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "gemma3"]
    + ["three classes"],
)
def test_no_field_of_a_config_changes_the_model_unread(tmp_path, name):
    """Each is varied: the model is then that of transformers, or one of the two refuses it."""
    kind, sizes = DECODERS[name] if name in DECODERS else (BertConfig, BERTS[name])
    types = {key: sizes[key][:1] for key in ("layer_types",) if key in sizes}
    theirs = drawn(kind(**SIZES | sizes | types | {"num_hidden_layers": 1}))
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    values = theirs.config.to_dict() | FIELDS
    del values["model_type"], values["return_dict"]  # the latter is the type of the output
    compared, refused = set(), set()
    labels = [{"0": "a", "1": "b", "2": "c"}]
    others = {key: FIELDS.get(key) or OTHERS.get(type(x), labels) for key, x in values.items()}
    cases = [(key, other) for key in others for other in others[key]]
    cases += [(key, ...) for key in content.keys() - {"model_type"}]  # without this key
    for key, other in cases:
        changed = {k: v for k, v in (content | {key: other}).items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            loaded = hf.load(tmp_path)
        except DataError:
            refused.add(key)
            continue
        rows = make_rows(loaded.network, length=min(20, loaded.network.max_length) - 1)
        try:
            model, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
            theirs_of(model.float(), rows)
        except Exception:  # deliberately broad, because classes raise their own kinds
            continue
        assert not any(info.values()), (key, other, info)
        assert_same_logits(loaded.network, loaded.params, model, rows)
        compared.add(key)
    assert compared > {"initializer_range", "pad_token_id", "use_cache"}
    activation = "hidden_activation" if name == "gemma3" else "hidden_act"
    assert refused > {activation, "quantization_config"}
    assert ("is_causal" in refused) == (kind is not BertConfig)


def old_spelling(config: dict) -> dict:
    """The content of config.json as transformers 4 wrote it."""
    rope = dict(config["rope_parameters"])
    more = (
        {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        if "sliding_attention" in rope
        else {}
    )
    rope = rope.get("full_attention", rope)
    old = {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config["dtype"]}
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")} | old | more


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_trained_model_is_loaded_by_transformers(tmp_path, name):
    """The checkpoint is sharded and in bfloat16, and its keys are the old ones."""
    kind, sizes = DECODERS[name]
    special = dict(vocab_size=257, eos_token_id=256, bos_token_id=None)
    theirs, folder = drawn(kind(**SIZES | sizes | special)), tmp_path / "theirs"
    theirs.generation_config = GenerationConfig(top_k=3, do_sample=True, eos_token_id=256)
    theirs.to(torch.bfloat16)
    theirs.save_pretrained(folder, max_shard_size="20KB")
    before = old_spelling(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(before))
    config = tiny_config(num_rounds=2)
    config.model.update(dict.fromkeys(MODEL_SIZES))
    config.model.init_from, config.data.tokenizer = str(folder), "bytes"
    train(config, tmp_path / "r")
    export = tmp_path / "r" / "export"
    # In bfloat16 Gemma's scale is rounded.
    how = dict(dtype=torch.float32, output_loading_info=True)
    model, info = AutoModelForCausalLM.from_pretrained(export, **how)
    assert type(model) is type(theirs) and not any(info.values()), info
    network, params, stored_as, *_ = hf.load(export)
    assert stored_as == ("bfloat16",)
    assert_same_logits(network, params, model, make_rows(network, length=LONG))
    moved = model.get_input_embeddings().weight - theirs.get_input_embeddings().weight.float()
    assert moved.abs().max() > 1e-3
    after = json.loads((export / "config.json").read_text())
    assert after == before
    stored = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
    assert len(stored) > 1
    shapes = {name: x.shape for file in stored for name, x in load_file(file).items()}
    exported = load_file(export / "model.safetensors")
    assert {name: x.shape for name, x in exported.items()} == shapes


@pytest.mark.parametrize("stored", [[], [EMBEDDING], [HEAD], [EMBEDDING, HEAD]])
@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_and_untied_tensors_are_those_of_hugging_face(tmp_path, is_tied, stored):
    """Any stored tensors work; a tensor that PyTorch would draw at random is refused."""
    torch.manual_seed(3)
    LlamaForCausalLM(CONFIGS["grouped heads"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    absent = {EMBEDDING, HEAD} - set(stored)
    kept = {name: tensor for name, tensor in tensors.items() if name not in absent}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    if info["missing_keys"]:
        with pytest.raises(DataError) as caught:
            hf.load(tmp_path)
        names = set(info["missing_keys"]) - ({HEAD} if is_tied else set())  # tied: one tensor
        assert names and all(f"{name}: missing" in str(caught.value) for name in names)
    else:
        loaded = hf.load(tmp_path)
        assert_same_logits(loaded.network, loaded.params, model, make_rows(loaded.network))


def test_logits_and_perplexity_of_a_checkpoint_of_a_foreign_tool(data_dir):
    """The perplexity on rows of contiguous text agrees with torch's to 1e-4."""
    folder = data_dir / "fixtures" / "opendiloco_llama-2m-fresh"
    network, params, *_ = hf.load(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    assert_same_logits(network, params, model, make_rows(network, length=64))
    text = (data_dir / "text" / "tinyshakespeare.txt").read_text()[: 40 * 129]
    rows = np.frombuffer(text.encode()[: 40 * 129], np.uint8).reshape(40, 129).astype(np.int32)
    with torch.no_grad():
        theirs = np.exp(theirs_of(model, rows).loss.item())
    ours = np.exp(float(jax.jit(next_token_loss(network))(params, rows)))
    assert abs(ours / theirs - 1) < 1e-4
