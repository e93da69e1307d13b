"""The placement of arrays, and what compiled programs send; on eight devices."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from toy import settings_of

from adloco_jax.config import default_config, validate
from adloco_jax.core.outer import start_round
from adloco_jax.core.types import init
from adloco_jax.engine import memory
from adloco_jax.engine.inputs import group_by_size
from adloco_jax.engine.model import configured_model, program_spec
from adloco_jax.engine.programs import lower, needed_bytes
from adloco_jax.engine.sharding import arrange, fetch, placement, reshard
from adloco_jax.engine.spec import Layout, Machine, ProgramKey, this_machine
from adloco_jax.errors import ConfigError
from adloco_jax.loop.adloco import start
from probes.hlo import collectives

SCALARS = 1024  # bytes: losses, norms, flags

STEPS, BATCH, LENGTH = 3, 8, 16


@functools.cache
def spec_of(model_shards=1):
    config = default_config()  # width 64, two layers
    config.model.mlp_width = 128
    config.data.sequence_length = LENGTH
    config.inner.steps_per_round = STEPS
    config.batching.max_batch_size = BATCH
    config.batching.initial_batch_size = BATCH
    config.ensemble.model_shards = model_shards
    settings = validate(config)
    model = configured_model(settings, this_machine())
    return program_spec(settings, model, this_machine()), model.init_fn


@functools.cache
def compiled(kind, sizes, *, accumulates=False, **spread):
    """The key and the program of the workers' inner steps, or of their synchronisation."""
    key = ProgramKey(kind, sizes, BATCH if kind == "steps" else 0, accumulates)
    return key, lower(spec_of(**spread)[0], key).compile()


@functools.cache
def after_steps(num_workers, **spread):
    """Losses and workers' parameters after a round's inner steps, on the host."""
    spec, init_fn = spec_of(**spread)
    ensemble = init(
        jax.jit(init_fn)(jax.random.key(0)),
        num_trainers=1,
        num_workers=num_workers,
        inner_tx=spec.inner_tx,
        outer_tx=spec.outer_tx,
    )
    tokens = np.random.default_rng(0).integers(0, 256, (STEPS, 8, BATCH, LENGTH + 1))
    tokens = tokens[:, :num_workers].astype(np.int32)
    rates = np.full(tokens.shape[:2], 1e-3, np.float32)
    _, steps = compiled("steps", (num_workers,), **spread)
    inputs = (start_round(ensemble), tokens, rates, None, None)
    workers, loss_TR, _ = steps(*reshard(inputs, steps.input_shardings[0]))
    return np.asarray(loss_TR), fetch(workers.params_R)


def assert_same_steps(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), actual[1], expected[1])


@pytest.mark.parametrize(
    ("devices", "sizes", "batch", "shards", "expected"),
    [
        # trainer, worker, data, model, idle
        (8, (4,), 6, 1, (1, 4, 2, 1, 1)),
        (8, (4,), 3, 1, (1, 4, 1, 1, 2)),
        (8, (3,), 16, 1, (1, 1, 8, 1, 1)),
        (8, (2, 2, 2, 2), 1, 1, (4, 2, 1, 1, 1)),
        (8, (1,) * 16, 8, 1, (8, 1, 1, 1, 1)),
        (8, (3, 3, 2), 8, 1, (1, 8, 1, 1, 1)),
        # a device has no whole trainer: treated as unequal
        (8, (2,) * 6, 8, 1, (1, 4, 2, 1, 1)),
        (8, (2, 2), 8, 4, (2, 1, 1, 4, 1)),
        (1, (2, 2, 1), 4, 1, (1, 1, 1, 1, 1)),
    ],
)
def test_meshes_use_devices_for_workers_first(devices, sizes, batch, shards, expected):
    at = arrange(sizes, batch, devices=jax.devices()[8 - devices :], model_shards=shards)
    assert tuple(at.mesh.shape.values()) == expected
    assert at.mesh.devices.reshape(-1).tolist() == jax.devices()[8 - devices :]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 2, 2, 2), [((0, 1, 2, 3), None)]),
        ((5, 2, 1), [((0,), (0, 5)), ((1,), (5, 2)), ((2,), (7, 1))]),
        ((2, 3, 3), [((1, 2), (0, 6)), ((0,), (6, 2))]),
        ((4, 1), [((0,), (0, 6)), ((1,), (6, 2))]),
    ],
)
def test_trainers_of_as_many_workers_have_devices_of_their_own(sizes, expected):
    settings = settings_of(ensemble={"num_trainers": len(sizes), "num_workers": sum(sizes)})
    control = start(settings.ensemble, settings.batching, BATCH)
    for trainer, size in zip(control.trainers.values(), sizes, strict=True):
        trainer.streams = [*range(size)]
    groups = group_by_size(control, control.trainers, spec_of()[0])
    assert [(group.trainers, group.devices) for group in groups] == expected
    assert all(g.sizes == tuple(sizes[m] for m in g.trainers) for g in groups)


def test_one_device_takes_all_trainers_in_one_class():
    spec = spec_of()[0]
    spec = dataclasses.replace(spec, machine=Machine(spec.machine.devices[:1], 2**30))
    settings = settings_of(ensemble={"num_trainers": 3, "num_workers": 5})
    control = start(settings.ensemble, settings.batching, BATCH)
    (group,) = group_by_size(control, range(3), spec)
    assert (group.sizes, group.devices) == ((2, 2, 1), None)


@pytest.mark.parametrize(
    ("num_workers", "accumulates", "model_shards"), [(8, True, 1), (2, False, 4)]
)
def test_nothing_passes_between_workers_in_the_inner_steps(num_workers, accumulates, model_shards):
    spread = {} if model_shards == 1 else {"model_shards": model_shards}
    key, program = compiled("steps", (num_workers,), accumulates=accumulates, **spread)
    mesh = placement(spec_of(**spread)[0], key.layout).mesh
    homes = [{d.id for d in row} for row in mesh.devices.reshape(num_workers, -1)]
    found = collectives(program.as_text())
    for collective in found:
        for group in collective.groups:
            alone = any(set(group) <= home for home in homes)
            # The loop has no communication, not even of skipped updates.
            assert alone or not collective.in_loop, collective.line
    if model_shards == 1:
        assert sum(c.num_bytes for c in found if not c.in_loop) <= SCALARS


@pytest.mark.parametrize(
    ("sizes", "per_worker_pair"),
    [
        ((8,), 2 * 7),  # 2 (R - 1) P, as accounted
        ((2, 2, 2, 2), 4 * 2 * 1),  # the same, for each of four trainers
        ((3, 3, 2), 7 * (1 + 3)),  # not 2 (2 + 2 + 1): all trainers go to all devices
    ],
)
def test_a_round_moves_the_bytes_that_are_accounted(sizes, per_worker_pair):
    spec, _ = spec_of()
    _, program = compiled("outer", sizes)
    found = collectives(program.as_text(), loops=False)
    expected = per_worker_pair * spec.param_bytes
    assert expected <= 8 * sum(c.num_bytes for c in found) <= expected + 8 * SCALARS


def test_a_worker_that_shares_its_parameters_computes_the_same_and_holds_less():
    losses_SR, params_R = after_steps(8)  # each worker has a device
    expected = losses_SR[:, :2], jax.tree.map(lambda leaf: leaf[:2], params_R)
    assert_same_steps(after_steps(2, model_shards=4), expected)
    _, whole = compiled("steps", (8,))
    _, program = compiled("steps", (2,), model_shards=4)
    assert needed_bytes(program) < needed_bytes(whole)
    gathered = [c for c in collectives(program.as_text()) if c.in_loop and c.kind == "all-gather"]
    assert gathered, "weights come together where they are used"
    largest = max(leaf.size * 4 / leaf.shape[0] for leaf in jax.tree.leaves(spec_of()[0].params))
    assert max(c.num_bytes for c in gathered) <= max(largest, 257 * 64 * 4)  # one layer at a time


def test_a_cpu_takes_a_batch_in_passes():
    spec = spec_of()[0]
    assert spec.examples_per_pass == 2**19 // (64 * LENGTH)
    key, whole = compiled("steps", (8,))
    in_passes = lower(dataclasses.replace(spec, examples_per_pass=2), key).compile()
    assert needed_bytes(in_passes) < needed_bytes(whole)


def test_model_shards_are_as_few_as_memory_needs():
    spec, _ = spec_of()
    # Parameters, gradients, both moments and the trainer's own copy; the outer momentum is sharded
    # over all eight devices in any case.
    need = 5 * spec.param_bytes
    for room, expected in ((1.2, 1), (0.9, 2), (0.4, 4), (0.01, 8)):
        machine = Machine(spec.machine.devices, int(room * need))
        tried = dataclasses.replace(spec, machine=machine)
        assert memory.choose_model_shards(tried, (1,), given=None, memory_frac=1.0) == expected


def test_outer_states_are_sharded_and_parameters_whole_with_their_workers():
    spec, _ = spec_of()
    at = placement(spec, Layout((2, 2)))
    leaf = jax.ShapeDtypeStruct((2, 64, 128), np.float32)
    assert at.by_trainer(leaf).shard_shape(leaf.shape) == (1, 64, 128)
    assert at.sharded(leaf).shard_shape(leaf.shape) == (1, 64, 128 // 4)
    states = jax.ShapeDtypeStruct((4, 64, 128), np.float32)
    assert at.by_worker(states).shard_shape(states.shape) == (1, 64, 128)
    odd = jax.ShapeDtypeStruct((2, 5, 7), np.float32)
    assert at.sharded(odd).shard_shape(odd.shape) == (1, 5, 7)  # no dimension divides: not sharded


def test_arrays_are_resharded_and_fetched_and_what_is_in_place_is_not_copied():
    at = arrange((2, 2), devices=jax.devices())
    tree = {"a": np.arange(24.0, dtype=np.float32).reshape(4, 6), "b": np.arange(8)}
    put = reshard(tree, {"a": at.workers, "b": at.replicated})
    assert put["a"].sharding == at.workers and reshard(put["a"], at.workers) is put["a"]
    jax.tree.map(np.testing.assert_array_equal, fetch(put), tree)


def test_model_shards_must_divide_the_devices():
    with pytest.raises(ConfigError, match="model_shards = 3: does not divide the 8 devices"):
        spec_of(model_shards=3)
    with pytest.raises(ValueError, match="cannot reshape"):
        arrange((1,), devices=jax.devices(), model_shards=3)
