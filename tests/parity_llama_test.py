"""The same numbers as PyTorch's Llama; needs the `parity` extra."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (the parity extra)")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax.traverse_util import flatten_dict  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from adloco_jax import hf  # noqa: E402
from adloco_jax.data.tokenizers import load_tokenizer  # noqa: E402
from adloco_jax.models.llama import Llama, next_token_loss  # noqa: E402

SHAPES = {
    "one head each": dict(num_attention_heads=4, num_key_value_heads=4, rope_theta=5e5),
    "grouped heads": dict(
        num_attention_heads=6, num_key_value_heads=2, hidden_size=48, rms_norm_eps=1e-3
    ),
    "tied": dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True),
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


def named(network, tree):
    """A tree of our parameters as PyTorch names and lays out its tensors."""
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(tree).items()}
    tensors = hf.tensors(network, hf.weight_map(network))
    return {tensor.name: tensor.of(leaves[tensor.path]) for tensor in tensors}


def assert_same_logits(network, params, model, rows, *, atol=None):
    theirs = model(torch.from_numpy(rows).long()).logits.detach().numpy()
    ours = jax.jit(network.apply)({"params": params}, rows)
    np.testing.assert_allclose(ours, theirs, atol=atol or 1e-5 * np.abs(theirs).max())


def test_sizes_and_logits(pair):
    model, (network, params, _) = pair
    assert isinstance(network, Llama)
    assert network.norm_eps == model.config.rms_norm_eps
    assert network.num_kv_heads == model.config.num_key_value_heads
    assert network.max_length == 64
    assert_same_logits(network, params, model, rows_of(61))


def test_loss_and_gradients(pair):
    model, (network, params, _) = pair
    rows = rows_of(61)
    tokens = torch.from_numpy(rows).long()
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    value, grads = jax.value_and_grad(next_token_loss(network))(params, jnp.asarray(rows))
    assert abs(float(value) - loss.item()) < 1e-5
    theirs = dict(model.named_parameters())
    for name, grad in named(network, grads).items():
        is_tied = model.config.tie_word_embeddings
        if is_tied and name in ("lm_head.weight", "model.embed_tokens.weight"):
            continue  # one matrix there, whose gradient is the sum of our two
        expected = theirs[name].grad.numpy()
        atol = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(grad, expected, atol=atol, err_msg=name)


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
    assert_same_logits(network, params, model, rows_of(61))


def test_logits_and_perplexity_of_a_checkpoint_of_a_foreign_tool(data_dir):
    """The perplexity, on rows of contiguous text, to 1e-4 of torch's."""
    folder = data_dir / "fixtures" / "opendiloco_llama-2m-fresh"
    network, params, _ = hf.load(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    assert_same_logits(network, params, model, rows_of(1024, length=64), atol=1e-5)
    text = (data_dir / "text" / "tinyshakespeare.txt").read_text()[: 40 * 129]
    rows = np.frombuffer(text.encode()[: 40 * 129], np.uint8).reshape(40, 129).astype(np.int32)
    tokens = torch.from_numpy(rows).long()
    with torch.no_grad():
        theirs = np.exp(model(tokens, labels=tokens).loss.item())
    ours = np.exp(float(jax.jit(next_token_loss(network))(params, rows)))
    assert abs(ours / theirs - 1) < 1e-4
