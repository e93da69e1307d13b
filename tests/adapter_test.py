"""Adapters: small trained matrices beside frozen weights, from the layers to a run's export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from adloco_jax.core.gradstats import gradient_stats
from adloco_jax.models import Llama
from adloco_jax.models.layers import Adapter, split_adapter, with_adapter
from adloco_jax.models.llama import next_token_loss, sequence_losses

SIZES = dict(vocab_size=11, width=12, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=10)
PLAIN = Llama(**SIZES, max_length=16, tied=True, qkv_bias=True)
NETWORK = PLAIN.clone(adapter=Adapter(rank=2, alpha=3.0))
ROWS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (4, 9)), jnp.int32)


def drawn(network=NETWORK):
    """The adapter, whose second matrices are not zero, and the base weights."""
    params = network.init(jax.random.key(1), ROWS[:, :-1])["params"]
    rng = np.random.default_rng(2)
    return split_adapter(
        jax.tree.map(lambda x: x + np.float32(0.1 * rng.normal(size=x.shape)), params)
    )


def merged(adapter, base, scale=1.5):
    """W + alpha/r A B, by hand."""
    low, leaves = flatten_dict(adapter), flatten_dict(base)
    for path in [path[:-1] for path in low if path[-1] == "lora_a"]:
        product = jnp.einsum("nda,naf->ndf", low[*path, "lora_a"], low[*path, "lora_b"])
        leaves[*path, "kernel"] = leaves[*path, "kernel"] + scale * product
    return unflatten_dict(leaves)


def split_layers(base):
    """Each layer's arrays by themselves, as programs take them."""
    return base | {"layers": jax.tree.map(tuple, base["layers"])}


@pytest.mark.parametrize(("form", "remat"), [("scan", False), ("call", False), ("inline", True)])
def test_the_loss_and_gradient_are_those_of_the_merged_weights(form, remat):
    adapter, base = drawn()
    loss_fn = next_token_loss(NETWORK.clone(layer_form=form, remat=remat))
    of_merged = next_token_loss(PLAIN)
    wanted, grad = jax.value_and_grad(lambda a: of_merged(merged(a, base), ROWS))(adapter)
    given = base if form == "scan" else split_layers(base)
    found = jax.jit(jax.value_and_grad(loss_fn))(adapter, ROWS, base=given)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-8), found[1], grad
    )
    assert jax.tree.structure(adapter) == jax.tree.structure(grad)
    whole = with_adapter(base, adapter)
    np.testing.assert_allclose(next_token_loss(NETWORK)(whole, ROWS), wanted, rtol=1e-6)


@pytest.mark.parametrize("layers", ["attention", "mlp", "all"])
def test_taps_measure_the_adapters_gradients_alone(layers):
    network = PLAIN.clone(adapter=Adapter(2, 3.0, layers))
    adapter, base = drawn(network)
    loss_fn = functools.partial(next_token_loss(network), base=base)
    by_taps, by_vmap = (
        gradient_stats(loss_fn, adapter, ROWS, estimator=kind) for kind in ("taps", "vmap")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), by_taps, by_vmap)
    modules = {path[:2] for path in flatten_dict(adapter)}
    assert modules == {("layers", part) for part in ("attention", "mlp") if layers in (part, "all")}


def test_an_adapter_begins_as_peft_does_and_changes_nothing():
    adapter, base = split_adapter(NETWORK.init(jax.random.key(1), ROWS[:, :-1])["params"])
    a_NDr = adapter["layers"]["mlp"]["gate"]["lora_a"]
    assert a_NDr.shape == (2, 12, 2) and 0.8 * 12**-0.5 < np.abs(a_NDr).max() <= 12**-0.5
    np.testing.assert_array_equal(adapter["layers"]["mlp"]["gate"]["lora_b"], np.zeros((2, 2, 10)))
    losses = sequence_losses(NETWORK)(adapter, ROWS, base=base)
    np.testing.assert_array_equal(losses, sequence_losses(PLAIN)(base, ROWS))


def test_frozen_weights_of_bfloat16_are_used_as_they_are():
    adapter, base = drawn()
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), base)
    loss_fn = sequence_losses(NETWORK)
    np.testing.assert_array_equal(
        loss_fn(adapter, ROWS, base=base), loss_fn(adapter, ROWS, base=wide)
    )
