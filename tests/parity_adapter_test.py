"""Adapters that PEFT wrote and reads: the same logits in PyTorch and here."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nets import config_of

from adloco_jax.errors import DataError
from adloco_jax.models import Llama, hf
from adloco_jax.models.layers import Adapter, split_adapter
from adloco_jax.models.llama import LayerKind

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(  # PEFT asks transformers 5.23 by its old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
SIZES = dict(vocab_size=31, width=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=24)
PLAIN = Llama(**SIZES, max_length=32, qkv_bias=True)
GEMMA = Llama(
    **SIZES,
    **dict(max_length=32, norm_offset=1.0, query_size=4.0, activation="gelu_tanh"),
    **dict.fromkeys(["qk_norm", "out_norms", "scales_embedding", "tied"], True),
    layer_kinds=(LayerKind(50.0, window=4), LayerKind(1e4)),
)
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 9))


def logits(network, params):
    tokens_BL = jnp.asarray(TOKENS, jnp.int32)
    return network.apply({"params": jax.tree.map(jnp.asarray, params)}, tokens_BL)


def of_torch(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


PLAIN_CONFIG = config_of(PLAIN, "qwen2")
GEMMA_CONFIG = config_of(
    GEMMA,
    "gemma3_text",
    head_dim=4,
    tie_word_embeddings=True,
    pad_token_id=None,
    query_pre_attn_scalar=4,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=4,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)


def saved(folder, network, plain, config=PLAIN_CONFIG):
    """Random parameters; the folder has the base, and the adapter beside it."""
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.float32(0.3 * rng.normal(size=x.shape)), shapes["params"])
    adapter, base = split_adapter(params)
    hf.save(base, folder / "base", network=plain, config=config)
    how: Any = {"network": network, "base": hf.base_of(str(folder / "base"))}
    hf.save_adapter(adapter, folder / "adapter", None, **how)
    return params


@pytest.mark.parametrize(
    ("plain", "config", "layers"),
    [(PLAIN, PLAIN_CONFIG, "attention"), (GEMMA, GEMMA_CONFIG, "all")],
    ids=["plain", "gemma"],
)
def test_peft_loads_an_export_and_what_it_writes_is_read(tmp_path, plain, config, layers):
    network = plain.clone(adapter=Adapter(3, 5.0, layers))
    params = saved(tmp_path, network, plain, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    wanted = logits(network, params)
    np.testing.assert_allclose(of_torch(model), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    model.save_pretrained(tmp_path / "theirs")
    found = hf.load(tmp_path / "theirs")
    assert found.network == network
    np.testing.assert_array_equal(logits(found.network, found.params), wanted)


HARMLESS = {
    "init_lora_weights": [False, "gaussian", "eva", "orthogonal", "mica"],
    "lora_dropout": [0.5],
    "inference_mode": [False],
    "task_type": ["SEQ_2_SEQ_LM"],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM"}],
    "peft_version": ["0.1"],
    "revision": ["main"],
    "megatron_core": ["x"],
    "qalora_group_size": [8],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 3.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"stable_gamma": 8}],
}
HARMFUL = {
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "new"],
    "bias": ["all"],
}
READ = {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules"}


@pytest.mark.filterwarnings("ignore")
def test_each_key_of_pefts_config_gives_pefts_logits_or_is_refused_by_name(tmp_path):
    network = PLAIN.clone(adapter=Adapter(4, 5.0, "attention"))
    params = saved(tmp_path, network, PLAIN)
    path = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(path.read_text())

    def read(key, value):
        config = {"peft_version": peft.__version__} | written | {key: value}
        path.write_text(json.dumps(config))
        found = hf.load(tmp_path / "adapter")
        return logits(found.network, found.params)

    def of_peft():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return of_torch(peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")))

    wanted = np.asarray(logits(network, params))
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    for key in (known - READ - HARMLESS.keys() - {"runtime_config", "layers_pattern"}) | {"new"}:
        HARMFUL.setdefault(key, [{"x": 1}])
    for key, values in HARMLESS.items():
        for value in values:
            np.testing.assert_array_equal(read(key, value), wanted)
            near = {"rtol": 1e-5, "atol": 1e-5 * np.abs(wanted).max()}
            np.testing.assert_allclose(of_peft(), wanted, **near)
    names = [f"{layer}.self_attn.{part}_proj" for layer in range(2) for part in "qkvo"]
    full = [f"model.layers.{name}" for name in names]
    same = [full, [f"layers.{name}" for name in names], ["q_proj", "self_attn.k_proj", *full]]
    for value in same:
        np.testing.assert_array_equal(read("target_modules", value), wanted)
        np.testing.assert_allclose(of_peft(), wanted, **near)
    for value in (full[:-1], [*full, "lm_head"], "all-linear"):
        with pytest.raises(DataError, match="target_modules: have .* or merge_and_unload"):
            read("target_modules", value)
    for key, values in HARMFUL.items():
        for value in values:
            with pytest.raises(DataError, match=f"adapter_config.json: {key}: have "):
                read(key, value)
    path.write_text(json.dumps(peft.LoraConfig(**written).to_dict(), default=list))
    np.testing.assert_array_equal(read("init_lora_weights", True), wanted)
    read("init_lora_weights", True)
    path.write_text(json.dumps(written | {"init_lora_weights": "pissa"}))
    assert np.abs(of_peft() - wanted).max() > 1e-3  # which is why it is refused


def test_an_adapter_begins_as_in_peft(tmp_path):
    """Both draw A uniformly up to 1 / sqrt(inputs), and B begins at zero."""
    hf.save(
        jax.tree.map(np.asarray, PLAIN.init(jax.random.key(0), jnp.asarray(TOKENS))["params"]),
        tmp_path,
        network=PLAIN,
        config=PLAIN_CONFIG,
    )
    config = peft.LoraConfig(r=64, target_modules=["down_proj"], task_type="CAUSAL_LM")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    drawn = dict(peft.get_peft_model(model, config).named_parameters())
    (low, *_), (high, *_) = (
        [x.detach().numpy() for name, x in drawn.items() if f"lora_{part}" in name] for part in "AB"
    )
    network = PLAIN.clone(adapter=Adapter(64, 64.0, "mlp"))
    ours = network.init(jax.random.key(1), jnp.asarray(TOKENS))["params"]["layers"]["mlp"]["down"]
    for array in (low, np.asarray(ours["lora_a"])):
        assert 0.99 * 24**-0.5 < np.abs(array).max() <= 24**-0.5
        np.testing.assert_allclose(array.std(), (3 * 24) ** -0.5, rtol=0.05)
    assert not np.any(high) and not np.any(ours["lora_b"])
