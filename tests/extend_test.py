"""Entries that a user's config file adds: those of examples/ run through `fit`."""

import contextlib
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from toy import bigram_loss, config_of, corpus, init_fn, settings_of

from adloco_jax import (
    AGGREGATORS,
    BATCH_TESTS,
    INNER_OPTIMIZERS,
    LOGGERS,
    MERGE_POLICIES,
    OUTER_OPTIMIZERS,
    ROUND_LENGTHS,
    TRANSPORTS,
)
from adloco_jax.cli.names import load_config
from adloco_jax.config import validate
from adloco_jax.core.batching import BatchTest
from adloco_jax.errors import ConfigError
from adloco_jax.run.kept.ledger import read
from adloco_jax.settings import OPTIONS
from adloco_jax.training import fit

pytestmark = pytest.mark.usefixtures("one_device")

NAMES = "aggregator batch_test heloco merge_policy optimizers radial round_length transport".split()


@pytest.fixture(autouse=True)
def tables_as_they_were():
    with contextlib.ExitStack() as stack:
        rules = (AGGREGATORS, BATCH_TESTS, MERGE_POLICIES, ROUND_LENGTHS)
        for table in (*rules, INNER_OPTIMIZERS, OUTER_OPTIMIZERS, LOGGERS, TRANSPORTS):
            stack.enter_context(mock.patch.dict(table))
        yield


def run(workdir, settings, **others):
    functions = {"init_fn": init_fn, "loss_fn": bigram_loss, "corpus": corpus()} | others
    return fit(settings, workdir=workdir, **functions)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains(name, tmp_path):
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    own = validate(load_config(path))
    test, policy = own.batching.test, own.merge.policy
    settings = settings_of(
        num_rounds=3 if name in ("merge_policy", "round_length") else 2,
        ensemble={"num_trainers": 2 if name == "merge_policy" else 1, "num_workers": 2},
        inner={
            "tx": own.inner.tx,
            "round_length": own.inner.round_length,
            "max_steps_per_round": 12 if name == "round_length" else None,
        },
        outer={"tx": own.outer.tx, "aggregator": own.outer.aggregator},
        batching={"test": test, "test_batch_size": 8, "growth": ("batch",)},
        merge={"policy": policy, "every_rounds": 2},
        eval={"every_rounds": 9},  # at the end
        engine={"kind": own.engine.kind},
    )
    labels = {"label_params": lambda _: {"w": "matrix"}} if name == "radial" else {}
    result = run(tmp_path / "run", settings, **labels)
    assert np.isfinite(result.loss) and result.loss < 1.79  # an untrained model has log 6
    events = read(tmp_path / "run" / "ledger.jsonl")
    if test == "noise_scale":
        assert any(e["test_value"] for e in events if e["event"] == "round")
    if own.inner.round_length == "linear":
        assert [e["updates"] for e in events if e["event"] == "round"] == [3, 6, 9]
    if own.engine.kind == "memory":
        joined = [e["learner"] for e in events if e["event"] == "learner" and e["what"] == "joined"]
        assert joined == [0, 1]
    if policy == "highest_losses":
        (merge,) = (e for e in events if e["event"] == "merge")
        # the best is the representative
        assert merge["loss_before"] == sorted(merge["loss_before"])


def heloco_by_hand(update, past, momentum):
    """One tensor's corrected update by HeLoCo's formula, in float64, from the sum of the past."""
    ahead = (1 - momentum) * past
    if not ahead.any():
        return update
    length, other = np.linalg.norm(update), np.linalg.norm(ahead)
    u, v = update / length, ahead / other
    cosine, confidence = u.ravel() @ v.ravel(), length / (length + other)
    if cosine >= 0.5:
        return update
    if cosine < 0:
        return update - min(-cosine * confidence, 1) * cosine * length * v
    turned = min(0.5 * (1 - cosine) * confidence, 1)
    mixed = (1 - turned) * u + turned * v
    return length * mixed / np.linalg.norm(mixed)


def test_heloco_equals_its_formula_for_each_tensor():
    """Four rounds with updates along, across and against the momentum; one leaf stacks layers."""
    load_config(Path(__file__).parents[1] / "examples" / "heloco.py")
    tx, momentum, rng = OUTER_OPTIMIZERS["heloco"](momentum=0.6), 0.6, np.random.default_rng(0)
    like = {"embed": np.zeros((3, 4)), "layers": {"kernel": np.zeros((4, 3, 2))}}
    state, past = tx.init(like), jax.tree.map(np.copy, like)
    first = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), like)
    kinds = set()
    for sign in (1, 0.1, -1, 0.4):
        update = jax.tree.map(
            lambda leaf, sign=sign: sign * leaf + rng.normal(size=leaf.shape) / 2, first
        )
        moved, state = tx.update(jax.tree.map(np.float32, update), state)
        tensors = [(update["embed"], past["embed"], moved["embed"])]
        stacks = (tree["layers"]["kernel"] for tree in (update, past, moved))
        tensors += zip(*stacks, strict=True)
        for own, old, ours in tensors:
            right = heloco_by_hand(own, old, momentum)
            if old.any():
                angle = (own * old).sum() / np.linalg.norm(own) / np.linalg.norm(old)
                kinds.add("against" if angle < 0 else "along" if angle >= 0.5 else "across")
            old[...] = right + momentum * old  # within `past`
            np.testing.assert_allclose(ours, -(right + momentum * old), rtol=1e-4, atol=1e-5)
    assert kinds == {"against", "along", "across"}


def test_a_transport_that_nobody_has_added_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="engine.kind = 'radio': must be 'local' or 'ray' or"):
        run(tmp_path / "run", settings_of(engine={"kind": "radio"}))
    assert not (tmp_path / "run").exists()


def undefined(*_, **__):
    return missing_name  # noqa: F821


@pytest.mark.parametrize(
    ("table", "key", "entry", "fault"),
    [
        (INNER_OPTIMIZERS, "inner.tx", lambda: optax.sgd(1.0), "TypeError: .* 'beta1'$"),
        (OUTER_OPTIMIZERS, "outer.tx", undefined, r"NameError: .*extend_test.py, line \d+\)$"),
        (AGGREGATORS, "outer.aggregator", lambda d_W, s_W: d_W, "its result differs in shape"),
        (ROUND_LENGTHS, "inner.round_length", undefined, "NameError: .*'missing_name'"),
        (MERGE_POLICIES, "merge.policy", lambda trainers: (), "TypeError: .* 'width'$"),
        (BATCH_TESTS, "batching.test", BatchTest(lambda stats: 2.0), "TypeError: .* 'eta'$"),
        (BATCH_TESTS, "batching.test", BatchTest(undefined), r"NameError: .*, line \d+\)$"),
    ],
)
def test_an_entry_that_fails_is_named_in_one_line_before_the_run(
    tmp_path, table, key, entry, fault
):
    table["own"], (group, name) = entry, key.split(".")
    with pytest.raises(ConfigError, match=f"^{key} = own: {fault}") as refused:
        run(tmp_path / "r", settings_of(**{group: {name: "own"}}))
    assert "\n" not in str(refused.value) and list(tmp_path.iterdir()) == []


def test_an_entry_that_fails_within_a_run_is_named_by_its_line(tmp_path):
    def first_only(stats, *, round_index, **_):
        return [2.0, 3.0][round_index]

    BATCH_TESTS["own"] = BatchTest(first_only)
    settings = settings_of(ensemble={"num_trainers": 1, "num_workers": 1}, batching={"test": "own"})
    with pytest.raises(ConfigError, match=r"extend_test.py, line \d+: IndexError: list index"):
        run(tmp_path / "r", settings)


def test_an_error_of_on_round_reaches_the_caller_as_it_is(tmp_path):
    def stop_early(state, lines):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run(tmp_path / "r", settings_of(), on_round=stop_early)


def test_fit_takes_the_callers_optimizers_as_they_are(tmp_path):
    """AdamW and Nesterov as arguments equal AdamW and Nesterov by name and rate."""
    how = {"num_rounds": 2, "ensemble": {"num_trainers": 1, "num_workers": 2}}
    named = settings_of(**how, inner={"learning_rate": 0.05}, outer={"learning_rate": 0.6})
    free = settings_of(**how, inner={"learning_rate": OPTIONS["inner.learning_rate"].default})
    given = {
        "inner_tx": optax.adamw(0.05, weight_decay=named.inner.weight_decay),
        "outer_tx": optax.sgd(0.6, momentum=0.9, nesterov=True),
    }
    results = [run(tmp_path / "named", named), run(tmp_path / "given", free, **given)]
    jax.tree.map(np.testing.assert_array_equal, *(result.params for result in results))
    assert run(tmp_path / "given", free, **given).loss == results[1].loss  # it may be resumed


def test_an_optimizer_given_beside_options_of_another_is_refused(tmp_path):
    inner = {"tx": "sgd", "weight_decay": 0.0, "schedule": "cosine"}
    ending = {"num_rounds": None, "num_tokens": 10_000}
    config = config_of(inner=inner, outer={"learning_rate": 0.5}, **ending)
    with pytest.raises(ConfigError) as refused:
        run(tmp_path / "r", config, inner_tx=optax.lion(1e-3), outer_tx=optax.sgd(1.0))
    given = {line.partition("=")[0] for line in str(refused.value).split("\n")}
    of_inner = {f"inner_tx: given beside inner.{name}" for name in (*inner, "learning_rate")}
    assert given == {*of_inner, "outer_tx: given beside outer.learning_rate"}
    assert list(tmp_path.iterdir()) == []


def test_fit_takes_a_config_and_params_and_tells_a_logger_and_its_caller_of_each_round(tmp_path):
    config, seen, sent, closed = config_of(num_rounds=2, eval={"every_rounds": 2}), [], [], []

    @contextlib.contextmanager
    def logger(workdir, history):
        yield lambda event: sent.append((workdir, event))
        closed.append(len(sent))

    LOGGERS["mine"] = logger
    result = run(
        tmp_path / "r",
        config,
        init_fn=None,
        params=init_fn(None),
        on_round=lambda state, lines: seen.append((state, lines)),
    )
    assert [state.control.round for state, _ in seen] == [1, 2]
    kinds = ("round", "eval")
    told = [[line for line in lines if line["event"] in kinds] for _, lines in seen]
    written = [line for line in read(tmp_path / "r/ledger.jsonl") if line["event"] in kinds]
    assert [line for lines in told for line in lines] == written
    assert [event["event"] for _, event in sent].index("start") == 0
    assert [event for _, event in sent if event["event"] in kinds] == written
    assert {workdir for workdir, _ in sent} == {tmp_path / "r"} and closed == [len(sent)]
    assert {line["round"] for line in told[1]} == {2} and told[1][-1]["loss"] == result.loss
    assert repr(result).endswith(f"/r', loss {result.loss:.4f}, round 2, params: float32[6, 6])")
    assert repr(result.state).startswith("State(round 2, ")
