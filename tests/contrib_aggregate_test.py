"""Rules by which workers' differences become a pseudo-gradient: oracle, laws, devices, config."""

import dataclasses
import functools
import runpy
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ensembles import draw, ensemble_of, pseudo_gradients
from toy import settings_of, spec_of
from trees import assert_close, at

from adloco_jax import AGGREGATORS, ARCHITECTURES, start_round
from adloco_jax.core.compress import pack, unpack
from adloco_jax.engine.programs import lower
from adloco_jax.engine.sharding import reshard
from adloco_jax.engine.spec import ProgramKey

SHAPES = {"embed": (8, 3), "layers": {"w": (2, 3, 4), "gain": (2, 4)}, "head": (3, 8), "b": ()}
PARAMS = draw(SHAPES)
EXAMPLE = Path(__file__).parents[1] / "examples" / "radial.py"
with mock.patch.dict(AGGREGATORS):
    RULES = AGGREGATORS | {"rda": runpy.run_path(str(EXAMPLE))["radial_directional"]}
LABELS = {
    "embed": "embedding",
    "layers": {"w": "stacked_matrix", "gain": "stacked_other"},
    "head": "head",
    "b": "other",
}


def rule_of(name):
    """An entry of the table, or that of the example; gets the labels if it takes them."""
    labels = {"label_params": lambda params: LABELS} if name == "rda" else {}
    return functools.partial(RULES[name], **labels)


@functools.cache
def update_of(rule, precision="float32"):
    """The pseudo-gradients [M] of workers with the given differences [R]."""
    how = {"aggregate": rule_of(rule), "precision": precision}
    return jax.jit(functools.partial(pseudo_gradients, **how), static_argnums=2)


def by_tensor(rule, tensor_W, weights, *, plain=False):
    if rule == "rda" and not plain:
        return oracle.radial_directional(list(tensor_W), weights)
    return np.average(tensor_W, axis=0, weights=weights)


def by_hand(rule, difference_W, weights):
    """The oracle's pseudo-gradient of one trainer, tensor by tensor; embeddings are averaged."""
    tensor = functools.partial(by_tensor, rule, weights=weights)
    wide = jax.tree.map(np.float64, difference_W)
    layers = jax.tree.map(
        lambda leaf_W: np.stack([tensor(leaf_W[:, n]) for n in range(2)]), wide["layers"]
    )
    embed = tensor(wide["embed"], plain=True)
    return {"embed": embed, "layers": layers, "head": tensor(wide["head"]), "b": tensor(wide["b"])}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_agrees_with_the_oracle(rule):
    """Unequal trainers and weights, one worker that is not finite, one without a weight."""
    sizes, weights = (4, 2), np.float32([1, 3, 5, 0, 2, 1])
    difference_R = draw(SHAPES, 6)
    difference_R["head"][2, 0, 0] = np.nan
    actual_M, norm_M = update_of(rule)(difference_R, weights, sizes)
    for m, members in enumerate(([0, 1], [4, 5])):
        own = jax.tree.map(lambda leaf, members=members: leaf[members], difference_R)
        expected = by_hand(rule, own, weights[members])
        assert_close(at(actual_M, m), expected, rtol=2e-5, atol=2e-6)
        squares = [np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected)]
        np.testing.assert_allclose(norm_M[m], np.sqrt(sum(squares)), rtol=1e-5)


def test_workers_that_have_not_moved_move_nothing():
    still_R = jax.tree.map(np.zeros_like, draw(SHAPES, 3))
    still, norm_M = update_of("rda")(still_R, np.ones(3, np.float32), (3,))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(still)) and norm_M.tolist() == [0]


def test_the_length_is_the_workers_mean_length_unless_their_directions_cancel():
    rule = jax.jit(RULES["rda"])
    share_W = jnp.asarray([0.25, 0.75])
    moved = rule({"w": jnp.asarray([[3.0, 0.0], [0.0, 1.0]])}, share_W)["w"]
    np.testing.assert_allclose(np.linalg.norm(moved), 0.25 * 3 + 0.75 * 1, rtol=1e-6)
    half_W = jnp.asarray([0.5, 0.5])
    cancelled = rule({"w": jnp.asarray([[1.0, 0.0], [-3.0, 0.0]])}, half_W)["w"]
    np.testing.assert_allclose(cancelled, [-1.0, 0.0], rtol=1e-6)


def test_without_labels_each_leaf_goes_by_its_own_shape_whatever_its_name():
    """One matrix as a layer, as an embedding and alone; four stacked ones are not one matrix."""
    matrix_W, share_W = jnp.asarray(draw({"w": (4, 3)}, 2)["w"]), jnp.float32([0.5, 0.5])
    names = ("w", "layers", "layers_0", "players", "embedding", "lm_head")
    moved = jax.jit(RULES["rda"])(dict.fromkeys(names, matrix_W), share_W)
    expected = by_tensor("rda", np.float64(matrix_W), share_W)
    for name in names:
        np.testing.assert_allclose(moved[name], expected, rtol=1e-5, atol=1e-6)
    stack_W = jnp.asarray(draw({"w": (5, 4, 3)}, 2)["w"])
    labelled = functools.partial(RULES["rda"], label_params=lambda _: "stacked_matrix")
    layers = [by_tensor("rda", np.float64(stack_W[:, n]), share_W) for n in range(5)]
    np.testing.assert_allclose(jax.jit(labelled)(stack_W, share_W), layers, rtol=1e-5, atol=1e-6)


def test_quantised_differences_are_aggregated_after_they_have_arrived():
    ones, difference_R = np.ones(3, np.float32), draw(SHAPES, 3)
    arrive = jax.jit(lambda leaves_R: unpack(pack(leaves_R, "int4"), leaves_R, "int4"))
    arrived_R = arrive(difference_R)
    _, expected_M = update_of("rda")(arrived_R, ones, (3,))
    _, norm_M = update_of("rda", "int4")(difference_R, ones, (3,))
    np.testing.assert_allclose(norm_M, expected_M, rtol=1e-5)


def test_a_run_on_eight_devices_aggregates_as_one_device_does(monkeypatch):
    """Uses the engine's program, with the labels of the architecture."""
    own = dataclasses.replace(ARCHITECTURES["llama"], label_params=lambda params: LABELS)
    monkeypatch.setitem(ARCHITECTURES, "llama", own)
    monkeypatch.setitem(AGGREGATORS, "rda", RULES["rda"])
    configured = settings_of(
        ensemble={"num_trainers": 1, "num_workers": 8, "model_shards": 1},
        outer={"aggregator": "rda", "tx": "sgd", "learning_rate": 1.0},
    )
    spec = spec_of(configured, lambda key: PARAMS, lambda params, rows: 0.0)
    program = lower(spec, ProgramKey("outer", (8,))).compile()
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    ensemble = ensemble_of([8], zeros, inner_tx=spec.inner_tx, outer_tx=spec.outer_tx)
    ensemble = ensemble.replace(inner_state_R=None)
    workers = start_round(ensemble).replace(params_R=jax.tree.map(np.negative, draw(SHAPES, 8)))
    arguments = (ensemble, workers)
    after, _ = program(*reshard(arguments, program.input_shardings[0]))
    expected, _ = update_of("rda")(draw(SHAPES, 8), np.ones(8, np.float32), (8,))
    actual_M = jax.tree.map(np.negative, after.params_M)
    assert_close(actual_M, expected, rtol=1e-4, atol=1e-5)
