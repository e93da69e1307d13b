"""BERT against Hugging Face's in PyTorch: logits, loss and gradients on the same weights.

Needs PyTorch (the extra `parity`); without it these tests are skipped.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adloco_jax.models import Bert, class_logits, classification_loss

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the extra `parity` has it")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 29,
    "width": 24,
    "num_layers": 2,
    "num_heads": 4,
    "mlp_width": 40,
    "max_length": 20,
    "num_classes": 3,
}

# Our module, its Hugging Face name; `{}` is the number of the layer.
LAYERS = {
    "attention/query": "bert.encoder.layer.{}.attention.self.query",
    "attention/key": "bert.encoder.layer.{}.attention.self.key",
    "attention/value": "bert.encoder.layer.{}.attention.self.value",
    "attention/out": "bert.encoder.layer.{}.attention.output.dense",
    "attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "mlp/up": "bert.encoder.layer.{}.intermediate.dense",
    "mlp/down": "bert.encoder.layer.{}.output.dense",
    "mlp_norm": "bert.encoder.layer.{}.output.LayerNorm",
}
OTHERS = {
    "embed": "bert.embeddings.word_embeddings",
    "token_type": "bert.embeddings.token_type_embeddings",
    "position": "bert.embeddings.position_embeddings",
    "embed_norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "classifier": "classifier",
}
# A module of PyTorch has a weight and perhaps a bias; ours calls the weight by its kind.
KINDS = {"embed": "embedding", "position": "embedding", "token_type": "embedding"}
KINDS |= {"embed_norm": "scale", "attention_norm": "scale", "mlp_norm": "scale"}


def bert_from_torch(state_dict):
    """Hugging Face's arrays by name -> our parameter tree: matrices transposed, layers stacked."""

    def module(kind, torch_name):
        weight = np.asarray(state_dict[f"{torch_name}.weight"])
        if kind == "embedding":
            return {kind: weight}
        bias = np.asarray(state_dict[f"{torch_name}.bias"])
        return {kind: weight.T if kind == "kernel" else weight, "bias": bias}

    params = {name: module(KINDS.get(name, "kernel"), OTHERS[name]) for name in OTHERS}
    stacked = params["layers"] = {"attention": {}, "mlp": {}}
    num_layers = sum(name.endswith(".intermediate.dense.bias") for name in state_dict)
    for name, torch_name in LAYERS.items():
        kind = KINDS.get(name, "kernel")
        layers = [module(kind, torch_name.format(n)) for n in range(num_layers)]
        *parents, last = name.split("/")
        parent = stacked[parents[0]] if parents else stacked
        parent[last] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    return params


def bert_to_torch(params):
    """Our parameter tree -> Hugging Face's arrays by name; the inverse of `bert_from_torch`."""
    state_dict = {}

    def module(torch_name, arrays):
        for kind, array in arrays.items():
            torch_kind = "bias" if kind == "bias" else "weight"
            array = np.asarray(array)
            state_dict[f"{torch_name}.{torch_kind}"] = array.T if kind == "kernel" else array

    for name, torch_name in OTHERS.items():
        module(torch_name, params[name])
    for name, torch_name in LAYERS.items():
        *parents, last = name.split("/")
        stacked = (params["layers"][parents[0]] if parents else params["layers"])[last]
        for n in range(len(stacked["bias"])):
            module(torch_name.format(n), jax.tree.map(lambda leaf, n=n: leaf[n], stacked))
    return state_dict


def make_params(model):
    tokens_BL, lengths_B = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_BL, lengths_B)["params"]
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        return np.float32(rng.normal(1.0 if path[-1].key == "scale" else 0.0, 0.25, leaf.shape))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def torch_model(model, params):
    """Hugging Face's network in float64 and without dropout, with our weights."""
    config = transformers.BertConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.width,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        intermediate_size=model.mlp_width,
        max_position_embeddings=model.max_length,
        num_labels=model.num_classes,
        type_vocab_size=model.type_vocab_size,
        layer_norm_eps=model.norm_eps,
    )
    theirs = transformers.BertForSequenceClassification(config).double().eval()
    arrays = {name: torch.tensor(np.float64(a)) for name, a in bert_to_torch(params).items()}
    theirs.load_state_dict(arrays)  # strict: every name on both sides
    return theirs


@pytest.mark.parametrize(
    ("change", "batch", "length"),
    [
        ({}, 6, 12),
        ({"num_heads": 1, "num_layers": 3, "num_classes": 2}, 3, 20),
        ({"num_heads": 6, "type_vocab_size": 1, "norm_eps": 1e-2}, 4, 1),
    ],
)
def test_logits_loss_and_gradients_are_those_of_hugging_face(change, batch, length):
    model = Bert(**SIZES | change)
    params = make_params(model)
    rng = np.random.default_rng(1)
    labels_B = rng.integers(0, model.num_classes, batch)
    lengths_B = np.concatenate([[1, length], rng.integers(1, length + 1, batch)])[:batch]
    # Without id 0: PyTorch gives the padding token's vector no gradient.
    tokens_BL = rng.integers(1, model.vocab_size, (batch, length))
    rows = np.int32(np.column_stack([labels_B, lengths_B, tokens_BL]))

    theirs = torch_model(model, params)
    output = theirs(
        input_ids=torch.tensor(tokens_BL),
        attention_mask=torch.tensor(np.int64(np.arange(length) < lengths_B[:, None])),
        labels=torch.tensor(labels_B),
    )
    output.loss.backward()
    their_grads = bert_from_torch({n: p.grad.numpy() for n, p in theirs.named_parameters()})

    logits_BC = jax.jit(class_logits(model))(params, rows)
    loss, grads = jax.jit(jax.value_and_grad(classification_loss(model)))(params, rows)
    np.testing.assert_allclose(logits_BC, output.logits.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, output.loss.item(), rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(their_grads)
    for (path, mine), other in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(their_grads), strict=True
    ):
        tolerance = 1e-5 * np.abs(other).max() + 1e-7
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=tolerance, err_msg=str(path))


def test_the_mapping_of_weights_goes_both_ways():
    params = make_params(Bert(**SIZES))
    back = bert_from_torch(bert_to_torch(params))
    jax.tree.map(np.testing.assert_array_equal, back, params)
