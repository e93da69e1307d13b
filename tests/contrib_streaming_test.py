"""Streaming DiLoCo: what a run with fragments computes, and which bytes it sends."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import trees
from ensembles import NESTEROV, SGD, draw, ensemble_of, filled
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import LENGTH, VOCAB, bigram_loss, corpus, init_fn, settings_of, spec_of
from toy_runs import Signalling, events, lines
from trees import same

from adloco_jax import (
    merge,
    outer_update,
    outer_update_fragment,
    put,
    put_fragment,
    receive_fragment,
    start_round,
    take,
    take_fragment,
)
from adloco_jax.core.compress import packed_bytes
from adloco_jax.core.merge import move_workers
from adloco_jax.engine.programs import lower
from adloco_jax.engine.spec import ProgramKey
from adloco_jax.errors import Preempted
from adloco_jax.study.curves import read_run, training_points
from adloco_jax.study.summary import totals
from adloco_jax.training import fit
from probes.hlo import collectives

SHAPES = {"layers": (6, 3, 2), "embed": (7, 4), "norm": (4,), "tiny": (2, 3), "gain": ()}


def drifted(sizes):
    """An ensemble with momentum whose workers all have different parameters."""
    return filled(ensemble_of(sizes, draw(SHAPES), inner_tx=SGD, own_params=True))


# --- What a fragment is


@settings(max_examples=8)
@given(
    shape=st.lists(st.integers(1, 9), max_size=3),
    num_fragments=st.integers(1, 6),
    lead=st.integers(1, 3),
)
def test_fragments_part_every_leaf(shape, num_fragments, lead):
    leaf = jnp.arange(1, lead * int(np.prod(shape)) + 1, dtype=jnp.float32).reshape(lead, *shape)

    @jax.jit
    def in_parts(leaf):
        again, parts = {"w": jnp.full_like(leaf, -1.0)}, []
        for fragment in range(num_fragments):
            part = take_fragment({"w": leaf}, fragment, num_fragments=num_fragments)
            again = put_fragment(again, part, fragment, num_fragments=num_fragments)
            parts.append(part["w"].ravel())
        return again["w"], jnp.concatenate(parts)

    again, found = map(np.asarray, in_parts(leaf))
    # each entry is in exactly one fragment
    assert sorted(found[found != 0]) == np.asarray(leaf).ravel().tolist()
    np.testing.assert_array_equal(again, leaf)


def test_a_fragment_has_strided_layers_and_rows_and_the_first_has_what_is_too_small():
    tree = {"layers": np.arange(5.0)[None, :, None] * np.ones((1, 5, 2)), "tiny": np.ones((1, 1))}
    first, last = (
        take_fragment(jax.tree.map(jnp.asarray, tree), fragment, num_fragments=2)
        for fragment in range(2)
    )
    assert first["layers"][0, :, 0].tolist() == [0, 2, 4] and first["tiny"].tolist() == [[1]]
    assert last["layers"][0, :, 0].tolist() == [1, 3, 0] and last["tiny"].tolist() == [[0]]


# --- One synchronisation


def test_one_fragment_is_the_whole_update_bit_for_bit():
    ensemble = drifted([2, 1])
    workers = start_round(ensemble)
    assert same(workers.params_R, ensemble.params_R)
    how = {"outer_tx": NESTEROV, "precision": "int4"}
    whole, whole_norm_M = jax.jit(functools.partial(outer_update, **how))(ensemble, workers)
    update = functools.partial(outer_update_fragment, fragment=0, num_fragments=1, **how)
    part, norm_M = jax.jit(update)(ensemble, workers.params_R)
    receive = jax.jit(functools.partial(receive_fragment, fragment=0, num_fragments=1))
    workers = receive(workers, part)
    assert same(part.replace(params_R=workers.params_R), whole) and same(norm_M, whole_norm_M)


def test_a_fragments_update_is_the_whole_updates_there_and_nothing_elsewhere():
    ensemble = drifted([2, 1])
    workers = start_round(ensemble)
    whole, _ = jax.jit(functools.partial(outer_update, outer_tx=NESTEROV))(ensemble, workers)
    how = {"num_fragments": 3, "outer_tx": NESTEROV}
    update = jax.jit(functools.partial(outer_update_fragment, **how))
    take_third = jax.jit(functools.partial(take_fragment, num_fragments=3))
    for fragment in range(3):
        sent_R = take_third(workers.params_R, fragment)
        after, _ = update(ensemble, sent_R, fragment)
        assert int(after.round) == int(fragment == 2)
        for other in range(3):
            part, expected = (
                take_third((one.params_M, one.outer_state_M), other)
                for one in (after, whole if other == fragment else ensemble)
            )
            if other == fragment:
                trees.assert_close(part, expected, rtol=2e-6)
            else:
                assert same(part, expected)


# --- Parts of an ensemble, and merges


def test_workers_take_their_parameters_along_and_join_at_their_trainers():
    ensemble = drifted([1, 2, 1])
    sub = jax.jit(take, static_argnums=1)(ensemble, (2, 1))
    assert same(sub.params_R, trees.rows(ensemble.params_R, 3, 1, 2))
    blank = ensemble.replace(params_R=jax.tree.map(np.zeros_like, ensemble.params_R))
    back = jax.jit(put, static_argnums=1)(blank, (2, 1), sub).params_R
    assert same(back, jax.tree.map(lambda leaf: leaf.at[0].set(0.0), ensemble.params_R))
    move = jax.jit(move_workers, static_argnums=1)
    moved = move(ensemble, ((0, 1), (2, -1), (3,))).params_R
    assert same(trees.rows(moved, 0, 2, 4), trees.rows(ensemble.params_R, 0, 2, 3))
    assert same(trees.rows(moved, 1, 3), trees.rows(ensemble.params_M, 0, 1))
    merged = jax.jit(lambda ensemble: merge(ensemble, [2, 0], weights=[1.0, 3.0]))(ensemble)
    assert same(trees.rows(merged.params_R, 2, 3), trees.rows(merged.params_M, 1, 1))
    assert same(trees.rows(merged.params_R, 0, 1), trees.rows(ensemble.params_R, 1, 2))


# --- Whole runs, beside Streaming DiLoCo written out in float64

RATE, OUTER_RATE, MOMENTUM = 0.05, 0.7, 0.9
START = np.random.default_rng(2).normal(size=(VOCAB, VOCAB))


def stream_diloco(rounds, *, num_fragments, delay, mixing):
    """Streaming DiLoCo (arXiv 2501.18512) for one trainer, then the mean of its workers.

    `rounds` are pairs: micro-batches by time and worker, and the number that make an update.
    Returns the trainer's parameters and the momentum of its outer steps.
    """
    outer, velocity = START.copy(), np.zeros_like(START)
    workers = [START.copy() for _ in rounds[0][0][0]]
    for batches_TRB, accum in rounds:
        grads = [[] for _ in workers]
        segment = len(batches_TRB) // num_fragments
        for t, batches_RB in enumerate(batches_TRB, start=1):
            for one, kept, rows in zip(workers, grads, batches_RB, strict=True):
                kept.append(oracle.batch_loss_and_grad(one, rows)[1])
                if len(kept) == accum:
                    one -= RATE * sum(kept) / accum
                    kept.clear()
            if (t + delay) % segment == 0:
                sent = sum(workers) / len(workers)
            if t % segment == 0:
                of_fragment = slice(t // segment - 1, None, num_fragments)
                gradient = (outer - sent)[of_fragment]
                velocity[of_fragment] = gradient + MOMENTUM * velocity[of_fragment]
                outer[of_fragment] -= OUTER_RATE * (gradient + MOMENTUM * velocity[of_fragment])
                for one in workers:
                    own, new = one[of_fragment], outer[of_fragment]
                    one[of_fragment] = mixing * own + (1 - mixing) * new
    return sum(workers) / len(workers), velocity


def run(workdir, configured, *, table=None, start=None):
    some = jax.devices()[:1]
    with mock.patch.object(jax, "devices", lambda: some):
        return fit(
            configured,
            workdir=workdir,
            init_fn=init_fn if start is None else lambda key: {"w": jnp.float32(start)},
            loss_fn=bigram_loss,
            corpus=table or corpus(),
        )


ONE_TRAINER = {
    "num_rounds": 2,
    "batching": {
        "test": "ramp",
        "ramp": ((0, 2), (1, 8)),
        "initial_batch_size": 2,
        "max_batch_size": 4,
        "buckets": (2, 4),
    },
    "switch": {"mode": "accumulate"},
    "inner": {"tx": "sgd", "learning_rate": RATE, "weight_decay": 0.0, "steps_per_round": 8},
    "merge": {"policy": "none"},
    "ensemble": {"num_trainers": 1, "num_workers": 3},
}


@pytest.mark.parametrize(
    ("num_fragments", "delay", "mixing"),
    [(2, 3, 0.25), (1, 2, 0.0)],
)
def test_a_run_is_streaming_diloco(tmp_path, num_fragments, delay, mixing):
    """A round of 8 updates, then one whose updates accumulate two micro-batches each."""
    outer = {"fragments": num_fragments, "delay_updates": delay, "mixing": mixing}
    result = run(tmp_path / "r", settings_of(**ONE_TRAINER, outer=outer), start=START)
    assert [e["num_accum_steps"] for e in events(tmp_path / "r", "round")] == [1, 2]
    rows_R = [corpus().batch(0, worker, 0, 16 + 64) for worker in range(3)]
    rounds = []
    for rows, size, accum in ((slice(16), 2, 1), (slice(16, None), 4, 2)):
        split_R = [rows_L[rows].reshape(-1, size, LENGTH + 1) for rows_L in rows_R]
        rounds.append((list(zip(*split_R, strict=True)), accum))
    expected, velocity = stream_diloco(
        rounds, num_fragments=num_fragments, delay=delay, mixing=mixing
    )
    # With mixing 0 a worker takes all of its trainer's parameters.
    assert len(events(tmp_path / "r", "sync")) == (num_fragments > 1 or mixing > 0)
    trace_M = optax.tree_utils.tree_get(result.ensemble.outer_state_M, "trace")["w"]
    np.testing.assert_allclose(trace_M[0], velocity, rtol=1e-5, atol=1e-6)
    actual = np.asarray(result.ensemble.params_M["w"])[0]
    assert np.max(np.abs(expected - START)) > 0.01
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)
    assert same(result.ensemble.params_R["w"], np.stack([actual] * 3))
    assert int(result.ensemble.round) == 2


# --- Whole runs: growth, a merge after the second round, accumulation, and the records

RUN = {
    "num_rounds": 4,
    "ensemble": {"num_trainers": 2, "num_workers": 3},
    "inner": {"steps_per_round": 6, "learning_rate": 0.05},
    "outer": {"fragments": 3, "delay_updates": 1, "mixing": 0.5, "precision": "int4"}
    | {"average": 0.5},
    "batching": {"eta": 0.5},
    "merge": {"every_rounds": 2},
    "eval": {"every_rounds": 2, "num_sequences": 8},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never interrupted."""
    result = run(tmp_path_factory.mktemp("whole") / "r", settings_of(**RUN))
    assert max(line.get("num_accum_steps", 0) for line in lines(result.workdir)) > 1
    return result


def test_a_run_that_is_stopped_ends_as_the_uninterrupted_one(tmp_path, whole):
    with pytest.raises(Preempted):
        run(tmp_path / "r", settings_of(**RUN), table=Signalling(7))
    result = run(tmp_path / "r", settings_of(**RUN))
    assert len(events(tmp_path / "r", "start")) == 2
    assert result.state.control == whole.state.control and result.loss == whole.loss
    assert same(result.ensemble, whole.ensemble)
    assert lines(result.workdir) == lines(whole.workdir)


def test_the_ledger_has_every_fragment_and_what_merges_and_the_end_absorb(whole):
    part, all_of_it = 2 * 3 + 4, 6 * 3 + 4  # a 6 x 6 table in int4, with one scale
    rounds, syncs, merges = (events(whole.workdir, name) for name in ("round", "sync", "merge"))
    for line in rounds:
        several = line["workers"] > 1
        assert (line["syncs"], line["bytes"]) == (3 * several, 6 * part * (line["workers"] - 1))
    assert [line["round"] for line in merges] == [2]
    assert (
        [(line["round"], line["trainers"], line["syncs"]) for line in syncs]
        == [
            (2, [0, 1], 1),  # one trainer has a single worker
            (4, merges[0]["members"][:1], 1),
        ]
    )
    assert [line["bytes"] for line in syncs] == [2 * all_of_it, 2 * 2 * all_of_it]
    # The trainer sends parameters, their running average and momentum; a joining worker gets
    # parameters and moments.
    assert merges[0]["bytes"] == 3 * 144 + (144 + 2 * 144)
    (end,) = events(whole.workdir, "end")
    everything = [*rounds, *syncs, *merges]
    assert end["syncs_total"] == sum(line.get("syncs", 0) for line in everything)
    assert end["bytes_total"] == sum(line["bytes"] for line in everything)
    log = read_run(whole.workdir).events
    summed = totals(log)
    for name in ("syncs_total", "bytes_total"):
        assert summed[name] == end[name]
    assert training_points(log)[-1]["bytes"] == end["bytes_total"]
    assert events(whole.workdir, "eval")[-1]["syncs_total"] == end["syncs_total"]
    keys = [line["key"] for line in events(whole.workdir, "compile")]
    assert len(keys) == len(set(keys))


# --- What moves between eight devices


def layered_params(key):
    return {"layers": jnp.zeros((4, 32, 64)), "embed": jnp.zeros((256, 32)), "gain": jnp.zeros(())}


def layered_loss(params, tokens):
    hidden = params["embed"][tokens] * params["gain"]
    hidden = sum(hidden @ params["layers"][n] for n in range(4))
    return jnp.mean(jnp.square(hidden))


@functools.cache
def compiled(*, fragments=1, delay=0, precision="float32"):
    """The collectives of a synchronisation of eight workers on eight devices, and its program."""
    configured = settings_of(
        ensemble={"num_trainers": 1, "num_workers": 8, "model_shards": 1},
        inner={"steps_per_round": 16},
        outer={"fragments": fragments, "delay_updates": delay, "precision": precision},
    )
    spec = spec_of(configured, layered_params, layered_loss)
    key = ProgramKey("fragment", (8,), 2, False) if fragments > 1 else ProgramKey("outer", (8,))
    text = lower(spec, key).compile().as_text()
    return spec, text, collectives(text, loops=fragments > 1)


def test_a_fragment_of_four_moves_a_quarter():
    spec, _, whole = compiled()
    part_spec, _, part = compiled(fragments=4, delay=2)
    assert packed_bytes(part_spec.params, part_spec.outer.precision) == spec.sync_bytes
    assert part_spec.sync_bytes == (spec.sync_bytes - 4) / 4 + 4  # each message is smaller
    accounted = 2 * 7 / 8 * part_spec.sync_bytes
    assert accounted <= sum(found.num_bytes for found in part) <= accounted + 1024  # losses, flags
    largest, largest_part = (max(one.num_bytes for one in found) for found in (whole, part))
    assert largest_part == largest / 4
    assert not any(found.in_loop for found in part)


@pytest.mark.parametrize("precision", [{}, {"precision": "int4"}], ids=str)
def test_what_is_on_its_way_neither_waits_for_the_last_steps_nor_they_for_it(precision):
    _, text, found = compiled(fragments=4, delay=2, **precision)
    large = {one.line for one in found if one.num_bytes > 512}
    inputs, loops, sent = {}, [], []
    for line in text[text.index("\nENTRY ") :].splitlines():
        if named := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line):
            inputs[named[1]] = set(re.findall(r"%([\w.\-]+)", line)) - {named[1]}
            loops += [named[1]] * (" while(" in line)
            sent += [named[1]] * (line.strip() in large)

    def needed(name):
        before, waiting = set(), [name]
        while waiting:
            new = inputs.get(waiting.pop(), set()) - before
            before |= new
            waiting += new
        return before

    first, last = sorted(loops, key=lambda name: len(needed(name)))
    assert first in needed(last) and len(sent) >= 4  # two large leaves, each way
    assert not needed(last) & set(sent)
    assert all(first in needed(name) and last not in needed(name) for name in sent)
