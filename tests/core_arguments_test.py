"""Parameters, losses and meshes of other people's code: `outer_step` and its parts take them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from toy import bigram_loss, corpus, init_fn, settings_of

from adloco_jax import (
    gradient_stats,
    init,
    inner_steps,
    outer_step,
    outer_update,
    start_round,
)
from adloco_jax.adloco import start
from adloco_jax.run.batches import _group, _streams
from adloco_jax.run.build import program_spec
from adloco_jax.run.programs import _keyed
from adloco_jax.training import fit

ADAMW = optax.adamw(0.05, weight_decay=0.1)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
W = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
B = np.float32([0.3, -0.2])


def batch_of(*shape):
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(*shape, 3)).astype(np.float32),
        "y": rng.normal(size=(*shape, 2)).astype(np.float32),
    }


def residual(w, b, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ w + b[None]) - batch["y"]))


class Layer(NamedTuple):
    w: Any
    b: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("w", "b", "act"), meta_fields=("size",)
)
@dataclasses.dataclass
class Module:
    """As Equinox's are: a static field, and None where `eqx.partition` took out no array."""

    w: Any
    b: Any
    act: Any
    size: int


class Net(nnx.Module):
    def __init__(self):
        self.w, self.b = nnx.Param(jnp.asarray(W)), nnx.Param(jnp.asarray(B))


NET, STATE = nnx.split(Net())


def merged_net(params):
    net = nnx.merge(NET, params)
    return net.w[...], net.b[...]


KINDS = {
    "dict": ({"w": W, "b": B}, lambda p: (p["w"], p["b"])),
    "list": ([W, B], tuple),
    "named tuple": (Layer(W, B), tuple),
    "None leaves": ({"w": W, "b": B, "bias": None}, lambda p: (p["w"], p["b"])),
    "nnx state": (STATE, merged_net),
    "partitioned module": (Module(W, B, None, 3), lambda p: (p.w, p.b)),
}


def round_of(kind, **how):
    params, read = KINDS[kind]

    def loss_fn(params, batch):
        return residual(*read(params), batch)

    txs = {"inner_tx": ADAMW, "outer_tx": NESTEROV}
    ensemble = init(params, num_trainers=2, num_workers=3, **txs)
    step = jax.jit(lambda e, batch: outer_step(e, batch, loss_fn, **txs, **how))
    after, _ = step(ensemble, batch_of(2, 3, 4))
    assert jax.tree.structure(after) == jax.tree.structure(ensemble)
    one = jax.tree.map(lambda leaf: leaf[0], after.params_M)
    stats = gradient_stats(loss_fn, one, batch_of(5))
    return read(one), stats


@functools.cache
def round_of_dicts():
    return round_of("dict")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dict"])
def test_parameters_may_be_of_any_kind(kind):
    actual, expected = round_of(kind), round_of_dicts()
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6), actual, expected)


def test_bfloat16_parameters_go_through_a_round(monkeypatch):
    low = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), KINDS["dict"][0])
    monkeypatch.setitem(KINDS, "dict", (low, KINDS["dict"][1]))
    (w, b), stats = round_of("dict")
    assert w.dtype == b.dtype == jnp.bfloat16
    (wide_w, _), wide_stats = round_of_dicts()
    np.testing.assert_allclose(np.float32(w), wide_w, atol=0.03)
    np.testing.assert_allclose(stats.noise, wide_stats.noise, rtol=0.1)


# --- Losses with a key, and with auxiliary output


def bits_loss(params, batch, key):
    """Reports the key that it is given, and how many examples."""
    aux = {"bits": jax.random.key_data(key)[1] % 2**20, "size": jnp.int32(len(batch["x"]))}
    return residual(params["w"], params["b"], batch), aux


def reported(num_accum_steps):
    txs = {"inner_tx": ADAMW, "outer_tx": NESTEROV}
    ensemble = init(KINDS["dict"][0], num_trainers=2, num_workers=3, **txs)
    step = functools.partial(
        outer_step, loss_fn=bits_loss, has_aux=True, num_accum_steps=num_accum_steps, **txs
    )
    _, metrics = jax.jit(step)(ensemble, batch_of(2, 3, 4), key=jax.random.key(5))
    return metrics.aux


def expected_bits(trainer, worker, place):
    key = jax.random.key(5)
    for number in (trainer, worker, place):
        key = jax.random.fold_in(key, number)
    return int(jax.random.key_data(key)[1]) % 2**20


@pytest.mark.parametrize("num_accum_steps", [1, 2])
def test_each_micro_batch_has_a_key_of_its_own_and_auxiliary_output_is_its_updates_mean(
    num_accum_steps,
):
    aux, size = reported(num_accum_steps), 4 // num_accum_steps
    assert aux["size"].tolist() == [[size] * 3] * 2 and aux["bits"].dtype == jnp.float32
    for s in range(2):
        for worker, trainer in enumerate((0, 0, 1)):
            places = [4 * s + size * a for a in range(num_accum_steps)]
            mean = np.mean([expected_bits(trainer, worker, place) for place in places])
            assert aux["bits"][s, worker] == mean


def test_a_pass_has_the_key_of_its_first_example():
    txs = {"inner_tx": ADAMW, "outer_tx": NESTEROV}
    ensemble = init(KINDS["dict"][0], num_trainers=1, num_workers=1, **txs)
    key_TRB = jax.random.split(jax.random.key(0), (1, 1, 4))
    *_, aux_TR = inner_steps(
        start_round(ensemble),
        batch_of(1, 1, 4),
        bits_loss,
        inner_tx=ADAMW,
        key_TRB=key_TRB,
        has_aux=True,
        examples_per_pass=2,
    )
    bits = np.asarray(jax.random.key_data(key_TRB))[0, 0, ::2, 1] % 2**20
    assert aux_TR["bits"].tolist() == [[bits.mean()]]


def test_statistics_use_one_key_and_leave_auxiliary_output_out():
    def noisy(params, batch, key):
        loss, aux = bits_loss(params, batch, key)
        return loss * jax.random.uniform(key, minval=0.5), aux

    factor = float(jax.random.uniform(jax.random.key(0), minval=0.5))
    params = KINDS["dict"][0]
    actual = gradient_stats(noisy, params, batch_of(5), has_aux=True)
    _, expected = 0, gradient_stats(lambda p, b: residual(p["w"], p["b"], b), params, batch_of(5))
    np.testing.assert_allclose(actual.noise, factor**2 * expected.noise, rtol=1e-5)


def test_a_repeated_round_with_smaller_micro_batches_has_the_same_keys():
    """In a run a sequence's key is of its trainer, its stream and its place there."""
    settings = settings_of()
    control = start(settings, 4)
    control.trainers[2].cursors["3"] = 50
    spec = program_spec(settings, init_fn, lambda params, rows, key: bigram_loss(params, rows), 9)
    stream_R3 = _streams(control, _group(control, (0, 1, 2), None), 8)
    assert stream_R3.tolist() == [[0, 0, 8], [0, 1, 8], [1, 2, 8], [2, 3, 58]]
    for shape in ((3, 4, 4, 9), (6, 4, 2, 9)):
        _, key_TRB = _keyed(spec, jnp.zeros(shape), jnp.asarray(stream_R3))
        key = jax.random.key(settings.seed)
        for number in (2, 3, 58 + 6):
            key = jax.random.fold_in(key, number)
        assert key_TRB[6 // shape[2], 3, 6 % shape[2]] == key
    assert program_spec(settings, init_fn, bigram_loss, 9).key_seed is None


@pytest.mark.parametrize("outer", [{}, {"fragments": 3}])
def test_a_run_gives_its_loss_keys_and_repeats_itself(tmp_path, outer):
    def loss(params, rows, key):
        return bigram_loss(params, rows) * jax.random.uniform(key, minval=0.5, maxval=1.5)

    settings = settings_of(num_rounds=2, outer=outer, batching={"test_batch_size": 8})
    run = {"corpus": corpus(), "init_fn": init_fn}
    one, other, plain = (
        fit(settings, workdir=tmp_path / name, loss_fn=loss_fn, **run)
        for name, loss_fn in (("one", loss), ("other", loss), ("plain", bigram_loss))
    )
    assert np.isfinite(one.loss)
    np.testing.assert_array_equal(one.params["w"], other.params["w"])
    assert not np.allclose(one.params["w"], plain.params["w"])


# --- Meshes with explicit axes


def test_arrays_may_be_on_explicit_mesh_axes():
    """The ensemble keeps its shardings; the parts take such arrays too."""
    mesh = jax.make_mesh((8,), ("worker",), axis_types=(AxisType.Explicit,))
    whole, pool = NamedSharding(mesh, P()), NamedSharding(mesh, P("worker"))

    def loss_fn(params, batch):
        return residual(params["w"], params["b"], batch)

    txs = {"inner_tx": ADAMW, "outer_tx": NESTEROV}
    owners = [0, 0, 0, 1, 1, 2, 2, 2]
    ensemble = init(KINDS["dict"][0], num_trainers=3, num_workers=8, owner_R=owners, **txs)
    placed = jax.device_put(ensemble, whole).replace(
        inner_state_R=jax.device_put(ensemble.inner_state_R, pool)
    )
    batch = batch_of(2, 8, 4)
    on_mesh = jax.device_put(batch, NamedSharding(mesh, P(None, "worker")))
    step = jax.jit(lambda e, b, w: outer_step(e, b, loss_fn, weights_R=w, **txs))
    weights_R = np.arange(1.0, 9.0, dtype=np.float32)
    expected, metrics = step(ensemble, batch, weights_R)
    actual, on_metrics = step(placed, on_mesh, jax.device_put(weights_R, pool))
    workers = start_round(placed, accumulate=True)
    assert workers.params_R["w"].sharding.spec == P("worker", None, None)
    workers, *measured = inner_steps(
        start_round(placed), on_mesh, loss_fn, inner_tx=ADAMW, learning_rate_TR=np.ones((2, 8))
    )
    parts, _ = outer_update(placed, workers, outer_tx=NESTEROV, weights_R=weights_R)
    for one in (actual, parts):
        assert one.inner_state_R[0].mu["w"].sharding.spec == P("worker", None, None)
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6), one, expected
        )
    for loss_SR in (on_metrics.loss_SR, measured[0]):
        np.testing.assert_allclose(loss_SR, metrics.loss_SR, rtol=1e-6)
    examples = jax.tree.map(lambda leaf: leaf[0].reshape(32, -1), batch)
    stats, on_stats = (
        gradient_stats(loss_fn, params, jax.device_put(examples, at))
        for params, at in (
            (KINDS["dict"][0], None),
            (jax.device_put(KINDS["dict"][0], whole), pool),
        )
    )
    np.testing.assert_allclose(on_stats.noise, stats.noise, rtol=1e-5)


# --- What is refused, with what to do


def keyless(params, batch):
    return residual(params["w"], params["b"], batch)


@pytest.mark.parametrize(
    ("loss_fn", "how", "words"),
    [
        (bits_loss, {"has_aux": True}, "takes `key` if and only if .* pass key=jax.random.key"),
        (keyless, {"key": jax.random.key(0)}, "give the loss a parameter `key`"),
        (lambda p, b: b["y"][:, 0], {}, r"returned shape \(4,\), expected one number, .* jnp.mean"),
        (lambda p, b: (keyless(p, b), {}), {}, r"returned shape \(\(\), \{\}\).* say has_aux=True"),
        (keyless, {"has_aux": True}, r"returned shape \(\), expected a pair \(loss, aux\)"),
        (lambda p, b: (b["y"], {}), {"has_aux": True}, r"returned shape \(4, 2\), expected a pair"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_while_tracing(loss_fn, how, words):
    txs = {"inner_tx": ADAMW, "outer_tx": NESTEROV}
    ensemble = init(KINDS["dict"][0], num_trainers=1, num_workers=1, **txs)
    with pytest.raises(ValueError, match=f"^loss_fn: .*{words}"):
        jax.eval_shape(
            lambda e, b: outer_step(e, b, loss_fn, **txs, **how), ensemble, batch_of(1, 1, 4)
        )


def test_whole_numbers_are_not_trained():
    words = "at least one floating-point array, got int32; convert what is to be trained"
    with pytest.raises(ValueError, match=words):
        init([np.int32([1, 2])], num_trainers=1, num_workers=1, inner_tx=ADAMW, outer_tx=ADAMW)
    with pytest.raises(ValueError, match=words):
        gradient_stats(lambda p, b: jnp.sum(p[0]) * 1.0, [np.int32([1, 2])], batch_of(4))
