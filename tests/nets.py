"""Small models for tests: parameters for which every part matters, rows, and losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from adloco_jax.models import Bert, Llama, classification_loss, next_token_loss
from adloco_jax.models.layers import param_shapes
from adloco_jax.models.llama import LayerKind, RopeScaling
from adloco_jax.models.weight_maps import LLAMA as WEIGHTS

SIZES = dict(vocab_size=13, width=16, num_layers=2, num_heads=4, mlp_width=20, max_length=16)
LLAMA, BERT = SIZES | {"num_kv_heads": 2}, SIZES | {"num_classes": 3}
NETWORKS = {"llama": Llama(**LLAMA), "bert": Bert(**BERT)}
# A Llama with all features that checkpoints of its family may have.
FAMILY = Llama(
    **LLAMA,
    layer_kinds=(LayerKind(1e4, RopeScaling(4.0, 1.0, 4.0, 8), window=4), LayerKind(None)),
    head_size=6,
    pad_id=3,
    norm_offset=0.5,
    query_size=24.0,
    activation="gelu_tanh",
    **dict.fromkeys(["qkv_bias", "out_bias", "mlp_bias", "qk_norm", "tied"], True),
    **dict.fromkeys(["out_norms", "scales_embedding"], True),
)
TAPPED = NETWORKS | {"family": FAMILY}
BATCH, LENGTH = 7, 9


@functools.cache
def make_params(model, seed=0):
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(model))


def config_of(model, family, **keys):
    """The content of config.json for a Llama of another family."""
    sizes = {key: getattr(model, ours) for key, (ours, _) in WEIGHTS.sizes.items()}
    return {"model_type": family} | sizes | keys


def make_rows(model, batch=BATCH, length=LENGTH):
    """Rows with few ids, so that tokens repeat; for BERT with lengths from 1 to the maximum."""
    rng = np.random.default_rng(0)
    if isinstance(model, Llama):
        return rng.integers(0, model.vocab_size, (batch, length + 1), dtype=np.int32)
    labels = rng.integers(0, model.num_classes, batch)
    lengths = np.concatenate([[1, length], rng.integers(1, length + 1, batch)])[:batch]
    tokens = rng.integers(0, model.vocab_size, (batch, length))
    return np.int32(np.column_stack([labels, lengths, tokens]))


@functools.cache
def loss_of(model, **options):
    """The plain loss function of a model."""
    make = next_token_loss if isinstance(model, Llama) else classification_loss
    return make(model, **options)


@functools.cache
def step_of(model, **options):
    """A function (params, rows) -> the loss and its gradients."""
    return jax.jit(jax.value_and_grad(loss_of(model, **options)))


@functools.cache
def tapped_grad(model, **options):
    """A function (params, rows, tap_B) -> gradients of the mean loss and the taps' cotangent."""
    loss_fn = loss_of(model, **options)
    return jax.jit(jax.grad(lambda params, rows, tap_B: loss_fn(params, rows, tap_B=tap_B), (0, 2)))


@functools.cache
def example_grads(model):
    """The gradient of each example of `make_rows`, leaves [B, ...], without taps."""
    grads = jax.jit(jax.vmap(jax.grad(loss_of(model)), in_axes=(None, 0)))
    return grads(make_params(model.clone(dtype="float32")), make_rows(model)[:, None])


def flat(tree, axes=0):
    """All leaves as one float64 array that keeps the first `axes` axes."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*leaf.shape[:axes], -1) for leaf in leaves], axis=-1)


def stack(*trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def in_true_units(stats):
    """The statistics with the oracle's names and units; the scale is multiplied in."""
    s = {name: np.float64(value) for name, value in vars(stats).items()}
    return {
        "examples": s["num_examples"],
        "noise": s["noise_sum"] * s["scale"],
        "noise_weight": s["noise_weight"],
        "signal": s["signal_sum"] * s["scale"],
        "signal_weight": s["signal_weight"],
        "ip": s["ip_sum"] * s["scale"] ** 2,
        "ip_weight": s["ip_weight"],
        "plugin_ip": s["plugin_ip_sum"] * s["scale"] ** 2,
        "plugin_orth": s["plugin_orth_sum"] * s["scale"],
    }


def assert_same(actual, expected, rtol=2e-5):
    assert actual.keys() == expected.keys()
    # Noise and signal are float32 differences of sums of this size.
    size = abs(expected["noise"]) + abs(expected["signal"])
    for name in expected:
        atol = 1e-6 * size if name in ("noise", "signal") else 0.0
        np.testing.assert_allclose(actual[name], expected[name], rtol=rtol, atol=atol, err_msg=name)
