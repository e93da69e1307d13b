"""The local engine: the programs that it compiles, its turns, and the rows that it reads ahead."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import VOCAB, Table, corpus, settings_of, spec_of
from toy_runs import events, run
from trees import assert_close, assert_equal

from adloco_jax.core.types import init
from adloco_jax.data.sampling import split_heldout
from adloco_jax.engine import programs as programs_module
from adloco_jax.engine import sharding
from adloco_jax.engine.inputs import group_by_plan, make_round_inputs, round_keys
from adloco_jax.engine.local import LocalEngine
from adloco_jax.engine.memory import program_peaks
from adloco_jax.engine.programs import Programs, lower, needed_bytes
from adloco_jax.engine.spec import Compiled, Compiling, ProgramKey
from adloco_jax.loop.adloco import State, after_merge, start
from adloco_jax.loop.plans import round_plans

pytestmark = pytest.mark.usefixtures("one_device")


def test_a_run_without_merges_compiles_what_the_plan_lists(tmp_path):
    """All trainers grow alike: a batch in each of two buckets, then an accumulated one."""
    growing = {"num_rounds": 4, "batching": {"eta": 0.5}, "merge": {"policy": "none"}}
    settings = settings_of(**growing)
    programs, control = Programs(spec_of(settings)), start(settings.ensemble, settings.batching, 4)
    planned = program_peaks(control, programs, settings.batching, settings.switch)
    ensemble = "M=3 R=4 B=0 workers=2,1,1"
    assert {*planned, "steps M=1 R=4 B=2"} == {
        *(f"{kind} {ensemble}" for kind in ("stats", "start", "outer")),
        *("steps M=1 R=4 B=2", "steps M=1 R=4 B=4", "loss M=1 R=1 B=4"),
        *("steps M=1 R=4 B=4 accumulating", f"start {ensemble} accumulating"),
    }
    run(tmp_path, settings)
    accumulated = [e["num_accum_steps"] for e in events(tmp_path, "round")]
    assert accumulated == [1] * 6 + [4] * 6
    compiled = [e["key"] for e in events(tmp_path, "compile")]
    assert sorted(compiled) == sorted({*planned, "steps M=1 R=4 B=2"})


def undecided(control, stats, plans):
    return control, []


def test_a_round_of_unequal_trainers_in_turn_is_the_one_at_once(monkeypatch):
    """One trainer has a small micro-batch, one a larger one, and one accumulates three."""
    one = {"num_rounds": 1, "batching": {"test": "constant"}}  # then nothing is made ahead
    settings = settings_of(**one, switch={"mode": "accumulate"}, inner={"state": "reset"})
    control = start(settings.ensemble, settings.batching, 4)
    for trainer, batch_size in zip(control.trainers.values(), (2, 4, 12), strict=True):
        trainer.requested_batch_size = batch_size
    rows, ended = corpus(), []
    spec = spec_of(settings)
    params = {"w": jax.random.normal(jax.random.key(1), (VOCAB, VOCAB))}
    for sequential in (False, True):
        if sequential:  # as if no call had ended before the last was dispatched
            monkeypatch.setattr(LocalEngine, "_note", lambda self, loss: self._losses.append(loss))
        chosen = dataclasses.replace(spec, sequential=sequential)
        transforms = {"inner_tx": spec.inner_tx, "outer_tx": spec.outer_tx}
        ensemble = init(params, num_trainers=3, num_workers=4, **transforms)
        calls: dict[float, jax.Array] = {}
        noted: list = []
        more = {"heldout": None, "on_call": calls.__setitem__}
        engine = LocalEngine(settings, chosen, Programs(chosen, noted.append), rows, **more)
        round_state = State(ensemble, control)
        plans = round_plans(control, settings)
        assert len(group_by_plan(control, plans, chosen)) == 3
        after, boundary = engine.round(round_state, undecided)
        metrics = boundary.metrics
        compiled = {event.key for event in noted if isinstance(event, Compiled)}
        assert compiled == set(round_keys(control, plans, settings.batching, chosen))
        num_calls = 6 if sequential else 5
        assert list(calls) == pytest.approx(np.arange(1, num_calls + 1) / num_calls)
        first_SR = metrics.outcomes[0].loss_SR[:, : 1 if sequential else None]
        assert calls[min(calls)].mean() == pytest.approx(first_SR.mean())
        ended.append((after.ensemble, metrics.outcomes))
    assert_close(ended[1], ended[0], rtol=1e-5, atol=1e-7)


def test_programs_that_are_queued_are_counted_before_the_first_is_compiled():
    spec, events = spec_of(settings_of()), []
    programs = Programs(spec, events.append)
    keys = [
        ProgramKey("loss", micro_batch_size=size) for size in (21, 22)
    ]  # no other test has these
    programs.prefetch([*keys, keys[0]])
    for key in [*keys, keys[0]._replace(micro_batch_size=23)]:
        programs[key]
    counts = [event for event in events if isinstance(event, Compiling)]
    assert counts == [(1, 2), (2, 2), (3, 3)]


def test_workers_in_turn_share_one_sum_of_gradients():
    settings = settings_of()
    spec = spec_of(settings)
    key = ProgramKey("steps", (4,), 2, accumulates=True)
    needs = {}
    for sequential in (False, True):
        chosen = dataclasses.replace(spec, sequential=sequential)
        sums = sharding.workers_spec(chosen, key.layout, accumulates=True).grad_sum_R["w"]
        assert sums.shape == (1 if sequential else 4, VOCAB, VOCAB)
        needs[sequential] = needed_bytes(lower(chosen, key).compile())
    assert needs[True] + 3 * spec.param_bytes <= needs[False]


def test_a_merge_in_parts_is_the_whole_one_and_deletes_what_it_replaces(monkeypatch):
    settings, key = settings_of(inner={"tx": "adamw"}), jax.random.key(1)
    spec = spec_of(settings)
    transforms = {"inner_tx": spec.inner_tx, "outer_tx": spec.outer_tx}
    params = {"w": jax.random.normal(key, (VOCAB, VOCAB))}
    ensemble = init(params, num_trainers=3, num_workers=4, **transforms)
    values = jax.tree.map(
        lambda leaf: (leaf + jnp.arange(leaf.size).reshape(leaf.shape)).astype(leaf.dtype),
        (ensemble.params_M, ensemble.inner_state_R),
    )
    ensemble = ensemble.replace(params_M=values[0], inner_state_R=values[1])
    for change, arguments in (
        (programs_module.merged, (np.array([1.0, 3.0], np.float32), (2, 0), ((2, 3), (0, 1)))),
        (programs_module.spawned, (1, 3)),
        (programs_module.taken, ((2, 0),)),
    ):
        copy = jax.tree.map(jnp.copy, ensemble)
        expected = programs_module.replace_in_parts(change, ensemble, *arguments)
        with monkeypatch.context() as patch:
            patch.setattr(programs_module, "PART_BYTES", 1)
            found = programs_module.replace_in_parts(change, copy, *arguments)
        assert_equal(found, expected)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copy.inner_state_R))


class Read(Table):
    """Rows that record which of them are read."""

    def __init__(self):
        """Records no read yet."""
        super().__init__(corpus().rows)
        object.__setattr__(self, "reads", [])

    def batch(self, *read):
        """Records the read."""
        self.reads.append(read)
        return super().batch(*read)


@pytest.mark.parametrize("changes", [False, True])
def test_rows_read_ahead_are_the_next_rounds_unless_something_changes(changes):
    settings, rows = settings_of(batching={"test": "constant"}), Read()
    spec = spec_of(settings)
    heldout = split_heldout(rows.heldout_rows, num_sequences=8, batch_size=4)
    engine = LocalEngine(settings, spec, Programs(spec), rows, heldout)
    control = start(settings.ensemble, settings.batching, 4)
    engine.look_ahead(control)
    assert len(rows.reads) == 4
    if changes:
        control = after_merge(control, (0, 1))
    plans = round_plans(control, settings)
    batch = engine.inputs(control, plans)
    assert len(rows.reads) == (8 if changes else 4)
    expected = make_round_inputs(control, plans, settings, spec, rows)
    assert_equal([batch.calls, batch.lines], [expected.calls, expected.lines])
    engine.programs.close()
