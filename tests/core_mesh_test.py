"""Every public function of arrays on a mesh with explicit axes, the default of `jax.make_mesh`."""

import contextlib
import inspect

import jax
import numpy as np
import pytest
from ensembles import ADAMW, NESTEROV, TXS, batch_of, draw, ensemble_of, filled, loss_fn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import assert_close

import adloco_jax as aj
from adloco_jax.contrib import streaming

MESH = ((4, 2), ("pool", "model"), (AxisType.Explicit, AxisType.Explicit))
SIZES = (3, 1, 2, 2)
PARAMS = draw({"w": (4, 2), "b": (2,), "scale": ()})
F = {"num_fragments": 2}


def answers(stats):
    pooled = aj.pool(jax.tree.map(lambda leaf: leaf[None], stats))
    norm, inner = aj.norm_test(pooled, eta=0.5), aj.inner_product_test(stats, vartheta=0.5)
    return pooled, norm, inner, aj.augmented_inner_product_test(stats, vartheta=0.5, nu=0.5)


def parts_of_a_round(ensemble, batch):
    workers = aj.start_round(ensemble)
    reset = aj.start_round(ensemble, accumulate=True, reset_tx=ADAMW)
    after = aj.outer_update(ensemble, workers, outer_tx=NESTEROV)
    return reset, aj.inner_steps(workers, batch, loss_fn, inner_tx=ADAMW), after


def differences(ensemble):
    workers = aj.start_round(ensemble)
    applied = aj.apply_differences(
        ensemble, aj.pack_differences(ensemble, workers), outer_tx=NESTEROV
    )
    return aj.pack_differences(ensemble, workers, precision="int4"), applied


def fragments(ensemble):
    sent_R = aj.take_fragment(ensemble.params_R, 1, **F)
    after = aj.outer_update_fragment(ensemble, sent_R, 1, outer_tx=NESTEROV, **F)
    received = aj.receive_fragment(aj.start_round(ensemble), ensemble, 1, mixing=0.5, **F)
    return after, received, streaming.flush_workers(ensemble)


# Shardings of an ensemble, a round's batch, one model's parameters, and examples.
CALLS = {
    "init": lambda e, b, p, x: aj.init(p, num_trainers=4, num_workers=8, **TXS),
    "take put": lambda e, b, p, x: (
        aj.take(e, [0, 2]),
        aj.put(e, [3, 2], aj.take(e, [2, 3])),
    ),
    "merge reassign spawn": lambda e, b, p, x: (
        aj.merge(e, (1, 2), weights=(1.0, 2.0)),
        aj.reassign(e, [2, 2, 1, 4]),
        aj.spawn(e, 0, 5),
    ),
    "start_round inner_steps outer_update": lambda e, b, p, x: parts_of_a_round(e, b),
    "pack_differences apply_differences": lambda e, b, p, x: differences(e),
    "outer_step": lambda e, b, p, x: aj.outer_step(e, b, loss_fn, **TXS),
    "take_fragment put_fragment": lambda e, b, p, x: aj.put_fragment(
        e.params_R, aj.take_fragment(e.params_R, 1, **F), 0, **F
    ),
    "outer_update_fragment receive_fragment flush_workers": lambda e, b, p, x: fragments(e),
    "gradient_stats pool norm_test inner_product_test augmented_inner_product_test": (
        lambda e, b, p, x: answers(aj.gradient_stats(loss_fn, p, x))
    ),
    "gradient_stats_of_means": lambda e, b, p, x: aj.gradient_stats_of_means(
        p, x["y"][:, 0], batch_size=3
    ),
}
OF_THE_HOST = {"allocate_workers", "choose_merge", "constant", "next_batch_size", "ramp", "replay"}
OF_THE_HOST |= {"switch_mode", "fit", "join", "train"}


def test_every_public_function_is_called_here():
    assert {name for name in dir(aj) if not name.startswith("__")} == set(aj.__all__)
    functions = {name for name in aj.__all__ if inspect.isfunction(getattr(aj, name))}
    assert functions - OF_THE_HOST <= set(" ".join(CALLS).split())


@pytest.fixture(scope="module")
def arguments():
    ensemble = filled(ensemble_of(SIZES, PARAMS, own_params=True))
    batch = jax.tree.map(lambda leaf: np.pad(leaf, [(0, 0)] * 3 + [(0, 1)]), batch_of(2, 8, 4))
    batch["y"] = batch["y"][..., :2]
    return ensemble, batch, PARAMS, jax.tree.map(lambda leaf: leaf[0, 0], batch)


def on_mesh(tree, *spec):
    mesh = jax.make_mesh(*MESH)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(*spec[: np.ndim(leaf)]))), tree
    )


@pytest.mark.parametrize(
    ("name", "is_jitted"),
    [*((name, True) for name in CALLS), ("outer_step", False)],
)
def test_a_public_function_gives_the_same_jitted_and_eagerly(name, is_jitted, arguments):
    call, (ensemble, batch, params, examples) = CALLS[name], arguments
    expected = jax.jit(call)(*arguments)
    placed = ensemble.replace(
        params_M=on_mesh(ensemble.params_M, "pool", "model"),
        outer_state_M=on_mesh(ensemble.outer_state_M, "pool"),
        inner_state_R=on_mesh(ensemble.inner_state_R, ("pool", "model")),
        params_R=on_mesh(ensemble.params_R, "pool", "model"),
        round=on_mesh(ensemble.round),
    )
    batch = on_mesh(batch, None, ("pool", "model"))
    placed = placed, batch, on_mesh(params, "model"), on_mesh(examples, "pool")
    with jax.set_mesh(jax.make_mesh(*MESH)) if is_jitted else contextlib.nullcontext():
        actual = (jax.jit(call) if is_jitted else call)(*placed)
    assert_close(jax.device_get(actual), jax.device_get(expected), rtol=1e-5)
    parts = jax.tree.leaves(actual, is_leaf=lambda part: isinstance(part, aj.Ensemble))
    for part in parts if name != "init" else []:
        if isinstance(part, aj.Ensemble):
            kept = [leaf.sharding.spec[0] for leaf in jax.tree.leaves(part.inner_state_R)]
            assert set(kept) == {("pool", "model") if part.num_workers == 8 else None}
