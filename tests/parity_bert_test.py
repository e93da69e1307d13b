"""BERT against Hugging Face's in PyTorch: logits, loss and gradients on the same weights.

Needs PyTorch (the extra `parity`); without it these tests are skipped.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the extra `parity` has it")

import jax  # noqa: E402
from flax.traverse_util import flatten_dict  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification  # noqa: E402

from adloco_jax import hf  # noqa: E402
from adloco_jax.models import class_logits, classification_loss  # noqa: E402

SIZES = dict(vocab_size=29, hidden_size=24, num_hidden_layers=2, intermediate_size=40)
SIZES |= dict(num_attention_heads=4, max_position_embeddings=20, num_labels=3)


@pytest.mark.parametrize(
    ("change", "batch", "length"),
    [
        ({}, 6, 12),
        ({"num_attention_heads": 6, "type_vocab_size": 1, "layer_norm_eps": 1e-2}, 4, 1),
    ],
)
def test_logits_loss_and_gradients_are_those_of_hugging_face(change, batch, length, tmp_path):
    torch.manual_seed(7)
    theirs = BertForSequenceClassification(BertConfig(**SIZES | change)).eval()  # no dropout
    with torch.no_grad():  # far from the trivial start
        for name, tensor in theirs.named_parameters():
            gain = name.endswith("LayerNorm.weight")
            tensor.copy_(0.25 * torch.randn(tensor.shape) + (1.0 if gain else 0.0))
    theirs.save_pretrained(tmp_path)
    network, params, _ = hf.load(tmp_path)
    rng = np.random.default_rng(1)
    labels_B = rng.integers(0, network.num_classes, batch)
    lengths_B = np.concatenate([[1, length], rng.integers(1, length + 1, batch)])[:batch]
    # Without id 0: PyTorch gives the padding token's vector no gradient.
    tokens_BL = rng.integers(1, network.vocab_size, (batch, length))
    rows = np.int32(np.column_stack([labels_B, lengths_B, tokens_BL]))
    output = theirs.double()(
        input_ids=torch.tensor(tokens_BL),
        attention_mask=torch.tensor(np.int64(np.arange(length) < lengths_B[:, None])),
        labels=torch.tensor(labels_B),
    )
    output.loss.backward()
    logits_BC = jax.jit(class_logits(network))(params, rows)
    loss, grads = jax.jit(jax.value_and_grad(classification_loss(network)))(params, rows)
    np.testing.assert_allclose(logits_BC, output.logits.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, output.loss.item(), rtol=1e-5)
    their_grads = {name: tensor.grad.numpy() for name, tensor in theirs.named_parameters()}
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(grads).items()}
    tensors = hf.tensors(network, hf.weight_map(network))
    assert {tensor.name for tensor in tensors} == set(their_grads)
    for tensor in tensors:
        other = their_grads[tensor.name]
        atol = 1e-5 * np.abs(other).max() + 1e-7
        mine = tensor.of(leaves[tensor.path])
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=atol, err_msg=tensor.name)
