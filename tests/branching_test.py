"""Branch rounds: the choice of a batch, what goes on from it, and what the others cost."""

import math

import jax
import numpy as np
import optax
import pytest
from toy import config_of, corpus, init_fn, settings_of
from toy_runs import Signalling, assert_same_end, events, run
from train_test import Exhausted
from trees import assert_close, assert_equal

import adloco_jax
from adloco_jax.config import validate
from adloco_jax.errors import ConfigError, DataError, Preempted
from adloco_jax.loop.adloco import start
from adloco_jax.loop.branching import branch, branch_plans, branched, choose_branch
from adloco_jax.loop.control import RoundPlan
from adloco_jax.study import branch_figure
from adloco_jax.study.curves import read_run, training_points
from adloco_jax.study.summary import totals

pytestmark = pytest.mark.usefixtures("one_device")

BRANCHES = {
    "num_rounds": 4,
    "ensemble": {"num_trainers": 1, "num_workers": 2},
    "inner": {"steps_per_round": 4, "learning_rate": 0.05, "lr_on_growth": "sqrt"},
    "batching": {"test": "branch", "branch_every_rounds": 2, "batch_cap": 16},
    "switch": {"mode": "accumulate"},
}


def branch_settings(**groups):
    config = config_of(**BRANCHES)
    config.update(groups)
    return validate(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four rounds, of which the second and the fourth have branches; any loss is allowed."""
    settings = branch_settings(batching={"branch_epsilon": 9.0})
    return run(tmp_path_factory.mktemp("branches") / "r", settings)


@pytest.mark.parametrize(
    ("losses", "epsilon", "chosen"),
    [
        ((2.0, 2.0, 2.0), 0.0, 2),
        ((2.0, 2.01, 2.03), 0.02, 1),
        ((2.0, 1.9, 2.005), 0.01, 1),  # the last loses nothing against the first alone
        ((2.0, 2.05, 1.99), 0.01, 2),  # a larger batch may hold where a smaller one does not
        ((2.0, 2.05, 2.05), 0.01, 0),
        ((math.nan, 2.05, math.nan), 0.01, 1),
        ((math.nan, math.nan, math.inf), 0.01, 0),
        ((2.0, math.nan, 2.0), 0.01, 2),
    ],
)
def test_the_largest_batch_that_loses_nothing_goes_on(losses, epsilon, chosen):
    assert choose_branch(losses, epsilon=epsilon) == chosen


def test_each_branch_of_a_stack_is_the_trainer_it_comes_from():
    txs = {"inner_tx": optax.adam(0.1), "outer_tx": optax.sgd(0.7, momentum=0.9)}
    ensemble = adloco_jax.init(
        init_fn(None), num_trainers=2, num_workers=4, owner_R=[0, 1, 0, 1], **txs
    )
    leaves, tree = jax.tree.flatten(ensemble)
    own = [np.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape) for leaf in leaves]
    ensemble = jax.tree.unflatten(tree, own)
    stack = jax.jit(branch, static_argnums=(1, 2))(ensemble, 1, 3)
    assert stack.owners == (0, 0, 1, 1, 2, 2)
    for place in range(3):
        assert_equal(adloco_jax.take(stack, [place]), adloco_jax.take(ensemble, [1]))
    with pytest.raises(ValueError, match="out of range"):
        branch(ensemble, 2, 3)


@pytest.mark.parametrize(
    ("cap", "index", "batches"),
    [(16, 1, [4, 8, 16]), (15, 1, [4, 8]), (7, 1, []), (16, 0, []), (16, 3, [4, 8, 16])],
)
def test_branches_take_the_rounds_sequences_in_larger_batches_up_to_the_cap(cap, index, batches):
    settings = branch_settings(batching={"batch_cap": cap})
    control = start(settings, 4)
    control.round = index
    plans = branch_plans(control, {0: RoundPlan(2, 2, 8, 4)}, settings)
    assert [plan.micro_batch_size * plan.num_accum_steps for plan in plans] == batches
    assert {(plan.micro_batch_size, plan.num_micro_batches) for plan in plans} <= {(2, 8)}
    assert [plan.num_updates for plan in plans] == [4, 2, 1][: len(batches)]
    stack = branched(control, plans or [RoundPlan(2, 2, 8, 4)])
    assert len({id(trainer.cursors) for trainer in stack.trainers}) == len(stack.trainers)


@pytest.mark.parametrize(("epsilon", "factor"), [(9.0, 4), (0.0115, 2), (0.0, 1)])
def test_the_chosen_branch_is_a_plain_round_of_its_batch_from_the_same_point(
    tmp_path, epsilon, factor
):
    """Losses 1.7208, 1.7319, 1.7326; the plain round does not accumulate."""
    batching = {"branch_epsilon": epsilon, "branch_every_rounds": 1}
    ended = run(tmp_path / "branches", branch_settings(num_rounds=1, batching=batching))
    batch = 2 * factor
    same = {"initial_batch_size": batch, "max_batch_size": batch, "buckets": (batch,)}
    plain = settings_of(
        num_rounds=1,
        ensemble=BRANCHES["ensemble"],
        inner={"steps_per_round": 4 // factor, "learning_rate": 0.05 * math.sqrt(factor)},
        batching=same | {"test": "constant"},
    )
    expected = run(tmp_path / "plain", plain)
    for name in ("params_M", "outer_state_M", "inner_state_R"):
        pair = getattr(ended.ensemble, name), getattr(expected.ensemble, name)
        assert_close(*pair, rtol=1e-5, atol=1e-7)
    (own,), (other,) = ended.controller.trainers, expected.controller.trainers
    assert (own.cursors, own.updates) == (other.cursors, other.updates)


def test_what_the_other_branches_cost_is_in_every_total(whole):
    rounds, branches = events(whole.workdir, "round"), events(whole.workdir, "branch")
    # Batches of 2, 4 and 8; then of 8 and 16, the cap.
    assert [e["requested_batch_size"] for e in rounds] == [2, 8, 8, 16]
    assert [e["updates"] for e in rounds] == [4, 1, 4, 2]
    assert [e["updates"] for e in branches] == [4 + 2, 4]
    sequences = [4 * 2, 4 * 8]  # of a worker and branch
    assert [e["tokens"] for e in branches] == [2 * 2 * 8 * sequences[0], 2 * 8 * sequences[1]]
    assert [e["syncs"] for e in branches] == [2, 1]
    assert [e["bytes"] for e in branches] == [2 * 2 * 144, 2 * 144]
    (end,) = events(whole.workdir, "end")
    for cost in ("tokens", "updates", "syncs", "bytes"):
        assert end[f"{cost}_total"] == sum(e[cost] for e in [*rounds, *branches])
    last = training_points(read_run(whole.workdir).events)[-1]
    assert [last[cost] for cost in ("tokens", "syncs", "bytes")] == [
        end[f"{cost}_total"] for cost in ("tokens", "syncs", "bytes")
    ]
    assert totals(read_run(whole.workdir).events)["updates_total"] == end["updates_total"]
    # The statistics are recorded, and decide nothing.
    noise, signal = rounds[0]["noise"], rounds[0]["signal"]
    scale = noise / max(signal, 1e-3 * noise) / 2  # per worker
    assert rounds[0]["test_value"] == pytest.approx(scale) and rounds[3]["test_value"] > 0
    assert all(e["next_batch_size"] == e["requested_batch_size"] for e in rounds)
    rates = [e["learning_rate"] for e in rounds]
    np.testing.assert_allclose(rates, 0.05 * np.sqrt([1, 4, 4, 8]), rtol=1e-6)


def test_a_figure_has_the_branches_answers_beside_the_noise_scale(whole):
    tried = events(whole.workdir, "round") + events(whole.workdir, "branch")
    tried.sort(key=lambda e: e["round"])  # stable: a round's own line comes first
    tried[-1]["chosen"] = tried[-1]["batch_sizes"][0]
    found = branch_figure.measured(tried)
    # Rounds of 2 x 4 x 2 and 2 x 4 x 8 sequences of 8 tokens; three branches, then two.
    assert found == [
        {"tokens": 128 * 4, "passed": 16, "failed": None},
        {"tokens": 128 * 4 + 512 * 3, "passed": 16, "failed": 32},
    ]
    (ax,) = branch_figure.figure(tried).axes
    shown = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert shown["branch: loses nothing"] == [[512, 16], [2048, 16]]
    assert shown["branch: the next larger, loses"] == [[2048, 32]]
    averaged = shown["noise scale, averaged"]
    assert [x for x, _ in averaged] == [0, 128, 512, 1024]  # each at its round's start
    assert averaged[0][1] == pytest.approx(2 * tried[0]["test_value"])
    with pytest.raises(DataError, match="no branch round"):
        branch_figure.measured(events(whole.workdir, "round"))


@pytest.mark.parametrize("at_read", [1, 5])
def test_a_run_stopped_around_a_branch_round_ends_as_the_uninterrupted_one(
    tmp_path, whole, at_read
):
    settings = branch_settings(batching={"branch_epsilon": 9.0})
    with pytest.raises(Preempted):
        run(tmp_path / "r", settings, corpus=Signalling(at_read))
    assert_same_end(run(tmp_path / "r", settings), whole)


def test_branches_that_run_out_of_memory_make_the_same_updates_in_smaller_micro_batches(
    tmp_path, monkeypatch
):
    settings = branch_settings(
        num_rounds=2,
        inner={"tx": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "lr_on_growth": "linear"},
        batching={"initial_batch_size": 4, "branch_epsilon": 9.0},
    )
    plain = run(tmp_path / "plain", settings)
    Exhausted(monkeypatch, largest=2, from_call=3)  # in the second branch, which is the first to
    halved = run(tmp_path / "halved", settings)  # accumulate
    (fault,) = events(halved.workdir, "fault")
    assert (fault["round"], fault["max_batch_size"]) == (2, 2)
    names = ("requested_batch_size", "micro_batch_size", "num_accum_steps", "updates", "tokens")
    plans = [[e[name] for name in names] for e in events(halved.workdir, "round")]
    assert plans == [[4, 4, 1, 4, 256], [16, 2, 8, 1, 256]]
    costs = ("batch_sizes", "updates", "tokens", "syncs", "bytes")
    (one,), (other,) = (events(r.workdir, "branch") for r in (plain, halved))
    assert [one[name] for name in costs] == [other[name] for name in costs]
    np.testing.assert_allclose(halved.params["w"], plain.params["w"], atol=1e-5)


def test_rows_that_are_given_once_are_refused(tmp_path):
    class Sequential(type(corpus())):
        def state(self): ...
        def restore(self, state): ...
        def close(self): ...

    with pytest.raises(ConfigError, match="batching.test=branch: each branch reads the same"):
        run(tmp_path / "r", branch_settings(), corpus=Sequential(corpus().rows))
