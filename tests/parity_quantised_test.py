"""Frozen weights in four bits beside bitsandbytes, transformers, PEFT and PyTorch."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import parity_adapter_test as adapters
import pytest
from nets import config_of

from adloco_jax.models import Llama, hf
from adloco_jax.models.layers import Adapter, split_adapter
from adloco_jax.models.llama import next_token_loss
from adloco_jax.models.quantised import dequantised, is_quantised, quantise, unpacked

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
bnb = pytest.importorskip("bitsandbytes").functional

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
SMOLLM2 = os.environ.get("ADLOCO_SMOLLM2")
SIZES = dict(vocab_size=31, width=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=128)
QWEN3 = Llama(**SIZES, max_length=32, qk_norm=True)
LLAMA = Llama(**SIZES, max_length=32, norm_eps=1e-6)
GEMMA = adapters.GEMMA.clone(width=64, mlp_width=128, query_size=16.0)
NETWORKS = {
    "qwen3": (QWEN3, config_of(QWEN3, "qwen3", head_dim=16)),
    "llama": (LLAMA, config_of(LLAMA, "llama")),
    "gemma": (
        GEMMA,
        adapters.GEMMA_CONFIG
        | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        | {"query_pre_attn_scalar": 16},
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 9))


def codes_of_bitsandbytes(weight):
    """Return the codes, the scales and the dequantised values of a matrix [F, D]."""
    packed, state = bnb.quantize_4bit(
        torch.from_numpy(weight), blocksize=64, quant_type="nf4", compress_statistics=False
    )
    pairs = packed.numpy().ravel()
    codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(weight.shape)
    scales = state.absmax.numpy().reshape(weight.shape[0], -1)
    return codes, scales, bnb.dequantize_4bit(packed, state).numpy()


def matrices():
    rng = np.random.default_rng(0)
    found = [np.float32(0.02 * rng.standard_t(4, size=(192, 320))) for _ in range(2)]
    if SMOLLM2:
        import safetensors

        with safetensors.safe_open(Path(SMOLLM2) / "model.safetensors", "numpy") as file:
            names = [name for name in file.keys() if ".layers.7." in name and "_proj" in name]
            found += [file.get_tensor(name) for name in names]
    return found


def test_codes_and_scales_are_those_of_bitsandbytes():
    for w_FD in matrices():
        codes, scales, values = codes_of_bitsandbytes(w_FD)
        ours = quantise(w_FD.T, "nf4")
        np.testing.assert_array_equal(ours.scales.T, scales)
        differ = np.asarray(unpacked(ours)).astype(np.uint8).T != codes
        assert differ.mean() < 1e-5  # values half way between two of the code book
        np.testing.assert_array_equal(np.asarray(dequantised(ours)).T[~differ], values[~differ])


def test_a_block_of_zeros_stays_zero():
    np.testing.assert_array_equal(dequantised(quantise(np.zeros((64, 2), np.float32), "nf4")), 0)


def set_to(model, network, base):
    """Give a model of transformers the frozen weights as they are held, written out."""
    names = hf.weight_map(network)
    state = model.state_dict()
    for tensor in hf.tensors(network, names):
        leaf = base
        for part in tensor.path:
            leaf = leaf[part]
        leaf = leaf[tensor.layer] if isinstance(leaf, tuple) else leaf
        values = np.asarray(dequantised(jax.tree.map(jnp.asarray, leaf)), np.float32)
        values = np.ascontiguousarray(values.T if tensor.transposed else values)
        state[tensor.name].copy_(torch.from_numpy(values))


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_and_the_adapters_gradients_are_those_of_transformers_and_peft(name, tmp_path):
    plain, config = NETWORKS[name]
    network = plain.clone(adapter=Adapter(3, 5.0), layer_form="call")
    params = adapters.saved(tmp_path, network, plain, config)
    del params
    loaded = hf.load(tmp_path / "adapter", base_dtype="nf4")
    base = jax.tree.map(jnp.asarray, loaded.base)
    assert any(map(is_quantised, jax.tree.leaves(base, is_leaf=is_quantised)))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    set_to(model, plain, base)
    model = peft.PeftModel.from_pretrained(
        model, str(tmp_path / "adapter"), is_trainable=True
    ).eval()

    tokens_BL = torch.tensor(TOKENS)
    found = model(tokens_BL).logits
    variables = {"params": loaded.params, "base": base}
    ours = network.apply(variables, jnp.asarray(TOKENS, jnp.int32))
    wanted = found.detach().numpy()
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())

    losses = torch.nn.functional.cross_entropy(
        found[:, :-1].flatten(0, 1), tokens_BL[:, 1:].ravel()
    )
    losses.backward()
    theirs = {
        key.replace(".default", ""): value.grad.numpy()
        for key, value in model.named_parameters()
        if value.grad is not None
    }
    rows = jnp.asarray(TOKENS, jnp.int32)
    grads = jax.grad(next_token_loss(network))(loaded.params, rows, base=base)
    for tensor in hf._adapter_tensors(network):
        leaf = grads
        for part in tensor.path:
            leaf = leaf[part]
        wanted = theirs[tensor.name]
        near = {"rtol": 1e-4, "atol": 1e-5 * np.abs(wanted).max()}
        np.testing.assert_allclose(tensor.view_in(np.asarray(leaf)), wanted, **near)


@pytest.mark.slow
@pytest.mark.skipif(
    SMOLLM2 is None, reason="make real installs the weights, and names their folder"
)
def test_logits_of_real_weights_in_four_bits_are_those_of_transformers():
    loaded = hf.load(SMOLLM2, base_dtype="nf4")
    base = jax.tree.map(jnp.asarray, loaded.base)
    network = loaded.network.clone(adapter=Adapter(1, 1.0), layer_form="call")
    model = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    set_to(model, loaded.network, base)
    tokens_BL = np.random.default_rng(0).integers(0, loaded.network.vocab_size, (1, 17))
    with torch.no_grad():
        wanted = model(torch.tensor(tokens_BL)).logits.numpy()
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), split_adapter(shapes["params"])[0])
    found = jax.jit(network.apply)({"params": zeros, "base": base}, jnp.asarray(tokens_BL))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_peft_beside_a_base_of_bitsandbytes_has_the_loss_of_the_export(tmp_path):
    """Within 0.02 nats, the rounding of bitsandbytes' products included."""
    plain, config = NETWORKS["llama"]
    network = plain.clone(adapter=Adapter(3, 5.0), layer_form="call")
    adapters.saved(tmp_path, network, plain, config)
    loaded = hf.load(tmp_path / "adapter", base_dtype="nf4")
    base = jax.tree.map(jnp.asarray, loaded.base)
    ours = next_token_loss(network)(loaded.params, jnp.asarray(TOKENS, jnp.int32), base=base)
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=four_bits, device_map="cpu"
    )
    model = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), torch.tensor(TOKENS)[:, 1:].ravel()
    )
    assert abs(float(ours) - float(loss)) < 0.02
