"""The same numbers as PyTorch's Llama; needs the `parity` extra."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (the parity extra)")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from adloco_jax import hf  # noqa: E402
from adloco_jax.data.tokenizers import load_tokenizer  # noqa: E402
from adloco_jax.models.llama import Llama, next_token_loss  # noqa: E402

SHAPES = {
    "one head each": dict(num_attention_heads=4, num_key_value_heads=4),
    "grouped heads": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48),
    "one key head": dict(num_attention_heads=4, num_key_value_heads=1, rope_theta=5e5),
    "tied": dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
    "another epsilon": dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-3),
}


def torch_llama(**changes) -> LlamaForCausalLM:
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=56, num_hidden_layers=3)
    config = LlamaConfig(**(sizes | dict(max_position_embeddings=64) | changes))
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # gains and logits far from their trivial start
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn(tensor.shape) * (0.2 if "norm" not in name else 0.1))
            if "norm" in name:
                tensor += 1
    return model


def rows_of(vocab_size: int, count: int = 3, length: int = 20) -> np.ndarray:
    return np.random.default_rng(5).integers(0, vocab_size, (count, length + 1)).astype(np.int32)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES, scope="module")
def pair(request, tmp_path_factory):
    """A PyTorch model, and ours read from the files it wrote."""
    model = torch_llama(**request.param)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, hf.load(folder)


def test_logits(pair):
    model, (network, params, _) = pair
    rows = rows_of(61)
    theirs = model(torch.from_numpy(rows).long()).logits.detach().numpy()
    ours = jax.jit(network.apply)({"params": params}, rows)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_loss_and_gradients(pair):
    model, (network, params, _) = pair
    rows = rows_of(61)
    tokens = torch.from_numpy(rows).long()
    loss = model(tokens, labels=tokens).loss
    model.zero_grad()
    loss.backward()
    ours, grads = jax.value_and_grad(next_token_loss(network))(params, jnp.asarray(rows))
    assert abs(float(ours) - loss.item()) < 1e-5
    theirs = {name: tensor.grad.numpy() for name, tensor in model.named_parameters()}
    for entry in hf.entries(network):
        leaf = np.asarray(hf._at(grads, entry.path))
        for name, place in hf._layers(entry.name, len(leaf)):
            if model.config.tie_word_embeddings and name in (
                "lm_head.weight",
                "model.embed_tokens.weight",
            ):
                continue  # theirs is the sum of our two
            expected = theirs[name].T if entry.transposed else theirs[name]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(leaf[place], expected, atol=1e-4 * scale, err_msg=name)


def test_export_to_torch_and_back_is_bit_identical(pair, tmp_path):
    _, (network, params, _) = pair
    hf.save(params, tmp_path / "out", load_tokenizer("bytes"), network=network)
    model, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.eos_token_id == 256 and model.config.bos_token_id is None
    model.save_pretrained(tmp_path / "back")
    again = hf.load(tmp_path / "back")
    assert again.network == network
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(one, other)
    rows = rows_of(61)
    theirs = model(torch.from_numpy(rows).long()).logits.detach().numpy()
    ours = jax.jit(network.apply)({"params": params}, rows)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_shards_and_bfloat16_as_torch_writes_them(tmp_path):
    model = torch_llama(num_attention_heads=4, num_key_value_heads=2)
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = hf.load(tmp_path)
    assert loaded.stored_as == ("bfloat16",)
    rows = rows_of(61)
    whole = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs = whole(torch.from_numpy(rows).long()).logits.detach().numpy()
    ours = jax.jit(loaded.network.apply)({"params": loaded.params}, rows)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_a_checkpoint_of_a_foreign_tool(data_dir):
    folder = data_dir / "fixtures" / "opendiloco_llama-2m-fresh"
    network, params, _ = hf.load(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    rows = rows_of(1024, length=64)
    theirs = model(torch.from_numpy(rows).long()).logits.detach().numpy()
    ours = jax.jit(network.apply)({"params": params}, rows)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_perplexity_of_real_text(data_dir):
    """Of a foreign checkpoint, on text packed as in training, to 1e-4 of torch's."""
    folder = data_dir / "fixtures" / "opendiloco_llama-2m-fresh"
    network, params, _ = hf.load(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    text = (data_dir / "text" / "tinyshakespeare.txt").read_text()[: 40 * 129]
    rows = np.frombuffer(text.encode()[: 40 * 129], np.uint8).reshape(40, 129).astype(np.int32)
    tokens = torch.from_numpy(rows).long()
    with torch.no_grad():
        theirs = np.exp(model(tokens, labels=tokens).loss.item())
    ours = np.exp(float(jax.jit(next_token_loss(network))(params, rows)))
    assert abs(ours / theirs - 1) < 1e-4


def test_one_update_of_adamw(pair):
    """A whole step, optimizer included, from the same weights on the same rows."""
    import optax

    model, (network, params, _) = pair
    if model.config.tie_word_embeddings:
        pytest.skip("a tied head trains as one matrix there and as two here")
    rows = rows_of(61)
    tokens = torch.from_numpy(rows).long()
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    tx = optax.adamw(1e-3, weight_decay=0.1)
    grads = jax.grad(next_token_loss(network))(params, jnp.asarray(rows))
    updates, _ = tx.update(grads, tx.init(params), params)
    ours = optax.apply_updates(params, updates)
    theirs = {name: tensor.detach().numpy().copy() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(weights[name])
    for entry in hf.entries(network):
        leaf = np.asarray(hf._at(ours, entry.path))
        for name, place in hf._layers(entry.name, len(leaf)):
            expected = theirs[name].T if entry.transposed else theirs[name]
            # Where a gradient is nearly nothing, its sign decides Adam's first step.
            apart = np.abs(leaf[place] - expected) > 1e-5
            assert apart.mean() < 2e-3, name


def test_the_network_fields_are_all_shapes_of_the_config(pair):
    model, (network, _, _) = pair
    assert isinstance(network, Llama)
    assert network.norm_eps == model.config.rms_norm_eps
    assert network.num_kv_heads == model.config.num_key_value_heads
    assert network.max_length == 64
