"""Where arrays live, and what the compiled programs therefore exchange; on eight devices."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hlo import collectives

from adloco_jax.core.ensemble import init
from adloco_jax.errors import ConfigError
from adloco_jax.run.build import build_model, program_spec, row_length
from adloco_jax.run.config import default_config, validate
from adloco_jax.run.plan import moved_between_devices
from adloco_jax.run.programs import (
    Key,
    fewest_model_shards,
    first_key,
    lower,
    needed_bytes,
    placement,
)
from adloco_jax.run.sharding import bring, copy_back, copy_to_host, fetch, place

SCALARS = 1024  # bytes: losses, norms, flags

STEPS, BATCH, LENGTH = 3, 8, 16


@functools.cache
def spec_of(model_shards=1, worker_parallelism=1, precision="float32"):
    config = default_config()
    config.model.width = 64
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.mlp_width = 128
    config.model.max_length = LENGTH
    config.data.sequence_length = LENGTH
    config.inner.steps_per_round = STEPS
    config.batching.max_batch_size = BATCH
    config.batching.initial_batch_size = BATCH
    config.ensemble.model_shards = model_shards
    config.ensemble.worker_parallelism = worker_parallelism
    config.outer.precision = precision
    settings = validate(config)
    init_fn, loss_fn = build_model(settings)
    return program_spec(settings, init_fn, loss_fn, row_length(settings)), init_fn


@functools.cache
def compiled_round(num_trainers, num_workers, *, kind="round", **spread):
    spec, _ = spec_of(**spread)
    key = first_key(kind, num_trainers, num_workers, BATCH)
    return key, lower(spec, key).compile()


def by_worker(key, model_shards=1):
    """The devices of each set of workers that share devices."""
    mesh = placement(spec_of(model_shards)[0], key).mesh
    spread = mesh.shape["trainer"] * mesh.shape["worker"]
    return [{device.id for device in row} for row in mesh.devices.reshape(spread, -1)]


def one_round(num_trainers, num_workers, **spread):
    """Losses and the ensemble after a round, on the host."""
    spec, init_fn = spec_of(**spread)
    _, program = compiled_round(num_trainers, num_workers, **spread)
    ensemble = init(
        jax.jit(init_fn)(jax.random.key(0)),
        num_trainers=num_trainers,
        num_workers=num_workers,
        inner_tx=spec.inner_tx,
        outer_tx=spec.outer_tx,
    )
    rng = np.random.default_rng(0)
    shape = (STEPS, num_workers, BATCH, LENGTH + 1)
    tokens = rng.integers(0, 256, shape).astype(np.int32)
    rates = np.full(shape[:2], 1e-3, np.float32)
    after, (loss_TR, _), _ = program(*bring((ensemble, tokens, rates), program.input_shardings[0]))
    return np.asarray(loss_TR), fetch(after.params_M)


@pytest.mark.parametrize(
    ("devices", "num_trainers", "num_workers", "batch", "blocks", "shards", "expected"),
    [
        # trainer, worker, data, model, idle
        (8, 1, 8, 1, True, 1, (1, 8, 1, 1, 1)),
        (8, 1, 4, 6, True, 1, (1, 4, 2, 1, 1)),
        (8, 1, 4, 3, True, 1, (1, 4, 1, 1, 2)),
        (8, 1, 3, 16, True, 1, (1, 1, 8, 1, 1)),
        (8, 4, 8, 1, True, 1, (4, 2, 1, 1, 1)),
        (8, 4, 4, 8, True, 1, (4, 1, 2, 1, 1)),
        (8, 16, 16, 8, True, 1, (8, 1, 1, 1, 1)),
        (8, 3, 8, 8, False, 1, (1, 8, 1, 1, 1)),
        (8, 6, 12, 8, True, 1, (1, 4, 2, 1, 1)),  # no block within a device: as if unequal
        (8, 2, 4, 8, True, 4, (2, 1, 1, 4, 1)),
        (4, 3, 3, 4, True, 1, (1, 1, 4, 1, 1)),
        (1, 3, 5, 4, False, 1, (1, 1, 1, 1, 1)),
    ],
)
def test_meshes_use_devices_for_workers_first(
    monkeypatch, devices, num_trainers, num_workers, batch, blocks, shards, expected
):
    some = jax.devices()[:devices]
    monkeypatch.setattr(jax, "devices", lambda: some)
    at = place(num_trainers, num_workers, batch, blocks=blocks, model_shards=shards)
    assert tuple(at.mesh.shape.values()) == expected
    assert at.blocks == (
        blocks
        and expected[0] * expected[1] == np.gcd(devices // shards, num_workers)
        and not (num_trainers == 6)
    )


@pytest.mark.parametrize(
    ("kind", "num_trainers", "num_workers"),
    [
        *(("round", *shape) for shape in [(1, 8), (4, 8), (8, 8), (3, 8), (1, 2), (4, 4)]),
        *(("accumulate", *shape) for shape in [(1, 8), (3, 8), (4, 4)]),
    ],
)
def test_nothing_passes_between_workers_within_the_inner_loop(kind, num_trainers, num_workers):
    key, program = compiled_round(num_trainers, num_workers, kind=kind)
    homes = by_worker(key)
    found = collectives(program.as_text())
    assert found
    for collective in found:
        for group in collective.groups:
            alone = any(set(group) <= home for home in homes)
            # Also whether a worker left out its update, and the like, is not told within the loop.
            assert alone or not collective.in_loop, collective.line


@pytest.mark.parametrize(
    ("num_trainers", "num_workers", "per_worker_pair"),
    [
        (1, 8, 2 * 7),  # 2 (R - 1) P: what is accounted
        (4, 8, 4 * 2 * 1),  # the same for each of four trainers
        (8, 8, 0),  # a lone worker has nobody to tell
        (3, 8, 7 * (1 + 3)),  # not 2 (2 + 2 + 1): owners are data, all trainers go everywhere
    ],
)
def test_a_round_moves_the_bytes_that_are_accounted(num_trainers, num_workers, per_worker_pair):
    spec, _ = spec_of()
    key, program = compiled_round(num_trainers, num_workers)
    moved = 8 * sum(found.num_bytes for found in collectives(program.as_text()))
    expected = per_worker_pair * spec.param_bytes
    assert expected <= moved <= expected + 8 * SCALARS
    at = placement(spec, key)
    assert at.moved_bytes(spec.param_bytes, num_trainers, num_workers) == expected


def test_the_plan_knows_that_a_lone_worker_has_all_move_in_float32_too():
    spec, _ = spec_of(precision="int8")
    key, program = compiled_round(3, 8, precision="int8")
    moved = 8 * sum(found.num_bytes for found in collectives(program.as_text()))  # either branch
    at = placement(spec, key)
    alone = moved_between_devices(spec, at, np.array([0, 0, 0, 0, 0, 0, 1, 2]))
    assert alone == 7 * (1 + 3) * (spec.sync_bytes + spec.param_bytes)
    assert alone <= moved <= 1.01 * alone  # blocks that are not full
    together = moved_between_devices(spec, at, np.array([0, 0, 0, 1, 1, 1, 2, 2]))
    assert together == 7 * (1 + 3) * spec.sync_bytes


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_round_exchanges_parameters_once_each_way(num_workers):
    _, program = compiled_round(num_workers, 8 // num_workers * num_workers)
    large = [c.kind for c in collectives(program.as_text()) if c.num_bytes > SCALARS]
    leaves = len(jax.tree.leaves(spec_of()[0].params))
    assert large.count("all-to-all") + large.count("reduce-scatter") <= leaves
    assert large.count("all-gather") <= leaves
    assert set(large) <= {"all-to-all", "reduce-scatter", "all-gather"}


@pytest.mark.parametrize("model_shards", [2, 4])
def test_a_worker_that_shares_its_parameters_computes_the_same_and_holds_less(model_shards):
    loss, params = one_round(1, 1, model_shards=1)
    shared_loss, shared_params = one_round(1, 1, model_shards=model_shards)
    np.testing.assert_allclose(shared_loss, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), shared_params, params)
    whole, shared = (
        needed_bytes(compiled_round(1, 1, model_shards=n)[1]) for n in (1, model_shards)
    )
    assert shared < whole
    key, program = compiled_round(1, 1, model_shards=model_shards)
    gathered = [c for c in collectives(program.as_text()) if c.in_loop and c.kind == "all-gather"]
    assert gathered, "weights come together where they are used"
    largest = max(leaf.size * 4 / leaf.shape[0] for leaf in jax.tree.leaves(spec_of()[0].params))
    assert max(c.num_bytes for c in gathered) <= max(largest, 257 * 64 * 4)  # a layer's at a time


def test_a_devices_workers_in_turn_compute_as_at_once():
    loss, params = one_round(3, 16, worker_parallelism=2)
    in_turn_loss, in_turn_params = one_round(3, 16, worker_parallelism=1)
    np.testing.assert_allclose(in_turn_loss, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), in_turn_params, params)
    at_once, in_turn = (compiled_round(3, 16, worker_parallelism=n)[1] for n in (2, 1))
    assert needed_bytes(in_turn) < needed_bytes(at_once)
    assert not [c for c in collectives(in_turn.as_text()) if c.in_loop]


def test_a_cpu_takes_a_batch_in_passes_where_no_devices_share_it():
    spec = spec_of()[0]
    assert spec.examples_per_pass == 2**19 // (64 * LENGTH)
    in_passes = dataclasses.replace(spec, examples_per_pass=2)
    key = first_key("round", 1, 8, BATCH)
    assert needed_bytes(lower(in_passes, key).compile()) < needed_bytes(compiled_round(1, 8)[1])
    shared = first_key("round", 1, 1, BATCH)
    assert lower(in_passes, shared).as_text() == lower(spec, shared).as_text()


def test_two_workers_that_share_parameters_keep_to_themselves():
    key, program = compiled_round(1, 2, model_shards=4)
    homes = by_worker(key, model_shards=4)
    for collective in collectives(program.as_text()):
        if collective.in_loop:
            assert all(any(set(g) <= h for h in homes) for g in collective.groups), collective.line


def test_model_shards_are_as_few_as_memory_needs(monkeypatch):
    spec, _ = spec_of()
    # Parameters, gradients, both moments and the trainer's own copy; the outer momentum is dealt
    # out over all eight devices in any case.
    need = 5 * spec.param_bytes
    for room, expected in ((1.2, 1), (0.9, 2), (0.4, 4), (0.01, 8)):
        monkeypatch.setattr("adloco_jax.run.programs.device_bytes", lambda room=room: room * need)
        shards = fewest_model_shards(spec, num_trainers=1, num_workers=1, memory_frac=1.0)
        assert shards == expected


def test_outer_states_are_dealt_out_and_parameters_whole_with_their_workers():
    spec, _ = spec_of()
    at = placement(spec, Key("round", 2, 4, BATCH, blocks=True))
    leaf = jax.ShapeDtypeStruct((2, 64, 128), np.float32)
    assert at.by_trainer(leaf).shard_shape(leaf.shape) == (1, 64, 128)
    assert at.dealt(leaf).shard_shape(leaf.shape) == (1, 64, 128 // 4)
    states = jax.ShapeDtypeStruct((4, 64, 128), np.float32)
    assert at.by_worker(states).shard_shape(states.shape) == (1, 64, 128)
    odd = jax.ShapeDtypeStruct((2, 5, 7), np.float32)
    assert at.dealt(odd).shard_shape(odd.shape) == (1, 5, 7)  # nothing divides: whole


def test_host_copies_come_back_bit_for_bit():
    at = place(2, 4, blocks=True)
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(4, 6)).astype(np.float32), "b": np.arange(8)}
    put = bring(tree, {"a": at.workers, "b": at.whole})
    back = copy_back(copy_to_host(put))
    for name, leaf in put.items():
        assert back[name].sharding == leaf.sharding
        np.testing.assert_array_equal(fetch(back)[name], tree[name])


def test_what_is_in_place_is_not_copied():
    at = place(1, 8)
    there = bring(np.arange(8.0), at.workers)
    assert bring(there, at.workers) is there
    assert bring(3, None) == 3


def test_placement_is_described_and_drawn():
    at = place(2, 4, 3, blocks=True)
    assert at.describe() == (
        "workers spread 4 ways over 8 devices; idle, repeating others' work: device 1 3 5 7"
    )
    assert at.draw([0, 0, 1, 1]) == [
        "  device 0 1: worker 0 (trainer 0)",
        "  device 2 3: worker 1 (trainer 0)",
        "  device 4 5: worker 2 (trainer 1)",
        "  device 6 7: worker 3 (trainer 1)",
    ]
    shared = place(1, 2, 2, model_shards=2)
    assert shared.describe() == (
        "workers spread 2 ways over 8 devices; 2 share a worker's batch;"
        " 2 share a worker's parameters"
    )


def test_model_shards_must_divide_the_devices():
    with pytest.raises(ConfigError, match="model_shards = 3: does not divide the 8 devices"):
        spec_of(model_shards=3)
    with pytest.raises(ValueError, match="cannot reshape"):
        place(1, 1, model_shards=3)
